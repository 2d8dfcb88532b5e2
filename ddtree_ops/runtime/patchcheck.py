"""What a tree IS: pristine, patched or something else; whether diagnostics were left in it; what its graphs hold."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_ops.launchflags import __file__ as launchflags_code
from ddtree_ops.results import Verdict
from ddtree_ops.runtime.description import Description, description_state, load_description
from ddtree_ops.runtime.kept import key_of, place_of, read_kept, write_kept
from ddtree_ops.runtime.overlaycheck import OverlayCheck, OverlayState, check_overlay
from ddtree_ops.runtime.overlaycheck import __file__ as overlaycheck_code
from ddtree_ops.runtime.series import Content, data_of, peel_series
from ddtree_ops.runtime.series import __file__ as series_code
from ddtree_ops.runtime.tree import explained, open_tree
from ddtree_ops.runtime.verify import Difference, compare_digests
from ddtree_ops.runtime.verify import __file__ as verify_code
from ddtree_ops.sizing import RUNNER_PATH, Sizing, SizingError, SizingRow, prove
from ddtree_ops.sizing import __file__ as sizing_code
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from ddtree_ops.runtime.bundle import Bundle

__all__ = [
    "Leftover",
    "PatchCheck",
    "PatchState",
    "check_bundle",
    "check_path",
    "check_source",
    "find_leftovers",
    "shortfall",
]

DEFAULT_DESCRIPTION = "sglang-0.5.11"

_LEFTOVER = re.compile(rb"[A-Z][A-Z0-9]*_DIAG(?![A-Za-z0-9])")
_DEBRIS = re.compile(r"(?:\.(?:orig|rej|bak|backup|save|old|sw[op])(?:[.~_-]?[0-9]+)*|~)$")
_SHA256 = re.compile(r"sha256=([A-Za-z0-9_-]{43})")


class PatchState(StrEnum):
    """What the files that the series changes are."""

    PRISTINE = "pristine"
    """Exactly those of the base wheel."""
    PATCHED = "patched"
    """The base wheel with the whole series, nothing else."""
    PARTLY = "partly"
    """The base wheel with some of the series."""
    FOREIGN = "foreign"
    """Neither: somebody else's edits, or another version."""
    MISSING = "missing"
    """They are not there."""


