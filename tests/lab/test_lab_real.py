"""What a host with the real engine is given, from an environment made up here. The engine itself: make test-real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddtree_ops.cli.app import app
from ddtree_ops.errors import LabError, UsageError
from ddtree_ops.lab import real
from ddtree_ops.lab.furnish import DISTRIBUTIONS
from ddtree_ops.service.layout import Layout

SITE = Path(real.VENV, "lib/python3.11/site-packages")


@pytest.fixture
def made(tmp_path: Path) -> real.Real:
    """An environment with torch 2.13, sglang, and byte code of both."""
    packages = tmp_path / "env/lib/python3.11/site-packages"
    for name in (
        "torch/__init__.py",
        "torch/__pycache__/__init__.cpython-311.pyc",
        "sglang/srt/models/qwen3.py",
    ):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(name)
    for name in ("llama.py", "dflash.py"):
        (packages / "sglang/srt/models" / name).write_text("")
    (packages / "torch/__pycache__/__init__.cpython-311.opt-2.pyc").write_text("")
    for record in ("torch-2.13.0", "sglang-0.5.11", "filelock-4.3.1"):
        (packages / f"{record}.dist-info").mkdir()
    (tmp_path / "env/.ready").write_text("made")
    for name in ("stubs/sitecustomize.py", "models/tiny/config.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "root").mkdir()
    return real.Real(tmp_path / "env", tmp_path / "base", "3.11", tmp_path / "stubs", tmp_path / "models")


def furnished(made: real.Real) -> Path:
    root = made.environment.parent / "root"
    real.furnish_real(root, made)
    return root


def test_the_venv_leads_into_the_environment_and_records_what_sglang_pins(made: real.Real) -> None:
    site = furnished(made) / SITE
    assert (site / "torch").readlink() == Path("/opt/ddtree-lab/env/lib/python3.11/site-packages/torch")
    records = {path.name for path in site.glob("*.dist-info")}
    assert f"torch-{DISTRIBUTIONS['torch']}.dist-info" in records and "torch-2.13.0.dist-info" not in records
    assert (site / "filelock-4.3.1.dist-info").is_symlink()
    assert (site / "sglang-0.5.11.dist-info").is_symlink(), "drift needs its own record"
    assert (site / "sitecustomize.py").read_text() == "stubs/sitecustomize.py"
    assert '"SGLANG_DISABLED_MODEL_ARCHS", "llama"' in (site / "ddtree_lab.pth").read_text()


def test_the_interpreter_is_that_of_the_environment(made: real.Real) -> None:
    venv = furnished(made) / real.VENV
    assert (venv / "bin/python").readlink() == made.base / "bin/python3.11"
    assert f"home = {made.base}/bin\n" in (venv / "pyvenv.cfg").read_text()
    assert made.binds == ((made.environment, "/opt/ddtree-lab/env"), (made.base, str(made.base)))
    assert len(replace(made, base=Path("/usr")).binds) == 1, "a host has a /usr of its own"


def test_byte_code_lies_where_units_look_for_it(made: real.Real) -> None:
    root = furnished(made)
    cache = Path(Layout("/opt/ddtree-ops", "x.service").pycache)
    kept = root / cache.relative_to("/") / SITE / "torch"
    assert [path.name for path in kept.iterdir()] == ["__init__.cpython-311.pyc"]


def test_a_second_time_changes_nothing(made: real.Real) -> None:
    root = furnished(made)
    before = {path: path.lstat().st_mtime_ns for path in root.rglob("*") if not path.is_dir()}
    furnished(made)
    assert {path: path.lstat().st_mtime_ns for path in root.rglob("*") if not path.is_dir()} == before


def test_what_is_missing_is_named_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_OPS_LAB_REAL", str(tmp_path))
    with pytest.raises(LabError) as caught:
        real.prepare()
    assert str(tmp_path) in caught.value.details[0]
    assert caught.value.hint == "make real"


@pytest.mark.parametrize("words", [["--engine", "vllm"], ["--engine", "sglang", "--hosts", "2"]])
def test_engines_that_cannot_be_had_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        CliRunner().invoke(app, ["lab", "up", *words], catch_exceptions=False)
