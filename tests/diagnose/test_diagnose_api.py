"""Bytes to a verdict: what is lost is never a pass, and the way the bytes come makes no difference."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ddtree_ops.diagnose.api import diagnose_stream
from ddtree_ops.results import Verdict

DATA = Path(__file__).resolve().parents[1] / "data"
STOPPED = (DATA / "journal" / "stop-mixed.json").read_bytes()
CRASHED = (DATA / "journal" / "crash-while-serving.json").read_bytes()


@pytest.mark.parametrize("size", [1 << 20, 777])
def test_pieces_cut_anywhere_give_the_same_report(size: int) -> None:
    whole = diagnose_stream(CRASHED, source="x")
    pieces = [CRASHED[at : at + size] for at in range(0, len(CRASHED), size)]
    assert diagnose_stream(iter(pieces), source="x").to_json() == whole.to_json()
    assert whole.verdict is Verdict.FAIL


def test_a_journal_entry_that_cannot_be_read_is_no_pass() -> None:
    assert diagnose_stream(STOPPED).verdict is Verdict.PASS
    head, _, rest = STOPPED.partition(b"\n")
    found = diagnose_stream(head + b'\n{"MESSAGE":"cut\n' + rest)
    assert (found.verdict, found.searched.damaged) == (Verdict.INCONCLUSIVE, 1)
    assert "1 journal entries could not be read" in found.headline()
    assert diagnose_stream(CRASHED + b'{"MESSAGE":"cut\n').verdict is Verdict.FAIL


def test_every_line_is_counted_though_few_are_parsed() -> None:
    text = (DATA / "logs" / "h200-dflash.log").read_bytes()
    found = diagnose_stream(text)
    assert found.searched.lines == text.count(b"\n")
    assert found.figures is not None and found.figures.overall.decode_lines == text.count(b"Decode batch")


def test_an_input_that_is_cut_off_is_no_pass() -> None:
    packed = gzip.compress((DATA / "logs" / "h200-dflash.log").read_bytes())
    assert diagnose_stream(packed).verdict is Verdict.PASS
    found = diagnose_stream(packed[:-400])
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "but the input is not whole: the gzip data ends in the middle" in found.headline()
    assert diagnose_stream(gzip.compress(CRASHED)[:-10]).verdict is Verdict.FAIL


def test_who_knows_that_the_server_got_ready_is_believed() -> None:
    """Of one engine over several hosts only the head says that it is ready."""
    log = (
        b"[2026-11-29 10:00:00 TP8] Load weight begin. avail mem=93.90 GB\n"
        b"[2026-11-29 10:00:09 TP8] Load weight end. elapsed=9.00 s, type=M, avail mem=21.30 GB\n"
    )
    assert diagnose_stream(log).verdict is Verdict.INCONCLUSIVE
    assert diagnose_stream(log, served=True).verdict is Verdict.PASS
