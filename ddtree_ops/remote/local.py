"""The agent as a child process of this one: for tests and for the machine at hand, without SSH."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile

from ddtree_ops.remote.protocol import PIECE, agent_source, bootstrap
from ddtree_ops.remote.session import Session

__all__ = ["PipeTransport", "connect_local"]


class PipeTransport:
    """Pipes to an agent that is a child process."""

    def __init__(self, python: str = sys.executable) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            bootstrap(python),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid

    def send(self, data: bytes) -> None:
        if self._stdin.closed:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        view = memoryview(data)
        while view:
            view = view[os.write(self._stdin.fileno(), view) :]

    def recv(self) -> bytes:
        return os.read(self._stdout.fileno(), PIECE)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.abort()

    def abort(self) -> None:
        self._process.kill()
        self._process.wait()

    def release(self) -> None:
        self._stdout.close()
        self._stderr.close()

    def diagnostics(self) -> str:
        if self._stderr.closed:
            return ""
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), 4000, max(0, size - 4000)).decode("utf-8", "replace").strip()

    def status(self) -> int | None:
        return self._process.poll()


def connect_local(name: str = "local") -> Session:
    """A session with an agent on this machine, as the current user, over pipes."""
    return Session(PipeTransport(), host=name, start=agent_source())
