"""The plan: enumerate layouts, reject the illegal ones with a reason, predict memory and time, choose the best.

The model is simple: weights, gradients and optimiser state as in ZeRO (Rajbhandari et al., 2020, section 3),
activations as in Korthikanti et al., 2022 (equation 2, in bytes of the compute dtype), and floating-point operations
over a rate. Its times are good for ranking layouts; the report shows them beside the measured ones. Torch-free and
ray-free.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.job.errors import InputError
from orchestrator.job.records import PREFERENCES
from orchestrator.job.spec import JobSpec, ParallelSpec
from orchestrator.planning.engine_rules import engine_problems
from orchestrator.planning.layout import Layout, ModelShape, divisors, fit, nearest
from orchestrator.planning.machines import Machine

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MEMORY_SHARE = 0.8
"""Share of a worker's memory that a plan may use: allocators and libraries need the rest."""
EFFICIENCY = 0.4
"""Share of the matrix-multiplication rate that a training step reaches."""

DEEPSPEED = {1: 1.10, 2: 1.06, 3: 1.12}
"""CPU time of a DeepSpeed step relative to a step of the torch engine, by ZeRO stage, as measured by
`tests/bench/bench_deepspeed.py`."""
HOST_LINK, HOST_MEMORY = 2e10, 5e10
"""Bytes per second between a GPU and its host (PCIe 4.0, 16 lanes), and of the host's memory: cautious guesses."""


HEAD_TOKENS = {"cpu": 256, "cuda": 2048}
"""Tokens whose logits a head computes at once. Fewer make matrix products slower: on a CPU 256 are as fast as all
(docs/benchmarks.md), on a GPU a guess by its ratio of FLOPs to bandwidth. The bits of a run depend on them."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its prediction: memory in bytes per rank, seconds per step."""

    layout: Layout
    memory: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The candidate as plain data."""
        return {
            "layout": str(self.layout),
            "memory_bytes": round(self.memory),
            "step_seconds": round(self.seconds, 4),
        }


@dataclass(frozen=True)
class Plan:
    """The chosen layout, all legal ones (best first), the rejected ones with a reason, and tokens per step."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    rejected: tuple[tuple[Layout, str], ...]
    machine: Machine
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """The content of plan.json."""
        seconds = self.chosen.seconds
        return {
            "chosen": self.chosen.layout.to_json() | {"text": str(self.chosen.layout)},
            "predicted": {
                "memory_bytes": round(self.chosen.memory),
                "step_seconds": seconds,
                "tokens_per_second": self.tokens / seconds,
            },
            "machine": {
                "memory_bytes": round(self.machine.memory),
                "flops_per_second": round(self.machine.flops),
            },
            "candidates": [c.to_json() for c in self.candidates],
            "rejected": [{"layout": str(layout), "reason": reason} for layout, reason in self.rejected],
        }


def plan(spec: JobSpec, shape: ModelShape, workers: int, machine: Machine) -> Plan:
    """The best legal layout on at most `workers` ranks.

    Raises InputError if a layout given by hand is illegal, or if none is legal and fits, with the reason.
    """
    legal, rejected = [], []
    for layout in dict.fromkeys(_candidates(spec, shape, workers, machine)):
        problems = [*layout.problems(shape, spec.train.global_batch), *engine_problems(spec, layout)]
        if layout.world > workers:
            problems.append(
                f"{layout} needs {layout.world} workers of {workers}; lower a degree or add workers"
            )
        candidate = predict(spec, shape, layout, machine)
        if not problems and candidate.memory > machine.memory * MEMORY_SHARE:
            offered = machine.memory * MEMORY_SHARE
            problems = [
                f"needs {candidate.memory / 2**30:.2f} GiB a rank and a worker offers {offered / 2**30:.2f} GiB"
            ]
        if problems:
            rejected.append((layout, problems[0]))
        else:
            legal.append(candidate)
    if not legal:
        raise _no_layout(spec, shape, workers, rejected)
    # of equally fast layouts, the one with the least sharding
    legal.sort(key=lambda c: (round(c.seconds, 6), c.layout.zero, c.memory))
    return Plan(
        legal[0], tuple(legal), tuple(rejected), machine, spec.train.global_batch * shape.sequence_length
    )


@dataclass(frozen=True)
class Planner:
    """Plans for one job, which the controller asks for repeatedly: each number of workers is planned once."""

    spec: JobSpec
    shape: ModelShape
    machine: Machine
    _known: dict[int, Layout | None] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def plan(self, workers: int) -> Plan:
        """See `plan`."""
        return plan(self.spec, self.shape, workers, self.machine)

    @property
    def flops(self) -> dict[str, float]:
        """What a task says of FLOPs, see `orchestrator.train.task`."""
        return {"flops_per_token": self.shape.flops_per_token, "peak_flops": self.machine.flops}

    def choose(self, workers: int) -> Layout | None:
        """The best layout for that number of workers; None if there is no legal one."""
        if workers not in self._known:
            try:
                self._known[workers] = self.plan(workers).chosen.layout if workers else None
            except InputError:
                self._known[workers] = None
        return self._known[workers]

    def seconds(self, layout: Layout) -> float:
        """Predicted seconds per step."""
        return predict(self.spec, self.shape, layout, self.machine).seconds


