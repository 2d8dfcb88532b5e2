"""Playbooks as typed steps.

A step is one key with its settings: ``- smoke: {prompt: quicksort}``, or the bare name: ``- smoke``. Settings left
out are those of the service's ``health``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddtree_ops.errors import UsageError
from ddtree_ops.inventory.models import Duration, Int
from ddtree_ops.inventory.yaml_source import KeyPath, suggestion

__all__ = [
    "FAILURE_ONLY",
    "FAILURE_STEPS",
    "REPORTING",
    "STEPS",
    "Bench",
    "Deploy",
    "GoBack",
    "Halt",
    "Journal",
    "Plain",
    "Playbook",
    "Smoke",
    "Step",
    "Trend",
    "Validate",
    "Wait",
    "order_problems",
]

PlainKind = Literal[
    "lint",
    "preflight",
    "build",
    "push",
    "verify",
    "activate",
    "signatures",
    "start",
    "capture",
    "diagnose",
    "rollback",
    "doctor",
    "drift",
]


When = Literal["always", "asked"]


class _Step(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @property
    def arguments(self) -> dict[str, Any]:
        """Settings that were given, by name; durations in seconds."""
        given = {name: getattr(self, name) for name in self.model_fields_set if name != "kind"}
        return {name: value for name, value in given.items() if value is not None}


class Plain(_Step):
    """A step without settings."""

    kind: PlainKind


class Wait(_Step):
    """Follow the start until the engine is ready, or ends."""

    kind: Literal["wait"] = "wait"
    load_timeout: Duration | None = Field(
        default=None, description="longest load accepted, however much progress it makes"
    )
    stall_timeout: Duration | None = Field(
        default=None, description="longest silence: no phase, shard, log line"
    )


class Smoke(_Step):
    """One real completion, then the unit is held for a window."""

    kind: Literal["smoke"] = "smoke"
    prompt: str | None = Field(default=None, min_length=1, description="named prompt, or free text")
    max_tokens: Int | None = Field(default=None, ge=1)
    window: Duration | None = Field(
        default=None, description="how long the unit is held after the completion"
    )
    min_accept_length: float | None = Field(default=None, ge=1.0)


class Halt(_Step):
    """Stop the unit as it is, or restart it."""

    kind: Literal["stop", "restart"]
    drain_timeout: Duration | None = Field(
        default=None, description="longest wait for requests under way, then SIGKILL; 0s: at once"
    )


class GoBack(_Step):
    """Switch to an activation that is recorded on the host."""

    kind: Literal["go_back"] = "go_back"
    to: str | None = Field(
        default=None, min_length=4, description="release, activation or time; the newest that passed"
    )


class Deploy(_Step):
    """Run another playbook over all hosts of the run, then go on with the hosts that could be worked on."""

    kind: Literal["deploy"] = "deploy"
    playbook: str = Field(default="deploy", min_length=1, description="name or path of the playbook")
    when: When = Field(default="always", description="asked: only with --deploy")


class Validate(_Step):
    """Ask the engine a suite of checks, or some of them by name."""

    kind: Literal["validate"] = "validate"
    suite: str | None = Field(default=None, min_length=1, description="name or path of a suite")
    checks: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="these checks, and no others"
    )
    golden: str | None = Field(
        default=None,
        min_length=1,
        description="what `validate --record FILE` wrote: lossless compares with it",
    )


class Bench(_Step):
    """Measure speed and acceptance at the points of a grid; the service may be restarted for it."""

    kind: Literal["bench"] = "bench"
    when: When = Field(default="always", description="asked: only with --bench")
    budgets: tuple[Int, ...] | None = Field(
        default=None, min_length=1, description="budgets of the tree; left out: the service's own"
    )
    topk: tuple[Int, ...] | None = Field(
        default=None, min_length=1, description="candidates a level; left out: the service's own"
    )
    concurrency: tuple[Int, ...] | None = Field(default=None, min_length=1, description="requests at once")
    baseline: bool | None = Field(default=None, description="without speculation too")
    dflash: bool | None = Field(default=None, description="the linear drafter too")
    requests: Int | None = Field(default=None, ge=1, description="of a point")


class Journal(_Step):
    """Known and new failures in all that the unit wrote since the last run of this playbook."""

    kind: Literal["journal"] = "journal"
    first: Duration | None = Field(
        default=None, description="how far the first run looks back, which knows of no other"
    )


class Trend(_Step):
    """Figures of this run and its failures against those of earlier runs."""

    kind: Literal["trend"] = "trend"
    runs: Int | None = Field(default=None, ge=2, description="compared with at most so many, the newest")


Step = Plain | Wait | Smoke | Halt | GoBack | Deploy | Validate | Bench | Journal | Trend
"""Any step; ``kind`` names it, ``arguments`` holds its settings."""
_AnyStep = Annotated[Step, Field(discriminator="kind")]

STEPS: Mapping[str, type[Step]] = {
    "lint": Plain,
    "preflight": Plain,
    "build": Plain,
    "push": Plain,
    "verify": Plain,
    "activate": Plain,
    "start": Plain,
    "stop": Halt,
    "restart": Halt,
    "go_back": GoBack,
    "wait": Wait,
    "smoke": Smoke,
    "signatures": Plain,
    "capture": Plain,
    "diagnose": Plain,
    "rollback": Plain,
    "doctor": Plain,
    "drift": Plain,
    "deploy": Deploy,
    "validate": Validate,
    "bench": Bench,
    "journal": Journal,
    "trend": Trend,
}
"""Every step by name."""

REPORTING = ("doctor", "drift", "deploy", "validate", "bench", "journal", "trend")
"""Steps of a playbook that reports: one with any of these goes on after a step that failed, and its run leaves a report
and a history."""
_BESIDE = ("wait", "smoke", "signatures", "lint")
"""Other steps that such a playbook may have: they change nothing."""

FAILURE_ONLY = ("capture", "diagnose", "rollback")
_DISTURBING = ("rollback", "start", "stop", "restart")
FAILURE_STEPS = ("capture", "diagnose", *_DISTURBING)
"""Steps allowed under ``on_failure``."""

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "push": ("build",),
    "verify": ("push",),
    "activate": ("preflight", "push"),
}
_ONCE = ("lint", "preflight", "build", "push", "verify", "activate", "go_back", *REPORTING)


class Playbook(BaseModel):
    """A loaded playbook.

    :ivar path: the file it came from, for messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    path: str = ""
    name: str
    description: str = ""
    steps: tuple[_AnyStep, ...] = Field(min_length=1)
    on_failure: tuple[_AnyStep, ...] = ()

    @property
    def reports(self) -> bool:
        """It looks and reports: every step is done whatever failed before."""
        return any(step.kind in REPORTING for step in self.steps)

    def with_arguments(self, settings: Mapping[str, Mapping[str, Any]]) -> Playbook:
        """The playbook with settings laid over those of its steps: ``{"smoke": {"prompt": "hello"}}``.

        A setting of None is as if it was not given.

        :raises UsageError: a step that the playbook does not have, an unknown setting, or a wrong value.
        """
        given = {
            kind: {name: value for name, value in values.items() if value is not None}
            for kind, values in settings.items()
        }
        given = {kind: values for kind, values in given.items() if values}
        kinds = [step.kind for step in (*self.steps, *self.on_failure)]
        for kind in given:
            if kind not in kinds:
                raise UsageError(f"playbook {self.name} has no step {kind}{suggestion(kind, kinds)}")

        def changed(step: Step) -> Step:
            values = given.get(step.kind)
            if not values:
                return step
            try:
                return type(step).model_validate({"kind": step.kind, **step.arguments, **values})
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                name = ".".join(str(part) for part in first["loc"])
                known = [key for key in type(step).model_fields if key != "kind"]
                text = (
                    f"unknown setting{suggestion(name, known)}"
                    if first["type"] == "extra_forbidden"
                    else first["msg"].removeprefix("Value error, ")
                )
                raise UsageError(f"step {step.kind}: {name}: {text}") from error

        return self.model_copy(
            update={
                "steps": tuple(changed(step) for step in self.steps),
                "on_failure": tuple(changed(step) for step in self.on_failure),
            }
        )


