"""A run report as a text file for node_exporter's textfile collector. Pure.

Every figure is a gauge of its own name and unit (``ddtree_ops_accept_length_tokens_per_step``); host, service, command and
the check that measured it are labels beside its own. What has no value is left out: it is not 0. Samples carry no time, for
the collector refuses them: ``ddtree_ops_run_timestamp_seconds`` says how old they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddtree_ops.figurenames import meaning_of
from ddtree_ops.report.clean import clean
from ddtree_ops.report.points import in_order
from ddtree_ops.results import Figure, Verdict
from ddtree_ops.runreport import RunReport
from ddtree_ops.wording import moment_of

__all__ = ["metric_name", "metrics_text"]

_UNITS = {
    "s": "seconds",
    "GB": "gigabytes",
    "tokens/s": "tokens_per_second",
    "tokens/step": "tokens_per_step",
    "requests/s": "requests_per_second",
    "count": "",
    "%": "percent",
}
_OURS = ("host", "service", "command", "check")


def metric_name(name: str, unit: str) -> str:
    """``ddtree_ops_ttft_seconds``; a name that ends in its unit is not given it twice."""
    stem = re.sub(r"[^a-zA-Z0-9_]", "_", name)
    word = re.sub(r"[^a-zA-Z0-9_]", "_", _UNITS.get(unit, unit.replace("/", "_per_")))
    return f"ddtree_ops_{stem}" if not word or stem.endswith(word) else f"ddtree_ops_{stem}_{word}"


@dataclass
class _Metric:
    meaning: str
    samples: dict[str, float] = field(default_factory=dict)


class _Page:
    def __init__(self) -> None:
        self.metrics: dict[str, _Metric] = {}

    def add(self, name: str, meaning: str, labels: Mapping[str, str], value: float) -> None:
        metric = self.metrics.setdefault(name, _Metric(meaning))
        text = ",".join(f'{key}="{_quoted(each)}"' for key, each in labels.items() if each)
        metric.samples[f"{{{text}}}" if text else ""] = value

    def text(self) -> str:
        lines = []
        for name, metric in self.metrics.items():
            meaning = metric.meaning.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} gauge"]
            lines += [f"{name}{labels} {_number(value)}" for labels, value in metric.samples.items()]
        return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _labels(figure: Figure, ours: Mapping[str, str]) -> dict[str, str]:
    own = {}
    for key, value in sorted(figure.labels.items()):
        name = re.sub(r"[^a-zA-Z0-9_]", "_", key).lstrip("_")
        own[f"label_{name}" if not name or name[0].isdigit() or name in _OURS else name] = value
    return {**ours, **own}


def metrics_text(report: RunReport) -> str:
    """The file: the run, the verdict of every check (a series a verdict: 1 the one that it got, 0 the others), the figures."""
    report = clean(report)
    page = _Page()
    run = {"command": report.command}
    moment = moment_of(report.ended) or moment_of(report.started)
    page.add("ddtree_ops_run_complete", "1: the run came to its end", run, float(report.complete))
    if moment is not None:
        page.add(
            "ddtree_ops_run_timestamp_seconds",
            "when the run ended, or began where it did not come to its end",
            run,
            moment.timestamp(),
        )
    for target in report.targets:
        ours = {"host": target.host, "service": target.service, **run}
        for verdict in Verdict:
            _verdict(
                page,
                "ddtree_ops_target_verdict",
                "1: the verdict on the target",
                ours,
                verdict,
                target.verdict,
            )
        for check in target.checks:
            of_check = {**ours, "check": check.name}
            for verdict in Verdict:
                meaning = "1: the verdict of the check"
                _verdict(page, "ddtree_ops_check_verdict", meaning, of_check, verdict, check.verdict)
    found = [
        (figure, {"host": target.host, "service": target.service, **run, "check": check})
        for target in report.targets
        for check, figures in (("", target.figures), *((each.name, each.figures) for each in target.checks))
        for figure in in_order(figures)
    ]
    for figure, ours in found:
        if figure.value is not None:
            meaning = meaning_of(figure.name) or f"{figure.name} in {figure.unit}"
            page.add(metric_name(figure.name, figure.unit), meaning, _labels(figure, ours), figure.value)
    return page.text()


def _verdict(
    page: _Page, name: str, meaning: str, labels: Mapping[str, str], verdict: Verdict, found: Verdict
) -> None:
    page.add(name, meaning, {**labels, "verdict": verdict.value}, float(verdict is found))
