"""Which services on which hosts a command is about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_ops.errors import ConfigError, UsageError
from ddtree_ops.inventory import nodes
from ddtree_ops.inventory.load import merge, service_problems
from ddtree_ops.inventory.models import Host, Inventory, Service, Target
from ddtree_ops.inventory.yaml_source import (
    BareWord,
    Document,
    KeyPath,
    check,
    dotted,
    parse_document,
    suggestion,
)

if TYPE_CHECKING:
    from ddtree_ops.remote import ConnectSpec

__all__ = ["connect_spec", "override", "select"]

_NULL = ("null", "Null", "NULL", "~")


def select(
    inventory: Inventory,
    patterns: Sequence[str] = (),
    *,
    service: str | None = None,
    default_all: bool = False,
    limit: Sequence[str] = (),
    exclude: Sequence[str] = (),
    whole: bool = True,
) -> list[Target]:
    """Targets that ``patterns`` name, in the order of the inventory, each once.

    A pattern is a host, a group, ``all``, a glob over both (``ct*``), or any of these with numeric ranges
    (``gpu[01-30]``, ``gpu[01-08,12]``); ``/SERVICE`` (or a glob) after it names services of these hosts. Several stand
    one by one or with commas between; they add up, then those with ``&`` before them keep what they name, then those
    with ``!`` before them take it away.

    :param patterns: none at all: the only host there is; every host with ``limit``, or where the others only take away.
    :param service: only services of this name (or glob).
    :param default_all: no pattern stands for every host, however many there are.
    :param limit: patterns; of the selection only what these name too.
    :param exclude: patterns; of the selection what none of these names.
    :param whole: a node of a service over several hosts stands for all of its nodes, and taking away only some of
        them is refused; False for what only looks.
    :raises UsageError: a pattern or service that matches nothing, or nothing left (never an empty result).
    """
    hosts = list(inventory.hosts)
    words = [word for text in patterns for word in _split(text)]
    adding = [word for word in words if not word.startswith(("!", "&"))]
    if not adding and not words and not limit and len(hosts) > 1 and not default_all:
        raise UsageError(
            f"which host? {inventory.path} has {len(hosts)}: {', '.join(hosts)}",
            hint="name one or more of them, a group, a glob, or all",
        )
    wanted = _named(inventory, adding or ["all"])
    if whole:
        wanted = nodes.whole(inventory.hosts, wanted)
    steps = [(word[1:], True, "") for word in words if word.startswith("&")]
    steps += [(word[1:], False, "") for word in words if word.startswith("!")]
    for option, texts in (("--limit", limit), ("--exclude", exclude)):
        if texts:
            steps.append((",".join(texts), option == "--limit", option))
    for text, keep, option in steps:
        found = _combined(inventory, text, option) if option else _named(inventory, [text])
        before, wanted = wanted, wanted & found if keep else wanted - found
        if not wanted:
            raise UsageError(
                f"{option or 'the pattern'} {text} leaves nothing of "
                f"{', '.join(dict.fromkeys(host for host in hosts for one, _ in before if one == host))}",
                hint=f"ddtree-ops inventory show -i {inventory.path}",
            )
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
    if whole:
        _whole_services(inventory, targets)
    return targets


def _whole_services(inventory: Inventory, targets: Sequence[Target]) -> None:
    """:raises UsageError: only some nodes of a service over several hosts are left."""
    chosen = {(target.host.name, target.service.name) for target in targets}
    for name, left_out in nodes.partial(inventory.hosts, chosen).items():
        raise UsageError(
            f"{name} runs one engine over several hosts, and {', '.join(left_out)} would be left out: its nodes are "
            "started, stopped and judged together",
            hint=f"name all of it (--service {name}), or take all of it away",
        )


_RANGE = re.compile(r"\[([0-9]+-[0-9]+(?:,[0-9]+(?:-[0-9]+)?)*|[0-9]+(?:,[0-9]+(?:-[0-9]+)?)+)\]")
_MOST = 10_000


def _split(text: str) -> list[str]:
    """Patterns with commas between, none inside brackets."""
    return [word.strip() for word in re.split(r",(?![^\[]*\])", text)]


def _combined(inventory: Inventory, text: str, option: str) -> nodes.Pairs:
    """What an option's patterns name together, those with ``&`` and ``!`` among them."""
    try:
        targets = select(inventory, [text], whole=False)
    except UsageError as error:
        error.message = f"{option}: {error.message}"
        raise
    return {(target.host.name, target.service.name) for target in targets}


def _named(inventory: Inventory, words: Sequence[str]) -> nodes.Pairs:
    """Services of hosts that patterns name. :raises UsageError: one that names none."""
    wanted: nodes.Pairs = set()
    for word in words:
        host_pattern, slash, service_pattern = word.partition("/")
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
    return wanted


