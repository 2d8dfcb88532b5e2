"""kernel.py: sglang's own triton extend kernel on tree masks, in triton's interpreter, against dense attention in torch.

Run with ``TRITON_INTERPRET=1`` and triton on ``PYTHONPATH``; prints one JSON object: the largest absolute error of each
case, and of the same case when something is done wrong (``WRONGS``). The real ``TritonAttnBackend`` computes the offsets
for TARGET_VERIFY and calls the kernel; trees and masks are made by ``ddtree_sglang.tree``. What each row may see is told
to the oracle by the parents alone, not by the mask.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import triton
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from ddtree_sglang.plugin import size_backend
from ddtree_sglang.tree import Tree, build_tree, custom_mask

CONTEXT = 192
BLOCK = 8


@dataclass(frozen=True)
class Case:
    """Trees of depth ``depth`` and ``budget`` nodes on requests with these prefixes (tokens)."""

    depth: int
    width: int
    budget: int
    prefixes: tuple[int, ...]
    valid: int | None = None
    min_prob: float | None = None
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)


CASES = {
    "block 4": Case(3, 4, 7, (1, 17, 70)),
    "block 8, budget 32": Case(7, 8, 32, (40, 3, 65)),
    "rows beyond one tile": Case(7, 8, 70, (5, 90)),
    "a chain": Case(7, 1, 7, (9, 30)),
    "fewer prefixes than budget": Case(3, 2, 40, (12, 2)),
    "padded by valid": Case(7, 4, 32, (21, 8), valid=9),
    "padded by min_prob": Case(7, 4, 32, (6, 33), min_prob=0.05),
    "one head for all, as MLA": Case(3, 3, 8, (3, 40), heads=(4, 1), dims=(576, 512)),
}

Wrong = Callable[[triton_backend.TritonAttnBackend, Any], None]


def _mask_ignored(backend: Any, batch: Any) -> None:
    backend.forward_metadata.custom_mask = None


def _offset_by_one(backend: Any, batch: Any) -> None:
    found = backend.forward_metadata
    # one flag more, so that the last row is read inside of the mask
    found.custom_mask = torch.cat([found.custom_mask, found.custom_mask.new_ones(1)])
    found.mask_indptr = found.mask_indptr + 1


def _block_rows(backend: Any, batch: Any) -> None:
    backend.num_draft_tokens = BLOCK
    backend.init_forward_metadata(batch)


WRONGS: dict[str, Wrong] = {
    "mask ignored": _mask_ignored,
    "offset by one": _offset_by_one,
    "rows of the block": _block_rows,
}


class Pool:
    """A KV pool of one layer, slots first."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values

    def set_kv_buffer(
        self, layer: Any, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        self.keys[slots], self.values[slots] = keys, values


def make_backend(case: Case, req_to_token: torch.Tensor, pool: Pool) -> Any:
    """The real backend of a target under DDTREE, and the plugin's hook on its ``__init__``."""
    heads, kv_heads = case.heads
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=len(req_to_token), req_to_token=req_to_token),
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=pool,
        sliding_window_size=None,
        hybrid_gdn_config=None,
        kimi_linear_config=None,
        linear_attn_model_spec=None,
        device="cpu",
        gpu_id=0,
        is_draft_worker=False,
        spec_algorithm=SimpleNamespace(is_ddtree=lambda: True),
        model_config=SimpleNamespace(
            attention_arch=AttentionArch.MHA,
            num_attention_heads=heads,
            get_num_kv_heads=lambda _: kv_heads,
            v_head_dim=case.dims[1],
            swa_v_head_dim=case.dims[1],
            context_len=CONTEXT,
            is_encoder_decoder=False,
        ),
        server_args=SimpleNamespace(
            speculative_num_draft_tokens=BLOCK,
            speculative_num_steps=1,
            speculative_ddtree_budget=case.budget,
            triton_attention_num_kv_splits=8,
            triton_attention_split_tile_size=None,
            disable_cuda_graph=True,
            chunked_prefill_size=2048,
            enable_deterministic_inference=False,
        ),
    )
    with (
        mock.patch.object(triton_backend, "get_attention_tp_size", lambda: 1),
        mock.patch.object(triton_backend, "get_device_core_count", lambda _: 0),
    ):
        backend = triton_backend.TritonAttnBackend(runner)
    size_backend(None, backend, runner)
    kernel = backend.extend_attention_fwd

    def over_nan(*args: Any, **kwargs: Any) -> None:
        """Rows that the kernel does not write are NaN, not what was there by chance."""
        args[3].fill_(math.nan)
        kernel(*args, **kwargs)

    backend.extend_attention_fwd = over_nan
    return backend


