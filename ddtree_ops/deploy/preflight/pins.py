"""What a runtime wants of the venv: Python tag and the requirements in the base wheel's METADATA.

The release shadows only the venv's ``sglang``; everything it imports stays the venv's own, so what the wheel
requires must be there. What came out for a venv is kept beside the bundle: the same venv is not judged twice, and a
deploy without a change never imports ``packaging``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_ops.runtime.kept import key_of, place_of, read_kept, write_kept

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from ddtree_ops.runtime import Bundle

__all__ = ["Mismatch", "Pins", "pins_of"]

_METADATA = re.compile(r"sglang-[^/]+\.dist-info/METADATA")


@dataclass(frozen=True)
class Mismatch:
    """A package that is not as required. ``found`` is empty where it is missing.

    :param wanted: the requirement's specifier (``==0.4.2``), or empty where any version would do.
    :param older: it is older than every version that would do.
    :param near: the same major and minor version as the one that is pinned.
    """

    name: str
    wanted: str
    found: str
    older: bool = False
    near: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.found or 'is missing'}{f' ({self.wanted})' if self.wanted else ''}"


@dataclass(frozen=True)
class Pins:
    """Requirements of a base wheel.

    :param source: names it for people. :param lines: its ``Requires-Dist``, those of extras too.
    :param folder: where what came out is kept; None: nowhere.
    """

    source: str
    lines: tuple[str, ...]
    folder: Path | None = None

    @cached_property
    def requirements(self) -> tuple[Requirement, ...]:
        """Those that are not of an extra."""
        from packaging.requirements import InvalidRequirement, Requirement

        found = []
        for line in self.lines:
            try:
                wanted = Requirement(line)
            except InvalidRequirement:
                continue
            if "extra ==" not in str(wanted.marker or ""):
                found.append(wanted)
        return tuple(found)

    def mismatches(
        self, packages: Mapping[str, tuple[str, ...]], machine: str, python: str
    ) -> list[Mismatch]:
        """What the venv lacks or has in a version that does not do.

        :param machine: of the host, as ``uname -m`` (markers); ``python``: ``3.12``.
        """
        import packaging

        asked = (packaging.__version__, self.lines, sorted(packages.items()), machine, python)
        key = key_of(*asked, code=(__file__,))
        with _guard:
            if key not in _kept:
                rows = read_kept(self.folder, "venv", key)
                if rows is None:
                    rows = [astuple(one) for one in self._mismatches(packages, machine, python)]
                    write_kept(self.folder, "venv", key, rows)
                _kept[key] = [Mismatch(*row) for row in rows]
            return list(_kept[key])

    def _mismatches(
        self, packages: Mapping[str, tuple[str, ...]], machine: str, python: str
    ) -> list[Mismatch]:
        from packaging.utils import canonicalize_name

        where = {
            "extra": "",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "platform_machine": machine,
            "python_version": python,
            "python_full_version": f"{python}.0",
        }
        found: list[Mismatch] = []
        for wanted in self.requirements:
            if wanted.marker is not None and not wanted.marker.evaluate(dict(where)):
                continue
            versions = packages.get(canonicalize_name(wanted.name), ())
            if not versions:
                found.append(Mismatch(wanted.name, str(wanted.specifier), ""))
            elif not any(wanted.specifier.contains(version, prereleases=True) for version in versions):
                found.append(_mismatch(wanted, versions[0]))
        return found


_guard = threading.Lock()
_kept: dict[str, list[Mismatch]] = {}


def _mismatch(wanted: Requirement, version: str) -> Mismatch:
    from packaging.version import InvalidVersion, Version

    try:
        have = Version(version)
        asked = [
            Version(item.version) for item in wanted.specifier if item.operator in {"==", ">=", "~=", ">"}
        ]
    except InvalidVersion:
        return Mismatch(wanted.name, str(wanted.specifier), version)
    older = any(have < least for least in asked)
    near = any(have.release[:2] == one.release[:2] for one in asked)
    return Mismatch(wanted.name, str(wanted.specifier), version, older, near)


def pins_of(bundle: Bundle) -> Pins | None:
    """The requirements of a bundle's ``sglang-*.dist-info/METADATA``; None where it has none, as a bare source tree."""
    paths = (entry.path for entry in bundle.files if _METADATA.fullmatch(entry.path))
    path = next(paths, None)
    if path is None:
        return None
    try:
        text = (bundle.root / path).read_text("utf-8", errors="replace")
    except OSError:
        return None
    head: dict[str, list[str]] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, colon, value = line.partition(":")
        if colon and not name[:1].isspace():
            head.setdefault(name.lower(), []).append(value.strip())
    name, version = (head.get(word, [""])[0] for word in ("name", "version"))
    lines = tuple(head.get("requires-dist", ()))
    return Pins(f"{name or 'sglang'} {version}".strip(), lines, place_of(bundle))
