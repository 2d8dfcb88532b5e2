"""Run checks on one target, one after another; what they leave is judged at the end.

The unit is looked at before the first check and after every one. A check under way when the engine dies fails with the
state that the unit was left in; what asks the engine after that is skipped, and what stands (the unit, the kernel's log,
the journal, memory) is judged all the same.
"""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ddtree_ops.checks.engine import EngineClient, EngineError, Load, Model, ServerInfo
from ddtree_ops.checks.holding import hold_unit
from ddtree_ops.checks.readiness import Readiness, Waiting
from ddtree_ops.checks.validation.base import PHASE, Context
from ddtree_ops.checks.validation.judging import judge_silence
from ddtree_ops.checks.validation.standing import ASKED, DIAGNOSIS, MEMORY, host_memory
from ddtree_ops.checks.validation.suites import Planned
from ddtree_ops.diagnose.api import DiagnosisReport
from ddtree_ops.errors import (
    Inconclusive,
    Interrupted,
    NotDeployed,
    OpsError,
    RemoteError,
    UnreachableError,
    heed_interruption,
)
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Event, EventKind, Evidence, Reporter, Verdict, worst
from ddtree_ops.runreport import TargetReport
from ddtree_ops.secret import Secret, redact
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.state import UnitState

__all__ = ["Validation", "demanded", "open_context", "validate"]

_DEATH_PATIENCE = 3.0
"""Seconds that an engine which dies may take to be gone."""
_FRAMES = 3
"""Of the stack of a check that broke: kept as evidence."""
_SILENCE_S = 10.0
"""Seconds for the question whether a scheduler that did not answer is hung."""


