"""Many hosts behind one jump host, and many connections to one sshd that drops what comes too fast."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import HostKeyError, UnreachableError
from ddtree_ops.remote import ConnectSpec, Session, connect
from ddtree_ops.remote import ssh as ssh_module
from ddtree_ops.remote.bastion import UNAUTHENTICATED, Gate, Pool

STRICT = ("MaxStartups 10:30:100", "LogLevel VERBOSE")
HOSTS = 30


def accepted(server: Any) -> int:
    return (server.folder / "log").read_text().count("Accepted publickey")


def log_of(server: Any) -> str:
    return (server.folder / "log").read_text()


def together(work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(work, items))


@pytest.fixture(scope="module")
def bastion(start_sshd: Any) -> Any:
    return start_sshd(settings=STRICT)


@pytest.fixture(scope="module")
def behind(start_sshd: Any, bastion: Any) -> Any:
    """Two sshd that are thirty hosts, each with an address of its own; they let the bastion's key in."""
    servers = []
    for half in (range(HOSTS // 2), range(HOSTS // 2, HOSTS)):
        addresses = tuple(f"ListenAddress 127.0.9.{100 + number}:2222" for number in half)
        server = start_sshd(settings=(*addresses, "MaxStartups 200", "LogLevel VERBOSE"))
        with (server.folder / "authorized").open("a") as keys:
            keys.write((bastion.folder / "id.pub").read_text())
        servers.append(server)
    return servers


@pytest.fixture
def specs(bastion: Any, behind: list[Any]) -> list[ConnectSpec]:
    """All thirty, through the bastion."""
    keys = [server.line("ed25519").split(" ", 1)[1] for server in behind]
    lines = [f"[127.0.9.{100 + number}]:2222 {keys[2 * number // HOSTS]}" for number in range(HOSTS)]
    known = bastion.known_hosts(bastion.known + behind[0].known + "".join(lines))
    jump = f"root@{bastion.address}:{bastion.port}"
    return [
        bastion.spec(
            name=f"gpu{number:02d}",
            address=f"127.0.9.{100 + number}",
            port=2222,
            known_hosts=known,
            connect_timeout=120.0,
            proxy_jump=jump,
        )
        for number in range(HOSTS)
    ]


def test_thirty_hosts_share_one_connection_to_the_bastion(bastion: Any, specs: list[ConnectSpec]) -> None:
    before = accepted(bastion)
    sessions = together(connect, specs)
    try:
        ways = together(
            lambda session: session.run(["sh", "-c", "echo $SSH_CONNECTION"]).text.split(), sessions
        )
        assert [way[2] for way in ways] == [spec.address for spec in specs]
        assert {session.host for session in sessions} == {spec.name for spec in specs}
        assert accepted(bastion) == before + 1
        assert "MaxStartups" not in log_of(bastion)
    finally:
        together(Session.close, sessions)
    assert not ssh_module._bastions._shared, "the last one closes it"
    with connect(specs[0]) as session:
        assert session.run(["true"]).rc == 0
    assert accepted(bastion) == before + 2


def test_many_connections_to_one_sshd_stay_below_its_limit(bastion: Any) -> None:
    spec = bastion.spec(connect_timeout=120.0)
    sessions = together(connect, [replace(spec, name=f"gpu{number:02d}") for number in range(20)])
    together(Session.close, sessions)
    assert len(sessions) == 20
    assert log_of(bastion).count("MaxStartups") < 7, "few were dropped, if any, and tried again"


def test_a_chain_of_bastions(bastion: Any, behind: list[Any], specs: list[ConnectSpec]) -> None:
    inner = behind[0]
    first, second = accepted(bastion), accepted(inner)
    jump = f"{specs[0].proxy_jump},root@{inner.address}:{inner.port}"
    sessions = together(connect, [replace(spec, proxy_jump=jump) for spec in specs[:3]])
    try:
        assert all(session.run(["true"]).rc == 0 for session in sessions)
        assert (accepted(bastion), accepted(inner)) == (first + 1, second + 1 + 3)
    finally:
        together(Session.close, sessions)
    assert not ssh_module._bastions._shared


def failures(specs: list[ConnectSpec]) -> list[UnreachableError]:
    def one(spec: ConnectSpec) -> UnreachableError:
        with pytest.raises(UnreachableError) as caught:
            connect(spec).close()
        return caught.value

    return together(one, specs)


def test_a_bastion_that_cannot_be_reached_is_named_by_each_host(specs: list[ConnectSpec]) -> None:
    found = failures([replace(spec, proxy_jump="root@127.0.9.99:1") for spec in specs[:5]])
    assert [error.host for error in found] == [spec.name for spec in specs[:5]]
    assert all(
        error.message == "jump host 127.0.9.99: 127.0.9.99:1 refused the connection" for error in found
    )
    assert len({id(error) for error in found}) == 5


def test_a_bastion_of_an_unknown_key_is_refused_for_each_host(
    bastion: Any, behind: Any, specs: list[ConnectSpec]
) -> None:
    known = bastion.known_hosts(behind[0].known)
    found = failures([replace(spec, known_hosts=known) for spec in specs[:3]])
    assert all(type(error) is HostKeyError for error in found)
    assert all(
        error.message.startswith(f"jump host {bastion.address}: the host key is unknown") for error in found
    )
    assert not ssh_module._bastions._shared


def test_a_host_behind_is_checked_as_strictly_and_fails_alone(
    bastion: Any, behind: Any, specs: list[ConnectSpec]
) -> None:
    wrong = replace(specs[1], known_hosts=None, fingerprint="SHA256:" + "A" * 43)
    config = bastion.folder / "ssh_config"
    config.write_text(f"Host *\n    UserKnownHostsFile {specs[0].known_hosts}\n")
    wrong = replace(wrong, config=str(config))
    good = replace(specs[0], known_hosts=None, config=str(config))
    with connect(good) as session:
        (error,) = failures([wrong])
        assert (type(error), error.host) == (HostKeyError, "gpu01")
        assert "NOT THE PINNED ONE" in error.message
        (closed,) = failures([replace(good, name="gone", port=1)])
        assert "the jump host could not connect to 127.0.9.100:1" in closed.message
        assert session.run(["true"]).rc == 0, "those who share the bastion go on"


def test_a_lost_bastion_is_told_to_all_and_connected_anew(
    bastion: Any, specs: list[ConnectSpec], wait_until: Callable[..., None]
) -> None:
    before = accepted(bastion)
    sessions = together(connect, specs[:3])
    transport = next(iter(ssh_module._bastions._shared.values())).future.result().connection.transport
    port = transport.sock.getsockname()[1]
    workers = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _serves(path, port)]
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    for session in sessions:
        with pytest.raises(UnreachableError):
            session.run(["sleep", "20"])
    wait_until(lambda: not transport.is_active())
    with connect(specs[0]) as session:
        assert session.run(["true"]).rc == 0
    together(Session.close, sessions)
    assert accepted(bastion) == before + 2
    assert not ssh_module._bastions._shared


def _serves(process: Path, port: int) -> bool:
    """Whether this process is an sshd that holds the connection from ``port``."""
    try:
        if not (process / "comm").read_text().startswith("sshd"):
            return False
        inodes = {
            str(link.readlink())[8:-1]
            for link in (process / "fd").iterdir()
            if str(link.readlink()).startswith("socket:")
        }
        table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    return any(
        row.split()[9] in inodes and int(row.split()[2].rpartition(":")[2], 16) == port for row in table
    )


# ---------------------------------------------------------------------------------------- the parts alone


def test_a_gate_lets_a_few_at_a_time_pass_to_each_address() -> None:
    gate = Gate()
    inside = {"a": 0, "b": 0}
    most = {"a": 0, "b": 0}
    guard = threading.Lock()
    meeting = {address: threading.Barrier(UNAUTHENTICATED, timeout=120.0) for address in inside}

    def work(number: int) -> None:
        address = "ab"[number % 2]
        with gate.passing(address):
            with guard:
                inside[address] += 1
                most[address] = max(most[address], inside[address])
            meeting[address].wait()
            with guard:
                inside[address] -= 1

    together(work, list(range(2 * 3 * UNAUTHENTICATED)))
    assert most == {"a": UNAUTHENTICATED, "b": UNAUTHENTICATED}
    assert not gate._places


def test_a_pool_opens_once_and_the_last_one_closes() -> None:
    opened: list[str] = []
    closed: list[str] = []
    pool: Pool[str] = Pool(close=closed.append, alive=lambda value: True)

    def opener() -> str:
        time.sleep(0.05)
        opened.append(f"thing {len(opened) + 1}")
        return opened[-1]

    leases = together(lambda number: pool.lease("key", opener), list(range(8)))
    assert {lease.value for lease in leases} == {"thing 1"}
    for lease in leases[:7]:
        lease.close()
        lease.close()
    assert closed == []
    assert pool.lease("key", opener).value == "thing 1"
    leases[7].close()
    assert closed == [], "a lease taken later still holds it"
    assert pool.lease("other", opener).value == "thing 2"


def test_a_pool_tells_all_who_waited_and_tries_again_later() -> None:
    tries: list[int] = []
    pool: Pool[str] = Pool(close=lambda value: None, alive=lambda value: True)

    def opener() -> str:
        tries.append(1)
        time.sleep(0.1)
        if len(tries) == 1:
            raise UnreachableError("gone")
        return "thing"

    def ask(number: int) -> str:
        try:
            return pool.lease("key", opener).value
        except UnreachableError as error:
            return error.message

    assert set(together(ask, list(range(5)))) == {"gone"}
    assert len(tries) == 1
    assert ask(0) == "thing"


def test_a_dead_thing_is_opened_anew_while_others_still_hold_it() -> None:
    closed: list[list[int]] = []
    dead: list[list[int]] = []
    pool: Pool[list[int]] = Pool(close=closed.append, alive=lambda value: value not in dead)
    first = pool.lease("key", lambda: [1])
    dead.append(first.value)
    second = pool.lease("key", lambda: [2])
    assert second.value == [2]
    first.close()
    assert closed == [[1]]
    assert pool.lease("key", lambda: [3]).value == [2]
