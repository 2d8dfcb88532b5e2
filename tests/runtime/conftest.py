"""One download of the real wheel a session; every test works in a cache of its own that already holds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddtree_ops.inventory.models import RuntimeSpec
from ddtree_ops.runtime import Bundle, build, fetch_wheel, load_description
from ddtree_ops.sizing import RUNNER_PATH

PYTHON = "cp312"


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory with the wheel, fetched through pip, and the two bundles of the shipped description."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        build(RuntimeSpec(python=PYTHON))
        build(RuntimeSpec(python=PYTHON, patches=[]))
    yield folder


@pytest.fixture(scope="session")
def wheel(shared_cache: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared_cache))
        return fetch_wheel(load_description("sglang-0.5.11").base, PYTHON)


@pytest.fixture(scope="session")
def patched(shared_cache: Path) -> Bundle:
    """Read-only: shared by the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared_cache))
        return build(RuntimeSpec(python=PYTHON))


@pytest.fixture(scope="session")
def pristine(shared_cache: Path) -> Bundle:
    """Read-only: shared by the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared_cache))
        return build(RuntimeSpec(python=PYTHON, patches=[]))


@pytest.fixture
def new_cache(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes and selects an empty cache that holds the wheel only."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        place = folder / "ddtree-ops" / "wheels" / wheel.parent.name / wheel.name
        place.parent.mkdir(parents=True)
        os.link(wheel, place)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        return folder

    return make


@pytest.fixture
def cache(new_cache: Callable[[str], Path]) -> Path:
    return new_cache("cache")


@pytest.fixture(scope="session")
def patched_source(patched: Bundle) -> str:
    return (patched.root / RUNNER_PATH).read_text()


@pytest.fixture(scope="session")
def pristine_source(pristine: Bundle) -> str:
    return (pristine.root / RUNNER_PATH).read_text()


@pytest.fixture
def small_tree(tmp_path: Path, pristine: Bundle) -> Path:
    """A checkout of a few files: ``python/sglang/...``, pristine."""
    root = tmp_path / "checkout"
    for path in (RUNNER_PATH, "sglang/version.py", "sglang/srt/speculative/spec_info.py"):
        place = root / "python" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((pristine.root / path).read_bytes())
    return root
