"""Bundles of the cache for a command over many targets."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ddtree_ops.runtime import known_bundle

if TYPE_CHECKING:
    from ddtree_ops.inventory.models import RuntimeSpec
    from ddtree_ops.runtime import Bundle

__all__ = ["KnownBundles"]


class KnownBundles:
    """:func:`~ddtree_ops.runtime.known_bundle`, asked once a runtime: each time is a walk over all files of its bundle.

    Safe for threads: who asks for a runtime that is being looked up waits for it.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._found: dict[str, Bundle | None] = {}

    def __call__(self, runtime: RuntimeSpec) -> Bundle | None:
        """What the cache held of a runtime when it was first asked for."""
        key = repr(runtime)
        with self._guard:
            if key not in self._found:
                self._found[key] = known_bundle(runtime)
            return self._found[key]
