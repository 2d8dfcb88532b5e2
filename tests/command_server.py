"""Runs ``python -m ddtree_ops ...`` again and again, and imports it once: each run is a fork of this process.

The argument is the number of an inherited Unix socket (SOCK_SEQPACKET). A message is a JSON object with ``argv``,
``env``, ``cwd`` and ``code`` (a program to run in the place of the command, or nothing); with it come three descriptors: standard output, standard error, and a socket that is told the process
id and then the exit status (negative: the signal), a line each. See ``Commands`` in conftest.py.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("fabric", "httpx", "paramiko", "rich.columns", "rich.markdown", "rich.table", "tenacity", "yaml")
NOT_IMPORTED = ("ddtree_ops.__main__", "ddtree_ops.data", "ddtree_ops.lab.engine.lab_engine")


def load() -> None:
    """All that a command may import, and what most of them make of it: models of the inventory, shipped signatures."""
    from pydantic import BaseModel

    import ddtree_ops
    from ddtree_ops.diagnose.api import diagnose_stream
    from ddtree_ops.diagnose.library import load_library

    for found in pkgutil.walk_packages(ddtree_ops.__path__, "ddtree_ops."):
        if not found.name.startswith(NOT_IMPORTED):
            importlib.import_module(found.name)
    for name in OTHERS:
        importlib.import_module(name)
    diagnose_stream(b"", library=load_library())
    kinds = list(BaseModel.__subclasses__())
    for kind in kinds:
        kind.model_rebuild()
        kinds += kind.__subclasses__()
    gc.collect()
    gc.freeze()


def requests(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request. Returns what to run in the fork that runs it, and None at the end of the socket."""
    while True:
        data, given, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not data:
            return None
        if os.fork() == 0:
            child = os.fork()
            if child == 0:
                control.close()
                return json.loads(data), given
            with socket.socket(fileno=given[2]) as told:
                os.close(given[0])
                os.close(given[1])
                told.sendall(b"%d\n" % child)
                _, status = os.waitpid(child, 0)
                told.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            os._exit(0)
        for descriptor in given:
            os.close(descriptor)
        while reap():
            pass


def reap() -> bool:
    """Take note of a fork that has ended; whether there was one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def main() -> None:
    """Serve; a fork runs its command to the end of the interpreter, as a process of its own would."""
    sys.path[0] = str(ROOT)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    load()
    found = requests(socket.socket(fileno=int(sys.argv[1])))
    if found is None:
        return
    request, (out, err, told) = found
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for descriptor in (out, err, told):
        os.close(descriptor)
    at_once = bool(request["env"].get("PYTHONUNBUFFERED"))
    for name, descriptor, by_line in (("stdout", 1, False), ("stderr", 2, True)):
        before, raw = getattr(sys, name), io.FileIO(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if at_once else io.BufferedWriter(raw),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=by_line,
            write_through=at_once,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    try:
        if request["code"]:
            sys.argv = ["-c", *request["argv"]]
            program = types.ModuleType("__main__")
            sys.modules["__main__"] = program
            exec(compile(request["code"], "<string>", "exec"), program.__dict__)
        else:
            sys.argv = ["ddtree_ops", *request["argv"]]
            runpy.run_module("ddtree_ops", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        status = ended.code or 0
    else:
        status = 0
    leave(status)
    sys.exit(status)


def leave(status: int) -> None:
    """End as the interpreter does, less that it takes all modules apart: that would copy most of this process's memory.

    What waits for threads, runs at the exit or is still in a buffer is as in any process; where a stream cannot be
    written, this returns and the interpreter does it in its own way.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
