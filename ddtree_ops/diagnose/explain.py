"""From numbers to meaning: which multiple of which setting a figure is, and the texts that say so.

A signature file may name a solver; it decides whether the numbers of a match fit the signature at all, and what
they mean. Solvers are pure and never assume particular numbers.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, gcd
from typing import Any

from ddtree_ops.diagnose.events import Frame
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.tables import EXEC_STATUS, SIGNALS, UNIT_RESULTS, XID

__all__ = [
    "SOLVERS",
    "Reading",
    "Solution",
    "Solver",
    "explain_sizes",
    "fill",
    "graph_size_readings",
    "joint_meanings",
    "meanings",
    "named_settings",
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
    frame = next((frame for frame in reversed(frames) if frame.engine), frames[-1] if frames else None)
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
        text += " [settings read from the log]"
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


_MOE_BYTES = frozenset({147456})
"""Shared memory that the fused-MoE kernel asked for in reports: tells the kernel where no frame does."""


def _kernel_values(groups: Mapping[str, str]) -> Solution | None:
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


_ATTENTION_BYTES = {
    106496: "extend_attention asked for as much in reports",
    131072: "context_attention_fwd, which encodes pictures, asked for as much in reports",
}
"""Shared memory that attention kernels asked for in reports: sglang pull requests 14311, 17908, 27962."""


def _kernel_limit(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    required = int(groups["required"])
    if not frames and required in _MOE_BYTES:
        return None
    found = _kernel_values(groups)
    if found is None:
        return None
    if frames:
        kernel = "Triton's attention kernel was compiled for block sizes that need"
        doubt = ""
    else:
        kernel = "A Triton kernel was compiled for block sizes that need"
        seen = f" ({_ATTENTION_BYTES[required]})" if required in _ATTENTION_BYTES else ""
        doubt = f"Which kernel is not known from this line alone; most often it is attention's{seen}: the traceback above it says."
    trees = "yes" if (facts.algorithm or "").upper() == "DDTREE" else ""
    return Solution({**found.values, "kernel": kernel, "doubt": doubt, "trees": trees and "a tree mask"})


def _kernel_limit_moe(
    groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]
) -> Solution | None:
    found = _kernel_values(groups)
    if found is None or not (frames or int(groups["required"]) in _MOE_BYTES):
        return None
    if frames:
        return Solution({**found.values, "kernel": "The fused-MoE kernel's configuration needs", "doubt": ""})
    doubt = (
        "Which kernel is not known from this line alone; most often it is the fused-MoE kernel: its fp8 default for large "
        "batches (blocks 128 x 256 x 128, 4 stages) needs just as much. The traceback above it says."
    )
    return Solution({**found.values, "kernel": "A Triton kernel's configuration needs", "doubt": doubt})


def _kernel_limit_any(
    groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]
) -> Solution | None:
    found = _kernel_values(groups)
    return Solution({**found.values, "place": _at(frames)}) if found else None


_PLACES = (
    "while the weights are loaded (mem-fraction-static plays no part: more GPUs or a smaller quantisation), while the KV pool "
    "is made (lower mem-fraction-static), while graphs are captured (lower cuda-graph-max-bs) or in a step (lower "
    "chunked-prefill-size or max-running-requests)"
)


def _oom_place(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    if frames:
        return Solution(
            {
                "place": "Its frames are none of a load of weights, of the KV pool or of graph capture, so a step needed "
                "more than the static pools leave.",
                "fix": "lower mem-fraction-static, chunked-prefill-size or max-running-requests",
            }
        )
    return Solution(
        {
            "place": f"This line alone does not say where it happened. There are four cases: {_PLACES}.",
            "fix": "paste the traceback above it, whose frames tell the four cases apart",
        }
    )


_UNITS = {"K": 2.0**-20, "M": 2.0**-10, "G": 1.0}


def _gib(text: str) -> float | None:
    found = re.fullmatch(r"([\d.]+) ([KMG])iB", text)
    try:
        return float(found[1]) * _UNITS[found[2]] if found else None
    except ValueError:
        return None


def _pool_fraction(
    groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]
) -> Solution | None:
    """The fraction less what was missing: a bound, as buffers after the one that failed were not asked for yet."""
    size, free, total = (_gib(groups.get(name, "")) for name in ("size", "free", "total"))
    fraction = facts.mem_fraction_static
    if size is None or free is None or not total or not fraction or size <= free:
        return Solution({"first": "", "missing": ""})
    first = floor((fraction - (size - free) / total) * 100) / 100
    if not 0 < first < fraction:
        return Solution({"first": "", "missing": ""})
    return Solution({"first": f"{first:.2f}", "missing": f"{size - free:.2f} GiB of {total:.2f} GiB"})


def _suspect(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    if (facts.algorithm or "DDTREE").upper() != "DDTREE" or facts.budget is None:
        return Solution({"suspect": ""})
    if facts.patched:
        text = (
            f"The deployed runner sizes its buffers for the {facts.verify_tokens} tokens of budget {facts.budget} (patch 0001), "
            "so these are not the first suspect."
        )
    else:
        text = (
            f"With budget {facts.budget} a mask or an index sized for block_size instead of {facts.verify_tokens} tokens is the "
            "first suspect."
        )
    return Solution({"suspect": text})


def _taken_port(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    names = ("bound", "busy", "zmq", "store", "socket", "plain")
    return Solution({"number": next((groups[name] for name in names if groups.get(name)), "")})


_SERVER_NAME = re.compile(r"(?:python|sglang|sgl|pt_main|pt_scheduler)")
_OF_PROGRAM = frozenset({8, 13, 31, 43, 45})
_FOLLOWING = frozenset({43, 45})
_NOTED = frozenset({63, 92})


def _xid_values(groups: Mapping[str, str]) -> Solution | None:
    number, name = int(groups["number"]), groups.get("name", "").strip()
    if number in _OF_PROGRAM and name and not _SERVER_NAME.match(name):
        return None
    meaning, fix = XID.get(
        number, ("it is not among those this tool knows", "look it up in NVIDIA's Xid catalog")
    )
    if number == 154 and groups.get("action"):
        meaning = f"the driver says which recovery the GPU needs now: {groups['action']}"
    ours = _SERVER_NAME.match(name) and groups.get("pid")
    return Solution({"meaning": meaning, "fix": fix, "who": f"{name}, pid {groups['pid']}" if ours else ""})


def _xid(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    number = int(groups["number"])
    return _xid_values(groups) if number in XID and number not in _FOLLOWING | _NOTED else None


def _xid_after(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    return _xid_values(groups) if int(groups["number"]) in _FOLLOWING else None


def _xid_note(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    number = int(groups["number"])
    return _xid_values(groups) if number in _NOTED or number not in XID else None


def _cuda_version(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    found = int(groups.get("found", "0"))
    return Solution({"offers": f"{found // 1000}.{found % 1000 // 10}" if found else ""})


def _exit_code(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    code = int(groups["code"])
    if code < 0:
        meaning = SIGNALS.get(-code, f"ended by signal {-code}")
    elif code > 128 and code - 128 in SIGNALS:
        meaning = SIGNALS[code - 128]
    else:
        meaning = "an end of its own accord, with its last words before this line if it had any"
    return Solution({"meaning": meaning})


_STEPS = {
    "exec": "EXEC",
    "mount": "NAMESPACE",
    "directory": "CHDIR",
    "user": "USER",
    "group": "GROUP",
    "credentials": "CREDENTIALS",
}
"""Group of a match -> systemd's step, for lines that do not name it."""


