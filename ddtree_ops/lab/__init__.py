"""Lab: real hosts on this machine for demos and tests. See docs/architecture.md."""

from __future__ import annotations

from ddtree_ops.lab.hosts import (
    ENGINES,
    FLEET_MOST,
    HOSTS,
    SSH_PORT,
    HostState,
    LabHost,
    LabHostStatus,
    down,
    environment,
    fleet_inventory,
    fleet_names,
    missing,
    reset,
    ssh_argv,
    status,
    up,
    up_fleet,
)

__all__ = [
    "ENGINES",
    "FLEET_MOST",
    "HOSTS",
    "SSH_PORT",
    "HostState",
    "LabHost",
    "LabHostStatus",
    "down",
    "environment",
    "fleet_inventory",
    "fleet_names",
    "missing",
    "reset",
    "ssh_argv",
    "status",
    "up",
    "up_fleet",
]
