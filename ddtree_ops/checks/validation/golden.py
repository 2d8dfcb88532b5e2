"""What the target writes alone: measured at a server without speculation, now or earlier (a golden file).

The file is JSON, ``schema: 1``: model, facts of the server and of the model's files, sampling, and for every prompt the tokens
that were sent, two answers of one request at a time, and one at a higher batch. ``docs/losslessness.md`` describes it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddtree_ops.atomic import write_text
from ddtree_ops.checks.engine import EngineClient, EngineError, Generation, ServerInfo
from ddtree_ops.checks.validation.acceptance_prompts import Ask, digest, pick_prompts, ready
from ddtree_ops.checks.validation.asking import fitting
from ddtree_ops.checks.validation.base import Context
from ddtree_ops.checks.validation.lossless_judging import Answer
from ddtree_ops.errors import CheckFailed, ConfigError, Inconclusive, OpsError, RemoteError, UsageError

__all__ = [
    "BATCH",
    "MAX_TOKENS",
    "PROMPTS",
    "SCHEMA",
    "Golden",
    "Spoken",
    "answer_of",
    "demand_room",
    "flushed",
    "load",
    "measure",
    "one_pass",
    "other_target",
    "record",
    "save",
    "server_facts",
    "with_gaps",
]

SCHEMA = 1
PROMPTS, MAX_TOKENS, BATCH = 17, 96, 8
BEST = 5
"""Log-probabilities asked for at every place."""
_SAME = ("model_path", "revision", "dtype", "quantization", "kv_cache_dtype", "weight_version")
"""Facts of a server that make another target, where they differ. The folder's name alone counts for ``model_path``."""
_TOLD = (*_SAME, "tp_size", "attention_backend", "served_model_name")
_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json")
_FLUSHES, _PAUSE_S = 8, 0.5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Spoken:
    """What the target alone makes of a prompt.

    :param batch: its answer at :attr:`Golden.batch`; None where that was not measured.
    """

    ask: Ask
    first: Answer
    second: Answer
    batch: Answer | None = None


@dataclass(frozen=True)
class Golden:
    """Answers of a server without speculation.

    :param facts: of the server and of the model's files; what was not known is not there.
    :param batch: requests at a time in the third pass; 0: there was none.
    :param templated: the model's chat template was applied.
    """

    model: str
    version: str
    facts: Mapping[str, Any]
    max_tokens: int
    batch: int
    templated: bool
    prompts: tuple[Spoken, ...]
    recorded: str = ""
    source: str = ""
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0, "ignore_eos": False})

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "schema": SCHEMA,
            "recorded": self.recorded,
            "model": self.model,
            "sglang": self.version,
            "facts": dict(self.facts),
            "sampling": {**self.sampling, "max_new_tokens": self.max_tokens},
            "batch": self.batch,
            "templated": self.templated,
            "prompts_sha256": digest([each.ask for each in self.prompts]),
            "prompts": [
                {
                    "name": each.ask.name,
                    "kind": each.ask.kind,
                    "text": each.ask.text,
                    "input_ids": None if isinstance(each.ask.given, str) else list(each.ask.given),
                    "first": each.first.to_json(),
                    "second": each.second.to_json(),
                    "batch": None if each.batch is None else {**each.batch.to_json(), "best": []},
                }
                for each in self.prompts
            ],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any], source: str = "") -> Golden:
        """Read what :meth:`to_json` gave. :raises KeyError, TypeError, ValueError, AttributeError: it is something else."""
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']!r}, and this version reads {SCHEMA}")
        prompts = tuple(
            Spoken(
                Ask(
                    str(each["name"]),
                    str(each["kind"]),
                    str(each["text"]),
                    str(each["text"])
                    if each["input_ids"] is None
                    else tuple(int(token) for token in each["input_ids"]),
                ),
                Answer.from_json(each["first"]),
                Answer.from_json(each["second"]),
                None if each["batch"] is None else Answer.from_json(each["batch"]),
            )
            for each in found["prompts"]
        )
        if not prompts:
            raise ValueError("it holds no prompt")
        if digest([each.ask for each in prompts]) != found["prompts_sha256"]:
            raise ValueError("its prompts are not those that it was recorded with")
        sampling = dict(found["sampling"])
        limit = int(sampling.pop("max_new_tokens"))
        return cls(
            model=str(found["model"]),
            version=str(found["sglang"]),
            facts=dict(found["facts"]),
            max_tokens=limit,
            batch=int(found["batch"]),
            templated=bool(found["templated"]),
            prompts=prompts,
            recorded=str(found["recorded"]),
            source=source,
            sampling=sampling,
        )


