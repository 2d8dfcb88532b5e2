"""Choosing targets, overriding settings, connection data."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_ops.errors import ExitCode, UsageError
from ddtree_ops.inventory import Host, Inventory, Target, connect_spec, override, select
from ddtree_ops.inventory.load import resolve
from ddtree_ops.inventory.yaml_source import parse_document

TEXT = """
schema: 1
defaults: {service: {venv: /v, model: /m, runtime: stock}}
runtimes: {stock: {patches: []}, ddtree: {}}
services:
  tree:
    unit: tree.service
    drafter: /d
    port: 30001
    speculative: {budget: 32, topk_cap: 8}
    args: {trust-remote-code: true, mem-fraction-static: 0.85}
  plain: {unit: plain.service, port: 30002}
hosts:
  ct200: {services: [tree, plain]}
  ct201: {services: [tree]}
  b300: {services: [plain]}
  bare: {}
groups:
  trees: [ct201, ct200]
  idle: [bare]
"""


@pytest.fixture(scope="module")
def inventory() -> Inventory:
    found, problems = resolve(parse_document(TEXT, "inv.yaml"))
    assert found is not None, problems
    return found


@pytest.fixture
def target(inventory: Inventory) -> Target:
    (found,) = select(inventory, ["ct200"], service="tree")
    return found


def _names(targets: list[Target]) -> list[str]:
    return [target.name for target in targets]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["b300"], ["b300"]),
        (["ct200"], ["ct200/tree", "ct200/plain"]),
        (["trees"], ["ct200/tree", "ct200/plain", "ct201"]),
        (["b300", "trees", "ct200", "b300"], ["ct200/tree", "ct200/plain", "ct201", "b300"]),
        (["ct*"], ["ct200/tree", "ct200/plain", "ct201"]),
        (["ct20[1-9]", "b?00"], ["ct201", "b300"]),
        (["all"], ["ct200/tree", "ct200/plain", "ct201", "b300"]),
        (["ct200/plain"], ["ct200/plain"]),
        (["all/plain"], ["ct200/plain", "b300"]),
        (["trees/tr*"], ["ct200/tree", "ct201"]),
    ],
)
def test_patterns(inventory: Inventory, patterns: list[str], expected: list[str]) -> None:
    assert _names(select(inventory, patterns)) == expected


def test_a_target_holds_its_runtime(inventory: Inventory) -> None:
    (target,) = select(inventory, ["b300"])
    assert (target.host.name, target.service.name, target.runtime.name) == ("b300", "plain", "stock")


def test_service(inventory: Inventory) -> None:
    assert _names(select(inventory, ["all"], service="tree")) == ["ct200/tree", "ct201"]
    assert _names(select(inventory, [], service="pl*", default_all=True)) == ["ct200/plain", "b300"]


def test_no_pattern(inventory: Inventory) -> None:
    assert len(select(inventory, [], default_all=True)) == 4
    with pytest.raises(UsageError) as caught:
        select(inventory, [])
    assert str(caught.value) == "which host? inv.yaml has 4: ct200, ct201, b300, bare"
    one = inventory.model_copy(update={"hosts": {"b300": inventory.hosts["b300"]}, "groups": {}})
    assert _names(select(one, [])) == ["b300"]


@pytest.mark.parametrize(
    ("patterns", "service", "message"),
    [
        (["ct2000"], None, "no host or group matches 'ct2000' (did you mean 'ct200'?)"),
        (["b300", "tres"], None, "no host or group matches 'tres' (did you mean 'trees'?)"),
        (["xyz*"], None, "no host or group matches 'xyz*' (allowed: ct200, ct201, b300, bare, trees, idle)"),
        ([""], None, "no host or group matches '' (allowed: ct200, ct201, b300, bare, trees, idle)"),
        (["bare"], None, "bare: no service is given for this host"),
        (["idle"], None, "bare: no service is given for this host"),
        (["b300/tree"], None, "no service of b300 matches 'tree' (allowed: plain)"),
        (["b300"], "tree", "no service 'tree' on b300 (allowed: plain)"),
        (["all"], "plian", "no service 'plian' on b300, ct200, ct201 (did you mean 'plain'?)"),
    ],
)
def test_nothing_found_is_an_error(
    inventory: Inventory, patterns: list[str], service: str | None, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        select(inventory, patterns, service=service)
    assert str(caught.value) == message
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.hint


@pytest.mark.parametrize(
    ("setting", "path", "expected"),
    [
        ("port=30009", ("port",), 30009),
        ("speculative.budget=16", ("speculative", "budget"), 16),
        ("speculative=null", ("speculative",), None),
        ("args.attention-backend=triton", ("args", "attention-backend"), "triton"),
        ("args.mem-fraction-static=0.9", ("args", "mem-fraction-static"), 0.9),
        ("args.trust-remote-code=false", ("args", "trust-remote-code"), False),
        ("args.cuda-graph-bs=[1, 2, 4]", ("args", "cuda-graph-bs"), [1, 2, 4]),
        ('args.word="yes"', ("args", "word"), "yes"),
        ("args.json={a: 1}", ("args", "json"), "{a: 1}"),
        ("args.text=a: b", ("args", "text"), "a: b"),
        ("args.text=*", ("args", "text"), "*"),
        ("args.empty=", ("args", "empty"), ""),
        ("args.equals=a=b", ("args", "equals"), "a=b"),
        ("environment.X='1'", ("environment", "X"), "1"),
        ("restart.policy=no", ("restart", "policy"), "no"),
        ("health.load_timeout=1h30m", ("health", "load_timeout"), 5400.0),
        ("health.prompt=Write a poem: short", ("health", "prompt"), "Write a poem: short"),
    ],
)
def test_override(target: Target, setting: str, path: tuple[str, ...], expected: Any) -> None:
    changed = override(target, [setting])
    value: Any = changed.service
    for part in path:
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)
    assert changed.host.services["tree"] == changed.service
    assert changed.name == target.name == "ct200/tree"
    assert target.host.services["tree"] == target.service, "the original is left alone"


def test_an_override_changes_nothing_else(target: Target) -> None:
    changed = override(target, ["speculative.budget=16"])
    before, after = target.service.model_dump(), changed.service.model_dump()
    assert after.pop("speculative") == {**before.pop("speculative"), "budget": 16}
    assert after == before
    assert override(target, []) is target


def test_null_takes_an_argument_away(target: Target) -> None:
    assert override(target, ["args.mem-fraction-static=null"]).service.args == {"trust-remote-code": True}


def test_settings_are_laid_on_in_order_and_checked_together(target: Target) -> None:
    changed = override(
        target,
        [
            "speculative.algorithm=DFLASH",
            "speculative.budget=null",
            "speculative.topk_cap=null",
            "port=1",
            "port=2",
        ],
    )
    assert changed.service.speculative is not None
    assert changed.service.speculative.algorithm == "DFLASH"
    assert changed.service.port == 2


def test_a_setting_that_a_later_one_replaces_is_refused(target: Target) -> None:
    with pytest.raises(
        UsageError, match=r"--set args\.a has no effect: --set args after it sets all of args"
    ):
        override(target, ["args.a=1", "args=null"])
    assert override(target, ["args=null", "args.a=1"]).service.args == {"a": 1}
    assert override(target, ["args.ab=1", "args.a=2"]).service.args["ab"] == 1


def test_override_of_the_runtime(target: Target, inventory: Inventory) -> None:
    assert override(target, ["runtime=ddtree"], inventory=inventory).runtime.name == "ddtree"
    with pytest.raises(UsageError) as caught:
        override(target, ["runtime=ddtre"], inventory=inventory)
    assert str(caught.value) == "ct200: --set runtime: there is no runtime 'ddtre' (did you mean 'ddtree'?)"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("port", "--set port: write KEY=VALUE with a dotted KEY"),
        ("=3", "--set =3: write KEY=VALUE with a dotted KEY"),
        ("args..x=3", "--set args..x=3: write KEY=VALUE with a dotted KEY"),
        ("name=x", "--set name: the name of a service cannot be changed"),
        ("runtime.overlay=none", "--set runtime.overlay: a service only names its runtime"),
        ("prot=3", "ct200: --set prot: unknown key (did you mean 'port'?)"),
        ("speculative.bugdet=3", "ct200: --set speculative.bugdet: unknown key (did you mean 'budget'?)"),
        ("port=many", "ct200: --set port: expected a whole number, found 'many'"),
        ("port.x=3", "ct200: --set port: expected a whole number, found a mapping"),
        ("port=070", "--set port: 070 is octal to some readers: write 70 or quote it: '070'"),
        ("model=null", "ct200: --set model: is missing"),
        (
            "args.enable-metrics=yes",
            "--set args.enable-metrics: yes is text: write true or false, or quote it: '\"yes\"'",
        ),
        (
            "speculative.algorithm=DDTREEE",
            "ct200: --set speculative.algorithm: unknown algorithm DDTREEE (did you mean 'DDTREE'?)",
        ),
        ("args.x=[1", "--set args.x: [1 is not a YAML list"),
        ("args.port=3", "ct200: --set args.port: use the field port of the service instead"),
        (
            "args.log_level=info",
            "ct200: --set args.log_level: write the flag in lower case, with dashes only inside: log-level",
        ),
        (
            "speculative.budget=6",
            "ct200: --set speculative.budget: 6 is less than block_size - 1 = 7: the tree could not hold one whole draft",
        ),
    ],
)
def test_wrong_settings(target: Target, setting: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        override(target, [setting])
    assert str(caught.value) == message


def test_another_algorithm_says_which_settings_of_the_tree_go_with_it(target: Target) -> None:
    with pytest.raises(UsageError) as caught:
        override(target, ["speculative.algorithm=DFLASH"])
    assert (
        str(caught.value)
        == "ct200: --set speculative.algorithm: DFLASH takes no budget and no topk_cap, which the service has"
    )
    away = ["speculative.budget=null", "speculative.topk_cap=null"]
    assert caught.value.hint == (
        f"give --set {' --set '.join(away)} too, or --set speculative=null instead for no speculation"
    )
    changed = override(target, ["speculative.algorithm=DFLASH", *away]).service.speculative
    assert changed is not None and changed.tree_settings == ()
    assert override(target, ["speculative=null"]).service.speculative is None
    with pytest.raises(UsageError) as caught:
        override(
            target, ["speculative.algorithm=DFLASH", "speculative.budget=9", "speculative.topk_cap=null"]
        )
    assert str(caught.value) == (
        "ct200: --set speculative.budget: only DDTREE takes it, the algorithm is DFLASH"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1", "1"),
        ("0.50", "0.50"),
        ("1e3", "1e3"),
        ("true", "true"),
        ("no", "no"),
        ("010", "010"),
        ("2026-11-29", "2026-11-29"),
        ("[1, 2]", "[1, 2]"),
        ("a: b #c", "a: b #c"),
        ("", ""),
        ('"1"', "1"),
        ("'null'", "null"),
        ('"a" b', '"a" b'),
    ],
)
def test_a_variable_is_text_whatever_it_looks_like(target: Target, value: str, text: str) -> None:
    changed = override(target, [f"environment.DDTREE_TIMES={value}"])
    assert changed.service.environment == {"DDTREE_TIMES": text}
    assert override(changed, ["environment.DDTREE_TIMES=null"]).service.environment == {}


def test_several_wrong_settings_are_told_at_once(target: Target) -> None:
    with pytest.raises(UsageError) as caught:
        override(target, ["prot=3", "port=x"])
    assert set(caught.value.details) == {
        "--set prot: unknown key (did you mean 'port'?)",
        "--set port: expected a whole number, found 'x'",
    }


def test_connect_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    bare = connect_spec(Host(name="ct200"))
    assert bare.name == "ct200"
    assert (bare.address, bare.user, bare.port, bare.identity_file, bare.known_hosts) == (None,) * 5
    assert (bare.connect_timeout, bare.python) == (10.0, "python3")
    full = connect_spec(
        Host.model_validate(
            {
                "name": "h",
                "address": "127.0.0.2",
                "ssh": {
                    "user": "root",
                    "port": 2222,
                    "identity_file": "~/.ssh/id",
                    "known_hosts": "/k",
                    "config": "~/c",
                    "fingerprint": "SHA256:" + "A" * 43,
                    "proxy_jump": "u@bastion:22",
                    "connect_timeout": "5s",
                    "python": "/usr/bin/python3",
                },
            }
        )
    )
    assert (full.address, full.user, full.port) == ("127.0.0.2", "root", 2222)
    assert (full.identity_file, full.known_hosts, full.config) == (
        "/home/someone/.ssh/id",
        "/k",
        "/home/someone/c",
    )
    assert (full.fingerprint, full.proxy_jump) == ("SHA256:" + "A" * 43, "u@bastion:22")
    assert (full.connect_timeout, full.python) == (5.0, "/usr/bin/python3")


FLEET = """
schema: 1
defaults: {service: {venv: /v, model: /m, runtime: r, unit: s.service}}
runtimes: {r: {}}
services: {s: {}, t: {unit: t.service, port: 30002}}
hosts:
  gpu01: {services: [s]}
  gpu02: {services: [s, t]}
  gpu08: {services: [s]}
  gpu09: {services: [s]}
  gpu10: {services: [s]}
  gpu110: {services: [s]}
  head: {services: [t]}
