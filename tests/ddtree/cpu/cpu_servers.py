"""Real sglang servers on a CPU for the tests: started ahead, two at a time, while other tests run.

A start spends nearly all of its time on importing: launcher, scheduler and detokenizer import sglang each. So one server
is started as a user does it, and the others are forks of a process that has imported sglang (``fork_server.py``). They are
started as soon as the tests are collected, and wait for their tests without taking a core (``--sleep-on-idle``).
Byte code is written wherever the environment forbids it, or each start would compile sglang again.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fork_server import Forked, ForkServer

__all__ = [
    "AT_ONCE",
    "BLOCK",
    "BUDGET",
    "CONTEXT",
    "HTTP",
    "KINDS",
    "TOPK",
    "Fleet",
    "Kind",
    "Models",
    "Server",
]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BLOCK, BUDGET, TOPK, CONTEXT = 4, 40, 8, 256
AT_ONCE = int(os.environ.get("DDTREE_TEST_SERVERS", "2"))
"""Servers that start at the same time: one a core. Each takes 0.6 GB of its own, and 0.9 GB that they share."""
START_S = float(os.environ.get("DDTREE_TEST_START_S", "600"))
"""Seconds until a start counts as failed."""
HTTP = httpx.Client(timeout=300, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
"""One for all requests: to make one reads the certificates of the world, which takes longer than an answer. Each request
has a connection of its own: a server closes one that waits, now and then just when it is used again."""


@dataclass(frozen=True)
class Kind:
    """A server under test.

    Attributes:
        pair: target and drafter of ``make_models.py``.
        algorithm: speculative algorithm, or None.
        accept: least and greatest mean accept length that the drafter allows.
        retract: whether the scheduler takes a running request back every few steps, as where KV slots run out. sglang
            reads that while it is imported, so such a server is a start of its own.
    """

    pair: str
    algorithm: str | None
    accept: tuple[float, float] = (1.0, 1.0)
    retract: bool = False


KINDS = {
    # 4 candidates a depth of which 3 are said: depths 1 and 2 whole (20 nodes), and 20 of 64 at depth 3
    "ddtree-lower": Kind("lower", "DDTREE", (3.0, 4.0), retract=True),
    "plain": Kind("lower", None),
    # a chain whose first token is never said
    "dflash-lower": Kind("lower", "DFLASH", (1.0, 1.0)),
    "ddtree-top": Kind("top", "DDTREE", (4.0, 4.0)),
    "ddtree-nothing": Kind("nothing", "DDTREE", (1.0, 1.0)),
}

RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
"""sglang's own test of retraction: every fifth forward pass takes a request back, if several run."""

BREAKER = """\
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry
    kept = HookRegistry._apply_target.__func__
    def refuse(cls, target, hooks):
        if target.endswith("new_tokens_required_next_decode"):
            raise RuntimeError("cannot be hooked")
        return kept(cls, target, hooks)
    HookRegistry._apply_target = classmethod(refuse)
"""


