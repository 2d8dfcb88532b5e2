"""The graph runner of the real sglang 0.5.11, as released and with patch 0001, without a GPU.

A: its sizing block, lifted out and run by ``ddtree_ops.sizing`` (as ``patch check`` does on a host without torch).
B: its buffers, filled with the batch of a tree: the story's crash, and none where they are sized for the tree.
C: its whole ``__init__`` on stand-ins for model and backend, with the capture left out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ddtree_ops.runtime.description import load_description
from ddtree_ops.runtime.series import Content, apply_series
from ddtree_ops.sizing import RUNNER_PATH, prove

FOUND = importlib.util.find_spec("sglang")
if FOUND is None or FOUND.origin is None:
    pytest.skip("sglang is not installed: make test-real", allow_module_level=True)

pytestmark = pytest.mark.real

BLOCK, BUDGET, MAX_BS = 8, 32, 4
TREE = BUDGET + 1
TREES = ("released", "patched")


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The runner's text as released and with the whole series of the runtime."""
    released = (Path(FOUND.origin).parents[1] / RUNNER_PATH).read_bytes()
    description = load_description("sglang-0.5.11")
    assert hashlib.sha256(released).hexdigest() == description.pristine[RUNNER_PATH]
    patched, applied = apply_series(lambda path: Content(released), description.patches)
    assert [one.already for one in applied] == [False]
    return {"released": released.decode(), "patched": patched[RUNNER_PATH].data.decode()}


