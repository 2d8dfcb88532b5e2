"""The DDTREE worker: DFLASH's drafter, a tree of its candidates, one verify step of the target.

The drafter, its KV cache, prefill and the loop around a step are DFLASH's, inherited. What differs is what lies
between the drafter's hidden states and the target's forward pass.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy
from sglang.srt.speculative.dflash_worker import DFlashWorker
from sglang.srt.utils import is_cuda

from ddtree_sglang import check
from ddtree_sglang.grow import TreeStep, graph_wanted
from ddtree_sglang.plugin import HOOKS, resolve
from ddtree_sglang.times import StepTimes, times_wanted
from ddtree_sglang.tree import ADAPTIVE_MIN_PROB, fill_mask
from ddtree_sglang.verify import DDTreeVerifyInput

__all__ = ["DDTreeWorker", "gather_candidates", "head_logits", "local_candidates"]

logger = logging.getLogger(__name__)

CHUNK = 256
"""Rows of logits over the whole vocabulary held at a time."""


def head_logits(hidden: torch.Tensor, lm_head: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of this rank's shard of a vocabulary-parallel head, padding left out.

    Args:
        hidden: [n, H].
        lm_head: a head with ``weight`` [padded shard, H] and ``shard_indices``.

    Returns:
        logits float32 [n, v] and ids int64 [v]: the GLOBAL token id of each column.
    """
    shard, weight = lm_head.shard_indices, lm_head.weight
    hidden = hidden.to(weight.dtype)
    base, padded, added = (
        int(shard.num_org_elements),
        int(shard.num_org_elements_padded),
        int(shard.num_added_elements),
    )
    first = int(shard.org_vocab_start_index)
    logits = [torch.matmul(hidden, weight[:base].T).float()]
    ids = [torch.arange(first, first + base, device=hidden.device)]
    if added:
        first = int(shard.added_vocab_start_index)
        logits.append(torch.matmul(hidden, weight[padded : padded + added].T).float())
        ids.append(torch.arange(first, first + added, device=hidden.device))
    if added:
        return torch.cat(logits, dim=1), torch.cat(ids)
    return logits[0], ids[0]


