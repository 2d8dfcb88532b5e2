"""Releases, going back, pruning, starting and stopping on lab hosts: the commands as a person types them."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import httpx
import pytest

from ddtree_ops.cli.app import main
from ddtree_ops.errors import RemoteError, UnreachableError
from ddtree_ops.inventory import connect_spec, load_inventory, select
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote import ConnectSpec, FileEntry, Session, connect, scan_tree

pytestmark = pytest.mark.lab

UNIT = "sglang-k26-ddtree.service"
ROOT = "/opt/ddtree-ops"
QUICK = (
    "--set", "health.window=0.3s", "--set", 'environment.LAB_LOAD_SECONDS="0.2"',
    "--set", 'environment.LAB_DRAIN_POLL="0.3"', "--set", "health.stop_timeout=3s",
    "--set", "rollback.lease=60s", "--set", "rollback.grace=60s",
)  # fmt: skip


def command(lab: Any, *argv: str) -> tuple[int, str, str]:
    """Exit code and both outputs of a command, in this process: the interpreter need not start for each."""
    output, errors = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        for name, value in lab.env.items():
            patch.setenv(name, value)
        patch.setenv("DDTREE_OPS_INVENTORY", str(lab.inventory))
        patch.setattr(sys, "argv", ["ddtree-ops", *argv])
        code = 0
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return code, output.getvalue(), errors.getvalue()


def run(lab: Any, *argv: str) -> tuple[int, str]:
    code, output, errors = command(lab, *argv)
    return code, output + errors


def document(lab: Any, *argv: str) -> Any:
    code, output, errors = command(lab, *argv, "--json")
    assert code == 0, output + errors
    return json.loads(output)


@pytest.fixture(scope="module")
def target(lab: Any) -> Target:
    (found,) = select(load_inventory(str(lab.inventory)), ["ct200"])
    return found


@pytest.fixture(scope="module")
def host(lab: Any, target: Target) -> Iterator[Session]:
    """A session with ct200, clean and with two activations that passed: budget 32, then budget 16."""
    lab.reset("ct200")
    for budget in ("32", "16"):
        status, output = run(lab, "deploy", "ct200", *QUICK, "--set", f"speculative.budget={budget}")
        assert status == 0, output
    with connect(connect_spec(target.host)) as session:
        yield session


def shell(session: Session, script: str) -> str:
    return session.run(["sh", "-ec", script], check=True).text


def unit_file(session: Session) -> str:
    return shell(session, f"cat /etc/systemd/system/{UNIT}")


def leak(session: Session, target: Target) -> None:
    """A request that is refused at validation: its id never leaves the server's count."""
    with httpx.Client(transport=session.http_transport()) as client:
        answer = client.post(
            f"http://{target.service.bind}:{target.service.port}/generate",
            json={"text": "x", "sampling_params": {"temperature": -1}},
        )
    assert answer.status_code == 400


