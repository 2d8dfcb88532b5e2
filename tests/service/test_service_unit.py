"""Units and launch commands: golden cases, refusals, and systemd's own parser as the judge."""

from __future__ import annotations

import os
import re
import shutil
import string
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.service.argv import launch_argv
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.unit import (
    HEADER,
    quote_environment,
    quote_exec,
    quote_executable,
    render_unit,
    start_limit_interval,
)

CASES = Path(__file__).parents[1] / "data" / "units"
VERIFY = shutil.which("systemd-analyze")


def service(**more: Any) -> Service:
    known: dict[str, Any] = {
        "name": "k26",
        "unit": "sglang-k26.service",
        "runtime": "sglang-0.5.11",
        "venv": "/root/venv",
        "model": "/root/models/Kimi-K2.6",
    }
    return Service(**known | more)


def target(made: Service, **host: Any) -> Target:
    return Target(
        host=Host(name="ct200", services={made.name: made}, **host),
        service=made,
        runtime=RuntimeSpec(name="r"),
    )


@pytest.mark.parametrize("path", sorted(CASES.glob("*.yaml")), ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    case = yaml.safe_load(path.read_text())
    made = service(**case["service"])
    assert launch_argv(made) == case["argv"]
    if "unit" in case:
        assert render_unit(target(made, **case.get("host", {}))) == case["unit"]


def test_a_runtime_with_a_dialect_of_its_own() -> None:
    made = service(drafter="/m/d", speculative={"algorithm": "DDTREE", "budget": 20, "topk_cap": 4})
    runtime = RuntimeSpec(dialect={"speculative-ddtree-budget": "speculative-tree-nodes"})
    there = target(made)
    plain, other = render_unit(there), render_unit(there.model_copy(update={"runtime": runtime}))
    assert "--speculative-ddtree-budget 20" in plain
    assert other == plain.replace("--speculative-ddtree-budget", "--speculative-tree-nodes")
    with pytest.raises(ValidationError, match="should match pattern"):
        RuntimeSpec(dialect={"tp-size": "tensor"})


def test_there_are_golden_cases() -> None:
    assert len(list(CASES.glob("*.yaml"))) >= 5


def test_layout() -> None:
    layout = Layout.of(target(service(), deploy_root="/srv/ops/"))
    assert layout.releases == "/srv/ops/releases"
    assert layout.current == "/srv/ops/services/sglang-k26.service/current"
    assert layout.history == "/srv/ops/services/sglang-k26.service/history.jsonl"
    assert layout.lock == "/srv/ops/services/sglang-k26.service/lock"
    assert layout.pycache == "/srv/ops/pycache"
    assert layout.unit_path == "/etc/systemd/system/sglang-k26.service"
    digest = "0123456789abcdef" * 4
    assert layout.release(digest) == f"/srv/ops/releases/{digest}"
    assert os.path.normpath(f"{layout.service_dir}/{layout.link_target(digest)}") == layout.release(digest)
    with pytest.raises(ValueError, match="not a bundle digest"):
        layout.release("../../etc")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"args": {"--port": 1}}, "not a flag name"),
        ({"args": {"a b": 1}}, "not a flag name"),
        ({"args": {"port": 1}}, "already written by a field"),
        ({"args": {"tp_size": 2}}, "already written by a field"),
        (
            {"speculative": {"algorithm": "DFLASH"}, "args": {"speculative-dflash-block-size": 4}},
            "already written by a field",
        ),
        (
            {"args": {"dtype": "auto", "dtype_": "x", "mem-fraction-static": 1, "mem_fraction_static": 2}},
            "args.mem",
        ),
        ({"args": {"api-key": "hunter2"}}, "secret on the command line"),
        ({"args": {"admin_api_key": "hunter2"}}, "secret on the command line"),
        ({"args": {"cuda-graph-bs": []}}, "empty list"),
        ({"args": {"lora-paths": ["--port"]}}, "read as a flag"),
        ({"args": {"chat-template": "a\0b"}}, "NUL"),
        ({"args": {"chat-template": "a\uffffb"}}, "noncharacter"),
        ({"environment": {"PYTHONPATH": "/x"}}, "is set by ddtree-ops"),
        ({"environment": {"A-B": "/x"}}, "not a variable name"),
        ({"environment": {"A": "x\0"}}, "NUL"),
        ({"venv": "/root/$venv"}, "cannot run a path"),
        ({"venv": "/root/ve'nv"}, "cannot run a path"),
        ({"venv": "/root/a:b"}, "colon"),
        ({"unit": "a:b.service"}, "unit 'a:b.service': a colon"),
        ({"user": "root\nExecStartPre=/bin/true"}, "not a user name"),
        ({"health": {"stop_timeout": 0}}, "no limit"),
        ({"restart": {"burst": 3, "delay": 10, "interval": 30}}, "loop for ever"),
    ],
)
def test_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        render_unit(target(service(**more)))
    assert "hunter2" not in caught.value.render()


