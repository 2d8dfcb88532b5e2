"""History lines survive a round trip; only a judged activation is good."""

from __future__ import annotations

from ddtree_ops.deploy.history import activation_line, new_activation, parse_history, verdict_line
from ddtree_ops.results import Verdict


def _activation(release: str = "a" * 64):
    return new_activation(
        release=release, unit_sha256="u", plan="p", who="ann", origin="desk", reason="deploy"
    )


def test_no_file_is_an_empty_history():
    history = parse_history(None)
    assert history.latest is None
    assert history.last_good() is None


def test_an_unjudged_activation_is_not_good():
    activation = _activation()
    history = parse_history(activation_line(activation).encode())
    assert history.latest == activation
    assert history.last_good() is None


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
    good = history.last_good()
    assert good is not None
    assert good.release == "2" * 64
    assert history.latest is not None
    assert history.latest.verdict is Verdict.FAIL
    assert history.latest.summary == "died"


def test_a_torn_last_line_is_counted_and_the_rest_is_kept():
    activation = _activation()
    content = activation_line(activation) + "\n" + verdict_line(activation.id, Verdict.PASS, "ok")[:-9]
    history = parse_history(content.encode())
    assert history.damaged == 1
    assert history.last_good() is None
    assert history.latest == activation


def test_a_verdict_on_an_unknown_activation_is_damage_not_a_crash():
    assert parse_history(verdict_line("nobody", Verdict.PASS, "").encode()).damaged == 1
