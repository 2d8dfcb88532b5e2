"""The meaning of numbers: the graph-size solver over a grid, and what is said where it does not apply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.diagnose import LogLine, ServiceFacts, diagnose
from ddtree_ops.diagnose.explain import Reading, explain_sizes, graph_size_readings, meanings

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
