"""Recorded logs: each names its cause first, healthy ones pass, and nothing false stands beside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.diagnose import DiagnosisReport, LogLine, ServiceFacts, diagnose, from_entries, read_log
from ddtree_ops.diagnose.api import diagnose_stream
from ddtree_ops.errors import UsageError
from ddtree_ops.results import Verdict
from ddtree_ops.service.journal import parse_entries

DATA = Path(__file__).parents[1] / "data"
CORPUS = Path(__file__).parents[2].parent / "shared/corpus"

FAIL, PASS, INCONCLUSIVE = Verdict.FAIL, Verdict.PASS, Verdict.INCONCLUSIVE
SCENARIOS: dict[str, tuple[Verdict, list[str]]] = {
    "apikey": (PASS, []),
    "badflag": (FAIL, ["bad-flag"]),
    "badmodel": (FAIL, ["model-path"]),
    "badtoken": (FAIL, ["token-outside-vocab"]),
    "corrupt": (FAIL, ["weights"]),
    "dflash": (PASS, []),
    "dflash_nodraft": (FAIL, ["dflash-no-draft"]),
    "int": (PASS, []),
    "kill9": (PASS, []),
    "killdetok": (FAIL, ["child-died"]),
    "killsched": (FAIL, ["child-died"]),
    "killsched_loading": (FAIL, ["sched-died"]),
    "leak": (PASS, ["req-too-long"]),
    "ngram": (FAIL, ["spec-cuda-only"]),
    "porttaken": (FAIL, ["port"]),
    "stopsched": (PASS, ["detok"]),
    "term": (PASS, []),
    "term_loading": (INCONCLUSIVE, []),
    "termbusy": (PASS, []),
    "termgroup": (PASS, []),
    "venv2_plain": (PASS, []),
}
WHOLE: dict[str, tuple[Verdict, list[str]]] = {
    "sglang-0.5.11-cpu/plain.log": (PASS, ["req-exception", "req-too-long", "req-refused"]),
    "sglang-0.5.11-cpu/dflash-accept4.log": (PASS, ["dflash-greedy-only"]),
    "sglang-0.5.11-h200/plain.log": (PASS, []),
    "sglang-0.5.11-h200/dflash.log": (PASS, []),
    "sglang-0.5.11-h200/ddtree-on-stock-wheel.log": (FAIL, ["unknown-algo"]),
    "sglang-0.5.11-h200/oom-drafter-kv-pool.log": (FAIL, ["oom-kv-pool"]),
    "operator-logs/k25-int4.log": (FAIL, ["triton-smem-attn", "kv-starved"]),
    "operator-logs/k2-nvfp4.log": (FAIL, ["triton-smem-attn"]),
    "operator-logs/k25-int4-sm120fix.log": (PASS, ["kv-starved"]),
}
JOURNALS: dict[str, tuple[Verdict, list[str]]] = {
    "after-restart-then-stop": (PASS, []),
    "crash-then-auto-restart": (FAIL, ["token-outside-vocab"]),
    "crash-while-serving": (FAIL, ["token-outside-vocab"]),
    "fail-loading-no-draft-backend": (FAIL, ["attn-backend-missing"]),
    "stop-control-group": (PASS, []),
    "stop-mixed-drain-never-ends": (PASS, ["systemd-stop-timeout"]),
    "stop-mixed-force-shutdown": (PASS, []),
    "stop-mixed": (PASS, []),
}


SHORTENED = {"cpu-term_loading.log": (PASS, [])}
"""Without the lines of the load that its whole recording ends in."""


def check(report: DiagnosisReport, expected: tuple[Verdict, list[str]]) -> None:
    assert [item.signature for item in report.diagnoses] == expected[1], report.headline()
    assert report.verdict is expected[0]
    json.dumps(report.to_json())


def journal(path: Path) -> Iterator[LogLine]:
    return from_entries(parse_entries([path.read_bytes()]))


def expected_of(name: str) -> tuple[Verdict, list[str]]:
    host, _, scenario = name.removesuffix(".log").partition("-")
    if name in SHORTENED:
        return SHORTENED[name]
    if host == "cpu" and scenario in SCENARIOS:
        return SCENARIOS[scenario]
    return WHOLE[f"sglang-0.5.11-{host}/{scenario}.log"]


@pytest.mark.parametrize("path", sorted((DATA / "logs").glob("*.log")), ids=lambda path: path.stem)
def test_log(path: Path) -> None:
    check(diagnose(read_log(path.read_bytes())), expected_of(path.name))


@pytest.mark.parametrize("path", sorted((DATA / "journal").glob("*.json")), ids=lambda path: path.stem)
def test_journal(path: Path) -> None:
    check(diagnose(journal(path)), JOURNALS[path.stem])


def test_crash_in_a_journal() -> None:
    report = diagnose(
        journal(DATA / "journal/crash-while-serving.json"), ServiceFacts(unit="sglang-tiny.service")
    )
    root = report.root
    assert root is not None
    assert root.traceback[-1] == "IndexError: index out of range in self"
    assert any("unquant.py" in line for line in root.traceback)
    assert root.first.startswith("2026-11-29T14:53:24")
    names = [item.signature for item in report.consequences]
    assert names == ["sched-exc", "sigquit", "systemd-exit", "systemd-failed"]
    assert report.ready and not report.stopped
    assert report.searched.lines >= 140 and report.searched.begin < report.searched.end


def test_planned_stop_in_a_journal() -> None:
    report = diagnose(journal(DATA / "journal/stop-control-group.json"))
    assert report.stopped
    assert [item.signature for item in report.consequences] == [
        "child-died", "sigquit", "systemd-exit", "systemd-failed",
    ]  # fmt: skip


@pytest.mark.corpus
@pytest.mark.parametrize("name", WHOLE)
def test_corpus_log(name: str) -> None:
    path = CORPUS / name
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    report = diagnose(read_log(path.read_bytes()))
    check(report, WHOLE[name])
    if name.startswith("operator-logs") and report.root is not None:
        assert report.root.ranks == tuple(f"TP{rank}" for rank in range(8))
        assert report.root.count == 8
        assert "106496" in report.root.explanation and "101376" in report.root.explanation


@pytest.mark.corpus
@pytest.mark.parametrize("name", SCENARIOS)
def test_corpus_scenario(name: str) -> None:
    path = CORPUS / f"sglang-0.5.11-cpu/scenarios/{name}.log"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    check(diagnose(read_log(path.read_bytes())), SCENARIOS[name])


@pytest.mark.corpus
@pytest.mark.parametrize("name", JOURNALS)
def test_corpus_journal(name: str) -> None:
    path = CORPUS / f"sglang-0.5.11-systemd/{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    check(diagnose(journal(path)), JOURNALS[name])


PIECES = [
    line for path in sorted((DATA / "logs").glob("*.log")) for line in path.read_bytes().splitlines()[-25:]
]
NASTY = [
    b"Traceback (most recent call last):", b"[2026-11-29 14:53:24 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    b"During handling of the above exception, another exception occurred:", b'  File "x", line 1, in f', b"", b"   ", b"\r\r", b"\x1b[",
    b"ServerArgs(", b"server_args=ServerArgs(a='", b"  | ", b"  +-+---------------- 1 ----------------", b"[rank1]:", b"KeyError: 1",
    b"RuntimeError: The size of tensor a (0) must match the size of tensor b (0) at non-singleton dimension 0",
    b"RuntimeError: The size of tensor a (999999999999) must match the size of tensor b (999999999999) at non-singleton dimension 0",
    b"[2026-99-99 99:99:99] Decode batch, #running-req: nan, accept len: inf, #token: 1e999",
]  # fmt: skip


def report_or_refusal(data: bytes, facts: ServiceFacts | None = None) -> DiagnosisReport | None:
    """The report, or None where the bytes begin as another kind of file does, which is refused by name."""
    try:
        return diagnose(read_log(data), facts)
    except UsageError as error:
        assert error.message.startswith("FILE is ")
        return None


@settings(max_examples=80)
@given(st.lists(st.sampled_from(PIECES) | st.sampled_from(NASTY) | st.binary(max_size=60), max_size=40))
def test_any_lines_give_a_report(lines: list[bytes]) -> None:
    report = report_or_refusal(b"\n".join(lines), ServiceFacts(block_size=8, budget=32))
    if report is None:
        return
    json.dumps(report.to_json())
    assert report.headline()
    assert (report.root is not None) == (report.verdict is FAIL)


@settings(max_examples=40)
@given(st.binary(max_size=4000))
def test_any_bytes_give_a_report(data: bytes) -> None:
    report = report_or_refusal(data)
    assert report is None or json.dumps(report.to_json())


@pytest.mark.parametrize("path", sorted((DATA / "logs").glob("*.log")), ids=lambda path: path.stem)
def test_a_thinned_out_log_says_the_same(path: Path) -> None:
    """The sieve leaves most lines out; nothing may rest on their being there."""
    data = path.read_bytes()
    whole, thin = diagnose(read_log(data)), diagnose_stream(data)
    for one, other in ((whole.diagnoses, thin.diagnoses), (whole.consequences, thin.consequences)):
        assert [(d.signature, d.fingerprint, d.count, d.ranks, d.evidence) for d in one] == [
            (d.signature, d.fingerprint, d.count, d.ranks, d.evidence) for d in other
        ]
    assert (whole.verdict, whole.ready, whole.stopped) == (thin.verdict, thin.ready, thin.stopped)


def test_memory_is_bounded() -> None:
    """Different findings without end are kept to a number of groups."""

    def lines() -> Iterator[LogLine]:
        for number in range(600):
            head = f"[2026-11-29 14:53:24 TP{number % 8}] Scheduler hit an exception: Traceback (most recent call last):"
            yield LogLine(head, number * 3 + 1, pid=number)
            yield LogLine(
                f'  File "/opt/rel/sglang/x.py", line 3, in {"f" * (number + 1)}',
                number * 3 + 2,
                pid=number,
            )
            yield LogLine(f"ValueError: {'x' * 5000}", number * 3 + 3, pid=number)

    report = diagnose(lines())
    assert report.root is not None
    found = json.dumps(report.to_json())
    assert len(found) < 2_000_000
    assert len(report.diagnoses) + len(report.consequences) <= 256


def test_a_huge_line() -> None:
    report = diagnose(read_log(b"[2026-11-29 14:53:24] " + b"'" * 10_000_000 + b"\nRuntimeError: x\n"))
    assert report.root is not None and report.root.evidence[0].text == "RuntimeError: x"
    report = diagnose(read_log(b"server_args=ServerArgs(a=" + b"'\\" * 4_000_000))
    assert report.searched.lines == 1


def test_the_mirrored_sizes_of_a_real_gpu_are_not_taken_for_the_missing_patch():
    """33 against 8: a target graph of budget + 1 that was sent the linear block; another cause, another remedy."""
    report = diagnose(read_log((DATA / "gpu/h200-33-against-8.log").read_bytes()))
    assert report.verdict is FAIL
    assert report.root is not None
    assert report.root.signature == "unknown"
    assert "No setting explains both sizes together" in report.root.explanation


@pytest.mark.parametrize("text", [b"# A title\n\nsome prose about errors\n", b"\x7fELF\x02\x01\x01\x00" * 50])
def test_what_is_no_log_of_a_server_is_no_pass(text: bytes):
    report = diagnose(read_log(text))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "no line of an SGLang server" in report.headline()