def test_interval_outlasts_the_slowest_loop() -> None:
    made = service(restart={"burst": 5, "delay": 20}, health={"load_timeout": "20m"})
    assert start_limit_interval(made) > 5 * (20 + 1200)
    assert start_limit_interval(service(restart={"interval": "2h"})) == 7200


def test_nothing_breaks_out_of_its_line() -> None:
    made = service(
        description="two\nlines \\",
        environment={"A": "x\nUser=evil"},
        args={"chat-template": "\n[Service]\nUser=evil"},
    )
    text = render_unit(target(made))
    assert text.startswith(HEADER + "\n")
    assert "Description=two lines\n" in text
    assert not any(line.strip() in {"User=evil", "[Service]"} for line in text.splitlines()[9:])


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("--port", "--port"),
        ("", '""'),
        (";", '";"'),
        ("a b", '"a b"'),
        ("%h", '"%%h"'),
        ("$HOME ${HOME}", '"$$HOME $${HOME}"'),
        ("it's", '"it\'s"'),
        ('"', '"\\""'),
        ("\\", '"\\\\"'),
        ("a\tb\n\r\x01\x7f", '"a\\tb\\n\\r\\x01\\x7f"'),
        ("größe", '"größe"'),
        ("\u2028", '"\\xe2\\x80\\xa8"'),
    ],
)
def test_quote_exec(word: str, quoted: str) -> None:
    assert quote_exec(word) == quoted


def test_quote_environment() -> None:
    assert quote_environment("A", "$x 10%") == '"A=$x 10%%"'
    assert quote_environment("A", "") == '"A="'
    assert quote_environment("A", "/x:y") == "A=/x:y"


@pytest.mark.parametrize(
    "path", ["python", "-/bin/x", "@/bin/x", ":/bin/x", "+/bin/x", "!/bin/x", "/a\tb", "/a\\b"]
)
def test_executable_refused(path: str) -> None:
    with pytest.raises(ConfigError):
        quote_executable(path)


def speakable(character: str) -> bool:
    code = ord(character)
    return code != 0 and not 0xFDD0 <= code <= 0xFDEF and code & 0xFFFE != 0xFFFE


WORDS = st.one_of(
    st.text(st.characters(codec="utf-8").filter(speakable), max_size=12),
    st.text(st.sampled_from("%$\\\"' \t\n;-@:+!{}#=~aH\x01\x7fé\u2028"), max_size=10),
    st.sampled_from(
        ["", ";", "\\;", "%", "%%", "$", "$$", "${HOME}", "$HOME", "-", "@x", ":", "+", "!", "|", "#", "\\"]
    ),
)
NAMES = st.text(string.ascii_letters + "_", min_size=1, max_size=6).filter(
    lambda name: not name.startswith("PYTHON")
)


