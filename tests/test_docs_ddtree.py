"""docs/ddtree.md says what the plugin does: flags, refusals, variables, memory; samples elsewhere agree with each other."""

from __future__ import annotations

import ast
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from ddtree_ops.diagnose.library import load_library
from ddtree_ops.inventory.models import RuntimeSpec
from ddtree_ops.lint import facts_of, rules_tree
from ddtree_ops.runtime import build
from ddtree_sglang import check, flags, plugin

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/ddtree.md").read_text("utf-8")
SOURCES = {path.stem: path.read_text("utf-8") for path in (ROOT / "ddtree_sglang").glob("*.py")}
ELSEWHERE = {
    "attention-backend": "rule attention-backend",
    "disable-overlap-schedule": "set by sglang itself under DFLASH",
    "disaggregation-mode": "rule disaggregation",
    "enable-dp-attention": "rule dp-attention",
    "enable-mixed-chunk": "switched off by sglang itself under DFLASH; rule no-effect",
    "enable-two-batch-overlap": "rule two-batch-overlap",
    "page-size": "rule page-size",
    "pp-size": "rule pipeline-parallel",
    "speculative-ddtree-budget": "rule tree-size",
    "speculative-ddtree-budget-schedule": "a field of the inventory",
    "speculative-ddtree-topk-cap": "a field of the inventory",
    "speculative-dflash-block-size": "a field of the inventory",
    "speculative-draft-attention-backend": "named as what may stay",
    "tp-size": "named as what to use instead",
}
"""Flags in the texts of refusals that rule ``overlay-refuses`` leaves to others, or that are no flags to refuse."""


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def refused_flags() -> set[str]:
    """Every flag that a refusal about arguments names, without its dashes."""
    tree = ast.parse(SOURCES["check"])
    bodies = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in ("_flags", "_resolved")
    ]
    assert len(bodies) == 2
    texts = [
        part.value
        for body in bodies
        for part in ast.walk(body)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    switches = {name.replace("_", "-") for name in check._SWITCHES}
    return switches | {flag for text in texts for flag in re.findall(r"--([a-z][a-z0-9-]+[a-z0-9])", text)}


def test_every_refused_flag_is_documented() -> None:
    found = refused_flags()
    assert {"page-size", "enable-lora", "attention-backend", "disaggregation-mode"} <= found
    documented = set(re.findall(r"--([a-z][a-z0-9-]+[a-z0-9])", section("What is refused")))
    assert sorted(found - documented - {"tp-size"}) == []
    strangers = documented - found - {"speculative-algorithm"}
    assert sorted(strangers) == [], "documented as refused, and nothing refuses them"


def test_lint_knows_every_refused_flag() -> None:
    """What ends a start after minutes is said before it."""
    assert sorted(refused_flags() - ELSEWHERE.keys() - rules_tree._REFUSED.keys()) == []


def every_refused_model() -> Any:
    config = SimpleNamespace(
        is_encoder_decoder=True, use_ngram_embedding=True, hf_config=SimpleNamespace(attn_temperature_len=1)
    )
    return SimpleNamespace(mambaish_config=1, is_hybrid_swa=True, sliding_window_size=1, model_config=config)


def test_every_refused_model_is_documented() -> None:
    texts = check.model_refusals(every_refused_model())
    rows = re.findall(r"^\| (the model [^|]+?) \|", section("What is refused"), re.MULTILINE)
    said = [" ".join(text.split()[:4]).rstrip(":,") for text in texts]
    assert [next((row for row in rows if row.startswith(words)), words) for words in said] == rows


def test_every_refusal_of_what_was_loaded_is_documented() -> None:
    """Each function that refuses is known here; a further one needs a row in the page, and a line below."""
    texts = [
        *check.draft_refusals(
            SimpleNamespace(device="cuda", model_config=SimpleNamespace(dtype="float16"), graph_runner=None),
            8,
        ),
        *check.head_refusals(None),
        *check.head_refusals(SimpleNamespace(shard_indices=1, weight=SimpleNamespace(dtype="int8"))),
    ]
    assert len(texts) == 3
    for row in (
        "| a drafter that is not bfloat16,",
        "| an `lm_head` of the target that is quantised, or not",
    ):
        assert f"\n{row}" in section("What is refused")
    refusing = {name for name in check.__all__ if "refusal" in name}
    assert refusing == {"refusals", "model_refusals", "draft_refusals", "head_refusals", "request_refusal"}


def test_every_refused_parameter_of_a_request_is_documented() -> None:
    other = SimpleNamespace(
        frequency_penalty=1.0, presence_penalty=1.0, repetition_penalty=2.0, min_new_tokens=1
    )
    text = check.request_refusal(other)
    assert text is not None
    names = re.findall(r"[a-z]+_[a-z_]+", text.partition(" yet")[0])
    assert len(names) == 4
    assert {f"`{name}`" for name in names} <= set(re.findall(r"`\w+`", section("What is refused")))


def test_every_flag_is_documented_with_its_default() -> None:
    rows = section("Flags")
    for name, default in flags.FIELDS.items():
        option = "--" + name.replace("_", "-")
        (row,) = [row.split("|") for row in rows.splitlines() if row.startswith(f"| `{option}`")]
        assert (str(default) if default is not None else "must be given") in row[3], option
    assert all(schedule in rows for schedule in flags.SCHEDULES)


def test_every_variable_is_documented() -> None:
    used = {
        name
        for text in SOURCES.values()
        for name in re.findall(r'"(DDTREE_[A-Z_]+)"', text)
        if "environ" in text
    }
    assert {"DDTREE_SKIP_SELF_CHECK"} <= used
    assert used == set(re.findall(r"`(DDTREE_\w+)=", section("Flags")))


CONTEXT, VOCABULARY, HEADS, WIDTH = 262144, 163840, 8, 512


def memory_rows() -> Iterator[tuple[int, list[str]]]:
    for row in re.findall(r"^\| (\d+)[^|]*\| (\d+\.\d MB .*) \|$", section("Memory"), re.MULTILINE):
        yield int(row[0]), [cell.strip() for cell in row[1].split("|")]


@dataclass
class Buffer:
    """As much of a tensor as its size takes."""

    nbytes: int


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], dict[str, int]]:
    """Bytes by name of what sglang's own ``init_cuda_graph_state``, with the plugin's hook, asks of torch."""
    sizes = {"float32": 4, "int32": 4, "int64": 8, "uint8": 1}

    def zeros(shape: int | tuple[int, ...], *, dtype: str, device: str) -> Buffer:
        return Buffer(sizes[dtype] * math.prod(shape if isinstance(shape, tuple) else (shape,)))

    def full(shape: tuple[int, ...], value: int, **kinds: str) -> Buffer:
        return zeros(shape, **kinds)

    torch = SimpleNamespace(zeros=zeros, full=full, **{name: name for name in sizes})
    monkeypatch.setitem(sys.modules, "torch", torch)
    source = build(RuntimeSpec()).read("sglang/srt/layers/attention/triton_backend.py")
    assert source is not None
    (backend_class,) = [
        node for node in ast.parse(source).body if getattr(node, "name", "") == "TritonAttnBackend"
    ]
    assert isinstance(backend_class, ast.ClassDef)
    (function,) = [
        node for node in backend_class.body if getattr(node, "name", "") == "init_cuda_graph_state"
    ]
    names: dict[str, Any] = {"torch": torch, "Optional": Optional}
    exec(compile(ast.Module([function], []), "triton_backend.py", "exec"), names)

    def made(batch: int, tokens: int) -> dict[str, int]:
        backend = SimpleNamespace(
            ddtree_tokens=tokens,
            num_draft_tokens=tokens,
            max_context_len=CONTEXT,
            device="cuda",
            num_head=HEADS,
            max_kv_splits=8,
            v_head_dim=WIDTH,
            swa_v_head_dim=None,
            sliding_window_size=None,
            skip_prefill=False,
        )
        plugin.size_graph_state(names["init_cuda_graph_state"], backend, batch, batch * tokens)
        return {name: part.nbytes for name, part in vars(backend).items() if isinstance(part, Buffer)}

    return made


