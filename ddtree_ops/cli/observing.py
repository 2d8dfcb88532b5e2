"""Commands that only look: ``smoke``, ``logs``, ``diagnose``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli.common import (
    Duration,
    Hosts,
    HostsOrFiles,
    InventoryOption,
    JsonOption,
    ServiceOption,
    err,
    is_path,
    leave,
    on_all,
    open_session,
    out,
    parted,
    print_json,
    targets_of,
)
from ddtree_ops.errors import ExitCode, OpsError, UsageError

if TYPE_CHECKING:
    from ddtree_ops.diagnose.api import DiagnosisReport
    from ddtree_ops.inventory.models import Target
    from ddtree_ops.remote.session import Session
    from ddtree_ops.service.journal import Entry, SearchResult

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("smoke")(smoke)
    app.command("logs")(logs)
    app.command("diagnose")(diagnose)


def smoke(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Named prompt (quicksort, ...) or free text.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=2, help="Tokens to generate.")] = None,
    window: Annotated[
        float | None, Duration("--window", help="How long the unit is held afterwards.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """One real completion on every host, then hold the unit, scan its journal, report acceptance and graphs."""
    from ddtree_ops.checks.smoke import SmokeReport, run_smoke
    from ddtree_ops.deploy.secrets import API_KEY, resolve_secrets
    from ddtree_ops.report.progress import progress_for
    from ddtree_ops.report.summary import print_answer, print_checks, print_diagnosis
    from ddtree_ops.results import exit_code_of, worst

    _, targets = targets_of(hosts, inventory=inventory, service=service, default_all=True)

    keys = {
        target.name: secrets.api_key
        for target, secrets in zip(targets, resolve_secrets(targets, only=API_KEY), strict=True)
    }
    with progress_for(err, len(targets)) as report:

        def one(target: Target) -> SmokeReport:
            with _masked_session(target) as session:
                return run_smoke(
                    session,
                    target,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    window=window,
                    report=report,
                    api_key=keys[target.name],
                )

        failed, done = parted(targets, on_all(targets, one))
    checks = [replace(check, host=name) for name, outcome in done for check in outcome.results]
    found = [
        (name, outcome.diagnosis)
        for name, outcome in done
        if outcome.diagnosis and outcome.diagnosis.diagnoses
    ]
    if as_json:
        print_json(
            {
                "schema": 1,
                "checks": [check.to_json() for check in checks],
                "diagnoses": [{"source": name, **diagnosis.to_json()} for name, diagnosis in found],
                "errors": [error.render() for error in failed],
            }
        )
    else:
        print_checks(out, checks)
        for name, outcome in done:
            if outcome.chat is not None and outcome.chat.text:
                print_answer(out, name, outcome.chat.text)
        for name, diagnosis in found:
            print_diagnosis(out, diagnosis, host=name)
    leave(failed, exit_code_of(worst(check.verdict for check in checks)) if done else None)


def logs(
    hosts: Hosts = None,
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
    since: Annotated[
        str | None, typer.Option("--since", help="2h, '10 minutes ago', today, ISO 8601 (UTC).")
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", min=1, help="Show the newest N entries, or matches with --grep."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new entries.")] = False,
    invocation: Annotated[
        str, typer.Option("--invocation", help="current, previous, all, or an invocation id.")
    ] = "current",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, one line an entry.")
    ] = False,
) -> None:
    """Read the services' journals and say what was searched; no readable entry is an error, not "nothing found".

    Exit code: 0 when something matched (or no --grep was given), 5 when nothing did, 8 when there was nothing to
    search.
    """
    _, targets = targets_of(hosts, inventory=inventory, service=service, default_all=True)
    show = _entry_printer(many=len(targets) > 1, as_json=as_json)
    if follow:
        if len(targets) > 1:
            raise UsageError(
                "--follow shows one service of one host",
                hint=f"ddtree-ops logs {targets[0].host.name} --service {targets[0].service.name} --follow",
            )
        if since is not None or invocation != "current":
            raise UsageError("--follow shows what is written from now on: leave out --since and --invocation")
        _follow(targets[0], re.escape(grep) if grep and fixed_strings else grep, ignore_case, lines, show)
        return

    def one(target: Target) -> SearchResult:
        from ddtree_ops.service.control import UnitControl

        with _masked_session(target) as session:
            return UnitControl(session, target.service.unit).search(
                grep,
                invocation=invocation,
                since=since,
                lines=None if grep else lines,
                ignore_case=ignore_case,
                literal=fixed_strings,
            )

    failed, done = parted(targets, on_all(targets, one))
    matched = False
    for name, found in done:
        matches = found.matches[-lines:] if lines else found.matches
        matched = matched or bool(matches)
        for entry in matches:
            show(name, entry)
        err.print(f"{name}: {found.describe()}", style="dim", markup=False, soft_wrap=True)
    code = ExitCode.OK if matched or not grep else ExitCode.CHECK_FAILED
    leave(failed, code if done else None)


def diagnose(
    what: HostsOrFiles = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    invocation: Annotated[
        str, typer.Option("--invocation", help="current, previous or an invocation id.")
    ] = "current",
    as_json: JsonOption = False,
) -> None:
    """Explain a crash: the root cause first, what it means, what to do. Exit code 0 pass, 5 fail, 8 inconclusive."""
    from ddtree_ops.report.summary import print_diagnosis
    from ddtree_ops.results import exit_code_of, worst

    if what and any(word == "-" or is_path(word) for word in what):
        reports = [(word, _diagnose_file(word)) for word in what]
        failed: list[OpsError] = []
    else:
        from ddtree_ops.checks.signatures import signatures

        _, targets = targets_of(what, inventory=inventory, service=service, default_all=True)

        def one(target: Target) -> DiagnosisReport:
            with _masked_session(target) as session:
                return signatures(session, target, invocation=invocation)[1]

        failed, reports = parted(targets, on_all(targets, one))
    if as_json:
        print_json([{"source": name, **report.to_json()} for name, report in reports])
    else:
        for name, report in reports:
            print_diagnosis(out, report, host=name)
    leave(failed, exit_code_of(worst(report.verdict for _, report in reports)) if reports else None)


@contextmanager
def _masked_session(target: Target) -> Iterator[Session]:
    """A session to the target's host; the secrets that the service has there are masked in what is shown."""
    from ddtree_ops.deploy.secrets import read_host_secrets
    from ddtree_ops.service.layout import Layout

    with open_session(target) as session:
        read_host_secrets(session, Layout.of(target))
        yield session


