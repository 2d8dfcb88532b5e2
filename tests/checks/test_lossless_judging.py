"""The rule of the check ``lossless``: golden cases of answers, and what they come to."""

from __future__ import annotations

import pytest

from ddtree_ops.checks.engine import Generation
from ddtree_ops.checks.validation.golden import answer_of
from ddtree_ops.checks.validation.lossless_judging import (
    EPSILON,
    GROSS,
    Answer,
    Compared,
    Outcome,
    compare_answers,
    excess,
    first_difference,
    judge_batch,
    judge_single,
    self_difference,
)
from ddtree_ops.results import Verdict

PASS, FAIL, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE
STEP = 0.0625


def best(*rows: tuple[float, int]) -> tuple[tuple[int, float], ...]:
    return tuple((token, value) for value, token in rows)


# the target says 1 2 3 4: token 2 has a runner-up one bfloat16 step behind, the others have none near
PLACES = (
    best((-0.1, 1), (-3.0, 9)),
    best((-0.7, 2), (-0.7 - STEP, 8), (-4.0, 7)),
    best((-0.1, 3), (-2.5, 9)),
    best((-0.2, 4), (-1.9, 9)),
)
FIRST = Answer((1, 2, 3, 4), "abcd", "length", PLACES)


def answer(*ids: int, finish: str = "length", text: str = "") -> Answer:
    return Answer(ids, text, finish)


@pytest.mark.parametrize(
    ("seen", "outcome", "place", "gap"),
    [
        pytest.param(answer(1, 2, 3, 4), Outcome.EQUAL, None, None, id="equal"),
        pytest.param(answer(1, 8, 5, 5), Outcome.NEAR_TIE, 1, STEP, id="one-step"),
        pytest.param(answer(1, 7, 3, 4), Outcome.MISMATCH, 1, 3.3, id="third-best"),
        pytest.param(answer(9, 2, 3, 4), Outcome.MISMATCH, 0, 2.9, id="first-token"),
        pytest.param(answer(1, 2, 3, 9), Outcome.MISMATCH, 3, 1.7, id="last-token"),
        pytest.param(answer(1, 2, 6, 4), Outcome.MISMATCH, 2, 2.4, id="not-among-the-best"),
        pytest.param(answer(1, 2, 3), Outcome.MISMATCH, 3, None, id="one-too-few"),
        pytest.param(answer(1, 2, 3, 4, 5), Outcome.MISMATCH, 4, None, id="one-too-many"),
        pytest.param(answer(1, 2, 3, finish="stop"), Outcome.UNKNOWN, 3, None, id="a-stop-that-is-no-token"),
        pytest.param(answer(), Outcome.UNKNOWN, None, None, id="no-ids"),
    ],
)
def test_an_answer_against_a_steady_baseline(
    seen: Answer, outcome: Outcome, place: int | None, gap: float | None
) -> None:
    found = compare_answers("p", FIRST, FIRST, seen)
    assert (found.outcome, found.place) == (outcome, place)
    assert found.gap == (None if gap is None else pytest.approx(gap))
    assert found.of == 4
    assert found.tokens == (4 if outcome is Outcome.EQUAL else place or 0)


@pytest.mark.parametrize(
    ("gap", "more", "outcome"),
    [
        (0.25, {}, Outcome.NEAR_TIE),  # one step of a logit above 32, or one of each logit below
        (EPSILON, {}, Outcome.DOUBTFUL),
        (0.5, {}, Outcome.DOUBTFUL),  # one step of each of two logits above 32
        (2 * EPSILON, {}, Outcome.MISMATCH),
        (0.3, {"epsilon": 0.52}, Outcome.NEAR_TIE),
        (0.05, {"epsilon": 0.001}, Outcome.MISMATCH),
        (0.0015, {"epsilon": 0.001}, Outcome.DOUBTFUL),
    ],
)
def test_the_borders_of_a_near_tie(gap: float, more: dict[str, float], outcome: Outcome) -> None:
    near = Answer((1,), "a", "length", (best((0.0, 1), (-gap, 2)),))
    assert compare_answers("p", near, near, answer(2), **more).outcome is outcome
    below = Answer((1,), "a", "length", (best((0.0, 5), (-gap, 1), (-gap, 2)),))
    assert compare_answers("p", below, below, answer(2), **more).outcome is outcome, "both below the best"


@pytest.mark.parametrize(("last", "outcome"), [(0.51, Outcome.UNKNOWN), (0.53, Outcome.MISMATCH)])
def test_the_border_of_a_token_that_is_not_among_the_best(last: float, outcome: Outcome) -> None:
    listed = Answer((1,), "a", "length", (best((0.0, 1), (-0.1, 2), (-last, 3)),))
    assert compare_answers("p", listed, listed, answer(9)).outcome is outcome