def predict(spec: JobSpec, shape: ModelShape, layout: Layout, machine: Machine) -> Candidate:
    """The predicted bytes per rank and seconds per step under `layout`."""
    parameters = (
        shape.parameters * (1 - shape.expert_share + shape.expert_share / layout.ep) / (layout.tp * layout.pp)
    )
    width = 4 if spec.train.precision == "fp32" else 2
    tokens = layout.micro_batch * shape.sequence_length / layout.cp
    attention = 2.5 * shape.heads * shape.sequence_length / shape.hidden
    kept = {"none": 17.0 + attention, "selective": 12.0, "full": 2.0}[layout.recompute]
    per_layer = tokens * shape.hidden * width * kept
    head = _head(spec, shape, tokens)
    accumulation = max(layout.accumulation(spec.train.global_batch), 1)
    # a pipeline keeps the activations of the micro-batches in flight: at most one per stage
    flight = min(layout.pp, accumulation) if layout.schedule != "gpipe" else accumulation
    activations = flight * shape.layers / layout.pp * per_layer / layout.tp + head / layout.tp
    work = shape.flops_per_token * spec.train.global_batch * shape.sequence_length / layout.world
    recomputed = {"none": 1.0, "selective": 1.05, "full": 4 / 3}[layout.recompute]
    bubble = (
        {"interleaved": 0.5, "zero_bubble": 1 / 6, "zbv": 1 / 6}.get(layout.schedule, 1.0)
        * (layout.pp - 1)
        / accumulation
    )
    seconds = work * recomputed * (1 + bubble) / (machine.flops * EFFICIENCY)
    # the fixed cost of launching a layer's operations, which small micro-batches do not hide
    launches = accumulation * shape.layers / layout.pp * 4e-4
    traffic = (
        _traffic(shape, layout, accumulation, 4.0 * parameters, tokens * shape.hidden * width)
        / machine.bandwidth
    )
    price = DEEPSPEED.get(layout.zero, 1.0) if layout.engine == "deepspeed" else 1.0
    seconds = price * (seconds + launches + traffic)
    return Candidate(
        layout,
        _states(layout, parameters, shape.trained_share, spec.checkpoint.ema is not None) + activations,
        seconds + _host_seconds(layout, parameters, accumulation),
    )


def _head(spec: JobSpec, shape: ModelShape, tokens: float) -> float:
    """Bytes that the head holds: logits, their softmax and their gradient of the tokens that it computes at once, and
    from there to the backward pass the gradient of its weight."""
    at_once = HEAD_TOKENS["cuda" if spec.resources.per_worker.gpu else "cpu"]
    chunked = shape.chunked_head and spec.workload.objective not in PREFERENCES
    tokens = min(tokens, at_once) if chunked else tokens
    return 4.0 * shape.vocabulary * (3 * tokens + (shape.hidden if chunked else 0))


def _states(layout: Layout, parameters: float, trained_share: float, has_average: bool) -> float:
    """Bytes of weights, gradients, optimiser state and a moving average on a rank's device, for `parameters` parameters
    per model replica, of which that share is trained.

    Offloaded state is in host memory, which is not counted. DeepSpeed keeps a second fp32 copy of the weights that a
    rank updates, and sends gradients to the host as they are summed (Ren et al., 2021, section 4.1).
    """
    replicas = layout.dp * layout.cp
    deepspeed = layout.engine == "deepspeed"
    slots = (12.0 if deepspeed else 8.0) + (4.0 if has_average else 0.0)
    trained = trained_share * parameters
    optimizer = slots * trained / (replicas if layout.zero >= 1 else 1)
    gradients = 4.0 * trained / (replicas if layout.zero >= 2 else 1)
    weights = 4.0 * parameters / (replicas if layout.zero >= 3 else 1)
    if layout.offload == "none":
        return weights + gradients + optimizer
    gradients *= 0.0 if deepspeed and layout.zero >= 2 else 1.0
    return gradients + (weights if layout.offload == "optimizer" else 0.0)


def _host_seconds(layout: Layout, parameters: float, accumulation: int) -> float:
    """What offload adds to a step of `accumulation` micro-batches: gradients to the host, Adam there (reads four
    numbers of a parameter and writes three), weights back; offloaded weights come for every forward and backward
    pass."""
    if layout.offload == "none":
        return 0.0
    part = 4.0 * parameters / (layout.dp * layout.cp if layout.zero >= 1 else 1)
    recomputed = 2 * accumulation if layout.offload == "parameters" else 0
    return (2 + recomputed) * part / HOST_LINK + 7 * part / HOST_MEMORY


