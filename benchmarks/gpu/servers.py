"""A real sglang server of a run: started, asked over HTTP, ended. Standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence import captured, decode_lines, mask_machine, running_sizes, tail

__all__ = ["Answer", "Server", "Site", "errors_of"]

REQUEST_S = 75
"""Longest wait for an answer: the first request of a server may compile kernels."""


@dataclass(frozen=True)
class Site:
    """Folders of a run and how servers are started there.

    Attributes:
        device: ``cuda`` or ``cpu``.
        plugin: holds ``ddtree_sglang`` and its entry point.
        stubs: what a CPU needs before everything else, or None.
        packages, patched: sglang as released with all that it needs; the patched sglang alone, put before it.
        models: ``tiny_models.py`` wrote it.
        names: what is replaced in recorded text, by :func:`evidence.mask_machine`.
    """

    device: str
    plugin: Path
    stubs: Path | None
    packages: Path
    patched: Path
    models: Path
    caches: Path
    logs: Path
    python: str
    block: int
    names: dict[str, str]

    def environment(self, patched: bool, more: dict[str, str]) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SGLANG_", "DDTREE_")) and key != "PYTHONDONTWRITEBYTECODE"
        }
        trees = [self.plugin, self.stubs, self.patched if patched else None, self.packages]
        own = {
            "PYTHONPATH": os.pathsep.join(str(tree) for tree in trees if tree),
            "PYTHONUNBUFFERED": "1",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": "4",
            "NO_PROXY": "127.0.0.1",
        }
        if self.device == "cpu":
            own |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        else:
            own |= {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}
            own |= {"TRITON_CACHE_DIR": str(self.caches / "triton")}
        return kept | own | more


@dataclass
class Answer:
    """What ``/generate`` said: tokens and ``meta_info``, or the error."""

    tokens: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    status: int = 0


@dataclass
class Server:
    """One server.

    Attributes:
        algorithm: ``none``, ``DFLASH`` or ``DDTREE``.
        pair: target and drafter of the models folder.
        schedule: ``fixed`` or ``adaptive``, of the tree's budget.
        graphs: batch sizes of the CUDA graphs.
        start: ``""`` before, then ``starting``, ``ready``, ``exit N`` or ``not ready in N s``.
    """

    name: str
    port: int
    algorithm: str = "none"
    pair: str = "lower"
    budget: int = 0
    topk: int = 8
    schedule: str = "fixed"
    dtype: str = "bfloat16"
    patched: bool = True
    graphs: Sequence[int] = (1, 2, 4)
    requests: int = 4
    tokens: int = 20480
    context: int | None = None
    static: float = 0.5
    dummy: bool = False
    env: dict[str, str] = field(default_factory=dict)
    start: str = ""
    ready_s: float | None = None
    command: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    log: Path = Path()
    began: float = 0.0
    hung: bool = False
    """A request was not answered in time: the server counts as dead, and nothing is asked of it any more."""

    def arguments(self, site: Site) -> list[str]:
        """The command line."""
        cuda = site.device == "cuda"
        flags: list[str] = [
            *(site.python, "-m", "sglang.launch_server", "--model-path", str(site.models / self.pair)),
            *("--served-model-name", "tiny", "--skip-tokenizer-init", "--dtype", self.dtype),
            *("--attention-backend", "triton", "--grammar-backend", "none", "--skip-server-warmup"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--random-seed", "1"),
            # left to itself, sglang draws it near the port: servers that start together could draw the same
            *("--nccl-port", str(self.port - 10000)),
            *("--max-total-tokens", str(self.tokens), "--max-running-requests", str(self.requests)),
            # a drafter that is always right leaves few steps to log
            *("--decode-log-interval", "4" if self.pair == "top" else "10", "--sleep-on-idle"),
        ]
        if cuda:
            flags += ["--sampling-backend", "pytorch", "--disable-piecewise-cuda-graph"]
            flags += ["--mem-fraction-static", str(self.static)]
            flags += ["--cuda-graph-bs", *map(str, self.graphs)]
        else:
            flags += ["--device", "cpu", "--disable-cuda-graph", "--disable-overlap-schedule"]
        if self.context:
            flags += ["--context-length", str(self.context)]
        if self.dummy:
            flags += ["--load-format", "dummy"]
        if self.algorithm != "none":
            flags += ["--speculative-algorithm", self.algorithm]
            flags += ["--speculative-draft-model-path", str(site.models / f"{self.pair}-draft")]
            flags += ["--speculative-dflash-block-size", str(site.block)]
        if self.algorithm == "DDTREE":
            flags += ["--speculative-ddtree-budget", str(self.budget)]
            flags += ["--speculative-ddtree-topk-cap", str(self.topk)]
            if self.schedule != "fixed":
                flags += ["--speculative-ddtree-budget-schedule", self.schedule]
        return flags

    def launch(self, site: Site) -> None:
        """Start it; :meth:`poll` says how it goes."""
        self.command = self.arguments(site)
        self.log = site.logs / f"{self.name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=site.environment(self.patched, self.env),
                cwd=site.caches,
                start_new_session=True,
            )
        self.start, self.began, self.ready_s, self.hung = "starting", time.monotonic(), None, False

    def poll(self, limit_s: float) -> str:
        """Look once: the state as in ``start``. A server that is not ready ``limit_s`` after its launch is given up."""
        if self.start != "starting":
            return self.start
        assert self.process is not None
        code = self.process.poll()
        waited = time.monotonic() - self.began
        if code is not None:
            self.start, self.ready_s = f"exit {code}", None
        elif self._listens():
            self.start, self.ready_s = "ready", round(waited, 1)
        elif waited > limit_s:
            self.start = f"not ready in {limit_s:.0f} s"
            self.end()
        return self.start

    def _listens(self) -> bool:
        try:
            self.get("/v1/models", 3)
        except (OSError, http.client.HTTPException, ValueError):
            return False
        return True

    @property
    def alive(self) -> bool:
        """Ready, not ended, and every request was answered in time."""
        running = self.process is not None and self.process.poll() is None
        return self.start == "ready" and running and not self.hung

    @property
    def exit(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def text(self, offset: int = 0) -> str:
        return tail(self.log, offset)

    def mark(self) -> int:
        """Size of the log so far, for :meth:`text`."""
        return self.log.stat().st_size if self.log.is_file() else 0

    def get(self, path: str, timeout: float = 60) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout) as reply:
            return json.loads(reply.read() or b"{}")

    def post(self, path: str, body: Any = None, timeout: float = REQUEST_S) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return bytes(reply.read())

    def ask(
        self, ids: Sequence[int], tokens: int, body: dict[str, Any] | None = None, **sampling: Any
    ) -> Answer:
        """One request, greedy unless ``sampling`` says otherwise. Errors come back in the answer."""
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        if self.hung:
            return Answer(error="not asked: the server did not answer before")
        whole = {"input_ids": list(ids), "sampling_params": parameters} | (body or {})
        try:
            reply = json.loads(self.post("/generate", whole))
        except urllib.error.HTTPError as error:
            return Answer(error=error.read().decode(errors="replace")[:500], status=error.code)
        except TimeoutError as error:
            self.hung = True
            return Answer(error=repr(error))
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Answer(error=repr(error)[:300])
        return Answer(list(reply.get("output_ids") or []), dict(reply.get("meta_info") or {}), "", 200)

    def ask_all(self, requests: Sequence[tuple[Sequence[int], int]], concurrency: int) -> list[Answer]:
        """Greedy requests, ``concurrency`` at a time, in order."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda request: self.ask(*request), requests))

    def hang_up(self, ids: Sequence[int], tokens: int, chunks: int) -> str:
        """Stream a request and close the connection after ``chunks`` pieces. Returns what happened."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S)
        body = {
            "input_ids": list(ids),
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        seen = 0
        try:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                return f"status {reply.status}"
            while seen < chunks:
                line = reply.readline()
                if not line:
                    return "finished before"
                seen += line.startswith(b"data:")
        except (OSError, http.client.HTTPException) as error:
            return f"error {error!r}"[:200]
        finally:
            connection.close()
        return "closed"

    def flush(self, limit_s: float = 40) -> str:
        """Wait until nothing runs and drop the prefix cache. Returns ``flushed`` or what the server said."""
        end, said = time.monotonic() + limit_s, "not asked"
        while time.monotonic() < end:
            try:
                self.post("/flush_cache", timeout=20)
            except urllib.error.HTTPError as error:
                said = error.read().decode(errors="replace").strip()[:200]
            except (OSError, http.client.HTTPException) as error:
                said = repr(error)[:200]
                if not self.alive:
                    return said
            else:
                return "flushed"
            time.sleep(0.5)
        return said

    def used_tokens(self) -> dict[str, int]:
        """Tokens of KV in use and in all, running and waiting requests, as ``/v1/loads`` and ``/server_info`` say."""
        load = self.get("/v1/loads?include=core")["loads"][0]
        state = (self.get("/server_info").get("internal_states") or [{}])[0]
        names = ("num_used_tokens", "max_total_num_tokens", "num_running_reqs", "num_waiting_reqs")
        seen = {name: int(load[name]) for name in names}
        return seen | {"token_capacity": int(state.get("memory_usage", {}).get("token_capacity", -1))}

    def settled(self, limit_s: float = 40) -> dict[str, int]:
        """:meth:`used_tokens` once nothing runs or waits and sglang has checked its pools, the prefix cache not dropped.

        What the cache holds does not count as in use, so a slot in use now is one that nobody gave back. Dropping the
        cache would hide it: that makes all slots free.
        """
        end = time.monotonic() + limit_s
        while True:
            seen = self.used_tokens()
            if not seen["num_running_reqs"] and not seen["num_waiting_reqs"]:
                break
            if time.monotonic() > end:
                return seen
            time.sleep(0.3)
        time.sleep(1.5)
        return self.used_tokens()

    def end(self) -> None:
        """Kill it and what it started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)

    def record(self, site: Site) -> dict[str, Any]:
        """What the JSON says of it."""
        log = self.text()
        lines = decode_lines(log)
        return {
            "algorithm": self.algorithm,
            "pair": self.pair,
            "budget": self.budget or None,
            "topk_cap": self.topk if self.algorithm == "DDTREE" else None,
            "schedule": self.schedule if self.algorithm == "DDTREE" else None,
            "dtype": self.dtype,
            "tree": "patched" if self.patched else "unpatched",
            "environment": self.env,
            "start": self.start,
            "hung": self.hung,
            "ready_s": self.ready_s,
            "graphs_captured": captured(log),
            "decode_lines_by_batch": running_sizes(log),
            "decode_lines": len(lines),
            "log": f"{self.name}.log",
            "command": mask_machine(" ".join(self.command), site.names),
        }


def errors_of(log: str) -> list[str]:
    """Lines of a log that name an error of the server, known harmless ones of a start left out."""
    harmless = (
        "Ignore import error",
        "Can not initialize OpenAIServingResponses",
        "No module named 'openai_harmony'",
        # what a client that hangs up leaves behind
        "is disconnected from the client side",
    )
    found = []
    for line in log.splitlines():
        if any(text in line for text in harmless):
            continue
        if "Error: " in line or "leak" in line.lower() or "hit an exception" in line:
            found.append(line.strip()[:400])
    return found
