"""How the lab engine loads, verifies and dies: exit statuses and key lines as recorded from sglang 0.5.11."""

from __future__ import annotations

import ast
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.inventory.models import RuntimeSpec
from ddtree_ops.lab.engine import ENGINE_FILES, ENGINE_PATH
from ddtree_ops.lab.engine.process import EngineProcess
from ddtree_ops.runtime import build

Start = Callable[..., EngineProcess]
RANKS = "01234567"
QUICKSORT = "Write quicksort in Python with comments."
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
}
INDEX = {
    "metadata": {"total_size": 60_000_000_000},
    "weight_map": {f"w{n}": f"model-{n:05d}-of-00008.safetensors" for n in range(8)},
}
DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 8,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 7168,
}


@pytest.fixture(scope="module")
def patched() -> Path:
    return build(RuntimeSpec(python="cp312")).root


@pytest.fixture(scope="module")
def unpatched() -> Path:
    return build(RuntimeSpec(python="cp312", patches=[])).root


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("kimi", KIMI), ("draft", DRAFT)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "kimi" / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    return folder


@pytest.fixture
def start(models: Path, patched: Path) -> Iterator[Start]:
    """Starts engines; ``budget`` makes it DDTREE, keyword arguments in capitals are its environment."""
    with ExitStack() as stack:

        def run(
            *flags: str, tree: Path | None = patched, budget: int | None = None, **env: str
        ) -> EngineProcess:
            words = ["--model-path", str(models / "kimi"), "--served-model-name", "k26", *flags]
            if budget is not None:
                words += ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", str(budget)]
                words += ["--speculative-draft-model-path", str(models / "draft")]
            environment = {"LAB_LOAD_SECONDS": "0", "LAB_DRAIN_POLL": "0.1", **env}
            return stack.enter_context(EngineProcess(tree, *words, env=environment))

        yield run


