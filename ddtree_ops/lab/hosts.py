"""Lab hosts: containers with their own systemd, journald, sshd, host keys and loopback address.

A host is an overlay over the image (a plain copy where overlays cannot be mounted) booted by systemd-nspawn. It
shares this machine's network: its sshd and its engine bind the host's own address in 127.0.0.0/8. Everything of
a lab lies in one folder, so that several labs (a user's, a test run's) live side by side::

    lab_dir()/id_ed25519[.pub]        the client's key, accepted for root, ops and nosudo
    lab_dir()/known_hosts, ssh_config for ssh -F and for the inventory
    lab_dir()/keys/HOST/              the host's ssh keys: they outlive a reset
    lab_dir()/hosts/HOST/             upper, work, merged (the root), console.log, state.json
    lab_dir()/fleet.yaml              inventory of a fleet (:func:`up_fleet`)
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
from ddtree_ops.lab.real import Real, furnish_real, prepare
from ddtree_ops.paths import lab_dir, shipped
from ddtree_ops.results import Event, EventKind, Reporter

__all__ = [
    "ENGINES",
    "FLEET_MOST",
    "HOSTS",
    "SSH_PORT",
    "HostState",
    "LabHost",
    "LabHostStatus",
    "down",
    "environment",
    "fleet_inventory",
    "fleet_names",
    "missing",
    "reset",
    "ssh_argv",
    "status",
    "up",
    "up_fleet",
]

_T = TypeVar("_T")

SSH_PORT = 22022
"""Port of every lab host's sshd, on the host's own address."""

BOOT_TIMEOUT_S = 300.0
"""How long a host may take until it answers, in seconds: thirty that boot at once share the processors and the disk."""

_ANSWER_S = 30.0


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
"""Names of the lab hosts that stand in for machines of their own."""

Engine = Literal["lab", "sglang"]
ENGINES: tuple[Engine, ...] = ("lab", "sglang")
"""What can run on a host: the stand-in alone, or the real sglang on the CPU beside it."""

FLEET_MOST = 99
"""Most hosts of a fleet: ``gpu01`` at .101 to ``gpu99`` at .199."""
_PATIENCE = "{load_timeout: 300s, stall_timeout: 120s}"
"""Health of a fleet's services: thirty engines that start at once share the processors of this machine."""
_FLEET_NAME = re.compile(r"gpu(0[1-9]|[1-9][0-9])")
_AT_ONCE = 8
_INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
_INOTIFY_EACH = 10
_INOTIFY_OTHERS = 128


def _spec_of(name: str) -> _Spec | None:
    """What a lab host of this name is like; None where there is none."""
    match = _FLEET_NAME.fullmatch(name)
    return _Spec(100 + int(match.group(1)), "root") if match else _SPECS.get(name)


