"""Runtime descriptions: the shipped one, and what is said of wrong ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddtree_ops.errors import ConfigError, ExitCode
from ddtree_ops.paths import shipped
from ddtree_ops.runtime import list_descriptions, load_description

PATCH = "0001-cuda-graph-runner-size-target-verify-by-tree-budget.patch"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A writable copy of the shipped description."""
    return Path(shutil.copytree(shipped("patches") / "sglang-0.5.11", tmp_path / "mine"))


def edit(own: Path, old: str, new: str) -> None:
    text = (own / "runtime.yaml").read_text()
    assert old in text
    (own / "runtime.yaml").write_text(text.replace(old, new))


def problems(own: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_description(own)
    assert caught.value.exit_code is ExitCode.CONFIG
    return "\n".join(caught.value.details)


def test_shipped_description() -> None:
    assert "sglang-0.5.11" in list_descriptions()
    found = load_description("sglang-0.5.11")
    assert found.base.requirement == "sglang==0.5.11" and found.base.version == "0.5.11"
    assert {"cp311", "cp312"} <= set(found.base.wheels)
    assert [patch.name for patch in found.patches] == [PATCH]
    assert found.patches[0].files == ("sglang/srt/model_executor/cuda_graph_runner.py",)


def test_header_says_symptom_cause_reason_and_limits() -> None:
    patch = load_description("sglang-0.5.11").patches[0]
    assert patch.subject == "cuda graph runner: size target-verify by the tree budget"
    for part in ("Symptom.", "Cause.", "Why this is right.", "What this does not cover."):
        assert part in patch.message
    assert "diff --git" not in patch.message and "---" not in patch.message.splitlines()


def test_found_by_name_directory_and_file(own: Path) -> None:
    shipped_one = load_description("sglang-0.5.11")
    for given in (own, own / "runtime.yaml", str(own)):
        assert [patch.sha256 for patch in load_description(given).patches] == [
            patch.sha256 for patch in shipped_one.patches
        ]


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'sglang-0\.5\.11'"):
        load_description("sglang-0.5.1")


def test_unknown_key_names_file_line_and_nearest_key(own: Path) -> None:
    edit(own, "\npristine:", "\npristin:")
    text = problems(own)
    assert "runtime.yaml:19: pristin: unknown key (did you mean 'pristine'?)" in text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (PATCH, "0002-nothing.patch", "0002-nothing.patch: No such file"),
        ("sglang==0.5.11", "sglang>=0.5", "base.requirement"),
        ("cp312: 0cdf", "cp312: 0cdg", "base.wheels.cp312"),
        ("cp312:", "py312:", "base.wheels"),
        (f"  - {PATCH}\n", f"  - {PATCH}\n  - {PATCH}\n", "listed twice"),
        ("sglang/srt/model_executor/cuda_graph_runner.py:", "sglang/srt/other.py:", "has no sha256 for"),
        ("sglang/srt/model_executor/cuda_graph_runner.py:", "sglang/../x.py:", "not a plain path"),
    ],
)
def test_what_is_wrong_is_named(own: Path, old: str, new: str, said: str) -> None:
    edit(own, old, new)
    text = problems(own)
    assert said in text and "runtime.yaml:" in text


def test_a_patch_may_not_leave_the_package(own: Path) -> None:
    patch = own / PATCH
    patch.write_text(patch.read_text().replace("sglang/srt", "torch/srt"))
    assert "outside sglang/" in problems(own)


def test_a_text_that_is_no_patch_is_refused(own: Path) -> None:
    (own / PATCH).write_text("not a patch\n")
    assert "is not a git patch" in problems(own)


def test_patches_are_chosen_by_name_stem_or_number() -> None:
    found = load_description("sglang-0.5.11")
    for name in (PATCH, PATCH.removesuffix(".patch"), "0001"):
        assert [patch.name for patch in found.select([name])] == [PATCH]
    assert found.select(None) == found.patches and found.select([]) == ()
    with pytest.raises(ConfigError, match="has no patch 0002"):
        found.select(["0002"])
