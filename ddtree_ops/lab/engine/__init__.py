"""The lab engine: a stand-in server for lab hosts.

``lab_engine.py`` is a program for Python >= 3.8 without dependencies. It is copied to a host together with
``answers.py``, ``faults.py``, ``ddtree_ops/sizing.py`` and ``launchflags.py``, and started there; nothing here imports it.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["ENGINE_FILES", "ENGINE_PATH"]

ENGINE_PATH = Path(__file__).with_name("lab_engine.py")
"""The program."""

ENGINE_FILES = (
    ENGINE_PATH,
    *(ENGINE_PATH.with_name(name) for name in ("answers.py", "faults.py")),
    *(ENGINE_PATH.parents[2] / name for name in ("sizing.py", "launchflags.py")),
)
"""Files that must lie in one directory on the host; the first is the program."""
