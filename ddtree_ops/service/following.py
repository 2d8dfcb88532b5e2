"""Several journals at once: merged by time, and followed over cut connections, restarts of the unit and of the host."""

from __future__ import annotations

import heapq
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, Full, Queue
from types import TracebackType
from typing import Self, TypeVar

from ddtree_ops.errors import HostKeyError, Interrupted, OpsError, RemoteError, SudoError, UnreachableError
from ddtree_ops.remote.session import Session
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.journal import Entry

__all__ = ["FollowAll", "Place", "describe_clocks", "merged"]

_T = TypeVar("_T")
_OLDEST = datetime(1, 1, 1, tzinfo=UTC)

SAME_CLOCK = 1.0
"""Seconds by which clocks may differ before it is said: the measured skew holds the way's delay too."""
_FULL = 2000
_LOOK = 0.2
_SETTLE = 0.1
_PROVEN = 1.0
_FIRST_WAIT, _LONGEST_WAIT, _LAST_WAIT = 0.5, 30.0, 2.0


def merged(
    sources: Sequence[Iterable[_T]], time_of: Callable[[_T], datetime | None]
) -> Iterator[tuple[int, _T]]:
    """Items of several sources by time, each with the number of its source. Memory: one item a source.

    The order within a source is never changed: an item without a time, or with one before its predecessor's (a clock
    that was set back), counts as written at the time of the latest before it. Of equal times the first source's come
    first. Sources are read only as far as what is taken.
    """

    def keyed(number: int, source: Iterable[_T]) -> Iterator[tuple[datetime, int, int, _T]]:
        latest = _OLDEST
        for place, item in enumerate(source):
            moment = time_of(item)
            if moment is not None and moment > latest:
                latest = moment
            yield latest, number, place, item

    streams = [keyed(number, source) for number, source in enumerate(sources)]
    for _, number, _, item in heapq.merge(*streams, key=lambda each: each[:3]):
        yield number, item


def describe_clocks(skews: Mapping[str, float]) -> str:
    """One line where the clocks of hosts differ by more than :data:`SAME_CLOCK`; else empty.

    :param skews: seconds that a host's clock is ahead of ours (``clock_skew_s`` of a session's facts).
    """
    if len(skews) < 2:
        return ""
    slow, fast = min(skews, key=lambda name: skews[name]), max(skews, key=lambda name: skews[name])
    apart = skews[fast] - skews[slow]
    if apart < SAME_CLOCK:
        return ""
    return (
        f"clocks differ: {fast} is {apart:.1f} s ahead of {slow}; each entry has its own host's time, "
        "and that is what they are merged by"
    )


@dataclass
class Place:
    """A unit's journal and how far it was read.

    :param open: makes a session with the host, new ones after a cut too.
    :param cursor: the last entry read; ``known`` as of :attr:`~ddtree_ops.service.control.JournalFollower.place`.
        None: nothing was read, and the host's journal was empty.
    """

    name: str
    unit: str
    open: Callable[[], AbstractContextManager[Session]]
    cursor: str | None = None
    known: frozenset[str] = frozenset()
    kernel: bool = False


class FollowAll:
    """New entries of several units, in the order in which they come; those that come together by time.

    A connection that is cut is said once (``note``), opened again after growing pauses (at most 30 s), and goes on
    behind the last entry: none is lost, none comes twice. A host whose key changed, or that refuses sudo, is given up;
    all else is tried for ever. A context manager; leaving it ends the journalctl processes on the hosts.

    :param note: called with one line for people, in the thread that takes the entries.
    :ivar failed: errors of the hosts that were given up.
    """

    def __init__(self, places: Sequence[Place], note: Callable[[str], None]) -> None:
        self.failed: list[OpsError] = []
        self._note = note
        self._stop = threading.Event()
        self._queue: Queue[tuple[int, Entry | _Said]] = Queue(_FULL)
        self._followers = [
            _Follower(number, place, self._queue, self._stop) for number, place in enumerate(places)
        ]

    def __enter__(self) -> Self:
        for follower in self._followers:
            follower.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop.set()
        ends = time.monotonic() + _LAST_WAIT
        for follower in self._followers:
            follower.join(max(0.0, ends - time.monotonic()))

    def get(self, timeout: float) -> list[tuple[int, Entry]] | None:
        """Entries that came, each with the number of its place; empty after ``timeout`` seconds without one.

        None: no follower is left, all were given up.
        """
        gone = not any(follower.is_alive() for follower in self._followers)
        try:
            batch = [self._queue.get(timeout=0.0 if gone else timeout)]
        except Empty:
            return None if gone else []
        settled = time.monotonic() + (_SETTLE if len(self._followers) > 1 else 0.0)
        while len(batch) < _FULL:
            try:
                batch.append(self._queue.get(timeout=max(0.0, settled - time.monotonic())))
            except Empty:
                break
        entries: list[list[Entry]] = [[] for _ in self._followers]
        for number, item in batch:
            if isinstance(item, Entry):
                entries[number].append(item)
                continue
            if item.error is not None:
                self.failed.append(item.error)
            self._note(item.text)
        return list(merged(entries, lambda entry: entry.time))


