"""Inventory files: finding, merging, checking.

File shape (``schema: 1``)::

    defaults:  {host: {...}, service: {...}}    merged under every host and service
    runtimes:  {NAME: {...RuntimeSpec}}
    services:  {NAME: {...Service}}
    hosts:     {NAME: {...Host, services: [NAME, ...] or {NAME: {...overrides}}}}
    groups:    {NAME: [HOST or GROUP, ...]}
    x-...:     anything; a place for anchors

A service on a host is ``defaults.service``, then the service, then the host's overrides, merged as RFC 7396 says:
mappings merge key by key, lists and scalars replace, ``null`` takes away what was inherited. Paths of this machine
(``ssh.identity_file``, ``ssh.known_hosts``, ``ssh.config``, ``runtimes.*.base``) may begin with ``~`` and are relative
to the inventory file; host paths are absolute.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.models import Host, Inventory, RuntimeSpec, Service
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
from ddtree_ops.paths import config_dir, shipped

__all__ = ["Name", "find_file", "inventory_schema", "load_inventory", "merge", "resolve", "service_problems"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ARG = re.compile(r"[a-z0-9]+(?:-+[a-z0-9]+)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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
}
"""Launch flags that a field of the service writes."""
_BLOCK_FLAGS = ("speculative-num-draft-tokens", "speculative-dflash-block-size")
_BLOCK_DRAFTERS = ("DFLASH", "DDTREE")
_CHAIN_BACKENDS = ("flashinfer_mla", "trtllm_mha", "trtllm_mla", "flashmla", "cutlass_mla", "nsa")
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONPYCACHEPREFIX")
_LOCAL_PATHS = ("identity_file", "known_hosts", "config")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a name: letters, digits, '.', '_' and '-' only")
    return str(value)


Name = Annotated[str, AfterValidator(_name)]
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
    runtimes: dict[Name, _Entry] = Field(default_factory=dict)
    services: dict[Name, _Entry] = Field(default_factory=dict)
    hosts: dict[Name, _Entry] = Field(min_length=1)
    groups: dict[Name, list[str]] = Field(default_factory=dict)


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
    try:
        folders.append(shipped(kind))
    except FileNotFoundError:
        pass
    unique = list({folder.resolve(): folder for folder in reversed(folders)}.values())[::-1]
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
    if not name_or_path and variable:
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

    def walk(value: Any, path: KeyPath) -> None:
        for layer in reversed(layers):
            if (*layer, *path) in document.marks:
                marks[path] = document.marks[(*layer, *path)]
                break
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, item in items:
            walk(item, (*path, key))

    walk(data, ())
    marks[()] = document.mark(main)
    return Document(document.source, data, marks, document.problems)


# ---------------------------------------------------------------------------------------------------------------------
# Checking


def service_problems(service: Service) -> list[tuple[KeyPath, str]]:
    """What is wrong with a service whose fields are each valid: ``(key path, problem)``. Pure."""
    found: list[tuple[KeyPath, str]] = []
    speculative = service.speculative
    algorithm = speculative.algorithm if speculative else ""
    if speculative:
        where: KeyPath = ("speculative",)
        if algorithm != algorithm.upper():
            found.append(((*where, "algorithm"), f"write it as sglang does: {algorithm.upper()}"))
        if algorithm.upper() in _BLOCK_DRAFTERS and service.drafter is None:
            found.append(
                (where, f"{algorithm} needs a drafter: set drafter to the draft model's path on the host")
            )
        if algorithm.upper() == "DDTREE":
            if speculative.budget is None:
                found.append((where, "DDTREE needs a budget: set speculative.budget"))
            elif speculative.budget < speculative.block_size - 1:
                found.append(
                    (
                        (*where, "budget"),
                        f"{speculative.budget} is less than block_size - 1 = {speculative.block_size - 1}: "
                        "the tree could not hold one whole draft",
                    )
                )
            backend = service.args.get("attention-backend")
            if backend in _CHAIN_BACKENDS:
                found.append(
                    (
                        ("args", "attention-backend"),
                        f"{backend} ignores the tree mask and would verify the tree as a chain, silently: use triton",
                    )
                )
            if service.args.get("page-size", 1) not in (1, "1", False):
                found.append((("args", "page-size"), "DDTREE works with page size 1 only"))
        else:
            for name in ("budget", "topk_cap", "budget_schedule"):
                if getattr(speculative, name) is not None:
                    found.append(((*where, name), f"only DDTREE takes it, the algorithm is {algorithm}"))
    for key in service.args:
        problem = _argument_problem(key, algorithm.upper())
        if problem:
            found.append((("args", key), problem))
    for key in service.environment:
        if not _VARIABLE.fullmatch(key):
            found.append((("environment", key), "is not the name of an environment variable"))
        elif key in _OWN_VARIABLES:
            found.append(
                (("environment", key), "is set by the deployment: it makes the release shadow the venv")
            )
    restart = service.restart
    if restart.interval is not None and restart.interval <= restart.burst * restart.delay:
        found.append(
            (
                ("restart", "interval"),
                f"{restart.interval:g} s must exceed burst x delay = {restart.burst} x {restart.delay:g} s, or a crash "
                "loop never ends: leave it out to have it computed",
            )
        )
    return found


def _argument_problem(key: str, algorithm: str) -> str:
    plain = key.strip("-").replace("_", "-").lower()
    if not _ARG.fullmatch(key):
        if _ARG.fullmatch(plain):
            return f"write the flag without leading dashes, in lower case, with dashes inside: {plain}"
        return "is not the name of a launch flag"
    field_name = _FIELDS.get(key)
    if key in _BLOCK_FLAGS and algorithm in _BLOCK_DRAFTERS:
        field_name = "speculative.block_size"
    return f"use the field {field_name} of the service instead" if field_name else ""


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
    services: dict[str, Service] = field(default_factory=dict)

    def report(self, path: KeyPath, text: str) -> None:
        self.problems.append(self.document.problem(path, text))

    def entries(self, section: str) -> dict[str, Any]:
        value = self.document.get((section,))
        return value if isinstance(value, dict) else {}

    def named(self, path: KeyPath) -> bool:
        """Refuse ``name:`` inside an entry: the key above is the name."""
        if "name" in (self.document.get(path) or {}):
            self.report((*path, "name"), f"remove it: the name is the key, {path[-1]}")
            return True
        return False

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
        return service

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
            service = self.service(name, override) if override else self.services.get(name)
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
        groups, hosts = self.entries("groups"), list(self.entries("hosts"))
        for kind in ("hosts", "groups"):
            if "all" in self.entries(kind):
                self.report((kind, "all"), "'all' stands for every host: choose another name")
        for name, members in groups.items():
            if name in hosts:
                self.report(("groups", name), f"'{name}' is a host already: choose another name")
            if not members:
                self.report(("groups", name), "is empty")
            for index, member in enumerate(members):
                if member not in hosts and member not in groups:
                    self.report(
                        ("groups", name, index),
                        f"there is no host or group '{member}'" + suggestion(member, [*hosts, *groups]),
                    )

        def expand(name: str, chain: tuple[str, ...]) -> set[str]:
            if name in hosts:
                return {name}
            if name in chain:
                if name == chain[0]:
                    self.report(("groups", name), f"the group holds itself: {' -> '.join((*chain, name))}")
                return set()
            return {host for member in groups.get(name, ()) for host in expand(member, (*chain, name))}

        return {name: tuple(host for host in hosts if host in expand(name, ())) for name in groups}

    def run(self) -> Inventory | None:
        document = self.document
        outer = {
            key: value
            for key, value in (document.data.items() if isinstance(document.data, dict) else ())
            if not key.startswith("x-")
        }
        data = outer if isinstance(document.data, dict) else document.data
        shape, problems = check(document, _File, data=data)
        self.problems += problems
        if shape is None or document.problems:
            return None
        if "services" in (document.get(("defaults", "host")) or {}):
            self.report(("defaults", "host", "services"), "services are given host by host")
        self.resolve_runtimes()
        for layer, model in (("host", Host), ("service", Service)):
            path: KeyPath = ("defaults", layer)
            if not self.named(path):
                self.problems += check(document, model, path, partial=True, hidden=("name",))[1]
        for name in self.entries("services"):
            self.named(("services", name))
            service = self.service(name, None)
            if service is not None:
                self.services[name] = service
        hosts = {name: self.host(name) for name in self.entries("hosts")}
        groups = self.groups()
        if self.problems:
            return None
        found = {name: host for name, host in hosts.items() if host is not None}
        return Inventory(path=document.source, hosts=found, groups=groups, runtimes=self.runtimes)


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
        [(Host, "validation"), (Service, "validation"), (RuntimeSpec, "validation")],
        ref_template="#/$defs/{model}",
    )
    definitions = combined["$defs"]
    host, service = _partial(definitions.pop("Host")), _partial(definitions.pop("Service"))
    runtime = _partial(definitions.pop("RuntimeSpec"))
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
        },
        "$defs": {**definitions, "Service": service},
    }
