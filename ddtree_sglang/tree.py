"""The draft tree: the best ``budget`` prefixes under log-probabilities by depth, in fixed shapes on the GPU.

A block drafter gives, for each depth ``d = 1..D``, one distribution that does not depend on what was drafted
at the depths before. A *prefix* of depth ``d`` is a choice of ranks ``(r_1, ..., r_d)``, each from 0 to
K - 1; its cost is the sum of ``-logprobs[j, r_j]``. The tree holds the root (the current token) and the
``budget`` prefixes that come first in the order

    cost, then depth, then ranks compared from the left.

That is what a best-first heap pops (pop a node, push its next sibling and its first child), without the heap.

Why the construction is exact:

* The order fits a tree. Costs are whole numbers (see below), so a child costs at least what its parent costs,
  and on equal cost the parent is less deep: a parent precedes its children. So the first ``budget`` prefixes
  contain the parent of each of theirs: a tree, and nodes numbered in this order have a higher number than
  their parent.
* A fixed set of candidates suffices. Ranks are sorted: a lower rank never costs more. So each prefix of the
  same or less depth, none of whose ranks is above that of ``(r_1, ..., r_d)``, precedes it. Together with
  itself those are ``(r_1 + 1) + (r_1 + 1) * (r_2 + 1) + ... + (r_1 + 1) * ... * (r_d + 1)``. Where this
  exceeds ``budget``, the prefix is not among the first ``budget``, whatever the log-probabilities are. All
  others form a set that depends on D, K and ``budget`` alone (1083 prefixes for 7, 8 and 32). It is
  enumerated once, on the host. A step computes their costs in one gather and one sum; one top-k gives the
  nodes in order.
* Nothing depends on rounding. A log-probability becomes a whole number of 2**-24 nats (exact from 1 nat
  upwards, rounded towards 0 below) and sums are of int64, so that neither the order of summation nor the
  device nor the rest of the batch matters. The candidate's number fills the low bits of its key: no two keys
  are equal, and a top-k that is not stable has nothing to choose.

What follows the top-k is looked up in tables of the candidates (parent, next sibling, ancestors at each
depth), so a step takes the same number of operators for every batch size, budget and depth. Nothing is copied
to the host and no branch depends on a tensor's value: the functions can be captured in a CUDA graph once the
tables are on the device (:func:`prepare`).

Symbols: bs requests, B block size, D = B - 1 depths, K cap on branches, N = budget + 1 nodes with the root.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

__all__ = [
    "ADAPTIVE_MIN_PROB",
    "MAX_CANDIDATES",
    "Tree",
    "build_tree",
    "custom_mask",
    "fill_mask",
    "mask_places",
    "positions",
    "prepare",
    "retrieve_index",
    "slot_limits",
]

ADAPTIVE_MIN_PROB = 0.01
"""The adaptive schedule keeps nodes that the drafter expects to be right at least once in a hundred steps."""

MAX_CANDIDATES = 65536
"""Most candidates that :func:`build_tree` will rank for one request (512 KiB of keys)."""

_QUANTUM = 24
"""Costs are counted in 2**-24 nats."""
_NEVER = 1 << 42
"""Cost, in 2**-24 nats, from which on a prefix counts as impossible: 2**18 nats; -inf and NaN cost this."""


@dataclass(frozen=True)
class Tree:
    """A batch of draft trees. Nodes are numbered within their request: 0 is the root, a parent is below its
    children, and node ``i`` is the ``i``-th best. Numbers from ``count`` on are padding: linked to nothing,
    depth 0, seeing nothing of the tree but themselves."""

    draft: torch.Tensor
    """int64 [bs, N]: what the target is to read. Slot 0 and padding hold the ``root`` given, else 0."""
    parents: torch.Tensor
    """int64 [bs, N]: number of the parent; -1 for the root and for padding."""
    depths: torch.Tensor
    """int64 [bs, N]: depth below the root; 0 for the root and for padding."""
    next_token: torch.Tensor
    """int64 [bs, N], contiguous: number of the first (most probable) child, -1 if none."""
    next_sibling: torch.Tensor
    """int64 [bs, N], contiguous: number of the next less probable child of the same parent, -1 if none."""
    mask: torch.Tensor
    """bool [bs, N, N]: whether node i (row) sees node j (column): j is i or an ancestor of i."""
    count: torch.Tensor
    """int64 [bs]: nodes that are not padding, the root included."""

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [bs, N - 1]: the drafted tokens, without the root (a view of ``draft``)."""
        return self.draft[:, 1:]


