"""What the probe on the host found, typed. The request for it, and the parser of its answer; pure.

Sizes are bytes, times seconds since the epoch by the host's clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Request
from ddtree_ops.service.journal import Entry, parse_entries

__all__ = [
    "Answer",
    "Facts",
    "GPUFacts",
    "Model",
    "Place",
    "Process",
    "UserFacts",
    "Venv",
    "parse_facts",
    "probe_request",
]


@dataclass(frozen=True)
class Answer:
    """What a command answered: exit status (127 not there, 126 may not be run, 124 too slow) and output."""

    status: int
    text: str

    @property
    def first_line(self) -> str:
        """The first line of the output, or the exit status where it said nothing."""
        return next(
            (line.strip() for line in self.text.splitlines() if line.strip()), f"exit status {self.status}"
        )


@dataclass(frozen=True)
class Place:
    """A path, or the nearest folder above it that is there, and its file system; ``inodes`` -1: not counted."""

    path: str
    there: bool
    folder: bool
    total: int
    free: int
    block: int
    inodes: int
    read_only: bool
    noexec: bool
    mount: bool = False


@dataclass(frozen=True)
class Model:
    """A model folder.

    :param top: of config.json what the checks look at; ``text`` the same of its ``text_config``. None: no config.json.
    :param shards: files that the index (or the numbering of the names) wants; ``missing`` are not there or empty.
    :param broken: ``(file, problem)``: header and size do not agree.
    :param bytes: tensors of the whole shards; ``total_size`` what the index says, or None.
    :param misplaced: tensors that the index looks for in a shard whose header does not have them.
    """

    folder: bool
    top: Mapping[str, Any] | None
    text: Mapping[str, Any]
    error: str
    shards: int
    missing: tuple[str, ...]
    broken: tuple[tuple[str, str], ...]
    bytes: int
    total_size: int | None
    misplaced: int
    unfinished: tuple[str, ...]
    tokenizer: tuple[str, ...]
    code_missing: tuple[str, ...]


@dataclass(frozen=True)
class Venv:
    """The serving venv: ``version`` of its Python (``3.12``), versions of its packages by normalised name.

    :param outside: it also sees the packages of the system's Python, which were not looked at.
    :param plugins: package, name and value of every entry point by which sglang finds a plugin.
    """

    there: bool
    executable: bool
    version: str
    said: str
    outside: bool
    packages: Mapping[str, tuple[str, ...]]
    plugins: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class UserFacts:
    """The user of the unit; ``denied``: the first of the service's files that this user may not read or run."""

    name: str
    exists: bool
    home: str
    home_there: bool
    denied: tuple[str, ...]
    denied_count: int
    error: str


@dataclass(frozen=True)
class GPUFacts:
    """One row of ``nvidia-smi --query-gpu``; memory in MiB, ``arch`` as ``sm120``; None: it did not say."""

    index: str
    uuid: str
    name: str
    arch: str
    memory_mib: float | None
    used_mib: float | None
    driver: str
    persistence: str
    mig: str
    ecc_errors: int | None


@dataclass(frozen=True)
class Process:
    """A process with memory on a GPU, in MiB; ``units`` are the systemd units in its control group."""

    pid: int
    name: str
    mib: float
    gpu: str
    units: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """What the probe found.

    :param planned_ends: runs that were stopped as asked for, by InvocationID, as far as the audit says.
    :param entries: of this boot, oldest first: systemd's words on the unit, its core dumps, what journald suppressed.
    :param kernel: telling lines of the kernel's log of this boot; ``kernel_lines`` is how many were looked at.
    :param synchronised: the kernel's clock is held by NTP or PTP; None: it did not say.
    :param smi: the answer of nvidia-smi; None where the inventory names no GPUs.
    :param nofile_limit: hard limit of PID 1, None: unlimited; ``memlock_limit`` likewise, in bytes.
    :param may_raise: PID 1 may raise limits above its own (CAP_SYS_RESOURCE).
    """

    time: float
    uid: int
    machine: str
    container: bool
    systemd: int | None
    journal: Answer
    journal_persistent: bool
    journal_volatile: bool
    planned_ends: tuple[str, ...]
    entries: tuple[Entry, ...]
    coredumps: tuple[str, ...]
    kernel: tuple[str, ...]
    kernel_lines: int
    synchronised: bool | None
    root: Place
    memory_total: int
    memory_available: int
    swap_total: int
    swap_free: int
    shm: Place | None
    nofile_limit: int | None
    memlock_limit: int | None
    may_raise: bool | None
    nr_open: int | None
    venv: Venv
    model: Model
    drafter: Model | None
    user: UserFacts | None
    smi: Answer | None
    gpus: tuple[GPUFacts, ...] = ()
    processes: tuple[Process, ...] = ()
    driver_loaded: bool = False


@cache
def _source() -> bytes:
    return (Path(__file__).parent / "probe_host.py").read_bytes()


