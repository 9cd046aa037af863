from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sockets import silent

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.commit_writer import CommitOutcome
from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.retention import Retention, prune
from orchestrator.checkpoint.saver import Saver
from orchestrator.checkpoint.snapshot_backend import PeerBackend, peers_uri
from orchestrator.checkpoint.snapshot_server import SnapshotServer
from orchestrator.checkpoint.snapshots import newest_commit, peer_store

META = {"position": 0, "receipt": ""}
TOKEN = "known to the gang"


class Node:
    """A holder in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "orchestrator.checkpoint.snapshot_server"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"token": TOKEN, "limit_bytes": 1_000_000}) + "\n")
        self.process.stdin.flush()
        self.address = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made = [Node() for _ in range(3)]
    yield made
    for node in made:
        node.kill()
        node.process.stdin.close()  # type: ignore[union-attr]
        node.process.stdout.close()  # type: ignore[union-attr]


def neighbour(nodes: list[Node], writer: int) -> Store:
    """Each writer's shards lie with the next node."""
    addresses = [node.address for node in nodes]
    return peer_store(TOKEN, addresses, [addresses[(writer + 1) % len(addresses)]], attempt="one")


def commit(stores: list[Store], step: int) -> torch.Tensor:
    rows = torch.full((len(stores), 4), float(step))
    records = []
    for writer, store in enumerate(stores):
        piece = TensorPiece("model.w", (len(stores), 4), (writer, 0), rows[writer : writer + 1])
        records += store.write_shard(step, writer, [piece])
    stores[0].publish(step, records, META)
    return rows


def test_peers_hold_a_commit_and_any_node_reads_it(nodes: list[Node]) -> None:
    stores = [neighbour(nodes, writer) for writer in range(3)]
    for step in (1, 2, 3):
        rows = commit(stores, step)
    assert prune(stores[0], Retention(keep=2)) == [1]
    for store in stores:
        found = store.latest()
        assert found is not None
        assert (found.step, store.verify(3)) == (3, [])
        assert torch.equal(store.reader(found).read("model.w"), rows)


def test_the_files_of_thousands_of_ranks_are_listed(nodes: list[Node]) -> None:
    backend = PeerBackend(peers_uri(TOKEN, [nodes[0].address], [nodes[0].address]), 5.0)
    for rank in range(1500):
        backend.replace(f"00000004/notes/rank-{rank:06d}-of-001500.json", b"{}")
    assert len(backend.list("00000004")) == 1500


def test_a_lost_node_costs_what_it_held_and_no_more(nodes: list[Node]) -> None:
    stores = [neighbour(nodes, writer) for writer in range(3)]
    commit(stores, 1)
    # of step 2 the first node holds nothing
    records = stores[0].write_shard(2, 0, [full_piece("model.w", torch.ones(2))])
    stores[0].publish(2, records, META)
    nodes[0].kill()
    found = stores[1].latest()
    assert found is not None
    assert found.step == 2
    assert torch.equal(stores[1].reader(found).read("model.w"), torch.ones(2))
    nodes[1].kill()
    assert stores[1].latest() is None
    assert [step for step, _ in stores[1].skipped] == [2, 1]


def test_memory_is_preferred_and_the_store_is_the_fallback(nodes: list[Node], in_memory: Path) -> None:
    peers, durable = neighbour(nodes, 0), Store(str(in_memory))
    assert newest_commit([peers, durable]) is None
    commit([durable], 5)
    assert [newest_commit([peers, durable])[number] for number in (0, 2)] == [durable, []]  # type: ignore[index]
    commit([peers], 5)
    assert newest_commit([peers, durable])[0] is peers  # type: ignore[index]
    commit([peers], 6)
    assert newest_commit([peers, durable])[1].step == 6  # type: ignore[index]
    assert newest_commit([peers, durable], at_most=5)[1].step == 5  # type: ignore[index]
    for node in nodes:
        node.kill()
    store, manifest, notes = newest_commit([peers, durable])  # type: ignore[misc]
    assert (store, manifest.step) == (durable, 5)
    assert notes[0].startswith("peer memory: ")
    assert TOKEN not in notes[0]


