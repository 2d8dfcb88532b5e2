"""What SHOULD run, as files: a pinned base wheel and a patch series become a bundle; a tree is told from it.

Names are imported on first use, so that a command pays only for what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_ops.runtime.bundle import Bundle, build, known_bundle, open_bundle
    from ddtree_ops.runtime.description import Description, PatchFile, list_descriptions, load_description
    from ddtree_ops.runtime.overlay import Overlay
    from ddtree_ops.runtime.overlaycheck import OverlayCheck, OverlayState, plugin_named, plugins_of
    from ddtree_ops.runtime.patchcheck import (
        Leftover,
        PatchCheck,
        PatchState,
        check_bundle,
        check_path,
        check_source,
    )
    from ddtree_ops.runtime.series import AppliedPatch, apply_series
    from ddtree_ops.runtime.vendor import vendor
    from ddtree_ops.runtime.verify import Difference, compare, verify_bundle
    from ddtree_ops.runtime.wheel import fetch_wheel

__all__ = [
    "AppliedPatch",
    "Bundle",
    "Description",
    "Difference",
    "Leftover",
    "Overlay",
    "OverlayCheck",
    "OverlayState",
    "PatchCheck",
    "PatchFile",
    "PatchState",
    "apply_series",
    "build",
    "check_bundle",
    "check_path",
    "check_source",
    "compare",
    "fetch_wheel",
    "known_bundle",
    "list_descriptions",
    "load_description",
    "open_bundle",
    "plugin_named",
    "plugins_of",
    "vendor",
    "verify_bundle",
]

_HOMES = {
    "AppliedPatch": "series",
    "Bundle": "bundle",
    "Description": "description",
    "Difference": "verify",
    "Leftover": "patchcheck",
    "Overlay": "overlay",
    "OverlayCheck": "overlaycheck",
    "OverlayState": "overlaycheck",
    "PatchCheck": "patchcheck",
    "PatchFile": "description",
    "PatchState": "patchcheck",
    "apply_series": "series",
    "build": "bundle",
    "check_bundle": "patchcheck",
    "check_path": "patchcheck",
    "check_source": "patchcheck",
    "compare": "verify",
    "fetch_wheel": "wheel",
    "known_bundle": "bundle",
    "list_descriptions": "description",
    "load_description": "description",
    "open_bundle": "bundle",
    "plugin_named": "overlaycheck",
    "plugins_of": "overlaycheck",
    "vendor": "vendor",
    "verify_bundle": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
