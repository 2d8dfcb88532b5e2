"""What the GPU run reads, judges and counts: functions of text and numbers, without a GPU, torch or a server.

Standard library only: the machine of a run may have nothing else.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "EPSILON",
    "NEAR_TIE_RULE",
    "apply_patch",
    "break_even",
    "captured",
    "decode_lines",
    "figure",
    "first_difference",
    "judge",
    "mask_machine",
    "period",
    "running_sizes",
    "spread",
    "step_rounds",
    "step_times",
    "tail",
    "times_lines",
    "times_shares",
    "verdict",
]

EPSILON = {"bfloat16": 0.2, "float32": 1e-3}
"""Nats within which two tokens count as a near tie, by the target's dtype.

bfloat16: for the tiny models of this run, a difference of two log-probabilities computed in bfloat16 was seen off by
up to 0.145 from float64 (99 % below 0.11; 1152 positions, on a CPU); two bfloat16 computations can be apart by twice
that. Of all positions 5 % have a gap below 0.18, so a wrong token would seldom hide behind the rule.
"""

NEAR_TIE_RULE = (
    "Outputs are compared with those of the plain server (batch size 1, greedy) up to the first difference. There "
    "the plain server is asked again for the prompt and the common output (one token, temperature 0, the 5 best "
    "log-probabilities). It is a near tie if both tokens are among the 5, the better of them is within epsilon of the "
    "best, and they are less than epsilon apart; anything else is a mismatch. What follows a near tie is another "
    f"text and is not compared. epsilon in nats: {EPSILON}."
)

_DECODE = re.compile(
    r"Decode batch, #running-req: (?P<running>\d+).*?(?:accept len: (?P<accept>[\d.]+).*?)?"
    r"cuda graph: (?P<graph>True|False), gen throughput \(token/s\): (?P<rate>[\d.]+)"
)
_PREFILL = re.compile(r"^.*Prefill batch.*$", re.MULTILINE)
_TIMES = re.compile(r"DDTREE times: (?P<rest>.*)")
_PAIR = re.compile(r"(\w+)=([\d.]+)")
_CAPTURE = re.compile(r"Capture cuda graph bs \[([\d, ]+)\]")
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_PRIVATE = re.compile(r"(?<![.\d])(?:10|172\.(?:1[6-9]|2\d|3[01])|192\.168)(?:\.\d{1,3}){2,3}(?![.\d])")


def apply_patch(diff: str, read: Callable[[str], str]) -> dict[str, str]:
    """Apply a unified diff without fuzz: every line of context must stand where the diff says.

    Args:
        diff: text of the patch, with ``a/`` and ``b/`` before the paths.
        read: content of a file by its path in the tree.

    Returns:
        New content by path.

    Raises:
        ValueError: a hunk does not fit, or there is none.
    """
    lines = diff.splitlines()
    done: dict[str, str] = {}
    path, place, number = "", 0, 0
    source: list[str] = []
    result: list[str] = []

    def close() -> None:
        if path:
            done[path] = "".join([*result, *source[place:]])

    while number < len(lines):
        line = lines[number]
        if line.startswith("--- a/") and number + 1 < len(lines) and lines[number + 1].startswith("+++ b/"):
            close()
            path = lines[number + 1][6:].split("\t")[0]
            source, result, place = read(path).splitlines(keepends=True), [], 0
            number += 2
            continue
        hunk = _HUNK.match(line)
        if not hunk or not path:
            number += 1
            continue
        start, old = int(hunk[1]) - 1, int(hunk[2] or 1)
        new = int(hunk[4] or 1)
        if start < place or start + old > len(source):
            raise ValueError(f"{path}: hunk at line {start + 1} does not fit a file of {len(source)} lines")
        result += source[place:start]
        place = start
        number += 1
        while old or new:
            if number >= len(lines):
                raise ValueError(f"{path}: the hunk at line {start + 1} is cut off")
            sign, text = lines[number][:1] or " ", lines[number][1:]
            number += 1
            if sign == "\\":
                continue
            if sign in " -":
                if place >= len(source) or source[place].rstrip("\r\n") != text:
                    seen = source[place].rstrip("\r\n") if place < len(source) else "the end"
                    raise ValueError(f"{path}:{place + 1}: the patch expects {text!r}, the file has {seen!r}")
                if sign == " ":
                    result.append(source[place])
                    new -= 1
                place += 1
                old -= 1
            elif sign == "+":
                result.append(text + "\n")
                new -= 1
            else:
                raise ValueError(f"{path}: not a line of a hunk: {lines[number - 1]!r}")
    close()
    if not done:
        raise ValueError("the patch changes no file")
    return done


def mask_machine(text: str, names: Mapping[str, str]) -> str:
    """Replace what names a machine: the keys of ``names`` (paths, a host name) and private addresses.

    A key is replaced where it is not part of a longer name; longer keys first.
    """
    for key in sorted((key for key in names if key not in ("", "/")), key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(key)}(?![\w-])", lambda _, k=key: names[k], text)
    return _PRIVATE.sub("192.0.2.1", text)


def first_difference(expected: Sequence[int], seen: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing; None if the sequences are equal."""
    for index, (left, right) in enumerate(zip(expected, seen, strict=False)):
        if left != right:
            return index
    return None if len(expected) == len(seen) else min(len(expected), len(seen))