def _traffic(shape: ModelShape, layout: Layout, accumulation: int, weights: float, hidden: float) -> float:
    """Bytes that a rank sends in a step, for `accumulation` micro-batches of `hidden` bytes of hidden states.

    Rings move (n - 1) / n of a tensor in each half of an all-reduce. Gradients are summed once under ZeRO 0 and 1
    (half of it hidden behind the backward pass), and gathered and scattered for every micro-batch under 2 and 3.
    """

    def ring(ways: int) -> float:
        return (ways - 1) / ways

    layers = accumulation * shape.layers / layout.pp
    halves = {0: 1.0, 1: 1.0, 2: 2.0 * accumulation, 3: 3.0 * accumulation}[layout.zero]
    data = halves * ring(layout.dp * layout.cp) * weights
    tensor = layers * 8.0 * ring(layout.tp) * hidden
    context = layers * 4.0 * (layout.cp - 1) * hidden * shape.kv_heads / shape.heads
    experts = layers * 4.0 * ring(layout.ep) * hidden if shape.experts else 0.0
    stages = 2.0 * accumulation * hidden * (layout.stages // layout.pp) if layout.pp > 1 else 0.0
    return data + tensor + context + experts + stages


def _candidates(spec: JobSpec, shape: ModelShape, workers: int, machine: Machine) -> Iterator[Layout]:
    """Every layout to consider: the one given by hand, or all degrees that the workers allow."""
    batch = spec.train.global_batch
    virtual = spec.train.virtual_shards if spec.train.determinism == "bitwise" else 0
    micros = [batch // virtual] if virtual else [m for m in MICRO_BATCHES if m <= batch]
    if isinstance(spec.parallel, ParallelSpec):
        asked = spec.parallel
        fields = asked.model_dump(exclude={"micro_batch"})
        for micro in [asked.micro_batch] if asked.micro_batch else micros:
            wide = Layout(**fields, micro_batch=micro)
            # a layout that does not fit is yielded too, so that the error names the reason
            width = max(workers // (asked.pp * asked.cp * asked.tp), 1)
            yield fit(wide, workers, batch, virtual) or dataclasses.replace(wide, dp=width)
        return
    ways, experts = divisors(workers), divisors(shape.experts) if shape.experts else [1]
    for pp, cp, tp, ep, zero, recompute in itertools.product(
        ways, ways, ways, experts, range(4), ("none", "full")
    ):
        if pp * cp * tp * ep > workers:
            continue
        schedules = ("1f1b", "interleaved") if pp > 1 else ("1f1b",)
        for micro, schedule in itertools.product(micros, schedules):
            degrees = Layout(
                pp=pp,
                cp=cp,
                tp=tp,
                ep=ep,
                zero=zero,
                micro_batch=micro,
                recompute=recompute,
                schedule=schedule,
            )
            layout = fit(degrees, workers, batch, virtual)
            if layout:
                yield layout
                yield from _variants(spec, shape, layout, machine)


def _variants(spec: JobSpec, shape: ModelShape, layout: Layout, machine: Machine) -> Iterator[Layout]:
    """The legal variants of a layout: on DeepSpeed, and with state offloaded if a GPU's memory does not suffice."""
    gpu = spec.resources.per_worker.gpu and spec.train.determinism != "bitwise"
    tight = gpu and predict(spec, shape, layout, machine).memory > machine.memory * MEMORY_SHARE
    offloads = ("none", "optimizer", "parameters") if tight else ("none",)
    for engine, offload in itertools.product(("torch", "deepspeed"), offloads):
        other = dataclasses.replace(layout, engine=engine, offload=offload)
        problems = [*other.problems(shape, spec.train.global_batch), *engine_problems(spec, other)]
        if other != layout and not problems:
            yield other


def _no_layout(
    spec: JobSpec, shape: ModelShape, workers: int, rejected: list[tuple[Layout, str]]
) -> InputError:
    reasons = list(dict.fromkeys(reason for _, reason in rejected))
    if isinstance(spec.parallel, ParallelSpec) and reasons:
        near = nearest(rejected[0][0], shape, spec.train.global_batch)
        hint = f"the nearest legal layouts are {'; '.join(str(layout) for layout in near)}" if near else ""
        return InputError(reasons[0], "parallel", hint)
    needs = [reason for reason in reasons if reason.startswith("needs ")]  # memory was the only problem
    why = f": {(needs or reasons)[-1]}" if reasons else ""
    return InputError(
        f"no legal layout for {workers} workers{why}", "parallel", "change resources or train.global_batch"
    )
