"""Lines of logs as people and programs read them, and what they say in figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ddtree_ops.secret import masked, redact
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from ddtree_ops.diagnose.figures import Bucket, Figures, Stat
    from ddtree_ops.diagnose.lens import Lens, Shown
    from ddtree_ops.report.output import Output

__all__ = ["LogPrinter", "LogStats", "describe_search", "print_stats"]

_STYLES = {"fatal": "bold red", "degraded": "yellow", "request": "yellow", "benign": "dim"}
_AT_ONCE = 256
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9}
"""Control characters would be the terminal's to obey."""


class LogPrinter:
    """Prints what is shown of logs: lines, or JSON objects one a line. Leave it as a context manager, or call ``flush``.

    :param many: several sources: each line begins with the name of its own.
    :param journal: every line gets the time of its entry; lines of files only where they do not say it themselves.
    :param context: some lines are context: groups of each source are parted by ``--``, and JSON says ``match``.
    """

    def __init__(self, out: Output, *, many: bool, as_json: bool, journal: bool, context: bool) -> None:
        self._out = out
        self._many = many
        self._as_json = as_json
        self._journal = journal
        self._context = context
        self._began: set[str] = set()
        self._lines: list[str] = []
        self._styled = not as_json and out.is_terminal

    def __enter__(self) -> LogPrinter:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def flush(self) -> None:
        """Have all been written that was given so far."""
        if self._lines:
            lines, self._lines = self._lines, []
            self._out.write_line("\n".join(lines))

    def __call__(self, name: str, shown: Shown) -> None:
        """Print one record of the source ``name``."""
        if self._as_json:
            self._write(json.dumps(self._document(name, shown), ensure_ascii=False))
            return
        if self._context and shown.gap and name in self._began:
            self._separate(name)
        self._began.add(name)
        self._print(name, shown)

    def _text(self, shown: Shown) -> str:
        text = shown.record.text
        return text if self._journal else redact(text)

    def _document(self, name: str, shown: Shown) -> dict[str, Any]:
        record = shown.record
        document: dict[str, Any] = {
            "host": name,
            "time": record.time.isoformat() if record.time else None,
            "source": record.source,
            "pid": record.pid,
            "invocation": record.invocation,
            "message": self._text(shown),
        }
        if not self._journal:
            document["line"] = record.number
        if shown.phase:
            document["phase"] = shown.phase
        if shown.rank:
            document["rank"] = shown.rank
        if shown.signature is not None:
            signature = shown.signature
            document |= {"signature": signature.id, "severity": signature.severity, "role": signature.role}
        if self._context:
            document["match"] = shown.match
        return document

    def _parts(self, name: str, shown: Shown) -> list[tuple[str, str]]:
        """Texts of a line with their styles."""
        record, parts = shown.record, []
        if self._many:
            parts.append((f"{name} ", "cyan"))
        if record.time is not None and (self._journal or record.dated):
            parts.append((f"{record.time:%m-%d %H:%M:%S} ", "dim"))
        if shown.signature is not None:
            severity, role = shown.signature.severity, shown.signature.role
            note = f" ({role})" if severity != "benign" and role != "cause" else ""
            parts.append((f"{severity} {shown.signature.id}{note}: ", _STYLES[severity]))
        parts.append((self._text(shown), "" if shown.match else "dim"))
        return parts

    def _print(self, name: str, shown: Shown) -> None:
        parts = self._parts(name, shown)
        if self._styled:
            from rich.text import Text

            parts = [(text.translate(_SHOWN), style) for text, style in parts]
            self._out.print(Text.assemble(*parts), soft_wrap=True)
        else:
            self._write("".join(text for text, _ in parts))

    def _separate(self, name: str) -> None:
        line = f"{name} --" if self._many else "--"
        if self._styled:
            self._out.print(line, style="dim", markup=False)
        else:
            self._write(line)

    def _write(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= _AT_ONCE:
            self.flush()


def describe_search(lens: Lens, *, what: str, damaged: int = 0, literal: int = 0) -> str:
    """One line: how much was looked at from when to when, what of it matched, and what is known to be missing.

    :param what: ``journal entry`` or ``line``, of which there is one.
    :param damaged: entries that could not be read.
    :param literal: records that hold the pattern as plain text, where it was read as a regular expression.
    """
    text = f"searched {count(lens.searched, what)}"
    if lens.first is not None and lens.last is not None:
        text += f" from {_when(lens.first)} to {_when(lens.last)}"
    if lens.query.selects:
        text += f": {lens.matched} match" if lens.matched else ": none matches"
    if lens.suppressed:
        text += f"; journald had suppressed {count(lens.suppressed, 'message')} (rate limit), which nobody can search"
    if damaged:
        text += f"; {count(damaged, 'entry')} could not be read"
    if literal and not lens.matched:
        text += f"; {literal} hold it as plain text: add --fixed-strings"
    if lens.query.ranks and not lens.matched:
        text += f"; ranks that spoke: {', '.join(lens.ranks) or 'none (a server on one GPU prints no rank)'}"
    return text


def _when(moment: datetime) -> str:
    return moment.isoformat(" ", "seconds")


# ----------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class LogStats:
    """What one log says in figures.

    :param searched: entries or lines read.
    """

    name: str
    figures: Figures
    searched: int

    @property
    def span(self) -> tuple[str, str]:
        """Times of the first and the last decode line, as printed."""
        total = self.figures.series.total
        return (total.start, total.end) if total else ("", "")

    def curves(self) -> list[tuple[str, str, str, Stat]]:
        """Name of each series there is, its title, its unit, and all of its samples as one."""
        total = self.figures.series.total
        found = [
            (name, title, unit, getattr(total, name)) for name, (title, unit) in _CURVES.items() if total
        ]
        return [each for each in found if each[3] is not None]

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable: counts, and each series with its unit, samples, min, mean, max and points over time."""
        overall = self.figures.overall
        begin, end = self.span
        series = {}
        for name, _, unit, stat in self.curves():
            points = [
                {"time": bucket.start, "mean": round(each.mean, 3), "samples": each.n}
                for bucket in self.figures.series.buckets
                if (each := getattr(bucket, name)) is not None
            ]
            series[_JSON_NAMES.get(name, name)] = {
                "unit": unit,
                "samples": stat.n,
                "min": stat.min,
                "mean": round(stat.mean, 3),
                "max": stat.max,
                "points": points,
            }
        return {
            "host": self.name,
            "searched": self.searched,
            "starts": self.figures.starts,
            "decode_lines": overall.decode_lines,
            "prefill_lines": overall.prefill_lines,
            "cuda_graph_lines": overall.with_graph,
            "from": begin,
            "to": end,
            "series": series,
        }


_CURVES: Mapping[str, tuple[str, str]] = {
    "throughput": ("throughput", "tokens/s"),
    "accept": ("acceptance", "tokens/verify step"),
    "running": ("running", "requests"),
    "queued": ("queue", "requests"),
}
_JSON_NAMES = {"accept": "accept_length", "queued": "queue"}


def print_stats(out: Output, found: Sequence[LogStats], *, as_json: bool, errors: Sequence[str] = ()) -> None:
    """Charts of each source, or one JSON document."""
    if as_json:
        document = {"schema": 1, "stats": [one.to_json() for one in found], "errors": list(errors)}
        out.write_line(masked(json.dumps(document, indent=2, ensure_ascii=False)))
        return
    for place, one in enumerate(found):
        if place:
            out.write_line("")
        _print_one(out, one)


def _print_one(out: Output, one: LogStats) -> None:
    from ddtree_ops.report.chart import draw, number

    overall, plain = one.figures.overall, not _draws_blocks()
    width = min(out.width, 100) if out.is_terminal else 80
    head = f"{one.name}: {count(overall.decode_lines, 'decode line')}"
    if overall.with_graph or overall.without_graph:
        known = overall.with_graph + overall.without_graph
        head += f", {overall.with_graph} of {known} in a CUDA graph"
    head += f", {count(overall.prefill_lines, 'prefill line')}"
    if one.figures.restarts:
        head += f", {count(one.figures.starts, 'start')} of the server"
    _line(out, head, "bold")
    for name, title, unit, stat in one.curves():
        if stat.min == stat.max:
            _line(out, f"{title}, {unit}: {number(stat.min)} throughout ({count(stat.n, 'sample')})", "")
            continue
        figures = f"min {number(stat.min)}, mean {number(stat.mean)}, max {number(stat.max)}"
        _line(out, f"{title}, {unit}: {figures} ({count(stat.n, 'sample')})", "")
        for line in draw(_curve(one.figures.series.buckets, name), width=width, plain=plain):
            _line(out, line, "cyan")


def _curve(buckets: Sequence[Bucket], name: str) -> Any:
    from ddtree_ops.diagnose.lens import moment_of
    from ddtree_ops.report.chart import Curve

    shown = [bucket for bucket in buckets if getattr(bucket, name) is not None]
    moments = [moment_of(bucket.start) for bucket in shown]
    known = [moment for moment in moments if moment is not None]
    if len(known) < len(moments) or known != sorted(known):
        places = [float(place) for place in range(len(shown))]
        return Curve([*zip(places, (getattr(bucket, name).mean for bucket in shown), strict=True)])
    first, last = known[0], moment_of(shown[-1].end) or known[-1]
    form = "%H:%M:%S" if (last - first).total_seconds() < 86400 else "%m-%d %H:%M"
    points = [
        (moment.timestamp(), getattr(bucket, name).mean) for moment, bucket in zip(known, shown, strict=True)
    ]
    return Curve(points, f"{first:{form}}", f"{last:{form}}")


def _line(out: Output, text: str, style: str) -> None:
    if out.is_terminal:
        out.print(text, style=style, markup=False, soft_wrap=True)
    else:
        out.write_line(text)


def _draws_blocks() -> bool:
    try:
        "▁█┤└".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
