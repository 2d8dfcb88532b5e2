"""Every check that asks the engine passes on the healthy lab engine, and fails on one that is broken in that very way.

One engine serves all tests; its faults are switched by a file. Where a fault ends the engine, another is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from ddtree_ops.checks.engine import Chat, EngineClient, EngineError, Generation, Model, ServerInfo
from ddtree_ops.checks.validation.asking import NO_THOUGHTS, answered
from ddtree_ops.checks.validation.asking import told as told_of
from ddtree_ops.checks.validation.base import Context
from ddtree_ops.checks.validation.judging import (
    Judgement,
    judge_answers,
    judge_arithmetic,
    judge_chat,
    judge_copy,
)
from ddtree_ops.checks.validation.registry import checks
from ddtree_ops.checks.validation.standing import ASKED, MEMORY
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Speculative, Target
from ddtree_ops.lab.engine.process import EngineProcess
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.state import UnitState

CONTEXT = 8192
RUN = "a1" * 16
"""Invocation that is tested; ``current`` would be another one by the time somebody reads the report."""


@dataclass
class Bench:
    """A lab engine whose faults can be switched, and what asks it."""

    process: EngineProcess
    target: Target
    faults: Path
    session: Session

    def check(self, name: str, faults: str = "", *, quality: bool = True, **settings: Any) -> CheckResult:
        """One check, with these faults; an error of the engine is a failure, as the runner makes it one."""
        self.faults.write_text(faults)
        spec = checks()[name]
        try:
            with EngineClient(self.session, self.target) as engine:
                (model,) = engine.models()
                ctx = Context(
                    session=self.session,
                    target=self.target,
                    engine=engine,
                    model=model,
                    info=engine.server_info(),
                    unit=UnitState.parse({"LoadState": "loaded", "ActiveState": "active"}),
                    control=UnitControl(self.session, "engine.service"),
                    report=lambda event: None,
                    timeout=settings.pop("timeout", 10.0),
                    quality=quality,
                    nonce=f"Note {name} {faults}",
                    name=name,
                    shared={ASKED: ["chat"], MEMORY: settings.pop("samples", [])},
                )
                return spec.run(ctx, spec.settings(**settings))
        except EngineError as error:
            return CheckResult(name, Verdict.FAIL, f"{error.kind}: {error.message}")


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, models: Path, trees: Mapping[str, Path], local_session: Session
) -> Iterator[Callable[..., Bench]]:
    """Start an engine: ``start(flags...)``; all are ended after the module."""
    running: list[EngineProcess] = []

    def begin(*flags: str, speculative: bool = True) -> Bench:
        faults = tmp_path_factory.mktemp("faults") / "faults"
        argv = ["--model-path", str(models / "target"), "--tp-size", "8", "--context-length", str(CONTEXT)]
        if speculative:
            argv += ["--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", "8"]
            argv += ["--speculative-draft-model-path", str(models / "drafter")]
            argv += ["--speculative-ddtree-budget", "32", "--attention-backend", "triton"]
        env = {"LAB_LOAD_SECONDS": "0", "LAB_FAULTS_FILE": str(faults), "LAB_HEALTH_POLL": "0.01"}
        process = EngineProcess(trees["patched"], *argv, *flags, env=env).wait_ready()
        running.append(process)
        service = Service(
            unit="engine.service",
            runtime="r",
            venv="/nowhere",
            model=str(models / "target"),
            port=process.port,
            speculative=Speculative(budget=32) if speculative else None,
        )
        target = Target(host=Host(name="local"), service=service, runtime=RuntimeSpec())
        return Bench(process, target, faults, local_session)

    yield begin
    for process in running:
        process.close()


@pytest.fixture(scope="module")
def bench(start: Callable[..., Bench]) -> Bench:
    """The engine that most tests share."""
    return start("--tool-call-parser", "kimi_k2")


ENDURANCE = {"requests": 12, "seconds": 0, "max_tokens": 16}
NEEDLE = {"max_tokens": 64}
HEALTHY: list[tuple[str, dict[str, Any]]] = [
    ("short-chat", {}),
    ("long-prompt", {}),
    ("garbage", {}),
    ("copy", {}),
    ("arithmetic", {}),
    ("needle", NEEDLE),
    ("unicode", {}),
    ("short-limits", {}),
    ("stream", {}),
    ("stop", {}),
    ("refusals", {}),
    ("tools", {}),
    ("abort", {}),
    ("prefix-hit", {}),
    ("flush", {}),
    ("burst", {}),
    (
        "endurance",
        {**ENDURANCE, "least_share": 0.01},
    ),  # what else this machine does is no fault of the engine
    ("over-long", {}),
    ("memory", {"samples": [100 << 20, 101 << 20]}),
]


@pytest.mark.parametrize(("name", "settings"), HEALTHY, ids=[name for name, _ in HEALTHY])
def test_a_healthy_engine_passes(bench: Bench, name: str, settings: dict[str, Any]) -> None:
    found = bench.check(name, **settings)
    assert found.verdict is Verdict.PASS, (found.summary, found.evidence)


BROKEN: list[tuple[str, str, str, dict[str, Any]]] = [
    ("short-chat", "garbage", "not sane", {}),
    ("short-chat", "null-content", "no content although", {}),
    ("short-chat", "truncated", "8 tokens came with finish_reason length", {}),
    ("short-chat", "error-every=1", "500", {}),
    ("garbage", "garbage", "garbage", {}),
    ("garbage", "repeated", "loop", {}),
    ("garbage", "replacement", "U+FFFD", {}),
    ("garbage", "salad", "scripts", {}),
    ("long-prompt", "long-prompt-refused", "400", {}),
    ("copy", "wrong-copy", "not verbatim", {}),
    ("arithmetic", "wrong-arithmetic", "wrong", {}),
    ("needle", "lost-needle=500", "not found", NEEDLE),
    ("unicode", "mojibake", "not verbatim", {}),
    ("unicode", "replacement", "U+FFFD", {}),
    ("short-limits", "ignores-limit", "max_tokens 1: chat made 2 tokens", {}),
    ("short-limits", "ignores-limit=-1", "chat made 0 tokens", {}),
    ("stream", "wrong-stream=dropped", "the stream differs", {}),
    ("stream", "wrong-stream=doubled", "the stream differs", {}),
    ("stream", "stream-no-usage", "no usage", {}),
    ("stream", "stream-wrong-finish", "finish_reason", {}),
    ("stream", "stream-no-done", "[DONE]", {}),
    ("stream", "hang-in-stream=2", "timeout", {"timeout": 1.0}),
    ("stop", "ignores-stop", "stands in the answer", {}),
    ("stop", "stop-uncut", "stands in the answer", {}),
    ("stop", "no-eos", "went on for", {"end_tokens": 200}),
    ("refusals", "refuses-nothing", "answered with 200", {}),
    ("refusals", "wrong-refusal=500", "answered with 500", {}),
    ("refusals", "wrong-refusal=words", "in other words", {}),
    ("tools", "tool-call-as-text", "no tool was called", {}),
    ("prefix-hit", "no-cache", "prefix caching does not work", {}),
    ("prefix-hit", "wrong-on-prefix-hit", "another answer", {}),
    ("flush", "flush-ignored", "came from the cache after it", {}),
    ("burst", "burst-drops", "were not answered", {}),
    ("burst", "crossed-answers", "answers are mixed up", {}),
    ("short-limits", "wrong-usage", "max_tokens 1", {}),
    ("endurance", "slow-decay=3", "it slows down", ENDURANCE),
    ("endurance", "flap-503", "it flaps", ENDURANCE),
    ("endurance", "error-every=5", "500", ENDURANCE),
    ("over-long", "overlong-accepted", "answered with 200", {}),
    ("over-long", "overlong-500", "answered with 500", {}),
    ("memory", "", "grew from 100 MiB to 900 MiB", {"samples": [100 << 20, 900 << 20]}),
]


@pytest.mark.parametrize(
    ("name", "fault", "words", "settings"), BROKEN, ids=[f"{name}-{fault}" for name, fault, _, _ in BROKEN]
)
def test_a_broken_engine_fails(
    bench: Bench, name: str, fault: str, words: str, settings: dict[str, Any]
) -> None:
    found = bench.check(name, fault, **dict(settings))
    assert (found.verdict, words in found.summary) == (Verdict.FAIL, True), (found.verdict, found.summary)
    assert bench.process.process.poll() is None


FATAL = [
    ("burst", "crash-on-batch=2", "disconnect|refused", {}),
    ("abort", "crash-on-abort", "disconnect|refused|timeout", {}),
]


@pytest.mark.parametrize(
    ("name", "fault", "kinds", "settings"), FATAL, ids=[fault for _, fault, _, _ in FATAL]
)
def test_an_engine_that_dies_fails(
    start: Callable[..., Bench], name: str, fault: str, kinds: str, settings: dict[str, Any]
) -> None:
    bench = start()
    found = bench.check(name, fault, **settings)
    assert found.verdict is Verdict.FAIL
    assert found.summary.split(":")[0] in kinds.split("|"), found.summary
    bench.process.wait()


def test_what_is_never_given_back_and_what_hangs(start: Callable[..., Bench]) -> None:
    bench = start()
    patient = {"patience": 0.2}
    assert bench.check("short-chat", "leak").verdict is Verdict.PASS
    leaking = bench.check("memory", "leak", **patient)
    assert (leaking.verdict, "they leak" in leaking.summary) == (Verdict.FAIL, True), leaking
    ignored = bench.check("abort", "abort-ignored", **patient)
    assert (ignored.verdict, "still ran" in ignored.summary) == (Verdict.FAIL, True), ignored
    running = bench.check("memory", "abort-ignored", **patient)
    assert (running.verdict, "1 running" in running.summary) == (Verdict.INCONCLUSIVE, True), running
    hung = bench.check("endurance", "hang-after=3", **ENDURANCE, timeout=0.5)
    assert (hung.verdict, hung.summary.split(":")[0]) == (Verdict.FAIL, "timeout"), hung


def test_without_speculation_the_same_requests_are_served(start: Callable[..., Bench]) -> None:
    bench = start("--grammar-backend", "none", speculative=False)
    found = bench.check("refusals")
    assert found.verdict is Verdict.PASS, found
    assert "logprobs served; grammar: the server runs with --grammar-backend none" in found.summary
    assert bench.check("tools").verdict is Verdict.SKIPPED


@pytest.mark.parametrize("name", ["copy", "arithmetic", "needle", "tools"])
def test_sense_is_not_asked_of_nonsense(bench: Bench, name: str) -> None:
    found = bench.check(name, quality=False)
    assert (found.verdict, "--no-quality" in found.summary) == (Verdict.SKIPPED, True)


@pytest.mark.parametrize("name", ["short-chat", "garbage", "unicode", "prefix-hit"])
def test_nonsense_passes_where_sense_is_not_judged(bench: Bench, name: str) -> None:
    assert bench.check(name, "garbage", quality=False).verdict is not Verdict.FAIL


@contextmanager
def another_user(bench: Bench) -> Iterator[None]:
    """A request of somebody else that runs all along."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Write about ships."}], "stream": True}
    url = f"http://127.0.0.1:{bench.process.port}/v1/chat/completions"
    body |= {"max_tokens": 7000, "ignore_eos": True}
    with httpx.Client(trust_env=False) as client, client.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_bytes()
        next(pieces)
        yield


