"""install.py FOLDER: the environment of ``make test-real`` and of lab hosts with the real engine: torch for a CPU, sglang 0.5.11, triton, pytest.

What is installed is ``requirements.txt`` and nothing else, and triton in a folder of its own (``FOLDER/triton``), by uv,
which pip brings into the environment first. pip's own settings (index, find-links) hold for uv too, and ``TORCH_INDEX`` may name an index with CPU builds of torch. An
environment that is finished and of the same requirements is left as it is; any other is made anew.

Byte code is written by importing server and test tools once: it takes as long as one start, and every later start is
twice as fast.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "tools"))
from uv_install import UV, pip_settings  # noqa: E402

REQUIREMENTS, TRITON = HERE / "requirements.txt", HERE / "requirements-triton.txt"
PYTHONS = ((3, 11), (3, 12))
SERVER = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.dflash",
    "sglang.srt.speculative.dflash_worker",
)
TOOLS = ("_pytest", "hypothesis", "pluggy")
"""Packages whose every file is compiled: ``make test-real`` may run where no byte code is to be written."""
IMPORT_TORCH_FAILED = 42
IMPORT_ALL = f"""
import compileall, importlib.util, sys, traceback, warnings
warnings.simplefilter("ignore")
try:
    import torch
    torch.zeros(1)
except Exception:
    traceback.print_exc()
    sys.exit({IMPORT_TORCH_FAILED})
import {", ".join(SERVER)}
for name in {TOOLS}:
    compileall.compile_dir(importlib.util.find_spec(name).submodule_search_locations[0], quiet=1)
"""
NO_CPU_TORCH = (
    "a torch that runs on a CPU: the index gave a build for CUDA, whose libraries are not installed. Name an index that "
    "has CPU builds: make real TORCH_INDEX=URL"
)


class Missing(Exception):
    """What is missing, and what to do."""


def run(arguments: list[str | Path], missing: str, **variables: str) -> None:
    """Run a command; where it fails, say what is missing below what it said itself."""
    # CI and containers often forbid byte code, which would make every start of a server compile sglang again
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    code = subprocess.run(arguments, env=env | variables).returncode
    if code:
        raise Missing(NO_CPU_TORCH if code == IMPORT_TORCH_FAILED else missing)


def install(folder: Path) -> None:
    """Make the environment in ``folder``, or find it finished.

    Raises:
        Missing: naming the Python, the network or the package that is not there.
    """
    if sys.version_info[:2] not in PYTHONS:
        names = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        raise Missing(
            f"Python {names} is needed for the pinned builds, and {sys.executable} is "
            f"{sys.version_info.major}.{sys.version_info.minor}: make real PYTHON=python3.11"
        )
    stamp, python = folder / ".ready", folder / "bin" / "python"
    wanted = hashlib.sha256(
        b"\0".join(
            [*(path.read_bytes() for path in (REQUIREMENTS, TRITON, Path(__file__))), sys.version.encode()]
        )
    ).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return
    begun = time.monotonic()
    print(
        f"installing torch (CPU), triton and sglang 0.5.11 into {folder}: 0.3 GB to fetch, 2 GB on the disk",
        flush=True,
    )
    stamp.unlink(missing_ok=True)
    index = "the package index cannot be reached, or lacks what the lines above name; nothing was tested"
    run(
        [sys.executable, "-m", "venv", "--clear", folder],
        "python3-venv is missing (apt-get install python3-venv), or the folder cannot be written",
    )
    run([python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", UV], f"{UV}: {index}")
    uv, settings = folder / "bin" / "uv", pip_settings(python)
    run(
        [uv, "pip", "sync", "--quiet", "--python", python, REQUIREMENTS],
        f"tests/ddtree/cpu/requirements.txt: {index}",
        **settings,
    )
    triton = [
        uv,
        *["pip", "install", "--quiet", "--no-deps", "--compile-bytecode", "--python"],
        python,
        "--target",
        folder / "triton",
    ]
    with ThreadPoolExecutor() as pool:
        fetched = pool.submit(
            run,
            [*triton, "-r", TRITON],
            f"tests/ddtree/cpu/requirements-triton.txt: {index}",
            **settings,
        )
        run(
            [python, "-c", IMPORT_ALL],
            "sglang 0.5.11 was installed and cannot be imported: tests/ddtree/cpu/requirements.txt is not complete",
            SGLANG_USE_CPU_ENGINE="1",
            PYTHONPATH=str(HERE / "stubs"),
        )
        fetched.result()
    stamp.write_text(wanted)
    print(f"installed in {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        install(Path(sys.argv[1]))
    except Missing as error:
        sys.exit(f"make real: missing: {error}")
