"""GPUs and driver of a host against the inventory and the venv's torch. Pure."""

from __future__ import annotations

import re

from ddtree_ops.deploy.preflight.facts import Answer, Facts, GPUFacts, Process
from ddtree_ops.deploy.preflight.verdicts import failed, listed, passed, size, unsure
from ddtree_ops.inventory.models import GPU, Target
from ddtree_ops.results import CheckResult, Evidence
from ddtree_ops.service.state import UnitState
from ddtree_ops.wording import count

__all__ = ["judge_gpus"]

DRIVER_OF_CUDA = {11: (450,), 12: (525,), 13: (580,)}
"""Least driver by CUDA major: NVIDIA, CUDA Compatibility, table 1 (minor version compatibility)."""
BLACKWELL = (100, (12, 8))
"""From compute capability 10.0 on kernels must be built with CUDA 12.8 or newer (CUDA 12.8 release notes)."""
LEAST_MEMORY = 0.9
"""Of the inventory's ``memory_gb``: a 288 GB card shows 268 GiB, a 141 GB one 140 GiB."""
TAKEN = 0.1
"""sglang refuses tensor parallelism when a GPU has less than 0.9 of the memory of the others free (model_runner.py)."""


def judge_gpus(target: Target, facts: Facts, state: UnitState | None) -> list[CheckResult]:
    """Presence and kind, driver, memory taken by others, health; only the first where nvidia-smi told nothing."""
    gpu, smi = target.host.gpu, facts.smi
    if gpu is None or smi is None:
        return []
    if smi.status != 0 or not facts.gpus:
        return [_silent(gpu, smi, facts)]
    used = _used(target, facts.gpus)
    return [_kind(gpu, facts), _driver(gpu, facts), _free(target, facts, used, state), _health(facts)]


def _silent(gpu: GPU, smi: Answer, facts: Facts) -> CheckResult:
    """nvidia-smi is not there, fails, or sees no GPU: each its own verdict, none of them a mismatch."""
    evidence = Evidence("nvidia-smi", smi.text[:400] or f"exit status {smi.status}")
    expected = f"{gpu.count}x {gpu.name} expected"
    if smi.status == 127 and facts.driver_loaded:
        summary = "nvidia-smi is not there, though a driver is loaded: GPUs not judged"
        return unsure(
            "gpu", summary, "install nvidia-utils of the driver's version", evidence, state="absent"
        )
    if smi.status == 127:
        summary = f"no NVIDIA driver: nvidia-smi is not there; {expected}"
        return failed(
            "gpu", summary, "install the driver, e.g. nvidia-driver-580-server", evidence, state="absent"
        )
    if smi.status == 124:
        summary = f"nvidia-smi gave {smi.text}: a GPU or the driver hangs; {expected}"
        return failed(
            "gpu", summary, "journalctl --dmesg --grep NVRM; then reboot the host", evidence, state="hangs"
        )
    if smi.status == 2 and "not a valid field" in smi.text:
        summary = f"this nvidia-smi is too old to be asked: {smi.first_line}"
        return unsure("gpu", summary, "update the driver to 525 or newer", evidence, state="too-old")
    if smi.status == 6 or "No devices were found" in smi.text or smi.status == 0:
        summary = f"the driver sees no GPU; {expected}"
        hint = "lspci -d 10de: and journalctl --dmesg --grep NVRM on the host"
        return failed("gpu", summary, hint, evidence, state="no-devices")
    summary = f"nvidia-smi failed (exit status {smi.status}): {smi.first_line}"
    hint = "modprobe nvidia; dkms status: after a kernel update the module may be missing; then reboot"
    return failed("gpu", summary, hint, evidence, state="failing")


def _kind(gpu: GPU, facts: Facts) -> CheckResult:
    found = facts.gpus
    kinds: dict[str, int] = {}
    for one in found:
        memory = f", {one.memory_mib / 1024:.0f} GiB" if one.memory_mib is not None else ""
        text = f"{one.name} ({one.arch}{memory})"
        kinds[text] = kinds.get(text, 0) + 1
    there = ", ".join(f"{number}x {text}" for text, number in kinds.items())
    wrong = [one for one in found if one.arch.rstrip("af") != gpu.arch.rstrip("af")]
    small = [
        one
        for one in found
        if gpu.memory_gb is not None
        and one.memory_mib is not None
        and one.memory_mib / 1024 < LEAST_MEMORY * gpu.memory_gb
    ]
    if len(found) == gpu.count and not wrong and not small:
        return passed("gpu", there, count=len(found), state="right")
    memory = f", {gpu.memory_gb:g} GB" if small else ""
    hint = "correct gpu: in the inventory"
    if len(found) < gpu.count:
        hint = f"lspci -d 10de: | wc -l and journalctl --dmesg --grep 'NVRM|Xid' on the host; or {hint}"
    return failed(
        "gpu", f"{gpu.count}x {gpu.name} ({gpu.arch}{memory}) expected, found {there}", hint,
        count=len(found), state="mismatch",
    )  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _cuda_of(facts: Facts) -> tuple[str, tuple[int, ...]]:
    """The CUDA that the venv's torch was built with: its local version (``+cu130``), or the runtime package beside it."""
    torch = next(iter(facts.venv.packages.get("torch", ())), "")
    match = re.search(r"\+cu(\d+)(\d)$", torch)
    if match:
        return f"torch {torch}", (int(match[1]), int(match[2]))
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        for version in facts.venv.packages.get(name, ()):
            return f"torch {torch} with {name} {version}", _numbers(version)[:2]
    return "", ()


