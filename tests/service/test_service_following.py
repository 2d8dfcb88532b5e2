"""Several journals by time, and going on behind the last entry: as long as journalctl's output is cut anywhere."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.service.following import describe_clocks, merged
from ddtree_ops.service.journal import Entry, EntryParser, raw_texts

BASE = datetime(2026, 11, 29, 14, 53, 55, tzinfo=UTC)


def at(seconds: float | None) -> datetime | None:
    return None if seconds is None else BASE + timedelta(seconds=seconds)


@given(st.lists(st.lists(st.integers(0, 50)), max_size=5))
@settings(max_examples=60)
def test_sources_in_order_come_out_in_order(sources: list[list[int]]) -> None:
    ordered = [sorted(source) for source in sources]
    found = [item for _, item in merged(ordered, at)]
    assert found == sorted(chain.from_iterable(sources))


@given(st.lists(st.lists(st.one_of(st.none(), st.integers(0, 9))), max_size=4))
@settings(max_examples=60)
def test_no_source_is_reordered_and_nothing_is_lost(sources: list[list[int | None]]) -> None:
    found = list(merged(sources, at))
    for number, source in enumerate(sources):
        assert [item for which, item in found if which == number] == source


def test_a_clock_that_was_set_back_holds_nobody_up() -> None:
    found = list(merged([[10, 3, 11], [5, 10, 12]], at))
    assert found == [(1, 5), (0, 10), (0, 3), (1, 10), (0, 11), (1, 12)]


def test_sources_are_read_only_as_far_as_what_is_taken() -> None:
    read = []

    def source(name: str) -> Any:
        for number in range(1000):
            read.append((name, number))
            yield number

    found = merged([source("a"), source("b")], at)
    assert [next(found) for _ in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert len(read) <= 8


@pytest.mark.parametrize(
    ("skews", "said"),
    [
        ({"a": 0.0}, ""),
        ({"a": 0.0, "b": -0.6}, ""),
        ({"a": 0.2, "b": 12.54, "c": 0.1}, "clocks differ: b is 12.4 s ahead of c;"),
    ],
)
def test_clocks_that_differ_are_said(skews: dict[str, float], said: str) -> None:
    text = describe_clocks(skews)
    assert text.startswith(said) and bool(text) == bool(said)


def line(number: int, text: str | None, **more: Any) -> bytes:
    found = {
        "__CURSOR": f"s=1;i={number:x}",
        "__REALTIME_TIMESTAMP": str(1_790_000_000_000_000 + number * 1000),
        "MESSAGE": text,
        "_SYSTEMD_UNIT": "a.service",
        **more,
    }
    return json.dumps(found, separators=(",", ":")).encode() + b"\n"


@st.composite
def journals(draw: st.DrawFn) -> list[bytes]:
    """Entries of two output streams, whose long lines journald split, between entries without a stream."""
    found = []
    for number in range(draw(st.integers(1, 25))):
        stream = draw(st.sampled_from(["x", "y", ""]))
        more = {"_STREAM_ID": stream} if stream else {}
        if stream and draw(st.booleans()):
            more["_LINE_BREAK"] = "line-max"
        found.append(line(number, f"m{number}", **more))
    return found


def read(parser: EntryParser, output: bytes, *, whole: bool) -> list[Entry]:
    found = [
        entry for start in range(0, len(output), 97) for entry in parser.feed(output[start : start + 97])
    ]
    return [*found, *(parser.close() if whole else [])]


@given(journals(), st.lists(st.floats(0, 1), max_size=3))
@settings(max_examples=150)
def test_what_is_cut_anywhere_and_goes_on_loses_and_repeats_nothing(
    lines: list[bytes], cuts: list[float]
) -> None:
    wanted = read(EntryParser(), b"".join(lines), whole=True)
    found: list[Entry] = []
    cursor, known = None, frozenset[str]()
    for cut in [*cuts, None]:
        begin = next((n for n, each in enumerate(lines) if cursor and f'"{cursor}"'.encode() in each), 0)
        output = b"".join(lines[begin:])
        parser = EntryParser(after_cursor=cursor, known=known)
        found += read(parser, output if cut is None else output[: int(cut * len(output))], whole=cut is None)
        cursor, known = parser.resume, frozenset(parser.ahead)
    assert sorted(entry.message for entry in found) == sorted(entry.message for entry in wanted)
    if not cuts:
        assert found == wanted


def test_a_split_line_without_its_rest_does_not_hold_everything_for_ever() -> None:
    parser = EntryParser()
    found = parser.feed(line(0, "half", _STREAM_ID="x", _LINE_BREAK="line-max"))
    for number in range(1, 5000):
        found += parser.feed(line(number, "m"))
    assert len(parser.ahead) < 4096
    assert "half" in [entry.message for entry in found]
    assert len(found) == 5000
    assert parser.resume == f"s=1;i={4999:x}"


def test_what_cannot_match_is_counted_and_not_parsed() -> None:
    lines = [
        line(0, "nothing"),
        line(1, "size of tensor a (8)"),
        line(2, "Suppressed 12 messages from a.service", MESSAGE_ID="a596d6fe7bfa4994828e72309e95d61e"),
        line(3, None, MESSAGE=list(b"\x1b[31msize of tensor\x1b[0m")),
        line(4, "size of ", _STREAM_ID="x", _LINE_BREAK="line-max"),
        line(5, "tensor", _STREAM_ID="x"),
        line(6, "nothing"),
        b'{"__CURSOR":"s=1;i=7","MESSAGE":"cut of',
    ]
    parser = EntryParser(holding=raw_texts("size of tensor"))
    found = read(parser, b"".join(lines), whole=True)
    assert [entry.message for entry in found] == [
        "size of tensor a (8)",
        "Suppressed 12 messages from a.service",
        "size of tensor",
        "size of tensor",
    ]
    assert (parser.passed, parser.damaged) == (2, 1)
    assert (parser.first_us, parser.last_us) == (1_790_000_000_000_000, 1_790_000_000_006_000)


@given(
    st.text(st.characters(max_codepoint=0x2FF), max_size=20),
    st.text('ab|. "\\*(é', max_size=4),
    st.booleans(),
)
@settings(max_examples=300)
def test_texts_that_stand_for_a_pattern_leave_out_no_match(message: str, pattern: str, literal: bool) -> None:
    import re

    texts = raw_texts(pattern, literal=literal)
    if texts is None:
        return
    (entry,) = read(EntryParser(), line(0, message), whole=True)
    matches = re.search(re.escape(pattern) if literal else pattern, entry.message)
    if matches:
        assert read(EntryParser(holding=texts), line(0, message), whole=True) == [entry]


@pytest.mark.parametrize(
    ("pattern", "literal", "texts"),
    [
        ("size of tensor", False, (b"size of tensor",)),
        ("Traceback|CUDA", False, (b"Traceback", b"CUDA")),
        ("a.b", False, None),
        ("a.b (", True, (b"a.b (",)),
        ("a|", False, None),
        ("api_key=***", True, None),
        ('"x"', True, None),
        ("größe", True, None),
    ],
)
def test_which_patterns_are_plain(pattern: str, literal: bool, texts: tuple[bytes, ...] | None) -> None:
    assert raw_texts(pattern, literal=literal) == texts
