"""The real runtimes' facts, read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddtree_ops.inventory.load import merge
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.lint import RuntimeFacts, facts_of
from ddtree_ops.runtime import Bundle, build

SERVICE: dict[str, Any] = {
    "name": "s",
    "unit": "s.service",
    "runtime": "r",
    "venv": "/v",
    "model": "/m/Kimi-K2.6",
    "tensor_parallel": 8,
    "speculative": {"algorithm": "DDTREE", "block_size": 8, "budget": 32, "topk_cap": 8},
}
"""A service in which lint finds nothing; without ``drafter`` it is not started, only judged."""

RUNTIME: dict[str, Any] = {"name": "r"}
DIALECT: dict[str, list[str]] = {
    "speculative-algorithm": ["DDTREE"],
    "speculative-ddtree-budget": [],
    "speculative-ddtree-topk-cap": [],
    "speculative-ddtree-budget-schedule": [],
}
"""A tree with a DDTREE that is not ours."""
HOST: dict[str, Any] = {"name": "h", "gpu": {"name": "GPU", "count": 8, "arch": "sm120", "memory_gb": 96}}


@pytest.fixture(scope="session")
def make_target() -> Callable[[dict[str, Any]], Target]:
    """The base with changes (service, host, runtime) merged in, ``null`` takes away; past the inventory's own checks."""

    def make(changes: dict[str, Any]) -> Target:
        made = Service.model_validate(merge(SERVICE, changes.get("service") or {}))
        return Target(
            host=Host.model_validate({**merge(HOST, changes.get("host") or {}), "services": {"s": made}}),
            service=made,
            runtime=RuntimeSpec.model_validate(merge(RUNTIME, changes.get("runtime") or {})),
        )

    return make


@pytest.fixture(scope="session")
def stock() -> Bundle:
    """The released wheel, without patch and overlay."""
    return build(RuntimeSpec(patches=[], overlay="none"))


@pytest.fixture(scope="session")
def facts(stock: Bundle) -> dict[str, RuntimeFacts]:
    return {
        "patched": facts_of(build(RuntimeSpec())),
        "unpatched": facts_of(build(RuntimeSpec(patches=[]))),
        "without the overlay": facts_of(build(RuntimeSpec(overlay="none"))),
        "foreign": facts_of(build(RuntimeSpec(overlay="none"))).with_plugins(DIALECT),
        "stock": facts_of(stock),
        "unreadable": RuntimeFacts(None, "there is no such file", "budget"),
    }
