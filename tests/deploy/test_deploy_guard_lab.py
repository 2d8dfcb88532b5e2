"""Deployments whose client dies, whose network goes, or who lose their lock: on real hosts, by really doing it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.checks.smoke import run_smoke
from ddtree_ops.checks.wait import wait_ready
from ddtree_ops.deploy.guard import parse_armed
from ddtree_ops.deploy.guard_host import timer_name
from ddtree_ops.deploy.history import Activation, parse_history
from ddtree_ops.inventory import connect_spec, load_inventory, override, select
from ddtree_ops.inventory.models import Target
from ddtree_ops.lab import hosts as lab_hosts
from ddtree_ops.remote import connect
from ddtree_ops.remote.session import Session
from ddtree_ops.results import Verdict
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.state import UnitState

pytestmark = pytest.mark.lab

QUICK = ("health.window=0.3s", 'environment.LAB_LOAD_SECONDS="0.3"', "rollback.lease=5s", "rollback.grace=1s")

CLIENT = """
import json, os, signal, subprocess, sys, time
from ddtree_ops.deploy.guard import Guard, Safety
from ddtree_ops.inventory import connect_spec, load_inventory, override, select
from ddtree_ops.playbook.load import load_playbook
from ddtree_ops.playbook.run import run_playbook
from ddtree_ops.remote import connect
from ddtree_ops.remote.session import Session

host, moment, act, *settings = sys.argv[1:]
inventory = load_inventory()
(target,) = [override(found, settings, inventory=inventory) for found in select(inventory, [host])]

def now(*given, **named):
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "say":
        print("NOW", session_pid(), flush=True)
        time.sleep(0.3)
    elif act:
        subprocess.run([sys.executable, "-m", "ddtree_ops", *act.split()], check=True, stdout=subprocess.DEVNULL)

def report(event):
    if moment == f"{event.kind.value} {event.phase}":
        now()

sessions = []
def opened(target):
    sessions.append(connect(connect_spec(target.host)))
    return sessions[-1]

def session_pid():
    return sessions[0].facts["pid"]

def around(kind, name, before):
    real = getattr(kind, name)
    def replaced(*given, **named):
        if before:
            now()
        answer = real(*given, **named)
        now()
        return answer
    setattr(kind, name, replaced)

if moment == "armed":
    around(Guard, "arm", False)
elif moment == "before swap":
    around(Session, "swap_link", True)
elif moment == "before confirm":
    around(Guard, "confirm", True)
elif moment == "after confirm":
    around(Guard, "confirm", False)
(result,) = run_playbook(load_playbook("deploy"), [target], connect=opened, report=report)
print(json.dumps(result.to_json()))
sys.exit(result.to_json()["exit_code"])
"""


@dataclass
class Host:
    """A lab host, looked at over a connection of the test's own."""

    lab: Any
    name: str
    target: Target
    session: Session
    first: tuple[UnitState, tuple[Activation, ...]] | None = None

    @property
    def layout(self) -> Layout:
        return Layout.of(self.target)

    @property
    def control(self) -> UnitControl:
        return UnitControl(self.session, self.layout.unit)

    def history(self) -> tuple[Activation, ...]:
        return parse_history(self.session.read_file(self.layout.history)).activations

    def journal(self) -> str:
        return self.session.run(["journalctl", "--no-pager", "-o", "cat", "-t", "ddtree-ops"]).text

    def armed(self) -> Any:
        return parse_armed(self.session.read_file(self.layout.rollback))

    def timer(self) -> str:
        name = timer_name(self.layout.unit, self.layout.service_dir)
        return self.session.run(["systemctl", "is-active", f"{name}.timer"]).text.strip()

    def free(self) -> bool:
        return self.session.check_lock(self.layout.lock).left_s == 0

    def live(self) -> tuple[str, str]:
        """Release and unit file that are in place."""
        link = self.session.run(["readlink", self.layout.current]).text.strip().rsplit("/", 1)[-1]
        return link, (self.session.read_file(self.layout.unit_path) or b"").decode()

    def quiet(self) -> bool:
        """Nothing is armed, no timer runs, nobody has the lock."""
        return self.armed() is None and self.timer() != "active" and self.free()

    def client(self, moment: str, act: str, *settings: str, **given: Any) -> Any:
        env = {**self.lab.env, "DDTREE_OPS_INVENTORY": str(self.lab.inventory), "DDTREE_OPS_WHO": "ann"}
        argv = [self.name, moment, act, *QUICK, *settings]
        return self.lab.commands.start(argv, env={**env, **given}, code=CLIENT, merged=True)

    def deploy(self, *settings: str) -> tuple[int, str]:
        with self.client("", "", *settings) as client:
            said, _ = client.communicate(timeout=900)
        return client.returncode, said

    def killed(self, moment: str, *settings: str) -> None:
        with self.client(moment, "kill", *settings) as client:
            said, _ = client.communicate(timeout=900)
        assert client.returncode == -9, said

    def serves(self) -> None:
        wait_ready(self.session, self.target, report=lambda event: None)
        checks = run_smoke(
            self.session, self.target, prompt="hello", max_tokens=8, window=0.1, report=lambda event: None
        )
        assert {check.name: check.verdict for check in checks.results}["smoke.completion"] is Verdict.PASS

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.lab.commands.run(
            argv, env={**self.lab.env, "DDTREE_OPS_INVENTORY": str(self.lab.inventory)}
        )
        return done


