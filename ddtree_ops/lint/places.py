"""Where in an inventory file a finding's setting is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ddtree_ops.inventory.models import Target
from ddtree_ops.inventory.yaml_source import Document, KeyPath
from ddtree_ops.lint.model import Finding

__all__ = ["located"]


def located(
    findings: Iterable[Finding],
    target: Target,
    document: Document,
    *,
    settings: Sequence[str] = (),
    runtime: str | None = None,
) -> tuple[Finding, ...]:
    """The findings with ``file:line`` of what they speak of, or the option that set it. Pure.

    The last word counts, as in merging: what the host overrides, then the service, then ``defaults``. Where the setting
    itself is not written down it is the nearest entry around it.

    :param settings: ``KEY=VALUE`` of ``--set``.
    :param runtime: value of ``--runtime``.
    """
    return tuple(
        replace(finding, place=_place(finding.path, target, document, settings, runtime))
        for finding in findings
    )


def _place(
    path: tuple[str, ...], target: Target, document: Document, settings: Sequence[str], runtime: str | None
) -> str:
    section, name, rest = path[0], path[1] if len(path) > 1 else "", path[2:]
    if section == "services":
        if rest == ("runtime",) and runtime is not None:
            return "--runtime"
        for setting in settings:
            keys = tuple(setting.partition("=")[0].split("."))
            if keys == rest[: len(keys)]:
                return f"--set {'.'.join(keys)}"
    layers = list(_layers(section, name, target))
    for end in range(len(rest), -1, -1):
        for layer in layers:
            if (*layer, *rest[:end]) in document.marks:
                return document.where((*layer, *rest[:end]))
    return document.source


def _layers(section: str, name: str, target: Target) -> Iterator[KeyPath]:
    if section == "services":
        yield ("hosts", target.host.name, "services", target.service.name)
        yield ("services", name)
        yield ("defaults", "service")
    elif section == "hosts":
        yield ("hosts", name)
        yield ("defaults", "host")
    else:
        yield (section, name)
