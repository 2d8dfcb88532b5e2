"""The sizing block, lifted out of the real file and run."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops import sizing
from ddtree_ops.sizing import SizingError, prove, tokens_per_request

MODES = [
    (algorithm, draft)
    for algorithm in ("DFLASH", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM", None)
    for draft in (False, True)
]
TINY = """
class CudaGraphRunner:
    def __init__(self, model_runner, *, attn_backend=None, speculative_num_draft_tokens=None):
        self.model_runner = model_runner
        self.num_tokens_per_bs = 1
        {body}
"""


def tiny(body: str) -> str:
    return TINY.format(body=body.replace("\n", "\n        "))


def test_patched_sizes_every_worker_for_what_it_is_sent(patched_source: str) -> None:
    found = prove(patched_source, block_size=8, budget=32)
    assert [(row.worker, row.algorithm, row.tokens, row.wanted, row.ok) for row in found.rows] == [
        ("target", "DDTREE", 33, 33, True),
        ("draft", "DDTREE", 8, 8, True),
        ("target", "DFLASH", 8, 8, True),
        ("plain", "none", 1, 1, True),
    ]
    assert found.ok and found.figures == "33 / 8 / 8 / 1"


def test_pristine_sizes_the_target_for_the_draft(pristine_source: str) -> None:
    found = prove(pristine_source, block_size=8, budget=32)
    assert found.figures == "8 / 8 / 8 / 1" and not found.ok
    assert [row.ok for row in found.rows] == [False, True, True, True]
    assert found.to_json()["rows"][0] == {
        "worker": "target", "algorithm": "DDTREE", "tokens": 8, "wanted": 33, "ok": False, "line": 630,
    }  # fmt: skip


def test_line_is_that_of_the_deciding_assignment(patched_source: str, pristine_source: str) -> None:
    lines = patched_source.splitlines()
    found = prove(patched_source, block_size=8, budget=32)
    assert lines[found.line - 1].strip() == "self.num_tokens_per_bs = budget + 1"
    assert (
        lines[found.rows[1].line - 1].strip() == "self.num_tokens_per_bs = self.speculative_num_draft_tokens"
    )
    assert prove(pristine_source, block_size=8, budget=32).line == 630


@settings(max_examples=60)
@given(block=st.integers(2, 64), budget=st.integers(1, 512))
def test_any_block_size_and_budget(
    patched_source: str, pristine_source: str, block: int, budget: int
) -> None:
    found = prove(patched_source, block_size=block, budget=budget)
    assert found.ok and [row.tokens for row in found.rows] == [budget + 1, block, block, 1]
    assert prove(pristine_source, block_size=block, budget=budget).ok is (budget == block - 1)


def result(source: str, **case: Any) -> int | str:
    try:
        return tokens_per_request(source, **case)
    except SizingError as error:
        return str(error)


@settings(max_examples=40)
@given(block=st.integers(2, 64), budget=st.none() | st.integers(-1, 512))
def test_every_other_mode_is_as_it_was(
    patched_source: str, pristine_source: str, block: int, budget: int | None
) -> None:
    for algorithm, draft in MODES:
        case: dict[str, Any] = {
            "algorithm": algorithm, "draft_worker": draft, "block_size": block, "budget": budget,
        }  # fmt: skip
        assert result(patched_source, **case) == result(pristine_source, **case)
    draft_case: dict[str, Any] = {
        "algorithm": "DDTREE", "draft_worker": True, "block_size": block, "budget": budget,
    }  # fmt: skip
    assert result(patched_source, **draft_case) == result(pristine_source, **draft_case) == block


def test_a_tree_that_already_sends_budget_plus_one_gets_the_same(patched_source: str) -> None:
    assert (
        tokens_per_request(patched_source, algorithm="DDTREE", draft_worker=False, block_size=33, budget=32)
        == 33
    )


@pytest.mark.parametrize("budget", [None, 0, -1])
def test_ddtree_without_a_budget_is_refused_by_the_name_of_the_flag(
    patched_source: str, budget: int | None
) -> None:
    with pytest.raises(SizingError, match=r"ValueError: DDTREE needs --speculative-ddtree-budget >= 1"):
        tokens_per_request(
            patched_source, algorithm="DDTREE", draft_worker=False, block_size=8, budget=budget
        )


def test_without_a_budget_the_tree_rows_are_left_out(patched_source: str) -> None:
    found = prove(patched_source, block_size=8, budget=None)
    assert [(row.worker, row.algorithm) for row in found.rows] == [("target", "DFLASH"), ("plain", "none")]


def test_an_eagle_draft_worker_still_raises(patched_source: str) -> None:
    with pytest.raises(SizingError, match=r"draft worker under EAGLE.*RuntimeError: This should not happen"):
        tokens_per_request(patched_source, algorithm="EAGLE", draft_worker=True, block_size=8, budget=None)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def broken(:", "not valid Python"),
        ("class Other: pass", r"no CudaGraphRunner\.__init__"),
        ("class CudaGraphRunner:\n    def __init__(self):\n        self.x = 1", "has moved"),
        (tiny("self.num_tokens_per_bs = unheard_of()"), "NameError"),
        (tiny("self.num_tokens_per_bs = model_runner.server_args.tree_width"), "tree_width is not known"),
        (tiny("self.num_tokens_per_bs = 'eight'"), "not a number"),
        (tiny("self.num_tokens_per_bs = -5"), "not a number"),
        (
            "class CudaGraphRunner:\n    def __init__(self):\n        if False:\n            self.num_tokens_per_bs = 1",
            "gives None",
        ),
        ("x = " + "-" * 200_000 + "1", "nested too deeply"),
        (tiny("self.num_tokens_per_bs = 1" + "+ 1" * 20_000), "nested too deeply"),
    ],
)
def test_what_cannot_be_told_is_said(source: str, problem: str) -> None:
    with pytest.raises(SizingError, match=problem):
        prove(source, block_size=8, budget=32)


@pytest.mark.parametrize(
    "body",
    [
        "self.num_tokens_per_bs = __import__('os').getpid()",
        "import os\nself.num_tokens_per_bs = os.getpid()",
        "if True:\n    import os\n    self.num_tokens_per_bs = os.getpid()",
        "self.num_tokens_per_bs = len(().__class__.__base__.__subclasses__())",
        "self.num_tokens_per_bs = len(getattr(self, '__dict__'))",
        "self.num_tokens_per_bs = len(f'{model_runner.__class__}')",
        "while True:\n    self.num_tokens_per_bs = 2",
        "self.num_tokens_per_bs = 9 ** 9 ** 9 ** 9",
        "self.num_tokens_per_bs = len([c for c in 'abc'])",
        "self.num_tokens_per_bs = len(open('/etc/passwd').read())",
        "self.num_tokens_per_bs = eval('1')",
        "self.num_tokens_per_bs = (lambda f: f(f, 99))(lambda f, n: f(f, n - 1) + f(f, n - 1))",
        "x = 10\n" + "x = x * x\n" * 60 + "self.num_tokens_per_bs = x",
        "x = 10\n" + "x *= x\n" * 60 + "self.num_tokens_per_bs = x",
        "x = 'x'\n" + "x += x\n" * 60 + "self.num_tokens_per_bs = len(x)",
        "self.num_tokens_per_bs = len('x' * 10000000000000)",
        "self.num_tokens_per_bs = len([0] * 10000000000000)",
        "self.num_tokens_per_bs = len('%10000000000d' % 1)",
        "self.num_tokens_per_bs = len(f'{1:10000000000}')",
        "self.num_tokens_per_bs = len(f'{1:{9}{9}{9}{9}{9}{9}{9}{9}{9}{9}}')",
        "self.num_tokens_per_bs = len('x'.ljust(10000000000000))",
        "self.num_tokens_per_bs = len(getattr('x', 'ljust')(10000000000000))",
        "self.num_tokens_per_bs = len('{0.__init__.__globals__}'.format(model_runner))",
        "self.num_tokens_per_bs = len(getattr('{0.__init__.__globals__}', 'format')(model_runner))",
    ],
)
def test_a_hostile_file_is_not_obeyed(body: str) -> None:
    with pytest.raises(SizingError):
        prove(tiny(body), block_size=8, budget=32)


def test_local_names_are_followed_to_where_they_are_assigned() -> None:
    body = """server_args = model_runner.server_args
