"""Lab: real hosts on this machine for demos and tests. See docs/architecture.md."""

from __future__ import annotations

from ddtree_ops.lab.hosts import (
    HOSTS,
    SSH_PORT,
    HostState,
    LabHost,
    LabHostStatus,
    down,
    environment,
    missing,
    reset,
    ssh_argv,
    status,
    up,
)

__all__ = [
    "HOSTS",
    "SSH_PORT",
    "HostState",
    "LabHost",
    "LabHostStatus",
    "down",
    "environment",
    "missing",
    "reset",
    "ssh_argv",
    "status",
    "up",
]
