"""A plan in a file: for its owner alone, without secrets, and of use only while nothing has changed."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ddtree_ops.deploy.history import History, new_activation
from ddtree_ops.deploy.plan import Observed, Wish, make_plan, text_sha256
from ddtree_ops.deploy.saved import (
    Expectation,
    SavedPlan,
    check_settings,
    fingerprint,
    read_plan,
    write_plan,
)
from ddtree_ops.errors import ConfigError, ExitCode, OpsError, UsageError
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.results import Verdict
from ddtree_ops.service.state import UnitState

RUNNING = UnitState.parse(
    {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "InvocationID": "i1"}
)
OLD = "[Service]\nEnvironment=HF_TOKEN=hf_oldsecret\nExecStart=/v/python -m x --a 1\n"
NEW = "[Service]\nEnvironment=HF_TOKEN=hf_newsecret\nExecStart=/v/python -m x --a 2\n"
WISH = Wish("h", "s", "s.service", "b" * 64, "runtime", NEW)
PASSED = replace(
    new_activation(
        release="a" * 64, unit_sha256=text_sha256(OLD), plan="p", who="w", origin="o", reason="deploy"
    ),
    verdict=Verdict.PASS,
    invocation="i1",
)
STANDS = Observed("a" * 64, frozenset({"a" * 64}), OLD, RUNNING, History((PASSED,)))


def expectation() -> Expectation:
    return Expectation.of(make_plan(WISH, STANDS), STANDS, host="h")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "a plan.json"
    write_plan(path, SavedPlan("/etc/i.yaml", (expectation(),), settings=("speculative.budget=16",)))
    return path


def test_what_is_read_is_what_was_written(saved):
    found = read_plan(saved)
    assert (found.inventory, found.settings, found.runtime, found.hosts) == (
        "/etc/i.yaml",
        ("speculative.budget=16",),
        None,
        ["h"],
    )
    assert replace(found.targets[0], again="") == expectation()
    assert found.who
    assert found.created


def test_the_file_is_for_its_owner_and_holds_no_secret(saved):
    assert saved.stat().st_mode & 0o777 == 0o600
    text = saved.read_text()
    assert "hf_" not in text
    assert "********" in text
    assert list(saved.parent.iterdir()) == [saved]


def test_an_older_file_is_replaced_and_becomes_private(saved):
    saved.chmod(0o644)
    write_plan(saved, SavedPlan("/etc/j.yaml", (expectation(),)))
    assert saved.stat().st_mode & 0o777 == 0o600
    assert read_plan(saved).inventory == "/etc/j.yaml"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record["targets"][0].update(host="other"), "changed after it was written"),
        (lambda record: record.update(settings=["port=1"]), "changed after it was written"),
        (lambda record: record.update(kind="something"), "its kind is 'something'"),
        (lambda record: record.pop("sha256"), "sha256"),
        (lambda record: record.update(schema=2), "another version (schema 2"),
    ],
)
def test_a_file_that_was_edited_is_refused(saved, change, said):
    record = json.loads(saved.read_text())
    change(record)
    saved.write_text(json.dumps(record))
    with pytest.raises(OpsError) as caught:
        read_plan(saved)
    assert said in caught.value.message
    assert caught.value.exit_code is ExitCode.CONFIG
    assert "--out" in caught.value.hint
    assert caught.value.state == "nothing was changed"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'"x"', b"null"])
def test_what_is_no_plan_is_refused(tmp_path, content):
    path = tmp_path / "p"
    path.write_bytes(content)
    with pytest.raises(OpsError, match="is no plan file, or is damaged"):
        read_plan(path)


def test_no_such_file_is_refused_like_a_damaged_one(tmp_path):
    with pytest.raises(ConfigError, match="No such file") as caught:
        read_plan(tmp_path / "none")
    assert caught.value.exit_code is ExitCode.CONFIG


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(OpsError, match="cannot be written"):
        write_plan(tmp_path / "none" / "p", SavedPlan("/i", (expectation(),)))


def test_a_host_that_stands_as_it_stood_may_be_changed():
    assert expectation().differences(make_plan(WISH, STANDS), STANDS) == ()
    expectation().check(make_plan(WISH, STANDS), STANDS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"release": "c" * 64}, "the release that current points at: was aaaa"),
        ({"release": None}, "the release that current points at: was aaaa"),
        ({"unit_text": OLD + "\n"}, "the unit file (first 12 digits of its sha256): was"),
        ({"unit_text": None}, "is none"),
        ({"state": replace(RUNNING, invocation_id="i2")}, "the run of the unit: was i1, is i2"),
        ({"state": replace(RUNNING, sub_state="exited")}, "whether the unit runs: was yes, is no"),
        (
            {"state": replace(RUNNING, drop_in_paths=("/x.conf",))},
            "drop-ins of the unit: was none, is /x.conf",
        ),
        ({"state": replace(RUNNING, need_daemon_reload=True)}, "older unit file in memory: was no, is yes"),
        ({"history": History()}, "the latest entry of its history: was"),
        (
            {"history": History((replace(PASSED, verdict=None),))},
            "the verdict on that entry: was pass, is none",
        ),
        ({"releases": frozenset({"a" * 64, "b" * 64})}, "whether the wished release is on the host: was no"),
        ({"repaired": ("x",)}, "not as built: was no, is yes"),
        ({"secrets": ("write HF_TOKEN",)}, "done about its secrets: was none, is write HF_TOKEN"),
    ],
)
def test_what_changed_on_the_host_is_said(change, said):
    now = replace(STANDS, **change)
    found = expectation().differences(make_plan(WISH, now), now)
    assert any(said in line for line in found), found
    with pytest.raises(OpsError) as caught:
        expectation().check(make_plan(WISH, now), now)
    assert caught.value.details == found
    assert caught.value.hint.startswith("look at what would be done now: ddtree-ops plan h")


def test_every_part_of_how_a_host_stands_has_words_and_is_seen_to_change():
    """A new field without a case above would be compared, and nobody would have seen it."""
    (cases,) = (
        mark for mark in test_what_changed_on_the_host_is_said.pytestmark if mark.name == "parametrize"
    )
    before = expectation().stood
    seen = set()
    for change, _ in cases.args[1]:
        now = fingerprint(WISH, replace(STANDS, **change))
        seen |= {item.name for item in fields(now) if getattr(now, item.name) != getattr(before, item.name)}
    assert seen == {item.name for item in fields(before)}


def test_what_changed_here_is_said():
    built = replace(WISH, release="d" * 64)
    assert expectation().differences(make_plan(built, STANDS), STANDS) == (
        "the runtime is now built as dddddddddddd, planned was bbbbbbbbbbbb",
    )
    edited = replace(WISH, unit_text=NEW + "# x\n")
    assert expectation().differences(make_plan(edited, STANDS), STANDS) == (
        "the inventory now gives another unit file than was planned",
    )


def test_the_targets_are_exactly_those_of_the_plan(saved):
    def target(host: str, service: str) -> Target:
        made = Service.model_validate(
            {"name": service, "unit": "s.service", "runtime": "r", "venv": "/v", "model": "/m"}
        )
        return Target(host=Host(name=host, services={service: made}), service=made, runtime=RuntimeSpec())

    found, expected = read_plan(saved).match([target("h", "other"), target("h", "s"), target("i", "s")])
    assert [item.service.name for item in found] == ["s"]
    assert list(expected) == ["h"]
    with pytest.raises(OpsError, match="has no h any more"):
        read_plan(saved).match([target("i", "s")])


@pytest.mark.parametrize(
    "setting",
    [
        "environment.HF_TOKEN=hf_secret1",
        "args.x=--api-key hf_secret1",
        "environment.A=hf_secret1secret1secret1",
    ],
)
def test_a_secret_of_the_command_line_is_not_kept(setting):
    with pytest.raises(UsageError) as caught:
        check_settings(["port=1", setting])
    assert "hf_secret1" not in caught.value.render()
    check_settings(["port=1", "environment.LAB_TOKENS=7"])
