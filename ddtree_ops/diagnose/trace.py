"""A parameter followed as by hand: flag -> field of ``ServerArgs`` -> where the deployed source uses it.

Pure over source texts, by :mod:`ast`; nothing is run. Within a file simple assignments are followed: ``self.x =
server_args.FIELD``, ``y = self.x * n``, ``getattr(server_args, "FIELD", None)``, keyword arguments of calls. What only
running the code would tell (values handed from file to file) is not guessed.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.diagnose.events import Frame
from ddtree_ops.launchflags import ARGS_PATH, PLUGIN_PATH, FlagsError, read_flags

__all__ = ["Trace", "TraceStep", "files_for", "frames_of", "matching", "trace_parameters"]

Read = Callable[[str], "str | None"]
"""Text of a file of the deployed tree by its path (``sglang/srt/...``); None: it is not there."""

_LIMIT = 160
_DEPTH = 6
_FRAME = re.compile(r'\s*File "([^"]{1,500})", line (\d{1,9})(?:, in (.{1,200}))?\s*$')


@dataclass(frozen=True)
class TraceStep:
    """One place on the way.

    :param step: ``flag``, ``field``, ``use``, ``crash`` or ``absent`` (the file never reads the field).
    :param file: path within the tree; ``line`` counts from 1, 0 where there is none.
    :param text: the source line, or a sentence for ``absent``.
    """

    step: str
    file: str
    line: int
    text: str

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {"step": self.step, "file": self.file, "line": self.line, "text": self.text}

    @property
    def place(self) -> str:
        """``cuda_graph_runner.py:630``."""
        name = self.file.rpartition("/")[2]
        return f"{name}:{self.line}" if self.line else name


@dataclass(frozen=True)
class Trace:
    """The steps of all parameters in order, and what could not be done.

    :param origin: which tree was read, for a person; empty where none was.
    :param note: why there are no steps; empty where there are.
    """

    steps: tuple[TraceStep, ...] = ()
    origin: str = ""
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True)
class _Assignment:
    """One value that goes on: what it is made of, and what it is called then."""

    function: str
    line: int
    target: str
    sources: frozenset[str]
    text: str


@dataclass
class _File:
    """The assignments of a file, and the functions of it."""

    assignments: list[_Assignment] = field(default_factory=list)
    reads: dict[str, int] = field(default_factory=dict)


def frames_of(traceback: Sequence[str]) -> tuple[Frame, ...]:
    """The frames of a (reduced) traceback as it is printed, outermost first."""
    frames: list[Frame] = []
    for line in traceback:
        match = _FRAME.match(line)
        if match:
            frames.append(Frame(match[1], int(match[2]), match[3] or ""))
        elif frames and line[:4].isspace() and not frames[-1].code:
            last = frames[-1]
            frames[-1] = Frame(last.file, last.line, last.function, line.strip())
    return tuple(frames)


def _inside(path: str) -> str:
    """A frame's file within a tree (``sglang/srt/...``, ``ddtree_sglang/...``); empty for one outside of it."""
    if "/ddtree_sglang/" in path:
        return f"ddtree_sglang/{path.rpartition('/ddtree_sglang/')[2]}"
    return f"sglang/{path.rpartition('/sglang/')[2]}" if "/sglang/" in path else ""


def files_for(frames: Sequence[Frame], more: Sequence[str] = ()) -> tuple[str, ...]:
    """The files that a trace reads: ``server_args.py`` first, then those of the frames, innermost first, then ``more``."""
    found = [_inside(frame.file) for frame in reversed(frames)]
    return tuple(dict.fromkeys([ARGS_PATH, *(path for path in found if path), *more]))


def matching(frames: Sequence[Frame], read: Read) -> bool | None:
    """Whether the frames' lines stand in a tree just so; None where that cannot be told (no frame, or no code in it)."""
    compared = 0
    for frame in frames:
        path = _inside(frame.file)
        if not path or not frame.code:
            continue
        lines = (read(path) or "").splitlines()
        if not 0 < frame.line <= len(lines) or lines[frame.line - 1].strip() != frame.code.strip():
            return False
        compared += 1
    return True if compared else None