@dataclass(frozen=True)
class _Tables:
    """What depends on D, K and budget alone, on one device.

    Numbers of candidates: 0 the root, then the prefixes by depth and ranks, then one number for each slot's
    padding.
    """

    scored: int
    """Candidates in the top-k: the root, the prefixes, and padding where those are fewer than N."""
    shift: int
    """Bits of a key that hold the candidate's number."""
    path: torch.Tensor
    """int64 [scored * D]: where the costs along each candidate's path stand in [D * K costs, 0, never]."""
    number: torch.Tensor
    """int64 [scored]: 0, 1, 2, ..."""
    ends: torch.Tensor
    """float32 [1, 2]: the log-probabilities 0 and -inf."""
    padding: torch.Tensor
    """int64 [N]: the number that stands for padding in each slot."""
    slot: torch.Tensor
    """int64 [1, N]: 0, 1, 2, ..."""
    rows: torch.Tensor
    """int64 [5 + D + 1, numbers]: parent, first child, next sibling, place of the token in [D * K tokens,
    root], depth, then the ancestor-or-self at depth 0..D (-1 where there is none)."""


def _prefixes(depth: int, width: int, budget: int) -> tuple[tuple[int, ...], ...]:
    """The prefixes that can be among the first ``budget``, by depth, then ranks: see the module's text."""
    level: list[tuple[tuple[int, ...], int, int]] = [((), 1, 0)]
    found: list[tuple[int, ...]] = []
    for _ in range(depth):
        following = []
        for ranks, product, before in level:
            for rank in range(width):
                wide = product * (rank + 1)
                if before + wide > budget:
                    break
                following.append(((*ranks, rank), wide, before + wide))
        level = following
        found.extend(ranks for ranks, _, _ in level)
        if len(found) > MAX_CANDIDATES:
            raise ValueError(
                f"a tree of {budget} nodes over {depth} depths and {width} branches has more than "
                f"{MAX_CANDIDATES} candidates: lower --speculative-ddtree-budget or "
                "--speculative-ddtree-topk-cap"
            )
    return tuple(found)


@cache
def _tables(depth: int, width: int, budget: int, device: torch.device) -> _Tables:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the tree's tables are not on the GPU yet and cannot be copied during graph capture: call "
            f"prepare({depth}, {width}, {budget}, device) before it"
        )
    ranks = ((), *_prefixes(depth, width, budget))
    nodes = budget + 1
    scored = max(len(ranks), nodes)
    total = len(ranks) + nodes
    shift = (scored - 1).bit_length()
    if (depth * _NEVER) << shift >= 1 << 63:
        raise ValueError(f"{depth} depths and {scored} candidates do not fit into a key of 63 bits")
    free, never = depth * width, depth * width + 1
    number = {path: index for index, path in enumerate(ranks)}
    path_of: list[int] = []
    columns: list[list[int]] = []
    for path in ranks:
        places = [level * width + rank for level, rank in enumerate(path)]
        path_of += places + [free] * (depth - len(path))
        columns.append(
            [
                number[path[:-1]] if path else total,
                number.get((*path, 0), total),
                number.get((*path[:-1], path[-1] + 1), total) if path else total,
                places[-1] if path else free,
                len(path),
                *(number[path[:level]] for level in range(len(path) + 1)),
                *[-1] * (depth - len(path)),
            ]
        )
    path_of += ([never] + [free] * (depth - 1)) * (scored - len(ranks))
    for index in range(len(ranks), total):
        columns.append([total, total, total, free, 0, index, *[-1] * depth])

    def put(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return _Tables(
        scored=scored,
        shift=shift,
        path=put(path_of),
        number=put(list(range(scored))),
        ends=torch.tensor([[0.0, -math.inf]], dtype=torch.float32, device=device),
        padding=put(list(range(len(ranks), total))),
        slot=put(list(range(nodes)))[None],
        rows=torch.tensor(columns, dtype=torch.int64).t().contiguous().to(device),
    )


def slot_limits(
    depth: int, budget: int, *, valid: int | None = None, min_prob: float | None = None
) -> tuple[int, ...]:
    """The budget schedule: the cost, in 2**-24 nats, below which a node in each slot is worth verifying. [N]

    The rule. *fixed* (``min_prob`` None): every node is. *adaptive*: a node is if the product of the
    probabilities along its path is at least ``min_prob``, and the best ``depth`` nodes are in any case. In
    both, impossible prefixes (probability 0) and nodes beyond the best ``valid`` are not. Nodes are numbered
    from the most probable on, so what is kept is always a beginning, and therefore a tree.

    N itself stays, and with it the time of a step: what the schedule saves is the padding's work where the
    number of different tokens counts (padding repeats the root: no further experts in a mixture of experts).

    Raises:
        ValueError: ``valid`` outside 0..budget, ``min_prob`` outside (0, 1].
    """
    if valid is None:
        valid = budget
    if not 0 <= valid <= budget:
        raise ValueError(f"valid is {valid}: it must be within 0..{budget}, the budget")
    worth = _NEVER
    if min_prob is not None:
        if not 0 < min_prob <= 1:
            raise ValueError(f"min_prob is {min_prob}: it must be above 0 and at most 1")
        worth = min(_NEVER, math.floor(-math.log(min_prob) * (1 << _QUANTUM)) + 1)
    return tuple(0 if slot > valid else _NEVER if slot <= depth else worth for slot in range(budget + 1))


@cache
def _limits(
    depth: int, budget: int, valid: int | None, min_prob: float | None, shift: int, device: torch.device
) -> torch.Tensor:
    """int64 [N]: :func:`slot_limits` as keys."""
    limits = slot_limits(depth, budget, valid=valid, min_prob=min_prob)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the budget schedule is not on the GPU yet: call prepare() with the same schedule before"
        )
    return torch.tensor([limit << shift for limit in limits], dtype=torch.int64, device=device)


