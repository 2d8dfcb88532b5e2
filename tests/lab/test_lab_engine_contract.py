"""The lab engine against recorded answers and log lines of the real sglang 0.5.11.

``DDTREE_OPS_CONTRACT_URL`` names a running real server to hold against the same recordings instead of the engine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ddtree_ops.inventory.models import RuntimeSpec
from ddtree_ops.lab.engine.process import EngineProcess
from ddtree_ops.runtime import build

DATA = Path(__file__).parents[1] / "data"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
DRAFT = {**CONFIG, "architectures": ["DFlashDraftModel"], "block_size": 4}
FLAGS = (
    "--served-model-name",
    "tiny",
    "--enable-metrics",
    "--max-total-tokens",
    "4096",
    "--grammar-backend",
    "none",
    "--enable-cache-report",
)
HELLO = [{"role": "user", "content": "hello world"}]
LONG = "word " * 100_000


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 24, **more}


def generate(text: Any = "how are you", tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "text": text,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        **more,
    }


CHAT, GENERATE, COMPLETIONS = "/v1/chat/completions", "/generate", "/v1/completions"
EXCHANGES: dict[str, tuple[str, str, Any]] = {
    "health": ("GET", "/health", None),
    "health_generate": ("GET", "/health_generate", None),
    "health_post": ("POST", "/health", {}),
    "v1_models": ("GET", "/v1/models", None),
    "v1_models_one": ("GET", "/v1/models/tiny", None),
    "v1_models_unknown": ("GET", "/v1/models/nope", None),
    "model_info": ("GET", "/model_info", None),
    "get_model_info": ("GET", "/get_model_info", None),
    "server_info": ("GET", "/server_info", None),
    "not_found": ("GET", "/nope", None),
    "wrong_method": ("GET", CHAT, None),
    "flush_cache": ("POST", "/flush_cache", {}),
    "chat": ("POST", CHAT, chat()),
    "chat_unknown_model": ("POST", CHAT, chat(model="nope", max_tokens=4)),
    "chat_no_model": ("POST", CHAT, {"messages": HELLO, "max_tokens": 4}),
    "chat_zero_max_tokens": ("POST", CHAT, chat(max_tokens=0)),
    "chat_stream": ("POST", CHAT, chat(stream=True)),
    "chat_stream_usage": ("POST", CHAT, chat(stream=True, stream_options={"include_usage": True})),
    "chat_bad_temperature": ("POST", CHAT, chat(temperature=-1)),
    "chat_neg_max_tokens": ("POST", CHAT, chat(max_tokens=-1)),
    "chat_max_tokens_over": ("POST", CHAT, chat(max_tokens=100_000)),
    "chat_over_long": ("POST", CHAT, chat(messages=[{"role": "user", "content": LONG}])),
    "chat_over_long_stream": ("POST", CHAT, chat(messages=[{"role": "user", "content": LONG}], stream=True)),
    "chat_empty_messages": ("POST", CHAT, chat(messages=[])),
    "chat_no_messages": ("POST", CHAT, {"model": "tiny", "tool_choice": "none"}),
    "chat_bad_type": ("POST", CHAT, chat(max_tokens="x")),
    "chat_bad_json": ("POST", CHAT, b'{"model":x'),
    "chat_wrong_content_type": ("POST", CHAT, ("text/plain", b"{}")),
    "chat_json_schema": (
        "POST",
        CHAT,
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object"}},
            }
        ),
    ),
    "chat_logprobs": ("POST", CHAT, chat(logprobs=True, top_logprobs=2)),
    "chat_logprobs_stream": (
        "POST",
        CHAT,
        chat(logprobs=True, top_logprobs=2, max_tokens=4, stream=True),
    ),
    "chat_cached": ("POST", CHAT, chat(max_tokens=4)),
    "chat_stream_cached": (
        "POST",
        CHAT,
        chat(max_tokens=4, stream=True, stream_options={"include_usage": True}),
    ),
    "chat_stop": ("POST", CHAT, chat(stop=["y"])),
    "completions": ("POST", COMPLETIONS, {"model": "tiny", "prompt": "how are you", "max_tokens": 8}),
    "completions_stream": (
        "POST",
        COMPLETIONS,
        {"model": "tiny", "prompt": "how are you", "max_tokens": 4, "stream": True},
    ),
    "completions_logprobs": (
        "POST",
        COMPLETIONS,
        {"model": "tiny", "prompt": "how are you", "max_tokens": 4, "logprobs": 2},
    ),
    "get_load": ("GET", "/get_load", None),
    "generate": ("POST", GENERATE, generate()),
    "generate_ignore_eos": ("POST", GENERATE, generate(tokens=64)),
    "generate_batch": ("POST", GENERATE, generate(["a b", "c d"], 8)),
    "generate_input_ids": (
        "POST",
        GENERATE,
        {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 2}},
    ),
    "generate_stream": ("POST", GENERATE, generate(tokens=4, stream=True)),
    "generate_over_long": ("POST", GENERATE, generate(LONG)),
    "generate_bad": ("POST", GENERATE, {"sampling_params": {}}),
    "generate_logprob": ("POST", GENERATE, generate(return_logprob=True)),
    "generate_logprob_top": (
        "POST",
        GENERATE,
        generate(
            tokens=4,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
            return_text_in_logprobs=True,
        ),
    ),
    "metrics_with_spec": ("GET", "/metrics", None),
}
SETS = {"plain": "responses", "dflash": "responses_dflash"}
CASES = [
    (kind, folder, name)
    for kind, folder in SETS.items()
    for name in sorted(path.stem for path in (DATA / folder).glob("*.headers"))
]


@dataclass(frozen=True)
class Contract:
    """A server and its log (None for a server that somebody else runs)."""

    client: httpx.Client
    engine: EngineProcess | None

    def send(self, method: str, path: str, body: Any) -> httpx.Response:
        kind, content = "application/json", body
        if isinstance(body, tuple):
            kind, content = body
        elif body is not None and not isinstance(body, bytes):
            content = json.dumps(body).encode()
        headers = {} if body is None else {"content-type": kind}
        return self.client.request(method, path, content=content, headers=headers)


def write_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def serve(kind: str, folder: Path) -> Iterator[Contract]:
    url = os.environ.get("DDTREE_OPS_CONTRACT_URL", "").rstrip("/")
    if url:
        info = httpx.get(url + "/server_info", timeout=300, trust_env=False).json()
        if bool(info["speculative_algorithm"]) != (kind == "dflash"):
            pytest.skip(
                f"the server at {url} runs with speculative_algorithm={info['speculative_algorithm']}"
            )
        with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
            yield Contract(client, None)
        return
    flags = ["--model-path", str(write_checkpoint(folder / "model", CONFIG)), *FLAGS]
    if kind == "dflash":
        draft = write_checkpoint(folder / "draft", DRAFT)
        flags += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    tree = build(RuntimeSpec(python="cp312")).root
    with EngineProcess(tree, *flags, env={"LAB_LOAD_SECONDS": "0"}) as engine:
        engine.wait_ready()
        with httpx.Client(base_url=engine.url, timeout=300, trust_env=False) as client:
            yield Contract(client, engine)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contract]:
    with serve("plain", tmp_path_factory.mktemp("plain")) as running:
        yield running


@pytest.fixture(scope="module")
def dflash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contract]:
    with serve("dflash", tmp_path_factory.mktemp("dflash")) as running:
        yield running


def kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, int | float) else type(value).__name__


def differences(recorded: Any, answered: Any, path: str = "$") -> Iterator[str]:
    """Where two JSON values differ in keys or types. A null is compatible with everything."""
    if recorded is None or answered is None or re.search(r"\.logprobs\.top_logprobs\[\d+\]$", path):
        return  # of a completion the keys are the tokens themselves
    if kind_of(recorded) != kind_of(answered):
        yield f"{path}: recorded {kind_of(recorded)}, answered {kind_of(answered)}"
    elif isinstance(recorded, dict):
        added = set(answered) - set(recorded)
        unknown = {key for key in added if key != "lab_engine" and not key.startswith("speculative_ddtree_")}
        for key in sorted(set(recorded) - set(answered)):
            yield f"{path}.{key}: missing"
        for key in sorted(unknown):
            yield f"{path}.{key}: not in the recording"
        for key in sorted(set(recorded) & set(answered)):
            yield from differences(recorded[key], answered[key], f"{path}.{key}")
    elif isinstance(recorded, list) and recorded:
        # a list of things alike, or a tuple: (log-probability, id, text)
        alike = len({kind_of(item) for item in recorded if item is not None}) < 2
        for index, item in enumerate(answered):
            yield from differences(recorded[0 if alike else index], item, f"{path}[{index}]")


def head(recording: Path) -> tuple[int, dict[str, str]]:
    status, *lines = recording.with_suffix(".headers").read_text().strip().splitlines()
    headers = (line.split(": ", 1) for line in lines if ": " in line)
    return int(status.split()[1]), {name.lower(): value for name, value in headers}


def events(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line.strip()]
    assert data[-1].strip() == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def wording(body: str) -> str:
    """An error without its figures, paths and echoed input."""
    return re.sub(r"""File ".*?"|'input': .*?\}|\d[\d.]*""", "#", body.replace('\\"', '"'))


def families(text: str) -> dict[str, set[str]]:
    """Metric name -> label names."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        sample = re.match(r"([a-z_:]+)(?:\{(.*)\})? \S+$", line)
        if sample:
            found[sample[1]] = set(re.findall(r'(\w+)="', sample[2] or ""))
    return found


