"""Seconds of collectives over one or several nodes, by the ring and tree algorithms.

A message of s bytes takes latency + s / bandwidth (Thakur, Rabenseifner and Gropp, 2005). With n ranks, latency l and
bandwidth b (bytes/s a rank), and besides the constant cost of a collective:

    all-gather, reduce-scatter   (n - 1) l + (n - 1)/n x s / b
    all-reduce by ring           2 (n - 1) l + 2 (n - 1)/n x s / b
    all-reduce by tree           2 log2(n) l + 2 s / b
    all-to-all                   l + (n - 1)/n x s / b

s is the whole tensor; for the all-to-all, what one rank sends. `Group` says which links of several nodes count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.planner.device import Machine


@dataclass(frozen=True)
class Group:
    """A communication group, with the seconds of its collectives.

    Attributes:
        size: number of ranks.
        stride: distance between their numbers. Ranks fill nodes in order, so it says which of them share a node.
        machine: one worker, with its links within a node and between nodes.
    """

    size: int
    stride: int
    machine: Machine

    @property
    def in_node(self) -> int:
        """The number of the group's ranks on one node, in the worst of all groups of this kind.

        If groups would fit in a node but do not divide it, some span two nodes, and the step waits for them. The worst
        of those has a single rank on one node.
        """
        span = self.size * self.stride
        per_node = self.machine.per_node
        # As tp 3 on nodes of 8: ranks 6, 7 and 8 lie on two nodes.
        if span < per_node and per_node % span:
            return 1
        return max(1, min(self.size, per_node // self.stride))

    @property
    def nodes(self) -> int:
        """The number of nodes that the group spans."""
        return math.ceil(self.size / self.in_node)

    def gather(self, size: float) -> float:
        """Return the seconds of an all-gather whose result has `size` bytes: one round of the ring."""
        return self._ring(size, 1)

    def scatter(self, size: float) -> float:
        """Return the seconds of a reduce-scatter of a tensor of `size` bytes: one round of the ring.

        gloo, on CPUs, all-reduces the whole tensor and keeps a part of it.
        """
        # Without NCCL a sharded gradient costs as much as a replicated one.
        return self._ring(size, 1) if self.machine.launches_ahead else self.all_reduce(size)

    def all_reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce of `size` bytes: the faster of ring and tree."""
        if self.size == 1:
            return 0.0
        inside = self.machine.inside
        between = self.machine.between
        # Up the tree and down again: log2(nodes) messages between nodes each way.
        hops = math.ceil(math.log2(self.nodes)) if self.nodes > 1 else 0
        # Within a node NCCL's tree is a chain. Small packets follow each other along it, which halves its latency.
        steps = (self.in_node - 1) / 2 if self.machine.launches_ahead else math.ceil(math.log2(self.in_node))
        latency = self.machine.collective + 2.0 * (hops * between.latency + steps * inside.latency)
        carried = 2.0 * size / (between.bandwidth * self.in_node if self.nodes > 1 else inside.bandwidth)
        return min(self._ring(size, 2), latency + carried)

    def all_to_all(self, size: float) -> float:
        """Return the seconds of an all-to-all in which each rank sends `size` bytes, in equal parts to all ranks.

        Messages within a node and between nodes use different links at the same time, so the slower kind counts.
        """
        if self.size == 1:
            return 0.0
        # A rank keeps 1 / n of its bytes and sends the others in equal parts, so only the peers' places matter.
        outside = size * (self.size - self.in_node) / self.size
        within = size * (self.in_node - 1) / self.size
        inside = self.machine.inside
        between = self.machine.between
        latency = max(inside.latency, between.latency if self.nodes > 1 else 0.0)
        return self.machine.collective + latency + max(within / inside.bandwidth, outside / between.bandwidth)

    def to_next(self, size: float) -> float:
        """Return the seconds in which every rank sends `size` bytes to the next rank: latency + size / bandwidth."""
        if self.size == 1:
            return 0.0
        link = self.machine.between if self.nodes > 1 else self.machine.inside
        return self.machine.collective + link.latency + size / link.bandwidth

    def _ring(self, size: float, rounds: int) -> float:
        """Return collective + rounds x (latency + (n - 1)/n x size / bandwidth) seconds, n = ranks.

        Over several nodes a ring passes each node once. As many rings as the group has ranks on a node run at once,
        each over the network card of one rank, so that their bandwidths add up. The slower kind of link counts.
        """
        if self.size == 1:
            return 0.0
        inside = self.machine.inside
        between = self.machine.between
        share = (self.size - 1) / self.size
        seconds = share * size / inside.bandwidth if self.in_node > 1 else 0.0
        # n - 1 hops: each part passes every other rank once a round.
        latency = (self.size - 1) * inside.latency
        if self.nodes > 1:
            seconds = max(seconds, share * size / (between.bandwidth * self.in_node))
            latency = (self.nodes - 1) * between.latency + (self.in_node - 1) * inside.latency
        return self.machine.collective + rounds * (latency + seconds)