groups:
  rack-a: [gpu01, gpu02]
  rack-b: [gpu08, gpu09, gpu10]
  racks: [rack-a, rack-b]
"""


@pytest.fixture(scope="module")
def fleet() -> Inventory:
    found, problems = resolve(parse_document(FLEET, "fleet.yaml"))
    assert found is not None, problems
    return found


def _short(targets: list[Target]) -> str:
    return " ".join(target.name.removeprefix("gpu") for target in targets)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("gpu[01-09]", "01 02/s 02/t 08 09"),
        ("gpu[8-10]", "10"),
        ("gpu[08-10]", "08 09 10"),
        ("gpu[01,10]", "01 10"),
        ("gpu[01-02,09-10]", "01 02/s 02/t 09 10"),
        ("gpu1[1-2]0", "110"),
        ("gpu[01-02]/t", "02/t"),
        ("gpu[01-99],head", "01 02/s 02/t 08 09 10 head"),
        ("gpu0?", "01 02/s 02/t 08 09"),
        ("gpu[!0]*", "10 110"),
        ("rack-*", "01 02/s 02/t 08 09 10"),
        ("rack-[a-b]", "01 02/s 02/t 08 09 10"),
        ("racks", "01 02/s 02/t 08 09 10"),
        ("gpu01 , head", "01 head"),
        ("racks !gpu08", "01 02/s 02/t 09 10"),
        ("!gpu08 racks", "01 02/s 02/t 09 10"),
        ("racks !rack-a !gpu[09-10]", "08"),
        ("racks,!rack-b,!gpu01", "02/s 02/t"),
        ("racks &gpu0?", "01 02/s 02/t 08 09"),
        ("gpu* &rack-a !gpu01", "02/s 02/t"),
        ("!rack-b", "01 02/s 02/t 110 head"),
        ("all !gpu02/t", "01 02/s 08 09 10 110 head"),
    ],
)
def test_patterns_of_a_fleet(fleet: Inventory, patterns: str, expected: str) -> None:
    words = [patterns] if " , " in patterns else patterns.split()
    assert _short(select(fleet, words)) == expected


@pytest.mark.parametrize(
    ("patterns", "limit", "exclude", "expected"),
    [
        (["racks"], ["rack-a"], [], "01 02/s 02/t"),
        (["racks"], ["gpu01", "gpu[08-09]"], [], "01 08 09"),
        (["racks"], [], ["rack-b"], "01 02/s 02/t"),
        (["racks"], [], ["gpu01,gpu09", "gpu02/s"], "02/t 08 10"),
        (["racks"], ["gpu0*"], ["gpu02"], "01 08 09"),
        (["racks"], ["gpu*,!gpu01"], [], "02/s 02/t 08 09 10"),
        (["rack-a"], [], ["head"], "01 02/s 02/t"),
        ([], ["gpu01"], [], "01"),
    ],
)
def test_limit_and_exclude(
    fleet: Inventory, patterns: list[str], limit: list[str], exclude: list[str], expected: str
) -> None:
    assert _short(select(fleet, patterns, limit=limit, exclude=exclude)) == expected


@pytest.mark.parametrize(
    ("patterns", "limit", "exclude", "message"),
    [
        (["gpu[20-30]"], [], [], "no host or group matches 'gpu[20-30]'"),
        (["gpu[09-01]"], [], [], "'gpu[09-01]': the range 09-01 ends before it begins"),
        (["gpu[1-99999]"], [], [], "'gpu[1-99999]': more than 10000 hosts"),
        (["gpu[1-999][1-999]"], [], [], "'gpu[1-999][1-999]': more than 10000 hosts"),
        (["gpu01", "!gpu01"], [], [], "the pattern gpu01 leaves nothing of gpu01"),
        (["rack-a", "&rack-b"], [], [], "the pattern rack-b leaves nothing of gpu01, gpu02"),
        (["rack-a", "!nope"], [], [], "no host or group matches 'nope'"),
        (["rack-a", "!"], [], [], "no host or group matches ''"),
        (["rack-a,,head"], [], [], "no host or group matches ''"),
        (["rack-a"], ["head"], [], "--limit head leaves nothing of gpu01, gpu02"),
        (["rack-a"], ["nope"], [], "--limit: no host or group matches 'nope'"),
        (["rack-a"], [], ["gpu*"], "--exclude gpu* leaves nothing of gpu01, gpu02"),
        (["rack-a"], [], ["nope"], "--exclude: no host or group matches 'nope'"),
        ([], [], ["gpu01"], "which host? fleet.yaml has 7: gpu01, gpu02, gpu08, gpu09, gpu10, gpu110, head"),
    ],
)
def test_nothing_left_is_an_error(
    fleet: Inventory, patterns: list[str], limit: list[str], exclude: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        select(fleet, patterns, limit=limit, exclude=exclude)
    assert str(caught.value).partition(" (")[0] == message
    assert caught.value.exit_code == ExitCode.USAGE
