"""The check ``lossless``: greedy answers with speculation against what the target writes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ddtree_ops.checks.engine import EngineClient
from ddtree_ops.checks.validation.acceptance_prompts import pick_prompts, ready
from ddtree_ops.checks.validation.asking import fitting, skipped
from ddtree_ops.checks.validation.base import Context, Settings, check
from ddtree_ops.checks.validation.golden import (
    BATCH,
    MAX_TOKENS,
    PROMPTS,
    Golden,
    answer_of,
    load,
    measure,
    model_files,
    one_pass,
    other_target,
    server_facts,
    with_gaps,
)
from ddtree_ops.checks.validation.judging import Judgement
from ddtree_ops.checks.validation.lossless_judging import (
    EPSILON,
    Compared,
    Outcome,
    compare_answers,
    judge_batch,
    judge_single,
    self_difference,
)
from ddtree_ops.errors import CheckFailed, ConfigError, Inconclusive, UnreachableError
from ddtree_ops.inventory.baselines import baseline_of
from ddtree_ops.inventory.models import Inventory, Target
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Evidence, Figure, Verdict
from ddtree_ops.secret import Secret

__all__ = ["BASELINE", "GOLDEN", "Baseline", "Lossless", "open_baseline"]

BASELINE = "baseline"
"""Key of :attr:`Context.shared`: a :data:`Baseline`, where the inventory names a baseline service."""
GOLDEN = "golden"
"""Key of :attr:`Context.shared`: path of a golden file."""
_SOURCE = "POST /generate output_ids"
_SHOWN = 8

Baseline = Callable[[], AbstractContextManager[EngineClient]]
"""Opens the engine of the target without speculation."""


class Lossless(Settings):
    """``golden``: a recorded file, where the run is given none; left out: the baseline service. ``epsilon`` in nats; ``batch`` 0: batch 1 only."""

    prompts: Annotated[int, Field(ge=1)] = PROMPTS
    max_tokens: Annotated[int, Field(ge=8)] = MAX_TOKENS
    batch: Annotated[int, Field(ge=0)] = BATCH
    epsilon: Annotated[float, Field(gt=0)] = EPSILON
    golden: str = ""


def open_baseline(
    inventory: Inventory,
    target: Target,
    connect: Callable[[Target], AbstractContextManager[Session]],
    api_key: Callable[[Target], Secret | None] = lambda _: None,
) -> Baseline | None:
    """What opens the baseline of ``target``, for :attr:`Context.shared`; None where the inventory names none.

    :param connect: opens a session to a target's host (``masked_session``).
    :param api_key: of the baseline's engine.
    """
    baseline = baseline_of(inventory, target)
    if baseline is None:
        return None
    found = baseline

    @contextmanager
    def opened() -> Iterator[EngineClient]:
        with connect(found) as session, EngineClient(session, found, api_key(found)) as engine:
            yield engine

    return opened


@check(
    "lossless",
    "speculation writes at temperature 0 what the target writes alone",
    settings=Lossless,
    disturbs=True,
)
def lossless(ctx: Context, settings: Lossless) -> CheckResult:
    """Compare with a baseline: a recorded file, or the target without speculation on a service of its own."""
    if not ctx.speculative:
        return skipped(ctx, "the server runs without speculation: there is nothing to compare")
    try:
        golden = _baseline(ctx, settings)
        if isinstance(golden, CheckResult):
            return golden
        other = other_target({**server_facts(ctx.info), "files": model_files(ctx)}, golden.facts)
        if other:
            return ctx.result(
                Verdict.INCONCLUSIVE,
                f"the baseline is another target: {other}",
                hint="record it anew from the target without speculation: ddtree-ops validate HOST --record FILE",
            )
        return _compared(ctx, settings, golden)
    except (Inconclusive, ConfigError) as error:
        return ctx.result(Verdict.INCONCLUSIVE, error.message, hint=error.hint)


def _baseline(ctx: Context, settings: Lossless) -> Golden | CheckResult:
    """The baseline's answers; a result where there are none."""
    path = ctx.shared.get(GOLDEN) or settings.golden
    if path:
        found = load(Path(path).expanduser())
        with_gaps(found, ctx.host)
        return replace(found, prompts=found.prompts[: settings.prompts])
    opener: Baseline | None = ctx.shared.get(BASELINE)
    if opener is None:
        why = "no baseline to compare with: the inventory names no baseline service, and no golden file is given"
        hint = (
            "record a file on a host that serves the model without speculation: ddtree-ops validate HOST --record "
            f"golden.json; then: ddtree-ops validate {ctx.host} --check lossless --golden golden.json; or name such a "
            "service as baseline: in the inventory"
        )
        verdict = Verdict.INCONCLUSIVE if ctx.target.service.baseline else Verdict.SKIPPED
        return ctx.result(verdict, why, hint=hint)
    rendered = ready(ctx, pick_prompts(settings.prompts))
    try:
        with opener() as engine:
            info, model = engine.server_info(), engine.models()[0].name
            measured = measure(
                engine,
                rendered.prompts,
                host=ctx.host,
                info=info,
                model=model,
                facts=server_facts(info),
                max_tokens=fitting(ctx, settings.max_tokens),
                batch=_batch(settings.batch, ctx.info.raw, info.raw),
                timeout=ctx.timeout,
                templated=rendered.templated,
                say=ctx.say,
            )
        with_gaps(measured, ctx.host)
        return measured
    except (CheckFailed, UnreachableError) as error:
        named = ctx.target.service.baseline
        host = ctx.host if named is None or named.host is None else named.host
        what = "the baseline" if named is None else f"the baseline {named.service} on {host}"
        hint = error.hint or "does it run? Or record a file: ddtree-ops validate HOST --record FILE"
        return ctx.result(
            Verdict.INCONCLUSIVE,
            f"no answers of {what}: {error.message}",
            hint=f"{hint}; ddtree-ops status {host}",
        )


