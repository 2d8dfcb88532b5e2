"""The decision of the host, and the leased lock between two sessions on this machine."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree_ops.deploy import guard_host
from ddtree_ops.deploy.confirming import Lock, _nothing_armed, break_lock
from ddtree_ops.deploy.guard import (
    Safety,
    describe_holder,
    interval,
    locked,
    own_after,
    parse_armed,
    take_lock,
)
from ddtree_ops.deploy.guard_host import boot_paths, boot_unit, decide, own_lock_id, timer_name, verdict_of
from ddtree_ops.deploy.history import History, new_activation
from ddtree_ops.errors import LockHeld, LockLost, RemoteError, RolledBack, UsageError
from ddtree_ops.inventory import load_inventory, select
from ddtree_ops.inventory.models import Service
from ddtree_ops.remote import connect_local
from ddtree_ops.service.layout import Layout

BOOT, OTHER_BOOT = "b1", "b0"
STATE = {
    "activation": "A",
    "unit": "t.service",
    "lock_id": "mine",
    "who": "ann",
    "origin": "desk",
    "phase": "armed",
    "boot_id": BOOT,
    "armed_at": "2026-11-29T17:00:00+00:00",
    "deadline": 1000.0,
    "lost_since": None,
    "grace_s": 60,
    "release": "f" * 64,
    "target": {"mode": "stop"},
}


def lock(lock_id: str = "mine", *, heard: float = 100.0, lease: float = 60.0, boot: str = BOOT) -> dict:
    return {"id": lock_id, "boottime": heard, "lease_s": lease, "boot_id": boot}


@pytest.mark.parametrize(
    ("state", "held", "verdict", "now", "expected"),
    [
        # the client lives
        ({}, lock(), "none", 110.0, "wait: the deploying client lives"),
        ({}, lock(), None, 110.0, "wait: the deploying client lives"),
        ({}, lock(), "pass", 110.0, "disarm: it was confirmed"),
        ({}, lock(), "fail", 110.0, "wait: the deploying client lives"),
        ({}, lock(heard=950), "none", 1000.0, "go-back: not confirmed: the deployment did not end within its deadline"),
        # the client is gone: its agent gave up the lock, was killed, or nothing is heard
        ({}, None, "none", 110.0, "lost: the deploying client holds no lock any more"),
        ({"lost_since": 110.0}, None, "none", 169.0, "wait: the deploying client is gone, and may still come back"),
        ({"lost_since": 110.0}, None, "none", 170.0, "go-back: not confirmed: the deploying client went away"),
        ({"lost_since": 110.0}, None, "fail", 170.0, "go-back: not confirmed: the deploying client went away"),
        ({"lost_since": 110.0}, None, "pass", 170.0, "disarm: it was confirmed"),
        ({"lost_since": 110.0}, None, None, 170.0, "disarm: nothing was switched"),
        ({}, lock(), "none", 161.0, "wait: the deploying client is gone, and may still come back"),
        ({}, lock(), "none", 220.0, "go-back: not confirmed: the deploying client went away"),
        ({}, lock(boot=OTHER_BOOT), "none", 110.0, "lost: the deploying client holds no lock any more"),
        # somebody else has the lock: it is up to them, until they let it go
        ({"lost_since": 1.0}, lock("theirs"), "none", 110.0, "wait: somebody else holds the lock and is in charge"),
        ({"lost_since": 1.0}, lock("theirs", heard=990), "none", 1001.0, "wait: somebody else holds the lock and is in charge"),
        ({"lost_since": 1.0}, lock("theirs"), "none", 161.0, "go-back: not confirmed: the deploying client went away"),
        ({"phase": "going-back"}, lock("theirs"), "fail", 110.0, "wait: somebody else holds the lock and is in charge"),
        # a person is to confirm
        ({"phase": "awaiting"}, None, "none", 999.0, "wait: waiting for a confirmation"),
        ({"phase": "awaiting"}, None, "none", 1000.0, "go-back: not confirmed: nobody confirmed it in time"),
        ({"phase": "awaiting"}, None, "pass", 1000.0, "disarm: it was confirmed"),
        # killed half-way, given up, booted
        ({"phase": "going-back"}, lock("rollback-A"), "fail", 110.0, "go-back: an earlier look did not finish"),
        ({"phase": "going-back"}, None, "none", 110.0, "go-back: an earlier look did not finish"),
        ({"phase": "going-back", "retry_at": 120.0}, None, "fail", 110.0, "wait: going back failed, and is tried again later"),
        ({"phase": "going-back", "retry_at": 120.0}, None, "fail", 120.0, "go-back: an earlier look did not finish"),
        ({"phase": "going-back", "retry_at": 120.0, "boot_id": OTHER_BOOT}, None, "fail", 1.0, "go-back: an earlier look did not finish"),
        ({"phase": "failed"}, None, "fail", 110.0, "disarm: going back was given up"),
        ({"boot_id": OTHER_BOOT}, None, "none", 5.0, "go-back: the host was booted before the deployment was confirmed"),
        ({"boot_id": OTHER_BOOT}, None, "pass", 5.0, "disarm: it was confirmed"),
    ],
)  # fmt: skip
def test_what_a_look_has_to_do(state, held, verdict, now, expected):
    assert ": ".join(decide({**STATE, **state}, held, verdict, now, BOOT)) == expected


@pytest.mark.parametrize("damage", [{"boottime": "soon"}, {"lease_s": None}])
def test_a_damaged_lock_holds_nothing(damage):
    assert guard_host.lock_left({**lock(), **damage}, 100.0, BOOT) == 0.0
    assert decide(STATE, {**lock("theirs"), **damage}, "none", 100.0, BOOT)[0] == "lost"


def test_the_verdict_of_an_activation_is_read_past_damaged_lines():
    lines = [
        b'{"event":"verdict","id":"A","verdict":"pass"}',
        b"{half a line",
        b'{"event":"activate","id":"A"}',
        b'{"event":"activate","id":"B"}',
        b'{"event":"verdict","id":"B","verdict":"fail"}',
    ]
    history = b"\n".join(lines)
    assert [verdict_of(history, name) for name in "ABC"] == ["none", "fail", None]


def test_timers_of_services_and_roots_have_names_of_their_own():
    names = {
        timer_name("a@1.service", "/x/a@1.service"),
        timer_name("a-1.service", "/x/a-1.service"),
        timer_name("a-1.service", "/y/a-1.service"),
    }
    assert len(names) == 3
    assert all("@" not in name and "/" not in name for name in names)


def test_the_unit_of_the_next_boot_can_hold_any_path():
    text = boot_unit("a@1.service", ["/usr/bin/python3", '/x y/$a%b"c\\d'], "/x y/$a%b")
    assert 'RequiresMountsFor="/x y/$a%%b"\n' in text
    assert 'ExecStart="/usr/bin/python3" "/x y/$$a%%b\\"c\\\\d"\n' in text
    link, path = boot_paths("name")
    assert path == "/etc/systemd/system/name-boot.service"
    assert link == "/etc/systemd/system/multi-user.target.wants/name-boot.service"


def test_the_host_half_is_python_3_8_and_speaks_the_words_of_the_agent():
    from ddtree_ops.remote import agent

    source = Path(guard_host.__file__).read_text()
    ast.parse(source, feature_version=(3, 8))
    assert guard_host.LOCK_ROOM == agent.LOCK_ROOM
    assert "ddtree_ops" not in "".join(
        line for line in source.splitlines() if line.startswith(("import", "from"))
    )


def test_the_state_is_read_back_and_a_damaged_one_is_an_error():
    armed = parse_armed(json.dumps(STATE).encode())
    assert armed is not None
    assert armed.describe().startswith(
        "armed by ann on desk at 2026-11-29T17:00:00+00:00: unless confirmed, back to"
    )
    assert armed.own_lock_id == own_lock_id(STATE)
    assert parse_armed(None) is None
    with pytest.raises(RemoteError, match="cannot be read"):
        parse_armed(b'{"phase": ')


@pytest.mark.parametrize(
    "change",
    [
        {"target": {"mode": "release"}},
        {"target": {"mode": "release", "release": 7, "passed": ""}},
        {"target": [1]},
        {"target": None},
        {"expected": 5},
    ],
)
def test_a_state_that_is_json_and_no_state_is_an_error_of_its_own(change):
    with pytest.raises(RemoteError, match="cannot be read"):
        parse_armed(json.dumps({**STATE, **change}).encode())


@pytest.mark.parametrize("content", [b"[1]", b"null", b"7", b"[" * 100_000, b"\xff"])
def test_what_is_no_state_at_all(content):
    with pytest.raises(RemoteError, match="cannot be read"):
        parse_armed(content)


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(UsageError, match="--no-rollback"):
        Safety.of(command="deploy", rollback=False, confirm_within=60.0)
    with pytest.raises(UsageError, match="less than a second"):
        Safety.of(command="deploy", confirm_within=0.0)


def _service(**values: object) -> Service:
    return Service.model_validate(
        {"unit": "t.service", "runtime": "r", "venv": "/v", "model": "/m", **values}
    )


def test_the_time_until_the_host_acts_follows_from_lease_and_grace():
    assert (interval(_service()), own_after(_service())) == (10.0, 140.0)
    short = _service(rollback={"lease": 2, "grace": 1})
    assert (interval(short), own_after(short)) == (1.0, 5.0)


# -- the lock, between real agents -----------------------------------------------------------------------------


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(str(tmp_path), "t.service")


def test_a_lock_is_renewed_beyond_its_lease_and_named_to_others(layout):
    with connect_local("mine") as mine, connect_local("other") as other:
        take_lock(mine, layout, lock_id="1", command="deploy", lease=2.0)
        content = json.loads(Path(layout.lock).read_bytes())
        assert {"schema", "id", "who", "origin", "command", "since", "renewed", "lease_s", "agent_pid", "boot_id", "boottime"} <= content.keys()  # fmt: skip
        told: list[str] = []
        with pytest.raises(
            LockHeld, match=r"holds the lock of t.service since .* \(deploy\); waited 3 s"
        ) as caught:
            take_lock(other, layout, lock_id="2", command="stop", lease=2.0, wait=3.0, tell=told.append)
        assert "ddtree-ops lock status other" in caught.value.hint
        assert len(told) == 1
        assert "0 of 3 s" in told[0]
        assert mine.check_lock(layout.lock, "1").held
        assert not other.check_lock(layout.lock, "2").held


def test_a_lock_is_waited_for(layout):
    with connect_local("mine") as mine, connect_local("other") as other:
        with locked(mine, layout, _service(), Safety()):
            said: list[str] = []

            def let_go(text: str) -> None:
                said.append(text)
                mine.release_lock(layout.lock)

            take_lock(other, layout, lock_id="2", command="stop", lease=60.0, wait=30.0, tell=let_go)
        assert len(said) == 1
        assert other.check_lock(layout.lock, "2").held


def test_a_killed_agent_holds_the_lock_for_its_lease_and_not_longer(layout):
    doomed = connect_local("doomed")
    with connect_local("other") as other:
        take_lock(doomed, layout, lock_id="1", command="deploy", lease=4.0)
        os.kill(doomed.facts["pid"], 9)
        holder = other.acquire_lock(layout.lock, {"id": "2"})
        assert holder is not None
        assert 0 < holder["left_s"] <= 4.0
        take_lock(other, layout, lock_id="2", command="deploy", lease=4.0, wait=300.0)
    doomed.close()
    assert not Path(layout.lock).exists()


def test_a_lease_counts_from_the_last_sign_of_the_client_not_of_its_agent(layout):
    """A client that is stopped, or behind a dead network, keeps its connection and its agent."""
    script = (
        "import sys, time\nfrom ddtree_ops.remote import connect_local\n"
        "s = connect_local(); s.acquire_lock(sys.argv[1], {'id': '1'}, lease=2.0); print(s.facts['pid'], flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, layout.lock], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        agent_pid = int(client.stdout.readline())
        os.kill(client.pid, 19)
        try:
            with connect_local("other") as other:
                take_lock(other, layout, lock_id="2", command="deploy", lease=60.0, wait=300.0)
                os.kill(agent_pid, 0)
                assert other.check_lock(layout.lock, "2").held
        finally:
            client.kill()


def test_a_lock_of_another_boot_or_without_sense_holds_no_more(layout):
    path = Path(layout.lock)
    with connect_local() as session:
        take_lock(session, layout, lock_id="1", command="deploy", lease=60.0)
        content = json.loads(path.read_bytes())
        session.release_lock(layout.lock)
        for found in ({**content, "boot_id": "another"}, {**content, "boottime": "x"}, []):
            path.write_text(json.dumps(found))
            take_lock(session, layout, lock_id="2", command="deploy", lease=60.0)
            session.release_lock(layout.lock)
        assert not path.exists()


def test_a_broken_lock_is_noticed_and_the_new_holder_is_left_alone(layout):
    with connect_local("mine") as mine, connect_local("other") as other:
        take_lock(mine, layout, lock_id="1", command="deploy", lease=2.0)
        assert not other.break_lock(layout.lock, "another")
        assert other.break_lock(layout.lock, "1")
        take_lock(other, layout, lock_id="2", command="deploy", lease=60.0)
        found = mine.check_lock(layout.lock, "1")
        assert not found.held
        assert found.holder is not None
        assert found.holder["id"] == "2"
        time.sleep(0.7)  # the first one's next renewal
        mine.release_lock(layout.lock)
        assert other.check_lock(layout.lock, "2").held


def test_who_lost_the_lock_changes_nothing_more_and_may_look(layout):
    """As one who was frozen while somebody else took over, and wakes up in the middle of a switch."""
    folder = Path(layout.service_dir)
    changes = [
        lambda: mine.append_line(layout.history, "{}"),
        lambda: mine.write_file(str(folder / "file"), b"x"),
        lambda: mine.swap_link(layout.current, "x"),
        lambda: mine.run(["systemctl", "stop", "--", "ddtree-ops-no-such.service"]),
        lambda: mine.stream(["systemctl", "stop", "--", "ddtree-ops-no-such.service"]).get(5.0),
    ]
    with connect_local("mine") as mine, connect_local("other") as other:
        take_lock(mine, layout, lock_id="1", command="deploy", lease=60.0)
        mine.append_line(layout.history, "{}")
        other.break_lock(layout.lock, "1")
        for change in changes:
            with pytest.raises(LockLost, match="the lock was lost: nobody has it now") as caught:
                change()
            assert "ddtree-ops history mine" in caught.value.hint
        assert mine.read_file(layout.history) == b"{}\n"
        assert sorted(path.name for path in folder.iterdir()) == ["history.jsonl"]
        mine.release_lock(layout.lock)
        mine.append_line(layout.history, "{}")


def test_a_lock_that_ran_out_and_that_nobody_took_is_taken_up_again(layout):
    with connect_local("mine") as mine:
        take_lock(mine, layout, lock_id="1", command="deploy", lease=60.0)
        path = Path(layout.lock)
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "boottime": 0.0}))
        mine.append_line(layout.history, "{}")
        assert mine.check_lock(layout.lock, "1").held


def test_the_lock_of_a_host_that_goes_back_is_not_broken(layout):
    armed = parse_armed(json.dumps({**STATE, "phase": "going-back"}).encode())
    target = select(load_inventory("lab"), ["ct200"])[0]
    holder = {"id": own_lock_id(STATE), "who": "host", "origin": "t"}
    with (
        connect_local() as session,
        pytest.raises(LockHeld, match=r"host on t .* switching the service") as caught,
    ):
        break_lock(target, session, Lock("h", "s", "t.service", holder, 12.0, armed))
    assert "--lock-wait" in caught.value.hint


def test_who_comes_too_late_to_confirm_is_told_to_deploy():
    made = new_activation(
        release="b" * 64, unit_sha256="u", plan="p", who="host", origin="ct200", reason="rollback"
    )
    target = select(load_inventory("lab"), ["ct200"])[0]
    with pytest.raises(RolledBack, match="too late: the host went back by itself") as caught:
        _nothing_armed(target, History((made,)))
    assert caught.value.hint.startswith("ddtree-ops deploy ct200 ")


def test_locks_are_described_for_people():
    holder = {"who": "ann", "origin": "desk", "since": 0, "command": "deploy", "renewed": 60}
    assert describe_holder(holder, "t.service") == (
        "ann on desk holds the lock of t.service since 1970-01-01 00:00:00Z (deploy)"
    )
    assert describe_holder({}, "t.service") == "somebody on another machine holds the lock of t.service"
    for moment in (float("inf"), float("nan"), 1e300, -1, "x", None):
        assert " since " not in describe_holder({"since": moment}, "t.service")
    lock = Lock("h", "s", "t.service", holder, 12.0, None)
    assert lock.describe().endswith("last heard 00:01:00Z, holds for 12 s more")
    assert lock.to_json()["holder"] == {"who": "ann", "origin": "desk", "command": "deploy", "since": 0, "renewed": 60, "lease_s": None}  # fmt: skip
    assert Lock("h", "s", "t.service", holder, 0.0, None).describe() == "the lock of t.service is free"


# -- the host's half, without systemd --------------------------------------------------------------------------


def ask(monkeypatch, capsys, verb: str, folder: Path, request: dict | None = None) -> tuple[int, dict]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request or {})))
    code = guard_host.main([verb, str(folder)])
    said = capsys.readouterr().out
    return code, json.loads(said) if said else {}


def test_nothing_is_granted_without_the_lock(layout, monkeypatch, capsys):
    folder = Path(layout.service_dir)
    request = {"lock_id": "1", "activation": "A", "unit": "t.service", "verdict": {}, "seconds": 1}
    with connect_local() as session:
        take_lock(session, layout, lock_id="2", command="deploy", lease=60.0)
        for verb in ("arm", "confirm", "hold", "disarm"):
            code, answer = ask(monkeypatch, capsys, verb, folder, request)
            assert (code, answer["refused"]) == (3, "lock")
            assert "holds it now" in answer["message"]
    code, answer = ask(monkeypatch, capsys, "confirm", folder, request)
    assert "nobody holds it now" in answer["message"]
    assert not (folder / "rollback.json").exists()
    assert not (folder / "history.jsonl").exists()


def test_what_is_not_armed_or_is_going_back_cannot_be_confirmed(layout, monkeypatch, capsys):
    folder = Path(layout.service_dir)
    request = {"lock_id": "1", "activation": "A", "verdict": {"event": "verdict"}}
    with connect_local() as session:
        take_lock(session, layout, lock_id="1", command="deploy", lease=60.0)
        assert ask(monkeypatch, capsys, "confirm", folder, request)[1]["refused"] == "not-armed"
        (folder / "rollback.json").write_text(json.dumps({**STATE, "phase": "going-back"}))
        assert ask(monkeypatch, capsys, "confirm", folder, request)[1]["refused"] == "gone-back"
        (folder / "rollback.json").unlink()
        (folder / "history.jsonl").write_text(
            '{"event":"activate","id":"A"}\n{"event":"verdict","id":"A","verdict":"fail"}\n'
        )
        assert ask(monkeypatch, capsys, "confirm", folder, request)[1]["refused"] == "gone-back"
    assert "pass" not in (folder / "history.jsonl").read_text()


def test_a_line_that_does_not_fit_leaves_the_history_as_it_was(layout):
    """A full disk may take the beginning of a line: that is no verdict, and would spoil what is read."""
    folder = Path(layout.service_dir)
    folder.mkdir(parents=True)
    history = folder / "history.jsonl"
    history.write_bytes(b'{"event":"activate","id":"A"}\n' * 40)
    before = history.read_bytes()
    limit = str(len(before) + 10)
    append = (
        "import resource, signal, sys\nfrom ddtree_ops.deploy import guard_host\n"
        "from ddtree_ops.remote import agent\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)\n"
        "for write in (lambda path: guard_host.append(path, {'event': 'verdict', 'id': 'A'}),\n"
        "              lambda path: agent.op_append_line(None, {'path': path}, b'{\"event\": \"verdict\"}')):\n"
        "    try:\n        write(sys.argv[1])\n    except OSError as error:\n        print(error.errno)"
    )
    done = subprocess.run(
        [sys.executable, "-c", append, str(history), limit], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["27", "27"]
    assert history.read_bytes() == before


def test_lines_of_several_writers_are_all_there_and_whole(layout):
    with connect_local("mine") as mine, connect_local("other") as other:
        for number in range(20):
            for begin in [
                session.begin("append_line", {"path": layout.audit}, data=b"%d" % number * 2000)
                for session in (mine, other)
            ]:
                begin()
    lines = Path(layout.audit).read_bytes().splitlines()
    assert sorted(lines) == sorted([b"%d" % number * 2000 for number in range(20)] * 2)
