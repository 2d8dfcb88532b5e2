"""The far end of a session: runs on the host, leaves nothing behind.

This file is streamed into ``python3 -c`` on the host and compiled there; it is never imported by the tool.
Standard library only, Python >= 3.8, Linux.

Frames, both ways: two big-endian 32-bit lengths, a UTF-8 JSON head of the first length, raw bytes of the second.
Before its first frame the agent writes :data:`MARKER`, so that what shell start-up files print is skipped.

To the agent: ``{"id", "op", "args", "deadline"}`` opens a call; ``{"op": "data", "to", "end"}`` feeds it;
``{"op": "ack", "to", "n"}`` returns credit for events; ``{"op": "cancel", "to"}`` ends it; ``{"op": "beat"}``
says that the client lives. From the agent: ``{"id", "event": {...}}`` for what a call emits, and once, last,
``{"id", "ok": true, "values"}`` or ``{"id", "ok": false, "error": {"code", "message", ...}}``; ``{"beat"}``.

The agent ends, with the commands it started and the locks it holds, when its stdin closes or when nothing was
heard for :data:`SILENCE` seconds. Units that it started live on: they are systemd's.
"""

# Python 3.8, and quick to start on the host: no pathlib, no contextlib.
# ruff: noqa: PTH100, PTH101, PTH102, PTH103, PTH104, PTH108, PTH110, PTH112, PTH113, PTH114, PTH115, PTH117
# ruff: noqa: PTH106, PTH116, PTH118, PTH119, PTH120, PTH123, PTH208, PTH211, B905, SIM105, UP022, UP041
from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import selectors
import signal
import stat
import struct
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, BinaryIO

__all__ = ["MARKER", "OPS", "PROPERTIES", "Agent", "Call", "OpError", "main"]

MARKER = b"\n\0ddtree-ops agent 1\0\n"
HEADER = struct.Struct("!II")
PIECE = 256 * 1024
WINDOW = 4 * 1024 * 1024
"""Bytes of events a call may have in flight, and bytes of data that may wait for it."""
EVENT_COST = 256
BEAT = 10.0
SILENCE = 120.0
TICK = 0.25
MAX_HEAD = 64 * 1024 * 1024
MAX_OUTPUT = 64 * 1024 * 1024

PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "ExecMainStatus",
    "ExecMainCode",
    "ExecMainPID",
    "MainPID",
    "InvocationID",
    "NRestarts",
    "ExecMainStartTimestamp",
    "ActiveEnterTimestamp",
    "InactiveEnterTimestamp",
    "StateChangeTimestamp",
    "UnitFileState",
    "FragmentPath",
    "DropInPaths",
    "NeedDaemonReload",
    "ControlGroup",
    "MemoryCurrent",
    "TasksCurrent",
    "Job",
)
VOLATILE = frozenset({"MemoryCurrent", "TasksCurrent"})
UNIT_FOLDERS = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)
UNIT_CHANGES = frozenset({"disable", "enable", "kill", "reset-failed", "restart", "start", "stop"})


class OpError(Exception):
    """A failure that the client is told: a stable code, a sentence, what to do, further lines."""

    def __init__(self, code: str, message: str, hint: str = "", details: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.details = list(details)


class Call:
    """One request under way: its deadline, its cancellation, what it is fed and what it emits."""

    def __init__(self, agent: Agent, number: int, deadline: float | None) -> None:
        self.agent = agent
        self.number = number
        self.ends = None if deadline is None else time.monotonic() + deadline
        self.cancelled = threading.Event()
        self.over = False
        self._on_cancel: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._unacked = 0
        self._inbox: list[tuple[bytes, bool]] = []
        self._waiting = 0

    def remaining(self) -> float | None:
        """Seconds left, or None where there is no deadline."""
        return None if self.ends is None else max(0.0, self.ends - time.monotonic())

    def check(self) -> None:
        """Raise where the call was cancelled or its deadline has passed."""
        if self.cancelled.is_set():
            raise OpError("cancelled", "cancelled by the client")
        if self.ends is not None and time.monotonic() > self.ends:
            raise OpError("deadline", "not done within its deadline")

    def when_cancelled(self, action: Callable[[], None]) -> None:
        """Have ``action`` done when the call is cancelled, now if it already is."""
        with self._changed:
            self._on_cancel.append(action)
            done = self.cancelled.is_set()
        if done:
            action()

    def cancel(self) -> None:
        with self._changed:
            if self.cancelled.is_set():
                return
            self.cancelled.set()
            actions = list(self._on_cancel)
            self._changed.notify_all()
        for action in actions:
            action()

    def emit(self, values: dict[str, Any], data: bytes = b"") -> None:
        """Send an event; waits while the client has too much unread."""
        cost = len(data) + EVENT_COST
        with self._changed:
            while self._unacked > WINDOW and not self.cancelled.is_set():
                self._changed.wait()
            self._unacked += cost
        if self.cancelled.is_set():
            raise OpError("cancelled", "cancelled by the client")
        self.agent.send({"id": self.number, "event": values}, data)

    def ack(self, count: int) -> None:
        with self._changed:
            self._unacked -= count
            self._changed.notify_all()

    def feed(self, data: bytes, end: bool) -> None:
        """Called by the reader: hand data to the call; waits while it has too much unread."""
        with self._changed:
            while self._waiting > WINDOW and not self.over and not self.cancelled.is_set():
                self._changed.wait(1.0)
            if not self.over:
                self._inbox.append((data, end))
                self._waiting += len(data)
                self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self.over = True
            self._inbox.clear()
            self._changed.notify_all()

    def pieces(self) -> Iterator[bytes]:
        """What the client feeds, until it says that this was all."""
        while True:
            with self._changed:
                while not self._inbox:
                    if self.cancelled.is_set():
                        raise OpError("cancelled", "cancelled by the client")
                    if not self._changed.wait(self.remaining()):
                        raise OpError("deadline", "the data did not arrive within the deadline")
                batch, self._inbox = self._inbox, []
                self._waiting = 0
                self._changed.notify_all()
            for data, end in batch:
                if data:
                    yield data
                if end:
                    return


class Agent:
    """Reads frames, runs each call in a thread, writes frames."""

    def __init__(self, source: BinaryIO, sink: int) -> None:
        self.source = source
        self.sink = sink
        self.heard = time.monotonic()
        self.calls: dict[int, Call] = {}
        self.children: set[subprocess.Popen[bytes]] = set()
        self.leases: dict[str, Lease] = {}
        self.staged: dict[str, Staged] = {}
        self.pushes = 0
        self.guard = threading.Lock()
        self._sending = threading.Lock()
        self._feeding = False
        self._ending = threading.Lock()
        self._leaving = False

    def send(self, head: dict[str, Any], data: bytes = b"") -> None:
        text = json.dumps(head, separators=(",", ":")).encode()
        front = HEADER.pack(len(text), len(data)) + text
        parts = [front + data] if len(data) < PIECE else [front, data]
        with self._sending:
            if self._leaving:
                return
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[os.write(self.sink, view) :]

    def serve(self) -> None:
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            while True:
                prefix = self.source.read(HEADER.size)
                if len(prefix) < HEADER.size:
                    return
                head_size, data_size = HEADER.unpack(prefix)
                if head_size > MAX_HEAD:
                    return
                body = self.source.read(head_size)
                data = self.source.read(data_size) if data_size else b""
                if len(body) < head_size or len(data) < data_size:
                    return
                self.heard = time.monotonic()
                self._accept(json.loads(body), data)
        finally:
            self.end()

    def _accept(self, head: dict[str, Any], data: bytes) -> None:
        op = head["op"]
        if op == "beat":
            return
        if op in ("data", "ack", "cancel"):
            with self.guard:
                known = self.calls.get(head["to"])
            if known is None:
                return
            if op == "data":
                self._feeding = True
                known.feed(data, bool(head.get("end")))
                self._feeding = False
                self.heard = time.monotonic()
            elif op == "ack":
                known.ack(head["n"])
            else:
                threading.Thread(target=known.cancel, daemon=True).start()
            return
        call = Call(self, head["id"], head.get("deadline"))
        with self.guard:
            self.calls[call.number] = call
        threading.Thread(target=self._run, args=(call, op, head.get("args") or {}, data), daemon=True).start()

    def _run(self, call: Call, op: str, args: dict[str, Any], data: bytes) -> None:
        try:
            values, answer = perform(call, op, args, data)
            reply: dict[str, Any] = {"id": call.number, "ok": True, "values": values}
        except BaseException as error:
            reply, answer = {"id": call.number, "ok": False, "error": describe(error)}, b""
        with self.guard:
            self.calls.pop(call.number, None)
        call.finish()
        try:
            self.send(reply, answer)
        except OSError:
            self.end()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT)
            if not self._feeding and time.monotonic() - self.heard > SILENCE:
                self.end()
            try:
                self.send({"beat": time.time()})
            except OSError:
                self.end()

    def end(self) -> None:
        """End everything this agent started, and the agent."""
        with self._ending:
            self._leaving = True
            with self.guard:
                calls, children = list(self.calls.values()), list(self.children)
            for child in children:
                signal_group(child, signal.SIGTERM)
            for call in calls:
                threading.Thread(target=call.cancel, daemon=True).start()
            patience = time.monotonic() + 1.0
            while children and time.monotonic() < patience:
                children = [child for child in children if child.poll() is None]
                time.sleep(0.01)
            for child in children:
                signal_group(child, signal.SIGKILL)
            try:
                with self.guard:
                    leases = list(self.leases.values())
                for lease in leases:
                    lease.give_up(1.0)
            finally:
                os._exit(0)


