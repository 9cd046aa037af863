"""This machine's own address for its hosts, and a command for them that no shell would take; an `ssh` that only says
where it is asked from."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.local import local_cluster
from cluster.local.node_processes import ClusterError
from cluster.local.ports import is_own
from cluster.remote import ssh_cluster
from cluster.remote.hosts_file import Host
from cluster.remote.ssh_cluster import Ssh


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, address: str, **__: object) -> None:
        raise AssertionError(f"it would start at {address}")

    monkeypatch.setattr(local_cluster, "up", start)


def seen_as(address: str, folder: Path) -> Ssh:
    """An ssh whose hosts see this machine at that address."""
    (folder / "ssh").write_text(f"#!/bin/sh\necho {address} 40000 10.0.0.9 22\n")
    (folder / "ssh").chmod(0o755)
    return Ssh(str(folder / "ssh"), "python")


@pytest.mark.parametrize("address", ["203.0.113.7", "fe80::1", "::1"])
def test_an_address_that_is_a_gateways_or_no_ipv4_is_told(address: str, tmp_path: Path) -> None:
    told = f"node sees this machine as {address}, which is not one of its IPv4 addresses; give --address"
    with pytest.raises(ClusterError, match=told):
        ssh_cluster.up("a", [Host("node")], seen_as(address, tmp_path))


@pytest.mark.parametrize("address", ["foo", "203.0.113.7", "::1"])
def test_an_address_that_is_given_must_be_of_this_machine(address: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=f"--address {address} is not an IPv4 address of this machine"):
        ssh_cluster.up("a", [Host("node")], seen_as("10.0.0.1", tmp_path), address)


def test_loopback_is_no_address_for_others_unless_it_is_given(tmp_path: Path) -> None:
    ssh = seen_as("127.0.0.1", tmp_path)
    with pytest.raises(
        ClusterError, match=r"as 127\.0\.0\.1, which other machines cannot reach; give --address"
    ):
        ssh_cluster.up("a", [Host("node")], ssh)
    with pytest.raises(AssertionError, match=r"start at 127\.0\.33\.1"):
        ssh_cluster.up("a", [Host("node")], ssh, "127.0.33.1")
    assert not is_own("0.0.0.0")


def test_a_command_whose_quotation_is_open_is_told() -> None:
    with pytest.raises(ClusterError, match="--ssh a 'b: No closing quotation; close what is quoted"):
        Ssh("a 'b", "python")
