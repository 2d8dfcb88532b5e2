"""Services that run one engine over several hosts: what must fit together between these. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ddtree_ops.inventory.models import Host, Service
from ddtree_ops.inventory.yaml_source import KeyPath, suggestion

__all__ = ["Pairs", "cluster_address", "join_nodes", "node_problems", "partial", "whole"]

_AGREE = ("nodes", "runtime", "tensor_parallel", "speculative", "args")
"""Fields of a service that its nodes must have alike: what differs there ends as a hang or a shape error."""

Pairs = set[tuple[str, str]]
"""(host, service) by name."""


def cluster_address(host: Host) -> str | None:
    """Where other hosts reach it: ``cluster_address``, or ``address``; None where the inventory says neither."""
    return host.cluster_address or host.address


def node_problems(
    name: str, nodes_of: Mapping[str, Service], hosts: Mapping[str, Host]
) -> Iterator[tuple[KeyPath, str]]:
    """What is wrong with the nodes of service ``name``: ``(key path in the file, problem)``.

    :param nodes_of: the service on each host that has it, merged.
    :param hosts: all hosts.
    """
    with_nodes = {host: service for host, service in nodes_of.items() if service.nodes is not None}
    if not with_nodes:
        return
    path: KeyPath = ("services", name, "nodes")
    first = next(iter(with_nodes.values()))
    nodes = first.nodes
    assert nodes is not None
    if len(nodes.hosts) == 1:
        yield (
            (*path, "hosts"),
            f"one host alone needs no nodes: take {name}'s nodes away, or name the others too",
        )
    for index, host in enumerate(nodes.hosts):
        where: KeyPath = (*path, "hosts", index)
        if host not in hosts:
            yield where, f"there is no host '{host}'{suggestion(host, hosts)}"
        elif host in nodes.hosts[:index]:
            yield where, f"{host} is listed twice"
        elif host not in nodes_of:
            yield where, f"{host} does not have the service: list {name} under hosts.{host}.services"
    for host in nodes_of:
        if host not in nodes.hosts:
            yield (
                ("hosts", host, "services", name),
                f"{host} is no node of it: {name} runs on {', '.join(nodes.hosts)} together",
            )
    head = hosts.get(nodes.hosts[0])
    if nodes.address is None and head is not None and cluster_address(head) is None:
        yield (
            ("hosts", head.name),
            f"the nodes of {name} do not know where to find its head: set cluster_address, or address",
        )
    for host, service in nodes_of.items():
        for key in _AGREE:
            if host in nodes.hosts and getattr(service, key) != getattr(first, key):
                yield (
                    ("hosts", host, "services", name, key),
                    f"must be the same on every node of {name}, and differs from {next(iter(with_nodes))}",
                )
    pipeline = first.args.get("pp-size") or first.args.get("pipeline-parallel-size") or 1
    stages = int(pipeline) if isinstance(pipeline, int | str) and str(pipeline).isdigit() else 1
    if first.tensor_parallel * stages % len(nodes.hosts):
        yield (
            ("services", name, "tensor_parallel"),
            f"{first.tensor_parallel} GPUs in all cannot be spread evenly over {len(nodes.hosts)} nodes",
        )


def join_nodes(hosts: Mapping[str, Host]) -> dict[str, Host]:
    """The hosts with ``nodes.address`` filled in, in every service over several of them."""

    def joined(service: Service) -> Service:
        nodes = service.nodes
        if nodes is None or nodes.address is not None:
            return service
        address = cluster_address(hosts[nodes.hosts[0]])
        return service.model_copy(update={"nodes": nodes.model_copy(update={"address": address})})

    return {
        name: host.model_copy(update={"services": {key: joined(item) for key, item in host.services.items()}})
        for name, host in hosts.items()
    }


def _nodes(hosts: Mapping[str, Host], pair: tuple[str, str]) -> Pairs:
    host, service = pair
    nodes = hosts[host].services[service].nodes
    return {pair} if nodes is None else {(node, service) for node in nodes.hosts}


def whole(hosts: Mapping[str, Host], pairs: Collection[tuple[str, str]]) -> Pairs:
    """``pairs`` with every other node of the services that run over several hosts."""
    return {found for pair in pairs for found in _nodes(hosts, pair)}


def partial(hosts: Mapping[str, Host], pairs: Collection[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Services of which only some nodes are among ``pairs``: name -> the hosts left out."""
    missing = whole(hosts, pairs) - set(pairs)
    return {
        name: tuple(host for host in hosts if (host, name) in missing)
        for name in dict.fromkeys(name for _, name in sorted(missing))
    }
