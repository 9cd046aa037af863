"""The memory of a deep model, extrapolated from traces with fewer layers.

Each additional layer of a stage adds a constant number of bytes at the beginning of a pass, and a constant number at
its end; a pass peaks at one of these. A pipeline holds the buffers of all micro-batches from the first step on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.config.errors import InputError
from orchestrator.parallel.layout import Layout
from orchestrator.planner.step_trace import CATEGORIES, Crest, Memory, Place, StepTrace
from orchestrator.resolve.resolved_job import ResolvedJob
from workloads.errors import WorkloadError
from workloads.model.config import TransformerConfig

FEW, MORE = 4, 2
"""Layers of a stage in the first trace, and additional layers in the second: FSDP2 holds up to three at a time."""


@dataclass(frozen=True)
class Depths:
    """Two shallower models; the whole model is the first plus `times` the difference of the two."""

    few: TransformerConfig
    more: TransformerConfig
    times: float


def depths_of(job: ResolvedJob, layout: Layout) -> Depths | None:
    """Return the shallower models of a job, from which its memory is extrapolated.

    None if the model is not deep enough, or if its layers differ.
    """
    config = job.model.as_transformer
    if config is None or job.spec.train.freeze or job.spec.workload.adapter:
        return None
    stacks = (config.layers, config.decoder_layers) if config.decoder_layers else (config.layers,)
    if len(stacks) > 1 and layout.pp > 1:
        return None
    thin = min(stacks if layout.pp == 1 else filter(None, _by_stage(config.layers, layout)))
    unit, first = (config.moe.every, config.moe.first) if config.moe else (1, 0)
    # all layers after the recomputed ones are equal
    few = max(FEW + layout.recompute_layers, first + 1)
    removed = (thin - few) // unit * unit
    step = -(-MORE // unit) * unit
    if removed <= 2 * step:
        return None
    try:
        shallow, deeper = (_without(config, layout, count) for count in (removed, removed - step))
    except (WorkloadError, InputError):
        return None
    return Depths(shallow, deeper, removed / step) if shallow and deeper else None


def _by_stage(layers: int, layout: Layout) -> tuple[int, ...]:
    return tuple(layout.layers_of(layers, number)[1] for number in range(layout.stages))


def _without(config: TransformerConfig, layout: Layout, count: int) -> TransformerConfig | None:
    """Return the model with `count` fewer layers in each stack, of a pipeline in each stage that has layers.

    None if a stage without layers would get some of those that are left.
    """
    if layout.pp == 1:
        decoder = config.decoder_layers - count if config.decoder_layers else 0
        return dataclasses.replace(config, layers=config.layers - count, decoder_layers=decoder)
    fewer = [max(layers - count, 0) for layers in _by_stage(config.layers, layout)]
    is_cut_alike = _by_stage(sum(fewer), layout) == tuple(fewer)
    return dataclasses.replace(config, layers=sum(fewer)) if is_cut_alike else None


def deepened(few: StepTrace, more: StepTrace, times: float) -> StepTrace:
    """Return the trace of the whole model: memory extrapolated linearly from `few` to `more`, events of `more`.

    `times` is how many times the difference of the two is added to `few`.
    """

    candidates, others_of = [], _passes(more)
    for place, crests in _passes(few).items():
        others, half = others_of.get(place, []), (len(crests) + 1) // 2
        # A pass peaks near its beginning or its end. Each half is extrapolated from its own peak, because growth per
        # layer may differ between them.
        if len(others) >= half:
            for one, other in ((crests[:half], others[:half]), (crests[-half:], others[-half:])):
                parts = zip(CATEGORIES, _highest(one), _highest(other), strict=True)
                candidates.append((place, {category: _on(a, b, times) for category, a, b in parts}))
    (phase, stage, micro_batch), at_peak = max(candidates, key=lambda each: sum(each[1].values()))
    steady = _each(few.memory.steady, more.memory.steady, times)
    memory = Memory(
        sum(at_peak.values()), at_peak, steady=steady, phase=phase, stage=stage, micro_batch=micro_batch
    )
    return dataclasses.replace(more, memory=memory, crests=(), saved=_on(few.saved, more.saved, times))


def further(trace: StepTrace, few: StepTrace, more: StepTrace, times: float) -> StepTrace:
    """Return `trace`, that of a full pipeline, extended by more micro-batches.

    Their number is `times` the difference of `few` and `more`. What each additional micro-batch holds does not depend
    on the model's depth, so shallow traces measure it.
    """
    at_peak = _grown(trace.memory.at_peak, few.memory.at_peak, more.memory.at_peak, times)
    place, a, b = (each.memory.micro_batch for each in (trace, few, more))
    memory = dataclasses.replace(
        trace.memory,
        micro_batch=None if place is None or a is None or b is None else place + _on(0, b - a, times),
        peak=sum(at_peak.values()),
        at_peak=at_peak,
        steady=_grown(trace.memory.steady, few.memory.steady, more.memory.steady, times),
    )
    return dataclasses.replace(trace, memory=memory, crests=())


def with_batches(trace: StepTrace, count: int) -> StepTrace:
    """Return the trace with additional micro-batches that the rank holds between forward and backward pass."""
    memory, size = trace.memory, count * trace.batch_bytes
    at_peak, steady = dict(memory.at_peak), dict(memory.steady)
    at_peak["other"] += size
    steady["other"] += size
    return dataclasses.replace(
        trace, memory=dataclasses.replace(memory, peak=memory.peak + size, at_peak=at_peak, steady=steady)
    )


def _grown(
    found: Mapping[str, int], a: Mapping[str, int], b: Mapping[str, int], times: float
) -> dict[str, int]:
    return {category: found[category] + _on(0, b[category] - a[category], times) for category in CATEGORIES}


def _on(a: float, b: float, times: float) -> int:
    """Return the value at `times` along the line through `a` (at 0) and `b` (at 1)."""
    return round(a + times * (b - a))


def _each(a: Mapping[str, int], b: Mapping[str, int], times: float) -> dict[str, int]:
    return {category: _on(a[category], b[category], times) for category in CATEGORIES}


def _passes(trace: StepTrace) -> dict[Place, list[Crest]]:
    result: dict[Place, list[Crest]] = {}
    for crest in trace.crests:
        result.setdefault(crest[0], []).append(crest)
    return result


def _highest(crests: list[Crest]) -> tuple[int, ...]:
    return max(crests, key=lambda crest: crest[1])[2]
