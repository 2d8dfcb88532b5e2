"""A run report as one HTML file that stands alone: verdict, checks with their evidence, charts with their tables. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC
from html import escape
from typing import Any

from ddtree_ops.figurenames import meaning_of
from ddtree_ops.report.chart import nice_ceiling
from ddtree_ops.report.clean import clean
from ddtree_ops.report.page import badge, page, table
from ddtree_ops.report.points import (
    Point,
    columns_of,
    in_order,
    labels_text,
    points_of,
    setup_of,
    shown,
)
from ddtree_ops.report.progress import duration
from ddtree_ops.report.svg import Bar, Series, bars, columns, lines, waterfall
from ddtree_ops.report.typed import commands_in
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.runreport import RunReport, TargetReport, figures_named
from ddtree_ops.wording import count, moment_of

__all__ = ["html_report"]

_LONGEST = 20_000
_PANELS = 12
_FACTS = 8
_OPTIONS = 4
_OPEN = (Verdict.FAIL, Verdict.INCONCLUSIVE)
_ORDER = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.SKIPPED)
_MODES = {"baseline": 8, "dflash": 2, "ddtree": 1}
_FIRST = ("speedup", "output_rate", "accept_length", "ttft_median", "tpot_median")
_CURVES = (
    ("output_rate", "Output rate"),
    ("ttft_median", "Time to first token, median"),
    ("ttft_p99", "Time to first token, 99th percentile"),
    ("tpot_median", "Time per output token, median"),
    ("accept_length", "Acceptance length"),
)


def html_report(report: RunReport) -> str:
    """The page. Everything that was measured is in it but very long evidence, which ``report.json`` has whole."""
    report = clean(report)
    title = f"{report.command} {report.id}: {report.verdict.value}{'' if report.complete else ' (partial)'}"
    body = [_what(report)]
    if len(report.targets) > 1:
        items = "".join(
            f'<li><a href="#target-{place}">{escape(target.target)}</a> {_verdict(report, target)}</li>'
            for place, target in enumerate(report.targets, 1)
        )
        body.append(f'<nav aria-label="Targets"><ul>{items}</ul></nav>')
    if not report.targets:
        body.append('<p class="note inconclusive">No target: there is nothing to judge by.</p>')
    body += [
        _target(target, place, _verdict(report, target)) for place, target in enumerate(report.targets, 1)
    ]
    header = f"<h1>ddtree-ops {escape(report.command)}</h1><p>{badge(report.verdict.value)} {_sentence(report)}</p>"
    if not report.complete:
        header += (
            '<p class="note inconclusive" role="status"><strong>Partial report.</strong> The run was not finished when'
            " this was written: what is here is true, and more was to come.</p>"
        )
    return page(title, header, "\n".join(body), f"Schema 1 of report.json. {escape(report.id)}")


def _sentence(report: RunReport) -> str:
    checks = [check for target in report.targets for check in target.checks]
    found = [(verdict, sum(check.verdict is verdict for check in checks)) for verdict in _ORDER]
    parts = [f"{number} {verdict.value}" for verdict, number in found if number]
    errors = sum(len(target.errors) for target in report.targets)
    if errors:
        parts.insert(0, count(errors, "error"))
    return escape(
        f"{count(len(report.targets), 'target')}, {count(len(checks), 'check')}: {', '.join(parts) or 'none'}"
    )


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return shown(value)
    if isinstance(value, list) and all(isinstance(each, (str, int)) for each in value):
        return ", ".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, dict) and all(isinstance(each, (str, int, float)) for each in value.values()):
        return ", ".join(f"{name}: {_plain(each)}" for name, each in value.items()) or "none"
    return json.dumps(value, ensure_ascii=False)


def _pairs(pairs: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(_plain(value))}</dd>" for name, value in pairs.items()
    )
    return f"<dl>{rows}</dl>" if rows else ""


def _time(text: str) -> str:
    """A time as people read it; as it is where it is none."""
    moment = moment_of(text)
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if moment else text


def _what(report: RunReport) -> str:
    begun, ended = moment_of(report.started), moment_of(report.ended)
    took = duration((ended - begun).total_seconds()) if begun and ended else ""
    facts = {
        "run": report.id,
        "started": _time(report.started),
        "ended" if report.complete else "broken off": f"{_time(report.ended)} ({took})"
        if took
        else _time(report.ended) or "not finished",
        "inventory": report.inventory,
        "version": report.version,
    }
    options = {name: value for name, value in report.options.items() if value not in ("", None)}
    many = len(options) > _OPTIONS
    if not many:
        facts |= {f"option {name}": value for name, value in options.items()}
    known = _pairs({name: value for name, value in facts.items() if value not in ("", None)})
    if not many:
        return known
    return (
        f'{known}<details class="told"><summary>{count(len(options), "option")} of the run</summary>'
        f"{_pairs(options)}</details>"
    )


def _verdict(report: RunReport, target: TargetReport) -> str:
    """A target's badge; a pass of a run that did not end is one so far."""
    passed = target.verdict is Verdict.PASS and not report.complete
    return badge(target.verdict.value) + (' <span class="dim">so far</span>' if passed else "")


