"""Frames between a session and its agent, and the transport they travel over.

A frame is two big-endian 32-bit lengths, a UTF-8 JSON head of the first length and raw bytes of the second.
The agent (:mod:`ddtree_ops.remote.agent`) carries its own copy of the writer: it is a single file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "MARKER",
    "PIECE",
    "FrameReader",
    "ProtocolError",
    "Transport",
    "agent_source",
    "bootstrap",
    "encode",
]

MARKER = b"\n\0ddtree-ops agent 1\0\n"
"""Written by the agent before its first frame; what comes before it is noise of shell start-up files."""
PIECE = 256 * 1024
"""Bytes a frame of a long transfer carries: one large write is ten times slower with paramiko."""

_HEADER = struct.Struct("!II")
_MAX_NOISE = 1 << 20
_MAX_HEAD = 64 << 20
_LOADER = (
    "import sys;"
    'sys.version_info>=(3,8) or sys.exit("ddtree-ops: Python 3.8 or newer is needed, this is %d.%d"%sys.version_info[:2]);'
    "i=sys.stdin.buffer;n=int(i.readline());"
    'exec(compile(i.read(n),"ddtree-ops-agent","exec"))'
)


class ProtocolError(Exception):
    """What arrived is not a frame."""


class Transport(Protocol):
    """A two-way byte pipe to an agent. ``send`` and ``recv`` may be called from different threads."""

    def send(self, data: bytes) -> None:
        """Send everything. :raises OSError: the connection is gone."""

    def recv(self) -> bytes:
        """Some bytes, waiting for them; empty at the end."""

    def close(self) -> None:
        """Close the agent's stdin, give it a moment to end, drop the connection. May be called twice."""

    def abort(self) -> None:
        """Drop the connection at once: ``send`` and ``recv`` in other threads end."""

    def release(self) -> None:
        """Free what is left after ``close``; nobody reads any more."""

    def diagnostics(self) -> str:
        """The end of what came on the agent's stderr."""

    def status(self) -> int | None:
        """Exit status of the agent's process where it is known."""


def bootstrap(python: str) -> list[str]:
    """Command line that compiles the agent from its stdin: isolated, UTF-8, no site-packages, writes no byte code."""
    return [python, "-X", "utf8", "-ISB", "-c", _LOADER]


@cache
def agent_source() -> bytes:
    """The agent as it is sent: its length on a line, then the file."""
    source = Path(__file__).with_name("agent.py").read_bytes()
    return b"%d\n" % len(source) + source


def encode(head: Mapping[str, Any], data: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((_HEADER.pack(len(text), len(data)), text, data))


class FrameReader:
    """Cuts a stream of bytes into frames.

    :param recv: returns some bytes, or none at the end of the stream.
    """

    def __init__(self, recv: Callable[[], bytes]) -> None:
        self._recv = recv
        self._buffer = bytearray()

    def skip_to_marker(self) -> bytes:
        """Drop everything up to and including :data:`MARKER`; returns what was dropped.

        :raises ProtocolError: the stream ended, or a megabyte passed, without it; holds what was read.
        """
        while (at := self._buffer.find(MARKER)) < 0:
            piece = self._recv()
            if not piece or len(self._buffer) > _MAX_NOISE:
                raise ProtocolError(bytes(self._buffer[-2000:]).decode("utf-8", "replace"))
            self._buffer += piece
        noise = bytes(self._buffer[:at])
        del self._buffer[: at + len(MARKER)]
        return noise

    def _take(self, size: int) -> bytes | None:
        while len(self._buffer) < size:
            piece = self._recv()
            if not piece:
                return None
            self._buffer += piece
        taken = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return taken

    def read(self) -> tuple[dict[str, Any], bytes] | None:
        """The next frame, or None at the end of the stream.

        :raises ProtocolError: the head is too large or is not a JSON object.
        """
        prefix = self._take(_HEADER.size)
        if prefix is None:
            return None
        head_size, data_size = _HEADER.unpack(prefix)
        if head_size > _MAX_HEAD:
            raise ProtocolError(f"a frame's head of {head_size} bytes")
        text = self._take(head_size)
        data = self._take(data_size) if text is not None else None
        if text is None or data is None:
            return None
        try:
            head = json.loads(text)
        except ValueError as error:
            raise ProtocolError(f"a frame's head is not JSON: {error}") from error
        if not isinstance(head, dict):
            raise ProtocolError("a frame's head is not an object")
        return head, data
