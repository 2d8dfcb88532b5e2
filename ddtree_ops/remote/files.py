"""Files of a tree as values; importable without any network code."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileEntry", "SharedReads", "scan_tree"]


@dataclass(frozen=True)
class FileEntry:
    """One regular file of a tree: POSIX path relative to the root, permission bits, size in bytes, hex sha256."""

    path: str
    mode: int
    size: int
    sha256: str


def scan_tree(root: Path) -> tuple[FileEntry, ...]:
    """Every regular file below ``root`` with its sha256, sorted by path. Byte code (``__pycache__``) is left out.

    :raises ValueError: for a symbolic link or special file: a runtime holds plain files only.
    """
    found: list[FileEntry] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_symlink() or not path.is_file():
                raise ValueError(f"{path}: not a plain file")
            content = path.read_bytes()
            mode = 0o755 if os.access(path, os.X_OK) and path.stat().st_mode & 0o111 else 0o644
            relative = path.relative_to(root).as_posix()
            found.append(FileEntry(relative, mode, len(content), hashlib.sha256(content).hexdigest()))
    return tuple(sorted(found, key=lambda entry: entry.path))


class SharedReads:
    """Files that several sessions of this process send are read from disk once, as far as there is room.

    :param room: bytes kept in memory, of files no larger than ``largest``.
    """

    def __init__(self, room: int = 128 << 20, largest: int = 4 << 20) -> None:
        self._room = room
        self._largest = largest
        self._guard = threading.Lock()
        self._kept: dict[tuple[str, str], bytes] = {}

    def pieces(self, root: Path, entry: FileEntry, size: int) -> Iterator[bytes]:
        """Content of a file, in pieces of at most ``size`` bytes. :raises OSError: it cannot be read."""
        key = (f"{root}{os.sep}{entry.path}", entry.sha256)
        content = self._kept.get(key)
        if content is not None:
            for start in range(0, len(content), size):
                yield content[start : start + size]
            return
        read: list[bytes] = []
        with open(key[0], "rb", buffering=0) as file:  # noqa: PTH123
            while piece := file.read(size):
                if entry.size <= self._largest:
                    read.append(piece)
                yield piece
        whole = b"".join(read)
        if len(whole) == entry.size:
            with self._guard:
                if key not in self._kept and self._room >= len(whole):
                    self._room -= len(whole)
                    self._kept[key] = whole
