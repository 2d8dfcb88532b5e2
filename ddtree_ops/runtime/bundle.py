"""Bundles: a built runtime, named by the digest of its content.

Kept as ``cache_dir()/bundles/DIGEST/tree`` with ``manifest.json`` beside it. Digest and manifest cover path, mode, size
and sha256 of every file and nothing else: no time, user, order or origin, so that a release has one manifest whoever
built it. ``bundles/index/KEY`` remembers which digest came of which input, so that a second build with the same input
only reads the manifest; base, patches and overlay stand there and, in a vendored tree, in ``origin.json``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_ops.errors import BuildError, OpsError
from ddtree_ops.launchflags import __file__ as launchflags_code
from ddtree_ops.paths import cache_dir
from ddtree_ops.remote.files import FileEntry
from ddtree_ops.runtime.description import Description, PatchFile, load_description
from ddtree_ops.runtime.overlay import DDTREE, OVERLAY, Overlay, brings_own, flags_of
from ddtree_ops.runtime.overlay import __file__ as overlay_code
from ddtree_ops.runtime.series import Content, apply_series, data_of
from ddtree_ops.runtime.tree import (
    DirectoryTree,
    Tree,
    WheelTree,
    explained,
    is_wheel,
    open_tree,
    plain_path,
)
from ddtree_ops.runtime.wheel import fetch_wheel, sha256_of, sweep
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from ddtree_ops.inventory.models import RuntimeSpec

__all__ = [
    "MANIFEST",
    "ORIGIN",
    "Bundle",
    "Progress",
    "build",
    "digest_of",
    "known_bundle",
    "known_origins",
    "open_bundle",
]

MANIFEST = "manifest.json"
ORIGIN = "origin.json"
_SCHEMA = 2

Progress = Callable[[str], None]
"""Called with one line for a person at each stage that takes time."""


@dataclass(frozen=True)
class Bundle:
    """A built runtime on this machine.

    :param digest: 64 hex digits; names the content.
    :param root: directory whose children are the tree (``sglang/``, ``sglang-0.5.11.dist-info/``, and those of the
        overlay).
    :param files: sorted by path; modes are 0o644 or 0o755.
    :param manifest: canonical JSON of digest and files, as published beside the tree on a host.
    :param name: of the runtime; empty where only the files are known.
    :param origin: ``base`` (with a ``label`` for a person), ``patches`` (name and sha256, in order) and ``overlay``
        (package, version and sha256; None where there is none; with the key ``left_out`` it says why it was); empty
        where only the files are known.
    """

    digest: str
    root: Path
    files: tuple[FileEntry, ...]
    manifest: bytes
    name: str = ""
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """What the patches were put on, for a person; empty where it is not known."""
        return str(self.origin["base"]["label"]) if self.origin else ""

    @property
    def patches(self) -> tuple[str, ...]:
        """Names of the patches that were asked for, in order; empty where they are not known."""
        return tuple(patch["name"] for patch in self.origin.get("patches", ()))

    @property
    def overlay(self) -> str:
        """Package and version of the overlay that was put in; empty where none was, or it is not known."""
        return _laid(self.origin)

    @property
    def left_out(self) -> str:
        """Why the overlay of the runtime was left out; empty where it was not."""
        return str((self.origin.get("overlay") or {}).get("left_out", ""))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    def read(self, path: str) -> bytes | None:
        """Content of a file, None where the bundle has none of that name.

        :raises BuildError: it is not as built. :raises OSError: it cannot be read.
        """
        wanted = next((entry.sha256 for entry in self.files if entry.path == path), None)
        if wanted is None:
            return None
        content = (self.root / path).read_bytes()
        if hashlib.sha256(content).hexdigest() != wanted:
            raise BuildError(f"{path} in {self.root} is not as built")
        return content

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form, without the list of files."""
        return {
            "digest": self.digest,
            "name": self.name,
            "root": str(self.root),
            "base": self.origin.get("base"),
            "patches": self.origin.get("patches"),
            "overlay": self.origin.get("overlay"),
            "files": len(self.files),
            "bytes": self.size,
        }


