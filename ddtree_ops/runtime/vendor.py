"""The fixed tree for those who keep it in their own git."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_ops.errors import BuildError
from ddtree_ops.runtime.bundle import MANIFEST, ORIGIN, Bundle, Progress, build, open_bundle
from ddtree_ops.runtime.tree import explained
from ddtree_ops.runtime.verify import verify_bundle

if TYPE_CHECKING:
    from ddtree_ops.inventory.models import RuntimeSpec

__all__ = ["vendor"]

_SCRATCH = ".ddtree-ops-"


def vendor(
    spec: RuntimeSpec, directory: str | Path, *, force: bool = False, progress: Progress | None = None
) -> Bundle:
    """Write the built tree, its ``manifest.json`` and ``origin.json`` into a directory and return the bundle there.

    An earlier vendored tree is replaced: files that are no longer part of it go, everything else in the directory
    (``.git``, files of your own) is left alone. What an interrupted run left is taken up by the next one.

    :param force: overwrite vendored files that were edited since.
    :raises BuildError: the directory holds something else, or its vendored files were edited; nothing was changed.
    """
    target = Path(directory).expanduser()
    bundle = build(spec, progress=progress)
    before = _standing(target, bundle, force)
    if progress:
        progress(f"writing {len(bundle.files)} files to {target}")
    with explained(f"{target} may hold a part of it", "run the command again when that is mended"):
        _write(bundle, target, before)
    return open_bundle(target)


def _write(bundle: Bundle, target: Path, before: set[str]) -> None:
    """Files first, manifest last: until then an earlier manifest still tells what was vendored. Without an earlier
    one it goes first, so that a part of a tree is known as ours."""
    target.mkdir(parents=True, exist_ok=True)
    for left in target.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=_SCRATCH) as scratch:
        staged = Path(scratch) / "tree"
        for entry in bundle.files:
            place = staged / entry.path
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.root / entry.path, place)
            place.chmod(entry.mode)
        origin = json.dumps({"name": bundle.name, **bundle.origin}, indent=1, sort_keys=True) + "\n"
        for name, content in ((MANIFEST, bundle.manifest), (ORIGIN, origin.encode())):
            (staged / name).write_bytes(content)
            (staged / name).chmod(0o644)
        if not before:
            shutil.copyfile(staged / MANIFEST, target / MANIFEST)
        for entry in bundle.files:
            place = target / entry.path
            place.parent.mkdir(parents=True, exist_ok=True)
            (staged / entry.path).replace(place)
        for path in sorted(before - {entry.path for entry in bundle.files}):
            (target / path).unlink(missing_ok=True)
            _prune((target / path).parent, target)
        for name in (ORIGIN, MANIFEST):
            (staged / name).replace(target / name)


def _standing(target: Path, bundle: Bundle, force: bool) -> set[str]:
    """Paths of the vendored files that are there; refuses what must not be overwritten."""
    if target.exists() and not target.is_dir():
        raise BuildError(f"{target} is not a directory", state="nothing was changed")
    if not target.is_dir() or all(entry.name.startswith((".git", _SCRATCH)) for entry in target.iterdir()):
        return set()
    if not (target / MANIFEST).is_file():
        raise BuildError(
            f"{target} is not empty and was not written by this command",
            state="nothing was changed",
            hint="name an empty or a new directory",
        )
    standing = open_bundle(target)
    new = {entry.path: entry.sha256 for entry in bundle.files}
    edited = [
        difference
        for difference in verify_bundle(standing)
        if difference.kind != "missing" and new.get(difference.path) != difference.found
    ]
    if edited and not force:
        raise BuildError(
            f"{len(edited)} vendored file{'s' if len(edited) != 1 else ''} in {target} differ from what was written",
            details=tuple(str(difference) for difference in edited[:20]),
            state="nothing was changed",
            hint="keep your edits as a patch of your own, then vendor again with --force",
        )
    return {entry.path for entry in standing.files}


def _prune(folder: Path, stop: Path) -> None:
    while folder != stop and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
