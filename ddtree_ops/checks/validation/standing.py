"""Checks that ask the engine nothing: they judge what the others have left, after the last of them, in every run."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated

from pydantic import Field

from ddtree_ops.checks.engine import EngineError
from ddtree_ops.checks.holding import hold_unit
from ddtree_ops.checks.port import port_holders
from ddtree_ops.checks.signatures import hint_for, prepare, scan
from ddtree_ops.checks.validation.asking import told
from ddtree_ops.checks.validation.base import Context, NoSettings, Settings, check
from ddtree_ops.checks.validation.judging import Judgement, judge_idle, judge_kernel, judge_memory, worst_of
from ddtree_ops.checks.validation.protocol import until_idle
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.errors import Inconclusive
from ddtree_ops.remote.session import Reply, Request, Session
from ddtree_ops.results import CheckResult, Evidence, Figure, Verdict
from ddtree_ops.service.state import UnitState
from ddtree_ops.wording import count

__all__ = ["ASKED", "DIAGNOSIS", "MEMORY", "Memory", "Steady", "host_memory", "own_doing"]

MEMORY = "memory_samples"
"""Key of :attr:`Context.shared`: bytes of the unit's processes, one sample after every check."""
DIAGNOSIS = "diagnosis"
"""Key of :attr:`Context.shared`: the diagnosis of the journal since the run began."""
ASKED = "asked"
"""Key of :attr:`Context.shared`: the names of the checks that have asked the engine something."""


class Steady(Settings):
    """``window``: seconds over which the unit is held after the last request."""

    window: Annotated[float, Field(ge=0)] = 3.0


class Memory(Settings):
    """``patience``: seconds until nothing may be held any more; growth of host memory allowed: the larger of the two."""

    patience: Annotated[float, Field(gt=0)] = 5.0
    growth_mib: Annotated[float, Field(ge=0)] = 512.0
    growth_share: Annotated[float, Field(ge=0)] = 0.05


def host_memory(session: Session, unit: UnitState) -> int | None:
    """Bytes of memory that the unit's processes hold themselves, without the files they read; None where unknown.

    ``anon`` of the control group; where that has no memory controller, ``RssAnon`` of its processes.
    """
    group = unit.control_group
    if not group:
        return None
    places = [f"/sys/fs/cgroup{group}/memory.stat"]
    places += [f"/sys/fs/cgroup{root}{group}/cgroup.procs" for root in ("", "/systemd", "/unified")]
    stat, *listed = _texts(session, places)
    if (anon := _value(stat, "anon")) is not None:
        return anon
    pids = next((text.split() for text in listed if text.split()), [])
    sizes = [_value(text, "RssAnon:") for text in _texts(session, [f"/proc/{pid}/status" for pid in pids])]
    known = [size * 1024 for size in sizes if size is not None]
    return sum(known) if known else None


def _texts(session: Session, paths: Sequence[str]) -> list[str]:
    """The content of files, in one round trip; empty where there is none, or a process has ended meanwhile."""
    if not paths:
        return []
    replies = session.batch(
        [Request("read_file", {"path": path, "max_bytes": 1 << 20}) for path in paths], deadline=30.0
    )
    return [
        reply.data.decode("utf-8", "replace") if isinstance(reply, Reply) and reply.values["found"] else ""
        for reply in replies
    ]


def _value(text: str, name: str) -> int | None:
    """The number after ``name`` at the begin of a line."""
    found = re.search(rf"^{re.escape(name)}\s+(\d+)", text, re.M)
    return int(found[1]) if found else None


@check(
    "steady",
    "one process served the whole run: the same InvocationID, NRestarts and MainPID, and the port is its own",
    settings=Steady,
    standing=True,
)
def steady(ctx: Context, settings: Steady) -> CheckResult:
    """The unit as it was when the run began, held for a while after the last request."""
    ctx.say(f"holding the unit for {settings.window:g} s")
    thread = prepare()
    problem, unit, _ = hold_unit(ctx.session, ctx.target.service.unit, ctx.unit, settings.window)
    holders = port_holders(ctx.control, ctx.target.service)
    thread.join()
    facts = {
        "invocation": unit.invocation_id,
        "n_restarts": unit.n_restarts,
        "main_pid": unit.main_pid,
        "window_s": settings.window,
    }
    evidence = (
        Evidence("systemctl show", unit.describe()),
        Evidence("listening sockets", holders.describe()),
    )
    if problem is None and not holders.owned:
        problem = holders.describe()
    if problem is not None:
        return ctx.result(
            Verdict.FAIL,
            problem,
            hint=f"ddtree-ops diagnose {ctx.host} --invocation {ctx.unit.invocation_id or 'current'}",
            facts=facts,
            evidence=evidence,
        )
    summary = f"the same process all along (PID {unit.main_pid}, {count(unit.n_restarts, 'restart')}), the port is its own"
    return ctx.result(Verdict.PASS, summary, facts=facts, evidence=evidence)


