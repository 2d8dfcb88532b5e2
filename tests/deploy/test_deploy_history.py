"""History lines survive a round trip; only a judged activation is good."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddtree_ops.deploy.history import (
    BENCH,
    History,
    activation_line,
    new_activation,
    parse_history,
    verdict_line,
)
from ddtree_ops.results import Verdict


def _activation(release: str = "a" * 64):
    return new_activation(
        release=release, unit_sha256="u", plan="p", who="ann", origin="desk", reason="deploy"
    )


def test_no_file_is_an_empty_history():
    history = parse_history(None)
    assert history.latest is None
    assert history.good() == ()


def test_an_unjudged_activation_is_not_good():
    activation = _activation()
    history = parse_history(activation_line(activation).encode())
    assert history.latest == activation
    assert history.good() == ()


def test_the_last_good_release_comes_from_the_record_not_from_the_order_of_verdicts():
    first, second, third = _activation("1" * 64), _activation("2" * 64), _activation("3" * 64)
    lines = [
        activation_line(first),
        verdict_line(first.id, Verdict.PASS, "ok"),
        activation_line(second),
        verdict_line(second.id, Verdict.PASS, "ok"),
        activation_line(third),
        verdict_line(third.id, Verdict.FAIL, "died"),
    ]
    history = parse_history("\n".join(lines).encode())
    assert [item.release[0] for item in history.good()] == ["2", "1"]
    assert history.latest is not None
    assert history.latest.verdict is Verdict.FAIL
    assert history.latest.summary == "died"


def test_a_torn_last_line_is_counted_and_the_rest_is_kept():
    activation = _activation()
    content = activation_line(activation) + "\n" + verdict_line(activation.id, Verdict.PASS, "ok")[:-9]
    history = parse_history(content.encode())
    assert history.damaged == 1
    assert history.good() == ()
    assert history.latest == activation


def test_a_verdict_on_an_unknown_activation_is_damage_not_a_crash():
    assert parse_history(verdict_line("nobody", Verdict.PASS, "").encode()).damaged == 1


def test_what_passed_twice_is_listed_once_with_its_latest_pass_and_its_run():
    first, again = _activation(), _activation()
    lines = [
        activation_line(first),
        verdict_line(first.id, Verdict.PASS, "ok", invocation="run1"),
        activation_line(again),
        verdict_line(again.id, Verdict.PASS, "ok", invocation="run2"),
    ]
    (good,) = parse_history("\n".join(lines).encode()).good()
    assert (good.id, good.invocation) == (again.id, "run2")


def test_bytes_that_are_no_text_and_json_that_is_no_record_are_damage():
    activation = _activation()
    content = b"\xff\xfe{\n[1]\n3\n{}\n" + activation_line(activation).encode()
    history = parse_history(content)
    assert (history.damaged, history.latest) == (4, activation)


def test_what_it_changed_is_written_with_it_where_it_is_known():
    plain = _activation()
    assert "changed" not in activation_line(plain)
    for changed in ((), ("--budget: 32 -> 16",)):
        told = replace(plain, changed=changed)
        history = parse_history(activation_line(told).encode())
        assert (history.latest, history.damaged) == (told, 0)
        assert "changed" not in history.to_json()["activations"][0]


def _read(*told: str) -> tuple[str | None, bool]:
    """What ran before a bench, of activations ``release command reason verdict``, as its number; and whether one left it."""
    made = []
    for number, (release, command, reason, passed) in enumerate(each.split() for each in told):
        fresh = replace(_activation(release), id=str(number), reason=reason)
        made.append(activation_line(replace(fresh, command=command.strip("-"))))
        if passed != "killed":
            made.append(verdict_line(fresh.id, Verdict(passed), ""))
    found, left = parse_history("\n".join(made).encode()).before_bench
    return found and found.id, left


def test_the_command_is_written_with_it_and_an_older_line_is_of_no_bench():
    plain = _activation()
    assert "command" not in activation_line(plain)
    told = replace(plain, command="bench")
    assert parse_history(activation_line(told).encode()).latest == told


@pytest.mark.parametrize(
    ("told", "before"),
    [
        pytest.param((), (None, False), id="nothing was ever deployed"),
        pytest.param(("a deploy deploy pass",), ("0", False), id="no bench"),
        pytest.param(("a - deploy pass", "b - deploy fail"), ("1", False), id="older lines"),
        pytest.param(
            ("a deploy deploy pass", "b bench deploy pass", "c bench deploy killed"),
            ("0", True),
            id="killed while it loaded",
        ),
        pytest.param(
            ("a deploy deploy pass", "b bench deploy pass", "c bench deploy fail", "b - rollback pass"),
            ("0", True),
            id="killed, and the host went back to the bench's baseline",
        ),
        pytest.param(
            ("a deploy deploy pass", "b bench deploy fail", "a - rollback pass"),
            ("2", False),
            id="the host went back to what ran before",
        ),
        pytest.param(
            ("a deploy deploy pass", "b bench deploy pass", "a bench rollback pass"),
            ("2", False),
            id="it ended, and put back what ran before",
        ),
        pytest.param(
            ("a deploy deploy pass", "b bench deploy pass", "a bench deploy pass"),
            ("2", False),
            id="its last configuration is what ran before",
        ),
        pytest.param(
            ("p deploy deploy pass", "a deploy deploy pass", "p bench deploy pass"),
            ("1", True),
            id="what it measured was deployed long ago",
        ),
        pytest.param(
            ("a deploy deploy pass", "b bench deploy pass", "b bench validate pass"),
            ("0", True),
            id="started again by hand",
        ),
        pytest.param(
            ("a deploy deploy pass", "b bench deploy pass", "d deploy deploy fail", "b deploy rollback pass"),
            ("0", True),
            id="a deployment that failed went back to the bench's",
        ),
        pytest.param(
            ("a deploy deploy pass", "b bench deploy pass", "b deploy validate pass"),
            ("2", False),
            id="deployed as what is wished now",
        ),
        pytest.param(
            (
                "a deploy deploy pass",
                "b bench deploy pass",
                "c deploy deploy pass",
                "b rollback rollback pass",
            ),
            ("3", False),
            id="chosen later",
        ),
        pytest.param(("b bench deploy pass",), (None, True), id="nothing was there before"),
        pytest.param(("a deploy deploy fail", "b bench deploy pass"), (None, True), id="nothing had passed"),
    ],
)
def test_what_ran_before_a_bench_that_was_killed(told, before):
    assert _read(*told) == before


def past(*lines: tuple[str, str, str, Verdict | None]) -> History:
    """Of (release, command, reason, verdict), oldest first."""
    return History(
        tuple(
            replace(_activation(release * 64), command=command, reason=reason, verdict=verdict)
            for release, command, reason, verdict in lines
        )
    )


A_DEPLOYED, B_MEASURED = ("a", "deploy", "deploy", Verdict.PASS), ("b", BENCH, "deploy", Verdict.PASS)


@pytest.mark.parametrize(
    ("more", "measured"),
    [
        ((B_MEASURED,), True),
        ((("b", "deploy", "deploy", Verdict.FAIL), B_MEASURED), True),
        ((("b", "deploy", "deploy", None), B_MEASURED), True),
        ((B_MEASURED, ("b", "rollback", "rollback", Verdict.PASS)), True),
        ((B_MEASURED, ("b", "", "rollback", Verdict.PASS)), True),
        ((B_MEASURED, ("b", "deploy", "validate", Verdict.PASS)), False),
        ((("b", "", "deploy", Verdict.PASS), B_MEASURED), False),
        ((("b", "apply", "deploy", Verdict.PASS), ("b", "apply", "deploy", Verdict.FAIL), B_MEASURED), False),
    ],
)
def test_what_a_bench_alone_brought_to_a_pass_is_gone_back_to_last(more, measured):
    """Not a deploy that failed, nor a rollback to it (a person's, or the host's own, which names no command) chooses it."""
    history = past(A_DEPLOYED, *more)
    assert [item.release[0] for item in history.good()] == ["b", "a"]
    assert [item.release[0] for item in history.ways_back()] == (["a", "b"] if measured else ["b", "a"])
    assert [history.measured(item) for item in history.good()] == [measured, False]
