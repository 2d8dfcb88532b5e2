"""Reports of runs as files for machines: JUnit, Prometheus, Markdown, workflow commands, CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_samples import UNREACHABLE, bench_run, partial_run, validate_run

from ddtree_ops import secret
from ddtree_ops.report import markdown
from ddtree_ops.report.clean import clean, visible
from ddtree_ops.report.csvout import points_csv
from ddtree_ops.report.github import annotations_text, workflow_command
from ddtree_ops.report.html import html_report
from ddtree_ops.report.junit import junit_xml
from ddtree_ops.report.markdown import LIMIT, step_summary
from ddtree_ops.report.prometheus import metric_name, metrics_text
from ddtree_ops.report.write import json_text
from ddtree_ops.results import CheckResult, Evidence, Figure, Verdict
from ddtree_ops.runreport import RunReport, TargetReport

ROOT = Path(__file__).parents[2]
RENDERERS: dict[str, Callable[[RunReport], str]] = {
    "json": json_text,
    "junit": junit_xml,
    "html": html_report,
    "markdown": step_summary,
    "github": annotations_text,
    "prometheus": metrics_text,
    "csv": points_csv,
}
EVERY = pytest.mark.parametrize("render", RENDERERS.values(), ids=RENDERERS)
NASTY = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("\0\x1b\r\n|`<>&\"'%:,]\\\ufffe{}")), max_size=30
)


def run_of(*checks: CheckResult, complete: bool = True, **more: object) -> RunReport:
    """A run with one target."""
    target = TargetReport("h/s", "h", "s", checks=checks, **more)  # type: ignore[arg-type]
    return RunReport("validate", "r1", "2026-11-30T06:30:00+00:00", complete=complete, targets=(target,))


def everywhere(text: str) -> RunReport:
    """A report that says ``text`` wherever a report can hold one."""
    figure = Figure(
        "accept_length", 1.5, "tokens/step", text, labels={"mode": text or "x", "concurrency": "1"}
    )
    check = CheckResult(
        "c", Verdict.FAIL, text, "h", {"fact": text}, (Evidence(text, text, 1, text),), text, (figure,)
    )
    target = TargetReport(f"t {text}", "h", text, {"fact": text}, (check,), (figure,), errors=(text,))
    return RunReport("validate", text, "2026-11-30T06:30:00Z", options={"o": text}, targets=(target,))


class TestJUnit:
    """A suite a target, a case a check."""

    @pytest.mark.parametrize("make", [validate_run, bench_run, partial_run])
    def test_it_is_what_the_common_schemas_ask_for(self, make: Callable[[], RunReport]) -> None:
        root = ElementTree.fromstring(junit_xml(make()))
        assert root.tag == "testsuites"
        assert len({suite.get("id") for suite in root}) == len(root)
        totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
        for suite in root:
            assert suite.tag == "testsuite"
            assert {"name", "package", "id", "hostname"} <= {key for key, value in suite.items() if value}
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp", ""))
            tags = [child.tag for child in suite]
            cases = suite.findall("testcase")
            assert tags == ["properties", *["testcase"] * len(cases), "system-out", "system-err"]
            for item in suite.iterfind("properties/property"):
                assert set(item.keys()) == {"name", "value"}
            for case in cases:
                assert set(case.keys()) == {"name", "classname", "time"}
                assert re.fullmatch(r"\d+\.\d{3}", case.get("time", ""))
                assert len(case) <= 1
                assert {child.tag for child in case} <= {"failure", "error", "skipped"}
                assert all(child.get("message") for child in case)
                assert all(child.get("type") for child in case if child.tag != "skipped")
            found = {"tests": len(cases)}
            for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
                found[key] = len(suite.findall(f"testcase/{tag}"))
            for key, many in found.items():
                assert suite.get(key) == str(many)
                totals[key] += many
            assert float(suite.get("time", "")) == pytest.approx(
                sum(float(case.get("time", "")) for case in cases)
            )
        assert {key: root.get(key) for key in totals} == {key: str(many) for key, many in totals.items()}

    def test_no_verdict_but_a_pass_passes(self) -> None:
        cases = {
            case.get("name"): [(child.tag, child.get("type")) for child in case]
            for case in ElementTree.fromstring(junit_xml(validate_run())).iter("testcase")
        }
        assert cases == {
            "chat": [],
            "prefix-hit": [],
            "garbage": [("failure", "fail")],
            "lossless": [("error", "inconclusive")],
            "tool-call": [("skipped", None)],
            "error 1": [("error", "error")],
        }

    def test_a_failure_holds_the_next_command_and_the_evidence(self) -> None:
        root = ElementTree.fromstring(junit_xml(validate_run()))
        failure = root.find(".//testcase[@name='garbage']/failure")
        assert failure is not None
        assert failure.get("message") == "3 of 8 answers are garbage: one character makes up 91% of an answer"
        lines = (failure.text or "").splitlines()
        assert lines[1] == "next: ddtree-ops diagnose ct200"
        assert lines[4:6] == [
            "-- journal line 4711 2026-11-30T06:31:07Z",
            "the answer holds colours, a NUL  and <script>alert('no')</script> & more",
        ]

    def test_a_run_that_was_cut_off_and_one_without_checks_are_errors(self) -> None:
        root = ElementTree.fromstring(junit_xml(partial_run()))
        found = [
            (case.get("classname"), case.get("name"), case[0].get("type")) for case in root.iter("testcase")
        ]
        assert found == [("ct200.k26.run", "checks", "inconclusive"), ("bench", "complete", "inconclusive")]

    def test_dots_make_packages(self) -> None:
        run = run_of(CheckResult("smoke.text", Verdict.PASS, "ok"))
        run = replace(run, targets=(replace(run.targets[0], target="gpu1.example/k2.6"),))
        (case,) = ElementTree.fromstring(junit_xml(run)).iter("testcase")
        assert (case.get("classname"), case.get("name")) == ("gpu1_example.k2_6.smoke", "smoke.text")


class TestPrometheus:
    """The text exposition format, as a collector of text files reads it."""

    NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
    LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'

    def samples(self, text: str) -> dict[str, float]:
        """Every line is a sample, or the help or type of the samples that follow; no series comes twice."""
        found: dict[str, float] = {}
        helped, typed = [], []
        assert text.endswith("\n")
        for line in text[:-1].split("\n"):
            if line.startswith("# HELP "):
                helped.append(line.split(" ")[2])
            elif line.startswith("# TYPE "):
                assert line.split(" ")[3] == "gauge"
                typed.append(line.split(" ")[2])
            else:
                match = re.fullmatch(rf"({self.NAME})((?:{{{self.LABEL}(?:,{self.LABEL})*}})?) (\S+)", line)
                assert match, line
                assert match[1] == helped[-1] == typed[-1]
                assert match[1] + match[2] not in found
                found[match[1] + match[2]] = float(match[3])
        assert len(set(helped)) == len(helped)
        return found

    def test_figures_and_verdicts(self) -> None:
        found = self.samples(metrics_text(validate_run()))
        of = 'host="ct200",service="k26",command="validate"'
        assert found[f"ddtree_ops_ready_seconds{{{of}}}"] == 390.3
        assert found[f"ddtree_ops_kv_tokens{{{of}}}"] == 131072
        assert found[f'ddtree_ops_accept_length_tokens_per_step{{{of},check="lossless"}}'] == 4.31
        verdicts = {
            name: found[f'ddtree_ops_check_verdict{{{of},check="garbage",verdict="{name}"}}']
            for name in ("pass", "fail", "inconclusive", "skipped")
        }
        assert verdicts == {"pass": 0, "fail": 1, "inconclusive": 0, "skipped": 0}
        assert found['ddtree_ops_run_complete{command="validate"}'] == 1
        assert found['ddtree_ops_run_timestamp_seconds{command="validate"}'] == 1796020324

    def test_the_alerts_of_the_docs_find_what_did_not_pass_and_nothing_else(self) -> None:
        alerts = [
            re.fullmatch(r'(ddtree_ops_\w+)(?:\{verdict(=~?)"([^"]+)"\})? == ([01])', line)
            for line in (ROOT / "docs" / "reports.md").read_text().splitlines()
        ]
        rules = [alert.groups() for alert in alerts if alert]
        assert len(rules) == 3

        def firing(run: RunReport) -> set[str]:
            found = set()
            for series, value in self.samples(metrics_text(run)).items():
                name, _, labels = series.partition("{")
                known = dict(re.findall(r'(\w+)="([^"]*)"', labels))
                for metric, _, verdicts, number in rules:
                    wanted = verdicts is None or known.get("verdict") in verdicts.split("|")
                    if name == metric and wanted and value == float(number):
                        found.add(known.get("check") or name)
            return found

        checks = [CheckResult(verdict.value, verdict, "said") for verdict in Verdict]
        target = "ddtree_ops_target_verdict"
        assert firing(run_of(*checks)) == {"fail", "inconclusive", target}
        fine = [check for check in checks if check.name in ("pass", "skipped")]
        assert firing(run_of(*fine)) == set()
        assert firing(run_of(*fine, complete=False)) == {"ddtree_ops_run_complete"}
        assert firing(run_of()) == {target}

    def test_what_has_no_value_is_left_out(self) -> None:
        text = metrics_text(validate_run())
        assert 'stat="median"' in text
        assert 'stat="p99"' not in text

    def test_every_point_of_a_bench_is_a_series(self) -> None:
        found = self.samples(metrics_text(bench_run()))
        assert sum(name.startswith("ddtree_ops_output_rate_tokens_per_second{") for name in found) == 24

    def test_a_run_that_was_cut_off(self) -> None:
        found = self.samples(metrics_text(partial_run()))
        assert found['ddtree_ops_run_complete{command="bench"}'] == 0
        assert found['ddtree_ops_run_timestamp_seconds{command="bench"}'] == 1796004900

    @pytest.mark.parametrize(
        ("name", "unit", "metric"),
        [
            ("ttft", "s", "ttft_seconds"),
            ("kv_tokens", "tokens", "kv_tokens"),
            ("failed_requests", "count", "failed_requests"),
            ("gpu_memory", "GB", "gpu_memory_gigabytes"),
            ("x-y", "m/s", "x_y_m_per_s"),
        ],
    )
    def test_names(self, name: str, unit: str, metric: str) -> None:
        assert metric_name(name, unit) == f"ddtree_ops_{metric}"

    def test_labels_of_a_figure_do_not_hide_ours(self) -> None:
        odd = {"host": "x", "9": "y", "a-b": 'q"\\\n'}
        text = metrics_text(run_of(figures=(Figure("n", 1.0, "count", "", labels=odd),)))
        assert (
            'host="h",service="s",command="validate",label_9="y",a_b="q\\"\\\\\\n",label_host="x"} 1' in text
        )

    @given(NASTY)
    @settings(max_examples=25)
    def test_any_text_is_escaped(self, text: str) -> None:
        self.samples(metrics_text(everywhere(text)))


class TestWorkflowCommands:
    """Annotations of GitHub Actions."""

    def test_of_a_run(self) -> None:
        garbage = "3 of 8 answers are garbage: one character makes up 91%25 of an answer%0Anext: ddtree-ops diagnose ct200"
        lossless = "the baseline does not agree with itself on 2 of 6 prompts | nothing can be said%0Anext: ddtree-ops"
        assert annotations_text(validate_run()).splitlines() == [
            f"::error title=ct200/k26%3A garbage::{garbage}",
            f"::error title=b300/k26::{UNREACHABLE}".replace("\n", "%0A"),
            f"::warning title=ct200/k26%3A lossless%3A inconclusive::{lossless} validate ct200 --check lossless --set runs=3",
            "::notice title=20261130T063000Z-ab12::validate: fail (ct200/k26 fail, b300/k26 fail)",
        ]

    def test_a_run_that_was_cut_off_warns(self) -> None:
        assert "::warning title=20261130T021500Z-ef56::the run was not finished" in annotations_text(
            partial_run()
        )

    def test_properties_are_escaped_more_than_data(self) -> None:
        said = workflow_command("error", "100%: a, b\r\nc", "100%: a, b\nc")
        assert said == "::error title=100%25%3A a%2C b%0Ac::100%25: a, b%0D%0Ac"

    @given(NASTY)
    @settings(max_examples=25)
    def test_no_text_begins_a_command_of_its_own(self, text: str) -> None:
        lines = annotations_text(everywhere(text)).split("\n")[:-1]
        kinds = [re.match(r"::(\w+)(?: title=[^:,]+)?::", line) for line in lines]
        assert [kind and kind[1] for kind in kinds] == ["error", "error", "warning", "notice"]


class TestMarkdown:
    """A step summary."""

    def test_tables_keep_their_columns_whatever_stands_in_them(self) -> None:
        for run in (
            validate_run(),
            bench_run(),
            everywhere("a | b\n|\r\n `c|d` \\| <b> *x* http://192.0.2.1"),
        ):
            width = 0
            for line in step_summary(run).splitlines():
                cells = len(re.findall(r"(?<!\\)\|", line.replace("\\\\", ""))) if line.startswith("|") else 0
                assert not (width and cells) or cells == width, line
                width = cells

    def test_what_did_not_pass_comes_first_with_the_next_command(self) -> None:
        text = step_summary(validate_run())
        assert text.startswith("## ❌ fail: ddtree-ops validate\n")
        rows = [line.split(" | ")[1] for line in text.splitlines() if line.count("|") >= 5 and "%" in line]
        assert rows == ["garbage"]
        assert text.index("| garbage |") < text.index("| lossless |") < text.index("| chat |")
        assert "| `ddtree-ops diagnose ct200` |" in text
        assert "b300: connect: there is no session to the host<br>state: nothing was changed<br>next:" in text

    @pytest.mark.parametrize(
        ("hint", "shown"),
        [
            ("ddtree-ops diagnose b300 --invocation 12ab", "`ddtree-ops diagnose b300 --invocation 12ab`"),
            (
                "ddtree-ops logs b300 --stats, then ddtree-ops restart b300",
                "`ddtree-ops logs b300 --stats`, then `ddtree-ops restart b300`",
            ),
            ("ddtree-ops wait b300: it loads", "`ddtree-ops wait b300`: it loads"),
            ("ddtree-ops bench --budgets 8,16 (again)", r"`ddtree-ops bench --budgets 8,16` \(again\)"),
            ("SM120 has 99 KiB: take another backend", "SM120 has 99 KiB: take another backend"),
            ("deploy the patched runner", "deploy the patched runner"),
            ("word " * 100, f"{('word ' * 40).rstrip()} ..."),
            (
                f"ddtree-ops logs b300, {'word ' * 100}",
                f"`ddtree-ops logs b300`, {('word ' * 36)[:178].rstrip()} ...",
            ),
            (
                f"ddtree-ops validate b300 --golden /{'x' * 250}",
                f"`ddtree-ops validate b300 --golden /{'x' * 250}`",
            ),
        ],
    )
    def test_only_commands_are_code(self, hint: str, shown: str) -> None:
        page = step_summary(run_of(CheckResult("c", Verdict.FAIL, "s", "h", hint=hint)))
        assert f"| c | s | {shown} |" in page

    def test_a_long_sentence_is_cut(self) -> None:
        page = step_summary(run_of(CheckResult("c", Verdict.FAIL, "é" * 500)))
        assert f"| {'é' * 200} ... |" in page

    def test_points_of_a_bench(self) -> None:
        rows = [line for line in step_summary(bench_run()).splitlines() if line.startswith("| ddtree 32/8 |")]
        assert rows == [
            "| ddtree 32/8 | 1 | 2.117 | 298.6 | 0.13 | 0.00335 | 4.72 | 0 |",
            "| ddtree 32/8 | 8 | 1.873 | 1180 | 0.27 | 0.00678 | 4.72 | 0 |",
            "| ddtree 32/8 | 32 | 0.743 | 1270 | 0.75 | 0.0252 | 1.02 | 0 |",
        ]

    def test_a_partial_report_says_so(self) -> None:
        assert "**Partial report: the run was not finished, and more was to come.**" in step_summary(
            partial_run()
        )

    def test_it_stays_below_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert LIMIT < 1024 * 1024 - 1000
        monkeypatch.setattr(markdown, "LIMIT", 5000)
        text = step_summary(
            run_of(*(CheckResult(f"c{place}", Verdict.FAIL, "é" * 390) for place in range(20)))
        )
        assert 4000 < len(text.encode()) < 5100
        assert text.endswith("|\n\n**Cut off here: the whole is in report.json.**\n")

    @given(NASTY)
    @settings(max_examples=25)
    def test_no_text_makes_html_or_a_heading(self, text: str) -> None:
        page = step_summary(everywhere(text))
        assert sum(line.startswith("#") for line in page.splitlines()) == 2
        tags = re.findall(r"(?<!\\)<[^ ]*?>", page.replace("\\\\", ""))
        assert set(tags) <= {"<br>", "<details>", "</details>", "<summary>", "</summary>"}


class TestCSV:
    """Points as rows."""

    def test_points_of_a_bench(self) -> None:
        head, *rows = csv.reader(io.StringIO(points_csv(bench_run())))
        assert head[:6] == ["run", "target", "mode", "budget", "topk", "concurrency"]
        assert len(set(head)) == len(head)
        assert len(rows) == 24
        table = [dict(zip(head, row, strict=True)) for row in rows]
        assert [each["concurrency"] for each in table[:3]] == ["1", "8", "32"]
        assert table[0]["speedup (ratio)"] == ""
        last = table[-1]
        assert (last["mode"], last["budget"], last["topk"]) == ("ddtree", "32", "8")
        assert float(last["speedup (ratio)"]) == 0.743
        assert float(last["accept_histogram_7 (steps)"]) == 350
        assert float(last["restart (s)"]) == 409

    def test_no_points_no_text(self) -> None:
        assert points_csv(validate_run()) == ""

    def test_no_cell_is_a_formula(self) -> None:
        (_, row) = csv.reader(io.StringIO(points_csv(everywhere("=HYPERLINK(1)"))))
        assert row[2] == "'=HYPERLINK(1)"


@EVERY
def test_secrets_are_masked(render: Callable[[RunReport], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_learned", ())
    secret.learn("correct-horse-battery")
    run = everywhere("a correct-horse-battery, --api-key hunter2hunter2, Authorization: Bearer abcdefgh12345")
    text = render(run)
    for value in ("correct-horse", "hunter2", "abcdefgh12345"):
        assert value not in text


@EVERY
@given(text=NASTY)
@settings(max_examples=8)
def test_any_text_can_be_rendered(render: Callable[[RunReport], str], text: str) -> None:
    shown = render(everywhere(text))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]", shown)
    if render is junit_xml:
        ElementTree.fromstring(shown)


def test_cleaning_keeps_a_report_and_twice_is_once() -> None:
    assert clean(bench_run()) == bench_run()
    once = clean(everywhere("--api-key hunter2hunter2 \x1b[1m\x00"))
    assert clean(once) == once


def test_values_of_secret_names_are_masked_and_numbers_are_not() -> None:
    run = replace(
        run_of(), options={"api_key": "abc", "HF_TOKEN": "x", "key": 3, "tokens": "17", "list": ["a"]}
    )
    assert clean(run).options == {
        "api_key": secret.MASK,
        "HF_TOKEN": secret.MASK,
        "key": 3,
        "tokens": "17",
        "list": ["a"],
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@EVERY
def test_a_figure_that_is_no_number_has_no_value(render: Callable[[RunReport], str], value: float) -> None:
    figure = Figure("accept_length", value, "tokens/step", "x", labels={"mode": "ddtree", "concurrency": "1"})
    text = render(run_of(figures=(figure,)))
    assert not re.search(r"\b(?:nan|inf|NaN|Infinity)\b", text)
    if render is json_text:
        assert json.loads(text)["targets"][0]["figures"][0]["value"] is None


def test_terminal_escapes_go_and_text_stays() -> None:
    assert visible("a\x1b[31mb\x1b[0m\x1b]8;;http://x\x07c\td\r\ne\x00\ufffdé") == "abc\td\ne\ufffdé"
