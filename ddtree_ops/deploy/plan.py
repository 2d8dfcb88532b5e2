"""What a deployment would change, as data. Pure: the same wish and the same facts give the same plan."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ddtree_ops.deploy.history import History
from ddtree_ops.remote.files import FileEntry
from ddtree_ops.secret import MASK, is_secret_name, redact
from ddtree_ops.service.state import UnitState
from ddtree_ops.service.unitfile import environment_of, exec_start_of, flags_of

__all__ = [
    "Change",
    "ChangeKind",
    "FileDelta",
    "Observed",
    "Plan",
    "ValueChange",
    "Wish",
    "argument_changes",
    "compare_values",
    "file_marks",
    "make_plan",
    "manifest_files",
    "masked_argument",
    "masked_unit_line",
    "masked_value",
    "text_sha256",
    "unit_diff",
    "unit_mode",
    "variable_changes",
]

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")


class ChangeKind(StrEnum):
    """What a change touches, in the order in which changes are applied."""

    RELEASE = "release"
    UNIT = "unit"
    SECRET = "secret"
    LINK = "link"
    START = "start"
    RESTART = "restart"
    VALIDATE = "validate"


_ENDS = (ChangeKind.START, ChangeKind.RESTART, ChangeKind.VALIDATE)


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
class ValueChange:
    """A launch argument or a variable that differs; None: not there. Secrets are masked."""

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.name} {self.after}".rstrip()
        if self.after is None:
            return f"- {self.name} {self.before}".rstrip()
        return f"{self.name}: {self.before or '(set)'} -> {self.after or '(set)'}"

    def to_json(self) -> dict[str, str | None]:
        """Stable JSON form."""
        return {"name": self.name, "before": self.before, "after": self.after}


@dataclass(frozen=True)
class FileDelta:
    """Files of the wished runtime against those of the release that ``current`` points at, each sorted by path.

    :param against: digest of that release.
    """

    against: str
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = [
            f"{len(names)} {verb}"
            for verb, names in (("added", self.added), ("changed", self.changed), ("removed", self.removed))
            if names
        ]
        return ", ".join(counts) or "none differs"

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "against": self.against,
            "added": list(self.added),
            "changed": list(self.changed),
            "removed": list(self.removed),
        }


@dataclass(frozen=True)
class Wish:
    """What SHOULD run on one host.

    :param files: path -> sha256 (and executable bit) of the runtime's files; None where they are not known.
    :param overlay: package and version of what the bundle holds beside ``sglang/``; empty: nothing, or not known.
    """

    host: str
    service: str
    unit: str
    release: str
    runtime: str
    unit_text: str
    files: Mapping[str, str] | None = field(default=None, repr=False)
    overlay: str = ""


@dataclass(frozen=True)
class Observed:
    """What DOES run there.

    :param release: digest that ``current`` points to; None where nothing was ever activated.
    :param releases: digests published on the host.
    :param unit_text: the unit file; None where there is none.
    :param repaired: files of the wished release that are (or were, until the push put them right) not as built, one
        problem an entry.
    :param manifest: ``manifest.json`` of the release that ``current`` points at; None where it was not read.
    :param secrets: what differs in the service's secrets, one sentence each, names only.
    :param stale_secrets: files of secrets that the wish needs no more.
    """

    release: str | None
    releases: frozenset[str]
    unit_text: str | None
    state: UnitState
    history: History = field(default_factory=History)
    repaired: tuple[str, ...] = ()
    manifest: bytes | None = field(default=None, repr=False)
    secrets: tuple[str, ...] = ()
    stale_secrets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The changes, and why a restart is needed or not.

    :param files: what differs in the runtime; None where that cannot be told, ``files_unknown`` says why.
    :param arguments: launch arguments one by one; None where the old command line cannot be read: see the diff.
    :param variables: variables of the unit one by one; None likewise.
    :param reasons: why the service is started or restarted; empty where it is not.
    :param stays: what will NOT happen, and why.
    :param notes: what is not of the plan's making and changes what it comes to.
    """

    wish: Wish
    changes: tuple[Change, ...]
    files: FileDelta | None = None
    files_unknown: str = ""
    arguments: tuple[ValueChange, ...] | None = ()
    variables: tuple[ValueChange, ...] | None = ()
    reasons: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

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

    def short(self) -> str:
        """One line: what is about to be changed, and whether the service goes down for it."""
        if self.empty:
            return f"plan {self.digest[:12]}: nothing to change"
        parts: list[str] = []
        if self.files is not None and (self.files.added or self.files.changed or self.files.removed):
            parts.append(f"runtime files: {self.files}")
        elif self.has(ChangeKind.RELEASE):
            parts.append(next(c.summary for c in self.changes if c.kind is ChangeKind.RELEASE))
        parts += map(str, (self.arguments or ())[:3])
        parts += map(str, (self.variables or ())[:3])
        hidden = max(0, len(self.arguments or ()) - 3) + max(0, len(self.variables or ()) - 3)
        if hidden:
            parts.append(f"{hidden} more")
        elif self.has(ChangeKind.UNIT) and not (self.arguments or self.variables):
            parts.append(next(c.summary for c in self.changes if c.kind is ChangeKind.UNIT))
        parts += [change.summary for change in self.changes if change.kind is ChangeKind.SECRET]
        last = self.changes[-1]
        parts.append(last.summary if last.kind in _ENDS else "no restart")
        return f"plan {self.digest[:12]}: {'; '.join(parts)}"

    def to_json(self) -> Mapping[str, Any]:
        """Stable JSON form."""
        return {
            "schema": 1,
            "host": self.wish.host,
            "service": self.wish.service,
            "unit": self.wish.unit,
            "release": self.wish.release,
            "runtime": self.wish.runtime,
            "overlay": self.wish.overlay or None,
            "digest": self.digest,
            "changes": [
                {"kind": change.kind.value, "summary": change.summary, "diff": list(change.diff)}
                for change in self.changes
            ],
            "restart": self.activates,
            "reasons": list(self.reasons),
            "stays": list(self.stays),
            "notes": list(self.notes),
            "files": self.files.to_json() if self.files else None,
            "files_unknown": self.files_unknown,
            "arguments": None if self.arguments is None else [item.to_json() for item in self.arguments],
            "variables": None if self.variables is None else [item.to_json() for item in self.variables],
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
        diff = unit_diff(observed.unit_text or "", wish.unit_text, "(host)", "(wished)", wish.unit)
        changes.append(Change(ChangeKind.UNIT, f"{verb} {wish.unit}", diff))
    changes += [Change(ChangeKind.SECRET, summary) for summary in observed.secrets]
    if changes and observed.stale_secrets:
        names = ", ".join(observed.stale_secrets)
        changes.append(
            Change(ChangeKind.SECRET, f"remove {names} from the host's secrets, once this has passed")
        )
    if observed.release != wish.release:
        before = observed.release[:12] if observed.release else "nothing"
        changes.append(Change(ChangeKind.LINK, f"switch from {before} to {wish.release[:12]}"))
    reasons = _restart_reasons(wish, observed)
    if not observed.state.running:
        reasons = [observed.state.describe()]
        changes.append(Change(ChangeKind.START, f"start it: {reasons[0]}"))
    elif reasons:
        changes.append(Change(ChangeKind.RESTART, f"restart: {' and '.join(reasons)}"))
    if not changes and not _judged_good(wish, observed):
        changes.append(
            Change(
                ChangeKind.VALIDATE,
                "validate again: what runs is as wished, but nobody saw this run of it pass",
            )
        )
    delta, unknown = _file_delta(wish, observed)
    before_text = observed.unit_text
    return Plan(
        wish,
        tuple(changes),
        files=delta,
        files_unknown=unknown,
        arguments=() if before_text is None else argument_changes(before_text, wish.unit_text),
        variables=() if before_text is None else variable_changes(before_text, wish.unit_text),
        reasons=tuple(reasons),
        stays=_stays(wish, observed, changes, reasons),
        notes=_notes(observed.state, changes),
    )


def _notes(state: UnitState, changes: list[Change]) -> tuple[str, ...]:
    notes = [f"settings also come from {path}" for path in state.drop_in_paths]
    reloads = state.need_daemon_reload or any(change.kind is ChangeKind.UNIT for change in changes)
    when = "this deploy makes it do so" if reloads else "the next daemon-reload makes it do so"
    notes += [
        f"settings will also come from {path}: systemd has not read it yet, {when}"
        for path in state.unread_drop_ins
    ]
    return tuple(notes)


def _stays(wish: Wish, observed: Observed, changes: list[Change], reasons: list[str]) -> tuple[str, ...]:
    kinds = {change.kind for change in changes}
    found = []
    if not reasons:
        found.append(
            "no restart: nothing that the process was started from changes"
            if changes
            else "no restart: it runs what is wished, and this run of it passed"
        )
    if ChangeKind.RELEASE not in kinds and changes:
        found.append(f"no upload: release {wish.release[:12]} is on the host")
    if ChangeKind.LINK not in kinds and changes:
        found.append("no switch: current points at that release already")
    if ChangeKind.UNIT not in kinds and changes:
        found.append("no new unit file: the installed one is as wished")
    return tuple(found)


def manifest_files(manifest: bytes) -> dict[str, str]:
    """Path -> sha256, with `` x`` behind it where the file is executable, of a release's ``manifest.json``.

    :raises ValueError: it is not a manifest.
    """
    try:
        listed = json.loads(manifest)["files"]
        return {str(item["path"]): _file_mark(str(item["sha256"]), int(item["mode"])) for item in listed}
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a manifest: {error}") from None


def file_marks(files: Iterable[FileEntry]) -> dict[str, str]:
    """The same of the files of a bundle."""
    return {entry.path: _file_mark(entry.sha256, entry.mode) for entry in files}


def _file_mark(sha256: str, mode: int) -> str:
    return f"{sha256} x" if mode & 0o100 else sha256


def _file_delta(wish: Wish, observed: Observed) -> tuple[FileDelta | None, str]:
    if observed.release is None:
        return None, "nothing is deployed to compare with"
    if observed.release == wish.release:
        return FileDelta(observed.release), ""
    if wish.files is None or observed.manifest is None:
        what = wish.release if wish.files is None else observed.release
        return None, f"the list of files of release {what[:12]} was not there to read"
    try:
        before = manifest_files(observed.manifest)
    except ValueError:
        return None, f"manifest.json of release {observed.release[:12]} is damaged"
    after = wish.files
    return (
        FileDelta(
            observed.release,
            added=tuple(sorted(after.keys() - before.keys())),
            changed=tuple(
                sorted(path for path in after.keys() & before.keys() if after[path] != before[path])
            ),
            removed=tuple(sorted(before.keys() - after.keys())),
        ),
        "",
    )


def argument_changes(before: str, after: str) -> tuple[ValueChange, ...] | None:
    """Launch arguments that differ between two unit texts; None where one of them cannot be read back."""
    old, new = exec_start_of(before), exec_start_of(after)
    if old is None or new is None:
        return None
    return compare_values(_arguments(old), _arguments(new), masked_argument)


def _arguments(argv: list[str]) -> dict[str, str]:
    head, flags = flags_of(argv)
    return {"command": shlex.join(head), **{name: shlex.join(words) for name, words in flags.items()}}


def masked_argument(name: str, value: str) -> str:
    """The value of a launch argument, for people: masked where its name looks like that of a secret."""
    return redact(f"{name} {value}")[len(name) :].strip()


def variable_changes(before: str, after: str) -> tuple[ValueChange, ...] | None:
    """Variables that differ between two unit texts; None where one of them cannot be read back."""
    old, new = environment_of(before), environment_of(after)
    if old is None or new is None:
        return None
    return compare_values(old, new, masked_value)


def compare_values(
    before: Mapping[str, str], after: Mapping[str, str], mask: Callable[[str, str], str]
) -> tuple[ValueChange, ...]:
    """What differs between two mappings, in the order of the first, then of the second; values go through ``mask``."""
    return tuple(
        ValueChange(
            name,
            mask(name, before[name]) if name in before else None,
            mask(name, after[name]) if name in after else None,
        )
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    )


def masked_value(name: str, value: str) -> str:
    """The value of a variable, for people: masked where its name looks like that of a secret."""
    return MASK if is_secret_name(name) else redact(value)


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
    reasons += observed.secrets
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


def unit_diff(before: str, after: str, was: str, is_now: str, unit: str) -> tuple[str, ...]:
    """Unified diff of two texts of a unit, one line of context, secrets masked; empty where they are the same.

    :param was: what the first text is, for the head of the diff; ``is_now``: the second.
    """
    return tuple(
        masked_unit_line(line)
        for line in difflib.unified_diff(
            before.splitlines(), after.splitlines(), f"{unit} {was}", f"{unit} {is_now}", lineterm="", n=1
        )
    )


def masked_unit_line(line: str) -> str:
    """A line of a unit file or of its diff, without the rest that follows a variable with a secret-looking name."""
    if "Environment=" in line:
        for match in _ASSIGNMENT.finditer(line, line.index("Environment=") + len("Environment=")):
            if is_secret_name(match[1]):
                return line[: match.end()] + MASK
    return redact(line)


def unit_mode(text: str) -> int:
    """Mode of a unit file on the host: one that holds secrets is for root alone."""
    open_to_all = all(masked_unit_line(line) == line for line in text.splitlines())
    return 0o644 if open_to_all else 0o600
