"""A fleet: names, addresses, the inventory that is written for it. Fleets that run: tests/deploy/test_deploy_fleet.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops import lab as lab_hosts
from ddtree_ops.errors import LabError, UsageError
from ddtree_ops.inventory import load_inventory, select
from ddtree_ops.lab import hosts
from ddtree_ops.results import Event


def test_names() -> None:
    assert lab_hosts.fleet_names(3) == ["gpu01", "gpu02", "gpu03"]
    assert lab_hosts.fleet_names(lab_hosts.FLEET_MOST)[-1] == "gpu99"
    for number in (0, 100):
        with pytest.raises(UsageError, match="a fleet has 1 to 99 hosts"):
            lab_hosts.fleet_names(number)


@pytest.mark.parametrize("name", ["gpu00", "gpu1", "gpu100", "GPU01", "xgpu01"])
def test_other_names_are_no_lab_hosts(name: str) -> None:
    with pytest.raises(UsageError, match="there is no lab host"):
        hosts._chosen([name])


@pytest.mark.parametrize("number", [1, 2, 30])
def test_the_inventory_is_one_that_can_be_read_and_holds_for_this_lab_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("DDTREE_OPS_LAB_DIR", str(tmp_path / "lab"))
    monkeypatch.setenv("DDTREE_OPS_LAB_NET", "127.0.77")
    names = lab_hosts.fleet_names(number)
    path = tmp_path / "fleet.yaml"
    path.write_text(hosts._inventory_text(names))
    monkeypatch.delenv("DDTREE_OPS_LAB_DIR")
    monkeypatch.delenv("DDTREE_OPS_LAB_NET")
    targets = select(load_inventory(str(path)), ["all"])
    assert [target.name for target in targets] == names
    last = targets[-1]
    assert last.host.address == last.service.bind == f"127.0.77.{100 + number}"
    assert (last.host.ssh.port, last.host.ssh.user) == (lab_hosts.SSH_PORT, "root")
    assert last.host.ssh.known_hosts == str(tmp_path / "lab" / "known_hosts")
    assert {name for members in load_inventory(str(path)).groups.values() for name in members} == set(names)


def test_the_kernels_limit_is_raised_where_it_is_too_low_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def tell(event: Event) -> None:
        told.append(event.message)

    limit = tmp_path / "max_user_instances"
    monkeypatch.setattr(hosts, "_INOTIFY", limit)
    limit.write_text("128\n")
    hosts._allow_inotify(30, hosts._teller(tell))
    assert limit.read_text() == "428"
    assert told == ["fs.inotify.max_user_instances raised from 128 to 428, until the next boot"]
    hosts._allow_inotify(10, hosts._teller(tell))
    assert (limit.read_text(), len(told)) == ("428", 1)
    monkeypatch.setattr(hosts, "_INOTIFY", tmp_path / "nowhere" / "x")
    with pytest.raises(LabError) as caught:
        hosts._allow_inotify(30, hosts._teller(tell))
    assert caught.value.hint == "sysctl -w fs.inotify.max_user_instances=428"
