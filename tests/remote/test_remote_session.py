"""Requests over pipes to a real agent."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import DeadlineError, RemoteError, UnreachableError
from ddtree_ops.remote import AgentError, Completed, Reply, Request, Session, agent, connect_local, scan_tree
from ddtree_ops.remote import session as session_module
from ddtree_ops.remote.local import PipeTransport
from ddtree_ops.remote.protocol import MARKER, FrameReader, ProtocolError, agent_source, encode
from ddtree_ops.service.state import PROPERTIES as SERVICE_PROPERTIES

NASTY = "a b'c\"d\n$(touch /tmp/never)`id`;|&*?~\\ \u2713\udcff --"


def test_marker_is_the_same_on_both_sides() -> None:
    assert MARKER == agent.MARKER


def test_agent_is_python_3_8() -> None:
    ast.parse(Path(agent.__file__).read_text(), feature_version=(3, 8))


def test_agent_watches_what_the_service_layer_reads() -> None:
    assert set(SERVICE_PROPERTIES) <= set(agent.PROPERTIES)


def test_importing_is_cheap() -> None:
    script = (
        "import sys, ddtree_ops.remote\n"
        "print(*sorted({'httpx', 'paramiko', 'fabric', 'invoke', 'tenacity', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"\n"


def test_facts(local: Session) -> None:
    facts = local.facts
    assert facts["uid"] == os.getuid()
    assert facts["hostname"] == os.uname().nodename
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert abs(facts["clock_skew_s"]) < 30
    assert tuple(map(int, facts["python"].split("."))) >= (3, 8)


def test_arguments_arrive_verbatim(local: Session) -> None:
    script = "import os,sys; sys.stdout.buffer.write(b'|'.join(map(os.fsencode, sys.argv[1:])))"
    done = local.run([sys.executable, "-c", script, NASTY, "", "-x"], env={"PYTHONUTF8": "1"})
    assert done.stdout == NASTY.encode("utf-8", "surrogateescape") + b"||-x"
    assert done.rc == 0


def test_paths_arrive_verbatim(local: Session, tmp_path: Path) -> None:
    path = f"{tmp_path}/{NASTY.replace('/', '_')}"
    assert local.write_file(path, b"here") is True
    assert local.read_file(path) == b"here"
    assert os.listdir(tmp_path) == [os.path.basename(path)]  # noqa: PTH119, PTH208


def test_environment_is_c_and_has_system_folders(local: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "fr_FR.ISO-8859-15")
    monkeypatch.setenv("LANGUAGE", "fr")
    with connect_local() as session:
        done = session.run(["env"], env={"EXTRA": "one\ntwo"})
    assert "LC_ALL=C\n" in done.text
    assert "LANG=" not in done.text and "LANGUAGE=" not in done.text
    assert "EXTRA=one\ntwo" in done.text
    assert "/usr/sbin" in done.text


def test_input_and_binary_output(local: Session) -> None:
    data = bytes(range(256)) * 8192
    assert local.run(["cat"], input=data) == Completed(("cat",), 0, data, b"")


def test_large_outputs_on_both_streams(local: Session) -> None:
    size = 3_000_000
    script = f"import os\nfor i in range(30): os.write(1, b'o'*{size // 30}); os.write(2, b'e'*{size // 30})"
    done = local.run([sys.executable, "-c", script])
    assert (len(done.stdout), len(done.stderr)) == (size, size)
    assert set(done.stdout) == {ord("o")} and set(done.stderr) == {ord("e")}


def test_output_is_bounded_and_says_so(local: Session) -> None:
    reply = local.request("run", {"argv": ["head", "-c", "100000", "/dev/zero"], "max_output": 1000})
    assert len(reply.data) == 1000
    assert reply.values["truncated"] is True
    assert reply.values["rc"] == 0


def test_exit_statuses(local: Session) -> None:
    assert local.run(["sh", "-c", "exit 3"]).rc == 3
    assert local.run(["sh", "-c", "kill -9 $$"]).rc == -9
    missing = local.run(["no-such-command-here"])
    assert missing.rc == 127
    assert missing.stderr == b"no-such-command-here: No such file or directory"
    assert local.run(["/etc"]).rc == 126


def test_check_raises_with_the_output(local: Session) -> None:
    with pytest.raises(RemoteError) as caught:
        local.run(["sh", "-c", "echo first >&2; echo why >&2; exit 4"], check=True)
    assert caught.value.host == "local"
    assert "exit status 4" in str(caught.value)
    assert caught.value.details == ("first", "why")


def test_deadline_kills_the_process_group(
    local: Session, tmp_path: Path, alive: Any, wait_until: Any
) -> None:
    pids = tmp_path / "pids"
    script = f"trap '' TERM; sleep 60 & echo $$ $! > {pids}; echo partial; wait"
    with pytest.raises(DeadlineError) as caught:
        local.run(["sh", "-c", script], deadline=0.4)
    assert "0.4 s" in str(caught.value)
    assert caught.value.details == ("partial",)
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: not alive(pid))
    assert local.run(["true"]).rc == 0


def test_a_grandchild_that_keeps_the_output_open_does_not_hang(local: Session) -> None:
    done = local.run(["sh", "-c", "sleep 30 & echo done"], deadline=10.0)
    assert done.text == "done\n"
    assert done.rc == 0


def test_what_is_said_just_before_the_end_is_not_lost(own: Session, tmp_path: Path, wait_until: Any) -> None:
    """The agent gets no processor time between its last look at the output and the command's end."""
    script = "echo $$ > $0.new; mv $0.new $0.pid; until [ -e $0.go ]; do sleep 0.02; done; echo said"
    stream = own.stream(["sh", "-c", script, str(tmp_path / "it")])
    pid = tmp_path / "it.pid"
    wait_until(pid.exists)
    status = Path(f"/proc/{pid.read_text().strip()}/status")
    os.kill(own.facts["pid"], signal.SIGSTOP)
    try:
        (tmp_path / "it.go").touch()
        wait_until(lambda: "State:\tZ" in status.read_text())
        time.sleep(agent.TICK)
    finally:
        os.kill(own.facts["pid"], signal.SIGCONT)
    assert [(values["event"], data) for values, data in stream] == [("stdout", b"said\n"), ("exit", b"")]


