"""Lab engine: a stand-in for ``python -m sglang.launch_server`` on lab hosts. NO MODEL, NO GPU, canned text.

It takes sglang's flags, loads in phases, answers in sglang's shapes, logs in sglang's formats and dies as
sglang 0.5.11 dies, so that deploying, waiting, smoke-testing and diagnosing can be shown and tested on any
machine. It says what it is in its first log line, in the header ``x-lab-engine`` of every answer, in the
field ``lab_engine`` of ``/server_info`` and with ``--lab-version``. Standard library of Python >= 3.8 only.

What is taken from the runtime DEPLOYED on ``PYTHONPATH`` (read as text, never imported):

- the flags, from the ``add_argument`` calls of ``sglang/srt/server_args.py``. sglang 0.5.11 has no DDTREE;
  where the deployed file lacks them, the engine adds ``--speculative-algorithm DDTREE`` and
  ``--speculative-ddtree-budget``, ``-topk-cap`` and ``-budget-schedule``: it plays a tree that has them.
- files and line numbers of the tracebacks;
- the size of the CUDA graph buffers: the sizing block of ``cuda_graph_runner.py`` is run by ``sizing.py``.
  Every verify step really copies ``bs * (budget + 1)`` tokens into ``input_ids[:bs * num_tokens_per_bs]``:
  with the unpatched runner the first request fails as on a GPU, with the patched one it is served.

Memory model, a GPU, in GiB: weights = index total size / tp; KV pool = LAB_GPU_GB * mem-fraction-static
- weights; left for graphs = LAB_GPU_GB * (1 - mem-fraction-static) - 1. Graphs of a worker with N tokens a
request take ``max_bs * N * (4 * vocabulary + 9 * context)`` bytes (logits, and triton's indices and mask); what does not
fit fails as ``Capture cuda graph failed``. ``--cuda-graph-max-bs`` defaults to 48 and, unlike sglang's, is
not lowered to ``--max-running-requests``.

Unlike sglang's, the warm-up asks for one token, so the verify step first runs for a real request.

Environment: LAB_LOAD_SECONDS (3) whole load; LAB_TOKENS_PER_S (2000) a request; LAB_GPU_GB (96);
LAB_DRAIN_POLL (1) seconds, sglang's is 5; LAB_HEALTH_POLL (0.2) seconds, sglang's is 1; LAB_WARMUP_TRIES (120).
Faults: LAB_CRASH_AFTER_S=n, the scheduler raises n seconds after ready; LAB_HANG_AT=weights|kv|graphs|warmup;
LAB_GARBAGE=1, every answer is ``!!!!``; LAB_CRASH_ON_PREFIX_HIT=1, the first prefix-cache hit of a chat dies
of triton's shared memory. sglang's own SGL_FORCE_SHUTDOWN and SGLANG_HEALTH_CHECK_TIMEOUT work too.
"""

from __future__ import annotations

import argparse
import ast
import errno
import http.client
import importlib
import json
import math
import os
import queue
import re
import select
import signal
import socketserver
import sys
import threading
import time
import traceback
import uuid
import zlib
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from itertools import cycle, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Iterator, NoReturn

VERSION = "1"
NOTICE = "ddtree-ops lab engine " + VERSION + ": a stand-in for sglang, no model, no GPU, canned text"
GIB = 1 << 30
EOS_ID = 163586
PATTERN_PIECES = re.compile(r"\s*[A-Za-z]{1,8}|\s*\d{1,3}|\s*[^\sA-Za-z\d]|\s+")

QUICKSORT = '''Here is quicksort in Python, with comments.

```python
def quicksort(items):
    """Return a new list with the items in ascending order."""
    # A list of zero or one items is already sorted.
    if len(items) <= 1:
        return list(items)

    # The middle item as pivot avoids the worst case on sorted input.
    pivot = items[len(items) // 2]

    # Split into three parts: smaller, equal and larger than the pivot.
    smaller = [item for item in items if item < pivot]
    equal = [item for item in items if item == pivot]
    larger = [item for item in items if item > pivot]

    # Sort both sides and put the parts together again.
    return quicksort(smaller) + equal + quicksort(larger)


print(quicksort([3, 6, 1, 8, 2, 9, 2]))  # [1, 2, 2, 3, 6, 8, 9]
```

On average it takes O(n log n) comparisons; a bad pivot at every step would make it O(n^2). The version above
uses O(n) extra memory in exchange for being short and easy to read. An in-place partition avoids that.
'''


