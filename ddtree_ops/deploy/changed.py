"""What an activation changed against another, from the unit files that the host keeps of both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddtree_ops.deploy.plan import argument_changes, text_sha256, variable_changes
from ddtree_ops.remote.session import Request

if TYPE_CHECKING:
    from ddtree_ops.deploy.history import Activation, History
    from ddtree_ops.remote.session import Session
    from ddtree_ops.service.layout import Layout

__all__ = ["against_now", "changes", "kept_texts", "one_by_one", "recorded"]

_MOST = 4


def kept_texts(session: Session, layout: Layout, shas: Iterable[str]) -> dict[str, str]:
    """Unit files that the host keeps, by their sha256; those gone or damaged are left out. One round trip for all."""
    wanted = sorted({sha for sha in shas if len(sha) == 64 and not set(sha) - set("0123456789abcdef")})
    replies = session.ask(
        [
            Request("read_file", {"path": f"{layout.kept_unit(sha)}.service", "max_bytes": 1 << 20})
            for sha in wanted
        ]
    )
    return {
        sha: reply.data.decode("utf-8", "replace")
        for sha, reply in zip(wanted, replies, strict=True)
        if reply.values["found"] and hashlib.sha256(reply.data).hexdigest() == sha
    }


def changes(
    before: tuple[str | None, str | None], after: Activation, *, release_before: str | None
) -> tuple[str, ...]:
    """What differs, in the words of a plan: the release, then arguments and variables one by one. Pure.

    :param before: text of the unit file before, and of that of ``after``; None: not kept.
    """
    old, new = before
    found = []
    if release_before != after.release:
        found.append(f"release {release_before[:12] if release_before else 'none'} -> {after.release[:12]}")
    if old is None or new is None:
        return (*found, "arguments not known: a unit file is not kept any more")
    if old == new:
        return tuple(found)
    arguments, variables = argument_changes(old, new), variable_changes(old, new)
    values = [str(item) for item in (*(arguments or ()), *(variables or ()))]
    if not values:
        values = ["the unit file, no argument and no variable"]
    more = [f"{len(values) - _MOST} more"] if len(values) > _MOST else []
    return (*found, *values[:_MOST], *more)


def one_by_one(
    activations: Sequence[Activation], texts: Mapping[str, str], *, lines: int | None = None
) -> dict[str, tuple[str, ...]]:
    """By id: what each of the newest ``lines`` activations changed against the one before it. Pure.

    Where a unit file is not kept any more, what was written down when it was activated.
    """
    found: dict[str, tuple[str, ...]] = {}
    for number, item in enumerate(activations):
        if lines is not None and number < len(activations) - lines:
            continue
        if number == 0:
            found[item.id] = ("the first",)
            continue
        last = activations[number - 1]
        same_unit = last.unit_sha256 == item.unit_sha256
        pair = ("", "") if same_unit else (texts.get(last.unit_sha256), texts.get(item.unit_sha256))
        if None in pair and item.changed is not None:
            found[item.id] = item.changed
        else:
            found[item.id] = changes(pair, item, release_before=last.release)
    return found


def recorded(before: Activation, after: Activation, unit_texts: Iterable[str | None]) -> Activation:
    """``after`` with what it changes against ``before``, where the unit files of both are among the texts. Pure."""
    texts = {text_sha256(text): text for text in unit_texts if text is not None}
    if not {before.unit_sha256, after.unit_sha256} <= texts.keys():
        return after
    return replace(after, changed=one_by_one((before, after), texts)[after.id])


def against_now(
    history: History, texts: Mapping[str, str], release: str | None, unit_text: str | None
) -> dict[str, tuple[str, ...]]:
    """By id: what going back to each activation would change of what is there now. Pure."""
    return {
        item.id: changes((unit_text, texts.get(item.unit_sha256)), item, release_before=release)
        for item in history.activations
    }
