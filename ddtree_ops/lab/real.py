"""The real sglang 0.5.11 on a lab host: its CPU environment, lent to the host read-only, and tiny models.

The environment is the one of ``make test-real`` (``make real``): torch for a CPU and sglang, no kernels. A host gets it and
the Python that it was made with by bind mounts, and a venv of its own in front of them::

    /opt/ddtree-lab/env                the environment
    /opt/venv-sglang-cpu               the venv that the inventory names: links into the environment, the stand-ins for a
                                       CPU (``tests/ddtree/cpu/stubs``), and what sglang requires on record
    /srv/models/tiny, tiny-dflash      a target of 2 layers and its drafter (``tests/ddtree/cpu/make_lab_models.py``)

A GPU's packages cannot be installed here, so preflight would rightly refuse the venv. On record (dist-info) are therefore
the versions that 0.5.11 pins, as in the stand-in venv of the other engine: what preflight judges here proves nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddtree_ops.errors import LabError
from ddtree_ops.lab import image as images
from ddtree_ops.lab.furnish import DISTRIBUTIONS, stand_in, write
from ddtree_ops.paths import shipped

__all__ = ["Real", "environment_folder", "furnish_real", "missing_real", "prepare"]

VENV = "opt/venv-sglang-cpu"
ENVIRONMENT = "opt/ddtree-lab/env"
MODELS = "srv/models"
BYTE_CODE = "opt/ddtree-ops/pycache"
"""Where units look for byte code (:attr:`ddtree_ops.service.layout.Layout.pycache` of the default ``deploy_root``)."""

_KEEP = ("sglang",)
"""Distributions whose own record stays: drift compares their files with it."""


@dataclass(frozen=True)
class Real:
    """What a host is lent and given.

    :param environment: virtual environment on this machine.
    :param base: prefix of the Python that it was made with.
    :param version: of that Python, such as ``3.11``.
    :param stubs: stand-ins for what a CPU has not.
    :param models: the tiny models.
    """

    environment: Path
    base: Path
    version: str
    stubs: Path
    models: Path

    @property
    def binds(self) -> tuple[tuple[Path, str], ...]:
        """Folders of this machine, and where a host sees them, read-only. ``/usr`` the host has itself."""
        lent = ((self.environment, f"/{ENVIRONMENT}"),)
        return lent if self.base == Path("/usr") else (*lent, (self.base, str(self.base)))

    @property
    def packages(self) -> Path:
        """``site-packages`` of the environment."""
        return self.environment / "lib" / f"python{self.version}" / "site-packages"


def environment_folder() -> Path:
    """The environment: ``$DDTREE_OPS_LAB_REAL``, or ``.venv-real`` of the checkout."""
    return Path(os.environ.get("DDTREE_OPS_LAB_REAL") or _checkout() / ".venv-real").absolute()


def missing_real() -> list[str]:
    """What this machine lacks for the real engine, each with what to type."""
    if not (_tools() / "make_lab_models.py").is_file():
        return ["a checkout of ddtree-ops: the files that install the real engine are not in the package"]
    folder = environment_folder()
    if not (folder / ".ready").is_file() or not (folder / "bin" / "python").exists():
        return [f"sglang 0.5.11 for a CPU in {folder} (0.3 GB to fetch, 2 GB on the disk): make real"]
    if shutil.which("ldd") is None:
        return ["ldd: apt-get install -y libc-bin"]
    return []


def prepare(say: Callable[[str], None] = lambda line: None) -> Real:
    """What hosts are given; the models are made first where they are not there yet (some seconds, once).

    :raises LabError: something is missing, or the models could not be made.
    """
    problems = missing_real()
    if problems:
        raise LabError(
            "the real engine cannot run here",
            details=tuple(problems),
            phase="lab",
            state="no host was started",
            hint=problems[0].rpartition(": ")[2],
        )
    folder = environment_folder()
    python = folder / "bin" / "python"
    base = Path(os.path.realpath(python)).parent.parent
    version = _version(folder)
    real = Real(folder, base, version, _tools() / "stubs", _models(python, say))
    if not (real.packages / "sglang").is_dir():
        raise LabError(
            f"there is no sglang in {folder}", phase="lab", state="no host was started", hint="make real"
        )
    return real


def furnish_real(root: Path, real: Real) -> None:
    """Bring venv, models and byte code of the host whose root folder is ``root`` up to date. Safe while it runs."""
    settings = f"home = {real.base / 'bin'}\ninclude-system-site-packages = false\nversion = {real.version}\n"
    write(root, f"{VENV}/pyvenv.cfg", settings.encode())
    _link(root / VENV / "bin" / "python", real.base / "bin" / f"python{real.version}")
    site = f"{VENV}/lib/python{real.version}/site-packages"
    for entry in sorted(real.packages.iterdir()):
        if entry.name != "__pycache__" and not _replaced(entry.name):
            inside = f"/{ENVIRONMENT}/{entry.relative_to(real.environment)}"
            _link(root / site / entry.name, Path(inside))
    for name, version in DISTRIBUTIONS.items():
        if name not in _KEEP:
            stand_in(root, site, name, version)
    for path in _files(real.stubs):
        write(root, f"{site}/{path.relative_to(real.stubs)}", path.read_bytes())
    write(root, f"{site}/ddtree_lab.pth", _only_our_models(real).encode())
    for path in _files(real.models):
        write(root, f"{MODELS}/{path.relative_to(real.models)}", path.read_bytes())
    _libraries(root, real)
    _byte_code(root, real, site)


# ---------------------------------------------------------------------------------------------------------------


def _checkout() -> Path:
    return shipped("inventories").parent


def _tools() -> Path:
    return _checkout() / "tests" / "ddtree" / "cpu"


def _version(folder: Path) -> str:
    match = re.search(r"^version\s*=\s*(\d+\.\d+)", (folder / "pyvenv.cfg").read_text(), re.MULTILINE)
    if match is None:
        raise LabError(f"{folder / 'pyvenv.cfg'} names no version", phase="lab", hint="make real")
    return match.group(1)


def _models(python: Path, say: Callable[[str], None]) -> Path:
    """The models, made once for each state of the files that make them."""
    makers = [_tools() / name for name in ("make_models.py", "make_lab_models.py")]
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in makers)).hexdigest()[:16]
    folder = images.images_dir() / f"models-{digest}"
    if folder.is_dir():
        return folder
    with images.locked(images.images_dir() / ".lock-models", lambda: say("another process makes the models")):
        if not folder.is_dir():
            say("making the tiny models (once, some seconds)")
            part = images.images_dir() / f"making-{folder.name}"
            images.remove_tree(part)
            environment = {"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "2"}
            done = subprocess.run(
                [python, makers[1], part],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
            )
            if done.returncode:
                raise LabError(
                    "the tiny models could not be made",
                    phase="lab",
                    state="no host was started",
                    details=tuple(done.stderr.strip().splitlines()[-10:]),
                    hint=f"see whether {python} -c 'import torch' works; rm -r {python.parents[1]} && make real",
                )
            part.rename(folder)
    return folder


def _files(folder: Path) -> Iterator[Path]:
    return (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.relative_to(folder).parts
    )


def _link(path: Path, target: Path) -> None:
    """A symbolic link to ``target``; it replaces one that leads elsewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() and path.readlink() == target:
        return
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    part.rename(path)


