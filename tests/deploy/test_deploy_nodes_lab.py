"""One engine over both lab hosts: real ssh, systemd, journals; each failure is really caused."""

from __future__ import annotations

import json
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.deploy.history import parse_history
from ddtree_ops.results import Verdict

pytestmark = pytest.mark.lab

INVENTORY = Path(__file__).parents[1] / "data" / "inventories" / "nodes.yaml"
HOSTS = ("ct200", "b300")
KILLED_BETWEEN = """
import os, signal, threading
from ddtree_ops.cli.app import main
from ddtree_ops.deploy.guard import Guard

confirm, one = Guard.confirm, threading.Semaphore(1)
def once(*given):
    if not one.acquire(blocking=False):
        while not passed:
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    confirm(*given)
    passed.append(True)
passed, Guard.confirm = [], once
main()
"""
"""A client that is killed when one node has its ``pass`` line and the other has not."""
UNIT = "sglang-two.service"
HISTORY = f"/opt/ddtree-ops/services/{UNIT}/history.jsonl"


def deploy(desk, host: str, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Named is one node; both have a result."""
    done = desk.run("deploy", f"{host}/two", "--json", **variables)
    assert done.stdout.strip(), done.stderr
    results = {result["host"].split("/")[0]: result for result in json.loads(done.stdout)}
    assert set(results) == set(HOSTS)
    return done.returncode, results, done.stderr


def invocations(desk) -> list[str]:
    return [desk.unit(host, UNIT)["InvocationID"] for host in HOSTS]


@pytest.fixture(scope="module")
def fresh(new_desk):
    return new_desk(*HOSTS, planted=True, inventory=INVENTORY, TEST_API_KEY="not-used")


class TestStory:
    """In order: each chapter starts where the one before ended."""

    def test_1_naming_one_node_deploys_both_in_step(self, fresh):
        code, results, log = deploy(fresh, "b300")
        assert code == 0, log
        assert [results[host]["outcome"] for host in HOSTS] == ["deployed", "deployed"]
        order = [
            line.split() for line in log.splitlines() if " activate: ..." in line or " verify: ok" in line
        ]
        assert [words[2] for words in order] == ["verify:", "verify:", "activate:", "activate:"], (
            "all or none"
        )
        checks = {host: {c["name"]: c["verdict"] for c in results[host]["checks"]} for host in HOSTS}
        assert checks["ct200"]["smoke.completion"] == "pass"
        assert checks["b300"]["smoke.completion"] == "skipped", "only the head answers requests"
        assert checks["b300"]["smoke.stable"] == checks["b300"]["signatures"] == "pass"
        texts = [(fresh.lab.hosts[host].root / HISTORY[1:]).read_text() for host in HOSTS]
        ids = [{json.loads(line)["id"] for line in text.splitlines()} for text in texts]
        assert ids[0] == ids[1] and len(ids[0]) == 1, "one activation, the same on both"

    def test_2_again_changes_nothing(self, fresh):
        before = invocations(fresh)
        code, results, log = deploy(fresh, "ct200")
        assert code == 0, log
        assert [results[host]["outcome"] for host in HOSTS] == ["unchanged", "unchanged"]
        assert invocations(fresh) == before

    def test_3_a_node_that_is_not_fit_leaves_both_as_they_are(self, fresh):
        before = invocations(fresh)
        code, results, _ = deploy(fresh, "ct200", TEST_B300_MODEL="/root/models/nowhere")
        assert code == 5
        assert "b300/two (node 1 of 2) failed in preflight" in results["ct200"]["error"]
        assert "nothing was changed" in results["ct200"]["error"]
        assert "/root/models/nowhere" in results["b300"]["error"]
        assert invocations(fresh) == before

    def test_4_a_node_that_cannot_be_reached_leaves_the_other_as_it_is(self, fresh):
        before = invocations(fresh)
        code, results, _ = deploy(fresh, "ct200", TEST_B300_PORT="9")
        assert code == 4
        assert "b300/two (node 1 of 2) failed in connect" in results["ct200"]["error"]
        assert "nothing was changed" in results["ct200"]["error"]
        assert invocations(fresh) == before

    def test_5_a_worker_that_dies_takes_both_back(self, fresh):
        code, results, log = deploy(fresh, "ct200", TEST_B300_CRASH="0.1")
        assert code == 7, log
        for host in HOSTS:
            assert results[host]["outcome"] == "rolled-back"
            assert (
                "first to fail: b300/two (node 1 of 2, TP4 to TP7): ima on 4 ranks" in results[host]["error"]
            )
            assert "serves again" in results[host]["error"]
            assert Path(results[host]["evidence"], "journal.jsonl").stat().st_size > 0
        assert "ct200/two activate: note another node of the service is started again" in log
        journal = Path(results["ct200"]["evidence"], "journal.jsonl").read_text()
        assert "Connection closed by peer" in journal, "what the head had to suffer"
        assert [fresh.unit(host, UNIT)["ActiveState"] for host in HOSTS] == ["active", "active"]
        code, results, log = deploy(fresh, "ct200")
        assert (code, results["b300"]["outcome"]) == (0, "unchanged"), log

    def test_6_ctrl_c_is_told_for_both(self, fresh):
        with fresh.client("deploy", "ct200/two", "--no-rollback", "--json", TEST_LOAD="20") as client:
            waiting = 0
            for line in client.stderr:
                waiting += " wait: ..." in line
                if waiting == 2:
                    break
            client.send_signal(signal.SIGINT)
            results = json.loads(client.stdout.read())
        assert client.returncode == 130
        assert [result["outcome"] for result in results] == ["interrupted", "interrupted"]
        assert all("is not validated" in result["error"] for result in results)

    def test_7_a_client_that_is_killed_when_one_node_has_passed_leaves_work_for_the_next(self, fresh):
        patient = {"TEST_LOAD": "0.2", "TEST_LEASE": "10s", "TEST_GRACE": "300s"}
        env = {**fresh.env, **patient}
        with fresh.lab.commands.start(["deploy", "ct200/two"], env=env, code=KILLED_BETWEEN) as client:
            said, _ = client.communicate(timeout=900)
        assert client.returncode == -signal.SIGKILL, said
        last = [
            parse_history((fresh.lab.hosts[host].root / HISTORY[1:]).read_bytes()).latest for host in HOSTS
        ]
        assert last[0].id == last[1].id
        assert {item.verdict for item in last} == {Verdict.PASS, None}
        before = invocations(fresh)
        code, results, log = deploy(fresh, "ct200", **patient)
        assert (code, [results[host]["outcome"] for host in HOSTS]) == (0, ["passed", "passed"]), log
        last = [
            parse_history((fresh.lab.hosts[host].root / HISTORY[1:]).read_bytes()).latest for host in HOSTS
        ]
        assert last[0].id == last[1].id
        assert [item.verdict for item in last] == [Verdict.PASS, Verdict.PASS]
        assert invocations(fresh) == before, "nobody had gone back yet, so nothing was started again"

    def test_8_going_back_takes_both_to_the_same_activation(self, fresh):
        done = fresh.run("rollback", "b300/two", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        texts = [(fresh.lab.hosts[host].root / HISTORY[1:]).read_text().splitlines() for host in HOSTS]
        last = [[json.loads(line) for line in lines][-2] for lines in texts]
        assert [line["reason"] for line in last] == ["rollback", "rollback"]
        assert last[0]["id"] == last[1]["id"]
        assert (
            "LAB_LOAD_SECONDS=0.3"
            in fresh.run("lab", "ssh", "b300", "cat", "/etc/systemd/system/sglang-two.service").stdout
        )

    def test_9_stopping_one_stops_both_the_head_first(self, fresh):
        begun = datetime.now(UTC)
        code, _, log = deploy(fresh, "ct200")
        assert code == 0, log
        done = fresh.run("stop", "b300/two")
        assert done.returncode == 0, done.stdout + done.stderr
        said = done.stdout + done.stderr
        assert "crash" not in said.replace("no crash", "")
        assert "without which this node ends by itself" in said or "b300/two stop: ok stopped in" in said
        looked = json.loads(fresh.run("doctor", "b300/two", "--json").stdout)["hosts"][0]
        (crash,) = (one for one in looked["checks"] if one["name"] == "preflight.crash")
        times = [datetime.fromisoformat(item["time"]) for item in crash["evidence"]]
        assert times, "of the crash that was really caused before"
        assert max(times) < begun, crash
        states = [fresh.unit(host, UNIT) for host in HOSTS]
        assert all(state["ActiveState"] in ("inactive", "failed") for state in states)
        ended = [int(state["InactiveEnterTimestampMonotonic"]) for state in states]
        assert ended[0] < ended[1], "the head drains while the workers are still there"
        logs = fresh.run("logs", "ct200/two", "--grep", "Gracefully exiting", "--invocation", "previous")
        assert (
            "Remaining number of requests 0"
            in logs.stdout
            + fresh.run("logs", "ct200/two", "--grep", "Gracefully exiting", "--invocation", "current").stdout
        )
