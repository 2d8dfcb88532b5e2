"""What the engine client understands of streams, loads and flushes: recorded answers of sglang 0.5.11."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_ops.checks.engine import (
    EngineClient,
    EngineError,
    Load,
    Model,
    ServerInfo,
    join_stream,
    sse_events,
)
from ddtree_ops.checks.holding import hold_unit
from ddtree_ops.checks.validation import run, standing
from ddtree_ops.checks.validation.acceptance import Acceptance, acceptance
from ddtree_ops.checks.validation.base import CheckSpec, Context, NoSettings
from ddtree_ops.checks.validation.run import _outcome
from ddtree_ops.checks.validation.standing import ASKED, Memory, memory
from ddtree_ops.checks.validation.suites import Planned
from ddtree_ops.errors import Inconclusive, Interrupted, UnreachableError
from ddtree_ops.inventory.models import Speculative, Target
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.secret import MASK, Secret
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.state import UnitState

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


@pytest.mark.parametrize(
    ("status", "answer", "kind", "words"),
    [
        (200, b"[]", "shape", "lists no rank"),
        (200, b"{}", "shape", "lists no rank"),
        (500, b"[]", "status", "500"),
        (200, b'[{"num_reqs":"0","num_waiting_reqs":0,"num_tokens":0}]', "shape", "no count"),
        (200, b'[{"num_reqs":0,"num_waiting_reqs":0,"num_tokens":NaN}]', "shape", "no count"),
        (200, b'[{"num_reqs":0,"num_waiting_reqs":0,"num_tokens":-1}]', "shape", "no count"),
        (200, b'[{"num_reqs":0}]', "shape", "no list of loads"),
    ],
)
def test_a_load_that_says_nothing(
    recorded: Recorded, local_session: Session, status: int, answer: bytes, kind: str, words: str
) -> None:
    with (
        recorded({"/get_load": (status, answer)}) as target,
        EngineClient(local_session, target) as engine,
        pytest.raises(EngineError) as caught,
    ):
        engine.load()
    assert (caught.value.kind, words in caught.value.message) == (kind, True), caught.value.message


META = '"finish_reason":{"type":"length"},"completion_tokens":8'


@pytest.mark.parametrize(
    "meta",
    [
        '"finish_reason":null,"completion_tokens":Infinity',
        '"finish_reason":null,"completion_tokens":1e400',
        '"finish_reason":null,"completion_tokens":"8"',
        '"finish_reason":null,"completion_tokens":8.5',
        f'{META},"spec_verify_ct":NaN,"spec_accepted_drafts":3',
        f'{META},"spec_verify_ct":2,"spec_accepted_drafts":NaN',
        f'{META},"spec_verify_ct":-2,"spec_accepted_drafts":3',
        f'{META},"spec_verify_ct":2,"spec_accepted_drafts":-1',
        f'{META},"spec_verify_ct":true,"spec_accepted_drafts":1',
        f'{META},"spec_verify_ct":2,"spec_accepted_drafts":"3"',
        f'{META},"spec_accept_histogram":[1,-1]',
        f'{META},"spec_accept_histogram":7',
        f'{META},"spec_accept_length":Infinity',
        f'{META},"cached_tokens":"x"',
    ],
)
def test_counts_that_are_none_are_another_shape(
    recorded: Recorded, local_session: Session, meta: str
) -> None:
    body = f'{{"text":"a","output_ids":[1],"meta_info":{{{meta}}}}}'.encode()
    with (
        recorded({"/generate": (200, body)}) as target,
        EngineClient(local_session, target) as engine,
        pytest.raises(EngineError) as caught,
    ):
        engine.generate("hi", max_tokens=8, timeout=5)
    assert caught.value.kind == "shape"


@pytest.mark.parametrize(
    ("message", "tokens"),
    [
        ('{"content":["a"]}', "1"),
        ('{"content":7}', "1"),
        ('{"content":"a","reasoning_content":{}}', "1"),
        ('{"content":"a","tool_calls":["x"]}', "1"),
        ('{"content":"a","tool_calls":7}', "1"),
        ('{"content":"a"}', "1e400"),
        ('{"content":"a"}', "Infinity"),
        ('{"content":"a"}', '"1"'),
        ('{"content":"a"}', "-1"),
    ],
)
def test_a_chat_of_another_shape(
    recorded: Recorded, local_session: Session, message: str, tokens: str
) -> None:
    usage = f'{{"prompt_tokens":1,"completion_tokens":{tokens}}}'
    body = (
        f'{{"model":"m","choices":[{{"message":{message},"finish_reason":"stop"}}],"usage":{usage}}}'.encode()
    )
    events = (
        f'data: {{"choices":[{{"delta":{message},"finish_reason":"stop"}}],"usage":{usage}}}\n\n'.encode()
    )
    with (
        recorded({CHAT: (200, body)}) as target,
        EngineClient(local_session, target) as engine,
        pytest.raises(EngineError) as caught,
    ):
        engine.chat("m", "hi", max_tokens=8, timeout=5)
    assert caught.value.kind == "shape"
    if "tool_calls" not in message:
        with recorded({CHAT: (200, events)}) as target, pytest.raises(EngineError) as caught:
            stream(local_session, target)
        assert caught.value.kind == "shape"


@pytest.mark.parametrize("length", ['"8192"', "NaN", "[1]", "-1", "8192.5"])
def test_a_context_length_of_another_shape(recorded: Recorded, local_session: Session, length: str) -> None:
    body = f'{{"data":[{{"id":"m","max_model_len":{length}}}]}}'.encode()
    with (
        recorded({"/v1/models": (200, body)}) as target,
        EngineClient(local_session, target) as engine,
        pytest.raises(EngineError) as caught,
    ):
        engine.models()
    assert caught.value.kind == "shape"


@pytest.mark.parametrize("length", ["NaN", "Infinity", "true", '"4"', "null"])
def test_an_average_that_is_no_number_is_not_told(
    recorded: Recorded, local_session: Session, length: str
) -> None:
    body = f'{{"internal_states":[{{"avg_spec_accept_length":{length}}}]}}'.encode()
    with recorded({"/server_info": (200, body)}) as target, EngineClient(local_session, target) as engine:
        assert engine.server_info().avg_accept_length is None


def context(session: Session, target: Target, engine: EngineClient, **more: Any) -> Context:
    return Context(
        session=session,
        target=target,
        engine=engine,
        model=Model("m"),
        info=ServerInfo("", "DFLASH", None, None, None),
        unit=UnitState.parse({"LoadState": "loaded", "ActiveState": "active"}),
        control=UnitControl(session, "x.service"),
        report=lambda _: None,
        timeout=5,
        **more,
    )


@pytest.mark.parametrize(("status", "answer"), [(200, b"[]"), (200, b"{}"), (500, b"[]")])
def test_a_load_that_says_nothing_is_no_idle_engine(
    recorded: Recorded, local_session: Session, status: int, answer: bytes
) -> None:
    with recorded({"/get_load": (status, answer)}) as target, EngineClient(local_session, target) as engine:
        found = memory(context(local_session, target, engine, shared={ASKED: ["chat"]}), Memory())
    assert found.verdict is Verdict.INCONCLUSIVE


def test_another_algorithm_than_the_configured_one_fails(recorded: Recorded, local_session: Session) -> None:
    with recorded({}) as target, EngineClient(local_session, target) as engine:
        service = target.service.model_copy(update={"speculative": Speculative(budget=32)})
        ctx = context(local_session, target.model_copy(update={"service": service}), engine)
        found = acceptance(ctx, Acceptance())
    assert (found.verdict, found.summary) == (
        Verdict.FAIL,
        "DDTREE is configured, and the server runs DFLASH",
    )
    assert "ddtree-ops deploy recorded" in found.hint


@pytest.mark.parametrize(
    ("text", "counts", "verdict", "words"),
    [
        ("The ledger is kept in the harbour office.", True, Verdict.PASS, "accept length 3.00"),
        ("!" * 64, True, Verdict.FAIL, "12 of 12 answers garbage"),
        ("", True, Verdict.FAIL, "tokens and no text"),
        ("The ledger is kept in the harbour office.", False, Verdict.INCONCLUSIVE, "no accept length"),
    ],
)
def test_acceptance_of_answers_that_are_none(
    recorded: Recorded, local_session: Session, text: str, counts: bool, verdict: Verdict, words: str
) -> None:
    meta = {"finish_reason": {"type": "length"}, "completion_tokens": 13, "prompt_tokens": 3}
    spec = {"spec_verify_ct": 4, "spec_accepted_drafts": 8} if counts else {}
    answers = {
        "/generate": (200, json.dumps({"text": text, "meta_info": {**meta, **spec}}).encode()),
        "/server_info": (200, b'{"speculative_algorithm":"DFLASH"}'),
    }
    with recorded(answers) as target, EngineClient(local_session, target) as engine:
        found = acceptance(context(local_session, target, engine), Acceptance())
    assert found.verdict is verdict, found
    assert words in found.summary
    if verdict is not Verdict.PASS:
        assert "ddtree-ops " in found.hint
        assert "Next:" not in found.hint, "the report says next itself"
    if "garbage" in words:
        assert found.hint.startswith("ddtree-ops validate recorded/ --check lossless")


def raising(error: Exception) -> Planned:
    def broken(ctx: Context, settings: Any) -> Any:
        raise error

    return Planned(CheckSpec("odd", "odd", broken), NoSettings())


def test_a_check_that_breaks_is_a_failed_check(recorded: Recorded, local_session: Session) -> None:
    with recorded({}) as target, EngineClient(local_session, target) as engine:
        ctx = context(local_session, target, engine, name="odd", api_key=Secret("sk-very-secret"))
        found, error = _outcome(ctx, raising(OverflowError("too large: sk-very-secret")))
        assert (found.name, found.verdict, error) == ("odd", Verdict.FAIL, None)
        assert found.summary == f"the check itself broke: OverflowError: too large: {MASK}"
        (shown,) = found.evidence
        assert "raise error" in shown.text and "test_validation_engine.py" in shown.text
        assert "sk-very-secret" not in json.dumps(found.to_json())
        assert _outcome(ctx, raising(Inconclusive("who knows")))[0].verdict is Verdict.INCONCLUSIVE
        refused = EngineError("no", kind="status", status=500)
        assert _outcome(ctx, raising(refused)) == (ctx.result(Verdict.FAIL, "no"), refused)
        for ended in (UnreachableError("gone"), Interrupted("stop")):
            with pytest.raises(type(ended)):
                _outcome(ctx, raising(ended))
        covered = OSError("the pipe broke")
        covered.__context__ = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            _outcome(ctx, raising(covered))


def test_the_others_are_asked_after_a_check_that_broke(
    recorded: Recorded, local_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = UnitState.parse({"LoadState": "loaded", "ActiveState": "active"})
    monkeypatch.setattr(run, "hold_unit", lambda *_: (None, unit, 1))
    monkeypatch.setattr(run, "host_memory", lambda *_: None)

    def sound(name: str) -> Planned:
        return Planned(CheckSpec(name, name, lambda ctx, _: ctx.result(Verdict.PASS, "well")), NoSettings())

    with recorded({}) as target, EngineClient(local_session, target) as engine:
        seen = run._Run(local_session, target, lambda _: None, None, {})
        ctx = context(local_session, target, engine)
        seen._ask(ctx, [raising(RecursionError("deep")), sound("next")])
        seen._stand(ctx, [raising(KeyError("x")), sound("last")])
    assert [(each.name, each.verdict) for each in seen.results] == [
        ("odd", Verdict.FAIL),
        ("next", Verdict.PASS),
        ("odd", Verdict.FAIL),
        ("last", Verdict.PASS),
    ]
    assert "RecursionError: deep" in seen.results[0].evidence[0].text


@pytest.mark.parametrize(
    ("verdict", "named", "wanted"),
    [
        (Verdict.SKIPPED, ("odd",), Verdict.INCONCLUSIVE),
        (Verdict.SKIPPED, ("other",), Verdict.SKIPPED),
        (Verdict.PASS, ("odd",), Verdict.PASS),
    ],
)
def test_a_check_that_was_named_and_is_skipped_is_no_pass(
    recorded: Recorded,
    local_session: Session,
    monkeypatch: pytest.MonkeyPatch,
    verdict: Verdict,
    named: tuple[str, ...],
    wanted: Verdict,
) -> None:
    unit = UnitState.parse({"LoadState": "loaded", "ActiveState": "active"})
    monkeypatch.setattr(run, "hold_unit", lambda *_: (None, unit, 1))
    monkeypatch.setattr(run, "host_memory", lambda *_: None)
    odd = Planned(CheckSpec("odd", "odd", lambda ctx, _: ctx.result(verdict, "said")), NoSettings())
    with recorded({}) as target, EngineClient(local_session, target) as engine:
        seen = run._Run(local_session, target, lambda _: None, None, {})
        seen.named = frozenset(named)
        ctx = context(local_session, target, engine)
        seen._ask(ctx, [odd])
        seen._stand(ctx, [odd])
    assert [each.verdict for each in seen.results] == [wanted] * 2
    if wanted is Verdict.INCONCLUSIVE:
        assert "ddtree-ops validate recorded" in seen.results[0].hint


class Watched:
    """Stands for a session whose unit is seen so; then nothing more comes, or the watch ends."""

    def __init__(self, *seen: dict[str, str], ends: bool = False) -> None:
        self.seen, self.ended, self.closed, self.looks = list(seen), ends, 0, 0

    def watch_unit(self, unit: str) -> Watched:
        return self

    def get(self, timeout: float) -> Any:
        self.looks += 1
        assert self.looks < 1000, "it looks without an end"
        return ({"event": "unit", "properties": self.seen.pop(0)}, b"") if self.seen else None

    def close(self) -> None:
        self.closed += 1


SERVES = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "InvocationID": "a1" * 16,
    "MainPID": "7",
    "NRestarts": "0",
}
DEAD = {**SERVES, "ActiveState": "failed", "SubState": "failed", "MainPID": "0"}


@pytest.mark.parametrize(
    ("seen", "ends", "problem", "samples"),
    [
        ((SERVES,), False, None, 1),
        ((DEAD,), False, "failed", 1),
        (({**SERVES, "MainPID": "8"},), False, "", 1),
        (({**SERVES, "InvocationID": "b2" * 16},), False, "", 1),
        ((), False, "the watch on the unit ended", 0),
        ((), True, "the watch on the unit ended", 0),
    ],
)
def test_a_unit_is_seen_once_at_least(
    seen: tuple[dict[str, str], ...], ends: bool, problem: str | None, samples: int
) -> None:
    session: Any = Watched(*seen, ends=ends)
    found, latest, looked = hold_unit(session, "x.service", UnitState.parse(SERVES), 0.0)
    assert ((found is None) == (problem is None), looked, session.closed) == (True, samples, 1), found
    assert (problem or "") in (found or "")
    assert latest == UnitState.parse(seen[0] if seen else SERVES)


def test_a_unit_that_dies_within_the_window_is_told_at_once() -> None:
    session: Any = Watched(SERVES, SERVES, DEAD, SERVES, ends=True)
    found, latest, samples = hold_unit(session, "x.service", UnitState.parse(SERVES), 600.0)
    assert (samples, session.looks, latest) == (3, 3, UnitState.parse(DEAD))
    assert found is not None and "failed" in found
    ended: Any = Watched(SERVES, ends=True)
    assert hold_unit(ended, "x.service", UnitState.parse(SERVES), 0.05)[0] == "the watch on the unit ended"


def test_a_death_names_the_run_that_died(
    recorded: Recorded, local_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, dead = UnitState.parse(SERVES), UnitState.parse(DEAD)
    monkeypatch.setattr(run, "hold_unit", lambda *_: ("it is gone", dead, 1))
    monkeypatch.setattr(standing, "hold_unit", lambda *_: ("it is gone", dead, 1))
    monkeypatch.setattr(standing, "port_holders", lambda *_: SimpleNamespace(owned=True, describe=lambda: ""))
    monkeypatch.setattr(standing, "prepare", lambda: SimpleNamespace(join=lambda: None))
    with recorded({}) as target, EngineClient(local_session, target) as engine:
        seen = run._Run(local_session, target, lambda _: None, None, {})
        asked = seen._explained(CheckResult("odd", Verdict.PASS, "well"), None, before, None)
        stood = standing.steady(
            replace(context(local_session, target, engine), unit=before), standing.Steady()
        )
        monkeypatch.setattr(run, "hold_unit", lambda *_: (None, before, 1))
        refused = EngineError("no", kind="status", status=500)
        failed = seen._explained(CheckResult("odd", Verdict.FAIL, "no"), refused, before, None)
    wanted = f"ddtree-ops diagnose recorded --invocation {'a1' * 16}"
    assert [(each.verdict, each.hint) for each in (asked, stood)] == [(Verdict.FAIL, wanted)] * 2
    assert failed.hint == f"ddtree-ops logs recorded --invocation {'a1' * 16}"


@pytest.mark.parametrize(("asked", "said"), [(["refusals"], True), (["chat"], False)])
def test_a_finding_that_the_run_provoked_is_told_as_that(
    recorded: Recorded,
    local_session: Session,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[str],
    said: bool,
) -> None:
    lines: list[str] = []
    found = CheckResult("signatures", Verdict.PASS, "one", facts={"signatures": ["req-unsupported"]})

    def scanned(session: Any, target: Any, *, invocation: str, **_: Any) -> Any:
        lines.append(invocation)
        return SimpleNamespace(as_check=lambda host: found)

    monkeypatch.setattr(standing, "scan", scanned)
    with recorded({}) as target, EngineClient(local_session, target) as engine:
        ctx = replace(context(local_session, target, engine), unit=UnitState.parse(SERVES))
        ctx.shared[ASKED] = asked
        told = standing.signatures(ctx, NoSettings())
    assert told.summary.endswith(" (the check refusals of this run asks for that)") is said
    assert lines == ["a1" * 16], "the journal of the run that was asked, not of the one that came after"


FIRED = "[2026-11-30 00:00:30] The server is fired up and ready to roll!"


@pytest.mark.parametrize(
    ("lines", "age_s", "loads"),
    [
        (["Loading safetensors checkpoint shards:  40% Completed | 2/5 [00:01<00:02,  1.5it/s]"], 18, True),
        ([], 2, True),
        ([FIRED], 40, False),
        ([], 100_000, False),
    ],
)
def test_an_engine_that_loads_is_told_from_one_that_is_gone(
    recorded: Recorded, lines: list[str], age_s: int, loads: bool
) -> None:
    begun = datetime(2026, 11, 30, tzinfo=UTC)
    unit = replace(
        UnitState.parse({"LoadState": "loaded", "ActiveState": "active", "SubState": "running"}),
        active_enter=begun,
    )
    entries = [SimpleNamespace(message=line, time=begun + timedelta(seconds=1)) for line in lines]
    control: Any = SimpleNamespace(entries=lambda **_: entries)
    with recorded({}) as target:
        told = run._loading(control, unit, target, begun + timedelta(seconds=age_s))
    assert bool(told) is loads, told
    if lines and loads:
        assert "weights 2/5 (40 %), 18s" in told
