"""Golden cases: one YAML file a case, no code a case.

``kind: lookalike`` marks what only looks like a failure, or like another failure than it is. ``source`` is the public
thread a case was rewritten from, with invented names and paths, or the part of sglang that says so.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.diagnose import DiagnosisReport, LogLine, ServiceFacts, diagnose, load_library, read_log
from ddtree_ops.diagnose.api import diagnose_stream
from ddtree_ops.results import Verdict, exit_code_of

DIRECTORY = Path(__file__).parent / "cases"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CASES = {path.stem: yaml.load(path.read_bytes(), LOADER) for path in sorted(DIRECTORY.glob("*.yaml"))}
KEYS = {"title", "source", "kind", "facts", "lines", "journal", "expect"}
EXPECTED = {"verdict", "signatures", "severity", "explanation", "remedy", "ranks", "count", "consequences"}
HARMLESS = ("degraded", "request")


def run(case: dict[str, Any]) -> DiagnosisReport:
    facts = ServiceFacts(**case.get("facts", {}))
    if "journal" in case:
        lines = [
            LogLine(text, number, f"2026-11-29T14:53:{number:02d}+00:00", source, pid)
            for number, (pid, source, text) in enumerate(case["journal"], 1)
        ]
        return diagnose(lines, facts)
    return diagnose(read_log(case["lines"].encode()), facts)


def each(key: str = "expect") -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name, case in CASES.items() if key in case])


@each()
def test_case(name: str) -> None:
    case = CASES[name]
    expect = case["expect"]
    report = run(case)
    assert [item.signature for item in report.diagnoses] == expect["signatures"], report.headline()
    assert report.verdict == expect["verdict"]
    first = report.diagnoses[0] if report.diagnoses else None
    for key in ("severity", "count"):
        if key in expect:
            assert getattr(first, key) == expect[key]
    if "ranks" in expect:
        assert first is not None and list(first.ranks) == expect["ranks"]
    for key in ("explanation", "remedy"):
        if key in expect:
            assert expect[key] in getattr(first, key)
    if "consequences" in expect:
        assert [item.signature for item in report.consequences] == expect["consequences"]


@each("lines")
def test_the_same_from_a_stream(name: str) -> None:
    """What leaves most lines unread finds what reading all of them finds."""
    case = CASES[name]
    facts = ServiceFacts(**case.get("facts", {}))
    report = diagnose_stream(case["lines"].encode(), facts)
    assert [item.signature for item in report.diagnoses] == case["expect"]["signatures"], report.headline()
    assert report.verdict == case["expect"]["verdict"]
    every = run(case)
    assert report.searched.lines == case["lines"].count("\n")
    for found, wanted in zip(report.diagnoses, every.diagnoses, strict=True):
        assert (found.explanation, found.ranks, found.count) == (
            wanted.explanation,
            wanted.ranks,
            wanted.count,
        )
        assert found.evidence == wanted.evidence


@each()
def test_each_case_says_what_it_is(name: str) -> None:
    case = CASES[name]
    assert set(case) <= KEYS and set(case["expect"]) <= EXPECTED
    assert {"verdict", "signatures"} <= set(case["expect"])
    assert ("lines" in case) != ("journal" in case)
    assert case.get("kind", "lookalike") == "lookalike"
    assert case["title"] and case["source"]
    if case["source"].startswith("http"):
        assert re.fullmatch(r"https://[\w./#?=-]+", case["source"])
    if "kind" in case:
        known = [load_library()[name] for name in case["expect"]["signatures"] if name != "unknown"]
        assert all(signature.severity in HARMLESS for signature in known), "its finding is a failure"


def test_there_are_enough() -> None:
    lookalikes = [name for name, case in CASES.items() if "kind" in case]
    assert len(CASES) - len(lookalikes) >= 80
    assert len(lookalikes) >= 60


def test_cases_hold_no_addresses() -> None:
    """Rewritten, not copied: addresses are those of documentation."""
    for name, path in ((path.stem, path) for path in DIRECTORY.glob("*.yaml")):
        found = re.findall(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", path.read_text())
        assert not [one for one in found if not one.startswith(("127.0.0.", "192.0.2.", "0.0.0.0"))], name


def test_every_verdict_occurs() -> None:
    verdicts = {case["expect"]["verdict"] for case in CASES.values()}
    assert verdicts == {"pass", "fail", "inconclusive"}


def test_json_shape_and_secrets() -> None:
    case = CASES["graph-size-from-dump"]
    report = run(case)
    found = report.to_json()
    assert found["schema"] == 1
    assert found["verdict"] == "fail"
    assert set(found) >= {"diagnoses", "consequences", "searched", "facts"}
    assert set(found["diagnoses"][0]) >= {
        "signature", "severity", "title", "explanation", "remedy", "ranks", "count", "first", "fingerprint", "evidence",
    }  # fmt: skip
    assert found["searched"]["lines"] == 5
    assert found["searched"]["from"] == "2026-11-29 14:50:00"
    assert found["diagnoses"][0]["first"] == "2026-11-29 14:53:24"
    assert found["diagnoses"][0]["evidence"] == [
        {
            "line": 5,
            "text": "RuntimeError: The size of tensor a (36) must match the size of tensor b (63) "
            "at non-singleton dimension 0",
        }
    ]
    assert found["facts"]["tensor_parallel"] == 8
    assert "budget" in found["facts"]["from_log"]
    assert "sk-very-secret" not in str(found)


def test_check_result() -> None:
    case = CASES["graph-size-one-request"]
    result = run(case).as_check(host="ct200")
    assert result.verdict is Verdict.FAIL
    assert exit_code_of(result.verdict) == 5
    assert result.summary.startswith(
        "ddtree-graph-size on TP0: 8 = 1 x block_size 8, 33 = 1 x (budget 32 + 1)"
    )
    assert result.hint == "deploy the patched runtime: ddtree-ops deploy ct200"
    assert result.evidence[0].line == 6 and result.evidence[0].source == "journal"
    empty = diagnose([]).as_check()
    assert empty.verdict is Verdict.INCONCLUSIVE
    assert "no lines were read" in empty.summary
