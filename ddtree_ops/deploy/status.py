"""How services stand on their hosts: one cheap look each, all hosts at once, and one host down hides no other.

Nothing is proven here: a port that answers is called "answering", never ready. That a run works is known from the
validation that its history holds. The look takes no lock, asks the engine for nothing but ``GET /v1/models``, and costs
one batch of requests and one look at the port, under way together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from ddtree_ops.checks.readiness import Readiness, Ready, duration
from ddtree_ops.deploy.audit import Act, parse_audit
from ddtree_ops.deploy.guard import Armed, describe_holder, parse_armed, unwatched
from ddtree_ops.deploy.history import Activation, History, parse_history
from ddtree_ops.deploy.known import KnownBundles
from ddtree_ops.deploy.shipment import runner_wanted
from ddtree_ops.diagnose.events import parse_decode
from ddtree_ops.errors import ExitCode, OpsError, RemoteError, UnreachableError
from ddtree_ops.inventory.models import RuntimeSpec, Target
from ddtree_ops.remote.session import Reply, Request, Session, answers
from ddtree_ops.results import Verdict
from ddtree_ops.runtime import (
    Bundle,
    OverlayState,
    PatchState,
    check_bundle,
    check_source,
    known_bundle,
    load_description,
    plugin_named,
)
from ddtree_ops.secret import redact
from ddtree_ops.service.control import PortOwner, UnitControl
from ddtree_ops.service.journal import Entry, MessageId, parse_entries
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
found = {"now": time.time(), "boot": time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", 7)), "status": 0, "model": "", "error": ""}
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
    :param overlay: what the release holds of it, in a few words; empty: not known.
    """

    word: str = "-"
    sized: bool | None = None
    summary: str = ""
    overlay: str = ""


