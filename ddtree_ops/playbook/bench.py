"""A bench over targets: every configuration is deployed, its points are measured, and what ran before comes back.

Each start of a configuration is a deployment like any other: with its lock, its armed rollback, its smoke check. One
that does not start is a failed point with its diagnosis, and the others go on. The report is saved after every point, so
that a run that is killed leaves all that it measured, and is resumed from there. A lock of its own is held from the first
look to the end: what an earlier bench left was left by one that is no more.
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ddtree_ops import __version__
from ddtree_ops.checks.bench.generators import Choice
from ddtree_ops.checks.bench.measuring import PHASE, Bench, default_prompts
from ddtree_ops.checks.bench.points import (
    Configuration,
    Point,
    configurations,
    missing,
    ordered,
    recommended,
    with_speedups,
)
from ddtree_ops.checks.bench.sampling import HISTOGRAM, take_sample
from ddtree_ops.checks.speculation import TOO_LITTLE
from ddtree_ops.deploy.deployed_settings import deployed_settings
from ddtree_ops.deploy.guard import Safety, describe_holder, locked, new_lock_id, take_lock
from ddtree_ops.deploy.history import Activation, History, read_history
from ddtree_ops.deploy.outcome import Outcome, Result
from ddtree_ops.deploy.secrets import api_key_of
from ddtree_ops.errors import (
    CheckFailed,
    ConfigError,
    ExitCode,
    Inconclusive,
    Interrupted,
    LockHeld,
    LockLost,
    OpsError,
    UnreachableError,
    UsageError,
    heed_interruption,
)
from ddtree_ops.inventory import override
from ddtree_ops.inventory.models import Target
from ddtree_ops.playbook import operate
from ddtree_ops.playbook.load import load_playbook
from ddtree_ops.playbook.models import Playbook
from ddtree_ops.playbook.run import Connector, run_playbook, worst_code
from ddtree_ops.remote.session import Session
from ddtree_ops.results import (
    CheckResult,
    Event,
    EventKind,
    Evidence,
    Figure,
    Reporter,
    Verdict,
    exit_code_of,
)
from ddtree_ops.runreport import RunReport, TargetReport
from ddtree_ops.secret import Secret
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.layout import Layout
from ddtree_ops.wording import count

__all__ = [
    "BenchOptions",
    "BenchRun",
    "deployed_otherwise",
    "differences",
    "gains_too_little",
    "new_run_id",
    "refuse_other",
    "refuse_what_lint_refuses",
    "replaced",
    "run_bench",
    "starts_needed",
]

_SHOWN = 6
_AFTER_LEASE_S = 5.0
_MAY_SERVE = "a configuration of the bench may serve"


@dataclass(frozen=True)
class BenchOptions:
    """What is measured. ``budgets`` and ``topk`` left out: the service's own.

    :param requests: of a point; at least twice its concurrency are sent.
    :param max_tokens: longest answer.
    :param prompts: left out: the shipped ones.
    """

    budgets: tuple[int, ...] = ()
    topk: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = (1, 8, 32)
    baseline: bool = True
    dflash: bool = True
    requests: int = 32
    max_tokens: int = 256
    prompts: tuple[str, ...] = ()
    generator: Choice = "auto"

    def plan(self, target: Target) -> tuple[Configuration, ...]:
        """The configurations of a target in the order in which they are started.

        :raises UsageError: one that cannot be, or a service over several hosts.
        """
        if target.node is not None:
            raise UsageError(
                f"{target.service.name} runs one engine over several hosts, and bench takes services of one host",
                host=target.host.name,
                state="nothing was changed",
            )
        found = configurations(
            target.service,
            budgets=self.budgets,
            topk=self.topk,
            baseline=self.baseline,
            dflash=self.dflash,
        )
        for each in found:
            override(target, each.settings(target.service))
        return ordered(found, target.service)

    def to_json(self, targets: Sequence[Target]) -> dict[str, Any]:
        """As the report holds it, with a digest of what each target was when the run began."""
        prompts = self.prompts or default_prompts()
        return {
            "budgets": list(self.budgets),
            "topk": list(self.topk),
            "concurrency": list(self.concurrency),
            "baseline": self.baseline,
            "dflash": self.dflash,
            "requests": self.requests,
            "max_tokens": self.max_tokens,
            "prompts": _digest("\n".join(prompts)),
            "generator": self.generator,
            "targets": {target.name: _digest_of(target) for target in targets},
        }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest_of(target: Target) -> str:
    """Of what is set: a version of ddtree-ops with further settings reads the same inventory as the same."""
    said = (each.model_dump_json(exclude_defaults=True) for each in (target.service, target.runtime))
    return _digest("".join(said))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells the options of two runs apart, a line each. Pure."""
    found = []
    for name in dict.fromkeys((*before, *now)):
        first, second = before.get(name), now.get(name)
        if first == second:
            continue
        if name == "targets" and isinstance(first, Mapping) and isinstance(second, Mapping):
            if list(first) != list(second):
                found.append(f"targets: {', '.join(first)}, and now {', '.join(second)}")
            changed = [each for each in first if each in second and first[each] != second[each]]
            found += [f"{each}: the inventory (or --set) says something else of it now" for each in changed]
        elif name == "prompts":
            found.append("prompts: other ones")
        else:
            found.append(f"{name}: {_shown(first)}, and now {_shown(second)}")
    return tuple(found)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def new_run_id() -> str:
    """Sorts by time, and is nobody else's."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def starts_needed(
    targets: Sequence[Target], options: BenchOptions, resumed: RunReport | None = None
) -> dict[str, tuple[Configuration, ...]]:
    """Configurations that are started, by name of the target: those with a point that is missing."""
    done = {each.target: each.checks for each in resumed.targets} if resumed else {}
    return {
        target.name: tuple(
            each
            for each in options.plan(target)
            if missing(each, options.concurrency, done.get(target.name, ()))
        )
        for target in targets
    }


def refuse_what_lint_refuses(
    targets: Sequence[Target],
    starts: Mapping[str, Sequence[Configuration]],
    *,
    safety: Safety,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Lint every configuration that is to be started. No host is contacted; a runtime that is not in the cache is built.

    :param starts: see :func:`starts_needed`.
    :param safety: its ``lint`` is the command that lints what the inventory says.
    :raises ConfigError: with every error found, and the command that shows those of the first configuration.
    :raises BuildError: a runtime cannot be built.
    """
    from ddtree_ops.lint import Severity, facts_of, lint
    from ddtree_ops.runtime import build

    refused: list[tuple[Target, Configuration, list[str]]] = []
    for target in targets:
        wanted = starts[target.name]
        facts = facts_of(build(target.runtime, progress=progress)) if wanted else None
        for configuration in wanted:
            assert facts is not None
            found = lint(override(target, configuration.settings(target.service)), facts)
            errors = [f"{one.rule}: {one}" for one in found if one.severity is Severity.ERROR]
            if errors:
                refused.append((target, configuration, errors))
    if not refused:
        return
    first, configuration, _ = refused[0]
    asked = sum(map(len, starts.values()))
    settings = configuration.settings(first.service)
    raise ConfigError(
        f"lint refuses {len(refused)} of the {count(asked, 'configuration')}",
        host=first.name,
        phase="lint",
        state="nothing was changed",
        hint=_with_lint(safety, settings).lint_of(first.host.name),
        details=tuple(
            f"{target.name} {each.name}: {line}" for target, each, lines in refused for line in lines
        ),
    )


