"""A service on a lab host: the rendered unit runs a small program in the place of ``sglang.launch_server``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.remote import ConnectSpec, Session, connect
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.unit import render_unit

ROOT = "/opt/service tests 100%"
VENV = f"{ROOT}/venv"

SERVER = rb"""
import os, signal, sys, time

mode = sys.argv[sys.argv.index("--mode") + 1] if "--mode" in sys.argv else "idle"

def say(text):
    os.write(2, text + b"\n")

def on_term(number, frame):
    say(b"[2026-11-29 14:53:55] SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
    if mode == "leaks":
        say(b"Gracefully exiting... Remaining number of requests 1. Remaining requests remaining_rids=['x'].")
        return
    say(b"Gracefully exiting... Remaining number of requests 0. Remaining requests remaining_rids=[].")
    os.kill(os.getpid(), signal.SIGKILL)

if mode != "plain":
    signal.signal(signal.SIGTERM, on_term)
say(b"up in mode " + mode.encode())
if mode == "crash":
    say(b"RuntimeError: The size of tensor a (8) must match the size of tensor b (33) at non-singleton dimension 0")
    os.kill(os.getpid(), signal.SIGKILL)
if mode.isdigit():
    sys.exit(int(mode))
if mode == "chatty":
    for number in range(2000):
        say(b"line %d" % number)
if mode == "noisy":
    say(b"gr\xfc\xdfe \xff\xfe")
    say(b"x" * 100000 + b" size of tensor")
    os.write(2, b"\rLoading: 1% | 1/64\rLoading: 45% | 29/64\rLoading: 100% | 64/64\n")
    say(b"end of noise")
while True:
    signal.pause()
"""


class Bench:
    """Makes services on one lab host and takes them away again."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.units: list[str] = []

    def target(self, **more: Any) -> Target:
        """A target whose unit nobody else uses; keywords override the service."""
        known: dict[str, Any] = {
            "name": "t",
            "unit": f"service-test-{next(_NUMBERS)}.service",
            "runtime": "r",
            "venv": VENV,
            "model": "/root/models/größe 10%",
            "restart": {"policy": "no"},
            "health": {"stop_timeout": "20s"},
        }
        service = Service(**known | more)
        self.units.append(service.unit)
        host = Host(name=self.session.host, deploy_root=ROOT, services={"t": service})
        return Target(host=host, service=service, runtime=RuntimeSpec(name="r"))

    def install(self, target: Target) -> UnitControl:
        """The rendered unit, installed, with the program in its release."""
        layout = Layout.of(target)
        self.session.write_file(f"{layout.current}/sglang/launch_server.py", SERVER)
        self.session.run(["mkdir", "-p", f"{VENV}/bin"], check=True)
        self.session.run(["ln", "-sfn", "/usr/bin/python3", f"{VENV}/bin/python"], check=True)
        control = UnitControl(self.session, target.service.unit)
        control.install(layout.unit_path, render_unit(target))
        return control

    def close(self) -> None:
        for unit in self.units:
            self.session.run(["systemctl", "kill", "--signal=SIGKILL", unit])
            self.session.run(["systemctl", "stop", unit])
            self.session.run(["rm", "-f", f"/etc/systemd/system/{unit}"])
        self.session.run(["systemctl", "daemon-reload"])
        self.session.run(["systemctl", "reset-failed", *self.units])


_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def connect_lab(lab: Any) -> Iterator[Callable[[str], Session]]:
    """Sessions with the lab hosts, one a host."""
    with ExitStack() as stack:
        made: dict[str, Session] = {}

        def get(name: str) -> Session:
            if name not in made:
                host = lab.hosts[name]
                spec = ConnectSpec(
                    name=name,
                    address=host.address,
                    user=host.user,
                    port=host.port,
                    identity_file=str(host.identity_file),
                    known_hosts=str(host.known_hosts),
                )
                made[name] = stack.enter_context(connect(spec))
            return made[name]

        yield get


@pytest.fixture
def bench(connect_lab: Callable[[str], Session]) -> Iterator[Bench]:
    """A bench on ct200."""
    made = Bench(connect_lab("ct200"))
    yield made
    made.close()


@pytest.fixture
def french_bench(connect_lab: Callable[[str], Session]) -> Iterator[Bench]:
    """A bench on b300: French ISO-8859-15 locale, a user who needs sudo."""
    made = Bench(connect_lab("b300"))
    yield made
    made.close()
