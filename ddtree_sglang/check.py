"""What DDTREE does not run with, and the self-check that a worker makes before it serves.

Two kinds of error are kept apart here. A *refusal* is about what the user asked for: it is raised before anything is
loaded and says what to change. The *self-check* is about what the engine became: it compares every consumer of the
verify size after loading, because a hook that sglang failed to install is only logged and the server would start,
wrong without a word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = [
    "ALGORITHM",
    "PATCH",
    "SGLANG",
    "SKIP_SELF_CHECK",
    "DDTreeError",
    "block_size",
    "draft_refusals",
    "head_refusals",
    "installed",
    "missing_hooks",
    "model_refusals",
    "neutralise",
    "patch_missing",
    "refusals",
    "refuse",
    "refuse_engine",
    "refuse_model",
    "refuse_strays",
    "refuse_version",
    "request_refusal",
    "self_check",
    "self_check_skipped",
    "size_faults",
    "verify_tokens",
]

ALGORITHM = "DDTREE"
PATCH = "0001-cuda-graph-runner-size-target-verify-by-tree-budget.patch"
SGLANG = "0.5.11"
"""The version whose private names this package reads."""
SKIP_SELF_CHECK = "DDTREE_SKIP_SELF_CHECK"
"""Environment variable: ``1`` starts the server although the self-check fails, to reproduce the crash."""

TREE_MASK_BACKENDS = ("triton",)

_SWITCHES = {
    "enable_dp_attention": "data-parallel attention pads batches in units of the block",
    "enable_two_batch_overlap": "two-batch overlap splits the verify batch",
    "enable_single_batch_overlap": "single-batch overlap is not supported",
    "enable_pdmux": "PD multiplexing keeps several attention backends",
    "enable_lora": "LoRA adapters are sized by the block",
    "enable_torch_compile": "torch.compile was never tried on the verify step",
    "enable_hierarchical_cache": "the hierarchical cache brings back the target's KV without the drafter's",
    "enable_lmcache": "LMCache brings back the target's KV without the drafter's",
    "enable_attn_tp_input_scattered": "inputs scattered over ranks give the drafter a part of each hidden state",
    "strip_thinking_cache": "stripping the thinking part from the cache was never tried with a tree",
    "enable_streaming_session": "streaming sessions were never tried with a tree",
    "enable_deterministic_inference": "the kernel of deterministic inference was never tried with a tree mask",
    "enable_return_hidden_states": "hidden states of a verify step are those of the tree, not of the answer",
    "enable_return_routed_experts": "returning routed experts was never tried with a tree",
    "enable_custom_logit_processor": "a logit processor would not see the tokens on a node's path",
}
"""Switches of sglang that are refused, and why."""


class DDTreeError(ValueError):
    """DDTREE cannot run as asked, or the engine is not what DDTREE needs. The text says what to change."""


def self_check_skipped() -> bool:
    """Whether the environment asks to start in spite of a failed self-check."""
    return os.environ.get(SKIP_SELF_CHECK) == "1"


def verify_tokens(server_args: Any) -> int:
    """Tokens a request that the target verifies in one step: the root and ``budget`` nodes."""
    return int(server_args.speculative_ddtree_budget) + 1


def block_size(server_args: Any) -> int:
    """Tokens a request that the drafter works on; no step can commit more."""
    return int(server_args.speculative_num_draft_tokens)


def refuse_version(version: str, warn: Callable[[str], object]) -> None:
    """Refuse a sglang that this package was not written against: it reads private names of 0.5.11.

    Args:
        version: ``sglang.__version__``. Further parts and local names behind 0.5.11 are let through; for a tree that
            does not know its version (``0.0.0.dev0``) a warning is said.
        warn: called with one line of text.

    Raises:
        DDTreeError: for another version.
    """
    if version.startswith("0.0.0"):
        warn(f"this sglang does not know its version ({version}); DDTREE was written for {SGLANG}")
    elif not re.match(rf"{re.escape(SGLANG)}(?!\d)", version):
        raise DDTreeError(
            f"DDTREE was written for sglang {SGLANG}, this is {version}: use the runtime's own base, or build this one "
            "with overlay: none"
        )


def _flags(a: Any) -> Iterable[str]:
    """Refusals that need no resolved value."""
    budget = a.speculative_ddtree_budget
    if budget is None:
        yield "no tree budget: give --speculative-ddtree-budget, e.g. 32"
    elif budget < 1:
        yield f"--speculative-ddtree-budget {budget} is no tree: give at least block size - 1"
    if a.speculative_ddtree_topk_cap < 1:
        yield f"--speculative-ddtree-topk-cap {a.speculative_ddtree_topk_cap} keeps no candidate: give at least 1"
    if a.speculative_ddtree_budget_schedule not in ("fixed", "adaptive"):
        yield (
            f"--speculative-ddtree-budget-schedule {a.speculative_ddtree_budget_schedule} is unknown: "
            "give fixed or adaptive"
        )
    for name, why in _SWITCHES.items():
        if getattr(a, name):
            yield f"{why}: leave out --{name.replace('_', '-')}"
    if a.pp_size != 1:
        yield f"pipeline parallelism of {a.pp_size}: set --pp-size 1 and use --tp-size"
    if a.attn_cp_size != 1:
        yield f"context parallelism of {a.attn_cp_size}: set --attn-cp-size 1"
    if a.disaggregation_mode != "null":
        yield (
            "prefill/decode disaggregation moves KV without the drafter's: "
            "leave out --disaggregation-mode and serve both in one process"
        )
    if a.moe_dense_tp_size is not None:
        yield "dense layers of another TP size pad batches in units of the block: leave out --moe-dense-tp-size"
    if a.rl_on_policy_target is not None:
        yield "deterministic inference, which it switches on, is not supported: leave out --rl-on-policy-target"
    if a.moe_a2a_backend != "none":
        yield (
            f"expert parallelism over {a.moe_a2a_backend} was never tried with a tree: set --moe-a2a-backend none"
        )
    if a.tokenizer_worker_num != 1:
        yield "tokenizer workers do not load plugins: set --tokenizer-worker-num 1"
    if a.speculative_accept_threshold_single != 1.0 or a.speculative_accept_threshold_acc != 1.0:
        yield (
            "acceptance thresholds below 1 change the distribution and are not implemented: leave out "
            "--speculative-accept-threshold-single and --speculative-accept-threshold-acc"
        )


def _resolved(a: Any) -> Iterable[str]:
    """Refusals about values that sglang fills in.

    The overlap schedule and mixed chunks are no matter of these: under DFLASH's rules, which DDTREE takes, sglang
    switches both off.
    """
    block = block_size(a)
    budget = a.speculative_ddtree_budget
    if block < 2:
        yield f"block size {block} leaves nothing to draft: set --speculative-dflash-block-size to 2 or more"
    elif budget is not None and 1 <= budget < block - 1:
        yield (
            f"--speculative-ddtree-budget {budget} is below block size - 1 = {block - 1}: "
            f"raise it to at least {block - 1}, or lower --speculative-dflash-block-size"
        )
    if a.page_size != 1:
        yield (
            f"page size {a.page_size}: the accepted path is scattered over the slots of a step, and a page is freed "
            "only as a whole; set --page-size 1"
        )
    prefill, decode = a.get_attention_backends()
    for phase, backend in (("prefill", prefill), ("decode", decode)):
        if backend not in TREE_MASK_BACKENDS:
            yield (
                f"attention backend {backend} ({phase}) does not honour a tree mask and would verify the tree as a "
                "chain: set --attention-backend triton (the drafter may keep another: "
                "--speculative-draft-attention-backend)"
            )


def refusals(server_args: Any, *, resolved: bool = True) -> list[str]:
    """Everything in ``server_args`` that DDTREE does not run with, each with what to change.

    ``resolved`` is False while sglang has not yet filled in block size, page size and attention backend.
    """
    found = list(_flags(server_args))
    if resolved:
        found += _resolved(server_args)
    return found


def _raise(found: list[str], about: str) -> None:
    if found:
        raise DDTreeError(f"DDTREE does not run with {about}:\n" + "\n".join(f"  - {line}" for line in found))


def refuse(server_args: Any, *, resolved: bool = True) -> None:
    """Raise :class:`DDTreeError` with all of :func:`refusals`, or return."""
    _raise(refusals(server_args, resolved=resolved), "these arguments")


def refuse_strays(server_args: Any, defaults: Mapping[str, Any]) -> None:
    """Raise :class:`DDTreeError` if a DDTREE flag is set while another algorithm is asked for."""
    strays = [name for name, default in defaults.items() if getattr(server_args, name) != default]
    if strays:
        flags = ", ".join("--" + name.replace("_", "-") for name in strays)
        raise DDTreeError(
            f"{flags} only works with --speculative-algorithm {ALGORITHM}, not with "
            f"{server_args.speculative_algorithm or 'none'}: add it, or leave the flag out"
        )


def model_refusals(model_runner: Any) -> list[str]:
    """What about the target model DDTREE does not run with, each with what to do instead."""
    found: list[str] = []
    if model_runner.mambaish_config is not None:
        found.append(
            "the model has recurrent (Mamba or linear attention) layers, whose state follows one path only: "
            "use --speculative-algorithm DFLASH"
        )
    if model_runner.is_hybrid_swa or (model_runner.sliding_window_size or -1) > 0:
        found.append(
            "the model has sliding-window attention, which the kernel measures by row of the tree instead of by "
            "depth: use --speculative-algorithm DFLASH"
        )
    if model_runner.model_config.use_ngram_embedding:
        found.append(
            "the model embeds a token with those before it in the batch, which are not those before it in the tree: "
            "use --speculative-algorithm DFLASH"
        )
    if getattr(model_runner.model_config.hf_config, "attn_temperature_len", -1) > 0:
        found.append(
            "the model scales attention by position, which the kernel takes from the row of the tree instead of the "
            "depth: use --speculative-algorithm DFLASH"
        )
    if model_runner.model_config.is_encoder_decoder:
        found.append("the model has an encoder: use no speculative decoding")
    return found


def refuse_model(model_runner: Any) -> None:
    """Raise :class:`DDTreeError` with all of :func:`model_refusals`, or return."""
    _raise(model_refusals(model_runner), "this model")


_COUNTED = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
"""Sampling parameters that need a count of the request's tokens -> the value without effect."""


