"""Publishing releases: what travels, what is linked, what is repaired, what is left after a failure."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import DeadlineError, RemoteError, UnreachableError
from ddtree_ops.remote import PublishResult, Session, connect_local

FIRST, SECOND = "a" * 64, "b" * 64


def publish(session: Session, tree: Any, releases: Path, digest: str = FIRST, **more: Any) -> PublishResult:
    return session.publish(
        tree.root, tree.files, releases_dir=str(releases), digest=digest, manifest=tree.manifest, **more
    )


def is_whole(session: Session, tree: Any, releases: Path, digest: str = FIRST) -> bool:
    return session.begin_check(releases_dir=str(releases), digest=digest, manifest=tree.manifest)()


def content(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def expected(tree: Any) -> dict[str, bytes]:
    return {**content(tree.root), "manifest.json": tree.manifest}


@pytest.fixture
def releases(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "deploy/releases"
    for folder, _, _ in os.walk(tmp_path):
        Path(folder).chmod(0o755)


def test_fresh_then_no_change(local: Session, tree: Any, releases: Path) -> None:
    seen: list[tuple[int, int]] = []
    before = local.round_trips
    result = publish(local, tree, releases, progress=lambda done, total: seen.append((done, total)))
    assert local.round_trips == before + 2
    size = sum(entry.size for entry in tree.files)
    assert result == PublishResult(f"{releases}/{FIRST}", True, len(tree.files), len(tree.files), size, 0)
    assert content(releases / FIRST) == expected(tree)
    assert seen[-1] == (size, size) and seen == sorted(seen)

    inodes = {p: p.stat().st_ino for p in (releases / FIRST).rglob("*")}
    again = publish(local, tree, releases)
    assert local.round_trips == before + 3
    assert again == PublishResult(f"{releases}/{FIRST}", False, len(tree.files), 0, 0, 0)
    assert {p: p.stat().st_ino for p in (releases / FIRST).rglob("*")} == inodes
    assert [p.name for p in releases.iterdir()] == [FIRST]


def test_a_whole_release_is_known_in_one_round_trip(local: Session, tree: Any, releases: Path) -> None:
    assert not is_whole(local, tree, releases)
    publish(local, tree, releases)
    before = local.round_trips
    answer = local.begin_check(releases_dir=str(releases), digest=FIRST, manifest=tree.manifest)
    assert local.request("ping").values["time"] > 0
    assert answer() is True
    assert local.round_trips == before + 2
    (releases / SECOND).symlink_to(releases / FIRST)
    assert not is_whole(local, tree, releases, SECOND)
    with pytest.raises(RemoteError, match="is not a release name"):
        is_whole(local, tree, releases, "../x")


def test_another_manifest_is_not_the_release(local: Session, tree: Any, releases: Path) -> None:
    publish(local, tree, releases)
    tree.write("pkg/a.py", b"a = 2\n")
    assert not is_whole(local, tree.scan(), releases)
    asked = {"releases_dir": str(releases), "digest": FIRST, "manifest": "0" * 64}
    assert local.request("check_release", asked).values == {
        "whole": False,
        "problems": ["its manifest is missing, damaged, or another one"],
        "count": 1,
    }


def test_a_manifest_without_sizes_is_not_judged(local: Session, tree: Any, releases: Path) -> None:
    listed = [{"path": entry.path, "sha256": entry.sha256} for entry in tree.files]
    tree.manifest = json.dumps({"files": listed}).encode()
    publish(local, tree, releases)
    assert not is_whole(local, tree, releases)
    assert not publish(local, tree, releases).created


def test_release_is_read_only(local: Session, tree: Any, releases: Path) -> None:
    publish(local, tree, releases)
    modes = {
        p.relative_to(releases / FIRST).as_posix(): p.stat().st_mode & 0o7777
        for p in (releases / FIRST).rglob("*")
    }
    assert modes["bin/tool"] == 0o555
    assert modes["pkg/a.py"] == modes["manifest.json"] == 0o444
    assert modes["pkg"] == modes["pkg/sub"] == (releases / FIRST).stat().st_mode & 0o7777 == 0o555


def test_one_changed_file_travels_and_the_rest_is_linked(local: Session, tree: Any, releases: Path) -> None:
    publish(local, tree, releases)
    tree.write("pkg/a.py", b"a = 2\n")
    tree.write("moved/data.bin", (tree.root / "pkg/sub/data.bin").read_bytes())
    (tree.root / "pkg/sub/data.bin").unlink()
    tree.scan()
    result = publish(local, tree, releases, SECOND)
    assert (result.created, result.sent_files, result.sent_bytes) == (True, 1, 6)
    assert result.linked_files == len(tree.files) - 1
    assert content(releases / SECOND) == expected(tree)
    for old, new in (("bin/tool", "bin/tool"), ("pkg/sub/data.bin", "moved/data.bin")):
        assert (releases / FIRST / old).stat().st_ino == (releases / SECOND / new).stat().st_ino


def test_a_damaged_source_is_never_linked(local: Session, tree: Any, releases: Path) -> None:
    publish(local, tree, releases)
    damage(releases / FIRST / "pkg/a.py", b"A = 1\n" * 100)
    result = publish(local, tree, releases, SECOND)
    assert result.sent_files == 1
    assert content(releases / SECOND) == expected(tree)


def test_a_file_with_another_mode_is_copied_not_linked(local: Session, tree: Any, releases: Path) -> None:
    publish(local, tree, releases)
    (tree.root / "bin/tool").chmod(0o644)
    tree.scan()
    result = publish(local, tree, releases, SECOND)
    assert result.sent_files == 0
    assert (releases / FIRST / "bin/tool").stat().st_mode & 0o777 == 0o555
    assert (releases / SECOND / "bin/tool").stat().st_mode & 0o777 == 0o444


def damage(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(0o444)


@pytest.mark.parametrize("kind", ["changed", "short", "missing", "extra", "mode", "link", "manifest"])
def test_a_damaged_release_is_repaired(local: Session, tree: Any, releases: Path, kind: str) -> None:
    publish(local, tree, releases)
    release = releases / FIRST
    victim = release / "pkg/a.py"
    os.chmod(victim.parent, 0o755)  # noqa: PTH101
    release.chmod(0o755)
    if kind == "changed":
        damage(victim, b"x" * victim.stat().st_size)
    elif kind == "short":
        damage(victim, b"")
    elif kind == "missing":
        victim.unlink()
    elif kind == "extra":
        (release / "pkg/evil.py").write_text("import os\n")
    elif kind == "mode":
        victim.chmod(0o755)
    elif kind == "link":
        victim.unlink()
        victim.symlink_to(tree.root / "pkg/a.py")
    else:
        damage(release / "manifest.json", b"{}")
    assert not is_whole(local, tree, releases)
    before = local.round_trips
    result = publish(local, tree, releases)
    assert local.round_trips == before + 2
    assert result.created
    problem = {"extra": "not part of the release: pkg/evil.py", "manifest": "changed: manifest.json"}
    wanted = {"short": "changed", "mode": "wrong mode", "link": "not a plain file"}
    assert problem.get(kind, f"{wanted.get(kind, kind)}: pkg/a.py") in result.repaired
    assert result.sent_files == (1 if kind in ("changed", "short", "missing", "link") else 0)
    assert content(release) == expected(tree)
    assert [p.name for p in releases.iterdir()] == [FIRST]
    assert publish(local, tree, releases).created is False


def test_byte_code_does_not_damage_a_release(local: Session, tree: Any, releases: Path) -> None:
    publish(local, tree, releases)
    (releases / FIRST / "pkg").chmod(0o755)
    (releases / FIRST / "pkg/__pycache__").mkdir()
    (releases / FIRST / "pkg/__pycache__/a.pyc").write_bytes(b"x")
    assert publish(local, tree, releases).created is False


@pytest.fixture
def in_memory(tree: Any) -> Iterator[Path]:
    """A folder for many files, in memory where there is such a place; the tree moves there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        tree.root = Path(folder, "tree")
        yield Path(folder, "releases")
        for inner, _, _ in os.walk(folder):
            Path(inner).chmod(0o755)


