"""The leased lock of a service, and the rollback that is armed on its host: the client's half.

The host's half of the rollback is :mod:`ddtree_ops.deploy.guard_host`; that of the lock is in the agent.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from ddtree_ops.deploy.history import Activation
from ddtree_ops.deploy.identity import origin, who
from ddtree_ops.errors import CheckFailed, LockHeld, LockLost, OpsError, RemoteError, RolledBack, UsageError
from ddtree_ops.inventory.models import Service
from ddtree_ops.remote.session import Request, Session
from ddtree_ops.service.layout import Layout

__all__ = [
    "Armed",
    "Guard",
    "Safety",
    "WayBack",
    "describe_holder",
    "interval",
    "locked",
    "new_lock_id",
    "own_after",
    "parse_armed",
    "program_name",
    "take_lock",
    "unwatched",
]

_POLL_S = 1.0
_TELL_EVERY_S = 25.0
_LAST_MOMENT = 253402300800
"""The year 10000, in epoch seconds: the calendar ends before it."""


@dataclass(frozen=True)
class Safety:
    """How careful a run is.

    :param rollback: False: nothing is armed and nothing is rolled back; what failed is left for inspection.
    :param confirm_within: seconds that a person has to confirm what passed; None: passing confirms it.
    :param lock_wait: seconds to wait for somebody else's lock.
    :param command: what the holder of the lock is told to be doing.
    :param again: what was typed, with ``{host}`` where the host goes; empty: ``command`` without options.
    :param lint: the command that lints what was asked for, likewise; empty: what the inventory says.
    """

    rollback: bool = True
    confirm_within: float | None = None
    lock_wait: float = 0.0
    command: str = "deploy"
    again: str = ""
    lint: str = ""

    def same_again(self, host: str) -> str:
        """The command under way, to be typed again for one host: with the options it was given."""
        return (self.again or f"ddtree-ops {self.command} {{host}}").replace("{host}", host, 1)

    def lint_of(self, host: str) -> str:
        """The command that says why lint refuses this, for one host: with the options that choose the settings."""
        return (self.lint or "ddtree-ops lint {host}").replace("{host}", host, 1)

    @classmethod
    def of(
        cls,
        *,
        command: str,
        rollback: bool = True,
        confirm_within: float | None = None,
        lock_wait: float | None = None,
        again: str = "",
        lint: str = "",
    ) -> Safety:
        """From the options of a command.

        :raises UsageError: nothing armed, and yet to be confirmed; no time to confirm in.
        """
        if confirm_within is not None and not rollback:
            raise UsageError(
                "--confirm-within needs the rollback that --no-rollback leaves out",
                hint="give one of the two",
            )
        if confirm_within is not None and confirm_within < 1:
            raise UsageError("--confirm-within: nobody can confirm within less than a second")
        return cls(rollback, confirm_within, lock_wait or 0.0, command, again, lint)


@dataclass(frozen=True)
class WayBack:
    """What a host goes back to.

    :param mode: ``release``: an activation that passed; ``unit``: the unit file that ran before us; ``stop``: nothing.
    :param values: for the host: ``link``, ``unit_file``, ``unit_sha256``, ``unit_mode`` and, of a release,
        ``release``, ``plan``, ``passed``, ``runtime``.
    """

    mode: str
    values: Mapping[str, Any]

    @classmethod
    def to_release(cls, layout: Layout, good: Activation, *, unit_mode: int) -> WayBack:
        """To an activation that passed and whose release, unit file and settings are still there."""
        return cls(
            "release",
            {
                "release": good.release,
                "link": layout.link_target(good.release),
                "unit_file": f"{layout.kept_unit(good.unit_sha256)}.service",
                "unit_sha256": good.unit_sha256,
                "unit_mode": unit_mode,
                "plan": good.plan,
                "passed": good.time,
                "runtime": good.runtime,
            },
        )

    @classmethod
    def to_unit(cls, unit_file: str, unit_sha256: str, *, link: str | None, unit_mode: int) -> WayBack:
        """To a unit file that ran before anything was deployed, kept at ``unit_file``."""
        return cls(
            "unit",
            {"unit_file": unit_file, "unit_sha256": unit_sha256, "link": link, "unit_mode": unit_mode},
        )

    @classmethod
    def to_nothing(cls) -> WayBack:
        """The unit is stopped."""
        return cls("stop", {})

    def describe(self) -> str:
        """As in "the host goes back to ..."."""
        match self.mode:
            case "release":
                return f"release {self.values['release'][:12]}, which passed on {self.values['passed']}"
            case "unit":
                return "the unit file that ran before"
        return "nothing: it stops the unit"


@dataclass(frozen=True)
class Armed:
    """A rollback that is armed on a host; see :func:`parse_armed`.

    :param phase: ``armed``, ``awaiting`` (passed, waits for a person), ``going-back`` or ``failed``.
    :param activation: id of the activation that it would undo.
    :param until: host's time (UTC, ISO 8601) until which it can be confirmed; empty but for ``awaiting``.
    :param timer: of the host, which looks at it.
    :param problem: why going back failed, as far as it was tried.
    :param lost_since: when a look of the host found its client gone, in seconds since boot; it waits ``grace_s`` more.
    """

    activation: str
    phase: str
    who: str
    origin: str
    since: str
    lock_id: str
    release: str
    way_back: WayBack
    summary: str = ""
    until: str = ""
    expected: Mapping[str, Any] | None = None
    timer: str = ""
    problem: str = ""
    lost_since: float | None = None
    grace_s: float = 0.0

    @property
    def own_lock_id(self) -> str:
        """Id of the lock under which the host itself goes back."""
        return f"rollback-{self.activation}"

    def describe(self) -> str:
        """One line for people."""
        back = self.way_back.describe()
        match self.phase:
            case "awaiting":
                return f"passed and waits to be confirmed until {self.until}, else back to {back}"
            case "going-back":
                so_far = f"; so far it failed, and is tried again: {self.problem}" if self.problem else ""
                return f"the host is going back by itself to {back}{so_far}"
            case "failed":
                return f"the host tried to go back to {back} and could not: {self.problem}"
        return f"armed by {self.who} on {self.origin} at {self.since}: unless confirmed, back to {back}"


def parse_armed(content: bytes | None) -> Armed | None:
    """What ``SERVICE_DIR/rollback.json`` says; None where nothing is armed. Pure.

    :raises RemoteError: it cannot be read.
    """
    if content is None:
        return None
    try:
        values = json.loads(content)
        target, expected = dict(values["target"]), values.get("expected")
        armed = Armed(
            activation=str(values["activation"]),
            phase=str(values["phase"]),
            who=str(values["who"]),
            origin=str(values["origin"]),
            since=str(values["armed_at"]),
            lock_id=str(values["lock_id"]),
            release=str(values["release"]),
            way_back=WayBack(str(target.pop("mode")), target),
            summary=str(values.get("summary") or ""),
            until=str(values.get("confirm_until") or ""),
            timer=str(values.get("timer") or ""),
            problem=str(values.get("problem") or ""),
            lost_since=None if values.get("lost_since") is None else float(values["lost_since"]),
            grace_s=float(values.get("grace_s") or 0.0),
            expected=None if expected is None else dict(expected),
        )
        armed.describe()
        return armed
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RemoteError(
            f"the state of the armed rollback cannot be read: {error}",
            hint="look at rollback.json in the service's folder on the host; the next deploy replaces it",
        ) from error


def unwatched(session: Session, armed: Armed) -> str:
    """Why the host does not look at what is armed; empty: it does, or there is nothing to look at. One round trip.

    A timer ends with its host's boot, after which a unit starts it again; it can be stopped by hand, and what it runs
    can be gone.
    """
    if armed.phase == "failed" or not armed.timer:
        return ""
    look = armed.timer.removesuffix(".timer") + ".service"
    show = ["systemctl", "show", "--property=ActiveState,Result", "--", armed.timer, look]
    shown = session.run(show, deadline=30.0).text.split("\n\n")
    timer, result = (dict(line.split("=", 1) for line in part.splitlines() if "=" in line) for part in shown)
    if timer.get("ActiveState") != "active":
        return f"the host does not look at it any more ({armed.timer} does not run), so it does not go back by itself"
    if result.get("Result") != "success":
        return f"the host's last look at it failed ({result.get('Result')}): journalctl -u {look}"
    return ""


def interval(service: Service) -> float:
    """Seconds between two looks of the host. Pure."""
    return max(1.0, min(service.rollback.lease, service.rollback.grace * 2) / 6)


def own_after(service: Service) -> float:
    """Longest time, in seconds, after which a host goes back by itself once its client is gone. Pure."""
    return service.rollback.lease + service.rollback.grace + 2 * interval(service)


# --------------------------------------------------------------------------------------------------- lock


def new_lock_id() -> str:
    """A name for a lock that nobody else uses."""
    return secrets.token_hex(8)


def describe_holder(holder: Mapping[str, Any], unit: str) -> str:
    """``ann on desk holds the lock of x.service since 2026-11-29 17:00:00Z (deploy)``. Pure."""
    began = holder.get("since")
    since = ""
    if isinstance(began, int | float) and 0 <= began < _LAST_MOMENT:
        since = f" since {datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M:%SZ}"
    command = f" ({holder['command']})" if holder.get("command") else ""
    somebody = f"{holder.get('who', 'somebody')} on {holder.get('origin', 'another machine')}"
    return f"{somebody} holds the lock of {unit}{since}{command}"


def take_lock(
    session: Session,
    layout: Layout,
    *,
    lock_id: str,
    command: str,
    lease: float,
    wait: float = 0.0,
    tell: Callable[[str], None] | None = None,
    again: str = "",
) -> None:
    """Take the lock of a service, waiting up to ``wait`` seconds for somebody else's.

    :param again: the command to be typed again, where it can wait; empty: it is said without one.

    :param lease: seconds for which it outlives the last sign of life of this client.
    :param tell: is given a line at once when there is something to wait for, then every 25 s.
    :raises LockHeld: somebody else has it, with name, machine, since when and for what.
    """
    owner = {"id": lock_id, "who": who(), "origin": origin(), "command": command}
    began = time.monotonic()
    told = -_TELL_EVERY_S
    while True:
        holder = session.acquire_lock(layout.lock, owner, lease=lease)
        if holder is None:
            return
        waited = time.monotonic() - began
        text = describe_holder(holder, layout.unit)
        if waited >= wait:
            raise LockHeld(
                text if wait == 0 else f"{text}; waited {waited:.0f} s",
                state="nothing was changed",
                hint="try again when that is done"
                + (f", or wait for it: {again} --lock-wait 30m" if again else "")
                + f"; who it is: ddtree-ops lock status {session.host}",
            )
        if tell is not None and waited - told >= _TELL_EVERY_S:
            told = waited
            tell(f"waiting: {text}; {waited:.0f} of {wait:.0f} s")
        time.sleep(min(_POLL_S, wait - waited))


@contextmanager
def locked(session: Session, layout: Layout, service: Service, safety: Safety) -> Iterator[str]:
    """The lock of a service for as long as the block takes; yields its id."""
    lock_id = new_lock_id()
    take_lock(
        session,
        layout,
        lock_id=lock_id,
        command=safety.command,
        lease=service.rollback.lease,
        wait=safety.lock_wait,
        again=safety.same_again(session.host),
    )
    try:
        yield lock_id
    finally:
        session.release_lock(layout.lock)


# --------------------------------------------------------------------------------------------------- guard


@cache
def _program() -> tuple[str, bytes]:
    source = Path(__file__).with_name("guard_host.py").read_bytes()
    return hashlib.sha256(source).hexdigest()[:12], source


def program_name() -> str:
    """File name of the host's half, in ``DEPLOY_ROOT/guard/``."""
    return f"{_program()[0]}.py"


