"""Services over several hosts and routers: what the loader refuses, and what a name selects."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.errors import ConfigError, UsageError
from ddtree_ops.inventory import load_inventory, override, select
from ddtree_ops.inventory.models import Inventory
from ddtree_ops.inventory.routers import find_router, workers
from ddtree_ops.service.argv import launch_argv

TEXT = """\
schema: 1
runtimes: {r: {}}
defaults:
  service: {runtime: r, venv: /v, model: /m}
services:
  big:
    unit: big.service
    port: 30001
    bind: 0.0.0.0
    tensor_parallel: 16
    nodes: {hosts: [n0, n1]}
    args: {trust-remote-code: true}
  small: {unit: small.service, port: 30002, bind: 0.0.0.0}
hosts:
  n0: {address: 192.0.2.1, cluster_address: 192.0.2.11, services: [big, small]}
  n1: {address: 192.0.2.2, services: [big]}
  n2: {address: 192.0.2.3, services: [small]}
groups:
  all-big: [n0, n1]
routers:
  front: {host: n2, venv: /opt/router, service: small}
  big: {host: n0, unit: big-router.service, venv: /opt/router, service: big, port: 31000, metrics_port: 31001}
"""


def load(tmp_path: Path, old: str = "", new: str = "") -> Inventory:
    assert old in TEXT
    path = tmp_path / "i.yaml"
    path.write_text(TEXT.replace(old, new) if old else TEXT)
    return load_inventory(str(path))


def problem(tmp_path: Path, old: str, new: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, old, new)
    return "\n".join(caught.value.details or (caught.value.message,))


def test_the_flags_of_each_node(tmp_path: Path) -> None:
    targets = select(load(tmp_path), ["n1"], service="big")
    assert [str(target.node) for target in targets] == ["node 0 of 2", "node 1 of 2"]
    words = [" ".join(launch_argv(target.service, target.node)) for target in targets]
    for rank in (0, 1):
        assert f"--tp-size 16 --nnodes 2 --node-rank {rank} --dist-init-addr 192.0.2.11:20000" in words[rank]
    assert [target.local_gpus for target in targets] == [8, 8]
    (small,) = select(load(tmp_path), ["n2"])
    assert small.node is None and "--nnodes" not in launch_argv(small.service, small.node)


def test_an_ipv6_head_is_written_in_brackets(tmp_path: Path) -> None:
    (target, _) = select(load(tmp_path, "192.0.2.11", "fd00::1"), ["n0/big"])
    assert target.node is not None and target.node.head == "[fd00::1]:20000"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[n0, n1]}", "[n0, n9]}", "11: services.big.nodes.hosts[1]: there is no host 'n9'"),
        ("[n0, n1]}", "[n0, n2]}", "n2 does not have the service"),
        ("[n0, n1]}", "[n0, n1, n1]}", "n1 is listed twice"),
        ("[n0, n1]}", "[n0]}", "services.big.nodes.hosts: one host alone needs no nodes"),
        ("tensor_parallel: 16", "tensor_parallel: 15", "15 GPUs in all cannot be spread evenly over 2 nodes"),
        ("address: 192.0.2.1, cluster_address: 192.0.2.11,", "", "do not know where to find its head"),
        (
            "2.2, services: [big]",
            "2.2, services: {big: {args: {page-size: 1}}}",
            "must be the same on every node of big",
        ),
        ("{trust-remote-code: true}", "{node-rank: 1}", "use the field nodes of the service"),
        ("host: n2", "host: n9", "routers.front.host: there is no host 'n9'"),
        ("service: small}\n  big", "service: tiny}\n  big", "no host has a service 'tiny'"),
        ("port: 31000", "port: 30001", "30001 is taken on n0 by big"),
        ("service: small}\n  big", "service: small, hosts: [n1]}\n  big", "no service of n1 matches 'small'"),
        ("service: small}\n  big", "service: small, args: {Worker: 1}}\n  big", "is not the name of a flag"),
        ("30002, bind: 0.0.0.0", "30002", "small listens on 127.0.0.1 only, which n2 cannot reach"),
    ],
)
def test_what_the_loader_refuses(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = problem(tmp_path, old, new)
    assert said in text
    assert "i.yaml:" in text


def test_a_node_stands_for_all_of_them_and_none_is_left_out(tmp_path: Path) -> None:
    inventory = load(tmp_path)

    def names(*patterns: str, **more: object) -> list[str]:
        return [target.name for target in select(inventory, patterns, **more)]  # type: ignore[arg-type]

    assert names("n1") == ["n0/big", "n1"]
    assert names("n1", whole=False) == ["n1"]
    assert names("all", exclude=["*/big"]) == ["n0/small", "n2"]
    for left in ({"exclude": ["n1"]}, {"limit": ["n0"]}):
        with pytest.raises(
            UsageError, match="big runs one engine over several hosts, and n1 would be left out"
        ):
            names("all", **left)
        assert names("all", **left, whole=False)


def test_setting_the_nodes_to_others_is_refused(tmp_path: Path) -> None:
    (target, _) = select(load(tmp_path), ["n0/big"])
    other = override(target, ["nodes.port=21000"])
    assert other.node is not None and other.node.head.endswith(":21000")
    with pytest.raises(ConfigError, match="n0 is no node of big: n1, n2"):
        assert override(target, ["nodes.hosts=[n1, n2]"]).node


def test_where_a_router_finds_its_workers(tmp_path: Path) -> None:
    inventory = load(tmp_path)
    found = workers(inventory, find_router(inventory, "front"))
    assert [worker.url for worker in found] == ["http://192.0.2.11:30002", "http://127.0.0.1:30002"]
    (head,) = workers(inventory, inventory.routers["big"])
    assert (head.name, head.url) == ("n0/big", "http://127.0.0.1:30001"), (
        "only the head of a service over hosts"
    )
    with pytest.raises(UsageError, match="which router"):
        find_router(inventory, None)
    with pytest.raises(UsageError, match=r"no router 'frond' .*front"):
        find_router(inventory, "frond")


def test_a_worker_on_one_address_is_reached_there(tmp_path: Path) -> None:
    inventory = load(tmp_path, "30002, bind: 0.0.0.0", "30002, bind: 198.51.100.7")
    assert {worker.url for worker in workers(inventory, inventory.routers["front"])} == {
        "http://198.51.100.7:30002"
    }
