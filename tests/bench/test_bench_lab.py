"""A bench on a lab host: killed, interrupted, resumed, killed and begun anew, with a configuration that does not start and one
whose speculation gains nothing.

Every start of an engine is time: what can be shown by a start that another chapter needs is shown by that. There are five.
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
from ddtree_ops.runreport import RunReport, TargetReport, figures_named

pytestmark = pytest.mark.lab

UNIT = "sglang-k26-ddtree.service"
FAULTS = "/run/bench-faults"
LOAD = ("--max-tokens", "32", "--generator", "own", "--yes")
TREES = ("--no-baseline", "--no-dflash")
SMALL = ("--set", "args.cuda-graph-max-bs=48")
MANY = ("--concurrency", "1,2,4", "--requests", "40")
FIRST = ("ct200", *TREES, "--budgets", "120,32", *MANY, *SMALL, *LOAD)
"""Without an earlier activation: a budget that does not fit, then the service's own."""
SECOND = ("ct200", "--concurrency", "1", "--requests", "4", *LOAD)
THIRD = ("ct200", *TREES, "--budgets", "16", "--concurrency", "1", *LOAD)


class Desk:
    """``ddtree-ops`` as a person types it, with loads and windows that are short."""

    def __init__(self, lab: Any, folder: Path) -> None:
        lab.reset("ct200")
        data = yaml.safe_load(lab.inventory.read_text())
        quick = {
            "LAB_LOAD_SECONDS": "0",
            "LAB_DRAIN_POLL": "0.1",
            "LAB_HEALTH_POLL": "0.02",
            "LAB_TOKENS_PER_S": "200",
        }
        data["services"]["k26-ddtree"]["environment"] = {**quick, "LAB_FAULTS_FILE": FAULTS}
        data["defaults"]["service"]["health"] |= {"window": "0.1s", "prompt": "hello", "max_tokens": 64}
        self.lab, self.folder, self.original = lab, folder, ""
        inventory = folder / "quick.yaml"
        inventory.write_text(yaml.safe_dump(data, sort_keys=False))
        self.env = {**lab.env, "DDTREE_OPS_INVENTORY": str(inventory)}

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.lab.commands.run(argv, env=self.env)
        return done

    def start(self, *argv: str) -> Any:
        return self.lab.commands.start(argv, env=self.env, merged=True)

    def until(self, text: str, command: Any) -> list[str]:
        """What a command under way said until it said ``text``."""
        said = []
        for line in command.stdout:
            said.append(line)
            if text in line:
                return said
        with command:
            command.kill()
        pytest.fail(f"{text!r} was never said:\n{''.join(said[-40:])}")

    def report(self, name: str) -> TargetReport:
        report = self.whole(name)
        assert report.command == "bench"
        (target,) = report.targets
        return target

    def whole(self, name: str) -> RunReport:
        return RunReport.from_json(json.loads((self.folder / name / "report.json").read_text()))

    def host(self, *argv: str) -> str:
        done = subprocess.run(
            lab_hosts.ssh_argv("ct200", list(argv)), capture_output=True, text=True, check=True
        )
        return done.stdout

    def kill(self, text: str, command: Any) -> None:
        """SIGKILL once it has said ``text``."""
        self.until(text, command)
        command.kill()
        with command:
            assert command.wait() == -signal.SIGKILL

    def interrupt(self, text: str, command: Any) -> str:
        """SIGTERM once it has said ``text``; all that it said."""
        said = self.until(text, command)
        command.send_signal(signal.SIGTERM)
        with command:
            said += command.stdout.read()
            assert command.wait() == 130, "".join(said)
        return "".join(said)

    def unit(self) -> str:
        return self.host("cat", f"/etc/systemd/system/{UNIT}")

    def lock_is_free(self) -> bool:
        return "is free" in self.run("lock", "status", "ct200").stdout

    def starts(self) -> int:
        return self.host("journalctl", "-q", "-o", "cat", "-u", UNIT).count(f"Started {UNIT}")


