"""A package of our own that a bundle holds beside ``sglang/``: the DDTREE algorithm as an sglang plugin.

sglang finds plugins by the entry points of installed distributions. ``PYTHONPATH`` is the release, so the release has
to hold what an installation would have written: the package, and a ``.dist-info`` folder that names the entry point.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ddtree_ops.errors import BuildError
from ddtree_ops.launchflags import (
    ALGORITHM_FLAG,
    ARGS_PATH,
    PLUGIN_PATH,
    FlagsError,
    FlagSet,
    read_flags,
    read_plugin,
)

__all__ = ["DDTREE", "OVERLAY", "SUMMARY", "Overlay", "brings_own", "extended_flags", "flags_of"]

OVERLAY = "ddtree_sglang"
"""Name of the package, and of its folder in a bundle."""

DDTREE = "DDTREE"
SUMMARY = "the DDTREE speculative algorithm, as a plugin of sglang"
_SPEC_INFO = "sglang/srt/speculative/spec_info.py"

Read = Callable[[str], "bytes | None"]


@dataclass(frozen=True)
class Overlay:
    """What ``overlay:`` of a runtime description names.

    :param version: of the distribution that the metadata describe.
    :param requires: the requirement that it is written for (``sglang==0.5.11``).
    :param entry_points: group -> name -> ``module:function``.
    :param directory: the package on this machine.
    """

    package: str
    version: str
    requires: str
    entry_points: Mapping[str, Mapping[str, str]]
    directory: Path

    @property
    def label(self) -> str:
        """``ddtree_sglang 0.1.0``."""
        return f"{self.package} {self.version}"

    def misfit(self, version: str) -> str:
        """What it is written for and what a tree of ``version`` is; empty where that is one, or the tree's unknown."""
        package, _, wanted = self.requires.partition("==")
        if not version or not wanted or version == wanted:
            return ""
        return f"it is written for {package} {wanted}, and the tree is {version}"

    @property
    def dist_info(self) -> str:
        """Folder of the metadata within a bundle."""
        return f"{self.package}-{self.version}.dist-info"

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """Content by path within a bundle, sorted: the Python files of the package and its metadata.

        The same package gives the same bytes on every machine: no times, no modes, no other files.

        :raises BuildError: a file cannot be read.
        """
        found = {}
        try:
            for path in sorted(self.directory.rglob("*.py")):
                inside = path.relative_to(self.directory).as_posix()
                if path.is_file() and "__pycache__" not in inside.split("/"):
                    found[f"{self.package}/{inside}"] = path.read_bytes()
        except OSError as error:
            raise BuildError(f"overlay {self.package}: {error.filename}: {error.strerror}") from error
        found[f"{self.dist_info}/METADATA"] = self._metadata()
        found[f"{self.dist_info}/entry_points.txt"] = self._entry_points()
        found[f"{self.dist_info}/RECORD"] = self._record(found)
        return dict(sorted(found.items()))

    @cached_property
    def hashes(self) -> Mapping[str, str]:
        """Hex sha256 by path of :attr:`files`."""
        return {path: hashlib.sha256(content).hexdigest() for path, content in self.files.items()}

    @cached_property
    def sha256(self) -> str:
        """Hex sha256 over paths and contents of :attr:`files`."""
        rows = "".join(f"{digest}  {path}\n" for path, digest in self.hashes.items())
        return hashlib.sha256(rows.encode()).hexdigest()

    def to_json(self) -> dict[str, str]:
        """JSON-serialisable form: package, version, sha256."""
        return {"package": self.package, "version": self.version, "sha256": self.sha256}

    def _metadata(self) -> bytes:
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {self.package.replace('_', '-')}",
            f"Version: {self.version}",
            f"Summary: {SUMMARY}",
            "License: Apache-2.0",
            f"Requires-Dist: {self.requires}",
        ]
        return ("\n".join(lines) + "\n").encode()

    def _entry_points(self) -> bytes:
        groups = [
            "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in sorted(points.items()))])
            for group, points in sorted(self.entry_points.items())
        ]
        return ("\n\n".join(groups) + "\n").encode()

    def _record(self, files: Mapping[str, bytes]) -> bytes:
        """As pip would write it: what :mod:`importlib.metadata` gives as the files of the distribution."""
        rows = []
        for path, content in sorted(files.items()):
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={digest},{len(content)}")
        return ("\n".join([*rows, f"{self.dist_info}/RECORD,,"]) + "\n").encode()


def flags_of(read: Read) -> FlagSet | None:
    """The launch flags of a tree's own argparse source, without those of an overlay; None where they cannot be read.

    :param read: content by path within the tree; None where there is no such file. Asked for as few files as will do.
    """
    text = _texts(read)
    source = text(ARGS_PATH) or ""
    try:
        flags = read_flags(source)
        algorithm = flags.find(ALGORITHM_FLAG)
        return read_flags(source, text) if algorithm is not None and algorithm.choices is None else flags
    except FlagsError:
        return None


def extended_flags(flags: FlagSet, read: Read) -> FlagSet | None:
    """Those flags and what the overlay in the tree adds; None where its file cannot be read."""
    text = _texts(read)
    try:
        return read_plugin(flags, text(PLUGIN_PATH) or "", text)
    except FlagsError:
        return None


def _texts(read: Read) -> Callable[[str], str | None]:
    def text(path: str) -> str | None:
        content = read(path)
        return None if content is None else content.decode("utf-8", "replace")

    return text


def brings_own(flags: FlagSet | None, read: Read) -> bool | None:
    """Whether a tree has DDTREE itself, found by asking its argparse source; nothing is run.

    :param flags: what :func:`flags_of` gave.
    :returns: None where that is not known.
    """
    flag = None if flags is None else flags.find(ALGORITHM_FLAG)
    if flag is None:
        return None
    if flag.choices is not None:
        return flag.allows(DDTREE)
    # Choices that only running the file would tell are made of the names of the algorithms.
    return bool(re.search(rb"\b" + DDTREE.encode() + rb"\b", read(_SPEC_INFO) or b""))
