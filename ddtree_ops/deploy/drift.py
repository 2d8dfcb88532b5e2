"""What runs against what should run: one look at a host (:mod:`.drift_look`), judged into findings. The judgement is pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from ddtree_ops.deploy.deployed_settings import deployed_settings
from ddtree_ops.deploy.drift_look import CLOCK_S, NAMED, Live, Process, look_requests, parse_live
from ddtree_ops.deploy.plan import (
    ValueChange,
    compare_values,
    file_marks,
    manifest_files,
    masked_argument,
    masked_value,
    text_sha256,
    unit_diff,
)
from ddtree_ops.errors import ExitCode
from ddtree_ops.inventory.models import RuntimeSpec, Target
from ddtree_ops.remote.files import FileEntry
from ddtree_ops.remote.session import Session
from ddtree_ops.runtime import Bundle, build, known_bundle
from ddtree_ops.secret import redact
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.unit import render_unit
from ddtree_ops.service.unitfile import environment_of, exec_start_of, flags_of
from ddtree_ops.wording import count

__all__ = [
    "DriftReport",
    "Finding",
    "Severity",
    "Should",
    "find_drift",
    "judge",
    "worst_exit",
]

_DEADLINE = 180.0
_SETTINGS = 6
"""Settings that a finding names in its sentence."""
_DIAGNOSTIC = re.compile(r"[A-Z][A-Z0-9]*_DIAG(?![A-Za-z0-9])")
# What systemd itself, and a shell between it and the engine, puts into the environment of a service (systemd.exec(5)).
_SYSTEMS_OWN = frozenset(
    (
        *(
            "CACHE_DIRECTORY",
            "CONFIGURATION_DIRECTORY",
            "CREDENTIALS_DIRECTORY",
            "FDSTORE",
            "HOME",
            "INVOCATION_ID",
        ),
        *(
            "JOURNAL_STREAM",
            "LANG",
            "LISTEN_FDNAMES",
            "LISTEN_FDS",
            "LISTEN_PID",
            "LOGNAME",
            "LOGS_DIRECTORY",
        ),
        *(
            "MAINPID",
            "MANAGERPID",
            "MEMORY_PRESSURE_WATCH",
            "MEMORY_PRESSURE_WRITE",
            "NOTIFY_SOCKET",
            "OLDPWD",
        ),
        *(
            "PATH",
            "PIDFILE",
            "PWD",
            "RUNTIME_DIRECTORY",
            "SHELL",
            "SHLVL",
            "STATE_DIRECTORY",
            "SYSTEMD_EXEC_PID",
        ),
        *("TERM", "TZ", "USER", "WATCHDOG_PID", "WATCHDOG_USEC", "XDG_RUNTIME_DIR", "_"),
    )
)
_LOCALE = re.compile(r"LC_[A-Z]+|LANGUAGE")
# Variables of sglang 0.5.11 (srt/environ.py) and of Python and CUDA that are for debugging or falsify figures.
_DEBUG_VARIABLE = re.compile(
    r"SGLANG_(?:\w*DEBUG\w*|TEST_\w+|SIMULATE_\w+|\w*DIAG\w*|LOG_MS|RECORD_\w+|DUMPER\w*)|SGL_\w*(?:DEBUG|DIAG)\w*"
    r"|[A-Z][A-Z0-9]*_DIAG|CUDA_LAUNCH_BLOCKING|PYTHONBREAKPOINT|PYTHONINSPECT|PYTHONDEVMODE|PYTHONTRACEMALLOC"
    r"|TORCH_SHOW_CPP_STACKTRACES|CUDA_COREDUMP\w*"
)


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    """What runs, or is installed, is not what its own record says: somebody changed it by hand, or it is damaged."""
    WARN = "warn"
    """It differs from the inventory, or nobody has seen it work."""
    INFO = "info"
    """Worth knowing; not drift."""


@dataclass(frozen=True)
class Finding:
    """One way in which a host is not as it should be.

    :param id: stable dotted name.
    :param should: what should be; ``found``: what is. One sentence each, without secrets.
    :param names: files, arguments or variables concerned, the first :data:`NAMED`; ``count``: of all of them.
    :param hint: command to type next.
    """

    id: str
    severity: Severity
    should: str
    found: str
    hint: str = ""
    names: tuple[str, ...] = ()
    count: int = 0

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "id": self.id,
            "severity": self.severity.value,
            "should": self.should,
            "found": self.found,
            "hint": self.hint,
            "names": list(self.names),
            "count": self.count,
        }


@dataclass(frozen=True)
class Should:
    """What should run on a host: the inventory's wish.

    :param release: bundle digest; ``unit_text``: the rendered unit file.
    :param secrets: names of variables that systemd takes from files of their own.
    """

    host: str
    unit: str
    release: str
    runtime: str
    unit_text: str
    current: str
    secrets: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DriftReport:
    """The findings on one service of one host, worst first. ``deployed`` False: there is nothing to judge."""

    host: str
    unit: str
    release: str | None
    deployed: bool
    findings: tuple[Finding, ...] = ()
    files: int = 0

    @property
    def drift(self) -> bool:
        """Something is not as it should be."""
        return any(item.severity is not Severity.INFO for item in self.findings)

    @property
    def exit_code(self) -> ExitCode:
        """0 none, 5 drift, 8 never deployed."""
        if not self.deployed:
            return ExitCode.INCONCLUSIVE
        return ExitCode.CHECK_FAILED if self.drift else ExitCode.OK

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "host": self.host,
            "unit": self.unit,
            "release": self.release,
            "deployed": self.deployed,
            "drift": self.drift,
            "files": self.files,
            "findings": [item.to_json() for item in self.findings],
        }


def worst_exit(reports: Iterable[DriftReport]) -> ExitCode | None:
    """Of several hosts: drift before nothing to judge before none; None: no host at all."""
    codes = {report.exit_code for report in reports}
    return next(
        (code for code in (ExitCode.CHECK_FAILED, ExitCode.INCONCLUSIVE, ExitCode.OK) if code in codes), None
    )


# ------------------------------------------------------------------------------------------------- the look


def find_drift(
    target: Target, session: Session, *, known: Callable[[RuntimeSpec], Bundle | None] = known_bundle
) -> DriftReport:
    """Look at a host in one round trip and judge; one more where the unit file is another than the inventory gives and was
    not edited. Nothing is changed and no lock is taken.

    :param known: gives the bundle of a runtime, where there is one in the cache.
    :raises OpsError: the host could not be looked at, or the runtime that should run could not be built.
    """
    layout = Layout.of(target)
    replied = session.begin_batch(look_requests(target, layout), deadline=_DEADLINE)
    bundle = known(target.runtime) or build(target.runtime)
    should = _should(target, layout, bundle)
    live = parse_live(replied(), host=target.name)
    latest = live.history.latest
    if latest is None or not _as_deployed(should, live):
        return judge(should, live)
    return judge(should, live, deployed_settings(session, layout, latest, target.service))


def _should(target: Target, layout: Layout, bundle: Bundle) -> Should:
    return Should(
        host=target.name,
        unit=target.service.unit,
        release=bundle.digest,
        runtime=bundle.name,
        unit_text=render_unit(target),
        current=layout.current,
        secrets=frozenset(target.service.secrets),
    )


# ---------------------------------------------------------------------------------------------- the judgement


def judge(should: Should, live: Live, settings: Sequence[ValueChange] | None = None) -> DriftReport:
    """Findings, worst first, in a fixed order within a severity. Pure.

    :param settings: how the settings of the last deploy differ from those wished; None: that is not known.
    """
    if not live.deployed:
        return DriftReport(should.host, should.unit, None, deployed=False)
    findings = [
        *_release(should, live),
        *_release_files(should, live),
        *_venv_findings(should, live),
        *_unit(should, live, settings),
        *_process_findings(should, live),
        *_record(should, live),
    ]
    order = list(Severity)
    return DriftReport(
        should.host,
        should.unit,
        live.release,
        deployed=True,
        findings=tuple(sorted(findings, key=lambda item: order.index(item.severity))),
        files=sum(entry.path != "manifest.json" for entry in live.files or ()),
    )


def _deploy(should: Should) -> str:
    return f"ddtree-ops deploy {should.host.partition('/')[0]}"


def _finding(
    id: str, severity: Severity, should: str, found: str, hint: str, names: Sequence[str] = ()
) -> Finding:
    return Finding(id, severity, should, redact(found), hint, tuple(map(redact, names[:NAMED])), len(names))


def _release(should: Should, live: Live) -> Iterator[Finding]:
    latest = live.history.latest
    wished = f"release {should.release[:12]} ({should.runtime})"
    if live.release is None:
        yield _finding("release.none", Severity.ERROR, wished, "current is not there", _deploy(should))
        return
    if live.files is None:
        yield _finding(
            "release.gone",
            Severity.ERROR,
            wished,
            f"current points at {live.release[:12]}, which is not on the host",
            _deploy(should),
        )
    if latest is not None and latest.release != live.release:
        yield _finding(
            "release.switched",
            Severity.ERROR,
            f"the release of the latest activation: {latest.release[:12]} ({latest.time}, {latest.who})",
            f"current points at {live.release[:12]}: it was switched by hand",
            _deploy(should),
        )
    if live.release != should.release:
        yield _finding(
            "release.other",
            Severity.WARN,
            wished,
            f"current points at {live.release[:12]}",
            f"{_plan(should)} --files",
        )


def _plan(should: Should) -> str:
    return f"ddtree-ops plan {should.host.partition('/')[0]}"


def _release_files(should: Should, live: Live) -> Iterator[Finding]:
    if live.release is None or live.files is None:
        return
    again = _deploy(should)
    try:
        listed = manifest_files(live.manifest or b"")
    except ValueError:
        listed = {}
    digest = _digest(live.manifest or b"")
    if not listed or digest != live.release:
        yield _finding(
            "release.manifest",
            Severity.ERROR,
            f"manifest.json that belongs to release {live.release[:12]}",
            "it is gone"
            if live.manifest is None
            else f"it is that of release {digest[:12]}"
            if digest and listed
            else "it is damaged",
            again,
        )
    if not listed:
        return
    there = file_marks(entry for entry in live.files if entry.path != "manifest.json")
    changed = sorted(path for path in listed.keys() & there.keys() if listed[path] != there[path])
    missing, extra = sorted(listed.keys() - there.keys()), sorted(there.keys() - listed.keys())
    if changed or missing or extra:
        parts = [
            f"{len(names)} {word}"
            for word, names in (("changed", changed), ("missing", missing), ("added", extra))
            if names
        ]
        names = [
            *(f"changed: {path}" for path in changed),
            *(f"missing: {path}" for path in missing),
            *(f"added: {path}" for path in extra),
        ]
        yield _finding(
            "release.files",
            Severity.ERROR,
            f"{len(listed)} files of release {live.release[:12]} as built",
            ", ".join(parts),
            again,
            names,
        )
    if live.tree is None:
        return
    debris = sorted({*live.tree.links, *(path for path in live.tree.strays if path not in listed)})
    if debris:
        yield _finding(
            "release.strays",
            Severity.WARN,
            "a release without leftovers of editing or running",
            f"{count(len(debris), 'leftover')} (byte code, backups, rejects, links)",
            again,
            debris,
        )
    left = _telling(live.tree.diagnostics, {*changed, *extra})
    if left:
        yield _finding(
            "release.diagnostics",
            Severity.ERROR,
            "no diagnostics in the engine's source",
            f"{count(len(left), 'line')} of diagnostics",
            again,
            left,
        )
    if live.process is not None and live.tree.newer:
        yield _finding(
            "process.files",
            Severity.ERROR,
            "a process that has in memory what is on disk",
            f"{count(len(live.tree.newer), 'file')} changed after PID {live.process.pid} was started: it may run their old content",
            again,
            live.tree.newer,
        )


def _digest(manifest: bytes) -> str:
    """Digest that the list of files of a manifest gives; empty where it cannot be read."""
    from ddtree_ops.runtime.bundle import digest_of

    try:
        listed = json.loads(manifest)["files"]
        return digest_of(
            [FileEntry(item["path"], item["mode"], item["size"], item["sha256"]) for item in listed]
        )
    except (ValueError, KeyError, TypeError):
        return ""


def _telling(diagnostics: Iterable[tuple[str, int, str]], changed: set[str]) -> list[str]:
    """``*_DIAG`` anywhere; ``breakpoint()`` and ``set_trace()`` only where the file is not as it came: sglang has some."""
    return [
        f"{path}:{line}: {text}"
        for path, line, text in diagnostics
        if path in changed or _DIAGNOSTIC.search(text)
    ]


def _venv_findings(should: Should, live: Live) -> Iterator[Finding]:
    venv = live.venv
    shadowed = bool(live.resolves) and _below(live.resolves, live.release_dir)
    if live.release is not None and live.files is not None:
        if not live.resolves:
            yield _finding(
                "venv.import",
                Severity.WARN,
                "the venv's Python finds sglang",
                f"it does not: {live.resolve_error or 'no answer'}",
                "look at the venv on the host",
            )
        elif not shadowed:
            yield _finding(
                "venv.import",
                Severity.ERROR,
                f"sglang comes from {should.current}",
                f"the venv's Python takes it from {live.resolves}: the release is not what runs",
                _deploy(should),
            )
    if not venv.package:
        return
    shadowed = shadowed or not _below(live.resolves, venv.site)
    matters = "it is not what runs" if shadowed else "AND IT IS WHAT RUNS"
    pip = f"{venv.site.partition('/lib/')[0]}/bin/pip"
    hint = f"on the host: {pip} install --force-reinstall --no-deps sglang=={venv.version}"
    severity = Severity.WARN if shadowed else Severity.ERROR
    edited = [*venv.changed, *venv.missing]
    if edited:
        yield _finding(
            "venv.sglang",
            severity,
            f"{venv.files} files of the venv's sglang as its RECORD says",
            f"{len(venv.changed)} changed, {len(venv.missing)} missing ({matters})",
            hint,
            [f"changed: {path}" for path in venv.changed] + [f"missing: {path}" for path in venv.missing],
        )
    elif not venv.record:
        yield _finding(
            "venv.record",
            Severity.INFO,
            "a RECORD of the venv's sglang to compare with",
            f"there is none in {venv.site} ({matters})",
            "",
        )
    inside = {path.partition("/")[2] for path in (*venv.changed, *venv.extra)}
    left = [f"sglang/{line}" for line in _telling(venv.tree.diagnostics, inside)]
    strays = [f"sglang/{path}" for path in venv.tree.strays if not path.endswith(".pyc")]
    if left or strays:
        yield _finding(
            "venv.diagnostics",
            severity,
            "no leftovers of debugging in site-packages",
            f"{count(len(left), 'line')} of diagnostics, {count(len(strays), 'backup or reject')} in {venv.site} "
            f"({matters})",
            hint,
            [*left, *strays],
        )


def _below(path: str, folder: str) -> bool:
    return bool(folder) and path.startswith(folder.rstrip("/") + "/")


def _drop_ins(live: Live, again: str) -> Iterator[Finding]:
    read, unread = live.state.drop_in_paths, live.state.unread_drop_ins
    if not read and not unread:
        return
    found = f"{count(len(read) + len(unread), 'drop-in')} on top of it"
    if unread:
        found += f", {len(unread)} of them not read by systemd yet: the next daemon-reload or boot does"
    yield _finding(
        "unit.drop-ins",
        Severity.ERROR,
        "all settings of the unit from its one file",
        found,
        f"put what they say into the inventory, remove them, then {again}",
        [*read, *(f"{path} (not read yet)" for path in unread)],
    )


def _as_deployed(should: Should, live: Live) -> bool:
    """The unit file is another than the one that should be, and nobody edited it on the host."""
    latest = live.history.latest
    by_hand = (
        latest is not None
        and live.unit_text is not None
        and latest.unit_sha256 != text_sha256(live.unit_text)
    )
    return live.unit_text not in (None, should.unit_text) and not by_hand


def _otherwise(settings: Sequence[ValueChange] | None) -> str:
    """Why a unit file that nobody edited is another one: which settings the last deploy had."""
    text = "it is as it was deployed; the inventory, or a --set of that deploy, says otherwise"
    if not settings:
        return text
    shown = [
        f"{each.name} deployed {each.before or 'not set'}, inventory {each.after or 'not set'}"
        for each in settings[:_SETTINGS]
    ]
    more = f"; and {len(settings) - _SETTINGS} more" if len(settings) > _SETTINGS else ""
    return f"{text}: {'; '.join(shown)}{more}"


def _unit(should: Should, live: Live, settings: Sequence[ValueChange] | None) -> Iterator[Finding]:
    again, look = _deploy(should), _plan(should)
    if live.unit_text is None:
        yield _finding("unit.none", Severity.ERROR, f"{should.unit} is installed", "it is not there", again)
        yield from _drop_ins(live, again)
        return
    if live.unit_text != should.unit_text:
        by_hand = not _as_deployed(should, live)
        diff = unit_diff(live.unit_text, should.unit_text, "(installed)", "(should be)", should.unit)
        lines = [line for line in diff[2:] if not line.startswith(("@@", " "))]
        yield _finding(
            "unit.edited" if by_hand else "unit.other",
            Severity.ERROR if by_hand else Severity.WARN,
            "the unit file that the inventory gives",
            "it was edited on the host" if by_hand else _otherwise(settings),
            again if by_hand else look,
            lines,
        )
    yield from _drop_ins(live, again)
    if live.state.need_daemon_reload:
        yield _finding(
            "unit.reload",
            Severity.WARN,
            "systemd has read the unit file as it is",
            "it changed on disk after that (daemon-reload needed)",
            again,
        )
    if live.state.exists and live.state.unit_file_state not in ("enabled", "enabled-runtime"):
        yield _finding(
            "unit.disabled",
            Severity.WARN,
            "started at boot (enabled)",
            f"{live.state.unit_file_state or 'not enabled'}: after a reboot nothing serves",
            f"on the host: systemctl enable {should.unit}",
        )


def _process_findings(should: Should, live: Live) -> Iterator[Finding]:
    process, again = live.process, _deploy(should)
    if process is None or not live.state.running:
        yield _finding("process.none", Severity.ERROR, f"{should.unit} runs", live.state.describe(), again)
        return
    if process.error:
        yield _finding(
            "process.unread",
            Severity.WARN,
            "the running process can be read in /proc",
            f"PID {process.pid}: {process.error}",
            f"ddtree-ops drift {should.host}",
        )
        return
    yield from _older(should, live, process)
    installed = live.unit_text or should.unit_text
    argv, variables = exec_start_of(installed), environment_of(installed)
    changes = _argument_drift(argv, process)
    if changes:
        yield _finding(
            "process.arguments",
            Severity.ERROR,
            "the process runs with the arguments of its unit file",
            f"{len(changes)} differ in PID {process.pid}",
            again,
            [str(item) for item in changes],
        )
    elif changes is None:
        yield _finding(
            "process.arguments-unread",
            Severity.INFO,
            "the arguments of the process can be compared",
            "the unit file or the command line of the process cannot be read word by word",
            "",
        )
    yield from _environment_drift(should, process, variables)


def _argument_drift(argv: list[str] | None, process: Process) -> tuple[ValueChange, ...] | None:
    """Flags of the unit against those of the process; None where one of the two has none to read."""
    if argv is None:
        return None
    expanded = [_expand(word, process.environ) for word in argv]
    _, wanted = flags_of(expanded)
    _, found = flags_of(process.argv)
    if not found:
        return None
    should, is_now = ({name: " ".join(words) for name, words in flags.items()} for flags in (wanted, found))
    return compare_values(is_now, should, masked_argument)


def _expand(word: str, environ: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: environ.get(match[1], ""), word)


def _environment_drift(
    should: Should, process: Process, variables: Mapping[str, str] | None
) -> Iterator[Finding]:
    again = _deploy(should)
    environ = process.environ
    wanted = dict(variables or {})
    if variables is not None:
        there = {name: environ[name] for name in wanted if name in environ}
        differing = compare_values(there, wanted, masked_value)
        if differing:
            yield _finding(
                "process.environment",
                Severity.ERROR,
                "the process has the variables of its unit file",
                f"{len(differing)} differ in PID {process.pid}",
                again,
                [str(item) for item in differing],
            )
    own = {*_SYSTEMS_OWN, *wanted, *should.secrets}
    extra = sorted(
        name
        for name in environ
        if name not in own and not _LOCALE.fullmatch(name) and not name.startswith("BASH_FUNC_")
    )
    if extra and variables is not None:
        yield _finding(
            "process.extra-environment",
            Severity.WARN,
            "no variables from elsewhere",
            f"{len(extra)} that the unit file does not name (systemctl set-environment, a drop-in?)",
            "on the host: systemctl show-environment; systemctl unset-environment NAME, then "
            f"{again.replace(' deploy ', ' restart ')}",
            [f"{name}={masked_value(name, environ[name])}" for name in extra],
        )
    debug = sorted(name for name in environ if _DEBUG_VARIABLE.fullmatch(name))
    if debug:
        yield _finding(
            "process.debug-variables",
            Severity.WARN,
            "no variables for debugging in service",
            f"{len(debug)} in PID {process.pid}",
            "take them out of the inventory or the host, then deploy again",
            [f"{name}={masked_value(name, environ[name])}" for name in debug],
        )


def _older(should: Should, live: Live, process: Process) -> Iterator[Finding]:
    """Was the process started from what ``current`` points at?"""
    known = next(
        (
            item
            for item in reversed(live.history.activations)
            if item.invocation and item.invocation == live.state.invocation_id
        ),
        None,
    )
    same = known is not None and known.release == live.release
    if live.switched is not None and live.switched > process.started + CLOCK_S and not same:
        before = f"from release {known.release[:12]}" if known else "before that"
        yield _finding(
            "process.older",
            Severity.ERROR,
            f"a process that was started from {(live.release or '')[:12]}",
            f"current was switched at {_time(live.switched)}, PID {process.pid} was started {before} "
            f"at {_time(process.started)}",
            _deploy(should),
        )
    others = [name for name in process.others if name != live.release]
    if others:
        yield _finding(
            "process.other-release",
            Severity.ERROR,
            f"only files of release {(live.release or '')[:12]} in use",
            f"processes of {should.unit} have files of another release open",
            _deploy(should),
            [name[:12] for name in others],
        )


def _time(epoch: float) -> str:
    return f"{datetime.fromtimestamp(epoch, UTC):%Y-%m-%d %H:%M:%SZ}"


def _record(should: Should, live: Live) -> Iterator[Finding]:
    latest = live.history.latest
    if live.history.damaged:
        yield _finding(
            "history.damaged",
            Severity.INFO,
            "a history that can be read",
            f"{live.history.damaged} lines of it cannot",
            "",
        )
    if not live.state.running:
        return
    judged = live.history.judged(live.state.invocation_id)
    if judged is not None and judged.good:
        return
    if judged is not None:
        found = f"its validation ended with {judged.verdict}{f': {judged.summary[:160]}' if judged.summary else ''}"
    elif latest is not None and latest.good:
        found = "it was started again after the validation that passed, and nobody has validated this run"
    else:
        found = "nobody has validated it"
    yield _finding("run.unvalidated", Severity.WARN, "a run that was seen to work", found, _deploy(should))
