"""Starts sglang servers as forks of one process that has imported sglang.

A start spends nearly all of its time on importing, and does so three times: launcher, scheduler and detokenizer import
sglang each. Here one process imports it once (this file, run as a program). Of each server that is asked for, the launcher
is a fork, which runs ``python -m sglang.launch_server`` from the beginning: plugins, arguments, everything. The processes
that it spawns are forks too, made before it begins: they know nothing of the launcher but what ``multiprocessing`` hands to
any process that it spawns, and load their plugins themselves.

Not as in a start of its own: modules are there before plugins are loaded, and what sglang reads from the environment while
it is imported is the same for all. So one server of the tests is started as a user does it, and those on a lab host.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

__all__ = ["ForkServer", "Forked"]

IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.dflash",
    "sglang.srt.speculative.dflash_worker",
)
"""Not ``sglang.launch_server``: that is run, and again in each spawned process, as the main module."""

SPAWNED = 2
"""Processes that a launcher spawns: scheduler and detokenizer. Any further one starts as always."""

LARGEST = 1 << 17
"""Bytes of a message: arguments and environment of a server."""


class Forked:
    """A running server: as much of :class:`subprocess.Popen` as the tests use. It leads a session of its own."""

    def __init__(self, connection: socket.socket) -> None:
        self.returncode: int | None = None
        self._connection = connection
        self.pid = int(_received(connection)["pid"])

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("sglang.launch_server", timeout)
        return code

    def _look(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            self.returncode = int(_received(self._connection)["code"])
            self._connection.close()
        return self.returncode


class ForkServer:
    """The process that has imported sglang, or is about to.

    Args:
        env: its environment, which holds for what is read while sglang is imported.
        log: what it writes itself; servers have logs of their own.
    """

    def __init__(self, env: dict[str, str], log: Path) -> None:
        self._log = log
        self._control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there, log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve())],
                env=env,
                stdin=there,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start(self, arguments: list[str], env: dict[str, str], log: Path) -> Forked:
        """``python -m sglang.launch_server`` with these arguments; waits until sglang is imported."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"arguments": arguments, "env": env, "log": str(log)}
        with there:
            socket.send_fds(self._control, [json.dumps(request).encode()], [there.fileno()])
        try:
            return Forked(here)
        except EOFError:
            raise RuntimeError(f"sglang was not imported: {self._log.read_text()[-6000:]}") from None

    def end(self) -> None:
        """End the process, after all servers have ended: it would not tell of them any more."""
        self._control.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it imports yet, for nobody
            self._process.wait()


def _received(connection: socket.socket) -> dict[str, Any]:
    message = connection.recv(LARGEST)
    if not message:
        raise EOFError
    return dict(json.loads(message))


# ---------------------------------------------------------------------------------------------------------------
# The program


def main() -> None:
    """Fork a server for each request on stdin. Whoever returns from ``serve`` is such a fork."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what is there is never looked at again, so the forks share it
    launch(serve(socket.socket(fileno=0)))


def serve(control: socket.socket) -> dict[str, Any]:
    """Returns in each fork, with its request. This process itself ends here, when nobody can ask any more."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            tell_of_the_ended(running)
        if control in ready:
            message, passed, _, _ = socket.recv_fds(control, LARGEST, 1)
            if not message:
                os._exit(0)
            connection = socket.socket(fileno=passed[0])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (connection, *running.values()):
                    other.close()
                for fd in (woken, wake, control.detach()):
                    os.close(fd)
                return dict(json.loads(message))
            running[pid] = connection
            connection.sendall(json.dumps({"pid": pid}).encode())


def tell_of_the_ended(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = {"code": os.waitstatus_to_exitcode(status)}
            # perhaps nobody asks any more
            with running.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
                connection.sendall(json.dumps(code).encode())


def launch(request: dict[str, Any]) -> None:
    """``python -m sglang.launch_server`` in this fork, with output, environment and ``sys.path`` of the request."""
    os.setsid()
    for flags, path, ends in (
        (os.O_RDONLY, os.devnull, (0,)),
        (os.O_WRONLY | os.O_CREAT | os.O_TRUNC, request["log"], (1, 2)),
    ):
        opened = os.open(path, flags, 0o644)
        for end in ends:
            if opened != end:
                os.dup2(opened, end)
        if opened not in ends:
            os.close(opened)
    gone = [str(Path(__file__).resolve().parent), *os.environ["PYTHONPATH"].split(os.pathsep)]
    os.environ.clear()
    os.environ.update(request["env"])
    kept = [entry for entry in sys.path if entry not in gone]
    sys.path[:] = [str(Path.cwd()), *os.environ["PYTHONPATH"].split(os.pathsep), *kept]
    sys.argv[:] = ["sglang.launch_server", *request["arguments"]]

    stems: list[tuple[int, socket.socket]] = []
    for _ in range(SPAWNED):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for other in (here, *(stem for _, stem in stems)):
                other.close()
            be_spawned(there)
            return
        there.close()
        stems.append((pid, here))
    execute = util.spawnv_passfds

    def let_a_stem(path: bytes, arguments: list[Any], passed: list[int]) -> int:
        """In place of a new process: a stem goes on with the pipes of that, and with the environment as it is now."""
        if not stems or "--multiprocessing-fork" not in arguments:
            return int(execute(path, arguments, passed))
        pid, stem = stems.pop(0)
        words = " ".join(map(str, arguments))
        with stem:
            asked = {"env": dict(os.environ), "words": words, "fds": passed}
            socket.send_fds(stem, [json.dumps(asked).encode()], passed)
        return pid

    util.spawnv_passfds = let_a_stem
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def be_spawned(asking: socket.socket) -> None:
    """Wait until the launcher spawns a process, and go on as that one does after ``python -c``.

    Where the launcher ends without having asked, this ends too.
    """
    message, received, _, _ = socket.recv_fds(asking, LARGEST, 16)
    if not message:
        os._exit(0)
    asking.close()
    asked = json.loads(message)
    # the numbers that they have in the launcher are pickled; first out of the way, one may be another's number
    away = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 500) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, wanted in zip(away, asked["fds"], strict=True):
        os.dup2(fd, wanted)
        os.close(fd)
    os.environ.clear()
    os.environ.update(asked["env"])
    handles = re.search(r"tracker_fd=(\d+), pipe_handle=(\d+)", asked["words"])
    assert handles is not None, asked["words"]
    sys.argv[:] = ["-c", "--multiprocessing-fork"]
    spawn.spawn_main(tracker_fd=int(handles[1]), pipe_handle=int(handles[2]))


if __name__ == "__main__":
    main()
