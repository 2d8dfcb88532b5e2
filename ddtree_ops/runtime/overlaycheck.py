"""What a tree holds of the overlay: there and whole, and which flags it brings. Files are read, nothing is run."""

from __future__ import annotations

import configparser
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ddtree_ops.launchflags import ALGORITHM_FLAG
from ddtree_ops.runtime.overlay import DDTREE, OVERLAY, Overlay, brings_own, extended_flags, flags_of
from ddtree_ops.runtime.verify import Difference, compare_digests
from ddtree_ops.wording import count

__all__ = ["GROUP", "OverlayCheck", "OverlayState", "check_overlay", "plugin_named", "plugins_of"]

GROUP = "sglang.srt.plugins"
"""Group of entry points by which sglang finds plugins."""

_ABOUT = re.compile(r"^--speculative-(?!eagle|ngram).*(?:tree|budget|topk)")
_ENTRY_POINTS = re.compile(r"[^/]+\.(?:dist|egg)-info/entry_points\.txt")
_SGLANG = re.compile(r"sglang-([^/-]+)\.dist-info/")
_METADATA = re.compile(rf"{OVERLAY}-[^/]+\.dist-info/")


class OverlayState(StrEnum):
    """What there is of the overlay in a tree."""

    WHOLE = "whole"
    """The package and the metadata of its entry point, byte for byte."""
    ALTERED = "altered"
    """There, but files are missing, changed or more, or other metadata in the tree name its plugin too."""
    ABSENT = "absent"


@dataclass(frozen=True)
class OverlayCheck:
    """What :func:`check_overlay` found.

    :param label: package and version of the overlay that the tree was compared with.
    :param differences: sorted by path; empty unless it is altered.
    :param flags: option strings that the tree has through the overlay and not without it; of a tree with a DDTREE of its
        own those that are about a tree.
    :param plugins: names under which sglang finds plugins by the metadata in the tree.
    :param own: whether the tree has DDTREE itself; None: its flags cannot be read.
    :param offers: whether ``--speculative-algorithm DDTREE`` is taken, with the overlay where there is one; None: not
        known.
    :param misfit: what the overlay is written for and what the tree is, where they differ by the tree's metadata.
    """

    label: str
    state: OverlayState
    differences: tuple[Difference, ...] = ()
    flags: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    own: bool | None = None
    offers: bool | None = None
    misfit: str = ""

    @property
    def ok(self) -> bool:
        """False for an altered overlay, for one in a tree that has the algorithm itself or is of another version."""
        whole = self.state is OverlayState.WHOLE and not self.own and not self.misfit
        return self.state is OverlayState.ABSENT or whole

    @property
    def short(self) -> str:
        """For a line that says more than this; empty where nothing is known."""
        if self.state is OverlayState.ABSENT:
            return {True: f"{DDTREE} of the tree's own", False: f"no {DDTREE}", None: ""}[self.own]
        found = f"with entry point {', '.join(self.plugins)}" if self.plugins else "WITHOUT an entry point"
        return f"{self.label} {found}" if self.ok else f"{self.label} {found}, not as shipped"

    @property
    def summary(self) -> str:
        """One sentence."""
        if self.state is OverlayState.ABSENT:
            besides = f", with {', '.join(self.flags)}" if self.flags else ""
            return {
                True: f"no overlay: {DDTREE} is the tree's own{besides}",
                False: f"no overlay, and no {DDTREE}: {ALGORITHM_FLAG} refuses it at the start",
                None: f"no overlay; whether the tree has {DDTREE} itself cannot be told from its flags",
            }[self.own]
        text = f"overlay {self.label} as shipped"
        if self.state is OverlayState.ALTERED:
            first = self.differences[0]
            text = f"overlay {self.label} is not as shipped: {count(len(self.differences), 'file')}, the first {first}"
        text += (
            f"; entry point {', '.join(self.plugins)}"
            if self.plugins
            else "; no entry point: sglang does not find it"
        )
        if self.flags:
            text += f"; adds {DDTREE if self.offers else 'no algorithm'} and {', '.join(self.flags)}"
        if self.misfit:
            text += f"; {self.misfit}"
        if self.own:
            text += f"; the tree has {DDTREE} itself: two of them"
        return text

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            "overlay": self.label,
            "state": str(self.state),
            "summary": self.summary,
            "differences": [one.to_json() for one in self.differences],
            "flags": list(self.flags),
            "plugins": list(self.plugins),
            "own": self.own,
            "offers": self.offers,
            "misfit": self.misfit,
        }


