"""Rules about the unit, the environment, secrets and what healthy means."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from ddtree_ops.inventory.models import Service
from ddtree_ops.lint.model import Case, Cite, Found, Severity, rule
from ddtree_ops.secret import KEY_SHAPE, is_secret_name, redact

__all__: list[str] = []

_ARGS = "srt/server_args.py"
_ENVIRON = "srt/environ.py"
_DRAIN_POLL_S = 5.0
_LONG_STOP_S = 900.0
_FALSE = ("", "0", "false", "no", "n")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "DFLASH_DIAG": "a diagnostic is left over in the engine: restore the file before anything is fixed on top of it",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated by the driver",
    "SGLANG_CUDA_COREDUMP": "a crash writes a core file of the GPU before it is seen",
    "SGLANG_DEBUG_MEMORY_POOL": "the memory pool is checked at every step",
    "SGLANG_DETECT_SLOW_RANK": "every collective is timed",
    "SGLANG_IS_IN_CI": "time limits are those of a test run",
    "SGLANG_SPEC_NAN_DETECTION": "every verify step is searched for NaN",
    "SGLANG_SPEC_OOB_DETECTION": "every verify step is searched for bad indices",
    "TORCH_USE_CUDA_DSA": "device-side assertions slow every kernel",
}
_BREAKING = {
    "SGLANG_TEST_RETRACT": "requests are taken back at random",
    "TRITON_INTERPRET": "kernels run in Python on the CPU",
}


def _on(value: str) -> bool:
    return value.strip().lower() not in _FALSE


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


# --- environment and secrets -------------------------------------------------------------------------------


@rule(
    "faked-acceptance",
    Severity.ERROR,
    "an acceptance length that is made up",
    reason="With SGLANG_SIMULATE_ACC_LEN above 0 the engine invents which drafts are accepted: figures look fine, answers are "
    "wrong.",
    sources=[Cite(_ENVIRON, 206, "SGLANG_SIMULATE_ACC_LEN = EnvFloat(-1)")],
)
def _faked(case: Case) -> Iterator[Found]:
    value = case.service.environment.get("SGLANG_SIMULATE_ACC_LEN")
    number = None if value is None else _number(value)
    if value is not None and (number is None or number > 0):
        yield Found(
            f"acceptance is made up: {value} tokens a step",
            "remove it",
            ("environment", "SGLANG_SIMULATE_ACC_LEN"),
        )


@rule(
    "test-variable",
    Severity.ERROR,
    "variables of sglang's own tests that stall, crash or slow the engine",
    reason="They exist to break the engine on purpose.",
    sources=[
        Cite(_ENVIRON, 193, "SGLANG_TEST_STUCK_SCHEDULER_INIT"),
        Cite(_ENVIRON, 195, "SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS"),
        Cite(_ENVIRON, 215, "SGLANG_TEST_RETRACT"),
    ],
)
def _test_variable(case: Case) -> Iterator[Found]:
    for name, value in case.service.environment.items():
        what = _BREAKING.get(name)
        if name.startswith(("SGLANG_TEST_STUCK_", "SGLANG_TEST_CRASH_")) and _number(value) != 0:
            what = "the engine is stopped or killed on purpose"
        if what and _on(value):
            yield Found(f"{name}: {what}", "remove it", ("environment", name))


@rule(
    "debug-variable",
    Severity.WARN,
    "variables for debugging that slow the engine",
    reason="What is measured is not what the service can do, and timing hides or makes errors.",
    sources=[Cite(_ENVIRON, 203, "SGLANG_DEBUG_MEMORY_POOL"), "CUDA and PyTorch documentation"],
)
def _debug_variable(case: Case) -> Iterator[Found]:
    for name, value in case.service.environment.items():
        if name in _SLOW and _on(value):
            yield Found(f"{name}: {_SLOW[name]}", "remove it once the cause is found", ("environment", name))


@rule(
    "secret-in-args",
    Severity.ERROR,
    "a secret in the command line",
    reason="The command line of a process can be read by every user of the host, and stands in the unit and the journal.",
    sources=["proc(5): /proc/PID/cmdline"],
)
def _secret_in_args(case: Case) -> Iterator[Found]:
    for given in case.given:
        flag = given.flag.name if given.flag else f"--{given.key}"
        named = any(redact(f"{name} x") != f"{name} x" for name in (flag, f"--{given.key}"))
        shaped = any(KEY_SHAPE.search(word) for word in given.words)
        if given.typed or not ((named and given.words) or shaped):
            continue
        name = flag.lstrip("-").replace("-", "_")
        change = (
            f"say under secrets.{name} where it comes from"
            if name in ("api_key", "admin_api_key")
            else "put it into a file on the host that only the service's user can read, named by args.config"
        )
        yield Found(
            f"the value of --{given.key} is a secret", f"remove args.{given.key}: {change}", given.path
        )


@rule(
    "secret-in-environment",
    Severity.WARN,
    "a secret in the inventory's environment",
    reason="It stands in the inventory file, and in the unit, which is then readable for root only.",
    sources=["systemd.exec(5): Environment= is not suitable for passing secrets"],
)
def _secret_in_environment(case: Case) -> Iterator[Found]:
    for name, value in case.service.environment.items():
        if value and (is_secret_name(name) or KEY_SHAPE.search(value)):
            yield Found(
                f"the value of {name} is a secret",
                f"say under secrets.{name} where it comes from",
                ("environment", name),
            )


# --- network -----------------------------------------------------------------------------------------------


def _has_key(service: Service) -> bool:
    return "api_key" in service.secrets or service.args.get("config") not in (None, False)


@rule(
    "open-port",
    Severity.WARN,
    "an engine that the network can reach without an API key",
    reason="Without one anybody may use the model, read the server's settings and flush its cache.",
    sources=[Cite("srt/entrypoints/http_server.py", 2191, "server_args.api_key")],
)
def _open_port(case: Case) -> Iterator[Found]:
    address = ipaddress.ip_address(case.service.bind)
    if not address.is_loopback and not _has_key(case.service):
        yield Found(
            f"it listens on {case.service.bind} without an API key",
            "name one under secrets.api_key, or bind to 127.0.0.1: the harness reaches it through its SSH session",
            ("bind",),
        )


@rule(
    "direct-http",
    Severity.ERROR,
    "direct HTTP to an engine that listens on loopback only",
    reason="This machine cannot reach the host's loopback: readiness and smoke would wait in vain.",
    sources=["hosts.NAME.http"],
)
def _direct_http(case: Case) -> Iterator[Found]:
    host = case.target.host
    if host.http != "direct" or not ipaddress.ip_address(case.service.bind).is_loopback:
        return
    local = host.address is not None and (host.address == "localhost" or host.address.startswith("127."))
    if not local:
        yield Found(
            f"http is direct, and the engine listens on {case.service.bind}",
            "set http: tunnel, or bind to an address that this machine reaches",
            ("hosts", host.name, "http"),
            top=True,
        )


@rule(
    "grpc-port",
    Severity.ERROR,
    "a port above 55535",
    reason="sglang 0.5.11 works out a gRPC port as port + 10000 even where gRPC is off, and ends with a ValueError where "
    "that is no port.",
    sources=[Cite(_ARGS, 1047, "if not (1 <= self.grpc_port <= 65535)")],
)
def _grpc_port(case: Case) -> Iterator[Found]:
    if case.service.port + 10000 > 65535 and not case.service.environment.get("SGLANG_GRPC_PORT"):
        yield Found(
            f"port {case.service.port} + 10000 is no port",
            "choose a port up to 55535, or set environment.SGLANG_GRPC_PORT",
            ("port",),
        )


@rule(
    "served-name",
    Severity.ERROR,
    "a colon in the served name",
    reason="A colon parts model and adapter; the start ends with an AssertionError.",
    sources=[Cite(_ARGS, 6806, "served_model_name cannot contain a colon")],
)
def _served_name(case: Case) -> Iterator[Found]:
    name = case.service.served_name
    if name and ":" in name and "://" not in name:
        yield Found(f"'{name}' has a colon", "choose a name without", ("served_name",))


# --- unit --------------------------------------------------------------------------------------------------


@rule(
    "start-limit",
    Severity.WARN,
    "StartLimitIntervalSec shorter than a crash loop that ends late in a load",
    reason="systemd gives up only after burst starts within the interval. A crash at the end of a long load starts so seldom "
    "that the limit is never reached: it loops for ever, and looks like activating.",
    sources=["systemd.unit(5): StartLimitIntervalSec="],
)
def _start_limit(case: Case) -> Iterator[Found]:
    restart, health = case.service.restart, case.service.health
    if restart.policy == "no" or restart.interval is None:
        return
    needed = restart.burst * (restart.delay + health.load_timeout)
    if restart.interval <= needed:
        longest = restart.interval / restart.burst - restart.delay
        yield Found(
            f"{restart.interval:g} s hold {restart.burst} starts only of crashes within {max(longest, 0):g} s, a load may take "
            f"{health.load_timeout:g} s",
            f"leave restart.interval out to have it computed ({needed + 60:g} s)",
            ("restart", "interval"),
        )


@rule(
    "stop-timeout",
    Severity.WARN,
    "a stop that has no time to drain, or far too much",
    reason="On SIGTERM 0.5.11 looks every 5 s whether all requests are done; a request that was refused is never done, and "
    "then systemd waits the whole time before it kills.",
    sources=[
        Cite("srt/managers/tokenizer_manager.py", 2306, "await asyncio.sleep(5)"),
        "recorded on systemd 252",
    ],
)
def _stop_timeout(case: Case) -> Iterator[Found]:
    timeout = case.service.health.stop_timeout
    forced = _on(case.service.environment.get("SGL_FORCE_SHUTDOWN", ""))
    if case.service.kill_mode == "mixed" and not forced and timeout <= _DRAIN_POLL_S:
        yield Found(
            f"after {timeout:g} s systemd kills; the drain is first looked at after {_DRAIN_POLL_S:g} s",
            "set health.stop_timeout to 30s or more, or kill_mode: control-group to go without a drain",
            ("health", "stop_timeout"),
        )
    elif timeout > _LONG_STOP_S:
        yield Found(
            f"a drain that never ends holds a deployment for {timeout:g} s",
            "set health.stop_timeout to the longest request that is worth waiting for, such as 2m",
            ("health", "stop_timeout"),
        )


# --- healthy -----------------------------------------------------------------------------------------------


@rule(
    "stall-timeout",
    Severity.WARN,
    "a stall limit that can never be reached",
    reason="The load limit ends the wait first, so that a silent start is noticed late.",
    sources=["health.load_timeout"],
)
def _stall(case: Case) -> Iterator[Found]:
    health = case.service.health
    if health.stall_timeout > health.load_timeout:
        yield Found(
            f"{health.stall_timeout:g} s of silence are more than the {health.load_timeout:g} s of a whole load",
            "set health.stall_timeout below health.load_timeout",
            ("health", "stall_timeout"),
        )


@rule(
    "accept-floor",
    Severity.ERROR,
    "a floor of the accept length that cannot be reached",
    reason="A verify step gives at most block_size tokens, and without speculation there is no accept length: every "
    "deployment would be rolled back.",
    sources=["accept length = (accepted drafts + 1) / verify step, at most block_size"],
)
def _floor(case: Case) -> Iterator[Found]:
    floor, speculative = case.service.health.min_accept_length, case.service.speculative
    if floor is None:
        return
    path = ("health", "min_accept_length")
    if speculative is None:
        yield Found(f"a floor of {floor:g}, and no speculation", "remove health.min_accept_length", path)
    elif case.block and floor > speculative.block_size:
        yield Found(
            f"a floor of {floor:g}, and a step gives at most block_size {speculative.block_size} tokens",
            "measure first, then set a floor below what was measured",
            path,
        )


@rule(
    "drafter-unused",
    Severity.WARN,
    "a drafter without speculation",
    reason="Nothing loads it.",
    sources=["ddtree-ops inventory show"],
)
def _drafter(case: Case) -> Iterator[Found]:
    if case.service.drafter is not None and case.service.speculative is None:
        yield Found(
            "a drafter is named, and no speculation", "set speculative, or remove drafter", ("drafter",)
        )


@rule(
    "log-level",
    Severity.WARN,
    "a log level that hides the start",
    reason="Phases of a load, graph capture, ready and accept length are lines of level info: without them a load looks like "
    "silence and is given up after health.stall_timeout.",
    sources=[Cite(_ARGS, 7293, "raw_args.log_level.upper()")],
)
def _log_level(case: Case) -> Iterator[Found]:
    given, level = case.arg("log-level"), case.text("log-level")
    if given is not None and level is not None and level.lower() not in ("info", "debug"):
        yield Found(
            f"log level {level} hides the start and the figures", f"remove args.{given.key}", given.path
        )
