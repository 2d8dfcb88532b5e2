"""What stands in for the serving venv, the model and the drafter on a lab host.

The venv's ``python`` runs the lab engine for ``-m sglang.launch_server`` and the host's own python for everything
else. Model folders have real configurations and valid safetensors shards with next to nothing inside.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from ddtree_ops import sizing
from ddtree_ops.errors import LabError

__all__ = ["furnish", "model_files", "write"]

VENV = "root/venv_sglang211"
MODEL = "root/models/Kimi-K2.6"
DRAFTER = "root/models/Kimi-K2.6-DFlash-tmp-long"
ENGINE = "opt/ddtree-lab"

_PYTHON = """\
#!/bin/sh
# Lab stand-in for the interpreter of a serving venv: there is no torch and no GPU here.
# -I: the engine reads the runtime named by PYTHONPATH, it must not import from it.
if [ "$1" = -m ] && [ "$2" = sglang.launch_server ]; then
    shift 2
    exec /usr/bin/python3 -I -u /{engine}/lab_engine.py "$@"
fi
exec /{venv}/bin/python3 "$@"
"""
# What the story's venv holds, for whoever asks importlib.metadata.
_DISTRIBUTIONS = {"sglang": "0.5.11", "torch": "2.11.0+cu130"}

_LAYERS = 61
_SHARDS = 64
_TOTAL_SIZE = 590_000_000_000
_TEXT_CONFIG: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "num_hidden_layers": _LAYERS,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "torch_dtype": "bfloat16",
}
_CONFIG = {
    **_TEXT_CONFIG,
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "text_config": _TEXT_CONFIG,
}
_DRAFTER_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 8,
    "num_hidden_layers": 6,
    "num_target_layers": _LAYERS,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
}


def write(root: Path, name: str, data: bytes, mode: int = 0o644) -> bool:
    """Write ``root/name`` by rename, only when it differs; makes its folder. True when something changed.

    :raises LabError: the folder leads out of ``root`` by a symbolic link.
    """
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(root)):
        raise LabError(f"{path.parent} leads out of {root}", phase="lab", hint="ddtree-ops lab down, then up")
    if path.is_file() and not path.is_symlink():
        if path.stat().st_mode & 0o7777 != mode:
            path.chmod(mode)
        if path.read_bytes() == data:
            return False
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    part.chmod(mode)
    part.rename(path)
    return True


def furnish(root: Path) -> None:
    """Bring the venv, the engine and the models of the host whose root folder is ``root`` up to date."""
    engine = Path(__file__).parent / "engine" / "lab_engine.py"
    write(root, f"{ENGINE}/lab_engine.py", engine.read_bytes())
    write(root, f"{ENGINE}/sizing.py", Path(sizing.__file__).read_bytes())
    site = f"{VENV}/lib/{(root / 'usr/bin/python3').readlink().name}/site-packages"
    write(root, f"{VENV}/pyvenv.cfg", b"home = /usr/bin\ninclude-system-site-packages = false\n")
    write(root, f"{VENV}/bin/python", _PYTHON.format(engine=ENGINE, venv=VENV).encode(), 0o755)
    link = root / VENV / "bin" / "python3"
    if not link.is_symlink():
        link.symlink_to("/usr/bin/python3")
    for name, version in _DISTRIBUTIONS.items():
        text = (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: lab stand-in, holds no code\n"
        )
        write(root, f"{site}/{name}-{version}.dist-info/METADATA", text.encode())
    for folder, files in ((MODEL, model_files()), (DRAFTER, drafter_files())):
        for name, data in files.items():
            write(root, f"{folder}/{name}", data)


def model_files() -> dict[str, bytes]:
    """Configuration, index and shards of the model: a layer's norm in each shard, 64 of them."""
    shards = [f"model-{number:05d}-of-{_SHARDS:06d}.safetensors" for number in range(1, _SHARDS + 1)]
    tensors = ["embed_tokens.weight", *(f"layers.{layer}.input_layernorm.weight" for layer in range(_LAYERS))]
    names = [f"language_model.model.{tensor}" for tensor in (*tensors, "norm.weight")]
    names.append("language_model.lm_head.weight")
    index = {"metadata": {"total_size": _TOTAL_SIZE}, "weight_map": dict(zip(names, shards, strict=True))}
    return {
        "config.json": _json(_CONFIG),
        "model.safetensors.index.json": _json(index),
        **{shard: safetensors(name) for name, shard in zip(names, shards, strict=True)},
    }


def drafter_files() -> dict[str, bytes]:
    """Configuration and the one shard of the drafter."""
    return {
        "config.json": _json(_DRAFTER_CONFIG),
        "model.safetensors": safetensors("layers.0.input_layernorm.weight"),
    }


def safetensors(name: str) -> bytes:
    """A safetensors file with one BF16 tensor of one element."""
    header = json.dumps({name: {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + b"\x80\x3f"


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
