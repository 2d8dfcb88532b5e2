"""Fixtures of all layers: a private home, and lab hosts of the test run's own."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import settings
from pydantic import BaseModel, Field

from ddtree_ops import lab as lab_hosts
from ddtree_ops.inventory.models import RuntimeSpec
from ddtree_ops.lab.image import images_dir
from ddtree_ops.paths import INVENTORY_BY_OPTION, cache_dir
from ddtree_ops.report.typed import remember_inventory
from ddtree_ops.runtime import build

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


SIGNALS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
"""What takes them while no command runs in this process."""


class Command:
    """A command under way, as ``subprocess.Popen`` with text pipes is; used as a context manager, it is waited for.

    :param told: gets its process id and its exit status, a line each.
    :param out: the reading end of its standard output.
    :param err: the reading end of its standard error; None where that goes to ``out``.
    """

    def __init__(self, told: socket.socket, out: int, err: int | None) -> None:
        self._told = told
        self._lines = told.makefile("rb", buffering=0)
        self.stdout = os.fdopen(out, encoding="utf-8")
        self.stderr = None if err is None else os.fdopen(err, encoding="utf-8")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()
        self._lines.close()
        self._told.close()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. :raises subprocess.TimeoutExpired: ``timeout`` seconds are over."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("ddtree-ops", timeout or 0.0)
            self.returncode = int(self._lines.readline())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read all that it prints, and wait for the end.

        :raises subprocess.TimeoutExpired: it has been killed.
        """
        with ThreadPoolExecutor(2) as pool:
            streams = [
                pool.submit(stream.read) for stream in (self.stdout, self.stderr) if stream is not None
            ]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            finally:
                texts = [text.result() for text in streams]
        return texts[0], texts[1] if len(texts) == 2 else ""


class Commands:
    """``ddtree-ops`` as a process of its own, without the second or more that importing it takes each time.

    Each is a fork of a process that has imported everything (command_server.py). It is started as usual by ``run`` where
    the variables of the interpreter or its language are others than this process has.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "command_server.py"), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        """End the process that forks."""
        self._socket.close()
        self._server.wait()

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        code: str = "",
        merged: bool = False,
    ) -> Command:
        """Start a command.

        :param argv: the words after ``ddtree-ops``, or after ``python -c CODE``.
        :param env: the whole environment; None for this process's own.
        :param code: a program in the place of ``ddtree-ops``.
        :param merged: whether standard error goes where standard output goes.
        """
        variables = dict(os.environ if env is None else env)
        request = json.dumps({"argv": list(argv), "env": variables, "cwd": str(cwd), "code": code}).encode()
        told, tells = socket.socketpair()
        out, writes_out = os.pipe()
        err, writes_err = (None, os.dup(writes_out)) if merged else os.pipe()
        socket.send_fds(self._socket, [request], [writes_out, writes_err, tells.fileno()])
        os.close(writes_out)
        os.close(writes_err)
        tells.close()
        return Command(told, out, err)

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        timeout: float = 900.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as :meth:`start` starts it.

        :raises subprocess.TimeoutExpired: it took more than ``timeout`` seconds, and was killed.
        """
        if env is not None:
            names = {name for name in (*env, *os.environ) if name.startswith(("PYTHON", "LANG", "LC_"))}
            if any(env.get(name) != os.environ.get(name) for name in names):
                whole = [sys.executable, "-m", "ddtree_ops", *argv]
                return subprocess.run(
                    whole, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout
                )
        with self.start(argv, env=env, cwd=cwd) as command:
            out, err = command.communicate(timeout)
        return subprocess.CompletedProcess(list(argv), command.wait(), out, err)


@pytest.fixture(scope="session")
def commands(private_home: Path) -> Iterator[Commands]:
    """Runs ``ddtree-ops`` for the tests of this worker."""
    made = Commands()
    yield made
    made.close()


