"""One session per host: typed requests and replies over one connection and one agent process.

A session works over any :class:`~ddtree_ops.remote.protocol.Transport`: an SSH channel
(:func:`ddtree_ops.remote.connect`) or the pipes of a child process (:func:`ddtree_ops.remote.connect_local`).
Arguments travel as data in frames and are never shell text. Every request has a deadline, in seconds, which the
agent enforces; this side waits :data:`GRACE` seconds longer and then gives up by itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ddtree_ops.errors import DeadlineError, LockLost, OpsError, RemoteError, SudoError, UnreachableError
from ddtree_ops.remote.files import FileEntry, SharedReads
from ddtree_ops.remote.protocol import PIECE, FrameReader, ProtocolError, Transport, encode

if TYPE_CHECKING:
    import httpx

__all__ = [
    "AgentError",
    "Completed",
    "DirEntry",
    "Disk",
    "FileEntry",
    "LockState",
    "PublishResult",
    "Reply",
    "Request",
    "Session",
    "Stream",
    "answers",
    "explain_start",
]

GRACE = 5.0
"""Seconds that a reply may take beyond the deadline that the agent itself enforces."""
BEAT = 10.0
"""Seconds between two signs of life to the agent."""
SILENCE = 60.0
"""Seconds without any sign of life from the agent after which the connection is taken for dead."""

_shared = SharedReads()
_EVENT_COST = 256
_ACK_AT = 1 << 20

Frame = tuple[Mapping[str, Any], bytes]


@dataclass(frozen=True)
class Request:
    """A request as a value: the agent's operation, its arguments, raw bytes."""

    op: str
    args: Mapping[str, Any]
    data: bytes = b""


@dataclass(frozen=True)
class Reply:
    """Answer to a request: JSON-like values and raw bytes."""

    values: Mapping[str, Any]
    data: bytes = b""


def answers(replies: Iterable[Reply | Exception]) -> list[Reply]:
    """The replies of a batch that has to succeed as a whole; the first failure is raised."""
    found: list[Reply] = []
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
        found.append(reply)
    return found


@dataclass(frozen=True)
class Completed:
    """A finished command on the host.

    :param rc: exit status, negative for a signal; 127 where the command was not found, 126 where it may not be run.
    :param truncated: an output was longer than 64 MiB and its rest was dropped.
    """

    argv: tuple[str, ...]
    rc: int
    stdout: bytes
    stderr: bytes
    truncated: bool = False

    @property
    def text(self) -> str:
        """stdout decoded as UTF-8 with replacement."""
        return self.stdout.decode("utf-8", "replace")


@dataclass(frozen=True)
class PublishResult:
    """Outcome of publishing a release.

    :param created: False where the release was already there and every byte of it was right.
    :param sent_files: files that travelled, ``sent_bytes`` in all; ``linked_files`` came from other releases.
    :param resumed_files: had arrived with an earlier push that broke off, and were verified again.
    :param repaired: what was wrong with the release that was there, one problem an entry; empty otherwise.
    """

    release_dir: str
    created: bool
    files: int
    sent_files: int
    sent_bytes: int
    linked_files: int
    repaired: tuple[str, ...] = ()
    resumed_files: int = 0


@dataclass(frozen=True)
class DirEntry:
    """One entry of a directory; ``kind`` is ``dir``, ``file``, ``link`` or ``other``, ``size`` in bytes, ``mtime`` epoch."""

    name: str
    kind: str
    mode: int
    size: int
    mtime: float
    target: str | None = None


@dataclass(frozen=True)
class Disk:
    """Space of the file system that holds ``path``; inodes are None where the file system does not count them."""

    path: str
    block_size: int
    total_bytes: int
    free_bytes: int
    total_inodes: int | None
    free_inodes: int | None


