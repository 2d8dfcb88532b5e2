"""What of a log is shown: context, the newest matches, phases, ranks, known lines."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.diagnose.lens import (
    PHASE_WORDS,
    Lens,
    Life,
    Query,
    Record,
    Shown,
    moment_of,
    newest,
    parse_phases,
    parse_rank,
    record_of,
    records_of_lines,
)
from ddtree_ops.diagnose.library import load_library
from ddtree_ops.diagnose.lines import read_log
from ddtree_ops.errors import UsageError
from ddtree_ops.service.journal import parse_entries

DATA = Path(__file__).resolve().parents[1] / "data"
CRASH = (
    "RuntimeError: The size of tensor a (8) must match the size of tensor b (33) at non-singleton dimension 0"
)


def looked(query: Query, texts: list[str], *, lines: int | None = None) -> list[Shown]:
    lens = Lens(query)
    found = [lens.feed(record) for record in records_of_lines(read_log("\n".join(texts).encode()))]
    return (
        [shown for batch in found for shown in batch] if lines is None else newest(found, lines, query.before)
    )


def as_grep(shown: list[Shown]) -> list[str]:
    """As ``grep -n`` with context prints it, without the separator before the first group."""
    lines: list[str] = []
    for item in shown:
        if item.gap and lines:
            lines.append("--")
        lines.append(f"{item.record.number}{':' if item.match else '-'}")
    return lines


def grep(marks: list[bool], before: int, after: int) -> list[str]:
    """What grep would print, by definition: a line is shown where a match is near enough."""
    lines: list[str] = []
    last = 0
    for number, match in enumerate(marks, 1):
        near = marks[max(0, number - 1 - after) : number + before]
        if any(near):
            if last and number > last + 1:
                lines.append("--")
            lines.append(f"{number}{':' if match else '-'}")
            last = number
    return lines


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 4), st.integers(0, 4))
@settings(max_examples=150)
def test_context_is_that_of_grep(marks: list[bool], before: int, after: int) -> None:
    texts = ["match" if mark else "other" for mark in marks]
    shown = looked(Query(re.compile("match"), before=before, after=after), texts) if marks else []
    if before or after:
        assert as_grep(shown) == grep(marks, before, after)
    else:
        assert [item.record.number for item in shown] == [n for n, mark in enumerate(marks, 1) if mark]


@given(
    st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 4), st.integers(0, 4), st.integers(1, 4)
)
@settings(max_examples=150)
def test_the_newest_matches_have_their_whole_context(
    marks: list[bool], before: int, after: int, lines: int
) -> None:
    """Older matches count for nothing, other than that they may be context of a newer one."""
    numbers = [number for number, mark in enumerate(marks) if mark]
    kept = [mark and number in numbers[-lines:] for number, mark in enumerate(marks)]
    texts = ["match" if mark else "other" for mark in marks]
    shown = looked(Query(re.compile("match"), before=before, after=after), texts, lines=lines)
    if before or after:
        assert as_grep(shown) == grep(kept, before, after)
    assert sum(item.match for item in shown) == sum(kept)


def test_counts_and_times() -> None:
    lens = Lens(Query(re.compile("b")))
    when = datetime(2026, 11, 29, tzinfo=UTC)
    later = datetime(2026, 11, 30, tzinfo=UTC)
    lens.feed(Record("a", 1, later))
    lens.feed(Record("b", 2, when))
    lens.feed(Record("Suppressed 7 messages from a.service", 3, when, "systemd"))
    assert (lens.searched, lens.matched, lens.suppressed) == (3, 1, 7)
    assert (lens.first, lens.last) == (when, later)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("[2026-01-29 00:24:41 TP0] x", datetime(2026, 1, 29, 0, 24, 41, tzinfo=UTC)),
        ("2026-01-29T00:24:41.5+01:00", datetime(2026, 1, 28, 23, 24, 41, 500_000, tzinfo=UTC)),
        ("2026-01-29T00:24:41,250Z", datetime(2026, 1, 29, 0, 24, 41, 250_000, tzinfo=UTC)),
        ("[2026-13-29 00:24:41] x", None),
        ("x 2026-01-29 00:24:41", None),
    ],
)
def test_times(text: str, moment: datetime | None) -> None:
    assert moment_of(text) == moment


# ------------------------------------------------------------------------------------------------ phases


def phases(records: object) -> list[str]:
    life, found = Life(), [""]
    for record in records:  # type: ignore[attr-defined]
        word = life.feed(record)
        if word != found[-1]:
            found.append(word)
    return found[1:]


LOADED = ["start", "weights", "kv-cache", "start", "weights", "kv-cache", "warm-up", "serving"]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("crash-while-serving", "failed"),
        ("stop-control-group", "stopping"),
        ("stop-mixed", "stopping"),
        ("stop-mixed-drain-never-ends", "stopping"),
        ("stop-mixed-force-shutdown", "stopping"),
    ],
)
def test_the_life_of_real_starts_under_systemd(name: str, end: str) -> None:
    """Target and drafter load one after the other; what follows a planned stop is no failure."""
    raw = (DATA / "journal" / f"{name}.json").read_bytes()
    assert phases(record_of(entry, number) for number, entry in enumerate(parse_entries([raw]), 1)) == [
        *LOADED,
        end,
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cpu-badflag", ["start"]),
        ("cpu-corrupt", ["start", "weights", "failed"]),
        ("cpu-termgroup", ["start", "weights", "kv-cache", "warm-up", "serving", "stopping"]),
        (
            "h200-dflash",
            ["start", "weights", "kv-cache", "graphs"] * 2 + ["warm-up", "serving"],
        ),
        (
            "h200-oom-drafter-kv-pool",
            ["start", "weights", "kv-cache", "graphs", "start", "weights", "failed"],
        ),
    ],
)
def test_the_life_of_real_logs(name: str, words: list[str]) -> None:
    raw = (DATA / "logs" / f"{name}.log").read_bytes()
    assert phases(records_of_lines(read_log(raw))) == words


def test_ranks_have_phases_of_their_own_and_a_new_start_is_one() -> None:
    texts = [
        "[2026-01-29 00:24:41 TP0] Load weight begin. avail mem=1 GB",
        "[2026-01-29 00:24:41 TP1] Load weight begin. avail mem=1 GB",
        "[2026-01-29 00:24:42 TP0] Capture cuda graph begin. This can take up to several minutes.",
        "[2026-01-29 00:24:42 TP1] Using something",
        "[2026-01-29 00:24:42 TP0] Using something",
        "[2026-01-29 00:24:43 TP1] Scheduler hit an exception: Traceback (most recent call last):",
        "[2026-01-29 00:24:44 TP0] Using something",
        "[2026-01-29 00:25:00] server_args=ServerArgs(model_path='/m')",
    ]
    life = Life()
    words = [life.feed(record) for record in records_of_lines(read_log("\n".join(texts).encode()))]
    assert words == ["weights", "weights", "graphs", "weights", "graphs", "failed", "failed", "start"]


def test_a_log_that_begins_in_the_middle() -> None:
    access = '[2026-01-29 00:24:41] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK'
    decode = "[2026-01-29 00:24:41 TP0] Decode batch, #running-req: 1"
    assert phases(records_of_lines(read_log(access.encode()))) == ["serving"]
    assert phases(records_of_lines(read_log(decode.encode()))) == ["serving"]


def test_words_for_phases() -> None:
    assert parse_phases(["loading"]) == {"start", "weights", "kv-cache", "graphs"}
    assert parse_phases(["ready"]) == parse_phases(["Serving"]) == {"serving"}
    assert parse_phases(["warmup,stop", "failed"]) == {"warm-up", "stopping", "failed"}
    assert {phase for words in PHASE_WORDS.values() for phase in words} <= set(PHASE_WORDS)
    with pytest.raises(UsageError) as caught:
        parse_phases(["servin"])
    assert "serving" in caught.value.message and "loading" in caught.value.hint


# ------------------------------------------------------------------------------------------------- ranks

RANKED = [
    "[2026-01-29 00:24:41 DP0 TP3] one",
    "[2026-01-29 00:24:41 DP0 TP4] two",
    "[2026-01-29 00:24:41 DP1 TP3] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/x/scheduler.py", line 1, in run',
    "    self.step()",
    "During handling of the above exception, another exception occurred:",
    "",
    "Traceback (most recent call last):",
    CRASH,
    "plain",
    '[2026-01-29 00:24:41] INFO:     127.0.0.1:1 - "GET / HTTP/1.1" 200 OK',
]


@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [
        (["TP3"], [1, 3, 4, 5, 6, 7, 8, 9]),
        (["tp4"], [2]),
        (["DP0"], [1, 2]),
        (["DP0 TP3"], [1]),
        (["DP1,TP3", "TP4"], [2, 3, 4, 5, 6, 7, 8, 9]),
        (["TP7"], []),
    ],
)
def test_ranks_of_a_file(ranks: list[str], numbers: list[int]) -> None:
    shown = looked(Query(ranks=tuple(parse_rank(each) for each in ranks)), RANKED)
    assert [item.record.number for item in shown] == numbers


def test_in_a_journal_a_rank_is_its_process() -> None:
    lens = Lens(Query(ranks=(parse_rank("TP3"),)))
    said = [
        (7, "[2026-01-29 00:24:41 TP3] one"),
        (8, "[2026-01-29 00:24:41 TP4] two"),
        (8, "x"),
        (7, "x"),
        (9, "x"),
    ]
    shown = [lens.feed(Record(text, number, pid=pid)) for number, (pid, text) in enumerate(said, 1)]
    assert [bool(each) for each in shown] == [True, False, False, True, False]
    assert lens.ranks == ("TP3", "TP4")


@pytest.mark.parametrize(
    ("text", "hint"), [("3", "write TP3"), ("", "write TP3, DP0"), ("rank3x", "write TP3, DP0")]
)
def test_no_rank(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rank(text)
    assert hint in caught.value.hint


# ------------------------------------------------------------------------------------------- signatures


def test_only_what_a_signature_knows_is_shown_with_it() -> None:
    texts = [
        "[2026-01-29 00:24:40] server_args=ServerArgs(speculative_ddtree_budget=32, x='CUDA out of memory')",
        "[2026-01-29 00:24:41 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/x/scheduler.py", line 1, in run',
        CRASH,
        "[2026-01-29 00:24:41] INFO: all is well",
    ]
    shown = looked(Query(library=load_library()), texts)
    found = {item.record.number: item.signature.id for item in shown if item.signature}
    assert found[4] == "ddtree-graph-size"
    assert set(found) == {2, 4}
    assert looked(Query(re.compile("nothing"), load_library()), texts) == []


def test_the_frames_of_a_traceback_tell_signatures_apart() -> None:
    raw = (DATA / "logs" / "h200-oom-drafter-kv-pool.log").read_bytes()
    lens = Lens(Query(re.compile("CUDA out of memory"), load_library()))
    shown = [item for record in records_of_lines(read_log(raw)) for item in lens.feed(record)]
    assert [item.signature.id for item in shown if item.signature] == ["oom-kv-pool"]


@pytest.mark.parametrize("path", sorted((DATA / "logs").glob("*.log")), ids=lambda path: path.stem)
def test_nothing_but_known_lines_of_real_logs(path: Path) -> None:
    library = load_library()
    lens = Lens(Query(library=library))
    for record in records_of_lines(read_log(path.read_bytes())):
        for item in lens.feed(record):
            assert item.signature is not None and library[item.signature.id] is item.signature
            assert "ServerArgs(" not in item.record.text
    assert lens.searched