@dataclass(frozen=True)
class Lab:
    """Lab hosts of this test run.

    :param hosts: by name, as ``lab.up`` returned them.
    :param env: environment for processes that are to see this lab (``ddtree-ops`` itself).
    :param inventory: the shipped lab inventory.
    :param commands: starts ``ddtree-ops``.
    """

    hosts: dict[str, lab_hosts.LabHost]
    env: dict[str, str]
    inventory: Path
    directory: Path
    commands: Commands

    def reset(self, name: str) -> None:
        """A clean copy of a host at once, with the same addresses and host keys."""
        self.hosts[name] = lab_hosts.reset(name)


def pytest_configure() -> None:
    """Ctrl-C ends what the tests start, also where the test run itself was started in the background and ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Six thousand tests are in memory: by default a fifth of the time of reading them is spent looking for garbage.
    gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish() -> None:
    """What was read is kept to the end: no later look for garbage goes through it again."""
    gc.freeze()


LONG = (
    "test_deploy_guard_lab.py",
    "test_deploy_lab.py",
    "test_deploy_failures.py",
    "test_deploy_hosts_lab.py",
    "test_deploy_nodes_lab.py",
    "test_deploy_router_lab.py",
    "test_bench_lab.py",
    "test_nightly_lab.py",
    "test_deploy_releases_lab.py",
    "test_deploy_look_lab.py",
    "test_deploy_secrets_lab.py",
    "test_lab_hosts.py",
    "test_deploy_interrupted_lab.py",
    "test_deploy_explaining_lab.py",
    "test_deploy_fleet.py",
)
"""Files that take long, the longest first. A file is run by one worker: at the end none waits for the last of these."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then those that need lab hosts, then all others; in each file the order stays."""
    ranks = {name: rank for rank, name in enumerate(LONG)}
    in_lab = {item.path for item in items if item.get_closest_marker("lab")}
    items.sort(key=lambda item: ranks.get(item.path.name, len(LONG) + (item.path not in in_lab)))


@pytest.fixture(scope="session", autouse=True)
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The developer's ssh keys, agent, settings and running lab stay out of the tests; caches are shared."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_OPS_LAB_IMAGES", str(images_dir()))
        patch.setenv("XDG_CACHE_HOME", str(cache_dir().parent))
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_STATE_HOME", str(home / "state"))
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        patch.setenv("DDTREE_OPS_LAB_DIR", str(home / "lab"))
        for name in ("DDTREE_OPS_LAB_NET", "DDTREE_OPS_INVENTORY", "SSH_AUTH_SOCK", "SSH_ASKPASS"):
            patch.delenv(name, raising=False)
        yield home


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """The command takes signals for itself, also where a test or a fixture runs it in this process."""
    for number, handler in SIGNALS.items():
        signal.signal(number, handler)
    yield
    for number, handler in SIGNALS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_inventory_given() -> Iterator[None]:
    """What a test named with -i is not repeated in the hints of the next one, nor found in its environment."""
    names = ("DDTREE_OPS_INVENTORY", INVENTORY_BY_OPTION)
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    remember_inventory(None)
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(scope="session")
def plant(private_home: Path) -> Callable[..., None]:
    """``plant(host)``: the lab's release on a host as a push leaves it, which takes more than a second: for tests of other things."""

    def planted(host: lab_hosts.LabHost) -> None:
        bundle = build(RuntimeSpec(python="cp312"))
        release = host.root / "opt/ddtree-ops/releases" / bundle.digest
        release.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", "--", str(bundle.root), str(release)], check=True)
        (release / "manifest.json").write_bytes(bundle.manifest)
        subprocess.run(["chmod", "-R", "a-w", "--", str(release)], check=True)

    return planted


