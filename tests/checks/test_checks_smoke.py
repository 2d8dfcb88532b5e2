"""The judgements of the smoke check, without a host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_ops.checks import smoke
from ddtree_ops.checks.engine import Chat, EngineError, Generation, ServerInfo
from ddtree_ops.checks.port import sort_holders
from ddtree_ops.checks.smoke import judge_completion
from ddtree_ops.checks.speculation import judge_graphs, judge_speculation, summarise_decode
from ddtree_ops.inventory.models import Health, Host, RuntimeSpec, Service, Speculative, Target
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.service.control import PortOwner
from ddtree_ops.service.state import UnitState

DECODE = (
    "[2026-11-29 14:15:53] Decode batch, #running-req: 1, #token: 86, token usage: 0.00, accept len: {length}, "
    "accept rate: 0.99, cuda graph: {graph}, gen throughput (token/s): 508.99, #queue-req: 0"
)
PREFILL = (
    "[2026-11-29 14:15:53] Prefill batch, #new-seq: 1, #new-token: 2, #cached-token: 0, cuda graph: False"
)


def service(**more: Any) -> Service:
    given = {
        "unit": "x.service",
        "runtime": "r",
        "venv": "/v",
        "model": "/m",
        "speculative": Speculative(budget=32),
    }
    return Service(**{**given, **more})


def chat(**more: Any) -> Chat:
    given = {
        "model": "tiny",
        "content": "Here is quicksort",
        "reasoning": None,
        "finish_reason": "length",
        "prompt_tokens": 14,
        "completion_tokens": 128,
        "seconds": 2.0,
    }
    return Chat(**{**given, **more})


def generation(steps: int | None, accepted: int | None, reported: float | None = None) -> Generation:
    return Generation("text", "length", 128, 1.0, steps, accepted, None, reported)


def info(**more: Any) -> ServerInfo:
    given = {
        "version": "0.5.11",
        "speculative_algorithm": "DDTREE",
        "avg_accept_length": None,
        "disable_cuda_graph": False,
        "attention_backend": "triton",
    }
    return ServerInfo(**{**given, **more})


NOTHING = summarise_decode([])


@pytest.mark.parametrize(
    ("more", "verdict", "text"),
    [
        ({}, Verdict.PASS, "128 tokens in 2.00 s, 64.0 tokens/s"),
        ({"finish_reason": "stop", "completion_tokens": 40}, Verdict.PASS, "40 tokens"),
        ({"finish_reason": "stop", "completion_tokens": 128}, Verdict.PASS, "128 tokens"),
        ({"completion_tokens": 127}, Verdict.FAIL, "127 tokens came with finish_reason length"),
        ({"completion_tokens": 129}, Verdict.FAIL, "129 tokens came with finish_reason length"),
        ({"finish_reason": "stop", "completion_tokens": 130}, Verdict.FAIL, "at most 128"),
        ({"finish_reason": "abort", "completion_tokens": 3}, Verdict.FAIL, "abort"),
        ({"finish_reason": "stop", "completion_tokens": 1}, Verdict.INCONCLUSIVE, "no decode step"),
        ({"finish_reason": "stop", "completion_tokens": 0}, Verdict.INCONCLUSIVE, "no decode step"),
    ],
)
def test_completion(more: dict[str, Any], verdict: Verdict, text: str) -> None:
    result = judge_completion(chat(**more), max_tokens=128, host="box")
    assert result.verdict is verdict
    assert text in result.summary
    assert result.evidence


def test_reasoning_is_text_too() -> None:
    assert chat(content=None, reasoning="Let me think").text == "Let me think"
    assert chat(content="Yes.", reasoning="Let me think").text == "Let me think\nYes."
    assert chat(content=None).text is None


@pytest.mark.parametrize(
    ("found", "verdict", "text"),
    [
        ({"generation": generation(40, 87)}, Verdict.PASS, "accept length 3.17 of at most 8"),
        ({"generation": generation(16, 112)}, Verdict.PASS, "accept length 8.00"),
        ({"generation": generation(2, 5, reported=4.0)}, Verdict.PASS, "accept length 3.50"),
        ({"generation": generation(None, None, reported=2.5)}, Verdict.PASS, "accept length 2.50"),
        ({"generation": generation(10, 71)}, Verdict.FAIL, "8.10 exceeds the block size 8"),
        ({"generation": generation(127, 0)}, Verdict.FAIL, "useless"),
        (
            {"generation": generation(127, 0), "average": 2.0},
            Verdict.INCONCLUSIVE,
            "elsewhere it was 2.00",
        ),
        ({"generation": generation(127, 5), "least": 1.5, "average": 2.0}, Verdict.FAIL, "below the 1.5"),
        ({"generation": generation(40, 40), "least": 3.0}, Verdict.FAIL, "2.00 is below the 3"),
        ({"generation": generation(40, 40), "least": 2.0}, Verdict.PASS, "accept length 2.00"),
        ({"lines": [DECODE.format(length="2.50", graph=True)]}, Verdict.PASS, "accept length 2.50"),
        ({"lines": [DECODE.format(length="9.00", graph=True)]}, Verdict.FAIL, "exceeds"),
        ({"lines": [DECODE.format(length="1.00", graph=True)]}, Verdict.FAIL, "useless"),
        ({"average": 3.0}, Verdict.PASS, "accept length 3.00"),
        ({"lines": [PREFILL]}, Verdict.INCONCLUSIVE, "no accept length"),
        ({"algorithm": None, "average": 3.0}, Verdict.FAIL, "runs without speculative decoding"),
    ],
)
def test_speculation(found: dict[str, Any], verdict: Verdict, text: str) -> None:
    result = judge_speculation(
        service(),
        generation=found.get("generation"),
        decode=summarise_decode(found.get("lines", [])),
        info=info(
            avg_accept_length=found.get("average"), speculative_algorithm=found.get("algorithm", "DDTREE")
        ),
        min_accept_length=found.get("least"),
        host="box",
    )
    assert result.verdict is verdict, result
    assert text in result.summary


def test_a_service_without_speculation_is_not_judged_for_it() -> None:
    result = judge_speculation(
        service(speculative=None),
        generation=generation(None, None),
        decode=NOTHING,
        info=info(speculative_algorithm=None),
        min_accept_length=None,
    )
    assert result.verdict is Verdict.SKIPPED


@pytest.mark.parametrize(
    ("lines", "settings", "server", "verdict", "text"),
    [
        ([DECODE.format(length=2, graph=True)] * 2, {}, info(), Verdict.PASS, "in all decode lines"),
        (
            [DECODE.format(length=2, graph=True), DECODE.format(length=2, graph=False)],
            {},
            info(),
            Verdict.PASS,
            "in 1 of 2",
        ),
        ([DECODE.format(length=2, graph=False)] * 3, {}, info(), Verdict.FAIL, "all of 3"),
        ([DECODE.format(length=2, graph=False)], {}, None, Verdict.FAIL, "all of 1"),
        ([PREFILL], {}, info(), Verdict.INCONCLUSIVE, "no decode line"),
        (
            [DECODE.format(length=2, graph=False)],
            {"args": {"disable-cuda-graph": True}},
            info(disable_cuda_graph=True),
            Verdict.SKIPPED,
            "as configured",
        ),
        (
            [DECODE.format(length=2, graph=False)],
            {},
            info(disable_cuda_graph=True),
            Verdict.SKIPPED,
            "the server itself",
        ),
    ],
)
def test_graphs(
    lines: list[str], settings: dict[str, Any], server: ServerInfo | None, verdict: Verdict, text: str
) -> None:
    result = judge_graphs(service(**settings), decode=summarise_decode(lines), info=server, host="box")
    assert result.verdict is verdict
    assert text in result.summary


def owner(pid: int, unit: str) -> PortOwner:
    return PortOwner(pid, "python", unit, "127.0.0.1", 0)


def test_the_port_must_be_the_units_alone() -> None:
    assert sort_holders([owner(7, "x.service")], 30001, "x.service").owned
    both = sort_holders([owner(7, "x.service"), owner(9, "y.service")], 30001, "x.service")
    assert not both.owned
    assert "also held by" in both.describe()
    assert "y.service" in both.describe()
    nobody = sort_holders([], 30001, "x.service")
    assert not nobody.owned
    assert nobody.describe() == "nothing listens on port 30001"


@pytest.mark.parametrize(
    ("judged", "asked", "least"),
    [(True, None, 1.5), (False, None, None), (False, 2.0, 2.0), (True, 2.0, 2.0)],
)
def test_speculation_is_judged_by_the_rules_of_the_service(
    monkeypatch: pytest.MonkeyPatch, judged: bool, asked: float | None, least: float | None
) -> None:
    """Without ``judge_speculation`` it need not gain, and the floor of the inventory does not hold."""
    state = UnitState.parse(
        {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "MainPID": "7"}
        | {"InvocationID": "a" * 32, "NRestarts": "0"}
    )
    control = SimpleNamespace(state=lambda: state, cursor=lambda: None, entries=lambda **given: ())
    given: dict[str, Any] = {}

    class Silent:
        """An engine that answers no request; the unit holds."""

        def __init__(self, *given: Any) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *given: object) -> None: ...

        def models(self) -> None:
            raise EngineError("busy", kind="status", status=503)

    def judge(*these: Any, **more: Any) -> CheckResult:
        given.update(more)
        return CheckResult("smoke.speculation", Verdict.PASS, "")

    monkeypatch.setattr(smoke, "UnitControl", lambda session, unit: control)
    monkeypatch.setattr(smoke, "EngineClient", Silent)
    monkeypatch.setattr(smoke, "hold_unit", lambda *given: (None, state, 1))
    monkeypatch.setattr(smoke, "prepare", lambda: None)
    monkeypatch.setattr(smoke, "port_holders", lambda *given: sort_holders((), "x.service", "system.slice"))
    monkeypatch.setattr(smoke, "_finish", lambda *given: None)
    monkeypatch.setattr(smoke, "judge_speculation", judge)
    health = Health(min_accept_length=1.5, judge_speculation=judged)
    target = Target(host=Host(name="h"), service=service(health=health), runtime=RuntimeSpec(name="r"))
    smoke.run_smoke(None, target, report=lambda event: None, min_accept_length=asked)  # type: ignore[arg-type]
    assert (given["must_gain"], given["min_accept_length"]) == (judged, least)
