"""Tracebacks of several processes shuffled line by line in a file that does not say who wrote what.

Ranks mostly fail alike, so a line is written as often as ranks came by it. Where all end in the same exception, the
lines in the order in which they first appear are its traceback. Where they do not, a line belongs to those exceptions
whose counts add up to the line's, as far as the order of the lines allows it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from ddtree_ops.diagnose.tracebacks import CAUSE, DURING, Collector, Traceback, exception_of, unrelated

__all__ = ["Cluster", "Head"]

_LIMIT = 20_000
_MAX_HEADS = 64
_MAX_ENDS = 6
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
_IN = re.compile(r", in (?:<?\w+>?\.)*<?(\w+)>?$")


@dataclass(frozen=True, slots=True)
class Head:
    """The first line of one of the tracebacks."""

    header: str
    rank: str
    time: str
    number: int
    before: str = ""


@dataclass(slots=True)
class _Text:
    """A distinct line: where it occurs (positions within the cluster), the line number of the first."""

    body: str
    kind: str
    number: int
    at: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.at)


def _plain_key(body: str) -> str:
    return _NUMBER.sub("N", body)


@dataclass(slots=True)
class Cluster:
    """Lines of tracebacks that overlap."""

    heads: list[Head]
    pid: int | None
    touched: int
    lines: list[tuple[str, str, int]] = field(default_factory=list)
    ends: int = 0
    links: int = 0
    marks: int = 0
    torn: bool = False

    @property
    def complete(self) -> bool:
        """As many exceptions came as tracebacks were begun."""
        return self.ends - self.links >= max(len(self.heads), 1)

    def joins(self, rank: str) -> bool:
        """Whether a traceback that begins at once after these may be another process's of the same failure."""
        if len(self.heads) >= _MAX_HEADS // 4 or not self.heads:
            return False
        return not rank or all(head.rank != rank for head in self.heads)

    def open(self, head: Head) -> None:
        """One more traceback begins."""
        self.heads.append(head)

    def tear(self, links: int, marks: int) -> None:
        """Lines of a traceback whose begin is lost are among these: what comes last of each tells the order."""
        if links:
            self.links, self.marks, self.torn = self.links + links, self.marks + marks, True

    def inner(self) -> bool:
        """Whether a header without prefix is the next of a chain."""
        if self.marks < self.links:
            self.marks += 1
            return True
        return False

    def take(self, body: str, number: int) -> bool:
        """Add an unprefixed line; False if it belongs to no traceback."""
        if not body or body.isspace():
            return True
        if body.startswith('  File "'):
            kind = "frame"
        elif body[0].isspace():
            if not body.strip(" \t^~"):
                return True
            kind = "code"
        elif body.startswith((DURING, CAUSE)):
            kind = "link"
            self.links += 1
        elif unrelated(body):
            return False
        elif exception_of(body, strict=True) is not None:
            kind = "end"
            self.ends += 1
        elif self.ends:
            kind = "more"
        else:
            return False
        if len(self.lines) < _LIMIT:
            self.lines.append((kind, body, number))
        return True

    def records(self) -> list[Traceback]:
        """One record a traceback: the ranks are named where all failed alike."""
        texts = self._distinct()
        ends = [text for text in texts if text.kind == "end"]
        heads = self.heads[:_MAX_HEADS]
        if not heads:
            count = min(max(self.ends - self.links, 1), _MAX_HEADS)
            number = self.lines[0][2] if self.lines else 0
            heads = [Head("", "", "", number) for _ in range(count)]
        whole = len(heads)
        counts = {text.count for text in ends}
        alike = self.links and max(counts, default=0) - min(counts, default=0) <= max(whole // 4, 1)
        if len(ends) < 2 or alike or min(counts) >= whole:
            if self.torn:
                texts.sort(key=lambda text: text.at[-1])
            found = self._parse(texts, heads[0])
            return [self._named(found, head) for head in heads] if found is not None else []
        if whole == 2:
            return self._followed(heads)
        return self._split(texts, ends, heads)

    def _distinct(self) -> list[_Text]:
        found: dict[tuple[str, str], _Text] = {}
        for place, (kind, body, number) in enumerate(self.lines):
            key = (kind, body.strip() if kind in ("frame", "code") else _plain_key(body))
            text = found.get(key)
            if text is None:
                text = found[key] = _Text(body, kind, number)
            text.at.append(place)
        return list(found.values())

    def _parse(self, texts: Sequence[_Text], head: Head) -> Traceback | None:
        """One traceback of its distinct lines in order: links are put where a traceback goes on after an exception."""
        links = [text.body for text in texts if text.kind == "link"]
        used = 0
        collector = Collector(head.header, head.rank, head.time, head.number, self.pid, 0, head.before)
        for text in texts:
            if text.kind == "link":
                continue
            if text.kind in ("frame", "end") and collector.finished and links:
                collector.take(links[min(used, len(links) - 1)], text.number)
                collector.resume()
                used += 1
            if text.kind == "end" and not collector.finished:
                found = exception_of(text.body)
                if found is not None:
                    collector.raised(*found, text.number)
            else:
                collector.take(text.body, text.number)
        return collector.record()

    def _named(self, record: Traceback, head: Head, sure: bool = True) -> Traceback:
        return Traceback(
            head.header, head.rank, head.time, head.number, self.pid, record.exceptions, head.before, "python",
            f"line {head.number}" if self.heads else "", sure,
        )  # fmt: skip

    def _followed(self, heads: Sequence[Head]) -> list[Traceback]:
        """Two tracebacks: each line goes to the one that it continues better, the later one of equals.

        The places are sure only where the last frames and the exceptions had one that they continue better.
        """
        pair = [
            _Follower(Collector(h.header, h.rank, h.time, h.number, self.pid, 0, h.before)) for h in heads
        ]
        for place, (kind, body, number) in enumerate(self.lines):
            first, second = (one.fit(kind, body) for one in pair)
            best = pair[0] if (first, pair[0].place) >= (second, pair[1].place) else pair[1]
            best.take(kind, body, number, place, first != second)
            if kind == "code" and first == second and pair[0].frame != pair[1].frame:
                for one in pair:
                    one.torn = True
        sure = all(one.sure and not one.torn for one in pair)
        records = [one.collector.record() for one in pair]
        return [self._named(r, head, sure) for r, head in zip(records, heads, strict=True) if r is not None]

    def _split(self, texts: Sequence[_Text], ends: Sequence[_Text], heads: Sequence[Head]) -> list[Traceback]:
        """Three or more tracebacks that do not all end alike."""
        classes: list[list[_Text]] = []
        if self.links:
            for count in sorted({text.count for text in ends}, reverse=True):
                classes.append([text for text in ends if text.count == count])
        else:
            classes = [[text] for text in sorted(ends, key=lambda text: -text.count)]
        classes = classes[:_MAX_ENDS]
        owners = _Owners(classes)
        paths: list[list[_Text]] = [[] for _ in classes]
        sure = [True] * len(classes)
        for text in texts:
            found_owners, told = owners.of(text, paths)
            for index in found_owners:
                paths[index].append(text)
                if text.kind in ("frame", "code"):
                    sure[index] = told and (sure[index] or (text.kind == "frame" and not owners.tied))
        found = []
        spare = list(heads)
        for members, path, told in zip(classes, paths, sure, strict=True):
            blank = Head(heads[0].header, "", heads[0].time, path[-1].number if path else heads[0].number)
            record = self._parse(path, blank)
            if record is None:
                continue
            for _ in range(min(members[-1].count, len(spare))):
                head = spare.pop(0)
                found.append(self._named(record, Head(head.header, "", head.time, head.number), told))
        return found


class _Owners:
    """Which of the endings a line leads to."""

    def __init__(self, classes: Sequence[Sequence[_Text]]) -> None:
        self.of_end = {id(text): index for index, members in enumerate(classes) for text in members}
        self.counts = [members[-1].count for members in classes]
        self.ends = [members[-1].at for members in classes]
        self.tied = len(set(self.counts)) < len(self.counts)
        every = range(len(classes))
        self.sets = [subset for size in range(len(classes), 0, -1) for subset in combinations(every, size)]

    def of(self, text: _Text, paths: Sequence[Sequence[_Text]]) -> tuple[tuple[int, ...], bool]:
        """The endings, and whether no other ones would do as well."""
        if id(text) in self.of_end:
            return (self.of_end[id(text)],), True
        for times in (1, 2, 3, 4):
            fitting = [
                subset
                for subset in self.sets
                if sum(self.counts[i] for i in subset) * times == text.count and self._allows(subset, text)
            ]
            if fitting:
                scores = [self._continues(subset, text, paths) for subset in fitting]
                best = max(scores)
                return fitting[scores.index(best)], sum(fit == best[0] for fit, _ in scores) == 1
        allowed = tuple(i for i in range(len(self.counts)) if self._allows((i,), text))
        return allowed or tuple(range(len(self.counts))), False

    def _allows(self, subset: Sequence[int], text: _Text) -> bool:
        """Each ending needs the line before it, once more for each time that it was reached."""
        if text.kind == "more":
            return all(self.ends[i][0] < text.at[0] for i in subset)
        reached = sorted(place for i in subset for place in self.ends[i])
        return all(before < place for before, place in zip(text.at, reached, strict=False))

    def _continues(
        self, subset: Sequence[int], text: _Text, paths: Sequence[Sequence[_Text]]
    ) -> tuple[float, float]:
        """How well the text continues their paths, and how late the lines before it came."""
        score = late = 0.0
        for index in subset:
            path = paths[index]
            last = path[-1] if path else None
            score += _fits(last.kind if last else "", last.body if last else "", text.kind, text.body)
            late += last.at[0] if last else 0.0
        return score / len(subset), late / len(subset)


def _fits(last: str, before: str, kind: str, body: str) -> float:
    """How well a line of this kind continues what came before it in one traceback."""
    if kind == "code":
        return {"frame": 3.0, "code": -2.0, "end": 0.0}.get(last, -9.0)
    if kind == "frame":
        name = _IN.search(body)
        called = name is not None and re.search(rf"\b{re.escape(name[1])}\b", before) is not None
        return {"frame": 0.0, "code": 5.0 if called else 1.0, "": 2.0, "link": 2.0}.get(last, -9.0)
    if kind == "end":
        short = body.partition(":")[0].rpartition(".")[2]
        raised = last == "code" and (short in before or before.lstrip().startswith(("raise", "assert")))
        return {"frame": 0.0, "code": 4.0 if raised else 1.0}.get(last, -9.0)
    return {"end": 2.0, "more": 2.0}.get(last, -9.0)


@dataclass(slots=True)
class _Follower:
    collector: Collector
    last: str = ""
    before: str = ""
    place: int = -1
    sure: bool = True
    torn: bool = False
    frame: str = ""

    def fit(self, kind: str, body: str) -> float:
        return _fits(self.last, self.before, kind, body) + (0.0 if self.last else 1.0)

    def take(self, kind: str, body: str, number: int, place: int, sure: bool) -> None:
        collector = self.collector
        if kind == "frame":
            self.sure, self.frame = sure, body
        elif kind == "end":
            self.sure = self.sure and sure
        if kind == "end" and not collector.finished:
            found = exception_of(body)
            if found is not None:
                collector.raised(*found, number)
        elif kind == "link":
            collector.take(body, number)
            collector.resume()
        else:
            collector.take(body, number)
        self.last, self.before, self.place = kind, body, place
