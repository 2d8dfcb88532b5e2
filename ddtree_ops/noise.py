"""Is a value worse or better than earlier ones of its kind, or within their noise? Pure.

The rule: the earlier values are reduced to their median and the median absolute deviation (MAD) from it, which one odd run
does not move as it would a mean and a standard deviation. Noise reaches :data:`DEVIATIONS` x 1.4826 x MAD from the median
(1.4826 x MAD is the standard deviation of normal noise), and at least :data:`LEAST_CHANGE` of the median: a few runs that
happen to agree to the last digit do not make the next digit a finding. Beyond that the value is worse or better.
Fewer than :data:`LEAST_RUNS` earlier values judge nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

__all__ = ["DEVIATIONS", "LEAST_CHANGE", "LEAST_RUNS", "Change", "Judgement", "compare", "spread"]

DEVIATIONS = 4.0
"""Standard deviations that noise reaches: one value in 16,000 of normal noise lies beyond, and real noise has longer tails."""
LEAST_CHANGE = 0.05
"""Least change worth a word, as a share of the median."""
LEAST_RUNS = 5
"""Earlier values below which there is no judgement: with four, half of all MADs are off by a factor of two."""
_NORMAL = 1.4826
_ROUNDING = 1e-9


class Judgement(StrEnum):
    """What :func:`compare` found."""

    BETTER = "better"
    WORSE = "worse"
    WITHIN = "within"
    TOO_FEW = "too-few"


@dataclass(frozen=True)
class Change:
    """A value against earlier ones; all numbers in the unit of the value.

    :param median: of the earlier values; None where there is none.
    :param mad: their median absolute deviation; None likewise.
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
        """There were enough earlier values to judge by."""
        return self.judgement is not Judgement.TOO_FEW

    @property
    def worse(self) -> bool:
        """It is worse than noise explains."""
        return self.judgement is Judgement.WORSE

    @property
    def better(self) -> bool:
        """It is better than noise explains."""
        return self.judgement is Judgement.BETTER

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


def compare(
    earlier: Sequence[float],
    now: float,
    *,
    higher_is_better: bool,
    least_runs: int = LEAST_RUNS,
    least_change: float = LEAST_CHANGE,
    deviations: float = DEVIATIONS,
) -> Change:
    """Judge ``now`` by ``earlier`` values of the same kind; their order does not matter.

    Numbers that are not finite among ``earlier`` are left out.

    :raises ValueError: ``now`` is not finite.
    """
    if not math.isfinite(now):
        raise ValueError(f"{now} cannot be compared")
    known = [value for value in earlier if math.isfinite(value)]
    if not known:
        return Change(now, None, None, 0, None, Judgement.TOO_FEW)
    middle = float(median(known))
    mad = spread(known) or 0.0
    limit = max(deviations * _NORMAL * mad, least_change * abs(middle))
    judgement = Judgement.TOO_FEW
    if len(known) >= least_runs:
        away = now - middle
        if abs(away) <= limit * (1 + _ROUNDING):
            judgement = Judgement.WITHIN
        else:
            judgement = Judgement.BETTER if (away > 0) == higher_is_better else Judgement.WORSE
    return Change(now, middle, mad, len(known), limit, judgement)
