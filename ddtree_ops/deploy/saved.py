"""Plans kept in a file: what was shown, for which hosts, and how those hosts stood then.

The file holds no secret: unit texts and variables are in it masked, as they were shown, and what is applied later is
made afresh from the inventory. It must then be the very same thing, on a host that stands as it stood, or nothing is
changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddtree_ops.atomic import write_text
from ddtree_ops.deploy.identity import origin, who
from ddtree_ops.deploy.plan import Observed, Plan, Wish, text_sha256
from ddtree_ops.errors import ConfigError, OpsError, UsageError
from ddtree_ops.inventory.models import Inventory, RuntimeSpec, Target
from ddtree_ops.remote.session import Session
from ddtree_ops.runtime import Bundle, known_bundle
from ddtree_ops.secret import is_secret_name, redact

__all__ = [
    "Expectation",
    "Fingerprint",
    "Planned",
    "SavedPlan",
    "check_settings",
    "fingerprint",
    "look_and_plan",
    "read_plan",
    "save_plans",
    "write_plan",
]

_KIND = "ddtree-ops plan"
_SCHEMA = 1


@dataclass(frozen=True)
class Fingerprint:
    """How a host stood: what a plan was made from, in a form that can be kept and compared.

    :param release: digest that ``current`` points at; empty: none.
    :param unit_sha256: of the installed unit file; empty: none.
    :param invocation: the run of the unit; empty: none.
    :param activation: id of the latest entry of its history; empty: none.
    :param verdict: of that entry.
    :param published: the wished release is on the host.
    :param damaged: and is not as built.
    :param secrets: what differs in the secrets that it has, by name.
    """

    release: str = ""
    unit_sha256: str = ""
    running: bool = False
    invocation: str = ""
    needs_reload: bool = False
    drop_ins: tuple[str, ...] = ()
    activation: str = ""
    verdict: str = ""
    published: bool = False
    damaged: bool = False
    secrets: tuple[str, ...] = ()


_WORDS = {
    "release": "the release that current points at",
    "unit_sha256": "the unit file (first 12 digits of its sha256)",
    "running": "whether the unit runs",
    "invocation": "the run of the unit",
    "needs_reload": "whether systemd has an older unit file in memory",
    "drop_ins": "drop-ins of the unit",
    "activation": "the latest entry of its history",
    "verdict": "the verdict on that entry",
    "published": "whether the wished release is on the host",
    "secrets": "what is to be done about its secrets",
    "damaged": "whether files of that release are not as built",
}


def fingerprint(wish: Wish, observed: Observed) -> Fingerprint:
    """How the host stands, as far as a plan for ``wish`` depends on it."""
    latest = observed.history.latest
    return Fingerprint(
        release=observed.release or "",
        unit_sha256="" if observed.unit_text is None else text_sha256(observed.unit_text),
        running=observed.state.running,
        invocation=observed.state.invocation_id,
        needs_reload=observed.state.need_daemon_reload,
        drop_ins=(*observed.state.drop_in_paths, *observed.state.unread_drop_ins),
        activation=latest.id if latest else "",
        verdict=latest.verdict.value if latest and latest.verdict else "",
        published=wish.release in observed.releases,
        damaged=bool(observed.repaired),
        secrets=(*observed.secrets, *(f"remove {name}" for name in observed.stale_secrets)),
    )


@dataclass(frozen=True)
class Expectation:
    """What a saved plan says of one target.

    :param release: digest of the release that is to run, ``unit_sha256`` of the unit file that is to be installed.
    :param shown: the plan as it was shown, as JSON.
    :param again: the command that makes it anew; empty where it was not read from a file.
    """

    target: str
    service: str
    host: str
    digest: str
    release: str
    unit_sha256: str
    stood: Fingerprint
    shown: Mapping[str, Any] = field(default_factory=dict, repr=False)
    again: str = ""

    @classmethod
    def of(cls, plan: Plan, observed: Observed, *, host: str) -> Expectation:
        """What is to be kept of a plan that was just made."""
        return cls(
            target=plan.wish.host,
            service=plan.wish.service,
            host=host,
            digest=plan.digest,
            release=plan.wish.release,
            unit_sha256=text_sha256(plan.wish.unit_text),
            stood=fingerprint(plan.wish, observed),
            shown=plan.to_json(),
        )

    def differences(self, plan: Plan, observed: Observed) -> tuple[str, ...]:
        """What is not as it was when the plan was saved, one line each; empty: it may be applied."""
        found = []
        if plan.wish.release != self.release:
            found.append(
                f"the runtime is now built as {plan.wish.release[:12]}, planned was {self.release[:12]}"
            )
        if text_sha256(plan.wish.unit_text) != self.unit_sha256:
            found.append("the inventory now gives another unit file than was planned")
        now = fingerprint(plan.wish, observed)
        for item in fields(Fingerprint):
            before, after = getattr(self.stood, item.name), getattr(now, item.name)
            if before != after and not (
                item.name in ("published", "damaged") and plan.wish.release != self.release
            ):
                found.append(f"{_WORDS[item.name]}: was {_shown(before)}, is {_shown(after)}")
        if plan.digest != self.digest and not found:
            found.append(f"the plan is now {plan.digest[:12]}, saved was {self.digest[:12]}")
        return tuple(found)

    def check(self, plan: Plan, observed: Observed) -> None:
        """Refuse where anything differs.

        :raises OpsError: with one line a difference.
        """
        found = self.differences(plan, observed)
        if found:
            raise OpsError(
                "the saved plan does not fit any more",
                details=found,
                hint=f"look at what would be done now: {self.again or f'ddtree-ops plan {self.host} --out FILE'}",
            )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    text = str(value)
    return (text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text[:32]) or "none"


@dataclass(frozen=True)
class SavedPlan:
    """A plan file.

    :param inventory: absolute path of the inventory; what it says now is what is applied.
    :param settings: ``--set`` of the command line, ``runtime`` its ``--runtime``.
    :param created: UTC, ISO 8601.
    """

    inventory: str
    targets: tuple[Expectation, ...]
    runtime: str | None = None
    settings: tuple[str, ...] = ()
    created: str = ""
    who: str = ""
    origin: str = ""

    @property
    def hosts(self) -> list[str]:
        """Names of its hosts, each once."""
        return list(dict.fromkeys(item.host for item in self.targets))

    def match(self, targets: Sequence[Target]) -> tuple[list[Target], dict[str, Expectation]]:
        """Of ``targets`` those that the plan is for, and what it says of each, by its name.

        :raises OpsError: a service of the plan is not in the inventory any more.
        """
        there = {(target.host.name, target.service.name): target for target in targets}
        gone = [item.target for item in self.targets if (item.host, item.service) not in there]
        if gone:
            raise OpsError(
                f"the inventory has no {', '.join(gone)} any more",
                state="nothing was changed",
                hint=self.targets[0].again,
            )
        chosen = [there[item.host, item.service] for item in self.targets]
        return chosen, {target.name: item for target, item in zip(chosen, self.targets, strict=True)}


@dataclass(frozen=True)
class Planned:
    """A plan, what it was made from, and for which host."""

    plan: Plan
    observed: Observed
    host: str


def look_and_plan(
    target: Target, session: Session, *, known: Callable[[RuntimeSpec], Bundle | None] = known_bundle
) -> Planned:
    """Look at a host, build the runtime where that was not done yet, and plan. Nothing is changed, no lock is taken.

    :param known: gives the bundle of a runtime, where there is one in the cache.
    :raises OpsError: the host could not be looked at, or the runtime not be built.
    """
    from ddtree_ops.deploy.deployment import Deployment

    deployment = Deployment(target, session, lambda event: None, bundle=known(target.runtime))
    deployment.build()
    assert deployment.plan is not None
    assert deployment.observed is not None
    return Planned(deployment.plan, deployment.observed, target.host.name)


def save_plans(
    path: Path,
    planned: Sequence[Planned],
    *,
    inventory: Inventory,
    runtime: str | None,
    settings: Sequence[str],
) -> None:
    """Keep plans in a file, with the command line that they were made by.

    :raises OpsError: it cannot be written.
    """
    write_plan(
        path,
        SavedPlan(
            inventory=str(Path(inventory.path).expanduser().absolute()),
            targets=tuple(Expectation.of(item.plan, item.observed, host=item.host) for item in planned),
            runtime=runtime,
            settings=tuple(settings),
        ),
    )


def check_settings(settings: Sequence[str]) -> None:
    """Refuse to write a secret given with ``--set`` into a plan file.

    :raises UsageError: names the setting, not its value.
    """
    for setting in settings:
        key = setting.partition("=")[0]
        if is_secret_name(key) or redact(setting) != setting:
            raise UsageError(
                f"--set {key}: a secret is not written into a plan file",
                hint=f"put it into the inventory as ${{NAME}}: {key.rpartition('.')[2]}: ${{NAME}}",
            )


def write_plan(path: Path, saved: SavedPlan) -> None:
    """Write a plan file, for its owner alone (0600), by rename.

    :raises OpsError: it cannot be written.
    """
    body = {
        "inventory": saved.inventory,
        "runtime": saved.runtime,
        "settings": list(saved.settings),
        "created": saved.created or datetime.now(UTC).isoformat(timespec="seconds"),
        "who": saved.who or who(),
        "origin": saved.origin or origin(),
        "targets": [
            {name: value for name, value in asdict(item).items() if name != "again"} for item in saved.targets
        ],
    }
    record = {"kind": _KIND, "schema": _SCHEMA, "sha256": _checksum(body), **body}
    try:
        write_text(
            path, json.dumps(record, indent=1, ensure_ascii=False) + "\n", mode=0o600, make_folder=False
        )
    except OSError as error:
        raise OpsError(f"{path} cannot be written: {error.strerror}", state="nothing was changed") from error


def read_plan(path: Path) -> SavedPlan:
    """Read a plan file.

    :raises ConfigError: there is no such file, it is damaged, or of another version.
    """
    hint = f"make a new one: ddtree-ops plan HOST --out {path}"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", state="nothing was changed", hint=hint) from None
    try:
        record = json.loads(content)
        if record["kind"] != _KIND:
            raise ValueError(f"its kind is {record['kind']!r}")
        if record["schema"] != _SCHEMA:
            raise ConfigError(
                f"{path}: written by another version (schema {record['schema']}, this one reads {_SCHEMA})",
                state="nothing was changed",
                hint=hint,
            )
        body = {key: value for key, value in record.items() if key not in ("kind", "schema", "sha256")}
        if record["sha256"] != _checksum(body):
            raise ValueError("it was changed after it was written")
        return SavedPlan(
            inventory=record["inventory"],
            targets=tuple(_expectation(item, _again(body, path)) for item in record["targets"]),
            runtime=record["runtime"],
            settings=tuple(record["settings"]),
            created=record["created"],
            who=record["who"],
            origin=record["origin"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path} is no plan file, or is damaged: {reason}", state="nothing was changed", hint=hint
        ) from None


def _again(body: Mapping[str, Any], path: Path) -> str:
    """The command that made a plan, to be typed again."""
    words = ["ddtree-ops", "plan", *dict.fromkeys(item["host"] for item in body["targets"])]
    services = {item["service"] for item in body["targets"]}
    words += ["--service", *services] if len(services) == 1 else []
    words += ["--runtime", body["runtime"]] if body["runtime"] else []
    words += [word for setting in body["settings"] for word in ("--set", setting)]
    return shlex.join([*words, "--out", str(path)])


def _expectation(item: Mapping[str, Any], again: str) -> Expectation:
    stood: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in item["stood"].items()
    }
    return Expectation(**{**item, "stood": Fingerprint(**stood)}, again=again)


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
