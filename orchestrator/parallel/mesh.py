"""The process groups of a layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.device import COLLECTIVE_TIMEOUT
from orchestrator.parallel.layout import AXES, Layout
from orchestrator.parallel.step_clock import StepClock
from orchestrator.parallel.witness import Witness

Coordinate = dict[str, int]


def backend_of_groups(layout: Layout) -> str | None:
    """Return the backend of the groups within the world: on GPUs NCCL alone; None for that of the world.

    Messages of the host go through the world. Only with offloaded state does a group send tensors of the host, and so
    needs gloo, which costs a rank two threads, a listening socket and an exchange of addresses for each group.
    """
    nccl = "cuda:nccl"
    return nccl if nccl in dist.get_backend_config() and layout.offload == "none" else None


@dataclass(frozen=True)
class ProcessGroup:
    """A group of ranks that run collectives together.

    Attributes:
        ranks: global ranks, ascending.
        index: this rank's index among them.
        handle: torch's group; None for a group of one rank, which needs no collectives.
        clock: times the collectives of the group.
        witness: records their messages in a step that is verified.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    clock: StepClock | None = field(default=None, compare=False, repr=False)
    witness: Witness | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def communicating(self) -> AbstractContextManager[None]:
        """Count the time within as communication, see `StepClock.communicating`; not in a group of one rank."""
        if self.size == 1 or self.clock is None:
            return contextlib.nullcontext()
        return self.clock.communicating()

    @property
    def sums_gradients(self) -> bool:
        """Whether the ranks sum gradients, see `Witness.sums_gradients`."""
        return self.witness is None or self.witness.sums_gradients

    def sent(self, tensor: Tensor) -> None:
        """Record what this rank gives to a collective of the group, see `Witness.sent`."""
        if self.witness is not None:
            self.witness.sent(tensor)

    def received(self, tensor: Tensor) -> None:
        """Record what a collective of the group returns, see `Witness.received`."""
        if self.witness is not None:
            self.witness.received(tensor)


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
        witness: records the messages of all groups in a step that is verified.
    """

    def __init__(self, layout: Layout, clock: StepClock | None = None) -> None:
        self.layout = layout
        self.clock = clock
        self.witness = Witness()
        self.rank = dist.get_rank()
        self._backend = backend_of_groups(layout)
        self.coordinate: Coordinate = layout.coordinate(self.rank)
        # This rank's groups by their ranks: axes of equal ranks share one. None for a group of one rank.
        everyone = tuple(range(layout.world))
        self._handles: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: dist.group.WORLD}
        self._counted: set[frozenset[int]] = set()
        """Stages whose groups exist, see `stage_group`."""
        pp, dp, cp, tp = (self.coordinate[axis] for axis in AXES)
        ep = layout.ep
        self.world = self._group(everyone)
        self.tp = self._group(layout.rank(pp=pp, dp=dp, cp=cp, tp=i) for i in range(layout.tp))
        self.cp = self._group(layout.rank(pp=pp, dp=dp, cp=i, tp=tp) for i in range(layout.cp))
        self.pp = self.stage_group(frozenset(range(layout.pp)))

        def replicas(numbers: Iterable[int]) -> Iterator[int]:
            """Yield the ranks of these replicas, which are numbered dp x cp + cp, for this rank's stage and shard."""
            return (layout.rank(pp=pp, dp=n // layout.cp, cp=n % layout.cp, tp=tp) for n in numbers)

        mine = dp * layout.cp + cp
        all_replicas = range(layout.replicas)
        same_experts = [n for n in all_replicas if n // layout.cp % ep == dp % ep]
        first = dp // ep * ep
        ways = layout.sharded
        copy = range(mine // ways * ways, mine // ways * ways + ways)
        self.data = self._group(replicas(all_replicas))
        self.expert = self._group(layout.rank(pp=pp, dp=first + i, cp=cp, tp=tp) for i in range(ep))
        self.expert_data = self._group(replicas(same_experts))
        self.shard = self._group(replicas(copy))
        self.copies = self._group(replicas(all_replicas[mine % ways :: ways]))
        # With several copies FSDP2 needs a handle for this group even if it has one rank.
        needs_handle = ep > 1 and self.copies.size > 1
        self.expert_shard = self._group(replicas(n for n in same_experts if n in copy), needs_handle)

    def stage_group(self, pipeline_ranks: frozenset[int]) -> ProcessGroup:
        """Return the ranks of this pipeline with the given indices; this rank alone if it is not one of them."""
        coordinate = self.coordinate
        mine = coordinate["pp"]
        is_member = mine in pipeline_ranks
        stages = sorted(pipeline_ranks) if is_member else [mine]
        result = self._group(self.layout.rank(**{**coordinate, "pp": stage}) for stage in stages)
        if len(pipeline_ranks) > 1 and not is_member and pipeline_ranks not in self._counted:
            # torch names a group by its ranks and the number of groups that the process has made. That number must not
            # differ between the members of a later group, so ranks outside of this group make a group of one rank.
            self._make([self.rank])
        self._counted.add(pipeline_ranks)
        return result

    def connect(self, device: torch.device) -> None:
        """Create this rank's NCCL communicators now, in the same order on all ranks.

        NCCL otherwise creates a communicator at the first collective of a group, in the middle of a step. A first
        message between two ranks would create a communicator for that pair, and a batch of messages as the first call
        of a group is undefined unless all of its ranks take part.

        Groups that a step rarely uses get none: those of one rank, and with several sharded copies those of all
        replicas, which only scalars and optimizers of whole matrices need.
        """
        if device.type != "cuda":
            return
        rare = {self.data.ranks, self.expert_data.ranks} if self.copies.size > 1 else set()
        rare -= {
            self.world.ranks,
            self.copies.ranks,
            self.shard.ranks,
            self.expert.ranks,
            self.expert_shard.ranks,
        }
        probe = torch.ones(1, device=device)
        for ranks, handle in self._handles.items():
            if handle is not None and (len(ranks) > 1 or self.layout.world == 1) and ranks not in rare:
                dist.all_reduce(probe, dist.ReduceOp.MAX, group=handle)
        probe.item()  # waits, so that a failed connection is reported here

    def _group(self, ranks: Iterable[int], even_of_one: bool = False) -> ProcessGroup:
        """Return the group of these ranks, in ascending order, of which this rank is one.

        Only its members create a group. Each rank creates its groups in the same order of axes, so the members of a
        group that waits for one of them wait for a group of an earlier axis, and no circle of waiting ranks arises. All
        groups of an axis have one size, so every rank has created as many groups as the others, see `stage_group`.

        Args:
            ranks: its members.
            even_of_one: whether a group of one rank gets a handle too.
        """
        members = tuple(ranks)
        if self._handles.get(members) is None and (len(members) > 1 or even_of_one):
            self._handles[members] = self._make(list(members))
        handle = self._handles.get(members)
        return ProcessGroup(members, members.index(self.rank), handle, self.clock, self.witness)

    def _make(self, members: list[int]) -> dist.ProcessGroup:
        # The timeout is passed explicitly: a new group does not inherit that of the world.
        return dist.new_group(members, COLLECTIVE_TIMEOUT, self._backend, use_local_synchronization=True)
