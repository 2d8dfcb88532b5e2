"""What is published on a host, and what may go.

:func:`look` asks the host once (two round trips); what follows from it is decided here, by pure functions:
:func:`plan_prune` says what is removed and why the rest stays.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_ops import paths
from ddtree_ops.deploy import audit
from ddtree_ops.deploy.guard import describe_holder, program_name
from ddtree_ops.deploy.history import History, parse_history
from ddtree_ops.deploy.identity import origin, who
from ddtree_ops.errors import LockHeld, OpsError, RemoteError
from ddtree_ops.remote.files import FileEntry
from ddtree_ops.remote.session import AgentError, Request
from ddtree_ops.results import Verdict
from ddtree_ops.service.layout import Layout
from ddtree_ops.wording import count, moment_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddtree_ops.remote.session import Session

__all__ = [
    "HostReleases",
    "Leftover",
    "PrunePlan",
    "Pruned",
    "Release",
    "ServiceState",
    "Survey",
    "look",
    "old_evidence",
    "plan_prune",
    "prune",
    "prune_evidence",
    "releases_of",
    "remove",
    "verify",
]

_AHEAD_S = 24 * 3600.0
"""Seconds for which a release that was pushed and never activated is taken for one that is about to be."""
_DIGESTS = re.compile(r"[0-9a-f]{64}")
_KEPT_UNIT = re.compile(r"([0-9a-f]{64})\..+")
_STAMPED = re.compile(r".+-(\d{8}T\d{6}Z)")
_NO_ROOM = frozenset({"ENOSPC", "EDQUOT", "no_space"})


# -- what is there ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A release as the host has it; times are seconds since the epoch of its clock, sizes are bytes.

    :param own_bytes: what would be freed by removing it alone: files that no other release holds too.
    :param manifest: it has a ``manifest.json``.
    """

    digest: str
    published: float
    files: int
    bytes: int
    own_bytes: int
    manifest: bool


@dataclass(frozen=True)
class Leftover:
    """A staging folder; ``live``: an agent is working on it, it is a push or a removal under way. Sizes in bytes."""

    name: str
    live: bool
    bytes: int
    own_bytes: int = 0


