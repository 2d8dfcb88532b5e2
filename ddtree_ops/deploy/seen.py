"""Where a failure was seen before: in the evidence kept on this machine, and in the history of its host."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_ops import paths
from ddtree_ops.wording import count, moment_of

if TYPE_CHECKING:
    from ddtree_ops.deploy.history import History
    from ddtree_ops.diagnose.reduce import Diagnosis

__all__ = ["Sighting", "in_evidence", "in_history", "sentence"]

_FOLDER = re.compile(r"(.+)-(\d{8}T\d{6}Z)")
_NEWEST = 500
_SAME = timedelta(minutes=30)
"""Evidence and history tell of one failure some time apart, a rollback may lie between."""


@dataclass(frozen=True)
class Sighting:
    """One earlier failure of the same kind.

    :param target: ``HOST`` or ``HOST/SERVICE``.
    :param release: digest or name of what ran; empty where it is not known.
    """

    target: str
    time: datetime
    release: str = ""
    invocation: str = ""


def _root(document: Any) -> dict[str, Any]:
    """The first fatal finding of a kept ``diagnosis.json``."""
    found = document.get("diagnoses") if isinstance(document, dict) else None
    items = found if isinstance(found, list) else []
    return next((item for item in items if isinstance(item, dict) and item.get("severity") == "fatal"), {})


def in_evidence(cause: Diagnosis, folder: Path | None = None, *, target: str = "") -> list[Sighting]:
    """Sightings in the evidence of this machine, oldest first; the newest 500 folders are looked at.

    :param target: the ``HOST`` or ``HOST/SERVICE`` that is explained: folders have ``-`` for the ``/`` in it.

    Evidence of the very failure that is explained (its first line has the same time) is left out, and so is what cannot
    be read.
    """
    root = folder or paths.state_dir() / "evidence"
    found = []
    try:
        names = sorted(entry.name for entry in root.iterdir() if _FOLDER.fullmatch(entry.name))
    except OSError:
        return []
    for name in sorted(names, key=lambda name: name[-16:])[-_NEWEST:]:
        try:
            document = json.loads((root / name / "diagnosis.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        item = _root(document)
        if item.get("fingerprint") != cause.fingerprint or item.get("signature") != cause.signature:
            continue
        if cause.first and item.get("first") == cause.first:
            continue
        match = _FOLDER.fullmatch(name)
        if match:
            when = datetime.strptime(match[2], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            invocation = str(document.get("invocation") or "")
            release = str((document.get("facts") or {}).get("runtime") or "")
            own = match[1] == target.replace("/", "-")
            found.append(Sighting(target if own else match[1], when, release, invocation))
    return found


def in_history(cause: Diagnosis, history: History, target: str) -> list[Sighting]:
    """Activations of a service that ended in the same failure, oldest first."""
    found = []
    for item in history.activations:
        when = moment_of(item.time)
        if item.fingerprint == cause.fingerprint and item.signature == cause.signature and when is not None:
            release = f"{item.runtime} {item.release[:12]}".strip()
            found.append(Sighting(target, when, release, item.invocation))
    return found


def sentence(sightings: Iterable[Sighting], target: str = "", invocation: str = "") -> str:
    """``seen before: 3 times on this host since 2026-11-03, last with release X``, or ``not seen before here``.

    :param target: where the failure explained happened; empty: not known (a file).
    :param invocation: the run that is explained, which is no earlier sighting.
    """
    kept: list[Sighting] = []
    for item in sorted(sightings, key=lambda item: (item.time, not item.release)):
        if invocation and item.invocation == invocation:
            continue
        if any(_same(item, other) for other in kept):
            continue
        kept.append(item)
    here = [item for item in kept if not target or item.target == target]
    others = sorted({item.target for item in kept if target and item.target != target})
    elsewhere = f", and on {', '.join(others[:4])}" if others else ""
    if not here:
        return f"not seen before here{elsewhere.replace(', and', ', but', 1)}"
    last = here[-1]
    where = (
        "on this host"
        if target
        else f"in the evidence of this machine ({', '.join(sorted({i.target for i in here})[:4])})"
    )
    release = f" with release {last.release}" if last.release else f" at {last.time:%Y-%m-%d %H:%MZ}"
    return f"seen before: {count(len(here), 'time')} {where} since {here[0].time:%Y-%m-%d}, last{release}{elsewhere}"


def _same(one: Sighting, other: Sighting) -> bool:
    if one.target != other.target:
        return False
    if one.invocation and other.invocation:
        return one.invocation == other.invocation
    return abs(one.time - other.time) < _SAME
