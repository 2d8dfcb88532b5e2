"""Signatures as data: loaded from YAML, validated, matched.

A file holds one signature. ``pattern`` (RE2: linear time, no look-ahead, no backreference) is searched in the text of
an exception (``where: traceback``), in a single line of the server (``log``), of systemd about the unit
(``systemd``) or of the kernel (``kernel``), and only where one of the ``literal`` texts occurs, which keeps the search
cheap; where ``unless`` occurs too, it is no match. ``frame`` must fit a frame of the exception where frames are known.
``role`` says what a match means: a ``cause`` is reported as the root, a ``wrapper`` only frames the cause below it, a
``consequence`` follows a failure and is the finding only if nothing deeper is there and ``alone`` gives it a meaning
of its own.

``where: metrics`` has no pattern but a ``detector``, which judges the figures of a whole log.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ddtree_ops.diagnose import regex
from ddtree_ops.diagnose.events import Frame
from ddtree_ops.diagnose.explain import SOLVERS, Solution, fill, template_fields
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.yaml_source import Document, Problem, display, load_model, suggestion
from ddtree_ops.paths import signature_directories
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from ddtree_ops.diagnose.figures import Detector, Figures

__all__ = [
    "DIRECTORY",
    "Example",
    "Library",
    "Match",
    "Role",
    "Severity",
    "Signature",
    "Where",
    "default_library",
    "explained",
    "lenient_library",
    "load_library",
    "read_signature",
    "signature_files",
]

Where = Literal["traceback", "log", "systemd", "kernel", "metrics"]
Severity = Literal["fatal", "degraded", "request", "benign"]
Role = Literal["cause", "wrapper", "consequence"]

DIRECTORY = Path(__file__).parent / "signatures"
_TEXTUAL: tuple[Where, ...] = ("traceback", "log", "systemd", "kernel")
_FACTS = frozenset(item.name for item in fields(ServiceFacts) if item.name != "learned") | {"verify_tokens"}
_LIMIT = 20_000
_GROUP = 400


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Example(_Model):
    """A text to match or not to match, with the facts and the frame it needs; for ``metrics`` a log of several lines."""

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

    def service(self) -> ServiceFacts:
        """The example's facts. :raises ConfigError: one of them does not exist."""
        unknown = set(self.facts) - _FACTS - {"learned"}
        if unknown:
            raise ConfigError(
                f"example: no fact {', '.join(sorted(unknown))}{suggestion(min(unknown), sorted(_FACTS))}"
            )
        return ServiceFacts(**self.facts)


class Signature(_Model):
    """One known failure. See the module's text for the meaning of the fields."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str = Field(min_length=1, max_length=100)
    pattern: str = Field(default="", description="regular expression (RE2) with named groups")
    unless: str | None = Field(
        default=None, description="regular expression; where it occurs, there is no match"
    )
    literal: list[str] = Field(
        default_factory=list, description="texts of which every match holds at least one"
    )
    detector: str | None = Field(default=None, description="for where: metrics")
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

    @field_validator("pattern", "frame", "unless")
    @classmethod
    def _compiles(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and not info.context:
            try:
                regex.compile(value)
            except regex.RegexError as error:
                raise ValueError(f"not a regular expression of RE2: {error}") from error
        return value

    def inconsistencies(self) -> list[tuple[str, str]]:
        """What does not fit together: the field to mend, and why."""
        found: list[tuple[str, str]] = []
        if "metrics" in self.where:
            found += self._metrics()
        else:
            found += [
                (name, f"where: {self.where[0]} needs a {name}")
                for name in ("pattern", "literal")
                if not getattr(self, name)
            ]
            if self.detector is not None:
                found.append(("detector", "belongs to where: metrics"))
        if self.solver is not None and self.solver not in SOLVERS:
            found.append(("solver", f"no solver {self.solver!r} (allowed: {', '.join(sorted(SOLVERS))})"))
        if self.frame and "traceback" not in self.where:
            found.append(("frame", "frame needs where: traceback"))
        if any(not literal for literal in self.literal):
            found.append(("literal", "an empty text is in every line"))
        if self.severity != "benign" and self.role == "cause" and not self.remedy:
            found.append(("remedy", "a cause needs a remedy"))
        return found + self._templates()

    def _metrics(self) -> list[tuple[str, str]]:
        found = [
            (name, "where: metrics has a detector and no text to search")
            for name in ("pattern", "literal", "unless", "frame", "solver")
            if getattr(self, name)
        ]
        if self.where != ["metrics"]:
            found.append(("where", "metrics cannot be combined with places of text"))
        detectors = _detectors()
        if self.detector is None:
            found.append(("detector", "where: metrics needs a detector" + _allowed(detectors)))
        elif self.detector not in detectors:
            found.append(("detector", f"no detector {self.detector!r}" + _allowed(detectors)))
        return found

    def _templates(self) -> list[tuple[str, str]]:
        known = set(regex.compile(self.pattern).groups if self.pattern else ()) | _FACTS
        if self.solver in SOLVERS:
            known |= SOLVERS[self.solver][1]
        if self.detector is not None:
            detectors = _detectors()
            if self.detector not in detectors:
                return []
            known |= detectors[self.detector].fields
        found = []
        for name in ("explanation", "remedy"):
            try:
                unknown = template_fields(getattr(self, name)) - known
            except ValueError as error:
                found.append((name, f"not a template: {error}"))
                continue
            found += [
                (name, f"the template names {word}, which nothing gives{suggestion(word, sorted(known))}")
                for word in sorted(unknown)
            ]
        return found


def _detectors() -> Mapping[str, Detector]:
    """Detectors by name; loaded only where a signature of figures is read."""
    from ddtree_ops.diagnose.figures import DETECTORS

    return DETECTORS


def _allowed(names: Iterable[str]) -> str:
    return f" (allowed: {', '.join(sorted(names))})"


@dataclass(frozen=True)
class Match:
    """A signature found in a text, explained."""

    signature: Signature
    explanation: str
    remedy: str


class _Compiled:
    """A signature ready to match; a pattern is compiled when one of its literals is first seen."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        order = ("cause", "wrapper", "consequence").index(signature.role)
        self.rank = (signature.severity != "benign", order, signature.frame is None, signature.id)

    @cached_property
    def pattern(self) -> regex.Pattern:
        return regex.compile(self.signature.pattern)

    @cached_property
    def unless(self) -> regex.Pattern | None:
        return regex.compile(self.signature.unless) if self.signature.unless else None

    @cached_property
    def frame(self) -> regex.Pattern | None:
        return regex.compile(self.signature.frame) if self.signature.frame else None

    def match(self, text: str, facts: ServiceFacts, frames: Sequence[Frame]) -> Match | None:
        signature = self.signature
        for literal in signature.literal:
            if literal in text:
                break
        else:
            return None
        found = self.pattern.search(text)
        if found is None or (self.unless is not None and self.unless.search(text) is not None):
            return None
        if self.frame is not None:
            if frames:
                if not any(
                    self.frame.search(f"{frame.file} {frame.function} {frame.code}") for frame in frames
                ):
                    return None
            elif signature.frame_required:
                return None
        groups = found.groupdict()
        solution: Solution | None = Solution()
        if signature.solver is not None:
            solution = SOLVERS[signature.solver][0](groups, facts, frames)
        return None if solution is None else explained(signature, facts, groups | dict(solution.values))


