"""Is what a server writes with speculation what the target writes alone? Pure; ``docs/losslessness.md`` has the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import comb
from typing import Any

from ddtree_ops.checks.validation.judging import Judgement
from ddtree_ops.results import Verdict
from ddtree_ops.wording import count

__all__ = [
    "DOUBT",
    "EPSILON",
    "GROSS",
    "SIGNIFICANT",
    "USUAL",
    "Answer",
    "Compared",
    "Outcome",
    "compare_answers",
    "excess",
    "first_difference",
    "judge_batch",
    "judge_single",
    "self_difference",
]

EPSILON = 0.26
"""Nats: two bfloat16 steps of 0.125 (logits of 16 to 32, each of the two moves by one), or one of 0.25 (32 to 64)."""
DOUBT = 2.0
"""Up to this many epsilon a gap decides nothing: two steps of logits from 32 to 64, whose size no answer tells."""
SIGNIFICANT = 0.01
"""Chance below which more mismatches than the baseline's own are no accident (Fisher's exact test, one-sided)."""
USUAL = 0.05
"""Chance from which on they may be one."""
GROSS = 1.0
"""Nats: a gap that no batch rounds away, as far as the baseline shows none of its own: e times as likely."""
_FEW = 2
"""Mismatches at a batch beyond the baseline's own rate that chance may explain."""
_WRONG = "no near tie explains it: serve without speculation until it is found; docs/losslessness.md says where to look"
_SHARE = 0.5
"""Of the prompts and of their tokens: what must have been compared."""
_LEAST_TOKENS = 4
"""A prompt, on the average: what must have been compared."""