@dataclass(frozen=True)
class LabHost:
    """A lab host that is up.

    :param user: who the inventory logs in as (``root``, or ``ops`` with ``sudo -n``).
    :param root: the host's root folder as seen from this machine.
    :param pid: process id of its systemd-nspawn on this machine.
    :param storage: ``overlay``, or ``copy`` where overlays cannot be mounted.
    :param engine: ``sglang`` where it has the real one beside the stand-in, else ``lab``.
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
    engine: str = "lab"


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
    engine: str = ""


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


def up(
    names: Sequence[str] | None = None, *, engine: Engine | None = None, progress: Reporter | None = None
) -> list[LabHost]:
    """Start the hosts that do not run, bring their stand-in files up to date, wait until each answers.

    Running hosts keep running. The hosts outlive this process and its terminal.

    :param engine: ``sglang``: the real one on the CPU too (:mod:`ddtree_ops.lab.real`); None: as a host runs, else ``lab``.
    :raises LabError: a host runs with another engine; something is missing, the image could not be built, a host did not come up (with the end of
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
        real = prepare(lambda line: tell("lab", line)) if engine == "sglang" else None
        _make_keys(_known(chosen))
        image = images.ensure_image(lambda line: tell("lab", line))
        return _each(chosen, lambda name: _up(name, image, tell, engine, real))


def up_fleet(number: int, *, progress: Reporter | None = None) -> tuple[list[LabHost], Path]:
    """``number`` hosts alike, ``gpu01`` on, as :func:`up` does it, and the inventory that names them.

    The kernel's limit of inotify instances is raised where it is too low for that many systemds, and said so.

    :param number: 1 to :data:`FLEET_MOST`.
    :returns: the hosts, and the path of the inventory (rewritten each time: it names just these hosts).
    :raises LabError: as :func:`up`.
    """
    names = fleet_names(number)
    problems = missing()
    if not problems:
        _allow_inotify(number, _teller(progress))
    hosts = up(names, progress=progress)
    path = fleet_inventory()
    write(path.parent, path.name, _inventory_text(names).encode(), 0o600)
    return hosts, path


def fleet_names(number: int) -> list[str]:
    """Names of the first ``number`` hosts of a fleet.

    :raises UsageError: fewer than one, or more than :data:`FLEET_MOST`.
    """
    if not 1 <= number <= FLEET_MOST:
        raise UsageError(f"a fleet has 1 to {FLEET_MOST} hosts, not {number}")
    return [f"gpu{index:02d}" for index in range(1, number + 1)]


def fleet_inventory() -> Path:
    """Where :func:`up_fleet` writes its inventory."""
    return _lab() / "fleet.yaml"


def down(names: Sequence[str] | None = None, *, keep: bool = False, progress: Reporter | None = None) -> None:
    """Power the hosts off, unmount them and remove what they wrote.

    :param keep: keep the hosts' files, so that the next ``up`` finds them as they were.
    :raises LabError: a host did not stop, or is still mounted.
    """
    chosen = _chosen(names or _known())
    tell = _teller(progress)

    # Nobody sees how a host ended of which nothing is kept, and thirty clean power-offs take half a minute.
    patience = STOP_TIMEOUT_S if keep else 0.0
    if not _lab().is_dir():
        return
    with _exclusive(tell):
        _each(chosen, lambda name: _down(name, keep=keep, tell=tell, patience=patience))


def reset(name: str, *, progress: Reporter | None = None) -> LabHost:
    """A clean copy of a host at once: everything it wrote is gone, its ssh host keys stay."""
    (chosen,) = _chosen([name])
    with _exclusive(_teller(progress)):
        record = _container(chosen).live()
        _down(chosen, keep=False, tell=_teller(None), patience=0.0)
    (host,) = up(
        [chosen], engine="sglang" if record and record.engine == "sglang" else None, progress=progress
    )
    return host


def status() -> list[LabHostStatus]:
    """State of every lab host, asked now; those of a fleet that was started too."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(_status, _known()))


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
        if _spec_of(name) is None:
            raise UsageError(
                f"there is no lab host {name!r}",
                hint=f"lab hosts: {', '.join(HOSTS)}, and gpu01 to gpu{FLEET_MOST} of a fleet",
            )
    return chosen


def _known(more: Sequence[str] = ()) -> list[str]:
    """The two hosts, and the fleet's that were ever started (their keys are kept) or are named."""
    kept = _lab() / "keys"
    found = {path.name for path in kept.iterdir()} if kept.is_dir() else set()
    return [*HOSTS, *sorted(name for name in {*found, *more} if _FLEET_NAME.fullmatch(name))]


def _spec(name: str) -> _Spec:
    spec = _spec_of(name)
    assert spec is not None, name
    return spec


def _allow_inotify(number: int, tell: Teller) -> None:
    """Each systemd holds six inotify instances, and all hosts' roots count as one user, whom the kernel gives 128."""
    try:
        limit = int(_INOTIFY.read_text())
        wanted = _INOTIFY_OTHERS + _INOTIFY_EACH * number
        if limit < wanted:
            _INOTIFY.write_text(str(wanted))
            tell("lab", f"fs.inotify.max_user_instances raised from {limit} to {wanted}, until the next boot")
    except OSError as error:
        raise LabError(
            f"fs.inotify.max_user_instances is too low for {number} hosts and cannot be raised: {error}",
            phase="lab",
            hint=f"sysctl -w fs.inotify.max_user_instances={_INOTIFY_OTHERS + _INOTIFY_EACH * number}",
        ) from error


def _inventory_text(names: Sequence[str]) -> str:
    """The shipped lab inventory with these hosts in the place of its own."""
    shared = (shipped("inventories") / "lab.yaml").read_text().partition("\nhosts:\n")[0]
    shared = "".join(line for line in shared.splitlines(keepends=True) if not line.startswith("#"))
    shared = re.sub(r"\$\{DDTREE_OPS_LAB_DIR:-[^}]*\}", lambda _: str(_lab()), shared)
    hosts = "".join(
        f"  {name}:\n"
        f"    address: {_address(name)}\n"
        f"    ssh: {{user: {_spec(name).user}}}\n"
        f"    services: {{k26-ddtree: {{bind: {_address(name)}, health: {_PATIENCE}}}}}\n"
        for name in names
    )
    racks = [names[: (len(names) + 1) // 2], names[(len(names) + 1) // 2 :]]
    groups = "".join(
        f"  rack-{letter}: [{', '.join(rack)}]\n" for letter, rack in zip("ab", racks, strict=True) if rack
    )
    return (
        f"# A fleet of {len(names)} lab hosts, written by `ddtree-ops lab up --hosts {len(names)}`, which writes it anew.\n"
        f"{shared}\nhosts:\n{hosts}\ngroups:\n{groups}"
    )


def _net() -> str:
    net = os.environ.get("DDTREE_OPS_LAB_NET") or "127.0.0"
    match = re.fullmatch(r"127\.(\d{1,3})\.(\d{1,3})", net)
    if not match or any(int(part) > 255 for part in match.groups()):
        raise LabError(
            f"DDTREE_OPS_LAB_NET is {net!r}, which is not three numbers such as 127.0.1", phase="lab"
        )
    return net


def _address(name: str) -> str:
    return f"{_net()}.{_spec(name).number}"


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
    with ThreadPoolExecutor(min(len(names), _AT_ONCE)) as pool:
        futures = [pool.submit(work, name) for name in names]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if not errors:
        return [future.result() for future in futures]
    first = errors[0]
    if isinstance(first, OpsError):
        first.details += tuple(line for other in errors[1:] for line in str(other).splitlines())
    raise first


def _make_keys(names: Sequence[str]) -> None:
    """The client's key, the hosts' keys, known_hosts and ssh_config; existing keys are kept."""
    root = _lab()
    identity = root / "id_ed25519"
    _make_key(identity, "ed25519", "ddtree-ops lab")
    places = {
        (name, kind): root / "keys" / name / f"ssh_host_{kind}_key" for name in names for kind in _KEY_KINDS
    }
    for name in names:
        (root / "keys" / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda one: _make_key(places[one], one[1], one[0]), places))
    known, config = [], []
    for name in names:
        for kind in _KEY_KINDS:
            key = places[name, kind]
            known.append(
                f"[{_address(name)}]:{SSH_PORT} {' '.join(key.with_suffix('.pub').read_text().split()[:2])}\n"
            )
        config.append(
            f"Host {name}\n"
            f"    HostName {_address(name)}\n"
            f"    Port {SSH_PORT}\n"
            f"    User {_spec(name).user}\n"
            f'    IdentityFile "{identity}"\n'
            "    IdentitiesOnly yes\n"
            "    IdentityAgent none\n"
            f'    UserKnownHostsFile "{root / "known_hosts"}"\n'
            "    GlobalKnownHostsFile /dev/null\n"
            "    StrictHostKeyChecking yes\n"
            "    UpdateHostKeys no\n"
            "    KexAlgorithms curve25519-sha256\n"  # the post-quantum default takes 0.1 s of CPU a login
        )
    write(root, "known_hosts", "".join(known).encode(), 0o600)
    write(root, "ssh_config", "\n".join(config).encode(), 0o600)


_KEY_KINDS = ("ed25519", "ecdsa")


def _make_key(path: Path, kind: str, comment: str) -> None:
    if not path.is_file():
        argv = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", comment, "-f", str(path)]
        call(argv, "the lab's ssh keys could not be made")


# --- one host ----------------------------------------------------------------------------------------------------


def _up(name: str, image: Path, tell: Teller, engine: Engine | None, real: Real | None) -> LabHost:
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
    if record is not None and engine not in (None, record.engine):
        raise LabError(
            f"it runs with the engine {record.engine}, not {engine}",
            host=name,
            phase="lab",
            state="the host runs as it did",
            hint=f"ddtree-ops lab down {name}, then ddtree-ops lab up {name} --engine {engine}",
        )
    if record is None:
        container.sweep(lambda line: tell(name, line))
        container.unmount()
        _refuse_taken_address(name)
        storage = container.mount(image)
        _furnish(name, real)
        record = container.boot(
            storage, image, _address(name), engine=engine or "lab", binds=real.binds if real else ()
        )
        try:
            system = _wait_ready(name, record)
        except LabError:
            container.stop(record, patience=0.0)
            container.sweep()
            container.unmount()
            raise
        tell(name, f"{system} on {record.address} after {time.monotonic() - began:.1f} s")
    else:
        _furnish(name, real)
        tell(name, f"{_wait_ready(name, record)} on {record.address} since before")
    return LabHost(
        name=name,
        address=record.address,
        port=SSH_PORT,
        user=_spec(name).user,
        identity_file=_lab() / "id_ed25519",
        known_hosts=_lab() / "known_hosts",
        root=container.root,
        pid=record.pid,
        storage=record.storage,
        engine=record.engine,
    )


def _down(name: str, *, keep: bool, tell: Teller, patience: float = STOP_TIMEOUT_S) -> None:
    container = _container(name)
    record = container.live()
    if record is not None:
        container.stop(record, patience, lambda line: tell(name, line))
        tell(name, "powered off")
    container.sweep(lambda line: tell(name, line))
    container.unmount()
    if not keep:
        images.remove_tree(container.folder)


def _status(name: str) -> LabHostStatus:
    record = _container(name).live()
    state: HostState = "down"
    detail = ""
    if record is not None:
        answer = _ask_systemd(name, timeout=_ANSWER_S)
        if answer in ("running", "degraded"):
            state = "degraded" if answer == "degraded" else "running"
        else:
            state = "starting" if answer in ("initializing", "starting") else "unreachable"
            detail = answer
        if state == "degraded":
            detail = _failed_units(name)
    return LabHostStatus(
        name=name,
        address=record.address if record else _address(name),
        port=SSH_PORT,
        user=_spec(name).user,
        state=state,
        pid=record.pid if record else None,
        since=record.since if record else None,
        storage=record.storage if record else "",
        detail=detail,
        engine=record.engine if record else "",
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


def _furnish(name: str, real: Real | None) -> None:
    """Everything that makes the image this host. Safe while it runs."""
    spec = _spec(name)
    root = _container(name).root
    keys = _lab() / "keys" / name
    public = (_lab() / "id_ed25519.pub").read_bytes()
    hosts = "".join(f"{_address(other)} {other}\n" for other in _known())
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
    if real is not None:
        furnish_real(root, real)


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


def _failed_units(name: str) -> str:
    """Which units failed, or why that is not known."""
    try:
        done = _ssh_root(name, ["systemctl", "list-units", "--failed", "--plain", "--no-legend"], _ANSWER_S)
    except subprocess.TimeoutExpired:
        return f"asked which units failed, no answer within {_ANSWER_S:.0f} s"
    units = [line.split()[0] for line in done.stdout.splitlines() if re.match(r"\S+\.\w+ ", line)]
    return "failed: " + ", ".join(units)


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