@pytest.mark.parametrize(("kind", "folder", "name"), CASES)
def test_answer_has_the_recorded_shape(
    request: pytest.FixtureRequest, kind: str, folder: str, name: str
) -> None:
    contract: Contract = request.getfixturevalue(kind)
    recording = DATA / folder / name
    status, headers = head(recording)
    answer = contract.send(*EXCHANGES[name])
    assert answer.status_code == status
    assert answer.headers.get("content-type") == headers.get("content-type")
    framing = {"content-length", "transfer-encoding"}
    assert set(headers) - framing <= set(answer.headers)
    text = next(recording.parent.glob(f"{name}.[jt][sx]*")).read_text()
    if name.startswith("metrics"):
        recorded, answered = families(text), families(answer.text)
        assert answered
        assert {key: recorded.get(key) for key in answered} == answered
    elif "event-stream" in headers.get("content-type", ""):
        recorded_events, answered_events = events(text), events(answer.text)
        between = (1,) if min(len(recorded_events), len(answered_events)) > 3 else ()
        for index in (0, *between, -1):
            assert list(differences(recorded_events[index], answered_events[index])) == []
        choices = [event["choices"][0] for event in answered_events if event.get("choices")]
        assert [choice["finish_reason"] for choice in choices][-1:] in ([], ["length"], ["stop"])
    elif headers.get("content-type") == "application/json":
        if name == "server_info":
            contract.send("POST", "/flush_cache", {})
            answer = contract.send(*EXCHANGES[name])
        assert list(differences(json.loads(text), answer.json())) == []
        if status >= 400 and name != "chat_bad_json":
            assert wording(answer.text) == wording(text)
    else:
        assert answer.text == text


