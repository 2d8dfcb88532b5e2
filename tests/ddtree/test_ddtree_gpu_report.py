"""The GPU run's script without a GPU: what it reads, judges and records (``benchmarks/gpu``)."""

from __future__ import annotations

import difflib
import io
import json
import re
import runpy
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import ddtree_gpu
import evidence
import make_site
import report
import servers

PATCH = Path(__file__).parents[2] / "patches" / "sglang-0.5.11" / ddtree_gpu.PATCH
DECODE = (
    "[2026-01-01 00:00:00] Decode batch, #running-req: {running}, #token: 41, token usage: 0.00, {spec}"
    "cuda graph: {graph}, gen throughput (token/s): {rate}, #queue-req: 0\n"
)
SPEC = "accept len: {accept}, accept rate: 0.28, "


def decode(running: int, rate: float, accept: str = "", graph: bool = True) -> str:
    spec = SPEC.format(accept=accept) if accept else ""
    return DECODE.format(running=running, spec=spec, graph=graph, rate=rate)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a developer's shell says to real servers is no matter here."""
    for name in ("SGLANG_USE_CPU_ENGINE", "DDTREE_TIMES"):
        monkeypatch.delenv(name, raising=False)


# -- patches --------------------------------------------------------------------------------------------------------

LINES = st.lists(
    st.sampled_from(["a", "b", "", "  c", "--- a/x", "+d", "@@ -1 +1 @@"]), min_size=1, max_size=12
)


@given(LINES, LINES)
def test_a_diff_applied_gives_the_other_text(before: list[str], after: list[str]) -> None:
    old, new = ("".join(f"{line}\n" for line in lines) for lines in (before, after))
    diff = "".join(
        difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), "a/f.py", "b/f.py")
    )
    if not diff:
        with pytest.raises(ValueError, match="changes no file"):
            evidence.apply_patch(diff, lambda _: old)
        return
    assert evidence.apply_patch(diff, lambda path: {"f.py": old}[path]) == {"f.py": new}


def test_a_patch_that_does_not_fit_is_refused_with_the_place() -> None:
    diff = "--- a/f.py\n+++ b/f.py\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
    assert evidence.apply_patch(diff, lambda _: "one\ntwo\nthree\n") == {"f.py": "one\n2\nthree\n"}
    with pytest.raises(ValueError, match=r"f\.py:2: the patch expects 'two', the file has 'TWO'"):
        evidence.apply_patch(diff, lambda _: "one\nTWO\n")
    with pytest.raises(ValueError, match="does not fit a file of 1 lines"):
        evidence.apply_patch(diff, lambda _: "one\n")
    with pytest.raises(ValueError, match="cut off"):
        evidence.apply_patch(diff.removesuffix("+2\n"), lambda _: "one\ntwo\n")


def test_the_shipped_patch_is_read_whole() -> None:
    diff = PATCH.read_text()
    asked: list[str] = []

    def read(path: str) -> str:
        asked.append(path)
        return ""

    with pytest.raises(ValueError, match="hunk at line 628"):
        evidence.apply_patch(diff, read)
    assert asked == ["sglang/srt/model_executor/cuda_graph_runner.py"]


# -- texts ----------------------------------------------------------------------------------------------------------


def test_machine_paths_and_private_addresses_are_replaced() -> None:
    names = {
        "/tmp/run": "WORK",
        "/tmp/run/site": "SITE",
        "/root": "HOME",
        "box7": "gpu-host",
        "": "never",
        "/": "never",
    }
    text = "/tmp/run/site/x.py /tmp/run/logs /tmp/runner https://hub//tmp/run/m /root/a box7 box71 TEN.1.2.3 127.0.0.1"
    text = text.replace("TEN", "10")
    assert evidence.mask_machine(text, names) == (
        "SITE/x.py WORK/logs /tmp/runner https://hub/WORK/m HOME/a gpu-host box71 192.0.2.1 127.0.0.1"
    )