def test_requests_run_side_by_side(local: Session) -> None:
    slow = threading.Thread(target=lambda: local.run(["sleep", "1"]))
    slow.start()
    assert local.request("ping", data=b"x").data == b"x"
    assert slow.is_alive()
    slow.join()


def test_own_output_is_protected(tmp_path: Path) -> None:
    source = (
        agent_source()
        .partition(b"\n")[2]
        .replace(b"def op_ping(", b"def op_ping2(")
        .replace(
            b"OPS: dict",
            b"def op_ping(call, args, data):\n    os.write(1, b'garbage')\n    print('more', flush=True)\n"
            b"    return {}, data\n\n\nOPS: dict",
        )
    )
    with Session(PipeTransport(), host="local", start=b"%d\n" % len(source) + source) as session:
        assert session.request("ping", data=b"clean").data == b"clean"
        assert session.request("ping", data=b"again").data == b"again"


def test_unknown_op_and_internal_errors(local: Session) -> None:
    with pytest.raises(AgentError, match="knows no request 'nonsense'"):
        local.request("nonsense")
    with pytest.raises(AgentError) as caught:
        local.request("read_file", {})
    assert caught.value.code == "internal"
    assert local.request("ping").values["time"] > 0


def test_requests_under_way_at_once(local: Session) -> None:
    slow = local.begin("run", {"argv": ["sh", "-c", "sleep 0.2; echo slow"]})
    several = local.begin_batch([Request("run", {"argv": ["echo", "one"]}), Request("nonsense", {})])
    refused = local.begin("nonsense")
    assert local.run(["echo", "quick"]).text == "quick\n"
    first, second = several()
    assert isinstance(first, Reply) and first.data == b"one\n"
    assert isinstance(second, RemoteError)
    with pytest.raises(AgentError, match="knows no request 'nonsense'"):
        refused()
    assert slow().data == b"slow\n"


def test_a_request_under_way_ends_with_the_session(own: Session) -> None:
    reply = own.begin("run", {"argv": ["sleep", "60"]}, deadline=120.0)
    own.close()
    with pytest.raises(UnreachableError, match="the session is closed"):
        reply()


