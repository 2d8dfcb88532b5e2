"""Pack the released sglang 0.5.11 and what it needs for the GPU run: ``make_site.py OUT.tar.xz``.

The wheels of ``site-requirements.txt`` are downloaded from the package index by name and version, for CPython 3.12 on
x86-64 Linux, and unpacked into one folder, which becomes the archive. Nothing is installed and nothing is changed. torch
and triton are left out: the GPU machine has them (torch 2.11.0 for CUDA 13.0 and triton 3.6.0 in the recorded run).

Of ``sglang-kernel`` only what an SM90 GPU (H100, H200) loads is kept, since the rest is a gigabyte: on another GPU
give ``--whole``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["PLATFORMS", "REQUIREMENTS", "SKIP", "download", "requirements", "unpack"]

REQUIREMENTS = Path(__file__).with_name("site-requirements.txt")
PLATFORMS = (
    *(f"manylinux_2_{glibc}_x86_64" for glibc in (39, 35, 34, 31, 28, 27, 26, 24, 17, 5)),
    *("manylinux2014_x86_64", "manylinux1_x86_64", "any"),
)
"""Platform tags of wheels that a machine with glibc 2.39 takes."""
SKIP = ("sgl_kernel/sm100/", "sgl_kernel/flash_ops", "sgl_kernel/flashmla_ops")
"""Operators of sglang-kernel for other GPUs, and for attention backends that the run does not use."""


def requirements(path: Path = REQUIREMENTS) -> list[str]:
    """``name==version`` of every wheel."""
    return path.read_text().split()


def download(wanted: Sequence[str], folder: Path) -> None:
    """Fetch the wheels with pip, without their dependencies. Raises CalledProcessError if one is not to be had."""
    platforms = [word for tag in PLATFORMS for word in ("--platform", tag)]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"),
            *("--python-version", "3.12", "--implementation", "cp", *platforms),
            *("-d", str(folder), *wanted),
        ],
        check=True,
    )


def unpack(wheels: Path, site: Path, skip: tuple[str, ...] = SKIP) -> None:
    """Unpack every wheel of a folder into ``site``, but for members whose name begins with one of ``skip``."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if not name.startswith(skip)]
            archive.extractall(site, members)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack sglang 0.5.11 and what it needs for the GPU run.")
    parser.add_argument("out", type=Path, help="archive to write (.tar.xz)")
    parser.add_argument(
        "--whole", action="store_true", help="keep all of sglang-kernel: for other GPUs than SM90"
    )
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        download(requirements(), wheels)
        unpack(wheels, site, () if args.whole else SKIP)
        with tarfile.open(args.out, "w:xz", preset=6) as archive:
            archive.add(site, ".")
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
