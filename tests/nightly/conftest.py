"""Targets, runs and histories as the tests of the nightly need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddtree_ops.results import CheckResult, Figure, Verdict
from ddtree_ops.runreport import RunReport, TargetReport


def a_figure(name: str, value: float | None, unit: str = "x", **labels: str) -> Figure:
    """A figure as a check measures it, of several samples."""
    return Figure(name, value, unit, "test", 9, labels=labels)


def a_target(*figures: Figure, check: str = "speed", **facts: Any) -> TargetReport:
    """What one run found on the one target of these tests."""
    known = {"flags": "f1", "release": "r1" * 8, "invocation": "i1", **facts}
    checks = (CheckResult(check, Verdict.PASS, "measured", figures=tuple(figures)),) if figures else ()
    return TargetReport("h", "h", "s", facts=known, checks=checks)


def a_run(number: int, target: TargetReport, **options: Any) -> RunReport:
    """The run of night ``number``."""
    return RunReport(
        "nightly",
        f"202611{number:02d}T010000Z-{number:04x}",
        f"2026-11-{number:02d}T01:00:00+00:00",
        f"2026-11-{number:02d}T01:10:00+00:00",
        complete=True,
        options=options,
        targets=(target,),
    )


@pytest.fixture
def figure() -> Callable[..., Figure]:
    """:func:`a_figure`."""
    return a_figure


@pytest.fixture
def target() -> Callable[..., TargetReport]:
    """:func:`a_target`."""
    return a_target


@pytest.fixture
def run() -> Callable[..., RunReport]:
    """:func:`a_run`."""
    return a_run
