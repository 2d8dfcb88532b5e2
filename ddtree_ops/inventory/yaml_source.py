"""YAML that people write: every key and value keeps its place, so that every message names file and line.

Read as YAML 1.2 where 1.1 surprises: ``yes``/``no``/``on``/``off`` are text (:class:`BareWord`), dates and octal
numbers are refused. Duplicate keys are refused, anchors and ``<<`` work, ``${NAME}`` and ``${NAME:-default}`` are
replaced in text values (``$${`` stands for ``${``) and stay text.

Messages have one shape: ``file:line: key.path: problem``, with the nearest allowed word where there is one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from ddtree_ops.errors import ConfigError
from ddtree_ops.paths import lab_dir
from ddtree_ops.secret import MASK, redact

__all__ = [
    "BareWord",
    "Document",
    "KeyPath",
    "Mark",
    "Problem",
    "check",
    "config_error",
    "display",
    "dotted",
    "environment",
    "load_document",
    "load_model",
    "model_keys",
    "nearest",
    "parse_document",
    "suggestion",
]

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of a document."""

ModelT = TypeVar("ModelT", bound=BaseModel)

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_INTERPOLATION = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})?")
_MAX_VALUES = 20_000


class BareWord(str):
    """``yes``, ``no``, ``on`` or ``off`` without quotes: a boolean to YAML 1.1, text here."""

    __slots__ = ()


@dataclass(frozen=True)
class Mark:
    """Where an entry is written; lines and columns count from 1.

    :param line: line of the key, or of the item where the entry is in a list.
    :param value_line: line where the value starts.
    :param raw: a scalar's text as written, without quotes; empty for lists and mappings.
    :param path: where the entry is written: differs from where it counts after a merge.
    """

    line: int
    column: int
    value_line: int
    raw: str = ""
    path: KeyPath = ()


@dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong in a file; ``str()`` is the line shown."""

    source: str
    line: int
    column: int
    path: str
    text: str

    def __str__(self) -> str:
        return (
            f"{self.source}:{self.line}: {self.path}: {self.text}"
            if self.path
            else f"{self.source}:{self.line}: {self.text}"
        )


@dataclass(frozen=True)
class Document:
    """A parsed file: plain data (dict, list, str, int, float, bool, None) and the place of every entry.

    :param source: the file as shown in messages.
    :param problems: what is wrong with the text itself; the entries concerned are null in ``data``.
    """

    source: str
    data: Any
    marks: Mapping[KeyPath, Mark] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def broken(self) -> set[KeyPath]:
        """Entries that :attr:`problems` speak of."""
        shown = {problem.path for problem in self.problems}
        return {path for path, mark in self.marks.items() if dotted(mark.path) in shown} if shown else set()

    def mark(self, path: KeyPath) -> Mark:
        """Place of an entry, or of the nearest entry around it that is written down."""
        for end in range(len(path), -1, -1):
            found = self.marks.get(path[:end])
            if found:
                return found
        return Mark(1, 1, 1)

    def line_of(self, path: KeyPath) -> int:
        """1-based line of an entry (of its key), or of the nearest entry around it."""
        return self.mark(path).line

    def where(self, path: KeyPath) -> str:
        """``file:line`` of an entry."""
        return f"{self.source}:{self.line_of(path)}"

    def get(self, path: KeyPath, default: Any = None) -> Any:
        """Value at ``path``, or ``default`` where there is none."""
        value = self.data
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return default
        return value

    def problem(self, path: KeyPath, text: str) -> Problem:
        """A problem at ``path``; the entry need not exist (a missing key is shown at what should hold it)."""
        known = path
        while known and known not in self.marks:
            known = known[:-1]
        mark = self.mark(known)
        return Problem(self.source, mark.line, mark.column, dotted(mark.path + path[len(known) :]), text)


def dotted(path: KeyPath) -> str:
    """``hosts.ct200.services[0]``; a key that holds a dot or a space is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if re.fullmatch(r"[^.\[\]\s'\"]+", part) else repr(str(part))
            text += f".{shown}" if text else shown
    return text


