"""Loaded by every Python process of the server, the spawned ones too, through PYTHONPATH.

Installs sglang's own stub for triton (``sglang/_triton_stub.py``, which sglang installs by itself only on macOS), so
that no triton wheel is needed on a CPU. The stub uses ``importlib.machinery`` without importing it.

An import of sglang makes 600,000 objects that stay; at Python's thresholds a quarter of its time goes into looking at them.
"""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

gc.set_threshold(50_000, 20, 100)

_PATH = Path(sysconfig.get_paths()["purelib"]) / "sglang" / "_triton_stub.py"

if (
    os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    and _PATH.exists()
    and "triton" not in sys.modules
    and importlib.util.find_spec("triton") is None
):
    _spec = importlib.util.spec_from_file_location("_sglang_triton_stub", _PATH)
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _module.install()
    # torch 2.13's _inductor does "from triton.compiler import CompiledKernel": a class is needed there, not a module
    for _name in ("triton.compiler", "triton.compiler.compiler", "triton.runtime.autotuner"):
        if not isinstance(sys.modules.get(_name), _module._MockModule):
            _module._make_mock(_name)
