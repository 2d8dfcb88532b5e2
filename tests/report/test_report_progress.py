"""Lines for a log file: neither flooded nor silent. Time is a number that the tests move."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from ddtree_ops.report.live import LiveProgress
from ddtree_ops.report.output import Output
from ddtree_ops.report.progress import LINE_EVERY_S, MANY, SILENCE_S, LineProgress, duration, progress_for
from ddtree_ops.results import RUN_END, Event, EventKind, Verdict


class Desk:
    """A progress display with a clock, and what it has printed."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.lines: list[str] = []
        self.progress = LineProgress(self.keep, clock=lambda: self.now)

    def say(self, kind: EventKind, message: str = "", phase: str = "wait", host: str = "h", **more: float):
        self.progress(Event(kind, host, phase, message, **more))

    def keep(self, line: str) -> None:
        self.lines.append(re.sub(r"^\d\d:\d\d:\d\dZ ", "", line))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_every_start_end_and_note_is_a_line(desk):
    desk.say(EventKind.START)
    desk.say(EventKind.NOTE, "a [bold]note[/]")
    desk.say(EventKind.DONE, "ready", elapsed_s=3.21)
    desk.say(EventKind.FAIL, "died", phase="smoke", elapsed_s=192.0)
    desk.say(EventKind.UNSURE, "no line to judge by", phase="signatures", elapsed_s=1.0)
    assert desk.lines == [
        "h wait: ...",
        "h wait: note a [bold]note[/]",
        "h wait: ok ready (3.2s)",
        "h smoke: FAILED died (3m12s)",
        "h signatures: INCONCLUSIVE no line to judge by (1.0s)",
    ]


def test_a_long_line_is_not_folded(desk):
    desk.say(EventKind.DONE, "x" * 300)
    assert desk.lines == [f"h wait: ok {'x' * 300}"]


def test_a_phase_that_keeps_talking_yields_a_line_every_few_seconds(desk):
    desk.say(EventKind.START)
    for second in range(1, 21):
        desk.now += 1
        desk.say(EventKind.PROGRESS, f"{second}/64")
    assert desk.lines[1:] == [
        "h wait: ... 5/64",
        "h wait: ... 10/64",
        "h wait: ... 15/64",
        "h wait: ... 20/64",
    ]


def test_hosts_and_phases_do_not_hide_each_other(desk):
    for host in ("a", "b"):
        for phase in ("push", "wait"):
            desk.say(EventKind.PROGRESS, "x", phase=phase, host=host)
    assert len(desk.lines) == 4


def test_a_silent_phase_is_named_until_it_ends(desk):
    desk.say(EventKind.START, phase="stop")
    desk.now += SILENCE_S - 1
    desk.progress.beat()
    assert len(desk.lines) == 1
    for _ in range(3):
        desk.now += LINE_EVERY_S
        desk.progress.beat()
    assert desk.lines[1:] == ["h stop: still (29s so far)"]
    desk.now += SILENCE_S
    desk.say(EventKind.DONE, phase="stop", elapsed_s=70.0)
    desk.now += 2 * SILENCE_S
    desk.progress.beat()
    assert desk.lines[2:] == ["h stop: ok (1m10s)"]


def test_a_silent_phase_repeats_its_last_message_even_if_that_was_held_back(desk):
    desk.say(EventKind.START)
    desk.now += 1
    desk.say(EventKind.PROGRESS, "weights 3/64")
    desk.now += SILENCE_S
    desk.progress.beat()
    assert desk.lines[-1] == "h wait: still weights 3/64 (26s so far)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (9.94, "9.9s"), (10, "10s"), (59.4, "59s"), (60, "1m00s"), (192, "3m12s"), (3720, "1h02m")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_live_display_is_for_terminals(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    assert isinstance(progress_for(Output()), LineProgress)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(progress_for(Output()), LiveProgress)


def test_the_live_display_keeps_what_ended():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None)
    with LiveProgress(console) as progress:
        progress(Event(EventKind.START, "h", "push"))
        progress(Event(EventKind.PROGRESS, "h", "push", "3 of 30 MB", 0.1))
        progress(Event(EventKind.DONE, "h", "push", "30 MB sent", elapsed_s=1.0))
    assert "✓ h        push         1.0s  30 MB sent" in file.getvalue()


def test_progress_that_comes_after_the_end_does_not_bring_a_phase_back():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=60, color_system=None)
    live = LiveProgress(console)
    live(Event(EventKind.START, "h", "wait"))
    live(Event(EventKind.PROGRESS, "h", "wait", "weights"))
    live(Event(EventKind.DONE, "h", "wait", "ready " + "and well " * 10, elapsed_s=3.0))
    live(Event(EventKind.PROGRESS, "h", "wait", "late"))
    console.print(live._render())
    shown = stream.getvalue()
    assert "late" not in shown
    first, *rest = [line.rstrip() for line in shown.splitlines() if line.strip()]
    assert first.startswith("✓ h        wait         3.0s  ready and well")
    assert rest and all(line.startswith(" " * 30) for line in rest)


