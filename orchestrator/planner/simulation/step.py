"""The seconds of a step under a layout, by part."""

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


FEW = 32
"""Up to so many ranks the mean of the last is summed; beyond, the series of the harmonic number is as exact."""


@lru_cache(maxsize=4096)
def last_of(ranks: int) -> float:
    """How many times the mean delay of a rank the last of so many ranks is late, in the mean: the harmonic number."""
    if ranks <= FEW:
        return sum(1.0 / n for n in range(1, ranks + 1))
    return math.log(ranks) + 0.5772156649015329 + 1.0 / (2 * ranks) - 1.0 / (12 * ranks**2)


def latest_of(ranks: int, share: float) -> float:
    """How many times the mean delay of a rank the last of so many is late at most, in that share of the steps: the
    quantile of the largest of so many exponential variables."""
    return -math.log1p(-(share ** (1.0 / ranks)))


ADDED = 12.0
"""Bytes that pass where a gradient in fp32 is added to another: two are read and one is written."""
WRAPPED_OPERATIONS = 100.0
"""Operations in whose time FSDP2 gathers a layer twice, frees it and scatters its gradients, besides what it sends."""
BEGINNING = 6e-4
"""Seconds in which a process begins a step and its update, whatever there is to update: measured on a Zen 5."""
MATRICES, GATED_MATRICES = 4, 7
"""Of a layer: a bucket has one at least."""
NOT_PLAYED: Mapping[str, Any] = MappingProxyType(
    {"zero": 0, "shard": 0, "engine": "torch", "offload": "none"}
)
"""What of a layout the passes of its pipeline do not depend on."""
ROUNDS = 3
"""A pipeline is played for at most so many micro-batches a stage; further ones take what the last of these have taken,
and no less than the slowest rank takes."""
DEEPSPEED = {1: 1.10, 2: 1.06, 3: 1.12}
"""CPU time of a DeepSpeed step relative to a step of the torch engine, by ZeRO stage, as measured by
`tests/bench/bench_deepspeed.py`."""