def ask(engine: EngineProcess, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=300)
    content = None if body is None else json.dumps(body)
    try:
        connection.request(method, path, content, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def chat(engine: EngineProcess, tokens: int = 128, text: str = QUICKSORT) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": "k26", "messages": messages, "temperature": 0, "max_tokens": tokens}
    status, answer = ask(engine, "POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return dict(json.loads(answer))


def generate(engine: EngineProcess, texts: list[str], tokens: int = 8) -> list[dict[str, Any]]:
    params = {"max_new_tokens": tokens, "ignore_eos": True}
    status, answer = ask(engine, "POST", "/generate", {"text": texts, "sampling_params": params})
    assert status == 200, answer
    return list(json.loads(answer))


def mismatch(engine: EngineProcess) -> set[tuple[str, str]]:
    return set(
        re.findall(
            r"^RuntimeError: The size of tensor a \((\d+)\) must match .* b \((\d+)\)", engine.log, re.M
        )
    )


# --- the honest verify step


def test_unpatched_runner_dies_on_the_first_request_on_every_rank(start: Start, unpatched: Path) -> None:
    engine = start("--tp", "8", tree=unpatched, budget=32).wait_ready()
    assert ask(engine, "GET", "/health_generate")[0] == 200
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        chat(engine)
    assert engine.wait() == -signal.SIGKILL
    assert mismatch(engine) == {("8", "33")}
    hit = re.findall(
        r"^\[.{19} TP(\d)\] Scheduler hit an exception: Traceback \(most recent call last\):$",
        engine.log,
        re.M,
    )
    assert "".join(hit) == RANKS
    assert engine.log.count("at non-singleton dimension 0\n") == 8
    assert "] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n" in engine.log
    runner = unpatched / "sglang/srt/model_executor/cuda_graph_runner.py"
    frames = re.findall(r'^  File "(.*)", line (\d+), in (\w+)\n    (.*)$', engine.log, re.M)
    assert (str(runner), "117", "foreach_copy", "torch._foreach_copy_(dsts, srcs)") in frames
    for path, line, _, code in frames:
        assert Path(path).read_text().splitlines()[int(line) - 1].strip() == code


def test_the_numbers_follow_the_batch_and_the_budget(start: Start, unpatched: Path) -> None:
    for budget, texts, numbers in ((32, ["a", "b", "c", "d"], ("32", "132")), (8, ["a"], ("8", "9"))):
        engine = start(tree=unpatched, budget=budget).wait_ready()
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            generate(engine, texts)
        assert engine.wait() == -signal.SIGKILL
        assert mismatch(engine) == {numbers}


def test_without_a_graph_nothing_is_copied(start: Start, unpatched: Path) -> None:
    engine = start("--disable-cuda-graph", tree=unpatched, budget=32).wait_ready()
    assert len(generate(engine, ["a", "b"], 400)) == 2
    assert "cuda graph: False" in engine.wait_for("Decode batch.*")


def test_budget_of_block_size_less_one_fits_the_unpatched_runner(start: Start, unpatched: Path) -> None:
    engine = start(tree=unpatched, budget=7).wait_ready()
    assert chat(engine)["usage"]["completion_tokens"] == 128


def test_patched_runner_serves(start: Start) -> None:
    engine = start("--tp", "8", budget=32).wait_ready()
    first, second = chat(engine), chat(engine)
    answer = first["choices"][0]
    assert answer["finish_reason"] == "length"
    assert first["usage"]["completion_tokens"] == 128
    assert answer["message"]["content"] == second["choices"][0]["message"]["content"]
    code = chat(engine, 4000)["choices"][0]
    assert code["finish_reason"] == "stop"
    source = re.search(r"```python\n(.*?)```", code["message"]["content"], re.S)
    assert source
    ast.parse(source[1])
    sorter: dict[str, Any] = {}
    exec(source[1].rsplit("\n\n\n", 1)[0], sorter)
    assert sorter["quicksort"]([3, 1, 2, 3, 0]) == [0, 1, 2, 3, 3]
    meta = [item["meta_info"] for item in generate(engine, ["one", "two", "three", "four"], 300)]
    for item in meta:
        assert 2 <= item["spec_accept_length"] <= 4
    line = engine.wait_for(r"Decode batch.*")
    assert re.search(r"accept len: \d\.\d\d, accept rate: 0\.\d\d, cuda graph: True", line)
    assert "#cached-token: 0," not in engine.wait_for(r"Prefill batch.*", count=4)


# --- loading


def test_phases_come_in_order_and_nothing_listens_before_the_weights_are_in(start: Start) -> None:
    engine = start("--tp", "2", budget=32, LAB_LOAD_SECONDS="0.3").wait_ready()
    order = [
        r"server_args=ServerArgs\(",
        "TP1] Load weight begin",
        "shards:   0% Completed | 0/8",
        "shards: 100% Completed | 8/8",
        "TP1] Load weight end",
        "TP1] KV Cache is allocated. #tokens: ",
        "TP1] Capture cuda graph begin",
        "TP0] Capture cuda graph bs [1, 2",
        "TP1] Capture cuda graph end",
        "type=DFlashDraftModel",
        "TP0] Initialized DFLASH draft runner. attention_backend=triton, model=DFlashDraftModel, block_size=8",
        "TP0] max_total_num_tokens=",
        "Uvicorn running on http://127.0.0.1:",
        "TP0] Prefill batch",
        "The server is fired up and ready to roll!",
    ]
    at = 0
    for text in order:
        found = engine.log.find(text.replace("\\", ""), at)
        assert found >= at, f"{text} is not where it should be"
        at = found
    assert "\rLoading safetensors checkpoint shards:  50% Completed | 4/8 [" in engine.log
    assert engine.log.count("Capture cuda graph begin") == 4, "target and draft, on two ranks"


def test_a_stall_while_loading_refuses_connections(start: Start) -> None:
    engine = start(LAB_HANG_AT="weights")
    engine.wait_for("Load weight begin")
    with pytest.raises(ConnectionRefusedError):
        ask(engine, "GET", "/health")
    engine.process.terminate()
    assert engine.wait() == -signal.SIGTERM


def test_health_is_503_while_warming_up_and_models_are_listed(start: Start) -> None:
    engine = start(LAB_HANG_AT="warmup")
    engine.wait_for("Uvicorn running")
    assert ask(engine, "GET", "/health") == (503, "")
    assert ask(engine, "GET", "/health_generate") == (503, "")
    assert ask(engine, "GET", "/v1/models")[0] == 200
    assert ask(engine, "GET", "/server_info")[0] == 200


def test_too_large_graphs_do_not_fit_into_memory(start: Start) -> None:
    engine = start("--tp", "8", "--cuda-graph-max-bs", "4096", budget=32)
    assert engine.wait() == -signal.SIGKILL
    failed = re.findall(
        r"^Exception: Capture cuda graph failed: CUDA out of memory\. Tried to allocate", engine.log, re.M
    )
    assert len(failed) == 8
    assert "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)\n" in engine.log
    assert "] Received sigquit from a child process. It usually means the child failed.\n" in engine.log


def test_weights_larger_than_the_static_memory(start: Start) -> None:
    engine = start("--mem-fraction-static", "0.5")
    assert engine.wait() == -signal.SIGKILL
    assert "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static." in engine.log


def test_block_size_other_than_the_drafters_is_a_warning(start: Start) -> None:
    engine = start("--tp", "8", "--speculative-num-draft-tokens", "4", budget=32).wait_ready()
    text = "DFLASH block size mismatch: using speculative_num_draft_tokens=4 but draft config block_size=8."
    assert text in engine.log


# --- launch errors


def test_launch_errors(start: Start, models: Path, tmp_path: Path) -> None:
    cases: list[tuple[EngineProcess, int, str]] = [
        (start("--no-such-flag"), 2, "sglang serve: error: unrecognized arguments: --no-such-flag"),
        (start("--tool-server"), 2, "sglang serve: error: argument --tool-server: expected one argument"),
        (start("--dtype", "int3"), 2, "error: argument --dtype: invalid choice: 'int3'"),
        (start(tree=None), 1, "ModuleNotFoundError: No module named 'sglang'"),
        (start(tree=tmp_path), 1, "ModuleNotFoundError: No module named 'sglang'"),
        (start("--model-path", "/no/model"), 1, "\nOSError: Repo id must be in the form "),
        (
            start("--speculative-algorithm", "DFLASH"),
            1,
            "\nValueError: DFLASH speculative decoding requires setting --speculative-draft-model-path.",
        ),
    ]
    for engine, status, text in cases:
        assert engine.wait() == status
        assert text in engine.log


def test_it_is_one_program_of_old_python(models: Path) -> None:
    for path in ENGINE_FILES:
        ast.parse(path.read_text(), feature_version=(3, 8))
    said = subprocess.run(
        [sys.executable, str(ENGINE_PATH), "--lab-version"], capture_output=True, text=True, check=True
    )
    assert "stand-in for sglang; no model, no GPU" in said.stdout


FLAGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--{name}")
"""


def test_flags_that_a_host_keeps_are_read_again_where_the_runtime_is_another(tmp_path: Path) -> None:
    home, tree = tmp_path / "home", tmp_path / "tree/sglang/srt/server_args.py"
    home.mkdir()
    tree.parent.mkdir(parents=True)
    for path in ENGINE_FILES:
        shutil.copy(path, home)

    def said(flag: str) -> str:
        argv = [sys.executable, "-I", str(home / "lab_engine.py"), flag]
        variables = {**os.environ, "PYTHONPATH": str(tmp_path / "tree")}
        return subprocess.run(argv, env=variables, capture_output=True, text=True).stderr

    expects = "argument {}: expected one argument"
    tree.write_text(FLAGS.format(name="aaa"))
    assert expects.format("--aaa") in said("--aaa")
    kept = (home / "flags.kept").read_bytes()
    assert expects.format("--aaa") in said("--aaa"), "as kept"
    assert (home / "flags.kept").read_bytes() == kept
    tree.write_text(FLAGS.format(name="bbb"))
    assert expects.format("--bbb") in said("--bbb"), "of the same length, and another"
    assert "unrecognized arguments: --aaa" in said("--aaa")
    (home / "flags.kept").write_bytes(kept[:40])
    assert expects.format("--bbb") in said("--bbb"), "what is damaged is read again"


# --- deaths


def test_killed_scheduler(start: Start) -> None:
    engine = start().wait_ready()
    pid = engine.scheduler_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert engine.wait() == -signal.SIGKILL
    assert (
        f"Subprocess scheduler_0 (pid={pid}) crashed with exit code -9. Triggering SIGQUIT for" in engine.log
    )
    assert "SIGQUIT received. signum=None, frame=None." in engine.log


def test_scheduler_killed_while_loading(start: Start) -> None:
    engine = start(LAB_HANG_AT="kv")
    engine.wait_for("Load weight end")
    pid = engine.scheduler_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert engine.wait() == 1
    assert "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9)." in engine.log


def test_clean_stop_ends_by_sigkill_after_the_drain(start: Start) -> None:
    engine = start().wait_ready()
    engine.process.terminate()
    assert engine.wait() == -signal.SIGKILL
    assert "SIGTERM received. signum=None frame=None. Draining requests and shutting down..." in engine.log
    assert "Gracefully exiting... Remaining number of requests 0. Remaining requests" in engine.log


def test_stop_of_the_whole_group(start: Start) -> None:
    engine = start(LAB_DRAIN_POLL="60").wait_ready()
    os.killpg(engine.process.pid, signal.SIGTERM)
    assert engine.wait() == -signal.SIGKILL
    assert "crashed with exit code -15. Triggering SIGQUIT for cleanup..." in engine.log


def test_interrupt_is_a_clean_exit(start: Start) -> None:
    engine = start().wait_ready()
    engine.process.send_signal(signal.SIGINT)
    assert engine.wait() == 0
    assert "INFO:     Finished server process [" in engine.log.splitlines()[-1]


def test_refused_request_is_never_drained_unless_forced(start: Start) -> None:
    engine, forced = start(), start(SGL_FORCE_SHUTDOWN="1")
    for each in (engine, forced):
        each.wait_ready()
        bad = {"model": "k26", "messages": [{"role": "user", "content": "x"}], "temperature": -1}
        assert ask(each, "POST", "/v1/chat/completions", bad)[0] == 400
        each.process.terminate()
    engine.wait_for("Gracefully exiting... Remaining number of requests 1", count=3)
    assert engine.process.poll() is None
    assert ask(engine, "GET", "/health")[0] == 503
    assert forced.wait() == -signal.SIGKILL


def test_port_taken_by_another_program(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.settimeout(10)
        port = other.getsockname()[1]
        engine = start("--host", "127.0.0.1", "--port", str(port), LAB_WARMUP_TRIES="1")
        client, _ = other.accept()
        client.recv(4096)
        client.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnope")
        client.close()
        assert engine.wait() == -signal.SIGKILL
    assert (
        f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already"
        in engine.log
    )
    assert "Initialization failed. warmup error: Traceback" in engine.log
    assert "AssertionError: res=<Response [404]>, res.text='nope'" in engine.log


def test_port_taken_by_another_engine_looks_ready(start: Start) -> None:
    first = start().wait_ready()
    second = start("--host", "127.0.0.1", "--port", str(first.port))
    assert second.wait() == 3
    assert "[Errno 98]" in second.log
    assert "The server is fired up and ready to roll!" in second.log
    assert ask(first, "GET", "/health")[0] == 200


def test_stopped_scheduler_hangs_health_but_not_the_card(start: Start) -> None:
    engine = start("--enable-metrics", SGLANG_HEALTH_CHECK_TIMEOUT="0.3").wait_ready()
    pid = engine.scheduler_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert ask(engine, "GET", "/health") == (503, "")
    assert "Health check failed. Server couldn't get a response from detokenizer for last" in engine.log
    assert ask(engine, "GET", "/v1/models")[0] == 200
    assert ask(engine, "GET", "/metrics")[0] == 200
    os.kill(pid, signal.SIGCONT)
    assert ask(engine, "GET", "/health")[0] == 200


# --- fault switches and the rest


def test_crash_without_a_request(start: Start) -> None:
    engine = start(LAB_CRASH_AFTER_S="0.1").wait_ready()
    assert engine.wait() == -signal.SIGKILL
    assert "torch.AcceleratorError: CUDA error: an illegal memory access was encountered" in engine.log


def test_crash_on_a_prefix_hit(start: Start) -> None:
    engine = start(budget=32, LAB_CRASH_ON_PREFIX_HIT="1").wait_ready()
    chat(engine)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        chat(engine)
    assert engine.wait() == -signal.SIGKILL
    text = "\ntriton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376."
    assert text in engine.log


def test_garbage(start: Start) -> None:
    engine = start(LAB_GARBAGE="1").wait_ready()
    assert chat(engine, 16)["choices"][0]["message"]["content"] == "!" * 16


def test_api_key_guards_all_but_health_and_metrics(start: Start) -> None:
    engine = start("--api-key", "sk-right", "--enable-metrics").wait_ready()
    assert ask(engine, "GET", "/v1/models") == (401, '{"error":"Unauthorized"}')
    assert ask(engine, "GET", "/v1/models", Authorization="Bearer sk-wrong")[0] == 401
    for path in ("/health", "/health_generate", "/metrics"):
        assert ask(engine, "GET", path)[0] == 200
    info = json.loads(ask(engine, "GET", "/server_info", Authorization="Bearer sk-right")[1])
    assert info["api_key"] == info["internal_states"][0]["api_key"] == "sk-right"


def test_metrics_only_when_asked_for(start: Start) -> None:
    engine = start().wait_ready()
    assert ask(engine, "GET", "/metrics") == (404, '{"detail":"Not Found"}')
