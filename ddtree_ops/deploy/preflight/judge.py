"""All preflight checks of one target, from facts alone. Pure.

A ``fail`` refuses the deployment; ``inconclusive`` is a warning that is shown and refuses nothing. What only a GPU
machine needs (memory of ranks, room for NCCL) is asked of hosts for which the inventory names GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from ddtree_ops.deploy.preflight.facts import Facts
from ddtree_ops.deploy.preflight.judge_gpu import judge_gpus
from ddtree_ops.deploy.preflight.judge_model import judge_models
from ddtree_ops.deploy.preflight.judge_venv import judge_plugins, judge_venv, judge_versions
from ddtree_ops.deploy.preflight.pins import Pins, pins_of
from ddtree_ops.deploy.preflight.verdicts import GIB, MIB, failed, listed, passed, size, unsure
from ddtree_ops.inventory.models import Target
from ddtree_ops.results import CheckResult, Evidence
from ddtree_ops.runtime.overlay import OVERLAY
from ddtree_ops.service.control import PortOwner
from ddtree_ops.service.credentials import ENGINE_FILE, secret_files
from ddtree_ops.service.credentials import MINIMUM_SYSTEMD as CREDENTIALS_SYSTEMD
from ddtree_ops.service.ending import Ending
from ddtree_ops.service.journal import Entry, MessageId
from ddtree_ops.service.state import UnitState
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from ddtree_ops.runtime import Bundle

__all__ = ["Wanted", "judge", "skew_of"]

MINIMUM_SYSTEMD = 240
"""First with ``LogRateLimitIntervalSec=`` in a unit (systemd NEWS, 240); ours sets it to 0."""
SKEW_NOTED_S = 2.0
SKEW_REFUSED_S = 300.0
"""Beyond it the host's journal and what we write into history and audit can no longer be put into one order."""
OPEN_FILES = 65535
"""What sglang's ``set_ulimit`` asks for (srt/utils/common.py)."""
REMEMBERED_S = 86400.0
"""How long a crash is told of after a later run was stopped as planned."""
NCCL_ROOM = GIB
"""NCCL user guide, troubleshooting: ``--shm-size=1g`` for containers; without room it fails to initialise."""


@dataclass(frozen=True)
class Wanted:
    """What a bundle asks of a host.

    :param compiled: it holds shared objects, which must be mapped as programs are.
    :param pins: requirements of its base; None where it has no METADATA.
    :param overlay: it holds the overlay; without, no plugin of the release is there to be in the way of.
    """

    name: str
    digest: str
    files: int
    bytes: int
    compiled: bool
    pins: Pins | None
    overlay: bool = True

    @classmethod
    def of(cls, bundle: Bundle) -> Wanted:
        """From a built bundle; reads its METADATA."""
        compiled = any(".so" in entry.path.rsplit("/", 1)[-1] for entry in bundle.files)
        laid = any(entry.path.startswith(f"{OVERLAY}/") for entry in bundle.files)
        return cls(
            bundle.name, bundle.digest, len(bundle.files), bundle.size, compiled, pins_of(bundle), laid
        )


def skew_of(at_hello: float, host_time: float, sent: float) -> tuple[float, float]:
    """Between which two values the host's clock is ahead of ours, in seconds.

    :param at_hello: host's time in the agent's greeting minus ours on its arrival: too small by the way back.
    :param host_time: host's time when it answered a request that we sent at ``sent``: their difference is too large
        by the way there.
    """
    return min(at_hello, host_time - sent), max(at_hello, host_time - sent)


