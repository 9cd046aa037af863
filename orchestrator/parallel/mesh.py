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
    """The ranks of a group in order, this rank's index among them, and the clock that its collectives are timed by."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    clock: StepClock | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def communicating(self) -> AbstractContextManager[None]:
        """See `StepClock.communicating`; a rank alone waits for nobody."""
        if self.size == 1 or self.clock is None:
            return contextlib.nullcontext()
        return self.clock.communicating()


class Mesh:
    """All process groups that this rank is in. All ranks construct it together.

    Attributes:
        data: ranks with the same dense parameters and different tokens: dp and cp together.
        expert: ranks over which the experts are divided, consecutive on the data axis (Rajbhandari et al., 2022,
            DeepSpeed-MoE, section 5.2).
        expert_data: ranks with the same experts.
        shard, expert_shard: those of `data` and `expert_data` over which ZeRO divides one copy of the parameters,
            consecutive (HSDP: Zhao et al., 2023, "PyTorch FSDP", section 3.2.2).
        copies: those of `data` and of `expert_data` with the same part of each copy.
    """

    def __init__(self, layout: Layout, clock: StepClock | None = None) -> None:
        self.layout, self.clock = layout, clock
        self.rank = dist.get_rank()
        self.coordinate: Coordinate = layout.coordinate(self.rank)
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
            """The copy of a rank, and its index in it."""
            return divmod(p["dp"] * layout.cp + p["cp"], ways)

        self.shard = self._groups(lambda p: (p["pp"], p["tp"], of_copy(p)[0]))
        self.copies = self._groups(lambda p: (p["pp"], p["tp"], of_copy(p)[1]))
        # FSDP2 asks for the group even of a rank that shares its experts with no other of its copy.
        self.expert_shard = self._groups(
            lambda p: (p["pp"], p["tp"], p["dp"] % ep, of_copy(p)[0]), ep > 1 and self.copies.size > 1
        )

    def of_stages(self, pipeline_ranks: frozenset[int]) -> ProcessGroup:
        """The ranks of this rank's pipeline with these indices; this rank alone if its index is none of them."""
        return self._groups(
            lambda p: (p["dp"], p["cp"], p["tp"], 0 if p["pp"] in pipeline_ranks else 1 + p["pp"])
        )

    def connect(self, device: torch.device) -> None:
        """Make this rank's communicators of NCCL now, in one order on all ranks.

        Left to itself, each is made by the first message in it: in the middle of a step, for messages between some of
        its ranks another one each pair, and a batch of them as the first is undefined unless all ranks are in it.
        """
        if device.type != "cuda":
            return
        one = torch.ones(1, device=device)
        for ranks, handle in self._made.items():
            if handle is not None and self.rank in ranks:
                dist.all_reduce(one, dist.ReduceOp.MAX, group=handle)
        one.item()  # what cannot be connected is told here

    def _groups(
        self, key: Callable[[Coordinate], tuple[int, ...]], even_of_one: bool = False
    ) -> ProcessGroup:
        """Create the groups of ranks with equal keys, those of one rank only if asked; returns this rank's."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.layout.world):
            members.setdefault(key(self.layout.coordinate(rank)), []).append(rank)
        mine = None
        for ranks in map(tuple, members.values()):
            if self._made.get(ranks) is None:
                # A group of one needs no collectives. Torch's own timeout of a group is not that of all ranks.
                more = len(ranks) > 1 or even_of_one
                self._made[ranks] = dist.new_group(list(ranks), COLLECTIVE_TIMEOUT) if more else None
            if self.rank in ranks:
                mine = ProcessGroup(ranks, ranks.index(self.rank), self._made[ranks], self.clock)
        assert mine is not None
        return mine