def test_a_request_of_somebody_else_is_no_failure_of_abort(bench: Bench) -> None:
    bench.faults.write_text("")
    with another_user(bench):
        found = bench.check("abort", max_tokens=2000)
    assert found.verdict is Verdict.PASS, found
    assert (found.facts["requests_of_others"], "1 of others ran on" in found.summary) == (1, True), found


@dataclass
class Scripted:
    """Stands for an engine whose chats answer from a list; what was asked is kept. One that a template is refused by answers 400."""

    answers: list[tuple[str, str]]
    refuses: bool = False
    asked: list[tuple[int, bool]] = field(default_factory=list)
    generated: int = 0
    """1: whatever is sent was in the cache."""
    known: tuple[str, ...] = ()
    """The words that its tokenizer tells apart."""
    prompts: list[str] = field(default_factory=list)
    chats: list[str] = field(default_factory=list)

    def chat(self, model: str, prompt: str, *, max_tokens: int, timeout: float, **more: Any) -> Chat:
        quiet = more == NO_THOUGHTS
        self.asked.append((max_tokens, quiet))
        self.chats.append(prompt)
        if quiet and self.refuses:
            raise EngineError("no such field", kind="status", status=400)
        text, reason = self.answers.pop(0)
        tokens = max_tokens if reason == "length" else 9
        return Chat(model, text, None, reason, 100, tokens, tokens / 100)

    def generate(self, prompt: str, *, max_tokens: int, timeout: float, ignore_eos: bool) -> Generation:
        words = " ".join(each if each in self.known else "?" for each in prompt.split())
        cached = 99 if self.generated or words in self.prompts else 0
        self.prompts.append(words)
        return Generation("It is here.", "stop", 9, 0.1, prompt_tokens=100, cached_tokens=cached)