def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    patience = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < patience, "it did not happen"
        time.sleep(0.2)


def opened(lab: Any, plant: Callable[..., None], name: str) -> Host:
    lab.reset(name)
    plant(lab.hosts[name])
    (found,) = select(load_inventory(str(lab.inventory)), [name])
    target = override(found, QUICK)
    return Host(lab, name, target, connect(connect_spec(target.host)))


@pytest.fixture(scope="module")
def hosts(lab, plant) -> Iterator[dict[str, Host]]:
    """Both hosts after two deploys: the first died with nothing to go back to, the second is good."""

    def prepared(name: str) -> Host:
        host = opened(lab, plant, name)
        host.killed("start wait")
        until(host.quiet)
        host.first = (host.control.state(), host.history())
        code, said = host.deploy()
        assert code == 0, said
        return host

    with ThreadPoolExecutor() as pool:
        made = {host.name: host for host in pool.map(prepared, ("ct200", "b300"))}
    yield made
    for host in made.values():
        host.session.close()


BEFORE = {"ct200": ("start build", "armed"), "b300": ("done push", "done verify")}
AFTER = {
    "ct200": ("done activate", "start wait", "done wait", "before confirm"),
    "b300": ("before swap", "start smoke", "done signatures"),
}


def killed_everywhere(host: Host) -> None:
    """kill -9 at every phase."""
    good = host.live()
    for moment in BEFORE[host.name]:
        run, known = host.control.state().invocation_id, host.history()
        host.killed(moment, "runtime=sglang-0.5.11-stock")
        until(host.quiet)
        assert (host.live(), host.control.state().invocation_id, host.history()) == (good, run, known), moment
    for number, moment in enumerate(AFTER[host.name]):
        change = ("runtime=sglang-0.5.11-stock",) if "swap" in moment or "wait" in moment else ()
        host.killed(moment, f"environment.ROUND=r{number}", *change)
        assert host.armed() is not None, moment
        assert host.armed().who == "ann"
        until(host.quiet)
        *_, failed, back = host.history()
        assert (failed.reason, failed.verdict, failed.who) == ("deploy", Verdict.FAIL, "ann"), moment
        assert failed.summary == "not confirmed: the deploying client went away"
        assert (back.reason, back.verdict, back.who, back.origin) == ("rollback", None, "host", host.name), (
            moment
        )
        assert host.live() == good, moment
        assert host.control.state().running, moment
        assert f"{failed.id} was undone by the host: started from release {good[0][:12]}" in host.journal()
        evidence = host.session.read_file(f"{host.layout.service_dir}/evidence/{failed.id}/journal.txt")
        assert evidence, moment
    host.serves()
    host.killed("after confirm", "environment.ROUND=confirmed")
    until(host.quiet)
    assert host.history()[-1].good
    assert "ROUND=confirmed" in host.live()[1]


def test_a_first_deploy_whose_client_dies_is_stopped_for_there_is_nothing_to_go_back_to(hosts):
    for host in hosts.values():
        state, history = host.first
        assert not state.running
        assert state.unit_file_state == "disabled"
        assert [item.summary for item in history] == ["not confirmed: the deploying client went away"]
        assert [item.verdict for item in history] == [Verdict.FAIL]
        assert "there is nothing to go back to; the unit is stopped" in host.journal()


