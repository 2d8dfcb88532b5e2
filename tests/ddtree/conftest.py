"""Tests of ``ddtree_sglang``. Those marked ``real`` need torch and sglang: ``make test-real``."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cpu_servers import Fleet, Models
    from lab_run import LabRun

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
sys.path.append(str(HERE / "cpu"))

if importlib.util.find_spec("sglang") is not None:
    # sglang can be imported in this process too: with its own stub for triton, as the servers of these tests
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # torch's threads wait for each other by turning round and round, on cores that the servers want
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.append(str(HERE / "cpu" / "stubs"))
    runpy.run_path(str(HERE / "cpu" / "stubs" / "sitecustomize.py"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny pairs of target and drafter (``cpu/make_models.py``)."""
    pytest.importorskip("safetensors")
    pytest.importorskip("torch")
    from cpu_servers import Models

    return Models(tmp_path_factory.mktemp("tiny") / "models")


@pytest.fixture(scope="session")
def pair(models: Models) -> SimpleNamespace:
    """A tiny target and its drafter of block size 4: ``target`` and ``draft``, as text."""
    return SimpleNamespace(target=str(models.folder / "lower"), draft=str(models.folder / "lower-draft"))


@pytest.fixture(scope="session")
def real_plugin() -> None:
    """The plugin, registered and applied in this process, as ``load_plugins`` of sglang does it."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed: make test-real")
    from sglang.srt.plugins.hook_registry import HookRegistry

    from ddtree_sglang.plugin import register

    register()
    HookRegistry.apply_hooks()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for a server come last, those of the lab at the very end: until then servers start beside the others."""
    items.sort(
        key=lambda item: [name in getattr(item, "fixturenames", ()) for name in ("lab_run", "real_servers")]
    )


@pytest.fixture(scope="session", autouse=True)
def servers_ahead(request: pytest.FixtureRequest) -> None:
    """Start the servers before the first test, where a test of this run wants one."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in ("lab_run", "real_servers"):
        if name in wanted:
            request.getfixturevalue(name)


@pytest.fixture(scope="session")
def real_servers(tmp_path_factory: pytest.TempPathFactory, models: Models) -> Iterator[Fleet]:
    """Real servers on this CPU (``cpu/cpu_servers.py``)."""
    from cpu_servers import Fleet

    with Fleet(tmp_path_factory.mktemp("real_servers"), models) as running:
        yield running


@pytest.fixture(scope="session")
def lab_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabRun]:
    """The real server on a lab host, from deploy to rollback (``cpu/lab_run.py``)."""
    from lab_run import LabRun

    with LabRun(tmp_path_factory.mktemp("lab_run")) as running:
        yield running
