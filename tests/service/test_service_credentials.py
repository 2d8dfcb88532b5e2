"""Secrets in unit files and in the files that systemd reads: paths only in the one, exact values through the other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.lab.engine.lab_engine import Arguments, merge_config
from ddtree_ops.runtime import build
from ddtree_ops.service.credentials import (
    named_files,
    parse_files,
    refusal,
    render_files,
    secret_files,
)
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.unit import render_unit
from ddtree_ops.service.unitfile import exec_start_of

SOURCES = {"HF_TOKEN": {"env": "A"}, "api_key": {"env": "B"}, "admin_api_key": {"env": "C"}}


def target(**more: Any) -> Target:
    known: dict[str, Any] = {
        "name": "k26",
        "unit": "sglang-k26.service",
        "runtime": "r",
        "venv": "/root/venv",
        "model": "/m",
        "secrets": SOURCES,
    }
    service = Service(**known | more)
    host = Host(name="h", deploy_root="/srv/ops 100%", services={"k26": service})
    return Target(host=host, service=service, runtime=RuntimeSpec(name="r"))


def test_the_unit_names_paths_and_has_one_word_expanded() -> None:
    where = target()
    lines = render_unit(where).splitlines()
    folder = "/srv/ops 100%%/services/sglang-k26.service/secrets"
    start = lines.index(f"EnvironmentFile={folder}/HF_TOKEN.env")
    assert lines[start + 1] == f"LoadCredential=engine.yaml:{folder}/engine.yaml"
    assert "  --config ${CREDENTIALS_DIRECTORY}/engine.yaml" in lines
    assert [line for line in lines if "$" in line] == ["  --config ${CREDENTIALS_DIRECTORY}/engine.yaml"]
    words = exec_start_of("\n".join(lines))
    assert words is not None and words[-2:] == ["--config", "${CREDENTIALS_DIRECTORY}/engine.yaml"]
    assert set(named_files("\n".join(lines), Layout.of(where).secrets)) == set(secret_files(where.service))


def test_without_an_engine_secret_there_is_no_config() -> None:
    text = render_unit(target(secrets={"HF_TOKEN": {"env": "A"}}))
    assert "--config" not in text and "LoadCredential" not in text and "HF_TOKEN.env" in text
    assert "secrets" not in render_unit(target(secrets={}))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"args": {"config": "/etc/sglang.yaml"}}, "exclude each other"),
        ({"environment": {"HF_TOKEN": "x"}}, "HF_TOKEN stands under secrets"),
        ({"secrets": {"PYTHONPATH": {"env": "A"}}}, "PYTHONPATH stands under secrets"),
    ],
)
def test_refused_units(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render_unit(target(**more))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("api_key", "two words", "blank"),
        ("api_key", "schlüssel", "beyond ASCII"),
        ("api_key", "-starts-with-a-dash", "dash"),
        ("api_key", "x" * 70000, "64 KiB"),
        ("HF_TOKEN", "a\x1bb", "U\\+001B"),
        ("HF_TOKEN", "a\rb", "U\\+000D"),
        ("HF_TOKEN", "a\0b", "U\\+0000"),
        ("HF_TOKEN", "a\ufffeb", "U\\+FFFE"),
    ],
)
def test_values_that_cannot_be_handed_over(name: str, value: str, why: str) -> None:
    found = refusal(name, value)
    assert found is not None
    assert re.search(why, found)
    assert value not in found


KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8).filter(lambda t: t[0] != "-")
VALUES = st.text(
    st.characters(blacklist_categories=["Cs", "Cc"]) | st.sampled_from("\t\n\"'\\$`"), min_size=8
)


@given(KEYS, KEYS, VALUES.filter(lambda text: refusal("X", text) is None))
def test_files_are_read_back_as_written(key: str, admin: str, value: str) -> None:
    values = {"api_key": key, "admin_api_key": admin, "HF_TOKEN": value, "X": "plain-value"}
    files = render_files(values)
    assert set(files) == {"engine.yaml", "HF_TOKEN.env", "X.env"}
    assert parse_files(files) == values
    assert yaml.safe_load(files["engine.yaml"]) == {"api-key": key, "admin-api-key": admin}


def test_files_that_are_not_ours_say_nothing() -> None:
    files = {
        "engine.yaml": b"[1]",
        "A.env": b"A=x\n",
        "B.env": b'B="x"\nC="y"\n',
        "D.env": b"\xff",
    }
    assert parse_files(files) == {}
    assert parse_files({"engine.yaml": b"not json"}) == {}


def test_the_runtime_merges_the_file_as_this_relies_on(tmp_path: Path) -> None:
    """The pinned wheel's own ``server_args_config_parser.py`` and flags: the key arrives, other flags are untouched."""
    srt = build(RuntimeSpec()).root / "sglang" / "srt"
    merger = (srt / "server_args_config_parser.py").read_text("utf-8")
    arguments = Arguments((srt / "server_args.py").read_text("utf-8"))
    config = tmp_path / "engine.yaml"
    key = "sk-!\"#$%&'()*+,./:;<=>?@[]^_{|}~\\`"
    config.write_bytes(render_files({"api_key": key, "admin_api_key": "null-or-not"})["engine.yaml"])
    argv = ["--model-path", "/m", "--trust-remote-code", "--cuda-graph-bs", "1", "2", "--config", str(config)]
    fields = arguments.fields(argv, merger)
    assert (fields["api_key"], fields["admin_api_key"]) == (key, "null-or-not")
    assert (fields["model_path"], fields["trust_remote_code"], fields["cuda_graph_bs"]) == (
        "/m",
        True,
        [1, 2],
    )
    for odd in ("12345678", "1e100000", "0x123456", "nullnull", "~~~~~~~~", "true-ish"):
        config.write_bytes(render_files({"api_key": odd})["engine.yaml"])
        assert arguments.fields(argv, merger)["api_key"] == odd
    parser = arguments.parser()
    assert merge_config(merger, parser, ["--config", str(config), "--api-key", "line"])[-1] == "line"
    assert arguments.fields([*argv, "--api-key", "line"], merger)["api_key"] == "line", "the line goes before"


