"""Which recorded activation a rollback goes to. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ddtree_ops.deploy.history import Activation, History
from ddtree_ops.errors import PreflightError, UsageError
from ddtree_ops.wording import moment_of

__all__ = ["alternatives", "way_back"]


def way_back(
    history: History,
    current: tuple[str | None, str | None],
    to: str | None = None,
    *,
    host: str = "HOST",
    changes: Mapping[str, Sequence[str]] | None = None,
) -> Activation:
    """The activation that a rollback goes to. Pure.

    Without ``to``, the newest that passed and is another release or unit file than what is there now, and not only a
    bench's. ``to`` is the
    beginning of a release's digest (at least four digits; its newest activation that passed), the beginning of an
    activation's id, or a time in ISO 8601 (UTC where it names no zone): the newest that had passed by then.

    :param current: digest of the current release, sha256 of the installed unit file.
    :param host: for the commands in errors; ``changes``: see :func:`alternatives`.
    :raises PreflightError: nothing recorded to go back to.
    :raises UsageError: ``to`` names none of the recorded activations, or several releases.
    """
    if to is None:
        others = [item for item in history.ways_back() if (item.release, item.unit_sha256) != current]
        if others and not history.measured(others[0]):
            return others[0]
        raise PreflightError(
            "there is nothing to go back to: no other release or unit file ever passed here"
            + (", but for what a bench measured" if others else "")
            if history.good()
            else "there is nothing to go back to: no activation of it ever passed here",
            details=alternatives(history, current, changes=changes),
            hint=_by_name(history, current, host),
        )
    wanted = to.strip().lower()
    by_id = [
        item
        for item in history.activations
        if wanted and item.id.lower().startswith(wanted) and "t" in wanted
    ]
    if len(by_id) == 1:
        return by_id[0]
    by_digest = [
        item
        for item in history.activations
        if re.fullmatch(r"[0-9a-f]{4,64}", wanted) and item.release.startswith(wanted)
    ]
    names = sorted({item.release for item in by_digest} or {item.id for item in by_id})
    if len(names) > 1:
        raise UsageError(
            f"--to {to} fits {len(names)} of the recorded {'releases' if by_digest else 'activations'}",
            details=tuple(names),
            hint=f"give more of it; ddtree-ops history {host} says what each of them is",
        )
    if by_digest:
        passed = [item for item in by_digest if item.good]
        return (passed or by_digest)[-1]
    moment = moment_of(wanted.upper())
    if moment is not None:
        before = [
            item for item in history.activations if item.good and (moment_of(item.time) or moment) <= moment
        ]
        if before:
            return before[-1]
        raise UsageError(
            f"--to {to}: nothing had passed here by {moment:%Y-%m-%d %H:%M:%SZ}",
            details=alternatives(history, current, changes=changes),
            hint=f"ddtree-ops history {host}",
        )
    raise UsageError(
        f"--to {to} names no recorded release, activation or time",
        details=alternatives(history, current, changes=changes),
        hint="at least four digits of a release, the beginning of an activation's id, or a time such as 2026-11-29T18:00",
    )


def _by_name(history: History, current: tuple[str | None, str | None], host: str) -> str:
    """Next command where nothing is gone back to without a name."""
    for found, what in (
        (history.ways_back(), "which a bench measured"),
        (reversed(history.activations), "which never passed here"),
    ):
        for item in found:
            if (item.release, item.unit_sha256) != current:
                return f"ddtree-ops rollback {host} --to {item.id}   ({what}; ddtree-ops history {host} lists all)"
    return f"ddtree-ops history {host}" if history.activations else f"ddtree-ops deploy {host}"


def alternatives(
    history: History,
    current: tuple[str | None, str | None],
    *,
    without: Iterable[str] = (),
    changes: Mapping[str, Sequence[str]] | None = None,
) -> tuple[str, ...]:
    """Recorded activations that one may go back to, newest first and those of a bench last, a line each. Pure.

    :param without: ids of activations that were found not to be usable.
    :param changes: by id, what going there would change.
    """
    left = [
        item
        for item in history.ways_back()
        if (item.release, item.unit_sha256) != current and item.id not in set(without)
    ]
    told = {item.id: "; ".join((changes or {}).get(item.id, ())) for item in left}
    return tuple(
        f"passed: {item.release[:12]} {item.runtime}".rstrip()
        + f" of {item.time}, activation {item.id}"
        + (" (measured by a bench)" if history.measured(item) else "")
        + (f": {told[item.id]}" if told[item.id] else "")
        for item in left[:10]
    )
