"""Plan, apply, drift and status on a lab host: each kind of drift is really caused, and then put right by a deploy."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ddtree_ops.checks.smoke import run_smoke
from ddtree_ops.cli.common import open_session
from ddtree_ops.deploy.confirming import confirm
from ddtree_ops.deploy.drift import DriftReport, Severity, find_drift
from ddtree_ops.deploy.saved import look_and_plan, read_plan, save_plans
from ddtree_ops.deploy.status import status_of
from ddtree_ops.errors import ExitCode, NotDeployed
from ddtree_ops.inventory import load_inventory, override, select
from ddtree_ops.inventory.models import Inventory, Target
from ddtree_ops.playbook import operate
from ddtree_ops.playbook.run import run_playbook
from ddtree_ops.remote.session import Session
from ddtree_ops.results import RUN_END, Event, EventKind, Verdict

pytestmark = pytest.mark.lab

UNIT = "sglang-k26-ddtree.service"
SERVICE = f"/opt/ddtree-ops/services/{UNIT}"
QUICK = (
    "health.window=0.3s", 'environment.LAB_LOAD_SECONDS="0.3"', "rollback.lease=60s", "rollback.grace=60s",
)  # fmt: skip


@dataclass(frozen=True)
class Host:
    """A lab host with the service on it."""

    target: Target
    session: Session
    inventory: Inventory
    lab: Any

    def typed(self, *argv: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.lab.commands.run(
            argv, env={**self.lab.env, "DDTREE_OPS_INVENTORY": self.inventory.path}
        )
        return done

    def deploy(self) -> None:
        done = self.typed("deploy", "ct200", *(word for item in QUICK for word in ("--set", item)))
        assert done.returncode == 0, done.stdout + done.stderr

    def shell(self, script: str) -> str:
        return self.session.run(["sh", "-euc", script], check=True).text

    def drift(self) -> DriftReport:
        return find_drift(self.target, self.session)

    def found(self) -> dict[str, tuple[str, ...]]:
        return {item.id: item.names for item in self.drift().findings}


@pytest.fixture(scope="module")
def host(lab) -> Iterator[Host]:
    lab.reset("ct200")
    inventory = load_inventory(str(lab.inventory))
    (target,) = select(inventory, ["ct200"])
    target = override(target, list(QUICK), inventory=inventory)
    with open_session(target) as session:
        yield Host(target, session, inventory, lab)


def test_1_nothing_was_ever_deployed(host):
    assert host.drift().exit_code is ExitCode.INCONCLUSIVE
    for playbook, code in (
        (operate.start(wait=True, smoke=False, load_timeout=None), 1),
        (operate.stop(drain_timeout=None), 1),
        (operate.go_back(to=None), 1),
        (operate.wait(load_timeout=None), 8),
    ):
        events: list[Event] = []
        (done,) = run_playbook(playbook, [host.target], connect=open_session, report=events.append)
        assert isinstance(done.error, NotDeployed), playbook.name
        assert (int(done.error.exit_code), done.error.details) == (code, ())
        assert done.error.state == "nothing was changed"
        assert done.error.hint == "ddtree-ops deploy ct200"
        assert done.error.message == f"nothing deployed: {UNIT} does not exist on ct200"
        ended = EventKind.UNSURE if code == ExitCode.INCONCLUSIVE else EventKind.FAIL
        assert [event.kind for event in events if event.phase != RUN_END] == [EventKind.START, ended]
    smoked = run_smoke(host.session, host.target, report=lambda event: None)
    assert smoked.verdict is Verdict.INCONCLUSIVE
    with open_session(host.target) as session, pytest.raises(NotDeployed) as caught:
        confirm(host.target, session, lambda event: None)
    assert caught.value.exit_code is ExitCode.ERROR
    row = status_of(host.target, host.session)
    assert (row.deployed, row.exit_code) == (False, ExitCode.INCONCLUSIVE)
    before = host.session.round_trips
    plan = look_and_plan(host.target, host.session).plan
    assert [change.kind.value for change in plan.changes] == ["release", "unit", "link", "start"]
    assert host.session.round_trips - before == 2


def test_2_what_was_deployed_has_no_drift_and_its_status_says_so(host, plant):
    plant(host.lab.hosts["ct200"])
    host.deploy()
    before = host.session.round_trips
    report = host.drift()
    assert (report.findings, report.files > 2000, report.exit_code) == ((), True, ExitCode.OK)
    assert host.session.round_trips - before == 1
    told = status_of(host.target, host.session).to_json()
    assert (told["ready"], told["validated"], told["problem"], told["exit_code"]) == (
        "validated",
        True,
        "",
        0,
    )
    assert told["patch"] == {
        "state": "patched",
        "sized": True,
        "summary": told["patch"]["summary"],
        "overlay": "ddtree_sglang 0.1.0 with entry point ddtree",
    }
    points = f"{SERVICE}/current/ddtree_sglang-0.1.0.dist-info/entry_points.txt"
    host.shell(f"mv {points} {SERVICE}/points")
    without = status_of(host.target, host.session).to_json()["patch"]["overlay"]
    host.shell(f"mv {SERVICE}/points {points}")
    assert without == "ddtree_sglang 0.1.0 WITHOUT an entry point", "of the host, not of the bundle here"
    assert told["accept_length"] > 1
    assert told["tokens_per_s"] > 0
    assert told["release"] == told["last_good"]["release"]
    plan = look_and_plan(host.target, host.session).plan
    assert plan.empty
    assert plan.stays == ("no restart: it runs what is wished, and this run of it passed",)


def test_3_the_plan_names_arguments_and_the_one_file_of_another_runtime(host):
    changed = override(
        host.target, ["speculative.budget=16", "runtime=sglang-0.5.11-stock"], inventory=host.inventory
    )
    plan = look_and_plan(changed, host.session).plan
    assert plan.files is not None
    assert plan.files.changed == ("sglang/srt/model_executor/cuda_graph_runner.py",)
    assert (plan.files.added, plan.files.removed) == ((), ())
    assert [str(item) for item in plan.arguments or ()] == ["--speculative-ddtree-budget: 32 -> 16"]
    assert plan.reasons == ("the release changes", "the unit file changes")


def test_4_a_saved_plan_is_refused_once_the_host_has_changed_and_applied_when_not(host, tmp_path):
    path = tmp_path / "plan.json"
    settings = (*QUICK, "speculative.budget=16")
    asked = [word for item in settings for word in ("--set", item)]
    done = host.typed("plan", "ct200", *asked, "--out", str(path), "--detailed-exitcode", "--json")
    assert done.returncode == 2, done.stderr
    (plan,) = json.loads(done.stdout)["plans"]
    assert plan["arguments"] == [{"name": "--speculative-ddtree-budget", "before": "32", "after": "16"}]
    assert read_plan(path).targets[0].digest == plan["digest"]
    run = host.session.run(["systemctl", "show", "-P", "InvocationID", UNIT]).text

    host.shell(f"echo '# by hand' >> /etc/systemd/system/{UNIT}")
    refused = host.typed("apply", str(path))
    assert refused.returncode == 1, refused.stdout
    assert "  the unit file (" in refused.stdout
    assert "nothing was changed" in refused.stdout
    assert f"--set speculative.budget=16 --out {path}" in refused.stdout
    assert host.session.run(["systemctl", "show", "-P", "InvocationID", UNIT]).text == run

    host.shell(f"sed -i '$d' /etc/systemd/system/{UNIT}; systemctl daemon-reload")
    applied = host.typed("apply", str(path), "--json")
    assert applied.returncode == 0, applied.stderr
    (result,) = json.loads(applied.stdout)
    assert (result["outcome"], result["plan"]["digest"]) == ("deployed", plan["digest"])
    assert (
        f"note plan {plan['digest'][:12]}: --speculative-ddtree-budget: 32 -> 16; restart" in applied.stderr
    )
    assert host.session.run(["systemctl", "show", "-P", "InvocationID", UNIT]).text != run


def test_5_an_inventory_that_is_ahead_is_told_from_a_unit_that_was_edited(host):
    assert set(host.found()) == {"unit.other"}
    host.shell(f"sed -i s/LAB_GPU_GB=96/LAB_GPU_GB=95/ /etc/systemd/system/{UNIT}")
    found = host.found()
    assert set(found) == {"unit.edited", "unit.reload", "process.environment"}
    assert found["process.environment"] == ("LAB_GPU_GB: 96 -> 95",)
    assert "-Environment=LAB_GPU_GB=95" in found["unit.edited"]


def test_6_a_drop_in_and_a_variable_of_the_manager_are_seen_in_the_process(host):
    host.shell(
        f"mkdir -p /etc/systemd/system/{UNIT}.d; "
        f"printf '[Service]\\nEnvironment=SGLANG_TEST_RETRACT=1\\n' > /etc/systemd/system/{UNIT}.d/x.conf"
    )
    drop_in = f"/etc/systemd/system/{UNIT}.d/x.conf"
    assert host.found()["unit.drop-ins"] == (f"{drop_in} (not read yet)",)
    (note,) = look_and_plan(host.target, host.session).plan.notes
    assert note.startswith(f"settings will also come from {drop_in}")
    host.shell(
        f"systemctl set-environment HF_TOKEN=hf_secretsecret; systemctl daemon-reload; "
        f"systemctl restart {UNIT}; systemctl disable -q {UNIT}"
    )
    report = host.drift()
    found = {item.id: item.names for item in report.findings}
    assert set(found) == {
        "unit.edited",
        "unit.drop-ins",
        "unit.disabled",
        "process.extra-environment",
        "process.debug-variables",
        "run.unvalidated",
    }
    assert found["process.extra-environment"] == ("HF_TOKEN=********", "SGLANG_TEST_RETRACT=1")
    assert found["unit.drop-ins"] == (f"/etc/systemd/system/{UNIT}.d/x.conf",)
    assert "hf_secret" not in json.dumps(report.to_json())
    row = status_of(host.target, host.session)
    assert "this run was never validated" in row.problem or "no answer" in row.problem
    assert row.exit_code is ExitCode.INCONCLUSIVE
    host.shell(
        f"rm -r /etc/systemd/system/{UNIT}.d; systemctl unset-environment HF_TOKEN; systemctl daemon-reload"
    )


def test_7_files_of_the_release_edited_added_removed_under_a_running_process(host):
    host.shell(
        f"cd $(readlink -f {SERVICE}/current)/sglang/srt/managers; chmod u+w . scheduler.py; "
        "printf '\\nbreakpoint()\\nDFLASH_DIAG = 1\\n' >> scheduler.py; cp scheduler.py scheduler.py.orig; "
        "rm io_struct.py; mkdir -p __pycache__; : > __pycache__/x.pyc; ln -s /etc/hostname link.py"
    )
    found = host.found()
    folder = "sglang/srt/managers"
    assert set(found["release.files"]) == {
        f"changed: {folder}/scheduler.py",
        f"missing: {folder}/io_struct.py",
        f"added: {folder}/scheduler.py.orig",
    }
    assert [line.partition(": ")[2] for line in found["release.diagnostics"]] == [
        "breakpoint()",
        "DFLASH_DIAG = 1",
    ]
    assert set(found["release.strays"]) == {
        f"{folder}/scheduler.py.orig",
        f"{folder}/__pycache__/x.pyc",
        f"{folder}/link.py",
    }
    assert f"{folder}/scheduler.py" in found["process.files"]


def test_8_edited_site_packages_matter_more_when_they_are_what_runs(host):
    host.shell(
        """
        cd /root/venv_sglang211/lib/python3*/site-packages; mkdir -p sglang/srt
        echo 'x = 1' > sglang/__init__.py; echo 'y = 1' > sglang/srt/a.py
        for f in sglang/__init__.py sglang/srt/a.py; do
            echo "$f,sha256=$(openssl dgst -sha256 -binary $f | base64 | tr '+/' '-_' | tr -d =),6"
        done > sglang-0.5.11.dist-info/RECORD
        """.replace(
            "openssl dgst -sha256 -binary $f",
            'python3 -c "import hashlib,sys;'
            "sys.stdout.buffer.write(hashlib.sha256(open(sys.argv[1],'rb').read()).digest())\" $f",
        )
    )
    assert not {name for name in host.found() if name.startswith("venv.")}
    host.shell(
        "cd /root/venv_sglang211/lib/python3*/site-packages; echo 'print(DFLASH_DIAG)' >> sglang/srt/a.py"
    )
    found = {item.id: item for item in host.drift().findings if item.id.startswith("venv.")}
    assert set(found) == {"venv.sglang", "venv.diagnostics"}
    assert found["venv.sglang"].names == ("changed: sglang/srt/a.py",)
    assert found["venv.diagnostics"].names == ("sglang/srt/a.py:2: print(DFLASH_DIAG)",)
    assert {item.severity for item in found.values()} == {Severity.WARN}
    host.shell(f"mkdir {SERVICE}/sglang; : > {SERVICE}/sglang/__init__.py")
    shadow = {item.id: item for item in host.drift().findings}["venv.import"]
    assert f"takes it from {SERVICE}/sglang/__init__.py: the release is not what runs" in shadow.found
    host.shell(f"rm -r {SERVICE}/sglang; cd /root/venv_sglang211/lib/python3*/site-packages; rm -r sglang")


def test_9_current_switched_under_a_running_process(host):
    host.shell(
        f"R=$(readlink -f {SERVICE}/current); O=$(dirname $R)/{'e' * 64}; cp -al $R $O; "
        f"ln -sfn ../../releases/{'e' * 64} {SERVICE}/current"
    )
    found = {item.id: item.found for item in host.drift().findings}
    assert "current points at eeeeeeeeeeee: it was switched by hand" in found["release.switched"]
    assert "was started before that" in found["process.older"]
    assert "it is that of release" in found["release.manifest"]


def test_9b_what_lies_at_the_place_of_something_of_ours_is_a_finding_too(host):
    host.shell(f"cd {SERVICE}; readlink current > /root/was; rm current; mkdir -p current/manifest.json")
    assert "current is not there" in {item.id: item.found for item in host.drift().findings}["release.none"]
    host.shell(f"cd {SERVICE}; rm -r current; : > current")
    assert "release.none" in host.found()
    host.shell(
        f"cd {SERVICE}; rm current; ln -s $(cat /root/was) current; mkdir /etc/systemd/x; "
        f"mv /etc/systemd/system/{UNIT} /etc/systemd/x; mkdir /etc/systemd/system/{UNIT}"
    )
    assert "unit.none" in host.found()
    host.shell(
        f"rmdir /etc/systemd/system/{UNIT}; mv /etc/systemd/x/{UNIT} /etc/systemd/system; rmdir /etc/systemd/x"
    )
    host.shell(
        "cd /root/venv_sglang211/lib/python3.12/site-packages; mkdir sglang; mkfifo sglang/p.py; mkdir sglang/d.py; "
        "printf 'sglang/p.py,sha256=x,1\\nsglang/d.py,sha256=x,1\\n' > sglang-0.5.11.dist-info/RECORD"
    )
    found = {item.id: item.names for item in host.drift().findings}
    host.shell("rm -r /root/venv_sglang211/lib/python3.12/site-packages/sglang")
    assert found["venv.sglang"] == ("missing: sglang/d.py", "missing: sglang/p.py"), (
        "a pipe is not waited for"
    )


def test_10_a_deploy_puts_all_of_it_right(host):
    plan = look_and_plan(host.target, host.session).plan
    assert "repair release" in plan.changes[0].summary
    host.deploy()
    assert host.drift().findings == ()
    row = status_of(host.target, host.session)
    assert row.exit_code is ExitCode.OK


def test_11_a_saved_plan_of_no_change_is_applied_without_one(host, tmp_path):
    path = tmp_path / "plan.json"
    planned = look_and_plan(host.target, host.session)
    save_plans(path, [planned], inventory=host.inventory, runtime=None, settings=QUICK)
    done = host.typed("apply", str(path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["outcome"] == "unchanged"
