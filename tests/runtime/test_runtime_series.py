"""Patches applied with git: all or nothing, named precisely, whatever lies around."""

from __future__ import annotations

import ast
import difflib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_ops.errors import BuildError, PatchError
from ddtree_ops.runtime import PatchFile, apply_series, load_description
from ddtree_ops.runtime.series import Content, peel_series
from ddtree_ops.sizing import RUNNER_PATH

OLD = "sglang/a.py"
LINES = [f"line {number}" for number in range(1, 31)]


def patch_of(name: str, before: list[str], after: list[str], path: str = OLD) -> PatchFile:
    body = "\n".join(difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm=""))
    return PatchFile(name, f"Subject: [PATCH] test\n\ndiff --git a/{path} b/{path}\n{body}\n".encode())


def changed(lines: list[str], number: int, text: str) -> list[str]:
    return [*lines[: number - 1], text, *lines[number:]]


def reader(lines: list[str], path: str = OLD) -> Callable[[str], Content | None]:
    files = {path: Content(("\n".join(lines) + "\n").encode())}
    return files.get


@pytest.fixture(scope="module")
def fix() -> PatchFile:
    return load_description("sglang-0.5.11").patches[0]


ONE = changed(LINES, 10, "ten")
TWO = changed(ONE, 10, "TEN")
FIRST, SECOND = patch_of("0001-a.patch", LINES, ONE), patch_of("0002-b.patch", ONE, TWO)


def test_the_real_patch_changes_only_the_intended_lines(pristine_source: str, patched_source: str) -> None:
    ast.parse(patched_source)
    diff = list(
        difflib.unified_diff(pristine_source.splitlines(), patched_source.splitlines(), lineterm="", n=0)
    )
    removed = [line[1:].strip() for line in diff if line.startswith("-") and not line.startswith("---")]
    added = [line[1:].strip() for line in diff if line.startswith("+") and not line.startswith("+++")]
    assert removed == ["draft_token_num=self.model_runner.server_args.speculative_num_draft_tokens,"]
    assert len(added) == 14 and added[-1] == "draft_token_num=self.num_tokens_per_bs,"
    assert [line for line in diff if line.startswith("@@")] == ["@@ -630,0 +631,13 @@", "@@ -1401 +1414 @@"]


def test_a_series_is_applied_in_order_and_recognised_when_it_is_in() -> None:
    changes, applied = apply_series(reader(LINES), [FIRST, SECOND])
    content = changes[OLD]
    assert content is not None and content.data.decode().splitlines() == TWO
    assert [one.already for one in applied] == [False, False]
    for base, already in ((ONE, [True, False]), (TWO, [True, True])):
        changes, applied = apply_series(reader(base), [FIRST, SECOND])
        content = changes[OLD]
        assert content is not None and content.data.decode().splitlines() == TWO
        assert [one.already for one in applied] == already


def test_patches_are_taken_out_again() -> None:
    for base, names in ((LINES, ()), (ONE, ("0001-a.patch",)), (TWO, ("0001-a.patch", "0002-b.patch"))):
        contents, found = peel_series(reader(base), [FIRST, SECOND])
        content = contents[OLD]
        assert found == names
        assert content is not None and content.data.decode().splitlines() == LINES


def test_a_hunk_that_does_not_fit_names_patch_file_and_line(fix: PatchFile, pristine_source: str) -> None:
    other = pristine_source.replace(
        "            self.num_tokens_per_bs = self.speculative_num_draft_tokens\n", "            pass\n"
    )
    with pytest.raises(PatchError) as caught:
        apply_series({RUNNER_PATH: Content(other.encode())}.get, [fix])
    assert caught.value.message == f"{fix.name} does not fit {RUNNER_PATH} at line 628"
    assert any(
        "self.num_tokens_per_bs = self.speculative_num_draft_tokens" in line for line in caught.value.details
    )
    assert caught.value.state == "nothing was written"


