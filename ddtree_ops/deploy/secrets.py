"""The secrets of services: taken from their sources on this machine, compared with a host's, handed over.

Values live in memory only, as :class:`~ddtree_ops.secret.Secret`, and every value read, here or on a host, is learned
so that whatever this process prints or stores masks it. No digest of a value is ever kept: what changed is found by
reading the host's files through the session.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.models import ENGINE_SECRETS, SecretSource, Service, Target
from ddtree_ops.remote.session import Reply, Request, Session
from ddtree_ops.secret import SHORTEST, Secret, learn, redact
from ddtree_ops.service.credentials import (
    ENGINE_FILE,
    LONGEST,
    parse_files,
    refusal,
    render_files,
    secret_files,
)
from ddtree_ops.service.layout import Layout
from ddtree_ops.wording import count

__all__ = [
    "API_KEY",
    "HostSecrets",
    "Secrets",
    "api_key_of",
    "key_on_host",
    "look_requests",
    "read_host_secrets",
    "recorded_service",
    "removal_requests",
    "resolve_secrets",
    "secret_changes",
    "seen",
    "stale_files",
    "write_requests",
]

API_KEY = ("api_key",)
"""What a command that only asks the engine needs."""
COMMAND_TIMEOUT = 30.0
"""Seconds after which a source's command is ended."""
_ran: dict[tuple[str, ...], Secret] = {}
_running = threading.Lock()


@dataclass(frozen=True)
class Secrets:
    """The values of one service, by name; ``notes`` are warnings for the operator."""

    values: Mapping[str, Secret] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def api_key(self) -> Secret | None:
        """The key that requests to the engine carry."""
        return self.values.get("api_key")

    def files(self) -> dict[str, bytes]:
        """Contents of the files below the service's folder of secrets."""
        return render_files({name: value.reveal() for name, value in self.values.items()})


@dataclass(frozen=True)
class HostSecrets:
    """What a host's folder of secrets holds.

    :param names: all files there.
    :param loose: files that others than root could read.
    """

    values: Mapping[str, Secret] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()


class _Refused(Exception):
    """A source gave no usable value; the text says why and what to do, and holds no value."""


def resolve_secrets(targets: Sequence[Target], *, only: Collection[str] | None = None) -> list[Secrets]:
    """The secrets of each target, in order. A command that several targets name is run once in a process.

    :param only: names that are needed; None: all.
    :raises ConfigError: with every secret that could not be had, what is wrong, and what to do.
    """
    asked: dict[str, Secret | _Refused] = {}
    notes: dict[str, str] = {}
    problems: dict[str, None] = {}
    found: list[Secrets] = []
    for target in targets:
        service = target.service
        values: dict[str, Secret] = {}
        for name, source in service.secrets.items():
            if only is not None and name not in only:
                continue
            key = source.model_dump_json()
            if key not in asked:
                try:
                    asked[key] = _value(source, partial(notes.__setitem__, key))
                except _Refused as error:
                    asked[key] = error
            value = asked[key]
            why = str(value) if isinstance(value, _Refused) else refusal(name, value.reveal())
            if why is not None:
                source_text = redact(str(source)) or "no source"
                problems[f"service {service.name}: secret {name} ({source_text}) {why}"] = None
            elif isinstance(value, Secret):
                values[name] = value
        told = tuple(
            notes[key] for key in (s.model_dump_json() for s in service.secrets.values()) if key in notes
        )
        found.append(Secrets(values, told))
    if problems:
        raise ConfigError(
            f"{count(len(problems), 'secret')} cannot be had",
            details=tuple(problems),
            state="nothing was contacted or changed",
            hint="put it right at the source, or name another one in the inventory",
        )
    learn(*(value for secrets in found for value in secrets.values.values()))
    return found


def api_key_of(target: Target) -> Secret | None:
    """The key for requests to the target's engine; None where the inventory names none.

    :raises ConfigError: it cannot be had.
    """
    return resolve_secrets([target], only=API_KEY)[0].api_key