def _replaced(entry: str) -> bool:
    """Whether this is the record of a distribution that is on record in another version."""
    match = re.fullmatch(r"(.+?)-[^-]+\.dist-info", entry)
    names = {_normal(name) for name in DISTRIBUTIONS if name not in _KEEP}
    return match is not None and _normal(match.group(1)) in names


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _only_our_models(real: Real) -> str:
    """A line for ``site``: no other models than the tiny ones are imported, which halves the time of a start."""
    modules = sorted((real.packages / "sglang" / "srt" / "models").glob("*.py"))
    others = ",".join(path.stem for path in modules if path.stem not in ("qwen3", "dflash"))
    return f'import os; os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", "{others}")\n'


def _libraries(root: Path, real: Real) -> None:
    """Shared libraries of this machine that the Python or torch want and the image lacks: same distribution."""
    version = f"python{real.version}"
    wanting = [
        real.base / "bin" / version,
        *(real.base / "lib" / version / "lib-dynload").glob("*.so"),
        *(real.packages / "torch" / "lib").glob("libtorch_*.so"),
    ]
    said = subprocess.run(
        ["ldd", *wanting],
        env={"PATH": os.defpath, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    ).stdout
    for name in sorted(set(re.findall(r"=> (/(?:usr/)?lib\S*/\S+) \(", said))):
        if not os.path.lexists(f"{root}{name}"):
            write(root, name.lstrip("/"), Path(name).read_bytes(), 0o755)


def _byte_code(root: Path, real: Real, site: str) -> None:
    """Byte code where the unit's PYTHONPYCACHEPREFIX has it: the first start would compile 4,000 files otherwise.

    Python takes it while size and time of its source are the same, wherever that lies.
    """
    stamp = root / BYTE_CODE / ".lab-environment"
    made = (real.environment / ".ready").read_text()
    if stamp.is_file() and stamp.read_text() == made:
        return
    version = f"python{real.version}"
    for source, seen in ((real.packages, site), (real.base / "lib" / version, f"{real.base}/lib/{version}")):
        for folder, folders, _ in os.walk(source):
            compiled = "__pycache__" in folders
            folders[:] = [
                name for name in folders if name not in ("__pycache__", "site-packages", "test", "tests")
            ]
            if compiled:
                place = root / BYTE_CODE / seen.lstrip("/") / os.path.relpath(folder, source)
                shutil.copytree(
                    Path(folder, "__pycache__"),
                    place,
                    ignore=shutil.ignore_patterns("*.opt-?.pyc"),
                    dirs_exist_ok=True,
                )
    write(root, f"{BYTE_CODE}/.lab-environment", made.encode())
