"""Figures of a log: exact whatever the wrapping and the cut, bounded, and found wanting only where they are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.attention import CHAIN_BACKENDS, drops_tree_mask
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.figures import (
    DETECTORS,
    Figures,
    Life,
    Sample,
    Tally,
    above_block,
    findings,
    read_example,
    useless,
)
from ddtree_ops.diagnose.library import load_library

LIBRARY = load_library()
DATA = Path(__file__).parents[1] / "data"
OPERATORS = Path(__file__).parents[3] / "shared" / "corpus" / "operator-logs"
START = datetime(2026, 3, 2, 10, 0, 0)


def decode(
    second: float = 0,
    *,
    rank: str = "TP0",
    running: int = 1,
    tokens: int = 100,
    usage: float = 0.01,
    accept: float | None = 2.0,
    graph: bool = True,
    rate: float = 80.0,
    queued: int = 0,
    prefix: bool = True,
) -> str:
    time = START + timedelta(seconds=second)
    speculation = "" if accept is None else f"accept len: {accept:.2f}, accept rate: 0.14, "
    head = f"[{time:%Y-%m-%d %H:%M:%S} {rank}] " if prefix else ""
    return (
        f"{head}Decode batch, #running-req: {running}, #token: {tokens}, token usage: {usage:.2f}, {speculation}"
        f"cuda graph: {graph}, gen throughput (token/s): {rate:.2f}, #queue-req: {queued}"
    )


PREFILL = (
    "[2026-03-02 10:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 27, #cached-token: 13, token usage: 0.01, "
    "#running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: False, input throughput (token/s): 10.86"
)
DUMP = (
    "[2026-03-02 09:58:00] server_args=ServerArgs(model_path='/models/m', speculative_algorithm='DFLASH', "
    "speculative_num_draft_tokens=8, decode_log_interval=40, device='cuda', disable_cuda_graph=False, cuda_graph_max_bs=4)"
)
LIMITS = (
    "[2026-03-02 09:59:00 TP0] max_total_num_tokens=4578, chunked_prefill_size=8192, context_len=262144, "
    "available_gpu_mem=19.71 GB"
)
READY = "[2026-03-02 09:59:10] The server is fired up and ready to roll!"
RETRACT = "[2026-03-02 10:00:00 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 9"
POST = '[2026-03-02 10:00:09] INFO:     127.0.0.1:41000 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
HEALTH = '[2026-03-02 10:00:09] INFO:     127.0.0.1:41000 - "GET /health HTTP/1.1" 503 Service Unavailable'
BANG = "[2026-03-02 10:00:00] Finish: obj=GenerateReqInput(text='Decode batch, accept len: 9.00, '), out={'text': '!!!!!!!!!!!!!!!!'}"
FINISH = "[2026-03-02 10:00:00] Finish: obj=GenerateReqInput(text='!!!!!!!!!!!!!!!!'), out={'text': 'Prefill batch'}"
OTHERS = (
    *(
        "",
        "Traceback (most recent call last):",
        "[2026-03-02 10:00:00 TP1] Load weight begin. avail mem=21 GB",
    ),
    "+ export SGLANG_SIMULATE_ACC_LEN=3",
    "[2026-03-02 09:59:00 TP0] KV Cache is allocated. #tokens: 4578, KV size: 0.30 GB",
    "[2026-03-02 09:59:00 TP0] Capture cuda graph bs [1, 2, 4]",
)

LINES = st.lists(
    st.one_of(
        st.sampled_from((PREFILL, DUMP, LIMITS, READY, RETRACT, POST, HEALTH, BANG, FINISH, *OTHERS)),
        st.builds(
            decode,
            st.integers(0, 5000),
            rank=st.sampled_from(("TP0", "DP0 TP0", "DP3 TP3")),
            running=st.integers(1, 9),
            accept=st.one_of(st.none(), st.floats(1, 12, allow_nan=False).map(lambda value: round(value, 2))),
            graph=st.booleans(),
        ),
    ),
    max_size=60,
)

EXACT = (
    *("decode_lines", "prefill_lines", "with_graph", "without_graph", "accept", "retractions", "retracted"),
    *("pool_tokens", "context_len", "available_gb", "graph_sizes", "arguments", "ready", "finished", "bangs"),
    *("quiet_unhealthy", "quiet_posts", "stopping", "evidence"),
)


def exact(figures: Figures) -> list[object]:
    lives = [[getattr(life, name) for name in EXACT] for life in (figures.last, figures.overall)]
    return [
        lives,
        figures.lines,
        figures.starts,
        figures.ready,
        figures.simulated,
        figures.simulated_line,
        figures.decode_summary(),
    ]


def tallied(chunks: Iterable[bytes]) -> Figures:
    tally = Tally()
    for chunk in chunks:
        tally.feed(chunk)
    return tally.figures()


@settings(max_examples=150)
@given(LINES, st.lists(st.integers(0, 12000), max_size=8), st.booleans())
def test_any_cut_into_chunks_or_lines_gives_the_same(
    lines: list[str], cuts: list[int], newline: bool
) -> None:
    data = "\n".join(lines).encode() + (b"\n" if newline or not lines or not lines[-1] else b"")
    whole = tallied([data])
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert exact(tallied(data[a:b] for a, b in pairwise(places))) == exact(whole)
    tally = Tally()
    for line in data.decode().split("\n")[:-1] if data.endswith(b"\n") else data.decode().split("\n"):
        tally.feed_text(line)
    assert exact(tally.figures()) == exact(whole)
    assert tally.figures() == tally.figures()


@settings(max_examples=60)
@given(LINES, st.integers(0, 60))
def test_figures_can_be_asked_for_in_between(lines: list[str], at: int) -> None:
    tally, other = Tally(), Tally()
    for number, line in enumerate(lines):
        if number == at:
            tally.figures()
        tally.feed(line.encode() + b"\n")
        other.feed(line.encode() + b"\n")
    assert exact(tally.figures()) == exact(other.figures())


def journal(line: str) -> str:
    return json.dumps(
        {"__REALTIME_TIMESTAMP": "1772445600000000", "MESSAGE": line, "PRIORITY": "6", "_PID": "1"}
    )


WRAPPINGS = {
    "journal-json": journal,
    "docker-json": lambda line: json.dumps(
        {"log": line + "\n", "stream": "stderr", "time": "2026-03-02T10:00:00.1Z"}
    ),
    "journal-iso": lambda line: f"2026-03-02T10:00:00+0000 gpu1 sglang[77]: {line}",
    "kubectl": lambda line: f"2026-03-02T10:00:00.123456789Z {line}",
    "compose": lambda line: f"engine-1  | {line}",
    "crlf": lambda line: f"{line}\r",
    "quoted": lambda line: f"> {line}",
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@settings(max_examples=25)
@given(lines=LINES)
def test_wrappings_do_not_matter(wrapping: str, lines: list[str]) -> None:
    plain = tallied(["".join(f"{line}\n" for line in lines).encode()])
    wrapped = tallied(["".join(f"{WRAPPINGS[wrapping](line)}\n" for line in lines).encode()])
    for mine, other in ((plain.last, wrapped.last), (plain.overall, wrapped.overall)):
        for name in EXACT:
            if name != "evidence":
                assert getattr(mine, name) == getattr(other, name), name
        assert {key: (one.line, one.text) for key, one in mine.evidence.items() if key != "bang"} == {
            key: (one.line, one.text) for key, one in other.evidence.items() if key != "bang"
        }
        assert mine.samples == other.samples
    assert (plain.starts, plain.ready, plain.simulated) == (wrapped.starts, wrapped.ready, wrapped.simulated)
    assert plain.series == wrapped.series


@pytest.mark.parametrize("wrapping", ["journal-json", "docker-json", "journal-iso", "kubectl"])
def test_time_is_the_wrappings_where_a_line_has_none(wrapping: str) -> None:
    figures = tallied([WRAPPINGS[wrapping](decode(prefix=False)).encode()])
    assert [sample.time for sample in figures.last.samples] == ["2026-03-02 10:00:00"]
    assert [bucket.start for bucket in figures.series.buckets] == ["2026-03-02 10:00:00"]


def test_time_given_with_a_text() -> None:
    tally = Tally()
    tally.feed_text(decode(5, prefix=False), "2026-03-02T10:00:00.5+00:00")
    tally.feed_text(decode(5), "2026-03-02T18:00:00+00:00")
    tally.feed_text(decode(prefix=False))
    assert [sample.time for sample in tally.figures().last.samples] == [
        "2026-03-02 10:00:00",
        "2026-03-02 10:00:05",
        "",
    ]


def test_what_is_counted() -> None:
    figures = read_example(
        "\n".join(
            [
                DUMP,
                OTHERS[-1],
                LIMITS,
                READY,
                PREFILL,
                decode(accept=2.5),
                decode(2, accept=3.5, graph=False),
                RETRACT,
            ]
        )
    )
    life = figures.last
    assert (life.decode_lines, life.prefill_lines, life.with_graph, life.without_graph) == (2, 1, 1, 1)
    assert (life.accept_mean, life.accept_max, life.accept_lines) == (3.0, 3.5, 2)
    assert (life.accept_quantile(0.1), life.accept_quantile(0.9)) == (2.5, 3.5)
    assert (life.pool_tokens, life.context_len, life.available_gb) == (4578, 262144, 19.71)
    assert (life.graph_sizes, life.retractions, life.retracted) == ((1, 2, 4), 1, 3)
    assert (life.new_tokens, life.cached_tokens, life.prefill_samples) == (27, 13, 1)
    assert figures.ready == ("2026-03-02 09:59:10",)
    assert life.evidence["accept"].line == 7
    assert life.evidence["accept"].text == decode(2, accept=3.5, graph=False)
    assert figures and not Figures() and not read_example("nothing of a server\n")


def test_what_users_wrote_is_no_figure() -> None:
    figures = read_example("\n".join([BANG, FINISH, decode(accept=2.0)]))
    assert (figures.last.decode_lines, figures.last.prefill_lines) == (1, 0)
    assert figures.last.accept == {2.0: 1}
    assert (figures.last.finished, figures.last.bangs) == (2, 1)
    asked = "[2026-03-02 10:00:00] Receive: obj=GenerateReqInput(text='SGLANG_SIMULATE_ACC_LEN=3')"
    assert read_example(asked).simulated is None
    assert read_example(f"Receive OpenAI: obj=ChatCompletionRequest(messages=['{DUMP}'])").starts == 0


def test_a_restart_begins_a_new_life() -> None:
    first = [DUMP, LIMITS, READY, *[decode(n, accept=3.0) for n in range(5)]]
    second = [DUMP, LIMITS.replace("4578", "400000"), *[decode(n + 60, accept=1.5) for n in range(3)]]
    figures = read_example("\n".join([*first, *second]))
    assert (figures.starts, figures.restarts) == (2, 1)
    assert (figures.last.accept, figures.overall.accept) == ({1.5: 3}, {3.0: 5, 1.5: 3})
    assert (figures.last.pool_tokens, figures.overall.decode_lines) == (400000, 8)
    assert (figures.last.ready, len(figures.ready)) == (False, 1)
    assert len(figures.last.samples) == 3 and figures.series.samples == 8
    assert [d.signature for d in findings(figures, ServiceFacts(), LIBRARY)] == []


def test_only_rank_0_makes_the_series() -> None:
    lines = [
        decode(n, rank=rank, rate=rate) for n in range(9) for rank, rate in (("DP0 TP0", 10), ("DP1 TP1", 90))
    ]
    figures = read_example("\n".join(lines))
    assert (figures.last.decode_lines, figures.last.other_ranks, figures.series.samples) == (18, 9, 9)
    throughput = figures.last.stats["throughput"]
    assert (throughput.n, throughput.mean, throughput.max) == (9, 10.0, 10.0)


def test_a_large_log_is_sampled_evenly_and_bounded() -> None:
    tally = Tally()
    total, seconds = 0, 0
    for _ in range(40):
        lines = [decode(seconds + n, rate=float(n), accept=1 + n % 7) for n in range(2000)]
        total, seconds = total + len(lines), seconds + len(lines)
        tally.feed(("\n".join(lines) + "\n").encode())
    figures = tally.figures()
    assert figures.last.decode_lines == total == figures.lines
    assert sum(figures.last.accept.values()) == total
    assert 500 <= len(figures.last.samples) <= 1024
    buckets = figures.series.buckets
    assert 128 <= len(buckets) <= 513
    assert sum(bucket.n for bucket in buckets) == figures.series.samples
    assert [bucket.start for bucket in buckets] == sorted(bucket.start for bucket in buckets)
    gaps = [
        (b.at or 0) - (a.at or 0)
        for a, b in zip(figures.last.samples, figures.last.samples[1:], strict=False)
    ]
    assert max(gaps) <= 3 * total / len(figures.last.samples)
    assert gaps and figures.last.samples[-1].at - figures.last.samples[0].at >= 0.98 * total
    for bucket in buckets:
        stat = bucket.throughput
        assert stat is not None and stat.n == bucket.n
        assert 0 <= stat.min <= stat.mean <= stat.max <= 1999


def test_a_line_without_end_is_bounded() -> None:
    tally = Tally()
    for _ in range(100):
        tally.feed(b"x" * 100_000)
    tally.feed(b"\n" + decode().encode())
    figures = tally.figures()
    assert (figures.lines, figures.last.decode_lines) == (2, 1)


@settings(max_examples=100)
@given(st.binary(max_size=4000))
def test_any_bytes(data: bytes) -> None:
    for junk in (data, b"[2026-03-02 10:00:00] Decode batch, " + data, b"server_args=ServerArgs(" + data):
        figures = tallied([junk])
        json.dumps(figures.to_json())
        findings(figures, ServiceFacts(block_size=8), LIBRARY)


@pytest.mark.parametrize(
    "mark", [b"Decode batch", b"accept len: 1.2.3", b"max_total_num_tokens=9", b"#retracted_reqs: "]
)
def test_cut_off_lines(mark: bytes) -> None:
    figures = tallied([mark, mark + b"\n" + mark + b"9" * 50 + b"\n"])
    assert figures.lines == 2
    findings(figures, ServiceFacts(), LIBRARY)


def test_json_names_unit_samples_and_exactness() -> None:
    figures = read_example(
        "\n".join([DUMP, LIMITS, READY, PREFILL, *[decode(n, accept=2 + n % 3) for n in range(300)]])
    )
    document = json.loads(json.dumps(figures.to_json()))
    assert document["starts"] == 1 and document["ready"] == ["2026-03-02 09:59:10"]
    for life in (document["last"], document["overall"]):
        assert life["accept_len"] == {
            "value": 3.0,
            "min": 2.0,
            "p10": 2.0,
            "p50": 3.0,
            "p90": 4.0,
            "max": 4.0,
            "unit": "tokens/verify step",
            "samples": 300,
            "exact": True,
        }
        for figure in life.values():
            assert {"value", "unit", "samples", "exact"} <= set(figure)
        assert life["throughput"]["unit"] == "tokens/s" and not life["throughput"]["exact"]
        assert life["pool_tokens"]["value"] == 4578
    assert sum(bucket["n"] for bucket in document["series"]) == figures.series.samples


# --- findings


def names(figures: Figures, facts: ServiceFacts | None = None) -> list[str]:
    return [item.signature for item in findings(figures, facts or ServiceFacts(), LIBRARY)]


@pytest.mark.parametrize("name", DETECTORS)
def test_no_data_is_no_finding(name: str) -> None:
    everything = ServiceFacts(
        algorithm="DDTREE", block_size=8, budget=32, min_accept_length=3.0, cuda_graph_max_bs=8
    )
    for figures in (Figures(), read_example("hello\n"), read_example(READY)):
        assert DETECTORS[name].function(figures, ServiceFacts()) is None
        assert DETECTORS[name].function(figures, everything) is None


HEALTHY = [
    *sorted((DATA / "logs").glob("*.log")),
    *sorted((DATA / "journal").glob("*.json")),
    *sorted((DATA / "gpu").glob("*.log")),
]


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.name)
def test_recorded_logs_show_no_degradation(path: Path) -> None:
    """None of them is degraded: accept length 8 of 8 on a repetitive prompt and no graphs on a CPU are right."""
    figures = tallied([path.read_bytes()])
    assert names(figures) == []
    assert figures or not any(mark in path.read_bytes() for mark in (b"Decode batch", b"ServerArgs("))


def test_the_figures_of_a_recorded_gpu_log() -> None:
    life = tallied([(DATA / "logs" / "h200-dflash.log").read_bytes()]).last
    assert life.accept == {7.9: 2, 7.96: 1, 8.0: 1}
    assert (life.with_graph, life.without_graph, life.graph_sizes) == (4, 0, (1, 2, 3, 4))
    assert (life.pool_tokens, life.context_len, life.ready) == (17483486, 2048, True)


@pytest.mark.corpus
@pytest.mark.skipif(not OPERATORS.exists(), reason="the operators' logs are not part of this repository")
@pytest.mark.parametrize(
    ("name", "expected"),
    [("k2-nvfp4", []), ("k25-int4-sm120fix", ["kv-starved"]), ("k25-int4", ["kv-starved"])],
)
def test_operators_logs(name: str, expected: list[str]) -> None:
    """Graphs are off there by choice, which is not reported; a pool of 4578 tokens is, with the memory left over."""
    figures = tallied([(OPERATORS / f"{name}.log").read_bytes()])
    found = findings(figures, ServiceFacts(), LIBRARY)
    assert [item.signature for item in found] == expected
    if expected:
        assert "1/57 of the context length 262144" in found[0].explanation
        assert "19.71 GB" in found[0].explanation
        assert found[0].evidence[0].text.startswith("[2026-01-29 0")


@pytest.mark.parametrize(
    ("most", "facts", "dump", "found"),
    [
        (8.01, {"block_size": 8}, "", False),
        (8.02, {"block_size": 8}, "", True),
        (33.0, {"budget": 32}, "", False),
        (33.5, {"budget": 32}, "", True),
        (9.0, {}, "", False),
        (9.0, {"block_size": 8}, "speculative_algorithm='DFLASH', speculative_num_draft_tokens=16", False),
        (9.0, {"block_size": 16}, "speculative_algorithm='DFLASH', speculative_num_draft_tokens=8", False),
        (9.0, {}, "speculative_algorithm='DFLASH', speculative_num_draft_tokens=8", True),
        (
            9.0,
            {"block_size": 8},
            "speculative_algorithm='DDTREE', speculative_ddtree_budget=32, speculative_num_draft_tokens=33",
            True,
        ),
        (5.0, {"block_size": 4}, "speculative_algorithm='EAGLE', speculative_num_draft_tokens=16", False),
        (17.0, {"block_size": 4}, "speculative_algorithm='EAGLE', speculative_num_draft_tokens=16", True),
    ],
)
def test_impossible_by_arithmetic_only(most: float, facts: dict[str, int], dump: str, found: bool) -> None:
    text = f"server_args=ServerArgs(model_path='m', {dump})\n" if dump else ""
    figures = read_example(text + decode(accept=most))
    assert ("accept-impossible" in names(figures, ServiceFacts(**facts))) is found
    assert above_block(8.02, 8) and not above_block(8.01, 8)


@given(st.floats(1.0, 12.0))
def test_one_rule_with_the_checks(value: float) -> None:
    """``smoke.speculation`` judges with the same two functions."""
    assert useless(value) == (value <= 1.005)
    life = Life(accept={value: 50}, decode_lines=50)
    found = names(replace(Figures(), last=life, overall=life), ServiceFacts(block_size=8))
    assert ("accept-one" in found) is useless(value)
    assert ("accept-impossible" in found) is above_block(value, 8)


@pytest.mark.parametrize("lines", range(3, 8))
def test_accept_one_needs_five_lines(lines: int) -> None:
    assert ("accept-one" in names(read_example("\n".join([decode(accept=1.0)] * lines)))) is (lines >= 5)


@given(st.floats(0.5, 1.5), st.integers(5, 40))
def test_throughput_decay_follows_steps_not_tokens(factor: float, runs: int) -> None:
    """What counts is steps a second, so a change of acceptance alone is none."""
    first = [Sample(running=2, tokens=900, accept=4.0, throughput=160.0, steady=True)] * runs
    last = [Sample(running=2, tokens=900, accept=2.0, throughput=80.0 * factor, steady=True)] * runs
    life = Life(samples=tuple(first + first[:1] + last), decode_lines=2 * runs)
    found = names(replace(Figures(), last=life))
    if factor >= 0.71 or 2 * runs < 30:
        assert found == []
    if factor < 0.69 and runs >= 25:
        assert found == ["throughput-decay"]


def test_decay_is_not_idleness() -> None:
    """One short request an hour: throughput over the gap says nothing."""
    busy = [decode(n, tokens=100 + 80 * (n % 2), rate=80) for n in range(60)]
    idle = [decode(3600 * n, tokens=180, rate=0.02) for n in range(1, 61)]
    figures = read_example("\n".join([*busy, *idle]))
    assert sum(sample.steady for sample in figures.last.samples) == 30
    assert names(figures) == []


def test_a_few_lines_without_a_graph_at_large_batches_are_fine() -> None:
    lines = [
        OTHERS[-1],
        *[decode(n, running=3) for n in range(20)],
        *[decode(99, running=9, graph=False)] * 20,
    ]
    assert names(read_example("\n".join(lines))) == []
    lines += [decode(200 + n, running=3, graph=False) for n in range(20)]
    assert names(read_example("\n".join(lines))) == ["eager"]


@pytest.mark.parametrize("backend", [*CHAIN_BACKENDS, "flashinfer", "triton", "fa3", "unheard-of"])
def test_backends_that_drop_the_mask(backend: str) -> None:
    dump = f"server_args=ServerArgs(model_path='/m/Qwen3', speculative_algorithm='DDTREE', attention_backend='{backend}')"
    assert (names(read_example(f"{dump}\n{decode()}")) == ["mask-ignored"]) is (backend in CHAIN_BACKENDS)
    assert drops_tree_mask(backend, "/m/Kimi-K2.6") is (backend in (*CHAIN_BACKENDS, "flashinfer"))


def test_stalled_server_of_a_journal() -> None:
    """Found in escaped JSON too, where the quotes of access lines are escaped."""
    lines = [READY, *[decode(n) for n in range(6)]]
    lines += [HEALTH.replace("10:00:09", f"10:0{n}:00") for n in range(1, 8)]
    for wrap in (str, journal):
        assert names(tallied(["\n".join(map(wrap, lines)).encode()])) == ["stalled"]
    drained = [
        *lines[:8],
        "[2026-03-02 10:00:30] SIGTERM received. signum=None frame=None. Draining",
        *lines[8:],
    ]
    assert names(read_example("\n".join(drained))) == []
    assert names(read_example("\n".join([*lines, decode(600)]))) == []


def test_requests_without_a_batch_are_a_stall_where_prefill_is_logged() -> None:
    posts = [POST.replace("10:00:09", f"10:0{n}:00") for n in range(1, 8)]
    served = [READY, *[decode(n) for n in range(6)]]
    assert names(read_example("\n".join([*served, *posts]))) == []
    assert names(read_example("\n".join([*[PREFILL] * 5, *served, *posts]))) == ["stalled"]
    assert names(read_example("\n".join([*[PREFILL] * 5, *served, *posts[:4]]))) == []


def test_findings_are_ordered_explained_and_can_be_skipped() -> None:
    text = "\n".join(
        [
            LIMITS,
            "+ export SGLANG_SIMULATE_ACC_LEN=3.5 HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345",
            decode(),
        ]
    )
    figures = read_example(text)
    found = findings(figures, ServiceFacts(), LIBRARY)
    assert [(item.signature, item.severity) for item in found] == [
        ("simulated", "fatal"),
        ("kv-starved", "degraded"),
    ]
    assert found[0].evidence[0].line == 2 and "hf_abc" not in found[0].evidence[0].text
    assert found[1].evidence[0].text == LIMITS
    assert [item.signature for item in findings(figures, ServiceFacts(), LIBRARY, skip={"simulated"})] == [
        "kv-starved"
    ]


def test_the_environment_of_the_service_counts_too() -> None:
    assert names(read_example(decode()), ServiceFacts(simulated=2.5)) == ["simulated"]


@pytest.mark.parametrize("value", ["-1", "0", "0.0"])
def test_simulation_that_is_off(value: str) -> None:
    assert names(read_example(f"SGLANG_SIMULATE_ACC_LEN={value}\n{decode()}")) == []