def draft_refusals(draft: Any, requests: int) -> list[str]:
    """What about the loaded drafter DDTREE does not run with.

    Outside of CUDA graphs sglang 0.5.11 hands a drafter its embeddings in bfloat16, whatever its own type
    (``ModelRunner.forward_extend``): a drafter of another type fails as soon as more requests run than its largest
    graph holds. On a CPU, where only tests run, nothing is refused.

    Args:
        draft: the drafter's model runner.
        requests: most requests that may run at once.
    """
    dtype = str(draft.model_config.dtype).removeprefix("torch.")
    if draft.device == "cpu" or dtype == "bfloat16":
        return []
    runner = draft.graph_runner
    held = 0 if runner is None else int(runner.max_bs)
    if requests <= held:
        return []
    limit = f", or --max-running-requests {held}" if held else ""
    text = f"a drafter of {dtype} outside of CUDA graphs, which hold {held} of {requests} requests"
    return [f"{text}: set --dtype bfloat16{limit}"]


def head_refusals(head: Any) -> list[str]:
    """What about the target's output layer the drafter cannot use: it has none of its own."""
    if head is None or not hasattr(head, "weight") or not hasattr(head, "shard_indices"):
        return [
            "the target shows no vocabulary-parallel lm_head with weight and shard_indices, which the drafter needs"
        ]
    dtype = str(head.weight.dtype).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16", "float32"):
        return [
            f"the target's lm_head is quantised ({dtype}), which the drafter cannot read: take a checkpoint without"
        ]
    return []


