"""A run of a service on its host explained: which run, what its release is, what its journal says, where that comes from.

What must be known before the journal is read comes in one round trip: the unit's state, its runs, its history, the link
to the active release, the files of the runner that tell whether it is patched, the models' configuration.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ddtree_ops.checks.signatures import hint_for, scan
from ddtree_ops.deploy.history import History, parse_history
from ddtree_ops.deploy.seen import in_evidence, in_history, sentence
from ddtree_ops.deploy.shipment import runner_wanted
from ddtree_ops.diagnose.api import DiagnosisReport
from ddtree_ops.diagnose.explain import named_settings
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.trace import Trace, files_for, frames_of, matching, trace_parameters
from ddtree_ops.errors import Inconclusive, OpsError
from ddtree_ops.launchflags import PLUGIN_PATH
from ddtree_ops.paths import cache_dir
from ddtree_ops.remote.session import Reply, Request, Session
from ddtree_ops.results import Verdict
from ddtree_ops.runtime.bundle import open_bundle
from ddtree_ops.runtime.description import load_description
from ddtree_ops.runtime.patchcheck import PatchCheck, PatchState, check_source
from ddtree_ops.secret import redact
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.journal import parse_entries
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.runs import RUN_MESSAGES, Chosen, Run, choose, parse_runs, whole_id
from ddtree_ops.service.state import parse_show
from ddtree_ops.sizing import RUNNER_PATH
from ddtree_ops.wording import moment_of

if TYPE_CHECKING:
    from ddtree_ops.diagnose.events import Frame
    from ddtree_ops.diagnose.library import Library
    from ddtree_ops.diagnose.reduce import Diagnosis
    from ddtree_ops.inventory.models import Target
    from ddtree_ops.runtime.bundle import Bundle

__all__ = ["explain_run", "name_the_first_node", "trace_in", "trace_local", "trace_of"]

_RELEASE = re.compile(r"releases/([0-9a-f]{64})/?$")
_YOUNG = timedelta(minutes=30)
"""A run that systemd began by itself and that is younger tells nothing yet: loading alone takes 10 to 20 minutes."""
_SKEW = timedelta(seconds=2)
_KNOWN = 3
_STILL = "the server is loading"
_LATE = re.compile(
    r"CUDA reports (?:this|errors|it) late|CUDA error: |asynchronously reported|device-side assert"
)
_LONGEST = 16 << 20
_SIGNATURE_FILES = {"ddtree-graph-size": (RUNNER_PATH,)}
"""Files a known failure comes from, where its traceback was not seen."""


@dataclass
class _Look:
    """What the host said before its journal was read."""

    runs: tuple[Run, ...] = ()
    state: str = ""
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    history: History = field(default_factory=History)
    release: str = ""
    files: dict[str, bytes | None] = field(default_factory=dict)
    changed: dict[str, datetime] = field(default_factory=dict)
    configs: dict[str, Mapping[str, Any]] = field(default_factory=dict)


def explain_run(
    session: Session,
    target: Target,
    *,
    invocation: str = "current",
    library: Library | None = None,
    given: Iterable[str] = (),
) -> DiagnosisReport:
    """Explain a run of the service, its journal and the kernel's messages of that time included.

    Three or four round trips beside the journal itself, whatever the number of files.

    :param invocation: ``current``, ``previous``, an ``InvocationID`` or its first digits. ``current`` is the run that crashed where the
        unit failed, or where systemd restarted it a short while ago; the report's notes say so.
    :param given: ``KEY=VALUE`` facts that outweigh those of the inventory.
    :raises Inconclusive: there is no such run. :raises NotDeployed: there is no such unit.
    :raises UsageError: ``invocation`` is no id, or begins none or several. :raises RemoteError: the host could not be asked.
    """
    layout = Layout.of(target)
    look = _look(session, target, layout)
    young = max(_YOUNG, _load_time(target))
    if invocation not in ("current", "previous"):
        invocation = whole_id(invocation, [run.id for run in look.runs])
    chosen = choose(look.runs, invocation, now=look.now, young=young, state=look.state)
    if chosen is None:
        UnitControl(session, target.service.unit).invocation(invocation)
        raise Inconclusive(f"no {invocation} run of {target.service.unit} is known", host=target.host.name)
    release = _release_of(chosen.run, look)
    tree = _Tree(session, layout, release, look)
    check, unreadable = _patch_check(target, tree)
    patched = None if check is None or check.state is PatchState.FOREIGN else not check.absent
    facts = ServiceFacts.of(target, patched=patched)
    facts = facts.learn_config(look.configs.get(target.service.model, {}))
    facts = facts.learn_config(look.configs.get(target.service.drafter or "", {}), drafter=True)
    facts = ServiceFacts.given(given, replace(facts, learned=frozenset()))
    report = scan(
        session,
        target,
        invocation=chosen.run.id,
        facts=facts,
        library=library,
        since=chosen.run.begin,
        until=None if chosen.until is None else chosen.until + _SKEW,
        served=target.node is not None and target.node.rank > 0,
    )
    report = replace(report, invocation=chosen.run.id, notes=(*_notes(chosen), *report.notes))
    if report.loading:
        report = replace(report, loading=_loading(report, chosen, look))
    if report.verdict is Verdict.INCONCLUSIVE:
        if report.loading.startswith(_STILL):
            hint = f"follow it: ddtree-ops wait {target.name}"
        elif report.searched.lines:
            hint = hint_for(report, target.name, target.service.unit)
        else:
            hint = _why_nothing(session, target, chosen, look)
        report = replace(report, notes=(*report.notes, hint))
    root = report.root
    if root is None:
        return report
    frames = _frames(root)
    trace = trace_of(root, tree.read, tree.prefetch, origin=tree.name)
    same = matching(frames, tree.text) if trace.steps else None
    found = [*in_evidence(root, target=target.name), *in_history(root, look.history, target.name)]
    return replace(
        report,
        trace=trace,
        patch=_patch_sentence(target, check, unreadable, chosen, look, release, same),
        seen=sentence(found, target.name, chosen.run.id),
    )


def name_the_first_node(found: Sequence[tuple[Target, DiagnosisReport]]) -> list[DiagnosisReport]:
    """Reports of several targets; of an engine over several hosts those that only lost a peer name the node that failed.

    No round trip. The order is kept.
    """
    from ddtree_ops.deploy.nodes import Symptom, the_first

    symptoms = [
        Symptom.of(number, OpsError(report.headline()), report, 0.0)
        for number, (_, report) in enumerate(found)
    ]
    reports = [report for _, report in found]
    for number, (target, report) in enumerate(found):
        if target.service.nodes is None or report.root is None or not symptoms[number].lost_peer:
            continue
        peers = [
            symptoms[place]
            for place, (other, told) in enumerate(found)
            if other.service.name == target.service.name and told.root is not None
        ]
        first = the_first(peers)
        if first is not None and not first.lost_peer:
            name = found[first.rank][0].name
            note = f"a peer was lost: {name}, a node of the same engine, failed first: {first.cause}"
            reports[number] = replace(report, notes=(*report.notes, note))
    return reports


def _loading(report: DiagnosisReport, chosen: Chosen, look: _Look) -> str:
    """The report's sentence about a load without an end, with what the unit and the history know of it."""
    text = report.loading
    run = chosen.run
    runs = look.runs and look.runs[0].id == run.id and look.state.startswith(("active", "activating"))
    if runs and chosen.until is None:
        since = f" since {int((look.now - run.begin).total_seconds())} s" if run.begin else ""
        text = f"{_STILL}{since} (last step seen: {report.step})"
    judged = [item for item in look.history.activations if item.invocation == run.id and item.verdict]
    if judged and not judged[-1].good and judged[-1].summary:
        summary = judged[-1].summary.partition("; the log ends")[0]
        text += f"; its validation ended with {judged[-1].verdict}: {redact(summary)[:160]}"
    return text


