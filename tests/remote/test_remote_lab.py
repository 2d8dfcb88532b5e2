"""Sessions with lab hosts: real sudo, a French host, systemd units."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ddtree_ops.errors import SudoError
from ddtree_ops.remote import ConnectSpec, Session, Stream, connect

pytestmark = pytest.mark.lab


def spec_of(host: Any, **changes: Any) -> ConnectSpec:
    values: dict[str, Any] = {
        "name": host.name,
        "address": host.address,
        "port": host.port,
        "user": host.user,
        "identity_file": str(host.identity_file),
        "known_hosts": str(host.known_hosts),
    }
    return ConnectSpec(**(values | changes))


@pytest.fixture(scope="module", params=["ct200", "b300"])
def session(request: pytest.FixtureRequest, lab: Any) -> Iterator[Session]:
    with connect(spec_of(lab.hosts[request.param])) as made:
        yield made


def test_root_and_the_c_locale_whatever_the_user(session: Session) -> None:
    assert session.facts["uid"] == 0 and session.facts["user"] == "root"
    assert session.run(["id", "-u"]).text == "0\n"
    assert session.run(["env"]).text.count("LC_ALL=C\n") == 1
    assert session.run(["cat", "/none"]).stderr == b"cat: /none: No such file or directory\n"
    assert session.run(["locale"]).text.startswith("LANG=\n")


def test_sudo_refused(lab: Any) -> None:
    host = lab.hosts["b300"]
    with connect(spec_of(host)) as session:
        keys = (
            session.read_file("/home/ops/.ssh/authorized_keys")
            or session.run(["sh", "-c", "cat ~ops/.ssh/authorized_keys"], check=True).stdout
        )
        session.run(["useradd", "--create-home", "--shell", "/bin/bash", "plain"], check=True)
        try:
            session.write_file("/home/plain/.ssh/authorized_keys", keys)
            session.run(["chown", "-R", "plain:", "/home/plain/.ssh"], check=True)
            with pytest.raises(SudoError, match="may not become root") as caught:
                connect(spec_of(host, user="plain"))
            assert "NOPASSWD" in caught.value.hint
        finally:
            session.run(["userdel", "--remove", "plain"])


def next_state(stream: Stream, wanted: dict[str, str], seconds: float = 300.0) -> dict[str, str]:
    """The first unit event whose properties are as wanted."""
    until = time.monotonic() + seconds
    last: Any = None
    while time.monotonic() < until:
        event = stream.get(1.0)
        if event is not None and event[0]["event"] == "unit":
            last = event[0]["properties"]
            if wanted.items() <= last.items():
                return dict(last)
    raise AssertionError(f"never {wanted}, last {last}")


def test_watch_unit_sees_start_death_and_end(session: Session) -> None:
    unit = "ddtree-watch-test.service"
    with session.watch_unit(unit) as stream:
        assert next_state(stream, {"LoadState": "not-found"})["ActiveState"] == "inactive"
        session.run(["systemd-run", f"--unit={unit}", "--property=Restart=no", "sleep", "600"], check=True)
        try:
            up = next_state(stream, {"ActiveState": "active", "SubState": "running"})
            assert up["InvocationID"] and up["NRestarts"] == "0"
            session.run(["kill", f"-{int(signal.SIGKILL)}", up["MainPID"]], check=True)
            down = next_state(stream, {"ActiveState": "failed"})
            assert (down["Result"], down["ExecMainStatus"]) == ("signal", "9")
            assert down["InvocationID"] == up["InvocationID"]
        finally:
            session.run(["systemctl", "reset-failed", unit])
    assert stream.ended
    assert session.run(["true"]).rc == 0


def test_watch_unit_ticks_and_reads(session: Session) -> None:
    unit = "ddtree-tick-test.service"
    session.run(["systemd-run", f"--unit={unit}", "sleep", "600"], check=True)
    try:
        with session.watch_unit(unit) as stream:
            until = time.monotonic() + 300
            ticks = []
            while not ticks and time.monotonic() < until:
                event = stream.get(1.0)
                if event is not None and event[0]["event"] == "tick":
                    ticks.append(event[0])
        assert ticks and ticks[0]["read_bytes"] >= 0
        assert abs(ticks[0]["time"] - time.time()) < 60
    finally:
        session.run(["systemctl", "stop", unit])


def test_units_outlive_the_session(session: Session, lab: Any) -> None:
    unit = "ddtree-outlive-test.service"
    with connect(spec_of(lab.hosts[session.host])) as other:
        other.run(["systemd-run", f"--unit={unit}", "sleep", "600"], check=True)
    try:
        assert session.request("show_unit", {"unit": unit}).values["ActiveState"] == "active"
    finally:
        session.run(["systemctl", "stop", unit], check=True)


def test_a_unit_name_that_is_none(session: Session) -> None:
    found = session.request("show_unit", {"unit": "--help\n$(x).service"}).values
    assert (found["LoadState"], found["ActiveState"], found["MainPID"]) == ("not-found", "inactive", "0")


def test_publish_on_a_lab_host(session: Session, tree: Any) -> None:
    tree.write("large", os.urandom(3 << 20))
    tree.scan()
    for created in (True, False):
        result = session.publish(
            tree.root,
            tree.files,
            releases_dir="/var/tmp/ddtree-test/releases",
            digest="d",
            manifest=tree.manifest,
        )
        assert result.created is created
    listed = session.hash_tree("/var/tmp/ddtree-test/releases/d")
    assert [entry for entry in listed or () if entry.path != "manifest.json"] == list(tree.files)
    session.remove_tree("/var/tmp/ddtree-test", below="/var/tmp")
