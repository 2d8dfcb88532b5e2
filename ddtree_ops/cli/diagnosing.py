"""The command ``diagnose``: from a host's journal, or any log, to one sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from ddtree_ops.cli.common import (
    HostsOrFiles,
    InventoryOption,
    JsonOption,
    ServiceOption,
    SignaturesOption,
    err,
    leave,
    log_path,
    logs_and_hosts,
    masked_session,
    narrowing,
    no_such_file,
    on_all,
    out,
    parted,
    print_json,
    refuse_binary,
    targets_of,
)
from ddtree_ops.errors import OpsError, UsageError
from ddtree_ops.secret import masked

if TYPE_CHECKING:
    from ddtree_ops.diagnose.api import DiagnosisReport
    from ddtree_ops.diagnose.facts import ServiceFacts
    from ddtree_ops.diagnose.library import Library
    from ddtree_ops.inventory.models import Target

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("diagnose")(diagnose)


def diagnose(
    what: HostsOrFiles = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    invocation: Annotated[
        str | None,
        typer.Option(
            "--invocation",
            metavar="RUN",
            help="current (the default; of a unit that failed, the failed run), previous, or the first digits of an id.",
        ),
    ] = None,
    facts: Annotated[
        list[str] | None,
        typer.Option(
            "--facts",
            metavar="KEY=VALUE",
            help="What is known of the service of a log: block_size=8, budget=32, tp=8 ...",
        ),
    ] = None,
    signatures_dir: SignaturesOption = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "--explain", "-v", help="The reduced traceback, all evidence and consequences."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Explain a crash from hosts, log files or standard input (-): the root cause first, what it means, what to do.

    Any log of the server is understood: the journal in any output, docker, kubectl, a paste with quotes and colours,
    gzip, bzip2 or xz. For a log without its host, --service or --facts name what the inventory would know.

    Exit code: 0 nothing fatal, 5 a cause was found, 8 nothing to judge by.
    """
    from ddtree_ops.diagnose.api import merged
    from ddtree_ops.diagnose.facts import ServiceFacts
    from ddtree_ops.diagnose.library import default_library
    from ddtree_ops.report.diagnosis import print_diagnosis
    from ddtree_ops.results import exit_code_of, worst

    ServiceFacts.given(facts or ())
    files, hosts = logs_and_hosts(what, inventory)
    if files and not hosts:
        for option in [*(["--invocation"] if invocation is not None else []), *narrowing()]:
            raise UsageError(
                f"{option} belongs to the journal of a host", hint="name a host, or leave it out"
            )
    for name in files:
        refuse_binary(name)
    targets = _targets(hosts, inventory, service) if hosts or not files else []
    library = default_library(signatures_dir or ())
    found: dict[str, DiagnosisReport] = {}
    if files:
        target = _service(inventory, service)
        known = _known(target, facts or ())
        found |= {name: _file(name, known, target, library) for name in files}
    failed: list[OpsError] = []
    missing: dict[str, DiagnosisReport] = {}
    if targets:
        failed, done, missing = _live(targets, invocation or "current", facts or (), library)
        found |= dict(done)
    if as_json:
        document = merged([*found.values(), *missing.values()])
        print_json(document if not failed else {**document, "errors": [error.render() for error in failed]})
    else:
        for name, report in found.items():
            print_diagnosis(out, report, host=name, verbose=verbose)
    leave(failed, exit_code_of(worst(report.verdict for report in found.values())) if found else None)


def _targets(hosts: Sequence[str], inventory: str | None, service: str | None) -> list[Target]:
    try:
        return targets_of(hosts, inventory=inventory, service=service, default_all=True)[1]
    except UsageError as error:
        raise no_such_file(error, hosts) from None


def _live(
    targets: Sequence[Target], invocation: str, facts: Sequence[str], library: Library
) -> tuple[list[OpsError], list[tuple[str, DiagnosisReport]], dict[str, DiagnosisReport]]:
    """What went wrong, the reports by name of the target, and reports that say so of those that have none."""
    from ddtree_ops.deploy.explaining import explain_run, name_the_first_node
    from ddtree_ops.diagnose.api import unread

    def one(target: Target) -> DiagnosisReport:
        with masked_session(target) as session:
            return explain_run(session, target, invocation=invocation, library=library, given=facts)

    outcomes = on_all(targets, one)
    failed, done = parted(targets, outcomes)
    missing = {
        target.name: unread(target.name, masked(outcome.message))
        for target, outcome in zip(targets, outcomes, strict=True)
        if isinstance(outcome, OpsError)
    }
    of = {target.name: target for target in targets}
    told = name_the_first_node([(of[name], report) for name, report in done])
    return failed, [(name, report) for (name, _), report in zip(done, told, strict=True)], missing


def _service(inventory: str | None, service: str | None) -> Target | None:
    """The service of the inventory that a log file is about, on one of its hosts; None where no option names one."""
    if inventory is None and service is None:
        return None
    _, targets = targets_of((), inventory=inventory, service=service, default_all=True)
    names = list(dict.fromkeys(target.service.name for target in targets))
    if len(names) > 1:
        raise UsageError(
            f"the log may be of {len(names)} services: {', '.join(names)}",
            hint=f"name the one it is of: --service {names[0]}",
        )
    return targets[0]


def _known(target: Target | None, facts: Sequence[str]) -> ServiceFacts:
    from dataclasses import replace

    from ddtree_ops.diagnose.facts import ServiceFacts

    base = ServiceFacts() if target is None else replace(ServiceFacts.of(target), host=None)
    return ServiceFacts.given(facts, base)


def _file(name: str, known: ServiceFacts, target: Target | None, library: Library) -> DiagnosisReport:
    from dataclasses import replace

    from ddtree_ops.deploy.explaining import trace_local
    from ddtree_ops.deploy.seen import in_evidence, sentence
    from ddtree_ops.diagnose.api import diagnose_stream

    if name == "-":
        stream: BinaryIO | Iterable[bytes] = sys.stdin.buffer
        if sys.stdin.isatty():
            stream = iter(
                sys.stdin.buffer.readline, b""
            )  # one Ctrl-D is the end, which read() would ask for twice
            err.print(
                "paste the log, then press Ctrl-D at the start of a line (or name a file: ddtree-ops diagnose FILE)",
                markup=False,
                soft_wrap=True,
            )
        report = diagnose_stream(stream, known, library=library, source=name)
    else:
        try:
            with log_path(name).open("rb") as opened:
                report = diagnose_stream(opened, known, library=library, source=name)
        except OSError as error:
            raise UsageError(f"{name}: {error.strerror or error}") from error
    root = report.root
    if root is None:
        return report
    sightings = in_evidence(root)
    return replace(report, trace=trace_local(root, target), seen=sentence(sightings) if sightings else "")
