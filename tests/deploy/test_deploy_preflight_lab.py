"""Preflight on lab hosts: each trouble really caused, found in one batch, and nothing changed by looking."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.deploy.deployment import Deployment
from ddtree_ops.deploy.doctor import examine, wanted_of
from ddtree_ops.errors import PreflightError
from ddtree_ops.inventory import connect_spec, load_inventory, select
from ddtree_ops.inventory.models import GPU, Target
from ddtree_ops.remote import connect
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Event, EventKind, Verdict

pytestmark = pytest.mark.lab

SMI = Path(__file__).parents[1] / "data" / "gpu" / "nvidia-smi"
SHARD = "/root/models/Kimi-K2.6/model-00007-of-000064.safetensors"
DRAFTER = "/root/models/Kimi-K2.6-DFlash-tmp-long/config.json"
UNIT = "sglang-k26-ddtree.service"


@pytest.fixture(scope="module")
def targets(lab) -> Iterator[dict[str, Target]]:
    for host in ("ct200", "b300"):
        lab.reset(host)
    yield {target.host.name: target for target in select(load_inventory(str(lab.inventory)), ["all"])}
    for host in ("ct200", "b300"):
        lab.reset(host)


@pytest.fixture(scope="module")
def session(targets) -> Iterator[Session]:
    with connect(connect_spec(targets["ct200"].host)) as opened:
        yield opened


@pytest.fixture
def target(targets) -> Target:
    return targets["ct200"]


def do(session: Session, *argv: str) -> str:
    done = session.run(argv)
    assert done.rc == 0, done.stderr
    return done.text


def change(
    target: Target, *, host: dict[str, Any] | None = None, service: dict[str, Any] | None = None
) -> Target:
    return target.model_copy(
        update={
            "host": target.host.model_copy(update=host or {}),
            "service": target.service.model_copy(update=service or {}),
        }
    )


def wrong(session: Session, target: Target) -> dict[str, CheckResult]:
    """What is not a pass, by name; asks in two requests sent together, whatever is asked."""
    before = session.round_trips
    results = examine(session, target, wanted_of)
    assert session.round_trips == before + 2
    assert len(results) >= 18
    return {
        result.name.removeprefix("preflight."): result
        for result in results
        if result.verdict is not Verdict.PASS
    }


@pytest.mark.parametrize("name", ["ct200", "b300"])
def test_a_lab_host_is_fit_also_through_sudo_and_in_french(targets, name):
    with connect(connect_spec(targets[name].host)) as opened:
        if name == "b300":
            assert "fr_FR" in opened.run(["cat", "/etc/default/locale"]).text
        assert {key: result.summary for key, result in wrong(opened, targets[name]).items()} == {}
        assert opened.list_dir("/opt/ddtree-ops") in (None, []), "looking makes nothing"


@pytest.mark.parametrize(
    ("options", "check", "words"),
    [
        ("size=24m", "disk", "24 MiB and"),
        ("size=1g,nr_inodes=2000", "disk", "inodes free below /mnt/small"),
        ("size=1g,ro", "deploy-root", "the file system of /mnt/small is read-only"),
        ("size=1g,noexec", "deploy-root", "noexec"),
    ],
)
def test_the_file_system_of_the_deploy_root(session, target, options, check, words):
    do(session, "mkdir", "-p", "/mnt/small")
    do(session, "mount", "-t", "tmpfs", "-o", options, "tmpfs", "/mnt/small")
    try:
        found = wrong(session, change(target, host={"deploy_root": "/mnt/small"}))
    finally:
        do(session, "umount", "/mnt/small")
    assert (list(found), found[check].verdict) == ([check], Verdict.FAIL)
    assert words in found[check].summary


def test_model_drafter_venv_and_port_all_at_once_and_the_deploy_is_refused(session, target):
    size = do(session, "stat", "-c", "%s", SHARD).strip()
    config = session.read_file(DRAFTER)
    assert config is not None
    kernel = "/root/venv_sglang211/lib/python3.12/site-packages/sglang_kernel-0.4.2.dist-info/METADATA"
    listener = f"import http.server as h; h.HTTPServer(('{target.service.bind}', {target.service.port}), None).serve_forever()"
    do(
        session,
        "systemd-run",
        "--quiet",
        "--unit=stranger",
        "--property=Type=exec",
        "python3",
        "-c",
        listener,
    )
    do(session, "truncate", "-s", "5000000000", SHARD)
    do(session, "mv", SHARD.replace("00007", "00008"), "/root/kept")
    session.write_file(DRAFTER, config.replace(b'"block_size": 8', b'"block_size": 16'))
    do(session, "sed", "-i", "s/0.4.2/0.4.1/", kernel)
    events: list[Event] = []
    deployment = Deployment(target, session, events.append)
    wait_for(lambda: bool(deployment.control.port_owner(target.service.port, target.service.bind)))
    try:
        found = wrong(session, target)
        deployment.build()
        with pytest.raises(PreflightError) as refused:
            deployment.preflight()
    finally:
        do(session, "systemctl", "stop", "stranger.service")
        do(session, "truncate", "-s", size, SHARD)
        do(session, "mv", "/root/kept", SHARD.replace("00007", "00008"))
        session.write_file(DRAFTER, config)
        do(session, "sed", "-i", "s/0.4.1/0.4.2/", kernel)
    said = {
        "versions": "sglang 0.5.11 cannot run with sglang-kernel 0.4.1 (==0.4.2)",
        "model": "1 of 64 shards are missing or empty, first model-00008-of-000064.safetensors; 1 shard of 64 damaged, "
        "first model-00007-of-000064.safetensors: 5000000000 bytes long",
        "drafter-fit": "its block_size is 16, the service says 8",
        "port": "unit stranger.service",
    }
    for text in (
        "\n".join(f"preflight.{name}: {result.summary}" for name, result in found.items()),
        refused.value.render(),
    ):
        for name, words in said.items():
            assert f"preflight.{name}: " in text and words in text
    assert set(found) == set(said)
    assert "nothing was changed" in refused.value.state
    assert "ddtree-ops doctor ct200" in refused.value.hint
    assert not any(event.kind is EventKind.DONE and event.phase == "preflight" for event in events)
    assert session.list_dir("/opt/ddtree-ops/releases") in (None, [])


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_journal_in_memory_and_one_that_is_not_there(session, target):
    do(session, "journalctl", "--relinquish-var")
    try:
        assert "a reboot takes the evidence" in wrong(session, target)["journal"].summary
    finally:
        do(session, "journalctl", "--flush")
    do(session, "mount", "-t", "tmpfs", "tmpfs", "/var/log/journal")
    try:
        journal = wrong(session, target)["journal"]
    finally:
        do(session, "umount", "/var/log/journal")
    assert journal.verdict is Verdict.FAIL
    assert "the journal cannot be read, or is empty" in journal.summary


@pytest.mark.parametrize(("ours", "verdict"), [(-11.0, Verdict.INCONCLUSIVE), (900.0, Verdict.FAIL)])
def test_a_clock_that_is_wrong_against_ours(monkeypatch, target, ours, verdict):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ours)
    with connect(connect_spec(target.host)) as opened:
        clock = wrong(opened, target)["clock"]
    assert clock.verdict is verdict
    assert ("ahead of" if ours < 0 else "behind") in clock.summary


@pytest.mark.parametrize(
    ("answer", "gpu", "verdict", "words"),
    [
        ((0, "gpus.csv"), {}, None, ""),
        ((0, "gpus.csv"), {"count": 3}, Verdict.FAIL, "3x NVIDIA H200 (sm90) expected, found 2x NVIDIA H200"),
        ((0, "gpus.csv"), {"arch": "sm120"}, Verdict.FAIL, "2x NVIDIA H200 (sm120) expected"),
        ((9, "no-driver.txt"), {}, Verdict.FAIL, "couldn't communicate with the NVIDIA driver"),
        ((6, "no-devices.txt"), {}, Verdict.FAIL, "the driver sees no GPU"),
        (None, {}, Verdict.FAIL, "nvidia-smi is not there"),
    ],
    ids=["right", "one-fewer", "other-arch", "no-driver", "no-devices", "absent"],
)
def test_gpus_by_what_nvidia_smi_answers(session, target, answer, gpu, verdict, words):
    made = GPU(
        **{"name": "NVIDIA H200", "count": 2, "arch": "sm90", "memory_gb": 141, "driver": "580", **gpu}
    )
    one = change(target, host={"gpu": made}, service={"tensor_parallel": 1})
    if answer is not None:
        status, name = answer
        script = f'#!/bin/sh\ncase "$1" in *compute-apps*) exit;; esac\ncat /root/smi.txt\nexit {status}\n'
        session.write_file("/root/smi.txt", (SMI / name).read_bytes())
        session.write_file("/usr/local/bin/nvidia-smi", script.encode(), mode=0o755)
    try:
        found = wrong(session, one)
    finally:
        do(session, "rm", "-f", "/usr/local/bin/nvidia-smi")
    if verdict is None:
        assert found == {}
    else:
        assert (list(found), found["gpu"].verdict) == (["gpu"], verdict)
        assert words in found["gpu"].summary


def test_a_user_who_may_not_read_what_lies_in_the_home_of_root(session, target):
    user = wrong(session, change(target, service={"user": "ops"}))["user"]
    assert user.verdict is Verdict.FAIL
    assert "ops may not read or run 68 files" in user.summary


def test_a_crash_is_remembered_and_a_planned_stop_is_none(session, target):
    text = "[Service]\nType=exec\nExecStart=/bin/sh -c 'exec {}'\nKillSignal=SIGKILL\n"
    path = f"/etc/systemd/system/{UNIT}"
    session.write_file(path, text.format("sleep 600").encode())
    do(session, "systemctl", "daemon-reload")
    do(session, "systemctl", "start", UNIT)
    do(session, "systemctl", "stop", UNIT)
    assert wrong(session, target) == {}
    session.write_file(path, text.format("false").encode())
    do(session, "systemctl", "daemon-reload")
    session.run(["systemctl", "start", UNIT])
    wait_for(lambda: "failed" in session.run(["systemctl", "is-active", UNIT]).text)
    found = wrong(session, target)
    do(session, "rm", path)
    do(session, "systemctl", "daemon-reload")
    do(session, "systemctl", "reset-failed")
    assert list(found) == ["crash"]
    assert "exited with status 1" in found["crash"].summary
    assert found["crash"].hint == "ddtree-ops diagnose ct200"
    assert json.dumps(found["crash"].to_json())
