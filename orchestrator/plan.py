"""Which layout to use: enumerate, reject with a reason, predict memory and time, choose.

A first, honest version. It counts model states after ZeRO (Rajbhandari et al., 2020, section 3), activations
after Korthikanti et al., 2022 (equation 2, in bytes of the compute type), and the step's floating-point
operations over a rate; so its times are good for ordering layouts, and the report shows them beside the
measured ones. Torch-free and ray-free.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cluster.gang import Bundle
from cluster.machine import Offer
from orchestrator.errors import InputError
from orchestrator.layout import Layout, ModelShape, divisors, fit
from orchestrator.spec import JobSpec, ParallelSpec
from workloads.config import TransformerConfig

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MEMORY_SHARE = 0.8
"""Share of a worker's memory that a plan may fill: allocators and libraries need the rest."""
GPUS = {
    "H200": (141e9, 989e12),
    "H100": (80e9, 989e12),
    "A100": (40e9, 312e12),
    "L4": (24e9, 121e12),
    "T4": (16e9, 65e12),
}
"""Bytes of memory and dense bf16 (T4: fp16) FLOP/s by Ray's accelerator name, from the vendor's data sheets."""
EFFICIENCY = 0.4
"""Share of the matrix-multiplication rate that a whole training step reaches."""


@dataclass(frozen=True)
class Machine:
    """What one worker offers: bytes of memory for the model, and matrix multiplication in FLOP/s."""

    memory: float
    flops: float


@dataclass(frozen=True)
class Candidate:
    """A legal layout with what is predicted of it: bytes a rank, seconds a step."""

    layout: Layout
    memory: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The candidate as plain data."""
        return {"layout": str(self.layout), "memory_bytes": round(self.memory), "step_seconds": round(self.seconds, 4)}


@dataclass(frozen=True)
class Plan:
    """The chosen layout, the others that were legal, and those that were not, each with the reason."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    rejected: tuple[tuple[Layout, str], ...]
    machine: Machine
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """The plan as it stands in plan.json."""
        seconds = self.chosen.seconds
        return {
            "chosen": self.chosen.layout.to_json() | {"text": str(self.chosen.layout)},
            "predicted": {
                "memory_bytes": round(self.chosen.memory),
                "step_seconds": seconds,
                "tokens_per_second": self.tokens / seconds,
            },
            "machine": {"memory_bytes": round(self.machine.memory), "flops_per_second": round(self.machine.flops)},
            "candidates": [c.to_json() for c in self.candidates],
            "rejected": [{"layout": str(layout), "reason": reason} for layout, reason in self.rejected],
        }


def model_shape(config: TransformerConfig | None, parameters: int, sequence_length: int) -> ModelShape:
    """The sizes that planning needs. A model of transformers run as it is (`config` None) cannot be cut."""
    if config is None:
        return ModelShape(parameters, 1, 1, 1, 1, 1, 1, sequence_length, 0, 6.0 * parameters)
    return ModelShape(
        parameters=parameters,
        layers=config.layers + config.decoder_layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        feedforward=config.intermediate,
        vocabulary=config.vocab_size,
        sequence_length=sequence_length,
        experts=config.moe.experts if config.moe else 0,
        flops_per_token=config.flops(sequence_length),
    )


def plan(spec: JobSpec, shape: ModelShape, workers: int, machine: Machine) -> Plan:
    """The best legal layout on at most `workers` ranks.

    Raises InputError if a layout written by hand is illegal, or if none fits, with the reasons.
    """
    legal, rejected = [], []
    for layout in _candidates(spec, workers):
        problems = [*layout.problems(shape, spec.train.global_batch), *_beyond_this_version(layout)]
        candidate = predict(spec, shape, layout, machine)
        if not problems and candidate.memory > machine.memory * MEMORY_SHARE:
            room = machine.memory * MEMORY_SHARE
            problems = [f"needs {candidate.memory / 2**30:.2f} GiB a rank and a worker offers {room / 2**30:.2f} GiB"]
        if problems:
            rejected.append((layout, problems[0]))
        else:
            legal.append(candidate)
    if not legal:
        raise _none_fits(spec, workers, rejected)
    legal.sort(key=lambda c: (c.seconds, c.memory))
    return Plan(legal[0], tuple(legal), tuple(rejected), machine, spec.train.global_batch * shape.sequence_length)


def chooser(spec: JobSpec, shape: ModelShape, machine: Machine) -> Callable[[int], Layout | None]:
    """`plan` as the controller asks it again and again: a layout for that many workers, or None."""

    def choose(workers: int) -> Layout | None:
        try:
            return plan(spec, shape, workers, machine).chosen.layout if workers else None
        except InputError:
            return None

    return choose


