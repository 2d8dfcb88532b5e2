"""Run a playbook over targets: every host to its end, all results gathered."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ddtree_ops.deploy.deployment import Deployment
from ddtree_ops.deploy.guard import Safety
from ddtree_ops.deploy.nodes import Member, in_turn, join_plans, locksteps, name_the_first
from ddtree_ops.deploy.outcome import Outcome, Result
from ddtree_ops.deploy.secrets import API_KEY, resolve_secrets
from ddtree_ops.errors import (
    CheckFailed,
    ExitCode,
    Inconclusive,
    Interrupted,
    LockHeld,
    LockLost,
    OpsError,
    RolledBack,
    UnreachableError,
    heeding,
)
from ddtree_ops.inventory.models import Target
from ddtree_ops.playbook.models import Playbook, Smoke, Step, Wait
from ddtree_ops.playbook.rollout import Batch, Rollout, batches, reason_to_stop, units_of
from ddtree_ops.remote.session import Session
from ddtree_ops.results import RUN_END, Event, EventKind, Reporter
from ddtree_ops.runtime import Bundle, known_bundle
from ddtree_ops.secret import redact
from ddtree_ops.service.unit import render_unit
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from ddtree_ops.deploy.saved import Expectation

__all__ = [
    "Connector",
    "Perform",
    "Watch",
    "exit_code",
    "internal_error",
    "needed_secrets",
    "run_playbook",
    "worst_code",
]

Connector = Callable[[Target], Session]
"""Opens the session of a target's host; raises UnreachableError."""
Perform = Mapping[str, Callable[[Deployment, Step], None]]
"""Steps that are not a deployment's own, by kind."""
Watch = Callable[[Deployment, Step, OpsError | None], None]
"""Told of every step that was done, and how it failed; from several threads at once."""

_T = TypeVar("_T")
_SIGNALS_EVERY_S = 0.2
_TOUCHING = ("activate", "start", "stop", "restart", "go_back")
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
    playbook: Playbook,
    targets: Sequence[Target],
    *,
    connect: Connector,
    report: Reporter,
    expected: Mapping[str, Expectation] | None = None,
    rollout: Rollout | None = None,
    reconnect: Connector | None = None,
    safety: Safety | None = None,
    perform: Perform | None = None,
    watch: Watch | None = None,
    interrupted: threading.Event | None = None,
) -> list[Result]:
    """One result a target, in the order of ``targets``.

    Hosts run at once as far as ``rollout`` says, each by itself: what fails on one, a defect of ours included, is
    that host's result alone. Only ``rollout`` keeps further hosts from being started; their outcome is ``skipped``,
    with the reason as an error. One session a host: services of the same host take turns. Ctrl-C (and SIGTERM, SIGHUP
    where the caller turns them into KeyboardInterrupt) closes the sessions; the results say what state each host was left in.

    :param expected: saved plans by name of the target; a target whose plan comes out otherwise is left alone.
    :param reconnect: opens a further connection to a target's host, for confirming; left out: ``connect``.
    :param safety: how failures are guarded against.
    :param perform: what does steps that are not a deployment's own; ``watch``: is told of every step.
    :param interrupted: is set once an interruption came: also one that came too late to be any result's.
    :raises ConfigError: a unit that cannot be written, before any host is changed.
    """
    for target in targets:
        render_unit(target)
    resolve_secrets(targets, only=needed_secrets(playbook))
    bundles = _known_bundles(playbook, targets)
    report = _Told(report)
    run = _Run(playbook, connect, report, bundles, expected or {}, reconnect or connect, safety or Safety())
    run.perform, run.watch = perform or {}, watch
    run.interrupted = interrupted or run.interrupted
    for target in in_turn(targets):
        run.groups.setdefault(target.host.name, []).append(target)
    run.members = locksteps(targets, run.interrupted)
    canary = rollout.canary if rollout else 0
    if canary and canary >= len(run.groups):
        text = f"canary of {canary}, and {count(len(run.groups), 'host')} in all: nothing comes after it"
        run.tell(Event(EventKind.NOTE, "", "rollout", text))
    if len(run.groups) == 1:
        return run.one_host(targets[0].host.name)
    ended = _over_hosts(run, targets, rollout or Rollout())
    found = {
        (host, target.service.name): result
        for host, results in ended.items()
        for target, result in zip(run.groups[host], results, strict=True)
    }
    return [found[target.host.name, target.service.name] for target in targets]


