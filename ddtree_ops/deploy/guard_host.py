"""The rollback that does not need us: runs on the host, from a timer, until a deployment was confirmed.

This file is written to ``DEPLOY_ROOT/guard/`` of the host and run there; it is never imported by the tool (only by
its tests). Standard library only, Python >= 3.8, Linux, systemd >= 240, as root::

    python3 FILE arm|hold|confirm|disarm SERVICE_DIR < request.json
    python3 FILE check|resume SERVICE_DIR

Each prints one JSON object. Exit status 0: done; 3: refused, ``{"refused": code, "message": ...}`` says why.

State lies in ``SERVICE_DIR/rollback.json``, written by ``arm`` before anything is switched. A transient systemd timer
runs ``check`` every few seconds; a unit in ``/etc/systemd/system`` that is there only while something is armed starts
that timer again (``resume``) after a boot. Whoever acts holds a flock on ``SERVICE_DIR/rollback.mutex``, so that confirming and
going back exclude each other:

- the commit point of a confirmation is the ``pass`` verdict of the activation in the history: once that line is
  there, nothing goes back, whether or not the state file could still be removed;
- the commit point of going back is ``"phase": "going-back"`` in the state file: from then on nothing can be
  confirmed, and a ``check`` that fails or is killed half-way is finished by a later one. While one is at it the
  service's lock belongs to the host itself.
"""

# Python 3.8, and quick to start on the host: no pathlib, no contextlib; what a look that waits does not need is
# imported where it is used.
# ruff: noqa: PTH100, PTH103, PTH104, PTH108, PTH110, PTH112, PTH113, PTH114, PTH115, PTH118, PTH119, PTH120, PTH123, PTH211
# ruff: noqa: UP031
from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["Refused", "decide", "lock_left", "main", "timer_name", "verdict_of"]

SCHEMA = 1
STATE_ROOM = 8192
"""Bytes the state file is padded to: it is updated in place, which a full disk does not keep from happening."""
LOCK_ROOM = 1024
TRIES = 12
RETRY_MOST = 300.0
"""Going back is tried so often, after pauses that double up to so many seconds: three quarters of an hour in all."""
EVIDENCE_LINES = 20000
EVIDENCE_BYTES = 8 << 20
QUICK = 60.0
START = 180.0
STOP_MARGIN = 60.0
JOURNAL = "/run/systemd/journal/socket"
UNIT_DIR = "/etc/systemd/system"