def test_batch_is_one_round_trip(local: Session, tmp_path: Path) -> None:
    before = local.round_trips
    got = local.batch(
        [
            Request("write_file", {"path": f"{tmp_path}/f", "mode": 0o600}, b"one"),
            Request("nonsense", {}),
            Request("read_file", {"path": f"{tmp_path}/f", "max_bytes": 100}),
            Request("run", {"argv": ["cat"]}, b"two"),
            Request("stream", {"argv": ["true"]}),
        ]
    )
    assert local.round_trips == before + 1
    assert isinstance(got[1], RemoteError) and isinstance(got[4], RemoteError)
    assert isinstance(got[2], Reply) and got[2].data == b"one"
    assert isinstance(got[3], Reply) and got[3].data == b"two"


# ------------------------------------------------------------------------------------------------ streams


def test_stream_gives_both_outputs_and_the_exit(local: Session) -> None:
    script = "import sys,os; os.write(1,b'o'*300000); os.write(2,b'\\xff\\x00'); sys.exit(5)"
    seen: dict[str, bytes] = {"stdout": b"", "stderr": b""}
    last: Any = None
    for values, data in local.stream([sys.executable, "-c", script]):
        last = values
        if values["event"] in seen:
            seen[values["event"]] += data
    assert seen == {"stdout": b"o" * 300000, "stderr": b"\xff\x00"}
    assert last == {"event": "exit", "rc": 5}


def test_stream_close_ends_the_command(local: Session, alive: Any, wait_until: Any) -> None:
    stream = local.stream(["sh", "-c", "echo $$; exec sleep 60"])
    event = stream.get(10.0)
    assert event is not None
    pid = int(event[1])
    assert alive(pid)
    assert stream.get(0.05) is None and not stream.ended
    stream.close()
    stream.close()
    assert stream.ended and stream.get(0.1) is None
    wait_until(lambda: not alive(pid))


def test_a_slow_reader_holds_the_command_back_not_the_session(local: Session) -> None:
    stream = local.stream(["head", "-c", str(40 << 20), "/dev/zero"])
    first = stream.get(10.0)
    assert first is not None
    assert local.run(["echo", "free"]).text == "free\n"
    assert stream._call.frames.qsize() * 65536 < 16 << 20
    total = len(first[1]) + sum(len(data) for _, data in stream)
    assert total == 40 << 20


def test_stream_deadline(local: Session) -> None:
    stream = local.stream(["sleep", "60"], deadline=0.3)
    with pytest.raises(DeadlineError):
        list(stream)
    assert stream.ended


def test_stream_of_a_missing_command(local: Session) -> None:
    events = [values for values, _ in local.stream(["no-such-command-here"])]
    assert events == [{"event": "stderr"}, {"event": "exit", "rc": 127}]


# -------------------------------------------------------------------------------------------------- files


def test_read_file(local: Session, tmp_path: Path) -> None:
    assert local.read_file(f"{tmp_path}/none") is None
    (tmp_path / "big").write_bytes(b"x" * 1001)
    with pytest.raises(RemoteError, match="larger than 1000 bytes"):
        local.read_file(f"{tmp_path}/big", max_bytes=1000)
    assert local.read_file(f"{tmp_path}/big", max_bytes=1001) == b"x" * 1001
    with pytest.raises(RemoteError, match="not a regular file") as caught:
        local.read_file(str(tmp_path))
    assert caught.value.hint.endswith(f" ls -ld {tmp_path}")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RemoteError, match="not a regular file"):
        local.read_file(f"{tmp_path}/pipe")
    assert b"MemTotal" in (local.read_file("/proc/meminfo") or b"")


def test_write_file_only_when_different(local: Session, tmp_path: Path) -> None:
    path = tmp_path / "deep/er/unit"
    assert local.write_file(str(path), b"one", mode=0o640) is True
    inode = path.stat().st_ino
    assert local.write_file(str(path), b"one", mode=0o640) is False
    assert path.stat().st_ino == inode
    assert local.write_file(str(path), b"one", mode=0o600) is True
    assert path.stat().st_mode & 0o777 == 0o600
    assert local.write_file(str(path), b"two", mode=0o600) is True
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["unit"]
    with pytest.raises(RemoteError, match="is a directory"):
        local.write_file(str(path.parent), b"")