@dataclass(frozen=True)
class _Told:
    """A reporter whose reader may go away: a closed pipe or terminal ends what is shown, and no deployment."""

    report: Reporter

    def __call__(self, event: Event) -> None:
        with contextlib.suppress(OSError):
            self.report(event)


@dataclass
class _Run:
    """What all hosts of a run share."""

    playbook: Playbook
    connect: Connector
    report: Reporter
    bundles: Mapping[str, Bundle | None]
    expected: Mapping[str, Expectation]
    reconnect: Connector
    safety: Safety
    perform: Perform = field(default_factory=dict)
    watch: Watch | None = None
    groups: dict[str, list[Target]] = field(default_factory=dict)
    members: Mapping[tuple[str, str], Member] = field(default_factory=dict)
    interrupted: threading.Event = field(default_factory=threading.Event)
    _sessions: list[Session] = field(default_factory=list)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def one_host(self, host: str) -> list[Result]:
        """Results of a host's services, one after the other in one session; whatever happens is this host's alone."""
        group = self.groups[host]
        begun: list[Deployment] = []
        results: list[Result] = []
        try:
            try:
                with heeding():
                    self._one_host(host, begun, results)
            except Exception as error:
                self._leave(group, internal_error(error, host=host, phase="run"))
                state = "what was done on the host is not known: look at it"
                results += [self._defect(target, error, "run", state) for target in group[len(results) :]]
        except KeyboardInterrupt:
            self.interrupted.set()
        return persevering(lambda: self._completed(group, begun, results))

    def _completed(
        self, group: Sequence[Target], begun: Sequence[Deployment], results: Sequence[Result]
    ) -> list[Result]:
        """With results of what an interruption came before or came into: here, for it was not the service's own."""
        self._leave(group, OpsError(f"{group[0].host.name} went no further", host=group[0].host.name))
        found = list(results)
        for number, target in enumerate(group[len(found) :], len(found)):
            cut = number < len(begun)
            found.append(_cut(self, begun[number]) if cut else self._not_begun(target))
        return found

    def _one_host(self, host: str, begun: list[Deployment], results: list[Result]) -> None:
        group = self.groups[host]
        try:
            with heeding():
                session = self.connect(group[0])
        except OpsError as error:
            self._leave(group, error)
            error.at(host=host, phase="connect", state="nothing was changed")
            for target in group:
                self.tell(Event(EventKind.FAIL, target.name, "connect", error.message, elapsed_s=0.0))
            results += [Result(one.name, one.service.name, Outcome.FAILED, error=error) for one in group]
            return
        except Exception as error:
            self._leave(group, internal_error(error, host=host, phase="connect"))
            results += [self._defect(target, error, "connect", "nothing was changed") for target in group]
            return
        with session:
            with self._guard:
                self._sessions.append(session)
                if self.interrupted.is_set():
                    session.close()
            for number, target in enumerate(group, 1):
                if number > 1 and self.interrupted.is_set():
                    raise KeyboardInterrupt
                deployment = self._deployment(target, session)
                begun.append(deployment)
                results.append(_run_one(self, deployment))
                if number < len(group):
                    deployment.hold.release()

    def _not_begun(self, target: Target) -> Result:
        """The result of a target that an interruption came before."""
        error = Interrupted(
            "interrupted before it was begun",
            host=target.name,
            state="nothing was changed",
            hint=self.safety.same_again(target.host.name),
        )
        self.tell(Event(EventKind.FAIL, target.name, "interrupted", "nothing was changed", elapsed_s=0.0))
        return Result(target.name, target.service.name, Outcome.INTERRUPTED, error=error)

    def _leave(self, group: Sequence[Target], error: OpsError) -> None:
        """Other nodes of its services do not wait for this host any more."""
        for target in group:
            member = self.members.get((target.host.name, target.service.name))
            if member is not None:
                member.leave(error)

    def _deployment(self, target: Target, session: Session) -> Deployment:
        steps = self.playbook.steps
        timeouts = [step.load_timeout for step in steps if isinstance(step, Wait) and step.load_timeout]
        return Deployment(
            target,
            session,
            self.report,
            bundle=self.bundles[repr(target.runtime)],
            expected=self.expected.get(target.name),
            safety=self.safety,
            reconnect=lambda: self.reconnect(target),
            undoes=any(step.kind == "rollback" for step in self.playbook.on_failure),
            load_timeout=max(timeouts, default=None),
            member=self.members.get((target.host.name, target.service.name)),
        )

    def skip(self, host: str, reason: str) -> list[Result]:
        """Results of a host that is not started."""
        kind = Interrupted if self.interrupted.is_set() else Inconclusive
        first = "" if self.interrupted.is_set() else "mend that, then "
        harmless = ": what is done already changes nothing" if self.playbook.name == "deploy" else ""
        results = []
        for target in self.groups[host]:
            error = kind(
                f"not started: {reason}",
                host=target.name,
                state="nothing was changed",
                hint=f"{first}run the same command again{harmless}",
            )
            results.append(Result(target.name, target.service.name, Outcome.SKIPPED, error=error))
        return results

    def tell(self, event: Event) -> None:
        """Report what a result says too: that it cannot be told is no other host's failure."""
        with contextlib.suppress(Exception):
            self.report(event)

    def interrupt(self) -> None:
        """Close all sessions; what runs on them ends."""
        with self._guard:
            self.interrupted.set()
            sessions = list(self._sessions)
        if sessions:
            with ThreadPoolExecutor(max_workers=len(sessions)) as pool:
                wait([pool.submit(session.close) for session in sessions])

    def _defect(self, target: Target, error: Exception, phase: str, state: str) -> Result:
        found = internal_error(error, host=target.name, phase=phase, state=state)
        self.tell(Event(EventKind.FAIL, target.name, phase, found.message, elapsed_s=0.0))
        return Result(target.name, target.service.name, Outcome.FAILED, error=found)


