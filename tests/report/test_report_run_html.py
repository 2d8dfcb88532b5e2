"""The HTML report: its structure, that it fetches and runs nothing, and that charts have their numbers as text too."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_samples import bench_run, partial_run, validate_run

from ddtree_ops.report.compare import compare_reports, comparison_html
from ddtree_ops.report.html import html_report
from ddtree_ops.report.svg import Bar, Series, bars, columns, lines, waterfall
from ddtree_ops.results import CheckResult, Evidence, Figure, Verdict
from ddtree_ops.runreport import RunReport, TargetReport

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Tags of a page with their attributes, and its text outside ``<style>``; refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every tag of a name."""
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    made = {"validate": validate_run(), "bench": bench_run(), "partial": partial_run()}
    found = {name: Page(html_report(run)) for name, run in made.items()}
    compared = compare_reports(bench_run(), bench_run(factor=0.8, host="b300"))
    return {**found, "compare": Page(comparison_html(compared))}


EVERY = pytest.mark.parametrize("name", ["validate", "bench", "partial", "compare"])


@EVERY
def test_it_stands_alone(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "image", "use"}
    for _, attributes in page.tags:
        assert not any(key.startswith("on") or key in ("src", "srcset", "style") for key in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    policies = [each["content"] for each in page.all("meta") if "http-equiv" in each]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


@EVERY
def test_it_suits_every_window_and_reader(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert {"name": "color-scheme", "content": "light dark"} in page.all("meta")
    assert len(page.all("h1")) == len(page.all("title")) - len(page.all("svg")) == 1
    for chart in page.all("svg"):
        assert chart["role"] == "img"
        assert chart["aria-label"]
    tables = [each for each in page.all("div") if each.get("class") == "scroll"]
    assert len(tables) == len(page.all("table")) == len(page.all("caption"))
    assert all(each["tabindex"] == "0" and each["role"] == "region" and each["aria-label"] for each in tables)
    assert all(each["scope"] == "col" for each in page.all("th"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {each["href"] for each in page.all("a")} <= {f"#{each}" for each in ids}


def test_the_style_knows_dark_print_and_narrow() -> None:
    style = html_report(partial_run()).partition("<style>")[2].partition("</style>")[0]
    for rule in ("prefers-color-scheme:dark", "@media print", "max-width:520px", "focus-visible"):
        assert rule in style
    assert "url(" not in style
    assert "@import" not in style


def contrast(first: str, second: str) -> float:
    """Contrast of two colours as WCAG 2 defines it."""

    def light(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * each for each in colour[1:])
        parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        lit = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * lit[0] + 0.7152 * lit[1] + 0.0722 * lit[2]

    high, low = sorted((light(first), light(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_have_contrast_in_light_dark_and_print() -> None:
    style = html_report(partial_run()).partition("<style>")[2]
    sets = [dict(re.findall(r"--(\w+):(#\w+)", block)) for block in re.findall(r":root\{([^}]*)\}", style)]
    assert len(sets) == 3
    for more in sets:
        colours = {**sets[0], **more}
        for word in ("fg", "dim", "link"):
            assert contrast(colours[word], colours["bg"]) >= 4.5
            assert contrast(colours[word], colours["soft"]) >= 4.5
        for verdict in ("pass", "fail", "inconclusive", "skipped"):
            assert contrast(colours[verdict], colours[f"{verdict}bg"]) >= 4.5
            assert contrast(colours[verdict], colours["bg"]) >= 4.5
        for place in range(1, 9):
            assert contrast(colours[f"c{place}"], colours["bg"]) >= 3
            assert contrast(colours[f"c{place}"], colours["on"]) >= 4.5


def test_evidence_is_text_whatever_it_holds(pages: dict[str, Page]) -> None:
    assert (
        "the answer holds colours, a NUL  and <script>alert('no')</script> & more" in pages["validate"].text
    )
    assert "--api-key ******** --model-path /models/x" in pages["validate"].text


def test_of_what_to_do_next_only_the_commands_are_code() -> None:
    hint = "take less <memory>, then ddtree-ops deploy ct200; or look: ddtree-ops logs ct200 --stats"
    check = CheckResult("journal", Verdict.FAIL, "out of memory", hint=hint)
    page = html_report(
        RunReport("nightly", "id", "x", targets=(TargetReport("a", "a", "s", checks=(check,)),))
    )
    assert (
        "<p>next: take less &lt;memory&gt;, then <code>ddtree-ops deploy ct200</code>; or look: "
        "<code>ddtree-ops logs ct200 --stats</code></p>"
    ) in page


def test_the_verdict_on_a_journal_is_not_that_of_the_run() -> None:
    quiet = {"verdict": "pass", "headline": "nothing wrong was found", "source": "b300", "diagnoses": []}
    bad = CheckResult("stop", Verdict.FAIL, "ran on")
    target = TargetReport("b300", "b300", "s", checks=(bad,), diagnoses=(quiet,))
    page = html_report(replace(validate_run(), targets=(target,)))
    assert "<h3>Diagnosis of the journal: b300</h3>" in page


def test_what_failed_comes_first_and_is_open(pages: dict[str, Page]) -> None:
    text = "\n".join(pages["validate"].text)
    places = [text.index(f"\n{name}\n") for name in ("garbage", "lossless", "chat", "tool-call")]
    assert places == sorted(places)
    html = html_report(validate_run())
    assert html.count("<details open><summary>4 pieces of evidence") == 1
    assert html.count('<div class="check card">') == 2
    assert html.count('<details class="check">') == 1
    assert html.count('<div class="check top">') == 2
    assert "2 targets, 5 checks: 1 error, 1 fail, 1 inconclusive, 2 pass, 1 skipped" in text
    assert "ddtree-ops diagnose ct200" in pages["validate"].text


def test_every_figure_is_in_the_table_with_unit_source_and_samples() -> None:
    html = html_report(validate_run())
    row = re.search(r"<tr><td>accept_length</td>.*?</tr>", html)
    assert row
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row[0])
    assert cells[2:7] == ["4.31", "tokens/step", "24", "0.22", "POST /generate meta_info"]
    p99 = re.search(r"<tr><td>ttft</td><td>stat=p99</td>.*?</tr>", html)
    assert p99
    assert '<td class="n">-</td>' in p99[0]
    assert html.count("<tr><td>load_phase</td>") == 5


def test_charts_of_a_bench(pages: dict[str, Page]) -> None:
    labels = [chart["aria-label"] or "" for chart in pages["bench"].all("svg")]
    heads = [label.partition(". ")[0] for label in labels]
    assert heads[:8] == [
        "Speed-up at concurrency 1",
        "Speed-up at concurrency 8",
        "Speed-up at concurrency 32",
        "Output rate",
        "Time to first token, median",
        "Time to first token, 99th percentile",
        "Time per output token, median",
        "Acceptance length",
    ]
    assert sum(head.startswith("Acceptance, ") for head in heads) == 7
    assert sum(head.startswith("Load of ") for head in heads) == 8
    assert labels[2].endswith("ddtree 32/4 1.47×; ddtree 32/8 0.743×")
    assert "baseline: 1 141, 8 630, 32 1710" in labels[3]
    assert "weights 312 s; kv-cache 2.1 s" in next(
        label for label in labels if label.startswith("Load of baseline")
    )


def test_points_of_a_bench_are_a_table_too() -> None:
    html = html_report(bench_run())
    rows = re.findall(r"<tr><td>ddtree 32/8</td>(.*?)</tr>", html)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row)[:3] for row in rows]
    assert cells[:3] == [["1", "2.117", "298.6"], ["8", "1.873", "1180"], ["32", "0.743", "1270"]]


def test_a_partial_report_says_so(pages: dict[str, Page]) -> None:
    assert "Partial report." in pages["partial"].text
    assert "Partial report." not in pages["bench"].text
    assert "bench 20261130T021500Z-ef56: inconclusive (partial)" in pages["partial"].text
    assert "broken off" in pages["partial"].text
    assert "ended" in pages["bench"].text


def test_a_target_of_a_partial_report_passes_so_far() -> None:
    target = TargetReport("h", "h", "s", checks=(CheckResult("c", Verdict.PASS, "fine"),))
    run = RunReport("bench", "r", "2026-11-30T02:15:00+00:00", targets=(target,))
    assert " so far" not in "".join(Page(html_report(replace(run, complete=True))).text)
    assert "".join(Page(html_report(run)).text).count("so far") == 1


def test_many_options_are_folded_and_printed() -> None:
    options: dict[str, object] = {f"o{place}": place for place in range(5)}
    run = RunReport("bench", "r", "2026-11-30T02:15:00+00:00", options=options)
    assert '<details class="told"><summary>5 options of the run</summary><dl><dt>o0</dt>' in html_report(run)
    assert "<dt>option o0</dt>" in html_report(replace(run, options={"o0": 0}))
    assert "details.told::details-content" in html_report(run).partition("@media print{pre")[2]


def test_nothing_at_all_is_a_page_too() -> None:
    page = Page(html_report(RunReport("validate", "r", "never")))
    assert "No target: there is nothing to judge by." in page.text


def test_very_long_evidence_is_cut_and_says_so() -> None:
    check = CheckResult("c", Verdict.FAIL, "x", evidence=(Evidence("journal", "y" * 30_000),))
    html = html_report(RunReport("validate", "r", "", targets=(TargetReport("h", "h", "", checks=(check,)),)))
    assert "… 10000 more characters are in report.json" in html
    assert len(html) < 40_000


def test_many_setups_are_not_many_screens_of_charts() -> None:
    figures = [
        Figure("load_phase", 1.0, "s", "j", labels={"mode": "ddtree", "budget": str(n), "phase": "weights"})
        for n in range(40)
    ]
    html = html_report(replace(bench_run(), targets=(TargetReport("h", "h", "", figures=tuple(figures)),)))
    assert html.count("<svg") == 12
    assert "28 more setups in report.json." in html


@given(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("<>&\"'/=!-")), max_size=20))
@settings(max_examples=25)
def test_no_text_makes_a_tag(text: str) -> None:
    def report(word: str) -> RunReport:
        figures = (
            Figure("output_rate", 2.0, word, word, labels={"mode": word, "concurrency": f"{word}!"}),
            Figure("load_phase", 2.0, "s", word, labels={"phase": word}),
            Figure("accept_histogram", 2.0, "steps", word, labels={"accepted": word}),
            Figure("speedup", 2.0, "ratio", word, labels={"mode": word, "concurrency": "1"}),
        )
        check = CheckResult(
            word, Verdict.FAIL, word, word, {"f": word}, (Evidence(word, word, 1, word),), word
        )
        diagnosis = {"source": word, "verdict": word, "headline": word, "diagnoses": [{"title": word}]}
        target = TargetReport(word, word, word, {"f": word}, (check,), figures, (diagnosis,), (word,))
        return RunReport(word, word, word, options={"o": word}, targets=(target,))

    plain = "".join("x" if each.isprintable() and each != " " else each for each in text)
    assert [tag for tag, _ in Page(html_report(report(text))).tags] == [
        tag for tag, _ in Page(html_report(report(plain))).tags
    ]


class TestCharts:
    """Charts by themselves: well-formed, and nothing outside the picture."""

    CHARTS = (
        bars("t", [Bar("a" * 80, 3.0, "n"), Bar("b", 0.0)], "×", mark=1.0),
        bars("t", [Bar("low", 0.3), Bar("near", 0.97), Bar("high", 1.4)], "×", mark=1.0),
        bars("t", [], ""),
        bars("t", [Bar("tall", 1e12), Bar("low", 1e-12)], " tokens/s", top=1e12),
        waterfall("t", [Bar("a", 300.0), Bar("b", 0.001), Bar("c" * 60, 40.0)], "s"),
        waterfall("t", [Bar("a", 0.0)], "s"),
        columns("t", [Bar(str(n), n) for n in range(40)], "below"),
        columns("t", [Bar("0", 0.0)], "below"),
        lines("t", ["1", "8"], [Series(f"s{n}", [n, None], n) for n in range(20)], "s", "below"),
        lines("t", ["1"], [Series("only", [None])], "s", "below"),
        lines("t", ["1", "2"], [Series("small", [0.00087, 0.00012])], "s", "below"),
    )

    @pytest.mark.parametrize("chart", CHARTS)
    def test_nothing_is_outside(self, chart: str) -> None:
        root = ElementTree.fromstring(chart)
        _, _, width, height = map(float, root.get("viewBox", "").split())
        assert [child.tag for child in root][:2] == ["title", "desc"]
        for part in root.iter():
            x, y = float(part.get("x", "0")), float(part.get("y", "0"))
            across, down = float(part.get("width", "0")), float(part.get("height", "0"))
            assert 0 <= x <= x + across <= width + 2, ElementTree.tostring(part)
            assert 0 <= y <= y + down <= height, ElementTree.tostring(part)
            if part.tag == "text":
                size = len(part.text or "") * 6.6
                left = x - {"start": 0.0, "middle": size / 2, "end": size}[part.get("text-anchor", "")]
                assert left >= -2, part.text
                assert left + size <= width + 2, part.text
        assert "nan" not in chart

    def test_each_bar_begins_where_the_last_one_ends(self) -> None:
        root = ElementTree.fromstring(waterfall("t", [Bar("a", 30.0), Bar("b", 10.0), Bar("c", 60.0)], "s"))
        spans = [(float(bar.get("x", "")), float(bar.get("width", ""))) for bar in root.iter("rect")]
        for (x, width), (following, _) in pairwise(spans):
            assert following == pytest.approx(x + width, abs=0.2)
        assert spans[2][1] == pytest.approx(6 * spans[1][1], rel=0.01)

    def test_a_setup_keeps_its_look_in_all_charts(self) -> None:
        alone = lines("t", ["1"], [Series("b", [1.0], 1)], "s", "x")
        assert 'class="line c2"' in alone
        assert 'class="line c1"' not in alone

    def test_no_word_stands_on_the_line_of_what_it_is_compared_with(self) -> None:
        root = ElementTree.fromstring(self.CHARTS[1])
        (mark,) = [float(line.get("x1", "")) for line in root.iter("line") if line.get("class") == "mark"]
        words = [text for text in root.iter("text") if text.get("class") == "value"]
        for text in words:
            left = float(text.get("x", ""))
            assert not left - 2 < mark < left + 6.6 * len(text.text or ""), text.text
        assert len(words) == 3