def prepare(
    depth: int,
    width: int,
    budget: int,
    device: torch.device | str,
    *,
    valid: int | None = None,
    min_prob: float | None = None,
) -> None:
    """Put the tables of :func:`build_tree` on ``device``, once a process; before a graph is captured.

    Raises:
        ValueError: no tree of this shape can be built (arguments below 1, more than ``MAX_CANDIDATES``
            candidates).
    """
    if min(depth, width, budget) < 1:
        raise ValueError(f"depth {depth}, width {width} and budget {budget} must be 1 or more")
    where = torch.empty(0, device=device).device
    tables = _tables(depth, width, budget, where)
    _limits(depth, budget, valid, min_prob, tables.shift, where)


def build_tree(
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    budget: int,
    *,
    valid: int | None = None,
    min_prob: float | None = None,
    root: torch.Tensor | None = None,
) -> Tree:
    """The trees of the best ``budget`` prefixes.

    Args:
        logprobs: float32 [bs, D, K], natural logarithms, falling along K as ``torch.topk`` returns them. (If
            they do not, the tree is a tree still, but not the best one, and links may not reach all of it.)
            Where there are fewer than K tokens the rest is ``-inf``. NaN counts as ``-inf``, a value above 0
            as 0.
        token_ids: int64 [bs, D, K], the tokens they belong to, different within a depth.
        budget: nodes besides the root; N = budget + 1. Slots for which no prefix is possible are padding.
        valid: keep the best ``valid`` nodes only, the rest is padding. Shapes do not change.
        min_prob: threshold of the adaptive schedule, see :func:`slot_limits`; None for the fixed one.
        root: int64 [bs], the current tokens, for ``Tree.draft``.

    Raises:
        ValueError: shapes that do not fit each other, or arguments out of range.
    """
    if logprobs.dim() != 3 or logprobs.shape != token_ids.shape:
        raise ValueError(
            f"logprobs {tuple(logprobs.shape)} and token_ids {tuple(token_ids.shape)} must both be [bs, D, K]"
        )
    if logprobs.dtype != torch.float32 or token_ids.dtype != torch.int64:
        raise ValueError(
            f"logprobs must be float32 and token_ids int64, not {logprobs.dtype} and {token_ids.dtype}"
        )
    bs, depth, width = logprobs.shape
    if root is not None and root.shape != (bs,):
        raise ValueError(f"root must be [{bs}], not {tuple(root.shape)}")
    if min(depth, width, budget) < 1:
        raise ValueError(f"D {depth}, K {width} and budget {budget} must be 1 or more")
    device = logprobs.device
    tables = _tables(depth, width, budget, device)
    limits = _limits(depth, budget, valid, min_prob, tables.shift, device)
    nodes = budget + 1

    costs = torch.cat([logprobs.reshape(bs, depth * width), tables.ends.expand(bs, 2)], dim=1)
    costs = costs.mul_(-float(1 << _QUANTUM)).clamp_(0, _NEVER).nan_to_num_(nan=_NEVER).to(torch.int64)
    sums = costs.index_select(1, tables.path).view(bs, tables.scored, depth).sum(dim=2)
    keys, best = torch.topk(
        torch.add(tables.number, sums, alpha=1 << tables.shift), nodes, dim=1, largest=False, sorted=True
    )
    kept = keys < limits
    best = torch.where(kept, best, tables.padding)

    rows = tables.rows.index_select(1, best.view(-1)).view(tables.rows.shape[0], bs, nodes)
    relatives, place, depths, ancestors = rows[:3], rows[3], rows[4], rows[5:]
    slot_of = torch.full((bs, tables.rows.shape[1] + 1), -1, dtype=torch.int64, device=device)
    slot_of.scatter_(1, best, tables.slot.expand(bs, nodes))
    parents, next_token, next_sibling = slot_of.expand(3, -1, -1).gather(2, relatives).unbind(0)
    seen = ancestors.permute(1, 2, 0).gather(2, depths[:, None, :].expand(bs, nodes, nodes))
    current = token_ids.new_zeros((bs, 1)) if root is None else root.to(torch.int64)[:, None]
    draft = torch.cat([token_ids.reshape(bs, depth * width), current], dim=1).gather(1, place)
    return Tree(
        draft=draft,
        parents=parents,
        depths=depths,
        next_token=next_token,
        next_sibling=next_sibling,
        mask=seen == best[:, None, :],
        count=kept.sum(dim=1),
    )


