"""Break a real sglang 0.5.11 on a CPU as ``index.yaml`` says and record its output, stdout and stderr in one file.

    python make.py --root /srv/llm [--out DIR] [NAME ...]

ROOT holds ``venv`` (sglang 0.5.11, torch for the CPU), ``stubs`` (what the CPU needs in place of triton and
sgl_kernel) and ``models`` (tiny-qwen3, tiny-dflash, m1/d1: every draft accepted, m3/d3: accept length 1.5).
One server at a time. Nothing here is run by the tests; see README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PORT = 31311
GZIP_ABOVE = 60_000
PLAIN = {
    "--model-path": "{models}/m1",
    "--served-model-name": "tiny",
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--disable-cuda-graph": "",
    "--grammar-backend": "none",
    "--disable-overlap-schedule": "",
    "--host": "127.0.0.1",
    "--port": str(PORT),
    "--enable-metrics": "",
    "--max-total-tokens": "4096",
}
DFLASH = PLAIN | {
    "--speculative-algorithm": "DFLASH",
    "--speculative-draft-model-path": "{models}/d1",
    "--speculative-draft-attention-backend": "triton",
}


def copied(models: Path, origin: str, name: str) -> Path:
    """A fresh copy of a model folder."""
    target = models / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(models / origin, target)
    return target


def configured(models: Path, origin: str, name: str, **changes: Any) -> Path:
    """A copy whose config.json has these keys changed (None removes)."""
    target = copied(models, origin, name)
    path = target / "config.json"
    config = json.loads(path.read_text())
    config.update({key: value for key, value in changes.items() if value is not None})
    for key in [key for key, value in changes.items() if value is None]:
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=1))
    return target


def tensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def stored(path: Path, header: dict[str, Any], data: bytes) -> None:
    """Write a safetensors file."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def widened(models: Path, name: str, factor: int) -> None:
    """A drafter of ``factor`` times the hidden width: config and every tensor, rows repeated."""
    target = configured(models, "d1", name, hidden_size=64 * factor)
    header, data = tensors(target / "model.safetensors")
    new: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    out = b""
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        body = data[begin:end]
        shape = [size * factor if size == 64 and "head" not in key else size for size in entry["shape"]]
        if key.endswith("q_proj.weight"):
            shape[0] = 64
        if key.endswith("o_proj.weight"):
            shape[1] = 64
        count = 2
        for size in shape:
            count *= size
        body = (body * (count // len(body)))[:count]
        new[key] = {"dtype": entry["dtype"], "shape": shape, "data_offsets": [len(out), len(out) + count]}
        out += body
    stored(target / "model.safetensors", new, out)


def without_tensor(models: Path, name: str, tensor: str) -> None:
    """A drafter that lacks one tensor."""
    target = copied(models, "d1", name)
    header, data = tensors(target / "model.safetensors")
    del header[tensor]
    new: dict[str, Any] = {}
    out = b""
    for key, entry in header.items():
        if key != "__metadata__":
            begin, end = entry["data_offsets"]
            new[key] = entry | {"data_offsets": [len(out), len(out) + end - begin]}
            out += data[begin:end]
    stored(target / "model.safetensors", new, out)


def damaged(models: Path) -> None:
    """A weight file whose header is overwritten."""
    path = copied(models, "m1", "damaged") / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[:64] = bytes(range(64))
    path.write_bytes(raw)


def truncated(models: Path) -> None:
    """A weight file that a broken copy left half as long."""
    path = copied(models, "m1", "truncated") / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def sharded(models: Path) -> None:
    """An index that names a second shard, which is not there."""
    target = copied(models, "m1", "shardless")
    header, _ = tensors(target / "model.safetensors")
    (target / "model.safetensors").rename(target / "model-00001-of-00002.safetensors")
    names = [key for key in header if key != "__metadata__"]
    where = {key: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, key in enumerate(names)}
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def bare(models: Path, name: str, *patterns: str) -> None:
    """A model folder without the files of these patterns."""
    target = copied(models, "m1", name)
    for pattern in patterns:
        for path in target.glob(pattern):
            path.unlink()


def poisoned(models: Path) -> None:
    """Weights whose output head is all NaN."""
    path = copied(models, "m1", "poisoned") / "model.safetensors"
    header, data = tensors(path)
    begin, end = header["lm_head.weight"]["data_offsets"]
    stored(path, header, data[:begin] + b"\xc0\x7f" * ((end - begin) // 2) + data[end:])


PREPARE: dict[str, Callable[[Path], object]] = {
    "wide-drafter": lambda models: widened(models, "wide", 2),
    "block16-drafter": lambda models: configured(models, "d1", "block16", block_size=16),
    "block8-drafter": lambda models: configured(models, "d1", "block8", block_size=8),
    "vocab-drafter": lambda models: configured(
        models, "d1", "vocab", dflash_config={"mask_token_id": 151669, "target_layer_ids": [0]}
    ),
    "layers-drafter": lambda models: configured(
        models,
        "d1",
        "layers",
        num_target_layers=61,
        dflash_config={"mask_token_id": 0, "target_layer_ids": [0, 1]},
    ),
    "holed-drafter": lambda models: without_tensor(models, "holed", "layers.0.mlp.down_proj.weight"),
    "not-a-drafter": lambda models: copied(models, "tiny-qwen3", "notdraft"),
    "damaged": damaged,
    "truncated": truncated,
    "shardless": sharded,
    "no-tokenizer": lambda models: bare(models, "tokenless", "token*", "special*", "chat*"),
    "no-config": lambda models: bare(models, "configless", "config.json"),
    "unknown-architecture": lambda models: configured(
        models, "m1", "unknown", architectures=["Qwen9ForCausalLM"]
    ),
    "poisoned": poisoned,
}

Edit = tuple[str, str, str]
TREE: list[Edit] = [
    (
        "speculative/spec_info.py",
        "    NGRAM = auto()\n",
        "    NGRAM = auto()\n    DDTREE = auto()\n",
    ),
    (
        "speculative/spec_info.py",
        "return self == SpeculativeAlgorithm.DFLASH",
        "return self in (SpeculativeAlgorithm.DFLASH, SpeculativeAlgorithm.DDTREE)",
    ),
    ("server_args.py", 'choices=["DFLASH",', 'choices=["DDTREE", "DFLASH",'),
    (
        "server_args.py",
        'if self.speculative_algorithm == "DFLASH":',
        'if self.speculative_algorithm in ("DFLASH", "DDTREE"):',
    ),
    (
        "server_args.py",
        "    speculative_num_draft_tokens: Optional[int] = None\n",
        (
            "    speculative_num_draft_tokens: Optional[int] = None\n"
            "    speculative_ddtree_budget: Optional[int] = None\n"
            "    speculative_ddtree_topk_cap: Optional[int] = None\n"
        ),
    ),
    (
        "server_args.py",
        '        parser.add_argument(\n            "--speculative-num-draft-tokens",',
        (
            '        parser.add_argument("--speculative-ddtree-budget", type=int)\n'
            '        parser.add_argument("--speculative-ddtree-topk-cap", type=int)\n'
            '        parser.add_argument(\n            "--speculative-num-draft-tokens",'
        ),
    ),
]
FORWARD = "        # Forward without cuda graph\n"
RUNNER = "model_executor/model_runner.py"
INJECT: dict[str, list[Edit]] = {
    "graph-buffers": [
        *TREE,
        (
            RUNNER,
            FORWARD,
            "        if forward_batch.forward_mode.is_target_verify():\n"
            "            from sglang.srt.model_executor.cuda_graph_runner import _grouped_foreach_copy_\n\n"
            "            args, bs = self.server_args, forward_batch.batch_size\n"
            "            rows = torch.zeros(bs * args.speculative_num_draft_tokens, dtype=torch.int64)\n"
            "            ids = torch.zeros(bs * (args.speculative_ddtree_budget + 1), dtype=torch.int64)\n"
            "            _grouped_foreach_copy_([rows], [ids])\n" + FORWARD,
        ),
    ],
    "sampling-index": [
        (
            "layers/sampler.py",
            "            batch_next_token_ids = torch.argmax(logits, -1)\n",
            (
                "            batch_next_token_ids = torch.argmax(logits, -1)\n"
                "            if positions.max() > 60:\n"
                "                logits.index_select(-1, batch_next_token_ids + logits.shape[-1])\n"
            ),
        )
    ],
    "cuda-text": [
        (
            RUNNER,
            FORWARD,
            "        if forward_batch.forward_mode.is_decode() and int(forward_batch.seq_lens.max()) > 60:\n"
            "            raise torch.AcceleratorError(\n"
            '                "CUDA error: an illegal memory access was encountered\\n"\n'
            '                "CUDA kernel errors might be asynchronously reported at some other API call, so the "\n'
            '                "stacktrace below might be incorrect.\\n"\n'
            '                "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\\n"\n'
            '                "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\\n"\n'
            "            )\n" + FORWARD,
        )
    ],
    "prefix-hit": [
        (
            "speculative/dflash_worker.py",
            "        total_ctx = int(draft_input.target_hidden.shape[0])\n",
            (
                "        if batch.forward_mode.name == 'EXTEND' and any(len(r.prefix_indices) for r in batch.reqs):\n"
                "            full = sum(len(r.fill_ids) for r in batch.reqs)\n"
                "            draft_input.target_hidden = draft_input.target_hidden.view(full, -1, 64)\n"
                "        total_ctx = int(draft_input.target_hidden.shape[0])\n"
            ),
        )
    ],
    "kv-leak": [
        (
            "speculative/dflash_info.py",
            "            batch.token_to_kv_pool_allocator.free(out_cache_loc[~keep_mask])\n",
            "",
        )
    ],
    "hang": [
        (
            RUNNER,
            FORWARD,
            "        if forward_batch.forward_mode.is_extend():\n"
            "            import time\n\n"
            "            time.sleep(3600)\n" + FORWARD,
        )
    ],
    "rank1-raises": [
        (
            RUNNER,
            FORWARD,
            "        if forward_batch.forward_mode.is_decode() and int(forward_batch.seq_lens.max()) > 60:\n"
            "            torch.zeros(3, 4) @ torch.zeros(5, 6)\n" + FORWARD,
        )
    ],
}


def edited(root: Path, name: str) -> Path:
    """A copy of the installed sglang (hard links) with the edits of ``name``: what PYTHONPATH is given."""
    origin = next((root / "venv").glob("lib/python3*/site-packages/sglang"))
    tree = root / "trees" / name
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(origin, tree / "sglang", copy_function=os.link)
    for file, old, new in INJECT[name]:
        path = tree / "sglang" / "srt" / file
        text = path.read_text()
        if old not in text:
            raise SystemExit(f"{name}: {file} does not hold {old!r}")
        path.unlink()
        path.write_text(text.replace(old, new, 1))
    return tree


class Server:
    """One run: started, driven by steps, recorded."""

    def __init__(self, case: dict[str, Any], root: Path) -> None:
        self.case, self.root = case, root
        self.models = root / "models"
        self.raw = root / "raw" / f"{case['name']}.log"
        self.environ = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
        path = [str(root / "trees" / case["inject"])] if "inject" in case else []
        self.environ["PYTHONPATH"] = ":".join([*path, str(root / "stubs")])
        self.environ |= {key: self.fill(str(value)) for key, value in case.get("env", {}).items()}
        flags = dict(DFLASH if case["server"] == "dflash" else PLAIN) | case.get("flags", {})
        self.arguments = [
            word
            for flag, value in flags.items()
            if value is not None
            for word in ([flag, *self.fill(str(value)).split()] if value != "" else [flag])
        ]
        self.requests: list[threading.Thread] = []
        self.answers: list[str] = []
        self.before: list[subprocess.Popen[bytes]] = []

    def fill(self, text: str) -> str:
        return text.replace("{models}", str(self.models)).replace("{root}", str(self.root))

    def command(self) -> str:
        env = " ".join(f"{key}={value}" for key, value in self.environ.items())
        return f"{env} python -m sglang.launch_server {' '.join(self.arguments)}"

    def spawn(self, output: Any) -> subprocess.Popen[bytes]:
        case = self.case

        def limits() -> None:
            for name, value in case.get("limits", {}).items():
                resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (value, value))

        return subprocess.Popen(
            [
                "nice",
                "-n",
                "10",
                str(self.root / "venv/bin/python"),
                "-m",
                "sglang.launch_server",
                *self.arguments,
            ],
            env={"PATH": f"{self.root}/venv/bin:/usr/bin:/bin", "HOME": f"{self.root}/home", **self.environ},
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=limits,
        )

    def run(self) -> int | None:
        """The exit code as a shell shows it, None where it had to be ended by us."""
        self.raw.parent.mkdir(parents=True, exist_ok=True)
        self.raw.unlink(missing_ok=True)
        for name in self.case.get("prepare", []):
            PREPARE[name](self.models)
        if "inject" in self.case:
            edited(self.root, self.case["inject"])
        for step in self.case.get("before", []):
            subprocess.run(["sh", "-c", self.fill(step)], check=True)
        try:
            with self.raw.open("ab") as output:
                self.process = self.spawn(output)
                for step in self.case.get("steps", []):
                    word, *rest = str(step).split()
                    getattr(self, f"step_{word}")(*rest)
                code = self.wait(float(self.case.get("patience", 120)))
        finally:
            for group in [self.process, *self.before]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group.pid, signal.SIGKILL)
                group.wait()
            for step in self.case.get("after", []):
                subprocess.run(["sh", "-c", self.fill(step)], check=False)
        return code

    def wait(self, seconds: float) -> int | None:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        time.sleep(1.5)
        return code if code >= 0 else 128 - code

    def text(self) -> str:
        return self.raw.read_text(errors="replace")

    def until(self, what: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None and not what():
            time.sleep(0.3)

    def step_ready(self, seconds: str = "150") -> None:
        self.until(lambda: "fired up" in self.text(), float(seconds))

    def step_line(self, *words: str) -> None:
        self.until(lambda: " ".join(words) in self.text(), 150)

    def step_sleep(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def post(self, path: str, body: Any, seconds: float = 120) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=seconds)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            self.answers.append(f"{path} {answer.status} {answer.read()[:300]!r}")
        except (OSError, http.client.HTTPException) as error:
            self.answers.append(f"{path} {type(error).__name__} {error}")
        finally:
            connection.close()

    def step_post(self, path: str, *body: str) -> None:
        text = " ".join(body)
        try:
            self.post(path, json.loads(text))
        except json.JSONDecodeError:
            self.post(path, text.encode())

    def step_chat(self, count: str, tokens: str, *rest: str) -> None:
        """COUNT chats at once, each of TOKENS tokens; ``+`` at the end: do not wait; ``hot``: temperature 1."""
        words = ("quick", "brown", "lazy", "dog", "fox", "jumps", "over", "the")

        def one(i: int) -> None:
            content = " ".join(words[(i + k) % 8] for k in range(12))
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": int(tokens),
            }
            self.post(
                "/v1/chat/completions", body | {"temperature": 1 if "hot" in rest else 0, "ignore_eos": True}
            )

        threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(int(count))]
        for thread in threads:
            thread.start()
        if "+" not in rest:
            for thread in threads:
                thread.join()

    def step_abort(self, count: str) -> None:
        """COUNT clients that begin to stream and hang up."""
        for _ in range(int(count)):
            body = {
                "model": "tiny",
                "stream": True,
                "messages": [{"role": "user", "content": "over the lazy dog"}],
                "max_tokens": 400,
                "ignore_eos": True,
            }
            data = json.dumps(body).encode()
            with socket.create_connection(("127.0.0.1", PORT), 20) as connection:
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
                connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
                connection.recv(400)

    def step_get(self, path: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
        try:
            connection.request("GET", path)
            self.answers.append(f"{path} {connection.getresponse().status}")
        except OSError as error:
            self.answers.append(f"{path} {type(error).__name__} {error}")
        finally:
            connection.close()

    def pids(self, title: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except (OSError, ValueError, IndexError):
                    continue
                if session == self.process.pid and title in line:
                    found.append(int(entry.name))
        return found

    def step_signal(self, name: str, title: str) -> None:
        """Signal NAME to ``main``, ``group`` or the processes of this run whose title holds TITLE."""
        if self.process.poll() is not None:
            return
        number = getattr(signal, f"SIG{name}")
        if title == "group":
            os.killpg(self.process.pid, number)
            return
        targets = [self.process.pid] if title == "main" else self.pids(title)
        if not targets:
            raise SystemExit(f"{self.case['name']}: no process {title}")
        for pid in targets:
            os.kill(pid, number)

    def step_second(self) -> None:
        """Another server with the same flags; from here on its output is what is recorded."""
        self.raw.rename(self.raw.with_suffix(".first"))
        self.before.append(self.process)
        self.process = self.spawn(self.raw.open("ab"))


def cleaned(text: str, root: Path) -> str:
    """The text without this machine's paths."""
    config = (root / "venv/pyvenv.cfg").read_text().splitlines()
    home = next(line.partition("=")[2].strip() for line in config if line.startswith("home"))
    return text.replace(str(root), "/srv/llm").replace(str(Path(home).parent), "/usr/local")


def record(case: dict[str, Any], root: Path, out: Path) -> None:
    """Run one case and store its log."""
    begin = time.monotonic()
    server = Server(case, root)
    code = server.run()
    text = cleaned(server.text(), root)
    plain = out / f"{case['name']}.log"
    packed = out / f"{case['name']}.log.gz"
    for path in (plain, packed):
        path.unlink(missing_ok=True)
    if len(text.encode()) > GZIP_ABOVE:
        packed.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    else:
        plain.write_text(text)
    wanted = case.get("exit")
    note = "" if code == wanted else f"  (index.yaml: {wanted})"
    print(
        f"{case['name']}: exit {code}{note}, {len(text)} characters, {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    for answer in server.answers[:12]:
        print(f"    {answer.replace(str(root), '/srv/llm')[:200]}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--list", action="store_true", help="print the commands only")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    cases = yaml.safe_load((HERE / "index.yaml").read_text())["cases"]
    unknown = set(options.names) - {case["name"] for case in cases}
    if unknown:
        sys.exit(f"no such case: {', '.join(sorted(unknown))}")
    for case in cases:
        if not options.names or case["name"] in options.names:
            if options.list:
                print(case["name"], Server(case, Path("/srv/llm")).command())
            else:
                record(case, options.root.resolve(), options.out)


if __name__ == "__main__":
    main()