def _target(target: TargetReport, place: int, verdict: str) -> str:
    name = f"{escape(target.target)} {verdict}"
    parts = [f'<section aria-labelledby="target-{place}"><h2 id="target-{place}">{name}</h2>']
    parts += [f'<pre class="note fail" role="alert">{escape(error)}</pre>' for error in target.errors]
    facts = _pairs(target.facts)
    if len(target.facts) > _FACTS:
        facts = f'<details class="told"><summary>{count(len(target.facts), "fact")} of the target</summary>{facts}</details>'
    parts.append(facts)
    parts += [_diagnosis(item) for item in target.diagnoses]
    points = points_of(target)
    checks = _checks(target)
    if points:
        parts += [_bench(target, points), checks]
    else:
        parts += [checks, _histograms(target), _loads(target)]
    parts.append(_figures(target))
    return "\n".join(part for part in parts if part) + "</section>"


def _checks(target: TargetReport) -> str:
    """What failed first."""
    if not target.checks:
        return '<p class="dim">Nothing was checked.</p>'
    checks = sorted(target.checks, key=lambda each: _ORDER.index(each.verdict))
    return "<h3>Checks</h3>" + "\n".join(_check(check) for check in checks)


def _check(check: CheckResult) -> str:
    """A card for what did not pass, its evidence open; a line for the rest, which opens where there is more."""
    seconds = f'<span class="dim">{duration(check.seconds)}</span>' if check.seconds else ""
    name = f"{badge(check.verdict.value)}<code>{escape(check.name)}</code>"
    inner = "".join(_evidence(item.source, item.text, item.line, item.time) for item in check.evidence)
    inner += _pairs(check.facts)
    hint = f"<p>next: {_next(check.hint)}</p>" if check.hint else ""
    if check.verdict not in _OPEN:
        inner = (hint if check.verdict is Verdict.SKIPPED else "") + inner
        line = f"{name}<span>{escape(check.summary)}</span>{seconds}"
        if not inner:
            return f'<div class="check top">{line}</div>'
        return f'<details class="check"><summary class="top">{line}</summary>{inner}</details>'
    what = count(len(check.evidence), "piece") + " of evidence" if check.evidence else "Facts"
    more = f"<details open><summary>{escape(what)}</summary>{inner}</details>" if inner else ""
    top = f'<div class="top">{name}{seconds}</div>'
    return f'<div class="check card">{top}<p>{escape(check.summary)}</p>{hint}{more}</div>'


def _next(hint: str) -> str:
    """What to do next, its commands as code."""
    parts, at = [], 0
    for start, command in commands_in(hint):
        parts += [escape(hint[at:start]), f"<code>{escape(command)}</code>"]
        at = start + len(command)
    return "".join((*parts, escape(hint[at:])))


