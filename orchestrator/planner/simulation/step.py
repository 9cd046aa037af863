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
)
from orchestrator.planner.simulation.timeline import Played, play, scheduled
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
    parts: int,
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
    the last micro-batch. Computation hides a part of the traffic, but never the last bucket, see `_felt`.

    Args:
        layout: how the ranks divide the work.
        parameters: parameters of this rank, before ZeRO.
        trained: those that are trained.
        experts: share of `parameters` that belongs to experts, which fewer ranks hold under expert parallelism.
        parts: micro-batches m.
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
        sent = last = back = 0.0
        for share, group in _alike(layout, experts, layout.replicas, machine):
            part = share * gradients
            # As `GradientBuckets` cuts them: the last bucket starts when the backward pass ends, so its time is always
            # exposed.
            limit = bucket_bytes(group.size)
            bucket = min(limit, part)
            count = max(min(part / limit, max_overlap), 1.0)
            collective = group.all_reduce if layout.zero == 0 else group.scatter
            sent += count * collective(part / count)
            last = max(last, collective(bucket))
            if layout.zero == 1:
                back += count * group.gather(share * program.gather_width * trained / count)
        return _felt(sent, backward, last) + back
    of_copy = _alike(layout, experts, layout.sharded, machine)
    # The bytes as one message, and the latencies of the other units.
    # Bandwidth counts once for all bytes, latency once for each layer's own message.
    scatter = sum(g.scatter(share * gradients) + (units - 1) * g.scatter(0.0) for share, g in of_copy)
    gather = sum(g.gather(share * weights) + (units - 1) * g.gather(0.0) for share, g in of_copy)
    last = of_copy[0][1].scatter(min(bucket_bytes(layout.sharded), gradients))
    if not machine.launches_ahead:  # on a CPU the cores that compute also copy
        wrapped = 1.0 - experts if layout.ep == layout.replicas else 1.0
        gather += machine.elements(FSDP_GATHER * wrapped * weights)
        scatter += machine.elements(FSDP_SCATTER * wrapped * gradients)
    # ZeRO 3 gathers a second time in the backward pass, since weights are freed after the forward pass.
    again = 2.0 * gather if layout.zero == 3 and layout.pp == 1 else gather
    copies = Group(layout.replicas // layout.sharded, layout.tp * layout.sharded, machine)
    # Copies exchange only the shard that each rank keeps after its reduce-scatter.
    kept = sum(share / group.size for share, group in of_copy)
    summed = copies.all_reduce(gradients * kept) if copies.size > 1 else 0.0
    others = 0 if layout.pp > 1 else parts - 1
    other = scatter + (again if layout.zero == 3 else 0.0)
    hidden = forward + backward
    return others * _felt(other, hidden, last) + _felt(scatter + again + summed, hidden, last)


def _alike(layout: Layout, experts: float, ranks: int, machine: Machine) -> list[tuple[float, Group]]:
    """Return the shares of a rank's parameters with the groups that hold the same ones, among `ranks` replicas.

    All replicas hold the same dense parameters; 1 / ep of them hold the same experts.
    """
    if layout.ep == 1 or not experts:
        return [(1.0, Group(ranks, layout.tp, machine))]
    same = Group(max(ranks // layout.ep, 1), layout.tp * layout.ep, machine)
    return [(1.0 - experts, Group(ranks, layout.tp, machine)), (experts, same)]


def _felt(sent: float, behind: float, last: float) -> float:
    """Return the seconds that traffic adds to a step: exposed + CONTENTION x hidden.

    exposed = max(sent - behind, last) and hidden = sent - exposed.

    Args:
        sent: seconds of traffic.
        behind: seconds of computation that can hide it.
        last: seconds of the last message, which nothing hides.
    """
    exposed = max(sent - behind, last)
    return exposed + CONTENTION * max(sent - exposed, 0.0)


FEW = 32
"""Ranks up to which the harmonic number is summed; beyond, its asymptotic series is as exact."""


@lru_cache(maxsize=4096)
def last_of(ranks: int) -> float:
    """Return the mean delay of the last of n ranks, in mean delays of one: H(n) = sum of 1/k for k = 1 .. n.

    It is the mean of the maximum of n exponential variables.
    """
    if ranks <= FEW:
        return sum(1.0 / n for n in range(1, ranks + 1))
    return math.log(ranks) + 0.5772156649015329 + 1.0 / (2 * ranks) - 1.0 / (12 * ranks**2)


def latest_of(ranks: int, share: float) -> float:
    """Return the delay of the last rank that a `share` of steps stay below, in mean delays of one rank.

    It is the quantile -ln(1 - share^(1/n)) of the maximum of n exponential variables.
    """
    return -math.log1p(-(share ** (1.0 / ranks)))


ADDED = 12.0
"""Bytes to add an fp32 gradient to another: two numbers are read and one is written."""
WRAPPED_OPERATIONS = 100.0
"""Time of FSDP2 to gather a layer twice, free it and scatter its gradients, in launches; messages come on top."""
BEGINNING = 6e-4
"""Fixed seconds of a process to start a step and its update: measured on a Zen 5."""
MATRICES, GATED_MATRICES = 4, 7
"""Matrices of a layer, without and with a gated feed-forward block: a bucket has at least one."""
NOT_PLAYED: Mapping[str, Any] = MappingProxyType(
    {"zero": 0, "shard": 0, "engine": "torch", "offload": "none"}
)
"""Properties of a layout that its pipeline's passes do not depend on: layouts that differ in these share a result."""
ROUNDS = 3
"""A pipeline is simulated for at most this many micro-batches per rank. Each further round of p micro-batches takes as
long as the last simulated one, but no less than the slowest rank works."""
DEEPSPEED = {1: 1.10, 2: 1.06, 3: 1.12}
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
        stragglers: mean delay of the last rank beyond that of a mean rank, see `last_of`.
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


def in_share_of_steps(time: StepTime, ranks: int, machine: Machine, share: float) -> float:
    """Return the seconds that a `share` of the steps of `ranks` ranks stay below, given their mean `time`."""
    late = (time.compute + time.optimizer) * machine.delay / (1.0 + machine.delay)
    return time.seconds + late * (latest_of(ranks, share) - last_of(ranks))


def parts_of(layout: Layout) -> tuple[int, ...]:
    """Return what the time of a layer depends on: (sequences, tp, cp, ep, sequence parallelism as 0 or 1)."""
    return (layout.micro_batch, layout.tp, layout.cp, layout.ep, int(layout.sequence))


def step_time(
    shape: ModelShape, layout: Layout, global_batch: int, machine: Machine, program: Program
) -> StepTime:
    """Return the seconds of a step of `global_batch` sequences.

    Without a pipeline compute is micro-batches x (layers x layer + embedding + head). A pipeline is simulated; the work
    of its busiest rank counts as compute and communication, and the rest of the time as bubble.
    """
    machine = machine.among(layout.world)
    parts = max(layout.accumulation(global_batch), 1)
    inner = inner_layer(shape, layout, machine, program)
    if layout.pp == 1:
        first, head = ends(shape, machine, program, parts_of(layout))
        compute = parts * (shape.layers * inner.compute + first.compute + head.compute)
        # Each further micro-batch adds its gradients to those of the first, which are only written.
        compute += (parts - 1) * _added(shape, layout, machine)
        sent = parts * (shape.layers * inner.sent + first.sent + head.sent)
        return with_update(
            shape, layout, parts=parts, machine=machine, program=program, passes=(compute, sent, 0.0)
        )
    played = _played(shape, layout.but(**NOT_PLAYED), parts, machine, program)
    sent = parts * max(layers_by_rank(shape.layers, layout)) * inner.sent
    busy = max(played.busy)
    stages = layout.stages_of(played.busy.index(busy))
    waits = 2.0 * parts * sum(_handed(layout, machine, stage) for stage in stages)
    passes = (busy - sent - waits, sent, played.seconds - busy + waits)
    return with_update(shape, layout, parts=parts, machine=machine, program=program, passes=passes)


def with_update(
    shape: ModelShape,
    layout: Layout,
    parts: int,
    machine: Machine,
    program: Program,
    passes: tuple[float, float, float],
) -> StepTime:
    """Return the step whose `passes` take (compute, communication, bubble) seconds, with all that follows them."""
    compute, sent, bubble = passes
    compute = max(compute, _launched(shape, layout, parts, machine, program) - sent)
    inner = inner_layer(shape, layout, machine, program)
    # On a CPU the cores that compute also move the messages, so computation hides none.
    # In a pipeline gradients are reduced after the last micro-batch, when no computation is left to hide them.
    hides = layout.pp == 1 and machine.launches_ahead
    backward = shape.layers * (inner.inputs + inner.weights + inner.again) if hides else 0.0
    parameters = local_parameters(shape, layout)
    trained = shape.trained_share * parameters
    units = shape.layers // layout.pp + 1
    forward = shape.layers * inner.forward if hides else 0.0
    most = units * (GATED_MATRICES if shape.gated else MATRICES)
    sent += data_parallel(
        layout=layout,
        parameters=parameters,
        trained=trained,
        experts=_experts(shape, layout),
        parts=parts,
        machine=machine,
        program=program,
        forward=forward,
        backward=backward,
        units=units,
        max_overlap=most,
    )
    sent += _woken(layout, parts, machine=machine, inner=inner, compute=compute, units=units)
    if shape.tied and layout.pipeline_rank_of(layout.stages - 1) != 0:
        # The first and the last stage both hold the tied embedding, and sum its gradients.
        weight = shape.table / layout.tp * program.gradient_width
        sent += Group(2, (layout.pp - 1) * layout.world // layout.pp, machine).all_reduce(weight)
    # The exchange of loss, norm and other metrics: a few numbers, so only its latency counts.
    sent += Group(layout.world, 1, machine).all_reduce(0.0)
    if layout.zero and not machine.launches_ahead:  # copying shards out of their layers and back
        sent += units * OPERATIONS * machine.launch
    ways = divided(shape, layout, layout.sharded) if layout.zero else 1.0
    optimizer = BEGINNING + update_seconds(shape, layout, machine, program, trained / ways)
    price = DEEPSPEED.get(layout.zero, 1.0) if layout.engine == "deepspeed" else 1.0
    compute = price * compute
    # The CPU updates offloaded state, which `host_seconds` includes; counting both would charge it twice.
    optimizer = price * optimizer if layout.offload == "none" else 0.0  # offloaded: part of `host`
    # `delay` is the mean of an exponential slowdown of one rank; all wait for the last, whose mean is H(n) times as
    # large.
    late = machine.delay * (compute + optimizer)
    saved = saved_bytes(shape, layout, program.optimizer) / machine.host_bandwidth
    return StepTime(
        compute=compute * (1.0 + machine.delay),
        communication=price * sent,
        bubble=price * bubble,
        optimizer=optimizer * (1.0 + machine.delay),
        host=host_seconds(layout, parameters / ways, parts, machine),
        commit=saved / program.commit_every if program.commit_every else 0.0,
        stragglers=late * (last_of(layout.world) - 1.0),
    )


def _woken(layout: Layout, parts: int, machine: Machine, inner: Times, compute: float, units: int) -> float:
    """Return by how many seconds data-parallel traffic is slower because it follows computation (`Machine.behind`).

    Under ZeRO 0 and 1 it follows a step's computation, under ZeRO 2 and 3 that of each of `units` layers, `inner`.
    """
    if layout.replicas == 1:
        return 0.0
    if layout.zero < 2:
        return machine.behind(compute)
    passes = 1 if layout.pp > 1 else parts
    back = machine.behind(inner.inputs + inner.weights)
    if layout.zero == 2:
        return units * (machine.behind(inner.forward) + passes * back)
    return units * passes * (machine.behind(inner.forward) + 2.0 * back)


def _added(shape: ModelShape, layout: Layout, machine: Machine) -> float:
    """Return the seconds to add a micro-batch's gradients to the earlier ones: ADDED x trained / bandwidth.

    A GPU's profile includes this time in its fitted shares.
    """
    trained = shape.trained_share * local_parameters(shape, layout)
    return 0.0 if machine.launches_ahead else ADDED * trained / machine.memory_bandwidth


def _handed(layout: Layout, machine: Machine, stage: int) -> float:
    """Return the seconds in which a CPU receives a pass's input from, and sends its output to, other ranks.

    A GPU computes meanwhile. Except for GPipe, torch's schedules send one pass's output together with receiving the
    next one's input, so a message costs half a wait.
    """
    if machine.launches_ahead:
        return 0.0
    waits = 1.0 if layout.schedule == "gpipe" else 0.5
    rank = layout.pipeline_rank_of(stage)
    neighbours = (stage - 1, stage + 1)
    others = [layout.pipeline_rank_of(each) for each in neighbours if 0 <= each < layout.stages]
    return waits * machine.message * sum(other != rank for other in others)


def _launched(shape: ModelShape, layout: Layout, parts: int, machine: Machine, program: Program) -> float:
    """Return the seconds in which the process launches all passes of FSDP2's layers; 0 without ZeRO 2 or 3.

    A step on a GPU takes at least that long.
    """
    if layout.zero < 2 or not machine.launches_ahead:
        return 0.0
    kept = recomputed_share(shape, layout)
    again = kept if layout.recompute == "full" else 0.0
    each = (3.0 + again) * operations(shape, machine, program, layout.tp, layout.ep) + WRAPPED_OPERATIONS
    return parts * shape.layers / layout.pp * (each * machine.launch + kept * CHECKPOINT)


def local_parameters(shape: ModelShape, layout: Layout) -> float:
    """Return the parameters of a rank before ZeRO, mean over stages: (dense + experts / ep) / (tp x pp)."""
    experts = shape.expert_share * shape.parameters
    return (shape.parameters - experts + experts / layout.ep) / (layout.tp * layout.pp)


def divided(shape: ModelShape, layout: Layout, ways: int) -> float:
    """Return into how many parts ZeRO divides a rank's parameters, if `ways` ranks divide the dense ones.

    Only ways / ep ranks hold the same experts: parts = 1 / ((1 - e) / ways + e / max(ways / ep, 1)), where e is the
    share of the rank's parameters that belongs to experts.
    """
    experts = _experts(shape, layout)
    return 1.0 / ((1.0 - experts) / ways + experts / max(ways / layout.ep, 1.0))


def _experts(shape: ModelShape, layout: Layout) -> float:
    """Return the share of a rank's parameters, before ZeRO, that belongs to experts."""
    experts = shape.expert_share / layout.ep
    return experts / (1.0 - shape.expert_share + experts)


def saved_bytes(shape: ModelShape, layout: Layout, optimizer: str) -> float:
    """Return the bytes that a rank copies for a commit: its share of fp32 weights and optimizer state.

    The ranks that hold the same parameters divide them: 4 x (1 + numbers of state) x trained / ways.
    """
    trained = shape.trained_share * local_parameters(shape, layout)
    ways = divided(shape, layout, layout.dp * layout.cp)
    return 4.0 * (1.0 + kept_numbers(optimizer, shape)) * trained / ways


@lru_cache(maxsize=256)
def _played(shape: ModelShape, layout: Layout, parts: int, machine: Machine, program: Program) -> Played:
    return pipeline(shape, layout, parts, machine, program)


def pipeline(
    shape: ModelShape,
    layout: Layout,
    parts: int,
    machine: Machine,
    program: Program,
    keep: bool = False,
) -> Played:
    """Simulate a pipeline's step of `parts` micro-batches; with `keep` its events are kept.

    A stage sends tokens x hidden x carried width bytes per micro-batch, divided by tp under sequence parallelism.
    """
    machine = machine.among(layout.world)
    stages = layout.stages
    few = parts if keep else min(parts, ROUNDS * layout.pp + parts % layout.pp)
    costs = _stage_times(shape, layout, machine, program)
    boundary = layout.world // layout.pp
    tokens = layout.micro_batch * shape.sequence_length / layout.cp
    size = tokens * shape.hidden * program.carried_width / (layout.tp if layout.sequence else 1)
    rank_of = {stage: layout.pipeline_rank_of(stage) for stage in range(stages)}
    added = (parts - 1) / parts * _added(shape, layout, machine) * layout.pp / stages

    def seconds(kind: str, stage: int) -> float:
        times = costs[stage]
        handed = _handed(layout, machine, stage)
        if kind == "F":
            return times.forward + times.sent_forward + handed
        half = times.inputs + times.again + times.sent_backward + handed
        weights = times.weights + added
        return {"B": half + weights, "I": half, "W": weights}[kind]

    def sent(a: int, b: int) -> float:
        ends_at = sorted((rank_of[a] * boundary, rank_of[b] * boundary))
        crosses = ends_at[0] // machine.per_node != ends_at[1] // machine.per_node
        link = machine.between if crosses else machine.inside
        return machine.message + link.latency + size / link.bandwidth

    def simulate(count: int) -> Played:
        row = scheduled(layout.schedule, layout.pp, count, stages // layout.pp)
        return play(row, seconds, sent, keep)

    played = simulate(few)
    if few == parts:
        return played
    # Extrapolate: every further round of p micro-batches takes as long as the last simulated one.
    of_round = max(played.seconds - simulate(few - layout.pp).seconds, layout.pp / few * max(played.busy))
    more = (parts - few) / layout.pp * of_round
    return Played(
        seconds=played.seconds + more,
        busy=tuple(parts / few * each for each in played.busy),
        events=played.events,
    )


def inner_layer(shape: ModelShape, layout: Layout, machine: Machine, program: Program) -> Times:
    """Return the times of a rank's mean layer, if only some of its layers are recomputed."""
    again = layer(shape, machine, program, parts_of(layout), layout.recompute)
    if not layout.recompute_layers:
        return again
    share = recomputed_share(shape, layout)
    return again.mixed(layer(shape, machine, program, parts_of(layout), "none"), share)


def recomputed_share(shape: ModelShape, layout: Layout) -> float:
    """Return the share of a rank's layers that the layout recomputes."""
    if not layout.recompute_layers:
        return float(layout.recompute != "none")
    return min(layout.recompute_layers * layout.stages / max(shape.layers, 1), 1.0)


def busiest(shape: ModelShape, layout: Layout, machine: Machine, program: Program) -> float:
    """Return the seconds that the busiest rank computes and sends for a micro-batch.

    It is the rank with most layers, or the first with the embedding, or the one with the head.
    """
    inner = inner_layer(shape, layout, machine, program)
    first, head = ends(shape, machine, program, parts_of(layout))
    counts = layers_by_rank(shape.layers, layout)
    each = inner.compute + inner.sent
    at = layout.pipeline_rank_of(layout.stages - 1)  # the rank with the head
    more = head.compute + head.sent
    start = counts[0] * each + first.compute + first.sent
    end = counts[at] * each + more
    return max(max(counts) * each, start + more if at == 0 else start, end)


def ends_in_layers(
    shape: ModelShape, layout: Layout, machine: Machine, program: Program
) -> tuple[float, float]:
    """Return the times of embedding and head in layers, rounded to a tenth."""
    part = parts_of(layout)
    inner = layer(shape, machine, program, part, layout.recompute)
    each = (inner.compute + inner.sent) or math.inf
    first, head = (round((end.compute + end.sent) / each, 1) for end in ends(shape, machine, program, part))
    return first, head


def _stage_times(shape: ModelShape, layout: Layout, machine: Machine, program: Program) -> list[Times]:
    inner = inner_layer(shape, layout, machine, program)
    first, head = ends(shape, machine, program, parts_of(layout))
    stages = []
    for stage in range(layout.stages):
        _, count = layout.layers_of(shape.layers, stage)
        parts = [(count, inner)]
        parts += [(1, first)] if stage == 0 else []
        parts += [(1, head)] if stage == layout.stages - 1 else []
        names = [field.name for field in dataclasses.fields(Times)]
        stages.append(Times(**{name: sum(n * getattr(t, name) for n, t in parts) for name in names}))
    return stages
