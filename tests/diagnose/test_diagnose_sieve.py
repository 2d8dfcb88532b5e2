"""The sieve gives the parser all it needs: diagnoses are those of the whole log, on recorded logs and mixtures."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.diagnose.api import diagnose
from ddtree_ops.diagnose.figures import Tally
from ddtree_ops.diagnose.library import default_library
from ddtree_ops.diagnose.lines import read_log
from ddtree_ops.diagnose.sieve import EDGE, sift
from ddtree_ops.diagnose.source import CHUNK, read_chunks

DATA = Path(__file__).parents[1] / "data"
CORPUS = Path(__file__).parents[2].parent / "shared/corpus"
RECORDED = sorted((DATA / "logs").glob("*.log")) + sorted((DATA / "journal").glob("*.json"))
CORPUS_LOGS = sorted(CORPUS.glob("operator-logs/*.log")) + sorted(CORPUS.glob("*/scenarios/*.log"))


class Nothing:
    """Counts nothing but the bytes and lines it was given."""

    def __init__(self) -> None:
        self.bytes = 0
        self.texts: list[str] = []

    def feed(self, chunk: bytes, *, lines: int | None = None) -> None:
        assert lines is None or lines == chunk.count(b"\n")
        self.bytes += len(chunk)

    def feed_text(self, text: str, time: str) -> None:
        self.texts.append(text)


def serving(count: int, seed: int = 1) -> list[str]:
    chance = random.Random(seed)
    lines = []
    for number in range(count):
        stamp = f"[2026-11-29 15:{number // 60 % 60:02}:{number % 60:02}"
        if chance.random() < 0.7:
            lines.append(
                f"{stamp} TP0] Decode batch, #running-req: {chance.randint(1, 9)}, #token: 194, token usage: 0.05, accept "
                f"len: {1 + chance.random():.2f}, cuda graph: True, gen throughput (token/s): 39.88, #queue-req: 0"
            )
        else:
            lines.append(
                f'{stamp}] INFO:     127.0.0.1:{chance.randint(1, 9)} - "POST /generate HTTP/1.1" 200 OK'
            )
    return lines


def entry(text: str) -> str:
    return json.dumps(
        {
            "__REALTIME_TIMESTAMP": "1795963970792587",
            "_PID": "218",
            "_SYSTEMD_UNIT": "sglang.service",
            "_CMDLINE": "python -m sglang.launch_server --log Error Traceback assert",
            "MESSAGE": text,
        }
    )


def both(
    data: bytes, pieces: Sequence[bytes] | None = None
) -> tuple[dict[str, object], dict[str, object], int, int]:
    """What the sieve and what all lines say, how many lines there are, and how many the sieve had parsed."""
    library = default_library()
    tally = Tally()
    sifted = sift(read_chunks(data) if pieces is None else pieces, literals=library.literals(), tally=tally)
    mine = diagnose(sifted, library=library, figures=tally.figures).to_json()
    true = diagnose(read_log(data), library=library).to_json()
    for report in (mine, true):
        report.pop("figures", None)
        searched = report["searched"]
        assert isinstance(searched, dict)
        searched["lines"] = 0
        report["headline"] = ""
    assert sifted.lines == data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    return mine, true, sifted.lines, sifted.parsed


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_log_between_serving_lines(path: Path) -> None:
    wrap: Callable[[str], str] = entry if path.suffix == ".json" else str
    before, after = (b"".join(f"{wrap(line)}\n".encode() for line in serving(120, seed)) for seed in (1, 2))
    mine, true, lines, parsed = both(before + path.read_bytes().rstrip(b"\n") + b"\n" + after)
    assert mine == true
    assert parsed < lines


@pytest.mark.corpus
@pytest.mark.skipif(not CORPUS_LOGS, reason="the corpus is not here")
@pytest.mark.parametrize("path", CORPUS_LOGS, ids=lambda path: path.stem)
def test_corpus_log(path: Path) -> None:
    mine, true, _, _ = both(path.read_bytes())
    assert mine == true


@cache
def parts() -> list[list[str]]:
    found = [path.read_text(errors="replace").splitlines() for path in sorted((DATA / "logs").glob("*.log"))]
    return [lines for lines in found if len(lines) < 200]


MIXTURE = st.lists(
    st.one_of(
        st.tuples(st.just("log"), st.integers(0, 100), st.integers(0, 3)),
        st.tuples(st.just("serving"), st.integers(0, 130), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=12)
@given(mixture=MIXTURE, cut=st.integers(1, 40), end=st.booleans(), journal=st.booleans())
def test_any_mixture_of_logs(mixture: list[tuple[str, int, int]], cut: int, end: bool, journal: bool) -> None:
    lines: list[str] = []
    for kind, number, seed in mixture:
        if kind == "serving":
            lines += serving(number, seed)
        else:
            log = parts()[number % len(parts())]
            lines += log[: len(log) if seed else len(log) // 2]
    wrapped = [(entry(line) if journal else line).encode() for line in lines]
    data = b"\n".join(wrapped) + (b"\n" if end else b"")
    starts = [0, *range(60, len(wrapped), cut)]
    pieces = [
        b"".join(line + b"\n" for line in wrapped[at:to])
        for at, to in zip(starts, [*starts[1:], len(wrapped)], strict=True)
    ]
    if pieces and not end:
        pieces[-1] = pieces[-1][:-1]
    mine, true, _, _ = both(data, [piece for piece in pieces if piece])
    assert mine == true


def numbers(data: bytes, literals: Sequence[str] = ()) -> list[int]:
    return [line.number for line in sift(read_chunks(data), literals=literals, tally=Nothing())]


def test_serving_lines_are_not_parsed_and_regions_are() -> None:
    lines = serving(5000)
    lines[2000] = "[2026-11-29 15:00:00 TP0] Traceback (most recent call last):"
    lines[3000] = "[2026-11-29 15:00:00 TP0] a literal of somebody's signature"
    data = "\n".join(lines).encode() + b"\n"
    found = numbers(data, ["of somebody's"])
    assert found == sorted(set(found))
    edges = [*range(1, EDGE + 1), *range(5001 - EDGE, 5001)]
    expected = {*edges, *range(2001 - 8, 2001 + 42), *range(3001 - 8, 3001 + 42)}
    assert expected <= set(found)
    assert len(found) < len(expected) + 6


def test_numbers_and_texts_are_true_over_chunks() -> None:
    lines = [f"line {number}" + " filler" * 40 for number in range(1, 40_001)]
    for number in range(700, 40_000, 911):
        lines[number] += " RuntimeError: x"
    data = "\n".join(lines).encode()
    assert len(data) > 2 * CHUNK
    found = list(sift(read_chunks(data), literals=(), tally=Nothing()))
    assert [line.number for line in found] == sorted({line.number for line in found})
    assert all(line.text == lines[line.number - 1] for line in found)
    wanted = {number + 1 for number in range(700, 40_000, 911)}
    assert wanted <= {line.number for line in found}


def test_the_server_is_seen_to_live_on_after_a_region() -> None:
    lines = ["something else"] * 3000
    lines[1000] = "Traceback (most recent call last):"
    lines[2500] = "[2026-11-29 15:00:00 TP0] Decode batch, #running-req: 1"
    assert 2501 in numbers("\n".join(lines).encode())


def test_the_last_time_is_kept_where_the_end_has_none() -> None:
    lines = [*serving(500), *["INFO:     127.0.0.1:1 - x"] * 400]
    assert 500 in numbers("\n".join(lines).encode())


def test_a_literal_is_found_as_json_writes_it() -> None:
    literal = 'no "x" in <a&b> \\ /é\U0001f600'
    for ascii_only in (True, False):
        lines = [entry(line) for line in serving(1000)]
        lines[500] = json.dumps({"MESSAGE": f"said {literal}"}, ensure_ascii=ascii_only)
        for text in (lines[500], lines[500].replace("<", "\\u003C").replace("/", "\\/")):
            data = "\n".join([*lines[:500], text, *lines[501:]]).encode()
            assert 501 in numbers(data, [literal])


def test_a_command_line_in_every_entry_makes_no_entry_hot() -> None:
    data = "\n".join(entry(line) for line in serving(2000)).encode()
    assert len(numbers(data)) <= 2 * EDGE + 2


def test_bytes_of_a_message_are_counted_as_text() -> None:
    tally = Nothing()
    coloured = json.dumps({"__REALTIME_TIMESTAMP": "1795963970792587", "MESSAGE": list(b"Decode batch, x")})
    data = "\n".join(
        [*(entry(line) for line in serving(300)), coloured, *(entry(line) for line in serving(300))]
    )
    list(sift(read_chunks(data.encode()), literals=(), tally=tally))
    assert tally.texts == ["Decode batch, x"]
    assert tally.bytes == len(data.encode())


def test_colours_between_the_letters_hide_nothing() -> None:
    lines = serving(1000)
    lines[500] = "\x1b[31mRuntime\x1b[1mErr\x1b[0mor: x"
    assert 501 in numbers("\n".join(lines).encode())


def test_requests_that_users_wrote_are_not_hot() -> None:
    asked = "[2026-11-29 15:00:00] Receive: obj=GenerateReqInput(text='Traceback RuntimeError: assert')"
    lines = [line for pair in zip(serving(1000), [asked] * 1000, strict=True) for line in pair]
    assert len(numbers("\n".join(lines).encode())) <= 2 * EDGE + 2


def test_nothing_but_hot_lines_is_read_whole() -> None:
    data = b"Traceback (most recent call last):\nRuntimeError: x\n" * 4000
    assert numbers(data) == list(range(1, 8001))


@pytest.mark.parametrize("data", [b"", b"\n", b"\n\n", b"x", b"x\n", b"\n" * 100])
def test_small_logs(data: bytes) -> None:
    sifted = sift(read_chunks(data), literals=(), tally=Nothing())
    assert len(list(sifted)) == sifted.lines == len(data.splitlines())
