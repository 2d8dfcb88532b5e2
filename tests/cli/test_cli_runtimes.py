"""What the commands about the engine's code print of the overlay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.inventory.models import RuntimeSpec
from ddtree_ops.remote import connect_local
from ddtree_ops.runtime import build
from ddtree_ops.service.layout import Layout

FLAGS = "--speculative-ddtree-budget, --speculative-ddtree-topk-cap, --speculative-ddtree-budget-schedule"
WHOLE = f"  overlay ddtree_sglang 0.1.0 as shipped; entry point ddtree; adds DDTREE and {FLAGS}\n"


@pytest.fixture(autouse=True)
def no_inventory_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """``-i`` of a command in this process outlives it."""
    for name in ("DDTREE_OPS_INVENTORY", "_DDTREE_OPS_INVENTORY_BY_OPTION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_runtime_shows_its_overlay(typed: Callable[..., Any]) -> None:
    assert "\n  overlay  ddtree_sglang 0.1.0\n" in typed("runtime", "show", "sglang-0.5.11-ddtree").out
    assert "\n  overlay  none\n" in typed("runtime", "show", "sglang-0.5.11-stock").out
    shown = json.loads(typed("runtime", "show", "sglang-0.5.11-ddtree", "--json").out)
    assert shown["overlay"]["package"] == "ddtree_sglang"
    (listed,) = json.loads(typed("patch", "list", "--json").out)
    assert listed["overlay"] == shown["overlay"]
    assert "  ddtree_sglang 0.1.0: the DDTREE speculative algorithm" in typed("patch", "list").out


def test_a_build_says_what_it_puts_in_or_leaves_out(typed: Callable[..., Any], tmp_path: Path) -> None:
    built = typed("runtime", "build", "sglang-0.5.11-ddtree")
    assert built.code == 0 and "\nwith ddtree_sglang 0.1.0\n" in built.err
    tree = tmp_path / "tree/sglang/srt"
    tree.mkdir(parents=True)
    (tree / "server_args.py").write_text(
        "class ServerArgs:\n    def add_cli_args(parser):\n"
        '        parser.add_argument("--speculative-algorithm", choices=["DDTREE"])\n'
    )
    site = tmp_path / "site.yaml"
    site.write_text(
        "schema: 1\nruntimes: {ours: {base: ./tree, patches: []}}\n"
        "services: {s: {unit: s.service, runtime: ours, venv: /v, model: /m}}\nhosts: {h: {services: [s]}}\n"
    )
    ours = typed("runtime", "build", "ours", "-i", str(site))
    assert ours.code == 0 and "without an overlay: the base has DDTREE itself" in ours.err
    assert (
        "ddtree_sglang 0.1.0, unless the base has DDTREE itself"
        in typed("runtime", "show", "ours", "-i", str(site)).out
    )


def test_patch_check_of_a_runtime_and_of_a_tree(typed: Callable[..., Any], tmp_path: Path) -> None:
    checked = typed("patch", "check", "sglang-0.5.11-ddtree")
    assert checked.code == 0 and checked.out.endswith(WHOLE), checked.out
    stock = typed("patch", "check", "sglang-0.5.11-stock")
    assert stock.code == 5 and "  no overlay, and no DDTREE: --speculative-algorithm refuses it" in stock.out
    tree = Path(shutil.copytree(build(RuntimeSpec()).root, tmp_path / "site-packages"))
    (tree / "ddtree_sglang/worker.py").unlink()
    (tree / "ddtree_sglang/check.py").write_text("# mine\n")
    altered = typed("patch", "check", str(tree))
    assert altered.code == 8, altered.out
    assert "  overlay ddtree_sglang 0.1.0 is not as shipped: 2 files" in altered.out
    assert "    ddtree_sglang/check.py: changed\n    ddtree_sglang/worker.py: missing\n" in altered.out
    found = json.loads(typed("patch", "check", str(tree), "--json").out)["overlay"]
    assert (found["state"], len(found["differences"])) == ("altered", 2)


def test_patch_check_of_a_host(
    typed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are hashed by the host, and only those of the runner and of the flags are fetched."""
    bundle = build(RuntimeSpec())
    site = tmp_path / "site.yaml"
    site.write_text(
        f"schema: 1\nruntimes: {{r: {{}}}}\n"
        "services: {s: {unit: s.service, runtime: r, venv: /v, model: /m, drafter: /d, speculative: {algorithm: DFLASH}}}\n"
        f"hosts: {{h: {{address: 127.0.0.1, deploy_root: {tmp_path}, services: [s]}}}}\n"
    )
    from ddtree_ops.inventory import load_inventory, select

    (target,) = select(load_inventory(str(site)), ["h"])
    current = Path(Layout.of(target).current)
    current.parent.mkdir(parents=True)
    shutil.copytree(bundle.root, current)
    (current / "manifest.json").write_bytes(bundle.manifest)
    monkeypatch.setattr("ddtree_ops.cli.common.open_session", lambda target: connect_local("h"))
    checked = typed("patch", "check", "h", "-i", str(site))
    assert checked.code == 0 and checked.out.endswith(WHOLE), checked.out + checked.err
    (current / "ddtree_sglang-0.1.0.dist-info/entry_points.txt").unlink()
    broken = typed("patch", "check", "h", "-i", str(site))
    assert broken.code == 8 and "entry_points.txt: missing" in broken.out
    assert "adds" not in broken.out and "; no entry point: sglang does not find it" in broken.out


