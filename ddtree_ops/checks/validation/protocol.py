"""Checks of the interface: limits, streams, stop strings, refusals, tools, hanging up, inputs that are too long."""

from __future__ import annotations

import time
from typing import Annotated, Any

import httpx
from pydantic import Field

from ddtree_ops.checks.engine import Load, message_of
from ddtree_ops.checks.validation.asking import (
    NO_THOUGHTS,
    NONSENSE,
    answered,
    capacity,
    chat,
    excerpt,
    fitting,
    generate,
    named_prompt,
    prose,
    skipped,
    told,
)
from ddtree_ops.checks.validation.base import Context, NoSettings, Settings, check
from ddtree_ops.checks.validation.judging import (
    Judgement,
    Refusal,
    judge_abort,
    judge_end,
    judge_limit,
    judge_over_long,
    judge_refusal,
    judge_stop,
    judge_stream,
    judge_tool,
    stop_string,
    worst_of,
)
from ddtree_ops.results import CheckResult, Evidence, Verdict

__all__ = ["Abort", "Limits", "Stop", "Stream", "until_idle"]

_PATH = "/v1/chat/completions"
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "name of the city"}},
            "required": ["city"],
        },
    },
}
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]},
    },
}


class Limits(Settings):
    """``limits``: values of max_tokens."""

    limits: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(min_length=1)] = (1, 2, 3)


class Stream(Settings):
    """``max_tokens``: tokens asked for."""

    max_tokens: Annotated[int, Field(ge=2)] = 64


class Stop(Settings):
    """``max_tokens`` of the answer that is cut; ``end_tokens``: within so many a one-sentence answer must end."""

    max_tokens: Annotated[int, Field(ge=16)] = 64
    end_tokens: Annotated[int, Field(ge=16)] = 1024


class Abort(Settings):
    """``max_tokens`` of the request that is broken off; ``patience``: seconds until nothing may run any more."""

    max_tokens: Annotated[int, Field(ge=64)] = 16384
    patience: Annotated[float, Field(gt=0)] = 5.0


@check("short-limits", "a small max_tokens gives exactly that many tokens", settings=Limits)
def short_limits(ctx: Context, settings: Limits) -> CheckResult:
    """A verify step makes several tokens: what is beyond the limit must be cut."""
    judged, facts = [], {}
    prompt = named_prompt("count")
    for limit in settings.limits:
        answer = chat(ctx, prompt, max_tokens=limit, ignore_eos=True)
        raw = generate(ctx, prompt, max_tokens=limit, ignore_eos=True)
        judged.append(judge_limit(limit, answer, raw))
        facts[f"max_tokens_{limit}"] = [answer.completion_tokens, raw.completion_tokens]
    shown = ", ".join(str(limit) for limit in settings.limits)
    return told(ctx, worst_of(judged, f"exactly {shown} tokens, of chat and /generate"), facts=facts)


@check("stream", "a streamed answer is the same as one that is not", settings=Stream)
def stream(ctx: Context, settings: Stream) -> CheckResult:
    """The same chat whole, streamed, and whole again."""
    prompt, tokens = named_prompt("quicksort"), fitting(ctx, settings.max_tokens)
    whole = chat(ctx, prompt, max_tokens=tokens)
    streamed = ctx.engine.stream_chat(ctx.model.name, prompt, max_tokens=tokens, timeout=ctx.timeout)
    again = chat(ctx, prompt, max_tokens=tokens)
    facts = {
        "pieces": len(streamed.deltas),
        "completion_tokens": streamed.completion_tokens,
        "first_s": None if streamed.first_s is None else round(streamed.first_s, 3),
        "seconds": round(streamed.seconds, 3),
    }
    said = {f"POST {_PATH}": whole.text, f"POST {_PATH} (stream)": streamed.text}
    return told(ctx, judge_stream(whole, streamed, again), answers=said, facts=facts)


