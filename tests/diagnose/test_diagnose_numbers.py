"""The meaning of numbers: the graph-size solver over a grid, and what is said where it does not apply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.diagnose import LogLine, ServiceFacts, diagnose
from ddtree_ops.diagnose.explain import (
    Reading,
    explain_sizes,
    graph_size_readings,
    joint_meanings,
    meanings,
    named_settings,
)
from ddtree_ops.errors import UsageError

BLOCKS = (2, 4, 5, 8, 12, 16)
BUDGETS = (7, 8, 15, 16, 31, 32, 33, 63, 64, 128)
BATCHES = (1, 2, 3, 4, 7, 8, 24, 48)


def message(a: int, b: int, dimension: int = 0) -> str:
    return (
        f"RuntimeError: The size of tensor a ({a}) must match the size of tensor b ({b}) "
        f"at non-singleton dimension {dimension}"
    )


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_grid_with_known_settings(block: int, budget: int) -> None:
    facts = ServiceFacts(block_size=block, budget=budget, algorithm="DDTREE", patched=False)
    for bs in BATCHES:
        a, b = bs * block, bs * (budget + 1)
        readings = graph_size_readings(a, b, block, budget)
        report = diagnose([LogLine(message(a, b), 1)], facts)
        if budget + 1 == block:
            assert readings == []
            assert report.root is None or report.root.signature == "unknown"
            continue
        assert readings == [Reading(bs, block, budget)]
        assert report.root is not None
        assert report.root.explanation == (
            f"{a} = {bs} x block_size {block}, {b} = {bs} x (budget {budget} + 1): the target-verify graph was sized "
            "for the draft; the deployed runner lacks patch 0001."
        )


@pytest.mark.parametrize("bs", BATCHES)
def test_grid_without_settings_holds_the_truth(bs: int) -> None:
    for block in BLOCKS:
        for budget in BUDGETS:
            if budget + 1 > block:
                assert Reading(bs, block, budget) in graph_size_readings(
                    bs * block, bs * (budget + 1), None, None
                )


@given(
    st.integers(-5, 10**6),
    st.integers(-5, 10**6),
    st.none() | st.integers(1, 70),
    st.none() | st.integers(1, 1100),
)
def test_every_reading_is_true(a: int, b: int, block: int | None, budget: int | None) -> None:
    for reading in graph_size_readings(a, b, block, budget):
        assert a == reading.bs * reading.block_size
        assert b == reading.bs * (reading.budget + 1)
        assert reading.budget + 1 > reading.block_size or None not in (block, budget)
        assert block in (None, reading.block_size)
        assert budget in (None, reading.budget)


@pytest.mark.parametrize(("a", "b"), [(33, 8), (8, 8), (0, 33), (32, 33), (8, 35), (16, 33), (4096, 4480)])
def test_other_numbers_do_not_fit(a: int, b: int) -> None:
    assert graph_size_readings(a, b, 8, 32) == []


def test_one_known_setting_binds() -> None:
    assert graph_size_readings(32, 132, 8, None) == [Reading(4, 8, 32)]
    assert graph_size_readings(32, 132, None, 65) == [Reading(2, 16, 65)]


def test_meanings() -> None:
    facts = ServiceFacts(block_size=8, budget=32, context_length=262144, tensor_parallel=8)
    assert meanings(33, facts)[0] == "(budget + 1) 33"
    assert meanings(4224, facts)[0] == "128 x (budget + 1) 33"
    assert "context length 262144 + 33" in meanings(262177, facts)
    assert meanings(35, facts) == []


def test_explain_sizes() -> None:
    facts = ServiceFacts(block_size=8, budget=32)
    text = explain_sizes(message(24, 35), facts)
    assert "24: 3 x block_size 8" in text
    assert "35: no known setting" in text
    assert explain_sizes("no sizes here", facts) == ""
    assert "Settings known: none" in explain_sizes(message(24, 35), ServiceFacts())


def test_other_algorithm_is_not_forced() -> None:
    report = diagnose([LogLine(message(8, 33), 1)], ServiceFacts(block_size=8, budget=32, algorithm="DFLASH"))
    assert report.root is None or report.root.signature == "unknown"


FACTS = ServiceFacts.given(
    ["block_size=8", "budget=32", "tp=8", "context=262144", "hidden=7168", "vocab=163840"]
)


@pytest.mark.parametrize(
    ("number", "readings"),
    [
        (8, ["block_size 8", "tensor_parallel 8"]),
        (33, ["(budget + 1) 33"]),
        (32, ["budget 32", "4 x block_size 8"]),
        (132, ["4 x (budget + 1) 33"]),
        (4224, ["128 x (budget + 1) 33"]),
        (20480, ["vocabulary 163840 / tensor_parallel 8"]),
        (43008, ["6 x hidden size 7168"]),
        (262177, ["context length 262144 + 33"]),
        (37, []),
    ],
)
def test_every_reading_of_a_number_best_first(number: int, readings: list[str]) -> None:
    assert meanings(number, FACTS) == readings


def test_a_number_with_several_readings() -> None:
    assert meanings(264, FACTS)[:3] == [
        "8 x (budget + 1) 33",
        "33 x block_size 8",
        "block_size 8 x (budget + 1) 33",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "Sizes must match. Expected size 32 but got size 132 for tensor number 1",
            "32 = 4 x block_size 8 and 132 = 4 x",
        ),
        (
            "Expected size 4480 but got size 2048",
            "No setting explains both sizes together. Candidates: 4480: no known",
        ),
        (
            "The expanded size of the tensor (8) must match the existing size (33)",
            "8 = 1 x block_size 8 and 33 = 1 x",
        ),
        (
            "shape '[4, 33]' is invalid for input of size 32",
            "holds 132: 32 = 4 x block_size 8 and 132 = 4 x (budget + 1) 33",
        ),
        (
            "shape '[-1, 8]' is invalid for input of size 33",
            "holds 8: 33 = 1 x (budget + 1) 33 and 8 = 1 x block_size 8",
        ),
        (
            "shape '[7, 5]' is invalid for input of size 33",
            "33 is no multiple of the 35 that this shape holds",
        ),
        ("shape '[2, 5]' is invalid for input of size 30", "30 = 3 x the 10"),
        ("mat1 and mat2 shapes cannot be multiplied (33x7168 and 43008x7168)", "43008: 6 x hidden size 7168"),
        (
            "mat1 and mat2 shapes cannot be multiplied (33x7168 and 43008x7168)",
            "The 33 rows: (budget + 1) 33",
        ),
        (
            "index 262145 is out of bounds for dimension 0 with size 262144",
            "2 beyond the last, 262143. 262144: context",
        ),
        ("index 7 is out of bounds for axis 0 with size 5", "No setting explains 5"),
    ],
)
def test_numbers_of_any_failure(text: str, said: str) -> None:
    assert said in explain_sizes(f"RuntimeError: {text}", FACTS)


@given(st.integers(-(10**13), 10**13), st.integers(-(10**13), 10**13))
def test_every_joint_reading_is_true(a: int, b: int) -> None:
    for one in (a, b):
        for reading in meanings(one, FACTS):
            assert one > 0, reading
    for reading in joint_meanings(a, b, FACTS):
        assert reading.startswith(f"{a} = ") and f"and {b} = " in reading


def test_numbers_without_any_setting_known() -> None:
    assert meanings(33, ServiceFacts()) == []
    assert joint_meanings(8, 33, ServiceFacts()) == []
    assert "Settings known: none" in explain_sizes(
        "shape '[3, 5]' is invalid for input of size 7", ServiceFacts()
    )


def test_facts_as_they_are_typed() -> None:
    facts = ServiceFacts.given(["--speculative-ddtree-budget=16", "tp=4", "patched=no", "gpu=sm120"])
    assert (facts.budget, facts.tensor_parallel, facts.patched, facts.gpu) == (16, 4, False, "sm120")
    assert ServiceFacts.given(["bs=24"], facts).budget == 16
    for wrong in ("tp", "tp=x", "nothing=1", "patched=perhaps"):
        with pytest.raises(UsageError):
            ServiceFacts.given([wrong])


def test_widths_come_from_a_models_configuration() -> None:
    config = {"model_type": "kimi", "text_config": {"hidden_size": 7168, "vocab_size": 163840}}
    facts = ServiceFacts().learn_config(config).learn_config({"hidden_size": 2048}, drafter=True)
    assert (facts.hidden_size, facts.vocab_size, facts.draft_hidden_size) == (7168, 163840, 2048)
    assert ServiceFacts().learn_config({"hidden_size": "wide", "text_config": None}).hidden_size is None


def test_settings_that_an_explanation_names() -> None:
    text = "8 = 1 x block_size 8, 33 = 1 x (budget 32 + 1)"
    assert named_settings(text) == ("speculative_num_draft_tokens", "speculative_ddtree_budget")
    assert named_settings("nothing of it, though my_budget") == ()
