"""What patch 0001 does on a real GPU, with the real sglang 0.5.11 and CUDA graphs. Run by hand on one GPU.

    python benchmarks/gpu/patch_0001.py --site SITE --runner PATCHED_RUNNER --out DIR

SITE is a folder with sglang 0.5.11 and its dependencies for this machine's Python and torch; PATCHED_RUNNER is
``sglang/srt/model_executor/cuda_graph_runner.py`` out of ``ddtree-ops runtime vendor sglang-0.5.11-ddtree DIR``.
Tiny models are made on the spot: a target whose greedy continuation is known beforehand and a DFLASH drafter (block
size 8) that always guesses it, so that the accept length must be 8.

Runs, one after the other:

- ``stock``: the released runner under DFLASH;
- ``patched``: the patched runner under DFLASH. Text, accept length and captured sizes must be those of ``stock``;
- ``ddtree``: the patched runner in a tree that answers ``is_ddtree()`` with a budget of 32 and still verifies the
  linear block. The target's graphs must be captured for 33 tokens a request, the drafter's for 8, and the first
  request must end with sglang's own complaint about 33 against 8: the mirror image of the crash that the patch
  cures. (0.5.11 holds no tree verification, so the cure itself cannot be run on it.)

Writes DIR/result.json and DIR/NAME.log. Exit status 0: all as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

PORT = 31311
BLOCK, BUDGET = 8, 32
PROMPT = "Write quicksort in Python with comments."
SIZES = re.compile(r"Capture cuda graph bs \[([\d, ]+)\] tokens=(\d+) draft=(True|False)")


def make_models(folder: Path) -> tuple[Path, Path]:
    """A tiny Qwen3 that always continues with one token, and a DFLASH drafter that always proposes it."""
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    target, drafter = folder / "target", folder / "drafter"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 20, trainer)
    chat = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[2], pad_token=special[0], chat_template=chat
    )
    fast.save_pretrained(target)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    weights = load_file(target / "model.safetensors")
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    always = fast("the")["input_ids"][-1]
    embed, head = (
        torch.zeros_like(weights[name]) for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
    embed[:, 0] = 1.0
    head[always, 0] = 1.0
    weights |= {"model.embed_tokens.weight": embed, "lm_head.weight": head}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})

    drafter.mkdir(parents=True, exist_ok=True)
    known = json.loads((target / "config.json").read_text(encoding="utf-8"))
    known |= {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "num_target_layers": 2,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]},
        "layer_types": ["full_attention"],
    }
    (drafter / "config.json").write_text(json.dumps(known), encoding="utf-8")
    hidden, inner, heads, groups, width = 256, 512, 4, 2, 64

    def small(*shape: int) -> Any:
        return (torch.randn(*shape) * 0.02).to(torch.bfloat16)

    def ones(size: int) -> Any:
        return torch.ones(size, dtype=torch.bfloat16)

    layer = "layers.0."
    save_file(
        {
            "fc.weight": small(hidden, hidden),
            "hidden_norm.weight": ones(hidden),
            "norm.weight": ones(hidden),
            f"{layer}input_layernorm.weight": ones(hidden),
            f"{layer}post_attention_layernorm.weight": ones(hidden),
            f"{layer}self_attn.q_proj.weight": small(heads * width, hidden),
            f"{layer}self_attn.k_proj.weight": small(groups * width, hidden),
            f"{layer}self_attn.v_proj.weight": small(groups * width, hidden),
            f"{layer}self_attn.o_proj.weight": torch.zeros(hidden, heads * width, dtype=torch.bfloat16),
            f"{layer}self_attn.q_norm.weight": ones(width),
            f"{layer}self_attn.k_norm.weight": ones(width),
            f"{layer}mlp.gate_proj.weight": small(inner, hidden),
            f"{layer}mlp.up_proj.weight": small(inner, hidden),
            f"{layer}mlp.down_proj.weight": torch.zeros(hidden, inner, dtype=torch.bfloat16),
        },
        drafter / "model.safetensors",
        metadata={"format": "pt"},
    )
    return target, drafter


def make_tree(site: Path, place: Path, *, runner: Path | None, ddtree: bool) -> Path:
    """A copy of sglang with the runner in question; the size of each capture is added to the line that announces it."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(site / "sglang", place / "sglang")
    file = place / "sglang/srt/model_executor/cuda_graph_runner.py"
    if runner is not None:
        shutil.copyfile(runner, file)
    line = 'f"Capture cuda graph bs {self.capture_bs}"'
    told = (
        'f"Capture cuda graph bs {self.capture_bs} tokens={self.num_tokens_per_bs} '
        'draft={self.model_runner.is_draft_worker}"'
    )
    text = file.read_text(encoding="utf-8")
    if text.count(line) != 1:
        sys.exit(f"{file}: the line that announces the capture is not there once")
    file.write_text(text.replace(line, told), encoding="utf-8")
    if ddtree:
        with (place / "sglang/srt/speculative/spec_info.py").open("a", encoding="utf-8") as stream:
            stream.write("\n\nSpeculativeAlgorithm.is_ddtree = SpeculativeAlgorithm.is_dflash\n")
        with (place / "sglang/srt/server_args.py").open("a", encoding="utf-8") as stream:
            stream.write(f"\n\nServerArgs.speculative_ddtree_budget = {BUDGET}\n")
    return place


