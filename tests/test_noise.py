"""The rule for noise: median, second largest distance, least change, enough runs; and how often it is wrong."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest

from ddtree_ops.noise import FALSE_RATE, LEAST_RUNS, Judgement, compare, factor, spread

STEADY = (100.0, 101.0, 99.0, 100.0, 101.0, 98.0)  # median 100, second largest distance 1: noise reaches 6.2


@pytest.mark.parametrize(
    ("now", "higher", "wanted"),
    [
        (100.0, True, Judgement.WITHIN),
        (93.9, True, Judgement.WITHIN),
        (93.7, True, Judgement.WORSE),
        (106.1, True, Judgement.WITHIN),
        (106.3, True, Judgement.BETTER),
        (106.3, False, Judgement.WORSE),
        (93.7, False, Judgement.BETTER),
        (0.0, True, Judgement.WORSE),
    ],
)
def test_beyond_the_noise_of_earlier_runs_it_changed(now: float, higher: bool, wanted: Judgement) -> None:
    change = compare(STEADY, now, higher_is_better=higher)
    assert (change.judgement, change.median, change.mad, change.runs) == (wanted, 100.0, 1.0, 6)
    assert change.limit == pytest.approx(factor(6)) == pytest.approx(6.2)
    assert (change.worse, change.better) == (wanted is Judgement.WORSE, wanted is Judgement.BETTER)


def test_runs_that_agree_to_the_digit_leave_room_for_the_least_change() -> None:
    same = [4.0] * 8
    assert compare(same, 3.8, higher_is_better=True).judgement is Judgement.WITHIN
    assert compare(same, 3.79, higher_is_better=True).judgement is Judgement.WORSE
    assert compare(same, 3.79, higher_is_better=True, least_change=0.1).judgement is Judgement.WITHIN


def test_one_odd_run_does_not_widen_the_noise() -> None:
    wide = compare([*STEADY, 1000.0], 110.0, higher_is_better=True)
    assert wide.better
    assert wide.limit is not None and wide.limit < 10


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
    for odd in (math.nan, math.inf):
        with pytest.raises(ValueError, match="cannot be compared"):
            compare(STEADY, odd, higher_is_better=True)


@pytest.mark.parametrize("higher", [True, False])
def test_where_all_runs_were_zero_there_is_no_scale(higher: bool) -> None:
    for now in (1 / 16, -1.0, 1000.0):
        change = compare([0.0] * 14, now, higher_is_better=higher)
        assert change.judgement is Judgement.NO_SCALE
        assert (change.enough, change.worse, change.better, change.large) == (False, False, False, False)
    assert compare([0.0] * 14, 0.0, higher_is_better=higher).judgement is Judgement.WITHIN
    told = compare([0.0] * 14, 3.0, higher_is_better=higher, least_absolute=2.0)
    assert told.judgement is (Judgement.BETTER if higher else Judgement.WORSE)
    assert compare([0.0] * 14, 2.0, higher_is_better=higher, least_absolute=2.0).judgement is Judgement.WITHIN


def test_five_runs_judge() -> None:
    assert LEAST_RUNS == 5
    assert compare([100.0] * 5, 1.0, higher_is_better=True).worse
    assert compare([100.0] * 4, 1.0, higher_is_better=True).judgement is Judgement.TOO_FEW


@cache
def _values(seed: int = 1) -> list[list[float]]:
    """Series of 15 values with normal noise of 5 %; the last one is of the same kind as those before it."""
    source = random.Random(seed)
    return [[source.gauss(100.0, 5.0) for _ in range(15)] for _ in range(4000)]


@pytest.mark.parametrize("runs", [5, 6, 8, 14])
def test_what_is_no_worse_is_seldom_called_so(runs: int) -> None:
    assert FALSE_RATE == 0.002
    changes = [compare(one[-1 - runs : -1], one[-1], higher_is_better=True) for one in _values()]
    assert sum(change.worse for change in changes) / len(changes) < 0.003
    assert sum(change.better for change in changes) / len(changes) < 0.003


@pytest.mark.parametrize("runs", [5, 14])
def test_of_forty_series_at_once_one_is_called_worse_on_few_nights(runs: int) -> None:
    judged = [compare(one[-1 - runs : -1], one[-1], higher_is_better=True, series=40) for one in _values()]
    nights = [judged[number : number + 40] for number in range(0, len(judged), 40)]
    assert sum(any(one.worse for one in night) for night in nights) / len(nights) <= 0.04
    assert not any(one.worse and one.large for one in judged)


@pytest.mark.parametrize("runs", [7, 10, 14])
def test_what_is_halved_is_found_among_forty_series(runs: int) -> None:
    halved = [
        compare(one[-1 - runs : -1], one[-1] / 2, higher_is_better=True, series=40) for one in _values()[:400]
    ]
    assert sum(one.worse and one.large for one in halved) / len(halved) > 0.95


def test_the_factor_falls_with_runs_and_grows_with_series() -> None:
    factors = [factor(runs) for runs in range(5, 15)]
    assert factors == sorted(factors, reverse=True)
    assert factor(60) == factor(14) == pytest.approx(2.39)
    assert factor(14, series=10) == factor(14)
    assert factor(14, series=100) == factor(14, series=1000) == pytest.approx(3.31)
    assert factor(14) < factor(14, series=40) < factor(14, series=100)


def test_a_large_change_is_judged_as_if_it_were_alone() -> None:
    noisy = (100.0, 104.0, 96.0, 100.0, 104.0)  # 4: noise reaches 38.5 for one series, 62.8 for one of forty
    for now, judgement, large in ((60.0, Judgement.WORSE, True), (61.0, Judgement.WITHIN, False)):
        change = compare(noisy, now, higher_is_better=True, series=40)
        assert (change.judgement, change.large) == (judgement, large)
    assert compare(noisy, 61.0, higher_is_better=True).worse


def test_deviations_count_limits() -> None:
    change = compare([10.0] * 5, 11.0, higher_is_better=True)
    assert change.deviations == pytest.approx(2.0)
    assert change.relative == pytest.approx(0.1)


def test_spread_is_the_median_deviation() -> None:
    assert spread([1.0, 2.0, 3.0, 100.0, 2.0]) == 1.0
    assert spread([7.0]) == 0.0
    assert spread([]) is None
