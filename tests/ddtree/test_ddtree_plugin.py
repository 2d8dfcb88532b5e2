"""The hooks on stand-ins, and (``real``) in sglang's own registry."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_sglang import check, plugin
from ddtree_sglang.check import DDTreeError


class Algorithm(enum.Enum):
    """As much of ``SpeculativeAlgorithm`` as the plugin touches."""

    DFLASH = enum.auto()
    EAGLE = enum.auto()

    def is_dflash(self) -> bool:
        return self == Algorithm.DFLASH

    def create_worker(self, server_args: Any) -> str:
        return f"worker of {self.name}"


plugin.add_algorithm(Algorithm)
DDTREE = Algorithm["DDTREE"]


def test_the_algorithm_is_a_member_like_the_others() -> None:
    assert [member.name for member in Algorithm] == ["DFLASH", "EAGLE", "DDTREE"]
    assert Algorithm(DDTREE.value) is DDTREE
    assert Algorithm.DDTREE is DDTREE  # type: ignore[attr-defined]
    assert len({member.value for member in Algorithm}) == len(Algorithm)
    assert hash(DDTREE) != hash(Algorithm.DFLASH)


def test_it_drafts_as_dflash_and_alone_verifies_trees() -> None:
    assert [member.is_dflash() for member in Algorithm] == [True, False, True]
    assert [member.is_ddtree() for member in Algorithm] == [False, False, True]  # type: ignore[attr-defined]
    assert Algorithm.EAGLE.create_worker(None) == "worker of EAGLE"


def test_a_tree_with_a_ddtree_of_its_own_is_refused() -> None:
    with pytest.raises(RuntimeError, match="has an algorithm DDTREE already"):
        plugin.add_algorithm(Algorithm)


def runner(algorithm: Any = DDTREE, draft: bool = False) -> SimpleNamespace:
    arguments = SimpleNamespace(speculative_num_draft_tokens=8, speculative_ddtree_budget=32)
    return SimpleNamespace(spec_algorithm=algorithm, is_draft_worker=draft, server_args=arguments)


OTHERS = [runner(draft=True), runner(Algorithm.DFLASH), runner(Algorithm.DFLASH, draft=True)]
ROLES = ["the drafter", "a target under DFLASH", "the drafter under DFLASH"]


def test_the_target_s_backend_is_told_the_tree() -> None:
    backend = SimpleNamespace(num_draft_tokens=8)
    plugin.size_backend(None, backend, runner())
    assert (backend.num_draft_tokens, backend.ddtree_tokens, backend.ddtree_tree_mask) == (33, 33, True)


@pytest.mark.parametrize("other", OTHERS, ids=ROLES)
def test_every_other_backend_keeps_the_block(other: SimpleNamespace) -> None:
    backend = SimpleNamespace(num_draft_tokens=8)
    plugin.size_backend(None, backend, other)
    assert vars(backend) == {"num_draft_tokens": 8}


@pytest.mark.parametrize("hook", [plugin.size_pools, plugin.dummy_run])
def test_pools_and_warm_up_read_the_tree_and_the_number_is_put_back(hook: Callable[..., Any]) -> None:
    read: list[int] = []
    target = runner()
    hook(lambda self, *args: read.append(self.server_args.speculative_num_draft_tokens), target)
    for other in OTHERS:
        hook(lambda self, *args: read.append(self.server_args.speculative_num_draft_tokens), other)
    assert read == [33, 8, 8, 8]
    assert target.server_args.speculative_num_draft_tokens == 8

    def fail(self: Any) -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        hook(fail, target)
    assert target.server_args.speculative_num_draft_tokens == 8


@pytest.mark.real
def test_graph_state_is_refused_before_the_capture_if_the_patch_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    captured: list[int] = []
    sizes: list[tuple[int, int]] = []

    def state(self: Any, max_bs: int, max_num_tokens: int) -> None:
        captured.append(self.num_draft_tokens)
        sizes.append((max_bs, max_num_tokens))
        self.cuda_graph_custom_mask = "sglang's"

    backend = SimpleNamespace(num_draft_tokens=8, max_context_len=100, device="cpu")
    plugin.size_graph_state(state, backend, 4, 32)
    assert backend.cuda_graph_custom_mask == "sglang's"

    plugin.size_backend(None, backend, runner())
    monkeypatch.delenv(check.SKIP_SELF_CHECK, raising=False)
    with pytest.raises(DDTreeError, match=check.PATCH):
        plugin.size_graph_state(state, backend, 4, 4 * 8)
    assert captured == [8]

    plugin.size_graph_state(state, backend, 4, 4 * 33)
    assert captured == [8, 33]
    # one request a row short of the limit, and its tree
    assert backend.cuda_graph_custom_mask.numel() >= 4 * 33 * (99 + 33)

    monkeypatch.setenv(check.SKIP_SELF_CHECK, "1")
    plugin.size_graph_state(state, backend, 4, 4 * 8)
    assert captured == [8, 33, 8], "the capture follows the runner, or it would write rows that are not there"
    assert sizes == [(4, 32), (4, 4), (4, 4)], "the target's other buffers hold a row a request, not a token"


@pytest.mark.real
def test_the_graphs_buffers_hold_every_request_at_the_context_limit(real_plugin: None) -> None:
    """sglang's own ``init_cuda_graph_state`` with the hook: a row of the context a request, N of them in the mask."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    def made(**more: Any) -> SimpleNamespace:
        backend = SimpleNamespace(
            num_draft_tokens=33,
            max_context_len=100,
            device="cpu",
            num_head=2,
            max_kv_splits=8,
            v_head_dim=4,
            swa_v_head_dim=None,
            sliding_window_size=None,
            skip_prefill=False,
            **more,
        )
        TritonAttnBackend.init_cuda_graph_state(backend, 4, 4 * 33)
        return backend

    tree, plain = made(ddtree_tokens=33), made()
    assert tree.cuda_graph_kv_indices.numel() == 4 * 100
    assert tree.cuda_graph_custom_mask.numel() == 4 * 33 * (100 + 33)
    assert plain.cuda_graph_kv_indices.numel() == 4 * 33 * 100, "what sglang makes without the hook"
    held = sum(part.nbytes for part in vars(tree).values() if hasattr(part, "nbytes"))
    assert held < sum(part.nbytes for part in vars(plain).values() if hasattr(part, "nbytes")) / 5


