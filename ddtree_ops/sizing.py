"""How many tokens a request the CUDA graphs are sized for, read out of ``cuda_graph_runner.py`` itself.

The statements of ``CudaGraphRunner.__init__`` that decide ``self.num_tokens_per_bs`` are lifted out with
:mod:`ast` and run with stand-ins for the model runner, for target and draft worker under DDTREE, DFLASH and
none. Nothing of sglang or torch is imported. The lifted statements may only read attributes, compare, calculate
with whole numbers, raise and assign; anything else is refused, so a file of unknown origin can be examined safely.

This module uses the standard library of Python >= 3.9 only (the parser of 3.8 cannot read the runner) and imports
nothing of this package: it is also copied to hosts.
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = ["RUNNER_PATH", "Sizing", "SizingError", "SizingRow", "prove", "tokens_per_request"]

RUNNER_PATH = "sglang/srt/model_executor/cuda_graph_runner.py"
"""Path of the file within a tree."""

_ALGORITHMS = ("DDTREE", "DFLASH", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "NONE")
_DECIDED = ("self.num_tokens_per_bs", "self.capture_forward_mode")
_GIVEN = ("self.model_runner", "self.is_dllm", "self.dllm_config")
_BUILTINS = {
    "AssertionError": AssertionError,
    "AttributeError": AttributeError,
    "NotImplementedError": NotImplementedError,
    "RuntimeError": RuntimeError,
    "TypeError": TypeError,
    "ValueError": ValueError,
    "bool": bool,
    "getattr": None,
    "hasattr": None,
    "int": int,
    "isinstance": isinstance,
    "len": len,
    "max": max,
    "min": min,
    "repr": repr,
    "str": str,
}
_ALLOWED = (
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.If,
    ast.Raise,
    ast.Assert,
    ast.Expr,
    ast.Pass,
    ast.Attribute,
    ast.Name,
    ast.Constant,
    ast.JoinedStr,
    ast.FormattedValue,
    ast.IfExp,
    ast.NamedExpr,
    ast.BoolOp,
    ast.UnaryOp,
    ast.BinOp,
    ast.Compare,
    ast.Call,
    ast.keyword,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.expr_context,
    ast.boolop,
    ast.unaryop,
    ast.cmpop,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Mod,
)
_REFUSED = frozenset(
    [
        "center",
        "encode",
        "expandtabs",
        "format",
        "format_map",
        "join",
        "ljust",
        "maketrans",
        "replace",
        "rjust",
        "to_bytes",
        "translate",
        "zfill",
    ]
)
"""Methods of plain values that reach into objects or blow up."""
_LARGEST = 1 << 40
_LONGEST = 10_000


class SizingError(Exception):
    """The sizing block cannot be found, cannot be run by this check, or raises."""


@dataclass(frozen=True)
class SizingRow:
    """What one kind of worker gets.

    :param worker: ``target``, ``draft`` or ``plain`` (no speculation).
    :param algorithm: ``DDTREE``, ``DFLASH`` or ``none``.
    :param tokens: tokens a request the graph is sized for.
    :param wanted: tokens a request that are sent.
    :param line: 1-based line of the assignment that decided it.
    """

    worker: str
    algorithm: str
    tokens: int
    wanted: int
    line: int

    @property
    def ok(self) -> bool:
        return self.tokens == self.wanted


@dataclass(frozen=True)
class Sizing:
    """Outcome of :func:`prove`; rows in the order target/DDTREE, draft/DDTREE, target/DFLASH, plain/none."""

    block_size: int
    budget: int | None
    rows: tuple[SizingRow, ...]

    @property
    def ok(self) -> bool:
        """True where every worker gets what is sent to it."""
        return all(row.ok for row in self.rows)

    @property
    def line(self) -> int:
        """1-based line of the assignment that decides the first row (the target worker)."""
        return self.rows[0].line

    @property
    def figures(self) -> str:
        """The tokens of all rows: ``33 / 8 / 8 / 1``."""
        return " / ".join(str(row.tokens) for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            "ok": self.ok,
            "block_size": self.block_size,
            "budget": self.budget,
            "line": self.line,
            "figures": self.figures,
            "rows": [
                {
                    "worker": row.worker,
                    "algorithm": row.algorithm,
                    "tokens": row.tokens,
                    "wanted": row.wanted,
                    "ok": row.ok,
                    "line": row.line,
                }
                for row in self.rows
            ],
        }


def prove(source: str, *, block_size: int, budget: int | None) -> Sizing:
    """Size every kind of worker with the code in ``source`` (text of ``cuda_graph_runner.py``).

    :param block_size: tokens of the drafter, root included (``speculative_num_draft_tokens``).
    :param budget: tree nodes, root not included; None leaves the DDTREE rows out.
    :raises SizingError: the block is not there, is not understood, or raises.
    """
    block = _lift(source)
    cases: list[tuple[str, str, int]] = []
    if budget is not None:
        cases += [("target", "DDTREE", budget + 1), ("draft", "DDTREE", block_size)]
    cases += [("target", "DFLASH", block_size), ("plain", "none", 1)]
    rows = []
    for worker, algorithm, wanted in cases:
        tokens, line = _run(block, algorithm, worker == "draft", block_size, budget)
        rows.append(SizingRow(worker, algorithm, tokens, wanted, line))
    return Sizing(block_size, budget, tuple(rows))


def tokens_per_request(
    source: str, *, algorithm: str | None, draft_worker: bool, block_size: int, budget: int | None
) -> int:
    """Tokens a request that the graphs of one worker are sized for by the code in ``source``.

    :param algorithm: value of ``--speculative-algorithm``; None (or ``none``): no speculation.
    :raises SizingError: the block is not there, is not understood, or raises (DDTREE without a budget).
    """
    return _run(_lift(source), algorithm or "none", draft_worker, block_size, budget)[0]


@dataclass(frozen=True)
class _Block:
    statements: tuple[ast.stmt, ...]
    parameters: tuple[str, ...]


class _Uses(ast.NodeVisitor):
    """Dotted ``self.x`` and plain names that a statement reads and writes."""

    def __init__(self) -> None:
        self.reads: set[str] = set()
        self.writes: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        (self.reads if isinstance(node.ctx, ast.Load) else self.writes).add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            (self.reads if isinstance(node.ctx, ast.Load) else self.writes).add("self." + node.attr)
        else:
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self.reads.add(node.target.id)


def _uses(statement: ast.stmt) -> tuple[set[str], set[str]]:
    uses = _Uses()
    uses.visit(statement)
    return uses.reads, uses.writes


@lru_cache(maxsize=8)
def _lift(source: str) -> _Block:
    try:
        return _find(ast.parse(source))
    except (SyntaxError, ValueError) as error:
        raise SizingError(f"the runner is not valid Python: {error}") from error
    except (RecursionError, MemoryError):
        raise SizingError("the runner is nested too deeply to be read") from None


def _find(module: ast.Module) -> _Block:
    init = None
    for top in module.body:
        if isinstance(top, ast.ClassDef) and top.name == "CudaGraphRunner":
            for member in top.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    init = member
    if init is None:
        raise SizingError("no CudaGraphRunner.__init__ in this file: not a cuda_graph_runner.py we know")

    uses = [_uses(statement) for statement in init.body]
    chosen = {index for index, (_, writes) in enumerate(uses) if writes.intersection(_DECIDED)}
    if not any("self.num_tokens_per_bs" in uses[index][1] for index in chosen):
        raise SizingError(
            "CudaGraphRunner.__init__ never assigns self.num_tokens_per_bs: the sizing block has moved"
        )
    pending = set(chosen)
    while pending:
        index = pending.pop()
        needed = uses[index][0].difference(_GIVEN)
        for earlier in range(index):
            if earlier not in chosen and uses[earlier][1].intersection(needed):
                chosen.add(earlier)
                pending.add(earlier)

    statements = [init.body[index] for index in sorted(chosen)]
    for lifted in statements:
        for node in ast.walk(lifted):
            if not _harmless(node):
                raise SizingError(
                    "line {}: the sizing block does more than this check can run ({})".format(
                        getattr(node, "lineno", lifted.lineno), type(node).__name__
                    )
                )
    arguments = init.args
    parameters = [
        a.arg for a in arguments.args + arguments.kwonlyargs if a.arg not in ("self", "model_runner")
    ]
    bounded = _Bounded()
    return _Block(tuple(bounded.visit(lifted) for lifted in statements), tuple(parameters))


def _harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return not node.id.startswith("__")
    if isinstance(node, ast.Attribute):
        return not node.attr.startswith("__") and node.attr not in _REFUSED
    if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
        return not re.search(r"\d{3}|\{", ast.unparse(node.format_spec))
    return isinstance(node, _ALLOWED)


class _Bounded(ast.NodeTransformer):
    """Puts :func:`_calculate` in place of arithmetic, so that no source can make a number or a text without end."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = ast.Name("__calculate", ast.Load())
        call = ast.Call(name, [ast.Constant(type(node.op).__name__), node.left, node.right], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        before = ast.parse(ast.unparse(node.target), mode="eval").body
        value = self.visit(ast.copy_location(ast.BinOp(before, node.op, node.value), node))
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([node.target], value), node))


