"""The main job, end to end, on lab hosts: real ssh, systemd, journal; the commands as a person types them."""

from __future__ import annotations

import json
import re

import pytest

from ddtree_ops import lab as lab_hosts

pytestmark = pytest.mark.lab


HEAVY = {
    "asyncio",
    "ddtree_ops.deploy.releases",
    "ddtree_ops.deploy.saved",
    "ddtree_ops.diagnose",
    "httpx",
    "jinja2",
    "multiprocessing",
    "packaging.requirements",
    "rich",
    "ssl",
    "tenacity",
    "unittest.mock",
}
"""Nothing that a deploy without a change needs; each costs it more than the host's own work on a small tree."""


@pytest.fixture(scope="module")
def fresh(new_desk):
    return new_desk("ct200", "b300", load=0.5, lease="60s")


class TestStory:
    """In order: each chapter starts where the one before ended."""

    def test_1_the_unpatched_runtime_dies_on_the_first_request_and_is_explained(self, fresh):
        code, result, log = fresh.deploy("ct200", "--runtime", "sglang-0.5.11-stock")
        assert code == 5, log
        assert result["outcome"] == "failed"
        cause = result["diagnosis"]["diagnoses"][0]
        assert cause["signature"] == "ddtree-graph-size"
        for part in ("8 = 1 x block_size 8", "33 = 1 x (budget 32 + 1)", "sized for the draft", "0001"):
            assert part in cause["explanation"]
        assert len(cause["ranks"]) == 8
        assert "stopped" in result["error"]
        assert fresh.unit("ct200")["ActiveState"] != "active"

    def test_2_the_patched_runtime_serves(self, fresh):
        code, result, log = fresh.deploy("ct200")
        assert code == 0, log
        assert result["outcome"] == "deployed"
        assert "ddtree_sglang 0.1.0 with entry point ddtree" in log, "read on the host, after a real push too"
        verdicts = {check["name"]: check["verdict"] for check in result["checks"]}
        assert verdicts.pop("preflight.crash") == "inconclusive", "the last run is on record"
        assert set(verdicts.values()) == {"pass"}, verdicts
        assert {"smoke.completion", "smoke.stable", "smoke.speculation", "signatures"} <= set(verdicts)
        state = fresh.unit("ct200")
        assert (state["ActiveState"], state["NRestarts"]) == ("active", "0")

    def test_3_again_changes_nothing_and_restarts_nothing(self, fresh):
        before = fresh.unit("ct200")["InvocationID"]
        done = fresh.run("deploy", "ct200", "--json", PYTHONPROFILEIMPORTTIME="1")
        assert done.returncode == 0, done.stderr
        (result,) = json.loads(done.stdout)
        assert result["outcome"] == "unchanged"
        imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))
        assert {"fabric.connection", "ddtree_ops.deploy.deployment"} <= imported
        assert not HEAVY & imported
        assert result["plan"]["changes"] == []
        assert fresh.unit("ct200")["InvocationID"] == before

    def test_4_the_plan_of_a_change_is_shown_and_nothing_is_done(self, fresh):
        before = fresh.unit("ct200")["InvocationID"]
        done = fresh.run("deploy", "ct200", "--dry-run", "--set", "speculative.budget=16")
        assert done.returncode == 0, done.stderr
        assert "-  --speculative-ddtree-budget 32 \\" in done.stdout
        assert "+  --speculative-ddtree-budget 16 \\" in done.stdout
        assert fresh.unit("ct200")["InvocationID"] == before

    def test_5_a_bad_change_is_rolled_back_and_the_good_release_serves(self, fresh):
        code, result, log = fresh.deploy("ct200", "--set", "args.cuda-graph-max-bs=4096")
        assert code == 7, log
        assert result["outcome"] == "rolled-back"
        assert result["diagnosis"]["diagnoses"][0]["signature"] == "oom-capture"
        assert "serves again" in result["error"]
        smoke = fresh.run("smoke", "ct200", "--prompt", "quicksort")
        assert smoke.returncode == 0, smoke.stdout + smoke.stderr
        code, result, log = fresh.deploy("ct200")
        assert (code, result["outcome"]) == (0, "unchanged"), log
        told = fresh.run("history", "ct200", "--json")
        past = json.loads(told.stdout)["hosts"][0]["activations"]
        assert [item["changes"] for item in past[-2:]] == [
            ["+ --cuda-graph-max-bs 4096"],
            ["- --cuda-graph-max-bs 4096"],
        ], "the unit file of what failed is not kept"

    def test_6_a_typo_in_a_flag_is_refused_before_the_host_is_touched(self, fresh):
        before = fresh.unit("ct200")
        typo = ("--set", "args.mem-fraction-statik=0.8")
        code, result, log = fresh.deploy("ct200", *typo)
        assert code == 78, log
        assert result["outcome"] == "failed"
        assert list(result["seconds"]) == ["lint"], "no later step was begun"
        (check,) = result["checks"]
        assert (check["name"], check["verdict"]) == ("lint.unknown-flag", "fail")
        again = f"ddtree-ops lint ct200 {' '.join(typo)}   (why, and where it is written)"
        for part in ("mem-fraction-statik", "did you mean mem-fraction-static?", again):
            assert part in result["error"]
        after = fresh.unit("ct200")
        assert (after["InvocationID"], after["ActiveState"]) == (before["InvocationID"], "active")
        reason = "to see what the engine says"
        code, result, log = fresh.deploy("ct200", *typo, "--set", f"lint.ignore.unknown-flag={reason}")
        assert code == 7, log
        assert "mem-fraction-statik" in json.dumps(result["diagnosis"])

    def test_7_the_first_crash_is_still_found_in_the_journal(self, fresh):
        done = fresh.run("logs", "ct200", "--grep", "size of tensor", "--invocation", "all")
        assert done.returncode == 0, done.stderr
        assert "The size of tensor a (8) must match the size of tensor b (33)" in done.stdout
        assert "searched" in done.stdout + done.stderr

    def test_8_an_unreachable_host_does_not_stop_the_other(self, fresh):
        lab_hosts.down(["b300"])
        try:
            done = fresh.run("deploy", "ct200", "b300", "--json")
        finally:
            lab_hosts.up(["b300"])
        outcomes = {result["host"]: result["outcome"] for result in json.loads(done.stdout)}
        assert outcomes == {"ct200": "unchanged", "b300": "failed"}
        assert done.returncode == 4


