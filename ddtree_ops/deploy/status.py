"""How services stand on their hosts: one cheap look each, all hosts at once, and one host down hides no other.

Nothing is proven here: a port that answers is called "answering", never ready. That a run works is known from the
validation that its history holds. The look takes no lock, asks the engine for nothing but ``GET /v1/models``, and costs
one batch of requests and one look at the port, under way together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ddtree_ops.deploy.history import Activation, History, parse_history
from ddtree_ops.diagnose.events import parse_decode
from ddtree_ops.errors import ExitCode, OpsError, RemoteError, UnreachableError
from ddtree_ops.inventory.models import Target
from ddtree_ops.paths import cache_dir
from ddtree_ops.remote.session import Reply, Request, Session
from ddtree_ops.results import Verdict
from ddtree_ops.runtime import Bundle, Description, PatchState, check_source, known_bundle, load_description
from ddtree_ops.secret import redact
from ddtree_ops.service.control import PortOwner, UnitControl
from ddtree_ops.service.journal import parse_entries
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.state import PROPERTIES, UnitState, parse_show

__all__ = ["Board", "Figures", "Patch", "Seen", "Status", "parse_seen", "status_of"]

LINES = 400
"""Newest lines of the journal that are searched for a decode line."""

_DEADLINE = 30.0
_ANSWER_S = 2.0
_PARALLEL = 16
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}

# Runs on the host with its own python3 (>= 3.8): does the engine's HTTP server answer? Data comes as arguments.
_PROBE = r"""
import http.client, json, sys, time
want = json.loads(sys.argv[1])
found = {"now": time.time(), "status": 0, "model": "", "error": ""}
if want["port"]:
    try:
        link = http.client.HTTPConnection(want["host"], want["port"], timeout=want["limit"])
        link.request("GET", "/v1/models")
        answer = link.getresponse()
        found["status"] = answer.status
        body = answer.read(1 << 20)
        if answer.status == 200:
            found["model"] = str(json.loads(body)["data"][0]["id"])
    except Exception as error:
        found["error"] = str(error) or type(error).__name__