def test_behind_the_long_name_of_a_host_a_message_stands_below():
    stream = io.StringIO()
    live = LiveProgress(Console(file=stream, force_terminal=True, width=80, color_system=None))
    name = "inference-node-frankfurt-hall-2-rack-01"
    live(Event(EventKind.DONE, name, "push", "2535 files, 29.5 MB sent, " * 3, elapsed_s=1.0))
    live(Event(EventKind.DONE, name, "end", "deployed", elapsed_s=1.0))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[0].endswith("1.0s")
    assert lines[1].startswith("    2535 files, 29.5 MB sent, 2535 files")
    assert len(lines) == 4 and lines[3].endswith("1.0s  deployed")


# ---------------------------------------------------------------------------------------------- many hosts


def _play(say, hosts: int) -> None:
    """A run as it is told: each host pushes, all but the last wait, the first two end, one of them badly."""
    names = [f"gpu{number:02d}" for number in range(1, hosts + 1)]
    for name in names:
        say(EventKind.START, phase="push", host=name)
    for name in names[:-1]:
        say(EventKind.DONE, "30 MB", phase="push", host=name, elapsed_s=1.0)
        say(EventKind.START, phase="wait", host=name)
        say(EventKind.PROGRESS, "weights 1/64", phase="wait", host=name)
    say(EventKind.FAIL, "it died", phase="wait", host=names[0], elapsed_s=2.0)
    say(EventKind.FAIL, "failed", phase=RUN_END, host=names[0], elapsed_s=3.0)
    say(EventKind.DONE, "deployed", phase=RUN_END, host=names[1], elapsed_s=4.0)


def test_of_many_hosts_a_log_has_failures_ends_and_a_count(desk):
    desk.progress = LineProgress(desk.keep, clock=lambda: desk.now, hosts=30)
    _play(desk.say, 30)
    assert desk.lines == [
        "gpu01 wait: FAILED it died (2.0s)",
        "gpu01 end: FAILED failed (3.0s)",
        "gpu02 end: ok deployed (4.0s)",
    ]
    for _ in range(8):
        desk.now += LINE_EVERY_S
        desk.progress.beat()
    counts = desk.lines[3:]
    assert len(counts) == 2, "one each 15 s"
    assert set(counts) == {
        re.sub(r"^\S+Z ", "", "2 of 30 done, 1 of them failed; under way: 27 wait, 1 push")
    }


def test_a_note_that_is_of_no_host_stands_by_itself(desk):
    desk.say(EventKind.NOTE, "batch 1 of 2: gpu01", phase="rollout", host="")
    assert desk.lines == ["rollout: note batch 1 of 2: gpu01"]


def test_the_live_display_of_many_hosts_fits_the_terminal():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=16, color_system=None)
    live = LiveProgress(console, hosts=30)
    _play(
        lambda kind, message="", **more: live(
            Event(kind, more.pop("host"), more.pop("phase"), message, **more)
        ),
        30,
    )
    scrolled = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert len(scrolled) == 3 and scrolled[2].startswith("✓ gpu02    end          4.0s  deployed")
    stream.truncate(0)
    console.print(live._render())
    shown = [line.rstrip() for line in stream.getvalue().replace("\0", "").splitlines()]
    assert len(shown) == 14
    assert "gpu30" in shown[0] and "push" in shown[0], "the longest under way first"
    assert "weights 1/64" in shown[1]
    assert shown[-2:] == ["  and 16 more", "2 of 30 done, 1 of them failed; under way: 27 wait, 1 push"]


def test_few_hosts_keep_their_phases():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    live = LiveProgress(console, hosts=MANY)
    _play(
        lambda kind, message="", **more: live(
            Event(kind, more.pop("host"), more.pop("phase"), message, **more)
        ),
        3,
    )
    assert stream.getvalue().count("30 MB") == 2


def test_nothing_is_cut_off_on_a_terminal():
    stream = io.StringIO()
    path = f"/root/{'evidence-' * 9}/journal.log"
    command = "ddtree-ops lock status ct200"
    with LiveProgress(Console(file=stream, force_terminal=True, width=60, color_system=None)) as live:
        live(Event(EventKind.DONE, "ct200", "capture", f"kept in {path}; somebody else deploys: {command}"))
    lines = stream.getvalue().splitlines()
    assert any(path in line for line in lines), lines
    assert any(command in line for line in lines), lines


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        (Verdict.PASS, EventKind.DONE),
        (Verdict.SKIPPED, EventKind.DONE),
        (Verdict.INCONCLUSIVE, EventKind.UNSURE),
        (Verdict.FAIL, EventKind.FAIL),
    ],
)
def test_a_phase_ends_as_its_verdict_says(verdict, kind):
    assert EventKind.end(verdict) is kind