class TestStory:
    """In order: each chapter starts where the one before ended."""

    def test_1_what_is_published(self, lab: Any, host: Session) -> None:
        found = document(lab, "releases", "ct200", "--verify")
        (release,) = found["hosts"][0]["releases"]
        assert (found["schema"], release["whole"], release["verdict"]) == (1, True, "pass")
        assert release["current_of"] == release["last_known_good_of"] == [UNIT]
        assert release["runtime"] == "sglang-0.5.11-ddtree" and len(release["patches"]) == 1
        assert release["own_bytes"] == release["bytes"] > 20e6

    def test_2_back_to_what_passed_before(self, lab: Any, host: Session) -> None:
        assert "--speculative-ddtree-budget 16" in unit_file(host)
        (plan,) = document(lab, "rollback", "ct200", "--dry-run")["plans"]
        change = "--speculative-ddtree-budget"
        assert [(item["name"], item["after"]) for item in plan["arguments"]] == [(change, "32")]
        assert "--speculative-ddtree-budget 16" in unit_file(host), "nothing was changed"
        (result,) = document(lab, "rollback", "ct200")
        assert result["outcome"] == "restored"
        assert {check["verdict"] for check in result["checks"]} == {"pass"}
        assert "--speculative-ddtree-budget 32" in unit_file(host)
        (found,) = document(lab, "history", "ct200")["hosts"]
        assert [item["reason"] for item in found["activations"]] == ["deploy", "deploy", "rollback"]
        assert found["activations"][-1]["verdict"] == "pass"
        told = [item["changes"] for item in found["activations"]]
        assert told == [["the first"], [f"{change}: 32 -> 16"], [f"{change}: 16 -> 32"]]
        assert found["activations"][0]["id"] == plan["activation"]
        assert not shell(host, f"ls {ROOT}/services/{UNIT}").count("rollback.json"), "disarmed"

    def test_3_already_there_restarts_nothing(self, lab: Any, host: Session) -> None:
        before = host.request("show_unit", {"unit": UNIT}).values["InvocationID"]
        last = document(lab, "history", "ct200", "--lines", "1")["hosts"][0]["activations"][0]
        (result,) = document(lab, "rollback", "ct200", "--to", last["id"])
        assert result["outcome"] == "unchanged" and result["plan"]["changes"] == []
        assert host.request("show_unit", {"unit": UNIT}).values["InvocationID"] == before

    def test_4_what_is_not_whole_or_not_recorded_is_refused(self, lab: Any, host: Session) -> None:
        before = host.request("show_unit", {"unit": UNIT}).values["InvocationID"]
        (first, second, _) = document(lab, "history", "ct200")["hosts"][0]["activations"]
        kept = f"{ROOT}/services/{UNIT}/units/{second['unit_sha256']}.service"
        shell(host, f"cp {kept} /tmp/kept; echo boom >> {kept}")
        status, output = run(lab, "rollback", "ct200")
        assert status == 5
        assert "cannot come back: its unit file is gone or damaged" in output
        assert "next:  ddtree-ops deploy ct200 publishes the release it deploys again" in output
        assert "nothing was changed: release" in output and "keeps serving" in output
        shell(host, f"cp /tmp/kept {kept}")
        status, output = run(lab, "rollback", "ct200", "--to", "ffff")
        assert status == 2 and "names no recorded" in output
        assert f"activation {second['id']}: --speculative-ddtree-budget: 32 -> 16" in output, (
            "what else there is"
        )
        assert host.request("show_unit", {"unit": UNIT}).values["InvocationID"] == before
        assert first["unit_sha256"] != second["unit_sha256"]

    def test_5_one_who_holds_the_lock_is_named(self, lab: Any, host: Session) -> None:
        path = f"{ROOT}/services/{UNIT}/lock"
        assert host.acquire_lock(path, {"who": "ann", "origin": "desk", "command": "deploy"}) is None
        try:
            for argv in (["stop"], ["restart"], ["rollback"], ["prune"]):
                status, output = run(lab, *argv, "ct200")
                assert status == 6, output
                assert "ann on desk" in output
        finally:
            host.release_lock(path)

    def test_6_a_drain_that_never_ends_is_recognised_and_cut_short(
        self, lab: Any, host: Session, target: Target
    ) -> None:
        leak(host, target)
        status, output = run(lab, "stop", "ct200")
        assert status == 0, output
        assert "the drain loops: 1 request" in output and "none runs" in output
        assert "ddtree-ops stop ct200 --force" in output
        assert "ran into TimeoutStopSec: the server still counted 1 request, and none was running" in output
        status, output = run(lab, "start", "ct200", "--no-wait")
        assert status == 0 and "this run is not validated: ddtree-ops smoke ct200" in output
        status, output = run(lab, "wait", "ct200")
        assert status == 0 and "ready after" in output
        leak(host, target)
        status, output = run(lab, "restart", "ct200", "--force", "--smoke")
        assert status == 0 and "by SIGKILL at once, as asked for" in output
        last = document(lab, "history", "ct200", "--lines", "1")["hosts"][0]["activations"][0]
        assert (last["reason"], last["verdict"]) == ("validate", "pass")
        status, output = run(lab, "wait", "ct200", "--timeout", "60")
        assert status == 0

    def test_7_everything_stands_in_the_audit(self, lab: Any, host: Session) -> None:
        shell(host, f"echo damaged >> {ROOT}/audit.jsonl")
        (found,) = document(lab, "audit", "ct200", "--lines", "100")["hosts"]
        acts = [(entry["action"], entry["outcome"]) for entry in found["entries"]]
        assert acts == [
            ("activate (deploy)", "pass"), ("activate (deploy)", "pass"), ("rollback", "asked for"),
            ("activate (rollback)", "pass"), ("stop", "ok"), ("start", "ok"), ("restart", "ok"),
            ("activate (validate)", "pass"),
        ]  # fmt: skip
        assert found["damaged_lines"] == {f"{ROOT}/audit.jsonl": 1}
        status, output = run(lab, "audit", "ct200", "-n", "1")
        assert status == 0 and "1 line of" in output and "cannot be read" in output

    def test_8_prune_takes_what_nothing_needs(self, lab: Any, host: Session) -> None:
        old, ahead = "c" * 64, "d" * 64
        current = shell(host, f"readlink {ROOT}/services/{UNIT}/current").strip().rsplit("/", 1)[-1]
        shell(
            host,
            f"cd {ROOT}/releases; cp -al {current} {old}; cp -al {current} {ahead}; rm {old}/manifest.json;"
            f"echo {{}} > {old}/manifest.json; touch -d '3 days ago' {old}/manifest.json;"
            f"rm {ahead}/manifest.json; echo {{}} > {ahead}/manifest.json;"
            f"mkdir -p .partial-x.1-1-1/sub; echo x > .partial-x.1-1-1/sub/file; chmod 555 .partial-x.1-1-1/sub",
        )
        (found,) = document(lab, "prune", "ct200", "--dry-run")["hosts"]
        assert found["plan"]["remove"] == [old] and found["removed"] == []
        assert shell(host, f"ls -A {ROOT}/releases").split() == sorted(
            [".partial-x.1-1-1", current, old, ahead]
        )
        before = host.round_trips
        (found,) = document(lab, "prune", "ct200")["hosts"]
        assert (found["removed"], found["leftovers"]) == ([old], 1)
        assert "pushed within a day" in found["plan"]["stays"][ahead][0]
        assert shell(host, f"ls -A {ROOT}/releases").split() == sorted([current, ahead])
        assert host.round_trips - before == 1
        status, output = run(lab, "releases", "ct200", "--verify")
        assert status == 5 and "damaged: manifest.json" in output and "whole: " in output
        shell(host, f"chmod -R u+w {ROOT}/releases/{ahead}; rm -r {ROOT}/releases/{ahead}")

    def test_9_a_start_that_dies_is_told_and_explained(self, lab: Any, host: Session) -> None:
        shell(host, f"systemctl stop {UNIT}; mv {ROOT}/releases /tmp/away")
        status, output = run(lab, "start", "ct200")
        shell(host, f"systemctl stop {UNIT}; mv /tmp/away {ROOT}/releases")
        assert status == 5, output
        assert "ct200 failed" in output and "next: " in output


