"""One service on one host, taken through the steps of a playbook.

A :class:`Deployment` holds what the steps hand to each other: the session, the facts, the bundle, the plan, the
activation under way, the evidence. Each public method is one step; it raises an
:class:`~ddtree_ops.errors.OpsError` when the step fails and leaves the host in the state the error names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ddtree_ops import paths
from ddtree_ops.deploy.audit import record
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
from ddtree_ops.deploy.history import (
    Activation,
    activation_line,
    new_activation,
    parse_history,
    verdict_line,
)
from ddtree_ops.deploy.identity import origin, who
from ddtree_ops.deploy.nodes import agree, join_plans, roll_back, same_choice
from ddtree_ops.deploy.plan import (
    ChangeKind,
    Observed,
    Plan,
    Wish,
    file_marks,
    make_plan,
    masked_unit_line,
    text_sha256,
)
from ddtree_ops.deploy.secrets import (
    HostSecrets,
    Secrets,
    api_key_of,
    look_requests,
    recorded_service,
    removal_requests,
    resolve_secrets,
    secret_changes,
    seen,
    stale_files,
    write_requests,
)
from ddtree_ops.errors import (
    BuildError,
    CheckFailed,
    ConfigError,
    ExitCode,
    Inconclusive,
    LockLost,
    OpsError,
    PreflightError,
    RemoteError,
    RolledBack,
    UnreachableError,
)
from ddtree_ops.inventory.models import Service, Target
from ddtree_ops.remote.session import Reply, Request, Session
from ddtree_ops.results import CheckResult, Event, EventKind, Reporter, Verdict, worst
from ddtree_ops.runtime import Bundle, PatchCheck, PatchState, build, check_source, compare
from ddtree_ops.secret import Secret, redact, secret_values
from ddtree_ops.service.control import StartReport, StopReport, UnitControl
from ddtree_ops.service.credentials import named_files
from ddtree_ops.service.ending import Drain
from ddtree_ops.service.journal import Entry
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.state import UnitState
from ddtree_ops.service.unit import render_unit

if TYPE_CHECKING:
    from ddtree_ops.deploy.nodes import Member
    from ddtree_ops.deploy.preflight.facts import Facts
    from ddtree_ops.deploy.saved import Expectation
    from ddtree_ops.diagnose.api import DiagnosisReport
    from ddtree_ops.lint.model import Finding

__all__ = ["Deployment", "Outcome", "Result"]

_T = TypeVar("_T")


class Outcome(StrEnum):
    """How a run over one target ended."""

    UNCHANGED = "unchanged"
    DEPLOYED = "deployed"
    PASSED = "passed"
    DONE = "done"
    FAILED = "failed"
    ROLLED_BACK = "rolled-back"
    INTERRUPTED = "interrupted"
    SKIPPED = "skipped"


@dataclass
class Result:
    """What a playbook run left behind for one target; JSON through :meth:`to_json`."""

    host: str
    service: str
    outcome: Outcome
    plan: Plan | None = None
    checks: list[CheckResult] = field(default_factory=list)
    diagnosis: DiagnosisReport | None = None
    evidence: Path | None = None
    error: OpsError | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    confirm_until: str = ""

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form; times in seconds."""
        return {
            "schema": 1,
            "host": self.host,
            "service": self.service,
            "outcome": self.outcome.value,
            "plan": self.plan.to_json() if self.plan else None,
            "checks": [check.to_json() for check in self.checks],
            "diagnosis": self.diagnosis.to_json() if self.diagnosis else None,
            "evidence": str(self.evidence) if self.evidence else None,
            "confirm_until": self.confirm_until or None,
            "error": self.error.render() if self.error else None,
            "exit_code": int(self.error.exit_code if self.error else ExitCode.OK),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


class Deployment:
    """See the module docstring. One thread uses one Deployment.

    :param bundle: of the target's runtime, where it is known before the build step.
    :param secrets: of the target's service; left out, they are taken from their sources now.
    :param expected: a saved plan: the build step refuses where another one comes out, or the host stands otherwise.
    :param safety: how failures are guarded against.
    :param reconnect: opens another connection to the host, over which a deployment is confirmed; left out: none is.
    :param undoes: False: what runs this does not roll back, so the host is not told to either.
    :param load_timeout: seconds that a load may take where a step overrides the service's own.
    """

    def __init__(
        self,
        target: Target,
        session: Session,
        report: Reporter,
        *,
        bundle: Bundle | None = None,
        secrets: Secrets | None = None,
        expected: Expectation | None = None,
        safety: Safety | None = None,
        reconnect: Callable[[], Session] | None = None,
        undoes: bool = True,
        load_timeout: float | None = None,
    ) -> None:
        self.target = target
        self.session = session
        self.layout = Layout.of(target)
        self.control = UnitControl(session, target.service.unit)
        self.unit_text = render_unit(target)
        self.bundle = bundle
        self._given_secrets = secrets
        self._host_secrets = HostSecrets()
        self.expected = expected
        self.observed: Observed | None = None
        self.plan: Plan | None = None
        self.activation: Activation | None = None
        self.checks: list[CheckResult] = []
        self.diagnosis: DiagnosisReport | None = None
        self.evidence: Path | None = None
        self.seconds: dict[str, float] = {}
        self._report = report
        self._note = ""
        self._whole: Callable[[], bool] | None = None
        self._is_whole: bool | None = None
        self._runner: PatchCheck | None = None
        self._unjudged: Facts | None = None
        self._verified_on_push = False
        self._invocation: str | None = None
        self._entries: list[Entry] | None = None
        self._patched: bool | None = None
        self._secrets = secret_values(target.service.environment)
        self._locked = False
        self.safety = safety or Safety()
        self._reconnect = reconnect
        self._undoes = undoes
        self._load_timeout = load_timeout or target.service.health.load_timeout
        self._lock_id = new_lock_id()
        self._guard = Guard(self.layout, lock_id=self._lock_id, python=target.host.ssh.python)
        self._found: Armed | None = None
        self._armed: WayBack | None = None
        self.confirm_until = ""
        self._link: str | None = None
        self._failure: OpsError | None = None
        self.member: Member | None = None
        self.joined = ""
        self.step = ""
        self.state_left = "nothing was changed"
        self.changed = False
        self.operated = False
        self.worth_explaining = False
        self.next_step = ""

    # -- the frame of a step -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str, message: str = "") -> Iterator[None]:
        """Report a step's start, end and duration; errors get the host, the phase and the state left."""
        self._note = ""
        self.step = name
        started = time.monotonic()
        self._emit(EventKind.START, name, message)
        try:
            yield
        except OpsError as error:
            error.at(host=self.target.name, phase=name, state=self.state_left)
            error.message = redact(error.message, *self._secrets)
            error.details = tuple(redact(line, *self._secrets) for line in error.details)
            self._failure = self._failure or error
            self._done(EventKind.FAIL, name, error.message, started)
            raise
        except KeyboardInterrupt:
            self._count_time(name, started)
            raise
        self._done(EventKind.DONE, name, self._note, started)

    def _done(self, kind: EventKind, name: str, message: str, started: float) -> None:
        elapsed = self._count_time(name, started)
        self._report(Event(kind, self.target.name, name, message, elapsed_s=elapsed))

    def _count_time(self, name: str, started: float) -> float:
        elapsed = time.monotonic() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        return elapsed

    def _relay(self, event: Event) -> None:
        self._report(replace(event, host=self.target.name))

    def _emit(self, kind: EventKind, name: str, message: str, fraction: float | None = None) -> None:
        self._report(Event(kind, self.target.name, name, message, fraction))

    def say(self, step: str, message: str) -> None:
        """Report a note."""
        self._emit(EventKind.NOTE, step, message)

    # -- steps ---------------------------------------------------------------------------------------------

    def lint(self) -> None:
        """Launch flags and settings against the runtime's own flags and what is known not to work; the host is not asked.

        :raises ConfigError: with every error found; warnings are shown and kept.
        """
        from ddtree_ops.lint import Severity, facts_of, lint

        with self.phase("lint"):
            facts = facts_of(self._built("lint"))
            findings = [one for one in lint(self.target, facts) if one.severity is not Severity.INFO]
            errors = [one for one in findings if one.severity is Severity.ERROR]
            self._keep([_found(one) for one in findings])
            for finding in findings:
                if finding not in errors:
                    self._emit(EventKind.NOTE, "lint", redact(f"{finding.rule}: {finding}", *self._secrets))
            if errors:
                raise ConfigError(
                    f"{_count(len(errors), 'setting')} cannot work",
                    details=tuple(f"{one.rule}: {one}" for one in errors),
                    hint=f"ddtree-ops lint {self.target.host.name}   (why, and where it is written)",
                )
            read = (
                f"{len(facts.flags.flags)} flags of {self.target.runtime.name}" if facts.flags else "no flags"
            )
            warned = f", {_count(len(findings), 'warning')}" if findings else ""
            self._note = f"settings against {read}{warned}"
            if not findings:
                self._keep([CheckResult("lint", Verdict.PASS, self._note)])

    def preflight(self) -> None:
        """Take the lock and learn everything that can be known before a change; all problems at once."""
        from ddtree_ops.deploy.preflight.facts import parse_facts, probe_request

        with self.phase("preflight"):
            self._lock()
            sent = time.time()
            look = self._look(
                probe_request(self.target),
                Request("read_file", {"path": self.layout.rollback, "max_bytes": 1 << 20}),
            )
            self._begin_check()
            from ddtree_ops.deploy.preflight.judge import Wanted, judge, skew_of  # while the host works

            owners = self.control.port_owner(self.target.service.port, self.target.service.bind)
            self._check_built()
            wanted = Wanted.of(self.bundle) if self.bundle is not None else None
            probe, armed, *replies = look()
            self.observed = self._observed(replies)
            self._note_armed(armed)
            if self.observed.state.running and self.observed.release:
                self.state_left = f"nothing was changed: release {self.observed.release[:12]} keeps serving"
            damaged = self.observed.history.damaged
            if damaged:
                self._emit(
                    EventKind.NOTE,
                    "preflight",
                    f"{_count(damaged, 'line')} of {self.layout.history} cannot be read: what they said is not known here",
                )
            facts = parse_facts(probe.data[: probe.values["stdout"]], probe.data[probe.values["stdout"] :])
            self._unjudged = facts if wanted is None else None
            self._refuse(
                judge(
                    self.target,
                    facts,
                    owners,
                    state=self.observed.state,
                    releases=self.observed.releases,
                    wanted=wanted,
                    skew=skew_of(self.session.facts["clock_skew_s"], facts.time, sent),
                )
            )
            results = [check for check in self.checks if check.name.startswith("preflight.")]
            self._note = f"systemd {facts.systemd}, {facts.root.free / 2**30:.0f} GiB free, " + ", ".join(
                result.summary for result in results if result.name in {"preflight.model", "preflight.port"}
            )

    def _judge_versions(self, bundle: Bundle) -> None:
        """What the preflight could not judge because the runtime was not built yet."""
        facts, self._unjudged = self._unjudged, None
        if facts is not None:
            from ddtree_ops.deploy.preflight.judge_venv import judge_versions
            from ddtree_ops.deploy.preflight.pins import pins_of

            self._refuse(judge_versions(self.target, facts, pins_of(bundle)))

    def _refuse(self, results: Sequence[CheckResult]) -> None:
        """Keep preflight results and tell the warnings.

        :raises PreflightError: some failed; all of them at once, each with what to do.
        """
        self._keep(results)
        bad = [result for result in results if result.verdict is Verdict.FAIL]
        if bad:
            more = len(bad) > 1
            advice = [f"    {result.hint}" if more and result.hint else "" for result in bad]
            lines = [
                line
                for result, hint in zip(bad, advice, strict=True)
                for line in (_line_of(result), hint)
                if line
            ]
            raise PreflightError(
                f"{len(bad)} of {len(results)} preflight checks failed",
                details=tuple(lines),
                hint=f"ddtree-ops doctor {self.target.host.name}   (looks again, changes nothing)"
                if more
                else bad[0].hint or "mend that and deploy again",
            )
        for result in results:
            if result.verdict is Verdict.INCONCLUSIVE:
                self._emit(EventKind.NOTE, "preflight", _line_of(result))

    def build(self) -> None:
        """Build (or find in the cache) the bundle, make the plan and say it.

        :raises OpsError: the plan is not the one that was saved, or the host changed since; nothing was changed.
        """
        with self.phase("build"):
            self.bundle = self._built("build")
            self._judge_versions(self.bundle)
            wish = Wish(
                host=self.target.name,
                service=self.target.service.name,
                unit=self.target.service.unit,
                release=self.bundle.digest,
                runtime=self.bundle.name,
                unit_text=self.unit_text,
                files=file_marks(self.bundle.files),
            )
            if self._whole is None:
                self._begin_check()
            if self.observed is None:
                self.observed = self._observed(self._look()())
            self.observed = replace(
                self.observed,
                secrets=secret_changes(self.secrets, self._host_secrets),
                stale_secrets=stale_files(self.secrets.files(), self._host_secrets),
            )
            for note in self.secrets.notes:
                self._emit(EventKind.NOTE, "build", note)
            if wish.release in self.observed.releases and not self._found_whole():
                self.observed = replace(self.observed, repaired=("its files are not as built",))
            self.plan = make_plan(wish, self.observed)
            if self.expected is not None:
                self.expected.check(self.plan, self.observed)
            if not self.plan.empty:
                self._emit(EventKind.NOTE, "build", self.plan.short())
            self._note = (
                f"{self.bundle.name} {self.bundle.digest[:12]}, {_count(len(self.bundle.patches), 'patch')}"
            )

    def push(self) -> None:
        """Publish the release; where it is already there, verify every file of it on disk."""
        bundle = self._need(self.bundle)
        with self.phase("push"):
            if self._found_whole():
                self._verified_on_push = True
                self._note = f"already there, {len(bundle.files)} files verified on disk"
                return
            result = self.session.publish(
                bundle.root,
                bundle.files,
                releases_dir=self.layout.releases,
                digest=bundle.digest,
                manifest=bundle.manifest,
                progress=lambda done, total: self._emit(
                    EventKind.PROGRESS,
                    "push",
                    f"{done / 1e6:.0f} of {total / 1e6:.0f} MB",
                    done / max(total, 1),
                ),
            )
            self._verified_on_push = not result.created
            if result.repaired:
                self.observed = replace(self._need(self.observed), repaired=result.repaired)
                self.plan = make_plan(self._need(self.plan).wish, self.observed)
                if self.expected is not None and self.plan.digest != self.expected.digest:
                    raise RemoteError(
                        f"release {bundle.digest[:12]} was damaged meanwhile: it is repaired, and the saved plan has no restart",
                        hint=f"ddtree-ops deploy {self.target.host.name}",
                    )
                self._note = f"repaired: {'; '.join(result.repaired[:3])}"
            elif result.created:
                linked = (
                    f", {result.linked_files} linked from earlier releases" if result.linked_files else ""
                )
                if result.resumed_files:
                    linked += f", {result.resumed_files} had arrived with a push that broke off"
                self._note = f"{result.sent_files} files, {result.sent_bytes / 1e6:.1f} MB sent{linked}"
            else:
                self._note = f"already there, {result.files} files verified on disk"

    def verify(self) -> None:
        """Read the published release back and prove the sizing of its runner."""
        bundle = self._need(self.bundle)
        with self.phase("verify"):
            release = self.layout.release(bundle.digest)
            if not self._verified_on_push:
                differences = compare(bundle.files, self.session.hash_tree(release) or [])
                if differences:
                    raise RemoteError(
                        f"{len(differences)} files of release {bundle.digest[:12]} are not as built",
                        details=tuple(str(difference) for difference in differences[:10]),
                        hint="check the host's disk; the next deploy publishes the release again",
                    )
            check = self._runner if self._verified_on_push else None
            if check is None:
                check = self._check_runner(lambda path: self.session.read_file(f"{release}/{path}"))
            speculative = self.target.service.speculative
            self._patched = not check.absent if check.state is not PatchState.FOREIGN else None
            if speculative and speculative.algorithm == "DDTREE" and check.sizing and not check.sizing.ok:
                self._emit(EventKind.NOTE, "verify", f"warning: {check.sentence or check.summary}")
            self._note = f"{len(bundle.files)} files as built; runner {check.summary}"

    def activate(self) -> None:
        """Stop, switch unit and link, start. Everything was verified before; nothing to do is said so."""
        plan = self._need(self.plan)
        with self.phase("activate"):
            if not plan.activates and self.joined != "activate":
                state = self._need(self.observed).state
                self._invocation = state.invocation_id or None
                self._note = f"nothing to change: {state.describe()}"
                if not self.settled:
                    activation = self._new_activation(
                        plan.wish.release, self.unit_text, plan.digest, "validate"
                    )
                    self._guard_validation(activation)
                    self._announce(activation)
                    self.changed = True
                    self.state_left = f"{self.target.service.unit} runs as wished and is not validated"
                return
            self._switch(
                plan.wish.release, self.unit_text, plan.digest, self.target.service, "deploy", arm=True
            )
            self._note = (
                "; ".join(change.summary for change in plan.changes if change.kind is not ChangeKind.RELEASE)
                or "started again with the other nodes"
            )

    def wait(self, *, load_timeout: float | None = None, stall_timeout: float | None = None) -> None:
        """Follow the start until the engine is ready, or ends."""
        if self.settled:
            return
        from ddtree_ops.checks.wait import wait_ready

        self.worth_explaining = True
        with self.phase("wait"):
            ready = wait_ready(
                self.session,
                self.target,
                invocation=self._invocation,
                report=self._relay,
                load_timeout=load_timeout,
                stall_timeout=stall_timeout,
                api_key=self._api_key(),
                look=self.member.look if self.member else None,
            )
            self._invocation = ready.invocation
            self._note = ready.result().summary

    def smoke(
        self,
        *,
        prompt: str | None = None,
        max_tokens: int | None = None,
        window: float | None = None,
        min_accept_length: float | None = None,
    ) -> None:
        """One real completion, then the unit is held; see :mod:`ddtree_ops.checks.smoke`."""
        if self.settled:
            return
        from ddtree_ops.checks.smoke import run_smoke

        self.worth_explaining = True
        with self.phase("smoke"):
            found = run_smoke(
                self.session,
                self.target,
                prompt=prompt,
                max_tokens=max_tokens,
                window=window,
                min_accept_length=min_accept_length,
                report=self._relay,
                api_key=self._api_key(),
            )
            self._judge([check for check in found.results if check.name != "signatures"])

    def signatures(self) -> None:
        """Scan the invocation's journal for fatal signatures."""
        if self.settled:
            return
        from ddtree_ops.checks.signatures import signatures

        self.worth_explaining = True
        with self.phase("signatures"):
            result, self.diagnosis = signatures(
                self.session, self.target, invocation=self._invocation, patched=self._patched
            )
            self._judge([result])

    def start(self) -> None:
        """Start the unit as it is."""
        self._operate("start", self.control.start)

    def stop(self, *, drain_timeout: float | None = None) -> None:
        """Stop the unit; says whether it drained, or what kept it from draining.

        :param drain_timeout: seconds for requests under way, then SIGKILL; 0: at once. Left out, as the unit says.
        """
        self._operate("stop", lambda: self._in_order(lambda: self._stop_draining("stop", drain_timeout)))

    def restart(self, *, drain_timeout: float | None = None) -> None:
        """Restart the unit as it is; ``drain_timeout`` as for :meth:`stop`."""
        self._operate("restart", lambda: self._restart(drain_timeout))

    def _draining(self, name: str) -> Callable[[Drain], None]:
        """Tell what a stop under way is waiting for, and once what to do where it will wait for ever."""
        told: list[bool] = []

        def tell(drain: Drain) -> None:
            self._emit(EventKind.PROGRESS, name, drain.describe())
            if drain.leaking and not told:
                told.append(True)
                after = self.target.service.health.stop_timeout
                self._emit(
                    EventKind.NOTE,
                    name,
                    f"{drain.describe()}. systemd ends it {after:.0f} s after the stop began; at once: Ctrl-C, "
                    f"then ddtree-ops stop {self.target.host.name} --force",
                )

        return tell

    def _stop_draining(self, name: str, patience: float | None) -> StopReport:
        return self.control.stop(patience=patience, drain=self._draining(name))

    def _restart(self, patience: float | None) -> StartReport:
        if self.member is None:
            return self.control.restart(patience=patience, drain=self._draining("restart"))
        stopped = self._in_order(lambda: self._stop_draining("restart", patience))
        return replace(self.control.start(), stop=stopped)

    def _operate(self, name: str, action: Callable[[], StartReport | StopReport]) -> None:
        unit, host = self.target.service.unit, self.target.host.name
        with self.phase(name):
            self._lock()
            self.state_left = f"how far the {name} of {unit} got is not known"
            if name != "start":
                self.state_left += ": systemd goes on stopping it"
            self.next_step = f"ddtree-ops status {host}"
            self.changed = self.worth_explaining = self.operated = True
            try:
                report = action()
            except OpsError as error:
                self._audit(name, outcome="failed", detail=error.message)
                raise
            self._note = report.describe()
            if isinstance(report, StartReport):
                self._invocation = report.state.invocation_id or None
                if report.stop is not None:
                    self._note = f"{report.stop.describe()}; {self._note}"
            self.state_left = report.state.describe()
            self._audit(name, outcome="ok" if report.changed else "nothing to do", detail=self._note)

    def _audit(self, action: str, *, outcome: str, detail: str) -> None:
        """Write an act into the host's audit; that it cannot be written is told and changes nothing."""
        try:
            record(self.session, self.layout, action, outcome=outcome, detail=redact(detail, *self._secrets))
        except OpsError as error:
            self._emit(EventKind.NOTE, action, f"the audit line could not be written: {error.message}")

    def go_back(self, *, to: str | None = None) -> None:
        """Switch to an activation that is recorded here, whole on disk, and another than what is there now.

        :param to: as for :func:`~ddtree_ops.deploy.releases.way_back`; left out, the newest that passed.
        :raises PreflightError: there is none, or it is not whole; nothing was changed.
        :raises UsageError: ``to`` names no recorded activation, or several.
        """
        from ddtree_ops.deploy.releases import alternatives, way_back

        unit = self.target.service.unit
        with self.phase("go_back"):
            self._lock()
            look = self._look(Request("read_file", {"path": self.layout.rollback, "max_bytes": 1 << 20}))
            armed, *replies = look()
            self.observed = observed = self._observed(replies)
            self._given_secrets = Secrets(self._host_secrets.values)
            self._note_armed(armed)
            if observed.state.running and observed.release:
                self.state_left = f"nothing was changed: release {observed.release[:12]} keeps serving"
            if observed.history.damaged:
                text = f"{_count(observed.history.damaged, 'line')} of {self.layout.history} cannot be read"
                self._emit(EventKind.NOTE, "go_back", text)
            now = (observed.release, None if observed.unit_text is None else text_sha256(observed.unit_text))
            good = way_back(observed.history, now, to)
            kept = self._kept(good)
            if isinstance(kept, str):
                raise PreflightError(
                    f"{good.release[:12]} of {good.time} cannot come back: {kept}",
                    details=alternatives(observed.history, now, without={good.id}),
                    hint=f"ddtree-ops rollback {self.target.host.name} --to RELEASE, or ddtree-ops deploy "
                    f"{self.target.host.name}",
                )
            if self.member is not None:
                same_choice(self.member, good)
            self.unit_text, service = kept
            self.target = self.target.model_copy(update={"service": service})
            wish = Wish(
                self.target.name, service.name, unit, good.release, good.runtime, unit_text=self.unit_text
            )
            self.plan = make_plan(wish, observed)
            if self.member is not None:
                join_plans(self, self.member)
            if self.settled:
                self._note = f"already there: {good.release[:12]} of {good.time} runs and passed"
                return
            if not good.good:
                self._emit(EventKind.NOTE, "go_back", f"{good.release[:12]} of {good.time} never passed here")
            if not self.plan.activates and self.joined != "activate":
                self._invocation = observed.state.invocation_id or None
                activation = self._new_activation(good.release, self.unit_text, self.plan.digest, "validate")
                self._guard_validation(activation)
                self._announce(activation)
                self.changed = True
                self.state_left = f"{unit} runs it already and is not validated"
                self._note = (
                    f"already there: {good.release[:12]} of {good.time} runs, nobody saw this run pass"
                )
                return
            self._audit("rollback", outcome="asked for", detail=f"to {good.release[:12]} of {good.time}")
            self._switch(good.release, self.unit_text, self.plan.digest, service, "rollback", arm=True)
            passed = f"which passed on {good.time}" if good.good else f"of {good.time}, which never passed"
            self._note = f"back to {good.release[:12]}, {passed}"

    def prune(self) -> None:
        """Remove what no service of the host needs any more; a failure is told, and fails nothing."""
        from ddtree_ops.deploy.releases import prune

        if not self._locked or self.settled:
            return
        try:
            self._need_lock()
            done = prune(
                self.session, self.layout, keep=self.target.host.keep_releases, holding=self.layout.unit
            )
        except OpsError as error:
            self._emit(EventKind.NOTE, "prune", f"old releases stay for now: {error.message}")
            return
        if done.removed or done.leftovers:
            self._emit(EventKind.NOTE, "prune", done.describe())

    def accept(self) -> None:
        """Confirm that the activation under way passed; the unit is started at boot from now on.

        An activation that no smoke check has judged stays without a verdict: the next deploy validates it.

        The order, and what a crash between two of its parts leaves:

        1. ``systemctl enable``. A unit that is enabled and then not confirmed is switched back all the same, and
           disabled where there is nothing to go back to.
        2. Over a new connection, one request, under a lock that excludes the host's own going back: the lock is
           still ours, the run is the one that was validated; then the ``pass`` line is appended to the history
           with fsync. That line *is* the confirmation: before it the host goes back, after it never.
        3. In the same request the state file goes and the timer is stopped. Where that is not reached, the next
           look of the timer sees the ``pass`` and does it.
        4. Old secrets go: only now nothing can need them any more.

        So there is no confirmed activation without its record, and none recorded as passed that is then undone.
        """
        if self.activation is None and self.operated:
            self._announce_operated()
        activation = self.activation
        if activation is None:
            if self.settled:
                self._tidy_secrets()
            return
        if not any(check.ok and check.name.startswith("smoke") for check in self.checks):
            self._emit(
                EventKind.NOTE, "accept", "no step has shown that it serves: the next deploy validates it"
            )
            self._disarm()
            return
        unit = self.target.service.unit
        try:
            self.control.enable()
            if self._armed is None:
                self._need_lock()
                self._record(activation, Verdict.PASS)
            elif not self._confirm(activation, self._armed):
                return
        except OpsError as error:
            state = f"{unit} passed and serves, but that is not recorded: the next deploy validates it again"
            if self._armed is not None:
                state = f"{unit} passed and serves, but that is not confirmed: {self._own_way()}"
                error.at(hint=f"ddtree-ops confirm {self.target.host.name}")
            raise error.at(host=self.target.name, phase="accept", state=state) from None
        try:
            self._tidy_secrets()
        except OpsError as error:
            state = f"{unit} passed and is confirmed; secrets that it needs no more are still on the host"
            raise error.at(host=self.target.name, phase="accept", state=state) from None

    def _confirm(self, activation: Activation, way_back: WayBack) -> bool:
        """Confirm over a new connection, or leave that to a person: then False."""
        state = self.control.state()
        names = ("InvocationID", "NRestarts", "MainPID")
        expected = {name: state.properties.get(name, "") for name in names}
        if not state.running or (self._invocation and state.invocation_id != self._invocation):
            raise CheckFailed(f"it is not the run that was validated: {state.describe()}")
        summary = redact(self._verdict_summary(), *self._secrets)
        with self._second_session() as session:
            if self.safety.confirm_within is not None:
                self.confirm_until = self._guard.hold(
                    session, activation.id, self.safety.confirm_within, expected, summary
                )
                self._armed = None
                self.session.release_lock(self.layout.lock)
                self._locked = False
                self._emit(
                    EventKind.NOTE,
                    "accept",
                    f"passed, not confirmed: ddtree-ops confirm {self.target.host.name} until {self.confirm_until}, "
                    f"else the host goes back to {way_back.describe()}",
                )
                return False
            line = verdict_line(activation.id, Verdict.PASS, summary, invocation=state.invocation_id)
            self._guard.confirm(session, activation.id, line, expected)
        self._armed = None
        return True

    @contextlib.contextmanager
    def _second_session(self) -> Iterator[Session]:
        if self._reconnect is None:
            yield self.session
            return
        try:
            session = self._reconnect()
        except OpsError as error:
            error.message = f"no new connection to confirm over: {error.message}"
            error.state = error.hint = ""
            raise
        with session:
            yield session

    def _announce_operated(self) -> None:
        """A start by hand that a smoke check has judged is a validation of what was deployed before."""
        observed = self.observed = self._observed(self._look()())
        known = observed.history.latest
        if not self.checks:
            if observed.state.running:
                self._emit(
                    EventKind.NOTE,
                    "accept",
                    f"this run is not validated: ddtree-ops smoke {self.target.host.name}; ddtree-ops deploy "
                    f"{self.target.host.name} validates and records it",
                )
            return
        if (
            known
            and observed.unit_text
            and (known.release, known.unit_sha256)
            == (
                observed.release,
                text_sha256(observed.unit_text),
            )
        ):
            self._announce(self._new_activation(known.release, observed.unit_text, known.plan, "validate"))

    # -- after a failure -----------------------------------------------------------------------------------

    def capture(self) -> None:
        """Keep the journal, the unit and the results before anything else happens to the host."""
        with self.phase("capture"):
            self._entries = entries = self._run_entries()
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
            folder = paths.state_dir() / "evidence" / f"{self.target.name.replace('/', '-')}-{stamp}"
            journal = (
                {"time": str(entry.time), "source": entry.source, "pid": entry.pid, "message": entry.message}
                for entry in entries
            )
            checks = [check.to_json() for check in self.checks]
            kept = {
                "journal.jsonl": "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in journal),
                "unit.service": "\n".join(map(masked_unit_line, self.unit_text.splitlines())) + "\n",
                "checks.json": json.dumps(checks, indent=1, ensure_ascii=False, default=str),
            }
            for name, text in kept.items():
                self._keep_file(folder / name, text)
            self.evidence = folder
            self._note = f"{len(entries)} journal entries kept in {folder}"

    def _run_entries(self) -> list[Entry]:
        return [
            replace(entry, message=redact(entry.message, *self._secrets))
            for entry in self.control.entries(invocation=self._invocation or "current")
        ]

    def _keep_file(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise OpsError(
                f"evidence could not be kept on this machine: {error}",
                hint="make room, or set XDG_STATE_HOME",
            ) from error

    def diagnose(self) -> None:
        """Explain the failed invocation from its journal."""
        from ddtree_ops.diagnose.api import diagnose
        from ddtree_ops.diagnose.facts import ServiceFacts
        from ddtree_ops.diagnose.lines import from_entries

        with self.phase("diagnose"):
            if self._entries is None:
                self._entries = self._run_entries()
            facts = ServiceFacts.of(self.target, patched=self._patched)
            self.diagnosis = diagnose(from_entries(self._entries), facts)
            self._note = self.diagnosis.headline()
            if self.evidence is not None:
                text = json.dumps(self.diagnosis.to_json(), indent=1, ensure_ascii=False, default=str)
                self._keep_file(self.evidence / "diagnosis.json", text)

    def rollback(self) -> None:
        """Go back to the last release that passed and is still whole on the host, and see that it serves.

        Without one, back to the unit file that ran before us, unvalidated; without that, the unit is stopped. What
        was only to be validated is left as it runs where nothing is known to be wrong with it, or to be better.
        With ``--no-rollback``, and where the lock was lost, nothing is touched. While it goes back the host stays
        armed: if this client dies now, the host finishes it.

        :raises RolledBack: it serves again.
        """
        failed = self.activation
        if failed is None and (self.member is None or not self.safety.rollback):
            return
        if isinstance(self._failure, LockLost):
            self._emit(EventKind.NOTE, "rollback", "the lock is lost: whoever has it now is in charge")
            return
        if failed is not None and not self.safety.rollback:
            with self.phase("rollback"):
                self._need_lock()
                unsure = isinstance(self._failure, Inconclusive)
                self._record(failed, Verdict.INCONCLUSIVE if unsure else Verdict.FAIL)
                self.state_left = f"left as it failed (--no-rollback): {self.control.state().describe()}"
                self._note = "left as it is: --no-rollback"
            return
        try:
            if self.member is not None:
                roll_back(self, self.member)
            elif failed is not None:
                self._go_back(failed)
        except (UnreachableError, LockLost):
            raise
        except OpsError:
            self._disarm()
            raise
        self._disarm()

    def _go_back(self, failed: Activation) -> None:
        unit = self.target.service.unit
        with self.phase("rollback"):
            unsure = isinstance(self._failure, Inconclusive)
            self._hold_armed(failed)
            self._record(failed, Verdict.INCONCLUSIVE if unsure else Verdict.FAIL)
            if failed.reason == "validate" and (unsure or isinstance(self._failure, UnreachableError)):
                self.state_left = f"nothing was switched, and nothing is known to be wrong; {self.control.state().describe()}"
                self._note = "there was nothing to judge by: left as it is"
                return
            before = self._need(self.observed)
            passed = before.history.good()
            if not passed and before.state.running and before.unit_text not in (None, self.unit_text):
                self._put_back(before)
                self.state_left = (
                    f"{unit} was started from the earlier unit file, and nobody has validated it"
                )
                raise RolledBack(
                    f"the deployment failed; the unit file that ran {unit} before is back",
                    hint=f"ddtree-ops logs {self.target.host.name} --follow",
                )
            good, kept = self._way_back(passed)
            if good is None or kept is None:
                why = (
                    "no release that passed here is whole any more"
                    if passed
                    else "no earlier release of it ever passed here"
                )
                if failed.reason == "validate":
                    self.state_left = f"nothing was switched: {why}; {self.control.state().describe()}"
                    self._note = f"{why}: left as it is"
                    return
                self._stop_if_there()
                self.state_left = f"{unit} is stopped: {why}, there is nothing to go back to"
                self._note = f"{why}: the unit was stopped"
                return
            if (good.release, good.unit_sha256) == (failed.release, failed.unit_sha256):
                self.state_left = (
                    f"the same release and unit passed on {good.time}: the cause is not the deployment, so nothing "
                    f"was switched; {self.control.state().describe()}"
                )
                self._note = "nothing to go back to: the same release and unit passed before"
                return
            unit_text, service = kept
            failed_run = self._invocation or "previous"
            self._switch(good.release, unit_text, good.plan, service, "rollback")
            self._note = f"back to {good.release[:12]}, which passed on {good.time}"
        self._see_that_it_serves(good, service, failed_run)

    def _see_that_it_serves(self, good: Activation, service: Service, failed_run: str) -> None:
        back = Deployment(
            self.target.model_copy(update={"service": service}),
            self.session,
            self._report,
            secrets=Secrets({**self._host_secrets.values, **self.secrets.values}),
        )
        back.activation, back._invocation = self.activation, self._invocation
        back._locked, back._lock_id = True, self._lock_id
        back.member = self.member
        try:
            back.wait()
            back.smoke()
            back.signatures()
            if self.member is not None:
                self.member.share("rollback.passed", True)
        except OpsError:
            if self.member is not None:
                self._stop_if_there()
            self.state_left = (
                f"the rollback to {good.release[:12]} is not healthy either: the service is down or broken"
            )
            back._record(self._need(back.activation), Verdict.FAIL)
            raise
        back.accept()
        self.seconds.update({f"rollback.{name}": value for name, value in back.seconds.items()})
        self.state_left = f"release {good.release[:12]} of {good.time} serves again"
        raise RolledBack(
            f"the deployment failed and was rolled back to {good.release[:12]}",
            host=self.target.name,
            phase="rollback",
            state=self.state_left,
            hint=f"see why: ddtree-ops logs {self.target.host.name} --invocation {failed_run}",
        )

    def _put_back(self, before: Observed) -> None:
        self._stop_if_there()
        if self._link:
            self.session.swap_link(self.layout.current, self._link)
        self._install(self._need(before.unit_text))
        self.control.start()

    # -- inside --------------------------------------------------------------------------------------------

    @property
    def secrets(self) -> Secrets:
        """All secrets of the service, as given or from their sources."""
        if self._given_secrets is None:
            self._given_secrets = resolve_secrets([self.target])[0]
        return self._given_secrets

    def _api_key(self) -> Secret | None:
        return api_key_of(self.target) if self._given_secrets is None else self._given_secrets.api_key

    @property
    def settled(self) -> bool:
        """True when a plan was made and holds nothing to do."""
        return self.plan is not None and self.plan.empty and not self.joined

    def _need(self, value: _T | None) -> _T:
        if value is None:
            raise OpsError(
                "an earlier step of the playbook is missing",
                hint="a playbook that pushes starts with preflight, build",
            )
        return value

    def _built(self, phase: str) -> Bundle:
        if self.bundle is None:
            self.bundle = build(
                self.target.runtime, progress=lambda text: self._emit(EventKind.PROGRESS, phase, text)
            )
        return self.bundle

    def _begin_check(self) -> None:
        """Have the host hash the release while it is looked at, where it is known which one it will be."""
        if self.bundle is not None:
            self._whole = self.session.begin_check(
                releases_dir=self.layout.releases,
                digest=self.bundle.digest,
                manifest=self.bundle.manifest,
            )

    def _found_whole(self) -> bool:
        """What the host found; False where it was not asked."""
        if self._is_whole is None:
            self._is_whole = self._whole is not None and self._whole()
        return self._is_whole

    def _check_built(self) -> None:
        """Prove the sizing of the bundle's runner while the host works: a release that was verified has the same bytes."""
        bundle = self.bundle
        if bundle is None:
            return
        sums = {entry.path: entry.sha256 for entry in bundle.files}

        def read(path: str) -> bytes | None:
            if path not in sums:
                return None
            content = (bundle.root / path).read_bytes()
            if hashlib.sha256(content).hexdigest() != sums[path]:
                raise BuildError(f"{path} in {bundle.root} is not as built")
            return content

        with contextlib.suppress(OSError, BuildError):  # then `verify` reads it from the host
            self._runner = self._check_runner(read)

    def _check_runner(self, read: Callable[[str], bytes | None]) -> PatchCheck:
        speculative = self.target.service.speculative
        return check_source(
            read,
            where=f"{self.target.name}:{self.layout.release(self._need(self.bundle).digest)}",
            description=self.target.runtime.description,
            block_size=speculative.block_size if speculative else 8,
            budget=speculative.budget if speculative else None,
        )

    def _look(self, *more: Request) -> Callable[[], list[Reply]]:
        """Ask the host for what is there; what is returned waits for the answers."""
        requests = [
            *more,
            Request("list_dir", {"path": self.layout.service_dir}),
            Request("list_dir", {"path": self.layout.releases}),
            Request("read_file", {"path": self.layout.unit_path, "max_bytes": 1 << 20}),
            Request("read_file", {"path": self.layout.history, "max_bytes": 64 << 20}),
            Request("show_unit", {"unit": self.target.service.unit}),
            *look_requests(self.layout, self.target.service),
            Request("read_file", self._manifest_wanted()),
        ]
        replied = self.session.begin_batch(requests)

        def replies() -> list[Reply]:
            *needed, manifest = replied()
            found: list[Reply] = []
            for reply in needed:
                if isinstance(reply, Exception):
                    raise reply
                found.append(reply)
            unread = Reply({"found": False, "same": False})
            return [*found, unread if isinstance(manifest, Exception) else manifest]

        return replies

    def _manifest_wanted(self) -> dict[str, Any]:
        """The list of files of the live release; it travels only where it is not the one that is wished."""
        wished = hashlib.sha256(self.bundle.manifest).hexdigest() if self.bundle else ""
        return {"path": f"{self.layout.current}/manifest.json", "max_bytes": 64 << 20, "unless": wished}

    def _observed(self, replies: Sequence[Reply]) -> Observed:
        own, releases, unit, history, show, *secrets, manifest = replies
        self._host_secrets = seen(self.target.service, secrets)
        links = {entry["name"]: entry["target"] for entry in own.values["entries"]}
        self._link = current = links.get("current")
        return Observed(
            release=current.rsplit("/", 1)[-1] if current else None,
            releases=frozenset(
                entry["name"]
                for entry in releases.values["entries"]
                if entry["kind"] == "dir" and not entry["name"].startswith(".")
            ),
            unit_text=unit.data.decode("utf-8", "replace") if unit.values["found"] else None,
            state=UnitState.parse(show.values),
            history=parse_history(history.data if history.values["found"] else None),
            manifest=manifest.data if manifest.values["found"] and not manifest.values["same"] else None,
        )

    def _switch(
        self,
        release: str,
        unit_text: str,
        plan: str,
        service: Service,
        reason: str,
        *,
        arm: bool = False,
    ) -> None:
        kept = f"{self.layout.service_dir}/units/{text_sha256(unit_text)}"
        self._all(
            [
                Request("write_file", {"path": f"{kept}.service", "mode": 0o600}, unit_text.encode()),
                Request(
                    "write_file", {"path": f"{kept}.json", "mode": 0o600}, service.model_dump_json().encode()
                ),
            ]
        )
        activation = self._new_activation(release, unit_text, plan, reason)
        if arm:
            self._arm(activation)
        self._announce(activation)
        self.changed = True
        unfinished = f"the switch of {service.unit} to {release[:12]} was not finished"
        self.state_left = f"{unfinished}: the service may be stopped"
        self.worth_explaining = True
        self._in_order(self._stop_if_there)
        self.state_left = f"{unfinished}: the service is stopped and nothing serves"
        if reason == "deploy":
            self._all(write_requests(self.layout, self.secrets.files()))
        self.session.swap_link(self.layout.current, self.layout.link_target(release))
        self._install(unit_text)
        if self.member is not None:
            self.member.share("start", True)
        self._invocation = self.control.start().state.invocation_id or None
        self.state_left = f"{service.unit} was started from {release[:12]} and is not validated"

    def _all(self, requests: Sequence[Request]) -> None:
        """Requests whose answers say nothing, in one round trip; the first failure is raised."""
        for reply in self.session.batch(requests) if requests else ():
            if isinstance(reply, Exception):
                raise reply

    def _tidy_secrets(self) -> None:
        """After a deployment that passed: secrets that the inventory names no more go, and all are for root alone."""
        observed = self.observed
        if observed is None or self._given_secrets is None:
            return
        loose = {
            name: data for name, data in self.secrets.files().items() if name in self._host_secrets.loose
        }
        self._all(
            [*write_requests(self.layout, loose), *removal_requests(self.layout, observed.stale_secrets)]
        )
        if observed.stale_secrets:
            names = ", ".join(observed.stale_secrets)
            self._emit(EventKind.NOTE, "accept", f"removed from the host's secrets: {names}")

    def _install(self, text: str) -> None:
        """Write the unit file; one that holds secrets is for root alone."""
        self.control.install(self.layout.unit_path, text, mode=_unit_mode(text))

    def _lock(self) -> None:
        if self._locked:
            self._need_lock()
            return
        take_lock(
            self.session,
            self.layout,
            lock_id=self._lock_id,
            command=self.safety.command,
            lease=self.target.service.rollback.lease,
            wait=self.safety.lock_wait,
            tell=lambda text: self._emit(EventKind.PROGRESS, self.step, text),
        )
        self._locked = True

    def lock(self) -> None:
        """Take the lock of the service, or see that it is still ours.

        :raises LockHeld: somebody else has it. :raises LockLost: ours was broken, or ran out.
        """
        self._lock()

    def take_over(self, other: Deployment, activation: Activation, armed: Armed) -> None:
        """Go on, under the lock that ``other`` holds, with a deployment whose client is gone."""
        self._locked, self._lock_id, self._guard = True, other._lock_id, other._guard
        self.activation, self._armed = activation, armed.way_back
        self._invocation = self.control.state().invocation_id or None
        self.changed = True
        self.state_left = (
            f"{self.target.service.unit} was started from {activation.release[:12]} and is not validated"
        )

    def confirm_unseen(self, summary: str, expected: Mapping[str, Any] | None = None) -> None:
        """Confirm the activation that was taken over, by somebody's word.

        :param expected: properties of the unit that must still be so.
        :raises CheckFailed: they are not. :raises RolledBack: too late.
        """
        activation = self._need(self.activation)
        self.control.enable()
        invocation = str((expected or {}).get("InvocationID") or self._invocation or "")
        line = verdict_line(activation.id, Verdict.PASS, summary, invocation=invocation)
        self._guard.confirm(self.session, activation.id, line, expected)
        self._armed = None

    def _need_lock(self) -> None:
        """:raises LockLost: it was broken, or its lease ran out while nothing was heard from us."""
        found = self.session.check_lock(self.layout.lock, self._lock_id)
        if found.held:
            return
        now = (
            describe_holder(found.holder, self.layout.unit)
            if found.holder and found.left_s
            else "nobody has it now"
        )
        raise LockLost(
            f"the lock of this {self.safety.command} was lost: {now}",
            hint=f"ddtree-ops history {self.target.host.name}; ddtree-ops status {self.target.host.name}",
        )

    # -- the rollback that is armed on the host ------------------------------------------------------------

    def _note_armed(self, reply: Reply) -> None:
        """What a client that is gone has armed. We hold the lock, so the host waits for what we make of it."""
        try:
            self._found = parse_armed(reply.data) if reply.values["found"] else None
        except RemoteError as error:
            self._emit(EventKind.NOTE, "preflight", error.message)
        if self._found is not None:
            self._emit(
                EventKind.NOTE, "preflight", f"taking over from an earlier deploy: {self._found.describe()}"
            )

    def _arm(self, activation: Activation) -> None:
        if not (self.safety.rollback and self._undoes):
            self._need_lock()
            if self._found is not None:
                self._guard.disarm(self.session)
            return
        way_back = self._where_to()
        self._guard.arm(self.session, activation, way_back, self.target.service, self._within())
        self._armed = way_back

    def _hold_armed(self, failed: Activation) -> None:
        """While we go back the host stays armed; where it is not, the lock must still be ours."""
        if self._armed is not None:
            self._guard.arm(self.session, failed, self._armed, self.target.service, self._within())
        else:
            self._need_lock()

    def _guard_validation(self, activation: Activation) -> None:
        """A mere validation switches nothing; where an earlier client had armed the host, that is kept up."""
        if self._found is None or self._found.phase == "failed":
            self._need_lock()
            return
        if not (self.safety.rollback and self._undoes):
            self._guard.disarm(self.session)
            return
        self._guard.arm(self.session, activation, self._found.way_back, self.target.service, self._within())
        self._armed = self._found.way_back

    def _where_to(self) -> WayBack:
        """What the host would go back to; as :meth:`rollback` decides."""
        before = self._need(self.observed)
        passed = before.history.good()
        if self.member is not None:
            found = agree(self, self.member)
            if found is None:
                return WayBack.to_nothing()
            return WayBack.to_release(self.layout, found[0], unit_mode=_unit_mode(found[1]))
        if not passed and before.state.running and before.unit_text not in (None, self.unit_text):
            text = self._need(before.unit_text)
            kept = f"{self.layout.service_dir}/units/{text_sha256(text)}.service"
            self.session.write_file(kept, text.encode(), mode=0o600)
            return WayBack.to_unit(kept, text_sha256(text), link=self._link, unit_mode=_unit_mode(text))
        good, kept_there = self._way_back(passed)
        if good is None or kept_there is None:
            return WayBack.to_nothing()
        return WayBack.to_release(self.layout, good, unit_mode=_unit_mode(kept_there[0]))

    def _within(self) -> float:
        """Seconds after which the host takes this client for hung: all that the steps may take, and a quarter of an hour."""
        health = self.target.service.health
        return health.stop_timeout + self._load_timeout + 4 * health.request_timeout + health.window + 900.0

    def _disarm(self) -> None:
        if self._armed is None:
            return
        try:
            self._guard.disarm(self.session)
        except OpsError as error:
            self._emit(EventKind.NOTE, self.step, f"the host is still armed: {error.message}")
            return
        self._armed = None

    def _own_way(self) -> str:
        """What the host does by itself once we are gone, and until when, by its clock."""
        seconds = own_after(self.target.service)
        skew = float(self.session.facts.get("clock_skew_s") or 0.0)
        until = datetime.fromtimestamp(time.time() + skew + seconds, UTC)
        back = self._armed.describe() if self._armed else ""
        return (
            f"unless a deploy or confirm takes over, the host goes back by itself to {back}, "
            f"within {seconds:.0f} s (until {until:%H:%M:%SZ} on the host)"
        )

    @property
    def left(self) -> str:
        """The state left, and what the host will do about it by itself."""
        return f"{self.state_left}; {self._own_way()}" if self._armed is not None else self.state_left

    def _in_order(self, stop: Callable[[], _T]) -> _T:
        """Stop with the other nodes: the head first, for it drains; a node that loses it ends by an exception."""
        member = self.member
        if member is None:
            return stop()
        if not member.node.is_head:
            member.share("stop.head", True)
        stopped = stop()
        if member.node.is_head:
            member.share("stop.head", True)
        member.share("stop.all", True)
        return stopped

    def _stop_if_there(self) -> None:
        if self.control.state().exists:
            self.control.stop(drain=self._draining(self.step))

    def _new_activation(self, release: str, unit_text: str, plan: str, reason: str) -> Activation:
        found = new_activation(
            release=release,
            unit_sha256=text_sha256(unit_text),
            plan=plan,
            who=who(),
            origin=origin(),
            reason=reason,
            runtime=self._runtime_of(release),
        )
        return replace(found, id=self.member.share("activation", found.id)[0]) if self.member else found

    def _announce(self, activation: Activation) -> None:
        self.session.append_line(self.layout.history, activation_line(activation))
        self.activation = activation

    def _runtime_of(self, release: str) -> str:
        """Name that a release was built under, as far as it is known."""
        if self.bundle is not None and self.bundle.digest == release:
            return self.bundle.name
        past = self.observed.history.activations if self.observed else ()
        return next((item.runtime for item in reversed(past) if item.release == release and item.runtime), "")

    def _way_back(
        self, passed: Sequence[Activation]
    ) -> tuple[Activation, tuple[str, Service]] | tuple[None, None]:
        """The newest activation that passed and of which everything is still there; others are told and left out."""
        for item in passed:
            found = self._kept(item)
            if not isinstance(found, str):
                return item, found
            self._emit(
                EventKind.NOTE,
                "rollback",
                f"{item.release[:12]} of {item.time} cannot come back: {found}",
            )
        return None, None

    def _kept(self, good: Activation) -> tuple[str, Service] | str:
        """Unit file and service of an activation, or why they cannot be used."""
        kept = f"{self.layout.service_dir}/units/{good.unit_sha256}"
        text = self.session.read_file(f"{kept}.service")
        record = self.session.read_file(f"{kept}.json")
        if text is None or record is None or hashlib.sha256(text).hexdigest() != good.unit_sha256:
            return "its unit file is gone or damaged"
        try:
            service = recorded_service(record)
            release = self.layout.release(good.release)
            manifest = self.session.read_file(f"{release}/manifest.json")
            wanted = {
                item["path"]: item["sha256"] for item in json.loads(manifest or b'{"files": []}')["files"]
            }
        except (ValueError, KeyError, TypeError) as error:
            return f"its record cannot be read: {str(error).splitlines()[0]}"
        there = {entry.path: entry.sha256 for entry in self.session.hash_tree(release) or ()}
        damaged = [path for path, sha256 in wanted.items() if there.get(path) != sha256]
        if not wanted or damaged:
            return (
                f"{_count(len(damaged), 'file')} of it are not as built, first {damaged[0]}"
                if damaged
                else f"{release} is gone"
            )
        needed = named_files(text.decode(), self.layout.secrets)
        gone = sorted(set(needed) - {*self._host_secrets.names, *self.secrets.files()})
        if gone:
            return f"its secrets are gone from the host: {', '.join(gone)}"
        return text.decode(), service

    def _keep(self, results: Sequence[CheckResult]) -> None:
        """Add results to those of this run, without the values of secrets."""
        for result in results:
            evidence = tuple(
                replace(item, text=redact(item.text, *self._secrets)) for item in result.evidence
            )
            self.checks.append(
                replace(
                    result,
                    host=self.target.name,
                    summary=redact(result.summary, *self._secrets),
                    evidence=evidence,
                )
            )

    def _judge(self, results: Sequence[CheckResult]) -> None:
        self._keep(results)
        verdict = worst(result.verdict for result in results)
        telling = [result for result in results if result.verdict is verdict]
        if verdict is Verdict.PASS:
            self._note = "; ".join(result.summary for result in telling)
            return
        if not telling:
            raise Inconclusive("no check was run", hint="a playbook judges by smoke and signatures")
        kind = CheckFailed if verdict is Verdict.FAIL else Inconclusive
        raise kind(
            telling[0].summary,
            details=tuple(f"{result.name}: {result.summary}" for result in telling[1:]),
            hint=telling[0].hint or f"ddtree-ops logs {self.target.host.name} --lines 100",
        )

    def _record(self, activation: Activation, verdict: Verdict) -> None:
        summary = redact(self._verdict_summary(), *self._secrets)
        line = verdict_line(activation.id, verdict, summary, invocation=self._invocation or "")
        self.session.append_line(self.layout.history, line)

    def _verdict_summary(self) -> str:
        if self.diagnosis is not None and self.diagnosis.diagnoses:
            return self.diagnosis.headline()
        telling = [check for check in self.checks if check.name.startswith(("smoke", "signatures"))]
        return "; ".join(check.summary for check in telling)[:500]


def _unit_mode(text: str) -> int:
    open_to_all = all(masked_unit_line(line) == line for line in text.splitlines())
    return 0o644 if open_to_all else 0o600


def _found(finding: Finding) -> CheckResult:
    """A finding of lint as a result; a warning is no pass and no failure."""
    return CheckResult(
        f"lint.{finding.rule}",
        Verdict.FAIL if finding.severity == "error" else Verdict.INCONCLUSIVE,
        finding.message,
        facts={"where": finding.where, "source": finding.source},
        hint=finding.change,
    )


def _line_of(result: CheckResult) -> str:
    return f"{result.name}: {result.summary}"


def _count(number: int, word: str) -> str:
    return (
        f"{number} {word}"
        if number == 1
        else f"{number} {word}es"
        if word.endswith("ch")
        else f"{number} {word}s"
    )