def judge(
    target: Target,
    facts: Facts,
    owners: Sequence[PortOwner],
    *,
    state: UnitState | None = None,
    releases: frozenset[str] = frozenset(),
    wanted: Wanted | None = None,
    skew: tuple[float, float] | None = None,
) -> list[CheckResult]:
    """One result a check.

    :param owners: who listens on the service's port, where it would be in the way.
    :param state: of the unit as it stands, with its drop-ins.
    :param releases: digests of the releases that the host has.
    :param wanted: of the bundle; None where it is not built yet: then space is judged by a floor, versions are not.
    :param skew: see :func:`skew_of`.
    """
    results = [
        _sudo(facts),
        _systemd(target, facts),
        _journal(target, facts),
        *_clock(facts, skew),
        _deploy_root(target, facts, wanted),
        _disk(target, facts, releases, wanted),
        _memory(target, facts, state),
        *_shm(target, facts, state),
        _limits(target, facts),
        judge_venv(target, facts),
        *judge_versions(target, facts, wanted.pins if wanted else None),
        *judge_plugins(target, facts, overlay=wanted is None or wanted.overlay),
        *judge_models(target, facts),
        *_user(target, facts),
        _port(target, owners),
        *judge_gpus(target, facts, state),
        *_crash(target, facts, state),
        *_kernel(target, facts),
    ]
    unread = [f"{path} (not read by systemd yet)" for path in state.unread_drop_ins] if state else []
    drop_ins = [*state.drop_in_paths, *unread] if state else []
    if drop_ins:
        results.append(
            unsure(
                "drop-ins",
                f"settings of {target.service.unit} also come from {listed(drop_ins)}"
                + (": a deploy makes it do so" if unread else ""),
                "put them into the inventory and remove the file",
            )
        )
    return results


def _sudo(facts: Facts) -> CheckResult:
    if facts.uid == 0:
        return passed("sudo", "root on the host")
    return failed("sudo", "not root on the host", "check `sudo -n true` there", uid=facts.uid)


def _systemd(target: Target, facts: Facts) -> CheckResult:
    with_credentials = ENGINE_FILE in secret_files(target.service)
    least = max(MINIMUM_SYSTEMD, CREDENTIALS_SYSTEMD if with_credentials else 0)
    if facts.systemd is not None and facts.systemd >= least:
        return passed("systemd", f"systemd {facts.systemd}", version=facts.systemd)
    return failed(
        "systemd",
        f"systemd is {facts.systemd or 'not there'}, {least} or newer is needed"
        + (" to hand over the API key" if with_credentials else ""),
        "deploy to a host that systemd runs: Debian 11, Ubuntu 22.04, RHEL 9 or newer"
        if with_credentials
        else "deploy to a host that systemd runs: Debian 10, Ubuntu 20.04, RHEL 9 or newer",
        version=facts.systemd,
    )


def _journal(target: Target, facts: Facts) -> CheckResult:
    if facts.journal.status != 0 or not facts.journal.text.startswith("{"):
        said = facts.journal.first_line if facts.journal.text or facts.journal.status else "no entry"
        return failed(
            "journal",
            f"the journal cannot be read, or is empty: {said}",
            "journalctl -n 1 on the host as root; journald.conf must not say Storage=none",
            Evidence("journalctl -n 1", facts.journal.text[:300]),
        )
    lost = [
        entry.message
        for entry in facts.entries
        if entry.message_id == MessageId.SUPPRESSED and target.service.unit in entry.message
    ]
    if lost:
        return unsure(
            "journal",
            f"journald dropped messages of the unit in this boot ({lost[-1]}): what was logged is not all there",
            "the unit sets LogRateLimitIntervalSec=0: deploy it, and look for a drop-in that says otherwise",
            *(Evidence("journal", line) for line in lost[-3:]),
        )
    if facts.journal_volatile or not facts.journal_persistent:
        return unsure(
            "journal",
            "the journal is kept in memory: a reboot takes the evidence of a crash with it",
            "mkdir -p /var/log/journal && journalctl --flush   (Storage=auto or persistent in journald.conf)",
        )
    return passed("journal", "journal readable and persistent")


def _clock(facts: Facts, skew: tuple[float, float] | None) -> list[CheckResult]:
    if skew is None:
        return []
    low, high = skew
    least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    off = f"{least:.0f} s {'ahead of' if low > 0 else 'behind'} this machine's"
    figures = {"skew_low_s": round(low, 3), "skew_high_s": round(high, 3), "synchronised": facts.synchronised}
    hint = "timedatectl set-ntp true on the host; then look at this machine's clock"
    if least > SKEW_REFUSED_S:
        summary = f"the host's clock is {off}: its journal and our records could not be put into one order"
        return [failed("clock", summary, hint, **figures)]
    if least > SKEW_NOTED_S:
        summary = f"the host's clock is {off}: times in history are ours, times in its journal are its own"
        return [unsure("clock", summary, hint, **figures)]
    if facts.synchronised is False and not facts.container:
        return [unsure("clock", "the clock is right, but nothing keeps it so: no NTP", hint, **figures)]
    kept = ", kept by NTP" if facts.synchronised else ""
    return [passed("clock", f"clock right within {max(abs(low), abs(high)):.1f} s{kept}", **figures)]