def test_every_recording_has_a_request() -> None:
    assert {name for *_, name in CASES} == set(EXCHANGES)


def test_average_accept_length_appears_with_the_first_decode_line(dflash: Contract) -> None:
    dflash.send("POST", "/flush_cache", {})
    assert (
        "avg_spec_accept_length" not in dflash.send("GET", "/server_info", None).json()["internal_states"][0]
    )
    meta = dflash.send("POST", GENERATE, generate(tokens=400)).json()["meta_info"]
    assert meta["spec_verify_ct"] >= 80
    info = dflash.send("GET", "/server_info", None).json()
    recorded = json.loads((DATA / "responses_dflash" / "server_info_with_avg.json").read_text())
    assert list(differences(recorded, info)) == []
    assert 1 <= info["internal_states"][0]["avg_spec_accept_length"] <= 4
    assert meta["spec_accept_length"] == meta["completion_tokens"] / meta["spec_verify_ct"]
    assert meta["spec_accepted_drafts"] == meta["completion_tokens"] - 1 - meta["spec_verify_ct"]
    assert meta["spec_proposed_drafts"] == 3 * meta["spec_verify_ct"]
    assert meta["spec_accept_rate"] == meta["spec_accepted_drafts"] / meta["spec_proposed_drafts"]


STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: TP\d+)?\] "
NUMBER = r"\d+\.\d\d"
KINDS = {
    "bar": r"(?:Loading safetensors checkpoint|Multi-thread loading) shards: {1,3}\d{1,3}% Completed \| \d+/\d+ "
    r"\[\d\d:\d\d<(?:\d\d:\d\d|\?), +[\d.?]+(?:it/s|s/it)\]$",
    "distributed": STAMP
    + rf"Init torch distributed (?:begin\.|ends\. elapsed={NUMBER} s, mem usage={NUMBER} GB)$",
    "weights begin": STAMP + rf"Load weight begin\. avail mem={NUMBER} GB$",
    "weights end": STAMP + rf"Load weight end\. elapsed={NUMBER} s, type=\w+, avail mem={NUMBER} GB, "
    rf"mem usage={NUMBER} GB\.$",
    "kv dtype": STAMP + r"Using KV cache dtype: torch\.bfloat16$",
    "kv": STAMP + rf"KV Cache is allocated\. #tokens: \d+, K size: {NUMBER} GB, V size: {NUMBER} GB$",
    "pool": STAMP + rf"Memory pool end\. avail mem={NUMBER} GB$",
    "graph begin": STAMP + r"Capture cuda graph begin\. This can take up to several minutes\. "
    rf"avail mem={NUMBER} GB$",
    "graph bs": STAMP + r"Capture cuda graph bs \[\d+(?:, \d+)*\]$",
    "graph end": STAMP + rf"Capture cuda graph end\. Time elapsed: {NUMBER} s\. mem usage={NUMBER} GB\. "
    rf"avail mem={NUMBER} GB\.$",
    "drafter": STAMP + r"Initialized DFLASH draft runner\. attention_backend=\w+, model=\w+, block_size=\d+, "
    r"draft_window_size=None, compact_cache=False$",
    "capacity": STAMP + r"max_total_num_tokens=\d+, chunked_prefill_size=\d+, max_prefill_tokens=\d+, "
    rf"max_running_requests=\d+, context_len=\d+, available_(?:gpu|cpu)_mem={NUMBER} GB$",
    "uvicorn": STAMP + r"INFO:     (?:Started server process \[\d+\]|Waiting for application startup\.|"
    r"Application startup complete\.|Uvicorn running on http://[\d.]+:\d+ \(Press CTRL\+C to quit\))$",
    "access": STAMP + r'INFO:     [\d.]+:\d+ - "(?:GET|POST) /\S* HTTP/1\.1" \d{3} [A-Z][A-Za-z ]+$',
    "verify": STAMP + r"DFLASH verify completed\. num_accepted_drafts_per_req=\[\d+(?:, \d+)*\]$",
    "ready": STAMP + r"The server is fired up and ready to roll!$",
    "prefill": STAMP
    + rf"Prefill batch, #new-seq: \d+, #new-token: \d+, #cached-token: \d+, token usage: {NUMBER}, "
    r"#running-req: \d+, #queue-req: \d+, #pending-token: \d+, cuda graph: (?:True|False), "
    rf"input throughput \(token/s\): {NUMBER}$",
    "decode": STAMP + rf"Decode batch, #running-req: \d+, #token: \d+, token usage: {NUMBER}, "
    rf"accept len: {NUMBER}, accept rate: {NUMBER}, cuda graph: (?:True|False), "
    rf"gen throughput \(token/s\): {NUMBER}, #queue-req: \d+$",
    "refused": STAMP + r"\[http_server\] Error: The input \(\d+ tokens\) is longer than .*\.$",
    "running requests": STAMP + r"Max running requests is reset to 48 for speculative decoding\. .*\.$",
    "overlap": STAMP + r"Overlap scheduler is disabled when using \w+ speculative decoding .*\.$",
    "deprecated": STAMP + r"Endpoint '/get_\w+' is deprecated and will be removed in a future version\. "
    r"Please use '/\w+' instead\.$",
}
OWN = re.compile(
    STAMP + r"(?:server_args=ServerArgs\(model_path='.*\)|ddtree-ops lab engine \d+: a stand-in .*)$"
)


