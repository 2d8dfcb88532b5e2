"""All checks: importing this module registers them, in the order in which ``validate --list`` shows them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from ddtree_ops.checks.validation.base import CHECKS, CheckSpec

__all__ = ["checks"]

_MODULES = ("texts", "protocol", "caching", "many", "acceptance", "lossless", "standing")


def checks() -> Mapping[str, CheckSpec]:
    """Every check by name."""
    for name in _MODULES:
        importlib.import_module(f"ddtree_ops.checks.validation.{name}")
    return CHECKS