def _value(source: SecretSource, note: Callable[[str], None]) -> Secret:
    if len(source.given) != 1:
        raise _Refused("has not exactly one source: write one of env, file and command")
    if source.env is not None:
        text = os.environ.get(source.env)
        if text is None:
            raise _Refused(f"is not set here: export {source.env}=... and try again")
    elif source.file is not None:
        text = _read(Path(source.file).expanduser(), note)
    else:
        text = _run(source.command or [])
    text = text.rstrip("\r\n")
    if not text.strip():
        raise _Refused("is empty: put the value there and try again")
    if len(text) < SHORTEST:
        raise _Refused(
            f"is shorter than {SHORTEST} characters: it could be guessed, and could not be masked in what is shown"
        )
    return Secret(text)


def _read(path: Path, note: Callable[[str], None]) -> str:
    try:
        if not path.is_file():
            raise _Refused("is not there" if not path.exists() else "is not a regular file")
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            content = file.read(LONGEST + 1)
    except OSError as error:
        raise _Refused(f"cannot be read: {error.strerror}") from None
    if info.st_mode & 0o077:
        note(
            f"secret file {path} can be read by others (mode {stat.S_IMODE(info.st_mode):04o}): chmod 600 {path}"
        )
    return _decoded(content)


def _run(command: Sequence[str]) -> str:
    """What a command prints; in one process it runs once."""
    with _running:
        known = _ran.get(tuple(command))
        if known is None:
            known = _ran[tuple(command)] = Secret(_run_now(command))
    return known.reveal()


def _run_now(command: Sequence[str]) -> str:
    """It has no terminal and an empty input, so that it cannot wait for somebody."""
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise _Refused(
            f"cannot be run: {getattr(error, 'strerror', None) or 'a NUL character in it'}"
        ) from None
    try:
        stdout, stderr = _said(child)
    except subprocess.TimeoutExpired:
        _end(child)
        raise _Refused(
            f"gave nothing within {COMMAND_TIMEOUT:g} s: it runs without a terminal and cannot ask; unlock the store "
            f"first, then see: {redact(shlex.join(command))}"
        ) from None
    except BaseException:
        _end(child)
        raise
    if child.returncode:
        said = redact(stderr.decode("utf-8", "replace")).strip().splitlines()[-3:]
        raise _Refused(f"ended with exit status {child.returncode}: {' / '.join(said) or 'it said nothing'}")
    return _decoded(stdout)


