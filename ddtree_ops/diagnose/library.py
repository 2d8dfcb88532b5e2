"""Signatures as data: loaded from YAML, validated, matched.

A file holds one signature. ``pattern`` is searched in the text of an exception (``where: traceback``), in a single
line of the server (``log``), of systemd about the unit (``systemd``) or of the kernel (``kernel``), and only where
one of the ``literal`` texts occurs, which keeps the search cheap. ``frame`` must fit a frame of the exception where
frames are known. ``role`` says what a match means: a ``cause`` is reported as the root, a ``wrapper`` only frames
the cause below it, a ``consequence`` follows a failure and is the finding only if nothing deeper is there and
``alone`` gives it a meaning of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ddtree_ops.diagnose.events import Frame
from ddtree_ops.diagnose.explain import SOLVERS, Solution, fill, template_fields
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.yaml_source import load_model

__all__ = [
    "DIRECTORY",
    "Example",
    "Library",
    "Match",
    "Role",
    "Severity",
    "Signature",
    "Where",
    "load_library",
]

Where = Literal["traceback", "log", "systemd", "kernel"]
Severity = Literal["fatal", "degraded", "request", "benign"]
Role = Literal["cause", "wrapper", "consequence"]

DIRECTORY = Path(__file__).parent / "signatures"
_FACTS = frozenset(item.name for item in fields(ServiceFacts) if item.name != "learned") | {"verify_tokens"}
_LIMIT = 20_000


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Example(_Model):
    """A text to match or not to match, with the facts and the frame it needs."""

    text: str
    where: Where | None = None
    frame: str = Field(default="", description="'file function code' of the frame it was raised in")
    facts: dict[str, Any] = Field(default_factory=dict)

    def frames(self) -> tuple[Frame, ...]:
        """The example's frame as a traceback would give it."""
        if not self.frame:
            return ()
        file, _, rest = self.frame.partition(" ")
        function, _, code = rest.partition(" ")
        return (Frame(file, 1, function, code),)


class Signature(_Model):
    """One known failure. See the module's text for the meaning of the fields."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str = Field(min_length=1, max_length=100)
    pattern: str = Field(min_length=1, description="regular expression with named groups")
    literal: list[str] = Field(min_length=1, description="texts of which every match holds at least one")
    where: list[Where] = Field(min_length=1)
    severity: Severity
    role: Role = "cause"
    alone: bool = False
    frame: str | None = None
    frame_required: bool = False
    solver: str | None = None
    explanation: str = Field(min_length=1)
    remedy: str = ""
    source: str = Field(min_length=1)
    examples: list[Example] = Field(min_length=1)
    lookalikes: list[Example] = Field(min_length=1)

    @field_validator("literal", "where", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("examples", "lookalikes", mode="before")
    @classmethod
    def _examples(cls, value: Any) -> Any:
        return (
            [{"text": item} if isinstance(item, str) else item for item in value]
            if isinstance(value, list)
            else value
        )

    @field_validator("pattern", "frame")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Signature:
        if self.solver is not None and self.solver not in SOLVERS:
            raise ValueError(f"no solver {self.solver!r} (allowed: {', '.join(sorted(SOLVERS))})")
        if self.frame and "traceback" not in self.where:
            raise ValueError("frame needs where: traceback")
        known = set(re.compile(self.pattern).groupindex) | _FACTS
        if self.solver is not None:
            known |= SOLVERS[self.solver][1]
        for template in (self.explanation, self.remedy):
            try:
                unknown = template_fields(template) - known
            except ValueError as error:
                raise ValueError(f"not a template: {error}") from error
            if unknown:
                raise ValueError(f"the template names {', '.join(sorted(unknown))}, which nothing gives")
        if self.severity != "benign" and self.role == "cause" and not self.remedy:
            raise ValueError("a cause needs a remedy")
        return self


@dataclass(frozen=True)
class Match:
    """A signature found in a text, explained."""

    signature: Signature
    explanation: str
    remedy: str


class _Compiled:
    """A signature ready to match."""

    __slots__ = ("frame", "pattern", "rank", "signature")

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.pattern = re.compile(signature.pattern)
        self.frame = re.compile(signature.frame) if signature.frame else None
        order = ("cause", "wrapper", "consequence").index(signature.role)
        self.rank = (signature.severity != "benign", order, signature.frame is None, signature.id)

    def match(self, text: str, facts: ServiceFacts, frames: Sequence[Frame]) -> Match | None:
        signature = self.signature
        if not any(literal in text for literal in signature.literal):
            return None
        found = self.pattern.search(text)
        if found is None:
            return None
        if self.frame is not None:
            if frames:
                if not any(
                    self.frame.search(f"{frame.file} {frame.function} {frame.code}") for frame in frames
                ):
                    return None
            elif signature.frame_required:
                return None
        groups = {name: value for name, value in found.groupdict().items() if value is not None}
        solution: Solution | None = Solution()
        if signature.solver is not None:
            solution = SOLVERS[signature.solver][0](groups, facts, frames)
        if solution is None:
            return None
        values = {name: getattr(facts, name) for name in _FACTS} | groups | dict(solution.values)
        return Match(signature, fill(signature.explanation, values), fill(signature.remedy, values))


class Library:
    """A set of signatures, indexed by where they match."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self.signatures = tuple(signatures)
        self._where: dict[str, list[_Compiled]] = {}
        self._filter: dict[str, re.Pattern[str]] = {}
        for where in ("traceback", "log", "systemd", "kernel"):
            chosen = [_Compiled(signature) for signature in self.signatures if where in signature.where]
            chosen.sort(key=lambda compiled: compiled.rank)
            literals = sorted({literal for compiled in chosen for literal in compiled.signature.literal})
            self._where[where] = chosen
            self._filter[where] = re.compile("|".join(map(re.escape, literals)) if literals else r"(?!)")

    def __getitem__(self, name: str) -> Signature:
        """The signature with this id. :raises KeyError: there is none."""
        for signature in self.signatures:
            if signature.id == name:
                return signature
        raise KeyError(name)

    def match(
        self, text: str, where: Where, facts: ServiceFacts | None = None, frames: Sequence[Frame] = ()
    ) -> Match | None:
        """The best signature for ``text``: benign first, then causes, those that know the frame before others."""
        text = text[:_LIMIT]
        if self._filter[where].search(text) is None:
            return None
        facts = facts or ServiceFacts()
        for compiled in self._where[where]:
            found = compiled.match(text, facts, frames)
            if found is not None:
                return found
        return None


def load_library(*directories: Path) -> Library:
    """The shipped signatures, and those of further directories: a file there replaces a shipped one of the same id.

    :raises ConfigError: a file is wrong, or its name is not its id.
    """
    return _load(tuple(directories))


@lru_cache(maxsize=8)
def _load(directories: tuple[Path, ...]) -> Library:
    found: dict[str, Signature] = {}
    for directory in (DIRECTORY, *directories):
        for path in sorted(directory.glob("*.yaml")):
            signature = load_model(path, Signature, interpolate=False, what="signature file")
            if path.stem != signature.id:
                raise ConfigError(
                    f"signature file {path.name} has the id {signature.id}",
                    hint=f"rename it to {signature.id}.yaml",
                )
            found[signature.id] = signature
    return Library(found.values())
