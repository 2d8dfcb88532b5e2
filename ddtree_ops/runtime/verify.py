"""Differences between files and what a manifest says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from ddtree_ops.errors import BuildError
from ddtree_ops.remote.files import FileEntry, scan_tree
from ddtree_ops.runtime.bundle import MANIFEST, Bundle

__all__ = ["Difference", "compare", "compare_digests", "verify_bundle"]


@dataclass(frozen=True)
class Difference:
    """One file that is not as the manifest says.

    :param kind: ``missing``, ``changed`` (content), ``mode`` (executable or not) or ``extra``.
    :param wanted: sha256 (or octal mode) of the manifest; empty for an extra file.
    :param found: the same of what is there; empty for a missing file.
    """

    path: str
    kind: Literal["missing", "changed", "mode", "extra"]
    wanted: str = ""
    found: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}"

    def to_json(self) -> dict[str, str]:
        """JSON-serialisable form."""
        return asdict(self)


def compare(wanted: Sequence[FileEntry], found: Sequence[FileEntry]) -> tuple[Difference, ...]:
    """Differences, sorted by path; a ``manifest.json`` at the top is not counted.

    Of the modes only the executable bit counts: a release on a host is read-only.
    """
    there = {entry.path: entry for entry in found if entry.path != MANIFEST}
    differences = []
    for entry in wanted:
        other = there.pop(entry.path, None)
        if other is None:
            differences.append(Difference(entry.path, "missing", entry.sha256))
        elif (other.size, other.sha256) != (entry.size, entry.sha256):
            differences.append(Difference(entry.path, "changed", entry.sha256, other.sha256))
        elif bool(other.mode & 0o100) != bool(entry.mode & 0o100):
            differences.append(Difference(entry.path, "mode", f"{entry.mode:o}", f"{other.mode:o}"))
    differences += [Difference(path, "extra", "", entry.sha256) for path, entry in there.items()]
    return tuple(sorted(differences, key=lambda difference: difference.path))


def compare_digests(wanted: Mapping[str, str], found: Mapping[str, str]) -> tuple[Difference, ...]:
    """Differences of two sets of files of which only digests are known, sorted by path.

    :param wanted: digest by path, of any one kind. :param found: the same of what is there.
    """
    differences = []
    for path in sorted(wanted.keys() | found.keys()):
        if path not in found:
            differences.append(Difference(path, "missing", wanted[path]))
        elif path not in wanted:
            differences.append(Difference(path, "extra", "", found[path]))
        elif wanted[path] != found[path]:
            differences.append(Difference(path, "changed", wanted[path], found[path]))
    return tuple(differences)


def verify_bundle(bundle: Bundle) -> tuple[Difference, ...]:
    """Read every file of a bundle and compare; empty where all is as the manifest says.

    In a vendored tree, files outside ``sglang/`` and its dist-info are the owner's and are not counted.

    :raises BuildError: the tree is gone or cannot be read.
    """
    tops = {entry.path.partition("/")[0] for entry in bundle.files}
    try:
        if not (bundle.root / MANIFEST).is_file():
            return compare(bundle.files, _scan(bundle, ""))
        return compare(bundle.files, [entry for top in sorted(tops) for entry in _scan(bundle, top)])
    except (OSError, ValueError) as error:
        raise BuildError(f"bundle {bundle.digest[:12]} cannot be read: {error}") from error


def _scan(bundle: Bundle, top: str) -> list[FileEntry]:
    folder = bundle.root / top
    if not folder.is_dir():
        if not top:
            raise BuildError(f"{folder}: the tree is gone", hint="ddtree-ops runtime build RUNTIME")
        return []
    prefix = f"{top}/" if top else ""
    return [
        FileEntry(prefix + entry.path, entry.mode, entry.size, entry.sha256) for entry in scan_tree(folder)
    ]
