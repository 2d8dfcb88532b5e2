"""What the released runtime's own argparse takes and refuses, and what lint says of the same command line.

``ServerArgs.add_cli_args`` of the real file is run, with stand-ins for what the file imports.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
import types
import typing
from decimal import Decimal
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.launchflags import Flag
from ddtree_ops.lint import RuntimeFacts, Severity, lint
from ddtree_ops.paths import shipped
from ddtree_ops.runtime import Bundle
from ddtree_ops.service.argv import launch_argv

_COMMON = "sglang/srt/utils/common.py"
_LIFTED = (
    "human_readable_int",
    "json_list_type",
    "nullable_str",
    "SUPPORTED_LORA_TARGET_MODULES",
    "LORA_TARGET_ALL_MODULES",
)
_PARSERS = (
    ("sglang.srt.function_call.function_call_parser", "FunctionCallParser", "ToolCallParserEnum"),
    ("sglang.srt.parser.reasoning_parser", "ReasoningParser", "DetectorMap"),
)


class Refused(Exception):
    """Argparse would end the process."""


class _Strict(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Refused(message)


class _Module(types.ModuleType):
    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _StandIns(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        ours = fullname.partition(".")[0] in ("sglang", "torch")
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _lifted(root: Path) -> dict[str, Any]:
    """The converters and constants of the real ``common.py``; orjson is read as json."""
    known: dict[str, Any] = {
        **{name: getattr(typing, name) for name in typing.__all__},
        "argparse": argparse,
        "json": json,
        "orjson": json,
        "re": re,
        "Decimal": Decimal,
    }
    for node in ast.parse((root / _COMMON).read_text("utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if getattr(node, "name", getattr(target, "id", "")) in _LIFTED:
            exec(compile(ast.Module([node], []), _COMMON, "exec"), known)
    return {name: known[name] for name in _LIFTED}


def _table(root: Path, module: str, class_name: str, attribute: str) -> type:
    tree = ast.parse((root / (module.replace(".", "/") + ".py")).read_text("utf-8"))
    (owner,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    for node in owner.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if getattr(target, "id", "") == attribute:
            assert isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
            keys = [ast.literal_eval(key) for key in node.value.keys if key is not None]
            return type(class_name, (), {attribute: dict.fromkeys(keys)})
    raise AssertionError(f"{module} has no {class_name}.{attribute}")


def real_parser(root: Path) -> argparse.ArgumentParser:
    """The parser of the tree under ``root``; what it refuses raises :class:`Refused`."""
    source = (root / "sglang/srt/server_args.py").read_text("utf-8")
    before, finder = set(sys.modules), _StandIns()
    sys.meta_path.insert(0, finder)
    try:
        for name, value in _lifted(root).items():
            setattr(import_module("sglang.srt.utils.common"), name, value)
        for module, class_name, attribute in _PARSERS:
            table = _table(root, module, class_name, attribute)
            setattr(import_module(module), class_name, table)
        made = types.ModuleType("real_server_args")
        sys.modules[made.__name__] = made
        exec(compile(source, "server_args.py", "exec"), made.__dict__)
        parser = _Strict(prog="launch_server.py")
        made.ServerArgs.add_cli_args(parser)
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("sglang", "torch", "real_server_args"):
                del sys.modules[name]
    return parser


REFUSING = {"unknown-flag", "foreign-flag", "ambiguous-flag", "flag-value", "flag-choice", "algorithm"}
ODD: tuple[Any, ...] = (
    0, 1, -1, 2.5, -0.5, 1e30, 10**30, "", "a", "x y", "-x", "--tp-size", "é", "1k", "2Ki", "1.5Ki", "4 ", " 5", "1_000",
    "0x10", "nan", "inf", '{"a":1}', "[1]", "{bad", "%s", "$HOME", '"q"', "'", "null", "auto", True, "1e5", "-1e5", "-5", "١٢",
    "-.5", "-5.", "\\",
)  # fmt: skip


@pytest.fixture(scope="module")
def parser(stock: Bundle) -> argparse.ArgumentParser:
    return real_parser(stock.root)


def test_every_flag_is_read_as_the_real_file_makes_it(parser: argparse.ArgumentParser, facts):
    flags: dict[str, Flag] = {flag.options[0]: flag for flag in facts["stock"].flags.flags}
    actions = {action.option_strings[0]: action for action in parser._actions if action.dest != "help"}
    assert set(flags) == set(actions) and len(flags) > 300
    for name, action in actions.items():
        flag = flags[name]
        assert flag.options == tuple(action.option_strings), name
        assert (flag.dest, flag.required) == (action.dest, action.required), name
        assert (flag.choices is None) == (action.choices is None), name
        assert set(flag.choices or ()) == set(action.choices or ()), name
        assert (flag.arity == (0, 0)) == (action.nargs == 0), name
        assert action.nargs == 0 or flag.nargs == action.nargs, name
        assert flag.type == getattr(action.type, "__name__", "str"), name


def test_the_flags_of_the_overlay_are_read_as_it_adds_them(
    stock: Bundle, facts: dict[str, RuntimeFacts], monkeypatch: pytest.MonkeyPatch
):
    """The overlay's own function is run on the real parser."""
    monkeypatch.syspath_prepend(str(shipped("ddtree_sglang").parent))
    parser = real_parser(stock.root)
    before = {action.option_strings[0] for action in parser._actions}
    import_module("ddtree_sglang.flags").add_flags(None, parser)
    known = facts["patched"].flags
    assert known is not None and not known.partial
    added = [action for action in parser._actions if action.option_strings[0] not in before]
    assert len(added) == 3
    for action in [parser._option_string_actions["--speculative-algorithm"], *added]:
        flag = known.find(action.option_strings[0])
        assert flag is not None
        assert flag.options == tuple(action.option_strings)
        assert (flag.dest, flag.default, flag.nargs) == (action.dest, action.default, action.nargs)
        assert (flag.choices or ()) == tuple(action.choices or ())
        assert flag.type == getattr(action.type, "__name__", "str")


