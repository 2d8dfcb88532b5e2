"""From numbers to meaning: which multiple of which setting a figure is, and the texts that say so.

A signature file may name a solver; it decides whether the numbers of a match fit the signature at all, and what
they mean. Solvers are pure and never assume particular numbers.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from ddtree_ops.diagnose.events import Frame
from ddtree_ops.diagnose.facts import ServiceFacts

__all__ = [
    "SOLVERS",
    "Reading",
    "Solution",
    "Solver",
    "explain_sizes",
    "fill",
    "graph_size_readings",
    "meanings",
    "tail",
    "template_fields",
]

_MAX_BLOCK = 64
_MAX_BUDGET = 1024
_MAX_BATCH = 512


@dataclass(frozen=True)
class Reading:
    """One way to read two sizes: ``a = bs * block_size`` and ``b = bs * (budget + 1)``."""

    bs: int
    block_size: int
    budget: int

    def __str__(self) -> str:
        a, b = self.bs * self.block_size, self.bs * (self.budget + 1)
        return f"{a} = {self.bs} x block_size {self.block_size}, {b} = {self.bs} x (budget {self.budget} + 1)"


@dataclass(frozen=True)
class Solution:
    """What the numbers of a match mean: values for the templates of the signature."""

    values: Mapping[str, str] = field(default_factory=dict)


Solver = Callable[[Mapping[str, str], ServiceFacts, Sequence[Frame]], Solution | None]
"""Groups of the match, facts, frames of the exception (empty where only its line was seen). None: does not fit."""


def graph_size_readings(a: int, b: int, block_size: int | None, budget: int | None) -> list[Reading]:
    """All ``(bs, block_size, budget)`` with ``a = bs * block_size`` and ``b = bs * (budget + 1)``.

    A known setting binds, an unknown one is free within plausible bounds. A tree smaller than the block fails the same
    way (the copy wants equal sizes), but only known settings tell it from other mismatches: else
    ``budget + 1 > block_size``. At most one reading if both are known.
    """
    known = block_size is not None and budget is not None
    if min(a, b) <= 0 or a == b or (b < a and not known):
        return []
    common = gcd(a, b)
    readings = []
    for bs in range(1, min(common, _MAX_BATCH) + 1):
        if common % bs:
            continue
        reading = Reading(bs, a // bs, b // bs - 1)
        if block_size is not None and reading.block_size != block_size:
            continue
        if budget is not None and reading.budget != budget:
            continue
        if block_size is None and not 2 <= reading.block_size <= _MAX_BLOCK:
            continue
        if budget is None and reading.budget > _MAX_BUDGET:
            continue
        readings.append(reading)
    return readings


def _usual(reading: Reading) -> tuple[int, int]:
    odd = sum(1 for number in (reading.block_size, reading.budget) if number & (number - 1))
    return odd, reading.bs


def _in_graph_runner(frames: Sequence[Frame]) -> bool:
    return any("cuda_graph_runner" in frame.file for frame in frames)


def _at(frames: Sequence[Frame]) -> str:
    frame = next(
        (frame for frame in reversed(frames) if "/sglang/" in frame.file), frames[-1] if frames else None
    )
    return f"{tail(frame.file)}:{frame.line} ({frame.function})" if frame else ""


def tail(path: str) -> str:
    """A file's path below ``sglang/``, or its name."""
    return path.rpartition("/sglang/")[2] if "/sglang/" in path else path.rpartition("/")[2]


def _graph_size(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    if facts.algorithm is not None and facts.algorithm.upper() != "DDTREE":
        return None
    readings = graph_size_readings(int(groups["a"]), int(groups["b"]), facts.block_size, facts.budget)
    known = facts.block_size is not None and facts.budget is not None
    inside = _in_graph_runner(frames)
    if not readings or (not known and frames and not inside):
        return None
    readings.sort(key=_usual)
    text = str(readings[0])
    if not known:
        others = [f"bs {r.bs}: block_size {r.block_size}, budget {r.budget}" for r in readings[1:6]]
        if others:
            text += f" (or {'; '.join(others)})"
        text += " [from the numbers alone: the service's settings are not known]"
    elif facts.learned & {"block_size", "budget"}:
        text += " [settings read from the log's server_args]"
    host = facts.host or "HOST"
    if facts.patched is None:
        patch = f"the deployed runner most likely lacks patch 0001: check with ddtree-ops patch check {host}"
        remedy = f"see whether the runner is patched (ddtree-ops patch check {host}), then deploy the patched runtime: ddtree-ops deploy {host}"
    elif facts.patched:
        where = f" at {_at(frames)}" if frames and not inside else ""
        patch = (
            f"the deployed runner HAS patch 0001, so another consumer still counts block_size tokens{where}, "
            "or the running process is older than the deployed files"
        )
        remedy = (
            "restart the unit if it was not restarted since the deployment; else compare the other consumers "
            "(attention backend's num_draft_tokens, get_spec_info, req_to_token width) with budget + 1"
        )
    else:
        patch = "the deployed runner lacks patch 0001"
        remedy = f"deploy the patched runtime: ddtree-ops deploy {host}"
    return Solution({"reading": text, "patch": patch, "fix": remedy, "bs": str(readings[0].bs)})


def _context_overflow(
    groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]
) -> Solution | None:
    a, b = int(groups["a"]), int(groups["b"])
    context = facts.context_length
    if not 0 < b - a <= _MAX_BUDGET + 1 or a < 512:
        return None
    if context is not None and not 0 <= a - context <= _MAX_BUDGET + 1:
        return None
    if context is None:
        limit = f"{a} looks like the context length (not known here)"
    else:
        limit = f"{a} = the context length {context}" + (f" + {a - context}" if a != context else "")
    return Solution({"over": str(b - a), "limit": limit})


