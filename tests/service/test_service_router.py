"""The router's command line and unit, and what is read from its answers. Pure."""

from __future__ import annotations

import shlex

import pytest

from ddtree_ops.deploy.router import parse_served, plain, worker_states
from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory.models import Host, Router
from ddtree_ops.service.router import launch_router_argv, render_router_unit
from ddtree_ops.service.unitfile import exec_start_of

URLS = ["http://192.0.2.1:30001", "http://[fd00::2]:30001"]
HOST = Host(name="gpu1", address="192.0.2.1")


def router(**more: object) -> Router:
    given = {"name": "front", "host": "gpu1", "venv": "/opt/router", "service": "k26", **more}
    return Router.model_validate(given)


def test_the_command_line() -> None:
    words = launch_router_argv(
        router(args={"log-level": "warn", "dp-aware": True, "api": False}), URLS, with_key=False
    )
    assert shlex.join(words) == (
        "/opt/router/bin/python -m sglang_router.launch_router --worker-urls http://192.0.2.1:30001 "
        "'http://[fd00::2]:30001' --host 127.0.0.1 --port 30000 --policy cache_aware --prometheus-host 127.0.0.1 "
        "--prometheus-port 29000 --health-check-interval-secs 10 --log-level warn --dp-aware"
    )


def test_the_unit_says_the_same_and_names_the_key_by_its_file_only() -> None:
    text = render_router_unit(HOST, router(user="router"), URLS, with_key=True)
    assert exec_start_of(text) == launch_router_argv(router(), URLS, with_key=True)
    key = "/opt/ddtree-ops/services/sglang-router.service/secrets/worker-api-key"
    assert f"LoadCredential=worker-api-key:{key}\n" in text
    assert "User=router\n" in text
    assert text == render_router_unit(HOST, router(user="router"), URLS, with_key=True)
    assert "LoadCredential" not in render_router_unit(HOST, router(), URLS)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"args": {"policy": "random"}}, "args.policy is already written by a field"),
        ({"args": {"worker-urls": ["http://x:1"]}}, "args.worker-urls is already written by a field"),
        ({"args": {"api-key": "sk"}}, "would put a secret on the command line"),
        ({"user": "no such user"}, "is not a user name"),
    ],
)
def test_what_is_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        render_router_unit(HOST, router(**more), URLS)


def test_its_answers() -> None:
    """As recorded from sglang-router 0.3.2."""
    body = {
        "workers": [{"url": "http://a:1/", "is_healthy": True}, {"url": "http://b:1", "is_healthy": False}]
    }
    assert worker_states(body) == {"http://a:1": True, "http://b:1": False}
    for wrong in ({}, [], {"workers": [{}]}):
        with pytest.raises(ValueError, match="not a list of workers"):
            worker_states(wrong)
    metrics = (
        'smg_worker_cb_outcomes_total{worker="http://a:1",outcome="success"} 3\n'
        'smg_worker_cb_outcomes_total{worker="http://a:1",outcome="failure"} 9\n'
        'smg_worker_cb_state{worker="http://a:1"} 0\n'
    )
    assert parse_served(metrics) == {"http://a:1": 3.0}
    assert plain("\x1b[2m2026-11-29 18:42:13\x1b[0m \x1b[31mERROR\x1b[0m x") == "2026-11-29 18:42:13 ERROR x"
