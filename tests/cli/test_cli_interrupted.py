"""An interruption ends a command wherever it comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import typer

from ddtree_ops.cli import app as cli
from ddtree_ops.cli import common
from ddtree_ops.errors import heed_interruption


def _hidden() -> None:
    try:
        raise KeyboardInterrupt
    finally:
        raise RuntimeError("what cleans up failed")


def _while_an_object_is_finalised() -> None:
    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                pass

    Finalised()
    time.sleep(20)


def _only(monkeypatch: pytest.MonkeyPatch, command: Callable[[], None]) -> None:
    one = typer.Typer()
    one.command("one")(command)
    monkeypatch.setattr(cli, "app", one)


@pytest.mark.parametrize("command", [_hidden, _while_an_object_is_finalised])
def test_it_is_not_lost(
    typed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, command: Callable[[], None]
) -> None:
    _only(monkeypatch, command)
    before = sys.unraisablehook
    ended = typed()
    assert ended.code == 130
    assert sys.unraisablehook is before


def test_a_failure_of_its_own_is_none(typed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    _only(monkeypatch, fails)
    with pytest.raises(ZeroDivisionError):
        typed()


def test_what_comes_at_once_after_it_is_the_same_one_and_what_is_ignored_stays_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interruption = cli._Interruption()
    with pytest.raises(KeyboardInterrupt):
        interruption(signal.SIGINT, None)
    interruption(signal.SIGTERM, None)
    interruption._last -= interruption.SAME_S
    with pytest.raises(KeyboardInterrupt):
        interruption(signal.SIGTERM, None)
    taken: list[int] = []
    ignored = {signal.SIGHUP: signal.SIG_IGN}
    monkeypatch.setattr(signal, "getsignal", lambda number: ignored.get(number, signal.SIG_DFL))
    monkeypatch.setattr(signal, "signal", lambda number, _: taken.append(number))
    interruption.install()
    assert taken == [signal.SIGINT, signal.SIGTERM]


def test_hosts_that_are_asked_at_once_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: set[int] = set()
    ended = threading.Event()

    class Session:
        def close(self) -> None:
            closed.add(id(self))
            ended.set()

    sessions = [Session(), Session()]
    monkeypatch.setattr(common, "_opened", set(sessions))
    begun = threading.Barrier(3)

    def ask(number: int) -> None:
        begun.wait(30)
        assert ended.wait(60)

    def interrupt() -> None:
        begun.wait(30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            common._at_once(ask, [0, 1])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(closed) == 2


def test_an_interruption_is_found_behind_causes_and_contexts() -> None:
    def raised(error: BaseException, *, cause: BaseException | None = None) -> BaseException:
        error.__cause__ = cause
        return error

    hidden = raised(OSError("gone"), cause=raised(ValueError("x"), cause=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        heed_interruption(hidden)
    with pytest.raises(KeyboardInterrupt):
        common._tried("h", lambda: _hidden())
    circle = ValueError("a")
    circle.__context__ = raised(KeyError("b"), cause=circle)
    heed_interruption(circle)
