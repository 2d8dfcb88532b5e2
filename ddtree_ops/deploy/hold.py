"""What a deployment holds on its host while it works: the lock of the service, and the rollback that is armed there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ddtree_ops.deploy.frame import Frame
from ddtree_ops.deploy.guard import (
    Armed,
    Guard,
    Safety,
    WayBack,
    describe_holder,
    new_lock_id,
    own_after,
    parse_armed,
    take_lock,
)
from ddtree_ops.deploy.history import Activation
from ddtree_ops.deploy.identity import origin, who
from ddtree_ops.errors import LockLost, OpsError, RemoteError, UnreachableError, heed_interruption
from ddtree_ops.inventory.models import Service, Target
from ddtree_ops.remote.session import Reply, Session
from ddtree_ops.service.layout import Layout

__all__ = ["Hold", "longest"]

_HUNG_AFTER_S = 900.0
_LOOK_EVERY_S = 5.0


def longest(service: Service, load_timeout: float) -> float:
    """Seconds after which the host takes a client for hung: all that the steps may take, and a quarter of an hour. Pure."""
    health = service.health
    return health.stop_timeout + load_timeout + 4 * health.request_timeout + health.window + _HUNG_AFTER_S


class Hold:
    """One service's lock and guard.

    :param undoes: False: what runs this does not roll back, so the host is not told to either.
    :param load_timeout: seconds that a load may take where a step overrides the service's own.
    :ivar service: whose lease, grace and time limits hold; another one once it is gone back to.
    :ivar locked: the lock was taken, and not given back.
    :ivar armed: what the host would go back to, once it is told; None: nothing that is ours is armed.
    """

    def __init__(
        self,
        target: Target,
        session: Session,
        frame: Frame,
        safety: Safety,
        *,
        undoes: bool = True,
        load_timeout: float | None = None,
    ) -> None:
        self.safety = safety
        self.locked = False
        self.armed: WayBack | None = None
        self._host = target.host.name
        self.service = target.service
        self._layout = Layout.of(target)
        self._session = session
        self._frame = frame
        self._lock_id = new_lock_id()
        self._guard = Guard(self._layout, lock_id=self._lock_id, python=target.host.ssh.python)
        self._arms = safety.rollback and undoes
        self._load_timeout = load_timeout or target.service.health.load_timeout
        self._found: Armed | None = None
        self._looked = time.monotonic()

    # -- the lock ------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the lock of the service, or see that it is still ours.

        :raises LockHeld: somebody else has it. :raises LockLost: ours was broken, or ran out.
        """
        if self.locked:
            self.need_lock()
            return
        take_lock(
            self._session,
            self._layout,
            lock_id=self._lock_id,
            command=self.safety.command,
            lease=self.service.rollback.lease,
            wait=self.safety.lock_wait,
            again=self.safety.same_again(self._host),
            tell=lambda text: self._frame.say(self._frame.step, text),
        )
        self.locked = True

    def need_lock(self) -> None:
        """:raises LockLost: it was broken, or its lease ran out while nothing was heard from us."""
        found = self._session.check_lock(self._layout.lock, self._lock_id)
        self._looked = time.monotonic()
        if found.held:
            return
        unit, taken = self._layout.unit, bool(found.holder and found.left_s)
        now = describe_holder(found.holder or {}, unit) if taken else "nobody has it now"
        left = f"somebody else is in charge of {unit} now" if taken else self.left
        raise LockLost(
            f"the lock of this {self.safety.command} was lost: {now}",
            state=f"{left}; nothing more was touched from here",
            hint=f"ddtree-ops history {self._host}; ddtree-ops status {self._host}",
            details=self._broken_by(),
        )

    def look(self) -> None:
        """As :meth:`need_lock`, every few seconds, where there is a lock of ours at all."""
        if self.locked and time.monotonic() - self._looked >= _LOOK_EVERY_S:
            self.need_lock()

    def lost(self) -> LockLost | None:
        """Whether the lock that we took is not ours any more: then what was seen fail since says nothing about us."""
        if not self.locked:
            return None
        try:
            self.need_lock()
        except LockLost as error:
            return error
        except OpsError:
            return None
        return None

    def _broken_by(self) -> tuple[str, ...]:
        """Who broke the lock, where the audit of the host says so of ours."""
        from ddtree_ops.deploy.audit import parse_audit

        try:
            acts = parse_audit(self._session.read_file(self._layout.audit)).acts
        except OpsError:
            return ()
        mine = [act for act in acts if (act.action, act.service) == ("lock-break", self._layout.unit)]
        if not mine or not mine[-1].detail.startswith(f"{who()} on {origin()} holds"):
            return ()
        return (f"broken by {mine[-1].who} on {mine[-1].origin} at {mine[-1].time}",)

    def join(self, other: Hold, *, armed: WayBack | None = None) -> None:
        """Go on under the lock that ``other`` holds; ``armed`` is what the host would go back to."""
        self.locked, self._lock_id, self._guard = True, other._lock_id, other._guard
        self.armed = armed

    # -- the rollback that is armed on the host ------------------------------------------------------------

    def find(self, reply: Reply) -> None:
        """What a client that is gone has armed. We hold the lock, so the host waits for what we make of it."""
        try:
            self._found = parse_armed(reply.data) if reply.values["found"] else None
        except RemoteError as error:
            self._frame.say("preflight", error.message)
        if self._found is not None:
            self._frame.say("preflight", f"taking over from an earlier deploy: {self._found.describe()}")

    def arm(self, activation: Activation, where_to: Callable[[], WayBack]) -> None:
        """Arm the host before a switch, or see that the lock is ours where nothing is to be armed."""
        if not self._arms:
            self.need_lock()
            if self._found is not None:
                self._guard.disarm(self._session)
            return
        self._arm(activation, where_to())

    def arm_again(self, failed: Activation) -> None:
        """While we go back the host stays armed; where it is not, the lock must still be ours."""
        if self.armed is not None:
            self._arm(failed, self.armed)
        else:
            self.need_lock()

    def arm_validation(self, activation: Activation) -> None:
        """A mere validation switches nothing; where an earlier client had armed the host, that is kept up."""
        if self._found is None:
            self.need_lock()
        elif not self._arms or self._found.phase == "failed":
            self._guard.disarm(self._session)
        else:
            self._arm(activation, self._found.way_back)

    def settle(self) -> None:
        """What runs is what is wished, and passed: what an earlier client had armed has nothing to undo any more."""
        if self._found is not None:
            self._guard.disarm(self._session)
            self._found = None

    def release(self) -> None:
        """Give the lock back before the session ends; with a session that is gone it was given back."""
        if self.locked:
            self.locked = False
            with contextlib.suppress(UnreachableError):
                self._session.release_lock(self._layout.lock)

    def warn(self, step: str) -> None:
        """Say where a rollback is armed that what comes now does not touch. One round trip."""
        armed = parse_armed(self._session.read_file(self._layout.rollback))
        if armed is not None and armed.phase != "failed":
            self._frame.say(
                step,
                f"{armed.describe()}. That stays so: ddtree-ops confirm {self._host} or ddtree-ops deploy {self._host} ends it",
            )

    def _arm(self, activation: Activation, way_back: WayBack) -> None:
        within = longest(self.service, self._load_timeout)
        self._guard.arm(self._session, activation, way_back, self.service, within)
        self.armed = way_back

    def disarm(self) -> None:
        """What is ours is armed no more; that it cannot be said is told, and the host stays armed."""
        if self.armed is None:
            return
        try:
            self._guard.disarm(self._session)
        except OpsError as error:
            heed_interruption(error)
            self._frame.say(self._frame.step, f"the host is still armed: {error.message}")
            return
        self.armed = None

    def confirm(
        self, session: Session, activation: str, verdict: str, expected: Mapping[str, Any] | None
    ) -> None:
        """As :meth:`~ddtree_ops.deploy.guard.Guard.confirm`, over ``session``."""
        self._guard.confirm(session, activation, verdict, expected)
        self.armed = None

    def leave_to_a_person(
        self, session: Session, activation: str, seconds: float, expected: Mapping[str, Any], summary: str
    ) -> str:
        """Leave it armed for ``seconds`` more and give the lock back. Returns until when, by the host's clock (UTC)."""
        until = self._guard.hold(session, activation, seconds, expected, summary)
        self.armed = None
        self._session.release_lock(self._layout.lock)
        self.locked = False
        return until

    def own_way(self) -> str:
        """What the host does by itself once we are gone, and until when, by its clock."""
        seconds = own_after(self.service)
        skew = float(self._session.facts.get("clock_skew_s") or 0.0)
        until = datetime.fromtimestamp(time.time() + skew + seconds, UTC)
        back = self.armed.describe() if self.armed else ""
        return (
            f"unless a deploy or confirm takes over, the host goes back by itself to {back}, "
            f"within {seconds:.0f} s (until {until:%H:%M:%SZ} on the host)"
        )

    @property
    def left(self) -> str:
        """The state left, and what the host will do about it by itself."""
        state = self._frame.state_left
        return f"{state}; {self.own_way()}" if self.armed is not None else state
