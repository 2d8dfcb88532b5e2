"""Commands for a unit as it is: ``start``, ``stop``, ``restart``, ``wait``."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli.common import (
    Duration,
    Hosts,
    InventoryOption,
    JsonOption,
    LockWaitOption,
    ServiceOption,
    play,
    rolling,
    safety_of,
    same_again,
    targets_of,
)
from ddtree_ops.errors import UsageError

__all__ = ["register"]

WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the load until it is ready.")]
SmokeOption = Annotated[
    bool, typer.Option("--smoke", help="Then smoke-test it, and record that this run passed.")
]
TimeoutOption = Annotated[
    float | None,
    Duration("--timeout", help="Longest load, e.g. 30m; default: health.load_timeout."),
]
DrainOption = Annotated[
    float | None,
    Duration("--drain", help="Longest wait for requests under way, e.g. 90s, then SIGKILL."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="SIGKILL at once: requests under way are cut off.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("start")(rolling(start))
    app.command("stop")(rolling(stop))
    app.command("restart")(rolling(restart))
    app.command("wait")(rolling(wait))


def start(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    wait: WaitOption = True,
    smoke: SmokeOption = False,
    timeout: TimeoutOption = None,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start units as they are, and follow the load. Exit code 3: not ready in time, 5: it died, 6: lock held."""
    from ddtree_ops.playbook import operate

    _, targets = targets_of(hosts, inventory=inventory, service=service)
    playbook = operate.start(wait=wait, smoke=smoke, load_timeout=timeout)
    again = same_again("start", service=service, timeout=timeout, smoke=smoke)
    play(playbook, targets, as_json=as_json, safety=safety_of("start", lock_wait=lock_wait, again=again))


def stop(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    drain: DrainOption = None,
    force: ForceOption = False,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop units; says how many requests it waits for, and why a drain never ends."""
    from ddtree_ops.playbook import operate

    _, targets = targets_of(hosts, inventory=inventory, service=service)
    playbook = operate.stop(drain_timeout=_drain(drain, force))
    again = same_again("stop", service=service, drain=drain, force=force)
    play(playbook, targets, as_json=as_json, safety=safety_of("stop", lock_wait=lock_wait, again=again))


def restart(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    wait: WaitOption = True,
    smoke: SmokeOption = False,
    timeout: TimeoutOption = None,
    drain: DrainOption = None,
    force: ForceOption = False,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop units, start them again, follow the load. The new run is not validated before --smoke or a deploy."""
    from ddtree_ops.playbook import operate

    _, targets = targets_of(hosts, inventory=inventory, service=service)
    playbook = operate.restart(
        wait=wait, smoke=smoke, load_timeout=timeout, drain_timeout=_drain(drain, force)
    )
    again = same_again("restart", service=service, timeout=timeout, drain=drain, force=force, smoke=smoke)
    play(playbook, targets, as_json=as_json, safety=safety_of("restart", lock_wait=lock_wait, again=again))


def wait(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow a start that is under way until it is ready. Exit code 3: not ready in time, 5: it died."""
    from ddtree_ops.playbook import operate

    _, targets = targets_of(hosts, inventory=inventory, service=service)
    again = same_again("wait", service=service, timeout=timeout)
    play(
        operate.wait(load_timeout=timeout),
        targets,
        as_json=as_json,
        safety=safety_of("wait", again=again),
    )


def _drain(seconds: float | None, force: bool) -> float | None:
    if force and seconds:
        raise UsageError("--force is --drain 0: give one of the two")
    return 0.0 if force else seconds
