"""Load an engine with chat requests and time the answers: runs on the host, by its own python (3.8 or newer).

Standard library only. The program that is sent is this file and a last line ``main(...)``; it prints one JSON document.
Each of ``concurrency`` threads sends the next request when its last was answered. Meant for lab hosts: Python threads
cannot load a fast engine with hundreds of requests.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from typing import Any

__all__ = ["load", "main", "one", "take"]


def one(given: dict[str, Any], prompt: str) -> dict[str, Any]:
    """One streamed chat: ``ttft`` and ``latency`` in seconds, ``tokens`` as the server counts, or ``error``."""
    found: dict[str, Any] = {"ttft": None, "latency": None, "tokens": None, "error": ""}
    body = {
        "model": given["model"],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": given["max_tokens"],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"content-type": "application/json"}
    if given.get("api_key"):
        headers["authorization"] = "Bearer " + given["api_key"]
    connection = http.client.HTTPConnection(given["host"], given["port"], timeout=given["timeout"])
    begun = time.perf_counter()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            found["error"] = f"{answer.status}: {answer.read(300).decode('utf-8', 'replace')}"
            return found
        ended = False
        for raw in answer:
            line = raw.strip()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                ended = True
                break
            take(found, json.loads(data), time.perf_counter() - begun)
        if not ended and not found["error"]:
            found["error"] = "the stream broke off"
        elif found["ttft"] is None and not found["error"]:
            found["error"] = "an answer without any text"
    except (OSError, http.client.HTTPException, ValueError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return found


def take(found: dict[str, Any], event: Any, at: float) -> None:
    """Take in one event of a stream, ``at`` seconds after the request was sent."""
    if event.get("error"):
        found["error"] = str(event["error"])[:300]
    usage = event.get("usage") or {}
    if "completion_tokens" in usage:
        found["tokens"] = usage["completion_tokens"]
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        if delta.get("content") or delta.get("reasoning_content"):
            if found["ttft"] is None:
                found["ttft"] = at
            found["latency"] = at


def load(given: dict[str, Any]) -> dict[str, Any]:
    """All requests of ``given["prompts"]``, in order, ``concurrency`` at a time."""
    prompts = given["prompts"]
    samples: list[dict[str, Any] | None] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(waiting, None)
            if number is None:
                return
            samples[number] = one(given, prompts[number])

    threads = [threading.Thread(target=work) for _ in range(min(given["concurrency"], len(prompts)))]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"seconds": time.perf_counter() - begun, "samples": samples}


def main(given: dict[str, Any]) -> None:
    """Print what came of it."""
    json.dump(load(given), sys.stdout)
