"""Files of a tree as values; importable without any network code."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileEntry", "scan_tree"]


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
