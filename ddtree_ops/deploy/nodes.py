"""One engine over several hosts: its nodes go through every step together, and one that fails fails all.

Each node has a thread of its own (its host's). :class:`Lockstep` is where the threads meet: at the end of every step
all wait for the slowest, so nothing is activated anywhere before everything was verified everywhere, and what happened
on one node is known to all of them. Inside a step nodes share values by name; where a node fails meanwhile, those that
wait for it get its error instead of an answer.

What the other ranks of sglang 0.5.11 do, and why they cannot be judged like the head: ``docs/deploying.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddtree_ops.errors import (
    Interrupted,
    OpsError,
    PreflightError,
    UsageError,
)
from ddtree_ops.inventory.models import Node, Target
from ddtree_ops.wording import moment_of

if TYPE_CHECKING:
    from ddtree_ops.deploy.deployment import Deployment
    from ddtree_ops.deploy.history import Activation
    from ddtree_ops.diagnose.api import DiagnosisReport

__all__ = [
    "Lockstep",
    "Member",
    "PeerFailed",
    "Symptom",
    "in_turn",
    "join_plans",
    "locksteps",
    "name_the_first",
    "same_choice",
    "the_first",
]

_LOOK_EVERY_S = 0.2
_GENERIC = (
    *("sched-exc", "sigquit", "child-died", "sched-died"),
    *("systemd-failed", "systemd-exit", "systemd-start-limit"),
)
_LOST_PEER = "nccl-noise"


class PeerFailed(OpsError):
    """Another node of the service failed. The exit code is that of its error.

    :ivar cause: the other node's error.
    """

    def __init__(self, cause: OpsError, *, node: str, step: str) -> None:
        super().__init__(
            f"{node} failed in {step}, and its nodes run together or not at all: {cause.message}",
            details=cause.details,
            hint=cause.hint,
        )
        self.cause = cause
        self.exit_code = cause.exit_code


@dataclass(frozen=True)
class _Ended:
    """A step that all nodes have ended: value and error by rank, and the rank whose own error came first."""

    errors: Mapping[int, OpsError]
    first: int | None


class Lockstep:
    """Where the threads of a service's nodes meet. Thread-safe.

    :param names: of the nodes, by rank.
    :param interrupted: set when the run is to end: who waits then gets :class:`Interrupted`.
    """

    def __init__(self, names: Sequence[str], interrupted: threading.Event) -> None:
        self.names = tuple(names)
        self._interrupted = interrupted
        self._turn = threading.Condition()
        self._step = 0
        self._arrived: set[int] = set()
        self._failed: dict[int, OpsError] = {}
        self._shared: dict[str, dict[int, Any]] = {}
        self._left: dict[int, OpsError] = {}
        self._ended = _Ended({}, None)

    def describe(self, rank: int) -> str:
        """``gpu1 (node 1 of 2)``."""
        return f"{self.names[rank]} (node {rank} of {len(self.names)})"

    def end_step(self, rank: int, error: OpsError | None) -> _Ended:
        """Wait until every node has ended the step; a node that failed says so at once to those still in it.

        :raises Interrupted: the run is to end.
        """
        with self._turn:
            step = self._step
            self._arrived.add(rank)
            if error is not None:
                self._failed.setdefault(rank, error)
            self._turn.notify_all()
            self._close()
            while self._step == step:
                self._wait()
            return self._ended

    def share(self, rank: int, what: str, value: Any) -> list[Any]:
        """The values of all nodes for ``what``, by rank, once all have given theirs.

        :raises PeerFailed: a node failed in this step before it gave its value.
        :raises Interrupted: the run is to end.
        """
        with self._turn:
            given = self._shared.setdefault(what, {})
            given[rank] = value
            self._turn.notify_all()
            while len(given) < len(self.names):
                self._raise_failure(rank, what)
                gone = self._arrived - given.keys()
                if gone:
                    raise OpsError(f"{self.describe(min(gone))} has ended the step without the others")
                self._wait()
            return [given[number] for number in range(len(self.names))]

    def look(self, rank: int, step: str) -> None:
        """:raises PeerFailed: another node has failed in this step. :raises Interrupted: the run is to end."""
        with self._turn:
            self._raise_failure(rank, step)

    def leave(self, rank: int, error: OpsError) -> None:
        """The node's thread ends: whoever waits for it now or later gets ``error``."""
        with self._turn:
            self._left.setdefault(rank, error)
            self._failed.setdefault(rank, error)
            self._turn.notify_all()
            self._close()

    def _raise_failure(self, rank: int, step: str) -> None:
        for other, error in {**self._failed, **self._left}.items():
            if other != rank and not isinstance(error, PeerFailed):
                raise PeerFailed(error, node=self.describe(other), step=error.phase or step)

    def _close(self) -> None:
        """End the step where all that are still there have arrived."""
        if len(self._arrived | self._left.keys()) < len(self.names) or not self._arrived:
            return
        errors = {**self._failed, **self._left}
        own = [rank for rank, error in errors.items() if not isinstance(error, PeerFailed)]
        self._ended = _Ended(errors, own[0] if own else None)
        self._step += 1
        self._arrived, self._failed, self._shared = set(), {}, {}
        self._turn.notify_all()

    def _wait(self) -> None:
        self._turn.wait(_LOOK_EVERY_S)
        if self._interrupted.is_set():
            raise Interrupted("interrupted while it waited for the other nodes")


