"""Base wheels: fetched with pip, checked by hash, kept in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ddtree_ops.errors import BuildError
from ddtree_ops.paths import cache_dir
from ddtree_ops.runtime.description import BaseWheel
from ddtree_ops.secret import redact

__all__ = ["fetch_wheel", "sha256_of", "sweep"]

_TIMEOUT_S = 900.0
_STALE_S = 3600.0
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sweep(folder: Path, prefix: str) -> None:
    """Remove the scratch folders that killed builds left: an hour old or more."""
    for left in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left)


def fetch_wheel(base: BaseWheel, python: str, *, progress: Callable[[str], None] | None = None) -> Path:
    """The pinned wheel for a Python tag (``cp312``), from the cache or through pip; its hash is checked either way.

    pip is asked for the wheel of that tag whatever Python runs here, and uses the user's own pip configuration
    (index, proxy, certificates).

    :raises BuildError: no hash for that tag, pip failed (its own error is in ``details``), or the hash differs.
    """
    wanted = base.wheels.get(python)
    if wanted is None:
        raise BuildError(
            f"no wheel of {base.requirement} is pinned for Python tag {python}",
            hint=f"pinned: {', '.join(sorted(base.wheels))}; or set base: to a wheel or tree of your own",
        )
    folder = cache_dir() / "wheels" / wanted
    for cached in sorted(folder.glob("*.whl")):
        if sha256_of(cached) == wanted:
            return cached
        if progress:
            progress(f"{cached.name} in the cache is damaged: fetching it again")
        cached.unlink(missing_ok=True)
    if progress:
        progress(f"fetching {base.requirement} for {python}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent, ".fetch-")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        fetched = _download(base, python, wanted, Path(scratch))
        found = sha256_of(fetched)
        if found != wanted:
            raise BuildError(
                f"{fetched.name} has sha256 {found}, pinned is {wanted}",
                state="nothing was kept",
                hint="do not use this file; find out who changed it",
            )
        folder.mkdir(exist_ok=True)
        return fetched.replace(folder / fetched.name)


def _download(base: BaseWheel, python: str, sha256: str, scratch: Path) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{base.requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    digits = python.removeprefix("cp")
    arguments = [
        *("download", "--no-deps", "--only-binary=:all:", "--require-hashes"),
        *("--python-version", f"{digits[0]}.{digits[1:]}", "--implementation", "cp", "--abi", python),
        *("--platform", base.platform, "--dest", str(scratch), "--requirement", str(requirements)),
        *("--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--quiet"),
    ]
    command = [*_pip(), *arguments]
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"pip did not fetch {base.requirement} within {_TIMEOUT_S:.0f} s",
            hint="check the package index: python -m pip config list",
        ) from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [
            _URL_LOGIN.sub("", redact(line.rstrip()))
            for line in done.stdout.decode("utf-8", "replace").splitlines()
            if line.strip() and not line.lstrip().startswith(("WARNING:", "[notice]"))
        ]
        mismatch = any("DO NOT MATCH THE HASHES" in line for line in lines)
        raise BuildError(
            f"the wheel of {base.requirement} for {python} does not have the pinned sha256"
            if mismatch
            else f"pip could not fetch {base.requirement} for {python} ({base.platform})",
            details=tuple(lines[-20:]),
            state="nothing was kept",
            hint=""
            if mismatch
            else "check the package index (python -m pip config list), or set base: to a wheel of your own",
        )
    return wheels[0]


def _pip() -> list[str]:
    import importlib.util

    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        found = shutil.which(name)
        if found:
            return [found]
    raise BuildError(
        "pip is needed to fetch the base wheel, and this Python has none",
        hint=f"{sys.executable} -m ensurepip, or apt-get install python3-pip",
    )
