"""Every signature file, tested from what it says itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.diagnose.explain import SOLVERS, fill
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.library import DIRECTORY, Example, Library, Signature, Where, load_library
from ddtree_ops.errors import ConfigError

LIBRARY = load_library()
FIRST_TEN = {
    "capture-bs-empty",
    "ddtree-graph-size",
    "dflash-block-conflict",
    "dflash-dp-attn",
    "dflash-no-draft",
    "dflash-pp",
    "graph-logits-buffer",
    "mamba-track",
    "pagetable-ctx-overflow",
    "spec-hidden-mismatch",
}


def places(signature: Signature, example: Example) -> list[Where]:
    if example.where:
        return [example.where]
    return [where for where in signature.where if not example.frame or where == "traceback"]


@pytest.mark.parametrize("signature", LIBRARY.signatures, ids=lambda signature: signature.id)
def test_examples_match_and_lookalikes_do_not(signature: Signature) -> None:
    for example in signature.examples:
        for where in places(signature, example):
            match = LIBRARY.match(example.text, where, ServiceFacts(**example.facts), example.frames())
            assert match is not None, f"{where}: {example.text}"
            assert match.signature.id == signature.id, f"{where}: {example.text}"
            assert "{" not in match.explanation and "[[" not in match.explanation
            assert "unknown" not in match.explanation
    for example in signature.lookalikes:
        for where in places(signature, example):
            match = LIBRARY.match(example.text, where, ServiceFacts(**example.facts), example.frames())
            assert match is None or match.signature.id != signature.id, f"{where}: {example.text}"


def test_the_first_ten_are_there() -> None:
    assert {signature.id for signature in LIBRARY.signatures} >= FIRST_TEN
    assert len(list(DIRECTORY.glob("*.yaml"))) == len(LIBRARY.signatures)


@pytest.mark.parametrize("signature", LIBRARY.signatures, ids=lambda signature: signature.id)
def test_patterns_are_bounded(signature: Signature) -> None:
    """No unbounded repeat, and no repeat inside a repeat that is more than a small bound."""
    parser = __import__("re._parser", fromlist=["parse"])

    def walk(pattern: Any, inside: bool) -> None:
        for operation, argument in pattern:
            name = str(operation)
            if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
                _, high, item = argument
                assert high <= 2000, "an unbounded repeat"
                assert not (inside and high > 1), "a repeat inside a repeat"
                walk(item, inside or high > 1)
            elif name == "SUBPATTERN":
                walk(argument[3], inside)
            elif name == "BRANCH":
                for branch in argument[1]:
                    walk(branch, inside)
            elif name in ("ASSERT", "ASSERT_NOT"):
                walk(argument[1], inside)

    walk(parser.parse(signature.pattern), False)


@pytest.mark.parametrize("signature", LIBRARY.signatures, ids=lambda signature: signature.id)
def test_worst_case_text(signature: Signature) -> None:
    """Long texts that nearly match end; a pattern that explodes would never return."""
    for literal in signature.literal:
        for text in (f"{literal} " * 2000, literal * 4000, literal + "9" * 20000, literal + " (" * 9000):
            for where in signature.where:
                LIBRARY.match(text, where)


def test_fill() -> None:
    assert fill("a {x}[[ and {y}]].", {"x": 1}) == "a 1."
    assert fill("a {x}[[ and {y}]].", {"x": 1, "y": "{z}"}) == "a 1 and {z}."
    assert fill("a {x}", {}) == "a unknown"


def write(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(text)


GOOD = """
id: {id}
title: a test
pattern: 'oops (?P<n>\\d{{1,3}})'
literal: oops
where: log
severity: fatal
explanation: '{explanation}'
remedy: mend it
source: here
examples: [oops 1]
lookalikes: [oops]
"""


def test_a_users_own_directory(tmp_path: Path) -> None:
    write(tmp_path, "mine.yaml", GOOD.format(id="mine", explanation="{n} went wrong on {gpu}"))
    library = load_library(tmp_path)
    match = library.match("oops 7", "log", ServiceFacts(gpu="sm120"))
    assert match is not None
    assert match.explanation == "7 went wrong on sm120"
    assert library["ddtree-graph-size"].severity == "fatal"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("mine.yaml", GOOD.format(id="other", explanation="x"), "has the id other"),
        ("mine.yaml", GOOD.format(id="mine", explanation="{nope}"), "names nope"),
        (
            "mine.yaml",
            GOOD.format(id="mine", explanation="x").replace("(?P<n>", "(?P<n"),
            "not a regular expression",
        ),
        ("mine.yaml", GOOD.format(id="mine", explanation="x") + "solver: magic\n", "no solver 'magic'"),
        (
            "mine.yaml",
            GOOD.format(id="mine", explanation="x").replace("remedy: mend it\n", ""),
            "needs a remedy",
        ),
        (
            "mine.yaml",
            GOOD.format(id="mine", explanation="x").replace("severity: fatal", "severity: fatl"),
            "fatal",
        ),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, name: str, text: str, says: str) -> None:
    write(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        load_library(tmp_path)
    assert says in caught.value.render()


def test_priority_of_matches() -> None:
    """A signature that knows the frame goes before one that does not."""
    example = next(example for example in LIBRARY["graph-logits-buffer"].examples)
    match = LIBRARY.match(example.text, "traceback", None, example.frames())
    assert match is not None and match.signature.id == "graph-logits-buffer"
    assert Library([]).match(example.text, "traceback") is None


def test_every_solver_is_used() -> None:
    assert {signature.solver for signature in LIBRARY.signatures if signature.solver} == set(SOLVERS)


def test_every_literal_can_be_needed() -> None:
    """Each literal occurs in an example, else it only costs time."""
    for signature in LIBRARY.signatures:
        for literal in signature.literal:
            assert any(literal in example.text for example in signature.examples), (signature.id, literal)
        for example in signature.examples:
            assert re.search(signature.pattern, example.text), (signature.id, example.text)