@dataclass(frozen=True)
class Seen:
    """What one look found on a host.

    :param now: host's clock, epoch seconds.
    :param http: status of ``GET /v1/models``; 0: no answer, ``http_error`` says why; None: not asked.
    :param owners: who listens on the port.
    :param rollback: what is armed; ``armed`` says it for people, and what is wrong with it.
    :param loading: how far its load has come; empty: it does not load, or the journal does not say.
    :param stopped: it does not run because somebody asked for that; ``stop``: who, where the audit says so.
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
    rollback: Armed | None = None
    disturbed: tuple[str, ...] = ()
    loading: str = ""
    stopped: bool = False
    stop: Act | None = None

    @property
    def unconfirmed(self) -> str:
        """Until when the run that is there can be confirmed by hand, having passed; empty: nothing waits for that."""
        armed = self.rollback
        if armed is None or armed.phase != "awaiting" or not self.state.running:
            return ""
        run = (armed.expected or {}).get("InvocationID") or self.state.invocation_id
        return armed.until if run == self.state.invocation_id else ""


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
        if seen is None or not seen.state.running:
            return None
        return seen.history.judged(seen.state.invocation_id)

    @property
    def validated(self) -> bool:
        """The run that is there now passed its validation."""
        return self.judged is not None and self.judged.good

    @property
    def ready(self) -> str:
        """``validated``, ``unconfirmed`` (passed, and waits for a person), ``answering`` (that is all that is known),
        ``loading``, ``failed`` (its validation), ``no answer``, ``-``."""
        seen = self.seen
        if seen is None or not seen.state.running:
            return "-"
        if seen.loading and not seen.http and self.judged is None:
            return "loading"
        if seen.http == 0:
            return "no answer"
        if self.judged is not None:
            return "validated" if self.judged.good else "failed"
        if seen.unconfirmed:
            return "unconfirmed"
        return "answering" if seen.http else "running"

    @property
    def problem(self) -> str:
        """What is not as it should be, in one sentence; empty: active, validated and answering."""
        seen = self.seen
        if self.error is not None or seen is None:
            return self.error.message if self.error else "not looked at"
        if not self.deployed:
            return "nothing is deployed"
        if seen.stopped:
            by = seen.stop
            return f"stopped as asked for{f', by {by.who} on {by.origin} at {by.time}' if by else ''}"
        if not seen.state.running:
            return seen.state.describe()
        strangers = [owner for owner in seen.owners if owner.unit != self.unit]
        if strangers:
            return f"the port is held by {strangers[0].describe()}"
        if self.judged is not None and not self.judged.good:
            why = f": {redact(self.judged.summary)[:120]}" if self.judged.summary else ""
            return f"its validation ended with {self.judged.verdict}{why}"
        if self.ready == "loading":
            return f"still loading: {seen.loading}"
        if seen.http == 0:
            what = "is still loading, or hangs" if self.judged is None else "validated once"
            return f"no answer at its port ({what}): {seen.http_error}"
        if self.ready == "unconfirmed":
            return f"passed, and waits until {seen.unconfirmed} for somebody to confirm it"
        if self.judged is None:
            return "this run was never validated"
        return ""

    @property
    def next(self) -> str:
        """The command to type where something is not as it should be; empty where nothing is."""
        host, seen = self.host.partition("/")[0], self.seen
        if self.error is not None or seen is None:
            return self.error.hint if self.error else ""
        if not self.problem:
            return ""
        if not self.deployed or not seen.state.exists:
            return f"ddtree-ops deploy {host}"
        if seen.stopped:
            return f"ddtree-ops start {host}"
        if not seen.state.running:
            return f"ddtree-ops diagnose {host}"
        if any(owner.unit != self.unit for owner in seen.owners):
            return f"ddtree-ops doctor {host}"
        if seen.lock:
            return f"ddtree-ops lock status {host}"
        if self.ready == "loading":
            return f"ddtree-ops wait {host}"
        if self.ready == "no answer":
            return f"ddtree-ops logs {host} --lines 100"
        if seen.rollback is not None and seen.rollback.phase in ("armed", "awaiting"):
            return f"ddtree-ops confirm {host}"
        return f"ddtree-ops deploy {host}"

    @property
    def exit_code(self) -> ExitCode:
        """0 active and validated, 4 unreachable, 5 down or failed, 8 nothing deployed, still loading, not validated or
        not confirmed."""
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
            "next": self.next,
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
            "patch": {
                "state": self.patch.word,
                "sized": self.patch.sized,
                "summary": self.patch.summary,
                "overlay": self.patch.overlay or None,
            },
            "model": seen.model or None,
            "ready": self.ready,
            "loading": seen.loading or None,
            "stopped": seen.stopped,
            "stopped_by": {"time": seen.stop.time, "who": seen.stop.who, "origin": seen.stop.origin}
            if seen.stop
            else None,
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


def status_of(
    target: Target, session: Session, *, known: Callable[[RuntimeSpec], Bundle | None] = known_bundle
) -> Status:
    """Look at one service.

    :param known: gives the bundle of a runtime, where there is one in the cache.
    :raises OpsError: the host could not be looked at.
    """
    layout, service = Layout.of(target), target.service
    replied = session.begin_batch(_requests(target, layout), deadline=_DEADLINE)
    owners = (
        UnitControl(session, service.unit).port_owner(service.port, service.bind) if _asked(target) else ()
    )
    seen = parse_seen(replied(), unit=service.unit, asked=_asked(target), host=target.name)
    seen = replace(seen, owners=owners)
    if seen.rollback is not None and (problem := unwatched(session, seen.rollback)):
        seen = replace(seen, armed=f"{seen.armed}; {problem}")
    if seen.stopped:
        seen = replace(seen, stop=_last_stop(session, layout, seen.state.invocation_id))
    patch = Patch()
    if seen.release is not None:
        patch = _patch(target, session, layout, seen.release, known(target.runtime))
    return Status(target.name, service.name, service.unit, seen=seen, patch=patch)


def _last_stop(session: Session, layout: Layout, invocation: str) -> Act | None:
    """Who stopped that run, where it was done with this program."""
    try:
        acts = parse_audit(session.read_file(layout.audit)).acts
    except OpsError:
        return None
    found = [act for act in acts if act.service == layout.unit and act.invocation == invocation]
    return found[-1] if invocation and found and found[-1].action == "stop" else None


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
        "--output-fields=MESSAGE,MESSAGE_ID,UNIT,INVOCATION_ID,_PID,_SYSTEMD_UNIT,_SYSTEMD_INVOCATION_ID",
        f"_SYSTEMD_UNIT={service.unit}",
        "+",
        f"UNIT={service.unit}",
        f"MESSAGE_ID={MessageId.STOPPING}",
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
        Request("lock_check", {"path": layout.bench_lock, "id": ""}),
    ]


def parse_seen(
    replies: Sequence[Reply | Exception], *, unit: str, asked: bool = True, host: str = ""
) -> Seen:
    """What the host answered to the requests of a look. Figures, rollback and lock may be missing; the rest not.

    :raises RemoteError: systemd or the small program gave no answer.
    """
    own, history, shown, probed = answers(replies[:4])
    journal, armed, lock, bench = replies[4:]
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
    rollback, armed_note = _armed(armed)
    lock_text, lock_note = _lock(lock, unit)
    bench_text, bench_note = _lock(bench, f"a bench of {unit}")
    if bench_text:
        notes.append(f"a bench is under way: {bench_text}")
    elif parsed.before_bench[1] and not lock_text and not bench_note:
        name = host.partition("/")[0]
        notes.append(f"a bench that was killed made what serves: ddtree-ops deploy {name}")
    run = _run(journal, state)
    return Seen(
        state=state,
        now=float(answer["now"]),
        release=current.rsplit("/", 1)[-1] if current else None,
        history=parsed,
        http=int(answer["status"]) if asked else None,
        http_error=str(answer["error"]),
        model=str(answer["model"]),
        figures=_figures(run, state, float(answer["now"])),
        armed=_armed_text(rollback, lock, float(answer.get("boot", 0.0)), host.partition("/")[0]),
        lock=lock_text,
        rollback=rollback,
        disturbed=tuple(note for note in (*notes, armed_note, lock_note, bench_note) if note),
        loading=_loading(run or (), state, float(answer["now"])),
        stopped=state.active_state in ("failed", "inactive")
        and any(entry.message_id == MessageId.STOPPING for entry in run or ()),
    )


def _stdout(reply: Reply) -> bytes:
    return reply.data[: int(reply.values["stdout"])]


def _run(reply: Reply | Exception, state: UnitState) -> list[Entry] | None:
    """What the journal holds of the unit's last run; None: it cannot be read."""
    if isinstance(reply, Exception) or reply.values["rc"] != 0:
        return None
    return [item for item in parse_entries([_stdout(reply)]) if item.invocation == state.invocation_id]


