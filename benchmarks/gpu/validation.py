"""The command itself on one GPU: deploy, validate, lossless, acceptance and bench of the real sglang 0.5.11.

    validation.py pack SITE.tar.xz PACKED         on a machine with apt and pip: everything that the GPU machine lacks
    validation.py run PACKED OUT --steps A,B      on the GPU machine, as root; nothing is installed on it
    validation.py models FOLDER                   the tiny models alone (torch)

``run`` makes a host out of the GPU machine itself: a writable layer over its own root (tmpfs), with systemd, journald and
sshd of its own distribution put in, booted as process 1 of its own namespaces, with the machine's devices and driver. Then
``ddtree-ops`` of this checkout works on it over SSH, as it does on any host (inventory ``validation.yaml``): nothing of a
command's own way is left out. SITE is made by ``make_site.py``. Steps: see ``STEPS``.

OUT gets ``steps/NN-NAME.txt`` (the command line, its exit status, what it said), the reports, journals and what the server
and nvidia-smi say of themselves, all in ``result.tar.xz``, and ``run.log``. Machine paths are replaced.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INVENTORY = HERE / "validation.yaml"
RUNTIMES = ("sglang-0.5.11-ddtree", "sglang-0.5.11-unpatched")
HOST_PACKAGES = ("systemd", "dbus", "openssh-server", "openssh-client")
VENV = "/opt/venv-sglang"
TORCH = "/opt/torch/.venv/lib/python3.12/site-packages"
"""Where the GPU machine has torch and triton."""
MORE = ("datasets==5.2.0", "multiprocess==0.70.19", "openai-harmony==0.0.8")
"""Of the venv, beside SITE: what bench_serving and the start of a server import."""
CLIENT = (
    *(
        "fabric>=3.2,<4",
        "paramiko>=3.4,<6",
        "typer>=0.12,<1",
        "httpx>=0.27,<1",
        "pyyaml>=6.0,<7",
        "rich>=13.7,<16",
    ),
    *("tenacity>=8.3,<10", "pydantic>=2.7,<3", "packaging>=23", "google-re2>=1.1.20240702"),
)
SSH_PORT = 22022
CONTEXT = 8192
PORTS = {
    "tiny-plain": 30002,
    "tiny-ddtree": 30001,
    "wide-plain": 30004,
    "wide-ddtree": 30003,
    "off-ddtree": 30005,
}
MASKED = (
    *(
        "apt-daily.timer",
        "apt-daily-upgrade.timer",
        "dpkg-db-backup.timer",
        "e2scrub_all.timer",
        "e2scrub_reap.service",
    ),
    *(
        "fstrim.timer",
        "motd-news.timer",
        "console-getty.service",
        "getty@.service",
        "getty-static.service",
        "getty.target",
    ),
    *("serial-getty@.service", "ssh.socket", "systemd-firstboot.service", "systemd-logind.service"),
    *(
        "systemd-networkd.service",
        "systemd-networkd.socket",
        "systemd-pstore.service",
        "systemd-resolved.service",
    ),
    *(
        "systemd-timesyncd.service",
        "systemd-udevd.service",
        "systemd-remount-fs.service",
        "systemd-sysctl.service",
    ),
    *(
        "systemd-modules-load.service",
        "systemd-binfmt.service",
        "systemd-random-seed.service",
        "dev-hugepages.mount",
    ),
    *(
        "systemd-update-utmp.service",
        "keyboard-setup.service",
        "console-setup.service",
        "sys-kernel-debug.mount",
    ),
    *(
        "sys-kernel-tracing.mount",
        "sys-kernel-config.mount",
        "sys-fs-fuse-connections.mount",
        "proc-sys-fs-binfmt_misc.automount",
    ),
    *("dev-mqueue.mount", "systemd-hwdb-update.service", "systemd-ask-password-console.path"),
)
BOOT = """\
set -eu
root=$1
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
umount -l "$root/sys/fs/cgroup" 2>/dev/null || true
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 run "$root/run"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
if [ -d /usr/local/nvidia ]; then mount --bind /usr/local/nvidia "$root/usr/local/nvidia"; fi
hostname h200
cd "$root"
mkdir -p .old
pivot_root . .old
umount -l /.old
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
    /usr/lib/systemd/systemd --system --unit=multi-user.target --show-status=no --log-target=journal-or-kmsg \\
    </dev/null >/dev/null 2>&1
