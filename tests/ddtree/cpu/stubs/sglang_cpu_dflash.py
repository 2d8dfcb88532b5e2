"""sglang general plugin (entry point ``sglang.srt.plugins``): what DFLASH and DDTREE need on a CPU, for tests only.

1. The attention backend ``triton`` becomes torch_native with TARGET_VERIFY. A ``custom_mask`` is honoured: each row of
   a request's block sees what the mask allows, by scaled_dot_product_attention. This is a stand-in for the triton
   kernel, not that kernel: what the kernel does with a tree mask is tested apart, under ``TRITON_INTERPRET=1``.
2. The triton kernel ``assign_req_to_token_pool`` becomes a loop, other triton kernels are not launched.
3. sglang hands the drafter bfloat16 embeddings outside CUDA graphs, whatever its weights are; here they are turned
   into the type of the weights, so that target and drafter can be float32 and texts be compared exactly.

Scheduler, draft worker, verification, metrics and logging are sglang's and DDTREE's own code, untouched.
"""

from __future__ import annotations


def register() -> None:
    import os

    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    import sys

    import sglang.srt.speculative.spec_utils as spec_utils
    import torch
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.mem_cache import common as mem_cache_common
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.models.dflash import DFlashDraftModel

    def make(runner):
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        class CpuVerifyBackend(TorchNativeAttnBackend):
            ddtree_tree_mask = True
            num_draft_tokens = None

            def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
                fb = forward_batch
                if not fb.forward_mode.is_target_verify():
                    return super().forward_extend(q, k, v, layer, fb, save_kv_cache)
                n = int(fb.spec_info.draft_token_num)
                if self.num_draft_tokens not in (None, n):
                    raise RuntimeError(f"told {self.num_draft_tokens} tokens a request, sent {n}")
                if fb.spec_info.custom_mask is not None:
                    return self._forward_masked(q, k, v, layer, fb, n, save_kv_cache)
                kept = fb.seq_lens, fb.extend_prefix_lens, fb.extend_seq_lens
                fb.extend_prefix_lens = kept[0]
                fb.extend_seq_lens = torch.full_like(kept[0], n)
                fb.seq_lens = kept[0] + n
                try:
                    return super().forward_extend(q, k, v, layer, fb, save_kv_cache)
                finally:
                    fb.seq_lens, fb.extend_prefix_lens, fb.extend_seq_lens = kept

            def _forward_masked(self, q, k, v, layer, fb, n, save_kv_cache):
                """Rows b * n .. b * n + n of q against prefix and block of request b, under its part of the mask."""
                pool = fb.token_to_kv_pool
                if save_kv_cache:
                    pool.set_kv_buffer(layer, fb.out_cache_loc, k, v)
                keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
                rows = q.view(-1, n, layer.tp_q_head_num, layer.qk_head_dim)
                out = q.new_empty((rows.shape[0], n, layer.tp_q_head_num, layer.v_head_dim))
                start = 0
                for b, prefix in enumerate(fb.seq_lens.tolist()):
                    length = prefix + n
                    mask = fb.spec_info.custom_mask[start : start + n * length].view(n, length)
                    start += n * length
                    slots = fb.req_to_token_pool.req_to_token[fb.req_pool_indices[b], :length]
                    out[b] = torch.nn.functional.scaled_dot_product_attention(
                        rows[b].movedim(0, 1)[None],
                        keys[slots].to(q.dtype).movedim(0, 1)[None],
                        values[slots].to(q.dtype).movedim(0, 1)[None],
                        attn_mask=mask.bool()[None, None],
                        scale=layer.scaling,
                        enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                    )[0].movedim(1, 0)
                if start != fb.spec_info.custom_mask.numel():
                    raise RuntimeError(f"mask of {fb.spec_info.custom_mask.numel()} flags, {start} used")
                return out.view(rows.shape[0] * n, -1)

        backend = CpuVerifyBackend(runner)
        backend.num_draft_tokens = runner.server_args.speculative_num_draft_tokens
        is_ddtree = getattr(runner.spec_algorithm, "is_ddtree", None)
        if is_ddtree and is_ddtree() and not runner.is_draft_worker:
            backend.num_draft_tokens = runner.server_args.speculative_ddtree_budget + 1
        return backend

    attention_registry.ATTENTION_BACKENDS["triton"] = make
    attention_registry.ATTENTION_BACKENDS["torch_native"] = make

    def assign(req_pool_indices, req_to_token, start, end, out_cache_loc, batch_size):
        taken = 0
        for i in range(batch_size):
            first, last = int(start[i]), int(end[i])
            piece = out_cache_loc[taken : taken + last - first]
            req_to_token[int(req_pool_indices[i]), first:last] = piece.to(req_to_token.dtype)
            taken += last - first

    # "triton" is a name here: other code must not launch triton kernels because of it
    mem_cache_common.support_triton = forward_batch_info.support_triton = lambda backend: False
    draft_forward = DFlashDraftModel.forward

    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **kwargs):
        return draft_forward(
            self, input_ids, positions, forward_batch, input_embeds.to(self.norm.weight.dtype), **kwargs
        )

    DFlashDraftModel.forward = forward
    # the copy kernel of the KV pool (used with page_size > 1 or topk > 1 only) is not warmed up
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None
    spec_utils.assign_req_to_token_pool_func = assign
    for name in ("sglang.srt.speculative.dflash_info", "sglang.srt.speculative.dflash_worker"):
        if name in sys.modules:
            sys.modules[name].assign_req_to_token_pool_func = assign
