"""Fixtures of all layers: a private home, and lab hosts of the test run's own."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import settings
from pydantic import BaseModel, Field

from ddtree_ops import lab as lab_hosts
from ddtree_ops.lab.image import images_dir
from ddtree_ops.paths import cache_dir
from ddtree_ops.report.typed import remember_inventory

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@dataclass(frozen=True)
class Lab:
    """Lab hosts of this test run.

    :param hosts: by name, as ``lab.up`` returned them.
    :param env: environment for processes that are to see this lab (``ddtree-ops`` itself).
    :param inventory: the shipped lab inventory.
    """

    hosts: dict[str, lab_hosts.LabHost]
    env: dict[str, str]
    inventory: Path
    directory: Path

    def reset(self, name: str) -> None:
        """A clean copy of a host at once, with the same addresses and host keys."""
        self.hosts[name] = lab_hosts.reset(name)


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
def no_inventory_given() -> Iterator[None]:
    """What a test named with -i is not repeated in the hints of the next one."""
    yield
    remember_inventory(None)


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
def lab(private_home: Path) -> Iterator[Lab]:
    """Both lab hosts, up for the whole test run, on addresses of their own; taken down at its end."""
    with require_lab(), lab_net() as net, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_OPS_LAB_NET", net)
        try:
            hosts = {host.name: host for host in lab_hosts.up()}
            yield Lab(hosts, dict(os.environ), ROOT / "inventories" / "lab.yaml", private_home / "lab")
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
