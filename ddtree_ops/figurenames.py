"""Every figure that a report may hold: its unit, what it means, and which way is better. Pure data.

``docs/reports.md`` shows the table. A figure that is not in it is still shown and compared, without a judgement.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FIGURES", "FigureName", "higher_is_better", "meaning_of", "trend_direction"]


class FigureName(NamedTuple):
    """What is known of the figures of one name.

    :param unit: of every figure of that name.
    :param meaning: one sentence without a full stop.
    :param higher_is_better: None where neither way is: a size, a bar of a histogram.
    :param over_runs: it is judged against earlier runs; False: the check that counts it judges it, by a rule of its own.
    """

    unit: str
    meaning: str
    higher_is_better: bool | None
    over_runs: bool = True


FIGURES: dict[str, FigureName] = {
    "ready": FigureName("s", "from the start of the unit to the first answer of the last load", False),
    "load_phase": FigureName("s", "one phase of that load; label phase", False),
    "restart": FigureName("s", "from the order to restart to the first answer", False),
    "ttft": FigureName("s", "time to the first token of a request; label stat", False),
    "tpot": FigureName("s", "time per output token after the first; label stat", False),
    "latency": FigureName("s", "time from a request to its last token; label stat", False),
    "output_rate": FigureName("tokens/s", "output tokens of all requests together", True),
    "request_rate": FigureName("requests/s", "requests answered", True),
    "failed_requests": FigureName("count", "requests that were not answered, or not whole", False, False),
    "accept_length": FigureName(
        "tokens/step", "tokens that a verify step yields, its bonus token included", True
    ),
    "accept_histogram": FigureName(
        "steps", "verify steps in which so many drafts were accepted; label accepted", None
    ),
    "speedup": FigureName(
        "ratio", "output rate over that of the autoregressive baseline of the same run", True
    ),
    "gpu_memory": FigureName(
        "GB", "memory in use on the fullest GPU; label part where the server says what it holds", False
    ),
    "host_memory": FigureName("GB", "memory of the unit's processes after the run", False),
    "burst_mismatch": FigureName(
        "ratio", "answers of a burst that differ from those of lone requests; label concurrency", None
    ),
    "lossless_prompts": FigureName(
        "count", "answers compared with those of the target alone; label concurrency", None
    ),
    "lossless_mismatches": FigureName(
        "count", "of these, answers that differ beyond a near tie; label concurrency", False, False
    ),
    "lossless_near_ties": FigureName(
        "count", "of these, answers that parted at a near tie; label concurrency", None
    ),
    "baseline_self_mismatches": FigureName(
        "count", "prompts on which the target alone does not agree with itself", None
    ),
    "kv_tokens": FigureName("tokens", "tokens that the KV cache has room for", True),
}
"""By name, in the order in which reports show them."""


def higher_is_better(name: str) -> bool | None:
    """Which way a figure improves; None where neither is better, or the name is not known."""
    known = FIGURES.get(name)
    return None if known is None else known.higher_is_better


def trend_direction(name: str) -> bool | None:
    """As :func:`higher_is_better`, for the comparison with earlier runs; None for what that does not judge too."""
    known = FIGURES.get(name)
    return known.higher_is_better if known is not None and known.over_runs else None


def meaning_of(name: str) -> str:
    """What a figure means, one sentence without a full stop; empty where the name is not known."""
    known = FIGURES.get(name)
    return "" if known is None else known.meaning
