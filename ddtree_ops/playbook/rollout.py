"""In what order and how far a run goes over many hosts: batches, canaries, how many failures end it. Pure.

A host counts as failed when any of its services failed. A host that was never started is ``skipped``: never a pass.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddtree_ops.errors import UsageError

if TYPE_CHECKING:
    from ddtree_ops.inventory.models import Target

__all__ = [
    "PARALLEL",
    "Batch",
    "Rollout",
    "Size",
    "Unit",
    "batches",
    "first_hosts",
    "parse_serial",
    "parse_size",
    "reason_to_stop",
    "rollout_of",
    "units_of",
]

PARALLEL = 32
"""Hosts under way at once, unless said otherwise."""

Unit = tuple[str, ...]
"""Hosts that are started together: one, or the nodes of one engine."""
Batch = tuple[Unit, ...]
"""Units that are started at once; the next batch waits for all of them."""

_SIZE = re.compile(r"([0-9]+)(%?)")


@dataclass(frozen=True)
class Size:
    """A number of hosts, or a part of all the run's hosts in percent."""

    number: int
    percent: bool = False

    def of(self, total: int) -> int:
        """Hosts this is of ``total``, rounded down as Ansible does."""
        return self.number * total // 100 if self.percent else self.number

    def __str__(self) -> str:
        return f"{self.number}%" if self.percent else str(self.number)


@dataclass(frozen=True)
class Rollout:
    """How a run goes over its hosts.

    :param serial: sizes of the batches, the last one again and again; none: all hosts in one.
    :param canary: hosts of a batch before all others, which must pass; 0: none.
    :param max_fail: more failed hosts than this and no further host is started; None: none may fail where there are
        batches, any number where there is one.
    :param parallel: hosts under way at once.
    """

    serial: tuple[Size, ...] = ()
    canary: int = 0
    max_fail: Size | None = None
    parallel: int = PARALLEL


def parse_size(text: str, option: str, *, least: int = 0) -> Size:
    """A :class:`Size` from ``3`` or ``10%``.

    :param option: named in the error. :param least: smallest number accepted.
    :raises UsageError: anything else, or more than 100%.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text}: write a number of hosts or a part of them, such as 3 or 10%")
    size = Size(int(match.group(1)), bool(match.group(2)))
    if size.number < least:
        raise UsageError(f"{option} {text}: at least {least}{match.group(2)}")
    if size.percent and size.number > 100:
        raise UsageError(f"{option} {text}: more than all of them")
    return size


def parse_serial(text: str) -> tuple[Size, ...]:
    """Sizes from ``3``, ``10%`` or several steps such as ``1,10%,100%``.

    :raises UsageError: as :func:`parse_size`; a batch has at least one host.
    """
    return tuple(parse_size(part, "--serial", least=1) for part in text.split(","))


def rollout_of(
    *, serial: str | None = None, canary: int = 0, max_fail: str | None = None, parallel: int | None = None
) -> Rollout:
    """A :class:`Rollout` from the command line's words.

    :raises UsageError: as :func:`parse_size`.
    """
    return Rollout(
        serial=parse_serial(serial) if serial is not None else (),
        canary=canary,
        max_fail=parse_size(max_fail, "--max-fail") if max_fail is not None else None,
        parallel=parallel or PARALLEL,
    )


def units_of(targets: Iterable[Target]) -> list[Unit]:
    """Hosts of ``targets`` in their order, those that run one engine together as one unit."""
    chosen = dict.fromkeys(target.host.name for target in targets)
    unit_of: dict[str, list[str]] = {}
    for target in targets:
        node = target.node
        hosts = [host for host in (node.hosts if node else ()) if host in chosen] or [target.host.name]
        joined: list[str] = []
        for host in hosts:
            joined += [one for one in unit_of.get(host, [host]) if one not in joined]
        for host in joined:
            unit_of[host] = joined
    return list(dict.fromkeys(tuple(unit_of[host]) for host in chosen))


def batches(units: Sequence[Unit], rollout: Rollout) -> list[Batch]:
    """Units in the batches they are started in, in order.

    A unit is never parted: a batch ends with the one that fills it, so it may have more hosts than asked for.
    """
    total = sum(len(unit) for unit in units)
    left = list(units)
    found: list[Batch] = []

    def take(size: int) -> None:
        batch: list[Unit] = []
        while left and sum(map(len, batch)) < size:
            batch.append(left.pop(0))
        found.append(tuple(batch))

    if rollout.canary and left:
        take(rollout.canary)
    sizes = list(rollout.serial) or [Size(100, percent=True)]
    while left:
        take(max(1, sizes[0].of(total)))
        sizes = sizes[1:] or sizes
    return found


def first_hosts(targets: Iterable[Target], rollout: Rollout) -> list[str]:
    """Hosts that are started at once, before any other has ended."""
    plan = batches(units_of(targets), rollout)
    return [host for unit in plan[0] for host in unit][: rollout.parallel]


def reason_to_stop(plan: Sequence[Batch], rollout: Rollout, ended: Mapping[str, bool]) -> str:
    """Why no further host is started, or nothing: as far as is known from the hosts that have ended.

    :param plan: what :func:`batches` made. :param ended: host -> whether it passed.
    """
    failed = [host for batch in plan for unit in batch for host in unit if not ended.get(host, True)]
    if not failed:
        return ""
    if rollout.canary and (lost := [host for unit in plan[0] for host in unit if host in failed]):
        return f"the canary {_names(lost)} failed"
    if rollout.max_fail is None:
        return f"{_names(failed)} failed" if len(plan) > 1 else ""
    total = sum(len(unit) for batch in plan for unit in batch)
    allowed = rollout.max_fail.of(total)
    if len(failed) <= allowed:
        return ""
    part = f"--max-fail {rollout.max_fail}"
    return f"{_names(failed)} failed, more than {part}{f' = {allowed}' if rollout.max_fail.percent else ''} allows"


def _names(hosts: Collection[str]) -> str:
    few = list(hosts)[:4]
    return ", ".join(few) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