def parts(held: dict[str, int]) -> tuple[int, int]:
    """Indices and mask; partial sums of the attention. All that is held is in one of them, but a few bytes."""
    indices = held["cuda_graph_kv_indices"] + held["cuda_graph_custom_mask"]
    attention = held["cuda_graph_attn_logits"] + held["cuda_graph_attn_lse"]
    assert sum(held.values()) - indices - attention < 1000
    return indices, attention


def test_the_table_of_memory_is_what_the_plugin_takes(measured: Callable[[int, int], dict[str, int]]) -> None:
    rows = dict(memory_rows())
    assert sorted(rows) == [7, 16, 32, 64]
    for budget, cells in rows.items():
        logits = (budget + 1) * VOCABULARY * 4

        def taken(batch: int, budget: int = budget, logits: int = logits) -> int:
            return sum(parts(measured(batch, budget + 1))) + batch * logits

        wanted = [f"{part / 1e6:.1f} MB" for part in (*parts(measured(1, budget + 1)), logits, taken(1))]
        wanted += [f"{taken(size) / 1e9:.2f} GB" for size in (8, 24)]
        assert cells == wanted, budget


def test_the_formulas_of_memory_are_what_the_plugin_takes(
    measured: Callable[[int, int], dict[str, int]],
) -> None:
    formulas = re.findall(r"^\| [^|]*\(triton[^|]*\| `([^`]+)`", section("Memory"), re.MULTILINE)
    assert len(formulas) == 2
    for batch, tokens in ((1, 8), (24, 33), (5, 65)):
        values = {"b": batch, "N": tokens, "context": CONTEXT, "heads": HEADS, "width": WIDTH}
        found = [
            eval(text.replace(" x ", " * ").replace("value width", "width"), {}, values) for text in formulas
        ]
        assert tuple(found) == parts(measured(batch, tokens))
        assert rules_tree.mask_bytes(batch, tokens, CONTEXT, overlay=True) == found[0], "what lint reckons"