class Refused(Exception):
    """A request that cannot be granted: a stable code and a sentence."""

    def __init__(self, code: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.facts = facts


# ------------------------------------------------------------------------------------------------- decide


def decide(
    state: dict[str, Any],
    lock: dict[str, Any] | None,
    verdict: str | None,
    now: float,
    boot: str,
) -> tuple[str, str]:
    """What a look has to do. Pure.

    :param state: content of the state file.
    :param lock: content of the lock file, None without one.
    :param verdict: of the activation in the history: ``pass``, ``fail`` ...; ``none``: announced, not judged; None:
        the activation was never announced, so nothing was switched.
    :param now: seconds since boot (CLOCK_BOOTTIME).
    :param boot: id of this boot.
    :returns: ``disarm``, ``wait``, ``lost`` (note that the client is gone, and wait) or ``go-back``, and why.
    """
    left = lock_left(lock, now, boot)
    holder = lock["id"] if lock is not None and left > 0 else None
    own = holder is not None and holder == own_lock_id(state)
    if verdict == "pass":
        return "disarm", "it was confirmed"
    if state["phase"] == "failed":
        return "disarm", "going back was given up"
    if holder is not None and not own and holder != state["lock_id"]:
        return "wait", "somebody else holds the lock and is in charge"
    if state["phase"] == "going-back":
        if state["boot_id"] == boot and now < state.get("retry_at", 0.0):
            return "wait", "going back failed, and is tried again later"
        return "go-back", "an earlier look did not finish"
    if state["boot_id"] != boot:
        return _back(verdict, "the host was booted before the deployment was confirmed")
    if now >= state["deadline"]:
        if state["phase"] == "awaiting":
            return _back(verdict, "not confirmed: nobody confirmed it in time")
        return _back(verdict, "not confirmed: the deployment did not end within its deadline")
    if state["phase"] == "awaiting":
        return "wait", "waiting for a confirmation"
    if holder == state["lock_id"]:
        return "wait", "the deploying client lives"
    since = state["lost_since"]
    if lock is not None and lock.get("id") == state["lock_id"] and lock.get("boot_id") == boot:
        since = float(lock["boottime"]) + float(lock["lease_s"])
    if since is None:
        return "lost", "the deploying client holds no lock any more"
    if now - since >= state["grace_s"]:
        return _back(verdict, "not confirmed: the deploying client went away")
    return "wait", "the deploying client is gone, and may still come back"


def _back(verdict: str | None, why: str) -> tuple[str, str]:
    return ("disarm", "nothing was switched") if verdict is None else ("go-back", why)


def lock_left(lock: dict[str, Any] | None, now: float, boot: str) -> float:
    """Seconds for which a lock still holds; 0.0: no more. Pure."""
    try:
        if lock is None or lock["boot_id"] != boot:
            return 0.0
        return max(0.0, float(lock["boottime"]) + float(lock["lease_s"]) - now)
    except (KeyError, TypeError, ValueError):
        return 0.0


def own_lock_id(state: dict[str, Any]) -> str:
    """Id of the lock under which the host goes back."""
    return "rollback-" + str(state["activation"])


def verdict_of(history: bytes, activation: str) -> str | None:
    """As :func:`decide` wants it, from the content of ``history.jsonl``. Pure; unreadable lines are skipped."""
    found = None
    for record in records(history):
        if record.get("id") == activation:
            if record.get("event") == "activate":
                found = found or "none"
            elif record.get("event") == "verdict" and found is not None:
                found = str(record.get("verdict"))
    return found


def records(history: bytes) -> list[dict[str, Any]]:
    found = []
    for line in history.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def boot_paths(name: str) -> tuple[str, str]:
    """The link that has systemd start it at boot, and the unit file that starts a timer again. Pure."""
    return f"{UNIT_DIR}/multi-user.target.wants/{name}-boot.service", f"{UNIT_DIR}/{name}-boot.service"


def boot_unit(unit: str, command: list[str], folder: str) -> str:
    """Its text. Pure."""

    def quoted(word: str, *doubled: str) -> str:
        for character in ("\\", *doubled):
            word = word.replace(character, 2 * character)
        return '"' + word.replace('"', '\\"').replace("\n", "\\n") + '"'

    lines = [
        "[Unit]",
        f"Description=ddtree-ops: the deployment of {unit} was not confirmed before the boot",
        "RequiresMountsFor=" + quoted(folder, "%"),
        "[Service]",
        "Type=oneshot",
        "SyslogIdentifier=ddtree-ops",
        "ExecStart=" + " ".join(quoted(word, "%", "$") for word in command),
    ]
    return "\n".join(lines) + "\n"


def timer_name(unit: str, folder: str) -> str:
    """Name of the transient timer and its service, without their endings. Pure."""
    plain = re.sub(r"[^A-Za-z0-9:_.]", "-", unit[: -len(".service")])[:150]
    return f"ddtree-ops-rollback-{plain}-{sha256(folder.encode())[:8]}"


# ------------------------------------------------------------------------------------------ files, locks


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as source:
        return source.read().strip()


def utc(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(seconds))


def sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as source:
            return source.read()
    except FileNotFoundError:
        return None


def read_json(path: str) -> dict[str, Any] | None:
    try:
        found = json.loads(read(path) or b"null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def write_in_place(path: str, values: dict[str, Any], room: int) -> None:
    data = json.dumps(values).encode().ljust(room - 1) + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str, data: bytes, mode: int) -> None:
    """Write by rename, with fsync of the file and its folder."""
    temporary = "%s.%d.new" % (path, os.getpid())
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        try:
            os.fchmod(descriptor, mode)
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def append(path: str, record: dict[str, Any]) -> None:
    """Append one line, whole and on disk, or leave the file as it was."""
    line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")
    with Flock(os.path.dirname(path), 10.0):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
            try:
                write_all(descriptor, (b"" if whole else b"\n") + line + b"\n")
                os.fsync(descriptor)
            except BaseException:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Flock:
    """An exclusive flock on a file or folder; ``patience`` seconds, then :class:`Refused`."""

    def __init__(self, path: str, patience: float) -> None:
        folder = os.path.isdir(path)
        flags = os.O_RDONLY | os.O_DIRECTORY if folder else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self.descriptor = os.open(path, flags, 0o644)
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > until:
                    os.close(self.descriptor)
                    if error.errno in (errno.EAGAIN, errno.EACCES):
                        raise Refused("busy", "the host is going back by itself just now") from None
                    raise
            time.sleep(0.02)

    def __enter__(self) -> Flock:
        return self

    def __exit__(self, *error: Any) -> None:
        os.close(self.descriptor)


# ----------------------------------------------------------------------------------------------- commands


def call(*argv: str, timeout: float = QUICK) -> tuple[int, str]:
    """Exit status and output of a command; 127 where it is missing, 124 where it took too long."""
    import subprocess

    environment = dict(os.environ, LC_ALL="C", TZ="UTC")
    environment["PATH"] = (
        environment.get("PATH", "") + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    )
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        return 127, argv[0] + ": not found"
    except subprocess.TimeoutExpired:
        return 124, "{}: not done within {:.0f} s".format(" ".join(argv[:2]), timeout)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def need(*argv: str, timeout: float = QUICK) -> str:
    rc, said = call(*argv, timeout=timeout)
    if rc != 0:
        raise RuntimeError("%s: exit status %d: %s" % (" ".join(argv), rc, said[-500:]))
    return said


def show(unit: str) -> dict[str, str]:
    names = "LoadState,ActiveState,SubState,InvocationID,NRestarts,MainPID"
    said = need("systemctl", "show", "--no-pager", "--property=" + names, "--", unit)
    return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)


