"""Every signature file, tested from what it says itself; and what a user's own files may and may not say."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
import typer

from ddtree_ops.cli.app import app
from ddtree_ops.diagnose import library, regex
from ddtree_ops.diagnose.explain import SOLVERS, fill
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.figures import DETECTORS
from ddtree_ops.diagnose.library import (
    DIRECTORY,
    Library,
    Signature,
    default_library,
    load_library,
    read_signature,
)
from ddtree_ops.diagnose.trials import try_signature
from ddtree_ops.errors import ConfigError
from ddtree_ops.paths import SIGNATURES, config_dir, shipped

LIBRARY = load_library()
COMMANDS = typer.main.get_command(app)
LAUNCH = """
ddtree-graph-size pagetable-ctx-overflow spec-hidden-mismatch graph-logits-buffer capture-bs-empty mamba-track
dflash-dp-attn dflash-pp dflash-no-draft dflash-block-conflict dflash-block-mismatch dflash-block-default16 dflash-window
dflash-fc-shape dflash-layers dflash-mask-id dflash-no-hook dflash-overlap unknown-algo req-unsupported
"""
DEVICE = """
triton-smem-attn triton-smem-moe ptxas-arch no-kernel-image no-cutlass-sm120 cuda-803-804 sgl-kernel-load jit-ninja
jit-opaque oom-capture oom-kv-pool oom-pool oom-runtime kv-starved ima device-assert-radix prob-nan nccl-alloc nccl-shm
nccl-hang nccl-timeout xid aer-link
"""
PROCESS = """
sched-exc watchdog detok warmup-fail kv-leak tokenizer weights port nofile host-oom systemd-start-limit systemd-timeout
systemd-exec
"""
SILENT = "accept-one accept-decay high-accept-corrupt bang eager simulated mask-ignored"


def each(signatures: tuple[Signature, ...] = LIBRARY.signatures) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("signature", signatures, ids=lambda signature: signature.id)


@each()
def test_examples_are_found_first_and_lookalikes_are_not(signature: Signature) -> None:
    assert try_signature(signature, LIBRARY).problems == ()


@pytest.mark.parametrize("id", ["ddtree-unpatched", "ddtree-self-check", "ddtree-refused"])
def test_what_the_overlay_says_is_what_is_looked_for(id: str) -> None:
    source = (shipped("ddtree_sglang") / "check.py").read_text("utf-8")
    joined = re.sub(r'"\n\s*f?"', "", source)
    assert any(text in joined for text in LIBRARY[id].literal)


@pytest.mark.parametrize(
    "listed", [LAUNCH, DEVICE, PROCESS, SILENT], ids=["launch", "device", "process", "silent"]
)
def test_all_that_operators_meet_is_there(listed: str) -> None:
    present = {signature.id for signature in LIBRARY.signatures}
    assert set(listed.split()) - present == set()


def test_one_file_a_signature() -> None:
    assert len(list(DIRECTORY.glob("*.yaml"))) == len(LIBRARY.signatures)
    assert all(LIBRARY.shipped(signature.id) for signature in LIBRARY.signatures)


@each()
def test_a_file_stands_every_check_of_a_users_file(signature: Signature) -> None:
    path = LIBRARY.origin(signature.id)
    assert path is not None and read_signature(path) == signature


@each(tuple(signature for signature in LIBRARY.signatures if signature.pattern))
def test_worst_case_text(signature: Signature) -> None:
    """A megabyte that nearly matches, over and over: a pattern that explodes would never return."""
    size = 1_000_000 // (4 * len(signature.literal))
    parts = []
    for literal in signature.literal:
        times = size // (len(literal) + 1)
        parts += [
            f"{literal} " * times,
            literal * times,
            literal + "9" * size,
            literal + " ('x," * (size // 5),
        ]
    text = "".join(parts)
    assert len(text) > 800_000
    for pattern in filter(None, (signature.pattern, signature.unless, signature.frame)):
        regex.compile(pattern).search(text)
    for where in signature.where:
        LIBRARY.match(text, where)


def told() -> list[tuple[str, str]]:
    """Every command that a signature tells to type."""
    return [
        (signature.id, match[1])
        for signature in LIBRARY.signatures
        for text in (signature.explanation, signature.remedy)
        for match in re.finditer(
            r"ddtree-ops ((?:[a-z-]+|\{host\}|--[a-z-]+)(?: (?:[a-z-]+\b|\{host\}|--[a-z-]+))*)", text
        )
    ]


@pytest.mark.parametrize(("name", "words"), told(), ids=lambda value: value[:40])
def test_commands_of_remedies_exist(name: str, words: str) -> None:
    command = COMMANDS
    rest = words.split()
    while rest and hasattr(command, "commands"):
        assert rest[0] in command.commands, f"{name}: ddtree-ops {words}"
        command = command.commands[rest.pop(0)]
    known = {option for param in command.params for option in param.opts}
    assert {word for word in rest if word.startswith("-")} <= known, f"{name}: ddtree-ops {words}"


def test_there_are_commands_in_remedies() -> None:
    assert len(told()) >= 10


def test_every_solver_and_detector_is_used() -> None:
    assert {signature.solver for signature in LIBRARY.signatures if signature.solver} == set(SOLVERS)
    assert {signature.detector for signature in LIBRARY.signatures if signature.detector} == set(DETECTORS)


def test_literals_are_those_that_make_a_line_worth_parsing() -> None:
    literals = set(LIBRARY.literals())
    for signature in LIBRARY.signatures:
        if signature.severity != "benign":
            assert literals >= set(signature.literal)
    assert "Ignore import error" not in literals
    assert "" not in literals


def test_fill() -> None:
    assert fill("a {x}[[ and {y}]].", {"x": 1}) == "a 1."
    assert fill("a {x}[[ and {y}]].", {"x": 1, "y": "{z}"}) == "a 1 and {z}."
    assert fill("a {x}", {}) == "a unknown"


def test_priority_of_matches() -> None:
    """A signature that knows the frame goes before one that does not."""
    example = next(example for example in LIBRARY["graph-logits-buffer"].examples)
    match = LIBRARY.match(example.text, "traceback", None, example.frames())
    assert match is not None and match.signature.id == "graph-logits-buffer"
    assert Library([]).match(example.text, "traceback") is None


def test_where_the_host_is_not_known_its_place_is_named() -> None:
    text = "DFLASH block size mismatch: using speculative_num_draft_tokens=8 but draft config block_size=16."
    match = LIBRARY.match(text, "log")
    assert match is not None and match.remedy.endswith("ddtree-ops deploy HOST")
    match = LIBRARY.match(text, "log", ServiceFacts(host="ct200"))
    assert match is not None and match.remedy.endswith("ddtree-ops deploy ct200")


def test_a_long_group_is_cut() -> None:
    match = LIBRARY.match(f"[http_server] Error: {'x' * 5000}", "log")
    assert match is not None and match.signature.id == "req-refused"
    assert len(match.explanation) < 500 and match.explanation.endswith("…")


# --- a user's own files ------------------------------------------------------------------------------------

GOOD = """\
id: {id}
title: a test
pattern: 'oops (?P<n>\\d{{1,3}})'
literal: oops
where: log
severity: fatal
explanation: '{explanation}'
remedy: mend it
source: here
examples: [oops 1]
lookalikes: [oops]
"""


def write(directory: Path, name: str, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(text)
    return directory


def test_a_users_own_directory(tmp_path: Path) -> None:
    write(tmp_path, "mine.yaml", GOOD.format(id="mine", explanation="{n} went wrong on {gpu}"))
    library = load_library(tmp_path)
    match = library.match("oops 7", "log", ServiceFacts(gpu="sm120"))
    assert match is not None
    assert match.explanation == "7 went wrong on sm120"
    assert library.origin("mine") == tmp_path / "mine.yaml" and not library.shipped("mine")
    assert library.shipped("ddtree-graph-size")
    assert "oops" in library.literals() and "oops" not in load_library().literals()


def test_a_user_replaces_a_shipped_one(tmp_path: Path) -> None:
    write(tmp_path, "port.yaml", GOOD.format(id="port", explanation="ours"))
    library = load_library(tmp_path)
    assert library["port"].explanation == "ours" and not library.shipped("port")
    assert len(library.signatures) == len(LIBRARY.signatures)
    assert library.match("ValueError: Port is already in use.", "log") is None


def test_where_own_signatures_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(SIGNATURES, raising=False)
    assert default_library() is load_library()
    write(config_dir() / "signatures", "a.yaml", GOOD.format(id="a", explanation="of the configuration"))
    first = write(tmp_path / "1", "a.yaml", GOOD.format(id="a", explanation="of the first"))
    second = write(tmp_path / "2", "b.yaml", GOOD.format(id="b", explanation="of the second"))
    option = write(tmp_path / "3", "b.yaml", GOOD.format(id="b", explanation="of the option"))
    assert default_library()["a"].explanation == "of the configuration"
    monkeypatch.setenv(SIGNATURES, f"{first}{os.pathsep}{second}")
    library = default_library()
    assert (library["a"].explanation, library["b"].explanation) == ("of the first", "of the second")
    assert default_library([option])["b"].explanation == "of the option"
    monkeypatch.setenv(SIGNATURES, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="is not a directory of signatures"):
        default_library()


def test_a_file_that_would_be_overlooked(tmp_path: Path) -> None:
    write(tmp_path, "mine.yml", GOOD.format(id="mine", explanation="x"))
    with pytest.raises(ConfigError, match=r"mine\.yml would be overlooked"):
        load_library(tmp_path)


PLAIN = GOOD.format(id="mine", explanation="x")
METRICS = PLAIN.replace("where: log", "where: metrics").replace(
    "pattern: 'oops (?P<n>\\d{1,3})'\nliteral: oops\n", "detector: accept-one\n"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD.format(id="other", explanation="x"), ":1: id: signature file mine.yaml has the id other"),
        (GOOD.format(id="mine", explanation="{m}"), ":7: explanation: the template names m, which nothing gives"),
        (GOOD.format(id="mine", explanation="{"), ":7: explanation: not a template"),
        (PLAIN.replace("(?P<n>", "(?P<n"), ":3: pattern: not a regular expression of RE2"),
        (PLAIN.replace("oops (", "(?=oops)("), ":3: pattern: not a regular expression of RE2: invalid perl operator"),
        (PLAIN.replace("oops (", "(o)\\1 ("), "RE2 has no back-references"),
        (PLAIN + "unless: '['\n", ":12: unless: not a regular expression of RE2"),
        (PLAIN + "solver: magic\n", ":12: solver: no solver 'magic' (allowed: context-overflow,"),
        (PLAIN + "frame: model_runner\n", ":12: frame: frame needs where: traceback"),
        (PLAIN.replace("remedy: mend it\n", ""), "remedy: a cause needs a remedy"),
        (PLAIN.replace("severity: fatal", "severity: fatl"), ":6: severity: 'fatl' is not allowed (did you mean 'fatal'?"),
        (PLAIN.replace("where: log", "where: journal"), ":5: where: 'journal' is not allowed (allowed: traceback, log,"),
        (PLAIN.replace("literal: oops\n", ""), "literal: where: log needs a literal"),
        (PLAIN.replace("literal: oops", "literal: ['']"), ":4: literal: an empty text is in every line"),
        (PLAIN.replace("title:", "titel:"), ":2: titel: unknown key (did you mean 'title'?)"),
        (PLAIN.replace("lookalikes: [oops]\n", ""), "lookalikes: is missing"),
        (PLAIN.replace("lookalikes: [oops]", "lookalikes: [{text: x, facts: {budgt: 3}}]"), ":11: lookalikes[0]: example: no fact budgt"),
        (PLAIN.replace("where: log", "where: [log, metrics]"), "where: metrics has a detector and no text to search"),
        (PLAIN + "detector: accept-one\n", ":12: detector: belongs to where: metrics"),
        (METRICS.replace("detector: accept-one\n", ""), "where: metrics needs a detector (allowed: "),
        (METRICS.replace("accept-one", "magic"), ":3: detector: no detector 'magic' (allowed: "),
    ],
)  # fmt: skip
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, says: str) -> None:
    write(tmp_path, "mine.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_library(tmp_path)
    assert says in caught.value.render()


def test_metrics_of_ones_own(tmp_path: Path) -> None:
    signature = read_signature(write(tmp_path, "mine.yaml", METRICS) / "mine.yaml")
    assert signature.detector == "accept-one" and signature.literal == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"oops 1": "ooops"}, "example 1 (log) does not match"),
        ({"[oops 1]": "[oops 1, 'no more']"}, "example 2 holds none of the literals"),
        ({"lookalikes: [oops]": "lookalikes: [oops 22]"}, "look-alike 1 (log) matches"),
        ({"literal: oops": "literal: [oops, never]"}, "the literal 'never' is in no example"),
        ({"explanation: 'x'": "explanation: '{gpu}'"}, 'example 1 (log): the explanation says "unknown"'),
        (
            {"[oops 1]": "['oops 1 Ignore import error when loading x']"},
            "example 1 (log) is taken by benign-optional",
        ),
    ],
)
def test_what_a_trial_finds(tmp_path: Path, changed: dict[str, str], problem: str) -> None:
    text = PLAIN
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    library = load_library(write(tmp_path, "mine.yaml", text))
    assert any(item.startswith(problem) for item in try_signature(library["mine"], library).problems)


def test_a_thief_is_found(tmp_path: Path) -> None:
    """A benign signature of one's own that is too wide takes what another finds."""
    text = PLAIN.replace("oops (?P<n>\\d{1,3})", "already in use").replace(
        "literal: oops", "literal: already in use"
    )
    text = text.replace("severity: fatal", "severity: benign").replace("oops 1", "already in use")
    library = load_library(write(tmp_path, "mine.yaml", text))
    assert any("is taken by mine" in problem for problem in try_signature(library["port"], library).problems)


def test_two_threads_read_the_shipped_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    together = threading.Barrier(2)

    def counted(path: Path) -> library.Signature:
        read.append(path)
        return original(path)

    def ask() -> None:
        together.wait()
        library.load_library()

    original = library._read_shipped
    monkeypatch.setattr(library, "_read_shipped", counted)
    library._read_all.cache_clear()
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == len(set(read)) == len(library.signature_files(library.DIRECTORY))
