"""What a log says in figures: counts, acceptance, throughput over time, and the findings that no text gives.

A :class:`Tally` is fed with the raw bytes of a log, whatever wrapping it is in, or with single texts. Counts and the
histogram of ``accept len`` are exact; what needs a line to be parsed is taken from evenly spaced decode lines, a
bounded number a chunk. A new ``server_args=ServerArgs(`` dump begins a new life of the server: figures are kept for
the last life and over all.

A detector reads figures and facts and says whether a signature with ``where: metrics`` fits. Each needs a least
number of samples: no data, no finding. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from ddtree_ops.attention import drops_tree_mask
from ddtree_ops.diagnose.events import parse_decode, parse_server_args
from ddtree_ops.diagnose.explain import Solution
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.lines import seconds_of
from ddtree_ops.secret import redact
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from ddtree_ops.diagnose.library import Library
    from ddtree_ops.diagnose.reduce import Diagnosis

__all__ = [
    "DETECTORS",
    "USELESS",
    "Bucket",
    "DecodeSummary",
    "Detector",
    "Evidence",
    "Figures",
    "Life",
    "Sample",
    "Series",
    "Stat",
    "Tally",
    "above_block",
    "findings",
    "read_example",
    "useless",
]

USELESS = 1.005
"""Accept length up to which every draft counts as rejected: 1.00 as it is printed."""
_TOLERANCE = 0.01


def useless(accept_len: float) -> bool:
    """Whether a mean accept length says that every draft was rejected."""
    return accept_len <= USELESS


def above_block(accept_len: float, block_size: int) -> bool:
    """Whether an accept length is more than a block can hold: the accounting is broken."""
    return accept_len > block_size + _TOLERANCE


# --- what is kept ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stat:
    """Of ``n`` samples: mean, least, most."""

    n: int
    mean: float
    min: float
    max: float

    def merged(self, other: Stat) -> Stat:
        """Of the samples of both."""
        n = self.n + other.n
        mean = (self.mean * self.n + other.mean * other.n) / n
        return Stat(n, mean, min(self.min, other.min), max(self.max, other.max))


@dataclass(frozen=True, slots=True)
class Sample:
    """One decode line of rank 0, parsed. What it does not print is None.

    :param time: as printed by the server, else by the wrapping; empty where neither says it.
    :param at: the same in seconds, only good for differences.
    :param tokens: tokens in the KV cache.
    :param accept: tokens a verify step.
    :param throughput: tokens a second.
    :param usage: used part of the KV pool, 0..1.
    :param steady: the decode line before it was of the same running requests, without a pause between the two.
    """

    time: str = ""
    at: float | None = None
    running: int | None = None
    tokens: int | None = None
    accept: float | None = None
    throughput: float | None = None
    usage: float | None = None
    queued: int | None = None
    graph: bool | None = None
    steady: bool = False


_SERIES = ("throughput", "accept", "running", "queued", "usage")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A stretch of time: ``n`` decode lines between ``start`` and ``end`` (as printed, empty where not known).

    :param throughput: tokens a second.
    :param accept: tokens a verify step; None without speculation.
    :param running: requests.
    :param queued: requests.
    :param usage: used part of the KV pool, 0..1.
    """

    start: str
    end: str
    n: int
    throughput: Stat | None = None
    accept: Stat | None = None
    running: Stat | None = None
    queued: Stat | None = None
    usage: Stat | None = None

    def merged(self, later: Bucket) -> Bucket:
        """This stretch and the one after it."""
        parts: dict[str, Stat | None] = {}
        for name in _SERIES:
            mine, other = getattr(self, name), getattr(later, name)
            parts[name] = mine.merged(other) if mine and other else mine or other
        return Bucket(self.start or later.start, later.end or self.end, self.n + later.n, **parts)

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable; what was not printed is left out."""
        found: dict[str, Any] = {"start": self.start, "end": self.end, "n": self.n}
        for name in _SERIES:
            stat: Stat | None = getattr(self, name)
            if stat is not None:
                found[name] = {key: round(value, 4) for key, value in asdict(stat).items()}
        return found


@dataclass(frozen=True, slots=True)
class Series:
    """Decode lines of rank 0 over time, at most 512 buckets of about equally many lines, in the order of the log.

    :param samples: parsed lines in all buckets; a sample of the decode lines where there are many.
    """

    buckets: tuple[Bucket, ...] = ()
    samples: int = 0

    @property
    def total(self) -> Bucket | None:
        """All buckets as one."""
        whole: Bucket | None = None
        for bucket in self.buckets:
            whole = bucket if whole is None else whole.merged(bucket)
        return whole


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line a figure rests on: 1-based number in what was fed, text, time as printed."""

    line: int
    text: str
    time: str = ""


