"""``confirm`` by a person, and the locks as a person sees and breaks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddtree_ops.deploy import audit
from ddtree_ops.deploy.deployment import Deployment
from ddtree_ops.deploy.guard import Armed, Safety, describe_holder, parse_armed, unwatched
from ddtree_ops.deploy.history import History, parse_history
from ddtree_ops.deploy.looking import armed_request
from ddtree_ops.deploy.secrets import recorded_service
from ddtree_ops.errors import (
    CheckFailed,
    Inconclusive,
    LockHeld,
    NotDeployed,
    RemoteError,
    RolledBack,
)
from ddtree_ops.inventory.models import Service, Target
from ddtree_ops.remote.session import Request, Session
from ddtree_ops.results import Reporter
from ddtree_ops.service.layout import Layout

__all__ = ["Confirmation", "Lock", "break_lock", "confirm", "look_at_lock"]


@dataclass(frozen=True)
class Confirmation:
    """What confirming came to.

    :param confirmed: False where there was nothing to confirm: it had passed before.
    """

    host: str
    service: str
    confirmed: bool
    message: str

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "host": self.host,
            "service": self.service,
            "confirmed": self.confirmed,
            "message": self.message,
        }


def confirm(
    target: Target,
    session: Session,
    report: Reporter,
    *,
    reconnect: Callable[[], Session] | None = None,
    force: bool = False,
    lock_wait: float = 0.0,
) -> Confirmation:
    """Confirm the deployment that is armed on a host, so that the host does not go back.

    One that passed and waits for a person must still be the run that was validated. One whose client died before
    anything was proven is waited for, smoke-tested and scanned here, as its deployment would have done.

    :param force: by your word alone: nothing is looked at.
    :raises RolledBack: too late. :raises CheckFailed: it is not up, or not what was validated.
    :raises LockHeld: somebody else is at it. :raises Inconclusive: nothing was ever armed, nothing ever passed.
    """
    safety = Safety(command="confirm", lock_wait=lock_wait)
    plain = Deployment(target, session, report, safety=safety, reconnect=reconnect)
    with plain.frame.phase("confirm"):
        plain.hold.lock()
        armed, history = _look(session, plain.layout)
        if armed is None:
            return _nothing_armed(target, history)
        if armed.phase in ("going-back", "failed"):
            problem = unwatched(session, armed)
            stuck = problem or armed.phase == "failed"
            raise RolledBack(
                "; ".join(filter(None, (f"too late: {armed.describe()}", problem))),
                hint=f"ddtree-ops deploy {target.host.name}   "
                f"({'puts that right' if stuck else 'once the host is done: validates what runs then'})",
            )
        activation = next((item for item in history.activations if item.id == armed.activation), None)
        if activation is None:
            raise Inconclusive(
                "the armed deployment has not switched anything yet",
                hint=f"ddtree-ops deploy {target.host.name}",
            )
        record = session.read_file(f"{plain.layout.kept_unit(activation.unit_sha256)}.json")
        service = _service(record, target)
        if not force:
            state = plain.control.state()
            if not state.running:
                raise CheckFailed(
                    f"not confirmed: {state.describe()}",
                    state=armed.describe(),
                    hint=f"ddtree-ops logs {target.host.name} --lines 100; confirm it all the same: --force",
                )
        own = Deployment(
            target.model_copy(update={"service": service}),
            session,
            report,
            safety=safety,
            reconnect=reconnect,
        )
        own.take_over(plain, activation, armed)
        plain.frame.state_left = armed.describe()
        if force:
            own.confirm_unseen("confirmed by hand with --force, not validated")
            how = "by hand, nothing was looked at"
        elif armed.phase == "awaiting":
            own.confirm_unseen(armed.summary, armed.expected)
            how = "the run that had passed"
    if not force and armed.phase != "awaiting":
        own.wait()
        own.smoke()
        own.signatures()
        own.accept()
        how = "validated now: its client had not come to that"
    message = f"confirmed {activation.release[:12]} of {activation.time}: {how}"
    plain.audit("confirm", outcome="ok", detail=message)
    return Confirmation(target.name, target.service.name, True, message)


def _look(session: Session, layout: Layout) -> tuple[Armed | None, History]:
    armed, history = session.ask(
        [armed_request(layout), Request("read_file", {"path": layout.history, "max_bytes": 64 << 20})]
    )
    found = (reply.data if reply.values["found"] else None for reply in (armed, history))
    return parse_armed(next(found)), parse_history(next(found))


def _service(record: bytes | None, target: Target) -> Service:
    try:
        return recorded_service(record or b"")
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteError(
            "the settings of the armed deployment cannot be read on the host",
            hint=f"ddtree-ops deploy {target.host.name}",
            details=(str(error).splitlines()[0],),
        ) from error


def _nothing_armed(target: Target, history: History) -> Confirmation:
    latest = history.latest
    if latest is None:
        raise NotDeployed(target.service.unit, target.host.name, acting=True)
    if latest.good:
        message = f"nothing to confirm: {latest.release[:12]} of {latest.time} passed"
        return Confirmation(target.name, target.service.name, False, message)
    if latest.who == "host":
        raise RolledBack(
            f"too late: the host went back by itself on {latest.time} to {latest.release[:12]}",
            state="that release runs, and nobody has validated this run of it"
            if latest.verdict is None
            else "that release runs",
            hint=f"ddtree-ops deploy {target.host.name}   (deploys again what was undone, or validates what runs); "
            f"why: ddtree-ops history {target.host.name}",
        )
    raise Inconclusive(
        f"nothing is armed, and {latest.release[:12]} of {latest.time} has not passed"
        + (f": {latest.summary}" if latest.summary else ""),
        hint=f"ddtree-ops deploy {target.host.name}",
    )


@dataclass(frozen=True)
class Lock:
    """The lock of a service, and what is armed beside it.

    :param left_s: seconds it holds without a further sign of life; 0.0: free.
    """

    host: str
    service: str
    unit: str
    holder: Mapping[str, Any] | None
    left_s: float
    armed: Armed | None
    unwatched: str = ""

    @property
    def held(self) -> bool:
        """Somebody has it."""
        return self.holder is not None and self.left_s > 0

    def describe(self) -> str:
        """One line for people."""
        if not self.held:
            text = f"the lock of {self.unit} is free"
        else:
            assert self.holder is not None
            renewed = self.holder.get("renewed")
            heard = ""
            if isinstance(renewed, int | float):
                heard = f", last heard {datetime.fromtimestamp(renewed, UTC):%H:%M:%SZ}"
            text = f"{describe_holder(self.holder, self.unit)}{heard}, holds for {self.left_s:.0f} s more"
        return text if self.armed is None else f"{text}; rollback: {self.rollback}"

    @property
    def rollback(self) -> str:
        """What is armed; empty where nothing is."""
        return "; ".join(filter(None, (self.armed.describe(), self.unwatched))) if self.armed else ""

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form; times are epoch seconds by the host's clock."""
        names = ("who", "origin", "command", "since", "renewed", "lease_s")
        return {
            "host": self.host,
            "service": self.service,
            "unit": self.unit,
            "held": self.held,
            "holder": {name: (self.holder or {}).get(name) for name in names} if self.held else None,
            "left_s": round(self.left_s, 1),
            "rollback": self.rollback or None,
        }


