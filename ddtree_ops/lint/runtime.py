"""What lint has to know of a runtime: its flags, and what its graph runner sizes by. Kept beside the bundle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_ops import launchflags, sizing
from ddtree_ops.launchflags import (
    ARGS_PATH,
    PLUGIN_PATH,
    Flag,
    FlagsError,
    FlagSet,
    read_flags,
    read_plugin,
)
from ddtree_ops.runtime.kept import place_of

if TYPE_CHECKING:
    from ddtree_ops.runtime import Bundle

__all__ = ["RuntimeFacts", "facts_of", "read_facts"]

_PROBES = ((8, 32), (6, 20))
_kept: dict[str, RuntimeFacts] = {}
_guard = threading.Lock()


@dataclass(frozen=True)
class RuntimeFacts:
    """What a runtime's own source tells.

    :param flags: None where they cannot be read.
    :param problem: then why.
    :param sized_by: what the target-verify graph of a DDTREE worker is sized by: ``budget`` (budget + 1, right),
        ``block`` (block_size: the first request dies), or empty where that is not known.
    :param overlay: DDTREE comes from the overlay of this project.
    """

    flags: FlagSet | None
    problem: str = ""
    sized_by: str = ""
    overlay: bool = False

    def with_plugins(self, extra: Mapping[str, Sequence[str]]) -> RuntimeFacts:
        """The same with what plugins of the venv add."""
        if not extra or self.flags is None:
            return self
        return replace(self, flags=self.flags.with_plugins(extra))

    def meant(self, key: str) -> tuple[tuple[str, Flag], ...]:
        """Flags that argparse may take ``--key`` for: the one of that name, else all that begin so."""
        if self.flags is None:
            return ()
        flag = self.flags.find(f"--{key}")
        return ((f"--{key}", flag),) if flag else self.flags.beginning(f"--{key}")


def facts_of(bundle: Bundle) -> RuntimeFacts:
    """What is known of a bundle: read once, then from ``launch-flags.json`` beside the bundle's tree.

    A file that is damaged, or was written by another version of the reader, is made anew. A bundle outside the cache (a
    vendored tree) is read every time. Nothing is run.
    """
    with _guard:
        if bundle.digest not in _kept:
            _kept[bundle.digest] = _facts_of(bundle)
        return _kept[bundle.digest]


def _facts_of(bundle: Bundle) -> RuntimeFacts:
    folder = place_of(bundle)
    place = None if folder is None else folder / "launch-flags.json"
    reader = _reader()
    if place is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(place.read_bytes())
            if (kept["digest"], kept["reader"]) == (bundle.digest, reader):
                return RuntimeFacts(
                    FlagSet.from_json(kept["flags"]) if kept["flags"] else None,
                    str(kept["problem"]),
                    str(kept["sized_by"]),
                    bool(kept["overlay"]),
                )
    facts = read_facts(bundle.root)
    if place is not None:
        flags = facts.flags.to_json() if facts.flags else None
        record = {
            "digest": bundle.digest,
            "reader": reader,
            "flags": flags,
            "problem": facts.problem,
            "sized_by": facts.sized_by,
            "overlay": facts.overlay,
        }
        _write(place, record)
    return facts


def read_facts(root: Path) -> RuntimeFacts:
    """What the tree under ``root`` (the folder that holds ``sglang/``) tells; reads files, runs nothing."""

    def read(path: str) -> str | None:
        try:
            return (root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    source, plugin = read(ARGS_PATH), read(PLUGIN_PATH)
    flags, problem = None, f"there is no {ARGS_PATH}"
    if source is not None:
        try:
            flags, problem = read_flags(source, read), ""
            if plugin is not None:
                flags = read_plugin(flags, plugin, read)
        except FlagsError as error:
            problem = str(error)
    return RuntimeFacts(flags, problem, _sized_by(read(sizing.RUNNER_PATH)), plugin is not None)


def _sized_by(source: str | None) -> str:
    tokens = set()
    for block, budget in _PROBES if source else ():
        try:
            got = sizing.tokens_per_request(
                source or "", algorithm="DDTREE", draft_worker=False, block_size=block, budget=budget
            )
        except sizing.SizingError:
            return ""
        tokens.add({budget + 1: "budget", block: "block"}.get(got, ""))
    return tokens.pop() if len(tokens) == 1 else ""


def _reader() -> str:
    """Names the code that reads: what another version of it wrote is not trusted."""
    files = (launchflags.__file__, sizing.__file__, __file__)
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """By rename; a cache that cannot be written only costs time."""
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(record, stream, separators=(",", ":"), default=str)
        Path(temporary).replace(path)