@dataclass(frozen=True)
class _Base:
    """Where the files come from; ``identity`` decides whether a build may be reused."""

    identity: Mapping[str, Any]
    open: Callable[[], Tree]
    facts: Callable[[Tree], dict[str, Any]]


def build(spec: RuntimeSpec, *, progress: Progress | None = None) -> Bundle:
    """The bundle of a runtime, from the cache where the input is known.

    :param spec: description, Python tag, own base, chosen patches.
    :raises ConfigError: the description is wrong or has no such patch.
    :raises BuildError: the wheel cannot be had, its hash differs, or the base holds no sglang.
    :raises PatchError: a patch does not fit: patch, file and line. Nothing is kept.
    """
    with explained(
        "nothing was built", "the base must be readable, and the cache directory writable and not full"
    ):
        return _build(spec, progress)


def known_bundle(spec: RuntimeSpec) -> Bundle | None:
    """What :func:`build` would find in the cache; None where it would have to build, or would say what is wrong."""
    try:
        description = load_description(spec.description)
        patches = description.select(spec.patches)
        identity = _base_of(spec, description, None).identity
        known = _lookup(_key(identity, patches, _overlay_of(spec, description)))
    except (OpsError, OSError):
        return None
    return known and replace(known, name=spec.name or description.name)


