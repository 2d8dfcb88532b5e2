"""The real sglang-router in front of both lab hosts; every failure is really caused.

The lab's image has no libstdc++, which the router's extension is linked against: this machine's is laid beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.paths import cache_dir

pytestmark = pytest.mark.lab

INVENTORY = Path(__file__).parents[1] / "data" / "inventories" / "nodes.yaml"
ROUTER = "sglang-router==0.3.2"
KEY, NEW_KEY = "sk-of-the-workers-1", "sk-of-the-workers-2"
LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1")


def deploy(desk, **variables: str) -> tuple[int, dict[str, Any], str]:
    done = desk.run("router", "deploy", "--json", **variables)
    assert done.stdout.strip(), done.stderr
    assert KEY not in done.stdout + done.stderr and NEW_KEY not in done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def status(desk) -> tuple[int, dict[str, Any]]:
    done = desk.run("router", "status", "--json")
    (view,) = json.loads(done.stdout)["routers"]
    return done.returncode, view


def wheels() -> Path:
    """The router and what it needs, downloaded once for this Python (the lab hosts have the same)."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = cache_dir() / "wheels" / f"{ROUTER.replace('==', '-')}-{python}"
    if not list(folder.glob("sglang_router-*.whl")):
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--only-binary",
            ":all:",
            "--dest",
            str(folder),
        ]
        subprocess.run(
            [*pip, ROUTER], check=True, timeout=900, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        )
    return folder


@pytest.fixture(scope="module")
def fronted(lab, new_desk):
    """Both hosts serve, with a key, and the first has the router's venv."""
    desk = new_desk("ct200", "b300", planted=True, inventory=INVENTORY, TEST_API_KEY=KEY)
    venv = lab.hosts["ct200"].root / "opt/router"
    site = venv / "lib" / (lab.hosts["ct200"].root / "usr/bin/python3").readlink().name / "site-packages"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to("/usr/bin/python3")
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for wheel in wheels().glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    native = venv / "lib/native"
    native.mkdir()
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for name in LIBRARIES:
        found = re.search(rf"^\s*{re.escape(name)} \(.*x86-64.*=> (\S+)$", listed, re.MULTILINE)
        assert found, f"{name} is not on this machine"
        shutil.copy(found[1], native / name)
    done = desk.run("deploy", "all/one")
    assert done.returncode == 0, done.stdout + done.stderr
    return desk


class TestStory:
    """In order: each chapter starts where the one before ended."""

    def test_1_it_is_deployed_and_answers_with_the_key_in_no_command_line(self, fronted):
        code, result, log = deploy(fronted)
        assert code == 0, log + str(result["error"])
        assert result["outcome"] == "deployed"
        checks = {check["name"]: check for check in result["checks"]}
        assert "sglang-router 0.3.2" in checks["router.venv"]["summary"]
        assert checks["router.smoke"]["verdict"] == "pass"
        assert checks["router.smoke"]["facts"]["answered_by"][0] in ("ct200/one", "b300/one")
        code, view = status(fronted)
        assert code == 0
        assert (view["healthy"], view["as_wished"], view["last"]["verdict"]) == (True, True, "pass")
        seen = fronted.host("ct200", "ps -axww -o args") + fronted.host(
            "ct200", "systemctl cat sglang-router"
        )
        assert "--worker-urls http://127." in seen
        assert KEY not in seen

    def test_2_again_changes_nothing(self, fronted):
        before = fronted.host("ct200", "systemctl show --property=InvocationID sglang-router")
        code, result, log = deploy(fronted)
        assert (code, result["outcome"], result["diff"]) == (0, "unchanged", []), log
        assert fronted.host("ct200", "systemctl show --property=InvocationID sglang-router") == before

    def test_3_a_policy_it_does_not_have_is_refused_by_its_own_parser(self, fronted):
        code, result, _ = deploy(fronted, TEST_ROUTER_POLICY="fastest")
        assert code == 5
        assert "argument --policy: invalid choice: 'fastest'" in result["error"]
        assert "the router keeps running as it did" in result["error"]

    def test_4_a_port_that_is_taken_is_found_before(self, fronted):
        code, result, _ = deploy(fronted, TEST_ROUTER_PORT="22022")
        assert code == 5
        assert "port 22022 is taken by sshd" in result["error"]

    def test_5_one_worker_down(self, fronted):
        assert fronted.run("stop", "b300/one").returncode == 0
        code, result, _ = deploy(fronted)
        assert code == 5
        assert "router.worker.b300/one: http://127." in result["error"]
        assert "nothing listens there" in result["error"]
        deadline = time.monotonic() + 120  # the router looks at its workers every few seconds
        while (seen := status(fronted))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.5)
        code, view = seen
        assert code == 5
        assert {item["target"]: item["healthy"] for item in view["workers"]} == {
            "ct200/one": True,
            "b300/one": False,
        }

    def test_6_what_does_not_come_up_is_taken_back_and_keeps_the_key_that_the_workers_have_now(self, fronted):
        done = fronted.run("deploy", "all/one", TEST_API_KEY=NEW_KEY)
        assert done.returncode == 0, done.stdout + done.stderr
        wrong = {"TEST_ROUTER_ENDPOINT": "/nowhere", "TEST_ROUTER_WINDOW": "15s", "TEST_API_KEY": NEW_KEY}
        code, result, log = deploy(fronted, **wrong)
        assert code == 7, log + str(result["error"])
        assert result["outcome"] == "rolled-back"
        assert "the key of the workers changes" in result["reasons"]
        assert "why: not healthy to the router any more: http://127." in result["error"]
        code, view = status(fronted)
        assert (code, view["healthy"], view["as_wished"], view["last"]["reason"]) == (
            0,
            True,
            True,
            "rollback",
        )
        code, result, log = deploy(fronted, TEST_API_KEY=NEW_KEY)
        assert (code, result["outcome"]) == (0, "unchanged"), log

    def test_7_it_is_stopped_and_said_so_without_its_key(self, fronted):
        stopped = fronted.run("router", "stop", TEST_API_KEY="")
        assert stopped.returncode == 0, stopped.stderr
        code, view = status(fronted)
        assert (code, view["running"], view["answers"]) == (5, False, False)
        acts = (fronted.lab.hosts["ct200"].root / "opt/ddtree-ops/audit.jsonl").read_text()
        assert any(json.loads(line)["action"] == "router stop" for line in acts.splitlines())
        done = fronted.run("router", "logs", "--invocation", "all", "--grep", "Started")
        assert "Started sglang-router.service" in done.stdout
        assert "\x1b" not in done.stdout
