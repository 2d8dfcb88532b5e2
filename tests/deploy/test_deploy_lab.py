"""The main job, end to end, on lab hosts: real ssh, systemd, journal; the commands as a person types them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops import lab as lab_hosts

pytestmark = pytest.mark.lab


def run(lab, *argv: str, timeout: float = 180.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddtree_ops", *argv],
        env={**lab.env, "DDTREE_OPS_INVENTORY": str(lab.inventory)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def deploy(lab, *argv: str) -> tuple[int, dict, str]:
    done = run(lab, "deploy", *argv, "--json")
    assert done.stdout.strip(), done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 1
    return done.returncode, results[0], done.stderr


def unit(lab, host: str) -> dict[str, str]:
    done = run(lab, "lab", "ssh", host, "systemctl", "show", "sglang-k26-ddtree.service")
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


@pytest.fixture(scope="module")
def fresh(lab):
    for host in ("ct200", "b300"):
        lab.reset(host)
    return lab


class TestStory:
    """In order: each chapter starts where the one before ended."""

    def test_1_the_unpatched_runtime_dies_on_the_first_request_and_is_explained(self, fresh):
        code, result, log = deploy(fresh, "ct200", "--runtime", "sglang-0.5.11-stock")
        assert code == 5, log
        assert result["outcome"] == "failed"
        cause = result["diagnosis"]["diagnoses"][0]
        assert cause["signature"] == "ddtree-graph-size"
        for part in ("8 = 1 x block_size 8", "33 = 1 x (budget 32 + 1)", "sized for the draft", "0001"):
            assert part in cause["explanation"]
        assert len(cause["ranks"]) == 8
        assert "stopped" in result["error"]
        assert unit(fresh, "ct200")["ActiveState"] != "active"

    def test_2_the_patched_runtime_serves(self, fresh):
        code, result, log = deploy(fresh, "ct200")
        assert code == 0, log
        assert result["outcome"] == "deployed"
        verdicts = {check["name"]: check["verdict"] for check in result["checks"]}
        assert verdicts.pop("preflight.crash") == "inconclusive", "the last run is on record"
        assert set(verdicts.values()) == {"pass"}, verdicts
        assert {"smoke.completion", "smoke.stable", "smoke.speculation", "signatures"} <= set(verdicts)
        state = unit(fresh, "ct200")
        assert (state["ActiveState"], state["NRestarts"]) == ("active", "0")

    def test_3_again_changes_nothing_and_restarts_nothing(self, fresh):
        before = unit(fresh, "ct200")["InvocationID"]
        code, result, log = deploy(fresh, "ct200")
        assert code == 0, log
        assert result["outcome"] == "unchanged"
        assert result["plan"]["changes"] == []
        assert unit(fresh, "ct200")["InvocationID"] == before

    def test_4_the_plan_of_a_change_is_shown_and_nothing_is_done(self, fresh):
        before = unit(fresh, "ct200")["InvocationID"]
        done = run(fresh, "deploy", "ct200", "--dry-run", "--set", "speculative.budget=16")
        assert done.returncode == 0, done.stderr
        assert "-  --speculative-ddtree-budget 32 \\" in done.stdout
        assert "+  --speculative-ddtree-budget 16 \\" in done.stdout
        assert unit(fresh, "ct200")["InvocationID"] == before

    def test_5_a_bad_change_is_rolled_back_and_the_good_release_serves(self, fresh):
        code, result, log = deploy(fresh, "ct200", "--set", "args.cuda-graph-max-bs=4096")
        assert code == 7, log
        assert result["outcome"] == "rolled-back"
        assert result["diagnosis"]["diagnoses"][0]["signature"] == "oom-capture"
        assert "serves again" in result["error"]
        smoke = run(fresh, "smoke", "ct200", "--prompt", "quicksort")
        assert smoke.returncode == 0, smoke.stdout + smoke.stderr
        code, result, log = deploy(fresh, "ct200")
        assert (code, result["outcome"]) == (0, "unchanged"), log

    def test_6_a_typo_in_a_flag_is_refused_before_the_host_is_touched(self, fresh):
        before = unit(fresh, "ct200")
        typo = ("--set", "args.mem-fraction-statik=0.8")
        code, result, log = deploy(fresh, "ct200", *typo)
        assert code == 78, log
        assert result["outcome"] == "failed"
        assert list(result["seconds"]) == ["lint"], "no later step was begun"
        (check,) = result["checks"]
        assert (check["name"], check["verdict"]) == ("lint.unknown-flag", "fail")
        for part in ("mem-fraction-statik", "did you mean mem-fraction-static?", "ddtree-ops lint ct200"):
            assert part in result["error"]
        after = unit(fresh, "ct200")
        assert (after["InvocationID"], after["ActiveState"]) == (before["InvocationID"], "active")
        reason = "to see what the engine says"
        code, result, log = deploy(fresh, "ct200", *typo, "--set", f"lint.ignore.unknown-flag={reason}")
        assert code == 7, log
        assert "mem-fraction-statik" in json.dumps(result["diagnosis"])

    def test_7_the_first_crash_is_still_found_in_the_journal(self, fresh):
        done = run(fresh, "logs", "ct200", "--grep", "size of tensor", "--invocation", "all")
        assert done.returncode == 0, done.stderr
        assert "The size of tensor a (8) must match the size of tensor b (33)" in done.stdout
        assert "searched" in done.stdout + done.stderr

    def test_8_an_unreachable_host_does_not_stop_the_other(self, fresh):
        lab_hosts.down(["b300"])
        try:
            done = run(fresh, "deploy", "ct200", "b300", "--json")
        finally:
            lab_hosts.up(["b300"])
        outcomes = {result["host"]: result["outcome"] for result in json.loads(done.stdout)}
        assert outcomes == {"ct200": "unchanged", "b300": "failed"}
        assert done.returncode == 4


def test_a_host_reached_through_sudo_and_speaking_french(fresh):
    code, result, log = deploy(fresh, "b300")
    assert code == 0, log
    assert result["outcome"] == "deployed"


def test_two_deploys_at_once_one_gets_the_name_of_the_other(fresh):
    from ddtree_ops.inventory import connect_spec, load_inventory, select
    from ddtree_ops.remote import connect
    from ddtree_ops.service.layout import Layout

    (target,) = select(load_inventory(str(fresh.inventory)), ["b300"])
    with connect(connect_spec(target.host)) as session:
        assert session.acquire_lock(Layout.of(target).lock, {"who": "ann", "origin": "desk"}) is None
        done = run(fresh, "deploy", "b300")
    assert done.returncode == 6
    assert "ann on desk" in done.stdout


def test_preflight_names_every_problem_and_changes_nothing(fresh):
    done = run(
        fresh,
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


def test_a_hand_written_unit_that_ran_before_us_comes_back(fresh):
    fresh.reset("ct200")
    text = "[Service]\nExecStart=/bin/sleep infinity\n"
    write = f"printf '%s' '{text}' > /etc/systemd/system/sglang-k26-ddtree.service"
    assert (
        run(fresh, "lab", "ssh", "ct200", "sh", "-c", f'"{write}; systemctl daemon-reload"').returncode == 0
    )
    assert (
        run(fresh, "lab", "ssh", "ct200", "systemctl", "start", "sglang-k26-ddtree.service").returncode == 0
    )
    code, result, log = deploy(fresh, "ct200", "--runtime", "sglang-0.5.11-stock")
    assert code == 7, log
    assert "earlier unit file" in result["error"]
    state = unit(fresh, "ct200")
    assert (state["ActiveState"], "sleep" in state["ExecStart"]) == ("active", True)


def test_the_same_release_failing_later_is_not_called_a_rollback(fresh):
    fresh.reset("ct200")
    code, _, log = deploy(fresh, "ct200")
    assert code == 0, log
    damage = (
        "echo 'raise SystemExit(1)' > /opt/ddtree-lab/lab_engine.py; systemctl stop sglang-k26-ddtree.service"
    )
    assert run(fresh, "lab", "ssh", "ct200", "sh", "-c", f'"{damage}"').returncode == 0
    code, result, log = deploy(fresh, "ct200")
    assert code == 5, log
    assert result["outcome"] == "failed"
    assert "the cause is not the deployment" in result["error"]


def test_missing_weights_are_found_before_anything_is_changed(fresh):
    fresh.reset("ct200")
    removed = "rm /root/models/Kimi-K2.6/model-00007-of-000064.safetensors"
    assert run(fresh, "lab", "ssh", "ct200", "sh", "-c", f'"{removed}"').returncode == 0
    code, result, log = deploy(fresh, "ct200")
    assert code == 5, log
    assert "1 of 64 shards are missing or empty, first model-00007-of-000064.safetensors" in result["error"]
    assert "nothing was changed" in result["error"]


SERVICE_DIR = "/opt/ddtree-ops/services/sglang-k26-ddtree.service"


def on_host(lab, host: str, script: str) -> str:
    done = run(lab, "lab", "ssh", host, "sh", "-c", f"'{script}'")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_files_that_were_edited_or_removed_on_the_host(fresh):
    fresh.reset("ct200")
    code, _, log = deploy(fresh, "ct200")
    assert code == 0, log
    before = unit(fresh, "ct200")["InvocationID"]
    on_host(
        fresh,
        "ct200",
        "cd /opt/ddtree-ops/releases/*/sglang/srt; chmod u+w server_args.py; echo boom >> server_args.py",
    )
    code, result, log = deploy(fresh, "ct200")
    assert code == 0, log
    kinds = {change["kind"]: change["summary"] for change in result["plan"]["changes"]}
    assert set(kinds) == {"release", "restart"}
    assert "server_args.py" in kinds["release"]
    assert unit(fresh, "ct200")["InvocationID"] != before

    on_host(fresh, "ct200", "mv /opt/ddtree-ops/releases /opt/ddtree-ops/gone")
    code, result, log = deploy(fresh, "ct200", "--runtime", "sglang-0.5.11-stock")
    assert code == 5, log
    assert "is stopped: no release that passed here is whole any more" in result["error"]
    assert unit(fresh, "ct200")["ActiveState"] != "active"


def test_a_client_killed_while_it_waits_leaves_a_run_that_the_next_deploy_validates(fresh):
    fresh.reset("ct200")
    argv = [sys.executable, "-m", "ddtree_ops", "deploy", "ct200"]
    env = {**fresh.env, "DDTREE_OPS_INVENTORY": str(fresh.inventory)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert any(" wait: ..." in line for line in client.stdout)
        client.kill()
    before = unit(fresh, "ct200")["InvocationID"]
    code, result, log = deploy(fresh, "ct200")
    assert code == 0, log
    assert result["outcome"] == "passed"
    assert [change["kind"] for change in result["plan"]["changes"]] == ["validate"]
    assert unit(fresh, "ct200")["InvocationID"] == before

    on_host(fresh, "ct200", "systemctl restart sglang-k26-ddtree.service")
    code, result, log = deploy(fresh, "ct200")
    assert code == 0, log
    assert [change["kind"] for change in result["plan"]["changes"]] == ["validate"], (
        "nobody saw this run pass"
    )
    code, result, log = deploy(fresh, "ct200")
    assert (code, result["outcome"]) == (0, "unchanged"), log


def test_ctrl_c_says_what_state_every_host_is_left_in(fresh):
    for host in ("ct200", "b300"):
        fresh.reset(host)
    argv = [sys.executable, "-m", "ddtree_ops", "deploy", "ct200", "b300"]
    env = {**fresh.env, "DDTREE_OPS_INVENTORY": str(fresh.inventory)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
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


def test_sigterm_is_an_interruption_and_the_next_deploy_validates(fresh):
    fresh.reset("ct200")
    argv = [sys.executable, "-m", "ddtree_ops", "deploy", "ct200", "--json"]
    env = {**fresh.env, "DDTREE_OPS_INVENTORY": str(fresh.inventory)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None and client.stderr is not None
        for line in client.stderr:
            if " wait: ..." in line:
                break
        client.send_signal(signal.SIGTERM)
        (result,) = json.loads(client.stdout.read())
    assert client.returncode == 130
    assert result["outcome"] == "interrupted"
    assert "is not validated" in result["error"]
    code, result, log = deploy(fresh, "ct200")
    assert code == 0, log
    assert [change["kind"] for change in result["plan"]["changes"]] == ["validate"]


def test_secrets_reach_the_process_and_nothing_else(fresh):
    fresh.reset("b300")
    secrets = (
        "--set", "environment.HF_TOKEN=hf_one1", "--set", 'environment.MY_CREDENTIAL="hf_two2 x"',
        "--set", "environment.AWS_SECRET_ACCESS_KEY=hf_three3",
    )  # fmt: skip
    done = run(fresh, "deploy", "b300", "--dry-run", *secrets)
    assert done.returncode == 0, done.stderr
    assert "HF_TOKEN=********" in done.stdout
    seen = done.stdout + done.stderr
    code, result, log = deploy(fresh, "b300", *secrets, "--set", "args.cuda-graph-max-bs=40960")
    assert code == 5, log
    seen += log + json.dumps(result)
    for name in Path(result["evidence"]).iterdir():
        seen += name.read_text()
    code, result, log = deploy(fresh, "b300", *secrets)
    assert code == 0, log
    seen += log + json.dumps(result)
    seen += on_host(fresh, "b300", f"sudo cat {SERVICE_DIR}/history.jsonl")
    assert not {word for word in ("hf_one1", "hf_two2", "hf_three3") if word in seen}
    assert "600" in on_host(fresh, "b300", "sudo stat -c %a /etc/systemd/system/sglang-k26-ddtree.service")
    pid = unit(fresh, "b300")["MainPID"]
    assert "HF_TOKEN=hf_one1" in on_host(fresh, "b300", f"sudo cat /proc/{pid}/environ")
