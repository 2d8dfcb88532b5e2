"""Odd wheels and trees: refused by name, never half read."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_ops.errors import BuildError
from ddtree_ops.runtime.tree import WheelTree, open_tree, plain_path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["sglang/./x.py"], "not a plain file"),
        (["sglang//x.py"], "not a plain file"),
        (["sglang/../x.py"], "not a plain file"),
        (["sglang/a\\b.py"], "not a plain file"),
        (["sglang/a\nb.py"], "not a plain file"),
        (["sglang/x.py", "sglang/x.py"], r"sglang/x\.py is there twice"),
        (["sglang/a/b/c", "sglang/a"], "sglang/a is both a file and a folder"),
    ],
)
def test_names_that_a_tree_cannot_hold(tmp_path: Path, names: list[str], said: str) -> None:
    path = tmp_path / "sglang-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    with pytest.raises(BuildError, match=said):
        open_tree(path)


def test_plain_paths() -> None:
    for path in ("sglang/é.py", "a b/c", "..a/b.", "...", "a/.b"):
        assert plain_path(path)
    for path in ("", "/a", "a/", "a//b", "..", "a/..", "./a", "a\0b", "a\x7f", "\udcff", None, 7):
        assert not plain_path(path)


def damaged(content: bytes) -> bytes:
    start = content.index(b"x.py") + 4
    return content[:start] + bytes(20) + content[start + 20 :]


def marked(offset: int, value: int) -> Callable[[bytes], bytes]:
    """Another byte in the local and in the central header."""

    def change(content: bytes) -> bytes:
        central = content.index(b"PK\x01\x02")
        changed = bytearray(content)
        changed[offset] = changed[central + offset + 2] = value
        return bytes(changed)

    return change


@pytest.mark.parametrize(
    "change", [damaged, marked(6, 1), marked(8, 99)], ids=["damaged", "encrypted", "compression"]
)
def test_content_that_cannot_be_read(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "sglang-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("sglang/x.py", "some text that can be made smaller, smaller, smaller")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BuildError, match=r"sglang/x\.py cannot be read"):
        WheelTree(path).read("sglang/x.py")


@pytest.mark.parametrize("name", [b"a\nb.py", b"\xff.py"])
def test_a_directory_with_a_name_that_cannot_be_published(tmp_path: Path, name: bytes) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / os.fsdecode(name)).write_text("")
    with pytest.raises(BuildError, match="is not a name that a runtime can hold"):
        open_tree(tmp_path).paths()
    assert len(open_tree(tmp_path, strict=False).paths()) == 1
