"""Our own load generator against a server that answers well, badly, half or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ddtree_ops.checks.bench.load_host import load

USAGE = {"choices": [], "usage": {"completion_tokens": 7}}
DONE = b"data: [DONE]\n\n"


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def text(**delta: Any) -> bytes:
    return event({"choices": [{"delta": delta}]})


STREAMS = {
    "good": [text(role="assistant", content=""), text(content="a b"), text(content=" c"), event(USAGE), DONE],
    "thinks": [text(reasoning_content="hm", content=None), event(USAGE), DONE],
    "uncounted": [text(content="a"), DONE],
    "broken": [text(content="a")],
    "silent": [text(content=""), event(USAGE), DONE],
    "refused": [event({"error": {"message": "no room"}}), DONE],
    "garbage": [b"data: {not json\n\n"],
    "other line ends": [
        b'data: {"choices": [{"delta": {"content": "a\xe2\x80\xa8b\xc2\x85c"}}]}\r\n\r\n',
        event(USAGE),
        DONE,
    ],
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server: Any = self.server
        kind = body["messages"][0]["content"]
        server.seen.append((kind, body, self.headers.get("authorization")))
        with server.lock:
            server.now += 1
            server.most = max(server.most, server.now)
        if kind == "together":
            server.barrier.wait(20)
        status = 503 if kind == "busy" else 200
        self.send_response(status)
        self.end_headers()
        for piece in [b'{"error": "later"}'] if status == 503 else STREAMS.get(kind, STREAMS["good"]):
            self.wfile.write(piece)
        with server.lock:
            server.now -= 1

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.seen, made.lock, made.now, made.most, made.barrier = [], threading.Lock(), 0, 0, threading.Barrier(3)
    thread = threading.Thread(target=made.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def loaded(server: Any, *prompts: str, concurrency: int = 1, key: str = "") -> list[dict[str, Any]]:
    given = {"host": "127.0.0.1", "port": server.server_address[1], "model": "m", "max_tokens": 9}
    found = load({**given, "prompts": prompts, "concurrency": concurrency, "timeout": 20.0, "api_key": key})
    assert found["seconds"] > 0
    samples: list[dict[str, Any]] = found["samples"]
    return samples


@pytest.mark.parametrize(
    ("kind", "tokens", "error"),
    [
        ("good", 7, ""),
        ("thinks", 7, ""),
        ("uncounted", None, ""),
        ("broken", None, "the stream broke off"),
        ("silent", 7, "an answer without any text"),
        ("refused", None, "no room"),
        ("garbage", None, "JSONDecodeError"),
        ("other line ends", 7, ""),
        ("busy", None, '503: {"error": "later"}'),
    ],
)
def test_every_way_to_answer(server, kind, tokens, error):
    (sample,) = loaded(server, kind)
    assert sample["tokens"] == tokens
    assert error in sample["error"] and bool(error) == bool(sample["error"])
    if not error:
        assert 0 < sample["ttft"] <= sample["latency"]


def test_nobody_listens():
    given = {"host": "127.0.0.1", "port": 1, "model": "m", "max_tokens": 9, "timeout": 5.0, "concurrency": 2}
    assert [each["error"] for each in load({**given, "prompts": ["a"]})["samples"]] == [
        "ConnectionRefusedError: [Errno 111] Connection refused"
    ]


def test_samples_are_in_the_order_of_the_prompts_and_so_many_run_at_once(server):
    server.most = 0
    samples = loaded(server, "together", "together", "together", "busy", "good", concurrency=3)
    assert server.most == 3
    assert [bool(each["error"]) for each in samples] == [False, False, False, True, False]


def test_what_is_asked_for(server):
    loaded(server, "good", key="k3y")
    _, body, authorization = server.seen[-1]
    assert authorization == "Bearer k3y"
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("m", 9, 0, True)
    assert body["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in body
