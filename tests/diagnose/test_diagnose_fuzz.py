"""Whatever comes in, a verdict comes out: no crash, no pathological time, no growth with one long line."""

from __future__ import annotations

import gzip
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.diagnose import regex
from ddtree_ops.diagnose.api import DiagnosisReport, diagnose_stream
from ddtree_ops.diagnose.formats import detect, unwrap
from ddtree_ops.diagnose.lines import MAX_LINE, LogLine, clean, read_log
from ddtree_ops.errors import UsageError
from ddtree_ops.results import Verdict


def judged(data: bytes) -> DiagnosisReport | None:
    """A report that can be written as JSON; None for what is refused as no log."""
    try:
        report = diagnose_stream(data)
    except UsageError:
        return None
    json.dumps(report.to_json()).encode("utf-8", "strict")
    report.headline()
    assert report.verdict in (Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE)
    return report


@settings(max_examples=40)
@given(data=st.binary(max_size=3000))
def test_random_bytes(data: bytes) -> None:
    judged(data)


def test_noise_is_no_pass() -> None:
    report = judged(random.Random(1).randbytes(200_000))
    assert report is not None
    assert report.verdict is Verdict.INCONCLUSIVE


TOKENS = st.sampled_from(
    [
        *(
            "[2026-11-29 14:00:00 TP0] ",
            "[2026-11-29 14:00:00] ",
            "Traceback (most recent call last):",
            "RuntimeError: x",
        ),
        *(
            '  File "/a/b.py", line 1, in f',
            "    g()",
            "server_args=ServerArgs(",
            "a='",
            "[(",
            ")])",
            "Decode batch, ",
        ),
        *(
            "accept len: ",
            "9" * 400,
            "1e999",
            "-nan",
            "cuda graph: True",
            "Xid (PCI:0000:01:00): 79",
            "\ud800",
            "\0",
        ),
        *(
            "Nov 29 14:00:00 h python[1]: ",
            "2026-11-29T14:00:00Z ",
            '{"MESSAGE":"',
            '{"log":"',
            '"}',
            "\\u001b[",
            "\x1b[",
        ),
        *(
            "[pod/a/b] ",
            "a | ",
            "> ",
            "```",
            "\r",
            "\n",
            "\r\n",
            " ",
            "    ",
            "it][",
            "100%|",
            "During handling of the above ",
        ),
        *(
            "exception, another exception occurred:",
            "The size of tensor a (8) must match the size of tensor b (33)",
        ),
        *(
            "out of memory",
            "systemd[1]: ",
            "kernel: ",
            "[  1.000000] ",
            "usage: ",
            "error: ",
            "é",
            "\u2028",
            "\x85",
            "\x0b",
        ),
    ]
)


