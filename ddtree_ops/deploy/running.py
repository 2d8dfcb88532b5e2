"""Stopping and restarting a unit: what it waits for is told, and the nodes of a service go in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ddtree_ops.deploy.frame import Frame
from ddtree_ops.inventory.models import Target
from ddtree_ops.results import EventKind
from ddtree_ops.service.control import StartReport, StopReport, UnitControl
from ddtree_ops.service.ending import Drain

if TYPE_CHECKING:
    from ddtree_ops.deploy.nodes import Member

__all__ = ["Running"]

_T = TypeVar("_T")


class Running:
    """The unit of one target, as one of several nodes where it has a ``member``.

    :ivar without_head: the run (InvocationID) of this node that was up when its head was stopped; empty: none was.
    """

    def __init__(self, target: Target, control: UnitControl, frame: Frame, member: Member | None) -> None:
        self._host = target.host.name
        self._stop_timeout = target.service.health.stop_timeout
        self._control = control
        self._frame = frame
        self._member = member
        self.without_head = ""

    def stop(self, patience: float | None) -> StopReport:
        """Stop it, in order with the other nodes.

        :param patience: seconds for requests under way, then SIGKILL; 0: at once. None: as the unit says.
        """
        report = self.in_order(lambda: self._control.stop(patience=patience, drain=self._draining()))
        if not self.without_head or report.ending.planned:
            return report
        return replace(report, changed=True, without_head=self.without_head)

    def restart(self, patience: float | None) -> StartReport:
        """Restart it, all nodes stopped before any is started; ``patience`` as for :meth:`stop`."""
        if self._member is None:
            return self._control.restart(patience=patience, drain=self._draining())
        stopped = self.stop(patience)
        return replace(self._control.start(), stop=stopped)

    def stop_if_there(self) -> str:
        """Stop it where there is such a unit, without regard to other nodes; InvocationID of its last run, or empty."""
        if not self._control.state().exists:
            return ""
        return self._control.stop(drain=self._draining()).state.invocation_id

    def in_order(self, stop: Callable[[], _T]) -> _T:
        """Stop with the other nodes: the head first, for it drains; a node that loses it ends by an exception."""
        member = self._member
        if member is None:
            return stop()
        if not member.node.is_head:
            before = self._control.state()
            member.share("stop.head", True)
            self.without_head = before.invocation_id if before.running else ""
        stopped = stop()
        if member.node.is_head:
            member.share("stop.head", True)
        member.share("stop.all", True)
        return stopped

    def _draining(self) -> Callable[[Drain], None]:
        """Tell what a stop under way is waiting for, and once what to do where it will wait for ever."""
        told: list[bool] = []
        step = self._frame.step

        def tell(drain: Drain) -> None:
            self._frame.emit(EventKind.PROGRESS, step, drain.describe())
            if drain.leaking and not told:
                told.append(True)
                self._frame.say(
                    step,
                    f"{drain.describe()}. systemd ends it {self._stop_timeout:.0f} s after the stop began; at once: "
                    f"Ctrl-C, then ddtree-ops stop {self._host} --force",
                )

        return tell
