"""Findings, rules, and the case a rule looks at. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from ddtree_ops.inventory.models import ArgValue, Service, Target
from ddtree_ops.launchflags import Flag
from ddtree_ops.lint.runtime import RuntimeFacts

__all__ = ["Case", "Cite", "Finding", "Given", "Rule", "Severity", "rule", "rules_of"]


class Severity(StrEnum):
    """``error`` refuses a deployment, ``warn`` is shown, ``info`` is shown by ``ddtree-ops lint`` only."""

    ERROR = "error"
    WARN = "warn"
    INFO = "info"


@dataclass(frozen=True)
class Cite:
    """A line of the released sglang 0.5.11 that a rule rests on; the tests look it up in the wheel.

    :param text: what stands on that line.
    """

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"sglang 0.5.11 {self.path}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """One thing found.

    :param rule: id of the rule, as ``lint.ignore`` names it.
    :param message: what is so here, one sentence.
    :param reason: why it matters.
    :param source: what that rests on.
    :param change: the change to make.
    :param path: key path in the inventory, from its top.
    :param place: ``file:line`` of it, or the option that set it; empty where nobody looked.
    :param ignored: why it is put up with; then the severity is ``info``.
    """

    rule: str
    severity: Severity
    message: str
    reason: str
    source: str
    change: str
    path: tuple[str, ...] = ()
    place: str = ""
    ignored: str = ""

    @property
    def where(self) -> str:
        """Dotted key path: ``services.k26-ddtree.args.page-size``."""
        return ".".join(self.path)

    def __str__(self) -> str:
        return f"{self.where}: {self.message}: {self.change}"

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "rule": self.rule,
            "severity": self.severity.value,
            "message": self.message,
            "reason": self.reason,
            "source": self.source,
            "change": self.change,
            "where": self.where,
            "place": self.place,
            "ignored": self.ignored,
        }


@dataclass(frozen=True)
class Given:
    """One launch flag as it will stand in the command line.

    :param key: name without dashes, as written.
    :param path: key path below the service.
    :param typed: a field of the service writes it.
    :param options: flags it may stand for: one, several where an abbreviation is ambiguous, none where it is unknown.
    """

    key: str
    value: ArgValue
    path: tuple[str, ...]
    typed: bool
    options: tuple[tuple[str, Flag], ...] = ()

    @property
    def flag(self) -> Flag | None:
        """The one flag it stands for."""
        return self.options[0][1] if len(self.options) == 1 else None

    @property
    def exact(self) -> bool:
        """True where it is written in full."""
        return any(name == f"--{self.key}" for name, _ in self.options)

    @property
    def words(self) -> tuple[str, ...]:
        """The words after the flag."""
        if self.value is None or isinstance(self.value, bool):
            return ()
        return tuple(str(item) for item in (self.value if isinstance(self.value, list) else [self.value]))


_FIELDS: tuple[tuple[str, str], ...] = (
    ("model-path", "model"),
    ("served-model-name", "served_name"),
    ("host", "bind"),
    ("port", "port"),
    ("tp-size", "tensor_parallel"),
)
_SPECULATIVE: tuple[tuple[str, str], ...] = (
    ("speculative-algorithm", "algorithm"),
    ("speculative-num-draft-tokens", "block_size"),
    ("speculative-ddtree-budget", "budget"),
    ("speculative-ddtree-topk-cap", "topk_cap"),
    ("speculative-ddtree-budget-schedule", "budget_schedule"),
)
_NODES = ("nnodes", "node-rank", "dist-init-addr")


@dataclass(frozen=True)
class Case:
    """One target and what is known of its runtime; what the rules ask of it."""

    target: Target
    facts: RuntimeFacts

    @property
    def service(self) -> Service:
        return self.target.service

    @property
    def algorithm(self) -> str:
        """Speculative algorithm in capitals, empty where there is none."""
        return self.service.speculative.algorithm.upper() if self.service.speculative else ""

    @property
    def tree(self) -> bool:
        """True where a tree of drafts is verified."""
        return self.algorithm == "DDTREE"

    @property
    def overlay(self) -> bool:
        """True where that is done by the overlay of this project."""
        return self.tree and self.facts.overlay

    @property
    def block(self) -> bool:
        """True for the block drafters, which share the refusals of 0.5.11's DFLASH."""
        return self.algorithm in ("DDTREE", "DFLASH")

    @property
    def verify_tokens(self) -> int | None:
        """Tokens a request that a verify step sends; None where only the runtime would tell."""
        speculative = self.service.speculative
        if speculative is None:
            return 1
        if self.tree:
            return None if speculative.budget is None else speculative.budget + 1
        return speculative.block_size if self.block else None

    @property
    def _speculative(self) -> tuple[tuple[str, str], ...]:
        """Flags of ``speculative`` as the runtime calls them, and their fields."""
        names = self.target.runtime.dialect
        return tuple((names.get(key, key), name) for key, name in _SPECULATIVE)

    @property
    def arch(self) -> str:
        """``sm120`` without suffix, empty where the inventory does not say."""
        return self.target.host.gpu.arch.rstrip("af") if self.target.host.gpu else ""

    @property
    def sm100(self) -> bool:
        """Data-centre Blackwell: what 0.5.11 calls sm100 is every part of major version 10."""
        return self.arch.startswith("sm10") and len(self.arch) == 5

    @cached_property
    def given(self) -> tuple[Given, ...]:
        """Every flag of the command line, those of fields first."""
        service = self.service
        found: list[tuple[str, ArgValue, tuple[str, ...], bool]] = []
        for key, name in _FIELDS:
            found.append((key, getattr(service, name), (name,), True))
        if service.drafter is not None and service.speculative is not None:
            found.append(("speculative-draft-model-path", service.drafter, ("drafter",), True))
        for key, name in self._speculative if service.speculative else ():
            if name != "block_size" or self.block:
                value = getattr(service.speculative, name)
                found.append((key, value, ("speculative", name), True))
        if service.nodes is not None:
            found += [(key, "1", ("nodes",), True) for key in _NODES]
        found += [(key, value, ("args", key), False) for key, value in service.args.items()]
        return tuple(
            Given(key, value, path, typed, self.facts.meant(key))
            for key, value, path, typed in found
            if value is not None and value is not False
        )

    def field_of(self, flag: Flag) -> str | None:
        """The field of the service that a flag belongs to, whether or not it is set; None where there is none."""
        fields = [*_FIELDS, ("speculative-draft-model-path", "drafter"), *((key, "nodes") for key in _NODES)]
        fields += [
            (key, f"speculative.{name}")
            for key, name in self._speculative
            if name != "block_size" or self.block
        ]
        return next((name for key, name in fields if f"--{key}" in flag.options), None)

    def arg(self, key: str) -> Given | None:
        """The flag ``key`` as it is given under any of its names or an abbreviation; the last one counts."""
        flag = self.facts.flags.find(f"--{key}") if self.facts.flags else None
        matching = [
            one for one in self.given if one.key == key or (flag is not None and one.flag is not None
                                                           and one.flag.options == flag.options)
        ]  # fmt: skip
        return matching[-1] if matching else None

    def text(self, key: str) -> str | None:
        """A flag's first word; None where it is not given."""
        given = self.arg(key)
        return given.words[0] if given and given.words else None

    def number(self, key: str) -> float | None:
        """A flag's number; None where it is not given, or is none (another rule says so)."""
        given, text = self.arg(key), self.text(key)
        if given is None or text is None:
            return None
        try:
            number = float(given.flag.convert(text) if given.flag else text)
        except (ValueError, TypeError, OverflowError):
            return None
        return number if math.isfinite(number) else None

    def whole(self, key: str, default: int) -> int:
        """A flag's whole number, or the default."""
        number = self.number(key)
        return default if number is None else int(number)

    def on(self, key: str) -> bool:
        """True where a bare flag is given."""
        return self.arg(key) is not None

    def path(self, *keys: str) -> tuple[str, ...]:
        """Key path of something of the service."""
        return ("services", self.service.name or self.service.unit, *keys)