print(json.dumps(found))
"""

_WORDS = {
    PatchState.PATCHED: "patched",
    PatchState.PRISTINE: "unpatched",
    PatchState.PARTLY: "partly",
    PatchState.FOREIGN: "foreign",
    PatchState.MISSING: "missing",
}


@dataclass(frozen=True)
class Figures:
    """What the engine last logged of its decoding; None: it did not say. ``age_s`` is how long ago, by the host's clock.

    :param note: why there is nothing.
    """

    accept_length: float | None = None
    tokens_per_s: float | None = None
    age_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Patch:
    """What the runner of a release is: ``patched``, ``unpatched``, ``partly``, ``foreign``, ``missing``, or ``-``.

    :param sized: its graphs have the size that the service needs; None: that could not be told, or is not needed.
    """

    word: str = "-"
    sized: bool | None = None
    summary: str = ""


@dataclass(frozen=True)
class Seen:
    """What one look found on a host.

    :param now: host's clock, epoch seconds.
    :param http: status of ``GET /v1/models``; 0: no answer, ``http_error`` says why; None: not asked.
    :param owners: who listens on the port.
    """

    state: UnitState
    now: float
    release: str | None = None
    history: History = field(default_factory=History)
    http: int | None = None
    http_error: str = ""
    model: str = ""
    owners: tuple[PortOwner, ...] = ()
    figures: Figures = field(default_factory=Figures)
    armed: str = ""
    lock: str = ""
    disturbed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Status:
    """One service on one host; ``seen`` is None where the host could not be looked at, ``error`` says why."""

    host: str
    service: str
    unit: str
    seen: Seen | None = None
    patch: Patch = field(default_factory=Patch)
    error: OpsError | None = None

    @property
    def deployed(self) -> bool:
        """Something was deployed here once."""
        seen = self.seen
        return seen is not None and bool(seen.release or seen.history.activations or seen.state.exists)

    @property
    def judged(self) -> Activation | None:
        """The activation whose verdict is about the run that is there now; None: nobody judged it."""
        seen = self.seen
        if seen is None or not seen.state.running or not seen.state.invocation_id:
            return None
        found = [
            item
            for item in seen.history.activations
            if item.invocation == seen.state.invocation_id and item.verdict is not None
        ]
        return found[-1] if found else None

    @property
    def validated(self) -> bool:
        """The run that is there now passed its validation."""
        return self.judged is not None and self.judged.good

    @property
    def ready(self) -> str:
        """``validated``, ``answering`` (that is all that is known), ``failed`` (its validation), ``no answer``, ``-``."""
        seen = self.seen
        if seen is None or not seen.state.running:
            return "-"
        if seen.http == 0:
            return "no answer"
        if self.judged is not None:
            return "validated" if self.judged.good else "failed"
        return "answering" if seen.http else "running"

    @property
    def problem(self) -> str:
        """What is not as it should be, in one sentence; empty: active, validated and answering."""
        seen = self.seen
        if self.error is not None or seen is None:
            return self.error.message if self.error else "not looked at"
        if not self.deployed:
            return "nothing is deployed"
        if not seen.state.running:
            return seen.state.describe()
        strangers = [owner for owner in seen.owners if owner.unit != self.unit]
        if strangers:
            return f"the port is held by {strangers[0].describe()}"
        if self.judged is not None and not self.judged.good:
            return f"its validation ended with {self.judged.verdict}: {redact(self.judged.summary)[:120]}"
        if seen.http == 0:
            what = "is still loading, or hangs" if self.judged is None else "validated once"
            return f"no answer at its port ({what}): {seen.http_error}"
        if self.judged is None:
            return "this run was never validated"
        return ""

    @property
    def exit_code(self) -> ExitCode:
        """0 active and validated, 4 unreachable, 5 down or failed, 8 nothing deployed, or not validated."""
        seen = self.seen
        if self.error is not None or seen is None:
            return self.error.exit_code if self.error else ExitCode.ERROR
        if not self.problem:
            return ExitCode.OK
        unsure = not self.deployed or (seen.state.running and self.judged is None)
        unsure = unsure or (self.judged is not None and self.judged.verdict is Verdict.INCONCLUSIVE)
        return ExitCode.INCONCLUSIVE if unsure else ExitCode.CHECK_FAILED

    @property
    def since(self) -> datetime | None:
        """Since when the unit is as it is."""
        if self.seen is None:
            return None
        state = self.seen.state
        return (state.active_enter if state.running else None) or state.state_change

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form; times UTC in ISO 8601, ages in seconds, None: not known."""
        seen = self.seen
        base: dict[str, Any] = {
            "host": self.host,
            "service": self.service,
            "unit": self.unit,
            "reachable": not isinstance(self.error, UnreachableError),
            "deployed": self.deployed if seen else None,
            "problem": redact(self.problem),
            "exit_code": int(self.exit_code),
        }
        if seen is None:
            return base
        latest, good = seen.history.latest, next(iter(seen.history.good()), None)
        return {
            **base,
            "state": seen.state.active_state,
            "sub_state": seen.state.sub_state,
            "since": self.since.isoformat() if self.since else None,
            "restarts": seen.state.n_restarts,
            "invocation": seen.state.invocation_id or None,
            "release": seen.release,
            "runtime": _runtime_name(seen),
            "patch": {"state": self.patch.word, "sized": self.patch.sized, "summary": self.patch.summary},
            "model": seen.model or None,
            "ready": self.ready,
            "http_status": seen.http or None,
            "validated": self.validated,
            "verdict": self.judged.verdict.value if self.judged and self.judged.verdict else None,
            "accept_length": seen.figures.accept_length,
            "tokens_per_s": seen.figures.tokens_per_s,
            "figures_age_s": None if seen.figures.age_s is None else round(seen.figures.age_s, 1),
            "figures_note": seen.figures.note,
            "last": _activation_json(latest),
            "last_good": _activation_json(good),
            "rollback": seen.armed,
            "lock": seen.lock,
            "notes": list(seen.disturbed),
        }


def _activation_json(item: Activation | None) -> dict[str, Any] | None:
    if item is None:
        return None
    return {
        "time": item.time,
        "release": item.release,
        "reason": item.reason,
        "who": item.who,
        "origin": item.origin,
        "verdict": item.verdict.value if item.verdict else None,
        "invocation": item.invocation or None,
    }


def _runtime_name(seen: Seen) -> str | None:
    """Name of the runtime that the live release was built from, as its activation says."""
    named = [
        item.runtime for item in seen.history.activations if item.release == seen.release and item.runtime
    ]
    return named[-1] if named else None


# ------------------------------------------------------------------------------------------------- the look


def status_of(target: Target, session: Session) -> Status:
    """Look at one service.

    :raises OpsError: the host could not be looked at.
    """
    layout, service = Layout.of(target), target.service
    replied = session.begin_batch(_requests(target, layout), deadline=_DEADLINE)
    owners = (
        UnitControl(session, service.unit).port_owner(service.port, service.bind) if _asked(target) else ()
    )
    seen = parse_seen(replied(), unit=service.unit, asked=_asked(target), host=target.name)
    seen = replace(seen, owners=owners)
    patch = Patch()
    if seen.release is not None:
        patch = _patch(target, session, layout, seen.release)
    return Status(target.name, service.name, service.unit, seen=seen, patch=patch)


