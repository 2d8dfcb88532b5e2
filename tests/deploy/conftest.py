"""What the tests of deployments on lab hosts have in common."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops import lab as lab_hosts

UNIT = "sglang-k26-ddtree.service"


class Desk:
    """The commands as a person types them.

    :param inventory: what they read, with ``env`` beside the lab's own variables.
    """

    def __init__(self, lab: Any, inventory: Path, env: Mapping[str, str]) -> None:
        self.lab, self.inventory = lab, inventory
        self.env = {**lab.env, "DDTREE_OPS_INVENTORY": str(inventory), **env}

    def run(self, *argv: str, timeout: float = 900.0, **env: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.lab.commands.run(
            argv, env={**self.env, **env}, timeout=timeout
        )
        return done

    def client(self, *argv: str, **env: str) -> Any:
        """A command under way, its output in pipes."""
        return self.lab.commands.start(argv, env={**self.env, **env})

    def deploy(self, *argv: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, the one result, and what was said on the way."""
        done = self.run("deploy", *argv, "--json")
        assert done.stdout.strip(), done.stderr
        (result,) = json.loads(done.stdout)
        return done.returncode, result, done.stderr

    def host(self, host: str, script: str) -> str:
        """What a script prints that succeeds on a host, as the user of its inventory entry."""
        argv = lab_hosts.ssh_argv(host, ["sh", "-euc", shlex.quote(script)])
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def unit(self, host: str, unit: str = UNIT) -> dict[str, str]:
        """Properties of a unit."""
        lines = self.host(host, f"systemctl show {unit}").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def show(self, host: str, name: str) -> str:
        """A property of the service's unit."""
        return self.unit(host).get(name, "")


@pytest.fixture(scope="module")
def new_desk(
    lab: Any, plant: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Desk]:
    """``new_desk(*hosts)``: clean hosts, and a desk whose loads (in seconds) and windows are short, or whose inventory is given.

    ``lease`` is that of the rollback: each sixth of it the host looks whether the client lives, and starts an
    interpreter to do so. Tests in which no client dies have a long one. ``planted``: the release is already there.
    """

    def made(
        *hosts: str,
        load: float = 0.3,
        lease: str = "10s",
        planted: bool = False,
        inventory: Path | None = None,
        **env: str,
    ) -> Desk:
        for host in hosts:
            lab.reset(host)
            if planted:
                plant(lab.hosts[host])
        if inventory is None:
            data = yaml.safe_load(lab.inventory.read_text())
            data["services"]["k26-ddtree"]["environment"] = {"LAB_LOAD_SECONDS": str(load)}
            data["defaults"]["service"]["health"]["window"] = "0.3s"
            data["defaults"]["service"]["rollback"] = {"lease": lease, "grace": lease}
            inventory = tmp_path_factory.mktemp("desk") / "quick.yaml"
            inventory.write_text(yaml.safe_dump(data, sort_keys=False))
        return Desk(lab, inventory, env)

    return made
