"""Does the engine's port belong to the unit? An sglang that lost its port to another one logs that it is ready all the same."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from ddtree_ops.inventory.models import Service
from ddtree_ops.service.control import PortOwner, UnitControl

__all__ = ["PortHolders", "port_holders", "sort_holders"]


@dataclass(frozen=True)
class PortHolders:
    """Who listens on the port: processes of the unit, and others. Both empty: nobody."""

    port: int
    mine: tuple[PortOwner, ...] = ()
    others: tuple[PortOwner, ...] = ()

    @property
    def owned(self) -> bool:
        """The unit listens on the port, and nobody else does."""
        return bool(self.mine) and not self.others

    def describe(self) -> str:
        """One line for people."""
        if self.owned:
            return f"port {self.port} is held by PID {', '.join(str(owner.pid) for owner in self.mine)} of the unit"
        if self.others:
            also = "also " if self.mine else ""
            return f"port {self.port} is {also}held by {'; '.join(owner.describe() for owner in self.others)}"
        return f"nothing listens on port {self.port}"


def sort_holders(owners: Iterable[PortOwner], port: int, unit: str) -> PortHolders:
    """Sort listeners into those that run in ``unit`` and the others."""
    found = tuple(owners)
    return PortHolders(
        port,
        tuple(owner for owner in found if owner.unit == unit),
        tuple(owner for owner in found if owner.unit != unit),
    )


def port_holders(control: UnitControl, service: Service) -> PortHolders:
    """Look on the host who can be reached at the service's address and port: one round trip.

    :raises RemoteError: the look itself failed.
    """
    try:
        address: str | None = str(ipaddress.ip_address(service.bind))
    except ValueError:
        address = None
    return sort_holders(control.port_owner(service.port, address), service.port, service.unit)
