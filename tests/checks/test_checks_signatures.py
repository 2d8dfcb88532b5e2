"""What a scan needs, loaded while somebody waits for something else. No host is reached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.checks.signatures import prepare

LOADED = """
import sys
from ddtree_ops.checks.signatures import prepare
from ddtree_ops.diagnose import library
before = library._shipped.cache_info().currsize
prepare().join()
print(before, library._shipped.cache_info().currsize, "ddtree_ops.diagnose.sieve" in sys.modules)
"""


def test_the_library_is_loaded_in_the_background_and_not_before() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "True"]


def test_a_wrong_file_is_left_for_the_scan_to_tell_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.yaml").write_text("id: wrong\n")
    monkeypatch.setenv("DDTREE_OPS_SIGNATURES", str(tmp_path))
    prepare().join()
