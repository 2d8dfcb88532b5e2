"""Bytes of a log, from wherever: decompressed, as UTF-8, in chunks that end at line ends.

What a stream is tells its first bytes, never its name: gzip, bzip2, xz (several members, cut off or with garbage
behind), UTF-8 or UTF-16. What only another program can read (a journal's own files, archives) is refused with the
command that turns it into a log.
"""

from __future__ import annotations

import bz2
import codecs
import lzma
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, BinaryIO, Protocol

from ddtree_ops.errors import UsageError

__all__ = ["CHUNK", "MAX_LINE", "Chunks", "read_chunks"]

MAX_LINE = 1 << 18
"""Longest line kept, in bytes; the rest of it is dropped. A ServerArgs dump has 11 kB."""

CHUNK = 4 << 20
"""Bytes of a chunk, to which the rest of a line is added."""

_BLOCK = 1 << 20
_INPUT = 4096
_MEMORY = 256 << 20
_DEEPEST = 3
_HEAD = 512
_GZIP, _BZIP2, _XZ = b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\x00"


class Chunks(Iterator[bytes]):
    """Chunks of whole lines; the notes are complete once all was read.

    :ivar compression: ``gzip``, ``bzip2``, ``xz``, several joined by ``+``; empty for none.
    :ivar encoding: ``utf-8``, ``utf-16-le`` or ``utf-16-be``; chunks are UTF-8 always.
    :ivar truncated: why the end is missing or was not read; empty where nothing is known to be missing.
    :ivar cut: lines of which only the first :data:`MAX_LINE` bytes were kept.
    """

    def __init__(self, blocks: Iterable[bytes], name: str = "FILE") -> None:
        self.compression = ""
        self.encoding = "utf-8"
        self.truncated = ""
        self.cut = 0
        self._name = name
        self._parts = self._run(iter(blocks))

    def __next__(self) -> bytes:
        return next(self._parts)

    def _run(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        parts: list[bytes] = []
        size, skipping = 0, False
        for block in self._opened(blocks, 0):
            if skipping:
                end = block.find(b"\n")
                if end < 0:
                    continue
                block, skipping = block[end:], False
            parts.append(block)
            size += len(block)
            if size < CHUNK:
                continue
            held = b"".join(parts)
            end = held.rfind(b"\n") + 1
            if end:
                yield self._bounded(held[:end])
                parts = [held[end:]]
            else:
                self.cut += 1
                parts, skipping = [held[:MAX_LINE]], True
            size = len(parts[0])
        if held := b"".join(parts):
            yield self._bounded(held)

    def _bounded(self, chunk: bytes) -> bytes:
        """``chunk`` without what is over :data:`MAX_LINE` of any line."""
        parts: list[bytes] = []
        kept = at = 0
        while len(chunk) - at > MAX_LINE:
            end = chunk.rfind(b"\n", at, at + MAX_LINE + 1)
            if end >= 0:
                at = end + 1
                continue
            end = chunk.find(b"\n", at + MAX_LINE)
            parts.append(chunk[kept : at + MAX_LINE])
            kept = at = len(chunk) if end < 0 else end
            self.cut += 1
        return b"".join((*parts, chunk[kept:])) if parts else chunk

    def _opened(self, blocks: Iterator[bytes], depth: int) -> Iterator[bytes]:
        head = b""
        while len(head) < _HEAD and (block := next(blocks, None)) is not None:
            head += block
        self._refuse(head)
        rest = chain([head], blocks)
        name, open_ = _packed(head)
        if open_ is not None:
            if depth == _DEEPEST:
                raise UsageError(
                    f"{self._name} is compressed more than {_DEEPEST} times", hint="decompress it first"
                )
            self.compression = f"{self.compression}+{name}".lstrip("+")
            return self._opened(self._unpacked(name, open_, rest), depth + 1)
        encoding = _utf16(head)
        if encoding:
            self.encoding = encoding
            return _recoded(rest, encoding)
        if head.startswith(codecs.BOM_UTF8):
            return chain([head[3:]], blocks)
        return rest

    def _refuse(self, head: bytes) -> None:
        name = self._name
        if head.startswith(b"LPKSHHRH"):
            raise UsageError(
                f"{name} is a journal's own binary file, which only journalctl reads",
                hint=f"journalctl --file {name} --output=json --all | ddtree-ops diagnose -",
            )
        if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            raise UsageError(
                f"{name} is a zip archive, not a log", hint=f"unzip -p {name} '*.log' | ddtree-ops diagnose -"
            )
        if head[257:262] == b"ustar":
            flag = {"": "", "gzip": "z", "bzip2": "j", "xz": "J"}.get(self.compression, "")
            raise UsageError(
                f"{name} is a tar archive, not a log",
                hint=f"tar -xO{flag}f {name} PATH/IN/ARCHIVE.log | ddtree-ops diagnose -  (names: tar -tf {name})",
            )
        if head.startswith(b"\x28\xb5\x2f\xfd"):
            raise UsageError(
                f"{name} is compressed with zstd", hint=f"zstd -dc {name} | ddtree-ops diagnose -"
            )
        if head.startswith(b"\x04\x22\x4d\x18"):
            raise UsageError(f"{name} is compressed with lz4", hint=f"lz4 -dc {name} | ddtree-ops diagnose -")

    def _unpacked(
        self, name: str, open_: Callable[[], _Unpacker], blocks: Iterable[bytes]
    ) -> Iterator[bytes]:
        """All members of a compressed stream, as far as they can be read; memory is one block."""
        unpacker = open_()
        magic = _MAGIC[name]
        try:
            for block in blocks:
                for start in range(0, len(block), _INPUT):
                    data = block[start : start + _INPUT]
                    while data:
                        if unpacker.eof:
                            data = data.lstrip(b"\0")
                            if not data:
                                break
                            if not data.startswith(magic[: len(data)]):
                                self.truncated = f"the bytes after the end of the {name} data were not read"
                                return
                            unpacker = open_()
                        yield from unpacker.feed(data)
                        data = unpacker.unused
            if not unpacker.eof:
                self.truncated = f"the {name} data ends in the middle"
                yield unpacker.rest()
        except (zlib.error, OSError, lzma.LZMAError, EOFError, ValueError) as error:
            self.truncated = f"the {name} data is damaged ({error}): what follows was not read"


class _Unpacker(Protocol):
    eof: bool
    unused: bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What comes out of ``data``, block by block; ``unused`` is what lay behind the end."""

    def rest(self) -> bytes:
        """What is left at the end of a stream that was cut off."""


class _Gzip:
    def __init__(self) -> None:
        self._inner = zlib.decompressobj(31)
        self.eof = False
        self.unused = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data and not self._inner.eof:
            yield self._inner.decompress(data, _BLOCK)
            data = self._inner.unconsumed_tail
        self.eof, self.unused = self._inner.eof, self._inner.unused_data

    def rest(self) -> bytes:
        return self._inner.flush()


class _Other:
    def __init__(self, inner: bz2.BZ2Decompressor | lzma.LZMADecompressor) -> None:
        self._inner = inner
        self.eof = False
        self.unused = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield self._inner.decompress(data, _BLOCK)
        while not self._inner.eof and not self._inner.needs_input:
            yield self._inner.decompress(b"", _BLOCK)
        self.eof, self.unused = self._inner.eof, self._inner.unused_data

    def rest(self) -> bytes:
        return b""


_MAGIC = {"gzip": _GZIP, "bzip2": _BZIP2, "xz": _XZ}


def _packed(head: bytes) -> tuple[str, Callable[[], _Unpacker] | None]:
    if head.startswith(_GZIP):
        return "gzip", _Gzip
    if head.startswith(_BZIP2) and head[4:10] == b"1AY&SY":
        return "bzip2", lambda: _Other(bz2.BZ2Decompressor())
    if head.startswith(_XZ):
        return "xz", lambda: _Other(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY))
    return "", None


def _utf16(head: bytes) -> str:
    """The kind of UTF-16, by its mark or by the zeros that ASCII has in it; empty for anything else."""
    if head.startswith(codecs.BOM_UTF16_LE):
        return "utf-16-le"
    if head.startswith(codecs.BOM_UTF16_BE):
        return "utf-16-be"
    if len(head) < 8:
        return ""
    even, odd = head[::2], head[1::2]
    if odd.count(0) > 0.8 * len(odd) and even.count(0) < 0.1 * len(even):
        return "utf-16-le"
    if even.count(0) > 0.8 * len(even) and odd.count(0) < 0.1 * len(odd):
        return "utf-16-be"
    return ""


def _recoded(blocks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    first = True
    for block in blocks:
        text = decoder.decode(block)
        if first and text:
            text, first = text.removeprefix("\ufeff"), False
        yield text.encode("utf-8", "replace")
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def _blocks(stream: Any) -> Iterator[bytes]:
    while block := stream.read(CHUNK):
        yield block


def read_chunks(stream: BinaryIO | bytes | Iterable[bytes]) -> Chunks:
    """Chunks of about :data:`CHUNK` bytes of UTF-8, each but the last ending in a newline.

    Bytes that are not UTF-8 pass as they are. A single line is cut at :data:`MAX_LINE`. Memory: one chunk.

    :param stream: a binary file, all bytes, or blocks cut anywhere.
    :raises UsageError: on reading: it is something that is no log (archive, binary journal, zstd).
    """
    if isinstance(stream, bytes | bytearray | memoryview):
        data = bytes(stream)
        return Chunks(data[start : start + _BLOCK] for start in range(0, len(data), _BLOCK))
    if hasattr(stream, "read"):
        name = getattr(stream, "name", None)
        shown = shlex.quote(name) if isinstance(name, str) and not name.startswith("<") else "FILE"
        return Chunks(_blocks(stream), shown)
    return Chunks(stream)
