"""Batches, canaries, how many failures end a run: tables, no hosts."""

from __future__ import annotations

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.inventory import select
from ddtree_ops.inventory.load import resolve
from ddtree_ops.inventory.yaml_source import parse_document
from ddtree_ops.playbook.rollout import (
    Rollout,
    Size,
    batches,
    first_hosts,
    parse_serial,
    parse_size,
    reason_to_stop,
    rollout_of,
    units_of,
)


def _alone(number: int) -> list[tuple[str, ...]]:
    return [(f"h{index}",) for index in range(1, number + 1)]


def _sizes(number: int, rollout: Rollout) -> list[int]:
    plan = batches(_alone(number), rollout)
    hosts = [host for batch in plan for unit in batch for host in unit]
    assert hosts == [f"h{index}" for index in range(1, number + 1)], "each once, in order"
    return [len(batch) for batch in plan]


@pytest.mark.parametrize(
    ("hosts", "serial", "canary", "sizes"),
    [
        (1, None, 0, [1]),
        (5, None, 0, [5]),
        (5, "1", 0, [1, 1, 1, 1, 1]),
        (5, "2", 0, [2, 2, 1]),
        (5, "9", 0, [5]),
        (10, "30%", 0, [3, 3, 3, 1]),
        (10, "25%", 0, [2, 2, 2, 2, 2]),
        (3, "10%", 0, [1, 1, 1]),
        (10, "100%", 0, [10]),
        (30, "1,10%,100%", 0, [1, 3, 26]),
        (30, "1,5,10", 0, [1, 5, 10, 10, 4]),
        (30, "1, 20%", 0, [1, 6, 6, 6, 6, 5]),
        (30, None, 1, [1, 29]),
        (30, "10", 2, [2, 10, 10, 8]),
        (30, "50%", 1, [1, 15, 14]),
        (2, None, 5, [2]),
        (1, "1", 1, [1]),
    ],
)
def test_batches(hosts: int, serial: str | None, canary: int, sizes: list[int]) -> None:
    assert _sizes(hosts, rollout_of(serial=serial, canary=canary)) == sizes


def test_hosts_of_one_engine_are_never_parted() -> None:
    units = [("a",), ("b", "c"), ("d",), ("e", "f", "g")]
    assert batches(units, Rollout(serial=(Size(2),))) == [(("a",), ("b", "c")), (("d",), ("e", "f", "g"))]
    assert batches(units, Rollout(canary=1, serial=(Size(1),))) == [
        (("a",),),
        (("b", "c"),),
        (("d",),),
        (("e", "f", "g"),),
    ]


@pytest.mark.parametrize(
    ("rollout", "failed", "passed", "reason"),
    [
        (rollout_of(), "1 2 3", "4", ""),
        (rollout_of(max_fail="0"), "", "1 2 3", ""),
        (rollout_of(max_fail="0"), "2", "1", "h2 failed, more than --max-fail 0 allows"),
        (rollout_of(max_fail="1"), "2", "1", ""),
        (rollout_of(max_fail="1"), "2 7", "1", "h2, h7 failed, more than --max-fail 1 allows"),
        (rollout_of(max_fail="20%"), "2 7", "1", ""),
        (rollout_of(max_fail="29%"), "1 2 3", "", "h1, h2, h3 failed, more than --max-fail 29% = 2 allows"),
        (rollout_of(max_fail="100%"), "1 2 3 4 5 6 7 8 9 10", "", ""),
        (rollout_of(serial="2"), "", "1 2", ""),
        (rollout_of(serial="2"), "2", "1", "h2 failed"),
        (rollout_of(serial="2", max_fail="1"), "2", "1", ""),
        (rollout_of(serial="10"), "2", "1", ""),
        (rollout_of(canary=1), "", "1", ""),
        (rollout_of(canary=1), "1", "", "the canary h1 failed"),
        (rollout_of(canary=2, max_fail="50%"), "1", "2", "the canary h1 failed"),
        (rollout_of(canary=2, max_fail="50%"), "5", "1 2", ""),
        (rollout_of(canary=2), "5", "1 2", "h5 failed"),
        (
            rollout_of(max_fail="1"),
            "1 2 3 4 5 6",
            "",
            "h1, h2, h3, h4 and 2 more failed, more than --max-fail 1 allows",
        ),
    ],
)
def test_what_ends_a_run(rollout: Rollout, failed: str, passed: str, reason: str) -> None:
    plan = batches(_alone(10), rollout)
    ended = {f"h{number}": False for number in failed.split()} | {
        f"h{number}": True for number in passed.split()
    }
    assert reason_to_stop(plan, rollout, ended) == reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "--serial 0: at least 1"),
        ("0%", "--serial 0%: at least 1%"),
        ("-1", "--serial -1: write a number of hosts or a part of them, such as 3 or 10%"),
        ("1,,2", "--serial : write a number of hosts or a part of them, such as 3 or 10%"),
        ("101%", "--serial 101%: more than all of them"),
        ("half", "--serial half: write a number of hosts or a part of them, such as 3 or 10%"),
    ],
)
def test_a_wrong_size_is_a_usage_error(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_serial(text)
    assert str(caught.value) == message


def test_sizes() -> None:
    assert parse_size("3", "--max-fail") == Size(3)
    assert parse_size(" 10% ", "--max-fail") == Size(10, percent=True)
    assert (Size(10, percent=True).of(29), str(Size(10, percent=True)), Size(7).of(3)) == (2, "10%", 7)


INVENTORY = """
schema: 1
defaults: {service: {venv: /v, model: /m, runtime: r}}
runtimes: {r: {}}
services:
  one: {unit: one.service, port: 1001}
  wide: {unit: wide.service, port: 1002, tensor_parallel: 2, nodes: {hosts: [c, a], address: 192.0.2.3}}
hosts:
  a: {address: 192.0.2.1, services: [wide, one]}
  b: {address: 192.0.2.2, services: [one]}
  c: {address: 192.0.2.3, services: [wide]}
"""


def test_units_come_from_the_services_and_the_first_batch_is_connected_ahead() -> None:
    inventory, problems = resolve(parse_document(INVENTORY, "inv.yaml"))
    assert inventory is not None, problems
    targets = select(inventory, ["all"])
    units = units_of(targets)
    assert sorted(map(sorted, units)) == [["a", "c"], ["b"]]
    assert units_of(select(inventory, ["all"], service="one")) == [("a",), ("b",)]
    assert sorted(first_hosts(targets, rollout_of(canary=1))) == ["a", "c"]
    assert len(first_hosts(targets, rollout_of(parallel=2))) == 2
