"""What SHOULD run: the typed inventory.

Every model forbids unknown keys and is frozen. Durations are seconds (float); YAML may say ``90``, ``"90s"``,
``"15m"`` or ``"1h30m"``.
"""

from __future__ import annotations

import ipaddress
import math
import re
import shlex
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from ddtree_ops.errors import ConfigError

__all__ = [
    "ENGINE_SECRETS",
    "GPU",
    "SSH",
    "ArgValue",
    "Duration",
    "Health",
    "Host",
    "Inventory",
    "Limits",
    "Lint",
    "Node",
    "Nodes",
    "Restart",
    "Rollback",
    "Router",
    "RouterHealth",
    "RuntimeSpec",
    "SecretSource",
    "Service",
    "Speculative",
    "Target",
    "parse_duration",
]

_DURATION = re.compile(
    r"(?=.)(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?|(\d+(?:\.\d+)?)", re.ASCII
)
ENGINE_SECRETS = {"api_key": "api-key", "admin_api_key": "admin-api-key"}
"""Secrets that the engine takes as settings: name in the inventory -> launch flag."""
_UNIT_NAME = re.compile(r"[A-Za-z0-9:_.@-]{1,240}\.service")


def parse_duration(value: Any) -> float:
    """Seconds from ``90``, ``"90s"``, ``"15m"``, ``"1h30m"``.

    :raises ValueError: for anything else, or a negative duration.
    """
    if isinstance(value, bool):
        raise ValueError("a duration is a number of seconds or a text such as 90s, 15m, 1h30m")
    if isinstance(value, int | float) and 0 <= value < math.inf:
        return float(value)
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip().lower().replace(" ", ""))
        if match:
            hours, minutes, seconds, plain = (float(part) if part else 0.0 for part in match.groups())
            return hours * 3600 + minutes * 60 + seconds + plain
    raise ValueError(f"{value!r} is not a duration: write seconds or a text such as 90s, 15m, 1h30m")


def _absolute(value: str) -> str:
    if not PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts or "\0" in value:
        raise ValueError(f"{value!r} is not an absolute path on the host")
    return value


def _unit_name(value: str) -> str:
    if not _UNIT_NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a systemd service name such as sglang-k26-ddtree.service")
    return value


def _not_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a whole number, found the boolean {str(value).lower()}")
    return value


Int = Annotated[int, BeforeValidator(_not_boolean)]
"""A whole number; pydantic alone would take ``true`` for 1."""


def _ip_address(value: str) -> str:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise ValueError(f"{value!r} is not an IP address such as 127.0.0.1 or 0.0.0.0") from None
    return value


def _driver_version(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


DriverVersion = Annotated[str, BeforeValidator(_driver_version), Field(pattern=r"^\d+(\.\d+)*$")]
IPAddress = Annotated[str, AfterValidator(_ip_address)]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": r"^[\d.hms ]+$"}]}
    ),
]
RemotePath = Annotated[str, AfterValidator(_absolute)]
UnitName = Annotated[str, AfterValidator(_unit_name)]
ArgValue = bool | int | float | str | list[int | float | str] | None
"""Value of a launch argument: ``true`` is a bare flag, ``false``/``null`` leaves it out, a list is repeated words."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class SSH(_Model):
    """How to reach a host. What is left out comes from the user's ssh_config, agent and known_hosts."""

    user: str | None = Field(default=None, description="login name; another one than root uses sudo -n")
    port: Int | None = Field(default=None, ge=1, le=65535, description="port of sshd")
    identity_file: str | None = Field(default=None, description="private key on this machine; ~ is expanded")
    known_hosts: str | None = Field(default=None, description="known_hosts file instead of the user's own")
    config: str | None = Field(default=None, description="ssh_config file instead of the user's own")
    fingerprint: str | None = Field(
        default=None,
        pattern=r"^SHA256:[A-Za-z0-9+/]{43}=?$",
        description="pinned host key, as ssh-keygen -l prints it",
    )
    proxy_jump: str | None = Field(default=None, description="[user@]host[:port] of a bastion")
    connect_timeout: Duration = Field(
        default=10.0, description="for each of: TCP connection, SSH banner, authentication"
    )
    python: str = Field(
        default="python3", pattern=r"^[A-Za-z0-9_./+-]+$", description="Python >= 3.8 on the host"
    )


