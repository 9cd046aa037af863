"""What the planner knows of a device: rates and links, in SI units. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

SLOWEST_SHARE = 1e-3
"""Least share of the peak that a matrix product is said to reach, however small."""


TURN = 4e-3
"""Seconds of computation beyond which a collective behind it takes no longer: about a turn of Linux's scheduler."""


@dataclass(frozen=True)
class Link:
    """A link that each rank has to its peers: seconds that a message takes by itself, and bytes per second that a rank
    sends while its peers send too."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """One worker: its device and how it is joined to the others.

    Attributes:
        memory: bytes for the model.
        flops: peak of matrix products in 16-bit types, FLOP/s.
        full_flops: the same in fp32; 0 for as many as `flops`.
        eight_bit_flops: the same in 8 bits; 0 where they have no units of their own.
        matrix_share: share of the peak that large matrix products reach.
        half_size: rows, columns or inner size at which a product reaches half of that, in each of the three alone.
        half_area: rows x columns at which it reaches half, since there are not tiles enough for all its units.
        attention_share: share of the peak that the products of attention reach.
        score_bytes: bytes that go through memory for each score in a forward pass; 0 if the kernel keeps them inside.
        score_seconds: that each score takes beside its products, such as its exponential; a GPU hides it.
        memory_bandwidth: bytes per second of the device's memory.
        element_share: share of that which element-wise operations reach.
        eager: how many times the bytes pass where a layer is not compiled, and its operations are not fused.
        optimizer_share: share of that bandwidth which the optimizer reaches.
        launch: seconds to launch an operation.
        launches_ahead: whether operations are launched while earlier ones run, as on a GPU.
        collective: seconds in which a collective begins and ends, whatever its size and ranks.
        waking: how much longer it takes behind computation, as a share of that: a processor that has computed for
            longer has to wait for longer, see `behind`.
        message: as `collective`, of what a stage of a pipeline sends to another.
        per_node: workers on a node.
        inside, between: the links between workers of a node and of different nodes.
        crowding: how many times as long memory and the launch of operations take while other ranks of a node compute,
            which share caches and the way to memory, but not what multiplies.
        delay: how much longer than its least a rank takes by itself in the mean of its steps, as a share of that.
        host_bandwidth: bytes per second between the device and its host's memory.
        host_memory: bytes of that for each worker.
        host_cores: processors of the host for each worker; 0 where that is not known.
        watts: power of the worker at full load.
        name: of the profile that it is from.
        stands_for: the device as which it is taken, of which there is no profile; empty if it is that of its profile.
    """

    memory: float
    flops: float
    full_flops: float = 0.0
    eight_bit_flops: float = 0.0
    matrix_share: float = 0.5
    half_size: float = 0.0
    half_area: float = 0.0
    attention_share: float = 0.5
    score_bytes: float = 0.0
    score_seconds: float = 0.0
    memory_bandwidth: float = 1e11
    element_share: float = 0.8
    eager: float = 1.0
    optimizer_share: float = 0.8
    launch: float = 1e-5
    launches_ahead: bool = False
    collective: float = 0.0
    waking: float = 0.0
    message: float = 0.0
    per_node: int = 8
    inside: Link = Link(1e-4, 1e9)
    between: Link = Link(1e-4, 1e9)
    crowding: float = 1.0
    delay: float = 0.0
    host_bandwidth: float = 2e10
    host_memory: float = math.inf
    host_cores: float = 0.0
    watts: float = 0.0
    name: str = ""
    stands_for: str = ""

    @property
    def peak(self) -> float:
        """FLOP/s of matrix products in the precision in which they are fastest, by which a run's `mfu` is told."""
        return max(self.flops, self.full_flops)

    def matrix(self, rows: float, columns: float, inner: float, width: float, count: float = 1.0) -> float:
        """Seconds of `count` products [rows, inner] x [inner, columns] of numbers of `width` bytes: bound by
        arithmetic, which small sizes use badly, or by memory (the roofline of Williams et al., 2009). A processor does
        one after the other: within a step, weights and what other operations have written are in no near cache."""
        share = self.matrix_share * rows * columns / (rows * columns + self.half_area)
        for size in (rows, columns, inner):
            share *= size / (size + self.half_size)
        peak = self.flops if width < 4 else self.full_flops or self.flops
        peak = self.eight_bit_flops or peak if width < 2 else peak
        arithmetic = 2.0 * rows * columns * inner / (peak * max(share, SLOWEST_SHARE))
        moved = (rows * inner + inner * columns + rows * columns) * width
        if not self.launches_ahead:
            return count * (arithmetic + self.elements(moved))
        return count * max(arithmetic, moved / self.memory_bandwidth)

    def scores(self, pairs: float, size: float, width: float) -> tuple[float, float]:
        """Seconds of attention between `pairs` of a query and a key of `size` numbers each, over all heads: forward and
        backward. A fused kernel computes the scores again in the backward pass (Dao et al., 2022, section 3.1), and
        in 32 bits where 16 are slower."""
        peak = self.peak if width < 4 else self.full_flops or self.flops
        products = 4.0 * pairs * size / (peak * self.attention_share)
        passed = pairs * (self.score_bytes * width / 2 / self.memory_bandwidth + self.score_seconds)
        return products + passed, (2.0 if self.score_bytes else 2.5) * products + 2.0 * passed

    def elements(self, moved: float) -> float:
        """Seconds of element-wise operations that read and write so many bytes."""
        return moved / (self.memory_bandwidth * self.element_share)

    def launched(self, seconds: float, operations: float, more: float = 0.0) -> float:
        """Seconds of so many operations that keep the device busy for `seconds`, and the process for `more` than their
        launches."""
        launches = operations * self.launch + more
        return max(seconds, launches) if self.launches_ahead else seconds + launches

    def behind(self, seconds: float) -> float:
        """How many seconds longer a collective takes that comes behind so many of computation."""
        return self.waking * min(seconds, TURN)

    def among(self, ranks: int) -> Machine:
        """A worker of a job of so many ranks, which compute at the same time: a node has no more of them."""
        per_node = min(ranks, self.per_node)
        if per_node == 1 or (self.crowding == 1.0 and per_node == self.per_node):
            return self
        return _crowded(self, per_node)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Machine:
        """The machine whose fields, as `dataclasses.asdict` has them, these are."""
        links = {name: Link(**data[name]) for name in ("inside", "between")}
        return Machine(**{**data, **links})

    def scaled(self, speed: float) -> Machine:
        """A worker of so many of this one, as cores are."""
        return replace(
            self,
            flops=self.flops * speed,
            full_flops=self.full_flops * speed,
            eight_bit_flops=self.eight_bit_flops * speed,
            score_seconds=self.score_seconds / speed,
            memory_bandwidth=self.memory_bandwidth * min(speed, 4.0),
            watts=self.watts * speed,
        )


@lru_cache(maxsize=64)
def _crowded(machine: Machine, per_node: int) -> Machine:
    bandwidth, launch = machine.memory_bandwidth / machine.crowding, machine.launch * machine.crowding
    return replace(machine, memory_bandwidth=bandwidth, launch=launch, crowding=1.0, per_node=per_node)


BOUNDLESS = Machine(memory=math.inf, flops=1e12)
"""A machine on which every legal layout fits."""
