"""Does a started service work? One completion, then the unit is held, then its own words are read.

Healthy is: active and running, the same InvocationID, NRestarts and MainPID over a window, the port owned by the unit, a
completion that returned the tokens asked for as sane text, speculation that pays, and no fatal signature in this
invocation's journal. A crash seconds after the answer, or hidden by an automatic restart, is seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ddtree_ops.checks.engine import Chat, EngineClient, EngineError, Generation, Model, ServerInfo
from ddtree_ops.checks.holding import hold_unit
from ddtree_ops.checks.port import PortHolders, port_holders
from ddtree_ops.checks.prompts import Prompt, resolve_prompt, unmet
from ddtree_ops.checks.signatures import prepare, signatures
from ddtree_ops.checks.speculation import judge_graphs, judge_speculation, summarise_decode
from ddtree_ops.checks.textquality import judge_text
from ddtree_ops.diagnose.api import DiagnosisReport
from ddtree_ops.errors import Inconclusive, NotDeployed
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Event, EventKind, Evidence, Reporter, Verdict, worst
from ddtree_ops.secret import Secret, redact
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.state import UnitState

__all__ = ["SmokeReport", "judge_completion", "run_smoke"]

_DECODE_STEPS = 48
"""A little more than the 40 decode steps after which the server logs a line."""
_DEATH_PATIENCE = 3.0


@dataclass(frozen=True)
class SmokeReport:
    """All of a smoke check: the sub-results, and the diagnosis of the invocation's journal where there is one."""

    results: tuple[CheckResult, ...]
    diagnosis: DiagnosisReport | None = None
    chat: Chat | None = None
    server: ServerInfo | None = field(default=None, repr=False)

    @property
    def verdict(self) -> Verdict:
        """The worst of the sub-results."""
        return worst(result.verdict for result in self.results)


def judge_completion(chat: Chat, *, max_tokens: int, host: str = "") -> CheckResult:
    """Did the server return the tokens asked for? Pure."""
    rate = chat.completion_tokens / chat.seconds if chat.seconds > 0 else 0.0
    facts = {
        "model": chat.model,
        "completion_tokens": chat.completion_tokens,
        "max_tokens": max_tokens,
        "prompt_tokens": chat.prompt_tokens,
        "finish_reason": chat.finish_reason,
        "seconds": round(chat.seconds, 3),
        "tokens_per_s": round(rate, 2),
    }
    evidence = (Evidence("http POST /v1/chat/completions", _excerpt(chat.text)),)
    count, reason = chat.completion_tokens, chat.finish_reason

    def result(verdict: Verdict, summary: str, hint: str = "") -> CheckResult:
        return CheckResult(
            "smoke.completion", verdict, summary, host=host, facts=facts, evidence=evidence, hint=hint
        )

    if reason == "length" and count != max_tokens:
        return result(
            Verdict.FAIL, f"{count} tokens came with finish_reason length, {max_tokens} were asked for"
        )
    if reason == "stop" and count > max_tokens:
        return result(Verdict.FAIL, f"{count} tokens came, at most {max_tokens} were asked for")
    if reason not in {"length", "stop"}:
        return result(Verdict.FAIL, f"the answer ended with finish_reason {reason!r} after {count} tokens")
    if count <= 1:
        return result(
            Verdict.INCONCLUSIVE,
            f"only {count} token came ({reason}): the first one is made by the prefill, so no decode step ran",
            hint="use a prompt with a longer answer, such as --prompt quicksort",
        )
    return result(
        Verdict.PASS, f"{count} tokens in {chat.seconds:.2f} s, {rate:.1f} tokens/s end to end ({reason})"
    )