def _figures(run: Sequence[Entry] | None, state: UnitState, now: float) -> Figures:
    """From the newest decode line of this run."""
    if run is None:
        return Figures(note="the journal cannot be read")
    if not state.running:
        return Figures(note="it does not run")
    entries = [entry for entry in run if entry.source == "process"]
    if not entries:
        return Figures(note="the journal holds no line of this run")
    for entry in reversed(entries):
        found = parse_decode(entry.message)
        if found is not None:
            age = max(0.0, now - entry.time.timestamp())
            return Figures(found.accept_len, found.gen_throughput, age)
    return Figures(note=f"no decode line (one every 40 steps) among the newest {len(entries)} lines")


def _loading(run: Sequence[Entry], state: UnitState, now: float) -> str:
    """How far the load of a run has come, by its journal; empty: it is over, or nothing was said."""
    if not state.running or state.active_enter is None:
        return ""
    machine = Readiness(math.inf, math.inf, state.active_enter.timestamp(), state.invocation_id)
    machine.feed_unit(state, machine.started_at)
    said = [entry for entry in run if entry.source == "process"]
    for entry in said:
        machine.feed_line(entry.message, entry.time.timestamp())
    if not said or machine.last_words or isinstance(machine.poll(now), Ready):
        return ""
    if any(parse_decode(entry.message) for entry in said) or (
        machine.phase == "start" and len(said) >= LINES
    ):
        return ""
    return f"{machine.describe()}, last progress {duration(max(0.0, now - machine.progress_at))} ago"