def _deploy_root(target: Target, facts: Facts, wanted: Wanted | None) -> CheckResult:
    root, place = target.host.deploy_root, facts.root
    if not place.folder:
        return failed(
            "deploy-root", f"{place.path} is in the way of {root}: it is no folder", f"mv {place.path} away"
        )
    if place.read_only:
        return failed(
            "deploy-root",
            f"the file system of {root} is read-only",
            f"mount -o remount,rw $(findmnt -n -o TARGET -T {place.path}); dmesg tells if the disk failed",
        )
    if place.noexec and (wanted is None or wanted.compiled):
        return failed(
            "deploy-root",
            f"the file system of {root} is mounted noexec: compiled modules of the runtime cannot be loaded from it",
            "set deploy_root to another file system, or mount it without noexec",
        )
    return passed("deploy-root", f"{root} {'there' if place.there else 'will be made'}, writable")


def _disk(target: Target, facts: Facts, releases: frozenset[str], wanted: Wanted | None) -> CheckResult:
    """Source of the figures: the bundle itself. Twice, because byte code is written beside the release at the start."""
    place = facts.root
    if wanted is None:
        need, inodes, what = 512 * MIB, 10_000, "a runtime"
    elif wanted.digest in releases:
        need, inodes, what = 32 * MIB, 200, "history and byte code; the release is there"
    else:
        need = 2 * (wanted.bytes + wanted.files * place.block) + 64 * MIB
        inodes, what = 2 * wanted.files + 1000, f"{wanted.name} and its byte code"
    figures = {
        "free_bytes": place.free, "free_inodes": place.inodes, "needed_bytes": need, "needed_inodes": inodes,
    }  # fmt: skip
    if place.free >= need and (place.inodes < 0 or place.inodes >= inodes):
        return passed("disk", f"{size(place.free)} free", **figures)
    left = f"{size(place.free)} and {place.inodes} inodes" if place.inodes >= 0 else size(place.free)
    return failed(
        "disk",
        f"{left} free below {target.host.deploy_root}; {size(need)} and {inodes} inodes are needed for {what}",
        f"ddtree-ops prune {target.host.name} removes old releases; du -xsh {place.path}/* | sort -h shows what takes it",
        **figures,
    )


def _memory(target: Target, facts: Facts, state: UnitState | None) -> CheckResult:
    """1 GiB a rank is what a bare torch 2.11 process with a CUDA context was seen to take (0.42 GiB of it its own)."""
    ranks = target.local_gpus if target.host.gpu is not None else 0
    need = (2 + ranks) * GIB if ranks else GIB // 2
    weights = facts.model.bytes + (facts.drafter.bytes if facts.drafter else 0)
    figures = {
        "available_bytes": facts.memory_available, "needed_bytes": need, "weights_bytes": weights,
        "swap_used_bytes": facts.swap_total - facts.swap_free,
    }  # fmt: skip
    if facts.memory_available < need:
        summary = f"{size(facts.memory_available)} of memory available, {size(need)} needed at the least"
        hint = "ps aux --sort=-rss | head on the host"
        if state is not None and state.running:
            return unsure("memory", f"{summary}; the running service gives some back", hint, **figures)
        return failed("memory", summary, hint, **figures)
    cold = ""
    if weights > facts.memory_available:
        cold = f"; {size(weights)} of weights do not fit the page cache: every load comes from disk"
    return passed("memory", f"{size(facts.memory_available)} of memory available{cold}", **figures)


def _shm(target: Target, facts: Facts, state: UnitState | None) -> list[CheckResult]:
    if target.host.gpu is None or target.local_gpus < 2:
        return []
    place = facts.shm
    if place is None or not place.mount:
        return [
            failed(
                "shm",
                "there is no /dev/shm: ranks could not exchange data",
                "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
            )
        ]
    running = state is not None and state.running
    room = place.total if running else place.free
    figures = {"free_bytes": place.free, "total_bytes": place.total, "needed_bytes": NCCL_ROOM}
    if room >= NCCL_ROOM:
        return [passed("shm", f"{size(place.free)} free in /dev/shm", **figures)]
    return [
        failed(
            "shm",
            f"{size(room)} in /dev/shm; NCCL wants {size(NCCL_ROOM)} for {target.local_gpus} ranks, or it fails to "
            "initialise",
            "ls -lS /dev/shm; mount -o remount,size=16G /dev/shm",
            **figures,
        )
    ]


