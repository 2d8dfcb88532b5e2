"""A diagnosis on a terminal: the one sentence, why, where it comes from, what to do, what it rests on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ddtree_ops.report.lines import indented, say
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from ddtree_ops.diagnose.api import DiagnosisReport
    from ddtree_ops.diagnose.figures import Figures
    from ddtree_ops.diagnose.reduce import Diagnosis
    from ddtree_ops.diagnose.trace import Trace

__all__ = ["figures_line", "print_diagnosis", "trace_lines"]

_SEVERITY = {"fatal": "bold red", "degraded": "bold yellow"}
_ASCII = str.maketrans(
    {"…": "...", "–": "-", "—": "-", "×": "x", "→": "->", "‘": "'", "’": "'", "“": '"', "”": '"'}
)
_EVIDENCE = 3
_WIDEST = 64


def print_diagnosis(
    console: Console, report: DiagnosisReport, *, host: str = "", verbose: bool = False
) -> None:
    """Root cause first, each finding with what it means; the whole log's figures and lesser findings below.

    ASCII only where the terminal's encoding is not UTF-8.

    :param verbose: the reduced tracebacks, all evidence, and the consequences one by one.
    """
    page = _Page(console)
    where = f"{host}: " if host else ""
    root = report.root
    if root is None:
        page.say(Text.assemble((where, "bold cyan"), report.headline()))
        _notes(page, report)
    else:
        _finding(page, root, where, report, verbose)
    if root is not None and report.consequences:
        _consequences(page, report.consequences, verbose)
    for line in figures_line(report.figures):
        page.line(line, 2, "dim")
    for item in report.diagnoses:
        if item is not root:
            _finding(page, item, where, None, verbose)


def _notes(page: _Page, report: DiagnosisReport) -> None:
    for note in report.notes:
        page.line(f"note: {note}", 2, "yellow")


class _Page:
    """Lines to a console, in its own letters."""

    def __init__(self, console: Console) -> None:
        self.console = console
        encoding = console.encoding or "ascii"
        self.encoding = "" if encoding.lower().replace("-", "").startswith("utf") else encoding

    def plain(self, text: str) -> str:
        """The text as the terminal can show it."""
        if not self.encoding:
            return text
        return text.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)

    def line(self, text: str, columns: int, style: str = "") -> None:
        indented(self.console, self.plain(text), columns, style)

    def say(self, text: Text, columns: int = 0) -> None:
        if self.encoding:
            text = Text.assemble(*((self.plain(text.plain[a:b]), style) for a, b, style in _spans(text)))
        say(self.console, text, indent=columns)


def _spans(text: Text) -> list[tuple[int, int, str]]:
    spans = [(span.start, span.end, str(span.style)) for span in text.spans]
    end = max((stop for _, stop, _ in spans), default=0)
    return [*spans, (end, len(text.plain), "")]


def _finding(page: _Page, item: Diagnosis, where: str, report: DiagnosisReport | None, verbose: bool) -> None:
    ranks = (
        f" on {len(item.ranks)} ranks"
        if len(item.ranks) > 1
        else "".join(f" on {rank}" for rank in item.ranks)
    )
    times = f", {item.count} times" if report is None and item.count > 1 else ""
    title = (f"{item.signature}{ranks}{times}: {item.title}", _SEVERITY.get(item.severity, "bold"))
    page.say(Text.assemble((where, "bold cyan"), title))
    if report is not None:
        _notes(page, report)
    page.line(item.explanation, 2)
    if report is not None:
        for line in trace_lines(report.trace):
            page.line(line, 2)
        if report.patch:
            page.line(f"patch: {report.patch}", 2)
    if item.remedy:
        page.line(f"remedy: {item.remedy}", 2, "bold" if report is not None else "")
    if report is not None and report.seen:
        page.line(report.seen, 2)
    if item.signature == "unknown":
        page.line(f"fingerprint {item.fingerprint}", 2, "dim")
    if item.traceback and (verbose or item.signature == "unknown"):
        for line in item.traceback:
            page.line(line, 4, "dim")
    rows = {evidence.text: evidence.line for evidence in reversed(item.evidence)}
    shown = list(reversed(rows.items()))
    for text, number in shown if verbose else shown[:_EVIDENCE]:
        page.line(f"line {number}: {text}", 4, "dim")
    if report is not None and report.trace.note:
        page.line(f"({report.trace.note})", 2, "dim")


def _consequences(page: _Page, consequences: Iterable[Diagnosis], verbose: bool) -> None:
    if not verbose:
        names = ", ".join(dict.fromkeys(item.title for item in consequences))
        page.line(f"then: {names}", 2, "dim")
        return
    for item in consequences:
        at = f"line {item.evidence[0].line}: {item.evidence[0].text}" if item.evidence else ""
        page.line(
            f"then: {item.title} ({item.signature}, {count(item.count, 'time')}) {at}".rstrip(), 2, "dim"
        )


def trace_lines(trace: Trace) -> list[str]:
    """The chain of a trace, 3 to 6 lines under a heading; empty where there is none. Pure."""
    if not trace.steps:
        return []
    places = [step.place for step in trace.steps if step.step != "absent"]
    width = max(map(len, places), default=0)
    lines = [f"trace, read in {trace.origin}:"]
    for step in trace.steps:
        if step.step == "absent":
            lines.append(f"  !! {step.text}")
            continue
        arrow = "  " if step.step == "flag" else "->"
        text = step.text if len(step.text) <= _WIDEST else f"{step.text[: _WIDEST - 3]}..."
        mark = "  <- it failed here" if step.step == "crash" else ""
        lines.append(f"  {arrow} {step.place:<{width}}  {text}{mark}")
    return lines


def figures_line(figures: Figures | None) -> list[str]:
    """The figures of the last start in one line; empty where there are none. Pure."""
    if figures is None or not figures:
        return []
    life = figures.last
    parts = []
    if life.decode_lines or life.prefill_lines:
        parts.append(f"{count(life.decode_lines, 'decode line')}, {life.prefill_lines} prefill")
    if life.accept_mean is not None:
        parts.append(f"accept length {life.accept_mean:.2f} (highest {life.accept_max:.2f})")
    if life.with_graph or life.without_graph:
        chosen = " (disable_cuda_graph)" if life.arguments.get("disable_cuda_graph") is True else ""
        parts.append(f"graphs in {life.with_graph} of {life.with_graph + life.without_graph}{chosen}")
    throughput = life.stats.get("throughput")
    if throughput is not None:
        parts.append(f"{throughput.mean:.1f} tokens/s (most {throughput.max:.1f})")
    if life.pool_tokens is not None:
        parts.append(f"KV pool {life.pool_tokens} tokens")
    return [f"figures: {'; '.join(parts)}"] if parts else []
