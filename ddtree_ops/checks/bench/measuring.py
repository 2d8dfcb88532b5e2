"""Measure the points of a configuration that serves already: load, acceptance, memory, and whether the unit held."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddtree_ops.checks.bench.generators import (
    Load,
    find_bench_serving,
    numbered,
    run_bench_serving,
    run_own,
)
from ddtree_ops.checks.bench.measured import Measurement, figures_of, mad
from ddtree_ops.checks.bench.points import Configuration, Point
from ddtree_ops.checks.engine import EngineClient, EngineError, ServerInfo
from ddtree_ops.checks.readiness import Readiness
from ddtree_ops.checks.speculation import DecodeWindow, summarise_decode
from ddtree_ops.diagnose.figures import above_block, useless
from ddtree_ops.errors import CheckFailed, DeadlineError, Inconclusive, RemoteError
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Event, EventKind, Evidence, Figure, Reporter, Verdict
from ddtree_ops.secret import Secret
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.journal import Entry
from ddtree_ops.service.state import UnitState
from ddtree_ops.wording import count

__all__ = [
    "PHASE",
    "Bench",
    "default_prompts",
    "gains_little",
    "judge_point",
    "load_figures",
    "memory_figures",
    "parse_nvidia_smi",
    "wrong_speculation",
]

PHASE = "measure"
_BEAT_S = 5.0
_WARM_TOKENS = 32
_FLUSHES, _FLUSH_GAP_S = 5, 0.5
_GIB = 2**30
_MEMORY = {"weight": "weights", "kvcache": "kv-cache", "graph": "graphs"}


def default_prompts() -> tuple[str, ...]:
    """The shipped prompts: code, prose, tables, arithmetic, other languages."""
    lines = Path(__file__).with_name("prompts.txt").read_text("utf-8").splitlines()
    return tuple(line for line in lines if line.strip())


# ------------------------------------------------------------------------------------------------- pure


def load_figures(entries: Iterable[Entry], labels: Mapping[str, str]) -> tuple[Figure, ...]:
    """``ready`` and a ``load_phase`` for every phase of a start, by the times of its journal; none where it is not whole.

    Pure. The last phase ends when the server says that it is fired up.
    """
    machine: Readiness | None = None
    for entry in entries:
        now = entry.time.timestamp()
        if machine is None:
            machine = Readiness(float("inf"), float("inf"), now)
        machine.feed_line(entry.message, now)
        if machine.phase == "fired-up":
            break
    if machine is None or machine.phase != "fired-up":
        return ()
    phases = {name: seconds for name, seconds in machine.phase_seconds().items() if name != "fired-up"}
    ready = Figure("ready", round(sum(phases.values()), 3), "s", "journal", labels=dict(labels))
    return (
        ready,
        *(
            Figure("load_phase", seconds, "s", "journal", labels={**labels, "phase": name})
            for name, seconds in phases.items()
        ),
    )


def parse_nvidia_smi(output: str) -> tuple[float, ...]:
    """Memory in use on each GPU in GB (10^9 bytes), of ``--query-gpu=memory.used --format=csv,noheader,nounits`` (MiB)."""
    found = []
    for line in output.splitlines():
        try:
            found.append(float(line.strip()) * 2**20 / 1e9)
        except ValueError:
            continue
    return tuple(found)


def memory_figures(
    info: ServerInfo | None, used: Sequence[float], labels: Mapping[str, str]
) -> tuple[Figure, ...]:
    """``gpu_memory`` of the fullest GPU and of what the server says it took for what, and ``kv_tokens``. Pure."""
    figures = []
    if used:
        figures.append(
            Figure(
                "gpu_memory",
                round(max(used), 3),
                "GB",
                "nvidia-smi, fullest GPU",
                len(used),
                labels=dict(labels),
            )
        )
    raw: Mapping[str, Any] = info.raw if info is not None else {}
    states = raw.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
    memory = state.get("memory_usage")
    for theirs, ours in _MEMORY.items():
        value = memory.get(theirs) if isinstance(memory, Mapping) else None
        if isinstance(value, int | float):
            shown = round(max(0.0, value) * _GIB / 1e9, 3)
            figures.append(
                Figure("gpu_memory", shown, "GB", "GET /server_info", labels={**labels, "part": ours})
            )
    tokens = raw.get("max_total_num_tokens")
    if isinstance(tokens, int | float):
        figures.append(Figure("kv_tokens", float(tokens), "tokens", "GET /server_info", labels=dict(labels)))
    return tuple(figures)


def wrong_speculation(configuration: Configuration, info: ServerInfo) -> str:
    """Why a server does not run the configuration, by its own word; empty: it does. Pure."""
    wished = None if configuration.mode == "baseline" else configuration.mode.upper()
    found = info.speculative_algorithm or None
    if (found or "").upper() == (wished or ""):
        return ""
    return (
        f"the server says it runs {found or 'without speculation'}, and {wished or 'none'} is to be measured"
    )


def accept_figure(
    point: Point, decode: DecodeWindow, info: ServerInfo | None, found: Measurement | None
) -> Figure | None:
    """The accept length over the point; None without speculation. Pure.

    The decode lines of the journal are of this point alone. ``/server_info`` averages since the start or the last flush.
    """
    if point.configuration.mode == "baseline":
        return None

    def figure(value: float | None, source: str, samples: int, spread: float | None = None) -> Figure:
        return Figure("accept_length", value, "tokens/step", source, samples, spread, point.labels)

    lengths = decode.accept_lengths
    if lengths:
        source = "journal: mean of the decode lines"
        return figure(statistics.fmean(lengths), source, len(lengths), mad(lengths))
    if info is not None and info.avg_accept_length is not None:
        return figure(info.avg_accept_length, "GET /server_info: average since the flush", 1)
    if found is not None and found.accept_length is not None:
        return figure(found.accept_length, found.generator, 1)
    return figure(None, "neither the journal nor /server_info has one", 0)


def gains_little(accept_length: float | None, floor: float | None) -> str:
    """What to warn of at a point that passes: speculation that gains nothing, or less than the inventory asks for; or empty.

    Pure.
    """
    if accept_length is None:
        return ""
    if useless(accept_length):
        return "every draft was rejected, so speculation only costs here"
    if floor is not None and accept_length < floor:
        return f"accept length {accept_length:.2f} is below the {floor:g} of the inventory"
    return ""


def judge_point(
    point: Point,
    found: Measurement,
    *,
    accept: Figure | None,
    before: UnitState,
    after: UnitState,
    block_size: int | None = None,
    floor: float | None = None,
    host: str = "",
) -> CheckResult:
    """The result of a measured point. Pure.

    Fails where requests failed, the unit did not hold, or acceptance is above the block size; is inconclusive where no
    output was counted. Low acceptance passes, with a warning in its sentence and its facts.

    :param floor: accept length that the inventory asks for.
    """
    figures = (*figures_of(found, point.labels), *((accept,) if accept is not None else ()))
    facts = {**found.facts(), "configuration": point.configuration.name, "concurrency": point.concurrency}
    name = host.partition("/")[0]

    def result(
        verdict: Verdict, summary: str, hint: str = "", evidence: Sequence[Evidence] = ()
    ) -> CheckResult:
        return CheckResult(
            point.name, verdict, summary, host, facts, tuple(evidence), hint, figures, seconds=found.seconds
        )

    if (before.invocation_id, before.main_pid) != (after.invocation_id, after.main_pid) or not after.running:
        return result(
            Verdict.FAIL,
            f"the unit did not hold while it was measured: {after.describe()}",
            f"ddtree-ops diagnose {name}",
            [
                Evidence("systemctl show", f"before: {before.describe()}"),
                Evidence("systemctl show", after.describe()),
            ],
        )
    if found.failed:
        errors = [Evidence(found.generator, text) for text in found.errors]
        first = f": {found.errors[0]}" if found.errors else ""
        return result(
            Verdict.FAIL,
            f"{found.failed} of {count(found.requested, 'request')} failed{first}",
            f"ddtree-ops logs {name} --lines 100",
            errors,
        )
    rate = found.output_rate
    if rate is None:
        return result(
            Verdict.INCONCLUSIVE,
            "no output token was counted: there is nothing to judge by",
            f"ddtree-ops smoke {name}",
        )
    length = accept.value if accept is not None else None
    if length is not None and block_size is not None and above_block(length, block_size):
        return result(
            Verdict.FAIL,
            f"accept length {length:.2f} exceeds the block size {block_size}: the accounting is broken",
        )
    times = found.times.get("tpot")
    tpot = f", {1000 * times.median:.1f} ms a token" if times else ""
    accepted = f", accept length {length:.2f}" if length is not None else ""
    warning = gains_little(length, floor)
    if warning:
        facts["warning"] = warning
    said = f"; warning: {warning}" if warning else ""
    return result(
        Verdict.PASS, f"{rate:.0f} tokens/s{tpot}{accepted}, {count(found.requested, 'request')}{said}"
    )


# ----------------------------------------------------------------------------------------------- on a host


@dataclass
class Bench:
    """Measures on one host, over one session, while the caller holds the lock of the service.

    :param prompts: what is asked, in turn.
    :param requests: of a point; at least twice its concurrency are sent.
    :param generator: ``auto``, ``bench_serving`` or ``own``.
    :param floor: accept length that the inventory asks for, which a point below it is warned of.
    """

    session: Session
    target: Target
    report: Reporter
    prompts: Sequence[str]
    requests: int
    max_tokens: int
    generator: str = "auto"
    api_key: Secret | None = None
    chosen: str = ""
    floor: float | None = None

    def say(self, message: str, kind: EventKind = EventKind.PROGRESS) -> None:
        """Report progress."""
        self.report(Event(kind, self.target.name, PHASE, message))

    def choose(self) -> str:
        """Which generator is used, ``bench_serving`` or ``own``; asked of the host once.

        :raises Inconclusive: ``bench_serving`` was asked for and does not run there.
        """
        if self.chosen:
            return self.chosen
        if self.generator == "own":
            self.chosen = "own"
            return self.chosen
        with self._beating("looking for sglang.bench_serving"):
            why = find_bench_serving(self.session, self.target)
        if why and self.generator == "bench_serving":
            raise Inconclusive(
                why,
                host=self.target.name,
                phase=PHASE,
                hint="install what it misses into the venv (datasets, aiohttp ...), or --generator own for a lab host",
            )
        self.chosen = "own" if why else "bench_serving"
        self.say(
            f"{why}: our own small load generator is used" if why else "load generator: sglang.bench_serving",
            EventKind.NOTE,
        )
        return self.chosen

    def start_figures(self, configuration: Configuration) -> tuple[Figure, ...]:
        """Figures of the start that serves now: its load by phase, memory, room for tokens.

        :raises CheckFailed: the server runs something else than the configuration.
        :raises Inconclusive: it does not say what it runs.
        """
        labels = configuration.labels
        control = UnitControl(self.session, self.target.service.unit)
        loads = load_figures(control.entries(invocation="current"), labels)
        info = self._info()
        if info is None:
            raise Inconclusive(
                "the server does not say what it runs (/server_info): whatever was measured could be of another one",
                host=self.target.name,
                phase=PHASE,
                hint=f"ddtree-ops smoke {self.target.host.name}",
            )
        if wrong := wrong_speculation(configuration, info):
            raise CheckFailed(wrong, host=self.target.name, phase=PHASE)
        smi = self.session.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], deadline=60.0
        )
        used = parse_nvidia_smi(smi.text) if smi.rc == 0 else ()
        return (*loads, *memory_figures(info, used, labels))

    def measure(self, point: Point) -> CheckResult:
        """One point. Never raises for what the engine does wrong.

        :raises UnreachableError: the session ended.
        """
        control = UnitControl(self.session, self.target.service.unit)
        before, cursor = control.state(), control.cursor()
        what = f"{point.configuration.name}, concurrency {point.concurrency}"
        begun = time.monotonic()
        try:
            with EngineClient(self.session, self.target, self.api_key) as engine, self._beating(what):
                model = engine.models()[0].name
                found = self._load(engine, self._load_of(point, model))
                info = self._info()
        except (EngineError, Inconclusive, RemoteError) as error:
            return self._not_measured(point, error, control, before)
        entries = control.entries(invocation=before.invocation_id or "current", after_cursor=cursor)
        decode = summarise_decode(entry.message for entry in entries)
        speculative = self.target.service.speculative
        result = judge_point(
            point,
            found,
            accept=accept_figure(point, decode, info, found),
            before=before,
            after=control.state(),
            block_size=speculative.block_size if speculative else None,
            floor=self.floor,
            host=self.target.name,
        )
        if decode.text:
            result = replace(result, evidence=(*result.evidence, Evidence("journal", decode.text)))
        return replace(result, seconds=time.monotonic() - begun)

    def tell(self, result: CheckResult) -> None:
        """Report what came of a point, once it is kept."""
        message = f"{result.name}: {result.summary}"
        self.report(
            Event(EventKind.end(result.verdict), self.target.name, PHASE, message, elapsed_s=result.seconds)
        )

    def _load_of(self, point: Point, model: str) -> Load:
        requests = max(self.requests, 2 * point.concurrency)
        health = self.target.service.health
        timeout = max(health.request_timeout, 0.5 * self.max_tokens)
        rounds = -(-requests // point.concurrency) + 2
        return Load(
            model=model,
            prompts=numbered(self.prompts, requests),
            concurrency=point.concurrency,
            max_tokens=self.max_tokens,
            timeout=timeout,
            deadline=300.0 + rounds * timeout,
            api_key=self.api_key,
        )

    def _load(self, engine: EngineClient, load: Load) -> Measurement:
        if self.choose() == "bench_serving":
            return run_bench_serving(self.session, self.target, load)
        warm = replace(
            load,
            prompts=numbered(self.prompts, load.concurrency, first=10_001),
            max_tokens=min(_WARM_TOKENS, load.max_tokens),
        )
        run_own(self.session, self.target, warm)
        self._flush(engine)
        return run_own(self.session, self.target, load)

    def _flush(self, engine: EngineClient) -> None:
        """Empty the prefix cache. The server refuses while a request is still being taken down."""
        status = 0
        for _ in range(_FLUSHES):
            status = engine.send("POST", "/flush_cache", timeout=30.0).status_code
            if status == 200:
                return
            time.sleep(_FLUSH_GAP_S)
        self.say(f"POST /flush_cache: {status}: the prefix cache was not emptied", EventKind.NOTE)

    def _info(self) -> ServerInfo | None:
        try:
            with EngineClient(self.session, self.target, self.api_key) as engine:
                return engine.server_info()
        except EngineError as error:
            self.say(f"/server_info: {error.message}", EventKind.NOTE)
            return None

    def _not_measured(
        self,
        point: Point,
        error: EngineError | Inconclusive | RemoteError,
        control: UnitControl,
        before: UnitState,
    ) -> CheckResult:
        """A failure where the engine or the unit is at fault, inconclusive where nothing could be measured."""
        after = control.state()
        held = after.running and after.invocation_id == before.invocation_id
        fails = not held or isinstance(error, EngineError | DeadlineError)
        verdict = Verdict.FAIL if fails else Verdict.INCONCLUSIVE
        name = self.target.host.name
        summary = error.message if held else f"the unit did not hold: {after.describe()}"
        return CheckResult(
            point.name,
            verdict,
            summary,
            host=self.target.name,
            facts={"configuration": point.configuration.name, "concurrency": point.concurrency},
            evidence=tuple(Evidence("load generator", line) for line in (error.message, *error.details)),
            hint=error.hint or f"ddtree-ops diagnose {name}",
        )

    @contextmanager
    def _beating(self, what: str) -> Iterator[None]:
        """Say what is under way as long as it takes."""
        over = threading.Event()
        begun = time.monotonic()

        def beat() -> None:
            while not over.wait(_BEAT_S):
                self.say(f"{what}, {time.monotonic() - begun:.0f} s")

        thread = threading.Thread(target=beat, name="bench-beat", daemon=True)
        self.say(what)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
