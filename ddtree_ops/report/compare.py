"""Two runs side by side: the same figures of both, their ratio, and which is the better. Pure but for the printing.

Figures are the same where target, name and labels are. Targets are matched by their name; two hosts by a mapping.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from typing import TYPE_CHECKING

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


class Judgement(StrEnum):
    """What a change of one figure means."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    NEUTRAL = "neutral"
    """It differs, and neither way is better, or nobody knows which."""
    UNKNOWN = "unknown"
    """One of the two has no value."""


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
    def judgement(self) -> Judgement:
        """Better or worse where the change is more than :data:`NEAR` and more than three times either spread."""
        first, second = self.before.value, self.after.value
        if first is None or second is None or self.before.unit != self.after.unit:
            return Judgement.UNKNOWN
        noise = _SPREADS * max(self.before.spread or 0.0, self.after.spread or 0.0)
        if abs(second - first) <= max(NEAR * abs(first), noise):
            return Judgement.SAME
        better = higher_is_better(self.before.name)
        if better is None:
            return Judgement.NEUTRAL
        return Judgement.BETTER if (second > first) is better else Judgement.WORSE


@dataclass(frozen=True)
class Comparison:
    """Two runs, or two hosts of a run.

    :param first: what the first is called (``20261130T063000Z-ab12 ct200``), ``second`` likewise.
    :param only_first: ``(target, figure)`` that the second run does not have; ``only_second`` likewise.
    """

    first: str
    second: str
    changes: tuple[Change, ...] = ()
    only_first: tuple[tuple[str, Figure], ...] = ()
    only_second: tuple[tuple[str, Figure], ...] = ()

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
    )


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


_WORST_FIRST = (Judgement.WORSE, Judgement.BETTER, Judgement.NEUTRAL, Judgement.UNKNOWN, Judgement.SAME)
_STYLE = {Judgement.WORSE: "bold red", Judgement.BETTER: "green", Judgement.SAME: "dim"}
_HEAD = ("CHANGE", "RATIO", "BEFORE", "AFTER", "UNIT", "FIGURE")


def _sorted(comparison: Comparison) -> list[Change]:
    """Worse first, and in each kind what changed most."""

    def key(change: Change) -> tuple[int, float]:
        ratio = change.ratio
        size = abs(math.log(ratio)) if ratio is not None and ratio > 0 else math.inf
        return _WORST_FIRST.index(change.judgement), -size

    return sorted(comparison.changes, key=key)


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
    """The comparison on a terminal: what got worse first, and last how many of each kind.

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
        f"<dd>{escape(_clean(comparison.second))}</dd></dl><p>{escape(_summary(comparison))}</p>"
    )
    rule = (
        f"A change is called better or worse where it is more than {NEAR:.0%} of the first value and more than"
        f" {_SPREADS:g} times either spread (median absolute deviation)."
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