def _granted(
    wanted: int | Literal["infinity"], hard: int | None, ceiling: int | None, may_raise: bool
) -> int | None:
    """What a unit gets of a limit, None: no limit. systemd silently takes the nearest it may set (rlimit-util.c)."""
    ask = None if wanted == "infinity" else wanted
    if may_raise and (ceiling is None or (ask is not None and ask <= ceiling)):
        return ask
    limits = [limit for limit in (ask, hard) if limit is not None]
    return min(limits) if limits else None


def _limits(target: Target, facts: Facts) -> CheckResult:
    limits = target.service.limits
    if facts.may_raise is None:
        return unsure(
            "limits",
            "what systemd may grant could not be read from /proc/1",
            "systemctl show --property=LimitNOFILE",
        )
    files = _granted(limits.nofile, facts.nofile_limit, facts.nr_open, facts.may_raise)
    locked = _granted(limits.memlock, facts.memlock_limit, None, facts.may_raise)
    figures = {"nofile": files, "memlock": locked, "nr_open": facts.nr_open, "may_raise": facts.may_raise}
    problems, hints = [], []
    if files is not None and (limits.nofile == "infinity" or files < limits.nofile):
        few = f", and sglang wants {OPEN_FILES}" if files < OPEN_FILES else ""
        problems.append(f"LimitNOFILE={limits.nofile} becomes {files} without a word{few}")
        hints.append(
            f"set limits.nofile to {facts.nr_open} or less"
            if facts.may_raise
            else "give the container CAP_SYS_RESOURCE, or a higher limit"
        )
    if locked is not None and (limits.memlock == "infinity" or locked < limits.memlock):
        problems.append(
            f"LimitMEMLOCK={limits.memlock} becomes {size(locked)}: pinned buffers of NCCL may fail"
        )
        hints.append("give the container CAP_SYS_RESOURCE, or --ulimit memlock=-1")
    if problems:
        return unsure("limits", "; ".join(problems), "; ".join(dict.fromkeys(hints)), **figures)
    return passed("limits", f"limits as asked: nofile {limits.nofile}, memlock {limits.memlock}", **figures)


def _user(target: Target, facts: Facts) -> list[CheckResult]:
    user = facts.user
    if user is None:
        return []
    if not user.exists:
        hint = f"useradd --system --create-home {user.name}, or leave user out of the service"
        return [failed("user", f"the host has no user {user.name}", hint)]
    if user.error:
        return [
            unsure(
                "user",
                f"what {user.name} may read is not known: {user.error}",
                "connect as root or with sudo",
            )
        ]
    if user.denied:
        return [
            failed(
                "user",
                f"{user.name} may not read or run {count(user.denied_count, 'file')} of the service, first "
                f"{user.denied[0]}",
                f"sudo -u {user.name} ls -l {user.denied[0]}; every folder above it must be open to {user.name} too",
                *(Evidence("access(2)", path) for path in user.denied),
            )
        ]
    if not user.home_there:
        hint = f"mkdir -p {user.home} && chown {user.name} {user.home}"
        return [
            unsure("user", f"{user.name} has no home {user.home}: compiled kernels cannot be cached", hint)
        ]
    return [passed("user", f"{user.name} reads model and venv")]


def _port(target: Target, owners: Sequence[PortOwner]) -> CheckResult:
    service = target.service
    strangers = [owner for owner in owners if owner.unit != service.unit]
    if strangers:
        return failed(
            "port",
            f"port {service.port} is taken by {'; '.join(owner.describe() for owner in strangers)}",
            f"stop it, or give the service another port: --set port={service.port + 1}",
        )
    return passed("port", f"port {service.port} {'ours' if owners else 'free'}", port=service.port)


