"""The command ``validate``."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.common import (
    Duration,
    Hosts,
    InventoryOption,
    JsonOption,
    ServiceOption,
    check_signatures,
    err,
    leave,
    masked_session,
    on_all,
    out,
    parted,
    print_json,
    targets_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddtree_ops.checks.validation.gathering import Gathered
    from ddtree_ops.checks.validation.run import Validation
    from ddtree_ops.errors import OpsError
    from ddtree_ops.inventory.models import Target
    from ddtree_ops.results import CheckResult

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("validate")(validate)


def validate(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    suite: Annotated[
        str | None,
        typer.Option("--suite", metavar="NAME|PATH", help="quick (the default), standard, full, or a file."),
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option("--check", "-c", metavar="NAME", help="Only this check; may be given several times."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Name checks and suites, and leave.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="FILE", help="Record the engine's answers for the check lossless, and leave."
        ),
    ] = None,
    golden: Annotated[
        Path | None,
        typer.Option(
            "--golden",
            metavar="FILE",
            help="What --record wrote: lossless compares with it.",
        ),
    ] = None,
    no_quality: Annotated[
        bool,
        typer.Option(
            "--no-quality", help="The model talks nonsense: judge that there is text, not its sense."
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        Duration("--timeout", help="Longest wait for one answer. Default: health.request_timeout."),
    ] = None,
    report_dir: Annotated[
        Path | None,
        typer.Option(
            "--report-dir",
            metavar="DIR",
            help="Where the report goes: JSON, HTML, JUnit, Markdown ... Default: in the state folder.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that it works: named checks with a verdict each, alone or in suites; nothing is deployed or restarted."""
    from ddtree_ops.checks.validation.suites import heed_golden, load_suite, pick
    from ddtree_ops.errors import ExitCode, UsageError

    if show:
        _list(suite, as_json)
        return
    plan = pick(check or (), load_suite(suite or "quick") if suite or not check else None)
    if record is None:
        heed_golden(plan, "" if golden is None else str(golden))
    elif golden is not None:
        raise UsageError(
            "--record and --golden together: one writes a golden file, the other compares with one",
            hint="name one of the two",
        )
    loaded, targets = targets_of(hosts, inventory=inventory, service=service, default_all=True)
    check_signatures()
    if record is not None:
        _record(targets, record, quality=False if no_quality else None, timeout=timeout)
        return

    from ddtree_ops.checks.validation.gathering import Gathered
    from ddtree_ops.checks.validation.lossless import BASELINE, GOLDEN, open_baseline
    from ddtree_ops.checks.validation.run import validate as run_checks
    from ddtree_ops.deploy.secrets import API_KEY, api_key_of, resolve_secrets
    from ddtree_ops.paths import state_dir
    from ddtree_ops.report.progress import progress_for
    from ddtree_ops.report.run_terminal import print_run
    from ddtree_ops.report.typed import typed
    from ddtree_ops.report.write import own_folder
    from ddtree_ops.results import exit_code_of, worst

    keys = {
        target.name: secrets.api_key
        for target, secrets in zip(targets, resolve_secrets(targets, only=API_KEY), strict=True)
    }
    options = {
        "suite": suite or ("" if check else "quick"),
        "checks": [planned.name for planned in plan],
        **({"quality": False} if no_quality else {}),
    }
    gathered = Gathered(targets, options=options, inventory=loaded.path)
    id = gathered.report(complete=False).id
    folder = (
        report_dir.expanduser() if report_dir else own_folder(state_dir() / "reports", id, prefix="validate-")
    )
    keeper = _Keeper(gathered, folder)
    keeper.begin()
    try:
        with progress_for(err, len(targets)) as report:

            def one(target: Target) -> Validation:
                def took(result: CheckResult) -> None:
                    gathered.add(target, result)
                    keeper.keep()

                def knew(facts: Mapping[str, Any]) -> None:
                    gathered.know(target, facts)
                    keeper.keep()

                shared = {
                    GOLDEN: "" if golden is None else str(golden),
                    BASELINE: open_baseline(loaded, target, masked_session, api_key_of),
                }
                with masked_session(target) as session:
                    return run_checks(
                        session,
                        target,
                        plan,
                        report=report,
                        api_key=keys[target.name],
                        quality=False if no_quality else None,
                        timeout=timeout,
                        shared=shared,
                        named=check or (),
                        on_result=took,
                        on_facts=knew,
                    )

            outcomes = on_all(targets, one)
    except KeyboardInterrupt:
        keeper.end(complete=False)
        if keeper.failed is not None:
            err.print(f"error: {typed(keeper.failed.render())}", markup=False, soft_wrap=True)
        else:
            err.write_line(f"report: {folder} (interrupted: what was known until then)")
        raise
    for target, outcome in zip(targets, outcomes, strict=True):
        gathered.done(target, outcome)
    found = gathered.report(complete=True)
    try:
        if as_json:
            print_json(found.to_json())
        else:
            print_run(out, found, kept=folder)
    finally:
        keeper.end(complete=True)
    failed, done = parted(targets, outcomes)
    code = exit_code_of(worst(outcome.verdict for _, outcome in done)) if done else None
    if keeper.failed is None:
        err.write_line(f"report: {folder}")
    elif not failed and code is ExitCode.OK:
        failed = [keeper.failed]
    else:
        err.print(f"error: {typed(keeper.failed.render())}", markup=False, soft_wrap=True)
    leave(failed, code)


