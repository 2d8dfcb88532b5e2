"""Sessions with hosts: typed requests over one SSH connection and one agent process. See docs/architecture.md."""

from __future__ import annotations

from ddtree_ops.remote.files import FileEntry, scan_tree
from ddtree_ops.remote.local import connect_local
from ddtree_ops.remote.session import (
    AgentError,
    Completed,
    DirEntry,
    Disk,
    PublishResult,
    Reply,
    Request,
    Session,
    Stream,
)
from ddtree_ops.remote.ssh import ConnectSpec, connect

__all__ = [
    "AgentError",
    "Completed",
    "ConnectSpec",
    "DirEntry",
    "Disk",
    "FileEntry",
    "PublishResult",
    "Reply",
    "Request",
    "Session",
    "Stream",
    "connect",
    "connect_local",
    "scan_tree",
]
