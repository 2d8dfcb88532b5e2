"""Skimming a log shows just what reading every line of it shows, in every wrapping."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.diagnose.lens import Lens, Query
from ddtree_ops.diagnose.library import load_library
from ddtree_ops.diagnose.skim import Skim, needed_texts

LOGS = sorted((Path(__file__).resolve().parents[1] / "data/logs").glob("*.log"))
BUSY = (
    "[2026-11-29 14:00:00 TP0] Decode batch, #running-req: 8, #token: 4000, token usage: 0.10, accept len: 3.10, #queue-req: 0",
    "[2026-11-29 14:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0, cuda graph: False",
    '[2026-11-29 14:00:00] INFO:     127.0.0.1:51234 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    'INFO:     127.0.0.1:51234 - "GET /health HTTP/1.1" 200 OK',
)


def _docker(lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        when = f"2026-11-29T14:00:{number % 60:02}.5Z"
        if number % 37 == 36 and len(line) > 20:
            yield json.dumps({"log": line[:9], "stream": "stderr", "time": when}, separators=(",", ":"))
            line = line[9:]
        yield json.dumps({"log": f"{line}\n", "stream": "stderr", "time": when}, separators=(",", ":"))


def _journal(lines: list[str], *, mixed: bool = False) -> Iterator[str]:
    for number, line in enumerate(lines):
        entry = {
            "__REALTIME_TIMESTAMP": str(1_795_963_970_792_587 + number * 100_000),
            "_PID": str(218 + number % 3),
            "_SYSTEMD_UNIT": "sglang.service",
            "_STREAM_ID": "9d3a",
            "_TRANSPORT": "stdout",
            "SYSLOG_IDENTIFIER": "python",
            "MESSAGE": line,
        }
        if mixed and number % 11 == 7:
            other = {
                "_SYSTEMD_UNIT": "ssh.service",
                "SYSLOG_IDENTIFIER": "sshd",
                "_PID": "7",
                "MESSAGE": f"Error {line}",
            }
            yield json.dumps({**entry, **other}, separators=(",", ":"))
        if mixed and number % 13 == 5:
            unit = {
                "UNIT": "sglang.service",
                "SYSLOG_IDENTIFIER": "systemd",
                "_PID": "1",
                "MESSAGE": "Started it.",
            }
            yield json.dumps({**entry, **unit}, separators=(",", ":"))
        yield json.dumps(entry, separators=(",", ":"))


WRAPPINGS: dict[str, Callable[[list[str]], Iterator[str]]] = {
    "plain": iter,
    "docker-json": _docker,
    "journal-json": _journal,
    "journal-mixed": lambda lines: _journal(lines, mixed=True),
    "journal-short": lambda lines: (f"Nov 29 14:52:51 gpu1 python[{218 + len(line) % 3}]: {line}" for line in lines),
    "docker-t": lambda lines: (f"2026-11-29T14:00:00.123456789Z {line}" for line in lines),
    "jenkins": lambda lines: (f"[2026-11-29T14:00:00.123Z] {line}" for line in lines),
    "cri": lambda lines: (
        f"2026-11-29T14:00:00.123456789Z stderr {'P' if number % 29 == 28 else 'F'} {line}"
        for number, line in enumerate(lines)
    ),
    "kubectl": lambda lines: (f"[pod/sglang-0/main] {line}" for line in lines),
    "compose": lambda lines: (f"sglang-{len(line) % 2}  | {line}" for line in lines),
    "quoted": lambda lines: (f"> {line}" for line in lines),
}  # fmt: skip
QUERIES: dict[str, Query] = {
    "literal": Query(re.compile("HTTP/1")),
    "escaped": Query(re.compile(re.escape('"GET /health'))),
    "context": Query(re.compile("Error|Traceback"), before=3, after=2),
    "before": Query(re.compile("rror.*: "), before=4),
    "after": Query(re.compile("Prefill"), after=1),
    "folded": Query(re.compile("error", re.IGNORECASE), before=1, after=1),
    "expression": Query(re.compile(r"\b\d{5}\b|[a-z]+Error")),
    "anchored": Query(re.compile(r"^\w+Error: .*\S$"), before=2),
    "backwards": Query(re.compile(r"(?<=Decode )batch"), after=2),
    "nothing": Query(re.compile("no such text in it"), before=2, after=2),
    "signatures": Query(library=load_library()),
    "signatures-context": Query(library=load_library(), before=3, after=3),
    "signatures-grep": Query(re.compile("rror"), load_library(), before=1),
    "rank": Query(re.compile("rror"), ranks=(frozenset({"TP1"}),)),
    "phase": Query(phases=frozenset({"graphs", "failed"})),
}


def _chunks(data: bytes, size: int) -> Iterator[bytes]:
    """Whole lines, so many at a time, as one piece of input each."""
    lines = re.findall(rb"[^\n]*\n|[^\n]+", data)
    for at in range(0, len(lines), size):
        yield b"".join(lines[at : at + size])


def _looked(data: bytes, query: Query, *, quick: bool, size: int = 0) -> tuple[object, ...]:
    lens = Lens(query)
    skim = Skim(data, lens, quick=quick)
    if size:
        skim._chunks = _chunks(data, size)  # type: ignore[assignment]
    shown = [item for batch in skim for item in batch]
    seen = [
        (one.record, one.match, one.gap, one.phase, one.rank, one.signature and one.signature.id)
        for one in shown
    ]
    return seen, lens.searched, lens.matched, lens.suppressed, lens.first, lens.last, lens.ranks


def _busy(lines: list[str], chance: random.Random) -> list[str]:
    """The lines of a log, each a few times with a stretch of a busy server before it."""
    mixed: list[str] = []
    for line in lines:
        if chance.random() < 0.1:
            mixed += [chance.choice(BUSY) for _ in range(chance.randint(1, 25))]
        mixed.append(line)
    return mixed + [chance.choice(BUSY) for _ in range(40)]


def _same(data: bytes, query: Query, size: int) -> None:
    for lines in (0, size):
        assert _looked(data, query, quick=True, size=lines) == _looked(data, query, quick=False, size=lines)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_recorded_logs_in_every_wrapping(wrapping: str) -> None:
    chance = random.Random(wrapping)
    for path in chance.sample(LOGS, 3):
        lines = path.read_text("utf-8", "replace").split("\n")[:250]
        data = "\n".join(WRAPPINGS[wrapping](_busy(lines, chance))).encode()
        for query in chance.sample(sorted(QUERIES), 6):
            _same(data, QUERIES[query], chance.randint(20, 90))


PIECES = [
    *BUSY, "", "  File \"/x/sglang/a.py\", line 3, in f", "    call()", "Traceback (most recent call last):",
    "[2026-11-29 14:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):",
    "RuntimeError: CUDA error: an illegal memory access was encountered", "torch.OutOfMemoryError: CUDA out of memory.",
    "Capturing batches:  50%|█████ | 2/4 [00:00<?, ?it/s]\rCapturing batches: 100%|██████████| 4/4 [00:00<?, ?it/s]",
    "\x1b[31mError\x1b[0m of \x1b[1mcolour", "ERROR: ſtrange K letters", "a\tb | c", "kernel: Error", "{", '{"log": 3}',
    "Nov 29 14:52:51 gpu1 sshd[9]: Error of another", "Nov 29 14:52:51 gpu1 kernel: Error", "<6>[    1.000000] Error",
    "[2026-11-29T14:00:00.123Z] [2026-11-29 14:00:00 TP3] Error", "web-9  | Error", "(Worker pid=42) Error", "```",
]  # fmt: skip


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(WRAPPINGS)), st.lists(st.sampled_from(PIECES), max_size=12)),
        max_size=5,
    ),
    st.sampled_from(sorted(QUERIES)),
    st.integers(1, 60),
)
@settings(max_examples=60)
def test_any_mixture(parts: list[tuple[str, list[str]]], query: str, size: int) -> None:
    lines = [line for wrapping, texts in parts for line in WRAPPINGS[wrapping](texts)]
    _same("\n".join(lines).encode(), QUERIES[query], size)


@pytest.mark.parametrize(
    "wrapping", ["plain", "docker-json", "journal-json", "journal-short", "docker-t", "jenkins", "kubectl"]
)
def test_lines_of_a_busy_server_are_not_read(wrapping: str) -> None:
    lines = [*PIECES[5:8], *BUSY * 500]
    data = ("\n".join(WRAPPINGS[wrapping](lines)) + "\n").encode()
    for query in ("nothing", "signatures"):
        skim = Skim(data, Lens(QUERIES[query]))
        assert not [one for batch in skim for one in batch if one.record.number > 3]
        assert skim.read < len(lines) / 8


def test_no_signature_knows_a_line_of_a_healthy_server() -> None:
    """Each would be shown by the million."""
    literals = load_library().all_literals()
    for line in BUSY:
        assert [literal for literal in literals if literal in line] == []


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("illegal memory", ("illegal memory",)),
        ("illegal.*access", ("illegal",)),
        ("Xid|CUDA error", ("Xid", "CUDA error")),
        (r"a\.bcd?", ("a.bc",)),
        (r"out of\s+memory", ("out of",)),
        ("abc+d", ("abc",)),
        (r"f\(abc\)", ("f(abc)",)),
        (r"\d+", None),
        ("ab|longer", None),
        ("(abc)?", None),
        ("[abc]def", None),
        ("abc|", None),
    ],
)
def test_texts_that_an_expression_needs(pattern: str, texts: tuple[str, ...] | None) -> None:
    assert needed_texts(pattern) == texts
