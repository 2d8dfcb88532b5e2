"""What distance costs: a tree pushed through a proxy that delays each direction. Run by hand.

    ddtree-ops lab up
    python benchmarks/latency.py [-i INVENTORY] [HOST] [--bytes N] [--files 100,4000] [--delays 0,20,100]

For each round-trip time (milliseconds) the same bytes in few and in many files: ``rsync -a`` and
``Session.publish``, fresh and without a change, each the wall-clock of a whole process. The cost of distance is the
time above that without delay; it must not grow with the number of files. The proxy is a process of its own on
127.0.0.1; the host key is pinned by its fingerprint.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import multiprocessing
import os
import pickle
import random
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from push import CHILD, spec_of, ssh_words, timed

from ddtree_ops.remote import ConnectSpec, FileEntry, PublishResult, connect, scan_tree

PUSH = str(Path(__file__).resolve().parent / "push.py")


def serve(listener: socket.socket, far: tuple[str, int], delay: float) -> None:
    """Forward connections to ``far``; every piece leaves ``delay`` seconds after it came, in each direction."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        under_way: collections.deque[tuple[float, bytes]] = collections.deque()
        came = asyncio.Event()

        async def send() -> None:
            while True:
                while not under_way:
                    came.clear()
                    await came.wait()
                await asyncio.sleep(max(0.0, under_way[0][0] - loop.time()))
                while under_way and under_way[0][0] <= loop.time():
                    _, piece = under_way.popleft()
                    if not piece:
                        writer.close()
                        return
                    writer.write(piece)
                await writer.drain()

        sender = asyncio.create_task(send())
        while True:
            piece = await reader.read(65536)
            under_way.append((loop.time() + delay, piece))
            came.set()
            if not piece:
                break
        await sender

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*far)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)

    async def run() -> None:
        server = await asyncio.start_server(accept, sock=listener)
        await server.serve_forever()

    asyncio.run(run())


@contextmanager
def delayed(spec: ConnectSpec, rtt_ms: float) -> Iterator[ConnectSpec]:
    """The same host at a distance."""
    listener = socket.create_server(("127.0.0.1", 0))
    far = (spec.address or spec.name, spec.port or 22)
    proxy = multiprocessing.get_context("fork").Process(
        target=serve, args=(listener, far, rtt_ms / 2000.0), daemon=True
    )
    proxy.start()
    try:
        yield replace(spec, address="127.0.0.1", port=listener.getsockname()[1])
    finally:
        proxy.terminate()
        proxy.join()
        listener.close()


def fingerprint_of(spec: ConnectSpec) -> tuple[str, str]:
    """Fingerprint and known_hosts line (key type and key) of the host, from the known_hosts file that vouches for it."""
    known = Path(spec.known_hosts or "~/.ssh/known_hosts").expanduser()
    name = f"[{spec.address}]:{spec.port}" if spec.port not in (None, 22) else str(spec.address)
    found = subprocess.run(
        ["ssh-keygen", "-F", name, "-f", str(known)], capture_output=True, text=True, check=True
    ).stdout
    key = next(line for line in found.splitlines() if not line.startswith("#")).split(" ", 1)[1]
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", "-"], input=key, capture_output=True, text=True, check=True
    )
    return shown.stdout.split()[1], key


def one(
    spec: ConnectSpec, key: str, tree: Path, files: list[FileEntry], root: str, here: Path
) -> dict[str, float]:
    """Seconds by name for one tree at one distance."""
    listed, job, names, known = here / "files", here / "job.json", here / "names", here / "known_hosts"
    listed.write_bytes(pickle.dumps(files))
    names.write_text("".join(f"{entry.path}\n" for entry in files), encoding="utf-8")
    known.write_text(f"[{spec.address}]:{spec.port} {key}\n", encoding="utf-8")
    work = {
        "spec": asdict(spec),
        "files": str(listed),
        "tree": str(tree),
        "releases": f"{root}/ours/releases",
        "digest": "benchmark",
        "manifest": json.dumps({"files": [asdict(entry) for entry in files]}),
    }
    job.write_text(json.dumps(work), encoding="utf-8")
    far_rsync = "rsync" if spec.user in (None, "root") else "sudo -n rsync"
    way = shlex.join(ssh_words(replace(spec, known_hosts=str(known))))
    rsync = ["rsync", "-a", "--files-from", str(names), "--rsync-path", far_rsync, "-e", way]
    rsync += [f"{tree}/", f"{spec.name}:{root}/rsync/"]
    seconds = {}
    for name in ("fresh", "same"):
        seconds[f"rsync {name}"] = timed(rsync)[0]
        spent, text = timed([sys.executable, PUSH, CHILD, str(job)])
        if PublishResult(**json.loads(text)).created is not (name == "fresh"):
            sys.exit("unexpected result")
        seconds[f"ours {name}"] = spent
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("host", nargs="?", help="host of the inventory (default: its last)")
    parser.add_argument("-i", "--inventory", default=os.environ.get("DDTREE_OPS_INVENTORY", "lab"))
    parser.add_argument("--bytes", type=int, default=4_000_000, help="size of each tree")
    parser.add_argument("--files", default="100,4000", help="numbers of files")
    parser.add_argument("--delays", default="0,20,100", help="round-trip times, ms")
    args = parser.parse_args()
    spec = spec_of(args.inventory, args.host)
    pinned, key = fingerprint_of(spec)
    counts = [int(word) for word in args.files.split(",")]
    delays = [float(word) for word in args.delays.split(",")]
    rows: dict[tuple[float, int], dict[str, float]] = {}
    with connect(spec) as session, tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for count in counts:
            tree = here / f"tree-{count}"
            for number in range(count):
                path = tree / f"{number % 50:02d}" / f"{number}.py"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(random.Random(number).randbytes(args.bytes // count))
            for rtt in delays:
                root = session.run(["mktemp", "-d", "/var/tmp/ddtree-far.XXXXXX"], check=True).text.strip()
                try:
                    with delayed(replace(spec, fingerprint=pinned, known_hosts=None), rtt) as far:
                        rows[rtt, count] = one(far, key, tree, list(scan_tree(tree)), root, here)
                finally:
                    session.remove_tree(root, below="/var/tmp")
    print(f"{'round trip':>10} {'files':>6} " + "".join(f"{name:>14}" for name in next(iter(rows.values()))))
    for (rtt, count), seconds in rows.items():
        print(f"{rtt:8.0f}ms {count:6} " + "".join(f"{value:13.2f}s" for value in seconds.values()))
    for name in ("ours fresh", "ours same", "rsync fresh", "rsync same"):
        for rtt in delays[1:]:
            cost = [
                max(0.0, rows[rtt, count][name] - rows[delays[0], count][name]) * 1000 / rtt
                for count in counts
            ]
            trips = " and ".join(f"{value:.1f}" for value in cost)
            print(f"{name}: {rtt:.0f} ms costs {trips} round trips for {args.files} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
