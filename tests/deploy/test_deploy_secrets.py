"""Secrets from their sources, in the plan, and never in what is shown."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.deploy import secrets as deploy_secrets
from ddtree_ops.deploy.plan import ChangeKind, Observed, Wish, make_plan
from ddtree_ops.deploy.secrets import (
    API_KEY,
    HostSecrets,
    Secrets,
    read_host_secrets,
    recorded_service,
    removal_requests,
    resolve_secrets,
    secret_changes,
    stale_files,
    write_requests,
)
from ddtree_ops.errors import ConfigError, ExitCode
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.remote import connect_local
from ddtree_ops.remote.session import Session
from ddtree_ops.secret import MASK, Secret, learn, masked, redact
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.state import UnitState


def target(secrets: dict[str, Any], root: Path = Path("/opt/x"), host: str = "h") -> Target:
    service = Service(name="s", unit="t.service", runtime="r", venv="/v", model="/m", secrets=secrets)
    made = Host(name=host, deploy_root=str(root), services={"s": service})
    return Target(host=made, service=service, runtime=RuntimeSpec(name="r"))


def values(found: Secrets) -> dict[str, str]:
    return {name: value.reveal() for name, value in found.values.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def test_the_three_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-from-environment\n")
    file = tmp_path / "token"
    file.write_text("hf_from_a_file\r\n")
    file.chmod(0o600)
    command = [
        sys.executable,
        "-c",
        "import sys; print('from $0 `a` command\\nline two\\n'); sys.stderr.write('x')",
    ]
    (found,) = resolve_secrets(
        [target({"api_key": {"env": "MY_KEY"}, "A": {"file": str(file)}, "B": {"command": command}})]
    )
    assert values(found) == {
        "api_key": "sk-from-environment",
        "A": "hf_from_a_file",
        "B": "from $0 `a` command\nline two",
    }
    assert found.notes == ()
    assert found.api_key == Secret("sk-from-environment")
    file.chmod(0o644)
    (found,) = resolve_secrets([target({"A": {"file": str(file)}})])
    assert found.notes == (f"secret file {file} can be read by others (mode 0644): chmod 600 {file}",)


def test_every_problem_is_told_at_once_and_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    monkeypatch.setenv("EMPTY", " \n")
    monkeypatch.setenv("SHORT", "hunter2")
    monkeypatch.setenv("BLANK", "hunter2 and more")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"hunter2\xff\xfe")
    script = tmp_path / "failing"
    script.write_text("echo hunter2 on stdout; echo gpg: decryption failed: No secret key >&2; exit 1\n")
    with pytest.raises(ConfigError) as caught:
        resolve_secrets(
            [
                target(
                    {
                        "A": {"env": "MY_KEY"},
                        "B": {"env": "EMPTY"},
                        "C": {"env": "SHORT"},
                        "api_key": {"env": "BLANK"},
                        "D": {"file": str(tmp_path / "empty")},
                        "E": {"file": str(tmp_path / "binary")},
                        "F": {"file": str(tmp_path / "nowhere")},
                        "G": {"file": str(tmp_path)},
                        "H": {"command": ["/bin/sh", str(script)]},
                        "I": {"command": ["/nowhere/pass", "show"]},
                        "J": {"env": "A", "file": "b"},
                        "K": {"command": ["yes"]},
                    }
                )
            ]
        )
    error = caught.value
    assert error.exit_code is ExitCode.CONFIG
    assert error.state == "nothing was contacted or changed"
    text = error.render()
    assert "hunter2" not in text
    for part in (
        "12 secrets cannot be had",
        "service s: secret A (env MY_KEY) is not set here: export MY_KEY=... and try again",
        "secret B (env EMPTY) is empty",
        "secret C (env SHORT) is shorter than 8 characters",
        "secret api_key (env BLANK) holds a blank",
        f"secret D (file {tmp_path}/empty) is empty",
        f"secret E (file {tmp_path}/binary) is not UTF-8 text",
        "is not there",
        "is not a regular file",
        "ended with exit status 1: gpg: decryption failed: No secret key",
        "secret I (command /nowhere/pass show) cannot be run: No such file or directory",
        "secret J (env A, file b) has not exactly one source",
        "secret K (command yes) is larger than 64 KiB",
    ):
        assert part in text


def test_a_command_that_waits_for_somebody_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deploy_secrets, "COMMAND_TIMEOUT", 0.3)
    started = tmp_path / "pid"
    script = f"echo $$ > {started}; sleep 60 & wait"
    with pytest.raises(ConfigError) as caught:
        resolve_secrets([target({"A": {"command": ["/bin/sh", "-c", script]}})])
    assert "gave nothing within 0.3 s: it runs without a terminal" in caught.value.render()
    end = time.monotonic() + 300
    while Path(f"/proc/{started.read_text().strip()}").exists():
        assert time.monotonic() < end, "the command still runs"
        time.sleep(0.02)


def test_a_command_runs_once_for_all_hosts_and_only_where_it_is_needed(tmp_path: Path) -> None:
    count = tmp_path / "count"
    command = ["/bin/sh", "-c", f"echo x >> {count}; echo a-value-of-{tmp_path.name}"]
    many = [target({"A": {"command": command}}, host=f"h{number}") for number in range(5)]
    assert resolve_secrets(many, only=API_KEY)[0].values == {}
    assert not count.exists()
    assert len({tuple(values(found).items()) for found in resolve_secrets(many)}) == 1
    resolve_secrets(many[:1])
    assert count.read_text() == "x\n"


# ---------------------------------------------------------------------------------------------------------------------
# Not shown


def test_a_secret_shows_itself_nowhere() -> None:
    value = Secret("sk-never-shown-1")
    for text in (repr(value), str(value), f"{value}", f"{[value]}", json.dumps({"a": value}, default=str)):
        assert "never" not in text
    with pytest.raises(TypeError):
        pickle.dumps(value)
    assert copy.deepcopy([value]) == [value]
    try:
        raise ValueError(Secrets({"api_key": value}))
    except ValueError as error:
        shown = traceback.TracebackException.from_exception(error, capture_locals=True)
        assert "never-shown" not in "".join(shown.format())


def test_learned_values_are_masked_in_every_form() -> None:
    value = "quo\"ted\\back'slash and ü"
    learn(f"{value}\nsecond line of it", Secret("sk-learned-123"), "short")
    for text in (
        f"a {value} b",
        repr(value),
        json.dumps(value),
        json.dumps({"x": [value]}, ensure_ascii=False),
        "the second line of it alone",
        "Bearer sk-learned-123",
    ):
        assert MASK in masked(text) and MASK in redact(text)
        assert not {part for part in ("back", "second line", "sk-learned") if part in masked(text)}
    assert masked("short text") == "short text"


@pytest.mark.parametrize(
    "line",
    [
        "server_args=ServerArgs(model_path='/m', api_key='sk-of-somebody', admin_api_key=None, port=1)",
        "server_args=ServerArgs(api_key=\"it's sk-of-somebody\", admin_api_key='sk-of-somebody')",
        "server_args=ServerArgs(api_key='it\\'s \"sk-of-somebody\"', port=1)",
        '{"api_key":"sk-of-somebody","admin_api_key":"sk-of-somebody"}',
        '{"api_key":"a\\"sk-of-somebody"}',
        "Authorization: Bearer sk-of-somebody",
    ],
)
def test_keys_of_somebody_else_are_masked_by_their_names(line: str) -> None:
    assert "sk-of-somebody" not in redact(line)
    assert redact(line).count(MASK) >= 1


# ---------------------------------------------------------------------------------------------------------------------
# The host


def test_a_record_of_a_host_never_names_what_is_run_here() -> None:
    made = target({"api_key": {"command": ["rm", "-rf", "/"]}}).service
    assert recorded_service(made.model_dump_json().encode()).secrets == {}
    with pytest.raises(ValueError, match="validation error"):
        recorded_service(b"{}")


@pytest.fixture
def session() -> Iterator[Session]:
    with connect_local() as opened:
        yield opened


def test_written_compared_and_removed_on_a_host(session: Session, tmp_path: Path) -> None:
    where = target({"api_key": {"env": "A"}, "HF_TOKEN": {"env": "B"}}, tmp_path)
    layout = Layout.of(where)
    wished = Secrets({"api_key": Secret("sk-first-key"), "HF_TOKEN": Secret("hf_first-token")})
    found = read_host_secrets(session, layout)
    assert found == HostSecrets()
    assert secret_changes(wished, found) == ("secret api_key is new", "secret HF_TOKEN is new")

    session.batch(write_requests(layout, wished.files()))
    folder = Path(layout.secrets)
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "engine.yaml": 0o600,
        "HF_TOKEN.env": 0o600,
    }
    found = read_host_secrets(session, layout)
    assert dict(found.values) == dict(wished.values)
    assert secret_changes(wished, found) == ()
    assert redact("hf_first-token") == MASK, "what a host holds is masked from then on"

    rotated = Secrets({"api_key": Secret("sk-second-key"), "NEW": Secret("something")})
    assert secret_changes(rotated, found) == ("secret api_key changes", "secret NEW is new")
    assert stale_files(rotated.files(), found) == ("HF_TOKEN.env",)
    both = Secrets({**wished.values, "admin_api_key": Secret("sk-admin-key")})
    assert secret_changes(both, found) == ("secret admin_api_key is new",)
    session.batch(write_requests(layout, both.files()))
    assert secret_changes(wished, read_host_secrets(session, layout)) == ("secret admin_api_key goes",)

    (folder / "HF_TOKEN.env").chmod(0o644)
    assert read_host_secrets(session, layout).loose == ("HF_TOKEN.env",)
    session.batch(removal_requests(layout, ["HF_TOKEN.env"]))
    assert [path.name for path in folder.iterdir()] == ["engine.yaml"]


def test_the_plan_names_secrets_and_restarts_for_them() -> None:
    state = UnitState.parse(
        {
            "LoadState": "loaded",
            "ActiveState": "active",
            "SubState": "running",
            "InvocationID": "i",
            "MainPID": "1",
        }
    )
    wish = Wish("h", "s", "t.service", "a" * 64, "r", "[Unit]\n")
    observed = Observed(
        "a" * 64, frozenset({"a" * 64}), "[Unit]\n", state, secrets=("secret api_key changes",)
    )
    plan = make_plan(wish, observed)
    assert [(change.kind, change.summary) for change in plan.changes] == [
        (ChangeKind.SECRET, "secret api_key changes"),
        (ChangeKind.RESTART, "restart: secret api_key changes"),
    ]
    assert plan.activates and plan.reasons == ("secret api_key changes",)