def refuse_engine(found: list[str]) -> None:
    """Raise :class:`DDTreeError` with what :func:`draft_refusals` and :func:`head_refusals` found, or return."""
    _raise(found, "these models")


def neutralise(sampling: Any) -> None:
    """Take out of a refused request what it was refused for.

    sglang sends a refused request through one prefill all the same, with its own parameters: penalties would compile a
    kernel of theirs there, or fail.
    """
    for name, neutral in _COUNTED.items():
        setattr(sampling, name, neutral)


def request_refusal(sampling: Any) -> str | None:
    """Why a request with these sampling parameters is refused, or None.

    sglang counts a request's tokens for penalties and ``min_new_tokens`` in its plain decode step only, and DFLASH's
    verify step does not: penalties would have no effect and the end of the text would stay forbidden.
    """
    found = [name for name, neutral in _COUNTED.items() if getattr(sampling, name) != neutral]
    if not found:
        return None
    return (
        f"{ALGORITHM} speculative decoding does not support {', '.join(found)} yet: leave it out of the request, or "
        "start the server with --sampling-defaults openai where it is the model's default"
    )


def patch_missing(tokens: int, sized: int) -> str:
    """The text for a CUDA graph runner that holds ``sized`` tokens a request and will be sent ``tokens``."""
    return (
        f"the target's CUDA graph runner is sized for {sized} tokens a request and would be sent {tokens} "
        f"(--speculative-ddtree-budget {tokens - 1} and the root): the first request would end in "
        f'"The size of tensor a ({sized}) must match the size of tensor b ({tokens})". '
        f"The patch {PATCH} is missing from this sglang tree: deploy a runtime that has it, or add "
        "--disable-cuda-graph"
    )


