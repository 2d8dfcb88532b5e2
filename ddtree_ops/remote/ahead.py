"""Sessions opened ahead of need: hosts are connected while this process still loads what it will do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from ddtree_ops.remote.session import Session

__all__ = ["Ahead"]


class Ahead:
    """One session a host, opened in the background; a context manager that closes what nobody took.

    :param openers: host name -> how to connect.
    :param first: hosts that are connected now, each in a thread of its own; the others when they are asked for.
    :param parallel: connections under way at once.
    """

    def __init__(
        self, openers: Mapping[str, Callable[[], Session]], first: Iterable[str], *, parallel: int
    ) -> None:
        self._openers = openers
        self._pool = ThreadPoolExecutor(max_workers=parallel, thread_name_prefix="connect")
        self._futures: dict[str, Future[Session]] = {name: self._pool.submit(openers[name]) for name in first}

    def take(self, host: str) -> Session:
        """The session of a host, from now on the caller's to close. Waits for it.

        :raises UnreachableError: as connecting did.
        """
        future = self._futures.pop(host, None)
        return self._openers[host]() if future is None else future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for future in self._futures.values():
            if not future.cancel():
                future.add_done_callback(_close)
        self._pool.shutdown(wait=False)


def _close(future: Future[Session]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
