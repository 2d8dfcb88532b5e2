"""The checks ``lossless`` and ``acceptance`` against lab engines: healthy ones, and each of their faults.

One pair of engines, target alone and with DDTREE, serves all of it; faults are switched in the running engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.checks.engine import EngineClient
from ddtree_ops.checks.validation.acceptance import HISTORY, Acceptance, acceptance
from ddtree_ops.checks.validation.base import Context, Settings
from ddtree_ops.checks.validation.golden import load, record
from ddtree_ops.checks.validation.lossless import BASELINE, GOLDEN, Lossless, lossless
from ddtree_ops.errors import CheckFailed
from ddtree_ops.inventory.models import Baseline, Health, Target
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Figure, Verdict
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.state import UnitState

PASS, FAIL, INCONCLUSIVE, SKIPPED = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.SKIPPED
RUNNING = UnitState.parse({"LoadState": "loaded", "ActiveState": "active", "SubState": "running"})
FEW = {"prompts": 6, "max_tokens": 24}


@contextmanager
def context(session: Session, target: Target, name: str) -> Iterator[Context]:
    with EngineClient(session, target) as engine:
        yield Context(
            session=session,
            target=target,
            engine=engine,
            model=engine.models()[0],
            info=engine.server_info(),
            unit=RUNNING,
            control=UnitControl(session, target.service.unit),
            report=lambda _: None,
            timeout=30,
            name=name,
        )


def numbers(result: CheckResult) -> dict[tuple[str, str], float | None]:
    return {
        (figure.name, figure.labels.get("concurrency", "")): figure.value
        for figure in result.figures
        if "prompt" not in figure.labels
    }


def test_a_pair_of_engines(start_engine: Callable[..., Any], local_session: Session, tmp_path: Path) -> None:
    switch, other = tmp_path / "faults", tmp_path / "faults-alone"
    fast = {"LAB_TOKENS_PER_S": "2000"}
    speculating = start_engine(environment={"LAB_FAULTS_FILE": str(switch), **fast}).target
    alone = start_engine(speculative=None, environment={"LAB_FAULTS_FILE": str(other), **fast}).target

    def run(
        check: Callable[[Context, Any], CheckResult],
        settings: Settings,
        faults: str = "",
        alone_faults: str = "",
        *,
        target: Target = speculating,
        shared: dict[str, Any] | None = None,
    ) -> CheckResult:
        switch.write_text(faults)
        other.write_text(alone_faults)
        with context(local_session, target, check.__name__) as ctx:
            ctx.shared.update(shared or {})
            return check(ctx, settings)

    # ------------------------------------------------------------------------------------------------ recording
    golden = tmp_path / "golden.json"
    with context(local_session, speculating, "record") as ctx, pytest.raises(CheckFailed, match="DDTREE"):
        record(ctx, golden)
    assert not golden.exists(), "nothing is recorded from a speculating server"
    with context(local_session, alone, "record") as ctx:
        recorded = record(ctx, golden, **FEW)
    found = load(golden)
    assert found.to_json() == recorded.to_json()
    assert (found.batch, len(found.prompts), found.max_tokens) == (8, 6, 24)
    assert all(len(each.first.best) == len(each.first.ids) for each in found.prompts)
    assert json.loads(golden.read_text())["schema"] == 1

    # ------------------------------------------------------------------------------------------------- lossless
    def compare(faults: str = "", *, batch: int = 0, **shared: Any) -> CheckResult:
        return run(lossless, Lossless(**FEW, batch=batch), faults, shared=shared or {GOLDEN: str(golden)})

    healthy = compare(batch=8)
    assert (healthy.verdict, healthy.summary) == (PASS, healthy.summary), healthy
    assert numbers(healthy) == {
        ("baseline_self_mismatches", ""): 0,
        ("lossless_prompts", "1"): 6,
        ("lossless_mismatches", "1"): 0,
        ("lossless_near_ties", "1"): 0,
        ("lossless_prompts", "8"): 6,
        ("lossless_mismatches", "8"): 0,
        ("lossless_near_ties", "8"): 0,
    }
    assert "chat template" not in healthy.summary

    wrong = compare("lossy=5")
    assert wrong.verdict is FAIL, wrong
    assert "not lossless on 6 of 6 prompts" in wrong.summary
    assert "nats" in wrong.evidence[0].text
    assert wrong.hint

    near = compare("lossy-near-tie=16")
    assert near.verdict is PASS, near
    assert (numbers(near)[("lossless_near_ties", "1")] or 0) > 0
    assert numbers(near)[("lossless_mismatches", "1")] == 0

    crowded = compare("lossy-at-batch=2", batch=8)
    assert (crowded.verdict, "of the baseline's own" in crowded.summary) == (FAIL, True), crowded
    assert numbers(crowded)[("lossless_mismatches", "1")] == 0

    @contextmanager
    def opened() -> Iterator[EngineClient]:
        with EngineClient(local_session, alone) as engine:
            yield engine

    some = run(lossless, Lossless(**FEW, batch=0), "", "nondeterministic=5", shared={BASELINE: opened})
    assert (some.verdict, numbers(some)[("baseline_self_mismatches", "")]) == (PASS, 2), some
    assert "2 undecided" in some.summary
    five = Lossless(prompts=5, max_tokens=24, batch=0)
    itself = run(lossless, five, "", "nondeterministic=2", shared={BASELINE: opened})
    assert (itself.verdict, numbers(itself)[("baseline_self_mismatches", "")]) == (INCONCLUSIVE, 5), itself
    assert "does not agree with itself on 5 of 5 prompts" in itself.summary

    @contextmanager
    def wrong_one() -> Iterator[EngineClient]:
        with EngineClient(local_session, speculating) as engine:
            yield engine

    service = speculating.service.model_copy(update={"baseline": Baseline(service="plain", host="box2")})
    named = speculating.model_copy(update={"service": service})
    no_baseline = run(lossless, Lossless(**FEW), target=named, shared={BASELINE: wrong_one})
    assert no_baseline.verdict is INCONCLUSIVE
    assert no_baseline.summary.startswith(
        "no answers of the baseline plain on box2: the server runs with DDTREE"
    )
    assert no_baseline.hint.endswith("; ddtree-ops status box2")
    assert compare(**{GOLDEN: str(tmp_path / "none.json")}).verdict is INCONCLUSIVE
    assert compare(nothing=1).verdict is SKIPPED
    assert run(lossless, Lossless(), target=alone, shared={GOLDEN: str(golden)}).verdict is SKIPPED
    document = json.loads(golden.read_text())
    document["facts"]["model_path"] = "/srv/models/another"
    foreign = tmp_path / "foreign.json"
    foreign.write_text(json.dumps(document))
    odd = compare(**{GOLDEN: str(foreign)})
    assert (odd.verdict, "another target: model_path target and another" in odd.summary) == (
        INCONCLUSIVE,
        True,
    )

    # ----------------------------------------------------------------------------------------------- acceptance
    two = Acceptance(prompts=2, max_tokens=24)

    def accept(faults: str = "", settings: Acceptance = two, **shared: Any) -> CheckResult:
        return run(acceptance, settings, faults, shared=shared)

    good = accept(settings=Acceptance(**FEW))
    assert good.verdict is PASS, good
    (overall,) = [each for each in good.figures if each.name == "accept_length" and not each.labels]
    assert overall.value is not None
    assert 1 < overall.value <= 8
    assert {each.labels["prompt"] for each in good.figures if "prompt" in each.labels} == {
        "code", "prose", "chat", "math", "chinese", "json",
    }  # fmt: skip
    bars = [each for each in good.figures if each.name == "accept_histogram"]
    assert sum(each.value or 0 for each in bars) == overall.samples

    useless = accept("accept-1")
    assert (useless.verdict, "useless" in useless.summary) == (FAIL, True), useless
    broken = accept("accept-above-block")
    assert (broken.verdict, "accounting is broken" in broken.summary) == (FAIL, True), broken
    floored = speculating.model_copy(
        update={"service": speculating.service.model_copy(update={"health": Health(min_accept_length=7.9)})}
    )
    low = run(acceptance, two, target=floored)
    assert (low.verdict, "below the 7.9" in low.summary) == (FAIL, True), low
    earlier = [Figure("accept_length", overall.value * 1.5, "tokens/step", "history")] * 6
    worse = accept(**{HISTORY: earlier})
    assert (worse.verdict, "worse than the median" in worse.summary) == (FAIL, True), worse
    assert accept(**{HISTORY: earlier[:2]}).verdict is PASS, "two runs judge nothing"
    assert run(acceptance, Acceptance(), target=alone).verdict is SKIPPED
    pretended = alone.model_copy(
        update={"service": speculating.service.model_copy(update={"port": alone.service.port})}
    )
    off = run(acceptance, Acceptance(), target=pretended)
    assert (off.verdict, "without speculative decoding" in off.summary) == (FAIL, True)
