"""Reading a runtime's flags: made-up sources, the real file, and what is kept beside a bundle."""

from __future__ import annotations

import ast
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_ops import launchflags
from ddtree_ops.launchflags import (
    ARGS_PATH,
    Flag,
    FlagsError,
    FlagSet,
    human_readable_int,
    read_flags,
    read_plugin,
)
from ddtree_ops.lint import RuntimeFacts, facts_of, lint, runtime
from ddtree_ops.runtime import Bundle

SOURCE = """
from sglang.srt.parsers import Registry, NAMES
import elsewhere

COLOURS = ["red", "green"]
MORE = COLOURS + ["blue"]

class ServerArgs:
    size: int = 4
    names: list = dataclasses.field(default_factory=list)

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--size", "--sz", type=int, default=ServerArgs.size, required=True)
        parser.add_argument("--colour", choices=MORE, help="A colour.")
        parser.add_argument("--many", type=float, nargs="+", dest="several")
        parser.add_argument("--bare", action="store_true")
        parser.add_argument("--pair", action=argparse.BooleanOptionalAction)
        parser.add_argument("--old", action=DeprecatedAction, help="Deprecated: Use --bare instead.")
        parser.add_argument("--older", action=DeprecatedStoreTrueAction, new_flag="--bare")
        known = list(Registry.Table.keys())
        parser.add_argument("--parser", choices=known)
        parser.add_argument("--name", choices=NAMES + ["all"])
        parser.add_argument("--dynamic", choices=elsewhere.names())
        parser.add_argument("--json", type=json.loads)
        parser.add_argument(computed(), type=int)
        parser.add_argument("positional")
"""
PARSERS = 'NAMES = ["a", "b"]\nclass Registry:\n    Table: dict = {"x": X, "y": Y}\n'


def read(path: str) -> str | None:
    return PARSERS if path == "sglang/srt/parsers/__init__.py" else None


def test_what_is_read_of_a_source():
    flags = read_flags(SOURCE, read)
    by_name = {flag.name: flag for flag in flags.flags}
    assert list(by_name) == [
        "--size", "--colour", "--many", "--bare", "--pair", "--old", "--older", "--parser", "--name", "--dynamic", "--json",
    ]  # fmt: skip
    size = by_name["--size"]
    assert (size.options, size.dest, size.type, size.default, size.required) == (
        ("--size", "--sz"),
        "size",
        "int",
        4,
        True,
    )
    assert (
        size.line
        == SOURCE.splitlines().index(
            '        parser.add_argument("--size", "--sz", type=int, default=ServerArgs.size, required=True)'
        )
        + 1
    )
    assert by_name["--colour"].choices == ("red", "green", "blue")
    assert (by_name["--many"].dest, by_name["--many"].arity) == ("several", (1, None))
    assert (by_name["--bare"].arity, by_name["--size"].arity) == ((0, 0), (1, 1))
    assert by_name["--pair"].options == ("--pair", "--no-pair")
    assert [(flag.name, flag.instead) for flag in flags.flags if flag.deprecated] == [
        ("--old", "--bare"),
        ("--older", "--bare"),
    ]
    assert by_name["--parser"].choices == ("x", "y")
    assert by_name["--name"].choices == ("a", "b", "all")
    assert by_name["--dynamic"].choices is None, "only running the file would tell"
    assert by_name["--json"].convert("[1]") == [1]
    assert flags.defaults == {"size": 4, "names": []}


def test_flags_that_the_class_adds_elsewhere_are_read_and_names_that_are_computed_are_known_to_be_there():
    assert read_flags(SOURCE, read).partial, "computed() is the name of one"
    plain = SOURCE.replace("        parser.add_argument(computed(), type=int)\n", "")
    assert not read_flags(plain, read).partial
    moved = plain.replace(
        "def add_cli_args(parser):",
        "def add_cli_args(parser):\n        ServerArgs._add(parser)\n\n    @staticmethod\n    def _add(parser):",
        1,
    )
    assert read_flags(moved, read).options == read_flags(plain, read).options
    other = read_flags(plain + "\n    def unused(parser):\n        parser.add_argument('--never')\n", read)
    assert other.find("--never") is None
    assert FlagSet.from_json(json.loads(json.dumps(read_flags(SOURCE, read).to_json()))).partial


