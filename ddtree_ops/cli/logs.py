"""The ``logs`` command: journals of several hosts, or log files, as lines, known failures or figures."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, BinaryIO, TypeVar

import typer

from ddtree_ops.cli.common import (
    HostsOrFiles,
    InventoryOption,
    ServiceOption,
    err,
    leave,
    log_path,
    logs_and_hosts,
    masked_session,
    narrowing,
    no_such_file,
    out,
    refuse_binary,
    targets_of,
)
from ddtree_ops.errors import CheckFailed, ExitCode, Inconclusive, NotDeployed, OpsError, UsageError

if TYPE_CHECKING:
    from datetime import datetime

    from ddtree_ops.diagnose.lens import Lens, Query, Shown
    from ddtree_ops.inventory.models import Target
    from ddtree_ops.remote.session import Session
    from ddtree_ops.report.logs import LogPrinter, LogStats
    from ddtree_ops.service.control import UnitControl
    from ddtree_ops.service.journal import Entries

__all__ = ["register"]

_T = TypeVar("_T")

_FOLLOWED = 20
"""Entries shown before new ones where --lines does not say it."""
_IDLE = 0.5


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("logs")(logs)


def logs(
    hosts: HostsOrFiles = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    grep: Annotated[
        str | None,
        typer.Option("--grep", "-g", metavar="RE", help="Python regular expression, matched here."),
    ] = None,
    fixed_strings: Annotated[
        bool, typer.Option("--fixed-strings", "-F", help="--grep is plain text, no regular expression.")
    ] = False,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", help="Ignore case in --grep.")] = False,
    known: Annotated[
        bool,
        typer.Option("--signatures", help="Only lines that a signature knows, with its id and severity."),
    ] = False,
    context: Annotated[
        int | None, typer.Option("--context", "-C", min=0, metavar="N", help="N lines around each match.")
    ] = None,
    after: Annotated[
        int | None,
        typer.Option("--after-context", "-A", min=0, metavar="N", help="N lines after each match."),
    ] = None,
    before: Annotated[
        int | None,
        typer.Option("--before-context", "-B", min=0, metavar="N", help="N lines before each match."),
    ] = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(
            "--phase",
            metavar="PHASE",
            help="Only what was said in: start, weights, kv-cache, graphs (loading: all four), warm-up, serving, "
            "stopping, failed. ready is serving. Several: with commas.",
        ),
    ] = None,
    rank: Annotated[
        list[str] | None,
        typer.Option(
            "--rank", metavar="RANK", help="Only this rank: TP3 (or 3), DP0, 'DP0 TP3'. May be repeated."
        ),
    ] = None,
    kernel: Annotated[
        bool, typer.Option("--kernel", help="The kernel's lines of that time too (out of memory, Xid).")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Throughput, acceptance, requests and queue over time.")
    ] = False,
    since: Annotated[
        str | None, typer.Option("--since", help="2h, '10 minutes ago', today, ISO 8601 (UTC).")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="As --since.")] = None,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", min=1, help="Show the newest N entries, or matches, of each host."),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Keep showing new entries, over restarts and lost connections."),
    ] = False,
    invocation: Annotated[
        str | None,
        typer.Option(
            "--invocation",
            metavar="RUN",
            help="current (the default), previous, all, or the first digits of an id.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line; with --stats one document.")
    ] = False,
) -> None:
    """Read services' journals, merged by time, or log files; say what was searched.

    No readable entry is an error, not "nothing found". Exit code: 0 when something matched (or nothing was asked for),
    5 when nothing did, 8 when there was nothing to search.
    """
    files, names = logs_and_hosts(hosts, inventory)
    asked = _Asked(
        files=bool(files),
        grep=grep,
        fixed_strings=fixed_strings,
        ignore_case=ignore_case,
        known=known,
        before=before if before is not None else context,
        after=after if after is not None else context,
        phase=phase or [],
        rank=rank or [],
        kernel=kernel,
        stats=stats,
        since=since,
        until=until,
        lines=lines,
        follow=follow,
        invocation=invocation,
        as_json=as_json,
    )
    asked.check(service)
    query = asked.query()
    if files:
        if names:
            raise UsageError(
                f"{names[0]!r} is no file, and hosts and files cannot be read together",
                hint=f"ddtree-ops logs {' '.join(files)}",
            )
        for name in files:
            refuse_binary(name)
        try:
            _files(files, asked, query)
        except UsageError as error:
            error.hint = error.hint.replace("ddtree-ops diagnose -", "ddtree-ops logs -")
            raise
        return
    try:
        _, targets = targets_of(names, inventory=inventory, service=service, default_all=True)
    except UsageError as error:
        raise no_such_file(error, names) from None
    _journals(targets, asked, query)


@dataclass(frozen=True)
class _Asked:
    """The options as given."""

    files: bool
    grep: str | None
    fixed_strings: bool
    ignore_case: bool
    known: bool
    before: int | None
    after: int | None
    phase: list[str]
    rank: list[str]
    kernel: bool
    stats: bool
    since: str | None
    until: str | None
    lines: int | None
    follow: bool
    invocation: str | None
    as_json: bool

    def check(self, service: str | None) -> None:
        """:raises UsageError: options that make no sense together; the hint says what to type."""
        if self.files:
            self._refuse("belongs to the journal of a host", "name a host, or leave it out", {
                "--service": service is not None, "--invocation": self.invocation is not None,
                "--kernel": self.kernel, "--follow": self.follow, **dict.fromkeys(narrowing(), True),
            })  # fmt: skip
        since, until = self.window()
        if since is not None and until is not None and since > until:
            raise UsageError(
                f"--since is after --until: {self.since!r} is {since:%Y-%m-%d %H:%M:%SZ}, {self.until!r} {until:%Y-%m-%d %H:%M:%SZ}",
                hint=f"--since {shlex.quote(str(self.until))} --until {shlex.quote(str(self.since))}",
            )
        if self.grep is None:
            self._refuse("says how --grep searches", "add --grep RE", {
                "--fixed-strings": self.fixed_strings, "--ignore-case": self.ignore_case,
            })  # fmt: skip
            if not self.known:
                self._refuse("is shown around matches", "add --grep RE or --signatures", {
                    "context": self.before is not None or self.after is not None,
                })  # fmt: skip
        if self.stats:
            self._refuse("selects lines, and --stats counts them all", "leave it out; --since and --lines are fine", {
                "--grep": self.grep is not None, "--signatures": self.known, "--phase": bool(self.phase),
                "--rank": bool(self.rank), "--kernel": self.kernel,
            })  # fmt: skip
            self._refuse("never ends, and --stats shows the whole", "leave one of the two out", {
                "--follow": self.follow,
            })  # fmt: skip
        if self.follow:
            self._refuse("is in the past, and --follow shows what is written from now on", "leave it out", {
                "--until": self.until is not None,
                "--invocation": self.invocation not in (None, "current"),
            })  # fmt: skip
        if self.files and self.stats:
            self._refuse("reads the end, and a file is counted as a whole", "leave it out", {
                "--lines": self.lines is not None,
            })  # fmt: skip

    def _refuse(self, why: str, hint: str, options: dict[str, bool]) -> None:
        for option, given in options.items():
            if given:
                raise UsageError(f"{option} {why}", hint=hint)

    def query(self) -> Query:
        """:raises UsageError: a wrong expression, phase or rank. :raises ConfigError: a wrong signature file."""
        from ddtree_ops.diagnose.lens import Query, parse_phases, parse_rank

        pattern = None
        if self.grep is not None:
            text = re.escape(self.grep) if self.fixed_strings else self.grep
            try:
                pattern = re.compile(text, re.IGNORECASE if self.ignore_case else 0)
            except re.error as error:
                raise UsageError(
                    f"{self.grep!r} is not a regular expression: {error}",
                    hint="for plain text add --fixed-strings",
                ) from error
        library = None
        if self.known:
            from ddtree_ops.diagnose.library import default_library

            library = default_library()
        return Query(
            pattern,
            library,
            parse_phases(self.phase),
            tuple(parse_rank(f"TP{each}" if each.isdecimal() else each) for each in self.rank),
            self.before or 0,
            self.after or 0,
        )

    def printer(self, *, many: bool, journal: bool) -> LogPrinter:
        from ddtree_ops.report.logs import LogPrinter

        context = bool(self.before or self.after)
        return LogPrinter(out, many=many, as_json=self.as_json, journal=journal, context=context)

    def window(self) -> tuple[datetime | None, datetime | None]:
        """The time asked for, for lines of a file. :raises UsageError: no time."""
        from datetime import UTC, datetime

        from ddtree_ops.service.journal import moment_of_when

        now = datetime.now(UTC)
        since, until = (
            None if text is None else moment_of_when(text, now=now) for text in (self.since, self.until)
        )
        return since, until

    def holding(self, query: Query) -> tuple[bytes, ...] | None:
        """Texts of which one is in every entry that is of interest; None: all entries are."""
        from ddtree_ops.service.journal import raw_texts

        plain = query.library is None and not query.phases and not query.ranks
        if self.grep is None or self.ignore_case or not plain or query.before or query.after:
            return None
        return raw_texts(self.grep, literal=self.fixed_strings)


def _tell(text: str) -> None:
    err.print(text, style="dim", markup=False, soft_wrap=True)


def _selected(lens: Lens, found: Iterator[list[Shown]], lines: int | None) -> Iterator[Shown]:
    from ddtree_ops.diagnose.lens import newest

    if lines is not None:
        return iter(newest(found, lines, lens.query.before))
    return (shown for batch in found for shown in batch)


# ------------------------------------------------------------------------------------------------ files


def _files(names: Sequence[str], asked: _Asked, query: Query) -> None:
    from ddtree_ops.diagnose.lens import Lens, between, records_of_lines
    from ddtree_ops.diagnose.lines import read_log
    from ddtree_ops.diagnose.skim import Skim
    from ddtree_ops.report.logs import describe_search
    from ddtree_ops.service.following import merged

    window = asked.window()
    with ExitStack() as stack:
        streams = [_opened(name, stack) for name in names]
        if asked.stats:
            _leave_stats(
                [_file_stats(name, stream, window) for name, stream in zip(names, streams, strict=True)],
                [],
                asked,
            )
        lenses = [Lens(query) for _ in names]

        def selected(lens: Lens, stream: BinaryIO) -> Iterator[Shown]:
            found: Iterator[list[Shown]] = iter(Skim(stream, lens))
            if any(window):
                found = (lens.feed(record) for record in between(records_of_lines(read_log(stream)), *window))
            yield from _selected(lens, found, asked.lines)

        sources = [selected(lens, stream) for lens, stream in zip(lenses, streams, strict=True)]
        with asked.printer(many=len(names) > 1, journal=False) as show:
            for number, shown in merged(sources, lambda shown: shown.record.time):
                show(names[number], shown)
                if out.gone:
                    break
    empty: list[OpsError] = []
    for name, lens in zip(names, lenses, strict=True):
        if lens.searched:
            _tell(f"{name}: {describe_search(lens, what='line')}")
        elif not out.gone:
            what = "no line of it is known to be of that time" if any(window) else "there is no line in it"
            empty.append(Inconclusive(f"{name}: nothing to search: {what}"))
    _leave(lenses, empty, query)


def _opened(name: str, stack: ExitStack) -> BinaryIO:
    if name == "-":
        return sys.stdin.buffer
    try:
        return stack.enter_context(log_path(name).open("rb"))
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from error


def _file_stats(name: str, stream: BinaryIO, window: tuple[datetime | None, datetime | None]) -> LogStats:
    from ddtree_ops.diagnose.figures import Tally
    from ddtree_ops.diagnose.lens import between, records_of_lines
    from ddtree_ops.diagnose.lines import read_log
    from ddtree_ops.diagnose.source import read_chunks
    from ddtree_ops.report.logs import LogStats

    tally = Tally()
    if any(window):
        for record in between(records_of_lines(read_log(stream)), *window):
            tally.feed_text(record.text, record.time.isoformat() if record.dated and record.time else "")
    else:
        for chunk in read_chunks(stream):
            tally.feed(chunk)
    figures = tally.figures()
    return LogStats(name, figures, figures.lines)


# --------------------------------------------------------------------------------------------- journals


class _Source:
    """The journal of one service on one host, read as far as asked for; what goes wrong is kept for the end."""

    def __init__(self, target: Target, asked: _Asked, query: Query) -> None:
        from ddtree_ops.diagnose.facts import ServiceFacts
        from ddtree_ops.diagnose.lens import Lens

        self.target = target
        self.name = target.name
        self.asked = asked
        self.lens = Lens(query, ServiceFacts.of(target))
        self.failed: OpsError | None = None
        self.damaged = self.literal = 0
        self.cursor: str | None = None
        self.known: frozenset[str] = frozenset()
        self._stack = ExitStack()
        self.session: Session | None = None

    def connect(self) -> None:
        """Open the session; a failure is kept."""
        try:
            self.session = self._stack.enter_context(masked_session(self.target))
            if self.asked.follow:
                self.cursor = self.control.cursor()
        except OpsError as error:
            self.fail(error)

    def close(self) -> None:
        """End the session, where it is not in somebody else's hands."""
        self._stack.close()

    @property
    def control(self) -> UnitControl:
        """The unit. :raises RuntimeError: there is no session."""
        from ddtree_ops.service.control import UnitControl

        if self.session is None:
            raise RuntimeError(f"{self.name} is not connected")
        return UnitControl(self.session, self.target.service.unit)

    def fail(self, error: OpsError) -> None:
        """Keep the first error."""
        self.failed = self.failed or error.at(host=self.name)

    @contextmanager
    def handed_over(self) -> Iterator[Session]:
        """The session for a first use, then new ones."""
        session, self.session = self.session, None
        if session is None:
            with masked_session(self.target) as opened:
                yield opened
            return
        with self._stack.pop_all():
            yield session

    def _entries(self, *, lines: int | None, tap: Callable[[bytes], object] | None = None) -> Entries:
        asked, control = self.asked, self.control
        invocation: str | None = asked.invocation or "current"
        if asked.follow and (lines is not None or asked.since is not None):
            invocation = None
        since, until = asked.since, asked.until
        if asked.kernel and since is None and lines is None:
            span = control.span(invocation)
            if span is None:
                raise control.nothing(invocation=invocation, until=until)
            since = span[0]
            if until is None and asked.invocation not in (None, "current", "all"):
                until = span[1]
        holding = () if asked.stats else asked.holding(self.lens.query)
        return control.entries(
            invocation=invocation,
            since=since,
            until=until,
            lines=lines,
            kernel=asked.kernel,
            deadline=None,
            holding=holding,
            tap=tap,
        )

    def shown(self) -> Iterator[Shown]:
        """What is to be shown, in its order. Ends early where something fails."""
        from ddtree_ops.diagnose.lens import record_of

        asked, query = self.asked, self.lens.query
        lines, newest_matches = asked.lines, asked.lines
        if asked.follow:
            lines = newest_matches = asked.lines or (None if asked.since else _FOLLOWED)
            whole = bool(query.phases or query.ranks) or (query.selects and asked.lines is not None)
        else:
            whole = query.selects
        if whole:
            lines = None
        else:
            newest_matches = None

        def found() -> Iterator[list[Shown]]:
            entries = self._entries(lines=lines)
            try:
                for number, entry in enumerate(entries, 1):
                    batch = self.lens.feed(record_of(entry, number))
                    if not batch and asked.grep and not asked.fixed_strings and asked.grep in entry.message:
                        self.literal += 1
                    if entry.cursor:
                        self.cursor = entry.cursor
                    yield batch
            finally:
                entries.close()
                self._note(entries)

        try:
            yield from _selected(self.lens, found(), newest_matches)
            if not self.lens.searched and not asked.follow:
                raise self.control.nothing(
                    invocation=asked.invocation or "current", since=asked.since, until=asked.until
                )
        except OpsError as error:
            if not asked.follow or not isinstance(error, Inconclusive):
                self.fail(error)
            elif isinstance(error, NotDeployed):
                _tell(f"{self.name}: {error.message}; waiting for its first start")

    def _note(self, entries: Entries) -> None:
        from datetime import UTC, datetime

        parser = entries.parser
        self.damaged += parser.damaged
        if parser.passed:
            first, last = (datetime.fromtimestamp(us / 1e6, UTC) for us in (parser.first_us, parser.last_us))
            self.lens.count(first, last, parser.passed)

    def stats(self) -> LogStats | None:
        """Figures of all entries asked for; None where that failed."""
        from ddtree_ops.diagnose.figures import Tally
        from ddtree_ops.report.logs import LogStats

        tally = Tally()
        try:
            entries = self._entries(lines=self.asked.lines, tap=tally.feed)
            parsed = sum(1 for _ in entries)
            self._note(entries)
            searched = self.lens.searched + parsed
            if not searched:
                raise self.control.nothing(
                    invocation=self.asked.invocation or "current",
                    since=self.asked.since,
                    until=self.asked.until,
                )
        except OpsError as error:
            self.fail(error)
            return None
        return LogStats(self.name, tally.figures(), searched)


