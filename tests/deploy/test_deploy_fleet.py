"""A fleet of lab hosts: batches, a canary, how many may fail; one host is really broken, in two ways."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops import lab as lab_hosts

pytestmark = pytest.mark.lab

UNIT = "sglang-k26-ddtree.service"
QUICK = (
    "--set", "health.window=0.5s", "--set", 'environment.LAB_LOAD_SECONDS="0.5"',
    "--set", "rollback.lease=60s", "--set", "rollback.grace=60s",
)  # fmt: skip


@dataclass(frozen=True)
class Fleet:
    """Four hosts; the inventory names a wrong key for ``gpu01``."""

    inventory: Path
    commands: Any

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.commands.run(["-i", str(self.inventory), *words])
        return done

    def deploy(self, *words: str) -> tuple[int, dict[str, dict[str, Any]], str]:
        done = self.run("deploy", *words, *QUICK, "--json")
        results = json.loads(done.stdout) if done.stdout else []
        return done.returncode, {result["host"]: result for result in results}, done.stderr


def on_host(host: str, *command: str) -> str:
    argv = lab_hosts.ssh_argv(host, command)
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300).stdout.strip()


def invocation(host: str) -> str:
    return on_host(host, "systemctl", "show", "--value", "--property=InvocationID", UNIT)


@pytest.fixture(scope="module")
def fleet(module_lab: Path, commands: Any, plant: Callable[..., None]) -> Fleet:
    hosts, path = lab_hosts.up_fleet(4)
    for host in hosts:
        plant(host)
    wrong = path.with_name("wrong.yaml")
    login = f"address: {hosts[0].address}\n    ssh: {{user: root"
    text = path.read_text()
    assert login in text
    wrong.write_text(text.replace(login, f'{login}, fingerprint: "SHA256:{"A" * 43}"'))
    return Fleet(wrong, commands)


def test_1_a_host_that_cannot_be_trusted_fails_alone_and_the_batches_go_on_as_far_as_is_allowed(
    fleet: Fleet,
) -> None:
    code, results, log = fleet.deploy("rack-a,rack-b", "--serial", "1,3", "--max-fail", "1")
    assert {host: result["outcome"] for host, result in results.items()} == {
        "gpu01": "failed",
        "gpu02": "deployed",
        "gpu03": "deployed",
        "gpu04": "deployed",
    }, log
    assert "NOT THE PINNED ONE" in results["gpu01"]["error"]
    assert code == 4
    told = [line.partition("Z ")[2] for line in log.splitlines() if " rollout: " in line]
    assert told == [
        "rollout: note batch 1 of 2: gpu01",
        "rollout: note batch 2 of 2: gpu02, gpu03, gpu04",
    ]


def test_2_without_that_host_nothing_is_left_to_do_anywhere(fleet: Fleet) -> None:
    code, results, log = fleet.deploy("gpu[01-99]", "--exclude", "gpu01")
    assert {host: result["outcome"] for host, result in results.items()} == {
        "gpu02": "unchanged",
        "gpu03": "unchanged",
        "gpu04": "unchanged",
    }, log
    assert code == 0


def test_3_a_canary_that_does_not_come_up_keeps_the_others_as_they_are(fleet: Fleet) -> None:
    """The engine of gpu02 is broken, so the change fails there, and cannot be rolled back either."""
    before = {host: invocation(host) for host in ("gpu02", "gpu03", "gpu04")}
    on_host("gpu02", "sh", "-c", "'echo raise SystemExit\\(1\\) > /opt/ddtree-lab/lab_engine.py'")
    code, results, log = fleet.deploy(
        "all", "--limit", "gpu*,!gpu01", "--canary", "1", "--set", "speculative.budget=16"
    )
    assert {host: result["outcome"] for host, result in results.items()} == {
        "gpu02": "failed",
        "gpu03": "skipped",
        "gpu04": "skipped",
    }, log
    assert code == results["gpu02"]["exit_code"] != 0
    assert results["gpu03"]["exit_code"] == 8
    assert "not started: the canary gpu02 failed" in results["gpu03"]["error"]
    assert invocation("gpu02") != before["gpu02"]
    assert {host: invocation(host) for host in ("gpu03", "gpu04")} == {
        host: before[host] for host in ("gpu03", "gpu04")
    }


def test_4_nothing_is_deployed_where_the_selection_is_empty(fleet: Fleet) -> None:
    for words in (("gpu[50-60]",), ("all", "--limit", "nope"), ("rack-a", "--exclude", "gpu*")):
        done = fleet.run("deploy", *words)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
