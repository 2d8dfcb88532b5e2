"""Commands about the engine's code: ``runtime build|show|verify|vendor`` and ``patch list|check``."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli.common import (
    InventoryOption,
    JsonOption,
    ServiceOption,
    err,
    is_path,
    out,
    print_json,
    runtime_spec,
)
from ddtree_ops.errors import CheckFailed, NotDeployed, UsageError
from ddtree_ops.results import exit_code_of

if TYPE_CHECKING:
    from ddtree_ops.inventory.models import RuntimeSpec
    from ddtree_ops.runtime import PatchCheck

__all__ = ["register"]

runtime_app = typer.Typer(no_args_is_help=True, help="Build and verify the pinned, patched SGLang.")
patch_app = typer.Typer(no_args_is_help=True, help="The patch series, and what a tree really holds.")

Name = Annotated[str, typer.Argument(help="Runtime of the inventory.", metavar="RUNTIME")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(runtime_app, name="runtime")
    app.add_typer(patch_app, name="patch")


def _spec(name: str, inventory: str | None) -> RuntimeSpec:
    from ddtree_ops.inventory import load_inventory

    return runtime_spec(load_inventory(inventory), name)


def _say(text: str) -> None:
    err.print(text, style="dim", markup=False, soft_wrap=True)


@runtime_app.command("build")
def build(runtime: Name, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """Fetch the pinned wheel (checked by hash, cached), apply the patches, make a bundle named by its digest."""
    from ddtree_ops.runtime import build as build_bundle

    bundle = build_bundle(_spec(runtime, inventory), progress=_say)
    if as_json:
        print_json(bundle.to_json())
        return
    out.print(f"{bundle.digest}", markup=False)
    _say(
        f"{bundle.name}: {len(bundle.files)} files, {bundle.size / 1e6:.1f} MB, from {bundle.base} in {bundle.root}"
    )
    for part in (*bundle.patches, *filter(None, [bundle.overlay])):
        _say(f"with {part}")
    if bundle.left_out:
        _say(f"without an overlay: {bundle.left_out}")


@runtime_app.command("show")
def show(runtime: Name, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """Show what a runtime is made of."""
    from ddtree_ops.runtime import load_description

    spec = _spec(runtime, inventory)
    description = load_description(spec.description)
    patches = description.select(spec.patches)
    overlay = None if spec.overlay == "none" else description.overlay
    if as_json:
        print_json(
            {
                "name": spec.name,
                "description": str(description.directory),
                "base": spec.base or description.base.requirement,
                "python": spec.python,
                "sha256": None if spec.base else description.base.wheels.get(spec.python),
                "patches": [{"name": patch.name, "sha256": patch.sha256} for patch in patches],
                "overlay": overlay and overlay.to_json(),
            }
        )
        return
    base = (
        spec.base
        or f"{description.base.requirement} {spec.python} {description.base.wheels.get(spec.python, '')}"
    )
    out.print(f"{spec.name}: {description.summary}", markup=False, soft_wrap=True)
    out.print(f"  base     {base}", markup=False, soft_wrap=True)
    for name in [patch.name for patch in patches] or ["none"]:
        out.print(f"  patch    {name}", markup=False, soft_wrap=True)
    unless = ", unless the base has DDTREE itself" if overlay and spec.base else ""
    out.print(f"  overlay  {overlay.label if overlay else 'none'}{unless}", markup=False, soft_wrap=True)


@runtime_app.command("verify")
def verify(
    what: Annotated[str, typer.Argument(help="Runtime of the inventory, or a bundle or vendored tree.")],
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every file of a bundle and compare with its manifest."""
    from ddtree_ops.runtime import build as build_bundle
    from ddtree_ops.runtime import open_bundle, plugins_of, verify_bundle
    from ddtree_ops.wording import count

    bundle = open_bundle(what) if is_path(what) else build_bundle(_spec(what, inventory), progress=_say)
    differences = verify_bundle(bundle)
    if as_json:
        print_json({**bundle.to_json(), "differences": [difference.to_json() for difference in differences]})
    if differences:
        raise CheckFailed(
            f"{bundle.root}: {len(differences)} files are not as built",
            details=tuple(str(difference) for difference in differences[:20]),
            hint="keep edits of your own as a patch (docs/runtime.md), then write the folder again: "
            f"ddtree-ops runtime vendor RUNTIME {bundle.root} --force"
            if is_path(what)
            else f"remove {bundle.root.parent} and run ddtree-ops runtime build {what}",
        )
    if not as_json:
        plugins = plugins_of((entry.path for entry in bundle.files), bundle.read)
        named = f"; {bundle.overlay or 'plugin'} with entry point {', '.join(plugins)}" if plugins else ""
        out.print(
            f"{bundle.digest[:12]}: {count(len(bundle.files), 'file')} as built{named}",
            markup=False,
            soft_wrap=True,
        )


@runtime_app.command("vendor")
def vendor(
    runtime: Name,
    directory: Annotated[
        Path, typer.Argument(help="Where the fixed tree goes; new, empty, or vendored before.")
    ],
    inventory: InventoryOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite vendored files that were edited.")
    ] = False,
) -> None:
    """Write the fixed tree for those who keep it in their own git."""
    from ddtree_ops.runtime import vendor as write

    bundle = write(_spec(runtime, inventory), directory, force=force, progress=_say)
    out.print(f"{directory}: {len(bundle.files)} files, {bundle.digest[:12]}", markup=False, soft_wrap=True)


