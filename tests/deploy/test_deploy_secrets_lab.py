"""Secrets on a lab host: in the process, and in nothing that was printed or stored on either side."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

pytestmark = pytest.mark.lab

UNIT = "sglang-k26-ddtree.service"
SERVICE_DIR = f"/opt/ddtree-ops/services/{UNIT}"
KEY, ROTATED, ADMIN, TOKEN = (
    "sk-first-'q\"1",
    "sk-rotated-key-2",
    "sk-admin-key-3",
    "hf_TheTokenOfTheLab 4$HOME",
)
SECRETS = {
    "api_key": {"env": "T_KEY"},
    "admin_api_key": {"file": "admin"},
    "HF_TOKEN": {"command": ["cat", "TOKEN"]},
}


class Desk:
    """A person's machine: inventories, the commands typed, and all that they printed."""

    def __init__(self, lab: Any, folder: Path) -> None:
        self.lab, self.folder, self.seen = lab, folder, ""
        self.full = self.inventory("full", SECRETS)
        self.less = self.inventory("less", {"api_key": SECRETS["api_key"]})
        self.none = self.inventory("none", {})
        (folder / "admin").write_text(f"{ADMIN}\n")
        (folder / "TOKEN").write_text(f"{TOKEN}\n")
        self.address = lab.hosts["ct200"].address

    def inventory(self, name: str, secrets: dict[str, Any]) -> str:
        data = yaml.safe_load(self.lab.inventory.read_text())
        service = data["services"]["k26-ddtree"]
        service["environment"] = {"LAB_LOAD_SECONDS": "0.3"}
        service["secrets"] = secrets
        data["defaults"]["service"]["health"]["window"] = "0.3s"
        data["defaults"]["service"]["rollback"] = {"lease": "60s", "grace": "60s"}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return str(path)

    def run(self, *argv: str, key: str | None = KEY) -> subprocess.CompletedProcess[str]:
        env = {**self.lab.env, "XDG_STATE_HOME": str(self.folder / "state")}
        if key is not None:
            env["T_KEY"] = key
        done: subprocess.CompletedProcess[str] = self.lab.commands.run(argv, env=env, cwd=self.folder)
        self.seen += done.stdout + done.stderr
        return done

    def host(self, script: str) -> str:
        done = self.lab.commands.run(["lab", "ssh", "ct200", "sh", "-c", f"'{script}'"], env=self.lab.env)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def status(self, key: str | None, path: str = "/v1/models") -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.get(f"http://{self.address}:30001{path}", headers=headers, trust_env=False).status_code

    def invocation(self) -> str:
        return self.host(f"systemctl show -P InvocationID {UNIT}").splitlines()[-1]


