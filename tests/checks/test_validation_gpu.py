"""The recorded runs on a GPU (``docs/evidence/h200-validation``): what they say, and what pure functions make of it."""

from __future__ import annotations

import json
import re
import sys
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.checks.bench.measuring import load_figures, memory_figures, parse_nvidia_smi
from ddtree_ops.checks.engine import ServerInfo
from ddtree_ops.checks.speculation import summarise_decode
from ddtree_ops.deploy.preflight import probe_host
from ddtree_ops.deploy.preflight.facts import Answer, _gpus
from ddtree_ops.inventory import load_inventory, select
from ddtree_ops.service.journal import Entry

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/evidence/h200-validation"


@pytest.fixture(scope="module")
def seen() -> dict[str, str]:
    """What the machine said, by path in the archive."""
    with tarfile.open(FOLDER / "logs.tar.xz") as archive:
        files = [member for member in archive if "/seen/" in member.name]
        return {file.name: archive.extractfile(file).read().decode("utf-8", "replace") for file in files}  # type: ignore[union-attr]


def said(text: str) -> str:
    """The output of a command without its command line and its exit status."""
    return "\n".join(line for line in text.splitlines() if not re.match(r"\$ |\[exit status", line))


def report(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def checks(name: str) -> dict[str, dict[str, Any]]:
    (target,) = report(name)["targets"]
    return {check["name"]: check for check in target["checks"]}


class TestTheRecord:
    def test_every_command_ended_as_expected_but_the_bench_that_ran_out_of_time(self) -> None:
        for number in (1, 2, 3):
            steps = json.loads((FOLDER / f"run-{number}.json").read_text())["steps"]
            wrong = [(step["step"], step["status"]) for step in steps if step["status"] != step["expected"]]
            assert wrong == ([("bench-serving", 124), ("bench-serving-status", 8)] if number == 3 else [])

    def test_the_page_says_what_the_reports_say(self) -> None:
        page = (FOLDER / "README.md").read_text()
        assert len(page.splitlines()) <= 40
        standard = [check["verdict"] for check in checks("standard-ddtree").values()]
        assert (standard.count("pass"), standard.count("skipped"), len(standard)) == (17, 4, 21)
        assert "| 17 pass, 4 skipped |" in page
        for name, words in (("standard-ddtree", "13 of 17"), ("lossless-wide", "10 of 17")):
            assert checks(name)["lossless"]["summary"].startswith(words)
            assert f"| {words} equal" in page
        assert report("rest")["verdict"] == "pass"
        assert report("bench-serving")["complete"] is False
        assert len(checks("bench-serving")) == 4
        rates = {name: check["summary"].split()[0] for name, check in checks("bench-own").items()}
        shown = "baseline {} and {}, DFLASH {} and {}, DDTREE {} and {} tokens/s".format(*rates.values())
        assert shown in page

    def test_ties_are_far_within_epsilon_and_another_target_fails(self) -> None:
        gaps = {}
        for name in ("standard-ddtree", "lossless-wide", "lossless-off"):
            check = checks(name)["lossless"]
            text = " ".join(item["text"] for item in check["evidence"])
            gaps[name] = [float(gap) for gap in re.findall(r"gap ([\d.]+) nats", text)]
        assert 0 < max(gaps["standard-ddtree"]) < max(gaps["lossless-wide"]) < 0.26 / 8
        assert min(gaps["lossless-off"]) > 0.52
        assert checks("lossless-off")["lossless"]["verdict"] == "fail"


class TestPureFunctionsOnTheRecord:
    def test_the_gpu_and_its_processes(self, seen: dict[str, str]) -> None:
        (gpu,) = _gpus(Answer(0, said(seen["run-1/seen/gpu-query.txt"]).strip()))
        assert (gpu.name, gpu.arch, gpu.memory_mib, gpu.driver) == (
            "NVIDIA H200",
            "sm90",
            143771.0,
            "580.159.04",
        )
        found = probe_host.gpu_processes([0, said(seen["run-1/seen/gpu-apps.txt"])])
        assert [(each["name"], each["gpu"]) for each in found] == [("sglang::scheduler", gpu.uuid)] * 4
        (used,) = parse_nvidia_smi(said(seen["run-1/seen/gpu-memory.txt"]))
        assert used == pytest.approx(4.625, abs=1e-3)
        assert gpu.used_mib == 4411.0
        assert sum(float(each["mib"]) for each in found) < gpu.used_mib

    def test_what_the_server_says_of_its_memory(self, seen: dict[str, str]) -> None:
        raw = json.loads(said(seen["run-1/seen/server-info-tiny-ddtree.txt"]))
        assert raw["internal_states"][0]["memory_usage"].keys() == {
            "weight",
            "kvcache",
            "token_capacity",
            "graph",
        }
        info = ServerInfo("0.5.11", "DDTREE", None, False, "triton", raw)
        figures = memory_figures(info, (4.625,), {})
        parts = {each.labels.get("part", ""): each.value for each in figures if each.name == "gpu_memory"}
        assert parts == {"": 4.625, "weights": 0.129, "kv-cache": 0.14, "graphs": 1.299}
        assert [each.value for each in figures if each.name == "kv_tokens"] == [131072.0]

    def test_the_phases_of_each_start_of_a_bench(self, seen: dict[str, str]) -> None:
        """The journal has whole seconds here, the report what the bench itself saw."""
        starts: list[list[Entry]] = []
        line = re.compile(r"(\S+) h200 (\w+)\[(\d+)\]: (.*)")
        for text in seen["run-2/seen/journal-tiny-ddtree.txt"].splitlines():
            if (match := line.fullmatch(text)) is None:
                continue
            when = datetime.fromisoformat(match[1]).astimezone(UTC)
            if match[2] == "systemd" and match[4].startswith("Starting "):
                starts.append([])
            entry = Entry(when, match[4], 6, int(match[3]), match[2], "u", "i", "", "process", "h200", "", {})
            starts[-1].append(entry)
        (target,) = report("bench-own")["targets"]
        for mode, entries in zip(("baseline", "dflash", "ddtree"), starts[1:4], strict=True):
            wanted = {
                (figure["name"], figure["labels"].get("phase", "")): figure["value"]
                for figure in target["figures"]
                if figure["name"] in ("ready", "load_phase") and figure["labels"]["mode"] == mode
            }
            got = {
                (each.name, each.labels.get("phase", "")): each.value for each in load_figures(entries, {})
            }
            assert got.keys() == wanted.keys()
            assert ("load_phase", "graphs") in got
            assert (("load_phase", "drafter") in got) == (mode != "baseline")
            assert all(got[key] == pytest.approx(value, abs=1.1) for key, value in wanted.items())
            decode = summarise_decode(entry.message for entry in entries)
            assert (decode.with_graph, decode.without_graph) == (decode.lines, 0)
            assert decode.lines > 100
            assert bool(decode.accept_lengths) == (mode != "baseline")


class TestTheRun:
    @pytest.fixture
    def validation(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks/gpu"))
        monkeypatch.delitem(sys.modules, "validation", raising=False)
        import validation

        return validation

    def test_its_inventory_names_what_it_starts(
        self, validation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DDTREE_GPU_WORK", str(tmp_path))
        inventory = load_inventory(validation.INVENTORY)
        ports = {target.service.name: target.service.port for target in select(inventory, [])}
        assert ports == validation.PORTS
        assert set(validation.RUNTIMES) == set(inventory.runtimes)
        assert all(callable(step) for step in validation.STEPS.values())
