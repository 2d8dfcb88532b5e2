"""Faults and answering rules of the lab engine: rules by themselves, ends of the server in this process, the rest on one engine."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from ddtree_ops.inventory.models import RuntimeSpec
from ddtree_ops.lab.engine import answers, lab_engine
from ddtree_ops.lab.engine.faults import FAULTS, Fault, Faults
from ddtree_ops.lab.engine.process import EngineProcess
from ddtree_ops.runtime import build

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 160000,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
DRAFT = {**CONFIG, "architectures": ["DFlashDraftModel"], "block_size": 8}
COPY = "Repeat the following text exactly, character for character, and nothing else:\n\n"
NEEDLE = f"{'So it went. ' * 30}The secret code is 4711-BRAVO. {'So it went on. ' * 30}"
ASKED = "\nWhat is the secret code? Answer with the code only."
SUM = "What is 17 * 23? Answer with the number only."
QUICKSORT = "Write quicksort in Python with comments."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NONE = Faults()


# --- how they are written


def test_a_set_of_faults_is_read() -> None:
    found = Faults.parse(
        "garbage, late-crash=3 # not=this\nlost-needle\nwrong-stream\nwrong-refusal=words\n\n"
    )
    assert list(found) == ["garbage", "late-crash", "lost-needle", "wrong-stream", "wrong-refusal"]
    assert found.number("late-crash") == 3
    assert found["lost-needle"] == 0
    assert (found["wrong-stream"], found["wrong-refusal"]) == ("dropped", "words")
    assert "lost-needle" in found and "xid" not in found
    assert found.over("late-crash", 4) and not found.over("late-crash", 3)
    assert found.reached("late-crash", 3) and not found.reached("late-crash", 2)
    assert found.every("late-crash", 6) and not found.every("late-crash", 7)
    assert not found.over("oom-late", 1000)
    assert Faults.parse("xid,xid") == Faults.parse("xid") != NONE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("garbadge", "unknown fault 'garbadge'; there are: garbage, "),
        ("garbage=1", "fault garbage takes no value"),
        ("late-crash=soon", "fault late-crash=soon: a number is wanted"),
        ("wrong-stream=odd", "fault wrong-stream=odd: one of dropped, doubled is wanted"),
    ],
)
def test_what_is_no_fault_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Faults.parse(text)


def test_a_misspelt_name_in_the_engine_is_an_error() -> None:
    with pytest.raises(KeyError):
        "garbadge" in NONE  # noqa: B015


def test_unknown_faults_end_the_start() -> None:
    with EngineProcess(None, env={"LAB_FAULTS": "none-such"}) as engine:
        assert engine.wait() == 2
        assert "LAB_FAULTS: unknown fault 'none-such'; there are: garbage, " in engine.log


# --- what is answered


@pytest.mark.parametrize(
    ("prompt", "kind", "answer"),
    [
        (COPY + "Zwölf 🍎, “so”\n  x = 1;", "copy", "Zwölf 🍎, “so”\n  x = 1;"),
        (COPY + SUM, "copy", SUM),
        ("Repeat this verbatim:\nabc", "copy", "abc"),
        (SUM, "sum", "391"),
        ("What is 5 - 9?", "sum", "-4"),
        ("What is 1200 + 34?", "sum", "1234"),
        (NEEDLE + ASKED, "needle", "4711-BRAVO"),
        (ASKED, "needle", "There is no secret code."),
        ("Count from 3 to 6, separated by commas.", "count", "3, 4, 5, 6"),
    ],
)
def test_rules(prompt: str, kind: str, answer: str) -> None:
    assert answers.compose(prompt) == (kind, answer)


def test_everything_else_gets_the_canned_text_in_its_own_script() -> None:
    kind, text = answers.compose("用中文简单介绍一下快速排序。")
    assert kind == "text" and "快速排序" in text
    assert answers.compose(QUICKSORT) == ("text", answers.QUICKSORT)


def test_tokens_joined_give_the_text() -> None:
    text = COPY + "Zwölf 🍎🍏, “so”\n\n  x = 12345; 中文  "
    assert "".join(answers.pieces_of(text)) == text


def test_a_tool_is_called_with_what_the_prompt_says() -> None:
    kind, text = answers.compose("How is the weather in Paris for 3 days?", [WEATHER])
    left, calls = answers.tool_calls_in(text)
    assert (kind, left) == ("tool", "")
    assert calls == [("get_weather", 0, '{"city": "Paris"}')]
    assert answers.tool_calls_in(text[:40]) == (text[:40], [])


@pytest.mark.parametrize(
    ("faults", "kind", "before", "after"),
    [
        ("", "copy", "abcdef", "abcdef"),
        ("garbage", "text", "abc", "!" * 4096),
        ("repeated", "text", "abc", "and so it goes on and on, " * 200),
        ("wrong-copy", "copy", "abcdef", "abcxef"),
        ("wrong-copy", "sum", "391", "391"),
        ("wrong-arithmetic", "sum", "391", "401"),
        ("wrong-arithmetic", "copy", "391", "391"),
        ("lost-needle=50", "needle", "4711", "The text does not name one."),
        ("lost-needle=100", "needle", "4711", "4711"),
        ("mojibake", "copy", "ä–x", "Ã¤â\x80\x93x"),
        ("replacement", "text", "This is what it is.", "This i\ufffd what \ufffdt is. \ufffd      \ufffd"),
    ],
)
def test_spoilt_answers(faults: str, kind: str, before: str, after: str) -> None:
    assert answers.spoil(kind, before, 100, Faults.parse(faults)) == after


def test_a_salad_is_of_many_scripts() -> None:
    words = answers.spoil("text", "abc", 9, Faults.parse("salad")).split()
    assert len(words) == 120 and len(set(words)) >= 8


ONE_TO_FIVE = ["one", " two", " three", " four", " five"]


@pytest.mark.parametrize(
    ("faults", "limit", "stop", "ignore_eos", "texts", "finish"),
    [
        ("", 9, [], False, [*ONE_TO_FIVE, ""], ("stop", answers.EOS_ID)),
        ("", 6, [], False, [*ONE_TO_FIVE, ""], ("length", 6)),
        ("", 3, [], False, ONE_TO_FIVE[:3], ("length", 3)),
        ("", 7, [], True, [*ONE_TO_FIVE, *ONE_TO_FIVE[:2]], ("length", 7)),
        ("", 0, [], False, [], ("length", 0)),
        ("", 9, ["ee f", "five"], False, ["one", " two", " thr", ""], ("stop", "ee f")),
        ("", 9, ["five", "two"], True, ["one", " "], ("stop", "two")),
        ("", 3, ["five"], False, ONE_TO_FIVE[:3], ("length", 3)),
        ("ignores-stop", 9, ["two"], False, [*ONE_TO_FIVE, ""], ("stop", answers.EOS_ID)),
        ("stop-uncut", 9, ["two"], False, ["one", " two"], ("stop", "two")),
        ("no-eos", 7, [], False, [*ONE_TO_FIVE, *ONE_TO_FIVE[:2]], ("length", 7)),
        ("ignores-limit", 3, [], False, ONE_TO_FIVE[:4], ("length", 3)),
        ("ignores-limit=-1", 3, [], False, ONE_TO_FIVE[:2], ("length", 3)),
        ("truncated=2", 9, [], False, ONE_TO_FIVE[:2], ("length", 9)),
        ("truncated=8", 9, [], False, [*ONE_TO_FIVE, ""], ("stop", answers.EOS_ID)),
    ],
)
def test_ends(
    faults: str, limit: int, stop: list[str], ignore_eos: bool, texts: list[str], finish: tuple[str, Any]
) -> None:
    end = answers.ending(ONE_TO_FIVE, limit, stop, ignore_eos, Faults.parse(faults))
    assert end.texts == texts
    assert (end.finish["type"], end.finish.get("matched", end.finish.get("length"))) == finish
    assert len(end.pieces) == len(texts)


def test_near_ties_are_there_and_rare() -> None:
    gaps = [answers.gap(["a", "prompt"], n) for n in range(1000)]
    ties = [each for each in gaps if each == answers.NEAR_TIE]
    assert 50 < len(ties) < 200
    assert min(each for each in gaps if each != answers.NEAR_TIE) >= 1.5
    for n in range(50):
        best, second = answers.logprobs_at(["a", "prompt"], n, 2)
        assert best - second == pytest.approx(gaps[n])
        assert best < 0


def test_answers_go_another_way_where_asked() -> None:
    prompt, pieces = ["a", "prompt"], ["word"] * 200
    large, tie = answers.diverge(prompt, pieces, 20, False), answers.diverge(prompt, pieces, 20, True)
    assert large is not None and large >= 20 and answers.gap(prompt, large) > 1
    assert tie is not None and tie >= 20 and answers.gap(prompt, tie) == answers.NEAR_TIE
    assert answers.diverge(prompt, ["a", "b", ""], 20) == 1
    assert answers.diverge(prompt, [""], 0) is None
    assert answers.runner_up("  other") == "  perhaps"
    assert len({answers.runner_up(" never", rank) for rank in range(1, 5)}) == 4


# --- what ends or stalls the scheduler, without a server


class Link:
    """In place of the pipe to the main process."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def send(self, message: tuple[str, Any]) -> None:
        self.sent.append(message)

    def poll(self, _seconds: float) -> bool:
        return False


