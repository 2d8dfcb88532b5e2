"""Sources, exceptions, places, and the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddtree_ops import paths
from ddtree_ops.cli.app import app
from ddtree_ops.inventory.yaml_source import parse_document
from ddtree_ops.lint import RULES, Cite, Severity, lint, located, rules_table
from ddtree_ops.lint.model import Case
from ddtree_ops.lint.rules_tree import _VARIABLES
from ddtree_ops.runtime import Bundle
from ddtree_ops.service.argv import launch_argv
from ddtree_ops.service.unit import render_unit

ROOT = Path(__file__).parents[2]
CITES = [
    pytest.param(one.id, cite, id=f"{one.id} {cite}")
    for one in RULES
    for cite in one.sources
    if isinstance(cite, Cite)
]


@pytest.mark.parametrize(("rule", "cite"), CITES)
def test_a_cited_line_of_the_released_wheel_says_what_the_rule_says(rule: str, cite: Cite, stock: Bundle):
    assert cite.text in (stock.root / "sglang" / cite.path).read_text("utf-8").splitlines()[cite.line - 1]


def test_ids_are_unique_and_every_rule_says_why():
    ids = [one.id for one in RULES]
    assert len(ids) == len(set(ids)) > 40
    assert all(one.reason.endswith(".") and one.sources and one.title for one in RULES)


def test_an_exception_needs_a_reason_and_is_shown_with_it(make_target, facts):
    args = {"args": {"page-size": 64}}
    found = lint(
        make_target({"service": {**args, "lint": {"ignore": {"page-size": "our tree can"}}}}),
        facts["patched"],
    )
    assert [(one.rule, one.severity, one.ignored) for one in found] == [
        ("page-size", Severity.INFO, "our tree can")
    ]
    with pytest.raises(ValueError, match="at least 1 character"):
        make_target({"service": {**args, "lint": {"ignore": {"page-size": ""}}}})


def test_an_exception_from_a_rule_that_does_not_exist_is_told(make_target, facts):
    (found,) = lint(make_target({"service": {"lint": {"ignore": {"page-sice": "x"}}}}), facts["patched"])
    assert (found.severity, found.rule) == (Severity.WARN, "unknown-rule")
    assert "did you mean 'page-size'?" in found.message


def test_errors_come_first(make_target, facts):
    service = {"args": {"page-size": 64, "log-level": "error", "config": "/etc/x.yaml"}}
    found = [one.severity for one in lint(make_target({"service": service}), facts["patched"])]
    assert found == [Severity.ERROR, Severity.WARN, Severity.INFO]


def test_fields_write_the_flags_that_lint_looks_at(make_target, facts):
    full = {
        "served_name": "k",
        "drafter": "/m/d",
        "speculative": {"budget_schedule": "fixed"},
        "nodes": {"hosts": ["h", "i"], "address": "192.0.2.1"},
    }
    target = make_target({"service": full})
    looked_at = {f"--{given.key}" for given in Case(target, facts["patched"]).given}
    rendered = render_unit(target)
    written = {word for word in rendered.split() if word.startswith("--")}
    assert {"--nnodes", "--speculative-ddtree-budget-schedule"} <= written
    assert written == looked_at
    alone = make_target({})
    assert {word for word in launch_argv(alone.service) if word.startswith("--")} == {
        f"--{given.key}" for given in Case(alone, facts["patched"]).given
    }


def test_no_setting_leads_to_notify_or_a_watchdog(make_target):
    """sglang never calls sd_notify: with either the unit would be killed though it works."""
    text = render_unit(
        make_target({"service": {"environment": {"NOTIFY_SOCKET": "/x", "WatchdogSec": "30"}}})
    )
    settings = [
        line.partition("=")[0::2] for line in text.splitlines() if "=" in line and not line.startswith(" ")
    ]
    assert ("Type", "exec") in settings
    assert not {"WatchdogSec", "NotifyAccess", "BusName"} & {name for name, _ in settings}


def test_the_start_limit_that_is_computed_holds_every_crash(make_target):
    target = make_target(
        {"service": {"restart": {"burst": 4, "delay": "7s"}, "health": {"load_timeout": "20m"}}}
    )
    (interval,) = [
        line for line in render_unit(target).splitlines() if line.startswith("StartLimitIntervalSec=")
    ]
    assert float(interval.partition("=")[2].rstrip("s")) > 4 * (7 + 20 * 60)


PLACES = """\
defaults:
  service:
    health: {load_timeout: 5m}
services:
  s:
    model: /m
    args:
      page-size: 64
hosts:
  h:
    services:
      s:
        args:
          log-level: error
runtimes:
  r: {}
