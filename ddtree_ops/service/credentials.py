"""How the secrets of a service lie on its host, and how systemd hands them to the process. Pure.

One file a secret, below ``SERVICE_DIR/secrets``, owned by root with mode 0600; the unit file names paths only.

- ``engine.yaml`` holds ``api_key`` and ``admin_api_key``. ``LoadCredential=`` copies it to where the unit's user, and
  nobody else, can read it, and ``--config ${CREDENTIALS_DIRECTORY}/engine.yaml`` has the engine merge it with its
  command line inside the process (``server_args_config_parser.py`` of sglang 0.5.11: command line over file over
  default): the key is in no argument list and in no environment. ``CREDENTIALS_DIRECTORY`` needs systemd 247. The text
  is JSON, which every YAML reader takes.
- ``NAME.env`` holds one variable, for ``EnvironmentFile=``. It is read as root whatever the unit's user is, and unlike
  ``Environment=`` it does not show in ``systemctl show``, which every user of the host may call. Credentials would
  not do: what reads ``HF_TOKEN`` from a file named by another variable is one library among those that read it.

Sources: ``systemd.exec(5)``; ``parse_env_file_internal`` and ``env_value_is_valid`` of systemd 247 and 252.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ddtree_ops.inventory.models import ENGINE_SECRETS, Service

__all__ = [
    "CONFIG_WORD",
    "ENGINE_FILE",
    "MINIMUM_SYSTEMD",
    "named_files",
    "parse_files",
    "refusal",
    "render_files",
    "secret_files",
]

ENGINE_FILE = "engine.yaml"
"""File, and credential, that holds the secrets of :data:`~ddtree_ops.inventory.models.ENGINE_SECRETS`."""
CONFIG_WORD = f"${{CREDENTIALS_DIRECTORY}}/{ENGINE_FILE}"
"""As systemd is to expand it."""
MINIMUM_SYSTEMD = 247
"""First version that sets ``CREDENTIALS_DIRECTORY``."""
LONGEST = 64 << 10

_ENVIRONMENT = ".env"
_REFERENCE = re.compile(r"^(?:LoadCredential=[^:\n]*:|EnvironmentFile=)(/.*)$", re.MULTILINE)
_ASSIGNMENT = re.compile(r'([A-Z_][A-Z0-9_]*)="((?:[^"\\]|\\.)*)"\n', re.DOTALL)
_VISIBLE = re.compile(r"[!-~]+")


def _file_of(name: str) -> str:
    return ENGINE_FILE if name in ENGINE_SECRETS else name + _ENVIRONMENT


def secret_files(service: Service) -> tuple[str, ...]:
    """Names of the files that hold the service's secrets, each once."""
    return tuple(dict.fromkeys(_file_of(name) for name in service.secrets))


def refusal(name: str, value: str) -> str | None:
    """Why ``value`` cannot be handed over as the secret ``name``, without showing it; None where it can."""
    if len(value.encode("utf-8", "replace")) > LONGEST:
        return f"is larger than {LONGEST >> 10} KiB"
    if name in ENGINE_SECRETS:
        if not _VISIBLE.fullmatch(value):
            return "holds a blank, a line break or a character beyond ASCII, which no HTTP header carries"
        if value.startswith("-"):
            return "begins with a dash, so that the engine would read it as a flag"
        return None
    for character in value:
        code = ord(character)
        if (code < 32 and character not in "\t\n") or 0x7F <= code < 0xA0:
            return f"holds the control character U+{code:04X}, which systemd does not pass on"
        if 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE:
            return f"holds U+{code:04X}, which is no character to systemd"
    return None


def render_files(values: Mapping[str, str]) -> dict[str, bytes]:
    """Contents of the files: name -> bytes. ``values`` are such that :func:`refusal` has nothing against them."""
    engine = {ENGINE_SECRETS[name]: value for name, value in values.items() if name in ENGINE_SECRETS}
    files = {ENGINE_FILE: json.dumps(engine, sort_keys=True).encode() + b"\n"} if engine else {}
    for name, value in values.items():
        if name not in ENGINE_SECRETS:
            quoted = re.sub(r'(["\\`$])', r"\\\1", value)
            files[name + _ENVIRONMENT] = f'{name}="{quoted}"\n'.encode()
    return files


def parse_files(files: Mapping[str, bytes]) -> dict[str, str]:
    """Values by secret name, the inverse of :func:`render_files`; what it would not have written is left out."""
    values: dict[str, str] = {}
    flags = {flag: name for name, flag in ENGINE_SECRETS.items()}
    for file, content in files.items():
        try:
            text = content.decode()
            if file == ENGINE_FILE:
                found = json.loads(text)
                values.update(
                    {flags[flag]: found[flag] for flag in flags if isinstance(found.get(flag), str)}
                )
            elif match := _ASSIGNMENT.fullmatch(text):
                values[match[1]] = re.sub(r'\\(["\\`$])', r"\1", match[2])
        except (ValueError, AttributeError):
            continue
    return values


def named_files(unit_text: str, folder: str) -> tuple[str, ...]:
    """Names of the secret files below ``folder`` that a unit file needs to start."""
    paths = (match.replace("%%", "%") for match in _REFERENCE.findall(unit_text))
    return tuple(path[len(folder) + 1 :] for path in paths if path.startswith(folder + "/"))
