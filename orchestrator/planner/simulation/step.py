"""The seconds of a step under a layout, by part.

step = compute + exposed communication + bubble + optimizer + host + data + own + stragglers (see `StepTime`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from orchestrator.parallel.cuts import layers_by_rank
from orchestrator.parallel.layout import Layout, ModelShape, bucket_bytes
from orchestrator.planner.device import Machine
from orchestrator.planner.simulation.collectives import Group
from orchestrator.planner.simulation.operators import (
    CHECKPOINT,
    OPERATIONS,
    Program,
    Times,
    ends,
    layer,
    operations,
    with_length,
)
from orchestrator.planner.simulation.timeline import SimulatedStep, action_sequence, simulate_actions
from orchestrator.planner.simulation.update import host_seconds, kept_numbers, update_seconds

CONTENTION = 0.4
"""Share of hidden traffic by which a GPU's step is longer: collectives occupy multiprocessors and memory bandwidth, and
sometimes arrive late. Pairs of published steps that differ in traffic alone give 0.5 to 0.6 (tests/fsdp_steps.py: MPT
70b with micro-batches of 2 and 8, Llama 3 7B on one to eight nodes); 0.4 fits all of them best."""
FSDP_GATHER, FSDP_SCATTER = 3.0, 4.0
"""How often FSDP2 reads or writes a tensor's bytes besides a message. All-gather: a shard is copied in and the whole
tensor out. Reduce-scatter: whole gradients are copied in, and divided."""


def data_parallel(
    layout: Layout,
    parameters: float,
    trained: float,
    experts: float,
    micro_batches: int,
    machine: Machine,
    program: Program,
    forward: float,
    backward: float,
    units: int,
    max_overlap: int,
) -> float:
    """Return the seconds that data-parallel traffic adds to a step (Rajbhandari et al., 2020, section 7).

    With G bytes of gradients and W of weights, for m micro-batches:

        ZeRO 0   all-reduce G, once, behind the last backward pass
        ZeRO 1   reduce-scatter G once, and all-gather W after the update
        ZeRO 2   reduce-scatter G for each micro-batch, all-gather W once
        ZeRO 3   reduce-scatter G and twice all-gather W for each micro-batch
        HSDP     and all-reduce the shards' gradients over copies, once

    A pipeline under ZeRO 2 and 3 gathers and scatters once, because torch's schedules keep both tensors whole until
    the last micro-batch. Computation hides a part of the traffic, but never the last bucket, see `_exposed_seconds`.

    Args:
        layout: how the ranks divide the work.
        parameters: parameters of this rank, before ZeRO.
        trained: those that are trained.
        experts: share of `parameters` that belongs to experts, which fewer ranks hold under expert parallelism.
        micro_batches: micro-batches m.
        machine: the worker.
        program: widths of weights and gradients.
        forward: seconds of a forward pass that may hide traffic.
        backward: seconds of a backward pass that may hide traffic.
        units: layers that FSDP2 gathers and scatters one at a time, each with a latency.
        max_overlap: maximum number of buckets under ZeRO 0 and 1.
    """
    if layout.replicas == 1:
        return 0.0
    gradients = program.gradient_width * trained  # bytes
    weights = program.gather_width * parameters  # bytes
    if layout.zero < 2:
        sent = last = gather_back = 0.0
        for share, group in _sharing_groups(layout, experts, layout.replicas, machine):
            gradient_bytes = share * gradients
            # As `GradientBuckets` cuts them: the last bucket starts when the backward pass ends, so its time is always
            # exposed.
            limit = bucket_bytes(group.size)
            bucket = min(limit, gradient_bytes)
            count = max(min(gradient_bytes / limit, max_overlap), 1.0)
            collective = group.all_reduce if layout.zero == 0 else group.scatter
            sent += count * collective(gradient_bytes / count)
            last = max(last, collective(bucket))
            if layout.zero == 1:
                gather_back += count * group.gather(share * program.gather_width * trained / count)
        return _exposed_seconds(sent, backward, last) + gather_back
    groups = _sharing_groups(layout, experts, layout.sharded, machine)
    # The bytes as one message, and the latencies of the other units.
    # Bandwidth counts once for all bytes, latency once for each layer's own message.
    scatter = sum(g.scatter(share * gradients) + (units - 1) * g.scatter(0.0) for share, g in groups)
    gather = sum(g.gather(share * weights) + (units - 1) * g.gather(0.0) for share, g in groups)
    last = groups[0][1].scatter(min(bucket_bytes(layout.sharded), gradients))
    if not machine.launches_ahead:  # on a CPU the cores that compute also copy
        wrapped = 1.0 - experts if layout.ep == layout.replicas else 1.0
        gather += machine.elements(FSDP_GATHER * wrapped * weights)
        scatter += machine.elements(FSDP_SCATTER * wrapped * gradients)
    # ZeRO 3 gathers a second time in the backward pass, since weights are freed after the forward pass.
    gathers = 2.0 * gather if layout.zero == 3 and layout.pp == 1 else gather
    copies = Group(layout.replicas // layout.sharded, layout.tp * layout.sharded, machine)
    # Copies exchange only the shard that each rank keeps after its reduce-scatter.
    shard_share = sum(share / group.size for share, group in groups)
    copies_sum = copies.all_reduce(gradients * shard_share) if copies.size > 1 else 0.0
    earlier_batches = 0 if layout.pp > 1 else micro_batches - 1
    traffic = scatter + (gathers if layout.zero == 3 else 0.0)
    hidden = forward + backward
    return earlier_batches * _exposed_seconds(traffic, hidden, last) + _exposed_seconds(
        scatter + gathers + copies_sum, hidden, last
    )


def _sharing_groups(
    layout: Layout, experts: float, ranks: int, machine: Machine
) -> list[tuple[float, Group]]:
    """Return the shares of a rank's parameters with the groups that hold the same ones, among `ranks` replicas.

    All replicas hold the same dense parameters; 1 / ep of them hold the same experts.
    """
    if layout.ep == 1 or not experts:
        return [(1.0, Group(ranks, layout.tp, machine))]
    expert_group = Group(max(ranks // layout.ep, 1), layout.tp * layout.ep, machine)
    return [(1.0 - experts, Group(ranks, layout.tp, machine)), (experts, expert_group)]


def _exposed_seconds(sent: float, hiding: float, last: float) -> float:
    """Return the seconds that traffic adds to a step: exposed + CONTENTION x hidden.

    exposed = max(sent - hiding, last) and hidden = sent - exposed.

    Args:
        sent: seconds of traffic.
        hiding: seconds of computation that can hide it.
        last: seconds of the last message, which nothing hides.
    """
    exposed = max(sent - hiding, last)
    return exposed + CONTENTION * max(sent - exposed, 0.0)


MAX_SUMMED_RANKS = 32
"""Ranks up to which the harmonic number is summed; beyond, its asymptotic series is as exact."""


@lru_cache(maxsize=4096)
def mean_last_delay(ranks: int) -> float:
    """Return the mean delay of the last of n ranks, in mean delays of one: H(n) = sum of 1/k for k = 1 .. n.

    It is the mean of the maximum of n exponential variables.
    """
    if ranks <= MAX_SUMMED_RANKS:
        return sum(1.0 / n for n in range(1, ranks + 1))
    return math.log(ranks) + 0.5772156649015329 + 1.0 / (2 * ranks) - 1.0 / (12 * ranks**2)


def quantile_last_delay(ranks: int, share: float) -> float:
    """Return the delay of the last rank that a `share` of steps stay below, in mean delays of one rank.

    It is the quantile -ln(1 - share^(1/n)) of the maximum of n exponential variables.

    Args:
        ranks: number of ranks.
        share: of the steps.
    """
    return -math.log1p(-(share ** (1.0 / ranks)))


GRADIENT_SUM_BYTES = 12.0
"""Bytes to add an fp32 gradient to another: two numbers are read and one is written."""
WRAPPED_OPERATIONS = 100.0
"""Time of FSDP2 to gather a layer twice, free it and scatter its gradients, in launches; messages come on top."""
STEP_SECONDS = 6e-4
"""Fixed seconds of a process to start a step and its update: measured on a Zen 5."""
MATRICES, GATED_MATRICES = 4, 7
"""Matrices of a layer, without and with a gated feed-forward block: a bucket has at least one."""
NOT_SIMULATED: Mapping[str, Any] = MappingProxyType(
    {"zero": 0, "shard": 0, "engine": "torch", "offload": "none"}
)
"""Properties of a layout that its pipeline's passes do not depend on: layouts that differ in these share a result."""
MAX_ROUNDS = 3
"""A pipeline is simulated for at most this many micro-batches per rank. Each further round of p micro-batches takes as
long as the last simulated one, but no less than the slowest rank works."""
DEEPSPEED_SLOWDOWN = {1: 1.10, 2: 1.06, 3: 1.12}
"""CPU time of a DeepSpeed step relative to a step of the torch engine, by ZeRO stage, as measured by
`tests/bench/bench_deepspeed.py`."""


