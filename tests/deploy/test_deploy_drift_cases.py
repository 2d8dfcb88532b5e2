"""Drift as golden cases (tests/deploy/cases/drift): a host without drift, one thing changed, what is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.deploy import drift
from ddtree_ops.deploy.deployed_settings import other_settings
from ddtree_ops.deploy.drift import Should, judge, worst_exit
from ddtree_ops.deploy.drift_look import NAMED, Live, Process, Tree, Venv, parse_live
from ddtree_ops.deploy.history import History, new_activation
from ddtree_ops.deploy.plan import text_sha256
from ddtree_ops.errors import ExitCode, RemoteError
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.remote.files import FileEntry
from ddtree_ops.remote.session import Reply
from ddtree_ops.results import Verdict
from ddtree_ops.runtime.bundle import digest_of
from ddtree_ops.service.state import UnitState

CASES = sorted((Path(__file__).parent / "cases" / "drift").glob("*.yaml"))
FILES = {"sglang/a.py": "1", "sglang/b.py": "2"}
UNIT = "[Service]\nEnvironment=A={}\n{}ExecStart=/v/bin/python -m sglang.launch_server --model-path /m --budget 32\n"
UNITS = {"new": UNIT.format("1", ""), "old": UNIT.format("0", "")}
UNITS["simulated"] = UNIT.format("1", "Environment=SGLANG_SIMULATE_ACC_LEN=4\n")
RUNNING = {
    "Id": "s.service",
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "InvocationID": "i1",
    "MainPID": "7",
    "UnitFileState": "enabled",
}
NONE = {"Id": "s.service", "LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead"}


def entries(files: dict[str, str]) -> tuple[FileEntry, ...]:
    return tuple(FileEntry(path, 0o644, 1, mark) for path, mark in sorted(files.items()))


def manifest(files: dict[str, str]) -> bytes:
    listed = [{"path": e.path, "mode": e.mode, "size": e.size, "sha256": e.sha256} for e in entries(files)]
    return json.dumps({"files": listed}).encode()


RELEASE = digest_of(entries(FILES))
OTHER_FILES = {"sglang/a.py": "1", "sglang/c.py": "3"}
NAMES = {"this": RELEASE, "other": digest_of(entries(OTHER_FILES))}


def history(items: list[dict[str, Any]], damaged: int = 0) -> History:
    found = []
    for item in items:
        made = new_activation(
            release=RELEASE,
            unit_sha256=text_sha256(UNITS[item.get("unit", "new")]),
            plan="p",
            who="ann",
            origin="desk",
            reason="deploy",
        )
        verdict = item.get("verdict", "pass")
        found.append(
            replace(
                made,
                verdict=verdict and Verdict(verdict),
                invocation=item.get("invocation", "i1"),
                summary=item.get("summary", ""),
            )
        )
    return History(tuple(found), damaged)


def tree(given: dict[str, Any] | None) -> Tree | None:
    if given is None:
        return None
    return Tree(
        **{
            name: tuple(tuple(item) if isinstance(item, list) else item for item in value)
            for name, value in given.items()
        }
    )


def process(given: dict[str, Any] | None) -> Process | None:
    if given is None:
        return None
    argv = ("/v/bin/python", "-m", "sglang.launch_server", "--model-path", "/m", "--budget", "32")
    values = {"pid": 7, "started": 1000.0, "argv": argv, "environ": {"A": "1"}, **given}
    values["argv"] = tuple(values["argv"])
    values["others"] = tuple(NAMES[name] for name in given.get("others", ()))
    return Process(**values)


def venv(given: dict[str, Any]) -> Venv:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    values["tree"] = tree(given.get("tree", {}))
    return Venv(**values)


def live(given: dict[str, Any]) -> Live:
    release = NAMES.get(given["release"]) if given.get("release") else RELEASE
    release = None if "release" in given and given["release"] is None else release
    state = given.get("state", {})
    built = OTHER_FILES if release == NAMES["other"] else FILES
    files = given.get("files", built)
    listed: bytes | None = manifest(built)
    if "manifest" in given:
        listed = given["manifest"] and manifest(OTHER_FILES)
    unit = given.get("unit", "new")
    return Live(
        release=release,
        unit_text=unit and UNITS[unit],
        state=UnitState.parse(NONE if state == "none" else {**RUNNING, **state}),
        history=history(given.get("history", [{}]), given.get("damaged", 0)),
        switched=given.get("switched", 900.0),
        release_dir=f"/opt/releases/{release}",
        files=files if files is None else entries(files),
        manifest=listed,
        process=process(given.get("process", {})),
        tree=tree(given.get("tree", {})),
        venv=venv(given.get("venv", {})),
        resolves=given.get("resolves", f"/opt/releases/{release}/sglang/__init__.py"),
        resolve_error=given.get("resolve_error", ""),
    )


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_drift(path):
    case = yaml.safe_load(path.read_text())
    unit = UNITS[case.get("should", "new")]
    should = Should(
        "h", "s.service", RELEASE, "runtime", unit, "/opt/services/s/current", frozenset({"FROM_FILE"})
    )
    report = judge(should, live(case.get("live", {})))
    wanted, found = case["expect"], list(report.findings)
    if case.get("order") == "any":
        found, wanted = (sorted(items, key=_id) for items in (found, wanted))
    assert [(item.id, item.severity.value) for item in found] == [
        (item["id"], item["severity"]) for item in wanted
    ]
    for item, want in zip(found, wanted, strict=True):
        assert want.get("found", "") in item.found
        assert list(item.names) == want.get("names", list(item.names))
        assert want.get("hint", "") in item.hint
        assert item.should
    assert report.exit_code == case["exit"]
    told = json.dumps(report.to_json())
    assert not any(word in told for word in ("oldsecret", "s3cret"))


def _id(item: Any) -> str:
    return item["id"] if isinstance(item, dict) else item.id


def test_there_are_cases():
    assert len(CASES) > 25


def test_many_files_are_counted_and_the_first_named():
    files = {f"sglang/{number:03}.py": "9" for number in range(50)}
    should = Should("h", "s.service", RELEASE, "runtime", UNITS["new"], "/c")
    (finding,) = judge(should, live({"files": files})).findings
    assert (finding.count, len(finding.names)) == (52, NAMED)


def test_settings_of_the_last_deploy_that_the_inventory_has_otherwise_are_named():
    service = {"name": "s", "unit": "s.service", "runtime": "r", "venv": "/v", "model": "/m"}
    wished = Service(**service, environment={"A": "1"})
    deployed = Service(**service, environment={"A": "0", "API_KEY": "oldsecret"}, port=30002)
    (told,) = (
        finding
        for finding in judge(
            Should("h", "s.service", RELEASE, "runtime", UNITS["new"], "/c"),
            live({"unit": "old", "history": [{"unit": "old"}]}),
            other_settings(deployed, wished),
        ).findings
        if finding.id == "unit.other"
    )
    assert told.found == (
        "it is as it was deployed; the inventory, or a --set of that deploy, says otherwise: port deployed 30002, "
        f"inventory {wished.port}; environment.A deployed 0, inventory 1; environment.API_KEY deployed ********, "
        "inventory not set"
    )


@pytest.mark.parametrize(
    ("unit", "record", "words"),
    [
        ("new", "asked for none", None),
        ("old", json.dumps({"name": "s"}), "says otherwise"),
        (
            "old",
            Service(name="s", unit="s.service", runtime="r", venv="/v", model="/old").model_dump_json(),
            "says otherwise: model deployed /old, inventory /m",
        ),
    ],
)
def test_settings_are_read_where_a_unit_file_is_another_one(monkeypatch, unit, record, words):
    asked = []

    class Asked:
        def begin_batch(self, requests, **more):
            return list

        def read_file(self, path):
            asked.append(path)
            return record.encode()

    service = Service(name="s", unit="s.service", runtime="r", venv="/v", model="/m")
    target = Target(
        host=Host(name="h", services={"s": service}), service=service, runtime=RuntimeSpec(name="r")
    )
    should = Should("h", "s.service", RELEASE, "runtime", UNITS["new"], "/c")
    monkeypatch.setattr(drift, "_should", lambda *_: should)
    monkeypatch.setattr(
        drift, "parse_live", lambda *_, **__: live({"unit": unit, "history": [{"unit": unit}]})
    )
    found = drift.find_drift(target, Asked(), known=lambda _: object())
    told = [finding.found for finding in found.findings if finding.id == "unit.other"]
    assert [text.endswith(words) for text in told] == ([True] if words else [])
    assert len(asked) == len(told)


def test_the_worst_of_several_hosts_decides():
    should = Should("h", "s.service", RELEASE, "runtime", UNITS["new"], "/c")
    good, bad = judge(should, live({})), judge(should, live({"files": {}}))
    empty = live(
        {"release": None, "unit": None, "history": [], "files": None, "process": None, "state": "none"}
    )
    never = judge(should, empty)
    assert worst_exit([good]) is ExitCode.OK
    assert worst_exit([good, never]) is ExitCode.INCONCLUSIVE
    assert worst_exit([good, never, bad]) is ExitCode.CHECK_FAILED
    assert worst_exit([]) is None


def test_a_look_without_an_answer_is_an_error_with_what_it_said():
    nothing = Reply({"found": False, "entries": []})
    show = Reply(dict(RUNNING))
    probe = Reply({"rc": 1, "stdout": 0}, b"Traceback\nSyntaxError: HF_TOKEN=hf_secret1\n")
    with pytest.raises(RemoteError) as caught:
        parse_live([nothing, nothing, nothing, show, nothing, nothing, probe], host="h")
    assert "SyntaxError" in caught.value.render()
    assert "hf_secret1" not in caught.value.render()
