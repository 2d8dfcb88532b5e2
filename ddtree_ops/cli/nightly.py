"""``nightly``: look at hosts, prove that they serve, compare with earlier nights, report."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.common import (
    Hosts,
    InventoryOption,
    JsonOption,
    LockWaitOption,
    ServiceOption,
    err,
    leave,
    masked_session,
    open_session,
    out,
    print_json,
    rolling,
    rollout,
    safety_of,
    same_again,
    targets_of,
)
from ddtree_ops.errors import ExitCode, OpsError, UsageError
from ddtree_ops.report.typed import typed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddtree_ops.deploy.guard import Safety
    from ddtree_ops.inventory.models import Inventory, Target
    from ddtree_ops.playbook.models import Playbook
    from ddtree_ops.playbook.nightly import Wishes
    from ddtree_ops.runreport import RunReport
    from ddtree_ops.secret import Secret

__all__ = ["perform", "register"]

_GRACE_S = 5.0
_DRAWN_EVERY_S = 15.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("nightly")(rolling(nightly))


def nightly(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    playbook: Annotated[
        str, typer.Option("--playbook", "-p", metavar="NAME|PATH", help="Another playbook that reports.")
    ] = "nightly",
    deploy: Annotated[
        bool | None,
        typer.Option(
            "--deploy/--no-deploy", help="Deploy first, or not. Default: as the playbook says: not."
        ),
    ] = None,
    bench: Annotated[
        bool | None,
        typer.Option("--bench/--no-bench", help="Bench too, or not. Default: as the playbook says: not."),
    ] = None,
    suite: Annotated[
        str | None, typer.Option("--suite", metavar="NAME|PATH", help="Another suite than the playbook's.")
    ] = None,
    checks: Annotated[
        list[str] | None,
        typer.Option("--check", "-c", metavar="NAME", help="Only this check; may be repeated."),
    ] = None,
    golden: Annotated[
        Path | None,
        typer.Option(
            "--golden", metavar="FILE", help="What validate --record wrote: lossless compares with it."
        ),
    ] = None,
    report_dir: Annotated[
        Path | None,
        typer.Option(
            "--report-dir", metavar="DIR", help="Where reports go. Default: a new folder of the state."
        ),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option("--history", metavar="DIR", help="Folder of all histories. Default: in the state."),
    ] = None,
    new_baseline: Annotated[
        bool, typer.Option("--new-baseline", help="Later runs are compared with none before this one.")
    ] = False,
    webhook_env: Annotated[
        str | None,
        typer.Option(
            "--webhook-env", metavar="NAME", help="Variable with an address that is told the verdict."
        ),
    ] = None,
    webhook_file: Annotated[
        Path | None, typer.Option("--webhook-file", metavar="FILE", help="File with such an address.")
    ] = None,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Doctor, drift, deploy if asked, validate, bench if asked, journal since the last run, trend; a report of it all.

    Runs playbooks/nightly.yaml: every step on every host, whatever failed before. Exit code: 0 all passed, 5 something
    failed, 8 something is not known, 4 a host was not reached, 6 another run is under way, 7 a deploy was rolled back.
    """
    from ddtree_ops.playbook.load import load_playbook
    from ddtree_ops.playbook.models import Deploy
    from ddtree_ops.playbook.nightly import Wishes, parts_of
    from ddtree_ops.playbook.webhook import webhook_url

    loaded = load_playbook(playbook)
    if not loaded.reports:
        raise UsageError(f"playbook {loaded.name} does not report", hint=f"ddtree-ops run {playbook} HOSTS")
    wishes = Wishes(
        deploy,
        bench,
        suite,
        tuple(checks or ()),
        new_baseline,
        "" if golden is None else str(golden),
        same_again(
            "nightly",
            service=service,
            playbook=None if playbook == "nightly" else playbook,
            deploy=deploy,
            no_deploy=deploy is False,
            bench=bench,
            no_bench=bench is False,
            suite=suite,
            check=checks,
            golden=golden,
            report_dir=report_dir,
            history=history,
            new_baseline=new_baseline,
            webhook_env=webhook_env,
            webhook_file=webhook_file,
            lock_wait=None if lock_wait is None else f"{lock_wait:g}s",
        ),
    )
    deploys = any(isinstance(part[0], Deploy) for part in parts_of(loaded.steps, wishes))
    url = webhook_url(variable=webhook_env, file=None if webhook_file is None else str(webhook_file))
    again = same_again("deploy", service=service)
    safety = safety_of("deploy", lock_wait=lock_wait, again=again, lint=same_again("lint", service=service))
    known, targets = targets_of(
        hosts, inventory=inventory, service=service, default_all=not deploys, whole=True
    )
    perform(
        loaded,
        targets,
        inventory=known,
        wishes=wishes,
        report_dir=report_dir,
        history=history,
        url=url,
        url_from=f"variable {webhook_env}" if webhook_env else f"file {webhook_file}",
        safety=safety,
        as_json=as_json,
    )


