"""A bench on a lab host: killed, resumed, killed and begun anew, interrupted, with a configuration that does not start.

Every start of an engine is time: what can be shown by a start that another chapter needs is shown by that.
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops import lab as lab_hosts
from ddtree_ops.runreport import RunReport, figures_named

pytestmark = pytest.mark.lab

UNIT = "sglang-k26-ddtree.service"
POINTS = ("--concurrency", "1,2", "--requests", "4", "--max-tokens", "32", "--generator", "own", "--yes")
BOTH = ("ct200", "--no-dflash", *POINTS)
ANEW = ("ct200", "--no-baseline", "--no-dflash", "--concurrency", "1", "--requests", "4000", "--yes")
SMALL = ("--generator", "own", "--set", "args.cuda-graph-max-bs=48")


class Desk:
    """``ddtree-ops`` as a person types it, with loads and windows that are short."""

    def __init__(self, lab: Any, folder: Path) -> None:
        lab.reset("ct200")
        data = yaml.safe_load(lab.inventory.read_text())
        quick = {"LAB_LOAD_SECONDS": "0", "LAB_DRAIN_POLL": "0.1", "LAB_HEALTH_POLL": "0.02"}
        data["services"]["k26-ddtree"]["environment"] = quick
        data["defaults"]["service"]["health"]["window"] = "0.1s"
        self.lab, self.folder, self.original = lab, folder, ""
        inventory = folder / "quick.yaml"
        inventory.write_text(yaml.safe_dump(data, sort_keys=False))
        self.env = {**lab.env, "DDTREE_OPS_INVENTORY": str(inventory)}

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.lab.commands.run(argv, env=self.env)
        return done

    def until(self, text: str, *argv: str) -> Any:
        """A command under way that has said ``text``."""
        command = self.lab.commands.start(argv, env=self.env, merged=True)
        said = []
        for line in command.stdout:
            said.append(line)
            if text in line:
                return command
        with command:
            command.kill()
        pytest.fail(f"{text!r} was never said:\n{''.join(said[-40:])}")

    def report(self, name: str) -> RunReport:
        return RunReport.from_json(json.loads((self.folder / name / "report.json").read_text()))

    def host(self, *argv: str) -> str:
        done = subprocess.run(
            lab_hosts.ssh_argv("ct200", list(argv)), capture_output=True, text=True, check=True
        )
        return done.stdout

    def kill(self, text: str, *argv: str) -> None:
        """A command that is killed by SIGKILL once it has said ``text``."""
        command = self.until(text, *argv)
        command.kill()
        with command:
            assert command.wait() == -signal.SIGKILL

    def unit(self) -> str:
        return self.host("cat", f"/etc/systemd/system/{UNIT}")

    def lock_is_free(self) -> bool:
        return "is free" in self.run("lock", "status", "ct200").stdout

    def starts(self) -> int:
        return self.host("journalctl", "-q", "-o", "cat", "-u", UNIT).count(f"Started {UNIT}")


@pytest.fixture(scope="module")
def desk(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(lab, tmp_path_factory.mktemp("bench"))


class TestStory:
    """In order: each chapter starts where the one before ended."""

    def test_1_killed_half_way_it_leaves_what_it_measured_and_no_lock(self, desk):
        first = ("bench", *BOTH, "--report-dir", str(desk.folder / "killed"))
        desk.kill("ok bench.baseline-c1", *first)
        report = desk.report("killed")
        assert (report.command, report.complete, report.ended) == ("bench", False, "")
        (target,) = report.targets
        assert "bench.baseline-c1" in {check.name for check in target.checks}
        assert desk.lock_is_free()

    def test_2_other_options_are_not_mixed_in(self, desk):
        before = (desk.folder / "killed" / "report.json").read_bytes()
        done = desk.run("bench", *BOTH, "--requests", "5", "--resume", str(desk.folder / "killed"))
        assert done.returncode == 2, done.stderr
        assert "requests: 4, and now 5" in done.stderr
        assert (desk.folder / "killed" / "report.json").read_bytes() == before

    def test_3_begun_anew_where_nothing_had_passed_before_the_one_that_was_killed_it_refuses(self, desk):
        starts = desk.starts()
        done = desk.run("bench", *BOTH, "--report-dir", str(desk.folder / "refused"))
        assert done.returncode == 5, done.stdout + done.stderr
        assert "the last bench was killed" in done.stderr
        assert "deploy ct200" in done.stderr
        assert desk.starts() == starts

    def test_4_resumed_it_measures_only_what_is_missing(self, desk):
        before, starts = desk.report("killed").targets[0], desk.starts()
        rows = desk.folder / "rows.csv"
        done = desk.run("bench", *BOTH, "--resume", str(desk.folder / "killed"), "--csv", str(rows))
        assert done.returncode == 0, done.stdout + done.stderr
        report = desk.report("killed")
        assert report.complete
        (target,) = report.targets
        assert [check.name for check in target.checks] == [
            f"bench.{name}-c{at}" for name in ("baseline", "ddtree-b32-k8") for at in (1, 2)
        ]
        assert all(check.ok for check in target.checks), [check.summary for check in target.checks]
        kept = {check.name: check for check in target.checks}
        assert all(kept[check.name].seconds == check.seconds for check in before.checks), "measured again"
        assert desk.starts() == starts + 1, "the start that was measured half-way serves still"
        assert len(rows.read_text().splitlines()) == 5

        figures = target.all_figures
        for mode in ("baseline", "ddtree"):
            assert figures_named(figures, "load_phase", mode=mode, phase="weights")
            assert figures_named(figures, "restart", mode=mode)[0].value > 0
        assert len(figures_named(figures, "speedup", mode="ddtree")) == 2
        assert not figures_named(figures, "speedup", mode="baseline")
        (accept,) = figures_named(figures, "accept_length", budget="32", topk="8", concurrency="2")
        assert 1 < accept.value <= 8
        assert figures_named(figures, "kv_tokens", budget="32")[0].value > 0
        bars = figures_named(figures, "accept_histogram", mode="ddtree", budget="32", topk="8")
        assert [bar.labels["accepted"] for bar in bars] == [str(number) for number in range(len(bars))]
        assert sum(bar.value for bar in bars) == bars[0].samples > 0
        assert all("concurrency" not in bar.labels for bar in bars)
        assert not figures_named(figures, "accept_histogram", mode="baseline")
        assert set(target.facts["acceptance_samples"]) == {"ddtree-b32-k8"}
        assert {figure.source for figure in figures_named(figures, "ttft")} == {"own load generator"}
        assert set(target.facts["recommended"]) == {"1", "2"}

    def test_5_what_does_not_start_is_a_failed_point_and_the_others_go_on(self, desk):
        desk.original = desk.unit()
        folder = ("--report-dir", str(desk.folder / "oom"))
        desk.kill("ddtree-b16-k8, concurrency 1", "bench", *ANEW, "--budgets", "120,16", *SMALL, *folder)
        (target,) = desk.report("oom").targets
        assert target.errors == ()
        (check,) = target.checks
        assert (check.name, check.verdict.value) == ("bench.ddtree-b120-k8-c1", "fail")
        assert "oom-capture" in check.summary
        assert [each["configuration"] for each in target.diagnoses] == ["ddtree-b120-k8"]
        assert desk.unit() != desk.original
        assert "a bench that was killed" in desk.run("status", "ct200").stdout

    def test_6_begun_anew_and_interrupted_it_puts_back_what_ran_before_the_one_that_was_killed(self, desk):
        folder = ("--report-dir", str(desk.folder / "interrupted"))
        command = desk.until("concurrency 1", "bench", *ANEW, "--budgets", "16", *SMALL, *folder)
        command.send_signal(signal.SIGTERM)
        with command:
            said = command.stdout.read()
            assert command.wait() == 130, said
        assert "--resume" in said
        assert "(measures what is missing)" in said
        assert desk.unit() == desk.original
        assert desk.lock_is_free()
        report = desk.report("interrupted")
        assert not report.complete
        (target,) = report.targets
        assert (target.errors, target.checks) == ((), ())