def _why_nothing(session: Session, target: Target, chosen: Chosen, look: _Look) -> str:
    """Why there was no entry of a run. One round trip."""
    known = chosen.run in look.runs
    found = UnitControl(session, target.service.unit).nothing(
        invocation="current" if known else chosen.run.id
    )
    if known or not look.runs:
        return f"{found.message}; all that is left: ddtree-ops logs {target.name} --invocation all"
    return f"{found.message}; runs that are known: {', '.join(run.id for run in look.runs[:_KNOWN])}"


def _notes(chosen: Chosen) -> tuple[str, ...]:
    return (chosen.note,) if chosen.note else ()


def _load_time(target: Target) -> timedelta:
    return timedelta(seconds=target.service.health.load_timeout)


# ------------------------------------------------------------------------------------------------- the look


def _command(*argv: str) -> Request:
    return Request("run", {"argv": list(argv), "env": {"TZ": "UTC"}})


def _reading(path: str) -> Request:
    return Request("read_file", {"path": path, "max_bytes": _LONGEST})


def _patch_files(target: Target) -> tuple[str, ...]:
    description = load_description(target.runtime.description)
    patched = (path for patch in description.patches for path in patch.files)
    return tuple(dict.fromkeys([RUNNER_PATH, *description.pristine, *patched]))


