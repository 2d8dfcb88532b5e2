"""The real sglang server on a CPU running DDTREE, token for token against the same server without speculation.

Servers (``cpu/cpu_servers.py``): plain (the reference), DFLASH, and DDTREE with three drafters of which it is known
beforehand what they get right (``cpu/make_models.py``). The CPU has no CUDA graphs and no triton: attention is a
stand-in that honours the tree mask (``cpu/stubs``), and the kernel itself is tested by ``test_ddtree_kernel.py``;
scheduler, cache, drafter, tree, verification, tokenizer and HTTP are the real ones.

float32 and large margins: the target's two best logits are never as close as rounding, so texts must be equal.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from cpu_servers import BLOCK, BUDGET, CONTEXT, HTTP, KINDS, TOPK, Fleet, Kind, Server
from exchanges import EXCHANGES, contract, hold_to_recording, in_pieces

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed: make test-real", allow_module_level=True)

pytestmark = pytest.mark.real

SPOKEN = (8, 13, 21)
# a first token from the prefill, and then whole steps of an accepted block
PROMPTS, TOKENS = 56, 25
LOWER = "ddtree-lower"
TREES = [name for name, kind in KINDS.items() if kind.algorithm == "DDTREE"]


def prompts() -> list[list[int]]:
    """Prompts of 3 to 60 tokens; none holds the mask token or an end token."""
    rng = random.Random(11)
    return [[rng.randrange(3, 32) for _ in range(rng.randrange(3, 61))] for _ in range(PROMPTS)]


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
def reference(real_servers: Fleet) -> Reference:
    """The plain server's answers, by the target of every pair but ``top``: they differ in a row that no prompt uses."""
    server = real_servers.server("plain")
    outputs = server.outputs([(prompt, TOKENS) for prompt in prompts()])
    continued = server.outputs([(turn, TOKENS) for turn in continuations(outputs)])
    to_limit = server.generate(long_prompt(), 18)["output_ids"]
    real_servers.stop("plain")
    assert {token for output in outputs for token in output} == set(SPOKEN)
    assert len({tuple(output) for output in outputs}) > PROMPTS * 0.8, "the target hardly reads its context"
    return Reference(outputs, continued, to_limit)


@dataclass
class Running:
    """A server under test, what it is to say, and its answers to all prompts, four at a time."""

    kind: Kind
    server: Server
    expected: Reference
    answers: list[dict[str, Any]]


@pytest.fixture(scope="module", params=TREES)
def running(request: pytest.FixtureRequest, real_servers: Fleet) -> Iterator[Running]:
    kind = KINDS[request.param]
    if kind.pair == "top":
        said = [[SPOKEN[0]] * TOKENS]
        expected = Reference(said * PROMPTS, said * 12, said[0][:18])
    else:
        expected = request.getfixturevalue("reference")
    server = real_servers.server(request.param)
    answers = server.answers([(prompt, TOKENS) for prompt in prompts()])
    yield Running(kind, server, expected, answers)
    if request.param != LOWER:
        real_servers.stop(request.param)


def accept_length(answers: list[dict[str, Any]]) -> float:
    """Mean tokens a step over all steps of the answers; the first token of each comes from the prefill."""
    tokens = sum(answer["meta_info"]["completion_tokens"] - 1 for answer in answers)
    return float(tokens / sum(answer["meta_info"]["spec_verify_ct"] for answer in answers))


def test_the_text_is_that_of_plain_greedy_decoding(running: Running) -> None:
    """All prompts four at a time, and two of them alone."""
    assert [answer["output_ids"] for answer in running.answers] == running.expected.outputs
    alone = [running.server.generate(prompt, TOKENS)["output_ids"] for prompt in prompts()[:2]]
    assert alone == running.expected.outputs[:2]
    running.server.idle()


def test_as_much_is_accepted_as_the_drafter_deserves(running: Running) -> None:
    """The accept length is known beforehand, and never above the block size."""
    least, most = running.kind.accept
    assert least <= accept_length(running.answers) <= most
    for answer in running.answers:
        meta = answer["meta_info"]
        assert meta["spec_accepted_drafts"] <= meta["spec_verify_ct"] * (BLOCK - 1)
        assert meta["spec_accept_rate"] <= 1.0
        steps = meta["spec_accept_histogram"]
        assert sum(steps) == meta["spec_verify_ct"]
        assert sum(drafts * count for drafts, count in enumerate(steps)) == meta["spec_accepted_drafts"]


