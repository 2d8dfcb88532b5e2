"""What earlier runs left on this machine, and whether this run is worse than they were, noise allowed for.

One file a run and target, ``HISTORY/INVENTORY/HOST/SERVICE/RUN.json``: a :class:`~ddtree_ops.runreport.RunReport` with that
target alone, written whole or not at all. The judgement is pure; the rule for noise is :mod:`ddtree_ops.noise`.

A series that is worse for the first time is inconclusive, and fails where it is worse in the next run too; a large change
fails at once. Comparable are runs with the same launch flags (fact ``flags``). Another release is compared all the same, and that is said;
once enough runs of the new release are there, only they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ddtree_ops.errors import LockHeld, OpsError
from ddtree_ops.figurenames import FIGURES, trend_direction
from ddtree_ops.noise import LEAST_RUNS, Change, Judgement, compare
from ddtree_ops.report.write import json_text, read_report, write_file
from ddtree_ops.results import CheckResult, Evidence, Figure, Verdict, worst
from ddtree_ops.runreport import RunReport, TargetReport
from ddtree_ops.wording import count

__all__ = [
    "RUNS",
    "Past",
    "Store",
    "accept_lengths",
    "comparable",
    "figure_results",
    "new_failures",
    "trend",
    "with_command",
]

RUNS = 14
"""Compared with at most so many earlier runs, unless said otherwise."""
_KEPT = 400
_READ = 60
_NEW_BASELINE = "new_baseline"
_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_OF_A_LOAD = ("ready", "load_phase", "restart")
"""One value a start of the server, however many runs looked at it."""
_LATENCIES = ("ttft", "tpot", "latency")
_SHOWN = 6


@dataclass(frozen=True)
class Past:
    """Earlier runs on one target.

    :param runs: oldest first, from the newest one with a new baseline on.
    :param damaged: files that could not be read, with the reason: what they said is not known.
    """

    runs: tuple[RunReport, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[TargetReport, ...]:
        """What was found on the target, oldest first."""
        return tuple(target for run in self.runs for target in run.targets)

    @property
    def latest(self) -> TargetReport | None:
        """What the newest run found."""
        return self.targets[-1] if self.runs else None


class Store:
    """The history on this machine.

    :param root: folder of all histories. :param inventory: name of the inventory.
    """

    def __init__(self, root: Path, inventory: str) -> None:
        self.root = root
        self.inventory = _ODD.sub("-", inventory) or "inventory"

    def folder(self, host: str, service: str) -> Path:
        """Where the runs on a target are."""
        return self.root / self.inventory / _ODD.sub("-", host) / _ODD.sub("-", service)

    def past(self, host: str, service: str) -> Past:
        """The newest runs on a target; files that are damaged are named and left out."""
        runs: list[RunReport] = []
        damaged: list[str] = []
        folder = self.folder(host, service)
        for path in sorted(folder.glob("*.json"), reverse=True)[:_READ]:
            try:
                run = read_report(path)
            except OpsError as error:
                damaged.append(f"{path}: {error.message.removeprefix(f'{path} ')}")
                continue
            if len(run.targets) != 1:
                damaged.append(f"{path}: it holds {count(len(run.targets), 'target')}, and should hold one")
                continue
            runs.append(run)
            if run.options.get(_NEW_BASELINE):
                break
        return Past(tuple(reversed(runs)), tuple(reversed(damaged)))

    def add(self, run: RunReport) -> Path:
        """Keep a run over one target; the oldest ones beyond the newest four hundred go.

        :raises OpsError: it cannot be written.
        """
        (target,) = run.targets
        folder = self.folder(target.host, target.service)
        path = folder / f"{run.id}.json"
        write_file(path, json_text(run))
        for old in sorted(folder.glob("*.json"))[:-_KEPT]:
            old.unlink(missing_ok=True)
        return path

    @contextlib.contextmanager
    def lock(self, hosts: Iterable[str]) -> Iterator[None]:
        """While it is held no other run with this history looks at these hosts, whatever its inventory.

        The kernel lets go of it when the process ends, however it ends.

        :raises LockHeld: another run is under way. :raises OpsError: the folder cannot be written.
        """
        folder = self.root / "locks"
        with contextlib.ExitStack() as stack:
            for host in sorted(set(hosts)):
                path = folder / f"{_ODD.sub('-', host)}.lock"
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(path.open("a+", encoding="utf-8"))
                except OSError as error:
                    raise OpsError(
                        f"the history cannot be locked: {path}: {error.strerror}",
                        state="nothing was contacted or changed",
                        hint="name another folder: --history DIR",
                    ) from error
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    file.seek(0)
                    owner = file.read(40).strip() or "?"
                    raise LockHeld(
                        f"another nightly is under way on {host} (process {owner} of this machine)",
                        host=host,
                        phase="lock",
                        state="nothing was contacted or changed",
                        hint=f"wait for it, or end it: kill {owner}",
                    ) from None
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
            yield


# ---------------------------------------------------------------------------------------------- the comparison

Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""Check that measured it (empty: the target itself), name of the figure, labels."""