class GPU(_Model):
    """What the host must have; compared with ``nvidia-smi``."""

    name: str = Field(description="for people; not compared")
    count: Int = Field(ge=1, description="number of GPUs")
    arch: str = Field(pattern=r"^sm\d{2,3}[af]?$", description="sm120, sm103 ...")
    interconnect: Literal["pcie", "nvlink"] = Field(default="pcie", description="for people; not compared")
    memory_gb: float | None = Field(
        default=None,
        gt=0,
        description="per GPU, in GB as the maker counts; at least nine tenths must be there",
    )
    driver: DriverVersion | None = Field(
        default=None, description="least version of the driver, such as 580.65.06"
    )


class Speculative(_Model):
    """Speculative decoding. Tree verification sends ``budget + 1`` tokens a request."""

    algorithm: str = Field(default="DDTREE", description="as sglang writes it: DDTREE, DFLASH ...")
    block_size: Int = Field(default=8, ge=2, description="tokens the drafter proposes a step, root included")
    budget: Int | None = Field(default=None, ge=1, description="tree nodes, root not included (DDTREE)")
    topk_cap: Int | None = Field(
        default=None, ge=1, description="candidates of the drafter a position (DDTREE)"
    )
    budget_schedule: Literal["fixed", "adaptive"] | None = Field(
        default=None, description="how the tree grows (DDTREE)"
    )

    @property
    def tree_settings(self) -> tuple[str, ...]:
        """Those that are set of the settings that only DDTREE takes."""
        return tuple(
            name for name in ("budget", "topk_cap", "budget_schedule") if getattr(self, name) is not None
        )


class Limits(_Model):
    """Resource limits of the unit."""

    memlock: Int | Literal["infinity"] = Field(default="infinity", description="LimitMEMLOCK, bytes")
    nofile: Int | Literal["infinity"] = Field(default=1048576, description="LimitNOFILE, open files")
    tasks: Int | Literal["infinity"] = Field(default="infinity", description="TasksMax, threads")


class Restart(_Model):
    """Restart policy. ``interval`` must exceed ``burst x (delay + time to crash)``; left out, it is computed."""

    policy: Literal["no", "on-failure", "always"] = Field(default="on-failure", description="Restart")
    delay: Duration = Field(default=10.0, description="RestartSec")
    burst: Int = Field(default=3, ge=1, description="StartLimitBurst: starts within the interval")
    interval: Duration | None = Field(default=None, description="StartLimitIntervalSec")


class Health(_Model):
    """What healthy means, in seconds and tokens."""

    load_timeout: Duration = Field(
        default=2700.0, description="longest load accepted, however much progress it makes"
    )
    stall_timeout: Duration = Field(default=600.0, description="longest silence: no phase, shard, log line")
    stop_timeout: Duration = Field(
        default=120.0, description="TimeoutStopSec: a drain may never end in 0.5.11"
    )
    window: Duration = Field(default=10.0, description="how long the unit is held after the completion")
    prompt: str = Field(default="quicksort", description="named prompt of the smoke check, or free text")
    max_tokens: Int = Field(default=128, ge=1, description="tokens the smoke check asks for")
    request_timeout: Duration = Field(default=90.0, description="longest wait for an answer of the engine")
    min_accept_length: float | None = Field(
        default=None, ge=1.0, description="least tokens a verify step, the verified one included"
    )
    judge_text: bool = Field(
        default=True,
        description="whether answers are judged as text; false: a tiny model that talks nonsense",
    )
    judge_speculation: bool = Field(
        default=True,
        description="whether speculation that gains too little fails the smoke check; false: it is only measured",
    )


class SecretSource(_Model):
    """Where a secret is taken from, on this machine: exactly one of the three."""

    env: str | None = Field(default=None, description="variable of this machine's environment")
    file: str | None = Field(
        default=None, description="file on this machine; ~ is expanded, relative to the inventory file"
    )
    command: list[str] | None = Field(
        default=None, description="command on this machine that prints it, as a list of words: no shell, 30 s"
    )

    @property
    def given(self) -> tuple[str, ...]:
        """Which of the three are given."""
        return tuple(kind for kind in ("env", "file", "command") if getattr(self, kind))

    def __str__(self) -> str:
        words = [*((f"env {self.env}",) if self.env else ()), *((f"file {self.file}",) if self.file else ())]
        return ", ".join([*words, *((f"command {shlex.join(self.command)}",) if self.command else ())])


class Nodes(_Model):
    """One engine over several hosts: sglang's own distribution, started and judged together."""

    hosts: tuple[str, ...] = Field(
        min_length=1, description="hosts in the order of their ranks, the head first"
    )
    port: Int = Field(
        default=20000, ge=1, le=65535, description="port at the head where the nodes meet (--dist-init-addr)"
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        description="the head's address among the nodes; left out: its cluster_address, or its address",
    )