def _value(flag: Flag | None, chance: random.Random) -> Any:
    if flag is not None and flag.arity == (0, 0):
        return chance.choice([True, True, True, False, None, 1, "x"])

    def word() -> Any:
        if flag is not None and flag.choices and chance.random() < 0.6:
            return chance.choice(flag.choices)
        return chance.choice(ODD)

    if flag is not None and flag.nargs is not None:
        return [one for one in (word() for _ in range(chance.randint(1, 3))) if one is not True] or True
    return word()


def _key(name: str, chance: random.Random) -> str:
    how = chance.random()
    if how < 0.1:
        return name[: chance.randint(1, len(name))]
    return name + "x" if how < 0.13 else name.replace("-", "_") if how < 0.16 else name


@pytest.mark.parametrize("seed", range(2))
def test_lint_refuses_what_argparse_refuses_and_nothing_else(
    seed: int, parser: argparse.ArgumentParser, facts: dict[str, RuntimeFacts]
):
    """Random flags, abbreviations and odd values, as they travel in ``ExecStart``."""
    chance, known = random.Random(seed), facts["stock"].flags
    assert known is not None
    names = [name[2:] for name in known.options if name.startswith("--")]
    seen = {True: 0, False: 0}
    for _ in range(300):
        picked = chance.sample(names, chance.randint(1, 3))
        arguments = {_key(name, chance): _value(known.find(f"--{name}"), chance) for name in picked}
        service = Service(name="s", unit="s.service", runtime="r", venv="/v", model="/m/K", args=arguments)
        target = Target(host=Host(name="h", services={"s": service}), service=service, runtime=RuntimeSpec())
        try:
            words = launch_argv(service)[3:]
        except ConfigError:
            continue
        refusals = [
            one
            for one in lint(target, facts["stock"])
            if one.severity is Severity.ERROR and one.rule in REFUSING
        ]
        try:
            parser.parse_args(words)
        except Refused as error:
            assert refusals, f"{words}: argparse says {error}"
        else:
            assert not refusals, f"{words}: argparse takes it, lint says {refusals[0]}"
        seen[bool(refusals)] += 1
    assert min(seen.values()) > 40
