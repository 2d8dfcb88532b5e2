"""``doctor``: everything that a preflight judges, over many hosts, with nothing changed and no lock taken.

One session and one batch of requests a host. A host that cannot be reached, or gives no agent, is a row of the
report, with what to do; the other hosts are looked at to their end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddtree_ops.deploy.preflight.facts import parse_facts, probe_request
from ddtree_ops.errors import ExitCode, OpsError, UnreachableError
from ddtree_ops.remote.session import Request, Session, answers
from ddtree_ops.results import CheckResult, Evidence, Verdict, exit_code_of, worst

if TYPE_CHECKING:
    from ddtree_ops.deploy.preflight.judge import Wanted
    from ddtree_ops.inventory.models import RuntimeSpec, Target

__all__ = ["Examination", "diagnose_hosts", "examine", "exit_code", "wanted_of"]


@dataclass(frozen=True)
class Examination:
    """What was found for one target.

    :param seconds: from the beginning to the verdict, connecting included.
    :param unreachable: there was no session to judge by.
    """

    target: str
    checks: tuple[CheckResult, ...]
    seconds: float
    unreachable: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks."""
        return worst(check.verdict for check in self.checks)

    def of(self, verdict: Verdict) -> tuple[CheckResult, ...]:
        """Checks with this verdict."""
        return tuple(check for check in self.checks if check.verdict is verdict)

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form; seconds."""
        return {
            "host": self.target,
            "verdict": self.verdict.value,
            "unreachable": self.unreachable,
            "seconds": round(self.seconds, 3),
            "checks": [check.to_json() for check in self.checks],
        }


def exit_code(found: Sequence[Examination]) -> ExitCode:
    """5 where a check failed, 4 where the only failures are hosts out of reach, 8 where something is not known."""
    if any(one.verdict is Verdict.FAIL and not one.unreachable for one in found):
        return ExitCode.CHECK_FAILED
    if any(one.unreachable for one in found):
        return ExitCode.UNREACHABLE
    return exit_code_of(worst(one.verdict for one in found))


def wanted_of(runtime: RuntimeSpec) -> Wanted | CheckResult:
    """What a runtime asks of a host, from the cache or built now; where that fails, a check that says so."""
    from ddtree_ops.deploy.preflight.judge import Wanted
    from ddtree_ops.runtime import build, known_bundle

    try:
        return Wanted.of(known_bundle(runtime) or build(runtime))
    except OpsError as error:
        return CheckResult(
            "preflight.runtime",
            Verdict.INCONCLUSIVE,
            f"runtime {runtime.name} cannot be built here, so versions were not judged: {error.message}",
            hint=error.hint or f"ddtree-ops runtime build {runtime.name}",
        )


def diagnose_hosts(
    targets: Sequence[Target],
    connect: Callable[[Target], Session],
    wanted: Callable[[RuntimeSpec], Wanted | CheckResult],
) -> list[Examination]:
    """Examine all targets, hosts side by side, in the order of ``targets``.

    :param connect: opens a session to a target's host; called once a host.
    :param wanted: what a runtime asks of a host, or a result that says why that is not known; called once a runtime.
    """
    hosts: dict[str, list[Target]] = {}
    runtimes: dict[str, RuntimeSpec] = {}
    for target in targets:
        hosts.setdefault(target.host.name, []).append(target)
        runtimes.setdefault(target.runtime.model_dump_json(), target.runtime)
    with ThreadPoolExecutor(max_workers=min(32, len(hosts) + len(runtimes))) as pool:
        asked = {key: pool.submit(wanted, runtime) for key, runtime in runtimes.items()}

        def known(runtime: RuntimeSpec) -> Wanted | CheckResult:
            return asked[runtime.model_dump_json()].result()

        found = {
            examination.target: examination
            for examinations in pool.map(lambda group: _one_host(group, connect, known), hosts.values())
            for examination in examinations
        }
    return [found[target.name] for target in targets]


def _one_host(
    targets: Sequence[Target],
    connect: Callable[[Target], Session],
    known: Callable[[RuntimeSpec], Wanted | CheckResult],
) -> list[Examination]:
    began = time.monotonic()
    try:
        session = connect(targets[0])
    except OpsError as error:
        return [_out_of_reach(target, error, time.monotonic() - began) for target in targets]
    found = []
    with session:
        for target in targets:
            try:
                checks = examine(session, target, known)
            except OpsError as error:
                found.append(_out_of_reach(target, error, time.monotonic() - began))
            else:
                found.append(Examination(target.name, tuple(checks), time.monotonic() - began))
            began = time.monotonic()
    return found


def _out_of_reach(target: Target, error: OpsError, seconds: float) -> Examination:
    """Why nothing could be judged, as a failed check."""
    check = CheckResult(
        "preflight.reach",
        Verdict.FAIL,
        error.message,
        host=target.name,
        facts={"error": type(error).__name__},
        evidence=tuple(Evidence("connection", line) for line in error.details),
        hint=error.hint or f"ssh {target.host.name} true",
    )
    return Examination(target.name, (check,), seconds, unreachable=isinstance(error, UnreachableError))


def examine(
    session: Session, target: Target, known: Callable[[RuntimeSpec], Wanted | CheckResult]
) -> list[CheckResult]:
    """All checks of one target: a batch and the look at its port, side by side.

    :raises OpsError: the host did not answer them.
    """
    from ddtree_ops.service.control import UnitControl
    from ddtree_ops.service.layout import Layout
    from ddtree_ops.service.state import UnitState

    layout = Layout.of(target)
    sent = time.time()
    replied = session.begin_batch(
        [
            probe_request(target),
            Request("list_dir", {"path": layout.releases}),
            Request("show_unit", {"unit": target.service.unit}),
        ]
    )
    from ddtree_ops.deploy.preflight.judge import judge, skew_of  # while the host works

    owners = UnitControl(session, target.service.unit).port_owner(target.service.port, target.service.bind)
    wanted = known(target.runtime)
    probe, releases, unit = answers(replied())
    facts = parse_facts(probe.data)
    results = judge(
        target,
        facts,
        owners,
        state=UnitState.parse(unit.values),
        releases=_releases(releases.values),
        wanted=None if isinstance(wanted, CheckResult) else wanted,
        skew=skew_of(session.facts["clock_skew_s"], facts.time, sent),
    )
    reached = CheckResult("preflight.reach", Verdict.PASS, f"reached as {session.facts.get('hostname', '')}")
    unknown = [wanted] if isinstance(wanted, CheckResult) else []
    return [replace(result, host=target.name) for result in (reached, *results, *unknown)]


def _releases(values: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(entry["name"] for entry in values["entries"] if entry["kind"] == "dir")
