"""The layouts that a plan considers: the one that the job gives, or all that agree with its pinned keys. Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.parallel.config import ParallelSpec
from orchestrator.parallel.cuts import cuts, layers_by_rank
from orchestrator.parallel.layout import Layout, ModelShape, divisors, split_problems
from orchestrator.parallel.legal_layouts import fit, shard_of, uneven
from orchestrator.planner.demand import Demand

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SEARCHED_SCHEDULES = ("1f1b", "interleaved", "zbv")
"""Schedules in a search: each other one is slower than one of these and needs no less memory."""
SEARCHED_VIRTUAL = 4
"""Stages per rank of interleaved schedules in a search."""
SAFE_SHARE = 0.84
"""Share of the offered memory that a layout with partial recomputation may need. Such a layout is built to use nearly
all that it may, and a trace may find so much more than the formula (docs/predictions.md)."""


MAX_OVERSIZE = 1.5
"""Ratio of needed to offered memory beyond which no other cut of the pipeline is tried: it moves too few layers."""


@dataclass(frozen=True)
class LayoutEstimates:
    """Questions of the search about a layout.

    Attributes:
        share: needed memory / offered memory.
        ends: times of embedding and head, in layers.
    """

    share: Callable[[Layout], float]
    ends: Callable[[Layout], tuple[float, float]]

    def is_tight(self, layout: Layout) -> bool:
        """Whether the layout does not fit."""
        return self.share(layout) > 1.0


@dataclass(frozen=True)
class Family:
    """Layouts that differ only in sharding, recomputation, offload, the cut of the pipeline and the engine.

    Attributes:
        fastest: for each cut a layout whose passes take the least time, for the lower bound; it need not be in the
            family.
        layouts: returns the layouts.
    """

    fastest: tuple[Layout, ...]
    layouts: Callable[[], Iterator[Layout]]


@dataclass(frozen=True)
class Degrees:
    """All families with the same degrees of parallelism (pp, cp, tp, ep).

    Attributes:
        fastest: a layout whose passes take the least time over all ranks of a pipeline, for the lower bound.
        families: returns the families.
    """

    fastest: Layout
    families: Callable[[], Iterator[Family]]


def all_degrees(
    demand: Demand,
    shape: ModelShape,
    workers: int,
    per_node: int,
    reject: Callable[[tuple[Layout, str]], None],
    estimates: LayoutEstimates,
) -> Iterator[Degrees]:
    """Yield every layout to consider, by degrees.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of the model.
        workers: maximum number of ranks.
        per_node: ranks that share a node.
        reject: called with degrees that divide the workers but that the model cannot have, and the reason.
        estimates: says which layouts fit; state is offloaded only if a layout does not.
    """
    batch = demand.batch
    virtual = demand.shards
    micros = [batch // virtual] if virtual else [m for m in MICRO_BATCHES if m <= batch]
    parallel = demand.parallel
    if isinstance(parallel, ParallelSpec) and not parallel.is_partial:
        yield from _pinned(demand, shape, workers, parallel, micros)
        return
    pins = parallel.pins if isinstance(parallel, ParallelSpec) else {}
    micros = [pins["micro_batch"]] if "micro_batch" in pins else micros
    yield from _Families(
        demand, shape, workers=workers, per_node=per_node, micros=micros, pins=pins, estimates=estimates
    ).all(reject)


def _pinned(
    demand: Demand, shape: ModelShape, workers: int, parallel: ParallelSpec, micros: Sequence[int]
) -> Iterator[Degrees]:
    """Yield the layouts of a job that leaves only the width, and perhaps the micro-batch, to the planner."""
    batch = demand.batch
    pinned_layouts = [
        Layout(**{**parallel.pins, "micro_batch": micro})
        for micro in ([parallel.micro_batch] if parallel.micro_batch else micros)
    ]
    # A layout that does not fit the workers is yielded too, so that the error names the reason.
    width = max(workers // (parallel.pp * parallel.cp * parallel.tp), 1)
    layouts = [
        fit(layout_without_dp, workers, batch, demand.shards) or layout_without_dp.but(dp=width)
        for layout_without_dp in pinned_layouts
    ]
    yield Degrees(layouts[-1], partial(map, _single, layouts))
    for layout in _uneven(demand, shape, pinned_layouts[-1], workers=workers, even_width=layouts[-1].dp):
        if not layout.problems(shape, batch):
            yield Degrees(layout, partial(map, _single, [layout]))


def _single(layout: Layout) -> Family:
    """Return the family of one layout."""
    return Family((layout,), partial(iter, (layout,)))


def _uneven(
    demand: Demand, shape: ModelShape, degrees: Layout, workers: int, even_width: int
) -> list[Layout]:
    """Return layouts with more replicas than divide the batch, where a step takes less time with them."""
    if shape.even_shares or demand.shards:
        return []
    return uneven(degrees, workers, demand.batch, even_width)


@dataclass(frozen=True)
class _Families:
    """Enumerates layouts; the fields are the arguments of `all_degrees` and what the job pins."""

    demand: Demand
    shape: ModelShape
    workers: int
    per_node: int
    micros: Sequence[int]
    pins: Mapping[str, Any]
    estimates: LayoutEstimates

    @property
    def _on_gpu(self) -> bool:
        return self.demand.resources.per_worker.gpu > 0

    def all(self, reject: Callable[[tuple[Layout, str]], None]) -> Iterator[Degrees]:
        """Yield all degrees that the model and the workers allow."""
        shape = self.shape
        workers = self.workers
        pins = self.pins
        gpu = self._on_gpu
        axes = [_degrees(shape, workers, axis, pins, reject) for axis in ("pp", "cp", "tp", "ep")]
        recomputes = _choices(pins, "recompute", ("none",) if shape.no_recompute else _recomputes(gpu))
        recompute_layers = pins.get("recompute_layers", 0)
        recomputes = [
            recompute for recompute in recomputes if not recompute_layers or recompute != "none"
        ] or recomputes
        for pp, cp, tp, ep in itertools.product(*axes):
            if pp * cp * tp * ep > workers:
                continue
            # Sequence parallelism is as fast in every prediction and needs less memory, so it is not searched.
            sliced = gpu and tp > 1 and not shape.no_sequence_split and shape.sequence_length % (tp * cp) == 0
            (sequence,) = _choices(pins, "sequence", (sliced,))
            degrees = Layout(pp=pp, cp=cp, tp=tp, ep=ep, sequence=sequence)
            widest = self._widest(degrees)
            if widest is not None:
                widest = widest.but(recompute=recomputes[0], recompute_layers=recompute_layers)
                fitting = _divisors_up_to(self.micros, self.demand.batch // widest.dp)
                yield Degrees(widest, partial(self._families_of, widest, fitting, recomputes))
                for layout in self._uneven(widest):
                    yield Degrees(
                        layout, partial(self._families_of, layout, [layout.micro_batch], recomputes)
                    )

    def _widest(self, degrees: Layout) -> Layout | None:
        """Return the layout with these degrees and the largest dp that leaves enough micro-batches for the schedule.

        It has the largest micro-batch that divides its share of the batch. None if the workers do not suffice.
        """
        batch, virtual = self.demand.batch, self.demand.shards
        micro_batch = self.micros[0] if batch % self.micros[0] == 0 else 1
        widest_degrees = degrees.but(micro_batch=1, schedule=self.pins.get("schedule", degrees.schedule))
        result = fit(widest_degrees, self.workers, batch // micro_batch, virtual)
        if result is None:
            return None
        return degrees.but(dp=result.dp, micro_batch=_divisors_up_to(self.micros, batch // result.dp)[-1])

    def _uneven(self, widest: Layout) -> list[Layout]:
        """See `_uneven`, with the micro-batches that are searched."""
        widest_layout = widest.but(micro_batch=self.micros[-1])
        result = _uneven(self.demand, self.shape, widest_layout, workers=self.workers, even_width=widest.dp)
        return [layout for layout in result if layout.micro_batch in self.micros]

    def _families_of(
        self, widest: Layout, micros: Sequence[int], recomputes: Sequence[str]
    ) -> Iterator[Family]:
        """Yield the families with the degrees of `widest`: one for each micro-batch and schedule."""
        shape = self.shape
        pins = self.pins
        batch = self.demand.batch
        too_large: dict[tuple[str, int, int, int], int] = {}
        for micro, (schedule, stages_per_rank) in itertools.product(
            micros, _schedules(shape, widest.pp, pins)
        ):
            layout = widest.but(micro_batch=micro, schedule=schedule, virtual=stages_per_rank)
            pipeline_cuts = _pipeline_cuts(shape, layout, pins, self.estimates)
            layout = layout.but(first_less=pipeline_cuts[0][0], last_less=pipeline_cuts[0][1])
            if layout.problems(
                shape, batch
            ):  # with any sharding; it is yielded so that the error names the reason
                layout = layout.but(zero=pins.get("zero", 0))
                if self._matches_pins(layout):
                    yield Family((layout,), partial(iter, (layout,)))
                continue
            fastest_by_cut = tuple(
                layout.but(first_less=first, last_less=last) for first, last in pipeline_cuts
            )
            all_layouts = partial(self._layouts_of_family, layout, pipeline_cuts, recomputes, too_large)
            yield Family(fastest_by_cut, partial(self._matching_pins, all_layouts))

    def _matching_pins(self, make_layouts: Callable[[], Iterator[Layout]]) -> Iterator[Layout]:
        return filter(self._matches_pins, make_layouts())

    def _matches_pins(self, layout: Layout) -> bool:
        return all(getattr(layout, key) == value for key, value in self.pins.items())

    def _layouts_of_family(
        self,
        layout: Layout,
        pipeline_cuts: Sequence[tuple[int, int]],
        recomputes: Sequence[str],
        too_large: dict[tuple[str, int, int, int], int],
    ) -> Iterator[Layout]:
        """Yield the layouts of a family, whether or not they agree with the pinned keys.

        Args:
            layout: gives degrees, micro-batch and schedule.
            pipeline_cuts: the cuts of the pipeline to try.
            recomputes: kinds of recomputation, cheapest first.
            too_large: by (schedule, virtual, zero, shard) the smallest micro-batch known not to fit; shared by the
                families with the same degrees.
        """
        shape = self.shape
        pins = self.pins
        estimates = self.estimates
        on_gpu = self._on_gpu
        is_unsharded = layout.dp * layout.cp == 1  # nothing to shard, but DeepSpeed can offload it
        zeros = _choices(pins, "zero", (0,) if is_unsharded and not on_gpu else range(4))
        shards = _choices(pins, "shard", _shards(layout, self.per_node) if on_gpu else (0,))
        for zero, shard in [(z, s) for z in zeros for s in (shards if z > 1 else (0,))]:
            key = (layout.schedule, layout.virtual, zero, shard)
            if layout.micro_batch >= too_large.get(key, math.inf):
                continue
            without_recompute = _with_best_cut(
                layout.but(zero=zero, shard=shard, recompute=recomputes[0]), pipeline_cuts, estimates
            )
            is_tight = estimates.is_tight(without_recompute)
            smallest = (
                _with_best_cut(without_recompute.but(recompute=recomputes[-1]), pipeline_cuts, estimates)
                if is_tight
                else without_recompute
            )
            if is_tight and estimates.is_tight(smallest) and not (on_gpu and _offloads(smallest, estimates)):
                too_large[key] = layout.micro_batch
                if not is_unsharded or zero == zeros[0]:
                    yield smallest  # the variant that needs least, for the error
                continue
            # Recomputation only takes longer, so a layout that fits does without.
            for recompute in recomputes if is_tight else recomputes[:1]:
                sharded = without_recompute
                if recompute != without_recompute.recompute:
                    sharded = (
                        smallest
                        if recompute == smallest.recompute
                        else without_recompute.but(recompute=recompute)
                    )
                    sharded = _with_fewest_recomputed(
                        shape, _with_best_cut(sharded, pipeline_cuts, estimates), pins, estimates
                    )
                if not is_unsharded or zero == zeros[0]:
                    yield sharded
                elif not estimates.is_tight(sharded):
                    continue
                yield from _variants(self.demand, shape, sharded, pins, estimates)


def _schedules(shape: ModelShape, pp: int, pins: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the schedules to try, each with its stages per rank.

    Interleaved schedules get SEARCHED_VIRTUAL stages per rank if the model has enough layers, else two. More stages
    make the bubble shorter and need less memory. Embedding and head may be stages of their own.
    """
    cuts_ends = shape.bare_ends and not {"first_less", "last_less"} & set(pins)
    layers = (shape.stages or shape.layers) + 2 * cuts_ends
    result: list[tuple[str, int]] = []
    for schedule in _choices(pins, "schedule", SEARCHED_SCHEDULES if pp > 1 else ("1f1b",)):
        is_interleaved = pp > 1 and schedule in ("interleaved", "zero_bubble")
        default_virtual = SEARCHED_VIRTUAL if is_interleaved and SEARCHED_VIRTUAL * pp <= layers else 2
        result += [(schedule, virtual) for virtual in _choices(pins, "virtual", (default_virtual,))]
    return result


