"""The rates and links of a device, in SI units, and the seconds of its basic operations. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

SLOWEST_SHARE = 1e-3
"""Lower limit on the share of the peak that a matrix product reaches, however small it is."""


TIME_SLICE = 4e-3
"""Seconds of computation beyond which a following collective gets no slower: about Linux's time slice."""


@dataclass(frozen=True)
class Link:
    """A rank's link to its peers.

    Attributes:
        latency: seconds of an empty message.
        bandwidth: bytes/s that a rank sends while its peers send too.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """One worker: its device, and its links to the other workers.

    Attributes:
        memory: bytes for the model.
        flops: peak of matrix products in 16-bit types, FLOP/s.
        full_flops: the same in fp32; 0 if it equals `flops`.
        eight_bit_flops: the same in 8 bits; 0 if the device has no units for it.
        matrix_share: share of the peak that large matrix products reach.
        half_size: size (rows, columns or inner) at which a product reaches half of that, for each of the three.
        half_area: rows x columns at which it reaches half, because smaller products have too few tiles for all units.
        attention_share: share of the peak that the products of attention reach.
        score_bytes: bytes read and written for each score in a forward pass; 0 if a fused kernel keeps scores inside.
        score_seconds: seconds of a score besides its products, such as its exponential; a GPU hides them.
        memory_bandwidth: bytes/s of the device's memory.
        element_share: share of `memory_bandwidth` that element-wise operations reach.
        eager: factor on the bytes of element-wise operations if a layer is not compiled.
        optimizer_share: share of `memory_bandwidth` that the optimizer reaches.
        launch: seconds to launch an operation.
        launches_ahead: whether operations are launched while earlier ones run, as on a GPU.
        collective: fixed seconds of a collective, whatever its size and ranks.
        waking: how much slower a collective gets by computation before it, as a share of that time, see
            `collective_delay`.
        message: fixed seconds of a message between stages of a pipeline.
        per_node: workers on a node.
        inside: the link between workers of one node.
        between: the link between workers of different nodes.
        crowding: slowdown of memory and launches while the other ranks of a node compute: they share caches and
            memory bandwidth, but not arithmetic units.
        delay: mean delay of a rank's steps beyond its fastest ones, as a share of those.
        host_bandwidth: bytes/s between the device and its host's memory.
        host_memory: bytes of the host's memory for each worker.
        host_cores: CPUs of the host for each worker; 0 if unknown.
        watts: power of the worker at full load.
        name: name of the profile.
        stands_for: the device that this profile is used for, if that device has no profile; else empty.
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
        """FLOP/s of matrix products in the faster of 16 bits and fp32; a run's `mfu` refers to it."""
        return max(self.flops, self.full_flops)

    def matrix(self, rows: float, columns: float, inner: float, width: float, count: float = 1.0) -> float:
        """Return the seconds of `count` products [rows, inner] x [inner, columns].

        arithmetic = 2 rows columns inner / (peak x share), where small sizes reach a smaller share of the peak
        memory     = (rows inner + inner columns + rows columns) x width / bandwidth

        On a GPU the larger of the two counts (roofline: Williams et al., 2009). A CPU takes their sum: within a step
        its operands are not in a near cache, so that it first loads them.

        Args:
            rows: of the result.
            columns: of the result.
            inner: the summed dimension.
            width: bytes of a number; below 2 the product is in 8 bits.
            count: number of products.
        """
        share = self.matrix_share * rows * columns / (rows * columns + self.half_area)
        for size in (rows, columns, inner):
            # A saturation curve for each dimension: half of the share at `half_size`, all of it for large sizes.
            share *= size / (size + self.half_size)
        peak = self.flops if width < 4 else (self.full_flops or self.flops)
        if width < 2 and self.eight_bit_flops:
            peak = self.eight_bit_flops
        arithmetic = 2.0 * rows * columns * inner / (peak * max(share, SLOWEST_SHARE))
        moved = (rows * inner + inner * columns + rows * columns) * width
        if not self.launches_ahead:
            return count * (arithmetic + self.elements(moved))
        return count * max(arithmetic, moved / self.memory_bandwidth)

    def scores(self, pairs: float, size: float, width: float) -> tuple[float, float]:
        """Return the seconds of attention, forward and backward.

        forward = 4 x pairs x size FLOPs (scores, and their product with the values) + memory traffic of the scores.
        The backward pass has twice the products; a fused kernel computes the scores again, which makes it 2.5 times
        (Dao et al., 2022, section 3.1). A device that is faster in fp32 computes attention in fp32.

        Args:
            pairs: pairs of a query and a key, over all heads.
            size: numbers of a head.
            width: bytes of a number.
        """
        peak = self.peak if width < 4 else self.full_flops or self.flops
        product_seconds = 4.0 * pairs * size / (peak * self.attention_share)
        traffic = pairs * (self.score_bytes * width / 2 / self.memory_bandwidth + self.score_seconds)
        return product_seconds + traffic, (2.0 if self.score_bytes else 2.5) * product_seconds + 2.0 * traffic

    def elements(self, moved: float) -> float:
        """Return the seconds of element-wise operations that read and write `moved` bytes."""
        return moved / (self.memory_bandwidth * self.element_share)

    def launched(self, seconds: float, operations: float, process_seconds: float = 0.0) -> float:
        """Return the seconds of operations with their launches.

        A GPU computes while the process launches, so the larger of both counts; a CPU takes their sum.

        Args:
            seconds: time of the computation on the device, in seconds.
            operations: number of launches.
            process_seconds: seconds of the process besides launches.
        """
        launches = operations * self.launch + process_seconds
        return max(seconds, launches) if self.launches_ahead else seconds + launches

    def collective_delay(self, seconds: float) -> float:
        """Return by how many seconds a collective is slower after `seconds` of computation."""
        return self.waking * min(seconds, TIME_SLICE)

    def among(self, ranks: int) -> Machine:
        """Return this worker in a job of `ranks` ranks: a node has at most so many, and they slow each other down."""
        per_node = min(ranks, self.per_node)
        if per_node == 1 or (self.crowding == 1.0 and per_node == self.per_node):
            return self
        return _crowded(self, per_node)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Machine:
        """Return the machine with the given fields, in the form of `dataclasses.asdict`."""
        links = {name: Link(**data[name]) for name in ("inside", "between")}
        return Machine(**{**data, **links})

    def scaled(self, speed: float) -> Machine:
        """Return a worker made of `speed` workers like this one, for example cores."""
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
    bandwidth = machine.memory_bandwidth / machine.crowding
    launch = machine.launch * machine.crowding
    return replace(machine, memory_bandwidth=bandwidth, launch=launch, crowding=1.0, per_node=per_node)


BOUNDLESS = Machine(memory=math.inf, flops=1e12)
"""A machine on which every legal layout fits."""