def _journals(targets: Sequence[Target], asked: _Asked, query: Query) -> None:
    from ddtree_ops.remote.lean import import_fabric
    from ddtree_ops.report.logs import describe_search
    from ddtree_ops.service.following import describe_clocks, merged

    sources = [_Source(target, asked, query) for target in targets]
    import_fabric()
    with ExitStack() as stack:
        for source in sources:
            stack.callback(source.close)
        _each(sources, lambda source: source.connect())
        reached = [source for source in sources if source.session is not None and source.failed is None]
        if len(reached) > 1 and not asked.stats:
            clocks = describe_clocks(
                {one.target.host.name: one.session.facts["clock_skew_s"] for one in reached if one.session}
            )
            if clocks:
                _tell(clocks)
        if asked.stats:
            found = [one for one in _each(reached, lambda source: source.stats()) if one is not None]
            _leave_stats(found, [one.failed for one in sources if one.failed], asked)
        with asked.printer(many=len(targets) > 1, journal=True) as show:
            for number, shown in merged(
                [source.shown() for source in reached], lambda shown: shown.record.time
            ):
                show(reached[number].name, shown)
                if out.gone:
                    break
            if asked.follow and not out.gone:
                show.flush()
                _follow([source for source in reached if source.failed is None], sources, show)
    for source in reached:
        if source.lens.searched and source.failed is None and not asked.follow:
            text = describe_search(
                source.lens, what="journal entry", damaged=source.damaged, literal=source.literal
            )
            _tell(f"{source.name}: {text}")
    _leave([one.lens for one in reached], [one.failed for one in sources if one.failed], query)