def predict(spec: JobSpec, shape: ModelShape, layout: Layout, machine: Machine) -> Candidate:
    """Bytes a rank and seconds a step under `layout`."""
    model_ways = layout.tp * layout.pp
    weights = 4.0 * shape.parameters / model_ways
    gradients, optimizer = weights, 2 * weights
    optimizer /= layout.dp if layout.zero >= 1 else 1
    gradients /= layout.dp if layout.zero >= 2 else 1
    weights /= layout.dp if layout.zero >= 3 else 1
    width = 2 if spec.train.precision == "bf16" else 4
    tokens = layout.micro_batch * shape.sequence_length / layout.cp
    attention = 2.5 * shape.heads * shape.sequence_length / shape.hidden
    per_layer = tokens * shape.hidden * width * (2.0 if layout.recompute == "full" else 17.0 + attention)
    logits = 3.0 * tokens * shape.vocabulary * 4
    activations = shape.layers / layout.pp * per_layer / layout.tp + logits / layout.tp
    work = shape.flops_per_token * spec.train.global_batch * shape.sequence_length / layout.world
    seconds = work * (4 / 3 if layout.recompute == "full" else 1.0) / (machine.flops * EFFICIENCY)
    # Small micro-batches leave the arithmetic units idle: the fixed cost of launching a layer's operations.
    launches = layout.accumulation(spec.train.global_batch) * shape.layers / layout.pp * 4e-4
    return Candidate(layout, weights + gradients + optimizer + activations, seconds + launches)


def machine_for(offer: Offer | None, bundle: Bundle) -> Machine:
    """What a worker of that size offers: a GPU by its name, processors by a short measurement here.

    An unknown GPU is taken for the smallest one known. With no offer at all, no worker fits the cluster yet, and
    this machine stands for those to come.
    """
    if bundle.gpu:
        memory, flops = GPUS.get(offer.accelerator if offer else "", min(GPUS.values()))
        return Machine(memory, flops)
    memory = offer.memory if offer else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(memory, probe(bundle.cpu))


def probe(cpu: float, seconds: float = 0.2) -> float:
    """Matrix multiplication by `cpu` of this machine's cores in FLOP/s, fp32, measured with all of them."""
    import numpy as np

    a = np.ones((512, 512), np.float32)
    a @ a  # the first product starts the library's threads
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        a @ a
        rounds += 1
    rate = 2.0 * 512**3 * rounds / (time.perf_counter() - start)
    return rate * min(cpu / (os.cpu_count() or 1), 1.0)


def _candidates(spec: JobSpec, workers: int) -> Iterator[Layout]:
    """Every layout to consider: the hand-written one, or all degrees that the workers allow."""
    batch = spec.train.global_batch
    if isinstance(spec.parallel, ParallelSpec):
        asked = spec.parallel
        degrees = Layout(
            pp=asked.pp, cp=asked.cp, tp=asked.tp, ep=asked.ep, zero=asked.zero, recompute=asked.recompute,
            schedule=asked.schedule, sequence=asked.sequence,
        )  # fmt: skip
        micros = [asked.micro_batch] if asked.micro_batch else [m for m in MICRO_BATCHES if m <= batch]
        for micro in micros:
            wide = dataclasses.replace(degrees, micro_batch=micro)
            # A layout that does not fit is still yielded, so that its reason is told.
            width = max(workers // (asked.pp * asked.cp * asked.tp), 1)
            yield fit(wide, workers, batch) or dataclasses.replace(wide, dp=width)
        return
    seen = set()
    degrees_of = [d for d in divisors(workers)]
    for pp, cp, tp, zero in itertools.product(degrees_of, degrees_of, degrees_of, range(4)):
        if pp * cp * tp > workers:
            continue
        for micro in (m for m in MICRO_BATCHES if m <= batch):
            layout = fit(Layout(pp=pp, cp=cp, tp=tp, zero=zero, micro_batch=micro), workers, batch)
            if layout and layout not in seen:
                seen.add(layout)
                yield layout


def _beyond_this_version(layout: Layout) -> list[str]:
    """What the engine cannot run yet, in words."""
    beyond = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    found = [f"{axis} {getattr(layout, axis)}: this version of the engine runs data parallel only; set {axis} to 1" for axis in beyond]
    return found


def _none_fits(spec: JobSpec, workers: int, rejected: list[tuple[Layout, str]]) -> InputError:
    reasons = list(dict.fromkeys(reason for _, reason in rejected))
    if isinstance(spec.parallel, ParallelSpec) and reasons:
        return InputError(reasons[0], "parallel")
    why = f": {reasons[-1]}" if reasons else ""
    return InputError(f"no legal layout for {workers} workers{why}", "parallel", "change resources or train.global_batch")