def test_the_second_hunk_failing_leaves_the_first_out(
    fix: PatchFile, pristine_source: str, tmp_path: Path
) -> None:
    other = pristine_source.replace(
        "draft_token_num=self.model_runner.server_args", "draft_token_num=self.args"
    )
    place = tmp_path / RUNNER_PATH
    place.parent.mkdir(parents=True)
    place.write_text(other)
    with pytest.raises(PatchError, match="at line 1398"):
        apply_series(lambda path: Content((tmp_path / path).read_bytes()), [fix])
    assert place.read_text() == other and len(list(tmp_path.rglob("*.py"))) == 1


def test_a_later_patch_that_does_not_fit_is_the_one_named() -> None:
    third = patch_of("0003-c.patch", changed(LINES, 20, "else"), LINES)
    with pytest.raises(PatchError, match=r"0003-c\.patch does not fit sglang/a\.py at line 17"):
        apply_series(reader(LINES), [FIRST, third])


def test_a_missing_file_is_named(fix: PatchFile) -> None:
    with pytest.raises(PatchError, match=f"there is no {RUNNER_PATH}"):
        apply_series(lambda _: None, [fix])


def test_a_damaged_patch_is_named_with_its_line() -> None:
    cut = PatchFile("0001-cut.patch", FIRST.content.rsplit(b"\n", 3)[0] + b"\n")
    with pytest.raises(PatchError, match=r"0001-cut\.patch is damaged at line \d+ of the patch"):
        apply_series(reader(LINES), [cut])


def test_new_and_removed_files() -> None:
    made = PatchFile(
        "0001-new.patch",
        b"diff --git a/sglang/run b/sglang/run\nnew file mode 100755\n--- /dev/null\n+++ b/sglang/run\n@@ -0,0 +1 @@\n+x\n",
    )
    changes, _ = apply_series(lambda _: None, [made])
    assert changes == {"sglang/run": Content(b"x\n", executable=True)}
    contents, names = peel_series(changes.get, [made])
    assert contents == {"sglang/run": None} and names == ("0001-new.patch",)


def test_a_symbolic_link_is_refused() -> None:
    link = PatchFile(
        "0001-link.patch",
        b"diff --git a/sglang/l b/sglang/l\nnew file mode 120000\n--- /dev/null\n+++ b/sglang/l\n@@ -0,0 +1 @@\n"
        b"+/etc/passwd\n\\ No newline at end of file\n",
    )
    with pytest.raises(PatchError, match="symbolic link"):
        apply_series(lambda _: None, [link])


def test_a_path_outside_is_refused(tmp_path: Path) -> None:
    out = PatchFile(
        "0001-out.patch",
        b"diff --git a/../../out b/../../out\nnew file mode 100644\n--- /dev/null\n+++ b/../../out\n@@ -0,0 +1 @@\n+x\n",
    )
    with pytest.raises(PatchError):
        apply_series(lambda _: None, [out])


def test_a_surrounding_repository_and_its_settings_have_no_say(
    fix: PatchFile, pristine_source: str, patched_source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for setting in ("apply.whitespace=error-all", "core.autocrlf=true", "apply.ignoreWhitespace=change"):
        subprocess.run(["git", "-C", str(tmp_path), "config", *setting.split("=")], check=True)
    inner = tmp_path / "tmp"
    inner.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(inner))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "apply.whitespace")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "fix")
    changes, _ = apply_series({RUNNER_PATH: Content(pristine_source.encode())}.get, [fix])
    content = changes[RUNNER_PATH]
    assert content is not None and content.data.decode() == patched_source
    assert not list(inner.iterdir())


def test_without_git_the_package_to_install_is_named(
    fix: PatchFile, pristine_source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="git is needed") as caught:
        apply_series({RUNNER_PATH: Content(pristine_source.encode())}.get, [fix])
    assert caught.value.hint == "apt-get install git"
