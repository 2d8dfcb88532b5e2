"""Two runs side by side: the same figures of both, their ratio, and which is the better. Pure but for the printing.

Figures are the same where target, name and labels are. Targets are matched by their name; two hosts by a mapping.
Two runs of one setup never agree to the last digit: what is noise is called the same (:meth:`Change.noise`), and what
rests on too few samples is shown and not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from typing import TYPE_CHECKING

from ddtree_ops.errors import UsageError
from ddtree_ops.figurenames import higher_is_better
from ddtree_ops.report.clean import visible
from ddtree_ops.report.page import Raw, page, table
from ddtree_ops.report.points import labels_text, setup_of, shown
from ddtree_ops.report.svg import Bar, bars
from ddtree_ops.results import Figure
from ddtree_ops.runreport import RunReport, TargetReport
from ddtree_ops.secret import redact
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Change",
    "Comparison",
    "Judgement",
    "compare_reports",
    "compare_targets",
    "comparison_html",
    "print_comparison",
]

NEAR = 0.05
"""Change below which two figures are called the same, as a share of the first."""
_SPREADS = 3.0
_SHOWN = 30
_FLOORS = {"ttft": 0.01, "latency": 0.01, "tpot": 0.0005, "accept_length": 0.05}
"""Change below which two figures of a name are called the same, in their unit, however small they are."""
_FLOORS_BY_UNIT = {"s": 0.5, "GB": 0.1}
_LOADS = ("ready", "restart")
_NEAR_LOAD, _FLOOR_LOAD = 0.2, 5.0
"""One load against another, each timed once: the page cache alone makes such a difference (share; seconds)."""
_LEAST_OF = {"median": 8, "p99": 100}
"""By the label stat: with fewer samples, a spread says nothing, and a 99th percentile is the slowest request."""
_RATES = ("speedup", "output_rate", "request_rate")
_LEAST_REQUESTS = 30
"""Requests below which a rate that was measured once is chance."""
_IMPORTANCE = (
    "speedup",
    "output_rate",
    "accept_length",
    "ttft",
    "tpot",
    "failed_requests",
    "lossless_mismatches",
    "latency",
    "request_rate",
    "burst_mismatch",
    "kv_tokens",
    "gpu_memory",
    "host_memory",
    "ready",
    "restart",
)
_LAST = ("accept_histogram", "load_phase")
_NAMED = 3


class Judgement(StrEnum):
    """What a change of one figure means."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    NEUTRAL = "neutral"
    """It differs, and neither way is better, or nobody knows which."""
    UNKNOWN = "unknown"
    """One of the two has no value."""
    FEW = "few"
    """It differs, and rests on too few samples to be judged."""


@dataclass(frozen=True)
class Change:
    """One figure of both runs.

    :param before: of the first run, ``after`` of the second; both have the same name and labels.
    """

    target: str
    before: Figure
    after: Figure

    @property
    def ratio(self) -> float | None:
        """Second over first; None without both values, or where the first is 0."""
        if self.before.value is None or self.after.value is None or self.before.value == 0:
            return None
        return self.after.value / self.before.value

    @property
    def few(self) -> bool:
        """Too few samples for a judgement: a phase of one load, a median of fewer than 8 requests, a 99th percentile of
        fewer than 100, a rate of fewer than 30 that was measured once.
        """
        least = min(self.before.samples, self.after.samples)
        if self.before.name in _RATES and self.before.spread is None and self.after.spread is None:
            return least < _LEAST_REQUESTS
        if self.before.name == "load_phase":
            return least < 2
        return least < _LEAST_OF.get(self.before.labels.get("stat", ""), 0)

    @property
    def noise(self) -> float:
        """Largest change that is called none, in the figure's unit: a share of the first value, three times either spread,
        or the floor of its kind, whichever is largest.
        """
        name, first = self.before.name, abs(self.before.value or 0.0)
        spreads = _SPREADS * max(self.before.spread or 0.0, self.after.spread or 0.0)
        if name in _LOADS and min(self.before.samples, self.after.samples) < 2:
            return max(_NEAR_LOAD * first, _FLOOR_LOAD, spreads)
        floor = _FLOORS.get(name, _FLOORS_BY_UNIT.get(self.before.unit, 0.0))
        return max(NEAR * first, floor, spreads)

    @property
    def judgement(self) -> Judgement:
        """Better or worse where the change is more than :attr:`noise`, and there are samples enough to say so."""
        first, second = self.before.value, self.after.value
        if first is None or second is None or self.before.unit != self.after.unit:
            return Judgement.UNKNOWN
        if abs(second - first) <= self.noise:
            return Judgement.SAME
        better = higher_is_better(self.before.name)
        if better is None or self.before.labels.get("part") == "kv-cache":
            return Judgement.NEUTRAL
        if self.few:
            return Judgement.FEW
        return Judgement.BETTER if (second > first) is better else Judgement.WORSE


