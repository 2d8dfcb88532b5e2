"""A managed sglang-router: preflight, plan, activate, wait, smoke, and back to the unit file that passed before.

The unit is small, its start takes seconds, and it holds no state worth keeping: so there is no release and nothing is
armed on the host. What passed is kept as for a service: ``units/SHA256.service`` and one line in the history.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ddtree_ops.checks.engine import EngineClient, EngineError
from ddtree_ops.checks.port import sort_holders
from ddtree_ops.checks.prompts import resolve_prompt
from ddtree_ops.checks.smoke import judge_completion
from ddtree_ops.checks.textquality import judge_text
from ddtree_ops.deploy.audit import record
from ddtree_ops.deploy.changed import kept_texts
from ddtree_ops.deploy.frame import Frame
from ddtree_ops.deploy.guard import new_lock_id, take_lock
from ddtree_ops.deploy.history import (
    Activation,
    History,
    activation_line,
    new_activation,
    parse_history,
    verdict_line,
)
from ddtree_ops.deploy.identity import origin, who
from ddtree_ops.deploy.plan import masked_unit_line, text_sha256
from ddtree_ops.deploy.refusals import result_line
from ddtree_ops.deploy.secrets import api_key_of, key_on_host, write_requests
from ddtree_ops.errors import (
    CheckFailed,
    ConfigError,
    ExitCode,
    HealthTimeout,
    Interrupted,
    OpsError,
    PreflightError,
    RolledBack,
    UsageError,
    heeding,
)
from ddtree_ops.inventory.models import Host, Inventory, Router, Target
from ddtree_ops.inventory.routers import Worker, workers
from ddtree_ops.remote.session import Request, Session
from ddtree_ops.results import CheckResult, EventKind, Evidence, Reporter, Verdict
from ddtree_ops.secret import Secret
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.router import (
    KEY_FILE,
    METRICS_HOST,
    render_router_unit,
    router_arguments,
    router_layout,
)
from ddtree_ops.service.state import UnitState

__all__ = [
    "RouterDeployment",
    "RouterResult",
    "RouterView",
    "WorkerView",
    "parse_served",
    "plain",
    "worker_states",
]

_LEASE_S = 60.0
_POLL_S = 1.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_SERVED = re.compile(r"^smg_worker_cb_outcomes_total\{([^}]*)\} (\d+(?:\.\d+)?)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

_PROBE = """
import sys
from importlib.metadata import version
print(version("sglang-router"))
sys.stdout.flush()
from sglang_router.launch_router import parse_router_args
parse_router_args(sys.argv[1:])._validate_router_args()
import sglang_router.sglang_router_rs
"""


def plain(text: str) -> str:
    """A log line of the router without its colours: it writes them to the journal too."""
    return _ANSI.sub("", text)


def worker_states(body: Any) -> dict[str, bool]:
    """``GET /workers`` of the router: url -> healthy.

    :raises ValueError: it is no such answer.
    """
    try:
        return {str(item["url"]).rstrip("/"): bool(item["is_healthy"]) for item in body["workers"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a list of workers: {error}") from None


def parse_served(metrics: str) -> dict[str, float]:
    """Requests that each worker has answered, from the router's metrics: url -> count."""
    found: dict[str, float] = {}
    for labels, count in _SERVED.findall(metrics):
        values = dict(_LABEL.findall(labels))
        if values.get("outcome") == "success" and "worker" in values:
            found[values["worker"].rstrip("/")] = found.get(values["worker"].rstrip("/"), 0.0) + float(count)
    return found


@dataclass(frozen=True)
class WorkerView:
    """A worker as the router sees it. ``healthy`` None: the router does not have it."""

    target: str
    url: str
    healthy: bool | None

    def describe(self) -> str:
        """One line for people."""
        state = {True: "healthy", False: "NOT healthy", None: "unknown to the router: restart it"}[
            self.healthy
        ]
        return f"{self.target} {self.url}: {state}"


