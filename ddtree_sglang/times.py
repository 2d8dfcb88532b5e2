"""Times of the parts of a step, for the log: no synchronisation within a step.

On a GPU each mark is a CUDA event, recorded where the step's kernels are queued and read steps later, when it has
passed; elsewhere it is a reading of the clock.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MARKS", "TIMES", "StepTimes", "times_wanted"]

TIMES = "DDTREE_TIMES"
"""Environment variable: ``1`` writes a line of times beside each line of metrics."""

MARKS = ("begin", "drafted", "proposed", "grown", "entered", "verified", "end")
"""The places of a step, in order: its begin, the drafter's hidden states, the candidates, the tree with mask and
positions, the target's forward pass, what it returned, the end."""

_PARTS = (
    ("draft", "begin", "drafted"),
    ("tree", "drafted", "grown"),
    ("verify", "entered", "verified"),
    ("commit", "verified", "end"),
    ("step", "begin", "end"),
    ("build", "proposed", "grown"),
)


def times_wanted() -> bool:
    """Whether the environment asks for times."""
    return os.environ.get(TIMES) == "1"


@dataclass
class _Step:
    bs: int
    marks: dict[str, Any]


class StepTimes:
    """Marks of the steps that have not been reported yet.

    A step that did not pass all of :data:`MARKS` is dropped when the next one begins.
    """

    def __init__(self, *, cuda: bool) -> None:
        """``cuda``: whether marks are CUDA events, on the stream that is current at each."""
        self.cuda = cuda
        self._running: _Step | None = None
        self._done: deque[_Step] = deque()
        self._events: list[Any] = []

    def begin(self, bs: int) -> None:
        """A step of ``bs`` requests begins."""
        if self._running is not None:
            self._events += [] if not self.cuda else self._running.marks.values()
        self._running = _Step(bs, {})
        self.mark("begin")

    def mark(self, name: str) -> None:
        """The running step is at ``name``, one of :data:`MARKS`; nothing happens where none is running."""
        if self._running is None:
            return
        if not self.cuda:
            self._running.marks[name] = time.perf_counter()
            return
        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
        event.record()
        self._running.marks[name] = event

    def end(self) -> None:
        """The running step ends."""
        if self._running is None:
            return
        self.mark("end")
        if tuple(self._running.marks) == MARKS:
            self._done.append(self._running)
            self._running = None

    def _between(self, step: _Step, first: str, last: str) -> float:
        """Milliseconds."""
        if self.cuda:
            return float(step.marks[first].elapsed_time(step.marks[last]))
        return float((step.marks[last] - step.marks[first]) * 1e3)

    def line(self) -> str | None:
        """Means over the steps that ended since the last line and that the GPU is done with; None without any."""
        steps: list[_Step] = []
        while self._done and (not self.cuda or self._done[0].marks["end"].query()):
            steps.append(self._done.popleft())
        if not steps:
            return None
        count = len(steps)
        means = ", ".join(
            f"{part}={sum(self._between(step, first, last) for step in steps) / count:.3f} ms"
            for part, first, last in _PARTS
        )
        if self.cuda:
            self._events += [event for step in steps for event in step.marks.values()]
        return f"DDTREE times: steps={count}, bs={sum(step.bs for step in steps) / count:.2f}, {means}"
