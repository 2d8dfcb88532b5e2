"""Write the models of a run: ``tiny_models.py MAKE_MODELS OUT BLOCK large|small`` and ``OUT/real`` (configurations only).

The tiny pairs are those of ``tests/ddtree/cpu/make_models.py``; ``large`` gives them sizes that a GPU's kernels take
(hidden 256, head 64, context 2048). ``OUT/random`` is ``lower`` with a drafter whose layer is random and used: it reads
the context and is right now and then, at any rank; the target's texts are those of ``lower``. ``OUT/wide`` is another
target, which can say any of its 29 words, with a random drafter. ``OUT/real`` and ``OUT/real-draft`` are configurations
without weights, for ``--load-format dummy``: with ``large`` the shape of Qwen3-8B and a DFLASH drafter of 5 layers to
match, with ``small`` the same kind of files in a tiny size, to try the run itself on a CPU.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def real_size(block: int, large: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configurations of the target and the drafter for dummy weights."""
    layers, vocabulary = (36, 151936) if large else (2, 320)
    shared = {
        "vocab_size": vocabulary,
        "hidden_size": 4096 if large else 64,
        "intermediate_size": 12288 if large else 128,
        "num_attention_heads": 32 if large else 4,
        "num_key_value_heads": 8 if large else 2,
        "head_dim": 128 if large else 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960 if large else 512,
        "hidden_act": "silu",
        "dtype": "bfloat16" if large else "float32",
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "model_type": "qwen3",
    }
    target = shared | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
    }
    depth = 5 if large else 1
    taken = [1, 9, 17, 25, 33] if large else [0]
    draft = shared | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": depth,
        "num_target_layers": layers,
        "layer_types": ["full_attention"] * depth,
        "block_size": block,
        "dflash_config": {"mask_token_id": vocabulary - 1, "target_layer_ids": taken},
    }
    return target, draft


def random_pair(models: ModuleType, out: Path) -> None:
    """Write ``random``: the target of ``lower`` but for the mask token's embedding, which no prompt contains."""
    generator = torch.Generator().manual_seed(23)
    target = load_file(out / "lower" / "model.safetensors")
    row = torch.randn(models.HIDDEN, generator=generator)
    row[0] = target["model.embed_tokens.weight"][-1, 0]
    target["model.embed_tokens.weight"][models.MASK] = row
    draft = load_file(out / "lower-draft" / "model.safetensors")
    draft |= models.layer("layers.0.", generator, 0.5)
    for name, weights in (("", target), ("-draft", draft)):
        shutil.copytree(out / f"lower{name}", out / f"random{name}")
        save_file(
            {key: value.contiguous() for key, value in weights.items()},
            out / f"random{name}" / "model.safetensors",
        )


def wide_pair(models: ModuleType, out: Path) -> None:
    """Write ``wide``: a target of random weights that says any token but the first three, and a random drafter.

    Each token speaks for two others, drawn at random, and the context decides between them: the texts walk over the
    vocabulary, and fewer tokens compete for a place than if the embeddings were random alone, so that near ties of
    bfloat16 are hardly more frequent than with three tokens.
    """
    generator = torch.Generator().manual_seed(7)
    words = range(3, models.VOCABULARY)
    embeddings = torch.randn(models.VOCABULARY, models.HIDDEN, generator=generator)
    embeddings[:, 0] = 3.0
    rows = models.head(tuple(words), generator)
    for _ in range(2):
        order = torch.randperm(len(words), generator=generator).tolist()
        for word, place in zip(words, order, strict=True):
            embeddings[word, 1:] += 2.0 * rows[words[place], 1:]
    target = {
        "model.norm.weight": torch.ones(models.HIDDEN),
        "model.embed_tokens.weight": embeddings,
        # halved: logits stay near 8, where neighbouring bfloat16 numbers are well within the rule for near ties
        "lm_head.weight": rows / 2,
    }
    for index in range(models.LAYERS):
        target |= models.layer(f"model.layers.{index}.", generator, 1.0)
    draft = load_file(out / "lower-draft" / "model.safetensors")
    draft |= models.layer("layers.0.", generator, 0.5)
    for name, weights in (("", target), ("-draft", draft)):
        shutil.copytree(out / f"lower{name}", out / f"wide{name}")
        save_file(
            {key: value.contiguous() for key, value in weights.items()},
            out / f"wide{name}" / "model.safetensors",
        )


def main() -> None:
    maker, out, block, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    spec = importlib.util.spec_from_file_location("make_models", maker)
    assert spec is not None and spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    sizes = {"BLOCK": block, "CONTEXT": 2048 if size == "large" else 512}
    if size == "large":
        sizes |= {"HIDDEN": 256, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 64, "MLP": 512}
    for name, value in sizes.items():
        assert hasattr(models, name), name
        setattr(models, name, value)
    models.CONFIG.update(
        hidden_size=models.HIDDEN,
        intermediate_size=models.MLP,
        num_attention_heads=models.HEADS,
        num_key_value_heads=models.KV_HEADS,
        head_dim=models.HEAD_DIM,
        max_position_embeddings=models.CONTEXT,
    )
    sys.argv = [str(maker), str(out)]
    models.main()
    if not (out / "random").exists():
        random_pair(models, out)
    wide_pair(models, out)
    for name, config in zip(("real", "real-draft"), real_size(block, size == "large"), strict=True):
        (out / name).mkdir()
        (out / name / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