def scheduler(faults: str, algorithm: str | None = "DDTREE") -> Any:
    server = SimpleNamespace(
        local_ranks=range(1), tp=1, nodes=1, node=0, graph_sizes=[], algorithm=algorithm, context=64, block=8,
        verify_tokens=33, vocabulary=160000, gpu=96.0,
        fields={"max_running_requests": 48, "decode_log_interval": 40},
    )  # fmt: skip
    made: Any = lab_engine.Scheduler(server, Link())  # type: ignore[arg-type]
    made.capacity, made.rate, made.load_seconds = 4096, 1e9, 0
    made.receive("faults", lab_engine.faults.Faults.parse(faults))
    return made


def request(rid: str = "a", text: str = "how are you", limit: int = 40, prompt: int = 8) -> dict[str, Any]:
    tokens = [f"{text}{n}" for n in range(prompt)]
    return {"rid": rid, "text": text, "prompt": tokens, "limit": limit, "ignore_eos": False, "stop": []}


def run(of: Any, *requests: dict[str, Any]) -> dict[str, str]:
    """Texts by request id, when all have ended."""
    of.receive("generate", list(requests))
    while of.waiting or of.running:
        of.step()
    texts: dict[str, str] = {}
    for kind, chunk in of.link.sent:
        if kind == "chunk":
            texts[chunk["rid"]] = texts.get(chunk["rid"], "") + chunk["text"]
    of.link.sent.clear()
    return texts