def is_up(unit: str) -> bool:
    return show(unit)["ActiveState"] in ("active", "activating", "reloading")


def tell(unit: str, priority: int, message: str) -> None:
    """To the journal, as ``ddtree-ops`` and as something about the unit; to stderr where there is no journald."""
    import socket

    fields = {
        "MESSAGE": message.replace("\n", " "),
        "PRIORITY": str(priority),
        "SYSLOG_IDENTIFIER": "ddtree-ops",
        "UNIT": unit,
        "OBJECT_SYSTEMD_UNIT": unit,
    }
    text = "".join("{}={}\n".format(*item) for item in fields.items())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(text.encode("utf-8", "replace"), JOURNAL)
    except OSError:
        sys.stderr.write("<%d>%s: %s\n" % (priority, unit, message))


class Service:
    """The files of a service, and what is done to them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.state_path = folder + "/rollback.json"
        self.lock_path = folder + "/lock"
        self.history_path = folder + "/history.jsonl"

    def mutex(self, patience: float) -> Flock:
        return Flock(self.folder + "/rollback.mutex", patience)

    def state(self) -> dict[str, Any] | None:
        return read_json(self.state_path)

    def lock(self) -> dict[str, Any] | None:
        found = read_json(self.lock_path)
        return found if found and found.get("id") else None

    def verdict(self, activation: str) -> str | None:
        return verdict_of(read(self.history_path) or b"", activation)

    def save(self, state: dict[str, Any]) -> None:
        write_in_place(self.state_path, state, STATE_ROOM)

    def need_lock(self, lock_id: str) -> None:
        """:raises Refused: the lock is not the caller's (any more)."""
        found = self.lock()
        if found is not None and found["id"] == lock_id and lock_left(found, boottime(), boot_id()) > 0:
            return
        who = "nobody holds it now"
        if found is not None and found["id"] != lock_id and lock_left(found, boottime(), boot_id()) > 0:
            who = "{} on {} holds it now".format(found.get("who"), found.get("origin"))
        elif found is not None:
            who = "its lease ran out"
        raise Refused("lock", "the lock of this deployment was lost: " + who, holder=found)

    def take_lock(self, state: dict[str, Any]) -> bool:
        """Make the lock the host's own; False where somebody else than the deployment that is undone holds it."""
        with Flock(self.folder, 5.0):
            found = self.lock()
            theirs = found is not None and found["id"] not in (state["lock_id"], own_lock_id(state))
            if theirs and lock_left(found, boottime(), boot_id()) > 0:
                return False
            now = time.time()
            values = {
                "schema": SCHEMA,
                "id": own_lock_id(state),
                "who": "host",
                "origin": os.uname().nodename,
                "command": "rollback by the host itself",
                "since": now,
                "renewed": now,
                "boottime": boottime(),
                "boot_id": boot_id(),
                "lease_s": state["stop_s"] + STOP_MARGIN + START,
                "agent_pid": os.getpid(),
            }
            write_in_place(self.lock_path, values, LOCK_ROOM)
            return True

    def drop_lock(self, state: dict[str, Any]) -> None:
        with Flock(self.folder, 5.0):
            found = self.lock()
            if found is not None and found["id"] == own_lock_id(state):
                remove(self.lock_path)

    def disarm(self, unit: str) -> None:
        """Nothing is armed from here on. The timer goes last: what runs this may be what it started."""
        remove(self.state_path)
        self.forget(unit)

    def forget(self, unit: str) -> None:
        """No look is taken any more, and none after a boot."""
        for path in boot_paths(timer_name(unit, self.folder)):
            remove(path)
        name = timer_name(unit, self.folder)
        call("systemctl", "stop", "--", name + ".timer")
        call("systemctl", "reset-failed", "--", name + ".timer", name + ".service")

    def looks(self, state: dict[str, Any]) -> bool:
        """Its timer runs."""
        return show(timer_name(state["unit"], self.folder) + ".timer")["ActiveState"] == "active"

    def remember(self, state: dict[str, Any]) -> None:
        """Have the timer started again after a boot. Nothing has to be reloaded: it is read at the next boot."""
        wanted, path = boot_paths(timer_name(state["unit"], self.folder))
        write_whole(path, boot_unit(state["unit"], self.command("resume"), self.folder).encode(), 0o644)
        os.makedirs(os.path.dirname(wanted), exist_ok=True)
        if not os.path.islink(wanted):
            os.symlink(path, wanted)
        sync_folder(os.path.dirname(wanted))

    def command(self, verb: str) -> list[str]:
        return [sys.executable, "-X", "utf8", "-ISB", os.path.abspath(__file__), verb, self.folder]

    def start_timer(self, state: dict[str, Any]) -> None:
        name = timer_name(state["unit"], self.folder)
        every = "{:.3f}s".format(state["interval_s"])
        call("systemctl", "stop", "--", name + ".timer", name + ".service")
        call("systemctl", "reset-failed", "--", name + ".timer", name + ".service")
        need(
            "systemd-run",
            "--quiet",
            "--unit=" + name,
            "--description=ddtree-ops: go back unless the deployment of {} is confirmed".format(
                state["unit"]
            ),
            "--on-active=" + every,
            "--on-unit-inactive=" + every,
            "--timer-property=AccuracySec=100ms",
            "--property=Type=oneshot",
            "--property=StartLimitIntervalSec=0",
            "--property=LogLevelMax=notice",
            "--property=SyslogIdentifier=ddtree-ops",
            *(word.replace("$", "$$") for word in self.command("check")),
        )