def test_every_hook_has_a_target_of_its_own() -> None:
    assert len(plugin.HOOKS) == len(plugin._TABLE)
    assert {kind for _, _, kind in plugin._TABLE} == {"around", "after"}


def test_resolve_sees_through_wrappers() -> None:
    assert plugin.resolve("argparse.ArgumentParser.parse_args").__name__ == "parse_args"
    assert plugin.resolve("pathlib.Path.cwd").__name__ == "cwd"
    assert plugin.resolve("collections.no_such_name") is None


@pytest.mark.real
def test_all_hooks_are_in_place_in_the_real_sglang(real_plugin: None) -> None:
    assert check.missing_hooks(plugin.HOOKS, plugin.resolve) == []


@pytest.mark.real
def test_a_hook_that_is_taken_away_is_missed(real_plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    bare = ScheduleBatch.new_tokens_required_next_decode.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(ScheduleBatch, "new_tokens_required_next_decode", bare)
    assert check.missing_hooks(plugin.HOOKS, plugin.resolve) == [
        "sglang.srt.managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode"
    ]


@pytest.mark.real
def test_a_step_asks_for_a_tree_of_slots_a_request(
    real_plugin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import server_args
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    held = SimpleNamespace(
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=8,
        speculative_ddtree_budget=32,
    )
    monkeypatch.setattr(server_args, "_global_server_args", held)
    batch = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(page_size=1), reqs=[1, 2, 3], is_spec_v2=False
    )
    needed = ScheduleBatch.new_tokens_required_next_decode
    monkeypatch.setattr("sglang.srt.managers.schedule_batch.get_global_server_args", lambda: held)
    batch.spec_algorithm = SpeculativeAlgorithm.from_string("DDTREE")
    assert needed(batch) == 3 * 33
    assert needed(batch, [0]) == 33
    batch.spec_algorithm = SpeculativeAlgorithm.DFLASH
    assert needed(batch) == 3 * 8


@pytest.mark.real
def test_a_refused_request_is_told_by_the_algorithm_it_asked(
    real_plugin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang's own validation, with the hook on it."""
    from sglang.srt import server_args
    from sglang.srt.managers import scheduler
    from sglang.srt.sampling.sampling_params import SamplingParams

    left: list[SamplingParams] = []

    def told(algorithm: str, logprob: bool = False, **changed: Any) -> Any:
        monkeypatch.setattr(
            server_args, "_global_server_args", SimpleNamespace(speculative_algorithm=algorithm)
        )
        req = SimpleNamespace(return_logprob=logprob, sampling_params=SamplingParams(**changed))
        left.append(req.sampling_params)
        return scheduler.validate_dflash_request(req)

    assert told("DDTREE") is None
    assert told("DDTREE", logprob=True) == "DDTREE speculative decoding does not support return_logprob yet."
    assert "does not support min_new_tokens yet" in told("DDTREE", min_new_tokens=3)
    assert told("DDTREE", json_schema="{}").startswith("DDTREE speculative decoding does not support")
    # sglang prefills a refused request all the same: what it was refused for is gone, whatever the reason given
    assert "repetition_penalty" in told("DDTREE", repetition_penalty=1.9)
    assert "return_logprob" in told("DDTREE", logprob=True, repetition_penalty=1.9)
    assert all(kept.min_new_tokens == 0 and kept.repetition_penalty == 1.0 for kept in left)
    assert told("DFLASH", min_new_tokens=3) is None and left[-1].min_new_tokens == 3
    assert told("DFLASH", logprob=True).startswith("DFLASH")


def test_nothing_is_registered_in_another_sglang(real_plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.version
    from sglang.srt.plugins.hook_registry import HookRegistry

    calls: list[object] = []
    monkeypatch.setattr(sglang.version, "__version__", "0.5.12")
    monkeypatch.setattr(HookRegistry, "register", lambda *args: calls.append(args))
    with pytest.raises(DDTreeError, match=r"this is 0\.5\.12"):
        plugin.register()
    assert calls == []