@check(
    "memory",
    "an idle engine holds no KV token, and the memory of its processes did not grow",
    settings=Memory,
    standing=True,
)
def memory(ctx: Context, settings: Memory) -> CheckResult:
    """What is held after the last request, and how the memory went from check to check."""
    samples: list[int] = ctx.shared.get(MEMORY, [])
    if not ctx.shared.get(ASKED):
        return ctx.result(Verdict.SKIPPED, "nothing was asked of the engine in this run")
    judged: list[Judgement] = []
    facts: dict[str, object] = {}
    try:
        loads = until_idle(ctx, settings.patience, tokens=True)
    except EngineError as error:
        return ctx.result(
            Verdict.INCONCLUSIVE, f"it does not say what it holds: {error.message}", hint=error.hint
        )
    judged.append(judge_idle(loads, patience=settings.patience))
    if loads and loads[-1] is not None:
        facts["used_tokens"] = loads[-1].used_tokens
    figures = []
    if len(samples) >= 2:
        allowed = int(max(settings.growth_mib * 2**20, settings.growth_share * samples[0]))
        judged.append(judge_memory(samples, allowed=allowed))
        facts["host_memory_mib"] = [round(sample / 2**20, 1) for sample in samples]
        figures.append(
            Figure("host_memory", samples[-1] / 1e9, "GB", "cgroup memory.stat", samples=len(samples))
        )
    found = worst_of(judged, "; ".join(each.summary for each in judged))
    return told(ctx, found, facts=facts, figures=figures)


@check("no-xid", "the kernel reported no failure of a GPU since the run began", standing=True)
def no_xid(ctx: Context, settings: NoSettings) -> CheckResult:
    """The kernel's log, where it can be read."""
    argv = ["journalctl", "--dmesg", "--output=cat", "--quiet", "--no-pager"]
    since = [] if ctx.since is None else [f"--since=@{ctx.since.timestamp():.6f}"]
    done = ctx.session.run([*argv, *since])
    messages = done.stdout.decode("utf-8", "replace").splitlines()
    readable = bool(messages) or bool(ctx.session.run([*argv, "--lines=1"]).stdout.strip())
    container = not readable and ctx.session.run(["systemd-detect-virt", "--container", "--quiet"]).rc == 0
    found = judge_kernel(messages, readable=readable, container=container)
    return told(ctx, found, evidence=[Evidence("kernel log", text) for text in messages if "Xid" in text])


def own_doing(found: Collection[str], asked: Collection[str]) -> str:
    """What is to be said of a finding that a check of this run provokes; empty: nothing. Pure."""
    if "req-unsupported" in found and "refusals" in asked:
        return " (the check refusals of this run asks for that)"
    return ""


@check("signatures", "the journal since the run began holds no known and no unknown failure", standing=True)
def signatures(ctx: Context, settings: NoSettings) -> CheckResult:
    """The scan of ``ddtree-ops diagnose`` over what this run has provoked; over the whole start where it asked nothing."""
    ctx.say("reading the journal of this run")
    since = ctx.since if ctx.shared.get(ASKED) else None
    try:
        found = scan(
            ctx.session,
            ctx.target,
            invocation=ctx.unit.invocation_id or "current",
            facts=ServiceFacts.of(ctx.target),
            since=since,
            served=True,
        )
    except Inconclusive as error:
        return ctx.result(Verdict.INCONCLUSIVE, error.message, hint=error.hint)
    ctx.shared[DIAGNOSIS] = found
    told_of = found.as_check(host=ctx.target.name)
    hint = told_of.hint
    if told_of.verdict is Verdict.INCONCLUSIVE and not hint:
        hint = hint_for(found, ctx.host, ctx.target.service.unit)
    summary = told_of.summary + own_doing(told_of.facts.get("signatures", ()), ctx.shared.get(ASKED, ()))
    return ctx.result(
        told_of.verdict,
        summary,
        hint=hint,
        facts={**told_of.facts, "invocation": ctx.unit.invocation_id},
        evidence=told_of.evidence,
    )
