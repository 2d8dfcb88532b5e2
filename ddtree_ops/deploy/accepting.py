"""Confirming what passed: see :meth:`~ddtree_ops.deploy.deployment.Deployment.accept`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ddtree_ops.deploy.guard import WayBack
from ddtree_ops.deploy.history import Activation, verdict_line
from ddtree_ops.deploy.plan import text_sha256
from ddtree_ops.deploy.secrets import removal_requests, write_requests
from ddtree_ops.errors import CheckFailed, OpsError
from ddtree_ops.remote.session import Session
from ddtree_ops.results import Verdict

if TYPE_CHECKING:
    from ddtree_ops.deploy.deployment import Deployment

__all__ = ["accept"]


def accept(deployment: Deployment, reconnect: Callable[[], Session] | None) -> None:
    """:param reconnect: opens another connection to the host, over which it is confirmed; None: the one there is."""
    frame, hold = deployment.frame, deployment.hold
    if deployment.activation is None and deployment.operated:
        _announce_operated(deployment)
    activation = deployment.activation
    if activation is None:
        if deployment.settled:
            _tidy_secrets(deployment)
        return
    if not any(check.ok and check.name.startswith("smoke") for check in deployment.checks):
        frame.say("accept", "no step has shown that it serves: the next deploy validates it")
        hold.disarm()
        return
    unit, host = deployment.layout.unit, deployment.target.host.name
    try:
        deployment.control.enable()
        if hold.armed is None:
            hold.need_lock()
            deployment.record(activation, Verdict.PASS)
        elif not _confirm(deployment, activation, hold.armed, reconnect):
            return
    except OpsError as error:
        state = f"{unit} passed and serves, but that is not recorded: the next deploy validates it again"
        if hold.armed is not None:
            state = f"{unit} passed and serves, but that is not confirmed: {hold.own_way()}"
            error.at(hint=f"ddtree-ops confirm {host}")
        raise error.at(host=deployment.target.name, phase="accept", state=state) from None
    try:
        _tidy_secrets(deployment)
    except OpsError as error:
        state = f"{unit} passed and is confirmed; secrets that it needs no more are still on the host"
        raise error.at(host=deployment.target.name, phase="accept", state=state) from None


def _confirm(
    deployment: Deployment,
    activation: Activation,
    way_back: WayBack,
    reconnect: Callable[[], Session] | None,
) -> bool:
    """Confirm over a new connection, or leave that to a person: then False."""
    hold, state = deployment.hold, deployment.control.state()
    names = ("InvocationID", "NRestarts", "MainPID")
    expected = {name: state.properties.get(name, "") for name in names}
    if not state.running or (deployment.invocation and state.invocation_id != deployment.invocation):
        raise CheckFailed(f"it is not the run that was validated: {state.describe()}")
    summary = deployment.frame.masked(deployment.verdict_summary())
    with _second_session(deployment.session, reconnect) as session:
        within = hold.safety.confirm_within
        if within is not None:
            until = hold.leave_to_a_person(session, activation.id, within, expected, summary)
            deployment.confirm_until = until
            deployment.frame.say(
                "accept",
                f"passed, not confirmed: ddtree-ops confirm {deployment.target.host.name} until {until}, "
                f"else the host goes back to {way_back.describe()}",
            )
            return False
        line = verdict_line(activation.id, Verdict.PASS, summary, invocation=state.invocation_id)
        hold.confirm(session, activation.id, line, expected)
    return True


@contextmanager
def _second_session(first: Session, reconnect: Callable[[], Session] | None) -> Iterator[Session]:
    if reconnect is None:
        yield first
        return
    try:
        session = reconnect()
    except OpsError as error:
        error.message = f"no new connection to confirm over: {error.message}"
        error.state = error.hint = ""
        raise
    with session:
        yield session


def _announce_operated(deployment: Deployment) -> None:
    """A start by hand that a smoke check has judged is a validation of what was deployed before."""
    deployment.look()()
    observed, host = deployment.seen, deployment.target.host.name
    known, text = observed.history.latest, observed.unit_text
    if not deployment.checks:
        if observed.state.running:
            deployment.frame.say(
                "accept",
                f"this run is not validated: ddtree-ops smoke {host} looks; ddtree-ops deploy {host} validates and records it",
            )
        return
    if known and text and (known.release, known.unit_sha256) == (observed.release, text_sha256(text)):
        made = deployment.new_activation(known.release, text, known.plan, "validate")
        deployment.announce(replace(made, command=known.command))


def _tidy_secrets(deployment: Deployment) -> None:
    """After a deployment that passed: secrets that the inventory names no more go, and all are for root alone."""
    observed, secrets = deployment.observed, deployment.known_secrets
    if observed is None or secrets is None:
        return
    layout, seen = deployment.layout, deployment.host_secrets
    loose = {name: data for name, data in secrets.files().items() if name in seen.loose}
    deployment.session.ask(
        [*write_requests(layout, loose), *removal_requests(layout, observed.stale_secrets)],
    )
    if observed.stale_secrets:
        names = ", ".join(observed.stale_secrets)
        deployment.frame.say("accept", f"removed from the host's secrets: {names}")
