"""The HTTP client against recorded answers of the real server and against a running lab engine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.checks.engine import EngineClient, EngineError, base_url, redact_values
from ddtree_ops.errors import UnreachableError
from ddtree_ops.inventory.models import Host, RuntimeSpec, SecretSource, Service, Speculative, Target
from ddtree_ops.remote.session import Session
from ddtree_ops.secret import MASK, Secret

DATA = Path(__file__).parents[1] / "data"


def body(name: str, folder: str = "responses") -> bytes:
    return (DATA / folder / f"{name}.json").read_bytes()


def target(**more: Any) -> Target:
    host = {key: more.pop(key) for key in ("http", "address") if key in more}
    service = Service(
        **{"unit": "x.service", "runtime": "r", "venv": "/v", "model": "/m", "port": 30001, **more}
    )
    return Target(host=Host(name="box", **host), service=service, runtime=RuntimeSpec())


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:30001"),
        ({"bind": "0.0.0.0"}, "http://127.0.0.1:30001"),
        ({"bind": "::"}, "http://[::1]:30001"),
        ({"bind": "127.0.0.11"}, "http://127.0.0.11:30001"),
        ({"http": "direct"}, "http://box:30001"),
        ({"http": "direct", "address": "127.0.0.9"}, "http://127.0.0.9:30001"),
    ],
)
def test_base_url(settings: dict[str, Any], url: str) -> None:
    assert base_url(target(**settings)) == url


def test_recorded_answers(recorded: Callable[..., Any], local_session: Session) -> None:
    answers = {
        "/v1/models": (200, body("v1_models")),
        "/v1/chat/completions": (200, body("chat", "responses_dflash")),
        "/generate": (200, body("generate", "responses_dflash")),
        "/server_info": (200, body("server_info_with_avg", "responses_dflash")),
        "/health": (503, b""),
    }
    with recorded(answers) as where, EngineClient(local_session, where) as engine:
        (model,) = engine.models()
        assert (model.name, model.max_model_len) == ("tiny", 512)
        chat = engine.chat("tiny", "hi", max_tokens=24, timeout=120)
        assert (chat.completion_tokens, chat.finish_reason, chat.prompt_tokens) == (24, "length", 14)
        assert chat.text == "the" * 24
        generation = engine.generate("hi", max_tokens=8, timeout=120)
        assert (generation.verify_steps, generation.accepted_drafts) == (2, 5)
        assert generation.accept_length == 3.5
        assert generation.reported_accept_length == 4.0
        info = engine.server_info()
        assert info.speculative_algorithm == "DFLASH"
        assert info.disable_cuda_graph is True
        assert info.avg_accept_length is not None
        assert engine.health() == 503


def test_a_server_without_speculation_has_no_counts(
    recorded: Callable[..., Any], local_session: Session
) -> None:
    plain = {"text": "x", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 1}}
    answers = {
        "/generate": (200, json.dumps(plain).encode()),
        "/server_info": (200, body("server_info", "responses_dflash")),
    }
    with recorded(answers) as where, EngineClient(local_session, where) as engine:
        assert engine.generate("hi", max_tokens=8, timeout=120).accept_length is None
        assert engine.server_info().avg_accept_length is None


@pytest.mark.parametrize(
    ("status", "answer", "kind", "text"),
    [
        (400, body("chat_bad_temperature"), "status", "temperature must be non-negative"),
        (400, body("generate_bad"), "status", "."),
        (401, b'{"error":"Unauthorized"}', "status", "401"),
        (500, b"Internal Server Error", "status", "Internal Server Error"),
        (200, b"<html>", "shape", "not JSON"),
        (200, b"{}", "shape", "without choices"),
        (0, b"", "disconnect", "broke"),
    ],
)
def test_what_is_no_completion_is_an_error(
    recorded: Callable[..., Any], local_session: Session, status: int, answer: bytes, kind: str, text: str
) -> None:
    with (
        recorded({"/v1/chat/completions": (status, answer)}) as where,
        EngineClient(local_session, where) as engine,
        pytest.raises(EngineError, match=text) as caught,
    ):
        engine.chat("tiny", "hi", max_tokens=8, timeout=120)
    assert caught.value.kind == kind
    assert caught.value.status == (status if kind == "status" else None)
    assert caught.value.host == "recorded"


def test_nothing_listens(local_session: Session) -> None:
    with EngineClient(
        local_session, target().model_copy(update={"service": target(port=1).service})
    ) as engine:
        assert engine.health() is None
        with pytest.raises(EngineError) as caught:
            engine.models()
    assert caught.value.kind == "refused"


def test_no_answer_in_time(local_session: Session) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        EngineClient(local_session, target(port=silent.getsockname()[1])) as engine,
        pytest.raises(EngineError) as caught,
    ):
        engine.server_info(timeout=0.2)
    assert caught.value.kind == "timeout"


def test_the_tunnel_needs_a_session() -> None:
    with pytest.raises(UnreachableError):
        EngineClient(None, target())


def test_direct_requests_need_none(recorded: Callable[..., Any]) -> None:
    with recorded({"/v1/models": (200, body("v1_models"))}) as where:
        host = where.host.model_copy(update={"http": "direct", "address": "127.0.0.1"})
        with EngineClient(None, where.model_copy(update={"host": host})) as engine:
            assert engine.models()[0].name == "tiny"


def test_the_api_key_is_masked_wherever_the_server_shows_it(
    recorded: Callable[..., Any], local_session: Session
) -> None:
    shown = json.loads(body("server_info_with_avg", "responses_dflash"))
    shown["api_key"] = shown["internal_states"][0]["api_key"] = "sk-very-secret"
    shown["note"] = "started with sk-very-secret"
    answers = {
        "/server_info": (200, json.dumps(shown).encode()),
        "/v1/models": (418, b'{"message":"sk-very-secret?"}'),
    }
    with recorded(answers) as where, EngineClient(local_session, where, Secret("sk-very-secret")) as engine:
        info = engine.server_info()
        with pytest.raises(EngineError) as caught:
            engine.models()
    assert "sk-very-secret" not in json.dumps(info.raw)
    assert info.raw["api_key"] == info.raw["internal_states"][0]["api_key"] == MASK
    assert "sk-very-secret" not in caught.value.render()


def test_redaction_keeps_what_is_no_secret() -> None:
    given = {
        "api_key": None,
        "max_total_num_tokens": 4096,
        "nested": [{"hf_token": "abc", "tokenizer_path": "/t"}],
    }
    assert redact_values(given) == {
        "api_key": None,
        "max_total_num_tokens": 4096,
        "nested": [{"hf_token": MASK, "tokenizer_path": "/t"}],
    }


def test_a_running_engine(start_engine: Callable[..., Any], local_session: Session) -> None:
    engine = start_engine()
    with EngineClient(local_session, engine.target) as client:
        (model,) = client.models()
        assert model.name == engine.target.service.model
        chat = client.chat(model.name, "Write quicksort in Python with comments.", max_tokens=64, timeout=120)
        assert (chat.completion_tokens, chat.finish_reason) == (64, "length")
        assert "quicksort" in (chat.text or "")
        generation = client.generate("Write quicksort in Python with comments.", max_tokens=64, timeout=120)
        assert generation.completion_tokens == 64
        assert 1.0 < (generation.accept_length or 0.0) <= 8.0
        assert client.server_info().speculative_algorithm == "DDTREE"


def test_an_engine_that_dies_under_a_request_is_a_disconnect(
    start_engine: Callable[..., Any], local_session: Session
) -> None:
    engine = start_engine(tree="stock")
    with EngineClient(local_session, engine.target) as client:
        with pytest.raises(EngineError) as caught:
            client.chat("any", "Write quicksort in Python with comments.", max_tokens=64, timeout=120)
        assert caught.value.kind == "disconnect"
        engine.process.wait(120)
        assert client.health() is None
    assert any("size of tensor a (8) must match the size of tensor b (33)" in line for line in engine.lines)


def test_the_key_opens_a_guarded_engine(start_engine: Callable[..., Any], local_session: Session) -> None:
    engine = start_engine(flags=("--api-key", "sk-lab"), speculative=Speculative(algorithm="DFLASH"))
    with EngineClient(local_session, engine.target) as locked, pytest.raises(EngineError) as caught:
        locked.models()
    assert caught.value.status == 401
    assert "none is known here" in caught.value.message
    assert "secrets: {api_key: {env: NAME_OF_A_VARIABLE}}" in caught.value.hint
    sourced = SecretSource(env="LAB_KEY")
    service = engine.target.service.model_copy(update={"secrets": {"api_key": sourced}})
    target = engine.target.model_copy(update={"service": service})
    with (
        EngineClient(local_session, target, Secret("sk-wrong")) as mistaken,
        pytest.raises(EngineError) as caught,
    ):
        mistaken.models()
    assert "the API key, taken from env LAB_KEY, is not the one" in caught.value.message
    assert "ddtree-ops deploy" in caught.value.hint and "sk-wrong" not in caught.value.render()
    with EngineClient(local_session, engine.target, Secret("sk-lab")) as client:
        assert client.models()
        assert "sk-lab" not in json.dumps(client.server_info().raw)


def test_requests_of_several_threads(start_engine: Callable[..., Any], local_session: Session) -> None:
    engine = start_engine()
    counts: list[int] = []
    with EngineClient(local_session, engine.target) as client:

        def ask(number: int) -> None:
            counts.append(
                client.chat("m", f"Tell me about {number}", max_tokens=16, timeout=120).completion_tokens
            )

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts == [16, 16, 16, 16]
