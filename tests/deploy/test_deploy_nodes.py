"""How nodes meet, what a failing one does to the others, and which is called the first. Without hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ddtree_ops.deploy.nodes import Lockstep, Member, PeerFailed, Symptom, in_turn, locksteps, the_first
from ddtree_ops.errors import CheckFailed, ExitCode, Interrupted, OpsError, UnreachableError, UsageError
from ddtree_ops.inventory.models import Host, Node, Nodes, RuntimeSpec, Service, Target

HOSTS = ("n0", "n1", "n2")


@pytest.fixture
def interrupted() -> threading.Event:
    return threading.Event()


@pytest.fixture
def members(interrupted: threading.Event) -> list[Member]:
    lockstep = Lockstep(HOSTS, interrupted)
    return [Member(lockstep, Node(rank=rank, count=3, head="n0:20000", hosts=HOSTS)) for rank in range(3)]


def at_once(members: list[Member], work: Callable[[Member], Any]) -> list[Any]:
    def one(member: Member) -> Any:
        try:
            return work(member)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))


def test_nobody_goes_on_before_all_have_ended_the_step(members: list[Member]) -> None:
    done: list[str] = []

    def work(member: Member) -> list[str]:
        if member.node.rank == 2:
            threading.Event().wait(0.05)
        done.append("verify")
        assert member.end_step("verify", None) is None
        seen = list(done)
        member.end_step("activate", None)
        return seen

    assert all(seen.count("verify") == 3 for seen in at_once(members, work))


def test_one_that_fails_fails_all_with_its_exit_code_and_name(members: list[Member]) -> None:
    own = UnreachableError("the connection broke", phase="push")

    def work(member: Member) -> Any:
        return member.end_step("push", own if member.node.rank == 1 else None)

    first, failed, last = at_once(members, work)
    assert failed is own
    for error in (first, last):
        assert isinstance(error, PeerFailed)
        assert error.exit_code is ExitCode.UNREACHABLE
        assert error.message.startswith("n1 (node 1 of 3) failed in push")
        assert "the connection broke" in error.message
    assert members[0].failure is first


def test_whoever_waits_for_a_value_of_a_node_that_failed_is_told(members: list[Member]) -> None:
    def work(member: Member) -> Any:
        error: Any = None
        try:
            if member.node.rank == 0:
                raise CheckFailed("no")
            member.share("stopped", member.node.rank)
        except (CheckFailed, PeerFailed) as caught:
            error = caught
        return member.end_step("activate", error)

    own, *others = at_once(members, work)
    assert type(own) is CheckFailed
    assert [type(error) for error in others] == [PeerFailed, PeerFailed]
    again = at_once(members, lambda member: member.share("stopped", member.node.rank * 10))
    assert again == [[0, 10, 20]] * 3, "the next step begins anew"


def test_whoever_waits_for_a_node_that_has_ended_the_step_is_told(members: list[Member]) -> None:
    def work(member: Member) -> Any:
        if member.node.rank == 0:
            return member.end_step("activate", None)
        try:
            return member.share("start", True)
        except OpsError as error:
            return member.end_step("activate", error)

    found = at_once(members, work)
    assert "n0 (node 0 of 3) has ended the step without the others" in found[1].message
    assert isinstance(found[0], PeerFailed)


def test_a_long_wait_ends_when_another_node_fails(members: list[Member]) -> None:
    def work(member: Member) -> Any:
        if member.node.rank == 1:
            return member.end_step("wait", CheckFailed("it died"))
        error = None
        while error is None:
            try:
                member.look()
                threading.Event().wait(0.01)
            except PeerFailed as caught:
                error = caught
        return member.end_step("wait", error)

    first, failed, _ = at_once(members, work)
    assert type(failed) is CheckFailed
    assert "n1 (node 1 of 3) failed" in first.message


def test_a_node_that_could_not_be_reached_at_all(members: list[Member]) -> None:
    members[2].leave(UnreachableError("no route", phase="connect"))
    found = at_once(members[:2], lambda member: member.end_step("preflight", None))
    assert all("n2 (node 2 of 3) failed in connect" in error.message for error in found)
    assert members[0].share_left("explain", False) == [False]


@pytest.mark.parametrize("where", ["end_step", "share"])
def test_ctrl_c_frees_those_that_wait(
    members: list[Member], interrupted: threading.Event, where: str
) -> None:
    def work(member: Member) -> Any:
        if member.node.rank == 0:
            interrupted.set()
            return None
        return member.end_step("verify", None) if where == "end_step" else member.share("start", 1)

    assert [type(found) for found in at_once(members, work)[1:]] == [Interrupted, Interrupted]


def target(host: str, name: str, *nodes: str) -> Target:
    service = Service(
        name=name, unit=f"{name}.service", runtime="r", venv="/v", model="/m",
        nodes=Nodes(hosts=nodes, address="192.0.2.1") if nodes else None,
    )  # fmt: skip
    return Target(
        host=Host(name=host, services={name: service}), service=service, runtime=RuntimeSpec(name="r")
    )


def test_hosts_take_what_runs_over_several_first_and_in_the_same_order() -> None:
    given = [target("n0", "alone"), target("n0", "z", "n0", "n1"), target("n0", "a", "n0", "n1")]
    assert [one.service.name for one in in_turn(given)] == ["a", "z", "alone"]


def test_a_node_that_is_left_out_is_refused(interrupted: threading.Event) -> None:
    both = [target("n0", "a", "n0", "n1"), target("n1", "a", "n0", "n1")]
    assert {key: member.node.rank for key, member in locksteps(both, interrupted).items()} == {
        ("n0", "a"): 0,
        ("n1", "a"): 1,
    }
    with pytest.raises(UsageError, match="n1 is left out"):
        locksteps(both[:1], interrupted)
    with pytest.raises(UsageError, match="do not agree"):
        locksteps([target("n0", "a", "n0", "n1"), target("n1", "a", "n1", "n0")], interrupted)


@pytest.mark.parametrize(
    ("told", "rank"),
    [
        (
            [
                Symptom(0, True, lost_peer=True, cause="sched-exc", at=9.0),
                Symptom(1, True, cause="ima", at=10.0),
            ],
            1,
        ),
        ([Symptom(0, True, cause="ima", at=10.5), Symptom(1, True, cause="ima", at=10.0)], 1),
        ([Symptom(0, True, lost_peer=True, cause="sched-exc", at=1.0), Symptom(1, True)], 1),
        ([Symptom(0, False), Symptom(1, True)], 1),
        ([Symptom(0, True), Symptom(1, False, cause="oom", at=3.0)], 1),
    ],
)
def test_the_first_is_the_one_that_lost_no_peer_and_names_a_cause(told: list[Symptom], rank: int) -> None:
    found = the_first(told)
    assert found is not None and found.rank == rank


def test_nobody_is_first_where_nothing_is_known() -> None:
    assert the_first([Symptom(0, False), Symptom(1, False)]) is None