def _best(place: Any) -> tuple[tuple[int, float], ...]:
    """Tokens of a place with their log-probabilities; what is no finite number is left out. Pure."""
    rows = place if isinstance(place, list | tuple) else ()
    return tuple(
        (int(row[1]), float(row[0]))
        for row in rows
        if isinstance(row, list | tuple)
        and len(row) >= 2
        and isinstance(row[0], int | float)
        and isinstance(row[1], int)
        and math.isfinite(row[0])
    )


def answer_of(found: Generation) -> Answer:
    """Tokens of an answer, the one that ended it included, and the best at every place where they were asked for. Pure."""
    ids = found.output_ids
    reason = found.meta.get("finish_reason")
    matched = reason.get("matched") if isinstance(reason, Mapping) else None
    if ids and isinstance(matched, int) and ids[-1] != matched and found.finish_reason == "stop":
        ids = (*ids, matched)
    places = found.meta.get("output_top_logprobs")
    best = tuple(_best(place) for place in places) if isinstance(places, list | tuple) else ()
    return Answer(ids, found.text, found.finish_reason, best)


def server_facts(info: ServerInfo) -> dict[str, Any]:
    """What tells one target from another, as far as the server says it. Pure."""
    return {name: info.raw[name] for name in _TOLD if info.raw.get(name) not in (None, "")}


def other_target(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """How the targets of two servers differ, or an empty text; what one of them does not tell is not held against it. Pure."""

    def plain(name: str, value: Any) -> str:
        return str(value).rstrip("/").rpartition("/")[2] if name == "model_path" else str(value)

    told = [
        f"{name} {plain(name, one[name])} and {plain(name, other[name])}"
        for name in _SAME
        if name in one and name in other and plain(name, one[name]) != plain(name, other[name])
    ]
    files, others = one.get("files") or {}, other.get("files") or {}
    told += [f"another {name}" for name in files if name in others and files[name] != others[name]]
    return ", ".join(told)


def model_files(ctx: Context) -> dict[str, str]:
    """SHA-256 of the small files of the model's folder that tell its revision, as far as they are there."""
    folder = ctx.target.service.model
    try:
        done = ctx.session.run(["sha256sum", "--", *(f"{folder}/{name}" for name in _FILES)])
    except RemoteError:
        return {}
    rows = (line.split(maxsplit=1) for line in done.stdout.decode("utf-8", "replace").splitlines())
    return {name.rpartition("/")[2]: value for value, name in (row for row in rows if len(row) == 2)}


def flushed(engine: EngineClient, host: str) -> None:
    """Empty the prefix cache; wait a little for requests that are still running.

    :raises Inconclusive: somebody else uses the engine. :raises EngineError: no answer.
    """
    for attempt in range(_FLUSHES):
        try:
            engine.flush_cache()
            return
        except EngineError as error:
            if error.status != 400:
                raise
            if attempt == _FLUSHES - 1:
                raise Inconclusive(
                    f"the cache cannot be flushed: {error.message}",
                    host=host,
                    state="nothing was compared",
                    hint="the check needs the engine to itself: take the host out of the router first",
                ) from error
        time.sleep(_PAUSE_S)


def one_pass(
    engine: EngineClient,
    prompts: Sequence[Ask],
    *,
    host: str,
    max_tokens: int,
    timeout: float,
    batch: int = 1,
    best: int = 0,
    say: Say = lambda _: None,
) -> list[Generation]:
    """All prompts once, from an empty cache, ``batch`` at a time.

    :param best: log-probabilities to ask for at every place.
    :raises EngineError: a request failed. :raises Inconclusive: somebody else uses the engine.
    """
    flushed(engine, host)
    more: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": best} if best else {}

    def ask(numbered: tuple[int, Ask]) -> Generation:
        number, each = numbered
        say(f"{each.name} ({number} of {len(prompts)})")
        return engine.generate(each.given, max_tokens=max_tokens, timeout=timeout, **more)

    if batch <= 1:
        return [ask(each) for each in enumerate(prompts, 1)]
    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(ask, enumerate(prompts, 1)))


