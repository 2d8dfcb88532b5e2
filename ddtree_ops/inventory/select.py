"""Which services on which hosts a command is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_ops.errors import ConfigError, UsageError
from ddtree_ops.inventory.load import merge, service_problems
from ddtree_ops.inventory.models import Host, Inventory, Service, Target
from ddtree_ops.inventory.yaml_source import BareWord, Document, check, dotted, parse_document, suggestion

if TYPE_CHECKING:
    from ddtree_ops.remote import ConnectSpec

__all__ = ["connect_spec", "override", "select"]


def select(
    inventory: Inventory,
    patterns: Sequence[str] = (),
    *,
    service: str | None = None,
    default_all: bool = False,
) -> list[Target]:
    """Targets that ``patterns`` name, in the order of the inventory, each once.

    :param patterns: host names, group names, globs over host names (``ct*``), ``all``, or any of these followed by
        ``/SERVICE``. None at all: the only host there is.
    :param service: only services of this name (or glob).
    :param default_all: no pattern stands for every host, however many there are.
    :raises UsageError: a pattern or service that matches nothing (never an empty result).
    """
    hosts = list(inventory.hosts)
    if not patterns:
        if len(hosts) > 1 and not default_all:
            raise UsageError(
                f"which host? {inventory.path} has {len(hosts)}: {', '.join(hosts)}",
                hint="name one or more of them, a group, a glob, or all",
            )
        patterns = ["all"]
    wanted: set[tuple[str, str]] = set()
    for pattern in patterns:
        host_pattern, slash, service_pattern = pattern.partition("/")
        found = _hosts(inventory, host_pattern)
        pairs = {
            (host, name)
            for host in found
            for name in inventory.hosts[host].services
            if not slash or fnmatchcase(name, service_pattern)
        }
        if not pairs:
            names = {name for host in found for name in inventory.hosts[host].services}
            raise UsageError(
                f"no service of {', '.join(found)} matches '{service_pattern}'{suggestion(service_pattern, sorted(names))}"
                if slash
                else f"{', '.join(found)}: no service is given for {'them' if len(found) > 1 else 'this host'}",
                hint=f"ddtree-ops inventory show -i {inventory.path}",
            )
        wanted |= pairs
    targets = [
        Target(host=host, service=entry, runtime=inventory.runtimes[entry.runtime])
        for host in inventory.hosts.values()
        for entry in host.services.values()
        if (host.name, entry.name) in wanted and (service is None or fnmatchcase(entry.name, service))
    ]
    if not targets:
        known = sorted({name for _, name in wanted})
        raise UsageError(
            f"no service '{service}' on {', '.join(dict.fromkeys(host for host, _ in sorted(wanted)))}"
            f"{suggestion(service or '', known)}",
            hint=f"ddtree-ops inventory show -i {inventory.path}",
        )
    return targets


def _hosts(inventory: Inventory, pattern: str) -> list[str]:
    if pattern == "all":
        return list(inventory.hosts)
    if pattern in inventory.hosts:
        return [pattern]
    found: Iterable[str]
    if pattern in inventory.groups:
        found = inventory.groups[pattern]
    else:
        found = [host for host in inventory.hosts if fnmatchcase(host, pattern)]
    if not found:
        names = [*inventory.hosts, *inventory.groups]
        raise UsageError(
            f"no host or group matches '{pattern}'{suggestion(pattern, names)}",
            hint=f"{inventory.path or 'the inventory'} has: {', '.join([*names, 'all'])}",
        )
    return list(found)


def connect_spec(host: Host) -> ConnectSpec:
    """How to reach ``host``, with ``~`` in the paths of this machine expanded."""
    from ddtree_ops.remote import ConnectSpec

    def local(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser())

    ssh = host.ssh
    return ConnectSpec(
        name=host.name,
        address=host.address,
        user=ssh.user,
        port=ssh.port,
        identity_file=local(ssh.identity_file),
        known_hosts=local(ssh.known_hosts),
        config=local(ssh.config),
        fingerprint=ssh.fingerprint,
        proxy_jump=ssh.proxy_jump,
        connect_timeout=ssh.connect_timeout,
        python=ssh.python,
    )


def override(target: Target, settings: Sequence[str], *, inventory: Inventory | None = None) -> Target:
    """``target`` with ``KEY=VALUE`` settings laid on its service, validated like an inventory.

    ``KEY`` is a dotted path into the service (``args.attention-backend``, ``speculative.budget``, ``runtime``);
    ``VALUE`` is read as one YAML scalar, or as a list where it begins with ``[``. ``null`` takes the key away.

    :param inventory: where ``runtime=NAME`` is looked up.
    :raises UsageError: an unknown key (with the nearest one), a wrong value, or a service that makes no sense.
    """
    if not settings:
        return target
    data: dict[str, Any] = target.service.model_dump(exclude_none=True)
    for setting in settings:
        key, equals, text = setting.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            raise UsageError(
                f"--set {setting}: write KEY=VALUE with a dotted KEY",
                hint="for example --set speculative.budget=16",
            )
        if path == ["name"]:
            raise UsageError("--set name: the name of a service cannot be changed")
        value = _scalar(key, text)
        if path[0] == "args" and isinstance(value, BareWord):
            raise UsageError(f"--set {key}: {value} is text: write true or false, or quote it: '\"{value}\"'")
        patch: Any = value
        for part in reversed(path):
            patch = {part: patch}
        data = merge(data, patch)
    service, problems = check(Document("--set", data), Service, hidden=("name",))
    lines = [f"--set {problem.path}: {problem.text}" for problem in problems]
    if service is not None:
        lines = [f"--set {dotted(path)}: {text}" for path, text in service_problems(service)]
    if service is None or lines:
        raise UsageError(
            lines[0] if len(lines) == 1 else f"{len(lines)} settings are wrong",
            host=target.host.name,
            details=tuple(lines) if len(lines) > 1 else (),
            state="nothing was changed",
        )
    runtime = target.runtime
    if service.runtime != target.service.runtime:
        runtimes = inventory.runtimes if inventory else {runtime.name: runtime}
        if service.runtime not in runtimes:
            raise UsageError(
                f"--set runtime: there is no runtime '{service.runtime}'{suggestion(service.runtime, runtimes)}",
                host=target.host.name,
                state="nothing was changed",
            )
        runtime = runtimes[service.runtime]
    host = target.host.model_copy(update={"services": {**target.host.services, service.name: service}})
    return Target(host=host, service=service, runtime=runtime)


def _scalar(key: str, text: str) -> Any:
    """``text`` as one YAML scalar or list; text that is no valid YAML stands for itself."""
    stripped = text.strip()
    if not stripped:
        return ""
    is_list = stripped.startswith("[")
    try:
        document = parse_document(stripped, "--set", defer=True)
    except ConfigError as error:
        if is_list:
            raise UsageError(f"--set {key}: {stripped} is not a YAML list") from error
        return text
    if document.problems:
        raise UsageError(f"--set {key}: {document.problems[0].text}")
    if isinstance(document.data, dict) or (isinstance(document.data, list) and not is_list):
        return text
    return document.data