class _Keeper:
    """Writes the report of a run, again and again: the JSON document each time, all formats at the end and now and then.

    :ivar failed: the last report could not be written.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.failed: OpsError | None = None
        self._drawn = 0.0

    def __call__(self, report: RunReport) -> None:
        """:raises OpsError: the first one cannot be written; later ones go on without."""
        from ddtree_ops.paths import state_dir
        from ddtree_ops.report.write import REPORT, json_text, own_folder, write_file, write_report

        if self.folder is None:
            self.folder = own_folder(state_dir() / "reports", report.id)
        first, now = not self._drawn, time.monotonic()
        try:
            if first or report.ended or now - self._drawn >= _DRAWN_EVERY_S:
                self._drawn = now
                write_report(report, self.folder)
            else:
                write_file(self.folder / REPORT, json_text(report))
        except OpsError as error:
            if first:
                error.state = "nothing was contacted or changed"
                raise
            self.failed = error
        else:
            self.failed = None


def perform(
    playbook: Playbook,
    targets: Sequence[Target],
    *,
    inventory: Inventory,
    wishes: Wishes | None = None,
    report_dir: Path | None = None,
    history: Path | None = None,
    url: Secret | None = None,
    url_from: str = "",
    safety: Safety | None = None,
    as_json: bool = False,
) -> None:
    """Run a playbook that reports, print and send what it found, leave with its code.

    :param url_from: where the address of the webhook was taken from.
    """
    from ddtree_ops.checks.validation.lossless import open_baseline
    from ddtree_ops.cli.common import check_signatures
    from ddtree_ops.deploy.secrets import api_key_of
    from ddtree_ops.paths import state_dir
    from ddtree_ops.playbook.nightly import run_nightly
    from ddtree_ops.playbook.trend import Store
    from ddtree_ops.remote.lean import import_fabric
    from ddtree_ops.report.progress import progress_for
    from ddtree_ops.report.write import refuse_others

    check_signatures()
    import_fabric()
    past = history.expanduser() if history else state_dir() / "history"
    store = Store(past, Path(inventory.path).stem)
    keeper = _Keeper(None if report_dir is None else report_dir.expanduser())
    if keeper.folder is not None:
        refuse_others(keeper.folder, playbook.name or "nightly")
    with progress_for(err if as_json else out, len(targets)) as progress:
        report, code = run_nightly(
            playbook,
            targets,
            store=store,
            connect=open_session,
            report=progress,
            keep=keeper,
            wishes=wishes,
            inventory=inventory.path,
            baseline=lambda target: open_baseline(inventory, target, masked_session, api_key_of),
            rollout=rollout(),
            safety=safety,
        )
    problems = [keeper.failed] if keeper.failed else []
    _github(report, to_stderr=as_json)
    if url is not None:
        problems += _send(url, report, code, url_from)
    if as_json:
        from ddtree_ops.report.clean import clean

        document: dict[str, Any] = clean(report).to_json()
        print_json({**document, "exit_code": int(code), "problems": [one.render() for one in problems]})
    else:
        from ddtree_ops.report.run_terminal import print_run

        print_run(out, report, kept=keeper.folder)
        out.write_line(f"reports: {keeper.folder}")
    if code is not ExitCode.OK:
        for problem in problems:
            err.print(f"error: {typed(problem.render())}", markup=False, soft_wrap=True)
        raise typer.Exit(int(code))
    leave(problems, code)


def _github(report: RunReport, *, to_stderr: bool) -> None:
    """In a job of GitHub Actions: annotations on a stream, the summary of the step into its file."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    from ddtree_ops.report.github import annotations_text
    from ddtree_ops.report.markdown import step_summary

    for line in annotations_text(report).splitlines():
        (err if to_stderr else out).write_line(line)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(step_summary(report) + "\n")
        except OSError as error:
            err.write_line(f"note: the summary of the step cannot be written: {error.strerror}")


def _send(url: Secret, report: RunReport, code: ExitCode, url_from: str) -> list[OpsError]:
    """Tell the webhook; that it was not reached takes nothing away from the verdict, and a pass alone is then no pass."""
    from ddtree_ops.playbook.webhook import post, summary

    document = summary(report, code)
    sent = post(url, document) if report.complete else post(url, document, attempts=1, timeout=_GRACE_S)
    if not sent.problem:
        return []
    return [
        OpsError(
            f"the webhook of {url_from} was not told: {sent.problem}",
            phase="webhook",
            state=f"the verdict stands: {report.verdict.value}; the reports are written",
            hint=f"is the address in {url_from} right, and may this machine reach it?",
        )
    ]
