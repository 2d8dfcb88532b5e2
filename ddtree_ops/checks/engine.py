"""The engine's HTTP interface as typed calls: through the host's session, or directly where the inventory says so.

What sglang 0.5.11 answers and what it does not: an unknown model name is answered with 200, ``/server_info`` shows the
api key in clear, a hung scheduler answers ``/v1/models`` and nothing else. So every call has a time-out, the served name
is read first, and what leaves this module is redacted.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from ddtree_ops.errors import CheckFailed, DeadlineError, RemoteError, UnreachableError
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Session
from ddtree_ops.secret import MASK, Secret, redact

__all__ = [
    "Chat",
    "EngineClient",
    "EngineError",
    "Generation",
    "Load",
    "Model",
    "ServerInfo",
    "Streamed",
    "base_url",
    "join_stream",
    "message_of",
    "redact_values",
    "sse_events",
]

FailureKind = Literal["refused", "disconnect", "timeout", "status", "shape"]
_SECRET_KEY = re.compile(
    r"(?i)(api_?key|password|secret|authorization|(access|auth|bearer|hf|hub|refresh)_?token)$"
)
_CHAT = "/v1/chat/completions"
_DONE = "[DONE]"
_METRIC = re.compile(r"^sglang:(\w+)(?:\{[^}]*\})? (\S+)$", re.M)
_MISSHAPEN = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading an answer of another shape raises."""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1", "localhost": "127.0.0.1"}


class EngineError(CheckFailed):
    """A request to the engine failed.

    :param kind: ``refused`` (nothing listens), ``disconnect`` (the connection broke while it was under way: the engine
        died), ``timeout``, ``status`` (an answer that is not 2xx), ``shape`` (2xx, but not what sglang answers).
    :param status: HTTP status for ``kind="status"``, else None.
    """

    def __init__(self, message: str, *, kind: FailureKind, status: int | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.kind = kind
        self.status = status


@dataclass(frozen=True)
class Model:
    """The served model: its name and its context length in tokens (None where the server does not say)."""

    name: str
    max_model_len: int | None = None


@dataclass(frozen=True)
class Chat:
    """Answer of ``POST /v1/chat/completions``. Tokens are counts, ``seconds`` is wall-clock on this machine.

    ``text`` is the reasoning and the content together; ``content`` is None where the server sent null.

    :param matched_stop: the stop string or token id that ended it; None where the length did.
    :param cached_tokens: of the prompt, where the server tells (``--enable-cache-report``), else None.
    :param tool_calls: as sglang sends them: ``{"function": {"name": ..., "arguments": "..."}}``.
    :param logprobs: of the choice, as sglang sends them; None where there are none.
    """

    model: str
    content: str | None
    reasoning: str | None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    matched_stop: str | int | None = None
    cached_tokens: int | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    logprobs: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def text(self) -> str | None:
        """All text the model made, or None where there is none."""
        parts = [part for part in (self.reasoning, self.content) if part]
        return "\n".join(parts) if parts else self.content


@dataclass(frozen=True)
class Streamed:
    """Answer of a streamed ``POST /v1/chat/completions``, see :func:`join_stream`. Times are seconds on this machine.

    :param deltas: the texts as they came, reasoning and content alike; one holds several tokens under speculation.
    :param first_s: from the request to the first text; None where none came.
    :param completion_tokens: of the usage that was asked for at the end; None where the server sent none.
    :param done: the stream ended with ``[DONE]``.
    """

    deltas: tuple[str, ...]
    content: str
    reasoning: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float
    first_s: float | None
    done: bool

    @property
    def text(self) -> str:
        """All text the model made, joined as :attr:`Chat.text` is."""
        return "\n".join(part for part in (self.reasoning, self.content) if part)


@dataclass(frozen=True)
class Load:
    """What the scheduler holds at this moment.

    :param used_tokens: KV slots that requests hold; what the radix cache could give away is not counted.
    """

    running: int
    waiting: int
    used_tokens: int


@dataclass(frozen=True)
class Generation:
    """Answer of ``POST /generate``; the speculative figures are None where the server runs without speculation.

    :param accept_length: accepted tokens a verify step, the verified token included (1.0: every draft was rejected).
    :param cached_tokens: of the prompt, taken from the prefix cache.
    :param histogram: verify steps by the number of drafts that they accepted, from 0; empty without speculation.
    :param output_ids: ids of the tokens that were made.
    :param meta: ``meta_info`` as it came: with ``return_logprob`` it holds ``output_token_logprobs`` and
        ``output_top_logprobs``.
    """

    text: str
    finish_reason: str
    completion_tokens: int
    seconds: float
    verify_steps: int | None = None
    accepted_drafts: int | None = None
    proposed_drafts: int | None = None
    reported_accept_length: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    histogram: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = field(default=(), repr=False)
    meta: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def accept_length(self) -> float | None:
        """(accepted drafts + 1 a verify step) / verify steps.

        The server's own ``spec_accept_length`` also counts the token that the prefill made, so it can exceed the
        block size on a short answer; it is used only where the counts are missing.
        """
        if self.verify_steps and self.accepted_drafts is not None:
            return (self.accepted_drafts + self.verify_steps) / self.verify_steps
        return self.reported_accept_length


@dataclass(frozen=True)
class ServerInfo:
    """What ``GET /server_info`` says that we use; ``raw`` is the whole answer with secrets masked."""

    version: str
    speculative_algorithm: str | None
    avg_accept_length: float | None
    disable_cuda_graph: bool | None
    attention_backend: str | None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


def redact_values(value: Any, *secrets: str) -> Any:
    """``value`` (JSON-like) with the values of secret-looking keys, and known secrets anywhere, masked."""
    if isinstance(value, Mapping):
        return {
            key: MASK
            if _SECRET_KEY.search(str(key)) and isinstance(item, str) and item
            else redact_values(item, *secrets)
            for key, item in value.items()
        }
    if isinstance(value, str):
        return redact(value, *secrets)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [redact_values(item, *secrets) for item in value]
    return value


def _whole(value: Any) -> int:
    """A count. :raises ValueError: no integer, or a negative one: JSON as Python reads it knows NaN and Infinity too."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def _whole_or_none(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _finite_or_none(value: Any) -> float | None:
    """A number. :raises ValueError: something else, or NaN or an infinity."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is no number")
    return float(value)