@dataclass(frozen=True)
class Comparison:
    """Two runs, or two hosts of a run.

    :param first: what the first is called (``20261130T063000Z-ab12 ct200``), ``second`` likewise.
    :param only_first: ``(target, figure)`` that the second run does not have; ``only_second`` likewise.
    :param notes: what a reader has to know before the figures, a sentence each: a run that is partial, another generator.
    """

    first: str
    second: str
    changes: tuple[Change, ...] = ()
    only_first: tuple[tuple[str, Figure], ...] = ()
    only_second: tuple[tuple[str, Figure], ...] = ()
    notes: tuple[str, ...] = ()

    def judged(self, judgement: Judgement) -> list[Change]:
        """The changes of one kind."""
        return [change for change in self.changes if change.judgement is judgement]


_Key = tuple[str, tuple[tuple[str, str], ...]]


def _key(figure: Figure) -> _Key:
    return figure.name, tuple(sorted(figure.labels.items()))


def _by_key(figures: Iterable[Figure]) -> dict[_Key, Figure]:
    """The last one of a name and its labels counts: it is a check's own."""
    return {_key(figure): figure for figure in figures}


def compare_targets(first: TargetReport, second: TargetReport) -> Comparison:
    """Two targets, of one run or two: figures of the same name and labels, whatever the targets are called."""
    name = first.target if first.target == second.target else f"{first.target} / {second.target}"
    left, right = _by_key(first.all_figures), _by_key(second.all_figures)
    return Comparison(
        first.target,
        second.target,
        tuple(Change(name, left[key], right[key]) for key in left if key in right),
        tuple((first.target, left[key]) for key in left if key not in right),
        tuple((second.target, right[key]) for key in right if key not in left),
    )


def compare_reports(
    first: RunReport, second: RunReport, hosts: Mapping[str, str] | None = None
) -> Comparison:
    """Two runs, target by target.

    :param hosts: which target or host of the second run stands against which of the first (``{"ct200": "b300"}``), where they are not
        called the same; without it, two runs with one target each are compared whatever these are called.
    :raises UsageError: two commands made them, and they have no figure in common.
    """
    pairs: list[tuple[TargetReport, TargetReport]] = []
    free = list(second.targets)
    for mapped in (True, False):
        for target in first.targets:
            if any(target is one for one, _ in pairs):
                continue
            other = _mapped(target, free, hosts or {}) if mapped else _named(target.target, free)
            if other is not None:
                pairs.append((target, other))
                free = [each for each in free if each is not other]
    pairs.sort(key=lambda pair: [pair[0] is each for each in first.targets].index(True))
    if not pairs and len(first.targets) == len(second.targets) == 1:
        pairs = [(first.targets[0], second.targets[0])]
    parts = [compare_targets(*pair) for pair in pairs]
    if first.command != second.command and not any(part.changes for part in parts):
        raise UsageError(
            f"{_called(first)} and {_called(second)} have no figure in common",
            state="both were read; nothing is compared",
            hint="two of the same command are compared: ddtree-ops bench compare DIR1 DIR2, each of a bench",
        )
    paired = ({id(one) for one, _ in pairs}, {id(other) for _, other in pairs})
    return Comparison(
        _title(first, [one for one, _ in pairs]),
        _title(second, [other for _, other in pairs]),
        tuple(change for part in parts for change in part.changes),
        (
            *(each for part in parts for each in part.only_first),
            *(
                (t.target, figure)
                for t in first.targets
                if id(t) not in paired[0]
                for figure in t.all_figures
            ),
        ),
        (
            *(each for part in parts for each in part.only_second),
            *(
                (t.target, figure)
                for t in second.targets
                if id(t) not in paired[1]
                for figure in t.all_figures
            ),
        ),
        tuple(_notes(first, second, pairs)),
    )