def installed(function: Any, hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is among the wrappers around ``function``.

    sglang's registry keeps a hook in the closure of its wrapper and the wrapped function in ``__wrapped__``.
    """
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        for cell in getattr(function, "__closure__", None) or ():
            try:
                if cell.cell_contents is hook:
                    return True
            except ValueError:  # an empty cell
                continue
        function = getattr(function, "__wrapped__", None)
    return False


def missing_hooks(hooks: Mapping[str, Callable[..., Any]], resolve: Callable[[str], Any]) -> list[str]:
    """Targets among ``hooks`` that do not run their hook. ``resolve`` turns a dotted name into the object."""
    return [target for target, hook in hooks.items() if not installed(resolve(target), hook)]


def size_faults(target: Any, draft: Any, server_args: Any) -> list[str]:
    """Every consumer of the verify size that disagrees with budget + 1 (target) or the block size (drafter).

    Args:
        target, draft: model runners.

    Returns:
        One line a fault, naming what it holds and what it should.
    """
    tokens, block = verify_tokens(server_args), block_size(server_args)
    faults: list[str] = []
    backend = target.attn_backend
    if not getattr(backend, "ddtree_tree_mask", False):
        faults.append(
            f"attention backend {type(backend).__name__} of the target is not known to honour a tree mask: "
            "set --attention-backend triton"
        )
    width, wanted = target.req_to_token_pool.req_to_token.shape[1], target.model_config.context_len + tokens
    if width < wanted:
        faults.append(f"req_to_token is {width} wide, {wanted} are needed near the context limit")
    runner = target.graph_runner
    if runner is not None:
        if runner.num_tokens_per_bs != tokens:
            faults.append(patch_missing(tokens, runner.num_tokens_per_bs))
        else:
            spec = runner.get_spec_info(runner.num_tokens_per_bs)
            if spec.draft_token_num != tokens:
                faults.append(
                    f"the target's graphs are captured for {spec.draft_token_num} tokens a request instead of "
                    f"{tokens}: {PATCH} is applied in part only"
                )
            if spec.custom_mask is None:
                faults.append(
                    "the target's graphs are captured without a mask: the tree would be verified as a chain"
                )
    if backend.num_draft_tokens != tokens:
        faults.append(
            f"attention backend {type(backend).__name__} of the target counts {backend.num_draft_tokens} tokens a "
            f"request instead of {tokens}: it would write part of the rows and raise nothing"
        )
    runner = draft.graph_runner
    if runner is not None and runner.num_tokens_per_bs != block:
        faults.append(
            f"the drafter's CUDA graph runner is sized for {runner.num_tokens_per_bs} tokens a request "
            f"instead of the block size {block}"
        )
    held = getattr(draft.attn_backend, "num_draft_tokens", block)
    if held != block:
        faults.append(f"the drafter's attention backend counts {held} tokens a request instead of {block}")
    return faults


def self_check(faults: list[str], warn: Callable[[str], None]) -> None:
    """Abort on ``faults``, or only ``warn`` where the environment asks for it.

    Raises:
        DDTreeError: naming every fault.
    """
    if not faults:
        return
    listed = "\n".join(f"  - {line}" for line in faults)
    if self_check_skipped():
        warn(f"DDTREE self-check failed, starting all the same, as {SKIP_SELF_CHECK}=1 asks:\n{listed}")
        return
    raise DDTreeError(f"DDTREE self-check failed, nothing is served:\n{listed}")