def look_at_lock(target: Target, session: Session) -> Lock:
    """Who holds the lock of a service."""
    layout = Layout.of(target)
    found = session.check_lock(layout.lock)
    armed = parse_armed(session.read_file(layout.rollback))
    problem = unwatched(session, armed) if armed else ""
    return Lock(target.name, target.service.name, layout.unit, found.holder, found.left_s, armed, problem)


def break_lock(target: Target, session: Session, lock: Lock) -> str:
    """Take a lock that was looked at away from its holder, who finds out before its next change. Says what was done.

    :raises RemoteError: it is not that holder's any more. :raises LockHeld: it is the host's own, which goes back.
    """
    if not lock.held or lock.holder is None:
        return f"nothing to break: {lock.describe()}"
    layout = Layout.of(target)
    who = describe_holder(lock.holder, layout.unit)
    if lock.armed is not None and lock.holder["id"] == lock.armed.own_lock_id:
        raise LockHeld(
            f"{who}: it is switching the service just now, and that is not to be cut short",
            host=target.name,
            state=f"nothing was broken; it holds for {lock.left_s:.0f} s at most",
            hint=f"ddtree-ops deploy {target.host.name} --lock-wait 15m",
        )
    if not session.break_lock(layout.lock, str(lock.holder["id"])):
        raise RemoteError(
            "the lock has changed hands meanwhile: nothing was broken",
            host=target.name,
            hint=f"ddtree-ops lock status {target.host.name}",
        )
    audit.record(session, layout, "lock-break", outcome="ok", detail=who)
    note = f"; rollback: {lock.rollback}" if lock.armed else ""
    return f"broken: {who}{note}"
