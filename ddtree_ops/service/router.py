"""The upstream sglang-router as a unit: its command line and its unit file. Pure.

Flags: ``sglang_router/router_args.py`` of sglang-router 0.3.2. What it does and does not do, observed on it:

- ``/health`` is 200 with every worker dead; ``/readiness`` is 503 only when none is left; ``/workers`` lists each worker
  with ``is_healthy``. A worker that does not answer while the router starts is not in that list at all, and never comes.
- Its metrics listen on 0.0.0.0:29000 unless told otherwise.
- A key for the workers is taken from its command line only, so it is added inside the process from a credential.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.models import Host, Router
from ddtree_ops.secret import is_secret_flag
from ddtree_ops.service.argv import flag_words
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.unit import HEADER, USER_NAME, exec_start, literal, quote_environment, seconds

__all__ = [
    "KEY_FILE",
    "METRICS_HOST",
    "launch_router_argv",
    "render_router_unit",
    "router_arguments",
    "router_layout",
]

KEY_FILE = "worker-api-key"
"""File, and credential, that holds the key of the workers."""
METRICS_HOST = "127.0.0.1"

_WRITTEN = (
    "worker-urls",
    "host",
    "port",
    "policy",
    "prometheus-host",
    "prometheus-port",
    "health-check-interval-secs",
)
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_WITH_KEY = (
    "import os, sys; from sglang_router.launch_router import launch_router, parse_router_args; "
    f"key = open(os.environ['CREDENTIALS_DIRECTORY'] + '/{KEY_FILE}').read().strip(); "
    "launch_router(parse_router_args(sys.argv[1:] + ['--api-key', key]))"
)


def router_layout(host: Host, router: Router) -> Layout:
    """Where things of a router lie on its host."""
    return Layout(root=host.deploy_root.rstrip("/"), unit=router.unit)


def router_arguments(router: Router, urls: Sequence[str]) -> list[str]:
    """The flags of a router in front of ``urls``.

    :raises ConfigError: a key of ``args`` that a field writes, or that holds a secret.
    """
    argv = [
        "--worker-urls",
        *urls,
        "--host",
        router.bind,
        "--port",
        str(router.port),
        "--policy",
        router.policy,
    ]
    argv += ["--prometheus-host", METRICS_HOST, "--prometheus-port", str(router.metrics_port)]
    argv += ["--health-check-interval-secs", str(max(1, round(router.health.interval)))]
    for key, value in router.args.items():
        if key in _WRITTEN:
            raise ConfigError(
                f"router {router.name}: args.{key} is already written by a field of the router",
                hint="remove it and set the field: service, hosts, bind, port, policy, metrics_port, health.interval",
            )
        if not isinstance(value, bool) and is_secret_flag(key):
            raise ConfigError(
                f"router {router.name}: args.{key} would put a secret on the command line",
                hint="the key of the workers is taken from the secrets of their service",
            )
        argv += flag_words(f"--{key}", value)
    return argv


def launch_router_argv(router: Router, urls: Sequence[str], *, with_key: bool) -> list[str]:
    """Words of ``ExecStart``.

    :param with_key: the workers want a key; it is read from the credential :data:`KEY_FILE` in the process.
    """
    python = f"{router.venv.rstrip('/')}/bin/python"
    head = ["-c", _WITH_KEY] if with_key else ["-m", "sglang_router.launch_router"]
    return [python, *head, *router_arguments(router, urls)]


def render_router_unit(host: Host, router: Router, urls: Sequence[str], *, with_key: bool = False) -> str:
    """The whole text of the unit file. The same router always gives the same text.

    :raises ConfigError: a value that no unit can hold.
    """
    layout = router_layout(host, router)
    user, restart = router.user or "root", router.restart
    if not USER_NAME.fullmatch(user):
        raise ConfigError(f"router {router.name}: user {user!r} is not a user name")
    interval = restart.interval if restart.interval is not None else restart.burst * (restart.delay + 30) + 60
    environment = {
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{router.venv.rstrip('/')}/bin:{_SYSTEM_PATH}",
        **router.environment,
    }
    lines = [
        HEADER,
        "[Unit]",
        f"Description={literal(router.description or f'SGLang router {router.name}', 'description')}",
        "Wants=network-online.target",
        "After=network-online.target",
        f"StartLimitIntervalSec={seconds(interval)}",
        f"StartLimitBurst={restart.burst}",
        "",
        "[Service]",
        "Type=exec",
        f"User={user}",
        *(f"Environment={quote_environment(*item)}" for item in environment.items()),
        *([f"LoadCredential={KEY_FILE}:{layout.service_dir}/secrets/{KEY_FILE}"] if with_key else []),
        " \\\n".join(exec_start(launch_router_argv(router, urls, with_key=with_key))),
        f"Restart={restart.policy}",
        f"RestartSec={seconds(restart.delay)}",
        "RestartPreventExitStatus=2",
        f"TimeoutStopSec={seconds(router.health.stop_timeout)}",
        "LimitNOFILE=1048576",
        "LogRateLimitIntervalSec=0",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"
