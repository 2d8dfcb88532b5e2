"""The overlay: what a bundle holds of it, when it is left out, and what is told of it in a tree."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.deploy.preflight.pins import pins_of
from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.models import RuntimeSpec
from ddtree_ops.launchflags import ARGS_PATH
from ddtree_ops.paths import shipped
from ddtree_ops.results import Verdict
from ddtree_ops.runtime import (
    Bundle,
    OverlayState,
    PatchState,
    build,
    check_bundle,
    check_path,
    check_source,
    known_bundle,
    load_description,
    open_bundle,
    patchcheck,
    plugin_named,
    plugins_of,
    vendor,
    verify_bundle,
)
from ddtree_ops.sizing import RUNNER_PATH

PACKAGE = "ddtree_sglang"
INFO = "ddtree_sglang-0.1.0.dist-info"
SPEC_INFO = "sglang/srt/speculative/spec_info.py"
FLAGS = (
    "--speculative-ddtree-budget",
    "--speculative-ddtree-topk-cap",
    "--speculative-ddtree-budget-schedule",
)
STOCK = 'class ServerArgs:\n    def add_cli_args(parser):\n        parser.add_argument("--speculative-algorithm", choices={})\n'
SMALL = {
    "__init__.py": "",
    "flags.py": 'ALGORITHM = "DDTREE"\n\ndef add(parser):\n    parser.add_argument("--budget", type=int)\n',
    "inner/plugin.py": "def register():\n    pass\n",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A copy of the shipped description with a small overlay beside it."""
    folder = Path(shutil.copytree(shipped("patches") / "sglang-0.5.11", tmp_path / "mine"))
    for name, text in SMALL.items():
        place = folder / PACKAGE / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    described = folder / "runtime.yaml"
    described.write_text(
        described.read_text().replace("ddtree_sglang.plugin:", "ddtree_sglang.inner.plugin:")
    )
    return folder


@pytest.fixture
def tree(small_tree: Path) -> Path:
    """The small checkout with an argparse that has no DDTREE."""
    (small_tree / "python" / ARGS_PATH).write_text(STOCK.format('["DFLASH"]'))
    return small_tree


def spec(tree: Path, own: Path, **more: Any) -> RuntimeSpec:
    return RuntimeSpec(base=str(tree), description=str(own), **more)


def of_overlay(bundle: Bundle) -> list[str]:
    return [entry.path for entry in bundle.files if entry.path.startswith(PACKAGE)]


# --- the bundle --------------------------------------------------------------------------------------------


def test_the_bundle_holds_the_package_and_its_metadata(patched: Bundle) -> None:
    sources = {
        f"{PACKAGE}/{path.relative_to(shipped(PACKAGE)).as_posix()}": path.read_bytes()
        for path in shipped(PACKAGE).rglob("*.py")
    }
    assert len(sources) >= 4
    assert {path: patched.read(path) for path in of_overlay(patched) if path in sources} == sources
    extra = sorted({*of_overlay(patched)} - sources.keys())
    assert extra == [f"{INFO}/METADATA", f"{INFO}/RECORD", f"{INFO}/entry_points.txt"]
    assert patched.overlay == "ddtree_sglang 0.1.0" and patched.left_out == ""
    recorded = patched.to_json()["overlay"]
    assert (recorded["package"], recorded["version"], len(recorded["sha256"])) == (PACKAGE, "0.1.0", 64)
    assert {entry.mode for entry in patched.files if entry.path.startswith(PACKAGE)} == {0o644}