def _called(report: RunReport) -> str:
    return f"the report of {report.command or 'an unnamed command'} {report.id}".strip()


def _notes(
    first: RunReport, second: RunReport, pairs: Sequence[tuple[TargetReport, TargetReport]]
) -> Iterable[str]:
    """What stands before the figures."""
    for which, report in (("first", first), ("second", second)):
        if not report.complete:
            yield f"the {which} is partial: its run did not end, and only what it had measured by then is compared"
    if first.command != second.command:
        yield f"two commands made them: {first.command} the first, {second.command} the second"
    for one, other in pairs:
        made = [each.facts.get("generator") for each in (one, other)]
        if all(made) and made[0] != made[1]:
            yield f"{one.target}: two load generators ({made[0]}, {made[1]}): their figures are not the same"
    rates = [
        figure.samples
        for pair in pairs
        for each in pair
        for figure in each.all_figures
        if figure.name == "output_rate" and figure.spread is None
    ]
    if rates and min(rates) < _LEAST_REQUESTS:
        yield f"points rest on as few as {count(min(rates), 'request')}: {_LEAST_REQUESTS} or more tell a change from chance"


def _named(name: str, targets: Sequence[TargetReport]) -> TargetReport | None:
    return next((each for each in targets if each.target == name), None)


def _mapped(
    target: TargetReport, targets: Sequence[TargetReport], hosts: Mapping[str, str]
) -> TargetReport | None:
    """The target that a mapping of targets or hosts names: of a host the same service, else its only one."""
    found = _named(hosts.get(target.target, ""), targets)
    if found is not None or target.host not in hosts:
        return found
    there = [each for each in targets if each.host == hosts[target.host]]
    same = [each for each in there if each.service == target.service]
    return same[0] if same else there[0] if len(there) == 1 else None


def _title(report: RunReport, targets: Sequence[TargetReport]) -> str:
    return " ".join((report.id, ", ".join(target.target for target in targets))).strip()


_WORST_FIRST = (
    Judgement.WORSE,
    Judgement.BETTER,
    Judgement.UNKNOWN,
    Judgement.NEUTRAL,
    Judgement.FEW,
    Judgement.SAME,
)
_STYLE = {Judgement.WORSE: "bold red", Judgement.BETTER: "green", Judgement.SAME: "dim", Judgement.FEW: "dim"}
_HEAD = ("CHANGE", "RATIO", "BEFORE", "AFTER", "UNIT", "FIGURE")


def _sorted(comparison: Comparison) -> list[Change]:
    """Worse first; in each kind what matters most first, and of that what changed most."""

    def key(change: Change) -> tuple[int, int, float]:
        ratio = change.ratio
        size = abs(math.log(ratio)) if ratio is not None and ratio > 0 else math.inf
        return _WORST_FIRST.index(change.judgement), _importance(change.before), -size

    return sorted(comparison.changes, key=key)


def _importance(figure: Figure) -> int:
    """A place: the lower, the earlier it is shown. A median stands before its 99th percentile."""
    if figure.name in _LAST:
        return 2 * (len(_IMPORTANCE) + 1 + _LAST.index(figure.name))
    place = _IMPORTANCE.index(figure.name) if figure.name in _IMPORTANCE else len(_IMPORTANCE)
    return 2 * place + (figure.labels.get("stat") == "p99")