def order_problems(steps: list[str], on_failure: list[str]) -> list[tuple[KeyPath, str]]:
    """What is wrong with the order of steps, by names (unknown names are skipped): ``(key path, problem)``. Pure."""
    found: list[tuple[KeyPath, str]] = []
    for index, kind in enumerate(steps):
        before = steps[:index]
        if kind in FAILURE_ONLY:
            found.append((("steps", index), f"{kind} belongs under on_failure"))
        for needed in _NEEDS.get(kind, ()):
            if needed not in before:
                found.append((("steps", index), f"{kind} needs {needed} before it"))
        if kind in _ONCE and kind in before:
            found.append((("steps", index), f"{kind} is there already"))
    reporting = next((kind for kind in steps if kind in REPORTING), None)
    for index, kind in enumerate(steps if reporting else ()):
        if kind in STEPS and kind not in (*REPORTING, *_BESIDE, *FAILURE_ONLY):
            text = f"{kind} has no place beside {reporting}, after whose failure the run goes on: put it into a playbook for deploy"
            found.append((("steps", index), text))
        if kind == "trend" and index < len(steps) - 1:
            found.append((("steps", index), "trend comes last: it compares what the others found"))
    for index, kind in enumerate(on_failure):
        if reporting and kind in _DISTURBING:
            found.append(
                (("on_failure", index), f"{kind} has no place in a playbook that reports ({reporting})")
            )
            continue
        before = on_failure[:index]
        if kind in STEPS and kind not in FAILURE_STEPS:
            found.append(
                (
                    ("on_failure", index),
                    f"{kind} cannot be done after a failure (allowed: {', '.join(FAILURE_STEPS)})",
                )
            )
        elif kind == "rollback" and not {"activate", "go_back"} & set(steps):
            found.append(
                (("on_failure", index), "rollback needs activate among the steps: nothing else is undone")
            )
        elif kind == "capture":
            destroyers = [other for other in before if other in _DISTURBING]
            if destroyers:
                text = f"capture comes first: {destroyers[0]} would destroy the evidence"
                found.append((("on_failure", index), text))
    return found
