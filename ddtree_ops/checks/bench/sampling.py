"""Drafts accepted a verify step: a fixed sample of chats, sent to a configuration once its points are measured.

Answers to chats, which are the load of a point, carry no counts of single requests; those of ``/generate`` do. So the
histogram is not of a point's own load: it is of these prompts, one request at a time, and belongs to the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_ops.checks.bench.points import Configuration
from ddtree_ops.checks.engine import EngineError, Generation
from ddtree_ops.checks.validation.acceptance_judging import Counts, accounting, total_counts
from ddtree_ops.checks.validation.acceptance_prompts import pick_prompts, ready
from ddtree_ops.checks.validation.asking import fitting
from ddtree_ops.checks.validation.run import open_context
from ddtree_ops.errors import Inconclusive, RemoteError, UnreachableError
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Session
from ddtree_ops.results import Figure, Reporter
from ddtree_ops.secret import Secret
from ddtree_ops.wording import count

__all__ = ["HISTOGRAM", "Sampled", "histogram_of", "take_sample"]

HISTOGRAM = "accept_histogram"
_PROMPTS, _TOKENS = 12, 128
_SOURCE = "POST /generate meta_info, sample at batch 1"


@dataclass(frozen=True)
class Sampled:
    """What came of a sample.

    :param figures: one ``accept_histogram`` for every number of drafts; none where there is no histogram.
    :param said: what was counted, or why there is nothing.
    """

    figures: tuple[Figure, ...]
    said: str


def _none(why: str) -> Sampled:
    return Sampled((), f"no accept histogram: {why}")


def histogram_of(
    answers: Sequence[tuple[str, Generation]],
    labels: Mapping[str, str],
    *,
    block_size: int | None = None,
    templated: bool = True,
) -> Sampled:
    """The histogram over all answers; none, and why, where it cannot be had or cannot be true. Pure.

    :param answers: by name of the prompt.
    :param templated: the prompts were sent with the model's chat template.
    """
    counts = [found for name, answer in answers if (found := Counts.of(name, answer)) is not None]
    total = total_counts("all prompts", counts)
    over = f"{count(total.steps, 'verify step')} of {count(total.requests, 'answer')}"
    if not counts:
        return _none("the answers of /generate carry no speculative counts")
    if total.length is None:
        return _none(over)
    wrong = accounting(counts, block_size)
    if wrong:
        return _none(f"the counts cannot be true: {wrong[0]}")
    length = f"accept length {total.length:.2f} over {over}"
    if not total.histogram:
        return _none(f"this server sends none with {labels.get('mode', 'its')} answers; {length}")
    source = _SOURCE if templated else f"{_SOURCE}, without a chat template"
    figures = tuple(
        Figure(HISTOGRAM, float(steps), "steps", source, total.steps, labels={**labels, "accepted": str(n)})
        for n, steps in enumerate(total.histogram)
    )
    return Sampled(figures, f"sample at batch 1: {length}")


def take_sample(
    session: Session,
    target: Target,
    configuration: Configuration,
    *,
    max_tokens: int,
    report: Reporter,
    api_key: Secret | None,
    shared: dict[str, Any],
) -> Sampled:
    """Send the sample to the configuration that serves. Never raises for what the engine does wrong.

    :param max_tokens: longest answer; 128 at most.
    :param shared: kept by the caller from one configuration to the next: the model's template is applied once.
    :raises UnreachableError: the session ended.
    """
    speculative = target.service.speculative
    try:
        with open_context(session, target, report=report, api_key=api_key, shared=shared) as ctx:
            rendered = ready(ctx, pick_prompts(_PROMPTS))
            shared.update(ctx.shared)
            tokens = fitting(ctx, min(max_tokens, _TOKENS))
            answers = [
                (each.name, ctx.engine.generate(each.given, max_tokens=tokens, timeout=ctx.timeout))
                for each in rendered.prompts
            ]
    except UnreachableError:
        raise
    except (EngineError, Inconclusive, RemoteError) as error:
        return _none(error.message)
    found = histogram_of(
        answers,
        configuration.labels,
        block_size=speculative.block_size if speculative else None,
        templated=rendered.templated,
    )
    return Sampled(found.figures, f"{found.said}; {rendered.note}" if rendered.note else found.said)