# ----------------------------------------------------------------------------------------------- requests


def arm(service: Service, request: dict[str, Any]) -> dict[str, Any]:
    """Arm, or arm anew in place of what is armed: the caller holds the lock, so it is in charge.

    ``request`` is the state to be, with ``within_s`` (seconds) instead of ``deadline``.
    """
    with service.mutex(20.0):
        service.need_lock(request["lock_id"])
        now = boottime()
        state = dict(
            request,
            schema=SCHEMA,
            phase="armed",
            timer=timer_name(request["unit"], service.folder) + ".timer",
            program=os.path.abspath(__file__),
            boot_id=boot_id(),
            armed_at=utc(),
            armed_boottime=now,
            deadline=now + request["within_s"],
            lost_since=None,
            attempts=0,
        )
        if len(json.dumps(state)) >= STATE_ROOM:
            raise Refused("too_large", "the state of the rollback takes more than %d bytes" % STATE_ROOM)
        before = service.state()
        if before is not None and before.get("program") == state["program"] and service.looks(state):
            service.save(state)  # in place: it has to go on being guarded on a full disk too
            return {"timer": state["timer"]}
        write_whole(service.state_path, json.dumps(state).encode().ljust(STATE_ROOM - 1) + b"\n", 0o644)
        try:
            service.remember(state)
            service.start_timer(state)
        except BaseException:
            service.disarm(state["unit"])
            raise
        return {"timer": state["timer"]}