def _with_lint(safety: Safety, settings: Sequence[str]) -> Safety:
    """The same, and what lints a configuration in the place of what lints the inventory's own."""
    kept = [each for each in settings if not each.startswith("health.")]
    said = [safety.lint or "ddtree-ops lint {host}", *(f"--set {shlex.quote(each)}" for each in kept)]
    return replace(safety, lint=" ".join(said))


@dataclass(frozen=True)
class BenchRun:
    """How a bench ended.

    :param errors: what ended it early, or kept what ran before from coming back.
    """

    report: RunReport
    errors: tuple[OpsError, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """Of the errors the worst; without one, of the verdict."""
        if self.errors:
            return worst_code(error.exit_code for error in self.errors)
        return exit_code_of(self.report.verdict)


def run_bench(
    targets: Sequence[Target],
    options: BenchOptions,
    *,
    connect: Connector,
    report: Reporter,
    save: Callable[[RunReport], object],
    resumed: RunReport | None = None,
    safety: Safety | None = None,
    inventory: str = "",
) -> BenchRun:
    """Measure every point on every target, one target after the other.

    Ctrl-C (and SIGTERM, SIGHUP where the caller turns them into KeyboardInterrupt) ends the measuring; what ran before is
    put back, which a second one ends too. What was measured is in the report either way.

    :param save: is given the report after every point; a report that is not complete yet says so.
    :param resumed: the report of an earlier run: what it judged is kept and not measured again.
    :raises UsageError: points that cannot be, or a report of other options; nothing was changed.
    """
    plans = {target.name: options.plan(target) for target in targets}
    wanted = options.to_json(targets)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if resumed is None:
        first = RunReport(
            "bench", new_run_id(), now, version=__version__, inventory=inventory, options=wanted
        )
    else:
        refuse_other(resumed, wanted)
        first = replace(resumed, ended="", complete=False)
    book = _Book(first, save)
    errors: list[OpsError] = []
    for target in targets:
        one = _Target(
            target, plans[target.name], options, book, connect, report, safety or Safety(command="bench")
        )
        one.run()
        errors += one.errors
        if any(isinstance(error, Interrupted) for error in one.errors):
            break
    whole = not any(starts_needed(targets, options, book.report).values())
    book.change(
        ended=datetime.now(UTC).isoformat(timespec="seconds"),
        complete=whole,
        targets=tuple(_with_best(each, whole) for each in book.report.targets),
    )
    return BenchRun(book.report, tuple(errors))


def _with_best(found: TargetReport, whole: bool) -> TargetReport:
    """With the fastest configuration of each concurrency; none is named while points of the run are missing. Pure."""
    facts = {name: value for name, value in found.facts.items() if name != "recommended"}
    best = recommended(found.checks) if whole else {}
    return replace(found, facts={**facts, "recommended": dict(best)} if best else facts)


def refuse_other(resumed: RunReport, wanted: Mapping[str, Any]) -> None:
    """:raises UsageError: the report is no bench, or one of other options, prompts or settings."""
    if resumed.command != "bench":
        raise UsageError(f"the report to resume is one of {resumed.command}, and not of bench")
    told = differences(resumed.options, wanted)
    if told:
        raise UsageError(
            "the run to resume measured something else",
            details=told,
            state="nothing was changed",
            hint="give the options of that run, or leave --resume out for a new one",
        )


@dataclass
class _Book:
    """The report as it grows; every change is saved."""

    report: RunReport
    save: Callable[[RunReport], object]

    def of(self, target: Target) -> TargetReport:
        """What is written of a target so far."""
        empty = TargetReport(target.name, target.host.name, target.service.name)
        return next((each for each in self.report.targets if each.target == target.name), empty)

    def write(self, found: TargetReport) -> None:
        """Put a target's report in the place of its earlier one."""
        others = [each.target for each in self.report.targets]
        if found.target in others:
            written = tuple(found if each.target == found.target else each for each in self.report.targets)
        else:
            written = (*self.report.targets, found)
        self.change(targets=written)

    def change(self, **values: Any) -> None:
        """Change the report, and save it."""
        self.report = replace(self.report, **values)
        self.save(self.report)


@dataclass
class _Target:
    """The bench of one target."""

    target: Target
    plan: Sequence[Configuration]
    options: BenchOptions
    book: _Book
    connect: Connector
    report: Reporter
    safety: Safety
    errors: list[OpsError] = field(default_factory=list)
    touched: bool = False
    tried: bool = False
    """What ran before the bench was put back, and failed: doing it again is no next step."""
    left: bool = False
    """An earlier bench, which did not end, left what runs now."""
    chosen: str = ""
    rendered: dict[str, Any] = field(default_factory=dict)
    """The prompts of the sample as they are sent: the same for every configuration."""
    settings: Sequence[str] = ()
    """Those that make the service the configuration under way."""
    lock: str = ""
    """Id of the lock of the whole bench, and the session that it is held over."""
    holder: Session | None = None

    def run(self) -> None:
        """Measure what is missing, then put back what ran before. No other bench of the service runs meanwhile."""
        earlier = self.book.of(self.target)
        self._write(errors=(), facts={**earlier.facts, **_facts_of(self.target)})
        try:
            try:
                with self._alone() as session:
                    self._measure_and_put_back(session)
            except OpsError as error:
                heed_interruption(error)
                self._fail(error.at(host=self.target.name, phase=PHASE))
        except KeyboardInterrupt:
            self.errors.append(self._interruption())

    @contextmanager
    def _alone(self) -> Iterator[Session]:
        """Hold the lock of a whole bench, beside that of the service, which each deployment and each measuring takes and
        gives back. It ends with this process, or with the connection that it is held over, which is for a first look too.

        :raises LockHeld: another bench is under way, with who runs it where; nothing was changed.
        """
        host, lease = self.target.host.name, self.target.service.rollback.lease
        had, wait = self.lock, self.safety.lock_wait
        with self.connect(self.target) as session:
            lock = new_lock_id()
            try:
                take_lock(
                    session,
                    _WholeBench.of(self.target),
                    lock_id=lock,
                    command=self.safety.command,
                    lease=lease,
                    wait=max(wait, lease + _AFTER_LEASE_S) if had else wait,
                    tell=self.say,
                )
            except LockHeld as held:
                raise LockHeld(
                    f"another bench is under way: {held.message}",
                    state="nothing was changed, and that bench goes on",
                    hint=f"wait for it: {self.safety.same_again(host)} --lock-wait 2h; or end it by Ctrl-C where it runs, which "
                    f"puts back what ran before it; should its machine be gone, the lock ends after {lease:.0f} s",
                ) from held
            self.lock, self.holder = lock, session
            yield session

    def _need_alone(self) -> None:
        """See that the lock of the whole bench is still ours. One round trip.

        :raises LockLost: it was broken, or its lease ran out. :raises UnreachableError: the session ended that it is held over.
        """
        assert self.holder is not None
        layout = _WholeBench.of(self.target)
        found = self.holder.check_lock(layout.lock, self.lock)
        if found.held:
            return
        taken = found.holder is not None and found.left_s > 0
        now = describe_holder(found.holder or {}, layout.unit) if taken else "nobody has it now"
        raise LockLost(
            f"the lock of this whole bench was lost: {now}", hint=f"ddtree-ops status {self.target.host.name}"
        )

    @contextmanager
    def _alone_still(self) -> Iterator[None]:
        """Under the lock of the whole bench; where the connection ended that it was held over, it is taken again.

        :raises LockHeld: somebody else has it by now.
        """
        ended = False
        try:
            self._need_alone()
        except UnreachableError as error:
            heed_interruption(error)
            ended = True
            self.say("the connection ended over which the lock of this bench was held: takes it again")
        with self._alone() if ended else nullcontext():
            yield

    def _measure_and_put_back(self, session: Session) -> None:
        ours, interruption = True, None
        try:
            try:
                self._measure(session)
            except OpsError as error:
                heed_interruption(error)
                ours = not isinstance(error, LockHeld)
                if not ours and self._owes:
                    error.state = f"{_MAY_SERVE}; what ran before it was not put back"
                    error.hint = (
                        f"ddtree-ops lock status {self.target.host.name}; once it is free: {self._back}"
                    )
                self._fail(error.at(host=self.target.name, phase=PHASE))
        except KeyboardInterrupt:
            interruption = self._interruption()
        serves = self._put_back() if ours and self._owes else "nothing was changed"
        if interruption is not None:
            interruption.state = f"{serves}; {interruption.state}"
            self.errors.append(interruption)

    def _measure(self, session: Session) -> None:
        if "original" not in self.written.facts:
            past = read_history(session, Layout.of(self.target))
            self._write(facts={**self.written.facts, "original": self._original(past)})
            if said := _otherwise(session, self.target, past):
                self.say(said)
        if self.options.generator == "bench_serving":
            self._need_bench_serving()
        for number, configuration in enumerate(self.plan, 1):
            points = missing(configuration, self.options.concurrency, self.written.checks)
            if points or self._unsampled(configuration):
                self._need_alone()
            if points:
                self.say(f"{configuration.name}: configuration {number} of {len(self.plan)}")
                self._configuration(configuration, points)
            elif self._unsampled(configuration):
                if self._runs_still(configuration):
                    self._configuration(configuration, ())
                else:
                    self._note_sample(
                        configuration, "no accept histogram: the start that was measured serves no more"
                    )

    @property
    def written(self) -> TargetReport:
        """What the report holds of this target."""
        return self.book.of(self.target)

    def say(self, message: str) -> None:
        """Report a note."""
        self.report(Event(EventKind.NOTE, self.target.name, PHASE, message))

    def _write(self, **values: Any) -> None:
        found = replace(self.written, **values)
        self.book.write(replace(found, checks=with_speedups(found.checks)))

    def _fail(self, error: OpsError) -> None:
        self.errors.append(error)
        self._write(errors=(*self.written.errors, error.render()))

    def _interruption(self) -> Interrupted:
        return Interrupted(
            "interrupted",
            host=self.target.name,
            phase=PHASE,
            state="what was measured is in the report",
            hint=f"{self.safety.same_again(self.target.host.name)}   (measures what is missing)",
        )

    def _need_bench_serving(self) -> None:
        """:raises Inconclusive: it does not run on the host; nothing was changed."""
        with self.connect(self.target) as session:
            bench = Bench(session, self.target, self.report, (), 0, 0, self.options.generator)
            try:
                self.chosen = bench.choose()
            except Inconclusive as error:
                raise error.at(state="nothing was measured") from None

    # -- a configuration -----------------------------------------------------------------------------------

    def _configuration(self, configuration: Configuration, points: Sequence[Point]) -> None:
        """Start it, measure its points and take its sample; what fails at it alone is written down as failed points.

        :raises OpsError: the bench cannot go on: no lock, no host, interrupted.
        """
        self.settings = configuration.settings(self.target.service)
        target = override(self.target, self.settings)
        if not self._runs_still(configuration):
            result = self._started(target)
            if result.error is not None:
                if isinstance(result.error, LockHeld | UnreachableError | Interrupted):
                    raise KeyboardInterrupt if isinstance(result.error, Interrupted) else result.error
                self._not_started(result, configuration, points)
                return
            self._keep_figures(configuration, _restart_figure(result, configuration))
        layout = Layout.of(target)
        with self.connect(target) as session, locked(session, layout, target.service, self.safety) as lock:
            bench = Bench(
                session,
                target,
                self.report,
                prompts=self.options.prompts or default_prompts(),
                requests=self.options.requests,
                max_tokens=self.options.max_tokens,
                generator=self.options.generator,
                api_key=api_key_of(target),
                chosen=self.chosen,
                floor=self.target.service.health.min_accept_length,
            )
            invocation = UnitControl(session, target.service.unit).state().invocation_id
            starts = {**self.written.facts.get("starts", {}), configuration.name: invocation}
            try:
                figures = bench.start_figures(configuration)
            except (CheckFailed, Inconclusive) as error:
                self._not_measured(error, configuration, points)
                return
            self.chosen = bench.choose()
            self._keep_figures(configuration, figures)
            self._write(facts={**self.written.facts, "starts": starts, "generator": self.chosen})
            for point in points:
                found = bench.measure(point)
                self._hold(session, layout, lock)
                self._keep([found])
                bench.tell(found)
                if not self._holds(session, invocation):
                    self._died(session, target, invocation, found, points)
                    if configuration.mode != "baseline":
                        self._keep_figures(configuration, (), (HISTOGRAM,))
                        self._note_sample(
                            configuration, "no accept histogram: the unit did not hold under its points"
                        )
                    return
            if configuration.mode != "baseline":
                self._sample(session, target, configuration, bench.api_key)
                self._hold(session, layout, lock)
                if not self._holds(session, invocation):
                    self._explained(session, target, invocation, configuration)
                    self.say(
                        f"{configuration.name}: the unit did not hold under the sample of its acceptance"
                    )

    def _hold(self, session: Session, layout: Layout, lock: str) -> None:
        """:raises LockLost: the lock is somebody else's by now, or nobody's."""
        if not session.check_lock(layout.lock, lock).held:
            raise LockLost(
                "the lock of this bench was lost while it measured",
                host=self.target.name,
                phase=PHASE,
                state=f"somebody else is in charge of {self.target.service.unit} now; nothing more was touched",
                hint=f"ddtree-ops lock status {self.target.host.name}",
            )

    def _holds(self, session: Session, invocation: str) -> bool:
        """The run that was started is up still. One that died keeps its name until systemd has started the next."""
        state = UnitControl(session, self.target.service.unit).state()
        return state.running and state.invocation_id == invocation

    # -- its acceptance ------------------------------------------------------------------------------------

    def _unsampled(self, configuration: Configuration) -> bool:
        """It was measured, but an earlier run ended before its sample."""
        facts = self.written.facts
        return (
            configuration.mode != "baseline"
            and configuration.name in facts.get("starts", {})
            and configuration.name not in facts.get("acceptance_samples", {})
        )

    def _sample(
        self, session: Session, target: Target, configuration: Configuration, api_key: Secret | None
    ) -> None:
        self.report(
            Event(
                EventKind.PROGRESS, self.target.name, PHASE, f"{configuration.name}, sample of its acceptance"
            )
        )
        found = take_sample(
            session,
            target,
            configuration,
            max_tokens=self.options.max_tokens,
            report=lambda event: self.report(
                replace(
                    event,
                    kind=EventKind.PROGRESS,
                    phase=PHASE,
                    message=f"{configuration.name}, {event.message}",
                )
            ),
            api_key=api_key,
            shared=self.rendered,
        )
        self._keep_figures(configuration, found.figures, (HISTOGRAM,))
        self._note_sample(configuration, found.said)

    def _note_sample(self, configuration: Configuration, said: str) -> None:
        samples = {**self.written.facts.get("acceptance_samples", {}), configuration.name: said}
        self._write(facts={**self.written.facts, "acceptance_samples": samples})
        self.say(f"{configuration.name}: {said}")

    def _runs_still(self, configuration: Configuration) -> bool:
        """The start that an interrupted run measured still serves: no load is spent on it again."""
        known = self.written.facts.get("starts", {}).get(configuration.name)
        if not known or self.touched:
            return False
        with self.connect(self.target) as session:
            state = UnitControl(session, self.target.service.unit).state()
        return state.running and state.invocation_id == known

    def _started(self, target: Target) -> Result:
        """Deploy it; what runs already is restarted, so that every configuration is measured on a start of its own."""
        self.touched = True
        result = self._play(load_playbook("deploy"), target)
        if result.error is None and result.outcome in (Outcome.UNCHANGED, Outcome.PASSED):
            restart = operate.restart(wait=True, smoke=True, load_timeout=None, drain_timeout=None)
            result = self._play(restart, target)
        return result

    def _play(self, playbook: Playbook, target: Target) -> Result:
        safety = _with_lint(self.safety, self.settings) if self.settings else self.safety
        came = threading.Event()
        (result,) = run_playbook(
            playbook, [target], connect=self.connect, report=self.report, safety=safety, interrupted=came
        )
        if came.is_set() and not isinstance(result.error, Interrupted):  # while the session closed
            raise KeyboardInterrupt
        return result

    def _keep(self, results: Sequence[CheckResult]) -> None:
        names = {each.name for each in results}
        kept = [each for each in self.written.checks if each.name not in names]
        self._write(checks=(*kept, *results))

    def _keep_figures(
        self, configuration: Configuration, figures: Sequence[Figure], stale: Sequence[str] = ()
    ) -> None:
        self._write(figures=replaced(self.written.figures, configuration, figures, stale))

    def _not_started(self, result: Result, configuration: Configuration, points: Sequence[Point]) -> None:
        error = result.error
        assert error is not None
        cause = result.diagnosis.headline() if result.diagnosis and result.diagnosis.diagnoses else ""
        verdict = Verdict.INCONCLUSIVE if isinstance(error, Inconclusive) else Verdict.FAIL
        because = next((text[5:] for text in error.details if text.startswith("why: ")), "")
        told = f"{error.message} {because}"
        why = "; ".join(text for text in (error.message, because, cause if cause not in told else "") if text)
        evidence = [Evidence("deploy", line.strip()) for line in error.render().splitlines()]
        if result.evidence is not None:
            evidence.append(Evidence("evidence", str(result.evidence)))
        self._keep(
            [self._bad(point, verdict, f"not started: {why}", evidence, error.hint) for point in points]
        )
        if result.diagnosis is not None and result.diagnosis.root is not None:
            found = {**result.diagnosis.to_json(), "configuration": configuration.name}
            self._write(diagnoses=(*self.written.diagnoses, found))
        self.say(f"{configuration.name}: not started, the others go on: {error.message}")

    def _died(
        self,
        session: Session,
        target: Target,
        invocation: str,
        last: CheckResult,
        points: Sequence[Point],
    ) -> None:
        """The unit did not hold under a point: its run is explained, and the points after it are not measured on another."""
        headline = self._explained(session, target, invocation, points[0].configuration)
        if headline:
            last = replace(last, evidence=(*last.evidence, Evidence("diagnosis", headline)))
        names = [point.name for point in points]
        after = points[names.index(last.name) + 1 :]
        why = f"not measured: the unit did not hold under {last.name}"
        self._keep([last, *(self._bad(point, Verdict.FAIL, why, (), last.hint) for point in after)])

    def _explained(
        self, session: Session, target: Target, invocation: str, configuration: Configuration
    ) -> str:
        """Why a run of the unit ended, in a line, and whole in the report; empty where no signature says."""
        from ddtree_ops.checks.signatures import signatures

        _, found = signatures(session, target, invocation=invocation)
        if found.root is None:
            return ""
        report = {**found.to_json(), "configuration": configuration.name}
        self._write(diagnoses=(*self.written.diagnoses, report))
        self.say(f"{configuration.name}: {found.headline()}")
        return found.headline()

    def _not_measured(
        self, error: CheckFailed | Inconclusive, configuration: Configuration, points: Sequence[Point]
    ) -> None:
        verdict = Verdict.INCONCLUSIVE if isinstance(error, Inconclusive) else Verdict.FAIL
        self._keep([self._bad(point, verdict, error.message, (), error.hint) for point in points])
        self.say(f"{configuration.name}: {error.message}")

    def _bad(
        self, point: Point, verdict: Verdict, summary: str, evidence: Sequence[Evidence], hint: str
    ) -> CheckResult:
        facts = {"configuration": point.configuration.name, "concurrency": point.concurrency}
        return CheckResult(point.name, verdict, summary, self.target.name, facts, tuple(evidence), hint)

    # -- what ran before -----------------------------------------------------------------------------------

    def _history(self) -> History:
        with self.connect(self.target) as session:
            return read_history(session, Layout.of(self.target))

    def _original(self, past: History) -> dict[str, Any] | None:
        """The activation that is there now, or that was there before a bench that did not end; None: there was never one.

        :raises CheckFailed: a bench left what runs, and nothing that passed was there before it.
        """
        host = self.target.host.name
        found, left = past.before_bench
        if found is None and left:
            raise CheckFailed(
                "the last bench was killed, and nothing had passed here before it",
                state="a configuration of that bench may serve; nothing was changed",
                hint=f"ddtree-ops deploy {host}   (then the bench again; or go on with the killed one: --resume and the folder "
                "of its report)",
            )
        if found is None:
            return None
        if left:
            self.left = True
            self.say(
                f"the last bench was killed; what ran before it is activation {found.id} of {found.time}, and is put back "
                "at the end"
            )
        return _noted(found)

    def _left_behind(self) -> bool:
        """An earlier run that was killed may have left one of its configurations."""
        return bool(self.written.facts.get("starts"))

    @property
    def _owes(self) -> bool:
        """What runs may be a configuration of a bench."""
        return self.touched or self.left or self._left_behind()

    @property
    def _back(self) -> str:
        """The command that brings back what ran before, or, where nothing that passed did, what the inventory says."""
        host, original = self.target.host.name, self.written.facts.get("original")
        if original is not None and original["passed"]:
            return f"ddtree-ops rollback {host} --to {original['id']}"
        return f"ddtree-ops deploy {host}"

    def _put_back(self) -> str:
        """Bring back the activation from before; without one that passed, what the inventory says.

        :returns: what serves now.
        """
        original = self.written.facts.get("original")
        self.settings = ()
        error: OpsError | None
        try:
            try:
                with self._alone_still():
                    error = self._went_back(original)
            except OpsError as failure:
                heed_interruption(failure)
                error = failure
        except KeyboardInterrupt:
            error = self._interruption()
        if error is None:
            passed = original is not None and original["passed"]
            return "what ran before the bench is back" if passed else "what the inventory says serves"
        error.at(host=self.target.name, phase="put back")
        if isinstance(error, Interrupted):
            error.state, error.hint = self._interrupted_back(original)
        else:
            if not self.tried:
                error.hint = self._back
            if not error.state or error.state.startswith("nothing was changed"):
                error.state = _MAY_SERVE
        self._fail(error)
        return error.state

    def _interrupted_back(self, original: Mapping[str, Any] | None) -> tuple[str, str]:
        """What an interruption on the way back left, by a look at the host, and the next command."""
        left = f"{_MAY_SERVE}; what ran before it was not put back"
        if original is None or not original["passed"]:
            return left, self._back
        try:
            wrong = self._other_than(original)
            latest = self._history().latest
        except (OpsError, KeyboardInterrupt):
            return f"{left}, as far as is known", self._back
        if wrong:
            return f"{wrong}; what ran before the bench was not put back", self._back
        if latest is not None and latest.good:
            return "what ran before the bench is back", f"ddtree-ops status {self.target.host.name}"
        return (
            "what ran before the bench runs again, and is not validated",
            f"{self._back}   (validates it: nothing is switched any more)",
        )

    def _went_back(self, original: Mapping[str, Any] | None) -> OpsError | None:
        """How it failed; None: it is back, and passed by its own rules."""
        latest = self._history().latest
        if (
            latest is not None
            and original is not None
            and latest.good
            and _key(_noted(latest)) == _key(original)
            and not self._other_than(original)
        ):
            self.say("serves as before the bench")
            return None
        if original is None or not original["passed"]:
            self.say("nothing had passed here before the bench: deploys what the inventory says")
            self.safety = replace(self.safety, command="deploy")
            return self._back_for_good(load_playbook("deploy"))
        self.say(f"puts back what ran before the bench, activation {original['id']}")
        error = self._back_for_good(operate.go_back(to=original["id"]))
        if error is None and (wrong := self._other_than(original)):
            return CheckFailed(f"{wrong}, and not activation {original['id']}")
        return error

    def _back_for_good(self, playbook: Playbook) -> OpsError | None:
        """Go back without a way back: what passed last is a configuration that was to be measured only, perhaps by looser
        rules. That one serves again only where what was there before the bench does not serve at all.
        """
        safety, original = self.safety, self.written.facts.get("original")
        self.safety = replace(safety, rollback=False)
        try:
            result = self._play(playbook, self.target)
        finally:
            self.safety = safety
        error = result.error
        if error is None or isinstance(error, LockHeld | LockLost | UnreachableError | Interrupted):
            return error
        self.tried = True
        if gains_too_little(result.checks):
            return CheckFailed(
                f"what ran before the bench is back, and fails its own rules: {error.message}",
                state="it serves, as before the bench",
                hint=f"ddtree-ops smoke {self.target.host.name}",
            )
        self.say(f"what ran before the bench does not serve: {error.message}")
        if not error.hint or (original and original["id"] in error.hint):
            error.hint = f"ddtree-ops logs {self.target.host.name}   (why it does not serve)"
        try:
            past = self._history()
        except OpsError as failure:
            heed_interruption(failure)
            error.details = (*error.details, f"what passed last is not known: {failure.message}")
            return error
        last = _passed_last(past, original)
        if last is None:
            error.details = (*error.details, "nothing else ever passed here")
            return error
        self.say(f"goes back to what passed last in its place, activation {last.id}")
        instead = self._play(operate.go_back(to=last.id), self.target).error
        if instead is None:
            what = f"what passed last serves in its place, activation {last.id} of {last.time}"
            error.state = f"{what}{', which a bench measured' if past.measured(last) else ''}"
        else:
            error.details = (*error.details, f"going back to what passed last failed too: {instead.message}")
            error.state = instead.state
            if isinstance(instead, Interrupted):
                self.errors.append(instead)
        return error

    def _other_than(self, original: Mapping[str, Any]) -> str:
        """What the host has in place of an activation, by its link and its unit file; empty: it runs that one."""
        layout = Layout.of(self.target)
        with self.connect(self.target) as session:
            listed = session.request("list_dir", {"path": layout.service_dir}).values["entries"]
            text = session.read_file(layout.unit_path)
            state = UnitControl(session, self.target.service.unit).state()
        links = {entry["name"]: entry["target"] for entry in listed if entry["kind"] == "link"}
        release = links.get("current", "").rsplit("/", 1)[-1]
        if not state.running:
            return f"{self.target.service.unit} does not run: {state.describe()}"
        if release != original["release"]:
            return f"release {release[:12] or '(none)'} runs"
        if text is None or hashlib.sha256(text).hexdigest() != original["unit_sha256"]:
            return f"another unit file is at {layout.unit_path}"
        return ""


def _passed_last(past: History, original: Mapping[str, Any] | None) -> Activation | None:
    """The newest that passed, a configuration of a bench too, and is not what was put back and failed. Pure."""
    failed = [_key(original)] if original else []
    if past.latest and not past.latest.good:
        failed.append(_key(_noted(past.latest)))
    return next((item for item in past.good() if _key(_noted(item)) not in failed), None)


def gains_too_little(checks: Iterable[CheckResult]) -> bool:
    """Of a smoke check everything passed, but that speculation gains less than it should: the service serves. Pure."""
    smoke = (each for each in checks if each.name.startswith("smoke."))
    bad = [each for each in smoke if each.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)]
    return bool(bad) and all(each.facts.get(TOO_LITTLE) for each in bad)


