"""What the commands share: options, consoles, selection, the way results are printed."""

from __future__ import annotations

import inspect
import json
import shlex
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from weakref import WeakSet

import typer

from ddtree_ops.errors import ConfigError, ExitCode, OpsError, UsageError, heeding
from ddtree_ops.paths import signature_directories
from ddtree_ops.report.output import Output
from ddtree_ops.secret import masked

if TYPE_CHECKING:
    from ddtree_ops.deploy.guard import Safety
    from ddtree_ops.deploy.saved import Expectation
    from ddtree_ops.inventory.models import Inventory, RuntimeSpec, Target
    from ddtree_ops.playbook.models import Playbook
    from ddtree_ops.playbook.rollout import Rollout
    from ddtree_ops.remote.session import Session

__all__ = [
    "EVIDENCE_JOURNAL",
    "CanaryOption",
    "ConfirmWithinOption",
    "Duration",
    "ExcludeOption",
    "Hosts",
    "HostsOrFiles",
    "InventoryOption",
    "JsonOption",
    "LimitOption",
    "LockWaitOption",
    "MaxFailOption",
    "NoRollbackOption",
    "ParallelOption",
    "RuntimeOption",
    "SerialOption",
    "ServiceOption",
    "SetOption",
    "SignaturesOption",
    "check_signatures",
    "err",
    "is_path",
    "leave",
    "log_path",
    "logs_and_hosts",
    "masked_session",
    "narrowing",
    "no_such_file",
    "on_all",
    "on_hosts",
    "open_session",
    "out",
    "parted",
    "play",
    "print_json",
    "refuse_binary",
    "rolling",
    "rollout",
    "runtime_spec",
    "safety_of",
    "same_again",
    "selecting",
    "targets_of",
]

_S = TypeVar("_S")
_T = TypeVar("_T")
EVIDENCE_JOURNAL = "journal.jsonl"
_NEWEST = 3
_UNPACKED = (
    b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"PK\x05\x06", b"LPKSHHRH", b"\x04\x22\x4d\x18",
    b"\xff\xfe", b"\xfe\xff",
)  # fmt: skip
"""How files begin that are unpacked, or refused with a word on how to read them; and text of two bytes a letter."""
_IN_TEXT = frozenset(b"\0\t\n\r\b\f\x1b")
"""Control characters of logs: a log that was truncated under its writer begins with NUL."""
_FILE_ENDINGS = frozenset((".bz2", ".gz", ".json", ".jsonl", ".log", ".txt", ".whl", ".xz"))

out = Output()
err = Output(stderr=True)


def _duration(text: str) -> float:
    from ddtree_ops.inventory.models import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Duration = partial(typer.Option, parser=_duration, metavar="DURATION")
"""An option with a length of time, in seconds: ``90``, ``90s``, ``30m``, ``1h30m``."""

Hosts = Annotated[
    list[str] | None,
    typer.Argument(
        help="Hosts, groups, globs, ranges (gpu[01-30]); &PATTERN keeps, !PATTERN takes away.",
        show_default=False,
    ),
]
HostsOrFiles = Annotated[
    list[str] | None,
    typer.Argument(help="Hosts, log files, or - for standard input.", show_default=False),
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--limit", "-l", metavar="PATTERN", help="Of these hosts only those that PATTERN names too."
    ),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option("--exclude", "-x", metavar="PATTERN", help="Of these hosts none that PATTERN names."),
]
InventoryOption = Annotated[
    str | None,
    typer.Option(
        "--inventory",
        "-i",
        metavar="NAME|PATH",
        help="Inventory; default $DDTREE_OPS_INVENTORY or production.",
    ),
]
NoRollbackOption = Annotated[
    bool,
    typer.Option("--no-rollback", help="Leave what failed as it is, for inspection; the host arms nothing."),
]
ConfirmWithinOption = Annotated[
    float | None,
    Duration(
        "--confirm-within",
        help="What passed must be confirmed by ddtree-ops confirm within this time, else the host goes back.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
LockWaitOption = Annotated[
    float | None,
    Duration(
        "--lock-wait",
        help="Wait so long for somebody else's lock, e.g. 30m. Default: not at all.",
    ),
]
ServiceOption = Annotated[str | None, typer.Option("--service", "-s", help="Only this service of the hosts.")]
SignaturesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--signatures-dir",
        metavar="DIR",
        help="Signatures of your own, besides those of $DDTREE_OPS_SIGNATURES and the configuration.",
    ),
]
SerialOption = Annotated[
    str | None,
    typer.Option(
        "--serial",
        metavar="N|N%|...",
        help="Hosts a batch, or several steps: 1,10%,100%. Default: all at once.",
    ),
]
CanaryOption = Annotated[
    int | None,
    typer.Option("--canary", min=0, metavar="N", help="N hosts first, which must pass before the rest."),
]
MaxFailOption = Annotated[
    str | None,
    typer.Option(
        "--max-fail",
        metavar="N|N%",
        help="Start no further host once more than this many failed. Default: 0 with batches, else no limit.",
    ),
]
ParallelOption = Annotated[
    int | None, typer.Option("--parallel", min=1, metavar="N", help="Hosts under way at once. Default: 32.")
]
RuntimeOption = Annotated[str | None, typer.Option("--runtime", help="Another runtime of the inventory.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting, e.g. speculative.budget=16 or args.mem-fraction-static=0.85.",
    ),
]


