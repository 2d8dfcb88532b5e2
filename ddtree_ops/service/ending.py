"""How a run of a service ended: a planned stop or a crash, drained or not. Pure.

``failed`` is no evidence: sglang 0.5.11 ends itself by SIGKILL after a clean stop as well as after a crash. What
tells them apart is the stop job in systemd's half of the journal, and what the server said while it drained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ddtree_ops.service.journal import Entry, MessageId
from ddtree_ops.service.state import signal_name

__all__ = ["Ending", "EndingKind"]

_REMAINING = re.compile(r"Gracefully exiting\.\.\. Remaining number of requests (\d+)")
_FORCED = "received while force shutdown flag set"


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
    """

    kind: EndingKind
    planned: bool = False
    remaining: int | None = None
    result: str = ""
    exit: str = ""

    @classmethod
    def of(cls, entries: Iterable[Entry], *, result: str = "") -> Ending:
        """From the entries of ONE invocation, both halves, in order.

        :param result: ``Result`` of the unit where it is known from systemctl and not yet in the journal.
        """
        planned = ended = forced = out_of_memory = False
        remaining: int | None = None
        end = ""
        code = status = ""
        for entry in entries:
            if entry.source == "process":
                match = _REMAINING.search(entry.message)
                if match:
                    remaining = int(match.group(1))
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
        return cls(kind, planned, remaining, result, end)

    @property
    def crashed(self) -> bool:
        """It ended although nobody asked for it."""
        return (
            self.kind in {EndingKind.CRASHED, EndingKind.EXITED, EndingKind.OUT_OF_MEMORY}
            and not self.planned
        )

    def describe(self) -> str:
        """One line for people."""
        how = f" ({self.exit})" if self.exit else ""
        match self.kind:
            case EndingKind.NOT_ENDED:
                return "the run has not ended"
            case EndingKind.DRAINED:
                return f"planned stop: every request was answered first{how}; sglang ends itself by SIGKILL, no crash"
            case EndingKind.KILLED:
                return f"planned stop without a drain{how}: requests under way were cut off"
            case EndingKind.FORCED:
                return f"planned stop, the drain was skipped by SGL_FORCE_SHUTDOWN{how}"
            case EndingKind.TIMED_OUT:
                left = (
                    f"{self.remaining} request{'' if self.remaining == 1 else 's'}"
                    if self.remaining
                    else "requests"
                )
                return (
                    f"planned stop that ran into TimeoutStopSec: the server still counted {left}. 0.5.11 never finishes "
                    "draining once it refused a request at validation (over-long, bad temperature), so this may well "
                    "be a leaked one"
                )
            case EndingKind.OUT_OF_MEMORY:
                return f"killed by the kernel or systemd for want of memory{how}"
            case EndingKind.EXITED:
                return f"the server exited by itself{how}, nobody had asked for a stop"
            case EndingKind.CRASHED:
                return f"crash{how}: nobody had asked for a stop"