def many(tmp: Any, count: int = 24) -> tuple[list[FileEntry], bytes]:
    for number in range(count):
        (tmp / f"{number:02}").write_bytes(os.urandom(256 << 10))
    files = list(scan_tree(tmp))
    listed = [{"path": e.path, "mode": e.mode, "size": e.size, "sha256": e.sha256} for e in files]
    return files, json.dumps({"files": listed}).encode()


@contextmanager
def proxy(address: str, port: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """A TCP proxy on a loopback address, and what cuts its connections in the middle of whatever travels."""
    links: list[socket.socket] = []
    with socket.create_server((address, 0)) as server:

        def pump(source: socket.socket, sink: socket.socket) -> None:
            try:
                while data := source.recv(65536):
                    sink.sendall(data)
            except OSError:
                pass
            for end in (source, sink):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

        def serve() -> None:
            while True:
                try:
                    near, _ = server.accept()
                except OSError:
                    return
                far = socket.create_connection((address, port))
                links.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

        def cut() -> None:
            for link in links:
                try:
                    link.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], cut
        server.shutdown(socket.SHUT_RDWR)
        cut()
        for link in links:
            link.close()


def test_a_connection_that_is_cut_in_mid_push(lab: Any, host: Session, tmp_path: Any) -> None:
    source = tmp_path / "tree"
    source.mkdir()
    files, manifest = many(source)
    one = lab.hosts["ct200"]
    releases = "/var/tmp/cut/releases"
    known = one.known_hosts.read_text().replace(f":{one.port} ", ":{port} ")
    with proxy(one.address, one.port) as (port, cut):
        (tmp_path / "known").write_text(known.format(port=port))
        spec = ConnectSpec(
            name="ct200", address=one.address, port=port, user=one.user,
            identity_file=str(one.identity_file), known_hosts=str(tmp_path / "known"),
        )  # fmt: skip
        with connect(spec) as session, pytest.raises(UnreachableError):
            session.publish(
                source, files, releases_dir=releases, digest="e" * 64, manifest=manifest,
                progress=lambda done, total: cut() if done > total * 0.7 else None,
            )  # fmt: skip
    pids = f"{releases}/.staging-*"
    shell(
        host,
        f"for n in $(seq 200); do set -- {pids}; p=${{1%-*}}; kill -0 ${{p##*-}} 2>/dev/null || exit 0; sleep 0.05; done; exit 1",
    )
    assert all(name.startswith(".") for name in shell(host, f"ls -A {releases}").split())
    result = host.publish(source, files, releases_dir=releases, digest="e" * 64, manifest=manifest)
    assert result.created and result.resumed_files >= 4
    assert result.sent_files == len(files) - result.resumed_files
    listed = host.hash_tree(f"{releases}/{'e' * 64}")
    assert [entry for entry in listed or () if entry.path != "manifest.json"] == files
    assert shell(host, f"ls -A {releases}").split() == ["e" * 64]
    host.remove_tree("/var/tmp/cut", below="/var/tmp")