def _hosts(inventory: Inventory, pattern: str) -> list[str]:
    if pattern == "all":
        return list(inventory.hosts)
    found: set[str] = set()
    for one in _expand(pattern):
        if one in inventory.hosts:
            found.add(one)
        elif one in inventory.groups:
            found.update(inventory.groups[one])
        else:
            found.update(host for host in inventory.hosts if fnmatchcase(host, one))
            found.update(
                host
                for name, members in inventory.groups.items()
                if fnmatchcase(name, one)
                for host in members
            )
    if not found:
        names = [*inventory.hosts, *inventory.groups]
        raise UsageError(
            f"no host or group matches '{pattern}'{suggestion(pattern, names)}",
            hint=f"{inventory.path or 'the inventory'} has: {', '.join([*names, 'all'])}",
        )
    return [host for host in inventory.hosts if host in found]


def _expand(pattern: str) -> list[str]:
    """``gpu[08-10]`` as ``gpu08``, ``gpu09``, ``gpu10``; numbers are as wide as the first is written.

    :raises UsageError: a range that ends before it begins, or more than 10,000 names.
    """
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    numbers: list[str] = []
    for part in match.group(1).split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise UsageError(f"'{pattern}': the range {part} ends before it begins")
        if int(last or first) - int(first) >= _MOST:
            raise UsageError(f"'{pattern}': more than {_MOST} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    rest = _expand(pattern[match.end() :])
    if len(numbers) * len(rest) > _MOST:
        raise UsageError(f"'{pattern}': more than {_MOST} hosts")
    return [f"{pattern[: match.start()]}{number}{tail}" for number in numbers for tail in rest]


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
    ``VALUE`` is read as one YAML scalar, or as a list where it begins with ``[``; the value of an environment variable is
    text, whatever it looks like. ``null`` takes the key away.

    :param inventory: where ``runtime=NAME`` is looked up.
    :raises UsageError: an unknown key (with the nearest one), a wrong value, or a service that makes no sense.
    """
    if not settings:
        return target
    data: dict[str, Any] = target.service.model_dump(exclude_none=True)
    keys = [setting.partition("=")[0] for setting in settings]
    for place, setting in enumerate(settings):
        key, equals, text = setting.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            raise UsageError(
                f"--set {setting}: write KEY=VALUE with a dotted KEY",
                hint="for example --set speculative.budget=16",
            )
        if path == ["name"]:
            raise UsageError("--set name: the name of a service cannot be changed")
        if len(path) > 1 and path[0] == "runtime":
            raise UsageError(
                f"--set {key}: a service only names its runtime",
                state="nothing was changed",
                hint="describe another one under runtimes in the inventory, and name it with --runtime NAME",
            )
        covered = next((later for later in keys[place + 1 :] if key.startswith(f"{later}.")), None)
        if covered:
            raise UsageError(
                f"--set {key} has no effect: --set {covered} after it sets all of {covered}",
                state="nothing was changed",
                hint="give it after that one, or leave it out",
            )
        value = _variable(key, text) if path[0] == "environment" and len(path) > 1 else _scalar(key, text)
        if path[0] == "args" and isinstance(value, BareWord):
            raise UsageError(f"--set {key}: {value} is text: write true or false, or quote it: '\"{value}\"'")
        patch: Any = value
        for part in reversed(path):
            patch = {part: patch}
        data = merge(data, patch)
    service, problems = check(Document("--set", data), Service, hidden=("name",))
    lines = [f"--set {problem.path}: {problem.text}" for problem in problems]
    hint = f"give another value, or leave that --set out; what is set now: ddtree-ops inventory show {target.host.name}"
    if service is not None:
        found = service_problems(service)
        kept = _tree_settings_kept(service, keys, found)
        if kept:
            assert service.speculative is not None
            lines.append(
                f"--set speculative.algorithm: {service.speculative.algorithm} takes no "
                f"{' and no '.join(kept)}, which the service has"
            )
            away = " ".join(f"--set speculative.{name}=null" for name in kept)
            hint = f"give {away} too, or --set speculative=null instead for no speculation"
        lines += [
            f"--set {dotted(path)}: {text}"
            for path, text in found
            if path not in [("speculative", name) for name in kept]
        ]
    if service is None or lines:
        raise UsageError(
            lines[0] if len(lines) == 1 else f"{len(lines)} settings are wrong",
            host=target.host.name,
            details=tuple(lines) if len(lines) > 1 else (),
            state="nothing was changed",
            hint=hint,
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


def _tree_settings_kept(
    service: Service, keys: Sequence[str], problems: Sequence[tuple[KeyPath, str]]
) -> list[str]:
    """Settings of DDTREE that are left of the service where ``keys`` name another algorithm, and it refuses them."""
    if service.speculative is None or "speculative.algorithm" not in keys:
        return []
    refused = {path for path, _ in problems}
    return [
        name
        for name in service.speculative.tree_settings
        if service.speculative.algorithm.upper() != "DDTREE"
        and ("speculative", name) in refused
        and f"speculative.{name}" not in keys
    ]


def _variable(key: str, text: str) -> str | None:
    """The value of an environment variable: as it stands, but for ``null`` and what is quoted as YAML quotes."""
    stripped = text.strip()
    if stripped in _NULL:
        return None
    if stripped[:1] in ("'", '"'):
        value = _scalar(key, text)
        return value if isinstance(value, str) else text
    return stripped


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
