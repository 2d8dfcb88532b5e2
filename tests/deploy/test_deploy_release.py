"""Push and verify of a release that the host may already have; the host is this machine, the agent is real."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_ops.deploy.deployment import Deployment
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.remote import connect_local
from ddtree_ops.remote.session import Session
from ddtree_ops.results import Event, EventKind
from ddtree_ops.runtime import build, patchcheck
from ddtree_ops.sizing import RUNNER_PATH


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runner = tmp_path / "checkout" / RUNNER_PATH
    runner.parent.mkdir(parents=True)
    runner.write_text("class CudaGraphRunner: ...\n")
    service = Service.model_validate(
        {"name": "s", "unit": "t.service", "runtime": "r", "venv": "/v", "model": "/m"}
    )
    yield Target(
        host=Host(name="h", deploy_root=str(tmp_path / "root"), services={"s": service}),
        service=service,
        runtime=RuntimeSpec(name="r", base=str(tmp_path / "checkout"), patches=()),
    )
    for folder, _, _ in os.walk(tmp_path / "root"):
        Path(folder).chmod(0o755)


def deploy(target: Target, session: Session) -> tuple[int, list[str]]:
    """Round trips of push and verify of a bundle that is known, and what they say."""
    said: list[str] = []

    def report(event: Event) -> None:
        if event.kind is EventKind.DONE:
            said.append(event.message)

    deployment = Deployment(target, session, report, bundle=build(target.runtime))
    deployment.shipment.begin_check()
    deployment.shipment.check_built()
    before = session.round_trips
    deployment.push()
    deployment.verify()
    return session.round_trips - before, said


def test_what_the_host_has_whole_is_neither_listed_nor_read_again(target: Target) -> None:
    with connect_local("h") as session:
        trips, (pushed, first) = deploy(target, session)
        assert trips > 2 and pushed.startswith("1 files")
        trips, (pushed, again) = deploy(target, session)
    assert (trips, pushed, again) == (0, "already there, 1 files verified on disk", first)


def test_the_runner_is_read_from_the_host_where_the_bundle_here_is_not_as_built(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was proven on the bytes of a digest holds for a release of that digest; without a proof they are read."""
    with connect_local("h") as session:
        _, (_, first) = deploy(target, session)
        root = build(target.runtime).root
        runner = root / RUNNER_PATH
        runner.write_text(runner.read_text().replace("Cuda", "cUDA"))
        trips, (pushed, kept) = deploy(target, session)
        assert (trips, pushed, kept) == (0, "already there, 1 files verified on disk", first)
        monkeypatch.setattr(patchcheck, "_kept", {})
        for proof in root.parent.glob("patch-check-*.json"):
            proof.unlink()
        trips, (pushed, again) = deploy(target, session)
    assert (trips, pushed, again) == (1, "already there, 1 files verified on disk", first)