def known_origins() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Digest -> label of the base, names of the patches, the overlay (empty: none), of all that was ever built here;
    unreadable ones left out."""
    found: dict[str, tuple[str, tuple[str, ...], str]] = {}
    try:
        records = sorted((_bundles() / "index").iterdir())
    except OSError:
        return found
    for path in records:
        try:
            known = json.loads(path.read_bytes())
            origin = known["origin"]
            patches = tuple(str(patch["name"]) for patch in origin["patches"])
            found[str(known["digest"])] = (str(origin["base"]["label"]), patches, _laid(origin))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _laid(origin: Mapping[str, Any]) -> str:
    """Package and version of the overlay that was put in, by the record of a build."""
    known = origin.get("overlay") or {}
    return f"{known['package']} {known['version']}" if known and "left_out" not in known else ""


def _build(spec: RuntimeSpec, progress: Progress | None) -> Bundle:
    description = load_description(spec.description)
    patches, overlay = description.select(spec.patches), _overlay_of(spec, description)
    name = spec.name or description.name
    base = _base_of(spec, description, progress)
    key = _key(base.identity, patches, overlay)
    known = _lookup(key)
    if known is not None:
        return replace(known, name=name)

    with contextlib.closing(base.open()) as tree:
        changes, applied = apply_series(tree.read, patches)
        why_not = _not_laid(tree, overlay) if overlay else ""
        if overlay and not why_not:
            changes = {**changes, **{path: Content(data) for path, data in overlay.files.items()}}
        if progress:
            fresh = count(sum(not one.already for one in applied), "patch")
            progress(f"building from {tree.label} with {fresh}{_and_overlay(overlay, why_not)}")
            misfit = overlay.misfit(tree.version) if overlay and not why_not else ""
            if misfit:
                progress(
                    f"warning: {overlay.label if overlay else ''}: {misfit}; it may not start, or serve wrongly"
                )
        bundle = _store(tree, changes)
        origin = {
            "base": base.facts(tree),
            "patches": [{"name": patch.name, "sha256": patch.sha256} for patch in patches],
            "overlay": overlay and {**overlay.to_json(), **({"left_out": why_not} if why_not else {})},
        }
    if _key(_base_of(spec, description, None).identity, patches, overlay) == key:
        _write(_bundles() / "index" / key, _canonical({"digest": bundle.digest, "origin": origin}))
    return replace(bundle, name=name, origin=origin)


def _overlay_of(spec: RuntimeSpec, description: Description) -> Overlay | None:
    return None if spec.overlay == "none" else description.overlay


def _not_laid(tree: Tree, overlay: Overlay) -> str:
    """Why the overlay is left out of a base; empty where it belongs in."""
    if any(path.startswith(f"{OVERLAY}/") for path in tree.paths()):
        return f"the base has a {OVERLAY} of its own"
    read = data_of(tree.read)
    own = brings_own(flags_of(read), read)
    if own is None:
        return f"the flags of the base cannot be read, so that it is not known whether it has {DDTREE}"
    return f"the base has {DDTREE} itself" if own else ""


def _and_overlay(overlay: Overlay | None, why_not: str) -> str:
    if overlay is None:
        return ""
    return f", without {overlay.label}: {why_not}" if why_not else f" and {overlay.label}"


def open_bundle(path: str | Path) -> Bundle:
    """A bundle, a vendored tree or a copy of a release: a directory with ``manifest.json``.

    The tree is its ``tree/`` folder where there is one, else the directory itself. Only the manifest is checked
    here; :func:`ddtree_ops.runtime.verify.verify_bundle` checks the files.

    :raises BuildError: no manifest, or one that does not agree with its own digest.
    """
    folder = Path(path).expanduser()
    bundle = _read(folder)
    try:
        if bundle.digest != digest_of(bundle.files):
            raise ValueError("the digest does not belong to the list of files")
        odd = next((entry.path for entry in bundle.files if not plain_path(entry.path)), None)
        if odd is not None:
            raise ValueError(f"{odd!r} is not a path inside a tree")
    except (ValueError, TypeError) as error:
        raise _damaged(folder, error) from error
    try:
        recorded = json.loads((folder / ORIGIN).read_bytes())
        origin = {name: recorded.get(name) for name in ("base", "patches", "overlay")}
        known = replace(bundle, name=str(recorded["name"]), origin=origin)
        return known if isinstance(known.base, str) and known.patches is not None else bundle
    except (OSError, ValueError, KeyError, TypeError):
        return bundle


def _read(folder: Path) -> Bundle:
    try:
        manifest = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise BuildError(
            f"{folder} is no bundle: {MANIFEST}: {error.strerror}", hint="ddtree-ops runtime build RUNTIME"
        ) from error
    try:
        recorded = json.loads(manifest)
        if recorded["schema"] != _SCHEMA:
            raise ValueError(f"schema {recorded['schema']} is not {_SCHEMA}")
        files = tuple(
            FileEntry(item["path"], item["mode"], item["size"], item["sha256"]) for item in recorded["files"]
        )
        root = folder / "tree" if (folder / "tree").is_dir() else folder
        return Bundle(recorded["digest"], root, files, manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> BuildError:
    return BuildError(f"{folder / MANIFEST} is damaged: {error}", hint="remove the directory and build again")


def digest_of(files: Sequence[FileEntry]) -> str:
    """sha256 over the canonical JSON of path, mode, size and sha256 of every file, sorted by path."""
    rows = sorted([entry.path, entry.mode, entry.size, entry.sha256] for entry in files)
    return hashlib.sha256(_canonical(rows)).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _bundles() -> Path:
    return cache_dir() / "bundles"


def _key(identity: Mapping[str, Any], patches: Sequence[PatchFile], overlay: Overlay | None) -> str:
    content: list[Any] = [_SCHEMA, identity, [[patch.name, patch.sha256] for patch in patches]]
    if overlay is not None:
        content += [overlay.sha256, _rule()]
    return hashlib.sha256(_canonical(content)).hexdigest()


@cache
def _rule() -> str:
    """Of the code that decides whether a base has DDTREE itself: another may decide otherwise."""
    code = b"".join(Path(path).read_bytes() for path in (launchflags_code, overlay_code))
    return hashlib.sha256(code).hexdigest()


def _base_of(spec: RuntimeSpec, description: Description, progress: Progress | None) -> _Base:
    if spec.base is None:
        pinned = description.base
        sha256 = pinned.wheels.get(spec.python, "")
        identity = {
            "kind": "pinned",
            "requirement": pinned.requirement,
            "sha256": sha256,
            "python": spec.python,
        }

        def open_pinned() -> Tree:
            tree = WheelTree(fetch_wheel(pinned, spec.python, progress=progress))
            for path, wanted in description.pristine.items():
                content = tree.read(path)
                if content is None or hashlib.sha256(content.data).hexdigest() != wanted:
                    raise BuildError(
                        f"{path} in {tree.label} is not the one that runtime {description.name} calls pristine",
                        hint=f"correct pristine: in {description.directory / 'runtime.yaml'}",
                    )
            return tree

        label = f"{pinned.requirement} {spec.python} wheel {sha256[:12]}"
        return _Base(
            identity, open_pinned, lambda tree: {**identity, "version": tree.version, "label": label}
        )

    path = Path(spec.base).expanduser()
    if is_wheel(path):
        sha256 = sha256_of(path)
        own = {"kind": "wheel", "file": path.name, "sha256": sha256}
        label = f"{path.name} {sha256[:12]}"
        return _Base(
            own, lambda: WheelTree(path), lambda tree: {**own, "version": tree.version, "label": label}
        )

    tree = open_tree(path)
    assert isinstance(tree, DirectoryTree)
    states = hashlib.sha256(_canonical(tree.states())).hexdigest()
    given = {"kind": "directory", "path": str(tree.root.resolve()), "states": states}
    facts = {"kind": "directory", "label": f"tree {spec.base}"}
    return _Base(given, lambda: tree, lambda tree: {**facts, "version": tree.version})


def _lookup(key: str) -> Bundle | None:
    """The bundle of a known input; None where there is none, or where its files are not all in the cache."""
    try:
        known = json.loads((_bundles() / "index" / key).read_bytes())
        digest, origin = known["digest"], known["origin"]
        bundle = _read(_bundles() / digest)
        sizes = DirectoryTree(bundle.root).sizes()
    except (OSError, ValueError, KeyError, TypeError, BuildError):
        return None
    whole = sizes == {entry.path: entry.size for entry in bundle.files}
    return replace(bundle, origin=origin) if whole and bundle.digest == digest else None


def _store(tree: Tree, changes: Mapping[str, Content | None]) -> Bundle:
    _bundles().mkdir(parents=True, exist_ok=True)
    sweep(_bundles(), ".staging-")
    staging = Path(tempfile.mkdtemp(dir=_bundles(), prefix=".staging-"))
    try:
        files = _write_tree(staging / "tree", tree, changes)
        digest = digest_of(files)
        listed = [
            {"path": entry.path, "mode": entry.mode, "size": entry.size, "sha256": entry.sha256}
            for entry in files
        ]
        manifest = _canonical({"schema": _SCHEMA, "digest": digest, "files": listed}) + b"\n"
        _write(staging / MANIFEST, manifest)
        staging.chmod(0o755)
        final = _bundles() / digest
        with _alone(_bundles()):
            if final.exists() and not _is_whole(final, files):
                damaged = staging.with_name(f"{staging.name}-damaged")
                final.rename(damaged)
                shutil.rmtree(damaged, ignore_errors=True)
            with contextlib.suppress(OSError):
                staging.rename(final)
        if not final.is_dir():
            raise BuildError(
                f"the bundle could not be put at {final}", hint="is the cache directory writable?"
            )
        return Bundle(digest, final / "tree", files, manifest)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_whole(folder: Path, files: Sequence[FileEntry]) -> bool:
    from ddtree_ops.runtime.verify import verify_bundle

    try:
        bundle = open_bundle(folder)
        return bundle.files == tuple(files) and not verify_bundle(bundle)
    except BuildError:
        return False


def _write_tree(root: Path, tree: Tree, changes: Mapping[str, Content | None]) -> tuple[FileEntry, ...]:
    files: list[FileEntry] = []
    made: set[Path] = set()
    for path in sorted({*tree.paths(), *changes}):
        content = changes[path] if path in changes else tree.read(path)
        if content is None:
            if path in changes:
                continue
            raise BuildError(f"{tree.label}: {path} went away while it was read")
        place = root / path
        if place.parent not in made:
            place.parent.mkdir(parents=True, exist_ok=True)
            made.add(place.parent)
        place.write_bytes(content.data)
        mode = 0o755 if content.executable else 0o644
        place.chmod(mode)
        files.append(FileEntry(path, mode, len(content.data), hashlib.sha256(content.data).hexdigest()))
    if not any(entry.path.startswith("sglang/") for entry in files):
        raise BuildError(f"{tree.label} holds no sglang", hint="is it the wheel of another project?")
    return tuple(files)


def _write(path: Path, data: bytes) -> None:
    """Write by rename, so that nobody reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
    Path(temporary).chmod(0o644)
    Path(temporary).replace(path)
