"""DDTREE on one GPU with the real sglang 0.5.11: crash, cure, equality, leaks, speed, cost.

One run, one JSON:

    python3 benchmarks/gpu/ddtree_gpu.py --site DIR|TAR --out DIR \\
        [--limit 1100] [--only PART,...] [--grid 32-8,...]

SITE is a folder, or an archive of one, with the RELEASED sglang 0.5.11 and what it needs for this machine's
Python and torch (``make_site.py`` packs it). The patch of ``patches/sglang-0.5.11`` is applied here to a copy
of it, and ``ddtree_sglang`` is put beside, as the bundle does it. Nothing else than the standard library,
torch and SITE is needed.

Parts, the least important last:

    env       versions, GPU, sha256 of the patch, of every file of the plugin and of this script
    tree      the tree step alone: equality with the CPU, no synchronisation, graph replay, kernels, times
    crash     without the patch: ready, dead at the first request; refused by the self-check where that is on
    equality  with the patch: outputs against plain greedy over budgets, topk caps, the adaptive schedule, a target
              of many tokens, batch sizes, short outputs, prefix hits
    soak      300 mixed requests on one server, the greedy ones compared, then no token of KV missing
    speed     accept length and tokens/s of none, DFLASH and DDTREE
    cost      the tree step as a share of a decode step, by CUDA graph and kernel by kernel
    real      step times on dummy weights of the shape of Qwen3-8B, and the accept lengths that break even

Outputs are compared in bfloat16, by a rule for near ties. float32 would need none, but sglang 0.5.11 does not
start with it on CUDA: the ``rmsnorm`` of sglang-kernel 0.4.2 has no float32 kernel ("failed to dispatch data
type Float", recorded in ``docs/evidence/h200``). Equality token by token in float32 is shown on the CPU, by
``make test-real``.

``--only env,crash,equality,soak --grid 32-8,64-8,7-1,16-4 --limit 330`` is the short run. ``--device cpu``
tries the script without a GPU.

Servers are started several at a time, since a start waits for one core. Every time is taken while ONE server
is asked and none is starting; the others that are up then are idle and take no time of the GPU. Outputs are
compared while the next servers start.

Writes OUT/result.json after every step, OUT/logs.tar.xz (machine paths replaced), crash.log, refused.log and
run.log. Whatever ran out of time or could not be tried is listed as ``not_run``, and its part does not pass;
what was not asked for is listed under ``not_asked``.

``--detach`` is for a machine where a command may run only for a limited time: the run has a session of its
own and outlives the command that started it. ``--wait SECONDS`` follows such a run and returns when it is
done (exit status as the run's) or the seconds are over (75). Exit status of a run: 0 all parts passed, 1 some
did not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from evidence import (
    EPSILON,
    NEAR_TIE_RULE,
    apply_patch,
    break_even,
    captured,
    figure,
    first_difference,
    judge,
    mask_machine,
    period,
    running_sizes,
    step_times,
    tail,
    times_lines,
    times_shares,
    verdict,
)
from servers import Answer, Server, Site, errors_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCHEMA = "ddtree-gpu/1"
PARTS = ("env", "tree", "crash", "equality", "soak", "speed", "cost", "real")
PATCH = "0001-cuda-graph-runner-size-target-verify-by-tree-budget.patch"
STILL_RUNNING = 75
SPOKEN = (8, 13, 21)
"""The only tokens that the tiny targets say (``tests/ddtree/cpu/make_models.py``)."""
STOPPING: dict[str, Any] = {"stop_token_ids": [SPOKEN[0]], "ignore_eos": False}
"""Parameters of a mixed request that ends at a token."""
TOKENS = 48
"""Output tokens of a request whose output is compared."""
BUILD_SHARE = 0.10
"""The tree step (tree, mask, positions) is called small below this share of a decode step on weights of a real size."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class NotRun(Exception):
    """A step was left out, with the reason."""


