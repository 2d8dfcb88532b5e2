"""What SHOULD run: the typed inventory.

Every model forbids unknown keys and is frozen. Durations are seconds (float); YAML may say ``90``, ``"90s"``,
``"15m"`` or ``"1h30m"``.
"""

from __future__ import annotations

import ipaddress
import math
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

__all__ = [
    "GPU",
    "SSH",
    "ArgValue",
    "Duration",
    "Health",
    "Host",
    "Inventory",
    "Limits",
    "Restart",
    "RuntimeSpec",
    "Service",
    "Speculative",
    "Target",
    "parse_duration",
]

_DURATION = re.compile(
    r"(?=.)(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?|(\d+(?:\.\d+)?)", re.ASCII
)
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
        default=None, gt=0, description="per GPU, in GB; for people; not compared"
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
    speculative: Speculative | None = Field(default=None, description="left out: no speculation")
    args: dict[str, ArgValue] = Field(
        default_factory=dict, description="further launch flags, without the dashes"
    )
    environment: dict[str, str] = Field(default_factory=dict, description="variables of the process")
    user: str | None = Field(default=None, description="user the engine runs as; left out: root")
    kill_mode: Literal["mixed", "control-group"] = Field(default="mixed", description="KillMode")
    limits: Limits = Field(default_factory=Limits)
    restart: Restart = Field(default_factory=Restart)
    health: Health = Field(default_factory=Health)


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


class Host(_Model):
    """A machine. ``address`` left out: the name is resolved by the user's ssh_config or DNS."""

    name: str = ""
    description: str = Field(default="", description="for people")
    address: str | None = Field(
        default=None, description="name or IP address; left out: as ssh_config or DNS says"
    )
    ssh: SSH = Field(default_factory=SSH)
    gpu: GPU | None = Field(default=None, description="left out: not checked")
    deploy_root: RemotePath = Field(default="/opt/ddtree-ops", description="where releases go")
    http: Literal["tunnel", "direct"] = Field(
        default="tunnel", description="how the engine's HTTP is reached"
    )
    services: dict[str, Service] = Field(
        default_factory=dict, description="with this host's overrides merged in"
    )


class Inventory(_Model):
    """A loaded inventory file: everything resolved, defaults and overrides merged."""

    path: str = ""
    hosts: dict[str, Host]
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    runtimes: dict[str, RuntimeSpec] = Field(default_factory=dict)


class Target(_Model):
    """One service on one host: the unit of every command."""

    host: Host
    service: Service
    runtime: RuntimeSpec

    @property
    def name(self) -> str:
        """``host`` or, where a host has several services, ``host/service``."""
        return self.host.name if len(self.host.services) == 1 else f"{self.host.name}/{self.service.name}"