def _headline(comparison: Comparison) -> str:
    """One sentence: which figures got worse and better, at how many of the points where they were judged."""
    parts = []
    for judgement in (Judgement.WORSE, Judgement.BETTER):
        kinds: dict[str, list[Change]] = {}
        for change in _sorted(comparison):
            if change.judgement is judgement:
                kinds.setdefault(_kind(change), []).append(change)
        named = [_extent(kind, found, comparison) for kind, found in list(kinds.items())[:_NAMED]]
        if len(kinds) > _NAMED:
            named.append(f"and {count(len(kinds) - _NAMED, 'more kind')} of figure")
        if named:
            parts.append(f"{judgement.value}: {', '.join(named)}")
    few = len(comparison.judged(Judgement.FEW))
    if not parts and few:
        parts = [
            f"nothing that has samples enough differs by more than noise; {count(few, 'figure')} with too few"
        ]
    elif not parts and comparison.changes:
        parts = ["no figure differs by more than noise"]
    return "; ".join(parts)


def _kind(change: Change) -> str:
    return " ".join(part for part in (change.before.name, change.before.labels.get("stat", "")) if part)


def _extent(kind: str, found: Sequence[Change], comparison: Comparison) -> str:
    """``output_rate at 3 of 8 points (0.38x to 0.60x)``."""
    unjudged = (Judgement.UNKNOWN, Judgement.NEUTRAL, Judgement.FEW)
    judged = [each for each in comparison.changes if _kind(each) == kind and each.judgement not in unjudged]
    ratios = sorted(each.ratio for each in found if each.ratio is not None)
    low, high = (f"{ratios[0]:.2f}x", f"{ratios[-1]:.2f}x") if ratios else ("", "")
    span = "" if not ratios else f" ({low})" if low == high else f" ({low} to {high})"
    return f"{kind}{f' at {len(found)} of {len(judged)} points' if len(judged) > 1 else ''}{span}"


def _name(target: str, figure: Figure) -> str:
    return " ".join(part for part in (target, figure.name, labels_text(figure)) if part)


def _ratio(change: Change) -> str:
    return "-" if change.ratio is None else f"{change.ratio:.2f}x"


def _summary(comparison: Comparison) -> str:
    parts = [
        f"{len(comparison.judged(each))} {each.value}" for each in _WORST_FIRST if comparison.judged(each)
    ]
    for what, only in (("first", comparison.only_first), ("second", comparison.only_second)):
        if only:
            parts.append(f"{count(len(only), 'figure')} only in the {what}")
    if not comparison.changes:
        parts.insert(0, "the two have no figure in common")
    return ", ".join(parts)


def print_comparison(console: Console, comparison: Comparison, *, verbose: bool = False) -> None:
    """The comparison on a terminal: notes, a sentence, what got worse first, and last how many of each kind.

    :param verbose: also what stayed the same, and what only one of the two has.
    """
    from rich.text import Text

    from ddtree_ops.report.lines import say
    from ddtree_ops.report.summary import table_lines

    say(
        console,
        Text.assemble(
            (visible(redact(comparison.first)), "bold cyan"),
            " (before) against ",
            (visible(redact(comparison.second)), "bold cyan"),
            " (after)",
        ),
    )
    for note in comparison.notes:
        say(console, Text(f"note: {visible(redact(note))}", "yellow"))
    headline = _headline(comparison)
    if headline:
        say(console, Text(visible(redact(headline)), "bold"))
    told = [each for each in _sorted(comparison) if verbose or each.judgement is not Judgement.SAME]
    several = len({each.target for each in told}) > 1
    rest = 0 if verbose else max(len(told) - _SHOWN, 0)
    told = told[: len(told) - rest]
    rows = [
        (
            each.judgement.value,
            _ratio(each),
            shown(each.before.value),
            shown(each.after.value),
            each.before.unit,
            visible(redact(_name(each.target if several else "", each.before))),
        )
        for each in told
    ]
    looks = [[_STYLE.get(each.judgement, ""), "", "", "", "dim", ""] for each in told]
    for line in table_lines(_HEAD, rows, looks) if rows else []:
        say(console, line)
    if rest:
        say(console, Text(f"... {rest} more", "dim"))
    for what, only in (("first", comparison.only_first), ("second", comparison.only_second)):
        for target, figure in only if verbose else ():
            say(
                console,
                Text(f"only in the {what}: {visible(redact(_name(target, figure)))} {shown(figure.value)}"),
            )
    say(console, Text(_summary(comparison), "bold"))