def _judge_text(chat: Chat, prompt: Prompt, host: str) -> CheckResult:
    found = judge_text(chat.text, completion_tokens=chat.completion_tokens)
    evidence = (Evidence("http POST /v1/chat/completions", _excerpt(chat.text)),)
    reason = found.reason
    if reason is None and (missing := unmet(prompt, chat.text or "")):
        reason = f"the answer to the prompt {prompt.name} does not match {', '.join(missing)}"
    if reason is not None:
        return CheckResult(
            "smoke.text",
            Verdict.FAIL,
            f"the text is not sane: {reason}",
            host=host,
            facts=found.figures,
            evidence=evidence,
            hint="the process lives and answers nonsense: compare with the same prompt on a server without speculation",
        )
    return CheckResult(
        "smoke.text",
        Verdict.PASS,
        "the text reads as text",
        host=host,
        facts=found.figures,
        evidence=evidence,
    )


def _excerpt(text: str | None, size: int = 400) -> str:
    if text is None:
        return "(null)"
    text = redact(text)
    return text if len(text) <= size else f"{text[:size]}…"


@dataclass
class _Run:
    """The state of one smoke check."""

    session: Session
    target: Target
    report: Reporter
    phase: str
    control: UnitControl
    results: list[CheckResult] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def host(self) -> str:
        return self.target.host.name

    def say(self, message: str, fraction: float) -> None:
        self.report(Event(EventKind.PROGRESS, self.host, self.phase, message, fraction=fraction))

    def add(self, result: CheckResult) -> CheckResult:
        self.results.append(result)
        return result

    def skip(self, *names: str, why: str) -> None:
        for name in names:
            self.add(CheckResult(f"smoke.{name}", Verdict.SKIPPED, why, host=self.host))

    def hold(self, before: UnitState, window: float) -> tuple[str | None, UnitState, int]:
        """Watch the unit over ``window`` seconds: what went wrong (at once), the last sample, and the samples seen."""
        prepare()

        def tell(left: float) -> None:
            self.say(f"holding the unit, {left:.0f} s to go", 0.5 + 0.4 * (1 - left / max(window, 0.1)))

        return hold_unit(self.session, self.target.service.unit, before, window, tell)


