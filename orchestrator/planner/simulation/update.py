"""The optimizer state of a rank, and the seconds of an update.

An update is bound by memory: seconds = parameters x bytes per parameter / bandwidth. Muon also makes each matrix
orthogonal by products with itself (Jordan et al., 2024), which cost as much as about a thousand tokens of a step. Its
matrices are distributed over the replicas, as `parallel.full_matrices` does.
"""

from __future__ import annotations

import math
from functools import lru_cache

from orchestrator.optim.kinds import ADAMW, BLOCK, OptimizerKind, Slot, kind_of
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.device import Machine
from orchestrator.planner.simulation.collectives import Group
from orchestrator.planner.simulation.operators import OPERATIONS, Program

HOST_MEMORY = 5e10
"""Bandwidth of a host's memory in bytes/s: a cautious guess."""
ADAPTER_SHARE = 0.5
"""A model of which a smaller share is trained is taken for one with adapters or frozen embeddings."""
ITERATIONS = 5
"""Newton-Schulz iterations in one Muon step."""


def kept_numbers(optimizer: str, shape: ModelShape) -> float:
    """Return the mean optimizer state in fp32 numbers per trained parameter; a user's optimizer counts as AdamW.

    Args:
        optimizer: its name.
        shape: the sizes of the model.
    """
    kind = kind_of(optimizer)
    numbers = sum(_numbers(slot) for slot in kind.slots)
    if kind.needs_every_rank:
        numbers += _adamw_share(kind, shape) * (len(ADAMW.slots) - numbers)
    return numbers


def _numbers(slot: Slot) -> float:
    """Return the memory of a state tensor in fp32 numbers per parameter."""
    if slot.is_code:
        return 0.25
    return 1.0 / BLOCK if slot.is_scale else 1.0


def update_seconds(
    shape: ModelShape, layout: Layout, machine: Machine, program: Program, parameters: float
) -> float:
    """Return the seconds in which a rank updates its `parameters` trained parameters.

    seconds = parameters x bytes per parameter / (memory bandwidth x share that the optimizer reaches), and for Muon the
    orthogonalisation with its communication.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        machine: one worker.
        program: names the optimizer.
        parameters: trained parameters that this rank updates.
    """
    kind = kind_of(program.optimizer)
    bytes_per_parameter = kind.bytes_per_parameter
    if kind.needs_every_rank:
        bytes_per_parameter += _adamw_share(kind, shape) * (ADAMW.bytes_per_parameter - bytes_per_parameter)
    seconds = parameters * bytes_per_parameter / (machine.memory_bandwidth * machine.optimizer_share)
    if not kind.matrices_only:
        return seconds
    degrees = (layout.pp, layout.tp, layout.ep, layout.replicas, layout.zero)
    return seconds + shape.trained_share * _orthogonal_seconds(shape, machine, program, degrees)


def host_seconds(layout: Layout, parameters: float, micro_batches: int, machine: Machine) -> float:
    """Return the seconds that offload adds to a step (Ren et al., 2021).

    seconds = (2 + loads) x s / host link + 7 s / host memory, with s = 4 bytes x parameters. Gradients go to the host
    and weights come back (2). Adam on the host reads four numbers and writes three (7). Offloaded weights are loaded
    for the forward and the backward pass of every micro-batch (loads).

    Args:
        layout: says what is offloaded.
        parameters: parameters that this rank keeps.
        micro_batches: micro-batches of the step.
        machine: gives the bandwidth between device and host.
    """
    if layout.offload == "none":
        return 0.0
    # fp32 in both directions: weights, gradients and moments are all in fp32 on the host.
    state_bytes = 4.0 * parameters
    loads = 2 * micro_batches if layout.offload == "parameters" else 0
    return (2 + loads) * state_bytes / machine.host_bandwidth + 7 * state_bytes / HOST_MEMORY


def _adamw_share(kind: OptimizerKind, shape: ModelShape) -> float:
    """Return the share of the trained parameters that AdamW updates beside such an optimizer: the embeddings, and for
    Muon also the table of a head. Adapters train neither.
    """
    if shape.trained_share < ADAPTER_SHARE:
        return 0.0
    if kind.in_8_bits and shape.embedded is not None:
        tables = shape.embedded
    else:
        tables = shape.table * (1 if shape.tied or kind.in_8_bits else 2)
    return min(tables / max(shape.parameters, 1), 1.0)


@lru_cache(maxsize=4096)
def _orthogonal_seconds(
    shape: ModelShape, machine: Machine, program: Program, degrees: tuple[int, int, int, int, int]
) -> float:
    """Return the seconds in which the replicas orthogonalise the matrices of a pipeline rank's layers.

    They gather the matrices, each works on one at a time, and the results go to all. One Newton-Schulz iteration on X
    [least, most] computes A = X X^T [least, least], A A [least, least], and a polynomial of these times X
    [least, most]. `degrees` is (pp, tp, ep, replicas, zero) of the layout.
    """
    pp, tp, ep, replicas, zero = degrees
    total = 0.0
    for rows, columns, stack, count in _matrices(shape, ep):
        # `orthogonal` transposes tall matrices, so the gram matrix is always of the shorter side.
        smaller, larger = sorted((rows, columns))
        # Rows, columns and inner size of the three products.
        products = ((smaller, smaller, larger), (smaller, smaller, smaller), (smaller, larger, smaller))
        matrix_seconds = sum(
            machine.matrix(a, b, inner, program.width, stack * ITERATIONS) for a, b, inner in products
        )
        matrix_seconds = machine.launched(matrix_seconds, OPERATIONS)
        number = count * shape.layers / pp  # of such matrices, or stacks, on a pipeline rank
        size = 4.0 * rows * columns * stack  # bytes in fp32
        sharing_ranks = replicas // ep if stack > 1 else replicas
        group = Group(sharing_ranks, tp * (ep if stack > 1 else 1), machine)
        # A round has one matrix for each replica; the last round may leave some idle.
        rounds = math.ceil(number / sharing_ranks)
        # With ZeRO the gradients are gathered first; the results are gathered in any case.
        sent = (2 if zero else 1) * number * group.gather(size) / (tp if tp > 1 else 1)
        sent += rounds * Group(tp, 1, machine).all_reduce(size)
        total += rounds * matrix_seconds + sent
    return total


def _matrices(shape: ModelShape, ep: int) -> list[tuple[float, float, float, float]]:
    """Return (rows, columns, matrices in a stack, stacks in a layer) of a mean layer's matrices on a rank.

    The mean is over all layers: a kind that only `share` of the layers has counts as that share.
    """
    hidden = float(shape.hidden)
    share = shape.expert_layers / shape.layers if shape.layers else 0.0
    query = float(shape.heads * shape.head_size)
    keys = float(shape.kv_heads * shape.head_size)
    halves = 3.0 if shape.gated else 2.0
    matrices = [(query, hidden, 1.0, 2.0), (keys, hidden, 1.0, 2.0)]  # query and output, key and value
    if share < 1.0:
        matrices.append((float(shape.feedforward), hidden, 1.0, halves * (1.0 - share)))
    if share:
        columns = float(shape.expert_feedforward)
        # A rank orthogonalises only its own experts' matrices, as one batched product.
        matrices.append((columns, hidden, shape.experts / ep, halves * share))
        matrices.append((columns, hidden, 1.0, halves * share * shape.shared_experts))
    return [entry for entry in matrices if entry[3]]
