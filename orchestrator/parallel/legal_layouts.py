"""Enumeration of layouts: all legal ones of a world, the widest for some workers, and those nearest to an illegal one.

Standard library only, like `layout`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from orchestrator.parallel.layout import SCHEDULES, Layout, ModelShape, batch_problems, divisors


def legal(
    shape: ModelShape, world: int, global_batch: int, micro_batches: Sequence[int] = (1,)
) -> Iterator[Layout]:
    """Yield every legal layout of a model, without recomputation.

    Args:
        shape: the sizes of the model.
        world: the exact number of ranks.
        global_batch: number of samples per step.
        micro_batches: the micro-batch sizes to try, in samples.
    """
    degrees = divisors(world)
    for pp, cp, tp in itertools.product(degrees, degrees, degrees):
        if world % (pp * cp * tp):
            continue
        dp = world // (pp * cp * tp)
        schedules = SCHEDULES if pp > 1 else ("1f1b",)
        zeros = range(4) if dp * cp > 1 else range(1)
        experts = divisors(dp) if shape.experts else [1]
        sliced = (False, True) if tp > 1 else (False,)
        for ep, zero, schedule, sequence, micro in itertools.product(
            experts, zeros, schedules, sliced, micro_batches
        ):
            layout = Layout(
                pp,
                dp,
                cp=cp,
                tp=tp,
                ep=ep,
                zero=zero,
                micro_batch=micro,
                schedule=schedule,
                sequence=sequence,
            )
            if not layout.problems(shape, global_batch):
                yield layout


def nearest(
    layout: Layout,
    shape: ModelShape,
    global_batch: int,
    refused: Callable[[Layout], object],
    micro_batches: Sequence[int] = (),
    count: int = 3,
) -> list[Layout]:
    """Return the legal layouts on the same number of ranks that are nearest to an illegal one.

    The distance counts factors of two in the degrees first, and then the other options that differ.

    Args:
        layout: the illegal layout.
        shape: the sizes of the model.
        global_batch: samples in a step.
        refused: returns a true value for a layout under which the job cannot run although the model can.
        micro_batches: possible micro-batches of the job; by default the layout's, half of it, and one.
        count: maximum number of layouts.
    """

    def distance(other: Layout) -> tuple[float, int, str]:
        degrees = ("pp", "dp", "cp", "tp", "ep", "micro_batch")
        # Doubling or halving one degree is one step.
        steps = sum(abs(math.log2(getattr(other, d) / getattr(layout, d))) for d in degrees)
        other_options = sum(
            getattr(other, d) != getattr(layout, d) for d in ("zero", "schedule", "sequence", "offload")
        )
        return steps, other_options, str(other)

    micros = micro_batches or sorted({1, layout.micro_batch, max(layout.micro_batch // 2, 1)})
    alternatives = (
        dataclasses.replace(other, recompute=layout.recompute, engine=layout.engine, offload=offload)
        for other in legal(shape, layout.world, global_batch, micros)
        for offload in {layout.offload, "none"}
    )
    legal_ones = (o for o in alternatives if not o.problems(shape, global_batch) and not refused(o))
    return sorted(legal_ones, key=distance)[:count]


def fit(degrees: Layout, workers: int, global_batch: int, virtual_shards: int = 0) -> Layout | None:
    """Return the widest data-parallel layout with given pp, cp, tp and ep degrees; None if no width fits.

    The width divides the global batch, which never changes, and the number of virtual shards if there are any. A
    micro-batch that does not divide a rank's share is lowered to the largest one that does, and so is `shard`. A width
    that leaves too few micro-batches for the pipeline is used only if every width does.

    Args:
        degrees: a layout with the degrees and all other options.
        workers: maximum number of ranks.
        global_batch: number of samples per step.
        virtual_shards: number of virtual shards of bitwise determinism; 0 for none.
    """
    replica = degrees.pp * degrees.cp * degrees.tp
    widest = None
    for width in reversed(divisors(global_batch)):
        if width * replica > workers or width % degrees.ep or virtual_shards % width:
            continue
        share = global_batch // width
        micro = max(d for d in divisors(share) if d <= degrees.micro_batch)
        result = degrees.but(dp=width, micro_batch=micro)
        widest = widest or result
        if not batch_problems(result, global_batch):
            return result.but(shard=shard_of(result, degrees.shard))
    return widest and widest.but(shard=shard_of(widest, degrees.shard))


def uneven(degrees: Layout, workers: int, global_batch: int, even_width: int) -> list[Layout]:
    """Return layouts on all `workers` ranks whose replicas compute different numbers of samples.

    A step takes as long as the rank with the most samples. So there is one layout for each micro-batch with which that
    rank has fewer samples than under `even_width` replicas, a width that divides the global batch.

    Args:
        degrees: the degrees that stay. Its micro-batch is the largest that is tried.
        workers: number of ranks.
        global_batch: samples of a step.
        even_width: the largest number of replicas that divides the global batch.
    """
    width = min(workers // (degrees.pp * degrees.cp * degrees.tp), global_batch)
    if width <= even_width or degrees.ep > 1:
        return []
    micros = [micro for micro in divisors(global_batch) if micro <= degrees.micro_batch]
    result = [degrees.but(dp=width, micro_batch=micro, shard=0) for micro in reversed(micros)]
    return [
        layout.but(shard=shard_of(layout, degrees.shard))
        for layout in result
        if layout.accumulation(global_batch) * layout.micro_batch < global_batch // even_width
    ]


def shard_of(layout: Layout, max_replicas: int) -> int:
    """Return over how many replicas ZeRO can shard each copy of the weights; 0 for all.

    Args:
        layout: the layout.
        max_replicas: maximum number of replicas that share a copy.
    """
    fits = [
        d for d in divisors(layout.replicas) if 1 < d <= max_replicas and d % (layout.ep * layout.cp) == 0
    ]
    return fits[-1] if fits and fits[-1] < layout.replicas else 0
