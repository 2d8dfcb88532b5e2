"""The shape of the project itself: layers, public names, what is committed."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ddtree_ops

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(ddtree_ops.__path__, "ddtree_ops.")
    if not module.name.endswith("__main__")
)


def test_layers_import_downward_only():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_public_names_exist_and_are_documented(name: str):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for public in getattr(module, "__all__", ()):
        value = getattr(module, public)
        if callable(value) and getattr(value, "__module__", "").startswith("ddtree_ops"):
            assert value.__doc__, f"{name}.{public} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_declares_its_public_names(name: str):
    module = importlib.import_module(name)
    if not hasattr(module, "__path__"):
        assert hasattr(module, "__all__"), f"{name} has no __all__"


def test_nothing_committed_names_an_address_of_a_real_machine():
    address = re.compile(rb"(?<![.\d])(?:10|172\.(?:1[6-9]|2\d|3[01])|192\.168)(?:\.\d{1,3}){2,3}\b")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    assert files
    found = [str(path) for path in files if path.is_file() and address.search(path.read_bytes())]
    assert found == []


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(ROOT / "tools/system-packages.sh")],
        env={**os.environ, "PYTHON": "nosuchpython", "DDTREE_OPS_SKIP_LAB": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("there is no nosuchpython: ")


def test_the_source_distribution_holds_what_its_tests_read() -> None:
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "sdist"
    ]
    assert {"tests", "docs", "benchmarks", "tools", "Makefile", "patches", "ddtree_sglang"} <= set(
        included["include"]
    )
    assert all((ROOT / name).exists() for name in included["include"])
