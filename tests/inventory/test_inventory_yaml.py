"""YAML with places: marks, interpolation, durations, messages."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory import yaml_source
from ddtree_ops.inventory.models import parse_duration
from ddtree_ops.inventory.yaml_source import (
    BareWord,
    check,
    dotted,
    load_model,
    nearest,
    parse_document,
    suggestion,
)

quick = settings(max_examples=50)
TEXT = """\
a:
  b: 1
  "c d":
    - one
    - e: >
        two
        lines
list: [x, {y: z}]
"""


@pytest.mark.parametrize(
    ("path", "line", "column", "value_line", "raw"),
    [
        ((), 1, 1, 1, ""),
        (("a",), 1, 1, 2, ""),
        (("a", "b"), 2, 3, 2, "1"),
        (("a", "c d"), 3, 3, 4, ""),
        (("a", "c d", 0), 4, 7, 4, "one"),
        (("a", "c d", 1, "e"), 5, 7, 5, "two lines\n"),
        (("list", 1, "y"), 8, 12, 8, "z"),
    ],
)
def test_every_key_and_value_keeps_its_place(
    path: tuple[str | int, ...], line: int, column: int, value_line: int, raw: str
) -> None:
    document = parse_document(TEXT, "f.yaml")
    mark = document.marks[path]
    assert (mark.line, mark.column, mark.value_line, mark.raw, mark.path) == (
        line,
        column,
        value_line,
        raw,
        path,
    )
    assert document.where(path) == f"f.yaml:{line}"


def test_place_of_what_is_not_there_is_that_of_what_should_hold_it() -> None:
    document = parse_document(TEXT, "f.yaml")
    assert document.line_of(("a", "c d", 1, "nothing", 3)) == 5
    assert str(document.problem(("a", "zz"), "is missing")) == "f.yaml:1: a.zz: is missing"
    assert document.get(("a", "c d", 1, "e")) == "two lines\n"
    assert document.get(("a", "b", "c"), "fallback") == "fallback"


def test_dotted() -> None:
    assert dotted(("hosts", "ct200", "services", 0, "a.b", "")) == "hosts.ct200.services[0].'a.b'.''"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize("word", ["true", "FALSE"])
def test_a_quoted_key_is_text_whatever_it_says(word: str) -> None:
    assert parse_document(f"'{word}': 1", "f").data == {word: 1}
    with pytest.raises(ConfigError, match="1 problem"):
        parse_document(f"{word}: 1", "f")


@quick
@given(plain)
def test_reads_what_yaml_writes(data: Any) -> None:
    text = yaml.safe_dump({"x": data}, default_flow_style=False)
    assert parse_document(text, "f").data == {"x": data}


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Yes", "OFF"])
def test_yaml_11_booleans_are_text(word: str) -> None:
    value = parse_document(f"x: {word}", "f").data["x"]
    assert value == word
    assert isinstance(value, BareWord)
    assert type(parse_document(f"x: '{word}'", "f").data["x"]) is str


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
free = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn"), exclude_characters="\ufeff")
)


def _read(value: str, env: dict[str, str]) -> str:
    text = yaml.safe_dump({"x": value}, allow_unicode=True, width=10**6)
    result = parse_document(text, "f", env=env).data["x"]
    assert isinstance(result, str)
    return result


@quick
@given(free, free, names, free)
def test_interpolation_puts_the_value_there_and_nothing_else(
    before: str, after: str, name: str, value: str
) -> None:
    before, after = before.replace("$", ""), after.replace("$", "")
    env = {name: value}
    assert _read(f"{before}${{{name}}}{after}", env) == before + value + after
    assert _read(f"{before}$${{{name}}}{after}", env) == f"{before}${{{name}}}{after}"


@quick
@given(names, free)
def test_interpolation_defaults(name: str, default: str) -> None:
    default = default.replace("}", "").replace("$", "")
    assert _read(f"${{{name}:-{default}}}", {}) == default
    assert _read(f"${{{name}:-{default}}}", {name: ""}) == default
    assert _read(f"${{{name}:-{default}}}", {name: "set"}) == "set"
    assert _read(f"${{{name}}}", {name: ""}) == ""


@quick
@given(free)
def test_text_without_an_opening_is_left_alone(text: str) -> None:
    text = text.replace("${", "")
    assert _read(text, {}) == text


def test_values_that_come_from_the_environment_are_not_replaced_again() -> None:
    assert _read("${A}", {"A": "${B}", "B": "wrong"}) == "${B}"


@quick
@given(st.floats(min_value=0, max_value=1e9, allow_nan=False))
def test_a_number_is_seconds(value: float) -> None:
    assert parse_duration(value) == value


@quick
@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.booleans())
def test_durations_add_up(hours: int, minutes: int, seconds: int, spaced: bool) -> None:
    text = (" " if spaced else "").join((f"{hours}h", f"{minutes}m", f"{seconds}s"))
    assert parse_duration(text) == hours * 3600 + minutes * 60 + seconds
    assert parse_duration(f"{minutes}m") == minutes * 60
    assert parse_duration(str(seconds)) == seconds


@quick
@given(st.text(max_size=12))
def test_other_text_is_no_duration(text: str) -> None:
    squeezed = text.strip().lower().replace(" ", "")
    number = r"\d+(\.\d+)?"
    if re.fullmatch(number, squeezed, re.ASCII) or (
        squeezed and re.fullmatch(f"({number}h)?({number}m)?({number}s)?", squeezed, re.ASCII)
    ):
        assert parse_duration(text) >= 0
    else:
        with pytest.raises(ValueError, match="is not a duration"):
            parse_duration(text)


@pytest.mark.parametrize("value", [True, -1, -0.5, math.inf, math.nan, None, [], "1h30", "m5", "h", ""])
def test_no_duration(value: Any) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(value)


def test_nearest() -> None:
    allowed = ["load_timeout", "stall_timeout", "window"]
    assert nearest("load-timeout", allowed) == "load_timeout"
    assert nearest("Windw", allowed) == "window"
    assert nearest("zzz", allowed) is None
    assert suggestion("Windw", allowed) == " (did you mean 'window'?)"
    assert suggestion("zzz", allowed) == " (allowed: load_timeout, stall_timeout, window)"
    assert suggestion("zzz", []) == ""


class _Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 0


class _Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    items: list[_Inner] = []
    table: dict[str, _Inner | None] = {}


def test_load_model_reads_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "f.yaml"
    file.write_text("items:\n  - {size: 3}\ntable:\n  a: {size: 4}\n")
    assert load_model(file, _Outer) == _Outer(items=[_Inner(size=3)], table={"a": _Inner(size=4)})
    file.write_text(
        "items:\n  - {sise: 3}\n  - {size: x}\n  - {size: ${NOT_SET_HERE}}\ntable:\n  a:\n    sizes: 1\n"
    )
    file.write_text(file.read_text().replace("${NOT_SET_HERE}", "'${NOT_SET_HERE}'"))
    with pytest.raises(ConfigError) as caught:
        load_model(file, _Outer, hint="type this", what="test file")
    assert caught.value.message == "test file f.yaml has 4 problems"
    unset = "the environment variable NOT_SET_HERE is not set: set it or write ${NOT_SET_HERE:-default}"
    assert caught.value.details == (
        "f.yaml:2: items[0].sise: unknown key (did you mean 'size'?)",
        "f.yaml:3: items[1].size: expected a whole number, found 'x'",
        f"f.yaml:4: items[2].size: {unset}",
        "f.yaml:7: table.a.sizes: unknown key (did you mean 'size'?)",
    )
    assert caught.value.hint == "type this"


def test_further_checks_of_a_caller(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("items:\n  - {size: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load_model(
            file, _Outer, extra=lambda document, model: [document.problem(("items", 0, "size"), "too odd")]
        )
    assert caught.value.details == (f"{file}:2: items[0].size: too odd",)


def test_without_interpolation_text_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("x: '^${[0-9]}'\n")
    assert yaml_source.load_document(file, interpolate=False).data == {"x": "^${[0-9]}"}


def test_partial_parts_may_miss_keys() -> None:
    class Whole(BaseModel):
        one: int
        two: int

    document = parse_document("one: 1", "f")
    assert [str(problem) for problem in check(document, Whole)[1]] == ["f:1: two: is missing"]
    assert check(document, Whole, partial=True) == (None, [])


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^gone.yaml cannot be read: No such file or directory$"):
        yaml_source.load_document(tmp_path / "gone.yaml")
    Path("latin.yaml").write_bytes("a: 1\nb: é\n".encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        yaml_source.load_document(Path("latin.yaml"))
    assert caught.value.details == ("latin.yaml:2: the byte 0xe9",)
    Path("bom.yaml").write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert yaml_source.load_document(Path("bom.yaml")).data == {"a": 1, "b": 2}


def test_a_bomb_of_aliases_is_refused() -> None:
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
    )
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "f")
    assert any("more than 20000 values: too many aliases?" in line for line in caught.value.details)


@pytest.mark.parametrize("loader", [yaml_source._LOADER, yaml.SafeLoader])
def test_deep_nesting_is_refused_with_a_message(loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_source, "_LOADER", loader)
    with pytest.raises(ConfigError, match=r"^f is (nested too deeply|not valid YAML)$"):
        parse_document("[" * 600 + "]" * 600, "f")
