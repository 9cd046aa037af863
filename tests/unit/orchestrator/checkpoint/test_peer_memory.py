from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sockets import silent

from orchestrator.checkpoint import merging
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.checkpoint.peer_memory import PeerMemory, newest_commit
from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.retention import rewind
from orchestrator.checkpoint.saver import Saver
from orchestrator.checkpoint.shared_memory import SharedBuffer
from orchestrator.checkpoint.snapshot_server import SnapshotServer, receive, receive_message, send
from orchestrator.checkpoint.snapshot_writer import Placement, SnapshotWriter

META = {"position": 0, "receipt": ""}
TOKEN = "known to the gang"


class Node:
    """A server in a process of its own, which is a node as far as snapshots are concerned."""

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


@pytest.fixture
def servers() -> Iterator[list[SnapshotServer]]:
    """Servers of this process, for tests that lose none."""
    made = [SnapshotServer(TOKEN, limit_bytes=1_000_000) for _ in range(3)]
    yield made
    with ThreadPoolExecutor() as pool:  # each takes half a second
        list(pool.map(SnapshotServer.close, made))


Places = Sequence[Node] | Sequence[SnapshotServer]


def memory(nodes: Places, timeout: float = 5.0) -> PeerMemory:
    return PeerMemory(TOKEN, [node.address for node in nodes], timeout)


def placement(nodes: Places, writer: int, attempt: int = 1, shares: bool = True) -> Placement:
    """Writer n is on node n, and node n + 1 has the copy."""
    own, other = (nodes[number % len(nodes)].address for number in (writer, writer + 1))
    return Placement(TOKEN, own if shares else "", other, attempt, f"attempt{attempt}")


class Rank:
    """Writer n of three, with two generations of memory."""

    def __init__(self, nodes: Places, writer: int, attempt: int = 1, shares: bool = True) -> None:
        self.writer, self.attempt, self.buffers = writer, attempt, [SharedBuffer(), SharedBuffer()]
        place = placement(nodes, writer, attempt, shares)
        files = [(buffer.fd, buffer.note) for buffer in self.buffers]
        self.snapshots = SnapshotWriter(place, writer, 3, files)

    def save(self, step: int, value: float | None = None) -> str:
        """Save a row of the matrix. Return why it failed, empty if it did not."""
        generation = step % 2
        row = torch.full((1, 4), float(step if value is None else value))
        request = self.buffers[generation].fill([TensorPiece("model.w", (3, 4), (self.writer, 0), row)])
        data = memory_of(self.buffers[generation], request["bytes"])
        meta = META | {"attempt": self.attempt} if self.writer == 0 else {}
        return self.snapshots.save(
            step, generation, data, request["pieces"], meta=meta, complete=step - 1
        ).reason

    def end(self) -> None:
        """Close the connections, as the end of the process does."""
        self.snapshots._peers.close()


def memory_of(buffer: SharedBuffer, size: int) -> memoryview:
    return memoryview(os.pread(buffer.fd, size, 0))


def gang(nodes: Places, attempt: int = 1, shares: bool = True) -> list[Rank]:
    return [Rank(nodes, writer, attempt, shares) for writer in range(3)]


def save(ranks: list[Rank], step: int) -> None:
    assert [rank.save(step) for rank in ranks] == ["", "", ""]