def _driver(gpu: GPU, facts: Facts) -> CheckResult:
    drivers = sorted({one.driver for one in facts.gpus})
    driver, have = drivers[0], _numbers(drivers[0])
    if gpu.driver is not None and have < _numbers(gpu.driver):
        return failed(
            "driver", f"driver {driver} is older than {gpu.driver}, which the inventory asks for",
            "update the driver and reboot, or correct gpu.driver", driver=driver,
        )  # fmt: skip
    what, cuda = _cuda_of(facts)
    if not cuda:
        summary = f"driver {driver}; which CUDA the venv's torch needs is not known"
        return unsure("driver", summary, "pip show torch nvidia-cuda-runtime in the venv", driver=driver)
    least = DRIVER_OF_CUDA.get(cuda[0])
    if least is not None and have < least:
        wanted = ".".join(map(str, least))
        return failed(
            "driver", f"driver {driver} cannot run {what}: CUDA {cuda[0]} needs driver {wanted} or newer",
            f"update the driver to {wanted}, or install a torch for an older CUDA", driver=driver,
        )  # fmt: skip
    first, built = BLACKWELL
    capability = max(int(re.sub(r"\D", "", one.arch) or 0) for one in facts.gpus)
    if capability >= first and cuda < built:
        return failed(
            "driver", f"{what} has no kernels for sm{capability}: that takes CUDA 12.8 or newer",
            "install torch for CUDA 13 (cu130) into the venv", driver=driver,
        )  # fmt: skip
    return passed("driver", f"driver {driver}, {what}", driver=driver)


def _used(target: Target, gpus: tuple[GPUFacts, ...]) -> tuple[GPUFacts, ...]:
    """Those that the service takes; all where the environment chooses."""
    base = target.service.args.get("base-gpu-id", 0)
    if "CUDA_VISIBLE_DEVICES" in target.service.environment or not isinstance(base, int):
        return gpus
    return gpus[base : base + target.local_gpus]


def _free(target: Target, facts: Facts, used: tuple[GPUFacts, ...], state: UnitState | None) -> CheckResult:
    running = state is not None and state.running
    mine = {one.uuid for one in used}
    strangers = [
        process
        for process in facts.processes
        if process.gpu in mine and target.service.unit not in process.units
    ]
    crowded, evidence = [], []
    for one in used:
        by_others = [process for process in strangers if process.gpu == one.uuid]
        taken = sum(process.mib for process in by_others)
        if not running and one.used_mib is not None:
            taken = max(taken, one.used_mib)
        if one.memory_mib and taken > TAKEN * one.memory_mib:
            crowded.append(f"GPU {one.index}: {size(taken * 2**20)}")
        evidence += [Evidence("nvidia-smi", _who(process)) for process in by_others]
    figures = {"strangers": len(strangers), "crowded": crowded}
    who = listed([_who(process) for process in strangers], 2) or "something that nvidia-smi does not show"
    if crowded:
        return failed(
            "gpu-free", f"memory of {listed(crowded)} is taken by {who}: sglang refuses unbalanced GPUs",
            f"stop it: kill {strangers[0].pid}" if strangers else "nvidia-smi and fuser -v /dev/nvidia* on the host",
            *evidence, **figures,
        )  # fmt: skip
    if strangers:
        return unsure(
            "gpu-free", f"other processes on the service's GPUs: {who}", f"is PID {strangers[0].pid} meant to be there?",
            *evidence, **figures,
        )  # fmt: skip
    return passed("gpu-free", f"nobody else on {count(len(used), 'GPU')}", **figures)


def _who(process: Process) -> str:
    unit = f", {process.units[-1]}" if process.units else ""
    return f"{process.name} (PID {process.pid}{unit}, {size(process.mib * 2**20)})"


def _health(facts: Facts) -> CheckResult:
    split = [one.index for one in facts.gpus if one.mig == "Enabled"]
    if split:
        summary = f"MIG splits GPU {listed(split, 8)}: the service wants them whole"
        return failed("gpu-health", summary, f"nvidia-smi -i {','.join(split)} -mig 0, then reboot")
    bad = [f"GPU {one.index}: {one.ecc_errors}" for one in facts.gpus if one.ecc_errors]
    if bad:
        summary = f"uncorrected memory errors since the driver was loaded, {listed(bad)}"
        return unsure("gpu-health", summary, "nvidia-smi -q -d ECC,ROW_REMAPPER; reset the GPU or reboot")
    slow = [one.index for one in facts.gpus if one.persistence == "Disabled"]
    if slow:
        summary = (
            f"persistence mode is off on GPU {listed(slow, 8)}: every start waits for the driver to wake it"
        )
        return unsure(
            "gpu-health", summary, "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1"
        )
    return passed("gpu-health", "no memory errors, persistence mode on")