@dataclass(frozen=True)
class ServiceState:
    """What a service's folder says.

    :param current: digest that ``current`` points at, or None.
    :param armed: text of the state of an armed rollback, or None.
    :param units: file names of the unit files and settings it keeps.
    """

    unit: str
    current: str | None
    armed: str | None
    units: tuple[str, ...]
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class Survey:
    """All that lies below a deploy root at one moment; ``time`` is the host's clock."""

    root: str
    time: float
    free_bytes: int
    releases: tuple[Published, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    services: tuple[ServiceState, ...] = ()


def look(session: Session, root: str) -> Survey:
    """What lies below a deploy root, with the histories of all services there. Two round trips."""
    values = session.request("survey", {"root": root}, deadline=120.0).values
    units = [str(item["unit"]) for item in values["services"]]
    requests = [
        Request("read_file", {"path": Layout(root, unit).history, "max_bytes": 64 << 20}) for unit in units
    ]
    histories = {
        unit: parse_history(data) for unit, data in zip(units, _contents(session, requests), strict=True)
    }
    return Survey(
        root=root,
        time=float(values["time"]),
        free_bytes=int(values["disk"]["free_bytes"]),
        releases=tuple(
            Published(
                item["name"],
                float(item["published"]),
                item["files"],
                item["bytes"],
                item["own_bytes"],
                item["manifest"],
            )
            for item in values["releases"]
        ),
        leftovers=tuple(
            Leftover(item["name"], item["live"], item["bytes"], item["own_bytes"])
            for item in values["leftovers"]
        ),
        services=tuple(
            ServiceState(
                item["unit"], item["current"], item["armed"], tuple(item["units"]), histories[item["unit"]]
            )
            for item in values["services"]
        ),
    )


def _contents(session: Session, requests: Sequence[Request]) -> list[bytes | None]:
    """What ``read_file`` requests found; None where there is no such file. One round trip, none without a request."""
    replies = session.ask(requests, deadline=120.0)
    return [reply.data if reply.values["found"] else None for reply in replies]


# -- the list of releases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """A published release and what is known of it.

    :param current_of: units that run it, ``good_of``: units whose last known good it is.
    :param armed_of: units whose armed rollback would go to it.
    :param runtime: name it was deployed under; empty where the history does not say.
    :param base: label of what it was built from, ``patches`` their names; None where this machine's cache does not
        know the bundle. ``overlay``: package and version; empty: none, or not known.
    :param verdict: of its newest judged activation on this host, None where there is none.
    :param problems: what :func:`verify` found; None while nobody looked, empty: every byte is right.
    """

    digest: str
    published: datetime
    files: int
    bytes: int
    own_bytes: int
    runtime: str = ""
    base: str | None = None
    patches: tuple[str, ...] | None = None
    overlay: str = ""
    current_of: tuple[str, ...] = ()
    good_of: tuple[str, ...] = ()
    armed_of: tuple[str, ...] = ()
    activations: int = 0
    verdict: Verdict | None = None
    judged: str = ""
    summary: str = ""
    problems: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form; sizes in bytes, times UTC."""
        return {
            "digest": self.digest,
            "published": self.published.isoformat(timespec="seconds"),
            "files": self.files,
            "bytes": self.bytes,
            "own_bytes": self.own_bytes,
            "shared_bytes": self.bytes - self.own_bytes,
            "runtime": self.runtime,
            "base": self.base,
            "patches": None if self.patches is None else list(self.patches),
            "overlay": self.overlay or None,
            "current_of": list(self.current_of),
            "last_known_good_of": list(self.good_of),
            "armed_of": list(self.armed_of),
            "activations": self.activations,
            "verdict": self.verdict.value if self.verdict else None,
            "judged": self.judged,
            "summary": self.summary,
            "whole": None if self.problems is None else not self.problems,
            "problems": None if self.problems is None else list(self.problems),
        }


@dataclass(frozen=True)
class HostReleases:
    """The releases of a host, newest first, with what is left of pushes and the lines nobody could read."""

    releases: tuple[Release, ...]
    leftovers: tuple[Leftover, ...]
    damaged_lines: int
    free_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "releases": [release.to_json() for release in self.releases],
            "leftovers": [
                {"name": item.name, "live": item.live, "bytes": item.bytes} for item in self.leftovers
            ],
            "damaged_history_lines": self.damaged_lines,
            "free_bytes": self.free_bytes,
        }


def releases_of(
    survey: Survey, *, origins: Mapping[str, tuple[str, tuple[str, ...], str]] | None = None
) -> HostReleases:
    """The releases of a host, newest first. Pure.

    :param origins: digest -> base, patches and overlay of bundles that this machine knows.
    """
    origins = origins or {}
    releases = []
    for item in sorted(survey.releases, key=lambda one: one.published, reverse=True):
        used = sorted(
            (
                act
                for service in survey.services
                for act in service.history.activations
                if act.release == item.digest
            ),
            key=lambda act: act.time,
        )
        judged = [act for act in used if act.verdict is not None]
        named = [act.runtime for act in used if act.runtime]
        base, patches, overlay = origins.get(item.digest, (None, None, ""))
        releases.append(
            Release(
                digest=item.digest,
                published=datetime.fromtimestamp(item.published, UTC),
                files=item.files,
                bytes=item.bytes,
                own_bytes=item.own_bytes,
                runtime=named[-1] if named else "",
                base=base,
                patches=patches,
                overlay=overlay,
                current_of=tuple(s.unit for s in survey.services if s.current == item.digest),
                good_of=tuple(
                    s.unit
                    for s in survey.services
                    if (good := s.history.good()) and good[0].release == item.digest
                ),
                armed_of=tuple(s.unit for s in survey.services if item.digest in (s.armed or "")),
                activations=len(used),
                verdict=judged[-1].verdict if judged else None,
                judged=judged[-1].time if judged else "",
                summary=judged[-1].summary if judged else "",
            )
        )
    return HostReleases(
        tuple(releases),
        survey.leftovers,
        sum(service.history.damaged for service in survey.services),
        survey.free_bytes,
    )


