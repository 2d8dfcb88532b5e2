"""Refusals, the self-check, and the search for hooks: on stand-ins, without torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from server_arguments import UNTOUCHED

from ddtree_sglang import check
from ddtree_sglang.check import DDTreeError

GOOD: dict[str, Any] = UNTOUCHED | {
    "speculative_algorithm": "DDTREE",
    "speculative_ddtree_budget": 32,
    "speculative_ddtree_topk_cap": 8,
    "speculative_ddtree_budget_schedule": "fixed",
}


def arguments(backends: tuple[str, str] = ("triton", "triton"), **changed: Any) -> SimpleNamespace:
    return SimpleNamespace(get_attention_backends=lambda: backends, **(GOOD | changed))


def test_the_story_s_arguments_are_taken() -> None:
    assert check.refusals(arguments()) == []
    check.refuse(arguments())


@pytest.mark.parametrize(
    ("changed", "change"),
    [
        ({"speculative_ddtree_budget": None}, "give --speculative-ddtree-budget"),
        ({"speculative_ddtree_budget": 0}, "give at least block size - 1"),
        ({"speculative_ddtree_budget": 6}, "raise it to at least 7"),
        ({"speculative_ddtree_topk_cap": 0}, "give at least 1"),
        ({"speculative_ddtree_budget_schedule": "wild"}, "give fixed or adaptive"),
        ({"speculative_num_draft_tokens": 1}, "set --speculative-dflash-block-size to 2 or more"),
        ({"enable_dp_attention": True}, "leave out --enable-dp-attention"),
        ({"pp_size": 2}, "set --pp-size 1"),
        ({"attn_cp_size": 2}, "set --attn-cp-size 1"),
        ({"enable_two_batch_overlap": True}, "leave out --enable-two-batch-overlap"),
        ({"enable_single_batch_overlap": True}, "leave out --enable-single-batch-overlap"),
        ({"enable_pdmux": True}, "leave out --enable-pdmux"),
        ({"disaggregation_mode": "decode"}, "leave out --disaggregation-mode"),
        ({"enable_lora": True}, "leave out --enable-lora"),
        ({"enable_torch_compile": True}, "leave out --enable-torch-compile"),
        ({"enable_hierarchical_cache": True}, "leave out --enable-hierarchical-cache"),
        ({"enable_lmcache": True}, "leave out --enable-lmcache"),
        ({"enable_attn_tp_input_scattered": True}, "leave out --enable-attn-tp-input-scattered"),
        ({"strip_thinking_cache": True}, "leave out --strip-thinking-cache"),
        ({"moe_dense_tp_size": 1}, "leave out --moe-dense-tp-size"),
        ({"enable_streaming_session": True}, "leave out --enable-streaming-session"),
        ({"enable_deterministic_inference": True}, "leave out --enable-deterministic-inference"),
        ({"enable_return_hidden_states": True}, "leave out --enable-return-hidden-states"),
        ({"enable_return_routed_experts": True}, "leave out --enable-return-routed-experts"),
        ({"enable_custom_logit_processor": True}, "leave out --enable-custom-logit-processor"),
        ({"rl_on_policy_target": "fsdp"}, "leave out --rl-on-policy-target"),
        ({"moe_a2a_backend": "deepep"}, "set --moe-a2a-backend none"),
        ({"tokenizer_worker_num": 4}, "set --tokenizer-worker-num 1"),
        ({"speculative_accept_threshold_acc": 0.9}, "--speculative-accept-threshold-acc"),
        ({"page_size": 64}, "set --page-size 1"),
        ({"backends": ("triton", "trtllm_mla")}, "set --attention-backend triton"),
        ({"backends": ("fa3", "fa3")}, "set --attention-backend triton"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_each_refusal_says_what_to_change(changed: dict[str, Any], change: str) -> None:
    with pytest.raises(DDTreeError) as raised:
        check.refuse(arguments(**changed))
    assert change in str(raised.value)
    assert str(raised.value).startswith("DDTREE does not run with these arguments:\n  - ")


def test_a_budget_of_block_size_minus_one_is_the_least() -> None:
    assert check.refusals(arguments(speculative_ddtree_budget=7)) == []


def test_all_refusals_are_told_at_once() -> None:
    assert len(check.refusals(arguments(page_size=16, pp_size=2, speculative_ddtree_budget=3))) == 3


def test_what_is_not_resolved_yet_is_not_judged() -> None:
    pending = arguments(page_size=None, speculative_num_draft_tokens=None, backends=(None, None))
    assert check.refusals(pending, resolved=False) == []


def test_a_stray_flag_is_named() -> None:
    with pytest.raises(DDTreeError, match=r"--speculative-ddtree-budget only works with .* not with EAGLE"):
        check.refuse_strays(arguments(speculative_algorithm="EAGLE"), {"speculative_ddtree_budget": None})


def model(**changed: Any) -> SimpleNamespace:
    config = SimpleNamespace(
        is_encoder_decoder=changed.pop("is_encoder_decoder", False),
        use_ngram_embedding=changed.pop("use_ngram_embedding", False),
        hf_config=SimpleNamespace(**changed.pop("hf_config", {})),
    )
    known = {"mambaish_config": None, "is_hybrid_swa": False, "sliding_window_size": None}
    return SimpleNamespace(model_config=config, **(known | changed))


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"mambaish_config": object()}, "recurrent"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"sliding_window_size": 4096}, "sliding-window"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"use_ngram_embedding": True}, "embeds a token with those before it"),
        ({"hf_config": {"attn_temperature_len": 1024}}, "scales attention by position"),
    ],
)
def test_models_that_a_tree_does_not_fit(changed: dict[str, Any], word: str) -> None:
    with pytest.raises(DDTreeError, match=word):
        check.refuse_model(model(**changed))


def test_a_plain_model_fits() -> None:
    assert check.model_refusals(model()) == []
    assert check.model_refusals(model(sliding_window_size=-1)) == []


def sampling(**changed: Any) -> SimpleNamespace:
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    return SimpleNamespace(**(neutral | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": -1.0},
        {"repetition_penalty": 1.05},
        {"min_new_tokens": 3},
    ],
    ids=str,
)
def test_a_request_that_needs_its_tokens_counted_is_refused(changed: dict[str, Any]) -> None:
    (name,) = changed
    refused = check.request_refusal(sampling(**changed))
    assert refused is not None and f"does not support {name} yet" in refused
    assert check.request_refusal(sampling()) is None


def test_a_refused_request_loses_what_it_was_refused_for() -> None:
    asked = sampling(repetition_penalty=1.9, min_new_tokens=3, frequency_penalty=0.1, presence_penalty=0.1)
    check.neutralise(asked)
    assert vars(asked) == vars(sampling())


def drafter(dtype: str = "torch.float16", most: int | None = 8, device: str = "cuda") -> SimpleNamespace:
    return SimpleNamespace(
        device=device,
        model_config=SimpleNamespace(dtype=dtype),
        graph_runner=None if most is None else SimpleNamespace(max_bs=most),
    )


def test_a_drafter_that_is_not_bfloat16_must_stay_within_its_graphs() -> None:
    (fault,) = check.draft_refusals(drafter(), 48)
    assert "float16 outside of CUDA graphs, which hold 8 of 48 requests" in fault
    assert fault.endswith("set --dtype bfloat16, or --max-running-requests 8")
    (fault,) = check.draft_refusals(drafter(most=None), 1)
    assert fault.endswith("set --dtype bfloat16")
    assert check.draft_refusals(drafter(), 8) == []
    assert check.draft_refusals(drafter("torch.bfloat16", None), 48) == []
    assert check.draft_refusals(drafter("torch.float32", None, "cpu"), 48) == []
    with pytest.raises(DDTreeError, match="DDTREE does not run with these models:\n  - a drafter of float16"):
        check.refuse_engine(check.draft_refusals(drafter(), 48))


def test_the_output_layer_is_looked_at_before_the_first_request() -> None:
    def head(dtype: str) -> SimpleNamespace:
        return SimpleNamespace(weight=SimpleNamespace(dtype=dtype), shard_indices=object())

    assert check.head_refusals(head("torch.bfloat16")) == check.head_refusals(head("torch.float32")) == []
    for none in (None, SimpleNamespace(qweight=1), SimpleNamespace(weight=1)):
        assert "no vocabulary-parallel lm_head" in check.head_refusals(none)[0]
    assert "quantised (float8_e4m3fn)" in check.head_refusals(head("torch.float8_e4m3fn"))[0]


class Graphs:
    """A CUDA graph runner of ``size`` tokens a request, captured for ``spec`` of them."""

    def __init__(self, size: int, spec: int | None = None, masked: bool = True) -> None:
        self.num_tokens_per_bs = size
        self.spec = size if spec is None else spec
        self.masked = masked

    def get_spec_info(self, tokens: int) -> SimpleNamespace:
        return SimpleNamespace(draft_token_num=self.spec, custom_mask=object() if self.masked else None)


def engine(
    graphs: Graphs | None = None,
    draft_graphs: Graphs | None = None,
    tokens: int = 33,
    draft_tokens: int = 8,
    width: int = 1033,
    tree_mask: bool = True,
) -> list[str]:
    """Faults of an engine with budget 32, block size 8 and a context of 1000."""
    target = SimpleNamespace(
        attn_backend=SimpleNamespace(num_draft_tokens=tokens, ddtree_tree_mask=tree_mask),
        req_to_token_pool=SimpleNamespace(req_to_token=SimpleNamespace(shape=(4, width))),
        model_config=SimpleNamespace(context_len=1000),
        graph_runner=graphs,
    )
    draft = SimpleNamespace(
        attn_backend=SimpleNamespace(num_draft_tokens=draft_tokens), graph_runner=draft_graphs
    )
    return check.size_faults(target, draft, arguments())


def test_an_engine_that_was_told_everything_has_no_fault() -> None:
    assert engine() == []
    assert engine(Graphs(33), Graphs(8)) == []


def test_the_missing_patch_is_named_with_the_text_of_the_crash() -> None:
    (fault,) = engine(Graphs(8), Graphs(8))
    assert check.PATCH in fault
    assert "The size of tensor a (8) must match the size of tensor b (33)" in fault


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"graphs": Graphs(33, spec=8)}, "applied in part only"),
        ({"graphs": Graphs(33, masked=False)}, "without a mask"),
        ({"draft_graphs": Graphs(33)}, "drafter's CUDA graph runner is sized for 33"),
        ({"tokens": 8}, "counts 8 tokens a request instead of 33"),
        ({"draft_tokens": 33}, "drafter's attention backend counts 33"),
        ({"width": 1032}, "req_to_token is 1032 wide, 1033 are needed"),
        ({"tree_mask": False}, "set --attention-backend triton"),
    ],
)
def test_every_consumer_is_compared(changed: dict[str, Any], word: str) -> None:
    (fault,) = engine(**changed)
    assert word in fault


def test_the_self_check_aborts_unless_it_is_to_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(check.SKIP_SELF_CHECK, raising=False)
    warned: list[str] = []
    check.self_check([], warned.append)
    with pytest.raises(DDTreeError, match="nothing is served:\n  - one\n  - two"):
        check.self_check(["one", "two"], warned.append)
    assert warned == []
    monkeypatch.setenv(check.SKIP_SELF_CHECK, "1")
    check.self_check(["one", "two"], warned.append)
    (text,) = warned
    assert text.startswith("DDTREE self-check failed, starting all the same") and text.endswith(
        "\n  - one\n  - two"
    )
    assert check.SKIP_SELF_CHECK in text
    assert "nothing is served" not in text, "it is"


def wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """As sglang's registry wraps."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


