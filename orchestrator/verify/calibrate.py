"""Measure this machine, and derive the profile of a core for the planner.

Rates come from operators timed in isolation, links from all-reduces between two processes. The cost of a kernel launch
and the number of memory passes are fitted to steps of small models, because autograd and Python take most of a small
step.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster.workers.gang import Bundle
from cluster.workers.run_local_gang import run_to_the_end
from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import Link, Machine
from orchestrator.planner.device_profile import Profile, load
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.planner.simulation.operators import Program, needed_flops
from orchestrator.planner.simulation.step import step_time
from workloads.describe import describe

RANK = "orchestrator.verify.calibration_rank:measure"
TIMEOUT = 120.0
"""Seconds without a message from a rank after which the measurement stops."""
LAUNCHES = [1e-6 * 1.25**n for n in range(28)]
"""Candidates for the seconds of a kernel launch."""
PASSES = [1.25**n for n in range(13)]
"""Candidates for how often element-wise operations move their bytes through memory."""
SMALL: tuple[dict[str, Any], ...] = tuple(
    {
        "hidden": hidden, "layers": layers, "heads": heads, "intermediate": 4 * hidden, "vocab_size": vocabulary,
        "length": length, "batch": batch,
    }
    for hidden, layers, heads, vocabulary, length, batch in (
        (64, 2, 4, 512, 64, 2), (64, 6, 4, 512, 64, 8), (128, 4, 4, 1024, 128, 8), (256, 2, 8, 4096, 128, 4),
        (256, 4, 8, 1024, 256, 4), (384, 3, 6, 2048, 128, 8),
    )
)  # fmt: skip
"""Small models whose steps the calibration measures."""

ALONE = (
    *((options, Layout(micro_batch=options["batch"])) for options in SMALL),
    (SMALL[1], Layout(micro_batch=1)),
    (SMALL[2], Layout(micro_batch=2)),
    ({**SMALL[2], "model": "llama-tiny"}, Layout(micro_batch=4)),
    ({**SMALL[3], "model": "mixtral-tiny"}, Layout(micro_batch=4)),
)
"""Jobs of one process. Many micro-batches separate the cost of launches from the cost of computation."""

NARROW = tuple(
    ({**options, "precision": "bf16"}, layout)
    for options, layout in (
        (SMALL[1], Layout(micro_batch=2)),
        (SMALL[2], Layout(micro_batch=8)),
        (SMALL[4], Layout(micro_batch=4)),
        (SMALL[5], Layout(micro_batch=2)),
        ({**SMALL[2], "model": "llama-tiny"}, Layout(micro_batch=2)),
        ({**SMALL[4], "model": "llama-tiny"}, Layout(micro_batch=4)),
    )
)
"""The same jobs in 16 bits."""

PAIRED = (
    (SMALL[1], Layout(tp=2, micro_batch=4)),
    (SMALL[3], Layout(tp=2, micro_batch=4)),
    (SMALL[4], Layout(tp=2, micro_batch=2)),
    (SMALL[2], Layout(tp=2, micro_batch=4, sequence=True)),
    (SMALL[5], Layout(tp=2, micro_batch=4, sequence=True)),
    (SMALL[2], Layout(dp=2, micro_batch=2, zero=3)),
    (SMALL[4], Layout(dp=2, micro_batch=1, zero=2)),
    (SMALL[1], Layout(dp=2, micro_batch=4, zero=1)),
    (SMALL[4], Layout(dp=2, micro_batch=2)),
    (SMALL[1], Layout(pp=2, micro_batch=1)),
    (SMALL[2], Layout(pp=2, micro_batch=2)),
    (SMALL[4], Layout(pp=2, micro_batch=1, schedule="gpipe")),
    (SMALL[2], Layout(pp=2, micro_batch=1, schedule="interleaved")),
    (SMALL[1], Layout(pp=2, micro_batch=2, schedule="interleaved")),
)
"""Jobs of two processes whose steps the calibration measures."""
PAIRED_ROUNDS = 4
"""Measured steps of each job, after the first two."""
BEGINNINGS = [2e-5 * 1.1**n for n in range(66)]
"""Candidates for the seconds to start a collective. Every second one is a candidate for a message between stages."""
WAKINGS = [0.05 * n for n in range(17)]
"""Candidates for how much computation before a collective delays it, as a share of the computation."""
CROWDINGS = [1.0 + 0.1 * n for n in range(16)]
"""Candidates for the slowdown of memory and launches when other processes run."""
OVERHEADS = [0.0, *(2e-7 * 1.25**n for n in range(20))]
"""Candidates for the seconds of a matrix product beyond its arithmetic."""
SHARES = (0.5, 0.75, 1.0)
"""Candidates for the share of the bandwidth that large messages reach."""
LEAST_DELAY = 0.001
"""The smallest relative delay of a rank that a profile stores. A run could not refine a zero."""


def calibrate() -> Profile:
    """Measure the profile of a core of this machine, in about a minute. Raises RuntimeError if a measurement fails."""
    steps = [{"job": options, "layout": layout.to_json()} for options, layout in (*ALONE, *NARROW)]
    alone = measured(1, {"operators": True, "steps": steps})
    paired = [{"job": options, "layout": layout.to_json()} for options, layout in PAIRED]
    # Thread wake-up times depend on where the kernel placed the threads, so measure twice, in new processes.
    first = measured(2, {"collectives": True, "steps": paired, "rounds": PAIRED_ROUNDS})
    again = measured(2, {"steps": paired, "rounds": PAIRED_ROUNDS})
    medians = [(a[1] + b[1]) / 2.0 for a, b in zip(first["steps"], again["steps"], strict=True)]
    delay = statistics.median(seconds[-1] for seconds in alone["steps"] if seconds)
    fastest = [seconds[0] if seconds else None for seconds in alone["steps"]]
    profile = profile_of(alone["operators"], first["collectives"], fastest, delay)
    return with_messages(profile, medians)


def measured(world: int, config: dict[str, Any]) -> Any:
    """Return the measurements of rank 0 of `world` processes on this machine; see `calibration_rank.measure`."""
    return run_to_the_end(world, Bundle(1), entry=RANK, config=config, patience=TIMEOUT, work="measurement")[
        1
    ]


def profile_of(
    operators: dict[str, Any],
    messages: Sequence[tuple[float, float]],
    steps: Sequence[float | None],
    delay: float,
) -> Profile:
    """Return the profile that follows from these measurements.

    `steps` are the shortest seconds of each job of ALONE and NARROW, None for jobs that take too long. `delay` is a
    rank's relative delay.
    """
    rates = rates_of(operators["matrix"])
    peaks = {name: max(rate for _, rate in pairs) for name, pairs in rates.items()}
    # a cache that holds a small model is faster than main memory
    bandwidth = max(operators["copy"], operators["elements"], operators["optimizer"])
    latency, speed = link_of(messages)
    document = load("cpu-core").model_dump()
    by = "measured by orchestrator calibrate"
    document |= {
        "name": "this-machine",
        "device": "a core of this machine",
        "peak": {"bf16": peaks["bf16"], "fp16": peaks["bf16"], "fp32": peaks["fp32"], "source": by},
        "matrix": {"share": 1.0, "half_size": half_size(rates["fp32"], peaks["fp32"]), "source": by},
        "attention": {
            **attention_of(operators["attention"], peaks["fp32"]),
            "score_bytes": 0.0,
            "source": by,
        },
        "memory_bandwidth": {"value": bandwidth, "source": by},
        "element_share": {"value": operators["elements"] / bandwidth, "source": by},
        "optimizer_share": {"value": operators["optimizer"] / bandwidth, "source": by},
        "inside": {"latency": latency, "bandwidth": speed, "source": by},
        "delay": {"value": max(delay, LEAST_DELAY), "source": by},
    }
    fitted = f"fitted to steps {by}"
    launch, passes = _launch_and_passes(Profile.model_validate(document), "fp32", ALONE, steps[: len(ALONE)])
    document["launch"] = {"value": launch, "source": fitted}
    document["eager"] = {"value": passes, "source": fitted}
    narrow = {"half_size": half_size(rates["bf16"], peaks["bf16"]), "launch": launch, "eager": passes}
    document["narrow"] = {**narrow, "source": fitted}
    narrow_steps = steps[len(ALONE) :]
    if sum(seconds is not None for seconds in narrow_steps) > 1:  # two figures need two steps
        launch_and_passes = _launch_and_passes(Profile.model_validate(document), "bf16", NARROW, narrow_steps)
        document["narrow"] |= dict(zip(("launch", "eager"), launch_and_passes, strict=True))
    return Profile.model_validate(document)


def rates_of(matrix: Mapping[str, Sequence[Any]]) -> dict[str, list[tuple[Sequence[int], float]]]:
    """Return the sizes and the FLOP/s of each measured matrix product, by precision."""
    return {
        name: [(sizes, 2.0 * math.prod(sizes) / seconds) for sizes, seconds in measurements]
        for name, measurements in matrix.items()
    }


def attention_of(measured: Sequence[Sequence[float]], peak: float) -> dict[str, float]:
    """Return the share of the peak that attention's products reach, and the other seconds of each score.

    `measured` has the seconds for a pair of tokens with a small and with a large head size. Seconds are linear in the
    head size: the slope is the cost of the products, and the intercept that of the softmax.
    """
    # A pair of tokens takes 4 FLOPs per element of a head: 2 for q k^T and 2 for the product with v.
    (small, seconds), (large, longer) = measured
    product = max((longer - seconds) / (4.0 * (large - small)), 1.0 / peak)
    return {"share": 1.0 / (product * peak), "score_seconds": max(seconds - 4.0 * small * product, 0.0)}


def half_size(rates: Sequence[tuple[Sequence[int], float]], peak: float) -> float:
    """Return the size at which a matrix product reaches half of the peak, by least squares of logarithms.

    The fixed overhead of a product is fitted with it and dropped, because the launch cost covers it.
    """

    def error(tried: tuple[float, float]) -> float:
        half, overhead = tried
        result = 0.0
        for sizes, rate in rates:
            flops = 2.0 * math.prod(sizes)
            # A dimension of n reaches n / (n + half) of the peak, and the three dimensions multiply.
            share = math.prod(size / (size + half) for size in sizes)
            result += math.log((overhead + flops / (peak * share)) * rate / flops) ** 2
        return result

    return min(itertools.product((0.5 * 1.1**n for n in range(60)), OVERHEADS), key=error)[0]


def link_of(messages: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return latency and bandwidth from all-reduces over two ranks, each of which sends the tensor's bytes once."""
    latency = min(seconds for _, seconds in messages) / 2.0
    size, seconds = max(messages)
    return latency, size / max(seconds - 2.0 * latency, 1e-9)


