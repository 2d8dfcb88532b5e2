"""Judgements of the validation checks: from what was measured to a verdict and one sentence. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ddtree_ops.checks.engine import Chat, Generation, Load, Streamed
from ddtree_ops.checks.textquality import judge_text
from ddtree_ops.results import Verdict
from ddtree_ops.wording import count

__all__ = [
    "ALIKE",
    "EARLY",
    "Hit",
    "Judgement",
    "Paced",
    "Refusal",
    "answer_of",
    "begun_early",
    "cut_off",
    "difference",
    "judge_abort",
    "judge_answers",
    "judge_arithmetic",
    "judge_burst",
    "judge_chat",
    "judge_copy",
    "judge_end",
    "judge_flush",
    "judge_idle",
    "judge_kernel",
    "judge_limit",
    "judge_memory",
    "judge_needle",
    "judge_over_long",
    "judge_pace",
    "judge_prefix",
    "judge_prompt_size",
    "judge_refusal",
    "judge_silence",
    "judge_stop",
    "judge_stream",
    "judge_tool",
    "judge_unicode",
    "known_before",
    "stop_string",
    "worst_of",
]

EARLY = 16
"""Characters: two answers to the same prompt at temperature 0 that part before this never began alike; a near tie between
two tokens, which may fall either way when the same sums are made in another order, seldom comes so early."""
ALIKE = (
    "it began with a word of this run alone: does the tokenizer know too few words to tell texts apart (a tiny test model)? "
    "Then a start empties the cache; with any other model the cache gives what it does not hold"
)
"""Hint where a new prompt was in the cache."""
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
_OVER_LONG = re.compile(r"longer than the model's context length|exceeds the model's maximum context length")
_NUMBER = re.compile(r"-?\d+(?:[ ,\u202f]\d{3})*(?![\d])(?:\.0+(?!\d))?")
_BARE = re.compile(rf"^[\s*_`$#>]*({_NUMBER.pattern})[\s*_`$.]*$", re.M)
_BOLD = re.compile(
    rf"(?:\*\*|__|\\boxed\{{)(?:[^*_{{}}\n]*(?:[:=]|\bis)\s*)?({_NUMBER.pattern})[\s.]*(?:\*\*|__|\}})(?!\s*[-+*×x/=])"
)
_STATED = re.compile(
    rf"(?i)\b(?:answer|result|product|sum|difference)\b[\s*_:]*(?:is|=)?[\s*_:$]*({_NUMBER.pattern})(?!\s*[-+*×x/=])"
)
_THOUGHT = re.compile(r"<think>.*?</think>", re.S)


@dataclass(frozen=True)
class Judgement:
    """A verdict, one sentence for a person, and what to type next where it is no pass.

    :param nonsense: text is bad, which no journal tells of.
    """

    verdict: Verdict
    summary: str
    hint: str = ""
    nonsense: bool = False

    @property
    def ok(self) -> bool:
        """True for a pass only."""
        return self.verdict is Verdict.PASS


def _pass(summary: str) -> Judgement:
    return Judgement(Verdict.PASS, summary)


def _fail(summary: str, hint: str = "") -> Judgement:
    return Judgement(Verdict.FAIL, summary, hint)


def _nonsense(summary: str, hint: str = "") -> Judgement:
    return Judgement(Verdict.FAIL, summary, hint, nonsense=True)


def _unknown(summary: str, hint: str = "") -> Judgement:
    return Judgement(Verdict.INCONCLUSIVE, summary, hint)


def worst_of(judgements: Sequence[Judgement], summary: str) -> Judgement:
    """The first failure among them, else the first that is inconclusive, else a pass that says ``summary``.

    Where all were skipped: the first.
    """
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        for each in judgements:
            if each.verdict is verdict:
                return each
    if judgements and all(each.verdict is Verdict.SKIPPED for each in judgements):
        return judgements[0]
    return _pass(summary) if judgements else _unknown("nothing was judged")


def difference(one: str, other: str) -> int | None:
    """Where two texts part (characters from the beginning), None where they are equal."""
    if one == other:
        return None
    parted = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(parted, min(len(one), len(other)))


def _around(text: str, place: int) -> str:
    return repr(text[max(0, place - 12) : place + 12])


def answer_of(chat: Chat) -> str:
    """What was answered, without what was thought: the content after ``</think>``, empty while ``<think>`` is open.

    Without a reasoning parser thoughts stand in the content; many templates write ``<think>`` into the prompt, so that only
    its end is seen. Where a parser took a finished answer for thoughts, and left no content: those.
    """
    text = chat.content or ""
    if not text.strip() and chat.reasoning and chat.finish_reason == "stop":
        text = chat.reasoning
    text = _THOUGHT.sub("", text)
    return text.rpartition("</think>")[2].partition("<think>")[0].strip("\n")


def _thinks(chat: Chat) -> bool:
    """Did it end within its thoughts, as far as they are marked?"""
    if answer_of(chat).strip():
        return False
    return bool((chat.reasoning or "").strip() or "<think>" in (chat.content or ""))


def cut_off(chat: Chat) -> Judgement | None:
    """An answer that its length ended proves nothing about what is missing in it; None: it ended by itself, or is garbage."""
    if (
        chat.finish_reason != "length"
        or judge_text(chat.text, completion_tokens=chat.completion_tokens).reason
    ):
        return None
    doing = "still reasoning" if _thinks(chat) else "not at its end"
    return _unknown(
        f"it was {doing} after {count(chat.completion_tokens, 'token')}",
        "a suite of your own gives it more room: max_tokens of this check",
    )


def _sanity(text: str | None, tokens: int, quality: bool) -> str | None:
    """Why a text cannot be an answer. Without ``quality``: only where there is none at all, though tokens were made."""
    if quality:
        return judge_text(text, completion_tokens=tokens).reason
    return f"null content although {tokens} tokens were generated" if text is None and tokens else None


def judge_chat(chat: Chat, *, max_tokens: int, quality: bool) -> Judgement:
    """Is an answer whole: the tokens asked for at most, a reason for its end, and text?"""
    tokens, reason = chat.completion_tokens, chat.finish_reason
    if reason not in {"stop", "length"}:
        return _fail(f"the answer ended with finish_reason {reason!r} after {count(tokens, 'token')}")
    if tokens > max_tokens:
        return _fail(f"{tokens} tokens came, at most {max_tokens} were asked for")
    if reason == "length" and tokens != max_tokens:
        return _fail(f"{tokens} tokens came with finish_reason length, {max_tokens} were asked for")
    if tokens < 1:
        return _fail("no token came")
    if (why := _sanity(chat.text, tokens, quality)) is not None:
        return _nonsense(f"the text is not sane: {why}")
    return _pass(f"{count(tokens, 'token')} ({reason}) to a prompt of {chat.prompt_tokens}")


def judge_answers(named: Sequence[tuple[str, Chat]], *, quality: bool) -> Judgement:
    """Is each of several answers text, and not garbage? One is enough for a failure."""
    found = []
    for name, chat in named:
        why = _sanity(chat.text, chat.completion_tokens, quality)
        if why is not None:
            found.append(f"{name}: {why}")
    if found:
        return _nonsense(
            f"{len(found)} of {count(len(named), 'answer')} garbage: {found[0]}",
            "the process lives and answers nonsense",
        )
    what = "read as text" if quality else "have text (its sense was not judged)"
    return _pass(f"{count(len(named), 'answer')}, all {what}") if named else _unknown("nothing was asked")


def judge_prompt_size(chat: Chat, least: int) -> Judgement:
    """Was the prompt as long as it had to be?"""
    if chat.prompt_tokens < least:
        return _unknown(f"the prompt had {chat.prompt_tokens} tokens, {least} were wanted at least")
    return _pass(f"a prompt of {chat.prompt_tokens} tokens was answered with {chat.completion_tokens}")


@dataclass(frozen=True)
class Hit:
    """One prompt three times: new, and twice more, when it comes from the cache; ``name`` is what it asks for.

    :param again: the same with another beginning, asked where the first three answers parted early; None: not asked.
    """

    name: str
    cold: Chat
    warm: Chat
    third: Chat
    again: Hit | None = None

    @property
    def parted(self) -> int | None:
        """Where the answers from the cache part from the first one (characters), the nearer of the two; None: nowhere."""
        cold = self.cold.text or ""
        places = [difference(cold, each.text or "") for each in (self.warm, self.third)]
        return min((place for place in places if place is not None), default=None)

    def told(self) -> str:
        """How the answers part."""
        place, cold = self.parted or 0, self.cold.text or ""
        other = next(text for each in (self.warm, self.third) if (text := each.text or "") != cold)
        return (
            f"another answer from character {place} on ({self.name}): {_around(cold, place)} without the cache, "
            f"{_around(other, place)} with it"
        )


def begun_early(hit: Hit) -> bool:
    """Do the answers part before :data:`EARLY`?"""
    return hit.parted is not None and hit.parted < EARLY


def known_before(cold: Generation) -> bool:
    """Did most of a prompt that ought to be new come from the cache?"""
    return cold.cached_tokens >= cold.prompt_tokens / 2


def judge_prefix(cold: Generation, warm: Generation, hits: Sequence[Hit], *, quality: bool) -> Judgement:
    """Is the same prompt answered from the cache, and answered the same?

    One answer may part at a near tie of two tokens, even at its begin: a cached prefix sums in another order. Damage does
    not depend on one prompt: it is told by an early difference that comes back when the prompt is asked anew, or by early
    differences in most prompts.

    :param cold: ``/generate``, with nothing in the cache, which tells how much came from there; ``warm``: the second time.
    :param hits: chats, whose answers are compared.
    """
    if known_before(cold):
        return _unknown(
            f"{cold.cached_tokens} of {cold.prompt_tokens} tokens of a new prompt came from the cache: it was not new",
            ALIKE,
        )
    if warm.cached_tokens <= cold.cached_tokens or warm.cached_tokens < 1:
        return _fail(
            f"the same prompt again: {warm.cached_tokens} of {warm.prompt_tokens} tokens came from the cache: "
            "prefix caching does not work",
            "is the KV cache too small for one prompt (max_total_num_tokens), or the cache switched off?",
        )
    hit = f"{warm.cached_tokens} of {warm.prompt_tokens} tokens from the cache"
    said: list[tuple[str, Generation | Chat]] = [("first answer", cold), ("second answer", warm)]
    for each in hits:
        for one in (each, *([each.again] if each.again else [])):
            asked = (("first", one.cold), ("second", one.warm), ("third", one.third))
            said += [(f"{number} answer ({one.name})", answer) for number, answer in asked]
    for which, answer in said:
        if (why := _sanity(answer.text, answer.completion_tokens, quality)) is not None:
            if which.startswith("first"):
                return _nonsense(f"the {which}, without the cache, is not sane: {why}")
            return _nonsense(f"{hit}, and the {which} is not sane, though the first was: {why}")
    if not hits:
        return _unknown(f"{hit}, and no answers were compared")
    other = [each for each in hits if each.parted is not None]
    if not other:
        return _pass(f"{hit}, the same answers to {count(len(hits), 'prompt')}")
    early = [each for each in other if begun_early(each)]
    repeated = [each for each in early if each.again is not None and begun_early(each.again)]
    look = "is the cache damaged? compare with the same prompts on a server without speculation: the check lossless"
    if repeated:
        return _fail(f"{hit}, and {repeated[0].told()}; asked anew it parts early again", look)
    most = len(hits) // 2 + 1
    if len(hits) > 1 and len(early) >= most:
        return _fail(
            f"{hit}, and {early[0].told()}; {len(early)} of {count(len(hits), 'prompt')} part so early", look
        )
    if len(other) >= most:
        return _unknown(
            f"{hit}, and {len(other)} of {count(len(hits), 'prompt')} are answered otherwise: {other[0].told()}",
            "near ties of two tokens, or a damaged cache: the check lossless tells them apart",
        )
    note = " (not when asked anew)" if early else ""
    return _pass(
        f"{hit}, the same answers to {len(hits) - len(other)} of {count(len(hits), 'prompt')}; once {other[0].told()}"
        f"{note}: a near tie"
    )


def judge_flush(
    said: str, before: Generation, warm: Generation, after: Generation, again: Generation
) -> Judgement:
    """Was the cache empty after a flush, and the prompt answered as it was before?

    :param before: cold; ``warm``: the same again; ``after``: after the flush; ``again``: after one more.
    """
    if warm.cached_tokens < 1:
        return _unknown("nothing was in the cache before the flush: the check prefix-hit judges that")
    for answer in (after, again):
        if answer.cached_tokens >= max(1, warm.cached_tokens // 2):
            return _fail(
                f"flush_cache said {said.splitlines()[0]!r}, and {answer.cached_tokens} of {answer.prompt_tokens} "
                "tokens came from the cache after it"
            )
    place = difference(before.text, after.text)
    if place is None:
        return _pass(f"{warm.cached_tokens} tokens were cached before it, none after it, the same answer")
    where = f"{_around(before.text, place)} before, {_around(after.text, place)} after"
    if after.text != again.text:
        return _unknown(f"the engine does not repeat itself with an empty cache either: {where}")
    return _fail(f"the same prompt with an empty cache is answered otherwise after a flush: {where}")


def judge_burst(
    width: int, answers: Sequence[Chat | str], alone: Sequence[str | None], *, max_tokens: int, quality: bool
) -> Judgement:
    """Were all of ``width`` requests at once answered, each with its own answer?

    An answer that differs from that of a lone request is noted only: kernels sum in another order at another batch size.

    :param answers: an answer, or why there is none; ``alone``: what the same prompts were answered alone, where known.
    """
    failed = [each for each in answers if isinstance(each, str)]
    if failed:
        return _fail(f"{width} at once: {len(failed)} were not answered: {failed[0]}")
    chats = [each for each in answers if not isinstance(each, str)]
    if len(chats) != width:
        return _fail(f"{width} at once: {len(chats)} answers came")
    for index, chat in enumerate(chats):
        found = judge_chat(chat, max_tokens=max_tokens, quality=quality)
        if not found.ok:
            return replace(found, summary=f"{width} at once: answer {index + 1}: {found.summary}")
    for index, (chat, own) in enumerate(zip(chats, alone, strict=False)):
        for other, text in enumerate(alone):
            if own is not None and text is not None and chat.text == text and text != own:
                return _fail(
                    f"{width} at once: request {index + 1} was given the answer of request {other + 1}: answers are mixed up"
                )
    known = [(chat.text, text) for chat, text in zip(chats, alone, strict=False) if text is not None]
    other = sum(1 for together, text in known if together != text)
    note = f", {other} of {len(known)} other than alone" if other else ""
    return _pass(f"{width} at once, all answered{note}")


def judge_limit(limit: int, chat: Chat, generation: Generation, *, ids: bool = True) -> Judgement:
    """Came exactly ``limit`` tokens, as ``/v1/chat/completions`` and ``/generate`` count them?"""
    for path, tokens, reason in (
        ("chat", chat.completion_tokens, chat.finish_reason),
        ("/generate", generation.completion_tokens, generation.finish_reason),
    ):
        if tokens != limit:
            return _fail(f"max_tokens {limit}: {path} made {count(tokens, 'token')} ({reason})")
        if reason != "length":
            return _fail(f"max_tokens {limit}: {path} ended with finish_reason {reason!r}, not length")
    if ids and len(generation.output_ids) != limit:
        return _fail(
            f"max_tokens {limit}: /generate returned {count(len(generation.output_ids), 'token id')}"
        )
    return _pass(f"exactly {count(limit, 'token')}")


def judge_stream(whole: Chat, streamed: Streamed, whole_again: Chat) -> Judgement:
    """Is a streamed answer that of a request which is not streamed?

    :param whole: not streamed, asked before; ``whole_again``: asked after it.
    """
    if not streamed.done:
        return _fail("the stream ended without [DONE]")
    if streamed.finish_reason is None:
        return _fail("the stream ended without a finish_reason")
    if not streamed.deltas and (whole.text or ""):
        return _fail("the stream brought no text")
    texts = {"before": whole.text or "", "after": whole_again.text or ""}
    if streamed.text not in texts.values():
        place = difference(texts["before"], streamed.text) or 0
        where = f"from character {place} on: {_around(streamed.text, place)}, not {_around(texts['before'], place)}"
        if texts["before"] != texts["after"] and place >= EARLY:
            return _unknown(f"the engine does not repeat itself, streamed or not: it differs {where}")
        return _fail(f"the stream differs {where}")
    same = whole if streamed.text == texts["before"] else whole_again
    if streamed.finish_reason != same.finish_reason:
        return _fail(f"finish_reason is {streamed.finish_reason!r} streamed, {same.finish_reason!r} whole")
    if streamed.completion_tokens is None:
        return _fail("the stream brought no usage, though it was asked for")
    if (streamed.completion_tokens, streamed.prompt_tokens) != (same.completion_tokens, same.prompt_tokens):
        return _fail(
            f"usage is {streamed.prompt_tokens} and {streamed.completion_tokens} tokens streamed, "
            f"{same.prompt_tokens} and {same.completion_tokens} whole"
        )
    if len(streamed.deltas) == 1 and same.completion_tokens >= 32:
        return _unknown(f"{same.completion_tokens} tokens came in one piece: that is no stream")
    pieces = count(len(streamed.deltas), "piece")
    return _pass(f"{count(same.completion_tokens, 'token')} in {pieces}, equal to the whole answer")


def stop_string(text: str, *, length: int = 4) -> str | None:
    """A part of ``text`` to stop at: it begins about the middle, and stands nowhere before. None where there is none."""
    middle = len(text) // 2
    for begin in (*range(middle, len(text) - length + 1), *range(middle - 1, 0, -1)):
        part = text[begin : begin + length]
        if text.find(part) == begin and part.strip() == part and "\ufffd" not in text[: begin + length]:
            return part
    return None


def judge_stop(free: str, word: str, stopped: Chat) -> Judgement:
    """Was the answer cut before the stop string?

    :param free: the answer without a stop string; ``word`` stands in it.
    """
    text, wanted = stopped.reasoning or stopped.content or "", free[: free.find(word)]
    if word in text:
        return _fail(f"stop string {word!r} stands in the answer: {_around(text, text.find(word))}")
    if stopped.finish_reason != "stop":
        if free.startswith(text) or difference(free, text) == len(free):
            return _fail(f"finish_reason is {stopped.finish_reason!r} where stop string {word!r} ended it")
        return _unknown(
            f"the answer never came to the stop string {word!r}: the engine does not repeat itself"
        )
    if text == wanted or (stopped.reasoning and text == wanted.strip()):
        return _pass(f"cut before {word!r} after {len(text)} characters")
    if free.startswith(text):
        return _fail(f"cut too early: {len(text)} characters, stop string {word!r} comes after {len(wanted)}")
    if (difference(free, text) or 0) < EARLY:
        return _fail(f"with a stop string the answer is another one: {text[:24]!r}, not {wanted[:24]!r}")
    return _unknown(f"stopped, but with another text before {word!r}: the engine does not repeat itself")


def judge_end(chat: Chat, *, max_tokens: int) -> Judgement:
    """Does an answer that must be short end by itself?"""
    if chat.finish_reason == "stop" and 0 < chat.completion_tokens < max_tokens:
        return _pass(f"ended by itself after {count(chat.completion_tokens, 'token')}")
    if chat.finish_reason == "stop":
        return _fail(f"finish_reason is stop after {chat.completion_tokens} of {max_tokens} tokens")
    if _thinks(chat) and (early := cut_off(chat)) is not None:
        return early
    return _fail(
        f"a one-sentence answer went on for {chat.completion_tokens} tokens ({chat.finish_reason}): "
        "the end-of-text token is not made or not seen"
    )


def judge_copy(wanted: str, chat: Chat) -> Judgement:
    """Does the answer hold a given text, every character of it?"""
    said = answer_of(chat)
    if wanted in said:
        return _pass(f"{len(wanted)} characters, verbatim")
    if (early := cut_off(chat)) is not None:
        return early
    begin = said.find(wanted[:8])
    shown = said[begin:] if begin >= 0 else said.strip()
    place = difference(wanted, shown) or 0
    return _nonsense(
        f"not verbatim from character {place} on: {_around(shown, place)}, not {_around(wanted, place)}"
    )


def _numbers(texts: Sequence[str]) -> list[int]:
    return [int(re.sub(r"[^\d-]", "", re.sub(r"\.0+$", "", text))) for text in texts]


def _result_in(asked: str, text: str, right: int) -> tuple[bool, int | None]:
    """Is ``right`` what a text gives as the result, and what does it give?

    Results that are stated as such decide, the first and the last of them: a line that is a number, a number in bold or a
    box, "the answer is". Without one: the first number of the text after the question said again, or the last one. Steps of
    the calculation may stand in between.
    """
    text = text.replace("\u2212", "-").replace("{,}", ",")
    stated = sorted(
        (match.start(1), match[1]) for form in (_BARE, _BOLD, _STATED) for match in form.finditer(text)
    )
    question = _numbers(re.findall(r"\d+", asked))
    given = [
        each for each in _numbers([text for _, text in stated]) if each == right or abs(each) not in question
    ]
    if given:
        return right in (given[0], given[-1]), given[0]
    numbers = _numbers(_NUMBER.findall(text))
    if [abs(each) for each in numbers[: len(question)]] == question:
        numbers = numbers[len(question) :]
    if not numbers:
        return False, None
    return right in (numbers[0], numbers[-1]), numbers[-1]


def judge_arithmetic(tasks: Sequence[tuple[str, int, Chat]]) -> Judgement:
    """Is the result in every answer the right one?

    :param tasks: what was asked, the right result, and the answer.
    """
    wrong, early = [], []
    for asked, right, chat in tasks:
        fits, said = _result_in(asked, answer_of(chat), right)
        if fits:
            continue
        if (cut := cut_off(chat)) is not None:
            early.append(cut)
            continue
        wrong.append(
            f"{asked} = {right}, and it said {said if said is not None else repr((chat.text or '')[:40])}"
        )
    if wrong:
        return _nonsense(f"{len(wrong)} of {count(len(tasks), 'task')} wrong: {wrong[0]}")
    if early:
        return early[0]
    return _pass(f"{count(len(tasks), 'task')}, all right") if tasks else _unknown("nothing was asked")


def judge_needle(code: str, chat: Chat, *, depth: float, least: int) -> Judgement:
    """Was a sentence found again in a long text?"""
    where = f"at {depth:.0%} of {chat.prompt_tokens} tokens"
    if code in (chat.text or ""):
        if chat.prompt_tokens < least:
            return _unknown(f"found {where}, and {least} tokens were wanted at least")
        return _pass(f"found {where}")
    return cut_off(chat) or _nonsense(f"not found {where}: it said {answer_of(chat)[:60]!r}, not {code!r}")


@dataclass(frozen=True)
class Refusal:
    """A request that the engine may have to refuse, and what it answered.

    :param what: ``logprobs`` or ``grammar``; ``body``: the answer's text, parsed where it is JSON.
    """

    what: str
    status: int
    message: str
    body: Any = None


_REFUSED = {
    "logprobs": re.compile(r"(DFLASH|DDTREE) speculative decoding does not support return_logprob"),
    "grammar": re.compile(r"(DFLASH|DDTREE) speculative decoding does not support grammar-constrained"),
}


def judge_refusal(refusal: Refusal, *, algorithm: str | None, grammar_backend: str | None) -> Judgement:
    """Is a request that speculation cannot serve refused in words, and served without speculation?

    :param algorithm: what the server runs with; None without speculation.
    """
    what, status = refusal.what, refusal.status
    if algorithm in {"DFLASH", "DDTREE"}:
        if status == 200:
            return _fail(
                f"{what}: answered with 200, though {algorithm} does not support it: is it served wrongly?"
            )
        if status != 400:
            return _fail(f"{what}: answered with {status}, not refused with 400: {refusal.message[:120]}")
        if not _REFUSED[what].search(refusal.message):
            return _fail(f"{what}: refused with 400 in other words: {refusal.message[:120]}")
        return _pass(f"{what} refused with 400")
    if what == "grammar" and grammar_backend == "none":
        if status == 400:
            return Judgement(Verdict.SKIPPED, "grammar: the server runs with --grammar-backend none")
        return _fail(f"grammar: answered with {status}, though the server has no grammar backend")
    if status != 200:
        return _fail(f"{what}: answered with {status} without speculation: {refusal.message[:120]}")
    held, ended = False, ""
    try:
        choice = refusal.body["choices"][0]
        ended = str(choice.get("finish_reason"))
        if what == "logprobs":
            held = bool(choice["logprobs"]["content"])
        else:
            said = _THOUGHT.sub("", choice["message"]["content"]).rpartition("</think>")[2]
            held = isinstance(json.loads(said), dict)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        held = False
    if not held and what == "grammar" and ended == "length":
        return _unknown(
            "grammar: the answer was cut off before its JSON was at its end",
            "a model that reasons at length, or blank lines without an end: read the answer in the report",
        )
    if not held:
        wanted = "log probabilities" if what == "logprobs" else "JSON as the schema wants it"
        return _fail(f"{what}: answered with 200, but without {wanted}")
    return _pass(f"{what} served")


def judge_tool(chat: Chat, *, name: str, argument: str) -> Judgement:
    """Was the tool called, with arguments that are JSON?"""
    if not chat.tool_calls:
        return cut_off(chat) or _fail(f"no tool was called: it said {(chat.content or '')[:60]!r}")
    function = chat.tool_calls[0].get("function") or {}
    if function.get("name") != name:
        return _fail(f"tool {function.get('name')!r} was called, not {name!r}")
    try:
        arguments = json.loads(function.get("arguments") or "")
    except ValueError:
        return _fail(f"the arguments are not JSON: {str(function.get('arguments'))[:60]!r}")
    if not isinstance(arguments, Mapping) or argument not in arguments:
        return _fail(f"argument {argument!r} is missing: {str(arguments)[:60]}")
    if chat.finish_reason != "tool_calls":
        return _fail(f"finish_reason is {chat.finish_reason!r}, not tool_calls")
    return _pass(f"{name}({function['arguments']})")


def _held(load: Load) -> int:
    return load.running + load.waiting


def judge_abort(
    loads: Sequence[Load | None], *, before: Sequence[Load | None] = (), enough: bool, patience: float
) -> Judgement:
    """Did a request end when its client hung up?

    :param loads: what was seen until no more ran than before, or until ``patience`` seconds were over.
    :param before: what was seen before the request began: requests of others, which do not count.
    :param enough: the request would have run for longer than that.
    """
    seen = [_held(load) for load in loads if load is not None]
    if not seen:
        return _unknown("the server does not say how many requests run (GET /get_load)")
    others = [_held(load) for load in before if load is not None] or [0]
    theirs, left = others[-1], seen[-1]
    restless = len(set(others)) > 1 or len(set(seen)) > 1 or left > theirs + 1
    hint = "look again when nobody else uses it"
    if left > theirs:
        if restless:
            return _unknown(
                f"{count(left, 'request')} ran {patience:g} s after the client hung up: others come and go",
                hint,
            )
        among = f" besides {theirs} of others" if theirs else ""
        return _fail(f"1 request still ran {patience:g} s after the client hung up{among}")
    if 0 < left < theirs or (theirs and left and len(set(others)) > 1):
        return _unknown(
            f"{count(left, 'request')} of others: they come and go, and ours is not told apart", hint
        )
    if not enough:
        return _unknown("nothing runs, but the request may have ended by itself: it was too short to tell")
    others_on = f", {left} of others ran on" if left else ""
    return _pass(f"it ended when its client hung up, and the next request was answered{others_on}")


def judge_over_long(status: int, message: str, *, context: int) -> Judgement:
    """Is an input longer than the context refused, in sglang's words?"""
    if status == 400 and _OVER_LONG.search(message):
        left = "0.5.11 never takes it off its count: the next stop waits out TimeoutStopSec"
        return _pass(f"refused with 400: {message[:120].rstrip('.')}; {left}")
    if status == 400:
        return _fail(f"refused with 400 in other words: {message[:120]}")
    return _fail(
        f"an input longer than the context of {context} tokens was answered with {status}: {message[:120]}"
    )


