"""The bytes that a rank of a layout needs, by closed formulas.

Weights, gradients and optimiser state as in ZeRO (Rajbhandari et al., 2020, section 3), activations as traces of the
engine have them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from orchestrator.config.records import PREFERENCES
from orchestrator.config.spec import JobSpec
from orchestrator.parallel.cuts import layers_by_rank
from orchestrator.parallel.engine_rules import HEAD_TOKENS
from orchestrator.parallel.layout import SPLIT, Layout, ModelShape
from orchestrator.parallel.model_shape import Bias
from orchestrator.planner.device import Machine
from orchestrator.planner.simulation.step import divided, local_parameters, recomputed_share
from orchestrator.planner.simulation.update import kept_numbers

MEMORY_SHARE = 0.8
"""Share of a worker's memory that a plan may use: allocators and libraries need the rest, on a GPU the contexts of the
rank and of its standby (about half a GB each) too."""
PROCESS, LIBRARIES = 12 * 2**20, 250 * 2**20
"""Resident bytes of a rank on a CPU beside its tensors, and of its libraries before there is a model; neither counts
pages of files. Measured, as are the next three, with models of 0.6 to 23 M parameters on one and two ranks
(docs/predictions.md)."""
SLACK = 0.08
"""What the allocator keeps on a CPU, as a share of the bytes of tensors."""
SNAPSHOTS = 2.1
"""Copies of what a rank commits that are held on a CPU while the next commit is made, with what writing takes."""
COPIES = {0: 0.0, 1: 1.3, 2: 2.0, 3: 1.8}
"""What gloo copies and the allocator keeps of that, by ZeRO stage, as a share of what the replicas commit together."""
NF4 = 4.5 / 8
"""Bytes of a weight in 4 bits, with its share of a scale."""
SCORE_BYTES = {"none": {4: 9.0, 2: 8.0}, "selective": {4: 5.0, 2: 3.0}, "full": {4: 0.0, 2: 0.0}}
"""Bytes that a layer without a fused kernel keeps of each score for the backward pass, by what is computed again and by
the width of a number; SCORE_BYTES_AT_ONCE while it computes: fitted to traces of GPT-2 with dropout of attention and of
Llama with capped scores."""
SCORE_BYTES_AT_ONCE = {"none": 8.0, "selective": 12.0, "full": 18.0}
BIAS_BYTES: Mapping[Bias, Mapping[int, float]] = {
    "distance": {4: 4.0, 2: 4.5}, "disentangled": {4: 3.5, 2: 4.0}, "relative_keys": {4: 12.5, 2: 8.5}
}  # fmt: skip
"""The same of scores that positions add to, where a kernel computes the rest, but for what is computed again in full:
fitted to traces of MPNet, T5, DeBERTa and XLNet. Without a kernel UNFUSED_BIAS of it are among SCORE_BYTES."""
UNFUSED_BIAS = 4.0
BIAS_BYTES_AT_ONCE: Mapping[Bias, Mapping[str, float]] = {
    "distance": {"none": 7.5, "selective": 13.0, "full": 20.0},
    "disentangled": {"none": 7.5, "selective": 15.0, "full": 24.0},
    "relative_keys": {"none": 15.0, "selective": 21.0, "full": 31.0},
}
UNFUSED_BIAS_AT_ONCE = {"none": 2.0, "selective": 6.0, "full": 5.0}
DISTANCE_BYTES = {4: 10.5, 2: 6.2}
"""Bytes that a layer keeps of each product of a query or a key with a distance of disentangled attention."""
NORM_BYTES = 9.5
"""Bytes that a norm by the root of the mean square keeps of each number, beside the two norms of the halves of a layer:
fitted to traces of Gemma 2 and Qwen3."""
KEPT_LOGITS = 1.3
"""Copies of its logits that a pass keeps whose head computes all tokens at once: fitted to a trace of DPO in GPipe."""


class Held(NamedTuple):
    """Bytes that a rank holds in a step: of weights, gradients and optimiser state; of each micro-batch that is between
    its forward and backward pass, and how many of those there are at most; of the head while it computes, or of a layer
    that holds its scores; of micro-batches whose weights wait for their gradients, beyond what their activations took.
    """

    state: float
    micro_batch: float
    in_flight: float
    head: float
    deferred: float = 0.0

    @property
    def peak(self) -> float:
        """The most at any time."""
        return self.state + self.in_flight * self.micro_batch + max(self.head, self.deferred)


def needed_bytes(layout: Layout, tensors: float, saved: float, on_cpu: bool) -> float:
    """The memory that a rank adds to its process, for so many bytes of `tensors` of which `saved` are copied for a
    commit: on a CPU all of it is in one memory, with what the allocator keeps and gloo copies."""
    if not on_cpu:
        return tensors
    copies = SNAPSHOTS + COPIES[layout.zero] * layout.replicas
    return (1.0 + SLACK) * tensors + copies * saved + PROCESS


def offered(machine: Machine, on_cpu: bool) -> float:
    """The memory that a worker offers a rank: on a CPU what the libraries leave."""
    share = machine.memory * MEMORY_SHARE
    return max(share - LIBRARIES, 0.0) if on_cpu else share


def fits(needed: float, machine: Machine, on_cpu: bool) -> bool:
    """Whether a worker offers that much."""
    return needed <= offered(machine, on_cpu)


def held(spec: JobSpec, shape: ModelShape, layout: Layout, indices: Sequence[int]) -> list[Held]:
    """What the ranks at each of these indices of the pipeline axis hold."""
    mean = local_parameters(shape, layout)
    tokens = layout.micro_batch * shape.sequence_length / layout.cp
    accumulation = max(layout.accumulation(spec.train.global_batch), 1)
    summed = _summed_anew(layout, accumulation, shape)
    rows = tokens * shape.heads / layout.tp
    kept_scores, scores_at_once = _scores(spec, shape, layout.recompute, rows)
    layer = _layer(spec, shape, layout, tokens) + kept_scores
    if layout.recompute_layers:
        again, whole = recomputed_share(shape, layout), layout.but(recompute="none")
        layer *= again
        layer += (1.0 - again) * (_layer(spec, shape, whole, tokens) + _scores(spec, shape, "none", rows)[0])
    layer *= 1.0 + shape.generator
    # a layer that is computed again is whole while it goes back
    recomputed = (
        _layer(spec, shape, layout.but(recompute="none"), tokens) if layout.recompute == "full" else 0.0
    )
    waiting = _waiting(spec, shape, layout, tokens) if layout.pp > 1 and layout.schedule in SPLIT else 0.0
    state = (
        _states(spec, shape, layout) + _casts(spec, shape, layout) * (1.0 - shape.quantised_share) - summed
    )
    found = []
    for index in indices:
        layers = layers_by_rank(shape.layers, layout)[index]
        first, last = index == 0, index == layout.pipeline_rank_of(layout.stages - 1)
        parameters = mean
        if layout.pp > 1:
            table = shape.table / layout.tp
            tables = table * (1 if shape.tied else 2)
            inner = max(mean * layout.pp - tables, 0.0) * layers / max(shape.layers, 1)
            parameters = inner + table * (min(first + last, 1) if shape.tied else first + last)
        all_forward = layout.schedule == "gpipe" and layout.pp > 1  # before any backward pass
        kept = accumulation if all_forward else min(_ahead(layout, index), accumulation)
        passes = accumulation if all_forward else 1
        head = _head(spec, shape, tokens, passes) / layout.tp if last else 0.0
        at_once = max(head, scores_at_once, recomputed)
        at_once += _gathered(spec, shape, layout, mean)
        # what the embedding's backward pass makes, when the activations of its micro-batch are gone
        made = _embedded(shape, first, last) / layout.tp - layers * layer
        at_once = max(at_once, made, summed * parameters - kept * layers * layer)
        waits = min(_deferred(layout, index), accumulation) * layers * max(waiting - layer, 0.0)
        found.append(Held(state * parameters, layers * layer, kept, at_once, waits))
    return found


def peak_bytes(spec: JobSpec, shape: ModelShape, layout: Layout) -> float:
    """The most bytes that a rank needs in a step."""
    indices = fullest(layers_by_rank(shape.layers, layout), layout.schedule in SPLIT)
    return max(each.peak for each in held(spec, shape, layout, indices))


@lru_cache(maxsize=4096)
def fullest(layers: tuple[int, ...], defers: bool = False) -> tuple[int, ...]:
    """Indices of the pipeline axis one of which needs most, of so many layers by index: the first, which holds most
    micro-batches and the embedding; the last, which may hold the head; between them the first with each number of
    layers above that of the first, and the last such where gradients of weights wait (`_deferred`)."""
    inner = range(1, len(layers) - 1)
    more = {layers[index]: index for index in reversed(inner) if layers[index] > layers[0]}
    later = {layers[index]: index for index in inner if defers and layers[index] > layers[-1]}
    return tuple(sorted({0, *more.values(), *later.values(), len(layers) - 1}))


def peak_by_stage(spec: JobSpec, shape: ModelShape, layout: Layout) -> list[float]:
    """The most bytes that the ranks at each index of the pipeline axis need in a step."""
    return [each.peak for each in held(spec, shape, layout, range(layout.pp))]


def _ahead(layout: Layout, index: int) -> float:
    """Micro-batches whose activations of a rank's layers a pipeline keeps at most, at that index of its axis.

    Of an interleaved schedule those of the warm-up and one more, each of a part of the layers (Narayanan et al., 2021,
    section 2.2).
    """
    if layout.schedule == "1f1b":
        return layout.pp - index
    if layout.schedule == "interleaved":
        parts = layout.stages // layout.pp
        return ((parts - 1) * layout.pp + 2 * (layout.pp - index - 1) + 1) / parts
    return layout.pp


def _deferred(layout: Layout, index: int) -> float:
    """Micro-batches at most, of all of a rank's layers, of which a schedule has computed the gradients of the input and
    not yet those of the weights, at that index of a pipeline's axis; 0 where it computes both at once.

    As many less are between their forward and backward pass then (Qi et al., 2024).
    """
    if layout.pp == 1 or layout.schedule not in SPLIT:
        return 0.0
    return index + 0.5 if layout.schedule == "zbv" else (index + 1) / (layout.stages // layout.pp)


def _waiting(spec: JobSpec, shape: ModelShape, layout: Layout, tokens: float) -> float:
    """Bytes of a layer of which the gradients of the weights are still to come: what its products read, and the
    gradients of what they gave. Fitted to traces of Llama 3 of 8 and 70 billion parameters under ZB-V."""
    width, tp = 4.0 if spec.train.dtype == "fp32" else 2.0, layout.tp
    share = shape.expert_layers / shape.layers if shape.layers else 0.0
    used = shape.experts_per_token + shape.shared_experts
    columns = (1.0 - share) * shape.feedforward + share * used * shape.expert_feedforward
    heads = shape.heads * shape.head_size
    read = 2.0 * shape.hidden + (heads + columns) / tp
    given = 2.0 * shape.hidden + (heads + 2.0 * shape.kv_heads * shape.head_size) / tp
    given += (2.0 if shape.gated else 1.0) * columns / tp
    # in fp32; norms by mean and variance keep as much again
    residual = (8.0 if shape.gated else 16.0) * shape.hidden / (tp if layout.sequence else 1)
    residual += 2.0 * shape.hidden if layout.sequence else 0.0
    return tokens * (width * (read + given) + residual)


def _summed_anew(layout: Layout, accumulation: int, shape: ModelShape) -> float:
    """Bytes of a parameter's gradient that a rank has only once its only micro-batch went back through all layers, when
    activations are gone: ZeRO 2 and 3 begin each step without gradients."""
    if accumulation > 1 or layout.zero < 2 or layout.pp > 1 or layout.engine != "torch":
        return 0.0
    return 4.0 * shape.trained_share / divided(shape, layout, layout.sharded)


def _gathered(spec: JobSpec, shape: ModelShape, layout: Layout, parameters: float) -> float:
    """Bytes of whole weights that ZeRO 3 holds while the head computes: the output table with a copy in 16 bits and
    what its gradient is summed from, the table of the input where that is another, and a layer. Fitted to traces of the
    presets; a pipeline holds all, see `_states`."""
    if layout.zero < 3 or layout.pp > 1 or layout.engine != "torch":
        return 0.0
    table = shape.table / layout.tp
    tables, low = table * (1 if shape.tied else 2), 0.5 if spec.train.dtype != "fp32" else 0.0
    layer = max(parameters - tables, 0.0) / max(shape.layers, 1)
    return 4.0 * (tables + (0.25 + low) * table + layer)


def _layer(spec: JobSpec, shape: ModelShape, layout: Layout, tokens: float) -> float:
    """Bytes that the forward pass of a layer keeps for the backward pass, on a rank: fitted to traces of GPT-2, Llama
    and Qwen3. Scores are not in it. In 16 bits norms and the residual stream stay in fp32."""
    full = spec.train.dtype == "fp32"
    width = 4.0 if full else 2.0
    if layout.recompute == "full":
        return tokens * shape.hidden * 4.0 / (layout.tp if layout.sequence else 1)
    none = layout.recompute == "none"
    residual = 16.0 if none else 12.0 if full else 8.0
    if none and shape.gated:  # such models have norms by the root of the mean square
        residual += 8.0 if full else 11.0
    # what sequence parallelism gathers for the first product of each half of a layer is kept whole
    gathered = 8.0 if full else 4.0 if not none else 10.0 if shape.gated else 8.0
    whole = gathered if layout.sequence else residual
    inner = width * 2.0 * (shape.heads + shape.kv_heads) * shape.head_size
    each = width * (2.0 if none else 1.0) * (2.0 if shape.gated else 1.0)
    share = shape.expert_layers / shape.layers if shape.layers else 0.0
    used = shape.experts_per_token + shape.shared_experts
    columns = (1.0 - share) * shape.feedforward + share * used * shape.expert_feedforward
    # of rows for experts those that are sorted, and those that other ranks have sent
    copies = (3.0 if none else 0.0) + (1.0 if layout.ep > 1 else 0.0)
    sent = copies * share * shape.experts_per_token * shape.hidden * width
    outer = (whole + max(residual - whole, 0.0) / layout.tp) * shape.hidden
    normed = (
        (shape.normed / (layout.tp if layout.sequence else 1) + shape.normed_heads / layout.tp)
        if none
        else 0.0
    )
    return tokens * (outer + sent + NORM_BYTES * normed + (inner + each * columns) / layout.tp)


def _scores(spec: JobSpec, shape: ModelShape, recompute: str, rows: float) -> tuple[float, float]:
    """Bytes that a layer keeps of the scores of so many `rows`, each of a query of a head, and that it holds while it
    computes."""
    unfused = bool(shape.capped or spec.workload.dropouts[1])
    if not unfused and not shape.biased:
        return 0.0, 0.0
    width = 4 if spec.train.dtype == "fp32" else 2
    kept = SCORE_BYTES[recompute][width] if unfused else 0.0
    at_once = SCORE_BYTES_AT_ONCE[recompute] if unfused else 0.0
    distances = 0.0
    if shape.biased:
        both = UNFUSED_BIAS_AT_ONCE[recompute] if unfused else 0.0
        at_once = BIAS_BYTES_AT_ONCE[shape.biased][recompute] + both
        if recompute != "full":
            more = BIAS_BYTES[shape.biased][width]
            kept += max(more - UNFUSED_BIAS, 0.0) if unfused else more
            distances = DISTANCE_BYTES[width] * shape.distances
    seen = shape.score_share * shape.sequence_length
    return rows * (kept * seen + distances), rows * at_once * shape.sequence_length


def _casts(spec: JobSpec, shape: ModelShape, layout: Layout) -> float:
    """Bytes of a weight in 16 bits, which are kept from the forward to the backward pass but by what is recomputed."""
    if layout.zero == 3 or layout.engine != "torch" or spec.train.dtype == "fp32":
        return 0.0
    return 2.0 * (1.0 - recomputed_share(shape, layout))


def _head(spec: JobSpec, shape: ModelShape, tokens: float, passes: int) -> float:
    """Bytes that the head holds: logits, their softmax and their gradient of the tokens that it computes at once, and
    of so many forward passes at a time, from there to the backward pass, the gradient of its weight."""
    at_once = HEAD_TOKENS["cuda" if spec.resources.per_worker.gpu else "cpu"]
    chunked = shape.chunked_head and spec.workload.objective not in PREFERENCES
    tokens *= shape.head_share
    if not tokens:
        return 0.0
    if chunked:
        tokens = min(tokens, at_once)
    copies = 4.0 if shape.capped_logits else 3.0
    copies += 0.0 if chunked else KEPT_LOGITS * (passes - 1)
    gradients = 2 if shape.generator else passes * chunked  # of the table, which two networks share
    return 4.0 * (copies * tokens * shape.vocabulary + gradients * shape.table)


def _embedded(shape: ModelShape, first: bool, last: bool) -> float:
    """Bytes of gradients that a rank with the embedding holds in the end of a backward pass: of the table; where it is
    the head's too, those of both and their sum."""
    tables = 0 if not first else 3 if last and shape.tied and shape.head_share else 1
    return 4.0 * tables * shape.trained_share * shape.table


