"""Status from what a host answers: what is known, what is not, and the exit code that follows. Pure but for one look."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ddtree_ops.deploy.audit import Act
from ddtree_ops.deploy.history import activation_line, new_activation, verdict_line
from ddtree_ops.deploy.status import Board, Status, parse_seen
from ddtree_ops.errors import ExitCode, RemoteError, UnreachableError
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.remote import connect_local
from ddtree_ops.remote.session import Reply
from ddtree_ops.results import Verdict
from ddtree_ops.service.control import PortOwner

UNIT = "s.service"
RUN = "1" * 32
SHOW = {
    "Id": UNIT,
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "InvocationID": RUN,
    "MainPID": "7",
    "NRestarts": "0",
    "ActiveEnterTimestamp": "Sun 2026-11-29 17:00:00 UTC",
    "StateChangeTimestamp": "Sun 2026-11-29 17:00:00 UTC",
}
DECODE = (
    "[2026-11-29 17:01:{:02} TP0] Decode batch, #running-req: 1, #token: 166, token usage: 0.04, accept len: {}, "
    "accept rate: 0.99, cuda graph: True, gen throughput (token/s): {}, #queue-req: 0"
)
NOW = 1795971900.0  # 2026-11-29 17:05:00 UTC


def text(output: str, rc: int = 0) -> Reply:
    return Reply({"rc": rc, "stdout": len(output.encode()), "truncated": False}, output.encode())


def entry(message: str, second: float, run: str = RUN) -> str:
    return json.dumps(
        {
            "MESSAGE": message,
            "__REALTIME_TIMESTAMP": str(int(second * 1e6)),
            "_SYSTEMD_UNIT": UNIT,
            "_SYSTEMD_INVOCATION_ID": run,
        }
    )


def history(verdict: Verdict | None = Verdict.PASS, run: str = RUN) -> str:
    made = new_activation(
        release="b" * 64, unit_sha256="u", plan="p", who="ann", origin="desk", reason="deploy", runtime="r"
    )
    lines = [activation_line(made)]
    if verdict is not None:
        lines.append(verdict_line(made.id, verdict, "HF_TOKEN=hf_secret1 is bad", invocation=run))
    return "\n".join(lines) + "\n"


def replies(**given: Any) -> list[Reply | Exception]:
    """Answers of a healthy host, some of them replaced."""
    show = {**SHOW, **given.get("show", {})}
    found = given.get("history", history())
    lines = [
        entry(DECODE.format(1, "3.10", "50.0"), NOW - 240),
        entry(DECODE.format(9, "2.50", "68.88"), NOW - 90),
    ]
    probe = {"now": NOW, "status": 200, "model": "kimi", "error": "", **given.get("probe", {})}
    link = [{"name": "current", "kind": "link", "target": "../../releases/" + "b" * 64}]
    return [
        Reply({"found": True, "entries": given.get("entries", link)}),
        Reply({"found": bool(found)}, found.encode()),
        text("".join(f"{key}={value}\n" for key, value in show.items())),
        text(json.dumps(probe)),
        given.get("journal", text("\n".join([*lines, entry("200 OK", NOW - 1)]) + "\n")),
        given.get("armed", Reply({"found": False})),
        given.get("lock", Reply({"held": False, "holder": None, "left_s": 0.0})),
        given.get("bench", Reply({"held": False, "holder": None, "left_s": 0.0})),
    ]


def status(**given: Any) -> Status:
    return Status("h", "s", UNIT, seen=parse_seen(replies(**given), unit=UNIT))


def test_a_service_that_is_well():
    row = status()
    assert row.problem == ""
    assert row.exit_code is ExitCode.OK
    told = row.to_json()
    assert told["ready"] == "validated"
    assert (told["accept_length"], told["tokens_per_s"], told["figures_age_s"]) == (2.5, 68.88, 90.0)
    assert (told["model"], told["runtime"], told["since"]) == ("kimi", "r", "2026-11-29T17:00:00+00:00")
    assert told["last"]["who"] == "ann"
    assert told["last"]["release"] == told["last_good"]["release"] == "b" * 64


def test_what_a_bench_left_is_said_unless_somebody_is_at_work():
    told = history().replace('"reason":"deploy"', '"reason":"deploy","command":"bench"')
    (note,) = parse_seen(replies(history=told), unit=UNIT, host="h/s").disturbed
    assert note.startswith("a bench that was killed")
    assert note.endswith("ddtree-ops deploy h")
    held = Reply(
        {"held": True, "holder": {"who": "ann", "origin": "desk", "command": "bench"}, "left_s": 9.0}
    )
    assert status(history=told, lock=held).to_json()["notes"] == []
    (note,) = status(history=told, bench=held).to_json()["notes"]
    assert note == f"a bench is under way: ann on desk holds the lock of a bench of {UNIT} (bench)"
    (note,) = status(history=told, bench=RemoteError("no")).to_json()["notes"]
    assert note.startswith("the lock cannot be read")
    assert status().to_json()["notes"] == []


DOWN = {"ActiveState": "failed", "SubState": "failed", "Result": "signal", "MainPID": "0"}
GONE = {
    "LoadState": "not-found",
    "ActiveState": "inactive",
    "SubState": "dead",
    "InvocationID": "",
    "MainPID": "0",
}


@pytest.mark.parametrize(
    ("given", "ready", "code", "problem"),
    [
        ({"show": DOWN}, "-", 5, "s.service is failed (failed), result signal"),
        ({"show": {"ActiveState": "activating", "SubState": "auto-restart"}}, "-", 5, "auto-restart"),
        ({"show": GONE, "history": "", "entries": []}, "-", 8, "nothing is deployed"),
        ({"show": GONE}, "-", 5, "does not exist"),
        ({"history": history(None)}, "answering", 8, "never validated"),
        ({"history": history(run="2" * 32)}, "answering", 8, "never validated"),
        ({"history": history(Verdict.FAIL)}, "failed", 5, "validation ended with fail: HF_TOKEN=********"),
        ({"history": history(Verdict.INCONCLUSIVE)}, "failed", 8, "ended with inconclusive"),
        (
            {"probe": {"status": 0, "error": "timed out"}},
            "no answer",
            5,
            "no answer at its port (validated once)",
        ),
        (
            {"probe": {"status": 0, "error": "refused"}, "history": history(None)},
            "no answer",
            8,
            "still loading",
        ),
        ({"probe": {"status": 401, "model": ""}}, "validated", 0, ""),
    ],
)
def test_what_is_wrong_is_said_and_told_by_the_exit_code(given, ready, code, problem):
    row = status(**given)
    assert (row.ready, int(row.exit_code)) == (ready, code)
    assert problem in row.problem
    assert bool(problem) == bool(row.problem)
    assert "hf_secret1" not in json.dumps(row.to_json())


STOPPING = {"MESSAGE_ID": "de5b426a63be47a7b6ac3eaac82e2f6f", "_PID": "1", "UNIT": UNIT, "INVOCATION_ID": RUN}
LOADING = (
    "[2026-11-29 17:00:01 TP0] Load weight begin. avail mem=90.00 GB",
    "Loading safetensors checkpoint shards:  45% Completed | 29/64 [00:01<00:02, 20.00it/s]",
)
AWAITING = {
    "activation": "a1",
    "phase": "awaiting",
    "who": "ann",
    "origin": "desk",
    "armed_at": "2026-11-29T17:00:00+00:00",
    "lock_id": "x",
    "release": "b" * 64,
    "confirm_until": "2026-11-29T17:30:00+00:00",
    "expected": {"InvocationID": RUN},
    "grace_s": 60,
    "target": {"mode": "stop"},
}


def armed(**more: Any) -> Reply:
    return Reply({"found": True}, json.dumps({**AWAITING, **more}).encode())


def test_what_was_stopped_as_asked_for_is_no_failure_of_its_own():
    line = json.dumps({**STOPPING, "MESSAGE": "Stopping", "__REALTIME_TIMESTAMP": str(int((NOW - 60) * 1e6))})
    row = status(show=DOWN, journal=text(line + "\n"))
    assert (row.problem, row.next, int(row.exit_code)) == ("stopped as asked for", "ddtree-ops start h", 5)
    assert row.seen is not None
    by = Act("2026-11-29T17:04:00+00:00", "stop", UNIT, "ok", "", "ann", "desk", RUN)
    row = replace(row, seen=replace(row.seen, stop=by))
    assert row.problem == "stopped as asked for, by ann on desk at 2026-11-29T17:04:00+00:00"
    assert row.to_json()["stopped_by"] == {"time": by.time, "who": "ann", "origin": "desk"}
    earlier = line.replace(RUN, "2" * 32)
    assert not status(show=DOWN, journal=text(earlier + "\n")).to_json()["stopped"], "of an earlier run"


def test_a_load_under_way_is_told_with_how_far_it_is():
    lines = [entry(message, NOW - 290 + number) for number, message in enumerate(LOADING)]
    given = {"probe": {"status": 0, "error": "refused"}, "history": history(None)}
    row = status(**given, journal=text("\n".join(lines) + "\n"))
    assert (row.ready, int(row.exit_code), row.next) == ("loading", 8, "ddtree-ops wait h")
    assert row.problem == "still loading: weights 29/64 (45 %), 5m00s, last progress 4m49s ago"
    ready = entry("The server is fired up and ready to roll!", NOW - 200)
    row = status(**given, journal=text("\n".join([*lines, ready]) + "\n"))
    assert (row.ready, row.next) == ("no answer", "ddtree-ops logs h --lines 100")


def test_what_waits_for_a_confirmation_contradicts_nothing():
    row = status(history=history(None), armed=armed())
    assert (row.ready, int(row.exit_code), row.next) == ("unconfirmed", 8, "ddtree-ops confirm h")
    assert row.problem == "passed, and waits until 2026-11-29T17:30:00+00:00 for somebody to confirm it"
    other = status(history=history(None), armed=armed(expected={"InvocationID": "2" * 32}))
    assert (other.ready, other.problem) == ("answering", "this run was never validated")


@pytest.mark.parametrize(
    ("lost", "lock", "said"),
    [
        (None, {}, "within 60 s"),
        (980.0, {}, "within 40 s"),
        (900.0, {}, "at once"),
        (None, {"holder": {"id": "x", "boottime": 950.0, "lease_s": 45.0}}, "within 55 s"),
    ],
)
def test_how_long_there_is_to_come_back_after_a_client_that_is_gone(lost, lock, said):
    found = {
        "history": history(None),
        "armed": armed(phase="armed", lost_since=lost),
        "lock": Reply({"held": False, "holder": None, "left_s": 0.0, **lock}),
        "probe": {"boot": 1000.0},
    }
    seen = parse_seen(replies(**found), unit=UNIT, host="h/s")
    assert seen.armed.endswith(
        f"; its client is gone, and the host goes back {said}, unless: ddtree-ops confirm h"
    )
    lives = {**found, "lock": Reply({"held": False, "holder": {"id": "x", "who": "ann"}, "left_s": 9.0})}
    assert "is gone" not in parse_seen(replies(**lives), unit=UNIT, host="h").armed
    assert status(**found).next == "ddtree-ops confirm h"


def test_a_port_that_somebody_else_holds():
    row = status()
    assert row.seen is not None
    stranger = PortOwner(9, "nginx", "nginx.service", "127.0.0.1", 0)
    row = replace(row, seen=replace(row.seen, owners=(stranger,)))
    assert "nginx (PID 9" in row.problem
    assert row.exit_code is ExitCode.CHECK_FAILED


@pytest.mark.parametrize(
    ("journal", "note"),
    [
        (text("", 1), "the journal cannot be read"),
        (RemoteError("x"), "the journal cannot be read"),
        (text(""), "holds no line of this run"),
        (text(entry(DECODE.format(1, "3.1", "5"), NOW, "2" * 32) + "\n"), "holds no line of this run"),
        (text(entry("hello", NOW) + "\n"), "no decode line (one every 40 steps) among the newest 1 lines"),
    ],
)
def test_no_figures_have_a_reason(journal, note):
    seen = parse_seen(replies(journal=journal), unit=UNIT)
    assert seen.figures.accept_length is None
    assert note in seen.figures.note


def test_a_lock_and_an_armed_rollback_are_told_and_what_cannot_be_read_is_no_failure():
    holder = {"who": "ann", "origin": "desk", "since": NOW, "command": "deploy", "id": "x"}
    armed = {
        "activation": "a1",
        "phase": "awaiting",
        "who": "ann",
        "origin": "desk",
        "armed_at": "2026-11-29T17:00:00+00:00",
        "lock_id": "x",
        "release": "b" * 64,
        "confirm_until": "2026-11-29T17:30:00+00:00",
        "target": {"mode": "stop"},
    }
    seen = parse_seen(
        replies(
            lock=Reply({"held": False, "holder": holder, "left_s": 12.0}),
            armed=Reply({"found": True}, json.dumps(armed).encode()),
        ),
        unit=UNIT,
    )
    assert "ann on desk holds the lock of s.service" in seen.lock
    assert "until 2026-11-29T17:30:00+00:00" in seen.armed
    seen = parse_seen(replies(lock=RemoteError("no"), armed=Reply({"found": True}, b"{")), unit=UNIT)
    assert (seen.lock, seen.armed) == ("", "")
    assert len(seen.disturbed) == 2


def test_systemd_that_does_not_answer_is_an_error():
    answers = replies()
    answers[2] = text("", 1)
    with pytest.raises(RemoteError, match=r"the look at s\.service gave no answer"):
        parse_seen(answers, unit=UNIT, host="h")


def _target(name: str) -> Target:
    made = Service.model_validate(
        {"name": "s", "unit": "no-such.service", "runtime": "r", "venv": "/v", "model": "/m", "port": 1}
    )
    return Target(host=Host(name=name, services={"s": made}), service=made, runtime=RuntimeSpec())


def test_a_host_that_is_down_does_not_hide_the_others_and_sessions_are_used_again():
    opened = []

    def connect(target: Target):
        opened.append(target.host.name)
        if target.host.name == "gone":
            raise UnreachableError("refused the connection")
        return connect_local(target.host.name)

    with Board([_target("gone"), _target("here")], connect) as board:
        first, second = board.look(), board.look()
    for gone, here in (first, second):
        assert gone.exit_code is ExitCode.UNREACHABLE
        assert gone.to_json()["reachable"] is False
        assert (here.host, here.to_json()["reachable"]) == ("here", True)
        assert here.exit_code is not ExitCode.UNREACHABLE
    assert sorted(opened) == ["gone", "gone", "here"]
