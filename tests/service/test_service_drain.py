"""What a server that drains waits for: requests that run, or ids that it leaked."""

from __future__ import annotations

import pytest

from ddtree_ops.service.ending import Drain, Ending, EndingKind
from ddtree_ops.service.journal import parse_entries

STOP = "SIGTERM received. signum=None frame=None. Draining requests and shutting down..."
DECODE = "[2026-11-29 18:00:00 TP0] Decode batch, #running-req: 1, #token: 194, gen throughput (token/s): 39.88, #queue-req: 0"


def left(number: int, *rids: str) -> str:
    return f"Gracefully exiting... Remaining number of requests {number}. Remaining requests remaining_rids={list(rids)}."


def fed(*lines: str) -> Drain:
    drain = Drain()
    for line in lines:
        drain.feed(line)
    return drain


def test_a_leak_is_told_after_three_looks_without_a_batch() -> None:
    assert not fed(STOP, left(1, "x"), left(1, "x")).leaking
    drain = fed(STOP, *[left(1, "x")] * 3)
    assert drain.leaking and not drain.working and drain.rids == ("x",)
    assert "1 request (x) remains and none runs" in drain.describe()
    assert "2 requests (x, y) remain and none runs" in fed(*[left(2, "x", "y")] * 3).describe()


def test_a_request_that_runs_is_no_leak() -> None:
    drain = fed(STOP, *[left(1, "x"), DECODE] * 5, left(1, "x"))
    assert drain.working and not drain.leaking and drain.batches == 5
    assert drain.describe() == "draining: 1 request still running"


def test_a_leak_beside_a_request_that_ends() -> None:
    lines = [left(2, "x", "y"), DECODE, left(2, "x", "y"), DECODE, left(1, "x"), left(1, "x")]
    assert not fed(*lines).leaking
    assert fed(*lines, left(1, "x")).leaking


def test_requests_that_come_and_go_are_no_leak() -> None:
    assert not fed(left(1, "x"), left(1, "y"), left(1, "z")).leaking


def test_words_before_it_has_spoken_and_at_the_end() -> None:
    assert "not said" in fed(STOP).describe()
    assert fed(left(0)).describe() == "drained: no request remains"
    assert fed("Gracefully exiting... Remaining number of requests 3.").remaining == 3
    assert fed("Gracefully exiting... Remaining number of requests 1. remaining_rids=[oops]").rids == ()


@pytest.mark.parametrize(
    ("lines", "leaked", "words"),
    [
        ([left(1, "x")] * 4, True, "and none was running"),
        ([left(1, "x"), DECODE] * 4, False, "they were running: a longer health.stop_timeout"),
        ([left(1, "x")], None, "may well be a leaked one"),
    ],
)
def test_the_ending_says_which_of_the_two_it_was(lines: list[str], leaked: bool | None, words: str) -> None:
    import json

    rows = [
        {
            "MESSAGE": "Stopping",
            "MESSAGE_ID": "de5b426a63be47a7b6ac3eaac82e2f6f",
            "UNIT": "x.service",
            "_PID": "1",
        }
    ]
    rows += [{"MESSAGE": line, "_SYSTEMD_UNIT": "x.service", "_PID": "5"} for line in lines]
    rows += [
        {
            "MESSAGE": "Failed",
            "MESSAGE_ID": "d9b373ed55a64feb8242e02dbe79a49c",
            "UNIT": "x.service",
            "UNIT_RESULT": "timeout",
            "_PID": "1",
        }
    ]
    data = b"\n".join(
        json.dumps({"__REALTIME_TIMESTAMP": "1795978690597153", "__CURSOR": str(n), **row}).encode()
        for n, row in enumerate(rows)
    )
    ending = Ending.of(parse_entries([data]))
    assert (ending.kind, ending.leaked) == (EndingKind.TIMED_OUT, leaked)
    assert words in ending.describe()
