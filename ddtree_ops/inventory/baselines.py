"""The service that runs the same model without speculation, by which another one's answers are judged. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddtree_ops.inventory.models import Host, Inventory, Service, Target
from ddtree_ops.inventory.yaml_source import KeyPath, suggestion

__all__ = ["baseline_of", "baseline_problems"]


def baseline_problems(hosts: Mapping[str, Host]) -> Iterator[tuple[KeyPath, str]]:
    """What is wrong with the baselines that services name: ``(key path in the file, problem)``, each once."""
    known = dict.fromkeys(name for host in hosts.values() for name in host.services)
    seen: set[tuple[KeyPath, str]] = set()
    for host in hosts.values():
        for service in host.services.values():
            for found in _problems(host, service, hosts, known):
                if found not in seen:
                    seen.add(found)
                    yield found


def _problems(
    host: Host, service: Service, hosts: Mapping[str, Host], known: Mapping[str, None]
) -> Iterator[tuple[KeyPath, str]]:
    baseline = service.baseline
    if baseline is None:
        return
    path: KeyPath = ("services", service.name, "baseline")
    where = baseline.host or host.name
    if service.speculative is None:
        yield path, f"{service.name} runs without speculation itself: there is nothing to compare"
    if baseline.service == service.name:
        yield (
            (*path, "service"),
            "is the service itself: name one that runs the same model without speculation",
        )
        return
    if baseline.service not in known:
        yield (
            (*path, "service"),
            f"no host has a service '{baseline.service}'{suggestion(baseline.service, known)}",
        )
        return
    if where not in hosts:
        yield (*path, "host"), f"there is no host '{where}'{suggestion(where, hosts)}"
        return
    found = hosts[where].services.get(baseline.service)
    if found is None:
        having = ", ".join(name for name, each in hosts.items() if baseline.service in each.services)
        yield (
            (*path, "host") if baseline.host else path,
            f"{where} does not have {baseline.service}: name the host that has it ({having})",
        )
        return
    if found.speculative is not None:
        yield (
            (*path, "service"),
            f"{baseline.service} runs with {found.speculative.algorithm}: a baseline has no speculative",
        )
    if found.model != service.model:
        yield (
            (*path, "service"),
            f"{baseline.service} runs another model: {found.model}, and this one {service.model}",
        )


def baseline_of(inventory: Inventory, target: Target) -> Target | None:
    """The baseline of a target as a target; None where its service names none."""
    baseline = target.service.baseline
    if baseline is None:
        return None
    host = inventory.hosts[baseline.host or target.host.name]
    service = host.services[baseline.service]
    return Target(host=host, service=service, runtime=inventory.runtimes[service.runtime])