@check("stop", "a stop string cuts before it, and an answer ends by itself", settings=Stop)
def stop(ctx: Context, settings: Stop) -> CheckResult:
    """A stop string out of the answer itself, then a chat that must end by itself."""
    prompt = named_prompt("quicksort")
    free = chat(ctx, prompt, max_tokens=settings.max_tokens)
    said = {f"POST {_PATH}": free.text}
    judged = []
    first = free.reasoning or free.content or ""
    word = stop_string(first)
    if word is None:
        judged.append(
            Judgement(Verdict.INCONCLUSIVE, f"no stop string is to be had from {excerpt(free.text, 40)!r}")
        )
    else:
        cut = chat(ctx, prompt, max_tokens=settings.max_tokens, stop=[word])
        judged.append(judge_stop(first, word, cut))
        said[f"POST {_PATH} stop={word!r}"] = cut.text
    if ctx.quality:
        ended = answered(ctx, named_prompt("hello"), max_tokens=settings.end_tokens)
        judged.append(judge_end(ended.chat, max_tokens=ended.max_tokens))
        said[f"POST {_PATH}: one sentence"] = ended.chat.text
    return told(ctx, worst_of(judged, "; ".join(each.summary for each in judged)), answers=said)


@check(
    "refusals",
    "log probabilities and grammars are refused with 400 under DFLASH and DDTREE, and served without",
)
def refusals(ctx: Context, settings: NoSettings) -> CheckResult:
    """What speculation cannot serve must be refused in words, not answered wrongly."""
    algorithm, backend = ctx.speculative, ctx.info.raw.get("grammar_backend")
    if algorithm not in (None, "", "DFLASH", "DDTREE", "NONE"):
        return skipped(ctx, f"what {algorithm} refuses is not known here")
    algorithm = None if algorithm in (None, "", "NONE") else algorithm
    judged, evidence = [], []
    base = {"model": ctx.model.name, "temperature": 0, "max_tokens": fitting(ctx, 512)}
    base["messages"] = [{"role": "user", "content": "In which year was Python released? Answer in JSON."}]
    extra: dict[str, dict[str, Any]] = {
        "logprobs": {"logprobs": True, "top_logprobs": 2},
        "grammar": {"response_format": _SCHEMA},
    }
    for what, fields in extra.items():
        if what == "grammar" and algorithm is None and not ctx.quality and backend != "none":
            judged.append(Judgement(Verdict.SKIPPED, "grammar: not asked without --quality"))
            continue
        body: dict[str, Any] = {**base, **fields}
        response, found = _refused(ctx, what, body, algorithm, backend)
        if found.verdict is Verdict.INCONCLUSIVE:
            response, found = _refused(ctx, what, {**body, **NO_THOUGHTS}, algorithm, backend)
        judged.append(found)
        evidence.append(
            Evidence(f"http POST {_PATH} with {what}", excerpt(f"{response.status_code} {response.text}"))
        )
    found = worst_of(judged, "; ".join(each.summary for each in judged))
    return told(ctx, found, evidence=evidence, facts={"algorithm": algorithm})


def _refused(
    ctx: Context, what: str, body: dict[str, Any], algorithm: str | None, backend: Any
) -> tuple[httpx.Response, Judgement]:
    """One request that may have to be refused: the answer, and what it means."""
    response = ctx.engine.send("POST", _PATH, timeout=ctx.timeout, body=body)
    try:
        answer: Any = response.json()
    except ValueError:
        answer = None
    message = "" if response.is_success else message_of(response)
    refusal = Refusal(what, response.status_code, message, answer)
    return response, judge_refusal(refusal, algorithm=algorithm, grammar_backend=backend)


