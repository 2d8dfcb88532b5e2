"""Sessions over SSH: Fabric connections whose host keys are checked strictly.

Fabric 3.2 accepts every host key and loads no known_hosts. Here a key is accepted only where known_hosts (the
user's and the system's, what ssh_config names, or the one file of the inventory) holds it for this host, or where
it has the fingerprint pinned in the inventory; jump hosts are checked as strictly. Nothing is ever recorded.
A jump host is connected once for all hosts behind it (:mod:`ddtree_ops.remote.bastion`).
"""

from __future__ import annotations

import errno
import math
import random
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_ops.errors import AuthError, ConfigError, HostKeyError, OpsError, RemoteError, UnreachableError
from ddtree_ops.remote.bastion import Gate, Lease, Pool, Tunnel
from ddtree_ops.remote.protocol import PIECE, agent_source, bootstrap
from ddtree_ops.remote.session import Session

if TYPE_CHECKING:
    from fabric import Connection
    from paramiko import Channel, PKey, SSHClient, Transport

__all__ = ["ConnectSpec", "connect", "expand_includes", "remote_command"]

WINDOW = 16 << 20
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
KEEPALIVE = 15
ATTEMPTS = 6
_SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_PYTHON = re.compile(r"[A-Za-z0-9_./+][A-Za-z0-9_./+-]*")


@dataclass(frozen=True)
class ConnectSpec:
    """How to reach a host. What is left out comes from the user's ssh_config, agent and known_hosts.

    :param name: name in the inventory, used in errors; also looked up in ssh_config.
    :param address: host name or IP address to connect to, instead of what ssh_config says for ``name``.
    :param identity_file: private key on this machine; ``~`` is expanded.
    :param known_hosts: the one known_hosts file to trust.
    :param config: ssh_config file instead of the user's and the system's.
    :param fingerprint: pinned host key (``SHA256:...`` as ``ssh-keygen -l`` prints it): exactly this key is accepted.
    :param proxy_jump: ``[user@]host[:port]``, several separated by commas, or ``none``.
    :param connect_timeout: seconds, for each of: TCP connection, SSH banner, authentication.
    :param python: Python >= 3.8 on the host.
    """

    name: str
    address: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    known_hosts: str | None = None
    config: str | None = None
    fingerprint: str | None = None
    proxy_jump: str | None = None
    connect_timeout: float = 10.0
    python: str = "python3"

    def __post_init__(self) -> None:
        if not _PYTHON.fullmatch(self.python):
            raise ConfigError(f"ssh.python: {self.python!r} is not a plain path", host=self.name)


def remote_command(python: str, *, sudo: bool) -> str:
    """The one shell command ever sent: starts the interpreter that reads the agent. Understood by sh, csh and fish."""
    words = ["exec", "env", "LC_ALL=C", *(["sudo", "-n", "-H", "--"] if sudo else []), *bootstrap(python)]
    return " ".join(word if re.fullmatch(r"[\w./=+-]+", word) else shlex.quote(word) for word in words)


# --------------------------------------------------------------------------------------------- ssh_config


def expand_includes(path: Path, *, home: Path, depth: int = 0) -> Iterator[str]:
    """Lines of an ssh_config file with its ``Include`` directives replaced by what they name (paramiko has none).

    An unreadable or missing file gives no lines. Blocks opened in an included file end with it.
    """
    if depth > 16:
        raise ConfigError(f"{path}: Include nests deeper than 16")
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (FileNotFoundError, PermissionError):
        return
    block = "Host *"
    base = path.parent if path.is_relative_to("/etc/ssh") else home / ".ssh"
    for line in lines:
        words = line.strip().replace("=", " ", 1).split(None, 1)
        keyword = words[0].lower() if words else ""
        if keyword in ("host", "match"):
            block = line.strip()
        if keyword != "include" or len(words) < 2:
            yield line
            continue
        for pattern in shlex.split(words[1]):
            full = pattern if not pattern.startswith("~/") else f"{home}/{pattern[2:]}"
            root, relative = (Path("/"), full[1:]) if full.startswith("/") else (base, full)
            for found in sorted(root.glob(relative)):
                yield from expand_includes(found, home=home, depth=depth + 1)
                yield block


