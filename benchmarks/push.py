"""Push a tree to a host: ``rsync -a`` over ssh against ``Session.publish``: fresh, without a change, one file changed. Run by hand.

    python benchmarks/push.py [-i INVENTORY] [HOST] [--tree DIR] [--repeat N]

Each figure is the wall-clock of a whole process (Python's start included), measured in one run on one machine, the
two taking turns. Ours hashes every file on both sides; rsync without a change compares sizes and times only. The
tree is listed once beforehand, as a build does. Everything is put below a temporary directory on the host. The lab's
ct200 has shell start-up files that print, which rsync does not survive ("is your shell clean?"): use b300.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from ddtree_ops.remote import ConnectSpec, FileEntry, PublishResult, Session, connect, scan_tree

CHILD = "--child"


def child(path: str) -> int:
    """What the measured process does: connect, publish, close."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    files: list[FileEntry] = pickle.loads(Path(job["files"]).read_bytes())
    with connect(ConnectSpec(**job["spec"])) as session:
        result = session.publish(
            Path(job["tree"]),
            files,
            releases_dir=job["releases"],
            digest=job["digest"],
            manifest=job["manifest"].encode(),
        )
    print(json.dumps(asdict(result)))
    return 0


def timed(argv: list[str]) -> tuple[float, str]:
    begin = time.perf_counter()
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{argv[0]} failed: exit status {done.returncode}")
    return time.perf_counter() - begin, done.stdout.decode()


def ssh_words(spec: ConnectSpec) -> list[str]:
    """The ``ssh`` command that goes the same way as our session."""
    words = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
    if spec.config:
        words += ["-F", spec.config]
    if spec.port:
        words += ["-p", str(spec.port)]
    if spec.user:
        words += ["-l", spec.user]
    if spec.identity_file:
        words += ["-i", str(Path(spec.identity_file).expanduser())]
    if spec.known_hosts:
        words += ["-o", f"UserKnownHostsFile={Path(spec.known_hosts).expanduser()}"]
    if spec.proxy_jump:
        words += ["-J", spec.proxy_jump]
    if spec.address:
        words += ["-o", f"HostName={spec.address}"]
    return words


def spec_of(inventory: str | None, host: str | None) -> ConnectSpec:
    from ddtree_ops.inventory import connect_spec, load_inventory

    found = load_inventory(inventory).hosts
    name = host or list(found)[-1]
    if name not in found:
        sys.exit(f"{name}: not in the inventory, which has {', '.join(found)}")
    return connect_spec(found[name])


def show(name: str, rsync: list[float], ours: list[float]) -> None:
    first, second = statistics.median(rsync), statistics.median(ours)
    print(f"{name:10} rsync {first:6.3f} s   ddtree-ops {second:6.3f} s   ratio {second / first:5.2f}")
    print(f"{'':10} rsync {' '.join(f'{value:.3f}' for value in rsync)}")
    print(f"{'':10} ours  {' '.join(f'{value:.3f}' for value in ours)}")


def measure(spec: ConnectSpec, session: Session, tree: Path, repeat: int) -> int:
    root = session.run(["mktemp", "-d", "/var/tmp/ddtree-push.XXXXXX"], check=True).text.strip()
    far_rsync = "rsync" if spec.user in (None, "root") else "sudo -n rsync"
    rsync = ["rsync", "-a", "--rsync-path", far_rsync, "-e", shlex.join(ssh_words(spec))]
    times: dict[tuple[str, str], list[float]] = {}
    try:
        with tempfile.TemporaryDirectory() as here:
            edited = Path(here, "edited")
            shutil.copytree(tree, edited, symlinks=True)
            longest = max(
                scan_tree(edited), key=lambda entry: entry.size if entry.path.endswith(".py") else 0
            )
            (edited / longest.path).chmod(0o644)
            with (edited / longest.path).open("ab") as file:
                file.write(b"# one line more\n")
            jobs = {
                "fresh": _job(spec, tree, root, "first", Path(here)),
                "no change": _job(spec, tree, root, "first", Path(here)),
                "one file": _job(spec, edited, root, "second", Path(here)),
            }
            for _ in range(repeat):
                session.run(["rm", "-rf", f"{root}/rsync", f"{root}/ours"], check=True)
                for name, (folder, job) in jobs.items():
                    theirs, _ = timed([*rsync, f"{folder}/", f"{spec.name}:{root}/rsync/"])
                    ours, text = timed([sys.executable, str(Path(__file__).resolve()), CHILD, str(job)])
                    times.setdefault((name, "rsync"), []).append(theirs)
                    times.setdefault((name, "ours"), []).append(ours)
                    result = PublishResult(**json.loads(text))
                    if result.created is (name == "no change") or (
                        name == "one file" and result.sent_files != 1
                    ):
                        sys.exit(f"unexpected result: {result}")
    finally:
        session.remove_tree(root, below="/var/tmp")
    for name in jobs:
        show(name, times[name, "rsync"], times[name, "ours"])
    return 0


def _job(spec: ConnectSpec, tree: Path, root: str, digest: str, here: Path) -> tuple[Path, Path]:
    """The tree, and a file that tells a child to publish it as ``digest``; listed beforehand, as a build does."""
    files = scan_tree(tree)
    print(f"{spec.name}: {len(files)} files, {sum(entry.size for entry in files) / 1e6:.1f} MB from {tree}")
    listed, job = here / f"{digest}.files", here / f"{digest}.json"
    listed.write_bytes(pickle.dumps(list(files)))
    work = {
        "spec": asdict(spec),
        "files": str(listed),
        "tree": str(tree),
        "releases": f"{root}/ours/releases",
        "digest": digest,
        "manifest": json.dumps({"files": [asdict(entry) for entry in files]}),
    }
    job.write_text(json.dumps(work), encoding="utf-8")
    return tree, job


def main() -> int:
    if sys.argv[1:2] == [CHILD]:
        return child(sys.argv[2])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("host", nargs="?", help="host of the inventory (default: its last)")
    parser.add_argument("-i", "--inventory", default=os.environ.get("DDTREE_OPS_INVENTORY", "lab"))
    parser.add_argument(
        "--spec", type=json.loads, help='instead of an inventory: JSON of a ConnectSpec, {"name": ...}'
    )
    parser.add_argument(
        "--tree", type=Path, default=Path(__file__).resolve().parents[1], help="the tree to push"
    )
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    spec = ConnectSpec(**args.spec) if args.spec else spec_of(args.inventory, args.host)
    with connect(spec) as session:
        return measure(spec, session, args.tree.resolve(), args.repeat)


if __name__ == "__main__":
    sys.exit(main())