@dataclass(frozen=True)
class Life:
    """One start of the server, or several taken together. Counts are exact but for those marked sampled.

    :param decode_lines: ``Decode batch`` lines, one every 40 decode steps.
    :param with_graph: of these, in a CUDA graph; ``without_graph`` likewise.
    :param accept: ``accept len`` as printed -> decode lines with it.
    :param retractions: lines that say that requests were taken back for want of KV cache.
    :param pool_tokens: tokens the KV pool holds; ``context_len`` the longest request allowed.
    :param available_gb: GPU memory left after the pool and the graphs, GB; ``free_gb`` before the weights were loaded.
    :param graph_sizes: batch sizes with a captured graph.
    :param arguments: the ``ServerArgs`` dump it started with; empty where it was not logged.
    :param cached_tokens: prompt tokens found in the prefix cache, sampled; ``new_tokens`` computed.
    :param prefill_samples: prefill lines these two rest on.
    :param other_ranks: sampled decode lines of data-parallel ranks other than 0, left out of the series.
    :param stats: throughput, acceptance, running and queued requests, usage of the pool: of the sampled lines.
    :param samples: sampled decode lines, evenly spaced, at most 1024 (last life only).
    :param finished: answers logged by ``--log-requests``; ``bangs`` of these hold a run of ``!``.
    :param quiet_s: seconds of log after the last batch line, None where times are missing.
    :param quiet_unhealthy: health requests answered with 503 in that time; ``quiet_posts`` generation requests.
    :param posts_s: seconds from the last batch line to the last of these requests.
    :param stopping: a stop was asked for after the last batch line.
    :param evidence: lines the figures rest on: ``decode`` (last), ``accept`` (highest), ``limits``, ``retract``, ``bang``.
    """

    decode_lines: int = 0
    prefill_lines: int = 0
    with_graph: int = 0
    without_graph: int = 0
    accept: Mapping[float, int] = field(default_factory=dict)
    retractions: int = 0
    retracted: int = 0
    pool_tokens: int | None = None
    context_len: int | None = None
    available_gb: float | None = None
    free_gb: float | None = None
    graph_sizes: tuple[int, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ready: bool = False
    cached_tokens: int = 0
    new_tokens: int = 0
    prefill_samples: int = 0
    other_ranks: int = 0
    stats: Mapping[str, Stat] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    finished: int = 0
    bangs: int = 0
    quiet_s: float | None = None
    quiet_unhealthy: int = 0
    quiet_posts: int = 0
    posts_s: float | None = None
    stopping: bool = False
    evidence: Mapping[str, Evidence] = field(default_factory=dict)

    @property
    def accept_lines(self) -> int:
        """Decode lines with an ``accept len``."""
        return sum(self.accept.values())

    @property
    def accept_mean(self) -> float | None:
        """Mean over the lines, tokens a verify step; None without speculation."""
        lines = self.accept_lines
        return sum(value * times for value, times in self.accept.items()) / lines if lines else None

    @property
    def accept_max(self) -> float | None:
        """The highest of all lines."""
        return max(self.accept, default=None)

    def accept_above(self, limit: float) -> int:
        """Decode lines with more than ``limit``."""
        return sum(times for value, times in self.accept.items() if value > limit)

    def accept_quantile(self, part: float) -> float | None:
        """The accept length that ``part`` (0..1) of the lines do not exceed."""
        wanted, seen = part * self.accept_lines, 0
        for value, times in sorted(self.accept.items()):
            seen += times
            if seen >= wanted:
                return value
        return None

    def to_json(self) -> dict[str, Any]:
        """Every figure with its unit, the samples it rests on, and whether it is exact."""

        def figure(value: Any, unit: str, samples: int, exact: bool = True, **more: Any) -> dict[str, Any]:
            return {"value": value, **more, "unit": unit, "samples": samples, "exact": exact}

        found: dict[str, Any] = {
            "decode_lines": figure(self.decode_lines, "lines", self.decode_lines),
            "prefill_lines": figure(self.prefill_lines, "lines", self.prefill_lines),
            "cuda_graph_lines": figure(
                self.with_graph, "lines", self.with_graph + self.without_graph, without=self.without_graph
            ),
            "retractions": figure(self.retractions, "lines", self.retractions, requests=self.retracted),
        }
        mean = self.accept_mean
        if mean is not None:
            found["accept_len"] = figure(
                round(mean, 3),
                "tokens/verify step",
                self.accept_lines,
                min=min(self.accept),
                p10=self.accept_quantile(0.1),
                p50=self.accept_quantile(0.5),
                p90=self.accept_quantile(0.9),
                max=self.accept_max,
            )
        units = {
            "throughput": "tokens/s",
            "running": "requests",
            "queued": "requests",
            "usage": "fraction of the KV pool",
        }
        for name, unit in units.items():
            stat = self.stats.get(name)
            if stat is not None:
                exact = stat.n >= self.decode_lines
                found[name] = figure(round(stat.mean, 3), unit, stat.n, exact, min=stat.min, max=stat.max)
        if self.prefill_samples:
            exact = self.prefill_samples >= self.prefill_lines
            found["new_tokens"] = figure(self.new_tokens, "prompt tokens", self.prefill_samples, exact)
            found["cached_tokens"] = figure(self.cached_tokens, "prompt tokens", self.prefill_samples, exact)
        for name, value, unit in (
            ("pool_tokens", self.pool_tokens, "tokens"),
            ("context_len", self.context_len, "tokens"),
            ("available_gpu_memory", self.available_gb, "GB"),
        ):
            if value is not None:
                found[name] = figure(value, unit, 1)
        if self.finished:
            found["bang_answers"] = figure(self.bangs, "answers", self.finished)
        return found


@dataclass(frozen=True)
class DecodeSummary:
    """Figures over all decode lines seen.

    :param lines: number of decode lines.
    :param accept_len: mean over the lines that print it; None without speculation.
    :param cuda_graph: whether the last line ran in a graph; None where not printed.
    """

    lines: int = 0
    accept_len: float | None = None
    cuda_graph: bool | None = None


@dataclass(frozen=True)
class Figures:
    """The figures of a log.

    :param lines: lines fed.
    :param starts: server starts seen (``ServerArgs`` dumps).
    :param ready: times of "fired up and ready to roll", the last 64.
    :param simulated: value of ``SGLANG_SIMULATE_ACC_LEN`` where one above 0 was seen.
    :param last: the last life; ``overall`` all of them.
    :param series: over all lives, for a chart.
    """

    lines: int = 0
    starts: int = 0
    ready: tuple[str, ...] = ()
    simulated: float | None = None
    simulated_line: Evidence | None = None
    last: Life = field(default_factory=Life)
    overall: Life = field(default_factory=Life)
    series: Series = field(default_factory=Series)

    def __bool__(self) -> bool:
        """False where the log holds nothing that counts as a figure."""
        return bool(
            self.overall.decode_lines
            or self.overall.prefill_lines
            or self.overall.pool_tokens
            or self.starts
            or self.ready
            or self.simulated
        )

    @property
    def restarts(self) -> int:
        """Starts after the first."""
        return max(self.starts - 1, 0)

    def decode_summary(self) -> DecodeSummary:
        """The short form that checks show: of all decode lines."""
        mean, line = self.overall.accept_mean, self.overall.evidence.get("decode")
        last = parse_decode(line.text) if line else None
        return DecodeSummary(
            lines=self.overall.decode_lines,
            accept_len=None if mean is None else round(mean, 3),
            cuda_graph=last.cuda_graph if last else None,
        )

    def to_json(self) -> dict[str, Any]:
        """``figures`` of ``diagnose --json``."""
        found: dict[str, Any] = {
            "starts": self.starts,
            "ready": list(self.ready),
            "last": self.last.to_json(),
            "overall": self.overall.to_json(),
            "series": [bucket.to_json() for bucket in self.series.buckets],
        }
        if self.simulated is not None:
            found["simulated"] = self.simulated
        return found


# --- how it is counted -------------------------------------------------------------------------------------

_BUCKETS = 512
_KEEP = 1024
_AT_ONCE, _LATER, _SHORT = 256, 64, 1 << 14
_PREFILLS_AT_ONCE = 16
_PENDING = 1 << 16
_LONGEST = 1 << 18
_DISTINCT = 1 << 14

_DECODE, _PREFILL = b"Decode batch", b"Prefill batch"
_START = b"server_args=ServerArgs("
_READY = b"fired up and ready to roll"
_LIMITS, _POOL, _SIZES = (
    b"max_total_num_tokens=",
    b"KV Cache is allocated. #tokens: ",
    b"Capture cuda graph bs [",
)
_RETRACT = b"#retracted_reqs: "
_SIMULATED = b"SGLANG_SIMULATE_ACC_LEN"
_REQUESTS = (b"obj=GenerateReqInput(", b"Receive OpenAI: obj=")
"""``--log-requests``: what users wrote is no figure."""
_BANGS = b"!!!!!!!!!!!!"
_FINISH_MARK, _BANG_MARK = b"\x00finished", b"\x00finished!"

_ACCEPT = re.compile(rb"accept len: (\d[\d.]*)")
_OWN = re.compile(rb"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,]\d+)?((?: [A-Z][A-Z_]{0,15}\d{1,5})*)\] ?")
_JOURNAL = re.compile(rb'__REALTIME_TIMESTAMP" ?: ?"(\d{13,19})"')
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)")
_OTHER_RANK = re.compile(rb" [A-Z]+0*[1-9]\d*")
_LIMIT = re.compile(rb"(max_total_num_tokens|context_len|available_gpu_mem)=(\d+(?:\.\d+)?)")
_BEGIN = re.compile(rb"Load weight begin\. avail mem=(\d{1,6}(?:\.\d{1,6})?) GB")
_NUMBER = re.compile(rb"\d+")
_SIMULATE_VALUE = re.compile(rb"SIMULATE_ACC_LEN[\"']?\s{0,3}[=:]\s{0,3}[\"']?(-?\d{1,4}(?:\.\d{1,6})?)")
_UNHEALTHY = re.compile(rb"/health(?:_generate)? HTTP/1\.[01]\\?\" 503")
_POSTS = tuple(
    f"POST {path} HTTP/1.1{quote} 200".encode()
    for path in ("/v1/chat/completions", "/v1/completions", "/generate")
    for quote in ('"', '\\"')
)
_RUNNING = re.compile(rb"#running-req: (\d{1,6}), #(?:full )?token: (\d{1,12})")
_CACHED = re.compile(rb"#new-token: (\d{1,12}), #cached-token: (\d{1,12})")