@dataclass(frozen=True)
class StepTime:
    """Mean seconds of a step by part, on its slowest rank.

    Attributes:
        compute: forward and backward passes.
        communication: what of all communication no computation hides.
        bubble: the slowest rank of a pipeline waits for others.
        optimizer: the update of the weights.
        host: state that comes from the host's memory and goes there.
        data: waiting for batches, which are read ahead.
        commit: the copy of the state that a commit takes, spread over the steps between two commits; it comes on top.
        own: what the job's own planner cost adds.
        stragglers: what the last rank is later than a rank is in the mean, see `stragglers`.
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
        """All parts together but the commit, as a run measures its steps."""
        found = self.compute + self.communication + self.bubble + self.optimizer + self.host + self.data
        return found + self.own + self.stragglers

    def to_json(self) -> dict[str, float]:
        """The parts as plain data."""
        return dataclasses.asdict(self)


def in_share_of_steps(time: StepTime, ranks: int, machine: Machine, share: float) -> float:
    """Seconds that a step of so many ranks takes at most in that share of the steps: `time` is their mean."""
    late = (time.compute + time.optimizer) * machine.delay / (1.0 + machine.delay)
    return time.seconds + late * (latest_of(ranks, share) - last_of(ranks))


def parts_of(layout: Layout) -> tuple[int, ...]:
    """What of a layout the time of a layer depends on: (sequences, tp, cp, ep, sequence)."""
    return (layout.micro_batch, layout.tp, layout.cp, layout.ep, int(layout.sequence))


def step_time(
    shape: ModelShape, layout: Layout, global_batch: int, machine: Machine, program: Program
) -> StepTime:
    """The seconds of a step of `global_batch` sequences."""
    machine = machine.among(layout.world)
    parts = max(layout.accumulation(global_batch), 1)
    inner = inner_layer(shape, layout, machine, program)
    if layout.pp == 1:
        first, head = ends(shape, machine, program, parts_of(layout))
        compute = parts * (shape.layers * inner.compute + first.compute + head.compute)
        compute += (parts - 1) * _added(shape, layout, machine)
        sent = parts * (shape.layers * inner.sent + first.sent + head.sent)
        return with_update(shape, layout, parts, machine, program, (compute, sent, 0.0))
    played = _played(shape, layout.but(**NOT_PLAYED), parts, machine, program)
    sent = parts * max(layers_by_rank(shape.layers, layout)) * inner.sent
    busy = max(played.busy)
    stages = layout.stages_of(played.busy.index(busy))
    waits = 2.0 * parts * sum(_handed(layout, machine, stage) for stage in stages)
    passes = busy - sent - waits, sent, played.seconds - busy + waits
    return with_update(shape, layout, parts, machine, program, passes)


def with_update(
    shape: ModelShape,
    layout: Layout,
    parts: int,
    machine: Machine,
    program: Program,
    passes: tuple[float, float, float],
) -> StepTime:
    """The step whose passes take (compute, communication, bubble), with what comes after them."""
    compute, sent, bubble = passes
    compute = max(compute, _launched(shape, layout, parts, machine, program) - sent)
    inner = inner_layer(shape, layout, machine, program)
    hides = layout.pp == 1 and machine.launches_ahead  # a CPU's cores move the messages themselves
    backward = shape.layers * (inner.inputs + inner.weights + inner.again) if hides else 0.0
    parameters = local_parameters(shape, layout)
    trained = shape.trained_share * parameters
    units = shape.layers // layout.pp + 1
    forward = shape.layers * inner.forward if hides else 0.0
    most = units * (GATED_MATRICES if shape.gated else MATRICES)
    sent += data_parallel(
        layout,
        parameters,
        trained,
        _experts(shape, layout),
        parts,
        machine,
        program,
        forward,
        backward,
        units,
        most,
    )
    sent += _woken(layout, parts, machine, inner, compute, units)
    if shape.tied and layout.pipeline_rank_of(layout.stages - 1) != 0:
        # first and last stage hold the embedding both, and sum its gradients
        weight = shape.table / layout.tp * program.gradient_width
        sent += Group(2, (layout.pp - 1) * layout.world // layout.pp, machine).all_reduce(weight)
    sent += Group(layout.world, 1, machine).all_reduce(
        0.0
    )  # of the loss, the norm and what else a step reports
    if layout.zero and not machine.launches_ahead:  # shards are taken out of their layers and put back
        sent += units * OPERATIONS * machine.launch
    ways = divided(shape, layout, layout.sharded) if layout.zero else 1.0
    optimizer = BEGINNING + update_seconds(shape, layout, machine, program, trained / ways)
    price = DEEPSPEED.get(layout.zero, 1.0) if layout.engine == "deepspeed" else 1.0
    compute, optimizer = price * compute, price * optimizer if layout.offload == "none" else 0.0
    late = machine.delay * (compute + optimizer)
    saved = saved_bytes(shape, layout, program.optimizer) / machine.host_bandwidth
    return StepTime(
        compute * (1.0 + machine.delay),
        price * sent,
        price * bubble,
        optimizer * (1.0 + machine.delay),
        host_seconds(layout, parameters / ways, parts, machine),
        commit=saved / program.commit_every if program.commit_every else 0.0,
        stragglers=late * (last_of(layout.world) - 1.0),
    )


def _woken(layout: Layout, parts: int, machine: Machine, inner: Times, compute: float, units: int) -> float:
    """Seconds that data-parallel traffic takes longer since it comes behind computation: that of a step, or under ZeRO
    2 and 3 that of each of `units` layers, `inner`."""
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
    """Seconds in which a rank adds the gradients of a micro-batch to those of the ones before it; a GPU's are in the
    shares that its profile is fitted with."""
    trained = shape.trained_share * local_parameters(shape, layout)
    return 0.0 if machine.launches_ahead else ADDED * trained / machine.memory_bandwidth


def _handed(layout: Layout, machine: Machine, stage: int) -> float:
    """Seconds in which a processor receives and sends what a pass of a stage is given and gives to stages of other
    ranks; a GPU computes meanwhile. But for GPipe, torch's schedules send the result of one pass together with
    receiving what the next is given, and wait for both at once."""
    if machine.launches_ahead:
        return 0.0
    waits = 1.0 if layout.schedule == "gpipe" else 0.5
    rank, near = layout.pipeline_rank_of(stage), (stage - 1, stage + 1)
    others = [layout.pipeline_rank_of(each) for each in near if 0 <= each < layout.stages]
    return waits * machine.message * sum(other != rank for other in others)


def _launched(shape: ModelShape, layout: Layout, parts: int, machine: Machine, program: Program) -> float:
    """Seconds in which a rank's process launches the passes of layers that ZeRO 2 or 3 wraps; 0 without."""
    if layout.zero < 2 or not machine.launches_ahead:
        return 0.0
    kept = recomputed_share(shape, layout)
    again = kept if layout.recompute == "full" else 0.0
    each = (3.0 + again) * operations(shape, machine, program, layout.tp, layout.ep) + WRAPPED_OPERATIONS
    return parts * shape.layers / layout.pp * (each * machine.launch + kept * CHECKPOINT)