def run_smoke(
    session: Session,
    target: Target,
    *,
    prompt: str | None = None,
    report: Reporter,
    max_tokens: int | None = None,
    window: float | None = None,
    request_timeout: float | None = None,
    api_key: Secret | None = None,
    min_accept_length: float | None = None,
    quality: bool | None = None,
    baseline_unit: UnitState | None = None,
    phase: str = "smoke",
) -> SmokeReport:
    """Smoke-test a service. What is left out comes from the service's ``health`` in the inventory.

    :param prompt: a named prompt or free text.
    :param report: gets PROGRESS events; the START and the DONE of the step are the caller's.
    :param max_tokens: tokens asked for, at temperature 0.
    :param window: seconds over which the unit is held after the completion.
    :param request_timeout: seconds for one completion.
    :param min_accept_length: tokens a verify step; below it speculation fails. Left out, it is the service's floor, unless
        its ``health.judge_speculation`` is off: then speculation that gains nothing passes too.
    :param quality: False leaves the text unjudged (a test model that talks nonsense).
    :param baseline_unit: the unit as it was when it was found ready: the window then starts there.
    :raises UsageError: a misspelt prompt name.
    :raises UnreachableError: the session ended. What the engine does wrong is a result, not an error.
    """
    health, host = target.service.health, target.host.name
    chosen = resolve_prompt(prompt if prompt is not None else health.prompt)
    tokens = health.max_tokens if max_tokens is None else max_tokens
    timeout = health.request_timeout if request_timeout is None else request_timeout
    floor = health.min_accept_length if health.judge_speculation else None
    least = floor if min_accept_length is None else min_accept_length
    quality = health.judge_text if quality is None else quality
    run = _Run(session, target, report, phase, UnitControl(session, target.service.unit))
    before = run.control.state()
    problem = before.stable_against(baseline_unit) if baseline_unit is not None else None
    if problem is None and not before.running:
        problem = before.describe()
    if problem is not None:
        if not before.exists and baseline_unit is None:
            missing = NotDeployed(target.service.unit, host)
            run.add(
                CheckResult(
                    "smoke.stable", Verdict.INCONCLUSIVE, missing.message, host=host, hint=missing.hint
                )
            )
            run.skip("completion", "text", "speculation", "graphs", why="there is no such unit")
            return SmokeReport(tuple(run.results), None, None, None)
        run.add(_stable(run, before, problem, before, None, 0.0))
        run.skip(
            "completion",
            "text",
            "speculation",
            "graphs",
            why="the service does not run",
        )
        return _finish(run, baseline_unit or before, None, None)
    seconds = health.window if window is None else window
    if target.node is not None and not target.node.is_head:
        problem, after, samples = run.hold(before, seconds)
        holders = port_holders(run.control, target.service)
        run.add(_stable(run, before, problem, after, holders, seconds, samples))
        why = f"{target.node}: only the head {target.node.hosts[0]} answers requests"
        run.skip("completion", "text", "speculation", "graphs", why=why)
        return _finish(run, before, None, None)
    cursor = run.control.cursor()
    chat: Chat | None = None
    info: ServerInfo | None = None
    generation: Generation | None = None
    refused = False
    with EngineClient(session, target, api_key) as engine:
        try:
            model = _served(engine, target)
            run.say(f"asking {model.name} for {tokens} tokens", 0.1)
            chat = engine.chat(model.name, chosen.text, max_tokens=_fitting(tokens, model), timeout=timeout)
            completion = judge_completion(chat, max_tokens=_fitting(tokens, model), host=host)
            wanted = target.service.served_name
            if wanted is not None and model.name != wanted:
                completion = CheckResult(
                    completion.name,
                    Verdict.FAIL,
                    f"the server serves {model.name!r}, the inventory says {wanted!r}",
                    host=host,
                    facts=completion.facts,
                    evidence=(Evidence("http GET /v1/models", model.name),),
                )
            run.add(completion)
            if quality:
                run.add(_judge_text(chat, chosen, host))
            else:
                run.skip("text", why="the text was not judged, as asked")
            run.say(completion.summary, 0.3)
            info = engine.server_info()
            generation = _generate(run, engine, chosen, model, tokens, timeout, before, cursor)
        except EngineError as error:
            _, unit, _ = hold_unit(session, target.service.unit, before, _DEATH_PATIENCE)
            _engine_failed(run, error, unit, before, quality)
            changed = unit.stable_against(before)
            if changed is not None:
                run.add(_stable(run, before, changed, unit, None, 0.0))
                run.skip("speculation", "graphs", why="the engine died")
                return _finish(run, before, chat, info)
            refused = error.status in (401, 403)
    problem, after, samples = run.hold(before, seconds)
    holders = port_holders(run.control, target.service)
    run.add(_stable(run, before, problem, after, holders, seconds, samples))
    if refused:
        run.skip("speculation", "graphs", why="the engine answers none of our requests")
        return _finish(run, before, chat, info)
    decode = summarise_decode(_messages(run, before, cursor))
    run.add(
        judge_speculation(
            target.service,
            generation=generation,
            decode=decode,
            info=info,
            min_accept_length=least,
            must_gain=health.judge_speculation,
            host=host,
        )
    )
    run.add(judge_graphs(target.service, decode=decode, info=info, host=host))
    return _finish(run, before, chat, info)


def _served(engine: EngineClient, target: Target) -> Model:
    models = engine.models()
    return next((model for model in models if model.name == target.service.served_name), models[0])