def test_a_saver_fills_memory_every_step_and_the_store_now_and_then(
    nodes: list[Node], in_memory: Path
) -> None:
    durable = Store(str(in_memory), attempt="one")
    savers = [Saver(durable, writer, 2, peers=neighbour(nodes, writer)) for writer in range(2)]
    for step in range(1, 7):
        for writer, saver in enumerate(savers):
            piece = TensorPiece("model.w", (2, 1), (writer, 0), torch.full((1, 1), float(step)))
            saver.save(step, [piece], META, durable=step % 3 == 0)
    first, second = [saver.close() for saver in savers]
    assert {outcome.state for outcome in first} == {"published"}
    assert {outcome.state for outcome in second} == {"written"}

    def places(outcomes: list[CommitOutcome]) -> list[tuple[int, str]]:
        return [(outcome.step, outcome.place) for outcome in outcomes]

    assert places(first) == places(second)
    assert [step for step, place in places(first) if place == "peer memory"] == [1, 2, 3, 4, 5, 6]
    assert [step for step, place in places(first) if place != "peer memory"] == [3, 6]
    assert neighbour(nodes, 0).steps() == [5, 6]
    assert durable.steps() == [3, 6]


def test_full_memory_costs_the_replica_and_not_the_commit(nodes: list[Node], in_memory: Path) -> None:
    saver = Saver(Store(str(in_memory)), peers=neighbour(nodes, 0))
    saver.save(1, [full_piece("model.w", torch.ones(300_000))], META)
    replica, durable = saver.close()
    assert (replica.state, durable.state) == ("failed", "published")
    assert "No space left" in replica.reason
    assert TOKEN not in replica.reason


def test_strangers_are_hung_up_on() -> None:
    holder = SnapshotServer(TOKEN)
    stranger = peer_store("a guess", [holder.address], [holder.address])
    with pytest.raises(ConnectionError):
        stranger.steps()
    host, port = holder.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"\xff" * 64)
        assert connection.recv(1) == b""
    friend = peer_store(TOKEN, [holder.address], [holder.address])
    commit([friend], 1)
    assert friend.steps() == [1]
    holder.close()


def test_a_stopped_node_does_not_hang_the_others(nodes: list[Node]) -> None:
    stores = [neighbour(nodes, writer) for writer in range(3)]
    for store in stores:
        store.backend._timeout = 0.3  # type: ignore[attr-defined]
    records = stores[1].write_shard(1, 0, [full_piece("model.w", torch.ones(2))])
    stores[1].publish(1, records, META)
    os.kill(nodes[0].process.pid, signal.SIGSTOP)
    found = stores[1].latest()
    assert found is not None
    assert torch.equal(stores[1].reader(found).read("model.w"), torch.ones(2))


def test_a_holder_ends_with_its_parent() -> None:
    node = Node()
    node.process.stdin.close()  # type: ignore[union-attr]
    assert node.process.wait(10) == 0
    node.process.stdout.close()  # type: ignore[union-attr]


def test_a_silent_holder_is_waited_for_once(nodes: list[Node]) -> None:
    """Its node is cut off: a restore asks for many files, and must not wait for each."""
    with silent() as (address, calls):
        backend = PeerBackend(peers_uri(TOKEN, [address, nodes[0].address], [nodes[0].address]), timeout=0.2)
        backend.publish("a", b"1")
        backend.replace("b", b"22")
        assert (backend.list(), backend.read("b"), calls()) == ({"a": 1, "b": 2}, b"22", 1)
        gone = PeerBackend(peers_uri(TOKEN, [address], [address]), timeout=0.2)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                gone.list()
        assert calls() == 2