def _ssh_config(spec: ConnectSpec) -> Any:
    from paramiko import SSHConfig
    from paramiko.ssh_exception import ConfigParseError

    home = Path.home()
    if spec.config is not None:
        chosen = Path(spec.config).expanduser()
        if not chosen.is_file():
            raise ConfigError(f"ssh.config: {chosen} does not exist", host=spec.name)
        paths = [chosen]
    else:
        paths = [home / ".ssh/config", Path("/etc/ssh/ssh_config")]
    config = SSHConfig()
    for path in paths:
        try:
            config.parse(expand_includes(path, home=home))
        except (ConfigParseError, ValueError) as error:
            raise ConfigError(f"{path}: {error}", host=spec.name) from error
    return config


# ---------------------------------------------------------------------------------------------- host keys


@dataclass(frozen=True)
class _Trust:
    """Which keys a host may show: those recorded under its names, or the one with a fingerprint."""

    label: str
    names: tuple[str, ...]
    files: tuple[Path, ...]
    fingerprint: str | None

    def recorded(self) -> tuple[list[PKey], list[PKey], list[str]]:
        """Keys recorded for the host, keys revoked for any host, and where the former stand (``file:line``)."""
        from paramiko.hostkeys import HostKeys

        keys: list[PKey] = []
        revoked: list[PKey] = []
        places: list[str] = []
        for path in self.files:
            try:
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            except (FileNotFoundError, PermissionError, NotADirectoryError):
                continue
            for number, line in enumerate(lines, 1):
                marker, _, rest = line.strip().partition(" ")
                if marker == "@revoked":
                    revoked += self._key(rest.strip(), path, number)
                    continue
                if not marker or marker[0] in "#@":
                    continue
                names = marker.split(",")
                if not any(
                    name == one or (one.startswith("|1|") and HostKeys.hash_host(name, one) == one)
                    for name in self.names
                    for one in names
                ):
                    continue
                found = self._key(line.strip(), path, number)
                keys += found
                places += [f"{path}:{number}"] * len(found)
        return keys, revoked, places

    def _key(self, line: str, path: Path, number: int) -> list[PKey]:
        """The key of a line that concerns us, none for a type that is not known here; a damaged line is no trust."""
        from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
        from paramiko.ssh_exception import SSHException

        try:
            entry = HostKeyEntry.from_line(line, number)
        except (InvalidHostKey, SSHException, ValueError) as error:
            raise HostKeyError(
                f"{path}:{number}: the host key recorded there cannot be read",
                host=self.label,
                phase="connect",
                state="nothing was sent to the host",
                hint=f"correct or remove line {number} of {path}, connect once with ssh and check the fingerprint",
            ) from error
        return [entry.key] if entry is not None and entry.key is not None else []

    def pinned(self, key: PKey) -> bool:
        """Whether this is the key with the pinned fingerprint."""
        return self.fingerprint is not None and key.fingerprint.rstrip("=") == self.fingerprint.rstrip("=")

    def check(self, key: PKey) -> None:
        """:raises HostKeyError: the key is not to be trusted."""
        shown = f"{key.get_name()} {key.fingerprint}"
        if self.fingerprint is not None:
            if not self.pinned(key):
                raise HostKeyError(
                    "THE HOST KEY IS NOT THE PINNED ONE: somebody may be in between, or the host was reinstalled",
                    host=self.label,
                    phase="connect",
                    state="nothing was sent to the host",
                    hint="ask who runs the host; if this key is right, change ssh.fingerprint in the inventory "
                    "(a host has one key of each type; pin the type that is shown here)",
                    details=(f"pinned: {self.fingerprint}", f"shown:  {shown}"),
                )
            return
        keys, revoked, places = self.recorded()
        if key in revoked:
            raise HostKeyError(
                "THE HOST KEY IS REVOKED in known_hosts",
                host=self.label,
                phase="connect",
                state="nothing was sent to the host",
                hint="do not use this host before its key was replaced",
                details=(f"shown: {shown}",),
            )
        if key in keys:
            return
        if not keys:
            raise HostKeyError(
                f"the host key is unknown: no known_hosts file holds one for {self.names[0]}",
                host=self.label,
                phase="connect",
                state="nothing was sent to the host",
                hint=f"connect once with ssh and compare the fingerprint with what the host's console shows "
                f"(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub), so that ssh adds the key to {self.files[0]}; "
                f"or pin it in the inventory: ssh.fingerprint",
                details=(f"shown: {shown}", *(f"looked in: {path}" for path in self.files)),
            )
        raise HostKeyError(
            "THE HOST KEY HAS CHANGED: somebody may be in between, or the host was reinstalled",
            host=self.label,
            phase="connect",
            state="nothing was sent to the host",
            hint=f"ask who runs the host; if the new key is right: ssh-keygen -R '{self.names[0]}', then connect once "
            f"with ssh and compare the fingerprint",
            details=(
                f"shown:    {shown}",
                *(
                    f"recorded: {known.get_name()} {known.fingerprint} ({place})"
                    for known, place in zip(keys, places, strict=True)
                ),
            ),
        )

    def policy(self) -> Any:
        """The check as a paramiko policy; the client holds no keys of its own, so this is asked every time."""
        from paramiko import MissingHostKeyPolicy

        trust = self

        class Policy(MissingHostKeyPolicy):
            def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
                trust.check(key)

        return Policy()


