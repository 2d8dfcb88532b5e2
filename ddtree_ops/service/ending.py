"""How a run of a service ended: a planned stop or a crash, drained or not. Pure.

``failed`` is no evidence: sglang 0.5.11 ends itself by SIGKILL after a clean stop as well as after a crash. What
tells them apart is the stop job in systemd's half of the journal, and what the server said while it drained.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from ddtree_ops.service.journal import Entry, MessageId
from ddtree_ops.service.state import signal_name
from ddtree_ops.wording import count

__all__ = ["Drain", "Ending", "EndingKind"]

_REMAINING = re.compile(
    r"Gracefully exiting\.\.\. Remaining number of requests (\d+)(?:.*remaining_rids=(\[.*\]))?"
)
_BATCH = re.compile(r"(?:Prefill|Decode) batch, .*#running-req: (\d+)")
_STILL_POLLS = 3
_FORCED = "received while force shutdown flag set"
_LEAK = "0.5.11 never finishes draining once it refused a request at validation (over-long, bad temperature)"


class EndingKind(StrEnum):
    """How a run ended."""

    NOT_ENDED = "not ended"
    DRAINED = "stopped, drained"
    KILLED = "stopped, not drained"
    FORCED = "stopped, drain skipped by SGL_FORCE_SHUTDOWN"
    TIMED_OUT = "stop timed out"
    CRASHED = "crashed"
    EXITED = "exited by itself"
    OUT_OF_MEMORY = "killed, out of memory"


@dataclass
class Drain:
    """What a server says while it drains: feed it the lines since the stop, in order.

    0.5.11 never finishes draining once it refused a request at validation (over-long, bad temperature): the id of that
    request stays among the remaining ones for ever, and no request runs. A request that does run shows in the batch
    lines, or finishes.

    :ivar remaining: requests that it counts, None while it has not said.
    :ivar rids: their ids, as far as it names them.
    :ivar polls: how many times in a row it has named the same ones without having run a batch in between.
    :ivar batches: batch lines since the stop began.
    """

    remaining: int | None = None
    rids: tuple[str, ...] = ()
    polls: int = 0
    batches: int = 0
    _busy: bool = field(default=False, repr=False)

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Drain:
        """From the entries of one stop."""
        drain = cls()
        for entry in entries:
            if entry.source == "process":
                drain.feed(entry.message)
        return drain

    def feed(self, message: str) -> bool:
        """Take in a line of the server. True where it said how many requests remain."""
        if _BATCH.search(message):
            self.batches += 1
            self._busy = True
            return False
        match = _REMAINING.search(message)
        if match is None:
            return False
        remaining, rids = int(match.group(1)), _rids(match.group(2))
        same = (remaining, rids) == (self.remaining, self.rids)
        self.polls = self.polls + 1 if same and not self._busy else 1
        self.remaining, self.rids, self._busy = remaining, rids, False
        return True

    @property
    def leaking(self) -> bool:
        """It waits for requests that nothing works on: the leak of 0.5.11, the drain will never end."""
        return bool(self.remaining) and self.polls >= _STILL_POLLS and not self._busy

    @property
    def working(self) -> bool:
        """It waits for requests that were seen to run since the stop began."""
        return bool(self.remaining) and not self.leaking and self.batches > 0

    def describe(self) -> str:
        """One line for people."""
        if self.remaining is None:
            return "it has not said yet how many requests remain"
        if not self.remaining:
            return "drained: no request remains"
        which = count(self.remaining, "request")
        if self.leaking:
            named = f" ({', '.join(rid[:12] for rid in self.rids[:3])})" if self.rids else ""
            return (
                f"the drain loops: {which}{named} remain{'s' if self.remaining == 1 else ''} and none runs. This is the "
                "leak of 0.5.11: a request refused at validation (over-long, bad temperature) never leaves the count"
            )
        if self.working:
            return f"draining: {which} still running"
        return f"draining: {which} remaining"


def _rids(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(map(str, ast.literal_eval(text or "[]")))
    except (ValueError, SyntaxError):
        return ()


def _main_exit(code: str, status: str) -> str:
    if code in {"killed", "dumped"} and status.isdigit():
        return f"{code} by {signal_name(int(status))}"
    return f"{code} with status {status}"


@dataclass(frozen=True)
class Ending:
    """How one run ended.

    :param planned: a stop (or restart) was asked for.
    :param remaining: requests that the server still counted at its last word, or None.
    :param result: systemd's ``UNIT_RESULT`` (``signal``, ``exit-code``, ``timeout``, ``oom-kill``), or empty.
    :param exit: ``killed by SIGKILL`` or ``exited with status 1``: what systemd said of the main process, or empty.
    :param leaked: a drain that never ended waited for leaked requests (True), for running ones (False), or that
        cannot be told (None).
    """

    kind: EndingKind
    planned: bool = False
    remaining: int | None = None
    result: str = ""
    exit: str = ""
    leaked: bool | None = None

    @classmethod
    def of(cls, entries: Iterable[Entry], *, result: str = "", planned: bool = False) -> Ending:
        """From the entries of ONE invocation, both halves, in order.

        :param result: ``Result`` of the unit where it is known from systemctl and not yet in the journal.
        :param planned: a stop was under way already when the first of the entries was written.
        """
        ended = forced = out_of_memory = False
        drain = Drain()
        end = ""
        code = status = ""
        for entry in entries:
            if entry.source == "process":
                drain.feed(entry.message)
                forced = forced or _FORCED in entry.message
                continue
            if entry.message_id == MessageId.STOPPING:
                planned = planned or not ended
            elif entry.message_id == MessageId.EXITED:
                ended = True
                code, status = entry.fields.get("EXIT_CODE", ""), entry.fields.get("EXIT_STATUS", "")
                end = _main_exit(code, status)
            elif entry.message_id == MessageId.FAILED:
                ended = True
                result = entry.fields.get("UNIT_RESULT", result)
            elif entry.message_id in {MessageId.SUCCEEDED, MessageId.STOPPED}:
                ended = True
            elif entry.message_id == MessageId.OUT_OF_MEMORY:
                out_of_memory = True
        remaining = drain.remaining
        if not ended:
            return cls(EndingKind.NOT_ENDED, planned, remaining, result, end)
        if out_of_memory or result == "oom-kill":
            kind = EndingKind.OUT_OF_MEMORY
        elif planned and result == "timeout":
            kind = EndingKind.TIMED_OUT
        elif planned and forced:
            kind = EndingKind.FORCED
        elif planned:
            kind = EndingKind.DRAINED if remaining == 0 else EndingKind.KILLED
        elif result in {"", "success"} and (code, status) in {("exited", "0"), ("", "")}:
            kind = EndingKind.EXITED
        else:
            kind = EndingKind.CRASHED
        leaked = True if drain.leaking else False if drain.working else None
        return cls(kind, planned, remaining, result, end, leaked)

    @property
    def crashed(self) -> bool:
        """It ended although nobody asked for it."""
        return (
            self.kind in {EndingKind.CRASHED, EndingKind.EXITED, EndingKind.OUT_OF_MEMORY}
            and not self.planned
        )

    def _counted(self) -> str:
        many = count(self.remaining, "request") if self.remaining else "requests"
        return f"the server still counted {many}"

    def describe(self) -> str:
        """One line for people."""
        how = f" ({self.exit})" if self.exit else ""
        match self.kind:
            case EndingKind.NOT_ENDED:
                return "the run has not ended"
            case EndingKind.DRAINED:
                return f"planned stop: every request was answered first{how}; sglang ends itself by SIGKILL, no crash"
            case EndingKind.KILLED if self.leaked:
                return f"planned stop, its drain was cut short{how}: {self._counted()}, and none was running: {_LEAK}"
            case EndingKind.KILLED:
                return f"planned stop without a drain{how}: requests under way were cut off"
            case EndingKind.FORCED:
                return f"planned stop, the drain was skipped by SGL_FORCE_SHUTDOWN{how}"
            case EndingKind.TIMED_OUT:
                start = f"planned stop that ran into TimeoutStopSec: {self._counted()}"
                if self.leaked:
                    return f"{start}, and none was running: {_LEAK}"
                if self.leaked is False:
                    return f"{start}, and they were running: a longer health.stop_timeout lets them finish"
                return f"{start}. {_LEAK[0].upper()}{_LEAK[1:]}, so this may well be a leaked one"
            case EndingKind.OUT_OF_MEMORY:
                return f"killed by the kernel or systemd for want of memory{how}"
            case EndingKind.EXITED:
                return f"the server exited by itself{how}, nobody had asked for a stop"
            case EndingKind.CRASHED:
                return f"crash{how}: nobody had asked for a stop"
