"""One container: its writable layer, its process, its cgroup. Knows nothing of ssh, addresses or what is inside.

A process is known by pid, start time and boot, so that a recycled pid is never signalled. Each container has a
cgroup of its own: two systemds in one cgroup would end each other's units.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ddtree_ops.errors import LabError
from ddtree_ops.lab import image as images
from ddtree_ops.lab.furnish import write

__all__ = ["STOP_TIMEOUT_S", "Container", "Record", "call", "hierarchies", "start_ticks", "tail"]

STOP_TIMEOUT_S = 60.0
"""How long a clean power-off may take, in seconds; then the host is killed."""

STILL_S = 180.0
"""How long none of a killed host's processes may end, in seconds, before that is an error.

A killed process that waits for the disk (state D) ends when the disk has answered, and not before: many hosts that
are killed at once on a loaded machine take minutes, one after the other.
"""

ENOUGH_S = 1200.0
"""How long a killed host may take to end in all, in seconds."""

_SAID_EVERY_S = 15.0
_STATES = {
    "D": "waits for a disk or a device; the kernel ends it when that has answered",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended; its parent has not taken note of that",
    "R": "runs",
    "S": "sleeps",
}

_SYSTEMD = Path("/run/systemd/system")


@dataclass(frozen=True)
class Record:
    """Content of state.json: which process is this host's."""

    pid: int
    start_ticks: int
    boot_id: str
    since: float
    storage: str
    image: str
    address: str
    engine: str = "lab"


