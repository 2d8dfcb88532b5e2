"""The command ``smoke``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli.common import (
    Duration,
    Hosts,
    InventoryOption,
    JsonOption,
    ServiceOption,
    check_signatures,
    err,
    leave,
    masked_session,
    on_all,
    out,
    parted,
    print_json,
    targets_of,
)

if TYPE_CHECKING:
    from ddtree_ops.inventory.models import Target

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("smoke")(smoke)


def smoke(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Named prompt (quicksort, ...) or free text.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=2, help="Tokens to generate.")] = None,
    window: Annotated[
        float | None, Duration("--window", help="How long the unit is held afterwards.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """One real completion on every host, then hold the unit, scan its journal, report acceptance and graphs."""
    from ddtree_ops.checks.smoke import SmokeReport, run_smoke
    from ddtree_ops.deploy.secrets import API_KEY, resolve_secrets
    from ddtree_ops.report.progress import progress_for
    from ddtree_ops.report.summary import print_answer, print_checks, print_diagnosis
    from ddtree_ops.results import exit_code_of, worst

    _, targets = targets_of(hosts, inventory=inventory, service=service, default_all=True)
    check_signatures()
    keys = {
        target.name: secrets.api_key
        for target, secrets in zip(targets, resolve_secrets(targets, only=API_KEY), strict=True)
    }
    with progress_for(err, len(targets)) as report:

        def one(target: Target) -> SmokeReport:
            with masked_session(target) as session:
                return run_smoke(
                    session,
                    target,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    window=window,
                    report=report,
                    api_key=keys[target.name],
                )

        failed, done = parted(targets, on_all(targets, one))
    checks = [replace(check, host=name) for name, outcome in done for check in outcome.results]
    found = [
        (name, outcome.diagnosis)
        for name, outcome in done
        if outcome.diagnosis and outcome.diagnosis.diagnoses
    ]
    if as_json:
        print_json(
            {
                "schema": 1,
                "checks": [check.to_json() for check in checks],
                "diagnoses": [{"source": name, **diagnosis.to_json()} for name, diagnosis in found],
                "errors": [error.render() for error in failed],
            }
        )
    else:
        print_checks(out, checks)
        for name, outcome in done:
            if outcome.chat is not None and outcome.chat.text:
                print_answer(out, name, outcome.chat.text)
        for name, diagnosis in found:
            print_diagnosis(out, diagnosis, host=name)
    leave(failed, exit_code_of(worst(check.verdict for check in checks)) if done else None)