def check_overlay(
    overlay: Overlay, hashes: Mapping[str, str], read: Callable[[str], bytes | None]
) -> OverlayCheck:
    """Compare a tree with the overlay.

    :param hashes: hex sha256 by path of what the tree holds; byte code is passed over, and so are other paths, but for
        entry points: sglang keeps the last plugin of a name, so another of the overlay's name is a difference.
    :param read: content by path within the tree, None where there is no such file: asked for the files of the flags.
    :raises BuildError: a file of the overlay cannot be read on this machine.
    """
    there = {
        path: digest
        for path, digest in hashes.items()
        if (path.startswith(f"{OVERLAY}/") or _METADATA.match(path)) and "__pycache__" not in path.split("/")
    }
    named = set(overlay.entry_points.get(GROUP, ()))
    again = tuple(
        Difference(path, "extra", "", hashes[path])
        for path in sorted(hashes.keys() - there.keys())
        if _ENTRY_POINTS.fullmatch(path) and named & set(plugins_of([path], read))
    )
    differences = (*compare_digests(overlay.hashes, there), *again)
    same = {path for path, digest in there.items() if overlay.hashes.get(path) == digest}
    plain = flags_of(read)
    own = brings_own(plain, read)
    if not there:
        about = tuple(name for name in plain.options if _ABOUT.search(name)) if plain and own else ()
        return OverlayCheck(overlay.label, OverlayState.ABSENT, flags=about, own=own, offers=own)
    plugins = plugins_of(there, lambda path: overlay.files[path] if path in same else read(path))
    extended = extended_flags(plain, read) if plain is not None and plugins else plain
    gone = not any(path.startswith(f"{OVERLAY}/") for path in there)
    return OverlayCheck(
        overlay.label,
        OverlayState.ALTERED if differences else OverlayState.WHOLE,
        differences,
        tuple(name for name in extended.options if name not in plain.options) if plain and extended else (),
        plugins,
        own,
        own if gone else brings_own(extended, read),
        next(filter(None, (overlay.misfit(version) for version in _versions(hashes))), ""),
    )


def _versions(paths: Iterable[str]) -> list[str]:
    """Of sglang, by the metadata in a tree."""
    return sorted({found[1] for path in paths if (found := _SGLANG.match(path))})


def plugin_named(overlay: Overlay | None, read: Callable[[str], bytes | None]) -> str:
    """As :attr:`OverlayCheck.short` says it, by one file of a tree that nobody hashed; empty where it is not there."""
    if overlay is None:
        return ""
    plugins = plugins_of([f"{overlay.dist_info}/entry_points.txt"], read)
    return f"{overlay.label} with entry point {', '.join(plugins)}" if plugins else ""


def plugins_of(paths: Iterable[str], read: Callable[[str], bytes | None]) -> tuple[str, ...]:
    """Names under which sglang finds plugins by the metadata of a tree, sorted; what cannot be read names none.

    :param paths: of the tree. :param read: content by path, None where there is no such file.
    """
    found: set[str] = set()
    for path in paths:
        if not _ENTRY_POINTS.fullmatch(path):
            continue
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        try:
            parser.read_string((read(path) or b"").decode("utf-8", "replace"))
        except configparser.Error:
            continue
        if parser.has_section(GROUP):
            found.update(parser.options(GROUP))
    return tuple(sorted(found))
