"""What a runtime wants of the venv: Python tag and the requirements in the base wheel's METADATA. Pure but for one read.

The release shadows only the venv's ``sglang``; everything it imports stays the venv's own, so what the wheel
requires must be there.
"""

from __future__ import annotations

import email.parser
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from ddtree_ops.runtime import Bundle

__all__ = ["Mismatch", "Pins", "pins_of"]


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
    """Requirements of a base wheel, those of its extras left out. ``source`` names it for people."""

    source: str
    requirements: tuple[Requirement, ...]

    def mismatches(
        self, packages: Mapping[str, tuple[str, ...]], machine: str, python: str
    ) -> list[Mismatch]:
        """What the venv lacks or has in a version that does not do.

        :param machine: of the host, as ``uname -m`` (markers); ``python``: ``3.12``.
        """
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


def _mismatch(wanted: Requirement, version: str) -> Mismatch:
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
    paths = (entry.path for entry in bundle.files if entry.path.endswith(".dist-info/METADATA"))
    path = next(paths, None)
    if path is None:
        return None
    try:
        text = (bundle.root / path).read_text("utf-8", errors="replace")
    except OSError:
        return None
    head = email.parser.HeaderParser().parsestr(text)
    requirements = []
    for line in head.get_all("Requires-Dist") or ():
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if "extra ==" not in str(wanted.marker or ""):
            requirements.append(wanted)
    return Pins(f"{head.get('Name', 'sglang')} {head.get('Version', '')}".strip(), tuple(requirements))
