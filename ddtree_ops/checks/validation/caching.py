"""Checks of the prefix cache: a hit, and a flush."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from ddtree_ops.checks.engine import EngineError, Generation
from ddtree_ops.checks.validation.asking import capacity, chat, generate, prose, skipped, told
from ddtree_ops.checks.validation.base import Context, Settings, check
from ddtree_ops.checks.validation.judging import (
    ALIKE,
    Hit,
    begun_early,
    judge_flush,
    judge_prefix,
    known_before,
)
from ddtree_ops.results import CheckResult, Verdict

__all__ = ["Cached", "spelled"]

_CHAT = "/v1/chat/completions"
_ASKED = {
    "the second sentence": "Say the second sentence of this text again, word for word, and nothing else.",
    "the last line": "Say the last whole line of this text again, word for word, and nothing else.",
    "a summary": "Sum up the first three sentences of this text in one sentence.",
}


class Cached(Settings):
    """``chars`` of the prompt, about; ``max_tokens`` of the answer."""

    chars: Annotated[int, Field(ge=64)] = 1500
    max_tokens: Annotated[int, Field(ge=2)] = 48


def _prompt(
    ctx: Context, settings: Cached, what: str, ask: str = "The next sentence of this text is:", word: str = ""
) -> str:
    """A prompt that was never sent before: its first words are the run's and the check's.

    :param word: one that the tokenizer tells from others, where it does not know the run's: the beginning is spelled with it.
    """
    chars = min(settings.chars, max(64, capacity(ctx) // 2 - 80))
    begin = f"{ctx.nonce} {what}."
    return f"{spelled(begin, word) if word else begin}\n{prose(chars)[:chars]}\n\n{ask}"


def spelled(text: str, word: str) -> str:
    """32 words that hardly another text gives: ``word`` for a one and ``Note`` for a zero of its digest. Pure."""
    bits = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    return " ".join(word if bits >> place & 1 else "Note" for place in range(32))


def _facts(**answers: Generation) -> dict[str, object]:
    found: dict[str, object] = {f"cached_{name}": answer.cached_tokens for name, answer in answers.items()}
    found["prompt_tokens"] = next(iter(answers.values())).prompt_tokens
    return found


@check("prefix-hit", "the same prompt again is answered from the cache, and the same", settings=Cached)
def prefix_hit(ctx: Context, settings: Cached) -> CheckResult:
    """What comes from the cache, as ``/generate`` counts it; then three chats, each new and twice from the cache.

    Where a chat parts early it is asked anew, under another beginning: a near tie does not come back, damage does. A
    tokenizer of a few words takes all beginnings for one: there they are spelled with a word that the model has said.
    """
    if ctx.info.raw.get("disable_radix_cache"):
        return skipped(ctx, "the server runs with --disable-radix-cache")
    prompt, word = _prompt(ctx, settings, "prefix"), ""
    cold = generate(ctx, prompt, max_tokens=settings.max_tokens)
    if known_before(cold):
        word = next(iter(cold.text.split()), "")
        prompt = _prompt(ctx, settings, "prefix", word=word)
        cold = generate(ctx, prompt, max_tokens=settings.max_tokens)
    warm = generate(ctx, prompt, max_tokens=settings.max_tokens)
    hits = []
    for index, name in enumerate(_ASKED):
        ctx.say(name, index / len(_ASKED))
        hit = _hit(ctx, settings, name, "prefix", word)
        if begun_early(hit):
            hit = replace(hit, again=_hit(ctx, settings, name, "prefix anew", word))
        hits.append(hit)
    found = judge_prefix(cold, warm, hits, quality=ctx.quality)
    if found.hint == ALIKE:
        found = replace(found, hint=f"{ALIKE}: ddtree-ops restart {ctx.target.name}")
    said = {"POST /generate (new)": cold.text, "POST /generate (cached)": warm.text}
    for hit in hits:
        if hit.parted is not None:
            for one, anew in ((hit, ""), (hit.again, ", anew")):
                if one is not None:
                    said[f"POST {_CHAT} ({one.name}{anew}, new)"] = one.cold.text or ""
                    said[f"POST {_CHAT} ({one.name}{anew}, cached)"] = one.warm.text or ""
    facts = {**_facts(new=cold, again=warm), "parted_at": {hit.name: hit.parted for hit in hits}}
    return told(ctx, found, answers=said, facts=facts)


def _hit(ctx: Context, settings: Cached, name: str, what: str, word: str) -> Hit:
    """A chat asked three times: new, then twice from the cache."""
    prompt = _prompt(ctx, settings, f"{what}, {name}", _ASKED[name], word)
    cold, warm, third = (chat(ctx, prompt, max_tokens=settings.max_tokens) for _ in range(3))
    return Hit(name, cold, warm, third)


@check(
    "flush", "flush_cache empties the cache, and the answer stays the same", settings=Cached, disturbs=True
)
def flush(ctx: Context, settings: Cached) -> CheckResult:
    """A prompt new, cached, and after two flushes."""
    if ctx.info.raw.get("disable_radix_cache"):
        return skipped(ctx, "the server runs with --disable-radix-cache")
    prompt = _prompt(ctx, settings, "flush")
    before, warm = (generate(ctx, prompt, max_tokens=settings.max_tokens) for _ in range(2))
    answers = []
    said = ""
    for _ in range(2):
        try:
            said = _flush(ctx)
        except EngineError as error:
            if error.status != 400:
                raise
            return ctx.result(
                Verdict.INCONCLUSIVE,
                f"the cache was not flushed: {error.message}",
                hint="somebody else uses the engine: look again when it is idle",
            )
        answers.append(generate(ctx, prompt, max_tokens=settings.max_tokens))
    after, again = answers
    found = judge_flush(said, before, warm, after, again)
    texts = {"POST /generate (new)": before.text, "POST /generate (flushed)": after.text}
    facts = _facts(new=before, again=warm, flushed=after)
    return told(ctx, found, answers=texts, facts={**facts, "said": said})


def _flush(ctx: Context, tries: int = 5) -> str:
    """Flush; a request that has just been answered may still be counted as running for a moment."""
    for _ in range(tries - 1):
        try:
            return ctx.engine.flush_cache(timeout=ctx.timeout)
        except EngineError as error:
            if error.status != 400:
                raise
        time.sleep(0.2)
    return ctx.engine.flush_cache(timeout=ctx.timeout)
