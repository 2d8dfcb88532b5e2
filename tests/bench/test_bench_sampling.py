"""What a sample of answers says of the drafts that were accepted, and what it says where there is nothing to count."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from ddtree_ops.checks.bench.points import Configuration
from ddtree_ops.checks.bench.sampling import Sampled, histogram_of
from ddtree_ops.checks.engine import Generation
from ddtree_ops.deploy.guard import Safety
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.playbook import bench
from ddtree_ops.results import CheckResult, Figure, Verdict
from ddtree_ops.runreport import RunReport, TargetReport

LABELS = {"mode": "ddtree", "budget": "16", "topk": "4"}


def answer(*histogram: int, steps: int | None = None, accepted: int | None = None) -> Generation:
    """By its histogram, or by its counts alone."""
    whole = sum(histogram) if steps is None and histogram else steps
    drafts = sum(n * each for n, each in enumerate(histogram)) if accepted is None and histogram else accepted
    return Generation("t", "length", 9, 0.1, verify_steps=whole, accepted_drafts=drafts, histogram=histogram)


def of(*answers: Generation, templated: bool = True, labels: dict[str, str] = LABELS) -> Sampled:
    named = [(f"code-{number}", each) for number, each in enumerate(answers, 1)]
    return histogram_of(named, labels, block_size=8, templated=templated)


def test_steps_of_all_answers_by_number_of_drafts():
    found = of(answer(2, 1), answer(1, 0, 0, 4))
    assert [(each.labels["accepted"], each.value) for each in found.figures] == [
        ("0", 3.0),
        ("1", 1.0),
        ("2", 0.0),
        ("3", 4.0),
    ]
    assert {each.name for each in found.figures} == {"accept_histogram"}
    for each in found.figures:
        assert (each.unit, each.samples) == ("steps", 8)
        assert {name: each.labels[name] for name in LABELS} == LABELS
        assert set(each.labels) == {*LABELS, "accepted"}, "of no concurrency: it belongs to the setup"
        assert each.source == "POST /generate meta_info, sample at batch 1"
    assert found.said == "sample at batch 1: accept length 2.62 over 8 verify steps of 2 answers"


def test_without_a_chat_template_the_source_says_so():
    assert {each.source for each in of(answer(1, 1), templated=False).figures} == {
        "POST /generate meta_info, sample at batch 1, without a chat template"
    }


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ((), "the answers of /generate carry no speculative counts"),
        ((answer(),), "the answers of /generate carry no speculative counts"),
        ((answer(steps=0, accepted=0),), "0 verify steps of 1 answer"),
        (
            (answer(steps=10, accepted=12),),
            "this server sends none with dflash answers; accept length 2.20 over 10 verify steps of 1 answer",
        ),
        (
            (answer(1, 1), answer(steps=2, accepted=1)),
            "this server sends none with dflash answers; accept length 1.50 over 4 verify steps of 2 answers",
        ),
        (
            (answer(1, 1, steps=3, accepted=1),),
            "the counts cannot be true: code-1: the histogram holds 1 drafts in 2 steps, the counts say 1 in 3",
        ),
        (
            (answer(0, 0, 0, 0, 0, 0, 0, 0, 3),),
            "the counts cannot be true: code-1: 9.00 tokens a step exceed the block size 8",
        ),
    ],
)
def test_what_cannot_be_had_is_no_figure_and_is_said(answers, said):
    assert of(*answers, labels={"mode": "dflash"}) == Sampled((), f"no accept histogram: {said}")


TREE, OTHER, BASE = Configuration("ddtree", 16, 4), Configuration("ddtree", 32, 4), Configuration("baseline")


def resumed(monkeypatch: pytest.MonkeyPatch, *, serves: bool, **facts: Any) -> tuple[list[Any], TargetReport]:
    """What is sent to which configuration where every point has been measured, and what the report is then."""
    plan = (BASE, OTHER, TREE)
    service = Service(unit="s.service", runtime="r", venv="/v", model="/m")
    target = Target(host=Host(name="h"), service=service, runtime=RuntimeSpec(name="r"))
    checks = tuple(CheckResult(f"bench.{each.name}-c1", Verdict.PASS, "") for each in plan)
    written = TargetReport(target.name, "h", service.name, checks=checks, facts={"original": None, **facts})
    book = bench._Book(RunReport("bench", "1", "", targets=(written,)), lambda report: None)
    one = bench._Target(
        target, plan, bench.BenchOptions(concurrency=(1,)), book, lambda _: None, lambda _: None, Safety()
    )
    sent: list[Any] = []
    monkeypatch.setattr(one, "_runs_still", lambda configuration: serves)
    monkeypatch.setattr(one, "_configuration", lambda *given: sent.append(given))
    monkeypatch.setattr(one, "_put_back", lambda: None)
    monkeypatch.setattr(one, "_alone", nullcontext)
    monkeypatch.setattr(one, "_need_alone", lambda: None)
    one.run()
    assert one.errors == []
    return sent, one.written


STARTS = {each.name: "a" * 32 for each in (BASE, OTHER, TREE)}
TAKEN = {OTHER.name: "sample at batch 1"}


def test_killed_before_its_sample_a_start_that_serves_still_is_sent_it(monkeypatch):
    sent, _ = resumed(monkeypatch, serves=True, starts=STARTS, acceptance_samples=TAKEN)
    assert sent == [(TREE, ())]


def test_no_load_is_spent_on_a_sample_alone_and_that_is_said(monkeypatch):
    sent, written = resumed(monkeypatch, serves=False, starts=STARTS, acceptance_samples=TAKEN)
    assert sent == []
    why = "no accept histogram: the start that was measured serves no more"
    assert written.facts["acceptance_samples"] == {**TAKEN, TREE.name: why}
    assert written.figures == ()


def test_nothing_is_sent_twice_or_to_what_never_ran(monkeypatch):
    assert (
        resumed(monkeypatch, serves=True, starts=STARTS, acceptance_samples={**TAKEN, TREE.name: ""})[0] == []
    )
    assert resumed(monkeypatch, serves=True, starts={BASE.name: "b"})[0] == []


def test_a_histogram_takes_the_place_of_the_earlier_one_of_its_configuration_alone():
    def bar(configuration: Configuration, value: float, accepted: str) -> Figure:
        labels = {**configuration.labels, "accepted": accepted}
        return Figure("accept_histogram", value, "steps", "test", labels=labels)

    ready = Figure("ready", 9.0, "s", "journal", labels=TREE.labels)
    before = (bar(TREE, 1.0, "0"), bar(TREE, 2.0, "1"), bar(OTHER, 3.0, "0"), ready)
    assert bench.replaced(before, TREE, (bar(TREE, 7.0, "0"),), ()) == (
        bar(OTHER, 3.0, "0"),
        ready,
        bar(TREE, 7.0, "0"),
    )
    assert bench.replaced(before, TREE, (), ("accept_histogram",)) == (bar(OTHER, 3.0, "0"), ready)