@pytest.fixture(scope="module")
def modules(
    sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ModuleType]]:
    """Both texts as modules of their own, beside the installed one."""
    folder = tmp_path_factory.mktemp("runners")
    loaded: dict[str, ModuleType] = {}
    for tree, text in sources.items():
        name = f"cuda_graph_runner_{tree}"
        (folder / f"{name}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        loaded[tree] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded[tree])
    yield loaded
    for module in loaded.values():
        del sys.modules[module.__name__]


# A


@pytest.mark.parametrize(("tree", "figures"), [("released", "8 / 8 / 8 / 1"), ("patched", "33 / 8 / 8 / 1")])
def test_a_the_sizing_block_gives(sources: dict[str, str], tree: str, figures: str) -> None:
    """Tokens a request of target and drafter under DDTREE, of the target under DFLASH, of a plain server."""
    found = prove(sources[tree], block_size=BLOCK, budget=BUDGET)
    assert found.figures == figures
    assert found.ok == (tree == "patched")


# B


def make_buffers(module: ModuleType, tokens: int, max_bs: int = 1) -> Any:
    """The real input buffers for ``tokens`` tokens a request."""
    import torch

    return module.DecodeInputBuffers.create(
        device=torch.device("cpu"),
        max_bs=max_bs,
        max_num_token=max_bs * tokens,
        hidden_size=16,
        vocab_size=32,
        dtype=torch.float32,
        dp_size=1,
        pp_size=1,
        is_encoder_decoder=False,
        require_mlp_tp_gather=False,
        seq_len_fill_value=1,
        encoder_len_fill_value=0,
        num_tokens_per_bs=tokens,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=False,
    )


def make_batch(tokens: int, bs: int = 1) -> SimpleNamespace:
    """What a verify step of ``bs`` requests brings along."""
    import torch

    def rows(value: int) -> torch.Tensor:
        return torch.full((bs * tokens,), value, dtype=torch.int64)

    return SimpleNamespace(
        batch_size=bs,
        input_ids=rows(7),
        out_cache_loc=rows(9),
        positions=rows(5),
        req_pool_indices=torch.zeros(bs, dtype=torch.int64),
        seq_lens=torch.full((bs,), 5, dtype=torch.int32),
        seq_lens_cpu=torch.full((bs,), 5, dtype=torch.int32),
        mamba_track_indices=None,
        mamba_track_mask=None,
        encoder_lens=None,
        mrope_positions=None,
        num_token_non_padded=None,
        out_cache_loc_swa=None,
    )


def fill(buffers: Any, batch: SimpleNamespace, tokens: int) -> None:
    buffers.populate_from_forward_batch(
        forward_batch=batch,
        raw_bs=batch.batch_size,
        raw_num_token=batch.batch_size * tokens,
        bs=batch.batch_size,
        seq_len_fill_value=1,
        require_gathered_buffer=False,
        num_tokens_per_bs=tokens,
        nsa_enable_prefill_cp=False,
        enable_num_token_non_padded_flag=False,
    )


@pytest.mark.parametrize("sent", [TREE, BLOCK + 1])
def test_b_buffers_of_the_block_cannot_take_a_tree(modules: dict[str, ModuleType], sent: int) -> None:
    """The story's text. Budget 8 fails just so: 9 tokens for 8."""
    text = rf"The size of tensor a \({BLOCK}\) must match the size of tensor b \({sent}\) at non-singleton dimension 0"
    with pytest.raises(RuntimeError, match=text):
        fill(make_buffers(modules["released"], BLOCK), make_batch(sent), BLOCK)


def test_b_buffers_of_the_tree_take_it(modules: dict[str, ModuleType]) -> None:
    buffers = make_buffers(modules["released"], TREE)
    fill(buffers, make_batch(TREE), TREE)
    assert buffers.input_ids.tolist() == [7] * TREE
    assert buffers.out_cache_loc.tolist() == [9] * TREE


def test_b_four_requests_are_32_against_132(modules: dict[str, ModuleType]) -> None:
    with pytest.raises(RuntimeError, match=r"tensor a \(32\) must match the size of tensor b \(132\)"):
        fill(make_buffers(modules["released"], BLOCK, 4), make_batch(TREE, 4), BLOCK)


# C


class Algorithm:
    """Answers as the plugin's member of ``SpeculativeAlgorithm`` does."""

    def __init__(self, name: str | None) -> None:
        self.name = name

    def __getattr__(self, question: str) -> Callable[[], bool]:
        answers = {
            "is_speculative": self.name is not None,
            "is_none": self.name is None,
            "is_dflash": self.name in ("DFLASH", "DDTREE"),
            "is_ddtree": self.name == "DDTREE",
        }
        return lambda: answers.get(question, False)


class Backend:
    """An attention backend that notes for how many tokens graphs are to be captured."""

    sized: tuple[int, int] | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.sized = max_bs, max_num_tokens

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


def make_runner(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, algorithm: str | None, draft: bool
) -> Any:
    """The real ``CudaGraphRunner.__init__`` to its end; only the capture is left out."""
    import torch
    from sglang.srt.model_executor import input_buffers
    from sglang.srt.server_args import ServerArgs

    args = object.__new__(ServerArgs)
    for field in fields(ServerArgs):
        object.__setattr__(args, field.name, getattr(ServerArgs, field.name, None))
    vars(args).update(
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=BLOCK,
        speculative_num_steps=1,
        speculative_ddtree_budget=BUDGET,
        cuda_graph_bs=[1, 2, MAX_BS],
        cuda_graph_max_bs=MAX_BS,
        moe_a2a_backend="none",
        disable_cuda_graph_padding=False,
    )
    backend = Backend()
    model_runner = SimpleNamespace(
        device="cpu",
        server_args=args,
        spec_algorithm=Algorithm(algorithm),
        is_draft_worker=draft,
        is_hybrid_swa=False,
        use_ngram_embedding=False,
        attn_backend=backend,
        req_to_token_pool=SimpleNamespace(size=MAX_BS),
        model_config=SimpleNamespace(
            is_encoder_decoder=False,
            hidden_size=16,
            vocab_size=32,
            dtype=torch.float32,
            hf_config=SimpleNamespace(),
        ),
    )
    for name, value in {
        "get_attention_tp_size": 1,
        "get_attention_tp_rank": 0,
        "get_attention_cp_size": 1,
        "get_tensor_model_parallel_rank": 0,
        "is_nsa_enable_prefill_cp": False,
        "should_record_nolora_graph": False,
        "log_info_on_rank0": None,
    }.items():
        monkeypatch.setattr(module, name, lambda *_a, _value=value, **_k: _value, raising=False)
    monkeypatch.setattr(module.CudaGraphRunner, "capture", lambda self: None)
    # buffers of runners before this one, by name
    monkeypatch.setattr(input_buffers, "_forward_input_buffer_pool", {})
    runner = module.CudaGraphRunner(model_runner)
    assert backend.sized == (MAX_BS, MAX_BS * runner.num_tokens_per_bs)
    return runner


@pytest.mark.parametrize(
    ("algorithm", "draft", "released", "patched"),
    [
        ("DDTREE", False, BLOCK, TREE),
        ("DDTREE", True, BLOCK, BLOCK),
        ("DFLASH", False, BLOCK, BLOCK),
        ("DFLASH", True, BLOCK, BLOCK),
        (None, False, 1, 1),
    ],
    ids=["ddtree-target", "ddtree-draft", "dflash-target", "dflash-draft", "plain"],
)
@pytest.mark.parametrize("tree", TREES)
def test_c_a_runner_holds(
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tree: str,
    algorithm: str | None,
    draft: bool,
    released: int,
    patched: int,
) -> None:
    """Its count, its buffers, its backend's graph state and the spec it captures with are of one size."""
    tokens = patched if tree == "patched" else released
    runner = make_runner(modules[tree], monkeypatch, algorithm, draft)
    assert runner.num_tokens_per_bs == tokens
    assert runner.max_num_token == MAX_BS * tokens
    for name in ("input_ids", "positions", "out_cache_loc", "next_token_logits_buffer"):
        assert len(getattr(runner.buffers, name)) == MAX_BS * tokens, name
    if algorithm is None:
        return
    spec = runner.get_spec_info(MAX_BS * tokens)
    assert spec.draft_token_num == tokens
    assert (spec.custom_mask is None) == draft, "the target is captured with a mask, its drafter without"


@pytest.mark.parametrize("tree", TREES)
def test_c_the_tree_of_a_target_fits_only_where_the_patch_is(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tree: str
) -> None:
    """The first verify step, as ``replay`` begins it."""
    runner = make_runner(modules[tree], monkeypatch, "DDTREE", draft=False)
    tokens = runner.num_tokens_per_bs
    if tree == "released":
        with pytest.raises(RuntimeError, match=r"tensor a \(8\) must match the size of tensor b \(33\)"):
            fill(runner.buffers, make_batch(TREE), tokens)
        return
    fill(runner.buffers, make_batch(TREE), tokens)
    assert runner.buffers.input_ids[:TREE].tolist() == [7] * TREE


def test_c_a_target_without_a_budget_is_refused(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BUDGET", None)
    with pytest.raises(ValueError, match="DDTREE needs --speculative-ddtree-budget >= 1, got None"):
        make_runner(modules["patched"], monkeypatch, "DDTREE", draft=False)
