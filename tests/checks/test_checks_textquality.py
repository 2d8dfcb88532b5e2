"""Golden cases: what passes for text and what does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.checks.textquality import judge_text

CASES = Path(__file__).parent / "cases" / "text"


@pytest.mark.parametrize("path", sorted(CASES.glob("*.yaml")), ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case = yaml.safe_load(path.read_text("utf-8"))
    expected = case.pop("reason")
    found = judge_text(case.pop("text"), **case)
    if expected is None:
        assert found.reason is None, found
    else:
        assert found.reason is not None
        assert re.search(expected, found.reason), found
        assert not found.ok


@given(st.none() | st.text(max_size=300), st.integers(0, 200), st.booleans())
def test_judges_anything(text: str | None, tokens: int, loops: bool) -> None:
    found = judge_text(text, completion_tokens=tokens, loops=loops)
    assert found.figures["chars"] == len(text or "")
    assert "\n" not in (found.reason or "")


@given(st.text(alphabet="abcdefgh ,", min_size=1, max_size=12), st.integers(20, 60))
def test_whatever_is_repeated_often_is_a_loop(piece: str, times: int) -> None:
    if piece.strip():
        assert not judge_text(piece * times).ok
