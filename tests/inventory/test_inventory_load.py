"""Finding inventories, merging, the shipped file, the schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops import paths
from ddtree_ops.errors import ConfigError
from ddtree_ops.inventory import inventory_schema, load_inventory
from ddtree_ops.inventory.load import merge, resolve
from ddtree_ops.inventory.yaml_source import parse_document

quick = settings(max_examples=50)
MINIMAL = "schema: 1\nhosts: {HOST: {}}\n"


def _write(path: Path, host: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MINIMAL.replace("HOST", host))
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("DDTREE_OPS_INVENTORY", raising=False)
    return tmp_path


def test_a_name_is_looked_up_here_then_at_the_user_s_then_among_the_shipped(here: Path) -> None:
    assert list(load_inventory("production").hosts) == ["ct200", "b300"]
    _write(here / "config/ddtree-ops/inventories/production.yaml", "users")
    assert list(load_inventory("production").hosts) == ["users"]
    _write(here / "inventories/production.yaml", "local")
    assert list(load_inventory("production").hosts) == ["local"]
    assert load_inventory("production").path == "inventories/production.yaml"


def test_paths(here: Path) -> None:
    _write(here / "some where/x.yml", "one")
    assert list(load_inventory("some where/x.yml").hosts) == ["one"]
    assert list(load_inventory(str(here / "some where/x.yml")).hosts) == ["one"]
    _write(here / "plain", "two")
    assert list(load_inventory("plain").hosts) == ["two"]


def test_the_default_is_the_variable_then_production(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(load_inventory().hosts) == ["ct200", "b300"]
    _write(here / "inventories/mine.yaml", "mine")
    monkeypatch.setenv("DDTREE_OPS_INVENTORY", "mine")
    assert list(load_inventory().hosts) == ["mine"]
    assert list(load_inventory("production").hosts) == ["ct200", "b300"]
    monkeypatch.setenv("DDTREE_OPS_INVENTORY", "mien")
    with pytest.raises(ConfigError) as caught:
        load_inventory()
    assert caught.value.message == "there is no inventory named mien (did you mean 'mine'?)"
    assert caught.value.hint == "name an inventory with -i NAME_OR_PATH (DDTREE_OPS_INVENTORY is mien)"


def test_what_is_not_there_names_the_places_and_the_names(here: Path) -> None:
    _write(here / "inventories/mine.yaml", "mine")
    with pytest.raises(ConfigError) as caught:
        load_inventory("zzz")
    shipped = paths.shipped("inventories")
    *looked, names = caught.value.details
    assert looked == [
        "looked for inventories/zzz.yaml",
        "looked for config/ddtree-ops/inventories/zzz.yaml",
        f"looked for {shipped}/zzz.yaml",
    ]
    assert re.fullmatch(r"there are: .*\bmine, production\b.*", names)
    with pytest.raises(ConfigError, match=r"^inventory sub/zzz.yaml does not exist$"):
        load_inventory("sub/zzz.yaml")


def test_paths_of_this_machine_are_relative_to_the_inventory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    file = here / "sub/x.yaml"
    file.parent.mkdir()
    file.write_text(
        "schema: 1\nruntimes: {r: {base: ../tree}, q: {base: ~/tree}, p: {}}\n"
        "hosts:\n  h:\n    ssh: {identity_file: keys/id, known_hosts: /etc/known, config: ~/.ssh/x}\n"
    )
    inventory = load_inventory(str(file))
    ssh = inventory.hosts["h"].ssh
    assert (ssh.identity_file, ssh.known_hosts, ssh.config) == (
        str(here / "sub/keys/id"),
        "/etc/known",
        "/home/someone/.ssh/x",
    )
    assert [inventory.runtimes[name].base for name in "rqp"] == [
        str(here / "sub/../tree"),
        "/home/someone/tree",
        None,
    ]


def test_the_lab_folder_counts_as_set(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDTREE_OPS_LAB_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    file = here / "x.yaml"
    file.write_text('schema: 1\nhosts: {h: {ssh: {known_hosts: "${DDTREE_OPS_LAB_DIR}/known_hosts"}}}\n')
    assert load_inventory("x.yaml").hosts["h"].ssh.known_hosts == "/state/ddtree-ops/lab/known_hosts"
    monkeypatch.setenv("DDTREE_OPS_LAB_DIR", "/lab")
    assert load_inventory("x.yaml").hosts["h"].ssh.known_hosts == "/lab/known_hosts"


keys = st.sampled_from("abc")
values = st.recursive(
    st.integers(0, 9) | st.text("xy", max_size=2) | st.lists(st.integers(0, 3), max_size=2),
    lambda inner: st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
trees = st.dictionaries(keys, values, max_size=3)
patches = st.dictionaries(
    keys, values | st.none() | st.dictionaries(keys, values | st.none(), max_size=3), max_size=3
)


@quick
@given(trees)
def test_merging_nothing_or_itself_changes_nothing(tree: dict[str, Any]) -> None:
    assert merge(tree, {}) == tree
    assert merge({}, tree) == tree
    assert merge(tree, tree) == tree


@quick
@given(trees, patches)
def test_merging_twice_is_merging_once_and_leaves_its_arguments(
    tree: dict[str, Any], patch: dict[str, Any]
) -> None:
    before = repr((tree, patch))
    once = merge(tree, patch)
    assert merge(once, patch) == once
    assert repr((tree, patch)) == before


@quick
@given(trees, patches)
def test_a_merge_holds_what_the_patch_says_and_else_what_was_there(
    tree: dict[str, Any], patch: dict[str, Any]
) -> None:
    def holds(result: Any, base: Any, over: Any) -> None:
        if not isinstance(over, dict):
            assert result == over
            return
        base = base if isinstance(base, dict) else {}
        assert set(result) == {key for key in {*base, *over} if over.get(key, base.get(key)) is not None}
        for key in result:
            if key in over:
                holds(result[key], base.get(key), over[key])
            else:
                assert result[key] == base[key]

    holds(merge(tree, patch), tree, patch)


def test_production_describes_the_two_machines() -> None:
    inventory = load_inventory(str(paths.shipped("inventories") / "production.yaml"))
    ct200, b300 = inventory.hosts["ct200"], inventory.hosts["b300"]
    assert ct200.gpu is not None
    assert b300.gpu is not None
    assert (ct200.gpu.count, ct200.gpu.arch, ct200.gpu.interconnect, ct200.gpu.memory_gb) == (
        8,
        "sm120",
        "pcie",
        96,
    )
    assert (b300.gpu.count, b300.gpu.arch, b300.gpu.interconnect) == (8, "sm103", "nvlink")
    for host in inventory.hosts.values():
        assert host.address is None, "hosts are named; the user's ssh_config knows the rest"
        assert host.ssh.model_dump(exclude={"connect_timeout", "python"}, exclude_none=True) == {}
        service = host.services["k26-ddtree"]
        assert service.unit == "sglang-k26-ddtree.service"
        assert service.venv == "/root/venv_sglang211"
        assert (service.model, service.drafter) == (
            "/root/models/Kimi-K2.6",
            "/root/models/Kimi-K2.6-DFlash-tmp-long",
        )
        assert (service.port, service.tensor_parallel) == (30001, 8)
        assert service.speculative is not None
        assert service.speculative.model_dump() == {
            "algorithm": "DDTREE",
            "block_size": 8,
            "budget": 32,
            "topk_cap": 8,
            "budget_schedule": "fixed",
        }
        assert service.health.load_timeout > 1210, "the slowest load seen"
    assert "attention-backend" not in ct200.services["k26-ddtree"].args
    assert b300.services["k26-ddtree"].args["attention-backend"] == "triton"
    assert inventory.runtimes["sglang-0.5.11-ddtree"].patches is None
    assert inventory.runtimes["sglang-0.5.11-stock"].patches == []


def test_no_address_in_the_shipped_inventories() -> None:
    for file in paths.shipped("inventories").glob("*.yaml"):
        for address in re.findall(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", file.read_text()):
            assert address.startswith("127."), f"{file.name}: {address}"


def _covered(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """A small check of the parts of JSON Schema that the schemas here use for keys."""
    if "$ref" in schema:
        return _covered(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return any(_covered(value, option, root) for option in options)
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, list):
        return all(_covered(item, schema.get("items", {}), root) for item in value)
    if isinstance(value, dict):
        named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key, item in value.items():
            rule = named.get(key, others)
            if rule is False or (isinstance(rule, dict) and not _covered(item, rule, root)):
                return False
    return True


def test_the_schema_takes_the_shipped_file_and_refuses_a_typing_error() -> None:
    schema = inventory_schema()
    text = (paths.shipped("inventories") / "production.yaml").read_text()
    assert _covered(parse_document(text, "f").data, schema, schema)
    for right, wrong in (
        ("drafter:", "draftr:"),
        ("block_size: 8", "block-size: 8"),
        ("port: 30001", "port: many"),
        ("hosts:", "host:"),
        ("arch: sm103,", "archh: sm103,"),
    ):
        assert not _covered(parse_document(text.replace(right, wrong), "f").data, schema, schema), wrong
        assert resolve(parse_document(text.replace(right, wrong), "f"))[0] is None, wrong
