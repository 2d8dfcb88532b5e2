"""Real agents and real sshd processes for the remote layer; the developer's own ~/.ssh and agent stay out of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.remote import ConnectSpec, FileEntry, Session, connect_local, scan_tree

SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr("ddtree_ops.remote.ssh._SYSTEM_KNOWN_HOSTS", ())
    return home


@pytest.fixture(scope="module")
def local() -> Iterator[Session]:
    """An agent on this machine, shared by the tests of a module."""
    with connect_local() as session:
        yield session


@pytest.fixture
def own() -> Iterator[Session]:
    """An agent on this machine that a test may stop or kill."""
    with connect_local() as session:
        yield session


@dataclass
class Tree:
    """A small tree to publish, with its listing and manifest."""

    root: Path
    files: tuple[FileEntry, ...] = ()
    manifest: bytes = b""

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(mode)

    def scan(self) -> Tree:
        self.files = scan_tree(self.root)
        listed = [{"path": e.path, "mode": e.mode, "size": e.size, "sha256": e.sha256} for e in self.files]
        self.manifest = json.dumps({"files": listed}).encode()
        return self


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path / "tree")
    made.write("pkg/__init__.py", b"")
    made.write("pkg/a.py", b"a = 1\n" * 100)
    made.write("pkg/sub/data.bin", bytes(range(256)) * 3000)
    made.write("bin/tool", b"#!/bin/sh\n", 0o755)
    made.write("na\u00efve \u2713 $(x) 'y'.txt", b"text\n")
    return made.scan()


@dataclass
class Server:
    """A running sshd with one host key a type, and a client key that it lets in."""

    folder: Path
    address: str
    port: int
    keys: tuple[str, ...]
    user: str = "root"

    @property
    def known(self) -> str:
        """Right known_hosts lines."""
        return "".join(self.line(kind) for kind in self.keys)

    def line(self, kind: str) -> str:
        words = (self.folder / f"host_{kind}.pub").read_text().split()[:2]
        return f"[{self.address}]:{self.port} {' '.join(words)}\n"

    def fingerprint(self, kind: str) -> str:
        argv = ["ssh-keygen", "-lf", str(self.folder / f"host_{kind}.pub")]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[1]

    def known_hosts(self, text: str | None = None) -> str:
        path = self.folder / f"known_{len(list(self.folder.iterdir()))}"
        path.write_text(self.known if text is None else text)
        return str(path)

    def spec(self, **changes: Any) -> ConnectSpec:
        values: dict[str, Any] = {
            "name": "box",
            "address": self.address,
            "port": self.port,
            "user": self.user,
            "identity_file": str(self.folder / "id"),
            "python": sys.executable,
        }
        if not {"fingerprint", "known_hosts", "config"} & changes.keys():
            values["known_hosts"] = self.known_hosts()
        return ConnectSpec(**(values | changes))


def keygen(path: Path, kind: str = "ed25519") -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "test", "-f", str(path)], check=True)


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


StartSshd = Callable[..., Server]


@pytest.fixture(scope="module")
def start_sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartSshd]:
    """Start an sshd on a loopback address of its own: ``start_sshd(keys=("ed25519",), settings=(...))``."""
    if SSHD is None:
        pytest.skip("sshd is not installed (openssh-server)")
    if os.getuid() != 0:
        pytest.skip("needs root: as another user a session goes through sudo")
    Path("/run/sshd").mkdir(exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []

    def start(keys: tuple[str, ...] = ("ed25519",), settings: tuple[str, ...] = ()) -> Server:
        folder = tmp_path_factory.mktemp("sshd")
        address = f"127.0.9.{len(running) + 1}"
        port = free_port(address)
        for kind in keys:
            keygen(folder / f"host_{kind}", kind)
        keygen(folder / "id")
        keygen(folder / "noisy")
        noisy = (folder / "noisy.pub").read_text().strip()
        forced = f'command="{folder}/noise" '
        (folder / "authorized").write_text((folder / "id.pub").read_text() + forced + noisy + "\n")
        script = folder / "noise"
        script.write_text(
            '#!/bin/sh\necho "Welcome!"\nprintf "%02000d" 0\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n'
        )
        script.chmod(0o755)
        lines = [
            f"Port {port}",
            f"ListenAddress {address}",
            *(f"HostKey {folder}/host_{kind}" for kind in keys),
            f"AuthorizedKeysFile {folder}/authorized",
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "SetEnv SHLVL=1",  # to bash no login: the developer's ~/.bashrc is not run for each connection
            *settings,
        ]
        (folder / "config").write_text("\n".join(lines) + "\n")
        argv = [str(SSHD), "-D", "-e", "-f", str(folder / "config")]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        running.append(process)
        patience = time.monotonic() + 120.0
        while True:
            try:
                socket.create_connection((address, port), timeout=1.0).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > patience:
                    raise AssertionError((folder / "log").read_text()) from None
                time.sleep(0.02)
        return Server(folder, address, port, keys)

    yield start
    for process in running:
        process.terminate()
        process.wait(120)


@pytest.fixture(scope="module")
def sshd(start_sshd: StartSshd) -> Server:
    """One sshd with two kinds of host keys."""
    return start_sshd(keys=("ed25519", "ecdsa"), settings=("MaxStartups 100",))


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Wait for something that must come; fails when it does not."""

    def wait(condition: Callable[[], bool], seconds: float = 300.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "it did not happen"
            time.sleep(0.02)

    return wait


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether a process is there and not a zombie."""

    def look(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
        except OSError:
            return False

    return look
