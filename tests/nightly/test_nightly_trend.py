"""The comparison with earlier runs, and the history itself: pure rules, and files in a folder."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import ExitCode, LockHeld
from ddtree_ops.playbook.trend import (
    Past,
    Store,
    accept_lengths,
    comparable,
    figure_results,
    new_failures,
    trend,
    with_command,
)
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.runreport import TargetReport

Make = Callable[..., Any]
STEADY = (4.20, 4.25, 4.15, 4.22, 4.18, 4.21)


@pytest.fixture
def past(figure: Make, target: Make, run: Make) -> Make:
    """``past("accept_length", 4.2, 4.3)``: one run a value; keywords are facts of each."""

    def made(name: str, *values: float | None, **facts: Any) -> Past:
        nights = [
            run(number, target(figure(name, value) if value is not None else figure("other", 1.0), **facts))
            for number, value in enumerate(values, 1)
        ]
        return Past(tuple(nights))

    return made


def by_name(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.name: result for result in results}


@pytest.mark.parametrize(
    ("name", "earlier", "now", "verdict", "words"),
    [
        ("accept_length", STEADY, 4.1, "pass", "as before: accept_length 4.1"),
        ("accept_length", STEADY, 1.0, "fail", "worse than before: accept_length 1 x against 4.205, the median of 6 runs"),
        ("accept_length", STEADY, 6.0, "pass", "better than before: accept_length 6"),
        ("output_rate", (100, 101, 99, 100, 102), 80.0, "inconclusive", "worse than before, for the first time: output_rate 80"),
        ("output_rate", (100, 101, 99, 100, 102), 50.0, "fail", "worse than before: output_rate 50"),
        ("output_rate", (100, 60, 140, 80, 120), 80.0, "pass", "as before"),  # that noisy, it is nothing new
        ("ttft", (0.1, 0.1, 0.1, 0.1, 0.1), 0.104, "pass", "as before"),  # below the least change
        ("ttft", (0.1, 0.1, 0.1, 0.1, 0.1), 0.2, "fail", "worse than before"),
        ("ttft", (0.1, 0.1, 0.1, 0.1, 0.1), 0.05, "pass", "better than before"),
        ("accept_length", STEADY[:4], 1.0, "skipped", "not compared yet: accept_length 1 x against 4.21, the median of 4 runs, too few"),
        ("accept_length", (), 1.0, "skipped", "not compared yet: accept_length 1 x, no earlier run"),
        ("ready", (), 9.0, "skipped", "not compared yet: ready 9 x, no earlier load"),
        # one odd night does not move the median
        ("accept_length", (*STEADY, 1.0), 4.2, "pass", "as before"),
    ],
)  # fmt: skip
def test_a_figure(
    past: Make,
    figure: Make,
    target: Make,
    name: str,
    earlier: tuple[float, ...],
    now: float,
    verdict: str,
    words: str,
) -> None:
    (result,) = figure_results(target(figure(name, now)), past(name, *earlier))
    assert result.name == f"trend.{name}"
    assert result.verdict.value == verdict
    assert words in result.summary
    assert (result.hint != "") == (verdict in ("fail", "inconclusive"))
    series = result.facts["series"]
    assert [one["runs"] for one in series] == [len(earlier)]
    assert [one["now"] for one in series] == [now]


def test_figures_without_a_better_way_are_not_judged(past: Make, figure: Make, target: Make) -> None:
    now = target(figure("accept_histogram", 9.0, accepted="3"), figure("unheard_of", 1.0))
    assert figure_results(now, past("accept_histogram", *([1.0] * 6))) == []


def test_series_are_told_apart_by_check_and_labels(figure: Make, target: Make, run: Make) -> None:
    def night(slow: float, fast: float) -> TargetReport:
        found: TargetReport = target(
            figure("output_rate", slow, concurrency="1"), figure("output_rate", fast, concurrency="8")
        )
        return found

    nights = Past(tuple(run(number, night(100.0, 800.0)) for number in range(1, 7)))
    (result,) = figure_results(night(100.0, 100.0), nights)
    assert result.verdict is Verdict.FAIL
    assert "[speed, concurrency 8]" in result.summary
    assert result.facts["worse"] == ["speed, concurrency 8"]
    assert result.facts["compared"] == 2
    other = replace(night(100.0, 100.0), checks=(replace(night(1.0, 1.0).checks[0], name="burst"),))
    (fresh,) = figure_results(other, nights)
    assert fresh.verdict is Verdict.SKIPPED


def test_only_runs_with_the_same_flags_count(past: Make, figure: Make, target: Make) -> None:
    earlier = past("accept_length", *STEADY, flags="other")
    now = target(figure("accept_length", 1.0))
    assert comparable(earlier, now) == ((), "6 earlier runs with other or unknown flags left out")
    (result,) = figure_results(now, earlier)
    assert result.verdict is Verdict.SKIPPED
    assert "with other or unknown flags left out" in result.summary
    unknown = past("accept_length", *STEADY, flags="")
    assert (
        figure_results(target(figure("accept_length", 1.0), flags=""), unknown)[0].verdict is Verdict.SKIPPED
    )


def test_another_release_is_compared_and_said(past: Make, figure: Make, target: Make) -> None:
    now = target(figure("accept_length", 3.0), release="r2" * 8)
    (result,) = figure_results(now, past("accept_length", *STEADY))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "the release changed since the last run: r1r1r1r1r1r1 -> r2r2r2r2r2r2" in result.summary


def test_once_there_are_enough_runs_of_a_release_only_they_count(
    past: Make, figure: Make, target: Make
) -> None:
    old, new = past("accept_length", *STEADY), past("accept_length", *([3.0] * 5), release="r2" * 8)
    both = Past((*old.runs, *new.runs))
    (result,) = figure_results(target(figure("accept_length", 3.0), release="r2" * 8), both)
    assert result.verdict is Verdict.PASS
    assert "5 runs of release r2r2r2r2r2r2, the others of another one" in result.summary
    few = Past((*old.runs, *new.runs[:1]))
    (result,) = figure_results(target(figure("accept_length", 3.0), release="r2" * 8), few)
    assert result.verdict is Verdict.INCONCLUSIVE


def test_a_run_whose_figure_was_worse_is_no_measure_for_later_ones(
    past: Make, figure: Make, target: Make
) -> None:
    earlier = past("accept_length", *STEADY, *([1.0] * 14))
    spoilt = []
    for number, night in enumerate(earlier.runs):
        (found,) = night.targets
        if number >= len(STEADY):
            judged = CheckResult("trend.accept_length", Verdict.FAIL, "worse")
            found = replace(found, checks=(*found.checks, judged))
        spoilt.append(replace(night, targets=(found,)))
    now = target(figure("accept_length", 1.0))
    assert figure_results(now, earlier)[0].verdict is Verdict.PASS
    assert figure_results(now, Past(tuple(spoilt)))[0].verdict is Verdict.FAIL


def _nights(
    run: Make, target: Make, figures: Callable[[float], list[Any]], *values: float, **facts: Any
) -> list[tuple[str, str]]:
    """Verdict and summary of each night's first figure result, each compared with those before it."""
    nights: list[Any] = []
    found: list[tuple[str, str]] = []
    for number, value in enumerate(values, 1):
        now = target(*figures(value), **facts)
        results = figure_results(now, Past(tuple(nights)))
        found.append((results[0].verdict.value, results[0].summary))
        nights.append(run(number, replace(now, checks=(*now.checks, *results))))
    return found


