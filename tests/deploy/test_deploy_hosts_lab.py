"""Hosts on which something else ran before, or that somebody changed by hand between two deployments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.lab

SERVICE = "sglang-k26-ddtree.service"
SERVICE_DIR = f"/opt/ddtree-ops/services/{SERVICE}"


@pytest.fixture(scope="module")
def desk(new_desk):
    return new_desk("ct200", "b300", lease="60s", planted=True)


class TestChangedHost:
    """In order: each chapter starts where the one before ended."""

    def test_1_a_hand_written_unit_that_ran_before_us_comes_back(self, desk):
        text = "[Service]\\nExecStart=/bin/sleep infinity\\n"
        desk.host("ct200", f"printf '{text}' > /etc/systemd/system/{SERVICE}; systemctl daemon-reload")
        desk.host("ct200", f"systemctl start {SERVICE}")
        code, result, log = desk.deploy("ct200", "--runtime", "sglang-0.5.11-stock")
        assert code == 7, log
        assert "earlier unit file" in result["error"]
        state = desk.unit("ct200")
        assert (state["ActiveState"], "sleep" in state["ExecStart"]) == ("active", True)

    def test_2_a_file_that_was_edited_on_the_host_is_repaired(self, desk):
        code, _, log = desk.deploy("ct200")
        assert code == 0, log
        before = desk.unit("ct200")["InvocationID"]
        (release,) = [
            line
            for line in desk.host("ct200", f"readlink -f {SERVICE_DIR}/current").splitlines()
            if "/" in line
        ]
        desk.host("ct200", f"cd {release}/sglang/srt; chmod u+w server_args.py; echo boom >> server_args.py")
        code, result, log = desk.deploy("ct200")
        assert code == 0, log
        kinds = {change["kind"]: change["summary"] for change in result["plan"]["changes"]}
        assert set(kinds) == {"release", "restart"}
        assert "server_args.py" in kinds["release"]
        assert desk.unit("ct200")["InvocationID"] != before

    def test_3_the_same_release_failing_later_is_not_called_a_rollback(self, desk):
        engine = "/opt/ddtree-lab/lab_engine.py"
        desk.host("ct200", f"cp {engine} {engine}.kept; echo 'raise SystemExit(1)' > {engine}")
        desk.host("ct200", f"systemctl stop {SERVICE}")
        code, result, log = desk.deploy("ct200")
        assert code == 5, log
        assert result["outcome"] == "failed"
        assert "the cause is not the deployment" in result["error"]
        desk.host("ct200", f"mv {engine}.kept {engine}")

    def test_4_with_all_releases_gone_there_is_nothing_to_go_back_to(self, desk):
        desk.host("ct200", "mv /opt/ddtree-ops/releases /opt/ddtree-ops/gone")
        code, result, log = desk.deploy("ct200", "--runtime", "sglang-0.5.11-stock")
        assert code == 5, log
        assert "is stopped: no release that passed here is whole any more" in result["error"]
        assert desk.unit("ct200")["ActiveState"] != "active"

    def test_5_missing_weights_are_found_before_anything_is_changed(self, desk):
        desk.host("ct200", "rm /root/models/Kimi-K2.6/model-00007-of-000064.safetensors")
        code, result, log = desk.deploy("ct200")
        assert code == 5, log
        assert (
            "1 of 64 shards are missing or empty, first model-00007-of-000064.safetensors" in result["error"]
        )
        assert "nothing was changed" in result["error"]


def test_secrets_reach_the_process_and_nothing_else(desk):
    secrets = (
        "--set", "environment.HF_TOKEN=hf_one1", "--set", 'environment.MY_CREDENTIAL="hf_two2 x"',
        "--set", "environment.AWS_SECRET_ACCESS_KEY=hf_three3",
    )  # fmt: skip
    done = desk.run("deploy", "b300", "--dry-run", *secrets)
    assert done.returncode == 0, done.stderr
    assert "HF_TOKEN=********" in done.stdout
    seen = done.stdout + done.stderr
    code, result, log = desk.deploy("b300", *secrets, "--set", "args.cuda-graph-max-bs=40960")
    assert code == 5, log
    seen += log + json.dumps(result)
    for name in Path(result["evidence"]).iterdir():
        seen += name.read_text()
    code, result, log = desk.deploy("b300", *secrets)
    assert code == 0, log
    seen += log + json.dumps(result)
    seen += desk.host("b300", f"sudo cat {SERVICE_DIR}/history.jsonl")
    assert not {word for word in ("hf_one1", "hf_two2", "hf_three3") if word in seen}
    assert "600" in desk.host("b300", f"sudo stat -c %a /etc/systemd/system/{SERVICE}")
    pid = desk.unit("b300")["MainPID"]
    assert "HF_TOKEN=hf_one1" in desk.host("b300", f"sudo cat /proc/{pid}/environ")
