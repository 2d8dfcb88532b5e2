"""Which points a bench measures, in which order, what is left of them, and what they say of each other."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.checks.bench.points import (
    Configuration,
    Point,
    configurations,
    matches,
    missing,
    ordered,
    recommended,
    with_speedups,
)
from ddtree_ops.errors import UsageError
from ddtree_ops.inventory import override
from ddtree_ops.inventory.models import Health, Host, RuntimeSpec, Service, Speculative, Target
from ddtree_ops.playbook.bench import BenchOptions, differences, starts_needed
from ddtree_ops.results import CheckResult, Figure, Verdict
from ddtree_ops.runreport import RunReport, TargetReport, figures_named

TREE = Speculative(budget=32, topk_cap=8)
TREE_16 = Configuration("ddtree", 16, 4)


def service(speculative: Speculative | None = TREE, **more: Any) -> Service:
    return Service(
        name="s",
        unit="s.service",
        runtime="r",
        venv="/v",
        model="/m",
        drafter="/d",
        speculative=speculative,
        **more,
    )


def target(one: Service) -> Target:
    return Target(host=Host(name="h", services={"s": one}), service=one, runtime=RuntimeSpec(name="r"))


def point(name: str, concurrency: int, rate: float | None, verdict: Verdict = Verdict.PASS) -> CheckResult:
    labels = {"mode": name.partition("-")[0], "concurrency": str(concurrency)}
    figure = Figure("output_rate", rate, "tokens/s", "test", 8, labels=labels)
    return CheckResult(f"bench.{name}-c{concurrency}", verdict, "", figures=(figure,))


class TestGrid:
    def test_baseline_and_dflash_come_first_then_every_budget_with_every_topk(self):
        found = configurations(service(), budgets=(8, 16), topk=(4, 8))
        assert [each.name for each in found] == [
            "baseline",
            "dflash",
            "ddtree-b8-k4",
            "ddtree-b8-k8",
            "ddtree-b16-k4",
            "ddtree-b16-k8",
        ]

    def test_left_out_they_are_those_of_the_service(self):
        found = configurations(service(), baseline=False, dflash=False)
        assert found == (Configuration("ddtree", 32, 8),)
        own = service(Speculative(budget=20))
        assert configurations(own, topk=(2,))[-1] == Configuration("ddtree", 20, 2)
        assert configurations(own)[-1].name == "ddtree-b20"

    def test_the_same_twice_is_measured_once(self):
        assert len(configurations(service(), budgets=(8, 8), baseline=False, dflash=False)) == 1

    def test_a_service_without_speculation_has_a_baseline_and_nothing_else(self):
        assert configurations(service(None)) == (Configuration("baseline"),)
        with pytest.raises(UsageError, match="no speculative decoding"):
            configurations(service(None), budgets=(8,))
        with pytest.raises(UsageError, match="nothing is left"):
            configurations(service(None), baseline=False)

    def test_a_budget_that_cannot_hold_a_draft_is_refused_as_lint_does(self):
        with pytest.raises(UsageError, match="--budgets 4,6: less than block_size - 1 = 7"):
            configurations(service(), budgets=(4, 6, 7), topk=(4, 8))
        assert len(configurations(service(), budgets=(7,))) == 3

    def test_names_and_labels_hold_only_what_applies(self):
        assert Point(TREE_16, 8).name == "bench.ddtree-b16-k4-c8"
        assert Point(TREE_16, 8).labels == {"mode": "ddtree", "budget": "16", "topk": "4", "concurrency": "8"}
        assert Point(Configuration("baseline"), 1).labels == {"mode": "baseline", "concurrency": "1"}


class TestSettings:
    @pytest.mark.parametrize(
        ("configuration", "expected"),
        [
            (Configuration("baseline"), None),
            (Configuration("dflash"), Speculative(algorithm="DFLASH")),
            (TREE_16, Speculative(budget=16, topk_cap=4, budget_schedule="fixed")),
        ],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_they_make_the_service_that_configuration(self, configuration, expected):
        one = service(
            Speculative(budget=32, topk_cap=8, budget_schedule="fixed"),
            args={"speculative-draft-attention-backend": "triton"},
            health=Health(min_accept_length=1.8),
        )
        made = override(target(one), configuration.settings(one)).service
        assert made.speculative == expected
        assert matches(configuration, made)
        assert not matches(configuration, one)
        assert made.health.min_accept_length is None, "a point below the floor is a result"
        assert ("speculative-draft-attention-backend" in made.args) == (expected is not None)

    def test_what_is_only_measured_need_not_gain_anything_and_the_services_own_keeps_its_rules(self):
        one = service(health=Health(min_accept_length=1.8))
        for each in configurations(one, budgets=(32, 16), topk=(8, 4)):
            health = override(target(one), each.settings(one)).service.health
            own = each == Configuration("ddtree", 32, 8)
            assert health == (one.health if own else Health(judge_speculation=False)), each.name

    def test_from_dflash_to_a_tree_and_back(self):
        one = service(Speculative(algorithm="DFLASH"))
        made = override(target(one), TREE_16.settings(one)).service
        assert matches(TREE_16, made)
        assert matches(Configuration("dflash"), one)

    def test_there_is_no_tree_without_speculation(self):
        with pytest.raises(UsageError, match="no speculative"):
            TREE_16.settings(service(None))

    def test_what_serves_afterwards_comes_last(self):
        found = configurations(service(), budgets=(32, 16), topk=(8,))
        assert [each.name for each in ordered(found, service())] == [
            "baseline",
            "dflash",
            "ddtree-b16-k8",
            "ddtree-b32-k8",
        ]


class TestResume:
    def test_what_is_judged_is_not_measured_again_what_is_inconclusive_is(self):
        done = [
            point("ddtree-b16-k4", 1, 9.0),
            point("ddtree-b16-k4", 8, None, Verdict.FAIL),
            point("ddtree-b16-k4", 32, None, Verdict.INCONCLUSIVE),
        ]
        left = missing(TREE_16, (1, 8, 32, 64), done)
        assert [each.concurrency for each in left] == [32, 64]

    def test_only_configurations_with_a_missing_point_are_started(self):
        options = BenchOptions(budgets=(16,), topk=(4,), concurrency=(1,), dflash=False)
        here = target(service())
        done = TargetReport("h", "h", "s", checks=(point("baseline", 1, 9.0),))
        assert [each.name for each in starts_needed([here], options)["h"]] == ["baseline", "ddtree-b16-k4"]
        resumed = RunReport("bench", "i", "t", targets=(done,))
        assert [each.name for each in starts_needed([here], options, resumed)["h"]] == ["ddtree-b16-k4"]

    def test_other_options_prompts_or_settings_are_told_apart(self):
        here = target(service())
        before = BenchOptions(budgets=(16,)).to_json([here])
        assert differences(before, BenchOptions(budgets=(16,)).to_json([here])) == ()
        other = target(service(Speculative(budget=33)))
        now = BenchOptions(budgets=(16, 32), prompts=("x",), requests=8).to_json([other])
        assert differences(before, now) == (
            "budgets: 16, and now 16,32",
            "requests: 32, and now 8",
            "prompts: other ones",
            "h: the inventory (or --set) says something else of it now",
        )
        assert differences({}, {"requests": 8}) == ("requests: None, and now 8",)

    def test_it_survives_json(self):
        import json

        options = BenchOptions().to_json([target(service())])
        assert differences(json.loads(json.dumps(options)), options) == ()


class TestSpeedup:
    def test_it_is_the_ratio_to_the_baseline_at_the_same_concurrency(self):
        found = with_speedups(
            [
                point("baseline", 1, 100.0),
                point("baseline", 8, 400.0),
                point("ddtree-b16-k4", 1, 215.0),
                point("ddtree-b16-k4", 8, 300.0),
            ]
        )
        values = [figures_named(each.figures, "speedup") for each in found]
        assert [each[0].value if each else None for each in values] == [None, None, 2.15, 0.75]
        (speedup,) = values[2]
        assert (speedup.unit, speedup.samples) == ("ratio", 8)
        assert speedup.labels == {"mode": "ddtree", "concurrency": "1"}

    @pytest.mark.parametrize(
        "baseline",
        [
            None,
            point("baseline", 8, 100.0),
            point("baseline", 1, None),
            point("baseline", 1, 0.0),
            point("baseline", 1, 100.0, Verdict.FAIL),
        ],
    )
    def test_without_a_baseline_there_is_none(self, baseline):
        (*_, found) = with_speedups([*filter(None, [baseline]), point("dflash", 1, 215.0)])
        assert figures_named(found.figures, "speedup") == []

    def test_a_point_that_failed_has_none(self):
        (*_, found) = with_speedups([point("baseline", 1, 9.0), point("dflash", 1, 9.0, Verdict.FAIL)])
        assert figures_named(found.figures, "speedup") == []

    def test_a_second_time_it_is_computed_anew(self):
        once = with_speedups([point("baseline", 1, 100.0), point("dflash", 1, 200.0)])
        twice = with_speedups([point("baseline", 1, 50.0), *once[1:]])
        assert [figure.value for figure in figures_named(twice[1].figures, "speedup")] == [4.0]

    def test_the_fastest_that_passed_is_recommended_for_each_concurrency(self):
        checks = [
            point("baseline", 32, 900.0),
            point("ddtree-b16-k4", 32, 800.0),
            point("ddtree-b32-k4", 8, 500.0),
            point("ddtree-b16-k4", 8, 501.0),
            point("ddtree-b64-k4", 8, 9000.0, Verdict.FAIL),
            point("ddtree-b16-k4", 1, 100.0),
            point("ddtree-b32-k4", 1, None),
        ]
        assert recommended(checks) == {"8": "ddtree-b16-k4", "32": "baseline"}
        assert list(recommended(checks)) == ["8", "32"], "one alone is faster than nothing"
        assert recommended([point("dflash", 1, None)]) == {}