@dataclass(frozen=True)
class LockState:
    """A lock on a host.

    :param held: by the id that was asked about.
    :param holder: what its holder wrote, also where it holds no more; None: nobody has it.
    :param left_s: seconds it still holds without a further sign of its holder's life; 0.0: it holds no more.
    """

    held: bool
    holder: Mapping[str, Any] | None
    left_s: float


def explain_start(
    stdout: str, stderr: str, status: int | None, *, host: str, python: str = "python3"
) -> OpsError:
    """Why no agent came up, from what the host printed instead. Pure."""
    said = "\n".join(part for part in (stderr.strip(), stdout.strip()) if part)
    details = tuple(said.splitlines()[-8:])
    low = said.lower()
    start: dict[str, Any] = {"host": host, "phase": "connect", "details": details}
    if "sudo" in low and any(
        text in low
        for text in (
            "password is required",
            "not in the sudoers",
            "not allowed",
            "terminal is required",
            "must have a tty",
        )
    ):
        return SudoError(
            "sudo -n was refused: this user may not become root without a password",
            hint=f"connect as root, or allow this user NOPASSWD in sudoers for {python}; try: ssh HOST sudo -n true",
            **start,
        )
    if re.search(r"sudo\W{0,3}: *(command |no such file|not found)", low):
        return SudoError(
            "sudo is not installed", hint="connect as root, or install sudo on the host", **start
        )
    if "python 3.8 or newer" in low:
        return RemoteError(
            f"{python} is too old",
            hint="name a Python >= 3.8 of the host in the inventory: ssh.python",
            **start,
        )
    if status in (126, 127) or "not found" in low or "no such file" in low:
        return RemoteError(
            f"{python} was not found",
            hint="install Python >= 3.8 there, or name its path in the inventory: ssh.python",
            **start,
        )
    how = "the connection closed" if status is None else f"exit status {status}"
    return RemoteError(
        f"the agent did not start ({how})",
        hint=f"try: ssh HOST {python} --version, and look at the user's shell",
        **start,
    )


_IN_THE_WAY = frozenset(("not_a_file", "too_large", "EACCES", "EISDIR", "ELOOP", "ENOTDIR", "EPERM"))
"""Codes of the agent for a path at which something else lies than we put there."""


