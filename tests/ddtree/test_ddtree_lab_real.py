"""The real sglang 0.5.11 under systemd on a lab host, from the deployed release: ``lab up --engine sglang``.

Three starts in all (``cpu/lab_run.py``): a deploy, a bad change that crashes under its first requests, the way back.
"""

from __future__ import annotations

import importlib.util
import os
import re

import pytest
from exchanges import EXCHANGES
from lab_run import HOST, LabRun

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed: make test-real", allow_module_level=True)

pytestmark = [
    pytest.mark.real,
    pytest.mark.lab,
    pytest.mark.skipif(os.environ.get("DDTREE_OPS_SKIP_LAB") == "1", reason="DDTREE_OPS_SKIP_LAB=1"),
]


def test_the_release_is_deployed_as_on_a_real_host(lab_run: LabRun) -> None:
    """Lint, preflight, push, verify, activate, wait, smoke: the tree accepts more than a drafter's chain can."""
    assert f"ddtree-ops -i lab-real deploy {HOST}" in lab_run.said("up").stdout
    said = lab_run.said("deploy")
    text = said.stdout + said.stderr
    for step in ("lint", "preflight", "push", "verify", "activate", "wait", "smoke", "signatures"):
        assert f"{HOST} {step}: ok" in text, text
    accepted = re.search(r"accept length ([\d.]+) of at most 4 tokens", text)
    assert accepted is not None and 3.0 <= float(accepted[1]) <= 4.0, text


def test_the_engine_runs_from_the_release_and_nothing_drifts(lab_run: LabRun) -> None:
    assert "files hashed: no drift" in lab_run.said("drift").stdout


def test_the_quick_suite_passes(lab_run: LabRun) -> None:
    """No check fails; those that need a model with sense are left out, and said to be."""
    text = lab_run.said("validate").stdout
    passed = re.findall(r"^\s*\u2713 (\S+)", text, re.MULTILINE)
    assert {
        "short-chat",
        "short-limits",
        "stream",
        "stop",
        "prefix-hit",
        "refusals",
        "burst",
        "steady",
    } <= set(passed)
    assert "\u2717" not in text and ": pass (" in text


@pytest.mark.parametrize("name", EXCHANGES)
def test_it_answers_as_the_lab_engine_is_held_to(lab_run: LabRun, name: str) -> None:
    assert lab_run.said("exchanges")[name] == ""


def test_a_release_that_crashes_is_seen_explained_and_rolled_back(lab_run: LabRun) -> None:
    """The scheduler of the bad release dies in the second request of the smoke check."""
    first = re.search(r"deployed in .* ([0-9a-f]{12})$", lab_run.said("deploy").stdout, re.MULTILINE)
    said = lab_run.said("bad")
    text = said.stdout + said.stderr
    assert f"{HOST} wait: ok" in text
    assert "The size of tensor a (4) must match the size of tensor b (41)" in text
    assert "scheduler.py" in text
    assert first is not None and f"state: release {first[1]}" in text and "serves again" in text
    assert first[1] in lab_run.said("status").stdout


def test_a_killed_scheduler_is_seen_and_explained(lab_run: LabRun) -> None:
    assert re.search(rf"\u2717 {HOST} +smoke\.(stable|completion)", lab_run.said("smoke").stdout)
    text = lab_run.said("diagnose").stdout
    assert "child-died" in text and "exit code -9" in text