def _evidence(source: str, text: str, line: int | None, time: str) -> str:
    where = " ".join(part for part in (source, f"line {line}" if line is not None else "", time) if part)
    more = len(text) - _LONGEST
    rest = f"\n… {more} more characters are in report.json" if more > 0 else ""
    return f'<p class="dim">{escape(where)}</p><pre>{escape(text[:_LONGEST] + rest)}</pre>'


def _diagnosis(item: Mapping[str, Any]) -> str:
    source = str(item.get("source") or "")
    parts = [f"<h3>Diagnosis of the journal{f': {escape(source)}' if source else ''}</h3>"]
    parts.append(f"<p>{badge(str(item.get('verdict', '')))} {escape(str(item.get('headline', '')))}</p>")
    for found in item.get("diagnoses") or ():
        if not isinstance(found, dict):
            continue
        parts.append(
            f"<p><strong>{escape(str(found.get('title', '')))}</strong> <code>{escape(str(found.get('signature', '')))}</code></p>"
        )
        parts.append(f"<p>{escape(str(found.get('explanation', '')))}</p>")
        if found.get("remedy"):
            parts.append(f"<p>remedy: {_next(str(found['remedy']))}</p>")
        rows = [
            f"{each.get('line')}: {each.get('text')}"
            for each in found.get("evidence") or ()
            if isinstance(each, dict)
        ]
        lines_ = "\n".join((*map(str, found.get("traceback") or ()), *rows))
        if lines_:
            parts.append(f"<details><summary>Lines</summary><pre>{escape(lines_[:_LONGEST])}</pre></details>")
    return "".join(parts)


def _figures(target: TargetReport) -> str:
    rows = [
        (
            figure.name,
            labels_text(figure),
            shown(figure.value),
            figure.unit,
            str(figure.samples),
            shown(figure.spread) if figure.spread is not None else "",
            figure.source,
            meaning_of(figure.name),
        )
        for figure in in_order(target.all_figures)
    ]
    if not rows:
        return ""
    head = ("figure", "labels", "value", "unit", "samples", "spread", "source", "meaning")
    whole = table(head, rows, f"Every figure of {target.target}", numbers=(2, 4, 5))
    return f"<h3>Figures</h3><details{'' if len(rows) > 30 else ' open'}><summary>{count(len(rows), 'figure')}</summary>{whole}</details>"