@pytest.fixture(scope="module")
def desk(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    lab.reset("ct200")
    return Desk(lab, tmp_path_factory.mktemp("desk"))


class TestStory:
    """In order: each chapter starts where the one before ended."""

    def test_1_a_secret_that_cannot_be_had_ends_it_before_any_host_is_touched(self, desk: Desk) -> None:
        done = desk.run("-i", desk.full, "deploy", "ct200", key=None)
        assert done.returncode == 78
        assert "secret api_key (env T_KEY) is not set here: export T_KEY=... and try again" in done.stderr
        assert "nothing was contacted or changed" in done.stderr
        assert "connect" not in done.stdout and "preflight" not in done.stdout
        assert desk.host("ls /opt").split().count("ddtree-ops") == 0

    def test_2_it_serves_with_the_key_and_refuses_without(self, desk: Desk, plant: Any) -> None:
        plant(desk.lab.hosts["ct200"])
        done = desk.run("-i", desk.full, "deploy", "ct200", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        (result,) = json.loads(done.stdout)
        summaries = [change["summary"] for change in result["plan"]["changes"] if change["kind"] == "secret"]
        assert summaries == ["secret api_key is new", "secret admin_api_key is new", "secret HF_TOKEN is new"]
        assert [desk.status(key) for key in (None, "wrong", KEY)] == [401, 401, 200]
        assert [desk.status(key, "/flush_cache") for key in (KEY, ADMIN)] == [401, 200]
        assert desk.status(None, "/health") == 200
        pid = desk.host(f"systemctl show -P MainPID {UNIT}").splitlines()[-1]
        variables = desk.host(f'tr "\\0" "\\n" < /proc/{pid}/environ').splitlines()
        assert f"HF_TOKEN={TOKEN}" in variables
        assert not [line for line in variables if KEY in line or ADMIN in line]
        modes = desk.host(f'stat -c "%U %a %n" {SERVICE_DIR}/secrets/*').splitlines()
        assert {line.rsplit("/", 1)[-1]: line.split()[:2] for line in modes if SERVICE_DIR in line} == {
            "HF_TOKEN.env": ["root", "600"],
            "engine.yaml": ["root", "600"],
        }

    def test_3_again_changes_nothing_and_a_client_without_the_key_is_told(self, desk: Desk) -> None:
        done = desk.run("-i", desk.full, "deploy", "ct200", "--json")
        assert (done.returncode, json.loads(done.stdout)[0]["outcome"]) == (0, "unchanged")
        done = desk.run("-i", desk.none, "smoke", "ct200")
        assert done.returncode == 5
        assert (
            "401 Unauthorized: the engine was started with an API key, and none is known here" in done.stdout
        )
        assert "secrets: {api_key: {env: NAME_OF_A_VARIABLE}}" in done.stdout
        assert "--max-tokens" not in done.stdout, "more tokens would be refused too"

    def test_4_logs_and_diagnosis_of_a_client_that_knows_nothing(self, desk: Desk) -> None:
        done = desk.run("-i", desk.none, "logs", "ct200", "--grep", "server_args=ServerArgs", "--json")
        assert done.returncode == 0, done.stderr
        assert "api_key=********, admin_api_key=********" in done.stdout
        assert "sk-first" in desk.host(f"journalctl -u {UNIT} -o cat --all"), (
            "the journal of the host itself has it"
        )
        desk.run("-i", desk.none, "diagnose", "ct200", "--json")

    def test_5_a_rotated_key_is_a_change_and_restarts(self, desk: Desk) -> None:
        before = desk.invocation()
        done = desk.run("-i", desk.full, "deploy", "ct200", "--json", key=ROTATED)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [change["summary"] for change in json.loads(done.stdout)[0]["plan"]["changes"]] == [
            "secret api_key changes",
            "restart: secret api_key changes",
        ]
        assert desk.invocation() != before
        assert [desk.status(key) for key in (KEY, ROTATED)] == [401, 200]

    def test_6_a_failed_deploy_goes_back_to_a_unit_whose_secrets_are_still_there(self, desk: Desk) -> None:
        done = desk.run(
            "-i", desk.less, "deploy", "ct200", "--set", "args.cuda-graph-max-bs=4096", key=ROTATED
        )
        assert done.returncode == 7, done.stdout + done.stderr
        assert [desk.status(key) for key in (KEY, ROTATED)] == [401, 200], "a rotated key stays rotated"
        assert "HF_TOKEN.env" in desk.host(f"ls {SERVICE_DIR}/secrets")
        assert list((desk.folder / "state").rglob("journal.jsonl"))

    def test_7_what_the_inventory_names_no_more_goes_after_a_deploy_that_passed(self, desk: Desk) -> None:
        done = desk.run("-i", desk.less, "deploy", "ct200", key=ROTATED)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "removed from the host's secrets: HF_TOKEN.env" in done.stdout
        assert desk.host(f"ls {SERVICE_DIR}/secrets").split()[-1] == "engine.yaml"
        assert desk.status(None, "/flush_cache") == 401 and desk.status(ROTATED, "/flush_cache") == 200
        done = desk.run("-i", desk.less, "rollback", "ct200", key=None)
        assert done.returncode == 5, done.stdout + done.stderr
        assert "its secrets are gone from the host: HF_TOKEN.env" in done.stdout + done.stderr

    def test_8_nothing_that_was_printed_or_stored_holds_a_secret(self, desk: Desk) -> None:
        stored = "".join(
            path.read_text(errors="replace") for path in (desk.folder / "state").rglob("*") if path.is_file()
        )
        assert len(stored) > 1000 and len(desk.seen) > 1000
        words = {KEY, ROTATED, ADMIN, TOKEN, "sk-first", "TheTokenOfTheLab"}
        assert not {word for word in words if word in desk.seen}
        assert not {word for word in words if word in stored}
        pattern = "sk-first|sk-rotated|sk-admin|TheTokenOfTheLab"
        found = desk.host(
            f'grep -rlE "{pattern}" /etc /opt /run /var/lib /tmp /root 2>/dev/null; true'
        ).split()
        places = {path for path in found if path.startswith("/")}
        assert places == {f"{SERVICE_DIR}/secrets/engine.yaml", f"/run/credentials/{UNIT}/engine.yaml"}
        properties = desk.host(f"systemctl show {UNIT}; cat /etc/systemd/system/{UNIT}")
        assert "ExecStart" in properties
        lines = desk.host('cat /proc/[0-9]*/cmdline | tr "\\0" " "')
        assert "--config /run/credentials" in lines
        records = desk.host(
            f"cat {SERVICE_DIR}/history.jsonl {SERVICE_DIR}/units/* /opt/ddtree-ops/audit.jsonl 2>/dev/null; true"
        )
        assert '"event":"activate"' in records
        for text in (properties, lines, records):
            assert not {
                word for word in ("sk-first", "sk-rotated", "sk-admin", "TheTokenOfTheLab") if word in text
            }
