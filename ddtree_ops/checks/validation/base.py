"""What a validation check is: a name, a sentence, typed settings, and a function from a context to one result.

A check asks the engine something, judges the answer by a pure function, and returns a result with evidence. It never
raises for what the engine does wrong: the runner turns an :class:`EngineError` into a failure, after a look at the unit.
Checks are registered by :func:`check` when their module is imported, and named in suites (``suites/*.yaml``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from ddtree_ops.checks.engine import EngineClient, Model, ServerInfo
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Event, EventKind, Evidence, Figure, Reporter, Verdict
from ddtree_ops.secret import Secret
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.state import UnitState

__all__ = ["CHECKS", "CheckSpec", "Context", "NoSettings", "Settings", "check"]

PHASE = "validate"


class Settings(BaseModel):
    """Settings of a check, as a suite gives them; every field has a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoSettings(Settings):
    """For a check that has none."""


@dataclass
class Context:
    """What a check has to work with: one target, its engine, and what the run knows so far.

    :param model: the served model (name, context length in tokens).
    :param info: ``/server_info`` as it was when the run began.
    :param unit: the unit as it was when the run began; a check that finds another one has seen a restart.
    :param quality: False: a model that talks nonsense (a tiny random one): text is checked for being there, not for sense.
    :param timeout: seconds for one request.
    :param since: when the run began, by the host's clock.
    :param nonce: a word that no earlier run has said: a prompt that begins with it is in no cache.
    :param shared: results that later checks of the same run build on, by name (a prompt that was answered ...).
    """

    session: Session
    target: Target
    engine: EngineClient
    model: Model
    info: ServerInfo
    unit: UnitState
    control: UnitControl
    report: Reporter
    timeout: float
    quality: bool = True
    api_key: Secret | None = None
    since: datetime | None = None
    nonce: str = ""
    shared: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    """Name of the check that runs."""

    @property
    def host(self) -> str:
        """Name of the host, for messages."""
        return self.target.host.name

    @property
    def speculative(self) -> str | None:
        """The algorithm that the server itself says it runs with; None without speculation."""
        return self.info.speculative_algorithm

    def say(self, message: str, fraction: float | None = None) -> None:
        """Report progress of the check under way."""
        self.report(
            Event(EventKind.PROGRESS, self.target.name, PHASE, f"{self.name}: {message}", fraction=fraction)
        )

    def result(
        self,
        verdict: Verdict,
        summary: str,
        *,
        hint: str = "",
        facts: Mapping[str, Any] | None = None,
        evidence: Sequence[Evidence] = (),
        figures: Sequence[Figure] = (),
    ) -> CheckResult:
        """The result of the check under way; what is no pass says what to type, the engine's words where nothing better is known."""
        if verdict in {Verdict.FAIL, Verdict.INCONCLUSIVE} and "ddtree-ops " not in hint:
            run = self.unit.invocation_id or "current"
            look = f"ddtree-ops logs {self.target.name} --invocation {run}"
            hint = f"{hint}; {look}" if hint else look
        return CheckResult(
            self.name,
            verdict,
            summary,
            host=self.target.name,
            facts=facts or {},
            evidence=tuple(evidence),
            hint=hint,
            figures=tuple(figures),
        )


@dataclass(frozen=True)
class CheckSpec:
    """A registered check.

    :param title: one sentence: what a pass proves.
    :param disturbs: it empties the cache, aborts requests or otherwise costs other users of the engine.
    :param standing: it asks the engine nothing: it judges what the others have left, after the last of them, in every run.
    """

    name: str
    title: str
    run: Callable[[Context, Any], CheckResult]
    settings: type[Settings] = NoSettings
    disturbs: bool = False
    standing: bool = False


CHECKS: dict[str, CheckSpec] = {}
"""Every registered check by name, in the order of registration."""


def check(
    name: str,
    title: str,
    *,
    settings: type[Settings] = NoSettings,
    disturbs: bool = False,
    standing: bool = False,
) -> Callable[[Callable[[Context, Any], CheckResult]], Callable[[Context, Any], CheckResult]]:
    """Register a check: ``@check("prefix-hit", "the same prompt again is answered from the cache")``."""

    def register(run: Callable[[Context, Any], CheckResult]) -> Callable[[Context, Any], CheckResult]:
        if name in CHECKS:
            raise ValueError(f"two checks are named {name}")
        CHECKS[name] = CheckSpec(name, title, run, settings, disturbs, standing)
        return run

    return register