def test_a_host_reached_through_sudo_and_speaking_french(fresh):
    code, result, log = fresh.deploy("b300")
    assert code == 0, log
    assert result["outcome"] == "deployed"


def test_two_deploys_at_once_one_gets_the_name_of_the_other(fresh):
    from ddtree_ops.inventory import connect_spec, load_inventory, select
    from ddtree_ops.remote import connect
    from ddtree_ops.service.layout import Layout

    (target,) = select(load_inventory(str(fresh.inventory)), ["b300"])
    with connect(connect_spec(target.host)) as session:
        assert session.acquire_lock(Layout.of(target).lock, {"who": "ann", "origin": "desk"}) is None
        done = fresh.run("deploy", "b300")
    assert done.returncode == 6
    assert "ann on desk" in done.stdout


def test_preflight_names_every_problem_and_changes_nothing(fresh):
    done = fresh.run(
        "deploy",
        "b300",
        "--set",
        "model=/root/models/nowhere",
        "--set",
        "venv=/root/nowhere",
        "--set",
        "port=22022",
    )
    assert done.returncode == 5
    text = done.stdout + done.stderr
    assert "/root/models/nowhere: no config.json" in text
    assert "/root/nowhere/bin/python is missing" in text
    assert "port 22022 is taken" in text
    assert "nothing was changed" in text