def display(path: Path) -> str:
    """A path as shown to people: relative where it lies below the current directory."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word most like ``word``, or None where none is like it."""
    found = _nearest_all(word, allowed)
    return found[0] if found else None


def _nearest_all(word: str, allowed: Iterable[str]) -> list[str]:
    """The allowed words most like ``word``, in their order: more than one where they are equally like it."""
    from difflib import SequenceMatcher, get_close_matches

    names = {name.lower().replace("_", "-"): name for name in allowed}
    plain = word.lower().replace("_", "-")
    found = get_close_matches(plain, list(names), n=8, cutoff=0.6)
    likeness = [SequenceMatcher(None, name, plain).ratio() for name in found]
    return [names[name] for name in names if name in found[: likeness.count(max(likeness, default=0))]]


def suggestion(word: str, allowed: Iterable[str]) -> str:
    """``(did you mean 'X'?)``, or ``(allowed: a, b, c)`` where nothing is near, or an empty text."""
    names = list(dict.fromkeys(allowed))
    near = _nearest_all(word, names)
    if near:
        return f" (did you mean {' or '.join(repr(name) for name in near)}?)"
    return f" (allowed: {', '.join(names)})" if names else ""


def environment() -> dict[str, str]:
    """The environment used for ``${NAME}``: the process's, in which ``DDTREE_OPS_LAB_DIR`` is always set."""
    return {**os.environ, "DDTREE_OPS_LAB_DIR": str(lab_dir())}


def config_error(
    source: str, problems: Sequence[Problem], *, hint: str = "", what: str = "file", state: str = ""
) -> ConfigError:
    """The error that lists ``problems``, sorted by line, without repetition."""
    lines = tuple(dict.fromkeys(str(problem) for problem in sorted(problems)))
    count = f"{len(lines)} problem{'s' if len(lines) != 1 else ''}"
    return ConfigError(f"{what} {source} has {count}", details=lines, hint=hint, state=state)


# ---------------------------------------------------------------------------------------------------------------------
# Text to data