Check = Callable[["Case"], Iterator["Found"]]


@dataclass(frozen=True)
class Found:
    """What a rule yields: message, change, key path below the service, and a severity other than the rule's.

    :param top: ``path`` begins at the top of the inventory.
    """

    message: str
    change: str
    path: tuple[str, ...] = ()
    severity: Severity | None = None
    reason: str = ""
    top: bool = False


@dataclass(frozen=True)
class Rule:
    """A rule: what it is called, what it rests on, and the function that looks.

    :param title: what it looks for, for the table in the documentation.
    :param reason: why that matters, one or two sentences.
    """

    id: str
    severity: Severity
    title: str
    reason: str
    sources: tuple[Cite | str, ...]
    check: Check = field(compare=False)

    @property
    def source(self) -> str:
        """All sources in one line."""
        return ", ".join(str(source) for source in self.sources)

    def findings(self, case: Case) -> Iterator[Finding]:
        """What the rule finds in a case."""
        for found in self.check(case):
            yield Finding(
                rule=self.id,
                severity=found.severity or self.severity,
                message=found.message,
                reason=found.reason or self.reason,
                source=self.source,
                change=found.change,
                path=found.path if found.top else case.path(*found.path),
            )


_REGISTRY: dict[str, list[Rule]] = {}


def rule(
    id: str, severity: Severity, title: str, *, reason: str, sources: Sequence[Cite | str]
) -> Callable[[Check], Check]:
    """Register a function as a rule, under the module it stands in."""

    def register(check: Check) -> Check:
        known = _REGISTRY.setdefault(check.__module__, [])
        if any(other.id == id for rules in _REGISTRY.values() for other in rules):
            raise ValueError(f"there are two rules {id}")
        known.append(Rule(id, severity, title, reason, tuple(sources), check))
        return check

    return register


def rules_of(*modules: str) -> tuple[Rule, ...]:
    """The rules of modules that were imported, in their order."""
    return tuple(one for module in modules for one in _REGISTRY.get(module, ()))
