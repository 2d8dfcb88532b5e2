"""What connections of one process share: one connection to each jump host, and a gate in front of each sshd.

An sshd drops connections at random once too many have not yet said who they are (``MaxStartups 10:30:100``: from the
tenth on). So a jump host is connected once, and every host behind it is a channel of that connection; and to one
address no more than :data:`UNAUTHENTICATED` connections are opened at a time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from paramiko import Channel

__all__ = ["UNAUTHENTICATED", "Gate", "Lease", "Pool", "Tunnel"]

UNAUTHENTICATED = 6
"""Connections to one address that are not yet authenticated, at once: sshd counts some of them a moment longer."""
JITTER_S = 0.05

_T = TypeVar("_T")


class Gate:
    """Lets a limited number at a time pass to each address; those who come while others are inside start apart.

    :param limit: at once for each address.
    """

    def __init__(self, limit: int = UNAUTHENTICATED) -> None:
        self._limit = limit
        self._guard = threading.Lock()
        self._places: dict[str, tuple[threading.Semaphore, list[int]]] = {}

    @contextmanager
    def passing(self, address: str) -> Iterator[None]:
        """While a connection to ``address`` is made and authenticated."""
        with self._guard:
            semaphore, count = self._places.setdefault(address, (threading.Semaphore(self._limit), [0]))
            count[0] += 1
            alone = count[0] == 1
        try:
            with semaphore:
                if not alone:
                    time.sleep(random.uniform(0.0, JITTER_S))
                yield
        finally:
            with self._guard:
                count[0] -= 1
                if not count[0]:
                    self._places.pop(address, None)


@dataclass
class _Shared(Generic[_T]):
    """Something opened once for several. :ivar users: leases out, and those who wait for the opening."""

    future: Future[_T] = field(default_factory=Future)
    users: int = 0


class Lease(Generic[_T]):
    """A part in something shared; ``close()`` gives it back, the last one closes it for good. May be called twice."""

    def __init__(self, value: _T, give_back: Callable[[], None]) -> None:
        self.value = value
        self._give_back: Callable[[], None] | None = give_back
        self._guard = threading.Lock()

    def close(self) -> None:
        """Give the part back."""
        with self._guard:
            give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Pool(Generic[_T]):
    """Things that are opened once and shared by all who ask while one of them is held.

    :param close: ends a thing. :param alive: whether a thing can still be used; one that cannot is opened anew.
    """

    def __init__(self, *, close: Callable[[_T], None], alive: Callable[[_T], bool]) -> None:
        self._close = close
        self._alive = alive
        self._guard = threading.Lock()
        self._shared: dict[Hashable, _Shared[_T]] = {}

    def lease(self, key: Hashable, opener: Callable[[], _T]) -> Lease[_T]:
        """A part in the thing of ``key``, opened by ``opener`` if nobody holds it.

        Those who ask while it is being opened wait for it; where that fails they all get the same exception, and
        whoever asks later tries again.
        """
        with self._guard:
            shared = self._shared.get(key)
            if shared is not None and shared.future.done() and not self._alive(shared.future.result()):
                shared = None
            mine = shared is None
            if shared is None:
                shared = self._shared[key] = _Shared()
            shared.users += 1
        if mine:
            self._open(key, shared, opener)
        value = shared.future.result()
        return Lease(value, lambda: self._give_back(key, shared, value))

    def _open(self, key: Hashable, shared: _Shared[_T], opener: Callable[[], _T]) -> None:
        try:
            value = opener()
        except BaseException as error:
            with self._guard:
                if self._shared.get(key) is shared:
                    del self._shared[key]
            shared.future.set_exception(error)
        else:
            shared.future.set_result(value)

    def _give_back(self, key: Hashable, shared: _Shared[_T], value: _T) -> None:
        with self._guard:
            shared.users -= 1
            last = not shared.users
            if last and self._shared.get(key) is shared:
                del self._shared[key]
        if last:
            self._close(value)


class Tunnel:
    """A channel through a jump host as the socket of the connection behind it.

    Paramiko may still send data from one thread while another closes the channel; sshd then ends the whole connection
    ("data packet referred to nonexistent channel"), which here is that of all hosts behind it. So nothing is sent
    once the far end has said that it ends, and closing waits for what is being sent.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._guard = threading.Lock()
        self._closed = False

    def settimeout(self, timeout: float | None) -> None:
        """Seconds that ``send`` and ``recv`` may take."""
        self._channel.settimeout(timeout)

    def send(self, data: bytes) -> int:
        """Send some of ``data``; returns how much. :raises OSError: it is closed. :raises TimeoutError: not in time."""
        with self._guard:
            if self._closed or self._channel.eof_received:
                raise OSError("the tunnel is closed")
            return self._channel.send(data)

    def recv(self, size: int) -> bytes:
        """Some bytes, none at the end. :raises TimeoutError: not in time."""
        return self._channel.recv(size)

    def close(self) -> None:
        """Close it. May be called twice, and after the jump host has gone."""
        with self._guard:
            if not self._closed:
                self._closed = True
                with suppress(OSError, EOFError):
                    self._channel.close()
