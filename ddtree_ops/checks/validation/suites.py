"""Suites of checks: finding and checking their files.

File shape (``schema: 1``)::

    name: quick
    description: ...
    checks: [short-chat, prefix-hit, {burst: {widths: [8]}}]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ddtree_ops.checks.validation.base import CheckSpec, Settings
from ddtree_ops.checks.validation.golden import load as load_golden
from ddtree_ops.checks.validation.registry import checks
from ddtree_ops.errors import UsageError
from ddtree_ops.inventory.named import file_schema, list_schema, named
from ddtree_ops.inventory.yaml_source import (
    Document,
    KeyPath,
    Problem,
    check,
    config_error,
    display,
    load_document,
    suggestion,
)

__all__ = [
    "Planned",
    "Suite",
    "heed_golden",
    "load_suite",
    "pick",
    "resolve",
    "suite_names",
    "suite_schema",
]

_SHIPPED = Path(__file__).with_name("suites")


@dataclass(frozen=True)
class Planned:
    """A check to run, with its settings."""

    spec: CheckSpec
    settings: Settings

    @property
    def name(self) -> str:
        """Name of the check."""
        return self.spec.name


@dataclass(frozen=True)
class Suite:
    """A named list of checks. The standing ones (``steady`` ...) come last, and in every run: see :func:`pick`."""

    name: str
    description: str
    checks: tuple[Planned, ...]
    source: str = ""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = Field(alias="schema")
    name: str = ""
    description: str = ""
    checks: list[Any] = Field(min_length=1)


def suite_names() -> tuple[str, ...]:
    """The shipped suites, the shortest first."""
    known = {path.stem for path in _SHIPPED.glob("*.yaml")}
    order = ("quick", "standard", "full")
    return (*(name for name in order if name in known), *sorted(known - set(order)))


def load_suite(name_or_path: str | Path) -> Suite:
    """Load and check a suite: the name of a shipped one, or the path of a file (with a slash, or ending in ``.yaml``).

    :raises ConfigError: with every problem found, one ``file:line: key.path: problem`` an entry of ``details``.
    :raises UsageError: there is no such suite.
    """
    given = str(name_or_path)
    path = Path(given).expanduser()
    if "/" not in given and not given.endswith((".yaml", ".yml")):
        if given not in suite_names():
            raise UsageError(
                f"there is no suite named {given}{suggestion(given, suite_names())}",
                hint=f"there are {', '.join(suite_names())}; or give the path of a file of your own",
            )
        path = _SHIPPED / f"{given}.yaml"
    hint = f"correct {display(path)} and run it again; ddtree-ops validate --list says what a check is called and takes"
    document = load_document(path, hint=hint, defer=True)
    suite, problems = resolve(document, path.stem)
    if suite is None or problems:
        raise config_error(document.source, problems, hint=hint, what="suite", state="nothing was contacted")
    return suite


def resolve(document: Document, name: str = "") -> tuple[Suite | None, list[Problem]]:
    """Check a parsed suite file. Pure.

    :returns: the suite, or None, and every problem found (those of the text included).
    """
    shape, problems = check(document, _File)
    problems += document.problems
    if shape is None or document.problems:
        return None, problems
    planned: list[Planned] = []
    for index, entry in enumerate(shape.checks):
        one, found = _planned(document, ("checks", index), entry)
        problems += found
        if one is None:
            continue
        if any(one.name == other.name for other in planned):
            problems.append(document.problem(("checks", index), f"'{one.name}' stands here twice"))
        planned.append(one)
    if problems:
        return None, problems
    return Suite(shape.name or name, shape.description, tuple(planned), document.source), []


def _planned(document: Document, path: KeyPath, entry: Any) -> tuple[Planned | None, list[Problem]]:
    example = "'- burst' or '- burst: {widths: [8]}'"
    name, body, place, problems = named(document, path, entry, checks(), noun="check", example=example)
    if body is None:
        return None, problems
    spec = checks()[name]
    settings, problems = check(document, spec.settings, place, data=body)
    return (None if settings is None else Planned(spec, settings)), problems


def pick(names: Sequence[str] = (), suite: Suite | None = None) -> tuple[Planned, ...]:
    """What is run: the checks called ``names``, with the settings of ``suite`` where it has them, or all of ``suite``.

    The standing checks are added to what was chosen, and come last.

    :raises UsageError: a name that no check has, or nothing to run.
    """
    known, own = checks(), {planned.name: planned for planned in (suite.checks if suite else ())}
    for name in names:
        if name not in known:
            raise UsageError(
                f"there is no check named {name}{suggestion(name, known)}",
                hint="ddtree-ops validate --list names them all",
            )
    wanted = list(dict.fromkeys(names)) or list(own)
    if not wanted:
        raise UsageError(
            "no check to run",
            hint="name a suite (--suite quick) or a check (--check short-chat); ddtree-ops validate --list names them all",
        )
    every = {name: own.get(name) or Planned(spec, spec.settings()) for name, spec in known.items()}
    asking = [every[name] for name in wanted if not known[name].standing]
    return (*asking, *(planned for name, planned in every.items() if known[name].standing))


def heed_golden(plan: Sequence[Planned], given: str = "") -> None:
    """Read the golden files that ``plan`` compares with, before anything is contacted.

    :param given: that of the command line or of a step, before those of the suite; empty: there is none.
    :raises UsageError: one is given, and no check of ``plan`` compares with it.
    :raises ConfigError: there is no such file, or it is no golden file.
    """
    using = [planned for planned in plan if hasattr(planned.settings, "golden")]
    if given and not using:
        raise UsageError(
            f"--golden {given}: none of the chosen checks compares with it",
            state="nothing was contacted",
            hint="the check lossless does: --check lossless, or --suite standard; ddtree-ops validate --list names them all",
        )
    for path in dict.fromkeys(given or getattr(planned.settings, "golden", "") for planned in using):
        if path:
            load_golden(Path(path).expanduser(), state="nothing was contacted")


@cache
def suite_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a suite file, for editors."""
    known = checks()
    settings = {name: spec.settings.model_json_schema().get("properties", {}) for name, spec in known.items()}
    listed = list_schema(settings, {name: spec.title for name, spec in known.items()})
    return file_schema("suite of checks of ddtree-ops", {"checks": listed}, required=("checks",))
