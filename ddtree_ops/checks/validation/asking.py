"""How checks ask: prompts that fit the model, and results from judgements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.checks.engine import Chat, EngineError, Generation
from ddtree_ops.checks.prompts import load_prompts
from ddtree_ops.checks.validation.base import Context
from ddtree_ops.checks.validation.judging import Judgement, cut_off
from ddtree_ops.results import CheckResult, Evidence, Figure, Verdict
from ddtree_ops.secret import redact

__all__ = [
    "NONSENSE",
    "NO_THOUGHTS",
    "Answered",
    "answered",
    "capacity",
    "chat",
    "excerpt",
    "fitting",
    "generate",
    "named_prompt",
    "next_of",
    "prose",
    "sized_prose",
    "skipped",
    "told",
]

_SENTENCES = (
    "The harbour office keeps a ledger of every vessel that has asked for a berth since the spring.",
    "A baker on the corner sells rye bread before seven and is closed by the time the trams run.",
    "Nobody at the archive remembers who drew the second map, though its paper is of a later kind.",
    "Rain came in from the west and the gardeners moved the seedlings under the long glass roof.",
    "Two engineers measured the bridge again because their first figures did not agree at the pier.",
    "The museum lends its smaller paintings to schools, one at a time, for a month and no longer.",
    "In the old quarter most doors are painted green, and the few blue ones belong to musicians.",
    "She wrote the recipe on the back of a railway ticket and then could not find the ticket again.",
    "Trains from the north arrive at odd minutes, which the station clock has never learned to show.",
    "The committee met for an hour, agreed on the colour of the fence, and adjourned until October.",
    "An owl has lived in the chapel tower for nine winters and is counted by the town as a resident.",
    "The library bought a lamp for each reading desk after the letters about the gloom had reached it.",
    "Fishermen dry their nets behind the school, where children learn the knots before the alphabet.",
)
NONSENSE = "a model that talks nonsense, as the inventory (health.judge_text) or --no-quality says"
"""Why a check of what a text means is skipped."""
NO_THOUGHTS: Mapping[str, Any] = {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
"""Field of a chat that asks the template for no thoughts; a template that knows neither word leaves them unread."""
_THOUGHTS = 4096
"""Tokens for a model that thinks all the same."""
_QUIET = "asked_without_thoughts"
"""Key of :attr:`Context.shared`: True once an answer was had whole without thoughts, and not with them."""
_MARGIN = 0.06
"""Of the tokens a prompt is to have: what the estimate may be wrong by."""


def capacity(ctx: Context) -> int:
    """Tokens that one request may have, prompt and answer: the context, or what the KV cache or the server allows."""
    known = [
        ctx.model.max_model_len,
        ctx.info.raw.get("max_req_input_len"),
        ctx.info.raw.get("max_total_num_tokens"),
    ]
    found = [int(each) for each in known if isinstance(each, int) and each > 0]
    return min(found, default=4096)


def fitting(ctx: Context, tokens: int) -> int:
    """``tokens``, or a third of the capacity: a request that is refused at validation leaks its id in sglang 0.5.11."""
    return max(1, min(tokens, capacity(ctx) // 3))


def chat(ctx: Context, prompt: str | Sequence[Mapping[str, Any]], *, max_tokens: int, **more: Any) -> Chat:
    """A chat with the served model, within its context."""
    return ctx.engine.chat(
        ctx.model.name, prompt, max_tokens=fitting(ctx, max_tokens), timeout=ctx.timeout, **more
    )


@dataclass(frozen=True)
class Answered:
    """An answer, and how it was asked for in the end."""

    chat: Chat
    max_tokens: int
    more: Mapping[str, Any] = field(default_factory=dict)


def answered(
    ctx: Context, prompt: str | Sequence[Mapping[str, Any]], *, max_tokens: int, **more: Any
) -> Answered:
    """A chat that is wanted up to its end: what is cut off is asked again, without thoughts, and then with more room.

    The room is what the context, the time-out and the speed that was seen allow, 4096 tokens at most. Once an answer was
    had without thoughts only, the rest of the run asks so at once.
    """
    tokens = fitting(ctx, max_tokens)
    quiet = {**more, **NO_THOUGHTS}
    begin = quiet if ctx.shared.get(_QUIET) else more
    first = chat(ctx, prompt, max_tokens=tokens, **begin)
    if cut_off(first) is None:
        return Answered(first, tokens, begin)
    if begin is not quiet:
        try:
            second = chat(ctx, prompt, max_tokens=tokens, **quiet)
        except EngineError as error:
            if error.status != 400:
                raise
        else:
            if second.finish_reason != "length":
                ctx.shared[_QUIET] = True
                return Answered(second, tokens, quiet)
    rate = first.completion_tokens / max(first.seconds, 1e-6)
    room = capacity(ctx) - first.prompt_tokens - 64
    larger = fitting(ctx, min(_THOUGHTS, room, int(rate * ctx.timeout * 0.7)))
    if larger <= tokens:
        return Answered(first, tokens, begin)
    ctx.say(f"cut off after {tokens} tokens: asked again with {larger}")
    return Answered(chat(ctx, prompt, max_tokens=larger, **begin), larger, begin)


def generate(ctx: Context, prompt: str, *, max_tokens: int, ignore_eos: bool = False) -> Generation:
    """``/generate``, within the context."""
    return ctx.engine.generate(
        prompt, max_tokens=fitting(ctx, max_tokens), timeout=ctx.timeout, ignore_eos=ignore_eos
    )


def named_prompt(name: str) -> str:
    """The text of a prompt of ``prompts.yaml``."""
    return load_prompts()[name].text


def prose(chars: int, *, begin: int = 0) -> str:
    """About ``chars`` characters of numbered sentences, no two alike; ``begin`` is the first number."""
    lines: list[str] = []
    size = 0
    number = begin
    while size < chars:
        lines.append(f"{number + 1}. {_SENTENCES[number % len(_SENTENCES)]}")
        size += len(lines[-1]) + 1
        number += 1
    return "\n".join(lines)


def _tokens_a_char(ctx: Context) -> tuple[float, float]:
    """Tokens that a chat has besides its text, and tokens a character of :func:`prose`: two requests, once a run."""
    found = ctx.shared.get("tokens_a_char")
    if found is None:
        sizes = (40, 120) if capacity(ctx) < 1024 else (300, 1200)
        seen = []
        for size in sizes:
            text = prose(size)
            seen.append((len(text), chat(ctx, text, max_tokens=1).prompt_tokens))
        (short, few), (long, many) = seen
        slope = max(0.05, (many - few) / max(1, long - short))
        found = (max(0.0, few - slope * short), slope)
        ctx.shared["tokens_a_char"] = found
    return float(found[0]), float(found[1])


def sized_prose(ctx: Context, tokens: int, *, more: int = 0) -> str:
    """Prose of about ``tokens`` tokens and no more than that, ``more`` characters of other text and the template included.

    It begins with the run's nonce, so that it is in no cache.
    """
    fixed, slope = _tokens_a_char(ctx)
    chars = int((tokens * (1 - _MARGIN) - fixed) / slope) - more - len(ctx.nonce) - 2
    text = prose(max(1, chars))
    return f"{ctx.nonce}.\n{text[: max(1, chars)]}"


def excerpt(text: str | None, size: int = 400) -> str:
    """The beginning of an answer, for evidence."""
    if text is None:
        return "(null)"
    text = redact(text)
    return text if len(text) <= size else f"{text[:size]}…"


def told(
    ctx: Context,
    judgement: Judgement,
    *,
    answers: Mapping[str, str | None] | None = None,
    evidence: Sequence[Evidence] = (),
    facts: Mapping[str, Any] | None = None,
    figures: Sequence[Figure] = (),
) -> CheckResult:
    """The result of the check under way from its judgement.

    :param answers: what the engine said, by where it was said: kept as evidence.
    """
    said = [Evidence(f"http {source}", excerpt(text)) for source, text in (answers or {}).items()]
    return ctx.result(
        judgement.verdict,
        judgement.summary,
        hint=next_of(ctx, judgement),
        facts=facts,
        evidence=(*said, *evidence),
        figures=figures,
    )


def next_of(ctx: Context, judgement: Judgement) -> str:
    """What to do about a judgement. Of text that is bad the journal holds nothing: other commands tell more. Pure."""
    if not judgement.nonsense:
        return judgement.hint
    name = ctx.target.name
    host, _, service = name.partition("/")
    patched = f"{host} --service {service}" if service else host  # a word with a slash would be a path there
    looks = [f"ddtree-ops patch check {patched}", f"ddtree-ops rollback {name}"]
    if ctx.speculative:
        looks.insert(0, f"ddtree-ops validate {name} --check lossless")
    commands = ", or ".join(looks)
    return f"{judgement.hint}: {commands}" if judgement.hint else commands


def skipped(ctx: Context, why: str) -> CheckResult:
    """The check under way does not apply."""
    return ctx.result(Verdict.SKIPPED, why)
