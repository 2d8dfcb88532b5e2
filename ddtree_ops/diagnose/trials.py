"""Signatures on trial: does each find its own examples, before all others, and leave its look-alikes be?

A look-alike may fit where a more precise signature goes first: what counts is which one is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ddtree_ops.diagnose.events import ServerArgs, Traceback, parse_events
from ddtree_ops.diagnose.explain import fill, template_fields
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.library import Example, Library, Match, Signature, Where
from ddtree_ops.diagnose.lines import LogLine

__all__ = ["Sighting", "Trial", "places", "sightings", "try_signature"]

_SOURCES: Mapping[str, Where] = {"process": "log", "systemd": "systemd", "kernel": "kernel"}


@dataclass(frozen=True)
class Trial:
    """What came of trying one signature.

    :param problems: one sentence each; empty where all is well.
    """

    signature: str
    examples: int
    lookalikes: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Sighting:
    """A place of a log where a signature fits.

    :param line: 1-based number; 0 for the figures of the whole log.
    :param taken_by: another signature that goes first there; empty where none does.
    """

    line: int
    text: str
    where: Where
    explanation: str
    taken_by: str = ""


def places(signature: Signature, example: Example) -> list[Where]:
    """Where an example stands: as it says, else everywhere its signature looks (with a frame: in a traceback)."""
    if example.where:
        return [example.where]
    return [where for where in signature.where if not example.frame or where == "traceback"]


def _matches(library: Library, example: Example, where: Where) -> list[Match]:
    if where != "metrics":
        return list(library.matches(example.text, where, example.service(), example.frames()))
    from ddtree_ops.diagnose.figures import read_example

    return library.detect(read_example(example.text), example.service())


def try_signature(signature: Signature, library: Library) -> Trial:
    """Try the examples and look-alikes of a signature against all signatures of ``library`` (its own among them)."""
    problems: list[str] = []
    for number, example in enumerate(signature.examples, 1):
        for where in places(signature, example):
            found = _matches(library, example, where)
            names = [match.signature.id for match in found]
            here = f"example {number} ({where})"
            if signature.id not in names:
                problems.append(f"{here} does not match" + (f"; {names[0]} does" if names else ""))
            elif where != "metrics" and names[0] != signature.id:
                problems.append(f"{here} is taken by {names[0]}")
            else:
                match = found[names.index(signature.id)]
                problems += [f"{here}: {text}" for text in _gaps(signature, match)]
        if signature.literal and not any(literal in example.text for literal in signature.literal):
            problems.append(f"example {number} holds none of the literals")
    for number, example in enumerate(signature.lookalikes, 1):
        for where in places(signature, example):
            names = [match.signature.id for match in _matches(library, example, where)]
            if signature.id in (names if where == "metrics" else names[:1]):
                problems.append(f"look-alike {number} ({where}) matches")
    problems += [
        f"the literal {literal!r} is in no example"
        for literal in signature.literal
        if not any(literal in example.text for example in signature.examples)
    ]
    return Trial(signature.id, len(signature.examples), len(signature.lookalikes), tuple(problems))


def _gaps(signature: Signature, match: Match) -> Iterator[str]:
    """Names that the filled templates leave open: they must be given by the pattern, or stand in ``[[ ]]``."""
    for name in ("explanation", "remedy"):
        template, text = getattr(signature, name), getattr(match, name)
        plain = fill(template, dict.fromkeys(template_fields(template), "given"))
        if "unknown" in text and "unknown" not in plain:
            yield f'the {name} says "unknown": a name that may be missing belongs into [[ ]]'


def sightings(
    signature: Signature, lines: Iterable[LogLine], library: Library, facts: ServiceFacts
) -> Iterator[Sighting]:
    """Every place of a log where ``signature`` fits, in the order of the log.

    :param library: what the signature competes with; it is among them.
    """
    tally = None
    if signature.detector is not None:
        from ddtree_ops.diagnose.figures import Tally

        tally = Tally()
    for event in parse_events(lines):
        if isinstance(event, ServerArgs):
            facts = facts.learn_arguments(event.values)
        elif isinstance(event, Traceback):
            for text in filter(None, (event.header, event.before)):
                yield from _sighted(signature, library.matches(text, "log", facts), event.number, text, "log")
            for block in event.exceptions:
                found = library.matches(block.text, "traceback", facts, block.frames)
                yield from _sighted(signature, found, block.number or event.number, block.text, "traceback")
        else:
            line = event.line
            if tally is not None:
                tally.feed_text(line.text, event.time)
            where = _SOURCES[line.source]
            found = library.matches(event.body, where, facts)
            yield from _sighted(signature, found, line.number, line.text, where)
    if tally is not None:
        for match in library.detect(tally.figures(), facts):
            if match.signature.id == signature.id:
                yield Sighting(0, "", "metrics", match.explanation)


def _sighted(
    signature: Signature, found: Iterable[Match], number: int, text: str, where: Where
) -> Iterator[Sighting]:
    first = ""
    for match in found:
        if match.signature.id == signature.id:
            yield Sighting(number, text.partition("\n")[0], where, match.explanation, first)
            return
        first = first or match.signature.id
