"""What runs against what should run: one look at a host, judged into findings.

The look is one batch of requests however many files there are: the host hashes the live release itself, and a small
program that its own Python runs reads the running process, the venv and what lies about. The judgement is pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from ddtree_ops.deploy.history import History, parse_history
from ddtree_ops.deploy.plan import (
    ValueChange,
    compare_values,
    manifest_files,
    masked_argument,
    masked_value,
    text_sha256,
    unit_diff,
)
from ddtree_ops.errors import ExitCode, RemoteError
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.files import FileEntry
from ddtree_ops.remote.session import Reply, Request, Session
from ddtree_ops.results import Verdict
from ddtree_ops.runtime import Bundle, build, known_bundle
from ddtree_ops.secret import redact
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.state import UnitState
from ddtree_ops.service.unit import render_unit
from ddtree_ops.service.unitfile import environment_of, exec_start_of, flags_of

__all__ = [
    "PROBE",
    "DriftReport",
    "Finding",
    "Live",
    "Process",
    "Severity",
    "Should",
    "Venv",
    "find_drift",
    "judge",
    "parse_live",
    "worst_exit",
]

NAMED = 10
"""Files that a finding names; it counts them all."""

_DEADLINE = 180.0
_CLOCK_S = 0.05
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

# Runs on the host with its own python3 (>= 3.8) as root, facts as one JSON object on stdout. Data comes as arguments.
PROBE = r"""
import base64, csv, glob, hashlib, io, json, os, re, subprocess, sys, time
want = json.loads(sys.argv[1])
current, most = want["current"], want["most"]
release = os.path.realpath(current)
def text(path):
    with open(path, errors="replace") as file:
        return file.read()
def show(name):
    done = subprocess.run(["systemctl", "show", "-p", name, "--value", "--", want["unit"]], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, timeout=20)
    return done.stdout.decode("utf-8", "replace").strip()
def files(root):
    for folder, folders, names in os.walk(root):
        if os.path.basename(folder) == "__pycache__":
            folders[:] = []
            names = [name for name in names if name.endswith(".pyc")]
        for name in names:
            path = os.path.join(folder, name)
            yield os.path.relpath(path, root), path
DEBRIS = re.compile(r"(\.(orig|rej|bak|backup|save|old|sw[op])([.~_-]?[0-9]+)*|~|\.pyc)$")
MARK = re.compile(rb"[A-Z][A-Z0-9]*_DIAG(?![A-Za-z0-9])|^(?!\s*#).*?(\bbreakpoint\(\)|\bset_trace\(\))", re.M)
def diagnostics(name, data):
    if not (b"_DIAG" in data or b"breakpoint()" in data or b"set_trace()" in data) or not MARK.search(data):
        return []
    lines = enumerate(data.split(b"\n"), 1)
    return [[name, n, line.decode("utf-8", "replace").strip()[:160]] for n, line in lines if MARK.search(line)]
def search(root, started):
    found = {"strays": [], "diagnostics": [], "newer": [], "links": []}
    for name, path in files(root):
        if os.path.islink(path):
            found["links"].append(name)
            continue
        if DEBRIS.search(name):
            found["strays"].append(name)
        try:
            if started and os.stat(path).st_mtime > started + want["clock"]:
                found["newer"].append(name)
            if name.endswith(".py"):
                with open(path, "rb") as file:
                    found["diagnostics"] += diagnostics(name, file.read())
        except OSError as error:
            found.setdefault("errors", []).append("%s: %s" % (name, error.strerror))
    return {key: sorted(value)[:most * 20] for key, value in found.items()}
