"""Weights on their way to rollout workers: over real servers, in pieces of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestrator.checkpoint import snapshot_server
from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.snapshot_server import SnapshotServer, weight_server
from orchestrator.train.rollouts import weights
from orchestrator.train.rollouts.replica import PieceLocation
from orchestrator.train.rollouts.weights import NoWeights, WeightSender, read_weights

TOKEN = "secret"
ROWS = torch.arange(12, dtype=torch.float32).reshape(4, 3)


class Engine:
    """The state of one of two ranks: half of the rows of a matrix, with an empty tensor and a scalar on the first."""

    def __init__(self, rank: int, added: float) -> None:
        half = (ROWS + added)[2 * rank : 2 * rank + 2]
        self._pieces = [TensorPiece("model.w", (4, 3), (2 * rank, 0), half.double() if rank else half)]
        self._pieces.append(TensorPiece("optim.w.m", (4, 3), (2 * rank, 0), half))
        if not rank:
            self._pieces.append(TensorPiece("model.none", (0,), (0,), torch.zeros(0)))
            self._pieces.append(TensorPiece("model.one", (), (), torch.tensor(7 + added)))

    def state(self) -> list[TensorPiece]:
        return self._pieces


class Model:
    """What a replica is filled with."""

    def __init__(self) -> None:
        self.tensors = {
            "w": torch.full((4, 3), torch.nan),
            "none": torch.zeros(0),
            "one": torch.tensor(torch.nan),
        }

    def fill(self, places: Iterable[PieceLocation], read: Callable[[Tensor], object]) -> None:
        for place in places:
            values = torch.empty(place.extent)
            read(values)
            self.tensors[place.name][place.slices].copy_(values)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SnapshotServer]]:
    monkeypatch.setattr(weights, "gather_json", lambda value: [value])
    found = [weight_server(TOKEN, "127.0.0.1") for _ in range(2)]
    yield found
    for server in found:
        server.close()


def named(*found: SnapshotServer) -> list[dict[str, str]]:
    return [{"node": f"node-{n}", "address": server.address} for n, server in enumerate(found)]


def send(
    rank: int,
    version: int,
    servers: list[dict[str, str]],
    attempt: int = 1,
    spared: int | None = None,
) -> list[dict[str, str]]:
    engine: Any = Engine(rank, float(version))
    sender = WeightSender(TOKEN, rank, world=2)
    return sender.send(engine, servers, version=version, attempt=attempt, spared=spared)


def read(version: int, servers: list[dict[str, str]]) -> Model:
    model: Any = Model()
    read_weights(model, TOKEN, servers, version)
    return model  # type: ignore[no-any-return]


def test_pieces_of_all_ranks_arrive_to_the_bit(servers: list[SnapshotServer]) -> None:
    both = named(*servers)
    for version in (1, 2):
        assert [send(rank, version, both) for rank in (0, 1)] == [both, both]
        for place in (both, both[1:]):
            found = read(version, place)
            assert torch.equal(found.tensors["w"], ROWS + version)
            assert found.tensors["one"] == 7 + version
    with pytest.raises(NoWeights, match="no server has the weights in version 1"):
        read(1, both)  # the next version took its place


def test_the_version_of_answers_that_are_generated_ahead_is_spared(servers: list[SnapshotServer]) -> None:
    """Evaluations take further versions meanwhile, of which only the last one stays."""
    (one,) = named(servers[0])
    for version, spared in ((1, None), (2, 1), (3, 1)):
        for rank in (0, 1):
            send(rank, version, [one], spared=spared)
    for version in (1, 3):
        assert torch.equal(read(version, [one]).tensors["w"], ROWS + version)
    with pytest.raises(NoWeights):
        read(2, [one])
    for rank in (0, 1):
        send(rank, 4, [one])
    for version in (1, 3):
        with pytest.raises(NoWeights):
            read(version, [one])


def test_each_rank_may_have_reached_other_servers(servers: list[SnapshotServer]) -> None:
    first, second = named(*servers)
    send(0, 5, [first])
    with pytest.raises(NoWeights, match="no server has the weights of ranks 1 in version 5"):
        read(5, [first, second])
    send(1, 5, [second])
    assert torch.equal(read(5, [second, first]).tensors["w"], ROWS + 5)


def test_a_lost_server_is_left_out_and_named_if_there_is_no_other(servers: list[SnapshotServer]) -> None:
    first, second = named(*servers)
    servers[0].close()
    assert send(0, 1, [first, second]) == [second]
    send(1, 1, [second])
    assert torch.equal(read(1, [first, second]).tensors["w"], ROWS + 1)
    with pytest.raises(NoWeights, match="no server of weights took version 2 from rank 0: node-0"):
        send(0, 2, [first])


def test_a_later_attempt_replaces_what_more_ranks_have_sent(servers: list[SnapshotServer]) -> None:
    (one,) = named(servers[0])
    for rank in (0, 1):
        send(rank, 3, [one])
    send(0, 2**32, [one], attempt=2)
    with pytest.raises(NoWeights):
        read(3, [one])


def test_a_large_tensor_has_a_time_limit_for_each_chunk_and_not_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit of a socket is for a whole `sendall`."""
    monkeypatch.setattr(snapshot_server, "SENT_AT_ONCE", 4)
    sent: list[bytes] = []
    connection: Any = SimpleNamespace(sendall=lambda data: sent.append(bytes(data)))
    snapshot_server.send(connection, {}, b"0123456789", memoryview(b"ab"), b"")
    assert sent[1:] == [b"0123", b"4567", b"89", b"ab"]
