"""What lies below a deploy root, and removing parts of it: what is in use stays, nobody sees half of a release."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import RemoteError
from ddtree_ops.remote import Session

FIRST, SECOND = "a" * 64, "b" * 64


def prune(session: Session, root: Path, *releases: str, **more: Any) -> dict[str, Any]:
    arguments = {
        "root": str(root),
        "releases": list(releases),
        "unit_files": [],
        "leftovers": False,
        "byte_code": False,
    }
    return dict(session.request("prune", arguments | more).values)


@pytest.fixture
def root(local: Session, tree: Any, tmp_path: Path) -> Any:
    """A deploy root with two releases that share all files but one."""
    made = tmp_path / "deploy"
    for digest in (FIRST, SECOND):
        local.publish(
            tree.root, tree.files, releases_dir=str(made / "releases"), digest=digest, manifest=tree.manifest
        )
        tree.write("pkg/a.py", b"b = 1\n" * 1000)
        tree.scan()
    yield made
    for folder, _, _ in os.walk(tmp_path):
        Path(folder).chmod(0o755)


def link(root: Path, unit: str, digest: str) -> Path:
    folder = root / "services" / unit
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "current").symlink_to(f"../../releases/{digest}")
    return folder


def test_survey(local: Session, root: Path) -> None:
    folder = link(root, "x.service", FIRST)
    (folder / "rollback.json").write_text("{}")
    (folder / "units").mkdir()
    (folder / "units/1.service").write_text("")
    (root / "releases/.partial-z.1-1-1").mkdir()
    (root / "releases/.partial-z.1-1-1/part").write_bytes(b"12345")
    (root / "releases/notes").write_text("")
    before = local.round_trips
    found = local.request("survey", {"root": str(root)}).values
    assert local.round_trips == before + 1
    one, two = found["releases"]
    assert (one["name"], two["name"]) == (FIRST, SECOND)
    assert one["manifest"] and one["files"] == 6
    own = (root / f"releases/{FIRST}/pkg/a.py").stat().st_size + (
        root / f"releases/{FIRST}/manifest.json"
    ).stat().st_size
    assert one["own_bytes"] == own < one["bytes"]
    assert found["leftovers"] == [
        {"name": ".partial-z.1-1-1", "live": False, "files": 1, "bytes": 5, "own_bytes": 5}
    ]
    assert found["services"] == [
        {"unit": "x.service", "current": FIRST, "armed": "{}", "units": ["1.service"]}
    ]


def test_guard_programs_that_nothing_armed_runs_and_old_journals_go(local: Session, root: Path) -> None:
    folder = link(root, "x.service", FIRST)
    (folder / "rollback.json").write_text('{"program": "/deploy/guard/0123456789ab.py"}')
    (root / "guard").mkdir()
    for name in ("0123456789ab.py", "ba9876543210.py", "aaaaaaaaaaaa.py", "notes.py"):
        (root / "guard" / name).write_text("")
    for name in ("old", "new"):
        (folder / "evidence" / name).mkdir(parents=True)
        (folder / "evidence" / name / "journal.txt").write_text(name)
    os.utime(folder / "evidence/old", (1000, 1000))
    assert prune(local, root)["programs"] == prune(local, root)["evidence"] == 0
    found = prune(local, root, program="aaaaaaaaaaaa.py", evidence_before=2000.0)
    assert (found["programs"], found["evidence"]) == (1, 1)
    left = ["0123456789ab.py", "aaaaaaaaaaaa.py", "notes.py"]
    assert sorted(path.name for path in (root / "guard").iterdir()) == left
    assert [path.name for path in (folder / "evidence").iterdir()] == ["new"]


def test_an_empty_host_is_surveyed_and_pruned(local: Session, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    found = local.request("survey", {"root": str(nowhere)}).values
    assert (found["releases"], found["leftovers"], found["services"]) == ([], [], [])
    assert prune(local, nowhere, FIRST, leftovers=True, byte_code=True)["removed"] == []
    assert not nowhere.exists()


def test_a_release_goes_and_says_how_much_was_freed(local: Session, root: Path) -> None:
    before = local.request("survey", {"root": str(root)}).values["releases"][0]
    found = prune(local, root, FIRST, "c" * 64)
    assert (found["removed"], found["refused"], found["freed_bytes"]) == ([FIRST], [], before["own_bytes"])
    assert [path.name for path in (root / "releases").iterdir()] == [SECOND]
    left = local.request("survey", {"root": str(root)}).values["releases"][0]
    assert left["own_bytes"] == left["bytes"], "nothing is shared any more"


def test_what_came_into_use_meanwhile_stays(local: Session, root: Path) -> None:
    link(root, "x.service", FIRST)
    (link(root, "y.service", "c" * 64) / "rollback.json").write_text(
        f'{{"target": {{"release": "{SECOND}"}}}}'
    )
    found = prune(local, root, FIRST, SECOND)
    assert found["refused"] == [[FIRST, "x.service"], [SECOND, "y.service"]]
    assert sorted(path.name for path in (root / "releases").iterdir()) == [FIRST, SECOND]


def test_leftovers_go_but_not_those_of_the_living(local: Session, root: Path) -> None:
    own = f"{os.getpid()}-{Path('/proc/self/stat').read_bytes().rpartition(b')')[2].split()[19].decode()}"
    names = {
        ".staging-a.1-1-1": True,
        ".partial-a.1-1-1": True,
        ".old-a.1-1-1": True,
        f".staging-a.1-{own}": False,
        ".mine": False,
    }
    for name in names:
        (root / "releases" / name / "sub").mkdir(parents=True)
        (root / "releases" / name / "sub/file").write_bytes(b"x")
        (root / "releases" / name / "sub").chmod(0o555)
    assert prune(local, root, leftovers=True)["leftovers"] == 3
    left = {path.name for path in (root / "releases").iterdir()} - {FIRST, SECOND}
    assert left == {name for name, goes in names.items() if not goes}


def test_byte_code_of_sources_that_are_gone(local: Session, root: Path) -> None:
    link(root, "x.service", FIRST)
    cache = root / "pycache" / str(root)[1:]
    live = cache / "services/x.service/current/pkg"
    gone = cache / "services/x.service/current/old"
    other = cache / "releases" / ("c" * 64) / "pkg"
    venv = root / "pycache/opt/venv/torch"
    for folder in (live, gone, other, venv):
        folder.mkdir(parents=True)
    for path in (
        live / "a.cpython-312.pyc",
        live / "removed.cpython-312.opt-1.pyc",
        gone / "b.cpython-312.pyc",
        other / "a.cpython-312.pyc",
        venv / "x.cpython-312.pyc",
    ):
        path.write_bytes(b"x")
    assert prune(local, root, byte_code=True)["byte_code"] == 3
    left = sorted(path.name for path in (root / "pycache").rglob("*.pyc"))
    assert left == ["a.cpython-312.pyc", "x.cpython-312.pyc"]
    assert not gone.exists() and not other.exists()


@pytest.mark.parametrize("name", ["../x", "", ".staging-a.1-1-1", "a/b"])
def test_only_releases_are_removed(local: Session, root: Path, name: str) -> None:
    with pytest.raises(RemoteError, match="is not a release"):
        prune(local, root, name)


@pytest.mark.parametrize("pair", [["..", "x"], ["x.service", "../../current"], ["x.service", ""]])
def test_only_unit_files_are_removed(local: Session, root: Path, pair: list[str]) -> None:
    folder = link(root, "x.service", FIRST)
    with pytest.raises(RemoteError, match="is not a kept unit file"):
        prune(local, root, unit_files=[pair])
    assert (folder / "current").is_symlink()


def test_a_release_that_is_a_link_is_left_alone(local: Session, root: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (root / "releases" / ("d" * 64)).symlink_to(tmp_path / "precious")
    with pytest.raises(RemoteError, match="is not a release"):
        prune(local, root, "d" * 64)
    assert (tmp_path / "precious").is_dir()