def scripted(engine: Scripted, *, context: int = 262144, timeout: float = 90.0) -> Any:
    """A context around it, as far as asking needs one."""
    nothing: Any = None
    return Context(
        session=nothing,
        target=SimpleNamespace(name="one"),  # type: ignore[arg-type]
        engine=engine,  # type: ignore[arg-type]
        model=Model("m", context),
        info=ServerInfo("", None, None, None, None),
        unit=UnitState.parse({"LoadState": "loaded", "ActiveState": "active", "InvocationID": RUN}),
        control=nothing,
        report=lambda event: None,
        timeout=timeout,
        name="copy",
    )


@pytest.mark.parametrize(
    ("verdict", "hint", "told"),
    [
        (Verdict.PASS, "", ""),
        (Verdict.SKIPPED, "why", "why"),
        (Verdict.FAIL, "", f"ddtree-ops logs one --invocation {RUN}"),
        (Verdict.INCONCLUSIVE, "is it?", f"is it?; ddtree-ops logs one --invocation {RUN}"),
        (Verdict.FAIL, "ddtree-ops wait one", "ddtree-ops wait one"),
    ],
)
def test_what_is_no_pass_says_what_to_type(verdict: Verdict, hint: str, told: str) -> None:
    assert scripted(Scripted([])).result(verdict, "said", hint=hint).hint == told


