"""Commands around the signatures of ``diagnose``: ``signatures list``, ``signatures show``, ``signatures test``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_ops.cli.common import JsonOption, SignaturesOption, err, out, print_json
from ddtree_ops.errors import ConfigError, ExitCode, UsageError
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from ddtree_ops.diagnose.library import Example, Library, Signature
    from ddtree_ops.diagnose.trials import Sighting

__all__ = ["register"]

_STYLES = {"fatal": "bold red", "degraded": "yellow", "request": "cyan", "benign": "dim"}

_SHORTEST = 16
"""Letters of a title that are worth a column."""

signatures_app = typer.Typer(
    no_args_is_help=True, help="The known failures that diagnose looks for, and your own."
)

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Signature files, or directories of them.", metavar="[FILE|DIR]...", show_default=False
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(signatures_app, name="signatures")


def _origin(library: Library, name: str) -> str:
    from ddtree_ops.inventory.yaml_source import display

    path = library.origin(name)
    return "shipped" if path is None or library.shipped(name) else display(path)


@signatures_app.command("list")
def list_(
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="PLACE", help="Only of: traceback, log, systemd, kernel, metrics."),
    ] = None,
    severity: Annotated[
        str | None,
        typer.Option("--severity", metavar="WORD", help="Only these: fatal, degraded, request, benign."),
    ] = None,
    signatures_dir: SignaturesOption = None,
    as_json: JsonOption = False,
) -> None:
    """What diagnose knows: each signature, how bad it is, where it is looked for, and whose it is."""
    from typing import get_args

    from ddtree_ops.diagnose.library import Severity, Where, default_library
    from ddtree_ops.inventory.yaml_source import suggestion

    for option, value, allowed in (("--where", where, Where), ("--severity", severity, Severity)):
        if value is not None and value not in get_args(allowed):
            raise UsageError(f"{option}: there is no {value!r}{suggestion(value, get_args(allowed))}")
    library = default_library(signatures_dir or ())
    order = get_args(Severity)
    chosen = sorted(
        (
            item
            for item in library.signatures
            if where in (None, *item.where) and severity in (None, item.severity)
        ),
        key=lambda item: (order.index(item.severity), item.id),
    )
    if as_json:
        print_json({"schema": 1, "signatures": [_brief(library, item) for item in chosen]})
        return
    from ddtree_ops.report.summary import table_lines

    rows: list[tuple[str, ...]] = [
        (item.id, item.severity, "+".join(item.where), item.title, _origin(library, item.id))
        for item in chosen
    ]
    styles: list[tuple[str, ...]] = [("bold", _STYLES[item.severity], "", "", "dim") for item in chosen]
    head: tuple[str, ...] = ("ID", "SEVERITY", "WHERE", "TITLE", "ORIGIN")
    if out.is_terminal:
        head, rows, styles = _narrow(out.width, head, rows, styles)
    for line in table_lines(head, rows, styles):
        out.print(line, soft_wrap=True)
    own = sum(not library.shipped(item.id) for item in chosen)
    out.print(f"{count(len(chosen), 'signature')}, {own} of them your own", style="dim", markup=False)


def _narrow(
    width: int, head: tuple[str, ...], rows: Sequence[tuple[str, ...]], styles: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[tuple[str, ...]]]:
    """A table whose lines fit a terminal: titles are cut, or left out where hardly one would be left."""
    at = head.index("TITLE")
    others = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    room = width - sum(others[:at]) - sum(others[at + 1 :]) - len(head)
    if room < _SHORTEST:

        def without(cells: tuple[str, ...]) -> tuple[str, ...]:
            return (*cells[:at], *cells[at + 1 :])

        return without(head), list(map(without, rows)), list(map(without, styles))
    short = [
        (
            *cells[:at],
            cells[at] if len(cells[at]) <= room else f"{cells[at][: room - 3]}...",
            *cells[at + 1 :],
        )
        for cells in rows
    ]
    return head, short, list(styles)


def _brief(library: Library, signature: Signature) -> dict[str, Any]:
    return {
        "id": signature.id,
        "severity": signature.severity,
        "where": signature.where,
        "title": signature.title,
        "origin": _origin(library, signature.id),
    }


@signatures_app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="ID", help="Id of a signature.", show_default=False)],
    signatures_dir: SignaturesOption = None,
    as_json: JsonOption = False,
) -> None:
    """One signature in full: what it looks for, how it explains it, what it tells to do, its examples."""
    from ddtree_ops.diagnose.library import default_library

    library = default_library(signatures_dir or ())
    signature = _named(library, name)
    if as_json:
        print_json({"schema": 1, **_brief(library, signature), **signature.model_dump(exclude_defaults=True)})
        return
    from rich.text import Text

    from ddtree_ops.report.summary import say

    head = Text.assemble((signature.id, "bold"), "  ", (signature.severity, _STYLES[signature.severity]))
    say(out, head.append(f"  {signature.title}"))
    fields = (
        ("where", ", ".join(signature.where)),
        ("role", signature.role if signature.role != "cause" else ""),
        ("pattern", signature.pattern),
        ("unless", signature.unless),
        ("frame", signature.frame),
        ("solver", signature.solver),
        ("detector", signature.detector),
        ("says", signature.explanation),
        ("remedy", signature.remedy),
        ("source", signature.source),
        ("origin", _origin(library, signature.id)),
    )
    for word, text in fields:
        if text:
            say(out, Text.assemble((f"{word:<9}", "dim"), text), indent=2)
    for word, examples in (("matches", signature.examples), ("not", signature.lookalikes)):
        for example in examples:
            say(out, Text.assemble((f"{word:<9}", "dim"), _example(example)), indent=2)


def _example(example: Example) -> str:
    first, _, rest = example.text.strip().partition("\n")
    facts = ", ".join(f"{name} {value}" for name, value in example.facts.items())
    notes = (
        f"and {count(rest.count(chr(10)) + 1, 'line')} more" if rest else "",
        f"in {example.where}" if example.where else "",
        f"raised in {example.frame}" if example.frame else "",
        f"with {facts}" if facts else "",
    )
    return "; ".join([first, *filter(None, notes)])


def _named(library: Library, name: str) -> Signature:
    from ddtree_ops.inventory.yaml_source import suggestion

    try:
        return library[name]
    except KeyError:
        near = suggestion(name, [item.id for item in library.signatures])
        near = near if "mean" in near else ""
        raise UsageError(f"there is no signature {name!r}{near}", hint="ddtree-ops signatures list") from None


@signatures_app.command("test")
def test(
    paths: Files = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="LOG", help="Try the one file given on a log (- for standard input)."
        ),
    ] = None,
    signatures_dir: SignaturesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Validate signatures and try them: each finds its examples, first of all; its look-alikes it leaves alone.

    Without files: all that diagnose uses. With files: these, together with all others, for one may take what another
    finds. Exit code 5: one does not do what its file says (or with --against: finds nothing). 78: a file is wrong.
    """
    from ddtree_ops.diagnose.library import default_library, read_signature, signature_files

    library = default_library(signatures_dir or ())
    wrong: list[ConfigError] = []
    given: list[Signature] = []
    origins: dict[str, Path] = {}
    for file in [
        file for path in paths or () for file in (signature_files(path) if path.is_dir() else [path])
    ]:
        try:
            signature = read_signature(file)
        except ConfigError as error:
            wrong.append(error)
            continue
        given.append(signature)
        origins[signature.id] = file
    if given:
        library = library.extended(given, origins)
    if against is not None:
        _against(against, given, library, wrong, as_json=as_json)
        return
    _all(library, wrong, as_json=as_json)


