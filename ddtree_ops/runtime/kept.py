"""What was found out about a bundle, kept as JSON beside its tree, under a key that names all that it depends on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_ops.runtime.bundle import Bundle

__all__ = ["key_of", "place_of", "read_kept", "write_kept"]


def place_of(bundle: Bundle) -> Path | None:
    """The folder for it; None for a bundle outside the cache (a vendored tree), of which nothing is kept."""
    folder = bundle.root.parent
    return folder if folder.name == bundle.digest else None


def key_of(*parts: object, code: tuple[str, ...]) -> str:
    """Key of what is found out from ``parts`` (what JSON can hold) by the files of ``code``."""
    digest = hashlib.sha256(json.dumps(parts).encode())
    for file in code:
        digest.update(hashlib.sha256(Path(file).read_bytes()).digest())
    return digest.hexdigest()


def read_kept(folder: Path | None, name: str, key: str) -> Any:
    """What was kept under ``key``; None where nothing was, or it cannot be read."""
    if folder is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads((folder / f"{name}-{key[:16]}.json").read_bytes())
            if kept["key"] == key:
                return kept["value"]
    return None


def write_kept(folder: Path | None, name: str, key: str, value: object) -> None:
    """Keep it, by rename; what cannot be kept only costs time."""
    if folder is None:
        return
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".new-")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump({"key": key, "value": value}, stream, separators=(",", ":"))
        Path(temporary).replace(folder / f"{name}-{key[:16]}.json")