@pytest.mark.parametrize(
    ("algorithm", "hint", "told"),
    [
        (None, "", "ddtree-ops patch check one, or ddtree-ops rollback one"),
        (
            "DDTREE",
            "it lives",
            "it lives: ddtree-ops validate one --check lossless, or ddtree-ops patch check one, or ddtree-ops rollback one",
        ),
    ],
)
def test_what_tells_more_of_bad_text_than_the_journal(algorithm: str | None, hint: str, told: str) -> None:
    ctx = scripted(Scripted([]))
    ctx.info = ServerInfo("", algorithm, None, None, None)
    bad = Judgement(Verdict.FAIL, "said", hint, nonsense=True)
    assert told_of(ctx, bad).hint == told
    ctx.target = SimpleNamespace(name="one/tree")  # type: ignore[assignment]
    assert (
        "ddtree-ops patch check one --service tree, or ddtree-ops rollback one/tree" in told_of(ctx, bad).hint
    )
    ctx.target = SimpleNamespace(name="one")  # type: ignore[assignment]
    assert told_of(ctx, replace(bad, nonsense=False)).hint.endswith(f"ddtree-ops logs one --invocation {RUN}")


@pytest.mark.parametrize(
    "found",
    [
        judge_chat(Chat("m", "!" * 40, None, "length", 9, 16, 0.1), max_tokens=16, quality=True),
        judge_answers([("a", Chat("m", "!" * 40, None, "length", 9, 16, 0.1))], quality=True),
        judge_copy("the harbour", Chat("m", "another text", None, "stop", 9, 16, 0.1)),
        judge_arithmetic([("2 + 2", 4, Chat("m", "5", None, "stop", 9, 16, 0.1))]),
    ],
)
def test_bad_text_is_told_as_that(found: Judgement) -> None:
    assert (found.verdict, found.nonsense) == (Verdict.FAIL, True)


CUT, WHOLE = ("<think>\nThe user wants a copy", "length"), ("It is here.", "stop")