@dataclass(frozen=True)
class Container:
    """A container that may or may not run.

    :param name: its hostname.
    :param label: name that no other container on this machine has: for its cgroup, unit and machine name.
    :param folder: upper, work, merged (the root), console.log, state.json.
    """

    name: str
    label: str
    folder: Path

    @property
    def root(self) -> Path:
        """The root folder, as seen from this machine while it is mounted."""
        return self.folder / "merged"

    @property
    def console(self) -> Path:
        """What it printed while booting."""
        return self.folder / "console.log"

    @property
    def unit(self) -> str:
        """Its transient unit, where systemd runs this machine."""
        return f"{self.label}.service"

    @property
    def cgroups(self) -> list[Path]:
        """Its cgroups, where systemd does not run this machine."""
        return [root / self.label for root in hierarchies()]

    def mount(self, image: Path) -> str:
        """Lay the host's writable layer over the image. Returns how: ``overlay`` or ``copy``."""
        folder = self.folder
        stamp = folder / "image"
        if stamp.is_file() and stamp.read_text() != image.name:
            images.remove_tree(folder)
        if (self.root / "etc").is_dir():
            return "copy"
        for part in ("upper", "work", "merged"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        stamp.write_text(image.name)
        options = ",".join(
            f"{key}={_escape(path)}"
            for key, path in (
                ("lowerdir", image),
                ("upperdir", folder / "upper"),
                ("workdir", folder / "work"),
            )
        )
        argv = ["mount", "-t", "overlay", "-o", options, self.label, str(self.root)]
        if subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
            return "overlay"
        copy = folder / "copy"
        images.remove_tree(copy)
        argv = ["cp", "-a", "--reflink=auto", str(image), str(copy)]
        call(argv, "the image could not be copied (an overlay could not be mounted either)", host=self.name)
        copy.replace(self.root)
        return "copy"

    def unmount(self) -> None:
        """Take the root's mount away, if there is one."""
        if self.root.is_dir() and os.path.ismount(self.root):
            call(["umount", "--", str(self.root)], f"{self.root} could not be unmounted", host=self.name)

    def boot(
        self,
        storage: str,
        image: Path,
        address: str,
        *,
        engine: str = "lab",
        binds: Sequence[tuple[Path, str]] = (),
    ) -> Record:
        """Start systemd-nspawn, detached from this process and its terminal. The root must be mounted and furnished.

        :param engine: what it is furnished with, for the record.
        :param binds: folders of this machine, and where the host is to see them, read-only.
        :raises LabError: it ended at once; the end of its console is in ``details``.
        """
        self.console.write_bytes(b"")
        argv = [
            "systemd-nspawn",
            "--quiet",
            f"--directory={self.root}",
            f"--machine={self.label}",
            f"--hostname={self.name}",
            "--boot",
            "--register=no",
            "--keep-unit",
            "--console=read-only",
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
            *(f"--bind-ro={_escape(here)}:{_escape(Path(there))}" for here, there in binds),
        ]
        pid = self._spawn_in_unit(argv) if _SYSTEMD.is_dir() else self._spawn_in_cgroup(argv)
        ticks = start_ticks(pid)
        if ticks is None:
            raise LabError(
                "systemd-nspawn ended at once",
                host=self.name,
                phase="lab",
                state="the host is down",
                details=tail(self.console),
            )
        record = Record(
            pid=pid,
            start_ticks=ticks,
            boot_id=_boot_id(),
            since=time.time(),
            storage=storage,
            image=image.name,
            address=address,
            engine=engine,
        )
        write(self.folder, "state.json", json.dumps(asdict(record)).encode(), 0o600)
        return record

    def _spawn_in_unit(self, argv: Sequence[str]) -> int:
        """Where systemd runs this machine: a transient unit, so that the host has a cgroup of its own, delegated."""
        properties = (
            "Delegate=yes",
            "KillMode=mixed",
            "TasksMax=16384",
            f"TimeoutStopSec={STOP_TIMEOUT_S:.0f}",
        )
        call(
            [
                "systemd-run",
                "--quiet",
                "--collect",
                f"--unit={self.unit}",
                f"--description=ddtree-ops lab host {self.name}",
                *(f"--property={prop}" for prop in properties),
                f"--property=StandardOutput=append:{self.console}",
                f"--property=StandardError=append:{self.console}",
                "--",
                *argv,
            ],
            "the host could not be started as a unit",
            host=self.name,
        )
        return int(self._show("MainPID"))

    def _show(self, prop: str) -> str:
        argv = ["systemctl", "show", "--value", f"--property={prop}", self.unit]
        return call(argv, "systemd does not answer", host=self.name).strip()

    def _spawn_in_cgroup(self, argv: Sequence[str]) -> int:
        """Elsewhere: a detached process in a cgroup made for it. Two hosts in one cgroup would kill each other's units."""
        groups = self.cgroups
        try:
            for group in groups:
                group.mkdir(exist_ok=True)
        except OSError as error:
            raise LabError(
                f"no cgroup could be made for it: {error}",
                host=self.name,
                phase="lab",
                hint="in a container: start it with --privileged and a cgroup namespace of its own",
            ) from error
        script = (
            'log=$1; shift; while [ "$1" != -- ]; do echo $$ >"$1/cgroup.procs" || exit 1; shift; done; shift\n'
            '"$@" </dev/null >>"$log" 2>&1 &\n'
            "echo $!"
        )
        done = subprocess.run(
            ["/bin/sh", "-c", script, "sh", str(self.console), *map(str, groups), "--", *argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            cwd="/",
        )
        if done.returncode:
            raise LabError(
                "it could not be started",
                host=self.name,
                phase="lab",
                details=tuple(done.stderr.splitlines()),
            )
        return int(done.stdout)

    def live(self) -> Record | None:
        """The record of the host's process, None unless that very process lives."""
        try:
            record = Record(**json.loads((self.folder / "state.json").read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise LabError(
                f"{self.folder / 'state.json'} is not readable: {error}",
                host=self.name,
                phase="lab",
                hint="remove that file after stopping the host's systemd-nspawn",
            ) from error
        same = record.boot_id == _boot_id() and start_ticks(record.pid) == record.start_ticks
        return record if same else None

    def stop(self, record: Record, patience: float, say: Callable[[str], None] = lambda line: None) -> None:
        """End the recorded process: a clean power-off, after ``patience`` seconds SIGKILL.

        :param say: called with a line now and then while a killed process does not end.
        :raises LabError: it does not end; names it and its state.
        """
        try:
            handle = os.pidfd_open(record.pid)
        except ProcessLookupError:
            return
        try:
            if start_ticks(record.pid) != record.start_ticks:
                return
            with suppress(ProcessLookupError):
                if patience > 0:
                    signal.pidfd_send_signal(handle, signal.SIGTERM)
                    if select.select([handle], [], [], patience)[0]:
                        return
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            waiting = _Waiting(self.name, say)
            while not select.select([handle], [], [], 0.05)[0]:
                waiting.on(f"process {record.pid}", [record.pid])
        finally:
            os.close(handle)

    def sweep(self, say: Callable[[str], None] = lambda line: None) -> None:
        """End what a killed host left in its unit or cgroup, remove that and nspawn's own leftover folder.

        :param say: called with a line now and then while that takes long.
        :raises LabError: no process ended for :data:`STILL_S`, or some are left after :data:`ENOUGH_S`; names them.
        """
        waiting = _Waiting(self.name, say)
        if _SYSTEMD.is_dir():
            while self._show("LoadState") != "not-found":
                inside = self._show("ControlGroup").strip("/")
                for verb in ("stop", "reset-failed"):
                    subprocess.run(
                        ["systemctl", verb, self.unit], stdin=subprocess.DEVNULL, capture_output=True
                    )
                groups = [root / inside for root in hierarchies()] if inside else []
                waiting.on(self.unit, sorted({pid for path in groups for pid in _all_members(path)[1]}))
        for group in self.cgroups:
            while group.is_dir():
                folders, left = _all_members(group)
                for pid in left:
                    if pid:  # 0 stands for one that this PID namespace does not see, and would be ourselves
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                refused = ""
                if not left:
                    try:
                        for folder in folders:
                            folder.rmdir()
                        break
                    except OSError as error:
                        refused = f"{folder}: {error.strerror}"
                waiting.on(str(group), left, refused)
        with suppress(FileNotFoundError):
            Path("/run/systemd/nspawn/propagate", self.label).rmdir()


class _Waiting:
    """Patience with killed processes: it lasts while they become fewer, and its end names those that are left."""

    def __init__(self, host: str, say: Callable[[str], None]) -> None:
        self._host, self._say = host, say
        self._began = self._moved = self._said = time.monotonic()
        self._seen: tuple[str, Sequence[int], str] | None = None

    def on(self, what: str, left: Sequence[int], refused: str = "") -> None:
        """Wait a moment.

        :param what: the process, unit or cgroup that is to go away.
        :param left: processes that still have to end.
        :param refused: why an empty cgroup was not removed.
        :raises LabError: enough is enough.
        """
        now = time.monotonic()
        if self._seen != (what, left, refused):
            self._seen, self._moved = (what, left, refused), now
        still, whole = now - self._moved, now - self._began
        if still > STILL_S or whole > ENOUGH_S:
            since = f"none ended for {still:.0f} s" if still > STILL_S else f"after {whole:.0f} s"
            details = [_describe(pid) for pid in left] or [refused or "no process is seen in it"]
            seen = ",".join(str(pid) for pid in left if pid)
            inspect = f"ps -o pid,stat,wchan:32,args -p {seen}; " if seen else ""
            raise LabError(
                f"{what} does not go away: {_number_of(left)} left, {since}",
                host=self._host,
                phase="lab",
                state="the host was killed, its files are still there",
                details=tuple(details),
                hint=f"{inspect}ddtree-ops lab down when they are gone",
            )
        if now - self._said > _SAID_EVERY_S:
            self._said = now
            first = "; ".join(_describe(pid) for pid in left[:3]) or refused
            self._say(f"killed, waiting for {what}: {_number_of(left)} left, {whole:.0f} s so far: {first}")
        time.sleep(0.02)


def _number_of(pids: Sequence[int]) -> str:
    return f"{len(pids) or 'no'} process{'' if len(pids) == 1 else 'es'}"


def _describe(pid: int) -> str:
    """A process for a person: pid, name, state."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid}, ended by now" if pid else "a process outside this PID namespace"
    state = text.rpartition(")")[2].split()[0]
    name = text.partition("(")[2].rpartition(")")[0]
    return f"{pid} {name}, state {state} ({_STATES.get(state, 'see ps(1)')})"


def _all_members(group: Path) -> tuple[list[Path], list[int]]:
    """Folders of a cgroup, the innermost first, and processes in any of them."""
    folders = [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]
    return folders, sorted({int(pid) for folder in folders for pid in _members(folder)})


def call(argv: Sequence[str], problem: str, *, host: str = "") -> str:
    """Run a command that must succeed and return what it printed. :raises LabError: ``problem`` and its output."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        details = (done.stderr or done.stdout).strip().splitlines()
        raise LabError(problem, host=host, phase="lab", details=tuple(details[-10:]))
    return done.stdout


def _escape(path: Path) -> str:
    return re.sub(r"([\\,:])", r"\\\1", str(path))


def hierarchies() -> list[Path]:
    """Mount points of the cgroup trees that systemd uses: the unified one, and in older set-ups ``name=systemd``."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            found.append(Path(point))
    return found


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot, None for a dead one or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _members(group: Path) -> list[str]:
    try:
        return (group / "cgroup.procs").read_text().split()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
        return []


def tail(path: Path, lines: int = 25) -> tuple[str, ...]:
    """The end of a console log without its colours."""
    try:
        text = path.read_bytes()[-16384:].decode("utf-8", "replace")
    except FileNotFoundError:
        return ()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-lines:]
