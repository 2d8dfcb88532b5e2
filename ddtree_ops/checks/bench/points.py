"""The points of a bench: which configurations at which concurrency, in which order, and what is left of them. Pure.

A configuration costs a load of the model, a point of it only its requests: all concurrencies of a configuration are
measured on one start, and the configuration that is to serve afterwards comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddtree_ops.errors import UsageError
from ddtree_ops.inventory.models import Service
from ddtree_ops.results import CheckResult, Figure, Verdict
from ddtree_ops.runreport import figures_named

__all__ = [
    "PREFIX",
    "Configuration",
    "Point",
    "configurations",
    "matches",
    "missing",
    "ordered",
    "recommended",
    "with_speedups",
]

PREFIX = "bench."
"""What the names of bench results begin with."""
_TREE_SETTINGS = ("budget", "topk_cap", "budget_schedule")

Mode = Literal["baseline", "dflash", "ddtree"]


@dataclass(frozen=True)
class Configuration:
    """What runs while points are measured.

    :param mode: ``baseline``: without speculation; ``dflash``: the linear drafter; ``ddtree``: the tree.
    :param budget: tree nodes, root not included; None but for ``ddtree``.
    :param topk: candidates of the drafter a position; None: as the runtime has it.
    """

    mode: Mode
    budget: int | None = None
    topk: int | None = None

    @property
    def name(self) -> str:
        """``baseline``, ``dflash``, ``ddtree-b16-k4``."""
        budget = "" if self.budget is None else f"-b{self.budget}"
        topk = "" if self.topk is None else f"-k{self.topk}"
        return f"{self.mode}{budget}{topk}"

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its figures: those that apply."""
        found = {"mode": self.mode, "budget": self.budget, "topk": self.topk}
        return {name: str(value) for name, value in found.items() if value is not None}

    def settings(self, service: Service) -> list[str]:
        """``KEY=VALUE`` settings that make the service this configuration, for :func:`ddtree_ops.inventory.override`.

        What is only measured need not gain anything by speculation: a low accept length is a result, not a failed
        deployment. The service's own configuration keeps its own rules: it is what serves afterwards. They are part of the
        record that the host keeps of an activation, so going back to one later asks for no more, and no less, either.
        """
        floor = [] if service.health.min_accept_length is None else ["health.min_accept_length=null"]
        measured = [] if matches(self, service) else [*floor, "health.judge_speculation=false"]
        if self.mode == "baseline":
            flags = [
                key for key in service.args if key.strip("-").replace("_", "-").startswith("speculative")
            ]
            return ["speculative=null", *(f"args.{key}=null" for key in flags), *measured]
        if service.speculative is None:
            raise UsageError(
                f"{service.name}: no speculative: is given, so there is no {self.mode} to measure"
            )
        if self.mode == "dflash":
            away = [f"speculative.{name}=null" for name in service.speculative.tree_settings]
            return ["speculative.algorithm=DFLASH", *away, *measured]
        topk = [] if self.topk is None else [f"speculative.topk_cap={self.topk}"]
        return ["speculative.algorithm=DDTREE", f"speculative.budget={self.budget}", *topk, *measured]


