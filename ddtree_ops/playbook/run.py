"""Run a playbook over targets: every host to its end, all results gathered."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from ddtree_ops.deploy.deployment import Deployment, Outcome, Result
from ddtree_ops.errors import ExitCode, Interrupted, OpsError, RolledBack
from ddtree_ops.inventory.models import Target
from ddtree_ops.playbook.models import Playbook, Smoke, Step
from ddtree_ops.remote.session import Session
from ddtree_ops.results import Event, EventKind, Reporter
from ddtree_ops.runtime import Bundle, known_bundle
from ddtree_ops.secret import redact
from ddtree_ops.service.unit import render_unit

__all__ = ["Connector", "exit_code", "run_playbook", "worst_code"]

Connector = Callable[[Target], Session]
"""Opens the session of a target's host; raises UnreachableError."""

_PARALLEL = 16
_SIGNALS_EVERY_S = 0.2
_TOUCHING = ("activate", "start", "stop", "restart")
_WORST_FIRST = (
    ExitCode.INTERRUPTED,
    ExitCode.ERROR,
    ExitCode.USAGE,
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

    One session a host: services of the same host take turns. Ctrl-C (and SIGTERM, SIGHUP where the caller turns them
    into KeyboardInterrupt) closes the sessions; the results say what state each host was left in.

    :raises ConfigError: a unit that cannot be written, before any host is changed.
    """
    for target in targets:
        render_unit(target)
    bundles = _known_bundles(playbook, targets)
    hosts: dict[str, list[Target]] = {}
    for target in targets:
        hosts.setdefault(target.host.name, []).append(target)
    sessions: list[Session] = []
    guard = threading.Lock()
    interrupted = threading.Event()

    def one_host(group: list[Target]) -> list[Result]:
        try:
            session = connect(group[0])
        except OpsError as error:
            return [_unreachable(target, error, report) for target in group]
        with session:
            with guard:
                sessions.append(session)
                if interrupted.is_set():
                    session.close()
            return [
                _run_one(playbook, target, session, report, interrupted, bundles[repr(target.runtime)])
                for target in group
            ]

    if len(hosts) == 1:
        return one_host(list(targets))
    with ThreadPoolExecutor(max_workers=min(len(hosts), _PARALLEL), thread_name_prefix="host") as pool:
        futures = {name: pool.submit(one_host, group) for name, group in hosts.items()}
        pending = set(futures.values())
        try:
            # In short waits: a signal that another thread received reaches this one only between them.
            while pending:
                _, pending = wait(pending, timeout=_SIGNALS_EVERY_S)
        except KeyboardInterrupt:
            with guard:
                interrupted.set()
                for session in sessions:
                    session.close()
        found = {name: iter(future.result()) for name, future in futures.items()}
    return [next(found[target.host.name]) for target in targets]


def exit_code(results: Sequence[Result]) -> ExitCode:
    """One exit code for all results: see :func:`worst_code`."""
    return worst_code(result.error.exit_code if result.error else ExitCode.OK for result in results)


def worst_code(codes: Iterable[ExitCode]) -> ExitCode:
    """The worst, in the order interrupted, error, usage, configuration, unreachable, lock, time-out, check, rolled back,
    inconclusive. No code at all is inconclusive."""
    found = set(codes)
    if found <= {ExitCode.OK}:
        return ExitCode.OK if found else ExitCode.INCONCLUSIVE
    return next((code for code in _WORST_FIRST if code in found), ExitCode.ERROR)


def _unreachable(target: Target, error: OpsError, report: Reporter) -> Result:
    error.at(host=target.host.name, phase="connect", state="nothing was changed")
    report(Event(EventKind.FAIL, target.name, "connect", error.message, elapsed_s=0.0))
    return Result(target.name, target.service.name, Outcome.FAILED, error=error)


def _known_bundles(playbook: Playbook, targets: Iterable[Target]) -> dict[str, Bundle | None]:
    """What the cache already holds of each runtime that is to be built, looked up while the hosts are connected."""
    builds = any(step.kind == "build" for step in playbook.steps)
    runtimes = {repr(target.runtime): target.runtime for target in targets}
    return {name: known_bundle(runtime) if builds else None for name, runtime in runtimes.items()}


def _run_one(
    playbook: Playbook,
    target: Target,
    session: Session,
    report: Reporter,
    interrupted: threading.Event,
    bundle: Bundle | None,
) -> Result:
    deployment = Deployment(target, session, report, bundle=bundle)
    try:
        failure = _run_steps(deployment, playbook, interrupted)
    except KeyboardInterrupt:
        failure = _interruption(deployment)
    if interrupted.is_set():
        failure = _interruption(deployment)
    if isinstance(failure, Interrupted):
        report(Event(EventKind.FAIL, target.name, "interrupted", deployment.state_left, elapsed_s=0.0))
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


def _interruption(deployment: Deployment) -> Interrupted:
    host = deployment.target.host.name
    return Interrupted(
        f"interrupted during {deployment.step or 'the start'}",
        host=deployment.target.name,
        state=deployment.state_left,
        hint=f"ddtree-ops deploy {host}   (goes on from there: what is not validated is validated)"
        if deployment.changed
        else f"ddtree-ops deploy {host}",
    )


def _run_steps(deployment: Deployment, playbook: Playbook, interrupted: threading.Event) -> OpsError | None:
    try:
        for number, step in enumerate(playbook.steps):
            if step.kind in _TOUCHING and not deployment.settled:
                _check_ahead(deployment, playbook.steps[number:])
            _perform(deployment, step)
    except OpsError as error:
        return error if interrupted.is_set() else _after_failure(deployment, playbook, error)
    try:
        deployment.accept()
    except OpsError as error:
        return error
    return None


def _check_ahead(deployment: Deployment, steps: Sequence[Step]) -> None:
    """What a later step would refuse is refused before the service is touched: a load takes many minutes.

    :raises UsageError: a misspelt prompt.
    """
    from ddtree_ops.checks.prompts import resolve_prompt

    for step in steps:
        if isinstance(step, Smoke):
            try:
                resolve_prompt(step.prompt or deployment.target.service.health.prompt)
            except OpsError as error:
                raise error.at(
                    host=deployment.target.name, phase="smoke", state=deployment.state_left
                ) from None


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
    """Do one step. A defect of ours becomes an error too: what failed after a switch has to be rolled back."""
    arguments: dict[str, Any] = step.arguments
    try:
        getattr(deployment, step.kind)(**arguments)
    except OpsError:
        raise
    except Exception as error:
        where = traceback.format_exception(error)
        raise OpsError(
            redact(f"internal error: {type(error).__name__}: {error}"),
            host=deployment.target.name,
            phase=step.kind,
            state=deployment.state_left,
            hint="this is a defect of ddtree-ops: please report it with these lines",
            details=tuple(redact("".join(where)).splitlines()[-12:]),
        ) from error


def _outcome(deployment: Deployment, error: OpsError | None) -> Outcome:
    if isinstance(error, RolledBack):
        return Outcome.ROLLED_BACK
    if isinstance(error, Interrupted):
        return Outcome.INTERRUPTED
    if error is not None:
        return Outcome.FAILED
    if deployment.activation is not None and deployment.activation.reason != "validate":
        return Outcome.DEPLOYED
    unchanged = deployment.plan is not None and deployment.plan.empty
    return Outcome.UNCHANGED if unchanged else Outcome.PASSED