def test_write_file_replaces_a_link_and_leaves_its_target(local: Session, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"keep")
    (tmp_path / "link").symlink_to("other")
    assert local.write_file(f"{tmp_path}/link", b"new") is True
    assert (tmp_path / "other").read_bytes() == b"keep"
    assert not (tmp_path / "link").is_symlink()


def test_append_line(local: Session, tmp_path: Path) -> None:
    path = tmp_path / "h/history.jsonl"
    local.append_line(str(path), "one")
    local.append_line(str(path), "zw\u00f6lf")
    path.write_bytes(path.read_bytes() + b"torn")
    local.append_line(str(path), "three")
    assert path.read_text().splitlines() == ["one", "zw\u00f6lf", "torn", "three"]
    with pytest.raises(RemoteError, match="line break"):
        local.append_line(str(path), "a\nb")


def test_swap_link(local: Session, tmp_path: Path) -> None:
    link = tmp_path / "s/current"
    assert local.swap_link(str(link), "../releases/a") is None
    assert local.swap_link(str(link), "../releases/b") == "../releases/a"
    assert local.swap_link(str(link), "../releases/b") == "../releases/b"
    assert os.readlink(link) == "../releases/b"  # noqa: PTH115
    assert len(list(link.parent.iterdir())) == 1
    (tmp_path / "file").write_text("x")
    with pytest.raises(RemoteError, match="not a symbolic link"):
        local.swap_link(f"{tmp_path}/file", "x")
    assert (tmp_path / "file").read_text() == "x"


def test_hash_tree_agrees_with_scan_tree(local: Session, tree: Any) -> None:
    tree.write("pkg/__pycache__/a.pyc", b"left out")
    assert local.hash_tree(str(tree.root)) == list(scan_tree(tree.root))
    assert local.hash_tree(f"{tree.root}/none") is None


def test_list_dir_and_disk(local: Session, tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"12345")
    (tmp_path / "a").mkdir()
    (tmp_path / "c").symlink_to("b")
    entries = local.list_dir(str(tmp_path))
    assert entries is not None
    assert [(e.name, e.kind, e.target) for e in entries] == [
        ("a", "dir", None),
        ("b", "file", None),
        ("c", "link", "b"),
    ]
    assert entries[1].size == 5
    assert local.list_dir(f"{tmp_path}/none") is None
    disk = local.disk(f"{tmp_path}/not/yet/there")
    assert disk.path == str(tmp_path)
    assert 0 < disk.free_bytes <= disk.total_bytes


def test_remove_tree_stays_below(local: Session, tmp_path: Path) -> None:
    releases = tmp_path / "releases"
    inner = releases / "a/b"
    inner.mkdir(parents=True)
    (inner / "f").write_text("x")
    inner.chmod(0o555)
    (releases / "a").chmod(0o555)
    (tmp_path / "precious").mkdir()
    (releases / "out").symlink_to(tmp_path / "precious")
    for path in (
        str(releases),
        f"{releases}/../precious",
        f"{releases}/out/x/..",
        "/",
        str(tmp_path),
        "releases/a",
    ):
        with pytest.raises(RemoteError, match="nothing was removed"):
            local.remove_tree(path, below=str(releases))
    with pytest.raises(RemoteError, match="nothing was removed"):
        local.remove_tree(f"{releases}/out/inside", below=str(releases))
    with pytest.raises(RemoteError, match="nothing was removed"):
        local.remove_tree("/etc", below="/")
    local.remove_tree(f"{releases}/out", below=str(releases))
    assert (tmp_path / "precious").is_dir()
    local.remove_tree(f"{releases}/a", below=str(releases))
    local.remove_tree(f"{releases}/a", below=str(releases))
    assert list(releases.iterdir()) == []


# --------------------------------------------------------------------------------- locks, ends, losses


