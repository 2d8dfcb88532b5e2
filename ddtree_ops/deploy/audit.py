"""The audit of a host: one JSON object a line in ``DEPLOY_ROOT/audit.jsonl``, append only, for all services.

Every act on a host that is no activation leaves a line here: start, stop, restart, prune, confirm, a lock that was
broken, a rollback that was asked for. Activations and their verdicts stand in the service's history; :func:`merge`
puts both into one order for reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from ddtree_ops.deploy.history import Activation, parse_history
from ddtree_ops.deploy.identity import origin, who
from ddtree_ops.remote.session import Request, Session
from ddtree_ops.secret import redact
from ddtree_ops.service.layout import Layout
from ddtree_ops.wording import moment_of

__all__ = [
    "Act",
    "Audit",
    "Entry",
    "HostAudit",
    "act_line",
    "merge",
    "parse_audit",
    "read_audit",
    "record",
    "record_request",
]

_SCHEMA = 1
_FIELDS = ("time", "action", "service", "outcome", "detail", "who", "origin")


@dataclass(frozen=True)
class Act:
    """One act on a host.

    :param time: UTC, ISO 8601, client clock.
    :param service: unit it was about; empty for the whole host.
    :param outcome: how it ended, one word or a short phrase (``ok``, ``failed``, ``refused``, ``nothing to do``).
    :param detail: one line for a person.
    :param invocation: of the run that was stopped, where one was.
    """

    time: str
    action: str
    service: str
    outcome: str
    detail: str
    who: str
    origin: str
    invocation: str = ""


@dataclass(frozen=True)
class Audit:
    """Acts, oldest first. ``damaged`` counts lines that could not be read."""

    acts: tuple[Act, ...] = ()
    damaged: int = 0


@dataclass(frozen=True)
class Entry:
    """One line of what happened on a host, from an act or an activation.

    :param outcome: of an act, or the verdict of an activation; empty while nobody has judged it.
    """

    time: str
    service: str
    action: str
    outcome: str
    detail: str
    who: str
    origin: str

    def to_json(self) -> dict[str, str]:
        """Stable JSON form."""
        return asdict(self)


@dataclass(frozen=True)
class HostAudit:
    """What happened on a host, oldest first; ``damaged``: lines that could not be read, by file."""

    entries: tuple[Entry, ...] = ()
    damaged: Mapping[str, int] = field(default_factory=dict)

    def to_json(self, lines: int | None = None) -> dict[str, Any]:
        """Stable JSON form, of the newest ``lines`` or of all."""
        shown = self.entries if lines is None else self.entries[-lines:]
        return {"entries": [entry.to_json() for entry in shown], "damaged_lines": dict(self.damaged)}


def read_audit(session: Session, root: str) -> HostAudit:
    """The audit of a host and the histories of all its services, merged. Two round trips.

    :param root: the host's deploy root.
    """
    listed, acts = session.ask(
        [
            Request("list_dir", {"path": f"{root}/services"}),
            Request("read_file", {"path": Layout(root, "").audit, "max_bytes": 64 << 20}),
        ],
        deadline=120.0,
    )
    units = [entry["name"] for entry in listed.values["entries"] if entry["kind"] == "dir"]
    paths = [Layout(root, unit).history for unit in units]
    reads = [Request("read_file", {"path": path, "max_bytes": 64 << 20}) for path in paths]
    found = session.ask(reads, deadline=120.0)
    histories = [parse_history(reply.data if reply.values["found"] else None) for reply in found]
    audit = parse_audit(acts.data if acts.values["found"] else None)
    damaged = {path: history.damaged for path, history in zip(paths, histories, strict=True)}
    damaged[Layout(root, "").audit] = audit.damaged
    by_unit = {unit: history.activations for unit, history in zip(units, histories, strict=True)}
    return HostAudit(merge(audit.acts, by_unit), {path: count for path, count in damaged.items() if count})


def act_line(
    action: str,
    *,
    service: str,
    outcome: str,
    detail: str = "",
    who: str,
    origin: str,
    time: str = "",
    invocation: str = "",
) -> str:
    """The line of an act, without newline. Pure where ``time`` is given."""
    record = {
        "schema": _SCHEMA,
        "time": time or datetime.now(UTC).isoformat(timespec="milliseconds"),
        "action": action,
        "service": service,
        "outcome": outcome,
        "detail": redact(" ".join(detail.split()))[:1000],
        "who": who,
        "origin": origin,
        **({"invocation": invocation} if invocation else {}),
    }
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def record_request(
    layout: Layout, action: str, *, outcome: str, detail: str = "", invocation: str = ""
) -> Request:
    """What :func:`record` asks of the host, to go into a batch with other requests."""
    line = act_line(
        action,
        service=layout.unit,
        outcome=outcome,
        detail=detail,
        who=who(),
        origin=origin(),
        invocation=invocation,
    )
    return Request("append_line", {"path": layout.audit}, line.encode("utf-8", "surrogateescape"))


def record(
    session: Session, layout: Layout, action: str, *, outcome: str, detail: str = "", invocation: str = ""
) -> None:
    """Write down an act on a host. One round trip.

    :raises RemoteError: it could not be written.
    """
    request = record_request(layout, action, outcome=outcome, detail=detail, invocation=invocation)
    session.request(request.op, request.args, data=request.data)


def parse_audit(content: bytes | None) -> Audit:
    """The audit from the file's content; None (no file) is an empty one."""
    acts: list[Act] = []
    damaged = 0
    for line in (content or b"").splitlines():
        if not line.strip():
            continue
        try:
            found: Mapping[str, Any] = json.loads(line)
            named = {name: str(found[name]) for name in _FIELDS}
            acts.append(Act(**named, invocation=str(found.get("invocation", ""))))
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged += 1
    return Audit(tuple(acts), damaged)


def merge(acts: Iterable[Act], activations: Mapping[str, Iterable[Activation]]) -> tuple[Entry, ...]:
    """Acts and activations (by unit) in the order of time, oldest first. Pure."""
    found = [
        (
            _id_moment(item.id) or _moment(item.time),
            Entry(
                time=item.time,
                service=unit,
                action=f"activate ({item.reason})",
                outcome=item.verdict.value if item.verdict else "",
                detail=_about(item),
                who=item.who,
                origin=item.origin,
            ),
        )
        for unit, items in activations.items()
        for item in items
    ]
    found += [(_moment(act.time), Entry(**{name: getattr(act, name) for name in _FIELDS})) for act in acts]
    return tuple(entry for _, entry in sorted(found, key=lambda pair: pair[0]))


def _about(item: Activation) -> str:
    what = f"{item.runtime} {item.release[:12]}".strip()
    return what if item.good or not item.summary else f"{what}: {item.summary}"


def _id_moment(text: str) -> float:
    """Seconds since the epoch from the id of an activation, which is finer than its time; 0.0: it has another form."""
    try:
        return datetime.strptime(text.partition("-")[0], "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def _moment(text: str) -> float:
    """Seconds since the epoch; a time that cannot be read comes first."""
    moment = moment_of(text)
    return moment.timestamp() if moment else 0.0
