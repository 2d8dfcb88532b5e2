"""Reports of runs as they really look: a validate run with every verdict, a bench run, one that was cut off."""

from __future__ import annotations

from ddtree_ops.results import CheckResult, Evidence, Figure, Verdict
from ddtree_ops.runreport import RunReport, TargetReport

__all__ = ["bench_run", "partial_run", "validate_run"]

FACTS = {
    "runtime": "sglang-0.5.11-ddtree",
    "release": "b" * 12,
    "invocation": "6f1c2d0e4b5a49d8a1d2c3b4e5f60718",
    "gpu": "8x RTX PRO 6000 Blackwell (96 GB)",
    "interconnect": "PCIe",
}
UNREACHABLE = """b300: connect: there is no session to the host
  state: nothing was changed
  next:  ddtree-ops doctor b300"""
PHASES = {"weights": 312.4, "kv-cache": 2.1, "graphs": 48.7, "drafter": 21.9, "warm-up": 5.2}


def phases(scale: float = 1.0, **labels: str) -> tuple[Figure, ...]:
    """A load of a server, phase by phase, and in all."""
    steps = [
        Figure("load_phase", round(seconds * scale, 1), "s", "journal", labels={**labels, "phase": phase})
        for phase, seconds in PHASES.items()
    ]
    return (
        Figure("ready", round(sum(PHASES.values()) * scale, 1), "s", "systemctl show", labels=labels),
        *steps,
    )


def histogram(total: int, **labels: str) -> tuple[Figure, ...]:
    """Steps by accepted drafts, fewer and fewer."""
    shares = (0.24, 0.22, 0.17, 0.12, 0.09, 0.06, 0.05, 0.05)
    return tuple(
        Figure(
            "accept_histogram",
            float(round(total * share)),
            "steps",
            "POST /generate meta_info",
            samples=24,
            labels={**labels, "accepted": str(place)},
        )
        for place, share in enumerate(shares)
    )


def validate_run() -> RunReport:
    """Two targets: one with every verdict, one that could not be reached."""
    ctrl = "the answer holds \x1b[31mcolours\x1b[0m, a NUL \x00 and <script>alert('no')</script> & more"
    checks = (
        CheckResult("chat", Verdict.PASS, "answers in 41 tokens, reads as text", "ct200/k26", seconds=1.42),
        CheckResult(
            "prefix-hit",
            Verdict.PASS,
            "1984 of 2048 tokens came from the cache; the answer is the same",
            "ct200/k26",
            facts={"cached_tokens": 1984},
            evidence=(Evidence("POST /v1/chat/completions", "cached_tokens=1984"),),
            seconds=2.2,
        ),
        CheckResult(
            "garbage",
            Verdict.FAIL,
            "3 of 8 answers are garbage: one character makes up 91% of an answer",
            "ct200/k26",
            evidence=(
                Evidence("POST /generate", "!" * 180),
                Evidence("journal", ctrl, line=4711, time="2026-11-30T06:31:07Z"),
                Evidence("http GET /server_info", "--api-key hunter2hunter2 --model-path /models/x"),
                Evidence("journal", "accept len: 7.91, which no text of a model has", line=4712),
            ),
            hint="ddtree-ops diagnose ct200",
            seconds=12.06,
        ),
        CheckResult(
            "lossless",
            Verdict.INCONCLUSIVE,
            "the baseline does not agree with itself on 2 of 6 prompts | nothing can be said",
            "ct200/k26",
            hint="ddtree-ops validate ct200 --check lossless --set runs=3",
            figures=(
                Figure(
                    "accept_length", 4.31, "tokens/step", "POST /generate meta_info", samples=24, spread=0.22
                ),
                *histogram(4200),
            ),
            seconds=64.0,
        ),
        CheckResult("tool-call", Verdict.SKIPPED, "the service has no tool_call_parser", "ct200/k26"),
    )
    figures = (
        *phases(),
        Figure("ttft", 0.213, "s", "stream", samples=8, spread=0.011, labels={"stat": "median"}),
        Figure("ttft", None, "s", "stream", samples=0, labels={"stat": "p99"}),
        Figure("gpu_memory", 91.4, "GB", "nvidia-smi"),
        Figure("kv_tokens", 131072.0, "tokens", "http GET /server_info"),
    )
    diagnosis = {
        "schema": 1,
        "source": "ct200",
        "verdict": "fail",
        "headline": "ddtree-graph-size: the graphs were made for 8 tokens, and the tree has 33",
        "diagnoses": [
            {
                "signature": "ddtree-graph-size",
                "title": "graphs of the wrong size",
                "explanation": "The graph runner sizes its buffers by the number of drafts, the verify pass sends budget + 1.",
                "remedy": "deploy the patched runner",
                "evidence": [
                    {"line": 17, "text": "RuntimeError: The size of tensor a (8) must match ... b (33)"}
                ],
                "traceback": [],
            }
        ],
    }
    return RunReport(
        "validate",
        "20261130T063000Z-ab12",
        "2026-11-30T06:30:00+00:00",
        "2026-11-30T06:32:04+00:00",
        True,
        "0.1.0",
        "inventories/example.yaml",
        {"suite": "standard", "targets": ["ct200", "b300"]},
        (
            TargetReport("ct200/k26", "ct200", "k26", FACTS, checks, figures, (diagnosis,)),
            TargetReport(
                "b300/k26",
                "b300",
                "k26",
                errors=(UNREACHABLE,),
            ),
        ),
    )