def persevering(work: Callable[[], _T]) -> _T:
    """Do it, and again from the beginning where an interruption comes: what one interruption was for is not lost to the
    next. For what ends soon."""
    while True:
        try:
            return work()
        except KeyboardInterrupt:
            continue


def _over_hosts(run: _Run, targets: Sequence[Target], rollout: Rollout) -> dict[str, list[Result]]:
    """Results by host, in the batches of the rollout."""
    plan = batches(units_of(targets), rollout)
    largest = max(len(unit) for batch in plan for unit in batch)
    workers = min(len(run.groups), max(rollout.parallel, largest))
    results: dict[str, list[Result]] = {}
    pending: dict[Future[None], str] = {}
    reason = ""

    def one(host: str) -> None:
        # Kept here: an interruption may keep the future from being waited for.
        results[host] = run.one_host(host)

    def gather(timeout: float | None) -> None:
        done, _ = wait(pending, timeout=timeout, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
            for result in results[pending.pop(future)]:
                _tell_end(run, result)

    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="host") as pool:
        try:
            for number, batch in enumerate(plan, 1):
                waiting = deque(batch)
                if len(plan) > 1 and not reason:
                    _announce(run.report, number, plan)
                while pending or (waiting and not reason):
                    while waiting and not reason and len(pending) + len(waiting[0]) <= workers:
                        for host in waiting.popleft():
                            pending[pool.submit(one, host)] = host
                    # In short waits: a signal that another thread received reaches this one only between them.
                    gather(_SIGNALS_EVERY_S)
                    ended = [host for host in list(results) if host not in pending.values()]
                    passed = {host: not any(each.error for each in results[host]) for host in ended}
                    reason = reason_to_stop(plan, rollout, passed)
        except KeyboardInterrupt:
            reason = "the run was interrupted"
            persevering(run.interrupt)
        while pending:
            persevering(lambda: gather(None))
        persevering(pool.shutdown)
    left = [host for host in run.groups if host not in results]
    if left:
        message = f"stopped: {reason}; not started: {_some(left)}"
        run.report(Event(EventKind.NOTE, "", "rollout", message))
    return results | {host: run.skip(host, reason) for host in left}


def _tell_end(run: _Run, result: Result) -> None:
    kind = EventKind.DONE if result.error is None else EventKind.FAIL
    elapsed = sum(result.seconds.values())
    run.tell(Event(kind, result.host, RUN_END, result.outcome.value, elapsed_s=elapsed))


def _announce(report: Reporter, number: int, plan: Sequence[Batch]) -> None:
    hosts = [host for unit in plan[number - 1] for host in unit]
    report(Event(EventKind.NOTE, "", "rollout", f"batch {number} of {len(plan)}: {_some(hosts)}"))


def _some(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) < 5 else f"{hosts[0]} to {hosts[-1]}, {len(hosts)} hosts"


def needed_secrets(playbook: Playbook) -> Sequence[str] | None:
    """Names of the secrets that a run of the playbook takes from their sources; None: all.

    Going back takes what the host has: the way back must not hang on a password store.
    """
    kinds = {step.kind for step in playbook.steps}
    if "build" in kinds:
        return None
    asks = kinds & {"wait", "smoke", "validate", "bench"}
    return API_KEY if asks and "go_back" not in kinds else ()


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


