"""Model and drafter on the host: whole, and fit for each other and for the service. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtree_ops.deploy.preflight.facts import Facts, Model
from ddtree_ops.deploy.preflight.verdicts import failed, listed, passed, size, unsure
from ddtree_ops.inventory.models import Target
from ddtree_ops.results import CheckResult, Evidence
from ddtree_ops.wording import count

__all__ = ["judge_models"]

BLOCK_DRAFTERS = ("DFLASH", "DDTREE")
CONTEXT_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
"""As sglang looks for them, in its order (srt/utils/hf_transformers/common.py)."""
_ABSURD = 1 << 40
LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def judge_models(target: Target, facts: Facts) -> list[CheckResult]:
    """Weights, tokenizer and context of the model; weights of the drafter, and whether it belongs to the model."""
    service = target.service
    results = [_weights("model", service.model, facts.model)]
    if facts.model.top is not None and not facts.model.error:
        results += [_tokenizer(target, facts.model), *_context(target, facts.model)]
    if service.drafter and facts.drafter is not None:
        results.append(_weights("drafter", service.drafter, facts.drafter))
        speculative = service.speculative
        known = facts.model.top is not None and facts.drafter.top is not None
        if speculative is not None and speculative.algorithm.upper() in BLOCK_DRAFTERS and known:
            results.append(_fit(target, facts.model, facts.drafter))
    return results


def _weights(what: str, path: str, found: Model) -> CheckResult:
    again = f"finish the download, e.g.: hf download REPOSITORY --local-dir {path}"
    figures = {"shards": found.shards, "bytes": found.bytes, "total_size": found.total_size}
    if found.top is None:
        problem = found.error or (
            "no config.json there" if found.folder else "no config.json: there is no such folder"
        )
        return failed(what, f"{path}: {problem}", f"correct {what} in the inventory, or {again}", **figures)
    if found.error:
        return failed(what, f"{path}: {found.error}", again, **figures)
    if not found.shards:
        return failed(what, f"{path}: no safetensors there", again, **figures)
    evidence = [Evidence(name, problem) for name, problem in found.broken[:20]]
    problems = []
    if found.missing:
        problems.append(
            f"{len(found.missing)} of {found.shards} shards are missing or empty, first {found.missing[0]}"
        )
    if found.broken:
        name, problem = found.broken[0]
        problems.append(
            f"{count(len(found.broken), 'shard')} of {found.shards} damaged, first {name}: {problem}"
        )
    if found.misplaced:
        problems.append(f"{count(found.misplaced, 'tensor')} of the index are not in their shard")
    if problems:
        return failed(what, f"{path}: {'; '.join(problems)}", again, *evidence, **figures)
    whole = f"{what} complete ({count(found.shards, 'shard')}, {size(found.bytes)})"
    if found.total_size is not None and found.total_size != found.bytes:
        summary = f"{path}: the index speaks of {size(found.total_size)}, the shards hold {size(found.bytes)}"
        hint = "is the index of the same revision as the shards? Download the folder again if in doubt"
        return unsure(what, summary, hint, **figures)
    if found.unfinished:
        summary = f"{whole}, but leftovers of a download lie there: {listed(found.unfinished, 2)}"
        return unsure(what, summary, f"is somebody downloading into {path}? Else remove them", **figures)
    return passed(what, whole, **figures)


def _tokenizer(target: Target, found: Model) -> CheckResult:
    args, path = target.service.args, target.service.model
    if found.code_missing and args.get("trust-remote-code"):
        summary = f"{path}: config.json names {listed(found.code_missing)}, which is not there"
        return failed("tokenizer", summary, "download the model's Python files too, not only its weights")
    if found.tokenizer:
        return passed("tokenizer", f"tokenizer {found.tokenizer[0]}")
    if args.get("tokenizer-path") or args.get("skip-tokenizer-init"):
        return passed("tokenizer", "no tokenizer of the model needed: args say where it comes from")
    return failed(
        "tokenizer", f"{path}: no tokenizer there", "download tokenizer.json (or tiktoken.model) of the model"
    )


def _context(target: Target, found: Model) -> list[CheckResult]:
    """As sglang derives it (``get_context_length``): the configured length, times the factor of rope scaling."""
    scaling = found.text.get("rope_scaling") or {}
    factor = 1
    if isinstance(scaling, Mapping) and "original_max_position_embeddings" not in scaling:
        factor = 1 if scaling.get("rope_type") == "llama3" else scaling.get("factor", 1)
    length = next((found.text[key] for key in CONTEXT_KEYS if found.text.get(key) is not None), None)
    if not isinstance(length, int) or not isinstance(factor, int | float):
        return []
    if not (0 < length < _ABSURD and 0 < factor < _ABSURD):
        return []
    limit, asked = int(length * factor), target.service.args.get("context-length")
    if not isinstance(asked, int) or isinstance(asked, bool):
        return [passed("context", f"context {limit}", context=limit)]
    if asked > limit and LONGER_CONTEXT not in target.service.environment:
        summary = f"--context-length {asked} is more than the model's {limit}: sglang refuses to start"
        return [failed("context", summary, f"set args.context-length to {limit} or less", context=limit)]
    return [passed("context", f"context {asked} of the model's {limit}", context=asked)]


def _fit(target: Target, model: Model, drafter: Model) -> CheckResult:
    """Sources: srt/speculative/dflash_utils.py, dflash_worker.py, srt/models/dflash.py.

    sglang itself only warns of another block size and goes on with a block that the drafter was not trained for:
    acceptance falls with everything green.
    """
    speculative = target.service.speculative
    assert speculative is not None and drafter.top is not None
    flash = drafter.top.get("dflash_config")
    own: Mapping[str, Any] = {**drafter.top, **(flash if isinstance(flash, dict) else {})}
    problems, hints = [], []
    block = own.get("block_size")
    if block is not None and block != speculative.block_size:
        problems.append(f"its block_size is {block}, the service says {speculative.block_size}")
        hints.append(f"--set speculative.block_size={block}")
    layers = model.text.get("num_hidden_layers")
    for key, have in (("num_target_layers", layers), ("hidden_size", model.text.get("hidden_size"))):
        want = own.get(key) if key in own else drafter.text.get(key)
        if want is not None and have is not None and want != have:
            problems.append(f"its {key} is {want}, the model has {have}")
    vocabulary, words = drafter.text.get("vocab_size"), model.text.get("vocab_size")
    if vocabulary is not None and words is not None and vocabulary != words:
        problems.append(f"its vocab_size is {vocabulary}, the model's {words}")
    ids = own.get("target_layer_ids")
    if isinstance(ids, list) and isinstance(layers, int):
        outside = [one for one in ids if not isinstance(one, int) or not 0 <= one < layers]
        if outside:
            problems.append(
                f"its target_layer_ids {listed(outside)} are not among the model's {layers} layers"
            )
    mask = own.get("mask_token_id")
    if isinstance(mask, int) and isinstance(words, int) and mask >= words:
        problems.append(f"its mask_token_id {mask} is outside the model's vocabulary of {words}")
    if problems:
        hints = hints if len(problems) == len(hints) else ["name the drafter that was trained for this model"]
        return failed("drafter-fit", f"the drafter does not fit: {'; '.join(problems)}", "; ".join(hints))
    if block is None:
        summary = "the drafter's config.json names no block_size: not compared with the service's"
        return unsure("drafter-fit", summary, "is this a DFlash drafter?")
    return passed("drafter-fit", f"drafter fits the model: block size {block}", block_size=block)