@pytest.mark.parametrize("count", [3, 3000])
def test_round_trips_do_not_depend_on_the_number_of_files(
    local: Session, tree: Any, in_memory: Path, count: int
) -> None:
    releases = in_memory
    for number in range(count):
        tree.write(f"many/{number % 40}/{number}.py", b"n = %d\n" % number)
    tree.scan()
    before = local.round_trips
    fresh = publish(local, tree, releases)
    assert (fresh.created, local.round_trips - before) == (True, 2)
    publish(local, tree, releases)
    assert local.round_trips - before == 3
    linked = publish(local, tree, releases, SECOND)
    assert (linked.sent_files, local.round_trips - before) == (0, 5)
    local.hash_tree(str(releases / FIRST))
    assert local.round_trips - before == 6


def only_partials(releases: Path) -> bool:
    """Nothing that anybody could take for a release."""
    return all(path.name.startswith((".staging-", ".partial-")) for path in releases.iterdir())


def test_a_file_that_changes_under_way_leaves_no_release(local: Session, tree: Any, releases: Path) -> None:
    (tree.root / "pkg/a.py").write_bytes(b"longer than listed" * 1000)
    with pytest.raises(RemoteError, match="has changed since it was listed"):
        publish(local, tree, releases)
    assert only_partials(releases)
    (tree.root / "pkg/a.py").write_bytes(b"b = 2\n" * 100)
    with pytest.raises(RemoteError, match=r"pkg/a\.py: what arrived does not have the sha256"):
        publish(local, tree, releases)
    assert only_partials(releases)
    tree.scan()
    assert publish(local, tree, releases).created
    assert [p.name for p in releases.iterdir()] == [FIRST]
    assert content(releases / FIRST) == expected(tree)


