"""Where things live on the operator's machine. Shipped data is found in a checkout and in an installed package."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = [
    "INVENTORY_BY_OPTION",
    "SIGNATURES",
    "cache_dir",
    "config_dir",
    "lab_dir",
    "shipped",
    "signature_directories",
    "state_dir",
]

INVENTORY_BY_OPTION = "_DDTREE_OPS_INVENTORY_BY_OPTION"
"""Variable that tells that ``$DDTREE_OPS_INVENTORY`` was not set by the user, but by ``-i`` before the command."""
SIGNATURES = "DDTREE_OPS_SIGNATURES"
"""Variable that names directories of a user's own signatures, separated as in ``PATH``."""
_PACKAGE = Path(__file__).resolve().parent


def _xdg(variable: str, fallback: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / fallback) / "ddtree-ops"


def cache_dir() -> Path:
    """Rebuildable things: wheels, bundles. ``$XDG_CACHE_HOME/ddtree-ops``."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """Things worth keeping: captured evidence, the lab. ``$XDG_STATE_HOME/ddtree-ops``."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def config_dir() -> Path:
    """The user's own inventories and signatures. ``$XDG_CONFIG_HOME/ddtree-ops``."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def lab_dir() -> Path:
    """Root of the lab hosts: ``$DDTREE_OPS_LAB_DIR`` or ``state_dir()/lab``."""
    return Path(os.environ.get("DDTREE_OPS_LAB_DIR") or state_dir() / "lab")


def shipped(kind: str) -> Path:
    """Directory of shipped ``inventories``, ``playbooks`` or ``patches``, or of the package ``ddtree_sglang``."""
    for root in (_PACKAGE.parent, _PACKAGE / "data"):
        if (root / kind).is_dir() and (root != _PACKAGE.parent or (root / "pyproject.toml").is_file()):
            return root / kind
    raise FileNotFoundError(f"{kind}: not found beside the package; reinstall ddtree-ops")


def signature_directories() -> tuple[Path, ...]:
    """Where a user's own signatures are looked for: the configuration, if it has some, and ``$DDTREE_OPS_SIGNATURES``."""
    own = config_dir() / "signatures"
    named = [Path(part).expanduser() for part in os.environ.get(SIGNATURES, "").split(os.pathsep) if part]
    return (*((own,) if own.is_dir() else ()), *named)
