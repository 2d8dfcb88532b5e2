"""Telling an address of the user's own how a run ended: one JSON document by POST, tried again where that can help.

The address is a secret, for those of chat programs hold a token: it is taken from a variable or a file, is never printed,
and is masked in every message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ddtree_ops.errors import ConfigError, ExitCode
from ddtree_ops.results import Verdict
from ddtree_ops.secret import SHORTEST, Secret, learn, redact
from ddtree_ops.wording import count

if TYPE_CHECKING:
    import httpx

    from ddtree_ops.results import CheckResult
    from ddtree_ops.runreport import RunReport

__all__ = ["Sent", "post", "summary", "webhook_url"]

_TIMEOUT = 10.0
_ATTEMPTS = 5
_LONGEST_WAIT = 20.0
_SHOWN = 20
_TOLD = 3
"""Results of a target that ``text`` names, beside what its journal was found to say."""


@dataclass(frozen=True)
class Sent:
    """How it went.

    :param problem: why it did not arrive, in a sentence without the address; empty where it did.
    """

    attempts: int
    problem: str = ""


def webhook_url(*, variable: str | None = None, file: str | None = None) -> Secret | None:
    """The address, from a variable of this machine's environment or a file; None where neither is named.

    :raises ConfigError: both are named, or there is no usable address there. The message never holds it.
    """
    import os

    if variable is None and file is None:
        return None
    where = f"variable {variable}" if file is None else f"file {file}"
    if variable is not None and file is not None:
        raise _unusable("--webhook-env and --webhook-file were both given", "leave one of them out")
    if variable is not None:
        text = os.environ.get(variable)
        if text is None:
            raise _unusable(f"the {where} is not set", f"export {variable}=https://...")
    else:
        try:
            text = Path(file or "").expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise _unusable(f"the {where} cannot be read: {why}", "name one that holds the address") from None
    text = text.strip()
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and len(text) >= SHORTEST
        _ = parts.port
    except ValueError:
        usable = False
    if not usable or any(character.isspace() for character in text):
        raise _unusable(f"the {where} holds no address", "write http://... or https://... there")
    learn(*_telling(text))
    return Secret(text)


def _telling(address: str) -> tuple[str, ...]:
    """Parts of an address that nobody should see, the longest first."""
    parts = urlsplit(address)
    found = (address, parts.path, parts.path.rpartition("/")[2], parts.query, parts.password or "")
    return tuple(part for part in found if len(part) >= SHORTEST)


def _unusable(message: str, hint: str) -> ConfigError:
    return ConfigError(f"webhook: {message}", state="nothing was contacted or changed", hint=hint)


def summary(report: RunReport, code: ExitCode) -> dict[str, Any]:
    """What is sent: the verdict, and of each target what did not pass. Pure.

    ``text`` is the whole in a few lines, which chat programs show.
    """
    targets = []
    lines = [
        f"ddtree-ops {redact(report.command)} {report.verdict.value}: {count(len(report.targets), 'target')}"
    ]
    if not report.complete:
        lines[0] += ", not complete"
    for target in report.targets:
        troubled = [check for check in target.checks if check.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)]
        troubled.sort(key=lambda check: check.verdict is not Verdict.FAIL)
        found = [
            {"check": redact(check.name), "verdict": check.verdict.value, "summary": redact(check.summary)}
            for check in troubled[:_SHOWN]
        ]
        errors = [redact(error).splitlines()[0] for error in target.errors if error]
        targets.append(
            {
                "target": redact(target.target),
                "verdict": target.verdict.value,
                "not_passed": found,
                "left_out": max(0, len(troubled) - _SHOWN),
                "errors": errors,
            }
        )
        lines += _lines(f"{redact(target.target)} {target.verdict.value}", errors, troubled)
    return {
        "schema": 1,
        "command": redact(report.command),
        "id": redact(report.id),
        "version": report.version,
        "inventory": redact(report.inventory),
        "started": report.started,
        "ended": report.ended,
        "complete": report.complete,
        "verdict": report.verdict.value,
        "exit_code": int(code),
        "targets": targets,
        "text": "\n".join(lines),
    }


def _lines(head: str, errors: Sequence[str], troubled: Sequence[CheckResult]) -> list[str]:
    """A target in the text: why it crashed before what came of it, then errors and the first results that did not pass."""
    failed = [check for check in troubled if check.verdict is Verdict.FAIL]
    causes = {check.summary: check for check in failed if check.facts.get("signatures")}
    others = [check for check in troubled if check.summary not in causes]
    told = [*errors, *(redact(f"{check.name}: {check.summary}") for check in (*causes.values(), *others))]
    shown = told[: len(errors) + len(causes) + _TOLD]
    if len(told) > len(shown):
        shown.append(f"{len(told) - len(shown)} more in the report")
    return [head + (f": {shown[0]}" if shown else ""), *(f"  {line}" for line in shown[1:])]


def post(
    url: Secret,
    document: Mapping[str, Any],
    *,
    attempts: int = _ATTEMPTS,
    timeout: float = _TIMEOUT,
    longest_wait: float = _LONGEST_WAIT,
) -> Sent:
    """Send a document; never raises for what the other side, or the way there, does wrong.

    Tried again, after a wait that doubles and is shaken, where the connection failed, timed out or broke, and after 408,
    425, 429 and 5xx: what arrived twice has the same ``id``. Other answers are final; a redirection is not followed.

    :param timeout: seconds for one attempt. :param longest_wait: seconds between two of them at most.
    """
    import httpx
    import tenacity

    made = 0

    def once() -> httpx.Response:
        nonlocal made
        made += 1
        return client.post(url.reveal(), json=dict(document))

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(httpx.TransportError)
        | tenacity.retry_if_result(lambda answer: _again(answer.status_code)),
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_random_exponential(multiplier=1.0, max=longest_wait),
        reraise=True,
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
    )
    with httpx.Client(timeout=timeout, follow_redirects=False) as client:
        try:
            answer: httpx.Response = retrying(once)
        except httpx.TransportError as error:
            return Sent(made, _why(type(error).__name__, str(error), url, made))
    if answer.is_success:
        return Sent(made)
    return Sent(made, _why(f"HTTP {answer.status_code}", answer.text[:200], url, made))


def _again(status: int) -> bool:
    return status in (408, 425, 429) or status >= 500


def _why(what: str, more: str, url: Secret, attempts: int) -> str:
    text = " ".join(redact(more, *_telling(url.reveal())).split())
    return f"{what} after {count(attempts, 'attempt')}" + (f": {text}" if text else "")
