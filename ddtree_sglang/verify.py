"""Verification of a tree: the input of the target's step, the walk along its answers, the commit of the path.

Shapes: ``bs`` requests, ``B`` block size, ``N = budget + 1`` tokens a request, ``V`` vocabulary. Row ``b * N + i`` of
the target's output is node ``i`` of request ``b``; node 0 is the root, the request's current token.

A step costs one transfer to the host (the accepted paths) and one back (which slots to keep and to free).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.sampler import (
    SYNC_TOKEN_IDS_ACROSS_TP,
    apply_custom_logit_processor,
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from sglang.srt.mem_cache.common import alloc_token_slots
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

if TYPE_CHECKING:
    from ddtree_sglang.tree import Tree

__all__ = [
    "DDTreeVerifyInput",
    "commit_rows",
    "kernel_walk",
    "sampling_requests",
    "target_tokens",
    "torch_walk",
]

SAMPLED_ROWS = 128
"""Rows of probabilities over the whole vocabulary sorted at a time: 128 of 160000 take about half a GiB."""


def torch_walk(
    candidates: torch.Tensor, tree: Tree, predicted: torch.Tensor, block_size: int, rows: torch.Tensor
) -> torch.Tensor:
    """Follow the target's tokens down the tree, in fixed shapes and without a synchronisation.

    Args:
        candidates: int64 [bs, N], tokens of the nodes.
        tree: its links.
        predicted: int64 [bs, N], the target's token after each node.
        block_size: length of the longest path, the root included.
        rows: int64 [bs, N], flat row ``b * N + i`` of each node.

    Returns:
        int64 [bs, B]: the flat row of the node at each depth of the accepted path, root first, then -1.

    Siblings hold different tokens, so at most one child of a node matches.
    """
    bs, width = candidates.shape
    request = torch.arange(bs, device=candidates.device)
    valid = torch.arange(width, device=candidates.device)[None, :] < tree.count[:, None]
    current = torch.zeros(bs, dtype=torch.int64, device=candidates.device)
    alive = torch.ones(bs, dtype=torch.bool, device=candidates.device)
    path = [rows[:, 0]]
    for _ in range(1, block_size):
        wanted = predicted[request, current]
        match = (tree.parents == current[:, None]) & (candidates == wanted[:, None]) & valid
        alive = alive & match.any(dim=1)
        current = torch.where(alive, match.to(torch.int64).argmax(dim=1), current)
        path.append(torch.where(alive, rows[request, current], -1))
    return torch.stack(path, dim=1)


def kernel_walk(
    candidates: torch.Tensor, tree: Tree, predicted: torch.Tensor, block_size: int, rows: torch.Tensor
) -> torch.Tensor:
    """The same walk as :func:`torch_walk` by ``sgl_kernel.verify_tree_greedy``, one launch.

    The kernel walks as many levels as ``accept_index`` has columns, hence ``[bs, B]``.
    """
    from sgl_kernel import verify_tree_greedy

    bs, width = candidates.shape
    device = candidates.device
    accept_index = torch.full((bs, block_size), -1, dtype=torch.int32, device=device)
    verify_tree_greedy(
        predicts=torch.empty((bs * width,), dtype=torch.int32, device=device),
        accept_index=accept_index,
        accept_token_num=torch.zeros((bs,), dtype=torch.int32, device=device),
        candidates=candidates,
        # the kernel's own spelling
        retrive_index=rows,
        retrive_next_token=tree.next_token,
        retrive_next_sibling=tree.next_sibling,
        target_predict=predicted,
    )
    return accept_index.to(torch.int64)


def sampling_requests(batch: Any) -> list[int]:
    """Requests of a batch whose tokens are drawn: all that are not greedy, which sglang writes as a top-k of 1.

    Known to the host, request by request: ``is_all_greedy`` is of the batch, and stays False when the last request that
    sampled has left it.
    """
    info = batch.sampling_info
    if info is None or info.is_all_greedy:
        return []
    return [at for at, req in enumerate(batch.reqs) if req.sampling_params.top_k > 1]


def target_tokens(
    logits: torch.Tensor, sampling_info: Any, positions: torch.Tensor, width: int, sampling: Sequence[int]
) -> torch.Tensor:
    """The target's own next token after every node, greedy or sampled.

    A path is followed only while the drafter's node equals a token drawn from the target's distribution after its
    parent, so the output is distributed as without speculation, whatever the drafter proposed. This is the rule of
    ``tree_speculative_sampling_target_only`` with draft probabilities of zero and thresholds of 1.

    Args:
        logits: [bs * N, V].
        sampling_info: sglang's ``SamplingBatchInfo`` of the batch, or None.
        positions: int64 [bs * N], for requests with a seed of their own.
        width: N.
        sampling: the requests that sample, :func:`sampling_requests`. Only their rows are drawn, which sorts the
            vocabulary for each; the others get the argmax, whoever runs beside them.

    Returns:
        int64 [bs, N].
    """
    if not sampling:
        return torch.argmax(logits, dim=-1).view(-1, width)
    rows = torch.arange(len(logits), device=logits.device)
    everyone = len(sampling) * width == len(logits)
    if not everyone:
        chosen = torch.tensor(sampling, dtype=torch.int64).to(logits.device, non_blocking=True)
        rows = rows.view(-1, width).index_select(0, chosen).view(-1)
    drawn = torch.cat(
        [_drawn(logits, sampling_info, piece, width, positions) for piece in torch.split(rows, SAMPLED_ROWS)]
    )
    if not everyone:
        drawn = torch.argmax(logits, dim=-1).index_copy_(0, rows, drawn)
    return drawn.view(-1, width)


def _drawn(
    logits: torch.Tensor, info: Any, rows: torch.Tensor, width: int, positions: torch.Tensor
) -> torch.Tensor:
    """int64 [n]: one token for each of ``rows`` (int64 [n]) of the logits, drawn as its request wants it."""
    request, positions = rows // width, positions[rows]
    probs = torch.softmax(logits.index_select(0, rows).float() / info.temperatures[request], dim=-1)
    seed = None if info.sampling_seed is None else info.sampling_seed[request]
    if info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling:
        drawn = top_k_top_p_min_p_sampling_from_probs_torch(
            probs,
            info.top_ks[request],
            info.top_ps[request],
            info.min_ps[request],
            info.need_min_p_sampling,
            seed,
            positions,
        )
    else:
        drawn = sampling_from_probs_torch(probs, sampling_seed=seed, positions=positions)
    return drawn.to(torch.int64)


def commit_rows(paths: list[list[int]], width: int) -> tuple[list[int], list[int]]:
    """Rows of a step's slots to keep and to free.

    Args:
        paths: for each request the local nodes to commit, root first, in the order of the path.
        width: N.

    Returns:
        (keep, free): flat rows ``b * N + i``; ``keep`` in the order of the paths, which is the order of the
        sequence. Together they are every row once.

    Raises:
        RuntimeError: if a path names a node twice or one outside the tree: a slot would be freed twice.
    """
    keep: list[int] = []
    free: list[int] = []
    for request, path in enumerate(paths):
        kept = set(path)
        if len(kept) != len(path) or not kept <= set(range(width)):
            raise RuntimeError(f"DDTREE accepted path {path} is not a path of a tree of {width} nodes")
        keep += [request * width + node for node in path]
        free += [request * width + node for node in range(width) if node not in kept]
    return keep, free


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """What the target verifies in one step: ``draft_token`` int64 [bs * N], root first, and the tree around it.

    ``draft_token_num`` is N. ``tree``, ``rows`` (int64 [bs, N], the flat row of each node), ``block_size`` and
    ``kernel`` are set by the worker, which is told by ``reached`` when the target has answered. After :meth:`verify`,
    ``off_top`` counts the committed nodes that were not the best child of their parent, and ``committed`` (int64
    [sum of the paths]) holds the position of each committed node, in the order of ``batch.out_cache_loc``.
    """

    tree: Tree | None = None
    rows: torch.Tensor | None = None
    block_size: int = 0
    kernel: bool = False
    tp_group: Any = None
    reached: Callable[[str], None] | None = None
    off_top: int = 0
    committed: torch.Tensor | None = None

    def prepare_for_verify(self, batch: Any, page_size: int, *, build_custom_mask: bool = True) -> None:
        """Take N slots a request behind its prefix and enter them in ``req_to_token``.

        ``custom_mask`` stands already: it is part of the tree.
        """
        if page_size != 1 or not build_custom_mask or self.custom_mask is None:
            raise RuntimeError(
                f"DDTREE needs page size 1 and a mask, got page size {page_size}, "
                f"mask policy {build_custom_mask}, mask {self.custom_mask is not None}"
            )
        batch.input_ids = self.draft_token
        batch.out_cache_loc = alloc_token_slots(batch.tree_cache, len(batch.input_ids))
        spec_utils.assign_req_to_token_pool_func(
            batch.req_pool_indices,
            batch.req_to_token_pool.req_to_token,
            batch.seq_lens,
            batch.seq_lens + self.draft_token_num,
            batch.out_cache_loc,
            batch.batch_size(),
        )

    def _adjusted(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        """Logits after custom processors and biases, as DFLASH applies them: one row for a whole step."""
        info = batch.sampling_info
        if info is None:
            return logits
        if len(info) != batch.batch_size():
            raise RuntimeError(
                f"DDTREE verify: {len(info)} sampling entries for {batch.batch_size()} requests"
            )
        if info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, info, num_tokens_in_batch=self.draft_token_num)
        if info.penalizer_orchestrator.is_required or info.logit_bias is not None:
            bias = torch.zeros(
                (batch.batch_size(), logits.shape[1]), dtype=torch.float32, device=logits.device
            )
            info.apply_logits_bias(bias)
            logits.add_(torch.repeat_interleave(bias, self.draft_token_num, dim=0))
        return logits

    def _accepted(self, batch: Any, logits: torch.Tensor) -> list[tuple[list[int], list[int], list[int]]]:
        """Of every request, on the host: the nodes of its path, root first; after each node the target's token, and
        the node's best child, -1 if it has none.
        """
        tree, width = self.tree, int(self.draft_token_num)
        assert tree is not None and self.rows is not None
        candidates = self.draft_token.view(-1, width)
        sampling = sampling_requests(batch)
        predicted = target_tokens(logits, batch.sampling_info, self.positions, width, sampling)
        shared = self.tp_group is not None and self.tp_group.world_size > 1
        if shared and (sampling or SYNC_TOKEN_IDS_ACROSS_TP):
            # ranks draw for themselves: one of them decides, as in sglang's sampler
            self.tp_group.broadcast(predicted, src=0)
        walked = (kernel_walk if self.kernel else torch_walk)(
            candidates, tree, predicted, self.block_size, self.rows
        )
        at = walked.clamp(min=0)
        after, best = predicted.view(-1).take(at), tree.next_token.view(-1).take(at)
        packed = torch.stack([walked, after, best], dim=1).cpu().tolist()
        found: list[tuple[list[int], list[int], list[int]]] = []
        for request, (rows, following, first) in enumerate(packed):
            path = [row - request * width for row in rows if row >= 0]
            if not path or path[0] != 0:
                raise RuntimeError(f"DDTREE accepted path {path} does not begin at the root")
            found.append((path, following[: len(path)], first[: len(path)]))
        return found

    def verify(
        self, *, batch: Any, logits_output: Any, page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Accept a path of each request's tree and commit it.

        Appends the tokens to the requests, keeps the KV slots of the committed nodes and frees all others of the
        step, rewrites ``req_to_token`` so that the path lies behind the prefix, moves the sequence lengths on.

        Returns:
            new_verified_id: int64 [bs], the current token of each request.
            commit_lens: int32 [bs], nodes committed, the root included; at most B.
            next_target_hidden: [sum(commit_lens), features], the target's hidden states of those nodes in order.
            accepted drafts of each request, on the host.

        Raises:
            RuntimeError: if the walk or the hidden states are not what a verify step yields.
        """
        if batch.forward_mode.is_idle():
            empty = torch.empty((0,), dtype=torch.int64, device=batch.device)
            return empty, empty.to(torch.int32), empty, []
        if self.reached is not None:
            self.reached("verified")
        hidden = logits_output.hidden_states
        if hidden is None:
            raise RuntimeError("DDTREE verify needs the target's hidden states, got none")
        bs, width = batch.batch_size(), int(self.draft_token_num)
        device = logits_output.next_token_logits.device
        walked = self._accepted(batch, self._adjusted(logits_output.next_token_logits, batch))

        think_end = batch.model_config.think_end_id
        paths: list[list[int]] = []
        accepted: list[int] = []
        current: list[int] = []
        self.off_top = 0
        for req, (path, proposed, best) in zip(batch.reqs, walked, strict=True):
            appended = 0
            for token in proposed:
                req.output_ids.append(token)
                appended += 1
                if req.require_reasoning and think_end is not None:
                    req.update_reasoning_tokens(token, think_end)
                req.check_finished()
                if req.finished():
                    break
            # the last token appended is not in the KV cache yet: the next step's root
            paths.append(path[:appended])
            self.off_top += sum(path[i + 1] != best[i] for i in range(appended - 1))
            current.append(req.output_ids[-1])
            accepted.append(appended - 1)
            req.spec_verify_ct += 1
            req.spec_accepted_drafts += appended - 1
            req.update_spec_acceptance_histogram(appended - 1)
            req.kv_committed_len += appended
            req.kv_allocated_len = req.kv_committed_len

        lens = [len(path) for path in paths]
        keep, free = commit_rows(paths, width)
        prefixes = batch.seq_lens_cpu.tolist()
        places = [prefix + i for prefix, count in zip(prefixes, lens, strict=True) for i in range(count)]
        # positions first: at the beginning they are aligned, and the drafter's kernel is compiled for that once
        moved = torch.tensor([*places, *keep, *free, *lens, *current], dtype=torch.int64)
        self.committed, keep_rows, free_rows, commit_lens, verified = torch.split(
            moved.to(device, non_blocking=True), [len(keep), len(keep), len(free), bs, bs]
        )

        slots = batch.out_cache_loc
        batch.token_to_kv_pool_allocator.free(slots[free_rows])
        batch.out_cache_loc = slots[keep_rows]
        end = batch.seq_lens + commit_lens.to(batch.seq_lens.dtype)
        spec_utils.assign_req_to_token_pool_func(
            batch.req_pool_indices,
            batch.req_to_token_pool.req_to_token,
            batch.seq_lens,
            end,
            batch.out_cache_loc,
            bs,
        )
        batch.seq_lens.add_(commit_lens.to(batch.seq_lens.dtype))
        batch.seq_lens_cpu.add_(torch.tensor(lens, dtype=batch.seq_lens_cpu.dtype))
        batch.seq_lens_sum += sum(lens)

        next_hidden = hidden.view(bs * width, -1).index_select(0, keep_rows)
        logits_output.hidden_states = None
        return verified, commit_lens.to(torch.int32), next_hidden, accepted
