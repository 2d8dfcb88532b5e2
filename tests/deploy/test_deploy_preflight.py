"""Preflight verdicts on golden cases: what the probe found goes in, verdicts and words come out. No host."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from ddtree_ops.deploy.preflight.facts import parse_facts
from ddtree_ops.deploy.preflight.judge import Wanted, judge, skew_of
from ddtree_ops.deploy.preflight.judge_venv import judge_plugins
from ddtree_ops.deploy.preflight.pins import pins_of
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.remote.files import FileEntry
from ddtree_ops.results import Verdict
from ddtree_ops.runtime import Bundle
from ddtree_ops.service.control import PortOwner
from ddtree_ops.service.state import UnitState

CASES = Path(__file__).parent / "cases" / "preflight"
SMI = Path(__file__).parents[1] / "data" / "gpu" / "nvidia-smi"
BASE = json.loads((CASES / "base.json").read_text())
SERVICE = {
    "name": "s", "unit": "s.service", "runtime": "r", "venv": "/venv", "model": "/m", "drafter": "/d",
    "tensor_parallel": 2, "speculative": {"algorithm": "DDTREE", "block_size": 8, "budget": 32},
}  # fmt: skip
GPU = {"name": "H200", "count": 2, "arch": "sm90", "memory_gb": 141, "driver": 580}
STATE = {"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead", "NRestarts": "0"}


class Loader(yaml.SafeLoader):
    """YAML with ``!file NAME``: a recorded output of nvidia-smi."""


Loader.add_constructor(
    "!file", lambda loader, node: (SMI / loader.construct_scalar(node)).read_text().strip()
)


def merged(base: Any, change: Any) -> Any:
    """Mappings merge key by key, an empty one and all else replaces; null takes a package away."""
    if not isinstance(base, dict) or not isinstance(change, dict) or not change:
        return change
    found = {**base, **{key: merged(base.get(key), value) for key, value in change.items()}}
    return {key: value for key, value in found.items() if value is not None or key != "transformers"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Of the size of the real one, with the requirements of its METADATA."""
    root = tmp_path_factory.mktemp("bundle")
    path = "sglang-0.5.11.dist-info/METADATA"
    (root / path).parent.mkdir()
    (root / path).write_text((CASES / "METADATA").read_text())
    files = (
        FileEntry(path, 0o644, 66_000, "0" * 64),
        FileEntry("sglang/_core.abi3.so", 0o755, 29_000_000, "0" * 64),
        *(FileEntry(f"sglang/{number}.py", 0o644, 200, "0" * 64) for number in range(2532)),
        FileEntry("ddtree_sglang/plugin.py", 0o644, 200, "0" * 64),
    )
    return Bundle("d" * 64, root, files, b"{}", name="runtime")


@pytest.mark.parametrize("path", sorted(CASES.glob("*.yaml")), ids=lambda path: path.stem)
def test_case(path: Path, bundle: Bundle):
    case = yaml.load(path.read_text(), Loader)
    known = {
        "facts", "service", "host", "state", "owners", "skew", "expect", "say", "hint", "absent", "release_there",
        "runtime_known",
    }  # fmt: skip
    assert set(case) <= known
    change = dict(case.get("facts", {}))
    edit = change.pop("gpus_edit", None)
    raw = merged(BASE, change) if change else BASE
    if edit:
        assert edit[0] in raw["gpus"][1]
        raw = {**raw, "gpus": [raw["gpus"][0], raw["gpus"][1].replace(*edit)]}
    service = Service.model_validate(merged(SERVICE, case["service"]) if "service" in case else SERVICE)
    host = Host.model_validate(
        {"name": "h", "gpu": merged(GPU, case["host"]["gpu"]) if "host" in case else GPU}
    )
    target = Target(
        host=host.model_copy(update={"services": {"s": service}}),
        service=service,
        runtime=RuntimeSpec(name="r"),
    )
    state = {**STATE, **case.get("state", {})}
    if state.get("StateChangeTimestamp", "").startswith("@-"):
        state["StateChangeTimestamp"] = f"@{raw['time'] - float(state['StateChangeTimestamp'][2:])}"
    results = {
        result.name.removeprefix("preflight."): result
        for result in judge(
            target,
            parse_facts(json.dumps(raw).encode()),
            [PortOwner(**owner) for owner in case.get("owners", [])],
            state=UnitState.parse(state),
            releases=frozenset({"d" * 64} if case.get("release_there") else ()),
            wanted=Wanted.of(bundle) if case.get("runtime_known", True) else None,
            skew=tuple(case.get("skew", (-0.2, 0.1))),
        )
    }
    told = {
        name: result.verdict.value for name, result in results.items() if result.verdict is not Verdict.PASS
    }
    assert told == case["expect"], {name: results[name].summary for name in told}
    for name, words in case.get("say", {}).items():
        assert words in results[name].summary
    for name, words in case.get("hint", {}).items():
        assert words in results[name].hint
    assert not set(case.get("absent", ())) & set(results)
    assert all(results[name].hint for name in told), "every warning and refusal says what to do"
    assert all(json.dumps(result.to_json()) for result in results.values())


