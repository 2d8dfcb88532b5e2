"""State of a systemd unit, parsed from ``systemctl show``. Pure."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

__all__ = ["PROPERTIES", "UnitState", "parse_show", "parse_span", "signal_name"]

PROPERTIES: tuple[str, ...] = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "ExecMainStatus",
    "ExecMainCode",
    "ExecMainPID",
    "MainPID",
    "InvocationID",
    "NRestarts",
    "ExecMainStartTimestamp",
    "ActiveEnterTimestamp",
    "InactiveEnterTimestamp",
    "StateChangeTimestamp",
    "UnitFileState",
    "FragmentPath",
    "DropInPaths",
    "NeedDaemonReload",
    "ControlGroup",
    "MemoryCurrent",
    "TasksCurrent",
    "Job",
)
"""What is asked of ``systemctl show``."""

_UNSET = 2**64 - 1
_KILLED, _DUMPED = 2, 3
_EXIT_NAMES = {
    1: "an exception that ended the process",
    2: "the command line was refused (argparse)",
    3: "the HTTP server could not start (port taken?)",
    200: "CHDIR: the working directory is missing",
    203: "EXEC: the venv's python is missing or cannot be run",
    209: "STDOUT: output could not be connected to the journal",
    216: "GROUP: no such group",
    217: "USER: no such user",
}


def parse_show(text: str) -> dict[str, str]:
    """``NAME=VALUE`` lines of ``systemctl show``; a line without ``=`` continues the value before it."""
    found: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and name.isalnum():
            found[name] = value
            last = name
        elif last:
            found[last] += f"\n{line}"
    return found


def _integer(value: str | None) -> int | None:
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        return None
    return None if number == _UNSET else number


def _time(value: str | None) -> datetime | None:
    """A time as systemctl prints it under ``TZ=UTC``, or ``@epoch``; None for never and for other zones."""
    if not value:
        return None
    if value.startswith("@"):
        try:
            return datetime.fromtimestamp(float(value[1:]), UTC)
        except ValueError:
            return None
    words = value.split()
    if len(words) == 4 and words[3] in {"UTC", "GMT"}:
        try:
            return datetime.fromisoformat(f"{words[1]}T{words[2]}").replace(tzinfo=UTC)
        except ValueError:
            return None
    return None


_SPAN_UNITS = {
    "y": 31557600.0,
    "month": 2629800.0,
    "w": 604800.0,
    "d": 86400.0,
    "h": 3600.0,
    "min": 60.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
}


def parse_span(text: str) -> float:
    """Seconds from a span as systemctl prints it (``1min 30s``); ``infinity`` is ``math.inf``.

    :raises ValueError: for anything else.
    """
    if text == "infinity":
        return math.inf
    if text == "0":
        return 0.0
    total = 0.0
    for word in text.split():
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", word)
        if match is None or match.group(2) not in _SPAN_UNITS:
            raise ValueError(f"{text!r} is not a time span of systemd")
        total += float(match.group(1)) * _SPAN_UNITS[match.group(2)]
    if not text.split():
        raise ValueError("an empty time span")
    return total


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal N`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class UnitState:
    """One sample of a unit. Times are UTC with whole seconds, sizes bytes; None: systemd did not say.

    :param drop_in_paths: drop-ins that systemd has read; ``unread_drop_ins``: those that the next daemon-reload makes
        it read, where somebody looked.
    """

    id: str
    load_state: str
    active_state: str
    sub_state: str
    result: str
    exec_main_status: int | None
    exec_main_code: int | None
    exec_main_pid: int | None
    main_pid: int | None
    invocation_id: str
    n_restarts: int
    exec_main_start: datetime | None
    active_enter: datetime | None
    inactive_enter: datetime | None
    state_change: datetime | None
    unit_file_state: str
    fragment_path: str
    drop_in_paths: tuple[str, ...]
    need_daemon_reload: bool
    control_group: str
    memory_current: int | None
    tasks_current: int | None
    job: int | None
    unread_drop_ins: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, mapping: Mapping[str, str]) -> UnitState:
        """From the properties named in :data:`PROPERTIES`.

        :raises ValueError: where ``ActiveState`` or ``LoadState`` is missing: that is no answer of systemd.
        """
        for name in ("LoadState", "ActiveState"):
            if not mapping.get(name):
                raise ValueError(f"systemctl show gave no {name}")
        return cls(
            id=mapping.get("Id", ""),
            load_state=mapping["LoadState"],
            active_state=mapping["ActiveState"],
            sub_state=mapping.get("SubState", ""),
            result=mapping.get("Result", ""),
            exec_main_status=_integer(mapping.get("ExecMainStatus")),
            exec_main_code=_integer(mapping.get("ExecMainCode")),
            exec_main_pid=_integer(mapping.get("ExecMainPID")) or None,
            main_pid=_integer(mapping.get("MainPID")) or None,
            invocation_id=mapping.get("InvocationID", ""),
            n_restarts=_integer(mapping.get("NRestarts")) or 0,
            exec_main_start=_time(mapping.get("ExecMainStartTimestamp")),
            active_enter=_time(mapping.get("ActiveEnterTimestamp")),
            inactive_enter=_time(mapping.get("InactiveEnterTimestamp")),
            state_change=_time(mapping.get("StateChangeTimestamp")),
            unit_file_state=mapping.get("UnitFileState", ""),
            fragment_path=mapping.get("FragmentPath", ""),
            drop_in_paths=tuple(mapping.get("DropInPaths", "").split()),
            need_daemon_reload=mapping.get("NeedDaemonReload") == "yes",
            control_group=mapping.get("ControlGroup", ""),
            memory_current=_integer(mapping.get("MemoryCurrent")),
            tasks_current=_integer(mapping.get("TasksCurrent")),
            job=_integer(mapping.get("Job")) or None,
            unread_drop_ins=tuple(mapping.get("DropInsUnread", "").splitlines()),
            properties=dict(mapping),
        )

    @property
    def exists(self) -> bool:
        """systemd knows the unit. A missing one still answers, with ``LoadState=not-found`` and exit status 0."""
        return self.load_state not in {"not-found", ""}

    @property
    def loaded(self) -> bool:
        """The unit file could be read and holds no fatal mistake."""
        return self.load_state == "loaded"

    @property
    def running(self) -> bool:
        """``active (running)``: a process is there. Not yet healthy."""
        return self.active_state == "active" and self.sub_state == "running"

    @property
    def auto_restarting(self) -> bool:
        """Died and waiting for ``RestartSec``: a failure, though ``ActiveState`` says ``activating``."""
        return self.sub_state.startswith("auto-restart")

    @property
    def starting(self) -> bool:
        """On its way up for the first time (not between two crashes)."""
        return self.active_state == "activating" and not self.auto_restarting

    @property
    def stopping(self) -> bool:
        """On its way down."""
        return self.active_state == "deactivating"

    @property
    def failed(self) -> bool:
        """``failed``. A clean stop of sglang ends so too: see :class:`ddtree_ops.service.ending.Ending`."""
        return self.active_state == "failed"

    @property
    def start_limit_hit(self) -> bool:
        """systemd refuses further starts until ``reset-failed``."""
        return self.result == "start-limit-hit"

    @property
    def main_exit(self) -> str:
        """How the last main process ended, for people: empty while one runs or none ever did."""
        if self.main_pid is not None or not self.exec_main_code:
            return ""
        status = self.exec_main_status or 0
        if self.exec_main_code in (_KILLED, _DUMPED):
            name = signal_name(status)
            dumped = ", core dumped" if self.exec_main_code == _DUMPED else ""
            if self.result == "oom-kill":
                return f"killed by {name} ({status}): out of memory (systemd reports oom-kill)"
            if status == signal.SIGKILL and not dumped:
                return f"killed by {name} ({status}), as sglang ends itself"
            return f"killed by {name} ({status}){dumped}"
        meaning = _EXIT_NAMES.get(status, "")
        return f"exit status {status}" + (f" ({meaning})" if meaning else "")

    def describe(self) -> str:
        """One line for people."""
        name = self.id or "unit"
        if not self.exists:
            return f"{name} does not exist on this host"
        if self.load_state == "masked":
            return f"{name} is masked"
        if not self.loaded:
            return f"{name} cannot be loaded ({self.load_state}): see systemctl status and systemd-analyze verify"
        text = f"{name} is {self.active_state} ({self.sub_state})"
        if self.result not in {"", "success"}:
            text += f", result {self.result}"
        if self.main_pid is not None:
            text += f", main PID {self.main_pid}"
        if self.main_exit:
            text += f", {self.main_exit}"
        if self.n_restarts:
            text += f", restarted {self.n_restarts} time{'s' if self.n_restarts > 1 else ''} by systemd"
        if self.start_limit_hit:
            text += "; systemd refuses to start it again until reset-failed"
        if self.need_daemon_reload:
            text += "; its file changed on disk (daemon-reload needed)"
        return text

    def stable_against(self, earlier: UnitState) -> str | None:
        """None where this sample and an ``earlier`` one show the same running process, else the reason they do not."""
        if not self.running:
            return self.describe()
        if not earlier.running:
            return f"was not running before: {earlier.describe()}"
        for what, before, now in (
            ("NRestarts", earlier.n_restarts, self.n_restarts),
            ("InvocationID", earlier.invocation_id, self.invocation_id),
            ("MainPID", earlier.main_pid, self.main_pid),
        ):
            if before != now:
                return f"{what} changed from {before} to {now}: the service was restarted in between"
        return None
