"""Judgements of the validation checks, by table: what was measured, the verdict, words of the summary."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ddtree_ops.checks.engine import Chat, Generation, Load, Streamed
from ddtree_ops.checks.validation import judging
from ddtree_ops.checks.validation.judging import Hit, Judgement, Paced, Refusal
from ddtree_ops.checks.validation.standing import own_doing
from ddtree_ops.results import Verdict

PASS, FAIL, UNKNOWN, SKIPPED = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.SKIPPED
SANE = "The tides follow the moon: the water rises twice a day and falls twice a day."


def chat(content: str | None = SANE, *, tokens: int = 16, reason: str = "length", **more: Any) -> Chat:
    fields = {"reasoning": None, "prompt_tokens": 10, "seconds": 0.1, **more}
    return Chat("m", content, finish_reason=reason, completion_tokens=tokens, **fields)


def generation(text: str = SANE, *, cached: int = 0, tokens: int = 16, **more: Any) -> Generation:
    fields = {"finish_reason": "length", "prompt_tokens": 100, "output_ids": tuple(range(tokens)), **more}
    return Generation(text, completion_tokens=tokens, seconds=0.1, cached_tokens=cached, **fields)


def streamed(content: str = SANE, **more: Any) -> Streamed:
    fields: dict[str, Any] = {
        "deltas": (content[:9], content[9:]),
        "reasoning": "",
        "finish_reason": "length",
        "prompt_tokens": 10,
        "completion_tokens": 16,
        "seconds": 0.1,
        "first_s": 0.01,
        "done": True,
    }
    return Streamed(content=content, **{**fields, **more})


def expect(found: Judgement, verdict: Verdict, words: str) -> None:
    assert (found.verdict, words in found.summary) == (verdict, True), found


@pytest.mark.parametrize(
    ("answer", "quality", "verdict", "words"),
    [
        (chat(), True, PASS, "16 tokens (length)"),
        (chat("Yes.", tokens=2, reason="stop"), True, PASS, "2 tokens (stop)"),
        (chat(tokens=15), True, FAIL, "15 tokens came with finish_reason length, 16 were asked for"),
        (chat(tokens=17), True, FAIL, "at most 16"),
        (chat(tokens=17, reason="stop"), True, FAIL, "at most 16"),
        (chat(tokens=0, reason="stop"), True, FAIL, "no token"),
        (chat(reason="abort"), True, FAIL, "'abort'"),
        (chat("!" * 40), True, FAIL, "not sane"),
        (chat("!" * 40), False, PASS, "16 tokens"),
        (chat(None), True, FAIL, "no content although 16 tokens"),
        (chat(None), False, FAIL, "null content although 16 tokens"),
        (chat(None, reasoning=SANE), True, PASS, "16 tokens"),
    ],
)
def test_a_chat(answer: Chat, quality: bool, verdict: Verdict, words: str) -> None:
    expect(judging.judge_chat(answer, max_tokens=16, quality=quality), verdict, words)


LOOP = "and then the cat sat on the mat, " * 20


@pytest.mark.parametrize(
    ("texts", "quality", "verdict", "words"),
    [
        ([SANE, "def f(x):\n    return x + 1\n"], True, PASS, "2 answers, all read as text"),
        ([SANE, LOOP], True, FAIL, "1 of 2 answers garbage: b: a loop"),
        ([SANE, "abc \ufffd\ufffd\ufffd def ghi"], True, FAIL, "U+FFFD"),
        ([SANE, LOOP], False, PASS, "its sense was not judged"),
        ([SANE, None], False, FAIL, "null content"),
        ([], True, UNKNOWN, "nothing was asked"),
    ],
)
def test_garbage(texts: list[str | None], quality: bool, verdict: Verdict, words: str) -> None:
    named = [(name, chat(text)) for name, text in zip("ab", texts, strict=False)]
    expect(judging.judge_answers(named, quality=quality), verdict, words)


OTHER_LATE = SANE[:40] + "sea goes up and down with it."
OTHER_EARLY = "A ship" + SANE[6:]


OTHER_AT_12 = SANE[:12] + "ow the sun."
assert judging.difference(SANE, OTHER_AT_12) == 12


def hit(warm: str = SANE, third: str | None = None, again: str | None = None) -> Hit:
    """The first answer is SANE, the second ``warm``, the third ``third``; asked anew: ``again`` from the cache."""
    anew = None if again is None else Hit("a", chat(SANE), chat(again), chat(again))
    return Hit("a", chat(SANE), chat(warm), chat(warm if third is None else third), anew)


@pytest.mark.parametrize(
    ("cached", "hits", "verdict", "words"),
    [
        (
            (0, 99),
            [hit(), hit(), hit()],
            PASS,
            "99 of 100 tokens from the cache, the same answers to 3 prompts",
        ),
        ((4, 96), [hit()], PASS, "96 of 100"),
        ((0, 0), [hit()], FAIL, "prefix caching does not work"),
        ((4, 4), [hit()], FAIL, "prefix caching does not work"),
        ((99, 99), [hit()], UNKNOWN, "it was not new"),
        ((0, 99), [], UNKNOWN, "no answers were compared"),
        (
            (0, 99),
            [hit(OTHER_EARLY, again=SANE), hit(), hit()],
            PASS,
            "2 of 3 prompts; once another answer from character 0",
        ),
        ((0, 99), [hit(OTHER_EARLY, again=OTHER_LATE), hit(), hit()], PASS, "not when asked anew"),
        ((0, 99), [hit(OTHER_EARLY, again=OTHER_EARLY), hit(), hit()], FAIL, "from character 0 on (a): "),
        ((0, 99), [hit(OTHER_AT_12, again=OTHER_AT_12), hit(), hit()], FAIL, "from character 12 on"),
        ((0, 99), [hit(), hit(SANE, OTHER_EARLY, again=OTHER_EARLY), hit()], FAIL, "parts early again"),
        ((0, 99), [hit(OTHER_EARLY, again=SANE)] * 2 + [hit()], FAIL, "2 of 3 prompts part so early"),
        ((0, 99), [hit(OTHER_LATE), hit(), hit()], PASS, "once another answer from character 40 on"),
        ((0, 99), [hit(OTHER_LATE)] * 2 + [hit()], UNKNOWN, "2 of 3 prompts are answered otherwise"),
        (
            (0, 99),
            [hit("!" * 40), hit(), hit()],
            FAIL,
            "the second answer (a) is not sane, though the first was",
        ),
        ((0, 99), [hit(SANE, "!" * 40), hit(), hit()], FAIL, "the third answer (a) is not sane"),
        ((0, 99), [hit(OTHER_EARLY, again="!" * 40), hit(), hit()], FAIL, "not sane"),
    ],
)
def test_a_prefix_hit(cached: tuple[int, int], hits: list[Hit], verdict: Verdict, words: str) -> None:
    cold, warm = (generation(cached=tokens) for tokens in cached)
    expect(judging.judge_prefix(cold, warm, hits, quality=True), verdict, words)


def test_a_cached_generation_that_is_garbage() -> None:
    found = judging.judge_prefix(generation(), generation("!" * 40, cached=99), [hit()], quality=True)
    expect(
        found,
        FAIL,
        "99 of 100 tokens from the cache, and the second answer is not sane, though the first was",
    )
    assert found.nonsense


def test_garbage_without_the_cache_is_not_laid_to_the_cache() -> None:
    bad = generation("!" * 40), generation("!" * 40, cached=99)
    expect(
        judging.judge_prefix(*bad, [hit()], quality=True), FAIL, "the first answer, without the cache, is not"
    )
    chats = Hit("a", chat("!" * 40), chat("!" * 40), chat("!" * 40))
    found = judging.judge_prefix(generation(), generation(cached=99), [chats], quality=True)
    expect(found, FAIL, "the first answer (a), without the cache, is not sane")


@pytest.mark.parametrize(
    ("before", "warm", "after", "again", "verdict", "words"),
    [
        ((SANE, 0), (SANE, 99), (SANE, 0), (SANE, 0), PASS, "none after it, the same answer"),
        (
            (SANE, 0),
            (SANE, 99),
            (SANE, 99),
            (SANE, 99),
            FAIL,
            "99 of 100 tokens came from the cache after it",
        ),
        ((SANE, 0), (SANE, 99), (SANE, 0), (SANE, 99), FAIL, "came from the cache after it"),
        ((SANE, 0), (SANE, 0), (SANE, 0), (SANE, 0), UNKNOWN, "nothing was in the cache"),
        ((SANE, 0), (SANE, 99), (OTHER_LATE, 0), (OTHER_LATE, 0), FAIL, "answered otherwise after a flush"),
        ((SANE, 0), (SANE, 99), (OTHER_LATE, 0), (SANE, 0), UNKNOWN, "does not repeat itself"),
    ],
)
def test_a_flush(before: Any, warm: Any, after: Any, again: Any, verdict: Verdict, words: str) -> None:
    answers = [generation(text, cached=cached) for text, cached in (before, warm, after, again)]
    expect(judging.judge_flush("Cache flushed.\nMore.", *answers), verdict, words)


@pytest.mark.parametrize(
    ("answers", "alone", "verdict", "words"),
    [
        ([chat(), chat()], [SANE], PASS, "2 at once, all answered"),
        ([chat(), chat()], [OTHER_LATE, None], PASS, "1 of 1 other than alone"),
        ([chat(), chat()], [LOOP, SANE], FAIL, "request 1 was given the answer of request 2"),
        ([chat(), "500: no"], [SANE], FAIL, "1 were not answered: 500: no"),
        ([chat()], [], FAIL, "1 answers came"),
        ([chat(), chat("!" * 40)], [], FAIL, "answer 2: the text is not sane"),
        ([chat(), chat(tokens=3)], [], FAIL, "answer 2: 3 tokens came"),
    ],
)
def test_a_burst(answers: Any, alone: Any, verdict: Verdict, words: str) -> None:
    expect(judging.judge_burst(2, answers, alone, max_tokens=16, quality=True), verdict, words)


@pytest.mark.parametrize(
    ("of_chat", "of_generate", "verdict", "words"),
    [
        (chat(tokens=2), generation(tokens=2), PASS, "exactly 2 tokens"),
        (chat(tokens=3), generation(tokens=2), FAIL, "max_tokens 2: chat made 3 tokens"),
        (chat(tokens=2), generation(tokens=1), FAIL, "/generate made 1 token"),
        (chat(tokens=2, reason="stop"), generation(tokens=2), FAIL, "finish_reason 'stop', not length"),
        (chat(tokens=2), generation(tokens=2, output_ids=(1, 2, 3)), FAIL, "returned 3 token ids"),
    ],
)
def test_a_short_limit(of_chat: Chat, of_generate: Generation, verdict: Verdict, words: str) -> None:
    expect(judging.judge_limit(2, of_chat, of_generate), verdict, words)


@pytest.mark.parametrize(
    ("stream", "after", "verdict", "words"),
    [
        (streamed(), SANE, PASS, "16 tokens in 2 pieces, equal"),
        (streamed(OTHER_LATE), OTHER_LATE, PASS, "equal"),
        (streamed(OTHER_LATE), SANE, FAIL, "the stream differs from character 40 on"),
        (streamed(SANE + "x"), OTHER_LATE, UNKNOWN, "does not repeat itself"),
        (streamed(OTHER_EARLY), OTHER_LATE, FAIL, "the stream differs from character 0 on"),
        (streamed(done=False), SANE, FAIL, "without [DONE]"),
        (streamed(finish_reason=None), SANE, FAIL, "without a finish_reason"),
        (streamed(finish_reason="stop"), SANE, FAIL, "'stop' streamed, 'length' whole"),
        (streamed(completion_tokens=None), SANE, FAIL, "no usage"),
        (streamed(completion_tokens=15), SANE, FAIL, "10 and 15 tokens streamed, 10 and 16 whole"),
        (streamed(prompt_tokens=9), SANE, FAIL, "9 and 16 tokens streamed"),
        (streamed("", deltas=()), SANE, FAIL, "no text"),
    ],
)
def test_a_stream(stream: Streamed, after: str, verdict: Verdict, words: str) -> None:
    expect(judging.judge_stream(chat(), stream, chat(after)), verdict, words)


def test_a_stream_in_one_piece_is_none() -> None:
    whole, one = chat(tokens=64), streamed(deltas=(SANE,), completion_tokens=64)
    expect(judging.judge_stream(whole, one, whole), UNKNOWN, "in one piece")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("abcdefghij", "fghi"),
        ("the the the the", "e th"),
        ("aaaaaaaa", None),
        ("abcab", "bcab"),
        ("abc", None),
        ("\ufffd" * 20, None),
    ],
)
def test_a_stop_string(text: str, found: str | None) -> None:
    word = judging.stop_string(text)
    assert word == found
    assert word is None or text.find(word) > 0


@pytest.mark.parametrize(
    ("text", "reason", "verdict", "words"),
    [
        (SANE[:31], "stop", PASS, "cut before 'water' after 31 characters"),
        (SANE[:36], "stop", FAIL, "stop string 'water' stands in the answer"),
        (SANE, "length", FAIL, "stands in the answer"),
        (SANE[:20], "stop", FAIL, "cut too early: 20 characters"),
        (SANE[:31], "length", FAIL, "finish_reason is 'length'"),
        ("A ship sails", "stop", FAIL, "the answer is another one"),
        ("The tides follow the sun.", "stop", UNKNOWN, "does not repeat itself"),
        ("The tides follow the sun, it is said.", "length", UNKNOWN, "never came to the stop string"),
    ],
)
def test_a_stop(text: str, reason: str, verdict: Verdict, words: str) -> None:
    assert SANE.find("water") == 31
    expect(judging.judge_stop(SANE, "water", chat(text, reason=reason)), verdict, words)


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (chat(tokens=9, reason="stop"), PASS, "ended by itself after 9 tokens"),
        (chat(tokens=16), FAIL, "went on for 16 tokens"),
        (chat(tokens=16, reason="stop"), FAIL, "stop after 16 of 16"),
        (chat("", reasoning=SANE), UNKNOWN, "still reasoning"),
        (chat("<think>\n" + SANE), UNKNOWN, "still reasoning after 16 tokens"),
        (chat("<think>\nHm.\n</think>\n\n" + SANE), FAIL, "went on for 16 tokens"),
        (chat("<think>\n" + LOOP), FAIL, "went on for 16 tokens"),
    ],
)
def test_an_end(answer: Chat, verdict: Verdict, words: str) -> None:
    expect(judging.judge_end(answer, max_tokens=16), verdict, words)


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (chat(f"```\n{SANE}\n```"), PASS, "verbatim"),
        (chat(SANE.replace("twice", "twise"), reason="stop"), FAIL, "not verbatim from character 46 on"),
        (chat("I cannot do that.", reason="stop"), FAIL, "not verbatim from character 0 on"),
        (chat("Let me see what is to be repeated: "), UNKNOWN, "not at its end after 16 tokens"),
        (chat("<think>\nThe user wants " + SANE), UNKNOWN, "still reasoning after 16 tokens"),
        (chat(f"<think>{SANE}</think>No.", reason="stop"), FAIL, "not verbatim from character 0 on"),
        (chat(f"Thoughts.</think>\n\n{SANE}", reason="stop"), PASS, "verbatim"),
        (chat(None, reasoning=SANE, reason="stop"), PASS, "verbatim"),
        (chat("!" * 40), FAIL, "not verbatim"),
        (chat(None), FAIL, "not verbatim"),
        (chat(None, reasoning="Let me think"), UNKNOWN, "still reasoning"),
    ],
)
def test_a_copy(answer: Chat, verdict: Verdict, words: str) -> None:
    expect(judging.judge_copy(SANE, answer), verdict, words)


@pytest.mark.parametrize(
    ("said", "right", "verdict", "words"),
    [
        ("391", 391, PASS, "1 task, all right"),
        ("17 * 23 is **391**.", 391, PASS, "all right"),
        ("1,245", 1245, PASS, "all right"),
        ("-3", -3, PASS, "all right"),
        ("\u22123", -3, PASS, "all right"),
        ("391 (17 × 23)", 391, PASS, "all right"),
        ("391.0", 391, PASS, "all right"),
        ("**391**\n\nThe last step: **17 × 3 = 51**", 391, PASS, "all right"),
        ("**Answer: 391** (17 × 23, 3 digits)", 391, PASS, "all right"),
        ("**391** is the product of **17** and **23**.", 391, PASS, "all right"),
        ("The product of **17** and **23** is 391.", 391, PASS, "all right"),
        ("17 × 23 = 391\n\nSteps:\n1. 17 × 20 = 340\n2. 17 × 3 = 51\n3. 340 + 51", 391, PASS, "all right"),
        ("17 × 20 = 340, and 17 × 3 = 51.\n**340** + **51** = 391", 391, PASS, "all right"),
        ("The answer is 391, as 17 × 20 = 340 and 17 × 3 = 51.", 391, PASS, "all right"),
        ("So it is $\\boxed{391}$, in 3 digits", 391, PASS, "all right"),
        ("<think>17 × 20 is 340, 17 × 3 is 51</think>391", 391, PASS, "all right"),
        ("401 (17 × 23)", 391, FAIL, "it said 23"),
        ("**Answer: 401** (17 × 23, 3 digits)", 391, FAIL, "it said 401"),
        ("401\n\nCheck: 17 × 20 + 17 × 3 = 391", 391, FAIL, "it said 401"),
        ("**17 × 23 = 401**, not 391", 391, FAIL, "it said 401"),
        ("17 × 20 = 340, then 391 - 51 more, so 340", 391, FAIL, "it said 340"),
        ("<think>391</think>401", 391, FAIL, "it said 401"),
        ("401", 391, FAIL, "17 * 23 = 391, and it said 401"),
        ("many", 391, FAIL, "it said 'many'"),
        (None, 391, FAIL, "it said ''"),
    ],
)
def test_arithmetic(said: str | None, right: int, verdict: Verdict, words: str) -> None:
    expect(judging.judge_arithmetic([("17 * 23", right, chat(said, reason="stop"))]), verdict, words)


def test_a_sum_that_is_cut_off_is_not_known_and_hides_no_wrong_one() -> None:
    cut = ("17 * 23", 391, chat("<think>\n17 times 23 is 17 times 3, 51, and"))
    expect(judging.judge_arithmetic([cut]), UNKNOWN, "still reasoning")
    expect(judging.judge_arithmetic([("17 * 23", 391, chat("17 * 3 is 51, and"))]), UNKNOWN, "not at its end")
    wrong = ("456 + 789", 1245, chat("1255", reason="stop"))
    expect(judging.judge_arithmetic([cut, wrong]), FAIL, "it said 1255")


def test_no_sum_at_all_is_no_pass() -> None:
    expect(judging.judge_arithmetic([]), UNKNOWN, "nothing was asked")


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (chat("It is 4711-BRAVO.", prompt_tokens=900), PASS, "found at 50% of 900 tokens"),
        (chat("It is 4711-BRAVO.", prompt_tokens=300), UNKNOWN, "500 tokens were wanted"),
        (chat("There is none.", prompt_tokens=900, reason="stop"), FAIL, "not found at 50% of 900 tokens"),
        (chat("<think>\nThe text names", prompt_tokens=900), UNKNOWN, "still reasoning"),
        (chat("", reasoning="Hm", prompt_tokens=900), UNKNOWN, "still reasoning"),
    ],
)
def test_a_needle(answer: Chat, verdict: Verdict, words: str) -> None:
    expect(judging.judge_needle("4711-BRAVO", answer, depth=0.5, least=500), verdict, words)


NO_LOGPROB = "DFLASH speculative decoding does not support return_logprob yet."
NO_GRAMMAR = "DFLASH speculative decoding does not support grammar-constrained decoding yet."
LOGPROBS = {"choices": [{"logprobs": {"content": [{"token": "a"}]}, "message": {"content": "x"}}]}
AS_JSON = {"choices": [{"logprobs": None, "message": {"content": '{"year": 1991}'}}]}
AS_TEXT = {"choices": [{"logprobs": None, "message": {"content": "1991"}}]}


def cut(content: str | None) -> dict[str, Any]:
    return {"choices": [{"logprobs": None, "message": {"content": content}, "finish_reason": "length"}]}


THOUGHT = {"choices": [{"message": {"content": '<think>{}</think>{"year": 1991}'}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("refusal", "algorithm", "backend", "verdict", "words"),
    [
        (Refusal("logprobs", 400, NO_LOGPROB), "DFLASH", "xgrammar", PASS, "refused with 400"),
        (Refusal("grammar", 400, NO_GRAMMAR), "DDTREE", "xgrammar", PASS, "refused with 400"),
        (Refusal("logprobs", 200, "", LOGPROBS), "DDTREE", "xgrammar", FAIL, "is it served wrongly?"),
        (Refusal("grammar", 500, "Internal"), "DDTREE", "xgrammar", FAIL, "answered with 500"),
        (Refusal("grammar", 400, NO_LOGPROB), "DDTREE", "xgrammar", FAIL, "in other words"),
        (Refusal("logprobs", 400, "no"), "DFLASH", "none", FAIL, "in other words"),
        (Refusal("logprobs", 200, "", LOGPROBS), None, "none", PASS, "logprobs served"),
        (Refusal("logprobs", 200, "", AS_JSON), None, "none", FAIL, "without log probabilities"),
        (Refusal("grammar", 200, "", AS_JSON), None, "xgrammar", PASS, "grammar served"),
        (Refusal("grammar", 200, "", AS_TEXT), None, "xgrammar", FAIL, "without JSON"),
        (Refusal("grammar", 200, "", None), None, "xgrammar", FAIL, "without JSON"),
        (
            Refusal("grammar", 200, "", cut('{"year":\n\n\n\n')),
            None,
            "xgrammar",
            UNKNOWN,
            "cut off before its JSON",
        ),
        (Refusal("grammar", 200, "", cut(None)), None, "xgrammar", UNKNOWN, "cut off"),
        (Refusal("grammar", 200, "", THOUGHT), None, "xgrammar", PASS, "grammar served"),
        (Refusal("logprobs", 200, "", cut("x")), None, "none", FAIL, "without log probabilities"),
        (Refusal("grammar", 200, "", cut("x")), "DDTREE", "xgrammar", FAIL, "is it served wrongly?"),
        (Refusal("grammar", 500, "boom"), None, "xgrammar", FAIL, "answered with 500 without speculation"),
        (Refusal("grammar", 400, "no backend"), None, "none", SKIPPED, "--grammar-backend none"),
        (Refusal("grammar", 200, "", AS_JSON), None, "none", FAIL, "no grammar backend"),
    ],
)
def test_refusals(
    refusal: Refusal, algorithm: str | None, backend: str, verdict: Verdict, words: str
) -> None:
    expect(judging.judge_refusal(refusal, algorithm=algorithm, grammar_backend=backend), verdict, words)


def call(name: str = "get_weather", arguments: str = '{"city": "Paris"}') -> tuple[dict[str, Any], ...]:
    return ({"function": {"name": name, "arguments": arguments}},)


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (chat(None, reason="tool_calls", tool_calls=call()), PASS, 'get_weather({"city": "Paris"})'),
        (chat('<tool>{"city": "Paris"}</tool>', reason="stop"), FAIL, "no tool was called"),
        (chat(None, reason="tool_calls", tool_calls=call("sing")), FAIL, "tool 'sing' was called"),
        (chat(None, reason="tool_calls", tool_calls=call(arguments="Paris")), FAIL, "not JSON"),
        (chat(None, reason="tool_calls", tool_calls=call(arguments="{}")), FAIL, "'city' is missing"),
        (chat(None, reason="stop", tool_calls=call()), FAIL, "finish_reason is 'stop'"),
        (chat("", reasoning="Hm"), UNKNOWN, "still reasoning"),
    ],
)
def test_a_tool(answer: Chat, verdict: Verdict, words: str) -> None:
    expect(judging.judge_tool(answer, name="get_weather", argument="city"), verdict, words)


IDLE, BUSY = Load(0, 0, 0), Load(1, 0, 120)


@pytest.mark.parametrize(
    ("before", "loads", "enough", "verdict", "words"),
    [
        ([IDLE], [BUSY, IDLE], True, PASS, "ended when its client hung up"),
        ([IDLE], [BUSY, IDLE], False, UNKNOWN, "may have ended by itself"),
        ([IDLE], [BUSY, BUSY], True, FAIL, "1 request still ran 5 s after"),
        ([], [BUSY, BUSY], True, FAIL, "still ran"),
        ([IDLE], [Load(0, 1, 0)], True, FAIL, "still ran"),
        ([IDLE], [Load(0, 2, 0)], True, UNKNOWN, "others come and go"),
        ([IDLE], [BUSY, Load(2, 0, 0), BUSY], True, UNKNOWN, "others come and go"),
        ([BUSY] * 3, [Load(2, 0, 0), BUSY], True, PASS, "1 of others ran on"),
        ([BUSY] * 3, [Load(1, 1, 0)] * 3, True, FAIL, "besides 1 of others"),
        ([IDLE, BUSY], [Load(2, 0, 0)] * 3, True, UNKNOWN, "others come and go"),
        ([IDLE, BUSY], [Load(2, 0, 0), BUSY], True, UNKNOWN, "ours is not told apart"),
        ([Load(3, 0, 0)] * 3, [BUSY], True, UNKNOWN, "ours is not told apart"),
        ([Load(3, 0, 0)] * 3, [BUSY, IDLE], True, PASS, "ended"),
        ([None], [None], True, UNKNOWN, "does not say"),
    ],
)
def test_an_abort(before: Any, loads: Any, enough: bool, verdict: Verdict, words: str) -> None:
    expect(judging.judge_abort(loads, before=before, enough=enough, patience=5), verdict, words)


LONG = "The input (2013 tokens) is longer than the model's context length (512 tokens)."


@pytest.mark.parametrize(
    ("status", "message", "verdict", "words"),
    [
        (400, LONG, PASS, "context length (512 tokens); 0.5.11 never takes it off its count"),
        (400, "no", FAIL, "in other words"),
        (200, "fine", FAIL, "longer than the context of 512 tokens was answered with 200"),
        (500, "Internal Server Error", FAIL, "answered with 500"),
    ],
)
def test_over_long(status: int, message: str, verdict: Verdict, words: str) -> None:
    expect(judging.judge_over_long(status, message, context=512), verdict, words)


@pytest.mark.parametrize(
    ("whole", "stream", "quality", "verdict", "words"),
    [
        ("né 東京 🚀", "né 東京 🚀", True, PASS, "verbatim, streamed and whole"),
        ("nÃ© æ±äº¬", "né 東京 🚀", True, FAIL, "not verbatim"),
        ("né 東京 🚀", "né \ufffd\ufffd京 🚀", True, FAIL, "the stream holds U+FFFD"),
        ("né \ufffd京 🚀 .", "né 東京 🚀", True, FAIL, "the answer holds U+FFFD"),
        ("né 東京 \ud83d", "né 東京 🚀", True, FAIL, "surrogate"),
        ("t8 t13", "t8 t13", False, PASS, "was not judged"),
    ],
)
def test_unicode(whole: str, stream: str, quality: bool, verdict: Verdict, words: str) -> None:
    ended = streamed(stream, finish_reason="stop")
    found = judging.judge_unicode("né 東京 🚀", chat(whole, reason="stop"), ended, quality=quality)
    expect(found, verdict, words)


def test_unicode_that_is_cut_off_is_not_known() -> None:
    text = "né 東京 🚀"
    thinking = chat("<think>\nI am to repeat")
    expect(judging.judge_unicode(text, thinking, streamed(text), quality=True), UNKNOWN, "still reasoning")
    found = judging.judge_unicode(text, chat(text), streamed("<think>\nI am to repeat"), quality=True)
    expect(found, UNKNOWN, "still reasoning after 16 tokens")


@pytest.mark.parametrize(
    ("rates", "health", "verdict", "words"),
    [
        ([100] * 9, [200, 200], PASS, "9 requests: 100 tokens/s at the beginning, 100 at the end"),
        ([100] * 3 + [80] * 3 + [70] * 3, [200], PASS, "70 at the end"),
        ([100] * 3 + [70] * 3 + [50] * 3, [200], FAIL, "it slows down"),
        ([10] + [100] * 4 + [10] + [100] * 3, [200], PASS, "9 requests"),
        ([100] * 9, [200, 503, 200], FAIL, "/health was not 200 in 1 of 3 looks (503)"),
        ([100] * 9, [200, None], FAIL, "(nothing)"),
        ([100] * 5, [200], UNKNOWN, "too few"),
        ([100] * 9, [], UNKNOWN, "never looked at"),
    ],
)
def test_a_pace(rates: list[int], health: Any, verdict: Verdict, words: str) -> None:
    paced = [Paced(float(at), 64 / rate, 64) for at, rate in enumerate(rates)]
    expect(judging.judge_pace(paced, health, least_share=0.6), verdict, words)


@pytest.mark.parametrize(
    ("loads", "verdict", "words"),
    [
        ([IDLE, IDLE, IDLE], FAIL, "it slows down"),
        ([None, None], FAIL, "it slows down"),
        ([IDLE, BUSY, IDLE], UNKNOWN, "others used it in 1 of 3 looks"),
        ([IDLE, Load(0, 1, 0)], UNKNOWN, "others used it in 1 of 2 looks"),
    ],
)
def test_others_slow_a_run_down(loads: Any, verdict: Verdict, words: str) -> None:
    paced = [Paced(float(at), 64 / rate, 64) for at, rate in enumerate([100] * 5 + [40] * 4)]
    expect(judging.judge_pace(paced, [200], least_share=0.6, loads=loads), verdict, words)
    fast = [Paced(float(at), 0.64, 64) for at in range(9)]
    assert judging.judge_pace(fast, [200], least_share=0.6, loads=loads).ok


def test_silence_is_hung_or_busy() -> None:
    assert "hung" in judging.judge_silence(answers=False, load=None)
    assert "1 running and 0 waiting: busy" in judging.judge_silence(answers=True, load=BUSY)
    assert "lost on its way" in judging.judge_silence(answers=True, load=IDLE)


@pytest.mark.parametrize(
    ("loads", "verdict", "words"),
    [
        ([BUSY, IDLE], PASS, "no KV token is held"),
        ([Load(0, 0, 40)], FAIL, "40 KV tokens held by no request: they leak"),
        ([BUSY], UNKNOWN, "1 running and 0 waiting"),
        ([Load(0, 2, 40)], UNKNOWN, "0 running and 2 waiting"),
        ([Load(0, 2, 0)], UNKNOWN, "0 running and 2 waiting"),
        ([None], UNKNOWN, "does not say what it holds"),
        ([], UNKNOWN, "does not say"),
    ],
)
def test_what_an_idle_engine_holds(loads: Any, verdict: Verdict, words: str) -> None:
    expect(judging.judge_idle(loads, patience=5), verdict, words)


@pytest.mark.parametrize(
    ("mib", "verdict", "words"),
    [
        ([100, 101, 102, 103], PASS, "100 MiB to 103 MiB"),
        ([100, 120, 140, 160], FAIL, "grew from 100 MiB to 160 MiB, more than 10 MiB"),
        ([100, 160, 160, 161], PASS, "in one step at the beginning"),
        ([100, 160], FAIL, "grew"),
        ([160, 100], PASS, "160 MiB to 100 MiB"),
        ([160, 100, 130, 165], PASS, "160 MiB to 165 MiB"),
        ([100], UNKNOWN, "not seen twice"),
    ],
)
def test_memory(mib: list[int], verdict: Verdict, words: str) -> None:
    expect(judging.judge_memory([each << 20 for each in mib], allowed=10 << 20), verdict, words)


XID = "NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("messages", "readable", "container", "verdict", "words"),
    [
        (["eth0: up"], True, False, PASS, "no Xid in 1 message"),
        ([], True, False, PASS, "no Xid in 0 messages"),
        (["eth0: up", XID, XID], True, False, FAIL, "Xid 79 on GPU PCI:0000:17:00 during the run, 2 in all"),
        ([XID], True, True, FAIL, "Xid 79"),
        ([XID.replace("79", "8", 1)], True, False, FAIL, "Xid 8 on GPU PCI"),
        ([XID.replace("79", "119", 1)], True, False, FAIL, "Xid 119 on GPU PCI"),
        ([], False, False, UNKNOWN, "no message of the kernel can be read"),
        ([], False, True, SKIPPED, "a container"),
    ],
)
def test_the_kernel(messages: Any, readable: bool, container: bool, verdict: Verdict, words: str) -> None:
    expect(judging.judge_kernel(messages, readable=readable, container=container), verdict, words)


def test_the_worst_of_several_judgements() -> None:
    good, bad = Judgement(PASS, "good"), Judgement(FAIL, "bad")
    unknown, skipped = Judgement(UNKNOWN, "unknown"), Judgement(SKIPPED, "skipped")
    assert judging.worst_of([good, unknown, bad], "all") == bad
    assert judging.worst_of([good, unknown], "all") == unknown
    assert judging.worst_of([good, skipped], "all") == Judgement(PASS, "all")
    assert judging.worst_of([], "all").verdict is UNKNOWN
    assert judging.worst_of([skipped], "all").verdict is SKIPPED


def test_a_judgement_is_never_a_pass_without_data() -> None:
    assert not judging.judge_burst(8, [], [], max_tokens=1, quality=False).ok
    assert not judging.judge_pace([], [], least_share=0.5).ok
    assert not replace(judging.judge_memory([], allowed=1)).ok
    assert json.dumps(judging.judge_idle([], patience=1).summary)


@pytest.mark.parametrize(
    ("found", "asked", "said"),
    [
        (["req-unsupported"], ["chat", "refusals"], True),
        (["req-unsupported"], ["chat"], False),
        (["illegal-access"], ["refusals"], False),
    ],
)
def test_what_the_run_itself_provoked_is_told_as_that(found: list[str], asked: list[str], said: bool) -> None:
    assert bool(own_doing(found, asked)) is said
