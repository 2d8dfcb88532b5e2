"""One service on one host, taken through the steps of a playbook.

A :class:`Deployment` holds what the steps hand to each other: the session, the facts, the bundle, the plan, the
activation under way, the evidence. Each public method is one step; it raises an
:class:`~ddtree_ops.errors.OpsError` when the step fails and leaves the host in the state the error names.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ddtree_ops import paths
from ddtree_ops.deploy.history import (
    Activation,
    activation_line,
    new_activation,
    parse_history,
    verdict_line,
)
from ddtree_ops.deploy.plan import (
    ChangeKind,
    Observed,
    Plan,
    Wish,
    make_plan,
    masked_unit_line,
    text_sha256,
)
from ddtree_ops.errors import (
    BuildError,
    CheckFailed,
    ExitCode,
    Inconclusive,
    LockHeld,
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
from ddtree_ops.secret import redact, secret_values
from ddtree_ops.service.control import StartReport, StopReport, UnitControl
from ddtree_ops.service.journal import Entry
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.state import UnitState
from ddtree_ops.service.unit import render_unit

if TYPE_CHECKING:
    from ddtree_ops.diagnose.api import DiagnosisReport

__all__ = ["Deployment", "Outcome", "Result"]

_T = TypeVar("_T")


class Outcome(StrEnum):
    """How a run over one target ended."""

    UNCHANGED = "unchanged"
    DEPLOYED = "deployed"
    PASSED = "passed"
    FAILED = "failed"
    ROLLED_BACK = "rolled-back"
    INTERRUPTED = "interrupted"


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
            "error": self.error.render() if self.error else None,
            "exit_code": int(self.error.exit_code if self.error else ExitCode.OK),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


class Deployment:
    """See the module docstring. One thread uses one Deployment.

    :param bundle: of the target's runtime, where it is known before the build step.
    """

    def __init__(
        self, target: Target, session: Session, report: Reporter, *, bundle: Bundle | None = None
    ) -> None:
        self.target = target
        self.session = session
        self.layout = Layout.of(target)
        self.control = UnitControl(session, target.service.unit)
        self.unit_text = render_unit(target)
        self.bundle = bundle
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
        self._runner: PatchCheck | None = None
        self._verified_on_push = False
        self._invocation: str | None = None
        self._entries: list[Entry] | None = None
        self._patched: bool | None = None
        self._secrets = secret_values(target.service.environment)
        self._locked = False
        self._link: str | None = None
        self._failure: OpsError | None = None
        self.step = ""
        self.state_left = "nothing was changed"
        self.changed = False
        self.worth_explaining = False

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

    # -- steps ---------------------------------------------------------------------------------------------

    def preflight(self) -> None:
        """Take the lock and learn everything that can be known before a change; all problems at once."""
        from ddtree_ops.deploy.preflight import judge, parse_facts, probe_argv

        with self.phase("preflight"):
            self._lock()
            look = self._look(Request("run", {"argv": probe_argv(self.target)}))
            self._begin_check()
            owners = self.control.port_owner(self.target.service.port, self.target.service.bind)
            self._check_built()
            probe, *replies = look()
            self.observed = self._observed(replies)
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
            results = judge(
                self.target,
                facts,
                owners,
                drop_ins=self.observed.state.drop_in_paths,
            )
            self._keep(results)
            bad = [result for result in results if result.verdict is Verdict.FAIL]
            if bad:
                raise PreflightError(
                    f"{len(bad)} of {len(results)} preflight checks failed",
                    details=tuple(f"{result.name}: {result.summary}" for result in bad),
                    hint=next((result.hint for result in bad if result.hint), "mend that and deploy again"),
                )
            unsure = [result for result in results if result.verdict is Verdict.INCONCLUSIVE]
            for result in unsure:
                self._emit(EventKind.NOTE, "preflight", f"{result.name}: {result.summary}")
            self._note = f"systemd {facts.systemd}, {facts.free_bytes / 2**30:.0f} GiB free, " + ", ".join(
                result.summary for result in results if result.name in {"preflight.model", "preflight.port"}
            )

    def build(self) -> None:
        """Build (or find in the cache) the bundle and make the plan."""
        with self.phase("build"):
            if self.bundle is None:
                self.bundle = build(
                    self.target.runtime, progress=lambda text: self._emit(EventKind.PROGRESS, "build", text)
                )
            wish = Wish(
                host=self.target.name,
                service=self.target.service.name,
                unit=self.target.service.unit,
                release=self.bundle.digest,
                runtime=self.bundle.name,
                unit_text=self.unit_text,
            )
            if self.observed is None:
                self.observed = self._observed(self._look()())
            self.plan = make_plan(wish, self.observed)
            self._note = (
                f"{self.bundle.name} {self.bundle.digest[:12]}, {_count(len(self.bundle.patches), 'patch')}"
            )

    def push(self) -> None:
        """Publish the release; where it is already there, verify every file of it on disk."""
        bundle = self._need(self.bundle)
        with self.phase("push"):
            if self._whole is not None and self._whole():
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
                self._note = f"repaired: {'; '.join(result.repaired[:3])}"
            elif result.created:
                linked = (
                    f", {result.linked_files} linked from earlier releases" if result.linked_files else ""
                )
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
            if not plan.activates:
                state = self._need(self.observed).state
                self._invocation = state.invocation_id or None
                self._note = f"nothing to change: {state.describe()}"
                if not plan.empty:
                    self.activation = self._announce(
                        plan.wish.release, self.unit_text, plan.digest, "validate"
                    )
                    self.changed = True
                    self.state_left = f"{self.target.service.unit} runs as wished and is not validated"
                return
            self._switch(plan.wish.release, self.unit_text, plan.digest, self.target.service, "deploy")
            self._note = "; ".join(
                change.summary for change in plan.changes if change.kind is not ChangeKind.RELEASE
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

    def stop(self) -> None:
        """Stop the unit; says whether it drained."""
        self._operate("stop", self.control.stop)

    def restart(self) -> None:
        """Restart the unit as it is."""
        self._operate("restart", self.control.restart)

    def _operate(self, name: str, action: Callable[[], StartReport | StopReport]) -> None:
        with self.phase(name):
            self._lock()
            self.state_left = f"how far the {name} of {self.target.service.unit} got is not known"
            self.changed = self.worth_explaining = True
            report = action()
            self._note = report.describe()
            self.state_left = report.state.describe()

    def accept(self) -> None:
        """Record that the activation under way passed, and have the unit started at boot from now on.

        An activation that no smoke check has judged stays without a verdict: the next deploy validates it.
        """
        if self.activation is None:
            return
        if not any(check.ok and check.name.startswith("smoke") for check in self.checks):
            self._emit(
                EventKind.NOTE, "accept", "no step has shown that it serves: the next deploy validates it"
            )
            return
        try:
            self.control.enable()
            self._record(self.activation, Verdict.PASS)
        except OpsError as error:
            state = f"{self.target.service.unit} passed and serves, but that is not recorded: the next deploy validates it again"
            raise error.at(host=self.target.name, phase="accept", state=state) from None

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

        :raises RolledBack: it serves again.
        """
        failed = self.activation
        if failed is None:
            return
        unit = self.target.service.unit
        with self.phase("rollback"):
            unsure = isinstance(self._failure, Inconclusive)
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
        back = Deployment(self.target.model_copy(update={"service": service}), self.session, self._report)
        back.activation, back._invocation = self.activation, self._invocation
        try:
            back.wait()
            back.smoke()
            back.signatures()
        except OpsError:
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
    def settled(self) -> bool:
        """True when a plan was made and holds nothing to do."""
        return self.plan is not None and self.plan.empty

    def _need(self, value: _T | None) -> _T:
        if value is None:
            raise OpsError(
                "an earlier step of the playbook is missing",
                hint="a playbook that pushes starts with preflight, build",
            )
        return value

    def _begin_check(self) -> None:
        """Have the host hash the release while it is looked at, where it is known which one it will be."""
        if self.bundle is not None:
            self._whole = self.session.begin_check(
                releases_dir=self.layout.releases,
                digest=self.bundle.digest,
                manifest=self.bundle.manifest,
            )

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
        ]
        replied = self.session.begin_batch(requests)

        def replies() -> list[Reply]:
            found: list[Reply] = []
            for reply in replied():
                if isinstance(reply, Exception):
                    raise reply
                found.append(reply)
            return found

        return replies

    def _observed(self, replies: Sequence[Reply]) -> Observed:
        own, releases, unit, history, show = replies
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
        )

    def _switch(self, release: str, unit_text: str, plan: str, service: Service, reason: str) -> None:
        kept = f"{self.layout.service_dir}/units/{text_sha256(unit_text)}"
        self.session.write_file(f"{kept}.service", unit_text.encode(), mode=0o600)
        self.session.write_file(f"{kept}.json", service.model_dump_json().encode(), mode=0o600)
        self.activation = self._announce(release, unit_text, plan, reason)
        self.changed = True
        unfinished = f"the switch of {service.unit} to {release[:12]} was not finished"
        self.state_left = f"{unfinished}: the service may be stopped"
        self.worth_explaining = True
        self._stop_if_there()
        self.state_left = f"{unfinished}: the service is stopped and nothing serves"
        self.session.swap_link(self.layout.current, self.layout.link_target(release))
        self._install(unit_text)
        self._invocation = self.control.start().state.invocation_id or None
        self.state_left = f"{service.unit} was started from {release[:12]} and is not validated"

    def _install(self, text: str) -> None:
        """Write the unit file; one that holds secrets is for root alone."""
        open_to_all = all(masked_unit_line(line) == line for line in text.splitlines())
        self.control.install(self.layout.unit_path, text, mode=0o644 if open_to_all else 0o600)

    def _lock(self) -> None:
        if self._locked:
            return
        holder = self.session.acquire_lock(self.layout.lock, {"who": _who(), "origin": _origin()})
        if holder is not None:
            began = holder.get("since")
            since = (
                f" since {datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M:%SZ}"
                if isinstance(began, int | float)
                else ""
            )
            raise LockHeld(
                f"{holder.get('who', 'somebody')} on {holder.get('origin', 'another machine')} is deploying "
                f"{self.target.service.unit}{since}",
                hint="try again when it is done; the lock goes when that client's connection ends",
            )
        self._locked = True

    def _stop_if_there(self) -> None:
        if self.control.state().exists:
            self.control.stop()

    def _announce(self, release: str, unit_text: str, plan: str, reason: str) -> Activation:
        activation = new_activation(
            release=release,
            unit_sha256=text_sha256(unit_text),
            plan=plan,
            who=_who(),
            origin=_origin(),
            reason=reason,
        )
        self.session.append_line(self.layout.history, activation_line(activation))
        return activation

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
            service = Service.model_validate_json(record)
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


def _who() -> str:
    try:
        return os.environ.get("DDTREE_OPS_WHO") or getpass.getuser()
    except (KeyError, OSError):  # no name for this user id, as in many containers
        return f"user {os.getuid()}"


def _origin() -> str:
    return socket.gethostname()


def _count(number: int, word: str) -> str:
    return (
        f"{number} {word}"
        if number == 1
        else f"{number} {word}es"
        if word.endswith("ch")
        else f"{number} {word}s"
    )
