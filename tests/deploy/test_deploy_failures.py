"""Failures that are really caused on lab hosts: what is said (host, phase, state left, next command), and how it exits."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.lab

UNIT = "sglang-k26-ddtree.service"
DROP_IN = f"/etc/systemd/system/{UNIT}.d"


@pytest.fixture(scope="module")
def desk(new_desk):
    return new_desk("ct200", "b300", lease="60s")


@pytest.fixture(scope="module")
def serving(desk, plant):
    """ct200 with a release that passed."""
    plant(desk.lab.hosts["ct200"])
    code, result, _ = desk.deploy("ct200")
    assert code == 0, result["error"]
    return desk


def test_a_host_key_that_is_not_the_recorded_one(desk) -> None:
    key = desk.inventory.parent / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    kind, body = key.with_suffix(".pub").read_text().split()[:2]
    address = desk.lab.hosts["ct200"].address
    known = desk.inventory.parent / "known_hosts"
    known.write_text(f"[{address}]:{desk.lab.hosts['ct200'].port} {kind} {body}\n")
    data = yaml.safe_load(desk.inventory.read_text())
    data["defaults"]["host"]["ssh"]["known_hosts"] = str(known)
    wrong = desk.inventory.parent / "wrong.yaml"
    wrong.write_text(yaml.safe_dump(data))
    code, result, _ = desk.deploy("ct200", "-i", str(wrong))
    assert (code, result["outcome"], result["exit_code"]) == (4, "failed", 4)
    error = result["error"]
    assert error.startswith("ct200: connect: THE HOST KEY HAS CHANGED")
    assert f"({known}:1)" in error
    assert "state: nothing was sent to the host" in error
    assert f"ssh-keygen -R '[{address}]:" in error
    assert not desk.host("ct200", "ls /opt").split().count("ddtree-ops")


def test_a_crash_some_seconds_after_ready_is_seen_by_the_window(serving) -> None:
    before = serving.show("ct200", "InvocationID")
    code, result, _ = serving.deploy(
        "ct200", "--set", 'environment.LAB_CRASH_AFTER_S="8"', "--set", "health.window=90s"
    )
    assert (code, result["outcome"]) == (7, "rolled-back"), result["error"]
    verdicts = {check["name"]: check["verdict"] for check in result["checks"]}
    assert verdicts["smoke.completion"] == "pass", "it was ready, and it answered"
    assert verdicts["smoke.stable"] == "fail"
    assert result["diagnosis"]["diagnoses"][0]["signature"] == "ima"
    error = result["error"]
    assert error.startswith("ct200: rollback: the deployment failed and was rolled back to ")
    assert f"why: {UNIT} is activating (auto-restart), result signal, killed by SIGKILL" in error
    assert "serves again" in error
    assert "ddtree-ops logs ct200 --invocation " in error
    assert Path(result["evidence"], "journal.jsonl").stat().st_size > 1000
    assert serving.show("ct200", "ActiveState") == "active"
    assert serving.show("ct200", "InvocationID") != before


def test_a_crash_loop_behind_restart_always(serving) -> None:
    """Each run becomes ready and answers; the unit is back up in 0.1 s, and ``systemctl is-active`` says active."""
    code, result, _ = serving.deploy(
        "ct200",
        "--set", 'environment.LAB_CRASH_AFTER_S="8"',
        "--set", "restart.policy=always",
        "--set", "restart.delay=0.1s",
        "--set", "restart.burst=50",
        "--set", "health.window=90s",
    )  # fmt: skip
    assert (code, result["outcome"]) == (7, "rolled-back"), result["error"]
    (stable,) = [check for check in result["checks"] if check["name"] == "smoke.stable"]
    assert stable["verdict"] == "fail"
    assert "auto-restart" in stable["summary"] or "restarted" in stable["summary"]
    assert "serves again" in result["error"]
    text = serving.host("ct200", f"cat /etc/systemd/system/{UNIT}; systemctl show -P NRestarts {UNIT}")
    assert "Restart=on-failure" in text and "Restart=always" not in text
    assert text.split()[-1] == "0"


def test_a_user_that_is_not_there_is_found_before_anything_is_changed(serving) -> None:
    before = serving.show("ct200", "InvocationID")
    code, result, _ = serving.deploy("ct200", "--set", "user=ghost")
    assert code == 5
    assert "preflight.user: the host has no user ghost" in result["error"]
    assert "state: nothing was changed: release " in result["error"] and "keeps serving" in result["error"]
    assert "next:  useradd --system --create-home ghost" in result["error"]
    assert serving.show("ct200", "InvocationID") == before


class TestFrenchHost:
    """b300 speaks French and wants sudo. In order: each chapter starts where the one before ended."""

    def drop_in(self, desk, setting: str) -> None:
        desk.host(
            "b300",
            f'sudo mkdir -p {DROP_IN}; printf "[Service]\\n{setting}\\n" | sudo tee {DROP_IN}/two.conf; '
            "sudo systemctl daemon-reload",
        )

    def test_1_a_crash_is_explained_there_too(self, desk, plant) -> None:
        plant(desk.lab.hosts["b300"])
        assert "fr_FR" in desk.host("b300", "echo $LANG")
        code, result, _ = desk.deploy("b300", "--runtime", "sglang-0.5.11-stock")
        assert code == 5, "the unpatched runtime dies on its first request"
        assert result["diagnosis"]["diagnoses"][0]["signature"] == "ddtree-graph-size"
        assert f"state: {UNIT} is stopped: no earlier release of it ever passed here" in result["error"]

    def test_2_a_unit_that_systemd_refuses_to_load(self, desk) -> None:
        """A second ExecStart= in a drop-in is a bad setting: nothing can be started, and that is said."""
        self.drop_in(desk, "ExecStart=/bin/true")
        code, result, _ = desk.deploy("b300")
        assert (code, result["outcome"]) == (1, "failed")
        error = result["error"]
        assert error.startswith("b300: ")
        assert f"{UNIT} cannot be loaded (bad-setting)" in error
        assert "state: the switch of" in error and "the service may be stopped" in error
        assert f"next:  systemd-analyze verify /etc/systemd/system/{UNIT}" in error
        assert result["diagnosis"] is None, "the journal that is there is that of the run before"
        assert desk.show("b300", "ActiveState") in ("failed", "inactive")

    def test_3_a_user_that_only_systemd_misses(self, desk) -> None:
        self.drop_in(desk, "User=ghost")
        done = desk.run("deploy", "b300", "--json")
        assert done.returncode == 1
        assert f"settings of {UNIT} also come from {DROP_IN}/two.conf" in done.stderr, (
            "told before the change"
        )
        (result,) = json.loads(done.stdout)
        assert result["diagnosis"]["diagnoses"][0]["signature"] == "systemd-exec"
        error = result["error"]
        assert error.startswith(f"b300: start: systemctl start {UNIT} failed")
        assert "status=217/USER" in error
        assert f"state: {UNIT} is stopped: no earlier release of it ever passed here" in error
        assert "next:  " in error
        assert desk.show("b300", "ActiveState") in ("failed", "inactive")