def _transport_factory(trust: _Trust) -> Callable[..., Transport]:
    """Paramiko transports with fast ciphers, a large window, and the recorded host key types asked for first."""
    from paramiko import Transport

    first: list[str] = []
    for key in trust.recorded()[0]:
        if trust.fingerprint is not None and not trust.pinned(key):
            continue
        name = key.get_name()
        first += ["rsa-sha2-512", "rsa-sha2-256"] if name == "ssh-rsa" else [name]

    def make(sock: Any, **options: Any) -> Transport:
        if isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport = Transport(sock, default_window_size=WINDOW, **options)
        security = transport.get_security_options()
        known = set(security.ciphers)
        security.ciphers = tuple(name for name in CIPHERS if name in known)
        types = list(security.key_types)
        preferred = [name for name in dict.fromkeys(first) if name in types]
        security.key_types = tuple(preferred + [name for name in types if name not in preferred])
        return transport

    return make


# --------------------------------------------------------------------------------------------- connections


def _identities(spec: ConnectSpec, settings: dict[str, Any]) -> list[str]:
    if spec.identity_file is not None:
        path = Path(spec.identity_file).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"ssh.identity_file: {path} does not exist",
                host=spec.name,
                hint="name an existing private key in the inventory, or leave it out to use ssh_config and the agent",
            )
        return [str(path)]
    return [path for path in settings.get("identityfile", []) if Path(path).is_file()]


def _known_hosts_files(spec: ConnectSpec, settings: dict[str, Any]) -> tuple[Path, ...]:
    if spec.known_hosts is not None:
        return (Path(spec.known_hosts).expanduser(),)
    user = (
        shlex.split(settings["userknownhostsfile"]) if "userknownhostsfile" in settings else _USER_KNOWN_HOSTS
    )
    system = (
        shlex.split(settings["globalknownhostsfile"])
        if "globalknownhostsfile" in settings
        else _SYSTEM_KNOWN_HOSTS
    )
    return tuple(Path(name).expanduser() for name in (*user, *system) if name.lower() != "none")


def _chain(spec: ConnectSpec, config: Any, depth: int = 0) -> tuple[ConnectSpec, ...]:
    """Jump hosts on the way, the nearest first; a first jump host may have some of its own in ssh_config."""
    if depth > 8:
        raise ConfigError("ProxyJump nests deeper than 8", host=spec.name)
    jump = spec.proxy_jump if spec.proxy_jump is not None else config.lookup(spec.name).get("proxyjump")
    if not jump or jump.lower() == "none":
        return ()
    hops = tuple(_hop(hop.strip(), spec) for hop in jump.split(","))
    return (*_chain(hops[0], config, depth + 1), *hops)