def _hidden_width(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    expected, got = int(groups["expected"]), int(groups["got"])
    if min(expected, got) < 256:
        return None
    for wide, narrow in ((expected, got), (got, expected)):
        if wide % narrow == 0 and 2 <= wide // narrow <= 12:
            return Solution(
                {"ratio": f"{wide} = {wide // narrow} x {narrow}: the number of captured layers differs"}
            )
    return Solution({"ratio": f"{expected} and {got} are no multiples of each other"})


def _vocabulary(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    a, b = int(groups["a"]), int(groups["b"])
    return Solution() if min(a, b) >= 256 and a != b else None


def _kernel_limit(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    required, limit = int(groups["required"]), int(groups["limit"])
    if required <= limit:
        return None
    return Solution(
        {
            "over": str(required - limit),
            "limit_kib": f"{limit / 1024:.0f}",
            "required_kib": f"{required / 1024:.0f}",
        }
    )


SOLVERS: dict[str, tuple[Solver, frozenset[str]]] = {
    "graph-size": (_graph_size, frozenset({"reading", "patch", "fix", "bs"})),
    "context-overflow": (_context_overflow, frozenset({"over", "limit"})),
    "hidden-width": (_hidden_width, frozenset({"ratio"})),
    "vocabulary": (_vocabulary, frozenset()),
    "kernel-limit": (_kernel_limit, frozenset({"over", "limit_kib", "required_kib"})),
}
"""Solver and the template fields it gives, under the name a signature file uses."""


def _settings(facts: ServiceFacts) -> list[tuple[str, int]]:
    named: list[tuple[str, int | None]] = [
        ("block_size", facts.block_size),
        ("(budget + 1)", facts.verify_tokens),
        ("budget", facts.budget),
        ("topk_cap", facts.topk_cap),
        ("context length", facts.context_length),
        ("cuda_graph_max_bs", facts.cuda_graph_max_bs),
        ("max_running_requests", facts.max_running_requests),
        ("tensor_parallel", facts.tensor_parallel),
    ]
    return [(name, value) for name, value in named if value and value > 1]


def meanings(number: int, facts: ServiceFacts, limit: int = 3) -> list[str]:
    """Ways to read ``number`` as a setting, a small multiple of one, or one plus a little; best first."""
    found: list[tuple[int, str]] = []
    for name, value in _settings(facts):
        if number == value:
            found.append((0, f"{name} {value}"))
        elif number % value == 0 and number // value <= _MAX_BATCH:
            found.append((number // value, f"{number // value} x {name} {value}"))
        elif value >= 512 and 0 < number - value <= _MAX_BUDGET + 1:
            found.append((1, f"{name} {value} + {number - value}"))
    return [text for _, text in sorted(found, key=lambda item: item[0])[:limit]]


_SIZES = re.compile(
    r"size of tensor a \((?P<a>\d{1,12})\) must match the size of tensor b \((?P<b>\d{1,12})\)"
    r"(?: at non-singleton dimension (?P<dim>\d{1,3}))?"
)


def explain_sizes(text: str, facts: ServiceFacts) -> str:
    """For a size mismatch that no signature explains: what each number could be. Empty for any other text."""
    match = _SIZES.search(text)
    if match is None:
        return ""
    parts = []
    for name in ("a", "b"):
        number = int(match[name])
        read = meanings(number, facts)
        parts.append(f"{number}: {', or '.join(read) if read else 'no known setting or multiple of one'}")
    known = ", ".join(f"{name} {value}" for name, value in _settings(facts)) or "none"
    return (
        f"No setting explains both sizes together. Candidates: {'; '.join(parts)}. Settings known: {known}."
    )


class _Formatter(string.Formatter):
    def __init__(self) -> None:
        self.gaps = 0

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = kwargs.get(str(key))
        if value is None or value == "":
            self.gaps += 1
            return "unknown"
        return value


_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """``{name}`` replaced; ``[[ ... {name} ... ]]`` is left out where one of its names is not known."""

    def optional(match: re.Match[str]) -> str:
        formatter = _Formatter()
        text = formatter.vformat(match[1], (), values)
        return "" if formatter.gaps else text.replace("{", "{{").replace("}", "}}")

    text = _Formatter().vformat(_OPTIONAL.sub(optional, template), (), values)
    return " ".join(text.split())


def template_fields(template: str) -> set[str]:
    """Names used in a template."""
    plain = template.replace("[[", "").replace("]]", "")
    return {name for _, name, _, _ in string.Formatter().parse(plain) if name}
