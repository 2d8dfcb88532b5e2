"""Declarative deployment and validation of a patched SGLang with DDTree speculative decoding."""

__version__ = "0.1.0"
__all__ = ["__version__"]