def new_id() -> str:
    now = time.time()
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    return "%s.%03d-%s" % (stamp, int(now * 1000) % 1000, os.urandom(3).hex())


def same_run(request: dict[str, Any], unit: str) -> None:
    """:raises Refused: the run that was validated is not the one that is up now."""
    expected = request.get("expected")
    if not expected:
        return
    found = show(unit)
    for name, value in expected.items():
        if str(found.get(name)) != str(value):
            raise Refused(
                "changed",
                f"{unit} is not as it was validated: {name} was {value} and is {found.get(name)}",
            )


def needed_state(service: Service, activation: str) -> dict[str, Any]:
    state = service.state()
    if state is None or state["activation"] != activation:
        verdict = service.verdict(activation)
        if verdict == "fail":
            raise Refused("gone-back", "the host has gone back by itself already")
        raise Refused("not-armed", "no rollback is armed for this activation", verdict=verdict)
    if state["phase"] in ("going-back", "failed"):
        raise Refused("gone-back", "the host is going back by itself")
    return state


def confirm(service: Service, request: dict[str, Any]) -> dict[str, Any]:
    """Write the verdict that the caller has made, which is the confirmation, and disarm."""
    with service.mutex(20.0):
        service.need_lock(request["lock_id"])
        state = needed_state(service, request["activation"])
        same_run(request, state["unit"])
        append(service.history_path, request["verdict"])
        service.disarm(state["unit"])
        return {"confirmed": state["activation"]}


def hold(service: Service, request: dict[str, Any]) -> dict[str, Any]:
    """Validation has passed; from now on a person has ``seconds`` to confirm it."""
    with service.mutex(20.0):
        service.need_lock(request["lock_id"])
        state = needed_state(service, request["activation"])
        same_run(request, state["unit"])
        state.update(
            phase="awaiting",
            deadline=boottime() + request["seconds"],
            expected=request.get("expected"),
            summary=str(request.get("summary", ""))[:1000],
            confirm_until=utc(time.time() + request["seconds"]),
        )
        service.save(state)
        return {"confirm_until": state["confirm_until"]}


def disarm(service: Service, request: dict[str, Any]) -> dict[str, Any]:
    with service.mutex(20.0):
        service.need_lock(request["lock_id"])
        service.disarm(request["unit"])
        return {}


def resume(service: Service, request: dict[str, Any]) -> dict[str, Any]:
    """After a boot: look again, where something is armed."""
    with service.mutex(20.0):
        state = service.state()
        if state is None or state["phase"] == "failed":
            service.forget(os.path.basename(service.folder))
            return {"armed": False}
        service.start_timer(state)
        return {"armed": True}


def check(service: Service, request: dict[str, Any]) -> dict[str, Any]:
    """One look. The timer's; idempotent."""
    with service.mutex(0.0):
        state = service.state()
        if state is None:
            unit = os.path.basename(service.folder)
            if os.path.exists(service.state_path):
                tell(
                    unit,
                    3,
                    f"{unit}: {service.state_path} cannot be read: the host does not go back by itself",
                )
            service.forget(unit)
            return {"action": "disarm", "why": "nothing is armed"}
        verdict = service.verdict(state["activation"])
        action, why = decide(state, service.lock(), verdict, boottime(), boot_id())
        if action == "lost":
            service.save(dict(state, lost_since=boottime()))
        elif action == "disarm" and state["phase"] == "failed":
            service.forget(state["unit"])
        elif action == "disarm":
            service.disarm(state["unit"])
        elif action == "go-back":
            if not service.take_lock(state):
                return {"action": "wait", "why": "somebody else has just taken the lock"}
            go_back(service, state, why)
        return {"action": action, "why": why}