def test_a_flag_that_may_be_one_of_those_that_cannot_be_read_is_not_refused(make_target):
    target = make_target({"service": {"args": {"nobody-knows": 1}, "speculative": None}})
    for source, severity in ((SOURCE, "warn"), (SOURCE.replace("computed()", '"--x"'), "error")):
        found = lint(target, RuntimeFacts(read_flags(source, read)))
        assert [one.severity for one in found if one.path[-1] == "nobody-knows"] == [severity]


def test_without_the_rest_of_the_tree_choices_that_stand_there_are_open():
    flags = read_flags(SOURCE)
    assert [flag.name for flag in flags.flags if flag.choices] == ["--colour"]


@pytest.mark.parametrize("source", ["def broken(", "x = 1", "class ServerArgs:\n    pass", "(" * 5000])
def test_what_is_no_such_file(source: str):
    with pytest.raises(FlagsError):
        read_flags(source)


def test_nothing_of_the_source_is_run(tmp_path: Path):
    mark = tmp_path / "ran"
    evil = f"open({str(mark)!r}, 'w')\n{SOURCE}        parser.add_argument('--x', choices=[open({str(mark)!r}, 'w')])\n"
    assert read_flags(evil).find("--x") is not None
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("1k", 1000), ("25.6k", 25600), ("1Ki", 1024), ("2Mi", 2 << 20), (" 3M ", 3_000_000)],
)
def test_numbers_for_people(text: str, value: int):
    assert human_readable_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1K", "1.5Ki", "1.5", "one"])
def test_what_is_no_number_for_people(text: str):
    with pytest.raises(ValueError):
        human_readable_int(text)