def tree_builder() -> dict[str, Any]:
    """What ``ddtree_sglang.tree`` counts prefixes with, taken from its source: the module itself needs torch."""
    wanted = ("_prefixes", "MAX_CANDIDATES", "_NEVER")
    nodes = [
        node
        for node in ast.parse(SOURCES["tree"]).body
        if getattr(node, "name", "") in wanted
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in wanted)
    ]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(nodes, []), "tree.py", "exec"), names)
    return names


def test_lint_counts_the_candidates_of_a_tree_as_its_builder_does() -> None:
    builder = tree_builder()
    assert (builder["MAX_CANDIDATES"], builder["_NEVER"]) == (
        rules_tree.MAX_CANDIDATES,
        1 << rules_tree._COST_BITS,
    )
    assert "(depth * _NEVER) << shift >= 1 << 63" in SOURCES["tree"]
    for depth, width, budget in itertools.product((1, 2, 3, 7), (1, 2, 5, 8), (1, 3, 7, 20, 64)):
        found = rules_tree.candidates(depth, min(width, budget), budget)
        assert found == len(builder["_prefixes"](depth, min(width, budget), budget)), (depth, width, budget)


def test_the_largest_budgets_of_the_page_are_so() -> None:
    builder = tree_builder()
    said = re.findall(r"(\d+) for block (\d+)", section("What is refused"))
    assert len(said) == 3
    for budget, block in said:
        depth = int(block) - 1
        assert len(builder["_prefixes"](depth, 8, int(budget))) <= builder["MAX_CANDIDATES"]
        assert rules_tree.candidates(depth, 8, int(budget)) <= rules_tree.MAX_CANDIDATES
        assert rules_tree.candidates(depth, 8, int(budget) + 1) > rules_tree.MAX_CANDIDATES
        with pytest.raises(ValueError, match="more than 65536 candidates"):
            builder["_prefixes"](depth, 8, int(budget) + 1)


def pages() -> dict[str, str]:
    return {
        path.name: path.read_text("utf-8")
        for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    }


@pytest.mark.parametrize("runtime", ["sglang-0.5.11-ddtree", "sglang-0.5.11-stock"])
def test_samples_show_one_digest_a_runtime(runtime: str) -> None:
    """Digests change with every edit of the overlay: samples are of one day, and agree."""
    found = {
        digest
        for text in pages().values()
        for digest in re.findall(
            rf"(?:{re.escape(runtime)} ([0-9a-f]{{12}})|([0-9a-f]{{12}}) {re.escape(runtime)})\b", text
        )
    }
    assert len({one or other for one, other in found}) == 1, found


def test_samples_show_one_number_of_files() -> None:
    found = {
        number
        for text in pages().values()
        for number in re.findall(r"\b(\d{4}) files(?: as built|, |$)", text)
    }
    assert len(found) == 1, found
    (files,) = found
    linked = {number for text in pages().values() for number in re.findall(r"\b(\d{4}) linked from", text)}
    assert linked == {str(int(files) - 1)}


def test_the_number_of_flags_in_samples_is_so() -> None:
    known = facts_of(build(RuntimeSpec())).flags
    assert known is not None
    shown = {number for text in pages().values() for number in re.findall(r"against (\d+) flags", text)}
    assert shown == {str(len(known.flags))}


def test_the_numbers_of_signatures_in_samples_are_so() -> None:
    """Those shipped, and the one of the page."""
    shipped = load_library().signatures
    counts = (
        len(shipped) + 1,
        sum(len(one.examples) for one in shipped) + 1,
        sum(len(one.lookalikes) for one in shipped) + 1,
    )
    shown = re.findall(r"(\d+) signatures, (\d+) examples, (\d+) look-alikes", pages()["signatures.md"])
    assert [tuple(map(int, row)) for row in shown] == [counts]
