"""The launch flags that a runtime really has, read from its argparse source and never run.

``sglang/srt/server_args.py`` is parsed with :mod:`ast`: every ``add_argument`` call of ``ServerArgs.add_cli_args`` with
its option strings, type, choices and action. Choices that stand elsewhere in the tree (``ReasoningParser.DetectorMap``)
are looked up there. What only running the file would tell is left open: a choice that cannot be read is any value.

Standard library of Python >= 3.8 only, and nothing of this package: the file is also copied beside the lab engine.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Read = Callable[[str], "str | None"]

__all__ = [
    "ALGORITHM_FLAG",
    "ARGS_PATH",
    "PLUGIN_PATH",
    "Flag",
    "FlagSet",
    "FlagsError",
    "human_readable_int",
    "read_flags",
    "read_plugin",
]

ARGS_PATH = "sglang/srt/server_args.py"
"""Path of the file within a tree."""

PLUGIN_PATH = "ddtree_sglang/flags.py"
"""Path, within a bundle, of the file in which the plugin of the overlay adds its flags."""

ALGORITHM_FLAG = "--speculative-algorithm"

_CLASS, _METHOD = "ServerArgs", "add_cli_args"
_BARE = ("store_true", "store_false", "store_const", "count", "help", "version", "deprecated", "boolean")
_CLASSES = {
    "BooleanOptionalAction": "boolean",
    "DeprecatedAction": "deprecated",
    "DeprecatedStoreTrueAction": "store_true",
}
_DEPRECATED = re.compile(r"\bdeprecated\b", re.IGNORECASE)
_INSTEAD = re.compile(r"\bUse (--?[\w-]+|[A-Z][A-Z0-9_]+=\S+)")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)")


class FlagsError(Exception):
    """The flags cannot be read: not Python, or no ``add_argument`` calls where they are expected."""


def human_readable_int(text: str) -> int:
    """An integer, or one with a suffix k, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti (of 1024, no decimals).

    :raises ValueError: anything else.
    """
    found = _NUMBER.fullmatch(text.strip())
    if not found:
        return int(text)
    number, suffix = found.groups()
    power = "kmgt".index(suffix[0].lower()) + 1
    if suffix.endswith("i"):
        return int(number) * int(1024**power)
    return round(float(number) * 1000.0**power)


_TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "loads": json.loads,
    "json_list_type": json.loads,
    "human_readable_int": human_readable_int,
}
"""What a value is converted by; other types take any text."""


@dataclass(frozen=True)
class Flag:
    """One ``add_argument`` call.

    :param options: option strings with their dashes, in order; those of a boolean pair include ``--no-...``.
    :param dest: attribute the value goes to.
    :param type: name of the converter: ``int``, ``float``, ``str``, ``loads`` (JSON), ``human_readable_int`` ...
    :param choices: allowed values; None: any value, or only running the file would tell.
    :param nargs: as argparse has it: None, a number, ``*``, ``+``, ``?``.
    :param action: ``store``, ``store_true``, ``append``, ``boolean`` (a pair), ``deprecated`` (does nothing) ...
    :param instead: what its help text names in its place, where it is deprecated.
    :param line: 1-based line of the call in ``server_args.py``; 0: added by a plugin.
    """

    options: tuple[str, ...]
    dest: str
    type: str = "str"
    choices: tuple[Any, ...] | None = None
    nargs: int | str | None = None
    action: str = "store"
    default: Any = None
    required: bool = False
    deprecated: bool = False
    instead: str = ""
    line: int = 0

    @property
    def name(self) -> str:
        """The first long option: the name that messages use."""
        return next((option for option in self.options if option.startswith("--")), self.options[0])

    @property
    def arity(self) -> tuple[int, int | None]:
        """Least and most number of words after the flag; None: no limit."""
        if self.action in _BARE:
            return 0, 0
        if isinstance(self.nargs, int):
            return self.nargs, self.nargs
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(str(self.nargs), (1, 1))

    def convert(self, word: str) -> Any:
        """The value argparse would make of a word.

        :raises ValueError: the word is no value of the flag's type.
        """
        return _TYPES.get(self.type, str)(word)

    def allows(self, value: Any) -> bool:
        """True where a converted value is among the choices, or there are none."""
        return self.choices is None or value in self.choices


@dataclass(frozen=True)
class FlagSet:
    """The flags of a runtime.

    :param prog: program name that its usage message shows.
    :param partial: there are more, whose names only running the file would tell.
    :param defaults: of the fields of ``ServerArgs``; empty once read back from JSON.
    """

    flags: tuple[Flag, ...]
    prog: str = ""
    partial: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def find(self, option: str) -> Flag | None:
        """The flag with exactly this option string (``--tp-size``)."""
        return self._by_option.get(option)

    @cached_property
    def _by_option(self) -> Mapping[str, Flag]:
        return {name: flag for flag in reversed(self.flags) for name in flag.options}

    def beginning(self, option: str) -> tuple[tuple[str, Flag], ...]:
        """Option strings that begin with ``option``, and their flags: what argparse takes an abbreviation for."""
        return tuple((name, flag) for flag in self.flags for name in flag.options if name.startswith(option))

    @property
    def options(self) -> tuple[str, ...]:
        """All option strings."""
        return tuple(name for flag in self.flags for name in flag.options)

    def with_plugins(self, extra: Mapping[str, Sequence[str]]) -> FlagSet:
        """These flags and what plugins add: flag name without dashes -> further choices, none for any value."""
        flags = list(self.flags)
        for name, choices in extra.items():
            option = "--" + name
            for index, flag in enumerate(flags):
                if option in flag.options:
                    known = None if not choices or flag.choices is None else (*flag.choices, *choices)
                    flags[index] = replace(flag, choices=known)
                    break
            else:
                flags.append(
                    Flag((option,), name.replace("-", "_"), choices=tuple(choices) or None, nargs="*")
                )
        return replace(self, flags=tuple(flags))

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser these flags; classes of actions that only the runtime has are plain ones here."""
        for flag in self.flags:
            options: dict[str, Any] = {"dest": flag.dest, "default": flag.default}
            names = flag.options
            if flag.action == "deprecated":
                options.update(action="store_const", const=flag.default)
            elif flag.action in _BARE and flag.action != "boolean":
                options.update(action=flag.action)
            else:
                options.update(type=_TYPES.get(flag.type, str), nargs=flag.nargs, choices=flag.choices)
                options.update(required=flag.required, action=flag.action)
            if flag.action == "boolean":
                names = tuple(name for name in names if not name.startswith("--no-"))
                options = {"dest": flag.dest, "action": "store_true", "default": flag.default}
                parser.add_argument(
                    *(name for name in flag.options if name.startswith("--no-")),
                    dest=flag.dest,
                    action="store_false",
                    default=flag.default,
                )
            parser.add_argument(*names, **options)

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form, read back by :meth:`from_json`."""
        return {
            "prog": self.prog,
            "partial": self.partial,
            "flags": [
                {
                    name: list(value) if isinstance(value, tuple) else value
                    for name, value in vars(flag).items()
                    if value not in (None, False, "", "str", "store") or name == "default"
                }
                for flag in self.flags
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FlagSet:
        """The flags of :meth:`to_json`.

        :raises ValueError, KeyError, TypeError: something else.
        """
        flags = []
        for item in value["flags"]:
            choices = item.get("choices")
            known = {**item, "options": tuple(item["options"])}
            if choices is not None:
                known["choices"] = tuple(choices)
            flags.append(Flag(**known))
        if not flags:
            raise ValueError("no flags")
        return cls(tuple(flags), str(value["prog"]), bool(value["partial"]))


def read_flags(source: str, read: Read | None = None) -> FlagSet:
    """The flags that a ``server_args.py`` defines.

    :param source: its text.
    :param read: gives the text of another file of the tree by its path (``sglang/srt/...``), None where there is none:
        then choices that stand there are read too.
    :raises FlagsError: it is no Python, or defines no flags.
    """
    reader = _Reader(_parsed(source, ARGS_PATH), read)
    flags = tuple(filter(None, (reader.flag(call) for call in reader.calls)))
    if not flags:
        raise FlagsError(f"{ARGS_PATH} has no add_argument calls in {_CLASS}.{_METHOD}: not a file we know")
    prog = "".join(re.findall(r'ArgumentParser\(prog="([^"]+)"', source)[:1]) or "launch_server.py"
    return FlagSet(flags, prog, any(map(reader.nameless, reader.calls)), reader.defaults)


def read_plugin(flags: FlagSet, source: str, read: Read | None = None) -> FlagSet:
    """The flags of a tree and those that the file :data:`PLUGIN_PATH` of its overlay adds.

    Read are the ``add_argument`` calls wherever they stand, and ``ALGORITHM``, a constant there or imported: the further
    choice of ``--speculative-algorithm``.

    :param source: the text of that file.
    :param read: as for :func:`read_flags`.
    :raises FlagsError: it is no Python.
    """
    module = _parsed(source, PLUGIN_PATH)
    reader = _Reader(module, read)
    added = []
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            reader.read_fields(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            added.append(node)
    known = {name for flag in flags.flags for name in flag.options}
    found = tuple(replace(flag, line=0) for flag in map(reader.flag, added) if flag)
    algorithm = reader.value(ast.Name(id="ALGORITHM", ctx=ast.Load()))
    more = {ALGORITHM_FLAG.lstrip("-"): [algorithm]} if isinstance(algorithm, str) else {}
    extended = flags.with_plugins(more)
    return replace(
        extended,
        flags=(*extended.flags, *(flag for flag in found if not known.intersection(flag.options))),
        partial=flags.partial or any(map(reader.nameless, added)),
    )


def _parsed(source: str, path: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise FlagsError(f"{path} is not valid Python: {error}") from error
    except (RecursionError, MemoryError):
        raise FlagsError(f"{path} is nested too deeply to be read") from None


class _Unreadable(Exception):
    """Not a value that can be read without running the file."""


class _Reader:
    """Constants, field defaults and ``add_argument`` calls of a module; constants of the modules it imports from."""

    def __init__(self, module: ast.Module, read: Read | None) -> None:
        self.names: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.calls: list[ast.Call] = []
        self._imports: dict[str, tuple[str, str]] = {}
        self._read = read
        self._modules: dict[str, ast.Module | None] = {}
        for node in module.body:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self._imports[alias.asname or alias.name] = (node.module, alias.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.names[node.targets[0].id] = self.value(node.value)
            elif isinstance(node, ast.ClassDef) and node.name == _CLASS:
                self._read_class(node)

    def _read_class(self, node: ast.ClassDef) -> None:
        methods = {member.name: member for member in node.body if isinstance(member, ast.FunctionDef)}
        self.read_fields(node)
        todo = [_METHOD]
        for name in todo:
            for inner in ast.walk(methods[name]) if name in methods else ():
                if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
                    self.names.setdefault(inner.targets[0].id, self.value(inner.value))
                elif isinstance(inner, ast.Call):
                    called = getattr(inner.func, "attr", "")
                    if called == "add_argument":
                        self.calls.append(inner)
                    elif called in methods and called not in todo:
                        todo.append(called)
        self.calls.sort(key=lambda call: call.lineno)

    def read_fields(self, node: ast.ClassDef) -> None:
        """Remember the defaults of the fields of a dataclass."""
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                self.defaults[member.target.id] = self.value(member.value)

    def value(self, node: ast.expr | None) -> Any:
        """The value of an expression, None where only running the file would tell."""
        try:
            return None if node is None else self._value(node)
        except (_Unreadable, TypeError, ValueError, RecursionError):
            return None

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            if self.names.get(node.id) is not None:
                return self.names[node.id]
            return self._imported(node.id, ())
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in self._imports:
                return self._imported(node.value.id, (node.attr,))
            if node.attr in self.defaults:
                return self.defaults[node.attr]
            raise _Unreadable
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            if node.slice.value in self.defaults:  # FIELDS["name"] of the fields of a dataclass
                return self.defaults[node.slice.value]
            raise _Unreadable
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            left, right = self._value(node.left), self._value(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self._value(item) for item in node.elts] if node.elts else ast.literal_eval(node)
        if isinstance(node, ast.Call):
            return self._called(node)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise _Unreadable from None

    def _called(self, node: ast.Call) -> Any:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "field":
            made = ast.dump(node.keywords[0].value) if node.keywords else ""
            return [] if "'list'" in made else {} if "'dict'" in made else False
        if name == "keys" and isinstance(node.func, ast.Attribute):
            return list(self._value(node.func.value))
        if name in ("list", "sorted", "tuple", "set") and len(node.args) == 1:
            return list(self._value(node.args[0]))
        raise _Unreadable

    def _imported(self, name: str, attributes: Sequence[str]) -> Any:
        """A constant of another module of the tree, or of a class there; of a mapping its keys."""
        module, original = self._imports.get(name, ("", ""))
        body: Sequence[ast.stmt] = getattr(self._module(module), "body", ())
        wanted = [original, *attributes]
        for part in wanted[:-1]:
            classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == part]
            body = classes[0].body if classes else ()
        for node in body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and getattr(target, "id", "") == wanted[-1]:
                if isinstance(node.value, ast.Dict):
                    return {ast.literal_eval(key): None for key in node.value.keys if key is not None}
                return ast.literal_eval(node.value) if node.value is not None else None
        raise _Unreadable

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            self._modules[name] = None
            path = name.replace(".", "/")
            for place in (f"{path}.py", f"{path}/__init__.py") if self._read and name else ():
                text = self._read(place) if self._read else None
                if text is not None:
                    try:
                        self._modules[name] = ast.parse(text)
                    except (SyntaxError, ValueError):
                        self._modules[name] = None
                    break
        return self._modules[name]

    def nameless(self, call: ast.Call) -> bool:
        """True where only running the file would tell what the call adds."""
        return not all(isinstance(self.value(name), str) for name in call.args) or not call.args

    def flag(self, call: ast.Call) -> Flag | None:
        """The flag of one call; None for a positional, or one whose name cannot be read."""
        options = tuple(name for name in map(self.value, call.args) if isinstance(name, str))
        if not options or not options[0].startswith("-"):
            return None
        given = {str(key.arg): key.value for key in call.keywords}
        action, deprecated = "store", False
        if "action" in given:
            word = self.value(given["action"])
            if not isinstance(word, str):
                class_name = getattr(given["action"], "attr", getattr(given["action"], "id", ""))
                word = _CLASSES.get(class_name, "store")
                deprecated = "Deprecated" in class_name
            action = word
        nargs, choices = self.value(given.get("nargs")), self.value(given.get("choices"))
        if nargs == 0 and action == "store":
            action = "store_true"
        kind = given.get("type")
        help_text = _text(given.get("help"))
        deprecated = deprecated or bool(_DEPRECATED.search(help_text[:80]))
        instead = self.value(given.get("new_flag")) or "".join(_INSTEAD.findall(help_text)[:1])
        dest = self.value(given.get("dest"))
        if dest is None:
            dest = next((name for name in options if name.startswith("--")), options[0])
            dest = dest.lstrip("-").replace("-", "_")
        if action == "boolean":
            options += tuple("--no-" + name[2:] for name in options if name.startswith("--"))
        default = self.value(given.get("default"))
        return Flag(
            options=options,
            dest=str(dest),
            type=str(getattr(kind, "id", getattr(kind, "attr", "str"))),
            choices=tuple(choices) if isinstance(choices, (list, tuple)) else None,
            nargs=None if action in _BARE else nargs,
            action=action,
            default=False if default is None and action == "store_true" else default,
            required=bool(self.value(given.get("required"))),
            deprecated=deprecated,
            instead=str(instead) if deprecated else "",
            line=call.lineno,
        )


def _text(node: ast.expr | None) -> str:
    """The constant parts of a text."""
    parts: Iterable[Any] = ast.walk(node) if node is not None else ()
    return "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