def _said(child: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Both outputs of a command that has ended. What never ends fills no memory.

    :raises _Refused: it gives more than any secret has. :raises subprocess.TimeoutExpired: it takes too long.
    """
    ends = time.monotonic() + COMMAND_TIMEOUT
    assert child.stdout is not None and child.stderr is not None
    found = {child.stdout.fileno(): b"", child.stderr.fileno(): b""}
    with selectors.DefaultSelector() as selector:
        for pipe in found:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, ends - time.monotonic()))
            if not ready or time.monotonic() > ends:
                raise subprocess.TimeoutExpired(child.args, COMMAND_TIMEOUT)
            for key, _ in ready:
                piece = os.read(key.fd, LONGEST)
                if not piece:
                    selector.unregister(key.fd)
                found[key.fd] = (found[key.fd] + piece)[-2 * LONGEST :]
            if len(found[child.stdout.fileno()]) > LONGEST:
                raise _Refused(f"is larger than {LONGEST >> 10} KiB")
    stdout, stderr = found.values()
    child.wait(max(0.0, ends - time.monotonic()))
    child.stdout.close()
    child.stderr.close()
    return stdout, stderr


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    child.wait()


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise _Refused("is not UTF-8 text") from None


def recorded_service(record: bytes) -> Service:
    """A service as a host recorded it, without sources of secrets: a host must not say what is run or read here.

    :raises ValueError: not a service.
    """
    return Service.model_validate_json(record).model_copy(update={"secrets": {}})


# -- on the host ---------------------------------------------------------------------------------------------


def look_requests(layout: Layout, service: Service) -> list[Request]:
    """Requests that read what the host holds; their replies, in order, make a :class:`HostSecrets`."""
    return [Request("list_dir", {"path": layout.secrets}), *_reads(layout, _own_names(service))]


def _own_names(service: Service) -> tuple[str, ...]:
    """Files that are looked for: those of the service's secrets, and the engine's whether or not it has one now."""
    return tuple(dict.fromkeys((ENGINE_FILE, *secret_files(service))))


def _reads(layout: Layout, names: Iterable[str]) -> list[Request]:
    return [
        Request("read_file", {"path": f"{layout.secrets}/{name}", "max_bytes": 1 << 20}) for name in names
    ]


def seen(service: Service, replies: Sequence[Reply]) -> HostSecrets:
    """What the replies to :func:`look_requests` say."""
    listed, *files = replies
    entries = listed.values["entries"] or ()
    names = _own_names(service)
    contents = {name: reply.data for name, reply in zip(names, files, strict=True) if reply.values["found"]}
    return HostSecrets(
        values=_learned(contents),
        names=tuple(entry["name"] for entry in entries if entry["kind"] == "file"),
        loose=tuple(
            name
            for name, reply in zip(names, files, strict=True)
            if reply.values["found"] and reply.values["mode"] & 0o077
        ),
    )


def read_host_secrets(session: Session, layout: Layout) -> HostSecrets:
    """All that the host holds, in at most two round trips. It is masked from then on in all that is printed.

    :raises OpsError: the host could not be asked.
    """
    files = [entry for entry in session.list_dir(layout.secrets) or () if entry.kind == "file"]
    names = tuple(entry.name for entry in files)
    replies = session.ask(_reads(layout, names))
    values = _learned({name: reply.data for name, reply in zip(names, replies, strict=True)})
    return HostSecrets(values, names, tuple(entry.name for entry in files if entry.mode & 0o077))


def key_on_host(content: bytes) -> Secret:
    """A key in a file of its own on a host. It is masked from then on in all that is printed."""
    key = Secret(content.decode("utf-8", "replace"))
    learn(key)
    return key


def _learned(contents: Mapping[str, bytes]) -> dict[str, Secret]:
    values = {name: Secret(value) for name, value in parse_files(contents).items()}
    learn(*values.values())
    return values


def secret_changes(wished: Secrets, found: HostSecrets) -> tuple[str, ...]:
    """One sentence a secret that the host has otherwise or not at all. Pure; names only."""
    changes = []
    for name, value in wished.values.items():
        if name not in found.values:
            changes.append(f"secret {name} is new")
        elif found.values[name] != value:
            changes.append(f"secret {name} changes")
    kept = {file for file in found.names if file == ENGINE_FILE} & set(wished.files())
    if kept:
        gone = [name for name in ENGINE_SECRETS if name in found.values and name not in wished.values]
        changes += [f"secret {name} goes" for name in gone]
    return tuple(changes)


def stale_files(wished: Iterable[str], found: HostSecrets) -> tuple[str, ...]:
    """Files on the host that no secret of the inventory needs any more. Pure."""
    return tuple(sorted(set(found.names) - set(wished)))


def write_requests(layout: Layout, files: Mapping[str, bytes]) -> list[Request]:
    """Requests that write the files, for root alone; what is right already is left as it is."""
    return [
        Request("write_file", {"path": f"{layout.secrets}/{name}", "mode": 0o600}, data)
        for name, data in files.items()
    ]


def removal_requests(layout: Layout, names: Iterable[str]) -> list[Request]:
    """Requests that remove files of the folder of secrets."""
    return [
        Request("remove_tree", {"path": f"{layout.secrets}/{name}", "below": layout.secrets})
        for name in names
    ]
