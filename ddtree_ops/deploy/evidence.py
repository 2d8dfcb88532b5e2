"""What is kept of a failed run on this machine, before anything else happens to the host."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddtree_ops import paths
from ddtree_ops.deploy.plan import masked_unit_line
from ddtree_ops.errors import OpsError
from ddtree_ops.results import CheckResult
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.journal import Entry

__all__ = ["evidence_files", "evidence_folder", "keep_files", "pretty", "run_entries"]


def run_entries(control: UnitControl, invocation: str | None, mask: Callable[[str], str]) -> list[Entry]:
    """The journal of a run of the unit (None: of the current one), masked."""
    return [
        replace(entry, message=mask(entry.message))
        for entry in control.entries(invocation=invocation or "current")
    ]


def evidence_folder(target: str) -> Path:
    """Where the evidence of a run over ``target`` that fails now is kept."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return paths.state_dir() / "evidence" / f"{target.replace('/', '-')}-{stamp}"


def evidence_files(entries: Sequence[Entry], unit_text: str, checks: Sequence[CheckResult]) -> dict[str, str]:
    """Name -> text of the files that are kept: the journal, the unit with its secrets masked, the results. Pure."""
    journal = (
        {"time": str(entry.time), "source": entry.source, "pid": entry.pid, "message": entry.message}
        for entry in entries
    )
    return {
        "journal.jsonl": "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in journal),
        "unit.service": "\n".join(map(masked_unit_line, unit_text.splitlines())) + "\n",
        "checks.json": pretty([check.to_json() for check in checks]),
    }


def pretty(document: Any) -> str:
    """JSON as it is kept. Pure."""
    return json.dumps(document, indent=1, ensure_ascii=False, default=str)


def keep_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files, for their owner alone to enter.

    :raises OpsError: they cannot be written.
    """
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise OpsError(
            f"evidence could not be kept on this machine: {error}",
            hint="make room, or set XDG_STATE_HOME",
        ) from error