def period(tokens: Sequence[int], longest: int = 12) -> int | None:
    """Least period, up to ``longest``, of the second half of a text; None if it does not repeat itself."""
    half = tokens[len(tokens) // 2 :]
    for step in range(1, min(longest, len(half) - 1) + 1):
        if all(left == right for left, right in zip(half, half[step:], strict=False)):
            return step
    return None


def judge(
    expected: Sequence[Sequence[int]],
    seen: Sequence[Sequence[int]],
    ask: Callable[[int, int], Sequence[tuple[float, int]]],
    epsilon: float,
) -> dict[str, Any]:
    """Compare outputs by :data:`NEAR_TIE_RULE`.

    Args:
        expected, seen: output tokens by request.
        ask: best log-probabilities with their tokens, best first, that the plain server gives for the token at
            ``(request, place)``.
        epsilon: nats.

    Returns:
        ``requests``, ``equal``, ``near_ties`` and ``mismatches`` (what differs, with the gap in nats) and ``passed``.
    """
    ties: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    equal = 0
    for index in range(max(len(expected), len(seen))):
        if index >= len(seen) or index >= len(expected):
            wrong.append({"request": index, "why": "no output to compare"})
            continue
        place = first_difference(expected[index], seen[index])
        if place is None:
            equal += 1
            continue
        if place >= len(expected[index]) or place >= len(seen[index]):
            lengths = [len(expected[index]), len(seen[index])]
            wrong.append({"request": index, "place": place, "why": "other length", "lengths": lengths})
            continue
        plain, other = expected[index][place], seen[index][place]
        row: dict[str, Any] = {"request": index, "place": place, "plain": plain, "other": other}
        try:
            best = list(ask(index, place))
        except Exception as error:
            wrong.append(row | {"why": f"the plain server did not answer: {error!r}"[:300]})
            continue
        found = {token: value for value, token in best}
        if plain not in found or other not in found:
            wrong.append(row | {"why": "not among the plain server's best", "best": best})
            continue
        row["gap_nats"] = round(abs(found[plain] - found[other]), 6)
        row["below_best_nats"] = round(best[0][0] - max(found[plain], found[other]), 6)
        near = row["gap_nats"] < epsilon and row["below_best_nats"] < epsilon
        (ties if near else wrong).append(row)
    return {
        "requests": len(expected),
        "equal": equal,
        "near_ties": ties,
        "mismatches": wrong,
        "passed": not wrong and bool(expected),
    }


def captured(log: str) -> list[list[int]]:
    """Batch sizes of each block of graphs that a log says were captured, target first."""
    return [[int(size) for size in found.split(",")] for found in _CAPTURE.findall(log)]


def decode_lines(log: str) -> list[dict[str, Any]]:
    """The ``Decode batch`` lines: ``running`` requests, ``accept`` length (1 without speculation), ``graph``, tokens/s."""
    return [
        {
            "running": int(found["running"]),
            "accept": float(found["accept"] or 1),
            "graph": found["graph"] == "True",
            "tokens_per_s": float(found["rate"]),
        }
        for found in _DECODE.finditer(log)
    ]


def running_sizes(log: str) -> dict[str, dict[str, int]]:
    """How many decode lines there were by batch size, in graphs and outside."""
    seen: dict[str, dict[str, int]] = {"graph": {}, "eager": {}}
    for line in decode_lines(log):
        kind = seen["graph" if line["graph"] else "eager"]
        kind[str(line["running"])] = kind.get(str(line["running"]), 0) + 1
    return seen


def step_rounds(log: str, batch: int) -> list[list[float]]:
    """Milliseconds of a decode step, one for each ``Decode batch`` line with ``batch`` running requests, by round.

    A line gives the tokens per second since the line before, and the tokens of a step are the requests times the
    accept length. A round is a run of such lines without a prefill or another batch size between. Its first line is left
    out: the interval of that began before the round. Rounds without another are left out, too.
    """
    rounds: list[list[float]] = []
    for piece in _PREFILL.split(log):
        last = 0
        for line in decode_lines(piece):
            if line["running"] == batch and line["tokens_per_s"] > 0:
                if last != batch:
                    rounds.append([])
                else:
                    rounds[-1].append(1000 * batch * line["accept"] / line["tokens_per_s"])
            last = line["running"]
    return [one for one in rounds if one]


def step_times(log: str, batch: int) -> list[float]:
    """The times of all rounds of :func:`step_rounds`, in milliseconds."""
    return [ms for one in step_rounds(log, batch) for ms in one]


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """The tenth percentile, the median and the ninetieth. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    last = len(ordered) - 1
    return ordered[round(0.1 * last)], statistics.median(ordered), ordered[round(0.9 * last)]


def times_lines(log: str) -> list[dict[str, float]]:
    """The ``DDTREE times`` lines: numbers by name (milliseconds but for ``steps`` and ``bs``)."""
    return [
        {name: float(value) for name, value in _PAIR.findall(found["rest"])} for found in _TIMES.finditer(log)
    ]


def times_shares(lines: Iterable[Mapping[str, float]], batch: int) -> dict[str, Any]:
    """Medians over ``DDTREE times`` lines at one batch size, and each phase's share of the step.

    Returns:
        ``lines``, ``steps`` (counted over the lines), ``ms`` and ``share_of_step`` by phase; empty without lines.
    """
    kept = [line for line in lines if abs(line.get("bs", 0) - batch) < 0.01 and line.get("step", 0) > 0]
    if not kept:
        return {}
    phases = sorted({name for line in kept for name in line} - {"steps", "bs"})
    middle = {name: statistics.median(line[name] for line in kept if name in line) for name in phases}
    return {
        "lines": len(kept),
        "steps": int(sum(line.get("steps", 0) for line in kept)),
        "ms": {name: round(value, 4) for name, value in middle.items()},
        "share_of_step": {
            name: round(value / middle["step"], 4) for name, value in middle.items() if name != "step"
        },
    }


def figure(samples: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """A measured figure: median, least and greatest, number of samples. Nothing but ``samples: 0`` without any."""
    if not samples:
        return {"samples": 0}
    return {
        "median": round(statistics.median(samples), digits),
        "least": round(min(samples), digits),
        "greatest": round(max(samples), digits),
        "samples": len(samples),
    }


def break_even(steps: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Accept lengths from which DDTREE pays, from times of a step.

    Args:
        steps: by server (``none``, ``dflash``, ``ddtree-BUDGET``), milliseconds of a step by batch size.

    Returns:
        Rows of ``batch``, ``budget``, ``over_none`` (the accept length above which DDTREE beats no speculation) and
        ``over_dflash`` (the factor by which its accept length must exceed DFLASH's). None where a time is missing.
    """
    rows = []
    for name, by_batch in steps.items():
        if not name.startswith("ddtree-"):
            continue
        for batch, ms in by_batch.items():
            row: dict[str, Any] = {"batch": int(batch), "budget": int(name.split("-")[1]), "step_ms": ms}
            for other in ("none", "dflash"):
                base = steps.get(other, {}).get(batch)
                row[f"over_{other}"] = round(ms / base, 3) if base else None
            rows.append(row)
    return sorted(rows, key=lambda row: (row["batch"], row["budget"]))


def verdict(checks: Sequence[Mapping[str, Any]]) -> str:
    """``pass`` if there are checks and all passed, ``fail`` if one did not, ``not run`` without any."""
    if not checks:
        return "not run"
    return "pass" if all(check["passed"] is True for check in checks) else "fail"


def tail(path: Path, offset: int = 0) -> str:
    """Text of a log from byte ``offset`` on; empty where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")
    except (FileNotFoundError, IsADirectoryError):
        return ""
