"""The interface of an address, and two nodes whose names nobody knows."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from partition import Space, unable

from cluster.workers.network_interface import GLOO, NCCL, addresses, interface_of, use_interface_of

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_all_of_loopback_is_one_interface(address: str) -> None:
    assert interface_of(address) == "lo"


def test_every_address_of_this_machine_has_its_interface() -> None:
    names = {name for _, name in socket.if_nameindex()}
    found = list(addresses())
    assert ("lo", ipaddress.ip_address("127.0.0.1")) in found
    assert {name for name, _ in found} <= names
    for name, address in found:
        assert interface_of(str(address)) == name or address.is_link_local


def test_an_address_of_another_machine_has_none() -> None:
    assert interface_of("203.0.113.7") == ""
    assert interface_of("no-such-host.invalid") == ""


def test_what_is_set_already_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [(name, str(address)) for name, address in addresses() if not address.is_loopback]
    if not others:
        pytest.skip("this machine has no network but loopback")
    name, address = others[0]
    monkeypatch.delenv(NCCL, raising=False)
    monkeypatch.setenv(GLOO, "its-own")
    assert use_interface_of(address) == name
    assert (os.environ[GLOO], os.environ[NCCL]) == ("its-own", f"={name}")


TALK = """
import datetime, sys
import torch, torch.distributed as dist
from cluster.workers.network_interface import use_interface_of
rank, told = int(sys.argv[1]), sys.argv[2]
if told == "told":
    use_interface_of(f"10.9.0.{1 + rank}")
limit = datetime.timedelta(seconds=20)
store = dist.TCPStore("10.9.0.1", 29411, is_master=rank == 0, timeout=limit)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
found = torch.tensor([rank + 1])
dist.all_reduce(found)
print(int(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("told", ["told", "untold"])
def test_nodes_whose_names_do_not_resolve(told: str) -> None:
    """Two machines in namespaces of their own, with names that no resolver knows. Untold, gloo fails."""
    if reason := unable():
        pytest.skip(reason)
    spaces = [Space(), Space()]
    try:
        words = ["ip", "link", "add", "net0", "type", "veth", "peer", "name", "net0", "netns", spaces[1].pid]
        spaces[0].run(*words)
        for number, space in enumerate(spaces):
            space.run("ip", "address", "add", f"10.9.0.{1 + number}/24", "dev", "net0")
            space.run("ip", "link", "set", "net0", "up")
        ranks = []
        for number, space in enumerate(spaces):
            name = f"hostname nobody-knows-{number} && exec {sys.executable} -c '{TALK}' {number} {told}"
            words = space.command("unshare", "--uts", "sh", "-c", name)
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            environment = {k: v for k, v in environment.items() if k not in (GLOO, NCCL)}
            ranks.append(
                subprocess.Popen(
                    words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        said = [rank.communicate(timeout=120) for rank in ranks]
        if told == "told":
            assert [out.strip() for out, _ in said] == ["3", "3"], said
        else:
            assert any(rank.returncode for rank in ranks), said
    finally:
        for space in spaces:
            space.close()


ASK_NCCL = """
import ctypes, sys
from cluster.workers.network_interface import use_interface_of
if sys.argv[2]:
    use_interface_of(sys.argv[2])
assert not ctypes.CDLL(sys.argv[1]).ncclGetUniqueId((ctypes.c_char * 128)())
"""


@pytest.mark.parametrize(("told", "used"), [("10.9.0.1", "net:10.9.0.1"), ("", "net0:10.8.0.1")])
def test_nccl_itself_takes_the_interface_that_it_is_told(told: str, used: str) -> None:
    """The library, which asks for no GPU before there are communicators, on a machine with two networks. Untold it
    takes the first; so it would by the name without `=`, with which that of the other begins."""
    found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    if found is None or not found.submodule_search_locations:
        pytest.skip("no NCCL, which torch brings where it was built for CUDA")
    if reason := unable():
        pytest.skip(reason)
    library = Path(found.submodule_search_locations[0]) / "lib" / "libnccl.so.2"
    space = Space()
    try:
        for name, address in (("net0", "10.8.0.1"), ("net", "10.9.0.1")):
            space.run("ip", "link", "add", name, "type", "veth", "peer", "name", f"peer-{name}")
            space.run("ip", "address", "add", f"{address}/24", "dev", name)
            for end in (name, f"peer-{name}"):
                space.run("ip", "link", "set", end, "up")
        environment = {k: v for k, v in os.environ.items() if k not in (GLOO, NCCL)}
        environment |= {"PYTHONPATH": str(ROOT), "NCCL_DEBUG": "INFO"}
        words = space.command(sys.executable, "-c", ASK_NCCL, library, told)
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert f"Bootstrap: Using {used}<0>" in done.stdout
    finally:
        space.close()
