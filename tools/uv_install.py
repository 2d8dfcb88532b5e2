"""uv_install.py VENV WHAT ...: install into a virtual environment by uv, in a tenth of the time that pip takes.

pip brings uv into the environment first, and its own settings (index, find-links) hold for uv too. Where uv cannot be had or
fails, pip does it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

UV = "uv==0.13.9"


def pip_settings(python: Path) -> dict[str, str]:
    """Where pip looks for packages, as the variables by which uv is told the same. Given ones of uv's own stay."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, list[str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        # later lines win in pip: the user's file over the machine's, the environment over both
        found[name.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ").split()
    extra = [*found.get("extra-index-url", []), *os.environ.get("TORCH_INDEX", "").split()]
    told = {
        "UV_DEFAULT_INDEX": " ".join(found.get("index-url", [])),
        "UV_INDEX": " ".join(extra),
        "UV_FIND_LINKS": ",".join(found.get("find-links", [])),
        # as pip does: the pinned version from whichever index has it
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_SYSTEM_CERTS": "1",
        "UV_NO_PROGRESS": "1",
        "UV_LINK_MODE": "hardlink",
    }
    return {name: value for name, value in told.items() if value and name not in os.environ}


def install(venv: Path, what: list[str]) -> int:
    """Install ``what`` (as pip takes it) into ``venv``; the exit status of the last program that tried."""
    python, uv = venv / "bin" / "python", venv / "bin" / "uv"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, UV]).returncode == 0:
        env = os.environ | pip_settings(python)
        if (
            subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *what], env=env).returncode
            == 0
        ):
            return 0
    print("uv did not do it: pip does, which takes a minute", file=sys.stderr, flush=True)
    return subprocess.run([*pip, *what]).returncode


if __name__ == "__main__":
    sys.exit(install(Path(sys.argv[1]), sys.argv[2:]))