def _asked(target: Target) -> bool:
    """The engine answers HTTP here: of several nodes only the head does."""
    return target.node is None or target.node.is_head


def _requests(target: Target, layout: Layout) -> list[Request]:
    service = target.service
    want = {
        "host": _LOOPBACK.get(service.bind, service.bind),
        "port": service.port if _asked(target) else 0,
        "limit": _ANSWER_S,
    }
    names = ",".join(PROPERTIES)
    journal = ["journalctl", "--output=json", "--all", "--quiet", "--no-pager", f"--lines={LINES}"]
    journal += [
        "--output-fields=MESSAGE,_SYSTEMD_UNIT,_SYSTEMD_INVOCATION_ID",
        f"_SYSTEMD_UNIT={service.unit}",
    ]
    return [
        Request("list_dir", {"path": layout.service_dir}),
        Request("read_file", {"path": layout.history, "max_bytes": 64 << 20}),
        Request(
            "run",
            {
                "argv": ["systemctl", "show", "--no-pager", f"--property={names}", "--", service.unit],
                "env": {"TZ": "UTC"},
            },
        ),
        Request("run", {"argv": [target.host.ssh.python, "-I", "-S", "-c", _PROBE, json.dumps(want)]}),
        Request("run", {"argv": journal}),
        Request("read_file", {"path": f"{layout.service_dir}/rollback.json", "max_bytes": 1 << 20}),
        Request("lock_check", {"path": layout.lock, "id": ""}),
    ]


def parse_seen(
    replies: Sequence[Reply | Exception], *, unit: str, asked: bool = True, host: str = ""
) -> Seen:
    """What the host answered to the requests of a look. Figures, rollback and lock may be missing; the rest not.

    :raises RemoteError: systemd or the small program gave no answer.
    """
    own, history, shown, probed = (_need(reply) for reply in replies[:4])
    journal, armed, lock = replies[4:]
    try:
        state = UnitState.parse(parse_show(_stdout(shown).decode("utf-8", "replace")))
        answer = json.loads(_stdout(probed))
    except ValueError as error:
        said = b"\n".join(reply.data[int(reply.values["stdout"]) :] for reply in (shown, probed))
        raise RemoteError(
            f"the look at {unit} gave no answer: {error}",
            host=host,
            phase="status",
            hint="is systemd running there, and does ssh.python name a working Python >= 3.8?",
            details=tuple(redact(said.decode("utf-8", "replace")).strip().splitlines()[-4:]),
        ) from None
    links = {entry["name"]: entry["target"] for entry in own.values["entries"] if entry["kind"] == "link"}
    current = links.get("current")
    parsed = parse_history(history.data if history.values["found"] else None)
    notes = [f"{parsed.damaged} lines of the history cannot be read"] if parsed.damaged else []
    armed_text, armed_note = _armed(armed)
    lock_text, lock_note = _lock(lock, unit)
    return Seen(
        state=state,
        now=float(answer["now"]),
        release=current.rsplit("/", 1)[-1] if current else None,
        history=parsed,
        http=int(answer["status"]) if asked else None,
        http_error=str(answer["error"]),
        model=str(answer["model"]),
        figures=_figures(journal, state, float(answer["now"])),
        armed=armed_text,
        lock=lock_text,
        disturbed=tuple(note for note in (*notes, armed_note, lock_note) if note),
    )


def _need(reply: Reply | Exception) -> Reply:
    if isinstance(reply, Exception):
        raise reply
    return reply


def _stdout(reply: Reply) -> bytes:
    return reply.data[: int(reply.values["stdout"])]


def _figures(reply: Reply | Exception, state: UnitState, now: float) -> Figures:
    """From the newest decode line of this run."""
    if isinstance(reply, Exception) or reply.values["rc"] != 0:
        return Figures(note="the journal cannot be read")
    if not state.running:
        return Figures(note="it does not run")
    entries = [item for item in parse_entries([_stdout(reply)]) if item.invocation == state.invocation_id]
    if not entries:
        return Figures(note="the journal holds no line of this run")
    for entry in reversed(entries):
        found = parse_decode(entry.message)
        if found is not None:
            age = max(0.0, now - entry.time.timestamp())
            return Figures(found.accept_len, found.gen_throughput, age)
    return Figures(note=f"no decode line (one every 40 steps) among the newest {len(entries)} lines")