def test_decode_lines_with_and_without_speculation() -> None:
    log = decode(1, 797.89) + "noise\n" + decode(3, 1523.42, "3.00") + decode(3, 50, "2.50", graph=False)
    assert evidence.decode_lines(log) == [
        {"running": 1, "accept": 1.0, "graph": True, "tokens_per_s": 797.89},
        {"running": 3, "accept": 3.0, "graph": True, "tokens_per_s": 1523.42},
        {"running": 3, "accept": 2.5, "graph": False, "tokens_per_s": 50.0},
    ]
    assert evidence.running_sizes(log) == {"graph": {"1": 1, "3": 1}, "eager": {"3": 1}}


def test_a_step_is_timed_only_between_lines_of_the_same_batch() -> None:
    log = decode(4, 1.0) + decode(4, 1000.0) + decode(2, 9.0) + decode(4, 2.0) + decode(4, 800.0, "2.00")
    assert evidence.step_times(log, 4) == pytest.approx([4.0, 10.0])
    assert evidence.step_times(log, 2) == []


def test_a_prefill_ends_a_round_and_no_round_counts_the_time_before_it() -> None:
    log = (
        decode(4, 1.0)
        + decode(4, 1000.0)
        + "x Prefill batch, #new-seq: 4\n"
        + decode(4, 9.0)
        + decode(4, 800.0)
    )
    assert evidence.step_rounds(log, 4) == [pytest.approx([4.0]), pytest.approx([5.0])]
    assert evidence.step_times(log, 4) == pytest.approx([4.0, 5.0])
    assert evidence.step_rounds(log, 1) == []


def test_a_spread_is_of_percentiles_so_that_one_outlier_is_none() -> None:
    assert evidence.spread([float(number) for number in range(11)]) == (1.0, 5.0, 9.0)
    assert evidence.spread([5.0] * 15 + [500.0]) == (5.0, 5.0, 5.0)
    with pytest.raises(ValueError, match="no samples"):
        evidence.spread([])


def test_graphs_captured_target_first() -> None:
    log = "x Capture cuda graph bs [1, 2, 4]\ny Capture cuda graph bs [8]\n"
    assert evidence.captured(log) == [[1, 2, 4], [8]]


TIMES = (
    "DDTREE times: steps=10, bs={bs}, draft=1.000 ms, tree=0.300 ms, verify=3.000 ms, commit=0.400 ms, "
    "step={step} ms, build=0.100 ms\n"
)


def test_shares_of_a_step_come_from_lines_of_one_batch_size() -> None:
    log = TIMES.format(bs="4.00", step="5.000") * 2 + TIMES.format(bs="3.50", step="1.000")
    shares = evidence.times_shares(evidence.times_lines(log), 4)
    assert (shares["lines"], shares["steps"]) == (2, 20)
    assert shares["ms"] == {
        "build": 0.1,
        "commit": 0.4,
        "draft": 1.0,
        "step": 5.0,
        "tree": 0.3,
        "verify": 3.0,
    }
    assert shares["share_of_step"]["build"] == 0.02
    assert "step" not in shares["share_of_step"]
    assert evidence.times_shares(evidence.times_lines(log), 1) == {}


# -- judging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([], [], None)],
)
def test_first_difference(left: list[int], right: list[int], place: int | None) -> None:
    assert evidence.first_difference(left, right) == place


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([9, 9, 9, 9, 5, 6, 5, 6, 5, 6], 2),
        ([1, 2, 3, 4, 7, 7, 7, 7], 1),
        ([7, 7, 7, 7, 1, 2, 3, 4], None),
        ([], None),
    ],
)
def test_a_text_repeats_itself_if_its_second_half_does(tokens: list[int], expected: int | None) -> None:
    assert evidence.period(tokens) == expected


def judged(seen: list[int], best: list[tuple[float, int]], epsilon: float = 0.2) -> dict[str, Any]:
    return evidence.judge([[8, 13, 21]], [seen], lambda request, place: best, epsilon)