def _connection(spec: ConnectSpec, config: Any, gateway: Connection | None, name: str) -> Connection:
    """A connection to be opened, over the one to the last jump host where there is one.

    :param name: of the host in errors.
    """
    from fabric import Config
    from paramiko import SSHClient

    settings = config.lookup(spec.name)
    through: Any = gateway if gateway is not None else False
    jump = spec.proxy_jump if spec.proxy_jump is not None else settings.get("proxyjump")
    if gateway is None and not jump and settings.get("proxycommand", "none").lower() != "none":
        through = settings["proxycommand"]
    connection = _connection_class()(
        spec.name,
        user=spec.user,
        port=spec.port,
        gateway=through,
        forward_agent=False,
        connect_timeout=math.ceil(spec.connect_timeout),
        config=Config(ssh_config=config, lazy=True),
    )
    if spec.address is not None:
        connection.host = spec.address
    address = connection.host.lower()
    names = [settings["hostkeyalias"]] if "hostkeyalias" in settings else [address]
    if connection.port != 22 and "hostkeyalias" not in settings:
        names = [f"[{address}]:{connection.port}", address]
    trust = _Trust(name, tuple(names), _known_hosts_files(spec, settings), spec.fingerprint)
    client = SSHClient()
    client.set_missing_host_key_policy(trust.policy())
    connection.client = client
    only = settings.get("identitiesonly", "no").lower() == "yes"
    connection.connect_kwargs = {
        "key_filename": _identities(spec, settings),
        "look_for_keys": spec.identity_file is None and not only,
        "allow_agent": not only and settings.get("identityagent", "").lower() != "none",
        "compress": False,
        "banner_timeout": spec.connect_timeout,
        "auth_timeout": max(spec.connect_timeout, 10.0),
        "channel_timeout": spec.connect_timeout,
        "transport_factory": _transport_factory(trust),
    }
    return connection


@cache
def _connection_class() -> Any:
    from fabric import Connection

    class Behind(Connection):  # type: ignore[misc]
        """A connection whose way through a jump host is a :class:`Tunnel`."""

        def open_gateway(self) -> Any:
            if isinstance(self.gateway, str):
                return super().open_gateway()
            transport = self.gateway.transport
            return Tunnel(transport.open_channel("direct-tcpip", (self.host, int(self.port)), ("", 0)))

    return Behind


def _hop(text: str, spec: ConnectSpec) -> ConnectSpec:
    """``[user@]host[:port]`` of a jump host, with the trust and time-out of the host behind it."""
    match = re.fullmatch(r"(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:@]+)(?::(?P<port>\d+))?", text)
    if match is None:
        raise ConfigError(f"proxy_jump: {text!r} is not [user@]host[:port]", host=spec.name)
    return replace(
        spec,
        name=match["host"].strip("[]"),
        address=None,
        user=match["user"],
        port=int(match["port"]) if match["port"] else None,
        fingerprint=None,
        proxy_jump=None,
        python="python3",
    )


class _Dropped(UnreachableError):
    """The host took the connection and dropped it before it spoke SSH: too many at once (sshd's MaxStartups)."""


