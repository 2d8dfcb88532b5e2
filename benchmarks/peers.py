"""The same job by peers: a tree put on a host, fresh and again, by rsync, ansible-core, pyinfra and us. Run by hand.

    python -m venv peers && peers/bin/pip install ansible-core pyinfra
    ddtree-ops lab up
    python benchmarks/peers.py --peers peers/bin [-i INVENTORY] [HOST] [--tree DIR] [--files 40,400]

A reduced tree, in two sizes, so that the cost of a file shows: (time of the large - time of the small) / files between.
Each figure is the wall-clock of a whole process as a user would start it. ansible copies with ``ansible.builtin.copy``
of a directory, and with rsync started by ``ansible.builtin.command`` on the controller (what its ``synchronize``
does; the collection that holds that is not part of ansible-core). pyinfra uses ``files.sync``. All connect as the
same user with the same key and checked host keys, through sudo where the inventory's user is not root. Only ours
hashes what lies on the host; without a change ansible's copy compares checksums, pyinfra hashes, rsync looks at sizes and times.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shlex
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from push import CHILD, spec_of, ssh_words, timed

from ddtree_ops.remote import ConnectSpec, PublishResult, Session, connect, scan_tree

PUSH = str(Path(__file__).resolve().parent / "push.py")


def commands(
    spec: ConnectSpec, tree: Path, peers: Path, root: str, here: Path
) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command and extra environment of each way to put ``tree`` on the host."""
    sudo = spec.user not in (None, "root")
    way = ssh_words(spec)
    far_rsync = "sudo -n rsync" if sudo else "rsync"
    rsync = ["rsync", "-a", "--rsync-path", far_rsync, "-e", shlex.join(way)]
    files = list(scan_tree(tree))
    (here / "files").write_bytes(pickle.dumps(files))
    manifest = json.dumps({"files": [asdict(entry) for entry in files]})
    job = {
        "spec": asdict(spec),
        "files": str(here / "files"),
        "tree": str(tree),
        "releases": f"{root}/ours/releases",
        "digest": "benchmark",
        "manifest": manifest,
    }
    (here / "job.json").write_text(json.dumps(job), encoding="utf-8")
    options = shlex.join(way[1:])
    inventory = {"all": {"hosts": {spec.name: {"ansible_ssh_common_args": options, "ansible_become": sudo}}}}
    (here / "inventory.json").write_text(json.dumps(inventory), encoding="utf-8")

    def play(name: str, task: dict[str, object]) -> list[str]:
        text = json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [task]}])
        (here / f"{name}.json").write_text(text, encoding="utf-8")
        return [
            str(peers / "ansible-playbook"),
            "-i",
            str(here / "inventory.json"),
            str(here / f"{name}.json"),
        ]

    copy = {"ansible.builtin.copy": {"src": f"{tree}/", "dest": f"{root}/copy/"}}
    synchronize = {
        "ansible.builtin.command": {"argv": [*rsync, f"{tree}/", f"{spec.name}:{root}/ansible-rsync/"]},
        "delegate_to": "localhost",
        "become": False,
    }
    (here / "config").write_text(_ssh_config(spec), encoding="utf-8")
    (here / "push.py").write_text(
        "from pyinfra.operations import files\n"
        f"files.sync(src={str(tree)!r}, dest={f'{root}/pyinfra'!r}, _sudo={sudo})\n",
        encoding="utf-8",
    )
    (here / "hosts.py").write_text(
        f"hosts = [({spec.name!r}, {{'ssh_config_file': {str(here / 'config')!r}, 'ssh_strict_host_key_checking': 'yes', "
        f"'ssh_known_hosts_file': {str(Path(spec.known_hosts or '~/.ssh/known_hosts').expanduser())!r}}})]\n",
        encoding="utf-8",
    )
    pyinfra = [str(peers / "pyinfra"), "-y", str(here / "hosts.py"), str(here / "push.py")]
    quiet = {"ANSIBLE_PIPELINING": "1", "ANSIBLE_LOCALHOST_WARNING": "0"}
    return {
        "rsync": ([*rsync, f"{tree}/", f"{spec.name}:{root}/rsync/"], {}),
        "ddtree-ops": ([sys.executable, PUSH, CHILD, str(here / "job.json")], {}),
        "ansible rsync": (play("synchronize", synchronize), quiet),
        "ansible copy": (play("copy", copy), quiet),
        "pyinfra": (pyinfra, {}),
    }


def _ssh_config(spec: ConnectSpec) -> str:
    lines = [f"Host {spec.name}", f"  HostName {spec.address}"]
    if spec.port:
        lines.append(f"  Port {spec.port}")
    if spec.user:
        lines.append(f"  User {spec.user}")
    if spec.identity_file:
        lines.append(f"  IdentityFile {Path(spec.identity_file).expanduser()}")
    if spec.known_hosts:
        lines.append(f"  UserKnownHostsFile {Path(spec.known_hosts).expanduser()}")
    return "\n".join(lines) + "\n"


def measure(
    session: Session, spec: ConnectSpec, tree: Path, count: int, peers: Path
) -> dict[str, tuple[float, float]]:
    """Seconds fresh and again, by way, for a tree of ``count`` files."""
    found: dict[str, tuple[float, float]] = {}
    root = session.run(["mktemp", "-d", "/var/tmp/ddtree-peers.XXXXXX"], check=True).text.strip()
    session.run(["chmod", "755", root], check=True)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        reduced = here / "tree"
        for entry in list(scan_tree(tree))[:: max(1, len(list(scan_tree(tree))) // count)][:count]:
            path = reduced / entry.path
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / entry.path, path)
        try:
            for name, (argv, extra) in commands(spec, reduced, peers, root, here).items():
                os.environ.update(extra)
                first, _ = timed(argv)
                again, text = timed(argv)
                if name == "ddtree-ops" and PublishResult(**json.loads(text)).created:
                    sys.exit("the second push changed something")
                found[name] = (first, again)
        finally:
            session.remove_tree(root, below="/var/tmp")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("host", nargs="?", help="host of the inventory (default: its last)")
    parser.add_argument("-i", "--inventory", default=os.environ.get("DDTREE_OPS_INVENTORY", "lab"))
    parser.add_argument("--peers", type=Path, required=True, help="folder with ansible-playbook and pyinfra")
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1] / "ddtree_ops")
    parser.add_argument("--files", default="40,400", help="sizes of the reduced tree")
    args = parser.parse_args()
    spec = spec_of(args.inventory, args.host)
    small, large = (int(word) for word in args.files.split(","))
    with connect(spec) as session:
        few = measure(session, spec, args.tree.resolve(), small, args.peers.resolve())
        many = measure(session, spec, args.tree.resolve(), large, args.peers.resolve())
    base = many["ddtree-ops"]
    print(
        f"{'':14} {'fresh':>16} {'again':>16} {'a file, fresh':>14} {'again':>8}   ({small} and {large} files)"
    )
    for name in few:
        fresh, again = many[name]
        each = [(many[name][way] - few[name][way]) / (large - small) * 1000 for way in (0, 1)]
        print(
            f"{name:14} {fresh:7.2f} s {fresh / base[0]:5.1f}x {again:7.2f} s {again / base[1]:5.1f}x "
            f"{each[0]:11.2f} ms {each[1]:5.2f} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