def test_a_vanished_file_leaves_nothing(local: Session, tree: Any, releases: Path) -> None:
    (tree.root / "pkg/a.py").unlink()
    with pytest.raises(RemoteError, match=r"pkg/a\.py cannot be read here any more: No such file"):
        publish(local, tree, releases)
    assert only_partials(releases)
    assert local.request("ping").values


@pytest.fixture
def large(tree: Any) -> Any:
    """Thirty-two files of 256 KiB of which some have arrived when a push is cut."""
    for number in range(32):
        tree.write(f"large/{number:02}", os.urandom(256 << 10))
    return tree.scan()


def large_files(releases: Path) -> list[Path]:
    """Those of ``large`` that lie below releases in their full size."""
    return [path for path in releases.rglob("large/*") if path.stat().st_size == 256 << 10]


@pytest.fixture
def cut_after(releases: Path, wait_until: Any) -> Callable[..., Callable[[int, int], None]]:
    """``progress`` of a push that does something once, when as many files of ``large`` have arrived."""

    def begin(arrived: int, action: Callable[[], object]) -> Callable[[int, int], None]:
        done_once: list[int] = []

        def progress(done: int, total: int) -> None:
            if done >= (arrived + 4) * (256 << 10) and not done_once:
                done_once.append(done)
                wait_until(lambda: len(large_files(releases)) >= arrived)
                action()

        return progress

    return begin