_OPERATORS = {"Add": operator.add, "Sub": operator.sub, "Mult": operator.mul}
_OPERATORS.update(FloorDiv=operator.floordiv, Mod=operator.mod)


def _calculate(name: str, left: Any, right: Any) -> Any:
    numbers = isinstance(left, int) and isinstance(right, int) and max(abs(left), abs(right)) < _LARGEST
    texts = name == "Add" and isinstance(left, str) and isinstance(right, str)
    if numbers or (texts and len(left) + len(right) < _LONGEST):
        return _OPERATORS[name](left, right)
    kinds = f"{type(left).__name__} and {type(right).__name__}"
    raise TypeError(f"{name} of {kinds} is more than this check calculates")


class _Words:
    """Any attribute is its own name: stands in for ``ForwardMode`` and ``CaptureHiddenMode``."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{self.kind}.{name}"


class _Algorithm:
    """``SpeculativeAlgorithm`` with DDTREE: ``is_dflash()`` is true for DFLASH and DDTREE, as in a DDTree tree."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_none(self) -> bool:
        return self.name == "NONE"

    def is_speculative(self) -> bool:
        return self.name != "NONE"

    def is_dflash(self) -> bool:
        return self.name in ("DFLASH", "DDTREE")

    def is_ddtree(self) -> bool:
        return self.name == "DDTREE"

    def is_eagle(self) -> bool:
        return self.name in ("EAGLE", "EAGLE3")

    def is_eagle3(self) -> bool:
        return self.name == "EAGLE3"

    def is_standalone(self) -> bool:
        return self.name == "STANDALONE"

    def is_ngram(self) -> bool:
        return self.name == "NGRAM"


