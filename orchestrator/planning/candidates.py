"""The layouts that a plan considers: the one given by hand, or all degrees that the workers allow. Torch-free."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from orchestrator.job.spec import JobSpec, ParallelSpec
from orchestrator.planning.engine_rules import engine_problems
from orchestrator.planning.layout import Layout, ModelShape, divisors, fit, split_problems

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)


def candidates(
    spec: JobSpec,
    shape: ModelShape,
    workers: int,
    reject: Callable[[tuple[Layout, str]], None],
    is_tight: Callable[[Layout], bool],
) -> Iterator[Layout]:
    """Every layout to consider on at most `workers` ranks. Degrees that the model cannot have at all are rejected with
    the reason; state is offloaded where memory `is_tight`."""
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
    pps, cps, tps, eps = (_degrees(shape, workers, axis, reject) for axis in ("pp", "cp", "tp", "ep"))
    recomputes = ("none",) if shape.no_recompute else ("none", "full")
    known: set[Layout] = set()
    for pp, cp, tp, ep in itertools.product(pps, cps, tps, eps):
        replica = pp * cp * tp
        if replica * ep > workers:
            continue
        schedules = ("1f1b", "interleaved") if pp > 1 else ("1f1b",)
        for micro, schedule in itertools.product(micros, schedules):
            degrees = Layout(pp=pp, cp=cp, tp=tp, ep=ep, micro_batch=micro, schedule=schedule)
            layout = fit(degrees, workers, batch, virtual)
            if layout is None or layout in known:  # of several micro-batches that are lowered to one
                continue
            known.add(layout)
            for zero, recompute in itertools.product(range(4), recomputes):
                sharded = dataclasses.replace(layout, zero=zero, recompute=recompute)
                if zero == 0 or layout.dp * cp > 1:
                    yield sharded
                elif not is_tight(sharded):  # alone there is nothing to shard, but DeepSpeed can offload it
                    continue
                yield from _variants(spec, shape, sharded, is_tight)


def _degrees(
    shape: ModelShape, workers: int, axis: str, reject: Callable[[tuple[Layout, str]], None]
) -> list[int]:
    """The degrees of an axis that the model can have, whatever the others are."""
    if axis == "ep":
        return [ways for ways in divisors(shape.experts) if ways <= workers] if shape.experts else [1]
    found = []
    for ways in divisors(workers):
        alone = Layout.from_json({axis: ways})
        if problems := split_problems(alone, shape):
            reject((alone, problems[0]))
        else:
            found.append(ways)
    return found


def _variants(
    spec: JobSpec, shape: ModelShape, layout: Layout, is_tight: Callable[[Layout], bool]
) -> Iterator[Layout]:
    """The legal variants of a layout: on DeepSpeed, and with state offloaded if a GPU's memory does not suffice."""
    gpu = spec.resources.per_worker.gpu and spec.train.determinism != "bitwise"
    offloads = ("none", "optimizer", "parameters") if gpu and is_tight(layout) else ("none",)
    # DeepSpeed is data parallel only, and shards at least optimiser state
    engines = ("torch", "deepspeed") if layout.zero and layout.dp == layout.world else ("torch",)
    for engine, offload in itertools.product(engines, offloads):
        if engine == "torch" and offload in ("none", "parameters"):
            continue
        other = dataclasses.replace(layout, engine=engine, offload=offload)
        if not other.problems(shape, spec.train.global_batch) and not engine_problems(spec, other):
            yield other