def probe_request(target: Target) -> Request:
    """The one request that gathers the facts; the probe travels as text, all that varies as one JSON object."""
    service = target.service
    want = {
        "root": target.host.deploy_root,
        "venv": service.venv,
        "model": service.model,
        "drafter": service.drafter,
        "user": service.user if service.user != "root" else None,
        "unit": service.unit,
        "gpu": target.host.gpu is not None,
    }
    return Request("program", {"name": "preflight", "given": want}, _source())


def parse_facts(answer: bytes) -> Facts:
    """Facts from the probe's answer."""
    raw = json.loads(answer)
    systemd = Answer(*raw["systemd"])
    version = re.search(r"systemd (\d+)", systemd.text) if systemd.status == 0 else None
    entries, dumps = _journal(Answer(*raw["unit"]))
    venv, user, memory, manager = raw["venv"], raw["user"], raw["memory"], raw["manager"]
    smi = Answer(*raw["gpus"]) if raw["gpus"] is not None else None
    return Facts(
        time=raw["time"],
        uid=raw["uid"],
        machine=raw["machine"],
        container=raw["container"],
        systemd=int(version[1]) if version else None,
        journal=Answer(*raw["journal"]["read"]),
        journal_persistent=raw["journal"]["persistent"],
        journal_volatile=raw["journal"]["volatile"],
        planned_ends=tuple(raw["planned_ends"]),
        entries=entries,
        coredumps=dumps,
        kernel=tuple(raw["kernel"]["telling"]),
        kernel_lines=raw["kernel"]["lines"],
        synchronised=raw["synchronised"],
        root=Place(**raw["root"]),
        memory_total=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", 0),
        swap_total=memory.get("SwapTotal", 0),
        swap_free=memory.get("SwapFree", 0),
        shm=Place(**raw["shm"]) if raw["shm"] else None,
        nofile_limit=manager["nofile"],
        memlock_limit=manager["memlock"],
        may_raise=manager["may_raise"],
        nr_open=manager["nr_open"],
        venv=Venv(
            **{
                **venv,
                "packages": {name: tuple(found) for name, found in venv["packages"].items()},
                "plugins": tuple((package, name, value) for package, name, value in venv.get("plugins", ())),
            }
        ),
        model=_model(raw["model"]),
        drafter=_model(raw["drafter"]) if raw["drafter"] else None,
        user=UserFacts(**{**user, "denied": tuple(user["denied"])}) if user else None,
        smi=smi,
        gpus=_gpus(smi),
        processes=tuple(_process(item) for item in raw["processes"]),
        driver_loaded=raw["driver_loaded"],
    )


def _model(raw: Mapping[str, Any]) -> Model:
    config = raw["config"]
    return Model(
        folder=raw["folder"],
        top=config["top"] if config else None,
        text=config["text"] if config else {},
        error=raw["error"],
        shards=raw["shards"],
        missing=tuple(raw["missing"]),
        broken=tuple((name, problem) for name, problem in raw["broken"]),
        bytes=raw["bytes"],
        total_size=raw["total_size"],
        misplaced=raw["misplaced"],
        unfinished=tuple(raw["unfinished"]),
        tokenizer=tuple(raw["tokenizer"]),
        code_missing=tuple(raw["code_missing"]),
    )


def _journal(answer: Answer) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """Entries oldest first, and one line a core dump of the unit."""
    entries = tuple(parse_entries([answer.text.encode(), b"\n"])) if answer.status == 0 else ()
    dumps = []
    for line in answer.text.splitlines() if answer.status == 0 else ():
        if '"COREDUMP_UNIT"' in line:
            found = json.loads(line)
            dumps.append(
                f"PID {found.get('COREDUMP_PID', '?')}, {found.get('COREDUMP_SIGNAL_NAME', 'a signal')}"
            )
    return entries[::-1], tuple(dumps[::-1])


def _gpus(smi: Answer | None) -> tuple[GPUFacts, ...]:
    if smi is None or smi.status != 0:
        return ()
    rows = []
    for line in smi.text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 10:
            continue
        index, uuid, name, capability, total, used, driver, persistence, mig, ecc = words
        arch = "sm" + capability.replace(".", "")
        errors = _number(ecc)
        rows.append(
            GPUFacts(
                index, uuid, name, arch, _number(total), _number(used), driver, persistence, mig,
                None if errors is None else int(errors),
            )
        )  # fmt: skip
    return tuple(rows)


def _number(word: str) -> float | None:
    """A figure of nvidia-smi; None for ``[N/A]`` and ``[Not Supported]``."""
    try:
        return float(word)
    except ValueError:
        return None


def _process(raw: Mapping[str, Any]) -> Process:
    parts = [part for line in raw["cgroup"].splitlines() for part in line.split(":", 2)[-1].split("/")]
    units = tuple(dict.fromkeys(part for part in parts if part.endswith((".service", ".scope"))))
    return Process(raw["pid"], raw["name"], _number(raw["mib"]) or 0.0, raw["gpu"], units)