def test_a_near_tie_is_two_close_tokens_at_the_top() -> None:
    outcome = judged([8, 21, 8], [(-0.7, 13), (-0.8, 21), (-5.0, 8)])
    assert outcome["passed"]
    assert (outcome["equal"], outcome["mismatches"]) == (0, [])
    assert outcome["near_ties"] == [
        {"request": 0, "place": 1, "plain": 13, "other": 21, "gap_nats": 0.1, "below_best_nats": 0.0}
    ]


@pytest.mark.parametrize(
    ("seen", "best"),
    [
        ([8, 21, 8], [(-0.7, 13), (-0.95, 21)]),  # too far apart
        ([8, 21, 8], [(-0.1, 8), (-4.0, 13), (-4.1, 21)]),  # close to each other, far from the best
        ([8, 21, 8], [(-0.7, 13), (-0.8, 8)]),  # not among the best
        ([8, 13], [(-0.7, 13), (-0.8, 21)]),  # ended early
        ([], [(-0.7, 8)]),  # no answer
    ],
)
def test_anything_else_is_a_mismatch(seen: list[int], best: list[tuple[float, int]]) -> None:
    outcome = judged(seen, best)
    assert not outcome["passed"]
    assert len(outcome["mismatches"]) == 1
    assert outcome["near_ties"] == []


def test_a_plain_server_that_does_not_answer_proves_no_tie() -> None:
    def ask(request: int, place: int) -> list[tuple[float, int]]:
        raise RuntimeError("gone")

    outcome = evidence.judge([[1]], [[2]], ask, 9.0)
    assert "gone" in outcome["mismatches"][0]["why"]
    assert not outcome["passed"]


def test_missing_outputs_fail_and_nothing_compared_is_no_pass() -> None:
    assert not evidence.judge([[1], [2]], [[1]], lambda *_: [], 1.0)["passed"]
    assert not evidence.judge([], [], lambda *_: [], 1.0)["passed"]


def test_figures_name_their_samples() -> None:
    assert evidence.figure([3.0, 1.0, 2.0]) == {"median": 2.0, "least": 1.0, "greatest": 3.0, "samples": 3}
    assert evidence.figure([]) == {"samples": 0}


def test_break_even_is_a_ratio_of_steps() -> None:
    steps = {"none": {"1": 4.0}, "dflash": {"1": 5.0, "4": 6.0}, "ddtree-32": {"1": 6.0, "4": 9.0}}
    assert evidence.break_even(steps) == [
        {"batch": 1, "budget": 32, "step_ms": 6.0, "over_none": 1.5, "over_dflash": 1.2},
        {"batch": 4, "budget": 32, "step_ms": 9.0, "over_none": None, "over_dflash": 1.5},
    ]


@pytest.mark.parametrize(
    ("passed", "expected"), [([], "not run"), ([True], "pass"), ([True, False], "fail"), ([None], "fail")]
)
def test_no_part_passes_without_checks(passed: list[bool | None], expected: str) -> None:
    assert evidence.verdict([{"passed": one} for one in passed]) == expected


# -- servers --------------------------------------------------------------------------------------------------------