class _Stamp(NamedTuple):
    """When a line was written: by the server's own clock and by that of the wrapping."""

    own: str = ""
    wrapped: str = ""

    @property
    def text(self) -> str:
        return self.own or self.wrapped

    def since(self, earlier: _Stamp) -> float | None:
        """Seconds from ``earlier``, by a clock that both have."""
        for mine, other in ((self.own, earlier.own), (self.wrapped, earlier.wrapped)):
            a, b = seconds_of(mine), seconds_of(other)
            if a is not None and b is not None:
                return a - b
        return None


def _stamp(line: bytes, own: re.Match[bytes] | None) -> _Stamp:
    """The times of a line. ``own``: its own prefix, where that was found already."""
    outside = line if own is None else line[: own.start()] + line[own.end() :]
    wrapped = ""
    if (found := _JOURNAL.search(outside)) is not None:
        moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=int(found[1]))
        wrapped = moment.strftime("%Y-%m-%d %H:%M:%S")
    elif (found := _STAMP.search(outside)) is not None:
        wrapped = found[1].decode().replace("T", " ")
    return _Stamp(own[1].decode().replace("T", " ") if own else "", wrapped)


def _line(data: bytes, position: int) -> tuple[int, int]:
    """Start and end of the line around a position."""
    end = data.find(b"\n", position)
    return data.rfind(b"\n", 0, position) + 1, len(data) if end < 0 else end


def _prefix(data: bytes, start: int, position: int) -> re.Match[bytes] | None:
    """The server's prefix of the record whose text begins about ``position``."""
    at = data.rfind(b"[20", max(start, position - 400), position)
    return _OWN.match(data, at, position) if at >= 0 else None


def _plain(data: bytes) -> str:
    """A record without the rest of its wrapping."""
    for mark in (b'"', b"\\", b"\r", b"\x1b"):
        data = data.partition(mark)[0]
    return data[:2000].decode("utf-8", "replace").rstrip()


def _message(line: bytes) -> str:
    """The text of a line without JSON around it; colours and other prefixes stay."""
    if line.startswith(b"{"):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            for name in ("MESSAGE", "log", "message"):
                if isinstance(value.get(name), str):
                    return str(value[name])
    return line.decode("utf-8", "replace")


def _evidence(data: bytes, begin: int, at: int, end: int, number: int) -> Evidence:
    own = _prefix(data, begin, at)
    text = _plain(data[own.start() if own else at : end])
    return Evidence(number, redact(text), _stamp(data[begin:end], own).text)


class _Sum:
    """A :class:`Stat` while it grows."""

    __slots__ = ("high", "low", "n", "total")

    def __init__(self) -> None:
        self.n, self.total, self.low, self.high = 0, 0.0, 0.0, 0.0

    def add(self, value: float) -> None:
        if not self.n or value < self.low:
            self.low = value
        if not self.n or value > self.high:
            self.high = value
        self.n += 1
        self.total += value

    def stat(self) -> Stat | None:
        return Stat(self.n, self.total / self.n, float(self.low), float(self.high)) if self.n else None


def _stats(samples: Iterable[Sample]) -> dict[str, _Sum]:
    sums = {name: _Sum() for name in _SERIES}
    for sample in samples:
        for name, total in sums.items():
            value = getattr(sample, name)
            if value is not None:
                total.add(value)
    return sums


class _Buckets:
    """At most ``_BUCKETS`` buckets; when they are full two neighbours become one."""

    def __init__(self) -> None:
        self.done: list[Bucket] = []
        self.open: list[Sample] = []
        self.size = 1
        self.samples = 0

    def add(self, sample: Sample) -> None:
        self.samples += 1
        self.open.append(sample)
        if len(self.open) < self.size:
            return
        self.done.append(self.bucket())
        self.open = []
        if len(self.done) >= _BUCKETS:
            self.done = [a.merged(b) for a, b in zip(self.done[::2], self.done[1::2], strict=True)]
            self.size *= 2

    def bucket(self) -> Bucket:
        stats = {name: total.stat() for name, total in _stats(self.open).items()}
        times = [sample.time for sample in self.open if sample.time]
        return Bucket(times[0] if times else "", times[-1] if times else "", len(self.open), **stats)

    def series(self) -> Series:
        return Series((*self.done, *((self.bucket(),) if self.open else ())), self.samples)


