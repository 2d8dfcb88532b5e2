"""Lab engine: a stand-in for ``python -m sglang.launch_server`` on lab hosts. NO MODEL, NO GPU, canned text.

It takes sglang's flags, loads in phases, answers in sglang's shapes, logs in sglang's formats and dies as
sglang 0.5.11 dies, so that deploying, waiting, smoke-testing and diagnosing can be shown and tested on any
machine. It says what it is in its first log line, in the header ``x-lab-engine`` of every answer, in the
field ``lab_engine`` of ``/server_info`` and with ``--lab-version``. Standard library of
Python >= 3.8 only; reading the graph runner of sglang 0.5.11 takes the parser of Python >= 3.9.

What is taken from the runtime DEPLOYED on ``PYTHONPATH`` (read as text, never imported):

- the flags, from the ``add_argument`` calls of ``sglang/srt/server_args.py`` and of the overlay
  (``ddtree_sglang/flags.py``), read by ``launchflags.py``: a release without a DDTREE refuses it;
- files and line numbers of the tracebacks;
- the size of the CUDA-graph buffers: the sizing block of ``cuda_graph_runner.py`` is run by ``sizing.py``.
  Every verify step really copies ``bs * (budget + 1)`` tokens into ``input_ids[:bs * num_tokens_per_bs]``:
  with the unpatched runner the first request fails as on a GPU, with the patched one it is served.

Memory model, each GPU, GiB: weights = total size of the checkpoint / tp; KV pool = LAB_GPU_GB x
mem-fraction-static - weights; left for graphs = LAB_GPU_GB x (1 - mem-fraction-static) - 1. The graphs of a
worker with N tokens a request take ``max_bs * N * (4 * vocabulary + 9 * context)`` bytes (logits; triton's
indices and mask). What does not fit ends as ``Capture cuda graph failed: CUDA out of memory``.

With ``--nnodes`` the nodes meet as sglang's do: rank 0 listens at ``--dist-init-addr``, the others connect and try
again until ``--dist-timeout`` (or LAB_DIST_TIMEOUT) is over; each prints its own ranks (TP4 to TP7 for node 1 of 2 at
tp 8); nodes above 0 serve a dummy health endpoint and no API; a node that dies takes the others with it. One
connection a node stands for all that torch, gloo and NCCL hold between the ranks. Texts: gloo's in
https://github.com/sgl-project/sglang/issues/3685, torch's in its ``socket.cpp`` and ``TCPStore.cpp``.

Where it differs from sglang on purpose: the warm-up asks for one token, so the verify step first runs for a
real request; ``--cuda-graph-max-bs`` defaults to 48 and is not lowered to ``--max-running-requests``; one
scheduler process logs for all ranks; no detokenizer process; no grammars or images; logprobs are made up; tools are
called in Kimi K2's format whatever the parser; gauges go to nothing after a second of idleness (sglang: 30).

Environment (seconds, defaults in brackets): LAB_LOAD_SECONDS [3]; LAB_TOKENS_PER_S [2000] a request;
LAB_GPU_GB [96]; LAB_DRAIN_POLL [1; sglang 5]; LAB_HEALTH_POLL [0.1; sglang 1]; LAB_WARMUP_TRIES [120];
LAB_DIST_TIMEOUT [600].
Faults: LAB_FAULTS="name,name=value" and LAB_FAULTS_FILE, see ``faults.py``; LAB_CRASH_AFTER_S=n, an illegal memory
access n seconds after ready; LAB_HANG_AT=weights|kv|graphs|warmup; LAB_GARBAGE=1 and LAB_CRASH_ON_PREFIX_HIT=1 are older
names of two of them. sglang's SGL_FORCE_SHUTDOWN and SGLANG_HEALTH_CHECK_TIMEOUT work too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import errno
import gc
import http.client
import importlib
import json
import math
import os
import pickle
import queue
import re
import select
import signal
import socket
import socketserver
import sys
import threading
import time
import traceback
import uuid
import zlib
from array import array
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["NOTICE", "main"]

NOTICE = "ddtree-ops lab engine 1: a stand-in for sglang; no model, no GPU, canned text"
GIB = float(1 << 30)
GAUGES = (
    "num_running_reqs",
    "num_used_tokens",
    "token_usage",
    "gen_throughput",
    "spec_accept_length",
    "spec_accept_rate",
    "is_cuda_graph",
    "max_total_num_tokens",
)
LOAD_BAR = "Loading safetensors checkpoint shards"
PHASES = {"weights": 0.55, "kv": 0.05, "graphs": 0.25, "warmup": 0.15}

STACKS = """
merge    | launch_server.py | <module> | server_args = prepare_server_args(sys.argv[1:])
merge    | srt/server_args.py | prepare_server_args | argv = config_merger.merge_config_with_args(argv)
launch   | launch_server.py | <module> | server_args = prepare_server_args(sys.argv[1:])
launch   | srt/server_args.py | prepare_server_args | return ServerArgs.from_cli_args(raw_args)
launch   | srt/server_args.py | ServerArgs.from_cli_args | return cls(
spec     | srt/server_args.py | ServerArgs.__post_init__ | self._handle_speculative_decoding()
spec     | srt/server_args.py | _handle_speculative_decoding | raise ValueError( // "DFLASH speculative decoding
config   | srt/server_args.py | ServerArgs.__post_init__ | self._handle_piecewise_cuda_graph()
config   | srt/server_args.py | _handle_piecewise_cuda_graph | if self.get_model_config()
config   | srt/server_args.py | get_model_config | self.model_config = ModelConfig.from_server_args(self)
config   | srt/configs/model_config.py | ModelConfig.from_server_args | return ModelConfig(
config   | srt/configs/model_config.py | ModelConfig.__init__ | self.hf_config = get_config(
config   | srt/utils/hf_transformers/config.py | get_config | config = AutoConfig.from_pretrained(
died     | srt/entrypoints/engine.py | _launch_subprocesses | scheduler_init_result.wait_for_ready()
died     | srt/entrypoints/engine.py | wait_for_ready | infos = _wait_for_scheduler_ready(
died     | srt/entrypoints/engine.py | _wait_for_scheduler_ready | raise _scheduler_died_error(
load     | srt/managers/scheduler.py | run_scheduler_process | scheduler = Scheduler(
load     | srt/managers/scheduler.py | Scheduler.__init__ | self.init_model_worker()
load     | srt/managers/scheduler.py | init_model_worker | self.init_tp_model_worker()
load     | srt/managers/scheduler.py | init_tp_model_worker | self.tp_worker = TpModelWorker(
load     | srt/managers/tp_worker.py | TpModelWorker.__init__ | self._init_model_runner()
load     | srt/managers/tp_worker.py | _init_model_runner | self._model_runner = ModelRunner(
load     | srt/model_executor/model_runner.py | ModelRunner.__init__ | self.initialize(
pool     | srt/model_executor/model_runner.py | initialize | self.init_memory_pool(pre_model_load_memory)
pool     | srt/model_executor/pool_configurator.py | MemoryPoolConfig.__post_init__ | raise RuntimeError(msg)
graphs   | srt/model_executor/model_runner.py | initialize | self.init_device_graphs()
graphs   | srt/model_executor/model_runner.py | init_device_graphs | self.graph_runner = graph_runners[
graphs   | srt/model_executor/cuda_graph_runner.py | CudaGraphRunner.__init__ | raise Exception(
capture  | srt/model_executor/cuda_graph_runner.py | CudaGraphRunner.__init__ | self.capture()
capture  | srt/model_executor/cuda_graph_runner.py | CudaGraphRunner.capture | _capture_one_stream() // else:
capture  | srt/model_executor/cuda_graph_runner.py | _capture_one_stream | ) = self.capture_one_batch_size(
serve    | srt/managers/scheduler.py | run_scheduler_process | scheduler.run_event_loop()
serve    | srt/managers/scheduler.py | run_event_loop | dispatch_event_loop(self) // @DynamicGradMode()
serve    | srt/managers/scheduler.py | dispatch_event_loop | scheduler.event_loop_normal()
serve    | srt/managers/scheduler.py | event_loop_normal | result = self.run_batch(batch)
serve    | srt/managers/scheduler.py | run_batch | batch_result = self.model_worker.forward_batch_generation( // worker_batch_or
verify   | srt/speculative/dflash_worker.py | forward_batch_generation | batch_result = self.target_worker.forward_batch_generation( // model_worker_batch, is_verify=True
prefill  | srt/speculative/dflash_worker.py | forward_batch_generation | batch_result = self.target_worker.forward_batch_generation( // model_worker_batch, **kwargs
forward  | srt/managers/tp_worker.py | forward_batch_generation | out = self.model_runner.forward(
forward  | srt/model_executor/model_runner.py | ModelRunner.forward | output = self._forward_raw(
replay   | srt/model_executor/model_runner.py | _forward_raw | ret = self.graph_runner.replay(
replay   | srt/model_executor/cuda_graph_runner.py | CudaGraphRunner.replay | self.replay_prepare(
copy     | srt/model_executor/cuda_graph_runner.py | replay_prepare | buffers.populate_from_forward_batch(
copy     | srt/model_executor/cuda_graph_runner.py | populate_from_forward_batch | _grouped_foreach_copy_(dsts, srcs)
copy     | srt/model_executor/cuda_graph_runner.py | _grouped_foreach_copy_ | foreach_copy(group_dsts, group_srcs)
copy     | srt/model_executor/cuda_graph_runner.py | foreach_copy | torch._foreach_copy_(dsts, srcs)
extend   | srt/model_executor/model_runner.py | _forward_raw | ret, can_run_graph = self.forward_extend(
extend   | srt/model_executor/model_runner.py | forward_extend | ret = self.model.forward(
extend   | srt/layers/radix_attention.py | RadixAttention.forward | return forward_batch.attn_backend.forward(
extend   | srt/layers/attention/base_attn_backend.py | AttentionBackend.forward | return self.forward_extend(
extend   | srt/layers/attention/triton_backend.py | forward_extend | self.extend_attention_fwd(
extend   | srt/layers/attention/triton_ops/extend_attention.py | extend_attention_fwd | _fwd_kernel[grid](
nodes    | srt/entrypoints/engine.py | _launch_subprocesses | server_args.check_server_args()
nodes    | srt/server_args.py | check_server_args | assert ( // self.tp_size * self.pp_size
dist     | srt/model_executor/model_runner.py | initialize | pre_model_load_memory = self.init_torch_distributed()
dist     | srt/model_executor/model_runner.py | init_torch_distributed | init_distributed_environment(
dist     | srt/distributed/parallel_state.py | init_distributed_environment | torch.distributed.init_process_group(
sync     | srt/model_executor/model_runner.py | init_torch_distributed | pre_model_load_memory = get_available_gpu_memory(
sync     | srt/utils/common.py | get_available_gpu_memory | torch.distributed.all_reduce(
loop     | srt/managers/scheduler.py | run_scheduler_process | scheduler.run_event_loop()
loop     | srt/managers/scheduler.py | run_event_loop | dispatch_event_loop(self) // @DynamicGradMode()
loop     | srt/managers/scheduler.py | dispatch_event_loop | scheduler.event_loop_normal()
loop     | srt/managers/scheduler.py | event_loop_normal | recv_reqs = self.recv_requests()
loop     | srt/managers/scheduler.py | recv_requests | recv_reqs = broadcast_pyobj( // recv_reqs
loop     | srt/utils/common.py | broadcast_pyobj | dist.broadcast(tensor_size, src=src, group=dist_group)
warmup   | srt/entrypoints/http_server.py | _execute_server_warmup | assert res.status_code == 200, f"{res=}
"""


def beside(name: str) -> Any:
    """A module that lies beside this file on a lab host, and further up in the package."""
    homes = [folder for folder in Path(__file__).resolve().parents if (folder / f"{name}.py").is_file()]
    sys.path += [str(folder) for folder in homes[:1] if str(folder) not in sys.path]
    return importlib.import_module(name)


answers = beside("answers")
faults = beside("faults")


def write(stream: int, text: str) -> None:
    """All of a record at once, so that records of different processes do not mix."""
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(stream, data) :]


def log(message: str, rank: str = "", stream: int = 2) -> None:
    write(stream, "[{}{}] {}\n".format(time.strftime("%Y-%m-%d %H:%M:%S"), rank, message))


def env(name: str, default: float) -> float:
    return float(os.environ.get(name) or default)


class Switches:
    """Which faults are on: those of the environment, and those that a file names at this moment.

    :raises ValueError: LAB_FAULTS, or the file as it is now, names what is no fault.
    """

    def __init__(self) -> None:
        words = [os.environ.get("LAB_FAULTS", "")]
        words += ["garbage"] if os.environ.get("LAB_GARBAGE") else []
        words += ["crash-on-prefix-hit"] if os.environ.get("LAB_CRASH_ON_PREFIX_HIT") else []
        self.always = ",".join(words)
        self.file = os.environ.get("LAB_FAULTS_FILE")
        self.now()

    def now(self) -> Any:
        """The :class:`Faults` of this moment."""
        text = self.always
        if self.file:
            with contextlib.suppress(FileNotFoundError):
                text += "\n" + Path(self.file).read_text(encoding="utf-8")
        return faults.Faults.parse(text)


# --- the deployed runtime ----------------------------------------------------------------------------------


class Failure(Exception):
    """An error of sglang: how Python prints it, and which stacks (names in STACKS) lead to it."""

    def __init__(self, kind: str, message: str, stacks: str, cause: Failure | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.stacks, self.cause = kind, message, stacks.split(), cause


class Runtime:
    """The ``sglang`` package on ``PYTHONPATH``, read as text."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self._texts: dict[str, str] = {}

    @classmethod
    def find(cls, python_path: str) -> Runtime | None:
        for entry in filter(None, python_path.split(os.pathsep)):
            if Path(entry, "sglang/srt/server_args.py").is_file():
                return cls(Path(entry, "sglang"))
        return None

    @property
    def version(self) -> str:
        found = re.search(r"^__version__ = .*'([^']+)'", self.text("_version.py"), re.M)
        return found.group(1) if found else "unknown"

    def text(self, path: str) -> str:
        """The text of a file of the package, empty where there is none."""
        if path not in self._texts:
            self._texts[path] = ""
            with contextlib.suppress(OSError):
                self._texts[path] = (self.package / path).read_text(encoding="utf-8", errors="replace")
        return self._texts[path]

    def beside(self, path: str) -> str | None:
        """The text of a file of the release by its path there (``ddtree_sglang/flags.py``), None where there is none."""
        return self.text(f"../{path}") or None

    def locate(self, path: str, function: str, code: str = "") -> int:
        """The line of a statement; that of its function where it is not found; 0 where there is no file."""
        text, at = self.text(path), 0
        for name in function.split("."):
            found = re.compile(rf"^[ \t]*(?:class|def|async def) {re.escape(name)}\b", re.M).search(text, at)
            at = found.end() if found else at
        pattern = r"\s*\n\s*".join(re.escape(part) for part in code.split(" // "))
        statement = re.compile(pattern).search(text, at) if code else None
        return text.count("\n", 0, statement.start() if statement else at) + 1 if text else 0

    def traceback(self, failure: Failure) -> str:
        """What Python would print for a failure, with the deployed files and their line numbers."""
        lines = []
        if failure.cause is not None:
            lines += [self.traceback(failure.cause)]
            lines += ["During handling of the above exception, another exception occurred:\n"]
        lines += ["Traceback (most recent call last):"]
        rows = [[part.strip() for part in row.split("|")] for row in STACKS.strip().splitlines()]
        for path, function, code in (r[1:] for name in failure.stacks for r in rows if r[0] == name):
            number = self.locate(path, function, code)
            if number:
                source = self.text(path).splitlines()[number - 1].strip()
                name = function.split(".")[-1]
                lines += [f'  File "{self.package / path}", line {number}, in {name}', "    " + source]
                assigned = re.match(r"(?:[\w., ]+ = |return )", source)
                if assigned:
                    lines += ["    " + " " * assigned.end() + "^" * (len(source) - assigned.end())]
        return "\n".join([*lines, f"{failure.kind}: {failure.message}", ""])


def read_config(file: Any) -> Any:
    """In place of ``yaml.safe_load``: JSON, or lines of ``key: value`` with a plain or quoted scalar."""
    text = file.read()
    with contextlib.suppress(ValueError):
        return json.loads(text)
    found: dict[str, Any] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        value = value.strip()
        if not colon or line[:1] in " #-" or value[:1] in tuple("[{|>&*!"):
            raise ValueError("the lab engine reads flat YAML only")
        try:
            found[key.strip()] = json.loads(value)
        except ValueError:
            found[key.strip()] = value.strip("'")
    return found


def merge_config(source: str, parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """What the deployed runtime makes of ``--config``: its own code runs, with a small reader in place of PyYAML."""
    sys.modules.setdefault("yaml", SimpleNamespace(safe_load=read_config))  # type: ignore[arg-type]
    namespace: dict[str, Any] = {"__name__": "server_args_config_parser"}
    exec(compile(source, "server_args_config_parser.py", "exec"), namespace)
    try:
        merged: list[str] = namespace["ConfigArgumentMerger"](parser).merge_config_with_args(argv)
    except ValueError as error:
        raise Failure("ValueError", str(error), "merge") from None
    return merged


UNREADABLE = (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, TypeError, ValueError)


def check(text: str | None) -> tuple[int, int]:
    """Tells texts apart, without the OpenSSL that a digest would load at each start."""
    data = (text or "").encode()
    return len(data), zlib.crc32(data)


class Arguments:
    """The command line of the deployed runtime: its own flags, and those that its overlay adds."""

    FIELDS: ClassVar[dict[str, str]] = {
        "tp_size": "tensor_parallel_size",
        "pp_size": "pipeline_parallel_size",
        "dp_size": "data_parallel_size",
        "ep_size": "expert_parallel_size",
        "attn_cp_size": "attention_context_parallel_size",
        "moe_dp_size": "moe_data_parallel_size",
    }

    def __init__(self, source: str, read: Callable[[str], str | None] | None = None) -> None:
        flags = beside("launchflags")
        self.flags = flags.read_flags(source)
        plugin = read(flags.PLUGIN_PATH) if read else None
        if plugin is not None:
            self.flags = flags.read_plugin(self.flags, plugin, read)

    @classmethod
    def of(cls, runtime: Runtime) -> Arguments:
        """Those of the deployed runtime.

        Reading them is a quarter of a start, so a lab host keeps them beside this file from one start to the next; they
        hold for the very texts that they were read from. In the package nothing is kept.
        """
        home = Path(beside("launchflags").__file__)
        kept = home.with_name("flags.kept") if home.parent == Path(__file__).resolve().parent else None
        if kept is not None:
            with contextlib.suppress(*UNREADABLE):
                texts, arguments = pickle.loads(kept.read_bytes())
                if all(check(runtime.beside(path)) == value for path, value in texts.items()):
                    return cast("Arguments", arguments)
        texts = {}

        def read(path: str) -> str | None:
            text = runtime.beside(path)
            texts[path] = check(text)
            return text

        made = cls(read("sglang/srt/server_args.py") or "", read)
        if kept is not None:
            part = kept.with_name(f"{kept.name}.{os.getpid()}")
            with contextlib.suppress(OSError):  # not root
                part.write_bytes(pickle.dumps((texts, made)))
                part.replace(kept)
        return made

    def parser(self) -> argparse.ArgumentParser:
        """sglang's parser. A runtime without DDTREE refuses it here, as the real one does."""
        parser = argparse.ArgumentParser(prog=self.flags.prog, description=NOTICE)
        self.flags.add_to(parser)
        return parser

    def fields(self, argv: list[str], merger: str = "") -> dict[str, Any]:
        """The fields of ``ServerArgs`` for a command line. Exits as argparse does on a usage error.

        :param merger: the deployed ``server_args_config_parser.py``, which is run where there is a ``--config``.
        """
        parser = self.parser()
        if "--config" in argv:
            argv = merge_config(merger, parser, argv)
        given, defaults = vars(parser.parse_args(argv)), self.flags.defaults
        dialect = [name for name in given if name.startswith("speculative_ddtree_")]
        names = list(dict.fromkeys([*defaults, *dialect]))
        return {name: given.get(self.FIELDS.get(name, name), defaults.get(name)) for name in names}


# --- configuration -----------------------------------------------------------------------------------------


@dataclass
class Checkpoint:
    """What is read of a model directory: ``config.json``, the index, the sizes of the files. Bytes."""

    path: str
    config: dict[str, Any]
    shards: int
    size: int

    @classmethod
    def read(cls, path: str) -> Checkpoint:
        root = Path(path)
        if not root.is_dir():
            message = (
                f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'. "
                "Use `repo_type` argument if needed."
            )
            raise Failure("OSError", message, "launch config")
        try:
            config = json.loads((root / "config.json").read_text(encoding="utf-8"))
        except OSError:
            message = (
                f"{path} does not appear to have a file named config.json. "
                f"Checkout 'https://huggingface.co/{path}/tree/main' for available files."
            )
            raise Failure("OSError", message, "launch config") from None
        files = list(root.glob("*.safetensors"))
        shards, size = len(files), sum(file.stat().st_size for file in files)
        with contextlib.suppress(OSError):
            index = json.loads((root / "model.safetensors.index.json").read_text(encoding="utf-8"))
            shards = len(set(index["weight_map"].values()))
            size = int(index.get("metadata", {}).get("total_size", size))
        return cls(path, config, max(1, shards), size)

    def get(self, key: str, default: Any) -> Any:
        return self.config.get("text_config", self.config).get(key, self.config.get(key, default))

    @property
    def architecture(self) -> str:
        return str((self.config.get("architectures") or ["UnknownModel"])[0])

    @property
    def mla(self) -> bool:
        return bool(self.get("kv_lora_rank", 0))

    def kv_bytes(self, tp: int) -> int:
        """Bytes of KV cache a token takes on one GPU."""
        layers = int(self.get("num_hidden_layers", 1))
        if self.mla:
            return 2 * layers * (int(self.get("kv_lora_rank", 0)) + int(self.get("qk_rope_head_dim", 64)))
        heads = int(self.get("num_attention_heads", 1))
        width = int(self.get("head_dim", 0) or int(self.get("hidden_size", heads)) // heads)
        return 4 * layers * max(1, int(self.get("num_key_value_heads", heads)) // tp) * width


class Server:
    """A launch, fully resolved: the fields of ``ServerArgs`` and what follows from them."""

    def __init__(self, runtime: Runtime, fields: dict[str, Any]) -> None:
        self.runtime, self.fields = runtime, fields
        self.warnings: list[str] = []
        self.algorithm: str | None = fields["speculative_algorithm"]
        self.model = Checkpoint.read(fields["model_path"])
        self.draft: Checkpoint | None = None
        self.tp = int(fields["tp_size"])
        self.nodes, self.node = int(fields.get("nnodes") or 1), int(fields.get("node_rank") or 0)
        if self.tp * int(fields.get("pp_size") or 1) % self.nodes:
            raise Failure("AssertionError", "tp_size must be divisible by number of nodes", "launch nodes")
        self.local_ranks = range(self.node * self.tp // self.nodes, (self.node + 1) * self.tp // self.nodes)
        self.context = int(fields["context_length"] or self.model.get("max_position_embeddings", 4096))
        self.vocabulary = int(self.model.get("vocab_size", 163840))
        self.gpu = env("LAB_GPU_GB", 96)
        self._defaults()
        self._speculation()
        self._graph_sizes()
        self.block = int(fields["speculative_num_draft_tokens"] or 1)
        budget = fields.get("speculative_ddtree_budget")
        self.budget = int(budget) if self.algorithm == "DDTREE" and budget is not None else None
        self.verify_tokens = self.block if self.budget is None else self.budget + 1
        """Tokens a request that a decode step sends to the target: 1 without speculation."""

    def _defaults(self) -> None:
        given = self.fields
        backend = given["attention_backend"] or "triton"
        for name, value in {
            "tokenizer_path": given["model_path"],
            "served_model_name": given["model_path"],
            "device": "cuda",
            "mem_fraction_static": 0.88,
            "chunked_prefill_size": 8192,
            "page_size": 1,
            "random_seed": 42,
            "attention_backend": backend,
            "sampling_backend": "flashinfer",
            "grammar_backend": "xgrammar",
        }.items():
            given[name] = value if given.get(name) is None else given[name]

    def _speculation(self) -> None:
        given, kind = self.fields, self.algorithm
        if kind not in ("DFLASH", "DDTREE"):
            self.algorithm = None
            return
        stacks = "launch spec"
        if given["speculative_draft_model_path"] is None:
            message = f"{kind} speculative decoding requires setting --speculative-draft-model-path."
            raise Failure("ValueError", message, stacks)
        if kind == "DDTREE" and int(given["speculative_ddtree_budget"] or 0) < 1:
            message = "DDTREE speculative decoding requires setting --speculative-ddtree-budget."
            raise Failure("ValueError", message, stacks)
        tokens, block = given["speculative_num_draft_tokens"], given["speculative_dflash_block_size"]
        if block is not None and tokens is not None and tokens != block:
            message = (
                "Both --speculative-num-draft-tokens and --speculative-dflash-block-size are set but they "
                "differ. For DFLASH they must match. "
                f"speculative_num_draft_tokens={tokens}, speculative_dflash_block_size={block}."
            )
            raise Failure("ValueError", message, stacks)
        self.draft = Checkpoint.read(given["speculative_draft_model_path"])
        wanted = (self.draft.config.get("dflash_config") or {}).get(
            "block_size", self.draft.get("block_size", None)
        )
        chosen = block or tokens or wanted
        if chosen is None:
            chosen = 16
            text = "speculative_num_draft_tokens is not set; defaulting to 16 for DFLASH."
            self.warnings.append(text)
        given.update(
            speculative_num_draft_tokens=int(chosen),
            speculative_num_steps=1,
            speculative_eagle_topk=1,
            speculative_draft_model_revision=given["speculative_draft_model_revision"] or "main",
            disable_overlap_schedule=True,
        )
        self.block_mismatch = (chosen, wanted) if wanted not in (None, chosen) else None
        if given["max_running_requests"] is None:
            given["max_running_requests"] = 48
            self.warnings.append(
                "Max running requests is reset to 48 for speculative decoding. You can override this by "
                "explicitly setting --max-running-requests."
            )
        self.warnings.append(
            f"Overlap scheduler is disabled when using {kind} speculative decoding "
            "(spec v2 is not supported yet)."
        )

    def _graph_sizes(self) -> None:
        given = self.fields
        if given["cuda_graph_bs"]:
            sizes = sorted(set(given["cuda_graph_bs"]))
        else:
            top = int(given["cuda_graph_max_bs"] or 48)
            steps = (
                [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8)]
                if self.algorithm
                else [1, 2, 4, 8, 12, *range(16, 257, 8)]
            )
            steps += [*range(272, top + 1, 16)]
            sizes = sorted({bs for bs in steps if bs <= top} | {top})
        given["cuda_graph_bs"], given["cuda_graph_max_bs"] = sizes, sizes[-1]
        self.graph_sizes: list[int] = [] if given["disable_cuda_graph"] else sizes

    def tokens_per_request(self, draft_worker: bool) -> int:
        """Tokens a request that the DEPLOYED graph runner sizes its buffers for."""
        return int(
            beside("sizing").tokens_per_request(
                self.runtime.text("srt/model_executor/cuda_graph_runner.py"),
                algorithm=self.algorithm,
                draft_worker=draft_worker,
                block_size=self.block,
                budget=self.budget,
            )
        )


# --- the scheduler process ---------------------------------------------------------------------------------


class GraphBuffers:
    """Input buffer of one worker's CUDA graphs: 64-bit token ids, ``max_bs`` requests of ``width`` tokens."""

    def __init__(self, max_bs: int, width: int) -> None:
        self.width = width
        self.input_ids = array("q", bytes(8 * max_bs * width))

    def populate(self, bs: int, tokens: array[int]) -> None:
        """Copy the tokens of a batch in, as ``populate_from_forward_batch`` does; the sizes must be equal."""
        place = memoryview(self.input_ids)[: bs * self.width]
        try:
            place[:] = memoryview(tokens)
        except ValueError:
            message = (
                f"The size of tensor a ({len(place)}) must match the size of tensor b ({len(tokens)}) "
                "at non-singleton dimension 0"
            )
            raise Failure("RuntimeError", message, "serve verify forward replay copy") from None


@dataclass
class Request:
    """One request in the scheduler. ``plan`` is the whole answer, one entry a token (answers.Ending)."""

    rid: str
    prompt: list[str]
    plan: Any
    cached: int = 0
    done: int = 0
    steps: list[int] = field(default_factory=list)
    """Drafts accepted in every verify step."""
    strayed: bool = False
    logprob_start: int | None = None
    """First token of the prompt whose log-probability is asked for: it can't come from the cache."""

    @property
    def ended(self) -> bool:
        return self.done >= len(self.plan.texts)

    def stray(self, start: int, near_tie: bool | None = None) -> None:
        """Let the rest of the answer go another way, once, see :func:`answers.diverge`."""
        at = answers.diverge(self.prompt, self.plan.pieces, start, near_tie)
        if at is not None and not self.strayed:
            self.strayed = True
            self.plan.pieces[at] = answers.runner_up(self.plan.pieces[at])
            self.plan.texts[at] = self.plan.pieces[at]

    def spec_meta(self, block: int, inflated: bool, histogram: bool) -> dict[str, Any]:
        """The figures of a request; the stock DFLASH worker keeps no histogram."""
        if not self.steps or block < 2:
            return {}
        steps = [block + 1] * len(self.steps) if inflated else self.steps
        accepted, proposed = sum(steps), len(steps) * (block - 1)
        meta: dict[str, Any] = {
            "spec_accept_rate": accepted / proposed,
            "spec_accept_length": (self.done + accepted - sum(self.steps)) / len(steps),
            "spec_accepted_drafts": accepted,
            "spec_proposed_drafts": proposed,
            "spec_verify_ct": len(steps),
        }
        if histogram:
            meta["spec_accept_histogram"] = [steps.count(n) for n in range(max(steps) + 1)]
        return meta


@dataclass
class Interval:
    """Counters since the last decode log line."""

    started: float = field(default_factory=time.monotonic)
    tokens: int = 0
    steps: int = 0
    verifies: int = 0
    accepted: int = 0


class Mesh:
    """What connects the nodes: one socket between the head and every other node. ``pause`` sleeps for seconds."""

    def __init__(self, server: Server, pause: Callable[[float], None]) -> None:
        self.server, self.pause = server, pause
        self.peers: list[socket.socket] = []
        self.synced: dict[socket.socket, int] = {}
        self.stacks = "load sync"

    def join(self) -> None:
        """Meet at ``--dist-init-addr``; returns when all nodes are there."""
        if self.server.nodes == 1:
            return
        name, _, port = str(self.server.fields["dist_init_addr"]).rpartition(":")
        where = (name.strip("[]"), int(port))
        patience = float(self.server.fields.get("dist_timeout") or env("LAB_DIST_TIMEOUT", 600))
        until = time.monotonic() + patience
        (self.connect if self.server.node else self.gather)(where, patience, until)
        for peer in self.peers:
            peer.settimeout(10)
            self.synced[peer] = 0
        self.sync()

    def gather(self, where: tuple[str, int], patience: float, until: float) -> None:
        share = self.server.tp // self.server.nodes
        try:
            door = socket.create_server(where, backlog=64)
        except OSError as error:
            message = (
                "The server socket has failed to listen on any local network address. "
                f"port: {where[1]}, useIpv6: false, code: -{error.errno}, "
                f"name: {errno.errorcode.get(error.errno or 0, '')}, message: {(error.strerror or '').lower()}"
            )
            raise Failure("torch.distributed.DistNetworkError", message, "load dist") from None
        with door:
            door.setblocking(False)
            while len(self.peers) < self.server.nodes - 1:
                with contextlib.suppress(BlockingIOError):
                    self.peers.append(door.accept()[0])
                if time.monotonic() > until:
                    here, wanted = share * (1 + len(self.peers)), self.server.tp
                    message = (
                        f"Timed out after {patience + 1:.0f} seconds waiting for clients. "
                        f"{here}/{wanted} clients joined."
                    )
                    raise Failure("torch.distributed.DistStoreError", message, "load dist")
                self.pause(0.05)

    def connect(self, where: tuple[str, int], patience: float, until: float) -> None:
        while not self.peers:
            try:
                self.peers.append(socket.create_connection(where, timeout=2))
            except OSError:
                if time.monotonic() > until:
                    message = (
                        f"The client socket has timed out after {patience * 1000:.0f}ms while trying to connect "
                        f"to ({where[0]}, {where[1]})."
                    )
                    raise Failure("torch.distributed.DistNetworkError", message, "load dist") from None
                self.pause(0.1)

    def look(self) -> None:
        """Take what the peers have sent; one that is gone ends this node too."""
        for peer in self.peers:
            while select.select([peer], [], [], 0)[0]:
                try:
                    told = len(peer.recv(64))
                except ConnectionError:
                    told = 0
                if not told:
                    self.lost(peer)
                self.synced[peer] += told

    def lost(self, peer: socket.socket) -> NoReturn:
        try:
            host, port = peer.getpeername()[:2]
        except OSError:
            host, port = "", 0
        message = (
            f"[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [{host}]:{port}"
        )
        raise Failure("RuntimeError", message, self.stacks)

    def sync(self) -> None:
        """Wait for all nodes, as a collective operation does: the head answers when every other one is there."""
        for turn in (bool(self.server.node), not self.server.node):
            for peer in self.peers:
                if turn:
                    try:
                        peer.sendall(b"s")
                    except OSError:
                        self.lost(peer)
                    continue
                while not self.synced[peer]:
                    self.look()
                    self.pause(0.02)
                self.synced[peer] -= 1


class Scheduler:
    """The child process: loads, batches, verifies, counts. Talks to the main process over a pipe."""

    def __init__(self, server: Server, link: Connection) -> None:
        self.server, self.link = server, link
        self.ranks = [f" TP{rank}" for rank in server.local_ranks] if server.tp > 1 else [""]
        self.mesh = Mesh(server, self.pause)
        self.load_seconds = env("LAB_LOAD_SECONDS", 3)
        self.rate = env("LAB_TOKENS_PER_S", 2000)
        self.hang = os.environ.get("LAB_HANG_AT", "")
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.prompts: list[list[str]] = []
        self.buffers: list[GraphBuffers] = []
        self.capacity = 0
        self.interval = Interval()
        self.totals = [0, 0]
        self.last_prefill = time.monotonic()
        self.crash_at = math.inf
        self.verified = False
        self.first = True
        self.faults = faults.Faults()
        self.served = 0
        self.kept: list[bytes] = []
        self.kept_tokens = 0
        self.undead: list[Request] = []
        self.idle_at = math.inf
        self.stats: dict[str, Any] = {"gen_throughput": 0.0}

    def log(self, message: str, every: bool = False) -> None:
        for rank in self.ranks if every else self.ranks[:1]:
            log(message, rank)

    def run(self) -> NoReturn:
        """The whole life of the process; an exception is logged on every rank and ends the server."""
        try:
            self.load()
            self.mesh.sync()
            self.mesh.stacks = "loop"
            self.link.send(("loaded", self.stats))
            if self.server.node and os.environ.get("LAB_CRASH_AFTER_S"):
                self.crash_at = time.monotonic() + env("LAB_CRASH_AFTER_S", 0)
            while True:
                self.step()
        except Failure as failure:
            text = self.server.runtime.traceback(failure)
        except EOFError:
            os._exit(0)
        except Exception:
            text = traceback.format_exc()
        self.log(f"Scheduler hit an exception: {text}", every=True)
        os.kill(os.getppid(), signal.SIGQUIT)
        while not self.link.poll(60):
            pass
        os._exit(1)

    def pause(self, seconds: float) -> None:
        """Sleep, but answer, and end with the main process."""
        until = time.monotonic() + seconds
        while seconds > 0 and self.link.poll(max(0.0, until - time.monotonic())):
            self.receive(*self.link.recv())

    def phase(self, name: str, share: float) -> None:
        if self.hang == name:
            while True:
                self.pause(60)
        self.pause(self.load_seconds * PHASES[name] * share)

    # loading

    def load(self) -> None:
        server, target, draft = self.server, self.server.model, self.server.draft
        models = [target] + ([draft] if draft else [])
        static = server.gpu * float(server.fields["mem_fraction_static"])
        free = server.gpu - 1
        weights = [model.size / GIB / server.tp for model in models]
        per_token = [model.kv_bytes(server.tp) for model in models]
        capacity = int((static - sum(weights)) * GIB / sum(per_token))
        if capacity <= 0:
            message = (
                "Not enough memory. Please try to increase --mem-fraction-static. "
                f"Current value: mem_fraction_static={server.fields['mem_fraction_static']}"
            )
            raise Failure("RuntimeError", message, "load pool")
        self.capacity = min(capacity, int(server.fields["max_total_tokens"] or capacity))
        graph_room = server.gpu - static - 1
        self.stats["memory_usage"] = {
            "weight": round(sum(weights), 2),
            "kvcache": round(self.capacity * sum(per_token) / GIB, 2),
            "token_capacity": self.capacity,
            "graph": 0.0,
        }
        for index, model in enumerate(models):
            share = (0.9, 0.1)[index] if draft else 1.0
            free = self.load_weights(model, weights[index], free, share)
            free = self.make_pool(model, self.capacity * per_token[index] / GIB, free, share)
            if server.graph_sizes:
                used = self.capture(index == 1, graph_room, free, share)
                graph_room, free = graph_room - used, free - used
                self.stats["memory_usage"]["graph"] = round(self.stats["memory_usage"]["graph"] + used, 2)
        if draft:
            if server.block_mismatch:
                self.log(
                    "DFLASH block size mismatch: using speculative_num_draft_tokens={} but draft config "
                    "block_size={}.".format(*server.block_mismatch)
                )
            self.log(
                "Initialized DFLASH draft runner. attention_backend={}, model={}, block_size={}, "
                "draft_window_size=None, compact_cache=False".format(
                    server.fields["speculative_draft_attention_backend"]
                    or server.fields["attention_backend"],
                    draft.architecture,
                    server.block,
                )
            )
        self.log(
            "max_total_num_tokens={}, chunked_prefill_size={}, max_prefill_tokens={}, "
            "max_running_requests={}, context_len={}, available_gpu_mem={:.2f} GB".format(
                self.capacity,
                server.fields["chunked_prefill_size"],
                server.fields["max_prefill_tokens"],
                self.max_running,
                server.context,
                free,
            )
        )
        self.stats.update(max_total_num_tokens=self.capacity, max_running=self.max_running)

    @property
    def max_running(self) -> int:
        return int(self.server.fields["max_running_requests"] or 2048)

    def load_weights(self, model: Checkpoint, size: float, free: float, share: float) -> float:
        started = time.monotonic()
        self.log("Init torch distributed begin.", every=True)
        if not self.mesh.peers:
            self.mesh.join()
        self.log("Init torch distributed ends. elapsed=0.01 s, mem usage=0.00 GB", every=True)
        self.log(f"Load weight begin. avail mem={free:.2f} GB", every=True)
        for shard in range(model.shards + 1):
            spent = time.monotonic() - started
            rate = f"{shard / spent:5.2f}it/s" if shard else "?it/s"
            left = "?" if not shard else clock(spent / shard * (model.shards - shard))
            write(
                2,
                "{}{}: {:3.0f}% Completed | {}/{} [{}<{}, {}]\n".format(
                    "\n" if not shard else "\r", LOAD_BAR, 100 * shard / model.shards, shard, model.shards,
                    clock(spent), left, rate,
                ),
            )  # fmt: skip
            if shard < model.shards:
                self.phase("weights", share / model.shards)
        self.log(
            f"Load weight end. elapsed={time.monotonic() - started:.2f} s, type={model.architecture}, "
            f"avail mem={free - size:.2f} GB, mem usage={size:.2f} GB.",
            every=True,
        )
        return free - size

    def make_pool(self, model: Checkpoint, size: float, free: float, share: float) -> float:
        self.phase("kv", share)
        self.log("Using KV cache dtype: torch.bfloat16")
        sizes = (
            f"KV size: {size:.2f} GB"
            if model.mla
            else f"K size: {size / 2:.2f} GB, V size: {size / 2:.2f} GB"
        )
        self.log(f"KV Cache is allocated. #tokens: {self.capacity}, {sizes}", every=True)
        self.log(f"Memory pool end. avail mem={free - size:.2f} GB", every=True)
        return free - size

    def capture(self, draft_worker: bool, room: float, free: float, share: float) -> float:
        """Make the graph buffers of one worker; the GiB they take."""
        server, started = self.server, time.monotonic()
        sizes, width = server.graph_sizes, server.tokens_per_request(draft_worker)
        self.log(
            f"Capture cuda graph begin. This can take up to several minutes. avail mem={free:.2f} GB",
            every=True,
        )
        self.log(f"Capture cuda graph bs {sizes}")
        need = sizes[-1] * width * (4 * server.vocabulary + 9 * server.context) / GIB
        if need > room:
            message = (
                f"CUDA out of memory. Tried to allocate {need:.2f} GiB. GPU 0 has a total capacity of "
                f"{server.gpu:.2f} GiB of which {max(room, 0):.2f} GiB is free. Of the allocated memory "
                f"{server.gpu - free:.2f} GiB is allocated by PyTorch."
            )
            cause = Failure("torch.OutOfMemoryError", message, "capture")
            text = server.runtime.text("srt/model_executor/cuda_graph_runner.py")
            found = re.search(r"^CUDA_GRAPH_CAPTURE_FAILED_MSG = (\(.*?^\))", text, re.M | re.S)
            advice = ast.literal_eval(found.group(1)) if found else ""
            raise Failure(
                "Exception", f"Capture cuda graph failed: {message}\n{advice}", "load graphs", cause
            )
        self.phase("graphs", share)
        self.buffers.append(GraphBuffers(sizes[-1], width))
        self.log(
            f"Capture cuda graph end. Time elapsed: {time.monotonic() - started:.2f} s. "
            f"mem usage={need:.2f} GB. avail mem={free - need:.2f} GB.",
            every=True,
        )
        return need

    # serving

    def step(self) -> None:
        """Take what has arrived, then run one prefill or one decode step."""
        busy = bool(self.waiting or self.running)
        until = min(self.crash_at, self.idle_at)
        patience = 0 if busy else max(0.0, min(60.0, until - time.monotonic()))
        if self.mesh.peers:
            wait([self.link, *self.mesh.peers], patience)
            self.mesh.look()
            patience = 0
        while self.link.poll(patience):
            self.receive(*self.link.recv())
            busy, patience = True, 0
        if time.monotonic() >= self.crash_at:
            raise self.illegal_access()
        if time.monotonic() >= self.idle_at:
            self.idle_at = math.inf
            used, share = self.usage()
            self.stats.update(
                num_running_reqs=len(self.undead), num_used_tokens=used, token_usage=share, gen_throughput=0.0
            )
            self.link.send(("stats", self.stats))
        if self.waiting and len(self.running) < self.max_running:
            self.prefill()
        elif self.running:
            self.decode()

    @staticmethod
    def illegal_access() -> Failure:
        message = "CUDA error: an illegal memory access was encountered"
        return Failure("torch.AcceleratorError", message, "serve forward replay")

    def receive(self, kind: str, body: Any) -> None:
        if kind == "generate":
            self.waiting += [self.plan(**request) for request in body]
        elif kind == "faults":
            self.served, self.faults = 0, body
            self.undead, self.kept, self.kept_tokens = [], [], 0
        elif kind == "abort":
            gone = [request for request in self.running + self.waiting if request.rid == body]
            if gone and "crash-on-abort" in self.faults:
                raise self.illegal_access()
            if gone and "abort-ignored" in self.faults:
                self.undead += gone
            self.running = [request for request in self.running if request.rid != body]
            self.waiting = [request for request in self.waiting if request.rid != body]
            self.idle_at = time.monotonic() + 1
        elif kind == "state":
            used, _ = self.usage()
            pending = sum(len(request.prompt) for request in self.waiting)
            load = {
                "num_running_reqs": len(self.running) + len(self.undead),
                "num_waiting_reqs": len(self.waiting),
                "num_used_tokens": used,
                "num_total_tokens": used + pending,
            }
            self.link.send(("state", (body, {**self.stats, "load": load})))
        elif kind == "flush":
            idle = not self.waiting and not self.running and not self.undead
            if idle and "flush-ignored" not in self.faults:
                self.prompts.clear()
                self.totals = [0, 0]
                self.stats.pop("avg_spec_accept_length", None)
            if not idle:
                self.log(
                    "Cache not flushed because there are pending requests. "
                    f"#queue-req: {len(self.waiting)}, #running-req: {len(self.running)}"
                )
            self.link.send(("state", (body, {"flushed": idle})))
        elif kind == "ready" and os.environ.get("LAB_CRASH_AFTER_S"):
            self.crash_at = time.monotonic() + env("LAB_CRASH_AFTER_S", 0)

    def plan(
        self,
        rid: str,
        text: str,
        prompt: list[str],
        limit: int | None,
        ignore_eos: bool,
        stop: list[str],
        tools: list[dict[str, Any]] | None = None,
        logprob_start: int | None = None,
    ) -> Request:
        """What a request will be answered; faults that count requests look here whether it is their turn."""
        on, counted = self.faults, not rid.startswith("HEALTH_CHECK")
        self.served += counted
        if counted and on.over("hang-after", self.served):
            while os.getppid() > 1:
                time.sleep(0.5)
        if counted and "leak" in on:
            self.kept.append(b"\xff" * (on.number("leak") << 20))
            self.kept_tokens += len(prompt)
        if counted and "xid" in on:
            log("NVRM: Xid (PCI:0000:41:00): 31, pid=4242, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE "
                "GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f2a_1c000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ")  # fmt: skip
        kind, answer = answers.compose(text, tools or ())
        limit = self.server.context - len(prompt) if limit is None else limit
        pieces = answers.pieces_of(answers.spoil(kind, answer, len(prompt), on))
        request = Request(
            rid, prompt, answers.ending(pieces, limit, stop, ignore_eos, on), logprob_start=logprob_start
        )
        if on.every("nondeterministic", self.served):
            request.stray(3)
        if self.server.algorithm and "lossy" in on:
            request.stray(on.number("lossy"), near_tie=False)
        if self.server.algorithm and "lossy-near-tie" in on:
            request.stray(on.number("lossy-near-tie"), near_tie=True)
        others = [other for other in self.running + self.waiting if other.plan.texts != request.plan.texts]
        if counted and others and "crossed-answers" in on:
            request.plan = answers.Ending(
                list(others[0].plan.pieces), list(others[0].plan.texts), others[0].plan.finish
            )
        return request

    def crash_when_due(self, batch: list[Request]) -> None:
        """The faults that end the server in a prefill.

        :raises Failure: it is their turn.
        """
        on = self.faults
        longest = max(len(request.prompt) for request in batch)
        counted = not batch[0].rid.startswith("HEALTH_CHECK")
        if counted and on.over("oom-late", self.served):
            message = (
                f"CUDA out of memory. Tried to allocate 1.31 GiB. GPU 0 has a total capacity of "
                f"{self.server.gpu:.2f} GiB of which 0.87 GiB is free."
            )
            stacks = "serve prefill forward extend" if self.server.algorithm else "serve forward extend"
            raise Failure("torch.OutOfMemoryError", message, stacks)
        if (
            (counted and on.over("late-crash", self.served))
            or on.over("long-prompt-crash", longest)
            or ("overlong-crash" in on and longest >= self.server.context)
            or on.reached("crash-on-batch", len(self.running) + len(batch))
        ):
            raise self.illegal_access()

    def cached_tokens(self, prompt: list[str]) -> int:
        if "no-cache" in self.faults:
            return 0
        best = 0
        for known in self.prompts:
            same = next((i for i, (a, b) in enumerate(zip(known, prompt)) if a != b), None)  # noqa: B905
            best = max(best, min(len(known), len(prompt)) if same is None else same)
        return min(best, len(prompt) - 1)

    def usage(self) -> tuple[int, float]:
        used = self.kept_tokens
        used += sum(len(request.prompt) + request.done for request in self.running + self.undead)
        return used, used / self.capacity

    def prefill(self) -> None:
        batch = self.waiting[: self.max_running - len(self.running)]
        del self.waiting[: len(batch)]
        if self.first:
            self.phase("warmup", 1.0)
            self.first = False
        self.crash_when_due(batch)
        for request in batch:
            request.cached = self.cached_tokens(request.prompt)
            if request.logprob_start is not None:
                request.cached = min(request.cached, request.logprob_start)
            if self.faults.reached("wrong-on-prefix-hit", request.cached):
                request.stray(3)
        cached = sum(request.cached for request in batch)
        new = sum(len(request.prompt) for request in batch) - cached
        now = time.monotonic()
        graph = bool(self.server.graph_sizes) and not self.server.algorithm
        self.log(
            f"Prefill batch, #new-seq: {len(batch)}, #new-token: {new}, #cached-token: {cached}, "
            f"token usage: {self.usage()[1]:.2f}, #running-req: {len(self.running)}, "
            f"#queue-req: {len(self.waiting)}, #pending-token: 0, cuda graph: {graph}, "
            f"input throughput (token/s): {new / max(1e-3, now - self.last_prefill):.2f}"
        )
        self.last_prefill = now
        if any(self.faults.reached("crash-on-prefix-hit", request.cached) for request in batch):
            message = (
                "out of resource: shared memory, Required: 106496, Hardware limit: 101376. "
                "Reducing block sizes or `num_stages` may help."
            )
            stacks = "serve prefill forward extend" if self.server.algorithm else "serve forward extend"
            raise Failure("triton.runtime.errors.OutOfResources", message, stacks)
        for request in batch:
            if len(request.prompt) > 1:
                self.prompts = [*self.prompts[-63:], request.prompt]
            self.emit(request, 1)
        self.running += [request for request in batch if not request.ended]
        self.idle_at = time.monotonic() + 1

    def tree(self, request: Request, width: int) -> array[int]:
        """Token ids of a verify step: the last token, then the drafted nodes."""
        return array("q", (zlib.crc32(b"%d %d" % (request.done, i)) % answers.EOS_ID for i in range(width)))

    def accepted(self, request: Request) -> int:
        """How many drafted tokens hold: a walk that goes a level deeper with a chance that grows with the tree."""
        if "accept-1" in self.faults:
            return 0
        hold = min(0.9, 0.45 + 0.04 * math.log2(self.server.verify_tokens))
        depth = 0
        while depth < self.server.block - 1 and answers.chance(request.prompt, request.done, depth) < hold:
            depth += 1
        return depth

    def decode(self) -> None:
        server, batch, interval = self.server, self.running, self.interval
        graph = bool(server.graph_sizes) and len(batch) <= server.graph_sizes[-1]
        if graph:
            widths = [server.verify_tokens, server.block]
            for buffers, width in reversed(list(zip(self.buffers, widths))):  # noqa: B905
                tokens = array("q")
                for request in batch:
                    tokens += self.tree(request, width)
                buffers.populate(len(batch), tokens)
        if server.algorithm and self.faults.reached("lossy-at-batch", len(batch)):
            for request in batch:
                request.stray(request.done)
        drafts = [self.accepted(request) for request in batch]
        if server.algorithm and not self.verified:
            self.log(f"DFLASH verify completed. num_accepted_drafts_per_req={drafts}")
            self.verified = True
        self.pause_step(max(drafts) + 1)
        for request, count in zip(batch, drafts):  # noqa: B905
            left = len(request.plan.texts) - request.done
            request.steps += [min(count + 1, left) - 1] if server.algorithm else []
            self.emit(request, count + 1)
        self.running = [request for request in batch if not request.ended]
        self.idle_at = time.monotonic() + 1
        interval.steps += 1
        interval.verifies += len(batch)
        interval.accepted += sum(drafts)
        interval.tokens += sum(drafts) + len(batch)
        if interval.steps >= int(server.fields["decode_log_interval"]):
            self.report(len(batch), graph)

    def pause_step(self, tokens: int) -> None:
        rate = self.rate
        if "slow-decay" in self.faults:
            rate /= 2 ** (self.served // max(1, self.faults.number("slow-decay")))
        until = time.monotonic() + tokens / rate
        while time.monotonic() < until:
            time.sleep(max(0.0, until - time.monotonic()))

    def report(self, running: int, graph: bool) -> None:
        """The decode line, and the figures that move only with it."""
        last, self.interval = self.interval, Interval()
        used, share = self.usage()
        throughput = last.tokens / max(1e-3, time.monotonic() - last.started)
        length, rate, spec = 0.0, 0.0, ""
        if self.server.algorithm and "accept-above-block" in self.faults:
            last.tokens = last.verifies * (self.server.block + 2)
            last.accepted = last.tokens - last.verifies
        if self.server.algorithm:
            self.totals = [self.totals[0] + last.tokens, self.totals[1] + last.verifies]
            length = last.tokens / last.verifies
            rate = last.accepted / (last.verifies * max(1, self.server.block - 1))
            spec = f"accept len: {length:.2f}, accept rate: {rate:.2f}, "
            self.stats["avg_spec_accept_length"] = self.totals[0] / self.totals[1]
        self.log(
            f"Decode batch, #running-req: {running}, #token: {used}, token usage: {share:.2f}, {spec}"
            f"cuda graph: {graph}, gen throughput (token/s): {throughput:.2f}, #queue-req: {len(self.waiting)}"
        )
        self.stats.update(
            gen_throughput=throughput, spec_accept_length=length, spec_accept_rate=rate,
            num_running_reqs=running, num_used_tokens=used, token_usage=share, is_cuda_graph=float(graph),
        )  # fmt: skip
        self.link.send(("stats", self.stats))

    def emit(self, request: Request, count: int) -> None:
        plan, begin = request.plan, request.done
        pieces = plan.pieces[begin : begin + count]
        request.done += len(pieces)
        chunk: dict[str, Any] = {
            "rid": request.rid,
            "text": "".join(plan.texts[begin : begin + count]),
            "pieces": pieces,
            "ids": [token_id(piece, self.server.vocabulary) for piece in pieces],
            "finish": plan.finish if request.ended else None,
            "done": request.done,
            "cached": request.cached,
            "spec": {},
        }
        if request.ended:
            inflated, histogram = "accept-above-block" in self.faults, self.server.algorithm == "DDTREE"
            chunk["spec"] = request.spec_meta(self.server.block, inflated, histogram)
        self.link.send(("chunk", chunk))


def token_id(piece: str, vocabulary: int) -> int:
    """The id of a token; ``""`` is the end of the text."""
    return zlib.crc32(piece.encode()) % vocabulary if piece else int(answers.EOS_ID)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


# --- the main process: requests ----------------------------------------------------------------------------


class Refused(Exception):
    """A request answered with 400; ``kind`` is the error's type in OpenAI's shape."""

    def __init__(self, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.kind = kind


class Broken(Exception):
    """A fault wants this request answered with 500."""


class Frontend:
    """Takes requests to the scheduler and the answers back (sglang's tokenizer manager)."""

    def __init__(self, server: Server, link: Connection, pid: int, switches: Switches) -> None:
        self.server, self.link, self.pid = server, link, pid
        self.lock = threading.Lock()
        self.inflight: dict[str, queue.Queue[Any]] = {}
        self.ready = False
        self.draining = False
        self.leaving = False
        self.switches = switches
        self.faults = faults.Faults()
        self.asked = 0
        self.active = 0
        self.health_asked = 0
        self.stats: dict[str, Any] = {}
        self.counts = {"prompt_tokens_total": 0, "generation_tokens_total": 0, "num_requests_total": 0}

    def send(self, kind: str, body: Any = None) -> None:
        with self.lock:
            self.link.send((kind, body))

    def receive_for_ever(self) -> None:
        """Hand answers to those who wait for them; ends when the scheduler does."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, body = self.link.recv()
                if kind == "stats":
                    self.stats = body
                    continue
                rid, answer = (body["rid"], body) if kind == "chunk" else body
                waiting = self.inflight.get(rid)
                if waiting is not None:
                    waiting.put(answer)

    def look(self) -> Any:
        """The faults of this moment, told to the scheduler where they have changed. None before it is ready."""
        now = self.switches.now() if self.ready else self.faults
        with self.lock:
            if now != self.faults:
                self.faults, self.asked, self.health_asked = now, 0, 0
                self.link.send(("faults", now))
        return now

    def enter(self, requests: int) -> bool:
        """Count requests that are to be generated; False where a fault answers them with 500."""
        on = self.look()
        with self.lock:
            crowded = on.reached("burst-drops", self.active)
            self.asked += requests
            self.active += requests
            return not (crowded or on.every("error-every", self.asked))

    def leave(self, requests: int) -> None:
        with self.lock:
            self.active -= requests
            self.leaving = self.leaving or (
                not self.active and self.faults.reached("restart-itself", self.asked)
            )

    def state(self, kind: str = "state") -> dict[str, Any]:
        """The scheduler's figures, asked for now; waits as long as the scheduler does not answer."""
        rid = uuid.uuid4().hex
        answer: queue.Queue[Any] = queue.Queue()
        self.inflight[rid] = answer
        try:
            self.send(kind, rid)
            return dict(answer.get())
        finally:
            self.inflight.pop(rid, None)

    def check(self, prompt: list[str], params: dict[str, Any], rid: str) -> None:
        """Refuse what sglang refuses. As in 0.5.11 the id of a refused request is never forgotten."""
        server, limit, on = self.server, params.get("max_new_tokens"), self.faults
        self.inflight[rid] = queue.Queue()
        if on.over("long-prompt-refused", len(prompt)):
            raise Refused(
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({on.number('long-prompt-refused')} tokens)."
            )
        total = len(prompt) + (limit or 0)
        if "overlong-500" in on and max(total, len(prompt) + 1) > server.context:
            raise Broken("the input is too long")
        if "overlong-accepted" in on or "overlong-crash" in on:
            return
        if len(prompt) >= server.context:
            raise Refused(
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({server.context} tokens)."
            )
        if limit is not None and len(prompt) + limit > server.context:
            raise Refused(
                f"Requested token count exceeds the model's maximum context length of {server.context} "
                f"tokens. You requested a total of {len(prompt) + limit} tokens: {len(prompt)} tokens from "
                f"the input messages and {limit} tokens for the completion. Please reduce the number of "
                "tokens in the input messages or the completion to fit within the limit."
            )
        if float(params.get("temperature") or 0) < 0:
            raise Refused(f"temperature must be non-negative, got {float(params['temperature'])}.")
        if limit is not None and limit < 0:
            raise Refused(f"max_new_tokens must be at least 0, got {limit}.")

    def generate(
        self, jobs: list[tuple[str, list[str], dict[str, Any]]], gone: Callable[[], bool]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run (text, prompt tokens, sampling parameters) as one batch; yields (index, chunk) as they come.

        :param gone: whether the client has left: looked at twice a second (sglang: every 4 s).
        :raises Broken: a fault wants 500.
        :raises ConnectionError: the client has left.
        """
        rids = [uuid.uuid4().hex for _ in jobs]
        chunks: queue.Queue[Any] = queue.Queue()
        self.look()
        batch: list[dict[str, Any]] = []
        done: set[str] = set()
        for rid, (text, prompt, params) in zip(rids, jobs):  # noqa: B905
            self.check(prompt, params, rid)
            self.inflight[rid] = chunks
            stop = params.get("stop") or []
            batch.append(
                {
                    "rid": rid,
                    "text": text,
                    "prompt": prompt,
                    "limit": params.get("max_new_tokens"),
                    "ignore_eos": bool(params.get("ignore_eos")),
                    "stop": [stop] if isinstance(stop, str) else stop,
                    "tools": params.get("tools"),
                    "logprob_start": params.get("logprob_start"),
                }
            )
        try:
            if not self.enter(len(jobs)):
                raise Broken("a fault answers this request with 500")
            self.send("generate", batch)
            looked = time.monotonic()
            while len(done) < len(jobs):
                if time.monotonic() > looked + 0.5:
                    looked = time.monotonic()
                    if gone():
                        raise ConnectionError("the client has left")
                try:
                    chunk = chunks.get(timeout=0.5)
                except queue.Empty:
                    continue
                if chunk["finish"]:
                    done.add(chunk["rid"])
                    self.inflight.pop(chunk["rid"], None)
                    self.counts["num_requests_total"] += 1
                    self.counts["generation_tokens_total"] += chunk["done"]
                    self.counts["prompt_tokens_total"] += len(jobs[rids.index(chunk["rid"])][1])
                yield rids.index(chunk["rid"]), chunk
        finally:
            self.leave(len(jobs))
            for rid in set(rids) - done:
                self.inflight.pop(rid, None)
                self.send("abort", rid)

    def healthy(self) -> bool:
        """Generate one token, as both health endpoints do, and see whether it comes."""
        if self.draining:
            log("Health check request received during shutdown. Returning 503.")
        if self.draining or not self.ready:
            return False
        on = self.look()
        self.health_asked += 1
        if on.every("flap-503", self.health_asked):
            return False
        started, patience = time.time(), env("SGLANG_HEALTH_CHECK_TIMEOUT", 20)
        rid = f"HEALTH_CHECK_{started}"
        answer: queue.Queue[Any] = queue.Queue()
        self.inflight[rid] = answer
        job = {"rid": rid, "text": "", "prompt": ["!"], "limit": 1, "ignore_eos": False, "stop": []}
        self.send("generate", [job])
        try:
            answer.get(timeout=patience)
        except queue.Empty:
            tic = time.strftime("%H:%M:%S", time.localtime(started))
            log(
                "Health check failed. Server couldn't get a response from detokenizer for last "
                f"{patience:.0f} seconds. tic start time: {tic}. last_heartbeat time: {tic}"
            )
            return False
        finally:
            self.inflight.pop(rid, None)
        time.sleep(max(0.0, started + env("LAB_HEALTH_POLL", 0.1) - time.time()))
        return True


# --- the main process: HTTP --------------------------------------------------------------------------------


class HttpServer(socketserver.ThreadingTCPServer):
    """A plain threading server; unlike ``http.server.HTTPServer`` it never asks the DNS for its own name."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128
    frontend: Frontend

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            log("Exception in ASGI application\n" + traceback.format_exc())


def compact(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class DummyHandler(BaseHTTPRequestHandler):
    """All that a node above rank 0 serves (``launch_dummy_health_check_server``); it writes no access lines."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        known = self.path.split("?")[0] in ("/ping", "/health", "/health_generate")
        body = b"" if known else compact({"detail": "Not Found"})
        self.send_response_only(200 if known else 404)
        for name, value in {
            "date": self.date_time_string(),
            "server": "uvicorn",
            "x-lab-engine": NOTICE,
        }.items():
            self.send_header(name, value)
        if body:
            self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Its uvicorn runs at log level warning."""


class Handler(BaseHTTPRequestHandler):
    """sglang's endpoints. Bodies, status codes and headers follow answers recorded from sglang 0.5.11."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HttpServer
    ROUTES: ClassVar[dict[str, tuple[str, str]]] = {
        "/health": ("GET", "health"),
        "/health_generate": ("GET", "health"),
        "/v1/models": ("GET", "models"),
        "/model_info": ("GET", "model_info"),
        "/get_model_info": ("GET", "model_info"),
        "/server_info": ("GET", "server_info"),
        "/get_server_info": ("GET", "server_info"),
        "/metrics": ("GET", "metrics"),
        "/get_load": ("GET", "get_load"),
        "/flush_cache": ("GET POST", "flush_cache"),
        "/generate": ("POST", "generate"),
        "/v1/chat/completions": ("POST", "chat"),
        "/v1/completions": ("POST", "completions"),
    }

    @property
    def front(self) -> Frontend:
        return self.server.frontend

    @property
    def fields(self) -> dict[str, Any]:
        return self.front.server.fields

    def do_GET(self) -> None:
        self.route()

    def do_POST(self) -> None:
        self.route()

    def log_message(self, format: str, *args: Any) -> None:
        """Access lines are written in :meth:`head`."""

    def route(self) -> None:
        self.raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.plain_path = path = self.path.split("?")[0]
        methods, name = self.ROUTES.get(path, ("", ""))
        if path.startswith("/v1/models/"):
            methods, name = "GET", "model"
        if path == "/metrics" and not self.fields["enable_metrics"]:
            name = ""
        if path.startswith("/get_") and name:
            now = "v1/loads" if name == "get_load" else name
            log(
                f"Endpoint '{path}' is deprecated and will be removed in a future version. "
                f"Please use '/{now}' instead."
            )
        key, is_open = self.fields["api_key"], path.startswith(("/health", "/metrics"))
        if path == "/flush_cache" and self.fields["admin_api_key"]:
            key = self.fields["admin_api_key"]
        scheme, _, token = (self.headers.get("authorization") or "").partition(" ")
        if key and not is_open and not (scheme.lower() == "bearer" and token == key):
            self.reply(401, {"error": "Unauthorized"})
        elif not name:
            self.reply(404, {"detail": "Not Found"})
        elif self.command not in methods.split():
            self.reply(405, {"detail": "Method Not Allowed"}, allow=methods.replace(" ", ", "))
        else:
            self.answer(getattr(self, "serve_" + name))

    def answer(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except Refused as refused:
            text = str(refused)
            if self.plain_path == "/generate" and refused.kind == "BadRequestError":
                log(f"[http_server] Error: {text}")
                self.reply(400, {"error": {"message": text}})
                return
            error = {"object": "error", "message": text, "type": refused.kind, "param": None, "code": 400}
            self.reply(400, error)
        except ConnectionError:
            raise
        except Broken as broken:
            error = {
                "object": "error",
                "message": str(broken),
                "type": "InternalServerError",
                "param": None,
                "code": 500,
            }
            self.reply(500, error)
        except Exception:
            log("Exception in ASGI application\n" + traceback.format_exc())
            self.reply(500, "Internal Server Error", "text/plain; charset=utf-8", connection="close")
            self.close_connection = True

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {"date": self.date_time_string(), "server": "uvicorn", **headers}.items():
            self.send_header(name, value)
        self.send_header("x-lab-engine", NOTICE)
        self.end_headers()
        host, port = self.client_address[:2]
        reason = self.responses[status][0]
        log(f'INFO:     {host}:{port} - "{self.command} {self.path} HTTP/1.1" {status} {reason}', stream=1)

    def reply(self, status: int, body: Any, kind: str = "application/json", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else compact(body)
        headers.update({"content-length": str(len(data))}, **({"content-type": kind} if kind else {}))
        self.head(status, {**headers, "vary": "Origin"})
        self.wfile.write(data)

    def stream(self, events: Iterator[Any]) -> None:
        first = next(events)
        kind = {"content-type": "text/event-stream; charset=utf-8"}
        self.head(200, {**kind, "vary": "Origin", "Transfer-Encoding": "chunked"})
        on = self.front.faults
        for count, event in enumerate(chain([first], events)):
            if on.reached("hang-in-stream", count):
                while not self.gone():
                    time.sleep(0.2)
                raise ConnectionError("the client has left")
            data = b"data: " + compact(event) + b"\n\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        done = b"" if "stream-no-done" in on else b"e\r\ndata: [DONE]\n\n\r\n"
        self.wfile.write(done + b"0\r\n\r\n")

    def gone(self) -> bool:
        """Whether the client has hung up."""
        if not select.select([self.connection], [], [], 0)[0]:
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    # plain endpoints

    def serve_health(self) -> None:
        self.reply(200 if self.front.healthy() else 503, "", kind="")

    def serve_flush_cache(self) -> None:
        self.front.look()
        if not self.front.state("flush")["flushed"]:
            self.reply(400, "Flush cache failed.\n", kind="")
            return
        text = (
            "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting "
            "requests, the operation will not be performed.)\n"
        )
        self.reply(200, text, kind="")

    def serve_get_load(self) -> None:
        load = self.front.state()["load"]
        rank = {
            "dp_rank": None,
            "num_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
            "num_waiting_reqs": load["num_waiting_reqs"],
            "num_tokens": load["num_total_tokens"],
            "num_pending_tokens": load["num_total_tokens"] - load["num_used_tokens"],
            "ts_tic": time.perf_counter(),
        }
        self.reply(200, [rank])

    # fmt: off
    def card(self) -> dict[str, Any]:
        name, now = self.fields["served_model_name"], int(time.time())
        return {
            "id": name, "object": "model", "created": now, "owned_by": "sglang", "root": name, "parent": None,
            "max_model_len": self.front.server.context,
        }

    def serve_models(self) -> None:
        self.reply(200, {"object": "list", "data": [self.card()]})

    def serve_model(self) -> None:
        name = self.plain_path[len("/v1/models/") :]
        if name == self.fields["served_model_name"]:
            self.reply(200, self.card())
            return
        self.reply(404, {"error": {
            "message": f"The model '{name}' does not exist", "type": "invalid_request_error",
            "param": "model", "code": "model_not_found",
        }})

    def serve_model_info(self) -> None:
        model = self.front.server.model
        self.reply(200, {
            "model_path": model.path, "tokenizer_path": self.fields["tokenizer_path"], "is_generation": True,
            "preferred_sampling_params": self.fields["preferred_sampling_params"],
            "weight_version": self.fields["weight_version"],
            "has_image_understanding": False, "has_audio_understanding": False,
            "model_type": model.config.get("model_type", "unknown"),
            "architectures": model.config.get("architectures", []),
        })

    def serve_server_info(self) -> None:
        stats, server, backend = self.front.state(), self.front.server, self.fields["attention_backend"]
        inner = {
            **self.fields, "pp_max_micro_batch_size": stats["max_running"],
            "decode_attention_backend": backend, "prefill_attention_backend": backend,
            "enable_grpc": False, "grpc_port": int(self.fields["port"]) + 10000,
            "_quantization_explicitly_unset": False, "use_mla_backend": server.model.mla,
            "_mx_config_cache": {}, "last_gen_throughput": stats["gen_throughput"],
            "memory_usage": stats["memory_usage"],
            "effective_max_running_requests_per_dp": stats["max_running"],
        }
        if "avg_spec_accept_length" in stats:
            inner["avg_spec_accept_length"] = stats["avg_spec_accept_length"]
        self.reply(200, {
            **self.fields, "status": "ready", "max_total_num_tokens": stats["max_total_num_tokens"],
            "max_req_input_len": server.context - 6, "internal_states": [inner],
            "version": server.runtime.version, "lab_engine": NOTICE,
        })
    # fmt: on

    def serve_metrics(self) -> None:
        name = f'engine_type="unified",model_name="{self.fields["served_model_name"]}"'
        rank = name + ',moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        lines = []
        for metric, value in self.front.counts.items():
            lines += [f"# HELP sglang:{metric} {metric}.", f"# TYPE sglang:{metric} counter"]
            lines += [f"sglang:{metric}{{{name}}} {float(value)}"]
        for metric in GAUGES:
            lines += [f"# HELP sglang:{metric} {metric}.", f"# TYPE sglang:{metric} gauge"]
            lines += [f"sglang:{metric}{{{rank}}} {float(self.front.stats.get(metric, 0.0))}"]
        self.reply(200, "\n".join(lines) + "\n", kind="text/plain; version=0.0.4; charset=utf-8")

    # generation

    def invalid(self, function: str, **error: Any) -> Refused:
        """A body that does not fit sglang's request model, in the words of its validation."""
        where, path, runtime = "", "srt/entrypoints/http_server.py", self.front.server.runtime
        if function:
            line = runtime.locate(path, function) - 1
            where = f'\n\n  File "{runtime.package / path}", line {line}, in {function}\n    POST {self.path}'
        return Refused(f"1 validation error:\n  {error}{where} [{error}]", "Bad Request")

    def body(self, function: str, required: str = "", integers: tuple[str, ...] = ()) -> dict[str, Any]:
        """The JSON body, checked as sglang's request model checks it."""
        if self.headers.get("content-type", "").split(";")[0] != "application/json":
            text = "Unsupported Media Type: Only 'application/json' is allowed"
            raise self.invalid("", loc=["header", "content-type"], msg=text, type="value_error")
        try:
            body = json.loads(self.raw)
        except ValueError as error:
            at, why = ("body", getattr(error, "pos", 0)), {"error": getattr(error, "msg", str(error))}
            raise self.invalid(
                function, type="json_invalid", loc=at, msg="JSON decode error", input={}, ctx=why
            ) from None
        if not isinstance(body, dict) or (required and required not in body):
            loc = ("body", required)
            raise self.invalid(function, type="missing", loc=loc, msg="Field required", input=body)
        for name in integers:
            try:
                body[name] = None if body.get(name) is None else int(body[name])
            except (TypeError, ValueError):
                text = "Input should be a valid integer, unable to parse string as an integer"
                raise self.invalid(
                    function, type="int_parsing", loc=("body", name), msg=text, input=body[name]
                ) from None
        return body

    def refuse_unsupported(self, logprobs: Any, grammar: Any) -> None:
        """What sglang refuses under speculation, and what the lab engine cannot.

        :raises Refused: logprobs under speculation; a grammar.
        :raises Broken: a fault wants 500 instead.
        """
        algorithm, on = self.front.server.algorithm, self.front.look()
        if algorithm and "refuses-nothing" in on:
            return
        if (logprobs and algorithm) or grammar:
            if on["wrong-refusal"] == "500":
                raise Broken("not supported")
            if on["wrong-refusal"] == "words":
                raise Refused("This is not possible.")
        if logprobs and algorithm:
            raise Refused(f"{algorithm} speculative decoding does not support return_logprob yet.")
        if grammar and self.fields["grammar_backend"] == "none" and not algorithm:
            raise Refused(
                "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported when "
                "the server is launched with --grammar-backend none"
            )
        if grammar:
            kind = f"{algorithm} speculative decoding" if algorithm else "The lab engine"
            raise Refused(f"{kind} does not support grammar-constrained decoding yet.")

    def wanted_logprobs(self, asked: Any, top: Any, start: Any = -1) -> dict[str, Any]:
        """Parameters of a request that asks for log-probabilities; none where it does not, or may not."""
        if not asked or self.front.server.algorithm:
            return {}
        start = int(-1 if start is None else start)
        return {"top": int(top or 0), "start": start, "logprob_start": None if start < 0 else start}

    def serve_generate(self) -> None:
        received, body = time.time(), self.body("generate_request")
        given = body.get("text") if body.get("text") is not None else body.get("input_ids")
        if given is None:
            raise Refused("Either text, input_ids or input_embeds should be provided.")
        many = isinstance(given, list) and bool(given) and isinstance(given[0], (str, list))
        params = {"max_new_tokens": 128, **(body.get("sampling_params") or {})}
        grammar = [key for key in ("json_schema", "regex", "ebnf", "structural_tag") if params.get(key)]
        self.refuse_unsupported(body.get("return_logprob"), grammar)
        wanted = self.wanted_logprobs(
            body.get("return_logprob"), body.get("top_logprobs_num"), body.get("logprob_start_len")
        )
        params.update(wanted, texts=bool(body.get("return_text_in_logprobs")))
        jobs = []
        for item in given if many else [given]:
            prompt = answers.pieces_of(item) if isinstance(item, str) else [str(token) for token in item]
            jobs.append((item if isinstance(item, str) else "".join(prompt), prompt or ["!"], params))
        results = self.accumulate(jobs, received)
        if body.get("stream"):
            self.stream(answer for _, answer in results)
            return
        last = dict(results)
        self.reply(200, [last[index] for index in range(len(jobs))] if many else last[0])

    def accumulate(
        self, jobs: list[tuple[str, list[str], dict[str, Any]]], received: float
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """``/generate`` answers so far, one for each chunk."""
        texts, pieces = [""] * len(jobs), [[] for _ in jobs]  # type: list[str], list[list[str]]
        dispatched, vocabulary = time.time(), self.front.server.vocabulary
        for index, chunk in self.front.generate(jobs, self.gone):
            _, prompt, params = jobs[index]
            texts[index] += chunk["text"]
            pieces[index].extend(chunk["pieces"])
            cached = chunk["cached"]
            # fmt: off
            meta = {
                "id": chunk["rid"], "finish_reason": chunk["finish"], "prompt_tokens": len(prompt),
                "weight_version": self.fields["weight_version"], "total_retractions": 0, "queue_time": 0.0,
                "prefill_waiting_latency": None, "prefill_launch_latency": None, "reasoning_tokens": 0,
                "completion_tokens": chunk["done"], "cached_tokens": cached,
                "cached_tokens_details": {"device": cached, "host": 0} if cached else None, "dp_rank": None,
            }
            # fmt: on
            now = time.time()
            if "wrong-usage" in self.front.faults:
                meta["completion_tokens"] += 3
            if "top" in params:
                meta.update(logprob_meta(prompt, pieces[index], params, vocabulary))
            if chunk["finish"]:
                meta.update({"e2e_latency": now - received}, **chunk["spec"])
            if chunk["finish"] and self.fields["enable_metrics"]:
                meta.update(
                    request_received_ts=received,
                    api_server_dispatch_finish_ts=dispatched,
                    request_finished_ts=now,
                    inference_time=now - dispatched,
                    decode_throughput=chunk["done"] / max(1e-6, now - dispatched),
                )
            if chunk["finish"] or len(chunk["ids"]) == chunk["done"]:
                meta["response_sent_to_client_ts"] = now
            ids = [token_id(piece, vocabulary) for piece in pieces[index]]
            yield index, {"text": texts[index], "output_ids": ids, "meta_info": meta}

    def serve_chat(self) -> None:
        integers = ("max_tokens", "max_completion_tokens", "n")
        body = self.body("openai_v1_chat_completions", "messages", integers)
        if not body["messages"]:
            raise Refused("Messages cannot be empty.")
        asked, prompt, role = "", [], ""
        for message in body["messages"]:
            role, content = str(message.get("role")), message.get("content") or ""
            if not isinstance(content, str):
                content = " ".join(part.get("text", "") for part in content if isinstance(part, dict))
            asked = content if role in ("user", "tool") else asked
            prompt += ["<|im_start|>", role, "\n", *answers.pieces_of(content), "<|im_end|>", "\n"]
        prompt += ["<|im_start|>", "assistant", "\n"]
        limit = body["max_completion_tokens"] if body["max_tokens"] is None else body["max_tokens"]
        choice = body.get("tool_choice") or "auto"
        grammar = (body.get("response_format") or {}).get("type", "text") != "text"
        grammar = grammar or bool(body.get("tools") and choice not in ("auto", "none"))
        self.refuse_unsupported(body.get("logprobs"), grammar)
        params = self.wanted_logprobs(body.get("logprobs"), body.get("top_logprobs"))
        if body.get("tools") and choice != "none":
            prompt = answers.pieces_of(json.dumps(body["tools"])) + prompt
            params["tools"] = body["tools"] if role == "user" else None
        self.openai(body, "chat.completion", asked, prompt, limit, params)

    def serve_completions(self) -> None:
        body = self.body("openai_v1_completions", "prompt", ("max_tokens", "n"))
        text = body["prompt"] if isinstance(body["prompt"], str) else " ".join(map(str, body["prompt"]))
        self.refuse_unsupported(body.get("logprobs"), False)
        limit = 16 if body["max_tokens"] is None else body["max_tokens"]
        params = self.wanted_logprobs(body.get("logprobs"), body.get("logprobs"))
        self.openai(body, "text_completion", text, answers.pieces_of(text) or ["!"], limit, params)

    def openai(
        self,
        body: dict[str, Any],
        kind: str,
        text: str,
        prompt: list[str],
        limit: int | None,
        params: dict[str, Any],
    ) -> None:
        """Run one OpenAI request and answer it whole or as a stream."""
        if (body.get("n") or 1) != 1:
            raise Refused("The lab engine answers n=1 only.")
        params.update({key: body.get(key) for key in ("temperature", "ignore_eos", "stop")})
        params["max_new_tokens"] = limit
        chunks = (chunk for _, chunk in self.front.generate([(text, prompt, params)], self.gone))
        head = {"created": int(time.time()), "model": body.get("model") or "default"}
        calls = bool(params.get("tools") and self.fields["tool_call_parser"])
        calls = calls and "tool-call-as-text" not in self.front.look()
        if body.get("stream"):
            wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            self.stream(self.events(kind, head, prompt, chunks, wants_usage, params, calls))
            return
        got = list(chunks)
        joined, last = "".join(chunk["text"] for chunk in got), got[-1]
        joined, made = self.tool_calls(joined) if calls else (joined, None)
        if made and last["finish"]["type"] == "stop":
            last["finish"] = {"type": "tool_calls", "matched": None}
        content = None if "null-content" in self.front.faults else joined or None
        message = {"role": "assistant", "content": content, "reasoning_content": None, "tool_calls": made}
        is_chat = kind == "chat.completion"
        said: dict[str, Any] = {"message": message} if is_chat else {"text": joined}
        if "top" in params:
            pieces = [piece for chunk in got for piece in chunk["pieces"]]
            shape = chat_logprobs if is_chat else completion_logprobs
            said["logprobs"] = shape(prompt, pieces, 0, params["top"])
        answer = {"id": last["rid"], "object": kind, **head, "choices": [choice(last, said)]}
        version = {"weight_version": self.fields["weight_version"]}
        self.reply(200, {**answer, "usage": self.usage(prompt, last), "metadata": version})

    def tool_calls(self, text: str) -> tuple[str, list[dict[str, Any]] | None]:
        """The text that is left, and the calls in sglang's shape: Kimi K2's ids carry name and index."""
        text, found = answers.tool_calls_in(text)
        kimi = self.fields["tool_call_parser"] == "kimi_k2"
        calls = [
            {
                "id": f"functions.{name}:{index}" if kimi else f"call_{uuid.uuid4().hex[:24]}",
                "index": index,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, index, arguments in found
        ]
        return text, calls or None

    def usage(self, prompt: list[str], last: dict[str, Any]) -> dict[str, Any]:
        made = last["done"] + (3 if "wrong-usage" in self.front.faults else 0)
        report = self.fields.get("enable_cache_report") and last["cached"]
        return {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + made,
            "completion_tokens": made,
            "prompt_tokens_details": {"cached_tokens": last["cached"]} if report else None,
            "reasoning_tokens": 0,
        }

    def events(
        self,
        kind: str,
        head: dict[str, Any],
        prompt: list[str],
        chunks: Iterator[dict[str, Any]],
        wants_usage: bool,
        params: dict[str, Any],
        calls: bool,
    ) -> Iterator[dict[str, Any]]:
        """The events of a stream: of a chat a role, texts and an end; of a completion texts, the last ends it."""
        is_chat, on = kind == "chat.completion", self.front.look()
        base: dict[str, Any] = {"id": "", "object": kind + ".chunk" if is_chat else kind, **head}
        last: dict[str, Any] = {}
        whole, parts = "", 0
        for last in chunks:
            base["id"] = last["rid"]
            if not is_chat:
                yield {**base, "choices": [choice(last, {"text": last["text"]})], "usage": None}
                continue
            going, whole = {**last, "finish": None}, whole + last["text"]
            silent = not last["text"] or calls or "null-content" in on
            texts = [] if silent else [{"content": last["text"]}]
            parts += len(texts)
            if texts and parts == 2 and "wrong-stream" in on:
                texts *= {"dropped": 0, "doubled": 2}[on["wrong-stream"]]
            said: dict[str, Any] = {}
            if "top" in params:
                begin = last["done"] - len(last["pieces"])
                said = {"logprobs": chat_logprobs(prompt, last["pieces"], begin, params["top"])}
            if last["done"] == len(last["ids"]):
                first = {"delta": {"reasoning_content": None, "role": "assistant", "content": ""}}
                yield {**base, "choices": [choice(going, first)]}
            for text in texts:
                yield {
                    **base,
                    "choices": [choice(going, {"delta": {"reasoning_content": None, **text}, **said})],
                }
        left, made = self.tool_calls(whole) if calls else ("", None)
        going = {**last, "finish": None}
        if left:
            yield {
                **base,
                "choices": [choice(going, {"delta": {"reasoning_content": None, "content": left}})],
            }
        for call in made or []:
            yield {
                **base,
                "choices": [choice(going, {"delta": {"reasoning_content": None, "tool_calls": [call]}})],
            }
        finish = {**(last["finish"] or {})}
        if made and finish["type"] == "stop":
            finish["type"] = "tool_calls"
        if "stream-wrong-finish" in on:
            finish["type"] = {"stop": "length"}.get(finish["type"], "stop")
        if is_chat:
            yield {
                **base,
                "choices": [choice({**last, "finish": finish}, {"delta": {"reasoning_content": None}})],
            }
        if wants_usage and "stream-no-usage" not in on:
            yield {**base, "choices": [], "usage": self.usage(prompt, last)}


def choice(chunk: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    finish = chunk["finish"] or {}
    end = {"finish_reason": finish.get("type"), "matched_stop": finish.get("matched")}
    return {"index": 0, "logprobs": None, **said, **end}


def ranked(prompt: list[str], pieces: list[str], begin: int, top: int) -> Iterator[list[tuple[float, str]]]:
    """For every token from position ``begin`` on: it and its runners-up, with their log-probabilities."""
    for position, piece in enumerate(pieces, begin):
        values = answers.logprobs_at(prompt, position, max(top, 1))
        yield [(value, answers.runner_up(piece, n) if n else piece) for n, value in enumerate(values)]


def chat_logprobs(prompt: list[str], pieces: list[str], begin: int, top: int) -> dict[str, Any]:
    """Log-probabilities in OpenAI's shape."""

    def entry(value: float, piece: str) -> dict[str, Any]:
        return {"token": piece, "bytes": list(piece.encode()), "logprob": value}

    return {
        "content": [
            {**entry(*best[0]), "top_logprobs": [entry(*each) for each in best[:top]]}
            for best in ranked(prompt, pieces, begin, top)
        ]
    }


def completion_logprobs(prompt: list[str], pieces: list[str], begin: int, top: int) -> dict[str, Any]:
    """Log-probabilities of a completion; sglang knows no offsets and says -1."""
    best = list(ranked(prompt, pieces, begin, top))
    return {
        "text_offset": [-1] * len(best),
        "token_logprobs": [each[0][0] for each in best],
        "tokens": [each[0][1] for each in best],
        "top_logprobs": [{piece: value for value, piece in each} for each in best],
    }


def logprob_meta(
    prompt: list[str], pieces: list[str], params: dict[str, Any], vocabulary: int
) -> dict[str, Any]:
    """The fields of ``meta_info`` with ``return_logprob``: (log-probability, id, text or null) for every token."""

    def entry(value: float | None, piece: str) -> tuple[float | None, int, str | None]:
        return value, token_id(piece, vocabulary), piece if params.get("texts") else None

    made = list(ranked(prompt, pieces, 0, params["top"]))
    start = params["start"] if params["start"] >= 0 else len(prompt)
    read = list(ranked(prompt, prompt[start:], start - len(prompt), params["top"]))
    meta: dict[str, Any] = {
        "input_token_logprobs": [entry(best[0][0] if n else None, best[0][1]) for n, best in enumerate(read)],
        "output_token_logprobs": [entry(*best[0]) for best in made],
        "output_token_logprobs_length": len(made),
    }
    if params["top"]:
        meta["input_top_logprobs"] = [
            [entry(*each) for each in best] if n else None for n, best in enumerate(read)
        ]
        meta["output_top_logprobs"] = [[entry(*each) for each in best] for best in made]
    return meta


# --- the main process: life and death ----------------------------------------------------------------------


class Launcher:
    """Starts the scheduler and the HTTP server, warms up, watches, and ends as sglang ends."""

    def __init__(self, server: Server, switches: Switches) -> None:
        self.server, self.switches = server, switches
        self.child = 0
        self.loading = True
        self.interrupted = threading.Event()
        self.exit_status = 0

    def kill_tree(self) -> NoReturn:
        """sglang ends itself, and everything it started, with SIGKILL."""
        for pid in (self.child, os.getpid()):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        raise SystemExit(1)

    def on_sigquit(self, *_: Any) -> None:
        if self.loading:
            log("Received sigquit from a child process. It usually means the child failed.")
        else:
            log("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        self.kill_tree()

    def on_sigterm(self, *_: Any) -> None:
        log("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        self.front.draining = True

    def on_sigint(self, *_: Any) -> None:
        self.interrupted.set()

    def run(self) -> int:
        """Serve until the end; the exit status, where the end is not a signal."""
        here, there = Pipe()
        signal.signal(signal.SIGQUIT, self.on_sigquit)
        self.child = os.fork()
        if not self.child:
            here.close()
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with contextlib.suppress(OSError):
                Path("/proc/self/comm").write_text("sglang::schedul")
            Scheduler(self.server, there).run()
        there.close()
        self.front = Frontend(self.server, here, self.child, self.switches)
        try:
            self.front.stats = here.recv()[1]
        except EOFError:
            return self.died_while_loading()
        if self.server.node:
            return self.follow()
        threading.Thread(target=self.front.receive_for_ever, daemon=True).start()
        signal.signal(signal.SIGTERM, self.on_sigterm)
        signal.signal(signal.SIGINT, self.on_sigint)
        self.loading = False
        return self.serve()

    def follow(self) -> int:
        """The life of a node above rank 0: a dummy health endpoint until the scheduler ends. SIGTERM ends it at once."""
        host, port = str(self.server.fields["host"]), int(self.server.fields["port"])
        name = f"{f'[{host}]' if ':' in host else host}:{port}"
        try:
            dummy = HttpServer((host, port), DummyHandler)
            threading.Thread(target=dummy.serve_forever, daemon=True).start()
        except OSError as error:
            reason = (
                "address already in use" if error.errno == errno.EADDRINUSE else str(error.strerror).lower()
            )
            log(f"[Errno {error.errno}] error while attempting to bind on address {(host, port)}: {reason}")
            log(f"Dummy health check server stopped at {name}")
        log(f"Dummy health check server started in background thread at {name}")
        status = os.waitpid(self.child, 0)[1]
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        log(f"Scheduler or DataParallelController {self.child} terminated with {code}")
        return 1

    def died_while_loading(self) -> int:
        status = os.waitpid(self.child, 0)[1]
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        message = (
            f"Rank 0 scheduler died during initialization (exit code: {code}). If exit code is -9 (SIGKILL), a "
            "common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."
        )
        write(2, self.server.runtime.traceback(Failure("RuntimeError", message, "died")))
        return 1

    def serve(self) -> int:
        host, port = str(self.server.fields["host"]), int(self.server.fields["port"])
        log(f"INFO:     Started server process [{os.getpid()}]")
        log("INFO:     Waiting for application startup.")
        log("INFO:     Application startup complete.")
        warmup = threading.Thread(target=self.warm_up, args=(host, port), daemon=True)
        try:
            http_server = HttpServer((host, port), Handler)
        except OSError as error:
            text = (
                "address already in use" if error.errno == errno.EADDRINUSE else str(error.strerror).lower()
            )
            where = (host, port)
            log(f"ERROR:    [Errno {error.errno}] error while attempting to bind on address {where}: {text}")
            log("INFO:     Waiting for application shutdown.")
            warmup.start()
            warmup.join()
            os.kill(self.child, signal.SIGKILL)
            return 3
        http_server.frontend = self.front
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        log(f"INFO:     Uvicorn running on http://{host}:{port} (Press CTRL+C to quit)")
        warmup.start()
        self.watch()
        log("INFO:     Shutting down")
        log("INFO:     Waiting for application shutdown.")
        log("INFO:     Application shutdown complete.")
        log(f"INFO:     Finished server process [{os.getpid()}]")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)
        return 0

    def watch(self) -> None:
        """Until interrupted: notice a dead scheduler, and end once drained."""
        drain_poll, polled = env("LAB_DRAIN_POLL", 1), time.monotonic()
        forced = os.environ.get("SGL_FORCE_SHUTDOWN", "").lower() in ("1", "true")
        while not self.interrupted.is_set():
            time.sleep(min(0.25, drain_poll))
            if self.front.leaving:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.child, signal.SIGKILL)
                os._exit(1)
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                log(
                    f"Subprocess scheduler_0 (pid={pid}) crashed with exit code {code}. "
                    "Triggering SIGQUIT for cleanup..."
                )
                self.child = 0
                self.on_sigquit()
            if time.monotonic() - polled < drain_poll:
                continue
            polled = time.monotonic()
            if self.front.draining:
                rids = list(self.front.inflight)
                log(
                    f"Gracefully exiting... Remaining number of requests {len(rids)}. "
                    f"Remaining requests remaining_rids={rids}."
                )
                if not rids or forced:
                    self.kill_tree()

    def request(self, host: str, port: int, method: str, path: str, body: Any = None) -> tuple[int, str]:
        host = "127.0.0.1" if host in ("0.0.0.0", "") else host
        connection = http.client.HTTPConnection(host, port, timeout=600)
        headers = {"content-type": "application/json"}
        if self.server.fields["api_key"]:
            headers["authorization"] = "Bearer " + self.server.fields["api_key"]
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def warm_up(self, host: str, port: int) -> None:
        """Send a request to ourselves (or to whoever has the port), then declare the server ready."""
        if not self.server.fields["skip_server_warmup"]:
            failure = None
            for attempt in range(int(env("LAB_WARMUP_TRIES", 120))):
                time.sleep(1 if attempt else 0.05)
                failure = self.attempt(host, port, "GET", "/model_info")
                if failure is None:
                    break
            prompt = {
                "text": "The capital city of France is",
                "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            }
            failure = failure or self.attempt(host, port, "POST", "/generate", prompt)
            if failure is not None:
                text = self.server.runtime.traceback(failure)
                log(f"Initialization failed. warmup error: {text}")
                self.kill_tree()
        self.front.ready = True
        log("The server is fired up and ready to roll!")
        self.front.send("ready")

    def attempt(self, host: str, port: int, method: str, path: str, body: Any = None) -> Failure | None:
        try:
            status, text = self.request(host, port, method, path, body)
        except (OSError, http.client.HTTPException) as error:
            return Failure("requests.exceptions.ConnectionError", repr(error), "warmup")
        message = f"res=<Response [{status}]>, res.text={text!r}"
        return None if status == 200 else Failure("AssertionError", message, "warmup")


def main(argv: list[str]) -> int:
    """Run the engine with sglang's launch arguments. Returns the exit status where the process ends by itself."""
    if argv == ["--lab-version"]:
        print(NOTICE)
        return 0
    try:
        switches = Switches()
    except ValueError as error:
        log(f"LAB_FAULTS: {error}")
        return 2
    gc.disable()  # until all is read: nothing of it is garbage, and much of it is looked through again and again
    runtime = Runtime.find(os.environ.get("PYTHONPATH", ""))
    if runtime is None:
        spec = "Error while finding module specification for 'sglang.launch_server'"
        write(2, f"{sys.executable}: {spec} (ModuleNotFoundError: No module named 'sglang')\n")
        return 1
    try:
        merger = runtime.text("srt/server_args_config_parser.py")
        fields = Arguments.of(runtime).fields(argv, merger)
        log(NOTICE)
        server = Server(runtime, fields)
    except Failure as failure:
        write(2, runtime.traceback(failure))
        return 1
    for warning in server.warnings:
        log(warning)
    dump = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    log(f"server_args=ServerArgs({dump})")
    gc.enable()
    return Launcher(server, switches).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
