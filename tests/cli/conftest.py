"""The commands in this process, as typed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ddtree_ops.cli.app import main


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """``typed("plan", "one")``: its exit code, and what it printed."""

    def run(*argv: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["ddtree-ops", *argv])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run
