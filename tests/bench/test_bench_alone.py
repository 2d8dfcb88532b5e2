"""One bench of a service at a time, how it is told from one that was killed, and what it says of what runs when it begins."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from ddtree_ops.checks.bench.points import Configuration
from ddtree_ops.cli import benching
from ddtree_ops.cli.app import app
from ddtree_ops.deploy.deployed_settings import other_settings
from ddtree_ops.deploy.guard import Safety
from ddtree_ops.deploy.history import activation_line, new_activation, verdict_line
from ddtree_ops.deploy.outcome import Outcome
from ddtree_ops.errors import ExitCode, LockHeld, UnreachableError
from ddtree_ops.inventory.models import Health, Host, RuntimeSpec, Service, Speculative, Target
from ddtree_ops.playbook import bench
from ddtree_ops.remote.session import LockState
from ddtree_ops.results import Verdict
from ddtree_ops.runreport import RunReport

TREE = Speculative(budget=32, topk_cap=8)
HOLDER = {"who": "ann", "origin": "desk", "command": "bench", "since": 1796029200.0, "left_s": 55.0}
SERVICE_DIR = "/opt/ddtree-ops/services/s.service"


def service(**more: Any) -> Service:
    given = {"unit": "s.service", "runtime": "r", "venv": "/v", "model": "/m", "drafter": "/d"}
    return Service(**{**given, "speculative": TREE, **more})


def target(one: Service | None = None) -> Target:
    return Target(host=Host(name="h"), service=one or service(), runtime=RuntimeSpec(name="r"))


class Session:
    """A host that holds files, and a lock that somebody has or nobody."""

    host = "h"

    def __init__(self, files: dict[str, bytes] | None = None, holder: dict[str, Any] | None = None) -> None:
        self.files, self.holder, self.locks = files or {}, holder, []
        self.held: bool | None = True
        """Whether a lock of ours is still ours; None: the session has ended."""

    def read_file(self, path: str) -> bytes | None:
        return self.files.get(path)

    def acquire_lock(self, path: str, owner: dict[str, Any], *, lease: float) -> dict[str, Any] | None:
        self.locks.append((path, owner["command"], lease))
        return self.holder

    def check_lock(self, path: str, lock_id: str) -> LockState:
        assert (path, bool(lock_id)) == (f"{SERVICE_DIR}/bench.lock", True)
        if self.held is None:
            raise UnreachableError("the session ended", host="h")
        return LockState(self.held, None if self.held else HOLDER, 0.0 if self.held else 55.0)


def one_target(said: list[str], session: Session, **more: Any) -> Any:
    book = bench._Book(RunReport("bench", "1", "now"), lambda report: None)
    safety = Safety(command="bench", again="ddtree-ops bench {host} --yes", **more)
    plan = (Configuration("dflash"),)
    return bench._Target(
        target(),
        plan,
        bench.BenchOptions(),
        book,
        lambda target: nullcontext(session),
        lambda event: said.append(event.message),
        safety,
    )


def test_while_another_bench_is_under_way_it_says_whose_and_touches_nothing(monkeypatch):
    session = Session(holder=HOLDER)
    one = one_target([], session)
    monkeypatch.setattr(one, "_measure", lambda session: pytest.fail("it is too early to look"))
    one.run()
    (error,) = one.errors
    assert isinstance(error, LockHeld)
    assert error.exit_code is ExitCode.LOCK_HELD
    assert error.message.startswith(
        "another bench is under way: ann on desk holds the lock of s.service since 2026-"
    )
    assert "that bench goes on" in error.state
    assert "ddtree-ops bench h --yes --lock-wait 2h" in error.hint
    assert "Ctrl-C where it runs" in error.hint
    assert session.locks == [(f"{SERVICE_DIR}/bench.lock", "bench", 60.0)], "not the lock of deployments"


def interrupted_underneath() -> None:
    """What arrives where the connection broke while Ctrl-C went through it."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise UnreachableError("the session ended", host="h")  # noqa: B904


def test_an_interruption_under_another_error_is_one_and_what_ran_before_is_put_back(monkeypatch):
    one = one_target([], Session())
    put_back: list[bool] = []

    def back() -> str:
        put_back.append(True)
        one._fail(LockHeld("somebody deploys"))
        return "this serves"

    monkeypatch.setattr(one, "_put_back", back)

    def measured(*given: Any) -> None:
        one.touched = True
        interrupted_underneath()

    monkeypatch.setattr(one, "_configuration", measured)
    one.run()
    codes = [error.exit_code for error in one.errors]
    assert codes == [ExitCode.LOCK_HELD, ExitCode.INTERRUPTED], "how to go on comes last"
    assert one.errors[-1].state == "this serves; what was measured is in the report"
    assert put_back == [True]


def test_an_interruption_while_it_connects_is_one(monkeypatch):
    one = one_target([], Session())
    monkeypatch.setattr(one, "connect", lambda target: interrupted_underneath())
    one.run()
    assert [error.exit_code for error in one.errors] == [ExitCode.INTERRUPTED]


@pytest.mark.parametrize("held", [False, None])
def test_a_lock_that_was_lost_is_noticed_before_a_configuration(monkeypatch, held):
    """Somebody else's: nothing is put back under it. Only the connection ended: it is taken again for the way back."""
    session = Session()
    one = one_target([], session)
    one._write(facts={"starts": {"dflash": "a" * 32}})
    monkeypatch.setattr(one, "_configuration", lambda *given: pytest.fail("it is not alone"))
    back: list[int] = []
    monkeypatch.setattr(one, "_went_back", lambda original: back.append(len(session.locks)))
    session.held = held
    one.run()
    (error,) = one.errors
    if held is False:
        assert "the lock of this whole bench was lost: ann on desk holds" in error.message
        assert error.state == "a configuration of the bench may serve; what ran before it was not put back"
        assert "ddtree-ops deploy h" in error.hint
    else:
        assert isinstance(error, UnreachableError)
    assert back == ([] if held is False else [2])