def _figure(caption: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{chart}</figure>"


def _charts(title: str, charts: Sequence[str], note: str = "") -> str:
    if not charts:
        return ""
    said = f'<p class="dim">{escape(note)}</p>' if note else ""
    return f'<h3>{escape(title)}</h3>{said}<div class="charts">{"".join(charts)}</div>'


def _bench(target: TargetReport, points: Sequence[Point]) -> str:
    units = columns_of(points)
    keep = [name for name in units if not name.startswith(("accept_histogram", "load_phase"))]
    keep.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    head = ("setup", "concurrency", *(f"{name.replace('_', ' ')} ({units[name]})" for name in keep))
    rows = [
        (point.setup, point.concurrency or "-", *(shown(point.value(name)) for name in keep))
        for point in points
    ]
    whole = table(
        head,
        rows,
        f"Bench points of {target.target}: setup is mode, budget/top-k",
        numbers=range(1, len(head)),
    )
    return "\n".join(
        (
            _speedups(points),
            _curves(points, units),
            f"<h3>Bench points</h3>{whole}",
            _histograms(target),
            _loads(target),
        )
    )


def _loads_of(points: Sequence[Point]) -> list[str]:
    """Concurrencies, the smallest first."""
    return sorted(
        {point.concurrency for point in points if point.concurrency},
        key=lambda text: (not text.isdigit(), int(text) if text.isdigit() else 0, text),
    )


def _speedups(points: Sequence[Point]) -> str:
    known = [(point, value) for point in points if (value := point.value("speedup")) is not None]
    if not known:
        return ""
    top = nice_ceiling(max(1.0, *(value for _, value in known)))
    charts = []
    for load in _loads_of(points):
        found = [
            Bar(point.setup, max(value, 0.0), colour=_MODES.get(point.mode, 3))
            for point, value in known
            if point.concurrency == load and point.mode != "baseline"
        ]
        if found:
            caption = f"Speed-up at concurrency {load}"
            charts.append(_figure(caption, bars(caption, found, "×", top=top, mark=1.0)))
    return _charts(
        "Speed-up over the autoregressive baseline",
        charts,
        "Output rate over the baseline's at the same concurrency; the dashed line is the baseline itself."
        " Setups are mode, budget/top-k.",
    )


def _curves(points: Sequence[Point], units: Mapping[str, str]) -> str:
    places = _loads_of(points)
    setups = list(dict.fromkeys(point.setup for point in points))
    at = {(point.setup, point.concurrency): point for point in points}
    charts = []
    for column, caption in _CURVES:
        series = [
            Series(
                setup,
                [at[setup, load].value(column) if (setup, load) in at else None for load in places],
                style,
            )
            for style, setup in enumerate(setups)
        ]
        series = [each for each in series if any(known is not None for known in each.values)]
        if series:
            charts.append(_figure(caption, lines(caption, places, series, units[column], "concurrency")))
    return _charts("By concurrency", charts, "The numbers are in the table of bench points.")


def _histograms(target: TargetReport) -> str:
    """Of each setup, steps of all its loads together."""
    found: dict[str, dict[str, float]] = {}
    for figure in figures_named(target.all_figures, "accept_histogram"):
        steps = found.setdefault(setup_of(figure.labels), {})
        label = figure.labels.get("accepted", "")
        if figure.value is not None:
            steps[label] = steps.get(label, 0.0) + max(figure.value, 0.0)
    charts, tables = [], []
    for setup, steps in list(found.items())[:_PANELS]:
        total = sum(steps.values())
        if not total:
            continue
        order = sorted(steps, key=lambda text: (len(text), text))
        colour = _MODES.get(setup.partition(" ")[0], 1)
        shares = [Bar(label, 100 * steps[label] / total, colour=colour) for label in order]
        caption = f"{setup or target.target}: {count(int(total), 'verify step')}"
        charts.append(
            _figure(caption, columns(f"Acceptance, {caption}", shares, "drafts accepted in a step"))
        )
        tables += [
            (setup or target.target, label, shown(steps[label]), f"{100 * steps[label] / total:.1f}")
            for label in order
        ]
    if not charts:
        return ""
    head = ("setup", "drafts accepted", "steps", "share (%)")
    return _charts("Acceptance histogram", charts) + _folded(
        table(head, tables, "Acceptance histogram", numbers=(1, 2, 3)), len(found) - _PANELS
    )


def _loads(target: TargetReport) -> str:
    found: dict[str, dict[str, float]] = {}
    for figure in figures_named(target.all_figures, "load_phase"):
        if figure.value is not None and figure.value >= 0:
            found.setdefault(setup_of(figure.labels), {})[figure.labels.get("phase", "")] = figure.value
    if not found:
        return ""
    charts, tables = [], []
    top = max(sum(phases.values()) for phases in found.values())
    names = list(dict.fromkeys(phase for phases in found.values() for phase in phases))
    for setup, phases in list(found.items())[:_PANELS]:
        steps = [Bar(phase, seconds, colour=names.index(phase) % 8 + 1) for phase, seconds in phases.items()]
        caption = f"Load of {setup or target.target}"
        charts.append(_figure(caption, waterfall(caption, steps, "s", top=top)))
        tables += [(setup or target.target, bar.label, shown(bar.value)) for bar in steps]
    return _charts("Load time by phase", charts) + _folded(
        table(("setup", "phase", "seconds"), tables, "Load time by phase", numbers=(2,)), len(found) - _PANELS
    )


def _folded(inner: str, more: int) -> str:
    said = f'<p class="dim">{count(more, "more setup")} in report.json.</p>' if more > 0 else ""
    return f"{said}<details><summary>As a table</summary>{inner}</details>"
