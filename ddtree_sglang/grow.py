"""The tree of a step: built at once, or by a CUDA graph.

Building a tree takes about fifty small kernels: 0.15 ms of the GPU's time, but four times as long to launch. So they
are captured once, at the worker's start, for the batch sizes that the drafter's own graphs have; a batch between two
of them is padded, a larger one is built kernel by kernel. What depends on the sum of the lengths, the flat mask, stays
outside (:func:`ddtree_sglang.tree.fill_mask`, two kernels).
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddtree_sglang.tree import Tree, build_tree, mask_places, positions, prepare, retrieve_index

__all__ = ["TREE_GRAPH", "Grown", "TreeStep", "graph_wanted"]

TREE_GRAPH = "DDTREE_TREE_GRAPH"
"""Environment variable: ``0`` builds every tree kernel by kernel, without a CUDA graph."""


def graph_wanted() -> bool:
    """Whether the environment leaves the graphs of the tree step on."""
    return os.environ.get(TREE_GRAPH) != "0"


@dataclass(frozen=True)
class Grown:
    """The trees of a batch and what the verify step takes from them, all on the device.

    Attributes:
        tree: the trees.
        positions: int64 [bs * N], :func:`ddtree_sglang.tree.positions`.
        places: int64 [bs * N * N], :func:`ddtree_sglang.tree.mask_places`.
        rows: int64 [bs, N], :func:`ddtree_sglang.tree.retrieve_index`.
    """

    tree: Tree
    positions: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor

    def first(self, bs: int) -> Grown:
        """The first ``bs`` requests, as views."""
        tree, nodes = self.tree, self.rows.shape[1]
        if len(self.rows) == bs:
            return self
        return Grown(
            tree=Tree(
                draft=tree.draft[:bs],
                parents=tree.parents[:bs],
                depths=tree.depths[:bs],
                next_token=tree.next_token[:bs],
                next_sibling=tree.next_sibling[:bs],
                mask=tree.mask[:bs],
                count=tree.count[:bs],
            ),
            positions=self.positions[: bs * nodes],
            places=self.places[: bs * nodes * nodes],
            rows=self.rows[:bs],
        )


class TreeStep:
    """Grows the trees of a step from the drafter's candidates.

    With ``sizes`` the inputs are copied into buffers that never move and what is returned are views of buffers that
    the next call writes anew: use it up, or copy it, before that. On a GPU each size is one CUDA graph; elsewhere the
    kernels are run again over the same buffers.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        budget: int,
        device: torch.device | str,
        *,
        min_prob: float | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        """Put the tables on the device and capture a graph for each batch size of ``sizes``.

        Args:
            depth, width, budget, min_prob: D, K, budget and threshold, as for :func:`ddtree_sglang.tree.build_tree`.
            device: where the candidates will be.
            sizes: batch sizes of 1 or more; none for no buffers and no graphs.

        Raises:
            ValueError: no tree of this shape can be built.
        """
        prepare(depth, width, budget, device, min_prob=min_prob)
        self.budget, self.min_prob = budget, min_prob
        self.sizes = sorted(set(sizes))
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Grown]] = {}
        if not self.sizes:
            return
        most = self.sizes[-1]
        self._logprobs = torch.zeros((most, depth, width), dtype=torch.float32, device=device)
        self._tokens = torch.zeros((most, depth, width), dtype=torch.int64, device=device)
        self._root = torch.zeros((most,), dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros((most,), dtype=torch.int64, device=device)
        if self._logprobs.is_cuda:
            self._capture()

    def _grow(
        self, logprobs: torch.Tensor, tokens: torch.Tensor, root: torch.Tensor, seq_lens: torch.Tensor
    ) -> Grown:
        tree = build_tree(logprobs, tokens, self.budget, min_prob=self.min_prob, root=root)
        return Grown(
            tree, positions(tree, seq_lens), mask_places(seq_lens, self.budget + 1), retrieve_index(tree)
        )

    def _grow_buffers(self, size: int) -> Grown:
        return self._grow(
            self._logprobs[:size], self._tokens[:size], self._root[:size], self._seq_lens[:size]
        )

    def _capture(self) -> None:
        """One graph a size, the largest first, in a memory pool of their own that they share.

        Sharing is sound because a graph's outputs are used up before another one is replayed; the outputs themselves
        are held here, so no later capture gets their memory. The pool is not sglang's, whose graphs are left alone.
        """
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for size in reversed(self.sizes):
            # once outside of the capture: whatever a first call loads or sets up
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._grow_buffers(size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                grown = self._grow_buffers(size)
            self._graphs[size] = graph, grown

    def __call__(
        self, logprobs: torch.Tensor, tokens: torch.Tensor, root: torch.Tensor, seq_lens: torch.Tensor
    ) -> Grown:
        """Grow the trees.

        Args:
            logprobs: float32 [bs, D, K]. tokens: int64 [bs, D, K]. root: int64 [bs]. All as for
                :func:`ddtree_sglang.tree.build_tree`.
            seq_lens: int [bs], tokens before the root.
        """
        bs = len(root)
        at = bisect.bisect_left(self.sizes, bs)
        if at == len(self.sizes):
            return self._grow(logprobs, tokens, root, seq_lens)
        size = self.sizes[at]
        self._logprobs[:bs].copy_(logprobs)
        self._tokens[:bs].copy_(tokens)
        self._root[:bs].copy_(root)
        self._seq_lens[:bs].copy_(seq_lens)
        if size not in self._graphs:
            return self._grow_buffers(size).first(bs)
        graph, grown = self._graphs[size]
        graph.replay()
        return grown.first(bs)
