"""Files that many sessions send are read once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ddtree_ops.remote.files import FileEntry, SharedReads


def entry(root: Path, name: str, content: bytes) -> FileEntry:
    (root / name).write_bytes(content)
    return FileEntry(name, 0o644, len(content), hashlib.sha256(content).hexdigest())


def test_a_file_is_read_once_and_cut_as_asked_for(tmp_path: Path) -> None:
    shared = SharedReads()
    one = entry(tmp_path, "one", b"abcdefg")
    assert list(shared.pieces(tmp_path, one, 3)) == [b"abc", b"def", b"g"]
    (tmp_path / "one").unlink()
    assert list(shared.pieces(tmp_path, one, 4)) == [b"abcd", b"efg"]
    empty = entry(tmp_path, "empty", b"")
    assert list(shared.pieces(tmp_path, empty, 3)) == list(shared.pieces(tmp_path, empty, 3)) == []


def test_other_content_under_the_same_path_is_another_file(tmp_path: Path) -> None:
    shared = SharedReads()
    assert b"".join(shared.pieces(tmp_path, entry(tmp_path, "f", b"old"), 8)) == b"old"
    assert b"".join(shared.pieces(tmp_path, entry(tmp_path, "f", b"new"), 8)) == b"new"


def test_what_has_not_the_size_that_was_listed_is_not_kept(tmp_path: Path) -> None:
    shared = SharedReads()
    listed = entry(tmp_path, "f", b"listed")
    (tmp_path / "f").write_bytes(b"grown in between")
    assert b"".join(shared.pieces(tmp_path, listed, 64)) == b"grown in between"
    (tmp_path / "f").write_bytes(b"listed")
    assert b"".join(shared.pieces(tmp_path, listed, 64)) == b"listed"


def test_large_files_and_what_finds_no_room_are_read_each_time(tmp_path: Path) -> None:
    shared = SharedReads(room=10, largest=6)
    large, first, second = (entry(tmp_path, name, name.encode()) for name in ("larger!", "first", "second"))
    for one in (large, first, second):
        assert b"".join(shared.pieces(tmp_path, one, 64)) == one.path.encode()
        (tmp_path / one.path).unlink()
    assert b"".join(shared.pieces(tmp_path, first, 64)) == b"first"
    for gone in (large, second):
        with pytest.raises(FileNotFoundError):
            list(shared.pieces(tmp_path, gone, 64))