def judge_unicode(wanted: str, whole: Chat, streamed: Streamed, *, quality: bool) -> Judgement:
    """Do characters of several bytes arrive whole, streamed or not?"""
    for name, text in (("the answer", whole.text or ""), ("the stream", streamed.text)):
        if quality and "\ufffd" in text.rstrip("\ufffd"):
            return _nonsense(f"{name} holds U+FFFD: {_around(text, text.index(chr(0xFFFD)))}")
        if any("\ud800" <= char <= "\udfff" for char in text):
            return _nonsense(f"{name} holds half a character (a surrogate)")
    if not quality:
        return _pass(
            "an answer to a prompt of many scripts came, streamed and whole (its sense was not judged)"
        )
    for chat in (whole, _as_chat(streamed)):
        if wanted not in answer_of(chat):
            return judge_copy(wanted, chat)
    return _pass(f"{len(wanted)} characters of several bytes, verbatim, streamed and whole")


def _as_chat(streamed: Streamed) -> Chat:
    tokens = streamed.completion_tokens or 0
    return Chat("", streamed.content, streamed.reasoning or None, str(streamed.finish_reason), 0, tokens, 0.0)


@dataclass(frozen=True)
class Paced:
    """One request of a long run.

    :param at: seconds since the run began; ``tokens`` came within ``seconds``.
    """

    at: float
    seconds: float
    tokens: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def judge_pace(
    paced: Sequence[Paced],
    health: Sequence[int | None],
    *,
    least_share: float,
    loads: Sequence[Load | None] = (),
) -> Judgement:
    """Is the engine as fast at the end of a run as it was at its beginning, and healthy all along?

    :param health: what ``/health`` answered on the way; None: nothing listened.
    :param least_share: median rate of the last third over that of the first third.
    :param loads: what the scheduler held when no request of ours ran: others, who slow ours down.
    """
    ill = [status for status in health if status != 200]
    if ill:
        kinds = ", ".join(sorted({str(status or "nothing") for status in ill}))
        return _fail(f"/health was not 200 in {len(ill)} of {len(health)} looks ({kinds}): it flaps")
    if not health:
        return _unknown("/health was never looked at")
    third = len(paced) // 3
    if third < 2:
        return _unknown(f"{count(len(paced), 'request')} are too few to compare a beginning with an end")
    first = median(each.rate for each in paced[:third])
    last = median(each.rate for each in paced[-third:])
    share = last / first if first else 0.0
    rates = f"{first:.0f} tokens/s at the beginning, {last:.0f} at the end"
    busy = sum(1 for load in loads if load is not None and _held(load))
    if share < least_share and busy:
        return _unknown(
            f"{rates} ({share:.0%}), but others used it in {busy} of {count(len(loads), 'look')}",
            "look again when nobody else uses it",
        )
    if share < least_share:
        return _fail(f"it slows down: {rates} of {count(len(paced), 'request')} ({share:.0%})")
    return _pass(f"{count(len(paced), 'request')}: {rates}")


