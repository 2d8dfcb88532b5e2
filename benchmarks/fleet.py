"""Many hosts against one, in one run on one machine, ratios printed. Run by hand, as root.

    python benchmarks/fleet.py [--hosts 30]

Boots a fleet of lab hosts of its own, then takes turns: ``ddtree-ops deploy`` of one host and of all, the first time
(everything is pushed, started, waited for, smoke-tested, held) and again without a change; each the wall-clock and
the client's processor time of a whole process. All hosts share this machine's processors with the client: what thirty
sshd, agents and engines cost here is part of the ratio, and is not where hosts are machines of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ddtree_ops import lab

OURS = [sys.executable, "-m", "ddtree_ops"]


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def deploy(inventory: Path, hosts: Sequence[str], outcome: str) -> tuple[float, float]:
    """Seconds of wall-clock and of the client's processor time."""
    before, began = spent(), time.monotonic()
    done = subprocess.run(
        [*OURS, "-i", str(inventory), "deploy", *hosts, "--json"], capture_output=True, text=True
    )
    wall, cpu = time.monotonic() - began, spent() - before
    outcomes = [result["outcome"] for result in json.loads(done.stdout)]
    if set(outcomes) != {outcome} or len(outcomes) != len(hosts):
        sys.exit(f"expected {len(hosts)} x {outcome}: {outcomes}\n{done.stderr[-2000:]}")
    return wall, cpu


def show(name: str, one: tuple[float, float], many: tuple[float, float], hosts: int) -> None:
    ratio, cpu = many[0] / one[0], many[1] / one[1]
    print(
        f"{name:10s} 1 host {one[0]:6.2f} s ({one[1]:5.2f} s cpu)   {hosts} hosts {many[0]:6.2f} s "
        f"({many[1]:5.2f} s cpu)   ratio {ratio:.2f} ({cpu:.2f} cpu)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DDTREE_OPS_LAB_DIR"] = f"{folder}/lab"
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        os.environ.setdefault("DDTREE_OPS_LAB_NET", "127.0.250")
        try:
            began = time.monotonic()
            _, inventory = lab.up_fleet(args.hosts + 1)
            print(f"{args.hosts + 1} hosts booted in {time.monotonic() - began:.1f} s")
            first, *others = lab.fleet_names(args.hosts + 1)
            show(
                "first",
                deploy(inventory, [first], "deployed"),
                deploy(inventory, others, "deployed"),
                args.hosts,
            )
            for _ in range(3):
                one, many = deploy(inventory, [first], "unchanged"), deploy(inventory, others, "unchanged")
                show("no change", one, many, args.hosts)
        finally:
            lab.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