def test_worse_once_is_inconclusive_and_twice_running_fails(figure: Make, target: Make, run: Make) -> None:
    def rate(value: float) -> list[Any]:
        return [figure("output_rate", value)]

    steady = (100.0, 101.0, 99.0, 100.0, 102.0, 98.0)
    nights = _nights(run, target, rate, *steady, 80.0, 80.0, 80.0, 100.0, 80.0, 50.0, 100.0, 50.0)
    verdicts = [verdict for verdict, _ in nights]
    assert verdicts[:5] == ["skipped"] * 5
    assert verdicts[5:] == [
        "pass", "inconclusive", "fail", "fail", "pass", "inconclusive", "fail", "pass", "fail",
    ]  # fmt: skip
    assert nights[6][1].startswith("worse than before, for the first time: output_rate 80 x against 100")
    assert nights[7][1].startswith("worse than before: output_rate 80 x against 100, the median of 6 runs")


def test_only_the_series_that_was_worse_is_no_measure(figure: Make, target: Make, run: Make) -> None:
    def two(value: float) -> list[Any]:
        return [
            figure("output_rate", value, concurrency="1"),
            figure("output_rate", 100.0, concurrency="8"),
        ]

    nights: list[Any] = []
    for number, value in enumerate([100.0] * 5 + [40.0, 100.0], 1):
        now = target(*two(value))
        results = figure_results(now, Past(tuple(nights)))
        nights.append(run(number, replace(now, checks=(*now.checks, *results))))
    assert [one["runs"] for one in results[0].facts["series"]] == [5, 6]
    assert results[0].verdict is Verdict.PASS