def test_lock_has_one_holder(local: Session, tmp_path: Path, wait_until: Any) -> None:
    path = f"{tmp_path}/svc/lock"
    with connect_local("second") as other:
        assert local.acquire_lock(path, {"who": "first"}) is None
        holder = other.acquire_lock(path, {"who": "second"})
        assert holder is not None
        assert holder["who"] == "first"
        assert holder["since"] > 1e9
        assert holder["agent_pid"] == local.facts["pid"]
        local.release_lock(path)
        assert other.acquire_lock(path, {"who": "second"}) is None
    assert local.acquire_lock(path, {"who": "third"}) is None


def test_lock_is_not_inherited_by_commands(tmp_path: Path) -> None:
    path = f"{tmp_path}/lock"
    with connect_local() as first:
        assert first.acquire_lock(path, {}) is None
        first.run(["sh", "-c", "setsid sleep 3 >/dev/null 2>&1 &"])
    with connect_local() as second:
        assert second.acquire_lock(path, {}) is None


def test_lock_is_freed_when_the_client_is_killed(local: Session, tmp_path: Path, wait_until: Any) -> None:
    path = f"{tmp_path}/lock"
    script = (
        "import sys,time\nfrom ddtree_ops.remote import connect_local\n"
        "s = connect_local(); print(s.acquire_lock(sys.argv[1], {'who': 'doomed'}), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"None\n"
        assert (local.acquire_lock(path, {}) or {})["who"] == "doomed"
        client.kill()
    wait_until(lambda: local.acquire_lock(path, {}) is None)


def test_close_ends_agent_and_commands(alive: Any, wait_until: Any) -> None:
    session = connect_local()
    event = session.stream(["sh", "-c", "echo $$; trap '' TERM; sleep 60 & wait"]).get(10.0)
    assert event is not None
    child = int(event[1])
    session.close()
    session.close()
    assert not alive(session.facts["pid"])
    wait_until(lambda: not alive(child))
    with pytest.raises(UnreachableError, match="session is closed"):
        session.request("ping")


def test_death_of_the_agent_is_told_to_requests_under_way(own: Session) -> None:
    stream = own.stream(["sleep", "60"])
    os.kill(own.facts["pid"], signal.SIGKILL)
    with pytest.raises(UnreachableError, match="closed by the host"):
        list(stream)
    with pytest.raises(UnreachableError) as caught:
        own.run(["true"])
    assert "during run" in str(caught.value) and caught.value.hint


def test_client_gives_up_on_an_agent_that_hangs(own: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "GRACE", 0.1)
    os.kill(own.facts["pid"], signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match=r"no answer from the host within 0\.2 s"):
            own.request("ping", deadline=0.2)
    finally:
        os.kill(own.facts["pid"], signal.SIGCONT)
    assert own.request("ping").values


def test_silence_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "BEAT", 0.05)
    monkeypatch.setattr(session_module, "SILENCE", 0.3)
    with connect_local() as session, pytest.raises(UnreachableError, match="no sign of life"):
        session.run(["sleep", "60"])


def test_agent_leaves_when_the_client_falls_silent() -> None:
    source = agent_source().partition(b"\n")[2]
    source = source.replace(b"SILENCE = 120.0", b"SILENCE = 0.2").replace(b"BEAT = 10.0", b"BEAT = 0.05")
    transport = PipeTransport()
    transport.send(b"%d\n" % len(source) + source)
    while transport.recv():
        pass
    assert transport._process.wait(120) == 0
    transport.close()
    transport.release()


def test_a_process_that_is_no_agent() -> None:
    class Wrong(PipeTransport):
        def __init__(self) -> None:
            super().__init__("/bin/false")

    with pytest.raises(RemoteError, match="did not start"):
        Session(Wrong(), host="local", start=agent_source())


# -------------------------------------------------------------------------------------- pure: frames, texts


def feed(*pieces: bytes) -> FrameReader:
    parts = iter(pieces)
    return FrameReader(lambda: next(parts, b""))


def test_frames_survive_any_cutting() -> None:
    stream = (
        b"noise \0 noise" + MARKER + encode({"id": 1}, b"data") + encode({"id": 2, "text": "\udcff\u2713"})
    )
    reader = feed(*(stream[at : at + 1] for at in range(len(stream))))
    assert reader.skip_to_marker() == b"noise \0 noise"
    assert reader.read() == ({"id": 1}, b"data")
    assert reader.read() == ({"id": 2, "text": "\udcff\u2713"}, b"")
    assert reader.read() is None