def trace_parameters(
    fields: Sequence[str], frames: Sequence[Frame], files: Sequence[str], read: Read
) -> list[TraceStep]:
    """The way of each field from its flag to the place of the failure: one whole chain after the other, no line twice.

    A chain ends where it comes to a line of one before it, and that of the file that failed stands last.

    :param fields: of ``ServerArgs``, e.g. ``speculative_num_draft_tokens``.
    :param frames: of the failure, outermost first; the innermost within a file is shown as the last step.
    :param files: paths within the tree where uses are looked for, best first; each parameter is followed in the first
        that reads it.
    """
    source = read(ARGS_PATH)
    parsed = {path: _parse(text) for path in files if path != ARGS_PATH and (text := read(path))}
    chains: list[tuple[str, list[TraceStep]]] = []
    missing: list[tuple[str, str]] = []
    for name in fields:
        head = _definition(name, source) if source else []
        path = next((path for path, found in parsed.items() if name in found.reads), "")
        uses = _uses(name, path, parsed[path], frames) if path else []
        if uses:
            if not head or head[0].step != "flag":
                head = _added(name, read(PLUGIN_PATH) or "") or head
            if not head or head[0].step != "flag":
                text = f"--{name.replace('_', '-')} (no such flag in this file)"
                head = [TraceStep("flag", ARGS_PATH, 0, text), *head]
            chains.append((path, [*head, *uses]))
        else:
            missing.append((name, head[0].text if head else f"--{name.replace('_', '-')}"))
    crash = _crash(frames, [path for path, _ in chains], read)
    failed = crash[0].file if crash else ""
    chains.sort(key=lambda chain: chain[0] == failed)
    followed = [path for path, _ in chains]
    steps: list[TraceStep] = []
    seen = {(step.file, step.line) for step in crash}
    for _, chain in chains:
        for step in chain:
            if step.line and (step.file, step.line) in seen:
                break
            seen.add((step.file, step.line))
            steps.append(step)
    steps += crash
    for name, flag in missing:
        place = followed[0] if followed else next(iter(parsed), "")
        if place:
            file = place.rpartition("/")[2]
            steps.append(TraceStep("absent", place, 0, f"{flag}: {file} never reads {name}"))
    return steps if followed else []


def _crash(frames: Sequence[Frame], followed: Sequence[str], read: Read) -> list[TraceStep]:
    inner = next((frame for frame in reversed(frames) if _inside(frame.file) in followed), None)
    if inner is None:
        return []
    path = _inside(inner.file)
    lines = (read(path) or "").splitlines()
    there = lines[inner.line - 1].strip() if 0 < inner.line <= len(lines) else ""
    return [TraceStep("crash", path, inner.line, _short(inner.code or there or inner.function))]


def _short(text: str) -> str:
    plain = re.sub(r"(?<=[(\[]) | (?=[)\]])|,(?= [)\]])", "", " ".join(text.split()))
    return plain if len(plain) <= _LIMIT else f"{plain[: _LIMIT - 3]}..."


def _definition(name: str, source: str) -> list[TraceStep]:
    steps = []
    try:
        flags = [flag for flag in read_flags(source).flags if flag.dest == name and flag.line]
    except FlagsError:
        flags = []
    named = [flag for flag in flags if flag.name == f"--{name.replace('_', '-')}"] or flags
    steps += [TraceStep("flag", ARGS_PATH, flag.line, flag.name) for flag in named[:1]]
    pattern = re.compile(rf"    {re.escape(name)}\s*:")
    for number, line in enumerate(source.splitlines(), 1):
        if pattern.match(line):
            steps.append(TraceStep("field", ARGS_PATH, number, _short(line)))
            break
    return steps


