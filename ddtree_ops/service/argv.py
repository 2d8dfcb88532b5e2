"""The launch command of a service, as a list of words. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.models import ENGINE_SECRETS, Node, Service
from ddtree_ops.secret import is_secret_flag

__all__ = ["flag_words", "launch_argv"]

_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_ALIASES = {
    "model": "model-path",
    "tensor-parallel-size": "tp-size",
    "tp": "tp-size",
    "nccl-init-addr": "dist-init-addr",
    "speculative-draft-model": "speculative-draft-model-path",
    "speculative-dflash-block-size": "speculative-num-draft-tokens",
}
_BLOCK_DRAFTERS = ("DFLASH", "DDTREE")


def flag_words(flag: str, value: bool | int | float | str | list[int | float | str] | None) -> list[str]:
    """Words of one flag. :raises ConfigError: a list that is empty, or of which an item would be read as a flag."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        if not value:
            raise ConfigError(f"{flag}: an empty list", hint="leave the key out, or write false")
        words = [str(item) for item in value]
        for word in words:
            if word.startswith("-") and not _NUMBER.fullmatch(word):
                raise ConfigError(f"{flag}: {word!r} within a list would be read as a flag")
        return [flag, *words]
    text = str(value)
    if text.startswith("-") and not _NUMBER.fullmatch(text):
        return [f"{flag}={text}"]
    return [flag, text]


def launch_argv(
    service: Service, node: Node | None = None, dialect: Mapping[str, str] | None = None
) -> list[str]:
    """Words of ``ExecStart``: the venv's Python, ``-m sglang.launch_server``, then flags.

    Flags that follow from typed fields of the service come first, ``args`` after them in their order: ``true`` is
    a bare flag, ``false`` and ``null`` leave it out, a list is repeated words after one flag. A text that begins
    with a dash is written ``--flag=-text``. For the block drafters DFLASH and DDTREE ``block_size`` travels as
    ``--speculative-num-draft-tokens`` (for DFLASH ``--speculative-dflash-block-size`` is an alias of it in 0.5.11,
    so that both stand for one number); other algorithms take their own flags from ``args``.

    :param node: the host's place where one engine runs over several hosts; ``--tp-size`` then counts the GPUs of all.
    :param dialect: what the runtime calls a flag that a field writes: our name -> its name.
    :raises ConfigError: an ``args`` key that is no flag name, that a typed field already writes, or whose value is
        a secret (the command line of a process can be read by every user of the host).
    """
    typed: list[tuple[str, bool | int | float | str | list[int | float | str] | None]] = [
        ("model-path", service.model),
        ("served-model-name", service.served_name),
        ("host", service.bind),
        ("port", service.port),
        ("tp-size", service.tensor_parallel),
    ]
    if node is not None:
        typed += [("nnodes", node.count), ("node-rank", node.rank), ("dist-init-addr", node.head)]
    speculative = service.speculative
    if speculative is not None:
        block = speculative.algorithm.upper() in _BLOCK_DRAFTERS
        typed += [
            ("speculative-algorithm", speculative.algorithm),
            ("speculative-draft-model-path", service.drafter),
            ("speculative-num-draft-tokens", speculative.block_size if block else None),
            ("speculative-ddtree-budget", speculative.budget),
            ("speculative-ddtree-topk-cap", speculative.topk_cap),
            ("speculative-ddtree-budget-schedule", speculative.budget_schedule),
        ]
    argv = [f"{service.venv.rstrip('/')}/bin/python", "-m", "sglang.launch_server"]
    written: dict[str, str] = {}
    for name, value in [((dialect or {}).get(name, name), value) for name, value in typed]:
        words = flag_words(f"--{name}", value)
        if words:
            written[name] = "a field of the service"
        argv += words
    for key, value in service.args.items():
        if not _FLAG.fullmatch(key):
            raise ConfigError(
                f"service {service.name or service.unit}: args: {key!r} is not a flag name",
                hint="write the flag without its dashes, such as mem-fraction-static",
            )
        canonical = _ALIASES.get(key.replace("_", "-"), key.replace("_", "-"))
        words = flag_words(f"--{key}", value)
        if not words:
            continue
        if canonical in written:
            raise ConfigError(
                f"service {service.name or service.unit}: args.{key} is already written by {written[canonical]}",
                hint=f"remove args.{key} and set the field, or keep only one of the two keys",
            )
        if not isinstance(value, bool) and is_secret_flag(key):
            raise ConfigError(
                f"service {service.name or service.unit}: args.{key} would put a secret on the command line",
                hint=f"write where it comes from under secrets of the service, as {canonical.replace('-', '_')}"
                if canonical.replace("-", "_") in ENGINE_SECRETS
                else "keep it in a YAML file on the host that only the service's user can read, and name that file "
                "with args.config",
            )
        written[canonical] = f"args.{key}"
        argv += words
    return argv