def test_python_finds_the_entry_point_and_loads_it(patched: Bundle, tmp_path: Path) -> None:
    """As sglang does, from ``PYTHONPATH`` alone and without torch."""
    program = (
        "import importlib.metadata as m, json, sys\n"
        "(point,) = m.entry_points(group='sglang.srt.plugins')\n"
        "found = m.distribution('ddtree-sglang')\n"
        "made = point.load()\n"
        "print(json.dumps([point.name, point.value, point.dist.name, found.version, found.requires,\n"
        "    [[str(f), f.hash and f.hash.value, f.size, f.locate().is_file()] for f in found.files],\n"
        "    sys.modules[made.__module__].__file__, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-S", "-c", program],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(patched.root)},
        check=True,
        stdout=subprocess.PIPE,
    )
    name, value, dist, version, requires, files, loaded, torch = json.loads(done.stdout)
    assert (name, value, dist, version) == (
        "ddtree",
        "ddtree_sglang.plugin:register",
        "ddtree-sglang",
        "0.1.0",
    )
    assert (
        requires == ["sglang==0.5.11"] and loaded == str(patched.root / PACKAGE / "plugin.py") and not torch
    )
    assert sorted(row[0] for row in files) == of_overlay(patched)
    for path, digest, size, there in files:
        content = (patched.root / path).read_bytes()
        if path.endswith("/RECORD"):
            assert (digest, size, there) == (None, None, True)
            continue
        wanted = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (digest, size, there) == (wanted, len(content), True)


def test_the_same_package_has_the_same_digest_wherever_and_however_it_lies(
    new_cache: Callable[[str], Path], tree: Path, own: Path, tmp_path: Path
) -> None:
    new_cache("one")
    first = build(spec(tree, own))
    other = Path(shutil.copytree(own, tmp_path / "elsewhere"))
    package = other / PACKAGE
    for path in package.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    (package / "__pycache__").mkdir()
    (package / "__pycache__/flags.cpython-312.pyc").write_bytes(b"x")
    (package / "__pycache__/odd.py").write_text("")
    for name in ("flags.py~", ".flags.py.swp", "notes.txt"):
        (package / name).write_text("x")
    new_cache("two")
    assert build(spec(tree, other)).manifest == first.manifest
    assert of_overlay(first) == sorted(
        [
            *(f"{PACKAGE}/{name}" for name in SMALL),
            *(f"{INFO}/{n}" for n in ("METADATA", "RECORD", "entry_points.txt")),
        ]
    )
    rows = list(csv.reader((first.root / INFO / "RECORD").read_text().splitlines()))
    assert [row[0] for row in rows[:-1]] == sorted(row[0] for row in rows[:-1])
    (package / "flags.py").write_text("ALGORITHM = 'DDTREE'\n")
    assert known_bundle(spec(tree, other)) is None
    changed = build(spec(tree, other))
    assert changed.digest != first.digest and known_bundle(spec(tree, other)) == changed


def test_the_pins_are_those_of_sglang(patched: Bundle) -> None:
    found = pins_of(patched)
    assert found is not None and found.source == "sglang 0.5.11" and len(found.lines) > 40


@pytest.mark.parametrize(
    ("args", "spec_info", "why"),
    [
        (STOCK.format('["DFLASH", "DDTREE"]'), "", "the base has DDTREE itself"),
        (STOCK.format("names()"), "    DDTREE = auto()\n", "the base has DDTREE itself"),
        (STOCK.format("names()"), "    DDTREE_LIKE = auto()\n", ""),
        (STOCK.format('["DFLASH"]'), "    DDTREE = auto()  # no flag for it\n", ""),
        ("class ServerArgs:\n    pass\n", "", "the flags of the base cannot be read"),
        ("def (", "", "the flags of the base cannot be read"),
        (STOCK.format("[]").replace("algorithm", "method"), "", "the flags of the base cannot be read"),
        (None, "    DDTREE = auto()\n", "the flags of the base cannot be read"),
    ],
)
def test_a_base_is_asked_by_its_argparse(
    cache: Path, tree: Path, own: Path, args: str | None, spec_info: str, why: str
) -> None:
    (tree / "python" / SPEC_INFO).write_text(spec_info)
    (tree / "python" / ARGS_PATH).unlink()
    if args is not None:
        (tree / "python" / ARGS_PATH).write_text(args)
    said: list[str] = []
    built = build(spec(tree, own), progress=said.append)
    assert built.left_out.startswith(why) and bool(built.left_out) == bool(why)
    assert bool(of_overlay(built)) == (not why) == bool(built.overlay)
    assert (
        (f", without ddtree_sglang 0.1.0: {why}" in said[-1])
        if why
        else said[-1].endswith(" and ddtree_sglang 0.1.0")
    )
    assert known_bundle(spec(tree, own)) == built