@dataclass(frozen=True)
class Answer:
    """What a server wrote.

    :param ids: of the tokens, the one that ended it included where the server tells it; empty where it tells none.
    :param best: a place's best tokens with their log-probabilities (nats), best first; empty where they are not known.
    """

    ids: tuple[int, ...]
    text: str
    finish: str
    best: tuple[tuple[tuple[int, float], ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        best = [[[token, round(value, 5)] for token, value in place] for place in self.best]
        return {"ids": list(self.ids), "text": self.text, "finish": self.finish, "best": best}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Answer:
        """Read what :meth:`to_json` gave. :raises KeyError, TypeError, ValueError: it is something else."""
        best = tuple(tuple((int(token), float(value)) for token, value in place) for place in found["best"])
        return cls(tuple(int(each) for each in found["ids"]), str(found["text"]), str(found["finish"]), best)


class Outcome(StrEnum):
    """What the comparison of one answer came to."""

    EQUAL = "equal"
    NEAR_TIE = "near tie"
    DOUBTFUL = "doubtful"
    """The gap is that of rounding where logits are large, and of a mismatch where they are not."""
    MISMATCH = "mismatch"
    UNKNOWN = "unknown"
    """They differ, and the gap is not known."""
    UNSTEADY = "unsteady"
    """Equal as far as the baseline agrees with itself, which it does not to the end."""


@dataclass(frozen=True)
class Compared:
    """One answer against the baseline's.

    :param place: of the first token that differs, from 0; None where none does.
    :param expected: the baseline's token there, and ``seen`` the other's; None: it had ended.
    :param gap: nats between the two in the baseline; a least value where ``at_least``; None: not known.
    :param tokens: compared and equal, of ``of``.
    :param steady: the baseline's two answers to this prompt are equal.
    """

    prompt: str
    outcome: Outcome
    tokens: int
    of: int
    place: int | None = None
    expected: int | None = None
    seen: int | None = None
    gap: float | None = None
    at_least: bool = False
    why: str = ""
    steady: bool = True

    @property
    def gross(self) -> bool:
        """A mismatch that rounding cannot make: the gap is :data:`GROSS` or more, or may be."""
        return self.outcome is Outcome.MISMATCH and (self.gap is None or self.at_least or self.gap >= GROSS)

    def describe(self) -> str:
        """One line for a person."""
        if self.place is None:
            return f"{self.prompt}: {self.outcome}: {self.tokens} of {self.of} tokens" + (
                f" ({self.why})" if self.why else ""
            )
        gap = "gap not known" if self.gap is None else f"gap {'over ' * self.at_least}{self.gap:.3g} nats"
        tokens = f"the target says {_token(self.expected)}, speculation {_token(self.seen)}"
        why = f" ({self.why})" if self.why else ""
        return f"{self.prompt}: {self.outcome} at token {self.place}: {tokens}, {gap}{why}"


def _token(token: int | None) -> str:
    return "nothing more" if token is None else str(token)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Place of the first token that differs or is missing; None where both are equal."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def self_difference(first: Answer, second: Answer) -> int | None:
    """Where two answers of one server part: a place; 0 where only the texts are known and differ."""
    if first.ids or second.ids:
        return first_difference(first.ids, second.ids)
    return None if first.text == second.text else 0


def compare_answers(
    prompt: str, first: Answer, second: Answer, seen: Answer, *, epsilon: float = EPSILON
) -> Compared:
    """``seen`` against the two answers of the baseline, as far as these agree.

    :param epsilon: nats; a gap of less between the two tokens is a near tie, one of :data:`DOUBT` times that a mismatch.
    """
    size = len(first.ids)
    agreed = self_difference(first, second)
    steady = agreed is None

    def whole(outcome: Outcome, tokens: int, why: str = "") -> Compared:
        return Compared(prompt, outcome, tokens, size, why=why, steady=steady)

    if not first.ids or not seen.ids:
        if not steady or first.ids or seen.ids or first.text != seen.text:
            return whole(Outcome.UNKNOWN, 0, "no token ids, and the texts differ")
        if not first.text:
            return whole(Outcome.UNKNOWN, 0, "no token ids, and no text")
        return whole(Outcome.EQUAL, 0, "no token ids: texts were compared")
    place = first_difference(first.ids, seen.ids)
    if agreed is not None and (place is None or place >= agreed):
        return whole(Outcome.UNSTEADY, agreed, "the baseline does not agree with itself after them")
    if place is None:
        return whole(Outcome.EQUAL, size)
    expected = first.ids[place] if place < size else None
    other = seen.ids[place] if place < len(seen.ids) else None

    def found(outcome: Outcome, gap: float | None = None, why: str = "", at_least: bool = False) -> Compared:
        return Compared(prompt, outcome, place, size, place, expected, other, gap, at_least, why, steady)

    if expected is None or other is None:
        ended = first if expected is None else seen
        if ended.finish == "length":
            return found(Outcome.MISMATCH, why="another number of tokens for the same limit")
        return found(Outcome.UNKNOWN, why="one of them ended by something that is no token")
    best = dict(first.best[place]) if place < len(first.best) else {}
    if expected not in best:
        return found(Outcome.UNKNOWN, why="the baseline tells no log-probability there")
    if other not in best:
        bound = best[expected] - min(best.values())
        if bound >= DOUBT * epsilon:
            return found(Outcome.MISMATCH, bound, f"not among the {len(best)} best", True)
        return found(
            Outcome.UNKNOWN, why=f"not among the {len(best)} best, which lie within {bound:.3g} nats"
        )
    gap = abs(best[expected] - best[other])
    below = max(best.values()) - max(best[expected], best[other])
    widest = max(gap, below)
    if widest < epsilon:
        return found(Outcome.NEAR_TIE, gap)
    return found(Outcome.DOUBTFUL if widest < DOUBT * epsilon else Outcome.MISMATCH, gap)


def excess(many: int, of: int, own: int, own_of: int) -> float:
    """Chance of ``many`` or more mismatches of ``of``, were they as frequent as ``own`` of ``own_of`` (Fisher, one-sided)."""
    together, everything = many + own, of + own_of
    if not of or not own_of:
        return 1.0
    ways = comb(everything, together)
    tail = sum(
        comb(of, number) * comb(own_of, together - number)
        for number in range(many, min(of, together) + 1)
        if together - number <= own_of
    )
    return tail / ways


def _count(compared: Sequence[Compared], outcome: Outcome) -> int:
    return sum(each.outcome is outcome for each in compared)


def _first(compared: Sequence[Compared], outcome: Outcome) -> str:
    return next(each.describe() for each in compared if each.outcome is outcome)


def judge_single(compared: Sequence[Compared], unsteady: int) -> Judgement:
    """The pass of one request at a time.

    :param unsteady: prompts for which the baseline's two answers differ.
    """
    total = len(compared)
    if not total:
        return Judgement(Verdict.INCONCLUSIVE, "nothing was compared")
    prompts = count(total, "prompt")
    if unsteady > total * (1 - _SHARE):
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"the baseline does not agree with itself on {unsteady} of {prompts}: nothing can be held against it",
            "is the baseline alone on its engine, and is it deterministic (batch 1, cache flushed)?",
        )
    wrong, unknown = _count(compared, Outcome.MISMATCH), _count(compared, Outcome.UNKNOWN)
    ties, equal = _count(compared, Outcome.NEAR_TIE), _count(compared, Outcome.EQUAL)
    held = [each for each in compared if each.outcome is Outcome.MISMATCH and each.steady]
    if held:
        return Judgement(
            Verdict.FAIL, f"not lossless on {len(held)} of {prompts}: {held[0].describe()}", _WRONG
        )
    if wrong:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"{wrong} of {prompts} differ, all where the baseline does not agree with itself either: "
            f"{_first(compared, Outcome.MISMATCH)}",
            "make the baseline deterministic first",
        )
    if doubtful := _count(compared, Outcome.DOUBTFUL):
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"{doubtful} of {prompts} differ by a gap that is rounding only where logits are above 32: "
            f"{_first(compared, Outcome.DOUBTFUL)}",
            "does the model have such logits? Then: lossless: {epsilon: 0.52}; docs/losslessness.md has the reasons",
        )
    if unknown:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"{unknown} of {prompts} differ where the gap is not known: {_first(compared, Outcome.UNKNOWN)}",
            "record a baseline with log-probabilities: ddtree-ops validate HOST --record FILE",
        )
    if equal + ties < total * _SHARE:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"only {equal + ties} of {prompts} could be compared to their ends or a near tie",
        )
    tokens, of = sum(each.tokens for each in compared), sum(each.of for each in compared)
    if tokens < of * _SHARE:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"only {tokens} of {of} tokens were compared: near ties came too early ({ties} of {prompts})",
            "more prompts: lossless: {prompts: 17}",
        )
    if tokens < total * _LEAST_TOKENS:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"too little was compared: {count(tokens, 'token')} of {prompts}",
            "do both servers answer with output_ids, and with more than a word?",
        )
    extra = f", {count(ties, 'near tie')}" if ties else ""
    left = f", {unsteady} undecided" if unsteady else ""
    return Judgement(
        Verdict.PASS,
        f"{equal} of {prompts} equal{extra}{left}: {tokens} tokens as the target alone says them",
    )