@patch_app.command("list")
def list_patches(as_json: JsonOption = False) -> None:
    """The shipped patch series, and the overlay that goes with each."""
    from ddtree_ops.runtime import list_descriptions, load_description
    from ddtree_ops.runtime.overlay import SUMMARY

    descriptions = [load_description(name) for name in list_descriptions()]
    if as_json:
        print_json(
            [
                {
                    "runtime": item.name,
                    "base": item.base.requirement,
                    "patches": [patch.name for patch in item.patches],
                    "overlay": item.overlay and item.overlay.to_json(),
                }
                for item in descriptions
            ]
        )
        return
    for item in descriptions:
        out.print(f"{item.name}  on {item.base.requirement}", markup=False, style="bold")
        for patch in item.patches:
            out.print(f"  {patch.name}: {patch.subject}", markup=False, soft_wrap=True)
        if item.overlay is not None:
            out.print(f"  {item.overlay.label}: {SUMMARY}", markup=False, soft_wrap=True)


@patch_app.command("check")
def check(
    what: Annotated[
        str, typer.Argument(help="A bundle, tree or wheel; a runtime or a host of the inventory.")
    ],
    inventory: InventoryOption = None,
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", min=2, help="Tokens the drafter proposes a step; a host's own, else 8."),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option("--budget", min=1, help="Nodes of the tree, root not counted; a host's own, else 32."),
    ] = None,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell pristine, patched, foreign and leftover diagnostics, and prove the graph sizing on the source itself; say
    whether DDTREE is there, by the overlay or by the tree itself.

    Exit code 0: known files, target-verify sized for budget + 1; 5: wrong size, diagnostics left in, or no DDTREE on a
    host whose service wants it; 8: foreign files, or an altered overlay, that nobody can vouch for.
    """
    result = _check(what, inventory, service, block_size, budget)
    if as_json:
        print_json(result.to_json())
    else:
        _print_check(what, result)
        if result.tree_wanted and result.overlay is not None and (result.lacks_tree or not result.overlay.ok):
            again = f"ddtree-ops {'' if inventory is None else f'-i {shlex.quote(inventory)} '}deploy {what}"
            lacking = (
                "the service wants DDTREE and its release has none" if result.lacks_tree else "as built again"
            )
            out.print(f"  {lacking}: {again}", markup=False, soft_wrap=True, style="yellow")
    raise typer.Exit(int(exit_code_of(result.verdict)))


def _check(
    what: str, inventory: str | None, service: str | None, block_size: int | None, budget: int | None
) -> PatchCheck:
    from ddtree_ops.inventory import load_inventory, select
    from ddtree_ops.runtime import build as build_bundle
    from ddtree_ops.runtime import check_path, check_source

    if is_path(what):
        return check_path(what, block_size=block_size or 8, budget=budget or 32)
    loaded = load_inventory(inventory)
    if what in loaded.runtimes:
        spec = loaded.runtimes[what]
        bundle = build_bundle(spec, progress=_say)
        return check_path(
            bundle.root.parent, description=spec.description, block_size=block_size or 8, budget=budget or 32
        )
    from ddtree_ops.cli.common import open_session
    from ddtree_ops.runtime.overlay import DDTREE
    from ddtree_ops.service.layout import Layout

    targets = select(loaded, [what], service=service)
    if len(targets) > 1:
        raise UsageError(
            f"'{what}' names {len(targets)} services: {', '.join(target.name for target in targets)}",
            hint=f"one at a time: ddtree-ops patch check {targets[0].host.name} --service {targets[0].service.name}",
        )
    (target,) = targets
    current, speculative = Layout.of(target).current, target.service.speculative
    with open_session(target) as session:
        if session.read_file(f"{current}/manifest.json") is None:
            raise NotDeployed(target.service.unit, target.host.name)
        found = session.hash_tree(current) or ()
        found_out = check_source(
            lambda path: session.read_file(f"{current}/{path}"),
            where=f"{target.host.name}:{current}",
            hashes={entry.path: entry.sha256 for entry in found},
            description=target.runtime.description,
            block_size=block_size or (speculative.block_size if speculative else 8),
            budget=budget or (speculative.budget if speculative else None) or 32,
        )
        wanted = speculative is not None and speculative.algorithm.upper() == DDTREE
        return replace(found_out, tree_wanted=wanted)


def _print_check(what: str, result: PatchCheck) -> None:
    out.print(
        f"{what}: {result.summary}", markup=False, soft_wrap=True, style="green" if result.ok else "bold red"
    )
    if result.sizing is not None:
        from rich.table import Table

        table = Table(box=None, padding=(0, 2), pad_edge=False)
        for heading in ("worker", "algorithm", "tokens a request", "sent", ""):
            table.add_column(heading, justify="left")
        for row in result.sizing.rows:
            table.add_row(
                row.worker, row.algorithm, str(row.tokens), str(row.wanted), "ok" if row.ok else "WRONG"
            )
        out.print(table)
    if result.sentence:
        out.print(f"  {result.sentence}", markup=False, soft_wrap=True)
    if result.overlay is not None:
        style = "" if result.overlay.ok else "yellow"
        out.print(f"  {result.overlay.summary}", markup=False, soft_wrap=True, style=style)
        for difference in result.overlay.differences:
            out.print(f"    {difference}", markup=False, soft_wrap=True, style=style)
    for leftover in result.leftovers:
        out.print(f"  leftover diagnostic: {leftover}", markup=False, soft_wrap=True, style="yellow")
