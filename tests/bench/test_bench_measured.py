"""Statistics, what load generators print, and how a point is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_ops.checks.bench.generators import (
    BENCH_SERVING,
    Load,
    bench_serving_argv,
    dataset,
    find_bench_serving,
    numbered,
    parse_bench_serving,
    parse_own,
)
from ddtree_ops.checks.bench.measured import (
    Distribution,
    Measurement,
    Sample,
    figures_of,
    from_samples,
    mad,
    percentile,
)
from ddtree_ops.checks.bench.measuring import (
    accept_figure,
    default_prompts,
    judge_point,
    load_figures,
    memory_figures,
    parse_nvidia_smi,
    wrong_speculation,
)
from ddtree_ops.checks.bench.points import Configuration, Point
from ddtree_ops.checks.engine import ServerInfo
from ddtree_ops.checks.speculation import summarise_decode
from ddtree_ops.inventory.models import Host, RuntimeSpec, SecretSource, Service, Target
from ddtree_ops.results import Verdict
from ddtree_ops.runreport import figures_named
from ddtree_ops.secret import Secret
from ddtree_ops.service.journal import Entry
from ddtree_ops.service.state import UnitState

DATA = Path(__file__).with_name("data")
GOLDEN = (DATA / "bench_serving-0.5.11.out").read_text("utf-8")
"""Standard output of the real ``sglang.bench_serving`` 0.5.11 against the real server on a CPU, 6 requests, 2 at a time."""
TREE = Point(Configuration("ddtree", 16, 4), 2)
DECODE = "Decode batch, #running-req: 1, #token: 194, token usage: 0.05, accept len: {}, accept rate: 1.00, cuda graph: True, gen throughput (token/s): 39.88, #queue-req: 0"
SHOWN = {
    "ActiveState": "active",
    "SubState": "running",
    "LoadState": "loaded",
    "InvocationID": "a" * 32,
    "MainPID": "7",
    "NRestarts": "0",
}


def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.splitlines()[-1])
    return found


def state(**more: str) -> UnitState:
    return UnitState.parse({**SHOWN, **more})


def info(**more: Any) -> ServerInfo:
    raw = more.pop("raw", {})
    return ServerInfo("0.5.11", more.get("algorithm"), more.get("length"), None, None, raw)


class TestStatistics:
    def test_percentiles_lie_between_the_two_nearest(self):
        assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
        assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
        assert percentile([7.0], 99) == 7.0
        assert percentile([], 99) is None

    def test_deviations_are_from_the_median_and_need_two_values(self):
        assert mad([1.0, 2.0, 3.0, 4.0, 100.0]) == 1.0
        assert mad([5.0]) is None

    def test_the_first_token_is_no_part_of_the_time_a_token(self):
        assert Sample(ttft=1.0, latency=3.0, tokens=5).tpot == 0.5
        for sample in (
            Sample(1.0, 3.0, 1),
            Sample(1.0, 3.0, None),
            Sample(None, 3.0, 5),
            Sample(1.0, 3.0, 5, "x"),
        ):
            assert sample.tpot is None

    def test_requests_become_figures_with_unit_source_samples_and_spread(self):
        samples = [
            Sample(0.1, 1.1, 11),
            Sample(0.3, 2.3, 21),
            Sample(error="503: busy"),
            Sample(error="503: busy"),
        ]
        found = from_samples("g", samples, 4.0)
        assert (found.completed, found.failed, found.tokens, found.errors) == (2, 2, 32, ("503: busy",))
        figures = figures_of(found, {"mode": "dflash"})
        (ttft,) = figures_named(figures, "ttft", stat="median")
        assert (ttft.value, ttft.unit, ttft.source, ttft.samples) == (0.2, "s", "g", 2)
        assert ttft.spread == pytest.approx(0.1)
        assert ttft.labels == {"mode": "dflash", "stat": "median"}
        (tpot,) = figures_named(figures, "tpot", stat="p99")
        assert tpot.value == pytest.approx(0.1)
        values = {figure.name: figure.value for figure in figures}
        assert (values["output_rate"], values["request_rate"], values["failed_requests"]) == (8.0, 0.5, 2.0)

    def test_what_was_not_measured_is_none_and_never_0(self):
        figures = figures_of(from_samples("g", [Sample(error="refused")], 1.0), {})
        values = {(figure.name, figure.labels.get("stat", "")): figure.value for figure in figures}
        assert values == {
            ("ttft", "median"): None,
            ("tpot", "median"): None,
            ("latency", "median"): None,
            ("output_rate", ""): None,
            ("request_rate", ""): None,
            ("failed_requests", ""): 1.0,
        }

    def test_one_answer_that_was_not_counted_leaves_the_rate_unknown(self):
        assert from_samples("g", [Sample(0.1, 1.0, 9), Sample(0.1, 1.0, None)], 1.0).output_rate is None


class TestBenchServing:
    def test_the_real_output(self):
        found = parse_bench_serving(GOLDEN, requested=6)
        assert found is not None
        said = document()
        assert (found.generator, found.completed, found.failed, found.tokens) == (BENCH_SERVING, 6, 0, 144)
        assert found.output_rate == pytest.approx(said["output_throughput"])
        assert found.accept_length == 3.9
        for name, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("latency", "e2e_latency")):
            times = found.times[name]
            assert times is not None
            assert times.median == pytest.approx(said[f"median_{theirs}_ms"] / 1000)
            assert times.p99 == pytest.approx(said[f"p99_{theirs}_ms"] / 1000)
            assert times.samples == 6
            assert times.spread is not None and times.spread < times.median

    def test_its_definitions_are_ours(self):
        said = document()
        assert percentile(said["ttfts"], 99) == pytest.approx(said["p99_ttft_ms"] / 1000)
        samples = [
            Sample(ttft, ttft + sum(rest), tokens)
            for ttft, rest, tokens in zip(said["ttfts"], said["itls"], said["output_lens"], strict=True)
        ]
        ours = from_samples("own", samples, said["duration"])
        tpot = ours.times["tpot"]
        assert tpot is not None
        assert tpot.median == pytest.approx(said["median_tpot_ms"] / 1000, rel=0.05), "but for its last chunk"

    def test_the_api_key_in_its_result_is_not_kept(self):
        assert "golden-key" in GOLDEN, "server_info shows it"
        assert "golden-key" not in repr(parse_bench_serving(GOLDEN, requested=6))

    def test_requests_that_failed_count_and_are_told(self):
        broken = document()
        broken["completed"] = 5
        broken["errors"][3] = "Traceback (most recent call last):\n  ...\nServerDisconnectedError: gone"
        broken["output_lens"][3] = 0
        found = parse_bench_serving(json.dumps(broken), requested=6)
        assert found is not None
        assert (found.failed, found.errors) == (1, ("ServerDisconnectedError: gone",))
        ttft = found.times["ttft"]
        assert ttft is not None and ttft.samples == 5

    def test_requests_that_were_left_out_count_as_failed(self):
        found = parse_bench_serving(GOLDEN, requested=8)
        assert found is not None and found.failed == 2

    @pytest.mark.parametrize(
        "text", ["", "Warmup failed", GOLDEN.rpartition("\n{")[0], '{"request_throughput": 1}']
    )
    def test_without_a_result_there_is_none(self, text):
        assert parse_bench_serving(text, requested=6) is None

    def test_words_around_and_after_the_result_are_passed_over(self):
        noise = f"{{not json\n{GOLDEN}\nclosing\n"
        assert parse_bench_serving(noise, requested=6) == parse_bench_serving(GOLDEN, requested=6)

    @pytest.mark.parametrize("end", ["\x85", "\u2028", "\x1c"])
    def test_only_a_line_feed_ends_its_line(self, end):
        document = {**json.loads(GOLDEN.splitlines()[-1]), "generated_texts": [f"a{end}{{b"]}
        line = json.dumps(document, ensure_ascii=False)
        assert parse_bench_serving(f"begin{end}\n{line}\n", requested=6) == parse_bench_serving(
            GOLDEN, requested=6
        )

    def test_the_command_line_has_no_key_and_is_no_shell_text(self):
        service = Service(unit="s.service", runtime="r", venv="/v", model="/models/a b;c", port=30001)
        target = Target(host=Host(name="h"), service=service, runtime=RuntimeSpec())
        load = Load("served", ("a", "b"), 2, 64, 90.0, 900.0, Secret("s3cr3t-key-1"))
        argv = bench_serving_argv(target, load, "/x/prompts.jsonl")
        assert argv[:3] == ["/v/bin/python", "-m", "sglang.bench_serving"]
        options = dict(zip(argv[3:-4:2], argv[4:-4:2], strict=True))
        assert options["--model"] == "/models/a b;c"
        assert options["--base-url"] == "http://127.0.0.1:30001"
        assert (options["--num-prompts"], options["--max-concurrency"]) == ("2", "2")
        assert options["--dataset-name"] == "custom"
        assert {"--disable-ignore-eos", "--flush-cache", "--output-details"} <= set(argv)
        assert "s3cr3t" not in " ".join(argv)

    def test_it_runs_with_the_variables_of_the_engine_and_the_api_key_alone_of_the_secrets(self):
        service = Service(
            unit="s.service",
            runtime="r",
            venv="/v",
            model="/m",
            environment={"LD_LIBRARY_PATH": "/cuda", "HF_HUB_OFFLINE": "0"},
            secrets={"HF_TOKEN": SecretSource(env="MINE")},
        )
        target = Target(host=Host(name="h"), service=service, runtime=RuntimeSpec())
        given: list[dict[str, str]] = []

        def run(argv: list[str], *, env: dict[str, str], deadline: float) -> Any:
            given.append(env)
            return SimpleNamespace(rc=1, stdout=b"", stderr=b"ModuleNotFoundError: No module named 'x'")

        why = find_bench_serving(SimpleNamespace(run=run), target)
        assert why == "sglang.bench_serving does not run in /v: ModuleNotFoundError: No module named 'x'"
        (env,) = given
        assert (env["LD_LIBRARY_PATH"], env["HF_HUB_OFFLINE"]) == ("/cuda", "1")
        assert env["PYTHONPATH"] == "/opt/ddtree-ops/services/s.service/current"
        assert not {"HF_TOKEN", "OPENAI_API_KEY"} & set(env)

    def test_no_two_requests_share_a_prefix(self):
        prompts = numbered(["one", "two"], 5)
        assert prompts == ("(1) one", "(2) two", "(3) one", "(4) two", "(5) one")
        rows = [json.loads(line) for line in dataset(prompts).splitlines()]
        assert [row["conversations"][0]["content"] for row in rows] == list(prompts)
        assert all(len(row["conversations"]) == 2 for row in rows), "rows of one turn are left out by it"

    def test_the_shipped_prompts_are_chats(self):
        assert len(default_prompts()) == 16
        assert all(len(text) > 20 or not text.isascii() for text in default_prompts())


class TestOwn:
    def test_what_it_prints(self):
        sample = {"ttft": 0.1, "latency": 0.5, "tokens": 9, "error": ""}
        found = parse_own(
            json.dumps({"seconds": 2.0, "samples": [sample, {**sample, "error": "gone"}]}).encode()
        )
        assert found is not None
        assert (found.completed, found.failed, found.output_rate) == (1, 1, 4.5)

    @pytest.mark.parametrize("text", [b"", b"[]", b'{"samples": [null], "seconds": 1}', b'{"samples": []}'])
    def test_anything_else_is_none(self, text):
        assert parse_own(text) is None


def whole(**more: Any) -> Measurement:
    times = {name: Distribution(0.01, 0.02, 4) for name in ("ttft", "tpot", "latency")}
    return replace(Measurement("g", 4, 4, 2.0, 200, times), **more)


class TestJudgement:
    def judge(
        self,
        found: Measurement,
        accept: float | None = None,
        after: UnitState | None = None,
        floor: float | None = None,
    ) -> Any:
        figure = None
        if accept is not None:
            figure = accept_figure(TREE, summarise_decode([DECODE.format(accept)]), None, found)
        return judge_point(
            TREE,
            found,
            accept=figure,
            before=state(),
            after=after or state(),
            block_size=8,
            floor=floor,
            host="h/s",
        )

    def test_a_point_that_was_measured_passes_with_its_figures(self):
        result = self.judge(whole(), 2.5)
        assert (result.name, result.verdict, result.host) == ("bench.ddtree-b16-k4-c2", Verdict.PASS, "h/s")
        assert result.summary == "100 tokens/s, 10.0 ms a token, accept length 2.50, 4 requests"
        assert {figure.labels["concurrency"] for figure in result.figures} == {"2"}
        assert figures_named(result.figures, "accept_length", budget="16")[0].value == 2.5
        assert result.facts["generator"] == "g"

    @pytest.mark.parametrize(
        ("accept", "floor", "warning"),
        [
            ("1.00", None, "every draft was rejected, so speculation only costs here"),
            ("1.00", 1.8, "every draft was rejected, so speculation only costs here"),
            ("1.79", 1.8, "accept length 1.79 is below the 1.8 of the inventory"),
            ("1.80", 1.8, ""),
            ("1.01", None, ""),
        ],
    )
    def test_low_acceptance_passes_with_a_warning(self, accept, floor, warning):
        result = self.judge(whole(), accept, floor=floor)
        assert result.verdict is Verdict.PASS
        assert result.facts.get("warning", "") == warning
        assert result.summary.endswith(f"4 requests; warning: {warning}" if warning else "4 requests")

    def test_a_baseline_and_an_unknown_acceptance_are_not_warned_of(self):
        assert "warning" not in self.judge(whole(), floor=1.8).facts

    def test_one_failed_request_fails_it(self):
        result = self.judge(whole(completed=3, errors=("500: boom",)))
        assert result.verdict is Verdict.FAIL
        assert result.summary == "1 of 4 requests failed: 500: boom"
        assert "ddtree-ops logs h " in result.hint

    def test_no_output_is_never_a_pass(self):
        assert self.judge(whole(tokens=None)).verdict is Verdict.INCONCLUSIVE

    @pytest.mark.parametrize(
        "after",
        [{"InvocationID": "b" * 32}, {"MainPID": "8"}, {"ActiveState": "failed", "SubState": "failed"}],
    )
    def test_a_unit_that_did_not_hold_fails_it_whatever_was_answered(self, after):
        result = self.judge(whole(), 2.5, state(**after))
        assert result.verdict is Verdict.FAIL
        assert "did not hold" in result.summary

    def test_acceptance_above_the_block_size_fails_it(self):
        result = self.judge(whole(), 8.5)
        assert result.verdict is Verdict.FAIL
        assert "accounting is broken" in result.summary


class TestAcceptance:
    def test_the_journal_comes_first_with_its_spread(self):
        lines = [DECODE.format(each) for each in ("2.00", "3.00", "4.00")]
        figure = accept_figure(TREE, summarise_decode(lines), info(length=9.0), None)
        assert figure is not None
        assert (figure.value, figure.samples, figure.spread) == (3.0, 3, 1.0)
        assert figure.source.startswith("journal")

    def test_then_the_server_then_the_generator_then_nothing(self):
        none = summarise_decode([])
        server = accept_figure(TREE, none, info(length=2.5), whole(accept_length=2.0))
        generator = accept_figure(TREE, none, None, whole(accept_length=2.0))
        nothing = accept_figure(TREE, none, None, None)
        assert [each.value if each else "" for each in (server, generator, nothing)] == [2.5, 2.0, None]

    def test_a_baseline_has_none(self):
        baseline = Point(Configuration("baseline"), 1)
        assert accept_figure(baseline, summarise_decode([]), info(length=2.5), None) is None

    def test_a_server_that_runs_something_else_is_told(self):
        assert wrong_speculation(TREE.configuration, info(algorithm="DDTREE")) == ""
        assert wrong_speculation(Configuration("baseline"), info()) == ""
        assert "DFLASH" in wrong_speculation(TREE.configuration, info(algorithm="DFLASH"))
        assert "without speculation" in wrong_speculation(TREE.configuration, info())
        assert "DDTREE" in wrong_speculation(Configuration("baseline"), info(algorithm="DDTREE"))


class TestStart:
    def entry(self, at: float, message: str) -> Entry:
        time = datetime(2026, 11, 30, tzinfo=UTC) + timedelta(seconds=at)
        return Entry(time, message, 6, 7, "python", "s.service", "a" * 32, "", "process", "h", "", {})

    def lines(self, *more: tuple[float, str]) -> list[Entry]:
        said = [
            (0.0, "Started s.service"),
            (5.0, "[2026-11-30 00:00:05] Load weight begin. avail mem=21.72 GB"),
            (
                65.0,
                "[2026-11-30 00:01:05] KV Cache is allocated. #tokens: 4096, K size: 0.00 GB, V size: 0.00 GB",
            ),
            (
                70.0,
                "[2026-11-30 00:01:10] Capture cuda graph begin. This can take up to several minutes. avail mem=9 GB",
            ),
            *more,
        ]
        return [self.entry(at, text) for at, text in said]

    def test_phases_are_timed_by_the_journal(self):
        ready = (90.0, "[2026-11-30 00:01:30] The server is fired up and ready to roll!")
        late = (500.0, "[2026-11-30 00:08:20] Prefill batch, #new-seq: 1")
        figures = load_figures(self.lines(ready, late), {"mode": "dflash"})
        assert {figure.labels["phase"]: figure.value for figure in figures_named(figures, "load_phase")} == {
            "start": 5.0,
            "weights": 60.0,
            "kv-cache": 5.0,
            "graphs": 20.0,
        }
        assert [figure.value for figure in figures_named(figures, "ready")] == [90.0]
        assert all(figure.labels["mode"] == "dflash" for figure in figures)

    def test_a_start_that_is_not_whole_gives_none(self):
        assert load_figures(self.lines(), {}) == ()
        assert load_figures([], {}) == ()

    def test_memory_of_the_fullest_gpu_in_gb(self):
        assert parse_nvidia_smi("91520\n91522\n") == pytest.approx((95.9657, 95.9678), abs=1e-4)
        assert parse_nvidia_smi("[N/A]\n\n") == ()

    def test_memory_and_tokens_of_the_server(self):
        memory = {"weight": 68.69, "kvcache": 15.79, "token_capacity": 1, "graph": -0.0}
        raw = {"max_total_num_tokens": 232452, "internal_states": [{"memory_usage": memory}]}
        figures = memory_figures(info(raw=raw), (95.0, 96.0), {"mode": "dflash"})
        parts = {
            figure.labels.get("part", ""): figure.value for figure in figures_named(figures, "gpu_memory")
        }
        assert parts == {"": 96.0, "weights": 73.755, "kv-cache": 16.954, "graphs": 0.0}
        assert figures_named(figures, "kv_tokens")[0].value == 232452.0
        assert memory_figures(None, (), {}) == ()
        assert memory_figures(info(raw={"internal_states": "?"}), (), {}) == ()
