"""The exchanges recorded from the real server, that the lab engine is held to, with a real server that runs DDTREE."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

__all__ = ["EXCHANGES", "contract", "hold_to_recording", "in_pieces"]

ROOT = Path(__file__).resolve().parents[3]


@cache
def contract() -> ModuleType:
    """The test of the lab engine against recorded answers of the real server: its requests and comparisons."""
    path = ROOT / "tests" / "lab" / "test_lab_engine_contract.py"
    spec = importlib.util.spec_from_file_location("lab_engine_contract", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unlike(recorded: Any, answered: Any) -> list[str]:
    """Where an answer differs from a recording in keys or types, but for the histogram, which DFLASH does not keep."""
    found = contract().differences(recorded, answered)
    return [line for line in found if not line.endswith(".spec_accept_histogram: not in the recording")]


WITH_DFLASH = {path.stem for path in (ROOT / "tests" / "data" / "responses_dflash").glob("*.headers")}
WITHOUT = {
    *(
        "health",
        "v1_models",
        "v1_models_one",
        "v1_models_unknown",
        "model_info",
        "completions",
        "completions_stream",
    ),
    *("chat_stream", "chat_unknown_model", "chat_over_long", "generate_over_long"),
}
EXCHANGES = sorted(WITH_DFLASH | WITHOUT)


def in_pieces(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """An answer; of a stream one of several events, if one of five is.

    A server whose HTTP process gets no processor for the moment of a step hands out two events as one, and then the first
    is the last.
    """
    for _ in range(5):
        answer = ask()
        streams = "event-stream" in answer.headers.get("content-type", "")
        if not streams or len(contract().events(answer.text)) > 1:
            break
    return answer


def hold_to_recording(url: str, name: str) -> None:
    """Ask the server at ``url``; its answer has the shape of the recording, or this fails.

    What was recorded from DFLASH holds for DDTREE, but for the name of the algorithm in its errors. Where the algorithm
    makes no difference the recording of a plain server is held to it.
    """
    kit = contract()
    recording = kit.DATA / ("responses_dflash" if name in WITH_DFLASH else "responses") / name
    status, headers = kit.head(recording)
    with httpx.Client(base_url=url, timeout=300, trust_env=False, verify=False) as client:
        if name == "server_info":
            # the recording is of a server that has written no decode line yet
            client.post("/flush_cache").raise_for_status()
        answer = in_pieces(lambda: kit.Contract(client, None).send(*kit.EXCHANGES[name]))
    text = next(recording.parent.glob(f"{name}.[jt][sx]*")).read_text()
    kind = headers.get("content-type", "")
    assert (answer.status_code, answer.headers.get("content-type", "")) == (status, kind), answer.text[:500]
    if name.startswith("metrics"):
        recorded, answered = kit.families(text), kit.families(answer.text)
        both = set(recorded) & set(answered)
        assert {"sglang:spec_accept_length", "sglang:spec_accept_rate", "sglang:gen_throughput"} <= both
        assert {family: answered[family] for family in both} == {family: recorded[family] for family in both}
    elif "event-stream" in kind:
        recorded_events, answered_events = kit.events(text), kit.events(answer.text)
        for index in (0, -1):
            wrong = unlike(recorded_events[index], answered_events[index])
            assert not wrong, (index, wrong, answered_events)
    elif kind == "application/json":
        wrong = unlike(json.loads(text), answer.json())
        assert not wrong, (wrong, answer.text)
        if status >= 400 and name != "chat_bad_json":
            assert "DFLASH" not in answer.text
            assert kit.wording(answer.text).replace("DDTREE", "DFLASH") == kit.wording(text)
    else:
        assert answer.text == text
