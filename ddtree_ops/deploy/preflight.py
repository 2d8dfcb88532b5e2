"""What must hold on the host before anything is changed: one request, many facts, all problems at once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_ops.errors import RemoteError
from ddtree_ops.inventory.models import Target
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.service.control import PortOwner

__all__ = ["PROBE", "Facts", "judge", "parse_facts", "probe_argv"]

# Runs on the host with its own python3 (>= 3.8), facts as one JSON object on stdout. Data comes as arguments.
PROBE = r"""
import glob, json, os, subprocess, sys
want = json.loads(sys.argv[1])
def out(*argv):
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20)
        return [done.returncode, done.stdout.decode("utf-8", "replace").strip()]
    except OSError as error:
        return [127, str(error)]
    except subprocess.TimeoutExpired:
        return [124, "no answer in 20 s"]
def free(path):
    while not os.path.exists(path):
        path = os.path.dirname(path)
    info = os.statvfs(path)
    return [info.f_bavail * info.f_frsize, info.f_favail if info.f_files else -1]
def size(path):
    return os.path.getsize(path) if os.path.isfile(path) else 0
def weights(path):
    index = os.path.join(path, "model.safetensors.index.json")
    if not os.path.isfile(os.path.join(path, "config.json")):
        return {"config": False}
    try:
        with open(index) as file:
            shards = sorted(set(json.load(file)["weight_map"].values()))
    except FileNotFoundError:
        shards = sorted(os.path.basename(name) for name in glob.glob(os.path.join(glob.escape(path), "*.safetensors")))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return {"config": True, "shards": 0, "missing": [], "error": "model.safetensors.index.json: %s" % error}
    missing = [name for name in shards if not size(os.path.join(path, name))]
    return {"config": True, "shards": len(shards), "missing": missing}