class _Engine(BaseHTTPRequestHandler):
    """Answers by the first token of the prompt: 1 tokens, 2 an error, 3 hangs up, 4 is silent until told."""

    told = threading.Event()

    def log_message(self, *args: Any) -> None:
        """Nothing on the terminal."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = body["input_ids"][0]
        if kind == 3:
            self.connection.close()
            return
        if kind == 4:
            self.told.wait(20)
            return
        reply = {"output_ids": [8, 13], "meta_info": {"spec_verify_ct": 1}} if kind == 1 else {"error": "no"}
        data = json.dumps(reply).encode()
        self.send_response(200 if kind == 1 else 400)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def engine() -> Iterator[servers.Server]:
    _Engine.told.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as listener:
        listener.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield servers.Server("one", listener.server_address[1])
        finally:
            _Engine.told.set()
            listener.shutdown()
            thread.join()


def test_answers_and_errors_of_a_server_come_back_as_values() -> None:
    with engine() as server:
        answer = server.ask([1], 2)
        assert (answer.tokens, answer.status, answer.error) == ([8, 13], 200, "")
        assert ddtree_gpu.accepted([answer]) == 1.0
        refused = server.ask([2], 2)
        assert (refused.tokens, refused.status) == ([], 400)
        assert "no" in refused.error
        closed = server.ask([3], 2)
        assert closed.error
        assert not closed.status
        assert not server.hung


def test_a_server_that_was_silent_once_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.Server.post, "__defaults__", (None, 0.3))
    with engine() as server:
        assert "TimeoutError" in server.ask([4], 2).error
        assert server.hung
        assert server.ask([1], 2).error == "not asked: the server did not answer before"


def test_errors_of_a_log_leave_out_what_every_start_says() -> None:
    log = (
        "Ignore import error when loading x: ModuleNotFoundError: No module named 'y'\n"
        "ModuleNotFoundError: No module named 'openai_harmony'\n"
        "Scheduler hit an exception: Traceback\nRuntimeError: token_to_kv_pool memory leak detected\n"
    )
    assert servers.errors_of(log) == [
        "Scheduler hit an exception: Traceback",
        "RuntimeError: token_to_kv_pool memory leak detected",
    ]


# -- the run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ddtree_gpu.Experiment:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    args = ddtree_gpu.parse(
        ["--site", str(tmp_path / "site"), "--out", str(tmp_path / "out"), "--limit", "100"]
    )
    experiment = ddtree_gpu.Experiment(args)
    experiment.set_up()
    return experiment


def recorded(run: ddtree_gpu.Experiment) -> dict[str, Any]:
    return dict(json.loads((run.out / "result.json").read_text()))


def test_an_error_fails_its_part_and_is_in_the_json_at_once(run: ddtree_gpu.Experiment) -> None:
    def breaks() -> None:
        run.check("soak", "begins well", True)
        raise RuntimeError(f"in {run.work}/x")

    run.attempt("soak", "requests", breaks)
    part = recorded(run)["parts"]["soak"]
    assert part["verdict"] == "fail"
    assert part["checks"][-1]["name"] == "requests: no error"
    assert "in WORK/x" in part["checks"][-1]["seen"]["error"]
    assert str(run.work) not in (run.out / "result.json").read_text()


def test_what_there_is_no_time_for_is_not_run_and_keeps_a_part_from_passing(
    run: ddtree_gpu.Experiment,
) -> None:
    run.attempt("cost", "first", lambda: run.check("cost", "seen", True) and None)
    assert recorded(run)["verdicts"]["cost"] == "pass"
    run.attempt("cost", "second", lambda: pytest.fail("was run"), needs_s=1000)
    result = recorded(run)
    assert result["verdicts"]["cost"] == "incomplete"
    assert "100, it needs about 1000" in result["parts"]["cost"]["not_run"][0]["why"]
    assert result["verdicts"]["real"] == "not run"


def test_a_server_that_is_not_up_fails_the_step_by_its_name(run: ddtree_gpu.Experiment) -> None:
    server = run.tree_server(32, 8)
    server.start = "exit 1"
    run.attempt("speed", server.name, run.speed, server)
    result = recorded(run)
    assert result["verdicts"]["speed"] == "fail"
    assert "ddtree-32-8 is not up: exit 1" in result["parts"]["speed"]["checks"][0]["seen"]["error"]
    assert result["servers"]["ddtree-32-8"]["budget"] == 32


def test_the_crash_must_say_the_words(run: ddtree_gpu.Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    server = run.tree_server(32, 8, name="crash", patched=False)
    server.start, server.log = "ready", run.site.logs / "crash.log"
    monkeypatch.setattr(servers.Server, "ask", lambda *_: servers.Answer(error="closed"))
    monkeypatch.setattr(servers.Server, "exit", -9)
    text = "The size of tensor a (8) must match the size of tensor b (33) at non-singleton dimension 0"
    server.log.write_text(f"Scheduler hit an exception: Traceback\nRuntimeError: {text}\n")
    run.attempt("crash", "story", run.crash, server)
    assert recorded(run)["verdicts"]["crash"] == "pass"
    assert recorded(run)["parts"]["crash"]["unpatched"]["text"] == [f"RuntimeError: {text}"]
    server.log.write_text(f"RuntimeError: {text.replace('33', '34')}\n")
    run.attempt("crash", "story", run.crash, server)
    assert recorded(run)["verdicts"]["crash"] == "fail"


def test_command_lines_hold_what_a_server_is_asked_to_be(run: ddtree_gpu.Experiment) -> None:
    line = " ".join(run.tree_server(16, 4, "random").arguments(run.site))
    assert "--speculative-algorithm DDTREE" in line
    assert "--speculative-ddtree-budget 16 --speculative-ddtree-topk-cap 4" in line
    assert "--cuda-graph-bs 1 2 4" in line
    assert "schedule" not in line
    adaptive = run.tree_server(32, 8, schedule="adaptive").arguments(run.site)
    assert "--speculative-ddtree-budget-schedule adaptive" in " ".join(adaptive)
    assert "--speculative" not in " ".join(run.server("plain").arguments(run.site))
    patched = run.site.environment(True, {})["PYTHONPATH"].split(":")
    assert patched == [str(run.site.plugin), str(run.site.patched), str(run.site.packages)]
    assert str(run.site.patched) not in run.site.environment(False, {})["PYTHONPATH"]


def test_the_script_and_the_engine_of_a_run_are_recorded(
    run: ddtree_gpu.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    said = {"packages": {"sglang": "0.5.11"}, "gpu": "x"}
    done = subprocess.CompletedProcess([], 0, json.dumps(said), "")
    monkeypatch.setattr(ddtree_gpu.subprocess, "run", lambda *_, **__: done)
    run.attempt("env", "versions", run.env)
    result = recorded(run)
    assert report.changed_since(result, root) == []
    result["parts"]["env"]["seen"]["sha256"] |= {"tree.py": "other", "gone.py": "x", ddtree_gpu.PATCH: "y"}
    del result["parts"]["env"]["seen"]["script_sha256"]["servers.py"]
    assert report.changed_since(result, root) == [
        "benchmarks/gpu/servers.py",
        "ddtree_sglang/gone.py",
        "ddtree_sglang/tree.py",
        f"patches/sglang-0.5.11/{ddtree_gpu.PATCH}",
    ]


@pytest.mark.parametrize("wrong", [False, True])
def test_greedy_ones_among_the_mixed_are_compared_each_with_plain_alone(
    run: ddtree_gpu.Experiment, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run.server("plain")
    monkeypatch.setattr(run, "ready", lambda server: server)
    asked: list[tuple[list[int], int, dict[str, Any]]] = []

    def ask(
        self: servers.Server, ids: list[int], tokens: int, body: Any = None, **more: Any
    ) -> servers.Answer:
        if body:
            meta = {"output_top_logprobs": [[[-0.1, 8, None], [-3.0, 13, None]]]}
            return servers.Answer([8], meta, "", 200)
        asked.append((ids, tokens, more))
        return servers.Answer([8] * tokens, {}, "", 200)

    monkeypatch.setattr(servers.Server, "ask", ask)
    run.reference["lower"] = {"server": plain}
    seen = servers.Answer([8, 13, 8] if wrong else [8, 8, 8], {}, "", 200)
    jobs = [(0, [4], 3, {}, seen), (2, [5, 6], 2, ddtree_gpu.STOPPING, servers.Answer([8, 8], {}, "", 200))]
    spans = {0: ("plain", 0.0, 2.0), 1: ("sampled", 1.0, 3.0), 2: ("stop", 4.0, 5.0)}
    run.soak_greedy(jobs, spans)
    assert asked == [([4], 3, {}), ([5, 6], 2, ddtree_gpu.STOPPING)]
    outcome = run.parts["soak"]["greedy"]
    assert (outcome["requests"], outcome["equal"], len(outcome["mismatches"])) == (2, 2 - wrong, int(wrong))
    assert (outcome["tokens"], outcome["tokens_equal"]) == (5, 3 if wrong else 5)
    assert outcome["while_a_sampled_one_was_asked"] == 1
    assert [check["passed"] for check in run.parts["soak"]["checks"]] == [True, not wrong, True]
    run.write()
    assert "2 compared, 1 of them asked while a sampled one was" in report.render(recorded(run))


def test_the_grid_holds_every_budget_and_topk_once() -> None:
    assert ddtree_gpu.GRID[0] == (32, 8, "lower")
    assert sorted(row[:2] for row in ddtree_gpu.GRID) == [
        (budget, topk) for budget in (7, 8, 16, 32, 64) for topk in (1, 4, 8)
    ]
    assert all(pair == "random" for _, topk, pair in ddtree_gpu.GRID if topk == 1)


def test_a_smaller_grid_is_asked_for_by_name_and_what_it_leaves_out_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--site", str(tmp_path), "--out", str(tmp_path / "out")]
    assert len(ddtree_gpu.parse(common).grid) == 15
    args = ddtree_gpu.parse([*common, "--grid", "16-4,7-1"])
    assert args.grid == [(32, 8), (7, 1), (16, 4)]
    run = ddtree_gpu.Experiment(args)
    run.site = None  # type: ignore[assignment]
    run.out.mkdir()
    run.check("equality", "seen", True)
    run.write()
    result = recorded(run)
    assert result["grid"] == ["32-8", "7-1", "16-4"]
    assert result["verdicts"]["equality"] == "pass"
    assert len(result["parts"]["equality"]["not_asked"]) == 12
    assert "not asked for: 64-8, 8-8," in report.render(result)
    with pytest.raises(SystemExit):
        ddtree_gpu.parse([*common, "--grid", "32-8,33-8"])
    assert "not in the grid: 33-8" in capsys.readouterr().err


def test_a_detached_run_is_asked_for_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    class Child:
        pid = 7

        def __init__(self, command: list[str], **_: Any) -> None:
            seen.append(command)

    monkeypatch.setattr(ddtree_gpu.subprocess, "Popen", Child)
    args = ddtree_gpu.parse(
        ["--site", str(tmp_path), "--out", str(tmp_path / "o"), "--grid", "7-1", "--only", "env", "--detach"]
    )
    ddtree_gpu.detach(args)
    again = ddtree_gpu.parse(seen[0][2:])
    args.detach = False
    assert again == args


def test_logs_are_packed_without_machine_paths(run: ddtree_gpu.Experiment) -> None:
    (run.site.logs / "plain.log").write_text(f"File {run.work}/site/x.py\n")
    ddtree_gpu.finish(run, 1)
    with tarfile.open(run.out / "logs.tar.xz") as archive:
        member = archive.extractfile("logs/plain.log")
        assert isinstance(member, io.BufferedReader)
        assert member.read() == b"File WORK/site/x.py\n"
    assert (run.out / "done").read_text() == "1"
    assert recorded(run)["ended"]


def test_a_part_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ddtree_gpu.parse(["--site", ".", "--out", "x", "--only", "tree,sped"])
    assert "no such part: sped" in capsys.readouterr().err


@pytest.mark.real
@pytest.mark.parametrize("size", ["small", "large"])
def test_the_models_of_a_run_are_all_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.torch").load_file
    here = Path(__file__).parent
    maker, script = here / "cpu" / "make_models.py", here.parents[1] / "benchmarks" / "gpu" / "tiny_models.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(maker), str(tmp_path / "m"), "8", size])
    runpy.run_path(str(script), run_name="__main__")
    made = {path.name for path in (tmp_path / "m").iterdir()}
    pairs = {row[2] for row in ddtree_gpu.GRID} | {"top", "wide", "real"}
    assert {name for pair in pairs for name in (pair, f"{pair}-draft")} <= made
    assert json.loads((tmp_path / "m" / "random-draft" / "config.json").read_text())["block_size"] == 8
    lower, other = (load(tmp_path / "m" / name / "model.safetensors") for name in ("lower", "random"))
    rows = [name for name in lower if not torch.equal(lower[name], other[name])]
    assert rows == ["model.embed_tokens.weight"]
    assert torch.equal(lower[rows[0]][1:], other[rows[0]][1:])


# -- the report -----------------------------------------------------------------------------------------------------


def test_a_report_of_a_run_that_did_nothing_says_so(run: ddtree_gpu.Experiment) -> None:
    run.write()
    text = report.render(recorded(run))
    assert text.count("Verdict: not run.") == 7
    assert "| soak | not run | 0 of 0 | - | - |" in text
    assert "Nothing was measured." in text


def test_tables_show_missing_numbers_and_escape_bars() -> None:
    assert report.table(("a", "b"), [(None, "x|y")]) == "| a | b |\n| --- | --- |\n| - | x\\|y |"


def test_a_report_names_failures_and_figures(run: ddtree_gpu.Experiment) -> None:
    run.check("equality", "ddtree-32-8: batch 3 equals plain greedy", False, {})
    tie = {"request": 3, "place": 5, "plain": 8, "other": 13, "gap_nats": 0.0625}
    run.parts["equality"]["servers"] = {
        "ddtree-32-8": {
            "phases": {"batch 3": {"near_ties": [tie]}},
            "totals": {"requests": 24, "equal": 22, "near_ties": 1, "mismatches": 1},
            "accept_length": 2.9,
            "graphs_captured": [[1, 2, 4], [1, 2, 4]],
        },
        "dflash": {"phases": {}},
    }
    run.parts["real"]["break_even"] = [
        {"batch": 1, "budget": 32, "step_ms": 6.0, "over_none": 1.5, "over_dflash": None}
    ]
    run.write()
    text = report.render(recorded(run))
    assert "| equality | fail | 0 of 1 | ddtree-32-8: batch 3 equals plain greedy | - |" in text
    assert "| ddtree-32-8 | - | 24 | 22 | 1 | 0.0625 | 1 | 2.9 | [1, 2, 4] |" in text
    assert "| dflash | - | not finished |" in text
    assert "| prompt 3, token 5 | 8 | 13 | 0.0625 | 1 | 1 |" in text
    assert "| 1 | 32 | 6.0 | 1.5 | - | - | - |" in text


def test_a_report_goes_between_the_marks_of_a_page_and_nowhere_else() -> None:
    (begin, end), other = report.marks("a"), "\n".join(report.marks("b"))
    page = f"above\n{begin}\nold\n{end}\nbelow\n{other}\n"
    once = report.insert(page, "new\n", "a")
    assert once == f"above\n{begin}\n\nnew\n\n{end}\nbelow\n{other}\n"
    assert report.insert(once, "new", "a") == once
    with pytest.raises(ValueError, match="once each"):
        report.insert(page, "new", "c")


def test_a_part_that_was_not_asked_for_has_no_section(tmp_path: Path) -> None:
    args = ddtree_gpu.parse(["--site", str(tmp_path), "--out", str(tmp_path / "out"), "--only", "crash"])
    run = ddtree_gpu.Experiment(args)
    run.site = None  # type: ignore[assignment]
    run.out.mkdir()
    run.write()
    text = report.render(recorded(run))
    assert "### The crash" in text
    assert "### Mixed requests" not in text
    assert "| soak | not run | 0 of 0 | - | the part: not asked for (--only) |" in text


ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "docs" / "evidence" / "h200"
FINAL = RECORDED.with_name("h200-final")


@pytest.mark.parametrize("folder", [RECORDED, FINAL], ids=lambda folder: folder.name)
def test_the_recorded_evidence_is_what_the_page_shows(folder: Path) -> None:
    page = (RECORDED.parent / "README.md").read_text()
    assert report.insert(page, report.of_folder(folder), folder.name) == page
    assert (report.of_folder(folder) == report.ABSENT) is not folder.exists()


def listed(page: str) -> dict[str, str]:
    """Files of ``changed-since.md`` with their reasons."""
    return dict(re.findall(r"^- `([^`]+)`: (\S.*)$", page, re.MULTILINE))


def test_the_last_run_was_made_with_this_tree_or_the_page_says_what_changed() -> None:
    page = (RECORDED.parent / "changed-since.md").read_text()
    if not FINAL.exists():
        assert listed(page) == {}
        return
    result = json.loads((FINAL / "result.json").read_text())
    assert report.changed_since(result, ROOT) == sorted(listed(page))


def test_what_the_last_run_ran_passed() -> None:
    if not FINAL.exists():
        return
    result = json.loads((FINAL / "result.json").read_text())
    asked = {name: part for name, part in result["verdicts"].items() if part != "not run"}
    assert {"env", "crash", "equality", "soak"} <= set(asked)
    assert set(asked.values()) == {"pass"}
    assert "error" not in result


def test_a_changed_file_needs_a_reason() -> None:
    assert listed("# x\n\n- `a/b.py`: words only\n- `c.py`:\n- no file\n") == {"a/b.py": "words only"}


@pytest.mark.parametrize(
    "folder", [path for path in (RECORDED, FINAL) if path.exists()], ids=lambda f: f.name
)
def test_the_recorded_evidence_names_no_machine(folder: Path) -> None:
    texts = report.read_logs(folder / "logs.tar.xz")
    assert {"crash", "refused", "plain"} <= set(texts)
    texts |= {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".xz"}
    assert "crash.log" in texts
    for name, text in texts.items():
        assert not re.findall(r"(?<![\w.])/(?:home|mnt|opt|root|srv|tmp|usr|var|work)/[^\s'\"]*", text), name
        assert set(re.findall(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])", text)) <= {"127.0.0.1"}, name


def test_the_recorded_checks_are_as_the_page_says() -> None:
    result = json.loads((RECORDED / "result.json").read_text())
    failed = {
        check["name"]: check["seen"]["error"]
        for part in result["parts"].values()
        for check in part["checks"]
        if not check["passed"]
    }
    assert sorted(failed) == ["ddtree-32-8-float32: no error", "float32 reference: no error"]
    assert all("rmsnorm" in error and "data type Float" in error for error in failed.values())
    compared = result["parts"]["equality"]["servers"]
    grid = {f"ddtree-{budget}-{topk}" for budget, topk, _ in ddtree_gpu.GRID}
    assert grid <= set(compared)
    assert all(compared[name]["totals"]["requests"] == 88 for name in grid)
    assert not any(row["totals"]["mismatches"] for row in compared.values())
    gaps = [
        tie["gap_nats"]
        for row in compared.values()
        for phase in row["phases"].values()
        for tie in phase["near_ties"]
    ]
    assert len(gaps) == 130
    assert max(gaps) < 0.034
    for name in grid:
        batch = compared[name]["phases"]["batch 3"]["decode_lines_by_batch"]
        assert batch["graph"]["3"] >= 10
        assert not batch["eager"]
        assert compared[name]["graphs_captured"] == [[1, 2, 4], [1, 2, 4]]


# -- the site -------------------------------------------------------------------------------------------------------


def test_every_wheel_of_the_site_is_pinned() -> None:
    wanted = make_site.requirements()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", one) for one in wanted)
    assert {"sglang==0.5.11", "sglang-kernel==0.4.2"} <= set(wanted)
    names = [one.split("==")[0] for one in wanted]
    assert len(set(names)) == len(names)
    seen = json.loads((RECORDED / "result.json").read_text())["parts"]["env"]["seen"]["packages"]
    assert {f"{name}=={seen[name]}" for name in seen if name not in ("torch", "triton")} <= set(wanted)


def test_wheels_are_unpacked_but_for_what_another_gpu_needs(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, members in (
        ("a-1-py3-none-any.whl", ["a/__init__.py"]),
        (
            "k-1-py3-none-any.whl",
            ["sgl_kernel/sm90/x.so", "sgl_kernel/sm100/x.so", "sgl_kernel/flash_ops.so"],
        ),
    ):
        with zipfile.ZipFile(wheels / name, "w") as archive:
            for member in members:
                archive.writestr(member, "x")
    make_site.unpack(wheels, tmp_path / "site")
    found = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.*")}
    assert found == {"a/__init__.py", "sgl_kernel/sm90/x.so"}
    make_site.unpack(wheels, tmp_path / "whole", ())
    assert (tmp_path / "whole" / "sgl_kernel" / "sm100" / "x.so").exists()
