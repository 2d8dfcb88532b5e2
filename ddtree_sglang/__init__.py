"""DDTREE for sglang 0.5.11: a plugin that verifies a tree of a block drafter's candidates in one step.

The package runs inside the engine. sglang finds it by the entry point ``ddtree`` of the group
``sglang.srt.plugins`` and calls :func:`ddtree_sglang.plugin.register` in the launcher and in every scheduler.
"""

from __future__ import annotations

__all__: list[str] = []
