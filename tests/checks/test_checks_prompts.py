"""Named prompts and free text."""

from __future__ import annotations

import pytest

from ddtree_ops.checks.prompts import load_prompts, resolve_prompt, unmet
from ddtree_ops.errors import UsageError


def test_the_default_prompt_is_the_known_one() -> None:
    prompt = resolve_prompt("quicksort")
    assert prompt.text == "Write quicksort in Python with comments."
    assert prompt.name == "quicksort"


def test_every_prompt_says_what_it_is_for() -> None:
    prompts = load_prompts()
    assert {"quicksort", "hello", "count", "json", "long"} <= set(prompts)
    assert all(prompt.description and prompt.text and prompt.name == name for name, prompt in prompts.items())


@pytest.mark.parametrize("text", ["Say hi to Bob", "quicksorted lists, please", "x", "Größe?"])
def test_free_text_is_passed_on_as_it_is(text: str) -> None:
    prompt = resolve_prompt(text)
    assert (prompt.name, prompt.text, prompt.expect) == ("", text, ())


@pytest.mark.parametrize(("word", "meant"), [("quicksrt", "quicksort"), ("helo", "hello"), ("JSN", "json")])
def test_a_misspelt_name_is_an_error_that_names_the_nearest(word: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_prompt(word)
    assert meant in caught.value.hint


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(UsageError, match="empty"):
        resolve_prompt("  ")


def test_expectations() -> None:
    prompt = resolve_prompt("chinese")
    assert unmet(prompt, "快速排序") == ()
    assert unmet(prompt, "quicksort") == prompt.expect