def internal_error(error: Exception, *, host: str, phase: str = "", state: str = "") -> OpsError:
    """An exception that should not have come up as an error of one host, with the end of its traceback."""
    where = traceback.format_exception(error)
    return OpsError(
        redact(f"internal error: {type(error).__name__}: {error}"),
        host=host,
        phase=phase,
        state=state,
        hint="this is a defect of ddtree-ops: please report it with these lines",
        details=tuple(redact("".join(where)).splitlines()[-12:]),
    )


def _known_bundles(playbook: Playbook, targets: Iterable[Target]) -> dict[str, Bundle | None]:
    """What the cache already holds of each runtime that is to be built, looked up while the hosts are connected."""
    builds = any(step.kind == "build" for step in playbook.steps)
    runtimes = {repr(target.runtime): target.runtime for target in targets}
    return {name: known_bundle(runtime) if builds else None for name, runtime in runtimes.items()}


def _run_one(run: _Run, deployment: Deployment) -> Result:
    playbook, interrupted = run.playbook, run.interrupted
    try:
        failure = (_run_all_steps if playbook.reports else _run_steps)(run, deployment)
        if any(step.kind == "push" for step in playbook.steps) and not isinstance(failure, UnreachableError):
            deployment.prune()
    except KeyboardInterrupt:
        interrupted.set()
    if interrupted.is_set():
        return _cut(run, deployment)
    return _result(deployment, failure)


def _cut(run: _Run, deployment: Deployment) -> Result:
    """The result of a target that was interrupted."""
    failure = _interruption(deployment)
    left = deployment.hold.left
    run.tell(Event(EventKind.FAIL, deployment.target.name, "interrupted", left, elapsed_s=0.0))
    return _result(deployment, failure)


def _result(deployment: Deployment, failure: OpsError | None) -> Result:
    target = deployment.target
    return Result(
        target.name,
        target.service.name,
        _outcome(deployment, failure),
        plan=deployment.plan,
        checks=deployment.checks,
        diagnosis=deployment.diagnosis,
        evidence=deployment.evidence,
        error=failure,
        seconds=deployment.frame.seconds,
        confirm_until=deployment.confirm_until,
    )


def _interruption(deployment: Deployment) -> Interrupted:
    host, safety, switched = deployment.target.host.name, deployment.hold.safety, deployment.activation
    again = safety.same_again(host)
    # What "the newest other" is has changed with the switch.
    if safety.command == "rollback" and switched is not None:
        again = f"ddtree-ops rollback {host} --to {switched.id}"
    return Interrupted(
        f"interrupted during {deployment.frame.step or 'the start'}",
        host=deployment.target.name,
        state=deployment.hold.left,
        hint=deployment.next_step or f"{again}   (goes on from there: what is not validated is validated)"
        if deployment.changed
        else again,
    )


def _run_steps(run: _Run, deployment: Deployment) -> OpsError | None:
    playbook = run.playbook
    try:
        for number in range(len(playbook.steps)):
            _step(run, deployment, playbook.steps[number:])
    except OpsError as error:
        return error if run.interrupted.is_set() else _after_failure(deployment, playbook, error)
    try:
        with heeding():
            deployment.accept()
    except CheckFailed as error:  # it died, or was restarted, after it had passed
        return error if deployment.member else _after_failure(deployment, playbook, error)
    except OpsError as error:
        lost = deployment.hold.lost() if isinstance(error, LockLost) else None
        return _not_ours(deployment, error, lost) if lost is not None else error
    return None


def _run_all_steps(run: _Run, deployment: Deployment) -> OpsError | None:
    """Every step, whatever failed before, as long as the host can be asked; of several failures the worst."""
    failures: list[OpsError] = []
    for step in run.playbook.steps:
        if run.interrupted.is_set():
            return None
        failure: OpsError | None = None
        try:
            _perform(deployment, step, run.perform)
        except OpsError as error:
            if run.interrupted.is_set():
                return error
            failure = error
            failures.append(error)
        if run.watch is not None:
            run.watch(deployment, step, failure)
        if isinstance(failure, UnreachableError | LockHeld):
            return failure
    if not failures:
        return None
    code = worst_code(failure.exit_code for failure in failures)
    worst = next(failure for failure in failures if failure.exit_code is code)
    for step in run.playbook.on_failure if deployment.worth_explaining else ():
        try:
            _perform(deployment, step, run.perform)
        except OpsError as error:
            worst.details = (*worst.details, f"{step.kind} failed too: {error.message}")
    return worst


