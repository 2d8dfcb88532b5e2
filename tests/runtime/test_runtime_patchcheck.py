"""Telling pristine, patched, partly patched, foreign and leftover diagnostics apart: bundle, tree, wheel, reader."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_ops.errors import BuildError
from ddtree_ops.results import Verdict
from ddtree_ops.runtime import (
    Bundle,
    PatchCheck,
    PatchState,
    check_path,
    check_source,
    load_description,
    patchcheck,
)
from ddtree_ops.runtime.patchcheck import find_leftovers
from ddtree_ops.sizing import RUNNER_PATH

PATCH = "0001-cuda-graph-runner-size-target-verify-by-tree-budget.patch"


def check_text(text: str | None, budget: int | None = 32) -> PatchCheck:
    def read(path: str) -> bytes | None:
        return text.encode() if text is not None and path == RUNNER_PATH else None

    return check_source(read, where="ct200", budget=budget)


def test_the_real_bundle_and_the_real_wheel(patched: Bundle, wheel: Path) -> None:
    found = check_path(patched.root.parent)
    assert found.state is PatchState.PATCHED and found.applied == (PATCH,) and found.absent == ()
    assert found.verdict is Verdict.PASS and found.leftovers == () and found.edited == ()
    assert found.searched == sum(entry.path.endswith(".py") for entry in patched.files)
    assert found.sizing is not None and found.sizing.figures == "33 / 8 / 8 / 1"
    assert found.summary == "patched: sglang 0.5.11 with 0001; sizes 33 / 8 / 8 / 1 (right)"
    stock = check_path(wheel)
    assert stock.state is PatchState.PRISTINE and stock.absent == (PATCH,)
    assert stock.leftovers == () and stock.edited == ()
    assert stock.verdict is Verdict.FAIL and stock.sizing is not None
    assert stock.sizing.figures == "8 / 8 / 8 / 1" and stock.sizing.line == 630
    assert found.sentence == stock.sentence
    assert found.sentence.startswith("The unpatched file gives 8 / 8 / 8 / 1: the target worker's graph")
    assert "The size of tensor a (8) must match the size of tensor b (33)" in found.sentence
    json.dumps(found.to_json())


def test_a_bundle_is_checked_once_and_what_was_found_is_kept_beside_it(
    patched: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = replace(patched, root=tmp_path / patched.digest / "tree")
    bundle.root.parent.mkdir()
    asked = {"description": "sglang-0.5.11", "block_size": 8, "budget": 32}

    def check(**other: int) -> PatchCheck:
        monkeypatch.setattr(patchcheck, "_kept", {})  # as another process
        return patchcheck.check_bundle(bundle, where="ct200", **{**asked, **other})

    with pytest.raises(OSError):
        check()
    bundle.root.symlink_to(patched.root)
    hashes = {entry.path: entry.sha256 for entry in patched.files}
    expected = check_source(patched.read, where="ct200", hashes=hashes, **asked)
    assert expected.overlay is not None and expected.overlay.plugins == ("ddtree",)
    assert check() == expected and expected.state is PatchState.PATCHED
    (kept,) = bundle.root.parent.glob("patch-check-*.json")
    bundle.root.unlink()
    assert check() == expected, "without the files"
    for damage in (b"", b"{", kept.read_bytes().replace(b'"patched"', b'"mended"')):
        kept.write_bytes(damage)
        with pytest.raises(OSError):
            check()
    bundle.root.symlink_to(patched.root)
    assert check() == expected
    assert check(budget=7).sizing != expected.sizing
    assert len([*bundle.root.parent.glob("patch-check-*.json")]) == 2


def test_wheels(make_wheel: Callable[..., Path], patched_source: str, pristine_source: str) -> None:
    assert check_path(make_wheel({RUNNER_PATH: patched_source})).state is PatchState.PATCHED
    log = 'x = 1\nlog("DFLASH_DIAG x", x)\n'
    left = check_path(make_wheel({RUNNER_PATH: pristine_source, "sglang/other.py": log}))
    assert left.state is PatchState.PRISTINE
    assert [str(one) for one in left.leftovers] == ['sglang/other.py:2: log("DFLASH_DIAG x", x)']


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("DFLASH_DIAG: idx=", 1),
        ("_DFLASH_DIAG = True", 1),
        ("if DFLASH_DIAG_ON:", 1),
        ("os.environ['SGLANG_DFLASH_DIAG']", 1),
        ("b_A_diag = k_diag", 0),
        ("DFLASH_DIAGONAL = 1", 0),
    ],
)
def test_names_of_diagnostics(line: str, found: int) -> None:
    assert len(find_leftovers("sglang/a.py", f"# first\n{line}\n".encode())) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *(
            (f"cuda_graph_runner.py{end}", 1)
            for end in (".bak", ".bak.1", ".bak-20260101", ".orig", "~", ".rej")
        ),
        *((name, 0) for name in ("backup.py", "old.py", "bak.json", "x.orig.py", "save")),
    ],
)
def test_names_of_debris(small_tree: Path, name: str, found: int) -> None:
    (small_tree / "python/sglang" / name).write_text("")
    assert [one.path for one in check_path(small_tree).leftovers] == [f"sglang/{name}"] * found


def test_a_tree_of_links_and_odd_things_is_looked_at_all_the_same(small_tree: Path) -> None:
    package = small_tree / "python/sglang"
    real = (small_tree / "python" / RUNNER_PATH).rename(small_tree / "runner.py")
    (small_tree / "python" / RUNNER_PATH).symlink_to(real)
    (package / "nowhere").symlink_to("/nonexistent")
    (package / "round").symlink_to(package)
    os.mkfifo(package / "pipe")
    (package / os.fsdecode(b"\xff.py")).write_text("DFLASH_DIAG")
    found = check_path(small_tree)
    assert found.state is PatchState.PRISTINE and len(found.leftovers) == 1
    (small_tree / "python" / RUNNER_PATH).unlink()
    (small_tree / "python" / RUNNER_PATH).mkdir()
    assert check_path(small_tree).state is PatchState.MISSING


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        ("sglang/other.py,,", ()),
        ("sglang/other.py,sha512=abc,1", ()),
        ("sglang/other.py,sha256=###,1", ()),
        ("sglang/other.py,sha256=é,1", ()),
        (f"sglang/other.py,sha256={'A' * 43},1", ("changed",)),
        ("sglang/gone.py,,\nsglang/other.py,,", ("missing",)),
        ("", ("extra",)),
        (f"sglang/other.py,{'A' * 200_000},1", None),
    ],
)
def test_any_record_is_read(
    make_wheel: Callable[..., Path], pristine_source: str, row: str, kinds: tuple[str, ...] | None
) -> None:
    own = make_wheel({RUNNER_PATH: pristine_source, "sglang/other.py": ""}, record=row + "\n")
    found = check_path(own)
    assert (found.edited if found.edited is None else tuple(one.kind for one in found.edited)) == kinds
    assert ("; 1 other file is not as in the tree's RECORD: sglang/" in found.summary) == bool(kinds)


def test_a_byte_order_mark_does_not_hide_the_sizes(pristine_source: str) -> None:
    found = check_text("\ufeff" + pristine_source)
    assert found.state is PatchState.FOREIGN and found.sizing is not None
    assert found.sizing.figures == "8 / 8 / 8 / 1"


def test_a_tree_smaller_than_the_block_fails_the_same_way(pristine_source: str) -> None:
    sentence = check_text(pristine_source, budget=4).sentence
    assert "is sent 5; the first request ends in" in sentence and "a (8) must match" in sentence


@pytest.mark.parametrize("place", ["", "python", "python/sglang"])
def test_a_checkout_from_wherever_one_stands(small_tree: Path, patched_source: str, place: str) -> None:
    assert check_path(small_tree / place).state is PatchState.PRISTINE
    (small_tree / "python" / RUNNER_PATH).write_text(patched_source)
    found = check_path(small_tree / place)
    assert found.state is PatchState.PATCHED and found.ok and found.edited is None


def test_a_foreign_file(small_tree: Path, pristine_source: str) -> None:
    (small_tree / "python" / RUNNER_PATH).write_text(pristine_source + "# mine\n")
    found = check_path(small_tree)
    assert found.state is PatchState.FOREIGN and found.applied == () and found.unpatched is None
    assert found.verdict is Verdict.FAIL and found.sentence == ""


def test_somebody_elses_fix_is_foreign_but_its_sizes_are_proved(pristine_source: str) -> None:
    line = "            self.num_tokens_per_bs = self.speculative_num_draft_tokens\n"
    own = line + (
        "            if model_runner.spec_algorithm.is_ddtree() and not model_runner.is_draft_worker:\n"
        "                self.num_tokens_per_bs = model_runner.server_args.speculative_ddtree_budget + 1\n"
    )
    found = check_text(pristine_source.replace(line, own))
    assert found.state is PatchState.FOREIGN and found.sizing is not None and found.sizing.ok
    assert found.verdict is Verdict.INCONCLUSIVE


def test_patched_and_edited_besides(patched_source: str) -> None:
    found = check_text(patched_source + '\nlogger.info("DFLASH_DIAG")\n')
    assert found.state is PatchState.FOREIGN and found.applied == (PATCH,)
    assert found.verdict is Verdict.FAIL
    assert [(one.path, one.text) for one in found.leftovers] == [(RUNNER_PATH, 'logger.info("DFLASH_DIAG")')]
    assert found.leftovers[0].line == len(patched_source.splitlines()) + 2
    assert "1 leftover diagnostic, the first at" in found.summary
    assert found.unpatched is not None and found.unpatched.figures == "8 / 8 / 8 / 1"


def test_only_one_of_the_two_hunks_is_foreign(patched_source: str) -> None:
    half = patched_source.replace(
        "draft_token_num=self.num_tokens_per_bs,\n                custom_mask",
        "draft_token_num=self.model_runner.server_args.speculative_num_draft_tokens,\n                custom_mask",
    )
    assert half != patched_source
    found = check_text(half)
    assert found.state is PatchState.FOREIGN and found.verdict is Verdict.INCONCLUSIVE


def test_partly_patched(patched_source: str) -> None:
    known = load_description("sglang-0.5.11")
    second = replace(
        known.patches[0],
        name="0002-more.patch",
        content=b"diff --git a/sglang/more.py b/sglang/more.py\nnew file mode 100644\n--- /dev/null\n"
        b"+++ b/sglang/more.py\n@@ -0,0 +1 @@\n+x\n",
    )
    series = replace(known, patches=(*known.patches, second))
    files = {RUNNER_PATH: patched_source.encode()}
    found = check_source(files.get, description=series)
    assert found.state is PatchState.PARTLY
    assert (found.applied, found.absent) == ((PATCH,), ("0002-more.patch",))
    assert "0001 is in, 0002 is not" in found.summary
    files["sglang/more.py"] = b"x\n"
    assert check_source(files.get, description=series).state is PatchState.PATCHED


def test_no_data_is_no_pass() -> None:
    found = check_text(None)
    assert found.state is PatchState.MISSING and found.verdict is Verdict.INCONCLUSIVE
    assert found.searched == 0 and found.files == {RUNNER_PATH: ""}
    assert found.summary == f"{RUNNER_PATH}: not there"


def test_a_remote_file_costs_one_read(patched_source: str) -> None:
    asked: list[str] = []

    def read(path: str) -> bytes:
        asked.append(path)
        return patched_source.encode()

    assert check_source(read).ok and asked == [RUNNER_PATH]


def test_without_ddtree_the_stock_file_is_right(pristine_source: str, patched_source: str) -> None:
    for text in (pristine_source, patched_source):
        found = check_text(text, budget=None)
        assert found.verdict is Verdict.PASS
        assert found.sentence == "The unpatched file gives 8 / 1, which is right as well."


def test_a_file_that_cannot_be_sized_says_why() -> None:
    found = check_text("class CudaGraphRunner: pass\n")
    assert found.sizing is None and "no CudaGraphRunner.__init__" in found.sizing_error
    assert found.verdict is Verdict.INCONCLUSIVE and "no CudaGraphRunner.__init__" in found.summary


def test_edits_elsewhere_and_debris_are_told(
    tmp_path: Path, make_wheel: Callable[..., Path], patched_source: str
) -> None:
    with zipfile.ZipFile(make_wheel({RUNNER_PATH: patched_source, "sglang/other.py": "x = 1\n"})) as archive:
        archive.extractall(tmp_path / "site-packages")
    tree = tmp_path / "site-packages"
    assert check_path(tree).edited == ()
    (tree / "sglang/other.py").write_text("x = 2\n")
    (tree / "sglang/new.py").write_text("")
    (tree / "sglang/other.py.orig").write_text("")
    found = check_path(tree)
    assert found.state is PatchState.PATCHED and found.edited is not None
    assert {(one.path, one.kind) for one in found.edited} == {
        ("sglang/new.py", "extra"),
        ("sglang/other.py", "changed"),
        ("sglang/other.py.orig", "extra"),
    }
    assert [str(one) for one in found.leftovers] == ["sglang/other.py.orig: left by an editor or by patch"]
    assert found.verdict is Verdict.FAIL


def test_a_place_without_sglang(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="holds no sglang"):
        check_path(tmp_path)
    with pytest.raises(BuildError, match="no such file"):
        check_path(tmp_path / "nothing")