def test_the_token_that_ended_an_answer_is_compared() -> None:
    """Without it an answer that ends early would be one that only breaks off."""

    def said(*ids: int, matched: int) -> Answer:
        meta = {
            "finish_reason": {"type": "stop", "matched": matched},
            "output_top_logprobs": [[[0.0, place, None], [-3.0, 99, None]] for place in (4, 5, 6, 7)],
        }
        return answer_of(Generation("t", "stop", len(ids), 0.1, output_ids=ids, meta=meta))

    alone = said(4, 5, 6, matched=7)
    assert compare_answers("p", alone, alone, said(4, 5, 6, matched=7)).tokens == 4
    early = compare_answers("p", alone, alone, said(4, 5, matched=99))
    assert (early.outcome, early.place, early.seen, early.gap) == (
        Outcome.MISMATCH,
        2,
        99,
        pytest.approx(3.0),
    )


def test_two_tokens_close_to_each_other_and_far_from_the_best_are_no_near_tie() -> None:
    """The baseline itself said a token that was not its best: something else is wrong."""
    odd = Answer((1,), "a", "length", (best((0.0, 5), (-3.0, 1), (-3.01, 2)),))
    assert compare_answers("p", odd, odd, answer(2)).outcome is Outcome.MISMATCH


@pytest.mark.parametrize("places", [(), (best(),), (best((-0.1, 7), (-0.2, 6)),)])
def test_a_gap_that_is_not_known_is_never_a_near_tie(
    places: tuple[tuple[tuple[int, float], ...], ...],
) -> None:
    blind = Answer((1, 2), "ab", "length", places)
    found = compare_answers("p", blind, blind, answer(9, 2))
    assert (found.outcome, found.gap) == (Outcome.UNKNOWN, None)


def test_a_token_outside_a_short_list_of_equals_is_unknown() -> None:
    flat = Answer((1,), "a", "length", (best((-1.0, 1), (-1.01, 2)),))
    assert compare_answers("p", flat, flat, answer(3)).outcome is Outcome.UNKNOWN


def test_where_the_baseline_parts_from_itself_nothing_is_held_against_it() -> None:
    second = answer(1, 2, 9, 9)
    assert self_difference(FIRST, second) == 2
    for seen in (answer(1, 2, 3, 4), answer(1, 2, 9, 9), answer(1, 2, 7, 7)):
        found = compare_answers("p", FIRST, second, seen)
        assert (found.outcome, found.tokens) == (Outcome.UNSTEADY, 2)


def test_before_that_equality_is_required() -> None:
    found = compare_answers("p", FIRST, answer(1, 2, 9, 9), answer(9, 2, 3, 4))
    assert (found.outcome, found.place) == (Outcome.MISMATCH, 0)
    near = compare_answers("p", FIRST, answer(1, 2, 9, 9), answer(1, 8, 3, 4))
    assert near.outcome is Outcome.NEAR_TIE


def test_texts_prove_only_equality() -> None:
    plain = Answer((), "text", "stop")
    assert compare_answers("p", plain, plain, Answer((), "text", "stop")).outcome is Outcome.EQUAL
    assert compare_answers("p", plain, plain, Answer((), "texts", "stop")).outcome is Outcome.UNKNOWN
    silent = Answer((), "", "stop")
    assert compare_answers("p", silent, silent, silent).outcome is Outcome.UNKNOWN, "nothing was compared"
    assert judge_single([compare_answers("p", silent, silent, silent)] * 17, 0).verdict is INCONCLUSIVE
    texts = judge_single([compare_answers("p", plain, plain, plain)] * 17, 0)
    assert (texts.verdict, texts.summary) == (INCONCLUSIVE, "too little was compared: 0 tokens of 17 prompts")
    many = judge_batch(8, [compare_answers("p", plain, plain, plain)] * 17, rows(equal=17))
    assert (many.verdict, "too little was compared" in many.summary) == (INCONCLUSIVE, True)
    assert self_difference(plain, Answer((), "other", "stop")) == 0
    assert self_difference(plain, plain) is None


def test_first_difference() -> None:
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2), (1, 3)) == 1
    assert first_difference((1, 2), (1,)) == 1
    assert first_difference((), (1,)) == 0


def test_a_difference_is_told_with_place_tokens_and_gap() -> None:
    told = compare_answers("code-1", FIRST, FIRST, answer(1, 2, 3, 9)).describe()
    assert told == "code-1: mismatch at token 3: the target says 4, speculation 9, gap 1.7 nats"
    beyond = compare_answers("code-1", FIRST, FIRST, answer(1, 2, 6, 4)).describe()
    assert "gap over 2.4 nats" in beyond
    assert "nothing more" in compare_answers("code-1", FIRST, FIRST, answer(1, 2, 3)).describe()


