"""One service on one host, taken through the steps of a playbook.

A :class:`Deployment` holds what the steps hand to each other: the session, the bundle, the plan, the activation under
way, the evidence. Each public method named as a kind of step is one; it raises an
:class:`~ddtree_ops.errors.OpsError` when the step fails and leaves the host in the state the error names.

What it is made of: :mod:`.frame` (how a step is reported), :mod:`.looking` (what is on the host), :mod:`.shipment` (the
release), :mod:`.running` (the unit), :mod:`.hold` (the lock and the armed rollback), :mod:`.accepting`,
:mod:`.evidence`, :mod:`.goback`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_ops.deploy.accepting import accept
from ddtree_ops.deploy.changed import recorded
from ddtree_ops.deploy.evidence import evidence_files, evidence_folder, keep_files, pretty, run_entries
from ddtree_ops.deploy.frame import Frame
from ddtree_ops.deploy.guard import Armed, Safety
from ddtree_ops.deploy.history import BENCH, Activation, activation_line, new_activation, verdict_line
from ddtree_ops.deploy.hold import Hold
from ddtree_ops.deploy.identity import origin, who
from ddtree_ops.deploy.looking import armed_request, begin_look
from ddtree_ops.deploy.plan import (
    ChangeKind,
    Observed,
    Plan,
    Wish,
    file_marks,
    make_plan,
    text_sha256,
    unit_mode,
)
from ddtree_ops.deploy.refusals import judged, lint_result, refusal, result_line
from ddtree_ops.deploy.running import Running
from ddtree_ops.deploy.secrets import (
    HostSecrets,
    Secrets,
    api_key_of,
    resolve_secrets,
    secret_changes,
    stale_files,
    write_requests,
)
from ddtree_ops.deploy.shipment import Shipment, step_missing
from ddtree_ops.errors import (
    ConfigError,
    LockHeld,
    NotDeployed,
    OpsError,
    RemoteError,
    UnreachableError,
    heed_interruption,
)
from ddtree_ops.inventory.models import Service, Target
from ddtree_ops.remote.session import Reply, Request, Session
from ddtree_ops.results import CheckResult, Reporter, Verdict
from ddtree_ops.runtime import Bundle
from ddtree_ops.secret import Secret, secret_values
from ddtree_ops.service.control import StartReport, StopReport, UnitControl
from ddtree_ops.service.journal import Entry
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.unit import render_unit
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from ddtree_ops.deploy.nodes import Member
    from ddtree_ops.deploy.preflight.facts import Facts
    from ddtree_ops.deploy.saved import Expectation
    from ddtree_ops.diagnose.api import DiagnosisReport

__all__ = ["Deployment"]


class Deployment:
    """See the module docstring. One thread uses one Deployment.

    :param bundle: of the target's runtime, where it is known before the build step.
    :param secrets: of the target's service; left out, they are taken from their sources now.
    :param expected: a saved plan: the build step refuses where another one comes out, or the host stands otherwise.
    :param safety: how failures are guarded against.
    :param reconnect: opens another connection to the host, over which a deployment is confirmed; left out: none is.
    :param undoes: False: what runs this does not roll back, so the host is not told to either.
    :param load_timeout: seconds that a load may take where a step overrides the service's own.
    :param member: its side of the lockstep, where the service runs over several hosts.
    :ivar joined: ``activate`` or ``validate`` where that is done only because another node needs it.
    :ivar invocation: of the run that is validated; None: whichever is current.
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
        member: Member | None = None,
    ) -> None:
        self.target = target
        self.session = session
        self.layout = Layout.of(target)
        self.control = UnitControl(session, target.service.unit)
        self.unit_text = render_unit(target)
        self.member = member
        self.frame = Frame(target.name, report, secrets=secret_values(target.service.environment))
        self.shipment = Shipment(target, session, self.frame, bundle)
        self.running = Running(target, self.control, self.frame, member)
        self.hold = Hold(
            target, session, self.frame, safety or Safety(), undoes=undoes, load_timeout=load_timeout
        )
        self.known_secrets = secrets
        self.host_secrets = HostSecrets()
        self.expected = expected
        self.observed: Observed | None = None
        self.link: str | None = None
        self.plan: Plan | None = None
        self.activation: Activation | None = None
        self.invocation: str | None = None
        self.checks: list[CheckResult] = []
        self.diagnosis: DiagnosisReport | None = None
        self.evidence: Path | None = None
        self.confirm_until = ""
        self.joined = ""
        self.changed = False
        self.operated = False
        self.went_back = False
        self.unwritten: Activation | None = None
        self.worth_explaining = False
        self.next_step = ""
        self._reconnect = reconnect
        self._unjudged: Facts | None = None
        self._last_run: str | None = None
        self._entries: list[Entry] | None = None
        self._told: set[str] = set()

    # -- steps ---------------------------------------------------------------------------------------------

    def lint(self) -> None:
        """Launch flags and settings against the runtime's own flags and what is known not to work; the host is not asked.

        :raises ConfigError: with every error found; warnings are shown and kept.
        """
        from ddtree_ops.lint import Severity, facts_of, lint

        with self.frame.phase("lint"):
            facts = facts_of(self.shipment.built())
            findings = [one for one in lint(self.target, facts) if one.severity is not Severity.INFO]
            errors = [one for one in findings if one.severity is Severity.ERROR]
            self._keep([lint_result(one) for one in findings])
            for finding in findings:
                if finding not in errors:
                    self.frame.say("lint", self.frame.masked(f"{finding.rule}: {finding}"))
            if errors:
                raise ConfigError(
                    f"{count(len(errors), 'setting')} cannot work",
                    details=tuple(f"{one.rule}: {one}" for one in errors),
                    hint=f"{self.hold.safety.lint_of(self.target.host.name)}   (why, and where it is written)",
                )
            read = (
                f"{len(facts.flags.flags)} flags of {self.target.runtime.name}" if facts.flags else "no flags"
            )
            warned = f", {count(len(findings), 'warning')}" if findings else ""
            self.frame.note = f"settings against {read}{warned}"
            if not findings:
                self._keep([CheckResult("lint", Verdict.PASS, self.frame.note)])

    def preflight(self) -> None:
        """Take the lock and learn everything that can be known before a change; all problems at once."""
        from ddtree_ops.deploy.preflight.facts import parse_facts, probe_request

        with self.frame.phase("preflight"):
            self.hold.lock()
            sent = time.time()
            look = self.look(probe_request(self.target), armed_request(self.layout))
            self.shipment.begin_check()
            from ddtree_ops.deploy.preflight.judge import Wanted, judge, skew_of  # while the host works

            owners = self.control.port_owner(self.target.service.port, self.target.service.bind)
            self.shipment.check_built()
            bundle = self.shipment.bundle
            wanted = Wanted.of(bundle) if bundle is not None else None
            probe, armed = look()
            self.hold.find(armed)
            self.tell_sight()
            facts = parse_facts(probe.data)
            self._unjudged = facts if wanted is None else None
            self._refuse(
                judge(
                    self.target,
                    facts,
                    owners,
                    state=self.seen.state,
                    releases=self.seen.releases,
                    wanted=wanted,
                    skew=skew_of(self.session.facts["clock_skew_s"], facts.time, sent),
                )
            )
            results = [check for check in self.checks if check.name.startswith("preflight.")]
            self.frame.note = (
                f"systemd {facts.systemd}, {facts.root.free / 2**30:.0f} GiB free, "
                + ", ".join(
                    result.summary
                    for result in results
                    if result.name in {"preflight.model", "preflight.port"}
                )
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
        error = refusal(results, self.target.host.name)
        if error is not None:
            raise error
        for result in results:
            if result.verdict is Verdict.INCONCLUSIVE:
                self.frame.say("preflight", result_line(result))

    def build(self) -> None:
        """Build (or find in the cache) the bundle, make the plan and say it.

        :raises OpsError: the plan is not the one that was saved, or the host changed since; nothing was changed.
        """
        with self.frame.phase("build"):
            bundle = self.shipment.built()
            self._judge_versions(bundle)
            wish = Wish(
                host=self.target.name,
                service=self.target.service.name,
                unit=self.target.service.unit,
                release=bundle.digest,
                runtime=bundle.name,
                unit_text=self.unit_text,
                files=file_marks(bundle.files),
                overlay=bundle.overlay,
            )
            self.shipment.begin_check()
            if self.observed is None:
                self.look()()
            observed = replace(
                self.seen,
                secrets=secret_changes(self.secrets, self.host_secrets),
                stale_secrets=stale_files(self.secrets.files(), self.host_secrets),
            )
            for note in self.secrets.notes:
                self.frame.say("build", note)
            if wish.release in observed.releases and not self.shipment.found_whole():
                observed = replace(observed, repaired=("its files are not as built",))
            self.observed = observed
            self.plan = make_plan(wish, observed)
            if self.expected is not None:
                self.expected.check(self.plan, observed)
            if not self.plan.empty:
                self.frame.say("build", self.plan.short())
            parts = ", ".join([count(len(bundle.patches), "patch"), *filter(None, [bundle.overlay])])
            self.frame.note = f"{bundle.name} {bundle.digest[:12]}, {parts}"

    def push(self) -> None:
        """Publish the release; where it is already there, verify every file of it on disk."""
        bundle = self.shipment.needed()
        with self.frame.phase("push"):
            self.shipment.push()
            if self.shipment.repaired:
                self.observed = replace(self.seen, repaired=self.shipment.repaired)
                self.plan = make_plan(self._planned().wish, self.observed)
                if self.expected is not None and self.plan.digest != self.expected.digest:
                    raise RemoteError(
                        f"release {bundle.digest[:12]} was damaged meanwhile: it is repaired, and the saved plan has no restart",
                        hint=self.hold.safety.same_again(self.target.host.name),
                    )

    def verify(self) -> None:
        """Read the published release back and prove the sizing of its runner."""
        self.shipment.needed()
        with self.frame.phase("verify"):
            self.shipment.verify()

    def activate(self) -> None:
        """Stop, switch unit and link, start. Everything was verified before; nothing to do is said so."""
        plan = self._planned()
        with self.frame.phase("activate"):
            if not plan.activates and self.joined != "activate":
                self.frame.note = f"nothing to change: {self.seen.state.describe()}"
                if self.settled:
                    self.hold.settle()
                    self.invocation = self.seen.state.invocation_id or None
                else:
                    self.validate_again(f"{self.target.service.unit} runs as wished and is not validated")
                return
            self.switch(
                plan.wish.release, self.unit_text, plan.digest, self.target.service, "deploy", arm=True
            )
            self.frame.note = (
                "; ".join(change.summary for change in plan.changes if change.kind is not ChangeKind.RELEASE)
                or "started again with the other nodes"
            )

    def wait(self, *, load_timeout: float | None = None, stall_timeout: float | None = None) -> None:
        """Follow the start until the engine is ready, or ends."""
        if self.settled:
            return
        from ddtree_ops.checks.signatures import prepare
        from ddtree_ops.checks.wait import StartFailed, wait_ready

        prepare()
        self.worth_explaining = True
        with self.frame.phase("wait"):
            try:
                ready = wait_ready(
                    self.session,
                    self.target,
                    invocation=self.invocation,
                    report=self.frame.relay,
                    load_timeout=load_timeout,
                    stall_timeout=stall_timeout,
                    api_key=self._api_key(),
                    look=self._look_aside,
                )
            except StartFailed as error:
                if error.kind != "not-found" or self.changed:
                    raise
                self.worth_explaining = False
                raise NotDeployed(self.target.service.unit, self.target.host.name) from None
            self.invocation = ready.invocation
            self.frame.note = ready.result().summary

    def _look_aside(self) -> None:
        """While it waits: do the other nodes go on, and is the lock still ours?"""
        if self.member is not None:
            self.member.look()
        self.hold.look()

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
        with self.frame.phase("smoke"):
            self.hold.look()
            found = run_smoke(
                self.session,
                self.target,
                prompt=prompt,
                max_tokens=max_tokens,
                window=window,
                min_accept_length=min_accept_length,
                report=self.frame.relay,
                api_key=self._api_key(),
            )
            self._judge([check for check in found.results if check.name != "signatures"])

    def signatures(self) -> None:
        """Scan the invocation's journal for fatal signatures."""
        if self.settled:
            return
        from ddtree_ops.checks.signatures import signatures

        self.worth_explaining = True
        with self.frame.phase("signatures"):
            self.hold.look()
            result, self.diagnosis = signatures(
                self.session, self.target, invocation=self.invocation, patched=self.shipment.patched
            )
            self._warn_of(self.diagnosis.left_out)
            self._judge([result])

    def _warn_of(self, left_out: Sequence[str]) -> None:
        """Wrong files of signatures, each told once."""
        for text in left_out:
            if text not in self._told:
                self._told.add(text)
                self.frame.say(self.frame.step, text)

    def start(self) -> None:
        """Start the unit as it is."""
        self._operate("start", self.control.start)

    def stop(self, *, drain_timeout: float | None = None) -> None:
        """Stop the unit; says whether it drained, or what kept it from draining.

        :param drain_timeout: seconds for requests under way, then SIGKILL; 0: at once. Left out, as the unit says.
        """
        self._operate("stop", lambda: self.running.stop(drain_timeout))

    def restart(self, *, drain_timeout: float | None = None) -> None:
        """Restart the unit as it is; ``drain_timeout`` as for :meth:`stop`."""
        self._operate("restart", lambda: self.running.restart(drain_timeout))

    def _operate(self, name: str, action: Callable[[], StartReport | StopReport]) -> None:
        unit, host = self.target.service.unit, self.target.host.name
        with self.frame.phase(name):
            self.hold.lock()
            self.hold.warn(name)
            self.frame.state_left = f"how far the {name} of {unit} got is not known"
            if name != "start":
                self.frame.state_left += ": systemd goes on stopping it"
            self.next_step = f"ddtree-ops status {host}"
            self.changed = self.worth_explaining = self.operated = True
            try:
                report = action()
            except NotDeployed:
                self.changed = self.worth_explaining = self.operated = False
                self.frame.state_left, self.next_step = "nothing was changed", ""
                raise
            except OpsError as error:
                self.audit(name, outcome="failed", detail=error.message)
                raise
            self.frame.note, self.frame.state_left = report.describe(), report.state.describe()
            stopped = report if isinstance(report, StopReport) else report.stop
            if isinstance(report, StartReport):
                self.invocation = report.state.invocation_id or None
                self.frame.state_left += f" as of its {name}, and nothing has shown since that it serves"
                if stopped is not None:
                    self.frame.note = f"{stopped.describe()}; {self.frame.note}"
            ended = stopped.planned_end if stopped else ""
            outcome = "ok" if report.changed else "nothing to do"
            self.audit(name, outcome=outcome, detail=self.frame.note, invocation=ended)

    def go_back(self, *, to: str | None = None) -> None:
        """Switch to an activation that is recorded here, whole on disk, and another than what is there now.

        :param to: as for :func:`~ddtree_ops.deploy.earlier.way_back`; left out, the newest that passed.
        :raises PreflightError: there is none, or it is not whole; nothing was changed.
        :raises UsageError: ``to`` names no recorded activation, or several.
        """
        from ddtree_ops.deploy.goback import go_back

        with self.frame.phase("go_back"):
            go_back(self, to)

    def prune(self) -> None:
        """Remove what no service of the host needs any more; a failure is told, and fails nothing."""
        if not self.hold.locked or self.settled:
            return
        from ddtree_ops.deploy.releases import prune

        try:
            self.hold.need_lock()
            done = prune(
                self.session, self.layout, keep=self.target.host.keep_releases, holding=self.layout.unit
            )
        except OpsError as error:
            heed_interruption(error)
            self.frame.say("prune", f"old releases stay for now: {error.message}")
            return
        if done.removed or done.leftovers:
            self.frame.say("prune", done.describe())

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
        accept(self, self._reconnect)

    # -- after a failure -----------------------------------------------------------------------------------

    def capture(self) -> None:
        """Keep the journal, the unit and the results before anything else happens to the host."""
        with self.frame.phase("capture"):
            entries = self._run_entries()
            folder = evidence_folder(self.target.name)
            keep_files(folder, evidence_files(entries, self.unit_text, self.checks))
            self.evidence = folder
            self.frame.note = f"{len(entries)} journal entries kept in {folder}"

    def _run_entries(self) -> list[Entry]:
        if self._entries is None:
            none = self.never_started
            self._entries = [] if none else run_entries(self.control, self.invocation, self.frame.masked)
        return self._entries

    @property
    def never_started(self) -> bool:
        """No run came of the start under way, as systemd refused the unit; the last run is an older one's."""
        if self._last_run is None or self.invocation is not None:
            return False
        return self.control.state().invocation_id in ("", self._last_run)

    @property
    def failed_run(self) -> str:
        """What ``logs --invocation`` takes for the run that failed, once another one may have begun."""
        return "all" if self.never_started else self.invocation or "previous"

    def diagnose(self) -> None:
        """Explain the failed invocation from its journal."""
        from ddtree_ops.diagnose.api import diagnose
        from ddtree_ops.diagnose.facts import ServiceFacts
        from ddtree_ops.diagnose.library import lenient_library
        from ddtree_ops.diagnose.lines import from_entries

        with self.frame.phase("diagnose"):
            if not self._run_entries() and self.never_started:
                self.frame.note = "systemd started nothing, so there is no journal of a run to explain"
                return
            facts = ServiceFacts.of(self.target, patched=self.shipment.patched)
            library, left_out = lenient_library()
            self._warn_of(left_out)
            found = diagnose(from_entries(self._run_entries()), facts, library=library)
            found = replace(
                found,
                source=self.target.name,
                invocation=self.invocation or "",
                left_out=left_out,
                notes=left_out,
            )
            self.diagnosis = self._traced(found)
            self.frame.note = self.diagnosis.headline()
            if self.evidence is not None:
                keep_files(self.evidence, {"diagnosis.json": pretty(self.diagnosis.to_json())})

    def _traced(self, found: DiagnosisReport) -> DiagnosisReport:
        """With the way of the parameters through the release that was tried, and where the failure was seen before."""
        root = found.root
        if root is None:
            return found
        from ddtree_ops.deploy.explaining import trace_in
        from ddtree_ops.deploy.seen import in_evidence, in_history, sentence

        past = in_history(root, self.observed.history, self.target.name) if self.observed else []
        found = replace(found, seen=sentence([*in_evidence(root), *past], self.target.name, found.invocation))
        bundle = self.shipment.bundle
        if bundle is None or self.activation is None or self.activation.release != bundle.digest:
            return found
        return replace(found, trace=trace_in(bundle, root, origin=f"release {bundle.digest[:12]}"))

    def rollback(self) -> None:
        """Go back to the last release that passed and is still whole on the host, and see that it serves.

        Without one, back to the unit file that ran before us, unvalidated; without that, the unit is stopped. What
        was only to be validated is left as it runs where nothing is known to be wrong with it, or to be better.
        With ``--no-rollback``, and where the lock was lost, nothing is touched. While it goes back the host stays
        armed: if this client dies now, the host finishes it.

        :raises RolledBack: it serves again.
        """
        from ddtree_ops.deploy.goback import rollback

        rollback(self)

    # -- what the parts of a deployment work on ------------------------------------------------------------

    @property
    def secrets(self) -> Secrets:
        """All secrets of the service, as given or from their sources."""
        if self.known_secrets is None:
            self.known_secrets = resolve_secrets([self.target])[0]
        return self.known_secrets

    def _api_key(self) -> Secret | None:
        return api_key_of(self.target) if self.known_secrets is None else self.known_secrets.api_key

    @property
    def settled(self) -> bool:
        """True when a plan was made and holds nothing to do. What a bench left is to be validated as what is wished now."""
        if self.plan is None or not self.plan.empty or self.joined:
            return False
        left = self.observed is not None and self.observed.history.before_bench[1]
        return not left or self.hold.safety.command == BENCH

    @property
    def seen(self) -> Observed:
        """What is on the host. :raises OpsError: no step has looked."""
        if self.observed is None:
            raise step_missing()
        return self.observed

    def _planned(self) -> Plan:
        if self.plan is None:
            raise step_missing()
        return self.plan

    def look(self, *more: Request) -> Callable[[], list[Reply]]:
        """Ask the host for what is there; what is returned waits, keeps what is seen, and gives the replies to ``more``."""
        begun = begin_look(self.session, self.layout, self.target.service, *more, bundle=self.shipment.bundle)

        def replies() -> list[Reply]:
            asked, sight = begun()
            self.observed, self.host_secrets, self.link = sight.observed, sight.secrets, sight.link
            return asked

        return replies

    def tell_sight(self) -> None:
        """What was seen and matters whatever comes next: what serves, what cannot be read."""
        seen, frame = self.seen, self.frame
        if seen.state.running and seen.release:
            frame.state_left = f"nothing was changed: release {seen.release[:12]} keeps serving"
        if seen.history.damaged:
            lines = f"{count(seen.history.damaged, 'line')} of {self.layout.history}"
            frame.say(frame.step, f"{lines} cannot be read: what they said is not known here")

    def become(self, service: Service, unit_text: str) -> None:
        """Go on with the settings and the unit file of an earlier activation."""
        self.unit_text = unit_text
        self.target = self.target.model_copy(update={"service": service})
        self.hold.service = service

    def again(self, service: Service) -> Deployment:
        """A deployment under the same lock that validates what was just gone back to."""
        back = Deployment(
            self.target.model_copy(update={"service": service}),
            self.session,
            self.frame.report,
            secrets=Secrets({**self.host_secrets.values, **self.secrets.values}),
            member=self.member,
        )
        back.activation, back.invocation, back.unwritten = self.activation, self.invocation, self.unwritten
        back.hold.join(self.hold)
        return back

    def switch(
        self,
        release: str,
        unit_text: str,
        plan: str,
        service: Service,
        reason: str,
        *,
        arm: bool = False,
    ) -> None:
        """Stop the unit, have it run ``release`` by ``unit_text``, and start it.

        :param plan: digest of the plan. :param reason: as in the history.
        :param arm: have the host go back by itself unless it is confirmed.
        """
        kept = self.layout.kept_unit(text_sha256(unit_text))
        settings = service.model_dump_json().encode()
        self.session.ask(
            [
                Request("write_file", {"path": f"{kept}.service", "mode": 0o600}, unit_text.encode()),
                Request("write_file", {"path": f"{kept}.json", "mode": 0o600}, settings),
            ],
        )
        activation = self.new_activation(release, unit_text, plan, reason)
        if arm:
            from ddtree_ops.deploy.goback import where_to

            self.hold.arm(activation, lambda: where_to(self))
        self.announce(activation, needed=reason != "rollback" or arm)
        self.changed = True
        unfinished = f"the switch of {service.unit} to {release[:12]} was not finished"
        self.frame.state_left = f"{unfinished}: the service may be stopped"
        self.worth_explaining = True
        self._last_run = self.invocation or (self.observed.state.invocation_id if self.observed else None)
        self.invocation = None
        self._last_run = self.running.in_order(self.running.stop_if_there)
        if ended := self.running.without_head:
            detail = f"for the activation {activation.id}: after its head, without which it ends by itself"
            self.audit("stop", outcome="ok", detail=detail, invocation=ended)
        self.frame.state_left = f"{unfinished}: the service is stopped and nothing serves"
        if reason == "deploy":
            self.session.ask(write_requests(self.layout, self.secrets.files()))
        self.session.swap_link(self.layout.current, self.layout.link_target(release))
        self.install(unit_text)
        if self.member is not None:
            self.member.share("start", True)
        self.invocation = self.control.start().state.invocation_id or None
        self.frame.state_left = f"{service.unit} was started from {release[:12]} and is not validated"

    def install(self, text: str) -> None:
        """Write the unit file; one that holds secrets is for root alone."""
        self.control.install(self.layout.unit_path, text, mode=unit_mode(text))

    def validate_again(self, state: str) -> None:
        """What is wished runs already and is not validated: ``state`` says so of it until it is."""
        plan = self._planned()
        self.invocation = self.seen.state.invocation_id or None
        activation = self.new_activation(plan.wish.release, self.unit_text, plan.digest, "validate")
        self.hold.arm_validation(activation)
        self.announce(activation)
        self.changed = True
        self.frame.state_left = state

    def take_over(self, other: Deployment, activation: Activation, armed: Armed) -> None:
        """Go on, under the lock that ``other`` holds, with a deployment whose client is gone."""
        self.hold.join(other.hold, armed=armed.way_back)
        self.activation = activation
        self.invocation = self.control.state().invocation_id or None
        self.changed = True
        self.frame.state_left = (
            f"{self.target.service.unit} was started from {activation.release[:12]} and is not validated"
        )

    def confirm_unseen(self, summary: str, expected: Mapping[str, Any] | None = None) -> None:
        """Confirm the activation that was taken over, by somebody's word.

        :param expected: properties of the unit that must still be so.
        :raises CheckFailed: they are not. :raises RolledBack: too late.
        """
        assert self.activation is not None
        self.control.enable()
        invocation = str((expected or {}).get("InvocationID") or self.invocation or "")
        line = verdict_line(self.activation.id, Verdict.PASS, summary, invocation=invocation)
        self.hold.confirm(self.session, self.activation.id, line, expected)

    def new_activation(self, release: str, unit_text: str, plan: str, reason: str) -> Activation:
        """One that begins now; the nodes of a service have its id in common."""
        found = new_activation(
            release=release,
            unit_sha256=text_sha256(unit_text),
            plan=plan,
            who=who(),
            origin=origin(),
            reason=reason,
            runtime=self._runtime_of(release),
            command=self.hold.safety.command,
        )
        before = self.activation or (self.observed.history.latest if self.observed else None)
        if before is not None:
            installed = self.observed.unit_text if self.observed else None
            found = recorded(before, found, (installed, self.unit_text, unit_text))
        return replace(found, id=self.member.share("activation", found.id)[0]) if self.member else found

    def _runtime_of(self, release: str) -> str:
        """Name that a release was built under, as far as it is known."""
        bundle = self.shipment.bundle
        if bundle is not None and bundle.digest == release:
            return bundle.name
        past = self.observed.history.activations if self.observed else ()
        return next((item.runtime for item in reversed(past) if item.release == release and item.runtime), "")

    def announce(self, activation: Activation, *, needed: bool = True) -> None:
        """Write it into the history: from now on it is the one under way.

        :param needed: False: that it cannot be written keeps no service from coming back; it is tried again with the
            verdict.
        """
        try:
            self.session.append_line(self.layout.history, activation_line(activation))
        except (UnreachableError, LockHeld):
            raise
        except OpsError as error:
            if needed:
                raise
            heed_interruption(error)
            self.frame.say("rollback", f"not written into the history yet: {error.message}")
            self.unwritten = activation
        self.activation = activation

    def record(self, activation: Activation, verdict: Verdict) -> None:
        """Write a verdict on it into the history."""
        if self.unwritten is not None:
            self.announce(self.unwritten)
            self.unwritten = None
        summary = self.frame.masked(self.verdict_summary())
        root = self.diagnosis.root if self.diagnosis is not None else None
        cause = (root.signature, root.fingerprint) if root and verdict is Verdict.FAIL else None
        line = verdict_line(activation.id, verdict, summary, invocation=self.invocation or "", cause=cause)
        self.session.append_line(self.layout.history, line)

    def audit(self, action: str, *, outcome: str, detail: str, invocation: str = "") -> None:
        """Write an act into the host's audit; that it cannot be written is told and changes nothing."""
        from ddtree_ops.deploy.audit import record

        try:
            record(
                self.session,
                self.layout,
                action,
                outcome=outcome,
                detail=self.frame.masked(detail),
                invocation=invocation,
            )
        except OpsError as error:
            heed_interruption(error)
            self.frame.say(action, f"the audit line could not be written: {error.message}")

    def verdict_summary(self) -> str:
        """Why the run passed or failed, in a line."""
        if self.diagnosis is not None and self.diagnosis.diagnoses:
            return self.diagnosis.headline()
        telling = [check for check in self.checks if check.name.startswith(("smoke", "signatures"))]
        failure = self.frame.failure
        if failure is None or any(check.verdict is not Verdict.PASS for check in telling):
            return "; ".join(check.summary for check in telling)[:500]
        loading = self.diagnosis.loading if self.diagnosis is not None else ""
        return "; ".join(text for text in (failure.message, loading) if text)[:500]

    def _keep(self, results: Sequence[CheckResult]) -> None:
        """Add results to those of this run, without the values of secrets."""
        self.checks += map(self.frame.own, results)

    def _judge(self, results: Sequence[CheckResult]) -> None:
        self._keep(results)
        self.frame.note = judged(results, self.target.host.name)
