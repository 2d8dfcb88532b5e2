"""One download of the real wheel and one build of it a session; where the real one is not the point, small ones."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ddtree_ops.inventory.models import RuntimeSpec
from ddtree_ops.runtime import Bundle, build, fetch_wheel, load_description
from ddtree_ops.sizing import RUNNER_PATH

PYTHON = "cp312"


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def wheel(shared_cache: Path) -> Path:
    """The real one, fetched through pip."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared_cache))
        return fetch_wheel(load_description("sglang-0.5.11").base, PYTHON)


@pytest.fixture(scope="session")
def patched(shared_cache: Path, wheel: Path) -> Bundle:
    """Of the real wheel. Read-only: shared by the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared_cache))
        return build(RuntimeSpec(python=PYTHON))


@pytest.fixture
def new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes and selects an empty cache."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        return folder

    return make


@pytest.fixture
def cache(new_cache: Callable[[str], Path]) -> Path:
    return new_cache("cache")


@pytest.fixture
def cache_with_wheel(cache: Path, wheel: Path) -> Path:
    place = cache / "ddtree-ops" / "wheels" / wheel.parent.name / wheel.name
    place.parent.mkdir(parents=True)
    os.link(wheel, place)
    return cache


@pytest.fixture(scope="session")
def patched_source(patched: Bundle) -> str:
    return (patched.root / RUNNER_PATH).read_text()


@pytest.fixture(scope="session")
def pristine_files(wheel: Path) -> dict[str, bytes]:
    """A few files of the real wheel."""
    names = (RUNNER_PATH, "sglang/version.py", "sglang/srt/speculative/spec_info.py")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in names}


@pytest.fixture(scope="session")
def pristine_source(pristine_files: Mapping[str, bytes]) -> str:
    return pristine_files[RUNNER_PATH].decode()


@pytest.fixture
def small_tree(tmp_path: Path, pristine_files: Mapping[str, bytes]) -> Path:
    """A checkout of a few files: ``python/sglang/...``, pristine."""
    root = tmp_path / "checkout"
    for path, content in pristine_files.items():
        place = root / "python" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return root


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[..., Path]:
    """Writes a small wheel whose RECORD agrees with its files, unless another RECORD is given."""

    def make(files: Mapping[str, str], record: str | None = None) -> Path:
        path = tmp_path / "sglang-0.5.11-cp312-cp312-manylinux_2_34_x86_64.whl"
        info = "sglang-0.5.11.dist-info"
        described = {
            f"{info}/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.11\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: false\n"
            "Tag: cp312-cp312-manylinux_2_34_x86_64\n",
        }
        rows = ""
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in {**files, **described}.items():
                digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
                rows += f"{name},sha256={digest.decode()},{len(text.encode())}\n"
                archive.writestr(name, text)
            archive.writestr(f"{info}/RECORD", rows if record is None else record)
        return path

    return make
