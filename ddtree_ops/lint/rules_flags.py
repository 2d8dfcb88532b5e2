"""Rules about the command line itself: flags that the runtime has, and values that it takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from ddtree_ops.launchflags import Flag
from ddtree_ops.lint.model import Case, Cite, Found, Given, Severity, rule

__all__ = ["FOREIGN"]

_ARGPARSE = Cite("srt/server_args.py", 7288, "parser.parse_args(argv)")
_ENDS = "argparse ends the process with exit status 2 before anything is loaded."

FOREIGN = {
    "block-size": "page-size",
    "ctx-size": "context-length",
    "disable-log-requests": "",
    "enable-auto-tool-choice": "tool-call-parser",
    "enable-chunked-prefill": "chunked-prefill-size",
    "enable-expert-parallel": "ep-size",
    "enable-prefix-caching": "",
    "enforce-eager": "disable-cuda-graph",
    "gpu-memory-utilization": "mem-fraction-static",
    "guided-decoding-backend": "grammar-backend",
    "limit-mm-per-prompt": "limit-mm-data-per-request",
    "max-model-len": "context-length",
    "max-num-batched-tokens": "chunked-prefill-size",
    "max-num-seqs": "max-running-requests",
    "max-seq-len-to-capture": "cuda-graph-max-bs",
    "n-gpu-layers": "",
    "no-enable-prefix-caching": "disable-radix-cache",
    "num-speculative-tokens": "speculative.block_size",
    "seed": "random-seed",
    "speculative-config": "speculative",
    "speculative-model": "drafter",
    "tokenizer": "tokenizer-path",
}
"""Flags of other servers (vLLM, llama.cpp) -> what says the same here, with a dot or none: a field of the service.

Asked only of a flag that the runtime lacks.
"""


def _absent(case: Case) -> Iterator[Given]:
    """Flags that the runtime lacks; those of a DDTREE that it lacks as a whole are another rule's."""
    flags = case.facts.flags
    algorithm = flags.find("--speculative-algorithm") if flags else None
    without = algorithm is not None and case.algorithm != "" and not algorithm.allows(case.algorithm)
    for given in case.given if flags else ():
        if not given.options and not (without and given.typed and given.path[0] == "speculative"):
            yield given


def _named(name: str, case: Case) -> str:
    """How to write what stands for a foreign flag."""
    flags = case.facts.flags
    return f"args.{name}" if flags and flags.find(f"--{name}") else name


def _otherwise(case: Case, given: Given) -> str:
    """What to do about a field whose flag the runtime lacks: it may have one of another name."""
    runtime = f"runtimes.{case.target.runtime.name}"
    plugin = f"or declare {runtime}.plugin_flags if a plugin in the venv adds it"
    if given.path[0] != "speculative" or case.facts.flags is None:
        return f"leave it out; {plugin}"
    words = set(given.path[-1].split("_"))
    known = [name.lstrip("-") for name in case.facts.flags.options if name.startswith("--speculative-")]
    others = {"ngram", "eagle"}  # of other algorithms
    alike = [name for name in known if words & set(name.split("-")) and not others & set(name.split("-"))]
    near = difflib.get_close_matches(given.key, alike, n=3, cutoff=0.5)
    own = f"this tree may call it {' or '.join(near)}: " if near else "this tree calls it otherwise: "
    name = near[0] if near else "ITS-NAME"
    return f"{own}declare {runtime}.dialect: {{{given.key}: {name}}}; {plugin}"


@rule(
    "unknown-flag",
    Severity.ERROR,
    "a flag that the runtime does not have",
    reason=_ENDS,
    sources=["the runtime's own add_argument calls", _ARGPARSE],
)
def _unknown(case: Case) -> Iterator[Found]:
    for given in _absent(case):
        if given.key in FOREIGN:
            continue
        known = [name.lstrip("-") for name in case.facts.flags.options] if case.facts.flags else []
        near = difflib.get_close_matches(given.key, known, n=1, cutoff=0.75)
        if given.typed:
            change = _otherwise(case, given)
        else:
            change = (
                f"did you mean {near[0]}?"
                if near
                else "remove it, or declare it in the runtime's plugin_flags"
            )
        if case.facts.flags is not None and case.facts.flags.partial:
            yield Found(
                f"--{given.key} is not among the flags that can be read of this runtime, and it has others",
                change,
                given.path,
                Severity.WARN,
                reason="If it is none of those either, argparse ends the process before anything is loaded.",
            )
            continue
        yield Found(f"this runtime has no flag --{given.key}", change, given.path)


@rule(
    "foreign-flag",
    Severity.ERROR,
    "a flag of another server (vLLM's dialect)",
    reason=_ENDS,
    sources=["the runtime's own add_argument calls", _ARGPARSE],
)
def _foreign(case: Case) -> Iterator[Found]:
    for given in _absent(case):
        here = FOREIGN.get(given.key)
        if here is not None:
            change = f"write {_named(here, case)} instead" if here else "remove it: sglang does so by itself"
            yield Found(
                f"--{given.key} belongs to another server: sglang does not have it", change, given.path
            )


@rule(
    "ambiguous-flag",
    Severity.ERROR,
    "an abbreviation that several flags begin with",
    reason=_ENDS,
    sources=["the runtime's own add_argument calls", _ARGPARSE],
)
def _ambiguous(case: Case) -> Iterator[Found]:
    for given in case.given:
        if len(given.options) > 1:
            names = [name.lstrip("-") for name, _ in given.options]
            some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            yield Found(f"--{given.key} could be {some}", "write the flag in full", given.path)


