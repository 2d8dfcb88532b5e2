"""As much of sglang's ``ServerArgs`` as the refusals read: what a plain DDTREE service has."""

from __future__ import annotations

from typing import Any

__all__ = ["UNTOUCHED"]

UNTOUCHED: dict[str, Any] = {
    "enable_dp_attention": False,
    "pp_size": 1,
    "attn_cp_size": 1,
    "enable_two_batch_overlap": False,
    "enable_single_batch_overlap": False,
    "enable_pdmux": False,
    "disaggregation_mode": "null",
    "enable_lora": None,
    "enable_torch_compile": False,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_attn_tp_input_scattered": False,
    "strip_thinking_cache": False,
    "enable_streaming_session": False,
    "enable_deterministic_inference": False,
    "enable_return_hidden_states": False,
    "enable_return_routed_experts": False,
    "enable_custom_logit_processor": False,
    "moe_dense_tp_size": None,
    "rl_on_policy_target": None,
    "moe_a2a_backend": "none",
    "tokenizer_worker_num": 1,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "speculative_num_draft_tokens": 8,
    "page_size": 1,
}
"""Defaults of 0.5.11, and a block of 8."""
