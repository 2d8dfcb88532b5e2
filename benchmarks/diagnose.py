"""Diagnosis of large logs against ``grep -E`` with the pattern an operator types, in the same run. Run by hand.

    python benchmarks/diagnose.py [--size MB] [--kinds plain,json,tiled,crashes]

Makes logs in the shapes of recorded lines (seeded): a serving log, plain and as ``journalctl -o json``; whole runs of
a server one after the other, start-up included; and nothing but crashes. Each is read by grep (``LC_ALL=C`` and
``C.UTF-8``) and by ``diagnose_stream`` in a process of its own, all from the page cache; MB/s are of processor time,
what Python's start and the signatures take is named beside them. Two sizes show that memory does not grow with the log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PATTERN = "Error|FAILED|assert|Traceback|RuntimeError|size of tensor"
BLOCK = 8_000_000
RECORDED = Path(__file__).parents[1] / "tests/data/logs"

ONE = """
import json, sys, time
from ddtree_ops.diagnose.api import diagnose_stream
from ddtree_ops.diagnose.library import default_library
library = default_library()
start = time.process_time()
with open(sys.argv[1], "rb") as stream:
    report = diagnose_stream(stream, library=library)
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
print(json.dumps({"headline": report.headline(), "lines": report.searched.lines, "peak": peak, "start": start}))
"""


def serving(chance: random.Random, size: int) -> Iterator[str]:
    """Lines of a server under load, about ``size`` bytes of them; one in two thousand is a warning."""
    at, made = 0.0, 0
    while made < size:
        at += chance.random() * 0.2
        stamp = f"[2026-01-01 {int(at) // 3600 % 24:02}:{int(at) // 60 % 60:02}:{int(at) % 60:02}"
        kind = chance.random()
        if kind < 0.55:
            line = (
                f"{stamp} TP0] Decode batch, #running-req: {chance.randint(1, 48)}, #token: {chance.randint(100, 90000)}, "
                f"token usage: {chance.random():.2f}, accept len: {1 + chance.random() * 6:.2f}, accept rate: "
                f"{chance.random():.2f}, cuda graph: True, gen throughput (token/s): {chance.random() * 3000:.2f}, #queue-req: 0"
            )
        elif kind < 0.75:
            line = (
                f"{stamp} TP0] Prefill batch, #new-seq: 1, #new-token: {chance.randint(1, 8000)}, #cached-token: 0, token "
                f"usage: {chance.random():.2f}, #running-req: {chance.randint(0, 48)}, #queue-req: 0, #pending-token: 0, "
                f"cuda graph: False, input throughput (token/s): {chance.random() * 9000:.2f}"
            )
        elif kind < 0.9995:
            line = f'{stamp}] INFO:     127.0.0.1:{chance.randint(30000, 60000)} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
        else:
            line = f"{stamp} TP0] WARNING scheduler.py:1200: the request {chance.randint(1, 10**9)} was slow"
        made += len(line) + 1
        yield line


def journal(lines: Iterator[str]) -> Iterator[str]:
    """The same as journal entries."""
    for number, line in enumerate(lines):
        entry = {
            "__CURSOR": f"s=170a4d58d3334486ae85b82dc2061890;i={number:x};b=a79c1a36590e4cf9bb20e373e10f84b9",
            "__REALTIME_TIMESTAMP": str(1_795_963_970_792_587 + number * 100_000),
            "_HOSTNAME": "ct200",
            "_PID": "218",
            "_SYSTEMD_UNIT": "sglang.service",
            "_SYSTEMD_INVOCATION_ID": "3d38524de0a24e5d97bc5139272c7a9e",
            "_STREAM_ID": "9d3a5f49852e4da8a8d93e8de8c87528",
            "_TRANSPORT": "stdout",
            "PRIORITY": "6",
            "SYSLOG_IDENTIFIER": "python",
            "MESSAGE": line,
        }
        yield json.dumps(entry, separators=(",", ":"))


def recorded(*names: str) -> bytes:
    return b"".join((RECORDED / name).read_bytes().rstrip(b"\n") + b"\n" for name in names)


def plain_block() -> bytes:
    return "".join(f"{line}\n" for line in serving(random.Random(1), BLOCK)).encode()


def json_block() -> bytes:
    return "".join(f"{line}\n" for line in journal(serving(random.Random(2), BLOCK // 3))).encode()


def tiled_block() -> bytes:
    run = recorded("h200-dflash.log")
    load = "".join(f"{line}\n" for line in serving(random.Random(3), 2_000_000)).encode()
    return run + load


def crash_block() -> bytes:
    return recorded("cpu-killsched.log", "h200-oom-drafter-kv-pool.log", "cpu-corrupt.log") * 20


KINDS: dict[str, Callable[[], bytes]] = {
    "plain": plain_block,
    "json": json_block,
    "tiled": tiled_block,
    "crashes": crash_block,
}


def write(path: Path, block: bytes, size: int) -> int:
    """Blocks up to ``size`` bytes, each of another day; what was written."""
    made = day = 0
    with path.open("wb") as out:
        while made < size:
            date = f"2026-{1 + day // 28 % 12:02}-{1 + day % 28:02}".encode()
            made += out.write(block.replace(b"2026-01-01", date).replace(b"2026-11-29", date))
            day += 1
    return made


def spent(argv: list[str], locale: str) -> tuple[float, float, str]:
    """Processor and wall-clock seconds of a command, and what it printed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        argv, capture_output=True, text=True, env={**os.environ, "LC_ALL": locale}, check=False
    )
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode > 1 or (done.returncode and argv[0] != "grep"):
        sys.exit(done.stderr)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--size", type=int, default=200, help="MB of the larger log; the smaller has a quarter"
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.log"
        for kind in given.kinds.split(","):
            block = KINDS[kind]()
            for share in (4, 1):
                size = write(path, block, given.size * 1_000_000 // share) / 1e6
                subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)
                greps = [spent(["grep", "-cE", PATTERN, str(path)], locale)[0] for locale in ("C", "C.UTF-8")]
                cpu, wall, text = spent([sys.executable, "-c", ONE, str(path)], "C.UTF-8")
                found = json.loads(text)
                cpu -= found["start"]
                print(
                    f"{kind:8s} {size:6.0f} MB {found['lines']:9d} lines   grep C {size / greps[0]:6.0f} MB/s   "
                    f"UTF-8 {size / greps[1]:6.0f} MB/s   ours {size / cpu:6.1f} MB/s (and {found['start']:.1f} s to start, {wall:.1f} s wall)   "
                    f"ratio {cpu / greps[0]:.2f} / {cpu / greps[1]:.2f}   peak {found['peak'] / 1024:.0f} MiB"
                )
                print(f"         {found['headline'][:160]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