def _added(name: str, source: str) -> list[TraceStep]:
    """The flag and the field that the overlay adds; empty where it does not."""
    option = f"--{name.replace('_', '-')}"
    steps = []
    for step, pattern, text in (
        ("flag", rf"""\s*(?:parser\.add_argument\(\s*)?["']{option}["']""", option),
        ("field", rf"    {re.escape(name)}\s*:", ""),
    ):
        for number, line in enumerate(source.splitlines(), 1):
            if re.match(pattern, line):
                steps.append(TraceStep(step, PLUGIN_PATH, number, text or _short(line)))
                break
    return steps if steps and steps[0].step == "flag" else []


def _parse(text: str) -> _File:
    found = _File()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    lines = text.splitlines()
    try:
        for function, node in _statements(module, ""):
            _collect(function, node, lines, found)
    except RecursionError:
        return _File()
    found.assignments.sort(key=lambda item: item.line)
    return found


def _statements(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = child.name
        yield inner, child
        yield from _statements(child, inner)


def _collect(function: str, node: ast.AST, lines: Sequence[str], found: _File) -> None:
    value: ast.expr | None = None
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        value, targets = node.value, node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        value, targets = node.value, [node.target]
    elif isinstance(node, ast.Attribute):
        found.reads.setdefault(node.attr, node.lineno)
    elif isinstance(node, ast.Call) and (asked := _asked(node)):
        found.reads.setdefault(asked, node.lineno)
    if value is None:
        return
    names = frozenset(_references(value, function))
    line = getattr(node, "lineno", 0)
    last = getattr(node, "end_lineno", line) or line
    text = _short(" ".join(part.split(" #")[0] for part in lines[line - 1 : last]))
    for target in targets:
        for element in target.elts if isinstance(target, ast.Tuple) else [target]:
            key = _key(element, function)
            if key:
                found.assignments.append(_Assignment(function, line, key, names, text))


def _asked(node: ast.Call) -> str:
    """The attribute that ``getattr(x, "name")`` reads."""
    if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) >= 2:
        second = node.args[1]
        if isinstance(second, ast.Constant) and isinstance(second.value, str):
            return second.value
    return ""


def _is_args(node: ast.expr) -> bool:
    return "args" in (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", ""))


def _key(node: ast.expr, function: str) -> str:
    if isinstance(node, ast.Attribute):
        return f"args.{node.attr}" if _is_args(node.value) else f".{node.attr}"
    return f"{function}:{node.id}" if isinstance(node, ast.Name) else ""


def _references(value: ast.expr, function: str) -> Iterator[str]:
    for node in ast.walk(value):
        if isinstance(node, ast.Attribute | ast.Name):
            yield _key(node, function)
        elif isinstance(node, ast.Call) and (asked := _asked(node)):
            yield f"args.{asked}" if _is_args(node.args[0]) else f".{asked}"


def _uses(name: str, path: str, found: _File, frames: Sequence[Frame]) -> list[TraceStep]:
    """The shortest way from the field to what the file uses most, or to a value within a function that failed."""
    start = f"args.{name}"
    if not any(start in item.sources for item in found.assignments):
        start = f".{name}"
    ways: dict[str, tuple[_Assignment, ...]] = {start: ()}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        for item in found.assignments:
            if at in item.sources and item.target not in ways and len(ways[at]) < _DEPTH:
                ways[item.target] = (*ways[at], item)
                queue.append(item.target)
    weights: dict[str, int] = {}
    for item in found.assignments:
        for key in item.sources:
            weights[key] = weights.get(key, 0) + 1
    failed = {frame.function.rpartition(".")[2] for frame in frames if _inside(frame.file) == path}
    lasting = {
        key: way for key, way in ways.items() if way and (key.startswith(".") or way[-1].function in failed)
    }
    if not lasting:
        line = found.reads.get(name, 0)
        return [TraceStep("use", path, line, name)] if line else []

    def worth(key: str) -> tuple[bool, bool, int, int]:
        way = ways[key]
        own = key == f".{name}"
        return way[-1].function in failed, not own, weights.get(key, 0), -len(way)

    best = max(lasting, key=worth)
    return [TraceStep("use", path, item.line, item.text) for item in ways[best]]
