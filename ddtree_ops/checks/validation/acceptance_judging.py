"""Do the drafts of a server pay, and do its figures of them add up? Pure; ``docs/losslessness.md`` has the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddtree_ops.checks.engine import Generation
from ddtree_ops.checks.speculation import DecodeWindow
from ddtree_ops.checks.textquality import judge_text
from ddtree_ops.checks.validation.judging import Judgement
from ddtree_ops.diagnose.figures import above_block, useless
from ddtree_ops.noise import Change
from ddtree_ops.results import Verdict
from ddtree_ops.wording import count

__all__ = [
    "Counts",
    "accounting",
    "by_kind",
    "contradictions",
    "judge_acceptance",
    "judge_said",
    "same_algorithm",
    "total_counts",
]

AGREEMENT = 0.25
"""Share by which the log and the requests may differ: lines are means of some dozen steps, and a line may begin earlier."""
LEAST_STEPS = 10
"""Verify steps that an accept length must rest on."""
LEAST_COUNTED = 0.9
"""Share of the answers that must carry counts."""
_LEAST_LINES = 3
_GARBAGE = 0.25
"""Share of the answers that may be none before their accept length says nothing."""
_ALIASES = {"NEXTN": "EAGLE"}
"""What sglang calls an algorithm once it runs."""


@dataclass(frozen=True)
class Counts:
    """Exact speculative counts of one or more answers.

    :param histogram: verify steps by number of drafts accepted, from 0; empty where the server tells none.
    """

    name: str
    steps: int
    accepted: int
    tokens: int
    requests: int = 1
    histogram: tuple[int, ...] = ()

    @property
    def length(self) -> float | None:
        """Tokens a verify step, the verified one included; None without a step."""
        return (self.accepted + self.steps) / self.steps if self.steps else None

    @classmethod
    def of(cls, name: str, found: Generation) -> Counts | None:
        """Those of one answer; None where it carries none."""
        if found.verify_steps is None or found.accepted_drafts is None:
            return None
        return cls(
            name, found.verify_steps, found.accepted_drafts, found.completion_tokens, 1, found.histogram
        )


def total_counts(name: str, counts: Sequence[Counts]) -> Counts:
    """All of them together; the histogram only where every answer with a step has one."""
    whole = all(each.histogram for each in counts if each.steps)
    size = max((len(each.histogram) for each in counts), default=0) if whole else 0
    return Counts(
        name,
        sum(each.steps for each in counts),
        sum(each.accepted for each in counts),
        sum(each.tokens for each in counts),
        sum(each.requests for each in counts),
        tuple(
            sum(each.histogram[place] for each in counts if place < len(each.histogram))
            for place in range(size)
        ),
    )


def accounting(counts: Sequence[Counts], block_size: int | None) -> list[str]:
    """Counts that cannot be true: what a block cannot hold, more tokens than were sent, a histogram of other sums."""
    found = []
    for each in counts:
        length = each.length
        if block_size is not None and length is not None and above_block(length, block_size):
            found.append(f"{each.name}: {length:.2f} tokens a step exceed the block size {block_size}")
        elif block_size is not None and any(each.histogram[block_size:]):
            most = max(place for place, steps in enumerate(each.histogram) if steps)
            found.append(
                f"{each.name}: {most} drafts accepted in one step, and a block of {block_size} has {block_size - 1}"
            )
        elif each.histogram:
            steps = sum(each.histogram)
            accepted = sum(place * steps_there for place, steps_there in enumerate(each.histogram))
            if (steps, accepted) != (each.steps, each.accepted):
                found.append(
                    f"{each.name}: the histogram holds {accepted} drafts in {steps} steps, the counts say "
                    f"{each.accepted} in {each.steps}"
                )
    return found


def contradictions(total: Counts, decode: DecodeWindow) -> list[str]:
    """Where the log says something else than the requests did, beyond :data:`AGREEMENT`."""
    length = total.length
    if length is None or decode.accept_length is None or len(decode.accept_lengths) < _LEAST_LINES:
        return []
    if abs(decode.accept_length - length) <= AGREEMENT * length:
        return []
    lines = count(len(decode.accept_lengths), "decode line")
    return [f"the log says {decode.accept_length:.2f} tokens a step ({lines}), the requests {length:.2f}"]


def judge_acceptance(
    counts: Sequence[Counts],
    *,
    block_size: int | None,
    floor: float | None,
    decode: DecodeWindow,
    server: float | None = None,
    change: Change | None = None,
    answered: int | None = None,
) -> Judgement:
    """The verdict over all prompts.

    :param counts: of every prompt that was answered with counts.
    :param floor: least accept length that is asked for; None: none is.
    :param server: average that the server tells, over all since the last flush.
    :param change: against earlier runs.
    :param answered: answers that must carry counts: those of two tokens and more. None: as many as do.
    """
    total = total_counts("all prompts", counts)
    length = total.length
    if length is None:
        return Judgement(
            Verdict.INCONCLUSIVE,
            "no accept length to be had: no answer carries speculative counts",
            "is it an sglang whose /generate tells spec_verify_ct?",
        )
    broken = accounting(counts, block_size)
    answered = total.requests if answered is None else answered
    most = max(decode.accept_lengths, default=0.0)
    if block_size is not None and above_block(most, block_size):
        broken.append(f"the log: {most:.2f} tokens a step exceed the block size {block_size}")
    if block_size is not None and server is not None and above_block(server, block_size):
        broken.append(f"/server_info: {server:.2f} tokens a step exceed the block size {block_size}")
    if broken:
        more = f" ({count(len(broken), 'contradiction')})" if len(broken) > 1 else ""
        return Judgement(Verdict.FAIL, f"the accounting is broken: {broken[0]}{more}")
    if total.requests < answered * LEAST_COUNTED:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"{total.requests} of {count(answered, 'answer')} carry speculative counts: the others may be of any length",
            "does a router or another server answer part of the requests?",
        )
    if total.steps < LEAST_STEPS:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"{count(total.steps, 'verify step')} in {count(total.requests, 'answer')}: "
            f"an accept length needs {LEAST_STEPS}",
            "more prompts or longer answers: acceptance: {prompts: 12, max_tokens: 128}",
        )
    of = f" of at most {block_size}" if block_size else ""
    seen = f"accept length {length:.2f}{of} tokens a step ({total.accepted} drafts in {count(total.steps, 'step')})"
    if useless(length):
        return Judgement(
            Verdict.FAIL,
            f"speculation is on and useless: accept length {length:.2f}, every draft was rejected",
            "is it the right drafter for this model, and does the attention backend honour the tree mask?",
        )
    if floor is not None and length < floor:
        return Judgement(Verdict.FAIL, f"{seen} is below the {floor:g} that is asked for")
    if change is not None and change.worse:
        return Judgement(
            Verdict.FAIL, f"{seen}: worse than the median {change.median:.2f} of {count(change.runs, 'run')}"
        )
    odd = contradictions(total, decode)
    if odd:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"{seen}, and {odd[0]}",
            "does somebody else use the engine? Take the host out of the router and run it again",
        )
    return Judgement(Verdict.PASS, seen)


def same_algorithm(configured: str, running: str) -> bool:
    """Whether a server runs the algorithm that it was given, by the names that sglang has for it."""
    one, other = configured.upper(), running.upper()
    return _ALIASES.get(one, one) == _ALIASES.get(other, other)


def judge_said(named: Sequence[tuple[str, Generation]], *, quality: bool) -> Judgement | None:
    """Why the answers are none, so that their accept length says nothing; None where they are.

    :param quality: False: texts are looked at for being there, not for sense.
    """
    wordless = [name for name, answer in named if answer.completion_tokens and not answer.text.strip()]
    if named and len(wordless) > len(named) * _GARBAGE:
        return Judgement(
            Verdict.FAIL if quality else Verdict.INCONCLUSIVE,
            f"{len(wordless)} of {count(len(named), 'answer')} have tokens and no text ({wordless[0]}): "
            "their accept length says nothing",
        )
    if not quality:
        return None
    found = [
        (name, reason)
        for name, answer in named
        if (reason := judge_text(answer.text, completion_tokens=answer.completion_tokens).reason) is not None
    ]
    if len(found) <= len(named) * _GARBAGE:
        return None
    name, reason = found[0]
    return Judgement(
        Verdict.FAIL,
        f"{len(found)} of {count(len(named), 'answer')} garbage: their accept length says nothing: {name}: {reason}",
        nonsense=True,
    )


def by_kind(named: Mapping[str, Sequence[Counts]]) -> dict[str, Counts]:
    """Totals by kind of prompt; kinds without counts are left out."""
    return {kind: total_counts(kind, counts) for kind, counts in named.items() if counts}
