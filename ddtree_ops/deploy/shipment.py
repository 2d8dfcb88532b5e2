"""A bundle on its way to a host: is it there and whole, published, read back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ddtree_ops.deploy.frame import Frame
from ddtree_ops.errors import BuildError, OpsError, RemoteError
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.files import FileEntry
from ddtree_ops.remote.session import Session
from ddtree_ops.results import EventKind
from ddtree_ops.runtime import Bundle, PatchCheck, PatchState, build, check_bundle, check_source, compare
from ddtree_ops.service.layout import Layout

__all__ = ["Shipment", "runner_wanted", "step_missing"]


def step_missing() -> OpsError:
    """The error of a step that needs what an earlier one should have found out."""
    return OpsError(
        "an earlier step of the playbook is missing",
        hint="a playbook that pushes starts with preflight, build",
    )


def runner_wanted(target: Target, release: str) -> dict[str, Any]:
    """What :func:`check_bundle` and :func:`check_source` have to know of a target to judge a release in that folder."""
    speculative = target.service.speculative
    return {
        "where": f"{target.name}:{release}",
        "description": target.runtime.description,
        "block_size": speculative.block_size if speculative else 8,
        "budget": speculative.budget if speculative else None,
    }


class Shipment:
    """The release of one target. The methods below are to be called in a step of ``frame``, and set its note.

    :ivar bundle: None until it is known or built.
    :ivar repaired: what was wrong with the release that the host had, one problem an entry.
    :ivar patched: whether the runner is patched; None: not known.
    """

    def __init__(self, target: Target, session: Session, frame: Frame, bundle: Bundle | None) -> None:
        self.bundle = bundle
        self.repaired: tuple[str, ...] = ()
        self.patched: bool | None = None
        self._target = target
        self._layout = Layout.of(target)
        self._session = session
        self._frame = frame
        self._whole: Callable[[], bool] | None = None
        self._is_whole: bool | None = None
        self._runner: PatchCheck | None = None
        self._verified_on_push = False

    def built(self) -> Bundle:
        """The bundle, from the cache or built now."""
        if self.bundle is None:
            self.bundle = build(
                self._target.runtime,
                progress=lambda text: self._frame.emit(EventKind.PROGRESS, self._frame.step, text),
            )
        return self.bundle

    def needed(self) -> Bundle:
        """:raises OpsError: no step has built it."""
        if self.bundle is None:
            raise step_missing()
        return self.bundle

    def begin_check(self) -> None:
        """Have the host hash the release while it is looked at, where it is known which one it will be; once."""
        if self.bundle is not None and self._whole is None:
            self._whole = self._session.begin_check(
                releases_dir=self._layout.releases,
                digest=self.bundle.digest,
                manifest=self.bundle.manifest,
            )

    def found_whole(self) -> bool:
        """What the host found; False where it was not asked."""
        if self._is_whole is None:
            self._is_whole = self._whole is not None and self._whole()
        return self._is_whole

    def check_built(self) -> None:
        """Prove the sizing of the bundle's runner while the host works: a release that was verified has the same bytes."""
        bundle = self.bundle
        if bundle is None:
            return
        with contextlib.suppress(OSError, BuildError):  # then `verify` reads it from the host
            self._runner = check_bundle(bundle, **self._runner_wanted())

    def push(self) -> None:
        """Publish the release; where it is already there, every file of it is verified on disk."""
        bundle, frame = self.needed(), self._frame
        if self.found_whole():
            self._verified_on_push = True
            frame.note = f"already there, {len(bundle.files)} files verified on disk"
            return
        result = self._session.publish(
            bundle.root,
            bundle.files,
            releases_dir=self._layout.releases,
            digest=bundle.digest,
            manifest=bundle.manifest,
            progress=lambda done, total: frame.emit(
                EventKind.PROGRESS,
                frame.step,
                f"{done / 1e6:.0f} of {total / 1e6:.0f} MB",
                done / max(total, 1),
            ),
        )
        self._verified_on_push = not result.created
        self.repaired = result.repaired
        if result.repaired:
            frame.note = f"repaired: {'; '.join(result.repaired[:3])}"
        elif result.created:
            linked = f", {result.linked_files} linked from earlier releases" if result.linked_files else ""
            if result.resumed_files:
                linked += f", {result.resumed_files} had arrived with a push that broke off"
            frame.note = f"{result.sent_files} files, {result.sent_bytes / 1e6:.1f} MB sent{linked}"
        else:
            frame.note = f"already there, {result.files} files verified on disk"

    def verify(self) -> None:
        """Read the published release back and prove the sizing of its runner.

        :raises RemoteError: files are not as built.
        """
        bundle = self.needed()
        release = self._layout.release(bundle.digest)
        found: Sequence[FileEntry] = ()
        if not self._verified_on_push:
            found = self._session.hash_tree(release) or ()
            differences = compare(bundle.files, found)
            if differences:
                raise RemoteError(
                    f"{len(differences)} files of release {bundle.digest[:12]} are not as built",
                    details=tuple(str(difference) for difference in differences[:10]),
                    hint="check the host's disk; the next deploy publishes the release again",
                )
        check = self._runner if self._verified_on_push else None
        if check is None:
            check = check_source(
                lambda path: self._session.read_file(f"{release}/{path}"),
                hashes={entry.path: entry.sha256 for entry in found} if found else None,
                **self._runner_wanted(),
            )
        speculative = self._target.service.speculative
        self.patched = not check.absent if check.state is not PatchState.FOREIGN else None
        if speculative and speculative.algorithm == "DDTREE" and check.sizing and not check.sizing.ok:
            self._frame.say("verify", f"warning: {check.sentence or check.summary}")
        overlay = check.overlay.short if check.overlay else bundle.overlay
        self._frame.note = "; ".join(
            filter(None, [f"{len(bundle.files)} files as built", f"runner {check.summary}", overlay])
        )

    def _runner_wanted(self) -> dict[str, Any]:
        return runner_wanted(self._target, self._layout.release(self.needed().digest))
