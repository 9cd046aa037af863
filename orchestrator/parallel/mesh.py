"""The process groups of a layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from orchestrator.parallel.device import COLLECTIVE_TIMEOUT
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.step_clock import StepClock

Coordinate = dict[str, int]


@dataclass(frozen=True)
class ProcessGroup:
    """A group of ranks that run collectives together.

    Attributes:
        ranks: global ranks, ascending.
        index: this rank's index among them.
        handle: torch's group; None for a group of one rank, which needs no collectives.
        clock: times the collectives of the group.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    clock: StepClock | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def communicating(self) -> AbstractContextManager[None]:
        """Count the time within as communication, see `StepClock.communicating`; not in a group of one rank."""
        if self.size == 1 or self.clock is None:
            return contextlib.nullcontext()
        return self.clock.communicating()


class Mesh:
    """All process groups of this rank. All ranks construct the mesh together.

    A rank has a coordinate on the axes pp, dp, cp and tp. A group holds the ranks whose other coordinates are equal.

    Attributes:
        world: all ranks.
        tp: ranks that divide each tensor of the same layers.
        cp: ranks that divide the same sequences.
        pp: ranks of one pipeline, in the order of its stages.
        data: ranks with the same dense parameters and different tokens: dp and cp together.
        expert: ep consecutive ranks of the dp axis, which divide the experts (Rajbhandari et al., 2022,
            DeepSpeed-MoE, section 5.2).
        expert_data: ranks with the same experts.
        shard: consecutive ranks of `data` over which ZeRO divides one copy of the parameters (HSDP: Zhao et al., 2023,
            "PyTorch FSDP", section 3.2.2).
        expert_shard: the same for `expert_data`.
        copies: ranks of `data` with the same part of each copy, over which HSDP sums gradients.
    """

    def __init__(self, layout: Layout, clock: StepClock | None = None) -> None:
        self.layout = layout
        self.clock = clock
        self.rank = dist.get_rank()
        self.coordinate: Coordinate = layout.coordinate(self.rank)
        # Groups by their ranks: axes of equal ranks share one. None for a group of one rank.
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {
            tuple(range(layout.world)): dist.group.WORLD
        }
        ep = layout.ep
        self.world = self._groups(lambda p: ())
        self.tp = self._groups(lambda p: (p["pp"], p["dp"], p["cp"]))
        self.cp = self._groups(lambda p: (p["pp"], p["dp"], p["tp"]))
        self.pp = self._groups(lambda p: (p["dp"], p["cp"], p["tp"]))
        self.data = self._groups(lambda p: (p["pp"], p["tp"]))
        self.expert = self._groups(lambda p: (p["pp"], p["dp"] // ep, p["cp"], p["tp"]))
        self.expert_data = self._groups(lambda p: (p["pp"], p["dp"] % ep, p["tp"]))
        ways = layout.sharded

        def of_copy(p: Coordinate) -> tuple[int, int]:
            """Return the number of the rank's copy, and the rank's index in it."""
            return divmod(p["dp"] * layout.cp + p["cp"], ways)

        self.shard = self._groups(lambda p: (p["pp"], p["tp"], of_copy(p)[0]))
        self.copies = self._groups(lambda p: (p["pp"], p["tp"], of_copy(p)[1]))
        # With several copies FSDP2 needs a handle for this group even if it has one rank.
        self.expert_shard = self._groups(
            lambda p: (p["pp"], p["tp"], p["dp"] % ep, of_copy(p)[0]), ep > 1 and self.copies.size > 1
        )

    def of_stages(self, pipeline_ranks: frozenset[int]) -> ProcessGroup:
        """Return the ranks of this pipeline with the given indices; this rank alone if it is not one of them."""
        return self._groups(
            lambda p: (p["dp"], p["cp"], p["tp"], 0 if p["pp"] in pipeline_ranks else 1 + p["pp"])
        )

    def connect(self, device: torch.device) -> None:
        """Create this rank's NCCL communicators now, in the same order on all ranks.

        NCCL otherwise creates a communicator at the first collective of a group, in the middle of a step. A first
        message between two ranks would create a communicator for that pair, and a batch of messages as the first call
        of a group is undefined unless all of its ranks take part.
        """
        if device.type != "cuda":
            return
        one = torch.ones(1, device=device)
        for ranks, handle in self._made.items():
            if handle is not None and self.rank in ranks:
                dist.all_reduce(one, dist.ReduceOp.MAX, group=handle)
        one.item()  # waits, so that a failed connection is reported here

    def _groups(
        self, key: Callable[[Coordinate], tuple[int, ...]], even_of_one: bool = False
    ) -> ProcessGroup:
        """Create the groups of ranks with equal keys, and return this rank's.

        torch requires every rank to create every group, in the same order.

        Args:
            key: the key of a rank, by its coordinate.
            even_of_one: whether a group of one rank gets a handle too.
        """
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.layout.world):
            members.setdefault(key(self.layout.coordinate(rank)), []).append(rank)
        mine = None
        for ranks in map(tuple, members.values()):
            if self._made.get(ranks) is None:
                # The timeout is passed explicitly: a new group does not inherit that of the world.
                needs_handle = len(ranks) > 1 or even_of_one
                self._made[ranks] = dist.new_group(list(ranks), COLLECTIVE_TIMEOUT) if needs_handle else None
            if self.rank in ranks:
                mine = ProcessGroup(ranks, ranks.index(self.rank), self._made[ranks], self.clock)
        assert mine is not None
        return mine