def ask(path: str, body: dict[str, Any] | None = None, timeout: float = 60.0) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        content = answer.read()
    return json.loads(content) if content else None


def serve(name: str, tree: Path, site: Path, target: Path, drafter: Path, out: Path) -> dict[str, Any]:
    """Start the server, ask once, end it; what was seen."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}:{site}",
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    argv = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(target),
        "--served-model-name",
        "tiny",
    ]
    argv += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(drafter)]
    argv += ["--speculative-dflash-block-size", str(BLOCK), "--attention-backend", "triton"]
    argv += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--cuda-graph-max-bs", "4"]
    argv += ["--max-running-requests", "4", "--mem-fraction-static", "0.3", "--enable-metrics"]
    argv += ["--decode-log-interval", "10", "--disable-piecewise-cuda-graph", "--skip-server-warmup"]
    argv += ["--host", "127.0.0.1", "--port", str(PORT)]
    seen: dict[str, Any] = {"name": name}
    log = out / f"{name}.log"
    began = time.monotonic()
    with log.open("wb") as stream:
        server = subprocess.Popen(
            argv, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while "fired up" not in log.read_text(encoding="utf-8", errors="replace"):
                if server.poll() is not None or time.monotonic() - began > 280:
                    break
                time.sleep(0.5)
            seen["ready_s"] = round(time.monotonic() - began, 1)
            try:
                chat = {"model": "tiny", "temperature": 0, "max_tokens": 64}
                chat["messages"] = [{"role": "user", "content": PROMPT}]
                answer = ask("/v1/chat/completions", chat)
                seen["text"] = answer["choices"][0]["message"]["content"]
                seen["completion_tokens"] = answer["usage"]["completion_tokens"]
                body = {
                    "text": PROMPT,
                    "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True},
                }
                meta = ask("/generate", body)["meta_info"]
                seen["accept_length"] = meta["spec_accept_length"]
                seen["verify_steps"] = meta["spec_verify_ct"]
            except (OSError, ValueError) as error:
                seen["request"] = f"{type(error).__name__}: {error}"
                server.wait(timeout=30)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
            seen["exit"] = server.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    seen["captured"] = [
        {"worker": "draft" if draft == "True" else "target", "bs": bs, "tokens_a_request": int(tokens)}
        for bs, tokens, draft in SIZES.findall(text)
    ]
    seen["errors"] = sorted(set(re.findall(r"RuntimeError: The size of tensor.*", text)))
    return seen


def judge(runs: dict[str, dict[str, Any]]) -> list[str]:
    """What is not as expected."""
    stock, patched, ddtree = runs["stock"], runs["patched"], runs["ddtree"]
    wrong = [
        f"{key}: stock {stock.get(key)!r}, patched {patched.get(key)!r}"
        for key in ("text", "completion_tokens", "accept_length", "captured", "errors")
        if stock.get(key) != patched.get(key)
    ]
    if not stock.get("text") or stock.get("accept_length") != float(BLOCK):
        wrong.append(f"stock should serve with accept length {BLOCK}: {stock}")
    sizes = {item["worker"]: item["tokens_a_request"] for item in ddtree["captured"]}
    if sizes != {"target": BUDGET + 1, "draft": BLOCK}:
        wrong.append(f"ddtree captured {sizes}")
    if not any(
        f"tensor a ({BUDGET + 1}) must match the size of tensor b ({BLOCK})" in e for e in ddtree["errors"]
    ):
        wrong.append(f"ddtree should complain about {BUDGET + 1} against {BLOCK}: {ddtree['errors']}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--runner", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(args.site))
    work = Path("/tmp/patch-0001")
    target, drafter = make_models(work)
    runs = {}
    for name, runner, ddtree in (
        ("stock", None, False),
        ("patched", args.runner, False),
        ("ddtree", args.runner, True),
    ):
        tree = make_tree(args.site, work / name, runner=runner, ddtree=ddtree)
        runs[name] = serve(name, tree, args.site, target, drafter, args.out)
        print(json.dumps(runs[name]), flush=True)
    wrong = judge(runs)
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    result = {"gpu": gpu, "runs": runs, "wrong": wrong}
    (args.out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print("as expected" if not wrong else "\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
