"""Bundles: same input same digest, nothing half built, damage found."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import BuildError, PatchError
from ddtree_ops.inventory.models import RuntimeSpec
from ddtree_ops.paths import shipped
from ddtree_ops.remote.files import FileEntry, scan_tree
from ddtree_ops.runtime import (
    Bundle,
    build,
    check_path,
    compare,
    known_bundle,
    open_bundle,
    vendor,
    verify_bundle,
)
from ddtree_ops.runtime import bundle as bundle_module
from ddtree_ops.runtime.bundle import digest_of
from ddtree_ops.sizing import RUNNER_PATH

PATCH = "0001-cuda-graph-runner-size-target-verify-by-tree-budget.patch"


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


def test_the_bundle_is_the_package_and_its_dist_info(patched: Bundle, wheel: Path) -> None:
    assert patched.root.is_dir() and len(patched.digest) == 64
    assert {entry.path.partition("/")[0] for entry in patched.files} == {
        "ddtree_sglang",
        "ddtree_sglang-0.1.0.dist-info",
        "sglang",
        "sglang-0.5.11.dist-info",
    }
    assert sum(entry.path.startswith("sglang/") for entry in patched.files) == 2529
    assert patched.patches == (PATCH,)
    assert patched.name == "sglang-0.5.11" and patched.base.startswith(
        "sglang==0.5.11 cp312 wheel 0cdf73e8d463"
    )
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("sglang") and name[-1] != "/"}
        hashes = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}
    ours = [e for e in patched.files if not e.path.startswith("ddtree_sglang")]
    assert [e.path for e in ours] == sorted(names)
    assert [e.path for e in ours if e.sha256 != hashes[e.path]] == [RUNNER_PATH]
    assert scan_tree(patched.root) == patched.files
    assert verify_bundle(patched) == ()


def test_digest_and_manifest_hold_the_files_and_nothing_else(patched: Bundle) -> None:
    recorded = json.loads(patched.manifest)
    assert set(recorded) == {"schema", "digest", "files"} and recorded["digest"] == patched.digest
    again = json.dumps(recorded, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert again == patched.manifest == (patched.root.parent / "manifest.json").read_bytes()
    rows = [[file["path"], file["mode"], file["size"], file["sha256"]] for file in recorded["files"]]
    text = json.dumps(rows, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == patched.digest
    described = patched.to_json()
    assert described["files"] == len(patched.files)
    assert described["base"]["sha256"].startswith("0cdf73e8d463") and described["base"]["version"] == "0.5.11"
    assert [patch["name"] for patch in described["patches"]] == [PATCH]


def test_same_input_same_digest_whatever_umask_time_zone_and_locale(
    new_cache: Callable[[str], Path],
    umask: Callable[[int], int],
    make_wheel: Callable[..., Path],
    pristine_source: str,
) -> None:
    own = make_wheel({RUNNER_PATH: pristine_source, "sglang/é.py": "", "sglang/Z.py": "", "sglang/a.py": ""})
    new_cache("loose")
    umask(0o000)
    here = build(RuntimeSpec(base=str(own)))
    program = (
        "import sys; from ddtree_ops.runtime import build; from ddtree_ops.inventory.models import RuntimeSpec\n"
        "sys.stdout.buffer.write(build(RuntimeSpec(base=sys.argv[1])).manifest)"
    )
    other = {"TZ": "Asia/Tokyo", "LC_ALL": "C", "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "1"}
    umask(0o077)
    there = subprocess.run(
        [sys.executable, "-c", program, str(own)],
        env={**os.environ, **other, "XDG_CACHE_HOME": str(new_cache("tight"))},
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    assert there == here.manifest
    assert {entry.mode for entry in scan_tree(here.root)} == {0o644} and not verify_bundle(here)


def test_one_content_has_one_manifest_and_every_input_its_own_origin(
    new_cache: Callable[[str], Path], small_tree: Path, patched_source: str, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(small_tree, tmp_path / "other"))
    (other / "python" / RUNNER_PATH).write_text(patched_source)
    ours = RuntimeSpec(name="ours", base=str(small_tree))
    theirs = RuntimeSpec(name="theirs", base=str(other), patches=[])
    new_cache("one")
    for _ in range(2):
        first, second = build(ours), build(theirs)
        assert first.digest == second.digest and first.manifest == second.manifest
        assert (first.name, first.base, first.patches) == ("ours", f"tree {small_tree}", (PATCH,))
        assert (second.name, second.base, second.patches) == ("theirs", f"tree {other}", ())
    new_cache("two")
    assert build(theirs).manifest == first.manifest


def test_digest_does_not_depend_on_the_order(patched: Bundle) -> None:
    assert digest_of(tuple(reversed(patched.files))) == patched.digest
    first = patched.files[0]
    assert digest_of((replace(first, mode=first.mode ^ 0o111), *patched.files[1:])) != patched.digest


def test_a_known_input_is_found_without_pip_or_git(
    patched: Bundle, shared_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("zipfile.ZipFile.__init__", None)
    said: list[str] = []
    assert build(RuntimeSpec(python="cp312"), progress=said.append) == patched
    assert said == []


def test_a_cached_bundle_that_lost_a_file_is_built_again(cache: Path, small_tree: Path) -> None:
    first = build(RuntimeSpec(base=str(small_tree)))
    (first.root / RUNNER_PATH).unlink()
    assert [(one.path, one.kind) for one in verify_bundle(first)] == [(RUNNER_PATH, "missing")]
    again = build(RuntimeSpec(base=str(small_tree)))
    assert again.digest == first.digest and verify_bundle(again) == ()


def test_a_bundle_is_known_once_it_was_built_and_while_it_is_whole(cache: Path, small_tree: Path) -> None:
    spec = RuntimeSpec(name="mine", base=str(small_tree))
    assert known_bundle(spec) is None
    built = build(spec)
    assert known_bundle(spec) == built and built.name == "mine"
    (built.root / RUNNER_PATH).unlink()
    assert known_bundle(spec) is None


def test_what_build_will_refuse_is_not_known(cache: Path, tmp_path: Path) -> None:
    assert known_bundle(RuntimeSpec(description=str(tmp_path / "none"))) is None
    assert known_bundle(RuntimeSpec(base=str(tmp_path / "none"))) is None


def test_no_leftovers_of_staging(cache: Path, small_tree: Path) -> None:
    built = build(RuntimeSpec(base=str(small_tree)))
    assert sorted(path.name for path in (cache / "ddtree-ops" / "bundles").iterdir()) == sorted(
        [built.digest, "index"]
    )


def test_what_killed_builds_left_goes_after_an_hour(cache: Path, small_tree: Path) -> None:
    for name, age in ((".staging-old", 4000), (".staging-new", 10)):
        left = cache / "ddtree-ops/bundles" / name
        (left / "tree").mkdir(parents=True)
        os.utime(left, (time.time() - age,) * 2)
    build(RuntimeSpec(base=str(small_tree)))
    assert [path.name for path in (cache / "ddtree-ops/bundles").glob(".*")] == [".staging-new"]


def test_builds_at_the_same_time_agree_even_over_a_damaged_bundle(
    cache: Path, small_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RuntimeSpec(base=str(small_tree))
    first = build(spec)
    (first.root / RUNNER_PATH).unlink()
    judge = bundle_module._is_whole

    def slowly(*arguments: Any) -> bool:
        whole = judge(*arguments)
        time.sleep(0.1)
        return whole

    monkeypatch.setattr(bundle_module, "_is_whole", slowly)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(build, [spec] * 3))
    assert [one.digest for one in found] == [first.digest] * 3 and verify_bundle(first) == ()


def test_a_cache_that_cannot_be_written_is_explained(cache: Path, small_tree: Path) -> None:
    (cache / "ddtree-ops").write_text("in the way")
    with pytest.raises(BuildError, match=r"/cache/ddtree-ops.*: (Not a directory|File exists)") as caught:
        build(RuntimeSpec(base=str(small_tree)))
    assert caught.value.state == "nothing was built" and "cache directory" in caught.value.hint


def test_a_series_that_does_not_fit_keeps_nothing(cache: Path, tmp_path: Path, small_tree: Path) -> None:
    runner = small_tree / "python" / RUNNER_PATH
    runner.write_text(runner.read_text().replace("self.speculative_num_draft_tokens\n", "eight\n"))
    before = scan_tree(small_tree)
    with pytest.raises(PatchError, match=rf"{PATCH} does not fit {RUNNER_PATH} at line 628"):
        build(RuntimeSpec(base=str(small_tree)))
    assert scan_tree(small_tree) == before
    assert not list((cache / "ddtree-ops").glob("bundles/*"))


def test_a_wrong_pristine_hash_is_found(cache_with_wheel: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(shipped("patches") / "sglang-0.5.11", tmp_path / "own"))
    text = (own / "runtime.yaml").read_text()
    (own / "runtime.yaml").write_text(text.replace("a686e17b", "a686e17c"))
    with pytest.raises(BuildError, match=r"is not the one that runtime .* calls pristine"):
        build(RuntimeSpec(python="cp312", description=str(own)))


class TestOwnBase:
    def test_a_checkout(self, cache: Path, small_tree: Path, patched_source: str) -> None:
        (small_tree / "python/sglang/__pycache__").mkdir()
        (small_tree / "python/sglang/__pycache__/x.pyc").write_bytes(b"x")
        (small_tree / "python/other").mkdir()
        (small_tree / "python/other/x.py").write_text("")
        built = build(RuntimeSpec(name="mine", base=str(small_tree)))
        assert sorted(entry.path for entry in built.files) == sorted(
            ["sglang/version.py", "sglang/srt/speculative/spec_info.py", RUNNER_PATH]
        )
        assert (built.root / RUNNER_PATH).read_text() == patched_source
        assert built.name == "mine" and built.base == f"tree {small_tree}"

    def test_an_edit_makes_another_bundle_even_with_its_old_time(self, cache: Path, small_tree: Path) -> None:
        first = build(RuntimeSpec(base=str(small_tree)))
        file = small_tree / "python/sglang/version.py"
        times = file.stat()
        content = file.read_bytes()
        file.write_bytes(content[:-1] + b"#")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        second = build(RuntimeSpec(base=str(small_tree)))
        assert first.digest != second.digest
        file.write_bytes(content)
        assert build(RuntimeSpec(base=str(small_tree))).digest == first.digest

    def test_a_tree_that_has_the_patch_already(
        self, cache: Path, small_tree: Path, patched_source: str
    ) -> None:
        wanted = build(RuntimeSpec(base=str(small_tree)))
        (small_tree / "python" / RUNNER_PATH).write_text(patched_source)
        assert build(RuntimeSpec(base=str(small_tree))).digest == wanted.digest

    def test_a_wheel(
        self, cache: Path, make_wheel: Callable[..., Path], pristine_source: str, patched_source: str
    ) -> None:
        own = make_wheel({RUNNER_PATH: pristine_source, "other/x.py": ""})
        built = build(RuntimeSpec(base=str(own)))
        assert built.base.startswith(own.name) and (built.root / RUNNER_PATH).read_text() == patched_source
        assert not (built.root / "other").exists()
        with zipfile.ZipFile(own) as archive:
            archive.extractall(cache / "unpacked")
        unpacked = build(RuntimeSpec(base=str(cache / "unpacked")))
        assert (unpacked.digest, unpacked.manifest) == (built.digest, built.manifest)

    @pytest.mark.parametrize("kind", ["absent", "empty", "text"])
    def test_nothing_of_sglang(self, cache: Path, tmp_path: Path, kind: str) -> None:
        path = tmp_path / {"absent": "a", "empty": "e", "text": "t.whl"}[kind]
        if kind == "empty":
            path.mkdir()
        if kind == "text":
            path.write_text("no zip")
        with pytest.raises(BuildError, match=r"no such file|holds no sglang|not a readable wheel"):
            build(RuntimeSpec(base=str(path)))

    def test_a_wheel_of_another_project(self, cache: Path, tmp_path: Path) -> None:
        path = tmp_path / "other-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other/__init__.py", "")
        with pytest.raises(BuildError, match="holds no sglang"):
            build(RuntimeSpec(base=str(path), patches=[]))

    def test_a_symbolic_link_is_refused(self, cache: Path, small_tree: Path) -> None:
        (small_tree / "python/sglang/link.py").symlink_to("version.py")
        with pytest.raises(BuildError, match=r"link\.py is not a plain file"):
            build(RuntimeSpec(base=str(small_tree)))


class TestVerify:
    def test_every_kind_of_difference(self, cache: Path, small_tree: Path) -> None:
        built = build(RuntimeSpec(base=str(small_tree)))
        (built.root / "sglang/version.py").write_text("# edited\n")
        (built.root / RUNNER_PATH).chmod(0o755)
        (built.root / "sglang/srt/speculative/spec_info.py").unlink()
        (built.root / "sglang/extra.py").write_text("")
        assert [(one.path, one.kind) for one in verify_bundle(built)] == [
            ("sglang/extra.py", "extra"),
            (RUNNER_PATH, "mode"),
            ("sglang/srt/speculative/spec_info.py", "missing"),
            ("sglang/version.py", "changed"),
        ]

    def test_a_read_only_release_with_its_manifest_is_no_difference(self, patched: Bundle) -> None:
        there = [replace(entry, mode=entry.mode & 0o555) for entry in patched.files]
        assert compare(patched.files, [*there, FileEntry("manifest.json", 0o444, 1, "0" * 64)]) == ()

    def test_a_tree_that_is_gone(self, cache: Path, small_tree: Path) -> None:
        built = build(RuntimeSpec(base=str(small_tree)))
        shutil.rmtree(built.root)
        with pytest.raises(BuildError, match="gone"):
            verify_bundle(built)

    @pytest.mark.parametrize(
        ("old", "new"),
        [(b'"size":', b'"size":1'), (b'"schema":2', b'"schema":9'), (b"{", b"["), (b'"files"', b'"f"')],
    )
    def test_a_damaged_manifest_is_refused(
        self, cache: Path, small_tree: Path, old: bytes, new: bytes
    ) -> None:
        folder = build(RuntimeSpec(base=str(small_tree))).root.parent
        manifest = folder / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(old, new, 1))
        with pytest.raises(BuildError, match="is damaged"):
            open_bundle(folder)

    @pytest.mark.parametrize("path", ["../x.py", "/etc/x", "sglang/../../x", "sglang//x", "a\nb", "", 7])
    def test_a_manifest_that_points_outside_is_refused(self, tmp_path: Path, path: Any) -> None:
        entry = {"path": path, "mode": 0o644, "size": 1, "sha256": "0" * 64}
        digest = digest_of((FileEntry(**entry),))
        manifest = {"schema": 2, "digest": digest, "files": [entry]}
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(BuildError, match="is not a path inside a tree"):
            open_bundle(tmp_path)

    def test_no_manifest(self, tmp_path: Path) -> None:
        with pytest.raises(BuildError, match="is no bundle"):
            open_bundle(tmp_path)


class TestVendor:
    def git(self, folder: Path, *words: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
        command = ["git", "-C", str(folder), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def test_git_diff_shows_only_the_patched_lines(
        self, cache: Path, small_tree: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "fork"
        folder.mkdir()
        self.git(folder, "init", "-q")
        vendored = vendor(RuntimeSpec(base=str(small_tree), patches=[]), folder)
        assert vendored.root == folder and verify_bundle(vendored) == () and vendored.patches == ()
        self.git(folder, "add", "--all")
        self.git(folder, "commit", "-q", "-m", "pristine")
        vendored = vendor(RuntimeSpec(name="mine", base=str(small_tree)), folder)
        assert verify_bundle(vendored) == ()
        assert (vendored.name, vendored.base, vendored.patches) == ("mine", f"tree {small_tree}", (PATCH,))
        assert self.git(folder, "diff", "--numstat", "--", "sglang") == f"14\t1\t{RUNNER_PATH}\n"
        changed = {RUNNER_PATH, "manifest.json", "origin.json"}
        assert set(self.git(folder, "diff", "--name-only").split()) == changed
        assert self.git(folder, "ls-files", "--others") == ""
        assert check_path(folder).ok

    @pytest.mark.parametrize("before", [False, True])
    @pytest.mark.parametrize("step", [0, 1, 3])
    def test_an_interrupted_run_is_taken_up(
        self, cache: Path, small_tree: Path, tmp_path: Path, before: bool, step: int
    ) -> None:
        folder = tmp_path / "fork"
        if before:
            (small_tree / "python/sglang/gone.py").write_text("")
            vendor(RuntimeSpec(base=str(small_tree), patches=[]), folder)
            (small_tree / "python/sglang/gone.py").unlink()
        (small_tree / "python/sglang/new.py").write_text("")
        spec = RuntimeSpec(base=str(small_tree))
        build(spec)
        replace_file, done = Path.replace, 0

        def interrupted(self: Path, target: Path) -> Path:
            nonlocal done
            if done == step:
                raise KeyboardInterrupt
            done += 1
            return replace_file(self, target)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "replace", interrupted)
            vendor(spec, folder)
        vendored = vendor(spec, folder)
        assert verify_bundle(vendored) == () and not (folder / "sglang/gone.py").exists()
        assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "origin.json", "sglang"]

    def test_files_that_are_no_longer_part_of_it_go_and_others_stay(
        self, cache: Path, small_tree: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "fork"
        extra = small_tree / "python/sglang/old/gone.py"
        extra.parent.mkdir()
        extra.write_text("")
        vendor(RuntimeSpec(base=str(small_tree)), folder)
        (folder / "README.md").write_text("mine")
        shutil.rmtree(extra.parent)
        vendored = vendor(RuntimeSpec(base=str(small_tree)), folder)
        assert not (folder / "sglang/old").exists() and (folder / "README.md").read_text() == "mine"
        assert verify_bundle(vendored) == ()

    def test_a_directory_with_something_else_is_refused(
        self, cache: Path, small_tree: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "full"
        folder.mkdir()
        (folder / "precious").write_text("x")
        with pytest.raises(BuildError, match="was not written by this command"):
            vendor(RuntimeSpec(base=str(small_tree)), folder)
        assert [path.name for path in folder.iterdir()] == ["precious"]

    def test_edits_are_not_overwritten_unless_forced(
        self, cache: Path, small_tree: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "fork"
        vendor(RuntimeSpec(base=str(small_tree), patches=[]), folder)
        (folder / "sglang/version.py").write_text("# mine\n")
        with pytest.raises(BuildError, match=r"1 vendored file .* differ") as caught:
            vendor(RuntimeSpec(base=str(small_tree)), folder)
        assert caught.value.details == ("sglang/version.py: changed",)
        assert (folder / "sglang/version.py").read_text() == "# mine\n"
        vendored = vendor(RuntimeSpec(base=str(small_tree)), folder, force=True)
        assert verify_bundle(vendored) == () and vendored.patches == (PATCH,)


def test_a_vendored_folder_may_be_called_tree(tmp_path: Path, cache: Path, small_tree: Path) -> None:
    spec = RuntimeSpec(name="own", description="sglang-0.5.11", base=str(small_tree), patches=[])
    bundle = vendor(spec, tmp_path / "tree")
    (tmp_path / "tree" / ".git").mkdir()
    (tmp_path / "tree" / ".git" / "HEAD").write_text("ref: refs/heads/main\n", encoding="utf-8")
    assert verify_bundle(open_bundle(tmp_path / "tree")) == ()
    assert bundle.root == tmp_path / "tree"
