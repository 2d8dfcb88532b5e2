"""The real sglang server on a CPU running DDTREE, token for token against the same server without speculation.

One server at a time: plain (the reference), DFLASH, then DDTREE with four drafters of which it is known beforehand what
they get right (``cpu/make_models.py``). The CPU has no CUDA graphs and no triton: attention is a stand-in that honours
the tree mask (``cpu/stubs``); scheduler, cache, drafter, tree, verification and HTTP are the real ones.

float32 and large margins: the target's two best logits are never as close as rounding, so texts must be equal.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed: make test-real", allow_module_level=True)

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BLOCK, BUDGET, TOPK, CONTEXT = 4, 40, 8, 256
SPOKEN = (8, 13, 21)
PROMPTS, TOKENS = 56, 32
START_S = float(os.environ.get("DDTREE_TEST_START_S", "400"))


def prompts() -> list[list[int]]:
    """Prompts of 3 to 60 tokens; none holds the mask token or an end token."""
    rng = random.Random(11)
    return [[rng.randrange(3, 32) for _ in range(rng.randrange(3, 61))] for _ in range(PROMPTS)]


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def generate(self, ids: list[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        """One greedy request: the whole answer of ``/generate``."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        reply = httpx.post(
            f"{self.url}/generate",
            json={"input_ids": ids, "sampling_params": params},
            timeout=120,
            trust_env=False,
        )
        assert reply.status_code == 200, (reply.status_code, reply.text, self.text()[-4000:])
        return dict(reply.json())

    def outputs(self, requests: list[tuple[list[int], int]], concurrency: int = 4) -> list[list[int]]:
        """Output tokens of requests, ``concurrency`` at a time."""
        with ThreadPoolExecutor(concurrency) as pool:
            replies = list(pool.map(lambda request: self.generate(*request), requests))
        return [reply["output_ids"] for reply in replies]

    def get(self, path: str) -> dict[str, Any]:
        reply = httpx.get(f"{self.url}{path}", timeout=60, trust_env=False)
        assert reply.status_code == 200, (path, reply.status_code, reply.text)
        return dict(reply.json())

    def idle(self) -> None:
        """Wait until nothing runs, drop the cache, and see that not a slot of KV is missing.

        sglang counts its slots whenever it is idle and dies if one is missing; the next request would not be answered.
        """
        deadline = time.monotonic() + 60
        while True:
            reply = httpx.post(f"{self.url}/flush_cache", timeout=60, trust_env=False)
            if reply.status_code == 200:
                break
            assert time.monotonic() < deadline, reply.text
            time.sleep(0.5)
        time.sleep(1.5)
        assert self.process.poll() is None, self.text()[-4000:]
        assert len(self.generate([5, 6, 7], 4)["output_ids"]) == 4
        log = self.text()
        assert "leak" not in log, log[-4000:]
        assert "Traceback" not in log, log[-4000:]


def plugin_site(folder: Path) -> Path:
    """A folder for PYTHONPATH: the package, and the entry point by which sglang finds it."""
    info = folder / "ddtree_sglang-0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree-sglang\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nddtree = ddtree_sglang.plugin:register\n")
    (folder / "ddtree_sglang").symlink_to(ROOT / "ddtree_sglang")
    return folder


