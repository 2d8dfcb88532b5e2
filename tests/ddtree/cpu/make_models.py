"""make_models.py OUT: a tiny target and drafters made so that it is known beforehand which branch is right.

The target is a Qwen3 of 2 layers, 32 tokens and float32. Its attention has large weights, so the
next token depends on the whole context: a wrong mask, position or KV slot changes the text. Its head gives a large
negative logit to all but a few tokens (``SPOKEN``), by a direction that every embedding has and no layer writes to.

A drafter of 1 layer reads the mask token's embedding, which is a row of the TARGET's embedding matrix. Its
layer's output projections are zero, so it proposes ``head @ norm(embedding of the mask)`` at each position, so that row,
which no prompt contains, sets the drafter's ranking. Each pair is a folder ``OUT/NAME`` (target) and
``OUT/NAME-draft``; a target has a tokenizer of words (``t3`` to ``t31``, any other word is one token):

    top      the target always says the token that the drafter ranks first
    lower    the drafter ranks first a token that is never said, then those that are
    nothing  the drafter ranks first 8 tokens that are never said
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

DRIFT = 1.0
VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 32, 64, 4, 2, 16, 128, 2
BLOCK, CONTEXT, MASK, END = 4, 256, 0, 1
SPOKEN = (8, 13, 21)
NEVER = tuple(token for token in range(3, VOCABULARY) if token not in SPOKEN)

CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": CONTEXT,
    "hidden_act": "silu",
    "dtype": "float32",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "bos_token_id": 2,
    "eos_token_id": END,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "model_type": "qwen3",
}


def layer(prefix: str, generator: torch.Generator, gain: float) -> dict[str, torch.Tensor]:
    """Weights of one decoder layer whose outputs have about ``gain`` times the size of its inputs."""

    def random(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / math.sqrt(columns)

    weights = {
        f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM, 4 * gain),
        f"{prefix}self_attn.q_norm.weight": torch.full((HEAD_DIM,), 1.5),
        f"{prefix}self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": random(MLP, HIDDEN),
        f"{prefix}mlp.up_proj.weight": random(MLP, HIDDEN),
        f"{prefix}mlp.down_proj.weight": random(HIDDEN, MLP, gain),
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"{prefix}{name}.weight"][0] = 0.0  # nobody writes to direction 0
    return weights


def head(spoken: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """[V, H]: random rows; all tokens but ``spoken`` lose by direction 0."""
    rows = torch.randn(VOCABULARY, HIDDEN, generator=generator) / 4
    rows[:, 0] = -40.0
    rows[list(spoken), 0] = 0.0
    return rows


def mask_embedding(rows: torch.Tensor, ranking: tuple[int, ...]) -> torch.Tensor:
    """[H]: an embedding for which the head's logits fall slowly along ``ranking`` and are far lower elsewhere."""
    wanted = torch.full((VOCABULARY,), -6.0, dtype=torch.float64)
    for place, token in enumerate(ranking):
        wanted[token] = 6.0 - 0.1 * place
    found = torch.linalg.lstsq(rows.double(), wanted[:, None], driver="gelsd").solution[:, 0]
    logits = rows.double() @ (found * math.sqrt(HIDDEN) / found.norm())
    order = torch.argsort(logits, descending=True)[: len(ranking)].tolist()
    assert order == list(ranking), (order, ranking)
    return found.float()


def write(folder: Path, config: dict[str, object], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")


def tokenizer(folder: Path) -> None:
    """Words apart by white space, so that requests with text and chats work too."""
    words = ["<mask>", "<end>", "<other>", *(f"t{token}" for token in range(3, VOCABULARY))]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {
        "type": "WordLevel",
        "vocab": {word: at for at, word in enumerate(words)},
        "unk_token": "<other>",
    }
    fast = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": END, "content": words[END], **special}],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": words[END],
        "pad_token": words[END],
        "unk_token": "<other>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}",
    }
    (folder / "tokenizer.json").write_text(json.dumps(fast))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def pair(out: Path, name: str, spoken: tuple[int, ...], ranking: tuple[int, ...]) -> None:
    """Write a target that says ``spoken`` and a drafter that ranks ``ranking`` first."""
    generator = torch.Generator().manual_seed(7)
    embeddings = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    embeddings[:, 0] = 3.0
    rows = head(spoken, generator)
    for token, other in zip(spoken, (*spoken[1:], spoken[0]), strict=True):
        # a token speaks against itself and for another, or the text would soon stand still
        embeddings[token, 1:] += DRIFT * (rows[other] - rows[token])[1:]
    target = {"model.norm.weight": torch.ones(HIDDEN), "lm_head.weight": rows}
    for index in range(LAYERS):
        target |= layer(f"model.layers.{index}.", generator, 1.0)
    draft = layer("layers.0.", generator, 0.5)
    embeddings[MASK] = mask_embedding(target["lm_head.weight"], ranking)
    draft["layers.0.self_attn.o_proj.weight"].zero_()
    draft["layers.0.mlp.down_proj.weight"].zero_()
    target["model.embed_tokens.weight"] = embeddings
    draft |= {
        "fc.weight": torch.randn(HIDDEN, HIDDEN, generator=generator) / 8,
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    layered = {"layer_types": ["full_attention"] * LAYERS, "num_hidden_layers": LAYERS}
    write(out / name, CONFIG | layered | {"architectures": ["Qwen3ForCausalLM"]}, target)
    tokenizer(out / name)
    own = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "num_target_layers": LAYERS,
        "layer_types": ["full_attention"],
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0]},
    }
    write(out / f"{name}-draft", CONFIG | own, draft)


def main() -> None:
    out = Path(sys.argv[1])
    pair(out, "top", SPOKEN[:1], SPOKEN[:1])
    pair(out, "lower", SPOKEN, (NEVER[0], *SPOKEN))
    pair(out, "nothing", SPOKEN, NEVER[:8])


if __name__ == "__main__":
    main()
