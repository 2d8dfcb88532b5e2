"""What a load generator measured, as figures. Pure.

Definitions, the same whichever generator is used:

- ``ttft``: from sending a request to its first piece of text; ``latency``: to its last.
- ``tpot``: (latency - ttft) / (output tokens - 1), one value a request; none for a request of one token.
- ``output_rate``: output tokens of all requests that were answered, over the time from the first request to the last
  answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.results import Figure

__all__ = ["Distribution", "Measurement", "Sample", "figures_of", "from_samples", "mad", "percentile"]


def mad(values: Sequence[float]) -> float | None:
    """Median absolute deviation from the median; None of fewer than two values."""
    if len(values) < 2:
        return None
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Between the two nearest values, linearly (numpy's default); None of no values."""
    if not values:
        return None
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


@dataclass(frozen=True)
class Sample:
    """One request; times in seconds.

    :param error: why it was not answered, or not whole; empty: it was.
    :param tokens: output tokens by the server's own count; None where it gave none.
    """

    ttft: float | None = None
    latency: float | None = None
    tokens: int | None = None
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first."""
        if self.error or self.ttft is None or self.latency is None or not self.tokens or self.tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.tokens - 1)


@dataclass(frozen=True)
class Distribution:
    """Of one quantity over the requests of a point; seconds."""

    median: float
    p99: float
    samples: int
    spread: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """None of no values."""
        highest = percentile(values, 99)
        if highest is None:
            return None
        return cls(statistics.median(values), highest, len(values), mad(values))


@dataclass(frozen=True)
class Measurement:
    """A point, measured.

    :param generator: what made the load, as figures name their source.
    :param requested: requests that were to be answered.
    :param seconds: from the first request to the last answer.
    :param tokens: output tokens of the requests that were answered; None where the server did not count them.
    :param times: ``ttft``, ``tpot``, ``latency`` by name; None: not measured.
    :param errors: of the requests that failed, each text once.
    :param accept_length: as the generator itself reports it.
    """

    generator: str
    requested: int
    completed: int
    seconds: float
    tokens: int | None
    times: Mapping[str, Distribution | None] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    accept_length: float | None = None

    @property
    def failed(self) -> int:
        """Requests that were not answered."""
        return self.requested - self.completed

    @property
    def output_rate(self) -> float | None:
        """Output tokens a second; None where there were none."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None

    def facts(self) -> dict[str, Any]:
        """For the result: what the figures do not say."""
        return {
            "generator": self.generator,
            "requests": self.requested,
            "measured_s": round(self.seconds, 3),
            "output_tokens": self.tokens,
        }


def from_samples(generator: str, samples: Sequence[Sample], seconds: float) -> Measurement:
    """A measurement from single requests."""
    answered = [sample for sample in samples if not sample.error]
    counted = [sample.tokens for sample in answered if sample.tokens is not None]
    whole = len(counted) == len(answered)
    times = {
        name: Distribution.of([value for sample in answered if (value := getattr(sample, name)) is not None])
        for name in ("ttft", "tpot", "latency")
    }
    return Measurement(
        generator=generator,
        requested=len(samples),
        completed=len(answered),
        seconds=seconds,
        tokens=sum(counted) if whole and counted else None,
        times=times,
        errors=tuple(dict.fromkeys(sample.error for sample in samples if sample.error)),
    )


def figures_of(found: Measurement, labels: Mapping[str, str]) -> tuple[Figure, ...]:
    """Its figures; what could not be had is None and never 0."""
    figures: list[Figure] = []

    def add(
        name: str, value: float | None, unit: str, samples: int, spread: float | None = None, **more: str
    ) -> None:
        figures.append(Figure(name, value, unit, found.generator, samples, spread, {**labels, **more}))

    for name in ("ttft", "tpot", "latency"):
        times = found.times.get(name)
        if times is None:
            add(name, None, "s", 0, stat="median")
            continue
        add(name, times.median, "s", times.samples, times.spread, stat="median")
        add(name, times.p99, "s", times.samples, stat="p99")
    add("output_rate", found.output_rate, "tokens/s", found.completed)
    rate = found.completed / found.seconds if found.completed and found.seconds > 0 else None
    add("request_rate", rate, "requests/s", found.completed)
    add("failed_requests", float(found.failed), "count", found.requested)
    return tuple(figures)
