"""Run a playbook over targets: every host to its end, all results gathered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ddtree_ops.deploy.deployment import Deployment, Outcome, Result
from ddtree_ops.errors import ExitCode, OpsError, RolledBack
from ddtree_ops.inventory.models import Target
from ddtree_ops.playbook.models import Playbook, Step
from ddtree_ops.remote.session import Session
from ddtree_ops.results import Event, EventKind, Reporter

__all__ = ["Connector", "exit_code", "run_playbook"]

Connector = Callable[[Target], Session]
"""Opens the session of a target's host; raises UnreachableError."""

_PARALLEL = 16
_WORST_FIRST = (
    ExitCode.ERROR,
    ExitCode.CONFIG,
    ExitCode.UNREACHABLE,
    ExitCode.LOCK_HELD,
    ExitCode.HEALTH_TIMEOUT,
    ExitCode.CHECK_FAILED,
    ExitCode.ROLLED_BACK,
    ExitCode.INCONCLUSIVE,
)


def run_playbook(
    playbook: Playbook, targets: Sequence[Target], *, connect: Connector, report: Reporter
) -> list[Result]:
    """One result a target, in the order of ``targets``. A failing host does not stop the others.

    One session a host: services of the same host take turns. Ctrl-C closes the sessions, after saying what state
    the host under way was left in.
    """
    hosts: dict[str, list[Target]] = {}
    for target in targets:
        hosts.setdefault(target.host.name, []).append(target)
    sessions: list[Session] = []
    guard = threading.Lock()

    def one_host(group: list[Target]) -> list[Result]:
        try:
            session = connect(group[0])
        except OpsError as error:
            return [_unreachable(target, error, report) for target in group]
        with guard:
            sessions.append(session)
        with session:
            return [_run_one(playbook, target, session, report) for target in group]

    if len(hosts) == 1:
        return one_host(list(targets))
    with ThreadPoolExecutor(max_workers=min(len(hosts), _PARALLEL), thread_name_prefix="host") as pool:
        futures = {name: pool.submit(one_host, group) for name, group in hosts.items()}
        try:
            found = {name: iter(future.result()) for name, future in futures.items()}
        except KeyboardInterrupt:
            for future in futures.values():
                future.cancel()
            with guard:
                for session in sessions:
                    session.close()
            raise
    return [next(found[target.host.name]) for target in targets]


def exit_code(results: Sequence[Result]) -> ExitCode:
    """One exit code for all: the worst, in the order error, configuration, unreachable, lock, time-out, check,
    rolled back, inconclusive. No result at all is inconclusive."""
    if not results:
        return ExitCode.INCONCLUSIVE
    codes = {result.error.exit_code for result in results if result.error is not None}
    return next((code for code in _WORST_FIRST if code in codes), ExitCode.OK)


def _unreachable(target: Target, error: OpsError, report: Reporter) -> Result:
    error.at(host=target.host.name, phase="connect", state="nothing was changed")
    report(Event(EventKind.FAIL, target.name, "connect", error.message, elapsed_s=0.0))
    return Result(target.name, target.service.name, Outcome.FAILED, error=error)


def _run_one(playbook: Playbook, target: Target, session: Session, report: Reporter) -> Result:
    deployment = Deployment(target, session, report)
    try:
        failure = _run_steps(deployment, playbook)
    except KeyboardInterrupt:
        report(Event(EventKind.FAIL, target.name, "interrupted", deployment.state_left, elapsed_s=0.0))
        raise
    return Result(
        target.name,
        target.service.name,
        _outcome(deployment, failure),
        plan=deployment.plan,
        checks=deployment.checks,
        diagnosis=deployment.diagnosis,
        evidence=deployment.evidence,
        error=failure,
        seconds=deployment.seconds,
    )


def _run_steps(deployment: Deployment, playbook: Playbook) -> OpsError | None:
    try:
        for step in playbook.steps:
            _perform(deployment, step)
        deployment.accept()
    except OpsError as error:
        return _after_failure(deployment, playbook, error)
    return None


def _after_failure(deployment: Deployment, playbook: Playbook, error: OpsError) -> OpsError:
    """Run the failure steps. Each is tried even when an earlier one failed; its own failure is added as a detail."""
    final = error
    for step in playbook.on_failure if deployment.worth_explaining else ():
        try:
            _perform(deployment, step)
        except RolledBack as rolled_back:
            rolled_back.details = (f"why: {error.message}", *error.details)
            rolled_back.hint = rolled_back.hint or error.hint
            final = rolled_back
        except OpsError as another:
            final.details = (*final.details, f"{step.kind} failed too: {another.message}")
    if deployment.changed:
        final.state = deployment.state_left
    return final


def _perform(deployment: Deployment, step: Step) -> None:
    arguments: dict[str, Any] = step.arguments
    getattr(deployment, step.kind)(**arguments)


def _outcome(deployment: Deployment, error: OpsError | None) -> Outcome:
    if isinstance(error, RolledBack):
        return Outcome.ROLLED_BACK
    if error is not None:
        return Outcome.FAILED
    if deployment.plan is None:
        return Outcome.PASSED
    return Outcome.UNCHANGED if deployment.plan.empty else Outcome.DEPLOYED