def test_where_a_lower_branch_is_right_the_tree_accepts_more_than_the_chain(
    real_servers: Fleet, reference: Reference
) -> None:
    """The same target, the same drafter, DFLASH: its chain begins with a token that is never said."""
    answers = real_servers.server("dflash-lower").answers([(prompt, TOKENS) for prompt in prompts()[:12]])
    real_servers.stop("dflash-lower")
    assert [answer["output_ids"] for answer in answers] == reference.outputs[:12]
    assert accept_length(answers) == KINDS["dflash-lower"].accept[1]
    assert KINDS["dflash-lower"].accept[1] * 2 < KINDS[LOWER].accept[0]


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
        sampling = {"max_new_tokens": 150, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": prompt, "stream": True, "sampling_params": sampling}
        with HTTP.stream("POST", f"{running.server.url}/generate", json=body) as reply:
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


def test_requests_were_taken_back_and_run_again(running: Running) -> None:
    """Of one kind the scheduler retracts running requests, and all other tests of its texts and slots hold as well."""
    taken = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", running.server.text())))
    assert (taken > 0) == running.kind.retract


def test_sampled_requests_run_beside_greedy_ones(running: Running) -> None:
    """A greedy request's text does not depend on sampled ones in its batch; sampled ones say what may be said."""
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


def test_the_server_says_what_it_runs(running: Running) -> None:
    info = running.server.get("/server_info")
    assert info["speculative_algorithm"] == "DDTREE"
    assert info["speculative_num_draft_tokens"] == BLOCK
    assert (info["speculative_ddtree_budget"], info["speculative_ddtree_topk_cap"]) == (BUDGET, TOPK)
    assert info["speculative_ddtree_budget_schedule"] == "fixed"
    log = running.server.text()
    assert f"verify tokens={BUDGET + 1}" in log
    assert "self-check=passed" in log
    assert "DDTREE metrics: " in log
    assert f"speculative_ddtree_budget={BUDGET}" in log


@pytest.fixture(scope="module")
def lower(real_servers: Fleet) -> Server:
    """DDTREE where a lower branch is right."""
    return real_servers.server(LOWER)


@pytest.mark.parametrize("name", EXCHANGES)
def test_answers_have_the_shape_that_the_lab_engine_is_held_to(lower: Server, name: str) -> None:
    """What was recorded from DFLASH holds for DDTREE, but for the name of the algorithm in its errors."""
    hold_to_recording(lower.url, name)


def test_a_stream_that_came_in_one_piece_is_asked_for_again() -> None:
    """Its only event is first and last, and has the keys of one of them."""
    kind = {"content-type": "text/event-stream"}
    pieces = [
        httpx.Response(200, headers=kind, text='data: {"n": 0}\n\n' * count + "data: [DONE]\n\n")
        for count in (1, 1, 2)
    ]
    left = iter(pieces)
    assert in_pieces(lambda: next(left)) is pieces[2]
    plain = httpx.Response(200, json={})
    assert in_pieces(lambda: plain) is plain


def test_ddtree_ops_reads_and_judges_the_server(lower: Server) -> None:
    """The smoke check's own reading of names, counts, server information and decode lines."""
    from ddtree_ops.checks.engine import EngineClient
    from ddtree_ops.checks.speculation import judge_speculation, summarise_decode
    from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Speculative, Target
    from ddtree_ops.results import Verdict

    service = Service(
        name="chat",
        unit="sglang-chat.service",
        venv="/opt/venv",
        model="/srv/models/tiny",
        runtime="sglang-0.5.11-ddtree",
        port=int(lower.url.rpartition(":")[2]),
        speculative=Speculative(budget=BUDGET, topk_cap=TOPK, block_size=BLOCK),
    )
    host = Host(name="here", address="127.0.0.1", http="direct")
    with EngineClient(None, Target(host=host, service=service, runtime=RuntimeSpec())) as engine:
        assert [model.name for model in engine.models()] == ["tiny"]
        answer = engine.generate("t5 t6 t7", max_tokens=97, timeout=300, ignore_eos=True)
        chat = engine.chat("tiny", "t5 t6 t7", max_tokens=24, timeout=300)
        info = engine.server_info()
    assert (info.version, info.speculative_algorithm) == ("0.5.11", "DDTREE")
    assert answer.completion_tokens == 97 and answer.text
    assert answer.proposed_drafts == (BLOCK - 1) * (answer.verify_steps or 0)
    assert (chat.completion_tokens, chat.finish_reason) == (24, "length")
    decode = summarise_decode(lower.text().splitlines())
    assert decode.lines > 0
    found = judge_speculation(
        service, generation=answer, decode=decode, info=info, min_accept_length=KINDS[LOWER].accept[0]
    )
    assert found.verdict is Verdict.PASS, found
    assert found.facts["accept_length"] <= BLOCK
    lines = [line for line in re.split(r"[\r\n]+", lower.text()) if "] Decode batch, " in line]
    assert [line for line in lines if not re.match(contract().KINDS["decode"], line)] == []
    lower.idle()


def test_all_refusals_come_at_once_and_before_anything_is_loaded(real_servers: Fleet) -> None:
    said = real_servers.said("refused")
    assert "DDTREE does not run with these arguments" in said
    assert "raise it to at least 3" in said
    assert "set --page-size 1" in said
    assert "Load weight begin" not in said


def test_a_hook_that_was_swallowed_starts_no_server(real_servers: Fleet) -> None:
    """Another plugin breaks a hook's target: sglang only logs that, the worker aborts."""
    said = real_servers.said("swallowed")
    assert "Failed to apply hooks" in said
    assert "DDTREE is not wholly installed in this sglang: no hook on " in said
    assert "ScheduleBatch.new_tokens_required_next_decode" in said


def test_the_models_are_as_the_tests_say(real_servers: Fleet) -> None:
    real_servers.server("plain")
    config = json.loads((real_servers.models / "lower-draft" / "config.json").read_text())
    assert config["block_size"] == BLOCK
    assert config["max_position_embeddings"] == CONTEXT