def comparison_html(comparison: Comparison) -> str:
    """The comparison as a page that stands alone."""

    def row(each: Change) -> tuple[str, ...]:
        word = each.judgement.value
        look = word if each.judgement in (Judgement.WORSE, Judgement.BETTER) else "dim"
        samples = f"{each.before.samples} / {each.after.samples}"
        return (
            Raw(f'<span class="{look}">{word}</span>'),
            _clean(each.target),
            _clean(each.before.name),
            _clean(labels_text(each.before)),
            shown(each.before.value),
            shown(each.after.value),
            _clean(each.before.unit),
            _ratio(each),
            samples,
        )

    head = ("change", "target", "figure", "labels", "before", "after", "unit", "ratio", "samples")
    parts = []
    if comparison.changes:
        parts.append(_chart(comparison))
        rows = [row(each) for each in _sorted(comparison)]
        parts.append(
            f"<h2>Figures</h2>{table(head, rows, 'Figures of both, worse first', numbers=(4, 5, 7, 8))}"
        )
    for what, only in (
        (comparison.first, comparison.only_first),
        (comparison.second, comparison.only_second),
    ):
        if only:
            listed = [
                (
                    _clean(target),
                    _clean(figure.name),
                    _clean(labels_text(figure)),
                    shown(figure.value),
                    _clean(figure.unit),
                )
                for target, figure in only
            ]
            caption = f"Only in {_clean(what)}"
            whole = table(("target", "figure", "labels", "value", "unit"), listed, caption, numbers=(3,))
            parts.append(
                f"<details><summary>{escape(caption)}: {count(len(only), 'figure')}</summary>{whole}</details>"
            )
    header = (
        f"<h1>Comparison</h1><dl><dt>before</dt><dd>{escape(_clean(comparison.first))}</dd><dt>after</dt>"
        f"<dd>{escape(_clean(comparison.second))}</dd></dl>"
        + "".join(
            f'<p class="note inconclusive" role="status">{escape(_clean(note))}</p>'
            for note in comparison.notes
        )
        + f"<p><strong>{escape(_clean(_headline(comparison)))}</strong></p><p>{escape(_summary(comparison))}</p>"
    )
    rule = (
        f"A change is called better or worse where it is more than {NEAR:.0%} of the first value, more than"
        f" {_SPREADS:g} times either spread (median absolute deviation), and more than the floor of its kind"
        f" (latencies 10 ms, times 0.5 s; a load that was timed once: {_NEAR_LOAD:.0%} and {_FLOOR_LOAD:g} s)."
        f" Phases of one load, medians of fewer than {_LEAST_OF['median']} requests, 99th percentiles of fewer than"
        f" {_LEAST_OF['p99']} and rates of fewer than"
        f" {_LEAST_REQUESTS} are not judged (few)."
    )
    return page("Comparison", header, "".join(parts), rule)


def _clean(text: str) -> str:
    return visible(redact(text))


def _chart(comparison: Comparison) -> str:
    """Ratios of rates, a panel a figure: the bars that a reader looks for first."""
    charts = []
    for name in ("output_rate", "speedup", "accept_length"):
        found = [
            Bar(
                _clean(_place(each)),
                each.ratio,
                each.judgement.value,
                2 if each.judgement is Judgement.WORSE else 1,
            )
            for each in comparison.changes
            if each.before.name == name and each.ratio is not None and each.ratio >= 0
        ]
        if found:
            caption = f"{name}: after over before"
            charts.append(
                f"<figure><figcaption>{caption}</figcaption>{bars(caption, found[:24], '×', mark=1.0)}</figure>"
            )
    return f'<h2>Ratios</h2><div class="charts">{"".join(charts)}</div>' if charts else ""


def _place(change: Change) -> str:
    """Which one, in few letters."""
    labels = change.before.labels
    load = f"c{labels['concurrency']}" if labels.get("concurrency") else ""
    return " ".join(part for part in (setup_of(labels), load) if part) or change.target
