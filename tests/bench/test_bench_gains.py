"""Speculation that gains nothing: a failure where it serves, a figure where it is only measured."""

from __future__ import annotations

import pytest

from ddtree_ops.checks.engine import Generation, ServerInfo
from ddtree_ops.checks.speculation import judge_speculation, summarise_decode
from ddtree_ops.inventory.models import Service, Speculative
from ddtree_ops.results import Verdict

SERVICE = Service(
    unit="s.service", runtime="r", venv="/v", model="/m", drafter="/d", speculative=Speculative(budget=32)
)


@pytest.mark.parametrize(
    ("length", "verdict", "text"),
    [
        ((13, 0), Verdict.PASS, "13 verify steps); it gains nothing, which is not judged here"),
        ((40, 40), Verdict.PASS, "accept length 2.00"),
        ((10, 71), Verdict.FAIL, "8.10 exceeds the block size 8"),
        ((None, None), Verdict.INCONCLUSIVE, "no accept length to be had"),
    ],
)
def test_useless_speculation_passes_where_it_is_only_measured_and_broken_does_not(length, verdict, text):
    found = judge_speculation(
        SERVICE,
        generation=Generation("text", "length", 128, 1.0, *length, None, None),
        decode=summarise_decode([]),
        info=ServerInfo("0.5.11", "DDTREE", None, None, None, {}),
        min_accept_length=None,
        must_gain=False,
    )
    assert (found.verdict, text in found.summary) == (verdict, True), found.summary


def test_a_server_without_the_speculation_that_is_measured_fails_all_the_same():
    found = judge_speculation(
        SERVICE,
        generation=None,
        decode=summarise_decode([]),
        info=ServerInfo("0.5.11", None, None, None, None, {}),
        min_accept_length=None,
        must_gain=False,
    )
    assert found.verdict is Verdict.FAIL
