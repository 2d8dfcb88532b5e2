"""The webhook, against a server on this machine: what is tried again, what is not, and that the address is never shown."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import ConfigError, ExitCode
from ddtree_ops.playbook.webhook import post, summary, webhook_url
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.runreport import RunReport, TargetReport
from ddtree_ops.secret import MASK, Secret, learn, redact

TOKEN = "T0KENT0KENT0KEN"


class Listener:
    """Answers with the statuses it was given, one after the other, the last one again and again; 0 hangs up."""

    def __init__(self) -> None:
        self.statuses = [200]
        self.body = ""
        self.got: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                outer.got.append({"path": self.path, "document": json.loads(self.rfile.read(length))})
                status = outer.statuses.pop(0) if len(outer.statuses) > 1 else outer.statuses[0]
                if not status:
                    self.connection.close()
                    return
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write((outer.body or self.path).encode())

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        self.url = Secret(f"http://127.0.0.1:{self.server.server_port}/hook/{TOKEN}")

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def _post(url: Secret, attempts: int = 4) -> Any:
    return post(url, {"id": "run-1"}, attempts=attempts, longest_wait=0.0, timeout=5.0)


@pytest.mark.parametrize(
    ("statuses", "attempts", "problem"),
    [
        ([200], 1, ""),
        ([204], 1, ""),
        ([503, 429, 200], 3, ""),
        ([0, 0, 200], 3, ""),
        ([500], 4, "HTTP 500 after 4 attempts"),
        ([404], 1, "HTTP 404 after 1 attempt"),
        ([400, 200], 1, "HTTP 400 after 1 attempt"),
        ([302, 200], 1, "HTTP 302 after 1 attempt"),
    ],
)
def test_what_is_tried_again(listener: Listener, statuses: list[int], attempts: int, problem: str) -> None:
    listener.statuses = statuses
    sent = _post(listener.url)
    assert (sent.attempts, len(listener.got)) == (attempts, attempts)
    assert sent.problem.partition(":")[0] == problem
    assert {one["document"]["id"] for one in listener.got} == {"run-1"}


def test_the_address_is_in_no_message(listener: Listener) -> None:
    listener.statuses = [500]
    sent = _post(listener.url, attempts=1)
    assert "HTTP 500" in sent.problem
    assert TOKEN not in sent.problem  # although the server says it back
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gone = _post(Secret(f"http://127.0.0.1:{nobody.getsockname()[1]}/hook/{TOKEN}"), attempts=2)
    assert gone.attempts == 2
    assert gone.problem.startswith("ConnectError after 2 attempts")
    assert TOKEN not in gone.problem


def test_where_the_address_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"https://chat.example/hooks/{TOKEN}?x=1"
    monkeypatch.setenv("HOOK", text + "\n")
    assert webhook_url() is None
    found = webhook_url(variable="HOOK")
    assert found is not None
    assert found.reveal() == text
    assert TOKEN not in f"{found} {found!r}"
    file = tmp_path / "hook"
    file.write_text(text)
    again = webhook_url(file=str(file))
    assert again is not None
    assert again.reveal() == text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "webhook: the variable HOOK is not set"),
        ("", "webhook: the variable HOOK holds no address"),
        ("ftp://example/abcdef", "webhook: the variable HOOK holds no address"),
        ("file:///etc/passwd", "webhook: the variable HOOK holds no address"),
        ("https://", "webhook: the variable HOOK holds no address"),
        ("https://a.example/x y", "webhook: the variable HOOK holds no address"),
        ("https://a.example:port/x", "webhook: the variable HOOK holds no address"),
        ("https://[::1/x", "webhook: the variable HOOK holds no address"),
    ],
)
def test_what_is_no_address(monkeypatch: pytest.MonkeyPatch, value: str | None, message: str) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    if value is not None:
        monkeypatch.setenv("HOOK", value)
    with pytest.raises(ConfigError) as caught:
        webhook_url(variable="HOOK")
    assert caught.value.message == message
    assert value in (None, "", "https://") or value not in caught.value.render()


def test_one_source_that_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both given"):
        webhook_url(variable="HOOK", file=str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        webhook_url(file=str(tmp_path / "none"))


def test_the_address_is_masked_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "only-seen-in-this-test-0421"
    monkeypatch.setenv("HOOK", f"https://chat.example/hooks/{token}")
    assert token in redact(f"the last word is {token}")
    webhook_url(variable="HOOK")
    assert token not in redact(f"the last word is {token}")


def test_no_name_tells_a_secret() -> None:
    secret = "name-with-secret-0815"
    learn(secret)
    check = CheckResult(f"check.{secret}", Verdict.FAIL, secret, host="h")
    target = TargetReport(f"h/{secret}", "h", secret, checks=(check,), errors=(f"h: {secret}",))
    report = RunReport(f"night-{secret}", f"id-{secret}", "x", inventory=secret, targets=(target,))
    said = json.dumps(summary(report, ExitCode.CHECK_FAILED))
    assert secret not in said
    assert f"check.{MASK}" in said
    assert f"h/{MASK}" in said
    assert f"night-{MASK}" in said


def test_what_is_said() -> None:
    secret = Secret("hook-secret-value")
    checks = (
        CheckResult("smoke", Verdict.PASS, "fine"),
        CheckResult("trend.ready", Verdict.INCONCLUSIVE, "not known"),
        CheckResult("garbage", Verdict.FAIL, "says !!!! with --api-key=abcdefgh1234"),
    )
    good = TargetReport("a", "a", "s", checks=checks[:1])
    bad = TargetReport("b", "b", "s", checks=checks)
    gone = TargetReport("c", "c", "s", errors=("c: connect: refused\n  next: ssh c",))
    report = RunReport(
        "nightly", "id-1", "2026-11-30T01:00:00+00:00", complete=True, targets=(good, bad, gone)
    )
    said = summary(report, ExitCode.UNREACHABLE)
    assert (said["verdict"], said["exit_code"], said["id"]) == ("fail", 4, "id-1")
    assert [one["verdict"] for one in said["targets"]] == ["pass", "fail", "fail"]
    assert [one["check"] for one in said["targets"][1]["not_passed"]] == ["garbage", "trend.ready"]
    assert said["targets"][2]["errors"] == ["c: connect: refused"]
    lines = said["text"].splitlines()
    assert lines[0] == "ddtree-ops nightly fail: 3 targets"
    assert lines[1] == "a pass"
    assert lines[2] == f"b fail: garbage: says !!!! with --api-key={MASK}"
    assert lines[3] == "  trend.ready: not known"
    assert lines[4:] == ["c fail: c: connect: refused"]
    assert secret.reveal() not in json.dumps(said)
    part = summary(RunReport("nightly", "id-2", "x", targets=(good,)), ExitCode.INTERRUPTED)
    assert part["verdict"] == "inconclusive"
    assert part["text"].startswith("ddtree-ops nightly inconclusive: 1 target, not complete")


def test_the_cause_of_a_crash_comes_before_what_came_of_it() -> None:
    cause = {"signatures": ["cuda-oom"]}
    checks = (
        CheckResult("drift.unit.other", Verdict.FAIL, "another unit"),
        CheckResult("acceptance", Verdict.INCONCLUSIVE, "no counts"),
        CheckResult("burst", Verdict.FAIL, "the connection broke"),
        CheckResult("steady", Verdict.FAIL, "another process"),
        CheckResult("signatures", Verdict.FAIL, "cuda-oom on 8 ranks: out of memory", facts=cause),
        CheckResult("journal", Verdict.FAIL, "cuda-oom on 8 ranks: out of memory", facts=cause),
        CheckResult("trend.failures", Verdict.FAIL, "new fatal failure"),
    )
    target = TargetReport("b", "b", "s", checks=checks)
    said = summary(RunReport("nightly", "id", "x", complete=True, targets=(target,)), ExitCode.CHECK_FAILED)
    assert said["text"].splitlines()[1:] == [
        "b fail: journal: cuda-oom on 8 ranks: out of memory",
        "  drift.unit.other: another unit",
        "  burst: the connection broke",
        "  steady: another process",
        "  2 more in the report",
    ]


def test_what_only_degrades_a_service_is_no_cause_of_a_failure() -> None:
    checks = (
        CheckResult("journal", Verdict.INCONCLUSIVE, "no graphs", facts={"signatures": ["no-graphs"]}),
        CheckResult("garbage", Verdict.FAIL, "!!!!"),
    )
    target = TargetReport("b", "b", "s", checks=checks)
    said = summary(RunReport("nightly", "id", "x", complete=True, targets=(target,)), ExitCode.CHECK_FAILED)
    assert said["text"].splitlines()[1:] == ["b fail: garbage: !!!!", "  journal: no graphs"]
