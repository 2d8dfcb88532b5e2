"""Checks of what the model says: a chat, many kinds of prompts, a copy, sums, a needle in a long text."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from ddtree_ops.checks.engine import Chat
from ddtree_ops.checks.prompts import load_prompts
from ddtree_ops.checks.validation.asking import (
    NONSENSE,
    Answered,
    answered,
    capacity,
    chat,
    fitting,
    named_prompt,
    sized_prose,
    skipped,
    told,
)
from ddtree_ops.checks.validation.base import Context, Settings, check
from ddtree_ops.checks.validation.judging import (
    Judgement,
    judge_answers,
    judge_arithmetic,
    judge_chat,
    judge_copy,
    judge_needle,
    judge_prompt_size,
    judge_unicode,
    worst_of,
)
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.wording import count

__all__ = ["COPIED", "UNICODE", "Arithmetic", "Garbage", "LongPrompt", "Needle", "ShortChat", "Thinking"]

COPIED = (
    'Order 4471-B/9 (2 of 3): ship 17 x "M8 hex" to Quay 5, gate {C}; e-mail ops+dock@example.com; '
    "total = 1,308.50 - 12.5% (not 1,380.50)."
)
UNICODE = "naïve Größe — 東京の天気 · Привет · 한국어 · مرحبا · 👩‍💻🚀 é"
_COPY = "Repeat the following text exactly, character for character, and nothing else:\n\n"


class ShortChat(Settings):
    """``max_tokens``: tokens asked for."""

    max_tokens: Annotated[int, Field(ge=2)] = 32


class Thinking(Settings):
    """``max_tokens``: room for an answer; one that is cut off is asked again, see :func:`answered`."""

    max_tokens: Annotated[int, Field(ge=8)] = 512


class LongPrompt(Settings):
    """``tokens`` of the prompt; below ``least`` of room it is skipped."""

    tokens: Annotated[int, Field(ge=256)] = 3000
    least: Annotated[int, Field(ge=128)] = 2000
    max_tokens: Annotated[int, Field(ge=2)] = 64


class Garbage(Settings):
    """``prompts``: names out of checks/prompts.yaml; ``max_tokens`` for each."""

    prompts: Annotated[tuple[str, ...], Field(min_length=1)] = ("quicksort", "table", "json", "reason")
    max_tokens: Annotated[int, Field(ge=8)] = 128

    @field_validator("prompts")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in names if name not in load_prompts()]
        if unknown:
            raise ValueError(f"there is no prompt {unknown[0]!r}, there are {', '.join(load_prompts())}")
        return names


class Arithmetic(Thinking):
    """``tasks``: pairs of numbers to multiply, to add and to subtract, in turn."""

    tasks: Annotated[tuple[tuple[int, int], ...], Field(min_length=1)] = ((17, 23), (456, 789), (1000, 373))


class Needle(Thinking):
    """``share`` of the room the text takes, ``tokens`` at most; ``depths``: where the sentence stands, 0..1."""

    share: Annotated[float, Field(gt=0.1, le=0.95)] = 0.9
    tokens: Annotated[int, Field(ge=256)] | None = None
    depths: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=1)] = (0.5,)
    least: Annotated[int, Field(ge=128)] = 1000


@check("short-chat", "a chat is answered with text, whole and in its words", settings=ShortChat)
def short_chat(ctx: Context, settings: ShortChat) -> CheckResult:
    """One short chat."""
    tokens = fitting(ctx, settings.max_tokens)
    answer = chat(ctx, named_prompt("hello"), max_tokens=tokens)
    wanted = ctx.target.service.served_name
    found = judge_chat(answer, max_tokens=tokens, quality=ctx.quality)
    if wanted is not None and ctx.model.name != wanted:
        found = Judgement(
            Verdict.FAIL, f"the server serves {ctx.model.name!r}, the inventory says {wanted!r}"
        )
    facts = {
        "model": ctx.model.name,
        "completion_tokens": answer.completion_tokens,
        "prompt_tokens": answer.prompt_tokens,
        "seconds": round(answer.seconds, 3),
    }
    return told(ctx, found, answers={"POST /v1/chat/completions": answer.text}, facts=facts)


@check("long-prompt", "a prompt of some thousand tokens that is in no cache is answered", settings=LongPrompt)
def long_prompt(ctx: Context, settings: LongPrompt) -> CheckResult:
    """A prefill of several thousand tokens."""
    answer_tokens = fitting(ctx, settings.max_tokens)
    room = capacity(ctx) - answer_tokens
    if room < settings.least:
        return skipped(ctx, f"{room} tokens of room, a prompt of {settings.least} is wanted at least")
    ask = "\n\nSum up the sentences above in one sentence of your own."
    wanted = min(settings.tokens, room)
    text = sized_prose(ctx, wanted, more=len(ask)) + ask
    answer = chat(ctx, text, max_tokens=answer_tokens)
    whole = judge_chat(answer, max_tokens=answer_tokens, quality=ctx.quality)
    size = judge_prompt_size(answer, min(settings.least, int(wanted * 0.6)))
    facts = {"prompt_tokens": answer.prompt_tokens, "seconds": round(answer.seconds, 3)}
    found = worst_of([whole, size], size.summary)
    return told(ctx, found, answers={"POST /v1/chat/completions": answer.text}, facts=facts)


@check("garbage", "answers to several kinds of prompts read as text", settings=Garbage)
def garbage(ctx: Context, settings: Garbage) -> CheckResult:
    """Code, a table, JSON, numbers: each is judged as text."""
    answers: list[tuple[str, Chat]] = []
    for name in settings.prompts:
        ctx.say(f"prompt {name}", len(answers) / len(settings.prompts))
        answers.append((name, chat(ctx, named_prompt(name), max_tokens=settings.max_tokens)))
    found = judge_answers(answers, quality=ctx.quality)
    return told(ctx, found, answers={f"chat: {name}": answer.text for name, answer in answers})


@check("copy", "a text is repeated verbatim", settings=Thinking)
def copy(ctx: Context, settings: Thinking) -> CheckResult:
    """Digits, quotes and signs: one wrong token is seen."""
    if not ctx.quality:
        return skipped(ctx, NONSENSE)
    answer = answered(ctx, _COPY + COPIED, max_tokens=settings.max_tokens).chat
    return told(ctx, judge_copy(COPIED, answer), answers={"POST /v1/chat/completions": answer.text})


@check("arithmetic", "sums come out right", settings=Arithmetic)
def arithmetic(ctx: Context, settings: Arithmetic) -> CheckResult:
    """Small sums, whose digits a wrong token would change."""
    if not ctx.quality:
        return skipped(ctx, NONSENSE)
    done = []
    for index, (one, other) in enumerate(settings.tasks):
        sign = "*+-"[index % 3]
        right = (one * other, one + other, one - other)[index % 3]
        asked = f"{one} {sign} {other}"
        ctx.say(asked, index / len(settings.tasks))
        prompt = f"What is {asked}? Answer with the number only."
        done.append((asked, right, answered(ctx, prompt, max_tokens=settings.max_tokens).chat))
    answers = {f"chat: {asked}": answer.text for asked, _, answer in done}
    return told(ctx, judge_arithmetic(done), answers=answers)


@check("needle", "a sentence is found again in a long text, up to the limit of the context", settings=Needle)
def needle(ctx: Context, settings: Needle) -> CheckResult:
    """A code in one sentence of a long text."""
    if not ctx.quality:
        return skipped(ctx, NONSENSE)
    room = int(capacity(ctx) * settings.share) - fitting(ctx, settings.max_tokens)
    size = room if settings.tokens is None else min(room, settings.tokens)
    if size < settings.least:
        return skipped(ctx, f"{size} tokens of room, {settings.least} are wanted at least")
    judged: list[Judgement] = []
    answers: dict[str, str | None] = {}
    for index, depth in enumerate(settings.depths):
        code = f"{4711 + 13 * index}-{['BRAVO', 'DELTA', 'TANGO', 'KILO'][index % 4]}"
        sentence = f"\nThe secret code is {code}.\n"
        ask = "\n\nWhat is the secret code? Answer with the code only."
        text = sized_prose(ctx, size, more=len(sentence) + len(ask))
        place = text.rfind("\n", 0, max(1, int(len(text) * depth)))
        place = len(text) if place < 0 else place
        ctx.say(f"{count(size, 'token')}, at {depth:.0%}", index / len(settings.depths))
        prompt = text[:place] + sentence + text[place:] + ask
        answer = answered(ctx, prompt, max_tokens=settings.max_tokens).chat
        judged.append(judge_needle(code, answer, depth=depth, least=int(size * 0.6)))
        answers[f"chat: needle at {depth:.0%} of {answer.prompt_tokens} tokens"] = answer.text
    found = worst_of(judged, "; ".join(each.summary for each in judged))
    return told(ctx, found, answers=answers)


@check("unicode", "characters of several bytes arrive whole, streamed and not", settings=Thinking)
def unicode(ctx: Context, settings: Thinking) -> CheckResult:
    """Accents, CJK, Cyrillic, Hangul, Arabic, joined emoji: their tokens end within characters."""
    tokens = fitting(ctx, settings.max_tokens)
    prompt = _COPY + UNICODE
    if ctx.quality:
        asked = answered(ctx, prompt, max_tokens=tokens)
    else:
        asked = Answered(chat(ctx, prompt, max_tokens=tokens), tokens)
    answer = asked.chat
    streamed = ctx.engine.stream_chat(
        ctx.model.name, prompt, max_tokens=asked.max_tokens, timeout=ctx.timeout, **asked.more
    )
    found = judge_unicode(UNICODE, answer, streamed, quality=ctx.quality)
    said = {"POST /v1/chat/completions": answer.text, "POST /v1/chat/completions (stream)": streamed.text}
    return told(ctx, found, answers=said)
