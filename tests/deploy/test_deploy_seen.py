"""Where a failure was seen before: evidence of this machine, history of the host, both of one failure counted once."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from ddtree_ops.deploy.history import activation_line, new_activation, parse_history, verdict_line
from ddtree_ops.deploy.seen import Sighting, in_evidence, in_history, sentence
from ddtree_ops.diagnose.reduce import Diagnosis
from ddtree_ops.results import Verdict

CAUSE = Diagnosis("unknown", "fatal", "t", "e", "r", (), 1, "2026-11-29 10:00:00", "abcdef012345", ())


def keep(folder: Path, name: str, first: str, fingerprint: str = CAUSE.fingerprint, **more: str) -> None:
    place = folder / name
    place.mkdir(parents=True)
    item = {"signature": "unknown", "severity": "fatal", "fingerprint": fingerprint, "first": first}
    document = {"diagnoses": [{"severity": "degraded"}, item], "facts": {"runtime": "r1"}, **more}
    (place / "diagnosis.json").write_text(json.dumps(document))


def test_evidence_of_the_same_failure_is_found_and_the_failure_itself_is_not(tmp_path: Path) -> None:
    keep(tmp_path, "ct200-20261103T101010Z", "2026-11-03 10:10:00")
    keep(tmp_path, "gpu-a-k26-20261104T101010Z", "2026-11-04 10:10:00", invocation="i")
    keep(tmp_path, "ct200-20261129T100001Z", CAUSE.first)
    keep(tmp_path, "ct200-20261105T101010Z", "2026-11-05 10:10:00", "other")
    (tmp_path / "ct200-20261106T101010Z").mkdir()
    (tmp_path / "ct200-20261106T101010Z" / "diagnosis.json").write_text("{]")
    (tmp_path / "notes").mkdir()
    found = in_evidence(CAUSE, tmp_path)
    assert [(item.target, item.time.day, item.release, item.invocation) for item in found] == [
        ("ct200", 3, "r1", ""),
        ("gpu-a-k26", 4, "r1", "i"),
    ]
    assert in_evidence(CAUSE, tmp_path / "none") == []


def test_evidence_of_a_service_of_a_host_is_that_hosts_own(tmp_path: Path) -> None:
    """Its folder has a ``-`` where the target has a ``/``; the history tells of the same failure."""
    keep(tmp_path, "gpu-a-k26-20261104T101010Z", "2026-11-04 10:10:00", invocation="i")
    kept = in_evidence(CAUSE, tmp_path, target="gpu-a/k26")
    assert [item.target for item in kept] == ["gpu-a/k26"]
    told = Sighting("gpu-a/k26", datetime(2026, 11, 4, 10, 10, tzinfo=UTC), "r1 abc", "i")
    assert sentence([*kept, told], "gpu-a/k26", "now") == (
        "seen before: 1 time on this host since 2026-11-04, last with release r1 abc"
    )


def test_the_history_keeps_signature_and_fingerprint_of_what_failed() -> None:
    made = [
        new_activation(
            release=digit * 64, unit_sha256="u", plan="p", who="w", origin="o", reason="deploy", runtime="r"
        )
        for digit in "ab"
    ]
    lines = [activation_line(one) for one in made]
    lines.append(
        verdict_line(made[0].id, Verdict.FAIL, "s", invocation="i" * 32, cause=("unknown", CAUSE.fingerprint))
    )
    lines.append(verdict_line(made[1].id, Verdict.PASS, "s", invocation="j" * 32))
    history = parse_history("\n".join(lines).encode())
    assert [item.fingerprint for item in history.activations] == [CAUSE.fingerprint, ""]
    (found,) = in_history(CAUSE, history, "ct200")
    assert (found.target, found.invocation, found.release) == ("ct200", "i" * 32, "r aaaaaaaaaaaa")
    old = parse_history(
        lines[0].encode()
        + b'\n{"event":"verdict","id":"%s","verdict":"fail","summary":""}' % made[0].id.encode()
    )
    assert old.activations[0].verdict is Verdict.FAIL and in_history(CAUSE, old, "ct200") == []


def when(day: int, minute: int = 0) -> datetime:
    return datetime(2026, 11, day, 10, minute, tzinfo=UTC)


def test_the_sentence() -> None:
    told = [
        Sighting("ct200", when(3), "r1", "i1"),
        Sighting("ct200", when(3, 2), "r1"),
        Sighting("ct200", when(5), "r2 abc", "i2"),
        Sighting("ct200", when(6), "r3", "now"),
        Sighting("b300", when(4)),
    ]
    assert sentence(told, "ct200", "now") == (
        "seen before: 2 times on this host since 2026-11-03, last with release r2 abc, and on b300"
    )
    assert sentence(told[4:], "ct200") == "not seen before here, but on b300"
    assert sentence([], "ct200") == sentence([]) == "not seen before here"
    assert sentence(told[4:]) == (
        "seen before: 1 time in the evidence of this machine (b300) since 2026-11-04, last at 2026-11-04 10:00Z"
    )