class _Record:
    """Attributes only, and the line on which each was assigned."""

    def __init__(self, kind: str, **values: Any) -> None:
        self.__dict__.update(values, _kind=kind, _lines={})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError("{}.{} is not known to this check".format(self.__dict__.get("_kind"), name))

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        self.__dict__["_lines"][name] = sys._getframe(1).f_lineno


class _Silent:
    """A logger that says nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _silent


def _silent(*_words: Any, **_named: Any) -> None:
    return None


def _getattr(owner: Any, name: str, *default: Any) -> Any:
    if str(name).startswith("_") or name in _REFUSED:
        raise AttributeError(name)
    return getattr(owner, name, *default)


def _hasattr(owner: Any, name: str) -> bool:
    return not str(name).startswith("_") and hasattr(owner, name)


def _run(
    block: _Block, algorithm: str, draft_worker: bool, block_size: int, budget: int | None
) -> tuple[int, int]:
    name = algorithm.upper()
    if name not in _ALGORITHMS:
        raise SizingError(
            "{} is not an algorithm this check knows: {}".format(algorithm, ", ".join(_ALGORITHMS))
        )
    algorithms = {known: _Algorithm(known) for known in _ALGORITHMS}
    speculative = name != "NONE"
    server_args = _Record(
        "server_args",
        speculative_algorithm=name if speculative else None,
        speculative_num_draft_tokens=block_size if speculative else None,
        speculative_num_steps=1 if speculative else None,
        speculative_eagle_topk=1 if speculative else None,
        speculative_ddtree_budget=budget,
    )
    model_runner = _Record(
        "model_runner", server_args=server_args, spec_algorithm=algorithms[name], is_draft_worker=draft_worker
    )
    runner = _Record("self", model_runner=model_runner, is_dllm=False, dllm_config=None)
    builtins = dict(_BUILTINS, getattr=_getattr, hasattr=_hasattr)
    scope: dict[str, Any] = dict.fromkeys(block.parameters)
    scope.update(
        __builtins__=builtins,
        self=runner,
        model_runner=model_runner,
        ForwardMode=_Words("ForwardMode"),
        CaptureHiddenMode=_Words("CaptureHiddenMode"),
        SpeculativeAlgorithm=_Record("SpeculativeAlgorithm", **algorithms),
        logger=_Silent(),
        log_info_on_rank0=_silent,
        __calculate=_calculate,
    )
    module = ast.Module(body=list(block.statements), type_ignores=[])
    try:
        exec(compile(module, "cuda_graph_runner.py", "exec"), scope)
    except Exception as error:
        raise SizingError(
            "{} worker under {}: the sizing block raises {}: {}".format(
                "draft" if draft_worker else "target", name, type(error).__name__, error
            )
        ) from error
    tokens = runner.__dict__.get("num_tokens_per_bs")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise SizingError(f"the sizing block gives {tokens!r}, not a number of tokens")
    return tokens, runner.__dict__["_lines"]["num_tokens_per_bs"]
