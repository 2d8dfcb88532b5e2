"""A real server, broken on a CPU in the ways an operator breaks it: each log names its cause and nothing false."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.diagnose import DiagnosisReport, diagnose_stream
from ddtree_ops.diagnose.library import load_library
from ddtree_ops.results import Verdict, exit_code_of

DATA = Path(__file__).parents[1] / "data/real-breaks"
CASES: dict[str, dict[str, Any]] = {
    case["name"]: case for case in yaml.safe_load((DATA / "index.yaml").read_text())["cases"]
}
KNOWN = {signature.id for signature in load_library().signatures} | {"unknown"}
EXIT = {"pass": 0, "fail": 5, "inconclusive": 8}


def stored(name: str) -> Path:
    plain = DATA / f"{name}.log"
    return plain if plain.exists() else DATA / f"{name}.log.gz"


def judged(name: str) -> DiagnosisReport:
    with stored(name).open("rb") as stream:
        return diagnose_stream(stream, library=load_library())


@pytest.mark.parametrize("name", CASES)
def test_real_break(name: str) -> None:
    case = CASES[name]
    report = judged(name)
    found = [item.signature for item in report.diagnoses]
    assert found == case["found"], report.headline()
    assert report.verdict == case["verdict"]
    assert exit_code_of(report.verdict) == EXIT[case["verdict"]]
    assert (report.root is not None) == (case["verdict"] == "fail")
    text = json.dumps(report.to_json(), ensure_ascii=False)
    for said in case.get("says", []):
        assert said in text
    ids = {item.signature for item in (*report.diagnoses, *report.consequences)}
    for word in case.get("absent", []):
        assert word not in (ids if word in KNOWN else text)
    if report.root is not None and report.root.signature == "unknown":
        assert case["exception"] in report.root.explanation
        assert any(f", in {case['function']}" in line for line in report.root.traceback)


def test_index_is_whole() -> None:
    logs = {path.name.partition(".log")[0] for path in DATA.glob("*.log*")}
    assert logs == set(CASES)
    assert {case["verdict"] for case in CASES.values()} == set(EXIT)
    assert sum(case["exit"] not in (0, None) for case in CASES.values()) >= 12


def test_packed_and_plain_agree() -> None:
    plain = DATA / "story.log"
    packed = diagnose_stream(gzip.compress(plain.read_bytes()), library=load_library())
    assert packed.to_json() == judged("story").to_json()
    assert packed.verdict is Verdict.FAIL


def test_nothing_of_the_machine_is_left() -> None:
    for name in CASES:
        path = stored(name)
        raw = path.read_bytes() if path.suffix == ".log" else gzip.decompress(path.read_bytes())
        roots = set(re.findall(rb"(?<![\w.:/<>-])/([a-z][a-z0-9_]*)/", raw))
        assert roots <= {b"srv", b"usr", b"bin", b"v1"}, (name, roots)
