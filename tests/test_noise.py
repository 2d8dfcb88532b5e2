"""The rule for noise: median, MAD, least change, enough runs."""

from __future__ import annotations

import math

import pytest

from ddtree_ops.noise import DEVIATIONS, LEAST_RUNS, Judgement, compare, spread

STEADY = (100.0, 101.0, 99.0, 100.0, 102.0, 98.0)  # median 100, MAD 1: noise reaches 5.93


@pytest.mark.parametrize(
    ("now", "higher", "wanted"),
    [
        (100.0, True, Judgement.WITHIN),
        (94.1, True, Judgement.WITHIN),
        (94.0, True, Judgement.WORSE),
        (105.9, True, Judgement.WITHIN),
        (106.0, True, Judgement.BETTER),
        (106.0, False, Judgement.WORSE),
        (94.0, False, Judgement.BETTER),
        (0.0, True, Judgement.WORSE),
    ],
)
def test_beyond_four_deviations_of_the_median_it_changed(now: float, higher: bool, wanted: Judgement) -> None:
    change = compare(STEADY, now, higher_is_better=higher)
    assert (change.judgement, change.median, change.mad, change.runs) == (wanted, 100.0, 1.0, 6)
    assert change.limit == pytest.approx(DEVIATIONS * 1.4826)
    assert (change.worse, change.better) == (wanted is Judgement.WORSE, wanted is Judgement.BETTER)


def test_runs_that_agree_to_the_digit_leave_room_for_the_least_change() -> None:
    same = [4.0] * 8
    assert compare(same, 3.8, higher_is_better=True).judgement is Judgement.WITHIN
    assert compare(same, 3.79, higher_is_better=True).judgement is Judgement.WORSE
    assert compare(same, 3.79, higher_is_better=True, least_change=0.1).judgement is Judgement.WITHIN


def test_one_odd_run_does_not_widen_the_noise() -> None:
    wide = compare([*STEADY, 1000.0], 110.0, higher_is_better=True)
    assert wide.better
    assert wide.limit is not None and wide.limit < 9


def test_noisy_runs_allow_for_their_noise() -> None:
    assert (
        compare((50.0, 150.0, 80.0, 120.0, 100.0), 30.0, higher_is_better=True).judgement is Judgement.WITHIN
    )


@pytest.mark.parametrize("runs", range(LEAST_RUNS))
def test_too_few_runs_judge_nothing(runs: int) -> None:
    change = compare([100.0] * runs, 1.0, higher_is_better=True)
    assert change.judgement is Judgement.TOO_FEW
    assert (change.enough, change.worse, change.better) == (False, False, False)
    assert change.median == (100.0 if runs else None)


def test_no_run_at_all_has_no_numbers() -> None:
    change = compare([], 1.0, higher_is_better=True)
    assert (change.median, change.mad, change.limit, change.relative, change.deviations) == (
        None,
        None,
        None,
        None,
        0.0,
    )


def test_what_is_not_a_number_is_no_earlier_run() -> None:
    change = compare([math.nan, math.inf, *STEADY], 100.0, higher_is_better=True)
    assert (change.runs, change.median) == (6, 100.0)
    with pytest.raises(ValueError, match="cannot be compared"):
        compare(STEADY, math.nan, higher_is_better=True)


def test_a_count_that_was_always_zero_changes_with_the_first() -> None:
    change = compare([0.0] * 6, 1.0, higher_is_better=False)
    assert change.worse
    assert (change.deviations, change.relative) == (math.inf, None)
    assert compare([0.0] * 6, 0.0, higher_is_better=False).judgement is Judgement.WITHIN


def test_deviations_count_limits() -> None:
    change = compare([10.0] * 5, 11.0, higher_is_better=True)
    assert change.deviations == pytest.approx(2.0)
    assert change.relative == pytest.approx(0.1)


def test_spread_is_the_median_deviation() -> None:
    assert spread([1.0, 2.0, 3.0, 100.0, 2.0]) == 1.0
    assert spread([7.0]) == 0.0
    assert spread([]) is None
