"""One look at what a host runs: a batch of requests, however many files there are, and what its answers say.

The host hashes the live release itself, and a small program that its own Python runs reads the running process, the
venv and what lies about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.deploy.history import History, parse_history
from ddtree_ops.errors import RemoteError
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.files import FileEntry
from ddtree_ops.remote.session import AgentError, Reply, Request, answers
from ddtree_ops.secret import redact
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.state import UnitState

__all__ = ["CLOCK_S", "NAMED", "PROBE", "Live", "Process", "Tree", "Venv", "look_requests", "parse_live"]

NAMED = 10
"""Files that a finding names; it counts them all."""

CLOCK_S = 0.05
"""Seconds within which two times of a host are taken for the same."""

_NOT_OURS = frozenset(("ELOOP", "ENOTDIR", "not_a_file", "not_a_folder"))
"""Codes of the agent where something else lies at the place of a file or folder of ours: ours is not there."""

_HISTORY = 2
"""Number of the request for the history: without it nothing is judged, so that it has to be put right first."""

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
        if not os.path.isfile(path):
            found["strays"].append(name)
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
        if not os.path.isfile(os.path.join(site, name)):
            found["missing"].append(name)
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
    "link": link,
    "process": running,
    "tree": search(release, started) if link and os.path.isdir(release) else None,
    "venv": venv(started),
    "resolves": resolves(running.get("environ") if running else None) if link else None,
}))
"""


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


def look_requests(target: Target, layout: Layout) -> list[Request]:
    """Requests that read all that :func:`parse_live` needs; one batch."""
    want = {
        "unit": target.service.unit,
        "venv": target.service.venv,
        "current": layout.current,
        "folder": layout.service_dir,
        "root": layout.root,
        "pycache": layout.pycache,
        "user": target.service.user if target.service.user not in (None, "root") else "",
        "most": NAMED,
        "clock": CLOCK_S,
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


def _not_ours(reply: Reply | Exception) -> bool:
    return isinstance(reply, AgentError) and reply.code in _NOT_OURS


def parse_live(replies: Sequence[Reply | Exception], *, host: str = "") -> Live:
    """What the host answered to the requests of a look, as values.

    :raises RemoteError: a request failed, or the program on the host gave no answer.
    """
    own, unit, history, show, hashed, manifest, probed = answers(
        reply if number == _HISTORY or not _not_ours(reply) else Reply({"found": False, "entries": []}, b"")
        for number, reply in enumerate(replies)
    )
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
