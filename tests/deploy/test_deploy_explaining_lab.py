"""``diagnose HOST`` on a lab host that died as in the story: the whole of what is said, restarted by systemd or not."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.lab

STOCK = "sglang-0.5.11-stock"


@pytest.fixture(scope="module")
def desk(new_desk, tmp_path_factory):
    """It remembers no crash that another test has seen."""
    return new_desk(
        "ct200", load=0.1, lease="60s", planted=True, XDG_STATE_HOME=str(tmp_path_factory.mktemp("state"))
    )


@pytest.fixture(scope="module")
def crashed(desk) -> str:
    """Id of the run of the unpatched runtime that died on its first request; systemd has started it again."""
    code, result, log = desk.deploy(
        "ct200", "--runtime", STOCK, "--no-rollback", "--set", "restart.delay=0.1s"
    )
    assert code == 5, log
    diagnosis = result["diagnosis"]
    assert diagnosis["trace"], "a failed deploy is traced too"
    assert diagnosis["seen"] == "not seen before here"
    limit = time.monotonic() + 300
    while desk.show("ct200", "InvocationID") == diagnosis["invocation"] and time.monotonic() < limit:
        time.sleep(0.2)
    return str(diagnosis["invocation"])


class TestStory:
    """In order: each chapter starts where the one before ended."""

    def test_1_the_run_that_crashed_is_explained_not_the_one_that_systemd_began_since(self, desk, crashed):
        running = desk.show("ct200", "InvocationID")
        assert running != crashed
        done = desk.run("diagnose", "ct200")
        assert done.returncode == 5, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == (
            "ct200: ddtree-graph-size on 8 ranks: target-verify CUDA graph is sized for the draft block"
        )
        assert lines[1].startswith(
            f"  note: explained is the run {crashed[:12]} that crashed: the run after it,"
        )
        assert f"--invocation {running}" in lines[1]
        assert lines[2] == (
            "  8 = 1 x block_size 8, 33 = 1 x (budget 32 + 1): the target-verify graph was sized for the draft; "
            "the deployed runner lacks patch 0001."
        )
        assert lines[3].startswith("  trace, read in release ")
        assert [line.removeprefix("    ->").split()[0] for line in lines[4:8]] == [
            "server_args.py:5405",
            "server_args.py:521",
            "cuda_graph_runner.py:615",
            "cuda_graph_runner.py:630",
        ]
        assert lines[4].endswith(" --speculative-num-draft-tokens")
        assert lines[7].endswith(" self.num_tokens_per_bs = self.speculative_num_draft_tokens")
        rest = "\n".join(lines[8:])
        for part in (
            "  <- it failed here",
            "    !! --speculative-ddtree-budget: cuda_graph_runner.py never reads speculative_ddtree_budget",
            "  patch: release ",
            " lacks the patch: pristine: as in the wheel of sglang 0.5.11",
            "  remedy: deploy the patched runtime: ddtree-ops deploy ct200",
            "  not seen before here",
            ": RuntimeError: The size of tensor a (8) must match the size of tensor b (33)",
            "  then: a worker process ended with an exception",
        ):
            assert part in rest
        assert "note" not in rest

    def test_2_it_is_explained_by_its_own_release_after_another_was_deployed(self, desk, crashed, documented):
        code, result, log = desk.deploy("ct200")
        assert code == 0, log
        sound = desk.run("diagnose", "ct200", "--json")
        assert sound.returncode == 0, sound.stdout
        document = documented(sound.stdout)
        assert (document["verdict"], document["facts"]["patched"]) == ("pass", True)
        assert any(f"--invocation {crashed}" in note for note in document["notes"])
        done = desk.run("diagnose", "ct200", "--invocation", crashed, "--json")
        assert done.returncode == 5, done.stderr
        document = documented(done.stdout)
        assert document["invocation"] == crashed
        cause = document["diagnoses"][0]
        assert (cause["signature"], cause["severity"], cause["count"]) == ("ddtree-graph-size", "fatal", 8)
        assert document["facts"]["patched"] is False, (
            "of the release that ran, not of the one that is there now"
        )
        assert f"now release {result['plan']['release'][:12]} is deployed" in document["patch"]
        assert [step["step"] for step in document["trace"]][:2] == ["flag", "field"]

    def test_3_a_service_of_a_host_is_asked_for_a_run_that_is_none(self, desk, crashed, documented):
        done = desk.run("diagnose", "ct200/k26-ddtree", "--invocation", "e" * 32, "--json")
        assert done.returncode == 8, done.stderr
        (note,) = documented(done.stdout)["notes"]
        assert "it is no run of this unit, or was rotated away" in note
        assert crashed in note.partition("runs that are known: ")[2]

    def test_4_its_journal_as_a_file_is_traced_in_the_runtime_that_wrote_it(
        self, desk, crashed, documented, tmp_path
    ):
        """The traceback's lines stand in the patched runtime too, and the service has that one now."""
        log = tmp_path / "taken.json"
        log.write_text(desk.host("ct200", f"journalctl -o json _SYSTEMD_INVOCATION_ID={crashed} 2>/dev/null"))
        for argv, more in (([], ""), (["--service", "k26-ddtree"], " (that of the service, ")):
            done = desk.run("diagnose", str(log), *argv, "--json")
            assert done.returncode == 5, done.stderr
            document = documented(done.stdout)
            assert document["trace_origin"].startswith(f"local bundle {STOCK}, which lacks the patch{more}")
            assert document["trace"][-1]["text"].endswith("never reads speculative_ddtree_budget")

    def test_5_a_journal_that_is_gone_is_no_pass_and_the_reason_is_told(self, desk, crashed, documented):
        desk.host(
            "ct200",
            "journalctl --rotate -q; journalctl --vacuum-time=1s -q; sleep 1.1; journalctl --vacuum-time=1s -q",
        )
        done = desk.run("diagnose", "ct200", "--json")
        assert done.returncode == 8, done.stdout
        document = documented(done.stdout)
        assert (document["verdict"], document["searched"]["lines"]) == ("inconclusive", 0)
        assert any("its entries were rotated away" in note for note in document["notes"])