def test_a_slow_load_is_judged_once_a_start_and_stays_failed(figure: Make, target: Make, run: Make) -> None:
    def judged(slow: float) -> list[str]:
        nights: list[Any] = []
        found = []
        for number in range(1, 9):
            start = f"i{min(number, 7)}"
            now = replace(target(invocation=start), figures=(figure("ready", slow if number > 6 else 600.0),))
            results = figure_results(now, Past(tuple(nights)))
            found.append(results[0].verdict.value)
            nights.append(run(number, replace(now, checks=tuple(results))))
        return found[5:]

    assert judged(700.0) == ["pass", "inconclusive", "skipped"]
    assert judged(1200.0) == ["pass", "fail", "fail"]
    assert judged(600.0) == ["pass", "pass", "skipped"]


def test_the_same_start_is_no_earlier_value(figure: Make, target: Make, run: Make) -> None:
    def night(seconds: float, start: str) -> Any:
        return replace(target(invocation=start), figures=(figure("ready", seconds),))

    nights = [run(number, night(600.0, f"i{number}")) for number in range(1, 6)]
    nights.append(run(6, night(900.0, "now")))
    (result,) = figure_results(night(900.0, "now"), Past(tuple(nights)))
    assert result.facts["series"][0]["runs"] == 5


def test_tails_single_requests_and_counts_are_shown_and_not_judged(
    figure: Make, target: Make, run: Make
) -> None:
    tail = figure("ttft", 0.1, stat="p99")
    single = replace(figure("latency", 0.1), samples=1)
    nights = Past(tuple(run(number, target(tail, single)) for number in range(1, 10)))
    later = target(replace(tail, value=9.0), replace(single, value=9.0))
    for result in figure_results(later, nights):
        assert result.verdict is Verdict.SKIPPED
        assert result.summary.startswith("not judged: ")
        assert "9 x against 0.1, the median of 9 runs" in result.summary
    names = ("burst_mismatch", "failed_requests", "lossless_mismatches", "lossless_near_ties")
    clean = Past(tuple(run(n, target(*(figure(name, 0.0) for name in names))) for n in range(1, 15)))
    assert figure_results(target(*(figure(name, 3.0) for name in names)), clean) == []


def test_what_was_always_zero_is_not_called_worse(past: Make, figure: Make, target: Make) -> None:
    (result,) = figure_results(target(figure("host_memory", 1.0)), past("host_memory", *([0.0] * 14)))
    assert (result.verdict, result.facts["worse"]) == (Verdict.SKIPPED, [])
    assert "there is no scale to judge by" in result.summary


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_said_by_name(past: Make, figure: Make, target: Make, value: float) -> None:
    (result,) = trend(target(figure("accept_length", value)), past("accept_length", *STEADY))[:-1]
    assert (result.name, result.verdict) == ("trend.accept_length", Verdict.INCONCLUSIVE)
    assert result.summary == f"speed: accept_length is {value}, and that is no number"
    (later,) = figure_results(target(figure("accept_length", 4.2)), past("accept_length", *STEADY, value))
    assert (later.verdict, later.facts["series"][0]["runs"]) == (Verdict.PASS, 6)


