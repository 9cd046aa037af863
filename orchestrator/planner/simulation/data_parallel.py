"""Seconds that data-parallel traffic adds to a step: sums of gradients, and what ZeRO scatters and gathers."""

from __future__ import annotations

from orchestrator.parallel.layout import Layout, bucket_bytes
from orchestrator.planner.device import Machine
from orchestrator.planner.simulation.collectives import Group
from orchestrator.planner.simulation.operators import Program

CONTENTION = 0.4
"""Share of the seconds of traffic behind computation which that takes longer on a GPU: collectives take multiprocessors
and bandwidth of the memory, and are not always there when they are needed. Pairs of published steps that differ in
traffic alone say 0.5 to 0.6 (tests/fsdp_steps.py: MPT 70b with micro-batches of 2 and 8, Llama 3 7B on one to eight
nodes); 0.4 is best for all."""
FSDP_GATHER, FSDP_SCATTER = 3.0, 4.0
"""How often FSDP2 reads and writes bytes beside a message: a shard is copied into it and the whole out again; gradients
are copied into it whole, and divided."""


def data_parallel(
    layout: Layout,
    parameters: float,
    trained: float,
    experts: float,
    parts: int,
    machine: Machine,
    program: Program,
    forward: float,
    backward: float,
    units: int,
    most: int,
) -> float:
    """Seconds that data-parallel traffic adds, which computation hides in part, but for the last bucket; `forward` and
    `backward` are those of a pass that may. Under ZeRO 2 and 3 each of `units` layers is gathered and scattered by
    itself, otherwise buckets are, at most `most` so many, each with a latency of its own. `experts` is the share
    of the rank's `parameters` that belongs to experts, which under expert parallelism fewer ranks have.

    Gradients are summed once under ZeRO 0 and 1, behind the last backward pass where there is no pipeline; under 2 and
    3 they are scattered, and under 3 weights are gathered, for every micro-batch (Rajbhandari et al., 2020, section 7),
    under 2 once. A pipeline gathers and scatters once, since torch's keep both whole until the last micro-batch. Copies
    of what is sharded sum their gradients once.
    """
    if layout.replicas == 1:
        return 0.0
    gradients, weights = program.gradient_width * trained, program.gather_width * parameters
    if layout.zero < 2:
        sent = last = back = 0.0
        for share, group in _alike(layout, experts, layout.replicas, machine):
            part = share * gradients
            limit = bucket_bytes(group.size)
            bucket, count = min(limit, part), max(min(part / limit, most), 1.0)
            collective = group.all_reduce if layout.zero == 0 else group.scatter
            sent += count * collective(part / count)
            last = max(last, collective(bucket))
            if layout.zero == 1:
                back += count * group.gather(share * program.gather_width * trained / count)
        return _felt(sent, backward, last) + back
    of_copy = _alike(layout, experts, layout.sharded, machine)
    scatter = sum(g.scatter(share * gradients) + (units - 1) * g.scatter(0.0) for share, g in of_copy)
    gather = sum(g.gather(share * weights) + (units - 1) * g.gather(0.0) for share, g in of_copy)
    last = of_copy[0][1].scatter(min(bucket_bytes(layout.sharded), gradients))
    if not machine.launches_ahead:  # by the cores that compute
        wrapped = 1.0 - experts if layout.ep == layout.replicas else 1.0
        gather += machine.elements(FSDP_GATHER * wrapped * weights)
        scatter += machine.elements(FSDP_SCATTER * wrapped * gradients)
    again = 2.0 * gather if layout.zero == 3 and layout.pp == 1 else gather
    copies = Group(layout.replicas // layout.sharded, layout.tp * layout.sharded, machine)
    kept = sum(share / group.size for share, group in of_copy)
    summed = copies.all_reduce(gradients * kept) if copies.size > 1 else 0.0
    others = 0 if layout.pp > 1 else parts - 1
    other, hidden = scatter + (again if layout.zero == 3 else 0.0), forward + backward
    return others * _felt(other, hidden, last) + _felt(scatter + again + summed, hidden, last)


def _alike(layout: Layout, experts: float, ranks: int, machine: Machine) -> list[tuple[float, Group]]:
    """Shares of a rank's parameters and, of so many consecutive replicas, those that have the same: all of them, of the
    experts those that expert parallelism gives the same ones."""
    if layout.ep == 1 or not experts:
        return [(1.0, Group(ranks, layout.tp, machine))]
    same = Group(max(ranks // layout.ep, 1), layout.tp * layout.ep, machine)
    return [(1.0 - experts, Group(ranks, layout.tp, machine)), (experts, same)]


def _felt(sent: float, behind: float, last: float) -> float:
    """What a step takes longer for traffic of so many seconds `behind` computation, of which the `last` part never
    hides."""
    shown = max(sent - behind, last)
    return shown + CONTENTION * max(sent - shown, 0.0)