# ------------------------------------------------------------------------------------------------- the verdict


def rows(**numbers: int) -> list[Compared]:
    """So many answers of each outcome, of 10 tokens; those that differ did so at token 5."""
    found = []
    for name, number in numbers.items():
        outcome = Outcome[name.upper()]
        whole = outcome is Outcome.EQUAL
        place = None if outcome in (Outcome.EQUAL, Outcome.UNSTEADY) else 5
        row = Compared(f"{name}", outcome, 10 if whole else 5, 10, place, 1, 2, None if whole else 3.0)
        found += [row] * number
    return found


@pytest.mark.parametrize(
    ("numbers", "unsteady", "verdict", "words"),
    [
        ({"equal": 16}, 0, PASS, "16 of 16 prompts equal: 160 tokens"),
        ({"equal": 12, "near_tie": 4}, 0, PASS, "12 of 16 prompts equal, 4 near ties"),
        ({"equal": 12, "unsteady": 4}, 4, PASS, "4 undecided"),
        ({"equal": 15, "mismatch": 1}, 0, FAIL, "not lossless on 1 of 16 prompts"),
        ({"equal": 14, "mismatch": 1, "unknown": 1}, 0, FAIL, "not lossless"),
        ({"equal": 15, "unknown": 1}, 0, INCONCLUSIVE, "gap is not known"),
        ({"equal": 7, "unsteady": 9}, 9, INCONCLUSIVE, "does not agree with itself on 9 of 16"),
        ({"mismatch": 7, "unsteady": 9}, 9, INCONCLUSIVE, "does not agree with itself"),
        ({"equal": 13, "mismatch": 1, "unsteady": 3}, 3, FAIL, "not lossless on 1 of 17"),
        ({"equal": 9, "mismatch": 7, "unsteady": 1}, 1, FAIL, "not lossless on 7 of 17"),
        ({"equal": 15, "doubtful": 1}, 0, INCONCLUSIVE, "rounding only where logits are above 32"),
        ({"equal": 14, "doubtful": 1, "mismatch": 1}, 0, FAIL, "not lossless on 1"),
        ({"equal": 8, "unsteady": 8}, 8, PASS, "8 of 16 prompts equal, 8 undecided"),
        ({"equal": 7, "unsteady": 9}, 8, INCONCLUSIVE, "only 7 of 16"),
        ({"equal": 1, "mismatch": 14, "unsteady": 1}, 1, FAIL, "not lossless on 14"),
        ({}, 0, INCONCLUSIVE, "nothing was compared"),
    ],
)
def test_the_pass_of_one_at_a_time(
    numbers: dict[str, int], unsteady: int, verdict: Verdict, words: str
) -> None:
    found = judge_single(rows(**numbers), unsteady)
    assert found.verdict is verdict
    assert words in found.summary
    assert found.hint if verdict is FAIL else True


def test_only_a_prompt_on_which_the_baseline_parts_from_itself_is_excused() -> None:
    part = compare_answers("p", FIRST, answer(1, 2, 9, 9), answer(9, 2, 3, 4))
    assert (part.outcome, part.steady) == (Outcome.MISMATCH, False)
    excused = judge_single([*rows(equal=15), part], 1)
    assert (excused.verdict, "does not agree with itself either" in excused.summary) == (INCONCLUSIVE, True)
    held = judge_single([*rows(equal=14, mismatch=1), part], 1)
    assert (held.verdict, "not lossless on 1 of 16" in held.summary) == (FAIL, True)


def test_near_ties_that_come_at_once_leave_nothing_to_compare() -> None:
    early = [Compared("p", Outcome.NEAR_TIE, 1, 100, 1, 1, 2, 0.01)] * 8
    found = judge_single(early, 0)
    assert (found.verdict, "8 of 800 tokens" in found.summary) == (INCONCLUSIVE, True)