def end(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.end()


def loaded(peers: PeerMemory, step: int) -> torch.Tensor:
    """The matrix of a snapshot, as a rank of another attempt loads it."""
    return peers.reader(peers.manifest(step)).read("model.w")


def rows(step: float) -> torch.Tensor:
    return torch.full((3, 4), float(step))


def test_the_newest_snapshot_that_is_whole_is_found_and_loaded(servers: list[SnapshotServer]) -> None:
    ranks = gang(servers)
    for step in (1, 2, 3):
        save(ranks, step)
    controller = memory(servers)
    older = controller.latest(at_most=2)
    assert older is not None
    assert older.step == 2
    assert ranks[0].save(4) == ""  # the others do not come so far
    end(ranks)
    found = controller.latest()
    assert found is not None
    assert (found.step, found.meta["attempt"], controller.skipped) == (3, 1, [])
    controller.rewind(3, 2, found)
    assert torch.equal(loaded(memory(servers), 3), rows(3))
    with pytest.raises(FileNotFoundError):
        memory(servers).manifest(2)


def test_tables_of_a_large_state_are_read_from_memory_too(
    servers: list[SnapshotServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any server, as each holds all of them."""
    monkeypatch.setattr(merging, "INLINE_BYTES", 0)
    ranks = gang(servers)
    save(ranks, 1)
    end(ranks)
    controller = memory(servers)
    found = controller.latest()
    assert found is not None
    assert found.index[1] > 0
    assert torch.equal(controller.reader(found).read("model.w"), rows(1))
    controller.rewind(1, 2, found)
    assert torch.equal(loaded(memory(servers), 1), rows(1))
    name, _ = found.index
    restoring = memory(servers)
    restoring.manifest(1)
    with pytest.raises(FileNotFoundError):
        restoring.read_into(f"step-00000002/{name}", 0, memoryview(bytearray(4)))
    flipped = bytearray(servers[0]._manifest[3])
    flipped[0] ^= 1
    servers[0]._manifest = (*servers[0]._manifest[:3], memoryview(flipped))
    assert torch.equal(loaded(memory(servers), 1), rows(1)), "the copy of another server is read"


def test_what_memory_does_not_give_is_read_from_the_store(
    servers: list[SnapshotServer], in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an index that servers have lost, or of another one under the step's name."""
    monkeypatch.setattr(merging, "INLINE_BYTES", 0)
    ranks = gang(servers)
    save(ranks, 1)
    end(ranks)
    controller, durable = memory(servers), Store(str(in_memory))
    controller.rewind(1, 2, controller.latest())
    for server in servers[:2]:
        server._manifest = (*server._manifest[:3], memoryview(b""))
    assert torch.equal(loaded(memory(servers), 1), rows(1)), "the third server has it"
    servers[2]._manifest = (*servers[2]._manifest[:2], "index-0-1.bin", servers[2]._manifest[3])
    restoring = memory(servers)
    with pytest.raises(CorruptCommit, match="are missing"):
        restoring.reader(restoring.manifest(1), durable).read("model.w")
    for attempt in (7, 1):
        records = durable.write_shard(1, 0, [full_piece("model.w", rows(1))])
        durable.publish(1, records, META | {"attempt": attempt})
        reader = restoring.reader(restoring.manifest(1), durable)
        if attempt == 7:  # of another state
            with pytest.raises(CorruptCommit, match="are missing"):
                reader.read("model.w")
            rewind(durable, 0)
        else:
            assert torch.equal(reader.read("model.w"), rows(1))


def test_a_copy_that_cannot_be_reached_is_not_missing(servers: list[SnapshotServer]) -> None:
    """What only looks missing would condemn the commit."""
    peers = memory(servers)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*closed.getsockname())
        for places in ([address, servers[0].address], [servers[0].address, address]):
            peers._places = {1: {"shard": places}}
            with pytest.raises(ConnectionRefusedError):
                peers.read_into("step-00000001/shard", 0, memoryview(bytearray(4)))


def test_a_note_of_another_form_is_passed_over(servers: list[SnapshotServer]) -> None:
    ranks = gang(servers, shares=False)
    for step in (1, 2):
        save(ranks, step)
    end(ranks)
    (name,) = [name for step, name in servers[1]._parts if step == 2]
    part = servers[1]._parts[2, name]
    whole = part.note
    harms: list[dict[str, Any]] = [{"writers": None}, {"step": "2"}, {"record": {}}, {"meta": None}]
    record = json.loads(whole)["record"]
    harms += [
        {"record": record | harm}
        for harm in (
            {"table": None},
            {"file": 3},
            {"tensors": "AAAA"},
            {"tensors": "A"},
            {"size": None},
            {"table": record["table"] | {"data": 3}},
            {"header": "no"},
        )
    ]
    peers = memory(servers)
    for harm in harms:
        part.note = json.dumps(json.loads(whole) | harm).encode()
        found = peers.latest()
        assert found is not None
        assert found.step == 1, harm
        assert peers.skipped, harm
    part.note = b"no JSON"
    assert peers.latest() is None, "no part of this server is known now"
    assert "are unusable" in peers.skipped[0][1]
    part.note = whole
    assert peers.latest().step == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "document", [b"no JSON", b"[]", b'{"manifest": "{}", "places": {}}', b'{"manifest": 1}']
)
def test_a_manifest_that_cannot_be_read_counts_as_lost(
    servers: list[SnapshotServer], document: bytes
) -> None:
    for server in servers:
        server._manifest = (1, document, "", memoryview(b""))
    with pytest.raises(OSError, match="its manifest is unusable"):
        memory(servers).manifest(1)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_loss_of_any_one_node_loses_no_snapshot(nodes: list[Node], lost: int) -> None:
    """Of each part the node of its writer has the memory, and another node a copy."""
    ranks = gang(nodes)
    save(ranks, 1)
    nodes[lost].kill()
    end(ranks)
    controller = memory(nodes)
    found = controller.latest()
    assert found is not None
    controller.rewind(1, 2, found)
    assert torch.equal(loaded(memory(nodes[::-1]), 1), rows(1))


def test_what_two_nodes_take_along_is_no_snapshot(nodes: list[Node]) -> None:
    ranks = gang(nodes)
    save(ranks, 1)
    end(ranks)
    nodes[0].kill()
    nodes[1].kill()
    assert memory(nodes).latest() is None


def test_nothing_of_an_attempt_counts_once_the_next_has_chosen(servers: list[SnapshotServer]) -> None:
    """Its processes may live on behind a cut network, and finish a later snapshot."""
    before = gang(servers)
    save(before, 1)
    save(before, 2)
    end(before)
    controller = memory(servers)
    found = controller.latest(at_most=1)
    assert found is not None
    controller.rewind(1, 2, found)
    assert "Permission denied" in before[0].save(2)
    before[1].save(3)
    assert controller.latest().step == 1  # type: ignore[union-attr]
    after = gang(servers, attempt=2)
    assert after[0].save(2, 20.0) == after[1].save(2, 20.0) == after[2].save(2, 20.0) == ""
    end(after)
    assert torch.equal(loaded(memory(servers), 1), rows(1))
    newest = controller.latest()
    assert newest is not None
    assert newest.meta["attempt"] == 2
    controller.rewind(2, 3, newest)
    assert torch.equal(loaded(memory(servers), 2), rows(20))


def test_memory_that_is_filled_anew_holds_no_snapshot(servers: list[SnapshotServer]) -> None:
    """A rank may die in the middle of filling it."""
    rank = Rank(servers, 0)
    assert rank.save(1) == ""
    rank.buffers[1].fill([full_piece("model.w", torch.ones(2))])
    rank.end()
    assert [note["step"] for note in notes(servers[0])] == []
    assert [note["step"] for note in notes(servers[1])] == [1]


def notes(node: Node | SnapshotServer) -> list[dict[str, int]]:
    return json.loads(memory([node])._connections.ask(node.address, {"do": "notes", "wait": 0.0})["bytes"])  # type: ignore[no-any-return]


def test_old_parts_are_forgotten(servers: list[SnapshotServer]) -> None:
    """Before the last that all have made. What is left of other attempts goes with the first whole one."""
    ranks = gang(servers, shares=False)
    for step in range(1, 6):
        save(ranks, step)
    assert [sorted(note["step"] for note in notes(node)) for node in servers] == [[4, 5]] * 3
    controller = memory(servers)
    controller.rewind(5, 2, controller.latest())
    after = gang(servers, attempt=2, shares=False)
    save(after, 6)
    assert {note["step"] for node in servers for note in notes(node)} == {5, 6}
    save(after, 7)
    assert {note["step"] for node in servers for note in notes(node)} == {6, 7}


def test_a_server_of_another_container_gets_a_copy(
    servers: list[SnapshotServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot open the memory of the ranks."""
    monkeypatch.setattr(os, "getpid", lambda: 2**22 - 1)
    ranks = gang(servers)
    save(ranks, 1)
    end(ranks)
    assert [[note["step"] for note in notes(node)] for node in servers] == [[1, 1]] * 3


def test_a_flipped_bit_is_noticed_and_the_copy_is_read(nodes: list[Node]) -> None:
    ranks = gang(nodes)
    save(ranks, 1)
    end(ranks)
    controller = memory(nodes)
    controller.rewind(1, 2, controller.latest())
    os.pwrite(ranks[0].buffers[1].fd, b"\x01", 0)
    assert torch.equal(loaded(memory(nodes), 1), rows(1))
    nodes[1].kill()
    with pytest.raises(CorruptCommit, match=r"model\.w: block 0 at byte 0 is damaged"):
        loaded(memory(nodes), 1)


def test_memory_is_preferred_and_the_store_is_the_fallback(nodes: list[Node], in_memory: Path) -> None:
    peers, durable = memory(nodes), Store(str(in_memory))
    assert newest_commit(peers, durable) is None
    durable.publish(5, durable.write_shard(5, 0, [full_piece("model.w", torch.ones(2))]), META)
    assert newest_commit(peers, durable)[1:] == (False, [])  # type: ignore[index]
    ranks = gang(nodes)
    save(ranks, 5)
    assert newest_commit(peers, durable)[1] is True  # type: ignore[index]
    save(ranks, 6)
    end(ranks)
    assert newest_commit(peers, durable)[0].step == 6  # type: ignore[index]
    assert newest_commit(peers, durable, at_most=5)[0].step == 5  # type: ignore[index]
    assert newest_commit(None, durable)[0].step == 5  # type: ignore[index]
    for node in nodes:
        node.kill()
    manifest, in_memory_of_peers, told = newest_commit(memory(nodes), durable)  # type: ignore[misc]
    assert (manifest.step, in_memory_of_peers) == (5, False)
    assert told[0].startswith("peer memory: ")
    assert TOKEN not in told[0]


def settled(savers: list[Saver]) -> None:
    """Wait until all snapshots are made."""
    deadline = time.monotonic() + 30
    while any(saver.is_snapping for saver in savers):
        assert time.monotonic() < deadline
        for saver in savers:
            saver._receive(0.01)


def test_a_saver_makes_snapshots_and_now_and_then_a_commit(
    servers: list[SnapshotServer], in_memory: Path
) -> None:
    durable = Store(str(in_memory), attempt="one")
    savers = [Saver(durable, writer, 2, placement=placement(servers, writer)) for writer in range(2)]
    for step in range(1, 7):
        for writer, saver in enumerate(savers):
            piece = TensorPiece("model.w", (2, 1), (writer, 0), torch.full((1, 1), float(step)))
            saver.save(step, [piece], META, durable=step % 3 == 0, complete=step - 1)
        settled(savers)
        assert [saver.snapshot_step for saver in savers] == [step, step]
    first, second = [saver.close() for saver in savers]
    assert [(each.step, each.state) for each in first if each.place == "peer memory"] == [
        (step, "written") for step in range(1, 7)
    ]
    assert {(each.step, each.state) for each in first if each.place != "peer memory"} == {
        (3, "published"),
        (6, "published"),
    }
    assert len(second) == 8
    found = memory(servers).latest()
    assert found is not None
    assert found.step == 6
    assert durable.steps() == [3, 6]


def test_a_snapshot_does_not_wait_for_storage(servers: list[SnapshotServer], in_memory: Path) -> None:
    """Writer 0 waits for a note that never comes; the snapshots go on, and the last whole one is not overwritten."""
    saver = Saver(Store(str(in_memory)), 0, 2, placement=placement(servers, 0))
    saver.save(1, [full_piece("model.w", torch.ones(4))], META)
    for step in (2, 3, 4):
        settled([saver])
        assert saver.has_room
        saver.save(step, [full_piece("model.w", torch.ones(4))], META, durable=False, complete=step - 1)
    settled([saver])
    assert (saver.snapshot_step, [step for step, _ in saver._busy.items()]) == (4, [(0, "commit")])
    saver.tell_failed([-1, 1])
    saver.close()


def test_a_snapshot_that_others_may_not_have_made_yet_is_not_overwritten(
    servers: list[SnapshotServer], in_memory: Path
) -> None:
    """It is whole once the slowest writer has made it, and its row counts then. Storage is slow, too."""
    saver = Saver(Store(str(in_memory)), 0, 2, placement=placement(servers, 0))
    for step, complete in ((1, -1), (2, 1), (3, 1), (4, 2)):
        assert saver.has_room
        saver.save(step, [full_piece("model.w", torch.ones(4))], META, durable=step == 1, complete=complete)
        settled([saver])
        held = {key[0] for key, _ in servers[0]._all()}
        assert held >= {complete, step - 1, step} - {-1, 0}
    saver.tell_failed([-1, 1])
    saver.close()


DYING = """
import os, signal, sys, torch
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.checkpoint.saver import Saver
from orchestrator.checkpoint.snapshot_writer import Placement
placement = Placement({token!r}, {own!r}, {other!r}, 1, "one")
saver = Saver(Store({folder!r}, attempt="one"), placement=placement)
saver.save(1, [full_piece("model.w", torch.ones(1000))], {meta!r}, durable=False)
saver._wait(lambda: not saver.is_snapping, 30.0)
os.kill(saver._sidecar.process.pid, signal.SIGSTOP)
saver.save(2, [full_piece("model.w", torch.full((1000,), 2.0))], {meta!r}, durable=False, complete=1)
os.kill(saver._sidecar.process.pid, signal.SIGCONT)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_step_that_was_handed_over_outlives_its_rank(servers: list[SnapshotServer], tmp_path: Path) -> None:
    code = DYING.format(
        token=TOKEN, own=servers[0].address, other=servers[1].address, folder=str(tmp_path), meta=META
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    controller = memory(servers)
    found = controller.latest()
    assert found is not None
    assert found.step == 2
    controller.rewind(2, 2, found)
    assert torch.equal(loaded(memory(servers), 2), torch.full((1000,), 2.0))


def test_full_memory_costs_the_copy_and_not_the_commit(
    servers: list[SnapshotServer], in_memory: Path
) -> None:
    saver = Saver(Store(str(in_memory)), placement=placement(servers, 0))
    saver.save(1, [full_piece("model.w", torch.ones(300_000))], META)
    copy, durable = sorted(saver.close(), key=lambda outcome: outcome.place != "peer memory")
    assert (copy.state, durable.state, saver.snapshot_step) == ("failed", "published", -1)
    assert "No space left" in copy.reason
    assert TOKEN not in copy.reason


def test_strangers_are_hung_up_on() -> None:
    server = SnapshotServer(TOKEN)
    with pytest.raises(ConnectionError):
        PeerMemory("a guess", [server.address]).latest()
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"\xff" * 64)
        assert connection.recv(1) == b""
    assert PeerMemory(TOKEN, [server.address]).latest() is None
    server.close()


def test_a_stopped_node_does_not_hang_the_others(nodes: list[Node]) -> None:
    ranks = gang(nodes)
    save(ranks, 1)
    end(ranks)
    os.kill(nodes[0].process.pid, signal.SIGSTOP)
    controller = memory(nodes, timeout=0.5)
    found = controller.latest()
    assert found is not None
    controller.rewind(1, 2, found)
    assert torch.equal(loaded(memory(nodes[1:], timeout=0.5), 1), rows(1))


def test_a_server_ends_with_its_parent() -> None:
    node = Node()
    node.process.stdin.close()  # type: ignore[union-attr]
    assert node.process.wait(10) == 0
    node.process.stdout.close()  # type: ignore[union-attr]


def test_connections_are_kept_and_made_anew(servers: list[SnapshotServer]) -> None:
    """A server may have ended one while it was idle."""
    peers = memory(servers[:1])
    peers.latest()
    (connection,) = peers._connections._idle[servers[0].address]
    peers.latest()
    assert peers._connections._idle[servers[0].address] == [connection]
    connection.shutdown(socket.SHUT_RDWR)
    assert peers.latest() is None
    assert peers._connections._idle[servers[0].address] != [connection]


def test_a_silent_server_is_waited_for_once(servers: list[SnapshotServer]) -> None:
    """Its node is cut off: a restore asks for many files, and must not wait for each."""
    with silent() as (address, calls):
        peers = PeerMemory(TOKEN, [address, servers[0].address], timeout=0.2)
        for _ in range(3):
            peers.latest()
        assert calls() == 1
        gone = PeerMemory(TOKEN, [address], timeout=0.2)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                gone.latest()
        assert calls() == 2


def test_memory_that_is_being_sent_is_not_written_again() -> None:
    """A later part that takes the place of one with as many bytes."""
    size = 16 << 20
    server = SnapshotServer(TOKEN, limit_bytes=4 * size)
    host, _, port = server.address.rpartition(":")

    def connect() -> socket.socket:
        return socket.create_connection((host, int(port)), 10)

    def keep(step: int) -> dict[str, Any]:
        request = {
            "do": "keep",
            "token": TOKEN,
            "step": step,
            "name": "0",
            "attempt": 0,
            "complete": step,
            "note": 2,
        }
        with connect() as writer:
            send(writer, request, b"{}", bytes([step]) * size)
            return receive_message(writer)

    assert keep(1) == {"size": 0}
    with connect() as reader:
        send(reader, {"do": "read", "token": TOKEN, "step": 1, "name": "0", "offset": 0, "count": size})
        assert receive_message(reader)["size"] == size
        data = memoryview(bytearray(size))
        receive(reader, data[: 1 << 20])  # and slowly on
        assert keep(2) == {"size": 0}
        receive(reader, data[1 << 20 :])
    server.close()
    assert bytes(data).count(1) == size
