"""What a deployment has to know of its host, asked for in one batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddtree_ops.deploy.history import parse_history
from ddtree_ops.deploy.plan import Observed
from ddtree_ops.deploy.secrets import HostSecrets, look_requests, seen
from ddtree_ops.inventory.models import Service
from ddtree_ops.remote.session import Reply, Request, Session, answers
from ddtree_ops.runtime import Bundle
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.state import UnitState

__all__ = ["Sight", "armed_request", "begin_look", "sight_of"]


@dataclass(frozen=True)
class Sight:
    """How a host stands for one service.

    :param secrets: what its folder of secrets holds.
    :param link: where ``current`` points; None where there is no such link.
    """

    observed: Observed
    secrets: HostSecrets
    link: str | None


def armed_request(layout: Layout) -> Request:
    """Reads the state of a rollback that may be armed on the host."""
    return Request("read_file", {"path": layout.rollback, "max_bytes": 1 << 20})


def begin_look(
    session: Session, layout: Layout, service: Service, *more: Request, bundle: Bundle | None = None
) -> Callable[[], tuple[list[Reply], Sight]]:
    """Ask the host for what is there; what is returned waits for the answers: those to ``more``, and the sight.

    :param bundle: that is wished, where it is known: the list of files of the live release travels only where it is
        another one.
    """
    wished = hashlib.sha256(bundle.manifest).hexdigest() if bundle else ""
    replied = session.begin_batch(
        [
            *more,
            Request("list_dir", {"path": layout.service_dir}),
            Request("list_dir", {"path": layout.releases}),
            Request("read_file", {"path": layout.unit_path, "max_bytes": 1 << 20}),
            Request("read_file", {"path": layout.history, "max_bytes": 64 << 20}),
            Request("show_unit", {"unit": service.unit}),
            *look_requests(layout, service),
            Request(
                "read_file",
                {"path": f"{layout.current}/manifest.json", "max_bytes": 64 << 20, "unless": wished},
            ),
        ]
    )

    def replies() -> tuple[list[Reply], Sight]:
        *needed, manifest = replied()
        found = answers(needed)
        unread = Reply({"found": False, "same": False})
        found.append(unread if isinstance(manifest, Exception) else manifest)
        return found[: len(more)], sight_of(service, found[len(more) :])

    return replies


def sight_of(service: Service, replies: Sequence[Reply]) -> Sight:
    """What the replies to the requests of :func:`begin_look` say. Pure but for secrets, whose values are learned."""
    own, releases, unit, history, show, *secrets, manifest = replies
    links = {entry["name"]: entry["target"] for entry in own.values["entries"]}
    current = links.get("current")
    observed = Observed(
        release=current.rsplit("/", 1)[-1] if current else None,
        releases=frozenset(
            entry["name"]
            for entry in releases.values["entries"]
            if entry["kind"] == "dir" and not entry["name"].startswith(".")
        ),
        unit_text=unit.data.decode("utf-8", "replace") if unit.values["found"] else None,
        state=UnitState.parse(show.values),
        history=parse_history(history.data if history.values["found"] else None),
        manifest=manifest.data if manifest.values["found"] and not manifest.values["same"] else None,
    )
    return Sight(observed, seen(service, secrets), current)
