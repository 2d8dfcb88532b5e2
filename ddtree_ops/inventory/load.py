"""Inventory files: finding, merging, checking.

File shape (``schema: 1``)::

    defaults:  {host: {...}, service: {...}}    merged under every host and service
    runtimes:  {NAME: {...RuntimeSpec}}
    services:  {NAME: {...Service}}
    hosts:     {NAME: {...Host, services: [NAME, ...] or {NAME: {...overrides}}}}
    routers:   {NAME: {...Router}}
    groups:    {NAME: [HOST or GROUP, ...]}
    x-...:     anything; a place for anchors

A service on a host is ``defaults.service``, then the service, then the host's overrides, merged as RFC 7396 says:
mappings merge key by key, lists and scalars replace, ``null`` takes away what was inherited. Paths of this machine
(``ssh.identity_file``, ``ssh.known_hosts``, ``ssh.config``, ``runtimes.*.base``, ``secrets.*.file``) may begin with
``~`` and are relative to the inventory file; host paths are absolute.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.baselines import baseline_problems
from ddtree_ops.inventory.models import (
    ENGINE_SECRETS,
    Host,
    Inventory,
    Router,
    RuntimeSpec,
    Service,
    Speculative,
)
from ddtree_ops.inventory.nodes import join_nodes, node_problems
from ddtree_ops.inventory.routers import router_problems
from ddtree_ops.inventory.yaml_source import (
    BareWord,
    Document,
    KeyPath,
    Mark,
    Problem,
    check,
    config_error,
    display,
    load_document,
    nearest,
    suggestion,
)
from ddtree_ops.paths import INVENTORY_BY_OPTION, config_dir, shipped
from ddtree_ops.secret import is_secret_flag

__all__ = ["find_file", "inventory_schema", "load_inventory", "merge", "resolve", "service_problems"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ARG = re.compile(r"[a-z0-9]+(?:-+[a-z0-9]+)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_FIELDS = {
    "model": "model",
    "model-path": "model",
    "host": "bind",
    "port": "port",
    "tp": "tensor_parallel",
    "tp-size": "tensor_parallel",
    "tensor-parallel-size": "tensor_parallel",
    "served-model-name": "served_name",
    "speculative-algorithm": "speculative.algorithm",
    "speculative-draft-model": "drafter",
    "speculative-draft-model-path": "drafter",
    "speculative-ddtree-budget": "speculative.budget",
    "speculative-ddtree-topk-cap": "speculative.topk_cap",
    "speculative-ddtree-budget-schedule": "speculative.budget_schedule",
    "nnodes": "nodes",
    "node-rank": "nodes",
    "dist-init-addr": "nodes",
    "nccl-init-addr": "nodes",
}
"""Launch flags that a field of the service writes."""
_BLOCK_FLAGS = ("speculative-num-draft-tokens", "speculative-dflash-block-size")
_BLOCK_DRAFTERS = ("DFLASH", "DDTREE")
_ALGORITHMS = (*_BLOCK_DRAFTERS, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
"""Speculative algorithms of sglang 0.5.11, and ours; a plugin may bring others."""
_CHAIN_BACKENDS = ("flashinfer_mla", "trtllm_mha", "trtllm_mla", "flashmla", "cutlass_mla", "nsa")
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONPYCACHEPREFIX")
_LOCAL_PATHS = ("identity_file", "known_hosts", "config")


_Entry = dict[str, Any] | None


class _Defaults(BaseModel):
    model_config = ConfigDict(extra="forbid")
    host: dict[str, Any] = Field(default_factory=dict)
    service: dict[str, Any] = Field(default_factory=dict)


class _File(BaseModel):
    """The outer shape; entries are validated once merged."""

    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = Field(alias="schema")
    defaults: _Defaults = _Defaults()
    runtimes: dict[str, _Entry] = Field(default_factory=dict)
    services: dict[str, _Entry] = Field(default_factory=dict)
    hosts: dict[str, _Entry] = Field(min_length=1)
    groups: dict[str, list[str]] = Field(default_factory=dict)
    routers: dict[str, _Entry] = Field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------------
# Finding


def find_file(kind: str, name_or_path: str, *, hint: str = "") -> Path:
    """The file that a name or path stands for.

    A path has a slash or ends in ``.yaml``/``.yml``. A name is looked up in ``./KIND/``, in the user's
    ``config_dir()/KIND/`` and among the shipped files.

    :param kind: ``inventories`` or ``playbooks``.
    :raises ConfigError: names the places looked at and the names there are.
    """
    singular = {"inventories": "inventory", "playbooks": "playbook"}[kind]
    given = Path(name_or_path).expanduser()
    if given.is_file():
        return given
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        raise ConfigError(f"{singular} {name_or_path} does not exist", hint=hint)
    folders = [Path(kind), config_dir() / kind]
    with suppress(FileNotFoundError):
        folders.append(shipped(kind))
    known: dict[Path, Path] = {}
    for folder in folders:
        known.setdefault(folder.resolve(), folder)
    unique = list(known.values())
    for folder in unique:
        for suffix in (".yaml", ".yml"):
            if (folder / f"{name_or_path}{suffix}").is_file():
                return folder / f"{name_or_path}{suffix}"
    names = sorted({path.stem for folder in unique if folder.is_dir() for path in folder.glob("*.y*ml")})
    raise ConfigError(
        f"there is no {singular} named {name_or_path}{suggestion(name_or_path, names)}",
        details=(
            *(
                f"looked for {display(folder) if folder.is_absolute() else folder}/{name_or_path}.yaml"
                for folder in unique
            ),
            f"there are: {', '.join(names) or 'none'}",
        ),
        hint=hint,
    )


def load_inventory(name_or_path: str | None = None) -> Inventory:
    """Load, merge and check an inventory.

    :param name_or_path: see :func:`find_file`; None: ``$DDTREE_OPS_INVENTORY``, or ``production``.
    :raises ConfigError: with every problem found, one ``file:line: key.path: problem`` an entry of ``details``.
    """
    variable = os.environ.get("DDTREE_OPS_INVENTORY", "")
    wanted = name_or_path or variable or "production"
    hint = "name an inventory with -i NAME_OR_PATH"
    if not name_or_path and variable and os.environ.get(INVENTORY_BY_OPTION) != variable:
        hint += f" (DDTREE_OPS_INVENTORY is {variable})"
    path = find_file("inventories", wanted, hint=hint)
    hint = f"ddtree-ops inventory validate -i {display(path)}"
    document = load_document(path, hint=hint, defer=True)
    inventory, problems = resolve(document, base=path.resolve().parent)
    if inventory is None or problems:
        raise config_error(
            document.source, problems, hint=hint, what="inventory", state="nothing was contacted or changed"
        )
    return inventory


# ---------------------------------------------------------------------------------------------------------------------
# Merging


def merge(base: Any, over: Any) -> Any:
    """``over`` laid on ``base`` as RFC 7396 (JSON Merge Patch) says; neither is changed."""
    if not isinstance(over, dict):
        return over
    result = dict(base) if isinstance(base, dict) else {}
    for key, value in over.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def _merged(
    document: Document, layers: Sequence[KeyPath], main: KeyPath, changes: Mapping[str, Any]
) -> Document:
    """The merged entry as a document: every place is that of the layer that has the last word."""
    data: Any = {}
    for layer in layers:
        value = document.get(layer)
        data = merge(data, value if isinstance(value, dict) else {})
    data |= changes
    marks: dict[KeyPath, Mark] = {}

    def walk(value: Any, layer: KeyPath, path: KeyPath) -> None:
        if (*layer, *path) in document.marks:
            marks[path] = document.marks[(*layer, *path)]
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, item in items:
            walk(item, layer, (*path, key))

    for layer in layers:
        walk(document.get(layer), layer, ())
    marks[()] = document.mark(main)
    return Document(document.source, data, marks, document.problems)


# ---------------------------------------------------------------------------------------------------------------------
# Checking


def service_problems(service: Service) -> list[tuple[KeyPath, str]]:
    """What is wrong with a service whose fields are each valid: ``(key path, problem)``. Pure."""
    found: list[tuple[KeyPath, str]] = []

    def report(text: str, *path: str) -> None:
        found.append((path, text))

    speculative = service.speculative
    algorithm = speculative.algorithm.upper() if speculative else ""
    if speculative:
        if algorithm != speculative.algorithm:
            report(f"write it as sglang does: {algorithm}", "speculative", "algorithm")
        if algorithm in _BLOCK_DRAFTERS and service.drafter is None:
            report(
                f"{algorithm} needs a drafter: set drafter to the draft model's path on the host",
                "speculative",
            )
        if algorithm == "DDTREE":
            _tree_problems(service, speculative, report)
        elif _misspelt(algorithm) and speculative.tree_settings:
            report(
                f"unknown algorithm {algorithm}{suggestion(algorithm, _ALGORITHMS)}",
                "speculative",
                "algorithm",
            )
        else:
            for name in speculative.tree_settings:
                report(f"only DDTREE takes it, the algorithm is {algorithm}", "speculative", name)
    for key, problem in _argument_problems(service.args, algorithm):
        report(problem, "args", key)
    for key in service.environment:
        if not _VARIABLE.fullmatch(key):
            report("is not the name of an environment variable", "environment", key)
        elif key in _OWN_VARIABLES:
            report("is set by the deployment: it makes the release shadow the venv", "environment", key)
    for where, problem in _secret_problems(service):
        report(problem, *where)
    restart = service.restart
    if restart.interval is not None and restart.interval <= restart.burst * restart.delay:
        report(
            f"{restart.interval:g} s must exceed burst x delay = {restart.burst} x {restart.delay:g} s, or a crash "
            "loop never ends: leave it out to have it computed",
            "restart",
            "interval",
        )
    return found


def _misspelt(algorithm: str) -> bool:
    return algorithm not in _ALGORITHMS and nearest(algorithm, _ALGORITHMS) is not None


def _secret_problems(service: Service) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, source in service.secrets.items():
        where = ("secrets", name)
        given = source.given
        if name in _OWN_VARIABLES:
            yield where, "is set by the deployment: it makes the release shadow the venv"
        elif name not in ENGINE_SECRETS and not _SECRET_VARIABLE.fullmatch(name):
            known = ", ".join(ENGINE_SECRETS)
            yield where, f"write {known}, or a variable of the process in capitals such as HF_TOKEN"
        elif name in service.environment:
            yield (
                where,
                f"stands under environment too: keep one of the two, best this one (`{name}: null` there)",
            )
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            yield (
                where,
                f"needs exactly one of env, file and command, found {found}: null takes away what is inherited",
            )
        if source.env is not None and not _VARIABLE.fullmatch(source.env):
            yield (*where, "env"), "is not the name of an environment variable"
    if "config" in service.args and not ENGINE_SECRETS.keys().isdisjoint(service.secrets):
        yield (
            ("args", "config"),
            (
                "the engine reads one --config only, and the API key travels in it: write the settings of that file "
                "under args, or the key into that file"
            ),
        )


def _tree_problems(service: Service, speculative: Speculative, report: Callable[..., None]) -> None:
    least = speculative.block_size - 1
    if speculative.budget is None:
        report("DDTREE needs a budget: set speculative.budget", "speculative")
    elif speculative.budget < least:
        report(
            f"{speculative.budget} is less than block_size - 1 = {least}: the tree could not hold one whole draft",
            "speculative",
            "budget",
        )
    for key in ("attention-backend", "decode-attention-backend"):
        backend = service.args.get(key)
        if backend in _CHAIN_BACKENDS:
            report(
                f"{backend} ignores the tree mask and would verify a chain, silently: use triton", "args", key
            )
    if service.args.get("page-size", 1) not in (1, "1", False):
        report("DDTREE works with page size 1 only: leave the key out, or write 1", "args", "page-size")


def _argument_problems(arguments: Iterable[str], algorithm: str) -> Iterator[tuple[str, str]]:
    for key in arguments:
        plain = key.strip("-").replace("_", "-").lower()
        known = _FIELDS.get(key)
        if key in _BLOCK_FLAGS and algorithm in _BLOCK_DRAFTERS:
            known = "speculative.block_size"
        if known:
            yield key, f"use the field {known} of the service instead"
        elif is_secret_flag(key):
            name = plain.replace("-", "_")
            yield (
                key,
                f"a secret would stand in the command line: write secrets.{name} with its source"
                if name in ENGINE_SECRETS
                else "a secret would stand in the command line: put it in a file on the host, named by args.config",
            )
        elif not _ARG.fullmatch(key):
            right = f"write the flag in lower case, with dashes only inside: {plain}"
            yield key, right if _ARG.fullmatch(plain) else "is not the name of a launch flag"


def _bare_words(document: Document) -> list[Problem]:
    arguments = document.get(("args",))
    if not isinstance(arguments, dict):
        return []
    return [
        document.problem(
            ("args", key),
            f"{value} is text here, and a boolean to other readers: write true or false, or quote it: '{value}'",
        )
        for key, value in arguments.items()
        if isinstance(value, BareWord)
    ]


@dataclass
class _Resolver:
    document: Document
    base: Path
    problems: list[Problem] = field(default_factory=list)
    runtimes: dict[str, RuntimeSpec] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def report(self, path: KeyPath, text: str) -> None:
        self.problems.append(self.document.problem(path, text))

    def entries(self, section: str) -> dict[str, Any]:
        value = self.document.get((section,))
        return value if isinstance(value, dict) else {}

    def named(self, path: KeyPath) -> None:
        """Refuse ``name:`` inside an entry: the key above is the name."""
        entry = self.document.get(path)
        if isinstance(entry, dict) and "name" in entry:
            key = "the key of each entry" if path[0] == "defaults" else f"the key, {path[-1]}"
            self.report((*path, "name"), f"remove it: the name is {key}")

    def local(self, value: str | None) -> str | None:
        return None if value is None else str(self.base / Path(value).expanduser())

    def resolve_runtimes(self) -> None:
        for name in self.entries("runtimes"):
            path: KeyPath = ("runtimes", name)
            self.named(path)
            merged = _merged(self.document, [path], path, {"name": name})
            spec, problems = check(merged, RuntimeSpec, hidden=("name",))
            self.problems += problems
            if spec is not None:
                self.runtimes[name] = spec.model_copy(update={"base": self.local(spec.base)})

    def service(self, name: str, override: KeyPath | None) -> Service | None:
        path: KeyPath = ("services", name)
        layers: list[KeyPath] = [("defaults", "service"), path, *([override] if override else [])]
        merged = _merged(self.document, layers, path, {"name": name})
        service, problems = check(merged, Service, hidden=("name",))
        problems += _bare_words(merged)
        if service is None:
            arguments = merged.get(("args",))
            if isinstance(arguments, dict):
                found = _argument_problems(arguments, str(merged.get(("speculative", "algorithm"), "")))
                problems += [merged.problem(("args", key), text) for key, text in found]
            self.problems += problems
            return None
        problems += [merged.problem(where, text) for where, text in service_problems(service)]
        if service.runtime not in self.entries("runtimes"):
            problems.append(
                merged.problem(
                    ("runtime",),
                    f"there is no runtime '{service.runtime}'"
                    + suggestion(service.runtime, self.entries("runtimes")),
                )
            )
        self.problems += problems
        secrets = {
            key: source.model_copy(update={"file": self.local(source.file)})
            for key, source in service.secrets.items()
        }
        return service.model_copy(update={"secrets": secrets}) if secrets else service

    def host_services(self, host: str) -> dict[str, Service]:
        path: KeyPath = ("hosts", host, "services")
        given = self.document.get(path)
        places: dict[str, tuple[KeyPath, KeyPath | None]] = {}
        if isinstance(given, dict):
            places = {name: ((*path, name), (*path, name)) for name in given}
            for name, value in given.items():
                if value is not None and not isinstance(value, dict):
                    self.report((*path, name), "expected a mapping of overrides, or nothing")
        elif isinstance(given, list):
            for index, name in enumerate(given):
                if not isinstance(name, str):
                    self.report((*path, index), "expected the name of a service")
                elif name in places:
                    self.report((*path, index), f"{name} is listed twice")
                else:
                    places[name] = ((*path, index), None)
        elif given is not None:
            self.report(path, "expected a list of service names, or a mapping of names to overrides")
        result: dict[str, Service] = {}
        for name, (place, override) in places.items():
            if name not in self.entries("services"):
                self.report(
                    place, f"there is no service '{name}'" + suggestion(name, self.entries("services"))
                )
                continue
            if override:
                self.named(override)
            service = self.service(name, override)
            self.used.add(name)
            if service is None:
                continue
            for other in result.values():
                for key in ("unit", "port"):
                    if getattr(other, key) == getattr(service, key):
                        self.report(
                            place,
                            f"the {key} {getattr(service, key)} is taken on {host} by {other.name}: give it another",
                        )
            result[name] = service
        return result

    def host(self, name: str) -> Host | None:
        path: KeyPath = ("hosts", name)
        self.named(path)
        layers: list[KeyPath] = [("defaults", "host"), path]
        merged = _merged(self.document, layers, path, {"name": name, "services": {}})
        host, problems = check(merged, Host, hidden=("name",))
        self.problems += problems
        services = self.host_services(name)
        if host is None:
            return None
        ssh = host.ssh.model_copy(update={key: self.local(getattr(host.ssh, key)) for key in _LOCAL_PATHS})
        return host.model_copy(update={"services": services, "ssh": ssh})

    def groups(self) -> dict[str, tuple[str, ...]]:
        hosts = list(self.entries("hosts"))
        groups = {
            name: members for name, members in self.entries("groups").items() if isinstance(members, list)
        }
        for kind in ("hosts", "groups"):
            if "all" in self.entries(kind):
                self.report((kind, "all"), "'all' stands for every host: choose another name")
        for name, members in groups.items():
            if name in hosts and name != "all":
                self.report(("groups", name), f"'{name}' is a host already: choose another name")
            if not members:
                self.report(("groups", name), "is empty")
            for index, member in enumerate(members):
                if isinstance(member, str) and member not in hosts and member not in groups:
                    self.report(
                        ("groups", name, index),
                        f"there is no host or group '{member}'"
                        + suggestion(member, [other for other in (*hosts, *groups) if other != name]),
                    )

        def expand(name: str, chain: tuple[str, ...]) -> set[str]:
            if name in hosts:
                return {name}
            if name in chain:
                if name == min(chain, key=list(groups).index) == chain[0]:
                    self.report(("groups", name), f"the group holds itself: {' -> '.join((*chain, name))}")
                return set()
            members = [member for member in groups.get(name, ()) if isinstance(member, str)]
            return {host for member in members for host in expand(member, (*chain, name))}

        return {name: tuple(host for host in hosts if host in expand(name, ())) for name in groups}

    def run(self) -> Inventory | None:
        document = self.document
        data = document.data
        if isinstance(data, dict):
            data = {key: value for key, value in data.items() if not key.startswith("x-")}
        self.problems += check(document, _File, data=data)[1]
        if document.problems or not isinstance(document.data, dict):
            return None
        for section in ("runtimes", "services", "hosts", "groups", "routers"):
            for name in self.entries(section):
                if not _NAME.fullmatch(name):
                    self.report((section, name), "a name has letters, digits, '.', '_' and '-' only")
        if document.get(("defaults", "host", "services")) is not None:
            self.report(("defaults", "host", "services"), "services are given host by host")
        self.resolve_runtimes()
        for layer, model in (("host", Host), ("service", Service)):
            path: KeyPath = ("defaults", layer)
            self.named(path)
            given = document.get(path)
            if isinstance(given, dict):
                data = {key: value for key, value in given.items() if key not in ("name", "services")}
                self.problems += check(document, model, path, partial=True, data=data, hidden=("name",))[1]
        hosts = {name: self.host(name) for name in self.entries("hosts")}
        for name in self.entries("services"):
            self.named(("services", name))
            if name not in self.used:
                self.service(name, None)
        groups = self.groups()
        routers = self.routers()
        found = {name: host for name, host in hosts.items() if host is not None}
        if not self.problems:
            self.check_nodes(found)
        if self.problems:
            return None
        inventory = Inventory(
            path=document.source,
            hosts=join_nodes(found),
            groups=groups,
            runtimes=self.runtimes,
            routers=routers,
        )
        for path, text in router_problems(inventory):
            self.report(path, text)
        return None if self.problems else inventory

    def check_nodes(self, hosts: Mapping[str, Host]) -> None:
        for name in self.entries("services"):
            having = {host: found.services[name] for host, found in hosts.items() if name in found.services}
            for path, text in node_problems(name, having, hosts):
                self.report(path, text)
        for path, text in baseline_problems(hosts):
            self.report(path, text)

    def routers(self) -> dict[str, Router]:
        found: dict[str, Router] = {}
        for name in self.entries("routers"):
            path: KeyPath = ("routers", name)
            self.named(path)
            router, problems = check(
                _merged(self.document, [path], path, {"name": name}), Router, hidden=("name",)
            )
            self.problems += problems
            for key in router.args if router else ():
                if not _ARG.fullmatch(key):
                    self.report(
                        (*path, "args", key), "is not the name of a flag: lower case, dashes only inside"
                    )
            if router is not None:
                found[name] = router
        return found


def resolve(document: Document, *, base: Path | None = None) -> tuple[Inventory | None, list[Problem]]:
    """Merge and check a parsed inventory file. Pure.

    :param base: folder that paths of this machine are relative to (the current one if left out).
    :returns: the inventory, or None, and every problem found (those of the text included).
    """
    resolver = _Resolver(document, base or Path())
    inventory = resolver.run()
    return inventory, [*document.problems, *resolver.problems]


# ---------------------------------------------------------------------------------------------------------------------
# Schema


def _partial(schema: dict[str, Any], hidden: Collection[str] = ("name",)) -> dict[str, Any]:
    properties = {key: value for key, value in schema["properties"].items() if key not in hidden}
    return {"type": "object", "additionalProperties": False, "properties": properties}


@cache
def inventory_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of an inventory file, for editors. Looser than the loader: it knows no merging."""
    from pydantic.json_schema import models_json_schema

    _, combined = models_json_schema(
        [(Host, "validation"), (Service, "validation"), (RuntimeSpec, "validation"), (Router, "validation")],
        ref_template="#/$defs/{model}",
    )
    definitions = combined["$defs"]
    host, service = _partial(definitions.pop("Host")), _partial(definitions.pop("Service"))
    runtime, router = _partial(definitions.pop("RuntimeSpec")), _partial(definitions.pop("Router"))
    nothing = {"type": "null"}
    defaults_host = {**host, "properties": {k: v for k, v in host["properties"].items() if k != "services"}}
    host["properties"]["services"] = {
        "oneOf": [
            {"type": "array", "items": {"type": "string"}},
            {"type": "object", "additionalProperties": {"anyOf": [{"$ref": "#/$defs/Service"}, nothing]}},
        ]
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ddtree-ops inventory",
        "type": "object",
        "required": ["schema", "hosts"],
        "additionalProperties": False,
        "patternProperties": {"^x-": {}},
        "properties": {
            "schema": {"const": 1},
            "defaults": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"host": defaults_host, "service": {"$ref": "#/$defs/Service"}},
            },
            "runtimes": {"type": "object", "additionalProperties": {"anyOf": [runtime, nothing]}},
            "services": {
                "type": "object",
                "additionalProperties": {"anyOf": [{"$ref": "#/$defs/Service"}, nothing]},
            },
            "hosts": {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {"anyOf": [host, nothing]},
            },
            "groups": {
                "type": "object",
                "additionalProperties": {"type": "array", "items": {"type": "string"}},
            },
            "routers": {"type": "object", "additionalProperties": {"anyOf": [router, nothing]}},
        },
        "$defs": {**definitions, "Service": service},
    }
