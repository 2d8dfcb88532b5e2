"""The engine's HTTP interface as typed calls: through the host's session, or directly where the inventory says so.

What sglang 0.5.11 answers and what it does not: an unknown model name is answered with 200, ``/server_info`` shows the
api key in clear, a hung scheduler answers ``/v1/models`` and nothing else. So every call has a time-out, the served name
is read first, and what leaves this module is redacted.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    "Model",
    "ServerInfo",
    "base_url",
    "redact_values",
]

FailureKind = Literal["refused", "disconnect", "timeout", "status", "shape"]
_SECRET_KEY = re.compile(
    r"(?i)(api_?key|password|secret|authorization|(access|auth|bearer|hf|hub|refresh)_?token)$"
)
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
    """

    model: str
    content: str | None
    reasoning: str | None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float

    @property
    def text(self) -> str | None:
        """All text the model made, or None where there is none."""
        parts = [part for part in (self.reasoning, self.content) if part]
        return "\n".join(parts) if parts else self.content


@dataclass(frozen=True)
class Generation:
    """Answer of ``POST /generate``; the speculative figures are None where the server runs without speculation.

    :param accept_length: accepted tokens a verify step, the verified token included (1.0: every draft was rejected).
    """

    text: str
    finish_reason: str
    completion_tokens: int
    seconds: float
    verify_steps: int | None = None
    accepted_drafts: int | None = None
    proposed_drafts: int | None = None
    reported_accept_length: float | None = None

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
        what = f"{method} {path}"
        limits = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        try:
            return self._client.request(method, path, json=body, timeout=limits)
        except httpx.ConnectTimeout as error:
            raise self._error(
                f"{what}: no connection to {self.url} within {limits.connect:g} s", "refused"
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
                f"{method} {path}: {response.status_code}: {_message(response)}",
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
            models = tuple(Model(str(item["id"]), item.get("max_model_len")) for item in body["data"])
        except (KeyError, TypeError, AttributeError) as error:
            raise self._error("GET /v1/models: not a list of models", "shape") from error
        if not models:
            raise self._error("GET /v1/models: the list is empty", "shape")
        return models

    def chat(self, model: str, prompt: str, *, max_tokens: int, timeout: float) -> Chat:
        """One user message at temperature 0, not streamed.

        :raises EngineError: no answer, an error status, or an answer without choices or usage.
        """
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": False,
        }
        begun = time.monotonic()
        answer = self._json("POST", "/v1/chat/completions", timeout=timeout, body=body)
        seconds = time.monotonic() - begun
        try:
            choice, usage = answer["choices"][0], answer["usage"]
            return Chat(
                model=str(answer["model"]),
                content=choice["message"].get("content"),
                reasoning=choice["message"].get("reasoning_content"),
                finish_reason=str(choice["finish_reason"]),
                prompt_tokens=int(usage["prompt_tokens"]),
                completion_tokens=int(usage["completion_tokens"]),
                seconds=seconds,
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self._error(
                "POST /v1/chat/completions: 200, but without choices or usage", "shape"
            ) from error

    def generate(
        self, prompt: str, *, max_tokens: int, timeout: float, ignore_eos: bool = False
    ) -> Generation:
        """``POST /generate`` at temperature 0: the only answer that carries the speculative counts of one request.

        :raises EngineError: no answer, an error status, or an answer of another shape.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": ignore_eos}
        begun = time.monotonic()
        answer = self._json(
            "POST", "/generate", timeout=timeout, body={"text": prompt, "sampling_params": sampling}
        )
        seconds = time.monotonic() - begun
        try:
            meta = answer["meta_info"]
            reason = meta["finish_reason"]
            return Generation(
                text=str(answer["text"]),
                finish_reason=str(reason["type"] if isinstance(reason, Mapping) else reason),
                completion_tokens=int(meta["completion_tokens"]),
                seconds=seconds,
                verify_steps=meta.get("spec_verify_ct"),
                accepted_drafts=meta.get("spec_accepted_drafts"),
                proposed_drafts=meta.get("spec_proposed_drafts"),
                reported_accept_length=meta.get("spec_accept_length"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._error("POST /generate: 200, but without meta_info", "shape") from error

    def server_info(self, *, timeout: float = 15.0) -> ServerInfo:
        """``GET /server_info``, redacted: the server shows its api key in clear.

        :raises EngineError: no answer (a hung scheduler does not answer here), or one of another shape.
        """
        body = self._json("GET", "/server_info", timeout=timeout)
        if not isinstance(body, dict):
            raise self._error("GET /server_info: not an object", "shape")
        states = body.get("internal_states") or [{}]
        state = states[0] if isinstance(states, list) and isinstance(states[0], dict) else {}
        length = state.get("avg_spec_accept_length")
        return ServerInfo(
            version=str(body.get("version", "")),
            speculative_algorithm=body.get("speculative_algorithm"),
            avg_accept_length=float(length) if isinstance(length, int | float) else None,
            disable_cuda_graph=body.get("disable_cuda_graph"),
            attention_backend=body.get("attention_backend"),
            raw=redact_values(body, *((self._key.reveal(),) if self._key else ())),
        )


def _message(response: httpx.Response) -> str:
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
