"""Checks with many requests: at once, and one after another."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from pydantic import Field

from ddtree_ops.checks.engine import Chat, EngineError, Load
from ddtree_ops.checks.validation.asking import chat, fitting, told
from ddtree_ops.checks.validation.base import Context, Settings, check
from ddtree_ops.checks.validation.judging import Judgement, Paced, judge_burst, judge_pace, worst_of
from ddtree_ops.checks.validation.protocol import until_idle
from ddtree_ops.results import CheckResult, Figure

__all__ = ["Burst", "Endurance"]

_TOPICS = (
    "the tides", "a bicycle gear", "bread", "glass", "the compass", "a suspension bridge", "paper", "the moon",
    "a clock's pendulum", "ice", "the alphabet", "a sailing boat", "copper", "a lighthouse", "honey", "chess",
)  # fmt: skip


_LOOK_EVERY = 3
"""Requests from one look at the scheduler to the next."""
_SETTLED_S = 0.5
"""Seconds that our own last request may still be counted for."""


class Burst(Settings):
    """``widths``: requests at once; ``max_tokens`` of each; ``alone``: how many are asked alone before, to compare."""

    widths: Annotated[tuple[Annotated[int, Field(ge=2, le=256)], ...], Field(min_length=1)] = (8, 16)
    max_tokens: Annotated[int, Field(ge=2)] = 32
    alone: Annotated[int, Field(ge=0)] = 8


class Endurance(Settings):
    """``requests`` at least, and as many more as fit into ``seconds``; ``least_share``: end over beginning, tokens/s."""

    requests: Annotated[int, Field(ge=6)] = 48
    seconds: Annotated[float, Field(ge=0)] = 20.0
    max_tokens: Annotated[int, Field(ge=8)] = 64
    least_share: Annotated[float, Field(gt=0, le=1)] = 0.6
    health_every: Annotated[int, Field(ge=1)] = 6


def _prompt(index: int) -> str:
    return f"Write two sentences about {_TOPICS[index % len(_TOPICS)]}" + (
        f", variation {index // len(_TOPICS) + 1}." if index >= len(_TOPICS) else "."
    )


@check("burst", "many requests at once are all answered, each with its own answer", settings=Burst)
def burst(ctx: Context, settings: Burst) -> CheckResult:
    """Every width once; answers that differ from those of lone requests are counted."""
    tokens = fitting(ctx, settings.max_tokens)

    def one(index: int) -> Chat | EngineError:
        try:
            return chat(ctx, _prompt(index), max_tokens=tokens)
        except EngineError as error:
            return error

    alone: list[str | None] = []
    for index in range(min(settings.alone, max(settings.widths))):
        ctx.say("alone, to compare")
        alone.append(chat(ctx, _prompt(index), max_tokens=tokens).text)
    judged: list[Judgement] = []
    figures, facts = [], {}
    broken: EngineError | None = None
    for width in settings.widths:
        ctx.say(f"{width} at once")
        begun = time.monotonic()
        with ThreadPoolExecutor(width) as pool:
            answers = list(pool.map(one, range(width)))
        seconds = time.monotonic() - begun
        errors = [each for each in answers if isinstance(each, EngineError)]
        texts = [each if isinstance(each, Chat) else each.message for each in answers]
        judged.append(judge_burst(width, texts, alone, max_tokens=tokens, quality=ctx.quality))
        made = sum(each.completion_tokens for each in answers if isinstance(each, Chat))
        facts[f"width_{width}"] = {
            "seconds": round(seconds, 3),
            "completion_tokens": made,
            "failed": len(errors),
        }
        known = [(a.text, b) for a, b in zip(answers, alone, strict=False) if isinstance(a, Chat)]
        if known:
            figures.append(
                Figure(
                    "burst_mismatch",
                    sum(1 for a, b in known if a != b) / len(known),
                    "ratio",
                    "POST /v1/chat/completions",
                    samples=len(known),
                    labels={"concurrency": str(width)},
                )
            )
        broken = next((each for each in errors if each.kind in {"disconnect", "refused", "timeout"}), None)
        if broken is not None:
            raise broken.at(phase=f"{width} requests at once")
    found = worst_of(judged, "; ".join(each.summary for each in judged))
    return told(ctx, found, facts=facts, figures=figures)


@check("endurance", "a long run of requests is as fast at its end, and healthy all along", settings=Endurance)
def endurance(ctx: Context, settings: Endurance) -> CheckResult:
    """One request after another, with looks at ``/health`` and, while none of ours runs, at what the scheduler holds."""
    begun = time.monotonic()
    paced: list[Paced] = []
    health: list[int | None] = []
    loads: list[Load | None] = []
    tokens = fitting(ctx, settings.max_tokens)
    while len(paced) < settings.requests or time.monotonic() - begun < settings.seconds:
        if len(paced) % _LOOK_EVERY == 0:
            loads.append(until_idle(ctx, _SETTLED_S)[-1])
        if len(paced) % settings.health_every == 0:
            health.append(ctx.engine.health(timeout=max(25.0, ctx.timeout)))
        at = time.monotonic() - begun
        answer = chat(ctx, _prompt(len(paced)), max_tokens=tokens, ignore_eos=True)
        paced.append(Paced(at, answer.seconds, answer.completion_tokens))
        took = time.monotonic() - begun
        ctx.say(
            f"request {len(paced)} (at least {settings.requests}), {took:.0f} s (at least {settings.seconds:g})"
        )
    loads.append(until_idle(ctx, _SETTLED_S)[-1])
    found = judge_pace(paced, health, least_share=settings.least_share, loads=loads)
    third = max(1, len(paced) // 3)
    facts = {
        "requests": len(paced),
        "seconds": round(time.monotonic() - begun, 1),
        "health": health,
        "requests_of_others": [None if load is None else load.running + load.waiting for load in loads],
        "tokens_per_s_first": round(sum(each.rate for each in paced[:third]) / third, 1),
        "tokens_per_s_last": round(sum(each.rate for each in paced[-third:]) / third, 1),
    }
    return told(ctx, found, facts=facts)
