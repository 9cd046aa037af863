"""Seconds of collectives by latency and bandwidth over nodes, for the ring and tree algorithms.

The cost model is that of Thakur, Rabenseifner and Gropp (2005): a message of n bytes takes latency + n / bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.planner.device import Machine


@dataclass(frozen=True)
class Group:
    """A communication group of `size` ranks, `stride` ranks apart: the rank order says which of them share a node. Of
    groups that would fit a node but do not divide it, some lie across two, and all wait for those: the worst have a
    single rank on one of them."""

    size: int
    stride: int
    machine: Machine

    @property
    def in_node(self) -> int:
        """How many of its ranks share a node, at least."""
        span, per_node = self.size * self.stride, self.machine.per_node
        if span < per_node and per_node % span:
            return 1
        return max(1, min(self.size, per_node // self.stride))

    @property
    def nodes(self) -> int:
        """Over how many nodes it spreads."""
        return math.ceil(self.size / self.in_node)

    def gather(self, size: float) -> float:
        """Seconds of an all-gather that makes a tensor of `size` bytes: half of an all-reduce by ring."""
        return self._ring(size, 1)

    def scatter(self, size: float) -> float:
        """Seconds of a reduce-scatter of a tensor of `size` bytes: half of an all-reduce by ring. Gloo sums the whole
        tensor everywhere and keeps a part."""
        return self._ring(size, 1) if self.machine.launches_ahead else self.all_reduce(size)

    def all_reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes: by ring, or by tree where latency matters more."""
        if self.size == 1:
            return 0.0
        inside, between = self.machine.inside, self.machine.between
        hops = math.ceil(math.log2(self.nodes)) if self.nodes > 1 else 0
        # within a node NCCL's tree is a chain, of small packets that follow each other in half of the time
        steps = (self.in_node - 1) / 2 if self.machine.launches_ahead else math.ceil(math.log2(self.in_node))
        latency = self.machine.collective + 2.0 * (hops * between.latency + steps * inside.latency)
        carried = 2.0 * size / (between.bandwidth * self.in_node if self.nodes > 1 else inside.bandwidth)
        return min(self._ring(size, 2), latency + carried)

    def all_to_all(self, size: float) -> float:
        """Seconds in which each rank sends `size` bytes in equal parts to all."""
        if self.size == 1:
            return 0.0
        outside = size * (self.size - self.in_node) / self.size
        within = size * (self.in_node - 1) / self.size
        inside, between = self.machine.inside, self.machine.between
        latency = max(inside.latency, between.latency if self.nodes > 1 else 0.0)
        return self.machine.collective + latency + max(within / inside.bandwidth, outside / between.bandwidth)

    def to_next(self, size: float) -> float:
        """Seconds in which every rank sends `size` bytes to the next one of the group."""
        if self.size == 1:
            return 0.0
        link = self.machine.between if self.nodes > 1 else self.machine.inside
        return self.machine.collective + link.latency + size / link.bandwidth

    def _ring(self, size: float, rounds: int) -> float:
        """Each rank sends (n - 1) / n of the tensor a round. As many rings as ranks on a node share its rails."""
        if self.size == 1:
            return 0.0
        inside, between = self.machine.inside, self.machine.between
        share = (self.size - 1) / self.size
        seconds = share * size / inside.bandwidth if self.in_node > 1 else 0.0
        latency = (self.size - 1) * inside.latency
        if self.nodes > 1:
            seconds = max(seconds, share * size / (between.bandwidth * self.in_node))
            latency = (self.nodes - 1) * between.latency + (self.in_node - 1) * inside.latency
        return self.machine.collective + rounds * (latency + seconds)