def test_none_is_none(cache: Path, tree: Path, own: Path) -> None:
    said: list[str] = []
    built = build(spec(tree, own, overlay="none"), progress=said.append)
    assert of_overlay(built) == [] and (built.overlay, built.left_out) == ("", "")
    assert said[-1].endswith("with 1 patch")
    assert build(spec(tree, own)).digest != built.digest


def test_a_package_of_that_name_in_the_base_stays(cache: Path, tree: Path, own: Path) -> None:
    mine = tree / "python" / PACKAGE / "__init__.py"
    mine.parent.mkdir()
    mine.write_text("# mine\n")
    built = build(spec(tree, own))
    assert built.left_out == "the base has a ddtree_sglang of its own"
    assert of_overlay(built) == [f"{PACKAGE}/__init__.py"] and built.read(of_overlay(built)[0]) == b"# mine\n"


def test_damage_to_the_overlay_is_found(cache: Path, tree: Path, own: Path) -> None:
    built = build(spec(tree, own))
    (built.root / PACKAGE / "flags.py").write_text("# edited\n")
    (built.root / INFO / "entry_points.txt").unlink()
    (built.root / PACKAGE / "more.py").write_text("")
    assert [(one.path, one.kind) for one in verify_bundle(built)] == [
        (f"{INFO}/entry_points.txt", "missing"),
        (f"{PACKAGE}/flags.py", "changed"),
        (f"{PACKAGE}/more.py", "extra"),
    ]
    assert known_bundle(spec(tree, own)) is None, "a file is missing"
    assert verify_bundle(build(spec(tree, own))) == ()


def test_a_vendored_tree_has_it_and_is_a_base(cache: Path, tree: Path, own: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vendored"
    vendored = vendor(spec(tree, own), folder)
    assert vendored.overlay == "ddtree_sglang 0.1.0" and open_bundle(folder) == vendored
    assert (folder / INFO / "entry_points.txt").read_text() == (
        "[sglang.srt.plugins]\nddtree = ddtree_sglang.inner.plugin:register\n"
    )
    (folder / PACKAGE / "flags.py").write_text("# edited\n")
    assert [str(one) for one in verify_bundle(open_bundle(folder))] == [f"{PACKAGE}/flags.py: changed"]
    vendor(spec(tree, own), folder, force=True)
    again = build(RuntimeSpec(base=str(folder), description=str(own)))
    assert again.digest == vendored.digest
    vendor(spec(tree, own, overlay="none"), folder)
    assert not (folder / PACKAGE).exists() and not (folder / INFO).exists()


def test_a_record_of_builds_from_before_the_overlay_is_read(
    cache: Path, tree: Path, own: Path, tmp_path: Path
) -> None:
    vendored = vendor(spec(tree, own), tmp_path / "v")
    record = tmp_path / "v/origin.json"
    old = {key: value for key, value in json.loads(record.read_text()).items() if key != "overlay"}
    record.write_text(json.dumps(old))
    found = open_bundle(tmp_path / "v")
    assert (found.base, found.patches, found.overlay) == (vendored.base, vendored.patches, "")


def test_everything_shipped_is_in_our_own_wheel() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]
    source = "".join(path.read_text("utf-8") for path in (root / "ddtree_ops").rglob("*.py"))
    asked = {*re.findall(r'shipped\("(\w+)"\)', source), PACKAGE}
    assert asked >= {"inventories", "patches", PACKAGE}
    assert {f"ddtree_ops/data/{name}" for name in asked} <= set(project["wheel"]["force-include"].values())
    assert asked <= set(project["wheel"]["force-include"]) and asked <= set(project["sdist"]["include"])


# --- the description ---------------------------------------------------------------------------------------