class _Builder:
    """Turns composed nodes into data, collecting marks and problems."""

    def __init__(self, source: str, env: Mapping[str, str] | None) -> None:
        self.source = source
        self.env = env
        self.marks: dict[KeyPath, Mark] = {}
        self.problems: list[Problem] = []
        self.open: set[int] = set()
        self.count = 0

    def report(self, node: Any, path: KeyPath, text: str) -> None:
        mark = node.start_mark
        self.problems.append(Problem(self.source, mark.line + 1, mark.column + 1, dotted(path), text))

    def build(self, node: Any, path: KeyPath, key: Any = None) -> Any:
        start, first = node.start_mark, (key or node).start_mark
        raw = node.value if isinstance(node, yaml.ScalarNode) else ""
        self.marks[path] = Mark(first.line + 1, first.column + 1, start.line + 1, raw, path)
        self.count += 1
        if self.count > _MAX_VALUES:
            if self.count == _MAX_VALUES + 1:
                self.report(node, path, f"more than {_MAX_VALUES} values: too many aliases?")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if id(node) in self.open:
            self.report(key or node, path, "an alias inside what it names")
            return None
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                if node.tag != _TAG + "seq":
                    self.report(node, path, f"the tag {_tag(node.tag)} is not supported")
                return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
            if node.tag != _TAG + "map":
                self.report(node, path, f"the tag {_tag(node.tag)} is not supported")
            return self.mapping(node, path)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        seen: dict[str, int] = {}
        merges: list[tuple[Any, Any]] = []
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                merges.append((key, value))
                continue
            if not isinstance(key, yaml.ScalarNode):
                self.report(key, path, "a key is text, not a list or a mapping")
                continue
            truth = key.tag == _TAG + "bool" and key.value.lower() in ("true", "false")
            if truth or key.tag not in (_TAG + "str", _TAG + "bool", _TAG + "value"):
                self.report(key, (*path, key.value), f"a key is text: write '{key.value}'")
                continue
            name = key.value
            if name in seen:
                self.report(key, (*path, name), f"the key is given twice; the first is on line {seen[name]}")
                continue
            seen[name] = key.start_mark.line + 1
            result[name] = self.build(value, (*path, name), key)
        for key, value in merges:
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                self.merge(key, source, path, result)
        return result

    def merge(self, key: Any, source: Any, path: KeyPath, result: dict[str, Any]) -> None:
        """``<<``: entries of ``source`` that ``result`` does not have yet."""
        if not isinstance(source, yaml.MappingNode):
            self.report(key, (*path, "<<"), "<< needs an alias of a mapping, or a list of them")
            return
        if id(source) in self.open:
            self.report(key, (*path, "<<"), "an alias inside what it names")
            return
        inner = _Builder(self.source, self.env)
        inner.open, inner.count = self.open | {id(source)}, self.count
        entries = inner.mapping(source, path)
        self.count = inner.count
        self.problems += [problem for problem in inner.problems if problem not in self.problems]
        for name, value in entries.items():
            if name in result:
                continue
            result[name] = value
            self.marks |= {place: mark for place, mark in inner.marks.items() if place[len(path)] == name}

    def scalar(self, node: Any, path: KeyPath) -> Any:
        kind, text = node.tag.removeprefix(_TAG), node.value
        if kind == "str" or kind == "value":
            return self.interpolate(node, path)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true" if text.lower() in ("true", "false") else BareWord(text)
        if kind == "int":
            return self.integer(node, path)
        if kind == "float":
            return self.number(node, path)
        if kind == "timestamp":
            self.report(node, path, f"{text} is a date to YAML: quote it: '{text}'")
        else:
            self.report(node, path, f"the tag {_tag(node.tag)} is not supported")
        return None

    def integer(self, node: Any, path: KeyPath) -> int | str | None:
        text = node.value
        digits = text.lstrip("+-")
        if ":" in digits:
            return str(text)
        if re.fullmatch(r"0[0-9_]+", digits):
            plain = digits.replace("_", "").lstrip("0") or "0"
            self.report(node, path, f"{text} is octal to some readers: write {plain} or quote it: '{text}'")
            return None
        try:
            return int(text, 0)
        except ValueError:
            self.report(node, path, f"{text!r} is not a whole number")
            return None

    def number(self, node: Any, path: KeyPath) -> float | str | None:
        text = node.value
        if ":" in text:
            return str(text)
        try:
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            self.report(node, path, f"{text!r} is not a number")
            return None

    def interpolate(self, node: Any, path: KeyPath) -> str:
        text: str = node.value
        env = self.env
        if env is None or "${" not in text:
            return text

        def replace(match: re.Match[str]) -> str:
            if match.group(0) == "$${":
                return "${"
            name, default = match.groups()
            if name is None:
                self.report(
                    node, path, "${ without NAME}: write ${NAME}, ${NAME:-default}, or $${ for a plain ${"
                )
                return ""
            if name in env and (env[name] or default is None):
                return env[name]
            if default is None:
                self.report(
                    node,
                    path,
                    f"the environment variable {name} is not set: set it or write ${{{name}:-default}}",
                )
                return ""
            return str(default)

        return _INTERPOLATION.sub(replace, text)


def _tag(tag: str) -> str:
    return tag.replace(_TAG, "!!")