@dataclass(frozen=True)
class StepTime:
    """Mean seconds of a step by part, on its slowest rank.

    Attributes:
        compute: forward and backward passes.
        communication: communication that no computation hides.
        bubble: time that the slowest rank of a pipeline waits for others.
        optimizer: the update of the weights.
        host: transfers of offloaded state, and its update on the host.
        data: waiting for batches, which are read ahead.
        commit: copying the state for a commit, spread over the steps between two commits; not part of `seconds`.
        own: what the user's own cost adds.
        stragglers: mean delay of the last rank beyond that of a mean rank, see `mean_last_delay`.
    """

    compute: float
    communication: float
    bubble: float
    optimizer: float
    host: float = 0.0
    data: float = 0.0
    commit: float = 0.0
    own: float = 0.0
    stragglers: float = 0.0

    @property
    def seconds(self) -> float:
        """All parts except the commit, as a run measures its steps."""
        total = self.compute + self.communication + self.bubble + self.optimizer + self.host + self.data
        return total + self.own + self.stragglers

    def to_json(self) -> dict[str, float]:
        """The parts as plain data."""
        return dataclasses.asdict(self)


def step_seconds_quantile(time: StepTime, ranks: int, machine: Machine, share: float) -> float:
    """Return the seconds that a `share` of the steps of `ranks` ranks stay below, given their mean `time`.

    Args:
        time: the mean step.
        ranks: number of ranks.
        machine: one worker.
        share: of the steps.
    """
    delay = (time.compute + time.optimizer) * machine.delay / (1.0 + machine.delay)
    return time.seconds + delay * (quantile_last_delay(ranks, share) - mean_last_delay(ranks))