def _exec_status(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    if "status" in groups:
        number = int(groups["status"])
    else:
        step = groups.get("step") or next((name for key, name in _STEPS.items() if key in groups), "")
        number = next((number for number, found in EXEC_STATUS.items() if found[0] == step), 0)
    entry = EXEC_STATUS.get(number)
    if entry is None:
        return None
    name, meaning, fix = entry
    return Solution({"name": f"{number}/{name}", "meaning": meaning, "fix": fix})


def _unit_result(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    return Solution({"meaning": UNIT_RESULTS.get(groups["result"], groups["result"])})


def _victim(groups: Mapping[str, str]) -> Solution:
    rss = "".join(groups.get(name, "") for name in ("rss", "rss2"))
    return Solution({"rss_gib": f"{int(rss) / 2**20:.0f}" if rss and int(rss) >= 2**20 else ""})


def _victim_ours(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    name = groups.get("name", "")
    return _victim(groups) if not name or _SERVER_NAME.match(name) else None


def _victim_other(groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]) -> Solution | None:
    return None if _SERVER_NAME.match(groups["name"]) else _victim(groups)


def _fp4_on_sm120(facts: ServiceFacts) -> bool:
    return facts.gpu == "sm120" and "fp4" in (facts.model or "").lower()


def _scale_suspicious(
    groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]
) -> Solution | None:
    return Solution() if _fp4_on_sm120(facts) else None


def _scale_harmless(
    groups: Mapping[str, str], facts: ServiceFacts, frames: Sequence[Frame]
) -> Solution | None:
    return None if _fp4_on_sm120(facts) else Solution()


SOLVERS: dict[str, tuple[Solver, frozenset[str]]] = {
    "graph-size": (_graph_size, frozenset({"reading", "patch", "fix", "bs"})),
    "context-overflow": (_context_overflow, frozenset({"over", "limit"})),
    "hidden-width": (_hidden_width, frozenset({"ratio"})),
    "vocabulary": (_vocabulary, frozenset()),
    "kernel-limit": (
        _kernel_limit,
        frozenset({"over", "limit_kib", "required_kib", "kernel", "doubt", "trees"}),
    ),
    "kernel-limit-moe": (
        _kernel_limit_moe,
        frozenset({"over", "limit_kib", "required_kib", "kernel", "doubt"}),
    ),
    "oom-place": (_oom_place, frozenset({"place", "fix"})),
    "pool-fraction": (_pool_fraction, frozenset({"first", "missing"})),
    "suspect": (_suspect, frozenset({"suspect"})),
    "taken-port": (_taken_port, frozenset({"number"})),
    "kernel-limit-any": (_kernel_limit_any, frozenset({"over", "limit_kib", "required_kib", "place"})),
    "xid": (_xid, frozenset({"meaning", "fix", "who"})),
    "xid-after": (_xid_after, frozenset({"meaning", "fix", "who"})),
    "xid-note": (_xid_note, frozenset({"meaning", "fix", "who"})),
    "cuda-version": (_cuda_version, frozenset({"offers"})),
    "exit-code": (_exit_code, frozenset({"meaning"})),
    "exec-status": (_exec_status, frozenset({"name", "meaning", "fix"})),
    "unit-result": (_unit_result, frozenset({"meaning"})),
    "victim-ours": (_victim_ours, frozenset({"rss_gib"})),
    "victim-other": (_victim_other, frozenset({"rss_gib"})),
    "scale-format-suspicious": (_scale_suspicious, frozenset()),
    "scale-format-harmless": (_scale_harmless, frozenset()),
}
"""Solver and the template fields it gives, under the name a signature file uses."""


_SETTINGS: tuple[tuple[str, str], ...] = (
    ("block_size", "block_size"),
    ("(budget + 1)", "verify_tokens"),
    ("budget", "budget"),
    ("topk_cap", "topk_cap"),
    ("page_size", "page_size"),
    ("cuda_graph_max_bs", "cuda_graph_max_bs"),
    ("max_running_requests", "max_running_requests"),
    ("tensor_parallel", "tensor_parallel"),
    ("hidden size", "hidden_size"),
    ("drafter's hidden size", "draft_hidden_size"),
    ("vocabulary", "vocab_size"),
    ("context length", "context_length"),
    ("chunked_prefill_size", "chunked_prefill_size"),
    ("KV tokens", "kv_tokens"),
)
"""Name in texts and attribute of the facts; of two equal numbers the first named is the likelier reading."""
_TOKENS = ("block_size", "(budget + 1)")
_LARGE = 512
_MAX_TIMES = 16


def _settings(facts: ServiceFacts) -> list[tuple[str, int]]:
    named = [(name, getattr(facts, attribute)) for name, attribute in _SETTINGS]
    return [(name, int(value)) for name, value in named if value and value > 1]


def _factor(times: int, text: str) -> str:
    return text if times == 1 else f"{times} x {text}"


def _graphable(times: int) -> bool:
    """A batch size that graphs are captured for by default: powers of 2, and multiples of 8 above them."""
    return times & (times - 1) == 0 or times % 8 == 0


def meanings(number: int, facts: ServiceFacts, limit: int | None = None) -> list[str]:
    """Ways to read ``number`` by the settings; best first.

    A setting itself; one shared among the ranks; so many requests of ``block_size`` or ``budget + 1`` tokens; a small
    multiple of another; a product of two, where nothing simpler fits; a large setting and a little. Of settings of one
    value all are named where the number is that value, else the first.

    :param limit: at most so many; None: all.
    """
    found: list[tuple[tuple[int, int, int], str]] = []
    settings = _settings(facts)
    ranks = facts.tensor_parallel or 1
    used: set[int] = set()
    for place, (name, value) in enumerate(settings):
        times = number // value
        if number == value:
            found.append(((0, 0, place), f"{name} {value}"))
            continue
        if value in used:
            continue
        used.add(value)
        if number > 0 and number % value == 0:
            kind = 2 if name in _TOKENS and _graphable(times) else 3 if name in _TOKENS else 4
            if times <= (_MAX_BATCH if name in _TOKENS else _MAX_TIMES):
                found.append(((kind, times, place), f"{times} x {name} {value}"))
        elif value >= _LARGE and 0 < number - value <= _MAX_BUDGET + 1:
            found.append(((6, 0, place), f"{name} {value} + {number - value}"))
        elif 1 < ranks < value and value >= _LARGE and value % ranks == 0 and number == value // ranks:
            found.append(((1, 0, place), f"{name} {value} / tensor_parallel {ranks}"))
    if number > 0 and not any(key[0] < 2 for key, _ in found):
        found += _products(number, settings)
    return [text for _, text in sorted(found, key=lambda item: item[0])[:limit]]


def _products(number: int, settings: Sequence[tuple[str, int]]) -> list[tuple[tuple[int, int, int], str]]:
    """``number`` as a product of two settings of which one counts tokens a request."""
    found = []
    for place, (name, value) in enumerate(settings):
        for other, second in settings[place + 1 :]:
            if name in _TOKENS and other != "budget" and second < _LARGE and number == value * second:
                found.append(((5, 1, place), f"{name} {value} x {other} {second}"))
    return found


def joint_meanings(a: int, b: int, facts: ServiceFacts) -> list[str]:
    """Ways to read two numbers as the same number of requests times two settings; best first."""
    found: list[tuple[tuple[int, int, int], str]] = []
    settings = _settings(facts)
    for first, (name, value) in enumerate(settings):
        times = a // value
        if a <= 0 or a % value or times > _MAX_BATCH:
            continue
        for second, (other, wanted) in enumerate(settings):
            if other == name or wanted == value or b != times * wanted:
                continue
            usual = sum(1 for word in (name, other) if word not in _TOKENS)
            text = f"{a} = {times} x {name} {value} and {b} = {times} x {other} {wanted}"
            found.append(((usual, times, first + second), text))
    return [text for _, text in sorted(found, key=lambda item: item[0])]


_N = r"(\d{1,12})"
_PAIRS: tuple[re.Pattern[str], ...] = (
    re.compile(rf"size of tensor a \({_N}\) must match the size of tensor b \({_N}\)"),
    re.compile(rf"expanded size of the tensor \({_N}\) must match the existing size \({_N}\)"),
    re.compile(rf"[Ee]xpected size {_N} but got size {_N}"),
)
_SHAPE = re.compile(rf"shape '\[((?:-?\d{{1,12}}(?:, )?){{1,8}})\]' is invalid for input of size {_N}")
_MATRICES = re.compile(rf"mat1 and mat2 shapes cannot be multiplied \({_N}x{_N} and {_N}x{_N}\)")
_INDEX = re.compile(rf"index {_N} is out of bounds for (?:dimension|axis) (\d{{1,3}}) with size {_N}")


def _candidates(numbers: Sequence[int], facts: ServiceFacts) -> str:
    parts = []
    for number in dict.fromkeys(numbers):
        read = meanings(number, facts)
        parts.append(f"{number}: {', or '.join(read) if read else 'no known setting or multiple of one'}")
    known = ", ".join(f"{name} {value}" for name, value in _settings(facts)) or "none"
    return f"Candidates: {'; '.join(parts)}. Settings known: {known}."


def _pair(a: int, b: int, facts: ServiceFacts) -> str:
    joint = joint_meanings(a, b, facts)
    if joint:
        more = f" (or {'; '.join(joint[1:3])})" if len(joint) > 1 else ""
        return f"Both sizes are settings times the same batch size: {joint[0]}{more}."
    return f"No setting explains both sizes together. {_candidates((a, b), facts)}"


def _shape(numbers: Sequence[int], size: int, facts: ServiceFacts) -> str:
    fixed = [number for number in numbers if number > 0]
    holds = 1
    for number in fixed:
        holds *= number
    if holds and size % holds == 0:
        relation = f"{size} = {size // holds} x the {holds} that this shape holds."
        numbers = [size, size // holds, *fixed]
    else:
        relation = f"{size} is no multiple of the {holds} that this shape holds."
        numbers = [size, *fixed]
    if joint := joint_meanings(size, holds, facts):
        return f"The shape holds {holds}: {joint[0]}, the same batch size."
    explained = [number for number in numbers if number > 1]
    if all(meanings(number, facts) for number in explained):
        parts = "; ".join(f"{number}: {', or '.join(meanings(number, facts, 3))}" for number in explained)
        return f"{relation} By the settings: {parts}."
    return f"{relation} No setting explains all of these numbers. {_candidates(explained, facts)}"


def explain_sizes(text: str, facts: ServiceFacts) -> str:
    """What the numbers of an error about sizes, shapes or indices could be. Empty for any other text.

    Understood: ``size of tensor a (X) must match ... b (Y)``, ``Expected size X but got size Y``, ``shape '[a, b]' is
    invalid for input of size N``, ``mat1 and mat2 shapes cannot be multiplied (AxB and CxD)``, ``index N is out of
    bounds for dimension D with size M``.
    """
    for pattern in _PAIRS:
        match = pattern.search(text)
        if match is not None:
            return _pair(int(match[1]), int(match[2]), facts)
    if match := _SHAPE.search(text):
        return _shape([int(part) for part in match[1].split(", ") if part], int(match[2]), facts)
    if match := _MATRICES.search(text):
        rows, a, b, _ = (int(part) for part in match.groups())
        at = ", or ".join(meanings(rows, facts, 2)) if rows > 1 else ""
        return f"{a} must equal {b}. {_pair(a, b, facts)}" + (f" The {rows} rows: {at}." if at else "")
    if match := _INDEX.search(text):
        index, size = int(match[1]), int(match[3])
        over = index - size + 1
        start = f"Index {index} is {over} beyond the last, {size - 1}."
        if read := meanings(size, facts, 3):
            return f"{start} {size}: {', or '.join(read)}."
        return f"{start} No setting explains {size}. {_candidates((size, over), facts)}"
    return ""


def named_settings(text: str) -> tuple[str, ...]:
    """Fields of ``ServerArgs`` that an explanation names, in the order in which it names them."""
    places = {
        field: text.find(name)
        for name, field in _NAMED.items()
        if re.search(rf"(?<![\w]){re.escape(name)}", text)
    }
    return tuple(sorted(places, key=lambda field: places[field]))


_NAMED = {
    "block_size": "speculative_num_draft_tokens",
    "budget": "speculative_ddtree_budget",
    "topk_cap": "speculative_ddtree_topk_cap",
    "page_size": "page_size",
    "cuda_graph_max_bs": "cuda_graph_max_bs",
    "max_running_requests": "max_running_requests",
    "context length": "context_length",
    "chunked_prefill_size": "chunked_prefill_size",
}


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
