"""The documentation says what is so: fields, steps, commands, links, examples and exit codes exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
import yaml
from pydantic import BaseModel

from ddtree_ops.checks.prompts import load_prompts
from ddtree_ops.cli.app import app
from ddtree_ops.diagnose.library import load_library
from ddtree_ops.diagnose.trials import try_signature
from ddtree_ops.errors import ExitCode
from ddtree_ops.inventory import load_inventory
from ddtree_ops.inventory.models import Host, Router, RuntimeSpec
from ddtree_ops.lab.engine import lab_engine
from ddtree_ops.playbook.load import load_playbook
from ddtree_ops.playbook.models import STEPS
from ddtree_ops.playbook.run import exit_code

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
INVENTORY_PAGE = ROOT / "docs" / "inventory.md"
PAGES_BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A model and every model in its fields."""
    yield model
    for info in model.model_fields.values():
        for inner in (info.annotation, *get_args(info.annotation)):
            for leaf in (inner, *get_args(inner)):
                if isinstance(leaf, type) and issubclass(leaf, BaseModel):
                    yield from models(leaf)


def fields() -> list[tuple[str, str]]:
    """``(model, field)`` of everything an inventory can hold; ``name`` is the key above except for a GPU's."""
    found = dict.fromkeys(model for root in (Host, RuntimeSpec, Router) for model in models(root))
    return [
        (model.__name__, name)
        for model in found
        for name in model.model_fields
        if name != "name" or model.__name__ == "GPU"
    ]