def test_many_series_at_once_are_allowed_more_noise(figure: Make, target: Make, run: Make) -> None:
    def night(value: float, others: int) -> Any:
        more = [figure("output_rate", 100.0, concurrency=str(number)) for number in range(others)]
        return target(figure("accept_length", value), *more)

    noisy = (100.0, 104.0, 96.0, 100.0, 104.0, 96.0)  # noise reaches 24.8 for one series
    for others, verdict in ((0, "inconclusive"), (39, "pass")):
        nights = Past(tuple(run(number, night(value, others)) for number, value in enumerate(noisy, 1)))
        found = by_name(figure_results(night(70.0, others), nights))
        assert found["trend.accept_length"].verdict.value == verdict


def test_accept_lengths_for_the_check(run: Make, target: Make, figure: Make) -> None:
    def night(value: float, **facts: Any) -> Any:
        return target(
            figure("accept_length", value),
            figure("accept_length", 9.0, prompt="code"),
            check="acceptance",
            **facts,
        )

    nights = [run(number, night(float(number))) for number in range(1, 4)]
    nights.append(run(4, night(4.0, flags="other")))
    spoilt = night(5.0)
    judged = CheckResult("trend.accept_length", Verdict.FAIL, "worse")
    nights.append(run(5, replace(spoilt, checks=(*spoilt.checks, judged))))
    found = accept_lengths(target(), Past(tuple(nights)))
    assert [(one.name, one.value, dict(one.labels)) for one in found] == [
        ("accept_length", value, {}) for value in (1.0, 2.0, 3.0)
    ]
    later = [run(number, night(float(number), release="r2" * 8)) for number in range(6, 11)]
    found = accept_lengths(target(release="r2" * 8), Past((*nights, *later)))
    assert [one.value for one in found] == [6.0, 7.0, 8.0, 9.0, 10.0]


def test_a_load_counts_once_however_often_it_was_looked_at(figure: Make, target: Make, run: Make) -> None:
    def night(seconds: float, invocation: str) -> TargetReport:
        found: TargetReport = replace(target(invocation=invocation), figures=(figure("ready", seconds),))
        return found

    nights = [run(number, night(600.0, "same")) for number in range(1, 10)]
    (result,) = figure_results(night(900.0, "new"), Past(tuple(nights)))
    assert result.verdict is Verdict.SKIPPED
    assert result.facts["series"][0]["runs"] == 1
    nights = [run(number, night(600.0 + number, f"start {number}")) for number in range(1, 10)]
    (result,) = figure_results(night(900.0, "new"), Past(tuple(nights)))
    assert result.verdict is Verdict.FAIL


def test_a_longer_load_names_its_phases(figure: Make, target: Make, run: Make) -> None:
    def night(number: int, weights: float, graphs: float) -> TargetReport:
        phases = {"weights": weights, "graphs": graphs}
        figures = [figure("load_phase", value, "s", phase=name) for name, value in phases.items()]
        found: TargetReport = replace(
            target(invocation=f"i{number}"), figures=(figure("ready", weights + graphs, "s"), *figures)
        )
        return found

    nights = Past(tuple(run(number, night(number, 300.0, 60.0)) for number in range(1, 7)))
    (result,) = figure_results(night(9, 900.0, 60.0), nights)
    assert result.verdict is Verdict.FAIL
    assert [one.text for one in result.evidence][1:] == ["phase weights: 900 s against 300"]


def test_a_figure_that_is_gone_is_not_passed_over(past: Make, figure: Make, target: Make) -> None:
    earlier = past("accept_length", *STEADY)
    (result,) = figure_results(target(figure("other", 1.0)), earlier)
    assert (result.name, result.verdict) == ("trend.accept_length", Verdict.INCONCLUSIVE)
    assert result.summary == "not measured now, and it was in the run before: speed"
    assert figure_results(target(figure("other", 1.0), check="another"), earlier) == []
    none = target(figure("accept_length", None))
    assert figure_results(none, earlier)[0].verdict is Verdict.INCONCLUSIVE