def _diagnose_file(name: str) -> DiagnosisReport:
    from ddtree_ops.diagnose.api import diagnose as explain
    from ddtree_ops.diagnose.lines import read_log

    if name == "-":
        return explain(read_log(sys.stdin.buffer))
    try:
        with Path(name).open("rb") as stream:
            return explain(read_log(stream))
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from error


def _follow(
    target: Target, grep: str | None, ignore_case: bool, lines: int | None, show: Callable[[str, Entry], None]
) -> None:
    from ddtree_ops.service.control import UnitControl

    try:
        pattern = re.compile(grep or "", re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise UsageError(
            f"{grep!r} is not a regular expression: {error}", hint="for plain text add --fixed-strings"
        ) from error
    with (
        _masked_session(target) as session,
        UnitControl(session, target.service.unit).follow(lines=lines or 20) as entries,
    ):
        for entry in entries:
            if pattern.search(entry.message):
                show(target.name, entry)
            if out.quiet:  # whoever read our output has gone
                return


def _entry_printer(*, many: bool, as_json: bool) -> Callable[[str, Entry], None]:
    if as_json:
        import json

        def show_json(host: str, entry: Entry) -> None:
            record = {
                "host": host,
                "time": entry.time.isoformat(),
                "source": entry.source,
                "pid": entry.pid,
                "invocation": entry.invocation,
                "message": entry.message,
            }
            sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
            sys.stdout.flush()

        return show_json

    from rich.text import Text

    def show(host: str, entry: Entry) -> None:
        line = Text.assemble(
            (f"{host} " if many else "", "cyan"), (f"{entry.time:%m-%d %H:%M:%S} ", "dim"), entry.message
        )
        out.print(line, soft_wrap=True)

    return show