def load_of(of: Any) -> dict[str, int]:
    of.receive("state", "x")
    return dict(of.link.sent.pop()[1][1]["load"])


@pytest.mark.parametrize(
    ("faults", "served", "last", "kind"),
    [
        ("late-crash=2", 2, request("z"), "torch.AcceleratorError"),
        ("oom-late=2", 2, request("z"), "torch.OutOfMemoryError"),
        ("crash-on-prefix-hit", 0, request("z"), "triton.runtime.errors.OutOfResources"),
        ("crash-on-prefix-hit=6", 0, request("z"), "triton.runtime.errors.OutOfResources"),
        ("long-prompt-crash=20", 2, request("z", prompt=21), "torch.AcceleratorError"),
        ("overlong-crash", 2, request("z", prompt=70), "torch.AcceleratorError"),
    ],
)
def test_what_ends_the_server(faults: str, served: int, last: dict[str, Any], kind: str) -> None:
    broken = scheduler(faults)
    for n in range(served):
        assert run(broken, request(f"r{n}", f"prompt {n}"))
    if not served:
        assert run(broken, request("first"))
    with pytest.raises(lab_engine.Failure) as failure:
        run(broken, last)
    assert failure.value.kind == kind


def test_health_checks_are_not_counted() -> None:
    broken = scheduler("late-crash=1")
    for n in range(4):
        assert run(broken, request(f"HEALTH_CHECK_{n}", prompt=1))
    run(broken, request("a"))
    with pytest.raises(lab_engine.Failure):
        run(broken, request("b"))