@dataclass(frozen=True)
class Validation:
    """What the checks found on one target.

    :param facts: of the engine and its unit: version, algorithm, model, context, invocation ...
    """

    checks: tuple[CheckResult, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    diagnosis: DiagnosisReport | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks."""
        return worst(check.verdict for check in self.checks)

    def report(self, target: Target) -> TargetReport:
        """The same as part of a run report."""
        diagnoses: tuple[dict[str, Any], ...] = ()
        if self.diagnosis is not None and self.diagnosis.diagnoses:
            diagnoses = ({"source": target.name, **self.diagnosis.to_json()},)
        return TargetReport(
            target.name, target.host.name, target.service.name, self.facts, self.checks, (), diagnoses
        )


def validate(
    session: Session,
    target: Target,
    plan: Sequence[Planned],
    *,
    report: Reporter,
    api_key: Secret | None = None,
    quality: bool | None = None,
    timeout: float | None = None,
    shared: Mapping[str, Any] | None = None,
    named: Collection[str] = (),
    on_result: Callable[[CheckResult], None] | None = None,
    on_facts: Callable[[Mapping[str, Any]], None] | None = None,
) -> Validation:
    """Run ``plan`` (see :func:`~ddtree_ops.checks.validation.suites.pick`) against one target.

    :param report: gets START, PROGRESS and the end of the phase ``validate``.
    :param quality: False: texts are checked for being there, not for sense; None: as the inventory says.
    :param timeout: seconds for one request; None: as the inventory says.
    :param shared: what the caller knows already, for :attr:`Context.shared` (a baseline, a golden file, history).
    :param named: checks that were asked for by name: one that skips itself has proven nothing, and is inconclusive.
    :param on_result: called with every result as it comes.
    :param on_facts: called with what is known of the engine before the first check, see :class:`Validation`.
    :raises UnreachableError: the session ended; what was found until then went to ``on_result``.
    """
    run = _Run(session, target, report, on_result, shared or {})
    run.on_facts, run.named = on_facts, frozenset(named)
    begun = time.monotonic()
    report(Event(EventKind.START, target.name, PHASE, f"{len(plan)} checks"))
    run.all(plan, api_key, quality, timeout)
    verdict = worst(result.verdict for result in run.results)
    failed = [result.name for result in run.results if result.verdict is Verdict.FAIL]
    message = f"{len(run.results)} checks: {verdict.value}" + (f" ({', '.join(failed)})" if failed else "")
    report(Event(EventKind.end(verdict), target.name, PHASE, message, elapsed_s=time.monotonic() - begun))
    return Validation(tuple(run.results), run.facts, run.diagnosis)


@contextmanager
def open_context(
    session: Session,
    target: Target,
    *,
    report: Reporter,
    api_key: Secret | None = None,
    quality: bool | None = None,
    timeout: float | None = None,
    shared: Mapping[str, Any] | None = None,
    unit: UnitState | None = None,
) -> Iterator[Context]:
    """What a check works with, for one target whose engine answers.

    :param unit: the unit, where it was looked at already.
    :raises EngineError: it does not say what it serves.
    """
    control = UnitControl(session, target.service.unit)
    health = target.service.health
    with EngineClient(session, target, api_key) as engine:
        models = engine.models()
        model = next((each for each in models if each.name == target.service.served_name), models[0])
        yield Context(
            session=session,
            target=target,
            engine=engine,
            model=model,
            info=engine.server_info(),
            unit=control.state() if unit is None else unit,
            control=control,
            report=report,
            timeout=health.request_timeout if timeout is None else timeout,
            quality=health.judge_text if quality is None else quality,
            api_key=api_key,
            since=_host_time(session),
            nonce=f"Note {secrets.token_hex(4)}",
            shared=dict(shared or {}),
        )


def _host_time(session: Session) -> datetime:
    """Now, by the host's clock."""
    text = session.run(["date", "+%s.%N"], check=True).stdout.decode("ascii", "replace").strip()
    return datetime.fromtimestamp(float(text), UTC)


def _outcome(ctx: Context, planned: Planned) -> tuple[CheckResult, EngineError | None]:
    """The result of a check whatever it raises, and the error where a request failed.

    :raises UnreachableError: the session ended. :raises Interrupted: the run is to end.
    """
    try:
        return planned.spec.run(ctx, planned.settings), None
    except (UnreachableError, Interrupted):
        raise
    except EngineError as error:
        return ctx.result(Verdict.FAIL, error.message, hint=error.hint), error
    except Inconclusive as error:
        return ctx.result(Verdict.INCONCLUSIVE, error.message, hint=error.hint), None
    except Exception as error:
        heed_interruption(error)
        summary, hint, evidence = _broken(error, ctx.host, ctx.api_key)
        return ctx.result(Verdict.FAIL, summary, hint=hint, evidence=[evidence]), None


def demanded(result: CheckResult, named: Collection[str], host: str) -> CheckResult:
    """A check that was asked for by name and skipped itself was not judged: that is no pass. Pure."""
    if result.verdict is not Verdict.SKIPPED or result.name not in named:
        return result
    hint = result.hint or f"where it does not apply, leave its name out: ddtree-ops validate {host}"
    return replace(result, verdict=Verdict.INCONCLUSIVE, hint=hint)


def _broken(error: Exception, host: str, key: Secret | None) -> tuple[str, str, Evidence]:
    """Summary, hint and evidence of an error that nothing was prepared for."""
    keys = (key.reveal(),) if key else ()
    said = error.message if isinstance(error, OpsError) else str(error)
    told = redact(f"{type(error).__name__}: {said}", *keys)[:400]
    frames = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-_FRAMES:]))
    hint = error.hint if isinstance(error, OpsError) else ""
    return (
        f"the check itself broke: {told}",
        hint or f"ddtree-ops logs {host} --invocation current",
        Evidence("validate", f"{told}\n{redact(frames, *keys).rstrip()}"),
    )


def _loading(control: UnitControl, unit: UnitState, target: Target, now: datetime) -> str:
    """How far the start is that is still under way, or an empty text: it was ready, it died, or it takes too long.

    :param now: by the host's clock.
    """
    if unit.active_enter is None:
        return ""
    begun, health = unit.active_enter.timestamp(), target.service.health
    machine = Readiness(health.load_timeout, health.stall_timeout, begun, unit.invocation_id or None)
    machine.feed_unit(unit, begun)
    try:
        for entry in control.entries(invocation="current"):
            machine.feed_line(entry.message, entry.time.timestamp())
    except (Inconclusive, RemoteError):
        return ""
    return machine.describe() if isinstance(machine.poll(now.timestamp()), Waiting) else ""


