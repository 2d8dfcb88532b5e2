"""Waiting and smoke checks on a lab host: real ssh, systemd and journal, the lab engine as the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.checks.smoke import run_smoke
from ddtree_ops.checks.wait import ReadyReport, StartFailed, StartTimeout, wait_ready
from ddtree_ops.errors import ExitCode
from ddtree_ops.inventory import connect_spec, load_inventory, select
from ddtree_ops.inventory.models import Restart, RuntimeSpec, Target
from ddtree_ops.remote import connect
from ddtree_ops.remote.session import Session
from ddtree_ops.results import Event, EventKind, Verdict
from ddtree_ops.runtime import build
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.unit import render_unit

pytestmark = pytest.mark.lab

UNIT = "checks-engine.service"
PORT = 30777


@dataclass
class Bench:
    """A lab host with both runtimes on it, and one unit of our own."""

    session: Session
    target: Target
    releases: dict[str, str]
    events: list[Event] = field(default_factory=list)

    def install(self, tree: str = "patched", **changes: Any) -> Target:
        environment = {"LAB_LOAD_SECONDS": "1", **changes.pop("environment", {})}
        health = self.target.service.health.model_copy(update={"window": 1.0, **changes.pop("health", {})})
        service = self.target.service.model_copy(
            update={"unit": UNIT, "port": PORT, "environment": environment, "health": health, **changes}
        )
        target = self.target.model_copy(update={"service": service})
        layout, control = Layout.of(target), UnitControl(self.session, UNIT)
        if control.state().exists:
            control.stop()
        self.session.swap_link(layout.current, layout.link_target(self.releases[tree]))
        control.install(layout.unit_path, render_unit(target))
        self.events.clear()
        return target

    def start(self) -> str:
        return UnitControl(self.session, UNIT).start().state.invocation_id

    def wait(self, target: Target, invocation: str | None = None, **more: Any) -> ReadyReport:
        return wait_ready(self.session, target, report=self.events.append, invocation=invocation, **more)

    def smoke(self, target: Target, **more: Any) -> dict[str, Any]:
        found = run_smoke(self.session, target, report=self.events.append, **more)
        results = {result.name: result for result in found.results}
        assert len(results) == len(found.results)
        return {"verdict": found.verdict, "diagnosis": found.diagnosis, **results}


@pytest.fixture(scope="module")
def bench(lab: Any) -> Iterator[Bench]:
    (target,) = select(load_inventory(str(lab.inventory)), ["ct200"])
    with connect(connect_spec(target.host)) as session:
        releases = {}
        for name, spec in (("patched", RuntimeSpec()), ("stock", RuntimeSpec(patches=[]))):
            bundle = build(spec)
            session.publish(
                Path(bundle.root),
                bundle.files,
                releases_dir=Layout.of(target).releases,
                digest=bundle.digest,
                manifest=bundle.manifest,
            )
            releases[name] = bundle.digest
        made = Bench(session, target, releases)
        yield made
        control = UnitControl(session, UNIT)
        if control.state().exists:
            control.stop()


def test_ready(bench: Bench) -> None:
    target = bench.install()
    invocation = bench.start()
    ready = bench.wait(target, invocation)
    assert ready.invocation == invocation
    assert {"weights", "kv-cache", "graphs", "drafter", "warm-up", "fired-up"} <= set(ready.phases)
    assert sum(ready.phases.values()) <= ready.ready_s
    assert "fired up" in ready.evidence
    assert ready.port is not None
    assert ready.port.owned
    assert ready.result().verdict is Verdict.PASS
    progress = [event for event in bench.events if event.kind is EventKind.PROGRESS]
    fractions = [event.fraction for event in progress if event.fraction is not None]
    assert fractions == sorted(fractions)
    assert {event.phase for event in progress} == {"wait"}
    again = bench.wait(target)
    assert again.invocation == invocation, (
        "a service that is up already is ready at once, from its own journal"
    )


def test_death_while_loading(bench: Bench) -> None:
    target = bench.install(model="/root/models/does-not-exist", restart=Restart(policy="no"))
    invocation = bench.start()
    with pytest.raises(StartFailed) as caught:
        bench.wait(target, invocation)
    assert caught.value.exit_code is ExitCode.CHECK_FAILED
    assert caught.value.kind == "unit"
    assert caught.value.report.invocation == invocation
    assert caught.value.report.http_polls == 0
    assert UNIT in caught.value.state
    assert invocation in caught.value.hint


def test_a_killed_service_ends_the_wait(bench: Bench) -> None:
    target = bench.install(environment={"LAB_LOAD_SECONDS": "30"}, restart=Restart(policy="no"))
    invocation = bench.start()
    killed: list[str] = []

    def kill_while_loading(event: Event) -> None:
        if not killed and event.message.startswith("weights"):
            killed.append(event.message)
            bench.session.run(["systemctl", "kill", "--signal=KILL", UNIT], check=True)

    with pytest.raises(StartFailed) as caught:
        wait_ready(bench.session, target, report=kill_while_loading, invocation=invocation)
    assert killed
    assert caught.value.kind == "unit"
    assert caught.value.report.phase == "weights"
    state = caught.value.report.unit_state
    assert state is not None
    assert state.failed


def test_a_crash_loop_behind_an_automatic_restart(bench: Bench) -> None:
    target = bench.install(
        model="/root/models/does-not-exist", restart=Restart(policy="always", delay=0.1, burst=5)
    )
    invocation = bench.start()
    with pytest.raises(StartFailed) as caught:
        bench.wait(target, invocation)
    assert caught.value.kind == "crash-loop"
    assert UNIT in caught.value.state


def test_a_load_that_hangs_stalls(bench: Bench) -> None:
    target = bench.install(environment={"LAB_HANG_AT": "kv"})
    bench.start()
    with pytest.raises(StartTimeout) as caught:
        bench.wait(target, stall_timeout=2.0)
    assert caught.value.exit_code is ExitCode.HEALTH_TIMEOUT
    assert caught.value.kind == "stall"
    assert "main PID" in caught.value.state


def test_the_hard_limit(bench: Bench) -> None:
    target = bench.install(environment={"LAB_LOAD_SECONDS": "30"})
    bench.start()
    with pytest.raises(StartTimeout) as caught:
        bench.wait(target, load_timeout=1.0)
    assert caught.value.kind == "load"


def test_a_missing_unit(bench: Bench) -> None:
    service = bench.target.service.model_copy(update={"unit": "no-such.service"})
    with pytest.raises(StartFailed) as caught:
        bench.wait(bench.target.model_copy(update={"service": service}))
    assert caught.value.kind == "not-found"


def test_the_port_of_somebody_else(bench: Bench) -> None:
    target = bench.install()
    holder = f"python3 -c 'import socket,time; s=socket.create_server((\"{target.service.bind}\",{PORT})); time.sleep(60)'"
    bench.session.run(["systemd-run", "--unit=port-holder", "--collect", "sh", "-c", holder], check=True)
    try:
        bench.start()
        with pytest.raises(StartFailed) as caught:
            bench.wait(target)
    finally:
        bench.session.run(["systemctl", "stop", "port-holder"], check=True)
    assert caught.value.kind == "port"
    assert "address already in use" in caught.value.message


@pytest.fixture
def ready(bench: Bench) -> Callable[..., Target]:
    def make(tree: str = "patched", **changes: Any) -> Target:
        target = bench.install(tree, **changes)
        bench.wait(target, bench.start())
        return target

    return make


def test_smoke_of_a_good_service(bench: Bench, ready: Callable[..., Target]) -> None:
    target = ready()
    found = bench.smoke(target)
    assert found["verdict"] is Verdict.PASS, found
    assert found["smoke.completion"].facts["completion_tokens"] == target.service.health.max_tokens
    assert found["smoke.stable"].facts["n_restarts"] == 0
    assert 1.0 < found["smoke.speculation"].facts["accept_length"] <= 8.0
    assert found["smoke.graphs"].facts["with_graph"] >= 1
    assert found["signatures"].facts["lines"] > 20


def test_smoke_finds_the_graph_that_is_too_small(bench: Bench, ready: Callable[..., Target]) -> None:
    target = ready("stock", restart=Restart(policy="no"))
    found = bench.smoke(target)
    assert found["verdict"] is Verdict.FAIL
    assert found["smoke.completion"].verdict is Verdict.FAIL
    assert "the engine died" in found["smoke.completion"].summary
    assert found["smoke.stable"].verdict is Verdict.FAIL
    assert found["signatures"].verdict is Verdict.FAIL
    assert found["diagnosis"].root.signature == "ddtree-graph-size"
    assert found["smoke.speculation"].verdict is Verdict.SKIPPED


def test_smoke_sees_a_crash_hidden_by_an_automatic_restart(
    bench: Bench, ready: Callable[..., Target]
) -> None:
    target = ready(
        environment={"LAB_CRASH_AFTER_S": "2"},
        restart=Restart(policy="always", delay=0.1, burst=5),
        health={"window": 6.0},
    )
    before = UnitControl(bench.session, UNIT).state()
    found = bench.smoke(target, baseline_unit=before)
    assert found["verdict"] is Verdict.FAIL
    assert found["smoke.stable"].verdict is Verdict.FAIL
    assert found["signatures"].verdict is Verdict.FAIL
    assert found["signatures"].facts["invocation"] == before.invocation_id


def test_smoke_of_garbage(bench: Bench, ready: Callable[..., Target]) -> None:
    target = ready(environment={"LAB_GARBAGE": "1"})
    found = bench.smoke(target)
    assert found["smoke.completion"].verdict is Verdict.PASS
    assert found["smoke.text"].verdict is Verdict.FAIL
    assert found["verdict"] is Verdict.FAIL
    assert bench.smoke(target, quality=False)["smoke.text"].verdict is Verdict.SKIPPED


def test_smoke_asks_for_more_than_is_accepted(bench: Bench, ready: Callable[..., Target]) -> None:
    found = bench.smoke(ready(), min_accept_length=7.9)
    assert found["smoke.speculation"].verdict is Verdict.FAIL


def test_smoke_of_a_stopped_unit(bench: Bench) -> None:
    target = bench.install()
    found = bench.smoke(target)
    assert found["smoke.stable"].verdict is Verdict.FAIL
    assert found["verdict"] is Verdict.FAIL


def test_smoke_of_a_unit_that_does_not_exist(bench: Bench) -> None:
    service = bench.target.service.model_copy(update={"unit": "no-such.service"})
    found = bench.smoke(bench.target.model_copy(update={"service": service}))
    assert found["smoke.stable"].verdict is Verdict.INCONCLUSIVE
    assert "nothing deployed" in found["smoke.stable"].summary
    assert found["verdict"] is Verdict.INCONCLUSIVE
    assert found["diagnosis"] is None and "signatures" not in found