@dataclass(frozen=True)
class Leftover:
    """A diagnostic left behind. ``line`` counts from 1; 0 for a whole file (``.orig``, ``.rej``, ``.bak`` ...)."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"


@dataclass(frozen=True)
class PatchCheck:
    """What :func:`check_path` and :func:`check_source` found.

    :param where: what was looked at.
    :param runtime: name of the description it was compared with.
    :param version: of the base wheel of that description.
    :param applied: patches of the series that are in, in order; in a foreign file too.
    :param absent: the others.
    :param files: sha256 of each file that the series changes; empty where there is none.
    :param searched: number of files searched for leftovers.
    :param edited: files that differ from the tree's own RECORD, apart from those the series changes; None where there
        is no RECORD to compare with. A tree with DDTree has many: they are told, not judged.
    :param sizing: what the file found gives; None where it cannot be told, see ``sizing_error``.
    :param unpatched: what it gives without the patches; None for a foreign file without them.
    :param overlay: what there is of the overlay; None where nobody looked, or the description has none.
    :param tree_wanted: the service of the tree is one with DDTREE.
    """

    where: str
    runtime: str
    version: str
    state: PatchState
    applied: tuple[str, ...]
    absent: tuple[str, ...]
    files: Mapping[str, str]
    leftovers: tuple[Leftover, ...]
    searched: int
    edited: tuple[Difference, ...] | None
    sizing: Sizing | None
    sizing_error: str
    unpatched: Sizing | None
    overlay: OverlayCheck | None = None
    tree_wanted: bool = False

    @property
    def lacks_tree(self) -> bool:
        """True where DDTREE is wanted and the tree is known not to have it."""
        return self.tree_wanted and self.overlay is not None and self.overlay.offers is False

    @property
    def verdict(self) -> Verdict:
        """Fail: leftovers, graphs of the wrong size, or no DDTREE where it is wanted. Inconclusive: foreign, missing,
        sizing not understood, or an overlay that is not as shipped."""
        if self.leftovers or self.lacks_tree or (self.sizing is not None and not self.sizing.ok):
            return Verdict.FAIL
        if self.sizing is None or self.state in (PatchState.FOREIGN, PatchState.MISSING):
            return Verdict.INCONCLUSIVE
        if self.overlay is not None and not self.overlay.ok:
            return Verdict.INCONCLUSIVE
        return Verdict.PASS

    @property
    def ok(self) -> bool:
        """True for a pass only."""
        return self.verdict is Verdict.PASS

    @property
    def summary(self) -> str:
        """One sentence: the state, the leftovers, the sizing."""
        runner = RUNNER_PATH.rpartition("/")[2]
        if self.state is PatchState.MISSING:
            return f"{', '.join(self.files) or RUNNER_PATH}: not there"
        having = ", ".join(_short(name) for name in self.applied)
        text = {
            PatchState.PRISTINE: f"pristine: as in the wheel of sglang {self.version}",
            PatchState.PATCHED: f"patched: sglang {self.version} with {having}",
            PatchState.PARTLY: f"partly patched: {having} is in, "
            f"{', '.join(_short(name) for name in self.absent)} is not",
            PatchState.FOREIGN: f"foreign: not the files of sglang {self.version}"
            + (f", though the lines of {having} are in" if having else ", patched or not"),
        }[self.state]
        if self.edited:
            edited = f"{count(len(self.edited), 'other file')} {'is' if len(self.edited) == 1 else 'are'}"
            text += f"; {edited} not as in the tree's RECORD: {self.edited[0].path}"
            text += " and more" if len(self.edited) > 1 else ""
        if self.leftovers:
            leftovers = count(len(self.leftovers), "leftover diagnostic")
            text += f"; {leftovers}, the first at {self.leftovers[0]}"
        if self.sizing is not None:
            text += f"; sizes {self.sizing.figures} ({'right' if self.sizing.ok else 'WRONG'})"
        elif self.sizing_error:
            text += f"; {runner}: {self.sizing_error}"
        return text

    @property
    def sentence(self) -> str:
        """What the file without the patches gives, and what comes of it; empty where that is not known."""
        if self.unpatched is None:
            return ""
        consequence = shortfall(self.unpatched)
        if not consequence:
            return f"The unpatched file gives {self.unpatched.figures}, which is right as well."
        return f"The unpatched file gives {self.unpatched.figures}: {consequence}"

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            "where": self.where,
            "runtime": self.runtime,
            "state": str(self.state),
            "verdict": str(self.verdict),
            "summary": self.summary,
            "applied": list(self.applied),
            "absent": list(self.absent),
            "files": dict(self.files),
            "leftovers": [{"path": one.path, "line": one.line, "text": one.text} for one in self.leftovers],
            "searched_files": self.searched,
            "edited": None if self.edited is None else [one.to_json() for one in self.edited],
            "sizing": self.sizing.to_json() if self.sizing else None,
            "sizing_error": self.sizing_error,
            "unpatched": self.unpatched.to_json() if self.unpatched else None,
            "sentence": self.sentence,
            "overlay": self.overlay.to_json() if self.overlay else None,
            "lacks_tree": self.lacks_tree,
        }


def shortfall(sizing: Sizing) -> str:
    """What happens with graphs of the wrong size, in one sentence; empty where all sizes are right."""
    for row in sizing.rows:
        if not row.ok:
            return (
                f"the {row.worker} worker's graph under {row.algorithm} holds {row.tokens} tokens a request and is sent "
                f'{row.wanted}; the first request ends in "The size of tensor a ({row.tokens}) must match the size of '
                f'tensor b ({row.wanted})".'
            )
    return ""


def check_path(
    path: str | Path,
    *,
    description: str | Description = DEFAULT_DESCRIPTION,
    block_size: int = 8,
    budget: int | None = 32,
) -> PatchCheck:
    """Look at a bundle, a tree (site-packages, a checkout, a vendored or released tree) or a wheel.

    Every ``.py`` file is searched for leftovers, and every file is compared with the tree's RECORD where it has one.

    :param block_size: tokens of the drafter, root included.
    :param budget: tree nodes, root not included; None where DDTREE is not used.
    :raises BuildError: there is no tree of sglang, it cannot be read, or git is missing.
    :raises ConfigError: the description is wrong.
    """
    known = _description(description)
    with (
        explained("", "the whole tree must be readable"),
        contextlib.closing(open_tree(Path(path).expanduser(), strict=False)) as tree,
    ):
        leftovers: list[Leftover] = []
        hashes: dict[str, str] = {}
        record: Content | None = None
        searched = 0
        for name, content in tree.walk():
            if name.startswith("sglang-") and name.endswith(".dist-info/RECORD"):
                record = content
            if name.endswith(".py"):
                searched += 1
                leftovers += find_leftovers(name, content.data)
            elif _DEBRIS.search(name):
                leftovers.append(Leftover(name, 0, "left by an editor or by patch"))
            hashes[name] = _urlsafe(content.data)
        edited = None if record is None else _edited(record.data, hashes, _touched(known))
        found = _judge(str(path), known, tree.read, leftovers, searched, edited, block_size, budget)
        for name in tree.other_plugins():
            other = tree.read(name)
            hashes[name] = _urlsafe(other.data if other else b"")
        overlay = _overlay(known, {name: _hex(digest) for name, digest in hashes.items()}, tree.read)
        return replace(found, overlay=overlay)


def check_source(
    read: Callable[[str], bytes | None],
    *,
    where: str = "",
    description: str | Description = DEFAULT_DESCRIPTION,
    block_size: int = 8,
    budget: int | None = 32,
    hashes: Mapping[str, str] | None = None,
) -> PatchCheck:
    """The same over any reader, such as the files of a host; only the files that the series changes are read.

    :param read: content by path relative to the tree (``sglang/srt/...``), None where there is no such file.
    :param hashes: hex sha256 by path of all files of the tree, or of its overlay: then the overlay is looked at, and
        the files of the flags are read. None: it is not.
    :raises BuildError: git is missing.
    """
    known = _description(description)
    cache: dict[str, Content | None] = {}

    def remembered(path: str) -> Content | None:
        if path not in cache:
            data = read(path)
            cache[path] = None if data is None else Content(data)
        return cache[path]

    leftovers: list[Leftover] = []
    searched = 0
    for path in dict.fromkeys([*_touched(known), RUNNER_PATH]):
        content = remembered(path)
        if content is not None:
            searched += 1
            leftovers += find_leftovers(path, content.data)
    found = _judge(where, known, remembered, leftovers, searched, None, block_size, budget)
    return found if hashes is None else replace(found, overlay=_overlay(known, hashes, remembered))


def _overlay(
    known: Description, hashes: Mapping[str, str], read: Callable[[str], Content | None]
) -> OverlayCheck | None:
    return None if known.overlay is None else check_overlay(known.overlay, hashes, data_of(read))


def check_bundle(
    bundle: Bundle, *, where: str, description: str, block_size: int, budget: int | None
) -> PatchCheck:
    """The same over a bundle of the cache, found out once: then it is kept beside the bundle.

    :raises BuildError: a file that is read is not as built, or git is missing. :raises OSError: it cannot be read.
    """
    code = (__file__, sizing_code, series_code, overlaycheck_code, verify_code, launchflags_code)
    known = load_description(description)
    laid = known.overlay.sha256 if known.overlay else ""
    key = key_of(bundle.digest, description_state(description), laid, block_size, budget, code=code)
    with _guard:
        if key not in _kept:
            folder = place_of(bundle)
            kept = _revived(read_kept(folder, "patch-check", key))
            if kept is None:
                kept = check_source(
                    bundle.read,
                    description=known,
                    block_size=block_size,
                    budget=budget,
                    hashes={entry.path: entry.sha256 for entry in bundle.files},
                )
                write_kept(folder, "patch-check", key, asdict(kept))
            _kept[key] = kept
        return replace(_kept[key], where=where)


_guard = threading.Lock()
_kept: dict[str, PatchCheck] = {}


def _revived(kept: Any) -> PatchCheck | None:
    """What :func:`check_source` found, from its form as JSON; None where that has another form."""

    def sized(value: Any) -> Sizing | None:
        if value is None:
            return None
        return Sizing(**{**value, "rows": tuple(SizingRow(**row) for row in value["rows"])})

    def overlay(value: Any) -> OverlayCheck | None:
        if value is None:
            return None
        lists = {name: tuple(value[name]) for name in ("flags", "plugins")}
        differences = tuple(Difference(**row) for row in value["differences"])
        return OverlayCheck(
            **{**value, **lists, "state": OverlayState(value["state"]), "differences": differences}
        )

    with contextlib.suppress(KeyError, TypeError, ValueError):
        return PatchCheck(
            **{
                **kept,
                "state": PatchState(kept["state"]),
                "applied": tuple(kept["applied"]),
                "absent": tuple(kept["absent"]),
                "leftovers": tuple(Leftover(**row) for row in kept["leftovers"]),
                "sizing": sized(kept["sizing"]),
                "unpatched": sized(kept["unpatched"]),
                "overlay": overlay(kept["overlay"]),
            }
        )
    return None


def find_leftovers(path: str, data: bytes) -> list[Leftover]:
    """Diagnostics such as ``DFLASH_DIAG`` in one file, with their lines."""
    if b"_DIAG" not in data or not _LEFTOVER.search(data):
        return []
    return [
        Leftover(path, number, line.decode("utf-8", "replace").strip()[:200])
        for number, line in enumerate(data.split(b"\n"), 1)
        if _LEFTOVER.search(line)
    ]


def _description(given: str | Description) -> Description:
    return given if isinstance(given, Description) else load_description(given)


def _touched(description: Description) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys([*description.pristine, *(f for patch in description.patches for f in patch.files)])
    )


def _judge(
    where: str,
    description: Description,
    read: Callable[[str], Content | None],
    leftovers: Iterable[Leftover],
    searched: int,
    edited: tuple[Difference, ...] | None,
    block_size: int,
    budget: int | None,
) -> PatchCheck:
    contents = {path: read(path) for path in _touched(description)}
    files = {path: hashlib.sha256(one.data).hexdigest() if one else "" for path, one in contents.items()}
    names = tuple(patch.name for patch in description.patches)
    below: Mapping[str, Content | None] = contents
    applied: tuple[str, ...] = ()
    if not any(files.values()):
        state = PatchState.MISSING
    elif _is_pristine(contents, description):
        state = PatchState.PRISTINE
    else:
        peeled, applied = peel_series(contents.get, description.patches)
        below = {**contents, **peeled}
        if not _is_pristine(below, description):
            state = PatchState.FOREIGN
        else:
            state = PatchState.PATCHED if applied == names else PatchState.PARTLY

    runner = contents[RUNNER_PATH] if RUNNER_PATH in contents else read(RUNNER_PATH)
    sizing, problem = _sizing(runner, block_size, budget)
    unpatched = None
    if state is not PatchState.FOREIGN or applied:
        unpatched, _ = _sizing(below.get(RUNNER_PATH, runner), block_size, budget)
    return PatchCheck(
        where=where,
        runtime=description.name,
        version=description.base.version,
        state=state,
        applied=applied,
        absent=tuple(name for name in names if name not in applied),
        files=files,
        leftovers=tuple(leftovers),
        searched=searched,
        edited=edited,
        sizing=sizing,
        sizing_error=problem,
        unpatched=unpatched,
    )


def _is_pristine(contents: Mapping[str, Content | None], description: Description) -> bool:
    for path, content in contents.items():
        found = hashlib.sha256(content.data).hexdigest() if content else None
        if found != description.pristine.get(path):
            return False
    return True


def _sizing(runner: Content | None, block_size: int, budget: int | None) -> tuple[Sizing | None, str]:
    if runner is None:
        return None, f"{RUNNER_PATH} is not there"
    try:
        return prove(runner.data.decode("utf-8-sig"), block_size=block_size, budget=budget), ""
    except (SizingError, UnicodeDecodeError) as error:
        return None, str(error)


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _edited(
    record: bytes, hashes: Mapping[str, str], touched: Iterable[str]
) -> tuple[Difference, ...] | None:
    """Files that differ from RECORD; those it names without a sha256 count as there. None: it cannot be read."""
    recorded: dict[str, str] = {}
    try:
        for row in csv.reader(record.decode("utf-8", "replace").splitlines()):
            if len(row) == 3 and row[0].startswith("sglang/") and "__pycache__" not in row[0]:
                known = _SHA256.fullmatch(row[1])
                recorded[row[0]] = known[1] if known else hashes.get(row[0], "")
    except csv.Error:
        return None
    there = {path: found for path, found in hashes.items() if path.startswith("sglang/")}
    passed_over = set(touched)
    return tuple(
        replace(one, wanted=_hex(one.wanted), found=_hex(one.found))
        for one in compare_digests(recorded, there)
        if one.path not in passed_over
    )


def _hex(urlsafe: str) -> str:
    return base64.urlsafe_b64decode(urlsafe + "=" * (-len(urlsafe) % 4)).hex()


def _short(name: str) -> str:
    return name.partition("-")[0]