def test_the_shipped_description_names_the_shipped_package() -> None:
    overlay = load_description("sglang-0.5.11").overlay
    assert overlay is not None and overlay.directory == shipped(PACKAGE)
    assert overlay.requires == "sglang==0.5.11"
    assert "overlay:\n" in (shipped("patches") / "sglang-0.5.11/runtime.yaml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("package: ddtree_sglang", "package: other", "overlay.package"),
        ("version: 0.1.0", "version: ../x", "overlay.version"),
        ("inner.plugin:register", "gone:register", "there is no such module in"),
        ("ddtree_sglang.inner.plugin:register", "os:system", "'os:system' does not match"),
        ("ddtree: ddtree", "a b: ddtree", "overlay.entry_points"),
        ("  version", "  versoin", "unknown key (did you mean 'version'?)"),
    ],
)
def test_what_is_wrong_with_it_is_named(own: Path, old: str, new: str, said: str) -> None:
    text = (own / "runtime.yaml").read_text()
    assert old in text
    (own / "runtime.yaml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_description(own)
    details = "\n".join(caught.value.details)
    assert said in details and "runtime.yaml:" in details


def test_a_description_without_one(own: Path, cache: Path, tree: Path) -> None:
    text = (own / "runtime.yaml").read_text()
    (own / "runtime.yaml").write_text(text.partition("\n# A package of this project")[0])
    assert load_description(own).overlay is None
    built = build(spec(tree, own))
    assert of_overlay(built) == [] and built.to_json()["overlay"] is None
    assert check_path(built.root, description=str(own)).overlay is None


# --- the check ---------------------------------------------------------------------------------------------


def test_the_real_bundle_is_whole_and_says_what_it_adds(patched: Bundle, wheel: Path) -> None:
    found = check_path(patched.root.parent)
    assert found.overlay is not None and found.state is PatchState.PATCHED and found.ok
    assert found.overlay.state is OverlayState.WHOLE and found.overlay.flags == FLAGS
    assert (found.overlay.own, found.overlay.offers) == (False, True)
    assert found.overlay.summary == (
        f"overlay ddtree_sglang 0.1.0 as shipped; entry point ddtree; adds DDTREE and {', '.join(FLAGS)}"
    )
    assert found.overlay.short == "ddtree_sglang 0.1.0 with entry point ddtree"
    stock = check_path(wheel).overlay
    assert stock is not None and (stock.state, stock.flags, stock.offers) == (OverlayState.ABSENT, (), False)
    assert stock.summary == "no overlay, and no DDTREE: --speculative-algorithm refuses it at the start"
    assert (stock.short, stock.plugins) == ("no DDTREE", ())
    assert json.loads(json.dumps(found.to_json()))["overlay"]["flags"] == list(FLAGS)


def test_a_host_is_told_by_its_hashes_and_few_reads(patched: Bundle) -> None:
    asked: list[str] = []

    def read(path: str) -> bytes | None:
        asked.append(path)
        return patched.read(path)

    hashes = {entry.path: entry.sha256 for entry in patched.files}
    found = check_source(read, hashes=hashes)
    assert found.overlay == check_path(patched.root.parent).overlay
    assert len(asked) == len(set(asked)) <= 5 and {RUNNER_PATH, ARGS_PATH} < set(asked)
    assert check_source(read).overlay is None, "nobody asked"
    changed = {**hashes, f"{PACKAGE}/flags.py": "0" * 64}
    altered = check_source(read, hashes=changed)
    assert altered.overlay is not None and altered.overlay.state is OverlayState.ALTERED
    assert altered.verdict is Verdict.INCONCLUSIVE and altered.state is PatchState.PATCHED
    assert "is not as shipped: 1 file, the first ddtree_sglang/flags.py: changed" in altered.overlay.summary


def test_without_its_metadata_it_adds_nothing(cache: Path, tree: Path, own: Path) -> None:
    built = build(spec(tree, own))
    whole = check_path(built.root, description=str(own)).overlay
    assert whole is not None and whole.flags == ("--budget",) and whole.offers
    shutil.rmtree(built.root / INFO)
    found = check_path(built.root, description=str(own)).overlay
    assert found is not None and found.state is OverlayState.ALTERED
    assert (found.flags, found.offers, found.plugins) == ((), False, ())
    assert found.summary.endswith("; no entry point: sglang does not find it")
    assert found.short == "ddtree_sglang 0.1.0 WITHOUT an entry point, not as shipped"
    assert [(one.path, one.kind) for one in found.differences] == [
        (f"{INFO}/{name}", "missing") for name in ("METADATA", "RECORD", "entry_points.txt")
    ]


def test_metadata_without_the_package_is_altered(cache: Path, tree: Path, own: Path) -> None:
    built = build(spec(tree, own))
    shutil.rmtree(built.root / PACKAGE)
    found = check_path(built.root, description=str(own)).overlay
    assert found is not None and found.state is OverlayState.ALTERED and not found.ok
    assert (found.plugins, found.flags, found.offers) == (("ddtree",), (), False)
    assert {one.kind for one in found.differences} == {"missing"}


@pytest.mark.parametrize("kind", ["dist-info", "egg-info"])
def test_another_plugin_of_its_name_in_the_tree_is_told(
    cache: Path, tree: Path, own: Path, kind: str
) -> None:
    """sglang keeps the last plugin of a name that it finds, and that may be the other."""
    built = build(spec(tree, own))
    other = built.root / f"other-1.{kind}"
    other.mkdir()
    points = other / "entry_points.txt"
    points.write_text("[sglang.srt.plugins]\nanother = other:run\n")
    beside = check_path(built.root, description=str(own)).overlay
    assert beside is not None and beside.state is OverlayState.WHOLE, (
        "one of another name is nobody's business"
    )
    points.write_text("[sglang.srt.plugins]\nddtree = other:run\n")
    found = check_path(built.root, description=str(own)).overlay
    assert found is not None and found.state is OverlayState.ALTERED and not found.ok
    assert [(one.path, one.kind) for one in found.differences] == [
        (f"other-1.{kind}/entry_points.txt", "extra")
    ]


def test_a_tree_of_another_version_is_told(cache: Path, tree: Path, own: Path) -> None:
    info = tree / "python/sglang-0.5.12.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.12\n")
    said: list[str] = []
    built = build(spec(tree, own), progress=said.append)
    text = "it is written for sglang 0.5.11, and the tree is 0.5.12"
    assert any(line.startswith("warning: ddtree_sglang 0.1.0: ") and text in line for line in said), said
    found = check_path(built.root, description=str(own)).overlay
    assert found is not None and found.state is OverlayState.WHOLE and not found.ok
    assert text in found.summary


