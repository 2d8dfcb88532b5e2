from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from ddtree_ops import lab as lab_hosts
from ddtree_ops.errors import LabError, UsageError
from ddtree_ops.lab import container, furnish, hosts, image

ROOT = Path(__file__).resolve().parents[2]


def ssh(name: str, *command: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
    argv = lab_hosts.ssh_argv(name)
    argv[1:1] = ["-o", "BatchMode=yes", *(["-l", user] if user else [])]
    return subprocess.run(
        [*argv, "--", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="latin-1",
        timeout=300,
    )


def last(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


# --- hosts that are up -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(lab):
    """Clean hosts, whatever the tests before left on them."""
    for name in list(lab.hosts):
        lab.reset(name)
    return lab


@pytest.mark.lab
def test_both_hosts_run_systemd_and_answer_strict_ssh(lab) -> None:
    assert list(lab.hosts) == ["ct200", "b300"]
    for name, host in lab.hosts.items():
        assert last(ssh(name, "systemctl", "is-system-running")) == "running"
        assert last(ssh(name, "cat", "/proc/1/comm")) == "systemd"
        assert last(ssh(name, "hostname")) == name
        assert host.address in (lab.directory / "known_hosts").read_text()
    assert [status.state for status in lab_hosts.status()] == ["running", "running"]


@pytest.mark.lab
def test_login_users_are_the_inventorys(lab) -> None:
    assert last(ssh("ct200", "id", "-un")) == "root" == lab.hosts["ct200"].user
    assert last(ssh("b300", "id", "-un")) == "ops" == lab.hosts["b300"].user


@pytest.mark.lab
def test_a_changed_host_key_is_refused(lab, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    text = (lab.directory / "known_hosts").read_text()
    ct200, b300 = (lab.hosts[name].address for name in ("ct200", "b300"))
    known.write_text(text.replace(ct200, "<ct200>").replace(b300, ct200).replace("<ct200>", b300))
    argv = lab_hosts.ssh_argv("ct200")
    argv[1:1] = ["-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={known}"]
    done = subprocess.run(
        [*argv, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr


@pytest.mark.lab
def test_hosts_have_identities_of_their_own(lab) -> None:
    ids = {name: last(ssh(name, "cat", "/etc/machine-id")) for name in lab.hosts}
    assert all(re.fullmatch("[0-9a-f]{32}", value) for value in ids.values())
    assert (
        len(
            {
                *ids.values(),
                Path("/etc/machine-id").read_text().strip() if Path("/etc/machine-id").exists() else "",
            }
        )
        == 3
    )
    keys = [line.split()[1:] for line in (lab.directory / "known_hosts").read_text().splitlines()]
    assert sorted(kind for kind, _ in keys) == 2 * ["ecdsa-sha2-nistp256"] + 2 * ["ssh-ed25519"]
    assert len({key for _, key in keys}) == 4


@pytest.mark.lab
def test_passwords_are_not_accepted(lab) -> None:
    done = subprocess.run(
        [
            *lab_hosts.ssh_argv("ct200")[:3],
            "-o",
            "BatchMode=yes",
            "-o",
            "PubkeyAuthentication=no",
            "ct200",
            "true",
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


@pytest.mark.lab
def test_journal_is_persistent_and_of_the_host(lab) -> None:
    for name in lab.hosts:
        machine = last(ssh(name, "cat", "/etc/machine-id", user="root"))
        header = ssh(name, "journalctl", "--header", user="root").stdout
        assert f"/var/log/journal/{machine}/system.journal" in header
        entry = json.loads(
            last(ssh(name, "journalctl", "-o", "json", "-n", "1", "-u", "ssh.service", user="root"))
        )
        assert entry["_MACHINE_ID"] == machine
        assert entry["_HOSTNAME"] == name


@pytest.mark.lab
def test_b300_speaks_french_in_latin_9(lab) -> None:
    done = ssh("b300", "df", "/")
    assert last(ssh("b300", "printenv", "LANG")) == "fr_FR.ISO-8859-15"
    assert done.stdout.startswith("Sys. de fichiers")
    assert "Utilis\xe9" in done.stdout
    manager = ssh("b300", "systemctl", "show-environment", user="root").stdout
    assert "LANG=fr_FR.ISO-8859-15" in manager.splitlines()
    assert ssh("ct200", "printenv", "LANG").returncode == 1


@pytest.mark.lab
def test_ct200_has_shell_noise(lab) -> None:
    assert "stand-in" in ssh("ct200", "true").stdout
    assert ssh("b300", "true").stdout == ""


@pytest.mark.lab
def test_sudo_without_a_password_for_ops_only(lab) -> None:
    for name in lab.hosts:
        assert last(ssh(name, "sudo", "-n", "id", "-u", user="ops")) == "0"
        refused = ssh(name, "sudo", "-n", "id", "-u", user="nosudo")
        assert refused.returncode == 1
        assert refused.stdout == "" or "stand-in" in refused.stdout


@pytest.mark.lab
def test_hosts_do_not_share_units(lab) -> None:
    unit = "ddtree-test-nap.service"
    for name in lab.hosts:
        last_line = ssh(name, "systemd-run", "--quiet", f"--unit={unit}", "sleep", "60", user="root")
        assert last_line.returncode == 0, last_line.stderr
    assert ssh("ct200", "systemctl", "stop", unit, user="root").returncode == 0
    assert last(ssh("b300", "systemctl", "is-active", unit, user="root")) == "active"
    assert ssh("b300", "systemctl", "stop", unit, user="root").returncode == 0


@pytest.mark.lab
def test_the_venv_stand_in_runs_the_engine_or_python(lab) -> None:
    python = "/root/venv_sglang211/bin/python"
    command = "import importlib.metadata as m, sys; print(m.version('sglang'), sys.prefix)"
    done = ssh("ct200", python, "-c", f'"{command}"')
    assert last(done) == "0.5.11 /root/venv_sglang211"
    engine = ssh("ct200", python, "-m", "sglang.launch_server", "--lab-version")
    assert engine.returncode == 0, engine.stderr
    assert "stand-in" in engine.stdout.splitlines()[-1].lower()


@pytest.mark.lab
def test_up_again_changes_nothing_and_refreshes_the_stand_ins(lab) -> None:
    before = {name: host.pid for name, host in lab.hosts.items()}
    engine = lab.hosts["ct200"].root / "opt/ddtree-lab/lab_engine.py"
    engine.write_text("stale")
    assert {host.name: host.pid for host in lab_hosts.up()} == before
    assert engine.read_bytes() == (ROOT / "ddtree_ops/lab/engine/lab_engine.py").read_bytes()


@pytest.mark.lab
def test_lab_files_are_private(lab) -> None:
    assert lab.directory.stat().st_mode & 0o777 == 0o700
    for name in ("id_ed25519", "known_hosts", "ssh_config"):
        assert (lab.directory / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.lab
def test_another_lab_on_the_same_addresses_is_refused(
    lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDTREE_OPS_LAB_DIR", str(tmp_path / "other"))
    with pytest.raises(LabError, match="port 22022 is taken") as caught:
        lab_hosts.up(["ct200"])
    assert "DDTREE_OPS_LAB_NET" in caught.value.hint
    assert mounts_below(tmp_path) == []


# --- starting and stopping ---------------------------------------------------------------------------------------


def mounts_below(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line]


def processes_of(name: str) -> list[int]:
    """Live processes in the host's cgroup or with its label on the command line."""
    label = hosts._container(name).label
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cgroup").read_text() + (folder / "cmdline").read_text()
            alive = container.start_ticks(int(folder.name)) is not None
        except OSError:
            continue
        if label in text and alive:
            found.append(int(folder.name))
    return found


@pytest.mark.lab
def test_down_leaves_nothing_and_up_brings_clean_hosts_with_the_same_keys(spare_lab: Path) -> None:
    (host,) = lab_hosts.up(["ct200"])
    keys = (spare_lab / "known_hosts").read_text()
    assert processes_of("ct200")
    assert ssh("ct200", "touch", "/root/trace").returncode == 0

    lab_hosts.down()
    assert processes_of("ct200") == []
    assert mounts_below(spare_lab) == []
    assert list((spare_lab / "hosts").iterdir()) == []
    assert not any(group.exists() for group in hosts._container("ct200").cgroups)
    assert [status.state for status in lab_hosts.status()] == ["down", "down"]
    assert ssh("ct200", "true").returncode == 255

    (again,) = lab_hosts.up(["ct200"])
    assert again.pid != host.pid
    assert (spare_lab / "known_hosts").read_text() == keys
    assert ssh("ct200", "test", "-e", "/root/trace").returncode == 1


@pytest.mark.lab
def test_kept_files_are_there_again_and_reset_removes_them(spare_lab: Path) -> None:
    lab_hosts.up(["b300"])
    identity = last(ssh("b300", "cat", "/etc/machine-id"))
    assert ssh("b300", "sudo", "touch", "/root/trace").returncode == 0
    lab_hosts.down(keep=True)
    assert mounts_below(spare_lab) == []
    lab_hosts.up(["b300"])
    assert ssh("b300", "sudo", "test", "-e", "/root/trace").returncode == 0
    assert last(ssh("b300", "cat", "/etc/machine-id")) == identity

    lab_hosts.reset("b300")
    assert ssh("b300", "sudo", "test", "-e", "/root/trace").returncode == 1
    assert last(ssh("b300", "cat", "/etc/machine-id")) != identity
    assert last(ssh("b300", "systemctl", "is-system-running")) == "running"


@pytest.mark.lab
def test_a_killed_host_is_seen_and_started_again(spare_lab: Path) -> None:
    (host,) = lab_hosts.up(["ct200"])
    os.kill(host.pid, signal.SIGKILL)
    wait_until(lambda: lab_hosts.status()[0].state == "down")
    (again,) = lab_hosts.up(["ct200"])
    assert again.pid != host.pid
    assert last(ssh("ct200", "systemctl", "is-system-running")) == "running"


@pytest.mark.lab
def test_a_host_outlives_the_process_and_the_process_group_that_started_it(spare_lab: Path) -> None:
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from ddtree_ops import lab; lab.up(['ct200']); print('up', flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )
    with starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "up\n"
        os.killpg(starter.pid, signal.SIGINT)
        assert starter.wait(300) != 0
    assert lab_hosts.status()[0].state == "running"


@pytest.mark.lab
def test_a_recycled_pid_is_never_ended(spare_lab: Path) -> None:
    (host,) = lab_hosts.up(["ct200"])
    with subprocess.Popen(["sleep", "60"]) as bystander:
        try:
            state = spare_lab / "hosts/ct200/state.json"
            state.write_text(json.dumps({**json.loads(state.read_text()), "pid": bystander.pid}))
            assert lab_hosts.status()[0].state == "down"
            lab_hosts.down()
            assert bystander.poll() is None
        finally:
            bystander.kill()
    assert container.start_ticks(host.pid) is None
    assert mounts_below(spare_lab) == []


@pytest.mark.lab
def test_without_overlays_the_image_is_copied(spare_lab: Path, tmp_path: Path) -> None:
    """The lab's own folder on an overlay, as in a container: the kernel refuses that as an upper layer."""
    ram = tmp_path / "ram"
    for folder in (ram, spare_lab):
        folder.mkdir()
    with ExitStack() as mounts:

        def mount(kind: str, options: str, target: Path) -> None:
            subprocess.run(["mount", "-t", kind, "-o", options, "test", str(target)], check=True)
            mounts.callback(subprocess.run, ["umount", str(target)], check=True)

        mount("tmpfs", "size=1g", ram)
        for part in ("lower", "upper", "work"):
            (ram / part).mkdir()
        mount("overlay", f"lowerdir={ram}/lower,upperdir={ram}/upper,workdir={ram}/work", spare_lab)
        mounts.callback(lab_hosts.down)
        (host,) = lab_hosts.up(["ct200"])
        assert host.storage == "copy"
        assert last(ssh("ct200", "systemctl", "is-system-running")) == "running"
        lab_hosts.down()
        assert list((spare_lab / "hosts").iterdir()) == []


@pytest.mark.lab
def test_a_host_that_does_not_boot_is_explained_by_its_console(
    spare_lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def furnish_without_init(root: Path) -> None:
        (root / "sbin/init").unlink()
        shutil.rmtree(root / "usr/lib/systemd")

    monkeypatch.setattr(hosts, "furnish", furnish_without_init)
    with pytest.raises(LabError, match="ct200: lab: ") as caught:
        lab_hosts.up(["ct200"])
    assert caught.value.details
    assert mounts_below(spare_lab) == []
    assert processes_of("ct200") == []


@pytest.mark.lab
def test_a_running_host_is_not_moved_to_another_address(
    spare_lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host,) = lab_hosts.up(["ct200"])
    monkeypatch.setenv("DDTREE_OPS_LAB_NET", "127.1.1")
    with pytest.raises(LabError, match=re.escape(host.address)):
        lab_hosts.up(["ct200"])


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- without hosts -----------------------------------------------------------------------------------------------


def test_missing_names_root() -> None:
    code = (
        f"import os, sys; sys.path[:0] = {sys.path!r}\n"
        "from ddtree_ops import lab\n"
        "import json\n"
        "if os.geteuid() == 0: os.setresuid(65534, 65534, 65534)\n"
        "print(json.dumps(lab.missing()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=300)
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout)
    assert [line for line in problems if line.startswith("root: ") and "sudo" in line]


def test_missing_names_every_program_and_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_PATH", str(tmp_path))
    (tmp_path / "ssh").write_text("")
    (tmp_path / "ssh").chmod(0o755)
    problems = lab_hosts.missing()
    assert "mmdebstrap: apt-get install -y mmdebstrap" in problems
    assert "systemd-nspawn: apt-get install -y systemd-container" in problems
    assert not any(line.startswith("ssh: ") for line in problems)
    with pytest.raises(LabError) as caught:
        lab_hosts.up()
    assert caught.value.details == tuple(problems)
    assert (
        caught.value.hint == "apt-get install -y mmdebstrap systemd-container openssh-client util-linux mount"
    )


@pytest.mark.parametrize("net", ["192.0.2", "127.0", "127.0.256", "127.0.0.1", "127.0.1\n"])
def test_addresses_outside_loopback_are_refused(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_OPS_LAB_NET", net)
    with pytest.raises(LabError, match="DDTREE_OPS_LAB_NET"):
        lab_hosts.environment()


def test_environment_names_the_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_OPS_LAB_NET", "127.9.9")
    monkeypatch.setenv("DDTREE_OPS_LAB_DIR", str(tmp_path))
    assert lab_hosts.environment() == {"DDTREE_OPS_LAB_DIR": str(tmp_path), "DDTREE_OPS_LAB_NET": "127.9.9"}


def test_unknown_hosts_and_a_lab_that_never_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_OPS_LAB_DIR", str(tmp_path))
    with pytest.raises(UsageError, match="'ct300'"):
        lab_hosts.up(["ct300"])
    with pytest.raises(LabError) as caught:
        lab_hosts.ssh_argv("ct200")
    assert caught.value.hint == "ddtree-ops lab up"


def test_sources_are_the_distributions_own() -> None:
    targets = (
        "Packages|http://mirror/debian|bookworm|main|$(SIGNED_BY)|Debian\n"
        "Translations|http://mirror/debian|bookworm|main|$(SIGNED_BY)|Debian\n"
        "Packages|http://mirror/debian|bookworm-updates|main|/k.gpg|Debian\n"
        "Packages|http://mirror/debian|bookworm-updates|main|/k.gpg|Debian\n"
        "Packages|http://mirror/debian|bookworm|contrib|/k.gpg|Debian\n"
        "Packages|http://mirror/debian|trixie|main|/k.gpg|Debian\n"
        "Packages|http://fresh/debian|bookworm|main|$(SIGNED_BY)|$(ORIGIN)\n"
        "Packages|http://vendor/apt|bookworm|main|/v.gpg|Vendor\n"
    )
    assert image.sources(targets, origin="Debian", codename="bookworm", keyring="/d.gpg") == [
        "deb [signed-by=/d.gpg] http://mirror/debian bookworm main",
        "deb [signed-by=/k.gpg] http://mirror/debian bookworm-updates main",
        "deb [signed-by=/d.gpg] http://fresh/debian bookworm main",
    ]
    assert image.sources(targets, origin="Ubuntu", codename="noble") == []


def test_model_files_are_whole_and_valid() -> None:
    files = furnish.model_files()
    index = json.loads(files["model.safetensors.index.json"])
    shards = set(index["weight_map"].values())
    assert len(shards) == 64
    assert shards <= files.keys()
    for name, shard in index["weight_map"].items():
        (length,) = struct.unpack_from("<Q", files[shard])
        header = json.loads(files[shard][8 : 8 + length])
        begin, end = header[name]["data_offsets"]
        assert furnish.whole_size(files[shard]) == 8 + length + end - begin
    sizes = [furnish.whole_size(files[shard]) - len(files[shard]) for shard in shards]
    assert sum(sizes) == index["metadata"]["total_size"] == 590_000_000_000
    assert json.loads(files["config.json"])["text_config"]["vocab_size"] == 163840


def test_write_stays_inside_and_changes_only_what_differs(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    root.mkdir()
    (root / "way-out").symlink_to(outside)
    assert furnish.write(root, "a/b", b"1", 0o600)
    assert not furnish.write(root, "a/b", b"1", 0o600)
    assert furnish.write(root, "a/b", b"2", 0o640)
    assert (root / "a/b").stat().st_mode & 0o777 == 0o640
    assert furnish.write(root, "a/b", b"2", 0o640, length=1 << 40)
    assert not furnish.write(root, "a/b", b"2", 0o640, length=1 << 40)
    assert ((root / "a/b").stat().st_size, (root / "a/b").stat().st_blocks * 512 < 1 << 16) == (1 << 40, True)
    with pytest.raises(LabError, match="leads out"):
        furnish.write(root, "way-out/c", b"")
    assert list(outside.iterdir()) == []


def test_an_image_has_the_digest_of_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_system", lambda: ("debian", "bookworm"))
    first = image.image_path()
    assert image.image_path() == first
    monkeypatch.setattr(image, "PACKAGES", (*image.PACKAGES, "less"))
    assert image.image_path() != first


@pytest.fixture
def fake_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Everything of an image's build but mmdebstrap, for which a shell script stands."""
    fake = tmp_path / "bin/unshare"
    fake.parent.mkdir()
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DDTREE_OPS_LAB_IMAGES", str(tmp_path / "images"))
    monkeypatch.setattr(image, "_system", lambda: ("debian", "bookworm"))
    targets = "Packages|http://m|bookworm|main||Debian\n"
    monkeypatch.setattr(image, "_capture", lambda argv: targets if "apt-get" in argv else "")

    def script(text: str) -> None:
        fake.write_text(f"#!/bin/sh\n{text}\n")
        fake.chmod(0o755)

    return script


def test_a_failed_build_leaves_no_image(fake_build: Callable[[str], None]) -> None:
    fake_build('echo "E: no route to http://me:secret@mirror/debian"; exit 7')
    with pytest.raises(LabError, match="exit status 7") as caught:
        image.ensure_image()
    assert caught.value.details == ("E: no route to http://mirror/debian",)
    assert not image.image_path().exists()


def test_two_builders_build_once_and_clear_what_an_interrupted_one_left(
    fake_build: Callable[[str], None], tmp_path: Path
) -> None:
    fake_build(
        f'echo build >>{tmp_path}/builds; sleep 0.2; for word; do folder=$last; last=$word; done; mkdir "$folder"'
    )
    stale = tmp_path / "images/building-image-0"
    stale.mkdir(parents=True)
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: image.ensure_image(said.append), range(2)))
    assert paths == 2 * [image.image_path()]
    assert (tmp_path / "builds").read_text() == "build\n"
    assert not stale.exists()
    assert [line for line in said if "another process" in line]
    assert (paths[0] / "etc/machine-id").read_bytes() == b""
    assert (paths[0] / "etc/sudoers.d/ops").stat().st_mode & 0o777 == 0o440


def test_a_mounted_tree_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree/mnt").mkdir(parents=True)
    monkeypatch.setattr(image, "_mount_points", lambda: ["/", str(tmp_path / "tree/mnt")])
    with pytest.raises(LabError, match="mounted") as caught:
        image.remove_tree(tmp_path / "tree")
    assert caught.value.hint == f"umount {tmp_path}/tree/mnt"
    assert (tmp_path / "tree/mnt").is_dir()


def test_the_port_probe_sees_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setattr(hosts, "SSH_PORT", listener.getsockname()[1])
        monkeypatch.setattr(hosts, "_address", lambda name: "127.0.0.1")
        with pytest.raises(LabError, match="is taken"):
            hosts._refuse_taken_address("ct200")