def _with_best_cut(
    layout: Layout, pipeline_cuts: Sequence[tuple[int, int]], estimates: LayoutEstimates
) -> Layout:
    """Return the layout with the first cut under which it fits, else with the first cut.

    `pipeline_cuts` are sorted by the work of the busiest rank, least first.
    """
    best = layout.but(first_less=pipeline_cuts[0][0], last_less=pipeline_cuts[0][1])
    if len(pipeline_cuts) == 1 or not 1.0 < estimates.share(best) <= MAX_OVERSIZE:
        return best
    other_cuts = (layout.but(first_less=first, last_less=last) for first, last in pipeline_cuts[1:])
    return next(
        (layout_with_cut for layout_with_cut in other_cuts if not estimates.is_tight(layout_with_cut)), best
    )


def _pipeline_cuts(
    shape: ModelShape, layout: Layout, pins: Mapping[str, Any], estimates: LayoutEstimates
) -> Sequence[tuple[int, int]]:
    """Return the cuts of the pipeline to try, as (layers fewer on the first stage, on the last stage)."""
    if layout.pp == 1 or "first_less" in pins or "last_less" in pins or shape.stages not in (0, shape.layers):
        return ((pins.get("first_less", 0), pins.get("last_less", 1)),)
    first, head = estimates.ends(layout)
    return cuts(
        shape.layers,
        layout.pp,
        layout.schedule,
        virtual=layout.virtual,
        first=first,
        head=head,
        bare_ends=shape.bare_ends,
    )


