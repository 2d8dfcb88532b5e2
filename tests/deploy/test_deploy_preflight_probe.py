"""The probe, run for real over a session to this machine: weights, venv, user; one request whatever there is."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_ops.deploy.audit import act_line
from ddtree_ops.deploy.preflight import Facts, parse_facts, probe_request
from ddtree_ops.inventory.models import GPU, SSH, Host, RuntimeSpec, Service, Target
from ddtree_ops.lab import furnish
from ddtree_ops.remote import connect_local
from ddtree_ops.remote.session import AgentError, Session

PROBE = Path(__file__).parents[2] / "ddtree_ops/deploy/preflight/probe_host.py"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with connect_local() as opened:
        yield opened


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The lab's model: 590 GB in 64 shards, all of it holes."""
    folder = tmp_path / "model"
    for name, data in furnish.model_files().items():
        length = furnish.whole_size(data) if name.endswith(".safetensors") else None
        furnish.write(folder, name, data, length=length)
    return folder


def look(session: Session, model: Path, *, gpu: bool = False, **service: object) -> Facts:
    made = Service.model_validate(
        {"name": "s", "unit": "t.service", "runtime": "r", "venv": "/v", "model": str(model), **service}
    )
    host = Host(
        name="h",
        ssh=SSH(python=sys.executable),
        gpu=GPU(name="x", count=1, arch="sm90") if gpu else None,
        deploy_root=str(model.parent / "root"),
    )
    request = probe_request(Target(host=host, service=made, runtime=RuntimeSpec()))
    before = session.round_trips
    (reply,) = session.batch([request])
    assert session.round_trips == before + 1
    assert not isinstance(reply, Exception)
    return parse_facts(reply.data)


def test_runs_that_were_stopped_as_asked_for_are_read_from_the_end_of_the_audit(session, model):
    root = model.parent / "root"
    root.mkdir(exist_ok=True)
    named = {"who": "ann", "origin": "desk"}
    lines = [
        act_line("stop", service="t.service", outcome="ok", invocation="a1", **named),
        act_line("stop", service="other.service", outcome="ok", invocation="b1", **named),
        "[1, {",
        act_line("stop", service="t.service", outcome="ok", invocation="a2", detail="x" * 300_000, **named),
        "[]",
        act_line("start", service="t.service", outcome="ok", **named),
    ]
    (root / "audit.jsonl").write_text("\n".join(lines) + "\n" * (1 << 10))
    assert look(session, model).planned_ends == ("a1", "a2")
    (root / "audit.jsonl").write_text("\n".join([*lines, "x" * (1 << 18), lines[0]]) + "\n")
    assert look(session, model).planned_ends == ("a1",)
    (root / "audit.jsonl").unlink()
    assert look(session, model).planned_ends == ()


def test_a_whole_model_and_this_machine(session, model):
    facts = look(session, model, drafter=str(model))
    assert facts.drafter == facts.model
    found = facts.model
    assert (found.shards, found.bytes, found.total_size) == (64, 590_000_000_000, 590_000_000_000)
    assert (found.missing, found.broken, found.misplaced, found.error) == ((), (), 0, "")
    assert found.tokenizer == ("tokenizer.json",)
    assert found.text["num_hidden_layers"] == 61
    assert facts.memory_total > facts.memory_available > 0
    assert facts.uid == os.geteuid()
    assert facts.root.path == str(model.parent) and not facts.root.there
    assert facts.smi is None


@pytest.mark.parametrize(
    ("damage", "missing", "problem"),
    [
        (lambda path: path.unlink(), True, ""),
        (lambda path: path.write_bytes(b""), True, ""),
        (lambda path: os.truncate(path, 5_000_000_000), False, "cut off"),
        (lambda path: os.truncate(path, 9_999_000_000), False, "too long"),
        (lambda path: os.truncate(path, 7), False, "no safetensors header"),
        (
            lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0"),
            False,
            "Git LFS",
        ),
        (lambda path: path.write_bytes(b"\x08\0\0\0\0\0\0\0not json"), False, "cannot be read"),
        (lambda path: path.write_bytes(b"\x10\0\0\0\0\0\0\0" + b'{"a": [1, 2, 3]}'), False, "cannot be read"),
    ],
    ids=["gone", "empty", "cut", "long", "stub", "lfs", "noise", "odd"],
)
def test_a_damaged_shard(session, model, damage, missing, problem):
    name = "model-00007-of-000064.safetensors"
    damage(model / name)
    found = look(session, model).model
    assert found.missing == ((name,) if missing else ())
    assert [(shard, problem in why) for shard, why in found.broken] == ([] if missing else [(name, True)])
    assert found.bytes == 590_000_000_000 // 64 * 63


def test_shards_that_were_swapped_leftovers_and_code_that_is_missing(session, model):
    one, two = (model / f"model-0000{number}-of-000064.safetensors" for number in (1, 2))
    one.rename(model / "x")
    two.rename(one)
    (model / "x").rename(two)
    (model / ".cache/huggingface/download").mkdir(parents=True)
    (model / ".cache/huggingface/download/a.safetensors.b.incomplete").touch()
    (model / "model-00009-of-000064.safetensors.part").touch()
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_k.C",
        "AutoTokenizer": ["tokenization_k.T", None],
        "A": "x--y.Z",
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "configuration_k.py").touch()
    found = look(session, model).model
    assert found.misplaced == 2
    assert len(found.unfinished) == 2
    assert found.code_missing == ("tokenization_k.py",)


