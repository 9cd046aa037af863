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
from orchestrator.planner.step_trace import CATEGORIES, Memory, OperatorPeak, Pass, StepTrace
from orchestrator.resolve.resolved_job import ResolvedJob
from workloads.errors import WorkloadError
from workloads.model.config import TransformerConfig

MIN_LAYERS, ADDED_LAYERS = 4, 2
"""Layers of a stage in the first trace, and additional layers in the second: FSDP2 holds up to three at a time."""


@dataclass(frozen=True)
class ShallowModels:
    """Two shallower models; the whole model is the first plus `factor` times the difference of the two."""

    shallow: TransformerConfig
    deeper: TransformerConfig
    factor: float


def shallow_models(job: ResolvedJob, layout: Layout) -> ShallowModels | None:
    """Return the shallower models of a job, from which its memory is extrapolated.

    None if the model is not deep enough, or if its layers differ.

    Args:
        job: the job.
        layout: says how layers are divided into stages.
    """
    config = job.model.as_transformer
    if config is None or job.spec.train.freeze or job.spec.workload.adapter:
        return None
    stacks = (config.layers, config.decoder_layers) if config.decoder_layers else (config.layers,)
    if len(stacks) > 1 and layout.pp > 1:
        return None
    fewest_layers = min(stacks if layout.pp == 1 else filter(None, _by_stage(config.layers, layout)))
    unit, first = (config.moe.every, config.moe.first) if config.moe else (1, 0)
    # all layers after the recomputed ones are equal
    kept_layers = max(MIN_LAYERS + layout.recompute_layers, first + 1)
    removed = (fewest_layers - kept_layers) // unit * unit
    step = -(-ADDED_LAYERS // unit) * unit
    if removed <= 2 * step:
        return None
    try:
        shallow, deeper = (_without(config, layout, count) for count in (removed, removed - step))
    except (WorkloadError, InputError):
        return None
    return ShallowModels(shallow, deeper, removed / step) if shallow and deeper else None


def _by_stage(layers: int, layout: Layout) -> tuple[int, ...]:
    return tuple(layout.layers_of(layers, number)[1] for number in range(layout.stages))


def _without(config: TransformerConfig, layout: Layout, count: int) -> TransformerConfig | None:
    """Return the model with `count` fewer layers in each stack, of a pipeline in each stage that has layers.

    None if a stage without layers would get some of those that are left.
    """
    if layout.pp == 1:
        decoder = config.decoder_layers - count if config.decoder_layers else 0
        return dataclasses.replace(config, layers=config.layers - count, decoder_layers=decoder)
    layers_by_stage = [max(layers - count, 0) for layers in _by_stage(config.layers, layout)]
    is_cut_alike = _by_stage(sum(layers_by_stage), layout) == tuple(layers_by_stage)
    return dataclasses.replace(config, layers=sum(layers_by_stage)) if is_cut_alike else None


def extrapolated_depth(shallow: StepTrace, deeper: StepTrace, factor: float) -> StepTrace:
    """Return the trace of the whole model: memory extrapolated linearly from `shallow` to `deeper`, events of `deeper`.

    Args:
        shallow: the trace of the shallower model.
        deeper: the trace of the deeper one.
        factor: how many times the difference of the two is added to `shallow`.
    """

    candidates = []
    deeper_passes = _passes(deeper)
    for pass_, peaks in _passes(shallow).items():
        deeper_peaks = deeper_passes.get(pass_, [])
        half = (len(peaks) + 1) // 2
        # A pass peaks near its beginning or its end. Each half is extrapolated from its own peak, because growth per
        # layer may differ between them.
        if len(deeper_peaks) >= half:
            for shallow_half, deeper_half in (
                (peaks[:half], deeper_peaks[:half]),
                (peaks[-half:], deeper_peaks[-half:]),
            ):
                parts = zip(CATEGORIES, _highest(shallow_half), _highest(deeper_half), strict=True)
                candidates.append(
                    (pass_, {category: _extrapolated(a, b, factor) for category, a, b in parts})
                )
    (phase, stage, micro_batch), at_peak = max(candidates, key=lambda candidate: sum(candidate[1].values()))
    steady = _all_extrapolated(shallow.memory.steady, deeper.memory.steady, factor)
    memory = Memory(
        sum(at_peak.values()), at_peak, steady=steady, phase=phase, stage=stage, micro_batch=micro_batch
    )
    return dataclasses.replace(
        deeper, memory=memory, operator_peaks=(), saved=_extrapolated(shallow.saved, deeper.saved, factor)
    )


def with_micro_batches(
    trace: StepTrace, fewer: StepTrace, more_batches: StepTrace, factor: float
) -> StepTrace:
    """Return a full pipeline's trace, extended by more micro-batches.

    What each additional micro-batch holds does not depend on the model's depth, so shallow traces measure it.

    Args:
        trace: of the full pipeline.
        fewer: a shallow trace with as many micro-batches.
        more_batches: a shallow trace with more.
        factor: how many times the difference of both is added.
    """
    at_peak = _all_grown(trace.memory.at_peak, fewer.memory.at_peak, more_batches.memory.at_peak, factor)
    last, a, b = (measured.memory.micro_batch for measured in (trace, fewer, more_batches))
    memory = dataclasses.replace(
        trace.memory,
        micro_batch=None
        if last is None or a is None or b is None
        else last + _extrapolated(0, b - a, factor),
        peak=sum(at_peak.values()),
        at_peak=at_peak,
        steady=_all_grown(trace.memory.steady, fewer.memory.steady, more_batches.memory.steady, factor),
    )
    return dataclasses.replace(trace, memory=memory, operator_peaks=())


def with_held_batches(trace: StepTrace, count: int) -> StepTrace:
    """Return the trace with additional micro-batches that the rank holds between forward and backward pass.

    Args:
        trace: of a step.
        count: number of additional micro-batches.
    """
    memory, size = trace.memory, count * trace.batch_bytes
    at_peak = dict(memory.at_peak)
    steady = dict(memory.steady)
    at_peak["other"] += size
    steady["other"] += size
    return dataclasses.replace(
        trace, memory=dataclasses.replace(memory, peak=memory.peak + size, at_peak=at_peak, steady=steady)
    )


def _all_grown(
    bytes_by_category: Mapping[str, int], a: Mapping[str, int], b: Mapping[str, int], factor: float
) -> dict[str, int]:
    return {
        category: bytes_by_category[category] + _extrapolated(0, b[category] - a[category], factor)
        for category in CATEGORIES
    }


def _extrapolated(a: float, b: float, factor: float) -> int:
    """Return the value at `factor` along the line through `a` (at 0) and `b` (at 1)."""
    return round(a + factor * (b - a))


def _all_extrapolated(a: Mapping[str, int], b: Mapping[str, int], factor: float) -> dict[str, int]:
    return {category: _extrapolated(a[category], b[category], factor) for category in CATEGORIES}


def _passes(trace: StepTrace) -> dict[Pass, list[OperatorPeak]]:
    result: dict[Pass, list[OperatorPeak]] = {}
    for peak in trace.operator_peaks:
        result.setdefault(peak[0], []).append(peak)
    return result


def _highest(peaks: list[OperatorPeak]) -> tuple[int, ...]:
    return max(peaks, key=lambda peak: peak[1])[2]
