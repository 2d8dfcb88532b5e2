"""What comes in as bytes: compression, encoding, cut lines, things that are no log."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_ops.diagnose.lines import read_log
from ddtree_ops.diagnose.source import CHUNK, MAX_LINE, read_chunks
from ddtree_ops.errors import UsageError

TEXT = b"".join(b"[2026-11-29 14:00:00] line %d\n" % number for number in range(8_000))
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 1),
    "bzip2": lambda data: bz2.compress(data, 1),
    "xz": lambda data: lzma.compress(data, preset=0),
}


def everything(data: bytes) -> tuple[bytes, str, str]:
    chunks = read_chunks(io.BytesIO(data))
    return b"".join(chunks), chunks.compression, chunks.truncated


@pytest.mark.parametrize("name", PACKERS)
def test_compressed(name: str) -> None:
    packed = PACKERS[name](TEXT)
    assert everything(packed) == (TEXT, name, "")
    assert everything(packed + packed) == (TEXT * 2, name, "")
    assert everything(packed + bytes(512)) == (TEXT, name, "")
    assert everything(PACKERS["gzip"](packed)) == (TEXT, f"gzip+{name}", "")


@pytest.mark.parametrize("name", PACKERS)
def test_compressed_and_not_whole(name: str) -> None:
    packed = PACKERS[name](TEXT + os.urandom(400_000) + b"\n")
    text, _, why = everything(packed[: len(packed) // 2])
    assert text.startswith(TEXT[:90_000])
    assert "ends in the middle" in why
    text, _, why = everything(PACKERS[name](TEXT) + b"and then some garbage")
    assert text == TEXT
    assert "were not read" in why
    broken = packed[: len(packed) // 2] + bytes(1000) + packed[len(packed) // 2 + 1000 :]
    text, _, why = everything(broken)
    assert text.startswith(TEXT[:90_000])
    assert "damaged" in why


def test_a_small_file_that_unpacks_to_much_is_read_in_pieces() -> None:
    packed = gzip.compress(b"x" * 63 + b"\n" + bytes(24_000_000) + b"\nend\n")
    sizes = [len(chunk) for chunk in read_chunks(packed)]
    assert max(sizes) <= CHUNK + (1 << 20)
    assert sum(sizes) == 64 + MAX_LINE + 5


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_encodings(encoding: str) -> None:
    text = "[2026-11-29 14:00:00 TP0] Traceback → über\nRuntimeError: ok\n"
    data = text.encode(encoding)
    assert [line.text for line in read_log(data)] == text.splitlines()
    assert b"".join(read_chunks([data[at : at + 7] for at in range(0, len(data), 7)])).decode() == text


def test_chunks_end_at_line_ends() -> None:
    chunks = list(read_chunks(TEXT * 50 + b"no newline"))
    assert len(chunks) > 2
    assert all(chunk.endswith(b"\n") for chunk in chunks[:-1])
    assert b"".join(chunks) == TEXT * 50 + b"no newline"
    assert list(read_chunks(b"")) == []
    assert list(read_log(b"")) == []


@pytest.mark.parametrize("length", [MAX_LINE - 1, MAX_LINE, MAX_LINE + 1, CHUNK, 3 * CHUNK])
def test_a_long_line_is_cut_and_the_next_one_is_not_lost(length: int) -> None:
    chunks = read_chunks(io.BytesIO(b"first\n" + b"x" * length + b"\nnext\n" + b"y" * length))
    lines = b"".join(chunks).split(b"\n")
    kept = min(length, MAX_LINE)
    assert [len(line) for line in lines] == [5, kept, 4, kept]
    assert lines[2] == b"next"
    assert chunks.cut == 2 * (length > MAX_LINE)


@pytest.mark.parametrize(
    ("data", "command"),
    [
        (b"LPKSHHRH" + bytes(600), "journalctl --file FILE --output=json --all | ddtree-ops diagnose -"),
        (b"PK\x03\x04" + bytes(600), "unzip -p FILE"),
        (bytes(257) + b"ustar" + bytes(300), "tar -xOf FILE"),
        (gzip.compress(b"a" * 257 + b"ustar" + bytes(300), mtime=0), "tar -xOzf FILE"),
        (b"\x28\xb5\x2f\xfd" + bytes(30), "zstd -dc FILE | ddtree-ops diagnose -"),
        (b"\x04\x22\x4d\x18" + bytes(30), "lz4 -dc FILE | ddtree-ops diagnose -"),
    ],
)
def test_what_is_no_log_is_refused_with_the_command_that_makes_one(data: bytes, command: str) -> None:
    with pytest.raises(UsageError) as caught:
        list(read_chunks(data))
    assert command in caught.value.hint


def test_the_command_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "system journal.journal"
    path.write_bytes(b"LPKSHHRH" + bytes(600))
    with path.open("rb") as stream, pytest.raises(UsageError) as caught:
        list(read_chunks(stream))
    assert f"--file '{path}' " in caught.value.hint


def test_a_bomb_of_nested_compression_is_refused() -> None:
    packed = b"text\n"
    for _ in range(5):
        packed = gzip.compress(packed)
    with pytest.raises(UsageError, match="compressed more than"):
        list(read_chunks(packed))


def test_a_pipe_is_read_to_its_end() -> None:
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as out:
            for at in range(0, len(TEXT), 50_000):
                out.write(TEXT[at : at + 50_000])

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(reading, "rb") as stream:
        assert b"".join(read_chunks(stream)) == TEXT
    writer.join()