def comparable(past: Past, now: TargetReport) -> tuple[tuple[TargetReport, ...], str]:
    """Earlier runs with the flags of this one, oldest first, and what a reader must know of the choice. Pure."""
    same = tuple(target for target in past.targets if _same(target, now, "flags"))
    notes = []
    if others := len(past.targets) - len(same):
        runs = count(others, "earlier run")
        notes.append(f"{runs} with other or unknown flags left out")
    release = str(now.facts.get("release") or "")
    before = next((str(one.facts.get("release") or "") for one in reversed(same)), release)
    if before != release:
        notes.append(
            f"the release changed since the last run: {before[:12] or 'none'} -> {release[:12] or 'none'}"
        )
    elif any(not _same(target, now, "release") for target in same):
        own = tuple(target for target in same if _same(target, now, "release"))
        notes.append(
            f"{count(len(own), 'run')} of release {release[:12] or 'unknown'}, the others of another one"
        )
    return same, "; ".join(notes)


def _same(one: TargetReport, other: TargetReport, fact: str) -> bool:
    mine, theirs = one.facts.get(fact), other.facts.get(fact)
    return bool(mine) and mine == theirs


def _values(target: TargetReport) -> dict[Key, Figure]:
    """Figures that can be compared, several of one key as their median; numbers that are none are left out."""
    found: dict[Key, list[Figure]] = {}
    for key, figure in _keyed(target):
        if figure.value is not None and math.isfinite(figure.value) and trend_direction(key[1]) is not None:
            found.setdefault(key, []).append(figure)
    return {
        key: replace(each[0], value=median(one.value for one in each if one.value is not None))
        for key, each in found.items()
    }


def _value(target: TargetReport, key: Key) -> float | None:
    """The value of one key in :func:`_values`."""
    check, name, labels = key
    parts = [one.figures for one in target.checks if one.name == check] if check else [target.figures]
    found = [
        figure.value
        for figures in parts
        for figure in figures
        if figure.name == name and figure.value is not None and math.isfinite(figure.value)
        if tuple(sorted(figure.labels.items())) == labels
    ]
    return median(found) if found else None


def _keyed(target: TargetReport) -> Iterator[tuple[Key, Figure]]:
    for check, figures in (("", target.figures), *((one.name, one.figures) for one in target.checks)):
        for figure in figures:
            yield (check, figure.name, tuple(sorted(figure.labels.items()))), figure


def _broken(target: TargetReport) -> dict[Key, float]:
    """Figures whose value is no finite number."""
    return {
        key: figure.value
        for key, figure in _keyed(target)
        if figure.value is not None and not math.isfinite(figure.value)
    }


def _shown_only(figure: Figure) -> bool:
    """The tail of a distribution, or one request's time: told, and too noisy to be judged."""
    return figure.labels.get("stat") == "p99" or (figure.name in _LATENCIES and figure.samples < 2)


def _mark(target: TargetReport, key: Key) -> str:
    """How a run judged this series: ``fails``, ``worse`` (for the first time), or empty."""
    judged = next((one for one in target.checks if one.name == f"trend.{key[1]}"), None)
    if judged is None:
        return ""
    for series in judged.facts.get("series", ()):
        if series["check"] == key[0] and tuple(sorted(series["labels"].items())) == key[2]:
            return "fails" if series.get("fails") else "worse" if series.get("worse") else ""
    return "fails" if judged.verdict is Verdict.FAIL else ""


