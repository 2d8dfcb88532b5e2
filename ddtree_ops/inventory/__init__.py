"""What SHOULD run: inventory files, their models, and the choice of targets.

Reading a file: :func:`load_inventory`. Choosing from it: :func:`select`, :func:`override`. Towards ``remote``:
:func:`connect_spec`. YAML with places, for every other file that people write: :mod:`.yaml_source`.
"""

from __future__ import annotations

from ddtree_ops.inventory.load import inventory_schema, load_inventory
from ddtree_ops.inventory.models import (
    GPU,
    SSH,
    Health,
    Host,
    Inventory,
    Limits,
    Restart,
    RuntimeSpec,
    Service,
    Speculative,
    Target,
)
from ddtree_ops.inventory.select import connect_spec, override, select

__all__ = [
    "GPU",
    "SSH",
    "Health",
    "Host",
    "Inventory",
    "Limits",
    "Restart",
    "RuntimeSpec",
    "Service",
    "Speculative",
    "Target",
    "connect_spec",
    "inventory_schema",
    "load_inventory",
    "override",
    "select",
]
