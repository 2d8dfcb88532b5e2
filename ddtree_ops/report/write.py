"""A run report in a directory, in every format at once, and read back from there.

Every file is written whole under another name and then renamed: whoever reads, and whatever kills us, finds the old one or
the new one. A report may be written again and again while a run goes on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_ops.atomic import write_text
from ddtree_ops.errors import ConfigError, OpsError, UsageError
from ddtree_ops.report.clean import clean
from ddtree_ops.runreport import SCHEMA, RunReport

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["REPORT", "json_text", "own_folder", "read_report", "refuse_others", "write_file", "write_report"]

REPORT = "report.json"
"""Name of the JSON document: the others are drawn from what it holds."""
_SHOWN = 5
_KEPT = 60


def refuse_others(directory: Path, command: str) -> None:
    """A folder may hold the report of an earlier run of the same command, which is written over, and no other's.

    :raises UsageError: it holds the report of another command.
    """
    try:
        found = json.loads((directory / REPORT).read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    other = found.get("command") if isinstance(found, dict) else None
    if isinstance(other, str) and other != command:
        raise UsageError(
            f"{directory} holds the report of another command: {other} {found.get('id', '')}".rstrip(),
            state="nothing was contacted or changed",
            hint="name another folder: --report-dir DIR",
        )


def own_folder(reports: Path, id: str, *, prefix: str = "") -> Path:
    """Where a run keeps its report that was given no place; of those there with the same ``prefix`` the newest sixty stay."""
    old = sorted(path for path in reports.glob(f"{prefix}????????T??????Z-*") if path.is_dir())
    for path in old[: max(0, len(old) - _KEPT + 1)]:
        shutil.rmtree(path, ignore_errors=True)
    return reports / f"{prefix}{id}"


def json_text(report: RunReport) -> str:
    """The JSON document: schema 1, as ``docs/report.schema.json`` describes it."""
    return json.dumps(clean(report).to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _renderers() -> dict[str, Callable[[RunReport], str]]:
    from ddtree_ops.report.csvout import points_csv
    from ddtree_ops.report.github import annotations_text
    from ddtree_ops.report.html import html_report
    from ddtree_ops.report.junit import junit_xml
    from ddtree_ops.report.markdown import step_summary
    from ddtree_ops.report.prometheus import metrics_text

    return {
        REPORT: json_text,
        "junit.xml": junit_xml,
        "report.html": html_report,
        "summary.md": step_summary,
        "annotations.txt": annotations_text,
        "metrics.prom": metrics_text,
        "points.csv": points_csv,
    }


def write_file(path: Path, text: str) -> None:
    """Write by rename, readable for all, in a directory that is made.

    :raises OpsError: the directory cannot be made, or nothing be written there; what was there before stays.
    """
    try:
        write_text(path, text)
    except OSError as error:
        raise OpsError(
            f"{path} cannot be written: {error.strerror}",
            phase="report",
            state="the run itself is not concerned; what was there before is still there",
            hint="name another directory",
        ) from error


def write_report(report: RunReport, directory: Path) -> list[Path]:
    """Write ``report.json``, ``junit.xml``, ``report.html``, ``summary.md``, ``annotations.txt``, ``metrics.prom``, and
    ``points.csv`` where there are bench points. The JSON document comes first: it holds everything.

    :raises OpsError: the directory cannot be made, or nothing be written there.
    """
    report = clean(report)
    written = []
    for name, render in _renderers().items():
        text = render(report)
        if text or name == "annotations.txt":
            write_file(directory / name, text)
            written.append(directory / name)
    return written


def read_report(path: Path) -> RunReport:
    """Read ``report.json``, or the one in a directory.

    :raises UsageError: there is none.
    :raises ConfigError: it is damaged, or of another schema; ``details`` say what is wrong where.
    """
    from pydantic import TypeAdapter, ValidationError

    file = path / REPORT if path.is_dir() else path
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"{file}: there is no such report", hint="name a report.json, or the directory that holds it"
        ) from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} is no report: it is not JSON",
            hint="reports are written whole: this one was changed or cut off afterwards; run the command again",
            details=(f"{file}: {error}",),
        ) from error
    if not isinstance(document, dict) or "schema" not in document:
        raise ConfigError(f"{file} is no report of a run", hint="name the report.json of a validate or bench")
    if document["schema"] != SCHEMA:
        raise ConfigError(
            f"{file} is of schema {document['schema']!r}, and this version reads schema {SCHEMA}",
            hint="read it with the version that wrote it"
            + (f": {document['version']}" if isinstance(document.get("version"), str) else ""),
        )
    missing = _missing(document)
    try:
        report = TypeAdapter(RunReport).validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        missing += [_problem(each) for each in error.errors(include_url=False)]
    if missing:
        more = [f"... and {len(missing) - _SHOWN} more"] if len(missing) > _SHOWN else []
        raise ConfigError(
            f"{file} is no report of schema {SCHEMA}",
            details=(*(f"{file}: {each}" for each in missing[:_SHOWN]), *more),
            hint="reports are not edited by hand; run the command again",
        )
    return report


def _missing(document: dict[str, object]) -> list[str]:
    """Fields without which a report would be read as an empty one."""
    found = [f"{name}: missing" for name in ("ended", "complete", "targets") if name not in document]
    targets = document.get("targets")
    for number, target in enumerate(targets if isinstance(targets, list) else ()):
        found += [
            f"targets.{number}.{name}: missing"
            for name in ("checks", "figures", "errors")
            if isinstance(target, dict) and name not in target
        ]
    return found


def _problem(error: ErrorDetails) -> str:
    return f"{'.'.join(map(str, error['loc']))}: {error['msg'][:1].lower()}{error['msg'][1:]}"
