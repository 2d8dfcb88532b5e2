"""What the engine client understands of streams, loads and flushes: recorded answers of sglang 0.5.11."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from ddtree_ops.checks.engine import EngineClient, EngineError, Load, join_stream, sse_events
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Session

Recorded = Callable[[dict[str, tuple[int, bytes]]], AbstractContextManager[Target]]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("pieces", "events"),
    [
        ([b"data: {}\n\ndata: [DONE]\n\n"], ["{}", "[DONE]"]),
        ([b"da", b"ta: {", b"}\n", b"\ndata: x"], ["{}", "x"]),
        ([b"data:a\r\n\r\n: comment\n\nevent: e\ndata: b\ndata: c\n\n"], ["a", "b\nc"]),
        (["data: a\u2028b\x85c é\n\n".encode()], ["a\u2028b\x85c é"]),
        ([b"data: \xc3", b"\xa9\n\n"], ["é"]),
        ([], []),
    ],
)
def test_events_of_a_stream(pieces: list[bytes], events: list[str]) -> None:
    assert list(sse_events(pieces)) == events


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 14, "completion_tokens": 3}}


def test_a_stream_is_joined() -> None:
    events = [
        (0.1, chunk({"role": "assistant", "content": "", "reasoning_content": None})),
        (0.2, chunk({"reasoning_content": "Hm."})),
        (0.3, chunk({"content": "you"})),
        (0.4, chunk({"content": " two"})),
        (0.5, chunk({"reasoning_content": None}, "length")),
        (0.6, USAGE),
        (0.7, "[DONE]"),
    ]
    found = join_stream(events)
    assert found.deltas == ("Hm.", "you", " two")
    assert (found.content, found.reasoning, found.text) == ("you two", "Hm.", "Hm.\nyou two")
    assert (found.finish_reason, found.prompt_tokens, found.completion_tokens) == ("length", 14, 3)
    assert (found.first_s, found.seconds, found.done) == (0.2, 0.7, True)


def test_a_stream_that_breaks_off_is_not_done() -> None:
    found = join_stream([(0.1, chunk({"content": "a"}))])
    assert (found.done, found.finish_reason, found.completion_tokens) == (False, None, None)


def sse(*events: Any) -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return b"".join(b"data: " + text.encode() + b"\n\n" for text in texts)


def stream(session: Session, target: Target) -> Any:
    with EngineClient(session, target) as engine:
        return engine.stream_chat("m", "hi", max_tokens=3, timeout=5)


def test_a_stream_over_the_session(recorded: Recorded, local_session: Session) -> None:
    with recorded({CHAT: (200, sse(chunk({"content": "a"}), chunk({}, "stop"), USAGE, "[DONE]"))}) as target:
        found = stream(local_session, target)
    assert (found.text, found.finish_reason, found.completion_tokens, found.done) == ("a", "stop", 3, True)


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, b'{"object":"error","message":"too long","code":400}', "status", "400: too long"),
        (200, sse({"error": {"message": "died", "code": 500}}), "status", "an error within the stream: died"),
        (200, sse("nonsense"), "shape", "an event is not JSON"),
        (200, sse({"id": "x"}), "shape", "has no choices"),
        (0, b"", "disconnect", "connection broke"),
    ],
)
def test_a_stream_that_fails(
    recorded: Recorded, local_session: Session, status: int, body: bytes, kind: str, words: str
) -> None:
    with recorded({CHAT: (status, body)}) as target, pytest.raises(EngineError) as caught:
        stream(local_session, target)
    assert (caught.value.kind, words in caught.value.message) == (kind, True), caught.value.message


LOADS = (
    b'[{"dp_rank":0,"num_reqs":3,"num_waiting_reqs":1,"num_tokens":40,"num_pending_tokens":7,"ts_tic":1.0}]'
)
METRICS = (
    b'# TYPE sglang:num_used_tokens gauge\nsglang:num_used_tokens{engine_type="unified",tp_rank="0"} 4.0\n'
    b'sglang:num_used_tokens{engine_type="unified",tp_rank="1"} 2.0\nsglang:gen_throughput 1.5e1\n'
)


def test_load_metrics_and_flush(recorded: Recorded, local_session: Session) -> None:
    answers = {
        "/get_load": (200, LOADS),
        "/metrics": (200, METRICS),
        "/flush_cache": (200, b"Cache flushed.\nMore.\n"),
    }
    with recorded(answers) as target, EngineClient(local_session, target) as engine:
        assert engine.load() == Load(running=2, waiting=1, used_tokens=40)
        assert engine.metrics() == {"num_used_tokens": 6.0, "gen_throughput": 15.0}
        assert engine.flush_cache() == "Cache flushed.\nMore."


def test_what_a_server_does_not_have(recorded: Recorded, local_session: Session) -> None:
    answers = {"/flush_cache": (400, b"Flush cache failed.\n")}
    with recorded(answers) as target, EngineClient(local_session, target) as engine:
        assert engine.load() is None
        assert engine.metrics() is None
        with pytest.raises(EngineError, match="400: Flush cache failed"):
            engine.flush_cache()


def test_counts_of_a_generation(recorded: Recorded, local_session: Session) -> None:
    meta = {
        "finish_reason": {"type": "length", "length": 8},
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "cached_tokens": 2,
        "spec_verify_ct": 2,
        "spec_accepted_drafts": 5,
        "spec_proposed_drafts": 6,
        "spec_accept_histogram": [0, 0, 1, 1],
    }
    body = json.dumps({"text": "the", "output_ids": [318] * 8, "meta_info": meta}).encode()
    with recorded({"/generate": (200, body)}) as target, EngineClient(local_session, target) as engine:
        found = engine.generate([1, 2, 3], max_tokens=8, timeout=5, return_logprob=False)
    assert (found.cached_tokens, found.prompt_tokens, found.histogram) == (2, 3, (0, 0, 1, 1))
    assert (found.output_ids, found.accept_length) == ((318,) * 8, 3.5)