class Lint(_Model):
    """Exceptions from ``ddtree-ops lint``."""

    ignore: dict[str, Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict,
        description="rule to put up with here -> why; its findings are shown as information",
    )


class Baseline(_Model):
    """The same model without speculation, by which the check ``lossless`` judges."""

    service: str = Field(min_length=1, description="name under services: the same model, no speculative")
    host: str | None = Field(
        default=None, min_length=1, description="host that has it; left out: the same host"
    )


class Rollback(_Model):
    """The lock of a deployment, and when its host goes back without it."""

    lease: Duration = Field(
        default=60.0, ge=2.0, description="how long the lock outlives the last sign of life of its client"
    )
    grace: Duration = Field(
        default=60.0,
        description="how long the host then waits for another deploy before it goes back by itself",
    )


class Service(_Model):
    """One serving configuration bound to a systemd unit."""

    name: str = ""
    description: str = Field(default="", description="for people; Description of the unit")
    unit: UnitName = Field(description="systemd unit, such as sglang-k26-ddtree.service")
    runtime: str = Field(description="name under runtimes:")
    venv: RemotePath = Field(description="virtual environment with torch and the compiled kernels")
    model: RemotePath = Field(description="model folder on the host")
    drafter: RemotePath | None = Field(default=None, description="draft model folder on the host")
    served_name: str | None = Field(
        default=None, description="--served-model-name; the smoke check insists on it"
    )
    bind: IPAddress = Field(default="127.0.0.1", description="IP address the engine listens on")
    port: Int = Field(default=30001, ge=1, le=65535, description="port the engine listens on")
    tensor_parallel: Int = Field(default=1, ge=1, description="number of GPUs one model is spread over")
    nodes: Nodes | None = Field(
        default=None,
        description="several hosts that run one engine together; left out: one host runs it alone",
    )
    speculative: Speculative | None = Field(default=None, description="left out: no speculation")
    args: dict[str, ArgValue] = Field(
        default_factory=dict, description="further launch flags, without the dashes"
    )
    environment: dict[str, str] = Field(default_factory=dict, description="variables of the process")
    secrets: dict[str, SecretSource] = Field(
        default_factory=dict, description="api_key, admin_api_key, or variables of the process in CAPITALS"
    )
    user: str | None = Field(default=None, description="user the engine runs as; left out: root")
    kill_mode: Literal["mixed", "control-group"] = Field(default="mixed", description="KillMode")
    limits: Limits = Field(default_factory=Limits)
    restart: Restart = Field(default_factory=Restart)
    health: Health = Field(default_factory=Health)
    rollback: Rollback = Field(default_factory=Rollback)
    baseline: Baseline | None = Field(
        default=None, description="service to compare answers with; left out: a recorded file, or none"
    )
    lint: Lint = Field(default_factory=Lint)


FlagName = Annotated[str, Field(pattern=r"^[a-z0-9]+(-+[a-z0-9]+)*$")]
TreeFlag = Annotated[str, Field(pattern=r"^speculative-ddtree-(budget|topk-cap|budget-schedule)$")]


class RuntimeSpec(_Model):
    """Which runtime: a description (base wheel + patch series) and, if wished, another base or fewer patches."""

    name: str = ""
    description: str = Field(
        default="sglang-0.5.11", description="directory under patches/, or a path to one"
    )
    python: str = Field(
        default="cp312", pattern=r"^cp3\d+$", description="Python tag of the venv on the host"
    )
    base: str | None = Field(
        default=None, description="a wheel or source tree of your own instead of the pinned wheel"
    )
    patches: list[str] | None = Field(
        default=None, description="left out: the whole series; []: the base as it is"
    )
    overlay: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: the DDTREE of this project is put in, unless the base has one; none: it is left out",
    )
    dialect: dict[TreeFlag, FlagName] = Field(
        default_factory=dict,
        description="what a base of your own calls the flags of a tree: our name -> its name, without dashes",
    )
    plugin_flags: dict[FlagName, list[str]] = Field(
        default_factory=dict,
        description="flags and choices that an sglang plugin in the venv adds and the runtime's own source does not "
        "show: flag name without dashes -> further choices, [] for any value",
    )


