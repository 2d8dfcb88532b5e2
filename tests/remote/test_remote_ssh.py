"""Connections to a real sshd: host keys, authentication, jump hosts, what happens when things go away."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import AuthError, ConfigError, HostKeyError, RemoteError, UnreachableError
from ddtree_ops.remote import ConnectSpec, connect
from ddtree_ops.remote import ssh as ssh_module
from ddtree_ops.remote.ssh import expand_includes, remote_command


def works(spec: ConnectSpec) -> bool:
    with connect(spec) as session:
        return session.run(["echo", "$HOME 'x'"]).text == "$HOME 'x'\n"


def other_key(sshd: Any, kind: str = "ed25519") -> str:
    path = sshd.folder / f"other_{kind}"
    if not path.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(path)], check=True)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


# ---------------------------------------------------------------------------------------------- host keys


def test_known_key(sshd: Any) -> None:
    with connect(sshd.spec()) as session:
        assert session.host == "box"
        assert session.facts["user"] == "root"
        assert session.run(["cat"], input=bytes(range(256)) * 5000).stdout == bytes(range(256)) * 5000


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_the_recorded_kind_of_key_is_asked_for(sshd: Any, kind: str) -> None:
    assert works(sshd.spec(known_hosts=sshd.known_hosts(sshd.line(kind))))


def test_rsa_key_is_asked_for(start_sshd: Any) -> None:
    sshd = start_sshd(keys=("ed25519", "rsa"))
    assert works(sshd.spec(known_hosts=sshd.known_hosts(sshd.line("rsa"))))


def test_hashed_name(sshd: Any) -> None:
    salt = os.urandom(20)
    name = f"[{sshd.address}]:{sshd.port}"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    hashed = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
    text = f"# comment\n\n{hashed} {sshd.line('ed25519').split(' ', 1)[1]}"
    assert works(sshd.spec(known_hosts=sshd.known_hosts(text)))


def test_name_without_port(sshd: Any) -> None:
    text = f"elsewhere,{sshd.address} {sshd.line('ed25519').split(' ', 1)[1]}"
    assert works(sshd.spec(known_hosts=sshd.known_hosts(text)))


def test_unknown_key(sshd: Any) -> None:
    path = sshd.known_hosts(f"other.example {other_key(sshd)}\n")
    before = Path(path).read_text()
    with pytest.raises(HostKeyError, match="unknown") as caught:
        connect(sshd.spec(known_hosts=path))
    error = caught.value
    assert (error.host, error.phase, int(error.exit_code)) == ("box", "connect", 4)
    assert path in error.hint and "ssh.fingerprint" in error.hint
    assert sshd.fingerprint("ed25519").rstrip("=") in error.details[0]
    assert Path(path).read_text() == before


def test_no_known_hosts_at_all(sshd: Any, _own_home: Path) -> None:
    with pytest.raises(HostKeyError, match="unknown"):
        connect(sshd.spec(known_hosts=None))
    (_own_home / ".ssh").mkdir()
    (_own_home / ".ssh/known_hosts").write_text(sshd.known)
    assert works(sshd.spec(known_hosts=None))


def test_changed_key(sshd: Any) -> None:
    for line in (
        f"[{sshd.address}]:{sshd.port} {other_key(sshd)}\n",
        f"{sshd.address} {other_key(sshd, 'rsa')}\n",
    ):
        path = sshd.known_hosts(line)
        with pytest.raises(HostKeyError, match="HAS CHANGED") as caught:
            connect(sshd.spec(known_hosts=path))
        shown, recorded = caught.value.details
        assert shown.startswith("shown:") and sshd.fingerprint("ed25519") in shown
        assert recorded.startswith("recorded:") and recorded.endswith(f"({path}:1)")
        assert "ssh-keygen -R" in caught.value.hint


def test_only_the_named_known_hosts_counts(sshd: Any, _own_home: Path) -> None:
    (_own_home / ".ssh").mkdir()
    (_own_home / ".ssh/known_hosts").write_text(sshd.known)
    with pytest.raises(HostKeyError, match="unknown"):
        connect(sshd.spec(known_hosts=sshd.known_hosts("")))


def test_revoked_key(sshd: Any) -> None:
    revoked = "".join(f"@revoked * {sshd.line(kind).split(' ', 1)[1]}" for kind in sshd.keys)
    with pytest.raises(HostKeyError, match="REVOKED"):
        connect(sshd.spec(known_hosts=sshd.known_hosts(sshd.known + revoked)))


@pytest.mark.parametrize(
    "damage", ["ssh-ed25519 AAAAgarbage", "ssh-ed25519 !!!!", "ssh-rsa {ed25519}", "ssh-ed25519 {cut}"]
)
@pytest.mark.parametrize("revoked", [False, True])
def test_a_damaged_line_is_no_trust(sshd: Any, damage: str, revoked: bool) -> None:
    blob = sshd.line("ed25519").split()[2]
    key = damage.format(ed25519=blob, cut=blob[:30])
    line = f"@revoked * {key}\n" if revoked else f"[{sshd.address}]:{sshd.port} {key}\n"
    path = sshd.known_hosts(line + sshd.known)
    with pytest.raises(HostKeyError, match="cannot be read") as caught:
        connect(sshd.spec(known_hosts=path))
    assert caught.value.message.startswith(f"{path}:1: ")
    assert "line 1" in caught.value.hint


def test_pinned_fingerprint(sshd: Any) -> None:
    assert works(sshd.spec(fingerprint=sshd.fingerprint("ed25519")))
    wrong = "SHA256:" + "A" * 43
    with pytest.raises(HostKeyError, match="NOT THE PINNED ONE") as caught:
        connect(sshd.spec(fingerprint=wrong, known_hosts=sshd.known_hosts()))
    assert caught.value.details[0] == f"pinned: {wrong}"


def test_pinned_fingerprint_of_another_kind_of_key(sshd: Any) -> None:
    pin = sshd.fingerprint("ecdsa")
    with pytest.raises(HostKeyError, match="NOT THE PINNED ONE") as caught:
        connect(sshd.spec(fingerprint=pin))
    assert "shown:  ssh-ed25519" in caught.value.details[1] and "pin the type" in caught.value.hint
    assert works(sshd.spec(fingerprint=pin, known_hosts=sshd.known_hosts()))


def test_pinned_fingerprint_needs_no_known_hosts(sshd: Any) -> None:
    changed = sshd.known_hosts(f"[{sshd.address}]:{sshd.port} {other_key(sshd)}\n")
    assert works(sshd.spec(fingerprint=sshd.fingerprint("ed25519"), known_hosts=changed))


# ---------------------------------------------------------------------------- authentication, ssh_config


def test_refused_key(sshd: Any) -> None:
    other_key(sshd)
    with pytest.raises(AuthError, match="refused every key for user root") as caught:
        connect(sshd.spec(identity_file=str(sshd.folder / "other_ed25519")))
    assert caught.value.hint


def test_no_key_at_all(sshd: Any) -> None:
    with pytest.raises(AuthError):
        connect(sshd.spec(identity_file=None))


def test_encrypted_key(sshd: Any, tmp_path: Path) -> None:
    path = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(path)], check=True)
    with pytest.raises(AuthError, match="encrypted") as caught:
        connect(sshd.spec(identity_file=str(path)))
    assert "ssh-add" in caught.value.hint


def test_missing_identity_file(sshd: Any) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        connect(sshd.spec(identity_file="~/none"))


def test_everything_from_ssh_config(sshd: Any, _own_home: Path) -> None:
    folder = _own_home / ".ssh"
    (folder / "conf.d").mkdir(parents=True)
    (folder / "config").write_text("Include conf.d/*\nHost *\n    User nobody\n")
    (folder / "conf.d/box").write_text(
        f"Host box\n    HostName {sshd.address}\n    Port {sshd.port}\n    User root\n    IdentitiesOnly yes\n"
        f"    IdentityFile ~/none\n    IdentityFile {sshd.folder}/id\n    UserKnownHostsFile {sshd.known_hosts()}\n"
    )
    assert works(ConnectSpec("box", python=sys.executable))


def test_another_ssh_config_and_an_alias(sshd: Any, tmp_path: Path) -> None:
    known = sshd.known_hosts(f"nickname {sshd.line('ecdsa').split(' ', 1)[1]}")
    (tmp_path / "config").write_text(
        f"Host box\n    HostKeyAlias nickname\n    UserKnownHostsFile {known}\n    IdentityAgent none\n"
    )
    assert works(sshd.spec(config=str(tmp_path / "config")))
    with pytest.raises(ConfigError, match="does not exist"):
        connect(sshd.spec(config=str(tmp_path / "none")))


def test_expand_includes(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/one").write_text("Host inner\n  Port 1\n")
    (tmp_path / "two words").write_text("User two\n")
    (tmp_path / "main").write_text(
        f'Host a\n  User u\n  include one none-* "{tmp_path}/two words"\n  Port 2\nInclude ~/x\n'
    )
    assert list(expand_includes(tmp_path / "main", home=tmp_path)) == [
        "Host a",
        "  User u",
        "Host inner",
        "  Port 1",
        "Host a",
        "User two",
        "Host a",
        "  Port 2",
    ]
    (tmp_path / "loop").write_text(f"Include {tmp_path}/loop\n")
    with pytest.raises(ConfigError, match="deeper"):
        list(expand_includes(tmp_path / "loop", home=tmp_path))
    assert list(expand_includes(tmp_path / "none", home=tmp_path)) == []


# -------------------------------------------------------------------------------------------- unreachable


def test_connection_refused(sshd: Any) -> None:
    with pytest.raises(UnreachableError, match="refused the connection") as caught:
        connect(sshd.spec(port=1))
    assert int(caught.value.exit_code) == 4 and "ssh.port" in caught.value.hint


def test_name_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UnreachableError, match="the name 'box' is not known") as caught:
        connect(ConnectSpec("box"))
    assert "address in the inventory" in caught.value.hint


def test_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.9.200", 0))
        silent.listen(5)
        with pytest.raises(UnreachableError, match=r"in time|dropped the connection"):
            monkeypatch.setattr(ssh_module, "ATTEMPTS", 2)
            connect(
                ConnectSpec("box", address="127.0.9.200", port=silent.getsockname()[1], connect_timeout=0.3)
            )


def test_not_an_ssh_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.9.201", 0))
        server.listen(5)

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UnreachableError):
            monkeypatch.setattr(ssh_module, "ATTEMPTS", 2)
            connect(
                ConnectSpec("box", address="127.0.9.201", port=server.getsockname()[1], connect_timeout=0.5)
            )
        thread.join()


def hold(sshd: Any) -> socket.socket:
    """Take the one place that a server with MaxStartups 1 has."""
    while True:
        held = socket.create_connection((sshd.address, sshd.port))
        if held.recv(100).startswith(b"SSH-"):
            return held
        held.close()


def test_dropped_connections_are_tried_again(start_sshd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sshd = start_sshd(settings=("MaxStartups 1:100:1", "LoginGraceTime 60"))
    held = hold(sshd)
    paused: list[float] = []

    def release(seconds: float) -> None:
        paused.append(seconds)
        held.close()
        threading.Event().wait(0.3)

    monkeypatch.setattr(ssh_module.time, "sleep", release)
    assert works(sshd.spec())
    assert len(paused) >= 1


def test_dropped_connections_end_in_an_error(start_sshd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sshd = start_sshd(settings=("MaxStartups 1:100:1", "LoginGraceTime 60"))
    with hold(sshd):
        monkeypatch.setattr(ssh_module, "ATTEMPTS", 2)
        with pytest.raises(UnreachableError, match="dropped the connection") as caught:
            connect(sshd.spec())
    assert "MaxStartups" in caught.value.hint


def test_host_key_and_auth_failures_are_not_tried_again(sshd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[ConnectSpec] = []
    real = ssh_module._open_route

    def count(spec: ConnectSpec, *way: Any) -> Any:
        tried.append(spec)
        return real(spec, *way)

    monkeypatch.setattr(ssh_module, "_open_route", count)
    with pytest.raises(HostKeyError):
        connect(sshd.spec(known_hosts=sshd.known_hosts("")))
    with pytest.raises(AuthError):
        connect(sshd.spec(identity_file=None))
    assert len(tried) == 2


# -------------------------------------------------------------------------------------------- jump hosts


def test_jump_host(sshd: Any, start_sshd: Any) -> None:
    inner = start_sshd()
    known = sshd.known_hosts(sshd.known + inner.known)
    spec = inner.spec(known_hosts=known, proxy_jump=f"root@{sshd.address}:{sshd.port}")
    identity = str(sshd.folder / "id")
    with (inner.folder / "authorized").open("a") as target:
        target.write((sshd.folder / "id.pub").read_text())
    spec = replace(spec, identity_file=identity)
    with connect(spec) as session:
        way = session.run(["sh", "-c", "echo $SSH_CONNECTION"]).text
        assert way.split()[3] == str(inner.port)
    for missing, label in ((inner.known, sshd.address), (sshd.known, "box")):
        with pytest.raises(HostKeyError, match="unknown") as caught:
            connect(replace(spec, known_hosts=sshd.known_hosts(missing)))
        assert caught.value.host == "box"
        assert caught.value.message.startswith("jump host 127.0.9.") == (label != "box")
    with pytest.raises(UnreachableError, match="jump host could not connect"):
        connect(replace(spec, port=1))
    with pytest.raises(
        UnreachableError, match=r"jump host 127\.0\.9\.\d+: .*refused the connection|refused the connection"
    ):
        connect(replace(spec, proxy_jump=f"root@{sshd.address}:1"))
    with pytest.raises(ConfigError, match="proxy_jump"):
        connect(replace(spec, proxy_jump="a@b@c:d"))


def test_jump_host_from_ssh_config(sshd: Any, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        f"Host hop\n    HostName {sshd.address}\n    Port {sshd.port}\n    User root\n"
        f"Host box\n    ProxyJump hop\nHost *\n    UserKnownHostsFile {sshd.known_hosts()}\n"
    )
    assert works(sshd.spec(config=str(tmp_path / "config")))
    assert works(sshd.spec(config=str(tmp_path / "config"), proxy_jump="none"))


# ----------------------------------------------------------------------------------------- the far end


def test_noise_of_shell_start_up_files_is_skipped(sshd: Any) -> None:
    assert works(sshd.spec(identity_file=str(sshd.folder / "noisy")))


def test_missing_python(sshd: Any) -> None:
    with pytest.raises(RemoteError, match="/nowhere/python3 was not found") as caught:
        connect(sshd.spec(python="/nowhere/python3"))
    assert "ssh.python" in caught.value.hint


def test_python_is_a_plain_path() -> None:
    for python in ("python3; reboot", "$(x)", "-c", "a b", ""):
        with pytest.raises(ConfigError, match="not a plain path"):
            ConnectSpec("box", python=python)


def test_remote_command() -> None:
    plain, raised = remote_command("python3", sudo=False), remote_command("python3", sudo=True)
    assert plain.startswith("exec env LC_ALL=C python3 -X utf8 -ISB -c 'import sys;")
    assert raised.startswith("exec env LC_ALL=C sudo -n -H -- python3 -X utf8 -ISB -c 'import sys;")
    for text in (plain, raised):
        assert text.count("'") == 2 and not set(text) & set("!$`\\\n*?~&|#")


def test_old_python_is_told() -> None:
    command = remote_command("python3", sudo=False)
    source = command[command.index("'") + 1 : -1].replace("(3,8)", "(9,9)")
    done = subprocess.run([sys.executable, "-ISB", "-c", source], input=b"", capture_output=True)
    assert done.returncode == 1
    assert b"Python 3.8 or newer is needed" in done.stderr


def test_agent_ends_and_lock_is_freed_when_the_client_is_killed(
    sshd: Any, tmp_path: Path, alive: Any, wait_until: Any
) -> None:
    spec = sshd.spec()
    script = (
        "import sys,time\nfrom ddtree_ops.remote import ConnectSpec, connect\n"
        f"s = connect({spec!r}); s.acquire_lock(sys.argv[1], {{'who': 'doomed'}})\n"
        "e = s.stream(['sh', '-c', 'echo $$; exec sleep 60']).get(20)\n"
        "print(s.facts['pid'], int(e[1]), flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-c", script, f"{tmp_path}/lock"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        agent, child = map(int, client.stdout.readline().split())
        assert alive(agent) and alive(child)
        client.send_signal(signal.SIGKILL)
    wait_until(lambda: not alive(agent) and not alive(child))
    with connect(spec) as session:
        assert session.acquire_lock(f"{tmp_path}/lock", {}) is None


def test_cut_connection_is_told_to_requests_under_way(sshd: Any, alive: Any, wait_until: Any) -> None:
    with connect(sshd.spec()) as session:
        agent = session.facts["pid"]
        parent = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
        stream = session.stream(["sleep", "60"])
        os.kill(parent, signal.SIGKILL)
        with pytest.raises(UnreachableError, match="during stream"):
            list(stream)
        with pytest.raises(UnreachableError, match="during run"):
            session.run(["true"])
    wait_until(lambda: not alive(agent))


def test_close_ends_the_agent(sshd: Any, alive: Any) -> None:
    session = connect(sshd.spec())
    session.close()
    assert not alive(session.facts["pid"])


def test_publish_over_ssh(sshd: Any, tree: Any, tmp_path: Path) -> None:
    tree.write("large", os.urandom(9 << 20))
    tree.scan()
    with connect(sshd.spec()) as session:
        for created in (True, False):
            result = session.publish(
                tree.root, tree.files, releases_dir=f"{tmp_path}/releases", digest="d", manifest=tree.manifest
            )
            assert result.created is created
        assert session.round_trips == 3
        session.remove_tree(f"{tmp_path}/releases/d", below=f"{tmp_path}/releases")


def test_parallel_requests_over_ssh(sshd: Any) -> None:
    with connect(sshd.spec()) as session:
        failures: list[str] = []

        def work(number: int) -> None:
            data = os.urandom(300_000)
            if session.request("ping", data=data).data != data:
                failures.append(f"{number}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == [] and session.round_trips == 8
