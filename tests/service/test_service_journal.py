"""The journal: recorded runs of sglang 0.5.11 under systemd 252, cut anywhere, damaged, huge, not UTF-8."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.errors import Inconclusive, UsageError
from ddtree_ops.service.ending import Ending, EndingKind
from ddtree_ops.service.journal import (
    Entry,
    EntryParser,
    MessageId,
    journal_argv,
    parse_entries,
    parse_when,
    search,
)

RECORDED = Path(__file__).parents[1] / "data" / "journal"
UNIT = "sglang-tiny.service"


def read(name: str) -> list[Entry]:
    entries = parse_entries([(RECORDED / f"{name}.json").read_bytes()])
    found = list(entries)
    assert entries.damaged == 0
    return found


def line(message: Any, **more: Any) -> bytes:
    known = {
        "__REALTIME_TIMESTAMP": "1795964021755855",
        "__CURSOR": "c",
        "MESSAGE": message,
        "_SYSTEMD_UNIT": UNIT,
    }
    return json.dumps(known | more).encode() + b"\n"


def messages(data: bytes) -> list[str]:
    return [entry.message for entry in parse_entries([data])]


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_recorded(path: Path) -> None:
    found = read(path.stem)
    assert len(found) == len(path.read_bytes().splitlines())
    assert {entry.source for entry in found} == {"process", "systemd"}
    assert {entry.unit for entry in found} == {UNIT}
    assert len({entry.invocation for entry in found}) == 1
    assert {entry.host for entry in found} == {"ct200"}
    assert all(entry.time.tzinfo is UTC and entry.cursor for entry in found)
    started = next(entry for entry in found if entry.message_id == MessageId.STARTED)
    assert started.fields == {"JOB_TYPE": "start", "JOB_RESULT": "done"}


def test_recorded_times_and_progress() -> None:
    found = read("stop-mixed")
    assert found[0].time == datetime(2026, 11, 29, 14, 53, 41, 755855, tzinfo=UTC)
    bars = [entry for entry in found if "Multi-thread loading" in entry.message]
    assert bars and all("\r" not in entry.message for entry in bars)
    assert any("100% Completed" in entry.message for entry in bars)
    assert any(len(entry.message) > 10_000 for entry in found), "the ServerArgs line"


@pytest.mark.parametrize(
    ("name", "kind", "planned", "words"),
    [
        ("stop-mixed", EndingKind.DRAINED, True, "no crash"),
        ("stop-control-group", EndingKind.KILLED, True, "cut off"),
        ("stop-mixed-force-shutdown", EndingKind.FORCED, True, "SGL_FORCE_SHUTDOWN"),
        (
            "stop-mixed-drain-never-ends",
            EndingKind.TIMED_OUT,
            True,
            "still counted 1 request, and none was running",
        ),
        ("crash-while-serving", EndingKind.CRASHED, False, "killed by SIGKILL"),
        ("crash-then-auto-restart", EndingKind.CRASHED, False, "nobody had asked"),
        ("fail-loading-no-draft-backend", EndingKind.CRASHED, False, "nobody had asked"),
    ],
)
def test_planned_stop_and_crash_are_told_apart(
    name: str, kind: EndingKind, planned: bool, words: str
) -> None:
    ending = Ending.of(read(name))
    assert (ending.kind, ending.planned, ending.crashed) == (kind, planned, not planned)
    assert words in ending.describe()
    assert ending.result == ("timeout" if kind is EndingKind.TIMED_OUT else "signal")


def test_the_entry_of_the_cursor_itself_is_left_out() -> None:
    whole = read("stop-mixed")
    data = (RECORDED / "stop-mixed.json").read_bytes()
    found = list(parse_entries([data], after_cursor=whole[0].cursor))
    assert found == list(whole[1:])
    assert list(parse_entries([data], after_cursor="s=1;i=2")) == list(whole)


def test_a_run_that_goes_on_has_no_ending() -> None:
    found = read("stop-mixed")
    stop = next(index for index, entry in enumerate(found) if entry.message_id == MessageId.STOPPING)
    assert Ending.of(found[: stop - 1]).kind is EndingKind.NOT_ENDED
    assert Ending.of(()).kind is EndingKind.NOT_ENDED


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 60_000), max_size=40))
def test_chunks_may_be_cut_anywhere(cuts: list[int]) -> None:
    data = (RECORDED / "stop-mixed.json").read_bytes()
    edges = [0, *sorted(cuts), len(data)]
    chunks = [data[start:end] for start, end in itertools.pairwise(edges)]
    assert list(parse_entries(chunks)) == list(parse_entries([data]))


@settings(max_examples=80)
@given(parts=st.lists(st.tuples(st.binary(max_size=30), st.booleans()), max_size=8), size=st.integers(1, 50))
def test_any_bytes_as_messages(parts: list[tuple[bytes, bool]], size: int) -> None:
    """Byte lists and texts give the same entry, however they are cut; nothing is lost, nothing raises."""
    data = b"".join(
        line(list(raw) if as_list else raw.decode("utf-8", "replace"), _STREAM_ID=str(index))
        for index, (raw, as_list) in enumerate(parts)
    )
    entries = parse_entries([data[at : at + size] for at in range(0, len(data), size)])
    assert len(list(entries)) == len(parts)
    assert entries.damaged == 0


@settings(max_examples=80)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40), st.sampled_from([b"{", b"[]", b"null", b'{"MESSAGE": {}}', b"1e999"])
        )
    )
)
def test_rubbish_is_counted(rubbish: list[bytes]) -> None:
    lines = [piece for chunk in rubbish for piece in chunk.split(b"\n")]
    parser = EntryParser()
    found = parser.feed(b"\n".join(lines) + b"\n" + line("here")) + parser.close()
    assert [entry.message for entry in found] == ["here"]
    assert parser.damaged == sum(bool(piece.strip()) for piece in lines)


def test_messages() -> None:
    assert messages(line("plain")) == ["plain"]
    assert messages(line(list("größe \xff".encode("latin-1")))) == ["gr\ufffd\ufffde \ufffd"]
    assert messages(line("\r 1%\r 50%\r100%\r")) == ["100%"]
    assert messages(line("\r")) == [""]
    assert messages(line("\x1b[31mred\x1b[0m\x1b[A")) == ["red"]
    assert messages(line([[104, 105], "you"])) == ["hi\nyou"]
    assert messages(line("ServerArgs(api_key='hunter2', max_total_num_tokens=5)")) == [
        "ServerArgs(api_key=********, max_total_num_tokens=5)"
    ]


def test_a_withheld_message_is_counted() -> None:
    entries = parse_entries([line(None)])
    assert [entry.message for entry in entries] == [""]
    assert entries.damaged == 1


def test_a_last_line_without_newline_counts() -> None:
    assert messages(line("a").rstrip()) == ["a"]


def test_a_very_long_line() -> None:
    assert len(messages(line("x" * 3_000_000))[0]) == 3_000_000


def test_a_split_line_is_one_entry_again() -> None:
    """journald cuts a line at 48 KiB, in the middle of a character if it must."""
    whole = "é" * 40_000 + "size of tensor"
    raw = whole.encode()
    cut = 49_151
    data = (
        line(list(raw[:cut]), _STREAM_ID="s", _LINE_BREAK="line-max", __CURSOR="1")
        + line("other", _STREAM_ID="t")
        + line(list(raw[cut:]), _STREAM_ID="s", __CURSOR="2")
    )
    assert messages(data) == ["other", whole]
    assert messages(line("half", _STREAM_ID="s", _LINE_BREAK="line-max")) == ["half"]


def test_sources() -> None:
    (kernel,) = parse_entries([line("NVRM: Xid 79", _TRANSPORT="kernel", _SYSTEMD_UNIT="")])
    assert kernel.source == "kernel"
    (child,) = parse_entries(
        [line("Failed to execute", UNIT=UNIT, INVOCATION_ID="a" * 32, _SYSTEMD_UNIT="init.scope")]
    )
    assert (child.source, child.unit, child.invocation) == ("systemd", UNIT, "a" * 32)


def test_search() -> None:
    result = search(read("crash-while-serving"), r"SIGQUIT received")
    assert [entry.source for entry in result.matches] == ["process"]
    assert (result.searched, result.suppressed, result.damaged, result.complete) == (150, 0, 0, True)
    assert "searched 150 journal entries from 2026-11-29 14:52:" in result.describe()
    assert len(search(read("crash-while-serving"), None).matches) == 150
    assert search(read("stop-mixed"), "no such text").matches == ()
    assert not search(read("stop-mixed"), "FIRED UP").matches
    assert search(read("stop-mixed"), "FIRED UP", ignore_case=True).matches


def test_search_reports_what_is_missing() -> None:
    dropped = line(
        f"Suppressed 120 messages from {UNIT}",
        MESSAGE_ID=MessageId.SUPPRESSED,
        OBJECT_SYSTEMD_UNIT=UNIT,
        _SYSTEMD_UNIT="systemd-journald.service",
    )
    result = search(parse_entries([line("a"), dropped, b"{broken\n"]), "zzz")
    assert (result.suppressed, result.damaged, result.complete) == (120, 1, False)
    assert "120" in result.describe() and "1 entries could not be read" in result.describe()
    fake = search(parse_entries([line(f"Suppressed 120 messages from {UNIT}")]), "zzz")
    assert fake.suppressed == 0, "a process may print what it likes"


@pytest.mark.parametrize("data", [b"", b"\n", b"{broken\n"])
def test_nothing_readable_is_no_answer(data: bytes) -> None:
    with pytest.raises(Inconclusive, match="no readable entry"):
        search(parse_entries([data]), "x")


def test_bad_pattern() -> None:
    with pytest.raises(UsageError, match="not a regular expression"):
        search(read("stop-mixed"), "size of (tensor")


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("10 minutes ago", "-600s"),
        ("2h", "-7200s"),
        ("-2h", "-7200s"),
        ("1h30m", "-5400s"),
        ("1 day and 2 hours ago", "-93600s"),
        ("90s", "-90s"),
        ("today", "today"),
        ("@1795964021.5", "@1795964021.5"),
        ("2026-11-29T14:53:41+00:00", "@1795964021"),
        ("2026-11-29T14:53:41Z", "@1795964021"),
        ("2026-11-29 15:53:41+01:00", "@1795964021"),
        ("2026-11-29 14:53:41.755855", "@1795964021.755855"),
        ("2026-11-29", "@1795910400"),
    ],
)
def test_when(text: str, argument: str) -> None:
    assert parse_when(text) == argument


@pytest.mark.parametrize(
    "text", ["", "soon", "ago", "10 parsecs ago", "29.11.2026", "--flag", "@", "2026-13-01"]
)
def test_not_a_time(text: str) -> None:
    with pytest.raises(UsageError, match="not a time"):
        parse_when(text)


def test_argv_asks_for_both_halves() -> None:
    argv = journal_argv(UNIT, since="2h", lines=50)
    assert argv[:4] == ["journalctl", "--output=json", "--all", "--no-pager"]
    assert {"--since=-7200s", "--lines=50", f"_SYSTEMD_UNIT={UNIT}", f"UNIT={UNIT}", "+"} <= set(argv)
    one = journal_argv(UNIT, invocation="a" * 32, follow=True, after_cursor="s=1;i=2", kernel=True)
    assert {"--follow", "--no-tail", "--cursor=s=1;i=2", "_TRANSPORT=kernel"} <= set(one)
    assert one[one.index(f"_SYSTEMD_INVOCATION_ID={'a' * 32}") + 1] == "+"
    assert f"INVOCATION_ID={'a' * 32}" in one
    for bad in ("current", "x", "A" * 32, "a" * 31):
        with pytest.raises(UsageError):
            journal_argv(UNIT, invocation=bad)
    with pytest.raises(UsageError):
        journal_argv(UNIT, lines=-1)