def _text_or_none(value: Any) -> str | None:
    """A text. :raises ValueError: something else."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is no text")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    """An object. :raises ValueError: something else."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{str(value)[:40]!r} is no object")
    return value


def sse_events(pieces: Iterable[bytes]) -> Iterator[str]:
    """The data of server-sent events, from the pieces of a body, cut anywhere. Pure.

    Only LF and CRLF end a line: ``str.splitlines`` would cut at U+0085 and U+2028, which stand unescaped in sglang's JSON.
    """
    data: list[str] = []
    rest = b""
    for piece in chain(pieces, (b"\n\n",)):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r").decode("utf-8", "replace")
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and data:
                yield "\n".join(data)
                data = []


def join_stream(events: Iterable[tuple[float, Any]]) -> Streamed:
    """Put the events of a streamed chat together, each with the seconds after which it came. Pure.

    :raises KeyError, TypeError, ValueError, AttributeError: an event of another shape.
    """
    content, reasoning, deltas = "", "", []
    finish: str | None = None
    usage: Mapping[str, Any] = {}
    at, first, done = 0.0, None, False
    for at, event in events:
        if event == _DONE:
            done = True
            break
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            said = _text_or_none(delta.get("content")) or ""
            thought = _text_or_none(delta.get("reasoning_content")) or ""
            content, reasoning = content + said, reasoning + thought
            if said or thought:
                deltas.append(thought + said)
                first = at if first is None else first
            finish = choice.get("finish_reason") or finish
    return Streamed(
        tuple(deltas),
        content,
        reasoning,
        finish,
        _whole_or_none(usage.get("prompt_tokens")),
        _whole_or_none(usage.get("completion_tokens")),
        at,
        first,
        done,
    )