def _fitting(tokens: int, model: Model) -> int:
    """A request that is refused at validation would leak in 0.5.11 (its drain then never ends): never ask for too much."""
    return tokens if model.max_model_len is None else max(2, min(tokens, model.max_model_len // 2))


def _generate(
    run: _Run,
    engine: EngineClient,
    prompt: Prompt,
    model: Model,
    tokens: int,
    timeout: float,
    unit: UnitState,
    cursor: str | None,
) -> Generation:
    """A second request with the exact counts of speculation, and a third where no decode line was logged so far."""
    run.say("measuring the accept length", 0.4)
    generation = engine.generate(prompt.text, max_tokens=_fitting(tokens, model), timeout=timeout)
    if not summarise_decode(_messages(run, unit, cursor)).lines:
        more = math.ceil(_DECODE_STEPS * (generation.accept_length or 1.0))
        engine.generate(prompt.text, max_tokens=_fitting(more, model), timeout=timeout, ignore_eos=True)
    return generation


def _messages(run: _Run, unit: UnitState, cursor: str | None) -> Iterator[str]:
    """What the invocation has written since ``cursor``."""
    return (
        entry.message for entry in run.control.entries(invocation=unit.invocation_id, after_cursor=cursor)
    )


def _engine_failed(run: _Run, error: EngineError, unit: UnitState, before: UnitState, quality: bool) -> None:
    """Turn a request that failed into results for what is not judged yet."""
    changed = unit.stable_against(before)
    summary = error.message
    if changed is not None:
        summary += f"; the engine died: {changed}"
    elif error.kind == "timeout":
        summary += "; the unit still runs: hung, or busy with a long queue"
    evidence = (Evidence("http", error.message), Evidence("systemctl show", unit.describe()))
    known = {result.name for result in run.results}
    first = "smoke.completion" not in known
    verdict = Verdict.FAIL if first or changed is not None or error.kind != "status" else Verdict.INCONCLUSIVE
    name = "smoke.completion" if first else "smoke.requests"
    hint = error.hint or f"ddtree-ops logs {run.host} --invocation {before.invocation_id or 'current'}"
    facts = {"kind": error.kind, "status": error.status}
    run.add(CheckResult(name, verdict, summary, host=run.host, facts=facts, evidence=evidence, hint=hint))
    if "smoke.text" not in known and quality:
        run.skip("text", why="there is no answer to judge")


def _stable(
    run: _Run,
    before: UnitState,
    problem: str | None,
    unit: UnitState,
    holders: PortHolders | None,
    window: float,
    samples: int = 1,
) -> CheckResult:
    evidence = [Evidence("systemctl show", unit.describe())]
    if holders is not None:
        evidence.append(Evidence("listening sockets", holders.describe()))
    if problem is None and holders is not None and not holders.owned:
        problem = holders.describe()
    facts = {
        "window_s": window,
        "changes": max(0, samples - 1),
        "invocation": unit.invocation_id,
        "n_restarts": unit.n_restarts,
        "main_pid": unit.main_pid,
    }
    if problem is not None:
        return CheckResult(
            "smoke.stable",
            Verdict.FAIL,
            problem,
            host=run.host,
            facts=facts,
            evidence=tuple(evidence),
            hint=f"ddtree-ops logs {run.host} --invocation {before.invocation_id or 'current'}"
            if before.exists
            else f"ddtree-ops deploy {run.host}",
        )
    return CheckResult(
        "smoke.stable",
        Verdict.PASS,
        f"the same process held for {window:g} s (PID {unit.main_pid}, {unit.n_restarts} restarts) and owns its port",
        host=run.host,
        facts=facts,
        evidence=tuple(evidence),
    )


def _finish(run: _Run, unit: UnitState, chat: Chat | None, info: ServerInfo | None) -> SmokeReport:
    """The signature scan of the invocation that was tested comes last: it must see what the requests provoked."""
    run.say("reading the journal of this invocation", 0.95)
    diagnosis: DiagnosisReport | None = None
    try:
        scanned, diagnosis = signatures(run.session, run.target, invocation=unit.invocation_id)
    except Inconclusive as error:
        scanned = CheckResult(
            "signatures", Verdict.INCONCLUSIVE, error.message, host=run.host, hint=error.hint
        )
    run.add(scanned)
    return SmokeReport(tuple(run.results), diagnosis, chat, info)