def _look(session: Session, target: Target, layout: Layout) -> _Look:
    unit = target.service.unit
    configs = [f"{model.rstrip('/')}/config.json" for model in _models(target)]
    files = _patch_files(target)
    listing = _command(
        *("journalctl", "--output=json", "--quiet", "--no-pager", "--reverse", "--lines=1000"),
        "--output-fields=INVOCATION_ID,UNIT,MESSAGE_ID,N_RESTARTS",
        *(f"UNIT={unit}", *(f"MESSAGE_ID={name}" for name in RUN_MESSAGES)),
    )
    replies = session.batch(
        [
            _command(
                "systemctl", "show", "--no-pager", "--property=InvocationID,ActiveState,SubState", "--", unit
            ),
            listing,
            _command("date", "+%s"),
            Request("list_dir", {"path": layout.service_dir}),
            _reading(layout.history),
            *(_reading(path) for path in configs),
            *(_reading(f"{layout.current}/{path}") for path in files),
        ]
    )
    shown, listed, clock, folder, history, *rest = replies
    look = _Look(history=parse_history(_content(history)))
    properties = parse_show(_said(shown).decode("utf-8", "replace"))
    look.state = f"{properties.get('ActiveState', '')} {properties.get('SubState', '')}".strip()
    look.runs = parse_runs(parse_entries([_said(listed)]), properties.get("InvocationID", ""))
    if (seconds := _said(clock).strip()).isdigit():
        look.now = datetime.fromtimestamp(int(seconds), UTC)
    if isinstance(folder, Reply):
        targets = [item["target"] or "" for item in folder.values["entries"] if item["name"] == "current"]
        found = _RELEASE.search("".join(targets))
        look.release = found[1] if found else ""
    for model, reply in zip(_models(target), rest[: len(configs)], strict=True):
        look.configs[model] = _object(_content(reply))
    for path, reply in zip(files, rest[len(configs) :], strict=True):
        _keep(look, path, reply)
    return look


def _models(target: Target) -> list[str]:
    return [
        model for model in (target.service.model, target.service.drafter) if model and model.startswith("/")
    ]


def _said(reply: Reply | Exception) -> bytes:
    """Standard output of a command; nothing where it failed: what is needed is asked for again by who needs it."""
    return reply.data[: int(reply.values["stdout"])] if isinstance(reply, Reply) else b""


def _content(reply: Reply | Exception) -> bytes | None:
    return reply.data if isinstance(reply, Reply) and reply.values["found"] else None


def _keep(look: _Look, path: str, reply: Reply | Exception) -> None:
    look.files[path] = _content(reply)
    if isinstance(reply, Reply) and reply.values["found"]:
        look.changed[path] = datetime.fromtimestamp(float(reply.values["mtime"]), UTC)


def _object(content: bytes | None) -> Mapping[str, Any]:
    try:
        found = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _release_of(run: Run, look: _Look) -> str:
    """Digest of the release that a run ran: of the activation that was judged by it, or the newest before it began."""
    for item in reversed(look.history.activations):
        if item.invocation and item.invocation == run.id:
            return item.release
    if run.begin is not None:
        for item in reversed(look.history.activations):
            when = moment_of(item.time)
            if when is not None and when <= run.begin + _SKEW:
                return item.release
    return look.release


