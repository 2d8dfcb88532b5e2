"""Stub."""

from __future__ import annotations

from .. import InterpolationMode

__all__ = ["InterpolationMode"]
