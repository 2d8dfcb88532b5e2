"""How the service that a host runs was set when it was deployed, against the one that is wished, setting by setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddtree_ops.deploy.history import Activation
from ddtree_ops.deploy.plan import ValueChange, compare_values, masked_value
from ddtree_ops.deploy.secrets import recorded_service
from ddtree_ops.inventory.models import Service
from ddtree_ops.remote.session import Session
from ddtree_ops.service.layout import Layout

__all__ = ["deployed_settings", "other_settings"]

_FOR_PEOPLE = {"name", "description", "secrets", "baseline", "lint"}
"""Settings of a service that do not reach its engine, or of which the host keeps no record."""


def deployed_settings(
    session: Session, layout: Layout, activation: Activation, wished: Service
) -> tuple[ValueChange, ...] | None:
    """How the service of an activation, as its host recorded it, differs from the one that is wished. One round trip.

    :returns: None where there is no record that this version can read.
    """
    record = session.read_file(f"{layout.kept_unit(activation.unit_sha256)}.json")
    try:
        return None if record is None else other_settings(recorded_service(record), wished)
    except ValueError:
        return None


def other_settings(recorded: Service, wished: Service) -> tuple[ValueChange, ...]:
    """How the service of an activation differs from the one that is wished, by dotted keys; secrets are masked. Pure."""
    return compare_values(
        dict(_flat("", _settings(recorded))), dict(_flat("", _settings(wished))), _masked_setting
    )


def _settings(service: Service) -> dict[str, Any]:
    return service.model_dump(mode="json", exclude=_FOR_PEOPLE)


def _masked_setting(name: str, value: str) -> str:
    return masked_value(name.rpartition(".")[2], value)


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every setting that is set, by its dotted key."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _flat(f"{path}.{name}" if path else name, each)
    elif value is not None:
        yield path, ",".join(map(str, value)) if isinstance(value, list) else str(value)
