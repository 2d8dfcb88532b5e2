"""The short playbooks behind ``start``, ``stop``, ``restart``, ``wait`` and ``rollback``."""

from __future__ import annotations

from typing import Literal

from ddtree_ops.errors import UsageError
from ddtree_ops.playbook.models import GoBack, Halt, Plain, Playbook, Smoke, Step, Wait

__all__ = ["go_back", "restart", "start", "stop", "wait"]

_EXPLAIN = (Plain(kind="capture"), Plain(kind="diagnose"))
_JUDGE = (Smoke(), Plain(kind="signatures"))


def start(*, wait: bool, smoke: bool, load_timeout: float | None) -> Playbook:
    """Start the unit as it is; follow the load, and prove that it serves, where wished."""
    steps: tuple[Step, ...] = (Plain(kind="start"),)
    return _followed("start", steps, wait=wait, smoke=smoke, load_timeout=load_timeout)


def stop(*, drain_timeout: float | None) -> Playbook:
    """Stop the unit; after ``drain_timeout`` seconds by SIGKILL."""
    return Playbook(name="stop", steps=(_halt("stop", drain_timeout),))


def restart(*, wait: bool, smoke: bool, load_timeout: float | None, drain_timeout: float | None) -> Playbook:
    """Stop, then start."""
    steps: tuple[Step, ...] = (_halt("restart", drain_timeout),)
    return _followed("restart", steps, wait=wait, smoke=smoke, load_timeout=load_timeout)


def wait(*, load_timeout: float | None) -> Playbook:
    """Follow a start that is under way."""
    return Playbook(name="wait", steps=(_wait(load_timeout),), on_failure=_EXPLAIN)


def go_back(*, to: str | None) -> Playbook:
    """Switch to a recorded activation, and prove that it serves; what ran before comes back where it does not.

    :raises UsageError: too little of a name to mean one.
    """
    if to is not None and len(to.strip()) < 4:
        raise UsageError(
            f"--to {to!r} is too short to name anything",
            hint="give at least four characters of a release's digest or an activation's id, or a time",
        )
    steps: tuple[Step, ...] = (GoBack() if to is None else GoBack(to=to), Wait(), *_JUDGE)
    return Playbook(name="rollback", steps=steps, on_failure=(*_EXPLAIN, Plain(kind="rollback")))


def _halt(kind: Literal["stop", "restart"], drain_timeout: float | None) -> Halt:
    return Halt(kind=kind) if drain_timeout is None else Halt(kind=kind, drain_timeout=drain_timeout)


def _wait(load_timeout: float | None) -> Wait:
    return Wait() if load_timeout is None else Wait(load_timeout=load_timeout)


def _followed(
    name: str, steps: tuple[Step, ...], *, wait: bool, smoke: bool, load_timeout: float | None
) -> Playbook:
    if wait or smoke:
        steps += (_wait(load_timeout),)
    if smoke:
        steps += _JUDGE
    return Playbook(name=name, steps=steps, on_failure=_EXPLAIN)
