"""A patch series applied with ``git apply``, all of it or nothing.

The files concerned are copied to a scratch folder, patched there and handed back as values: the tree they come
from is never written, and no repository or git configuration around it has a say.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree_ops.errors import BuildError, PatchError
from ddtree_ops.runtime.description import PatchFile

__all__ = ["AppliedPatch", "Content", "apply_series", "data_of", "peel_series"]

_FAILED = re.compile(r"^error: patch failed: (?P<file>.+):(?P<line>\d+)$", re.MULTILINE)
_ABSENT = re.compile(r"^error: (?P<file>.+): No such file or directory$", re.MULTILINE)
_EXISTS = re.compile(r"^error: (?P<file>.+): already exists in ", re.MULTILINE)
_CORRUPT = re.compile(
    r"^error: (?:corrupt patch|patch fragment without header|git diff header .*) at .*?(?P<line>\d+)",
    re.MULTILINE,
)
_SEARCHED = re.compile(r"^error: while searching for:\n(?P<text>.*?)\n\nerror: ", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Content:
    """A file as a value: its bytes, and whether it is executable."""

    data: bytes
    executable: bool = False


def data_of(read: Callable[[str], Content | None]) -> Callable[[str], bytes | None]:
    """The same reader, giving only the bytes of a file."""

    def data(path: str) -> bytes | None:
        content = read(path)
        return None if content is None else content.data

    return data


@dataclass(frozen=True)
class AppliedPatch:
    """A patch of the series that is in the result. ``already``: the base had it."""

    name: str
    already: bool


def apply_series(
    read: Callable[[str], Content | None], patches: Sequence[PatchFile]
) -> tuple[dict[str, Content | None], tuple[AppliedPatch, ...]]:
    """Apply ``patches`` in order to the files that ``read`` gives.

    :param read: content by path relative to the tree; None where there is no such file.
    :returns: the files that the series touches as they are afterwards (None: removed), and one entry a patch.
    :raises PatchError: a patch does not fit: names patch, file and line. Nothing was written anywhere.
    :raises BuildError: git is missing.
    """
    with _Scratch(read, patches) as scratch:
        applied: list[AppliedPatch] = []
        while len(applied) < len(patches):
            patch = patches[len(applied)]
            output = scratch.git(patch)
            if output is None:
                applied.append(AppliedPatch(patch.name, already=False))
                continue
            had = 0 if any(not one.already for one in applied) else _leading(read, patches)
            if had <= len(applied):
                raise _error(patch, output)
            applied = [AppliedPatch(one.name, already=True) for one in patches[:had]]
        return scratch.contents(), tuple(applied)


def _leading(read: Callable[[str], Content | None], patches: Sequence[PatchFile]) -> int:
    """How many patches from the first on the base already has."""
    for count in range(len(patches), 0, -1):
        if len(peel_series(read, patches[:count])[1]) == count:
            return count
    return 0


def peel_series(
    read: Callable[[str], Content | None], patches: Sequence[PatchFile]
) -> tuple[dict[str, Content | None], tuple[str, ...]]:
    """Take the patches out again, last first; those that are not in are passed over.

    :returns: the touched files without the patches, and the names of the patches that were in, in series order.
    """
    with _Scratch(read, patches) as scratch:
        found = [patch.name for patch in reversed(patches) if scratch.git(patch, "--reverse") is None]
        return scratch.contents(), tuple(reversed(found))


class _Scratch:
    """The touched files in a folder of their own."""

    def __init__(self, read: Callable[[str], Content | None], patches: Sequence[PatchFile]) -> None:
        self._paths = tuple(dict.fromkeys(path for patch in patches for path in patch.files))
        self._given = {path: read(path) for path in self._paths}

    def __enter__(self) -> _Scratch:
        self._holder = tempfile.TemporaryDirectory(prefix="ddtree-ops-patch-")
        self._root = Path(self._holder.name).resolve() / "tree"
        self._root.mkdir()
        for path, content in self._given.items():
            if content is not None:
                place = self._root / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content.data)
                place.chmod(0o755 if content.executable else 0o644)
        return self

    def __exit__(self, *_error: object) -> None:
        self._holder.cleanup()

    def git(self, patch: PatchFile, *options: str) -> str | None:
        """None when it went well, else git's output; a failing ``git apply`` writes nothing."""
        program = shutil.which("git")
        if program is None:
            raise BuildError("git is needed to apply patches", hint="apt-get install git")
        done = subprocess.run(
            [program, "apply", "-p1", "--whitespace=nowarn", "-v", *options, "-"],
            input=patch.content,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._root,
            env=_environment(self._root),
        )
        return done.stdout.decode("utf-8", "replace") if done.returncode else None

    def contents(self) -> dict[str, Content | None]:
        result: dict[str, Content | None] = {}
        for path in self._paths:
            place = self._root / path
            if place.is_symlink():
                raise PatchError(
                    f"{path}: the series makes a symbolic link; a runtime holds plain files only"
                )
            result[path] = (
                Content(place.read_bytes(), bool(place.stat().st_mode & 0o100)) if place.is_file() else None
            )
        return result


def _environment(root: Path) -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {
        **kept,
        "LC_ALL": "C",
        "HOME": str(root.parent),
        "XDG_CONFIG_HOME": str(root.parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(root.parent),
    }


def _error(patch: PatchFile, output: str) -> PatchError:
    nothing = "nothing was written"
    failed, absent, exists = _FAILED.search(output), _ABSENT.search(output), _EXISTS.search(output)
    corrupt, searched = _CORRUPT.search(output), _SEARCHED.search(output)
    details: tuple[str, ...] = ()
    if failed:
        message = f"{patch.name} does not fit {failed['file']} at line {failed['line']}"
        if searched:
            details = ("these lines are not there:", *(f"| {line}" for line in searched["text"].split("\n")))
    elif absent:
        message = f"{patch.name} does not fit: there is no {absent['file']}"
    elif exists:
        message = f"{patch.name} does not fit: {exists['file']} is there already"
    elif corrupt:
        message = f"{patch.name} is damaged at line {corrupt['line']} of the patch"
    else:
        message = f"{patch.name} does not fit"
        details = tuple(output.splitlines()[-10:])
    return PatchError(
        message,
        details=details,
        state=nothing,
        hint="the base differs from the one the patch was made for: ddtree-ops patch check BASE",
    )