def test_patch_check_of_a_ddtree_host_whose_overlay_is_gone(
    typed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.yaml"
    speculative = "speculative: {algorithm: %s, block_size: 8%s}"
    text = (
        f"schema: 1\nruntimes: {{r: {{}}}}\n"
        f"services: {{s: {{unit: s.service, runtime: r, venv: /v, model: /m, drafter: /d, {speculative}}}}}\n"
        f"hosts: {{h: {{address: 127.0.0.1, deploy_root: {tmp_path}, services: [s]}}}}\n"
    )
    site.write_text(text % ("DDTREE", ", budget: 32"))
    from ddtree_ops.inventory import load_inventory, select

    bundle = build(RuntimeSpec())
    (target,) = select(load_inventory(str(site)), ["h"])
    current = Path(Layout.of(target).current)
    current.parent.mkdir(parents=True)
    shutil.copytree(bundle.root, current)
    (current / "manifest.json").write_bytes(bundle.manifest)
    monkeypatch.setattr("ddtree_ops.cli.common.open_session", lambda target: connect_local("h"))
    assert typed("patch", "check", "h", "-i", str(site)).code == 0
    shutil.rmtree(current / "ddtree_sglang")
    half = typed("patch", "check", "h", "-i", str(site))
    assert half.code == 5 and "is not as shipped" in half.out
    shutil.rmtree(current / "ddtree_sglang-0.1.0.dist-info")
    gone = typed("patch", "check", "h", "-i", str(site))
    assert gone.code == 5 and "no overlay, and no DDTREE" in gone.out
    assert f"the service wants DDTREE and its release has none: ddtree-ops -i {site} deploy h" in gone.out
    assert json.loads(typed("patch", "check", "h", "-i", str(site), "--json").out)["verdict"] == "fail"
    site.write_text(text % ("DFLASH", ""))
    assert typed("patch", "check", "h", "-i", str(site)).code == 0, "the linear drafter needs none"


def test_a_tree_of_ones_own_with_another_dialect(typed: Callable[..., Any], tmp_path: Path) -> None:
    """The released tree with a DDTREE in its argparse: found out by reading it, from build to the unit."""
    tree = Path(shutil.copytree(build(RuntimeSpec(patches=[], overlay="none")).root, tmp_path / "tree"))
    args = tree / "sglang/srt/server_args.py"
    before = '            choices=["DFLASH", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"],\n'
    after = before.replace('"NGRAM"', '"NGRAM", "DDTREE"')
    flag = '            "--speculative-draft-model-path",\n'
    own = '            "--speculative-tree-budget",\n            type=int,\n        )\n        parser.add_argument(\n'
    text = args.read_text()
    assert text.count(before) == text.count(flag) == 1
    args.write_text(text.replace(before, after).replace(flag, own + flag))
    site = tmp_path / "site.yaml"
    wish = (
        "schema: 1\nruntimes: {ours: {base: ./tree%s}}\n"
        "services: {s: {unit: s.service, runtime: ours, venv: /v, model: /m, drafter: /d, "
        "speculative: {algorithm: DDTREE, budget: 32}, args: {attention-backend: triton}}}\n"
        "hosts: {h: {services: [s]}}\n"
    )
    site.write_text(wish % "")
    built = typed("runtime", "build", "ours", "-i", str(site))
    assert "with 1 patch, without ddtree_sglang 0.1.0: the base has DDTREE itself" in built.err
    checked = typed("patch", "check", str(tree))
    assert "  no overlay: DDTREE is the tree's own, with --speculative-tree-budget\n" in checked.out
    refused = typed("lint", "-i", str(site), "h")
    entry = "{speculative-ddtree-budget: speculative-tree-budget}"
    assert refused.code == 78
    assert f"may call it speculative-tree-budget: declare runtimes.ours.dialect: {entry}" in refused.out
    site.write_text(wish % f", dialect: {entry}")
    clean = typed("lint", "-i", str(site), "h", "--strict")
    assert clean.code == 0, clean.out
    assert " --speculative-tree-budget 32 " in typed("inventory", "show", "-i", str(site)).out
