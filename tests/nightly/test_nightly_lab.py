"""Nights on both lab hosts: one that deploys, one that is killed half way, one with faults that the comparison names."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops import lab as lab_hosts
from ddtree_ops.errors import ExitCode
from ddtree_ops.playbook.trend import Store
from ddtree_ops.report.write import read_report
from ddtree_ops.results import Verdict
from ddtree_ops.runreport import RunReport

pytestmark = pytest.mark.lab

FAULTS = "/run/lab-faults"
SERVICE = "k26-ddtree"
PLAYBOOK = {
    "schema": 1,
    "name": "night",
    "steps": [
        "doctor",
        "drift",
        {"deploy": {"when": "asked"}},
        {"validate": {"suite": "SUITE"}},
        "journal",
        "trend",
    ],
    "on_failure": ["capture"],
}
SUITE = {"schema": 1, "checks": ["short-chat", "acceptance", {"steady": {"window": 0}}]}


@dataclass
class Nights:
    """Both hosts with a deployed service whose faults can be switched, and the commands."""

    lab: Any
    root: Path
    playbook: Path

    def env(self, more: dict[str, str]) -> dict[str, str]:
        state = {
            "DDTREE_OPS_INVENTORY": str(self.root / "night.yaml"),
            "XDG_STATE_HOME": str(self.root / "state"),
        }
        return {**self.lab.env, **state, **more}

    def run(self, *argv: str, **more: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.lab.commands.run(argv, env=self.env(more))
        return done

    def fault(self, host: str, text: str) -> None:
        script = f"printf '%s' {shlex.quote(text)} > {FAULTS}"
        argv = lab_hosts.ssh_argv(host, ["sudo", "-n", "sh", "-euc", shlex.quote(script)])
        subprocess.run(argv, check=True, capture_output=True, timeout=60)

    def report(self, name: str) -> RunReport:
        return read_report(self.root / name)

    @property
    def store(self) -> Store:
        return Store(self.root / "state" / "ddtree-ops" / "history", "night")


@pytest.fixture(scope="module")
def nights(lab: Any, plant: Any, tmp_path_factory: pytest.TempPathFactory) -> Nights:
    root = tmp_path_factory.mktemp("nights")
    data = yaml.safe_load(lab.inventory.read_text())
    data["services"][SERVICE]["environment"] = {"LAB_LOAD_SECONDS": "0.3", "LAB_FAULTS_FILE": FAULTS}
    data["defaults"]["service"]["health"]["window"] = "0.3s"
    data["defaults"]["service"]["rollback"] = {"lease": "60s", "grace": "60s"}
    (root / "night.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    (root / "suite.yaml").write_text(yaml.safe_dump(SUITE))
    playbook = root / "playbook.yaml"
    playbook.write_text(yaml.safe_dump(PLAYBOOK).replace("SUITE", str(root / "suite.yaml")))
    for host in ("ct200", "b300"):
        lab.reset(host)
        plant(lab.hosts[host])
    return Nights(lab, root, playbook)


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An address that notes what it is told."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook/s3cret-t0ken", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_night_deploys_and_passes(nights: Nights) -> None:
    done = nights.run("nightly", "all", "--deploy", "--playbook", str(nights.playbook), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert (document.pop("exit_code"), document.pop("problems")) == (0, [])
    found = RunReport.from_json(document)
    assert (found.complete, found.verdict) == (True, Verdict.PASS)
    assert [target.target for target in found.targets] == ["ct200", "b300"]
    for target in found.targets:
        verdicts = {check.name: check.verdict.value for check in target.checks}
        assert verdicts["drift"] == "skipped"
        passed = {name for name, verdict in verdicts.items() if verdict == "pass"}
        assert {"preflight.reach", "deploy", "deploy.smoke.completion"} <= passed
        assert {"short-chat", "acceptance", "steady", "journal"} <= passed
        assert target.facts["flags"]
        assert any(figure.name == "ready" for figure in target.figures)
        for number in range(1, 5):
            nights.store.add(replace(found, id=f"2026010{number}T010000Z-0000", targets=(target,)))
        assert len(nights.store.past(target.host, SERVICE).runs) == 5


def test_killed_half_way_it_leaves_a_valid_partial_report_and_no_lock(nights: Nights) -> None:
    reports = nights.root / "state" / "ddtree-ops" / "reports"
    before = {folder.name for folder in reports.iterdir()}
    argv = ("run", str(nights.playbook), "all")

    def found() -> RunReport | None:
        folders = [folder for folder in reports.iterdir() if folder.name not in before]
        return read_report(folders[0]) if folders and (folders[0] / "report.json").exists() else None

    with nights.lab.commands.start(argv, env=nights.env({}), merged=True) as command:
        deadline = time.monotonic() + 120
        while (part := found()) is None or not any(target.checks for target in part.targets):
            assert command.poll() is None, command.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        refused = nights.run("nightly", "b300", "--playbook", str(nights.playbook))
        assert command.poll() is None
        command.kill()
        command.communicate()
    left = found()
    assert left is not None
    assert (left.complete, left.ended) == (False, "")
    assert left.verdict is not Verdict.PASS
    assert (reports / left.id / "summary.md").exists()
    assert len(nights.store.past("ct200", SERVICE).runs) == 5
    assert refused.returncode == ExitCode.LOCK_HELD
    assert "another nightly is under way on b300" in refused.stderr


def test_what_became_worse_and_what_is_new_is_named(
    nights: Nights, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    address, told = hook
    summary = nights.root / "step.md"
    nights.fault("ct200", "accept-1")
    nights.fault("b300", "late-crash=3")
    done = nights.run(
        "nightly", "--playbook", str(nights.playbook), "--report-dir", str(nights.root / "faulty"), "--webhook-env", "HOOK",
        HOOK=address, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary),
    )  # fmt: skip
    assert done.returncode == ExitCode.CHECK_FAILED, done.stdout + done.stderr
    faulty = nights.report("faulty")
    assert faulty.complete
    slow, crashed = ({check.name: check for check in target.checks} for target in faulty.targets)
    assert slow["short-chat"].verdict is Verdict.PASS
    assert slow["trend.accept_length"].verdict is Verdict.FAIL
    assert slow["trend.accept_length"].summary.startswith("worse than before: accept_length 1 tokens/step")
    assert crashed["journal"].verdict is Verdict.FAIL
    assert crashed["trend.failures"].verdict is Verdict.FAIL
    assert crashed["trend.failures"].summary.startswith("new fatal failure, in none of 5 earlier runs")
    assert "validate" not in slow.keys() | crashed.keys()
    evidence = [Path(str(target.facts["evidence"])) for target in faulty.targets]
    assert all((folder / "journal.jsonl").is_file() for folder in evidence)
    (sent,) = told
    assert f"b300 fail: journal: {crashed['journal'].summary}\n" in sent["text"]
    assert re.search(
        r"ddtree-ops (-i \S+ )?diagnose b300 --invocation [0-9a-f]{32}$", crashed["journal"].hint
    )
    assert (sent["verdict"], sent["exit_code"], sent["id"]) == ("fail", 5, faulty.id)
    assert "s3cret-t0ken" not in done.stdout + done.stderr
    assert "::error" in done.stdout
    assert "worse than before" in summary.read_text()
    assert len(nights.store.past("ct200", SERVICE).runs) == 6