def judge_silence(*, answers: bool, load: Load | None) -> str:
    """What a request that got no answer means: the scheduler is hung, or busy.

    :param answers: it answered ``/server_info`` or ``/get_load`` after that.
    """
    if not answers:
        return "hung: the scheduler does not answer /server_info either"
    if load is not None and (load.running or load.waiting):
        return f"the scheduler answers, with {load.running} running and {load.waiting} waiting: busy, or this one is stuck"
    return "the scheduler answers, and holds no request: the answer was lost on its way"


def judge_idle(loads: Sequence[Load | None], *, patience: float) -> Judgement:
    """Is every KV slot given back when nothing runs?

    :param loads: what was seen until nothing was held, or until ``patience`` seconds were over.
    """
    seen = [load for load in loads if load is not None]
    if not seen:
        return _unknown("the server does not say what it holds (GET /get_load)")
    last = seen[-1]
    if last.running or last.waiting:
        return _unknown(
            f"{last.running} running and {last.waiting} waiting {patience:g} s after our last request",
            "somebody else uses it, or a request of ours never ended: look again when it should be idle",
        )
    if last.used_tokens:
        return _fail(
            f"{count(last.used_tokens, 'KV token')} held by no request: they leak",
            "how often must this run until the cache is full? a restart gives them back",
        )
    return _pass("no KV token is held by an idle engine")