python = os.path.join(want["venv"], "bin", "python")
print(json.dumps({
    "uid": os.geteuid(),
    "systemd": out("systemctl", "--version"),
    "journal": out("journalctl", "-n", "1", "-o", "json", "--no-pager", "-q"),
    "persistent_journal": os.path.isdir("/var/log/journal"),
    "free": free(want["root"]),
    "python": [os.path.exists(python), os.access(python, os.X_OK)],
    "model": weights(want["model"]),
    "drafter": weights(want["drafter"]) if want["drafter"] else None,
    "gpus": out("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader") if want["gpu"] else None,
}))
"""

_NEEDED_BYTES = 512 << 20
_NEEDED_INODES = 10_000
_MINIMUM_SYSTEMD = 240


@dataclass(frozen=True)
class Facts:
    """What the probe found. Sizes in bytes; ``gpus`` is None where the inventory asks for none."""

    uid: int
    systemd: int | None
    journal_readable: bool
    journal_persistent: bool
    free_bytes: int
    free_inodes: int
    python_exists: bool
    python_executable: bool
    model: Mapping[str, Any]
    drafter: Mapping[str, Any] | None
    gpus: tuple[tuple[str, str], ...] | None
    gpu_error: str = ""


def probe_argv(target: Target) -> list[str]:
    """The command that gathers the facts; everything variable travels as one JSON argument."""
    want = {
        "root": target.host.deploy_root,
        "venv": target.service.venv,
        "model": target.service.model,
        "drafter": target.service.drafter,
        "gpu": target.host.gpu is not None,
    }
    return [target.host.ssh.python, "-I", "-S", "-c", PROBE, json.dumps(want)]


def parse_facts(stdout: bytes, stderr: bytes = b"") -> Facts:
    """Facts from the probe's output.

    :raises RemoteError: the output is not the probe's; ``stderr`` says why.
    """
    try:
        raw = json.loads(stdout)
    except ValueError:
        raise RemoteError(
            "the preflight probe gave no answer",
            hint="does ssh.python of the inventory name a working Python >= 3.8?",
            details=tuple(stderr.decode("utf-8", "replace").splitlines()[-5:]),
        ) from None
    version = re.search(r"systemd (\d+)", raw["systemd"][1]) if raw["systemd"][0] == 0 else None
    gpus: tuple[tuple[str, str], ...] | None = None
    gpu_error = ""
    if raw["gpus"] is not None:
        status, text = raw["gpus"]
        rows = [line.rsplit(",", 1) for line in text.splitlines() if "," in line] if status == 0 else []
        gpus = tuple((name.strip(), "sm" + cap.strip().replace(".", "")) for name, cap in rows)
        gpu_error = "" if status == 0 else text.splitlines()[0] if text else f"exit {status}"
    return Facts(
        uid=raw["uid"],
        systemd=int(version[1]) if version else None,
        journal_readable=raw["journal"][0] == 0 and raw["journal"][1].startswith("{"),
        journal_persistent=raw["persistent_journal"],
        free_bytes=raw["free"][0],
        free_inodes=raw["free"][1],
        python_exists=raw["python"][0],
        python_executable=raw["python"][1],
        model=raw["model"],
        drafter=raw["drafter"],
        gpus=gpus,
        gpu_error=gpu_error,
    )


def judge(
    target: Target, facts: Facts, owners: Sequence[PortOwner], *, drop_ins: Sequence[str] = ()
) -> list[CheckResult]:
    """One result a fact; pure.

    :param owners: who listens on the service's port, where it would be in the way.
    :param drop_ins: files besides the unit file from which systemd takes settings of the unit.
    """
    service = target.service
    gib = facts.free_bytes / 2**30
    results = [
        _result(
            "sudo", facts.uid == 0, "root on the host", "not root on the host", "check `sudo -n true` there"
        ),
        _result(
            "systemd",
            facts.systemd is not None and facts.systemd >= _MINIMUM_SYSTEMD,
            f"systemd {facts.systemd}",
            f"systemd is {facts.systemd or 'not there'}, {_MINIMUM_SYSTEMD} or newer is needed",
        ),
        _result(
            "journal", facts.journal_readable, "journal readable", "the journal cannot be read, or is empty"
        ),
        _result(
            "disk",
            facts.free_bytes >= _NEEDED_BYTES
            and (facts.free_inodes < 0 or facts.free_inodes >= _NEEDED_INODES),
            f"{gib:.1f} GiB free",
            f"{gib:.1f} GiB and {facts.free_inodes} inodes free below {target.host.deploy_root}; "
            f"{_NEEDED_BYTES / 2**30:.1f} GiB and {_NEEDED_INODES} inodes are needed",
        ),
        _result(
            "venv",
            facts.python_executable,
            "venv there",
            f"{service.venv}/bin/python is {'not executable' if facts.python_exists else 'missing'}",
        ),
        _weights("model", service.model, facts.model),
    ]
    if service.drafter and facts.drafter is not None:
        results.append(_weights("drafter", service.drafter, facts.drafter))
    strangers = [owner for owner in owners if owner.unit != service.unit]
    results.append(
        _result(
            "port",
            not strangers,
            f"port {service.port} {'ours' if owners else 'free'}",
            f"port {service.port} is taken by {'; '.join(owner.describe() for owner in strangers)}",
            f"stop it, or give the service another port: --set port={service.port + 1}",
        )
    )
    if target.host.gpu is not None:
        results.append(_gpus(target, facts))
    if drop_ins:
        results.append(
            CheckResult(
                "preflight.drop-ins",
                Verdict.INCONCLUSIVE,
                f"settings of {service.unit} also come from {', '.join(drop_ins)}, which the plan does not show",
                hint="put them into the inventory and remove the file",
            )
        )
    return results


def _weights(what: str, path: str, found: Mapping[str, Any]) -> CheckResult:
    if not found.get("config"):
        return _result(what, False, "", f"{path}: no config.json there")
    missing: Sequence[str] = found["missing"]
    if found.get("error") or missing or not found["shards"]:
        problem = found.get("error") or (
            f"{len(missing)} of {found['shards']} shards are missing or empty, first {missing[0]}"
            if missing
            else "no safetensors there"
        )
        return _result(what, False, "", f"{path}: {problem}", "finish the download before deploying")
    return _result(what, True, f"{what} complete ({found['shards']} shards)", "")


def _gpus(target: Target, facts: Facts) -> CheckResult:
    gpu = target.host.gpu
    assert gpu is not None
    if facts.gpu_error or not facts.gpus:
        return CheckResult(
            "preflight.gpu",
            Verdict.INCONCLUSIVE,
            f"nvidia-smi gave nothing: {facts.gpu_error or 'no GPU listed'}",
        )
    wrong = sorted(
        {f"{name} ({arch})" for name, arch in facts.gpus if arch.rstrip("af") != gpu.arch.rstrip("af")}
    )
    ok = len(facts.gpus) == gpu.count and not wrong
    found = f"{len(facts.gpus)}x {facts.gpus[0][0]} ({facts.gpus[0][1]})"
    return _result("gpu", ok, found, f"{gpu.count}x {gpu.name} ({gpu.arch}) expected, found {found}")


def _result(name: str, ok: bool, good: str, bad: str, hint: str = "") -> CheckResult:
    return CheckResult(
        f"preflight.{name}",
        Verdict.PASS if ok else Verdict.FAIL,
        good if ok else bad,
        hint="" if ok else hint,
    )
