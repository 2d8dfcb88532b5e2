"""Logs of two lab hosts at once: merged, followed over a restart and over connections that are cut."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.remote import ConnectSpec, connect
from ddtree_ops.service.following import FollowAll, Place
from ddtree_ops.service.journal import Entry

pytestmark = pytest.mark.lab


class Proxy:
    """A TCP proxy on a loopback address that can cut its connections and refuse new ones."""

    def __init__(self, address: str, port: int) -> None:
        self._far = (address, port)
        self._links: list[socket.socket] = []
        self._server = socket.create_server((address, 0))
        self.port: int = self._server.getsockname()[1]
        self.open = True
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if not self.open:
                near.close()
                continue
            self.connections += 1
            far = socket.create_connection(self._far)
            self._links += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def cut(self) -> None:
        for link in self._links:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for link in self._links:
            link.close()


@contextmanager
def proxied(lab: Any, name: str, folder: Path) -> Iterator[tuple[Proxy, ConnectSpec]]:
    """A proxy before a host's sshd, and how to connect through it."""
    host = lab.hosts[name]
    proxy = Proxy(host.address, host.port)
    known = folder / f"known-{name}"
    known.write_text(host.known_hosts.read_text().replace(f"]:{host.port} ", f"]:{proxy.port} "))
    try:
        yield proxy, ConnectSpec(
            name=name, address=host.address, user=host.user, port=proxy.port,
            identity_file=str(host.identity_file), known_hosts=str(known),
        )  # fmt: skip
    finally:
        proxy.close()


def collect(follower: FollowAll, until: Callable[[list[tuple[int, Entry]]], bool]) -> list[tuple[int, Entry]]:
    seen: list[tuple[int, Entry]] = []
    ends = time.monotonic() + 300
    while not until(seen):
        assert time.monotonic() < ends, [entry.message for _, entry in seen][-5:]
        came = follower.get(0.2)
        assert came is not None, follower.failed
        seen += came
    return seen


def said(seen: list[tuple[int, Entry]], number: int = 0) -> list[str]:
    return [entry.message for which, entry in seen if which == number and entry.ident == "say"]


def test_a_cut_connection_loses_and_repeats_nothing(bench: Any, lab: Any, tmp_path: Path) -> None:
    """Cut while the unit talks without a pause; while the host cannot be reached it goes on talking."""
    unit = bench.target().service.unit
    enough = f"/run/{unit}.enough"
    talk = f"n=0; until [ -e {enough} ]; do n=$((n+1)); echo line $n; sleep 0.01; done; echo last"
    text = f"[Service]\nSyslogIdentifier=say\nLogRateLimitIntervalSec=0\nExecStart=/bin/sh -c '{talk}'\n"
    bench.session.write_file(f"/run/systemd/system/{unit}", text.encode())
    bench.session.run(["systemctl", "daemon-reload"], check=True)
    notes: list[str] = []
    with proxied(lab, "ct200", tmp_path) as (proxy, spec):
        place = Place("ct200", unit, lambda: connect(spec))
        with FollowAll([place], notes.append) as follower:
            bench.session.run(["systemctl", "start", unit], check=True)
            seen = collect(follower, lambda seen: len(said(seen)) >= 20)
            proxy.open = False
            proxy.cut()
            time.sleep(0.5)
            proxy.open = True
            seen += collect(follower, lambda more: len(said(more)) >= 20)
            proxy.cut()
            seen += collect(follower, lambda more: len(said(more)) >= 20)
            bench.session.run(["touch", enough], check=True)
            seen += collect(follower, lambda more: "last" in said(more))
        assert proxy.connections == 3
    *lines, last = said(seen)
    assert (lines, last) == ([f"line {number}" for number in range(1, len(lines) + 1)], "last")
    assert [note.partition(";")[0].partition(" after ")[0] for note in notes] == [
        "ct200: the connection was closed by the host",
        "ct200: connected again",
    ] * 2
    bench.session.run(["rm", "-f", f"/run/systemd/system/{unit}", enough], check=True)


INVENTORY = """\
schema: 1
runtimes:
  r: {{description: sglang-0.5.11, python: cp312}}
services:
  t: {{unit: {one}, runtime: r, venv: /v, model: /m, port: 3001}}
  u: {{unit: {two}, runtime: r, venv: /v, model: /m, port: 3001}}
hosts:
{hosts}
"""
HOST = """\
  {name}:
    address: {spec.address}
    ssh: {{user: {spec.user}, port: {spec.port}, known_hosts: {spec.known_hosts}, identity_file: {spec.identity_file}}}
    services: {{{service}: {{}}}}
"""


class Typed:
    """``ddtree-ops logs`` as a process whose output is read line by line."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddtree_ops", "logs", *argv],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ),
        )  # fmt: skip
        self.lines: list[str] = []

    def until(self, text: str, host: str) -> None:
        stream = self.process.stdout
        assert stream is not None
        for line in stream:
            self.lines.append(line.rstrip("\n"))
            if text in line and line.startswith(f"{host} "):
                return
        raise AssertionError(f"{text!r} was not shown: {self.lines[-5:]}")


def test_two_hosts_merged_and_followed_over_restart_and_cut(
    bench: Any, french_bench: Any, lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process follows both: a unit ends and starts again, an agent is killed, and Ctrl-C ends it."""
    benches = {"ct200": bench, "b300": french_bench}
    controls = {name: each.install(each.target()) for name, each in benches.items()}
    units = {name: control.unit for name, control in controls.items()}
    with proxied(lab, "ct200", tmp_path) as (_, one), proxied(lab, "b300", tmp_path) as (proxy, two):
        hosts = HOST.format(name="ct200", spec=one, service="t") + HOST.format(
            name="b300", spec=two, service="u"
        )
        inventory = tmp_path / "two.yaml"
        inventory.write_text(INVENTORY.format(one=units["ct200"], two=units["b300"], hosts=hosts))
        monkeypatch.setenv("DDTREE_OPS_INVENTORY", str(inventory))
        for control in controls.values():
            control.start()

        def ready() -> bool:
            return all(
                control.search("up in mode", invocation="current").matches for control in controls.values()
            )

        ends = time.monotonic() + 300
        while not ready():
            assert time.monotonic() < ends
            time.sleep(0.1)

        done = lab.commands.run(["logs", "--json"])
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert {item["host"] for item in found} == {"ct200", "b300"}
        assert [item["time"] for item in found] == sorted(item["time"] for item in found)
        assert done.stderr.count("searched") == 2

        shown = Typed("--follow", "--lines", "1")
        try:
            shown.until("up in mode", "ct200")
            controls["ct200"].stop()
            controls["ct200"].start()
            shown.until("SIGTERM received", "ct200")
            shown.until("up in mode", "ct200")
            proxy.cut()
            controls["b300"].stop()
            shown.until("SIGTERM received", "b300")
            shown.process.send_signal(signal.SIGINT)
            assert shown.process.wait(300) == 130
            assert shown.process.stderr is not None
            errors = shown.process.stderr.read().splitlines()
        finally:
            shown.process.kill()
            shown.process.communicate()
    assert len(shown.lines) == len(set(shown.lines))
    assert [line.partition(";")[0].partition(" after ")[0] for line in errors] == [
        "b300: the connection was closed by the host",
        "b300: connected again",
    ]