def _unreachable(error: BaseException, label: str, connection: Any) -> OpsError:
    """A failed ``open()`` as an error a person can act on."""
    from paramiko.ssh_exception import (
        AuthenticationException,
        ChannelException,
        IncompatiblePeer,
        NoValidConnectionsError,
        PasswordRequiredException,
        SSHException,
    )

    where = f"{connection.host}:{connection.port}"
    common: dict[str, Any] = {"host": label, "phase": "connect"}
    text = str(error) or type(error).__name__
    if isinstance(error, OpsError):
        return error
    if isinstance(error, PasswordRequiredException):
        return AuthError(
            "the private key is encrypted",
            hint="add it to your agent first: ssh-add KEYFILE",
            details=(text,),
            **common,
        )
    if isinstance(error, AuthenticationException) or "No authentication methods available" in text:
        return AuthError(
            f"{where} refused every key for user {connection.user}",
            hint=f"try: ssh -v {connection.user}@{connection.host} -p {connection.port} true; "
            f"set ssh.user or ssh.identity_file in the inventory, or load the key with ssh-add",
            details=(text,),
            **common,
        )
    if isinstance(error, socket.gaierror):
        return UnreachableError(
            f"the name {connection.host!r} is not known",
            hint=f"give the host an address in the inventory, or a HostName for {label} in ~/.ssh/config",
            details=(text,),
            **common,
        )
    if isinstance(error, ChannelException):
        return UnreachableError(
            f"the jump host could not connect to {where}: {text}",
            hint="check that the jump host reaches it and allows TCP forwarding",
            **common,
        )
    if isinstance(error, NoValidConnectionsError):
        causes = {cause.errno for cause in error.errors.values() if isinstance(cause, OSError)}
        if causes == {errno.ECONNREFUSED}:
            return UnreachableError(
                f"{where} refused the connection",
                hint="is sshd running there, and on this port? (ssh.port)",
                **common,
            )
        return UnreachableError(
            f"{where} cannot be reached: {text}", hint="check the network and the address", **common
        )
    if isinstance(error, TimeoutError) or "timed out" in text.lower() or "timeout" in text.lower():
        return UnreachableError(
            f"no answer from {where} in time",
            hint="check the network and the address, or raise ssh.connect_timeout",
            details=(text,),
            **common,
        )
    if isinstance(error, IncompatiblePeer):
        return UnreachableError(
            f"{where} speaks no SSH algorithm that we do: {text}", hint="update sshd there", **common
        )
    if isinstance(error, EOFError | ConnectionError) or (
        isinstance(error, SSHException)
        and any(
            part in text
            for part in (
                "Error reading SSH protocol banner",
                "MaxStartups",
                "reset by peer",
                "EOF",
                "No existing session",
            )
        )
    ):
        return _Dropped(
            f"{where} dropped the connection before authentication",
            hint="too many connections at once (MaxStartups of sshd)? Run the command again in a moment",
            details=(text,),
            **common,
        )
    if isinstance(error, SSHException | OSError):
        return UnreachableError(f"{where}: {text}", hint=f"try: ssh -v {label} true", **common)
    raise error


@dataclass(frozen=True)
class _Route:
    """An open connection, and its part in the connection to the jump host before it."""

    connection: Connection
    bastion: Lease[_Route] | None

    def close(self) -> None:
        """Close the connection; the jump host's too where nobody else uses it. May be called twice."""
        self.connection.client.close()
        if self.bastion is not None:
            self.bastion.close()

    def alive(self) -> bool:
        """Whether it is open, as far as is known here."""
        transport = self.connection.transport
        return transport is not None and transport.is_active()


_gate = Gate()
_bastions: Pool[_Route] = Pool(close=_Route.close, alive=_Route.alive)


def _open_route(spec: ConnectSpec, config: Any, hops: tuple[ConnectSpec, ...], name: str) -> _Route:
    """Connect ``spec`` over ``hops``: each jump host once for all who come this way.

    :param name: of the host in errors.
    """
    bastion: Lease[_Route] | None = None
    if hops:
        try:
            bastion = _bastions.lease(
                hops, lambda: _open_with_retries(hops[-1], config, hops[:-1], hops[-1].name)
            )
        except OpsError as error:
            raise _behind(error, hops[-1], name) from error
    try:
        connection = _connection(spec, config, bastion.value.connection if bastion else None, name)
        with _gate.passing(connection.host):
            try:
                connection.open()
            except BaseException as error:
                connection.client.close()
                if not isinstance(error, Exception):
                    raise
                raise _unreachable(error, name, connection) from (
                    None if isinstance(error, OpsError) else error
                )
        assert connection.transport is not None
        connection.transport.set_keepalive(KEEPALIVE)
        return _Route(connection, bastion)
    except BaseException:
        if bastion is not None:
            bastion.close()
        raise


