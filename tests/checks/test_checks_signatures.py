"""What a scan needs, loaded while somebody waits for something else. No host is reached."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from ddtree_ops.checks.signatures import prepare, signatures
from ddtree_ops.diagnose.library import default_library, lenient_library
from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory import load_inventory, select
from ddtree_ops.results import Verdict
from ddtree_ops.service.control import UnitControl

if TYPE_CHECKING:
    from ddtree_ops.remote.session import Session

DATA = Path(__file__).resolve().parents[1] / "data"
INVENTORY = """\
schema: 1
runtimes: {r: {description: sglang-0.5.11, python: cp312}}
services: {a: {unit: a.service, runtime: r, venv: /v, model: /m, port: 3001}}
hosts: {one: {address: 127.0.0.1, services: {a: {}}}}
"""
LOADED = """
import sys
from ddtree_ops.checks.signatures import prepare
from ddtree_ops.diagnose import library
before = library._read_all.cache_info().currsize
prepare().join()
print(before, library._read_all.cache_info().currsize, "ddtree_ops.diagnose.sieve" in sys.modules)
"""


def test_the_library_is_loaded_in_the_background_and_not_before() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "True"]


def test_a_wrong_file_of_the_users_judges_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.yaml").write_text("id: wrong\n")
    (tmp_path / "fan.yaml").write_text(
        "id: fan\ntitle: a fan\npattern: 'fan stopped'\nliteral: fan stopped\nwhere: [log]\nseverity: fatal\n"
        "explanation: a fan.\nremedy: turn it\nsource: own\nexamples: ['fan stopped']\nlookalikes: ['a fan']\n"
    )
    monkeypatch.setenv("DDTREE_OPS_SIGNATURES", f"{tmp_path}{os.pathsep}{tmp_path / 'gone'}")
    prepare().join()
    with pytest.raises(ConfigError):
        default_library()
    library, left_out = lenient_library()
    assert len(left_out) == 2 and "wrong.yaml was left out: it has " in left_out[0] and "gone" in left_out[1]
    assert library["fan"].title == "a fan", "the sound ones are used"
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "inventory.yml").write_text(INVENTORY)
    (target,) = select(load_inventory(str(tmp_path / "hosts" / "inventory.yml")), ["one"])
    raw = (DATA / "journal" / "stop-mixed.json").read_bytes()
    monkeypatch.setattr(UnitControl, "raw", lambda *_, **__: iter([raw]))
    session = cast("Session", SimpleNamespace(host="one"))
    result, report = signatures(session, target, invocation="current")
    assert (result.verdict, report.left_out) == (Verdict.PASS, left_out)
    assert result.facts["left_out"] == list(left_out) and left_out[0] in report.notes
