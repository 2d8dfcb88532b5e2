"""Stub."""

from __future__ import annotations

from . import InterpolationMode

__all__ = ["InterpolationMode", "pil_to_tensor"]

pil_to_tensor = None