"""


def say(*words: object) -> None:
    print(f"{time.monotonic() - BEGUN:7.1f} s ", *words, flush=True)


BEGUN = time.monotonic()


def call(*argv: object, **more: object) -> subprocess.CompletedProcess[str]:
    """Run a command. :raises CalledProcessError: it failed; its output is on the error."""
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL, **more}
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False, **given)
    if done.returncode:
        say("failed:", *argv, "\n", done.stdout[-1500:], done.stderr[-1500:])
        done.check_returncode()
    return done


# ---------------------------------------------------------------------------------------------------------- pack


def pack(args: argparse.Namespace) -> None:
    """``OUT/site.tar.xz``, ``OUT/debs``, wheels for the venv and the client, the built runtime as a cache of ddtree-ops."""
    sys.path.insert(0, str(HERE))
    import make_site

    args.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(args.site, args.out / "site.tar.xz")
    shutil.copytree(args.debs, args.out / "debs", dirs_exist_ok=True)
    make_site.download(MORE, args.out / "venv")
    platforms = [word for tag in make_site.PLATFORMS for word in ("--platform", tag)]
    call(
        *(sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--python-version", "3.12"),
        *("--implementation", "cp", *platforms, "-d", args.out / "client", *CLIENT),
    )
    with tempfile.TemporaryDirectory(dir=args.out) as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        for runtime in RUNTIMES:
            whole = (sys.executable, "-m", "ddtree_ops", "-i", INVENTORY, "runtime", "build", runtime)
            call(*whole, env={**environment, "DDTREE_GPU_WORK": cache}, cwd=ROOT)
        shutil.rmtree(Path(cache, "ddtree-ops", "wheels"), ignore_errors=True)
        alike: dict[str, Path] = {}
        for path in sorted(Path(cache).rglob("tree/**/*")):
            if path.is_file():
                first = alike.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
                if first is not path:
                    path.unlink()
                    path.hardlink_to(first)
        with tarfile.open(args.out / "cache.tar.gz", "w:gz", compresslevel=6) as archive:
            archive.add(cache, ".")
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {size / 2**20:.1f} MiB")


def unpack(packed: Path, payload: Path) -> None:
    """What :func:`pack` wrote, as the run wants it: ``venv``, ``client``, ``host``, ``cache``. What is there stays."""
    sys.path.insert(0, str(HERE))
    import make_site

    def site() -> None:
        with tarfile.open(packed / "site.tar.xz") as archive:
            archive.extractall(payload / "venv", filter="tar")

    def host() -> None:
        for deb in sorted((packed / "debs").glob("*.deb")):
            call("dpkg-deb", "-x", deb, payload / "host")

    def cache() -> None:
        with tarfile.open(packed / "cache.tar.gz") as archive:
            archive.extractall(payload / "cache", filter="tar")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(job)
            for name, job in (("host", host), ("cache", cache))
            if not (payload / name).is_dir()
        ]
        if not (payload / "client").is_dir():
            jobs.append(pool.submit(make_site.unpack, packed / "client", payload / "client", ()))
        if not (payload / "venv").is_dir():
            jobs.append(pool.submit(site))
        for each in jobs:
            each.result()
    make_site.unpack(packed / "venv", payload / "venv", ())


# -------------------------------------------------------------------------------------------------------- models


def models(out: Path) -> None:
    """``tiny`` and ``wide`` with drafters: ``lower`` and ``wide`` of ``tiny_models.py``, a longer context; ``off/tiny``."""
    sys.path[:0] = [str(HERE), str(ROOT / "tests/ddtree/cpu")]
    import make_models
    import tiny_models
    from safetensors.torch import load_file, save_file

    for name, value in {
        "BLOCK": 8,
        "CONTEXT": CONTEXT,
        "HIDDEN": 256,
        "HEADS": 4,
        "KV_HEADS": 2,
        "HEAD_DIM": 64,
        "MLP": 512,
    }.items():
        assert hasattr(make_models, name), name
        setattr(make_models, name, value)
    make_models.CONFIG.update(
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
    )
    make_models.pair(out, "lower", make_models.SPOKEN, (make_models.NEVER[0], *make_models.SPOKEN))
    tiny_models.wide_pair(make_models, out)
    for end in ("", "-draft"):
        (out / f"lower{end}").rename(out / f"tiny{end}")
    shutil.copytree(out / "tiny", out / "off" / "tiny")
    weights = load_file(out / "tiny" / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"] *= 0.5
    save_file(weights, out / "off" / "tiny" / "model.safetensors")


# ---------------------------------------------------------------------------------------------------------- host


class Host:
    """The host that is made of this machine.

    :param lower: whose root it has.
    """

    def __init__(self, work: Path, payload: Path, lower: Path) -> None:
        self.work, self.payload, self.lower = work, payload, lower
        self.root = work / "host" / "root"
        self.keys = work / "keys"
        self.process: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        """The layer and what is put in; nothing runs yet."""
        base = self.work / "host"
        base.mkdir(parents=True)
        call("mount", "-t", "tmpfs", "-o", "mode=755", "host", base)
        for part in ("upper", "work", "root"):
            (base / part).mkdir()
        options = f"lowerdir={self.lower},upperdir={base}/upper,workdir={base}/work"
        call("mount", "-t", "overlay", "-o", options, "host", self.root)
        call("mount", "--bind", "/dev", self.root / "dev")
        packed = subprocess.Popen(["tar", "-C", self.payload / "host", "-c", "."], stdout=subprocess.PIPE)
        call("tar", "-C", self.root, "-x", "--keep-directory-symlink", "--no-same-owner", stdin=packed.stdout)
        self._users()
        self._sshd()
        self._venv()
        for unit in MASKED:
            self._link(f"etc/systemd/system/{unit}", "/dev/null")
        self._link(
            "etc/systemd/system/multi-user.target.wants/ssh.service", "/usr/lib/systemd/system/ssh.service"
        )
        self._link("usr/local/bin/nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi")
        self._write("etc/ld.so.conf.d/nvidia.conf", "/usr/local/nvidia/lib64\n")
        self._write("etc/fstab", "")
        (self.root / ".dockerenv").unlink(missing_ok=True)  # the host is no container's inside
        self._write("etc/hostname", "h200\n")
        self._write("etc/machine-id", hashlib.sha256(os.urandom(8)).hexdigest()[:32] + "\n")
        self._write(
            "etc/systemd/journald.conf.d/10-run.conf", "[Journal]\nStorage=persistent\nReadKMsg=yes\n"
        )
        (self.root / "var/log/journal").mkdir(parents=True, exist_ok=True)
        (self.root / "usr/local/nvidia").mkdir(parents=True, exist_ok=True)

    def _write(self, path: str, text: str, mode: int = 0o644) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def _link(self, path: str, target: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)

    def _users(self) -> None:
        passwd, group = self.root / "etc/passwd", self.root / "etc/group"
        for name, number in (
            ("sshd", 911),
            ("messagebus", 912),
            ("systemd-network", 913),
            ("systemd-journal", 914),
        ):
            if f"\n{name}:" not in group.read_text():
                group.write_text(f"{group.read_text()}{name}:x:{number}:\n")
            if f"\n{name}:" not in passwd.read_text():
                shell = f"{name}:x:{number}:{number}::/nonexistent:/usr/sbin/nologin\n"
                passwd.write_text(passwd.read_text() + shell)

    def _sshd(self) -> None:
        self.keys.mkdir(mode=0o700)
        (self.root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
        for name in ("etc/ssh/ssh_host_ed25519_key", "root/.ssh/client"):
            (self.root / name).unlink(missing_ok=True)
            call(
                "chroot", self.root, "/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"/{name}"
            )
        public = (self.root / "root/.ssh/client.pub").read_text()
        self._write("root/.ssh/authorized_keys", public, 0o600)
        shutil.move(self.root / "root/.ssh/client", self.keys / "id_ed25519")
        words = (self.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[:2]
        (self.keys / "known_hosts").write_text(f"[127.0.0.1]:{SSH_PORT} {' '.join(words)}\n")
        self._write(
            "etc/ssh/sshd_config",
            f"ListenAddress 127.0.0.1\nPort {SSH_PORT}\nHostKey /etc/ssh/ssh_host_ed25519_key\nUsePAM no\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUseDNS no\n",
        )

    def _venv(self) -> None:
        """SITE first, then, by a line for ``site``, what the machine has; on record is both."""
        site = f"{VENV}/lib/python3.12/site-packages".lstrip("/")
        (self.root / site).mkdir(parents=True)
        call("cp", "-a", f"{self.payload}/venv/.", self.root / site)
        self._write(f"{VENV}/pyvenv.cfg".lstrip("/"), "home = /usr/bin\nversion = 3.12.3\n")
        self._link(f"{VENV}/bin/python".lstrip("/"), "/usr/bin/python3.12")
        self._write(f"{site}/machine.pth", f"{TORCH}\n")
        there = self.lower / TORCH.lstrip("/")
        known = {path.name.partition("-")[0].lower() for path in (self.root / site).glob("*.dist-info")}
        for info in sorted(there.glob("*.dist-info")) if there.is_dir() else ():
            if info.name.partition("-")[0].lower() not in known:
                self._link(f"{site}/{info.name}", f"{TORCH}/{info.name}")

    def boot(self) -> None:
        """Start its process 1 and wait for sshd. :raises RuntimeError: it does not listen."""
        mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
        tree = next(Path(words[1]) for words in mounts if words[2] == "cgroup2")
        group = tree / "ddtree-host"
        group.mkdir(exist_ok=True)
        control = tree / "cgroup.subtree_control"
        for name in ("memory", "pids", "cpu"):
            try:
                control.write_text(f"+{name}")
            except OSError as error:
                say(f"cgroup controller {name}: {error}")
        call("chroot", self.root, "/sbin/ldconfig")
        enter = f"echo $$ >{group}/cgroup.procs; exec unshare --pid --mount --uts --ipc --cgroup --fork sh -c {shlex.quote(BOOT)} sh {self.root}"
        self.process = subprocess.Popen(
            ["sh", "-c", enter],
            stdin=subprocess.DEVNULL,
            stdout=(self.work / "boot.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", SSH_PORT)) == 0:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"sshd does not listen; {(self.work / 'boot.log').read_text()[-2000:]}")

    def inside(self) -> list[str]:
        """Words that run a command in its namespaces."""
        assert self.process is not None
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return ["nsenter", "-t", found[0], "-m", "-u", "-i", "-p", "-C", "-r", "-w", "--"]

    def end(self) -> None:
        """Kill process 1, with which all others of its namespace end, and take the layer away."""
        if self.process is not None:
            with contextlib.suppress(OSError, IndexError):
                os.kill(int(self.inside()[2]), signal.SIGKILL)
            self.process.wait(20)
        for mount in (self.root, self.work / "host"):
            subprocess.run(["umount", "-l", str(mount)], capture_output=True, check=False)


# --------------------------------------------------------------------------------------------------------- steps


class Run:
    """One run: the host, the steps, what they said."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.work: Path = args.work
        self.payload = self.work / "payload"
        self.kept = self.out / "result"
        self.inventory: Path = args.inventory
        self.host = Host(self.work, self.payload, args.lower)
        self.number = 0
        self.summary: list[dict[str, object]] = []
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("DDTREE_", "PYTHON"))},
            "PYTHONPATH": f"{self.payload}/client:{ROOT}",
            "PYTHONPYCACHEPREFIX": str(self.work / "pycache"),
            "XDG_CACHE_HOME": str(self.payload / "cache"),
            "XDG_STATE_HOME": str(self.work / "state"),
            "XDG_CONFIG_HOME": str(self.work / "config"),
            "DDTREE_GPU_WORK": str(self.work),
            "NO_COLOR": "1",
            "COLUMNS": "150",
            "LC_ALL": "C.UTF-8",
        }

    def ops(self, name: str, *words: object, limit_s: float = 400, expected: int = 0) -> None:
        """One command of ``ddtree-ops``; what it said is kept, and its exit status beside the one that is expected."""
        self.number += 1
        place = self.kept / "steps" / f"{self.number:02d}-{name}.txt"
        argv = [str(word) for word in words]
        whole = [self.args.python, "-m", "ddtree_ops", "-i", str(self.inventory), *argv]
        begun = time.monotonic()
        with place.open("w") as sink:
            sink.write(f"$ ddtree-ops -i {self.inventory} {shlex.join(argv)}\n")
            sink.flush()
            try:
                code = subprocess.run(
                    whole, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=self.environment,
                    cwd=self.work, timeout=max(1.0, min(limit_s, BEGUN + self.args.limit + 90 - begun)), check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = 124
            seconds = round(time.monotonic() - begun, 1)
            sink.write(f"[exit status {code}, {seconds} s]\n")
        self.summary.append(
            {
                "step": name,
                "command": shlex.join(argv),
                "status": code,
                "expected": expected,
                "seconds": seconds,
            }
        )
        say(f"{name}: exit status {code}, {seconds} s")
        if code != expected:
            say("  " + "\n    ".join(place.read_text().splitlines()[-12:]))

    def look(self, name: str, *argv: str) -> None:
        """What a program on the host says, as it is."""
        done = subprocess.run(
            [*self.host.inside(), *argv],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        (self.kept / "seen" / f"{name}.txt").write_text(
            f"$ {shlex.join(argv)}\n{done.stdout}{done.stderr}[exit status {done.returncode}]\n"
        )

    def prepare(self) -> None:
        """Unpack, make and boot the host, make the models, read once what every start reads."""
        for folder in (self.kept / "steps", self.kept / "seen", self.work):
            folder.mkdir(parents=True, exist_ok=True)
        unpack(self.args.payload, self.payload)
        say("making the host")
        self.host.make()
        self.host.boot()
        say("sshd listens")
        if self.args.models:
            call("cp", "-a", f"{self.args.models}/.", self.host.root / "srv/models")
        else:
            (self.host.root / "srv/models").mkdir(parents=True, exist_ok=True)
            self._make_models()
            say("models made")

    def _make_models(self) -> None:
        place = self.host.root / "srv/make"
        (place / "tests/ddtree/cpu").mkdir(parents=True)
        (place / "benchmarks/gpu").mkdir(parents=True)
        shutil.copy(ROOT / "tests/ddtree/cpu/make_models.py", place / "tests/ddtree/cpu")
        for name in ("tiny_models.py", "validation.py"):
            shutil.copy(HERE / name, place / "benchmarks/gpu")
        call(
            *self.host.inside(),
            f"{VENV}/bin/python",
            "-B",
            "/srv/make/benchmarks/gpu/validation.py",
            "models",
            "/srv/models",
        )

    def warm(self) -> subprocess.Popen[bytes]:
        """Read and compile what a start imports, while other things are done."""
        program = "import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.qwen3"
        words = ["env", "PYTHONPYCACHEPREFIX=/opt/ddtree-ops/pycache", "SGLANG_IS_FLASHINFER_AVAILABLE=false"]
        words += ["LD_LIBRARY_PATH=/usr/local/nvidia/lib64", f"{VENV}/bin/python", "-c", program]
        return subprocess.Popen(
            [*self.host.inside(), *words],
            stdin=subprocess.DEVNULL,
            stdout=(self.out / "warm.log").open("wb"),
            stderr=subprocess.STDOUT,
        )

    # -- the steps -----------------------------------------------------------------------------------------------

    def doctor(self) -> None:
        self.ops("doctor", "doctor", "h200", "--all", expected=8)
        self.look("gpu-idle", "nvidia-smi")

    def deploy(self) -> None:
        """All services at once: they share the GPU, and a start waits for one core most of the time."""
        with concurrent.futures.ThreadPoolExecutor(len(self.args.services)) as pool:
            for name in self.args.services:
                pool.submit(self.ops, f"deploy-{name}", "deploy", "h200", "--service", name)
                time.sleep(6)
        for name in self.args.services:
            self.ops(f"status-{name}", "status", "h200", "-s", name)
        fields = (
            "index,uuid,name,compute_cap,memory.total,memory.used,driver_version,persistence_mode,mig.mode.current,"
            "ecc.errors.uncorrected.volatile.total"
        )
        plain = "--format=csv,noheader,nounits"
        self.look("gpu", "nvidia-smi")
        self.look("gpu-query", "nvidia-smi", f"--query-gpu={fields}", plain)
        self.look("gpu-memory", "nvidia-smi", "--query-gpu=memory.used", plain)
        self.look(
            "gpu-apps", "nvidia-smi", "--query-compute-apps=pid,process_name,used_memory,gpu_uuid", plain
        )
        self.look("kernel", "journalctl", "--dmesg", "--output=cat", "--quiet", "--no-pager", "--lines=20")
        for name in self.args.services:
            self.look(f"server-info-{name}", "python3", "-c", _GET.format(port=PORTS[name]))

    def golden(self, name: str) -> Path:
        """The golden file of a target: of this run, or the one that was brought."""
        mine = self.kept / f"golden-{name}.json"
        return mine if mine.is_file() or self.args.golden is None else self.args.golden / mine.name

    def record(self) -> None:
        """Golden files of the targets alone."""
        for name in ("tiny", "wide"):
            if f"{name}-plain" in self.args.services:
                golden = self.kept / f"golden-{name}.json"
                self.ops(f"record-{name}", "validate", "h200", "-s", f"{name}-plain", "--record", golden)

    def validate(self) -> None:
        """The suite standard against the target alone, as a control, and against DDTREE with the golden file."""
        self.ops(
            "standard-plain",
            "validate",
            "h200",
            "-s",
            "tiny-plain",
            "--suite",
            "standard",
            *self._into("standard-plain"),
        )
        golden = ("--golden", self.golden("tiny"))
        words = ("validate", "h200", "-s", "tiny-ddtree", "--suite", "standard", *golden)
        self.ops("standard-ddtree", *words, *self._into("standard-ddtree"))

    def lossless(self) -> None:
        """Against the live baseline, and the other model; each again, for what comes by chance."""
        checks = ("--check", "lossless", "--check", "acceptance")
        self.ops(
            "lossless-live", "validate", "h200", "-s", "tiny-ddtree", *checks, *self._into("lossless-live")
        )
        if "wide-ddtree" in self.args.services:
            golden = ("--golden", self.golden("wide"))
            words = ("validate", "h200", "-s", "wide-ddtree", *checks)
            self.ops("lossless-wide", *words, *golden, *self._into("lossless-wide"))
            self.ops("lossless-wide-live", *words, *self._into("lossless-wide-live"))

    def off(self) -> None:
        """Another target behind the same name: the check has to fail."""
        words = (
            "validate",
            "h200",
            "-s",
            "off-ddtree",
            "--check",
            "lossless",
            "--golden",
            self.golden("tiny"),
        )
        self.ops("lossless-off", *words, *self._into("lossless-off"), expected=5)

    def crash(self) -> None:
        """The runtime without the patch: the deploy has to fail, say why, and put back what ran."""
        words = ("deploy", "h200", "-s", "tiny-ddtree", "--runtime", "sglang-0.5.11-unpatched")
        self.ops("crash-deploy", *words, "--set", "environment.DDTREE_SKIP_SELF_CHECK=1", expected=7)
        self.ops(
            "crash-after",
            "validate",
            "h200",
            "-s",
            "tiny-ddtree",
            "--check",
            "short-chat",
            *self._into("crash-after"),
        )
        self.ops("crash-history", "history", "h200", "-s", "tiny-ddtree")

    def full(self) -> None:
        """What standard leaves out: flush, abort, wide bursts, over-long."""
        suite = self.work / "rest.yaml"
        suite.write_text(_REST)
        name = "wide-ddtree" if "wide-ddtree" in self.args.services else "tiny-ddtree"
        self.ops("rest", "validate", "h200", "-s", name, "--suite", suite, *self._into("rest"))

    def smoke(self) -> None:
        self.ops("smoke", "smoke", "h200", "-s", "tiny-ddtree")
        self.ops("drift", "drift", "h200", "-s", "tiny-ddtree")
        self.ops("diagnose", "diagnose", "h200", "-s", "tiny-ddtree")
        self.ops("stats", "logs", "h200", "-s", "tiny-ddtree", "--stats")

    def bench(self) -> None:
        """By sglang.bench_serving."""
        self._bench("bench-serving", "bench_serving", "--budgets", "16")

    def own(self) -> None:
        """By our own generator."""
        self._bench("bench-own", "own", "--budgets", "16")

    def _bench(self, name: str, generator: str, *more: str) -> None:
        words = ("bench", "run", "h200", "-s", "tiny-ddtree", "--generator", generator, "--yes", *more)
        load = ("--concurrency", "1,8", "--requests", "16", "--max-tokens", "128")
        self.ops(name, *words, *load, *self._into(name), limit_s=500)
        self.ops(f"{name}-status", "status", "h200", "-s", "tiny-ddtree")

    def _into(self, name: str) -> tuple[object, ...]:
        return ("--report-dir", self.kept / "reports" / name)

    def keep(self) -> None:
        """Journals, kernels, the archive."""
        for name in self.args.services:
            self.look(
                f"journal-{name}",
                "journalctl",
                "-u",
                f"sglang-{name}.service",
                "--output=short-iso",
                "--no-pager",
            )
        self.look(
            "kernel-end", "journalctl", "--dmesg", "--output=cat", "--quiet", "--no-pager", "--lines=20"
        )
        self.look("units", "systemctl", "list-units", "--failed", "--no-pager")
        names = {
            str(self.work): "WORK",
            str(ROOT): "REPO",
            str(self.out): "OUT",
            str(self.args.golden): "GOLDEN",
            socket.gethostname(): "gpu-host",
        }
        sys.path.insert(0, str(HERE))
        from evidence import mask_machine

        facts = {
            "began": self.began,
            "revision": self.args.revision,
            "steps": self.summary,
            "python": sys.version.split()[0],
            "tree_sha256": _digest(ROOT / "ddtree_ops"),
        }
        (self.kept / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
        for path in sorted(self.kept.rglob("*")):
            if path.is_file() and path.suffix not in (".xz", ".gz"):
                text = path.read_text("utf-8", errors="surrogateescape")
                path.write_text(mask_machine(text, names), "utf-8", errors="surrogateescape")
        with tarfile.open(self.out / "result.tar.xz", "w:xz", preset=6) as archive:
            archive.add(self.kept, "result")
        shutil.rmtree(self.kept)

    def all(self) -> None:
        """Prepare, then the steps; a step that breaks does not keep the next from being tried."""
        self.began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.prepare()
        warm = self.warm() if self.args.warm else None
        try:
            for name in self.args.steps:
                if time.monotonic() - BEGUN > self.args.limit:
                    say(f"{name}: not run, {self.args.limit:.0f} s are over")
                    self.summary.append({"step": name, "status": None, "why": "no time was left"})
                    continue
                say(f"[{name}]")
                try:
                    STEPS[name](self)
                except Exception as error:
                    say(f"{name} broke: {error!r}")
                    self.summary.append({"step": name, "status": None, "why": repr(error)[:500]})
        finally:
            if warm is not None and warm.poll() is None:
                warm.kill()
            self.keep()
            self.host.end()
        say("done")


STEPS: dict[str, Callable[[Run], None]] = {
    name: getattr(Run, name)
    for name in (
        "doctor",
        "deploy",
        "record",
        "validate",
        "lossless",
        "off",
        "smoke",
        "full",
        "crash",
        "own",
        "bench",
    )
}
_GET = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{port}/server_info', timeout=20).read().decode())"
_REST = """\
schema: 1
name: rest
description: What standard leaves out, shorter than in full.
checks:
  - flush
  - needle: {depths: [0.1, 0.5, 0.9]}
  - garbage: {prompts: [quicksort, table, json, reason, chinese, long, count], max_tokens: 256}
  - burst: {widths: [8, 16, 32]}
  - abort
  - endurance: {requests: 96, seconds: 20}
  - over-long
  - steady: {window: 5}
"""


def _digest(folder: Path) -> str:
    """Of all Python files below a folder, by name and content."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _listed(text: str) -> Sequence[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description="Deploy, validate and bench on one GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("pack")
    one.add_argument("site", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument(
        "--debs", type=Path, required=True, help=f"packages of {', '.join(HOST_PACKAGES)} and what they need"
    )
    one = commands.add_parser("models")
    one.add_argument("out", type=Path)
    one = commands.add_parser("run")
    one.add_argument("payload", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--work", type=Path, default=Path("/var/tmp/ddtree-gpu"))
    one.add_argument("--steps", type=_listed, default=list(STEPS))
    one.add_argument("--services", type=_listed, default=list(PORTS))
    one.add_argument("--limit", type=float, default=450, help="seconds after which no further step is begun")
    one.add_argument("--revision", default="")
    one.add_argument("--golden", type=Path, help="folder with golden files of an earlier run")
    one.add_argument(
        "--lower", type=Path, default=Path("/"), help="another root than this machine's, to try it"
    )
    one.add_argument("--inventory", type=Path, default=INVENTORY)
    one.add_argument("--models", type=Path)
    one.add_argument("--python", default="/usr/bin/python3.12", help="runs ddtree-ops")
    one.add_argument("--no-warm", dest="warm", action="store_false")
    args = parser.parse_args()
    for name in ("out", "work", "payload", "inventory", "models", "golden", "site", "debs"):
        if getattr(args, name, None) is not None:
            setattr(args, name, getattr(args, name).resolve())
    if args.command == "pack":
        pack(args)
    elif args.command == "models":
        models(args.out)
    else:
        unknown = [name for name in args.steps if name not in STEPS]
        if unknown:
            parser.error(f"no such step: {', '.join(unknown)}")
        args.out.mkdir(parents=True, exist_ok=True)
        Run(args).all()


if __name__ == "__main__":
    main()
