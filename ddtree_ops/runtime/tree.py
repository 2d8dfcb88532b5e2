"""A tree of sglang to read from: a directory or a wheel."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from ddtree_ops.errors import BuildError
from ddtree_ops.runtime.series import Content

__all__ = [
    "DirectoryTree",
    "Tree",
    "WheelTree",
    "explained",
    "find_root",
    "is_wheel",
    "open_tree",
    "plain_path",
]

_BELONGS = re.compile(r"(?:ddtree_)?sglang(?:-[^/]+\.dist-info)?/.+", re.DOTALL)
_PART = r"(?!\.\.?(?:/|$))[^/\\\x00-\x1f\x7f\ud800-\udfff]+"
_PLAIN = re.compile(rf"{_PART}(?:/{_PART})*")


@contextlib.contextmanager
def explained(state: str, hint: str) -> Iterator[None]:
    """:raises BuildError: instead of an OSError: the file, and what the system says of it."""
    try:
        yield
    except OSError as error:
        message = f"{error.filename or 'a file'}: {error.strerror or error}"
        raise BuildError(message, state=state, hint=hint) from error


def plain_path(path: object) -> bool:
    """A relative path that means the same everywhere: no ``..``, control characters, backslashes or broken UTF-8."""
    return isinstance(path, str) and _PLAIN.fullmatch(path) is not None


class Tree:
    """Files of ``sglang/``, of the overlay and of their ``.dist-info`` folders, by path relative to the tree."""

    label: str

    def paths(self) -> tuple[str, ...]:
        """Every file, sorted; byte code is left out."""
        raise NotImplementedError

    def read(self, path: str) -> Content | None:
        """One file, or None where there is no such file."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of open files."""

    def walk(self) -> Iterator[tuple[str, Content]]:
        """Every file with its content, in the order of :meth:`paths`."""
        for path in self.paths():
            content = self.read(path)
            if content is None:
                raise BuildError(f"{self.label}: {path} went away while it was read")
            yield path, content

    def other_plugins(self) -> tuple[str, ...]:
        """Files beside the tree in which other distributions may name plugins of sglang."""
        return ()

    @property
    def version(self) -> str:
        """Version in the name of the dist-info folder, or empty."""
        for path in self.paths():
            found = re.match(r"sglang-([^/]+)\.dist-info/", path)
            if found:
                return found.group(1)
        return ""


class DirectoryTree(Tree):
    """Below a directory that holds ``sglang/``."""

    def __init__(self, root: Path, *, strict: bool = True) -> None:
        self.root = root
        self.label = str(root)
        self._strict = strict
        self._paths: tuple[str, ...] | None = None

    def paths(self) -> tuple[str, ...]:
        if self._paths is None:
            self._paths = tuple(sorted(path for path, _ in self._scan()))
            odd = next((path for path in self._paths if not plain_path(path)), None)
            if odd is not None and self._strict:
                raise BuildError(f"{self.root}: {odd!r} is not a name that a runtime can hold")
        return self._paths

    def _scan(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        pending = [
            entry.name
            for entry in os.scandir(self.root)
            if entry.is_dir() and _BELONGS.fullmatch(entry.name + "/x")
        ]
        root = f"{self.root}/"
        while pending:
            folder = pending.pop()
            with os.scandir(root + folder) as entries:
                for entry in entries:
                    path = f"{folder}/{entry.name}"
                    if entry.is_file(follow_symlinks=False):
                        yield path, entry
                    elif entry.is_dir(follow_symlinks=False):
                        if entry.name != "__pycache__":
                            pending.append(path)
                    elif self._strict:
                        raise BuildError(
                            f"{root}{path} is not a plain file; a runtime holds plain files only"
                        )
                    elif entry.is_file():
                        yield path, entry

    def other_plugins(self) -> tuple[str, ...]:
        found = (f"{place.parent.name}/{place.name}" for place in self.root.glob("*-info/entry_points.txt"))
        return tuple(sorted(path for path in found if not _BELONGS.fullmatch(path)))

    def states(self) -> list[tuple[str, int, int, int, int]]:
        """Path, size, mode, change time (ns) and inode of every file: differs whenever anything was written."""
        stats = ((path, entry.stat(follow_symlinks=False)) for path, entry in self._scan())
        return sorted(
            (path, found.st_size, found.st_mode, found.st_ctime_ns, found.st_ino) for path, found in stats
        )

    def sizes(self) -> dict[str, int]:
        """Bytes of every file."""
        return {path: entry.stat(follow_symlinks=False).st_size for path, entry in self._scan()}

    def read(self, path: str) -> Content | None:
        place = self.root / path
        try:
            with place.open("rb") as stream:
                return Content(stream.read(), bool(os.fstat(stream.fileno()).st_mode & 0o100))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None


class WheelTree(Tree):
    """Inside a wheel, without unpacking it."""

    def __init__(self, path: Path) -> None:
        self.label = path.name
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise BuildError(f"{path} is not a readable wheel: {error}") from error
        self._entries: dict[str, zipfile.ZipInfo] = {}
        for entry in self._zip.infolist():
            name = entry.filename
            if entry.is_dir() or not _BELONGS.fullmatch(name) or "__pycache__" in name.split("/"):
                continue
            kind = stat.S_IFMT(entry.external_attr >> 16)
            if kind not in (0, stat.S_IFREG) or not plain_path(name):
                raise BuildError(f"{path.name}: {name!r} is not a plain file of the tree")
            if name in self._entries:
                raise BuildError(f"{path.name}: {name} is there twice")
            self._entries[name] = entry
        for name in self._entries:
            above = name.rpartition("/")[0]
            while above:
                if above in self._entries:
                    raise BuildError(f"{path.name}: {above} is both a file and a folder")
                above = above.rpartition("/")[0]

    def paths(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))

    def read(self, path: str) -> Content | None:
        entry = self._entries.get(path)
        if entry is None:
            return None
        try:
            return Content(self._zip.read(entry), bool(entry.external_attr >> 16 & 0o100))
        except (OSError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise BuildError(f"{self.label}: {path} cannot be read: {error}") from error

    def close(self) -> None:
        self._zip.close()


def is_wheel(path: Path) -> bool:
    """A file that ends in ``.whl``."""
    return path.suffix == ".whl" and path.is_file()


def find_root(path: Path) -> Path | None:
    """The directory that holds ``sglang/``: ``path`` itself, ``path/python`` (a checkout), ``path/tree`` (a bundle),
    or the parent where ``path`` is the package."""
    for candidate in (path, path / "python", path / "tree"):
        if (candidate / "sglang").is_dir():
            return candidate
    if path.name == "sglang" and (path / "srt").is_dir():
        return path.parent
    return None


def open_tree(path: Path, *, strict: bool = True) -> DirectoryTree | WheelTree:
    """A wheel or a directory to read from.

    :param strict: refuse what a runtime cannot hold; else links to files are read through and the rest passed over.
    :raises BuildError: neither a wheel nor a directory with ``sglang/`` or ``python/sglang/`` below.
    """
    if is_wheel(path):
        return WheelTree(path)
    root = find_root(path) if path.is_dir() else None
    if root is None:
        what = "there is no such file or directory" if not path.exists() else "it holds no sglang"
        raise BuildError(
            f"{path}: {what}",
            hint="give a wheel (.whl), or a directory with sglang/ or python/sglang/ below it",
        )
    return DirectoryTree(root, strict=strict)
