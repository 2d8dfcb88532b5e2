"""Tests of ``ddtree_sglang``. Those marked ``real`` need torch and sglang: ``make test-real``."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

if importlib.util.find_spec("sglang") is not None:
    # sglang can be imported in this process too: with its own stub for triton, as the servers of these tests
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.path.append(str(HERE / "cpu" / "stubs"))
    runpy.run_path(str(HERE / "cpu" / "stubs" / "sitecustomize.py"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny target and its drafter of block size 4 (``cpu/make_models.py``): ``target`` and ``draft``, as text."""
    pytest.importorskip("safetensors")
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("pair")
    subprocess.run([sys.executable, str(HERE / "cpu" / "make_models.py"), str(folder)], check=True)
    return SimpleNamespace(target=str(folder / "lower"), draft=str(folder / "lower-draft"))


@pytest.fixture(scope="session")
def real_plugin() -> None:
    """The plugin, registered and applied in this process, as ``load_plugins`` of sglang does it."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed: make test-real")
    from sglang.srt.plugins.hook_registry import HookRegistry

    from ddtree_sglang.plugin import register

    register()
    HookRegistry.apply_hooks()
