"""Fabric, imported without what only tests of code that uses it need."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

__all__ = ["import_fabric"]

_MOCK = "unittest.mock"


def import_fabric() -> None:
    """Import Fabric and Paramiko, before the threads that connect: from then on they wait for hosts, not for this one.

    invoke imports ``unittest.mock`` for its ``MockContext``, and that asyncio and ssl: together a fifth of the time. Where
    nobody has imported it yet, a stand-in has its place meanwhile; whoever imports it later gets the real one.
    """
    stand_in = ModuleType(_MOCK)
    stand_in.__dict__["__getattr__"] = lambda _: object
    mine = sys.modules.setdefault(_MOCK, stand_in) is stand_in
    try:
        importlib.import_module("fabric")
    finally:
        if mine:
            del sys.modules[_MOCK]