def test_a_client_that_is_killed_at_any_phase_leaves_a_host_that_serves_the_last_good_release(hosts):
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(killed_everywhere, host) for host in hosts.values()]:
            future.result()


def test_a_killed_agent_and_a_cut_network_free_the_lock_after_the_lease_and_the_host_goes_back(
    hosts, tmp_path
):
    def agent(host: Host) -> None:
        good = host.live()
        lease = ("rollback.lease=3s", "environment.ROUND=agent")
        with host.client("done wait", "say", *lease) as client:
            assert client.stdout is not None
            pid = next(line for line in client.stdout if line.startswith("NOW")).split()[1]
            host.session.run(["kill", "-9", pid], check=True)
            assert not host.free()
            result = json.loads(client.stdout.readlines()[-1])
        assert client.returncode == 4, result
        assert (
            "unless a deploy or confirm takes over, the host goes back by itself to release"
            in result["error"]
        )
        assert "on the host)" in result["error"]
        until(host.quiet)
        assert (host.live(), host.history()[-1].who) == (good, "host")

    def network(host: Host) -> None:
        good = host.live()
        address = host.target.host.address or ""
        with Proxy(address, address.rpartition(".")[0] + ".200") as proxy:
            text = host.lab.inventory.read_text().replace(
                "${DDTREE_OPS_LAB_NET:-127.0.0}.12\n    ssh:", f"{proxy.address}\n    ssh:"
            )
            known = (
                Path(host.lab.env.get("DDTREE_OPS_LAB_DIR", os.environ["DDTREE_OPS_LAB_DIR"])) / "known_hosts"
            )
            (tmp_path / "known").write_text(known.read_text().replace(f"[{address}]", f"[{proxy.address}]"))
            text = text.replace(
                "${DDTREE_OPS_LAB_DIR:-~/.local/state/ddtree-ops/lab}/known_hosts", str(tmp_path / "known")
            )
            (tmp_path / "lab.yaml").write_text(text)
            lease = ("rollback.lease=3s", "environment.ROUND=network", 'environment.LAB_LOAD_SECONDS="20"')
            with host.client(
                "start wait", "say", *lease, DDTREE_OPS_INVENTORY=str(tmp_path / "lab.yaml")
            ) as client:
                assert client.stdout is not None
                said = []
                for line in client.stdout:
                    said.append(line)
                    if line.startswith("NOW"):
                        break
                assert said and said[-1].startswith("NOW"), said
                proxy.cut.set()
                assert not host.free()
                until(lambda: host.armed() is None)
                assert client.poll() is None
                client.kill()
        until(host.quiet)
        assert (host.live(), host.history()[-1].who) == (good, "host")
        host.serves()

    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(agent, hosts["ct200"]), pool.submit(network, hosts["b300"])]:
            future.result()


class Proxy:
    """Forwards TCP to the sshd of a lab host until ``cut`` is set: then bytes are kept, and nothing is closed."""

    def __init__(self, to: str, address: str) -> None:
        self.to, self.address = to, address
        self.cut = threading.Event()
        self._over = threading.Event()
        self._server = socket.create_server((address, 22022))

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection((self.to, 22022))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with source:
            try:
                while data := source.recv(65536):
                    if self.cut.is_set():
                        self._over.wait()
                        return
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)
            except OSError:
                return

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._server.close()


