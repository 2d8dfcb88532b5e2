"""A runtime description: ``patches/NAME/runtime.yaml``, the patches beside it and the overlay that it names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.yaml_source import Document, Problem, load_model, suggestion
from ddtree_ops.paths import shipped
from ddtree_ops.runtime.overlay import Overlay

__all__ = [
    "BaseWheel",
    "Description",
    "PatchFile",
    "description_state",
    "list_descriptions",
    "load_description",
]

FILE_NAME = "runtime.yaml"

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Tag = Annotated[str, Field(pattern=r"^cp3\d+$")]
_Inside = Annotated[str, Field(pattern=r"^sglang/[^\s]+$")]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+([.-][A-Za-z0-9_]+)*$")]
_Target = Annotated[str, Field(pattern=r"^ddtree_sglang(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
_TOUCHED = re.compile(rb"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
_NEW_FILE = re.compile(rb"^diff --git a/\S+ b/(\S+)\nnew file mode ", re.MULTILINE)
_QUOTED = re.compile(rb"^diff --git (?!a/\S+ b/\S+$)", re.MULTILINE)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BaseWheel(_Model):
    """The pinned wheel: an exact requirement and the sha256 of its file for each Python tag (``cp312``)."""

    requirement: str = Field(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+$", description="NAME==VERSION")
    platform: str = Field(default="manylinux_2_34_x86_64", pattern=r"^[A-Za-z0-9_]+$")
    wheels: dict[_Tag, _Sha256] = Field(min_length=1)

    @property
    def version(self) -> str:
        """The version alone: ``0.5.11``."""
        return self.requirement.partition("==")[2]


class _Overlay(_Model):
    package: Literal["ddtree_sglang"]
    version: str = Field(pattern=r"^[0-9]+(\.[0-9]+)*$")
    entry_points: dict[_Name, dict[_Name, _Target]] = Field(min_length=1)


class _File(_Model):
    name: str = Field(pattern=r"^[A-Za-z0-9._+-]+$")
    summary: str = ""
    base: BaseWheel
    patches: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9._+-]+\.patch$")]]
    pristine: dict[_Inside, _Sha256] = Field(default_factory=dict)
    overlay: _Overlay | None = None


@dataclass(frozen=True)
class PatchFile:
    """One patch of a series, as ``git format-patch`` writes it.

    :param name: file name; also its name in manifests.
    :param content: the whole file, header included.
    """

    name: str
    content: bytes

    @cached_property
    def sha256(self) -> str:
        """Hex sha256 of the content."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Paths it touches, relative to the tree, in order."""
        names = (name.decode() for pair in _TOUCHED.findall(self.content) for name in pair)
        return tuple(dict.fromkeys(names))

    @cached_property
    def new_files(self) -> tuple[str, ...]:
        """Those of :attr:`files` that it creates."""
        return tuple(name.decode() for name in _NEW_FILE.findall(self.content))

    @property
    def header(self) -> str:
        """The text before the first difference: symptom, cause, why it is right."""
        return self.content.decode("utf-8", "replace").partition("\ndiff --git ")[0]

    @property
    def subject(self) -> str:
        """First line of the message, without ``[PATCH]``."""
        found = re.search(r"^Subject: (?:\[PATCH[^\]]*\] )?(.*(?:\n[ \t].*)*)", self.header, re.MULTILINE)
        return " ".join(found.group(1).split()) if found else self.name

    @property
    def message(self) -> str:
        """The body of the message, without mail headers and the diffstat."""
        body = self.header.partition("\n\n")[2]
        return body.partition("\n---\n")[0].strip("\n")


@dataclass(frozen=True)
class Description:
    """A loaded description.

    :param directory: where ``runtime.yaml`` and the patches are.
    :param patches: the whole series, in order.
    :param pristine: sha256, in the base, of every file that the series changes.
    :param overlay: the package that is put beside ``sglang/``; None: none.
    """

    name: str
    summary: str
    directory: Path
    base: BaseWheel
    patches: tuple[PatchFile, ...]
    pristine: Mapping[str, str]
    overlay: Overlay | None = None

    def select(self, names: Sequence[str] | None) -> tuple[PatchFile, ...]:
        """Patches by name, by number (``0001``) or by name without ``.patch``, in the order of the series.

        :param names: None for the whole series; empty for none.
        :raises ConfigError: no such patch, or none or several begin with that.
        """
        if names is None:
            return self.patches
        chosen: set[str] = set()
        for name in names:
            matching = [patch.name for patch in self.patches if patch.name in (name, f"{name}.patch")] or [
                patch.name for patch in self.patches if patch.name.startswith(f"{name}-")
            ]
            if len(matching) != 1:
                known = [patch.name for patch in self.patches]
                raise ConfigError(
                    f"runtime {self.name} has no patch {name}{suggestion(name, known)}",
                    hint="ddtree-ops patch list",
                )
            chosen.update(matching)
        return tuple(patch for patch in self.patches if patch.name in chosen)