def original() -> None:
    """A function of sglang."""


def one(kept: Callable[..., Any]) -> None:
    """A hook."""


def two(kept: Callable[..., Any]) -> None:
    """A hook of another plugin."""


def test_a_hook_is_found_under_the_hooks_of_others() -> None:
    assert check.installed(wrapped(original, one), one)
    assert check.installed(wrapped(wrapped(original, one), two), one)
    assert not check.installed(wrapped(original, two), one)
    assert not check.installed(original, one)
    assert not check.installed(None, one)


def test_missing_hooks_are_named() -> None:
    there: dict[str, Any] = {"a.b": wrapped(original, one), "a.c": original, "a.d": None}
    assert check.missing_hooks({"a.b": one, "a.c": one, "a.d": two}, there.__getitem__) == ["a.c", "a.d"]


@pytest.mark.parametrize("version", ["0.5.11", "0.5.11.post1", "0.5.11+ours"])
def test_the_version_that_was_read_is_taken(version: str) -> None:
    said: list[str] = []
    check.refuse_version(version, said.append)
    assert said == []


@pytest.mark.parametrize("version", ["0.5.12", "0.5.1", "0.5.110", "1.5.11"])
def test_another_version_of_sglang_is_refused(version: str) -> None:
    with pytest.raises(
        DDTreeError, match=rf"written for sglang 0\.5\.11, this is {version}: .*overlay: none"
    ):
        check.refuse_version(version, pytest.fail)


def test_a_tree_without_a_version_is_run_with_a_warning() -> None:
    said: list[str] = []
    check.refuse_version("0.0.0.dev0", said.append)
    assert said == ["this sglang does not know its version (0.0.0.dev0); DDTREE was written for 0.5.11"]