class Host(_Model):
    """A machine. ``address`` left out: the name is resolved by the user's ssh_config or DNS."""

    name: str = ""
    description: str = Field(default="", description="for people")
    address: str | None = Field(
        default=None, description="name or IP address; left out: as ssh_config or DNS says"
    )
    cluster_address: str | None = Field(
        default=None,
        min_length=1,
        description="name or IP address by which the other hosts reach it; left out: address",
    )
    ssh: SSH = Field(default_factory=SSH)
    gpu: GPU | None = Field(default=None, description="left out: not checked")
    deploy_root: RemotePath = Field(default="/opt/ddtree-ops", description="where releases go")
    keep_releases: Int = Field(
        default=5, ge=1, description="releases that passed to be kept for each service after a deploy"
    )
    http: Literal["tunnel", "direct"] = Field(
        default="tunnel", description="how the engine's HTTP is reached"
    )
    services: dict[str, Service] = Field(
        default_factory=dict, description="with this host's overrides merged in"
    )


class RouterHealth(_Model):
    """What a healthy router means, in seconds."""

    timeout: Duration = Field(default=90.0, description="longest wait until every worker is healthy")
    interval: Duration = Field(default=10.0, description="time between two looks of the router at a worker")
    window: Duration = Field(
        default=35.0,
        description="how long unit and workers are held after the completion: three failed looks make a worker unhealthy",
    )
    request_timeout: Duration = Field(default=90.0, description="longest wait for an answer")
    stop_timeout: Duration = Field(default=60.0, description="TimeoutStopSec")


class Router(_Model):
    """The upstream sglang-router in front of the hosts of a service, as a systemd unit."""

    name: str = ""
    description: str = Field(default="", description="for people; Description of the unit")
    host: str = Field(description="host it runs on")
    unit: UnitName = Field(default="sglang-router.service", description="systemd unit")
    venv: RemotePath = Field(description="virtual environment with sglang-router")
    service: str = Field(description="the service it stands in front of")
    hosts: tuple[str, ...] = Field(
        default=("all",),
        min_length=1,
        description="hosts, groups or globs; left out: every host of the service",
    )
    bind: IPAddress = Field(default="127.0.0.1", description="IP address it listens on")
    port: Int = Field(default=30000, ge=1, le=65535, description="port it listens on")
    metrics_port: Int = Field(
        default=29000, ge=1, le=65535, description="port of its metrics, on the loopback address"
    )
    policy: str = Field(default="cache_aware", description="how it chooses a worker; its own list is asked")
    args: dict[str, ArgValue] = Field(
        default_factory=dict, description="further flags of the router, without the dashes"
    )
    environment: dict[str, str] = Field(default_factory=dict, description="variables of the process")
    user: str | None = Field(default=None, description="user it runs as; left out: root")
    restart: Restart = Field(default_factory=Restart)
    health: RouterHealth = Field(default_factory=RouterHealth)


class Inventory(_Model):
    """A loaded inventory file: everything resolved, defaults and overrides merged."""

    path: str = ""
    hosts: dict[str, Host]
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    runtimes: dict[str, RuntimeSpec] = Field(default_factory=dict)
    routers: dict[str, Router] = Field(default_factory=dict)


class Node(_Model):
    """Where a target stands in a service that runs over several hosts.

    :param rank: 0 is the head; only the head answers requests.
    :param count: number of nodes.
    :param head: ``address:port`` at which the nodes meet.
    :param hosts: names of all nodes, by rank.
    """

    rank: int
    count: int
    head: str
    hosts: tuple[str, ...]

    @property
    def is_head(self) -> bool:
        """Rank 0: it serves the HTTP API."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"node {self.rank} of {self.count}"


class Target(_Model):
    """One service on one host: the unit of every command."""

    host: Host
    service: Service
    runtime: RuntimeSpec

    @property
    def name(self) -> str:
        """``host`` or, where a host has several services, ``host/service``."""
        return self.host.name if len(self.host.services) == 1 else f"{self.host.name}/{self.service.name}"

    @property
    def node(self) -> Node | None:
        """Its place among the nodes of the service; None where one host runs the engine alone.

        :raises ConfigError: the service names nodes and this host is none of them.
        """
        nodes = self.service.nodes
        if nodes is None:
            return None
        if self.host.name not in nodes.hosts or nodes.address is None:
            raise ConfigError(
                f"{self.host.name} is no node of {self.service.name}: {', '.join(nodes.hosts)}",
                hint="nodes.hosts names every host of the service, the head first",
            )
        address = f"[{nodes.address}]" if ":" in nodes.address else nodes.address
        return Node(
            rank=nodes.hosts.index(self.host.name),
            count=len(nodes.hosts),
            head=f"{address}:{nodes.port}",
            hosts=nodes.hosts,
        )

    @property
    def local_gpus(self) -> int:
        """Number of GPUs that the service takes on this host: its share of ``tensor_parallel``."""
        return self.service.tensor_parallel // (len(self.service.nodes.hosts) if self.service.nodes else 1)