def targets_of(
    hosts: Sequence[str] | None,
    *,
    inventory: str | None,
    service: str | None = None,
    runtime: str | None = None,
    settings: Sequence[str] | None = None,
    default_all: bool = False,
    whole: bool | None = None,
) -> tuple[Inventory, list[Target]]:
    """The inventory and the selected targets with ``--runtime``, ``--set``, ``--limit`` and ``--exclude`` applied.

    :param whole: a node of a service over several hosts stands for all of them; left out: for commands that do not take
        every host by default, which are those that change something.
    """
    from ddtree_ops.inventory import load_inventory, override, select
    from ddtree_ops.report.typed import remember_inventory

    if inventory is not None:
        remember_inventory(inventory)
    loaded = load_inventory(inventory)
    limit, exclude = _narrowed.get()
    targets = select(
        loaded,
        list(hosts or ()),
        service=service,
        default_all=default_all,
        limit=limit,
        exclude=exclude,
        whole=not default_all if whole is None else whole,
    )
    if runtime is not None:
        runtime_spec(loaded, runtime)
    wanted = [*(settings or ()), *([f"runtime={runtime}"] if runtime is not None else ())]
    return loaded, [override(target, wanted, inventory=loaded) for target in targets]


_narrowed: ContextVar[tuple[Sequence[str], Sequence[str]]] = ContextVar("narrowed", default=((), ()))


def narrowing() -> list[str]:
    """Which of the options were given that only narrow a selection of hosts."""
    return [name for name, given in zip(("--limit", "--exclude"), _narrowed.get(), strict=True) if given]


