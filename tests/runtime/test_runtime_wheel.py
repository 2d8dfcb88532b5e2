"""The base wheel: through pip, by hash, from the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_ops.errors import BuildError
from ddtree_ops.runtime import fetch_wheel, load_description
from ddtree_ops.runtime.description import BaseWheel
from ddtree_ops.runtime.wheel import sha256_of


@pytest.fixture
def pinned() -> BaseWheel:
    return load_description("sglang-0.5.11").base


@pytest.fixture
def local_index(make_wheel: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one wheel, small, of a folder that pip looks into instead of an index; the cache is empty."""
    folder = tmp_path / "links"
    folder.mkdir()
    offered = make_wheel({"sglang/__init__.py": ""}).rename(
        folder / "sglang-0.5.11-cp312-cp312-manylinux_2_34_x86_64.whl"
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return offered


def test_fetched_through_pip_for_another_python(wheel: Path, pinned: BaseWheel) -> None:
    assert wheel.name == "sglang-0.5.11-cp312-cp312-manylinux_2_34_x86_64.whl"
    assert sha256_of(wheel) == pinned.wheels["cp312"] == wheel.parent.name


def test_a_cached_wheel_needs_no_index(
    cache_with_wheel: Path, pinned: BaseWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fetch_wheel(pinned, "cp312").is_relative_to(cache_with_wheel)


def test_a_damaged_cached_wheel_is_fetched_again(
    local_index: Path, pinned: BaseWheel, tmp_path: Path
) -> None:
    sha256 = sha256_of(local_index)
    small = pinned.model_copy(update={"wheels": {"cp312": sha256}})
    cached = tmp_path / "cache/ddtree-ops/wheels" / sha256 / local_index.name
    cached.parent.mkdir(parents=True)
    cached.write_bytes(local_index.read_bytes()[:-1] + b"x")
    said: list[str] = []
    again = fetch_wheel(small, "cp312", progress=said.append)
    assert again == cached and sha256_of(again) == sha256
    assert "damaged" in said[0]


def test_another_hash_is_refused_and_nothing_is_kept(
    local_index: Path, pinned: BaseWheel, tmp_path: Path
) -> None:
    other = pinned.model_copy(update={"wheels": {"cp312": "0" * 64}})
    with pytest.raises(BuildError, match="does not have the pinned sha256") as caught:
        fetch_wheel(other, "cp312")
    assert any("0" * 64 in line for line in caught.value.details)
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_pips_own_error_is_shown_without_its_warnings(local_index: Path, pinned: BaseWheel) -> None:
    with pytest.raises(BuildError, match=r"pip could not fetch sglang==0\.5\.11 for cp311") as caught:
        fetch_wheel(pinned, "cp311")
    text = "\n".join(caught.value.details)
    assert "No matching distribution found" in text and "WARNING" not in text


def test_an_unpinned_tag_is_refused(cache: Path, pinned: BaseWheel) -> None:
    with pytest.raises(BuildError, match=r"no wheel .* is pinned for Python tag cp39") as caught:
        fetch_wheel(pinned, "cp39")
    assert "cp312" in caught.value.hint