def local_candidates(
    logits: torch.Tensor, ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``k`` largest logits of a shard with their global ids, and the shard's logsumexp.

    Returns:
        values float32 [n, k], token ids int64 [n, k], logsumexp float32 [n]. A shard of fewer than ``k`` tokens is
        filled up with -inf and id 0, so that every rank sends the same shape.
    """
    have = min(k, logits.shape[1])
    values, columns = torch.topk(logits, have, dim=-1)
    tokens = ids[columns]
    if have < k:
        fill = (logits.shape[0], k - have)
        values = torch.cat([values, values.new_full(fill, -math.inf)], dim=-1)
        tokens = torch.cat([tokens, tokens.new_zeros(fill)], dim=-1)
    return values, tokens, torch.logsumexp(logits, dim=-1)


def gather_candidates(
    values: torch.Tensor, tokens: torch.Tensor, lse: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Candidates of all ranks: the ``k`` best of the whole vocabulary, and its logsumexp.

    Every rank gets the same bits, though each ran the drafter for itself and may have rounded otherwise: a rank's own
    logits reach nobody, itself included, but through the gathers, which copy, and what follows is the same kernels on
    the same numbers. So the trees are equal, as are the target's tokens, which sglang gathers in the same way, and
    neither is broadcast. (``SYNC_TOKEN_IDS_ACROSS_TP`` of sglang broadcasts the target's tokens all the same.)

    Args:
        values, tokens, lse: as :func:`local_candidates` returns them.
        group: sglang's tensor-parallel group.
    """
    size = int(group.world_size)
    if size == 1:
        return values, tokens, lse
    n, k = values.shape
    all_values = values.new_empty((size * n, k))
    all_tokens = tokens.new_empty((size * n, k))
    all_lse = lse.new_empty((size * n,))
    group.all_gather_into_tensor(all_values, values.contiguous())
    group.all_gather_into_tensor(all_tokens, tokens.contiguous())
    group.all_gather_into_tensor(all_lse, lse.contiguous())
    values = all_values.view(size, n, k).transpose(0, 1).reshape(n, size * k)
    tokens = all_tokens.view(size, n, k).transpose(0, 1).reshape(n, size * k)
    values, columns = torch.topk(values, k, dim=-1)
    return values, tokens.gather(1, columns), torch.logsumexp(all_lse.view(size, n), dim=0)


class DDTreeWorker(DFlashWorker):
    """Drafts a block as DFLASH does and verifies a tree of its candidates (tensor parallel, no pipeline)."""

    def __init__(self, server_args: Any, *args: Any, target_worker: Any, **kwargs: Any) -> None:
        """Refuse, load the drafter, check.

        Raises:
            DDTreeError: for arguments or a model that DDTREE does not run with, a hook that is not in place, a
                consumer of the verify size that was not told.
        """
        missing = check.missing_hooks(HOOKS, resolve)
        if missing:
            raise check.DDTreeError(
                "DDTREE is not wholly installed in this sglang: no hook on "
                + ", ".join(missing)
                + ". The log of this process says why (Failed to apply hooks to ...). Use the runtime's own sglang "
                "0.5.11; nothing is served."
            )
        check.refuse(server_args)
        check.refuse_model(target_worker.model_runner)
        super().__init__(server_args, *args, target_worker=target_worker, **kwargs)

        draft = self.draft_model_runner
        check.refuse_engine(
            check.head_refusals(getattr(target_worker.model_runner.model, "lm_head", None))
            + check.draft_refusals(draft, int(draft.req_to_token_pool.size))
        )

        self.verify_width = check.verify_tokens(server_args)
        self.budget = self.verify_width - 1
        self.draft_depth = self.block_size - 1
        vocabulary = int(target_worker.model_runner.model_config.vocab_size)
        self.topk = min(int(server_args.speculative_ddtree_topk_cap), self.budget, vocabulary)
        adaptive = server_args.speculative_ddtree_budget_schedule == "adaptive"
        self.min_prob = ADAPTIVE_MIN_PROB if adaptive else None
        most = sum(self.topk**depth for depth in range(1, self.block_size))
        if most < self.budget and self.tp_rank == 0:
            logger.warning(
                "DDTREE: %d branches over %d positions make %d nodes at most, %d of the budget are never used: "
                "lower --speculative-ddtree-budget or raise --speculative-ddtree-topk-cap",
                self.topk,
                self.draft_depth,
                most,
                self.budget - most,
            )
        self.kernel_walk = is_cuda()
        self._times = StepTimes(cuda=self.kernel_walk) if times_wanted() and self.tp_rank == 0 else None
        self._steps = self._accepted = self._requests = self._off_top = 0
        self._log_interval = int(server_args.decode_log_interval)

        faults = check.size_faults(target_worker.model_runner, self.draft_model_runner, server_args)
        check.self_check(faults, logger.warning)
        self.tree_step = TreeStep(
            self.draft_depth,
            self.topk,
            self.budget,
            self.device,
            min_prob=self.min_prob,
            sizes=self._graph_sizes(),
        )
        if self.tp_rank == 0:
            logger.info("DDTREE tree step: CUDA graphs of batch sizes %s", self.tree_step.sizes or "none")
            logger.info(
                "DDTREE ready. block_size=%d, budget=%d, verify tokens=%d, topk=%d, schedule=%s, self-check=%s",
                self.block_size,
                self.budget,
                self.verify_width,
                self.topk,
                server_args.speculative_ddtree_budget_schedule,
                "passed" if not faults else "FAILED, skipped on request",
            )

    def _graph_sizes(self) -> list[int]:
        """Batch sizes for which the tree step is captured: those of the drafter's CUDA graphs."""
        runner = self.draft_model_runner.graph_runner
        if runner is None or not is_cuda() or not graph_wanted():
            return []
        return [int(size) for size in runner.capture_bs]

    def _reached(self, mark: str) -> None:
        if self._times is not None:
            self._times.mark(mark)

    def _target_head(self) -> tuple[Any, Any]:
        """The target's embedding and head: the drafter has none of its own."""
        model = self.target_worker.model_runner.model
        return model.get_input_embeddings(), model.lm_head

    def _draft_hidden(self, batch: Any, draft_input: Any, embed: Any) -> torch.Tensor:
        """Run the drafter over a block of mask tokens behind each request's current token.

        Returns:
            hidden states [bs, B, H]. The slots that the block took are given back.
        """
        bs, block = batch.batch_size(), self.block_size
        self._ensure_draft_block_buffers(bs)
        ids = self._draft_block_ids_buf[:bs]
        ids.fill_(int(self._mask_token_id))
        ids[:, 0].copy_(draft_input.verified_id)
        embeds = embed(ids)

        # positions are those of the target; the lengths are those of the drafter's own, perhaps windowed, cache
        places = self._draft_block_positions_buf[:bs]
        torch.add(batch.seq_lens.unsqueeze(1), self._block_pos_offsets, out=places)
        start = draft_input.draft_seq_lens.to(dtype=torch.int32, device=self.device)
        end = self._draft_block_end_buf[:bs]
        torch.add(start, block, out=end)
        lens_cpu = self._draft_seq_lens_cpu_buf[:bs]
        known = batch.seq_lens_cpu
        lens_cpu.copy_(known.clamp(max=self.draft_window_size) if self.use_compact_draft_cache else known)

        runner = self.draft_model_runner
        allocator = runner.token_to_kv_pool_allocator
        kept = allocator.backup_state()
        try:
            slots = allocator.alloc(bs * block)
            if slots is None:
                raise RuntimeError(f"DDTREE draft: no room for {bs * block} tokens of the draft block")
            spec_utils.assign_req_to_token_pool_func(
                batch.req_pool_indices, runner.req_to_token_pool.req_to_token, start, end, slots, bs
            )
            forward_batch = ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=bs,
                input_ids=ids.flatten(),
                req_pool_indices=batch.req_pool_indices,
                seq_lens=start,
                out_cache_loc=slots,
                seq_lens_sum=int(lens_cpu.sum()),
                seq_lens_cpu=lens_cpu,
                positions=places.reshape(-1),
                req_to_token_pool=runner.req_to_token_pool,
                token_to_kv_pool=runner.token_to_kv_pool,
                attn_backend=runner.attn_backend,
                input_embeds=embeds.view(-1, embeds.shape[-1]),
                spec_algorithm=runner.spec_algorithm,
                spec_info=self._draft_block_spec_info,
                capture_hidden_mode=CaptureHiddenMode.NULL,
            )
            with torch.inference_mode():
                hidden = runner.forward(forward_batch).logits_output.hidden_states
        finally:
            allocator.restore_state(kept)
        if hidden is None:
            raise RuntimeError("DDTREE draft: the draft model returned no hidden states")
        return hidden.view(bs, block, -1)

    def _candidates(self, hidden: torch.Tensor, head: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's ``K`` best tokens at each position with their log-probabilities.

        Args:
            hidden: [n, H].

        Returns:
            log-probabilities float32 [n, K], best first, and global token ids int64 [n, K].
        """
        group = get_tp_group()
        logprobs, tokens = [], []
        for rows in torch.split(hidden, CHUNK):
            logits, ids = head_logits(rows, head)
            values, chosen, lse = gather_candidates(*local_candidates(logits, ids, self.topk), group)
            logprobs.append(values - lse[:, None])
            tokens.append(chosen)
        return torch.cat(logprobs), torch.cat(tokens)

    def _prepare_for_speculative_decoding(self, batch: Any, draft_input: Any) -> None:
        """Draft, grow the tree, give the batch what the target is to verify."""
        if batch.forward_mode.is_extend() or batch.forward_mode.is_idle():
            return
        if batch.has_grammar:
            raise RuntimeError(
                "DDTREE batch has grammar constraints, which the scheduler should have refused"
            )
        self._append_target_hidden_to_draft_kv(batch, draft_input)

        bs, depth = batch.batch_size(), self.draft_depth
        embed, head = self._target_head()
        hidden = self._draft_hidden(batch, draft_input, embed)
        self._reached("drafted")
        logprobs, tokens = self._candidates(hidden[:, 1:].reshape(bs * depth, -1), head)
        self._reached("proposed")
        grown = self.tree_step(
            logprobs.view(bs, depth, -1), tokens.view(bs, depth, -1), draft_input.verified_id, batch.seq_lens
        )
        mask = fill_mask(grown.tree.mask, grown.places, int(batch.seq_lens_cpu.sum()))
        self._reached("grown")
        verify_input = DDTreeVerifyInput(
            draft_token=grown.tree.draft.view(-1),
            positions=grown.positions,
            draft_token_num=self.verify_width,
            custom_mask=mask,
            tree=grown.tree,
            rows=grown.rows,
            block_size=self.block_size,
            kernel=self.kernel_walk,
            tp_group=get_tp_group(),
            reached=self._reached,
        )
        _, masked = resolve_dflash_verify_mask_policy(self.model_runner.attn_backend)
        verify_input.prepare_for_verify(batch, self.page_size, build_custom_mask=masked)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec_info = self._verify_input = verify_input
        batch.return_hidden_states = False
        self._reached("entered")

    def _append_target_hidden_to_draft_kv(self, batch: Any, draft_input: Any) -> None:
        """Write the drafter's KV of the tokens that the target has just processed.

        After a verify step their slots and positions are at hand; DFLASH would look both up again and wait for the
        GPU twice. (The fused kernel's helper waits once more, for the largest position.) After a prefill, and with a
        windowed cache of the drafter's own, DFLASH's way is taken; it also switches the fused kernel off if that fails.
        """
        step = batch.spec_info
        if not isinstance(step, DDTreeVerifyInput) or self.use_compact_draft_cache:
            super()._append_target_hidden_to_draft_kv(batch, draft_input)
            return
        slots, places = batch.out_cache_loc, step.committed
        if places is None or len(draft_input.target_hidden) != len(slots) or len(places) != len(slots):
            raise RuntimeError(
                f"DDTREE commit: {len(draft_input.target_hidden)} hidden states for {len(slots)} slots"
            )
        with torch.inference_mode():
            hidden = self.draft_model.project_target_hidden(draft_input.target_hidden)
            if self._use_fused_kv_materialize and self._fused_kv_helper is not None:
                self._append_target_hidden_fused(hidden, places, slots)
            else:
                self._append_target_hidden_sequential(hidden, places, slots)
        draft_input.draft_seq_lens = batch.seq_lens.to(torch.int32)
        draft_input.ctx_lens = torch.zeros_like(draft_input.ctx_lens)
        draft_input.target_hidden = draft_input.target_hidden[:0]

    def forward_batch_generation(self, batch: Any, **kwargs: Any) -> Any:
        """One prefill or one step, as DFLASH does it; what a step accepted is noted for the log."""
        steps = batch.forward_mode.is_decode()
        if steps and self._times is not None:
            self._times.begin(batch.batch_size())
        result = super().forward_batch_generation(batch, **kwargs)
        if steps and result.num_accepted_drafts_per_req_cpu is not None:
            if self._times is not None:
                self._times.end()
            # let go of: it holds the mask
            step, self._verify_input = self._verify_input, None
            self._note(result.num_accepted_drafts_per_req_cpu, step.off_top)
        return result

    def _note(self, accepted: list[int], off_top: int) -> None:
        """Log ``DDTREE metrics`` once in ``--decode-log-interval`` steps."""
        self._steps += 1
        self._requests += len(accepted)
        self._accepted += sum(accepted)
        self._off_top += off_top
        if self._steps < self._log_interval:
            return
        if self.tp_rank == 0:
            logger.info(
                "DDTREE metrics: steps=%d, accept len=%.2f, accepted drafts=%d, of these off the top branch=%d",
                self._steps,
                1 + self._accepted / self._requests,
                self._accepted,
                self._off_top,
            )
            self._note_times()
        self._steps = self._requests = self._accepted = self._off_top = 0

    def _note_times(self) -> None:
        """Log ``DDTREE times``. A diagnostic that fails says so and is switched off; the steps go on."""
        if self._times is None:
            return
        try:
            line = self._times.line()
        except Exception as error:
            self._times = None
            logger.warning("DDTREE times are switched off: %s: %s", type(error).__name__, error)
            return
        if line is not None:
            logger.info(line)