def _each(sources: Sequence[_Source], action: Callable[[_Source], _T]) -> list[_T]:
    if len(sources) < 2:
        return [action(source) for source in sources]
    with ThreadPoolExecutor(max_workers=min(32, len(sources))) as pool:
        return list(pool.map(action, sources))


def _follow(following: Sequence[_Source], sources: Sequence[_Source], show: LogPrinter) -> None:
    """Show new entries until the reader goes away, or all hosts were given up. Ctrl-C comes as KeyboardInterrupt."""
    from ddtree_ops.diagnose.lens import record_of
    from ddtree_ops.service.following import FollowAll, Place

    for source in sources:
        if source.failed is not None:
            _tell(f"{source.name}: not followed: {source.failed.message}")
    places = [
        Place(
            source.name,
            source.target.service.unit,
            source.handed_over,
            cursor=source.cursor,
            known=source.known,
            kernel=source.asked.kernel,
        )
        for source in following
    ]
    with FollowAll(places, _tell) as follower:
        while not out.gone and (came := follower.get(_IDLE)) is not None:
            for number, entry in came:
                source = following[number]
                for shown in source.lens.feed(record_of(entry, source.lens.searched + 1)):
                    show(source.name, shown)
            show.flush()
            if not came:
                out.look()
        for error in follower.failed:
            next(one for one in following if one.name == error.host).fail(error)


# ---------------------------------------------------------------------------------------------- the end


def _leave(lenses: Sequence[Lens], failed: Sequence[OpsError], query: Query) -> None:
    searched = [lens for lens in lenses if lens.searched]
    matched = any(lens.matched for lens in searched)
    code = ExitCode.OK if matched or not query.selects or out.gone else CheckFailed.exit_code
    leave(failed, code if searched or out.gone else None)


def _leave_stats(found: Sequence[LogStats], failed: Sequence[OpsError], asked: _Asked) -> None:
    from ddtree_ops.report.logs import print_stats

    errors = list(failed)
    shown = []
    for one in found:
        if one.figures.overall.decode_lines:
            shown.append(one)
        else:
            what = "no request was decoded for 40 steps, or these are not the lines of a server"
            errors.append(
                Inconclusive(f"{one.name}: no decode line in {one.searched} lines: {what}", phase="stats")
            )
    print_stats(out, shown, as_json=asked.as_json, errors=[error.render() for error in errors])
    leave(errors, ExitCode.OK if shown else None)