def _armed(reply: Reply | Exception) -> tuple[str, str]:
    """What is armed, and what is wrong with reading that."""
    from ddtree_ops.deploy.guard import parse_armed

    if isinstance(reply, Exception):
        return "", f"rollback.json cannot be read: {reply}"
    try:
        armed = parse_armed(reply.data if reply.values["found"] else None)
    except RemoteError as error:
        return "", error.message
    return (armed.describe(), "") if armed else ("", "")


def _lock(reply: Reply | Exception, unit: str) -> tuple[str, str]:
    from ddtree_ops.deploy.guard import describe_holder

    if isinstance(reply, Exception):
        return "", f"the lock cannot be read: {reply}"
    holder = reply.values.get("holder")
    if not isinstance(holder, Mapping) or not reply.values.get("left_s"):
        return "", ""
    return describe_holder(holder, unit), ""


# -------------------------------------------------------------------------------------------- patch verdict


def _patch(target: Target, session: Session, layout: Layout, release: str) -> Patch:
    """Proven on the source of the release. Of one that this machine built itself the content is known by its digest:
    proven once and remembered; of another the few files that tell are read on the host."""
    bundle = known_bundle(target.runtime)
    own = bundle if bundle is not None and bundle.digest == release else None
    try:
        description = load_description(target.runtime.description)
        folder = layout.release(release)
        path = _remembered(target, release, description)
        if own is not None and (known := _recall(path)) is not None:
            return known
        patch = _proven(
            target,
            description,
            lambda name: _content(own, name) if own is not None else session.read_file(f"{folder}/{name}"),
        )
    except (OpsError, ValueError) as error:
        return Patch(summary=redact(str(error)))
    if own is not None:
        _keep(path, patch)
    return patch


def _content(bundle: Bundle, name: str) -> bytes | None:
    path = bundle.root / name
    return path.read_bytes() if path.is_file() else None


def _sizes(target: Target) -> tuple[int, int | None]:
    speculative = target.service.speculative
    return (speculative.block_size, speculative.budget) if speculative else (8, None)


def _proven(target: Target, description: Description, read: Callable[[str], bytes | None]) -> Patch:
    block, budget = _sizes(target)
    check = check_source(read, description=description, block_size=block, budget=budget)
    speculative = target.service.speculative
    needed = speculative is not None and speculative.algorithm == "DDTREE"
    sized = check.sizing.ok if needed and check.sizing is not None else None
    return Patch(_WORDS[check.state], sized, check.summary)


def _remembered(target: Target, release: str, description: Description) -> Path:
    series = [(patch.name, hashlib.sha256(patch.content).hexdigest()) for patch in description.patches]
    algorithm = target.service.speculative.algorithm if target.service.speculative else ""
    what = [1, release, description.name, description.base.version, series, *_sizes(target), algorithm]
    return cache_dir() / "verdicts" / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()}.json"


def _recall(path: Path) -> Patch | None:
    try:
        known = json.loads(path.read_bytes())
        return Patch(str(known["word"]), known["sized"], str(known["summary"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, patch: Patch) -> None:
    """A cache that cannot be written costs time, nothing else."""
    part = path.with_name(f".{path.name}.{id(patch)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(
            json.dumps({"word": patch.word, "sized": patch.sized, "summary": patch.summary}), encoding="utf-8"
        )
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------ all hosts


class Board:
    """All targets, looked at again and again over sessions that stay open. A context manager.

    :param connect: opens the session of a target's host.
    """

    def __init__(self, targets: Sequence[Target], connect: Callable[[Target], Session]) -> None:
        self._connect = connect
        self._targets = tuple(targets)
        self._sessions: dict[str, Session] = {}
        self._hosts: dict[str, list[Target]] = {}
        for target in targets:
            self._hosts.setdefault(target.host.name, []).append(target)
        self._pool = ThreadPoolExecutor(
            max_workers=max(1, min(_PARALLEL, len(self._hosts))), thread_name_prefix="status"
        )

    def look(self) -> list[Status]:
        """One status a target, in their order; a host that cannot be looked at is a status too."""
        done = self._pool.map(self._host, self._hosts.values())
        found = {name: iter(each) for name, each in zip(self._hosts, done, strict=True)}
        return [next(found[target.host.name]) for target in self._targets]

    def _host(self, group: list[Target]) -> list[Status]:
        found = []
        for target in group:
            name = target.host.name
            try:
                session = self._sessions.get(name)
                if session is None:
                    session = self._sessions[name] = self._connect(target)
                found.append(status_of(target, session))
            except OpsError as error:
                if isinstance(error, UnreachableError) and name in self._sessions:
                    self._sessions.pop(name).close()
                error.at(host=target.name)
                found.append(Status(target.name, target.service.name, target.service.unit, error=error))
        return found

    def close(self) -> None:
        """End the sessions."""
        self._pool.shutdown(wait=True)
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