def _crash(target: Target, facts: Facts, state: UnitState | None) -> list[CheckResult]:
    """``failed`` after a planned stop is no crash: sglang ends itself by SIGKILL either way."""
    if state is None:
        return []
    unit, hint = target.service.unit, f"ddtree-ops diagnose {target.host.name}"
    run = _telling_run(facts)
    ending = _ending(facts, run)
    figures = {
        "result": state.result, "n_restarts": state.n_restarts, "coredumps": list(facts.coredumps),
    }  # fmt: skip
    evidence = [
        Evidence("journal", entry.message, time=entry.time.isoformat())
        for entry in run
        if entry.message_id in {MessageId.EXITED, MessageId.FAILED, MessageId.OUT_OF_MEMORY}
    ]
    if state.sub_state == "auto-restart":
        said = f"{unit} is in a restart loop: {state.describe()}"
        return [unsure("crash", said, hint, *evidence, **figures)]
    if state.result == "start-limit-hit":
        said = f"{unit} used up its starts (start-limit-hit) and stays down; a deploy resets that"
        return [unsure("crash", said, hint, *evidence, **figures)]
    hard = state.result not in {"", "success", "signal", "timeout"} and not ending.planned
    if not state.running and (ending.crashed or hard):
        how = ending.exit or f"Result={state.result}"
        ended = next(
            (entry.time for entry in run if entry.message_id == MessageId.EXITED), state.state_change
        )
        said = f"a run of {unit} crashed{_ago(facts, ended)}: {how}"
        return [unsure("crash", said, hint, *evidence, **figures)]
    if state.n_restarts and (state.running or not ending.planned):
        said = f"systemd restarted {unit} {count(state.n_restarts, 'time')} since it was started"
        return [unsure("crash", said, hint, *evidence, **figures)]
    if facts.coredumps:
        said = (
            f"{count(len(facts.coredumps), 'core dump')} of {unit} in this boot, last {facts.coredumps[-1]}"
        )
        return [unsure("crash", said, f"coredumpctl info COREDUMP_UNIT={unit}", **figures)]
    return [passed("crash", "no crash of the unit on record", **figures)]


def _telling_run(facts: Facts) -> list[Entry]:
    """What systemd said of the newest run of this boot that crashed within a day, else of the newest run."""
    runs: dict[str, list[Entry]] = {}
    for entry in facts.entries:
        if entry.invocation:
            runs.setdefault(entry.invocation, []).append(entry)
    for run in reversed(runs.values()):
        if _ending(facts, run).crashed and facts.time - run[-1].time.timestamp() < REMEMBERED_S:
            return run
    return next(reversed(runs.values()), [])


def _ending(facts: Facts, run: list[Entry]) -> Ending:
    """How a run ended; a node of a service over several hosts ends by itself once its head was stopped, as planned."""
    return Ending.of(run, planned=bool(run) and run[0].invocation in facts.planned_ends)


def _ago(facts: Facts, moment: datetime | None) -> str:
    if moment is None:
        return ""
    seconds = max(0.0, (datetime.fromtimestamp(facts.time, UTC) - moment).total_seconds())
    for length, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f" {seconds / length:.0f} {word} ago"
    return f" {seconds:.0f} s ago"


def _kernel(target: Target, facts: Facts) -> list[CheckResult]:
    """GPU faults and kills of this boot. Containers see no kernel log: nothing to judge there."""
    if not facts.kernel_lines:
        if facts.container:
            return []
        return [
            unsure("kernel", "the journal holds no line of the kernel", "journalctl --dmesg -n 5 on the host")
        ]
    faults = [line for line in facts.kernel if "NVRM: Xid" in line]
    kills = [line for line in facts.kernel if "oom-kill:" in line and target.service.unit in line]
    evidence = [Evidence("kernel", line) for line in [*faults[-3:], *kills[-3:]]]
    if faults:
        said = (
            f"{count(len(faults), 'GPU fault')} (Xid) in this boot, last: {faults[-1].partition('NVRM: ')[2]}"
        )
        hint = "nvidia-smi -q on the host; the number after Xid is explained in NVIDIA's Xid catalogue"
        return [unsure("kernel", said, hint, *evidence, faults=len(faults), kills=len(kills))]
    if kills:
        said = f"the kernel killed processes of {target.service.unit} for want of memory in this boot"
        return [
            unsure("kernel", said, f"ddtree-ops diagnose {target.host.name}", *evidence, kills=len(kills))
        ]
    return [passed("kernel", f"no GPU fault and no kill in {facts.kernel_lines} lines of the kernel")]