def test_shards_without_an_index_are_counted_by_their_names(session, model):
    (model / "model.safetensors.index.json").unlink()
    (model / "model-00064-of-000064.safetensors").unlink()
    found = look(session, model).model
    assert (found.shards, found.missing, found.total_size) == (
        64,
        ("model-00064-of-000064.safetensors",),
        None,
    )


@pytest.mark.parametrize(
    "header",
    ['{"a": {"data_offsets": [0, "9"]}}', '{"a": {"data_offsets": [0, null]}}', "[" * 100_000, "null"],
    ids=["text", "null", "deep", "nothing"],
)
def test_a_header_that_is_json_and_no_header(session, model, header):
    name = "model-00007-of-000064.safetensors"
    (model / name).write_bytes(len(header).to_bytes(8, "little") + header.encode())
    assert look(session, model).model.broken == ((name, "its safetensors header cannot be read"),)


def test_what_is_no_file_is_not_waited_for(session, model):
    names = [f"model-0000{number}-of-000064.safetensors" for number in (3, 4, 5)]
    for name in names:
        (model / name).unlink()
    os.mkfifo(model / names[0])
    (model / names[1]).mkdir()
    (model / names[2]).symlink_to("/nowhere")
    assert look(session, model).model.broken == (
        (names[0], "no file"),
        (names[1], "no file"),
        (names[2], "a link to nothing"),
    )


def test_a_total_that_is_no_number_of_bytes(session, model):
    index = json.loads((model / "model.safetensors.index.json").read_text())
    for total in (float("inf"), float("nan"), 10**400, "9"):
        index["metadata"]["total_size"] = total
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        found = look(session, model).model
        assert (found.total_size, found.error) == (None, "")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"weight_map": 7}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "\\u0000"}}',
        "[" * 100_000,
    ],
)
def test_an_index_that_is_no_index(session, model, text):
    (model / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in look(session, model).model.error


def test_a_venv_is_read_and_nothing_of_it_is_imported(session, tmp_path):
    site = tmp_path / "venv/lib/python3.12/site-packages"
    for name, version in (("torch", "2.11.0+cu130"), ("Sglang_Kernel", "0.4.2"), ("torch", "2.10.0")):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nName: no\n"
        )
    (site / "Sglang_Kernel-0.4.2.dist-info/entry_points.txt").write_text(
        "[console_scripts]\nddtree = no:no\n\n[sglang.srt.plugins]\nddtree = trees.hooks:install\no=o:o\n\n[x]\na = b\n"
    )
    (site / "torch-2.10.0.dist-info/entry_points.txt").write_text("[sglang.srt.platforms]\nddtree = no:no\n")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "venv/bin").mkdir()
    (tmp_path / "venv/bin/python").write_text("#!/bin/sh\necho Python 3.12.3\n")
    (tmp_path / "venv/bin/python").chmod(0o755)
    (tmp_path / "venv/pyvenv.cfg").write_text("include-system-site-packages = true\n")
    venv = look(session, tmp_path / "none", venv=str(tmp_path / "venv")).venv
    assert (venv.there, venv.executable, venv.version, venv.outside) == (True, True, "3.12", True)
    assert venv.packages == {"torch": ("2.10.0", "2.11.0+cu130"), "sglang-kernel": ("0.4.2",)}
    assert venv.plugins == (
        ("sglang-kernel", "ddtree", "trees.hooks:install"),
        ("sglang-kernel", "o", "o:o"),
    )


def test_a_venv_whose_python_cannot_start(session, tmp_path):
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to("/nonexistent/python3.12")
    venv = look(session, tmp_path / "none", venv=str(tmp_path / "venv")).venv
    assert (venv.there, venv.executable, venv.version) == (True, False, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_another_user_may_not_read(session):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        for name, data in furnish.drafter_files().items():
            furnish.write(
                folder / "m", name, data, length=furnish.whole_size(data) if "safe" in name else None
            )
        assert look(session, folder / "m", user="no-such-user").user.exists is False
        user = look(session, folder / "m", user="nobody", venv="/usr").user
        assert "/m/" not in str(user.denied)
        (folder / "m/model.safetensors").chmod(0o600)
        user = look(session, folder / "m", user="nobody").user
        denied = (str(folder / "m/model.safetensors"), "/v/bin/python")
        assert (user.exists, user.denied, user.denied_count, user.error) == (True, denied, 2, "")
        folder.chmod(0o700)
        assert look(session, folder / "m", user="nobody").user.denied_count == 4


def test_nvidia_smi_that_is_not_there(session, tmp_path):
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has nvidia-smi")
    smi = look(session, tmp_path / "none", gpu=True).smi
    assert smi is not None
    assert (smi.status, smi.text) == (127, "No such file or directory")


def test_a_program_that_fails_says_where_and_leaves_no_process(session):
    source = b"def answer(given, start):\n    given.append(start(['sleep', '600']).pid)\n    raise KeyError(given)\n"
    with pytest.raises(AgentError) as caught:
        session.request("program", {"name": "broken", "given": []}, data=source)
    assert caught.value.code == "internal"
    (pid,) = re.findall(r"^KeyError: \[(\d+)\]$", caught.value.details[-1])
    assert not Path("/proc", pid).exists()
    assert 'File "broken", line 3' in "\n".join(caught.value.details)


def test_the_probe_is_python_3_8():
    ast.parse(PROBE.read_text(), feature_version=(3, 8))
