"""Reading a unit file back is the inverse of writing it, and what only systemd can expand is not guessed at."""

from __future__ import annotations

import pytest

from ddtree_ops.service.unit import quote_environment, quote_exec
from ddtree_ops.service.unitfile import environment_of, exec_start_of, flags_of, settings

WORDS = [
    "plain",
    "",
    "two words",
    'a "quoted" word',
    "it's",
    "back\\slash",
    "100%",
    "$HOME and ${HOME_}x $$",
    "tab\tand\nnewline",
    "ünïcödé 中文",
    "\x01\x7f",
    '{"a": [1, 2]}',
    "-1",
    ";",
]


@pytest.mark.parametrize("word", [word for word in WORDS if word != ";"])
def test_a_word_of_the_command_line_comes_back(word):
    text = f"[Service]\nExecStart=/v/bin/python -m x \\\n  --flag {quote_exec(word)} \\\n  --last\n"
    found = exec_start_of(text)
    assert found is not None
    assert found[:4] == ["/v/bin/python", "-m", "x", "--flag"]
    assert found[4:] == [word, "--last"]


@pytest.mark.parametrize("word", WORDS)
def test_a_variable_comes_back(word):
    text = f"[Service]\nEnvironment={quote_environment('NAME', word)}\nEnvironment=B=2\n"
    assert environment_of(text) == {"NAME": word, "B": "2"}


@pytest.mark.parametrize(
    "line",
    [
        "/bin/x %h",
        "/bin/x $HOME",
        '/bin/x "open',
        "-/bin/x",
        "/bin/x one ; /bin/y",
        "/bin/x \\q",
        "/bin/x \\x4",
        "",
    ],
)
def test_what_only_systemd_can_expand_is_not_told(line):
    assert exec_start_of(f"[Service]\nExecStart={line}\n") is None


def test_two_commands_or_none_are_not_told():
    assert exec_start_of("[Service]\nExecStart=/a\nExecStart=/b\n") is None
    assert exec_start_of("[Unit]\nExecStart=/a\n") is None


def test_a_reference_in_braces_stays_as_it_is():
    text = "[Service]\nExecStart=/v/python --config ${CREDENTIALS_DIRECTORY}/engine.yaml\n"
    assert exec_start_of(text) == ["/v/python", "--config", "${CREDENTIALS_DIRECTORY}/engine.yaml"]


def test_an_empty_assignment_clears_and_several_stand_on_a_line():
    text = "[Service]\nEnvironment=A=1 \"B=2 3\" C='x'\nEnvironment=\nEnvironment=D=4 E=\n"
    assert environment_of(text) == {"D": "4", "E": ""}
    assert environment_of(text.replace("Environment=\n", "")) == {
        "A": "1",
        "B": "2 3",
        "C": "x",
        "D": "4",
        "E": "",
    }


@pytest.mark.parametrize("value", ["A", "1A=2", "A=%h", "'A=1"])
def test_variables_that_systemd_would_refuse_or_expand_are_not_told(value):
    assert environment_of(f"[Service]\nEnvironment={value}\n") is None


def test_comments_and_continuations():
    text = "# x\n[Service]\n; y\nA=1 \\\n# in between\n  2\nB = 3 \n"
    assert list(settings(text)) == [("Service", "A", "1    2"), ("Service", "B", "3")]


def test_flags_with_their_words():
    head, flags = flags_of(["/v/python", "-m", "x", "--a", "1", "2", "--b=-x", "--c", "--a", "3"])
    assert head == ("/v/python", "-m", "x")
    assert flags == {"--a": ("3",), "--b": ("-x",), "--c": ()}