class _Run:
    """The state of one run."""

    def __init__(
        self,
        session: Session,
        target: Target,
        report: Reporter,
        on_result: Callable[[CheckResult], None] | None,
        shared: Mapping[str, Any],
    ) -> None:
        self.session, self.target, self.report, self.on_result = session, target, report, on_result
        self.shared = shared
        self.named: frozenset[str] = frozenset()
        self.results: list[CheckResult] = []
        self.facts: dict[str, Any] = {}
        self.on_facts: Callable[[Mapping[str, Any]], None] | None = None
        self.diagnosis: DiagnosisReport | None = None
        self.over = ""
        """Why the engine is asked nothing more."""

    def add(self, result: CheckResult, begun: float | None = None) -> None:
        seconds = 0.0 if begun is None else time.monotonic() - begun
        result = replace(result, host=self.target.name, seconds=seconds)
        self.results.append(result)
        if self.on_result is not None:
            self.on_result(result)

    def skip(self, plan: Sequence[Planned], why: str) -> None:
        for planned in plan:
            self.add(CheckResult(planned.name, Verdict.SKIPPED, why))

    def all(
        self, plan: Sequence[Planned], api_key: Secret | None, quality: bool | None, timeout: float | None
    ) -> None:
        control = UnitControl(self.session, self.target.service.unit)
        unit = control.state()
        if not unit.exists:
            missing = NotDeployed(self.target.service.unit, self.target.host.name)
            self.add(CheckResult("steady", Verdict.INCONCLUSIVE, missing.message, hint=missing.hint))
            self.skip([planned for planned in plan if planned.name != "steady"], "there is no such unit")
            return
        asking = [planned for planned in plan if not planned.spec.standing]
        standing = [planned for planned in plan if planned.spec.standing]
        node = self.target.node
        if not unit.running:
            hint = f"ddtree-ops diagnose {self.target.host.name}"
            evidence = (Evidence("systemctl show", unit.describe()),)
            self.add(CheckResult("steady", Verdict.FAIL, unit.describe(), evidence=evidence, hint=hint))
            rest = [planned for planned in plan if planned.name != "steady"]
            self.skip(rest, "the service does not run")
            return
        with ExitStack() as stack:
            ctx: Context | None = None
            if node is not None and not node.is_head:
                self.skip(asking, f"{node}: only the head {node.hosts[0]} answers requests")
            else:
                opening = open_context(
                    self.session,
                    self.target,
                    report=self.report,
                    api_key=api_key,
                    quality=quality,
                    timeout=timeout,
                    shared=self.shared,
                    unit=unit,
                )
                try:
                    ctx = stack.enter_context(opening)
                except EngineError as error:
                    silent = error.kind == "refused" or error.status == 503
                    loads = silent and _loading(control, unit, self.target, _host_time(self.session))
                    if loads:
                        self._not_yet(loads, asking, standing, unit)
                        return
                    found = CheckResult("reachable", Verdict.FAIL, error.message, hint=error.hint)
                    self.add(self._explained(found, error, unit, None))
                    self.skip(asking, self.over or "the engine does not say what it serves")
                except (UnreachableError, Interrupted):
                    raise
                except Exception as error:
                    heed_interruption(error)
                    summary, hint, shown = _broken(error, self.target.host.name, api_key)
                    evidence = (shown,)
                    self.add(CheckResult("reachable", Verdict.FAIL, summary, evidence=evidence, hint=hint))
                    self.skip(asking, "what the engine serves could not be read")
            if ctx is None:
                ctx = stack.enter_context(self._mute(control, unit))
            else:
                self._facts(ctx)
                self._ask(ctx, asking)
            self._stand(ctx, standing)

    def _not_yet(
        self, loads: str, asking: Sequence[Planned], standing: Sequence[Planned], unit: UnitState
    ) -> None:
        """Nothing is asked of an engine that loads, and nothing that stands is judged before it serves."""
        host = self.target.host.name
        evidence = (Evidence("systemctl show", unit.describe()),)
        hint = f"ddtree-ops wait {host}"
        self.add(
            CheckResult(
                "reachable", Verdict.INCONCLUSIVE, f"it still loads: {loads}", evidence=evidence, hint=hint
            )
        )
        self.skip([*asking, *standing], f"the engine still loads: {loads}")

    @contextmanager
    def _mute(self, control: UnitControl, unit: UnitState) -> Iterator[Context]:
        """What standing checks work with where the engine is not asked."""
        with EngineClient(self.session, self.target) as engine:
            yield Context(
                session=self.session,
                target=self.target,
                engine=engine,
                model=Model(""),
                info=ServerInfo("", None, None, None, None),
                unit=unit,
                control=control,
                report=self.report,
                timeout=self.target.service.health.request_timeout,
                since=_host_time(self.session),
            )

    def _facts(self, ctx: Context) -> None:
        self.facts.update(
            version=ctx.info.version,
            speculative_algorithm=ctx.info.speculative_algorithm,
            model=ctx.model.name,
            context_tokens=ctx.model.max_model_len,
            runtime=self.target.service.runtime,
            invocation=ctx.unit.invocation_id,
            main_pid=ctx.unit.main_pid,
            quality=ctx.quality,
        )
        if self.on_facts is not None:
            self.on_facts(self.facts)

    def _ask(self, ctx: Context, plan: Sequence[Planned]) -> None:
        """The checks that ask the engine; none is asked of one that died or hangs."""
        for index, planned in enumerate(plan):
            if self.over:
                self.skip(plan[index:], self.over)
                return
            ctx.name = planned.name
            ctx.shared.setdefault(ASKED, []).append(planned.name)
            ctx.say(planned.spec.title, index / len(plan))
            begun = time.monotonic()
            result, error = _outcome(ctx, planned)
            self.add(demanded(self._explained(result, error, ctx.unit, ctx), self.named, ctx.host), begun)
            if not self.over and (size := host_memory(self.session, ctx.unit)) is not None:
                ctx.shared.setdefault(MEMORY, []).append(size)

    def _explained(
        self, result: CheckResult, error: EngineError | None, before: UnitState, ctx: Context | None
    ) -> CheckResult:
        """The result of a check, after a look at the unit: what a request failed of, and what is left."""
        patience = _DEATH_PATIENCE if error is not None and error.kind != "status" else 0.0
        problem, unit, _ = hold_unit(self.session, self.target.service.unit, before, patience)
        host = self.target.host.name
        evidence = (*result.evidence, Evidence("systemctl show", unit.describe()))
        if problem is not None:
            self.over = "the engine died"
            was = result.summary if error is not None else f"{result.verdict.value}: {result.summary}"
            return replace(
                result,
                verdict=Verdict.FAIL,
                summary=f"{was}; the engine died: {problem}",
                evidence=evidence,
                hint=f"ddtree-ops diagnose {host} --invocation {before.invocation_id or 'current'}",
            )
        if error is None:
            return result
        if error.kind == "timeout" and ctx is not None:
            answers, load = self._silent(ctx)
            self.over = "" if answers else "the engine hangs"
            return replace(
                result,
                summary=f"{result.summary}; {judge_silence(answers=answers, load=load)}",
                evidence=evidence,
                hint=f"ddtree-ops logs {host} --stats, then ddtree-ops restart {host}",
            )
        if error.status in (401, 403):
            self.over = "the engine answers none of our requests"
        left = "the unit still runs"
        return replace(
            result,
            summary=f"{result.summary}; {left}",
            evidence=evidence,
            hint=result.hint or f"ddtree-ops logs {host} --invocation {before.invocation_id or 'current'}",
        )

    def _silent(self, ctx: Context) -> tuple[bool, Load | None]:
        """Whether the scheduler answers after a request that it did not answer, and what it holds."""
        try:
            ctx.engine.server_info(timeout=_SILENCE_S)
            return True, ctx.engine.load(timeout=_SILENCE_S)
        except EngineError:
            return False, None

    def _stand(self, ctx: Context, plan: Sequence[Planned]) -> None:
        """The checks that stand: each is judged, whatever became of the others."""
        for planned in plan:
            ctx.name = planned.name
            begun = time.monotonic()
            result, _ = _outcome(ctx, planned)
            self.add(demanded(result, self.named, ctx.host), begun)
        self.diagnosis = ctx.shared.get(DIAGNOSIS)
