"""A report in a directory and back, its schema, the figures that docs name, two runs compared, and a run on a terminal."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from rich.console import Console
from run_samples import bench_run, partial_run, validate_run

from ddtree_ops import figurenames
from ddtree_ops.errors import ConfigError, OpsError, UsageError
from ddtree_ops.figurenames import FIGURES, higher_is_better, meaning_of
from ddtree_ops.report.clean import clean
from ddtree_ops.report.compare import (
    Change,
    Comparison,
    Judgement,
    compare_reports,
    compare_targets,
    comparison_html,
    print_comparison,
)
from ddtree_ops.report.points import columns_of, in_order, points_of, shown
from ddtree_ops.report.run_terminal import print_run
from ddtree_ops.report.schema import report_schema
from ddtree_ops.report.write import json_text, own_folder, read_report, write_file, write_report
from ddtree_ops.results import CheckResult, Evidence, Figure, Verdict
from ddtree_ops.runreport import RunReport, TargetReport

DOCS = Path(__file__).parents[2] / "docs"
SAMPLES = pytest.mark.parametrize("make", [validate_run, bench_run, partial_run])


@SAMPLES
def test_a_report_comes_back_as_it_was_written(make: Callable[[], RunReport], tmp_path: Path) -> None:
    written = write_report(make(), tmp_path / "new" / "run")
    assert read_report(tmp_path / "new" / "run") == read_report(written[0]) == clean(make())
    names = ["report.json", "junit.xml", "report.html", "summary.md", "annotations.txt", "metrics.prom"]
    assert [path.name for path in written] == [*names, *(["points.csv"] if make is not validate_run else [])]
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(path.name for path in written)
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in written)


def test_a_report_is_replaced_whole(tmp_path: Path) -> None:
    write_report(partial_run(), tmp_path)
    with (tmp_path / "report.json").open() as old:
        write_report(bench_run(), tmp_path)
        assert json.load(old)["complete"] is False
    assert read_report(tmp_path).complete


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(OpsError, match="cannot be written: ") as caught:
        write_report(partial_run(), tmp_path / "file")
    assert "still there" in caught.value.state
    (tmp_path / "folder" / "x").mkdir(parents=True)
    with pytest.raises(OpsError, match="cannot be written: "):
        write_file(tmp_path / "folder", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def damaged(**changes: Any) -> str:
    return json.dumps({**partial_run().to_json(), **changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is not JSON"),
        ('{"schema": 1,', "it is not JSON"),
        ("\0\0\0", "it is not JSON"),
        ("[" * 200_000, "it is not JSON"),
        ("[]", "is no report of a run"),
        ("{}", "is no report of a run"),
        (damaged(schema=2, version="9.1"), "is of schema 2, and this version reads schema 1"),
        (damaged(schema="1"), "is of schema '1'"),
        ('{"schema": 1}', "targets: missing"),
        (damaged(targets=[{}]), "targets.0.checks: missing"),
        (damaged(started=3), "started: input should be a valid string"),
        (damaged(complete="yes"), "complete: input should be a valid boolean"),
        (damaged(targets=3), "targets: input should be a valid array"),
    ],
)
def test_a_damaged_report_is_refused_with_the_place(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_report(tmp_path)
    assert said in caught.value.render()
    assert str(tmp_path / "report.json") in caught.value.message
    assert caught.value.hint


def test_damage_deep_inside_is_found(tmp_path: Path) -> None:
    document = validate_run().to_json()
    document["targets"][0]["checks"][1]["verdict"] = "perfect"
    document["targets"][0]["figures"][2]["value"] = "fast"
    (tmp_path / "r.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError) as caught:
        read_report(tmp_path / "r.json")
    places = " ".join(caught.value.details)
    assert "targets.0.checks.1.verdict: " in places
    assert "targets.0.figures.2.value: " in places


def test_fields_of_later_versions_are_borne(tmp_path: Path) -> None:
    document = {**partial_run().to_json(), "mood": "good"}
    document["targets"][0]["figures"][0]["mood"] = "good"
    (tmp_path / "r.json").write_text(json.dumps(document))
    assert read_report(tmp_path / "r.json") == partial_run()


def test_no_report_is_a_wrong_command_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"report\.json: there is no such report"):
        read_report(tmp_path)


class TestSchema:
    """``docs/report.schema.json`` is what the classes say, and real reports keep to it."""

    def test_the_file_is_up_to_date(self) -> None:
        said = json.loads((DOCS / "report.schema.json").read_text("utf-8"))
        assert said == report_schema(), "python -m ddtree_ops.report.schema > docs/report.schema.json"

    @SAMPLES
    def test_real_reports_keep_to_it(self, make: Callable[[], RunReport]) -> None:
        schema = report_schema()
        Draft202012Validator.check_schema(schema)
        Draft202012Validator(schema).validate(json.loads(json_text(make())))

    @pytest.mark.parametrize(
        "change",
        [
            {"schema": 2},
            {"verdict": "good"},
            {"targets": [{}]},
            {"targets": None},
            {"complete": 1},
        ],
    )
    def test_others_do_not(self, change: dict[str, Any]) -> None:
        document = {**partial_run().to_json(), **change}
        assert not Draft202012Validator(report_schema()).is_valid(document)

    def test_every_field_is_in_the_docs(self) -> None:
        page = (DOCS / "reports.md").read_text("utf-8")
        tables = page.partition("## report.json")[2].partition("## Figures")[0]
        named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", tables, re.MULTILINE))))
        schema = report_schema()
        parts = [
            schema,
            *(part for name, part in schema["$defs"].items() if name not in ("Verdict", "Evidence")),
        ]
        assert {name for part in parts for name in part["properties"]} <= named
        assert all(f"`{name}`" in tables for name in schema["$defs"]["Evidence"]["properties"])


class TestFigureNames:
    """The table of figures."""

    def test_the_docs_hold_the_same_table(self) -> None:
        table = (DOCS / "reports.md").read_text("utf-8").partition("| name | unit |")[2].partition("\n\n")[0]
        rows = [
            tuple(cell.strip() for cell in row.strip("| ").split(" | ")) for row in table.splitlines()[2:]
        ]
        words = {True: "higher", False: "lower", None: "neither"}
        assert rows == [
            (f"`{name}`", known.unit, words[known.higher_is_better], known.meaning)
            for name, known in FIGURES.items()
        ]

    def test_names_and_meanings_are_well_formed(self) -> None:
        for name, known in FIGURES.items():
            assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
            assert known.unit
            assert known.meaning
            assert not known.meaning.endswith(".")
            assert "|" not in known.meaning

    def test_what_is_not_known(self) -> None:
        assert (higher_is_better("mood"), meaning_of("mood")) == (None, "")
        assert (higher_is_better("ttft"), higher_is_better("speedup")) == (False, True)

    def test_samples_use_the_units_of_the_table(self) -> None:
        for run in (validate_run(), bench_run()):
            for target in run.targets:
                for figure in target.all_figures:
                    assert figure.unit == figurenames.FIGURES[figure.name].unit


class TestPoints:
    """Bench points out of figures."""

    def test_figures_of_a_setup_are_in_each_of_its_points(self) -> None:
        points = points_of(bench_run().targets[0])
        assert [(each.setup, each.concurrency) for each in points[:5]] == [
            ("baseline", "1"),
            ("baseline", "8"),
            ("baseline", "32"),
            ("dflash", "1"),
            ("dflash", "8"),
        ]
        assert [each.value("restart") for each in points[:4]] == [402, 402, 402, 403]
        assert points[0].value("speedup") is None
        assert columns_of(points)["ttft_p99"] == "s"

    def test_numbers_are_in_order_and_words_after_them(self) -> None:
        figures = [
            Figure("output_rate", 1.0, "tokens/s", "", labels={"mode": mode, "concurrency": load})
            for mode in ("other", "ddtree", "baseline")
            for load in ("32", "many", "8", "nan")
        ]
        points = points_of(TargetReport("h", "h", "", figures=tuple(figures)))
        assert [each.mode for each in points[::4]] == ["baseline", "ddtree", "other"]
        assert [each.concurrency for each in points[:4]] == ["8", "32", "many", "nan"]

    def test_a_setup_without_load_is_a_point_by_itself(self) -> None:
        figure = Figure("ready", 3.0, "s", "", labels={"mode": "dflash"})
        (point,) = points_of(TargetReport("h", "h", "", figures=(figure,)))
        assert (point.concurrency, point.value("ready")) == ("", 3.0)

    def test_names_that_are_not_known_come_last(self) -> None:
        figures = [Figure(name, 1.0, "s", "") for name in ("zeal", "ttft", "mood", "ready")]
        assert [each.name for each in in_order(figures)] == ["ready", "ttft", "mood", "zeal"]

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (None, "-"),
            (math.nan, "-"),
            (131072.0, "131072"),
            (0.00335, "0.00335"),
            (303.14159, "303.1"),
            (12345.6, "12346"),
            (0.0, "0"),
            (-1.5, "-1.5"),
        ],
    )
    def test_values(self, value: float | None, text: str) -> None:
        assert shown(value) == text


def change(
    name: str,
    first: float | None,
    second: float | None,
    spread: float | None = None,
    units: tuple[str, str] = ("s", "s"),
    samples: int = 32,
    **labels: str,
) -> Change:
    return Change(
        "h",
        Figure(name, first, units[0], "", samples, spread, labels),
        Figure(name, second, units[1], "", samples, labels=labels),
    )


class TestComparison:
    """Two runs side by side."""

    @pytest.mark.parametrize(
        ("found", "judgement"),
        [
            (change("ttft", 1.0, 1.2), Judgement.WORSE),
            (change("ttft", 1.0, 0.8), Judgement.BETTER),
            (change("output_rate", 100.0, 80.0), Judgement.WORSE),
            (change("output_rate", 100.0, 120.0), Judgement.BETTER),
            (change("output_rate", 100.0, 104.9), Judgement.SAME),
            (change("output_rate", 100.0, 80.0, spread=7.0), Judgement.SAME),
            (change("output_rate", 100.0, 80.0, spread=6.0), Judgement.WORSE),
            (change("failed_requests", 0.0, 1.0), Judgement.WORSE),
            (change("failed_requests", 0.0, 0.0), Judgement.SAME),
            (change("accept_histogram", 10.0, 20.0), Judgement.NEUTRAL),
            (change("mood", 10.0, 20.0), Judgement.NEUTRAL),
            (change("gpu_memory", 17.0, 180.0, units=("GB", "GB"), part="kv-cache"), Judgement.NEUTRAL),
            (change("ttft", 0.004, 0.013), Judgement.SAME),
            (change("ttft", 0.004, 0.015), Judgement.WORSE),
            (change("tpot", 0.0010, 0.0014), Judgement.SAME),
            (change("tpot", 0.0070, 0.0077), Judgement.WORSE),
            (change("load_phase", 0.037, 0.251, samples=1, phase="kv-cache"), Judgement.SAME),
            (change("load_phase", 10.0, 100.0, samples=1, phase="weights"), Judgement.FEW),
            (change("load_phase", 10.0, 100.0, samples=2, phase="weights"), Judgement.WORSE),
            (change("ready", 5.0, 9.0, samples=1), Judgement.SAME),
            (change("ready", 400.0, 470.0, samples=1), Judgement.SAME),
            (change("ready", 400.0, 490.0, samples=1), Judgement.WORSE),
            (change("restart", 400.0, 430.0, samples=3), Judgement.WORSE),
            (change("host_memory", 0.05, 0.14, units=("GB", "GB")), Judgement.SAME),
            (change("accept_length", 0.5, 0.54), Judgement.SAME),
            (change("ttft", 1.0, 2.0, samples=7, stat="median"), Judgement.FEW),
            (change("ttft", 1.0, 2.0, samples=8, stat="median"), Judgement.WORSE),
            (change("ttft", 1.0, 2.0, samples=99, stat="p99"), Judgement.FEW),
            (change("ttft", 1.0, 2.0, samples=100, stat="p99"), Judgement.WORSE),
            (change("output_rate", 100.0, 80.0, samples=29), Judgement.FEW),
            (change("output_rate", 100.0, 80.0, samples=30), Judgement.WORSE),
            (change("output_rate", 100.0, 80.0, spread=1.0, samples=3), Judgement.WORSE),
            (change("speedup", 1.0, 2.0, samples=8), Judgement.FEW),
            (change("ttft", None, 1.0), Judgement.UNKNOWN),
            (change("ttft", 1.0, None), Judgement.UNKNOWN),
            (change("ttft", 1.0, 1000.0, units=("s", "ms")), Judgement.UNKNOWN),
        ],
    )
    def test_what_a_change_means(self, found: Change, judgement: Judgement) -> None:
        assert found.judgement is judgement

    def test_ratios(self) -> None:
        assert change("ttft", 2.0, 3.0).ratio == 1.5
        assert change("ttft", 0.0, 3.0).ratio is None
        assert change("ttft", None, 3.0).ratio is None

    def test_the_same_run_is_the_same(self) -> None:
        found = compare_reports(bench_run(), bench_run())
        assert {each.judgement for each in found.changes} == {Judgement.SAME}
        assert len(found.changes) == len(bench_run().targets[0].all_figures)
        assert found.only_first == found.only_second == ()

    def test_figures_of_one_run_alone_are_listed_and_not_taken_for_nothing(self) -> None:
        found = compare_reports(bench_run(), partial_run())
        assert len(found.changes) == 7
        assert found.only_second == ()
        assert ("ct200/k26", "speedup") in {(target, figure.name) for target, figure in found.only_first}

    def test_targets_go_by_name_hosts_by_a_mapping(self) -> None:
        def run(**hosts: float) -> RunReport:
            targets = tuple(
                TargetReport(f"{host}/s", host, "s", figures=(Figure("ready", value, "s", ""),))
                for host, value in hosts.items()
            )
            return RunReport("validate", "r", "", targets=targets)

        first, second = run(a=1.0, b=2.0), run(b=2.0, c=9.0)
        plain = compare_reports(first, second)
        assert [(each.target, each.ratio) for each in plain.changes] == [("b/s", 1.0)]
        assert [target for target, _ in plain.only_first] == ["a/s"]
        assert [target for target, _ in plain.only_second] == ["c/s"]
        for hosts in ({"a": "c"}, {"a/s": "c/s"}):
            mapped = compare_reports(first, second, hosts)
            assert [(each.target, each.ratio) for each in mapped.changes] == [
                ("a/s / c/s", 9.0),
                ("b/s", 1.0),
            ]
        assert [each.ratio for each in compare_reports(run(a=1.0), run(z=3.0)).changes] == [3.0]
        assert compare_targets(*first.targets).changes[0].ratio == 2.0
        assert compare_reports(first, run()).changes == ()

    def test_a_partial_run_is_named_before_anything_else(self) -> None:
        found = compare_reports(partial_run(), bench_run())
        assert found.notes[0].startswith("the first is partial: ")
        lines = printed(print_comparison, found).splitlines()
        assert "note: the first is partial: " in lines[1]
        assert "the first is partial: " in comparison_html(found).partition("<table>")[0]
        assert not any("partial" in note for note in compare_reports(bench_run(), bench_run()).notes)

    def test_two_generators_and_few_requests_are_noted(self) -> None:
        def run(generator: str, samples: int) -> RunReport:
            rate = Figure("output_rate", 9.0, "tokens/s", "", samples)
            target = TargetReport("h/s", "h", "s", {"generator": generator}, figures=(rate,))
            return RunReport("bench", "r", "", complete=True, targets=(target,))

        assert compare_reports(run("own", 30), run("own", 64)).notes == ()
        assert compare_reports(run("own", 30), run("sglang", 8)).notes == (
            "h/s: two load generators (own, sglang): their figures are not the same",
            "points rest on as few as 8 requests: 30 or more tell a change from chance",
        )

    def test_reports_of_two_commands_are_told_apart(self) -> None:
        with pytest.raises(UsageError) as caught:
            compare_reports(bench_run(), replace(validate_run(), targets=()))
        assert caught.value.message == (
            "the report of bench 20261130T021500Z-cd34 and the report of validate 20261130T063000Z-ab12 have no"
            " figure in common"
        )
        nightly = replace(validate_run(), command="nightly")
        assert compare_reports(validate_run(), nightly).notes == (
            "two commands made them: validate the first, nightly the second",
        )

    def test_what_matters_comes_first_and_load_phases_last(self) -> None:
        figures: tuple[tuple[str, float, float, dict[str, str]], ...] = (
            ("load_phase", 1.0, 9.0, {"phase": "weights"}),
            ("mood", 1.0, 9.0, {}),
            ("ready", 1.0, 90.0, {}),
            ("gpu_memory", 1.0, 9.0, {}),
            ("ttft", 1.0, 9.0, {"stat": "p99"}),
            ("ttft", 1.0, 2.0, {"stat": "median"}),
            ("accept_length", 9.0, 1.0, {}),
            ("output_rate", 9.0, 1.0, {}),
            ("speedup", 9.0, 8.0, {}),
        )
        changes = tuple(
            change(name, one, two, None, ("s", "s"), 100, **labels) for name, one, two, labels in figures
        )
        rows = printed(print_comparison, Comparison("a", "b", changes)).splitlines()
        told = [row.split(" s ")[1].strip() for row in rows if row.startswith(("worse ", "neutral "))]
        assert told == [
            "speedup", "output_rate", "accept_length", "ttft stat=median", "ttft stat=p99", "gpu_memory",
            "ready", "load_phase phase=weights", "mood",
        ]  # fmt: skip
        assert rows[1] == (
            "worse: speedup (0.89x), output_rate (0.11x), accept_length (0.11x), and 5 more kinds of figure"
        )

    def test_the_sentence_counts_points(self) -> None:
        rates = [(100.0, 50.0), (100.0, 80.0), (100.0, 101.0), (100.0, 300.0)]
        changes = tuple(
            change("output_rate", one, two, concurrency=str(place)) for place, (one, two) in enumerate(rates)
        )
        rows = printed(print_comparison, Comparison("a", "b", changes)).splitlines()
        assert rows[1] == (
            "worse: output_rate at 2 of 4 points (0.50x to 0.80x); better: output_rate at 1 of 4 points (3.00x)"
        )

    @pytest.mark.parametrize(
        ("samples", "said"),
        [
            (32, "no figure differs by more than noise"),
            (8, "nothing that has samples enough differs by more than noise; 1 figure with too few"),
        ],
    )
    def test_no_difference_is_a_sentence_too(self, samples: int, said: str) -> None:
        found = (change("output_rate", 100.0, 104.0 if samples == 32 else 50.0, samples=samples),)
        assert printed(print_comparison, Comparison("a", "b", found)).splitlines()[1] == said

    def test_a_target_is_not_compared_twice(self) -> None:
        targets = tuple(
            TargetReport(f"{host}/s", host, "s", figures=(Figure("ready", 1.0, "s", ""),)) for host in "ab"
        )
        run = RunReport("validate", "r", "", targets=targets)
        assert [each.target for each in compare_reports(run, run, {"a": "b"}).changes] == ["a/s / b/s"]

    def test_on_a_terminal_worse_comes_first(self) -> None:
        figures = (
            ("ready", 390.0, 391.0, "s"),
            ("accept_length", 4.0, 4.4, "tokens/step"),
            ("ttft", 0.1, 0.2, "s"),
            ("output_rate", 300.0, 240.0, "tokens/s"),
            ("gpu_memory", 90.0, None, "GB"),
        )
        changes = tuple(
            Change("h/s", Figure(name, one, unit, "", 32), Figure(name, two, unit, "", 32))
            for name, one, two, unit in figures
        )
        more = (("h/s", Figure("kv_tokens", 7.0, "tokens", "")),)
        text = printed(print_comparison, Comparison("r1 h/s", "r2 h/s", changes, more))
        assert text == golden(
            """
            r1 h/s (before) against r2 h/s (after)
            worse: output_rate (0.80x), ttft (2.00x); better: accept_length (1.10x)
            CHANGE  RATIO BEFORE AFTER UNIT        FIGURE
            worse   0.80x 300    240   tokens/s    output_rate
            worse   2.00x 0.1    0.2   s           ttft
            better  1.10x 4      4.4   tokens/step accept_length
            unknown -     90     -     GB          gpu_memory
            2 worse, 1 better, 1 unknown, 1 same, 1 figure only in the first
            """
        )
        wide = printed(print_comparison, Comparison("a", "b", changes, more), verbose=True)
        assert "same    1.00x 390    391   s           ready\n" in wide
        assert "only in the first: h/s kv_tokens 7\n" in wide

    def test_nothing_in_common_is_said(self) -> None:
        assert "the two have no figure in common" in printed(print_comparison, Comparison("a", "b"))

    def test_many_changes_are_cut_unless_asked_for(self) -> None:
        found = compare_reports(bench_run(), bench_run(factor=0.8))
        text = printed(print_comparison, found)
        assert len(text.splitlines()) == 35
        assert text.splitlines()[-2:] == ["... 70 more", "40 worse, 60 few, 230 same"]
        assert len(printed(print_comparison, found, verbose=True).splitlines()) == 334


def printed(printer: Callable[..., None], *arguments: object, **more: object) -> str:
    file = io.StringIO()
    printer(Console(file=file, width=100, highlight=False), *arguments, **more)
    return file.getvalue()


def golden(text: str) -> str:
    return dedent(text).lstrip("\n")


class TestOnATerminal:
    """A run as a person reads it."""

    def test_a_validate_run(self) -> None:
        text = printed(print_run, validate_run())
        assert text.replace("!" * 180, "!!!") == golden(
            """
            ct200/k26 fail
              ✓ chat        answers in 41 tokens, reads as text  1.4s
              ✓ prefix-hit  1984 of 2048 tokens came from the cache; the answer is the same  2.2s
              ✗ garbage     3 of 8 answers are garbage: one character makes up 91% of an answer  12s
                  POST /generate:
                    !!!
                  journal line 4711:
                    the answer holds colours, a NUL  and <script>alert('no')</script> & more
                  http GET /server_info:
                    --api-key ******** --model-path /models/x
                  1 more piece of evidence in the report
                  next: ddtree-ops diagnose ct200
              ? lossless    the baseline does not agree with itself on 2 of 6 prompts | nothing can be said  1m04s
                  next: ddtree-ops validate ct200 --check lossless --set runs=3
              - tool-call   the service has no tool_call_parser
              FIGURE           VALUE  UNIT        SAMPLES SPREAD SOURCE
              ready            390.3  s           1              systemctl show
              ttft stat=median 0.213  s           8       0.011  stream
              ttft stat=p99    -      s           0              stream
              accept_length    4.31   tokens/step 24      0.22   POST /generate meta_info
              gpu_memory       91.4   GB          1              nvidia-smi
              kv_tokens        131072 tokens      1              http GET /server_info
              diagnosis: ddtree-graph-size: the graphs were made for 8 tokens, and the tree has 33
            b300/k26 fail
              b300: connect: there is no session to the host
                state: nothing was changed
                next:  ddtree-ops doctor b300
            validate 20261130T063000Z-ab12: fail (2 pass, 1 fail, 1 inconclusive, 1 skipped, 1 error)
            """
        )

    def test_a_bench_run(self) -> None:
        lines = printed(print_run, bench_run()).splitlines()
        assert lines[2] == "  SETUP       CONC SPEED-UP TOK/S TTFT s TPOT s  ACCEPT GPU GB RESTART s FAILED"
        assert lines[3] == "  baseline    1    -        141   0.13   0.00709 -      88     402       0"
        assert lines[-2] == "  ddtree 32/8 32   0.743    1270  0.75   0.0252  1.02   91.2   409       0"
        assert lines[-1] == "bench 20261130T021500Z-cd34: pass (1 pass)"
        assert max(map(len, lines)) <= 80

    def test_a_partial_run(self) -> None:
        assert printed(print_run, partial_run()).splitlines()[-2:] == [
            "partial: the run was not finished, and more was to come",
            "bench 20261130T021500Z-ef56: inconclusive (nothing was checked)",
        ]

    def test_the_rest_of_the_evidence_is_where_the_report_is(self) -> None:
        text = printed(print_run, validate_run(), kept=Path("/r/validate-1"))
        assert "1 more piece of evidence in /r/validate-1\n" in text
        nightly = printed(print_run, replace(validate_run(), command="nightly"))
        assert "1 more piece of evidence in the report\n" in nightly

    def test_a_crash_is_told_once(self) -> None:
        problem = "NRestarts changed from 0 to 1: the service was restarted in between"
        unit = Evidence("systemctl show", "active (running), NRestarts 1")
        hint = "ddtree-ops diagnose h --invocation 12ab"
        headline = "illegal-access: an illegal memory access on rank 3"
        checks = (
            CheckResult(
                "chat", Verdict.FAIL, f"broken off; the engine died: {problem}", "h", {}, (unit,), hint
            ),
            CheckResult("needle", Verdict.SKIPPED, "the engine died", "h"),
            CheckResult("steady", Verdict.FAIL, "failed (exit-code)", "h", {}, (unit,), hint),
            CheckResult(
                "signatures", Verdict.FAIL, headline, "h", {}, (Evidence("journal", "CUDA error"),), "x"
            ),
            CheckResult(
                "journal", Verdict.FAIL, headline, "h", {}, (Evidence("journal", "CUDA error"),), "y"
            ),
        )
        target = TargetReport(
            "h", "h", "s", checks=checks, diagnoses=({"verdict": "fail", "headline": headline},)
        )
        run = replace(partial_run(), command="nightly", complete=True, targets=(target,))
        assert printed(print_run, run) == golden(
            """
            h fail
              ✗ chat        broken off; the engine died: NRestarts changed from 0 to 1: the service was restarted in between
                  systemctl show:
                    active (running), NRestarts 1
                  next: ddtree-ops diagnose h --invocation 12ab
              - needle      the engine died
              ✗ steady      failed (exit-code)
                  next: ddtree-ops diagnose h --invocation 12ab
              ✗ signatures  illegal-access: an illegal memory access on rank 3
                  journal:
                    CUDA error
                  next: x
              ✗ journal     illegal-access: an illegal memory access on rank 3
                  next: y
            nightly 20261130T021500Z-ef56: fail (4 fail, 1 skipped)
            """
        )
        assert printed(print_run, run, verbose=True).count("CUDA error") == 2

    @pytest.mark.parametrize(("verdict", "lines"), [("pass", 0), ("fail", 1), ("inconclusive", 1)])
    def test_a_diagnosis_that_found_nothing_is_no_line(self, verdict: str, lines: int) -> None:
        target = TargetReport("h", "h", "s", diagnoses=({"verdict": verdict, "headline": "what it says"},))
        text = printed(print_run, replace(partial_run(), targets=(target,)))
        assert text.count("diagnosis: what it says\n") == lines

    def test_two_failures_with_one_command_keep_their_evidence(self) -> None:
        checks = tuple(
            CheckResult(
                name, Verdict.FAIL, f"{name} is wrong", "h", {}, (Evidence("chat", name),), "the same"
            )
            for name in ("copy", "needle")
        )
        text = printed(
            print_run, replace(partial_run(), targets=(TargetReport("h", "h", "s", checks=checks),))
        )
        assert text.count("next: the same\n") == 2
        assert text.count("chat:\n") == 2

    def test_verbose_shows_every_figure_and_all_evidence(self) -> None:
        text = printed(print_run, validate_run(), verbose=True)
        assert "accept len: 7.91, which no text of a model has" in text
        assert text.count("accept_histogram accepted=") == 8
        assert "cached_tokens=1984" in text

    def test_marks_are_ascii_where_the_terminal_is(self) -> None:
        raw = io.BytesIO()
        with io.TextIOWrapper(raw, encoding="ascii") as stream:
            check = CheckResult("c", Verdict.PASS, "fine")
            run = replace(partial_run(), targets=(TargetReport("h", "h", "", checks=(check,)),))
            print_run(Console(file=stream, width=80), run)
            stream.flush()
            assert b"  + c  fine" in raw.getvalue()

    def test_a_pass_of_a_run_that_did_not_end_is_one_so_far(self) -> None:
        target = TargetReport("h", "h", "s", checks=(CheckResult("c", Verdict.PASS, "fine"),))
        run = replace(partial_run(), targets=(target,))
        assert printed(print_run, run).startswith("h pass so far\n")
        assert printed(print_run, replace(run, complete=True)).startswith("h pass\n")


def test_the_newest_sixty_reports_of_a_kind_stay(tmp_path: Path) -> None:
    for number in range(61):
        for prefix in ("", "validate-"):
            (tmp_path / f"{prefix}20261130T01{number:02d}00Z-ab12").mkdir()
    (tmp_path / "mine").mkdir()
    assert own_folder(tmp_path, "new", prefix="validate-") == tmp_path / "validate-new"
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 61 + 59 + 1, "no other kind, and nothing of the user's"
    assert "validate-20261130T010000Z-ab12" not in left
    assert "validate-20261130T016000Z-ab12" in left