def test_the_cases_cover_every_check():
    """Every check that can warn or refuse is seen to do so."""
    cases = [yaml.load(path.read_text(), Loader)["expect"] for path in CASES.glob("*.yaml")]
    source = "".join(
        path.read_text() for path in Path(__file__).parents[2].glob("ddtree_ops/deploy/preflight/judge*.py")
    )
    names = set(re.findall(r'(?:failed|unsure)\(\s*"([\w-]+)"', source)) | {"model", "drafter"}
    assert names == {name for case in cases for name in case}


@pytest.mark.parametrize(
    ("true_skew", "there", "back"), [(0.0, 0.1, 0.1), (-5.0, 0.05, 0.3), (3600.0, 2.0, 0.01), (1.0, 0.0, 0.0)]
)
def test_the_true_skew_lies_between_the_two_that_were_measured(true_skew, there, back):
    ours = 1_000_000.0
    at_hello = (ours + true_skew) - (ours + back)
    host_time = ours + there + true_skew
    low, high = skew_of(at_hello, host_time, ours)
    assert low - 1e-6 <= true_skew <= high + 1e-6
    assert high - low == pytest.approx(there + back, abs=1e-6)


def test_requirements_of_extras_and_other_machines_are_left_out(bundle):
    pins = pins_of(bundle)
    assert pins is not None and pins.source == "sglang 0.5.11"
    names = {requirement.name for requirement in pins.requirements}
    assert {"torch", "sglang-kernel", "transformers", "av", "torchcodec"} <= names
    assert not {"diffusers", "pytest", "ray", "granian"} & names
    have = {name: tuple(versions) for name, versions in BASE["venv"]["packages"].items()}
    assert pins.mismatches(have, "x86_64", "3.12") == []
    without = {
        name: versions for name, versions in have.items() if name not in ("av", "decord2", "torchcodec")
    }
    assert [one.name for one in pins.mismatches(without, "x86_64", "3.12")] == ["torchcodec"]
    assert [one.name for one in pins.mismatches(without, "aarch64", "3.12")] == ["decord2", "av"]


def test_a_venv_is_judged_once_and_what_came_out_is_kept(bundle, tmp_path, monkeypatch):
    (tmp_path / bundle.digest).mkdir()
    kept = replace(bundle, root=tmp_path / bundle.digest / "tree")
    kept.root.symlink_to(bundle.root)
    have = {name: tuple(versions) for name, versions in BASE["venv"]["packages"].items()}
    have |= {"torch": ("2.10.0",), "openai": ("2.5.0",)}

    def judge(packages):
        monkeypatch.setattr("ddtree_ops.deploy.preflight.pins._kept", {})  # as another process
        return pins_of(kept).mismatches(packages, "x86_64", "3.12")

    found = judge(have)
    assert [(one.name, one.found, one.older, one.near) for one in found] == [
        ("openai", "2.5.0", True, False),
        ("torch", "2.10.0", True, False),
    ]
    (file,) = (tmp_path / bundle.digest).glob("venv-*.json")
    file.write_text(file.read_text().replace("2.5.0", "2.5.1"))
    assert [one.found for one in judge(have)] == ["2.5.1", "2.10.0"], "read, not judged again"
    file.write_text("{")
    assert judge(have) == found
    assert [one.name for one in judge({**have, "torch": ("2.11.0+cu130",)})] == ["openai"]


def test_a_runtime_without_metadata_has_no_pins(tmp_path):
    assert pins_of(Bundle("d" * 64, tmp_path, (FileEntry("sglang/x.py", 0o644, 1, "0" * 64),), b"{}")) is None


def test_a_release_without_the_overlay_has_no_plugin_to_be_in_the_way_of(bundle: Bundle) -> None:
    """As that of a tree with a DDTREE of its own."""
    service = Service.model_validate(SERVICE)
    target = Target(
        host=Host.model_validate({"name": "h", "address": "192.0.2.1", "services": {"s": service}}),
        service=service,
        runtime=RuntimeSpec(),
    )

    def told(venv: dict[str, Any], overlay: bool) -> list[str]:
        facts = SimpleNamespace(venv=SimpleNamespace(**{"plugins": (), "packages": {}, **venv}))
        return [one.summary for one in judge_plugins(target, cast(Any, facts), overlay=overlay)]

    other = {"plugins": (("trees", "ddtree", "trees:install"),)}
    assert len(told(other, True)) == 1 and told(other, False) == []
    ours = {"packages": {"ddtree-sglang": ("0.0.9",)}}
    assert "the release's own goes before it" in told(ours, True)[0]
    assert "the release has none, and sglang runs it" in told(ours, False)[0]
    assert Wanted.of(bundle).overlay
    bare = replace(bundle, files=tuple(one for one in bundle.files if one.path.startswith("sglang")))
    assert not Wanted.of(bare).overlay