def layer_part(layout: Layout) -> tuple[int, ...]:
    """Return what the time of a layer depends on: (sequences, tp, cp, ep, sequence parallelism as 0 or 1)."""
    return (layout.micro_batch, layout.tp, layout.cp, layout.ep, int(layout.sequence))


def step_time(
    shape: ModelShape, layout: Layout, global_batch: int, machine: Machine, program: Program
) -> StepTime:
    """Return the seconds of a step of `global_batch` sequences.

    Without a pipeline compute is micro-batches x (layers x layer + embedding + head). A pipeline is simulated; the work
    of its busiest rank counts as compute and communication, and the rest of the time as bubble.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        global_batch: samples of a step.
        machine: one worker.
        program: how the engine computes.
    """
    machine = machine.among(layout.world)
    micro_batches = max(layout.accumulation(global_batch), 1)
    shape = in_mean_rows(shape, layout)
    inner = inner_layer(shape, layout, machine, program)
    if layout.pp == 1:
        first, head = ends(shape, machine, program, layer_part(layout))
        compute = micro_batches * (shape.layers * inner.compute + first.compute + head.compute)
        # Each further micro-batch adds its gradients to those of the first, which are only written.
        compute += (micro_batches - 1) * _gradient_sum_seconds(shape, layout, machine)
        sent = micro_batches * (shape.layers * inner.sent + first.sent + head.sent)
        return with_update(
            shape,
            layout,
            micro_batches=micro_batches,
            machine=machine,
            program=program,
            passes=(compute, sent, 0.0),
        )
    simulated = _cached_pipeline(shape, layout.but(**NOT_SIMULATED), micro_batches, machine, program)
    sent = micro_batches * max(layers_by_rank(shape.layers, layout)) * inner.sent
    busy = max(simulated.busy)
    stages = layout.stages_of(simulated.busy.index(busy))
    handover = 2.0 * micro_batches * sum(_handover_seconds(layout, machine, stage) for stage in stages)
    passes = (busy - sent - handover, sent, simulated.seconds - busy + handover)
    return with_update(
        shape, layout, micro_batches=micro_batches, machine=machine, program=program, passes=passes
    )