SETUPS = [
    {"mode": "baseline"},
    {"mode": "dflash"},
    *(
        {"mode": "ddtree", "budget": budget, "topk": topk}
        for budget in ("8", "16", "32")
        for topk in ("4", "8")
    ),
]
LOADS = ("1", "8", "32")


def point(labels: dict[str, str], load: str, factor: float, accept: float | None) -> tuple[Figure, ...]:
    """What a load generator finds at one point."""
    users, source = int(load), "load generator"
    of = {**labels, "concurrency": load}
    gain = 1 + (factor - 1) / (1 + users / 24)
    rate = 141.0 * users**0.72 * gain
    found = [
        Figure("output_rate", round(rate, 1), "tokens/s", source, 3, round(rate * 0.01, 2), of),
        Figure("request_rate", round(rate / 256, 3), "requests/s", source, 3, labels=of),
        Figure("ttft", round(0.11 + 0.02 * users, 3), "s", source, 96, 0.01, {**of, "stat": "median"}),
        Figure("ttft", round(0.19 + 0.05 * users, 3), "s", source, 96, labels={**of, "stat": "p99"}),
        Figure("tpot", round(users / rate, 5), "s", source, 96, 0.0001, {**of, "stat": "median"}),
        Figure("tpot", round(1.6 * users / rate, 5), "s", source, 96, labels={**of, "stat": "p99"}),
        Figure("failed_requests", 0.0, "count", source, 96, labels=of),
    ]
    if accept is not None:
        found.append(Figure("accept_length", accept, "tokens/step", "POST /generate meta_info", 24, 0.1, of))
        found.append(Figure("speedup", round(gain, 3), "ratio", "output_rate", 3, labels=of))
    return tuple(found)


def bench_run(*, factor: float = 1.0, host: str = "ct200") -> RunReport:
    """Three modes, three budgets, two top-k, three concurrencies.

    :param factor: of every speed-up.
    """
    figures: list[Figure] = []
    for place, labels in enumerate(SETUPS):
        budget, topk = int(labels.get("budget", "0")), int(labels.get("topk", "0"))
        accept = None if place == 0 else round(2.4 + 0.06 * budget + 0.05 * topk, 2)
        gain = 1.0 if place == 0 else (1.3 + 0.022 * budget + 0.02 * topk) * factor
        figures += phases(1 + place / 40, **labels)
        figures.append(Figure("restart", 402.0 + place, "s", "systemctl show", labels=labels))
        figures.append(Figure("gpu_memory", 88.0 + budget / 10, "GB", "nvidia-smi", labels=labels))
        for load in LOADS:
            if labels == SETUPS[-1] and load == "32":
                gain, accept = 0.4, 1.02
            figures += point(labels, load, gain, accept)
        if place:
            figures += histogram(1000 * place, **labels)
    checks = (CheckResult("bench", Verdict.PASS, "24 of 24 points measured", host, seconds=5400.0),)
    target = TargetReport(f"{host}/k26", host, "k26", FACTS, checks, tuple(figures))
    return RunReport(
        "bench",
        "20261130T021500Z-cd34",
        "2026-11-30T02:15:00+00:00",
        "2026-11-30T03:45:12+00:00",
        True,
        "0.1.0",
        "inventories/example.yaml",
        {"budgets": [8, 16, 32], "topk": [4, 8], "concurrency": [1, 8, 32]},
        (target,),
    )


def partial_run() -> RunReport:
    """A bench that was killed after the baseline's first point."""
    figures = point({"mode": "baseline"}, "1", 1.0, None)
    target = TargetReport("ct200/k26", "ct200", "k26", figures=figures)
    return RunReport("bench", "20261130T021500Z-ef56", "2026-11-30T02:15:00+00:00", targets=(target,))