def explained(signature: Signature, facts: ServiceFacts, found: Mapping[str, str]) -> Match:
    """A match with the templates filled from the facts and from what was ``found`` (groups, a solution's values)."""
    values = {name: getattr(facts, name) for name in _FACTS}
    values |= {"host": facts.host or "HOST", "unit": facts.unit or "UNIT"}
    values |= {
        name: value if len(value) <= _GROUP else f"{value[: _GROUP - 1]}…" for name, value in found.items()
    }
    return Match(signature, fill(signature.explanation, values), fill(signature.remedy, values))


class Library:
    """A set of signatures, indexed by where they match.

    :param origins: the file each signature was read from.
    """

    def __init__(self, signatures: Iterable[Signature], origins: Mapping[str, Path] | None = None) -> None:
        self.signatures = tuple(signatures)
        self._origins = dict(origins or {})
        self._where: dict[str, list[_Compiled]] = {}
        self._filter: dict[str, regex.Pattern | None] = {}
        compiled = [_Compiled(item) for item in self.signatures if item.pattern]
        compiled.sort(key=lambda item: item.rank)
        for where in _TEXTUAL:
            chosen = [item for item in compiled if where in item.signature.where]
            self._where[where] = chosen
            self._filter[where] = regex.any_of(
                sorted({literal for item in chosen for literal in item.signature.literal})
            )

    def __getitem__(self, name: str) -> Signature:
        """The signature with this id. :raises KeyError: there is none."""
        for signature in self.signatures:
            if signature.id == name:
                return signature
        raise KeyError(name)

    def extended(self, signatures: Iterable[Signature], origins: Mapping[str, Path]) -> Library:
        """A library with these signatures too; each replaces what has its id."""
        found = {item.id: item for item in (*self.signatures, *signatures)}
        return Library(found.values(), {**self._origins, **origins})

    def origin(self, name: str) -> Path | None:
        """The file a signature was read from; None where it was not read from one."""
        return self._origins.get(name)

    def shipped(self, name: str) -> bool:
        """Whether a signature is one of ours, not a user's."""
        path = self._origins.get(name)
        return path is not None and path.parent == DIRECTORY

    def literals(self) -> tuple[str, ...]:
        """Every text that makes a line worth parsing: without those of benign signatures, which only suppress."""
        return tuple(
            sorted(
                {literal for item in self.signatures if item.severity != "benign" for literal in item.literal}
            )
        )

    def all_literals(self) -> tuple[str, ...]:
        """Every text of which a line that any signature matches holds one."""
        return tuple(sorted({literal for item in self.signatures for literal in item.literal}))

    def match(
        self, text: str, where: Where, facts: ServiceFacts | None = None, frames: Sequence[Frame] = ()
    ) -> Match | None:
        """The best signature for ``text``: benign first, then causes, those that know the frame before others."""
        return next(self.matches(text, where, facts, frames), None)

    def matches(
        self, text: str, where: Where, facts: ServiceFacts | None = None, frames: Sequence[Frame] = ()
    ) -> Iterator[Match]:
        """Every signature that fits ``text``, best first."""
        text = text[:_LIMIT]
        wanted = self._filter[where]
        if wanted is None or wanted.search(text) is None:
            return
        facts = facts or ServiceFacts()
        for compiled in self._where[where]:
            found = compiled.match(text, facts, frames)
            if found is not None:
                yield found

    def detect(self, figures: Figures, facts: ServiceFacts | None = None) -> list[Match]:
        """Every signature of ``where: metrics`` that the figures of a log show."""
        facts = facts or ServiceFacts()
        detectors = _detectors()
        found = []
        for signature in self.signatures:
            if signature.detector is None:
                continue
            solution = detectors[signature.detector].function(figures, facts)
            if solution is not None:
                found.append(explained(signature, facts, solution.values))
        return found