def verify(session: Session, root: str, found: HostReleases) -> HostReleases:
    """Have the host hash every file of every release: whole or damaged. Two round trips, however many releases.

    A release is judged by its own manifest, which has to be the one that its name is the digest of.
    """
    from ddtree_ops.runtime.bundle import digest_of

    folders = [f"{root}/releases/{release.digest}" for release in found.releases]
    reads = [
        Request("read_file", {"path": f"{folder}/manifest.json", "max_bytes": 64 << 20}) for folder in folders
    ]
    problems: dict[str, tuple[str, ...]] = {}
    checks: list[tuple[str, Request]] = []
    for release, content in zip(found.releases, _contents(session, reads), strict=True):
        try:
            rows = json.loads(content or b"{}")["files"]
            files = [FileEntry(row["path"], row["mode"], row["size"], row["sha256"]) for row in rows]
            if digest_of(files) != release.digest:
                raise ValueError("it is not the manifest that the release's name is the digest of")
        except (ValueError, KeyError, TypeError) as error:
            what = "it is missing" if content is None else str(error) or "it cannot be read"
            problems[release.digest] = (f"manifest.json: {what}",)
            continue
        sums = {"manifest": hashlib.sha256(content or b"").hexdigest()}
        checks.append(
            (
                release.digest,
                Request(
                    "check_release", {"releases_dir": f"{root}/releases", "digest": release.digest, **sums}
                ),
            )
        )
    replies = session.ask([request for _, request in checks], deadline=900.0)
    for (digest, _), reply in zip(checks, replies, strict=True):
        listed = tuple(reply.values["problems"])
        more = reply.values["count"] - len(listed)
        problems[digest] = (*listed, f"{more} more") if more > 0 else listed
    return replace(
        found, releases=tuple(replace(item, problems=problems[item.digest]) for item in found.releases)
    )


# -- what may go -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrunePlan:
    """What a prune removes, and why the rest stays; sizes in bytes.

    :param remove: digests, oldest first.
    :param stays: digest -> reasons.
    :param unit_files: (unit, file name) of unit files and settings that no kept activation needs.
    :param leftovers: names of staging folders that nobody works on.
    :param estimate: bytes that are freed at least.
    """

    remove: tuple[str, ...] = ()
    stays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unit_files: tuple[tuple[str, str], ...] = ()
    leftovers: tuple[str, ...] = ()
    estimate: int = 0

    @property
    def empty(self) -> bool:
        """Nothing to remove but perhaps byte code."""
        return not (self.remove or self.unit_files or self.leftovers)

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "remove": list(self.remove),
            "stays": {digest: list(reasons) for digest, reasons in self.stays.items()},
            "unit_files": [f"{unit}/{name}" for unit, name in self.unit_files],
            "leftovers": list(self.leftovers),
            "freed_bytes_at_least": self.estimate,
        }


@dataclass(frozen=True)
class Pruned:
    """What a prune did. ``refused``: digests that had come into use meanwhile, with the unit that uses them.

    :param programs: of the rollback guard, that nothing armed runs any more.
    :param evidence: folders with journals that the host itself had kept.
    """

    plan: PrunePlan
    removed: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    unit_files: int = 0
    leftovers: int = 0
    byte_code: int = 0
    programs: int = 0
    evidence: int = 0
    freed_bytes: int = 0
    free_bytes: int = 0
    dry_run: bool = False
    note: str = ""

    @property
    def changed(self) -> bool:
        """Something was removed."""
        return any(
            (self.removed, self.unit_files, self.leftovers, self.byte_code, self.programs, self.evidence)
        )

    def describe(self) -> str:
        """One line for people."""
        kept = f"{len(self.plan.stays)} kept"
        if self.dry_run:
            what = _parts(
                (len(self.plan.remove), "release"),
                (len(self.plan.leftovers), "leftover"),
                (len(self.plan.unit_files), "unit file"),
            )
            size = (
                f", at least {self.plan.estimate / 1e6:.1f} MB"
                if self.plan.remove or self.plan.leftovers
                else ""
            )
            return f"would remove {what}{size}; {kept}" if what else f"nothing to remove; {kept}"
        what = _parts(
            (len(self.removed), "release"),
            (self.leftovers, "leftover"),
            (self.unit_files, "unit file"),
            (self.byte_code, "byte code file"),
            (self.programs, "old guard program"),
            (self.evidence, "evidence folder"),
        )
        if not what:
            return f"nothing to remove; {kept}"
        return f"removed {what}, {self.freed_bytes / 1e6:.1f} MB freed; {kept}"

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "dry_run": self.dry_run,
            "plan": self.plan.to_json(),
            "removed": list(self.removed),
            "refused": [{"release": digest, "used_by": unit} for digest, unit in self.refused],
            "unit_files": self.unit_files,
            "leftovers": self.leftovers,
            "byte_code": self.byte_code,
            "guard_programs": self.programs,
            "evidence": self.evidence,
            "freed_bytes": self.freed_bytes,
            "free_bytes": self.free_bytes,
            "note": self.note,
        }


