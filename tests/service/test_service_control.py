"""What of the control layer needs no systemd: through a real agent on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.remote import Session, connect_local
from ddtree_ops.service.control import UnitControl


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with connect_local() as made:
        yield made


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_port_owner(session: Session, family: socket.AddressFamily, address: str) -> None:
    control = UnitControl(session, "sglang-tiny.service")
    with socket.socket(family) as listener:
        try:
            listener.bind((address, 0))
        except OSError as error:
            pytest.skip(f"no {address} here: {error}")
        port = listener.getsockname()[1]
        assert control.port_owner(port) == (), "bound, not listening"
        listener.listen()
        before = session.round_trips
        (owner,) = control.port_owner(port)
        assert session.round_trips == before + 1
        assert (owner.pid, owner.address, owner.uid) == (os.getpid(), address, os.geteuid())
        assert str(os.getpid()) in owner.describe()
        assert control.port_owner(port, address) == (owner,)
        assert control.port_owner(port, "127.9.9.9") == ()
        assert control.port_owner(port, "0.0.0.0") == (owner,)
    assert control.port_owner(port) == ()


def test_no_port(session: Session) -> None:
    for port in (0, -1, 65536):
        with pytest.raises(UsageError):
            UnitControl(session, "x.service").port_owner(port)
    with pytest.raises(UsageError, match="IP address"):
        UnitControl(session, "x.service").port_owner(1, "localhost")
