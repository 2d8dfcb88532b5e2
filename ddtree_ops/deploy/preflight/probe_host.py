"""Facts of a host, as one JSON object: runs there in the agent (Python >= 3.8), standard library only.

:mod:`ddtree_ops.deploy.preflight.facts` reads this file as text and sends it as a ``program`` of the agent, which
calls :func:`answer`; what varies comes as one JSON object. Nothing is judged here and nothing is changed. Commands run side by side, in the C locale; of
weights only the safetensors headers are read, so that 590 GB take no longer than their 64 headers.
"""

# Python 3.8, and quick to start on the host: no pathlib, no typing.
# ruff: noqa: PTH100, PTH110, PTH112, PTH113, PTH118, PTH120, PTH123, PTH208, UP031, B905
from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["GPU_FIELDS", "answer", "look_at_model"]

AUDIT_BYTES = 1 << 18
COMMAND_LIMIT_S = 20.0
GPU_FIELDS = (
    "index,uuid,name,compute_cap,memory.total,memory.used,driver_version,persistence_mode,mig.mode.current,"
    "ecc.errors.uncorrected.volatile.total"
)
KERNEL_WORDS = ("NVRM: Xid", "oom-kill:", "Out of memory: Killed process", "Memory cgroup out of memory")
KERNEL_LINES = 5000
MAX_HEADER = 100 << 20
UNFINISHED = (".incomplete", ".part", ".partial", ".tmp", ".aria2", ".crdownload")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "spiece.model",
)
CONFIG_KEYS = (
    "architectures",
    "auto_map",
    "block_size",
    "dflash_config",
    "hidden_size",
    "max_position_embeddings",
    "max_seq_len",
    "max_sequence_length",
    "model_max_length",
    "model_type",
    "num_hidden_layers",
    "num_target_layers",
    "rope_scaling",
    "seq_length",
    "target_layer_ids",
    "vocab_size",
)
JOURNAL_FIELDS = (
    "MESSAGE,MESSAGE_ID,PRIORITY,UNIT,INVOCATION_ID,JOB_TYPE,JOB_RESULT,UNIT_RESULT,EXIT_CODE,EXIT_STATUS,"
    "N_DROPPED,COREDUMP_UNIT,COREDUMP_SIGNAL_NAME,COREDUMP_PID,_PID"
)
COREDUMP_ID = "fc2e22bc6ee647b6b90729ab34a250b1"
SUPPRESSED_ID = "a596d6fe7bfa4994828e72309e95d61e"