def _all(library: Library, wrong: list[ConfigError], *, as_json: bool) -> None:
    from ddtree_ops.diagnose.trials import try_signature

    trials = [try_signature(signature, library) for signature in library.signatures]
    failed = [trial for trial in trials if trial.problems]
    if as_json:
        shown = [
            {
                "id": trial.signature,
                "origin": _origin(library, trial.signature),
                "examples": trial.examples,
                "lookalikes": trial.lookalikes,
                "problems": list(trial.problems),
            }
            for trial in trials
        ]
        print_json({"schema": 1, "signatures": shown, "errors": [error.render() for error in wrong]})
    else:
        for error in wrong:
            err.print(error.render(), markup=False, soft_wrap=True)
        for trial in failed:
            for problem in trial.problems:
                out.print(
                    f"{trial.signature} ({_origin(library, trial.signature)}): {problem}",
                    markup=False,
                    soft_wrap=True,
                )
        examples = sum(trial.examples for trial in trials)
        lookalikes = sum(trial.lookalikes for trial in trials)
        out.print(
            f"{count(len(trials), 'signature')}, {count(examples, 'example')}, {count(lookalikes, 'look-alike')}: "
            + (
                f"{count(len(failed), 'signature')} not as its file says"
                if failed
                else "all as their files say"
            ),
            markup=False,
            soft_wrap=True,
        )
    if wrong or failed:
        raise typer.Exit(ExitCode.CONFIG if wrong else ExitCode.CHECK_FAILED)


def _against(
    log: Path, given: list[Signature], library: Library, wrong: list[ConfigError], *, as_json: bool
) -> None:
    if wrong:
        raise wrong[0]
    if len(given) != 1:
        raise UsageError(
            f"--against wants one signature file, there are {len(given)}",
            hint="ddtree-ops signatures test my-signature.yaml --against server.log",
        )
    import sys

    from ddtree_ops.diagnose.facts import ServiceFacts
    from ddtree_ops.diagnose.lines import read_log
    from ddtree_ops.diagnose.trials import sightings

    (signature,) = given
    found: list[Sighting] = []
    try:
        with sys.stdin.buffer if str(log) == "-" else log.open("rb") as stream:
            for one in sightings(signature, read_log(stream), library, ServiceFacts()):
                found.append(one)
                if not as_json:
                    _print_sighting(one)
    except OSError as error:
        raise UsageError(f"{log} cannot be read: {error.strerror or error}") from error
    if as_json:
        shown = [
            {
                "line": one.line,
                "text": one.text,
                "where": one.where,
                "explanation": one.explanation,
                "taken_by": one.taken_by,
            }
            for one in found
        ]
        print_json({"schema": 1, "signature": signature.id, "matches": shown})
    else:
        out.print(f"{signature.id}: {count(len(found), 'match')} in {log}", markup=False, soft_wrap=True)
    if not found:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def _print_sighting(one: Sighting) -> None:
    from rich.text import Text

    from ddtree_ops.report.summary import say
    from ddtree_ops.secret import redact

    place = f"{one.line}: {redact(one.text[:600])}" if one.line else "the figures of the log"
    say(out, Text.assemble((f"{one.where:<10}", "dim"), place))
    say(out, Text(redact(one.explanation)), indent=10)
    if one.taken_by:
        say(out, Text(f"but {one.taken_by} goes first here", "yellow"), indent=10)