@dataclass
class Member:
    """One node's side of a :class:`Lockstep`."""

    lockstep: Lockstep
    node: Node
    failure: OpsError | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        """``gpu1 (node 1 of 2)``."""
        return self.lockstep.describe(self.node.rank)

    def end_step(self, step: str, error: OpsError | None) -> OpsError | None:
        """Meet the others at the end of a step: None where all have done it, else the error to go on with."""
        ended = self.lockstep.end_step(self.node.rank, error)
        if not ended.errors:
            return None
        if error is None or isinstance(error, PeerFailed):
            first = next(iter(ended.errors)) if ended.first is None else ended.first
            cause = ended.errors[first]
            error = PeerFailed(cause, node=self.lockstep.describe(first), step=cause.phase or step)
        self.failure = self.failure or error
        return error

    def share(self, what: str, value: Any) -> list[Any]:
        """See :meth:`Lockstep.share`."""
        return self.lockstep.share(self.node.rank, what, value)

    def share_left(self, what: str, value: Any) -> list[Any]:
        """:meth:`share`; only this node's own value where another one is gone for good."""
        try:
            return self.share(what, value)
        except PeerFailed:
            return [value]

    def look(self) -> None:
        """See :meth:`Lockstep.look`."""
        self.lockstep.look(self.node.rank, "this step")

    def leave(self, error: OpsError) -> None:
        """This node's thread ends. ``error`` is for the others, where it has no failure of its own."""
        self.lockstep.leave(self.node.rank, self.failure or error)


def locksteps(targets: Iterable[Target], interrupted: threading.Event) -> dict[tuple[str, str], Member]:
    """A member for each target that is a node, by (host, service).

    :raises UsageError: a node is missing among the targets.
    """
    found: dict[tuple[str, str], Member] = {}
    by_service: dict[str, dict[str, Target]] = {}
    for target in targets:
        if target.node is not None:
            by_service.setdefault(target.service.name, {})[target.host.name] = target
    for service, nodes in by_service.items():
        node = next(iter(nodes.values())).node
        assert node is not None
        missing = [host for host in node.hosts if host not in nodes]
        strange = [host for host, target in nodes.items() if target.node and target.node.hosts != node.hosts]
        if missing or strange:
            raise UsageError(
                f"{service} runs one engine over {', '.join(node.hosts)}: "
                + (f"{', '.join(missing)} is left out" if missing else "they do not agree on their nodes"),
                hint=f"name all of it: --service {service}",
            )
        lockstep = Lockstep([nodes[host].name for host in node.hosts], interrupted)
        for host, target in nodes.items():
            assert target.node is not None
            found[host, service] = Member(lockstep, target.node)
    return found


