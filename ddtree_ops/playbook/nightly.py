"""A playbook that reports, run over hosts: every step on every host, one report, one verdict, a line in the history.

:func:`run_nightly` takes the steps in parts: those before a ``deploy``, that deploy over all hosts as if it had been typed,
those after it; a ``bench`` likewise. A part is run by :func:`~ddtree_ops.playbook.run.run_playbook`, hosts side by side. After every step of
every host the report as far as it goes is handed to ``keep``, which writes it: a run that is killed leaves that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from ddtree_ops import __version__
from ddtree_ops.deploy.deployment import Deployment
from ddtree_ops.deploy.drift import Severity
from ddtree_ops.deploy.guard import Safety
from ddtree_ops.deploy.outcome import Result
from ddtree_ops.deploy.plan import text_sha256
from ddtree_ops.deploy.refusals import judged
from ddtree_ops.deploy.secrets import API_KEY, api_key_of, resolve_secrets
from ddtree_ops.errors import (
    CheckFailed,
    ConfigError,
    ExitCode,
    Inconclusive,
    Interrupted,
    LockHeld,
    OpsError,
    UnreachableError,
    UsageError,
)
from ddtree_ops.inventory.models import RuntimeSpec, Target
from ddtree_ops.playbook.load import load_playbook
from ddtree_ops.playbook.models import Bench, Deploy, Journal, Playbook, Step, Trend, Validate
from ddtree_ops.playbook.rollout import Rollout
from ddtree_ops.playbook.run import Connector, Watch, run_playbook, worst_code
from ddtree_ops.playbook.trend import RUNS, Past, Store, accept_lengths, trend, with_command
from ddtree_ops.results import (
    RUN_END,
    CheckResult,
    Event,
    EventKind,
    Evidence,
    Figure,
    Reporter,
    Verdict,
    exit_code_of,
    worst,
)
from ddtree_ops.runreport import RunReport, TargetReport
from ddtree_ops.service.unitfile import environment_of, exec_start_of
from ddtree_ops.wording import count, moment_of

if TYPE_CHECKING:
    from ddtree_ops.checks.validation.lossless import Baseline
    from ddtree_ops.checks.validation.suites import Planned
    from ddtree_ops.deploy.drift import DriftReport
    from ddtree_ops.deploy.preflight.judge import Wanted
    from ddtree_ops.diagnose.api import DiagnosisReport

__all__ = [
    "Keep",
    "Wishes",
    "drift_results",
    "exit_code",
    "flags_digest",
    "journal_since",
    "parts_of",
    "run_nightly",
    "settled",
    "told",
]

Keep = Callable[[RunReport], None]
"""Writes a report, the last one of a run or one on the way; called by one thread at a time."""

_SUITE = "standard"
_FIRST_LOOK_S = 24 * 3600.0
_PREFIX = "deploy."
_NEVER = ("INVOCATION_ID",)
_UNSEEN = "run.unvalidated"
_OPEN = "for the validate of this nightly to tell: "


@dataclass(frozen=True)
class Wishes:
    """What was asked for beside the playbook.

    :param deploy: do the steps ``deploy`` that are done only when asked for; None: as the playbook says, False: none.
    :param bench: likewise.
    :param suite: another suite for ``validate``; ``checks``: these checks alone.
    :param golden: a file of recorded answers for ``lossless``, before that of the step.
    :param again: the command to type again for one host, ``{host}`` in the place of its name.
    :param new_baseline: later runs are compared with this one and those after it, and no earlier one.
    """

    deploy: bool | None = None
    bench: bool | None = None
    suite: str | None = None
    checks: tuple[str, ...] = ()
    new_baseline: bool = False
    golden: str = ""
    again: str = "ddtree-ops nightly {host}"


@dataclass
class _Seen:
    """What is known of one target so far.

    :param codes: exit codes of what failed other than by a check's verdict.
    :param told: checks that stand for such a failure, or belong to a deploy that has its own code.
    :param ended: why no further step is done there; empty: go on.
    """

    target: Target
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[CheckResult] = field(default_factory=list)
    figures: tuple[Figure, ...] = ()
    told: set[str] = field(default_factory=set)
    diagnoses: list[Mapping[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    codes: list[ExitCode] = field(default_factory=list)
    past: Past | None = None
    deployment: Deployment | None = None
    taken: int = 0
    watched: int = 0
    benched: set[str] = field(default_factory=set)
    ended: bool = False

    def report(self) -> TargetReport:
        target = self.target
        return TargetReport(
            target.name,
            target.host.name,
            target.service.name,
            facts=dict(self.facts),
            checks=tuple(self.checks),
            figures=self.figures,
            diagnoses=tuple(self.diagnoses),
            errors=tuple(self.errors),
        )

    def code(self) -> ExitCode:
        """Exit code of this target alone."""
        verdicts = [check.verdict for check in self.checks if check.name not in self.told]
        judged = [] if self.codes and not verdicts else [exit_code_of(worst(verdicts))]
        return worst_code([*self.codes, *judged])


def parts_of(steps: Sequence[Step], wishes: Wishes) -> list[tuple[Step, ...]]:
    """Steps in the parts they are run in: a deploy or bench by itself, what stands between them together. Pure.

    Steps that are done only when asked for, and were not, are left out.
    """
    parts: list[list[Step]] = [[]]
    for step in steps:
        if isinstance(step, Deploy | Bench):
            asked = wishes.deploy if isinstance(step, Deploy) else wishes.bench
            if asked is False or (asked is None and step.when == "asked"):
                continue
            parts += [[step], []]
        else:
            parts[-1].append(step)
    return [tuple(part) for part in parts if part]


def exit_code(report: RunReport, codes: Iterable[ExitCode]) -> ExitCode:
    """Of a whole run, from those of its targets: a report that is not complete passes nothing. Pure."""
    code = worst_code(codes)
    return ExitCode.INCONCLUSIVE if code is ExitCode.OK and report.verdict is not Verdict.PASS else code


def flags_digest(unit_text: str | None) -> str:
    """Names what a service was started with, the release apart; empty where the unit file cannot be read. Pure."""
    argv = exec_start_of(unit_text or "")
    variables = environment_of(unit_text or "")
    if argv is None or variables is None:
        return ""
    words = [*argv, *(f"{name}={value}" for name, value in sorted(variables.items()) if name not in _NEVER)]
    return text_sha256("\0".join(words))[:12]


def journal_since(marked: datetime | None, newest: datetime, first: float) -> tuple[datetime, bool]:
    """From when on a journal is read, and whether the host's clock was set back since the last run. Pure.

    :param marked: the newest entry that the last run knew; None: there was no such run.
    :param newest: the newest entry there is. :param first: seconds that a first run looks back, and one after such a clock.
    """
    set_back = marked is not None and marked > newest
    if marked is None or set_back:
        return newest - timedelta(seconds=first), set_back
    return marked + timedelta(microseconds=1), False


def drift_results(report: DriftReport, *, mended: bool, validated: bool = False) -> list[CheckResult]:
    """A drift report as results, one a finding. Pure.

    :param mended: a deploy follows in the same run: that the host differs from the inventory is what it is for.
    :param validated: a validation follows in the same run: that nobody has seen the process work is for it to settle,
        see :func:`settled`.
    """
    if not report.deployed:
        verdict = Verdict.SKIPPED if mended else Verdict.INCONCLUSIVE
        text = f"nothing was ever deployed: {report.unit}"
        return [CheckResult("drift", verdict, text, hint=f"ddtree-ops deploy {report.host}")]
    results = []
    for finding in report.findings:
        if finding.severity is Severity.INFO:
            continue
        expected = mended and finding.severity is Severity.WARN
        left_open = validated and not expected and finding.id == _UNSEEN
        before = "before the deploy of this run: " if expected else _OPEN if left_open else ""
        results.append(
            CheckResult(
                f"drift.{finding.id}",
                Verdict.SKIPPED if before else Verdict.FAIL,
                f"{before}{finding.found}; should be: {finding.should}",
                facts={"severity": finding.severity.value, "names": list(finding.names)},
                evidence=(Evidence("drift", "\n".join(finding.names)),) if finding.names else (),
                hint=finding.hint,
            )
        )
    if not any(result.verdict is Verdict.FAIL for result in results):
        text = f"release {(report.release or '')[:12]} as recorded, {count(report.files, 'file')} read"
        results.insert(0, CheckResult("drift", Verdict.PASS, text))
    return results


def settled(result: CheckResult, *, works: bool) -> CheckResult:
    """What a validation of the same run makes of a drift finding that was left to it; any other result as it is. Pure.

    :param works: it passed, on the very process that the finding is about.
    """
    if not result.summary.startswith(_OPEN):
        return result
    found = result.summary.removeprefix(_OPEN)
    if works:
        return replace(result, summary=f"{found}; this nightly's validate passed on that process")
    return replace(result, verdict=Verdict.FAIL, summary=found)


def told(results: Sequence[CheckResult], host: str) -> str:
    """What passed, in a line. Pure.

    :raises CheckFailed: one failed. :raises Inconclusive: none did, and one could not be judged. The message has the name of
        the first, and how many more there are.
    """
    try:
        return judged(results, host)
    except (CheckFailed, Inconclusive) as error:
        names = [one.name for one in results if one.verdict is worst(each.verdict for each in results)]
        if names:
            more = f" (and {len(names) - 1} more: {', '.join(names[1:4])})" if len(names) > 1 else ""
            error.message = f"{names[0]}: {error.message}{more}"
        raise


def _fine(results: Iterable[CheckResult]) -> bool:
    return all(one.verdict in (Verdict.PASS, Verdict.SKIPPED) for one in results)


def run_nightly(
    playbook: Playbook,
    targets: Sequence[Target],
    *,
    store: Store,
    connect: Connector,
    report: Reporter,
    keep: Keep,
    wishes: Wishes | None = None,
    inventory: str = "",
    rollout: Rollout | None = None,
    reconnect: Connector | None = None,
    safety: Safety | None = None,
    id: str = "",
    baseline: Callable[[Target], Baseline | None] = lambda _: None,
) -> tuple[RunReport, ExitCode]:
    """The report of the whole run, and the exit code that it comes to; it was handed to ``keep`` too.

    Hosts that cannot be reached, or that somebody else is working on, go no further; all others run to their end. Ctrl-C
    (and what the caller turns into KeyboardInterrupt) ends the run with a report that is not complete.

    :param rollout: how the deploy goes over the hosts.
    :param baseline: opens the baseline service of a target, for ``lossless``; None: it has none.
    :raises LockHeld: another run with this history is under way on one of the hosts; nothing was contacted.
    :raises ConfigError: a playbook, suite, secret or unit file is wrong; nothing was contacted.
    """
    wishes = wishes or Wishes()
    night = _Night(
        playbook,
        targets,
        store,
        connect,
        report,
        keep,
        wishes,
        inventory,
        rollout,
        reconnect,
        safety,
        id,
        baseline,
    )
    night.prepare()
    with store.lock(target.host.name for target in targets):
        return night.run()


class _Night:
    """One run. Steps are called from a thread a host."""

    def __init__(
        self,
        playbook: Playbook,
        targets: Sequence[Target],
        store: Store,
        connect: Connector,
        report: Reporter,
        keep: Keep,
        wishes: Wishes,
        inventory: str,
        rollout: Rollout | None,
        reconnect: Connector | None,
        safety: Safety | None,
        id: str,
        baseline: Callable[[Target], Baseline | None],
    ) -> None:
        from ddtree_ops.deploy.known import KnownBundles

        self.playbook, self.targets, self.store = playbook, targets, store
        self.connect, self.reconnect = connect, reconnect or connect
        self.rollout, self.safety, self.wishes = rollout, safety, wishes
        self._tell, self._keep = report, keep
        self.parts = parts_of(playbook.steps, wishes)
        self.deploys = {
            step: load_playbook(step.playbook)
            for part in self.parts
            for step in part
            if isinstance(step, Deploy)
        }
        self.seen = {_key(target): _Seen(target) for target in targets}
        self.known = KnownBundles()
        self.baseline = baseline
        self._wanted: dict[str, Wanted | CheckResult] = {}
        self._wanting = threading.Lock()
        self._guard = threading.RLock()
        self._part = 0
        self._interrupted = False
        started = datetime.now(UTC)
        self.document = RunReport(
            command=playbook.name or "nightly",
            id=id or f"{started:%Y%m%dT%H%M%SZ}-{os.urandom(2).hex()}",
            started=started.isoformat(timespec="seconds"),
            version=__version__,
            inventory=inventory,
            options={
                "playbook": playbook.name,
                "steps": [step.kind for part in self.parts for step in part],
                "suite": wishes.suite,
                "checks": list(wishes.checks),
                **({"golden": wishes.golden} if wishes.golden else {}),
                "new_baseline": wishes.new_baseline,
            },
        )
        self.perform = {
            "doctor": self._doctor,
            "drift": self._drift,
            "validate": self._validate,
            "journal": self._journal,
            "trend": self._trend,
        }

    def prepare(self) -> None:
        """Find out what is wrong before anything is contacted."""
        from ddtree_ops.checks.validation.suites import heed_golden

        for deploy, playbook in self.deploys.items():
            if playbook.reports:
                raise ConfigError(
                    f"{self.playbook.name}: deploy runs {deploy.playbook}, and that is a playbook that reports itself",
                    state="nothing was contacted or changed",
                    hint="name one that deploys: ddtree-ops playbook show deploy",
                )
        steps = [step for part in self.parts for step in part if isinstance(step, Validate)]
        plans = [self._plan_of(step) for step in steps]
        for step, plan in zip(steps, plans, strict=True):
            if not self.wishes.golden:
                uses = not self.wishes.checks or any(hasattr(one.settings, "golden") for one in plan)
                heed_golden(plan, step.golden or "" if uses else "")
        if self.wishes.golden:
            heed_golden([planned for plan in plans for planned in plan], self.wishes.golden)
        resolve_secrets(self.targets, only=None if self.deploys else API_KEY)

    # -- the run ------------------------------------------------------------------------------------------

    def run(self) -> tuple[RunReport, ExitCode]:
        """All parts, then the end."""
        self.keep()
        try:
            for number, part in enumerate(self.parts):
                self._part = number
                targets = [target for target in self.targets if not self.seen[_key(target)].ended]
                if not targets or self._interrupted:
                    break
                step = part[0]
                if isinstance(step, Deploy):
                    self._deploy(self.deploys[step], targets)
                elif isinstance(step, Bench):
                    self._bench(step, targets)
                else:
                    self._look(part, targets)
        except KeyboardInterrupt:
            self._interrupted = True
        return self._end()

    def _run(
        self, playbook: Playbook, targets: Sequence[Target], watch: Watch, **more: Any
    ) -> list[tuple[Target, Result]]:
        came = threading.Event()
        results = run_playbook(
            playbook,
            targets,
            connect=self.connect,
            report=self._report,
            reconnect=self.reconnect,
            watch=watch,
            interrupted=came,
            **more,
        )
        self._interrupted = self._interrupted or came.is_set()
        return list(zip(targets, results, strict=True))

    def _look(self, part: tuple[Step, ...], targets: Sequence[Target]) -> None:
        playbook = self.playbook.model_copy(update={"steps": part})
        for target, result in self._run(playbook, targets, self._watch, perform=self.perform):
            self._after(target, result)
        self.keep()

    def _deploy(self, playbook: Playbook, targets: Sequence[Target]) -> None:
        results = self._run(playbook, targets, self._watch_deploy, rollout=self.rollout, safety=self.safety)
        for target, result in results:
            seen = self.seen[_key(target)]
            with self._guard:
                seen.checks = [one for one in seen.checks if not one.name.startswith(_PREFIX)]
                seen.checks += [replace(one, name=_PREFIX + one.name) for one in result.checks]
                seen.told |= {one.name for one in seen.checks if one.name.startswith(_PREFIX)} | {"deploy"}
                if result.error is None:
                    release = f" of release {result.plan.wish.release[:12]}" if result.plan else ""
                    text = f"{result.outcome.value}{release}"
                    seen.checks.append(CheckResult("deploy", Verdict.PASS, text, host=target.name))
                else:
                    self._fail(seen, "deploy", result.error)
            self._after(target, result, told=True)
        self.keep()

    def _bench(self, step: Bench, targets: Sequence[Target]) -> None:
        """Measure, target after target. What cannot be measured is skipped with the reason."""
        from ddtree_ops.playbook.bench import BenchOptions, run_bench

        given = {name: value for name, value in step.arguments.items() if name != "when"}
        options = BenchOptions(**given)
        able = []
        for target in targets:
            try:
                options.plan(target)
            except UsageError as error:
                skipped = CheckResult("bench", Verdict.SKIPPED, error.message, host=target.name)
                self.seen[_key(target)].checks.append(skipped)
            else:
                able.append(target)

        def save(report: RunReport) -> None:
            with self._guard:
                for target in able:
                    self._take_bench(self.seen[_key(target)], report)
                self._keep(self._document())

        for target in able:
            if self._interrupted:
                break
            found = run_bench(
                [target],
                options,
                connect=self.connect,
                report=self._report,
                save=save,
                safety=Safety(command="bench", lock_wait=self.safety.lock_wait if self.safety else 0.0),
                inventory=self.document.inventory,
            )
            seen = self.seen[_key(target)]
            for problem in found.errors:
                self._fail(seen, "bench", problem)
                seen.ended = seen.ended or isinstance(problem, UnreachableError | LockHeld | Interrupted)
                self._interrupted = self._interrupted or isinstance(problem, Interrupted)
        self.keep()

    def _take_bench(self, seen: _Seen, report: RunReport) -> None:
        """The results of a bench so far in the place of those taken before."""
        for found in report.targets:
            if found.target == seen.target.name:
                seen.checks = [one for one in seen.checks if one.name not in seen.benched]
                seen.checks += found.checks
                seen.benched = {one.name for one in found.checks}
                seen.facts["bench"] = {
                    name: value for name, value in found.facts.items() if seen.facts.get(name) != value
                }

    def _after(self, target: Target, result: Result, *, told: bool = False) -> None:
        """What only the result of a part says: no connection, an interruption, a defect, where evidence is."""
        seen, error = self.seen[_key(target)], result.error
        with self._guard:
            if result.evidence is not None:
                seen.facts["evidence"] = str(result.evidence)
            if isinstance(error, Interrupted):
                self._interrupted = True
                seen.ended = True
                if not told:
                    self._fail(seen, "run", error)
            elif isinstance(error, UnreachableError | LockHeld) and not seen.ended:
                seen.ended = True
                if not told:
                    self._fail(seen, "connect", error)
            elif error is not None and not told and seen.deployment is None and not seen.ended:
                seen.ended = True  # a defect before the first step
                self._fail(seen, "connect", error)

    def _end(self) -> tuple[RunReport, ExitCode]:
        with self._guard:
            document = replace(
                self._document(),
                ended=datetime.now(UTC).isoformat(timespec="seconds"),
                complete=not self._interrupted,
            )
            codes = [seen.code() for seen in self.seen.values()]
            if self._interrupted:
                codes.append(ExitCode.INTERRUPTED)
            self._keep(document)
        for seen in self.seen.values():
            found = seen.report().verdict
            names = [check.name for check in seen.checks if check.verdict is found]
            of = f": {', '.join(names)}" if names and found is not Verdict.PASS else ""
            self._tell(Event(EventKind.end(found), seen.target.name, RUN_END, f"{found.value}{of}"))
        return document, exit_code(document, codes)

    def _document(self) -> RunReport:
        return replace(self.document, targets=tuple(seen.report() for seen in self.seen.values()))

    def keep(self) -> None:
        """Hand over the report as far as it goes."""
        with self._guard:
            self._keep(self._document())

    def _report(self, event: Event) -> None:
        """The end of a part is not the end of a host."""
        if event.phase != RUN_END:
            self._tell(event)

    def _watch(self, deployment: Deployment, step: Step, error: OpsError | None) -> None:
        seen = self.seen[_key(deployment.target)]
        with self._guard:
            self._gather(deployment)
            new, seen.watched = deployment.checks[seen.watched :], len(deployment.checks)
            explained = isinstance(error, CheckFailed | Inconclusive) and any(not one.ok for one in new)
            if error is not None and not explained:
                self._fail(seen, step.kind, error)
                seen.ended = isinstance(error, UnreachableError | LockHeld)
            last = self._part == len(self.parts) - 1 and step is self.parts[-1][-1]
            if last and not seen.ended and not self._interrupted:
                self._record(seen)
            self._keep(self._document())

    def _watch_deploy(self, deployment: Deployment, step: Step, error: OpsError | None) -> None:
        self._gather(deployment, prefix=_PREFIX)

    def _gather(self, deployment: Deployment, *, prefix: str = "") -> None:
        """Take over the results that a deployment has had since it was last looked at."""
        seen = self.seen[_key(deployment.target)]
        with self._guard:
            if seen.deployment is not deployment:
                seen.deployment, seen.taken, seen.watched = deployment, 0, 0
            new = deployment.checks[seen.taken :]
            seen.taken += len(new)
            seen.checks += [replace(one, name=prefix + one.name) for one in new]
            if prefix and new:
                self._keep(self._document())

    def _fail(self, seen: _Seen, kind: str, error: OpsError) -> None:
        """Keep what failed: as a check that did not pass where the work went on, as an error where it ended."""
        seen.codes.append(error.exit_code)
        if isinstance(error, Interrupted):
            changed = error.state not in ("", "nothing was changed")
            again = error.hint if changed else self.wishes.again.replace("{host}", seen.target.host.name)
            seen.checks.append(
                CheckResult(
                    "interrupted",
                    Verdict.INCONCLUSIVE,
                    error.message,
                    host=seen.target.name,
                    facts={"exit_code": int(error.exit_code), "state": error.state},
                    hint=again,
                )
            )
            return
        if isinstance(error, UnreachableError | LockHeld):
            seen.errors.append(error.render())
            return
        soft = error.exit_code is ExitCode.INCONCLUSIVE
        seen.told.add(kind)
        seen.checks.append(
            CheckResult(
                kind,
                Verdict.INCONCLUSIVE if soft else Verdict.FAIL,
                error.message,
                host=seen.target.name,
                facts={"exit_code": int(error.exit_code), "state": error.state},
                evidence=tuple(Evidence(error.phase or kind, line) for line in error.details),
                hint=error.hint or f"ddtree-ops status {seen.target.host.name}",
            )
        )

    def _record(self, seen: _Seen) -> None:
        """Into the history: what this target's steps found, whatever becomes of the others."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        run = replace(self.document, ended=now, complete=True, targets=(seen.report(),))
        try:
            seen.facts["history"] = str(self.store.add(run))
        except OpsError as error:
            self._fail(seen, "history", error)

    # -- the steps ----------------------------------------------------------------------------------------

    def _doctor(self, deployment: Deployment, step: Step) -> None:
        from ddtree_ops.deploy.doctor import examine

        with deployment.frame.phase("doctor"):
            self._facts(deployment)
            self._judge(deployment, examine(deployment.session, deployment.target, self._wanted_of))

    def _wanted_of(self, runtime: RuntimeSpec) -> Wanted | CheckResult:
        from ddtree_ops.deploy.doctor import wanted_of

        with self._wanting:
            key = runtime.model_dump_json()
            if key not in self._wanted:
                self._wanted[key] = wanted_of(runtime)
            return self._wanted[key]

    def _drift(self, deployment: Deployment, step: Step) -> None:
        from ddtree_ops.deploy.drift import find_drift

        with deployment.frame.phase("drift"):
            self._facts(deployment)
            found = find_drift(deployment.target, deployment.session, known=self.known)
            mended = any(isinstance(part[0], Deploy) for part in self.parts[self._part + 1 :])
            part = self.parts[self._part]
            validated = any(isinstance(later, Validate) for later in part[part.index(step) + 1 :])
            self._judge(deployment, drift_results(found, mended=mended, validated=validated))

    def _plan_of(self, step: Validate) -> tuple[Planned, ...]:
        """:raises UsageError: there is no such suite or check. :raises ConfigError: the suite is wrong."""
        from ddtree_ops.checks.validation.suites import load_suite, pick

        names = self.wishes.checks or step.checks or ()
        suite = self.wishes.suite or step.suite or ("" if names else _SUITE)
        return pick(names, load_suite(suite) if suite else None)

    def _validate(self, deployment: Deployment, step: Step) -> None:
        from ddtree_ops.checks.validation.run import validate

        assert isinstance(step, Validate)
        target, seen, frame = deployment.target, self.seen[_key(deployment.target)], deployment.frame
        before, deployment.worth_explaining = deployment.worth_explaining, True

        def keep(result: CheckResult) -> None:
            deployment.checks.append(frame.own(result))
            with self._guard:
                self._gather(deployment)
                self._keep(self._document())

        def tell(event: Event) -> None:
            if event.kind in (EventKind.PROGRESS, EventKind.NOTE):
                frame.relay(event)

        with frame.phase("validate"):
            self._facts(deployment)
            # Kept and explained on a failure is the run that was asked, not the one that systemd began after it.
            deployment.invocation = deployment.seen.state.invocation_id or None
            plan, key = self._plan_of(step), api_key_of(target)
            found = validate(
                deployment.session,
                target,
                plan,
                report=tell,
                api_key=key,
                shared=self._shared(seen, step),
                on_result=keep,
                named=self.wishes.checks,
            )
            with self._guard:
                passed = {check.name for check in found.checks if check.ok}
                works = (
                    found.verdict is Verdict.PASS
                    and any(one.name in passed and not one.spec.standing for one in plan)
                    and found.facts.get("invocation") == seen.facts.get("invocation")
                )
                seen.checks = [settled(one, works=works) for one in seen.checks]
                seen.facts.update(
                    {name: value for name, value in found.facts.items() if name not in seen.facts}
                )
            deployment.worth_explaining = before or not _fine(found.checks)
            told(found.checks, target.host.name)
            frame.note = f"{count(sum(check.ok for check in found.checks), 'check')} passed"

    def _shared(self, seen: _Seen, step: Validate) -> dict[str, Any]:
        """What the checks of one target are given: the baseline of the inventory, a golden file, earlier accept lengths."""
        from ddtree_ops.checks.validation.acceptance import HISTORY
        from ddtree_ops.checks.validation.lossless import BASELINE, GOLDEN

        return {
            HISTORY: accept_lengths(seen.report(), self._past(seen)),
            GOLDEN: self.wishes.golden or step.golden,
            BASELINE: self.baseline(seen.target),
        }

    def _journal(self, deployment: Deployment, step: Step) -> None:
        """All that the unit wrote since the last run, whatever runs of it there were, and the kernel's words."""
        from ddtree_ops.checks.signatures import hint_for, scan
        from ddtree_ops.diagnose.facts import ServiceFacts

        assert isinstance(step, Journal)
        target, seen = deployment.target, self.seen[_key(deployment.target)]
        with deployment.frame.phase("journal"):
            self._facts(deployment)
            newest = next(deployment.control.entries(invocation="all", lines=1), None)
            if newest is None:
                raise deployment.control.nothing(invocation="all")
            before = self._past(seen).latest
            marked = moment_of(str(before.facts.get("journal_until", ""))) if before is not None else None
            first = _FIRST_LOOK_S if step.first is None else step.first
            since, set_back = journal_since(marked, newest.time, first)
            if set_back:
                deployment.frame.say(
                    "journal", "the last run ended later than the journal does: was the clock set back?"
                )
            found = scan(
                deployment.session,
                target,
                invocation="all",
                facts=ServiceFacts.of(target),
                since=since,
                served=True,
            )
            result = found.as_check(host=target.name, name="journal")
            if result.verdict is Verdict.INCONCLUSIVE and not result.hint:
                result = replace(result, hint=hint_for(found, target.host.name, target.service.unit))
            if result.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
                result = replace(result, hint=with_command(result.hint, target.host.name))
                if run := _run_of(deployment, found):
                    look = f"ddtree-ops diagnose {target.host.name} --invocation {run}"
                    remedy = found.root.remedy if found.root is not None else ""
                    result = replace(result, hint="; ".join(part for part in (remedy, look) if part))
                deployment.worth_explaining = True
            figures = self._load(deployment)
            with self._guard:
                seen.figures = figures
                seen.facts["journal_since"] = since.isoformat()
                seen.facts["journal_until"] = newest.time.isoformat()
                seen.diagnoses.append(found.to_json())
            for text in found.left_out:
                deployment.frame.say("journal", text)
            self._judge(deployment, [result])

    def _load(self, deployment: Deployment) -> tuple[Figure, ...]:
        """How long the run that serves took to load, from the first lines of its journal; none where they are gone."""
        from ddtree_ops.checks.bench.measuring import load_figures

        invocation = deployment.seen.state.invocation_id
        if not invocation:
            return ()
        entries = deployment.control.entries(invocation=invocation)
        try:
            return load_figures(entries, {})
        finally:
            entries.close()

    def _trend(self, deployment: Deployment, step: Step) -> None:
        assert isinstance(step, Trend)
        seen = self.seen[_key(deployment.target)]
        with deployment.frame.phase("trend"):
            self._facts(deployment, again=True)
            results = trend(seen.report(), self._past(seen), runs=step.runs or RUNS)
            compared = [one for one in results if one.verdict is not Verdict.SKIPPED]
            deployment.checks += map(deployment.frame.own, results)
            deployment.worth_explaining = deployment.worth_explaining or not _fine(results)
            if compared:
                deployment.frame.note = told(results, deployment.target.host.name)
            else:
                deployment.frame.note = results[0].summary

    def _past(self, seen: _Seen) -> Past:
        if seen.past is None:
            seen.past = self.store.past(seen.target.host.name, seen.target.service.name)
        return seen.past

    def _judge(self, deployment: Deployment, results: Sequence[CheckResult]) -> None:
        """Keep results. :raises CheckFailed: one failed. :raises Inconclusive: none did, and one could not be judged."""
        deployment.checks += map(deployment.frame.own, results)
        told(results, deployment.target.host.name)
        passed = sum(result.ok for result in results)
        deployment.frame.note = (
            results[0].summary if len(results) == 1 else f"{count(passed, 'check')} passed"
        )

    def _facts(self, deployment: Deployment, *, again: bool = False) -> None:
        """What runs there, once a part, or ``again``. One round trip."""
        if deployment.observed is not None and not again:
            return
        deployment.look()()
        target, sight = deployment.target, deployment.seen
        found = {
            "runtime": target.runtime.name,
            "release": sight.release or "",
            "flags": flags_digest(sight.unit_text),
            "invocation": sight.state.invocation_id,
            "unit": target.service.unit,
        }
        with self._guard:
            self.seen[_key(target)].facts.update(found)


def _key(target: Target) -> tuple[str, str]:
    return target.host.name, target.service.name


def _run_of(deployment: Deployment, found: DiagnosisReport) -> str:
    """The run of the unit that wrote of the root cause; empty where there is none, or its entries are gone."""
    first = moment_of(found.root.first) if found.root is not None else None
    if first is None:
        return ""
    entries = deployment.control.entries(
        invocation="all",
        since=first.isoformat(),
        until=(first + timedelta(seconds=1)).isoformat(),
    )
    try:
        return next((entry.invocation for entry in entries if entry.invocation), "")
    finally:
        entries.close()