@pytest.mark.parametrize(
    ("mine", "own", "verdict", "words"),
    [
        ({"equal": 16}, {"equal": 16}, PASS, "0 of 16 differ, 0 of 16"),
        ({"equal": 12, "near_tie": 4}, {"equal": 16}, PASS, "4 near ties"),
        ({"equal": 14, "mismatch": 2}, {"equal": 14, "mismatch": 2}, PASS, "2 of 16 differ, 2 of 16"),
        ({"equal": 15, "mismatch": 1}, {"equal": 14, "mismatch": 2}, PASS, "1 of 16 differ"),
        (
            {"equal": 12, "doubtful": 4},
            {"equal": 16},
            PASS,
            "0 of 16 differ, 0 of 16 of the baseline's own, 4 near ties",
        ),
        ({"equal": 16}, {"equal": 12, "doubtful": 4}, PASS, "0 of 16 of the baseline's own"),
        (
            {"equal": 8, "mismatch": 8},
            {"equal": 4, "mismatch": 4, "unknown": 8},
            PASS,
            "8 of 16 differ, 4 of 8",
        ),
        (
            {"equal": 4, "mismatch": 4, "unknown": 8},
            {"equal": 12, "mismatch": 4},
            PASS,
            "(p 0.22, by chance)",
        ),
        (
            {"equal": 3, "mismatch": 5, "unknown": 8},
            {"equal": 11, "mismatch": 5},
            INCONCLUSIVE,
            "5 of 8 differ, 5 of 16",
        ),
        (
            {"equal": 15, "mismatch": 1},
            {"equal": 16},
            INCONCLUSIVE,
            "no rounding of a batch explains it (p 0.5)",
        ),
        ({"equal": 11, "mismatch": 5}, {"equal": 16}, INCONCLUSIVE, "no rounding of a batch explains it"),
        ({"equal": 10, "mismatch": 6}, {"equal": 16}, FAIL, "6 of 16 differ, 0 of 16 of the baseline's own"),
        ({"mismatch": 16}, {"equal": 16}, FAIL, "p "),
        ({"mismatch": 16}, {"mismatch": 8, "equal": 8}, FAIL, "16 of 16 differ, 8 of 16"),
        ({"equal": 4, "unknown": 12}, {"equal": 16}, INCONCLUSIVE, "4 of 16 answers could be compared"),
        ({"equal": 16}, {}, INCONCLUSIVE, "could be compared"),
    ],
)
def test_the_pass_at_a_higher_batch(
    mine: dict[str, int], own: dict[str, int], verdict: Verdict, words: str
) -> None:
    found = judge_batch(8, rows(**mine), rows(**own))
    assert found.verdict is verdict
    assert words in found.summary
    assert found.summary.startswith("batch 8")


@pytest.mark.parametrize(
    ("wrong", "gap", "verdict", "words"),
    [
        (1, 0.6, PASS, "1 of 17 differ, 0 of 17 of the baseline's own (p 0.5, by chance)"),
        (2, 0.99, PASS, "2 of 17 differ"),
        (2, GROSS, INCONCLUSIVE, "no rounding of a batch explains it"),
        (2, None, INCONCLUSIVE, "no rounding of a batch explains it"),
        (3, 0.6, INCONCLUSIVE, "too few to tell from chance (p 0.11)"),
        (5, 0.6, INCONCLUSIVE, "too few to tell from chance (p 0.022)"),
        (6, 0.6, FAIL, "(p 0.0092)"),
    ],
)
def test_a_few_small_differences_in_a_batch_are_chance(
    wrong: int, gap: float | None, verdict: Verdict, words: str
) -> None:
    differ = [Compared("p", Outcome.MISMATCH, 5, 10, 5, 1, 2, gap)] * wrong
    found = judge_batch(8, [*rows(equal=17 - wrong), *differ], rows(equal=17))
    assert found.verdict is verdict
    assert words in found.summary


def test_two_of_three_are_no_chance() -> None:
    small = [Compared("p", Outcome.MISMATCH, 5, 10, 5, 1, 2, 0.6)] * 2
    found = judge_batch(8, [*rows(equal=1), *small], rows(equal=17))
    assert (found.verdict, "(p 0.016)" in found.summary) == (INCONCLUSIVE, True), found


def test_a_bound_of_a_gap_may_be_a_gross_one() -> None:
    assert Compared("p", Outcome.MISMATCH, 5, 10, 5, 1, 2, 0.6, at_least=True).gross
    assert not Compared("p", Outcome.DOUBTFUL, 5, 10, 5, 1, 2, 3.0).gross


@pytest.mark.parametrize(
    ("many", "of", "own", "own_of", "chance"),
    [
        # Fisher's exact test, one-sided, as R's fisher.test(alternative = "greater") has it
        (6, 16, 0, 16, 0.008837),
        (1, 16, 0, 16, 0.5),
        (3, 4, 1, 4, 0.242857),
        (0, 16, 0, 16, 1.0),
        (5, 5, 5, 5, 1.0),
        (0, 0, 1, 2, 1.0),
    ],
)
def test_the_chance_of_an_excess(many: int, of: int, own: int, own_of: int, chance: float) -> None:
    assert excess(many, of, own, own_of) == pytest.approx(chance, rel=1e-3)
