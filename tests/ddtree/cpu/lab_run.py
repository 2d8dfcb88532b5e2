"""The real sglang under systemd on a lab host, from a deployed release: one run of all that is asked of it.

The steps run one after the other in a thread, beside the other tests: each takes a start of a server. Tests ask for what a
step left (:meth:`LabRun.said`); they come last. Steps and host go before all else on this machine (``nice``): nothing of
theirs can be done at the same time, and what runs beside has the other processor.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from exchanges import EXCHANGES, hold_to_recording

__all__ = ["HOST", "LabRun", "Said"]

ROOT = Path(__file__).resolve().parents[3]
COMMAND = Path(os.environ.get("DDTREE_OPS", ROOT / ".venv" / "bin" / "ddtree-ops"))
HOST, UNIT = "ct200", "sglang-tiny-ddtree"
CRASHING = "sglang/srt/managers/scheduler.py"
BEFORE = "        self.forward_ct += 1\n"
AFTER = (
    BEFORE
    + (
        "        if self.forward_ct > 30:\n"
        "            torch.zeros(4).copy_(torch.zeros(41))\n"  # ends the scheduler, in the second request of a smoke
    )
)

Said = subprocess.CompletedProcess[str]


class LabRun:
    """Use as a context manager: leaving it takes the lab down.

    Args:
        folder: an empty folder for the lab and what is made for it.
    """

    def __init__(self, folder: Path) -> None:
        net = f"127.0.{200 + os.getpid() % 50}"
        self.url = f"http://{net}.11:30001"
        self.inventory = folder / "inventory.yaml"
        self._env = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("PYTHON", "SGLANG_"))
            },
            "DDTREE_OPS_LAB_DIR": str(folder / "lab"),
            "DDTREE_OPS_LAB_NET": net,
            "DDTREE_OPS_LAB_REAL": sys.prefix,
            "DDTREE_OPS_LAB_PYTHON": f"cp{sys.version_info.major}{sys.version_info.minor}",
            "DDTREE_OPS_INVENTORY": str(self.inventory),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        self._folder = folder
        self._jobs: dict[str, Future[Any]] = {}
        self._pool = ThreadPoolExecutor(1)
        # anchored: the shell that runs this has the words in its own command line
        kill = "pkill -9 -f ^sglang::scheduler"
        self._steps: dict[str, Callable[[], Any]] = {
            "up": lambda: self._command("lab", "up", HOST, "--engine", "sglang"),
            "deploy": lambda: self._command("deploy", HOST),
            "drift": lambda: self._command("drift", HOST),
            "validate": lambda: self._command("validate", HOST, "--suite", "quick"),
            "exchanges": self._exchanges,
            "bad": lambda: self._command("deploy", HOST, "--runtime", "crashing", fine=False),
            "status": lambda: self._command("status", HOST, "--json"),
            "kill": lambda: self._command("lab", "ssh", HOST, kill),
            "smoke": lambda: self._command("smoke", HOST, fine=False),
            "diagnose": lambda: self._command("diagnose", HOST, fine=False),
        }

    def __enter__(self) -> LabRun:
        self._write_inventory()
        earlier: Future[Any] | None = None
        for name, step in self._steps.items():
            earlier = self._jobs[name] = self._pool.submit(self._after, earlier, step)
        return self

    def __exit__(self, *_error: object) -> None:
        for job in self._jobs.values():
            job.cancel()
        self._pool.shutdown()
        self._command("lab", "down")

    def said(self, step: str) -> Any:
        """What a step left; where it or one before it failed, that fails every test that asks."""
        return self._jobs[step].result()

    @staticmethod
    def _after(earlier: Future[Any] | None, step: Callable[[], Any]) -> Any:
        if earlier is not None:
            earlier.result()
        return step()

    def _command(self, *words: str, fine: bool = True) -> Said:
        """Run ``ddtree-ops``; ``fine``: whether it must end well, or must not."""
        begun = time.monotonic()
        done = subprocess.run(
            ["nice", "-n", "-5", COMMAND, *words],
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )
        took = f"{time.monotonic() - begun:.0f} s"
        said = f"ddtree-ops {' '.join(words)} ({took}): {done.returncode}\n{done.stdout}{done.stderr}"
        with (self._folder / "log").open("a") as log:
            log.write(said)
        assert (done.returncode == 0) is fine, said
        return done

    def _exchanges(self) -> dict[str, str]:
        """What is wrong with the answer to each recorded exchange; nothing is the empty text."""
        found = {}
        for name in EXCHANGES:
            found[name] = ""
            try:
                hold_to_recording(self.url, name)
            except AssertionError as error:
                found[name] = str(error) or repr(error)
        return found

    def _write_inventory(self) -> None:
        """The shipped inventory, and a runtime beside its own whose scheduler crashes after 30 forward passes."""
        runtime = self._folder / "crashing"
        shutil.copytree(ROOT / "patches" / "sglang-0.5.11", runtime)
        source = (
            Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / CRASHING
        ).read_text()
        assert source.count(BEFORE) == 1
        lines = difflib.unified_diff(
            source.splitlines(keepends=True),
            source.replace(BEFORE, AFTER).splitlines(keepends=True),
            f"a/{CRASHING}",
            f"b/{CRASHING}",
        )
        (runtime / "0002-crash.patch").write_text(f"diff --git a/{CRASHING} b/{CRASHING}\n" + "".join(lines))
        description = (runtime / "runtime.yaml").read_text()
        digest = hashlib.sha256(source.encode()).hexdigest()
        description = description.replace("\npristine:\n", f"\npristine:\n  {CRASHING}: {digest}\n")
        first = "  - 0001-cuda-graph-runner-size-target-verify-by-tree-budget.patch\n"
        description = description.replace(first, f"{first}  - 0002-crash.patch\n")
        (runtime / "runtime.yaml").write_text(
            description.replace("\nname: sglang-0.5.11\n", "\nname: crashing\n")
        )
        text = (ROOT / "inventories" / "lab-real.yaml").read_text()
        own = f"  crashing: {{description: {runtime}, python: '${{DDTREE_OPS_LAB_PYTHON:-cp311}}'}}\n"
        self.inventory.write_text(text.replace("\nruntimes:\n", f"\nruntimes:\n{own}"))
