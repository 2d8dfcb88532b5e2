"""The lab hosts' root file system: Debian or Ubuntu, as this machine's own apt is configured, made by mmdebstrap.

An image is named by the digest of its recipe and never changes once it is there: hosts lay a writable layer
over it. It is built in a temporary folder and renamed; builds of one machine wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ddtree_ops.errors import LabError
from ddtree_ops.paths import cache_dir

__all__ = ["ensure_image", "image_path", "images_dir", "locked", "remove_tree", "sources"]

PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "openssh-server",
    "python3",
    "sudo",
    "rsync",
    "locales",
    "iproute2",
    "procps",
)
MASKED = (
    "apt-daily.service",
    "apt-daily.timer",
    "apt-daily-upgrade.service",
    "apt-daily-upgrade.timer",
    "console-getty.service",
    "dev-hugepages.mount",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty-static.service",
    "getty@.service",
    "motd-news.timer",
    "ssh.socket",
    "sys-fs-fuse-connections.mount",
    "systemd-firstboot.service",
    "systemd-logind.service",
    "systemd-networkd.service",
    "systemd-networkd.socket",
    "systemd-pstore.service",
    "systemd-resolved.service",
    "systemd-timesyncd.service",
    "systemd-udevd.service",
)
CUSTOMIZE = """\
set -eu
chroot "$1" localedef -i fr_FR -f ISO-8859-15 fr_FR.ISO-8859-15
for user in ops nosudo; do chroot "$1" useradd --create-home --shell /bin/bash "$user"; done
for unit in {masked}; do ln -sf /dev/null "$1/etc/systemd/system/$unit"; done
mkdir -p "$1"/etc/systemd/system-generators
for path in "$1"/usr/lib/systemd/system-generators/*; do ln -sf /dev/null "$1/etc/systemd/system-generators/${{path##*/}}"; done
sed -i '/pam_motd/d' "$1"/etc/pam.d/sshd
rm -rf "$1"/etc/systemd/system/ssh.service.requires "$1"/etc/systemd/system/sockets.target.wants/ssh.socket
chroot "$1" systemctl enable ssh.service
rm -f "$1"/etc/ssh/ssh_host_* "$1"/var/lib/dbus/machine-id "$1"/etc/apt/apt.conf.d/99mmdebstrap
rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d "$1"/var/log/journal
"""
FILES: dict[str, tuple[int, str]] = {
    "etc/machine-id": (0o444, ""),
    "etc/resolv.conf": (0o644, "# Lab hosts resolve no names.\n"),
    "etc/ssh/sshd_config.d/10-lab.conf": (
        0o644,
        """\
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
HostKey /etc/ssh/ssh_host_ed25519_key
HostKey /etc/ssh/ssh_host_ecdsa_key
""",
    ),
    "etc/sudoers.d/ops": (0o440, "ops ALL=(ALL:ALL) NOPASSWD: ALL\n"),
    "etc/systemd/journald.conf.d/10-lab.conf": (0o644, "[Journal]\nStorage=persistent\n"),
}
_DISTRIBUTIONS = {"debian": "Debian", "ubuntu": "Ubuntu"}


def images_dir() -> Path:
    """Where images are kept: ``$DDTREE_OPS_LAB_IMAGES`` or ``cache_dir()/lab``."""
    return Path(os.environ.get("DDTREE_OPS_LAB_IMAGES") or cache_dir() / "lab")


def _system() -> tuple[str, str]:
    """Distribution id and codename of this machine."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    distribution, codename = release.get("ID", ""), release.get("VERSION_CODENAME", "")
    if distribution not in _DISTRIBUTIONS or not codename:
        raise LabError(
            f"the lab needs Debian or Ubuntu to make its image from, this is {distribution or 'unknown'}",
            phase="image",
            hint="run the lab on a Debian 12 or Ubuntu 22.04 (or newer) machine, virtual or real",
        )
    return distribution, codename


def image_path() -> Path:
    """Where the image of this machine's distribution and of the present recipe lies, or will lie.

    :raises LabError: this machine is neither Debian nor Ubuntu.
    """
    recipe = json.dumps([*_system(), platform.machine(), PACKAGES, MASKED, CUSTOMIZE, FILES], sort_keys=True)
    return images_dir() / f"image-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"