@dataclass(frozen=True)
class Point:
    """A configuration under a number of requests at the same time."""

    configuration: Configuration
    concurrency: int

    @property
    def name(self) -> str:
        """Name of its result: ``bench.ddtree-b16-k4-c8``."""
        return f"{PREFIX}{self.configuration.name}-c{self.concurrency}"

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its figures."""
        return {**self.configuration.labels, "concurrency": str(self.concurrency)}


def configurations(
    service: Service,
    *,
    budgets: Sequence[int] = (),
    topk: Sequence[int] = (),
    baseline: bool = True,
    dflash: bool = True,
) -> tuple[Configuration, ...]:
    """All configurations that are asked for: the baseline first, then DFLASH, then every budget with every top-k.

    :param budgets: left out: the service's own; ``topk`` likewise.
    :raises UsageError: a budget that cannot hold one whole draft, a service without speculation, or nothing to measure.
    """
    speculative = service.speculative
    if speculative is None and (budgets or topk):
        raise UsageError(
            f"{service.name} has no speculative decoding, so there is no tree to measure",
            hint="give the service speculative: in the inventory, or leave --budgets and --topk out",
        )
    trees: tuple[Configuration, ...] = ()
    if speculative is not None:
        own_budget = [] if speculative.budget is None else [speculative.budget]
        own_topk = [None] if speculative.topk_cap is None else [speculative.topk_cap]
        trees = tuple(
            Configuration("ddtree", budget, cap)
            for budget in dict.fromkeys(budgets or own_budget)
            for cap in dict.fromkeys(topk or own_topk)
        )
        least = speculative.block_size - 1
        small = [str(tree.budget) for tree in trees if (tree.budget or 0) < least]
        if small:
            raise UsageError(
                f"--budgets {','.join(dict.fromkeys(small))}: less than block_size - 1 = {least}, so the tree could not "
                "hold one whole draft",
                state="nothing was changed",
                hint=f"give budgets of {least} or more",
            )
    found = (
        *((Configuration("baseline"),) if baseline else ()),
        *((Configuration("dflash"),) if dflash and speculative is not None else ()),
        *trees,
    )
    if not found:
        raise UsageError(
            f"{service.name}: nothing is left to measure", hint="leave --no-baseline or --no-dflash out"
        )
    return found


def matches(configuration: Configuration, service: Service) -> bool:
    """Is that what the service says?"""
    speculative = service.speculative
    if speculative is None:
        return configuration.mode == "baseline"
    if configuration.mode != speculative.algorithm.lower():
        return False
    return configuration.mode == "dflash" or (
        configuration.budget == speculative.budget and configuration.topk in (None, speculative.topk_cap)
    )


def ordered(found: Iterable[Configuration], last: Service) -> tuple[Configuration, ...]:
    """In their order, but for the one that ``last`` says: it serves afterwards, and so costs no further load."""
    return tuple(sorted(found, key=lambda each: matches(each, last)))


def missing(
    configuration: Configuration, concurrency: Iterable[int], done: Iterable[CheckResult]
) -> tuple[Point, ...]:
    """Points of a configuration that no earlier result judges: what was inconclusive is measured again."""
    judged = {each.name for each in done if each.verdict in (Verdict.PASS, Verdict.FAIL)}
    points = (Point(configuration, each) for each in dict.fromkeys(concurrency))
    return tuple(point for point in points if point.name not in judged)


def _rate(check: CheckResult) -> float | None:
    """Output tokens a second of a point that passed."""
    rates = figures_named(check.figures, "output_rate")
    return rates[0].value if rates and check.ok else None


def _concurrency(check: CheckResult) -> str:
    return next((each.labels["concurrency"] for each in check.figures if "concurrency" in each.labels), "")


def with_speedups(checks: Iterable[CheckResult]) -> tuple[CheckResult, ...]:
    """The results with ``speedup``: the output rate over that of the baseline at the same concurrency.

    None is made up: a point has none where the baseline of its concurrency is missing, failed, or yielded nothing.
    """
    checks = tuple(checks)
    baselines: dict[str, float] = {}
    for check in checks:
        rate = _rate(check)
        if rate and check.name.startswith(f"{PREFIX}baseline-"):
            baselines[_concurrency(check)] = rate
    found = []
    for check in checks:
        kept = tuple(figure for figure in check.figures if figure.name != "speedup")
        rate, base = _rate(check), baselines.get(_concurrency(check))
        if rate is not None and base is not None and not check.name.startswith(f"{PREFIX}baseline-"):
            rated = figures_named(kept, "output_rate")[0]
            source = "output_rate over that of the baseline of this run"
            kept += (Figure("speedup", rate / base, "ratio", source, rated.samples, labels=rated.labels),)
        found.append(replace(check, figures=kept))
    return tuple(found)


def recommended(checks: Iterable[CheckResult]) -> Mapping[str, str]:
    """Of each concurrency the configuration with the highest output rate of those that passed, by concurrency. None where
    only one passed: there is nothing that it is faster than.
    """
    best: dict[str, tuple[float, str]] = {}
    passed: list[str] = []
    for check in checks:
        rate, at = _rate(check), _concurrency(check)
        if rate is None or not at:
            continue
        passed.append(at)
        if at not in best or rate > best[at][0]:
            name = check.name.removeprefix(PREFIX).removesuffix(f"-c{at}")
            best[at] = (rate, name)
    return {at: best[at][1] for at in sorted(best, key=int) if passed.count(at) > 1}
