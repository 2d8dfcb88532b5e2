"""Commands that measure: ``bench``, ``bench compare``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ddtree_ops.cli.common import (
    Hosts,
    InventoryOption,
    JsonOption,
    LockWaitOption,
    RuntimeOption,
    ServiceOption,
    SetOption,
    check_signatures,
    err,
    open_session,
    out,
    print_json,
    safety_of,
    same_again,
    targets_of,
)
from ddtree_ops.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddtree_ops.deploy.guard import Safety
    from ddtree_ops.inventory.models import Target
    from ddtree_ops.playbook.bench import BenchOptions
    from ddtree_ops.runreport import RunReport

__all__ = ["register"]

_GENERATORS = ("auto", "bench_serving", "own")
_MOST = 4096
_HELP = """Measure budgets and top-k against the baseline, or compare two such runs: bench HOST, bench compare.

\b
    bench ct200 --budgets 8,16,32 --concurrency 1,8
    bench compare DIR1 DIR2

RESTARTS the service once for every configuration, and puts back what ran before. All options: bench run --help.
"""


class _Bench(TyperGroup):
    """``bench HOST ...`` is ``bench run HOST ...``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["HOSTS... [OPTIONS]  |  compare REPORT1 REPORT2"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        cls=_Bench,
        no_args_is_help=True,
        help=_HELP,
    )
    group.command("run", short_help="Measure: 'run' may be left out. Its options: bench run --help.")(run)
    group.command("compare")(compare)
    app.add_typer(group, name="bench")


def _numbers(text: str | None) -> tuple[int, ...]:
    """``8,16,32`` as numbers."""
    if text is None:
        return ()
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: write whole numbers with commas between, such as 8,16,32"
        ) from None
    if not all(0 < number <= _MOST for number in found):
        raise typer.BadParameter(f"{text!r}: each is to be from 1 to {_MOST}")
    return tuple(dict.fromkeys(found))