class _Spaced:
    """Which decode lines to parse: every ``stride``-th; twice as far apart whenever ``_KEEP`` are kept."""

    def __init__(self) -> None:
        self.kept: list[Sample] = []
        self.stride, self.due, self.seen = 1, 0, 0

    def wanted(self, lines: int) -> int:
        """How many of so many new lines."""
        self.seen += lines
        most = _AT_ONCE if self.seen <= _SHORT else _LATER
        factor = -(-(self.due + lines) // (most * self.stride))
        if factor > 1:
            self.kept = self.kept[::factor]
            self.stride *= factor
        self.due += lines
        most, self.due = divmod(self.due, self.stride)
        return most

    def add(self, sample: Sample) -> None:
        if len(self.kept) >= _KEEP:
            self.kept = self.kept[::2]
            self.stride *= 2
        self.kept.append(sample)


_SUMS = (
    *("decode_lines", "prefill_lines", "with_graph", "without_graph", "retractions", "retracted"),
    *("cached_tokens", "new_tokens", "prefill_samples", "other_ranks", "finished", "bangs"),
)


@dataclass
class _Counts:
    """A life while it is counted."""

    decode_lines: int = 0
    prefill_lines: int = 0
    with_graph: int = 0
    without_graph: int = 0
    accept: Counter[bytes] = field(default_factory=Counter)
    highest: float = 0.0
    retractions: int = 0
    retracted: int = 0
    pool_tokens: int | None = None
    limits: dict[str, float] = field(default_factory=dict)
    free_gb: float | None = None
    graph_sizes: tuple[int, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    started: bool = False
    ready: bool = False
    cached_tokens: int = 0
    new_tokens: int = 0
    prefill_samples: int = 0
    other_ranks: int = 0
    finished: int = 0
    bangs: int = 0
    spaced: _Spaced = field(default_factory=_Spaced)
    batch: _Stamp | None = None
    end: _Stamp | None = None
    unhealthy: int = 0
    posts: int = 0
    post: _Stamp | None = None
    stopping: bool = False
    evidence: dict[str, Evidence] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (
            self.started
            or self.ready
            or self.decode_lines
            or self.prefill_lines
            or self.limits
            or self.pool_tokens
        )

    def add(self, other: _Counts) -> None:
        """Take in a later life."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.accept.update(other.accept)
        if other.limits or other.pool_tokens:
            self.limits, self.pool_tokens = dict(other.limits), other.pool_tokens
            self.free_gb = other.free_gb
        self.ready = self.ready or other.ready
        self.evidence.update(other.evidence)

    def life(self, samples: Sequence[Sample], series: Series | None = None) -> Life:
        accept: Counter[float] = Counter()
        for text, times in self.accept.items():
            value = _float(text)
            if value is not None:
                accept[value] += times
        sums = {name: getattr(self, name) for name in _SUMS}
        quiet = self.end.since(self.batch) if self.batch and self.end else None
        posts = self.post.since(self.batch) if self.batch and self.post else None
        total = series.total if series else None
        found = (
            {name: getattr(total, name) for name in _SERIES}
            if total
            else {name: one.stat() for name, one in _stats(samples).items()}
        )
        stats = {name: stat for name, stat in found.items() if stat is not None}
        pool, context = self.limits.get("max_total_num_tokens"), self.limits.get("context_len")
        return Life(
            **sums,
            accept=dict(accept),
            pool_tokens=int(pool) if pool is not None else self.pool_tokens,
            context_len=int(context) if context is not None else None,
            available_gb=self.limits.get("available_gpu_mem"),
            free_gb=self.free_gb,
            graph_sizes=self.graph_sizes,
            arguments=dict(self.arguments),
            ready=self.ready,
            stats=stats,
            samples=tuple(samples),
            quiet_s=quiet,
            quiet_unhealthy=self.unhealthy,
            quiet_posts=self.posts,
            posts_s=posts,
            stopping=self.stopping,
            evidence=dict(self.evidence),
        )


def _float(text: bytes) -> float | None:
    try:
        return float(text.rstrip(b"."))
    except ValueError:
        return None


class Tally:
    """Counts a log while it is read. Memory does not grow with the log.

    Lines are what counts: any way to cut a log into chunks gives the same exact figures.
    """

    def __init__(self) -> None:
        self._lines = 0
        self._starts = 0
        self._ready: list[str] = []
        self._simulated: float | None = None
        self._simulated_line: Evidence | None = None
        self._past = _Counts()
        self._now = _Counts()
        self._all = _Buckets()
        self._rest = b""
        self._texts: list[bytes] = []
        self._waiting = 0

    # -- feeding

    def feed(self, chunk: bytes, *, lines: int | None = None) -> None:
        """Count a piece of raw log, whatever wraps its lines.

        :param chunk: best cut at a line end; a rest without one waits for what follows.
        :param lines: newlines in it, where the caller has counted them.
        """
        if self._texts:
            self._flush_texts()
        if self._rest:
            head, newline, chunk = chunk.partition(b"\n")
            self._rest = (self._rest + head)[:_LONGEST]
            if not newline:
                return
            lines = None
            rest, self._rest = self._rest + b"\n", b""
            self._count(rest, 1)
        if chunk and not chunk.endswith(b"\n"):
            end = chunk.rfind(b"\n") + 1
            self._rest, chunk = chunk[end : end + _LONGEST], chunk[:end]
        if chunk:
            self._count(chunk, chunk.count(b"\n") if lines is None else lines)

    def feed_text(self, text: str, time: str = "") -> None:
        """Count one text of a log, such as the message of a journal entry.

        :param time: when it was written, ``2026-01-29 00:24:41`` or ISO; used where the text does not say it itself.
        """
        if self._rest:
            self.feed(b"\n")
        for part in text.rstrip("\n").split("\n"):
            raw = part[:_LONGEST].encode("utf-8", "replace")
            raw = f"{time} ".encode() + raw + b"\n" if time and not raw.startswith(b"{") else raw + b"\n"
            self._texts.append(raw)
            self._waiting += len(raw)
        if self._waiting >= _PENDING:
            self._flush_texts()

    def _flush_texts(self) -> None:
        data, lines = b"".join(self._texts), len(self._texts)
        self._texts, self._waiting = [], 0
        self._count(data, lines)

    def figures(self) -> Figures:
        """The figures so far; more can be fed afterwards. A last line without its newline counts as whole."""
        if self._texts:
            self._flush_texts()
        if self._rest:
            self.feed(b"\n")
        overall = _Counts()
        overall.add(self._past)
        overall.add(self._now)
        series = self._all.series()
        return Figures(
            lines=self._lines,
            starts=self._starts,
            ready=tuple(self._ready),
            simulated=self._simulated,
            simulated_line=self._simulated_line,
            last=self._now.life(self._now.spaced.kept),
            overall=overall.life((), series),
            series=series,
        )

    # -- counting whole lines

    def _count(self, data: bytes, lines: int) -> None:
        here = self._lines
        self._lines += lines
        if _SIMULATED in data:
            self._simulate(data, here)
        start = 0
        while (found := data.find(_START, start)) >= 0:
            begin, end = _line(data, found)
            if any(mark in data[begin:found] for mark in _REQUESTS):
                begin = end + 1
            if begin > start:
                newlines = data.count(b"\n", start, begin)
                self._segment(data[start:begin], here, here + newlines)
                here += newlines
            if begin < end:
                self._restart(data[begin:end])
                here += 1
            start = end + 1
        if start < len(data):
            self._segment(data[start:] if start else data, here, self._lines)

    def _without_requests(self, data: bytes) -> bytes:
        """Request lines taken out, a mark left where one tells an answer; line numbers stay."""
        kept: list[bytes] = []
        for line in data.split(b"\n"):
            if not any(mark in line for mark in _REQUESTS):
                kept.append(line)
            elif b"Finish: obj=" in line:
                kept.append(_BANG_MARK if _BANGS in line.rpartition(b"out=")[2] else _FINISH_MARK)
            else:
                kept.append(b"")
        return b"\n".join(kept)

    def _simulate(self, data: bytes, before: int) -> None:
        for found in _SIMULATE_VALUE.finditer(data):
            begin, end = _line(data, found.start())
            if any(mark in data[begin:end] for mark in _REQUESTS):
                continue
            value = float(found[1])
            self._simulated = value if value > 0 else None
            number = before + data.count(b"\n", 0, begin) + 1
            text = _message(data[begin:end])[:400]
            self._simulated_line = Evidence(number, redact(text)) if value > 0 else None

    def _restart(self, line: bytes) -> None:
        if not self._now.empty:
            self._past.add(self._now)
            self._now = _Counts()
        self._starts += 1
        self._now.started = True
        self._now.arguments = parse_server_args(_message(line[: 1 << 18])) or {}

    def _segment(self, data: bytes, before: int, after: int) -> None:
        """Lines of one life: those with the numbers from ``before + 1`` to ``after``."""
        now = self._now
        if now.arguments.get("log_requests") is not False and _has_requests(data):
            data = self._without_requests(data)
            now.finished += data.count(_FINISH_MARK)
            now.bangs += data.count(_BANG_MARK)
            if now.bangs and "bang" not in now.evidence:
                first = before + data.count(b"\n", 0, data.find(_BANG_MARK)) + 1
                now.evidence["bang"] = Evidence(first, f"an answer with {_BANGS.decode()} in it")
        decodes, prefills = data.count(_DECODE), data.count(_PREFILL)
        if not now.decode_lines:
            self._startup(data[: data.find(_DECODE)] if decodes else data, before)
        if not now.ready and (at := data.find(_READY)) >= 0:
            now.ready = True
            begin, end = _line(data, at)
            self._ready = [
                *self._ready[-63:],
                _stamp(data[begin:end], _prefix(data, begin, at)).text,
            ]
        at = data.find(_RETRACT)
        while at >= 0:
            if not data[max(0, at - 20) : at].endswith(b"Testing retraction. "):
                requests = _NUMBER.match(data, at + len(_RETRACT))
                now.retractions += 1
                now.retracted += int(requests[0][:9]) if requests else 0
                if "retract" not in now.evidence:
                    now.evidence["retract"] = self._evidence(data, at, before)
            at = data.find(_RETRACT, at + 1)
        if decodes:
            now.decode_lines += decodes
            in_graph = data.count(b"cuda graph: True, gen")
            now.with_graph += in_graph
            if in_graph < decodes:
                now.without_graph += data.count(b"cuda graph: False, gen")
            self._acceptance(data, before)
            self._decodes(data, after, decodes)
        if prefills:
            now.prefill_lines += prefills
            self._prefills(data, prefills)
        self._quiet(data, decodes, prefills)

    def _evidence(self, data: bytes, at: int, before: int) -> Evidence:
        begin, end = _line(data, at)
        return _evidence(data, begin, at, end, before + data.count(b"\n", 0, begin) + 1)

    def _startup(self, data: bytes, before: int) -> None:
        now = self._now
        at = data.find(_LIMITS)
        while at >= 0:
            for name, value in _LIMIT.findall(_line_at(data, at)):
                now.limits.setdefault(name.decode(), float(value[:18]))
            if "limits" not in now.evidence:
                now.evidence["limits"] = self._evidence(data, at, before)
            at = data.find(_LIMITS, at + 1)
        if now.free_gb is None and (begin := _BEGIN.search(data)) is not None:
            now.free_gb = float(begin[1])
        if now.pool_tokens is None and (at := data.find(_POOL)) >= 0:
            number = _NUMBER.match(data, at + len(_POOL))
            now.pool_tokens = int(number[0][:15]) if number else None
            now.evidence.setdefault("pool", self._evidence(data, at, before))
        if not now.graph_sizes and (at := data.find(_SIZES)) >= 0:
            sizes = _line_at(data, at)[len(_SIZES) :].partition(b"]")[0]
            now.graph_sizes = tuple(sorted({int(one[:6]) for one in _NUMBER.findall(sizes)}))

    def _acceptance(self, data: bytes, before: int) -> None:
        now = self._now
        values = Counter(_ACCEPT.findall(data))
        if not values:
            return
        now.accept.update(values)
        if len(now.accept) > _DISTINCT:
            rounded: Counter[bytes] = Counter()
            for text, times in now.accept.items():
                rounded[b"%.2f" % (_float(text) or 0.0)] += times
            now.accept = rounded
        best, text = max(((_float(text) or 0.0, text) for text in values), key=lambda item: item[0])
        if best > now.highest:
            now.highest = best
            at = data.find(b"accept len: " + text)
            head = data.rfind(_DECODE, _line(data, at)[0], at)
            now.evidence["accept"] = self._evidence(data, head if head >= 0 else at, before)

    def _decodes(self, data: bytes, after: int, decodes: int) -> None:
        """Parse evenly spaced decode lines, and the last one."""
        now = self._now
        for at in _spaced(data, _DECODE, decodes, now.spaced.wanted(decodes)):
            begin, end = _line(data, at)
            own = _prefix(data, begin, at)
            if own is not None and _OTHER_RANK.search(own[2]):
                now.other_ranks += 1
                continue
            sample = self._sample(data, begin, at, end, own)
            if sample is not None:
                now.spaced.add(sample)
                self._all.add(sample)
        last = data.rfind(_DECODE)
        begin, end = _line(data, last)
        now.evidence["decode"] = _evidence(data, begin, last, end, after - data.count(b"\n", end) + 1)

    def _sample(
        self, data: bytes, begin: int, at: int, end: int, own: re.Match[bytes] | None
    ) -> Sample | None:
        found = parse_decode(_plain(data[at:end]))
        if found is None:
            return None
        stamp = _stamp(data[begin:end], own).text
        return Sample(
            time=stamp,
            at=seconds_of(stamp),
            running=found.running,
            tokens=found.tokens,
            accept=found.accept_len,
            throughput=found.gen_throughput,
            usage=found.token_usage,
            queued=found.queued,
            graph=found.cuda_graph,
            steady=self._steady(data, begin, at, own, found.accept_len),
        )

    def _steady(
        self, data: bytes, begin: int, at: int, own: re.Match[bytes] | None, accept: float | None
    ) -> bool:
        """Did the same requests run since the decode line before? Then the cache grew by what the steps gave."""
        earlier = data.rfind(_DECODE, max(0, begin - 8192), begin)
        now, before = _RUNNING.search(data, at, at + 120), _RUNNING.search(data, earlier, earlier + 120)
        if earlier < 0 or not now or not before or now[1] != before[1]:
            return False
        other = _prefix(data, data.rfind(b"\n", 0, earlier) + 1, earlier)
        if (other[2] if other else b"") != (own[2] if own else b""):
            return False
        steps = self._now.arguments.get("decode_log_interval")
        steps = steps if isinstance(steps, int) and steps > 0 else 40
        expected = steps * int(now[1]) * (accept or 1.0)
        return 0.6 * expected <= int(now[2]) - int(before[2]) <= 1.4 * expected

    def _prefills(self, data: bytes, prefills: int) -> None:
        now = self._now
        for at in _spaced(data, _PREFILL, prefills, _PREFILLS_AT_ONCE):
            found = _CACHED.search(data, at, at + 300)
            if found:
                now.new_tokens += int(found[1])
                now.cached_tokens += int(found[2])
                now.prefill_samples += 1

    def _quiet(self, data: bytes, decodes: int, prefills: int) -> None:
        """What goes on after the last batch line."""
        now = self._now
        last = max(
            data.rfind(_DECODE) if decodes else -1,
            data.rfind(_PREFILL) if prefills else -1,
        )
        tail = data
        if last >= 0:
            begin, end = _line(data, last)
            now.batch = _stamp(data[begin:end], _prefix(data, begin, last))
            now.unhealthy = now.posts = 0
            now.post, now.stopping = None, False
            tail = data[end:]
        if now.batch is None:
            return
        now.unhealthy += len(_UNHEALTHY.findall(tail))
        for mark in _POSTS:
            if posts := tail.count(mark):
                now.posts += posts
                latest = tail.rfind(mark)
                begin, end = _line(tail, latest)
                stamp = _stamp(tail[begin:end], _prefix(tail, begin, latest))
                if now.post is None or (stamp.since(now.post) or 0.0) >= 0:
                    now.post = stamp
        now.stopping = now.stopping or b"SIGTERM received" in tail or b"Gracefully exiting" in tail
        stop = len(data) - 1 if data.endswith(b"\n") else len(data)
        for _ in range(8):
            begin = data.rfind(b"\n", 0, stop) + 1
            line = data[begin:stop]
            at = line.find(b"[20")
            end_stamp = _stamp(line, _OWN.match(line, at) if at >= 0 else None)
            if end_stamp.text:
                now.end = end_stamp
            if end_stamp.text or begin == 0:
                return
            stop = begin - 1


def _has_requests(data: bytes) -> bool:
    return b"obj=" in data and any(mark in data for mark in _REQUESTS)


def _line_at(data: bytes, at: int) -> bytes:
    end = data.find(b"\n", at)
    return data[at : end if end >= 0 else len(data)]


def _spaced(data: bytes, mark: bytes, found: int, most: int) -> Iterator[int]:
    """Positions of ``mark``: all of them, or at most ``most`` spaced evenly over the data."""
    if found <= most:
        at = data.find(mark)
        while at >= 0:
            yield at
            at = data.find(mark, at + 1)
        return
    at = -1
    for part in range(most):
        wanted = part * len(data) // most
        if wanted > at:
            at = data.find(mark, wanted)
            if at < 0:
                return
            yield at


_REPEAT = re.compile(r"=== (\d{1,4}) times\s*")


def read_example(text: str) -> Figures:
    """Figures of a short text, as the examples of signatures have them.

    A line ``=== 40 times`` repeats what stands above it, up to the line like it before, 40 times.
    """
    tally = Tally()
    block: list[str] = []
    for line in text.splitlines():
        repeat = _REPEAT.fullmatch(line)
        if repeat is None:
            block.append(line)
            continue
        for _ in range(int(repeat[1])):
            for one in block:
                tally.feed_text(one)
        block = []
    for one in block:
        tally.feed_text(one)
    return tally.figures()


# --- what it means -----------------------------------------------------------------------------------------


def _argument(figures: Figures, name: str, kind: type[Any]) -> Any:
    value = figures.last.arguments.get(name)
    return value if isinstance(value, kind) and not (kind is int and isinstance(value, bool)) else None


def _algorithm(figures: Figures, facts: ServiceFacts) -> str:
    """In capitals; the log knows better than the inventory. Empty where neither says it."""
    arguments = figures.last.arguments
    if "speculative_algorithm" in arguments:
        return str(arguments["speculative_algorithm"] or "none").upper()
    return (facts.algorithm or "").upper()


def _most(figures: Figures, facts: ServiceFacts) -> tuple[int, str] | None:
    """The longest a verify step can accept, and what says so; the larger where inventory and log differ."""
    algorithm = _algorithm(figures, facts)
    budget = _argument(figures, "speculative_ddtree_budget", int) or facts.budget
    tokens = _argument(figures, "speculative_num_draft_tokens", int)
    if algorithm in ("", "DFLASH", "DDTREE"):
        if budget is not None and tokens == budget + 1:
            tokens = None
        known = (_argument(figures, "speculative_dflash_block_size", int), tokens, facts.block_size)
        block = max((size for size in known if size), default=None)
        if block is not None:
            return block, f"block_size {block}"
        return None if budget is None else (budget + 1, f"budget {budget} + 1")
    return None if tokens is None else (tokens, f"speculative_num_draft_tokens {tokens}")


def _interval(figures: Figures) -> int:
    return _argument(figures, "decode_log_interval", int) or 40


def _accept_one(figures: Figures, facts: ServiceFacts) -> Solution | None:
    life = figures.last
    mean = life.accept_mean
    if mean is None or life.accept_lines < 5 or not useless(mean) or _algorithm(figures, facts) == "NONE":
        return None
    steps = life.accept_lines * _interval(figures)
    return Solution(
        {
            "mean": f"{mean:.2f}",
            "lines": str(life.accept_lines),
            "steps": str(steps),
            "name": _algorithm(figures, facts),
            "count": str(life.accept_lines),
        }
    )


def _accept_impossible(figures: Figures, facts: ServiceFacts) -> Solution | None:
    life, most, highest = figures.last, _most(figures, facts), figures.last.accept_max
    if most is None or highest is None or not above_block(highest, most[0]):
        return None
    above = life.accept_above(most[0] + _TOLERANCE)
    return Solution(
        {
            "most": f"{highest:g}",
            "limit": most[1],
            "lines": f"{above} of {count(life.accept_lines, 'decode line')}",
            "count": str(above),
        }
    )


def _accept_below_floor(figures: Figures, facts: ServiceFacts) -> Solution | None:
    life, floor, mean = figures.last, facts.min_accept_length, figures.last.accept_mean
    if floor is None or mean is None or life.accept_lines < 10 or mean >= floor or useless(mean):
        return None
    return Solution(
        {"mean": f"{mean:.2f}", "floor": f"{floor:g}", "lines": str(life.accept_lines), "count": "1"}
    )


def _high_accept(figures: Figures, facts: ServiceFacts) -> Solution | None:
    life, most, mean = figures.last, _most(figures, facts), figures.last.accept_mean
    if most is None or mean is None or most[0] < 4 or life.accept_lines * _interval(figures) < 4000:
        return None
    if mean < 0.95 * most[0] or above_block(mean, most[0]):
        return None
    return Solution({"mean": f"{mean:.2f}", "limit": most[1], "lines": str(life.accept_lines), "count": "1"})


def _accept_decay(figures: Figures, facts: ServiceFacts) -> Solution | None:
    few: list[float] = []
    many: list[float] = []
    for sample in figures.last.samples:
        if sample.accept is None or not sample.running:
            continue
        if sample.running <= 2:
            few.append(sample.accept)
        elif sample.running >= 8:
            many.append(sample.accept)
    if min(len(few), len(many)) < 20:
        return None
    low, high = median(few), median(many)
    if low < 1.5 or high > 0.75 * low or quantiles(many, n=4)[2] >= quantiles(few, n=4)[0]:
        return None
    return Solution(
        {
            "alone": f"{low:.2f}",
            "together": f"{high:.2f}",
            "percent": f"{100 * (1 - high / low):.0f}",
            "lines": f"{len(few)} and {len(many)}",
            "count": "1",
        }
    )


_RESERVE_GB = 8.0
"""GPU memory to leave free for activations, the upper end of what sglang's docs advise (hyperparameter tuning: 5-8 GB)."""


def _raised(fraction: float | None, left: float | None, free: float | None) -> str:
    """``mem_fraction_static`` with what was left over put into the pool, rounded down; empty where that is not known."""
    if not fraction or left is None or not free or left >= free:
        return ""
    first = math.floor((fraction + (left - _RESERVE_GB) / free) * 100) / 100
    return f"{first:.2f}" if fraction < first < 1 else ""


def _kv_starved(figures: Figures, facts: ServiceFacts) -> Solution | None:
    life = figures.last
    pool = life.pool_tokens if life.pool_tokens is not None else facts.kv_tokens
    context = life.context_len or facts.context_length
    if not pool or not context or pool * 8 > context:
        return None
    fraction = _argument(figures, "mem_fraction_static", float) or facts.mem_fraction_static
    left = life.available_gb
    return Solution(
        {
            "pool": str(pool),
            "context": str(context),
            "part": str(round(context / pool)),
            "fraction": "" if fraction is None else f"{fraction:.3g}",
            "left": "" if left is None or left < 4 else f"{left:g}",
            "first": _raised(fraction, left, life.free_gb),
            "count": "1",
        }
    )


def _eager(figures: Figures, facts: ServiceFacts) -> Solution | None:
    life = figures.last
    arguments = life.arguments
    off = arguments.get("disable_cuda_graph") is True
    asked = arguments.get("disable_cuda_graph") is False and arguments.get("device", "cuda") == "cuda"
    if off or not (asked or life.graph_sizes):
        return None
    sizes = (
        max(life.graph_sizes, default=0),
        _argument(figures, "cuda_graph_max_bs", int),
        facts.cuda_graph_max_bs,
    )
    most = next((size for size in sizes if size), 1)
    fitting = [
        sample.graph
        for sample in life.samples
        if sample.graph is not None and sample.running is not None and sample.running <= most
    ]
    without = fitting.count(False)
    if len(fitting) < 5 or without * 2 < len(fitting):
        return None
    return Solution(
        {
            "without": str(without),
            "fitting": str(len(fitting)),
            "most": str(most),
            "why": "graphs were captured" if life.graph_sizes else "graphs are not disabled",
            "count": str(without),
        }
    )


def _throughput_decay(figures: Figures, facts: ServiceFacts) -> Solution | None:
    """Decode steps a second of the first and the last third, at the same number of requests and length of context."""
    groups: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    samples = [sample for sample in figures.last.samples if sample.steady and sample.throughput]
    for index, sample in enumerate(samples):
        third = 3 * index // len(samples)
        if third == 1 or not sample.running or not sample.tokens:
            continue
        rate = (sample.throughput or 0.0) / (sample.running * (sample.accept or 1.0))
        key = (sample.running, (sample.tokens // sample.running).bit_length())
        groups.setdefault(key, ([], []))[third // 2].append(rate)
    compared = [(key, *pair) for key, pair in groups.items() if min(map(len, pair)) >= 15]
    if not compared:
        return None
    ratios = [median(after) / median(before) for _, before, after in compared]
    if max(ratios) > 0.85 or median(ratios) > 0.7:
        return None
    (running, _), before, after = max(compared, key=lambda item: len(item[1]) + len(item[2]))
    return Solution(
        {
            "before": f"{median(before):.3g}",
            "after": f"{median(after):.3g}",
            "at": count(running, "running request"),
            "percent": f"{100 * (1 - median(after) / median(before)):.0f}",
            "lines": str(sum(len(a) + len(b) for _, a, b in compared)),
            "count": "1",
        }
    )


def _queue_growing(figures: Figures, facts: ServiceFacts) -> Solution | None:
    samples = [sample for sample in figures.last.samples if sample.queued is not None]
    if len(samples) < 30 or samples[0].at is None or samples[-1].at is None:
        return None
    seconds = samples[-1].at - samples[0].at
    slices = [samples[len(samples) * n // 5 : len(samples) * (n + 1) // 5] for n in range(5)]
    middle = [median(sample.queued or 0 for sample in part) for part in slices]
    steady = all(a <= b for a, b in pairwise(middle))
    if seconds < 300 or not steady or middle[-1] < max(8, 3 * middle[0]):
        return None
    usage = median([sample.usage or 0.0 for sample in slices[-1]])
    running = median([sample.running or 0 for sample in slices[-1]])
    most = _argument(figures, "max_running_requests", int) or facts.max_running_requests
    if usage < 0.8 and (most is None or running < 0.95 * most):
        return None
    limit = f"the KV pool is {usage:.0%} full" if usage >= 0.8 else f"all {most} places are taken"
    return Solution(
        {
            "first": f"{middle[0]:g}",
            "queued": f"{middle[-1]:g}",
            "minutes": f"{seconds / 60:.0f}",
            "running": f"{running:g}",
            "limit": limit,
            "count": "1",
        }
    )


def _retracted(figures: Figures, facts: ServiceFacts) -> Solution | None:
    life = figures.last
    if life.retractions < 5 or life.retractions * 200 < life.decode_lines:
        return None
    return Solution(
        {
            "times": str(life.retractions),
            "requests": str(max(life.retracted, life.retractions)),
            "lines": str(life.decode_lines),
            "pool": "" if life.pool_tokens is None else str(life.pool_tokens),
            "count": str(life.retractions),
        }
    )


def _simulated(figures: Figures, facts: ServiceFacts) -> Solution | None:
    seen, known = figures.simulated, facts.simulated
    value = seen if seen is not None else known
    if value is None or value <= 0:
        return None
    where = "the log shows it set" if seen is not None else "the service's environment sets it"
    return Solution({"value": f"{value:g}", "seen": where, "count": "1"})


def _mask_ignored(figures: Figures, facts: ServiceFacts) -> Solution | None:
    if _algorithm(figures, facts) != "DDTREE" or not figures.last.decode_lines:
        return None
    side = "decode" if _argument(figures, "speculative_attention_mode", str) == "decode" else "prefill"
    backend = (
        _argument(figures, f"{side}_attention_backend", str)
        or _argument(figures, "attention_backend", str)
        or facts.attention_backend
        or ""
    )
    model = _argument(figures, "model_path", str) or facts.model or ""
    chain = backend == "fa3" and figures.last.arguments.get("speculative_eagle_topk") == 1
    if not chain and not drops_tree_mask(backend, model):
        return None
    name = backend if backend != "flashinfer" else "flashinfer (flashinfer_mla for this model)"
    return Solution({"backend": name, "count": "1"})


def _bang(figures: Figures, facts: ServiceFacts) -> Solution | None:
    life = figures.last
    if life.bangs < 3 or life.bangs * 5 < life.finished:
        return None
    return Solution({"bangs": str(life.bangs), "answers": str(life.finished), "count": str(life.bangs)})


def _stalled(figures: Figures, facts: ServiceFacts) -> Solution | None:
    """Health says 503, or requests keep coming, and no batch runs any more."""
    life = figures.last
    quiet = life.quiet_s
    if not life.ready or life.stopping or life.decode_lines < 5 or quiet is None or quiet < 300:
        return None
    late = life.posts_s is not None and life.posts_s >= 300
    asked = life.quiet_posts >= 3 and late and life.prefill_lines >= 5
    if life.quiet_unhealthy < 3 and not asked:
        return None
    signs = []
    if life.quiet_unhealthy:
        signs.append(f"{life.quiet_unhealthy} health requests were answered with 503")
    if life.quiet_posts:
        signs.append(f"{count(life.quiet_posts, 'generation request')} came")
    return Solution({"minutes": f"{quiet / 60:.0f}", "signs": " and ".join(signs), "count": "1"})


class Detector(NamedTuple):
    """Judges figures: None where a signature does not fit, else the values of its templates.

    :param function: of the figures and the facts; pure.
    :param fields: names of the values.
    :param evidence: which of the evidence lines of the last life it rests on.
    """

    function: Callable[[Figures, ServiceFacts], Solution | None]
    fields: frozenset[str]
    evidence: tuple[str, ...] = ("decode",)


def _detector(
    function: Callable[[Figures, ServiceFacts], Solution | None], names: str, *evidence: str
) -> Detector:
    return Detector(function, frozenset({*names.split(), "count"}), evidence or ("decode",))


DETECTORS: dict[str, Detector] = {
    "accept-one": _detector(_accept_one, "mean lines steps name"),
    "accept-impossible": _detector(_accept_impossible, "most limit lines", "accept"),
    "accept-below-floor": _detector(_accept_below_floor, "mean floor lines"),
    "accept-decay": _detector(_accept_decay, "alone together percent lines"),
    "high-accept": _detector(_high_accept, "mean limit lines"),
    "kv-starved": _detector(_kv_starved, "pool context part fraction left first", "limits", "pool"),
    "eager": _detector(_eager, "without fitting most why"),
    "throughput-decay": _detector(_throughput_decay, "before after at percent lines"),
    "queue-growing": _detector(_queue_growing, "first queued minutes running limit"),
    "retracted": _detector(_retracted, "times requests lines pool", "retract"),
    "simulated": _detector(_simulated, "value seen", "simulated"),
    "mask-ignored": _detector(_mask_ignored, "backend"),
    "bang": _detector(_bang, "bangs answers", "bang"),
    "stalled": _detector(_stalled, "minutes signs"),
}
"""Detectors under the names that signature files use."""

_ORDER = ("fatal", "degraded", "request", "benign")


def findings(
    figures: Figures, facts: ServiceFacts, library: Library, *, skip: Collection[str] = ()
) -> list[Diagnosis]:
    """What the figures of a log show: fatal findings first.

    :param facts: of the service, gaps filled from the log.
    :param skip: ids of signatures not to look for, such as those found by text already.
    """
    from ddtree_ops.diagnose.library import explained
    from ddtree_ops.diagnose.reduce import Diagnosis, EvidenceLine, fingerprint

    found: list[Diagnosis] = []
    for signature in library.signatures:
        if signature.detector is None or signature.id in skip or signature.severity == "benign":
            continue
        detector = DETECTORS[signature.detector]
        solution = detector.function(figures, facts)
        if solution is None:
            continue
        match = explained(signature, facts, solution.values)
        lines = _lines_of(figures, detector.evidence)
        found.append(
            Diagnosis(
                signature=signature.id,
                severity=signature.severity,
                title=signature.title,
                explanation=redact(match.explanation),
                remedy=redact(match.remedy),
                ranks=(),
                count=int(solution.values.get("count", "1")),
                first=lines[0].time if lines else "",
                fingerprint=fingerprint(signature.id, "", None),
                evidence=tuple(EvidenceLine(line.line, line.text) for line in lines),
            )
        )
    return sorted(found, key=lambda item: _ORDER.index(item.severity))


def _lines_of(figures: Figures, names: Iterable[str]) -> list[Evidence]:
    lines: list[Evidence] = []
    for name in names:
        line = figures.simulated_line if name == "simulated" else figures.last.evidence.get(name)
        if line is not None:
            lines.append(line)
    return lines[:1]