def test_broken_frames() -> None:
    with pytest.raises(ProtocolError, match="Welcome"):
        feed(b"Welcome\n").skip_to_marker()
    with pytest.raises(ProtocolError, match="head of"):
        feed(b"HTTP/1.1 400 Bad Request\r\n").read()
    with pytest.raises(ProtocolError, match="not JSON"):
        feed(b"\0\0\0\3\0\0\0\0nop").read()
    assert feed(encode({"id": 1}, b"data")[:-1]).read() is None


@pytest.mark.parametrize(
    ("stderr", "status", "kind", "text"),
    [
        ("sudo: a password is required\n", 1, "SudoError", "may not become root"),
        ("sudo: sorry, you must have a tty to run sudo", 1, "SudoError", "may not become root"),
        (
            "ann is not in the sudoers file.  This incident will be reported. sudo:",
            1,
            "SudoError",
            "may not become root",
        ),
        ("env: 'sudo': No such file or directory", 127, "SudoError", "sudo is not installed"),
        ("env: 'python3': No such file or directory", 127, "RemoteError", "python3 was not found"),
        ("ddtree-ops: Python 3.8 or newer is needed, this is 3.6", 1, "RemoteError", "python3 is too old"),
        ("This account is currently not available.", 1, "RemoteError", "did not start (exit status 1)"),
        ("", None, "RemoteError", "did not start (the connection closed)"),
    ],
)
def test_explain_start(stderr: str, status: int | None, kind: str, text: str) -> None:
    error = session_module.explain_start("", stderr, status, host="box")
    assert type(error).__name__ == kind
    assert text in str(error)
    assert error.hint and error.host == "box"
    assert error.details == tuple(stderr.strip().splitlines())


def test_a_stream_that_the_garbage_collector_closes_waits_for_no_lock(
    own: Session, wait_until: Callable[..., None], alive: Callable[[int], bool]
) -> None:
    """It may come while the same thread registers a request or sends a frame."""
    stream = own.stream(["sh", "-c", "echo $$; exec sleep 600"])
    values, data = next(iter(stream))
    assert values["event"] == "stdout"

    def in_the_middle() -> None:
        with own._guard, own._sending:
            stream.close()

    thread = threading.Thread(target=in_the_middle, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    wait_until(lambda: not alive(int(data)))
    assert own.run(["true"]).rc == 0


def test_a_dead_host_is_noticed_while_a_cancel_waits_for_what_is_being_sent(
    own: Session, wait_until: Callable[..., None]
) -> None:
    stream = own.stream(["sleep", "600"])
    with own._sending:
        stream.close()
        own._pace, own._heard = 0.05, float("-inf")
        wait_until(own._closed.is_set)
    with pytest.raises(UnreachableError, match="no sign of life"):
        own.run(["true"])


def test_a_cancel_that_waits_while_the_session_closes_is_not_sent(own: Session) -> None:
    stream = own.stream(["sleep", "600"])
    failed: list[object] = []
    before, threading.excepthook = threading.excepthook, lambda args: failed.append(args.exc_value)
    try:
        with own._sending:
            stream.close()
            closing = threading.Thread(target=own.close)
            closing.start()
            own._closed.wait()
        closing.join(120.0)
        own._teller.join(120.0)
    finally:
        threading.excepthook = before
    assert not (closing.is_alive() or own._teller.is_alive() or failed)


def test_who_waits_for_an_answer_is_woken_when_the_session_closes_before_the_connection_is(
    own: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that hangs takes seconds to close, and an agent that is busy does not answer."""
    woken = threading.Event()
    seen: list[bool] = []

    def wait() -> None:
        with pytest.raises(UnreachableError, match="the session is closed"):
            own.run(["sleep", "60"])
        woken.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not own._calls:
        time.sleep(0.01)
    really = own._transport.close
    monkeypatch.setattr(own._transport, "close", lambda: (seen.append(woken.wait(10)), really()))
    own.close()
    waiting.join()
    assert seen == [True]


def test_a_closed_pipe_is_an_error_of_the_connection() -> None:
    transport = PipeTransport()
    transport.close()
    with pytest.raises(BrokenPipeError):
        transport.send(b"late")
    transport.release()