class AgentError(RemoteError):
    """A failure that the agent reported; ``code`` is its stable name (``no_space``, ``refused``, ``ENOENT`` ...)."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        host: str,
        state: str = "",
        hint: str = "",
        details: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, host=host, state=state, hint=hint, details=details)
        self.code = code


class _Call:
    """A request under way on this side: where its frames arrive."""

    def __init__(self, number: int, op: str) -> None:
        self.number = number
        self.op = op
        self.frames: SimpleQueue[Frame | None] = SimpleQueue()


class Stream:
    """Output of a long-running request; iterate for events, ``close()`` to end it on the host too.

    Each event is ``(values, data)``; ``values["event"]`` names it. Iteration ends when the request ends; it raises
    the request's error, or UnreachableError where the connection was lost.
    """

    def __init__(self, session: Session, call: _Call) -> None:
        self._session = session
        self._call = call
        self._ended = False
        self._unacked = 0

    def __iter__(self) -> Iterator[Frame]:
        while not self._ended:
            event = self.get(3600.0)
            if event is not None:
                yield event

    def get(self, timeout: float) -> Frame | None:
        """Next event, or None after ``timeout`` seconds without one (``ended`` tells the two apart).

        :raises RemoteError: the request failed. :raises UnreachableError: the connection was lost.
        """
        if self._ended:
            return None
        try:
            frame = self._call.frames.get(timeout=max(0.0, timeout))
        except Empty:
            return None
        if frame is None:
            self._ended = True
            raise self._session._lost_error(self._call.op)
        head, data = frame
        if "event" in head:
            self._unacked += len(data) + _EVENT_COST
            if self._unacked >= _ACK_AT:
                self._session._post(
                    {"op": "ack", "to": self._call.number, "n": self._unacked}, op=self._call.op
                )
                self._unacked = 0
            return head["event"], data
        self._ended = True
        self._session._forget(self._call)
        if not head["ok"]:
            raise self._session._error(head["error"], self._call.op)
        return None

    @property
    def ended(self) -> bool:
        """True once the last event was taken, the request failed, or the stream was closed."""
        return self._ended

    def close(self) -> None:
        """End the request on the host too. May be called twice, and after the connection was lost."""
        if not self._ended:
            self._ended = True
            self._session._cancel(self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class Session:
    """A connected host. Thread-safe: several requests and streams may be under way at once.

    Use as a context manager. Obtain one with :func:`ddtree_ops.remote.connect`.

    :param transport: bytes to and from the agent's process.
    :param host: name used in errors.
    :param start: what the process reads before it speaks frames (the agent's source).
    :param deadline: seconds the agent may take to come up.
    :param python: interpreter on the host, for error messages.
    :raises RemoteError: no agent came up; :raises SudoError: because sudo refused.
    """

    host: str
    round_trips: int

    def __init__(
        self,
        transport: Transport,
        *,
        host: str,
        start: bytes = b"",
        deadline: float = 30.0,
        python: str = "python3",
    ) -> None:
        self.host = host
        self.round_trips = 0
        self._transport = transport
        self._guard = threading.RLock()
        self._sending = threading.Lock()
        self._cancels: SimpleQueue[int | None] = SimpleQueue()
        self._calls: dict[int, _Call] = {}
        self._last = 0
        self._closed = threading.Event()
        self._reason = ""
        self._garbage: str | None = None
        self._facts: dict[str, Any] = {}
        self._hello: SimpleQueue[bool] = SimpleQueue()
        self._heard = time.monotonic()
        self._pace = BEAT
        self._reader = threading.Thread(target=self._read, name=f"session-{host}", daemon=True)
        self._reader.start()
        try:
            self._greet(start, deadline, python)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._beat, name=f"beat-{host}", daemon=True).start()
        self._teller = threading.Thread(target=self._tell_cancels, name=f"cancel-{host}", daemon=True)
        self._teller.start()

    def _greet(self, start: bytes, deadline: float, python: str) -> None:
        with suppress(OSError):
            self._transport.send(start)
        try:
            up = self._hello.get(timeout=deadline)
        except Empty:
            raise RemoteError(
                f"the agent did not start within {deadline:.0f} s",
                host=self.host,
                phase="connect",
                hint="the host is overloaded, or the user's shell start-up files wait for input",
                details=tuple(self._transport.diagnostics().splitlines()[-8:]),
            ) from None
        if not up:
            raise explain_start(
                self._garbage or "",
                self._transport.diagnostics(),
                self._transport.status(),
                host=self.host,
                python=python,
            )

    # ------------------------------------------------------------------------------------- the wire

    def _read(self) -> None:
        frames = FrameReader(self._transport.recv)
        reason = "the connection was closed by the host"
        try:
            try:
                frames.skip_to_marker()
            except ProtocolError as error:
                self._garbage = str(error)
                return
            while (frame := frames.read()) is not None:
                self._heard = time.monotonic()
                self._dispatch(*frame)
        except (OSError, EOFError, ProtocolError) as error:
            reason = f"the connection broke: {error}"
        finally:
            self._lose(reason)
            self._hello.put(False)

    def _dispatch(self, head: dict[str, Any], data: bytes) -> None:
        if "id" in head:
            with self._guard:
                call = self._calls.get(head["id"])
            if call is not None:
                call.frames.put((head, data))
        elif "hello" in head:
            facts = dict(head["hello"])
            facts["clock_skew_s"] = facts["time"] - time.time()
            self._facts = facts
            self._hello.put(True)

    def _beat(self) -> None:
        spoke = time.monotonic()
        while not self._closed.wait(min(1.0, self._pace)):
            if time.monotonic() - spoke < self._pace:
                continue
            spoke = time.monotonic()
            silent = time.monotonic() - self._heard
            if silent > SILENCE:
                self._lose(f"no sign of life for {silent:.0f} s")
                self._transport.abort()
                return
            if self._sending.acquire(blocking=False):
                try:
                    self._transport.send(encode({"op": "beat"}))
                except OSError as error:
                    self._lose(f"the connection broke: {error}")
                    return
                finally:
                    self._sending.release()

    def _tell_cancels(self) -> None:
        with suppress(UnreachableError):
            for number in iter(self._cancels.get, None):
                self._post({"op": "cancel", "to": number}, op="cancel")

    def _end(self, reason: str) -> None:
        """Nothing is sent from now on; the first reason stays."""
        with self._guard:
            if not self._closed.is_set():
                self._reason = reason
                self._closed.set()
                self._cancels.put(None)

    def _lose(self, reason: str) -> None:
        with self._guard:
            self._end(reason)
            calls = list(self._calls.values())
        for call in calls:
            call.frames.put(None)

    def _lost_error(self, op: str) -> UnreachableError:
        return UnreachableError(
            f"{self._reason or 'the session is closed'} (during {op})",
            host=self.host,
            state="what the request did on the host is unknown; units keep running",
            hint="check the network and the host, then run the command again",
            details=tuple(self._transport.diagnostics().splitlines()[-4:]),
        )

    def _post(self, head: Mapping[str, Any], data: bytes = b"", *, op: str) -> None:
        """Send a frame. :raises UnreachableError: the connection is gone."""
        if self._closed.is_set():
            raise self._lost_error(op)
        frame = encode(head, data)
        try:
            with self._sending:
                if self._closed.is_set():
                    raise self._lost_error(op)
                for start in range(0, len(frame), PIECE):
                    self._transport.send(frame[start : start + PIECE])
        except OSError as error:
            self._lose(f"the connection broke: {error}")
            raise self._lost_error(op) from error

    def _open(self, op: str, args: Mapping[str, Any], data: bytes = b"", *, deadline: float | None) -> _Call:
        with self._guard:
            self._last += 1
            self.round_trips += 1
            call = self._calls[self._last] = _Call(self._last, op)
        try:
            self._post({"id": call.number, "op": op, "args": dict(args), "deadline": deadline}, data, op=op)
        except BaseException:
            self._forget(call)
            raise
        return call

    def _forget(self, call: _Call) -> None:
        with self._guard:
            self._calls.pop(call.number, None)

    def _cancel(self, call: _Call) -> None:
        """Another thread tells the agent: an abandoned stream is closed by the garbage collector, which may come while
        this very thread holds a lock or is half-way through a frame."""
        self._forget(call)
        self._cancels.put(call.number)

    def _await(self, call: _Call, deadline: float) -> Frame:
        try:
            frame = call.frames.get(timeout=max(0.0, deadline) + GRACE)
        except Empty:
            raise DeadlineError(
                f"{call.op}: no answer from the host within {deadline:g} s",
                host=self.host,
                hint="the host is overloaded or a disk hangs; check it, then run the command again",
            ) from None
        if frame is None:
            raise self._lost_error(call.op)
        return frame

    def _result(self, call: _Call, deadline: float) -> Reply:
        try:
            head, data = self._await(call, deadline)
        except BaseException:
            self._cancel(call)
            raise
        self._forget(call)
        if not head["ok"]:
            raise self._error(head["error"], call.op, deadline)
        return Reply(head["values"], data)

    def _error(self, error: Mapping[str, Any], op: str, deadline: float | None = None) -> OpsError:
        message, hint, details = (
            f"{op}: {error['message']}",
            error.get("hint", ""),
            tuple(error.get("details", ())),
        )
        if error["code"] in ("ENOSPC", "EDQUOT") and not hint:
            hint = f"make room on the host: ddtree-ops prune {self.host}"
        path = error["message"].rpartition(": ")[0]
        if error["code"] in _IN_THE_WAY and path.startswith("/") and not hint:
            hint = f"see what lies there: ssh {self.host} ls -ld {shlex.quote(path)}"
        if error["code"] == "lock_lost":
            hint = f"ddtree-ops history {self.host}; ddtree-ops status {self.host}"
            return LockLost(error["message"], host=self.host, hint=hint)
        if error["code"] == "deadline":
            limit = "" if deadline is None else f" ({deadline:g} s)"
            return DeadlineError(message + limit, host=self.host, hint=hint, details=details)
        state = ""
        if error["code"] == "no_space":
            state = "no half release was left there; what serves keeps serving"
            hint = f"ddtree-ops prune {self.host}   (or {hint})"
        return AgentError(
            message, code=error["code"], host=self.host, state=state, hint=hint, details=details
        )

    # ------------------------------------------------------------------------------------- requests

    def request(
        self, op: str, args: Mapping[str, Any] | None = None, *, data: bytes = b"", deadline: float = 30.0
    ) -> Reply:
        """One round trip.

        :raises RemoteError: the agent's error. :raises DeadlineError: no answer in time.
        :raises UnreachableError: the connection was lost.
        """
        return self.begin(op, args, data=data, deadline=deadline)()

    def begin(
        self, op: str, args: Mapping[str, Any] | None = None, *, data: bytes = b"", deadline: float = 30.0
    ) -> Callable[[], Reply]:
        """Send a request and go on while the host works; what is returned waits for the reply, as :meth:`request`."""
        call = self._open(op, args or {}, data, deadline=deadline)
        return lambda: self._result(call, deadline)

    def batch(self, requests: Sequence[Request], *, deadline: float = 60.0) -> list[Reply | Exception]:
        """Several requests, run in order, in one round trip. A failing one yields its error in place."""
        return self.begin_batch(requests, deadline=deadline)()

    def ask(self, requests: Sequence[Request], *, deadline: float = 60.0) -> list[Reply]:
        """:meth:`batch` of requests that all have to succeed: the first failure is raised. No round trip without one."""
        return answers(self.batch(requests, deadline=deadline)) if requests else []

    def begin_batch(
        self, requests: Sequence[Request], *, deadline: float = 60.0
    ) -> Callable[[], list[Reply | Exception]]:
        """Send a batch and go on while the host works; what is returned waits for the replies, as :meth:`batch`."""
        listed = [{"op": item.op, "args": dict(item.args), "size": len(item.data)} for item in requests]
        data = b"".join(item.data for item in requests)
        replied = self.begin("batch", {"requests": listed}, data=data, deadline=deadline)

        def replies() -> list[Reply | Exception]:
            reply = replied()
            found: list[Reply | Exception] = []
            start = 0
            for item, result in zip(requests, reply.values["results"], strict=True):
                if result["ok"]:
                    found.append(Reply(result["values"], reply.data[start : start + result["size"]]))
                    start += result["size"]
                else:
                    found.append(self._error(result["error"], item.op, deadline))
            return found

        return replies

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        deadline: float = 60.0,
        check: bool = False,
    ) -> Completed:
        """Run a command (no shell) as root with LC_ALL=C; its process group is killed at the deadline.

        :param check: a non-zero rc raises RemoteError with the end of the output.
        """
        args = {"argv": list(argv), "env": dict(env or {}), "cwd": cwd}
        reply = self.request("run", args, data=input, deadline=deadline)
        split = reply.values["stdout"]
        done = Completed(
            tuple(argv), reply.values["rc"], reply.data[:split], reply.data[split:], reply.values["truncated"]
        )
        if check and done.rc != 0:
            how = f"exit status {done.rc}" if done.rc > 0 else f"signal {-done.rc}"
            said = (done.stderr.strip() or done.stdout.strip()).decode("utf-8", "replace")
            raise RemoteError(
                f"{argv[0]} failed: {how}", host=self.host, details=tuple(said.splitlines()[-20:])
            )
        return done

    def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes | None:
        """Content of a regular file, or None where it does not exist. :raises RemoteError: larger than ``max_bytes``."""
        reply = self.request("read_file", {"path": path, "max_bytes": max_bytes}, deadline=120.0)
        return reply.data if reply.values["found"] else None

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        """Write atomically (temporary file, fsync, rename), only when content or mode differ; creates the folder.

        :returns: True when something changed.
        """
        reply = self.request("write_file", {"path": path, "mode": mode}, data=data, deadline=120.0)
        return bool(reply.values["changed"])

    def append_line(self, path: str, line: str) -> None:
        """Append one line (no line break inside) with fsync; creates the file and its folder."""
        self.request("append_line", {"path": path}, data=line.encode("utf-8", "surrogateescape"))

    def swap_link(self, link: str, target: str) -> str | None:
        """Point a symbolic link somewhere else atomically (temporary link, rename). Returns the old target.

        :raises RemoteError: ``link`` is there and is not a symbolic link.
        """
        old = self.request("swap_link", {"link": link, "target": target}).values["old"]
        return None if old is None else str(old)

    def hash_tree(self, root: str, *, deadline: float = 120.0) -> list[FileEntry] | None:
        """sha256 of every regular file below ``root``, computed on the host, sorted by path; None if absent.

        Modes are told as :func:`~ddtree_ops.remote.files.scan_tree` tells them (0o755 for executables, else 0o644)
        and byte code folders (``__pycache__``) are left out as it leaves them out: the two can be compared.
        """
        reply = self.request("hash_tree", {"root": root}, deadline=deadline)
        if not reply.values["found"]:
            return None
        return [FileEntry(*row) for row in json.loads(reply.data)]

    def list_dir(self, path: str) -> list[DirEntry] | None:
        """Entries of a directory sorted by name, or None where it does not exist."""
        values = self.request("list_dir", {"path": path}).values
        return [DirEntry(**entry) for entry in values["entries"]] if values["found"] else None

    def disk(self, path: str) -> Disk:
        """Space of the file system where ``path`` is or would be made."""
        return Disk(**self.request("disk", {"path": path}).values)

    def remove_tree(self, path: str, *, below: str) -> None:
        """Remove a tree (read-only ones too) that lies below ``below``; refuses anything else. Absent is fine."""
        self.request("remove_tree", {"path": path, "below": below}, deadline=120.0)

    def publish(
        self,
        source: Path,
        files: Sequence[FileEntry],
        *,
        releases_dir: str,
        digest: str,
        manifest: bytes,
        progress: Any = None,
        deadline: float = 900.0,
    ) -> PublishResult:
        """Bring a tree to ``releases_dir/digest`` (read-only, plus ``manifest.json``).

        One round trip where the release is already there and right, else two, however many files: what other
        releases already have is hard-linked (found by the sha256 in their ``manifest.json``, verified by hashing),
        the rest travels as one stream, everything is verified by sha256 in a staging folder, then renamed. A release
        that is already there is verified on disk (every file) and rebuilt if damaged. What had arrived with a push that
        broke off is hashed again and does not travel again. Space and inodes are checked first.
        ``progress(done_bytes, total_bytes)`` is called while sending. Like rsync, file data is not forced to disk: a
        power cut within seconds may damage it, which the next publish finds and repairs.

        :param manifest: JSON with a ``files`` list of objects with ``path`` and ``sha256``.
        :raises RemoteError: no space, verification failed; the host keeps no half release.
        """
        rows = [[entry.path, entry.mode, entry.size, entry.sha256] for entry in files]
        listing = json.dumps(rows, separators=(",", ":")).encode()
        args = {"releases_dir": releases_dir, "digest": digest, "listing": len(listing)}
        ends = time.monotonic() + deadline
        begun = self.request("publish", args, data=listing + manifest, deadline=deadline).values
        release = f"{releases_dir.rstrip('/')}/{digest}"
        if not begun["created"]:
            return PublishResult(release, False, len(files), 0, 0, 0)
        needed = [files[number] for number in begun["needed"]]
        total = sum(entry.size for entry in needed)
        try:
            left = max(1.0, ends - time.monotonic())
            call = self._open("publish_send", {"token": begun["token"]}, deadline=left)
            try:
                self._feed(call, source, needed, total, progress)
            except BaseException:
                self._cancel(call)
                raise
            values = self._result(call, max(1.0, ends - time.monotonic())).values
        except BaseException:
            if not self._closed.is_set():
                self._abort_push(begun["token"])
            raise
        return PublishResult(
            release,
            values["created"],
            len(files),
            len(needed),
            total,
            begun["linked"],
            tuple(values["problems"]),
            begun["resumed"],
        )

    def begin_check(
        self, *, releases_dir: str, digest: str, manifest: bytes, deadline: float = 900.0
    ) -> Callable[[], bool]:
        """Have the host hash every file of a release and go on; what is returned waits for the answer.

        One round trip that carries no list of files: the release's own ``manifest.json`` says what it holds, if it
        has the sha256 of ``manifest``. The answer is True where the release is there and every byte of it is right;
        else :meth:`publish` finds out what is wrong and mends it.

        :param manifest: as for :meth:`publish`, each file with ``mode`` and ``size`` too.
        """
        args = {
            "releases_dir": releases_dir,
            "digest": digest,
            "manifest": hashlib.sha256(manifest).hexdigest(),
        }
        replied = self.begin("check_release", args, deadline=deadline)
        return lambda: bool(replied().values["whole"])

    def _abort_push(self, token: str) -> None:
        try:
            self.request("publish_abort", {"token": token}, deadline=30.0)
        except OpsError:
            return

    def _feed(
        self, call: _Call, source: Path, needed: Sequence[FileEntry], total: int, progress: Any
    ) -> None:
        """Send files as one stream of pieces; stops early where the agent has already answered (with an error)."""
        head = {"op": "data", "to": call.number}
        buffer = bytearray()
        done = 0
        for entry in needed:
            for piece in self._pieces(source, entry):
                buffer += piece
                while len(buffer) >= PIECE:
                    if not call.frames.empty():
                        return
                    self._post(head, bytes(buffer[:PIECE]), op=call.op)
                    del buffer[:PIECE]
                    done += PIECE
                    if progress is not None:
                        progress(done, total)
        self._post({**head, "end": True}, bytes(buffer), op=call.op)
        if progress is not None:
            progress(total, total)

    def _pieces(self, source: Path, entry: FileEntry) -> Iterator[bytes]:
        """Content of a file to be sent. :raises RemoteError: it cannot be read or has not the size that was listed."""
        left = entry.size
        try:
            for piece in _shared.pieces(source, entry, PIECE):
                left -= len(piece)
                yield piece
        except OSError as error:
            problem = f"{entry.path} cannot be read here any more: {error.strerror}"
        else:
            if not left:
                return
            problem = (
                f"{entry.path} has changed since it was listed: {entry.size - left} bytes, not {entry.size}"
            )
        raise RemoteError(
            problem,
            host=self.host,
            phase="push",
            state="the host keeps no half release",
            hint="build the runtime again",
        )

    def stream(self, argv: Sequence[str], *, deadline: float | None = None) -> Stream:
        """Run a command and stream its output.

        Events are ``{"event": "stdout"|"stderr"}`` + bytes, last ``{"event": "exit", "rc": n}``. With a
        ``deadline`` (seconds) the command is killed then and the stream raises DeadlineError.
        """
        return Stream(self, self._open("stream", {"argv": list(argv)}, deadline=deadline))

    def watch_unit(self, unit: str, *, interval: float = 0.2) -> Stream:
        """Stream the unit's state: ``{"event": "unit", "properties": {...}, "time": epoch}`` at once, then on change.

        Properties are those of ``systemctl show`` that :data:`ddtree_ops.remote.agent.PROPERTIES` names, as text.
        The unit is looked at every ``interval`` seconds, once a second where it is active and its main process runs,
        and within 50 ms of the death of that process or the start of another run.
        ``{"event": "tick", "time": epoch, "read_bytes": n}`` every 5 s (``read_bytes``: sum of /proc/PID/io
        read_bytes over the unit's control group, for progress).
        """
        return Stream(self, self._open("watch_unit", {"unit": unit, "interval": interval}, deadline=None))

    def acquire_lock(
        self, path: str, owner: Mapping[str, Any], *, lease: float = 60.0
    ) -> Mapping[str, Any] | None:
        """Take a lock on the host. It holds while this client is heard, and is freed when the session ends.

        The agent renews it as long as it hears from this side, which speaks at least four times a ``lease``. A killed
        client frees it at once, through its closed connection; a killed agent or a dead network after ``lease``
        seconds without a sign of life. It holds no longer than the boot of the host in which it was taken.

        From then on the agent refuses this session's changes (files, links, history, starting and stopping units)
        where the lock is not its own any more: :class:`~ddtree_ops.errors.LockLost`. So a client that was frozen
        while somebody else took over does no harm when it wakes up.

        :param owner: what others are told: ``who``, ``origin``, ``command``; ``id`` names the lock, left out one is
            made.
        :returns: None when taken, else what the holder wrote: ``owner`` plus ``since`` and ``renewed`` (epoch, the
            host's clock), ``lease_s``, ``agent_pid``, and ``left_s``, the seconds it holds without a further sign.
        """
        owner = {"id": secrets.token_hex(8), **owner}
        values = self.request("lock", {"path": path, "owner": owner, "lease": lease}).values
        if not values["taken"]:
            return {**values["holder"], "left_s": values["left_s"]}
        self._pace = min(self._pace, lease / 4)
        return None

    def check_lock(self, path: str, lock_id: str = "") -> LockState:
        """Who holds a lock now. One round trip; nothing is changed."""
        values = self.request("lock_check", {"path": path, "id": lock_id}).values
        return LockState(values["held"], values["holder"], values["left_s"])

    def break_lock(self, path: str, lock_id: str) -> bool:
        """Take a lock away from its holder; False where it is not the one with this id any more."""
        return bool(self.request("lock_break", {"path": path, "id": lock_id}).values["broken"])

    def release_lock(self, path: str) -> None:
        """Give back a lock before the session ends. A lock that was lost meanwhile is left alone."""
        self.request("unlock", {"path": path})

    def http_transport(self) -> httpx.BaseTransport:
        """Transport for ``httpx.Client``: requests are made by the agent, on the host; bodies can be streamed.

        The client's read and connect time-outs are honoured on the host; httpx's own exceptions are raised.
        """
        from ddtree_ops.remote.http import SessionTransport

        return SessionTransport(self)

    def _http(self, args: Mapping[str, Any], body: bytes) -> Stream:
        return Stream(self, self._open("http", args, body, deadline=None))

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the agent said on start.

        ``hostname``, ``kernel``, ``machine``, ``python``, ``uid``, ``user``, ``pid``, ``boot_id``, ``machine_id``,
        ``time`` (epoch, the host's clock), ``clock_skew_s`` (host minus here, without the way's delay).
        """
        return dict(self._facts)

    def close(self) -> None:
        """End the agent, with its commands and locks, and the connection. May be called twice."""
        # Who waits for an answer is woken, whatever becomes of the connection.
        self._lose("the session is closed")
        alone = self._sending.acquire(timeout=1.0)
        try:
            self._transport.close()
        finally:
            if alone:
                self._sending.release()
        self._reader.join(5.0)
        self._transport.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