def judge_memory(samples: Sequence[int], *, allowed: int) -> Judgement:
    """Did the memory of the unit's processes stay as it was?

    Memory grows with the first requests and levels out: what counts is the growth from the first sample, which was taken
    after the first check, to the last. Growth of which less than a quarter lies in the second half of the run is such a
    levelling out (four samples at least).

    :param samples: bytes, one after every check.
    :param allowed: bytes.
    """
    if len(samples) < 2:
        return _unknown("the memory of the unit was not seen twice")
    grown = samples[-1] - samples[0]
    shown = f"{samples[0] / 2**20:.0f} MiB to {samples[-1] / 2**20:.0f} MiB"
    if grown <= allowed:
        return _pass(f"host memory of the unit: {shown}")
    late = samples[-1] - samples[len(samples) // 2]
    if len(samples) >= 4 and late < grown / 4:
        return _pass(f"host memory of the unit: {shown}, in one step at the beginning")
    return _fail(f"host memory of the unit grew from {shown}, more than {allowed / 2**20:.0f} MiB")


def judge_kernel(messages: Sequence[str], *, readable: bool, container: bool) -> Judgement:
    """Did the kernel report a failure of a GPU?

    :param messages: of the kernel, since the run began; ``readable``: there are messages of it at all.
    """
    found = [match for message in messages if (match := _XID.search(message))]
    if found:
        return _fail(
            f"Xid {found[0][2]} on GPU {found[0][1]} during the run"
            + (f", {len(found)} in all" if found[1:] else ""),
            "look it up in NVIDIA's list of Xid errors; 48, 63, 64, 74, 79, 94 and 95 are the hardware's",
        )
    if readable:
        return _pass(f"no Xid in {count(len(messages), 'message')} of the kernel since the run began")
    if container:
        return Judgement(Verdict.SKIPPED, "a container: the kernel's log is on its host")
    return _unknown("no message of the kernel can be read", "may we read the system journal there?")
