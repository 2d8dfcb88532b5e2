"""What an activation changed, as history and rollback tell it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from ddtree_ops.deploy.changed import against_now, kept_texts, one_by_one, recorded
from ddtree_ops.deploy.earlier import alternatives
from ddtree_ops.deploy.history import Activation, History
from ddtree_ops.remote import connect_local
from ddtree_ops.results import Verdict
from ddtree_ops.service.layout import Layout


def unit(budget: int, more: str = "") -> str:
    return f"[Service]\nEnvironment=A=1{more}\nExecStart=/v/bin/python -m sglang.launch_server --budget {budget}\n"


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


TEXTS = {sha(unit(budget)): unit(budget) for budget in (16, 24, 32)}


def act(number: int, budget: int, release: str = "a") -> Activation:
    return Activation(
        id=f"20261129T1200{number:02}.000-{number:06x}",
        time=f"2026-11-29T12:00:{number:02}+00:00",
        release=release * 64,
        unit_sha256=sha(unit(budget)),
        plan="",
        who="ann",
        origin="desk",
        verdict=Verdict.PASS,
    )


PAST = (act(1, 32), act(2, 16), act(3, 16), act(4, 24, "b"))


def test_each_is_told_apart_by_what_it_changed():
    assert list(one_by_one(PAST, TEXTS).values()) == [
        ("the first",),
        ("--budget: 32 -> 16",),
        (),
        ("release aaaaaaaaaaaa -> bbbbbbbbbbbb", "--budget: 16 -> 24"),
    ]
    assert list(one_by_one(PAST, TEXTS, lines=1)) == [PAST[3].id]


def test_a_unit_file_that_is_gone_is_said():
    (_, change, *_) = one_by_one(PAST, {}).values()
    assert change == ("arguments not known: a unit file is not kept any more",)


def test_of_a_unit_file_that_is_gone_what_was_written_down_is_told():
    failed = recorded(PAST[0], PAST[1], TEXTS.values())
    back = recorded(failed, replace(PAST[0], id="back"), (unit(16), None, unit(32)))
    gone = {sha: text for sha, text in TEXTS.items() if sha != PAST[1].unit_sha256}
    assert list(one_by_one((PAST[0], failed, back), gone).values()) == [
        ("the first",),
        ("--budget: 32 -> 16",),
        ("--budget: 16 -> 32",),
    ]


def test_what_is_not_known_is_not_written_down():
    assert recorded(PAST[0], PAST[1], (unit(16), None)).changed is None


def test_variables_and_much_at_once():
    text = unit(32).replace("--budget 32", "--b 1 --c 2 --d 3 --e 4 --f 5")
    other = replace(act(5, 32), unit_sha256=sha(text))
    found = one_by_one((PAST[0], other), TEXTS | {sha(text): text})[other.id]
    assert (len(found), found[-1]) == (5, "2 more")
    text = unit(32, more=" B=2")
    other = replace(act(5, 32), unit_sha256=sha(text))
    assert one_by_one((PAST[0], other), TEXTS | {sha(text): text})[other.id] == ("+ B 2",)


def test_candidates_say_what_going_there_would_change():
    history = History(PAST)
    changes = against_now(history, TEXTS, "b" * 64, unit(24))
    lines = alternatives(history, ("b" * 64, sha(unit(24))), changes=changes)
    assert [line.partition(": ")[2].partition(": ")[2] for line in lines] == [
        "release bbbbbbbbbbbb -> aaaaaaaaaaaa; --budget: 24 -> 16",
        "release bbbbbbbbbbbb -> aaaaaaaaaaaa; --budget: 24 -> 32",
    ]


def test_unit_files_are_read_at_once_and_damaged_ones_left_out(tmp_path):
    layout = Layout(str(tmp_path), "x.service")
    good, bad = unit(16), unit(32)
    for name, text in ((sha(good), good), (sha(bad), "other")):
        path = tmp_path / "services/x.service/units" / f"{name}.service"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with connect_local("h") as session:
        assert kept_texts(session, layout, [sha(good), sha(bad), "1" * 64, "../x"]) == {sha(good): good}
