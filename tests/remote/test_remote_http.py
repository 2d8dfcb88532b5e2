"""httpx over a session: the agent asks a real HTTP server."""

from __future__ import annotations

import gzip
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from ddtree_ops.errors import UnreachableError
from ddtree_ops.remote import Session, connect_local

LARGE = bytes(range(256)) * 4096 * 12


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gate = threading.Event()
    gone = threading.Event()

    def log_message(self, format: str, *args: Any) -> None:
        return

    def answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def do_GET(self) -> None:
        if self.path == "/large":
            self.answer(LARGE)
        elif self.path == "/gzip":
            self.answer(gzip.compress(b"packed" * 100), Content_Encoding="gzip")
        elif self.path == "/slow":
            self.gate.wait(120)
            self.answer(b"late")
        elif self.path == "/stream":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.chunk(b"data: one\n\n")
            self.gate.wait(120)
            self.chunk(b"data: two\n\n")
            self.chunk(b"")
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(65536))
            except OSError:
                self.gone.set()
            self.close_connection = True
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"only this")
            self.close_connection = True
        elif self.path == "/garbage":
            self.wfile.write(b"\0\1\2\3 not http\r\n\r\n")
            self.close_connection = True
        elif self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/echo")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path.startswith("/echo"):
            self.answer(f"{self.path} {self.headers['Host']} {self.headers['X-Odd']}".encode())
        else:
            self.send_error(404, "Nothing Here")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(body[::-1], X_Length=str(len(body)))


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are part of these tests."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@pytest.fixture
def server() -> Iterator[str]:
    Handler.gate = threading.Event()
    Handler.gone = threading.Event()
    made = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    Handler.gate.set()
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def client(local: Session, server: str) -> Iterator[httpx.Client]:
    with httpx.Client(transport=local.http_transport(), base_url=server, timeout=120.0) as made:
        yield made


def test_requests(client: httpx.Client, local: Session) -> None:
    before = local.round_trips
    answer = client.get("/echo", params={"q": "a b&c'"}, headers={"X-Odd": "a: b"})
    assert answer.status_code == 200
    assert answer.text == f"{answer.request.url.raw_path.decode()} {answer.request.url.netloc.decode()} a: b"
    assert local.round_trips == before + 1
    missing = client.get("/none")
    assert (missing.status_code, missing.reason_phrase) == (404, "Nothing Here")
    posted = client.post("/", json={"k": "v"})
    assert posted.headers["x-length"] == str(len(posted.content))
    assert posted.content == posted.request.content[::-1]
    assert client.post("/", content=b"").headers["x-length"] == "0"
    assert client.post("/", content=iter([b"ab", b"cd"])).content == b"dcba"
    assert client.get("/gzip").text == "packed" * 100
    assert client.get("/moved", follow_redirects=True).text.startswith("/echo ")


def test_large_bodies_both_ways(client: httpx.Client) -> None:
    assert client.get("/large").content == LARGE
    assert client.post("/", content=LARGE).content == LARGE[::-1]


def test_a_stream_arrives_while_it_is_made(client: httpx.Client) -> None:
    with client.stream("GET", "/stream") as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: one\n\n"
        Handler.gate.set()
        assert b"".join(pieces) == b"data: two\n\n"


def test_closing_early_ends_the_request_on_the_host(client: httpx.Client) -> None:
    with client.stream("GET", "/endless") as answer:
        next(answer.iter_raw())
    assert Handler.gone.wait(120)
    assert client.get("/echo").status_code == 200


def test_read_timeout(client: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.get("/slow", timeout=httpx.Timeout(120.0, read=0.2))
    with (
        client.stream("GET", "/stream", timeout=httpx.Timeout(120.0, read=0.2)) as answer,
        pytest.raises(httpx.ReadTimeout),
    ):
        list(answer.iter_raw())


def test_no_timeout_at_all(client: httpx.Client) -> None:
    threading.Timer(0.2, Handler.gate.set).start()
    assert client.get("/slow", timeout=None).text == "late"


def test_refused(client: httpx.Client, server: str) -> None:
    with pytest.raises(httpx.ConnectError, match="refused"):
        client.get("http://127.0.0.1:1/")


def test_connect_timeout(client: httpx.Client) -> None:
    import socket

    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = [socket.socket() for _ in range(4)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        time.sleep(0.05)
        with pytest.raises(httpx.ConnectTimeout):
            client.get(
                f"http://127.0.0.1:{full.getsockname()[1]}/", timeout=httpx.Timeout(120.0, connect=0.3)
            )
        for one in held:
            one.close()


@pytest.mark.parametrize("path", ["/short", "/garbage"])
def test_broken_answers(client: httpx.Client, path: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        client.get(path)


def test_lost_session(server: str) -> None:
    session = connect_local()
    with httpx.Client(transport=session.http_transport(), base_url=server) as client:
        session.close()
        with pytest.raises(UnreachableError):
            client.get("/echo")