class Experiment:
    """State of a run: parts, servers, deadline, JSON."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.work: Path = args.work
        self.cuda = args.device == "cuda"
        self.block = 8 if self.cuda else 4
        self.epsilon_of = EPSILON if self.cuda else dict.fromkeys(EPSILON, EPSILON["float32"])
        self.zero = time.monotonic()
        self.deadline = self.zero + args.limit
        self.lock = threading.RLock()
        self.servers: dict[str, Server] = {}
        self.port = args.port
        self.recorded: dict[str, tuple[str, bool, int]] = {}
        self.padded = True
        # a CPU of few cores starts three servers at once more slowly
        self.start_limit = args.start_limit * (1 if self.cuda else 3)
        self.reference: dict[str, dict[str, Any]] = {}
        self.best: dict[Any, list[tuple[float, int]]] = {}
        self.done = threading.Event()
        self.names = {
            str(self.work): "WORK",
            str(args.site): "SITE",
            str(ROOT): "REPO",
            str(self.out): "OUT",
            sys.prefix: "PYTHON",
            str(Path.home()): "HOME",
            socket.gethostname(): "gpu-host",
        }
        for common in ("/usr", "/usr/local", "localhost"):
            self.names.pop(common, None)
        self.parts: dict[str, dict[str, Any]] = {
            name: {"verdict": "not run", "checks": [], "not_run": []} for name in PARTS
        }
        self.result: dict[str, Any] = {
            "schema": SCHEMA,
            "began": now(),
            "ended": None,
            "command": mask_machine(shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]), self.names),
            "revision": args.revision,
            "limit_s": args.limit,
            "block_size": self.block,
            "device": args.device,
            "grid": [f"{budget}-{topk}" for budget, topk in args.grid],
            "timing": (
                "Times are taken while one server is asked and none is starting. Other servers that are up are idle "
                "(--sleep-on-idle) and take no time of the GPU. The tree step alone is timed before the first server is "
                "started, while other cores unpack and compile sglang."
            ),
            "near_tie_rule": NEAR_TIE_RULE,
            "verdicts": {},
            "parts": self.parts,
            "servers": {},
        }
        rng = random.Random(11)
        self.prompts = [[rng.randrange(3, 32) for _ in range(rng.randrange(3, 61))] for _ in range(24)]

    # -- keeping the record -------------------------------------------------------------------------------------

    def say(self, *words: Any) -> None:
        print(f"{time.monotonic() - self.zero:7.1f} s ", *words, flush=True)

    def left(self) -> float:
        return float(self.deadline - time.monotonic())

    def wanted(self, *parts: str) -> bool:
        return any(part in self.args.only for part in parts)

    def check(self, part: str, name: str, passed: bool, seen: Any = None) -> bool:
        with self.lock:
            self.parts[part]["checks"].append({"name": name, "passed": bool(passed), "seen": seen})
        if not passed:
            self.say("FAILED", part, name, str(seen)[:300])
        return bool(passed)

    def skip(self, part: str, what: str, why: str) -> None:
        with self.lock:
            self.parts[part]["not_run"].append({"what": what, "why": why})
        self.say("not run:", part, what, "-", why)

    def write(self) -> None:
        """The JSON as of now, by rename."""
        with self.lock:
            others = [f"{budget}-{topk}" for budget, topk, _ in GRID if (budget, topk) not in self.args.grid]
            if others:
                self.parts["equality"]["not_asked"] = others
            for name, part in self.parts.items():
                part["verdict"] = verdict(part["checks"])
                if part["verdict"] == "pass" and part["not_run"]:
                    part["verdict"] = "incomplete"
                if name not in self.args.only:
                    part["not_run"] = [{"what": "the part", "why": "not asked for (--only)"}]
            self.result["verdicts"] = {name: part["verdict"] for name, part in self.parts.items()}
            self.result["seconds"] = round(time.monotonic() - self.zero, 1)
            for name, server in self.servers.items():
                state = (server.start, server.hung, server.mark())
                if server.start and self.recorded.get(name) != state:
                    self.result["servers"][name] = server.record(self.site)
                    self.recorded[name] = state
            text = mask_machine(json.dumps(self.result, indent=1, default=str), self.names)
            partial = self.out / ".result.json"
            partial.write_text(text + "\n")
            partial.replace(self.out / "result.json")

    def attempt(
        self, part: str, what: str, call: Callable[..., None], *args: Any, needs_s: float = 20
    ) -> None:
        """Run a step of a part, if that part is wanted: an error fails the part, too little time leaves the step out."""
        if not self.wanted(part):
            return
        data = self.parts[part]
        data.setdefault("began", now())
        began = time.monotonic()
        self.say(f"[{part}] {what}")
        try:
            if self.left() < needs_s:
                raise NotRun(
                    f"{self.left():.0f} s left of {self.args.limit:.0f}, it needs about {needs_s:.0f}"
                )
            call(*args)
        except NotRun as reason:
            self.skip(part, what, str(reason))
        except Exception as error:
            seen = {"error": repr(error)[:600], "traceback": traceback.format_exc()[-2000:]}
            self.check(part, f"{what}: no error", False, seen)
        data["ended"] = now()
        data["seconds"] = round(data.get("seconds", 0) + time.monotonic() - began, 1)
        try:
            self.write()
        except Exception:
            self.say("the JSON could not be written:", traceback.format_exc())

    # -- making ready -------------------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Unpack, patch, put the plugin and the models in place, and compile. Raises what goes wrong."""
        work = self.work
        work.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        logs, caches, models = work / "logs", work / "caches", work / "models"
        for folder in (logs, models):
            shutil.rmtree(folder, ignore_errors=True)
        logs.mkdir()
        caches.mkdir(exist_ok=True)
        plugin = work / "plugin"
        shutil.rmtree(plugin, ignore_errors=True)
        info = plugin / "ddtree_sglang-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree-sglang\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nddtree = ddtree_sglang.plugin:register\n"
        )
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "ddtree_sglang", plugin / "ddtree_sglang", ignore=ignore)
        kept = work / "kept"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        for file in (
            HERE / "tiny_models.py",
            HERE / "tree_kernels.py",
            ROOT / "tests/ddtree/cpu/make_models.py",
        ):
            shutil.copy(file, kept)
        shutil.copy(ROOT / "patches" / "sglang-0.5.11" / PATCH, kept)
        stubs = None
        if not self.cuda:
            stubs = kept / "stubs"
            shutil.copytree(ROOT / "tests/ddtree/cpu/stubs", stubs, ignore=ignore)
        site: Path = self.args.site
        self.site = Site(
            device=self.args.device,
            plugin=plugin,
            stubs=stubs,
            packages=site if site.is_dir() else work / "site",
            patched=work / "patched",
            models=models,
            caches=caches,
            logs=logs,
            python=sys.executable,
            block=self.block,
            names=self.names,
        )
        os.chdir(work)

    def unpack(self) -> None:
        """The released sglang, if it came as an archive."""
        if self.args.site.is_dir() or (self.site.packages / ".whole").exists():
            return
        self.say("unpacking")
        shutil.rmtree(self.site.packages, ignore_errors=True)
        with tarfile.open(self.args.site) as archive:
            archive.extractall(self.site.packages, filter="tar")
        (self.site.packages / ".whole").touch()

    def patch(self) -> None:
        """Make the patched tree; checks that a file was changed and that the patch fits without fuzz."""
        released = self.site.packages
        diff = (self.work / "kept" / PATCH).read_text()
        changed = apply_patch(diff, lambda path: (released / path).read_text())
        shutil.rmtree(self.site.patched, ignore_errors=True)
        shutil.copytree(released / "sglang", self.site.patched / "sglang", symlinks=True)
        files = {}
        for path, text in changed.items():
            before = (released / path).read_bytes()
            (self.site.patched / path).write_text(text)
            files[path] = {
                "released_sha256": hashlib.sha256(before).hexdigest(),
                "patched_sha256": hashlib.sha256(text.encode()).hexdigest(),
            }
        self.result["patched_files"] = files

    def compile(self) -> None:
        """Byte-compile what servers import, once instead of in every start. It may fail: then starts are slower."""
        if not self.cuda:
            return
        trees = [self.site.packages, self.site.plugin]
        try:
            subprocess.run(
                [sys.executable, "-m", "compileall", "-q", "-j", "8", *map(str, trees)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=100,
                check=False,
            )
        except subprocess.TimeoutExpired:
            self.say("not all was byte-compiled in 100 s")

    def make_models(self) -> None:
        size = "large" if self.cuda else "small"
        done = subprocess.run(
            [
                *(sys.executable, str(self.work / "kept" / "tiny_models.py")),
                *(str(self.work / "kept" / "make_models.py"), str(self.site.models), str(self.block), size),
            ],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"tiny_models.py: exit {done.returncode}\n{done.stderr[-1500:]}")

    # -- servers ------------------------------------------------------------------------------------------------

    def server(self, name: str, **kind: Any) -> Server:
        """A new server of this run."""
        self.port = free_port(self.port + 1)
        if not self.cuda:
            kind["dtype"] = "float32"
            kind["tokens"] = min(kind.get("tokens", 4096), 4096)
        if not self.padded and "graphs" not in kind:
            kind["graphs"] = (1, 2, 3, 4)
        server = Server(name, self.port, **kind)
        self.servers[name] = server
        return server

    def tree_server(self, budget: int, topk: int, pair: str = "lower", name: str = "", **kind: Any) -> Server:
        return self.server(
            name or f"ddtree-{budget}-{topk}", algorithm="DDTREE", budget=budget, topk=topk, pair=pair, **kind
        )

    def launch(self, servers: Sequence[Server]) -> None:
        """Start them, one after the other without waiting."""
        if servers:
            self.say("starting", " ".join(server.name for server in servers))
        for server in servers:
            try:
                server.launch(self.site)
            except OSError as error:
                server.start = f"could not be started: {error}"
            time.sleep(1.0)

    def watch(self) -> None:
        """Look at starting servers until the run is done (a thread)."""
        while not self.done.wait(0.5):
            for server in list(self.servers.values()):
                if server.start == "starting":
                    try:
                        state = server.poll(self.start_limit)
                    except Exception as error:
                        state = server.start = f"could not be watched: {error!r}"
                    if state != "starting":
                        self.say(server.name, state, f"{time.monotonic() - server.began:.0f} s")

    def wait(self, servers: Sequence[Server]) -> None:
        """Until none of them is starting. One that ended is tried once more, unless it was meant to end."""
        self._settle(servers)
        failed = [s for s in servers if s.start.startswith("exit") and s.name not in ("crash", "refused")]
        if failed and self.left() > 240:
            for server in failed:
                self.say(server.name, server.start, errors_of(server.text())[-1:])
                server.end()
                if server.log.exists():
                    server.log.rename(server.log.with_name(f"{server.name}.first.log"))
            self.result.setdefault("started_twice", []).extend(server.name for server in failed)
            self.launch(failed)
            self._settle(failed)
        self.result.setdefault("gpu_memory_mib", []).append(
            {"servers": [s.name for s in self.servers.values() if s.alive], "used": gpu_memory()}
        )

    def _settle(self, servers: Sequence[Server]) -> None:
        last = time.monotonic()
        while any(server.start == "starting" for server in servers):
            if self.left() < 45:
                for server in servers:
                    if server.start == "starting":
                        server.start = "given up: no time left"
                        server.end()
            if time.monotonic() - last > 25:
                last = time.monotonic()
                self.say("waiting for", " ".join(s.name for s in servers if s.start == "starting"))
            time.sleep(0.3)

    def stop(self, *servers: Server) -> None:
        for server in servers:
            server.end()

    def ready(self, server: Server) -> Server:
        """The server, if it can be asked. Raises RuntimeError with its last error otherwise."""
        if server.start.startswith("given up"):
            raise NotRun(f"{server.name} was not up when the time was over")
        if not server.alive:
            log = server.text()
            raise RuntimeError(
                f"{server.name} is not up: {server.start}, exit status {server.exit}; "
                f"{errors_of(log)[-2:] or log[-400:]}"
            )
        return server

    def alone(self, server: Server) -> Server:
        """The server, when no other is starting: for times."""
        self._settle([s for s in self.servers.values() if s.start == "starting"])
        return self.ready(server)

    # -- parts --------------------------------------------------------------------------------------------------

    def env(self) -> None:
        seen: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release()}
        seen["cpus"] = os.cpu_count()
        seen["sha256"] = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in [
                self.work / "kept" / PATCH,
                *sorted((self.site.plugin / "ddtree_sglang").glob("*.py")),
            ]
        }
        seen["script_sha256"] = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in [*sorted(HERE.glob("*.py")), self.work / "kept" / "make_models.py"]
        }
        code = (
            "import json, torch\n"
            "from importlib.metadata import version\n"
            "def of(name):\n"
            "    try: return version(name)\n"
            "    except Exception: return None\n"
            "names = 'torch triton sglang sglang-kernel transformers flashinfer-python'.split()\n"
            "cuda = torch.cuda.is_available()\n"
            "print(json.dumps({'packages': {n: of(n) for n in names}, 'torch': torch.__version__,\n"
            " 'cuda': torch.version.cuda, 'gpu': torch.cuda.get_device_name() if cuda else None,\n"
            " 'gpu_capability': torch.cuda.get_device_capability() if cuda else None,\n"
            " 'gpu_memory_bytes': torch.cuda.get_device_properties(0).total_memory if cuda else None}))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | {"PYTHONPATH": str(self.site.packages)},
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-1000:])
        seen |= json.loads(done.stdout.strip().splitlines()[-1])
        seen["nvidia_smi"] = nvidia_smi("name,driver_version,memory.total") if self.cuda else None
        self.parts["env"]["seen"] = seen
        version = (seen["packages"] or {}).get("sglang")
        self.check("env", "sglang is 0.5.11", version == "0.5.11", version)
        self.check("env", "the patch fits the released sglang", "patched_files" in self.result)
        if self.cuda:
            self.check("env", "there is a GPU", bool(seen["gpu"]), seen["gpu"])

    def tree(self) -> None:
        out = self.work / "tree.json"
        out.unlink(missing_ok=True)
        limit = 75 if self.cuda else 12
        log = self.site.logs / "tree.log"
        with log.open("wb") as file:
            try:
                code: int | None = subprocess.run(
                    [
                        *(sys.executable, str(self.work / "kept" / "tree_kernels.py")),
                        *(self.args.device, str(out), str(limit)),
                    ],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=limit + 60,
                    check=False,
                    env=os.environ | {"PYTHONPATH": str(self.site.plugin)},
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        rows = json.loads(out.read_text()) if out.exists() else []
        part = self.parts["tree"]
        part["rows"] = rows
        part["units"] = (
            "call_us: tree, mask and positions launched one by one, mean of timed_calls; replay_us: the same as the "
            "worker does it, with a CUDA graph; gpu_us: sum of its kernels' times"
        )
        self.check(
            "tree",
            "the script ended well",
            code == 0,
            {"exit": code, "log": tail(log)[-800:] if code else ""},
        )
        ran = [row for row in rows if "skipped" not in row]
        if len(ran) < len(rows):
            self.skip("tree", f"{len(rows) - len(ran)} of {len(rows)} shapes", "no time left")
        proofs = ("equals_cpu", "no_sync", "graph_replay_equals_cpu") if self.cuda else ("equals_cpu",)
        for proof in proofs:
            good = [row for row in ran if row.get(proof) is True]
            bad = [row for row in ran if row.get(proof) is not True]
            self.check(
                "tree",
                f"{proof} in all shapes",
                bool(ran) and not bad,
                {"shapes": len(good), "others": bad[:3]},
            )

    def crash(self, server: Server) -> None:
        """Unpatched, without the self-check: the story's crash."""
        part = self.parts["crash"]
        if not self.check(
            "crash", "unpatched, self-check skipped: gets ready", server.start == "ready", server.start
        ):
            part["unpatched"] = {"start": server.start, "errors": errors_of(server.text())[-3:]}
            return
        answer = server.ask(self.prompts[0], TOKENS)
        end = time.monotonic() + 30
        while server.exit is None and time.monotonic() < end:
            time.sleep(0.3)
        log = server.text()
        text = re.findall(r"\w*Error: The size of tensor a .*", log)
        nodes = server.budget + 1
        wanted = f"The size of tensor a ({self.block}) must match the size of tensor b ({nodes}) at non-singleton dimension 0"
        at = log.find("Scheduler hit an exception")
        part["unpatched"] = {
            "start": server.start,
            "first_request": {"error": answer.error, "status": answer.status, "tokens": len(answer.tokens)},
            "exit_status": server.exit,
            "text": text[:1],
            "traceback": log[at : at + 4000] if at >= 0 else None,
        }
        self.check(
            "crash", "the first request gets no answer", bool(answer.error), answer.error or answer.tokens[:5]
        )
        self.check("crash", "the server is dead then", server.exit not in (None, 0), server.exit)
        self.check("crash", f"its log says: {wanted}", any(wanted in line for line in text), text[:1])

    def refused(self, server: Server) -> None:
        """Unpatched with the self-check: no server, and the patch is named."""
        log = server.text()
        said = [line for line in log.splitlines() if "DDTreeError" in line and "raise" not in line][-1:]
        self.parts["crash"]["self_check"] = {
            "start": server.start,
            "exit_status": server.exit,
            "text": said,
            "captured_before": "Capture cuda graph end" in log,
        }
        self.check(
            "crash", "unpatched, self-check on: no start", server.start.startswith("exit"), server.start
        )
        self.check("crash", "the refusal names the patch", any(PATCH in line for line in said), said)

    def requests(self, which: Sequence[int], tokens: int = TOKENS) -> list[tuple[list[int], int]]:
        return [(self.prompts[index], tokens) for index in which]

    def turns(self, outputs: Sequence[Sequence[int]]) -> list[list[int]]:
        """Second turns: prompt and answer of the first, and three tokens more."""
        return [[*self.prompts[index], *outputs[index], 4, 5, 6] for index in range(8)]

    def make_reference(self, key: str, server: Server) -> None:
        """What the plain server says, one request at a time."""
        self.ready(server)
        outputs = [answer.tokens for answer in server.ask_all(self.requests(range(24)), 1)]
        continued = [
            answer.tokens for answer in server.ask_all([(turn, TOKENS) for turn in self.turns(outputs)], 1)
        ]
        whole = all(len(output) == TOKENS for output in [*outputs, *continued])
        self.check("equality", f"reference {key}: all requests answered in full", whole)
        spoken = sorted({token for output in outputs for token in output})
        different = len({tuple(output) for output in outputs})
        repeating = sum(period(output) is not None for output in outputs)
        if key == "wide":
            self.check(
                "equality", "the target `wide` says more than 15 different tokens", len(spoken) > 15, spoken
            )
            few = repeating <= len(outputs) // 2
            self.check("equality", "the target `wide`: most texts do not repeat themselves", few, repeating)
        if key in ("lower", "wide"):
            self.check(
                "equality",
                f"the target `{key}` reads its context: most outputs differ",
                different > 18,
                different,
            )
        if whole:
            self.reference[key] = {"outputs": outputs, "continued": continued, "server": server}
        self.parts["equality"].setdefault("reference", {})[key] = {
            "server": server.name,
            "requests": len(outputs) + len(continued),
            "tokens_said": spoken,
            "different_outputs": different,
            "repeating_outputs": repeating,
        }
        if whole:
            best = self.best_of(key, server, [*self.prompts[0], *outputs[0][:5]])
            agrees = best[0][1] == outputs[0][5] or best[0][0] - best[1][0] < self.epsilon_of[server.dtype]
            self.check(
                "equality", f"reference {key}: the best log-probability is the token said", agrees, best
            )

    def best_of(self, key: str, plain: Server, ids: list[int]) -> list[tuple[float, int]]:
        """The 5 best log-probabilities for the next token, best first, as the plain server says. Raises RuntimeError."""
        known = (key, tuple(ids))
        if known not in self.best:
            answer = plain.ask(ids, 1, {"return_logprob": True, "top_logprobs_num": 5})
            if answer.error:
                raise RuntimeError(answer.error)
            self.best[known] = [(row[0], row[1]) for row in answer.meta["output_top_logprobs"][0]]
        return self.best[known]

    def judged(
        self,
        key: str,
        prompts: Sequence[Sequence[int]],
        expected: Sequence[Sequence[int]],
        answers: Sequence[Answer],
    ) -> dict[str, Any]:
        """Compare answers with what the plain server said."""
        plain: Server = self.reference[key]["server"]

        def ask(index: int, place: int) -> list[tuple[float, int]]:
            return self.best_of(key, plain, [*prompts[index], *expected[index][:place]])

        epsilon = self.epsilon_of[plain.dtype]
        outcome = judge(expected, [answer.tokens for answer in answers], ask, epsilon)
        errors = [answer.error for answer in answers if answer.error]
        if errors:
            outcome["errors"] = errors[:3]
        return outcome

    def compare(self, server: Server, key: str, brief: bool = False) -> None:
        """One server against the plain one: batch sizes, short outputs, prefix hits, then nothing missing."""
        self.ready(server)
        reference = self.reference.get(key)
        if reference is None:
            raise NotRun(f"there is no reference {key}")
        outputs, continued = reference["outputs"], reference["continued"]
        spec = server.algorithm != "none"
        rows: dict[str, Any] = {}
        row: dict[str, Any] = {"server": server.name, "reference": key, "phases": rows}
        self.parts["equality"].setdefault("servers", {})[server.name] = row
        met: list[Answer] = []
        phases: list[tuple[str, int, Sequence[int]]] = [
            ("batch 1", 1, range(6)),
            ("batch 2", 2, range(6, 14)),
            ("batch 4", 4, range(24)),
            ("batch 3", 3, range(24)),
        ]
        for name, concurrency, which in phases[2:] if brief else phases:
            mark = server.mark()
            answers = server.ask_all(self.requests(which), concurrency)
            met += answers
            outcome = self.judged(key, [self.prompts[i] for i in which], [outputs[i] for i in which], answers)
            log = server.text(mark)
            outcome["decode_lines_by_batch"] = running_sizes(log)
            rows[name] = outcome
            self.check(
                "equality",
                f"{server.name}: {name} equals plain greedy",
                outcome["passed"],
                {**{k: len(outcome[k]) for k in ("near_ties", "mismatches")}, "equal": outcome["equal"]},
            )
            kind = "graph" if self.cuda else "eager"
            seen = outcome["decode_lines_by_batch"][kind]
            self.check(
                "equality", f"{server.name}: {name} was really that batch", str(concurrency) in seen, seen
            )
            self.ready(server)
        if not brief:
            which = list(range(6))
            for tokens in (1, 2, 3):
                answers = server.ask_all(self.requests(which, tokens), 3)
                outcome = self.judged(
                    key, [self.prompts[i] for i in which], [outputs[i][:tokens] for i in which], answers
                )
                rows[f"max_tokens {tokens}"] = outcome
                self.check(
                    "equality", f"{server.name}: max_tokens {tokens}", outcome["passed"], outcome["equal"]
                )
            turns = self.turns(outputs)
            answers = server.ask_all([(turn, TOKENS) for turn in turns], 3)
            outcome = self.judged(key, turns, continued, answers)
            cached = [answer.meta.get("cached_tokens", 0) for answer in answers]
            hits = sum(count >= len(turn) - 5 for count, turn in zip(cached, turns, strict=True))
            outcome["cached_tokens"], outcome["whole_prefix_from_cache"] = cached, hits
            rows["prefix hits"] = outcome
            self.check("equality", f"{server.name}: prefix hits equal", outcome["passed"], outcome["equal"])
            # a first turn that went another way at a near tie left another prefix in the cache
            self.check(
                "equality", f"{server.name}: prefixes came from the cache", hits >= len(turns) // 2, hits
            )
        if spec:
            row["accept_length"] = accepted(met)
        row["graphs_captured"] = sizes = captured(server.text())
        if self.cuda and 3 not in server.graphs:
            padded = bool(sizes) and all(3 not in one and 4 in one for one in sizes)
            self.check("equality", f"{server.name}: 3 ran on the graph for 4", padded, sizes)
        row["totals"] = {
            "requests": sum(phase["requests"] for phase in rows.values()),
            "equal": sum(phase["equal"] for phase in rows.values()),
            "near_ties": sum(len(phase["near_ties"]) for phase in rows.values()),
            "mismatches": sum(len(phase["mismatches"]) for phase in rows.values()),
        }
        self.say(server.name, row["totals"], "accept", row.get("accept_length"))
        row["tokens_when_idle"] = idle = server.settled()
        self.check(
            "equality", f"{server.name}: no slot of KV in use when idle", not idle["num_used_tokens"], idle
        )
        row["flush"] = server.flush()
        time.sleep(0.7)
        self.check("equality", f"{server.name}: alive, no error in its log", self.sound(server), row["flush"])

    def sound(self, server: Server) -> bool:
        """Alive, and its log names no error."""
        return server.alive and not errors_of(server.text())

    def soak(self, server: Server) -> None:
        """300 mixed requests, then every token of KV must be back."""
        self.ready(server)
        part = self.parts["soak"]
        part["server"] = server.name
        count = self.args.soak
        rng = random.Random(self.args.seed)
        self.check("soak", "flushed before", server.flush() == "flushed")
        before = server.used_tokens()
        kinds = (
            ["plain"] * 34
            + ["prefix"] * 16
            + ["sampled"] * 14
            + ["closed"] * 12
            + ["aborted"] * 12
            + ["stop"] * 12
        )
        longest = 200 if self.cuda else 60
        jobs = []
        for number in range(count):
            prompt = list(self.prompts[rng.randrange(24)])
            if rng.random() < 0.5:
                prompt = [rng.randrange(3, 32) for _ in range(rng.randrange(3, 120))]
            tokens = rng.choice([1, 2, 3, rng.randrange(4, 40), rng.randrange(4, longest), longest])
            jobs.append((number, rng.choice(kinds), prompt, tokens, rng.random()))
        said: list[list[int]] = []
        outcomes: dict[str, dict[str, int]] = {}
        faults: list[Any] = []
        # the greedy ones: number, prompt, tokens, further parameters, answer
        greedy: list[tuple[int, list[int], int, dict[str, Any], Answer]] = []
        spans: dict[int, tuple[str, float, float]] = {}

        def one(job: tuple[int, str, list[int], int, float]) -> None:
            number, kind, prompt, tokens, chance = job
            answer, begun = Answer(), time.monotonic()
            if kind == "prefix" and said:
                earlier = said[int(chance * len(said))]
                prompt = [*earlier, 5, 6, 7][:300]
                answer = server.ask(prompt, tokens)
                what = "hit" if answer.meta.get("cached_tokens", 0) > 2 else "no hit"
            elif kind == "sampled":
                answer = server.ask(prompt, tokens, temperature=0.8 + chance, top_p=0.9, top_k=20)
                what = "done"
                if not set(answer.tokens) <= set(SPOKEN):
                    faults.append([number, kind, "said what the target never says", answer.tokens[:8]])
            elif kind == "closed":
                what = server.hang_up(prompt, max(tokens, longest), 1 + int(chance * 6))
                if what.startswith(("error", "status")):
                    faults.append([number, kind, what])
            elif kind == "aborted":
                rid = f"soak-{number}"
                timer = threading.Timer(0.01 + chance / 5, lambda: quiet_abort(server, rid))
                timer.start()
                answer = server.ask(prompt, longest, {"rid": rid})
                timer.join()
                reason = (answer.meta.get("finish_reason") or {}).get("type")
                what = reason or f"status {answer.status}"
                if not answer.status:
                    faults.append([number, kind, answer.error])
            elif kind == "stop":
                answer = server.ask(prompt, tokens, **STOPPING)
                inside = SPOKEN[0] in answer.tokens[:-1]
                what = "stopped" if answer.tokens[-1:] == [SPOKEN[0]] else "length"
                if inside:
                    faults.append([number, kind, "went on behind a stop token", answer.tokens[:60]])
            else:
                answer = server.ask(prompt, tokens)
                what = "done"
            if kind in ("plain", "prefix", "sampled") and len(answer.tokens) != tokens:
                faults.append([number, kind, tokens, len(answer.tokens), answer.error])
            if kind == "stop" and answer.error:
                faults.append([number, kind, answer.error])
            with self.lock:
                spans[number] = (kind, begun, time.monotonic())
                if kind in ("plain", "prefix", "stop"):
                    more = STOPPING if kind == "stop" else {}
                    greedy.append((number, prompt, tokens, more, answer))
                row = outcomes.setdefault(kind, {})
                row[what] = row.get(what, 0) + 1
                if kind == "plain" and answer.tokens:
                    said.append([*prompt, *answer.tokens])

        began = time.monotonic()
        with ThreadPoolExecutor(7) as pool:
            list(pool.map(one, jobs))
        part["seconds_of_requests"] = round(time.monotonic() - began, 1)
        part["requests"], part["clients"], part["outcomes"] = len(jobs), 7, outcomes
        self.check("soak", f"all {count} requests ended as they should", not faults, faults[:5])
        some = {kind: sum(row.values()) for kind, row in outcomes.items()}
        self.check("soak", "every kind of request was among them", len(some) == 6, some)
        gone = outcomes.get("closed", {}).get("closed", 0) + outcomes.get("aborted", {}).get("abort", 0)
        self.check("soak", "some requests were really cut off", gone > 0, gone)
        hits = outcomes.get("prefix", {}).get("hit", 0)
        self.check("soak", "some prefixes came from the cache", hits > 0, hits)
        part["tokens_idle"] = idle = server.settled()
        self.check(
            "soak", "idle, cache kept: tokens in use and in all as before", idle == before, [before, idle]
        )
        part["flush"] = server.flush()
        self.check("soak", "nothing runs and the cache is dropped", part["flush"] == "flushed", part["flush"])
        time.sleep(3)
        self.ready(server)
        after = server.used_tokens()
        part["tokens_before"], part["tokens_after"] = before, after
        self.check(
            "soak", "cache dropped: tokens in use and in all as before", before == after, [before, after]
        )
        self.check(
            "soak", "no leak and no error in the log", self.sound(server), errors_of(server.text())[-3:]
        )
        answers = server.ask_all(self.requests(range(8)), 4)
        if "lower" in self.reference:
            self.soak_greedy(sorted(greedy, key=lambda job: job[0]), spans)
            outcome = self.judged("lower", self.prompts[:8], self.reference["lower"]["outputs"][:8], answers)
            part["afterwards"] = outcome
            self.check("soak", "outputs still equal plain greedy", outcome["passed"], outcome["equal"])
        else:
            self.check("soak", "requests are still answered", all(len(a.tokens) == TOKENS for a in answers))
            self.skip("soak", "equality of the greedy ones, and afterwards", "there is no reference")

    def soak_greedy(
        self,
        greedy: Sequence[tuple[int, list[int], int, dict[str, Any], Answer]],
        spans: dict[int, tuple[str, float, float]],
    ) -> None:
        """The greedy requests among the mixed ones against what the plain server says to each of them alone."""
        plain: Server = self.ready(self.reference["lower"]["server"])
        answers = [plain.ask(prompt, tokens, **more) for _, prompt, tokens, more, _ in greedy]
        expected = [answer.tokens for answer in answers]
        errors = [answer.error for answer in answers if answer.error]
        self.check("soak", "the plain server answered each greedy one", not errors, errors[:3])
        seen = [answer for *_, answer in greedy]
        outcome = self.judged("lower", [prompt for _, prompt, *_ in greedy], expected, seen)
        drawn = [(begin, end) for kind, begin, end in spans.values() if kind == "sampled"]
        own = [spans[number] for number, *_ in greedy]
        outcome["while_a_sampled_one_was_asked"] = beside = sum(
            any(begin < last and first < end for first, last in drawn) for _, begin, end in own
        )
        equal = [first_difference(*both) for both in zip(expected, (one.tokens for one in seen), strict=True)]
        outcome["tokens"] = sum(map(len, expected))
        outcome["tokens_equal"] = sum(
            len(text) if place is None else place for text, place in zip(expected, equal, strict=True)
        )
        self.parts["soak"]["greedy"] = outcome
        counts = {name: len(outcome[name]) for name in ("near_ties", "mismatches")}
        counts |= {name: outcome[name] for name in ("requests", "equal")}
        self.check("soak", "the greedy ones among them equal plain greedy", outcome["passed"], counts)
        self.check("soak", "greedy ones were asked while a sampled one was", beside > 0, beside)

    def speed(self, server: Server) -> None:
        """Accept length and tokens/s of one server."""
        self.alone(server)
        row: dict[str, Any] = {"algorithm": server.algorithm, "pair": server.pair, "batches": {}}
        if server.algorithm == "DDTREE":
            row |= {"budget": server.budget, "topk_cap": server.topk}
        self.parts["speed"].setdefault("servers", {})[server.name] = row
        tokens = 192 if self.cuda else 24
        server.ask_all([(prompt, 16) for prompt in self.prompts[:4]], 4)
        for batch in (1, 4):
            rates, met = [], []
            mark = server.mark()
            for _ in range(3 if self.cuda else 1):
                jobs = [(prompt, tokens) for prompt in self.prompts[: 2 if batch == 1 else 4]]
                began = time.monotonic()
                answers = server.ask_all(jobs, batch)
                rates.append(sum(len(answer.tokens) for answer in answers) / (time.monotonic() - began))
                met += answers
            whole = all(len(answer.tokens) == tokens for answer in met)
            self.check("speed", f"{server.name}: batch {batch}: all answered in full", whole)
            row["batches"][str(batch)] = {
                "tokens_per_s": figure(rates, 1),
                "step_ms": figure(step_times(server.text(mark), batch)),
                "accept_length": accepted(met) if server.algorithm != "none" else 1.0,
                "tokens_a_sample": sum(len(answer.tokens) for answer in met) // max(len(rates), 1),
            }
        row["units"] = (
            "tokens_per_s: output tokens over the client's wall clock, prefills included, a sample is a round of "
            "requests; step_ms: from the server's decode lines"
        )
        self.say(server.name, {b: (v["tokens_per_s"], v["accept_length"]) for b, v in row["batches"].items()})
        ends = {
            ("DFLASH", "lower"): (1.0, 1.05),
            ("DDTREE", "lower"): (2.0, 8.0),
            ("none", "lower"): (1.0, 1.0),
        }
        ends |= {
            ("DFLASH", "top"): (0.9 * self.block, self.block),
            ("DDTREE", "top"): (0.9 * self.block, self.block),
        }
        low, high = ends.get((server.algorithm, server.pair), (1.0, float(self.block)))
        seen = [value["accept_length"] for value in row["batches"].values()]
        good = all(value is not None and low <= value <= high for value in seen)
        self.check(
            "speed", f"{server.name}: accept length as the drafter deserves, {low:g} to {high:g}", good, seen
        )

    def cost(self, server: Server, batches: Sequence[int], tokens: int, part: str = "cost") -> None:
        """Times of the phases of a step, from a server that logs them."""
        self.alone(server)
        row: dict[str, Any] = {
            "tree_graph": server.env.get("DDTREE_TREE_GRAPH") != "0",
            "pair": server.pair,
            "budget": server.budget,
            "topk_cap": server.topk,
            "batches": {},
        }
        self.parts["cost"].setdefault("servers", {})[server.name] = row
        self.parts["cost"]["units"] = (
            "ms between CUDA events on the worker's stream (tree: candidates, tree, mask, positions; build: tree, mask, "
            "positions), medians over log lines, each a mean over 10 steps"
        )
        for batch in batches:
            jobs = self.jobs(server, batch, tokens, 1)
            accept = accepted(server.ask_all([(ids, 16) for ids, _ in jobs], batch)) or 1.0
            length = int(min(tokens * accept, 1200)) if server.dummy else tokens
            mark = server.mark()
            for number in range(2, 4):
                server.ask_all(self.jobs(server, batch, length, number), batch)
            time.sleep(0.3)
            log = server.text(mark)
            shares = times_shares(times_lines(log), batch)
            row["batches"][str(batch)] = shares
            name = f"{server.name}: batch {batch}: the log has times"
            self.check("cost", name, bool(shares), {k: shares.get(k) for k in ("lines", "steps", "ms")})
            if shares and server.dummy and row["tree_graph"]:
                share = shares["share_of_step"].get("build")
                self.check(
                    "cost",
                    f"{server.name}: batch {batch}: tree, mask and positions below {BUILD_SHARE:.0%} of a step",
                    share is not None and share < BUILD_SHARE,
                    share,
                )
        self.say(server.name, {b: (s.get("ms"), s.get("share_of_step")) for b, s in row["batches"].items()})

    def jobs(self, server: Server, batch: int, tokens: int, salt: int) -> list[tuple[list[int], int]]:
        """``batch`` requests of 64 tokens that no other round sends; at least 2 for a tiny model."""
        rng = random.Random(1000 * batch + salt)
        top = 32 if not server.dummy else 300
        return [([rng.randrange(3, top) for _ in range(64)], tokens) for _ in range(batch)]

    def real(self, server: Server) -> None:
        """Time of a step on dummy weights at several batch sizes."""
        self.alone(server)
        part = self.parts["real"]
        name = {"none": "none", "DFLASH": "dflash"}.get(server.algorithm, f"ddtree-{server.budget}")
        row: dict[str, Any] = {"server": server.name, "batches": {}}
        part.setdefault("servers", {})[name] = row
        batches = (1, 4, 16) if self.cuda else (1, 4)
        for batch in batches:
            warm = server.ask_all(self.jobs(server, batch, 24, 0), batch)
            accept = accepted(warm) or 1.0
            # about 160 steps a round
            tokens = int(min(160 * accept, 1200)) if self.cuda else 24
            mark, met, walls = server.mark(), [], []
            for number in range(1, 3):
                began = time.monotonic()
                answers = server.ask_all(self.jobs(server, batch, tokens, number), batch)
                wall = time.monotonic() - began
                met += answers
                steps = [answer.meta.get("spec_verify_ct") or len(answer.tokens) - 1 for answer in answers]
                walls.append(1000 * wall / max(*steps, 1))
            whole = all(len(answer.tokens) == tokens for answer in met)
            errors = [answer.error for answer in met if answer.error][:2]
            self.check("real", f"{server.name}: batch {batch}: all answered in full", whole, errors)
            times = step_times(server.text(mark), batch)
            row["batches"][str(batch)] = {
                "step_ms": figure(times),
                "client_step_ms": figure(walls),
                "accept_length": accepted(met) if server.algorithm != "none" else 1.0,
                "tokens_a_request": tokens,
            }
            self.check(
                "real",
                f"{server.name}: batch {batch}: at least 8 decode lines at that batch",
                len(times) >= (8 if self.cuda else 1),
                running_sizes(server.text(mark)),
            )
        row["graphs_captured"] = captured(server.text())
        self.say(server.name, {b: v["step_ms"] for b, v in row["batches"].items()})

    def real_end(self) -> None:
        """Break-even accept lengths of what was measured."""
        part = self.parts["real"]
        part["units"] = (
            "step_ms: milliseconds of a decode step, from the server's decode lines (tokens/s since the line before; 10 "
            "steps a line), all requests of the batch running; client_step_ms: a round's wall clock over its steps, "
            "prefill included. over_none: accept length above which DDTREE beats no speculation; over_dflash: factor by "
            "which its accept length must exceed DFLASH's. Prompts of 64 tokens, dummy weights: the acceptance of this "
            "run means nothing. `none` runs with sglang's overlap scheduler, its default; DFLASH and DDTREE cannot."
        )
        steps: dict[str, dict[str, float]] = {}
        for name, row in part.get("servers", {}).items():
            for batch, seen in row["batches"].items():
                if seen["step_ms"].get("samples"):
                    steps.setdefault(name, {})[batch] = seen["step_ms"]["median"]
        part["break_even"] = break_even(steps)
        whole = [
            row for row in part["break_even"] if row["over_none"] and (row["over_dflash"] or not self.cuda)
        ]
        wanted = 12 if self.cuda else 2
        self.check(
            "real", f"break-even stated for {wanted} of budget x batch", len(whole) >= wanted, len(whole)
        )

    # -- the run ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.set_up()
        watcher = threading.Thread(target=self.watch, daemon=True)
        watcher.start()
        with ThreadPoolExecutor(1) as pool:
            # no server is up while the tree step is timed; unpacking takes one core meanwhile
            models = pool.submit(self.prepare)
            self.attempt("tree", "the tree step alone", self.tree, needs_s=60)
            models.result()
        self.attempt("env", "versions", self.env)
        self.write()
        if self.cuda:
            self.run_waves()
        else:
            self.run_small()

    def prepare(self) -> None:
        self.unpack()
        self.make_models()
        self.say("models made")
        self.compile()
        self.patch()
        self.say("compiled and patched")

    def some(self, *pairs: tuple[Server, tuple[str, ...]]) -> list[Server]:
        """The servers that a wanted part needs."""
        return [server for server, parts in pairs if self.wanted(*parts)]

    def room(self, seconds: float, part: str, what: str) -> bool:
        """Whether a wave of servers still fits; noted as not run otherwise."""
        if self.left() >= seconds:
            return True
        if self.wanted(part):
            self.skip(
                part, what, f"{self.left():.0f} s left of {self.args.limit:.0f}, it needs about {seconds:.0f}"
            )
        return False

    def run_waves(self) -> None:
        """The GPU run: waves of servers; times when a wave is up, comparisons while the next one starts."""
        skip = {"DDTREE_SKIP_SELF_CHECK": "1"}
        plain = self.server("plain", patched=False)
        dflash = self.server("dflash", algorithm="DFLASH", patched=False)
        main = self.tree_server(32, 8)
        top, dflash_top = (
            self.server("plain-top", pair="top"),
            self.server("dflash-top", algorithm="DFLASH", pair="top"),
        )
        crash = self.tree_server(32, 8, name="crash", patched=False, env=skip)
        refused = self.tree_server(32, 8, name="refused", patched=False)
        first = self.some(
            (plain, ("equality", "soak", "speed")),
            (crash, ("crash",)),
            (refused, ("crash",)),
            (main, ("equality", "soak", "speed")),
            (dflash, ("equality", "speed")),
            (top, ("equality", "speed")),
            (dflash_top, ("speed",)),
        )
        self.launch(first)
        self.wait(first)
        self.attempt("crash", "unpatched, self-check skipped", self.crash, crash)
        self.attempt("crash", "unpatched, self-check on", self.refused, refused)
        self.stop(crash, refused)
        for server in (plain, dflash, main, top, dflash_top):
            self.attempt("speed", server.name, self.speed, server, needs_s=40)
        self.stop(dflash_top)
        self.start_limit = min(self.start_limit, 180)
        # before other servers are asked to pad a batch
        self.attempt("equality", "reference", self.make_reference, "lower", plain)
        self.attempt("equality", main.name, self.compare, main, "lower")
        self.unpad(main)

        # second wave
        on = {"DDTREE_TIMES": "1"}
        off = on | {"DDTREE_TREE_GRAPH": "0"}
        timed = self.tree_server(32, 8, name="times-graph", env=on)
        eager = self.tree_server(32, 8, name="times-eager", env=off)
        main_top = self.tree_server(32, 8, "top", name="ddtree-32-8-top")
        adaptive = self.tree_server(32, 8, name="ddtree-32-8-adaptive", schedule="adaptive")
        plain_wide = self.server("plain-wide", pair="wide", patched=False)
        wide = self.tree_server(32, 8, "wide", name="ddtree-32-8-wide")
        grid = [row for row in GRID[1:] if row[:2] in self.args.grid]
        near = [self.tree_server(*row) for row in grid[:4]]
        spare = self.tree_server(32, 8, name="ddtree-32-8-unpadded", graphs=(1, 2, 3, 4))
        second = self.some(
            (timed, ("cost",)),
            (eager, ("cost",)),
            (main_top, ("speed", "equality")),
            *((server, ("equality",)) for server in (plain_wide, wide, adaptive, *near)),
            (spare, () if self.padded else ("equality", "soak")),
        )
        if self.left() >= (150 if self.wanted("cost", "speed") else 90):
            self.launch(second)
        else:
            for part, what in (
                (
                    "equality",
                    "the other targets' texts, "
                    + " ".join(server.name for server in (wide, adaptive, *near)),
                ),
                ("cost", "the tiny models"),
                ("speed", main_top.name),
            ):
                if self.wanted(part):
                    self.skip(part, what, "no time left for the second wave of servers")
            second = []
        self.attempt("equality", "reference of the other target", self.make_reference, "top", top)
        self.attempt("equality", "plain against itself", self.compare, plain, "lower", True)
        self.attempt("equality", dflash.name, self.compare, dflash, "lower")
        if self.padded:
            self.attempt("soak", "300 mixed requests", self.soak, main, needs_s=90)
        self.stop(dflash, main)
        self.wait(second)
        if spare in second:
            self.attempt("equality", spare.name, self.compare, spare, "lower")
            self.attempt("soak", "300 mixed requests", self.soak, spare, needs_s=90)
            self.stop(spare)
        if main_top in second:
            self.attempt("speed", main_top.name, self.speed, main_top, needs_s=40)
        for server in (timed, eager):
            if server in second:
                self.attempt("cost", server.name, self.cost, server, (1, 4), 400, needs_s=40)
        self.stop(timed, eager)

        # third wave; the second is compared meanwhile
        third = [self.tree_server(*row) for row in grid[4:10]] if self.wanted("equality") else []
        if third and not self.room(200, "equality", " ".join(server.name for server in third)):
            third = []
        self.launch(third)
        if wide in second:
            self.attempt("equality", "reference of many tokens", self.make_reference, "wide", plain_wide)
            self.attempt("equality", wide.name, self.compare, wide, "wide")
            self.stop(plain_wide, wide)
        for server in (adaptive, *near):
            if server in second:
                self.attempt("equality", server.name, self.compare, server, "lower")
        if main_top in second:
            self.attempt("equality", main_top.name, self.compare, main_top, "top", True)
        self.stop(adaptive, *near, main_top, top)
        self.wait(third)

        # fourth wave: dummy weights; the third is compared meanwhile
        large: dict[str, Any] = {"pair": "real", "dummy": True, "graphs": (1, 4, 16), "requests": 16}
        large |= {"tokens": 24576, "context": 4096, "static": 0.8}
        half = [
            self.server("real-none", **large),
            self.server("real-dflash", algorithm="DFLASH", **large),
            self.tree_server(8, 8, name="real-ddtree-8", **large),
            self.tree_server(32, 8, name="real-ddtree-32", **large),
        ]
        half = (
            half if self.wanted("real") and self.room(180, "real", "none, DFLASH, budgets 8 and 32") else []
        )
        self.launch(half)
        for server in third:
            self.attempt("equality", server.name, self.compare, server, "lower")
        self.stop(*third)
        self.wait(half)
        for server in half:
            self.attempt("real", server.name, self.real, server, needs_s=45)
        self.stop(*half)

        rest = [
            self.tree_server(16, 8, name="real-ddtree-16", **large),
            self.tree_server(64, 8, name="real-ddtree-64", **large),
            self.tree_server(32, 8, name="real-times-graph", env=on, **large),
            self.tree_server(32, 8, name="real-times-eager", env=off, **large),
        ]
        wanted = (("real",), ("real",), ("cost",), ("cost",))
        rest = self.some(*zip(rest, wanted, strict=True))
        if not self.room(170, "real", "budgets 16 and 64"):
            if self.wanted("cost"):
                self.skip("cost", "share of a step on weights of a real size", "no time left")
            rest = []
        self.launch(rest)
        self.wait(rest)
        for server in rest:
            if "times" in server.name:
                self.attempt("cost", server.name, self.cost, server, (1, 4, 16), 160, needs_s=45)
            else:
                self.attempt("real", server.name, self.real, server, needs_s=45)
        self.stop(*rest)
        self.attempt("real", "break-even", self.real_end)

        last = [self.tree_server(*row) for row in grid[10:]] if self.wanted("equality") else []
        if last and not self.room(150, "equality", " ".join(server.name for server in last)):
            last = []
        self.launch(last)
        self.wait(last)
        for server in last:
            self.attempt("equality", server.name, self.compare, server, "lower", needs_s=35)

    def unpad(self, main: Server) -> None:
        """If the main server died on a padded batch, later servers have a graph for every size; that is recorded."""
        if not self.wanted("equality") or main.alive or main.start != "ready":
            return
        self.padded = False
        self.result["padding"] = (
            "the first server died: later ones have graphs of 1, 2, 3, 4, nothing is padded"
        )
        self.say(self.result["padding"])

    def run_small(self) -> None:
        """The same on a CPU, to try the script: what needs CUDA graphs is left out."""
        for part, what in (("crash", "the part"),):
            if self.wanted(part):
                self.skip(part, what, "needs CUDA graphs")
        plain, main = self.server("plain", patched=False), self.tree_server(32, 8)
        dflash = self.server("dflash", algorithm="DFLASH")
        first = self.some(
            (plain, ("equality", "soak", "speed")),
            (main, ("equality", "soak", "speed")),
            (dflash, ("equality", "speed")),
        )
        self.launch(first)
        self.wait(first)
        for server in (plain, dflash, main):
            self.attempt("speed", server.name, self.speed, server, needs_s=20)
        self.attempt("equality", "reference", self.make_reference, "lower", plain)
        self.attempt("equality", main.name, self.compare, main, "lower")
        self.attempt("equality", "plain against itself", self.compare, plain, "lower", True)
        self.attempt("equality", dflash.name, self.compare, dflash, "lower", True)
        self.attempt("soak", "mixed requests", self.soak, main, needs_s=20)
        self.stop(dflash, main)
        large: dict[str, Any] = {"pair": "real", "dummy": True, "requests": 4, "env": {"DDTREE_TIMES": "1"}}
        chain = self.tree_server(7, 1, "random")
        adaptive = self.tree_server(32, 8, name="ddtree-32-8-adaptive", schedule="adaptive")
        plain_wide = self.server("plain-wide", pair="wide", patched=False)
        wide = self.tree_server(32, 8, "wide", name="ddtree-32-8-wide")
        second = self.some(
            (self.tree_server(32, 8, name="times", env={"DDTREE_TIMES": "1"}), ("cost",)),
            (self.server("real-none", **large), ("real",)),
            (self.tree_server(8, 8, name="real-ddtree-8", **large), ("real",)),
            (chain, ("equality",)),
            (adaptive, ("equality",)),
            (plain_wide, ("equality",)),
            (wide, ("equality",)),
        )
        if not self.room(150, "real", "second wave of servers"):
            second = []
        self.launch(second)
        self.wait(second)
        for server in second:
            if server is plain_wide:
                self.attempt("equality", "reference of many tokens", self.make_reference, "wide", server)
            elif server in (chain, adaptive, wide):
                key = "wide" if server is wide else "lower"
                self.attempt("equality", server.name, self.compare, server, key)
            elif server.dummy:
                self.attempt("real", server.name, self.real, server, needs_s=20)
            else:
                self.attempt("cost", server.name, self.cost, server, (1, 4), 60, needs_s=20)
        self.attempt("real", "break-even", self.real_end)


GRID = (
    (32, 8, "lower"),
    (64, 8, "lower"),
    (7, 1, "random"),
    (8, 8, "lower"),
    (16, 8, "lower"),
    (7, 8, "random"),
    (32, 4, "lower"),
    (32, 1, "random"),
    (64, 4, "random"),
    (16, 4, "lower"),
    (64, 1, "random"),
    (8, 4, "random"),
    (16, 1, "random"),
    (7, 4, "lower"),
    (8, 1, "random"),
)
"""(budget, topk cap, pair), the most wanted first; the first is the main server of a run. With topk 1 only the drafter's
first choice can be accepted, and ``lower``'s is never right, so that ``random`` is taken there."""


def accepted(answers: Sequence[Answer]) -> float | None:
    """Mean accept length: tokens after the first (the prefill's) over verify steps; None without any."""
    steps = sum(answer.meta.get("spec_verify_ct") or 0 for answer in answers)
    return round(sum(max(len(answer.tokens) - 1, 0) for answer in answers) / steps, 3) if steps else None


def quiet_abort(server: Server, rid: str) -> None:
    """Ask for an abort; a request that is already over is no error."""
    try:
        server.post("/abort_request", {"rid": rid}, 30)
    except OSError as error:
        print(f"abort of {rid}: {error!r}", flush=True)


def free_port(port: int) -> int:
    """The first port from ``port`` on that is free, as is the one 10000 below it, which NCCL gets."""
    while True:
        with socket.socket() as probe, socket.socket() as other:
            try:
                probe.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port - 10000))
            except OSError:
                port += 1
                continue
            return port


