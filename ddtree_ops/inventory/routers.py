"""Which workers a router stands in front of, and where it reaches them. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from ddtree_ops.errors import ConfigError, OpsError, UsageError
from ddtree_ops.inventory.models import Host, Inventory, Router, Service, Target
from ddtree_ops.inventory.nodes import cluster_address
from ddtree_ops.inventory.yaml_source import KeyPath, suggestion

__all__ = ["Worker", "find_router", "router_problems", "worker_url", "workers"]


@dataclass(frozen=True)
class Worker:
    """An engine behind a router, as the router's host reaches it.

    :param url: ``http://address:port``.
    """

    target: Target
    url: str

    @property
    def name(self) -> str:
        """Name of the worker's target."""
        return self.target.name


def find_router(inventory: Inventory, name: str | None) -> Router:
    """The router of that name; None: the only one there is.

    :raises UsageError: there is none, or there are several.
    """
    known = ", ".join(inventory.routers)
    if not inventory.routers:
        raise UsageError(
            f"{inventory.path} has no router",
            hint="describe one under routers: in the inventory (docs/inventory.md)",
        )
    if name is None:
        if len(inventory.routers) > 1:
            raise UsageError(f"which router? {inventory.path} has {known}", hint=f"name one of them: {known}")
        return next(iter(inventory.routers.values()))
    if name not in inventory.routers:
        raise UsageError(
            f"there is no router '{name}'{suggestion(name, inventory.routers)}",
            hint=f"{inventory.path} has: {known}",
        )
    return inventory.routers[name]


def worker_url(worker: Host, service: Service, *, seen_from: str) -> str:
    """Base URL of an engine as the host named ``seen_from`` reaches it.

    An engine that listens on one address is reached there; one that listens everywhere at its host's
    ``cluster_address`` or ``address``, and on the loopback address where the router is on the same host.

    :raises ConfigError: it listens on a loopback address of another host, or that host has no address.
    """
    bind = ipaddress.ip_address(service.bind)
    name = service.bind
    if bind.is_unspecified:
        found = (
            ("::1" if bind.version == 6 else "127.0.0.1")
            if worker.name == seen_from
            else cluster_address(worker)
        )
        if found is None:
            raise ConfigError(
                f"{worker.name}: no address is known by which {seen_from} could reach it",
                hint=f"set hosts.{worker.name}.cluster_address, or address",
            )
        name = found
    elif bind.is_loopback and worker.name != seen_from and service.bind != cluster_address(worker):
        raise ConfigError(
            f"{worker.name}: {service.name} listens on {service.bind} only, which {seen_from} cannot reach",
            hint=f"set bind of {service.name} on {worker.name} to its cluster address, or to 0.0.0.0",
        )
    return f"http://{f'[{name}]' if ':' in name else name}:{service.port}"


def workers(inventory: Inventory, router: Router) -> list[Worker]:
    """The workers of a router, in the order of the inventory; of a service over several hosts the head only.

    :raises UsageError: a pattern that matches no host with the service.
    :raises ConfigError: a worker that the router's host cannot reach.
    """
    from ddtree_ops.inventory.select import select

    targets = select(inventory, [f"{pattern}/{router.service}" for pattern in router.hosts], whole=False)
    heads = [target for target in targets if target.node is None or target.node.is_head]
    if not heads:
        raise UsageError(
            f"none of {', '.join(target.host.name for target in targets)} answers requests",
            hint=f"name the head of {router.service} too",
        )
    return [
        Worker(target, worker_url(target.host, target.service, seen_from=router.host)) for target in heads
    ]


def router_problems(inventory: Inventory) -> Iterator[tuple[KeyPath, str]]:
    """What is wrong with the routers of an inventory that is sound otherwise: ``(key path in the file, problem)``."""
    taken: dict[tuple[str, str | int], str] = {}
    for host in inventory.hosts.values():
        for service in host.services.values():
            taken[host.name, service.port] = taken[host.name, service.unit] = service.name
    services = dict.fromkeys(name for host in inventory.hosts.values() for name in host.services)
    for name, router in inventory.routers.items():
        path: KeyPath = ("routers", name)
        if router.host not in inventory.hosts:
            yield (
                (*path, "host"),
                f"there is no host '{router.host}'{suggestion(router.host, inventory.hosts)}",
            )
        elif router.service not in services:
            yield (
                (*path, "service"),
                f"no host has a service '{router.service}'{suggestion(router.service, services)}",
            )
        else:
            try:
                workers(inventory, router)
            except OpsError as error:
                yield (*path, "hosts"), f"{error.message}: {error.hint}" if error.hint else error.message
        for key in ("unit", "port", "metrics_port"):
            value = getattr(router, key)
            other = taken.setdefault((router.host, value), f"router {name}")
            if other != f"router {name}" or (key == "metrics_port" and value == router.port):
                yield (*path, key), f"{value} is taken on {router.host} by {other}: give it another"