@contextmanager
def lab_net() -> Iterator[str]:
    """A network 127.0.N that no lab and no other test run on this machine uses."""
    images_dir().mkdir(parents=True, exist_ok=True)
    for number in range(1, 255):
        with ExitStack() as stack:
            lock = stack.enter_context((images_dir() / f".net-127.0.{number}.lock").open("a"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for host in (11, 12):
                    probe = stack.enter_context(socket.socket())
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((f"127.0.{number}.{host}", lab_hosts.SSH_PORT))
                    probe.close()
            except OSError:
                continue
            yield f"127.0.{number}"
            return
    raise RuntimeError("no free network 127.0.N for a lab")


@contextmanager
def require_lab() -> Iterator[None]:
    """Skip or fail, with the reason, where lab hosts cannot run."""
    if os.environ.get("DDTREE_OPS_SKIP_LAB") == "1":
        pytest.skip("lab tests are left out: DDTREE_OPS_SKIP_LAB=1")
    problems = lab_hosts.missing()
    if problems:
        lines = "\n  ".join(problems)
        pytest.fail(
            f"lab hosts cannot run here, missing:\n  {lines}\n(DDTREE_OPS_SKIP_LAB=1 leaves these tests out)",
            pytrace=False,
        )
    yield


@pytest.fixture(scope="session")
def lab(private_home: Path, commands: Commands) -> Iterator[Lab]:
    """Both lab hosts, up for the whole test run, on addresses of their own; taken down at its end."""
    with require_lab(), lab_net() as net, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_OPS_LAB_NET", net)
        try:
            hosts = {host.name: host for host in lab_hosts.up()}
            inventory = ROOT / "inventories" / "lab.yaml"
            yield Lab(hosts, dict(os.environ), inventory, private_home / "lab", commands)
        finally:
            lab_hosts.down()


@pytest.fixture(scope="module")
def module_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty lab of a module's own, for hosts that the others have no use for. Yields its folder."""
    folder = tmp_path_factory.mktemp("lab") / "lab"
    with require_lab(), lab_net() as net, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_OPS_LAB_NET", net)
        patch.setenv("DDTREE_OPS_LAB_DIR", str(folder))
        try:
            yield folder
        finally:
            lab_hosts.down()


@pytest.fixture
def spare_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty second lab, for tests that start and stop hosts. Yields its folder."""
    with require_lab(), lab_net() as net:
        monkeypatch.setenv("DDTREE_OPS_LAB_NET", net)
        monkeypatch.setenv("DDTREE_OPS_LAB_DIR", str(tmp_path / "lab"))
        try:
            yield tmp_path / "lab"
        finally:
            lab_hosts.down()


class _Document(BaseModel, extra="forbid", strict=True):
    """A part of what ``diagnose --json`` prints, as docs/diagnosis.md has it: nothing less, nothing more."""


class _Evidence(_Document):
    line: int
    text: str


class _Finding(_Document):
    signature: str
    severity: Literal["fatal", "degraded", "request"]
    title: str
    explanation: str
    remedy: str
    ranks: list[str]
    count: Annotated[int, Field(ge=1)]
    first: str
    fingerprint: str
    evidence: list[_Evidence]
    traceback: list[str]
    source: str


class _Consequence(_Finding):
    severity: str  # type: ignore[assignment]


class _Searched(_Document):
    lines: int
    begin: Annotated[str, Field(alias="from")]
    to: str
    suppressed: int
    damaged: int
    sources: list[str]


class _Step(_Document):
    step: Literal["flag", "field", "use", "crash", "absent"]
    file: str
    line: int
    text: str


class _Diagnosis(_Document):
    schema_: Annotated[Literal[1], Field(alias="schema")]
    source: str
    verdict: Literal["fail", "pass", "inconclusive"]
    headline: str
    diagnoses: list[_Finding]
    consequences: list[_Consequence]
    searched: _Searched
    facts: dict[str, Any]
    figures: dict[str, Any] | None
    trace: list[_Step]
    trace_origin: str
    patch: str
    seen: str
    notes: list[str]
    invocation: str


class _Whole(_Diagnosis):
    sources: list[_Diagnosis]
    errors: list[str] = Field(default_factory=list)


@pytest.fixture(scope="session")
def documented() -> Callable[[str], dict[str, Any]]:
    """What ``diagnose --json`` printed as a document, which must be as documented."""

    def read(text: str) -> dict[str, Any]:
        found = _Whole.model_validate_json(text)
        fatal = [item.severity == "fatal" for item in found.diagnoses]
        assert fatal == sorted(fatal, reverse=True), "root cause first"
        assert (found.verdict == "fail") == any(fatal)
        document = json.loads(text)
        assert isinstance(document, dict)
        return document

    return read
