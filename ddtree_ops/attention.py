"""Which attention backends of sglang 0.5.11 honour the mask of a draft tree. Pure."""

from __future__ import annotations

import re

__all__ = ["CHAIN_BACKENDS", "drops_tree_mask", "has_mla"]

CHAIN_BACKENDS = (
    "cutlass_mla",
    "dual_chunk_flash_attn",
    "flashinfer_mla",
    "flashmla",
    "nsa",
    "torch_native",
    "trtllm_mha",
    "trtllm_mla",
)
"""Backends without a custom mask in their verify path: they verify a tree as a chain, without an error."""
_MLA = re.compile(r"kimi[-_. ]?k2|deepseek[-_. ]?(v[23]|r1)", re.IGNORECASE)
"""Folder names of models with multi-head latent attention."""


def has_mla(model: str) -> bool:
    """Whether a model's path names one with multi-head latent attention."""
    return bool(_MLA.search(model.rsplit("/", 1)[-1]))


def drops_tree_mask(backend: str, model: str = "") -> bool:
    """Whether a verify step on this backend surely ignores the tree mask; ``model`` is the model's path."""
    return backend in CHAIN_BACKENDS or (backend == "flashinfer" and has_mla(model))