def list_descriptions() -> tuple[str, ...]:
    """Names of the shipped descriptions."""
    return tuple(sorted(path.parent.name for path in shipped("patches").glob(f"*/{FILE_NAME}")))


def load_description(name_or_path: str | Path) -> Description:
    """A shipped description by name, or one of your own by the path of its directory or ``runtime.yaml``.

    :raises ConfigError: there is none, or it is wrong: ``details`` names file, line and key.
    """
    path = _locate(str(name_or_path))

    def extra(document: Document, loaded: _File) -> list[Problem]:
        return _problems(document, loaded, path.parent)

    loaded = load_model(path, _File, interpolate=False, what="runtime description", extra=extra)
    patches = tuple(PatchFile(name, (path.parent / name).read_bytes()) for name in loaded.patches)
    named, overlay = loaded.overlay, None
    if named is not None:
        overlay = Overlay(
            named.package,
            named.version,
            loaded.base.requirement,
            named.entry_points,
            _package(path.parent, named.package),
        )
    return Description(
        loaded.name, loaded.summary, path.parent, loaded.base, patches, loaded.pristine, overlay
    )


def _package(directory: Path, name: str) -> Path:
    """The package of an overlay: one of your own beside ``runtime.yaml``, else the shipped one."""
    own = directory / name
    return own if own.is_dir() else shipped(name)


def description_state(name_or_path: str | Path) -> list[list[str]]:
    """Names and sha256 of the files of a description, without those of its overlay.

    :raises ConfigError: there is none.
    """
    folder = _locate(str(name_or_path)).parent
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]


def _locate(name: str) -> Path:
    given = Path(name).expanduser()
    candidates = [given, given / FILE_NAME]
    if "/" not in name:
        candidates.append(shipped("patches") / name / FILE_NAME)
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise ConfigError(
        f"no runtime description {name}{suggestion(name, list_descriptions())}",
        hint=f"a name under patches/, or a directory that holds {FILE_NAME}",
    )


def _problems(document: Document, loaded: _File, directory: Path) -> list[Problem]:
    found = [
        document.problem(("pristine", path), "is not a plain path below sglang/")
        for path in loaded.pristine
        if {"", ".", ".."} & set(path.split("/"))
    ]
    for index, name in enumerate(loaded.patches):
        where = ("patches", index)
        if name in loaded.patches[:index]:
            found.append(document.problem(where, f"{name} is listed twice"))
            continue
        try:
            patch = PatchFile(name, (directory / name).read_bytes())
        except OSError as error:
            others = [path.name for path in directory.glob("*.patch")]
            found.append(document.problem(where, f"{name}: {error.strerror}{suggestion(name, others)}"))
            continue
        if not patch.files or _QUOTED.search(patch.content):
            found.append(
                document.problem(where, f"{name} is not a git patch of plain paths (diff --git a/... b/...)")
            )
        for touched in patch.files:
            if not touched.startswith("sglang/") or ".." in touched.split("/"):
                found.append(document.problem(where, f"{name} changes {touched}, outside sglang/"))
            elif touched not in loaded.pristine and touched not in patch.new_files:
                found.append(
                    document.problem(("pristine",), f"has no sha256 for {touched}, which {name} changes")
                )
    return [*found, *_overlay_problems(document, loaded.overlay, directory)]


def _overlay_problems(document: Document, overlay: _Overlay | None, directory: Path) -> list[Problem]:
    if overlay is None:
        return []
    try:
        package = _package(directory, overlay.package)
    except FileNotFoundError:
        return [document.problem(("overlay", "package"), f"there is no package {overlay.package}")]
    found = []
    for group, points in overlay.entry_points.items():
        for name, value in points.items():
            inside = value.partition(":")[0].split(".")[1:]
            module = package.joinpath(*inside)
            if not module.with_suffix(".py").is_file() and not (module / "__init__.py").is_file():
                where = ("overlay", "entry_points", group, name)
                found.append(document.problem(where, f"{value}: there is no such module in {package}"))
    return found
