"""Stub: the one name that transformers imports."""

from __future__ import annotations

import enum

__all__ = ["InterpolationMode"]


class InterpolationMode(enum.Enum):
    """As in torchvision."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
