"""Where things lie on a host. Pure string arithmetic over POSIX paths; nothing is looked up."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_ops.inventory.models import Target

__all__ = ["UNIT_DIR", "Layout"]

UNIT_DIR = "/etc/systemd/system"
"""Where rendered units are installed."""


@dataclass(frozen=True)
class Layout:
    """Paths of one service on one host; all absolute, on the host.

    :param root: the inventory's ``deploy_root``.
    :param unit: full unit name (``sglang-k26-ddtree.service``).
    """

    root: str
    unit: str

    @classmethod
    def of(cls, target: Target) -> Layout:
        """The layout of a target."""
        return cls(root=target.host.deploy_root.rstrip("/"), unit=target.service.unit)

    @property
    def releases(self) -> str:
        """Folder of the published releases, shared by the services of a host."""
        return f"{self.root}/releases"

    @property
    def service_dir(self) -> str:
        """Folder of this service's own state."""
        return f"{self.root}/services/{self.unit}"

    @property
    def current(self) -> str:
        """Symbolic link to the active release; ``PYTHONPATH`` of the unit."""
        return f"{self.service_dir}/current"

    @property
    def history(self) -> str:
        """JSON lines, one an activation."""
        return f"{self.service_dir}/history.jsonl"

    @property
    def audit(self) -> str:
        """JSON lines, one an act on this host, for all its services."""
        return f"{self.root}/audit.jsonl"

    @property
    def lock(self) -> str:
        """Lock file of this service's deployments."""
        return f"{self.service_dir}/lock"

    @property
    def bench_lock(self) -> str:
        """Lock file of a whole bench of this service, beside that of each deployment it makes."""
        return f"{self.service_dir}/bench.lock"

    @property
    def rollback(self) -> str:
        """State of the rollback that is armed on the host; there only while one is."""
        return f"{self.service_dir}/rollback.json"

    @property
    def guard_dir(self) -> str:
        """Folder of the programs that carry out armed rollbacks."""
        return f"{self.root}/guard"

    @property
    def secrets(self) -> str:
        """Folder of the service's secrets: files that root alone can read."""
        return f"{self.service_dir}/secrets"

    def kept_unit(self, sha256: str) -> str:
        """Path, without its ending, of a unit file that was installed (``.service``) and its settings (``.json``).

        :param sha256: of the unit file, 64 hex digits.
        """
        return f"{self.service_dir}/units/{sha256}"

    @property
    def pycache(self) -> str:
        """Folder for byte code, kept outside the read-only releases."""
        return f"{self.root}/pycache"

    @property
    def unit_path(self) -> str:
        """The unit file."""
        return f"{UNIT_DIR}/{self.unit}"

    def release(self, digest: str) -> str:
        """Folder of a release.

        :raises ValueError: where ``digest`` is not the 64 hex digits of a bundle.
        """
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ValueError(f"{digest!r} is not a bundle digest")
        return f"{self.releases}/{digest}"

    def link_target(self, digest: str) -> str:
        """What :attr:`current` points at for a release, relative to :attr:`service_dir`."""
        self.release(digest)
        return f"../../releases/{digest}"
