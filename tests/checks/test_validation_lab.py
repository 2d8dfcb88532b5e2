"""Validation of a service on a lab host: the unit, the journal, and what an engine that dies leaves of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.checks.validation.run import Validation, validate
from ddtree_ops.checks.validation.suites import load_suite, pick
from ddtree_ops.checks.wait import wait_ready
from ddtree_ops.inventory import connect_spec, load_inventory, select
from ddtree_ops.inventory.models import Restart, RuntimeSpec, Target
from ddtree_ops.remote import connect
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Event, Verdict
from ddtree_ops.runtime import build
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.unit import render_unit

pytestmark = pytest.mark.lab

UNIT = "validated-engine.service"
PORT = 30787
FAULTS = "/run/validated-faults"


@dataclass
class Bench:
    """A service of our own on a lab host, whose engine has faults that can be switched."""

    session: Session
    target: Target
    events: list[Event]

    def start(self) -> None:
        control = UnitControl(self.session, UNIT)
        if not control.state().running:
            self.session.write_file(FAULTS, b"")
            control.start()
            wait_ready(self.session, self.target, report=self.events.append)

    def validate(
        self, plan: Any, faults: str = "", *, start: bool = True
    ) -> tuple[Validation, dict[str, CheckResult]]:
        if start:
            self.start()
        self.session.write_file(FAULTS, faults.encode())
        seen: list[CheckResult] = []
        found = validate(self.session, self.target, plan, report=self.events.append, on_result=seen.append)
        assert tuple(seen) == found.checks
        return found, {result.name: result for result in found.checks}


@pytest.fixture(scope="module")
def bench(lab: Any) -> Iterator[Bench]:
    (target,) = select(load_inventory(str(lab.inventory)), ["b300"])
    environment = {"LAB_LOAD_SECONDS": "0.2", "LAB_FAULTS_FILE": FAULTS}
    service = target.service.model_copy(
        update={"unit": UNIT, "port": PORT, "environment": environment, "restart": Restart(policy="no")}
    )
    target = target.model_copy(update={"service": service})
    layout = Layout.of(target)
    with connect(connect_spec(target.host)) as session:
        bundle = build(RuntimeSpec())
        session.publish(
            Path(bundle.root),
            bundle.files,
            releases_dir=layout.releases,
            digest=bundle.digest,
            manifest=bundle.manifest,
        )
        session.swap_link(layout.current, layout.link_target(bundle.digest))
        control = UnitControl(session, UNIT)
        control.install(layout.unit_path, render_unit(target))
        yield Bench(session, target, [])
        control.stop()


def test_the_quick_suite_passes(bench: Bench) -> None:
    found, results = bench.validate(pick([], load_suite("quick")))
    told = {name: (result.verdict.value, result.summary) for name, result in results.items()}
    assert found.verdict is Verdict.PASS, told
    assert list(results)[-4:] == ["steady", "memory", "no-xid", "signatures"]
    assert results["no-xid"].verdict is Verdict.SKIPPED, "a lab host is a container: it has no kernel log"
    assert {name for name, result in results.items() if result.verdict is not Verdict.PASS} == {"no-xid"}
    assert len(results["memory"].facts["host_memory_mib"]) == len(results) - 4
    assert results["signatures"].facts["lines"] > 0
    assert all(result.host == "b300" for result in found.checks)
    report = found.report(bench.target)
    assert (report.verdict, report.facts["speculative_algorithm"]) == (Verdict.PASS, "DDTREE")


def test_an_engine_that_dies_is_seen_explained_and_asked_nothing_more(bench: Bench) -> None:
    plan = pick(["short-chat", "prefix-hit", "burst", "copy"])
    found, results = bench.validate(plan, "crash-on-prefix-hit=50")
    assert found.verdict is Verdict.FAIL
    assert results["short-chat"].verdict is Verdict.PASS
    died = results["prefix-hit"]
    assert died.verdict is Verdict.FAIL
    assert "the engine died: " in died.summary
    assert "failed" in died.summary
    assert died.hint.startswith("ddtree-ops diagnose b300 --invocation ")
    assert any(item.source == "systemctl show" for item in died.evidence)
    for name in ("burst", "copy"):
        assert (results[name].verdict, results[name].summary) == (Verdict.SKIPPED, "the engine died")
    assert results["steady"].verdict is Verdict.FAIL
    assert results["signatures"].verdict is Verdict.FAIL
    assert found.diagnosis is not None
    assert found.diagnosis.root is not None
    assert "shared memory" in found.diagnosis.root.title + results["signatures"].summary

    stopped, results = bench.validate(plan, start=False)
    assert stopped.verdict is Verdict.FAIL
    assert results["steady"].verdict is Verdict.FAIL
    assert {results[name].summary for name in ("short-chat", "memory")} == {"the service does not run"}


def test_a_crash_after_the_last_answer_is_seen(bench: Bench) -> None:
    """The check passes; the standing ones tell."""
    found, results = bench.validate(pick(["short-chat"]), "restart-itself=0")
    assert found.verdict is Verdict.FAIL
    assert results["steady"].verdict is Verdict.FAIL


def test_a_unit_that_is_not_there(bench: Bench) -> None:
    service = bench.target.service.model_copy(update={"unit": "no-such.service"})
    target = bench.target.model_copy(update={"service": service})
    found = validate(bench.session, target, pick(["short-chat"]), report=bench.events.append)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert [result.verdict for result in found.checks].count(Verdict.SKIPPED) == len(found.checks) - 1