def _series(runs: Sequence[TargetReport], key: Key, now: TargetReport, limit: int) -> list[float]:
    """Earlier values of a figure, oldest first; of what a load yields one a start of the server, other than today's.

    One that was worse is no measure for later ones.
    """
    found: dict[str, float] = {}
    for number, target in enumerate(runs):
        value = _value(target, key)
        if value is None or _mark(target, key):
            continue
        start = _start(target, key)
        if not start or start != now.facts.get("invocation"):
            found[start or f"run {number}"] = value
    return list(found.values())[-limit:]


def _start(target: TargetReport, key: Key) -> str:
    """Which start of the server a figure belongs to; empty for one that each run measures anew."""
    return str(target.facts.get("invocation") or "") if key[1] in _OF_A_LOAD else ""


def accept_lengths(now: TargetReport, past: Past, *, runs: int = RUNS) -> list[Figure]:
    """What the check ``acceptance`` found in earlier runs with these flags, oldest first, for its own judgement. Pure.

    Those of this release alone once there are enough of them, as :func:`figure_results` does.
    """
    earlier, _ = comparable(past, now)
    key: Key = ("acceptance", "accept_length", ())
    own = _series(_of_release(earlier, now), key, now, runs)
    values = own if len(own) >= LEAST_RUNS else _series(earlier, key, now, runs)
    return [Figure("accept_length", value, "tokens/step", "history") for value in values]


def trend(now: TargetReport, past: Past, *, runs: int = RUNS) -> list[CheckResult]:
    """All results of the comparison: figures, failures, and what could not be read. Pure."""
    results = [*figure_results(now, past, runs=runs), new_failures(now, past)]
    if past.damaged:
        results.append(
            CheckResult(
                "trend.history",
                Verdict.INCONCLUSIVE,
                f"{count(len(past.damaged), 'earlier run')} cannot be read and was left out",
                host=now.target,
                evidence=tuple(Evidence("history", line) for line in past.damaged[:_SHOWN]),
                hint="remove what is damaged, or bring it back from a copy",
            )
        )
    return results


def figure_results(now: TargetReport, past: Past, *, runs: int = RUNS) -> list[CheckResult]:
    """``trend.NAME`` of each figure that was measured now, or always was and now is not. Pure."""
    earlier, note = comparable(past, now)
    values, broken = _values(now), _broken(now)
    own = _of_release(earlier, now)
    known = {key: (_series(own, key, now, runs), _series(earlier, key, now, runs)) for key in values}
    counted = sum(
        key[1] != "load_phase" and not _shown_only(values[key]) and len(all_values) >= LEAST_RUNS
        for key, (_, all_values) in known.items()
    )
    names = dict.fromkeys([*FIGURES, *(key[1] for key in (*values, *broken))])
    results = []
    for name in names:
        bad = [key for key in broken if key[1] == name]
        if bad:
            text = f"{_label(bad[0]) or name}: {name} is {broken[bad[0]]}, and that is no number"
            hint = _measuring(bad[0][0], now)
            results.append(
                CheckResult(f"trend.{name}", Verdict.INCONCLUSIVE, text, host=now.target, hint=hint)
            )
            continue
        if name == "load_phase":
            continue
        judged = {
            key: _judge(figure, *known[key], counted, told=_told(figure, key, now, earlier))
            for key, figure in values.items()
            if key[1] == name
        }
        missing = _missing(name, now, values, earlier)
        if judged or missing:
            results.append(_result(name, now, judged, values, missing, note, earlier))
    return results


def _of_release(runs: Sequence[TargetReport], now: TargetReport) -> list[TargetReport]:
    return [target for target in runs if _same(target, now, "release")]


def _told(figure: Figure, key: Key, now: TargetReport, earlier: Sequence[TargetReport]) -> bool:
    """It is shown only: by its kind, or because an earlier run judged the same start, and did not fail it."""
    start = _start(now, key)
    same = [
        target
        for target in earlier
        if start and _start(target, key) == start and _value(target, key) is not None
    ]
    return _shown_only(figure) or (bool(same) and _mark(same[-1], key) != "fails")


def _judge(
    figure: Figure, own_values: Sequence[float], all_values: Sequence[float], series: int, *, told: bool
) -> Change:
    """Against the runs of the same release where there are enough of them, else against all."""
    assert figure.value is not None
    higher = bool(trend_direction(figure.name))
    values = own_values if len(own_values) >= LEAST_RUNS else all_values
    change = compare(values, figure.value, higher_is_better=higher, series=series)
    return replace(change, judgement=Judgement.SHOWN) if told and change.enough else change