def environment(site: Path, **more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "DDTREE_"))}
    return env | {
        "PYTHONPATH": os.pathsep.join([str(site), str(HERE / "cpu" / "stubs")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def command(models: Path, pair: str, port: int, *args: str) -> list[str]:
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(models / pair)),
        *("--served-model-name", "tiny", "--skip-tokenizer-init", "--dtype", "float32", "--device", "cpu"),
        *("--attention-backend", "triton", "--disable-cuda-graph", "--grammar-backend", "none"),
        *("--disable-overlap-schedule", "--host", "127.0.0.1", "--port", str(port)),
        *("--max-total-tokens", "4096", "--max-running-requests", "4", "--random-seed", "1"),
        *("--decode-log-interval", "10", "--skip-server-warmup"),
        *args,
    ]


def speculative(models: Path, pair: str, algorithm: str) -> list[str]:
    flags = [
        "--speculative-algorithm",
        algorithm,
        "--speculative-draft-model-path",
        str(models / f"{pair}-draft"),
    ]
    if algorithm == "DDTREE":
        flags += ["--speculative-ddtree-budget", str(BUDGET), "--speculative-ddtree-topk-cap", str(TOPK)]
    return flags


def free_port() -> int:
    """A port below 55536: sglang adds 10000 for gRPC and wants that to be a port too."""
    for port in range(31350, 31450):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port from 31350 to 31449")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and the processes that it started: its whole session."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
    except ProcessLookupError:
        process.wait(20)


@contextmanager
def serving(arguments: list[str], env: dict[str, str], log: Path) -> Iterator[Server]:
    """A server from its start until it is stopped. One that does not start fails the test with its log."""
    url = f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}"
    with log.open("wb") as sink:
        process = subprocess.Popen(arguments, env=env, stdout=sink, stderr=sink, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, log.read_text(errors="replace")[-6000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-6000:]
            try:
                if httpx.get(f"{url}/health", timeout=30, trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(1)
        yield Server(url, process, log)
    finally:
        stop(process)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(HERE / "cpu" / "make_models.py"), str(folder)], check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(plugin_site(tmp_path_factory.mktemp("site")))


@dataclass(frozen=True)
class Reference:
    """What the server says without speculation."""

    outputs: list[list[int]]
    continued: list[list[int]]
    to_limit: list[int]


def long_prompt() -> list[int]:
    """A prompt that leaves room for 18 tokens: sglang keeps two back."""
    return (prompts()[0] * CONTEXT)[: CONTEXT - 20]


def continuations(outputs: list[list[int]]) -> list[list[int]]:
    """Second turns: prompt and answer of the first, and three tokens more. Their beginnings are in the prefix cache."""
    return [[*prompt, *output, 4, 5, 6] for prompt, output in zip(prompts()[:12], outputs, strict=False)]


@pytest.fixture(scope="module")
def reference(models: Path, env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The plain server's answers, by the target of every pair but ``top``: they differ in a row that no prompt uses."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with serving(command(models, "lower", free_port()), env, log) as server:
        outputs = server.outputs([(prompt, TOKENS) for prompt in prompts()])
        continued = server.outputs([(turn, TOKENS) for turn in continuations(outputs)])
        to_limit = server.generate(long_prompt(), 18)["output_ids"]
    assert {token for output in outputs for token in output} == set(SPOKEN)
    assert len({tuple(output) for output in outputs}) > PROMPTS * 0.8, "the target hardly reads its context"
    return Reference(outputs, continued, to_limit)


@dataclass(frozen=True)
class Kind:
    """A server under test. ``accept`` is the least and greatest mean accept length that its drafter allows."""

    pair: str
    algorithm: str
    accept: tuple[float, float]


KINDS = {
    # a chain whose first token is never said
    "dflash-lower": Kind("lower", "DFLASH", (1.0, 1.0)),
    # 4 candidates a depth of which 3 are said: depths 1 and 2 whole (20 nodes), and 20 of 64 at depth 3
    "ddtree-lower": Kind("lower", "DDTREE", (3.0, 4.0)),
    "ddtree-top": Kind("top", "DDTREE", (4.0, 4.0)),
    "ddtree-nothing": Kind("nothing", "DDTREE", (1.0, 1.0)),
    "ddtree-random": Kind("random", "DDTREE", (1.5, 4.0)),
}


@dataclass
class Running:
    kind: Kind
    server: Server
    expected: Reference


@pytest.fixture(scope="module", params=list(KINDS))
def running(
    request: pytest.FixtureRequest,
    models: Path,
    env: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    kind = KINDS[request.param]
    if kind.pair == "top":
        said = [[SPOKEN[0]] * TOKENS]
        expected = Reference(said * PROMPTS, said * 12, said[0][:18])
    else:
        expected = request.getfixturevalue("reference")
    log = tmp_path_factory.mktemp(request.param) / "log"
    arguments = command(models, kind.pair, free_port(), *speculative(models, kind.pair, kind.algorithm))
    with serving(arguments, env, log) as server:
        yield Running(kind, server, expected)


def test_the_text_is_that_of_plain_greedy_decoding(running: Running) -> None:
    """Two prompts in sequence, then all of them four at a time."""
    alone = [running.server.generate(prompt, TOKENS)["output_ids"] for prompt in prompts()[:2]]
    assert alone == running.expected.outputs[:2]
    assert running.server.outputs([(prompt, TOKENS) for prompt in prompts()]) == running.expected.outputs
    running.server.idle()


def test_as_much_is_accepted_as_the_drafter_deserves(running: Running) -> None:
    """The accept length is known beforehand, and never above the block size."""
    least, most = running.kind.accept
    lengths, tokens, steps = [], 0, 0
    for prompt in prompts()[:12]:
        meta = running.server.generate(prompt, TOKENS + 1)["meta_info"]
        # the first token comes from the prefill, and the last step may be cut short by the limit
        lengths.append(meta["completion_tokens"] / meta["spec_verify_ct"])
        tokens += meta["completion_tokens"] - 1
        steps += meta["spec_verify_ct"]
        assert meta["spec_accepted_drafts"] <= meta["spec_verify_ct"] * (BLOCK - 1)
        assert meta["spec_accept_rate"] <= 1.0
    mean = tokens / steps
    assert least <= mean <= most, (mean, lengths)
    assert mean <= BLOCK


def test_a_prefix_from_the_cache_changes_nothing(running: Running) -> None:
    """Second turns hit the cache, KV written by accepted branches included."""
    turns = continuations(running.expected.outputs)
    running.server.outputs([(prompt, TOKENS) for prompt in prompts()[:12]])
    replies = [running.server.generate(turn, TOKENS) for turn in turns]
    assert [reply["output_ids"] for reply in replies] == running.expected.continued
    for turn, reply in zip(turns, replies, strict=True):
        # all but the last token of the first turn's answer, whose KV no step wrote, and the three new ones
        assert reply["meta_info"]["cached_tokens"] >= len(turn) - 5
    running.server.idle()


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_an_early_end_stops_within_a_step(running: Running, tokens: int) -> None:
    requests = [(prompt, tokens) for prompt in prompts()[:8]]
    assert running.server.outputs(requests) == [output[:tokens] for output in running.expected.outputs[:8]]
    running.server.idle()


def test_a_stop_token_ends_the_text_within_a_step(running: Running) -> None:
    for prompt, output in zip(prompts()[:8], running.expected.outputs, strict=False):
        wanted = output[: output.index(SPOKEN[0]) + 1] if SPOKEN[0] in output else output
        # ignore_eos, the default of these tests, would ignore stop tokens too
        reply = running.server.generate(prompt, TOKENS, stop_token_ids=[SPOKEN[0]], ignore_eos=False)
        assert reply["output_ids"] == wanted
    running.server.idle()


def test_up_to_the_context_limit(running: Running) -> None:
    """Near the limit a whole tree still has room in the request's row; other requests run beside it."""
    replies = running.server.outputs([(long_prompt(), 18), (prompts()[1], TOKENS)])
    assert replies == [running.expected.to_limit, running.expected.outputs[1]]
    running.server.idle()


def test_aborted_requests_leave_nothing_behind(running: Running) -> None:
    """Clients hang up in the middle while others are served."""

    def hang_up(prompt: list[int]) -> None:
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"max_new_tokens": 150, "ignore_eos": True},
        }
        body["sampling_params"]["temperature"] = 0
        with httpx.stream(
            "POST", f"{running.server.url}/generate", json=body, timeout=60, trust_env=False
        ) as reply:
            for line in reply.iter_lines():
                if line.startswith("data:"):
                    return

    with ThreadPoolExecutor(4) as pool:
        gone = [pool.submit(hang_up, prompt) for prompt in prompts()[:6]]
        kept = running.server.outputs([(prompt, TOKENS) for prompt in prompts()[6:12]], concurrency=2)
        for future in gone:
            future.result()
    assert kept == running.expected.outputs[6:12]
    running.server.idle()


def test_sampled_requests_run_beside_greedy_ones(running: Running) -> None:
    """A greedy request's text does not depend on sampled ones in its batch; sampled ones say what may be said."""
    if running.kind.algorithm != "DDTREE":
        pytest.skip("DFLASH cannot sample on a CPU")
    with ThreadPoolExecutor(4) as pool:
        sampled = [
            pool.submit(running.server.generate, prompt, TOKENS, temperature=1.0, top_p=0.9, top_k=20)
            for prompt in prompts()[:4]
        ]
        greedy = running.server.outputs([(prompt, TOKENS) for prompt in prompts()[4:8]], concurrency=2)
        drawn = [future.result()["output_ids"] for future in sampled]
    assert greedy == running.expected.outputs[4:8]
    assert all(len(output) == TOKENS and set(output) <= set(SPOKEN) for output in drawn)
    running.server.idle()


def test_log_probabilities_are_refused_by_name(running: Running) -> None:
    body = {"input_ids": [5, 6], "return_logprob": True, "sampling_params": {"max_new_tokens": 4}}
    reply = httpx.post(f"{running.server.url}/generate", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 400, reply.text
    assert f"{running.kind.algorithm} speculative decoding does not support return_logprob" in reply.text


def test_the_server_says_what_it_runs(running: Running) -> None:
    info = running.server.get("/server_info")
    assert info["speculative_algorithm"] == running.kind.algorithm
    assert info["speculative_num_draft_tokens"] == BLOCK
    if running.kind.algorithm == "DDTREE":
        assert (info["speculative_ddtree_budget"], info["speculative_ddtree_topk_cap"]) == (BUDGET, TOPK)
        assert info["speculative_ddtree_budget_schedule"] == "fixed"
        log = running.server.text()
        assert f"verify tokens={BUDGET + 1}" in log
        assert "self-check=passed" in log
        assert "DDTREE metrics: " in log
        assert f"speculative_ddtree_budget={BUDGET}" in log


def died(arguments: list[str], env: dict[str, str]) -> str:
    """Run a server that is to refuse, and return what it said. One that serves fails the test."""
    process = subprocess.Popen(
        arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=START_S)
    finally:
        stop(process)
    assert process.returncode != 0, said.decode()[-4000:]
    return said.decode(errors="replace")


def test_all_refusals_come_at_once_and_before_anything_is_loaded(models: Path, env: dict[str, str]) -> None:
    flags = speculative(models, "lower", "DDTREE")
    flags[flags.index(str(BUDGET))] = "2"
    said = died(command(models, "lower", free_port(), *flags, "--page-size", "16"), env)
    assert "DDTREE does not run with these arguments" in said
    assert "raise it to at least 3" in said
    assert "set --page-size 1" in said
    assert "Load weight begin" not in said


def test_a_hook_that_was_swallowed_starts_no_server(
    models: Path, env: dict[str, str], tmp_path: Path
) -> None:
    """Another plugin breaks a hook's target: sglang only logs that, the worker aborts."""
    site = tmp_path / "breaker"
    info = site / "breaker-0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: breaker\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\naaa = breaker:register\n")
    (site / "breaker.py").write_text(
        "def register():\n"
        "    from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "    kept = HookRegistry._apply_target.__func__\n"
        "    def refuse(cls, target, hooks):\n"
        "        if target.endswith('new_tokens_required_next_decode'):\n"
        "            raise RuntimeError('cannot be hooked')\n"
        "        return kept(cls, target, hooks)\n"
        "    HookRegistry._apply_target = classmethod(refuse)\n"
    )
    broken = env | {"PYTHONPATH": os.pathsep.join([str(site), env["PYTHONPATH"]])}
    said = died(command(models, "lower", free_port(), *speculative(models, "lower", "DDTREE")), broken)
    assert "Failed to apply hooks" in said
    assert "DDTREE is not wholly installed in this sglang: no hook on " in said
    assert "ScheduleBatch.new_tokens_required_next_decode" in said


def test_the_models_are_as_the_tests_say(models: Path) -> None:
    config = json.loads((models / "lower-draft" / "config.json").read_text())
    assert config["block_size"] == BLOCK
    assert config["max_position_embeddings"] == CONTEXT