def mean_row(shape: ModelShape, layout: Layout, rows: int | None = None) -> float:
    """Return the mean tokens of the rows that training computes. A pipeline's rows have the full length.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        rows: rows of a micro-batch; None for those of the layout.
    """
    rows = layout.micro_batch if rows is None else rows
    known = [tokens for count, tokens in shape.row_tokens if count <= rows]
    return known[-1] if known and layout.pp == 1 else float(shape.sequence_length)


def in_mean_rows(shape: ModelShape, layout: Layout, rows: int | None = None) -> ModelShape:
    """Return the shape with the mean length of the rows that training computes. The arguments are those of
    `mean_row`.

    Args:
        shape, layout, rows: see there.
    """
    if not shape.row_tokens:
        return shape
    return _with_rows_of(shape, max(round(mean_row(shape, layout, rows)), 1))


@lru_cache(maxsize=256)
def _with_rows_of(shape: ModelShape, tokens: int) -> ModelShape:
    teacher = shape.teacher and with_length(shape.teacher, tokens)
    return dataclasses.replace(with_length(shape, tokens), teacher=teacher, row_tokens=())


def with_update(
    shape: ModelShape,
    layout: Layout,
    micro_batches: int,
    machine: Machine,
    program: Program,
    passes: tuple[float, float, float],
) -> StepTime:
    """Return the step whose `passes` take (compute, communication, bubble) seconds, with all that follows them.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        micro_batches: micro-batches of a rank in a step.
        machine: one worker, among the others of its node.
        program: how the engine computes.
        passes: seconds of compute, of communication and of the bubble.
    """
    compute, sent, bubble = passes
    compute = max(compute, _launch_seconds(shape, layout, micro_batches, machine, program) - sent)
    inner = inner_layer(shape, layout, machine, program)
    # On a CPU the cores that compute also move the messages, so computation hides none.
    # In a pipeline gradients are reduced after the last micro-batch, when no computation is left to hide them.
    hides = layout.pp == 1 and machine.launches_ahead
    backward = shape.layers * (inner.inputs + inner.weights + inner.recompute) if hides else 0.0
    parameters = local_parameters(shape, layout)
    trained = shape.trained_share * parameters
    units = shape.layers // layout.pp + 1
    forward = shape.layers * inner.forward if hides else 0.0
    max_buckets = units * (GATED_MATRICES if shape.gated else MATRICES)
    sent += data_parallel(
        layout=layout,
        parameters=parameters,
        trained=trained,
        experts=_expert_share(shape, layout),
        micro_batches=micro_batches,
        machine=machine,
        program=program,
        forward=forward,
        backward=backward,
        units=units,
        max_overlap=max_buckets,
    )
    sent += _teacher_gathering(shape, layout, micro_batches, machine, program)
    sent += _collective_delays(
        layout, micro_batches, machine=machine, inner=inner, compute=compute, units=units
    )
    if shape.tied and layout.pipeline_rank_of(layout.stages - 1) != 0:
        # The first and the last stage both hold the tied embedding, and sum its gradients.
        weight = shape.table / layout.tp * program.gradient_width
        sent += Group(2, (layout.pp - 1) * layout.world // layout.pp, machine).all_reduce(weight)
    # The exchange of loss, norm and other metrics: a few numbers, so only its latency counts.
    sent += Group(layout.world, 1, machine).all_reduce(0.0)
    if layout.zero and not machine.launches_ahead:  # copying shards out of their layers and back
        sent += units * OPERATIONS * machine.launch
    shards = zero_shards(shape, layout, layout.sharded) if layout.zero else 1.0
    optimizer = STEP_SECONDS + update_seconds(shape, layout, machine, program, trained / shards)
    slowdown = DEEPSPEED_SLOWDOWN.get(layout.zero, 1.0) if layout.engine == "deepspeed" else 1.0
    compute = slowdown * compute
    # The CPU updates offloaded state, which `host_seconds` includes; counting both would charge it twice.
    optimizer = slowdown * optimizer if layout.offload == "none" else 0.0  # offloaded: part of `host`
    # `delay` is the mean of an exponential slowdown of one rank; all wait for the last, whose mean is H(n) times as
    # large.
    delayed = machine.delay * (compute + optimizer)
    saved = saved_bytes(shape, layout, program.optimizer) / machine.host_bandwidth
    return StepTime(
        compute=compute * (1.0 + machine.delay),
        communication=slowdown * sent,
        bubble=slowdown * bubble,
        optimizer=optimizer * (1.0 + machine.delay),
        host=host_seconds(layout, parameters / shards, micro_batches, machine),
        commit=saved / program.commit_every if program.commit_every else 0.0,
        stragglers=delayed * (mean_last_delay(layout.world) - 1.0),
    )


def _teacher_gathering(
    shape: ModelShape, layout: Layout, micro_batches: int, machine: Machine, program: Program
) -> float:
    """Return the seconds in which the ranks gather a teacher whose weights they divide, for each micro-batch.

    Its own forward pass hides them on a GPU. A pipeline gathers it once.
    """
    teacher = shape.running_teacher
    if teacher is None or layout.replicas == 1 or not (shape.teacher_sharded or layout.zero == 3):
        return 0.0
    size = program.gather_width * local_parameters(teacher, layout)
    units = teacher.layers // layout.pp + 1
    groups = _sharing_groups(layout, _expert_share(teacher, layout), layout.sharded, machine)
    sent = sum(g.gather(share * size) + (units - 1) * g.gather(0.0) for share, g in groups)
    hidden = 0.0
    if machine.launches_ahead:
        hidden = teacher.layers / layout.pp * inner_layer(teacher, layout, machine, program).forward
    else:  # on a CPU the cores that compute also copy
        sent += machine.elements(FSDP_GATHER * size)
    passes = 1 if layout.pp > 1 else micro_batches
    return passes * _exposed_seconds(sent, hidden, sent / units)


def _collective_delays(
    layout: Layout, micro_batches: int, machine: Machine, inner: Times, compute: float, units: int
) -> float:
    """Return by how many seconds data-parallel traffic is slower because it follows computation.

    See `Machine.collective_delay`.

    Under ZeRO 0 and 1 it follows a step's computation, under ZeRO 2 and 3 that of each of `units` layers, `inner`.
    """
    if layout.replicas == 1:
        return 0.0
    if layout.zero < 2:
        return machine.collective_delay(compute)
    passes = 1 if layout.pp > 1 else micro_batches
    backward_delay = machine.collective_delay(inner.inputs + inner.weights)
    if layout.zero == 2:
        return units * (machine.collective_delay(inner.forward) + passes * backward_delay)
    return units * passes * (machine.collective_delay(inner.forward) + 2.0 * backward_delay)


def _gradient_sum_seconds(shape: ModelShape, layout: Layout, machine: Machine) -> float:
    """Return the seconds to add a micro-batch's gradients to the earlier ones.

    seconds = GRADIENT_SUM_BYTES x trained parameters / bandwidth

    A GPU's profile includes this time in its fitted shares.
    """
    trained = shape.trained_share * local_parameters(shape, layout)
    return 0.0 if machine.launches_ahead else GRADIENT_SUM_BYTES * trained / machine.memory_bandwidth


def _handover_seconds(layout: Layout, machine: Machine, stage: int) -> float:
    """Return the seconds in which a CPU receives a pass's input from, and sends its output to, other ranks.

    A GPU computes meanwhile. Except for GPipe, torch's schedules send one pass's output together with receiving the
    next one's input, so a message costs half a wait.
    """
    if machine.launches_ahead:
        return 0.0
    waits_per_message = 1.0 if layout.schedule == "gpipe" else 0.5
    rank = layout.pipeline_rank_of(stage)
    neighbours = (stage - 1, stage + 1)
    neighbour_ranks = [
        layout.pipeline_rank_of(neighbour) for neighbour in neighbours if 0 <= neighbour < layout.stages
    ]
    return (
        waits_per_message
        * machine.message
        * sum(neighbour_rank != rank for neighbour_rank in neighbour_ranks)
    )


def _launch_seconds(
    shape: ModelShape, layout: Layout, micro_batches: int, machine: Machine, program: Program
) -> float:
    """Return the seconds in which the process launches all passes of FSDP2's layers; 0 without ZeRO 2 or 3.

    A step on a GPU takes at least that long.
    """
    if layout.zero < 2 or not machine.launches_ahead:
        return 0.0
    recomputed = recomputed_share(shape, layout)
    recomputed_fully = recomputed if layout.recompute == "full" else 0.0
    operations_per_layer = (3.0 + recomputed_fully) * operations(
        shape, machine, program, layout.tp, layout.ep
    ) + WRAPPED_OPERATIONS
    return (
        micro_batches
        * shape.layers
        / layout.pp
        * (operations_per_layer * machine.launch + recomputed * CHECKPOINT)
    )


def local_parameters(shape: ModelShape, layout: Layout) -> float:
    """Return the parameters of a rank before ZeRO, mean over stages: (dense + experts / ep) / (tp x pp).

    Args:
        shape: the sizes of the model.
        layout: the layout.
    """
    experts = shape.expert_share * shape.parameters
    return (shape.parameters - experts + experts / layout.ep) / (layout.tp * layout.pp)


def zero_shards(shape: ModelShape, layout: Layout, ranks: int) -> float:
    """Return into how many parts ZeRO divides a rank's parameters.

    Only ranks / ep ranks hold the same experts: parts = 1 / ((1 - e) / ranks + e / max(ranks / ep, 1)), where e is the
    share of the rank's parameters that belongs to experts.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        ranks: ranks that divide the dense parameters.
    """
    experts = _expert_share(shape, layout)
    return 1.0 / ((1.0 - experts) / ranks + experts / max(ranks / layout.ep, 1.0))


def _expert_share(shape: ModelShape, layout: Layout) -> float:
    """Return the share of a rank's parameters, before ZeRO, that belongs to experts."""
    # Expert parallelism leaves a rank 1 / ep of the experts and all dense parameters: e / ep of e / ep + (1 - e).
    experts = shape.expert_share / layout.ep
    return experts / (1.0 - shape.expert_share + experts)


def saved_bytes(shape: ModelShape, layout: Layout, optimizer: str) -> float:
    """Return the bytes that a rank copies for a commit: its share of fp32 weights and optimizer state.

    The ranks that hold the same parameters divide them: 4 x (1 + numbers of state) x trained / ways.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        optimizer: its name.
    """
    trained = shape.trained_share * local_parameters(shape, layout)
    shards = zero_shards(shape, layout, layout.dp * layout.cp)
    return 4.0 * (1.0 + kept_numbers(optimizer, shape)) * trained / shards


@lru_cache(maxsize=256)
def _cached_pipeline(
    shape: ModelShape, layout: Layout, micro_batches: int, machine: Machine, program: Program
) -> SimulatedStep:
    return pipeline(shape, layout, micro_batches, machine, program)


def pipeline(
    shape: ModelShape,
    layout: Layout,
    micro_batches: int,
    machine: Machine,
    program: Program,
    keep: bool = False,
) -> SimulatedStep:
    """Simulate a pipeline's step of `micro_batches`. With `keep` its events are kept.

    A stage sends tokens x hidden x carried width bytes per micro-batch, divided by tp under sequence parallelism.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        micro_batches: micro-batches of a step.
        machine: one worker.
        program: how the engine computes.
        keep: whether to keep the events.
    """
    machine = machine.among(layout.world)
    stages = layout.stages
    simulated_batches = (
        micro_batches if keep else min(micro_batches, MAX_ROUNDS * layout.pp + micro_batches % layout.pp)
    )
    costs = _stage_times(shape, layout, machine, program)
    boundary = layout.world // layout.pp
    tokens = layout.micro_batch * shape.sequence_length / layout.cp
    size = tokens * shape.hidden * program.carried_width / (layout.tp if layout.sequence else 1)
    rank_of = {stage: layout.pipeline_rank_of(stage) for stage in range(stages)}
    gradient_sum = (
        (micro_batches - 1)
        / micro_batches
        * _gradient_sum_seconds(shape, layout, machine)
        * layout.pp
        / stages
    )

    def seconds(kind: str, stage: int) -> float:
        times = costs[stage]
        handover = _handover_seconds(layout, machine, stage)
        if kind == "F":
            return times.forward + times.sent_forward + handover
        input_seconds = times.inputs + times.recompute + times.sent_backward + handover
        weights = times.weights + gradient_sum
        return {"B": input_seconds + weights, "I": input_seconds, "W": weights}[kind]

    def sent(a: int, b: int) -> float:
        ends_at = sorted((rank_of[a] * boundary, rank_of[b] * boundary))
        crosses = ends_at[0] // machine.per_node != ends_at[1] // machine.per_node
        link = machine.between if crosses else machine.inside
        return machine.message + link.latency + size / link.bandwidth

    def simulate(count: int) -> SimulatedStep:
        sequence = action_sequence(layout.schedule, layout.pp, count, stages // layout.pp)
        return simulate_actions(sequence, seconds, sent, keep)

    simulated = simulate(simulated_batches)
    if simulated_batches == micro_batches:
        return simulated
    # Extrapolate: every further round of p micro-batches takes as long as the last simulated one.
    round_seconds = max(
        simulated.seconds - simulate(simulated_batches - layout.pp).seconds,
        layout.pp / simulated_batches * max(simulated.busy),
    )
    extrapolated = (micro_batches - simulated_batches) / layout.pp * round_seconds
    return SimulatedStep(
        seconds=simulated.seconds + extrapolated,
        busy=tuple(micro_batches / simulated_batches * busy_seconds for busy_seconds in simulated.busy),
        events=simulated.events,
    )


def inner_layer(shape: ModelShape, layout: Layout, machine: Machine, program: Program) -> Times:
    """Return the times of a rank's mean layer, if only some of its layers are recomputed.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        machine: one worker.
        program: how the engine computes.
    """
    recomputed = layer(shape, machine, program, layer_part(layout), layout.recompute)
    if not layout.recompute_layers:
        return recomputed
    share = recomputed_share(shape, layout)
    return recomputed.mixed(layer(shape, machine, program, layer_part(layout), "none"), share)


def recomputed_share(shape: ModelShape, layout: Layout) -> float:
    """Return the share of a rank's layers that the layout recomputes.

    Args:
        shape: the sizes of the model.
        layout: the layout.
    """
    if not layout.recompute_layers:
        return float(layout.recompute != "none")
    return min(layout.recompute_layers * layout.stages / max(shape.layers, 1), 1.0)


def busiest(shape: ModelShape, layout: Layout, machine: Machine, program: Program) -> float:
    """Return the seconds that the busiest rank computes and sends for a micro-batch.

    It is the rank with most layers, or the first with the embedding, or the one with the head.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        machine: one worker.
        program: how the engine computes.
    """
    inner = inner_layer(shape, layout, machine, program)
    first, head = ends(shape, machine, program, layer_part(layout))
    counts = layers_by_rank(shape.layers, layout)
    layer_seconds = inner.compute + inner.sent
    head_rank = layout.pipeline_rank_of(layout.stages - 1)  # the rank with the head
    head_seconds = head.compute + head.sent
    start = counts[0] * layer_seconds + first.compute + first.sent
    end = counts[head_rank] * layer_seconds + head_seconds
    return max(max(counts) * layer_seconds, start + head_seconds if head_rank == 0 else start, end)


def ends_in_layers(
    shape: ModelShape, layout: Layout, machine: Machine, program: Program
) -> tuple[float, float]:
    """Return the times of embedding and head in layers, rounded to a tenth.

    Args:
        shape: the sizes of the model.
        layout: the layout.
        machine: one worker.
        program: how the engine computes.
    """
    part = layer_part(layout)
    inner = layer(shape, machine, program, part, layout.recompute)
    layer_seconds = (inner.compute + inner.sent) or math.inf
    # A tenth of a layer moves no cut, and rounding lets more layouts share cached cuts.
    first, head = (
        round((end.compute + end.sent) / layer_seconds, 1) for end in ends(shape, machine, program, part)
    )
    return first, head


def _stage_times(shape: ModelShape, layout: Layout, machine: Machine, program: Program) -> list[Times]:
    inner = inner_layer(shape, layout, machine, program)
    first, head = ends(shape, machine, program, layer_part(layout))
    stages = []
    for stage in range(layout.stages):
        _, count = layout.layers_of(shape.layers, stage)
        components = [(count, inner)]
        components += [(1, first)] if stage == 0 else []
        components += [(1, head)] if stage == layout.stages - 1 else []
        names = [field.name for field in dataclasses.fields(Times)]
        stages.append(Times(**{name: sum(n * getattr(t, name) for n, t in components) for name in names}))
    return stages