def run(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    runtime: RuntimeOption = None,
    settings: SetOption = None,
    budgets: Annotated[
        str | None, typer.Option("--budgets", metavar="N,N", help="Tree budgets. Default: the service's own.")
    ] = None,
    topk: Annotated[
        str | None, typer.Option("--topk", metavar="N,N", help="Top-k caps. Default: the service's own.")
    ] = None,
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="N,N", help="Requests at the same time.")
    ] = "1,8,32",
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Measure without speculation too.")
    ] = True,
    dflash: Annotated[
        bool, typer.Option("--dflash/--no-dflash", help="Measure the linear drafter too.")
    ] = True,
    requests: Annotated[
        int,
        typer.Option("--requests", min=1, help="Requests a point; at least twice the concurrency are sent."),
    ] = 32,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=4, help="Longest answer, in tokens.")] = 256,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help="Prompts of your own: one a line. Default: 16 shipped."
        ),
    ] = None,
    generator: Annotated[
        str,
        typer.Option(
            "--generator",
            metavar="|".join(_GENERATORS),
            help="auto: sglang.bench_serving where the host's venv has it, else our own small one.",
        ),
    ] = "auto",
    report_dir: Annotated[
        Path | None,
        typer.Option(
            "--report-dir", metavar="DIR", help="Where the report goes. Default: in the state folder."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="DIR", help="Measure what the report in DIR lacks; same options."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write one row a point there too.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask: the service is restarted.")] = False,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a service over budgets, top-k and concurrency, against the baseline and DFLASH in the same run.

    RESTARTS the service once for every configuration, and puts back what ran before at the end, also after Ctrl-C. The
    report is saved after every point: --resume goes on from there. Exit code 5: a point failed; the others were measured.
    """
    from ddtree_ops.playbook.bench import BenchOptions

    if generator not in _GENERATORS:
        raise UsageError(
            f"--generator {generator}: there is no such one", hint=f"one of {', '.join(_GENERATORS)}"
        )
    if resume is not None and report_dir is not None:
        raise UsageError("--resume goes on in the directory that it names: leave --report-dir out")
    options = BenchOptions(
        budgets=_numbers(budgets),
        topk=_numbers(topk),
        concurrency=_numbers(concurrency),
        baseline=baseline,
        dflash=dflash,
        requests=requests,
        max_tokens=max_tokens,
        prompts=_prompts(prompts),
        generator=generator,  # type: ignore[arg-type]
    )
    loaded, targets = targets_of(
        hosts, inventory=inventory, service=service, runtime=runtime, settings=settings
    )
    resumed = _resumed(resume)
    if report_dir is not None:
        _refuse_taken(report_dir, options.to_json(targets))
    folder = resume or report_dir or _new_folder()
    again = same_again(
        "bench",
        service=service,
        runtime=runtime,
        set=settings,
        budgets=budgets,
        topk=topk,
        concurrency=concurrency,
        no_baseline=not baseline,
        no_dflash=not dflash,
        requests=requests,
        max_tokens=max_tokens,
        prompts=prompts,
        generator=generator,
        resume=folder,
        yes=yes,
    )
    if len(targets) > 1:
        again = again.replace("{host}", " ".join(target.name for target in targets), 1)
    linting = same_again("lint", service=service, runtime=runtime, set=settings)
    safety = safety_of("bench", lock_wait=lock_wait, again=again, lint=linting)
    _confirm(targets, options, resumed, safety=safety, yes=yes)
    _measure(
        targets,
        options,
        resumed=resumed,
        folder=folder,
        csv=csv,
        as_json=as_json,
        inventory=loaded.path,
        safety=safety,
    )


def _measure(
    targets: Sequence[Target],
    options: BenchOptions,
    *,
    resumed: RunReport | None,
    folder: Path,
    csv: Path | None,
    as_json: bool,
    inventory: str,
    safety: Any,
) -> None:
    from ddtree_ops.deploy.secrets import resolve_secrets
    from ddtree_ops.playbook.bench import run_bench
    from ddtree_ops.remote.lean import import_fabric
    from ddtree_ops.report.csvout import points_csv
    from ddtree_ops.report.progress import progress_for
    from ddtree_ops.report.run_terminal import print_run
    from ddtree_ops.report.typed import typed
    from ddtree_ops.report.write import REPORT, json_text, write_file, write_report

    check_signatures()
    resolve_secrets(targets)
    import_fabric()
    with progress_for(err if as_json else out, len(targets)) as report:
        found = run_bench(
            targets,
            options,
            connect=open_session,
            report=report,
            save=lambda each: write_file(folder / REPORT, json_text(each)),
            resumed=resumed,
            safety=safety,
            inventory=inventory,
        )
    write_report(found.report, folder)
    if csv is not None:
        write_file(csv, points_csv(found.report))
    if as_json:
        print_json(found.report.to_json())
    else:
        print_run(out.console, found.report)
        for line in _recommendations(found.report):
            out.write_line(line)
    told = out if not as_json else err
    told.write_line(f"report: {folder}")
    for error in found.errors:
        err.print(f"error: {typed(error.render())}", markup=False, soft_wrap=True)
    raise typer.Exit(int(found.exit_code))


def _recommendations(report: RunReport) -> list[str]:
    """``ct200: most tokens/s at concurrency 8: ddtree-b16-k4``, a line a target and concurrency. Pure."""
    return [
        f"{target.target}: most tokens/s at concurrency {at}: {name}"
        for target in report.targets
        for at, name in dict(target.facts.get("recommended", {})).items()
    ]


def _prompts(path: Path | None) -> tuple[str, ...]:
    """One a line; a line that is empty counts for nothing."""
    if path is None:
        return ()
    try:
        lines = path.expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path}: {getattr(error, 'strerror', None) or error}") from error
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise UsageError(f"--prompts {path}: there is no prompt in it", hint="one prompt a line")
    return found


def _resumed(folder: Path | None) -> RunReport | None:
    if folder is None:
        return None
    from ddtree_ops.report.write import read_report

    return read_report(folder)


def _refuse_taken(folder: Path, wanted: Mapping[str, Any]) -> None:
    """:raises UsageError: there is a report in the folder of a new run: it would be gone."""
    from ddtree_ops.errors import OpsError
    from ddtree_ops.playbook.bench import refuse_other
    from ddtree_ops.report.write import REPORT, read_report

    if not (folder / REPORT).exists():
        return
    other = "name another folder, or leave --report-dir out"
    try:
        found = read_report(folder)
        what = f"the report of {found.command} {found.id}"
        refuse_other(found, wanted)
        hint = f"--resume {shlex.quote(str(folder))} measures what it lacks; for a new one {other}"
    except OpsError as error:
        if not isinstance(error, UsageError):
            what = "a report that cannot be read"
        hint = other
    raise UsageError(
        f"--report-dir {folder}: {what} is there, and a new run would replace it",
        state="nothing was changed, and no host was asked",
        hint=hint,
    )


def _new_folder() -> Path:
    from ddtree_ops.paths import state_dir
    from ddtree_ops.playbook.bench import new_run_id

    return state_dir() / "reports" / f"bench-{new_run_id()}"


def _confirm(
    targets: Sequence[Target], options: BenchOptions, resumed: RunReport | None, *, safety: Safety, yes: bool
) -> None:
    """Say what is restarted how often, see that lint refuses none of it, and ask.

    :raises ConfigError: lint refuses a configuration.
    :raises UsageError: nobody can be asked. :raises typer.Abort: the answer is no.
    """
    from ddtree_ops.playbook.bench import refuse_other, refuse_what_lint_refuses, starts_needed

    if resumed is not None:
        refuse_other(resumed, options.to_json(targets))
    starts = starts_needed(targets, options, resumed)
    lines = [
        f"{name}: {len(each)} starts: {', '.join(one.name for one in each)}"
        if each
        else f"{name}: everything is measured already"
        for name, each in starts.items()
    ]
    for line in lines:
        err.print(line, markup=False, soft_wrap=True)
    refuse_what_lint_refuses(targets, starts, safety=safety, progress=err.write_line)
    if yes or not any(starts.values()):
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "bench restarts the service, and there is nobody to ask",
            state="nothing was changed",
            hint="give --yes",
        )
    for line in _deployed_otherwise(targets, starts):
        err.print(line, markup=False, soft_wrap=True)
    if not typer.confirm("The service does not answer while it loads. Go on?", err=True):
        raise typer.Exit(int(ExitCode.USAGE))


def _deployed_otherwise(targets: Sequence[Target], starts: Mapping[str, Sequence[Any]]) -> list[str]:
    """A line for each target that runs with other settings than those measured. :raises UnreachableError: no host."""
    from ddtree_ops.playbook.bench import deployed_otherwise

    found = []
    for target in targets:
        if not starts[target.name]:
            continue
        with open_session(target) as session:
            said = deployed_otherwise(session, target)
        if said:
            found.append(f"{target.name}: {said}")
    return found


def compare(
    first: Annotated[Path, typer.Argument(metavar="REPORT1", help="report.json, or its folder.")],
    second: Annotated[Path, typer.Argument(metavar="REPORT2", help="Another one.")],
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="ONE=OTHER", help="ONE of the first report stands against OTHER of the second."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the comparison as a page there too.")
    ] = None,
) -> None:
    """Compare two runs, or two hosts: every figure that both have, and which way it went."""
    from ddtree_ops.report.compare import compare_reports, comparison_html, print_comparison
    from ddtree_ops.report.write import read_report, write_file

    pairs: dict[str, str] = {}
    for text in against or ():
        one, equals, other = text.partition("=")
        if not (one and equals and other):
            raise UsageError(f"--host {text}: write ONE=OTHER", hint="for example --host ct200=b300")
        pairs[one] = other
    one_run, other_run = read_report(first), read_report(second)
    if not pairs and (one_run.command, one_run.id) == (other_run.command, other_run.id):
        raise UsageError(
            f"both are one run, {one_run.command} {one_run.id}: there is nothing to compare",
            hint="name another run; two hosts of one run: --host ONE=OTHER",
        )
    found = compare_reports(one_run, other_run, pairs)
    if not found.changes:
        raise UsageError(
            "the two reports have no figure in common",
            hint="the same points are compared; hosts that are called differently: --host ONE=OTHER",
        )
    print_comparison(out.console, found)
    if html is not None:
        write_file(html, comparison_html(found))
