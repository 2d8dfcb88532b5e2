"""When is a started service ready, dead, or taking too long? A pure state machine.

It is fed what was seen (unit state, journal lines, HTTP answers, ticks), each with the monotonic time of seeing it, and
says what follows. Rules:

* A failed, stopped or missing unit, ``auto-restart``, a growing ``NRestarts``, another ``InvocationID`` or another main
  process is a failure at once. ``activating`` is not running, and "started" is not ready.
* Ready is: the unit is active/running AND this invocation said that it is fired up, or ``/health`` answered 200.
  ``/v1/models`` never counts. Whether the port belongs to the unit is for the caller to verify on top: an sglang that
  lost its port to another one also says that it is fired up.
* The time-out follows progress: the stall clock restarts with every new phase, shard, graph, log line of substance (one
  not seen before, numbers apart; access lines never) and with disk reads. The load clock never restarts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ddtree_ops.diagnose.events import LOADING, Phase, PhaseKind, parse_phase, parse_prefix
from ddtree_ops.diagnose.lines import clean
from ddtree_ops.service.state import UnitState

__all__ = [
    "PHASES",
    "Failed",
    "FailureKind",
    "Outcome",
    "Readiness",
    "Ready",
    "TimedOut",
    "Waiting",
    "duration",
]

PHASES: Final = ("start", "init", "weights", "kv-cache", "graphs", "drafter", "warm-up", "fired-up")
"""Phases of a load, in order. ``drafter`` holds everything the drafter loads and captures after the target."""

_LABELS: Final[Mapping[str, str]] = {
    "start": "starting",
    "init": "setting up",
    "weights": "weights",
    "kv-cache": "KV cache",
    "graphs": "graph capture",
    "drafter": "drafter",
    "warm-up": "warm-up",
    "fired-up": "fired up",
}
_SPANS: Final[Mapping[str, tuple[float, float]]] = {
    "start": (0.0, 0.01),
    "init": (0.02, 0.04),
    "weights": (0.05, 0.80),
    "kv-cache": (0.81, 0.82),
    "graphs": (0.82, 0.92),
    "drafter": (0.92, 0.95),
    "warm-up": (0.96, 0.98),
    "fired-up": (0.99, 0.99),
}
READ_STEP: Final = 1 << 20
"""Bytes that must have been read from disk between two ticks to count as progress (1 MiB)."""
DEATH_GRACE: Final = 10.0
"""Seconds a unit may stay up after its engine said that it is dying."""

FailureKind = Literal["unit", "crash-loop", "restarted", "not-found", "stopped", "port", "dying"]


@dataclass(frozen=True)
class Waiting:
    """Nothing is decided yet."""


@dataclass(frozen=True)
class Ready:
    """The service says it is ready; ``evidence`` is the line or answer that said so."""

    evidence: str


@dataclass(frozen=True)
class Failed:
    """The service will not become ready. Never taken back."""

    reason: str
    kind: FailureKind


@dataclass(frozen=True)
class TimedOut:
    """Not ready in time: ``stall`` is silence, ``load`` the hard limit. Never taken back."""

    reason: str
    kind: Literal["load", "stall"]


Outcome = Waiting | Ready | Failed | TimedOut

_PHASE_OF: Final[Mapping[PhaseKind, str]] = {
    PhaseKind.ARGUMENTS: "init",
    PhaseKind.DISTRIBUTED: "init",
    PhaseKind.DRAFT_READY: "drafter",
    **LOADING,
    PhaseKind.READY: "fired-up",
}
_PORT = re.compile(r"\[Errno 98\] error while attempting to bind on address.*")
_ACCESS = re.compile(r'INFO:\s+\S+ - "[A-Z]+ \S+ HTTP/')
_NODE_UP = re.compile(r"Dummy health check server started in background thread at \S+")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SEEN_LIMIT: Final = 20_000


def duration(seconds: float) -> str:
    """``4s``, ``3m12s``, ``1h02m``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Readiness:
    """The state machine. All times are seconds of one monotonic clock.

    :param load_timeout: longest load accepted, whatever the progress.
    :param stall_timeout: longest time without any progress.
    :param started_at: when the wait began.
    :param invocation: the ``InvocationID`` to wait for; left out, the first one seen.
    """

    def __init__(
        self, load_timeout: float, stall_timeout: float, started_at: float, invocation: str | None = None
    ) -> None:
        self.load_timeout = load_timeout
        self.stall_timeout = stall_timeout
        self.started_at = started_at
        self.invocation = invocation or ""
        self.main_pid = 0
        self.restarts: int | None = None
        self.active = False
        self.lines = 0
        self.shards: tuple[int, int] | None = None
        self.graphs: tuple[int, int] | None = None
        self.progress_at = started_at
        self.read_bytes = 0
        self._now = started_at
        self._entered: dict[str, float] = {"start": started_at}
        self._phase = "start"
        self._fraction = 0.0
        self._seen: set[str] = set()
        self._ready = ""
        self._dying: tuple[str, float] | None = None
        self._final: Failed | TimedOut | None = None
        self._drafter = False

    @property
    def phase(self) -> str:
        """The phase reached, one of :data:`PHASES`; never goes back."""
        return self._phase

    @property
    def fraction(self) -> float:
        """Estimate of how much of the load is done, 0..1; never goes back. The weights dominate."""
        return self._fraction

    @property
    def http_possible(self) -> bool:
        """True once the HTTP port could be open: the weights are in, or the journal tells nothing at all for 30 s."""
        beyond = PHASES.index(self._phase) >= PHASES.index("kv-cache")
        return beyond or (self.active and not self.lines and self._now - self.started_at >= 30.0)

    def phase_seconds(self) -> dict[str, float]:
        """Seconds spent in each phase that was entered, in order; the last one until now."""
        names = [name for name in PHASES if name in self._entered]
        ends = [self._entered[name] for name in names[1:]] + [self._now]
        return {name: round(end - self._entered[name], 3) for name, end in zip(names, ends, strict=True)}

    def describe(self) -> str:
        """One line for people: ``weights 29/64 (45 %), 3m12s``."""
        text = _LABELS[self._phase]
        count = {"weights": self.shards, "drafter": self.graphs, "graphs": self.graphs}.get(self._phase)
        if count and count[1]:
            text += f" {count[0]}/{count[1]} ({100 * count[0] // count[1]} %)"
        return f"{text}, {duration(self._now - self.started_at)}"

    def _progress(self, now: float) -> None:
        self.progress_at = max(self.progress_at, now)

    def _enter(self, phase: str, now: float) -> None:
        if PHASES.index(phase) > PHASES.index(self._phase):
            self._phase = phase
            self._entered[phase] = now
            self._progress(now)
        self._estimate()

    def _estimate(self) -> None:
        low, high = _SPANS[self._phase]
        count = {"weights": self.shards, "graphs": self.graphs}.get(self._phase)
        share = count[0] / count[1] if count and count[1] else 0.0
        self._fraction = max(self._fraction, low + (high - low) * min(1.0, share))

    @property
    def last_words(self) -> str:
        """What the engine said about its own death, or empty."""
        return self._dying[0] if self._dying else ""

    def _fail(self, reason: str, kind: FailureKind) -> None:
        if not isinstance(self._final, Failed):
            self._final = Failed(reason, kind)

    def feed_unit(self, state: UnitState | Mapping[str, str], now: float) -> None:
        """Take a sample of the unit (or the properties of ``systemctl show``).

        :raises ValueError: properties that are no answer of systemd.
        """
        self._now = max(self._now, now)
        unit = state if isinstance(state, UnitState) else UnitState.parse(state)
        self.invocation = self.invocation or unit.invocation_id
        failure = self._judge_unit(unit)
        if failure is not None:
            self.active = False
            self._fail(*failure)
            return
        self.restarts = unit.n_restarts
        self.main_pid = unit.main_pid or self.main_pid
        if unit.running and not self.active:
            self._progress(now)
        self.active = unit.running

    def _judge_unit(self, unit: UnitState) -> tuple[str, FailureKind] | None:
        text = unit.describe()
        if not unit.loaded:
            return text, "not-found"
        if unit.auto_restarting or (self.restarts is not None and unit.n_restarts > self.restarts):
            return f"died, and systemd starts it again: {text}", "crash-loop"
        if unit.failed:
            return text, "unit"
        if unit.stopping or unit.active_state == "inactive":
            return text, "stopped"
        if self.invocation and unit.invocation_id and unit.invocation_id != self.invocation:
            return f"started anew, InvocationID is not {self.invocation} any more: {text}", "restarted"
        if unit.active_state == "active" and not unit.running:
            return f"no process is running: {text}", "unit"
        if self.main_pid and unit.main_pid != self.main_pid:
            return f"main process {self.main_pid} is gone: {text}", "restarted" if unit.main_pid else "unit"
        return None

    def feed_line(self, text: str, now: float) -> None:
        """Take one journal message of this invocation (progress bars and several lines are fine)."""
        self._now = max(self._now, now)
        for raw in text.split("\n"):
            for line in clean(raw.rstrip("\r")):
                if line.strip():
                    self._feed_line(line, now)

    def _feed_line(self, text: str, now: float) -> None:
        self.lines += 1
        if _ACCESS.search(text):
            return None
        if port := _PORT.search(text):
            return self._fail(f"the port is taken by another process: {port[0]}", "port")
        if up := _NODE_UP.search(text):
            self._enter("fired-up", now)
            self._ready = self._ready or up[0]
        phase = parse_phase(text)
        if phase is not None:
            self._feed_phase(phase, now)
            if phase.total:
                return None
        prefix = parse_prefix(text)
        key = _NUMBER.sub("#", prefix.body if prefix else text)[:160]
        if key not in self._seen and len(self._seen) < _SEEN_LIMIT:
            self._seen.add(key)
            self._progress(now)
        return None

    def _feed_phase(self, phase: Phase, now: float) -> None:
        if phase.kind is PhaseKind.FAILED:
            self._dying = self._dying or (phase.message, now)
        name = _PHASE_OF.get(phase.kind)
        if name is None:
            return
        if name == "weights" and PHASES.index(self._phase) > PHASES.index("weights") and not self._drafter:
            self._drafter = True
            self.graphs = None
        if self._drafter and name in {"weights", "kv-cache", "graphs"}:
            name = "drafter"
        self._enter(name, now)
        if phase.kind is PhaseKind.READY:
            self._ready = self._ready or phase.message
        count = (phase.done, phase.total) if phase.total else None
        if count and phase.kind is PhaseKind.GRAPH and count != self.graphs:
            self.graphs = count
            self._progress(now)
        elif count and name == "weights" and (self.shards is None or count > self.shards):
            self.shards = count
            self._progress(now)
        self._estimate()

    def feed_http(self, endpoint: str, status: int | None, now: float) -> None:
        """Take an answer; ``status`` is None where nothing listens. Only the health endpoints say anything."""
        self._now = max(self._now, now)
        if endpoint not in {"/health", "/health_generate"} or status is None:
            return
        if status == 200:
            self._ready = self._ready or f"GET {endpoint}: 200"
        self._enter("warm-up", now)

    def feed_tick(self, read_bytes: int, now: float) -> None:
        """Take the bytes the unit's processes have read from disk so far."""
        self._now = max(self._now, now)
        if read_bytes < self.read_bytes:
            self.read_bytes = read_bytes
        elif read_bytes - self.read_bytes > READ_STEP:
            self.read_bytes = read_bytes
            self._progress(now)

    def poll(self, now: float) -> Outcome:
        """What follows from everything seen until ``now``."""
        self._now = max(self._now, now)
        if self._final is not None:
            return self._final
        if self._dying is not None and now - self._dying[1] >= DEATH_GRACE:
            self._fail(
                f"the engine said that it is dying, and the unit is still up: {self._dying[0]}", "dying"
            )
        elif self.active and self._ready and self._dying is None:
            return Ready(self._ready)
        elif now - self.started_at > self.load_timeout:
            limit = duration(self.load_timeout)
            self._final = TimedOut(
                f"not ready after {limit}, the longest load accepted; got to {self.describe()}", "load"
            )
        elif now - self.progress_at > self.stall_timeout:
            limit = duration(self.stall_timeout)
            self._final = TimedOut(
                f"no progress for {limit}: no new log line, shard or disk read; {self.describe()}", "stall"
            )
        return self._final or Waiting()
