"""One session per host: typed requests and replies over one SSH connection and one agent process.

INTERFACE CONTRACT (to be implemented; signatures are fixed).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from ddtree_ops.remote.files import FileEntry

__all__ = ["Completed", "FileEntry", "PublishResult", "Reply", "Request", "Session", "Stream"]


@dataclass(frozen=True)
class Request:
    """A request as a value."""

    op: str
    args: Mapping[str, Any]
    data: bytes = b""


@dataclass(frozen=True)
class Reply:
    """Answer to a request: JSON-like values and raw bytes."""

    values: Mapping[str, Any]
    data: bytes = b""


@dataclass(frozen=True)
class Completed:
    """A finished command on the host. ``rc`` is the exit status, negative for a signal."""

    argv: tuple[str, ...]
    rc: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """stdout decoded as UTF-8 with replacement."""
        return self.stdout.decode("utf-8", "replace")


@dataclass(frozen=True)
class PublishResult:
    """Outcome of publishing a release.

    ``created`` is False where the release was already there and verified.
    """

    release_dir: str
    created: bool
    files: int
    sent_files: int
    sent_bytes: int
    linked_files: int


class Stream:
    """Output of a long-running request; iterate for events, ``close()`` to end it on the host too.

    Each event is ``(values, data)``. ``values["event"]`` names it. Ends when the request ends.
    """

    def __iter__(self) -> Iterator[tuple[Mapping[str, Any], bytes]]:
        raise NotImplementedError

    def get(self, timeout: float) -> tuple[Mapping[str, Any], bytes] | None:
        """Next event, or None after ``timeout`` seconds without one (check ``ended`` to tell the two apart)."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Session:
    """A connected host. Thread-safe: several requests and streams may be under way at once.

    Use as a context manager. Obtain one with :func:`ddtree_ops.remote.connect`.
    """

    host: str
    round_trips: int

    def request(self, op: str, args: Mapping[str, Any] | None = None, *, data: bytes = b"", deadline: float = 30.0) -> Reply:
        """One round trip. :raises RemoteError: the agent's error; :raises DeadlineError: no answer in time."""
        raise NotImplementedError

    def batch(self, requests: Sequence[Request], *, deadline: float = 60.0) -> list[Reply | Exception]:
        """Several requests, run in order, in one round trip. A failing one yields its RemoteError in place."""
        raise NotImplementedError

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
        """Run a command (no shell) as root with LC_ALL=C. ``check``: a non-zero rc raises RemoteError with the output."""
        raise NotImplementedError

    def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes | None:
        """Content of a file, or None where it does not exist."""
        raise NotImplementedError

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        """Write atomically (temporary file, fsync, rename), only when different. True when something changed."""
        raise NotImplementedError

    def append_line(self, path: str, line: str) -> None:
        """Append one line (no newline inside) with fsync; creates the file and its folder."""
        raise NotImplementedError

    def swap_link(self, link: str, target: str) -> str | None:
        """Point a symbolic link somewhere else atomically (temporary link, rename). Returns the old target."""
        raise NotImplementedError

    def hash_tree(self, root: str, *, deadline: float = 120.0) -> list[FileEntry] | None:
        """sha256 of every regular file below ``root``, computed on the host, sorted by path; None if absent."""
        raise NotImplementedError

    def remove_tree(self, path: str, *, below: str) -> None:
        """Remove a tree (read-only ones too) that lies below ``below``; refuses anything else."""
        raise NotImplementedError

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

        Two or three round trips however many files: what other releases already have is hard-linked, the rest
        travels as one stream, everything is verified by sha256 in a staging folder, then renamed. A release that
        is already there is verified on disk (every file) and repaired if damaged. Space and inodes are checked
        first. ``progress(done_bytes, total_bytes)`` is called while sending.
        :raises RemoteError: no space, verification failed; the host keeps no half release.
        """
        raise NotImplementedError

    def stream(self, argv: Sequence[str], *, deadline: float | None = None) -> Stream:
        """Run a command and stream its output: events ``{"event": "stdout"|"stderr"}`` + bytes, last ``{"event": "exit", "rc": n}``."""
        raise NotImplementedError

    def watch_unit(self, unit: str, *, interval: float = 0.2) -> Stream:
        """Stream the unit's state: ``{"event": "unit", "properties": {...}}`` at once, then on every change.

        Properties are those of ``systemctl show`` named in ddtree_ops.service.state.PROPERTIES (the agent holds
        the same list). ``{"event": "tick", "time": epoch, "read_bytes": n}`` every 5 s (``read_bytes``: sum of
        /proc/PID/io read_bytes over the unit's cgroup, for progress).
        """
        raise NotImplementedError

    def acquire_lock(self, path: str, owner: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Take an exclusive lock held by the agent process until the session ends (so a killed client frees it).

        Returns None when taken, else what the holder wrote about itself (``owner`` plus ``since`` epoch).
        """
        raise NotImplementedError

    def http_transport(self) -> httpx.BaseTransport:
        """Transport for ``httpx.Client``: requests are made by the agent, on the host; bodies can be streamed."""
        raise NotImplementedError

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the agent said on start: hostname, python, uid, boot_id, time (epoch), clock_skew_s, machine_id."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
