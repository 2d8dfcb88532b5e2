"""HTTP as seen from the host: an httpx transport whose requests are made by the agent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx

from ddtree_ops.remote.session import AgentError

if TYPE_CHECKING:
    from ddtree_ops.remote.session import Session, Stream

__all__ = ["SessionTransport"]

_ERRORS: dict[str, type[httpx.TransportError]] = {
    "http_connect": httpx.ConnectError,
    "http_connect_timeout": httpx.ConnectTimeout,
    "http_read": httpx.ReadError,
    "http_read_timeout": httpx.ReadTimeout,
    "http_protocol": httpx.RemoteProtocolError,
}
_GRACE = 5.0


class _Events:
    """Events of one HTTP request; failures become httpx's exceptions."""

    def __init__(self, stream: Stream, request: httpx.Request, patience: float | None) -> None:
        self._stream = stream
        self._request = request
        self._patience = patience

    def next(self) -> tuple[Any, bytes] | None:
        wait = 3600.0 if self._patience is None else self._patience + _GRACE
        while True:
            try:
                event = self._stream.get(wait)
            except AgentError as error:
                kind = _ERRORS.get(error.code)
                if kind is None:
                    raise
                raise kind(error.message, request=self._request) from error
            if event is not None or self._stream.ended:
                return event
            if self._patience is not None:
                self._stream.close()
                raise httpx.ReadTimeout("no answer from the agent", request=self._request)

    def close(self) -> None:
        self._stream.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, events: _Events) -> None:
        self._events = events

    def __iter__(self) -> Iterator[bytes]:
        while (event := self._events.next()) is not None:
            yield event[1]

    def close(self) -> None:
        self._events.close()


class SessionTransport(httpx.BaseTransport):
    """Makes each request in the agent, on the host, over a connection of its own.

    The session stays open when the transport is closed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        limits = request.extensions.get("timeout", {})
        url = request.url
        args = {
            "scheme": url.scheme,
            "host": url.host,
            "port": url.port or (443 if url.scheme == "https" else 80),
            "method": request.method,
            "target": url.raw_path.decode("ascii"),
            "headers": [
                [name.decode("latin-1"), value.decode("latin-1")]
                for name, value in request.headers.raw
                if name.lower() not in (b"connection", b"transfer-encoding")
            ]
            + [["Connection", "close"]],
            "connect_timeout": limits.get("connect"),
            "read_timeout": limits.get("read"),
        }
        body = request.read()
        if body and "content-length" not in request.headers:
            args["headers"].append(["Content-Length", str(len(body))])
        patience = [limit for limit in (limits.get("connect"), limits.get("read")) if limit is not None]
        events = _Events(
            self._session._http(args, body),
            request,
            max(patience) if limits.get("read") is not None else None,
        )
        try:
            first = events.next()
        except BaseException:
            events.close()
            raise
        if first is None:
            raise httpx.RemoteProtocolError("the agent gave no response", request=request)
        head = first[0]
        return httpx.Response(
            head["status"],
            headers=[(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]],
            stream=_Body(events),
            extensions={
                "reason_phrase": head["reason"].encode("latin-1"),
                "http_version": b"HTTP/1.0" if head["version"] == 10 else b"HTTP/1.1",
            },
        )
