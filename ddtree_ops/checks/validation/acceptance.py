"""The check ``acceptance``: how many tokens a verify step yields, on real chats of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from ddtree_ops.checks.engine import Generation, ServerInfo
from ddtree_ops.checks.speculation import DecodeWindow, summarise_decode
from ddtree_ops.checks.validation.acceptance_judging import (
    Counts,
    by_kind,
    judge_acceptance,
    judge_said,
    same_algorithm,
    total_counts,
)
from ddtree_ops.checks.validation.acceptance_prompts import Ask, Rendered, kinds, pick_prompts, ready
from ddtree_ops.checks.validation.asking import excerpt, fitting, next_of, skipped
from ddtree_ops.checks.validation.base import Context, Settings, check
from ddtree_ops.checks.validation.judging import Judgement
from ddtree_ops.errors import Inconclusive, RemoteError
from ddtree_ops.noise import Change, compare
from ddtree_ops.results import CheckResult, Evidence, Figure, Verdict

__all__ = ["HISTORY", "Acceptance"]

HISTORY = "history"
"""Key of :attr:`Context.shared`: earlier figures ``accept_length`` of this target without labels."""
_SOURCE = "POST /generate meta_info"


class Acceptance(Settings):
    """``prompts``: how many, of every kind in turn; ``kinds``: only these. ``floor``: left out: health.min_accept_length."""

    prompts: Annotated[int, Field(ge=1)] = 12
    max_tokens: Annotated[int, Field(ge=8)] = 128
    kinds: tuple[str, ...] = ()
    floor: Annotated[float, Field(ge=1)] | None = None


@check("acceptance", "drafts pay on real chats, and their figures add up", settings=Acceptance)
def acceptance(ctx: Context, settings: Acceptance) -> CheckResult:
    """One request at a time, so that log and requests speak of the same."""
    wanted = ctx.target.service.speculative
    if wanted is not None and not ctx.speculative:
        return ctx.result(
            Verdict.FAIL,
            f"{wanted.algorithm} is configured, and the server runs without speculative decoding",
            evidence=[Evidence("http GET /server_info", "speculative_algorithm: null")],
            hint=f"ddtree-ops deploy {ctx.host} --dry-run shows whether it runs with the flags of the inventory",
        )
    if not ctx.speculative:
        return skipped(ctx, "no speculative decoding is configured")
    if wanted is not None and not same_algorithm(wanted.algorithm, ctx.speculative):
        return ctx.result(
            Verdict.FAIL,
            f"{wanted.algorithm} is configured, and the server runs {ctx.speculative}",
            evidence=[Evidence("http GET /server_info", f"speculative_algorithm: {ctx.speculative}")],
            hint=f"ddtree-ops deploy {ctx.host} --dry-run shows whether it runs with the flags of the inventory",
        )
    asks = pick_prompts(settings.prompts, settings.kinds)
    if not asks:
        return ctx.result(Verdict.INCONCLUSIVE, f"no prompt of these kinds; there are {', '.join(kinds())}")
    rendered = ready(ctx, asks)
    answers: list[tuple[Ask, Generation]] = []
    begun = ctx.session.run(["date", "+%s.%N"], check=True).stdout.decode("ascii", "replace").strip()
    for number, each in enumerate(rendered.prompts, 1):
        ctx.say(f"{each.name} ({number} of {len(rendered.prompts)})")
        answers.append(
            (
                each,
                ctx.engine.generate(
                    each.given, max_tokens=fitting(ctx, settings.max_tokens), timeout=ctx.timeout
                ),
            )
        )
    return _result(ctx, settings, rendered, answers, _decode(ctx, begun), ctx.engine.server_info())


def _decode(ctx: Context, begun: str) -> tuple[DecodeWindow, str]:
    """The decode lines since the check began; what kept them from being read."""
    try:
        found = ctx.control.search("Decode batch", invocation="current", since=f"@{begun}", literal=True)
    except (Inconclusive, RemoteError) as error:
        return summarise_decode(()), f"the journal was not read: {error.message}"
    return summarise_decode(entry.message for entry in found.matches), ""


def _result(
    ctx: Context,
    settings: Acceptance,
    rendered: Rendered,
    answers: Sequence[tuple[Ask, Generation]],
    journal: tuple[DecodeWindow, str],
    info: ServerInfo,
) -> CheckResult:
    decode, unread = journal
    service = ctx.target.service
    counted = [(ask, found) for ask, answer in answers if (found := Counts.of(ask.name, answer)) is not None]
    counts = [found for _, found in counted]
    total = total_counts("all prompts", counts)
    floor = settings.floor if settings.floor is not None else service.health.min_accept_length
    change = _change(ctx, total)
    block = service.speculative.block_size if service.speculative else None
    counting = judge_acceptance(
        counts,
        block_size=block,
        floor=floor,
        decode=decode,
        server=info.avg_accept_length,
        change=change,
        answered=sum(answer.completion_tokens > 1 for _, answer in answers),
    )
    said = judge_said([(ask.name, answer) for ask, answer in answers], quality=ctx.quality)
    judged = said if said is not None and counting.verdict is not Verdict.FAIL else counting
    grouped = by_kind({kind: [c for ask, c in counted if ask.kind == kind] for kind in kinds()})
    figures = []
    if total.length is not None:
        figures.append(Figure("accept_length", round(total.length, 4), "tokens/step", _SOURCE, total.steps))
        figures += [
            Figure(
                "accept_length",
                round(each.length, 4),
                "tokens/step",
                _SOURCE,
                each.steps,
                labels={"prompt": kind},
            )
            for kind, each in grouped.items()
            if each.length is not None
        ]
        figures += [
            Figure(
                "accept_histogram",
                float(steps),
                "steps",
                _SOURCE,
                total.steps,
                labels={"accepted": str(place)},
            )
            for place, steps in enumerate(total.histogram)
        ]
    log = None if decode.accept_length is None else round(decode.accept_length, 3)
    evidence = [Evidence(f"http {_SOURCE}", f"{kind}: {_told(each)}") for kind, each in grouped.items()]
    if decode.text:
        evidence.append(Evidence("journal", decode.text))
    evidence += [
        Evidence(f"http POST /generate ({ask.name})", excerpt(answer.text, 120))
        for ask, answer in answers[:1]
    ]
    notes = [note for note in (rendered.note, unread) if note]
    evidence += [Evidence("validate", note) for note in notes]
    return ctx.result(
        judged.verdict,
        judged.summary,
        hint=_next(ctx, judged),
        facts={
            "accept_length": None if total.length is None else round(total.length, 3),
            "accept_length_by_source": {
                "requests": None if total.length is None else round(total.length, 3),
                "log": log,
                "server": info.avg_accept_length,
            },
            "decode_lines": decode.lines,
            "block_size": block,
            "floor": floor,
            "templated": rendered.templated,
            "requests": len(answers),
            "counted": total.requests,
            "verify_steps": total.steps,
            "history": None
            if change is None
            else {
                "median": change.median,
                "mad": change.mad,
                "runs": change.runs,
                "judgement": change.judgement.value,
            },
        },
        evidence=evidence,
        figures=figures,
    )


def _next(ctx: Context, judged: Judgement) -> str:
    """What to do about it: the judgement's words, and a command."""
    hint = next_of(ctx, judged)
    if judged.verdict is Verdict.PASS or "ddtree-ops " in hint:
        return hint
    command = f"ddtree-ops logs {ctx.host} --stats"
    if judged.verdict is Verdict.FAIL:
        command = f"ddtree-ops diagnose {ctx.host}; ddtree-ops lint {ctx.host}"
    return f"{judged.hint.rstrip('. ')}; {command}" if judged.hint else command


def _told(counts: Counts) -> str:
    length = "no verify step" if counts.length is None else f"accept length {counts.length:.2f}"
    return f"{length}, {counts.accepted} drafts in {counts.steps} steps, {counts.requests} answers"


def _change(ctx: Context, total: Counts) -> Change | None:
    """Against the figures of earlier runs, where the run knows any."""
    earlier: Sequence[Figure] = ctx.shared.get(HISTORY) or ()
    values = [
        each.value
        for each in earlier
        if each.name == "accept_length" and each.value is not None and not each.labels
    ]
    if total.length is None or not values:
        return None
    return compare(values, total.length, higher_is_better=True)
