"""Watching a unit over a while: is it the same process all along?"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddtree_ops.remote.session import Session
from ddtree_ops.service.state import UnitState

__all__ = ["hold_unit"]

_FIRST_S = 10.0
_TELL_EVERY_S = 1.0


def hold_unit(
    session: Session,
    unit: str,
    before: UnitState,
    seconds: float,
    tell: Callable[[float], None] = lambda left: None,
) -> tuple[str | None, UnitState, int]:
    """What changed against ``before``, at once, or None after ``seconds``; how the unit was seen last, and how often.

    A dying engine takes up to a second to be gone. It is seen once at least, with 0 seconds too.

    :param tell: is given the seconds left, about once a second.
    """
    end, latest, samples = time.monotonic() + seconds, before, 0
    stream = session.watch_unit(unit)
    try:
        while True:
            left = max(end - time.monotonic(), 0.0)
            event = stream.get(min(left, _TELL_EVERY_S) if samples else _FIRST_S)
            if event is not None and event[0].get("event") == "unit":
                samples += 1
                latest = UnitState.parse(event[0]["properties"])
                if (problem := latest.stable_against(before)) is not None:
                    return problem, latest, samples
            elif event is None and (stream.ended or not samples):
                return "the watch on the unit ended", latest, samples
            if not left and samples:
                return None, latest, samples
            tell(left)
    finally:
        stream.close()