def test_somebody_elses_lock_of_the_service_ends_it_and_nothing_is_put_back_under_it(monkeypatch):
    one = one_target([], Session())
    monkeypatch.setattr(one, "_put_back", lambda: pytest.fail("it is theirs"))

    def measured(*given: Any) -> None:
        one.touched = True
        raise LockHeld("ann deploys", state="nothing was changed")

    monkeypatch.setattr(one, "_configuration", measured)
    one.run()
    (error,) = one.errors
    assert error.state == "a configuration of the bench may serve; what ran before it was not put back"


def test_it_waits_for_the_lock_of_another_bench_as_long_as_asked(monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(bench, "take_lock", lambda *given, wait, **more: waited.append(wait))
    with one_target([], Session(), lock_wait=7200.0)._alone():
        pass
    assert waited == [7200.0]


def test_the_floor_of_the_inventory_is_handed_to_what_measures(monkeypatch):
    one = one_target([], Session())
    one.target = target(service(health=Health(min_accept_length=1.5)))
    given: dict[str, Any] = {}

    def made(*these: Any, **more: Any) -> None:
        given.update(more)
        raise UnreachableError("far enough")

    monkeypatch.setattr(bench, "Bench", made)
    monkeypatch.setattr(bench, "locked", lambda *given: nullcontext("id"))
    monkeypatch.setattr(one, "_runs_still", lambda configuration: True)
    with pytest.raises(UnreachableError):
        one._configuration(Configuration("dflash"), ())
    assert given["floor"] == 1.5


def test_what_runs_already_is_restarted_for_a_start_of_its_own(monkeypatch):
    played: list[str] = []
    one = one_target([], Session())

    def play(playbook: Any, target: Target) -> Any:
        played.append(playbook.name)
        return SimpleNamespace(error=None, outcome=Outcome.UNCHANGED if len(played) == 1 else Outcome.PASSED)

    monkeypatch.setattr(one, "_play", play)
    one._started(one.target)
    assert played == ["deploy", "restart"]
    assert one.touched


# ------------------------------------------------------------------------------ what was deployed otherwise


def host_with(
    recorded: Service | bytes | None, verdict: Verdict | None = Verdict.PASS, command: str = "deploy"
) -> Session:
    made = new_activation(
        release="a" * 64, unit_sha256="b" * 64, plan="", who="", origin="", reason="deploy", command=command
    )
    lines = [activation_line(made)]
    if verdict is not None:
        lines.append(verdict_line(made.id, verdict, ""))
    files = {f"{SERVICE_DIR}/history.jsonl": "\n".join(lines).encode()}
    if recorded is not None:
        record = recorded if isinstance(recorded, bytes) else recorded.model_dump_json().encode()
        files[f"{SERVICE_DIR}/units/{'b' * 64}.json"] = record
    return Session(files)


def test_what_was_deployed_with_other_settings_is_said_with_what_becomes_of_it():
    there = service(speculative=Speculative(budget=16, topk_cap=8), args={"mem-fraction-static": 0.8})
    said = bench.deployed_otherwise(host_with(there), target())
    assert said.startswith(
        "what runs now was deployed with other settings than the inventory's: "
        "speculative.budget 16, measured 32; args.mem-fraction-static 0.8, measured not set; it is put back afterwards"
    )
    said = bench.deployed_otherwise(host_with(there, None), target())
    assert "it never passed and is NOT put back" in said


def test_the_same_settings_and_an_empty_host_are_no_matter():
    assert bench.deployed_otherwise(host_with(service(description="for people")), target()) == ""
    assert bench.deployed_otherwise(Session(), target()) == ""


@pytest.mark.parametrize(
    "record", [None, b"{}", b"not json", service().model_dump_json()[:-1].encode() + b',"new": 1}']
)
def test_a_record_that_cannot_be_read_is_no_equality(record):
    assert "is not known" in bench.deployed_otherwise(host_with(record), target())


def test_secrets_in_it_are_masked():
    there = service(environment={"HF_TOKEN": "hf-value-1"})
    (change,) = other_settings(there, service())
    assert (change.name, change.after) == ("environment.HF_TOKEN", None)
    assert "hf-value-1" not in str(change)


def test_before_it_asks_it_says_what_runs(monkeypatch):
    there = service(speculative=Speculative(budget=16, topk_cap=8))
    monkeypatch.setattr(benching, "open_session", lambda target: nullcontext(host_with(there)))
    one = target(service(name="s")).model_copy(
        update={"host": Host(name="h", services={"s": service(name="s")})}
    )
    assert benching._deployed_otherwise([one], {"h": ()}) == [], "nothing is started, so nothing is looked at"
    (line,) = benching._deployed_otherwise([one], {"h": (Configuration("dflash"),)})
    assert line.startswith("h: what runs now was deployed with other settings")


# -------------------------------------------------------------------------------------------------- the help


def test_the_help_says_how_it_is_called():
    said = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "120"}).output
    assert "bench HOSTS... [OPTIONS]" in said
    assert said.index("bench ct200 --budgets") < said.index("Commands")