def judge_batch(batch: int, compared: Sequence[Compared], own: Sequence[Compared]) -> Judgement:
    """The pass at a higher batch: are mismatches more frequent than the baseline's own at that batch?

    A difference at a near tie, or at a doubtful one, is none: batches round otherwise.

    :param compared: speculation at that batch against the baseline's answers alone.
    :param own: the baseline at that batch against the same.
    """

    def decided(rows: Sequence[Compared]) -> list[Compared]:
        return [each for each in rows if each.outcome not in (Outcome.UNSTEADY, Outcome.UNKNOWN)]

    mine, theirs = decided(compared), decided(own)
    if len(mine) < len(compared) * _SHARE or len(theirs) < len(own) * _SHARE or not mine or not theirs:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"batch {batch}: {len(mine)} of {len(compared)} answers could be compared, {len(theirs)} of {len(own)} of the "
            "baseline's",
        )
    tokens = sum(each.tokens for each in mine)
    wrong, usual = _count(mine, Outcome.MISMATCH), _count(theirs, Outcome.MISMATCH)
    rates = f"batch {batch}: {wrong} of {len(mine)} differ, {usual} of {len(theirs)} of the baseline's own"
    if not wrong and tokens < len(mine) * _LEAST_TOKENS:
        return Judgement(Verdict.INCONCLUSIVE, f"{rates}: too little was compared: {count(tokens, 'token')}")
    ties = _count(mine, Outcome.NEAR_TIE) + _count(mine, Outcome.DOUBTFUL)
    extra = f", {count(ties, 'near tie')}" if ties else ""
    if wrong * len(theirs) <= usual * len(mine):
        return Judgement(Verdict.PASS, rates + extra)
    chance = excess(wrong, len(mine), usual, len(theirs))
    first = _first(mine, Outcome.MISMATCH)
    if chance < SIGNIFICANT:
        return Judgement(Verdict.FAIL, f"{rates} (p {chance:.2g}): {first}", _WRONG)
    few = wrong - usual * len(mine) / len(theirs) <= _FEW
    gross = next((each for each in mine if each.gross), None)
    if chance >= USUAL and few and (gross is None or any(each.gross for each in theirs)):
        return Judgement(Verdict.PASS, f"{rates} (p {chance:.2g}, by chance){extra}")
    why = "more, and too few to tell from chance" if gross is None else "no rounding of a batch explains it"
    return Judgement(
        Verdict.INCONCLUSIVE,
        f"{rates}: {why} (p {chance:.2g}): {first if gross is None else gross.describe()}",
        "more prompts, or the same check again: ddtree-ops validate HOST --check lossless",
    )
