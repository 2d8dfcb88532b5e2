"""Deployments that end in the middle: what is said of the hosts, and how the next deploy goes on from there."""

from __future__ import annotations

import json
import signal

import pytest

pytestmark = pytest.mark.lab

PATIENT = ("--set", "rollback.grace=5m")
"""The host does not go back by itself before the next deploy, however slow this machine is."""


@pytest.fixture(scope="module")
def desk(new_desk):
    return new_desk("ct200", "b300", load=3)


def changes(result) -> list[str]:
    return [change["kind"] for change in result["plan"]["changes"]]


def test_1_ctrl_c_says_what_state_every_host_is_left_in(desk):
    with desk.client("deploy", "ct200", "b300") as client:
        waiting: set[str] = set()
        for line in client.stdout:
            if " wait: ..." in line:
                waiting.add(line.split()[1])
            if len(waiting) == 2:
                break
        client.send_signal(signal.SIGINT)
        rest = client.stdout.read()
    assert client.returncode == 130, rest
    for host in ("ct200", "b300"):
        assert f"{host} interrupted: FAILED sglang-k26-ddtree.service was started from " in rest
        assert f"next:  ddtree-ops deploy {host}   (goes on from there" in rest


def test_2_sigterm_is_an_interruption_and_the_next_deploy_validates(desk):
    change = (*PATIENT, "--set", "environment.ROUND=sigterm")
    with desk.client("deploy", "ct200", *change, "--json") as client:
        assert any(" wait: ..." in line for line in client.stderr)
        client.send_signal(signal.SIGTERM)
        (result,) = json.loads(client.stdout.read())
    assert client.returncode == 130, result
    assert result["outcome"] == "interrupted"
    assert "is not validated" in result["error"]
    code, result, log = desk.deploy("ct200", *change)
    assert code == 0, log
    assert changes(result) == ["validate"]


def test_3_a_client_killed_while_it_waits_leaves_a_run_that_the_next_deploy_validates(desk):
    change = (*PATIENT, "--set", "environment.ROUND=killed")
    with desk.client("deploy", "ct200", *change) as client:
        assert any(" wait: ..." in line for line in client.stdout)
        client.kill()
    before = desk.unit("ct200")["InvocationID"]
    code, result, log = desk.deploy("ct200", *change)
    assert code == 0, log
    assert result["outcome"] == "passed"
    assert changes(result) == ["validate"]
    assert desk.unit("ct200")["InvocationID"] == before


def test_4_a_run_that_nobody_saw_pass_is_validated_and_then_nothing_is_left_to_do(desk):
    change = (*PATIENT, "--set", "environment.ROUND=killed")
    desk.host("ct200", "systemctl restart sglang-k26-ddtree.service")
    code, result, log = desk.deploy("ct200", *change)
    assert code == 0, log
    assert changes(result) == ["validate"]
    code, result, log = desk.deploy("ct200", *change)
    assert (code, result["outcome"]) == (0, "unchanged"), log