def compose(prompt: str) -> str:
    """The whole answer to a prompt: the same prompt always gets the same text."""
    if "quicksort" in prompt.lower():
        return QUICKSORT
    words = re.findall(r"[\w'-]+", prompt) or ["nothing"]
    topic = " ".join(words[-8:])
    longest = max(words, key=lambda word: (len(word), word))
    return (
        " This is a canned answer of the lab engine; no model has read the question. It ends in: {topic}. "
        "It has {count} words, and the longest of them is {longest}. A real server would now go on to "
        "explain {longest} step by step, name the assumptions, give an example, and say where the example "
        "stops being right. The lab engine only counts tokens, so that length, speed and acceptance can be "
        "checked. In short: {topic}.\n"
    ).format(topic=topic, count=len(words), longest=longest)


def pieces_of(text: str) -> list[str]:
    """Split a text into tokens; joined again they give the text."""
    return PATTERN_PIECES.findall(text)


# --- log ---------------------------------------------------------------------------------------------------


def write(stream: int, text: str) -> None:
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(stream, data) :]


def log(message: str, rank: str = "", stream: int = 2) -> None:
    write(stream, "[{}{}] {}\n".format(time.strftime("%Y-%m-%d %H:%M:%S"), rank, message))


# --- the deployed runtime ----------------------------------------------------------------------------------

Frame = "tuple[str, str, str]"

LAUNCH = (
    ("launch_server.py", "<module>", "server_args = prepare_server_args(sys.argv[1:])"),
    ("srt/server_args.py", "prepare_server_args", "return ServerArgs.from_cli_args(raw_args)"),
    ("srt/server_args.py", "ServerArgs.from_cli_args", "return cls("),
)
SPECULATION = ("srt/server_args.py", "ServerArgs.__post_init__", "self._handle_speculative_decoding()")
NO_MODEL = (
    ("srt/server_args.py", "ServerArgs.__post_init__", "self._handle_piecewise_cuda_graph()"),
    (
        "srt/server_args.py",
        "_handle_piecewise_cuda_graph",
        "if self.get_model_config().is_piecewise_cuda_graph_disabled_model:",
    ),
    (
        "srt/server_args.py",
        "get_model_config",
        "self.model_config = ModelConfig.from_server_args(self)",
    ),
    ("srt/configs/model_config.py", "ModelConfig.from_server_args", "return ModelConfig("),
    ("srt/configs/model_config.py", "ModelConfig.__init__", "self.hf_config = get_config("),
    ("srt/utils/hf_transformers/config.py", "get_config", "config = AutoConfig.from_pretrained("),
)
LOADING = (
    ("srt/managers/scheduler.py", "run_scheduler_process", "scheduler = Scheduler("),
    ("srt/managers/scheduler.py", "Scheduler.__init__", "self.init_model_worker()"),
    ("srt/managers/scheduler.py", "init_model_worker", "self.init_tp_model_worker()"),
    ("srt/managers/scheduler.py", "init_tp_model_worker", "self.tp_worker = TpModelWorker("),
    ("srt/managers/tp_worker.py", "TpModelWorker.__init__", "self._init_model_runner()"),
    ("srt/managers/tp_worker.py", "_init_model_runner", "self._model_runner = ModelRunner("),
    ("srt/model_executor/model_runner.py", "ModelRunner.__init__", "self.initialize("),
)
CAPTURE = (
    *LOADING,
    ("srt/model_executor/model_runner.py", "initialize", "self.init_device_graphs()"),
    ("srt/model_executor/model_runner.py", "init_device_graphs", "self.graph_runner = graph_runners["),
    ("srt/model_executor/cuda_graph_runner.py", "CudaGraphRunner.__init__", "raise Exception("),
)
CAPTURING = (
    ("srt/model_executor/cuda_graph_runner.py", "CudaGraphRunner.__init__", "self.capture()"),
    ("srt/model_executor/cuda_graph_runner.py", "CudaGraphRunner.capture", "self.capture_one_batch_size("),
)
KV_POOL = (
    *LOADING,
    ("srt/model_executor/model_runner.py", "initialize", "self.init_memory_pool("),
    ("srt/model_executor/pool_configurator.py", "MemoryPoolConfig.__post_init__", "raise RuntimeError(msg)"),
)
SERVING = (
    ("srt/managers/scheduler.py", "run_scheduler_process", "scheduler.run_event_loop()"),
    (
        "srt/managers/scheduler.py",
        "run_event_loop",
        "dispatch_event_loop(self)\n\n    @DynamicGradMode()",
    ),
    ("srt/managers/scheduler.py", "dispatch_event_loop", "scheduler.event_loop_normal()"),
    ("srt/managers/scheduler.py", "event_loop_normal", "result = self.run_batch(batch)"),
    (
        "srt/managers/scheduler.py",
        "run_batch",
        "batch_result = self.model_worker.forward_batch_generation(\nbatch_or_worker_batch, **kwargs",
    ),
)
WORKER = ("srt/speculative/dflash_worker.py", "DFlashWorker.forward_batch_generation")
VERIFYING = (*WORKER, "batch_result = self.target_worker.forward_batch_generation(\nmodel_worker_batch, is_verify=True")
PREFILLING = (*WORKER, "batch_result = self.target_worker.forward_batch_generation(\nmodel_worker_batch, **kwargs")
FORWARD = (
    ("srt/managers/tp_worker.py", "forward_batch_generation", "out = self.model_runner.forward("),
    ("srt/model_executor/model_runner.py", "ModelRunner.forward", "output = self._forward_raw("),
)
REPLAY = (
    ("srt/model_executor/model_runner.py", "_forward_raw", "ret = self.graph_runner.replay("),
    (
        "srt/model_executor/cuda_graph_runner.py",
        "CudaGraphRunner.replay",
        "self.replay_prepare(forward_batch, pp_proxy_tensors)",
    ),
    (
        "srt/model_executor/cuda_graph_runner.py",
        "CudaGraphRunner.replay_prepare",
        "buffers.populate_from_forward_batch(",
    ),
    (
        "srt/model_executor/cuda_graph_runner.py",
        "populate_from_forward_batch",
        "_grouped_foreach_copy_(dsts, srcs)",
    ),
    (
        "srt/model_executor/cuda_graph_runner.py",
        "_grouped_foreach_copy_",
        "foreach_copy(group_dsts, group_srcs)",
    ),
    ("srt/model_executor/cuda_graph_runner.py", "foreach_copy", "torch._foreach_copy_(dsts, srcs)"),
)
EXTEND = (
    ("srt/model_executor/model_runner.py", "_forward_raw", "ret, can_run_graph = self.forward_extend("),
    ("srt/model_executor/model_runner.py", "forward_extend", "ret = self.model.forward("),
    ("srt/layers/radix_attention.py", "RadixAttention.forward", "return forward_batch.attn_backend.forward("),
    ("srt/layers/attention/base_attn_backend.py", "AttentionBackend.forward", "return self.forward_extend("),
    (
        "srt/layers/attention/triton_backend.py",
        "TritonAttnBackend.forward_extend",
        "self.extend_attention_fwd(",
    ),
    ("srt/layers/attention/triton_ops/extend_attention.py", "extend_attention_fwd", "_fwd_kernel[grid]("),
)
SAMPLING = (("srt/managers/scheduler.py", "event_loop_normal", "self.process_batch_result(batch, result)"),)
WARMUP = (("srt/entrypoints/http_server.py", "_execute_server_warmup", "assert res.status_code == 200, f"),)