def test_a_build_is_not_reused_where_bases_are_judged_otherwise(
    cache: Path, tree: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(spec(tree, own))
    assert known_bundle(spec(tree, own)) is not None
    monkeypatch.setattr("ddtree_ops.runtime.bundle._rule", lambda: "of another version of this project")
    assert known_bundle(spec(tree, own)) is None


def test_an_installed_one_of_another_version_is_told(cache: Path, tree: Path, own: Path) -> None:
    built = build(spec(tree, own))
    (built.root / INFO).rename(built.root / INFO.replace("0.1.0", "0.2.0"))
    (built.root / PACKAGE / "__pycache__").mkdir()
    (built.root / PACKAGE / "__pycache__/flags.cpython-312.pyc").write_bytes(b"x")
    found = check_path(built.root, description=str(own)).overlay
    assert (
        found is not None and found.offers and {one.kind for one in found.differences} == {"missing", "extra"}
    )
    assert len(found.differences) == 6


def test_a_tree_with_its_own_ddtree_needs_none(cache: Path, tree: Path, own: Path) -> None:
    (tree / "python" / ARGS_PATH).write_text(STOCK.format('["DFLASH", "DDTREE"]'))
    found = check_path(tree, description=str(own)).overlay
    assert found is not None and (found.state, found.own, found.ok) == (OverlayState.ABSENT, True, True)
    assert found.summary == "no overlay: DDTREE is the tree's own"
    (tree / "python" / ARGS_PATH).write_text(
        STOCK.format('["DFLASH", "DDTREE"]')
        + "".join(
            f'        parser.add_argument("--speculative-{name}")\n'
            for name in ("eagle-topk", "tree-size", "ngram-budget", "dtree-topk")
        )
    )
    dialect = check_path(tree, description=str(own)).overlay
    assert dialect is not None and dialect.flags == ("--speculative-tree-size", "--speculative-dtree-topk")
    assert dialect.summary.endswith("own, with --speculative-tree-size, --speculative-dtree-topk")
    built = build(spec(tree, own))
    shutil.copytree(own / PACKAGE, built.root / PACKAGE)
    both = check_path(built.root, description=str(own)).overlay
    assert both is not None and both.own and not both.ok and both.summary.endswith("itself: two of them")


def test_a_tree_whose_flags_cannot_be_read_says_so(small_tree: Path, own: Path) -> None:
    found = check_path(small_tree, description=str(own)).overlay
    assert found is not None and (found.own, found.offers) == (None, None)
    assert "cannot be told" in found.summary


def test_an_overlay_whose_flags_cannot_be_read_offers_nothing_known(
    cache: Path, tree: Path, own: Path
) -> None:
    (own / PACKAGE / "flags.py").write_text("def (\n")
    built = build(spec(tree, own))
    found = check_path(built.root, description=str(own)).overlay
    assert found is not None and found.state is OverlayState.WHOLE
    assert (found.flags, found.own, found.offers) == ((), False, None)


def test_a_wheel_that_holds_one(cache: Path, tree: Path, own: Path, tmp_path: Path) -> None:
    built = build(spec(tree, own))
    path = tmp_path / "sglang-9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for entry in built.files:
            archive.write(built.root / entry.path, entry.path)
    found = check_path(path, description=str(own)).overlay
    assert found is not None and found.state is OverlayState.WHOLE
    assert build(RuntimeSpec(base=str(path), description=str(own))).digest == built.digest


# --- the entry point ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[sglang.srt.plugins]\nddtree = a.b:c\n", ("ddtree",)),
        ("[console_scripts]\nx = a:b\n\n[sglang.srt.plugins]\nTwo=a:b\none = c:d\n", ("Two", "one")),
        ("[console_scripts]\nddtree = a:b\n", ()),
        ("[sglang.srt.plugins]\n", ()),
        ("ddtree = a.b:c\n", ()),
        ("[sglang.srt.plugins\nddtree = a.b:c\n", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_plugins_are_told_from_metadata(text: str | None, found: tuple[str, ...]) -> None:
    files = {"x-1.dist-info/entry_points.txt": None if text is None else text.encode()}
    assert plugins_of(files, files.get) == found
    elsewhere = {"sglang/entry_points.txt": text, "a/x-1.dist-info/entry_points.txt": text}
    assert plugins_of(elsewhere, lambda path: (text or "").encode()) == ()


def test_importlib_finds_the_same_plugins(patched: Bundle, tmp_path: Path) -> None:
    found = [
        point.name
        for one in importlib.metadata.distributions(path=[str(patched.root)])
        for point in one.entry_points
        if point.group == "sglang.srt.plugins"
    ]
    assert tuple(found) == plugins_of([entry.path for entry in patched.files], patched.read) == ("ddtree",)


def test_a_release_that_nobody_hashed_is_asked_for_one_file(patched: Bundle) -> None:
    overlay = load_description("sglang-0.5.11").overlay
    asked: list[str] = []

    def read(path: str) -> bytes | None:
        asked.append(path)
        return patched.read(path)

    assert plugin_named(overlay, read) == "ddtree_sglang 0.1.0 with entry point ddtree"
    assert asked == [f"{INFO}/entry_points.txt"]
    assert plugin_named(overlay, {}.get) == plugin_named(None, patched.read) == ""


def test_what_was_kept_of_a_bundle_is_not_taken_for_another_overlay(
    cache: Path, tree: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle stays, the overlay here goes on: then it is not as shipped, and that is found out."""
    built = build(spec(tree, own))
    asked = {"where": "h", "description": str(own), "block_size": 8, "budget": 32}
    first = check_bundle(built, **asked)
    assert first.overlay is not None and first.overlay.state is OverlayState.WHOLE
    monkeypatch.setattr(patchcheck, "_kept", {})  # as another process
    assert check_bundle(built, **asked) == first
    (own / PACKAGE / "flags.py").write_text("ALGORITHM = 'DDTREE'\n")
    later = check_bundle(built, **asked).overlay
    assert later is not None and later.state is OverlayState.ALTERED
    monkeypatch.setattr(patchcheck, "_kept", {})
    assert check_bundle(built, **asked).overlay == later, "from its form as JSON"