@rule(
    "abbreviated-flag",
    Severity.WARN,
    "an abbreviation that argparse takes for a flag",
    reason="The next runtime may have a second flag that begins so, and then refuses it.",
    sources=["argparse: allow_abbrev", _ARGPARSE],
)
def _abbreviated(case: Case) -> Iterator[Found]:
    for given in case.given:
        if given.flag is not None and not given.exact:
            name = given.options[0][0].lstrip("-")
            if given.typed:
                yield Found(
                    f"this runtime has no flag --{given.key} and takes it for --{name}",
                    _otherwise(case, given),
                    given.path,
                    Severity.ERROR,
                    reason="The value goes to another setting.",
                )
                continue
            yield Found(f"--{given.key} is taken for --{name}", f"write {name}", given.path)


@rule(
    "repeated-flag",
    Severity.ERROR,
    "a flag given twice, or one that a field of the service writes",
    reason="argparse takes the last one without a word, so that the other is not what runs.",
    sources=["argparse", "ddtree-ops inventory show"],
)
def _repeated(case: Case) -> Iterator[Found]:
    first: dict[str, Given] = {}
    for given in case.given:
        if given.flag is None or given.flag.action == "append":
            continue
        other = first.setdefault(given.flag.dest, given)
        field = None if given.typed else case.field_of(given.flag)
        if other is given and field:
            yield Found(
                f"--{given.key} says what the field {field} is for, and nothing else reads it here",
                f"remove args.{given.key}: set {field}",
                given.path,
            )
        elif other is not given and not given.typed:
            owner = ".".join(other.path)
            how = f"set {owner}" if other.typed else f"keep it or {owner}"
            yield Found(
                f"--{given.key} says the same as {owner}", f"remove args.{given.key}: {how}", given.path
            )


def _kind(flag: Flag) -> str:
    return {
        "int": "a whole number",
        "float": "a number",
        "loads": "JSON",
        "json_list_type": "a JSON list",
        "human_readable_int": "a whole number, or one such as 4k or 1Mi",
    }.get(flag.type, "a text")


@rule(
    "flag-value",
    Severity.ERROR,
    "a value of the wrong kind, too few or too many of them",
    reason=_ENDS,
    sources=["the runtime's own add_argument calls", _ARGPARSE],
)
def _value(case: Case) -> Iterator[Found]:
    for given in case.given:
        flag = given.flag
        if flag is None or flag.line == 0:
            continue
        least, most = flag.arity
        count = len(given.words)
        if most == 0 and count:
            yield Found(
                f"--{given.key} is a bare flag and takes no value",
                f"write args.{given.key}: true, or false to leave it out",
                given.path,
            )
        elif count < least:
            yield Found(f"--{given.key} needs {_kind(flag)}", "give it a value", given.path)
        elif most is not None and count > most:
            yield Found(f"--{given.key} takes {most} value, not {count}", "give one value", given.path)
        else:
            for word in given.words:
                try:
                    flag.convert(word)
                except ValueError:
                    yield Found(
                        f"--{given.key} takes {_kind(flag)}, not '{word}'", "correct the value", given.path
                    )


@rule(
    "flag-choice",
    Severity.ERROR,
    "a value that is not among the flag's choices",
    reason=_ENDS,
    sources=["the runtime's own add_argument calls", _ARGPARSE],
)
def _choice(case: Case) -> Iterator[Found]:
    for given in case.given:
        flag = given.flag
        if flag is None or flag.choices is None or given.path == ("speculative", "algorithm"):
            continue
        for word in given.words:
            try:
                value = flag.convert(word)
            except ValueError:
                continue
            if not flag.allows(value):
                words = [str(choice) for choice in flag.choices]
                near = difflib.get_close_matches(word, words, n=1)
                change = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(words)}"
                yield Found(f"--{given.key} does not know '{word}'", change, given.path)


@rule(
    "deprecated-flag",
    Severity.WARN,
    "a flag that the runtime calls deprecated",
    reason="It does nothing any more, or goes with the next runtime.",
    sources=["the runtime's own add_argument calls"],
)
def _deprecated(case: Case) -> Iterator[Found]:
    for given in case.given:
        flag = given.flag
        if flag is not None and flag.deprecated:
            variable = "=" in flag.instead
            instead = (
                f"use {'environment: ' if variable else ''}{flag.instead.lstrip('-')}" if flag.instead else ""
            )
            yield Found(f"--{given.key} is deprecated", instead or "remove it", given.path)


@rule(
    "flags-unread",
    Severity.WARN,
    "a runtime whose flags cannot be read",
    reason="A typo in a flag is then found only when the engine starts.",
    sources=["the runtime's own source"],
)
def _unread(case: Case) -> Iterator[Found]:
    if case.facts.flags is None:
        yield Found(
            f"the flags of this runtime cannot be read: {case.facts.problem}",
            "check the base of the runtime; rules about flags were left out",
            ("runtimes", case.target.runtime.name),
            top=True,
        )


@rule(
    "config-file",
    Severity.INFO,
    "flags in a file on the host, which is not looked at",
    reason="What stands in the file is merged under the command line and is not judged here.",
    sources=[Cite("srt/server_args.py", 7280, 'if "--config" in argv')],
)
def _config(case: Case) -> Iterator[Found]:
    given = case.arg("config")
    if given is not None:
        yield Found(
            "the flags in this file are not looked at",
            "write them under args where they are no secrets",
            given.path,
        )