def _batch(wanted: int, *servers: Mapping[str, Any]) -> int:
    """``wanted``, or what the servers run at a time."""
    most = [each.get("max_running_requests") for each in servers]
    return min([wanted, *(each for each in most if isinstance(each, int) and each > 0)])


def _compared(ctx: Context, settings: Lossless, golden: Golden) -> CheckResult:
    asks = [each.ask for each in golden.prompts]

    def ask(batch: int) -> list[Compared]:
        what = f"{batch} at a time" if batch > 1 else "one at a time"
        found = one_pass(
            ctx.engine,
            asks,
            host=ctx.host,
            max_tokens=golden.max_tokens,
            timeout=ctx.timeout,
            batch=batch,
            say=lambda text: ctx.say(f"{what}: {text}"),
        )
        return [
            compare_answers(
                spoken.ask.name, spoken.first, spoken.second, answer_of(each), epsilon=settings.epsilon
            )
            for spoken, each in zip(golden.prompts, found, strict=True)
        ]

    single = ask(1)
    unsteady = sum(self_difference(each.first, each.second) is not None for each in golden.prompts)
    judgements = [judge_single(single, unsteady)]
    many: list[Compared] = []
    own: list[Compared] = []
    batch = _batch(settings.batch, ctx.info.raw)
    if batch > 1 and golden.batch:
        batch = min(batch, golden.batch)
        own = [
            compare_answers(each.ask.name, each.first, each.second, each.batch, epsilon=settings.epsilon)
            for each in golden.prompts
            if each.batch is not None
        ]
        if batch == golden.batch:
            many = ask(batch)
            judgements.append(judge_batch(batch, many, own))
        else:
            text = (
                f"batch {golden.batch} of the baseline is more than the {batch} of this server: not compared"
            )
            judgements.append(Judgement(Verdict.INCONCLUSIVE, text))
    elif batch > 1:
        judgements.append(
            Judgement(
                Verdict.INCONCLUSIVE, f"batch {batch}: the baseline was not measured at any batch above 1"
            )
        )
    return _result(ctx, settings, golden, judgements, single, many, own, unsteady)


def _result(
    ctx: Context,
    settings: Lossless,
    golden: Golden,
    judgements: Sequence[Judgement],
    single: Sequence[Compared],
    many: Sequence[Compared],
    own: Sequence[Compared],
    unsteady: int,
) -> CheckResult:
    order = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
    deciding = min(judgements, key=lambda each: order.index(each.verdict))
    passes = {"1": single, **({str(golden.batch): many} if many else {})}
    figures = [Figure("baseline_self_mismatches", float(unsteady), "count", _SOURCE, len(golden.prompts))]
    for batch, rows in passes.items():
        labels = {"concurrency": batch}
        for name, outcome in (
            ("lossless_prompts", Outcome.EQUAL),
            ("lossless_mismatches", Outcome.MISMATCH),
            ("lossless_near_ties", Outcome.NEAR_TIE),
        ):
            number = (
                len(rows) if name == "lossless_prompts" else sum(each.outcome is outcome for each in rows)
            )
            figures.append(Figure(name, float(number), "count", _SOURCE, len(rows), labels=labels))
    telling = [
        (batch, each)
        for batch, rows in passes.items()
        for each in sorted(rows, key=lambda row: list(_ORDER).index(row.outcome))
        if each.outcome is not Outcome.EQUAL
    ]
    return ctx.result(
        deciding.verdict,
        "; ".join(each.summary for each in judgements)
        if deciding.verdict is Verdict.PASS
        else deciding.summary,
        hint=deciding.hint,
        facts={
            "baseline": golden.source or _named(ctx),
            "recorded": golden.recorded,
            "templated": golden.templated,
            "epsilon_nats": settings.epsilon,
            "max_tokens": golden.max_tokens,
            "outcomes": {
                batch: {outcome.value: sum(each.outcome is outcome for each in rows) for outcome in Outcome}
                for batch, rows in passes.items()
            },
            "baseline_own_mismatches_at_batch": sum(each.outcome is Outcome.MISMATCH for each in own),
            "sglang": {"baseline": golden.version, "here": ctx.info.version},
        },
        evidence=[
            Evidence(f"http POST /generate, batch {batch}", each.describe())
            for batch, each in telling[:_SHOWN]
        ],
        figures=figures,
    )


def _named(ctx: Context) -> str:
    named = ctx.target.service.baseline
    return "" if named is None else f"{named.host or ctx.host}/{named.service}"


_ORDER = (
    Outcome.MISMATCH,
    Outcome.DOUBTFUL,
    Outcome.UNKNOWN,
    Outcome.NEAR_TIE,
    Outcome.UNSTEADY,
    Outcome.EQUAL,
)