def _armed_text(armed: Armed | None, lock: Reply | Exception, boot: float, host: str) -> str:
    """What is armed, and how long there is to come back where its client is gone; ``boot``: seconds since boot."""
    if armed is None:
        return ""
    text = armed.describe()
    if armed.phase != "armed" or isinstance(lock, Exception):
        return text
    holder = lock.values.get("holder") or {}
    if lock.values.get("left_s"):
        return text
    since = armed.lost_since
    if holder.get("id") == armed.lock_id:
        since = float(holder.get("boottime", boot)) + float(holder.get("lease_s", 0.0))
    left = armed.grace_s if since is None else max(0.0, since + armed.grace_s - boot)
    when = f"within {left:.0f} s" if left else "at once"
    return f"{text}; its client is gone, and the host goes back {when}, unless: ddtree-ops confirm {host}"


def _armed(reply: Reply | Exception) -> tuple[Armed | None, str]:
    """What is armed, and what is wrong with reading that."""
    if isinstance(reply, Exception):
        return None, f"rollback.json cannot be read: {reply}"
    try:
        return parse_armed(reply.data if reply.values["found"] else None), ""
    except RemoteError as error:
        return None, error.message


def _lock(reply: Reply | Exception, unit: str) -> tuple[str, str]:
    if isinstance(reply, Exception):
        return "", f"the lock cannot be read: {reply}"
    holder = reply.values.get("holder")
    if not isinstance(holder, Mapping) or not reply.values.get("left_s"):
        return "", ""
    return describe_holder(holder, unit), ""


# -------------------------------------------------------------------------------------------- patch verdict


def _patch(target: Target, session: Session, layout: Layout, release: str, bundle: Bundle | None) -> Patch:
    """Proven on the source of the release. Of one that this machine built itself the content is known by its digest:
    proven once and remembered; of another the few files that tell are read on the host. The entry point of the
    overlay is read there in any case."""
    folder = layout.release(release)
    wanted = runner_wanted(target, folder)

    def read(name: str) -> bytes | None:
        return session.read_file(f"{folder}/{name}")

    try:
        named = plugin_named(load_description(target.runtime.description).overlay, read)
        if bundle is not None and bundle.digest == release:
            check = check_bundle(bundle, **wanted)
        else:
            check = check_source(read, **wanted)
    except (OpsError, OSError, ValueError) as error:
        return Patch(summary=redact(str(error)))
    speculative = target.service.speculative
    needed = speculative is not None and speculative.algorithm == "DDTREE"
    sized = check.sizing.ok if needed and check.sizing is not None else None
    if check.overlay is not None and not named:
        named = {
            OverlayState.ABSENT: check.overlay.short,
            OverlayState.WHOLE: f"{check.overlay.label} WITHOUT an entry point",
            OverlayState.ALTERED: f"{check.overlay.label}, not as shipped",
        }[check.overlay.state]
    return Patch(_WORDS[check.state], sized, check.summary, named)


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
        known = KnownBundles()
        done = self._pool.map(lambda group: self._host(group, known), self._hosts.values())
        found = {name: iter(each) for name, each in zip(self._hosts, done, strict=True)}
        return [next(found[target.host.name]) for target in self._targets]

    def _host(self, group: list[Target], known: KnownBundles) -> list[Status]:
        found = []
        for target in group:
            name = target.host.name
            try:
                session = self._sessions.get(name)
                if session is None:
                    session = self._sessions[name] = self._connect(target)
                found.append(status_of(target, session, known=known))
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