def test_a_disk_that_is_full(lab: Any, host: Session, tmp_path: Any) -> None:
    """On a small tmpfs as deploy root: refused before anything travels, survived while it does, mended by a prune."""
    status, output = run(lab, "start", "ct200")
    assert status == 0, output
    small = "16m"
    shell(
        host,
        f"mkdir /mnt/small; mount -t tmpfs -o size={small} tmpfs /mnt/small; cp -a {ROOT}/services {ROOT}/audit.jsonl /mnt/small;"
        f"mount --bind /mnt/small {ROOT}",
    )
    try:
        source = tmp_path / "tree"
        source.mkdir()
        files, manifest = many(source)

        def publish(digest: str, progress: Any = None) -> Any:
            return host.publish(
                source,
                files,
                releases_dir=f"{ROOT}/releases",
                digest=digest,
                manifest=manifest,
                progress=progress,
            )

        filled: list[int] = []

        def fill(done: int, total: int) -> None:
            if done > total / 3 and not filled:
                filled.append(done)
                shell(host, f"dd if=/dev/zero of={ROOT}/fill bs=64k 2>/dev/null || true")

        shell(host, f"mkdir -p {ROOT}/releases")
        with pytest.raises(RemoteError, match="No space left on device while receiving") as caught:
            publish("e" * 64, fill)
        assert caught.value.hint.startswith("ddtree-ops prune ct200")
        assert "no half release" in caught.value.state
        assert shell(host, f"ls -A {ROOT}/releases") == ""
        with pytest.raises(RemoteError, match=r"not enough space below .* bytes are needed"):
            publish("e" * 64)
        state = host.request("show_unit", {"unit": UNIT}).values
        assert (state["ActiveState"], state["NRestarts"]) == ("active", "0"), "what serves keeps serving"
        status, output = run(lab, "deploy", "ct200", *QUICK)
        assert status in (1, 5), output
        assert "nothing was changed" in output and "ddtree-ops prune ct200" in output
        shell(
            host,
            f"mkdir {ROOT}/releases/.partial-fill.1-1-1; mv {ROOT}/fill {ROOT}/releases/.partial-fill.1-1-1/",
        )
        (found,) = document(lab, "prune", "ct200")["hosts"]
        assert found["leftovers"] == 1 and found["freed_bytes"] > 10e6
        assert publish("e" * 64).created
    finally:
        shell(host, f"umount {ROOT}; umount /mnt/small; rmdir /mnt/small")


def test_old_releases_go_by_themselves_after_a_deploy(lab: Any, host: Session) -> None:
    old = "c" * 64
    shell(host, f"mkdir -p {ROOT}/releases/{old}; touch -d '3 days ago' {ROOT}/releases/{old}/manifest.json")
    status, output = run(lab, "deploy", "ct200", *QUICK, "--set", "speculative.budget=8")
    assert status == 0, output
    assert "prune: note removed 1 release" in output
    assert old not in shell(host, f"ls -A {ROOT}/releases")
    acts = document(lab, "audit", "ct200")["hosts"][0]["entries"]
    assert ("prune", "ok") in [(entry["action"], entry["outcome"]) for entry in acts]