def _with_fewest_recomputed(
    shape: ModelShape, layout: Layout, pins: Mapping[str, Any], estimates: LayoutEstimates
) -> Layout:
    """Return the layout with the fewest recomputed layers that fit.

    The needed memory falls with their number, for the fullest rank at first at least as fast as later. It is therefore
    below the line from none to all layers: with n layers, needs N (none) and E (all) and SAFE_SHARE as the limit,
    ceil(n (N - SAFE_SHARE) / (N - E)) recomputed layers are enough.
    """
    if layout.recompute == "none" or {"recompute_layers", "recompute"} & set(pins):
        return layout
    layers_per_stage = -(-max(layers_by_rank(shape.layers, layout)) // (layout.stages // layout.pp))
    share_without = estimates.share(layout.but(recompute="none"))
    share_with_all = estimates.share(layout)
    if (
        share_with_all > SAFE_SHARE
        or share_without <= share_with_all
        or shape.stages not in (0, shape.layers)
    ):
        return layout
    recomputed_layers = math.ceil(
        layers_per_stage * (share_without - SAFE_SHARE) / (share_without - share_with_all)
    )
    return (
        layout.but(recompute_layers=max(recomputed_layers, 1))
        if recomputed_layers < layers_per_stage
        else layout
    )


def _divisors_up_to(micros: Sequence[int], share: int) -> list[int]:
    """Return for each micro-batch the largest divisor of `share` up to it, without duplicates, ascending."""
    return sorted({max(d for d in divisors(share) if d <= micro) for micro in micros})


def _offloads(layout: Layout, estimates: LayoutEstimates) -> bool:
    """Whether the layout fits if everything possible is offloaded to the host's memory."""
    if layout.dp < layout.world:
        return not estimates.is_tight(layout.but(offload="optimizer"))
    return not estimates.is_tight(layout.but(engine="deepspeed", offload="parameters"))


def _choices(pins: Mapping[str, Any], key: str, default: Sequence[Any]) -> Sequence[Any]:
    return [pins[key]] if key in pins else default


def _shards(layout: Layout, per_node: int) -> tuple[int, ...]:
    """Return over how many replicas ZeRO may shard: all (0), and those of one node, which have a faster network."""
    return tuple({0, shard_of(layout, per_node // layout.tp)})


def _recomputes(gpu: bool) -> tuple[str, ...]:
    return ("none", "selective", "full") if gpu else ("none", "full")


def _degrees(
    shape: ModelShape,
    workers: int,
    axis: str,
    pins: Mapping[str, Any],
    reject: Callable[[tuple[Layout, str]], None],
) -> list[int]:
    """Return the degrees of an axis that the model can have, whatever those of the other axes.

    Degrees need not divide the workers. Of 63 workers, 60 in pipelines of 15 may be more useful than all of them in
    pipelines of 7, if the batch does not divide into the latter.
    """
    requested = _choices(pins, axis, divisors(workers) if axis != "ep" else ())
    possible = {} if axis in pins else dict.fromkeys(_possible_degrees(shape, axis))
    cut = {key: pins[key] for key in ("first_less", "last_less") if key in pins and axis == "pp"}
    result = []
    for degree in sorted({*requested, *possible}):
        layout = Layout.from_json({axis: degree, "dp": degree if axis == "ep" else 1, **cut})
        if problems := split_problems(layout, shape):
            if degree in requested:
                reject((layout, problems[0]))
        elif degree <= workers:
            result.append(degree)
        elif degree in requested:
            reject((layout, f"{axis} {degree} needs {degree} workers of {workers}; lower it, or add workers"))
    return result


def _possible_degrees(shape: ModelShape, axis: str) -> Sequence[int]:
    """Return a superset of the degrees of an axis that the model can have."""
    if axis == "ep":
        return divisors(shape.experts) if shape.experts else (1,)
    if axis == "pp":
        return range(1, (shape.stages or shape.layers) + 1)
    if axis == "tp":
        return divisors(shape.feedforward)
    return (1, *(degree for degree in divisors(shape.sequence_length) if 2 * degree <= shape.sequence_length))


def _variants(
    demand: Demand,
    shape: ModelShape,
    layout: Layout,
    pins: Mapping[str, Any],
    estimates: LayoutEstimates,
) -> Iterator[Layout]:
    """Yield the legal variants of a layout: on DeepSpeed, and with offloaded state if a GPU's memory is too small."""
    on_gpu = demand.on_gpu and not demand.shards
    is_tight = on_gpu and "offload" not in pins and estimates.is_tight(layout)
    offloads = _choices(pins, "offload", ("none", "optimizer", "parameters") if is_tight else ("none",))
    # The DeepSpeed engine is data parallel only, and shards at least the optimizer state.
    engines = ("torch", "deepspeed") if layout.zero and layout.dp == layout.world else ("torch",)
    for engine, offload in itertools.product(engines, offloads):
        if engine == "torch" and offload in ("none", "parameters"):
            continue
        variant = layout.but(engine=engine, offload=offload)
        if not variant.problems(shape, demand.batch) and not demand.engine_problems(variant):
            yield variant
