"""Every check that asks the engine passes on the healthy lab engine, and fails on one that is broken in that very way.

One engine serves all tests; its faults are switched by a file. Where a fault ends the engine, another is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.checks.engine import EngineClient, EngineError
from ddtree_ops.checks.validation.base import Context
from ddtree_ops.checks.validation.registry import checks
from ddtree_ops.checks.validation.standing import ASKED, MEMORY
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Speculative, Target
from ddtree_ops.lab.engine.process import EngineProcess
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.state import UnitState

CONTEXT = 8192


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
                    shared={ASKED: True, MEMORY: settings.pop("samples", [])},
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
    ("endurance", ENDURANCE),
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
    ("burst", "crash-on-batch", "disconnect", {}),
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
