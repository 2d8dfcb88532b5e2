"""A command over many hosts asks the cache once a runtime."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ddtree_ops.deploy import known
from ddtree_ops.inventory.models import RuntimeSpec


def test_the_cache_is_asked_once_a_runtime_whatever_it_holds(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(known, "known_bundle", lambda runtime: asked.append(runtime.name))
    bundles = known.KnownBundles()
    runtimes = [RuntimeSpec(name=name) for name in ("a", "b", "a", "b", "a")]
    with ThreadPoolExecutor(max_workers=5) as pool:
        assert list(pool.map(bundles, runtimes)) == [None] * 5
    assert sorted(asked) == ["a", "b"]