class _Tree:
    """The files of the release that ran; several are fetched in one round trip, each once.

    A release that is gone from the host is read in the bundle of the same digest, where this machine built it.
    """

    def __init__(self, session: Session, layout: Layout, release: str, look: _Look) -> None:
        self._session, self._look = session, look
        self._root = layout.release(release) if release and release != look.release else layout.current
        self._bundle: Bundle | None = None
        self.name = f"release {release[:12]}" if release else self._root
        if release != look.release:
            paths, look.files = list(look.files), {}
            look.changed = {}
            self.prefetch(paths)
        if release and look.files.get(RUNNER_PATH) is None:
            with contextlib.suppress(OpsError, OSError):  # then nobody has it
                self._bundle = open_bundle(cache_dir() / "bundles" / release)
                self.name += " (gone from the host; read in the bundle built here)"

    def prefetch(self, paths: Iterable[str]) -> None:
        """Fetch what is not here yet. One round trip, or none."""
        wanted = [path for path in dict.fromkeys(paths) if path not in self._look.files]
        if not wanted or self._bundle is not None:
            return
        replies = self._session.batch([_reading(f"{self._root}/{path}") for path in wanted])
        for path, reply in zip(wanted, replies, strict=True):
            _keep(self._look, path, reply)

    def bytes(self, path: str) -> bytes | None:
        """Content, None where there is no such file."""
        if self._bundle is not None:
            return self._bundle.read(path)
        self.prefetch([path])
        return self._look.files[path]

    def text(self, path: str) -> str | None:
        """Text, None where there is no such file."""
        content = self.bytes(path)
        return None if content is None else content.decode("utf-8", "replace")

    read = text


# ------------------------------------------------------------------------------------------- patch and trace


def _patch_check(target: Target, tree: _Tree) -> tuple[PatchCheck | None, str]:
    try:
        return check_source(tree.bytes, **runner_wanted(target, tree.name)), ""
    except (OpsError, OSError, ValueError) as error:
        return None, redact(str(error))


def _patch_sentence(
    target: Target,
    check: PatchCheck | None,
    unreadable: str,
    chosen: Chosen,
    look: _Look,
    release: str,
    same: bool | None,
) -> str:
    """What ran is patched or not, and whether it is what is deployed now."""
    ran = f"release {release[:12]}" if release else "what the link 'current' names"
    if check is None:
        text = f"whether {ran} has the patch could not be told: {unreadable}"
    elif check.state is PatchState.MISSING:
        text = f"{ran} is not on this host any more, or it never was one of ours: whether it had the patch is not known"
    else:
        word = {
            PatchState.PATCHED: "has the patch",
            PatchState.PRISTINE: "lacks the patch",
            PatchState.PARTLY: "has a part of the patches",
        }.get(check.state, "holds files of unknown origin")
        text = f"{ran} {word}: {check.summary}"
    if release and look.release and release != look.release:
        text += f"; now release {look.release[:12]} is deployed"
        if chosen.until is None and chosen.run.end is None:
            text += ", and the running process is older than that: restart it"
    begin = chosen.run.begin
    edited = sorted(path for path, when in look.changed.items() if begin is not None and when > begin)
    if edited:
        text += f"; {edited[0].rpartition('/')[2]} was written after this run began: the process is older than the file"
    if same is False:
        text += "; the lines of the traceback do not stand in these files: another tree was running"
    return text


def trace_of(
    root: Diagnosis,
    read: Callable[[str], str | None],
    prefetch: Callable[[Sequence[str]], None],
    *,
    origin: str,
) -> Trace:
    """The way of the parameters that a finding's numbers name, through the tree that ``read`` reads; empty: it names none.

    :param prefetch: is told which files are about to be read.
    """
    fields = _parameters(root)
    frames = _frames(root)
    files = files_for(frames, _SIGNATURE_FILES.get(root.signature, ()))
    if not fields or len(files) < 2:
        return Trace()
    prefetch((*files, PLUGIN_PATH))
    steps = trace_parameters(fields, frames, files, read)
    if not steps:
        return Trace(
            note=f"no trace of the parameters: {origin} has no {files[1]}, or reads none of them there"
        )
    return Trace(tuple(steps), origin)


