"""The systemd unit of a service, rendered from the inventory. Pure; systemd's own quoting rules.

Sources: ``systemd.service(5)``, ``systemd.exec(5)``, ``systemd.syntax(7)``, and the parsers themselves
(``config_parse_exec``, ``config_parse_environ``, ``cunescape``, ``replace_env_argv``) of systemd 252.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.models import Service, Target
from ddtree_ops.service.argv import launch_argv
from ddtree_ops.service.credentials import CONFIG_WORD, ENGINE_FILE, secret_files
from ddtree_ops.service.layout import Layout

__all__ = [
    "HEADER",
    "USER_NAME",
    "exec_start",
    "literal",
    "quote_environment",
    "quote_exec",
    "quote_executable",
    "render_unit",
    "seconds",
    "start_limit_interval",
]

HEADER = "# Written by ddtree-ops; edits are reported as drift and replaced by the next deploy."

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
USER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}\$?|\d{1,10}")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "%": "%%"}
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONPYCACHEPREFIX")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _refuse_unspeakable(text: str, what: str) -> None:
    """Refuse what no unit file can hold, or what systemd could not hand out again over D-Bus."""
    for character in text:
        code = ord(character)
        if code == 0:
            raise ConfigError(f"{what}: a NUL character cannot be passed to a process")
        if 0xD800 <= code <= 0xDFFF:
            raise ConfigError(f"{what}: {text!r} is not valid Unicode (a lone surrogate)")
        if 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE:
            raise ConfigError(f"{what}: systemd refuses the Unicode noncharacter U+{code:04X}")


def _escape(text: str, extra: dict[str, str]) -> str:
    parts: list[str] = []
    for character in text:
        if character in extra:
            parts.append(extra[character])
        elif character in _ESCAPES:
            parts.append(_ESCAPES[character])
        elif character == " " or character.isprintable():
            parts.append(character)
        else:
            parts.extend(f"\\x{byte:02x}" for byte in character.encode())
    return "".join(parts)


def quote_exec(word: str) -> str:
    """One word of ``ExecStart`` such that the process gets exactly ``word``.

    ``%`` and ``$`` are doubled (quotes do not keep systemd from expanding them), everything but plain words is put
    into double quotes, control and other unprintable characters become ``\\xNN``.

    :raises ConfigError: NUL, lone surrogates and Unicode noncharacters.
    """
    _refuse_unspeakable(word, "command line")
    if _PLAIN.fullmatch(word):
        return word
    return f'"{_escape(word, {"$": "$$"})}"'


def quote_executable(path: str) -> str:
    """The first word of ``ExecStart``: systemd reads it by stricter rules than the rest.

    :raises ConfigError: a path that is not absolute (so nothing is taken for one of the prefixes ``-@:+!``), or
        holds quotes, backslashes, dollar signs or control characters, which systemd refuses or would expand in
        ``argv[0]``, by which Python finds its virtual environment.
    """
    _refuse_unspeakable(path, "executable")
    if not path.startswith("/"):
        raise ConfigError(f"executable {path!r} is not an absolute path")
    for character in path:
        if character in "\"'\\$" or not (character == " " or character.isprintable()):
            raise ConfigError(f"executable {path!r}: systemd cannot run a path that holds {character!r}")
    return quote_exec(path)


def quote_environment(name: str, value: str) -> str:
    """The right side of one ``Environment=`` line. ``$`` has no meaning there, ``%`` is doubled.

    :raises ConfigError: a name that is no variable name; a value with NUL, surrogates or noncharacters.
    """
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(f"environment: {name!r} is not a variable name")
    _refuse_unspeakable(value, f"environment {name}")
    if _PLAIN.fullmatch(value):
        return f"{name}={value}"
    return f'"{name}={_escape(value, {})}"'


def literal(text: str, what: str) -> str:
    """A setting that systemd does not unquote: one line, ``%`` doubled, no backslash at its end."""
    _refuse_unspeakable(text, what)
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat.rstrip("\\ ").replace("%", "%%")


def _path(path: str, what: str) -> str:
    _refuse_unspeakable(path, what)
    if any(not (c == " " or c.isprintable()) for c in path) or path != path.strip() or path.endswith("\\"):
        raise ConfigError(f"{what}: {path!r} cannot be written to a unit")
    return path.replace("%", "%%")


def seconds(value: float) -> str:
    """A span of seconds as settings have it."""
    if math.isinf(value):
        return "infinity"
    return f"{value:.3f}".rstrip("0").rstrip(".") + "s"


def start_limit_interval(service: Service) -> float:
    """``StartLimitIntervalSec`` in seconds.

    Left out in the inventory it exceeds ``burst x (delay + load_timeout)``: a crash at the very end of a load
    still counts against the burst, so that a slow crash cannot loop for ever.

    :raises ConfigError: a given interval of at most ``burst x delay``: it could never be reached.
    """
    restart = service.restart
    if restart.interval is None:
        return math.ceil(restart.burst * (restart.delay + service.health.load_timeout)) + 60.0
    if restart.interval <= restart.burst * restart.delay:
        raise ConfigError(
            f"service {service.name or service.unit}: restart.interval {seconds(restart.interval)} can never hold "
            f"{restart.burst} restarts {seconds(restart.delay)} apart: a crash would loop for ever",
            hint="leave restart.interval out, then it is computed from burst, delay and health.load_timeout",
        )
    return restart.interval


def exec_start(argv: list[str], more: Sequence[str] = ()) -> list[str]:
    """``ExecStart`` over several lines, one flag with its values a line, so that differences read well.

    :param more: lines that systemd is to expand, quoted already.
    """
    lines = [quote_executable(argv[0])]
    for word in argv[1:]:
        if word.startswith("--"):
            lines.append(f"  {quote_exec(word)}")
        else:
            lines[-1] += f" {quote_exec(word)}"
    return [f"ExecStart={lines[0]}", *lines[1:], *(f"  {line}" for line in more)]


def _secrets(service: Service, layout: Layout) -> list[str]:
    """The settings that hand the service its secrets: paths only, see :mod:`ddtree_ops.service.credentials`."""
    names = secret_files(service)
    folder = _path(layout.secrets, "deploy_root")
    if ENGINE_FILE in names and "config" in service.args:
        raise ConfigError(
            f"service {service.name or service.unit}: args.config and an API key under secrets exclude each other: "
            "the engine reads one --config only",
            hint="write the settings of that file under args, or the key into that file",
        )
    for name in service.secrets:
        if name in _OWN_VARIABLES or name in service.environment:
            raise ConfigError(
                f"service {service.name or service.unit}: {name} stands under secrets, and is set elsewhere too",
                hint=f"keep it in one place: environment.{name} or secrets.{name}"
                if name in service.environment
                else f"remove secrets.{name}: ddtree-ops sets it",
            )
    return [
        f"LoadCredential={name}:{folder}/{name}"
        if name == ENGINE_FILE
        else f"EnvironmentFile={folder}/{name}"
        for name in names
    ]


def _environment(service: Service, layout: Layout) -> dict[str, str]:
    for name in _OWN_VARIABLES:
        if name in service.environment:
            raise ConfigError(
                f"service {service.name or service.unit}: environment.{name} is set by ddtree-ops",
                hint="PYTHONPATH is what makes the release shadow the venv's sglang; remove the key",
            )
    for path, what in ((layout.root, "deploy_root"), (layout.unit, "unit"), (service.venv, "venv")):
        if ":" in path:
            raise ConfigError(f"{what} {path!r}: a colon would split PYTHONPATH or PATH")
    if set(layout.root) & set("$\\\"'\n"):
        raise ConfigError(
            f"deploy_root {layout.root!r}: systemd misreads $, \\ and quotes in transient units"
        )
    return {
        "PYTHONPATH": layout.current,
        "PYTHONPYCACHEPREFIX": layout.pycache,
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{service.venv.rstrip('/')}/bin:{_SYSTEM_PATH}",
        **service.environment,
    }


def render_unit(target: Target) -> str:
    """The whole text of a target's unit file, newline at the end. The same target always gives the same text.

    - ``Type=exec``: a missing binary fails the start job, which ``simple`` hides; 0.5.11 never calls ``sd_notify``.
    - ``User=root`` is written out where the inventory names none, because systemd sets ``HOME`` only with ``User=``.
    - ``PATH`` begins with the venv's ``bin`` (kernels compiled at run time look for ``ninja`` there).
    - ``RestartPreventExitStatus=2``: a command line that argparse refused does not get better by repeating it.
    - The one word that systemd is to expand is ``${CREDENTIALS_DIRECTORY}``, in the ``--config`` that the API key
      travels by; every other ``$`` is doubled.
    - No ``SuccessExitStatus=SIGKILL``: a clean stop of sglang ends by SIGKILL, but so does a crash.

    :raises ConfigError: a value that no unit can hold, or that contradicts what ddtree-ops writes itself.
    """
    service, layout = target.service, Layout.of(target)
    user = service.user or "root"
    if not USER_NAME.fullmatch(user):
        raise ConfigError(f"service {service.name or service.unit}: user {user!r} is not a user name")
    if service.health.stop_timeout <= 0:
        raise ConfigError(
            f"service {service.name or service.unit}: health.stop_timeout 0 means no limit to systemd",
            hint="a drain may never end in 0.5.11: give it a limit such as 120s",
        )
    description = literal(service.description or f"SGLang {service.name or service.unit}", "description")
    restart, limits = service.restart, service.limits
    lines = [
        HEADER,
        "[Unit]",
        f"Description={description}",
        "Wants=network-online.target",
        "After=network-online.target remote-fs.target",
        f"StartLimitIntervalSec={seconds(start_limit_interval(service))}",
        f"StartLimitBurst={restart.burst}",
        "",
        "[Service]",
        "Type=exec",
        f"User={user}",
        f"WorkingDirectory={_path(layout.service_dir, 'deploy_root')}",
        *(f"Environment={quote_environment(*item)}" for item in _environment(service, layout).items()),
        *_secrets(service, layout),
        " \\\n".join(
            exec_start(
                launch_argv(service, target.node, target.runtime.dialect),
                (f"--config {CONFIG_WORD}",) if ENGINE_FILE in secret_files(service) else (),
            )
        ),
        f"Restart={restart.policy}",
        f"RestartSec={seconds(restart.delay)}",
        "RestartPreventExitStatus=2",
        "TimeoutStartSec=120s",
        f"TimeoutStopSec={seconds(service.health.stop_timeout)}",
        f"KillMode={service.kill_mode}",
        "KillSignal=SIGTERM",
        "OOMPolicy=stop",
        f"LimitMEMLOCK={limits.memlock}",
        f"LimitNOFILE={limits.nofile}",
        f"TasksMax={limits.tasks}",
        "LogRateLimitIntervalSec=0",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"
