"""Plans as golden cases (tests/deploy/cases/plan): what changes, one by one, what does not, and that a second is empty."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.deploy.history import History, new_activation
from ddtree_ops.deploy.plan import ChangeKind, Observed, Plan, Wish, make_plan, text_sha256
from ddtree_ops.results import Verdict
from ddtree_ops.service.state import UnitState

CASES = sorted((Path(__file__).parent / "cases" / "plan").glob("*.yaml"))
UNIT = "[Service]\nExecStart=/v/bin/python -m sglang.launch_server --a\n"
RUNNING = {
    "Id": "s.service",
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "InvocationID": "i1",
    "MainPID": "7",
}
STATES = {
    "running": RUNNING,
    "stale": {**RUNNING, "NeedDaemonReload": "yes"},
    "dropped-in": {**RUNNING, "DropInPaths": "/run/a.conf", "DropInsUnread": "/etc/b.conf"},
    "failed": {
        "Id": "s.service",
        "LoadState": "loaded",
        "ActiveState": "failed",
        "SubState": "failed",
        "Result": "signal",
    },
    "none": {"Id": "s.service", "LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead"},
}


def digest(letter: str | None) -> str | None:
    return letter and letter * 64


def manifest(files: dict[str, str] | str | None) -> bytes | None:
    if not isinstance(files, dict):
        return files and files.encode()
    listed = [
        {"path": path, "mode": 0o755 if mark.endswith(" x") else 0o644, "size": 1, "sha256": mark.split()[0]}
        for path, mark in files.items()
    ]
    return json.dumps({"files": listed}).encode()


def passed(unit_text: str) -> History:
    made = new_activation(
        release="b" * 64, unit_sha256=text_sha256(unit_text), plan="p", who="w", origin="o", reason="deploy"
    )
    return History((replace(made, verdict=Verdict.PASS, invocation="i1"),))


def applied(wish: Wish) -> Observed:
    """How the host stands once the wish has been deployed and has passed."""
    return Observed(
        release=wish.release,
        releases=frozenset({wish.release}),
        unit_text=wish.unit_text,
        state=UnitState.parse(RUNNING),
        history=passed(wish.unit_text),
        manifest=manifest(dict(wish.files or {})),
    )


def load(path: Path) -> tuple[Wish, Observed, dict[str, Any]]:
    case = yaml.safe_load(path.read_text())
    wish = Wish("h", "s", "s.service", "b" * 64, "runtime", case.get("unit", UNIT), case.get("files"))
    given = case.get("observed", {})
    changes: dict[str, Any] = {}
    if "release" in given:
        changes["release"] = digest(given["release"])
    if "releases" in given:
        changes["releases"] = frozenset(map(digest, given["releases"]))
    if "unit" in given:
        changes["unit_text"] = given["unit"]
    if "state" in given:
        changes["state"] = UnitState.parse(STATES[given["state"]])
    if "history" in given:
        changes["history"] = History()
    if "repaired" in given:
        changes["repaired"] = tuple(given["repaired"])
    if "manifest" in given:
        changes["manifest"] = manifest(given["manifest"])
        wish = replace(wish, files=wish.files or {})
    return wish, replace(applied(wish), **changes), case["expect"]


def shown(plan: Plan, expect: dict[str, Any]) -> dict[str, Any]:
    """Of the plan as much as the case speaks of."""
    said: dict[str, Any] = {
        "changes": [f"{change.kind.value}: {change.summary}" for change in plan.changes],
        "arguments": None if plan.arguments is None else list(map(str, plan.arguments)),
        "variables": None if plan.variables is None else list(map(str, plan.variables)),
        "reasons": list(plan.reasons),
        "stays": list(plan.stays),
        "notes": list(plan.notes),
        "files_unknown": plan.files_unknown,
        "files": plan.files and {**plan.files.to_json(), "against": plan.files.against[0]},
        "short": plan.short().partition(": ")[2],
        "diff": [
            line
            for change in plan.changes
            for line in change.diff
            if line[:1] in "+-" and not line.startswith(("+++", "---"))
        ],
        "never": [
            word for word in expect.get("never", ()) if word not in json.dumps(plan.to_json()) + plan.short()
        ],
    }
    return {name: said[name] for name in expect}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_plan_says_what_it_does_and_what_not(path):
    wish, observed, expect = load(path)
    assert shown(make_plan(wish, observed), expect) == expect


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_second_plan_changes_nothing(path):
    wish, observed, _ = load(path)
    plan = make_plan(wish, observed)
    again = make_plan(wish, applied(wish))
    assert again.empty
    assert not again.reasons
    assert (plan.digest == again.digest) == plan.empty


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_restart_is_planned_exactly_where_there_is_a_reason(path):
    wish, observed, _ = load(path)
    plan = make_plan(wish, observed)
    assert plan.activates == bool(plan.reasons)
    assert plan.activates != any(line.startswith("no restart") for line in plan.stays)
    assert plan.to_json()["restart"] is plan.activates
    assert not plan.activates or plan.changes[-1].kind in (ChangeKind.START, ChangeKind.RESTART)


def test_there_are_cases():
    assert len(CASES) > 10