def _missing(
    name: str, now: TargetReport, values: Mapping[Key, Figure], earlier: Sequence[TargetReport]
) -> list[Key]:
    """Figures that the newest comparable run of the same checks had and this one has not, although their check was run."""
    before = next((target for target in reversed(earlier) if _asked(target) == _asked(now)), None)
    if before is None:
        return []
    ran = {check.name for check in now.checks if check.verdict is not Verdict.SKIPPED}
    return [key for key in _values(before) if key[1] == name and key not in values and key[0] in ran]


def _asked(target: TargetReport) -> set[str]:
    """The checks of a validation that a run asked: a suite, or some of one, after which fewer figures can be had."""
    from ddtree_ops.checks.validation.registry import checks

    return checks().keys() & {check.name for check in target.checks}


def _measuring(check: str, now: TargetReport) -> str:
    """The command that runs a check again: a standing one by the others, for it asks nothing itself."""
    from ddtree_ops.checks.validation.registry import checks

    found = checks().get(check)
    if found is None:
        return f"ddtree-ops status {now.target}"
    return f"ddtree-ops validate {now.target}" + ("" if found.standing else f" --check {check}")


def _label(key: Key) -> str:
    check, _, labels = key
    inside = ", ".join(f"{name} {value}" for name, value in labels)
    return ", ".join(part for part in (check, inside) if part)


def _result(
    name: str,
    now: TargetReport,
    judged: Mapping[Key, Change],
    values: Mapping[Key, Figure],
    missing: Sequence[Key],
    note: str,
    earlier: Sequence[TargetReport],
) -> CheckResult:
    lines = {key: _sentence(values[key], change) for key, change in judged.items()}
    worse = [key for key, change in judged.items() if change.worse]
    fails = [key for key in worse if judged[key].large or (earlier and _mark(earlier[-1], key))]
    better = [key for key, change in judged.items() if change.better]
    enough = [key for key, change in judged.items() if change.enough]
    hint = ""
    if worse:
        verdict = Verdict.FAIL if fails else Verdict.INCONCLUSIVE
        key = max(fails or worse, key=lambda one: judged[one].deviations)
        words = "worse than before" if fails else "worse than before, for the first time"
        summary = f"{words}: {lines[key]}" + _of(key, len(judged))
        if len(worse) > 1:
            summary += f"; {len(worse)} of {len(judged)} series are worse"
        host = now.target
        hint = (
            f"ddtree-ops status {host}; wanted so? ddtree-ops nightly {host} --new-baseline"
            if fails
            else f"the next run decides, or one now: ddtree-ops nightly {host}"
        )
    elif missing:
        verdict = Verdict.INCONCLUSIVE
        summary = f"not measured now, and it was in the run before: {_label(missing[0]) or name}"
        hint = _measuring(missing[0][0], now)
    elif enough:
        verdict = Verdict.PASS
        key = min(enough, key=lambda one: (one not in better, one))
        summary = ("better than before: " if better else "as before: ") + lines[key] + _of(key, len(judged))
    else:
        verdict = Verdict.SKIPPED
        few = [key for key, change in judged.items() if change.judgement is Judgement.TOO_FEW]
        key = next(iter(few or judged))
        summary = ("not compared yet: " if few else "not judged: ") + lines[key] + _of(key, len(judged))
    return CheckResult(
        f"trend.{name}",
        verdict,
        f"{summary} ({note})" if note else summary,
        host=now.target,
        facts={
            "compared": len(enough),
            "worse": [_label(key) or name for key in worse],
            "series": [
                {**_series_facts(key, values[key], change), "fails": key in fails}
                for key, change in judged.items()
            ],
        },
        evidence=(
            *(
                Evidence("history", f"{_label(key)}: {lines[key]}" if _label(key) else lines[key])
                for key in (*worse, *(one for one in better if not worse))[:_SHOWN]
            ),
            *(_phases(now, earlier) if worse and name in _OF_A_LOAD else ()),
        ),
        hint=hint,
    )


def _of(key: Key, series: int) -> str:
    return f" [{_label(key)}]" if series > 1 else ""


def _series_facts(key: Key, figure: Figure, change: Change) -> dict[str, Any]:
    return {
        "check": key[0],
        "labels": dict(key[2]),
        "now": figure.value,
        "unit": figure.unit,
        "median": change.median,
        "mad": change.mad,
        "runs": change.runs,
        "limit": change.limit,
        "worse": change.worse,
        "better": change.better,
        "judgement": change.judgement.value,
    }