def process():
    pid = show("MainPID")
    if not pid.isdigit() or pid == "0":
        return None
    base = "/proc/%s/" % pid
    try:
        with open(base + "stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        with open(base + "environ", "rb") as file:
            pairs = [item.partition(b"=") for item in file.read().split(b"\0") if b"=" in item]
        with open(base + "cmdline", "rb") as file:
            argv = [word.decode("utf-8", "replace") for word in file.read().split(b"\0")[:-1]]
        cwd = os.readlink(base + "cwd")
    except OSError as error:
        return {"pid": int(pid), "error": "%s: %s" % (error.filename, error.strerror)}
    uptime = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", 7))
    started = time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
    return {"pid": int(pid), "started": started, "argv": argv, "cwd": cwd, "others": elsewhere(),
            "environ": {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, _, v in pairs}}
def elsewhere():
    group, found = show("ControlGroup"), set()
    pattern = re.compile(re.escape(os.path.join(want["root"], "releases")) + r"/([0-9a-f]{64})(?:/|\s|$)")
    for base in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"):
        try:
            pids = text(base + group + "/cgroup.procs").split() if group.startswith("/") else []
        except OSError:
            continue
        for pid in pids[:64]:
            try:
                seen = text("/proc/%s/maps" % pid) + " " + os.readlink("/proc/%s/cwd" % pid)
            except OSError:
                continue
            found.update(pattern.findall(seen))
        break
    return sorted(found)
def recorded(site, record):
    kept = {}
    for row in csv.reader(io.StringIO(text(record))):
        if len(row) == 3 and row[0].startswith("sglang/") and "__pycache__" not in row[0]:
            kept[row[0]] = row[1]
    found = {"package": True, "record": True, "changed": [], "missing": [], "extra": [], "files": len(kept)}
    there = {"sglang/" + name for name, _ in files(os.path.join(site, "sglang")) if "__pycache__" not in name}
    for name, wanted in sorted(kept.items()):
        if not wanted.startswith("sha256="):
            continue
        try:
            with open(os.path.join(site, name), "rb") as file:
                digest = base64.urlsafe_b64encode(hashlib.sha256(file.read()).digest()).rstrip(b"=").decode()
        except FileNotFoundError:
            found["missing"].append(name)
            continue
        if digest != wanted[7:]:
            found["changed"].append(name)
    found["extra"] = sorted(there - set(kept))
    return found
def venv(started):
    for site in sorted(glob.glob(os.path.join(glob.escape(want["venv"]), "lib", "python3*", "site-packages"))):
        if not os.path.isdir(os.path.join(site, "sglang")):
            continue
        records = sorted(glob.glob(os.path.join(glob.escape(site), "sglang-*.dist-info", "RECORD")))
        found = recorded(site, records[0]) if records else {"package": True, "record": False}
        found["site"] = site
        found["version"] = os.path.basename(os.path.dirname(records[0]))[7:-10] if records else ""
        found.update(search(os.path.join(site, "sglang"), None))
        return found
    return {"package": False}
def resolves(variables):
    code = "import importlib.util as u; s = u.find_spec('sglang'); print(s.origin or list(s.submodule_search_locations))"
    environ = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PYTHONPYCACHEPREFIX": want["pycache"]}
    environ["PYTHONPATH"] = variables.get("PYTHONPATH", "") if variables is not None else current
    def lower():
        if want["user"]:
            import pwd
            entry = pwd.getpwnam(want["user"])
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
    try:
        done = subprocess.run([os.path.join(want["venv"], "bin", "python"), "-B", "-c", code], cwd=want["folder"],
                              env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=60, preexec_fn=lower if want["user"] else None)
    except (OSError, subprocess.SubprocessError) as error:
        return {"origin": "", "error": str(error)}
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    origin = done.stdout.decode("utf-8", "replace").strip()
    return {"origin": os.path.realpath(origin) if done.returncode == 0 else "", "error": said[-1] if said else ""}
try:
    link = {"mtime": os.lstat(current).st_mtime, "release": release}
except OSError:
    link = None
running = process()
started = running.get("started") if running else None
print(json.dumps({
    "now": time.time(),
    "link": link,
    "process": running,
    "tree": search(release, started) if link and os.path.isdir(release) else None,
    "venv": venv(started),
    "resolves": resolves(running.get("environ") if running else None) if link else None,
}))
"""


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
class Process:
    """The main process of the unit. ``started`` is epoch seconds by the host's clock.

    :param others: releases that a process of the unit has mapped, or stands in.
    :param error: why it could not be read.
    """

    pid: int
    started: float = 0.0
    argv: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str = ""
    others: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Tree:
    """What lies in a folder besides or against its list: names are relative to it.

    :param diagnostics: file, line, text.
    :param newer: files that changed after the process was started.
    """

    strays: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()
    diagnostics: tuple[tuple[str, int, str], ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Venv:
    """The ``sglang`` that is installed in the venv. ``package`` False: none is.

    :param record: its ``RECORD`` is there; ``files``: number of files that it lists.
    """

    package: bool = False
    record: bool = False
    files: int = 0
    site: str = ""
    version: str = ""
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    tree: Tree = field(default_factory=Tree)


@dataclass(frozen=True)
class Live:
    """What is on the host and what runs there.

    :param release: digest that ``current`` points at; None: there is no such link.
    :param switched: when the link was made, epoch seconds by the host's clock.
    :param files: of the tree behind it, hashed on the host; None: it is gone.
    :param manifest: of that release; None: it is gone.
    :param resolves: file from which the venv's Python takes ``sglang``; ``resolve_error``: why that is not known.
    """

    release: str | None
    unit_text: str | None
    state: UnitState
    history: History = field(default_factory=History)
    switched: float | None = None
    release_dir: str = ""
    files: tuple[FileEntry, ...] | None = None
    manifest: bytes | None = None
    process: Process | None = None
    tree: Tree | None = None
    venv: Venv = field(default_factory=Venv)
    resolves: str = ""
    resolve_error: str = ""

    @property
    def deployed(self) -> bool:
        """Something was deployed here once."""
        return bool(self.release or self.unit_text is not None or self.history.activations)


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


def find_drift(target: Target, session: Session) -> DriftReport:
    """Look at a host in one round trip and judge. Nothing is changed and no lock is taken.

    :raises OpsError: the host could not be looked at, or the runtime that should run could not be built.
    """
    layout = Layout.of(target)
    replied = session.begin_batch(_requests(target, layout), deadline=_DEADLINE)
    bundle = known_bundle(target.runtime) or build(target.runtime)
    should = _should(target, layout, bundle)
    return judge(should, parse_live(replied(), host=target.name))


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


def _requests(target: Target, layout: Layout) -> list[Request]:
    want = {
        "unit": target.service.unit,
        "venv": target.service.venv,
        "current": layout.current,
        "folder": layout.service_dir,
        "root": layout.root,
        "pycache": layout.pycache,
        "user": target.service.user if target.service.user not in (None, "root") else "",
        "most": NAMED,
        "clock": _CLOCK_S,
    }
    return [
        Request("list_dir", {"path": layout.service_dir}),
        Request("read_file", {"path": layout.unit_path, "max_bytes": 1 << 20}),
        Request("read_file", {"path": layout.history, "max_bytes": 64 << 20}),
        Request("show_unit", {"unit": target.service.unit}),
        Request("hash_tree", {"root": layout.current}),
        Request("read_file", {"path": f"{layout.current}/manifest.json", "max_bytes": 64 << 20}),
        Request("run", {"argv": [target.host.ssh.python, "-I", "-S", "-c", PROBE, json.dumps(want)]}),
    ]


def parse_live(replies: Sequence[Reply | Exception], *, host: str = "") -> Live:
    """What the host answered to the requests of a look, as values.

    :raises RemoteError: a request failed, or the program on the host gave no answer.
    """
    answers: list[Reply] = []
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
        answers.append(reply)
    own, unit, history, show, hashed, manifest, probed = answers
    size = int(probed.values["stdout"])
    try:
        facts = json.loads(probed.data[:size])
    except ValueError:
        said = probed.data[size:].decode("utf-8", "replace")
        raise RemoteError(
            "the look at the running process gave no answer",
            host=host,
            phase="drift",
            hint="does ssh.python of the inventory name a working Python >= 3.8?",
            details=tuple(redact(said).splitlines()[-5:]),
        ) from None
    links = {entry["name"]: entry["target"] for entry in own.values["entries"] if entry["kind"] == "link"}
    current = links.get("current")
    link, resolves = facts["link"] or {}, facts["resolves"] or {}
    return Live(
        release=current.rsplit("/", 1)[-1] if current else None,
        unit_text=unit.data.decode("utf-8", "replace") if unit.values["found"] else None,
        state=UnitState.parse(show.values),
        history=parse_history(history.data if history.values["found"] else None),
        switched=link.get("mtime"),
        release_dir=link.get("release", ""),
        files=tuple(FileEntry(*row) for row in json.loads(hashed.data)) if hashed.values["found"] else None,
        manifest=manifest.data if manifest.values["found"] else None,
        process=_process(facts["process"]),
        tree=_tree(facts["tree"]) if facts["tree"] is not None else None,
        venv=_venv(facts["venv"]),
        resolves=resolves.get("origin", ""),
        resolve_error=resolves.get("error", ""),
    )


def _process(found: Mapping[str, Any] | None) -> Process | None:
    if found is None:
        return None
    if "error" in found:
        return Process(found["pid"], error=found["error"])
    return Process(
        pid=found["pid"],
        started=found["started"],
        argv=tuple(found["argv"]),
        environ=dict(found["environ"]),
        cwd=found["cwd"],
        others=tuple(found["others"]),
    )


def _tree(found: Mapping[str, Any]) -> Tree:
    return Tree(
        strays=tuple(found.get("strays", ())),
        links=tuple(found.get("links", ())),
        newer=tuple(found.get("newer", ())),
        diagnostics=tuple((path, line, text) for path, line, text in found.get("diagnostics", ())),
        errors=tuple(found.get("errors", ())),
    )


def _venv(found: Mapping[str, Any]) -> Venv:
    return Venv(
        package=found["package"],
        record=found.get("record", False),
        files=found.get("files", 0),
        site=found.get("site", ""),
        version=found.get("version", ""),
        changed=tuple(found.get("changed", ())),
        missing=tuple(found.get("missing", ())),
        extra=tuple(found.get("extra", ())),
        tree=_tree(found),
    )


# ---------------------------------------------------------------------------------------------- the judgement


def judge(should: Should, live: Live) -> DriftReport:
    """Findings, worst first, in a fixed order within a severity. Pure."""
    if not live.deployed:
        return DriftReport(should.host, should.unit, None, deployed=False)
    findings = [
        *_release(should, live),
        *_release_files(should, live),
        *_venv_findings(should, live),
        *_unit(should, live),
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
    there = {
        entry.path: f"{entry.sha256} x" if entry.mode & 0o100 else entry.sha256
        for entry in live.files
        if entry.path != "manifest.json"
    }
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
            f"{_count(len(debris), 'leftover')} (byte code, backups, rejects, links)",
            again,
            debris,
        )
    left = _telling(live.tree.diagnostics, {*changed, *extra})
    if left:
        yield _finding(
            "release.diagnostics",
            Severity.ERROR,
            "no diagnostics in the engine's source",
            f"{_count(len(left), 'line')} of diagnostics",
            again,
            left,
        )
    if live.process is not None and live.tree.newer:
        yield _finding(
            "process.files",
            Severity.ERROR,
            "a process that has in memory what is on disk",
            f"{_count(len(live.tree.newer), 'file')} changed after PID {live.process.pid} was started: it may run their old content",
            again,
            live.tree.newer,
        )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


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
            f"{_count(len(left), 'line')} of diagnostics, {_count(len(strays), 'backup or reject')} in {venv.site} "
            f"({matters})",
            hint,
            [*left, *strays],
        )


def _below(path: str, folder: str) -> bool:
    return bool(folder) and path.startswith(folder.rstrip("/") + "/")


def _unit(should: Should, live: Live) -> Iterator[Finding]:
    again, look = _deploy(should), _plan(should)
    if live.unit_text is None:
        yield _finding("unit.none", Severity.ERROR, f"{should.unit} is installed", "it is not there", again)
        return
    latest = live.history.latest
    if live.unit_text != should.unit_text:
        by_hand = latest is not None and latest.unit_sha256 != text_sha256(live.unit_text)
        diff = unit_diff(should.unit_text, live.unit_text, "(should be)", "(installed)", should.unit)
        lines = [line for line in diff[2:] if not line.startswith(("@@", " "))]
        yield _finding(
            "unit.edited" if by_hand else "unit.other",
            Severity.ERROR if by_hand else Severity.WARN,
            "the unit file that the inventory gives",
            "it was edited on the host"
            if by_hand
            else "it is as it was deployed, and the inventory says otherwise now",
            again if by_hand else look,
            lines,
        )
    if live.state.drop_in_paths:
        yield _finding(
            "unit.drop-ins",
            Severity.ERROR,
            "all settings of the unit from its one file",
            f"{_count(len(live.state.drop_in_paths), 'drop-in')} on top of it",
            f"put what they say into the inventory, remove them, then {again}",
            live.state.drop_in_paths,
        )
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
    before, after = ({name: " ".join(words) for name, words in flags.items()} for flags in (wanted, found))
    return compare_values(before, after, masked_argument)


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
        differing = compare_values(wanted, there, masked_value)
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
    if live.switched is not None and live.switched > process.started + _CLOCK_S and not same:
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
    judged = [
        item
        for item in live.history.activations
        if item.invocation and item.invocation == live.state.invocation_id and item.verdict is not None
    ]
    if judged and judged[-1].verdict is Verdict.PASS:
        return
    if judged:
        found = f"its validation ended with {judged[-1].verdict}: {judged[-1].summary[:160]}"
    elif latest is not None and latest.good:
        found = "it was started again after the validation that passed, and nobody has validated this run"
    else:
        found = "nobody has validated it"
    yield _finding("run.unvalidated", Severity.WARN, "a run that was seen to work", found, _deploy(should))