def with_messages(profile: Profile, steps: Sequence[float]) -> Profile:
    """Return the profile with the communication figures that fit the median steps of two processes best.

    The figures are the start of a collective, the start of a message between stages, the bandwidth, the waking and the
    crowding. Within a step, sleeping threads wake up, messages wait for the slower process, and both processes share
    the memory. Medians are used, because the shortest step is one in which all waits happened to be short.
    """
    machine = profile.machine("fp32")
    jobs = [
        (*predicted_with(options), layout, seconds)
        for (options, layout), seconds in zip(PAIRED, steps, strict=True)
    ]
    flat = [job for job in jobs if job[3].pp == 1]
    staged = [job for job in jobs if job[3].pp > 1]

    fits = []
    for share, crowding in itertools.product(SHARES, CROWDINGS):
        link = Link(machine.inside.latency, share * machine.inside.bandwidth)
        tried = replace(machine, inside=link, crowding=crowding)
        parts = [(*_by_collectives(job, tried), job[-1]) for job in flat]
        error, collective, waking = min(
            (
                sum(
                    abs(math.log((constant + a * begins + b * more) / real)) for constant, a, b, real in parts
                ),
                begins,
                more,
            )
            for begins, more in itertools.product(BEGINNINGS, WAKINGS)
        )
        stage_error, message = min(
            (_error(staged, replace(tried, message=begins)), begins) for begins in BEGINNINGS[::2]
        )
        fits.append((error + stage_error, collective, waking, message, link.bandwidth, crowding))
    _, collective, waking, message, bandwidth, crowding = min(fits)
    source = "fitted to steps of two processes measured by orchestrator calibrate"
    document = profile.model_dump()
    fitted = {"collective": collective, "waking": waking, "message": message, "crowding": crowding}
    document |= {name: {"value": value, "source": source} for name, value in fitted.items()}
    document["inside"] |= {"bandwidth": bandwidth, "source": f"{source}; latency alone"}
    return Profile.model_validate(document)