@pytest.mark.parametrize(
    ("answers", "more", "asked", "text"),
    [
        ([WHOLE], {}, [(512, False)], WHOLE[0]),
        ([("!" * 60, "length")], {}, [(512, False)], "!" * 60),
        ([CUT, WHOLE], {}, [(512, False), (512, True)], WHOLE[0]),
        ([CUT, CUT, WHOLE], {}, [(512, False), (512, True), (4096, False)], WHOLE[0]),
        ([CUT, CUT, CUT], {}, [(512, False), (512, True), (4096, False)], CUT[0]),
        ([CUT, WHOLE], {"refuses": True}, [(512, False), (512, True), (4096, False)], WHOLE[0]),
        ([CUT, CUT, WHOLE], {"context": 6000}, [(512, False), (512, True), (2000, False)], WHOLE[0]),
        ([CUT, CUT, WHOLE], {"timeout": 10.0}, [(512, False), (512, True), (700, False)], WHOLE[0]),
        ([CUT, CUT], {"timeout": 6.0}, [(512, False), (512, True)], CUT[0]),
        ([CUT, CUT], {"context": 700}, [(233, False), (233, True)], CUT[0]),
    ],
)
def test_what_is_cut_off_while_thinking_is_asked_again(
    answers: list[tuple[str, str]], more: dict[str, Any], asked: list[tuple[int, bool]], text: str
) -> None:
    settings = dict(more)
    engine = Scripted(list(answers), refuses=settings.pop("refuses", False))
    found = answered(scripted(engine, **settings), "Copy this.", max_tokens=512)
    assert (engine.asked, found.chat.content) == (asked, text)
    assert found.max_tokens == asked[-1][0]


def test_a_run_asks_without_thoughts_once_that_was_what_helped() -> None:
    engine = Scripted([CUT, WHOLE, WHOLE])
    ctx = scripted(engine)
    assert answered(ctx, "Copy this.", max_tokens=512).more == NO_THOUGHTS
    answered(ctx, "And this.", max_tokens=64)
    assert engine.asked == [(512, False), (512, True), (64, True)]


SAME, OTHER = [WHOLE] * 3, [WHOLE, ("Somewhere else.", "stop"), ("Somewhere else.", "stop")]


@pytest.mark.parametrize(
    ("answers", "verdict", "words"),
    [
        (SAME * 3, Verdict.PASS, "the same answers to 3 prompts"),
        (SAME + OTHER + SAME + SAME, Verdict.PASS, "once another answer from character 0 on (the last line)"),
        (SAME + OTHER + OTHER + SAME, Verdict.FAIL, "asked anew it parts early again"),
        (SAME + OTHER + SAME + OTHER + SAME, Verdict.FAIL, "2 of 3 prompts part so early"),
    ],
)
def test_one_near_tie_is_no_damaged_cache(
    answers: list[tuple[str, str]], verdict: Verdict, words: str
) -> None:
    spec, engine = checks()["prefix-hit"], Scripted(list(answers))
    found = spec.run(scripted(engine), spec.settings())
    assert (found.verdict, words in found.summary, engine.answers) == (verdict, True, []), found


def test_a_new_prompt_that_was_in_the_cache_says_what_helps() -> None:
    spec, engine = checks()["prefix-hit"], Scripted(SAME * 3, generated=1)
    found = spec.run(scripted(engine), spec.settings())
    assert (found.verdict, "99 of 100 tokens of a new prompt" in found.summary) == (
        Verdict.INCONCLUSIVE,
        True,
    )
    assert "too few words" in found.hint
    assert found.hint.endswith("ddtree-ops restart one")


def test_a_tokenizer_of_few_words_is_given_a_prompt_that_is_new_to_it() -> None:
    spec, engine = checks()["prefix-hit"], Scripted(SAME * 6, known=("It",))
    for nonce in ("Note 1a", "Note 2b"):
        ctx = scripted(engine)
        ctx.nonce = nonce
        found = spec.run(ctx, spec.settings())
        assert (found.verdict, "the same answers to 3 prompts" in found.summary) == (Verdict.PASS, True), (
            found
        )
    assert len(engine.prompts) == 2 + 3, "the second run finds its first prompt known, and asks another"
    begins = [prompt.split("\n")[0] for prompt in engine.chats[9::3]]
    assert all(set(each.split()) == {"It", "Note"} for each in begins)
    assert len(set(begins)) == 3, "each chat is new, too"