def test_a_run_of_some_checks_lacks_no_figure_of_a_run_of_all(figure: Make, target: Make, run: Make) -> None:
    def night(*names: str, size: float | None = None) -> TargetReport:
        found: TargetReport = target(invocation="i2")
        checks = [CheckResult(name, Verdict.PASS, "passed") for name in names]
        figures = () if size is None else (figure("host_memory", size, "GB"),)
        return replace(found, checks=(*checks, CheckResult("memory", Verdict.PASS, "held", figures=figures)))

    whole, short = night("short-chat", "stop", size=1.0), night("stop")
    assert figure_results(short, Past((run(1, whole),))) == []
    lacking = night("short-chat", "stop")
    (gone,) = figure_results(lacking, Past((run(1, whole), run(2, short))))
    assert (gone.name, gone.verdict) == ("trend.host_memory", Verdict.INCONCLUSIVE)
    assert gone.hint == "ddtree-ops validate h", "a standing check asks nothing itself"
    asking = replace(whole, checks=(CheckResult("burst", Verdict.PASS, "", figures=(figure("ttft", 1.0),)),))
    bare = replace(whole, checks=(CheckResult("burst", Verdict.PASS, ""),))
    (gone,) = figure_results(bare, Past((run(1, asking),)))
    assert gone.hint == "ddtree-ops validate h --check burst"


# ------------------------------------------------------------------------------------------------ failures


def diagnosed(target: TargetReport, *found: tuple[str, str], read: bool = True) -> TargetReport:
    items = [
        {
            "fingerprint": fingerprint,
            "severity": severity,
            "signature": f"sig-{fingerprint}",
            "title": "a title",
            "remedy": "mend it",
            "first": "",
            "evidence": [{"line": 1, "text": "the line"}],
        }
        for fingerprint, severity in found
    ]
    return replace(target, diagnoses=({"source": "h", "diagnoses": items},) if read else ())


@pytest.mark.parametrize(
    ("earlier", "now", "verdict", "words"),
    [
        ([], [("a", "fatal")], "skipped", "no earlier run: 1 failure noted for the next one"),
        ([[]], [], "pass", "no signature of a failure in the journal; 1 earlier run to compare with"),
        ([[("a", "fatal")], []], [("a", "fatal")], "pass", "nothing new: 1 failure seen before in 2 earlier runs"),
        ([[("a", "fatal")]], [("b", "fatal")], "fail", "new fatal failure, in none of 1 earlier run: sig-b: a title"),
        ([[]], [("b", "degraded")], "inconclusive", "new degraded failure"),
        ([[]], [("b", "request")], "pass", "new request failure"),
        ([[]], [("b", "request"), ("c", "degraded"), ("d", "fatal")], "fail", "new fatal failure, in none of 1 earlier run: sig-d: a title and 2 more"),
    ],
)  # fmt: skip
def test_new_failures(target: Make, run: Make, earlier: Any, now: Any, verdict: str, words: str) -> None:
    nights = [run(number, diagnosed(target(), *found)) for number, found in enumerate(earlier, 1)]
    result = new_failures(diagnosed(target(), *now), Past(tuple(nights)))
    assert result.verdict.value == verdict
    assert result.summary.startswith(words)
    bad = result.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)
    assert result.hint == ("mend it; ddtree-ops diagnose h" if bad else "")


def test_a_remedy_has_something_to_type() -> None:
    assert with_command("", "h") == "ddtree-ops diagnose h"
    assert with_command("take less: ddtree-ops deploy h", "h") == "take less: ddtree-ops deploy h"


def test_runs_that_read_no_journal_know_no_failures(target: Make, run: Make) -> None:
    nights = Past((run(1, diagnosed(target(), read=False)),))
    assert new_failures(diagnosed(target(), ("a", "fatal")), nights).verdict is Verdict.SKIPPED
    assert new_failures(diagnosed(target(), read=False), nights).verdict is Verdict.SKIPPED


