"""Judge the accept length and the use of CUDA graphs from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddtree_ops.checks.engine import Generation, ServerInfo
from ddtree_ops.diagnose.events import DecodeFigures, parse_decode
from ddtree_ops.diagnose.figures import above_block, useless
from ddtree_ops.inventory.models import Service
from ddtree_ops.results import CheckResult, Evidence, Verdict

__all__ = ["TOO_LITTLE", "DecodeWindow", "judge_graphs", "judge_speculation", "summarise_decode"]

TOO_LITTLE = "gains_too_little"
"""Fact of a result that is no pass for this alone: speculation works, and gains too little."""


@dataclass(frozen=True)
class DecodeWindow:
    """The decode lines of a stretch of log, one every 40 decode steps a rank.

    :param accept_length: mean over the lines, tokens a verify step; None where no line has one.
    :param with_graph: lines that say ``cuda graph: True``; ``without_graph`` likewise.
    :param text: the last line, as evidence.
    """

    lines: int
    accept_length: float | None
    accept_lengths: tuple[float, ...]
    with_graph: int
    without_graph: int
    tokens_per_s: float | None
    text: str


def summarise_decode(lines: Iterable[str]) -> DecodeWindow:
    """Summarise the decode lines among ``lines``."""
    found: list[DecodeFigures] = []
    text = ""
    for line in lines:
        figures = parse_decode(line)
        if figures is not None:
            found.append(figures)
            text = line
    lengths = tuple(item.accept_len for item in found if item.accept_len is not None)
    rates = [item.gen_throughput for item in found if item.gen_throughput is not None]
    return DecodeWindow(
        lines=len(found),
        accept_length=sum(lengths) / len(lengths) if lengths else None,
        accept_lengths=lengths,
        with_graph=sum(item.cuda_graph is True for item in found),
        without_graph=sum(item.cuda_graph is False for item in found),
        tokens_per_s=rates[-1] if rates else None,
        text=text,
    )


def _source(
    generation: Generation | None, decode: DecodeWindow, info: ServerInfo | None
) -> list[tuple[str, float, str]]:
    """Accept lengths: what they are called, their value, where they come from. The most exact first."""
    found: list[tuple[str, float, str]] = []
    if generation is not None and generation.accept_length is not None:
        steps = generation.verify_steps
        where = (
            f"{generation.accepted_drafts} drafts accepted in {steps} verify steps"
            if steps
            else "reported by the server"
        )
        found.append(("request", generation.accept_length, f"POST /generate: {where}"))
    if decode.accept_length is not None:
        found.append(
            ("log", decode.accept_length, f"journal: mean of {len(decode.accept_lengths)} decode lines")
        )
    if info is not None and info.avg_accept_length is not None:
        found.append(("server", info.avg_accept_length, "GET /server_info: average since the start"))
    return found


def judge_speculation(
    service: Service,
    *,
    generation: Generation | None,
    decode: DecodeWindow,
    info: ServerInfo | None,
    min_accept_length: float | None,
    must_gain: bool = True,
    host: str = "",
) -> CheckResult:
    """Is speculative decoding on, does it pay, and do its figures add up?

    Accept length is tokens a verify step, the verified one included: 1.0 is useless, more than the block size cannot be.

    :param must_gain: False: of a configuration that is only measured. Useless speculation is said and passes; what is
        broken, or cannot be known, does not.
    """
    name, wanted = "smoke.speculation", service.speculative
    if wanted is None and (info is None or not info.speculative_algorithm):
        return CheckResult(name, Verdict.SKIPPED, "no speculative decoding is configured", host=host)
    if wanted is not None and info is not None and not info.speculative_algorithm:
        return CheckResult(
            name,
            Verdict.FAIL,
            f"{wanted.algorithm} is configured, and the server runs without speculative decoding",
            host=host,
            facts={"algorithm": wanted.algorithm, "server_algorithm": None},
            evidence=(Evidence("http GET /server_info", "speculative_algorithm: null"),),
            hint=f"ddtree-ops deploy {host} --dry-run shows whether it runs with the flags of the inventory",
        )
    found = _source(generation, decode, info)
    facts: dict[str, Any] = {
        "algorithm": wanted.algorithm if wanted else info.speculative_algorithm if info else None,
        "block_size": wanted.block_size if wanted else None,
        "budget": wanted.budget if wanted else None,
        "accept_length": round(found[0][1], 3) if found else None,
        "accept_length_by_source": {label: round(value, 3) for label, value, _ in found},
        "verify_steps": generation.verify_steps if generation else None,
        "min_accept_length": min_accept_length,
        "must_gain": must_gain,
    }
    evidence = [
        Evidence(where.split(":", 1)[0], f"accept length {value:.2f} ({where})") for _, value, where in found
    ]
    if decode.text:
        evidence.append(Evidence("journal", decode.text))

    def result(verdict: Verdict, summary: str, hint: str = "", *, too_little: bool = False) -> CheckResult:
        known = {**facts, TOO_LITTLE: True} if too_little else facts
        return CheckResult(
            name, verdict, summary, host=host, facts=known, evidence=tuple(evidence), hint=hint
        )

    if not found:
        return result(
            Verdict.INCONCLUSIVE,
            "no accept length to be had: the answers carry none, no decode line was logged (one every 40 steps)",
            hint="ask for more tokens: --max-tokens 512",
        )
    values = [value for _, value, _ in found]
    if wanted is not None:
        most = max((*values, *decode.accept_lengths))
        if above_block(most, wanted.block_size):
            return result(
                Verdict.FAIL,
                f"accept length {most:.2f} exceeds the block size {wanted.block_size}: the accounting is broken",
            )
    if must_gain and useless(max(values)):
        return result(
            Verdict.FAIL,
            "speculation is on and useless: accept length 1.00, every draft was rejected",
            hint="is it the right drafter for this model, and does the attention backend honour the tree mask?",
            too_little=True,
        )
    primary = found[0][1]
    if must_gain and useless(primary):
        return result(
            Verdict.INCONCLUSIVE,
            f"every draft of this request was rejected (accept length 1.00), though elsewhere it was {max(values):.2f}",
            hint="try a prompt that drafts well: --prompt quicksort",
            too_little=True,
        )
    of = f" of at most {wanted.block_size}" if wanted else ""
    if min_accept_length is not None and primary < min_accept_length:
        return result(
            Verdict.FAIL,
            f"accept length {primary:.2f} is below the {min_accept_length:g} that is asked for",
            too_little=True,
        )
    so = "; it gains nothing, which is not judged here" if useless(primary) else ""
    return result(Verdict.PASS, f"accept length {primary:.2f}{of} tokens a step ({found[0][2]}){so}")


def judge_graphs(
    service: Service,
    *,
    decode: DecodeWindow,
    info: ServerInfo | None,
    host: str = "",
) -> CheckResult:
    """Did decoding run in CUDA graphs?"""
    name = "smoke.graphs"
    asked_off = any(
        value is True
        for key, value in service.args.items()
        if key.strip("-").replace("_", "-") in {"disable-cuda-graph", "enforce-eager"}
    )
    total = decode.with_graph + decode.without_graph
    facts = {
        "decode_lines": decode.lines,
        "with_graph": decode.with_graph,
        "without_graph": decode.without_graph,
        "disabled": info.disable_cuda_graph if info else None,
    }
    evidence = (Evidence("journal", decode.text),) if decode.text else ()

    def result(verdict: Verdict, summary: str, hint: str = "") -> CheckResult:
        return CheckResult(name, verdict, summary, host=host, facts=facts, evidence=evidence, hint=hint)

    if asked_off:
        return result(Verdict.SKIPPED, "CUDA graphs are off, as configured")
    if info is not None and info.disable_cuda_graph and not decode.with_graph:
        return result(
            Verdict.SKIPPED,
            f"the server itself turned CUDA graphs off (attention backend {info.attention_backend or 'unknown'})",
            hint="expected on this backend? then say so in the inventory: args: {disable-cuda-graph: true}",
        )
    if not total:
        return result(
            Verdict.INCONCLUSIVE,
            "no decode line was logged (one every 40 steps): it is not known whether graphs are used",
            hint="ask for more tokens: --max-tokens 512",
        )
    if not decode.with_graph:
        return result(
            Verdict.FAIL,
            f"decoding ran without CUDA graphs in all of {total} decode lines, though they are not disabled",
            hint=f"ddtree-ops logs {host} --grep 'cuda graph' --invocation current",
        )
    share = "all" if decode.with_graph == total else f"{decode.with_graph} of {total}"
    return result(Verdict.PASS, f"decoding used CUDA graphs in {share} decode lines")