# ---------------------------------------------------------------------------------------------------------------------
# What a real systemd makes of it

NASTY = {
    "PLAIN": "hf_0123456789",
    "QUOTES": 'it\'s "quoted" twice',
    "SHELLY": "$HOME `id` \\ \\n \\\\ !# ;%h",
    "LINES": "-----BEGIN KEY-----\nabc\\\n\tdef=\n\n# no comment\n-----END KEY-----",
    "BLANKS": "  both ends \t",
    "UNICODE": "Grüße 鍵 🔑",
}
PROGRAM = r"""
import json, os, sys
folder = os.environ["CREDENTIALS_DIRECTORY"]
with open(sys.argv[1]) as file:
    config = json.load(file)
path = os.path.join(folder, "engine.yaml")
mode, owner = os.stat(path).st_mode & 0o777, os.stat(path).st_uid
try:
    open(sys.argv[2]).close()
    source = "readable"
except OSError as error:
    source = error.strerror
print("SEEN " + json.dumps({"env": dict(os.environ), "config": config, "uid": os.getuid(), "source": source, "dir": folder}))
"""


@pytest.mark.lab
def test_values_through_a_real_systemd_to_a_user_that_is_not_root(bench: Any) -> None:
    where = bench.target(user="nobody", secrets={name: {"env": "A"} for name in [*NASTY, "api_key"]})
    layout = Layout.of(where)
    key = "sk-!\"#$%&'()*+,./:;<=>?@[]^_{|}~"
    session = bench.session
    for name, data in render_files({**NASTY, "api_key": key}).items():
        session.write_file(f"{layout.secrets}/{name}", data, mode=0o600)
    program = f"{layout.service_dir}/look.py"
    session.write_file(program, PROGRAM.encode())
    text = render_unit(where)
    head, _, rest = text.partition("ExecStart=")
    _, _, tail = rest.partition("\nRestart=")
    source = f"{layout.secrets}/engine.yaml"
    quoted = [f'"{path}"'.replace("%", "%%") for path in (program, source)]
    start = f"ExecStart=/usr/bin/python3 {quoted[0]} ${{CREDENTIALS_DIRECTORY}}/engine.yaml {quoted[1]}"
    session.write_file(
        layout.unit_path, f"{head}{start}\nRestart={tail}".replace("Type=exec", "Type=oneshot").encode()
    )
    session.run(["systemctl", "daemon-reload"], check=True)
    session.run(["systemctl", "start", where.service.unit], check=True)
    shown = session.run(["journalctl", "-u", where.service.unit, "-o", "cat", "--all"], check=True).text
    (line,) = [line for line in shown.splitlines() if line.startswith("SEEN ")]
    seen = json.loads(line[5:])
    assert {name: seen["env"].get(name) for name in NASTY} == NASTY
    assert seen["config"] == {"api-key": key}
    assert seen["uid"] != 0
    assert seen["source"] == "Permission denied", "the file below SERVICE_DIR is for root alone"
    properties = session.run(["systemctl", "show", where.service.unit], check=True).text
    assert not {name for name, value in NASTY.items() if value in properties} and key not in properties