def in_turn(targets: Sequence[Target]) -> list[Target]:
    """A host's targets such that every host takes the services over several hosts first, and in the same order."""
    return sorted(
        targets, key=lambda target: (target.node is None, target.service.name if target.node else "")
    )


def same_choice(member: Member, choice: Activation) -> None:
    """:raises PreflightError: the nodes would go back to different activations."""
    chosen: list[Activation] = member.share("choice", choice)
    if len({item.id for item in chosen}) > 1:
        hosts = " ".join(name.partition("/")[0] for name in member.lockstep.names)
        raise PreflightError(
            "the nodes would not go back to the same activation",
            details=tuple(
                f"{name}: {item.id} {item.release[:12]} of {item.time}"
                for name, item in zip(member.lockstep.names, chosen, strict=True)
            ),
            hint=f"name one that all of them have: ddtree-ops rollback {hosts} --to ID; "
            f"ddtree-ops history {hosts} lists them",
        )


def join_plans(deployment: Deployment, member: Member) -> None:
    """Where one node has to be started or validated again, all are: ``deployment.joined`` says so."""
    plan = deployment.plan
    own = 0 if plan is None or plan.empty else 2 if plan.activates else 1
    most = max(member.share("plan", own))
    if most > own:
        deployment.joined = "activate" if most == 2 else "validate"
        what = "started" if most == 2 else "validated"
        deployment.frame.say("activate", f"another node of the service is {what} again, and this one with it")


# -- who failed first ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Symptom:
    """What is known of one node after a failure.

    :param own: the failure is its own, not one it was told of.
    :param lost_peer: its journal says that another rank was gone.
    :param cause: headline of a diagnosis that names a cause; empty where there is none.
    :param at: when the cause was first seen, seconds since 1970 by this machine's clock; infinity: not known.
    :param ranks: ranks that reported the cause.
    """

    rank: int
    own: bool
    lost_peer: bool = False
    cause: str = ""
    at: float = float("inf")
    ranks: tuple[str, ...] = ()
    message: str = ""

    @classmethod
    def of(cls, rank: int, error: OpsError, diagnosis: DiagnosisReport | None, skew_s: float) -> Symptom:
        """:param skew_s: how much the host's clock is ahead of this machine's."""
        own = not isinstance(error, PeerFailed)
        root = diagnosis.root if diagnosis else None
        if diagnosis is None or root is None:
            return cls(rank, own, message=error.message)
        lost = any(item.signature == _LOST_PEER for item in (*diagnosis.diagnoses, *diagnosis.consequences))
        generic = root.signature in _GENERIC or root.signature == _LOST_PEER
        return cls(
            rank,
            own,
            lost_peer=lost and generic,
            cause=diagnosis.headline(),
            at=_seconds(root.first) - skew_s,
            ranks=tuple(root.ranks),
            message=error.message,
        )


def _seconds(time: str) -> float:
    moment = moment_of(time)
    return moment.timestamp() if moment else float("inf")


def the_first(symptoms: Iterable[Symptom]) -> Symptom | None:
    """The node that failed first: one that did not lose a peer before, with a cause, the earliest by corrected clocks."""
    able = [one for one in symptoms if one.own or one.cause]
    return min(
        able, key=lambda one: (one.lost_peer, not one.cause, one.at, not one.own, one.rank), default=None
    )


def name_the_first(member: Member, error: OpsError, deployment: Deployment) -> None:
    """Say in ``error`` which node failed first, and why: the same on all nodes."""
    skew = float(deployment.session.facts.get("clock_skew_s") or 0.0)
    cause = member.failure or error
    told: list[Symptom] = member.share_left(
        "symptom", Symptom.of(member.node.rank, cause, deployment.diagnosis, skew)
    )
    first = the_first(told)
    if first is None:
        return
    ranks = f", {first.ranks[0]} to {first.ranks[-1]}" if len(first.ranks) > 1 else ""
    where = member.lockstep.describe(first.rank)
    error.details = (
        f"first to fail: {where[:-1]}{ranks}): {first.cause or first.message}",
        *(line for line in error.details if not line.startswith("first to fail: ")),
    )