# ------------------------------------------------------------------------------------------------ go back


def go_back(service: Service, state: dict[str, Any], why: str) -> None:
    """Undo the deployment; every part of it can be done again. The lock is the host's."""
    unit = state["unit"]
    if state["phase"] != "going-back":
        state.update(phase="going-back", why=why, rollback_id=new_id())
        service.save(state)
        tell(unit, 4, f"{unit}: {why}; going back to {goal(state)}")
    state["attempts"] += 1
    service.save(state)
    try:
        unsaid = []
        if state["attempts"] == 1:
            unsaid += tried(lambda: keep_evidence(service, state))
        unsaid += tried(lambda: judge(service, state))
        done, more = APPLY[state["target"]["mode"]](service, state)
        unsaid += more
        for problem in unsaid:
            tell(unit, 4, f"{unit}: not written down while going back: {problem}")
        tell(
            unit,
            5,
            "{}: the deployment {} was undone by the host: {}".format(unit, state["activation"], done),
        )
    except Exception as error:
        tell(unit, 3, "%s: going back failed (try %d of %d): %s" % (unit, state["attempts"], TRIES, error))
        state["problem"] = str(error)[:300]
        if state["attempts"] < TRIES:
            state["retry_at"] = boottime() + min(RETRY_MOST, state["interval_s"] * 2 ** state["attempts"])
        else:
            state["phase"] = "failed"
        service.save(state)
        service.drop_lock(state)
        if state["phase"] == "failed":
            service.forget(unit)
        raise
    remove(service.state_path)
    service.drop_lock(state)
    service.disarm(unit)


def tried(action: Callable[[], None]) -> list[str]:
    """What keeps no service from coming back, such as a note on a full disk, is done if it can be."""
    try:
        action()
    except (OSError, RuntimeError) as error:
        return [str(error)]
    return []


def goal(state: dict[str, Any]) -> str:
    target = state["target"]
    if target["mode"] == "release":
        return "release {}, which passed on {}".format(target["release"][:12], target["passed"])
    return "the unit file that ran before" if target["mode"] == "unit" else "nothing: the unit is stopped"


def keep_evidence(service: Service, state: dict[str, Any]) -> None:
    invocation = show(state["unit"]).get("InvocationID", "")
    if not invocation:
        return
    folder = "{}/evidence/{}".format(service.folder, state["activation"])
    os.makedirs(folder, mode=0o700, exist_ok=True)
    call("journalctl", "--sync", timeout=10.0)
    rc, said = call(
        "journalctl",
        "--output=short-iso-precise",
        "--no-pager",
        "--quiet",
        "--lines=%d" % EVIDENCE_LINES,
        "_SYSTEMD_INVOCATION_ID=" + invocation,
        "+",
        "INVOCATION_ID=" + invocation,
    )
    if rc != 0:
        raise RuntimeError("journalctl: " + said[-200:])
    write_whole(folder + "/journal.txt", said.encode("utf-8", "replace")[-EVIDENCE_BYTES:] + b"\n", 0o600)


def judge(service: Service, state: dict[str, Any]) -> None:
    if service.verdict(state["activation"]) != "none":
        return
    record = {
        "schema": SCHEMA,
        "event": "verdict",
        "id": state["activation"],
        "time": utc(),
        "verdict": "fail",
        "summary": state["why"],
        "invocation": show(state["unit"]).get("InvocationID", ""),
    }
    append(service.history_path, record)


def announce(service: Service, state: dict[str, Any]) -> None:
    if service.verdict(state["rollback_id"]) is not None:
        return
    target = state["target"]
    record = {
        "schema": SCHEMA,
        "event": "activate",
        "id": state["rollback_id"],
        "time": utc(),
        "release": target["release"],
        "unit_sha256": target["unit_sha256"],
        "plan": target["plan"],
        "who": "host",
        "origin": os.uname().nodename,
        "reason": "rollback",
    }
    if target.get("runtime"):
        record["runtime"] = target["runtime"]
    append(service.history_path, record)