@dataclass
class Server:
    """A running server and what it writes."""

    url: str
    process: subprocess.Popen[bytes] | Forked
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def generate(self, ids: list[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        """One greedy request: the whole answer of ``/generate``."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        reply = HTTP.post(f"{self.url}/generate", json={"input_ids": ids, "sampling_params": params})
        assert reply.status_code == 200, (reply.status_code, reply.text, self.text()[-4000:])
        return dict(reply.json())

    def answers(self, requests: list[tuple[list[int], int]], concurrency: int = 4) -> list[dict[str, Any]]:
        """Whole answers of requests, ``concurrency`` at a time."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda request: self.generate(*request), requests))

    def outputs(self, requests: list[tuple[list[int], int]], concurrency: int = 4) -> list[list[int]]:
        """Output tokens of requests."""
        return [answer["output_ids"] for answer in self.answers(requests, concurrency)]

    def get(self, path: str) -> dict[str, Any]:
        reply = HTTP.get(f"{self.url}{path}")
        assert reply.status_code == 200, (path, reply.status_code, reply.text)
        return dict(reply.json())

    def idle(self) -> None:
        """Wait until nothing runs, drop the cache, and see that not a slot of KV is missing.

        The scheduler counts its slots at the end of the round in which it dropped the cache, before it takes the next
        request, and dies if one is missing.
        """
        deadline = time.monotonic() + 120
        while True:
            reply = HTTP.post(f"{self.url}/flush_cache")
            if reply.status_code == 200:
                break
            assert time.monotonic() < deadline, reply.text
            time.sleep(0.2)
        assert len(self.generate([5, 6, 7], 4)["output_ids"]) == 4
        assert self.process.poll() is None, self.text()[-4000:]
        log = self.text()
        assert "leak" not in log, log[-4000:]
        assert "Traceback" not in log, log[-4000:]


class Models:
    """The tiny pairs of ``make_models.py``, made beside whatever else happens.

    Args:
        folder: where they will be; it does not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._log = folder, folder.with_suffix(".log")
        with self._log.open("wb") as sink:
            self._making = subprocess.Popen(
                [sys.executable, str(HERE / "make_models.py"), str(folder)],
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    @property
    def folder(self) -> Path:
        """The folder, once all are there."""
        assert self._making.wait() == 0, self._log.read_text(errors="replace")
        return self._folder


class Fleet:
    """All servers of a test run. Use as a context manager: leaving it ends every server.

    Args:
        folder: an empty folder for logs and the plugin's entry point.
        models: what the servers serve.
    """

    def __init__(self, folder: Path, models: Models) -> None:
        self.folder = folder
        self.env = environment(plugin_site(folder / "site"))
        self._models = models
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._lock = threading.Lock()
        self._ports = iter(range(31350, 31450))
        self._running: list[subprocess.Popen[bytes] | Forked] = []
        self._ended = False
        self._forks = ForkServer(self.env, folder / "fork_server.log")
        self._jobs: dict[str, Future[Any]] = {}

    def __enter__(self) -> Fleet:
        for name, kind in KINDS.items():
            self._jobs[name] = self._pool.submit(self._start, name, kind)
        self._jobs["refused"] = self._pool.submit(self._refuse)
        self._jobs["swallowed"] = self._pool.submit(self._swallow)
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended = True
        for job in self._jobs.values():
            job.cancel()
        for process in list(self._running):
            stop(process)
        self._pool.shutdown()
        self._forks.end()

    @property
    def models(self) -> Path:
        """Folder of the models."""
        return self._models.folder

    def server(self, name: str) -> Server:
        """The server of this kind, once it answers. One that did not start fails every test that asks."""
        found = self._jobs[name].result()
        assert isinstance(found, Server)
        return found

    def said(self, name: str) -> str:
        """All that a server said which does not start: ``refused`` (its arguments) or ``swallowed`` (a hook)."""
        return str(self._jobs[name].result())

    def stop(self, name: str) -> None:
        """End a server that no further test needs."""
        process = self.server(name).process
        self._running.remove(process)
        stop(process)

    def command(self, pair: str, *more: str) -> list[str]:
        """Arguments of a server on a free port."""
        return [
            *("--model-path", str(self.models / pair)),
            *("--served-model-name", "tiny", "--dtype", "float32", "--device", "cpu", "--sleep-on-idle"),
            *("--attention-backend", "triton", "--disable-cuda-graph", "--grammar-backend", "none"),
            *("--disable-overlap-schedule", "--host", "127.0.0.1", "--port", str(self._free_port())),
            *("--max-total-tokens", "4096", "--max-running-requests", "4", "--random-seed", "1"),
            *("--decode-log-interval", "10", "--skip-server-warmup", "--enable-metrics"),
            *more,
        ]

    def speculative(self, pair: str, algorithm: str | None, budget: int = BUDGET) -> list[str]:
        """Flags of the algorithm, with the pair's drafter."""
        if algorithm is None:
            return []
        flags = ["--speculative-algorithm", algorithm]
        flags += ["--speculative-draft-model-path", str(self.models / f"{pair}-draft")]
        if algorithm == "DDTREE":
            flags += ["--speculative-ddtree-budget", str(budget), "--speculative-ddtree-topk-cap", str(TOPK)]
        return flags

    def _free_port(self) -> int:
        """A port below 55536: sglang adds 10000 for gRPC and wants that to be a port too."""
        with self._lock:
            for port in self._ports:
                with socket.socket() as probe:
                    try:
                        probe.bind(("127.0.0.1", port))
                    except OSError:
                        continue
                    return port
        raise RuntimeError("no free port from 31350 to 31449")

    def _launch(
        self, arguments: list[str], log: Path, more: dict[str, str], alone: bool = False
    ) -> subprocess.Popen[bytes] | Forked:
        """Start a server with ``more`` in its environment; ``alone``: as a user does it, not as a fork."""
        process: subprocess.Popen[bytes] | Forked
        env = self.env | more
        if alone:
            with log.open("wb") as sink:
                process = subprocess.Popen(
                    [sys.executable, "-m", "sglang.launch_server", *arguments],
                    env=env,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        else:
            process = self._forks.start(arguments, env, log)
        with self._lock:
            self._running.append(process)
            ended = self._ended
        if ended:
            stop(process)
            raise RuntimeError("the tests are over")
        return process

    def _start(self, name: str, kind: Kind) -> Server:
        arguments = self.command(kind.pair, *self.speculative(kind.pair, kind.algorithm))
        url = f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}"
        log = self.folder / f"{name}.log"
        process = self._launch(arguments, log, RETRACT if kind.retract else {}, alone=kind.retract)
        begun = time.monotonic()
        while True:
            assert process.poll() is None, log.read_text(errors="replace")[-6000:]
            waited = time.monotonic() - begun
            if waited > START_S:
                stop(process)
                raise AssertionError(
                    f"not ready after {waited:.0f} s: {log.read_text(errors='replace')[-6000:]}"
                )
            try:
                if HTTP.get(f"{url}/health", timeout=30).status_code == 200:
                    return Server(url, process, log)
            except httpx.TransportError:
                pass  # nothing listens yet
            time.sleep(0.3)

    def _died(self, name: str, arguments: list[str], more: dict[str, str]) -> str:
        """Run a server that is to refuse: what it said. One that goes on fails the tests that ask."""
        log = self.folder / f"{name}.log"
        process = self._launch(arguments, log, more)
        try:
            process.wait(START_S)
        finally:
            stop(process)
        said = log.read_text(errors="replace")
        assert process.returncode != 0, said[-4000:]
        return said

    def _refuse(self) -> str:
        flags = self.speculative("lower", "DDTREE", budget=2)
        return self._died("refused", self.command("lower", *flags, "--page-size", "16"), {})

    def _swallow(self) -> str:
        """Another plugin breaks a hook's target, which sglang only logs."""
        site = self.folder / "breaker"
        entry_point(site, "breaker", "aaa = breaker:register")
        (site / "breaker.py").write_text(BREAKER)
        more = {"PYTHONPATH": os.pathsep.join([str(site), self.env["PYTHONPATH"]])}
        return self._died("swallowed", self.command("lower", *self.speculative("lower", "DDTREE")), more)


def plugin_site(folder: Path) -> Path:
    """A folder for PYTHONPATH: the package, and the entry point by which sglang finds it."""
    entry_point(folder, "ddtree_sglang", "ddtree = ddtree_sglang.plugin:register")
    (folder / "ddtree_sglang").symlink_to(ROOT / "ddtree_sglang")
    return folder


def entry_point(folder: Path, name: str, line: str) -> None:
    """Write what an installation of the plugin ``name`` would have left."""
    info = folder / f"{name}-0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{line}\n")


def environment(site: Path) -> dict[str, str]:
    """Variables of a server: nothing of the developer's own sglang settings, byte code allowed, one thread."""
    foreign = ("SGLANG_", "DDTREE_", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "TRITON_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return env | {
        "PYTHONPATH": os.pathsep.join([str(site), str(HERE / "stubs")]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models()),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def _other_models() -> list[str]:
    """Modules of models that no test serves: a scheduler would import them all."""
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None, "sglang is not installed: make test-real"
    modules = (Path(found.origin).parent / "srt" / "models").glob("*.py")
    return sorted(path.stem for path in modules if path.stem not in ("qwen3", "dflash"))


def stop(process: subprocess.Popen[bytes] | Forked) -> None:
    """End a server and the processes that it started: its whole session."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)
        os.killpg(process.pid, signal.SIGKILL)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all have ended
    process.wait(20)
