"""The update of the weights: what an optimiser keeps for it, and its seconds.

Muon makes each matrix orthogonal by products of it with itself (Jordan et al., 2024), which cost as much as some
thousand tokens of a step; its matrices are dealt out over the replicas, as `parallel.full_matrices` does.
"""

from __future__ import annotations

import math
from functools import lru_cache

from orchestrator.optim.kinds import ADAMW, kind_of
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.device import Machine
from orchestrator.planner.simulation.collectives import Group
from orchestrator.planner.simulation.operators import OPERATIONS, Program

HOST_MEMORY = 5e10
"""Bytes per second of a host's memory: a cautious guess."""
ITERATIONS = 5
"""Of Newton and Schulz in a step of Muon."""


def kept_numbers(optimizer: str, shape: ModelShape) -> float:
    """Numbers of optimiser state for each trained parameter, in the mean; an own optimiser is taken for AdamW."""
    kind = kind_of(optimizer)
    kept = float(len(kind.slots))
    if kind.matrices_only:
        kept += _rest(shape) * (len(ADAMW.slots) - kept)
    return kept


def update_seconds(
    shape: ModelShape, layout: Layout, machine: Machine, program: Program, own: float
) -> float:
    """Seconds in which a rank updates its `own` trained parameters, with what Muon sends for it."""
    kind = kind_of(program.optimizer)
    passed = kind.bytes_per_parameter
    if kind.matrices_only:
        passed += _rest(shape) * (ADAMW.bytes_per_parameter - passed)
    seconds = own * passed / (machine.memory_bandwidth * machine.optimizer_share)
    if not kind.matrices_only:
        return seconds
    where = (layout.pp, layout.tp, layout.ep, layout.replicas, layout.zero)
    return seconds + shape.trained_share * _orthogonal(shape, machine, program, where)


def host_seconds(layout: Layout, parameters: float, parts: int, machine: Machine) -> float:
    """What offload adds to a step, for the `parameters` that a rank keeps and `parts` micro-batches: gradients to the
    host, Adam there (reads four numbers of a parameter and writes three), weights back; offloaded weights come for
    every forward and backward pass (Ren et al., 2021)."""
    if layout.offload == "none":
        return 0.0
    part = 4.0 * parameters
    recomputed = 2 * parts if layout.offload == "parameters" else 0
    return (2 + recomputed) * part / machine.host_bandwidth + 7 * part / HOST_MEMORY


def _rest(shape: ModelShape) -> float:
    """Share of the parameters that are in no layer."""
    tables = shape.table * (1 if shape.tied else 2)
    return min(tables / max(shape.parameters, 1), 1.0)


@lru_cache(maxsize=4096)
def _orthogonal(
    shape: ModelShape, machine: Machine, program: Program, where: tuple[int, int, int, int, int]
) -> float:
    """Seconds in which the replicas bring the matrices of a pipeline rank's layers together, work on one each at a
    time, and send them to all. `where` is (pp, tp, ep, replicas, zero) of the layout."""
    pp, tp, ep, replicas, zero = where
    found = 0.0
    for rows, columns, stack, count in _matrices(shape, ep):
        least, most = sorted((rows, columns))
        products = ((least, least, most), (least, least, least), (least, most, least))
        each = sum(machine.matrix(a, b, inner, program.width, stack * ITERATIONS) for a, b, inner in products)
        each = machine.launched(each, OPERATIONS)
        number, size = count * shape.layers / pp, 4.0 * rows * columns * stack
        among = replicas // ep if stack > 1 else replicas
        group = Group(among, tp * (ep if stack > 1 else 1), machine)
        rounds = math.ceil(number / among)
        sent = (2 if zero else 1) * number * group.gather(size) / (tp if tp > 1 else 1)
        sent += rounds * Group(tp, 1, machine).all_reduce(size)
        found += rounds * each + sent
    return found


def _matrices(shape: ModelShape, ep: int) -> list[tuple[float, float, float, float]]:
    """(rows, columns, how many in a stack, stacks a layer) of the matrices of a mean layer, of experts those of a
    rank."""
    hidden, share = float(shape.hidden), shape.expert_layers / shape.layers if shape.layers else 0.0
    query, keys = float(shape.heads * shape.head_size), float(shape.kv_heads * shape.head_size)
    halves = 3.0 if shape.gated else 2.0
    found = [(query, hidden, 1.0, 2.0), (keys, hidden, 1.0, 2.0)]
    if share < 1.0:
        found.append((float(shape.feedforward), hidden, 1.0, halves * (1.0 - share)))
    if share:
        columns = float(shape.expert_feedforward)
        found.append((columns, hidden, shape.experts / ep, halves * share))
        found.append((columns, hidden, 1.0, halves * share * shape.shared_experts))
    return [each for each in found if each[3]]
