"""Workflows as files: :func:`load_playbook` reads one, :mod:`.run` performs it."""

from __future__ import annotations

from ddtree_ops.playbook.load import load_playbook, playbook_schema
from ddtree_ops.playbook.models import Playbook, Step

__all__ = ["Playbook", "Step", "load_playbook", "playbook_schema"]