def test_hang_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for its parent and at nothing else; when that is gone it goes on to its end."""
    slept: list[float] = []
    parents = iter([5, 5, 5, 1])
    monkeypatch.setattr(lab_engine.os, "getppid", lambda: next(parents))
    one = scheduler("hang-after=1")
    assert run(one, request("a"))
    monkeypatch.setattr(lab_engine.time, "sleep", slept.append)
    one.receive("generate", [request("HEALTH_CHECK_1")])
    assert slept == []
    one.receive("generate", [request("b")])
    assert slept == [0.5] * 3


def test_counts_start_where_the_faults_change() -> None:
    broken = scheduler("late-crash=2")
    for n in range(5):
        broken.receive("faults", lab_engine.faults.Faults.parse("late-crash=2"))
        assert run(broken, request(f"r{n}"))


def test_a_short_hit_is_not_the_one_that_crashes() -> None:
    broken = scheduler("crash-on-prefix-hit=9")
    assert run(broken, request("a")) and run(broken, request("b"))


def test_crash_on_batch() -> None:
    broken = scheduler("crash-on-batch=3")
    assert len(run(broken, request("a"), request("b", "other"))) == 2
    with pytest.raises(lab_engine.Failure):
        run(broken, request("c"), request("d"), request("e"))


def test_crash_on_abort() -> None:
    broken = scheduler("crash-on-abort")
    broken.receive("abort", "unknown")
    broken.receive("generate", [request("a")])
    with pytest.raises(lab_engine.Failure):
        broken.receive("abort", "a")


def test_abort_frees_what_a_request_held_unless_it_is_ignored() -> None:
    for faults, left in (("", 0), ("abort-ignored", 1)):
        one = scheduler(faults)
        one.receive("generate", [request("a", limit=400)])
        one.step()
        assert load_of(one)["num_running_reqs"] == 1
        one.receive("abort", "a")
        assert load_of(one)["num_running_reqs"] == left
        assert (load_of(one)["num_used_tokens"] > 0) == bool(left)
        one.receive("flush", "f")
        assert one.link.sent.pop() == ("state", ("f", {"flushed": not left}))
        one.receive("faults", lab_engine.faults.Faults())
        assert load_of(one)["num_running_reqs"] == 0


def test_leak() -> None:
    for faults, tokens in (("", 0), ("leak=1", 16)):
        one = scheduler(faults)
        run(one, request("a"))
        run(one, request("b"))
        assert load_of(one)["num_used_tokens"] == tokens
        assert sum(map(len, one.kept)) == (2 << 20 if faults else 0)


def test_the_cache_and_its_flush() -> None:
    for faults, hits in (("", [0, 7, 0]), ("no-cache", [0, 0, 0]), ("flush-ignored", [0, 7, 7])):
        one, cached = scheduler(faults), []
        for rid in "abc":
            if rid == "c":
                one.receive("flush", "f")
                assert one.link.sent.pop() == ("state", ("f", {"flushed": True}))
            one.receive("generate", [request(rid)])
            while one.waiting or one.running:
                one.step()
            cached.append(next(body["cached"] for kind, body in one.link.sent if kind == "chunk"))
            one.link.sent.clear()
        assert cached == hits


def test_wrong_on_prefix_hit() -> None:
    one = scheduler("wrong-on-prefix-hit=5")
    first, second = (run(one, request(rid))[rid] for rid in "ab")
    assert first != second
    assert run(scheduler(""), request("a"))["a"] == first


def differing(one: str, other: str) -> list[int]:
    a, b = answers.pieces_of(one), answers.pieces_of(other)
    return [n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]


def test_lossy_answers_differ_where_the_gap_says_so() -> None:
    whole = run(scheduler("", None), request("a", QUICKSORT, limit=60))["a"]
    assert run(scheduler(""), request("a", QUICKSORT, limit=60))["a"] == whole
    for faults, near in (("lossy=7", False), ("lossy-near-tie=7", True)):
        assert run(scheduler(faults, None), request("a", QUICKSORT, limit=60))["a"] == whole
        (at,) = differing(run(scheduler(faults), request("a", QUICKSORT, limit=60))["a"], whole)
        assert (answers.gap(request(text=QUICKSORT)["prompt"], at) == answers.NEAR_TIE) == near
        assert at >= 7


def test_lossy_at_batch() -> None:
    whole = run(scheduler(""), request("a", QUICKSORT))["a"]
    assert run(scheduler("lossy-at-batch"), request("a", QUICKSORT))["a"] == whole
    assert run(scheduler("lossy-at-batch"), request("a", QUICKSORT), request("b", "hello"))["a"] != whole
    assert run(scheduler("lossy-at-batch=3"), request("a", QUICKSORT), request("b", "hello"))["a"] == whole


def test_nondeterministic() -> None:
    one = scheduler("nondeterministic", None)
    texts = [run(one, request("a", QUICKSORT))["a"] for _ in range(4)]
    assert texts[0] == texts[2] != texts[1] == texts[3]


def test_crossed_answers() -> None:
    healthy = run(scheduler(""), request("a", "one two"), request("b", SUM))
    crossed = run(scheduler("crossed-answers"), request("a", "one two"), request("b", SUM))
    assert healthy["b"] == "391"
    one = scheduler("crossed-answers")
    one.receive("generate", [request("a", "one two")])
    assert run(one, request("b", SUM)) == {"a": healthy["a"], "b": healthy["a"]}
    assert crossed["a"] == healthy["a"]


def test_slow_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    one, slept = scheduler("slow-decay=2"), []
    now = [0.0]
    monkeypatch.setattr(lab_engine.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(lab_engine.time, "sleep", sleep)
    one.rate = 100.0
    for served, seconds in ((0, 0.04), (1, 0.04), (2, 0.08), (5, 0.16)):
        one.served = served
        slept.clear()
        one.pause_step(4)
        assert sum(slept) == pytest.approx(seconds)


def test_accounting_of_drafts() -> None:
    metas = {}
    for faults in ("", "accept-1", "accept-above-block"):
        one = scheduler(faults)
        one.receive("generate", [request("a", QUICKSORT, limit=100)])
        while one.waiting or one.running:
            one.step()
        metas[faults] = [body["spec"] for kind, body in one.link.sent if kind == "chunk"][-1]
    meta = metas[""]
    assert sum(meta["spec_accept_histogram"]) == meta["spec_verify_ct"]
    assert (
        sum(n * steps for n, steps in enumerate(meta["spec_accept_histogram"]))
        == meta["spec_accepted_drafts"]
    )
    assert 1 < meta["spec_accept_length"] <= 8
    assert metas["accept-1"]["spec_accept_histogram"] == [99]
    assert metas["accept-1"]["spec_accepted_drafts"] == 0
    wrong = metas["accept-above-block"]
    assert (wrong["spec_accepted_drafts"] + wrong["spec_verify_ct"]) / wrong["spec_verify_ct"] > 8
    assert wrong["spec_accept_rate"] > 1


def test_xid(capfd: pytest.CaptureFixture[str]) -> None:
    run(scheduler("xid"), request("a"))
    assert re.search(r"NVRM: Xid \(PCI:0000:41:00\): 31, ", capfd.readouterr().err)


# --- what shows over HTTP, on one engine whose faults are switched


Switch = Callable[[str], None]


class Lab:
    """The engine and the file that switches its faults."""

    def __init__(self, client: httpx.Client, file: Path) -> None:
        self.client, self.file = client, file

    def chat(self, text: str = QUICKSORT, **more: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0, **more}
        return self.client.post("/v1/chat/completions", json={"max_tokens": 60, **body})

    def content(self, text: str = QUICKSORT, **more: Any) -> Any:
        return self.chat(text, **more).json()["choices"][0]["message"]["content"]

    def stream(self, **more: Any) -> tuple[str, str | None, Any, bool]:
        """Text, finish reason, usage, and whether it is done."""
        asked = {"stream": True, "stream_options": {"include_usage": True}, **more}
        data = [line[6:] for line in self.chat(**asked).text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in data if line != "[DONE]"]
        choices = [event["choices"][0] for event in events if event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return text, choices[-1]["finish_reason"], events[-1].get("usage"), data[-1] == "[DONE]"

    def running(self) -> int:
        return int(self.client.get("/get_load").json()[0]["num_reqs"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("faults")
    for name, config in (("target", CONFIG), ("draft", DRAFT)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    flags = ["--model-path", str(folder / "target"), "--served-model-name", "tiny", "--enable-cache-report"]
    flags += ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "16"]
    flags += ["--speculative-draft-model-path", str(folder / "draft"), "--tool-call-parser", "kimi_k2"]
    environment = {
        "LAB_LOAD_SECONDS": "0",
        "LAB_HEALTH_POLL": "0",
        "LAB_FAULTS_FILE": str(folder / "on"),
    }
    with EngineProcess(build(RuntimeSpec(python="cp312")).root, *flags, env=environment) as process:
        process.wait_ready()
        with httpx.Client(base_url=process.url, timeout=60, trust_env=False) as client:
            yield Lab(client, folder / "on")


@pytest.fixture
def switch(engine: Lab) -> Iterator[Switch]:
    yield lambda text: engine.file.write_text(text) and None
    engine.file.write_text("")


def test_the_healthy_engine(engine: Lab) -> None:
    assert engine.content(COPY + "Zwölf 🍎") == "Zwölf 🍎"
    assert engine.content(SUM) == "391"
    whole, (text, finish, usage, done) = engine.chat().json(), engine.stream()
    assert (text, finish) == (whole["choices"][0]["message"]["content"], "length")
    assert done and usage["completion_tokens"] == whole["usage"]["completion_tokens"] == 60
    said = engine.chat(stop=["pivot"]).json()["choices"][0]
    assert (said["finish_reason"], said["matched_stop"]) == ("length", None)
    said = engine.chat(stop=["Return"]).json()["choices"][0]
    assert (said["finish_reason"], said["matched_stop"]) == ("stop", "Return")
    assert said["message"]["content"] == answers.QUICKSORT[: answers.QUICKSORT.index("Return")]
    assert [engine.chat(max_tokens=n).json()["usage"]["completion_tokens"] for n in (1, 2, 3)] == [1, 2, 3]
    assert engine.client.get("/health").status_code == 200


def test_a_tool_call(engine: Lab, switch: Switch) -> None:
    asked = "How is the weather in Paris?"
    whole = engine.chat(asked, tools=[WEATHER], max_tokens=200).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    (call,) = whole["message"]["tool_calls"]
    assert (call["id"], call["type"], call["index"]) == ("functions.get_weather:0", "function", 0)
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert engine.stream(text=asked, tools=[WEATHER], max_tokens=200)[:2] == ("", "tool_calls")
    refused = engine.chat(asked, tools=[WEATHER], tool_choice="required")
    assert (refused.status_code, "grammar-constrained" in refused.text) == (400, True)
    switch("tool-call-as-text")
    whole = engine.chat(asked, tools=[WEATHER], max_tokens=200).json()["choices"][0]
    assert (whole["finish_reason"], whole["message"]["tool_calls"]) == ("stop", None)
    assert "<|tool_call_begin|>" in whole["message"]["content"]


def test_texts_over_http(engine: Lab, switch: Switch) -> None:
    for faults, content in (("garbage", "!" * 60), ("null-content", None)):
        switch(faults)
        assert engine.content() == content
        assert engine.stream()[0] == (content or "")
    switch("wrong-arithmetic\nwrong-copy")
    assert (engine.content(SUM), engine.content(COPY + "abcd")) == ("401", "abxd")
    switch("")
    assert engine.content(SUM) == "391"


@pytest.mark.parametrize(
    ("faults", "changed"),
    [
        ("wrong-stream", {"text"}),
        ("wrong-stream=doubled", {"text"}),
        ("stream-no-usage", {"usage"}),
        ("stream-wrong-finish", {"finish"}),
        ("stream-no-done", {"done"}),
        ("wrong-usage", {"usage"}),
    ],
)
def test_streams(engine: Lab, switch: Switch, faults: str, changed: set[str]) -> None:
    names = ("text", "finish", "usage", "done")
    engine.chat()  # in the cache from now on
    healthy = engine.stream()
    switch(faults)
    broken = engine.stream()
    assert {name for name, a, b in zip(names, healthy, broken, strict=True) if a != b} == changed


def test_a_stream_that_hangs_and_a_client_that_leaves(engine: Lab, switch: Switch) -> None:
    switch("hang-in-stream=2")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 9}
    got = []
    with (
        contextlib.suppress(httpx.ReadTimeout),
        engine.client.stream("POST", "/v1/chat/completions", json=body, timeout=0.5) as answer,
    ):
        assert answer.status_code == 200
        got += [line for line in answer.iter_lines() if line]
    assert len(got) <= 2
    switch("")
    assert engine.running() == 0


def test_a_client_that_leaves_frees_its_request(engine: Lab, switch: Switch) -> None:
    switch("slow-decay=1")
    for _ in range(8):
        engine.chat(max_tokens=1)
    body = {
        "text": "a b",
        "sampling_params": {"max_new_tokens": 500, "ignore_eos": True},
    }  # 500 tokens at 4 a second
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post(str(engine.client.base_url.join("/generate")), json=body, timeout=0.1)
    deadline = time.monotonic() + 60
    while engine.running():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_refusals(engine: Lab, switch: Switch) -> None:
    asked: list[dict[str, Any]] = [{"logprobs": True}, {"response_format": {"type": "json_object"}}]
    for faults, status, words in (
        ("", 400, "DDTREE speculative decoding does not support"),
        ("refuses-nothing", 200, "quicksort"),
        ("wrong-refusal", 500, "InternalServerError"),
        ("wrong-refusal=words", 400, "This is not possible."),
    ):
        switch(faults)
        for more in asked:
            answer = engine.chat(**more)
            assert (answer.status_code, words in answer.text) == (status, True)


def test_over_long_input(engine: Lab, switch: Switch) -> None:
    for faults, status in (("", 400), ("overlong-accepted", 200), ("overlong-500", 500)):
        switch(faults)
        assert engine.chat("word " * 600).status_code == status
    switch("long-prompt-refused=100")
    assert engine.chat("word " * 90).status_code == 200
    assert "(100 tokens)" in engine.chat("word " * 110).json()["message"]


def test_errors_now_and_then(engine: Lab, switch: Switch) -> None:
    switch("error-every=3")
    assert [engine.chat(max_tokens=1).status_code for _ in range(6)] == [200, 200, 500] * 2
    switch("flap-503")
    assert [engine.client.get("/health").status_code for _ in range(4)] == [200, 503] * 2
    switch("burst-drops=0")
    assert engine.chat(max_tokens=1).status_code == 500
    switch("burst-drops=1")
    assert engine.chat(max_tokens=1).status_code == 200


def test_a_file_that_names_no_fault_is_an_error_of_the_request(engine: Lab, switch: Switch) -> None:
    switch("none-such")
    failed = engine.chat()
    assert (failed.status_code, failed.headers["connection"]) == (500, "close"), (
        "else it is asked again over this one"
    )
    switch("")
    assert engine.chat().status_code == 200


# --- what ends the process: last, it takes the engine with it


def test_restart_by_itself(engine: Lab, switch: Switch) -> None:
    switch("restart-itself=2")
    assert [engine.chat(max_tokens=1).status_code for _ in range(2)] == [200, 200]
    deadline = time.monotonic() + 30
    with pytest.raises(httpx.TransportError):
        while time.monotonic() < deadline:
            engine.client.get("/v1/models")
            time.sleep(0.05)


# --- nothing forgotten


def test_every_fault_is_tested_here_and_used() -> None:
    here = Path(__file__).read_text()
    folder = Path(lab_engine.__file__).parent
    code = (folder / "lab_engine.py").read_text() + (folder / "answers.py").read_text()
    unused = [name for name in FAULTS if f'"{name}"' not in code]
    untested = [name for name in FAULTS if not re.search(rf'["\\n]{re.escape(name)}["=\\]', here)]
    assert (unused, untested) == ([], [])


def test_every_fault_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)(?:\[?=[^`]*)?` \| (.*) \|$", page, re.M))

    def row(fault: Fault) -> str:
        return f"{fault.effect} | {', '.join(fault.checks.split())}"

    assert {name: rows.get(name) for name in FAULTS} == {name: row(fault) for name, fault in FAULTS.items()}
