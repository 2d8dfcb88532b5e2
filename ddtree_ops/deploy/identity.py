"""Who acts, and from which machine: what history, audit and locks write down."""

from __future__ import annotations

import getpass
import os
import socket

__all__ = ["origin", "who"]


def who() -> str:
    """``$DDTREE_OPS_WHO``, else the login name, else the user id."""
    try:
        return os.environ.get("DDTREE_OPS_WHO") or getpass.getuser()
    except (KeyError, OSError):  # no name for this user id, as in many containers
        return f"user {os.getuid()}"


def origin() -> str:
    """Name of this machine."""
    return socket.gethostname()