def local_parameters(shape: ModelShape, layout: Layout) -> float:
    """Parameters of a rank's part of the model, before ZeRO, in the mean of the stages."""
    experts = shape.expert_share * shape.parameters
    return (shape.parameters - experts + experts / layout.ep) / (layout.tp * layout.pp)


def divided(shape: ModelShape, layout: Layout, ways: int) -> float:
    """Into how many parts a rank's parameters are divided in the mean, where `ways` ranks divide those that all of them
    have: experts are divided by those that have the same ones."""
    experts = _experts(shape, layout)
    return 1.0 / ((1.0 - experts) / ways + experts / max(ways / layout.ep, 1.0))


def _experts(shape: ModelShape, layout: Layout) -> float:
    """Share of a rank's parameters, before ZeRO, that belongs to experts."""
    experts = shape.expert_share / layout.ep
    return experts / (1.0 - shape.expert_share + experts)


def saved_bytes(shape: ModelShape, layout: Layout, optimizer: str) -> float:
    """Bytes that a rank copies for a commit: of weights and optimiser state in fp32 its share, as the ranks that hold
    the same divide them."""
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
    """The pipeline's step of `parts` micro-batches, played event by event; with `keep` its events are kept."""
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
        times, handed = costs[stage], _handed(layout, machine, stage)
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

    def of(count: int) -> Played:
        row = scheduled(layout.schedule, layout.pp, count, stages // layout.pp)
        return play(row, seconds, sent, keep)

    played = of(few)
    if few == parts:
        return played
    round_ = max(played.seconds - of(few - layout.pp).seconds, layout.pp / few * max(played.busy))
    more = (parts - few) / layout.pp * round_
    return Played(played.seconds + more, tuple(parts / few * each for each in played.busy), played.events)


def inner_layer(shape: ModelShape, layout: Layout, machine: Machine, program: Program) -> Times:
    """A mean layer of a rank, of whose layers some may be recomputed."""
    again = layer(shape, machine, program, parts_of(layout), layout.recompute)
    if not layout.recompute_layers:
        return again
    share = recomputed_share(shape, layout)
    return again.mixed(layer(shape, machine, program, parts_of(layout), "none"), share)


def recomputed_share(shape: ModelShape, layout: Layout) -> float:
    """Of a rank's layers, those that the layout's recomputation is for."""
    if not layout.recompute_layers:
        return float(layout.recompute != "none")
    return min(layout.recompute_layers * layout.stages / max(shape.layers, 1), 1.0)


def busiest(shape: ModelShape, layout: Layout, machine: Machine, program: Program) -> float:
    """Seconds that the busiest rank computes and sends for a micro-batch."""
    inner = inner_layer(shape, layout, machine, program)
    first, head = ends(shape, machine, program, parts_of(layout))
    counts, each = layers_by_rank(shape.layers, layout), inner.compute + inner.sent
    at, more = layout.pipeline_rank_of(layout.stages - 1), head.compute + head.sent
    start = counts[0] * each + first.compute + first.sent
    end = counts[at] * each + more
    return max(max(counts) * each, start + more if at == 0 else start, end)


def ends_in_layers(
    shape: ModelShape, layout: Layout, machine: Machine, program: Program
) -> tuple[float, float]:
    """How many times as long as a layer embedding and head take, to a tenth."""
    part = parts_of(layout)
    inner = layer(shape, machine, program, part, layout.recompute)
    each = (inner.compute + inner.sent) or math.inf
    first, head = (round((end.compute + end.sent) / each, 1) for end in ends(shape, machine, program, part))
    return first, head


def _stage_times(shape: ModelShape, layout: Layout, machine: Machine, program: Program) -> list[Times]:
    inner = inner_layer(shape, layout, machine, program)
    first, head = ends(shape, machine, program, parts_of(layout))
    found = []
    for stage in range(layout.stages):
        _, count = layout.layers_of(shape.layers, stage)
        parts = [(count, inner)]
        parts += [(1, first)] if stage == 0 else []
        parts += [(1, head)] if stage == layout.stages - 1 else []
        names = [field.name for field in dataclasses.fields(Times)]
        found.append(Times(**{name: sum(n * getattr(t, name) for n, t in parts) for name in names}))
    return found
