"""Golden cases: one YAML file a case, no code a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.diagnose import DiagnosisReport, LogLine, ServiceFacts, diagnose, read_log
from ddtree_ops.results import Verdict, exit_code_of

CASES = sorted((Path(__file__).parent / "cases").glob("*.yaml"))
KEYS = {"verdict", "signatures", "severity", "explanation", "remedy", "ranks", "count", "consequences"}


def run(case: dict[str, Any]) -> DiagnosisReport:
    facts = ServiceFacts(**case.get("facts", {}))
    if "journal" in case:
        lines = [
            LogLine(text, number, f"2026-11-29T14:53:{number:02d}+00:00", source, pid)
            for number, (pid, source, text) in enumerate(case["journal"], 1)
        ]
        return diagnose(lines, facts)
    return diagnose(read_log(case["lines"].encode()), facts)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case = yaml.safe_load(path.read_text())
    expect = case["expect"]
    assert set(expect) <= KEYS and {"verdict", "signatures"} <= set(expect)
    report = run(case)
    assert [item.signature for item in report.diagnoses] == expect["signatures"], report.headline()
    assert report.verdict == expect["verdict"]
    first = report.diagnoses[0] if report.diagnoses else None
    for name in ("severity", "count"):
        if name in expect:
            assert getattr(first, name) == expect[name]
    if "ranks" in expect:
        assert first is not None and list(first.ranks) == expect["ranks"]
    for name in ("explanation", "remedy"):
        if name in expect:
            assert expect[name] in getattr(first, name)
    if "consequences" in expect:
        assert [item.signature for item in report.consequences] == expect["consequences"]


def test_every_verdict_occurs() -> None:
    verdicts = {yaml.safe_load(path.read_text())["expect"]["verdict"] for path in CASES}
    assert verdicts == {"pass", "fail", "inconclusive"}


def test_json_shape_and_secrets() -> None:
    case = yaml.safe_load((Path(__file__).parent / "cases/graph-size-from-dump.yaml").read_text())
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
    case = yaml.safe_load((Path(__file__).parent / "cases/graph-size-one-request.yaml").read_text())
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