@pytest.mark.parametrize("how", ["client goes", "agent is killed", "cancelled"])
def test_a_push_that_broke_off_goes_on_where_it_was(
    local: Session, large: Any, releases: Path, cut_after: Any, wait_until: Any, alive: Any, how: str
) -> None:
    session = connect_local()
    pid = session.facts["pid"]
    actions: dict[str, Callable[[], object]] = {
        "client goes": session.close,
        "agent is killed": lambda: os.kill(pid, signal.SIGKILL),
        "cancelled": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
    }
    with pytest.raises((UnreachableError, KeyboardInterrupt)):
        publish(session, large, releases, progress=cut_after(12, actions[how]))
    assert only_partials(releases)
    session.close()
    wait_until(lambda: not alive(pid))
    assert only_partials(releases)
    (left,) = releases.iterdir()
    arrived = [
        p for p in left.rglob("*") if p.is_file() and (p.stat().st_size == 256 << 10 or "large" not in str(p))
    ]
    assert arrived, "some files arrived before the cut"
    sums = {entry.sha256 for entry in large.files}
    whole = [p for p in arrived if hashlib.sha256(p.read_bytes()).hexdigest() in sums]
    before = local.round_trips
    result = publish(local, large, releases)
    assert local.round_trips == before + 2
    assert result.created and result.linked_files == 0
    assert result.resumed_files >= len(whole) >= 10
    assert result.sent_files == len(large.files) - result.resumed_files
    assert [p.name for p in releases.iterdir()] == [FIRST]
    assert content(releases / FIRST) == expected(large)


def test_what_arrived_is_hashed_before_it_is_used_and_serves_another_release_too(
    local: Session, large: Any, releases: Path, cut_after: Any
) -> None:
    session = connect_local()
    with pytest.raises(UnreachableError):
        publish(
            session,
            large,
            releases,
            progress=cut_after(12, lambda: os.kill(session.facts["pid"], signal.SIGKILL)),
        )
    session.close()
    (left,) = releases.iterdir()
    damaged = left / "large/03"
    damaged.chmod(0o644)
    damaged.write_bytes(bytes(256 << 10))
    (large.root / "large/04").rename(large.root / "large/moved")
    large.scan()
    result = publish(local, large, releases, SECOND)
    assert 8 <= result.resumed_files < len(large.files)
    assert content(releases / SECOND) == expected(large)
    assert [p.name for p in releases.iterdir()] == [SECOND]
    assert (releases / SECOND / "large/03").stat().st_mode & 0o777 == 0o444