def _parts(*counts: tuple[int, str]) -> str:
    return ", ".join(count(number, word) for number, word in counts if number)


def plan_prune(survey: Survey, *, keep: int) -> PrunePlan:
    """Which releases, unit files and leftovers go. Pure.

    What stays, whatever ``keep`` says: the current release of every service, its last known good, its newest
    activation, what an armed rollback points to, and what was pushed within a day and not activated yet. Beyond
    these, ``keep`` releases a service that passed, newest first. Where lines of a history cannot be read, releases that
    no history names stay too, and that service's unit files.

    :param keep: releases that passed to be kept for each service; the last known good counts.
    """
    stays: dict[str, list[str]] = {}
    named: set[str] = set()
    armed_digests: dict[str, set[str]] = {}
    there = {release.digest for release in survey.releases}

    def hold(digest: str | None, reason: str) -> None:
        if digest in there and reason not in stays.setdefault(str(digest), []):
            stays[str(digest)].append(reason)

    for service in survey.services:
        unit, activations = service.unit, service.history.activations
        named.update(item.release for item in activations)
        hold(service.current, f"current of {unit}")
        armed_digests[unit] = set(_DIGESTS.findall(service.armed or ""))
        for digest in armed_digests[unit] & there:
            hold(digest, f"an armed rollback of {unit} may go to it")
        if service.history.latest is not None:
            hold(service.history.latest.release, f"newest activation of {unit}")
        passed = list(dict.fromkeys(item.release for item in service.history.good() if item.release in there))
        for place, digest in enumerate(passed[: max(1, keep)]):
            hold(
                digest,
                f"last known good of {unit}"
                if place == 0
                else f"one of the last {keep} that passed on {unit}",
            )
    unreadable = [service.unit for service in survey.services if service.history.damaged]
    for release in survey.releases:
        if release.digest in named:
            continue
        if unreadable:
            hold(release.digest, f"lines of the history of {unreadable[0]} cannot be read")
        elif survey.time - release.published < _AHEAD_S:
            hold(release.digest, "pushed within a day and not activated yet")
    remove = [
        item for item in sorted(survey.releases, key=lambda one: one.published) if item.digest not in stays
    ]
    idle = [item for item in survey.leftovers if not item.live]
    return PrunePlan(
        remove=tuple(item.digest for item in remove),
        stays={digest: tuple(reasons) for digest, reasons in stays.items()},
        unit_files=tuple(
            (service.unit, name)
            for service in survey.services
            for name in _spare_units(service, set(stays), armed_digests[service.unit])
        ),
        leftovers=tuple(item.name for item in idle),
        estimate=sum(item.own_bytes for item in remove) + sum(item.own_bytes for item in idle),
    )


def _spare_units(service: ServiceState, kept: set[str], armed: set[str]) -> list[str]:
    """File names under ``units/`` that no kept activation needs."""
    if service.history.damaged:
        return []
    latest = service.history.latest
    needed = {item.unit_sha256 for item in service.history.activations if item.good and item.release in kept}
    needed |= armed | ({latest.unit_sha256} if latest else set())
    found = []
    for name in service.units:
        match = _KEPT_UNIT.fullmatch(name)
        if match and match.group(1) not in needed:
            found.append(name)
    return found