def _step(run: _Run, deployment: Deployment, steps: Sequence[Step]) -> None:
    """Do the first of ``steps``; a node of a service over several hosts does it together with the others."""
    step, member = steps[0], deployment.member
    failure: OpsError | None = None
    try:
        if member is not None and step.kind == "activate":
            join_plans(deployment, member)
        if step.kind in _TOUCHING and not deployment.settled:
            _check_ahead(deployment, steps)
        _perform(deployment, step, run.perform)
    except OpsError as error:
        if run.watch is not None and not run.interrupted.is_set():
            run.watch(deployment, step, error)
        if member is None:
            raise
        failure = error
    else:
        if run.watch is not None:
            run.watch(deployment, step, None)
    if member is None:
        return
    ended = member.end_step(step.kind, failure)
    if ended is None:
        return
    if failure is None:
        deployment.frame.say(step.kind, ended.message)
    raise ended.at(host=deployment.target.name, phase=step.kind, state=deployment.hold.left)


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
                    host=deployment.target.name, phase="smoke", state=deployment.frame.state_left
                ) from None


def _after_failure(deployment: Deployment, playbook: Playbook, error: OpsError) -> OpsError:
    """Run the failure steps. Each is tried even when an earlier one failed; its own failure is added as a detail."""
    final = error
    member = deployment.member
    lost = None if isinstance(error, UnreachableError) else deployment.hold.lost()
    if lost is not None:
        final = _not_ours(deployment, error, lost)
        if member is None:
            return final
    if member is not None:
        deployment.worth_explaining = any(member.share_left("explain", deployment.worth_explaining))
    unreached: list[str] = []
    for step in playbook.on_failure if deployment.worth_explaining else ():
        failed: OpsError | None = None
        try:
            _perform(deployment, step)
        except RolledBack as rolled_back:
            rolled_back.details = (f"why: {error.message}", *error.details)
            rolled_back.hint = rolled_back.hint or error.hint
            final = rolled_back
        except OpsError as another:
            failed = another
            if isinstance(error, UnreachableError) and isinstance(another, UnreachableError):
                unreached.append(step.kind)
            else:
                final.details = (*final.details, f"{step.kind} failed too: {another.message}")
        if member is not None:
            member.end_step(step.kind, failed)
    if unreached:
        final.details = (*final.details, f"not done, for the connection is gone: {', '.join(unreached)}")
    if member is not None and deployment.worth_explaining:
        name_the_first(member, final, deployment)
    if deployment.changed and lost is None and not (deployment.operated and final.state):
        final.state = deployment.hold.left
    return final


def _not_ours(deployment: Deployment, error: OpsError, lost: LockLost) -> OpsError:
    """What failed under a lock that somebody else has by now: theirs to judge, and nothing is touched or explained."""
    if isinstance(error, LockLost):
        error.state = lost.state
        error.details = (*error.details, *(line for line in lost.details if line not in error.details))
        return error
    deployment.frame.failure = lost
    lost.details = (*lost.details, f"seen before that was noticed: {error.message}")
    return lost.at(host=deployment.target.name, phase=error.phase)


def _perform(deployment: Deployment, step: Step, perform: Perform | None = None) -> None:
    """Do one step. A defect of ours becomes an error too: what failed after a switch has to be rolled back."""
    arguments: dict[str, Any] = step.arguments
    try:
        with heeding():
            if perform and step.kind in perform:
                perform[step.kind](deployment, step)
            else:
                getattr(deployment, step.kind)(**arguments)
    except OpsError:
        raise
    except Exception as error:
        raise internal_error(
            error, host=deployment.target.name, phase=step.kind, state=deployment.frame.state_left
        ) from error


def _outcome(deployment: Deployment, error: OpsError | None) -> Outcome:
    if isinstance(error, RolledBack):
        return Outcome.ROLLED_BACK
    if isinstance(error, Interrupted):
        return Outcome.INTERRUPTED
    if error is not None:
        return Outcome.FAILED
    if deployment.activation is not None and deployment.activation.reason != "validate":
        return Outcome.RESTORED if deployment.activation.reason == "rollback" else Outcome.DEPLOYED
    if deployment.operated and not deployment.checks:
        return Outcome.DONE
    return Outcome.UNCHANGED if deployment.settled else Outcome.PASSED