"""


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (("services", "s", "args", "page-size"), "x.yaml:8"),
        (("services", "s", "args", "log-level"), "x.yaml:14"),
        (("services", "s", "health", "load_timeout"), "x.yaml:3"),
        (("services", "s", "health", "stall_timeout"), "x.yaml:3"),
        (("services", "s", "args", "grammar-backend"), "--set args.grammar-backend"),
        (("services", "s", "environment", "A"), "--set environment"),
        (("services", "s", "runtime"), "--runtime"),
        (("services", "s", "bind"), "x.yaml:12"),
        (("hosts", "h", "http"), "x.yaml:10"),
        (("runtimes", "r"), "x.yaml:16"),
    ],
)
def test_where_a_setting_is_written(make_target, facts, path: tuple[str, ...], place: str):
    from dataclasses import replace

    target = make_target({"service": {"args": {"page-size": 64}}})
    (finding,) = lint(target, facts["patched"])
    settings = ["args.grammar-backend=xgrammar", "environment={A: b}"]
    (found,) = located(
        [replace(finding, path=path)],
        target,
        parse_document(PLACES, "x.yaml"),
        settings=settings,
        runtime="r",
    )
    assert found.place == place


# --- the command -------------------------------------------------------------------------------------------


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["lint", *words])


def test_the_shipped_lab_is_clean():
    done = run("-i", "lab", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    assert {one["host"] for one in document["targets"]} == {"ct200", "b300"}
    assert (document["counts"]["error"], document["counts"]["warn"]) == (0, 0)
    assert all(
        one["runtime"]["flags"] > 300 and len(one["runtime"]["digest"]) == 64 for one in document["targets"]
    )


def test_the_shipped_production_is_clean():
    done = run("-i", "production", "--strict")
    assert done.exit_code == 0, done.output
    assert "2 targets" in done.output and "0 errors, 0 warnings" in done.output


def test_without_the_overlay_production_says_what_its_runtime_lacks(tmp_path: Path):
    text = (paths.shipped("inventories") / "production.yaml").read_text()
    path = tmp_path / "site.yaml"
    path.write_text(
        text.replace("  sglang-0.5.11-ddtree:\n", "  sglang-0.5.11-ddtree:\n    overlay: none\n", 1)
    )
    done = run("-i", str(path), "ct200", "--json")
    assert done.exit_code == 78
    (target,) = json.loads(done.stdout)["targets"]
    (error,) = [one for one in target["findings"] if one["severity"] == "error"]
    assert set(error) == {
        "rule",
        "severity",
        "message",
        "reason",
        "source",
        "change",
        "where",
        "place",
        "ignored",
    }
    assert error["rule"] == "algorithm"
    assert error["change"].startswith("remove runtimes.sglang-0.5.11-ddtree.overlay: the overlay adds DDTREE")
    line = int(error["place"].rpartition(":")[2])
    assert path.read_text().splitlines()[line - 1].strip() == "algorithm: DDTREE"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--set", "args.mem-fraction-statik=0.8"], 78, "did you mean mem-fraction-static?"),
        (
            ["--set", "args.mem-fraction-statik=0.8", "--set", "lint.ignore.unknown-flag=wait and see"],
            0,
            "wait and see",
        ),
        (["--set", "args.log-level=error"], 0, "(--set args.log-level)"),
        (["--set", "args.log-level=error", "--strict"], 5, "1 warning"),
        (["--runtime", "sglang-0.5.11-stock", "--strict"], 5, "(--runtime)"),
        (["--set", "args.attention-backend=flashinfer"], 78, "flashinfer_mla"),
    ],
)
def test_exit_codes(words: list[str], code: int, text: str):
    done = run("-i", "lab", "ct200", *words)
    assert done.exit_code == code, done.output
    assert text in done.output


def test_no_host_is_contacted_and_no_process_started(monkeypatch: pytest.MonkeyPatch):
    """Not even a name is looked up: what can be known must be known on a train."""

    def refuse(*words: Any, **options: Any) -> Any:
        raise AssertionError(f"lint went to the network: {words}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(f"socket.socket.{name}", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("subprocess.Popen.__init__", refuse)
    done = run(
        "-i",
        "lab",
        "--set",
        "args.mem-fraction-statik=0.8",
        "--set",
        "secrets.HF_TOKEN.command=[cat, /dev/null]",
    )
    assert done.exit_code == 78 and "did you mean mem-fraction-static?" in done.output, done.output


def test_no_host_is_no_pass():
    with pytest.raises(Exception, match="no host or group matches"):
        CliRunner().invoke(app, ["lint", "-i", "lab", "nowhere"], catch_exceptions=False)


def test_the_rules_can_be_listed():
    done = run("--rules")
    assert done.exit_code == 0
    assert done.stdout == rules_table()
    assert all(f"| `{one.id}` | {one.severity} |" in done.stdout for one in RULES)


def test_the_rules_are_documented():
    page = (ROOT / "docs" / "lint.md").read_text("utf-8")
    assert page.endswith(rules_table())
    assert f", {len(RULES)} rules, " in page


def test_lint_loads_no_more_than_it_needs():
    code = (
        "import sys; from ddtree_ops.lint import lint, facts_of; import ddtree_ops.lint.run;"
        "print([name for name in ('rich', 'paramiko', 'fabric', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_variables_of_the_overlay_are_those_that_it_reads():
    sources = [path.read_text("utf-8") for path in (ROOT / "ddtree_sglang").glob("*.py")]
    named = {
        name: value
        for text in sources
        for value, name in re.findall(r'^([A-Z_]+) = "(DDTREE_\w+)"$', text, re.M)
    }
    read = {
        name: match[1]
        for name, constant in named.items()
        for text in sources
        if (match := re.search(rf'environ\.get\({constant}\) [!=]= "(\w+)"', text))
    }
    assert read == _VARIABLES