@pytest.fixture(scope="module")
def desk(lab: Any, plant: Any, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    made = Desk(lab, tmp_path_factory.mktemp("bench"))
    plant(lab.hosts["ct200"])
    return made


class TestStory:
    """In order: each chapter starts where the one before ended."""

    def test_1_killed_half_way_it_leaves_what_it_measured_and_no_lock_and_meanwhile_there_is_no_other(
        self, desk
    ):
        first = desk.start("bench", *FIRST, "--report-dir", str(desk.folder / "first"))
        desk.until("configuration 2 of 2", first)
        other = desk.run("bench", *FIRST, "--report-dir", str(desk.folder / "other"))
        assert other.returncode == 6, other.stdout + other.stderr
        assert "another bench is under way" in other.stderr
        desk.kill("ok bench.ddtree-b32-k8-c1", first)
        desk.begun = desk.starts()
        report = desk.whole("first")
        assert (report.complete, report.ended) == (False, "")
        assert "bench.ddtree-b32-k8-c1" in {check.name for check in desk.report("first").checks}
        assert desk.lock_is_free()

    def test_2_other_options_are_not_mixed_in(self, desk):
        before = (desk.folder / "first" / "report.json").read_bytes()
        done = desk.run("bench", *FIRST, "--requests", "5", "--resume", str(desk.folder / "first"))
        assert done.returncode == 2, done.stderr
        assert "requests: 40, and now 5" in done.stderr
        assert (desk.folder / "first" / "report.json").read_bytes() == before

    def test_3_begun_anew_where_nothing_had_passed_before_the_one_that_was_killed_it_refuses(self, desk):
        done = desk.run("bench", *FIRST, "--report-dir", str(desk.folder / "refused"))
        assert done.returncode == 5, done.stdout + done.stderr
        assert "the last bench was killed" in done.stderr
        assert "deploy ct200" in done.stderr

    def test_4_resumed_and_interrupted_while_it_measures_it_says_how_to_go_on(self, desk):
        desk.first = desk.report("first")
        resumed = desk.start("bench", *FIRST, "--resume", str(desk.folder / "first"))
        said = desk.interrupt("ok bench.ddtree-b32-k8-c2", resumed)
        assert "--resume" in said
        assert "(measures what is missing)" in said
        assert "deploys what the inventory says" in said, "nothing had passed before it"
        assert desk.lock_is_free()
        assert not desk.whole("first").complete
        assert "bench.ddtree-b32-k8-c2" in {check.name for check in desk.report("first").checks}

    def test_5_resumed_again_it_measures_only_what_is_missing(self, desk):
        rows = desk.folder / "rows.csv"
        done = desk.run("bench", *FIRST, "--resume", str(desk.folder / "first"), "--csv", str(rows))
        assert done.returncode == 5, done.stdout + done.stderr
        assert desk.whole("first").complete
        target = desk.report("first")
        assert target.errors == ()
        assert [(check.name, check.verdict.value) for check in target.checks] == [
            (f"bench.ddtree-b{budget}-k8-c{at}", verdict)
            for budget, verdict in ((120, "fail"), (32, "pass"))
            for at in (1, 2, 4)
        ]
        kept = {check.name: check for check in target.checks}
        assert all(kept[check.name].seconds == check.seconds for check in desk.first.checks), "measured again"
        assert desk.starts() == desk.begun, "nothing was started since the one that was killed"
        assert len(rows.read_text().splitlines()) == 4

        figures = target.all_figures
        (accept,) = figures_named(figures, "accept_length", budget="32", topk="8", concurrency="2")
        assert 1 < accept.value <= 8
        assert figures_named(figures, "kv_tokens", budget="32")[0].value > 0
        bars = figures_named(figures, "accept_histogram", mode="ddtree", budget="32", topk="8")
        assert [bar.labels["accepted"] for bar in bars] == [str(number) for number in range(len(bars))]
        assert sum(bar.value for bar in bars) == bars[0].samples > 0
        assert all("concurrency" not in bar.labels for bar in bars)
        assert set(target.facts["acceptance_samples"]) == {"ddtree-b32-k8"}
        assert {figure.source for figure in figures_named(figures, "ttft")} == {"own load generator"}
        assert "recommended" not in target.facts, "one that passed is faster than nothing"

    def test_6_what_does_not_start_was_a_failed_point_and_the_others_went_on(self, desk):
        target = desk.report("first")
        assert all("oom-capture" in check.summary for check in target.checks if "b120" in check.name)
        assert {each["configuration"] for each in target.diagnoses} == {"ddtree-b120-k8"}

    def test_7_speculation_that_gains_nothing_is_measured_and_warned_of(self, desk):
        desk.original = desk.unit()
        desk.host(f"echo accept-1 > {FAULTS}")
        second = desk.start("bench", *SECOND, "--report-dir", str(desk.folder / "second"))
        desk.kill("ok bench.dflash-c1", second)
        desk.host(f": > {FAULTS}")
        target = desk.report("second")
        assert target.errors == ()
        assert all(check.ok for check in target.checks), [check.summary for check in target.checks]
        checks = {check.name: check for check in target.checks}
        assert set(checks) == {"bench.baseline-c1", "bench.dflash-c1"}
        assert checks["bench.dflash-c1"].facts["warning"].startswith("every draft was rejected")
        assert figures_named(target.all_figures, "accept_length", mode="dflash")[0].value == 1.0
        for mode in ("baseline", "dflash"):
            assert figures_named(target.all_figures, "load_phase", mode=mode, phase="weights")
            assert figures_named(target.all_figures, "restart", mode=mode)[0].value > 0
        assert len(figures_named(target.all_figures, "speedup", mode="dflash", concurrency="1")) == 1
        assert not figures_named(target.all_figures, "speedup", mode="baseline")
        assert not figures_named(target.all_figures, "accept_histogram", mode="baseline")
        assert desk.unit() != desk.original
        assert "a bench that was killed" in desk.run("status", "ct200").stdout

    def test_8_begun_anew_and_interrupted_it_puts_back_what_ran_before_the_one_that_was_killed(self, desk):
        third = desk.start("bench", *THIRD, "--report-dir", str(desk.folder / "third"))
        said = desk.interrupt("configuration 1 of 1", third)
        assert "the last bench was killed; what ran before it is activation" in said
        assert (
            "what ran before the bench that was killed was deployed with other settings than the inventory's: "
            "args.cuda-graph-max-bs 48, measured not set; it is put back afterwards" in said
        )
        assert desk.unit() == desk.original
        assert desk.lock_is_free()
        assert not desk.whole("third").complete
        target = desk.report("third")
        assert (target.errors, target.checks) == ((), ())