Measured = tuple[ModelShape, int, Program, Layout, float]


def _by_collectives(job: Measured, machine: Machine) -> tuple[float, float, float]:
    """Return the predicted step without a pipeline as a linear function of `collective` and `waking`.

    The result is its seconds with both at zero, and the coefficient of each.
    """
    shape, batch, program, layout, _ = job
    constant, with_collective, with_waking = (
        step_time(shape, layout, batch, replace(machine, collective=begins, waking=more), program).seconds
        for begins, more in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    )
    return constant, with_collective - constant, with_waking - constant


def _error(jobs: Sequence[Measured], machine: Machine) -> float:
    """Return the distance of predicted from measured steps: the sum of |log(predicted / measured)|."""
    return sum(
        abs(math.log(step_time(shape, layout, batch, machine, program).seconds / seconds))
        for shape, batch, program, layout, seconds in jobs
    )


def _launch_and_passes(
    profile: Profile,
    precision: str,
    measured: Sequence[tuple[dict[str, Any], Layout]],
    steps: Sequence[float | None],
) -> tuple[float, float]:
    """Return the seconds of a launch and the number of memory passes that fit the measured steps best.

    `steps` are the shortest of each job. A coarse grid search is followed by a finer one around its best point.
    """
    machine = replace(profile.machine(precision), delay=0.0)
    jobs = [
        (*predicted_with(options), layout, seconds)
        for (options, layout), seconds in zip(measured, steps, strict=True)
        if seconds is not None
    ]

    def error(tried: tuple[float, float]) -> float:
        return _error(jobs, replace(machine, launch=tried[0], eager=tried[1]))

    launch, passes = min(itertools.product(LAUNCHES[::4], PASSES[::4]), key=error)
    finer = [1.25**n for n in range(-3, 4)]
    return min(((launch * a, max(passes * b, 1.0)) for a in finer for b in finer), key=error)