def ancestors(tree: Tree, request: int, node: int) -> set[int]:
    """The node itself and all above it; of padding the node alone."""
    seen = set()
    while node >= 0:
        seen.add(node)
        node = int(tree.parents[request, node])
    return seen


def dense(
    case: Case, tree: Tree, q: torch.Tensor, pool: Pool, req_to_token: torch.Tensor, scaling: float
) -> torch.Tensor:
    """[bs, N, heads, v dim] in float64: softmax over the prefix and a node's ancestors."""
    heads, kv_heads = case.heads
    width = case.budget + 1
    out = torch.empty((len(case.prefixes), width, heads, case.dims[1]), dtype=torch.float64)
    for request, prefix in enumerate(case.prefixes):
        slots = req_to_token[request, : prefix + width].long()
        for node in range(width):
            rows = [*range(prefix), *(prefix + seen for seen in sorted(ancestors(tree, request, node)))]
            keys, values = pool.keys[slots[rows]].double(), pool.values[slots[rows]].double()
            for head in range(heads):
                kv = head // (heads // kv_heads)
                scores = keys[:, kv] @ q[request, node, head].double() * scaling
                out[request, node, head] = torch.softmax(scores, 0) @ values[:, kv]
    return out


def errors(case: Case) -> dict[str, float]:
    """Largest absolute error: ``right``, and under each name of ``WRONGS``."""
    random = torch.Generator().manual_seed(5)
    bs, width, (heads, kv_heads), (dim, v_dim) = len(case.prefixes), case.budget + 1, case.heads, case.dims
    logprobs = torch.randn((bs, case.depth, max(case.width, 9)), generator=random).mul(2).log_softmax(-1)
    logprobs = logprobs.sort(dim=-1, descending=True).values[..., : case.width].contiguous()
    ids = torch.arange(case.width).expand(bs, case.depth, case.width).contiguous()
    tree = build_tree(logprobs, ids, case.budget, valid=case.valid, min_prob=case.min_prob)
    lens = torch.tensor(case.prefixes)

    # slots are handed out in no order: neither prefix nor block is contiguous
    slots = torch.randperm(bs * CONTEXT, generator=random) + 1
    req_to_token = slots.view(bs, CONTEXT).to(torch.int32)
    pool = Pool(
        torch.randn((bs * CONTEXT + 1, kv_heads, dim), generator=random),
        torch.randn((bs * CONTEXT + 1, kv_heads, v_dim), generator=random),
    )
    q = torch.randn((bs, width, heads, dim), generator=random) * 2
    k = torch.randn((bs * width, kv_heads, dim), generator=random)
    v = torch.randn((bs * width, kv_heads, v_dim), generator=random)
    taken = torch.cat([req_to_token[b, p : p + width] for b, p in enumerate(case.prefixes)]).long()
    batch = SimpleNamespace(
        batch_size=bs,
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=torch.arange(bs),
        seq_lens=lens,
        out_cache_loc=taken,
        token_to_kv_pool=pool,
        spec_info=SimpleNamespace(custom_mask=custom_mask(tree, lens, int(lens.sum()))),
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        qk_head_dim=dim,
        v_head_dim=v_dim,
        scaling=1 / math.sqrt(dim),
        logit_capping_method="tanh",
        logit_cap=0.0,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        sliding_window_size=-1,
        k_scale=None,
        v_scale=None,
        xai_temperature_len=-1,
    )
    pool.set_kv_buffer(layer, taken, k, v)
    expected = dense(case, tree, q, pool, req_to_token, layer.scaling)

    found: dict[str, float] = {}
    for name, wrong in {"right": lambda *_: None, **WRONGS}.items():
        backend = make_backend(case, req_to_token, pool)
        backend.init_forward_metadata(batch)
        wrong(backend, batch)
        out = backend.forward_extend(q.reshape(bs * width, -1), k, v, layer, batch)
        found[name] = (out.view(expected.shape) - expected).abs().nan_to_num(nan=1e9).max().item()
    return found


def main() -> None:
    with torch.inference_mode():
        report = {name: errors(case) for name, case in CASES.items()}
    print(json.dumps({"triton": triton.__version__, "cases": report}))


if __name__ == "__main__":
    main()