def test_a_person_confirms_or_does_not(hosts):
    def waits(host: Host) -> None:
        done = host.run("deploy", host.name, "--confirm-within", "5m", *flags("environment.ROUND=held"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"not confirmed: ddtree-ops confirm {host.name} until" in done.stdout
        assert host.armed().phase == "awaiting"
        assert host.free()
        assert host.history()[-1].verdict is None
        done = host.run("confirm", host.name, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["confirmations"][0]["confirmed"] is True
        assert host.history()[-1].good
        assert host.quiet()
        done = host.run("audit", host.name)
        assert "confirm" in done.stdout

    def too_late(host: Host) -> None:
        good = host.live()
        done = host.run("deploy", host.name, "--confirm-within", "2s", *flags("environment.ROUND=late"))
        assert done.returncode == 0, done.stdout + done.stderr
        until(host.quiet)
        assert host.live() == good
        assert host.history()[-2].summary == "not confirmed: nobody confirmed it in time"
        done = host.run("confirm", host.name)
        assert done.returncode == 7
        assert "too late: the host went back by itself" in done.stderr
        host.killed("done wait", "environment.ROUND=alone", "rollback.grace=5m")
        done = host.run("confirm", host.name, "--json")
        assert done.returncode == 0, done.stderr
        assert "validated now" in done.stdout
        assert host.history()[-1].good
        assert "ROUND=alone" in host.live()[1]
        assert host.quiet()

    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(waits, hosts["ct200"]), pool.submit(too_late, hosts["b300"])]:
            future.result()


def flags(*settings: str) -> list[str]:
    return [word for setting in (*QUICK, *settings) for word in ("--set", setting)]


def test_of_two_deploys_one_wins_and_a_broken_lock_is_noticed(hosts):
    def two(host: Host) -> None:
        with (
            host.client("", "", "environment.ROUND=first") as one,
            host.client("", "", "environment.ROUND=second") as other,
        ):
            said = [one.communicate(timeout=900)[0], other.communicate(timeout=900)[0]]
        assert sorted((one.returncode, other.returncode)) == [0, 6], said
        assert "ann on" in said[0 if one.returncode else 1]
        host.session.acquire_lock(host.layout.lock, {"who": "bob", "origin": "desk", "command": "by hand"})
        assert "bob on desk holds the lock" in host.run("lock", "status", host.name).stdout
        won = "environment.ROUND=" + ("second" if one.returncode else "first")
        argv = ["deploy", host.name, "--lock-wait", "300s", *flags(won)]
        env = {**host.lab.env, "DDTREE_OPS_INVENTORY": str(host.lab.inventory)}
        with host.lab.commands.start(argv, env=env, merged=True) as client:
            assert any("waiting: bob on desk holds the lock" in line for line in client.stdout)
            host.session.release_lock(host.layout.lock)
            rest = client.stdout.read()
        assert client.returncode == 0, rest

    def broken(host: Host) -> None:
        good = host.live()
        assert host.run("lock", "break", host.name).returncode == 2
        with host.client("done smoke", f"lock break {host.name} --yes", "environment.ROUND=broken") as client:
            said, _ = client.communicate(timeout=900)
        assert client.returncode == 6, said
        result = json.loads(said.splitlines()[-1])
        lost = r"was lost: (nobody has it now|host on b300 holds the lock)"
        assert re.search(lost, result["error"]), "nobody, or the host that goes back already"
        until(host.quiet)
        assert host.live() == good
        assert host.history()[-2].summary == "not confirmed: the deploying client went away"
        audited = (host.session.read_file(f"{host.layout.root}/audit.jsonl") or b"").decode()
        assert '"lock-break"' in audited
        assert "ann on" in audited

    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(two, hosts["ct200"]), pool.submit(broken, hosts["b300"])]:
            future.result()


def test_a_guard_that_is_killed_half_way_is_finished_by_the_next_look_and_no_rollback_arms_nothing(hosts):
    def half_way(host: Host) -> None:
        good = host.live()
        host.killed("done activate", "environment.ROUND=half")
        name = timer_name(host.layout.unit, host.layout.service_dir)
        known = len(host.history())
        until(lambda: (host.session.read_file(host.layout.rollback) or b"").find(b'"going-back"') > 0)
        host.session.run(["systemctl", "kill", "--signal=SIGKILL", f"{name}.service"], check=True)
        until(host.quiet)
        assert host.live() == good
        assert host.control.state().running
        added = host.history()[known:]
        assert len(added) == 1
        assert (added[0].who, added[0].reason) == ("host", "rollback")
        assert host.journal().count(f"{host.history()[-2].id} was undone by the host") == 1

    def nothing_armed(host: Host) -> None:
        old = f"{host.layout.releases}/{'c' * 64}"
        shell = f"mkdir {old}; echo {{}} > {old}/manifest.json; touch -d '3 days ago' {old}/manifest.json"
        host.session.run(["sh", "-ec", shell], check=True)
        done = host.run("deploy", host.name, "--no-rollback", *flags("args.mem-fraction-static=0.01"))
        assert done.returncode == 5, done.stdout + done.stderr
        assert re.search(r"prune: note removed \d release", done.stdout), done.stdout
        assert host.session.read_file(f"{old}/manifest.json") is None
        assert "left as it failed (--no-rollback)" in done.stdout
        assert "mem-fraction-static 0.01" in host.live()[1]
        assert host.history()[-1].verdict is Verdict.FAIL
        assert host.quiet()

    def by_word_alone(host: Host) -> None:
        host.killed("done activate", "environment.ROUND=force", "rollback.grace=5m")
        host.session.run(["systemctl", "stop", "--", host.layout.unit], check=True)
        done = host.run("confirm", host.name)
        assert done.returncode == 5
        assert "confirm it all the same: --force" in done.stderr
        done = host.run("confirm", host.name, "--force")
        assert done.returncode == 0, done.stderr
        assert host.history()[-1].good
        assert host.history()[-1].summary == "confirmed by hand with --force, not validated"
        assert host.quiet()

    def unwritable(host: Host) -> None:
        """As on a full disk: what cannot be written down keeps no service from coming back."""
        assert host.deploy()[0] == 0
        good, path, known = host.live(), host.layout.history, len(host.history())
        with host.client("done activate", "say", "runtime=sglang-0.5.11-stock") as client:
            assert client.stdout is not None
            assert any(line.startswith("NOW") for line in client.stdout)
            shell = f"mount --bind {path} {path}; mount -o remount,bind,ro {path}"
            host.session.run(["sh", "-ec", shell], check=True)
            result = json.loads(client.stdout.readlines()[-1])
        host.session.run(["umount", path], check=True)
        assert (client.returncode, result["outcome"]) == (7, "rolled-back"), result
        assert host.live() == good
        assert host.control.state().running
        assert [item.verdict for item in host.history()[known:]] == [None]
        assert host.quiet()

    def loses_power(host: Host) -> None:
        """It goes back after the boot, at a second try: at first the unit file cannot be written."""
        assert host.deploy()[0] == 0
        good, path = host.live(), host.layout.unit_path
        host.killed("done activate", "environment.ROUND=boot", "rollback.grace=5m")
        known = len(host.history())
        host.session.run(
            ["sh", "-ec", f"systemctl stop {timer_name(host.layout.unit, host.layout.service_dir)}.timer"]
        )
        assert "so it does not go back by itself" in host.run("status", host.name).stdout
        host.session.run(["sh", "-ec", f"mv {path} {path}.kept; mkdir {path}; sync"], check=True)
        (found,) = lab_hosts.up([host.name])
        os.kill(found.pid, signal.SIGKILL)
        host.session.close()
        until(lambda: not Path(f"/proc/{found.pid}").exists())
        lab_hosts.up([host.name])
        host.session = connect(connect_spec(host.target.host))
        problem = "so far it failed, and is tried again: [Errno 21] Is a directory"
        until(lambda: problem in host.run("lock", "status", host.name).stdout)
        host.session.run(["rmdir", path], check=True)
        until(host.quiet)
        assert host.live() == good
        assert host.control.state().running
        failed, back = host.history()[known - 1 :]
        assert (failed.verdict, back.who) == (Verdict.FAIL, "host")
        assert failed.summary == "the host was booted before the deployment was confirmed"
        assert "ddtree-ops-rollback" not in host.session.run(["ls", "/etc/systemd/system"]).text

    def way_back_is_gone(host: Host) -> None:
        host.killed("done activate", "environment.ROUND=gone")
        kept = host.armed().way_back.values["unit_file"]
        host.session.run(["mv", kept, "/tmp/kept"], check=True)
        name = timer_name(host.layout.unit, host.layout.service_dir)
        until(host.quiet)
        host.session.run(["mv", "/tmp/kept", kept], check=True)
        assert "is not there any more; there is nothing to go back to; the unit is stopped" in host.journal()
        assert not host.control.state().running
        assert f"{name}-boot.service" not in host.session.run(["ls", "/etc/systemd/system"]).text

    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(half_way, hosts["ct200"]), pool.submit(nothing_armed, hosts["b300"])]:
            future.result()
        for future in [pool.submit(by_word_alone, hosts["ct200"]), pool.submit(unwritable, hosts["b300"])]:
            future.result()
        for future in [
            pool.submit(loses_power, hosts["ct200"]),
            pool.submit(way_back_is_gone, hosts["b300"]),
        ]:
            future.result()