def job(
    length: int = 128,
    batch: int = 8,
    dropout: float = 0.0,
    precision: str = "fp32",
    model: str = "gpt-tiny",
    **changes: Any,
) -> JobSpec:
    """Return a job of a small model with these changes."""
    return parse(
        {
            "name": "calibration",
            "workload": {
                "model": model,
                "changes": {"max_positions": length, **changes},
                "dropout": dropout,
            },
            "data": {"sources": [{"uri": "none"}], "tokenizer": "none", "sequence_length": length},
            "train": {"steps": 1000, "global_batch": batch, "precision": precision},
        }
    )


def predicted_with(options: dict[str, Any]) -> tuple[ModelShape, int, Program]:
    """Return the model's shape, the batch and the program of a measured job."""
    spec = job(**options)
    config = describe(spec.workload.model, spec.workload.changes, objective="causal_lm")
    program = replace(demand_of(spec).program, commit_every=0)
    return model_shape(config, spec.data.sequence_length), spec.train.global_batch, program


def needed_flops_of(job: dict[str, Any]) -> float:
    """Return the FLOPs of a step of a measured job."""
    shape, batch, _ = predicted_with(job)
    return needed_flops(shape) * batch * shape.sequence_length


def predicted(machine: Machine, job: dict[str, Any], layout: Layout) -> float:
    """Return the predicted seconds of a step of a measured job."""
    shape, batch, program = predicted_with(job)
    return step_time(shape, layout, batch, machine, program).seconds