unrelated = launch_missiles()
width = server_args.speculative_ddtree_budget
width += 1
logger.info("width %s", width)
if model_runner.spec_algorithm == SpeculativeAlgorithm.DDTREE and not model_runner.is_draft_worker:
    self.num_tokens_per_bs = width
elif self.model_runner.spec_algorithm.is_speculative():
    self.num_tokens_per_bs = server_args.speculative_num_draft_tokens"""
    assert prove(tiny(body), block_size=8, budget=32).figures == "33 / 8 / 8 / 1"


def test_arithmetic_with_whole_numbers_is_known() -> None:
    body = """width = model_runner.server_args.speculative_ddtree_budget
width -= 1
width += 2 * 3 // 4 + 9 % 4
self.num_tokens_per_bs = max(width, len('a' + 'b'))"""
    assert prove(tiny(body), block_size=8, budget=32).figures == "33 / 33 / 33 / 33"


def test_the_module_runs_alone_on_old_pythons(patched_source: str) -> None:
    text = Path(sizing.__file__).read_text()
    tree = ast.parse(text, feature_version=(3, 9))
    ast.parse(patched_source, feature_version=(3, 9))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


def capture_spec(source: str, algorithm: str, draft: bool, block: int, budget: int) -> tuple[int, int]:
    """Runs ``get_spec_info`` of the file: tokens a request of the runner and of the capture spec."""
    tokens = tokens_per_request(
        source, algorithm=algorithm, draft_worker=draft, block_size=block, budget=budget
    )
    runner = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "CudaGraphRunner")
    assert isinstance(runner, ast.ClassDef)
    method = next(node for node in runner.body if getattr(node, "name", "") == "get_spec_info")
    scope: dict[str, Any] = {"CaptureHiddenMode": SimpleNamespace(NULL=0, FULL=1)}
    exec(compile(ast.Module(body=[method], type_ignores=[]), "runner", "exec"), scope)
    asked = {"is_dflash": True, "is_eagle": False, "is_standalone": False, "is_ngram": False}
    spec_algorithm = SimpleNamespace(**{name: (lambda value=value: value) for name, value in asked.items()})
    server_args = SimpleNamespace(speculative_num_draft_tokens=block)
    self = SimpleNamespace(
        num_tokens_per_bs=tokens,
        buffers=SimpleNamespace(custom_mask="mask"),
        model_runner=SimpleNamespace(
            spec_algorithm=spec_algorithm, is_draft_worker=draft, server_args=server_args, attn_backend=None
        ),
    )
    return tokens, scope["get_spec_info"](self, 4 * tokens).draft_token_num


@pytest.mark.parametrize(
    ("algorithm", "draft", "wanted"), [("DDTREE", False, 33), ("DDTREE", True, 8), ("DFLASH", False, 8)]
)
def test_capture_spec_agrees_with_the_runner(
    patched_source: str,
    pristine_source: str,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    draft: bool,
    wanted: int,
) -> None:
    parts: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.speculative": {},
        "sglang.srt.speculative.dflash_info": {"DFlashVerifyInput": SimpleNamespace},
        "sglang.srt.speculative.dflash_utils": {
            "resolve_dflash_verify_mask_policy": lambda _: ("triton", True)
        },
    }
    for name, content in parts.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    assert capture_spec(patched_source, algorithm, draft, 8, 32) == (wanted, wanted)
    assert capture_spec(pristine_source, algorithm, draft, 8, 32) == (8, 8)