def read_signature(path: Path) -> Signature:
    """One file as a signature.

    :raises ConfigError: it is wrong, every problem with its line, or its name is not its id.
    """

    def consistent(document: Document, signature: Signature) -> list[Problem]:
        found = [document.problem((name,), text) for name, text in signature.inconsistencies()]
        if path.stem != signature.id:
            text = f"signature file {path.name} has the id {signature.id}: rename it to {signature.id}.yaml"
            found.append(document.problem(("id",), text))
        for kind in ("examples", "lookalikes"):
            for number, example in enumerate(getattr(signature, kind)):
                try:
                    example.service()
                except ConfigError as error:
                    found.append(document.problem((kind, number), error.message))
        return found

    return load_model(path, Signature, interpolate=False, what="signature file", extra=consistent)


def signature_files(directory: Path) -> list[Path]:
    """The signature files of a directory, by name.

    :raises ConfigError: there is no such directory, or a file would be overlooked.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"{display(directory)} is not a directory of signatures: each would be a file ID.yaml in it"
        )
    missed = sorted(directory.glob("*.yml"))
    if missed:
        raise ConfigError(
            f"{', '.join(map(display, missed))} would be overlooked: the files of signatures end with .yaml",
            hint=f"mv {shlex.quote(display(missed[0]))} {shlex.quote(display(missed[0].with_suffix('.yaml')))}",
        )
    return sorted(directory.glob("*.yaml"))


def default_library(extra: Iterable[Path] = ()) -> Library:
    """The shipped signatures and the user's own; a later directory replaces what an earlier one has under the same id.

    :raises ConfigError: a file is wrong, or a directory that is named does not exist.
    """
    return load_library(*signature_directories(), *extra)


def lenient_library(extra: Iterable[Path] = ()) -> tuple[Library, tuple[str, ...]]:
    """The same where a user's wrong file must not judge a service: it is left out.

    :returns: the library, and a sentence for each file or directory that was left out.
    """
    library, left_out = _shipped(), []
    for directory in (*signature_directories(), *extra):
        try:
            paths = signature_files(directory)
        except ConfigError as error:
            left_out.append(f"signatures were left out: {error.message}")
            paths = sorted(directory.glob("*.yaml")) if directory.is_dir() else []
        for path in paths:
            try:
                signature = read_signature(path)
                library = library.extended([signature], {signature.id: path})
            except ConfigError as error:
                why = f"it has {count(len(error.details), 'problem')}" if error.details else error.message
                name = shlex.quote(display(path))
                left_out.append(
                    f"your signature file {display(path)} was left out: {why} (ddtree-ops signatures test {name})"
                )
    return library, tuple(left_out)


def load_library(*directories: Path) -> Library:
    """The shipped signatures, and those of further directories: a file there replaces a shipped one of the same id.

    :raises ConfigError: a file is wrong, or its name is not its id, or a directory does not exist.
    """
    if not directories:
        return _shipped()
    found: dict[str, Signature] = {}
    origins: dict[str, Path] = {}
    for directory in directories:
        for path in signature_files(directory):
            signature = read_signature(path)
            found[signature.id], origins[signature.id] = signature, path
    return _shipped().extended(found.values(), origins)


def _read_shipped(path: Path) -> Signature:
    """What :func:`read_signature` gives, without its checks: the tests make them, and users should not wait for them."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return Signature.model_validate(yaml.load(path.read_bytes(), loader), context={"shipped": True})


_guard = threading.Lock()


def _shipped() -> Library:
    with _guard:  # a deploy asks from several threads, and reading takes half a second of processor
        return _read_all()


@lru_cache(maxsize=1)
def _read_all() -> Library:
    read = {path: _read_shipped(path) for path in signature_files(DIRECTORY)}
    return Library(read.values(), {signature.id: path for path, signature in read.items()})
