"""sglang's own triton extend kernel with a tree mask, run by triton's interpreter (``cpu/kernel.py``).

One process for all cases: servers and other tests run with sglang's stub of triton, this one with triton itself, which
``make test-real`` installs in a folder of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TRITON = Path(sys.prefix) / "triton"
if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed: make test-real", allow_module_level=True)

pytestmark = pytest.mark.real

CASES = (
    "block 4",
    "block 8, budget 32",
    "rows beyond one tile",
    "a chain",
    "fewer prefixes than budget",
    "padded by valid",
    "padded by min_prob",
    "one head for all, as MLA",
)
CHAINS = ("a chain",)
EXACT, WRONG = 1e-4, 0.05
"""Errors in units of values of size 1: what float32 leaves, and the least that a wrong mask makes."""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    assert (TRITON / "triton").is_dir(), f"no triton in {TRITON}: make test-real installs it"
    foreign = ("SGLANG_", "TRITON_", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(TRITON), str(HERE / "cpu" / "stubs")]),
        "TRITON_INTERPRET": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "cpu" / "kernel.py")],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_every_case_was_run(report: dict[str, Any]) -> None:
    assert set(report["cases"]) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_sees_what_the_tree_allows(report: dict[str, Any], case: str) -> None:
    assert report["cases"][case]["right"] < EXACT


@pytest.mark.parametrize("case", [case for case in CASES if case not in CHAINS])
def test_a_mask_that_is_ignored_would_be_noticed(report: dict[str, Any], case: str) -> None:
    """Without the mask the kernel is causal: siblings see each other."""
    assert report["cases"][case]["mask ignored"] > WRONG


@pytest.mark.parametrize("case", CHAINS)
def test_of_a_chain_the_mask_is_causal(report: dict[str, Any], case: str) -> None:
    assert report["cases"][case]["mask ignored"] < EXACT


@pytest.mark.parametrize("case", CASES)
def test_a_mask_that_is_off_by_one_would_be_noticed(report: dict[str, Any], case: str) -> None:
    assert report["cases"][case]["offset by one"] > WRONG


@pytest.mark.parametrize("case", CASES)
def test_a_backend_that_counts_the_block_leaves_rows_unwritten(report: dict[str, Any], case: str) -> None:
    """The silent corruption: 8 of N rows a request, and no error (where N is 8, all is well)."""
    found = report["cases"][case]["rows of the block"]
    assert (found < EXACT) == (case in ("block 4", "a chain")), found
