"""``ddtree-ops demo``: the main job on lab hosts, told as the commands a person would type.

Every step runs the real command in a process of its own and checks its exit code, so the demo is also a test of
the whole: it fails when any step does not end as it should.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.rule import Rule
from rich.text import Text

from ddtree_ops.cli.common import out
from ddtree_ops.errors import ExitCode

__all__ = ["STORY", "Scene", "run_demo"]


@dataclass(frozen=True)
class Scene:
    """One command of the demo.

    :param title: what the reader is about to see.
    :param argv: arguments of ``ddtree-ops``.
    :param expect: exit code the command must end with.
    """

    title: str
    argv: tuple[str, ...]
    expect: ExitCode = ExitCode.OK


_HOST = "ct200"

STORY = (
    Scene("Two fresh lab hosts: real sshd, systemd and journald on this machine", ("lab", "up", "--fresh")),
    Scene(
        "Deploy the unpatched runtime: it loads, and dies on the first request",
        ("-i", "lab", "deploy", _HOST, "--runtime", "sglang-0.5.11-stock"),
        ExitCode.CHECK_FAILED,
    ),
    Scene("The patch, proven on the source itself", ("-i", "lab", "patch", "check", "sglang-0.5.11-ddtree")),
    Scene(
        "Deploy the patched runtime: ready, smoke-tested, acceptance measured", ("-i", "lab", "deploy", _HOST)
    ),
    Scene("The same again: nothing to change", ("-i", "lab", "deploy", _HOST)),
    Scene(
        "A bad change: graphs that do not fit. The good release comes back",
        ("-i", "lab", "deploy", _HOST, "--set", "args.cuda-graph-max-bs=4096"),
        ExitCode.ROLLED_BACK,
    ),
    Scene("The good release serves", ("-i", "lab", "smoke", _HOST, "--prompt", "quicksort")),
    Scene(
        "And the first crash is still in the journal",
        ("-i", "lab", "logs", _HOST, "--grep", "size of tensor", "--invocation", "all", "--lines", "3"),
    ),
)

_NEXT = (
    "-i lab deploy b300",
    "-i lab smoke --prompt 'Explain speculative decoding.'",
    f"-i lab logs {_HOST} --follow",
    f"lab ssh {_HOST}",
    "lab down",
)


def _program() -> str:
    """The command as it can be typed in this shell: ``make demo`` does not put it on the PATH."""
    here = Path(sys.executable).with_name("ddtree-ops")
    if shutil.which("ddtree-ops") or not here.is_file():
        return "ddtree-ops"
    return shlex.quote(os.path.relpath(here))


def run_demo(*, keep: bool) -> int:
    """Play :data:`STORY`; the exit code is 0 when every command ended as told."""
    environment = dict(os.environ)
    if out.is_terminal:
        environment.setdefault("FORCE_COLOR", "1")
    began = time.monotonic()
    code = int(ExitCode.OK)
    for scene in STORY:
        out.print()
        out.print(Rule(Text(scene.title, "bold"), align="left", style="dim"))
        out.print(Text(f"$ ddtree-ops {shlex.join(scene.argv)}", "bold green"), soft_wrap=True)
        done = subprocess.run([sys.executable, "-m", "ddtree_ops", *scene.argv], env=environment, check=False)
        if done.returncode != scene.expect:
            out.print(
                Text(
                    f"The demo stops here: exit code {int(scene.expect)} was due, not {done.returncode}. "
                    f"What the host says: ddtree-ops -i lab logs {_HOST} --lines 50",
                    "bold red",
                ),
                soft_wrap=True,
            )
            code = int(ExitCode.CHECK_FAILED)
            break
        if scene.expect is not ExitCode.OK:
            out.print(Text(f"(exit code {done.returncode}, as it should be)", "dim"))
    if not keep:
        subprocess.run([sys.executable, "-m", "ddtree_ops", "lab", "down"], env=environment, check=False)
    if code == ExitCode.OK:
        out.print()
        out.print(
            Rule(
                Text(f"Done in {time.monotonic() - began:.0f} s. Type next:", "bold"),
                align="left",
                style="dim",
            )
        )
        for line in _NEXT if keep else ("demo",):
            out.print(Text(f"  {_program()} {line}"), soft_wrap=True)
    return code
