"""Stand-in for the package ``datasets``, which ``sglang.bench_serving`` imports and needs for data sets of the Hub alone."""

from __future__ import annotations

__all__ = ["load_dataset"]


def load_dataset(*args: object, **kwargs: object) -> object:
    """As the real one where there is no network.

    :raises ConnectionError: always.
    """
    raise ConnectionError("this environment has a stand-in for the package datasets: nothing can be loaded")
