"""Lab hosts: containers with their own systemd, journald, sshd, host keys and loopback address.

A host is an overlay over the image (a plain copy where overlays cannot be mounted) booted by systemd-nspawn. It
shares this machine's network: its sshd and its engine bind the host's own address in 127.0.0.0/8. Everything of
a lab lies in one folder, so that several labs (a user's, a test run's) live side by side::

    lab_dir()/id_ed25519[.pub]        the client's key, accepted for root, ops and nosudo
    lab_dir()/known_hosts, ssh_config for ssh -F and for the inventory
    lab_dir()/keys/HOST/              the host's ssh keys: they outlive a reset
    lab_dir()/hosts/HOST/             upper, work, merged (the root), console.log, state.json
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from ddtree_ops.errors import LabError, OpsError, UsageError
from ddtree_ops.lab import image as images
from ddtree_ops.lab.container import STOP_TIMEOUT_S, Container, Record, call, hierarchies, start_ticks, tail
from ddtree_ops.lab.furnish import furnish, write
from ddtree_ops.paths import lab_dir
from ddtree_ops.results import Event, EventKind, Reporter

__all__ = [
    "HOSTS",
    "SSH_PORT",
    "HostState",
    "LabHost",
    "LabHostStatus",
    "down",
    "environment",
    "missing",
    "reset",
    "ssh_argv",
    "status",
    "up",
]

_T = TypeVar("_T")

SSH_PORT = 22022
"""Port of every lab host's sshd, on the host's own address."""

BOOT_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class _Spec:
    """What tells one host from another."""

    number: int
    user: str
    locale: str = ""
    shell_noise: str = ""


_SPECS = {
    "ct200": _Spec(11, "root", shell_noise="echo 'ct200: 8x RTX PRO 6000 (lab stand-in, no GPU here)'\n"),
    "b300": _Spec(12, "ops", locale="fr_FR.ISO-8859-15"),
}
HOSTS = tuple(_SPECS)
"""Names of the lab hosts."""


@dataclass(frozen=True)
class LabHost:
    """A lab host that is up.

    :param user: who the inventory logs in as (``root``, or ``ops`` with ``sudo -n``).
    :param root: the host's root folder as seen from this machine.
    :param pid: process id of its systemd-nspawn on this machine.
    :param storage: ``overlay``, or ``copy`` where overlays cannot be mounted.
    """

    name: str
    address: str
    port: int
    user: str
    identity_file: Path
    known_hosts: Path
    root: Path
    pid: int
    storage: str


HostState = Literal["running", "degraded", "starting", "unreachable", "down"]


@dataclass(frozen=True)
class LabHostStatus:
    """State of a lab host.

    :param state: ``running`` and ``degraded`` as systemd says; ``starting``: not yet finished; ``unreachable``: its
        process lives but ssh does not answer; ``down``: there is no such process.
    :param since: Unix time of its start, None when down.
    :param detail: failed units, or why it is not reached.
    """

    name: str
    address: str
    port: int
    user: str
    state: HostState
    pid: int | None = None
    since: float | None = None
    storage: str = ""
    detail: str = ""


def environment() -> dict[str, str]:
    """Variables that name this lab, for other processes and for ``${...}`` in inventories."""
    return {"DDTREE_OPS_LAB_DIR": str(_lab()), "DDTREE_OPS_LAB_NET": _net()}


def missing() -> list[str]:
    """What this machine lacks to run lab hosts, each with what to type; empty when nothing is missing."""
    problems = []
    if os.geteuid() != 0:
        problems.append("root: lab hosts are containers; run the command with sudo")
    elif not _may_mount():
        problems.append("the right to mount: this is a restricted container; start it with --privileged")
    for program, package in (
        ("mmdebstrap", "mmdebstrap"),
        ("systemd-nspawn", "systemd-container"),
        ("ssh", "openssh-client"),
        ("ssh-keygen", "openssh-client"),
        ("unshare", "util-linux"),
        ("mount", "mount"),
    ):
        if shutil.which(program, path=_PATH) is None:
            problems.append(f"{program}: apt-get install -y {package}")
    if not hierarchies():
        problems.append("cgroups: mount them, e.g. mount -t cgroup2 none /sys/fs/cgroup")
    return problems


_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_CAP_SYS_ADMIN = 21


def _may_mount() -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(match and int(match.group(1), 16) >> _CAP_SYS_ADMIN & 1)


def up(names: Sequence[str] | None = None, *, progress: Reporter | None = None) -> list[LabHost]:
    """Start the hosts that do not run, bring their stand-in files up to date, wait until each answers.

    Running hosts keep running. The hosts outlive this process and its terminal.

    :raises LabError: something is missing, the image could not be built, a host did not come up (with the end of
        its console); the other hosts stay up.
    """
    chosen = _chosen(names)
    problems = missing()
    if problems:
        raise LabError(
            "this machine cannot run lab hosts", details=tuple(problems), phase="lab", hint=_install(problems)
        )
    tell = _teller(progress)
    with _exclusive(tell):
        _make_keys()
        image = images.ensure_image(lambda line: tell("lab", line))
        return _each(chosen, lambda name: _up(name, image, tell))


def down(names: Sequence[str] | None = None, *, keep: bool = False, progress: Reporter | None = None) -> None:
    """Power the hosts off, unmount them and remove what they wrote.

    :param keep: keep the hosts' files, so that the next ``up`` finds them as they were.
    :raises LabError: a host did not stop, or is still mounted.
    """
    chosen = _chosen(names)
    tell = _teller(progress)
    if not _lab().is_dir():
        return
    with _exclusive(tell):
        _each(chosen, lambda name: _down(name, keep=keep, tell=tell))


def reset(name: str, *, progress: Reporter | None = None) -> LabHost:
    """A clean copy of a host at once: everything it wrote is gone, its ssh host keys stay."""
    (chosen,) = _chosen([name])
    with _exclusive(_teller(progress)):
        _down(chosen, keep=False, tell=_teller(None), patience=0.0)
    (host,) = up([chosen], progress=progress)
    return host


def status() -> list[LabHostStatus]:
    """State of every lab host, asked now."""
    with ThreadPoolExecutor(len(HOSTS)) as pool:
        return list(pool.map(_status, HOSTS))


def ssh_argv(name: str, command: Sequence[str] = ()) -> list[str]:
    """Command line of an ssh to a lab host.

    :raises LabError: the lab was never up, so there is no ssh_config.
    """
    (chosen,) = _chosen([name])
    config = _lab() / "ssh_config"
    if not config.is_file():
        raise LabError("there is no lab", host=chosen, hint="ddtree-ops lab up")
    return ["ssh", "-F", str(config), chosen, *(["--", *command] if command else [])]


# ---------------------------------------------------------------------------------------------------------------


Teller = Callable[[str, str], None]


def _teller(progress: Reporter | None) -> Teller:
    def tell(host: str, message: str) -> None:
        if progress is not None:
            progress(Event(EventKind.PROGRESS, "" if host == "lab" else host, "lab", message))

    return tell


def _install(problems: Sequence[str]) -> str:
    packages = dict.fromkeys(line.rsplit(" ", 1)[1] for line in problems if ": apt-get install -y " in line)
    return f"apt-get install -y {' '.join(packages)}" if packages else problems[0]


def _chosen(names: Sequence[str] | None) -> list[str]:
    chosen = list(dict.fromkeys(names)) if names else list(HOSTS)
    for name in chosen:
        if name not in _SPECS:
            raise UsageError(f"there is no lab host {name!r}", hint=f"lab hosts: {', '.join(HOSTS)}")
    return chosen


def _net() -> str:
    net = os.environ.get("DDTREE_OPS_LAB_NET") or "127.0.0"
    match = re.fullmatch(r"127\.(\d{1,3})\.(\d{1,3})", net)
    if not match or any(int(part) > 255 for part in match.groups()):
        raise LabError(
            f"DDTREE_OPS_LAB_NET is {net!r}, which is not three numbers such as 127.0.1", phase="lab"
        )
    return net


def _address(name: str) -> str:
    return f"{_net()}.{_SPECS[name].number}"


def _lab() -> Path:
    return lab_dir().expanduser().absolute()


def _container(name: str) -> Container:
    mark = hashlib.sha256(os.path.realpath(_lab()).encode()).hexdigest()[:8]
    return Container(name, f"ddtree-lab-{mark}-{name}", _lab() / "hosts" / name)


@contextmanager
def _exclusive(tell: Teller) -> Iterator[None]:
    _lab().mkdir(parents=True, exist_ok=True)
    _lab().chmod(0o700)
    with images.locked(
        _lab() / ".lock", lambda: tell("lab", "another process is changing the lab; waiting for it")
    ):
        yield


def _each(names: Sequence[str], work: Callable[[str], _T]) -> list[_T]:
    """Run on all hosts at once; every host runs to its end, then the first error is raised with all of them."""
    with ThreadPoolExecutor(len(names)) as pool:
        futures = [pool.submit(work, name) for name in names]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if not errors:
        return [future.result() for future in futures]
    first = errors[0]
    if isinstance(first, OpsError):
        first.details += tuple(line for other in errors[1:] for line in str(other).splitlines())
    raise first


def _make_keys() -> None:
    """The client's key, the hosts' keys, known_hosts and ssh_config; existing keys are kept."""
    root = _lab()
    identity = root / "id_ed25519"
    _make_key(identity, "ed25519", "ddtree-ops lab")
    known, config = [], []
    for name, spec in _SPECS.items():
        keys = root / "keys" / name
        keys.mkdir(parents=True, exist_ok=True, mode=0o700)
        for kind in ("ed25519", "ecdsa"):
            key = keys / f"ssh_host_{kind}_key"
            _make_key(key, kind, name)
            known.append(
                f"[{_address(name)}]:{SSH_PORT} {' '.join(key.with_suffix('.pub').read_text().split()[:2])}\n"
            )
        config.append(
            f"Host {name}\n"
            f"    HostName {_address(name)}\n"
            f"    Port {SSH_PORT}\n"
            f"    User {spec.user}\n"
            f'    IdentityFile "{identity}"\n'
            "    IdentitiesOnly yes\n"
            "    IdentityAgent none\n"
            f'    UserKnownHostsFile "{root / "known_hosts"}"\n'
            "    GlobalKnownHostsFile /dev/null\n"
            "    StrictHostKeyChecking yes\n"
            "    UpdateHostKeys no\n"
        )
    write(root, "known_hosts", "".join(known).encode(), 0o600)
    write(root, "ssh_config", "\n".join(config).encode(), 0o600)


def _make_key(path: Path, kind: str, comment: str) -> None:
    if not path.is_file():
        argv = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", comment, "-f", str(path)]
        call(argv, "the lab's ssh keys could not be made")


# --- one host ----------------------------------------------------------------------------------------------------


def _up(name: str, image: Path, tell: Teller) -> LabHost:
    began = time.monotonic()
    container = _container(name)
    record = container.live()
    if record is not None and record.address != _address(name):
        raise LabError(
            f"it runs with the address {record.address}, not {_address(name)}",
            host=name,
            phase="lab",
            hint="ddtree-ops lab down, then up again, or set DDTREE_OPS_LAB_NET back",
        )
    if record is None:
        container.sweep()
        container.unmount()
        _refuse_taken_address(name)
        storage = container.mount(image)
        _furnish(name)
        record = container.boot(storage, image, _address(name))
        try:
            system = _wait_ready(name, record)
        except LabError:
            container.stop(record, patience=0.0)
            container.sweep()
            container.unmount()
            raise
        tell(name, f"{system} on {record.address} after {time.monotonic() - began:.1f} s")
    else:
        _furnish(name)
        tell(name, f"{_wait_ready(name, record)} on {record.address} since before")
    return LabHost(
        name=name,
        address=record.address,
        port=SSH_PORT,
        user=_SPECS[name].user,
        identity_file=_lab() / "id_ed25519",
        known_hosts=_lab() / "known_hosts",
        root=container.root,
        pid=record.pid,
        storage=record.storage,
    )


def _down(name: str, *, keep: bool, tell: Teller, patience: float = STOP_TIMEOUT_S) -> None:
    container = _container(name)
    record = container.live()
    if record is not None:
        container.stop(record, patience)
        tell(name, "powered off")
    container.sweep()
    container.unmount()
    if not keep:
        images.remove_tree(container.folder)


def _status(name: str) -> LabHostStatus:
    record = _container(name).live()
    state: HostState = "down"
    detail = ""
    if record is not None:
        answer = _ask_systemd(name, timeout=5.0)
        if answer in ("running", "degraded"):
            state = "degraded" if answer == "degraded" else "running"
        else:
            state = "starting" if answer in ("initializing", "starting") else "unreachable"
            detail = answer
        if state == "degraded":
            detail = "failed: " + ", ".join(_failed_units(name))
    return LabHostStatus(
        name=name,
        address=record.address if record else _address(name),
        port=SSH_PORT,
        user=_SPECS[name].user,
        state=state,
        pid=record.pid if record else None,
        since=record.since if record else None,
        storage=record.storage if record else "",
        detail=detail,
    )


def _refuse_taken_address(name: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_address(name), SSH_PORT))
        except OSError as error:
            raise LabError(
                f"{_address(name)} port {SSH_PORT} is taken: {error.strerror}",
                host=name,
                phase="lab",
                state="the host was not started",
                hint="another lab runs on this machine: stop it, or set DDTREE_OPS_LAB_NET=127.0.2 for this one",
            ) from error


def _furnish(name: str) -> None:
    """Everything that makes the image this host. Safe while it runs."""
    spec = _SPECS[name]
    root = _container(name).root
    keys = _lab() / "keys" / name
    public = (_lab() / "id_ed25519.pub").read_bytes()
    hosts = "".join(f"{_address(other)} {other}\n" for other in HOSTS)
    write(root, "etc/hostname", f"{name}\n".encode())
    write(root, "etc/hosts", f"127.0.0.1 localhost\n{hosts}".encode())
    write(
        root,
        "etc/ssh/sshd_config.d/20-address.conf",
        f"ListenAddress {_address(name)}\nPort {SSH_PORT}\n".encode(),
    )
    for key in keys.iterdir():
        write(root, f"etc/ssh/{key.name}", key.read_bytes(), 0o644 if key.suffix == ".pub" else 0o600)
    for home in ("root", "home/ops", "home/nosudo"):
        folder = root / home
        (folder / ".ssh").mkdir(exist_ok=True, mode=0o700)
        write(root, f"{home}/.ssh/authorized_keys", public, 0o600)
        owner = folder.stat()
        for path in (folder / ".ssh", folder / ".ssh/authorized_keys"):
            os.chown(path, owner.st_uid, owner.st_gid)
    if spec.locale:
        for file in ("etc/default/locale", "etc/locale.conf"):
            write(root, file, f"LANG={spec.locale}\n".encode())
    if spec.shell_noise:
        write(root, "root/.bashrc", spec.shell_noise.encode())
    furnish(root)


# --- the process -------------------------------------------------------------------------------------------------


# --- readiness ---------------------------------------------------------------------------------------------------


def _wait_ready(name: str, record: Record) -> str:
    """Wait until ssh and systemd answer. Returns ``running`` or ``degraded``."""
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    answer = "sshd does not listen"
    while time.monotonic() < deadline:
        if start_ticks(record.pid) != record.start_ticks:
            raise LabError(
                "it died while booting",
                host=name,
                phase="lab",
                state="the host is down",
                details=tail(_container(name).console),
            )
        if _listens(name):
            answer = _ask_systemd(name, timeout=max(1.0, deadline - time.monotonic()), wait=True)
            if answer in ("running", "degraded"):
                return answer
        time.sleep(0.05)
    raise LabError(
        f"it was not ready within {BOOT_TIMEOUT_S:.0f} s: {answer}",
        host=name,
        phase="lab",
        state="the host was stopped",
        details=tail(_container(name).console),
    )


def _listens(name: str) -> bool:
    try:
        with socket.create_connection((_address(name), SSH_PORT), timeout=1.0):
            return True
    except OSError:
        return False


def _ask_systemd(name: str, *, timeout: float, wait: bool = False) -> str:
    """The last line of ``systemctl is-system-running``, or why there is none."""
    try:
        done = _ssh_root(name, ["systemctl", "is-system-running", *(["--wait"] if wait else [])], timeout)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:.0f} s"
    lines = done.stdout.split() or done.stderr.strip().splitlines() or ["no answer"]
    return lines[-1]


def _failed_units(name: str) -> list[str]:
    done = _ssh_root(name, ["systemctl", "list-units", "--failed", "--plain", "--no-legend"], 10.0)
    return [line.split()[0] for line in done.stdout.splitlines() if re.match(r"\S+\.\w+ ", line)]


def _ssh_root(name: str, command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    argv = [
        "ssh",
        "-F",
        str(_lab() / "ssh_config"),
        "-o",
        "BatchMode=yes",
        "-l",
        "root",
        name,
        "--",
        *command,
    ]
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout
    )