def test_a_killed_client_leaves_what_arrived(tree: Any, releases: Path, wait_until: Any, alive: Any) -> None:
    tree.write("large", os.urandom(6 << 20))
    tree.scan()
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom ddtree_ops.remote import connect_local, scan_tree\n"
        "session = connect_local()\n"
        "def hold(done, total):\n    print(session.facts['pid'], flush=True); time.sleep(60)\n"
        "root = Path(sys.argv[1])\n"
        "session.publish(root, scan_tree(root), releases_dir=sys.argv[2], digest='x', manifest=b'{}', progress=hold)"
    )
    argv = [sys.executable, "-c", script, str(tree.root), str(releases)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        assert len(list(releases.iterdir())) == 1
        client.kill()
    wait_until(lambda: not alive(pid))
    assert only_partials(releases)
    with connect_local() as session:
        assert publish(session, tree, releases).created
    assert [p.name for p in releases.iterdir()] == [FIRST]


def test_leftovers_that_are_not_ours_stay(local: Session, tree: Any, releases: Path) -> None:
    (releases / ".staging-of-mine").mkdir(parents=True)
    own = f"{os.getpid()}-{Path('/proc/self/stat').read_bytes().rpartition(b')')[2].split()[19].decode()}"
    (releases / f".staging-x.1-{own}").mkdir()
    assert publish(local, tree, releases).created
    assert sorted(p.name for p in releases.iterdir()) == sorted(
        [".staging-of-mine", f".staging-x.1-{own}", FIRST]
    )


def test_two_pushes_of_the_same_release(tree: Any, releases: Path) -> None:
    with connect_local("one") as one, connect_local("two") as two:
        nested: list[PublishResult] = []

        def other(done: int, total: int) -> None:
            if not nested:
                nested.append(publish(two, tree, releases))

        assert publish(one, tree, releases, progress=other).created is False
        assert nested[0].created is True
    assert [p.name for p in releases.iterdir()] == [FIRST]
    assert content(releases / FIRST) == expected(tree)


@pytest.mark.parametrize("digest", ["../x", ".hidden", "", "a/b"])
def test_release_names_stay_inside(local: Session, tree: Any, releases: Path, digest: str) -> None:
    with pytest.raises(RemoteError, match="is not a release name"):
        publish(local, tree, releases, digest)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a//b", "a/./b", "manifest.json", "", "a\0b"])
def test_paths_stay_inside(local: Session, tree: Any, releases: Path, path: str) -> None:
    entry = tree.files[0]
    tree.files = (type(entry)(path, entry.mode, entry.size, entry.sha256),)
    with pytest.raises(RemoteError, match="is not a path inside a release"):
        publish(local, tree, releases)
    assert not (releases / FIRST).exists()


def test_a_hostile_manifest_of_another_release_is_harmless(local: Session, tree: Any, releases: Path) -> None:
    entry = tree.files[-1]
    for name, text in {
        "c": json.dumps(
            {"files": [{"path": f"../../../../{tree.root}/{entry.path}", "sha256": entry.sha256}]}
        ),
        "d": "not json",
        "e": json.dumps({"files": 3}),
        "f": json.dumps([1]),
    }.items():
        (releases / name).mkdir(parents=True)
        (releases / name / "manifest.json").write_text(text)
    assert publish(local, tree, releases).linked_files == 0


def test_deadline_of_a_push(local: Session, tree: Any, releases: Path) -> None:
    tree.write("large", os.urandom(2 << 20))
    tree.scan()
    import time

    with pytest.raises(DeadlineError):
        publish(local, tree, releases, deadline=1.0, progress=lambda done, total: time.sleep(0.6))
    assert only_partials(releases)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=60", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_no_space_is_told_before_anything_is_sent(local: Session, tree: Any, small_disk: Path) -> None:
    tree.write("large", bytes(5 << 20))
    tree.scan()
    before = local.round_trips
    with pytest.raises(
        RemoteError, match=r"not enough space .*: \d+ bytes are needed, \d+ are free"
    ) as caught:
        publish(local, tree, small_disk / "releases")
    assert local.round_trips == before + 1
    assert caught.value.hint.startswith(f"ddtree-ops prune {local.host} ")
    assert "no half release" in caught.value.state
    assert list((small_disk / "releases").iterdir()) == []


def test_no_inodes_is_told_before_anything_is_sent(local: Session, tree: Any, small_disk: Path) -> None:
    for number in range(80):
        tree.write(f"many/{number}", b"%d" % number)
    tree.scan()
    with pytest.raises(RemoteError, match=r"not enough inodes .*: \d+ are needed, \d+ are free"):
        publish(local, tree, small_disk / "releases")
    assert list((small_disk / "releases").iterdir()) == []


def test_a_disk_that_fills_up_under_way(local: Session, tree: Any, small_disk: Path) -> None:
    for number in range(3):
        tree.write(f"large{number}", os.urandom(700 << 10))
    tree.scan()

    def fill(done: int, total: int) -> None:
        try:
            with (small_disk / "fill").open("ab", buffering=0) as target:
                while target.write(bytes(65536)):
                    continue
        except OSError as error:
            assert error.errno == errno.ENOSPC

    with pytest.raises(RemoteError, match="No space left on device while receiving") as caught:
        publish(local, tree, small_disk / "releases", progress=fill)
    assert caught.value.hint.startswith(f"ddtree-ops prune {local.host} ")
    assert list((small_disk / "releases").iterdir()) == []