@dataclass(frozen=True)
class _Said:
    """What a follower has to say in between; with an error it was the last."""

    text: str
    error: OpsError | None = None


class _Follower(threading.Thread):
    """One host's part of :class:`FollowAll`."""

    def __init__(
        self, number: int, place: Place, queue: Queue[tuple[int, Entry | _Said]], stop: threading.Event
    ) -> None:
        super().__init__(name=f"follow-{place.name}", daemon=True)
        self._number = number
        self._place = place
        self._queue = queue
        self._stop_asked = stop
        self._cut_at: float | None = None

    def run(self) -> None:
        name = self._place.name
        try:
            while not self._stop_asked.is_set():
                self._follow()
        except Interrupted:
            return
        except Exception as problem:
            error = (
                problem
                if isinstance(problem, OpsError)
                else OpsError(f"internal error: {type(problem).__name__}: {problem}")
            ).at(host=name, phase="follow")
            with suppress(Interrupted):
                self._put(_Said(f"{name}: no longer followed: {error.message}", error))

    def _put(self, item: Entry | _Said) -> None:
        while not self._stop_asked.is_set():
            with suppress(Full):
                self._queue.put((self._number, item), timeout=_LOOK)
                return
        raise Interrupted("nobody takes entries any more")

    def _follow(self) -> None:
        """Until a connection that had held is cut; those that do not hold are tried again, after growing pauses."""
        from tenacity import Retrying, retry_if_exception, sleep_using_event, stop_when_event_set
        from tenacity import wait_random_exponential as growing

        Retrying(
            retry=retry_if_exception(_is_cut),
            wait=growing(multiplier=2 * _FIRST_WAIT, max=_LONGEST_WAIT),
            stop=stop_when_event_set(self._stop_asked),
            sleep=sleep_using_event(self._stop_asked),
            reraise=True,
        )(self._connection)

    def _connection(self) -> None:
        began, held = time.monotonic(), False
        try:
            with self._place.open() as session:
                for came in self._entries(session):
                    if not held and (came or time.monotonic() - began > _PROVEN):
                        held = True
                        self._tell_again()
                    for entry in came:
                        self._put(entry)
        except OpsError as error:
            if not _is_cut(error):
                raise
            if self._cut_at is None:
                self._cut_at = time.monotonic()
                why = re.sub(r" \(during \w+\)$", "", error.message)
                self._put(_Said(f"{self._place.name}: {why}; connecting again, nothing will be missing"))
            if not held:
                raise
            self._stop_asked.wait(_FIRST_WAIT)

    def _tell_again(self) -> None:
        if self._cut_at is not None:
            took = time.monotonic() - self._cut_at
            self._cut_at = None
            self._put(_Said(f"{self._place.name}: connected again after {took:.1f} s"))

    def _entries(self, session: Session) -> Iterator[list[Entry]]:
        """Entries behind the last one, as they come; an empty list now and then. Ends only where it is to stop."""
        place = self._place
        control = UnitControl(session, place.unit)
        with control.follow(
            invocation="all", after_cursor=place.cursor, known=place.known, kernel=place.kernel
        ) as follower:
            while not self._stop_asked.is_set():
                came = follower.get(_LOOK)
                place.cursor, place.known = follower.place
                yield came
                if follower.ended:
                    raise RemoteError("journalctl ended", host=session.host, phase="follow")


def _is_cut(error: BaseException) -> bool:
    """Whether trying again may help."""
    if isinstance(error, HostKeyError | SudoError):
        return False
    return isinstance(error, UnreachableError | RemoteError)