def back_to_release(service: Service, state: dict[str, Any]) -> tuple[str, list[str]]:
    target = state["target"]
    text = read(target["unit_file"])
    whole = os.path.isfile(os.path.join(service.folder, target["link"], "manifest.json"))
    if text is None or sha256(text) != target["unit_sha256"] or not whole:
        done, unsaid = stop_for_good(service, state)
        return "release {} is not there any more; {}".format(target["release"][:12], done), unsaid
    link = service.folder + "/current"
    there = os.readlink(link) if os.path.islink(link) else None
    if there == target["link"] and read(state["unit_path"]) == text and is_up(state["unit"]):
        return "it runs from release {} already".format(target["release"][:12]), []
    unsaid = tried(lambda: announce(service, state))
    switch(service, state, target["link"], text, target["unit_mode"])
    return "started from release {}, which passed on {}".format(
        target["release"][:12], target["passed"]
    ), unsaid


def back_to_unit(service: Service, state: dict[str, Any]) -> tuple[str, list[str]]:
    target = state["target"]
    text = read(target["unit_file"])
    if text is None or sha256(text) != target["unit_sha256"]:
        done, unsaid = stop_for_good(service, state)
        return "the unit file that ran before is not there any more; " + done, unsaid
    if read(state["unit_path"]) == text and is_up(state["unit"]):
        return "it runs from the unit file that ran before already", []
    switch(service, state, target["link"], text, target["unit_mode"])
    return "started from the unit file that ran before", []


def stop_for_good(service: Service, state: dict[str, Any]) -> tuple[str, list[str]]:
    stop(state)
    call("systemctl", "disable", "--quiet", "--", state["unit"])
    return "there is nothing to go back to; the unit is stopped", []


APPLY: dict[str, Callable[[Service, dict[str, Any]], tuple[str, list[str]]]] = {
    "release": back_to_release,
    "unit": back_to_unit,
    "stop": stop_for_good,
}


def stop(state: dict[str, Any]) -> None:
    unit = state["unit"]
    if show(unit)["LoadState"] == "not-found":
        return
    rc, said = call("systemctl", "stop", "--", unit, timeout=state["stop_s"] + STOP_MARGIN)
    if rc == 124:
        call("systemctl", "kill", "--signal=SIGKILL", "--", unit)
        said = need("systemctl", "stop", "--", unit, timeout=STOP_MARGIN)
    elif rc != 0:
        raise RuntimeError("systemctl stop %s: exit status %d: %s" % (unit, rc, said[-300:]))


def switch(service: Service, state: dict[str, Any], link: str | None, text: bytes, mode: int) -> None:
    unit = state["unit"]
    stop(state)
    if link is not None:
        temporary = service.folder + "/.current.rollback"
        remove(temporary)
        os.symlink(link, temporary)
        os.rename(temporary, service.folder + "/current")
        sync_folder(service.folder)
    write_whole(state["unit_path"], text, mode)
    need("systemctl", "daemon-reload", timeout=START)
    call("systemctl", "reset-failed", "--", unit)
    need("systemctl", "start", "--", unit, timeout=START)


REQUESTS: dict[str, Callable[[Service, dict[str, Any]], dict[str, Any]]] = {
    "arm": arm,
    "check": check,
    "confirm": confirm,
    "disarm": disarm,
    "hold": hold,
    "resume": resume,
}


def main(argv: list[str]) -> int:
    """Do the request ``argv[0]`` for the service folder ``argv[1]``; exit status 2 for anything else."""
    if len(argv) != 2 or argv[0] not in REQUESTS:
        sys.stderr.write("usage: guard.py {} SERVICE_DIR\n".format("|".join(REQUESTS)))
        return 2
    os.umask(0o022)
    request = {} if argv[0] in ("check", "resume") else json.load(sys.stdin)
    try:
        answer = REQUESTS[argv[0]](Service(argv[1].rstrip("/")), request)
    except Refused as error:
        if argv[0] == "check":
            return 0  # another look, or a client, is at it
        print(json.dumps(dict(error.facts, refused=error.code, message=error.message)))
        return 3
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