def _chat_body(
    model: str, prompt: str | Sequence[Mapping[str, Any]], max_tokens: int, more: Mapping[str, Any]
) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": False,
        **more,
    }


def base_url(target: Target) -> str:
    """URL of the engine as seen from where requests are made: the host itself, or this machine (``http: direct``)."""
    service, host = target.service, target.host
    if host.http == "direct":
        name = host.address or host.name
    else:
        name = _LOOPBACK.get(service.bind, service.bind)
    if ":" in name and not name.startswith("["):
        name = f"[{name}]"
    return f"http://{name}:{service.port}"


class EngineClient:
    """Talks to one engine. Use as a context manager. Thread-safe as far as :class:`httpx.Client` is.

    :param session: the host's session; may be None only where ``host.http`` is ``direct``.
    :param api_key: sent as a bearer token in the request header and nowhere else.
    """

    def __init__(self, session: Session | None, target: Target, api_key: Secret | None = None) -> None:
        direct = target.host.http == "direct"
        if session is None and not direct:
            raise UnreachableError(
                "the engine is reached through the host's session, and there is none", host=target.host.name
            )
        self.url = base_url(target)
        self._host = target.host.name
        self._service = target.service
        self._key = api_key
        transport = None if direct or session is None else session.http_transport()
        self._client = httpx.Client(
            base_url=self.url,
            transport=transport,
            trust_env=False,
            verify=False,  # the engine speaks plain HTTP: else all certificates are read, at every client
            headers={"Authorization": f"Bearer {api_key.reveal()}"} if api_key else {},
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _error(
        self, message: str, kind: FailureKind, status: int | None = None, hint: str = ""
    ) -> EngineError:
        secrets = (self._key.reveal(),) if self._key else ()
        return EngineError(redact(message, *secrets), kind=kind, status=status, host=self._host, hint=hint)

    def _unauthorized(self, what: str) -> EngineError:
        if self._key is None:
            return self._error(
                f"{what}: 401 Unauthorized: the engine was started with an API key, and none is known here",
                "status",
                401,
                hint=f"add to service {self._service.name} of the inventory: "
                "secrets: {api_key: {env: NAME_OF_A_VARIABLE}}",
            )
        source = self._service.secrets.get("api_key")
        whence = f", taken from {source}," if source is not None else ""
        return self._error(
            f"{what}: 401 Unauthorized: the API key{whence} is not the one that the engine was started with",
            "status",
            401,
            hint=f"correct the source of secrets.api_key, or give the engine this key: ddtree-ops deploy {self._host}",
        )

    def send(
        self, method: str, path: str, *, timeout: float, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        """One request; any HTTP status is an answer.

        :param timeout: seconds to connect and for every read.
        :raises EngineError: refused, disconnect or timeout.
        """
        limits = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        with self._told(f"{method} {path}", timeout):
            return self._client.request(method, path, json=body, timeout=limits)

    @contextlib.contextmanager
    def _told(self, what: str, timeout: float) -> Iterator[None]:
        """Failures of a request as :class:`EngineError`."""
        try:
            yield
        except httpx.ConnectTimeout as error:
            raise self._error(
                f"{what}: no connection to {self.url} within {min(timeout, 10.0):g} s", "refused"
            ) from error
        except (httpx.TimeoutException, DeadlineError) as error:
            raise self._error(f"{what}: no answer within {timeout:g} s", "timeout") from error
        except httpx.ConnectError as error:
            raise self._error(f"{what}: nothing answers at {self.url}: {error}", "refused") from error
        except httpx.TransportError as error:
            raise self._error(
                f"{what}: the connection broke while the request was under way: {error}", "disconnect"
            ) from error
        except (UnreachableError, EngineError):
            raise
        except RemoteError as error:
            raise self._error(
                f"{what}: the host could not make the request: {error.message}", "refused"
            ) from error

    def _json(self, method: str, path: str, *, timeout: float, body: Mapping[str, Any] | None = None) -> Any:
        response = self.send(method, path, timeout=timeout, body=body)
        if response.status_code == 401:
            raise self._unauthorized(f"{method} {path}")
        if not response.is_success:
            raise self._error(
                f"{method} {path}: {response.status_code}: {message_of(response)}",
                "status",
                response.status_code,
            )
        try:
            return response.json()
        except ValueError as error:
            raise self._error(
                f"{method} {path}: 200, but not JSON: {response.text[:80]!r}", "shape"
            ) from error

    def health(self, *, timeout: float = 25.0) -> int | None:
        """Status of ``GET /health`` (200, or 503 while warming up, hung or draining); None: nothing listens.

        It makes the server generate one token and takes a second or more; poll sparingly.
        :raises EngineError: timeout or disconnect.
        """
        try:
            return self.send("GET", "/health", timeout=timeout).status_code
        except EngineError as error:
            if error.kind == "refused":
                return None
            raise

    def models(self, *, timeout: float = 10.0) -> tuple[Model, ...]:
        """What ``GET /v1/models`` lists: a static card, never a sign of readiness.

        :raises EngineError: no answer, or none that lists a model.
        """
        body = self._json("GET", "/v1/models", timeout=timeout)
        try:
            models = tuple(
                Model(str(item["id"]), _whole_or_none(item.get("max_model_len"))) for item in body["data"]
            )
        except _MISSHAPEN as error:
            raise self._error("GET /v1/models: not a list of models", "shape") from error
        if not models:
            raise self._error("GET /v1/models: the list is empty", "shape")
        return models

    def chat(
        self,
        model: str,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        timeout: float,
        **more: Any,
    ) -> Chat:
        """A chat at temperature 0, not streamed.

        :param prompt: one user message, or all messages as the API has them.
        :param more: further fields of the body: ``stop``, ``tools``, ``response_format``, ``logprobs``, ``ignore_eos`` ...
        :raises EngineError: no answer, an error status, or an answer without choices or usage.
        """
        begun = time.monotonic()
        body = _chat_body(model, prompt, max_tokens, more)
        answer = self._json("POST", _CHAT, timeout=timeout, body=body)
        seconds = time.monotonic() - begun
        try:
            choice, usage = answer["choices"][0], answer["usage"]
            message, cached = choice["message"], usage.get("prompt_tokens_details")
            return Chat(
                model=str(answer["model"]),
                content=_text_or_none(message.get("content")),
                reasoning=_text_or_none(message.get("reasoning_content")),
                finish_reason=str(choice["finish_reason"]),
                prompt_tokens=_whole(usage["prompt_tokens"]),
                completion_tokens=_whole(usage["completion_tokens"]),
                seconds=seconds,
                matched_stop=choice.get("matched_stop"),
                cached_tokens=None if cached is None else _whole(cached["cached_tokens"]),
                tool_calls=tuple(_mapping(each) for each in message.get("tool_calls") or ()),
                logprobs=None if (told := choice.get("logprobs")) is None else _mapping(told),
            )
        except _MISSHAPEN as error:
            raise self._error(
                f"POST {_CHAT}: 200, but without choices or usage as sglang sends them: {error}", "shape"
            ) from error

    def stream_chat(
        self,
        model: str,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        timeout: float,
        **more: Any,
    ) -> Streamed:
        """The same as :meth:`chat`, streamed, with the usage at the end.

        :param timeout: seconds for every read, and twice as long for the whole.
        :raises EngineError: no answer, an error status, an error within the stream, a stream that does not end.
        """
        begun = time.monotonic()
        body = {"stream_options": {"include_usage": True}, **_chat_body(model, prompt, max_tokens, more)}
        with contextlib.closing(self._events(_CHAT, body, timeout)) as events:
            return self._join(events, begun)

    def _join(self, events: Iterable[Any], begun: float) -> Streamed:
        try:
            return join_stream((time.monotonic() - begun, event) for event in events)
        except _MISSHAPEN as error:
            raise self._error(
                f"POST {_CHAT}: an event of the stream has no choices as sglang sends them: {error}", "shape"
            ) from error

    def break_off(self, model: str, prompt: str, *, max_tokens: int, timeout: float) -> Streamed:
        """Begin a streamed chat and hang up after the first text: what came until then.

        It asks for ``max_tokens`` whatever the model says (``ignore_eos``), so that it runs when it is broken off.
        :raises EngineError: as :meth:`stream_chat`.
        """
        begun = time.monotonic()
        body = _chat_body(model, prompt, max_tokens, {"ignore_eos": True})
        taken: list[Any] = []
        with contextlib.closing(self._events(_CHAT, body, timeout)) as events:
            for event in events:
                taken.append(event)
                if self._join(taken, begun).deltas:
                    break
            return self._join(taken, begun)

    def _events(self, path: str, body: Mapping[str, Any], timeout: float) -> Generator[Any, None, None]:
        """The events of a streamed request, parsed; the last is ``[DONE]`` where the server sends it."""
        what, until = f"POST {path} (stream)", time.monotonic() + 2 * timeout
        limits = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        with (
            self._told(what, timeout),
            self._client.stream("POST", path, json={**body, "stream": True}, timeout=limits) as response,
        ):
            if response.status_code == 401:
                raise self._unauthorized(f"POST {path}")
            if not response.is_success:
                response.read()
                raise self._error(
                    f"{what}: {response.status_code}: {message_of(response)}", "status", response.status_code
                )
            for data in sse_events(response.iter_bytes()):
                if time.monotonic() > until:
                    raise self._error(f"{what}: not at its end within {2 * timeout:g} s", "timeout")
                if data == _DONE:
                    yield data
                    return
                try:
                    event = json.loads(data)
                except ValueError as error:
                    raise self._error(f"{what}: an event is not JSON: {data[:80]!r}", "shape") from error
                if isinstance(event, Mapping) and "error" in event:
                    inner = event["error"]
                    code = inner.get("code") if isinstance(inner, Mapping) else None
                    text = inner.get("message", inner) if isinstance(inner, Mapping) else inner
                    status = code if isinstance(code, int) else None
                    raise self._error(f"{what}: an error within the stream: {text}", "status", status)
                yield event

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        timeout: float,
        ignore_eos: bool = False,
        sampling: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Generation:
        """``POST /generate`` at temperature 0: the only answer that carries the speculative counts of one request.

        :param prompt: a text, or the ids of its tokens; no chat template is applied.
        :param sampling: further sampling parameters (``stop`` ...).
        :param more: further fields of the body (``return_logprob``, ``top_logprobs_num``, ``logprob_start_len`` ...).
        :raises EngineError: no answer, an error status, or an answer of another shape.
        """
        given: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": ignore_eos}
        asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        begun = time.monotonic()
        body = {**asked, "sampling_params": {**given, **(sampling or {})}, **more}
        answer = self._json("POST", "/generate", timeout=timeout, body=body)
        seconds = time.monotonic() - begun
        try:
            meta = _mapping(answer["meta_info"])
            reason = meta["finish_reason"]
            text = answer["text"]
            if not isinstance(text, str):
                raise ValueError(f"{str(text)[:40]!r} is no text")
            return Generation(
                text=text,
                finish_reason=str(reason["type"] if isinstance(reason, Mapping) else reason),
                completion_tokens=_whole(meta["completion_tokens"]),
                seconds=seconds,
                verify_steps=_whole_or_none(meta.get("spec_verify_ct")),
                accepted_drafts=_whole_or_none(meta.get("spec_accepted_drafts")),
                proposed_drafts=_whole_or_none(meta.get("spec_proposed_drafts")),
                reported_accept_length=_finite_or_none(meta.get("spec_accept_length")),
                prompt_tokens=_whole(meta.get("prompt_tokens") or 0),
                cached_tokens=_whole(meta.get("cached_tokens") or 0),
                histogram=tuple(_whole(each) for each in meta.get("spec_accept_histogram") or ()),
                output_ids=tuple(_whole(each) for each in answer.get("output_ids") or ()),
                meta=meta,
            )
        except _MISSHAPEN as error:
            raise self._error(
                f"POST /generate: 200, but without meta_info as sglang sends it: {error}", "shape"
            ) from error

    def flush_cache(self, *, timeout: float = 30.0) -> str:
        """``POST /flush_cache``: empty the prefix cache. What the server said.

        :raises EngineError: refused: requests are running or waiting (status 400), or the admin key is another one.
        """
        response = self.send("POST", "/flush_cache", timeout=timeout)
        if response.status_code == 401:
            raise self._unauthorized("POST /flush_cache")
        if not response.is_success:
            raise self._error(
                f"POST /flush_cache: {response.status_code}: {message_of(response)}",
                "status",
                response.status_code,
            )
        return response.text.strip()

    def metrics(self, *, timeout: float = 10.0) -> dict[str, float] | None:
        """``GET /metrics``: the value of every metric, summed over its labels, by name without ``sglang:``.

        None where the server runs without ``--enable-metrics``. Gauges are those of the last log line, not of now.
        :raises EngineError: no answer.
        """
        response = self.send("GET", "/metrics", timeout=timeout)
        if not response.is_success:
            return None
        found: dict[str, float] = {}
        for match in _METRIC.finditer(response.text):
            with contextlib.suppress(ValueError):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def load(self, *, timeout: float = 15.0) -> Load | None:
        """``GET /get_load``: what runs and waits now; None where the server has no such endpoint.

        (``/v1/loads``, which is to replace it, answered 500 on a CPU, and wrote a traceback into the log each time.)
        :raises EngineError: no answer (a hung scheduler does not answer here), or one of another shape.
        """
        response = self.send("GET", "/get_load", timeout=timeout)
        if response.status_code == 404:
            return None
        if response.status_code == 401:
            raise self._unauthorized("GET /get_load")
        if not response.is_success:
            raise self._error(
                f"GET /get_load: {response.status_code}: {message_of(response)}",
                "status",
                response.status_code,
            )
        try:
            loads = response.json()
            if not isinstance(loads, list) or not loads:
                raise ValueError(f"{str(loads)[:40]!r} lists no rank")
            ranks = [
                (_whole(rank["num_reqs"]), _whole(rank["num_waiting_reqs"]), _whole(rank["num_tokens"]))
                for rank in loads
            ]
        except _MISSHAPEN as error:
            raise self._error(
                f"GET /get_load: {response.status_code}, but no list of loads: {error}", "shape"
            ) from error
        waiting = sum(rank[1] for rank in ranks)
        return Load(sum(rank[0] for rank in ranks) - waiting, waiting, sum(rank[2] for rank in ranks))

    def server_info(self, *, timeout: float = 15.0) -> ServerInfo:
        """``GET /server_info``, redacted: the server shows its api key in clear.

        :raises EngineError: no answer (a hung scheduler does not answer here), or one of another shape.
        """
        body = self._json("GET", "/server_info", timeout=timeout)
        if not isinstance(body, dict):
            raise self._error("GET /server_info: not an object", "shape")
        states = body.get("internal_states") or [{}]
        state = states[0] if isinstance(states, list) and isinstance(states[0], dict) else {}
        length, algorithm = state.get("avg_spec_accept_length"), body.get("speculative_algorithm")
        average: float | None = None
        with contextlib.suppress(ValueError, OverflowError):
            average = _finite_or_none(length)
        if algorithm is not None and not isinstance(algorithm, str):
            raise self._error("GET /server_info: speculative_algorithm is no text", "shape")
        return ServerInfo(
            version=str(body.get("version", "")),
            speculative_algorithm=algorithm,
            avg_accept_length=average,
            disable_cuda_graph=body.get("disable_cuda_graph"),
            attention_backend=body.get("attention_backend"),
            raw=redact_values(body, *((self._key.reveal(),) if self._key else ())),
        )


def message_of(response: httpx.Response) -> str:
    """The error text of an answer, whichever of sglang's shapes it has."""
    try:
        body: Any = response.json()
    except (ValueError, json.JSONDecodeError):
        return response.text[:200].strip() or response.reason_phrase
    if isinstance(body, Mapping):
        inner = body.get("error")
        for found in (
            body.get("message"),
            inner.get("message") if isinstance(inner, Mapping) else inner,
            body.get("detail"),
        ):
            if found:
                return str(found)[:500]
    return str(body)[:200]