def _number(value: float) -> str:
    return f"{value:.4g}"


def _sentence(figure: Figure, change: Change) -> str:
    assert figure.value is not None
    text = f"{figure.name} {_number(figure.value)} {figure.unit}"
    if change.median is None:
        return f"{text}, no earlier {'load' if figure.name in _OF_A_LOAD else 'run'}"
    text += f" against {_number(change.median)}, the median of {count(change.runs, 'run')}"
    if change.judgement is Judgement.TOO_FEW:
        return f"{text}, too few to judge by"
    if change.judgement is Judgement.NO_SCALE:
        return f"{text}, and there is no scale to judge by"
    if change.limit is not None and (change.worse or change.better):
        text += f" (noise {_number(change.limit)})"
    return text


def _phases(now: TargetReport, earlier: Sequence[TargetReport]) -> list[Evidence]:
    """Where the time of a load went, phase by phase, for those that took longer than before."""
    found = []
    for key, figure in _values(now).items():
        before = _series(earlier, key, now, RUNS)
        if key[1] == "load_phase" and before and figure.value is not None and figure.value > median(before):
            text = f"{_label(key)}: {_number(figure.value)} {figure.unit} against {_number(median(before))}"
            found.append(Evidence("history", text))
    return found[:_SHOWN]


# ------------------------------------------------------------------------------------------------ new failures


def _prints(target: TargetReport) -> dict[str, Mapping[str, Any]]:
    """Failures by fingerprint."""
    return {
        str(item["fingerprint"]): item
        for diagnosis in target.diagnoses
        for item in diagnosis.get("diagnoses", ())
        if item.get("fingerprint")
    }


def with_command(remedy: str, host: str) -> str:
    """A remedy with something to type: most of those that the signatures give have a command, some are prose alone. Pure."""
    if "ddtree-ops " in remedy:
        return remedy
    return "; ".join(part for part in (remedy, f"ddtree-ops diagnose {host}") if part)


def new_failures(now: TargetReport, past: Past) -> CheckResult:
    """``trend.failures``: is there a failure in the journal that no earlier run had, by its fingerprint? Pure.

    A new fatal one fails; a new one that only degrades the service is inconclusive: somebody should look; what a request
    brought upon itself is listed.
    """
    name, host = "trend.failures", now.target
    if not now.diagnoses:
        return CheckResult(name, Verdict.SKIPPED, "no journal was read in this run", host=host)
    found = _prints(now)
    earlier = [target for target in past.targets if target.diagnoses]
    if not earlier:
        text = f"no earlier run: {count(len(found), 'failure')} noted for the next one"
        return CheckResult(name, Verdict.SKIPPED, text, host=host, facts={"fingerprints": sorted(found)})
    seen = Counter(name for target in earlier for name in _prints(target))
    new = {name: item for name, item in found.items() if name not in seen}
    facts = {
        "fingerprints": sorted(found),
        "new": sorted(new),
        "runs": len(earlier),
        "seen_before": {one: seen[one] for one in sorted(found) if one in seen},
    }
    order = {"fatal": Verdict.FAIL, "degraded": Verdict.INCONCLUSIVE}
    verdict = worst(
        [Verdict.PASS, *(order.get(str(item.get("severity")), Verdict.PASS) for item in new.values())]
    )
    telling = sorted(
        new.values(), key=lambda item: list(order).index(item["severity"]) if item["severity"] in order else 9
    )
    runs = count(len(earlier), "earlier run")
    if telling:
        first = telling[0]
        more = f" and {len(telling) - 1} more" if len(telling) > 1 else ""
        summary = f"new {first['severity']} failure, in none of {runs}: {first['signature']}: {first['title']}{more}"
    elif found:
        summary = f"nothing new: {count(len(found), 'failure')} seen before in {runs}"
    else:
        summary = f"no signature of a failure in the journal; {runs} to compare with"
    return CheckResult(
        name,
        verdict,
        summary,
        host=host,
        facts=facts,
        evidence=tuple(
            Evidence("journal", str(line["text"]), time=str(item.get("first", "")))
            for item in telling[:_SHOWN]
            for line in list(item.get("evidence", ()))[:1]
        ),
        hint=with_command(str(telling[0].get("remedy") or ""), now.host)
        if verdict is not Verdict.PASS
        else "",
    )