def selecting(app: typer.Typer) -> None:
    """Give every command that takes hosts (an argument :data:`Hosts`) ``--limit`` and ``--exclude`` too."""
    for info in app.registered_commands:
        if info.callback is not None:
            info.callback = _selecting(info.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            selecting(group.typer_instance)


def _selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    if not {"Hosts", "HostsOrFiles"} & set(command.__annotations__.values()):
        return command

    def keep(limit: list[str] | None, exclude: list[str] | None) -> None:
        _narrowed.set((limit or (), exclude or ()))

    return _with_options(command, {"limit": LimitOption, "exclude": ExcludeOption}, keep)


_rolled: ContextVar[Mapping[str, Any]] = ContextVar("rolled", default={})  # noqa: B039


def rolling(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that plays a playbook ``--serial``, ``--canary``, ``--max-fail`` and ``--parallel`` too."""

    def keep(**given: Any) -> None:
        _rolled.set({name: value for name, value in given.items() if value is not None})

    options = {
        "serial": SerialOption,
        "canary": CanaryOption,
        "max_fail": MaxFailOption,
        "parallel": ParallelOption,
    }
    return _with_options(command, options, keep)


def rollout() -> Rollout:
    """How a command that :func:`rolling` extends goes over its hosts. :raises UsageError: a wrong number."""
    from ddtree_ops.playbook.rollout import rollout_of

    return rollout_of(**_rolled.get())


def _with_options(
    command: Callable[..., Any], options: Mapping[str, Any], keep: Callable[..., None]
) -> Callable[..., Any]:
    """``command`` with options more, which ``keep`` is given before it runs."""

    @wraps(command)
    def extended(**given: Any) -> Any:
        own = {name: given.pop(name) for name in options}
        context = copy_context()
        context.run(keep, **own)
        return context.run(command, **given)

    plain = inspect.signature(command, eval_str=True)
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    extended.__dict__["__signature__"] = plain.replace(parameters=[*plain.parameters.values(), *more])
    return extended


def runtime_spec(inventory: Inventory, name: str) -> RuntimeSpec:
    """A runtime of the inventory.

    :raises UsageError: there is none of that name; names the nearest.
    """
    from ddtree_ops.inventory.yaml_source import suggestion

    if name not in inventory.runtimes:
        raise UsageError(
            f"no runtime '{name}' in {inventory.path}{suggestion(name, inventory.runtimes)}",
            hint=f"it has: {', '.join(inventory.runtimes)}",
        )
    return inventory.runtimes[name]


_opened: WeakSet[Session] = WeakSet()
"""Sessions to close where an interruption ends what several threads do."""
_ended = threading.Event()
"""Set once one did: what is opened from then on is closed at once."""


def open_session(target: Target) -> Session:
    """A session to the target's host."""
    from ddtree_ops.inventory import connect_spec
    from ddtree_ops.remote import connect

    session = connect(connect_spec(target.host))
    _opened.add(session)
    if _ended.is_set():
        session.close()
    return session


@contextmanager
def masked_session(target: Target) -> Iterator[Session]:
    """A session to the target's host; the secrets that the service has there are masked in what is shown."""
    from ddtree_ops.deploy.secrets import read_host_secrets
    from ddtree_ops.service.layout import Layout

    with open_session(target) as session:
        read_host_secrets(session, Layout.of(target))
        yield session


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    try:
        sys.stdout.write(masked(json.dumps(value, indent=2, ensure_ascii=False, default=str)) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        out.on_broken_pipe()


def play(
    playbook: str | Playbook,
    targets: Sequence[Target],
    *,
    as_json: bool,
    overrides: dict[str, dict[str, Any]] | None = None,
    expected: Mapping[str, Expectation] | None = None,
    safety: Safety | None = None,
) -> None:
    """Run a playbook (by name or path, or as it is) over targets, print the outcome, exit with its code.

    :param overrides: step kind -> arguments given on the command line.
    :param expected: saved plans by name of the target, each to be applied as it is or not at all.
    :param safety: how failures are guarded against.
    """
    if any(target.service.secrets for target in targets):
        from ddtree_ops.deploy.secrets import resolve_secrets
        from ddtree_ops.playbook.load import load_playbook
        from ddtree_ops.playbook.run import needed_secrets

        if isinstance(playbook, str):
            playbook = load_playbook(playbook)
        resolve_secrets(targets, only=needed_secrets(playbook))

    from ddtree_ops.playbook.rollout import first_hosts
    from ddtree_ops.remote.ahead import Ahead
    from ddtree_ops.remote.lean import import_fabric

    import_fabric()
    wished = rollout()
    openers = {target.host.name: partial(open_session, target) for target in targets}
    with Ahead(openers, first_hosts(targets, wished), parallel=wished.parallel) as sessions:
        from ddtree_ops.playbook.load import load_playbook
        from ddtree_ops.playbook.run import exit_code, run_playbook
        from ddtree_ops.report.progress import progress_for

        if not as_json:
            from ddtree_ops.report.summary import print_results
        if isinstance(playbook, str):
            playbook = load_playbook(playbook)
        kinds = {step.kind for step in playbook.steps}
        if kinds & {"wait", "smoke", "signatures"} and "go_back" not in kinds:
            check_signatures()
        if overrides:
            playbook = playbook.with_arguments(overrides)
        with progress_for(err if as_json else out, len(targets)) as report:
            results = run_playbook(
                playbook,
                targets,
                connect=lambda target: sessions.take(target.host.name),
                report=report,
                expected=expected,
                rollout=wished,
                reconnect=open_session,
                safety=safety,
            )
    if as_json:
        print_json([result.to_json() for result in results])
    else:
        print_results(out, results)
    raise typer.Exit(int(exit_code(results)))


def check_signatures() -> None:
    """Read the signatures of the user's own, for a command that needs them later: now nothing is changed yet.

    :raises ConfigError: a file is wrong.
    """
    directories = signature_directories()
    if not directories:
        return
    from ddtree_ops.diagnose.library import read_signature, signature_files

    try:
        for directory in directories:
            for path in signature_files(directory):
                read_signature(path)
    except ConfigError as error:
        error.state = error.state or "nothing was changed"
        raise


def on_all(targets: Sequence[Target], action: Callable[[Target], _T]) -> list[_T | OpsError]:
    """Every host to its end; an error takes the place of the host's outcome."""

    def one(target: Target) -> _T | OpsError:
        return _tried(target.name, partial(action, target))

    if len(targets) == 1:
        return [one(targets[0])]
    return _at_once(one, targets)


def _at_once(work: Callable[[_S], _T], items: Iterable[_S]) -> list[_T]:
    """All in threads. An interruption closes the sessions that they work over, so that it ends all of them at once."""
    items = list(items)
    _ended.clear()
    with ThreadPoolExecutor(max_workers=min(32, len(items))) as pool:
        try:
            return list(pool.map(work, items))
        except KeyboardInterrupt:
            _ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for session in list(_opened):
                session.close()
            raise


def on_hosts(targets: Sequence[Target], action: Callable[[Session, Target], _T]) -> list[_T | OpsError]:
    """As :func:`on_all`, over one session a host: services of the same host take turns."""
    from ddtree_ops.remote.lean import import_fabric

    import_fabric()
    hosts: dict[str, list[Target]] = {}
    for target in targets:
        hosts.setdefault(target.host.name, []).append(target)

    def one_host(group: list[Target]) -> list[_T | OpsError]:
        try:
            session = open_session(group[0])
        except OpsError as error:
            error.at(host=group[0].host.name, phase="connect")
            return [error for _ in group]
        except Exception as error:
            return [_internal(error, group[0].host.name) for _ in group]
        with session:
            return [_tried(target.name, partial(action, session, target)) for target in group]

    done = _at_once(one_host, hosts.values())
    found = {name: iter(each) for name, each in zip(hosts, done, strict=True)}
    return [next(found[target.host.name]) for target in targets]


def _tried(host: str, action: Callable[[], _T]) -> _T | OpsError:
    try:
        with heeding():
            return action()
    except OpsError as error:
        return error.at(host=host)
    except Exception as error:
        return _internal(error, host)


def parted(
    targets: Sequence[Target], outcomes: Sequence[_T | OpsError]
) -> tuple[list[OpsError], list[tuple[str, _T]]]:
    """Errors, and what was found by name of the target; from :func:`on_all` or :func:`on_hosts`."""
    failed = [outcome for outcome in outcomes if isinstance(outcome, OpsError)]
    done = [
        (target.name, outcome)
        for target, outcome in zip(targets, outcomes, strict=True)
        if not isinstance(outcome, OpsError)
    ]
    return failed, done


def _internal(error: Exception, host: str) -> OpsError:
    """A defect of ours is one host's failure too; the others run on."""
    from ddtree_ops.playbook.run import internal_error

    return internal_error(error, host=host)


def leave(failed: Sequence[OpsError], code: ExitCode | None) -> None:
    """Print the errors and leave with the worst code; ``code`` is that of the hosts without one, None: no such host."""
    from ddtree_ops.playbook.run import worst_code
    from ddtree_ops.report.typed import typed

    for error in failed:
        err.print(f"error: {typed(error.render())}", markup=False, soft_wrap=True)
    codes = [error.exit_code for error in failed]
    raise typer.Exit(int(worst_code(codes if code is None else [*codes, code])))


def safety_of(
    command: str,
    *,
    no_rollback: bool = False,
    confirm_within: float | None = None,
    lock_wait: float | None = None,
    again: str = "",
    lint: str = "",
) -> Safety:
    """How careful a command is, from its options; times in seconds.

    :param again: see :func:`same_again`; ``lint``: likewise, the command that lints the same settings.
    :raises UsageError: options that contradict each other.
    """
    from ddtree_ops.deploy.guard import Safety

    return Safety.of(
        command=command,
        rollback=not no_rollback,
        confirm_within=confirm_within,
        lock_wait=lock_wait,
        again=again,
        lint=lint,
    )


def same_again(command: str, **given: Any) -> str:
    """The command that was typed, for one host, to be typed again: ``{host}`` stands where the host goes.

    A value that looks like a secret is left out, with a word in its place.

    :param given: options as the command took them, by their name with ``_`` for ``-``.
    """
    from ddtree_ops.secret import is_secret_name, redact

    words = ["ddtree-ops", *command.split(), "{host}"]
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            if each is None or each is False:
                continue
            key = str(each).partition("=")[0]
            if option == "--set" and (is_secret_name(key) or redact(str(each)) != str(each)):
                each = f"{key}=VALUE-NOT-SHOWN"
            words += [option] if each is True else [option, shlex.quote(str(each))]
    return " ".join(words)


def is_path(word: str) -> bool:
    """A file or folder rather than a name of the inventory: it is there, or is written like a path."""
    path = Path(word)
    return path.exists() or "/" in word or path.suffix in _FILE_ENDINGS


def logs_and_hosts(words: Sequence[str] | None, inventory: str | None) -> tuple[list[str], list[str]]:
    """The words of a command that takes both, each once: log files (``-`` too), then hosts, ``HOST/SERVICE`` and patterns.

    A file is what is there, or is written as only a file is: ``/x``, ``./x``, ``x.log``. Where a word without such a
    mark is a file and names a host of the inventory too, it is the host, and that is said.

    :raises UsageError: an empty word.
    """
    files: list[str] = []
    hosts: list[str] = []
    for word in dict.fromkeys(words or ()):
        if not word.strip():
            raise UsageError("an empty word names no host and no file", hint="quote what has blanks in it")
        path = Path(word).expanduser()
        marked = word == "-" or word.startswith(("/", "./", "../", "~")) or path.suffix in _FILE_ENDINGS
        there = not marked and (_is_log(path) or _is_log(path / EVIDENCE_JOURNAL))
        if there and _is_host(word, inventory):
            err.print(
                f"{word} is read as the host of the inventory; the file is ./{word}",
                markup=False,
                soft_wrap=True,
            )
            there = False
        (files if marked or there else hosts).append(word)
    return files, hosts


def _is_host(word: str, inventory: str | None) -> bool:
    from ddtree_ops.inventory import load_inventory

    try:
        loaded = load_inventory(inventory)
    except OpsError:
        return False
    host, _, service = word.partition("/")
    if not service:
        return host == "all" or host in loaded.hosts or host in loaded.groups
    return host in loaded.hosts and service in loaded.hosts[host].services


def _mode(path: Path) -> int:
    """``st_mode``; 0 where there is nothing, or where no file can be called so (a pasted text)."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def _is_log(path: Path) -> bool:
    mode = _mode(path)
    return bool(mode) and not stat.S_ISDIR(mode)


def log_path(name: str) -> Path:
    """The file that a word names; of an evidence folder its journal. :raises UsageError: it is not there."""
    path = Path(name).expanduser()
    if stat.S_ISDIR(_mode(path)):
        if not _is_log(path / EVIDENCE_JOURNAL):
            raise UsageError(
                f"{name} is a folder, and not one of evidence: there is no {EVIDENCE_JOURNAL} in it",
                hint=f"name the log files in it: {_logs_in(path, name)}",
            )
        return path / EVIDENCE_JOURNAL
    if name != "-" and not _mode(path):
        raise UsageError(f"{name}: No such file or directory")
    return path


def _logs_in(folder: Path, name: str) -> str:
    """What to type for a folder: its newest folders of evidence, or else all that is in it."""
    base = "" if name in ("", ".") else f"{name.rstrip('/')}/"
    try:
        kept = sorted(
            (each.name for each in folder.iterdir() if _is_log(each / EVIDENCE_JOURNAL)), key=_stamp
        )
    except OSError:
        kept = []
    if not kept:
        return f"{base}*"
    more = f"  (the newest of {len(kept)})" if len(kept) > _NEWEST else ""
    return " ".join(shlex.quote(f"{base}{each}") for each in reversed(kept[-_NEWEST:])) + more


def _stamp(name: str) -> str:
    """What folders of evidence are ordered by: the time at their end."""
    return name.rpartition("-")[2]


def refuse_binary(name: str) -> None:
    """:raises UsageError: the file that a word names is not there, or is no text and nothing that is unpacked."""
    path = log_path(name)
    if name == "-" or not stat.S_ISREG(_mode(path)):
        return
    try:
        with path.open("rb") as opened:
            head = opened.read(4096)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}") from error
    if head.startswith(_UNPACKED):
        return
    odd = sum(byte < 32 and byte not in _IN_TEXT for byte in head)
    if head.startswith(b"\x7fELF") or odd > max(4, len(head) // 50):
        raise UsageError(f"{name} is no text", hint="name the log that a server wrote, compressed or not")


def no_such_file(error: UsageError, words: Sequence[str]) -> UsageError:
    """The error of a selection of hosts, which says too what a word would be that was meant for a file, or for a log."""
    for word in words:
        if len(word.split()) > 3:
            error.message = f"{word.split(chr(10))[0][:60]!r} is neither a host nor a file"
            error.hint = "to have a pasted text explained, paste it into: ddtree-ops diagnose -"
        elif stat.S_ISDIR(_mode(Path(word))):
            error.message += f"; the folder {word} is no evidence: there is no {EVIDENCE_JOURNAL} in it"
            error.message += f" (for the logs in it type {_logs_in(Path(word), word)})"
        elif "/" in word and "*" not in word:
            error.message += f"; nor is there a file {word}"
    return error