class _WholeBench(Layout):
    """The layout of a service under the lock of a whole bench."""

    @property
    def lock(self) -> str:
        """Lock file of the bench of this service."""
        return self.bench_lock


def deployed_otherwise(session: Session, target: Target) -> str:
    """What runs there now was deployed with other settings than the target has, such as those of ``--set``: which ones, and
    what becomes of it. Empty where it was not, or where nothing was deployed. Two round trips.
    """
    return _otherwise(session, target, read_history(session, Layout.of(target)))


def _otherwise(session: Session, target: Target, past: History) -> str:
    found, left = past.before_bench
    if found is None:
        return ""
    changes = deployed_settings(session, Layout.of(target), found, target.service)
    what = "what ran before the bench that was killed" if left else "what runs now"
    if changes is None:
        return f"{what} is of another version of ddtree-ops: how its settings differ from those measured is not known"
    if not changes:
        return ""
    shown = [
        f"{each.name} {each.before or 'not set'}, measured {each.after or 'not set'}" for each in changes
    ]
    more = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    afterwards = (
        "it is put back afterwards"
        if found.good
        else "it never passed and is NOT put back: what is measured as the inventory's own serves afterwards"
    )
    return (
        f"{what} was deployed with other settings than the inventory's: {'; '.join(shown[:_SHOWN])}{more}; {afterwards} "
        "(to measure it give the same --set)"
    )