def sources(targets: str, *, origin: str, codename: str, keyring: str = "") -> list[str]:
    """One-line apt sources of the distribution itself.

    :param targets: output of :data:`_TARGETS`, a line an index: creator, address, suite, component, key, origin.
    :param origin: ``Debian`` or ``Ubuntu``; lists never fetched have no origin and are judged by suite alone.
    :param keyring: used where a source names none.
    """
    lines: dict[str, None] = {}
    for line in targets.splitlines():
        creator, address, suite, component, key, its_origin = (
            "" if field.startswith("$(") else field for field in line.split("|")
        )
        if creator != "Packages" or its_origin not in ("", origin):
            continue
        if suite.split("-")[0].split("/")[0] != codename or component not in ("main", "universe"):
            continue
        option = f"[signed-by={key or keyring}] " if key or keyring else ""
        lines[f"deb {option}{address} {suite} {component}"] = None
    return list(lines)


_TARGETS = "$(CREATED_BY)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(SIGNED_BY)|$(ORIGIN)"


def _capture(argv: Sequence[str]) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


@contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (freed when the process ends, however it ends)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_tree(path: Path) -> None:
    """Remove a tree, never crossing into something mounted there.

    :raises LabError: a file system is mounted at or below ``path``.
    """
    if not path.exists():
        return
    real = os.path.realpath(path)
    mounted = [point for point in _mount_points() if point == real or point.startswith(real + "/")]
    if mounted:
        raise LabError(
            f"{path} is not removed: a file system is mounted there",
            details=tuple(mounted),
            hint=f"umount {mounted[-1]}",
        )
    shutil.rmtree(path)


def _mount_points() -> list[str]:
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split(" ")[4]
        points.append(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), point))
    return points


def ensure_image(say: Callable[[str], None] = lambda line: None) -> Path:
    """The image's folder, built first where it is not there yet (about a minute).

    :param say: called with a line of progress now and then.
    :raises LabError: with the end of the build's output.
    """
    image = image_path()
    if image.is_dir():
        return image
    with locked(images_dir() / ".lock", lambda: say("another process is building the image; waiting for it")):
        if not image.is_dir():
            for stale in images_dir().glob("building-*"):
                remove_tree(stale)
            build = images_dir() / f"building-{image.name}"
            _build(build, say)
            build.rename(image)
    return image


def _build(build: Path, say: Callable[[str], None]) -> None:
    distribution, codename = _system()
    say(f"building the {distribution} {codename} image (once a machine, about a minute)")
    keyring = Path(f"/usr/share/keyrings/{distribution}-archive-keyring.gpg")
    try:
        lines = sources(
            _capture(["apt-get", "indextargets", "--format", _TARGETS]),
            origin=_DISTRIBUTIONS[distribution],
            codename=codename,
            keyring=str(keyring) if keyring.exists() else "",
        )
        options = [
            line
            for line in _capture(["apt-config", "dump"]).splitlines()
            if re.match(r'Acquire::https?::\S+ ".+";', line)
        ]
    except (OSError, subprocess.CalledProcessError) as error:
        raise LabError(f"apt's configuration could not be read: {error}", phase="image") from error
    if not lines:
        raise LabError(
            f"apt on this machine has no source for {codename}",
            phase="image",
            hint="add the distribution's own sources to /etc/apt and run apt-get update",
        )
    argv = ["mmdebstrap", "--mode=root", "--variant=essential", "--format=directory"]
    argv += ["--dpkgopt=force-unsafe-io", "--dpkgopt=path-exclude=/usr/share/man/*"]
    argv += ["--dpkgopt=path-exclude=/usr/share/doc/*", f"--include={','.join(PACKAGES)}"]
    argv += [f"--aptopt={option}" for option in options]
    argv += [f"--customize-hook={CUSTOMIZE.format(masked=' '.join(MASKED))}", codename, str(build), "-"]
    _run_mmdebstrap(argv, "\n".join(lines) + "\n", say)
    for name, (mode, content) in FILES.items():
        path = build / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(content)
        path.chmod(mode)


def _run_mmdebstrap(argv: Sequence[str], stdin: str, say: Callable[[str], None]) -> None:
    """In a mount namespace of its own, so that nothing stays mounted however it ends."""
    output: list[str] = []
    with subprocess.Popen(
        ["unshare", "--mount", "--", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(stdin)
        for line in process.stdout:
            output.append(re.sub(r"//[^/@\s]+@", "//", line.rstrip()))
            if line.startswith("I: ") and "-hook" not in line:
                say(output[-1][3:])
    if process.returncode:
        raise LabError(
            f"mmdebstrap failed with exit status {process.returncode}",
            phase="image",
            state="no image was made",
            details=tuple(output[-25:]),
            hint="see whether apt-get update works on this machine, then run ddtree-ops lab up again",
        )
