"""The flags of DDTREE: argparse, fields of ``ServerArgs``, their journey into every process.

``ServerArgs`` of sglang 0.5.11 is extended in place: a dataclass is pickled by its ``__dict__``, so the new fields
reach the scheduler processes whether or not a plugin runs there, ``dataclasses.asdict`` shows them in
``/server_info``, and no second class has to be told to every module that imported the first.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ddtree_sglang.check import ALGORITHM, refuse, refuse_strays

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = [
    "FIELDS",
    "SCHEDULES",
    "TOPK_CAP",
    "add_fields",
    "add_flags",
    "handle_speculative_decoding",
    "init",
    "show",
]

SCHEDULES = ("fixed", "adaptive")
TOPK_CAP = 8
"""Candidates kept a position where the flag is left out."""


@dataclasses.dataclass
class _Fields:
    speculative_ddtree_budget: int | None = None
    speculative_ddtree_topk_cap: int = TOPK_CAP
    speculative_ddtree_budget_schedule: str = "fixed"


FIELDS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(_Fields)}
"""Name and default of every field that DDTREE adds to ``ServerArgs``."""


def add_fields(server_args: type) -> None:
    """Give the dataclass ``server_args`` the fields of DDTREE. A field that is already there is an error."""
    for name, field in _Fields.__dataclass_fields__.items():
        if name in server_args.__dataclass_fields__:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{server_args.__name__} has a field {name} already: another DDTREE is in this tree"
            )
        server_args.__dataclass_fields__[name] = field  # type: ignore[attr-defined]
        setattr(server_args, name, FIELDS[name])


def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``ServerArgs.__init__``: take the new fields, which the generated ``__init__`` does not know."""
    for name, default in FIELDS.items():
        setattr(self, name, kwargs.pop(name, default))
    original(self, *args, **kwargs)


def show(result: str, self: Any) -> str:
    """After ``ServerArgs.__repr__``: the line in the log that lists all arguments lists these too."""
    extra = ", ".join(f"{name}={getattr(self, name)!r}" for name in FIELDS)
    return f"{result[:-1]}, {extra})"


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """After ``ServerArgs.add_cli_args``: the algorithm's name and the three flags."""
    for action in parser._actions:
        if action.dest == "speculative_algorithm":
            action.choices = [*(action.choices or ()), ALGORITHM]
            break
    else:
        raise RuntimeError("sglang has no flag --speculative-algorithm to add DDTREE to")
    parser.add_argument(
        "--speculative-ddtree-budget",
        type=int,
        default=FIELDS["speculative_ddtree_budget"],
        help="DDTREE only. Draft nodes of the tree that the target verifies in a step, the root not counted: "
        "budget + 1 tokens a request. At least block size - 1.",
    )
    parser.add_argument(
        "--speculative-ddtree-topk-cap",
        type=int,
        default=FIELDS["speculative_ddtree_topk_cap"],
        help="DDTREE only. The drafter's best tokens at each position of its block from which the tree may branch, "
        "at most. 1 verifies one chain, as DFLASH does.",
    )
    parser.add_argument(
        "--speculative-ddtree-budget-schedule",
        choices=list(SCHEDULES),
        default=FIELDS["speculative_ddtree_budget_schedule"],
        help="DDTREE only. fixed: every tree has budget nodes. adaptive: besides the best block size - 1 only nodes "
        "that the drafter expects to be accepted at least once in a hundred steps (the product of its probabilities "
        "along the path). The target verifies budget + 1 tokens in both, because its CUDA graph is of one size: "
        "adaptive saves work only where the number of different tokens counts, as in a mixture of experts.",
    )


def handle_speculative_decoding(original: Callable[[Any], None], self: Any) -> None:
    """Around ``ServerArgs._handle_speculative_decoding``: DDTREE drafts as DFLASH does, so it takes DFLASH's rules.

    Raises:
        DDTreeError: for what DDTREE does not run with, each with what to change.
    """
    if self.speculative_algorithm != ALGORITHM:
        refuse_strays(self, FIELDS)
        original(self)
        return
    refuse(self, resolved=False)
    self.speculative_algorithm = "DFLASH"
    try:
        original(self)
    finally:
        self.speculative_algorithm = ALGORITHM
    refuse(self)