def remove(session: Session, root: str, plan: PrunePlan, *, evidence_before: float = 0.0) -> Pruned:
    """Do what a plan says. One round trip.

    The host looks again at each release before it goes: one that a service points to at that moment stays.

    :param evidence_before: epoch, host's clock: evidence that the host kept before that goes too.
    """
    arguments = {
        "root": root,
        "releases": list(plan.remove),
        "unit_files": [list(item) for item in plan.unit_files],
        "leftovers": True,
        "byte_code": True,
        "program": program_name(),
        "evidence_before": evidence_before,
    }
    values = session.request("prune", arguments, deadline=600.0).values
    return Pruned(
        plan,
        removed=tuple(values["removed"]),
        refused=tuple((digest, unit) for digest, unit in values["refused"]),
        unit_files=values["unit_files"],
        leftovers=values["leftovers"],
        byte_code=values["byte_code"],
        programs=values["programs"],
        evidence=values["evidence"],
        freed_bytes=values["freed_bytes"],
        free_bytes=values["disk"]["free_bytes"],
    )


def prune(
    session: Session,
    layout: Layout,
    *,
    keep: int,
    dry_run: bool = False,
    holding: str = "",
    evidence_days: float = 30.0,
) -> Pruned:
    """Remove what no service of the host needs any more, and write that into the audit.

    Nobody may be deploying to any service of the host meanwhile: a release is pushed before anything points to it.

    :param keep: releases that passed to be kept for each service.
    :param holding: unit whose lock the caller holds already.
    :param evidence_days: age from which journals go that the host itself had kept.
    :raises LockHeld: somebody deploys; nothing was changed.
    """
    survey = look(session, layout.root)
    if dry_run:
        return Pruned(plan_prune(survey, keep=keep), free_bytes=survey.free_bytes, dry_run=True)
    with _all_locks(session, survey, holding):
        survey = look(session, layout.root)
        before = survey.time - evidence_days * 86400
        done = remove(session, layout.root, plan_prune(survey, keep=keep), evidence_before=before)
    if done.changed:
        detail = "; ".join([done.describe(), *(digest[:12] for digest in done.removed)])
        try:
            audit.record(session, Layout(layout.root, ""), "prune", outcome="ok", detail=detail)
        except RemoteError as error:
            done = replace(done, note=f"the audit line could not be written: {error.message}")
    return done


@contextmanager
def _all_locks(session: Session, survey: Survey, holding: str) -> Iterator[None]:
    """Hold the locks of all services of a host; on a full disk, where none can be written, only look at them."""
    with ExitStack() as stack:
        for service in survey.services:
            if service.unit == holding:
                continue
            path = Layout(survey.root, service.unit).lock
            try:
                holder = session.acquire_lock(path, {"who": who(), "origin": origin(), "command": "prune"})
                if holder is None:
                    stack.callback(session.release_lock, path)
            except AgentError as error:
                if error.code not in _NO_ROOM:
                    raise
                state = session.check_lock(path)
                holder = state.holder if state.left_s > 0 else None
            if holder is not None:
                raise LockHeld(
                    f"{describe_holder(holder, service.unit)}: releases may be in use that nothing points to yet",
                    host=session.host,
                    phase="prune",
                    state="nothing was removed",
                    hint=f"try again when that is done; who it is: ddtree-ops lock status {session.host}",
                )
        yield


# -- evidence on this machine ----------------------------------------------------------------------------------


def old_evidence(names: Iterable[str], *, days: float, now: datetime) -> list[str]:
    """Evidence folders (``HOST-20261129T182210Z``) older than that, by the time in their name. Pure."""
    found = []
    for name in names:
        match = _STAMPED.fullmatch(name)
        made = moment_of(match.group(1)) if match else None
        if made is not None and (now - made).total_seconds() > days * 86400:
            found.append(name)
    return sorted(found)


def prune_evidence(*, days: float, dry_run: bool = False) -> list[Path]:
    """Remove evidence folders of this machine that are older than ``days``; returns them.

    :raises OpsError: one could not be removed.
    """
    folder = paths.state_dir() / "evidence"
    names = [item.name for item in folder.iterdir()] if folder.is_dir() else []
    found = [
        folder / name for name in old_evidence(names, days=days, now=datetime.fromtimestamp(time.time(), UTC))
    ]
    for path in found if not dry_run else ():
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise OpsError(f"evidence could not be removed: {error}", hint=f"rm -r {path}") from error
    return found
