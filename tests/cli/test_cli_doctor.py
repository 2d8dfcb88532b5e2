"""``ddtree-ops doctor`` as a person types it: a row for every host, whatever is wrong with it, and one exit code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.lab

INVENTORY = """\
schema: 1
runtimes:
  r: {{description: sglang-0.5.11, python: cp312}}
defaults:
  host: {{ssh: {{port: 22022, identity_file: {lab}/id_ed25519, known_hosts: {lab}/known_hosts, user: root}}}}
services:
  s:
    unit: sglang-k26-ddtree.service
    runtime: r
    venv: /root/venv_sglang211
    model: /root/models/Kimi-K2.6
    limits: {{memlock: 65536, nofile: 4096}}
hosts:
  good: {{address: {net}.11, services: [s]}}
  closed: {{address: {net}.11, ssh: {{port: 9}}, services: [s]}}
  changed: {{address: {net}.11, ssh: {{fingerprint: SHA256:{key}}}, services: [s]}}
  nosudo: {{address: {net}.11, ssh: {{user: nosudo}}, services: [s]}}
  nopython: {{address: {net}.11, ssh: {{python: /nonexistent/python3}}, services: [s]}}
  nomodel: {{address: {net}.11, services: {{s: {{model: /srv/none}}}}}}
  crowded: {{address: {net}.11, deploy_root: /proc/none, services: [s]}}
"""


@pytest.fixture(scope="module")
def inventory(lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lab.reset("ct200")
    path = tmp_path_factory.mktemp("doctor") / "site.yaml"
    path.write_text(INVENTORY.format(lab=lab.directory, net=lab.env["DDTREE_OPS_LAB_NET"], key="A" * 43))
    return path


def doctor(lab, inventory: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = lab.commands.run(
        ["-i", str(inventory), "doctor", *argv], env=lab.env
    )
    return done


def test_every_host_is_a_row_and_the_worst_decides(lab, inventory):
    done = doctor(lab, inventory, "--json")
    assert done.returncode == 5, done.stderr
    document = json.loads(done.stdout)
    assert (document["schema"], document["exit_code"]) == (1, 5)
    rows = {row["host"]: row for row in document["hosts"]}
    assert list(rows) == ["good", "closed", "changed", "nosudo", "nopython", "nomodel", "crowded"]
    failed = {
        name: {
            check["name"].removeprefix("preflight."): check
            for check in row["checks"]
            if check["verdict"] == "fail"
        }
        for name, row in rows.items()
    }
    assert {name: list(checks) for name, checks in failed.items()} == {
        "good": [],
        "closed": ["reach"],
        "changed": ["reach"],
        "nosudo": ["reach"],
        "nopython": ["reach"],
        "nomodel": ["model"],
        "crowded": ["deploy-root", "disk"],
    }
    assert {name for name, row in rows.items() if row["unreachable"]} == {"closed", "changed"}
    assert failed["changed"]["reach"]["facts"] == {"error": "HostKeyError"}
    assert failed["nosudo"]["reach"]["facts"] == {"error": "SudoError"}
    assert "/nonexistent/python3 was not found" in failed["nopython"]["reach"]["summary"]
    assert all(check["hint"] for checks in failed.values() for check in checks.values())
    assert rows["good"]["verdict"] == "pass"


def test_hosts_out_of_reach_are_told_and_are_no_failed_check(lab, inventory):
    done = doctor(lab, inventory, "good", "closed", "changed")
    assert done.returncode == 4, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["HOST", "good", "closed", "changed"]
    assert "✗ closed reach: " in done.stdout and "    next: " in done.stdout
    assert "reach: reached" not in done.stdout


def test_a_warning_is_no_pass_and_all_checks_can_be_seen(lab, inventory):
    done = doctor(lab, inventory, "good", "--set", "limits.nofile=infinity", "--all")
    assert done.returncode == 8, done.stdout + done.stderr
    assert "? good limits: LimitNOFILE=infinity becomes " in done.stdout
    assert "✓ good journal: journal readable and persistent" in done.stdout
    done = doctor(lab, inventory, "good")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stdout