def _noted(activation: Activation) -> dict[str, Any]:
    """As the report holds what ran before."""
    return {
        "id": activation.id,
        "release": activation.release,
        "unit_sha256": activation.unit_sha256,
        "passed": activation.good,
    }


def _key(noted: Mapping[str, Any]) -> tuple[str, str]:
    return noted["release"], noted["unit_sha256"]


def replaced(
    before: Sequence[Figure], configuration: Configuration, figures: Sequence[Figure], stale: Sequence[str]
) -> tuple[Figure, ...]:
    """Figures of a start, in the place of those of an earlier start of the configuration. Pure.

    :param stale: names of earlier ones that go even where there is none in their place.
    """
    names = {*stale, *(figure.name for figure in figures)}
    kept = [
        figure
        for figure in before
        if dict(_setup_labels(figure)) != configuration.labels or figure.name not in names
    ]
    return (*kept, *figures)


def _setup_labels(figure: Figure) -> Mapping[str, str]:
    return {name: value for name, value in figure.labels.items() if name not in ("phase", "part", "accepted")}


def _restart_figure(result: Result, configuration: Configuration) -> tuple[Figure, ...]:
    """From the order to stop what ran to the first answer of what runs now; none where no step took time."""
    steps = [name for name in ("activate", "restart", "wait") if name in result.seconds]
    seconds = sum(result.seconds[name] for name in steps)
    if not steps:
        return ()
    return (
        Figure(
            "restart", round(seconds, 3), "s", f"steps {' and '.join(steps)}", labels=configuration.labels
        ),
    )


def _facts_of(target: Target) -> dict[str, Any]:
    """What a reader of the report must know of a target."""
    gpu, service = target.host.gpu, target.service
    found: dict[str, Any] = {"runtime": target.runtime.name, "model": service.model, "unit": service.unit}
    found["tensor_parallel"] = service.tensor_parallel
    if gpu is not None:
        found["gpu"] = f"{gpu.count}x {gpu.name}"
        found["interconnect"] = gpu.interconnect
    return found
