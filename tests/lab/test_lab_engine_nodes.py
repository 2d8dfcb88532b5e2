"""The lab engine over several nodes: how they meet, what the others serve, and how a dead one takes them with it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ddtree_ops.inventory.models import RuntimeSpec
from ddtree_ops.lab.engine.process import EngineProcess, free_port
from ddtree_ops.runtime import build

Start = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def tree() -> Path:
    return build(RuntimeSpec(python="cp312")).root


@pytest.fixture
def start(tree: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts node ``rank`` of two at a port of the test's own."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Tiny"], "vocab_size": 1000}))
    tensor = json.dumps({"w": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(tensor)) + tensor + b"\0\0")
    port = free_port()
    with ExitStack() as stack:

        def run(rank: int, *flags: str, nodes: int = 2, tp: int = 8, **env: str) -> EngineProcess:
            words = ["--model-path", str(tmp_path), "--served-model-name", "tiny", "--tp-size", str(tp)]
            words += [
                "--nnodes",
                str(nodes),
                "--node-rank",
                str(rank),
                "--dist-init-addr",
                f"127.0.0.1:{port}",
            ]
            environment = {"LAB_LOAD_SECONDS": "0", "LAB_DRAIN_POLL": "0.1", "LAB_DIST_TIMEOUT": "300", **env}
            return stack.enter_context(EngineProcess(tree, *words, *flags, env=environment))

        run.port = port  # type: ignore[attr-defined]
        yield run


def get(engine: EngineProcess, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=120)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


DUMMY = r"Dummy health check server started in background thread at 127\.0\.0\.1:\d+"


def test_each_node_prints_its_own_ranks_and_only_the_head_has_an_api(start: Start) -> None:
    worker = start(1)
    worker.wait_for("Init torch distributed begin")
    assert "Init torch distributed ends" not in worker.log, "it waits for the head"
    head = start(0).wait_ready()
    worker.wait_for(DUMMY)
    assert set(re.findall(r" (TP\d)\]", head.log)) == {"TP0", "TP1", "TP2", "TP3"}
    assert set(re.findall(r" (TP\d)\]", worker.log)) == {"TP4", "TP5", "TP6", "TP7"}
    assert "fired up" not in worker.log
    assert [get(worker, path) for path in ("/health", "/ping", "/health_generate", "/v1/models")] == [
        200,
        200,
        200,
        404,
    ]
    assert get(head, "/v1/models") == 200

    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == -signal.SIGTERM, "a worker drains nothing"
    assert head.wait() == -signal.SIGKILL
    assert re.search(
        r"TP3\] Scheduler hit an exception: [\s\S]+in recv_requests\n[\s\S]+in broadcast_pyobj\n[\s\S]+"
        r"RuntimeError: \[\.\./third_party/gloo/gloo/transport/tcp/pair\.cc:534\] Connection closed by peer \[127\.0\.0\.1\]:\d+",
        head.log,
    )


def test_the_death_of_the_head_ends_the_workers(start: Start) -> None:
    head, worker = start(0), start(1)
    head.wait_ready()
    worker.wait_for(DUMMY)
    head.process.send_signal(signal.SIGTERM)
    assert head.wait() == -signal.SIGKILL
    assert worker.wait() == -signal.SIGKILL
    assert "TP4] Scheduler hit an exception" in worker.log
    assert "Connection closed by peer" in worker.log
    assert "Received sigquit from a child process" in worker.log


def test_a_worker_that_crashes_while_loading_ends_the_head(start: Start) -> None:
    head = start(0)
    worker = start(1, LAB_CRASH_AFTER_S="0.1")
    assert worker.wait() == -signal.SIGKILL
    assert "TP7] Scheduler hit an exception" in worker.log
    assert "an illegal memory access" in worker.log
    assert head.wait() == -signal.SIGKILL
    assert "Connection closed by peer" in head.log


def test_nobody_to_meet(start: Start) -> None:
    worker = start(1, LAB_DIST_TIMEOUT="0.3")
    worker.wait()
    assert (
        "DistNetworkError: The client socket has timed out after 300ms while trying to connect to (127.0.0.1, "
        in worker.log
    )
    head = start(0, "--dist-timeout", "1")
    head.wait()
    assert "DistStoreError: Timed out after 2 seconds waiting for clients. 4/8 clients joined." in head.log


def test_the_meeting_port_is_taken(start: Start) -> None:
    with socket.create_server(("127.0.0.1", start.port)):  # type: ignore[attr-defined]
        head = start(0)
        head.wait()
    assert "failed to listen on any local network address" in head.log
    assert "EADDRINUSE" in head.log


def test_ranks_that_cannot_be_spread(start: Start) -> None:
    engine = start(0, tp=8, nodes=3)
    assert engine.wait() == 1
    assert "AssertionError: tp_size must be divisible by number of nodes" in engine.log