def spans(page: Path) -> set[str]:
    """Texts in backticks, outside code blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([^`\n]+)`", text))


def test_every_layer_of_models_is_looked_at():
    assert {model for model, _ in fields()} == {
        "Host",
        "SSH",
        "GPU",
        "SecretSource",
        "Service",
        "Speculative",
        "Limits",
        "Lint",
        "Restart",
        "Health",
        "Rollback",
        "Baseline",
        "RuntimeSpec",
        "Nodes",
        "Router",
        "RouterHealth",
    }


@pytest.mark.parametrize(("model", "field"), fields())
def test_every_setting_is_documented(model: str, field: str):
    rows = {}
    for table in re.split(r"\n\n", INVENTORY_PAGE.read_text("utf-8")):
        head = re.match(r"\| `([\w.]+)` \| meaning", table)
        if head:
            rows[head[1]] = {
                name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
            }
    table_of = {
        "Host": "hosts.NAME",
        "Service": "services.NAME",
        "RuntimeSpec": "runtimes.NAME",
        "SecretSource": "secrets.NAME",
        "Router": "routers.NAME",
        "RouterHealth": "routers.NAME.health",
    }
    assert field in rows[table_of.get(model, model.lower())]


def test_no_setting_is_documented_that_is_not_there():
    known = {field for _, field in fields()}
    tables = [
        part
        for part in INVENTORY_PAGE.read_text("utf-8").split("\n\n")
        if re.match(r"\| `[\w.]+` \| m", part)
    ]
    assert len(tables) == len({model for model, _ in fields()})
    named = {
        name
        for table in tables
        for row in table.splitlines()[2:]
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named <= known


@pytest.mark.parametrize(("model", "field"), fields())
def test_every_setting_has_a_description_in_the_schema(model: str, field: str):
    found = {one.__name__: one for root in (Host, RuntimeSpec, Router) for one in models(root)}
    info = found[model].model_fields[field]
    inner = [leaf for leaf in (info.annotation, *get_args(info.annotation)) if isinstance(leaf, type)]
    described = any(issubclass(leaf, BaseModel) and leaf.__doc__ for leaf in inner)
    assert info.description or described


@pytest.mark.parametrize("kind", STEPS)
def test_every_step_and_its_settings_are_documented(kind: str):
    table = (
        INVENTORY_PAGE.read_text("utf-8").partition("| step | does | settings |\n")[2].partition("\n\n")[0]
    )
    (row,) = [row.split("|") for row in table.splitlines() if f"`{kind}`" in row.split("|")[1]]
    assert set(re.findall(r"`(\w+)`", row[3])) == {
        name for name in STEPS[kind].model_fields if name != "kind"
    }


def test_every_named_prompt_is_documented():
    assert set(load_prompts()) <= spans(INVENTORY_PAGE)


@PAGES_BY_NAME
def test_relative_links_lead_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8"))
    broken = [
        target
        for target in targets
        if not target.startswith(("http://", "https://", "#"))
        and not (page.parent / target.partition("#")[0]).exists()
    ]
    assert broken == []


def test_the_readme_leads_to_every_page():
    reached = [README]
    for page in reached:
        for target in re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", page.read_text("utf-8")):
            other = (page.parent / target).resolve()
            if other not in reached:
                reached.append(other)
    assert set(PAGES) <= set(reached)


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def code_lines(text: str) -> Iterator[str]:
    """Lines of code blocks: fenced, or indented after a blank line (or another such line)."""
    fenced, code, before = False, False, ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
            before = ""
            continue
        code = fenced or (line.startswith("    ") and (code or not before.strip()))
        if code:
            yield line.strip()
        before = line


def commands(text: str) -> Iterator[list[str]]:
    """Words after ``ddtree-ops`` of every command in code blocks and in backticks."""
    lines = [*code_lines(text), *re.findall(r"`(?:\$ )?((?:\S+ )?ddtree-ops [^`\n]+)`", text)]
    for line in lines:
        for part in re.split(r" \| |\$ |; |&& ", line):
            match = re.match(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?ddtree-ops(?= )(.*)", part.strip())
            if match:
                words = shlex.split(match[1].partition(" >")[0].partition(" 2>")[0], comments=True)
                yield [word for word in words if word]


def all_commands() -> list[tuple[str, list[str]]]:
    return [(page.name, words) for page in PAGES for words in commands(page.read_text("utf-8"))]


@cache
def the_command() -> Any:
    """The command with all below it; building it takes a tenth of a second."""
    return typer.main.get_command(app)


def parse(words: list[str]) -> Any:
    """Parse a command line down to the command, running nothing.

    :raises click.UsageError: no such command or option, a missing argument.
    """
    command = the_command()
    context = command.make_context("ddtree-ops", list(words), resilient_parsing=False)
    while getattr(command, "commands", None):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return context


def test_there_are_commands_in_the_documentation():
    found = all_commands()
    assert len(found) > 40
    assert {page for page, _ in found} >= {"README.md", "inventory.md", "runtime.md", "checks.md", "lab.md"}


@pytest.mark.parametrize(("page", "words"), all_commands(), ids=lambda value: " ".join(value)[:60])
def test_commands_parse(page: str, words: list[str]):
    assert parse([("x" if word.isupper() else word) for word in words]).command is not None


@pytest.mark.parametrize(
    "words", [["deplyo", "ct200"], ["deploy", "ct200", "--dry"], ["patch", "chek", "x"], ["patch", "check"]]
)
def test_commands_that_do_not_exist_do_not_parse(words: list[str]):
    with pytest.raises(Exception, match=r"No such|Missing|Got unexpected"):
        parse(words)


# ---------------------------------------------------------------------------------------------------------------------
# Examples


def blocks(mark: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for text in re.findall(
            rf"^ *```yaml {mark}\n(.*?)^ *```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        ):
            found.append((page.name, text))
    return found


@pytest.mark.parametrize(("page", "text"), blocks("inventory"))
def test_inventories_in_the_documentation_load(page: str, text: str, tmp_path: Path):
    path = tmp_path / "site.yaml"
    path.write_text(text, "utf-8")
    assert load_inventory(str(path)).hosts


@pytest.mark.parametrize(("page", "text"), blocks("playbook"))
def test_playbooks_in_the_documentation_load(page: str, text: str, tmp_path: Path):
    path = tmp_path / "book.yaml"
    path.write_text(text, "utf-8")
    assert load_playbook(str(path)).steps


@pytest.mark.parametrize(("page", "text"), blocks("signature"))
def test_signatures_in_the_documentation_do_what_they_say(page: str, text: str, tmp_path: Path):
    path = tmp_path / f"{yaml.safe_load(text)['id']}.yaml"
    path.write_text(text, "utf-8")
    library = load_library(tmp_path)
    assert try_signature(library[path.stem], library).problems == ()


def test_every_yaml_block_says_what_it_is():
    assert blocks("inventory") and blocks("playbook") and blocks("signature")
    for page in PAGES:
        fences = re.findall(r"^ *```(yaml.*)$", page.read_text("utf-8"), re.MULTILINE)
        assert [
            fence for fence in fences if fence.split()[1:] not in (["inventory"], ["playbook"], ["signature"])
        ] == []


# ---------------------------------------------------------------------------------------------------------------------
# Exit codes, switches


def test_exit_codes_of_the_readme():
    (text,) = re.findall(r"^Exit codes: (.*?)\. ", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert [int(number) for number in re.findall(r"(?:^|,\s)(\d+) ", text)] == sorted(map(int, ExitCode))


def test_exit_codes_of_the_architecture_and_checks_pages():
    text = (ROOT / "docs/architecture.md").read_text("utf-8").partition("## Exit codes")[2]
    assert {int(number) for number in re.findall(r"(?:^|· ?|\n)(\d+) ", text)} == {
        int(code) for code in ExitCode
    }
    table = (ROOT / "docs/checks.md").read_text("utf-8").partition("| code |")[2].partition("\n\n")[0]
    assert {int(number) for number in re.findall(r"\| (\d+) \|", table)} == {int(code) for code in ExitCode}


def test_order_of_exit_codes_over_hosts():
    from ddtree_ops.playbook import run

    (text,) = re.findall(
        r"first of these that occurred: ([\d, ]+)\.", (ROOT / "docs/checks.md").read_text("utf-8")
    )
    assert exit_code([]) is ExitCode.INCONCLUSIVE
    assert [int(number) for number in text.split(", ")] == [int(code) for code in run._WORST_FIRST]


def test_switches_of_the_lab_engine_are_documented():
    source = Path(lab_engine.__file__).read_text("utf-8")
    used = set(re.findall(r"""(?:env|environ\.get)\(["'](LAB_\w+)["']""", source))
    page = (ROOT / "docs/lab.md").read_text("utf-8")
    assert len(used) >= 10
    assert used == set(re.findall(r"^\| `(LAB_\w+)`", page, re.MULTILINE))