@dataclass(frozen=True)
class RouterView:
    """How a router stands.

    :param answers: its HTTP server answers.
    :param as_wished: the unit file is the one that the inventory describes.
    :param strangers: workers that it has and the inventory does not.
    """

    name: str
    host: str
    unit: str
    state: UnitState
    as_wished: bool
    answers: bool
    workers: tuple[WorkerView, ...]
    strangers: tuple[str, ...] = ()
    last: Activation | None = None

    @property
    def healthy(self) -> bool:
        """It runs, and every worker is healthy."""
        return self.state.running and self.answers and all(worker.healthy for worker in self.workers)

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "name": self.name,
            "host": self.host,
            "unit": self.unit,
            "state": self.state.describe(),
            "running": self.state.running,
            "as_wished": self.as_wished,
            "answers": self.answers,
            "healthy": self.healthy,
            "workers": [
                {"target": item.target, "url": item.url, "healthy": item.healthy} for item in self.workers
            ],
            "strangers": list(self.strangers),
            "last": None
            if self.last is None
            else {
                "time": self.last.time,
                "who": self.last.who,
                "reason": self.last.reason,
                "verdict": self.last.verdict.value if self.last.verdict else None,
            },
        }


@dataclass
class RouterResult:
    """What ``router deploy`` did; ``outcome`` is unchanged, deployed, planned, rolled-back, failed or interrupted."""

    name: str
    host: str
    outcome: str = "failed"
    diff: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    checks: list[CheckResult] = field(default_factory=list)
    error: OpsError | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """0, or that of the error."""
        return self.error.exit_code if self.error else ExitCode.OK

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form; times in seconds."""
        return {
            "schema": 1,
            "router": self.name,
            "host": self.host,
            "outcome": self.outcome,
            "diff": list(self.diff),
            "reasons": list(self.reasons),
            "checks": [check.to_json() for check in self.checks],
            "error": self.error.render() if self.error else None,
            "exit_code": int(self.exit_code),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


@dataclass(frozen=True)
class _Seen:
    unit_text: str | None
    state: UnitState
    history: History
    key: Secret | None


class RouterDeployment:
    """One router on its host.

    :raises ConfigError: a worker that the router's host cannot reach, workers with different keys, a unit that cannot
        be written.
    """

    def __init__(self, inventory: Inventory, router: Router, session: Session, report: Reporter) -> None:
        self.router = router
        self.session = session
        self.host: Host = inventory.hosts[router.host]
        self.workers = workers(inventory, router)
        self.layout = router_layout(self.host, router)
        self.control = UnitControl(session, router.unit, writer=f"ddtree-ops router deploy {router.name}")
        self.urls = [worker.url for worker in self.workers]
        with_key = any("api_key" in worker.target.service.secrets for worker in self.workers)
        self.unit_text = render_router_unit(self.host, router, self.urls, with_key=with_key)
        self.result = RouterResult(router.name, router.host)
        self.frame = Frame(router.host, report)
        self.result.seconds = self.frame.seconds
        self._seen: _Seen | None = None
        self._activation: Activation | None = None

    @cached_property
    def key(self) -> Secret | None:
        """The key of the workers, from its source: only a deploy takes it, so that the rest needs no password store.

        :raises ConfigError: it cannot be had, or the workers have different ones.
        """
        keys = {worker.name: api_key_of(worker.target) for worker in self.workers}
        if len(set(keys.values())) > 1:
            raise ConfigError(
                f"router {self.router.name}: its workers have different API keys, and it knows one only",
                details=tuple(f"{name}: {'a key' if key else 'no key'}" for name, key in keys.items()),
                hint="give the service one key for all of these hosts",
            )
        return next(iter(keys.values()))

    # -- what the commands do ------------------------------------------------------------------------------

    def deploy(self, *, dry_run: bool = False, lock_wait: float = 0.0) -> RouterResult:
        """Bring the router to what the inventory says; errors are in the result."""
        result = self.result
        try:
            with heeding():
                self._deploy(dry_run, lock_wait)
        except RolledBack as error:
            result.outcome, result.error = "rolled-back", error
        except OpsError as error:
            result.error = error.at(host=self.host.name, state=self.frame.state_left)
        except KeyboardInterrupt:
            result.outcome = "interrupted"
            result.error = Interrupted(
                "interrupted",
                host=self.host.name,
                state=self.frame.state_left,
                hint=f"ddtree-ops router deploy {self.router.name}",
            )
        return result

    def _deploy(self, dry_run: bool, lock_wait: float) -> None:
        key = self.key
        if not dry_run:
            take_lock(
                self.session,
                self.layout,
                lock_id=new_lock_id(),
                command="router deploy",
                lease=_LEASE_S,
                wait=lock_wait,
                again=f"ddtree-ops router deploy {self.router.name}",
                tell=lambda text: self.frame.emit(EventKind.PROGRESS, "preflight", text),
            )
        self._preflight()
        self._plan()
        if dry_run or not self.result.reasons:
            self.result.outcome = "planned" if self.result.reasons else "unchanged"
            return
        try:
            with heeding():
                self._activate(self.unit_text, "deploy", key)
                self._wait()
                self._smoke()
        except OpsError as error:
            self._roll_back(error.at(host=self.host.name, state=self.frame.state_left))
        self._accept()
        self.result.outcome = "deployed"

    def view(self) -> RouterView:
        """How it stands now."""
        seen = self._look()
        states: dict[str, bool] = {}
        answers = False
        if seen.state.running:
            with self._client(seen.key) as client, contextlib.suppress(EngineError, ValueError):
                states = worker_states(client.send("GET", "/workers", timeout=5.0).json())
                answers = True
        return RouterView(
            self.router.name,
            self.host.name,
            self.router.unit,
            seen.state,
            seen.unit_text == self.unit_text,
            answers,
            tuple(WorkerView(item.name, item.url, states.get(item.url)) for item in self.workers),
            tuple(sorted(states.keys() - set(self.urls))),
            seen.history.latest,
        )

    def operate(self, action: str) -> str:
        """``start`` or ``stop`` the unit as it is, under the lock; a line for people."""
        if action not in ("start", "stop"):
            raise UsageError(f"a router can be started and stopped, not {action}ed")
        lock_id = new_lock_id()
        command = f"router {action}"
        take_lock(self.session, self.layout, lock_id=lock_id, command=command, lease=_LEASE_S)
        try:
            report = self.control.start() if action == "start" else self.control.stop()
        except OpsError as error:
            record(self.session, self.layout, command, outcome="failed", detail=error.message)
            raise
        record(self.session, self.layout, command, outcome="ok", detail=report.describe())
        self.session.release_lock(self.layout.lock)
        return report.describe()

    # -- steps ---------------------------------------------------------------------------------------------

    def _look(self) -> _Seen:
        unit, show, history, key = self.session.ask(
            [
                Request("read_file", {"path": self.layout.unit_path, "max_bytes": 1 << 20}),
                Request("show_unit", {"unit": self.router.unit}),
                Request("read_file", {"path": self.layout.history, "max_bytes": 64 << 20}),
                Request("read_file", {"path": f"{self.layout.secrets}/{KEY_FILE}", "max_bytes": 1 << 16}),
            ],
        )
        return _Seen(
            unit.data.decode("utf-8", "replace") if unit.values["found"] else None,
            UnitState.parse(show.values),
            parse_history(history.data if history.values["found"] else None),
            key_on_host(key.data) if key.values["found"] else None,
        )

    def _preflight(self) -> None:
        with self.frame.phase("preflight"):
            self._seen = self._look()
            if self._seen.state.running:
                self.frame.state_left = "nothing was changed: the router keeps running as it did"
            with ThreadPoolExecutor(max_workers=min(16, 2 + len(self.workers))) as pool:
                venv, ports = pool.submit(self._check_venv), pool.submit(self._check_ports)
                found = [*pool.map(self._check_worker, self.workers)]
                results = [venv.result(), *ports.result(), *found]
            self.result.checks += results
            bad = [result for result in results if result.verdict is not Verdict.PASS]
            if bad:
                raise PreflightError(
                    f"{len(bad)} of {len(results)} preflight checks failed",
                    details=tuple(map(result_line, bad)),
                    hint=next(
                        (result.hint for result in bad if result.hint), "mend that and deploy it again"
                    ),
                )
            self.frame.note = "; ".join(result.summary for result in results)

    def _check(self, name: str, problem: str, fine: str, hint: str = "", evidence: str = "") -> CheckResult:
        return CheckResult(
            f"router.{name}",
            Verdict.FAIL if problem else Verdict.PASS,
            problem or fine,
            host=self.host.name,
            hint=hint if problem else "",
            evidence=(Evidence(f"router.{name}", evidence),) if evidence else (),
        )

    def _check_venv(self) -> CheckResult:
        """The package is there, can be imported, and takes these flags: its own parser is asked, on the host.

        That takes seconds of its CPU, so not where a process with just these flags runs already.
        """
        seen = self._seen
        if seen is not None and seen.state.running and seen.unit_text == self.unit_text:
            return self._check("venv", "", "it runs with these flags")
        python = f"{self.router.venv.rstrip('/')}/bin/python"
        argv = [python, "-c", _PROBE, *router_arguments(self.router, self.urls)]
        env = {name: value for name, value in self.router.environment.items() if name == "LD_LIBRARY_PATH"}
        done = self.session.run(argv, env=env, deadline=120.0)
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.rc}"]
        version = done.text.strip().splitlines()[0] if done.text.strip() else ""
        hint = ""
        if done.rc in (126, 127):
            problem, hint = f"{python} is missing or cannot be run", "set venv of the router"
        elif done.rc == 2:
            problem = f"sglang-router {version} refuses these flags: {said[-1].split('error: ')[-1]}"
            hint = f"{python} -m sglang_router.launch_router --help"
        elif done.rc != 0:
            problem = f"sglang-router cannot be run from {self.router.venv}: {said[-1]}"
            hint = f"{self.router.venv}/bin/pip install sglang-router"
        else:
            problem = ""
        return self._check(
            "venv", problem, f"sglang-router {version} takes these flags", hint, "\n".join(said[-5:])
        )

    def _check_ports(self) -> list[CheckResult]:
        found = []
        for name, port, address in (
            ("port", self.router.port, self.router.bind),
            ("metrics-port", self.router.metrics_port, METRICS_HOST),
        ):
            holders = sort_holders(self.control.port_owner(port, address), port, self.router.unit)
            taken = "; ".join(owner.describe() for owner in holders.others)
            fine = f"port {port} is {'ours' if holders.mine else 'free'}"
            hint = f"stop what listens there, or set {name.replace('-', '_')} of the router"
            found.append(self._check(name, f"port {port} is taken by {taken}" if taken else "", fine, hint))
        return found

    def _check_worker(self, worker: Worker) -> CheckResult:
        """Asked from the router's host: does it answer there, is it healthy, and does it serve what it should?"""
        name, wanted, host = (
            f"worker.{worker.name}",
            worker.target.service.served_name,
            worker.target.host.name,
        )
        hint, serves = f"ddtree-ops status {host}; ddtree-ops deploy {host}", ""
        try:
            with EngineClient(self.session, self._seen_from_host(worker), self.key) as client:
                status = client.health()
                if status != 200:
                    answer = "nothing listens there" if status is None else f"GET /health: {status}"
                    return self._check(
                        name, f"{worker.url} as seen from {self.host.name}: {answer}", "", hint
                    )
                serves = client.models()[0].name
        except EngineError as error:
            return self._check(name, f"{worker.url} as seen from {self.host.name}: {error.message}", "", hint)
        strange = wanted is not None and serves != wanted
        problem = f"{worker.url} serves {serves!r}, the inventory says {wanted!r}" if strange else ""
        return self._check(name, problem, f"{worker.name} answers at {worker.url}", hint)

    def _seen_from_host(self, worker: Worker) -> Target:
        address = worker.url.split("//", 1)[1].rsplit(":", 1)[0].strip("[]")
        return self._at(address, worker.target.service.port, like=worker.target, tunnel=True)

    def _at(self, bind: str, port: int, *, like: Target, tunnel: bool) -> Target:
        """What listens on an address of the router's host, or is reached from there, to be asked ``like`` a worker."""
        host = self.host.model_copy(update={"http": "tunnel"}) if tunnel else self.host
        service = like.service.model_copy(update={"bind": bind, "port": port, "nodes": None})
        return Target(host=host, service=service, runtime=like.runtime)

    def _client(self, key: Secret | None) -> EngineClient:
        """A client of the router itself, with the key that it asks for."""
        target = self._at(self.router.bind, self.router.port, like=self.workers[0].target, tunnel=False)
        return EngineClient(self.session, target, key)

    def _plan(self) -> None:
        seen = self._seen
        assert seen is not None
        with self.frame.phase("plan"):
            before = seen.unit_text or ""
            diff = difflib.unified_diff(
                before.splitlines(),
                self.unit_text.splitlines(),
                f"{self.router.unit} (host)",
                f"{self.router.unit} (wished)",
                lineterm="",
                n=1,
            )
            self.result.diff = tuple(map(masked_unit_line, diff))
            reasons = []
            if seen.unit_text is None:
                reasons.append("there is no unit file yet")
            elif seen.unit_text != self.unit_text:
                reasons.append("the unit file changes")
            if self.key is not None and seen.key != self.key:
                reasons.append(f"the key of the workers {'changes' if seen.key else 'is new'}")
            if not seen.state.running:
                reasons.append(seen.state.describe())
            elif not reasons:
                reasons += self._unfit()
            self.result.reasons = tuple(reasons)
            self.frame.note = (
                "; ".join(reasons) if reasons else "nothing to change: it runs as wished, all workers healthy"
            )

    def _unfit(self) -> list[str]:
        """Why a router that runs as wished has to be restarted all the same."""
        missing = self._missing()
        return [f"it does not have {', '.join(missing)} as healthy"] if missing else []

    def _missing(self) -> list[str]:
        """Workers that the router does not have, or not as healthy; all of them where it does not answer."""
        try:
            with self._client(self.key) as client:
                if client.send("GET", "/readiness", timeout=5.0).status_code != 200:
                    return list(self.urls)
                states = worker_states(client.send("GET", "/workers", timeout=5.0).json())
        except (EngineError, ValueError):
            return list(self.urls)
        return [url for url in self.urls if not states.get(url)]

    def _activate(self, text: str, reason: str, key: Secret | None) -> None:
        with self.frame.phase("activate" if reason == "deploy" else "rollback"):
            sha256 = text_sha256(text)
            self._activation = new_activation(
                release="", unit_sha256=sha256, plan=sha256, who=who(), origin=origin(), reason=reason
            )
            self.session.write_file(f"{self.layout.kept_unit(sha256)}.service", text.encode(), mode=0o600)
            self.session.append_line(self.layout.history, activation_line(self._activation))
            self.frame.state_left = f"the switch of {self.router.unit} was not finished: it may be stopped"
            if self.control.state().exists:
                self.control.stop()
            files = {KEY_FILE: key.reveal().encode()} if key is not None else {}
            self.session.ask(write_requests(self.layout, files))
            self.control.install(self.layout.unit_path, text)
            self.control.start()
            self.frame.state_left = f"{self.router.unit} was started and is not validated"
            self.frame.note = (
                "; ".join(self.result.reasons) if reason == "deploy" else "the former unit file runs again"
            )

    def _wait(self) -> None:
        with self.frame.phase("wait"):
            began = time.monotonic()
            limit = began + self.router.health.timeout
            while True:
                state = self.control.state()
                if not state.running or state.n_restarts:
                    self._ended(state)
                missing = self._missing()
                if not missing:
                    break
                self.frame.emit(EventKind.PROGRESS, "wait", f"waits for {', '.join(missing)}")
                if time.monotonic() > limit:
                    raise HealthTimeout(
                        f"not every worker was healthy within {self.router.health.timeout:g} s: {', '.join(missing)}",
                        hint=f"ddtree-ops router logs {self.router.name} --grep health",
                    )
                time.sleep(_POLL_S)
            self.frame.note = (
                f"{len(self.urls)} of {len(self.urls)} workers healthy after {time.monotonic() - began:.0f} s"
            )

    def _ended(self, state: UnitState) -> None:
        entries = self.control.entries(invocation=state.invocation_id or "current", lines=8)
        raise CheckFailed(
            f"it ended: {state.describe()}",
            details=tuple(plain(entry.message) for entry in entries),
            hint=f"ddtree-ops router logs {self.router.name}",
        )

    def _served(self) -> dict[str, float]:
        target = self._at(METRICS_HOST, self.router.metrics_port, like=self.workers[0].target, tunnel=True)
        with EngineClient(self.session, target) as client:
            return parse_served(client.send("GET", "/metrics", timeout=10.0).text)

    def _smoke(self) -> None:
        """A completion through the router, by the name it lists; then the unit is held."""
        health, worker = self.router.health, self.workers[0].target.service.health
        with self.frame.phase("smoke"):
            before, state = self._served(), self.control.state()
            with self._client(self.key) as client:
                served = [model.name for model in client.models()]
                wanted = self.workers[0].target.service.served_name
                if wanted is not None and wanted not in served:
                    raise CheckFailed(f"the router lists {', '.join(served)}, the inventory says {wanted!r}")
                prompt = resolve_prompt(worker.prompt).text
                chat = client.chat(
                    wanted or served[0], prompt, max_tokens=worker.max_tokens, timeout=health.request_timeout
                )
            found = judge_completion(chat, max_tokens=worker.max_tokens, host=self.host.name)
            found = replace(found, name="router.smoke")
            after = self._served()
            by = [url for url in self.urls if after.get(url, 0) > before.get(url, 0)]
            names = [item.name for item in self.workers if item.url in by]
            self.result.checks.append(replace(found, facts={**found.facts, "answered_by": names}))
            text = judge_text(chat.text, completion_tokens=chat.completion_tokens)
            if found.verdict is not Verdict.PASS or text.reason is not None:
                raise CheckFailed(text.reason or found.summary)
            end = time.monotonic() + health.window
            while True:
                problem = self.control.state().stable_against(state)
                if problem is not None:
                    raise CheckFailed(f"it did not stay up for {health.window:g} s: {problem}")
                if missing := self._missing():
                    raise CheckFailed(
                        f"not healthy to the router any more: {', '.join(missing)}",
                        hint=f"ddtree-ops router logs {self.router.name} --invocation all --grep health",
                    )
                if time.monotonic() >= end:
                    break
                time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))
            self.frame.note = (
                f"{found.summary}; answered by {' or '.join(names) or 'a worker its metrics do not name'}"
            )

    def _accept(self) -> None:
        activation, state = self._activation, self.control.state()
        assert activation is not None
        self.control.enable()
        summary = "; ".join(check.summary for check in self.result.checks if check.name == "router.smoke")
        line = verdict_line(activation.id, Verdict.PASS, summary, invocation=state.invocation_id)
        self.session.append_line(self.layout.history, line)

    # -- after a failure -----------------------------------------------------------------------------------

    def _roll_back(self, error: OpsError) -> None:
        """Back to the newest unit file that passed, else to the one that ran before, else stop. Raises in any case."""
        seen, failed = self._seen, self._activation
        if seen is None or failed is None:
            raise error
        self.session.append_line(
            self.layout.history, verdict_line(failed.id, Verdict.FAIL, error.message[:500], invocation="")
        )
        text = self._former(seen)
        if text is None:
            with self.frame.phase("rollback"):
                self.control.stop()
                self.frame.state_left = (
                    f"{self.router.unit} is stopped: there is no other unit file to go back to"
                )
                self.frame.note = "stopped: there is nothing to go back to"
            error.state = self.frame.state_left
            raise error
        key = self.key  # That of now also with the former unit: the preflight has seen the workers take it.
        try:
            self._activate(text, "rollback", key)
            self._wait_for_former()
        except OpsError as another:
            error.details = (*error.details, f"the rollback failed too: {another.message}")
            error.state = self.frame.state_left
            raise error from None
        self.frame.state_left = "the former unit file runs again"
        self._accept()
        raise RolledBack(
            "the router failed and its former unit file is back",
            host=self.host.name,
            phase="rollback",
            state=f"{self.router.unit} runs from the unit file that passed before",
            hint=f"ddtree-ops router logs {self.router.name} --invocation previous",
            details=(f"why: {error.message}", *error.details),
        ) from None

    def _former(self, seen: _Seen) -> str | None:
        wished = text_sha256(self.unit_text)
        passed = [item.unit_sha256 for item in seen.history.good() if item.unit_sha256 != wished]
        texts = kept_texts(self.session, self.layout, passed)
        former = next((texts[sha] for sha in passed if sha in texts), None)
        if former is not None:
            return former
        before = seen.unit_text
        return before if before is not None and before != self.unit_text and seen.state.running else None

    def _wait_for_former(self) -> None:
        """The former unit stood in front of other workers, perhaps: it has to run and to have one that is healthy."""
        limit = time.monotonic() + self.router.health.timeout
        while True:
            state = self.control.state()
            if not state.running or state.n_restarts:
                self._ended(state)
            with contextlib.suppress(EngineError), self._client(self.key) as client:
                if client.send("GET", "/readiness", timeout=5.0).status_code == 200:
                    return
            if time.monotonic() > limit:
                raise HealthTimeout("the former unit file runs, and has no healthy worker")
            time.sleep(_POLL_S)