def describe(error: BaseException) -> dict[str, Any]:
    """An error as the client is told it."""
    if isinstance(error, OpError):
        return {"code": error.code, "message": error.message, "hint": error.hint, "details": error.details}
    if isinstance(error, OSError):
        name = errno.errorcode.get(error.errno or 0, "OSError")
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return {"code": name, "message": f"{where}{error.strerror or error}", "hint": "", "details": []}
    import traceback

    lines = traceback.format_exception(type(error), error, error.__traceback__)
    text = "".join(lines).rstrip().splitlines()
    return {"code": "internal", "message": f"the agent failed: {text[-1]}", "hint": "", "details": text[-12:]}


def perform(call: Call, op: str, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    action = OPS.get(op)
    if action is None:
        raise OpError("unknown_op", f"the agent knows no request {op!r}")
    if changes(op, args):
        need_leases(call.agent)
    return action(call, args, data)


def changes(op: str, args: dict[str, Any]) -> bool:
    """It changes what a lock protects: not to be done by a client that lost its lock and does not know it yet."""
    if op in ("run", "stream"):
        argv = args["argv"]
        return len(argv) > 1 and argv[0] == "systemctl" and argv[1] in UNIT_CHANGES
    return op in ("append_line", "prune", "remove_tree", "swap_link", "write_file")


def need_leases(agent: Agent) -> None:
    """Every lock that this client has taken and not given back is still its own; renewed on the way."""
    with agent.guard:
        leases = list(agent.leases.values())
    for lease in leases:
        try:
            mine = lease.renew()
        except FileNotFoundError:  # the folder of the service is gone
            mine = False
        if not mine:
            found = read_lock(lease.path)
            now = f"{found.get('who')} on {found.get('origin')} has it" if found else "nobody has it"
            raise OpError("lock_lost", f"the lock was lost: {now} now")


# ---------------------------------------------------------------------------------------------- commands


def environment(extra: dict[str, str] | None) -> dict[str, str]:
    """Environment of a command: the C locale and the folders of system commands, plus what was asked for."""
    values = {key: value for key, value in os.environ.items() if key not in ("LANG", "LANGUAGE")}
    values["LC_ALL"] = "C"
    folders = [folder for folder in values.get("PATH", "").split(":") if folder]
    for folder in ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"):
        if folder not in folders:
            folders.append(folder)
    values["PATH"] = ":".join(folders)
    values.update(extra or {})
    return values


def signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(child.pid, number)
    except (ProcessLookupError, PermissionError):
        return


def stop_child(child: subprocess.Popen[bytes]) -> None:
    """End a command and its process group: SIGTERM, then SIGKILL after half a second."""
    if child.poll() is not None:
        return
    signal_group(child, signal.SIGTERM)
    try:
        child.wait(0.5)
    except subprocess.TimeoutExpired:
        pass
    signal_group(child, signal.SIGKILL)


def spawn(
    call: Call, args: dict[str, Any], piped: bool, errors: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        args["argv"],
        stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment(args.get("env")),
        cwd=args.get("cwd"),
        start_new_session=True,
    )
    with call.agent.guard:
        call.agent.children.add(child)
    call.when_cancelled(lambda: stop_child(child))
    return child


def reap(call: Call, child: subprocess.Popen[bytes]) -> None:
    """End a command that still runs, and let go of it."""
    if child.poll() is None:
        stop_child(child)
        child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None and not pipe.closed:
            try:
                pipe.close()
            except BrokenPipeError:
                pass
    with call.agent.guard:
        call.agent.children.discard(child)


def pump(call: Call, child: subprocess.Popen[bytes], data: bytes) -> Iterator[tuple[str, bytes]]:
    """Feed a command and drain both its outputs until it has ended; enforces the call's deadline.

    A grandchild that keeps the outputs open does not keep the call open.
    """
    selector = selectors.DefaultSelector()
    rest = memoryview(data)
    try:
        for name, pipe in (("stdout", child.stdout), ("stderr", child.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe.fileno(), selectors.EVENT_READ, name)
        if child.stdin is not None:
            os.set_blocking(child.stdin.fileno(), False)
            selector.register(child.stdin.fileno(), selectors.EVENT_WRITE, "stdin")
        outputs = 2
        while outputs:
            call.check()
            left = call.remaining()
            # Asked before the look: what it wrote before it ended is then found by this look, or was read.
            ended = child.poll() is not None
            ready = selector.select(TICK if left is None else min(TICK, left))
            if not ready and ended:
                break
            for key, _ in ready:
                if key.data == "stdin":
                    try:
                        rest = rest[os.write(key.fd, rest[:PIECE]) :]
                    except BrokenPipeError:
                        rest = rest[:0]
                    if not rest:
                        selector.unregister(key.fd)
                        assert child.stdin is not None
                        child.stdin.close()
                    continue
                piece = os.read(key.fd, PIECE)
                if piece:
                    yield key.data, piece
                else:
                    selector.unregister(key.fd)
                    outputs -= 1
        while child.poll() is None:
            call.check()
            try:
                child.wait(TICK)
            except subprocess.TimeoutExpired:
                continue
    finally:
        selector.close()
        reap(call, child)


def missing_command(error: OSError, argv: list[str]) -> tuple[int, bytes]:
    """What a shell would answer where a command cannot be started."""
    rc = 127 if error.errno == errno.ENOENT else 126
    where = argv[0] if error.filename is None else os.fsdecode(error.filename)
    return rc, f"{where}: {error.strerror}".encode("utf-8", "surrogateescape")


def op_run(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    limit = int(args.get("max_output") or MAX_OUTPUT)
    kept: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    sizes = {"stdout": 0, "stderr": 0}
    try:
        child = spawn(call, args, bool(data))
    except OSError as error:
        rc, text = missing_command(error, args["argv"])
        return {"rc": rc, "stdout": 0, "truncated": False}, text
    try:
        for name, piece in pump(call, child, data):
            room = limit - sizes[name]
            sizes[name] += len(piece)
            if room > 0:
                kept[name].append(piece[:room])
    except OpError as error:
        if error.code != "deadline":
            raise
        tail = b"".join(kept["stderr"] or kept["stdout"])[-2000:].decode("utf-8", "replace").splitlines()
        raise OpError("deadline", "the command was still running and was killed", "", tail[-10:]) from None
    stdout, stderr = b"".join(kept["stdout"]), b"".join(kept["stderr"])
    truncated = any(size > limit for size in sizes.values())
    return {"rc": child.returncode, "stdout": len(stdout), "truncated": truncated}, stdout + stderr


def op_stream(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    try:
        child = spawn(call, args, bool(data))
    except OSError as error:
        rc, text = missing_command(error, args["argv"])
        call.emit({"event": "stderr"}, text)
        call.emit({"event": "exit", "rc": rc})
        return {}, b""
    for name, piece in pump(call, child, data):
        call.emit({"event": name}, piece)
    call.emit({"event": "exit", "rc": child.returncode})
    return {}, b""


def op_program(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Have a program of the client's answer, in this process: another interpreter would cost more than most answers.

    The source in ``data`` defines ``answer(given, start)``, which returns what JSON can hold; ``start(argv)`` starts a
    command whose standard output and error are one pipe. What still runs when it has answered is ended.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(argv: list[str]) -> subprocess.Popen[bytes]:
        child = spawn(call, {"argv": argv}, False, subprocess.STDOUT)
        started.append(child)
        return child

    names: dict[str, Any] = {"__name__": args["name"]}
    try:
        exec(compile(data, args["name"], "exec", dont_inherit=True), names)
        found = names["answer"](args["given"], start)
    finally:
        for child in started:
            reap(call, child)
    return {}, json.dumps(found, separators=(",", ":")).encode()


# ------------------------------------------------------------------------------------------------- files


def sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def temporary(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:180]}.{os.getpid()}-{threading.get_ident()}.tmp")


def op_read_file(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    limit = int(args["max_bytes"])
    try:
        descriptor = os.open(args["path"], os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return {"found": False}, b""
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise OpError("not_a_file", f"{args['path']}: not a regular file")
        parts: list[bytes] = []
        size = 0
        while True:
            call.check()
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                break
            size += len(piece)
            if size > limit:
                raise OpError("too_large", f"{args['path']}: larger than {limit} bytes")
            parts.append(piece)
    finally:
        os.close(descriptor)
    content = b"".join(parts)
    same = bool(args.get("unless")) and hashlib.sha256(content).hexdigest() == args["unless"]
    values = {"found": True, "same": same, "mode": stat.S_IMODE(info.st_mode), "mtime": info.st_mtime}
    return values, b"" if same else content


def op_write_file(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    path, mode = args["path"], int(args["mode"])
    try:
        info = os.lstat(path)
        if stat.S_ISDIR(info.st_mode):
            raise OpError("not_a_file", f"{path}: is a directory")
        if stat.S_ISREG(info.st_mode) and stat.S_IMODE(info.st_mode) == mode and info.st_size == len(data):
            with open(path, "rb") as current:
                if current.read() == data:
                    return {"changed": False}, b""
    except FileNotFoundError:
        pass
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    name = temporary(path)
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        try:
            write_all(descriptor, data)
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(name, path)
    except BaseException:
        os.unlink(name)
        raise
    sync_folder(folder)
    return {"changed": True}, b""


def op_append_line(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    path = args["path"]
    if b"\n" in data or b"\r" in data:
        raise OpError("bad_line", f"{path}: a line may not hold a line break")
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    fresh = not os.path.lexists(path)
    with Mutex(folder):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            try:
                write_all(descriptor, (b"\n" if torn else b"") + data + b"\n")
                os.fsync(descriptor)
            except BaseException:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
    if fresh:
        sync_folder(folder)
    return {}, b""


def op_swap_link(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    link, target = args["link"], args["target"]
    try:
        old: str | None = os.readlink(link)
    except FileNotFoundError:
        old = None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise OpError("not_a_link", f"{link}: is there and is not a symbolic link") from None
    if old == target:
        return {"old": old, "changed": False}, b""
    folder = os.path.dirname(link) or "."
    os.makedirs(folder, exist_ok=True)
    name = temporary(link)
    os.symlink(target, name)
    try:
        os.rename(name, link)
    except BaseException:
        os.unlink(name)
        raise
    sync_folder(folder)
    return {"old": old, "changed": True}, b""


def op_list_dir(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    found = []
    try:
        with os.scandir(args["path"]) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                kind = {stat.S_IFDIR: "dir", stat.S_IFREG: "file", stat.S_IFLNK: "link"}.get(
                    stat.S_IFMT(info.st_mode)
                )
                found.append(
                    {
                        "name": entry.name,
                        "kind": kind or "other",
                        "mode": stat.S_IMODE(info.st_mode),
                        "size": info.st_size,
                        "mtime": info.st_mtime,
                        "target": os.readlink(entry.path) if kind == "link" else None,
                    }
                )
    except FileNotFoundError:
        return {"found": False, "entries": []}, b""
    found.sort(key=lambda item: str(item["name"]))
    return {"found": True, "entries": found}, b""


def op_disk(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    return disk(args["path"]), b""


def disk(path: str) -> dict[str, Any]:
    """Space where ``path`` is or would be; ``free_inodes`` is None where the file system does not count them."""
    place = os.path.abspath(path)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    info = os.statvfs(place)
    root = os.geteuid() == 0
    return {
        "path": place,
        "block_size": info.f_frsize,
        "total_bytes": info.f_blocks * info.f_frsize,
        "free_bytes": (info.f_bfree if root else info.f_bavail) * info.f_frsize,
        "total_inodes": info.f_files or None,
        "free_inodes": (info.f_ffree if root else info.f_favail) if info.f_files else None,
    }


def discard(path: str) -> None:
    """Remove a tree, read-only folders too; a missing one is fine."""
    import shutil

    if os.path.islink(path) or not os.path.isdir(path):
        if os.path.lexists(path):
            os.unlink(path)
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)
    shutil.rmtree(path)


def discard_busy(path: str) -> None:
    """Remove a tree into which a thread that is being stopped may still write."""
    for _ in range(100):
        try:
            discard(path)
            return
        except OSError:
            time.sleep(0.05)


def op_remove_tree(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    path, below = args["path"], args["below"]
    if not (os.path.isabs(path) and os.path.isabs(below)):
        raise OpError("refused", f"{path}: not an absolute path, nothing was removed")
    folder, name = os.path.split(path.rstrip("/"))
    root = os.path.realpath(below)
    real = os.path.join(os.path.realpath(folder), name)
    if name in ("", ".", "..") or root == "/" or not real.startswith(root + "/"):
        raise OpError("refused", f"{path}: does not lie below {below}, nothing was removed")
    if not os.path.lexists(real):
        return {"removed": False}, b""
    discard(real)
    return {"removed": True}, b""


# ------------------------------------------------------------------------------------------------ hashing


class Room(threading.local):
    """Memory that a thread reads into: a fresh piece for every read costs more than hashing a small file."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(PIECE))


ROOM = Room()


def hash_file(path: str) -> str:
    """sha256 of a regular file; symbolic links are not followed."""
    view = ROOM.view
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        digest = hashlib.sha256()
        while True:
            size = os.readv(descriptor, (view,))
            if not size:
                return digest.hexdigest()
            digest.update(view[:size])
    finally:
        os.close(descriptor)


def in_threads(call: Call, action: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """``action`` of every item, by a few threads: hashing and file input release the interpreter lock."""
    results: list[Any] = [None] * len(items)
    failures: list[BaseException] = []
    numbers = iter(range(0, len(items), 16))
    guard = threading.Lock()

    def work() -> None:
        try:
            while not failures:
                with guard:
                    first = next(numbers, None)
                if first is None:
                    return
                call.check()
                for number in range(first, min(first + 16, len(items))):
                    results[number] = action(items[number])
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(4, os.cpu_count() or 1) - 1)]
    for worker in workers:
        worker.start()
    work()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return results


def walk(root: str) -> tuple[dict[str, os.stat_result], list[str], list[str]]:
    """Regular files, folders, and everything else below ``root``, by relative path; byte code folders are left out."""
    files: dict[str, os.stat_result] = {}
    folders: list[str] = []
    others: list[str] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(os.path.join(root, prefix) if prefix else root) as entries:
            for entry in entries:
                relative = prefix + entry.name
                if entry.is_symlink():
                    others.append(relative)
                elif entry.is_dir():
                    if entry.name != "__pycache__":
                        folders.append(relative)
                        pending.append(relative + "/")
                elif entry.is_file():
                    files[relative] = entry.stat(follow_symlinks=False)
                else:
                    others.append(relative)
    return files, folders, others


def hash_or_none(path: str) -> str | None:
    """sha256, or None where the file vanished or is not a readable plain file."""
    try:
        return hash_file(path)
    except OSError:
        return None


def op_hash_tree(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    root = args["root"]
    if not os.path.isdir(root):
        if os.path.lexists(root) and not os.path.islink(root):
            raise OpError("not_a_folder", f"{root}: is not a directory")
        return {"found": False}, b""
    files, _, _ = walk(root)
    names = sorted(files)
    sums = in_threads(call, hash_file, [os.path.join(root, name) for name in names])
    rows = [
        [name, 0o755 if files[name].st_mode & 0o111 else 0o644, files[name].st_size, digest]
        for name, digest in zip(names, sums)
    ]
    return {"found": True}, json.dumps(rows, separators=(",", ":")).encode()


# ------------------------------------------------------------------------------------------------ publish

RELEASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
STAGING_NAME = re.compile(r"\.(?P<kind>staging|partial|old)-.+-(?P<pid>\d+)-(?P<start>\d+)")
"""Never the name of a release: a push under way, what arrived of one that broke off, a release being removed."""
MANIFEST = "manifest.json"


class Staged:
    """A release being built in a staging folder."""

    def __init__(self, folder: str, target: str, files: list[list[Any]], manifest: bytes) -> None:
        self.folder = folder
        self.target = target
        self.files = files
        self.manifest = manifest
        self.needed: list[int] = []
        self.linked = 0
        self.resumed = 0
        self.arrived = 0
        self.problems: list[str] = []


def started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, None where there is no such process any more."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as source:
            fields = source.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else fields[19].decode()
    except (OSError, IndexError):
        return None


def leftovers(releases: str) -> list[str]:
    """Names of the staging folders that no agent is working on: of agents that are gone, and of pushes that broke off."""
    found = []
    for name in sorted(os.listdir(releases)):
        match = STAGING_NAME.fullmatch(name)
        if match and (match["kind"] == "partial" or started(int(match["pid"])) != match["start"]):
            path = os.path.join(releases, name)
            if os.path.isdir(path) and not os.path.islink(path):
                found.append(name)
    return found


def claim(releases: str, name: str, own: str) -> str | None:
    """Take a folder over under a name of this agent's, so that nobody else touches it; None where it has gone."""
    folder = os.path.join(releases, f".old-{own}")
    try:
        os.rename(os.path.join(releases, name), folder)
    except FileNotFoundError:
        return None
    return folder


def own_token(agent: Agent, word: str) -> str:
    """A name that no other push or removal has, and that tells whose it is."""
    with agent.guard:
        agent.pushes += 1
        return f"{word}.{agent.pushes}-{os.getpid()}-{started(os.getpid())}"


def claim_leftovers(call: Call, releases: str) -> list[str]:
    """Folders of pushes that broke off, now of this agent; half removed releases are removed."""
    claimed = []
    for name in leftovers(releases):
        folder = claim(releases, name, own_token(call.agent, "left"))
        if folder is None:
            continue
        if name.startswith(".old-"):
            discard(folder)
        else:
            claimed.append(folder)
    return claimed


def arrived_files(call: Call, folders: list[str], files: list[list[Any]]) -> dict[str, list[str]]:
    """sha256 -> paths of what arrived completely with pushes that broke off; hashed now, as nothing else vouches for it."""
    sizes = {row[2] for row in files}
    found: dict[str, list[str]] = {}
    for folder in folders:
        present, _, _ = walk(folder)
        paths = [
            os.path.join(folder, name) for name, info in sorted(present.items()) if info.st_size in sizes
        ]
        for path, digest in zip(paths, in_threads(call, hash_or_none, paths)):
            if digest is not None:
                found.setdefault(digest, []).append(path)
    return found


def safe_relative(path: Any) -> bool:
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))


def check_release(call: Call, target: str, files: list[list[Any]], manifest: bytes) -> list[str]:
    """How a published release differs from what it should be; empty where every byte is right."""
    present, _, others = walk(target)
    problems = [f"not a plain file: {name}" for name in sorted(others)]
    kept = present.pop(MANIFEST, None)
    if kept is None:
        problems.append(f"missing: {MANIFEST}")
    else:
        with open(os.path.join(target, MANIFEST), "rb") as source:
            if source.read() != manifest:
                problems.append(f"changed: {MANIFEST}")
    wanted = {row[0]: row for row in files}
    problems += [f"not part of the release: {name}" for name in sorted(present.keys() - wanted.keys())]
    same_size = []
    for name, row in wanted.items():
        info = present.get(name)
        if info is None:
            problems.append(f"missing: {name}")
        elif info.st_size != row[2]:
            problems.append(f"changed: {name}")
        elif bool(info.st_mode & 0o111) != bool(row[1] & 0o111):
            problems.append(f"wrong mode: {name}")
        else:
            same_size.append(row)
    sums = in_threads(call, lambda row: hash_or_none(os.path.join(target, row[0])), same_size)
    problems += [f"changed: {row[0]}" for row, digest in zip(same_size, sums) if digest != row[3]]
    return problems


def op_check_release(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Whether a release is there and is, to the byte, what the manifest with the given sha256 says."""
    target = os.path.join(args["releases_dir"], args["digest"])
    if not RELEASE_NAME.fullmatch(args["digest"]):
        raise OpError("refused", f"{args['digest']!r} is not a release name")
    try:
        with open(os.path.join(target, MANIFEST), "rb") as source:
            manifest = source.read()
        if os.path.islink(target) or hashlib.sha256(manifest).hexdigest() != args["manifest"]:
            raise ValueError("another one")
        rows = [
            [row["path"], row["mode"], row["size"], row["sha256"]] for row in json.loads(manifest)["files"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        problems = ["its manifest is missing, damaged, or another one"]
    else:
        problems = check_release(call, target, rows, manifest)
    return {"whole": not problems, "problems": problems[:20], "count": len(problems)}, b""


def known_files(releases: str) -> dict[str, list[str]]:
    """sha256 -> paths, as the manifests of the releases say; to be verified before use."""
    found: dict[str, list[str]] = {}
    for name in sorted(os.listdir(releases)):
        if not RELEASE_NAME.fullmatch(name):
            continue
        try:
            with open(os.path.join(releases, name, MANIFEST), "rb") as source:
                listed = json.load(source)["files"]
            rows = listed.items() if isinstance(listed, dict) else [(row["path"], row) for row in listed]
            for path, row in rows:
                digest = row["sha256"] if isinstance(row, dict) else row
                if safe_relative(path) and isinstance(digest, str):
                    found.setdefault(digest, []).append(os.path.join(releases, name, path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def take_over(row: list[Any], sources: list[str], destination: str) -> bool:
    """Have a file from another release: a hard link to a verified file, or a copy where a link would not be the same."""
    for source in sources:
        try:
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode) or info.st_size != row[2]:
                continue
            content = b""
            while len(content) <= row[2]:
                piece = os.read(descriptor, row[2] + 1)
                if not piece:
                    break
                content += piece
        finally:
            os.close(descriptor)
        if hashlib.sha256(content).hexdigest() != row[3]:
            continue
        mode = 0o555 if row[1] & 0o111 else 0o444
        if stat.S_IMODE(info.st_mode) == mode and info.st_uid == os.geteuid():
            try:
                os.link(source, destination, follow_symlinks=False)
                return True
            except OSError as error:
                if error.errno not in (errno.EMLINK, errno.EXDEV, errno.EPERM, errno.ENOENT):
                    raise
        copy = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            write_all(copy, content)
        finally:
            os.close(copy)
        return True
    return False


def need_space(releases: str, rows: list[list[Any]], folders: int) -> None:
    """:raises OpError: with the figures, where the files to be sent do not fit."""
    space = disk(releases)
    block = max(512, space["block_size"])
    need = sum(-(-row[2] // block) * block for row in rows) + folders * block + (1 << 20)
    hint = f"free space on the file system of {space['path']} and push again"
    if need > space["free_bytes"]:
        raise OpError(
            "no_space",
            f"not enough space below {releases}: {need} bytes are needed, {space['free_bytes']} are free",
            hint,
        )
    inodes = len(rows) + folders + 2
    if space["free_inodes"] is not None and inodes > space["free_inodes"]:
        raise OpError(
            "no_space",
            f"not enough inodes below {releases}: {inodes} are needed, {space['free_inodes']} are free",
            hint,
        )


def op_publish(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    releases, digest, split = args["releases_dir"], args["digest"], int(args["listing"])
    files: list[list[Any]] = json.loads(data[:split])
    manifest = data[split:]
    if not RELEASE_NAME.fullmatch(digest):
        raise OpError("refused", f"{digest!r} is not a release name")
    for row in files:
        if not safe_relative(row[0]) or row[0] == MANIFEST:
            raise OpError("refused", f"{row[0]!r} is not a path inside a release")
    target = os.path.join(releases, digest)
    os.makedirs(releases, exist_ok=True)
    problems: list[str] = []
    if os.path.islink(target) or (os.path.lexists(target) and not os.path.isdir(target)):
        raise OpError("refused", f"{target}: is there and is not a directory")
    if os.path.isdir(target):
        problems = check_release(call, target, files, manifest)
        if not problems:
            return {"created": False}, b""

    known = known_files(releases)
    if problems:
        for row in files:
            known.setdefault(row[3], []).append(os.path.join(target, row[0]))
    token = own_token(call.agent, digest)
    job = Staged(os.path.join(releases, f".staging-{token}"), target, files, manifest)
    job.problems = problems
    claimed = claim_leftovers(call, releases)
    try:
        with explained_space(releases, "before anything was sent"):
            stage(call, job, token, known, arrived_files(call, claimed, files))
            for folder in claimed:
                discard(folder)
            need_space(releases, [files[number] for number in job.needed], 0)
    except BaseException as error:
        drop_staged(call.agent, token, keep=not no_space(error))
        for folder in claimed:
            discard_busy(folder)
        raise
    return {
        "created": True,
        "token": token,
        "needed": job.needed,
        "linked": job.linked,
        "resumed": job.resumed,
        "problems": problems,
    }, b""


def stage(
    call: Call, job: Staged, token: str, known: dict[str, list[str]], arrived: dict[str, list[str]]
) -> None:
    """Make the staging folder with all that need not travel: what other releases hold, what had arrived before."""
    releases, files = os.path.dirname(job.folder), job.files
    folders = sorted({row[0].rpartition("/")[0] for row in files} - {""})
    maybe = [number for number, row in enumerate(files) if row[3] in known or row[3] in arrived]
    need_space(
        releases, [row for row in files if row[3] not in known and row[3] not in arrived], len(folders)
    )
    with call.agent.guard:
        call.agent.staged[token] = job
    os.mkdir(job.folder, 0o700)
    for folder in folders:
        os.makedirs(os.path.join(job.folder, folder), exist_ok=True)

    def take(sources: dict[str, list[str]]) -> Callable[[int], bool]:
        return lambda number: take_over(
            files[number], sources.get(files[number][3], []), os.path.join(job.folder, files[number][0])
        )

    linked = {number for number, done in zip(maybe, in_threads(call, take(known), maybe)) if done}
    rest = [number for number in maybe if number not in linked]
    resumed = {number for number, done in zip(rest, in_threads(call, take(arrived), rest)) if done}
    job.linked, job.resumed = len(linked), len(resumed)
    job.needed = [number for number in range(len(files)) if number not in linked and number not in resumed]


def no_space(error: BaseException) -> bool:
    if isinstance(error, OpError):
        return error.code == "no_space"
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class explained_space:
    """Turn a full disk into an error that says how full it is, and when that was seen."""

    def __init__(self, releases: str, when: str) -> None:
        self.releases = releases
        self.when = when

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        if not isinstance(error, OSError) or not no_space(error):
            return
        free = disk(self.releases)
        inodes = "" if free["free_inodes"] is None else f" and {free['free_inodes']} inodes"
        raise OpError(
            "no_space",
            f"{self.releases}: {error.strerror} {self.when} ({free['free_bytes']} bytes{inodes} free now)",
            "free space there and push again",
        ) from None


def drop_staged(agent: Agent, token: str, *, keep: bool) -> None:
    """Take a staging folder away; what arrived is kept for the next push, unless the disk is full."""
    with agent.guard:
        job = agent.staged.get(token)
    if job is None:
        return
    if keep and job.resumed + job.arrived:
        try:
            os.rename(job.folder, job.folder.replace("/.staging-", "/.partial-"))
        except FileNotFoundError:
            pass
    else:
        discard_busy(job.folder)
    with agent.guard:
        agent.staged.pop(token, None)


def op_publish_abort(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    drop_staged(call.agent, args["token"], keep=True)
    return {}, b""


def op_publish_send(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    token = args["token"]
    with call.agent.guard:
        job = call.agent.staged.get(token)
    if job is None:
        raise OpError("refused", "no push is under way for this token")
    try:
        with explained_space(os.path.dirname(job.folder), "while receiving"):
            receive_files(call, job)
            created = put_in_place(call, job)
    except BaseException as error:
        drop_staged(call.agent, token, keep=not no_space(error))
        raise
    drop_staged(call.agent, token, keep=False)
    return {"created": created, "linked": job.linked, "problems": job.problems}, b""


def receive_files(call: Call, job: Staged) -> None:
    """Write what the client feeds, file after file, checking each against its sha256."""
    pieces = call.pieces()
    piece = memoryview(b"")
    for number in job.needed:
        path, mode, size, wanted = job.files[number]
        descriptor = os.open(
            os.path.join(job.folder, path),
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW,
            0o555 if mode & 0o111 else 0o444,
        )
        try:
            digest = hashlib.sha256()
            left = size
            while left:
                if not piece:
                    got = next(pieces, None)
                    if got is None:
                        raise OpError("incomplete", f"{path}: the data ended before the file did")
                    piece = memoryview(got)
                part, piece = piece[:left], piece[left:]
                digest.update(part)
                left -= len(part)
                while part:
                    part = part[os.write(descriptor, part) :]
        finally:
            os.close(descriptor)
        if digest.hexdigest() != wanted:
            raise OpError("damaged", f"{path}: what arrived does not have the sha256 of the manifest")
        job.arrived += 1
    if piece or next(pieces, None) is not None:
        raise OpError("damaged", "more data arrived than the manifest lists")


def put_in_place(call: Call, job: Staged) -> bool:
    """Make the staged tree read-only and rename it to its place; False where an equal one has come there meanwhile."""
    releases = os.path.dirname(job.folder)
    descriptor = os.open(os.path.join(job.folder, MANIFEST), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
    try:
        write_all(descriptor, job.manifest)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    for folder, _, _ in os.walk(job.folder, topdown=False):
        os.chmod(folder, 0o555)
    call.check()
    try:
        os.rename(job.folder, job.target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not job.problems and not check_release(call, job.target, job.files, job.manifest):
            return False
        exchange(job.folder, job.target)
    sync_folder(releases)
    return True


def exchange(first: str, second: str) -> None:
    """Swap two names: in one step where the kernel can (renameat2), else through a third name."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)
    if call is not None and call(-100, os.fsencode(first), -100, os.fsencode(second), 2) == 0:
        return
    aside = os.path.join(os.path.dirname(first), os.path.basename(first).replace(".staging-", ".old-", 1))
    os.rename(second, aside)
    try:
        os.rename(first, second)
    except BaseException:
        os.rename(aside, second)
        raise
    os.rename(aside, first)


# ------------------------------------------------------------------------------- what lies there, and goes

GUARD_PROGRAM = re.compile(r"[0-9a-f]{12}\.py")
PYCACHE_FILE = re.compile(r"(.+)\.[a-z]+-\d+[a-z]*(?:\.opt-[0-9a-z]+)?\.pyc")


def folder_sizes(root: str) -> dict[str, int]:
    """Files and bytes below a folder; ``own_bytes`` are those that no name elsewhere holds too."""
    files, size = 0, 0
    inside: dict[tuple[int, int], list[int]] = {}
    for info in walk(root)[0].values():
        files += 1
        size += info.st_size
        names = inside.setdefault((info.st_dev, info.st_ino), [0, info.st_nlink, info.st_size])
        names[0] += 1
    own = sum(length for names, links, length in inside.values() if names >= links)
    return {"files": files, "bytes": size, "own_bytes": own}


def read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as source:
            return source.read(1 << 20)
    except OSError:
        return None


def op_survey(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """What lies below a deploy root: releases with their sizes, leftovers of pushes, services with what they point to."""
    root = args["root"]
    releases = os.path.join(root, "releases")
    names = sorted(os.listdir(releases)) if os.path.isdir(releases) else []
    idle = set(leftovers(releases)) if names else set()
    found, rest = [], []
    for name in names:
        call.check()
        folder = os.path.join(releases, name)
        if os.path.islink(folder) or not os.path.isdir(folder):
            continue
        if STAGING_NAME.fullmatch(name):
            rest.append({"name": name, "live": name not in idle, **folder_sizes(folder)})
        elif RELEASE_NAME.fullmatch(name):
            manifest = os.path.join(folder, MANIFEST)
            there = os.path.isfile(manifest)
            since = os.stat(manifest if there else folder).st_mtime
            found.append({"name": name, "published": since, "manifest": there, **folder_sizes(folder)})
    return {
        "time": time.time(),
        "disk": disk(root),
        "releases": found,
        "leftovers": rest,
        "services": [service_of(root, unit) for unit in services_of(root)],
    }, b""


def services_of(root: str) -> list[str]:
    folder = os.path.join(root, "services")
    if not os.path.isdir(folder):
        return []
    return sorted(name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name)))


def service_of(root: str, unit: str) -> dict[str, Any]:
    """What a service points to: its current release, the state of an armed rollback, the unit files it keeps."""
    folder = os.path.join(root, "services", unit)
    try:
        current: str | None = os.path.basename(os.readlink(os.path.join(folder, "current")))
    except OSError:
        current = None
    units = os.path.join(folder, "units")
    return {
        "unit": unit,
        "current": current,
        "armed": read_text(os.path.join(folder, "rollback.json")),
        "units": sorted(os.listdir(units)) if os.path.isdir(units) else [],
    }


def remove_aside(call: Call, releases: str, name: str) -> int | None:
    """Remove a folder of releases, out of sight before its first file goes: the bytes freed; None where it has gone."""
    aside = claim(releases, name, own_token(call.agent, "gone"))
    if aside is None:
        return None
    freed = folder_sizes(aside)["own_bytes"]
    discard(aside)
    return freed


def op_prune(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Remove releases, unit files, leftovers and byte code below a deploy root.

    Which ones is the client's decision; a release that a service points to at this moment stays whatever it says. A
    release leaves its name before its first file goes: nobody ever sees half of one.
    """
    root = args["root"]
    releases = os.path.join(root, "releases")
    removed, refused, freed = [], [], 0
    for digest in args["releases"]:
        call.check()
        folder = os.path.join(releases, digest)
        if not RELEASE_NAME.fullmatch(digest) or os.path.islink(folder):
            raise OpError("refused", f"{digest!r} is not a release")
        services = [service_of(root, unit) for unit in services_of(root)]
        users = [
            item["unit"] for item in services if item["current"] == digest or digest in (item["armed"] or "")
        ]
        if users:
            refused.append([digest, users[0]])
            continue
        size = remove_aside(call, releases, digest)
        if size is not None:
            freed += size
            removed.append(digest)
    swept = 0
    for name in leftovers(releases) if args["leftovers"] and os.path.isdir(releases) else []:
        call.check()
        size = remove_aside(call, releases, name)
        if size is not None:
            freed += size
            swept += 1
    unit_files = 0
    for unit, name in args["unit_files"]:
        if "/" in unit or "/" in name or {unit, name} & {"", ".", ".."}:
            raise OpError("refused", f"{unit}/{name}: is not a kept unit file")
        try:
            os.unlink(os.path.join(root, "services", unit, "units", name))
            unit_files += 1
        except FileNotFoundError:
            pass
    return {
        "removed": removed,
        "refused": refused,
        "leftovers": swept,
        "unit_files": unit_files,
        "programs": idle_programs(root, args["program"]) if args.get("program") else 0,
        "evidence": old_evidence(call, root, float(args.get("evidence_before", 0.0))),
        "byte_code": sweep_byte_code(call, root) if args["byte_code"] else 0,
        "freed_bytes": freed,
        "disk": disk(root),
    }, b""


def idle_programs(root: str, keep: str) -> int:
    """Remove the programs below ``guard/`` but for ``keep`` and what armed rollbacks run; the number of files."""
    folder = os.path.join(root, "guard")
    armed = keep + "".join(service_of(root, unit)["armed"] or "" for unit in services_of(root))
    removed = 0
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if GUARD_PROGRAM.fullmatch(name) and name not in armed:
            os.unlink(os.path.join(folder, name))
            removed += 1
    return removed


def old_evidence(call: Call, root: str, before: float) -> int:
    """Remove the journals that the host itself kept before that time (epoch); the number of folders."""
    removed = 0
    for unit in services_of(root):
        folder = os.path.join(root, "services", unit, "evidence")
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            call.check()
            path = os.path.join(folder, name)
            if os.lstat(path).st_mtime < before:
                discard(path)
                removed += 1
    return removed


def sweep_byte_code(call: Call, root: str) -> int:
    """Remove byte code kept for sources below ``root`` that are there no more; the number of files."""
    cache = os.path.join(root, "pycache")
    removed = 0
    for folder, _, names in os.walk(cache + root, topdown=False):
        call.check()
        source = folder[len(cache) :]
        for name in names:
            match = PYCACHE_FILE.fullmatch(name)
            if match is None or not os.path.exists(os.path.join(source, match.group(1) + ".py")):
                os.unlink(os.path.join(folder, name))
                removed += 1
        if not os.path.isdir(source) and not os.listdir(folder):
            os.rmdir(folder)
    return removed


# ------------------------------------------------------------------------------------------- units, locks


def show_unit(call: Call, unit: str) -> dict[str, str]:
    """What ``systemctl show`` says of a unit, for :data:`PROPERTIES`."""
    argv = ["systemctl", "show", "--no-pager", "--property=" + ",".join(PROPERTIES), "--", unit]
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(None),
        timeout=30,
        check=False,
    )
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0 or "=" not in text:
        said = done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"
        raise OpError("systemctl", f"systemctl show {unit}: {said}", "is systemd running on this host?")
    found = dict.fromkeys(PROPERTIES, "")
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and key in found:
            found[key] = value
    return found


def unread_drop_ins(unit: str, read: Iterable[str], folders: Iterable[str] = UNIT_FOLDERS) -> list[str]:
    """Files that will change a unit's settings at the next daemon-reload, besides those that systemd has ``read``.

    Of several with one name systemd takes the first in this order, and none where that one is empty or a link to
    /dev/null.
    """
    stem, _, kind = unit.rpartition(".")
    parts = stem.split("-")
    names = [stem + "."] + ["-".join(parts[:number]) + "-." for number in range(len(parts) - 1, 0, -1)] + [""]
    found: dict[str, str] = {}
    for folder in [os.path.join(top, f"{name}{kind}.d") for name in names for top in folders]:
        try:
            files = sorted(os.listdir(folder))
        except OSError:
            continue
        for file in files:
            if file.endswith(".conf"):
                found.setdefault(file, os.path.join(folder, file))
    known = set(map(os.path.realpath, read))  # /lib is /usr/lib
    return sorted(
        path for path in found.values() if os.path.realpath(path) not in known and not is_mask(path)
    )


def is_mask(path: str) -> bool:
    try:
        return os.path.realpath(path) == os.devnull or os.stat(path).st_size == 0
    except OSError:
        return False


def op_show_unit(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    unit = args["unit"]
    found = show_unit(call, unit)
    return {**found, "DropInsUnread": "\n".join(unread_drop_ins(unit, found["DropInPaths"].split()))}, b""


def read_bytes(control_group: str) -> int:
    """Bytes that the processes of a control group have read from disk so far."""
    if not control_group.startswith("/"):
        return 0
    total = 0
    for base in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"):
        if not os.path.isfile(base + control_group + "/cgroup.procs"):
            continue
        for folder, _, _ in os.walk(base + control_group):
            try:
                with open(folder + "/cgroup.procs", "rb") as source:
                    pids = source.read().split()
            except OSError:
                continue
            for pid in pids:
                try:
                    with open(b"/proc/" + pid + b"/io", "rb") as source:
                        for line in source:
                            if line.startswith(b"read_bytes:"):
                                total += int(line.split()[1])
                except OSError:
                    continue
        break
    return total


CALM = 1.0
"""Seconds between two looks at a unit whose main process runs: each look costs the host a process and work of PID 1."""


def run_of(unit: str) -> str:
    """Invocation of a unit's current run as the service manager notes it for journald; empty: none, or not noted."""
    try:
        return os.readlink("/run/systemd/units/invocation:" + unit)
    except (OSError, ValueError):
        return ""


def op_watch_unit(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    unit, interval = args["unit"], max(0.05, float(args["interval"]))
    last: dict[str, str] | None = None
    next_tick = time.monotonic() + 5.0
    while not call.cancelled.is_set():
        run = run_of(unit)
        found = show_unit(call, unit)
        seen = {key: value for key, value in found.items() if key not in VOLATILE}
        if seen != last:
            call.emit({"event": "unit", "properties": found, "time": time.time()})
            last = seen
        pid = found["MainPID"] if found["MainPID"].isdigit() and found["MainPID"] != "0" else ""
        calm = pid and (found["ActiveState"], found["SubState"]) == ("active", "running")
        until = time.monotonic() + (max(interval, CALM) if calm else interval)
        while time.monotonic() < until:
            if call.cancelled.wait(min(0.05, interval)):
                break
            if run_of(unit) != run or (pid and not os.path.exists("/proc/" + pid)):
                break
        if time.monotonic() >= next_tick:
            call.emit({"event": "tick", "time": time.time(), "read_bytes": read_bytes(found["ControlGroup"])})
            next_tick = time.monotonic() + 5.0
    return {}, b""


LOCK_ROOM = 1024
"""Bytes a lock file is padded to: it is renewed in place, which a full disk does not keep from happening."""


class Mutex:
    """A short exclusive lock on a folder: whoever reads a lock file in it to decide, and writes it, holds this."""

    def __init__(self, folder: str, patience: float = 30.0) -> None:
        self.folder = folder
        self.patience = patience
        self.descriptor = -1

    def __enter__(self) -> Mutex:
        self.descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        until = time.monotonic() + self.patience
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > until:
                    os.close(self.descriptor)
                    raise
            time.sleep(0.01)

    def __exit__(self, *error: Any) -> None:
        os.close(self.descriptor)


def boottime() -> float:
    """Seconds since boot, suspended time included: steps of the wall clock do not move it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    return text_of("/proc/sys/kernel/random/boot_id")


def read_lock(path: str) -> dict[str, Any] | None:
    """What the holder of a lock wrote; None where nobody holds it. It may be out of date: see :func:`lock_left`."""
    try:
        with open(path, "rb") as source:
            found = json.loads(source.read(65536))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("id") else None


def lock_left(found: dict[str, Any] | None) -> float:
    """Seconds for which a lock still holds, 0.0 where it holds no more: its lease ran out, or the host was booted."""
    try:
        if found is None or found["boot_id"] != boot_id():
            return 0.0
        return max(0.0, float(found["boottime"]) + float(found["lease_s"]) - boottime())
    except (KeyError, TypeError, ValueError):
        return 0.0


class Lease:
    """A lock of this agent's client. It counts from the last sign of life of the client, not of the agent."""

    def __init__(self, agent: Agent, path: str, owner: dict[str, Any], seconds: float) -> None:
        self.agent = agent
        self.path = path
        self.folder = os.path.dirname(path) or "."
        self.over = threading.Event()
        self.content = dict(
            owner,
            schema=1,
            since=time.time(),
            lease_s=seconds,
            agent_pid=os.getpid(),
            boot_id=boot_id(),
        )

    def heard(self) -> float:
        """When the client was last heard, in :func:`boottime`; now, while it is being fed faster than it can take."""
        silent = 0.0 if self.agent._feeding else time.monotonic() - self.agent.heard
        return boottime() - silent

    def write(self) -> None:
        values = dict(self.content, renewed=time.time(), boottime=self.heard())
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            data = (json.dumps(values).encode()).ljust(LOCK_ROOM - 1) + b"\n"
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)

    def mine(self, found: dict[str, Any] | None) -> bool:
        return found is not None and found["id"] == self.content["id"]

    def renew(self) -> bool:
        """False where the lock is somebody else's now, or nobody's: it was broken."""
        with Mutex(self.folder):
            if not self.mine(read_lock(self.path)):
                self.over.set()
                return False
            self.write()
            return True

    def keep(self) -> None:
        """Renew until the lock is given up or lost."""
        while not self.over.wait(min(BEAT, self.content["lease_s"] / 4)):
            try:
                self.renew()
            except OSError:  # the lease runs on; the next look may do better
                continue

    def give_up(self, patience: float = 30.0) -> bool:
        self.over.set()
        try:
            with Mutex(self.folder, patience):
                if self.mine(read_lock(self.path)):
                    os.unlink(self.path)
                    return True
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EAGAIN, errno.EACCES):
                raise
        return False


def op_lock(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    lease = Lease(call.agent, args["path"], args["owner"], float(args["lease"]))
    os.makedirs(lease.folder, exist_ok=True)
    with Mutex(lease.folder):
        found = read_lock(lease.path)
        left = lock_left(found)
        if left > 0:
            return {"taken": False, "holder": found, "left_s": left}, b""
        lease.write()
    with call.agent.guard:
        call.agent.leases[lease.path] = lease
    threading.Thread(target=lease.keep, daemon=True).start()
    return {"taken": True}, b""


def op_lock_check(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Who holds a lock, and whether it is the one with ``id``. The holder's own agent renews it first."""
    with call.agent.guard:
        lease = call.agent.leases.get(args["path"])
    if lease is not None and not lease.over.is_set():
        lease.renew()
    found = read_lock(args["path"])
    left = lock_left(found)
    held = found is not None and left > 0 and found["id"] == args.get("id")
    return {"held": held, "holder": found, "left_s": left}, b""


def op_lock_break(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Take a lock away from its holder, where that is still the one with ``id``."""
    path = args["path"]
    try:
        with Mutex(os.path.dirname(path) or "."):
            found = read_lock(path)
            if found is None or found["id"] != args["id"]:
                return {"broken": False, "holder": found}, b""
            os.unlink(path)
    except FileNotFoundError:
        return {"broken": False, "holder": None}, b""
    return {"broken": True, "holder": found}, b""


def op_unlock(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    with call.agent.guard:
        lease = call.agent.leases.pop(args["path"], None)
    return {"released": lease is not None and lease.give_up()}, b""


# --------------------------------------------------------------------------------------------------- http


def op_http(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    import http.client
    import socket

    kind = http.client.HTTPSConnection if args["scheme"] == "https" else http.client.HTTPConnection
    link = kind(args["host"], int(args["port"]), timeout=args.get("connect_timeout"))
    answer: http.client.HTTPResponse | None = None
    try:
        try:
            link.connect()
        except (socket.timeout, TimeoutError):
            raise OpError("http_connect_timeout", "no connection within the time-out") from None
        except OSError as error:
            raise OpError(
                "http_connect", f"{args['host']}:{args['port']}: {error.strerror or error}"
            ) from None
        wire = link.sock
        wire.settimeout(args.get("read_timeout"))

        def cut() -> None:
            """Wake whoever reads, and have the close send a reset: a server that waits for room must notice too."""
            try:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                wire.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

        call.when_cancelled(cut)
        try:
            link.putrequest(args["method"], args["target"], skip_host=True, skip_accept_encoding=True)
            for name, value in args["headers"]:
                link.putheader(name, value)
            link.endheaders(data or None)
            answer = link.getresponse()
            head = {"status": answer.status, "reason": answer.reason, "headers": answer.getheaders()}
            call.emit({"event": "response", "version": answer.version, **head})
            while True:
                piece = answer.read1(65536)
                if not piece:
                    break
                call.emit({"event": "body"}, piece)
            if answer.length:
                raise OpError("http_protocol", f"the body ended {answer.length} bytes early")
        except (socket.timeout, TimeoutError):
            raise OpError("http_read_timeout", "no answer within the time-out") from None
        except http.client.HTTPException as error:
            raise OpError("http_protocol", f"{type(error).__name__}: {error}".rstrip(": ")) from None
        except OSError as error:
            raise OpError("http_read", f"{error.strerror or error}") from None
    finally:
        if answer is not None:
            answer.close()
        link.close()
    return {}, b""


# -------------------------------------------------------------------------------------------------- batch

UNBATCHED = frozenset({"batch", "stream", "watch_unit", "http", "publish_send"})


def op_ping(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    return {"time": time.time()}, data


def op_batch(call: Call, args: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    results, answers, start = [], [], 0
    for item in args["requests"]:
        part, start = data[start : start + item["size"]], start + item["size"]
        try:
            call.check()
            if item["op"] in UNBATCHED:
                raise OpError("unknown_op", f"{item['op']}: not in a batch")
            values, answer = perform(call, item["op"], item["args"], part)
            results.append({"ok": True, "values": values, "size": len(answer)})
            answers.append(answer)
        except Exception as error:
            results.append({"ok": False, "error": describe(error)})
    return {"results": results}, b"".join(answers)


OPS: dict[str, Callable[[Call, dict[str, Any], bytes], tuple[Any, bytes]]] = {
    "append_line": op_append_line,
    "batch": op_batch,
    "check_release": op_check_release,
    "disk": op_disk,
    "hash_tree": op_hash_tree,
    "http": op_http,
    "list_dir": op_list_dir,
    "lock": op_lock,
    "lock_break": op_lock_break,
    "lock_check": op_lock_check,
    "ping": op_ping,
    "program": op_program,
    "prune": op_prune,
    "publish": op_publish,
    "publish_abort": op_publish_abort,
    "publish_send": op_publish_send,
    "read_file": op_read_file,
    "remove_tree": op_remove_tree,
    "run": op_run,
    "show_unit": op_show_unit,
    "stream": op_stream,
    "survey": op_survey,
    "swap_link": op_swap_link,
    "unlock": op_unlock,
    "watch_unit": op_watch_unit,
    "write_file": op_write_file,
}


def text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as source:
            return source.read().strip()
    except OSError:
        return ""


def facts() -> dict[str, Any]:
    """What is told of this host when the agent starts; ``time`` is the host's clock, seconds since the epoch."""
    import pwd

    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return {
        "hostname": os.uname().nodename,
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "python": ".".join(map(str, sys.version_info[:3])),
        "uid": uid,
        "user": user,
        "pid": os.getpid(),
        "boot_id": boot_id(),
        "machine_id": text_of("/etc/machine-id"),
        "time": time.time(),
    }


def main() -> None:
    """Serve stdin until it closes. File descriptor 1 is moved away so that nothing else can print into the frames."""
    sink = os.dup(1)
    os.dup2(2, 1)
    os.umask(0o022)
    os.chdir("/")
    signal.signal(signal.SIGINT, lambda number, frame: None)
    agent = Agent(sys.stdin.buffer, sink)

    def leave(number: int, frame: Any) -> None:
        threading.Thread(target=agent.end, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    write_all(sink, MARKER)
    agent.send({"hello": facts()})
    agent.serve()


if __name__ == "__main__":
    main()