def lines_of(text: str) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_log_lines_have_the_recorded_formats(dflash: Contract) -> None:
    if dflash.engine is None:
        pytest.skip("a real server: its log is not at hand")
    dflash.send("POST", GENERATE, generate(tokens=400))
    dflash.send("POST", GENERATE, generate(LONG))
    dflash.send("GET", "/get_server_info", None)
    recorded = lines_of((DATA / "responses" / "log-lines.txt").read_text())
    written = lines_of(dflash.engine.log) + lines_of(dflash.engine.access_log)
    strange = [line for line in written if not any(re.match(pattern, line) for pattern in KINDS.values())]
    strange = [line for line in strange if "_server] Error: " not in line and not OWN.match(line)]
    assert strange == []
    for name, pattern in KINDS.items():
        assert any(re.match(pattern, line) for line in recorded), f"no recorded line of kind {name}"
        assert any(re.match(pattern, line) for line in written), f"no line of the engine of kind {name}"


def test_cached_tokens_are_reported(plain: Contract) -> None:
    plain.send("POST", "/flush_cache", {})
    said = [plain.send("POST", CHAT, chat(max_tokens=4)).json()["usage"] for _ in range(2)]
    assert said[0]["prompt_tokens_details"] is None
    assert said[1]["prompt_tokens_details"] == {"cached_tokens": said[1]["prompt_tokens"] - 1}


def test_logprobs_rank_the_tokens_that_were_made(plain: Contract) -> None:
    body = {
        **EXCHANGES["generate_logprob_top"][2],
        "sampling_params": {"temperature": 0, "max_new_tokens": 24},
    }
    answer = plain.send("POST", GENERATE, body).json()
    meta = answer["meta_info"]
    best = meta["output_top_logprobs"]
    assert [token[1] for token in meta["output_token_logprobs"]] == answer["output_ids"]
    assert [pair[0] for pair in best] == meta["output_token_logprobs"]
    assert all(0 > first[0] > second[0] and first[1] != second[1] for first, second in best)
    assert meta["input_token_logprobs"][0][0] is None
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["cached_tokens"] == 0
    assert (
        len(meta["output_token_logprobs"])
        == meta["output_token_logprobs_length"]
        == meta["completion_tokens"]
    )


def test_it_says_what_it_is(plain: Contract) -> None:
    if plain.engine is None:
        pytest.skip("a real server")
    notice = "a stand-in for sglang; no model, no GPU"
    assert notice in plain.engine.log.splitlines()[0]
    answer = plain.send("GET", "/server_info", None)
    assert notice in answer.headers["x-lab-engine"]
    assert notice in answer.json()["lab_engine"]