def positions(tree: Tree, seq_lens: torch.Tensor) -> torch.Tensor:
    """int64 [bs * N]: ``seq_lens`` (int [bs], tokens before the root) plus the depth of each node."""
    return (tree.depths + seq_lens[:, None]).view(-1)


def retrieve_index(tree: Tree) -> torch.Tensor:
    """int64 [bs, N]: the row of each node in the flat batch, ``b * N + i``."""
    bs, nodes = tree.depths.shape
    return torch.arange(bs * nodes, dtype=torch.int64, device=tree.depths.device).view(bs, nodes)


def mask_places(seq_lens: torch.Tensor, nodes: int) -> torch.Tensor:
    """int64 [bs * N * N]: where the flags of ``Tree.mask`` stand in the flat mask of :func:`custom_mask`.

    Args:
        seq_lens: int [bs], tokens before the root.
        nodes: N.
    """
    slot = torch.arange(nodes, dtype=torch.int64, device=seq_lens.device)
    width = seq_lens.to(torch.int64) + nodes
    # Rows of a request end at N times the widths up to its own; the tree is the last N of each row.
    first = torch.sub(width.cumsum(0) * nodes, width, alpha=nodes - 1) - nodes
    return torch.addcmul(first[:, None, None] + slot, slot[:, None], width[:, None, None]).view(-1)


def fill_mask(
    mask: torch.Tensor, places: torch.Tensor, seq_lens_sum: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The flat mask of :func:`custom_mask` in two kernels: all that depends on the lengths' sum.

    Args:
        mask: bool [bs, N, N], ``Tree.mask``.
        places: int64 [bs * N * N], :func:`mask_places`.
        seq_lens_sum, out: as for :func:`custom_mask`.
    """
    bs, nodes, _ = mask.shape
    length = nodes * (seq_lens_sum + bs * nodes)
    if out is None:
        flat = torch.ones(length, dtype=torch.bool, device=mask.device)
    else:
        if out.dtype not in (torch.bool, torch.uint8):
            raise ValueError(f"out must be bool or uint8, not {out.dtype}")
        if out.numel() < length:
            raise ValueError(f"out holds {out.numel()} flags, the mask of {bs} requests needs {length}")
        flat = out[:length].fill_(True)
    return flat.scatter_(0, places, mask.view(flat.dtype).view(-1))


def custom_mask(
    tree: Tree, seq_lens: torch.Tensor, seq_lens_sum: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The mask as ``triton_backend`` reads it: request after request, N rows of ``seq_lens[b] + N`` flags,
    where a node sees the whole prefix, its ancestors and itself.

    The triton backend (0.5.11) finds request b's flags at the sum of ``N * (seq_lens[a] + N)`` over a < b,
    row after row, with or without a CUDA graph; with one it copies the mask into its own buffer first.

    Args:
        seq_lens: int [bs], tokens before the root.
        seq_lens_sum: their sum, known to the host, so that nothing waits for the GPU.
        out: bool or uint8 [at least the mask's length], written instead of a new tensor, for instance the
            backend's ``cuda_graph_custom_mask``; what lies beyond the mask is left alone.

    Returns:
        bool [N * (seq_lens_sum + bs * N)], or the beginning of ``out`` of this length.

    Raises:
        ValueError: ``out`` is too short or of another type.
    """
    places = mask_places(seq_lens, tree.depths.shape[1])
    return fill_mask(tree.mask, places, seq_lens_sum, out=out)
