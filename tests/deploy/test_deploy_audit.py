"""The audit: lines that are written, read and put into one order with the histories."""

from __future__ import annotations

import json
from pathlib import Path

from ddtree_ops.deploy.audit import act_line, merge, parse_audit, read_audit, record
from ddtree_ops.deploy.history import activation_line, new_activation, parse_history, verdict_line
from ddtree_ops.remote import connect_local
from ddtree_ops.results import Verdict
from ddtree_ops.service.layout import Layout


def line(time: str, action: str = "stop") -> bytes:
    return act_line(action, service="x.service", outcome="ok", who="ann", origin="desk", time=time).encode()


def test_lines_are_read_back_and_damaged_ones_counted() -> None:
    data = b"\n".join(
        [line("2026-11-29T12:00:00+00:00"), b"{", b'{"action": "stop"}', b"[]", b"", line("", "start")]
    )
    found = parse_audit(data)
    assert [act.action for act in found.acts] == ["stop", "start"]
    assert found.damaged == 3
    assert parse_audit(None) == parse_audit(b"")


def test_a_line_is_one_line_and_holds_no_secret() -> None:
    text = act_line(
        "stop", service="", outcome="ok", detail="a\nb --api-key sk-12345678", who="a", origin="b"
    )
    assert "\n" not in text and "sk-12345678" not in text
    assert json.loads(text)["detail"].startswith("a b")


def test_one_order_of_time() -> None:
    first = new_activation(
        release="a" * 64,
        unit_sha256="b" * 64,
        plan="",
        who="ann",
        origin="desk",
        reason="deploy",
        runtime="r",
    )
    history = parse_history(
        "\n".join([activation_line(first), verdict_line(first.id, Verdict.FAIL, "boom")]).encode()
    )
    acts = parse_audit(
        b"\n".join([line("2999-01-01T00:00:00+00:00"), line("2020-01-01T00:00:00+00:00"), line("never")])
    ).acts
    found = merge(acts, {"y.service": history.activations})
    assert [entry.time[:4] for entry in found] == ["neve", "2020", first.time[:4], "2999"]
    assert (found[2].action, found[2].outcome, found[2].detail) == (
        "activate (deploy)",
        "fail",
        f"r {'a' * 12}: boom",
    )


def test_on_a_host(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DDTREE_OPS_WHO", "ann")
    root = str(tmp_path)
    with connect_local() as session:
        assert read_audit(session, root).entries == ()
        record(session, Layout(root, "x.service"), "stop", outcome="ok", detail="drained")
        unit = Layout(root, "y.service")
        session.append_line(
            unit.history,
            activation_line(
                new_activation(
                    release="a" * 64, unit_sha256="b" * 64, plan="", who="bob", origin="lap", reason="deploy"
                )
            ),
        )
        session.append_line(unit.history, "damaged")
        before = session.round_trips
        found = read_audit(session, root)
        assert session.round_trips == before + 2
    assert [(entry.action, entry.service, entry.who) for entry in found.entries] == [
        ("stop", "x.service", "ann"),
        ("activate (deploy)", "y.service", "bob"),
    ]
    assert found.damaged == {unit.history: 1}