@settings(max_examples=120)
@given(parts=st.lists(TOKENS, max_size=60))
def test_text_of_log_like_tokens(parts: list[str]) -> None:
    judged("".join(parts).encode("utf-8", "surrogatepass"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("1" * 400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        *(
            "MESSAGE",
            "__REALTIME_TIMESTAMP",
            "_PID",
            "_TRANSPORT",
            "UNIT",
            "_SYSTEMD_UNIT",
            "_STREAM_ID",
            "_LINE_BREAK",
        ),
        *(
            "SYSLOG_IDENTIFIER",
            "MESSAGE_ID",
            "_HOSTNAME",
            "log",
            "stream",
            "time",
            "message",
            "msg",
            "source",
            "pid",
        ),
    ]
)


@settings(max_examples=120)
@given(records=st.lists(st.dictionaries(NAMES, VALUES, max_size=6), max_size=4))
def test_json_of_any_shape(records: list[dict[str, object]]) -> None:
    for line in read_log("\n".join(map(json.dumps, records)).encode()):
        assert isinstance(line.text, str)
        assert isinstance(line.time, str)
        assert line.pid is None or isinstance(line.pid, int)
        assert line.source in ("process", "systemd", "kernel")


@settings(max_examples=150)
@given(text=st.text(max_size=200) | st.lists(TOKENS, max_size=12).map("".join))
def test_unwrap_and_clean_take_any_text(text: str) -> None:
    form = detect([text, *text.split("\n")])
    piece = unwrap(text, form)
    if piece is not None:
        assert all(isinstance(part, str) for part in clean(piece.text))


@settings(max_examples=40)
@given(text=st.text(max_size=300), pattern=st.text(max_size=20))
def test_any_pattern_is_compiled_or_refused(text: str, pattern: str) -> None:
    try:
        compiled = regex.compile(pattern)
    except regex.RegexError as error:
        assert str(error)
    else:
        found = compiled.search(text)
        assert found is None or isinstance(found[0], str)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_gzip_cut_anywhere(share: float) -> None:
    chance = random.Random(1)
    lines = [
        f"[2026-11-29 14:00:00 TP0] Decode batch, #running-req: {chance.random()}\n" for _ in range(3000)
    ]
    packed = gzip.compress("".join(lines).encode())
    report = judged(packed[: int(len(packed) * share)])
    assert report is not None
    assert any("not whole" in note for note in report.notes) or not report.searched.lines


LONG = 10_000_000


@pytest.mark.parametrize(
    "line",
    [
        b"x" * LONG,
        b"[2026-11-29 14:00:00] RuntimeError: " + b"a" * LONG,
        b"[2026-11-29 14:00:00] server_args=ServerArgs(a=" + b"'\\" * (LONG // 2),
        b'{"MESSAGE":"' + b"\\u00e9" * (LONG // 6) + b'"}',
        b'{"MESSAGE":' + b"[" * LONG,
        b'{"MESSAGE":[' + b"65," * (LONG // 3) + b"65]}",
        b'{"a":' * (LONG // 5),
        b"\x1b[" * (LONG // 2),
        b"\x1b]" * (LONG // 2),
        b"\r" * LONG,
        b"it][" * (LONG // 4),
        bytes(LONG),
        b"> " * (LONG // 2),
        b" " * LONG + b"RuntimeError: x",
        b"Nov 29 14:00:00 h " + b"a" * LONG,
        b"[pod/" + b"a" * LONG,
        b"Traceback (most recent call last):" * (LONG // 34),
        b"accept len: " * (LONG // 12),
    ],
    ids=lambda line: repr(line[:14]),
)  # fmt: skip
def test_a_line_of_ten_megabytes(line: bytes) -> None:
    data = b"[2026-11-29 14:00:00 TP0] before\n" + line + b"\n[2026-11-29 14:00:09 TP0] behind\n"
    lines: list[LogLine] = list(read_log(data))
    assert max(len(found.text) for found in lines) <= MAX_LINE
    assert (lines[0].text, lines[-1].text) == (
        "[2026-11-29 14:00:00 TP0] before",
        "[2026-11-29 14:00:09 TP0] behind",
    )
    report = judged(data)
    assert report is not None
    assert report.searched.lines == 3


def test_nesting_and_numbers_beyond_any_sense() -> None:
    lines = [
        '{"MESSAGE":' + "[" * 5000 + "]" * 5000 + "}",
        '{"MESSAGE":"x","_PID":' + "9" * 5000 + ',"__REALTIME_TIMESTAMP":"' + "9" * 400 + '"}',
        '{"MESSAGE":"y","__REALTIME_TIMESTAMP":"999999999999999999"}',
        '{"MESSAGE":["a",[66,67],[300],{"b":1}]}',
        "[2026-99-99 99:99:99 TP99999] Decode batch, #running-req: " + "9" * 5000 + ", accept len: 1e400",
        "2026-99-99T99:99:99Z x",
    ]
    found = [line.text for line in read_log("\n".join(lines).encode())]
    assert found[-1] == "x"
    assert "x" in found
    assert "y" in found
    judged("\n".join(lines).encode())