class Failure(Exception):
    """An error of sglang: how Python would print it, and where in the deployed runtime it is raised."""

    def __init__(self, kind: str, message: str, frames: tuple[Any, ...], cause: Failure | None = None):
        super().__init__(message)
        self.kind, self.message, self.frames, self.cause = kind, message, frames, cause


class Runtime:
    """The ``sglang`` package on ``PYTHONPATH``, read as text."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self._texts: dict[str, str] = {}

    @classmethod
    def find(cls, python_path: str) -> Runtime | None:
        for entry in filter(None, python_path.split(os.pathsep)):
            package = Path(entry) / "sglang"
            if (package / "srt" / "server_args.py").is_file():
                return cls(package)
        return None

    @property
    def version(self) -> str:
        found = re.search(r"__version__ = .*?'([^']+)'", self.text("_version.py"))
        return found.group(1) if found else "unknown"

    def text(self, path: str) -> str:
        if path not in self._texts:
            try:
                self._texts[path] = (self.package / path).read_text(encoding="utf-8", errors="replace")
            except OSError:
                self._texts[path] = ""
        return self._texts[path]

    def locate(self, path: str, function: str, code: str) -> int:
        """The line of a statement within a function; that of the function where it is not found, 0 for no file."""
        text = self.text(path)
        at = 0
        for depth, name in enumerate(function.split(".")):
            kind = "class" if depth < function.count(".") else r"(?:async\s+)?def"
            found = re.compile(r"^\s*{}\s+{}\b".format(kind, re.escape(name)), re.M).search(text, at)
            at = found.end() if found else at
        pattern = r"\s*\n\s*".join(re.escape(part.strip()) for part in re.split(r"\n+", code))
        statement = re.compile(pattern).search(text, at)
        return text.count("\n", 0, statement.start() if statement else at) + 1 if text else 0

    def frames(self, frames: tuple[Any, ...]) -> str:
        lines = []
        for path, function, code in frames:
            number = self.locate(path, function, code)
            if not number:
                continue
            source = self.text(path).splitlines()[number - 1].strip()
            name = function.split(".")[-1]
            lines.append('  File "{}", line {}, in {}'.format(self.package / path, number, name))
            lines.append("    " + source)
            assigned = re.match(r"[\w., ]+ = ", source)
            if assigned and sys.version_info >= (3, 11):
                lines.append("    " + " " * assigned.end() + "^" * (len(source) - assigned.end()))
        return "\n".join(lines)

    def traceback(self, failure: Failure) -> str:
        head = ""
        if failure.cause is not None:
            head = self.traceback(failure.cause) + (
                "\nDuring handling of the above exception, another exception occurred:\n\n"
            )
        return "{}Traceback (most recent call last):\n{}\n{}: {}\n".format(
            head, self.frames(failure.frames), failure.kind, failure.message
        )


# --- flags -------------------------------------------------------------------------------------------------

DEST = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "ep_size": "expert_parallel_size",
    "attn_cp_size": "attention_context_parallel_size",
    "moe_dp_size": "moe_data_parallel_size",
}
TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "loads": json.loads}


def human_readable_int(text: str) -> int:
    """An integer, or one with a suffix k, M, G (powers of 1000) or K (1024)."""
    found = re.fullmatch(r"(-?[\d.]+)([kKmMgG]?)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError("Invalid integer: " + text)
    return int(float(found.group(1)) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "g": 10**9}.get(
        found.group(2) if found.group(2) == "K" else found.group(2).lower(), 1
    ))


TYPES["human_readable_int"] = human_readable_int


class Unknown(Exception):
    """Not a value that can be read without running the file."""


class Reader:
    """Constants, defaults and ``add_argument`` calls of a ``server_args.py``, without running it."""

    def __init__(self, source: str) -> None:
        self.names: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.calls: list[ast.Call] = []
        found = re.search(r'ArgumentParser\(prog="([^"]+)"', source)
        self.prog = found.group(1) if found else "launch_server.py"
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.names[node.targets[0].id] = self.value(node.value)
            elif isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
                self.read_class(node)
        self.calls.sort(key=lambda call: call.lineno)

    def read_class(self, node: ast.ClassDef) -> None:
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                self.defaults[member.target.id] = self.value(member.value) if member.value else None
            elif isinstance(member, ast.FunctionDef) and member.name == "add_cli_args":
                for call in ast.walk(member):
                    if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
                        self.calls.append(call)

    def read(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in self.names:
            return self.names[node.id]
        if isinstance(node, ast.Attribute) and node.attr in self.defaults:
            return self.defaults[node.attr]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.read(node.left) + self.read(node.right)
        if isinstance(node, ast.List):
            return [self.read(item) for item in node.elts]
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "field":
            made = next((key.value for key in node.keywords if key.arg == "default_factory"), None)
            return [] if "list" in ast.dump(made or node) else {} if getattr(made, "id", "") == "dict" else False
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise Unknown from None

    def value(self, node: ast.expr) -> Any:
        try:
            return self.read(node)
        except (Unknown, TypeError):
            return None

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=self.prog, description=NOTICE)
        known = set()
        for call in self.calls:
            flags = [self.value(argument) for argument in call.args]
            options = {key.arg: self.value(key.value) for key in call.keywords if key.arg != "type"}
            kinds = [getattr(key.value, "attr", getattr(key.value, "id", "")) for key in call.keywords if key.arg == "type"]
            action = next((key.value for key in call.keywords if key.arg == "action"), None)
            if kinds and kinds[0] in TYPES:
                options["type"] = TYPES[kinds[0]]
            if isinstance(action, ast.Attribute) and hasattr(argparse, action.attr):
                options["action"] = getattr(argparse, action.attr)
            elif action is not None and options.get("action") is None:
                options["action"] = "store_true" if options.get("nargs") == 0 else "store"
            if options.get("action") == "store_true":
                options = {key: options[key] for key in ("action", "default", "dest") if key in options}
            if "--speculative-algorithm" in flags and options.get("choices"):
                options["choices"] = list(dict.fromkeys(["DDTREE", *options["choices"]]))
            options = {key: item for key, item in options.items() if key != "help" and item is not None}
            known.update(flags)
            parser.add_argument(*flags, **options)
        if "--speculative-ddtree-budget" not in known:
            parser.add_argument("--speculative-ddtree-budget", type=int)
            parser.add_argument("--speculative-ddtree-topk-cap", type=int, default=8)
            parser.add_argument(
                "--speculative-ddtree-budget-schedule", choices=["fixed", "adaptive"], default="fixed"
            )
        parser.add_argument("--lab-version", action="version", version=NOTICE)
        return parser

    def fields(self, argv: list[str]) -> dict[str, Any]:
        """The fields of ``ServerArgs`` (and of the DDTree dialect) for a command line; exits as argparse does."""
        given = vars(self.parser().parse_args(argv))
        names = list(self.defaults)
        names += [name for name in given if name.startswith("speculative_ddtree") and name not in names]
        return {name: given.get(DEST.get(name, name), self.defaults.get(name)) for name in names}