def _syntax_problem(source: str, text: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        position = getattr(error, "position", 0) or 0
        line = text.count("\n", 0, position) + 1
        character = getattr(error, "character", 0)
        code = character if isinstance(character, int) else ord(str(character)[:1] or "\0")
        return f"{source}:{line}: the character U+{code:04X} is not allowed in YAML"
    place = f"{source}:{mark.line + 1}:{mark.column + 1}"
    lines = text.splitlines()
    around = lines[mark.line] if mark.line < len(lines) else ""
    indent = around[: len(around) - len(around.lstrip())]
    if "\t" in indent:
        return f"{source}:{mark.line + 1}:{indent.index(chr(9)) + 1}: a tab in the indentation: use spaces"
    problem = str(getattr(error, "problem", None) or error)
    if "another document" in problem:
        problem = "a second document begins here: a file holds one"
    return f"{place}: {problem}"


def parse_document(
    text: str, source: str, *, env: Mapping[str, str] | None = None, hint: str = "", defer: bool = False
) -> Document:
    """Parse YAML text.

    :param source: how messages name the file.
    :param env: variables for ``${NAME}``; None leaves text as it is.
    :param defer: leave what is wrong in ``problems`` (a syntax error is raised all the same).
    :raises ConfigError: a syntax error (``file:line:column``), or every duplicate key, odd value and unset variable.
    """
    builder = _Builder(source, env)
    try:
        node = yaml.compose(text, Loader=_LOADER)
        if node is None:
            raise ConfigError(
                f"{source} is empty", details=(f"{source}:1: the file holds nothing",), hint=hint
            )
        data = builder.build(node, ())
    except yaml.YAMLError as error:
        details = (_syntax_problem(source, text, error),)
        raise ConfigError(f"{source} is not valid YAML", details=details, hint=hint) from error
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply", hint=hint) from error
    if builder.problems and not defer:
        raise config_error(source, builder.problems, hint=hint)
    return Document(source, data, builder.marks, tuple(builder.problems))


def load_document(path: Path, *, interpolate: bool = True, hint: str = "", defer: bool = False) -> Document:
    """Read and parse a YAML file; see :func:`parse_document`. ``interpolate``: replace ``${NAME}``.

    :raises ConfigError: unreadable, not UTF-8, or wrong.
    """
    source = display(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror or error}", hint=hint) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{source} is not UTF-8",
            details=(f"{source}:{line}: the byte 0x{error.object[error.start]:02x}",),
            hint=hint,
        ) from error
    return parse_document(text, source, env=environment() if interpolate else None, hint=hint, defer=defer)


# ---------------------------------------------------------------------------------------------------------------------
# Data to models


def model_keys(annotation: Any, path: Sequence[str | int] = ()) -> tuple[str, ...]:
    """Keys allowed at ``path`` below a model class (or type): empty where any key is allowed, or none."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return model_keys(get_args(annotation)[0], path)
    if origin in (Union, UnionType):
        for option in get_args(annotation):
            found = model_keys(option, path) if option is not NoneType else ()
            if found:
                return found
        return ()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = {info.alias or name: info.annotation for name, info in annotation.model_fields.items()}
        if not path:
            return tuple(fields)
        return model_keys(fields[str(path[0])], path[1:]) if path[0] in fields else ()
    arguments = get_args(annotation)
    if path and origin is dict and len(arguments) == 2:
        return model_keys(arguments[1], path[1:])
    if path and origin in (list, tuple) and arguments:
        return model_keys(arguments[0], path[1:])
    return ()


def _found(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"'{value}'" if len(value) <= 60 else f"'{value[:57]}...'"
    return "a list" if isinstance(value, list) else "a mapping"


_EXPECTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "nothing",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def _literals(context: Mapping[str, Any]) -> list[str]:
    expected = str(context.get("expected", ""))
    return re.findall(r"'([^']*)'", expected) or [expected]


def _resolve(data: Any, location: Sequence[str | int], missing: bool) -> KeyPath:
    """Pydantic's location without the names of union members and validators in it."""
    path: list[str | int] = []
    value: Any = data
    for index, part in enumerate(location):
        known = isinstance(part, int) and part < len(value) if isinstance(value, list) else False
        if known or (isinstance(value, dict) and part in value):
            inside: Any = value
            value = inside[part]
            path.append(part)
        elif missing and index == len(location) - 1:
            path.append(part)
    return tuple(path)