def offloaded_bytes(spec: JobSpec, shape: ModelShape, layout: Layout) -> float:
    """Bytes that a rank keeps in its host's memory instead of the device's: optimiser state, of DeepSpeed also
    gradients and its copy of the weights, and with offloaded parameters the weights (Ren et al., 2021, section 4.1)."""
    if layout.offload == "none":
        return 0.0
    deepspeed = layout.engine == "deepspeed"
    each = 4.0 * kept_numbers(str(spec.train.optimizer.name), shape) + (8.0 if deepspeed else 0.0)
    each = each * shape.trained_share + (4.0 if layout.offload == "parameters" else 0.0)
    ways = divided(shape, layout, layout.sharded) if layout.zero else 1
    return each * local_parameters(shape, layout) / ways


def _states(spec: JobSpec, shape: ModelShape, layout: Layout) -> float:
    """Bytes of weight, gradient, optimiser state, a moving average and a held reference on a rank's device, for each
    parameter of its part, of which the model's share is trained.

    Offloaded state is in host memory, which is not counted. DeepSpeed keeps a second fp32 copy of the weights that a
    rank updates, and sends gradients to the host as they are summed (Ren et al., 2021, section 4.1). Torch's pipelines
    sum gradients behind the last micro-batch alone: until then those of ZeRO 2 and 3 stand whole, and so do the weights
    that were gathered.
    """
    deepspeed = layout.engine == "deepspeed"
    kept = 4.0 * kept_numbers(str(spec.train.optimizer.name), shape)
    slots = kept + (4.0 if deepspeed else 0.0) + (4.0 if spec.checkpoint.ema is not None else 0.0)
    slots += 4.0 if spec.train.reference == "held" else 0.0
    trained, small = shape.trained_share, shape.quantised_share  # of which every rank has all
    ways = divided(shape, layout, layout.sharded)
    optimizer = slots * trained / (ways if layout.zero >= 1 else 1)
    gradients = 4.0 * trained / (ways if layout.zero >= 2 and layout.pp == 1 else 1)
    weights = 4.0 * (1.0 - small) / (ways if layout.zero >= 3 else 1) + NF4 * small
    if layout.zero >= 3 and layout.pp > 1:
        low = spec.train.dtype in ("bf16", "fp8") and layout.schedule not in SPLIT
        weights += (2.0 if low else 4.0) * (1.0 - small)
    if layout.offload == "none":
        return weights + gradients + optimizer
    gradients *= 0.0 if deepspeed and layout.zero >= 2 else 1.0
    return gradients + (weights if layout.offload == "optimizer" else 0.0)