class Command:
    """A command under way; ``answer`` is ``[exit status, output]``: 127 not there, 126 may not be run, 124 too slow."""

    def __init__(self, start: Callable[[list[str]], subprocess.Popen[bytes]], argv: list[str]) -> None:
        self.ends = time.monotonic() + COMMAND_LIMIT_S
        self.failed: list[Any] | None = None
        try:
            self.child = start(argv)
        except OSError as error:
            self.failed = [127 if error.errno == 2 else 126, error.strerror or str(error)]

    def answer(self) -> list[Any]:
        if self.failed is not None:
            return self.failed
        try:
            said = self.child.communicate(timeout=max(0.1, self.ends - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.communicate()
            return [124, "no answer in %.0f s" % COMMAND_LIMIT_S]
        return [self.child.returncode, said.decode("utf-8", "replace").strip()]


def text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as source:
            return source.read()
    except OSError:
        return ""


def nearest(path: str) -> str:
    """The path itself, or the folder in which it would be made."""
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def file_system(path: str) -> dict[str, Any]:
    place = nearest(os.path.abspath(path))
    info = os.statvfs(place)
    root = os.geteuid() == 0
    return {
        "path": place,
        "there": place == os.path.abspath(path),
        "folder": os.path.isdir(place),
        "total": info.f_blocks * info.f_frsize,
        "free": (info.f_bfree if root else info.f_bavail) * info.f_frsize,
        "block": info.f_frsize,
        "inodes": ((info.f_ffree if root else info.f_favail) if info.f_files else -1),
        "read_only": bool(info.f_flag & os.ST_RDONLY),
        "noexec": bool(info.f_flag & os.ST_NOEXEC),
    }


def memory() -> dict[str, int]:
    found = {}
    for line in text_of("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree"):
            found[name] = int(value.split()[0]) * 1024
    return found


def shared_memory() -> dict[str, Any] | None:
    if not os.path.isdir("/dev/shm"):
        return None
    return dict(file_system("/dev/shm"), mount=os.path.ismount("/dev/shm"))


def manager() -> dict[str, Any]:
    """What PID 1 may hand out: its own hard limits, its right to raise them, and the kernel's ceiling for files."""
    found: dict[str, Any] = {"nofile": None, "memlock": None, "may_raise": None, "nr_open": None}
    for line in text_of("/proc/1/limits").splitlines():
        for key, name in (("nofile", "Max open files"), ("memlock", "Max locked memory")):
            if line.startswith(name):
                hard = line[len(name) :].split()[1]
                found[key] = None if hard == "unlimited" else int(hard)
    caps = re.search(r"^CapEff:\s*([0-9a-f]+)", text_of("/proc/1/status"), re.MULTILINE)
    if caps:
        found["may_raise"] = bool(int(caps.group(1), 16) >> 24 & 1)  # CAP_SYS_RESOURCE
    ceiling = text_of("/proc/sys/fs/nr_open").strip()
    found["nr_open"] = int(ceiling) if ceiling.isdigit() else None
    return found


def planned_ends(root: str, unit: str) -> list[str]:
    """Runs of the unit that the end of the audit says were stopped as asked for, by InvocationID."""
    try:
        with open(os.path.join(root, "audit.jsonl"), "rb") as source:
            source.seek(max(0, source.seek(0, 2) - AUDIT_BYTES))
            lines = source.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            act = json.loads(line)
            if act["service"] == unit and act.get("invocation"):
                found.append(str(act["invocation"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found


def clock_is_synchronised() -> bool | None:
    """As ``timedatectl`` decides it: the kernel's adjtimex(2), without a word to D-Bus."""
    try:
        import ctypes

        buffer = ctypes.create_string_buffer(512)
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
        if state < 0:
            return None
        # struct timex: modes, offset, freq, maxerror ... in longs; synchronised below 16 s of possible error
        maxerror = struct.unpack_from("@lll", buffer.raw, struct.calcsize("@l"))[2]
        return bool(maxerror < 16000000)
    except (ImportError, OSError, AttributeError, struct.error):
        return None


def journal_storage() -> dict[str, bool]:
    machine = text_of("/etc/machine-id").strip()
    return {
        "persistent": os.path.exists("/var/log/journal/%s/system.journal" % machine),
        "volatile": os.path.exists("/run/log/journal/%s/system.journal" % machine),
    }


def in_container() -> bool:
    return os.path.exists("/run/systemd/container") or os.path.exists("/run/host/container-manager")


def kernel_log(answer: list[Any]) -> dict[str, Any]:
    status, text = answer
    lines = text.splitlines() if status == 0 else []
    telling = [line for line in lines if any(word in line for word in KERNEL_WORDS)]
    return {"lines": len(lines), "telling": telling[-50:]}


# ---------------------------------------------------------------------------------------------------- weights


def read_json(path: str) -> Any:
    with open(path, encoding="utf-8") as source:
        return json.load(source)


def data_end(item: dict[str, Any]) -> int:
    end = item["data_offsets"][1]
    if not isinstance(end, int):
        raise TypeError(end)
    return end


def header_of(path: str) -> tuple[int, dict[str, Any], str]:
    """``(file size, tensors, problem)`` of a safetensors file: 8 bytes of length, JSON, then the data."""
    size = 0
    try:
        if os.path.lexists(path) and not os.path.isfile(path):
            return 0, {}, "no file" if os.path.exists(path) else "a link to nothing"
        with open(path, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            if size == 0:
                return 0, {}, "empty"
            head = source.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if head == b"version ":
                return size, {}, "a Git LFS pointer, not the file itself"
            if not 2 <= length <= MAX_HEADER or 8 + length > size:
                return size, {}, "no safetensors header in its first %d bytes" % size
            tensors = json.loads(source.read(length).decode("utf-8"))
            tensors.pop("__metadata__", None)
            end = max([data_end(item) for item in tensors.values()] or [0])
    except OSError as error:
        return 0, {}, error.strerror or str(error)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return size, {}, "its safetensors header cannot be read"
    wanted = 8 + length + end
    if size != wanted:
        return (
            size,
            tensors,
            "%d bytes long, its header says %d: %s"
            % (
                size,
                wanted,
                "cut off" if size < wanted else "too long",
            ),
        )
    return size, tensors, ""


def headers_of(paths: list[str]) -> list[tuple[int, dict[str, Any], str]]:
    """:func:`header_of` each, a few at a time: the first is as slow as the disk, or the network behind it."""
    found: list[tuple[int, dict[str, Any], str]] = [(0, {}, "not looked at")] * len(paths)

    def work(first: int) -> None:
        for number in range(first, len(paths), 4):
            found[number] = header_of(paths[number])

    workers = [threading.Thread(target=work, args=(first,), daemon=True) for first in range(1, 4)]
    for worker in workers:
        worker.start()
    work(0)
    for worker in workers:
        worker.join()
    return found


def shard_names(path: str) -> tuple[list[str], dict[str, list[str]], int | None]:
    """``(names, tensors by shard as the index has them, total_size)``; without an index by what lies there."""
    try:
        index = read_json(os.path.join(path, "model.safetensors.index.json"))
    except FileNotFoundError:
        names = {name for name in os.listdir(path) if name.endswith(".safetensors")}
        for name in list(names):
            part = re.match(r"(.*-)(\d+)-of-(\d+)(\.safetensors)$", name)
            if part and int(part.group(3)) <= 10000:
                width, last = len(part.group(2)), int(part.group(3))
                for number in range(1, last + 1):
                    names.add("%s%0*d-of-%s%s" % (part.group(1), width, number, part.group(3), part.group(4)))
        return sorted(names), {}, None
    wanted: dict[str, list[str]] = {}
    for tensor, shard in index["weight_map"].items():
        if not isinstance(shard, str) or not shard or "\0" in shard:
            raise ValueError("%r is no name of a file" % (shard,))
        wanted.setdefault(shard, []).append(tensor)
    total = (index.get("metadata") or {}).get("total_size")
    if not isinstance(total, (int, float)) or not abs(total) < 1 << 63:
        return sorted(wanted), wanted, None
    return sorted(wanted), wanted, int(total)


def config_of(path: str) -> dict[str, Any]:
    config = read_json(os.path.join(path, "config.json"))
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else config
    return {
        "top": {key: config[key] for key in CONFIG_KEYS if key in config},
        "text": {key: inner[key] for key in CONFIG_KEYS if key in inner},
    }


def unfinished(path: str) -> Iterator[str]:
    """Leftovers of a download: beside the weights, and where huggingface_hub keeps its own."""
    for folder in (path, os.path.join(path, ".cache", "huggingface", "download")):
        try:
            entries = os.listdir(folder)
        except OSError:
            continue
        for name in sorted(entries):
            if name.endswith(UNFINISHED):
                yield os.path.relpath(os.path.join(folder, name), path)


def look_at_model(path: str) -> dict[str, Any]:
    """A model folder: configuration, index against shards and their headers, tokenizer, leftovers of downloads."""
    found: dict[str, Any] = {
        "folder": os.path.isdir(path), "config": None, "error": "", "shards": 0, "missing": [], "broken": [],
        "bytes": 0, "total_size": None, "misplaced": 0, "unfinished": list(unfinished(path)), "tokenizer": [],
        "code_missing": [], "files": [],
    }  # fmt: skip
    try:
        found["config"] = config_of(path)
    except FileNotFoundError:
        return found
    except (ValueError, AttributeError, TypeError, OSError, RecursionError) as error:
        found["error"] = "config.json: %s" % error
        return found
    try:
        names, wanted, found["total_size"] = shard_names(path)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        found["error"] = "model.safetensors.index.json: %s" % error
        return found
    found["shards"] = len(names)
    found["files"] = names
    for name, (_, tensors, problem) in zip(names, headers_of([os.path.join(path, name) for name in names])):
        if not os.path.lexists(os.path.join(path, name)) or problem == "empty":
            found["missing"].append(name)
        elif problem:
            found["broken"].append([name, problem])
        else:
            found["bytes"] += max([data_end(item) for item in tensors.values()] or [0])
            found["misplaced"] += sum(1 for tensor in wanted.get(name, ()) if tensor not in tensors)
    there = os.listdir(path)
    found["tokenizer"] = sorted(name for name in there if name in TOKENIZERS or name.endswith(".tiktoken"))
    mapped = found["config"]["top"].get("auto_map") or {}
    for value in mapped.values() if isinstance(mapped, dict) else ():
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and "--" not in word and word.partition(".")[0] + ".py" not in there:
                found["code_missing"].append(word.partition(".")[0] + ".py")
    found["code_missing"] = sorted(set(found["code_missing"]))
    return found


# ------------------------------------------------------------------------------------------------------- venv


def packages(venv: str, version: str) -> tuple[dict[str, list[str]], list[list[str]]]:
    """From every dist-info of the venv: versions by normalised name, and plugins of sglang. Nothing is imported."""
    found: dict[str, list[str]] = {}
    plugins: list[list[str]] = []
    folders = set()
    for lib in ("lib", "lib64"):
        folders.add(os.path.realpath(os.path.join(venv, lib, "python" + version, "site-packages")))
    for folder in sorted(folders):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in sorted(names):
            if not name.endswith(".dist-info"):
                continue
            try:
                with open(os.path.join(folder, name, "METADATA"), "rb") as source:
                    head = source.read(4096).decode("utf-8", "replace")
            except OSError:
                continue
            project = re.search(r"^Name:\s*(\S+)", head, re.MULTILINE)
            number = re.search(r"^Version:\s*(\S+)", head, re.MULTILINE)
            if project and number:
                key = re.sub(r"[-_.]+", "-", project.group(1)).lower()
                versions = found.setdefault(key, [])
                if number.group(1) not in versions:
                    versions.append(number.group(1))
                points = text_of(os.path.join(folder, name, "entry_points.txt"))
                group = re.search(
                    r"^\[sglang\.srt\.plugins\]$(.*?)(?=^\[|\Z)", points, re.MULTILINE | re.DOTALL
                )
                rows = re.findall(r"^(\S+)\s*=\s*(\S+)", group.group(1), re.MULTILINE) if group else []
                plugins += [[key, plugin, value] for plugin, value in rows]
    return found, plugins


def look_at_venv(venv: str, answer: list[Any]) -> dict[str, Any]:
    python = os.path.join(venv, "bin", "python")
    match = re.match(r"Python (\d+\.\d+)(\S*)", answer[1]) if answer[0] == 0 else None
    settings = text_of(os.path.join(venv, "pyvenv.cfg")).lower().replace(" ", "")
    installed, plugins = packages(venv, match.group(1)) if match else ({}, [])
    return {
        "there": os.path.lexists(python),
        "executable": os.access(python, os.X_OK),
        "version": match.group(1) if match else "",
        "said": answer[1][:300],
        "outside": "include-system-site-packages=true" in settings,
        "packages": installed,
        "plugins": plugins,
    }


# ------------------------------------------------------------------------------------------------------- user


def look_as_user(name: str, files: list[str], programs: list[str], folders: list[str]) -> dict[str, Any]:
    """What a user may not read or run, found out by becoming that user in a child process."""
    import pwd

    found: dict[str, Any] = {
        "name": name,
        "exists": True,
        "home": "",
        "home_there": False,
        "denied": [],
        "denied_count": 0,
        "error": "",
    }
    try:
        entry = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError:
        found["exists"] = False
        return found
    found["home"], found["home_there"] = entry.pw_dir, os.path.isdir(entry.pw_dir)
    if os.geteuid() != 0 and os.geteuid() != entry.pw_uid:
        found["error"] = "only root can find out what %s may read" % name
        return found
    asked = [(path, os.R_OK) for path in files] + [(path, os.X_OK) for path in programs + folders]
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    out, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups(groups)
                os.setgid(entry.pw_gid)
                os.setuid(entry.pw_uid)
            denied = [path for path, right in asked if not os.access(path, right)]
            os.write(sink, json.dumps([len(denied), denied[:20]]).encode())
            os._exit(0)
        except BaseException as error:
            os.write(sink, json.dumps(str(error)).encode())
            os._exit(1)
    os.close(sink)
    with os.fdopen(out, "rb") as source:
        said = json.loads(source.read().decode() or '"no answer"')
    os.waitpid(child, 0)
    if isinstance(said, list):
        found["denied_count"], found["denied"] = said
    else:
        found["error"] = said
    return found


# -------------------------------------------------------------------------------------------------------- GPUs


def gpu_processes(answer: list[Any]) -> list[dict[str, Any]]:
    found = []
    for line in answer[1].splitlines() if answer[0] == 0 else ():
        words = [word.strip() for word in line.split(",")]
        if len(words) < 4 or not words[0].isdigit():
            continue
        found.append({
            "pid": int(words[0]), "name": ",".join(words[1:-2]), "mib": words[-2], "gpu": words[-1],
            "cgroup": text_of("/proc/%s/cgroup" % words[0]),
        })  # fmt: skip
    return found


def answer(want: dict[str, Any], start: Callable[[list[str]], subprocess.Popen[bytes]]) -> dict[str, Any]:
    """All facts. ``want``: ``root``, ``venv``, ``model``, ``drafter``, ``user``, ``unit``, ``gpu``.

    :param start: starts a command in the C locale, its output and errors in one pipe.
    """
    began = time.time()
    journal = ["journalctl", "--quiet", "--no-pager"]
    asked = {
        "systemd": ["systemctl", "--version"],
        "journal": [*journal, "--lines=1", "--output=json"],
        "unit": [
            *journal, "--boot", "--output=json", "--all", "--reverse", "--lines=60",
            "--output-fields=" + JOURNAL_FIELDS, "MESSAGE_ID=" + SUPPRESSED_ID, "+",
            "MESSAGE_ID=" + COREDUMP_ID, "COREDUMP_UNIT=" + want["unit"], "+", "_PID=1", "UNIT=" + want["unit"],
        ],
        "kernel": [*journal, "--boot", "--dmesg", "--output=short-unix", "--lines=%d" % KERNEL_LINES],
        "python": [os.path.join(want["venv"], "bin", "python"), "-V"],
    }  # fmt: skip
    if want["gpu"]:
        plain = "--format=csv,noheader,nounits"
        asked["gpus"] = ["nvidia-smi", "--query-gpu=" + GPU_FIELDS, plain]
        fields = "pid,process_name,used_memory,gpu_uuid"
        asked["processes"] = ["nvidia-smi", "--query-compute-apps=" + fields, plain]
    commands = {name: Command(start, argv) for name, argv in asked.items()}
    model = look_at_model(want["model"])
    drafter = look_at_model(want["drafter"]) if want["drafter"] else None
    user = None
    if want["user"]:
        needed = []
        for path, looked in ((want["model"], model), (want["drafter"], drafter)):
            if looked and looked["config"]:
                needed += [os.path.join(path, name) for name in ["config.json"] + looked["files"]]
        folders = [nearest(want["root"])]
        user = look_as_user(want["user"], needed, [os.path.join(want["venv"], "bin", "python")], folders)
    answers = {name: command.answer() for name, command in commands.items()}
    return {
        "time": began,
        "uid": os.geteuid(),
        "machine": os.uname().machine,
        "container": in_container(),
        "systemd": answers["systemd"],
        "journal": dict(journal_storage(), read=[answers["journal"][0], answers["journal"][1][:300]]),
        "unit": answers["unit"],
        "kernel": kernel_log(answers["kernel"]),
        "synchronised": clock_is_synchronised(),
        "planned_ends": planned_ends(want["root"], want["unit"]),
        "root": file_system(want["root"]),
        "memory": memory(),
        "shm": shared_memory(),
        "manager": manager(),
        "venv": look_at_venv(want["venv"], answers["python"]),
        "model": model,
        "drafter": drafter,
        "user": user,
        "gpus": answers.get("gpus"),
        "processes": gpu_processes(answers["processes"]) if want["gpu"] else [],
        "driver_loaded": os.path.exists("/proc/driver/nvidia/version"),
    }