class Guard:
    """The rollback of one service on its host. Each method is one round trip, over whichever session it is given.

    :param lock_id: of the lock that the caller holds; the host refuses what is asked without it.
    :param python: interpreter on the host.
    """

    def __init__(self, layout: Layout, *, lock_id: str, python: str = "python3") -> None:
        self.layout = layout
        self.lock_id = lock_id
        self.python = python

    def arm(
        self, session: Session, activation: Activation, way_back: WayBack, service: Service, within: float
    ) -> None:
        """Arm it, in place of whatever is armed; a transient timer of the host looks at it from then on.

        :param within: seconds that the whole deployment may take, before the host goes back even though the client
            lives.
        :raises LockLost: the lock is not ours any more. :raises RemoteError: there is no timer; nothing is armed.
        """
        self._ask(
            session,
            "arm",
            {
                "activation": activation.id,
                "unit": self.layout.unit,
                "unit_path": self.layout.unit_path,
                "release": activation.release,
                "lock_id": self.lock_id,
                "who": activation.who,
                "origin": activation.origin,
                "within_s": within,
                "lease_s": service.rollback.lease,
                "grace_s": service.rollback.grace,
                "interval_s": interval(service),
                "stop_s": service.health.stop_timeout,
                "target": {"mode": way_back.mode, **way_back.values},
            },
        )

    def confirm(
        self,
        session: Session,
        activation: str,
        verdict: str,
        expected: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the verdict into the history, which confirms the activation, and disarm. All or nothing.

        :param verdict: the history's line.
        :param expected: properties of the unit that must be as they were validated.
        :raises LockLost: the lock is not ours any more. :raises RolledBack: the host went back already.
        :raises CheckFailed: the unit is not as it was validated.
        """
        request = {"activation": activation, "verdict": json.loads(verdict), "expected": expected}
        self._ask(session, "confirm", {**request, "lock_id": self.lock_id})

    def hold(
        self,
        session: Session,
        activation: str,
        seconds: float,
        expected: Mapping[str, Any],
        summary: str,
    ) -> str:
        """Leave it armed for ``seconds`` more, for a person to confirm. Returns until when, by the host's clock (UTC)."""
        request = {"activation": activation, "seconds": seconds, "expected": expected, "summary": summary}
        return str(self._ask(session, "hold", {**request, "lock_id": self.lock_id})["confirm_until"])

    def disarm(self, session: Session) -> None:
        """Nothing is armed any more; what ran, runs."""
        self._ask(session, "disarm", {"unit": self.layout.unit, "lock_id": self.lock_id})

    def _ask(self, session: Session, verb: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        _, source = _program()
        path = f"{self.layout.guard_dir}/{program_name()}"
        argv = [self.python, "-X", "utf8", "-ISB", path, verb, self.layout.service_dir]
        _, done = session.ask(
            [
                Request("write_file", {"path": path, "mode": 0o644}, source),
                Request("run", {"argv": argv}, json.dumps(request).encode()),
            ],
            deadline=120.0,
        )
        split = int(done.values["stdout"])
        said = done.data[:split].decode("utf-8", "replace")
        try:
            answer: dict[str, Any] = json.loads(said)
        except ValueError:
            errors = done.data[split:].decode("utf-8", "replace")
            raise RemoteError(
                f"the rollback guard on the host failed at {verb}: exit status {done.values['rc']}",
                details=tuple((errors or said).strip().splitlines()[-8:]),
                hint=f"make room on the host: ddtree-ops prune {session.host}"
                if "No space left" in errors
                else "is systemd-run there? --no-rollback deploys without a guard",
            ) from None
        if "refused" in answer:
            raise _refusal(answer, session.host)
        return answer


def _refusal(answer: Mapping[str, Any], host: str) -> OpsError:
    text = str(answer["message"])
    match answer["refused"]:
        case "lock":
            return LockLost(text, hint=f"ddtree-ops history {host}; ddtree-ops status {host}")
        case "gone-back" | "busy":
            return RolledBack(text, hint=f"ddtree-ops history {host}; on the host: journalctl -t ddtree-ops")
        case "changed":
            return CheckFailed(text, hint=f"ddtree-ops logs {host} --lines 100")
    return RemoteError(text)
