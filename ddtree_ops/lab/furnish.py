"""What stands in for the serving venv, the model and the drafter on a lab host.

The venv's ``python`` runs the lab engine for ``-m sglang.launch_server``, calls itself Python 3.12 when asked for its
version, and is the host's own python for everything else; beside it lie the dist-infos of what sglang 0.5.11 requires.
Model folders have real configurations and valid safetensors shards of the real size, all of it holes: 590 GB that take
no disk. Nothing may read them whole.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from ddtree_ops.errors import LabError
from ddtree_ops.lab.engine import ENGINE_FILES

__all__ = [
    "DISTRIBUTIONS",
    "drafter_files",
    "furnish",
    "model_files",
    "safetensors",
    "stand_in",
    "whole_size",
    "write",
]

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
if [ "$*" = -V ]; then
    echo "Python {python}.3 (lab stand-in)"
    exit
fi
exec /{venv}/bin/python3 "$@"
"""
_VENV_PYTHON = "3.12"
# What a venv for sglang 0.5.11 holds: its pins as pinned, the rest in a version that does.
_ON_RECORD = """\
IPython==9.18.1 aiohttp==3.13.2 apache-tvm-ffi==0.1.6 anthropic==0.84.0 av==16.1.0 blobfile==3.0.0
build==1.4.0 compressed-tensors==0.14.0 cuda-python==13.0.3 datasets==4.5.0 decord2==3.0.0 easydict==1.13
einops==0.8.2 fastapi==0.128.0 flash-attn-4==4.0.0b9 flashinfer-cubin==0.6.8.post1
flashinfer-python==0.6.8.post1 gguf==0.19.0 interegular==0.3.3 kernels==0.12.1 llguidance==0.7.30
mistral_common==1.11.0 modelscope==1.34.0 msgspec==0.20.0 ninja==1.13.0 numpy==2.3.5
nvidia-cutlass-dsl==4.4.2 nvidia-ml-py==13.590.48 openai==2.6.1 openai-harmony==0.0.4 orjson==3.11.5
outlines==0.1.11 packaging==26.0 partial-json-parser==0.2.1.1.post7 pillow==12.1.0 prometheus-client==0.24.1
psutil==7.2.2 py-spy==0.4.1 pybase64==1.4.3 pydantic==2.12.5 python-multipart==0.0.22 pyzmq==27.1.0
quack-kernels==0.3.0 requests==2.32.5 scipy==1.17.0 sentencepiece==0.2.1 setproctitle==1.3.7 sglang==0.5.11
sglang-kernel==0.4.2 smg-grpc-servicer==0.5.0 soundfile==0.13.1 tiktoken==0.12.0 timm==1.0.16
torch==2.11.0+cu130 torch_memory_saver==0.0.9.post1 torchao==0.17.0 torchaudio==2.11.0+cu130
torchcodec==0.11.1 torchvision==0.26.0+cu130 tqdm==4.67.3 transformers==5.6.0 uvicorn==0.40.0 uvloop==0.22.1
watchfiles==1.1.1 xgrammar==0.1.32
"""
DISTRIBUTIONS = dict(word.split("==") for word in _ON_RECORD.split())
"""Version by distribution, as the venv of a lab host has them on record."""

_LAYERS = 61
_SHARDS = 64
_TOTAL_SIZE = 590_000_000_000  # 64 equal shards of whole BF16 numbers
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
_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"lab": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
}


def write(root: Path, name: str, data: bytes, mode: int = 0o644, length: int | None = None) -> bool:
    """Write ``root/name`` by rename, only when it differs; makes its folder. True when something changed.

    :param length: of the file in bytes, where it is longer than ``data``: the rest is a hole that takes no disk.
    :raises LabError: the folder leads out of ``root`` by a symbolic link.
    """
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(root)):
        raise LabError(f"{path.parent} leads out of {root}", phase="lab", hint="ddtree-ops lab down, then up")
    if path.is_file() and not path.is_symlink():
        if path.stat().st_mode & 0o7777 != mode:
            path.chmod(mode)
        if path.stat().st_size == (length or len(data)):
            with path.open("rb") as present:
                if present.read(len(data)) == data:
                    return False
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.truncate(length or len(data))
    part.chmod(mode)
    part.rename(path)
    return True


def furnish(root: Path) -> None:
    """Bring the venv, the engine and the models of the host whose root folder is ``root`` up to date."""
    for file in ENGINE_FILES:
        write(root, f"{ENGINE}/{file.name}", file.read_bytes())
    settings = f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {_VENV_PYTHON}.3\n"
    write(root, f"{VENV}/pyvenv.cfg", settings.encode())
    script = _PYTHON.format(engine=ENGINE, venv=VENV, python=_VENV_PYTHON)
    write(root, f"{VENV}/bin/python", script.encode(), 0o755)
    link = root / VENV / "bin" / "python3"
    if not link.is_symlink():
        link.symlink_to("/usr/bin/python3")
    for name, version in DISTRIBUTIONS.items():
        stand_in(root, f"{VENV}/lib/python{_VENV_PYTHON}/site-packages", name, version)
    own = root / VENV / "lib" / (root / "usr/bin/python3").readlink().name
    if (
        not own.exists() and not own.is_symlink()
    ):  # for whoever asks importlib.metadata of the host's own python
        own.symlink_to(f"python{_VENV_PYTHON}")
    for folder, files in ((MODEL, model_files()), (DRAFTER, drafter_files())):
        for name, data in files.items():
            write(
                root,
                f"{folder}/{name}",
                data,
                length=whole_size(data) if name.endswith(".safetensors") else None,
            )


def stand_in(root: Path, site: str, name: str, version: str) -> None:
    """Put a distribution on record in ``root/site`` that holds no code."""
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: lab stand-in, holds no code\n"
    write(root, f"{site}/{name.replace('-', '_')}-{version}.dist-info/METADATA", text.encode())


def model_files() -> dict[str, bytes]:
    """Configuration, tokenizer, index and the heads of the shards: a layer's experts in each shard, 64 of them."""
    shards = [f"model-{number:05d}-of-{_SHARDS:06d}.safetensors" for number in range(1, _SHARDS + 1)]
    tensors = ["embed_tokens.weight", *(f"layers.{layer}.mlp.experts.weight" for layer in range(_LAYERS))]
    names = [f"language_model.model.{tensor}" for tensor in (*tensors, "norm.weight")]
    names.append("language_model.lm_head.weight")
    index = {"metadata": {"total_size": _TOTAL_SIZE}, "weight_map": dict(zip(names, shards, strict=True))}
    size = _TOTAL_SIZE // _SHARDS
    return {
        "config.json": _json(_CONFIG),
        "tokenizer.json": _json(_TOKENIZER),
        "model.safetensors.index.json": _json(index),
        **{shard: safetensors(name, size) for name, shard in zip(names, shards, strict=True)},
    }


def drafter_files() -> dict[str, bytes]:
    """Configuration and the head of the one shard of the drafter."""
    return {
        "config.json": _json(_DRAFTER_CONFIG),
        "model.safetensors": safetensors("layers.0.input_layernorm.weight", 2),
    }


def safetensors(name: str, size: int) -> bytes:
    """Length and header of a safetensors file with one BF16 tensor of ``size`` bytes; the data would follow."""
    header = json.dumps({name: {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def whole_size(head: bytes) -> int:
    """Bytes of the file that begins with ``head``, by its header."""
    (length,) = struct.unpack_from("<Q", head)
    tensors = json.loads(head[8 : 8 + length])
    return int(8 + length + max(tensor["data_offsets"][1] for tensor in tensors.values()))


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
