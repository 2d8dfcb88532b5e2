"""The whole command against a peer: a deploy without a change, and how soon a death is explained. Run by hand.

    ddtree-ops lab up
    python benchmarks/deploy.py [HOST] [--repeat N]

First: ``ddtree-ops deploy HOST`` where nothing is to be done (every file of the release is hashed on the host, unit,
state, weights and port are looked at) against ``rsync -a`` of the same tree without a change (sizes and times only),
taking turns, each the wall-clock of a whole process. Then: the unpatched runtime is deployed, and the time is taken
from the entry in which systemd notes the engine's death to the line on our standard output that explains it; both by
this machine's clock, so the host must be a lab host. The good release is rolled back to by the deploy itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time

from push import show, spec_of, ssh_words, timed

from ddtree_ops.inventory import load_inventory, select
from ddtree_ops.remote import connect
from ddtree_ops.runtime import build
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.journal import MessageId

OURS = [sys.executable, "-m", "ddtree_ops"]


def no_change(host: str, repeat: int) -> None:
    target = select(load_inventory(None), [host])[0]
    spec = spec_of(None, host)
    tree = build(target.runtime).root
    far_rsync = "rsync" if spec.user in (None, "root") else "sudo -n rsync"
    words = ["rsync", "-a", "--rsync-path", far_rsync, "-e", shlex.join(ssh_words(spec))]
    rsync = [*words, f"{tree}/", f"{host}:/var/tmp/ddtree-bench/"]
    deploy = [*OURS, "deploy", host, "--json"]
    timed(rsync)
    subprocess.run(deploy, check=True, capture_output=True)
    theirs, ours = [], []
    for _ in range(repeat):
        theirs.append(timed(rsync)[0])
        spent, text = timed(deploy)
        if json.loads(text)[0]["outcome"] != "unchanged":
            sys.exit("the deploy changed something")
        ours.append(spent)
    show("no change", theirs, ours)


def explain(host: str, runtime: str) -> float:
    """Seconds from the engine's death to the printed diagnosis."""
    target = select(load_inventory(None), [host])[0]
    argv = [*OURS, "deploy", host, "--runtime", runtime]
    printed = 0.0
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not printed and "ddtree-graph-size" in line:
                printed = time.time()
    if process.returncode != 7:
        sys.exit(f"the deploy should have been rolled back (exit code 7), it ended with {process.returncode}")
    with connect(spec_of(None, host)) as session:
        entries = UnitControl(session, target.service.unit).entries(since="3m")
        deaths = [entry.time.timestamp() for entry in entries if entry.message_id == MessageId.EXITED]
    return printed - max(moment for moment in deaths if moment < printed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("host", nargs="?", default="b300", help="lab host (default: b300)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--stock", default="sglang-0.5.11-stock", help="the unpatched runtime")
    args = parser.parse_args()
    os.environ.setdefault("DDTREE_OPS_INVENTORY", "lab")
    no_change(args.host, args.repeat)
    found = [explain(args.host, args.stock) for _ in range(args.repeat)]
    figures = " ".join(f"{value:.3f}" for value in found)
    print(f"death to diagnosis: median {statistics.median(found):.3f} s   ({figures})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
