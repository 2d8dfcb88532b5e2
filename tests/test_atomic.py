"""Files that a user names: whole or not at all, and never in the place of a device."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from ddtree_ops.atomic import write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_and_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_text(path, "one\n")
    write_text(path, "two\r\n", mode=0o600)
    assert path.read_bytes() == b"two\r\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(path.parent) == ["report.json"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_mode_is_the_one_asked_for_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "report.json", "text")
        write_text(tmp_path / "metrics.prom", "text", mode=0o640)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"report.json": 0o644, "metrics.prom": 0o640}


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "text"


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join()
    assert read == ["text"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("place", ["folder", "file/below"])
def test_nothing_is_left_where_it_cannot_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("before")
    with pytest.raises(OSError):
        write_text(tmp_path / place, "text")
    assert names(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "before"


def test_what_was_there_stays_where_the_text_cannot_be_encoded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert names(tmp_path) == ["file"]
    assert path.read_text() == "before"