# ------------------------------------------------------------------------------------------------ the history


def test_what_is_kept_is_read_back_oldest_first(
    tmp_path: Path, figure: Make, target: Make, run: Make
) -> None:
    store = Store(tmp_path, "production")
    nights = [run(number, target(figure("ready", float(number)))) for number in (2, 1, 3)]
    paths = [store.add(night) for night in nights]
    assert paths[0] == tmp_path / "production" / "h" / "s" / f"{nights[0].id}.json"
    found = store.past("h", "s")
    assert found.damaged == ()
    assert list(found.runs) == sorted(nights, key=lambda night: night.id)
    assert found.latest == nights[2].targets[0]
    assert store.past("h", "other") == Past()
    assert Store(tmp_path, "lab").past("h", "s") == Past()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not JSON"),
        ('{"schema": 1', "JSON"),
        ("[]", "no report"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1, "command": "nightly"}', "no report of schema 1"),
        (b"\xff\xfe\x00", "JSON"),
    ],
)
def test_a_damaged_file_is_named_and_left_out(
    tmp_path: Path, figure: Make, target: Make, run: Make, text: str | bytes, why: str
) -> None:
    store = Store(tmp_path, "lab")
    good = run(1, target(figure("ready", 1.0)))
    bad = store.add(good).with_name("20261105T000000Z-dead.json")
    bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = store.past("h", "s")
    assert found.runs == (good,)
    (line,) = found.damaged
    assert line.startswith(f"{bad}: ")
    assert why in line
    told = by_name(trend(good.targets[0], found))["trend.history"]
    assert told.verdict is Verdict.INCONCLUSIVE
    assert told.evidence[0].text == line


def test_a_file_of_several_targets_is_no_history(
    tmp_path: Path, figure: Make, target: Make, run: Make
) -> None:
    store = Store(tmp_path, "lab")
    good = run(1, target(figure("ready", 1.0)))
    path = store.add(good)
    document = json.loads(path.read_text())
    document["targets"] *= 2
    path.write_text(json.dumps(document))
    assert "2 targets" in store.past("h", "s").damaged[0]


def test_what_a_kill_left_half_written_is_not_read(
    tmp_path: Path, figure: Make, target: Make, run: Make
) -> None:
    store = Store(tmp_path, "lab")
    path = store.add(run(1, target(figure("ready", 1.0))))
    (path.parent / f".{path.name}-x7a").write_text('{"schema"')
    assert store.past("h", "s").damaged == ()


def test_a_new_baseline_hides_what_came_before(tmp_path: Path, figure: Make, target: Make, run: Make) -> None:
    store = Store(tmp_path, "lab")
    for number in range(1, 5):
        store.add(run(number, target(figure("ready", 1.0)), new_baseline=number == 3))
    assert [night.id[6:8] for night in store.past("h", "s").runs] == ["03", "04"]


def test_names_of_hosts_make_no_other_folders(tmp_path: Path) -> None:
    folder = Store(tmp_path, "../../x y").folder("a/../../b", "s")
    assert tmp_path in folder.parents
    assert ".." not in folder.parts


# ------------------------------------------------------------------------------------------------ the lock


def _hold(root: Path, ready: Any) -> None:
    with Store(root, "lab").lock(["b", "a"]):
        ready.set()
        signal.pause()


def test_a_second_run_over_the_same_host_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    try:
        assert ready.wait(30)
        with pytest.raises(LockHeld) as caught, Store(tmp_path, "production").lock(["c", "b"]):
            pass
        assert caught.value.exit_code is ExitCode.LOCK_HELD
        assert (
            caught.value.message
            == f"another nightly is under way on b (process {holder.pid} of this machine)"
        )
        with Store(tmp_path, "lab").lock(["c"]):
            pass
    finally:
        os.kill(holder.pid or 0, signal.SIGKILL)
        holder.join()
    with Store(tmp_path, "lab").lock(["a", "b"]):
        pass
