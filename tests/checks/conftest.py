"""A real engine process on this machine (the lab engine), and services on lab hosts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.checks.engine import EngineClient
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Speculative, Target
from ddtree_ops.lab import furnish
from ddtree_ops.remote import connect_local
from ddtree_ops.remote.session import Session
from ddtree_ops.runtime import build

ENGINE = Path(furnish.__file__).parent / "engine" / "lab_engine.py"

DDTREE = Speculative(budget=32)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``target`` and ``drafter`` as the lab hosts have them."""
    root = tmp_path_factory.mktemp("models")
    for name, files in (("target", furnish.model_files()), ("drafter", furnish.drafter_files())):
        (root / name).mkdir()
        for file, data in files.items():
            (root / name / file).write_bytes(data)
    return root


@pytest.fixture(scope="session")
def trees() -> dict[str, Path]:
    """The runtime with and without the patch, as trees."""
    return {"patched": build(RuntimeSpec()).root, "stock": build(RuntimeSpec(patches=[])).root}


@pytest.fixture(scope="session")
def local_session() -> Iterator[Session]:
    with connect_local() as session:
        yield session


@dataclass
class Engine:
    """A running lab engine and the target that describes it."""

    target: Target
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def lines(self) -> list[str]:
        return self.log.read_text("utf-8", "replace").splitlines()


@pytest.fixture
def start_engine(
    tmp_path: Path, models: Path, trees: dict[str, Path], local_session: Session
) -> Iterator[Callable[..., Engine]]:
    """Start lab engines and wait for them: ``start_engine(tree="patched", environment={...}, flags=[...])``."""
    with ExitStack() as stack:

        def start(
            *,
            tree: str = "patched",
            environment: dict[str, str] | None = None,
            flags: tuple[str, ...] = (),
            speculative: Speculative | None = DDTREE,
        ) -> Engine:
            port = free_port()
            service = Service(
                unit="engine.service",
                runtime="r",
                venv="/nowhere",
                model=str(models / "target"),
                drafter=str(models / "drafter"),
                port=port,
                tensor_parallel=8,
                speculative=speculative,
            )
            target = Target(host=Host(name="local"), service=service, runtime=RuntimeSpec())
            argv = [sys.executable, "-I", "-u", str(ENGINE), "--model-path", service.model]
            argv += ["--host", "127.0.0.1", "--port", str(port), "--tp-size", "8", *flags]
            if speculative is not None:
                argv += ["--speculative-algorithm", speculative.algorithm]
                argv += ["--speculative-draft-model-path", str(models / "drafter")]
                argv += ["--speculative-num-draft-tokens", str(speculative.block_size)]
                if speculative.budget is not None:
                    argv += ["--speculative-ddtree-budget", str(speculative.budget)]
                argv += ["--attention-backend", "triton"]
            shared = {"PYTHONPATH": str(trees[tree]), "LAB_LOAD_SECONDS": "0.2"}
            log = tmp_path / f"engine-{port}.log"
            with log.open("wb") as out:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**os.environ, **shared, **(environment or {})},
                    start_new_session=True,
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            engine = Engine(target, process, log)
            with EngineClient(local_session, target) as client:
                end = time.monotonic() + 300
                while client.health() != 200:
                    assert process.poll() is None, engine.lines[-20:]
                    assert time.monotonic() < end, engine.lines[-20:]
                    time.sleep(0.1)
            return engine

        yield start


@contextmanager
def serve(answers: dict[str, tuple[int, bytes]]) -> Iterator[Target]:
    """A real HTTP server with recorded answers by path, and the requests it saw."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            status, body = answers.get(self.path, (404, b'{"detail":"Not Found"}'))
            if status == 0:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        service = Service(unit="x.service", runtime="r", venv="/v", model="/m", port=server.server_address[1])
        yield Target(host=Host(name="recorded"), service=service, runtime=RuntimeSpec())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def recorded() -> Callable[[dict[str, tuple[int, bytes]]], Any]:
    return serve