def nvidia_smi(query: str) -> str | None:
    """One query, or None where there is no such program."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def gpu_memory() -> str | None:
    return nvidia_smi("memory.used")


def pack(logs: Path, out: Path, names: dict[str, str]) -> None:
    """All logs, masked, into ``out/logs.tar.xz`` (the middle of a very long one is left out), two of them beside it."""
    partial = out / ".logs.tar.xz"
    with tarfile.open(partial, "w:xz", preset=4) as archive:
        for path in sorted([*logs.glob("*.log"), *out.glob("run.log")]):
            text = tail(path)
            if len(text) > 3_000_000:
                text = text[:1_000_000] + "\n[... left out ...]\n" + text[-1_000_000:]
            data = mask_machine(text, names).encode()
            entry = tarfile.TarInfo(f"logs/{path.name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    partial.replace(out / "logs.tar.xz")
    for name in ("crash", "refused"):
        if (logs / f"{name}.log").exists():
            (out / f"{name}.log").write_text(mask_machine(tail(logs / f"{name}.log"), names))


def follow(out: Path, seconds: float) -> int:
    """Wait for a detached run; show its log meanwhile. Returns its exit status, or 75 while it runs."""
    end, shown = time.monotonic() + seconds, 0
    marker, log = out / "done", out / "run.log"
    if not (out / "pid").exists():
        print(f"no run was started with --detach into {out}", flush=True)
        return 1
    while True:
        text = tail(log, shown)
        shown += len(text.encode())
        sys.stdout.write(text)
        sys.stdout.flush()
        if marker.exists():
            return int(marker.read_text() or 1)
        pid = int((out / "pid").read_text())
        if not Path(f"/proc/{pid}").exists():
            print("the run is gone without having ended", flush=True)
            return 1
        if time.monotonic() > end:
            return STILL_RUNNING
        time.sleep(1)


def detach(args: argparse.Namespace) -> None:
    """Start this script again without ``--detach``, in its own session."""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "done").unlink(missing_ok=True)
    command = [
        sys.executable,
        __file__,
        "--site",
        str(args.site),
        "--out",
        str(args.out),
        "--work",
        str(args.work),
    ]
    command += ["--limit", str(args.limit), "--only", ",".join(args.only), "--device", args.device]
    command += ["--seed", str(args.seed), "--soak", str(args.soak), "--revision", args.revision]
    command += ["--grid", ",".join(f"{budget}-{topk}" for budget, topk in args.grid)]
    command += ["--port", str(args.port), "--start-limit", str(args.start_limit)]
    with (args.out / "run.log").open("wb") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
    (args.out / "pid").write_text(str(child.pid))


def finish(run: Experiment, code: int) -> None:
    """End all servers, write JSON and logs, leave the exit status."""
    run.done.set()
    for server in run.servers.values():
        with contextlib.suppress(Exception):
            server.end()
    run.result["ended"] = now()
    try:
        run.write()
        pack(run.site.logs, run.out, run.names)
    except Exception:
        run.say("the end could not be recorded:", traceback.format_exc())
        code = 1
    (run.out / "done").write_text(str(code))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DDTREE on a GPU: one run, one JSON.")
    parser.add_argument(
        "--site", type=Path, help="folder or archive: the released sglang 0.5.11 and what it needs"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for result.json, logs.tar.xz, run.log"
    )
    parser.add_argument("--work", type=Path, help="folder for trees, models, logs (default: OUT/work)")
    parser.add_argument("--limit", type=float, default=1100, help="seconds for everything")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by comma: " + ",".join(PARTS))
    parser.add_argument(
        "--grid",
        default=",".join(f"{budget}-{topk}" for budget, topk, _ in GRID),
        help="budgets and topk caps that are compared, as 32-8,7-1 (32-8 always is)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=5, help="of the mixed requests")
    parser.add_argument("--soak", type=int, default=300, help="mixed requests")
    parser.add_argument("--revision", default="unknown", help="git revision of the tree, for the record")
    parser.add_argument("--port", type=int, default=32400, help="ports are taken above this one")
    parser.add_argument("--start-limit", type=float, default=240, help="seconds for the start of a server")
    parser.add_argument("--detach", action="store_true", help="run in a session of its own")
    parser.add_argument("--wait", type=float, help="follow a detached run for so many seconds")
    args = parser.parse_args(argv)
    args.only = [part for part in args.only.split(",") if part]
    unknown = sorted(set(args.only) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    pairs = {f"{budget}-{topk}": (budget, topk) for budget, topk, _ in GRID}
    asked = ["32-8", *(pair for pair in args.grid.split(",") if pair)]
    strange = sorted(set(asked) - set(pairs))
    if strange:
        parser.error(f"not in the grid: {', '.join(strange)}; it holds {', '.join(pairs)}")
    args.grid = [pair for name, pair in pairs.items() if name in asked]
    args.out = args.out.resolve()
    args.work = (args.work or args.out / "work").resolve()
    if args.site is not None:
        args.site = args.site.resolve()
        if not args.site.exists():
            parser.error(f"--site: there is no {args.site}")
    elif args.detach or args.wait is None:
        parser.error("--site is needed to start a run")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.detach:
        detach(args)
        if args.wait is None:
            return 0
    if args.wait is not None:
        code = follow(args.out, args.wait)
        if code == STILL_RUNNING:
            names = {str(args.work): "WORK", str(ROOT): "REPO", str(args.out): "OUT", sys.prefix: "PYTHON"}
            names |= {socket.gethostname(): "gpu-host", str(Path.home()): "HOME"}
            with contextlib.suppress(OSError):
                pack(args.work / "logs", args.out, names)
            print("still running: wait again with --wait", flush=True)
        return code

    args.out.mkdir(parents=True, exist_ok=True)
    run = Experiment(args)

    def give_up() -> None:
        run.say("past the limit: ending everything")
        finish(run, 1)
        os._exit(1)

    last = threading.Timer(args.limit + 40, give_up)
    last.daemon = True
    last.start()

    def interrupted(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    signal.signal(signal.SIGTERM, interrupted)
    code = 1
    try:
        run.run()
        run.write()
        wanted = [run.result["verdicts"][part] for part in args.only]
        code = 0 if all(one == "pass" for one in wanted) else 1
    except BaseException:
        run.result["error"] = traceback.format_exc()[-4000:]
        run.say(run.result["error"])
    finally:
        finish(run, code)
        last.cancel()
    run.say("verdicts", run.result["verdicts"])
    return code


if __name__ == "__main__":
    sys.exit(main())
