"""The frame of a step: its start, end and duration are reported, and its error learns where it happened."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddtree_ops.errors import ExitCode, OpsError, heeding
from ddtree_ops.results import CheckResult, Event, EventKind, Reporter
from ddtree_ops.secret import redact

__all__ = ["Frame"]


class Frame:
    """What the steps of a run over one target have in common.

    :param host: name that events and errors carry.
    :param secrets: values that nothing reported here may show, beside those learned.
    :ivar step: name of the step under way, or of the last one.
    :ivar note: what is said at the end of the step that is under way.
    :ivar state_left: what an error says of the state that it left the host in.
    :ivar failure: the first error of a step.
    :ivar seconds: duration of each step so far.
    """

    def __init__(self, host: str, report: Reporter, *, secrets: Sequence[str] = ()) -> None:
        self.host = host
        self.report = report
        self._secrets = tuple(secrets)
        self.step = ""
        self.note = ""
        self.state_left = "nothing was changed"
        self.failure: OpsError | None = None
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str, message: str = "") -> Iterator[None]:
        """Report a step's start, end and duration; errors get the host, the phase and the state left."""
        self.note = ""
        self.step = name
        started = time.monotonic()
        self.emit(EventKind.START, name, message)
        try:
            with heeding():
                yield
        except OpsError as error:
            error.at(host=self.host, phase=name, state=self.state_left)
            error.message = self.masked(error.message)
            error.details = tuple(map(self.masked, error.details))
            self.failure = self.failure or error
            unsure = error.exit_code is ExitCode.INCONCLUSIVE
            self._done(EventKind.UNSURE if unsure else EventKind.FAIL, name, error.message, started)
            raise
        except KeyboardInterrupt:
            self._count_time(name, started)
            raise
        self._done(EventKind.DONE, name, self.note, started)

    def _done(self, kind: EventKind, name: str, message: str, started: float) -> None:
        elapsed = self._count_time(name, started)
        self.report(Event(kind, self.host, name, message, elapsed_s=elapsed))

    def _count_time(self, name: str, started: float) -> float:
        elapsed = time.monotonic() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        return elapsed

    def emit(self, kind: EventKind, step: str, message: str, fraction: float | None = None) -> None:
        """Report an event."""
        self.report(Event(kind, self.host, step, message, fraction))

    def say(self, step: str, message: str) -> None:
        """Report a note."""
        self.emit(EventKind.NOTE, step, message)

    def relay(self, event: Event) -> None:
        """Report another's event as one of this target."""
        self.report(replace(event, host=self.host))

    def masked(self, text: str) -> str:
        """``text`` without the values of secrets."""
        return redact(text, *self._secrets)

    def own(self, result: CheckResult) -> CheckResult:
        """A result as one of this target, without the values of secrets."""
        return replace(
            result,
            host=self.host,
            summary=self.masked(result.summary),
            evidence=tuple(replace(item, text=self.masked(item.text)) for item in result.evidence),
        )