def measure(
    engine: EngineClient,
    prompts: Iterable[Ask],
    *,
    host: str,
    info: ServerInfo,
    model: str,
    facts: Mapping[str, Any],
    max_tokens: int,
    batch: int,
    timeout: float,
    templated: bool,
    say: Say = lambda _: None,
) -> Golden:
    """Ask a server without speculation everything: twice one at a time, and once at ``batch``.

    :raises EngineError, Inconclusive: as :func:`one_pass`. :raises CheckFailed: it runs with speculation.
    """
    if info.speculative_algorithm:
        raise CheckFailed(
            f"the server runs with {info.speculative_algorithm}: it is no baseline",
            host=host,
            state="nothing was recorded",
            hint="as baseline: name a service that runs the same model without speculative:",
        )
    asks = list(prompts)

    def answers(what: str, batch: int, best: int) -> list[Answer]:
        found = one_pass(
            engine,
            asks,
            host=host,
            max_tokens=max_tokens,
            timeout=timeout,
            batch=batch,
            best=best,
            say=lambda text: say(f"{what}: {text}"),
        )
        return [answer_of(each) for each in found]

    first = answers("baseline, first pass", 1, BEST)
    second = answers("baseline, second pass", 1, BEST)
    third = answers(f"baseline, {batch} at a time", batch, 0) if batch > 1 else [None] * len(asks)
    return Golden(
        model=model,
        version=info.version,
        facts=facts,
        max_tokens=max_tokens,
        batch=batch if batch > 1 else 0,
        templated=templated,
        prompts=tuple(Spoken(*each) for each in zip(asks, first, second, third, strict=True)),
        recorded=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def with_gaps(golden: Golden, host: str, *, state: str = "nothing was compared") -> None:
    """Refuse answers whose differences could not be told from near ties.

    :raises Inconclusive: answers of the baseline carry no log-probabilities.
    """
    without = [each.ask.name for each in golden.prompts if not any(each.first.best)]
    if without:
        raise Inconclusive(
            f"{len(without)} of {len(golden.prompts)} answers of the baseline carry no log-probabilities ({without[0]}): "
            "a difference could not be told from a near tie",
            host=host,
            state=state,
            hint="is it an sglang without speculation?",
        )


def record(
    ctx: Context, path: Path, *, prompts: int = PROMPTS, max_tokens: int = MAX_TOKENS, batch: int = BATCH
) -> Golden:
    """Record the answers of a server without speculation, for the check ``lossless`` of one with it.

    :raises CheckFailed: the server runs with speculation. :raises Inconclusive: somebody else uses it, or its answers
        carry no log-probabilities. :raises EngineError: a request failed. :raises OpsError: the file cannot be written.
    """
    if ctx.speculative:
        raise CheckFailed(
            f"{ctx.host} runs with {ctx.speculative}: a golden file is recorded from the target alone",
            host=ctx.host,
            state="nothing was recorded",
            hint="where the same model runs without speculation: ddtree-ops validate HOST --record FILE",
        )
    rendered = ready(ctx, pick_prompts(prompts))
    if rendered.note:
        ctx.say(rendered.note)
    most = ctx.info.raw.get("max_running_requests")
    golden = measure(
        ctx.engine,
        rendered.prompts,
        host=ctx.host,
        info=ctx.info,
        model=ctx.model.name,
        facts={**server_facts(ctx.info), "files": model_files(ctx)},
        max_tokens=fitting(ctx, max_tokens),
        batch=min(batch, most) if isinstance(most, int) and most > 0 else batch,
        timeout=ctx.timeout,
        templated=rendered.templated,
        say=ctx.say,
    )
    with_gaps(golden, ctx.host, state="nothing was recorded")
    save(golden, path)
    return replace(golden, source=str(path))


def save(golden: Golden, path: Path) -> None:
    """Write by rename. :raises OpsError: nothing can be written there; what was there before stays."""
    text = json.dumps(golden.to_json(), ensure_ascii=False, separators=(",", ":")) + "\n"
    try:
        write_text(path, text)
    except OSError as error:
        raise OpsError(
            f"{path} cannot be written: {error.strerror}",
            state="nothing was recorded; what was there before is still there",
            hint="name another file: --record FILE",
        ) from error


def demand_room(path: Path) -> bool:
    """May a recording be written to ``path``? True: in place of an earlier golden file.

    :raises UsageError: something else is there.
    """
    if not path.exists() and not path.is_symlink():
        return False
    if not _ours(path):
        raise UsageError(
            f"--record {path}: that is there already, and no golden file: it would be overwritten",
            state="nothing was contacted; it is as it was",
            hint="name a new file: ddtree-ops validate HOST --record NEW_FILE",
        )
    return True


def _ours(path: Path) -> bool:
    """Is it a golden file, if of another version, or damaged?"""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"schema", "prompts_sha256", "prompts"} <= found.keys()


def load(path: Path, *, state: str = "nothing was compared") -> Golden:
    """Read a golden file. :raises ConfigError: there is none, or it is damaged."""
    try:
        return Golden.from_json(json.loads(path.read_text("utf-8")), str(path))
    except FileNotFoundError:
        problem = "there is no such file"
    except OSError as error:
        problem = str(error.strerror)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        problem = "no golden file: it is not JSON"
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if not _ours(path):
            problem = "no golden file: it is JSON of another kind"
        else:
            why = f": {error}" if isinstance(error, ValueError) else ""
            problem = f"a damaged golden file{why}"
    free = _ours(path) or not path.exists()
    raise ConfigError(
        f"{path}: {problem}",
        state=state,
        hint=f"record {'it' if free else 'a new one'} from the target alone: ddtree-ops validate HOST --record "
        f"{path if free else 'NEW_FILE'}",
    )
