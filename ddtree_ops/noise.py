"""Is a value worse or better than earlier ones of its kind, or within their noise? Pure.

The rule: the middle of the earlier values is their median, and their noise the second largest distance of any of them from
it. One odd run moves neither. Noise reaches :func:`factor` times that distance from the median, and at least
:data:`LEAST_CHANGE` of the median: a few runs that happen to agree to the last digit do not make the next digit a finding.
Beyond that the value is worse or better. Fewer than :data:`LEAST_RUNS` earlier values judge nothing, and where all of them
were 0 there is no scale to measure a change by.

The factor depends on the number of earlier values, as Student's t does: five values know little of their noise. It was
simulated (normal noise, 4 million series for each number of values) so that 2 values of 1,000 that are no worse than the
earlier ones are called worse, whether there are 5 of these or 14. Where many series are judged at once, it grows so that
2 of 100 such judgements name any series at all: :data:`ALARMS`. Typically noise so reaches 8.6 standard deviations after
5 runs, 4.2 after 10 and 3.7 after 14, for one series; 14, 5.4 and 4.5 for one of 40. Longer tails are called worse more often:
noise like Student's t with 5 degrees of freedom in 3 values of 1,000 after 5 runs, and in 7 after 14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

__all__ = [
    "ALARMS",
    "FALSE_RATE",
    "LARGE",
    "LEAST_CHANGE",
    "LEAST_RUNS",
    "Change",
    "Judgement",
    "compare",
    "factor",
    "spread",
]

FALSE_RATE = 0.002
"""Share of values that are called worse and are not, at most, for each number of earlier values."""
ALARMS = 0.02
"""Share of judgements of many series at once in which any is called worse that is not."""
LARGE = 0.4
"""A change by this share of the median is large: a rate of 60 %, a time of 140 %. It needs no more than one series would."""
LEAST_CHANGE = 0.05
"""Least change worth a word, as a share of the median."""
LEAST_RUNS = 5
"""Earlier values below which there is no judgement: with four, noise would reach 20 standard deviations."""
_RARE = 0.0002
_FACTORS = {
    5: (9.63, 21.69),
    6: (6.20, 11.43),
    7: (4.65, 7.77),
    8: (3.88, 6.17),
    9: (3.39, 5.14),
    10: (3.07, 4.55),
    11: (2.82, 4.07),
    12: (2.65, 3.72),
    13: (2.50, 3.50),
    14: (2.39, 3.31),
}
"""By number of earlier values: the factor for :data:`FALSE_RATE`, and the one for a tenth of it."""
_ROUNDING = 1e-9


class Judgement(StrEnum):
    """What :func:`compare` found."""

    BETTER = "better"
    WORSE = "worse"
    WITHIN = "within"
    TOO_FEW = "too-few"
    NO_SCALE = "no-scale"
    SHOWN = "shown"
    """Nobody judges it; :func:`compare` never says so."""


@dataclass(frozen=True)
class Change:
    """A value against earlier ones; all numbers in the unit of the value.

    :param median: of the earlier values; None where there is none.
    :param mad: their median absolute deviation; None likewise. It is told, and judges nothing.
    :param runs: number of earlier values.
    :param limit: how far from the median noise reaches; None where there is no median.
    """

    value: float
    median: float | None
    mad: float | None
    runs: int
    limit: float | None
    judgement: Judgement

    @property
    def enough(self) -> bool:
        """It was judged: there were enough earlier values, and a scale."""
        return self.judgement in (Judgement.BETTER, Judgement.WORSE, Judgement.WITHIN)

    @property
    def worse(self) -> bool:
        """It is worse than noise explains."""
        return self.judgement is Judgement.WORSE

    @property
    def better(self) -> bool:
        """It is better than noise explains."""
        return self.judgement is Judgement.BETTER

    @property
    def large(self) -> bool:
        """It is off by :data:`LARGE` of the median, or more."""
        return self.relative is not None and abs(self.relative) >= LARGE * (1 - _ROUNDING)

    @property
    def relative(self) -> float | None:
        """Change as a share of the median, with its sign; None without a median or with one of 0."""
        return (self.value - self.median) / abs(self.median) if self.median else None

    @property
    def deviations(self) -> float:
        """How many limits it lies from the median, without a sign; 0 where nothing is known."""
        if self.median is None or self.limit is None:
            return 0.0
        away = abs(self.value - self.median)
        return away / self.limit if self.limit else (math.inf if away else 0.0)


def spread(values: Sequence[float]) -> float | None:
    """The median absolute deviation of ``values``; None where there is none."""
    if not values:
        return None
    middle = median(values)
    return float(median(abs(value - middle) for value in values))


def factor(runs: int, *, series: int = 1) -> float:
    """How many times the second largest distance from the median noise reaches.

    :param runs: number of earlier values; those beyond 14 are worth no more, and fewer than 5 no judgement at all.
    :param series: how many values are judged at once; beyond 100 they count as 100.
    """
    often, rare = _FACTORS[min(max(runs, LEAST_RUNS), max(_FACTORS))]
    wanted = min(FALSE_RATE, max(_RARE, ALARMS / max(series, 1)))
    return float(often * (rare / often) ** (math.log(FALSE_RATE / wanted) / math.log(FALSE_RATE / _RARE)))


def compare(
    earlier: Sequence[float],
    now: float,
    *,
    higher_is_better: bool,
    series: int = 1,
    least_runs: int = LEAST_RUNS,
    least_change: float = LEAST_CHANGE,
    least_absolute: float = 0.0,
) -> Change:
    """Judge ``now`` by ``earlier`` values of the same kind; their order does not matter.

    Numbers that are not finite among ``earlier`` are left out.

    :param series: how many values are judged at once. One that changed by :data:`LARGE` is judged as if it were alone.
    :param least_absolute: least change worth a word, in the unit of the value; where all earlier ones were 0 and this is 0,
        nothing is judged.
    :raises ValueError: ``now`` is not finite.
    """
    if not math.isfinite(now):
        raise ValueError(f"{now} cannot be compared")
    known = [value for value in earlier if math.isfinite(value)]
    if not known:
        return Change(now, None, None, 0, None, Judgement.TOO_FEW)
    middle = float(median(known))
    away = now - middle
    off = sorted(abs(value - middle) for value in known)
    noise = off[max(len(off) - 2, 0)]
    least = max(least_change * abs(middle), least_absolute)
    large = bool(middle) and abs(away) >= LARGE * abs(middle) * (1 - _ROUNDING)
    limit = max(factor(len(known), series=1 if large else series) * noise, least)
    if len(known) < least_runs:
        judgement = Judgement.TOO_FEW
    elif abs(away) <= limit * (1 + _ROUNDING):
        judgement = Judgement.WITHIN
    elif not limit:
        judgement = Judgement.NO_SCALE
    else:
        judgement = Judgement.BETTER if (away > 0) == higher_is_better else Judgement.WORSE
    return Change(now, middle, spread(known), len(known), limit, judgement)