@pytest.mark.skipif(VERIFY is None, reason="systemd-analyze is not installed")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, max_size=40), environment=st.dictionaries(NAMES, WORDS, max_size=10), text=WORDS)
def test_systemd_finds_nothing_wrong(
    words: list[str], environment: dict[str, str], text: str, tmp_path: Path
) -> None:
    """``systemd-analyze verify`` exits 0 with problems: its output is the verdict."""
    python = tmp_path / "ve nv %" / "bin" / "python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        python.symlink_to("/bin/true")
    made = service(
        venv=str(python.parents[1]),
        description=text,
        environment=environment,
        args={f"flag-{index}": word for index, word in enumerate(words)},
    )
    assert verify(render_unit(target(made)), tmp_path) == ""


@pytest.mark.skipif(VERIFY is None, reason="systemd-analyze is not installed")
def test_the_judge_can_say_no(tmp_path: Path) -> None:
    text = render_unit(target(service(venv=str(tmp_path))))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/true")
    assert verify(text, tmp_path) == ""
    assert "Unknown key" in verify(text.replace("KillMode", "KillMood"), tmp_path)
    assert "unbalanced" in verify(text.replace("--port", '"--port'), tmp_path).lower()


def verify(text: str, folder: Path) -> str:
    assert VERIFY is not None
    path = folder / "sglang-k26.service"
    path.write_text(text)
    done = subprocess.run([VERIFY, "verify", path], capture_output=True, timeout=300, check=False)
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    return "\n".join(line for line in said.splitlines() if re.search(r"sglang-k26\.service", line))


NASTY = [
    "",
    " ",
    ";",
    "\\;",
    "%",
    "%%h",
    "$",
    "$$",
    "${HOME}",
    "$HOME",
    "a$HOME",
    "'",
    '"',
    "\\",
    "\\x41",
    "\\\\",
    "\t",
    "\n",
    "\r",
    "\x01",
    "\x7f",
    "\x1b[0m",
    "é",
    "\u2028",
    "\u0085",
    "\U0001f600",
    "#",
    " # x",
    "x #y",
    "a;b",
    "@x",
    ":x",
    "+x",
    "!x",
    "|",
    "&",
    "~",
    "{}",
    "*",
    "?",
    "[a]",
    "a=b",
    "A=$B",
    "trailing\\",
    "trailing ",
    " leading",
    "\\\n",
    "\\ ",
]


@pytest.mark.lab
@settings(
    max_examples=10,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(words=NASTY, environment={f"V{index}": word for index, word in enumerate(NASTY)})
@given(words=st.lists(WORDS, max_size=60), environment=st.dictionaries(NAMES, WORDS, max_size=20))
def test_the_process_gets_exactly_these_words(
    words: list[str], environment: dict[str, str], bench: Any
) -> None:
    """The started process's own argv and environment, as the kernel has them, are the judge of our quoting."""
    environment = {
        name: value for name, value in environment.items() if name not in {"HOME", "USER", "PATH", "LANG"}
    }
    made = bench.target(
        unit="service-test-words.service",
        args={f"flag-{index}": word for index, word in enumerate(words)},
        environment=environment,
    )
    control = bench.install(made)
    state = control.start().state
    argv = bench.session.read_file(f"/proc/{state.main_pid}/cmdline")
    variables = bench.session.read_file(f"/proc/{state.main_pid}/environ")
    bench.session.run(["systemctl", "kill", "--signal=SIGKILL", control.unit])
    control.stop()
    assert argv.decode().split("\0")[:-1] == launch_argv(made.service)
    found = dict(item.split("=", 1) for item in variables.decode().split("\0") if item)
    wanted = {"PYTHONPATH": Layout.of(made).current, "HOME": "/root", **environment}
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("root", ["/opt/$x", "/opt/a'b", '/opt/a"b', "/opt/a\\b", "/opt/a\nb", "/opt/a:b"])
def test_roots_that_a_transient_unit_cannot_name_are_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="deploy_root"):
        render_unit(target(service(), deploy_root=root))
    assert render_unit(target(service(), deploy_root="/opt/a b 100%n"))