@check("tools", "a tool is called where the server parses tool calls", settings=Stream)
def tools(ctx: Context, settings: Stream) -> CheckResult:
    """One tool, and a question that asks for it."""
    parser = ctx.info.raw.get("tool_call_parser")
    if not parser:
        return skipped(ctx, "the server runs without --tool-call-parser")
    if not ctx.quality:
        return skipped(ctx, NONSENSE)
    question = "What is the weather in Paris now? Use the tool."
    answer = answered(ctx, question, max_tokens=max(512, settings.max_tokens), tools=[_TOOL]).chat
    found = judge_tool(answer, name="get_weather", argument="city")
    calls = "; ".join(str(call.get("function")) for call in answer.tool_calls)
    said = {f"POST {_PATH}": answer.text, f"POST {_PATH} tool_calls": calls}
    return told(ctx, found, answers=said, facts={"tool_call_parser": parser})


def until_idle(ctx: Context, patience: float, *, tokens: bool = False, others: int = 0) -> list[Load | None]:
    """What the engine held, looked at until it holds nothing or ``patience`` seconds are over.

    :param tokens: KV tokens count as well as requests.
    :param others: so many requests of others do not count.
    """
    until, pause, loads = time.monotonic() + patience, 0.05, []
    while True:
        load = ctx.engine.load(timeout=ctx.timeout)
        loads.append(load)
        if load is None:
            return loads
        if load.running + load.waiting <= others and not (tokens and load.used_tokens):
            return loads
        if time.monotonic() > until:
            return loads
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)


@check(
    "abort",
    "a request ends when its client hangs up, and the next one is answered",
    settings=Abort,
    disturbs=True,
)
def abort(ctx: Context, settings: Abort) -> CheckResult:
    """A long streamed request that is broken off after its first text."""
    first = chat(ctx, named_prompt("count"), max_tokens=32, ignore_eos=True)
    rate = first.completion_tokens / max(first.seconds, 1e-6)
    tokens = min(settings.max_tokens, capacity(ctx) - first.prompt_tokens - 64)
    if tokens < 64:
        return skipped(ctx, f"a context of {capacity(ctx)} tokens is too short for a request that lasts")
    before = until_idle(ctx, 1.0)[-3:]
    theirs = 0 if before[-1] is None else before[-1].running + before[-1].waiting
    broken = ctx.engine.break_off(
        ctx.model.name, named_prompt("long"), max_tokens=max(64, tokens - 128), timeout=ctx.timeout
    )
    begun = time.monotonic()
    loads = until_idle(ctx, settings.patience, others=theirs)
    waited = time.monotonic() - begun
    again = chat(ctx, named_prompt("count"), max_tokens=32, ignore_eos=True)
    enough = tokens / rate > 2 * waited + 1
    found = judge_abort(loads, before=before, enough=enough, patience=settings.patience)
    facts = {
        "asked_tokens": tokens,
        "idle_after_s": round(waited, 2),
        "pieces_before": len(broken.deltas),
        "requests_of_others": theirs,
    }
    said = {f"POST {_PATH} afterwards": again.text}
    return told(ctx, found, answers=said, facts=facts)


@check(
    "over-long",
    "an input longer than the context is refused with 400, and the next request answered",
    disturbs=True,
)
def over_long(ctx: Context, settings: NoSettings) -> CheckResult:
    """The refusal of sglang; in 0.5.11 it costs the ability to drain: see docs/validation.md."""
    context = ctx.model.max_model_len
    if context is None:
        return skipped(ctx, "the server does not say how long its context is")
    text = prose(context * 8)
    body = {
        "model": ctx.model.name,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 4,
    }
    response = ctx.engine.send("POST", _PATH, timeout=ctx.timeout, body=body)
    message = excerpt(response.text) if response.is_success else message_of(response)
    found = judge_over_long(response.status_code, message, context=context)
    chat(ctx, named_prompt("hello"), max_tokens=8)
    evidence = Evidence(f"http POST {_PATH}", f"{response.status_code} {message}")
    return told(ctx, found, evidence=(evidence,), facts={"context": context, "chars": len(text)})