class _Keeper:
    """Writes the report of a run: the JSON document after every result, all formats at the end. Thread-safe.

    :ivar failed: the last report could not be written.
    """

    def __init__(self, gathered: Gathered, folder: Path) -> None:
        self.failed: OpsError | None = None
        self._gathered, self._folder = gathered, folder
        self._lock = threading.Lock()

    def begin(self) -> None:
        """:raises OpsError: nothing can be written there; nothing was asked yet."""
        self.keep()
        if self.failed is not None:
            self.failed.state = "nothing was contacted"
            raise self.failed

    def keep(self) -> None:
        """Write what there is; that it cannot be written does not end the run."""
        from ddtree_ops.report.write import REPORT, json_text, write_file

        report = self._gathered.report(complete=False)
        self._tried(lambda: write_file(self._folder / REPORT, json_text(report)))

    def end(self, *, complete: bool) -> None:
        """Write it in every format."""
        from ddtree_ops.report.write import write_report

        report = self._gathered.report(complete=complete)
        self._tried(lambda: write_report(report, self._folder))

    def _tried(self, write: Callable[[], object]) -> None:
        from ddtree_ops.errors import OpsError

        with self._lock:
            try:
                write()
            except OpsError as error:
                self.failed = error
            else:
                self.failed = None


def _list(suite: str | None, as_json: bool) -> None:
    """Every check with what a pass proves, its settings, and the suites that hold it."""
    from ddtree_ops.checks.validation.registry import checks
    from ddtree_ops.checks.validation.suites import Planned, load_suite, pick, suite_names

    suites = [load_suite(name) for name in ([suite] if suite else suite_names())]
    every = [Planned(spec, spec.settings()) for spec in checks().values()]
    plan = pick(suite=suites[0]) if suite else every
    held = {each.name: {planned.name: planned for planned in each.checks} for each in suites}
    if as_json:
        print_json(
            {
                "schema": 1,
                "suites": [{"name": each.name, "description": each.description} for each in suites],
                "checks": [
                    {
                        "name": planned.name,
                        "title": planned.spec.title,
                        "suites": [name for name, own in held.items() if planned.name in own],
                        "settings": planned.settings.model_dump(),
                        "disturbs": planned.spec.disturbs,
                        "standing": planned.spec.standing,
                    }
                    for planned in plan
                ],
            }
        )
        return
    width = max(len(planned.name) for planned in plan)
    for planned in plan:
        spec, settings = planned.spec, planned.settings.model_dump()
        holding = {
            name: own[spec.name].settings.model_dump() for name, own in held.items() if spec.name in own
        }
        where = "in every run, last" if spec.standing else ", ".join(holding) or "in no suite"
        note = "; disturbs other users" if spec.disturbs else ""
        out.write_line(f"{spec.name:<{width}}  {spec.title} ({where}{note})")
        if settings:
            out.write_line(f"{'':<{width}}  settings: {_settings(settings)}")
        for name, own in holding.items():
            others = {key: value for key, value in own.items() if value != settings[key]}
            if others:
                out.write_line(f"{'':<{width}}  in {name}: {_settings(others)}")
    for each in suites:
        out.write_line(f"suite {each.name}: {each.description}")


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {_shown(value)}" for key, value in values.items())


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_shown(each) for each in value)}]"
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) or not value else value


def _record(targets: Sequence[Target], path: Path, *, quality: bool | None, timeout: float | None) -> None:
    """Record the answers of one engine."""
    from ddtree_ops.checks.validation.base import PHASE
    from ddtree_ops.checks.validation.golden import demand_room, record
    from ddtree_ops.checks.validation.run import open_context
    from ddtree_ops.deploy.secrets import API_KEY, resolve_secrets
    from ddtree_ops.errors import UsageError
    from ddtree_ops.report.progress import progress_for
    from ddtree_ops.results import Event, EventKind
    from ddtree_ops.wording import count

    if len(targets) != 1:
        raise UsageError(
            f"--record is for one target, and {len(targets)} are selected",
            hint="name the host of the baseline; which there are: ddtree-ops inventory show",
        )
    path = path.expanduser()
    replaces = demand_room(path)
    (target,) = targets
    (resolved,) = resolve_secrets(targets, only=API_KEY)
    with (
        progress_for(err, 1) as report,
        masked_session(target) as session,
        open_context(
            session, target, report=report, api_key=resolved.api_key, quality=quality, timeout=timeout
        ) as ctx,
    ):
        ctx.name = "record"
        report(Event(EventKind.START, target.name, PHASE, "what it writes alone is recorded"))
        golden = record(ctx, path)
        done = f"{count(len(golden.prompts), 'prompt')}, each answered three times, in {path}"
        done += " (in place of the earlier golden file)" if replaces else ""
        report(Event(EventKind.DONE, target.name, PHASE, done))
