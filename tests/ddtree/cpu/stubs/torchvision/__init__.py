"""Stub: what sglang 0.5.11 and transformers 5.6.0 import from torchvision at start-up for a text-only model."""

__version__ = "0.28.0"
