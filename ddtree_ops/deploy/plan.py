"""What a deployment would change, as data. Pure: the same wish and the same facts give the same plan."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ddtree_ops.deploy.history import History
from ddtree_ops.secret import MASK, is_secret_name, redact
from ddtree_ops.service.state import UnitState

__all__ = ["Change", "ChangeKind", "Observed", "Plan", "Wish", "make_plan", "masked_unit_line", "text_sha256"]

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")


class ChangeKind(StrEnum):
    """What a change touches, in the order in which changes are applied."""

    RELEASE = "release"
    UNIT = "unit"
    LINK = "link"
    START = "start"
    RESTART = "restart"
    VALIDATE = "validate"


@dataclass(frozen=True)
class Change:
    """One difference between wish and host.

    :param summary: one sentence for a person.
    :param diff: unified diff lines, where the change is of a text.
    """

    kind: ChangeKind
    summary: str
    diff: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wish:
    """What SHOULD run on one host."""

    host: str
    service: str
    unit: str
    release: str
    runtime: str
    unit_text: str


@dataclass(frozen=True)
class Observed:
    """What DOES run there.

    :param release: digest that ``current`` points to; None where nothing was ever activated.
    :param releases: digests published on the host.
    :param unit_text: the unit file; None where there is none.
    :param repaired: files of the wished release that were not as built and were put right, one problem an entry.
    """

    release: str | None
    releases: frozenset[str]
    unit_text: str | None
    state: UnitState
    history: History = field(default_factory=History)
    repaired: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The changes, and why a restart is needed or not."""

    wish: Wish
    changes: tuple[Change, ...]

    def has(self, *kinds: ChangeKind) -> bool:
        """True when a change of one of the kinds is in the plan."""
        return any(change.kind in kinds for change in self.changes)

    @property
    def empty(self) -> bool:
        """Nothing to do: the host already runs the wish and its validation passed."""
        return not self.changes

    @property
    def activates(self) -> bool:
        """The service will be (re)started."""
        return self.has(ChangeKind.START, ChangeKind.RESTART)

    @property
    def digest(self) -> str:
        """sha256 over what the plan applies; the same in history, reports and logs."""
        wish = self.wish
        parts = [
            wish.host,
            wish.unit,
            wish.release,
            text_sha256(wish.unit_text),
            *(c.kind.value for c in self.changes),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def to_json(self) -> Mapping[str, Any]:
        """Stable JSON form."""
        return {
            "schema": 1,
            "host": self.wish.host,
            "service": self.wish.service,
            "unit": self.wish.unit,
            "release": self.wish.release,
            "runtime": self.wish.runtime,
            "digest": self.digest,
            "changes": [
                {"kind": change.kind.value, "summary": change.summary, "diff": list(change.diff)}
                for change in self.changes
            ],
        }


def text_sha256(text: str) -> str:
    """Hex sha256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def make_plan(wish: Wish, observed: Observed) -> Plan:
    """Compare wish and host.

    A restart follows from a new or repaired release, a changed unit file, or a unit that is not running. A host
    that already runs the wish, but in a run that nobody saw pass, is validated again, not restarted.
    """
    changes: list[Change] = []
    if wish.release not in observed.releases:
        changes.append(Change(ChangeKind.RELEASE, f"publish release {wish.release[:12]} ({wish.runtime})"))
    elif observed.repaired:
        changes.append(
            Change(
                ChangeKind.RELEASE, f"repair release {wish.release[:12]}: {'; '.join(observed.repaired[:3])}"
            )
        )
    if observed.unit_text != wish.unit_text:
        verb = "write" if observed.unit_text is None else "replace"
        diff = _unit_diff(observed.unit_text or "", wish.unit_text, wish.unit)
        changes.append(Change(ChangeKind.UNIT, f"{verb} {wish.unit}", diff))
    if observed.release != wish.release:
        before = observed.release[:12] if observed.release else "nothing"
        changes.append(Change(ChangeKind.LINK, f"switch from {before} to {wish.release[:12]}"))
    reasons = _restart_reasons(wish, observed)
    if not observed.state.running:
        changes.append(Change(ChangeKind.START, f"start it: {observed.state.describe()}"))
    elif reasons:
        changes.append(Change(ChangeKind.RESTART, f"restart: {' and '.join(reasons)}"))
    if not changes and not _judged_good(wish, observed):
        changes.append(
            Change(
                ChangeKind.VALIDATE,
                "validate again: what runs is as wished, but nobody saw this run of it pass",
            )
        )
    return Plan(wish, tuple(changes))


def _restart_reasons(wish: Wish, observed: Observed) -> list[str]:
    reasons = []
    if observed.release != wish.release:
        reasons.append("the release changes")
    elif observed.repaired:
        reasons.append("the files it was started from were not as built")
    if observed.unit_text != wish.unit_text:
        reasons.append("the unit file changes")
    elif observed.state.need_daemon_reload:
        reasons.append("systemd runs it from an older unit file")
    return reasons


def _judged_good(wish: Wish, observed: Observed) -> bool:
    latest = observed.history.latest
    return bool(
        latest
        and latest.good
        and latest.release == wish.release
        and latest.unit_sha256 == text_sha256(wish.unit_text)
        and latest.invocation == observed.state.invocation_id
    )


def _unit_diff(before: str, after: str, unit: str) -> tuple[str, ...]:
    return tuple(
        masked_unit_line(line)
        for line in difflib.unified_diff(
            before.splitlines(), after.splitlines(), f"{unit} (host)", f"{unit} (wished)", lineterm="", n=1
        )
    )


def masked_unit_line(line: str) -> str:
    """A line of a unit file or of its diff, without the rest that follows a variable with a secret-looking name."""
    if "Environment=" in line:
        for match in _ASSIGNMENT.finditer(line, line.index("Environment=") + len("Environment=")):
            if is_secret_name(match[1]):
                return line[: match.end()] + MASK
    return redact(line)
