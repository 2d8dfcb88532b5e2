"""An interruption ends a command wherever it comes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import typer

from ddtree_ops.cli import app as cli


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
    time.sleep(600)


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
