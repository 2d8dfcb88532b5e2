"""Commands about files people write: ``inventory``, ``playbook``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.common import Hosts, InventoryOption, JsonOption, out, print_json, targets_of
from ddtree_ops.secret import MASK, is_secret_name, redact
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from ddtree_ops.inventory.models import Host, Inventory, Router
    from ddtree_ops.playbook.models import Playbook as LoadedPlaybook

__all__ = ["register"]

inventory_app = typer.Typer(no_args_is_help=True, help="Show and validate inventories.")
playbook_app = typer.Typer(no_args_is_help=True, help="Show and validate playbooks.")

Playbook = Annotated[str, typer.Argument(help="Name or path of a playbook.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(inventory_app, name="inventory")
    app.add_typer(playbook_app, name="playbook")


@inventory_app.command("validate")
def validate(inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """Check an inventory; problems are printed as file:line: key: what is wrong."""
    from ddtree_ops.inventory import load_inventory

    loaded = load_inventory(inventory)
    services = sum(len(host.services) for host in loaded.hosts.values())
    if as_json:
        print_json({"schema": 1, "path": loaded.path, "hosts": len(loaded.hosts), "services": services})
    else:
        out.print(
            f"{loaded.path}: ok, {count(len(loaded.hosts), 'host')}, {count(services, 'service')}",
            markup=False,
            soft_wrap=True,
        )


@inventory_app.command("show")
def show(hosts: Hosts = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """Show hosts with everything resolved: defaults, overrides, and the launch command of each service."""
    import shlex

    from ddtree_ops.inventory.routers import workers
    from ddtree_ops.service.argv import launch_argv

    loaded, targets = targets_of(hosts, inventory=inventory, default_all=True)
    if as_json:
        shown = {target.host.name: _shown(target.host) for target in targets}
        routers = {name: _router(loaded, router) for name, router in loaded.routers.items()}
        print_json(
            {"schema": 1, "path": loaded.path, "hosts": shown, "groups": loaded.groups, "routers": routers}
        )
        return
    from rich.text import Text

    out.print(loaded.path, style="dim", markup=False, soft_wrap=True)
    for target in targets:
        host, service = target.host, target.service
        gpu = (
            f"{host.gpu.count}x {host.gpu.name} ({host.gpu.arch}, {host.gpu.interconnect})"
            if host.gpu
            else ""
        )
        address = host.address or "address from ssh_config"
        out.print(Text.assemble((host.name, "bold cyan"), f"  {address}  {gpu}"), soft_wrap=True)
        out.print(
            f"  {service.name}: {service.unit}, runtime {target.runtime.name}, port {service.port}"
            + (f", {target.node}, head {target.node.hosts[0]}" if target.node else ""),
            markup=False,
            soft_wrap=True,
        )
        words = launch_argv(service, target.node, target.runtime.dialect)
        out.print(f"    {shlex.join(words)}", markup=False, soft_wrap=True, style="dim")
        for name, source in service.secrets.items():
            out.print(
                f"    secret {name} from {redact(str(source))}", markup=False, soft_wrap=True, style="dim"
            )
    for router in loaded.routers.values():
        urls = " ".join(worker.url for worker in workers(loaded, router))
        text = f"router {router.name}: {router.unit} on {router.host}, port {router.port}, {router.policy}"
        out.print(f"{text} in front of {urls}", markup=False, soft_wrap=True)


def _router(inventory: Inventory, router: Router) -> dict[str, Any]:
    from ddtree_ops.inventory.routers import workers

    data = router.model_dump(mode="json")
    data["environment"] = {
        key: MASK if is_secret_name(key) else value for key, value in router.environment.items()
    }
    return {**data, "workers": [worker.url for worker in workers(inventory, router)]}


def _shown(host: Host) -> dict[str, Any]:
    data = host.model_dump(mode="json")
    for service in data["services"].values():
        service["environment"] = {
            name: MASK if is_secret_name(name) else value for name, value in service["environment"].items()
        }
        service["secrets"] = {
            name: {key: value for key, value in source.items() if value is not None}
            for name, source in service["secrets"].items()
        }
    return data


@inventory_app.command("schema")
def schema() -> None:
    """Print the JSON schema of inventory files, for editors."""
    from ddtree_ops.inventory import inventory_schema

    print_json(inventory_schema())


@playbook_app.command("validate")
def validate_playbook(playbook: Playbook = "deploy") -> None:
    """Check a playbook."""
    loaded = _load(playbook)
    out.print(f"{loaded.path}: ok, {count(len(loaded.steps), 'step')}", markup=False, soft_wrap=True)


@playbook_app.command("show")
def show_playbook(playbook: Playbook = "deploy") -> None:
    """Show the steps of a playbook and what happens on failure."""
    loaded = _load(playbook)
    out.print(f"{loaded.name}: {loaded.description}", markup=False, soft_wrap=True)
    for title, steps in (("steps", loaded.steps), ("on failure", loaded.on_failure)):
        names = [f"{step.kind} {step.arguments}" if step.arguments else step.kind for step in steps]
        out.print(f"  {title}: {' -> '.join(names)}", markup=False, soft_wrap=True)


@playbook_app.command("schema")
def playbook_schema_command() -> None:
    """Print the JSON schema of playbook files, for editors."""
    from ddtree_ops.playbook.load import playbook_schema

    print_json(playbook_schema())


def _load(name: str) -> LoadedPlaybook:
    from ddtree_ops.playbook.load import load_playbook

    return load_playbook(name)