def test_the_real_file(stock: Bundle):
    flags = facts_of(stock).flags
    assert flags is not None
    calls = (
        (stock.root / ARGS_PATH)
        .read_text()
        .split("def add_cli_args")[1]
        .split("def from_cli_args")[0]
        .count("add_argument(")
    )
    assert len(flags.flags) == calls > 300
    algorithm = flags.find("--speculative-algorithm")
    assert algorithm and algorithm.choices == ("DFLASH", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
    assert flags.find("--tp-size") is flags.find("--tensor-parallel-size")
    parser = flags.find("--tool-call-parser")
    assert parser and "kimi_k2" in (parser.choices or ())
    opened = [
        flag.name
        for flag in flags.flags
        if flag.type
        not in ("int", "float", "str", "loads", "json_list_type", "human_readable_int", "nullable_str")
    ]
    assert opened == [], "a converter that is not known takes any text"
    assert FlagSet.from_json(json.loads(json.dumps(flags.to_json()))) == flags


def test_plugins_add_choices_and_flags():
    flags = read_flags(SOURCE).with_plugins({"colour": ["black"], "new": [], "sz": ["1"]})
    colour, new = flags.find("--colour"), flags.find("--new")
    assert colour and colour.allows("black") and colour.allows("red") and not colour.allows("white")
    assert new and new.allows("anything")
    assert flags.find("--size") is not None


PLUGIN = """
from dataclasses import dataclass
from pack.names import ALGORITHM
KINDS = ("a", "b")

@dataclass
class Fields:
    width: int = 8

FIELDS = {name: field.default for name, field in Fields.__dataclass_fields__.items()}

def add(parser):
    parser.add_argument("--width", type=int, default=FIELDS["width"], help="x")
    parser.add_argument("--kind", choices=list(KINDS), default="a")
    parser.add_argument("--size", type=int)
    parser.add_argument("--far", default=FIELDS["gone"])
"""


def with_plugin(plugin: str, names: str = 'ALGORITHM = "DDTREE"\n') -> FlagSet:
    known = FlagSet((Flag(("--speculative-algorithm",), "a", choices=("DFLASH",)), Flag(("--size",), "size")))
    return read_plugin(known, plugin, {"pack/names.py": names}.get)


def test_the_file_of_a_plugin_adds_flags_and_the_algorithm():
    flags = with_plugin(PLUGIN)
    algorithm, width, kind = map(flags.find, ("--speculative-algorithm", "--width", "--kind"))
    assert algorithm and algorithm.choices == ("DFLASH", "DDTREE")
    assert width and (width.type, width.default, width.line) == ("int", 8, 0)
    assert kind and (kind.choices, kind.default) == (("a", "b"), "a")
    assert [flag.name for flag in flags.flags].count("--size") == 1 and not flags.partial
    assert FlagSet.from_json(json.loads(json.dumps(flags.to_json()))).flags == flags.flags


@pytest.mark.parametrize("names", ["", "ALGORITHM = 7\n", "ALGORITHM = make()\n", "def ("])
def test_an_algorithm_that_cannot_be_read_is_not_added(names: str):
    algorithm = with_plugin(PLUGIN, names).find("--speculative-algorithm")
    assert algorithm and algorithm.choices == ("DFLASH",)


def test_a_plugin_that_makes_up_names_of_flags_leaves_them_open():
    assert with_plugin("for name in names():\n    parser.add_argument(name)\n").partial


@pytest.mark.parametrize("text", ["def (", "(" * 500, "\0"])
def test_a_plugin_that_is_no_python_is_refused_by_name(text: str):
    with pytest.raises(FlagsError, match=r"ddtree_sglang/flags\.py"):
        with_plugin(text)


def test_sized_by(stock: Bundle, facts):
    assert facts["stock"].sized_by == "block"
    assert facts["patched"].sized_by == "budget"


@pytest.fixture
def bundle(tmp_path: Path, stock: Bundle, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A bundle of its own with the three files that matter, as in the cache."""
    monkeypatch.setattr(runtime, "_kept", {})
    root = tmp_path / stock.digest / "tree"
    for path in (ARGS_PATH, runtime.sizing.RUNNER_PATH):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(stock.root / path, root / path)
    return replace(stock, root=root)


def test_facts_are_read_once_and_kept_beside_the_bundle(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    first = facts_of(bundle)
    kept = bundle.root.parent / "launch-flags.json"
    assert kept.is_file()
    monkeypatch.setattr(runtime, "_kept", {})
    monkeypatch.setattr(runtime, "read_facts", lambda root: pytest.fail("read again"))
    again = facts_of(bundle)
    assert (again.flags, again.sized_by) == (first.flags, "block")


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"digest": "other"}',
        '{"digest": "DIGEST", "reader": "READER", "flags": {"flags": [], "prog": ""}}',
    ],
)
def test_a_damaged_record_is_made_anew(bundle: Bundle, damage: str, monkeypatch: pytest.MonkeyPatch):
    first = facts_of(bundle)
    kept = bundle.root.parent / "launch-flags.json"
    good = kept.read_text()
    reader = json.loads(good)["reader"]
    kept.write_text(damage.replace("DIGEST", bundle.digest).replace("READER", reader))
    monkeypatch.setattr(runtime, "_kept", {})
    assert facts_of(bundle) == first
    assert kept.read_text() == good


def test_another_version_of_the_reader_reads_anew(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    facts_of(bundle)
    kept = bundle.root.parent / "launch-flags.json"
    record = json.loads(kept.read_text())
    kept.write_text(json.dumps({**record, "reader": "old", "flags": None, "problem": "old"}))
    monkeypatch.setattr(runtime, "_kept", {})
    assert facts_of(bundle).flags is not None


def test_a_tree_outside_the_cache_is_read_and_nothing_is_written(bundle: Bundle):
    outside = replace(bundle, root=bundle.root.rename(bundle.root.parent.with_name("vendored")))
    assert facts_of(outside).flags is not None
    assert not (outside.root.parent / "launch-flags.json").exists()


def test_a_tree_without_the_file(bundle: Bundle):
    (bundle.root / ARGS_PATH).unlink()
    facts = facts_of(bundle)
    assert facts.flags is None
    assert facts.problem == f"there is no {ARGS_PATH}"


def test_the_reader_needs_the_standard_library_of_python_3_8_only():
    tree = ast.parse(Path(launchflags.__file__).read_text(), feature_version=(3, 8))
    roots = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    roots |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert roots == {
        "__future__",
        "argparse",
        "ast",
        "collections.abc",
        "dataclasses",
        "functools",
        "json",
        "re",
        "typing",
    }
