"""What ranks agree on after a step. Ranks are threads here, and queues bring their messages; real ranks on gloo do the
same in tests/dist."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.data.samples.receipt import add
from orchestrator.parallel.deterministic_reduction import tree_sum
from orchestrator.parallel.rank_messages import agree, reporting_ranks, sum_over_ranks

WORLDS = [1, 2, 3, 5, 8, 13]


class Threads:
    """Ranks that are threads. `sent` counts their messages to single ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
        self._world, self._local = world, threading.local()
        self._queues = {(a, b): Queue[Tensor]() for a in range(world) for b in range(world)}
        self.sent = 0
        for name in ("send", "recv", "broadcast"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist, "get_rank", lambda: self._local.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)

    def send(self, tensor: Tensor, to: int) -> None:
        self.sent += 1
        self._queues[self._local.rank, to].put(tensor.clone())

    def recv(self, tensor: Tensor, of: int) -> None:
        tensor.copy_(self._queues[of, self._local.rank].get(timeout=10))

    def broadcast(self, tensor: Tensor, of: int) -> None:
        if self._local.rank != of:
            self.recv(tensor, of)
            return
        for rank in range(1, self._world):
            self._queues[of, rank].put(tensor.clone())

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Return what the program returns on each rank."""

        def on(rank: int) -> Any:
            self._local.rank = rank
            return program(rank)

        with ThreadPoolExecutor(self._world) as pool:
            return list(pool.map(on, range(self._world)))


@pytest.mark.parametrize("world", [*WORLDS, 16_384])
def test_each_rank_reports_once_over_few_others(world: int) -> None:
    reported = dict.fromkeys(range(1, world), 0)
    for rank in range(world):
        children, parent = reporting_ranks(rank, world)
        assert len(children) <= (world - 1).bit_length()
        covered = rank + 1
        for child, ranks in children:
            assert child == covered, "the rows of a rank are those of the ranks after it"
            assert reporting_ranks(child, world)[1] == rank
            reported[child] += 1
            covered += ranks
        assert (parent is None) == (rank == 0)
        if not rank:
            assert covered == world
    assert set(reported.values()) <= {1}


@pytest.mark.parametrize("world", WORLDS)
def test_a_sum_over_ranks_has_the_bits_of_the_tree_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    parts = torch.randn(world, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ranks = Threads(monkeypatch, world)
    for found in ranks.run(lambda rank: sum_over_ranks(parts[rank])):
        assert torch.equal(found, tree_sum(parts))
    assert ranks.sent == world - 1


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_agree_and_the_first_has_the_lists(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    digests = [2**63 - 1 - rank for rank in range(world)]
    last = world - 1
    ranks = Threads(monkeypatch, world)

    def program(rank: int) -> Any:
        return agree(
            digests[rank],
            rank == last,
            failures=rank,
            ready=rank != last,
            snapshot_step=100 - rank,
            failed_step=rank,
            busy=rank / 8,
            memory=rank << 40,
        )

    found = ranks.run(program)
    for agreed in found:
        assert (agreed.digest, agreed.stop, agreed.failures) == (add(digests), True, last)
        assert (agreed.ready, agreed.snapshot_step) == (False, 100 - last)
    everyone = range(world)
    assert found[0].failed_steps == tuple(everyone)
    assert found[0].busy == tuple(rank / 8 for rank in everyone)
    assert found[0].memory == tuple(rank << 40 for rank in everyone)
    assert all(agreed.memory[0] == rank << 40 for rank, agreed in enumerate(found))
    assert ranks.sent == world - 1
