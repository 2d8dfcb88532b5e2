"""Exit codes and the one exception tree.

::

    OpsError                     exit 1   anything we can explain
    ├── UsageError               exit 2   the command line is wrong
    ├── ConfigError              exit 78  an inventory, playbook, runtime description or signature file is wrong
    ├── UnreachableError         exit 4   no session to the host
    │   ├── HostKeyError                  unknown or changed host key
    │   └── AuthError                     the host refused our keys
    ├── RemoteError              exit 1   the host answered with a failure
    │   ├── DeadlineError                 the host did not answer in time
    │   └── SudoError                     ``sudo -n`` was refused
    ├── BuildError               exit 1   a runtime could not be built
    │   └── PatchError                    a hunk does not fit
    ├── PreflightError           exit 5   the host cannot take this deployment
    ├── HealthTimeout            exit 3   not ready in time
    ├── CheckFailed              exit 5   a check or a fatal signature failed
    ├── Inconclusive             exit 8   no data: never a pass
    │   └── NotDeployed                   nothing was ever deployed there; exit 1 where it was to be acted on
    ├── LockHeld                 exit 6   another deployment holds the service
    │   └── LockLost                      our own lock was broken, or ran out
    ├── RolledBack               exit 7   failed, and the last good release serves again
    ├── Interrupted              exit 130 somebody pressed Ctrl-C, or ended us
    └── LabError                 exit 1   a lab host could not be made or started

Every error says which host, which phase, what state was left and what to type next. ``str(error)`` is
one line; :meth:`OpsError.render` is the whole text. Errors never contain secrets or shell text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

__all__ = [
    "AuthError",
    "BuildError",
    "CheckFailed",
    "ConfigError",
    "DeadlineError",
    "ExitCode",
    "HealthTimeout",
    "HostKeyError",
    "Inconclusive",
    "Interrupted",
    "LabError",
    "LockHeld",
    "LockLost",
    "NotDeployed",
    "OpsError",
    "PatchError",
    "PreflightError",
    "RemoteError",
    "RolledBack",
    "SudoError",
    "UnreachableError",
    "UsageError",
    "heed_interruption",
    "heeding",
]


class ExitCode(IntEnum):
    """Exit status of ``ddtree-ops``; stable, for use in CI."""

    OK = 0
    ERROR = 1
    USAGE = 2
    HEALTH_TIMEOUT = 3
    UNREACHABLE = 4
    CHECK_FAILED = 5
    LOCK_HELD = 6
    ROLLED_BACK = 7
    INCONCLUSIVE = 8
    CONFIG = 78
    INTERRUPTED = 130


class OpsError(Exception):
    """An error that can be explained to a person.

    :param message: what went wrong, one sentence.
    :param host: inventory name of the host, if one is concerned.
    :param phase: the step under way (``push``, ``activate``, ``wait`` ...).
    :param state: what state the host was left in ("the previous release keeps serving").
    :param hint: what to do next, ideally a command to type.
    :param details: further lines (captured output, a list of problems).
    """

    exit_code: ExitCode = ExitCode.ERROR

    def __init__(
        self,
        message: str,
        *,
        host: str = "",
        phase: str = "",
        state: str = "",
        hint: str = "",
        details: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.host = host
        self.phase = phase
        self.state = state
        self.hint = hint
        self.details = details

    def at(self, *, host: str = "", phase: str = "", state: str = "", hint: str = "") -> OpsError:
        """Fill in what the raiser did not know; fields already set are kept. Returns ``self``."""
        self.host = self.host or host
        self.phase = self.phase or phase
        self.state = self.state or state
        self.hint = self.hint or hint
        return self

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.host, self.phase) if part)
        return f"{where}: {self.message}" if where else self.message

    def render(self) -> str:
        """The whole text: message, details, state left, next step; one fact a line."""
        lines = [str(self), *(f"  {line}" for line in self.details)]
        if self.state:
            lines.append(f"  state: {self.state}")
        if self.hint:
            lines.append(f"  next:  {self.hint}")
        return "\n".join(lines)


class UsageError(OpsError):
    """The command line is wrong."""

    exit_code = ExitCode.USAGE


class ConfigError(OpsError):
    """A file that people write is wrong; ``details`` holds one ``file:line: key: problem`` an entry."""

    exit_code = ExitCode.CONFIG


class UnreachableError(OpsError):
    """There is no session to the host."""

    exit_code = ExitCode.UNREACHABLE


class HostKeyError(UnreachableError):
    """The host key is unknown, changed, or not the pinned one."""


class AuthError(UnreachableError):
    """The host refused every key we offered."""


class RemoteError(OpsError):
    """The host answered a request with a failure."""


class DeadlineError(RemoteError):
    """A request was not answered within its deadline."""


class SudoError(RemoteError):
    """``sudo -n`` was refused or is missing."""


class BuildError(OpsError):
    """A runtime could not be built."""


class PatchError(BuildError):
    """A patch does not fit; names the file and the line."""


class PreflightError(OpsError):
    """The host cannot take this deployment; nothing was changed."""

    exit_code = ExitCode.CHECK_FAILED


class HealthTimeout(OpsError):
    """The service was not ready in time."""

    exit_code = ExitCode.HEALTH_TIMEOUT


class CheckFailed(OpsError):
    """A check or a fatal signature failed."""

    exit_code = ExitCode.CHECK_FAILED


class Inconclusive(OpsError):
    """There was no data to judge by: never a pass."""

    exit_code = ExitCode.INCONCLUSIVE


class NotDeployed(Inconclusive):
    """Nothing was ever deployed on the host: there is nothing to look at, or to act on.

    :param acting: something was to be done, not only looked at: exit code 1.
    :param hint: the command that deploys it.
    """

    def __init__(self, unit: str, host: str, *, acting: bool = False, hint: str = "") -> None:
        super().__init__(
            f"nothing deployed: {unit} does not exist on {host}",
            host=host,
            state="nothing was changed",
            hint=hint or f"ddtree-ops deploy {host}",
        )
        if acting:
            self.exit_code = ExitCode.ERROR


class LockHeld(OpsError):
    """Somebody else is deploying this service."""

    exit_code = ExitCode.LOCK_HELD


class LockLost(LockHeld):
    """The lock that we held was broken or ran out: nothing more is touched."""


class RolledBack(OpsError):
    """The deployment failed and the last good release serves again."""

    exit_code = ExitCode.ROLLED_BACK


class Interrupted(OpsError):
    """Ctrl-C, SIGTERM or SIGHUP came before the end."""

    exit_code = ExitCode.INTERRUPTED


class LabError(OpsError):
    """A lab host could not be made or started."""


def heed_interruption(error: BaseException) -> None:
    """Let an interruption be one, where something else that failed on the way out has taken its place.

    Ctrl-C comes anywhere: between a resource and the block that cleans it up, in a thread's start, in the middle of a
    request. What cleans up may then raise an error of its own, and that one arrives, with the interruption as its
    context. To be called wherever errors are caught to be judged, or to go on after them.

    :raises KeyboardInterrupt: one is among the causes and contexts of ``error``.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        if isinstance(one, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        seen.add(id(one))
        waiting += (one.__cause__, one.__context__)


@contextmanager
def heeding() -> Iterator[None]:
    """What fails in the block goes on as it is, or as the interruption that it hides: see :func:`heed_interruption`."""
    try:
        yield
    except Exception as error:
        heed_interruption(error)
        raise