def _behind(error: OpsError, hop: ConnectSpec, name: str) -> OpsError:
    """A jump host's failure as that of a host behind it; each such host gets an error of its own."""
    made = copy(error) if not isinstance(error, _Dropped) else UnreachableError(error.message)
    made.__dict__.update(error.__dict__, host=name)
    if not made.message.startswith("jump host "):
        made.message = f"jump host {hop.name}: {made.message}"
    return made


def _open_with_retries(spec: ConnectSpec, config: Any, hops: tuple[ConnectSpec, ...], name: str) -> _Route:
    try:
        return _open_route(spec, config, hops, name)
    except _Dropped:
        from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

        time.sleep(random.uniform(0.1, 0.4))
        retrying = Retrying(
            retry=retry_if_exception_type(_Dropped),
            stop=stop_after_attempt(ATTEMPTS - 1),
            wait=wait_random_exponential(multiplier=0.4, max=4.0),
            reraise=True,
        )
        return retrying(_open_route, spec, config, hops, name)


class ChannelTransport:
    """A channel of an SSH connection, in which the agent runs."""

    def __init__(self, route: _Route, command: str, *, timeout: float) -> None:
        self._route = route
        transport = route.connection.transport
        assert transport is not None
        self._channel: Channel = transport.open_session(window_size=WINDOW, timeout=timeout)
        self._channel.settimeout(None)
        self._stderr = bytearray()
        self._channel.exec_command(command)
        self._drain = threading.Thread(target=self._read_stderr, name="ssh-stderr", daemon=True)
        self._drain.start()

    def _read_stderr(self) -> None:
        while piece := self._channel.recv_stderr(PIECE):
            self._stderr += piece
            del self._stderr[:-16384]

    def send(self, data: bytes) -> None:
        from paramiko.ssh_exception import SSHException

        try:
            self._channel.sendall(data)
        except (EOFError, SSHException) as error:
            raise ConnectionError(str(error) or "it ended while something was sent") from error

    def recv(self) -> bytes:
        return self._channel.recv(PIECE)

    def close(self) -> None:
        if not self._channel.closed:
            try:
                self._channel.shutdown_write()
            except (OSError, EOFError):
                self.abort()
                return
            self._channel.status_event.wait(3.0)
        self.abort()

    def abort(self) -> None:
        self._route.close()

    def release(self) -> None:
        self._drain.join(1.0)

    def diagnostics(self) -> str:
        self._drain.join(0.2 if self._channel.closed or self._channel.eof_received else 0.0)
        return self._stderr[-4000:].decode("utf-8", "replace").strip()

    def status(self) -> int | None:
        if not self._channel.status_event.wait(0.5):
            return None
        return None if self._channel.exit_status < 0 else self._channel.exit_status


def connect(host: ConnectSpec) -> Session:
    """A session with an agent on a host, over SSH, as root (``sudo -n`` where the user is another one).

    :raises HostKeyError: the key is unknown, changed, revoked or not the pinned one; nothing was sent.
    :raises AuthError: the host refused every key. :raises UnreachableError: refused, timed out, name not known.
    :raises SudoError: ``sudo -n`` was refused. :raises RemoteError: no usable Python.
    :raises ConfigError: ssh_config or a named file is wrong.
    """
    import logging

    from paramiko.ssh_exception import SSHException

    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    config = _ssh_config(host)
    route = _open_with_retries(host, config, _chain(host, config), host.name)
    try:
        command = remote_command(host.python, sudo=route.connection.user != "root")
        try:
            transport = ChannelTransport(route, command, timeout=max(host.connect_timeout, 10.0))
        except (SSHException, OSError, EOFError) as error:
            raise RemoteError(
                f"the host opened no channel for a command: {str(error) or type(error).__name__}",
                host=host.name,
                phase="connect",
                hint="is this user allowed to run commands there (shell, ForceCommand, MaxSessions)?",
            ) from error
        return Session(
            transport,
            host=host.name,
            start=agent_source(),
            deadline=max(30.0, host.connect_timeout),
            python=host.python,
        )
    except BaseException:
        route.close()
        raise