def _explain(
    errors: Sequence[Any],
    path: KeyPath,
    value: Any,
    shown: str,
    raw: str,
    allowed: Callable[[KeyPath], Iterable[str]],
) -> str:
    """One text for all of pydantic's errors at one path."""
    expected: list[str] = []
    texts: list[str] = []
    words: list[str] = []
    for error in errors:
        kind, context = error["type"], error.get("ctx") or {}
        if kind == "extra_forbidden":
            texts.append("unknown key" + suggestion(str(path[-1]), allowed(path[:-1])))
        elif kind == "missing":
            texts.append("is missing")
        elif kind == "literal_error":
            words += _literals(context)
        elif kind in _EXPECTED:
            expected.append(_EXPECTED[kind])
        elif kind in _BOUNDS:
            bound, name = _BOUNDS[kind]
            texts.append(f"must be {bound} {context[name]}, is {shown.removeprefix('the number ')}")
        elif kind in ("too_short", "string_too_short"):
            texts.append("is empty")
        elif kind == "string_pattern_mismatch":
            texts.append(f"{shown} does not match {context['pattern']}")
        elif kind == "value_error":
            texts.append(str(context.get("error", error["msg"])))
        else:
            texts.append(f"{error['msg']}, found {shown}")
    if words and not expected and not texts:
        return f"{shown.removeprefix('the number ')} is not allowed" + _words(value, words)
    if texts:
        return "; ".join(dict.fromkeys(texts))
    wanted = list(dict.fromkeys([*expected, *(f"'{word}'" for word in words)]))
    text = f"expected {_either(wanted)}, found {shown}"
    if "text" in wanted and isinstance(value, bool | int | float) and raw:
        text += f": quote it: '{raw}'"
    return text


def _either(words: Sequence[str]) -> str:
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _words(value: Any, words: list[str]) -> str:
    near = nearest(str(value), words)
    listed = ", ".join(words)
    return f" (did you mean '{near}'? allowed: {listed})" if near else f" (allowed: {listed})"


def check(
    document: Document,
    model: type[ModelT],
    at: KeyPath = (),
    *,
    partial: bool = False,
    data: Any = None,
    hidden: Collection[str] = (),
) -> tuple[ModelT | None, list[Problem]]:
    """Validate the part of ``document`` at ``at`` as ``model``.

    :param partial: the part is to be merged into something else: missing keys are no problem, and no model is returned.
    :param data: validate this instead of what the document holds there; places still come from the document.
    :param hidden: fields of the model that a file may not give: not offered in messages.
    :returns: the model, or None, and every problem found, those of the text itself left out.
    """
    value = document.get(at) if data is None else data
    try:
        result = model.model_validate(value)
        return (None if partial else result), []
    except ValidationError as error:
        found = error.errors(include_url=False)
    broken = document.broken()

    def allowed(path: KeyPath) -> list[str]:
        return [key for key in model_keys(model, path) if path or key not in hidden]

    grouped: dict[KeyPath, list[Any]] = {}
    union: set[KeyPath] = set()
    for entry in found:
        missing = entry["type"] == "missing"
        if missing and partial:
            continue
        path = _resolve(value, entry["loc"], missing)
        grouped.setdefault(path, []).append(entry)
        if len(path) < len(entry["loc"]):
            union.add(path)
    problems = []
    for path, entries in grouped.items():
        if path in union and any(other != path and other[: len(path)] == path for other in grouped):
            continue
        here = Document("", value).get(path)
        key = str(path[-1]) if path else ""
        shown = _found(here)
        full = (*at, *path)
        if full in broken:
            continue
        raw = document.marks[full].raw if full in document.marks else ""
        hidden_value = "secrets" in full or MASK in redact(f"{key}={here}")
        if isinstance(here, str | int | float) and hidden_value:
            shown, raw = f"'{MASK}'", ""
        problems.append(document.problem(full, _explain(entries, path, here, shown, raw, allowed)))
    return None, problems


def load_model(
    path: Path,
    model: type[ModelT],
    *,
    interpolate: bool = True,
    hint: str = "",
    what: str = "file",
    extra: Callable[[Document, ModelT], Sequence[Problem]] | None = None,
) -> ModelT:
    """Read a YAML file as ``model``.

    :param what: what the file is, for the message (``inventory``, ``signature file``).
    :param hint: the next command to type when the file is wrong.
    :param extra: further checks of a model that is valid by itself.
    :raises ConfigError: with every problem, one ``file:line: key.path: problem`` an entry of ``details``.
    """
    document = load_document(path, interpolate=interpolate, hint=hint, defer=True)
    result, problems = check(document, model)
    if result is not None and extra is not None:
        problems = list(extra(document, result))
    problems += document.problems
    if result is None or problems:
        raise config_error(document.source, problems, hint=hint, what=what)
    return result
