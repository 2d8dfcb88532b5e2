"""The lab engine as a process of this machine, without a lab host: for tests of whatever talks to a server."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from ddtree_ops.errors import LabError
from ddtree_ops.lab.engine import ENGINE_PATH

__all__ = ["EngineProcess", "free_port"]


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


class EngineProcess:
    """A running lab engine; used as a context manager, it is killed at the end.

    :param tree: directory on ``PYTHONPATH`` that holds ``sglang/``; None for none.
    :param arguments: sglang's flags; ``--host`` and ``--port`` are added unless given.
    :param env: ``LAB_*`` and other variables of the engine; nothing else but ``PATH`` is passed on.
    """

    def __init__(self, tree: Path | None, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        if "--port" in arguments:
            self.port = int(arguments[arguments.index("--port") + 1])
        else:
            arguments = (*arguments, "--host", "127.0.0.1", "--port", str(self.port))
        variables = {"PATH": os.environ.get("PATH", os.defpath), **(env or {})}
        if tree is not None:
            variables["PYTHONPATH"] = str(tree)
        self._folder = tempfile.TemporaryDirectory(prefix="lab-engine-")
        self._log = Path(self._folder.name, "stderr")
        self._access = Path(self._folder.name, "stdout")
        with self._log.open("wb") as log, self._access.open("wb") as access:
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(ENGINE_PATH), *arguments],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=access,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Base URL, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What it has written to standard error so far."""
        return self._log.read_bytes().decode("utf-8", "replace")

    @property
    def access_log(self) -> str:
        """What it has written to standard output so far."""
        return self._access.read_bytes().decode("utf-8", "replace")

    @property
    def scheduler_pid(self) -> int | None:
        """The scheduler's process id; None before it is there."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def wait_for(self, pattern: str, *, count: int = 1, timeout: float = 120.0) -> str:
        """Wait until the log holds ``count`` matches; the last of them.

        :param timeout: seconds.
        :raises LabError: it ended or the time is over before; holds the end of the log.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            found = re.findall(pattern, self.log, re.M)
            if len(found) >= count:
                return str(found[count - 1])
            if ended or time.monotonic() > deadline:
                why = f"ended with {self.process.returncode}" if ended else f"{timeout:.0f} s are over"
                raise LabError(f"no {pattern!r} in the log of the lab engine: {why}\n{self.log[-2000:]}")
            time.sleep(0.02)

    def wait_ready(self, timeout: float = 120.0) -> EngineProcess:
        """Wait for ``The server is fired up``; the engine itself."""
        self.wait_for("The server is fired up and ready to roll!", timeout=timeout)
        return self

    def wait(self, timeout: float = 120.0) -> int:
        """Wait for the end; the exit status, negative for a signal."""
        return self.process.wait(timeout)

    def close(self) -> None:
        """Kill the engine and its scheduler, and remove the logs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._folder.cleanup()
