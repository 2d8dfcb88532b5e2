"""The history of a service on its host: one JSON object a line, append only.

An activation is written before anything is switched (``event: activate``) and judged later by a second line
with the same id (``event: verdict``). A client that died in between leaves an activation without a verdict,
which is never taken for a good one. The last good release is found here, never by file times.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ddtree_ops.results import Verdict

if TYPE_CHECKING:
    from ddtree_ops.remote.session import Session
    from ddtree_ops.service.layout import Layout

__all__ = [
    "BENCH",
    "Activation",
    "History",
    "activation_line",
    "new_activation",
    "parse_history",
    "read_history",
    "verdict_line",
]

_SCHEMA = 1
BENCH = "bench"
"""The command of activations that were meant to last for the measuring alone."""
_FIELDS = ("id", "time", "release", "unit_sha256", "plan", "who", "origin", "reason")


@dataclass(frozen=True)
class Activation:
    """One switch of a service to a release and a unit file.

    :param id: sortable and unique.
    :param time: UTC, ISO 8601, client clock.
    :param release: bundle digest (64 hex).
    :param unit_sha256: digest of the unit file; its text is kept in ``units/<sha256>.service``.
    :param plan: digest of the plan that was applied.
    :param verdict: of the validation that followed; None while nobody has judged it.
    :param reason: ``deploy``, ``validate`` (nothing was switched) or ``rollback``.
    :param invocation: the systemd run that the verdict is about; empty where it is not known.
    :param runtime: name of the runtime that the release was built from; empty in lines of older versions.
    :param changed: what it changed against the one before, as it was told then; None: not recorded.
    :param command: that it was made by; empty in lines of older versions, and of the host itself.
    :param signature: of the root cause where it failed and a cause was found, with its ``fingerprint``; else empty.
    """

    id: str
    time: str
    release: str
    unit_sha256: str
    plan: str
    who: str
    origin: str
    reason: str = "deploy"
    verdict: Verdict | None = None
    summary: str = ""
    invocation: str = ""
    runtime: str = ""
    signature: str = ""
    fingerprint: str = ""
    changed: tuple[str, ...] | None = None
    command: str = ""

    @property
    def good(self) -> bool:
        """Validation passed."""
        return self.verdict is Verdict.PASS


@dataclass(frozen=True)
class History:
    """Activations, oldest first. ``damaged`` counts lines that could not be read."""

    activations: tuple[Activation, ...] = ()
    damaged: int = 0

    def to_json(
        self, lines: int | None = None, changes: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, Any]:
        """Stable JSON form, of the newest ``lines`` or of all; with ``changes`` (by id) of each, where given."""
        shown = self.activations if lines is None else self.activations[-lines:]
        rows = [{**asdict(item), "verdict": item.verdict.value if item.verdict else None} for item in shown]
        for row in rows:
            del row["changed"]
        if changes is not None:
            rows = [{**row, "changes": list(changes.get(row["id"], ()))} for row in rows]
        return {
            "activations": rows,
            "damaged_lines": self.damaged,
        }

    @property
    def latest(self) -> Activation | None:
        """The most recent activation, judged or not."""
        return self.activations[-1] if self.activations else None

    def good(self) -> tuple[Activation, ...]:
        """Activations whose validation passed, newest first, each release and unit once."""
        newest: dict[tuple[str, str], Activation] = {}
        for item in reversed(self.activations):
            if item.good:
                newest.setdefault((item.release, item.unit_sha256), item)
        return tuple(newest.values())

    def ways_back(self) -> tuple[Activation, ...]:
        """As :meth:`good`, in the order in which one goes back to them: what a bench measured is behind all others."""
        measured = self.measured_only
        return tuple(sorted(self.good(), key=lambda item: (item.release, item.unit_sha256) in measured))

    def measured(self, activation: Activation) -> bool:
        """It is one of :attr:`measured_only`."""
        return (activation.release, activation.unit_sha256) in self.measured_only

    @property
    def measured_only(self) -> frozenset[tuple[str, str]]:
        """Release and unit file that benches alone brought to a pass, by looser rules perhaps: of a rollback it is no choice of
        anybody, and neither is a rollback to them, a person's or the host's, nor another command's try that did not pass.
        """
        made = {(item.release, item.unit_sha256) for item in self.activations if item.command == BENCH}
        lasting = (
            item
            for item in self.activations
            if item.good and item.command != BENCH and item.reason != "rollback"
        )
        return frozenset(made - {(item.release, item.unit_sha256) for item in lasting})

    @property
    def before_bench(self) -> tuple[Activation | None, bool]:
        """What ran before a bench that did not put it back, and True; where no bench left anything, the latest and False.

        A bench that was killed leaves a configuration of its own, or the host goes back to an earlier one. What it switched
        to is a bench's until another command than a bench deploys it; a rollback to it changes nothing about that. What
        ran before is the newest of the others that passed; None where none did.
        """
        others: list[Activation] = []
        made: set[tuple[str, str]] = set()
        left = False
        for item in self.activations:
            key = (item.release, item.unit_sha256)
            before = others and (others[-1].release, others[-1].unit_sha256) == key
            left = not before and (item.command == BENCH or (item.reason == "rollback" and key in made))
            if left:
                made.add(key)
                continue
            others.append(item)
            if item.good:
                made.clear()
        if not left:
            return self.latest, False
        return next((item for item in reversed(others) if item.good), None), True

    def judged(self, invocation: str) -> Activation | None:
        """The newest activation whose verdict is about this run; None: nobody judged it, or no run is named."""
        if not invocation:
            return None
        found = (item for item in reversed(self.activations) if item.invocation == invocation)
        return next((item for item in found if item.verdict is not None), None)


def read_history(session: Session, layout: Layout) -> History:
    """The history of a service on its host. One round trip."""
    return parse_history(session.read_file(layout.history))


def new_activation(
    *,
    release: str,
    unit_sha256: str,
    plan: str,
    who: str,
    origin: str,
    reason: str,
    runtime: str = "",
    command: str = "",
) -> Activation:
    """A fresh activation with an id and the time of now."""
    now = datetime.now(UTC)
    return Activation(
        id=f"{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}-{secrets.token_hex(3)}",
        time=now.isoformat(timespec="seconds"),
        release=release,
        unit_sha256=unit_sha256,
        plan=plan,
        who=who,
        origin=origin,
        reason=reason,
        runtime=runtime,
        command=command,
    )


def activation_line(activation: Activation) -> str:
    """The line that announces an activation, without newline."""
    fields = {name: getattr(activation, name) for name in _FIELDS}
    if activation.runtime:
        fields["runtime"] = activation.runtime
    if activation.command:
        fields["command"] = activation.command
    if activation.changed is not None:
        fields["changed"] = list(activation.changed)
    return _dump({"schema": _SCHEMA, "event": "activate", **fields})


def verdict_line(
    activation_id: str,
    verdict: Verdict,
    summary: str,
    *,
    invocation: str = "",
    cause: tuple[str, str] | None = None,
) -> str:
    """The line that judges an activation, without newline.

    :param cause: signature and fingerprint of the root cause, where it failed and one was found.
    """
    found = {} if cause is None else {"signature": cause[0], "fingerprint": cause[1]}
    return _dump(
        {
            "schema": _SCHEMA,
            "event": "verdict",
            "id": activation_id,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "verdict": verdict.value,
            "summary": summary,
            "invocation": invocation,
            **found,
        }
    )


def parse_history(content: bytes | None) -> History:
    """History from the file's content; None (no file) is an empty history. Unknown events are skipped."""
    found: dict[str, Activation] = {}
    damaged = 0
    for line in (content or b"").splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            _apply(record, found)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            damaged += 1
    return History(tuple(found.values()), damaged)


def _apply(record: dict[str, Any], found: dict[str, Activation]) -> None:
    if record["event"] == "activate":
        fields: dict[str, Any] = {name: str(record[name]) for name in _FIELDS}
        changed = record.get("changed")
        found[fields["id"]] = Activation(
            **fields,
            runtime=str(record.get("runtime", "")),
            command=str(record.get("command", "")),
            changed=tuple(map(str, changed)) if isinstance(changed, list) else None,
        )
    elif record["event"] == "verdict":
        known = found[record["id"]]
        found[known.id] = replace(
            known,
            verdict=Verdict(record["verdict"]),
            summary=str(record["summary"]),
            invocation=str(record.get("invocation", "")),
            signature=str(record.get("signature", "")),
            fingerprint=str(record.get("fingerprint", "")),
        )


def _dump(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))
