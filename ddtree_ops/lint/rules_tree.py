"""Rules about speculation, attention, parallelism and the memory they take."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ddtree_ops.attention import CHAIN_BACKENDS, has_mla
from ddtree_ops.lint.model import Case, Cite, Found, Severity, rule

__all__ = ["GraphSizes", "candidates", "graph_sizes", "mask_bytes"]

_ARGS = "srt/server_args.py"
_RUNNER = "srt/model_executor/cuda_graph_runner.py"
_ATTENTION = "srt/layers/attention/"
_TRITON = "set args.attention-backend: triton"
_KIMI = re.compile(r"kimi[-_. ]?k2\.[56]", re.IGNORECASE)
_KIMI_CONTEXT, _KIMI_VOCABULARY = 262144, 163840
_RUNNING = 48
_LONGEST = 1 << 16
"""Batch size from which on the list of graphs is not written out: no engine gets that far."""
_GIB = float(1 << 30)


def _mla(case: Case) -> bool:
    return has_mla(case.service.model)


# --- the algorithm -----------------------------------------------------------------------------------------


@rule(
    "algorithm",
    Severity.ERROR,
    "a speculative algorithm that the runtime does not have",
    reason="The released sglang 0.5.11 has DFLASH, the linear drafter, and no DDTREE; the overlay of this project adds it. "
    "argparse ends the process with exit status 2.",
    sources=[Cite(_ARGS, 5367, 'choices=["DFLASH", "EAGLE"'), "the runtime's own add_argument calls"],
)
def _algorithm(case: Case) -> Iterator[Found]:
    given = case.arg("speculative-algorithm")
    if given is None or not given.typed or given.flag is None or given.flag.allows(case.algorithm):
        return
    runtime = case.target.runtime
    known = ", ".join(str(choice) for choice in given.flag.choices or ())
    change = (
        f"set runtimes.{runtime.name}.base to a tree or wheel that has {case.algorithm}; or, if an sglang plugin in the "
        f"venv adds it, declare runtimes.{runtime.name}.plugin_flags: {{speculative-algorithm: [{case.algorithm}], ...}}"
    )
    if case.tree and runtime.overlay == "none":
        change = f"remove runtimes.{runtime.name}.overlay: the overlay adds {case.algorithm}; or {change}"
    yield Found(f"runtime {runtime.name} has no {case.algorithm} (it has {known})", change, given.path)


@rule(
    "graph-size",
    Severity.WARN,
    "DDTREE on a graph runner that is sized by the draft block",
    reason="The target-verify graph holds block_size tokens a request and is sent budget + 1: the first request kills the "
    "engine (The size of tensor a must match the size of tensor b). The overlay of this project finds it at the end of "
    "the load and does not start.",
    sources=[Cite(_RUNNER, 630, "self.num_tokens_per_bs = self.speculative_num_draft_tokens"), "patch 0001"],
)
def _graph_size(case: Case) -> Iterator[Found]:
    speculative = case.service.speculative
    if not case.tree or speculative is None or case.facts.sized_by != "block":
        return
    if case.verify_tokens not in (None, speculative.block_size):
        yield Found(
            f"the graph runner holds {speculative.block_size} tokens a request and is sent {case.verify_tokens}",
            "use a runtime with patch 0001: remove the key patches of the runtime, then it has all of its series",
            ("runtime",),
        )


@rule(
    "tree-size",
    Severity.ERROR,
    "a tree that cannot hold one whole draft",
    reason="The drafter proposes block_size - 1 tokens in a row; a smaller tree verifies less than the linear drafter does.",
    sources=["the DDTREE algorithm: budget >= block_size - 1"],
)
def _tree_size(case: Case) -> Iterator[Found]:
    speculative = case.service.speculative
    if not case.tree or speculative is None or speculative.budget is None:
        return
    least = speculative.block_size - 1
    if speculative.budget < least:
        yield Found(
            f"budget {speculative.budget} is less than block_size - 1 = {least}",
            f"set speculative.budget to {least} or more",
            ("speculative", "budget"),
        )
    elif speculative.budget == least:
        yield Found(
            f"budget {speculative.budget} = block_size - 1: exactly one draft, so nothing can branch without losing depth",
            "raise speculative.budget to gain from the tree",
            ("speculative", "budget"),
            Severity.INFO,
            reason="The verify step sends block_size tokens, as the linear drafter does. It is the one budget that the "
            "unpatched graph runner serves: that it works proves nothing of larger ones.",
        )


@rule(
    "tree-width",
    Severity.WARN,
    "a budget that the tree can never fill",
    reason="A tree with K candidates a position and block_size - 1 positions has K + K^2 + ... nodes at most; the rest of "
    "the budget is padding that is computed for nothing.",
    sources=["the DDTREE algorithm"],
)
def _tree_width(case: Case) -> Iterator[Found]:
    speculative = case.service.speculative
    if not case.tree or speculative is None or None in (speculative.budget, speculative.topk_cap):
        return
    budget, cap, depth = speculative.budget or 0, speculative.topk_cap or 0, speculative.block_size - 1
    most, level = (depth, depth) if cap == 1 else (0, 0)
    while most < budget and level < depth:
        level += 1
        most += cap**level
    if most < budget:
        yield Found(
            f"topk_cap {cap} and {depth} positions give at most {most} nodes, the budget is {budget}",
            f"raise speculative.topk_cap, or lower speculative.budget to {most}",
            ("speculative", "topk_cap"),
        )


@rule(
    "no-effect",
    Severity.WARN,
    "flags that the block drafters overrule",
    reason="DFLASH (and DDTREE, which is built on it) sets these itself and only logs so.",
    sources=[
        Cite(_ARGS, 3344, "DFLASH only supports speculative_num_steps == 1"),
        Cite(_ARGS, 3444, "Mixed chunked prefill is disabled"),
    ],
)
def _no_effect(case: Case) -> Iterator[Found]:
    for key in ("speculative-num-steps", "speculative-eagle-topk") if case.block else ():
        given = case.arg(key)
        if given is not None and case.number(key) != 1:
            yield Found(
                f"--{given.key} is set to 1 under {case.algorithm}", f"remove args.{given.key}", given.path
            )
    mixed = case.arg("enable-mixed-chunk")
    if case.block and mixed is not None:
        yield Found(
            f"mixed chunks are switched off under {case.algorithm}", f"remove args.{mixed.key}", mixed.path
        )


@rule(
    "draft-window",
    Severity.ERROR,
    "a draft window shorter than the block",
    reason="The start ends with a ValueError.",
    sources=[Cite(_ARGS, 3423, "if window_size < draft_tokens")],
)
def _draft_window(case: Case) -> Iterator[Found]:
    given, window = (
        case.arg("speculative-dflash-draft-window-size"),
        case.number("speculative-dflash-draft-window-size"),
    )
    speculative = case.service.speculative
    if (
        case.block
        and speculative
        and given is not None
        and window is not None
        and window < speculative.block_size
    ):
        yield Found(
            f"a window of {window:g} tokens is shorter than block_size {speculative.block_size}",
            f"give it at least {speculative.block_size}, or remove it",
            given.path,
        )


@rule(
    "draft-backend",
    Severity.WARN,
    "an attention backend that the drafter cannot use",
    reason="The draft worker falls back to flashinfer and only logs so.",
    sources=[
        Cite(
            "srt/speculative/dflash_worker.py",
            102,
            'supported_draft_backends = ("flashinfer", "fa3", "fa4", "triton")',
        )
    ],
)
def _draft_backend(case: Case) -> Iterator[Found]:
    given = case.arg("speculative-draft-attention-backend")
    if (
        case.block
        and given is not None
        and given.words
        and given.words[0] not in ("flashinfer", "fa3", "fa4", "triton")
    ):
        yield Found(
            f"the drafter does not run on {given.words[0]}: it takes flashinfer",
            "choose flashinfer, fa3, fa4 or triton",
            given.path,
        )


# --- attention ---------------------------------------------------------------------------------------------


def _verify_backend(case: Case) -> tuple[str, tuple[str, ...]] | None:
    """The backend of the verify step and where it is set; None where sglang chooses."""
    side = "decode" if case.text("speculative-attention-mode") == "decode" else "prefill"
    for key in (f"{side}-attention-backend", "attention-backend"):
        given = case.arg(key)
        if given is not None and given.words:
            return given.words[0], given.path
    return None


@rule(
    "attention-backend",
    Severity.ERROR,
    "an attention backend that ignores the tree mask",
    reason="It verifies the tree as if it were a chain, without an error: answers go wrong silently.",
    sources=[
        Cite(_ATTENTION + "hybrid_attn_backend.py", 47, 'speculative_attention_mode == "decode"'),
        Cite(_ATTENTION + "flashinfer_mla_backend.py", 857, "TODO: Support topk > 1 with custom mask"),
        Cite(_ATTENTION + "flashinfer_backend.py", 608, "`custom_mask_buf` is initialized"),
    ],
)
def _attention_backend(case: Case) -> Iterator[Found]:
    chosen = _verify_backend(case)
    if not case.tree or chosen is None:
        return
    backend, path = chosen
    if backend == "triton":
        return
    if backend in CHAIN_BACKENDS:
        yield Found(f"{backend} ignores the tree mask", _TRITON, path)
    elif backend == "flashinfer" and _mla(case):
        yield Found("flashinfer is flashinfer_mla for this model, which ignores the tree mask", _TRITON, path)
    elif case.overlay:
        yield Found(f"the overlay takes no other backend than triton, not {backend}", _TRITON, path)
    elif backend in ("flashinfer", "fa3", "fa4"):
        how = (
            "only where the mask is there when the graphs are captured, and never for a model with MLA"
            if backend == "flashinfer"
            else "only as a cascade of topk > 1"
        )
        yield Found(
            f"{backend} honours the tree mask {how}",
            f"{_TRITON}, or prove it with a lossless check and ignore this rule",
            path,
            Severity.WARN,
        )
    else:
        yield Found(f"it is not known whether {backend} honours the tree mask", _TRITON, path, Severity.WARN)


@rule(
    "default-backend",
    Severity.ERROR,
    "DDTREE on data-centre Blackwell or Hopper without an explicit backend",
    reason="Left to itself sglang takes trtllm_mla for the DeepSeek-V3 family (Kimi K2 included) on sm100 and sm103, and "
    "flashinfer for other models. trtllm_mla ignores the tree mask, without an error: answers go wrong silently.",
    sources=[Cite(_ARGS, 1774, 'self.attention_backend = "trtllm_mla"')],
)
def _default_backend(case: Case) -> Iterator[Found]:
    if not case.tree or _verify_backend(case) is not None:
        return
    if case.sm100:
        yield Found(
            f"on {case.arch} sglang picks trtllm_mla for this kind of model by itself", _TRITON, ("args",)
        )
    elif case.arch == "sm90":
        yield Found(
            "on sm90 sglang picks fa3 by itself",
            _TRITON,
            ("args",),
            Severity.ERROR if case.overlay else Severity.WARN,
            reason="The overlay refuses it at the start."
            if case.overlay
            else "fa3 honours the tree mask only as a cascade of topk > 1.",
        )
    elif case.overlay and case.arch and not _mla(case):
        yield Found(
            "for a model without MLA sglang picks flashinfer by itself where it is installed",
            _TRITON,
            ("args",),
            Severity.WARN,
            reason="The overlay refuses it at the start.",
        )
    elif not case.arch:
        yield Found(
            "which backend sglang picks cannot be told: the inventory does not say what GPU the host has",
            f"describe hosts.{case.target.host.name}.gpu, or {_TRITON}",
            ("args",),
            Severity.INFO,
        )


MAX_CANDIDATES = 65536
_KEY_BITS, _COST_BITS = 63, 42
_TOPK_CAP = 8


def candidates(depth: int, width: int, budget: int) -> int:
    """Prefixes that can be among the ``budget`` likeliest, as ``ddtree_sglang.tree`` counts them.

    :param depth: block size - 1. :param width: branches of a node.
    :returns: exact up to ``MAX_CANDIDATES``, else some number above it.
    """
    level, found = [(1, 0)], 0
    for _ in range(depth):
        following: list[tuple[int, int]] = []
        for product, before in level:
            most = min(width, (budget - before) // product, MAX_CANDIDATES + 1 - found)
            following += [(product * rank, before + product * rank) for rank in range(1, most + 1)]
            found += most
            if found > MAX_CANDIDATES:
                return found
        if not following:
            break
        level = following
    return found


def _too_large(case: Case) -> Iterator[Found]:
    speculative = case.service.speculative
    if speculative is None or speculative.budget is None:
        return
    budget, depth = speculative.budget, speculative.block_size - 1
    width = min(speculative.topk_cap or _TOPK_CAP, budget)
    found = candidates(depth, width, budget)
    tree = f"a tree of {budget} nodes over {depth} depths and {width} branches"
    said = ""
    if found > MAX_CANDIDATES:
        said = f"{tree} has more than {MAX_CANDIDATES} candidates"
    elif (depth << _COST_BITS + max(found, budget).bit_length()) >= 1 << _KEY_BITS:
        said = f"{tree} does not fit into a key of {_KEY_BITS} bits"
    if said:
        yield Found(said, "lower speculative.budget, or speculative.topk_cap", ("speculative", "budget"))


_REFUSED: dict[str, tuple[float | str | None, str]] = {
    "attn-cp-size": (1.0, "context parallelism"),
    "enable-attn-tp-input-scattered": (None, "inputs scattered over ranks"),
    "enable-custom-logit-processor": (None, "logit processors of requests"),
    "enable-deterministic-inference": (None, "deterministic inference"),
    "enable-hierarchical-cache": (None, "the hierarchical cache"),
    "enable-lmcache": (None, "LMCache"),
    "enable-lora": (None, "LoRA adapters"),
    "enable-pdmux": (None, "PD multiplexing"),
    "enable-return-hidden-states": (None, "hidden states in answers"),
    "enable-return-routed-experts": (None, "routed experts in answers"),
    "enable-single-batch-overlap": (None, "single-batch overlap"),
    "enable-streaming-session": (None, "streaming sessions"),
    "enable-torch-compile": (None, "torch.compile"),
    "lora-paths": (None, "LoRA adapters, which it switches on"),
    "moe-a2a-backend": ("none", "an all-to-all backend for experts"),
    "moe-dense-tp-size": (None, "dense layers of another tensor-parallel size"),
    "rl-on-policy-target": (None, "deterministic inference, which it switches on"),
    "speculative-accept-threshold-acc": (1.0, "an acceptance threshold below 1"),
    "speculative-accept-threshold-single": (1.0, "an acceptance threshold below 1"),
    "strip-thinking-cache": (None, "thinking parts stripped from the cache"),
    "tokenizer-worker-num": (1.0, "several tokenizer workers, which load no plugins"),
}
"""Flags that the overlay refuses -> the value that it takes (None: none), and what they are."""


@rule(
    "overlay-refuses",
    Severity.ERROR,
    "what the DDTREE of the overlay refuses, and variables that switch it or its check off",
    reason="The start ends with a text that says what to change.",
    sources=["ddtree_sglang/check.py", "sglang 0.5.11 srt/plugins/__init__.py"],
)
def _overlay_refuses(case: Case) -> Iterator[Found]:
    if not case.overlay:
        return
    yield from _too_large(case)
    for key, (taken, what) in _REFUSED.items():
        given = case.arg(key)
        if given is None or (not given.words and taken is not None):
            continue
        value = given.words[0] if isinstance(taken, str) else case.number(key)
        if taken is None or value not in (None, taken):
            yield Found(f"DDTREE does not run with {what}", f"remove args.{given.key}", given.path)
    verify = _verify_backend(case)
    for key in ("prefill-attention-backend", "decode-attention-backend"):
        given = case.arg(key)
        if (
            given is not None
            and given.words not in ((), ("triton",))
            and (verify or ("", ()))[1] != given.path
        ):
            yield Found(
                f"the overlay takes no other backend than triton, not {given.words[0]}",
                _TRITON.replace("attention-backend", key),
                given.path,
            )
    plugins = case.service.environment.get("SGLANG_PLUGINS", "")
    if plugins and "ddtree" not in [name.strip() for name in plugins.split(",")]:
        yield Found(
            "SGLANG_PLUGINS leaves the plugin ddtree out, so that the runtime has no DDTREE",
            "add ddtree to it, or remove it",
            ("environment", "SGLANG_PLUGINS"),
            reason="sglang loads only the plugins that it lists; argparse then ends the process with exit status 2.",
        )
    if case.service.environment.get("DDTREE_SKIP_SELF_CHECK") == "1":
        yield Found(
            "the self-check of the DDTREE worker is switched off",
            "remove it once the crash is reproduced",
            ("environment", "DDTREE_SKIP_SELF_CHECK"),
            Severity.WARN,
            reason="An engine whose parts disagree about the size of the tree then serves: it crashes, or answers wrong.",
        )


_VARIABLES = {"DDTREE_SKIP_SELF_CHECK": "1", "DDTREE_TREE_GRAPH": "0", "DDTREE_TIMES": "1"}
"""Variables that the overlay reads -> the one value that has an effect."""


@rule(
    "overlay-variables",
    Severity.WARN,
    "a variable DDTREE_... that nothing reads, or with a value that has no effect",
    reason="The engine starts as if it were not there.",
    sources=["ddtree_sglang/check.py, grow.py, times.py"],
)
def _overlay_variables(case: Case) -> Iterator[Found]:
    if not case.overlay:
        return
    for name, value in case.service.environment.items():
        if not name.startswith("DDTREE_"):
            continue
        effect = _VARIABLES.get(name)
        if effect is None:
            near = difflib.get_close_matches(name, _VARIABLES, n=1)
            change = f"write {near[0]}" if near else f"the overlay reads {', '.join(_VARIABLES)}"
            yield Found(f"the overlay reads no variable {name}", change, ("environment", name))
        elif value != effect and value not in ("", "0", "1"):
            change = (
                "remove it" if name == "DDTREE_SKIP_SELF_CHECK" else f'set it to "{effect}", or remove it'
            )
            yield Found(f"{name}={value} has no effect", change, ("environment", name))


@rule(
    "fa3-arch",
    Severity.ERROR,
    "FlashAttention 3 on a GPU that it does not run on",
    reason="It asserts compute capability 8 or 9 when the model is set up, after the weights were loaded.",
    sources=[Cite(_ATTENTION + "attention_registry.py", 133, "SM>=80 and SM<=90")],
)
def _fa3_arch(case: Case) -> Iterator[Found]:
    for key in ("attention-backend", "prefill-attention-backend", "decode-attention-backend"):
        given = case.arg(key)
        if given is not None and given.words == ("fa3",) and case.arch and case.arch[2:3] not in ("8", "9"):
            yield Found(
                f"fa3 does not run on {case.arch}", _TRITON.replace("attention-backend", key), given.path
            )


@rule(
    "flex-attention",
    Severity.ERROR,
    "speculation with flex_attention",
    reason="The start ends with an AssertionError.",
    sources=[Cite(_ARGS, 2566, "not supported with Flex Attention backend")],
)
def _flex(case: Case) -> Iterator[Found]:
    given = case.arg("attention-backend")
    if case.algorithm and given is not None and given.words == ("flex_attention",):
        yield Found("flex_attention refuses speculative decoding", _TRITON, given.path)


@rule(
    "page-size",
    Severity.ERROR,
    "DDTREE with pages of more than one token",
    reason="Accepted nodes of a tree do not lie side by side, so whole pages cannot be kept: the cache would hold wrong tokens.",
    sources=["the DDTREE algorithm: slots are kept and freed one by one"],
)
def _page_size(case: Case) -> Iterator[Found]:
    given = case.arg("page-size")
    if case.tree and given is not None and case.number("page-size") not in (None, 1):
        yield Found(
            f"page size {given.words[0]}: DDTREE works with page size 1 only",
            f"remove args.{given.key}",
            given.path,
        )


@rule(
    "chunk-pages",
    Severity.ERROR,
    "a prefill chunk that is not a whole number of pages",
    reason="The start ends with an AssertionError.",
    sources=[Cite(_ARGS, 6826, "chunked_prefill_size must be divisible by page_size")],
)
def _chunk_pages(case: Case) -> Iterator[Found]:
    chunk, page = case.whole("chunked-prefill-size", 0), case.whole("page-size", 1)
    given = case.arg("chunked-prefill-size")
    if given is not None and chunk > 0 and page > 0 and chunk % page:
        yield Found(
            f"chunks of {chunk} tokens are no whole number of pages of {page}",
            "choose a multiple",
            given.path,
        )


# --- parallelism -------------------------------------------------------------------------------------------


@rule(
    "dp-attention",
    Severity.ERROR,
    "the block drafters with dp attention",
    reason="The start ends with a ValueError.",
    sources=[
        Cite(_ARGS, 3322, "DFLASH speculative decoding does not support dp attention"),
        Cite(_ARGS, 2930, "self.enable_dp_attention = False"),
    ],
)
def _dp_attention(case: Case) -> Iterator[Found]:
    given = case.arg("enable-dp-attention")
    if case.block and given is not None and case.whole("dp-size", 1) > 1:
        yield Found(
            f"{case.algorithm} does not work with dp attention", f"remove args.{given.key}", given.path
        )


@rule(
    "pipeline-parallel",
    Severity.ERROR,
    "speculation with pipeline parallelism",
    reason="The start ends with an error.",
    sources=[
        Cite(_ARGS, 3327, "DFLASH speculative decoding only supports pp_size == 1"),
        Cite(_ARGS, 6788, "self.disable_overlap_schedule and self.speculative_algorithm is None"),
    ],
)
def _pipeline(case: Case) -> Iterator[Found]:
    given = case.arg("pp-size")
    if case.algorithm and given is not None and case.whole("pp-size", 1) > 1:
        yield Found("speculation works with one pipeline stage only", f"remove args.{given.key}", given.path)


@rule(
    "two-batch-overlap",
    Severity.ERROR,
    "two-batch overlap with DDTREE, or without an all-to-all backend",
    reason="Its graphs are sized for one token a request; without an all-to-all backend the start ends with a ValueError.",
    sources=[
        Cite(_RUNNER, 504, "num_tokens_per_bs = 1  # tbo not test"),
        Cite(_ARGS, 6939, "When enabling two batch overlap, moe_a2a_backend cannot be 'none'"),
    ],
)
def _two_batch(case: Case) -> Iterator[Found]:
    given = case.arg("enable-two-batch-overlap")
    if given is None:
        return
    if case.tree:
        yield Found("two-batch overlap does not know a tree", f"remove args.{given.key}", given.path)
    elif (case.text("moe-a2a-backend") or "none") == "none":
        yield Found("two-batch overlap needs an all-to-all backend", "set args.moe-a2a-backend", given.path)


@rule(
    "disaggregation",
    Severity.ERROR,
    "DDTREE with prefill and decode on different servers",
    reason="The draft state is not sent along, so the decode server has no draft to verify.",
    sources=["the DDTREE algorithm: drafter and target share one worker"],
)
def _disaggregation(case: Case) -> Iterator[Found]:
    given = case.arg("disaggregation-mode")
    if case.tree and given is not None and given.words not in ((), ("null",)):
        yield Found(f"a {given.words[0]} server cannot run DDTREE", f"remove args.{given.key}", given.path)


@rule(
    "grammar",
    Severity.WARN,
    "a grammar backend under a block drafter",
    reason="Every request with a JSON schema, regular expression or structural tag is answered with 400.",
    sources=[Cite("srt/managers/scheduler.py", 316, "grammar-constrained decoding yet")],
)
def _grammar(case: Case) -> Iterator[Found]:
    given = case.arg("grammar-backend")
    if case.block and given is not None and given.words not in ((), ("none",)):
        yield Found(
            f"{case.algorithm} refuses grammar-constrained requests whatever the backend",
            f"set args.{given.key} to none, and serve such requests elsewhere",
            given.path,
        )


@rule(
    "hybrid-model",
    Severity.ERROR,
    "DDTREE on a hybrid (mamba, linear attention) model",
    reason="A recurrent state cannot be taken back along the branch that was accepted.",
    sources=["the DDTREE algorithm"],
)
def _hybrid(case: Case) -> Iterator[Found]:
    for given in case.given:
        name = given.flag.name.lstrip("-") if given.flag else given.key
        if case.tree and not given.typed and name.startswith(("mamba-", "max-mamba-", "linear-attn-")):
            yield Found(f"--{given.key} belongs to a hybrid model", "serve it without DDTREE", given.path)


@rule(
    "mamba-track-interval",
    Severity.ERROR,
    "mamba_track_interval against the tokens of a verify step and the page size",
    reason="The start ends with an AssertionError.",
    sources=[
        Cite(_ARGS, 2408, "self.mamba_track_interval >= self.speculative_num_draft_tokens"),
        Cite(_ARGS, 2413, "self.mamba_track_interval % self.page_size == 0"),
    ],
)
def _mamba_track(case: Case) -> Iterator[Found]:
    interval = case.whole("mamba-track-interval", 256)
    page = case.number("page-size")
    given = case.arg("mamba-track-interval") or case.arg("mamba-scheduler-strategy")
    if case.text("mamba-scheduler-strategy") != "extra_buffer" or given is None:
        return
    tokens = case.verify_tokens if case.block else case.number("speculative-num-draft-tokens")
    if case.algorithm and tokens is not None and interval < tokens:
        yield Found(
            f"an interval of {interval} is less than the {tokens:g} tokens of a verify step",
            f"set args.mamba-track-interval to {tokens:g} or more",
            given.path,
        )
    if page and interval % page:
        yield Found(
            f"an interval of {interval} is no multiple of page size {page:g}", "choose a multiple", given.path
        )


@rule(
    "gpu-count",
    Severity.ERROR,
    "more GPUs wanted than the host has",
    reason="The launcher starts one process a GPU and dies on the first that is not there.",
    sources=["hosts.NAME.gpu.count"],
)
def _gpu_count(case: Case) -> Iterator[Found]:
    gpu = case.target.host.gpu
    apart = 1 if case.on("enable-dp-attention") else case.whole("dp-size", 1)
    wanted = case.target.local_gpus * case.whole("pp-size", 1) * apart
    if gpu is not None and wanted > gpu.count:
        parts = [f"tensor_parallel {case.service.tensor_parallel}"]
        parts += [f"pp-size {case.whole('pp-size', 1)}"] if case.whole("pp-size", 1) > 1 else []
        parts += [f"dp-size {apart}"] if apart > 1 else []
        yield Found(
            f"{' x '.join(parts)} takes {wanted} GPUs on this host, it has {gpu.count}",
            "lower tensor_parallel, or correct hosts.NAME.gpu.count",
            ("tensor_parallel",),
        )


@rule(
    "visible-devices",
    Severity.ERROR,
    "CUDA_VISIBLE_DEVICES with fewer GPUs than the service takes",
    reason="The launcher starts one process a GPU and dies on the first that is not there.",
    sources=["CUDA_VISIBLE_DEVICES"],
)
def _visible(case: Case) -> Iterator[Found]:
    named = case.service.environment.get("CUDA_VISIBLE_DEVICES")
    devices = [word for word in (named or "").split(",") if word.strip()]
    if named is not None and len(devices) < case.target.local_gpus:
        yield Found(
            f"it shows {len(devices)} GPUs, tensor_parallel takes {case.target.local_gpus}",
            "remove it, or name every GPU",
            ("environment", "CUDA_VISIBLE_DEVICES"),
        )


# --- graphs and memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphSizes:
    """Batch sizes of the CUDA graphs, as sglang 0.5.11 works them out.

    :param wanted: sizes asked for, before any is left out.
    :param kept: sizes that are captured.
    :param multiple: a batch's tokens must be a multiple of this (``mul_base``).
    :param running: most requests at a time.
    """

    wanted: tuple[int, ...]
    kept: tuple[int, ...]
    multiple: int
    running: int


def graph_sizes(case: Case) -> GraphSizes | None:
    """The batch sizes of a case; None without graphs, or where the tokens of a verify step are not known.

    As ``_generate_cuda_graph_batch_sizes`` and ``get_batch_sizes_to_capture`` do.
    """
    tokens = case.verify_tokens
    if case.on("disable-cuda-graph") or tokens is None:
        return None
    given = case.arg("cuda-graph-bs")
    if given is not None and given.words:
        try:
            wanted = sorted({int(word) for word in given.words})
        except ValueError:
            return None
    else:
        wanted = _steps(case, case.whole("cuda-graph-max-bs", _largest(case)))
    apart = case.whole("dp-size", 1)
    running = case.whole("max-running-requests", _RUNNING if case.algorithm else 2048) // max(1, apart)
    multiple = _multiple(case)
    if case.on("enable-two-batch-overlap"):
        tokens = 1
    ceiling = -(-running // multiple) * multiple
    sizes = {*wanted, ceiling} if max(wanted, default=0) > ceiling else set(wanted)
    kept = sorted(size for size in sizes if size <= ceiling and size * tokens % multiple == 0)
    return GraphSizes(tuple(wanted), tuple(kept), multiple, running)


def _largest(case: Case) -> int:
    """``cuda_graph_max_bs`` as sglang chooses it by the memory of a GPU."""
    gpu = case.target.host.gpu
    if gpu is None or gpu.memory_gb is None:
        return 160
    many = case.service.tensor_parallel >= 4
    for limit, largest in ((20, (8, 8)), (35, (24, 80)), (60, (32, 160)), (160, (256, 512))):
        if gpu.memory_gb < limit:
            return largest[many]
    return 512


def _steps(case: Case, top: int) -> list[int]:
    last = min(top, _LONGEST)
    if case.on("disable-cuda-graph-padding"):
        steps = [*range(1, last + 1)]
    elif case.algorithm:
        steps = [
            *range(1, 9),
            *range(10, 33, 2),
            *range(40, 65, 4),
            *range(72, 257, 8),
            *range(272, last + 1, 16),
        ]
    else:
        steps = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, last + 1, 32)]
    return sorted({*(size for size in steps if size <= top), top})


def _multiple(case: Case) -> int:
    """``mul_base`` of ``get_batch_sizes_to_capture``."""
    tp, apart = case.service.tensor_parallel, case.whole("dp-size", 1)
    across = case.whole("attn-cp-size", 1)
    dp_attention = case.on("enable-dp-attention") and apart > 1
    all_to_all = (case.text("moe-a2a-backend") or "none") != "none"
    multiple = 2 if case.on("enable-two-batch-overlap") else 1
    gathered = dp_attention or all_to_all or case.number("moe-dense-tp-size") == 1
    if gathered:
        multiple *= max(1, tp // (apart if dp_attention else 1) // max(1, across))
    return multiple * across if across > 1 and multiple % across else multiple


@rule(
    "graph-batch-sizes",
    Severity.WARN,
    "batch sizes left out of the CUDA graphs because batch x (budget + 1) does not divide (mul_base)",
    reason="Where the input of a layer is gathered, a batch's tokens must be a multiple of the ranks. With an odd budget + 1 "
    "most sizes go, and such batches are padded to the next one; with none left the start ends with an AssertionError.",
    sources=[
        Cite(_RUNNER, 520, "bs * num_tokens_per_bs % mul_base == 0"),
        Cite(_RUNNER, 524, "assert len(capture_bs) > 0"),
    ],
)
def _batch_sizes(case: Case) -> Iterator[Found]:
    sizes = graph_sizes(case)
    if sizes is None or not case.block or sizes.multiple == 1:
        return
    within = [size for size in sizes.wanted if size <= max(sizes.running, *sizes.kept, 0)]
    lost = [size for size in within if size not in sizes.kept]
    path = ("speculative", "budget" if case.tree else "block_size")
    tokens = case.verify_tokens
    if not sizes.kept:
        yield Found(
            f"no batch size is left: none x {tokens} is a multiple of {sizes.multiple}",
            f"choose a budget with budget + 1 a multiple of {sizes.multiple}, or other cuda-graph-bs",
            path,
            Severity.ERROR,
        )
    elif lost:
        kept = ", ".join(map(str, sizes.kept[:6])) + (" ..." if len(sizes.kept) > 6 else "")
        better = -(-(tokens or 1) // sizes.multiple) * sizes.multiple - 1
        yield Found(
            f"{len(lost)} of {len(within)} batch sizes go: batch x {tokens} must be a multiple of {sizes.multiple}, "
            f"which leaves {kept}",
            f"speculative.budget {better} keeps them all" if case.tree else "choose another block size",
            path,
        )


@rule(
    "graph-max-batch",
    Severity.WARN,
    "graphs for batches larger than max_running_requests",
    reason="They are never captured, but 2 MB each are kept free of the KV cache where mem-fraction-static is not given. "
    "Speculation lowers max-running-requests to 48 by itself.",
    sources=[
        Cite(_RUNNER, 521, "bs <= num_max_requests"),
        Cite(_ARGS, 3431, "self.max_running_requests = 48"),
        Cite(_ARGS, 1443, "reserved_mem += self.cuda_graph_max_bs * 2"),
    ],
)
def _max_batch(case: Case) -> Iterator[Found]:
    sizes, given = graph_sizes(case), case.arg("cuda-graph-max-bs") or case.arg("cuda-graph-bs")
    if sizes is None or given is None or not case.algorithm or not sizes.wanted:
        return
    if sizes.wanted[-1] > sizes.running:
        yield Found(
            f"graphs for batches up to {sizes.wanted[-1]}, but at most {sizes.running} requests run at a time",
            f"lower args.{given.key} to {sizes.running}, or raise args.max-running-requests",
            given.path,
        )


@rule(
    "graph-memory",
    Severity.WARN,
    "memory of the tree's masks, indices and logits against what is left of a GPU",
    reason="Triton keeps a mask byte for each batch x (budget + 1) x context, a 64-bit index for each batch x context (with "
    "a DDTREE that is not the overlay's for each of the mask bytes), and the logits take 4 bytes for each batch x "
    "(budget + 1) x vocabulary. What does not fit fails when the graphs are captured, at the very end of a load.",
    sources=[Cite(_ATTENTION + "triton_backend.py", 519, "self.cuda_graph_custom_mask = torch.zeros(")],
)
def _graph_memory(case: Case) -> Iterator[Found]:
    sizes, gpu, tokens = graph_sizes(case), case.target.host.gpu, case.verify_tokens
    if not case.tree or sizes is None or not sizes.kept or tokens is None:
        return
    known = _KIMI.search(case.service.model) is not None
    context = case.whole("context-length", _KIMI_CONTEXT if known else 0)
    if gpu is None or gpu.memory_gb is None or not context:
        lacks = "gpu.memory_gb of the host" if gpu is None or gpu.memory_gb is None else "args.context-length"
        yield Found(
            f"the memory of the graphs cannot be reckoned: {lacks} is not given",
            f"give {lacks} to have it reckoned",
            ("speculative", "budget"),
            Severity.INFO,
        )
        return
    batch = sizes.kept[-1]
    masks = mask_bytes(batch, tokens, context, overlay=case.overlay) / _GIB
    logits = 4 * batch * tokens * (_KIMI_VOCABULARY if known else 0) / _GIB
    left, how = _left(case, gpu.memory_gb)
    if masks + logits > left:
        yield Found(
            f"batch {batch} x {tokens} tokens x {context} context take {masks:.1f} GiB for masks"
            + (f" and {logits:.1f} GiB for logits" if logits else "")
            + f", {left:.1f} GiB of {gpu.memory_gb:g} GB are left beside weights and cache ({how})",
            "lower args.cuda-graph-max-bs, args.context-length, speculative.budget or args.mem-fraction-static",
            ("speculative", "budget"),
        )


def mask_bytes(batch: int, tokens: int, context: int, *, overlay: bool) -> int:
    """Bytes of the indices and the mask of triton's graphs.

    :param tokens: of a request in a verify step, budget + 1.
    :param overlay: as ``ddtree_sglang.plugin.size_graph_state`` makes them; else as sglang 0.5.11 does, which counts
        the indices by tokens too.
    """
    if overlay:
        return batch * (8 * context + tokens * (context + tokens))
    return 9 * batch * tokens * context


def _left(case: Case, memory_gb: float) -> tuple[float, str]:
    """GiB a GPU that weights and KV cache leave, and where that comes from."""
    fraction = case.number("mem-fraction-static")
    if fraction is not None:
        return memory_gb * (1 - fraction), f"mem-fraction-static {fraction:g}"
    chunk = case.whole("chunked-prefill-size", 16384 if memory_gb >= 160 else 8192)
    reserved = 512 + 1.5 * max(chunk, 2048) + 2 * case.whole("cuda-graph-max-bs", _largest(case))
    reserved += case.service.tensor_parallel / 8 * 1024 + 1.5 * 1024
    if memory_gb > 60:
        reserved = max(reserved, 10 * 1024)
    return (reserved + 4 * 1024) / 1024, "as sglang reserves by itself"


@rule(
    "no-graphs",
    Severity.WARN,
    "DDTREE without CUDA graphs",
    reason="Every verify step is launched kernel by kernel; the gain of speculation is lost, and a wrongly sized graph "
    "runner stays hidden.",
    sources=["--disable-cuda-graph"],
)
def _no_graphs(case: Case) -> Iterator[Found]:
    given = case.arg("disable-cuda-graph")
    if case.tree and given is not None:
        yield Found("the verify step runs without CUDA graphs", f"remove args.{given.key}", given.path)


@rule(
    "mem-fraction",
    Severity.ERROR,
    "mem-fraction-static that is no fraction",
    reason="It is the part of a GPU's memory for weights and KV cache; from 1 on nothing is left to run in.",
    sources=["sglang: (weights + KV cache pool) / GPU memory"],
)
def _mem_fraction(case: Case) -> Iterator[Found]:
    given, fraction = case.arg("mem-fraction-static"), case.number("mem-fraction-static")
    if given is not None and fraction is not None and not 0 < fraction < 1:
        guess = f", for instance {fraction / 100:g}" if 1 < fraction < 100 else ""
        yield Found(f"{fraction:g} is not between 0 and 1", f"write a fraction{guess}", given.path)