def trace_local(root: Diagnosis, target: Target | None) -> Trace:
    """The same for a log without its host: over a runtime that was built on this machine.

    It is traced where the traceback's lines stand just so in one built runtime, that of ``target`` first, and in no other
    that reads the parameters differently; without a traceback nowhere. A graph that is sized for the
    draft is made by a runner without the patch: of the runtimes that fit only those that lack it count.
    """
    frames = _frames(root)
    if not _parameters(root) or len(files_for(frames, _SIGNATURE_FILES.get(root.signature, ()))) < 2:
        return Trace()
    if not frames:
        return Trace(
            note="no trace of the parameters: there is no traceback in the log, whose lines would tell which source ran"
        )
    bundles = _built(target)
    if not bundles:
        return Trace(
            note="no trace of the parameters: no runtime is built on this machine (ddtree-ops runtime build RUNTIME)"
        )
    own = bundles[0] if target is not None and bundles[0].name == target.runtime.name else None
    fitting: list[Bundle] = []
    for bundle in bundles:
        with contextlib.suppress(OpsError, OSError):  # a damaged bundle is none to trace in
            if matching(frames, partial(_text_of, bundle)):
                fitting.append(bundle)
    if not fitting:
        return Trace(
            note="no trace of the parameters: the traceback's lines stand in no runtime built on this machine"
        )
    origin = "local bundle {}"
    if root.signature == "ddtree-graph-size":
        lacking = [bundle for bundle in fitting if _lacks_patch(bundle)]
        origin += (
            ", which lacks the patch"
            if lacking
            else ", which has the patch: the log may be of another runtime"
        )
        if own is not None and lacking and own not in lacking:
            origin += f" (that of the service, {own.name}, has it: the log is of another one)"
        fitting = lacking or fitting
    if own in fitting:
        fitting = [own]
    found = {bundle.name: trace_in(bundle, root, origin=origin.format(bundle.name)) for bundle in fitting}
    first, *others = found.values()
    if any(other.steps != first.steps for other in others):
        return Trace(
            note="no trace of the parameters: the traceback's lines stand in several runtimes built on this machine "
            f"({', '.join(found)}), which read them differently: name the service of the log with --service"
        )
    return first


def _built(target: Target | None) -> list[Bundle]:
    """The runtimes of the inventory that were built on this machine, that of ``target`` first, each content once."""
    from ddtree_ops.inventory import load_inventory
    from ddtree_ops.runtime.bundle import known_bundle

    try:
        specs = list(load_inventory(None).runtimes.values())
    except OpsError:
        specs = []
    bundles: dict[str, Bundle] = {}
    for spec in [*([target.runtime] if target is not None else []), *specs]:
        with contextlib.suppress(OpsError):
            bundle = known_bundle(spec)
            if bundle is not None:
                bundles.setdefault(bundle.digest, bundle)
    return list(bundles.values())


def _lacks_patch(bundle: Bundle) -> bool:
    try:
        return bool(check_source(bundle.read).absent)
    except (OpsError, OSError):
        return False


def trace_in(bundle: Bundle, root: Diagnosis, *, origin: str) -> Trace:
    """The way of the parameters through a bundle on this machine; where that is damaged, the note says so."""
    try:
        return trace_of(root, partial(_text_of, bundle), lambda _: None, origin=origin)
    except (OpsError, OSError) as error:
        return Trace(note=f"no trace of the parameters: {error}")


def _text_of(bundle: Bundle, path: str) -> str | None:
    content = bundle.read(path)
    return None if content is None else content.decode("utf-8", "replace")


def _frames(root: Diagnosis) -> tuple[Frame, ...]:
    """The frames of a finding: all that are known, else those of its reduced traceback."""
    return tuple(getattr(root, "frames", ())) or frames_of(root.traceback)


def _parameters(root: Diagnosis) -> tuple[str, ...]:
    """Settings that the finding's numbers name; none where CUDA came late, for the frame need not be where it failed."""
    said = (root.explanation, *(line.text for line in root.evidence), *root.traceback)
    if any(_LATE.search(text) for text in said):
        return ()
    return named_settings(root.explanation.partition("Settings known:")[0])[:2]
