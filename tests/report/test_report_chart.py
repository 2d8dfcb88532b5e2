"""Small charts as text: golden ones, and what holds for all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.report.chart import Curve, draw, nice_ceiling, number

WAVE = Curve([(i, 200 + 150 * math.sin(i / 9)) for i in range(120)], "16:10:33", "16:40:01")


def drawn(curve: Curve, **more: object) -> str:
    return "\n".join(draw(curve, **more))  # type: ignore[arg-type]


def test_a_wave() -> None:
    assert drawn(WAVE, width=50).splitlines() == [
        "    400 ┤   ▃▄▄▂               ▂▃▄▃▁",
        "        │▁▅██████▄          ▁▄▇█████▆▂          ▃▆",
        "        │██████████▅▂     ▁▅██████████▆▃      ▃▇██",
        "        │████████████▇▅▄▅▆███████████████▆▄▄▅█████",
        "      0 └─────────────────────────────────────────",
        "         16:10:33                         16:40:01",
    ]


def test_a_wave_in_ascii() -> None:
    chart = drawn(WAVE, width=50, plain=True)
    assert chart.isascii()
    assert chart.splitlines()[-1] == "         16:10:33                         16:40:01"
    assert chart.splitlines()[0].startswith("    400 +   ")


def test_time_in_which_nothing_was_measured_is_empty() -> None:
    points = [(float(i if i < 10 else i + 60), 30000.0) for i in range(20)]
    assert draw(Curve(points, "a", "b"), width=50, height=2) == [
        "    30k ┤███              ███",
        "        │███              ███",
        "      0 └────────────────────",
        "         a                  b",
    ]


def test_a_single_column_without_a_sample_is_no_gap() -> None:
    points = [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (3.95, 1.0), (5.0, 1.0), (6.0, 1.0), (7.0, 1.0), (8.0, 1.0)]
    bars = draw(Curve(points), height=1)[0]
    assert bars == "      1 ┤████████"


def test_few_points_are_wide_and_nothing_is_nothing() -> None:
    assert draw(Curve([(1.0, 2.5)], "16:10:33", "16:10:33"), height=2) == [
        "    2.5 ┤██████████████████",
        "        │██████████████████",
        "      0 └──────────────────",
        "         16:10:33  16:10:33",
    ]
    assert draw(Curve([])) == []
    assert draw(Curve([(0.0, math.nan)])) == []
    assert draw(Curve([(float(i), 0.0) for i in range(9)]), height=1) == ["      1 ┤", "      0 └" + "─" * 9]


def test_little_is_seen_beside_much() -> None:
    bars = draw(Curve([(float(i), 1000.0 if i == 5 else 0.1) for i in range(10)]), height=1)[0]
    assert bars == "   1000 ┤▁▁▁▁▁█▁▁▁▁"


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e12)), max_size=60).map(sorted),
    st.integers(20, 120),
    st.integers(1, 8),
    st.booleans(),
)
@settings(max_examples=150)
def test_any_series_fits(points: list[tuple[float, float]], width: int, height: int, plain: bool) -> None:
    lines = draw(Curve(points), width=width, height=height, plain=plain)
    assert len(lines) == (height + 1 if points else 0)
    assert all(len(line) <= max(width, 17) for line in lines)
    assert plain <= all(line.isascii() for line in lines)


@pytest.mark.parametrize(
    ("value", "top"),
    [(0, 1), (0.7, 0.8), (1, 1), (1.01, 1.5), (351, 400), (8.5, 10), (9999, 10000), (math.nan, 1)],
)
def test_the_top_of_the_axis(value: float, top: float) -> None:
    assert nice_ceiling(value) == pytest.approx(top)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2.5, "2.5"),
        (1.234, "1.23"),
        (303.14, "303"),
        (9999, "9999"),
        (12500, "12.5k"),
        (3.4e6, "3.4M"),
    ],
)
def test_figures(value: float, text: str) -> None:
    assert number(value) == text
