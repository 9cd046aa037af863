"""The bytes that a rank of a layout needs, by closed formulas. Torch-free.

    peak = state + micro-batches in flight x activations of a micro-batch + max(head, deferred gradients)

State per parameter in fp32 (ZeRO: Rajbhandari et al., 2020, section 3), where n ranks shard it:

    ZeRO 0   weight 4, gradient 4, state 4 k        k numbers of optimizer state, 2 for AdamW
    ZeRO 1   weight 4, gradient 4, state 4 k / n
    ZeRO 2   weight 4, gradient 4 / n, state 4 k / n
    ZeRO 3   weight 4 / n, gradient 4 / n, state 4 k / n

Activations per layer are tokens x bytes per token, fitted to traces of the engine (`_layer_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from orchestrator.optim.kinds import needs_its_shard_alone
from orchestrator.parallel.arithmetic import HEAD_TOKENS
from orchestrator.parallel.cuts import layers_by_rank
from orchestrator.parallel.layout import SPLIT, Layout, ModelShape, round_length
from orchestrator.parallel.model_shape import Bias
from orchestrator.planner.demand import Demand
from orchestrator.planner.device import Machine
from orchestrator.planner.simulation.step import local_parameters, recomputed_share, zero_shards
from orchestrator.planner.simulation.update import kept_numbers
from orchestrator.train.config import Precision
from orchestrator.train.distillation.config import rows_of_pass

MEMORY_SHARE = 0.8
"""Share of a worker's memory that a plan may use. Allocators and libraries need the rest, on a GPU also the contexts of
the rank and its standby (about half a GB each)."""
PROCESS, LIBRARIES = 12 * 2**20, 250 * 2**20
"""Resident bytes of a rank on a CPU besides its tensors, and of its libraries before a model is built. Neither counts
pages of files. These and the next three values are measured with models of 0.6 to 23 M parameters on one and two ranks
(docs/predictions.md)."""
SLACK = 0.08
"""Memory that the allocator keeps on a CPU, as a share of the bytes of tensors."""
SNAPSHOTS = 2.1
"""Copies of a rank's committed bytes in a CPU's memory while the next commit is made, buffers of writing included."""
COPIES = {0: 0.0, 1: 1.3, 2: 2.0, 3: 1.8}
"""Memory of gloo's copies and the allocator, by ZeRO stage, as a share of the bytes that all replicas commit."""
NF4_BYTES = 4.5 / 8
"""Bytes of a weight in 4 bits, its share of a scale included."""
SCORE_BYTES = {"none": {4: 9.0, 2: 8.0}, "selective": {4: 5.0, 2: 3.0}, "full": {4: 0.0, 2: 0.0}}
"""Bytes that a layer without a fused kernel keeps for each score until the backward pass, by recomputation and bytes of
a number. SCORE_BYTES_AT_ONCE are the bytes while the layer computes. Both are fitted to traces of GPT-2 with
attention dropout and of Llama with capped scores."""
SCORE_BYTES_AT_ONCE = {"none": 8.0, "selective": 12.0, "full": 18.0}
BIAS_BYTES: Mapping[Bias, Mapping[int, float]] = {
    "distance": {4: 4.0, 2: 4.5}, "disentangled": {4: 3.5, 2: 4.0}, "relative_keys": {4: 12.5, 2: 8.5}
}  # fmt: skip
"""The same for scores with a positional bias, if a fused kernel computes the rest and layers are not fully recomputed:
fitted to traces of MPNet, T5, DeBERTa and XLNet. Without a fused kernel SCORE_BYTES include UNFUSED_BIAS of them."""
UNFUSED_BIAS = 4.0
BIAS_BYTES_AT_ONCE: Mapping[Bias, Mapping[str, float]] = {
    "distance": {"none": 7.5, "selective": 13.0, "full": 20.0},
    "disentangled": {"none": 7.5, "selective": 15.0, "full": 24.0},
    "relative_keys": {"none": 15.0, "selective": 21.0, "full": 31.0},
}
UNFUSED_BIAS_AT_ONCE = {"none": 2.0, "selective": 6.0, "full": 5.0}
DISTANCE_BYTES = {4: 10.5, 2: 6.2}
"""Bytes that a layer with disentangled attention keeps for each product of a query or key with a distance."""
NORM_BYTES = 9.5
"""Bytes that an RMS norm keeps for each number, if it is none of a layer's two usual norms: fitted to traces of Gemma 2
and Qwen3."""
KEPT_LOGITS = 1.3
"""Copies of its logits that a pass keeps if the head computes all tokens at once: fitted to a trace of DPO in GPipe."""


LOGIT_COPIES = 3.0
"""Copies of a teacher's logits in fp32 while the largest are found: as the model returns them, divided by the
temperature, and their exponentials."""
UPDATED_AT_ONCE = 2.0**26
"""Bytes of shards that a verified step computes again together, as the engine's `update_again`."""


class RankMemory(NamedTuple):
    """Bytes that a rank holds in a step.

    Attributes:
        state: weights, gradients and optimizer state.
        micro_batch: activations of one micro-batch between its forward and backward pass.
        in_flight: maximum number of such micro-batches.
        head: temporary memory: the head while it computes, or a layer with its scores.
        deferred: micro-batches whose W is postponed, beyond the bytes of their activations.
        before: bytes before the first step, while the rank runs a teacher whose logits are stored.
    """

    state: float
    micro_batch: float
    in_flight: float
    head: float
    deferred: float = 0.0
    before: float = 0.0

    @property
    def peak(self) -> float:
        """The largest number of bytes at any time."""
        step = self.state + self.in_flight * self.micro_batch + max(self.head, self.deferred)
        return max(step, self.before)


def needed_bytes(layout: Layout, tensors: float, saved: float, on_cpu: bool) -> float:
    """Return the bytes that a rank adds to its process.

    On a GPU these are its tensors. On a CPU copies share their memory:
    (1 + SLACK) x tensors + (SNAPSHOTS + COPIES x replicas) x saved + PROCESS.

    Args:
        layout: gives the ZeRO stage and the replicas.
        tensors: peak bytes of tensors.
        saved: bytes that the rank copies for a commit.
        on_cpu: whether the job runs on CPUs.
    """
    if not on_cpu:
        return tensors
    # On a CPU the ranks of a node share one memory: snapshots and gloo's buffers of all of them count, not only this
    # rank's.
    copies = SNAPSHOTS + COPIES[layout.zero] * layout.replicas
    return (1.0 + SLACK) * tensors + copies * saved + PROCESS


def offered(machine: Machine, on_cpu: bool) -> float:
    """Return the bytes that a worker offers a rank: MEMORY_SHARE of its memory, on a CPU without the libraries.

    Args:
        machine: one worker.
        on_cpu: whether it computes on CPUs.
    """
    share = machine.memory * MEMORY_SHARE
    return max(share - LIBRARIES, 0.0) if on_cpu else share


def fits(needed: float, machine: Machine, on_cpu: bool) -> bool:
    """Whether a worker offers `needed` bytes.

    Args:
        needed: bytes of a rank.
        machine: one worker.
        on_cpu: whether it computes on CPUs.
    """
    return needed <= offered(machine, on_cpu)


def rank_memory(
    demand: Demand, shape: ModelShape, layout: Layout, indices: Sequence[int]
) -> list[RankMemory]:
    """Return what the ranks at the given indices of the pipeline axis hold, in the order of `indices`.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of the model.
        layout: the layout.
        indices: on the pipeline axis.
    """
    parameters_of_mean_rank = local_parameters(shape, layout)
    tokens = layout.micro_batch * shape.sequence_length / layout.cp
    accumulation = max(layout.accumulation(demand.batch), 1)
    absent_gradients = _absent_gradient_bytes(layout, accumulation, shape)
    score_rows = tokens * shape.heads / layout.tp  # rows of attention scores on this rank
    kept_scores, scores_at_once = _score_bytes(demand, shape, layout.recompute, score_rows)
    compiled = demand.program.compiled
    layer = _layer_bytes(demand.precision, shape, layout, tokens, compiled) + kept_scores
    if layout.recompute_layers:  # a mean of recomputed layers and others
        recomputed_fraction = recomputed_share(shape, layout)
        without_recompute = layout.but(recompute="none")
        layer *= recomputed_fraction
        layer += (1.0 - recomputed_fraction) * (
            _layer_bytes(demand.precision, shape, without_recompute, tokens, compiled)
            + _score_bytes(demand, shape, "none", score_rows)[0]
        )
    layer += _rounded_input_bytes(demand, shape, layout, tokens)
    # ELECTRA trains a second, smaller network on the same tokens; `generator` is its size as a share.
    layer *= 1.0 + shape.generator
    # A recomputed layer holds all its activations during its own backward pass.
    recomputed_layer = (
        _layer_bytes(demand.precision, shape, layout.but(recompute="none"), tokens, whole=True)
        if layout.recompute == "full"
        else 0.0
    )
    deferred_layer = (
        _deferred_layer_bytes(demand.precision, shape, layout, tokens)
        if layout.pp > 1 and layout.schedule in SPLIT
        else 0.0
    )
    state = (
        _state_bytes(demand, shape, layout)
        + _cast_bytes(demand.precision, shape, layout) * (1.0 - shape.quantised_share)
        - absent_gradients
    )
    model_copy, cache = _generation_bytes(demand, shape)
    teacher = teacher_bytes(demand.precision, shape, layout, accumulation)
    early_teacher = early_teacher_bytes(demand, shape, layout)
    ranks = []
    for index in indices:
        layers = layers_by_rank(shape.layers, layout)[index]
        first = index == 0
        last = index == layout.pipeline_rank_of(layout.stages - 1)
        parameters = parameters_of_mean_rank
        if layout.pp > 1:
            table_parameters = shape.table / layout.tp
            tables = table_parameters * (1 if shape.tied else 2)
            # This rank's layers, and the tables that it holds: of the embedding, of the head, or one for both.
            inner = max(parameters_of_mean_rank * layout.pp - tables, 0.0) * layers / max(shape.layers, 1)
            parameters = inner + table_parameters * (min(first + last, 1) if shape.tied else first + last)
        # GPipe keeps the activations of every micro-batch, which is why 1F1B exists (Narayanan et al., 2021, section
        # 2.2).
        all_forward = layout.schedule == "gpipe" and layout.pp > 1  # before any backward pass
        in_flight = (
            accumulation
            if all_forward
            else min(_micro_batches_in_flight(layout, accumulation, index), accumulation)
        )
        passes = accumulation if all_forward else 1
        head = _head_bytes(demand, shape, tokens, passes) / layout.tp if last else 0.0
        # These never exist at the same time: the head runs outside of layers, and a layer is recomputed before its
        # backward pass.
        temporary = max(head, scores_at_once, recomputed_layer)
        temporary += _gathered_bytes(
            demand.precision, shape, layout, parameters_of_mean_rank
        ) + _rounding_bytes(demand, shape, layout)
        # The embedding's backward pass creates gradients after the activations of its micro-batch are freed.
        # Minus the micro-batch that has just been freed, since `peak` adds it for every one in flight.
        table_gradients = _table_gradient_bytes(shape, first, last) / layout.tp - layers * layer
        temporary = max(
            temporary, table_gradients, absent_gradients * parameters - in_flight * layers * layer
        )
        temporary = max(
            temporary, cache - in_flight * layers * layer
        )  # activations are free while answers are generated
        temporary = max(temporary, _verification_bytes(demand, shape, layout) - in_flight * layers * layer)
        deferred = (
            min(_deferred_micro_batches(layout, index), accumulation)
            * layers
            * max(deferred_layer - layer, 0.0)
        )
        ranks.append(
            RankMemory(
                state=state * parameters + model_copy + teacher,
                micro_batch=layers * layer,
                in_flight=in_flight,
                head=temporary,
                deferred=deferred,
                before=_weight_bytes(shape, layout) * parameters + early_teacher if early_teacher else 0.0,
            )
        )
    return ranks


def peak_bytes(demand: Demand, shape: ModelShape, layout: Layout) -> float:
    """Return the peak bytes of tensors on the rank that needs most.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of the model.
        layout: the layout.
    """
    indices = fullest(layers_by_rank(shape.layers, layout), layout.schedule in SPLIT)
    return max(rank.peak for rank in rank_memory(demand, shape, layout, indices))


@lru_cache(maxsize=4096)
def fullest(layers: tuple[int, ...], defers: bool = False) -> tuple[int, ...]:
    """Return indices of the pipeline axis among which is the rank that needs most memory.

    - the first, which holds most micro-batches and the embedding
    - the last, which may hold the head
    - of those between with the same number of layers, more than the first has, the first one
    - with `defers` also the last one of those with more layers than the last rank has, because later ranks postpone
      more W (`_deferred_micro_batches`)

    Args:
        layers: number of layers by index.
        defers: whether the schedule postpones W.
    """
    inner = range(1, len(layers) - 1)
    fuller_than_first = {layers[index]: index for index in reversed(inner) if layers[index] > layers[0]}
    fuller_than_last = {layers[index]: index for index in inner if defers and layers[index] > layers[-1]}
    return tuple(sorted({0, *fuller_than_first.values(), *fuller_than_last.values(), len(layers) - 1}))


def peak_by_stage(demand: Demand, shape: ModelShape, layout: Layout) -> list[float]:
    """Return the peak bytes of tensors at each index of the pipeline axis.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of the model.
        layout: the layout.
    """
    return [rank.peak for rank in rank_memory(demand, shape, layout, range(layout.pp))]


def _micro_batches_in_flight(layout: Layout, accumulation: int, index: int) -> float:
    """Return the maximum number of micro-batches between their forward and backward pass, at an index r of p ranks.

    1F1B: p - r. ZB-V: p. Schedules with v stages per rank run n micro-batches in a round (`round_length`), and hold
    the warm-up and one more, each for 1 / v of the rank's layers: ((v - 1) n + 2 (p - r - 1) + 1) / v interleaved
    (Narayanan et al., 2021, section 2.2), and ((v - 1) n + p) / v under interleaved zero bubble.
    """
    if layout.schedule == "1f1b":
        # The first rank is p - 1 micro-batches ahead of the last, so it holds most and limits the layout.
        return layout.pp - index
    if layout.schedule not in ("interleaved", "zero_bubble") or layout.pp == 1:
        return layout.pp
    stages = layout.stages // layout.pp
    warm_up = (stages - 1) * round_length(layout.pp, accumulation)
    ahead = 2 * (layout.pp - index) - 1 if layout.schedule == "interleaved" else layout.pp
    return (warm_up + ahead) / stages


def _deferred_micro_batches(layout: Layout, index: int) -> float:
    """Return the maximum number of micro-batches between I and W, for all layers of the rank at an index r.

    ZB-V: r + 1/2; interleaved zero bubble with v stages per rank: (r + 1) / v; 0 for schedules that do not split the
    backward pass. As many fewer micro-batches are between their forward and backward pass (Qi et al., 2024).
    """
    if layout.pp == 1 or layout.schedule not in SPLIT:
        return 0.0
    return index + 0.5 if layout.schedule == "zbv" else (index + 1) / (layout.stages // layout.pp)


def _deferred_layer_bytes(precision: Precision, shape: ModelShape, layout: Layout, tokens: float) -> float:
    """Return the bytes of a layer between I and W: tokens x (width x (inputs + output gradients) + residual).

    Inputs and output gradients are those of its matrix products. Fitted to traces of Llama 3 with 8 and 70 billion
    parameters under ZB-V.
    """
    width = 4.0 if precision == "fp32" else 2.0
    tp = layout.tp
    expert_share = shape.expert_layers / shape.layers if shape.layers else 0.0
    experts_per_token = shape.experts_per_token + shape.shared_experts
    columns = (
        1.0 - expert_share
    ) * shape.feedforward + expert_share * experts_per_token * shape.expert_feedforward
    heads = shape.heads * shape.head_size
    inputs = 2.0 * shape.hidden + (heads + columns) / tp
    output_gradients = 2.0 * shape.hidden + (heads + 2.0 * shape.kv_heads * shape.head_size) / tp
    output_gradients += (2.0 if shape.gated else 1.0) * columns / tp
    # In fp32; layer norms keep twice the bytes of RMS norms.
    residual = (8.0 if shape.gated else 16.0) * shape.hidden / (tp if layout.sequence else 1)
    residual += 2.0 * shape.hidden if layout.sequence else 0.0
    return tokens * (width * (inputs + output_gradients) + residual)


def _absent_gradient_bytes(layout: Layout, accumulation: int, shape: ModelShape) -> float:
    """Return the bytes per parameter of gradients that do not exist at the peak of activations.

    ZeRO 2 and 3 start a step without gradients. With a single micro-batch they appear as activations are freed.
    """
    if accumulation > 1 or layout.zero < 2 or layout.pp > 1 or layout.engine != "torch":
        return 0.0
    # With two or more micro-batches, gradients of the first exist while the second runs its forward pass, so nothing
    # is saved.
    return 4.0 * shape.trained_share / zero_shards(shape, layout, layout.sharded)


def _gathered_bytes(precision: Precision, shape: ModelShape, layout: Layout, parameters: float) -> float:
    """Return the bytes of gathered weights that ZeRO 3 holds while the head computes.

    They are the head's table with a copy in 16 bits and the buffer of its gradient, the embedding's table if it is
    another one, and one layer. Fitted to traces of the presets. A pipeline holds all weights, see `_state_bytes`.
    """
    if layout.zero < 3 or layout.pp > 1 or layout.engine != "torch":
        return 0.0
    table = shape.table / layout.tp
    tables = table * (1 if shape.tied else 2)
    copy_share = 0.5 if precision != "fp32" else 0.0  # a copy in 16 bits
    layer = max(parameters - tables, 0.0) / max(shape.layers, 1)
    return 4.0 * (tables + (0.25 + copy_share) * table + layer)


def _rounding_bytes(demand: Demand, shape: ModelShape, layout: Layout) -> float:
    """Return the bytes of the largest weight while it is fake-quantised: its scaled numbers in fp32, and the result in
    the dtype of products.
    """
    if not demand.program.rounds_weights:
        return 0.0
    largest = shape.hidden * max(shape.feedforward, shape.heads * shape.head_size) / layout.tp
    return (8.0 if demand.precision == "fp32" else 6.0) * largest


def _verification_bytes(demand: Demand, shape: ModelShape, layout: Layout) -> float:
    """Return the bytes with which a rank computes the update of another rank's largest shard again: weights, gradients
    and states twice, as sent and as received.

    An update that needs other ranks is not computed again.
    """
    verify = demand.resources.verify
    if verify is None or verify.by == "same" or not layout.zero or layout.replicas == 1:
        return 0.0
    if not needs_its_shard_alone(str(demand.optimizer.name)):
        return 0.0
    bytes_of_number = 4.0 * (2.0 + kept_numbers(str(demand.optimizer.name), shape)) / layout.sharded
    largest_shard = bytes_of_number * shape.table * shape.trained_share / layout.tp
    all_shards = bytes_of_number * local_parameters(shape, layout)
    return 2.0 * min(max(largest_shard, UPDATED_AT_ONCE), all_shards)


def _rounded_input_bytes(demand: Demand, shape: ModelShape, layout: Layout, tokens: float) -> float:
    """Return the bytes that a layer keeps more if inputs are rounded: query, key and value have a rounded copy each in
    place of one input, as have the two up-projections of a gated block.
    """
    if not demand.program.rounds_inputs or layout.recompute == "full":
        return 0.0
    return (
        tokens * shape.hidden * (4.0 if demand.precision == "fp32" else 2.0) * (4.0 if shape.gated else 3.0)
    )


def _layer_bytes(
    precision: Precision, shape: ModelShape, layout: Layout, tokens: float, whole: bool
) -> float:
    """Return the bytes of activations that a layer keeps for the backward pass on a rank, without attention scores.

    bytes = tokens x (residual x hidden + experts' rows + extra norms
                      + (width x 2 (heads + kv heads) x head size + width x f x feedforward) / tp)

    `residual` is in bytes per hidden number; f is 1 or 2 (kept input and output of the activation), doubled if gated.
    Sequence parallelism divides the residual part by tp. Full recomputation keeps the fp32 input only: 4 x hidden.
    Fitted to traces of GPT-2, Llama and Qwen3. Norms and residuals are always in fp32.

    Args:
        precision: of the job.
        shape: the sizes of the model.
        layout: the layout.
        tokens: of a micro-batch on this rank.
        whole: whether inputs that sequence parallelism gathers are kept whole, as in compiled layers and while a layer
            is recomputed.
    """
    is_fp32 = precision == "fp32"
    width = 4.0 if is_fp32 else 2.0
    if layout.recompute == "full":
        return tokens * shape.hidden * 4.0 / (layout.tp if layout.sequence else 1)
    keeps_all = layout.recompute == "none"
    residual = 16.0 if keeps_all else 12.0 if is_fp32 else 8.0
    if keeps_all and shape.gated:  # models with gated feed-forward blocks have RMS norms
        residual += 8.0 if is_fp32 else 11.0
    # The residual part contains the inputs of attention and of the feed-forward block. Without sequence parallelism,
    # each matrix product keeps its own cast of its input.
    inputs = (8.0 if is_fp32 else 10.0 if shape.gated else 8.0) if keeps_all else 8.0 if is_fp32 else 4.0
    # Without sequence parallelism every tensor-parallel rank keeps the whole residual part.
    undivided = residual
    gathers_again = layout.sequence and keeps_all and not whole
    if layout.sequence and keeps_all:
        # Both inputs once, in the dtype of products.
        residual += 2.0 * width - inputs
        undivided = 0.0 if gathers_again else 2.0 * width
    elif layout.sequence:
        undivided = inputs
    inner = width * 2.0 * (shape.heads + shape.kv_heads) * shape.head_size
    feedforward_bytes = width * (2.0 if keeps_all else 1.0) * (2.0 if shape.gated else 1.0)
    expert_share = shape.expert_layers / shape.layers if shape.layers else 0.0
    experts_per_token = shape.experts_per_token + shape.shared_experts
    columns = (
        1.0 - expert_share
    ) * shape.feedforward + expert_share * experts_per_token * shape.expert_feedforward
    if gathers_again and shape.gated:  # of a dense block gate and up alone
        columns -= 0.5 * (1.0 - expert_share) * shape.feedforward
    # Copies of the rows for experts: sorted ones, and those that other ranks have sent.
    copies = (3.0 if keeps_all else 0.0) + (1.0 if layout.ep > 1 else 0.0)
    expert_rows = copies * expert_share * shape.experts_per_token * shape.hidden * width
    outer = (undivided + max(residual - undivided, 0.0) / layout.tp) * shape.hidden
    normed = (
        (shape.normed / (layout.tp if layout.sequence else 1) + shape.normed_heads / layout.tp)
        if keeps_all
        else 0.0
    )
    return tokens * (
        outer + expert_rows + NORM_BYTES * normed + (inner + feedforward_bytes * columns) / layout.tp
    )


def _score_bytes(demand: Demand, shape: ModelShape, recompute: str, rows: float) -> tuple[float, float]:
    """Return the bytes that a layer keeps for its attention scores, and the bytes that it holds while it computes.

    Both are rows x sequence length x bytes per score; (0, 0) if a fused kernel keeps scores inside.

    Args:
        demand: gives the precision and dropout.
        shape: the sizes of the model.
        recompute: "none", "selective" or "full".
        rows: queries x heads on this rank.
    """
    is_unfused = bool(shape.capped or demand.program.attention_dropout)
    if not is_unfused and not shape.biased:
        return 0.0, 0.0
    width = 4 if demand.precision == "fp32" else 2
    kept_bytes = SCORE_BYTES[recompute][width] if is_unfused else 0.0
    bytes_at_once = SCORE_BYTES_AT_ONCE[recompute] if is_unfused else 0.0
    distances = 0.0
    if shape.biased:
        bias_with_unfused = UNFUSED_BIAS_AT_ONCE[recompute] if is_unfused else 0.0
        bytes_at_once = BIAS_BYTES_AT_ONCE[shape.biased][recompute] + bias_with_unfused
        if recompute != "full":
            bias_bytes = BIAS_BYTES[shape.biased][width]
            kept_bytes += max(bias_bytes - UNFUSED_BIAS, 0.0) if is_unfused else bias_bytes
            distances = DISTANCE_BYTES[width] * shape.distances
    attended = shape.score_share * shape.sequence_length
    return rows * (kept_bytes * attended + distances), rows * bytes_at_once * shape.sequence_length


def _cast_bytes(precision: Precision, shape: ModelShape, layout: Layout) -> float:
    """Return the bytes per parameter of 16-bit casts that layers without recomputation keep for the backward pass."""
    if layout.zero == 3 or layout.engine != "torch" or precision == "fp32":
        return 0.0
    return 2.0 * (1.0 - recomputed_share(shape, layout))


def _head_bytes(demand: Demand, shape: ModelShape, tokens: float, passes: int) -> float:
    """Return the bytes of the head: 4 x (copies x tokens at once x vocabulary + gradients x table).

    Copies are logits, softmax and gradient, and one more if logits are capped. A head in chunks computes the gradient
    of its weight in the forward pass, so each of `passes` forward passes holds one until its backward pass.
    """
    chunk_tokens = HEAD_TOKENS["cuda" if demand.on_gpu else "cpu"]
    is_chunked = shape.chunked_head and not demand.compares
    tokens *= shape.head_share
    if not tokens:
        return 0.0
    if is_chunked:
        tokens = min(tokens, chunk_tokens)
    copies = 4.0 if shape.capped_logits else 3.0
    copies += 0.0 if is_chunked else KEPT_LOGITS * (passes - 1)
    # An unchunked head makes its weight's gradient in the backward pass, when the logits are already freed.
    gradients = 2 if shape.generator else passes * is_chunked  # ELECTRA's two networks share the table
    return 4.0 * (copies * tokens * shape.vocabulary + gradients * shape.table)


def _generation_bytes(demand: Demand, shape: ModelShape) -> tuple[float, float]:
    """Return the bytes with which a rank generates answers: a whole copy of the model in fp32, whatever the layout, and
    the keys and values of the answers that it decodes at once.
    """
    return (
        generation_bytes(demand.precision, shape, demand.decoded_at_once)
        if demand.decoded_at_once
        else (0.0, 0.0)
    )


def generation_bytes(precision: Precision, shape: ModelShape, answers: int) -> tuple[float, float]:
    """Return the bytes of a whole copy of the model in fp32, and of the keys and values of so many answers.

    Args:
        precision: of the job; keys and values have its width.
        shape: the sizes of the model.
        answers: number of answers that are decoded at once, each as long as a row.
    """
    width = 4.0 if precision == "fp32" else 2.0
    head = shape.head_dim or shape.hidden // shape.heads
    tokens = answers * shape.sequence_length
    # 2: keys and values.
    return 4.0 * shape.parameters, 2.0 * width * tokens * shape.layers * shape.kv_heads * head


def teacher_bytes(precision: Precision, shape: ModelShape, layout: Layout, accumulation: int) -> float:
    """Return the bytes of a teacher that runs in every step: its weights in fp32, and the logits of a micro-batch.

    Weights are whole, or sharded under ZeRO 3 or by `distill.shard`. A pipeline's last stage keeps the logits of all
    micro-batches.

    Args:
        precision: of the job.
        shape: the sizes of the student, which has those of its teacher.
        layout: of both.
        accumulation: micro-batches of a rank in a step.
    """
    teacher = shape.running_teacher
    if teacher is None:
        return 0.0
    rows = teacher.head_share * layout.micro_batch * shape.sequence_length / layout.cp
    width = 4.0 if precision == "fp32" else 2.0
    micro_batches = accumulation if layout.pp > 1 else 1
    logits = micro_batches * width * rows * teacher.vocabulary / layout.tp
    return _teacher_weights(teacher, layout, shape.teacher_sharded) + logits


def _teacher_weights(teacher: ModelShape, layout: Layout, sharded: bool) -> float:
    """Return the bytes of a rank's weights of a teacher in a layout."""
    shards = zero_shards(teacher, layout, layout.sharded) if layout.zero >= 3 or sharded else 1
    return 4.0 * local_parameters(teacher, layout) / shards


def early_teacher_bytes(demand: Demand, shape: ModelShape, layout: Layout) -> float:
    """Return the bytes of a teacher whose logits the ranks may have to compute before the first step.

    For stored logits it has the student's layout. In place of teacher workers, each rank holds it whole, unless the job
    requires a teacher worker: then it is 0.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of the student, which has those of its teacher.
        layout: the student's.
    """
    teacher = shape.teacher
    if teacher is None or shape.teacher_runs:
        return 0.0
    if demand.teacher_workers is not None:
        return whole_teacher_bytes(demand, shape) if demand.teacher_workers.min == 0 else 0.0
    tokens = layout.micro_batch * shape.sequence_length / layout.cp
    weights = _teacher_weights(teacher, layout, shape.teacher_sharded)
    return weights + _top_logits_bytes(teacher, tokens) / layout.tp


def whole_teacher_bytes(demand: Demand, shape: ModelShape) -> float:
    """Return the bytes with which one process computes logits alone: the teacher in fp32, and what a pass holds.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of the student, which has those of its teacher.
    """
    teacher = shape.teacher
    assert teacher is not None
    tokens = rows_of_pass(demand.batch, demand.shards, shape.sequence_length) * shape.sequence_length
    return 4.0 * teacher.parameters + _top_logits_bytes(teacher, tokens)


def _top_logits_bytes(teacher: ModelShape, tokens: float) -> float:
    """Return the bytes of a pass that finds the largest logits of so many tokens: the head, or a layer."""
    logits = LOGIT_COPIES * 4.0 * teacher.head_share * tokens * teacher.vocabulary
    layer = 4.0 * tokens * max(4.0 * teacher.hidden, 3.0 * teacher.feedforward)
    return max(logits, layer)


def _table_gradient_bytes(shape: ModelShape, first: bool, last: bool) -> float:
    """Return the bytes of gradients of tables at the end of a backward pass.

    They are one table on a rank with the embedding; three if it also has the tied head: both gradients and their sum.
    """
    # The lookup's gradient is a dense table, and autograd adds it to the head's into a third one.
    tables = 0
    if first:
        tables = 3 if last and shape.tied and shape.head_share else 1
    return 4.0 * tables * shape.trained_share * shape.table


def offloaded_bytes(optimizer: str, shape: ModelShape, layout: Layout) -> float:
    """Return the bytes that a rank keeps in its host's memory in place of the device's.

    They are the optimizer state, with DeepSpeed also the gradients and its copy of the weights, and with offloaded
    parameters the weights (Ren et al., 2021, section 4.1).

    Args:
        optimizer: its name.
        shape: the sizes of the model.
        layout: says what is offloaded.
    """
    if layout.offload == "none":
        return 0.0
    deepspeed = layout.engine == "deepspeed"
    bytes_per_parameter = 4.0 * kept_numbers(optimizer, shape) + (8.0 if deepspeed else 0.0)
    bytes_per_parameter = bytes_per_parameter * shape.trained_share + (
        4.0 if layout.offload == "parameters" else 0.0
    )
    shards = zero_shards(shape, layout, layout.sharded) if layout.zero else 1
    return bytes_per_parameter * local_parameters(shape, layout) / shards


def _weight_bytes(shape: ModelShape, layout: Layout) -> float:
    """Return the bytes per parameter of a rank's weights. ZeRO does not shard those in 4 bits."""
    shards = zero_shards(shape, layout, layout.sharded) if layout.zero >= 3 else 1
    return 4.0 * (1.0 - shape.quantised_share) / shards + NF4_BYTES * shape.quantised_share


def _state_bytes(demand: Demand, shape: ModelShape, layout: Layout) -> float:
    """Return the bytes per parameter of weight, gradient, optimizer state, moving average and reference on the device.

    See the table of ZeRO above. Frozen parameters have no gradient and no state. Offloaded state is in host memory,
    which is not counted. DeepSpeed keeps a second fp32 copy of the weights that a rank updates, and sends gradients to
    the host as they are summed (Ren et al., 2021, section 4.1). torch's pipelines sum gradients after the last
    micro-batch only, so gradients (ZeRO 2 and 3) and gathered weights (ZeRO 3) stay whole until then.
    """
    deepspeed = layout.engine == "deepspeed"
    state_numbers = 4.0 * kept_numbers(demand.program.optimizer, shape)
    slots = state_numbers + (4.0 if deepspeed else 0.0) + (4.0 if demand.ema is not None else 0.0)
    slots += 4.0 if demand.program.reference else 0.0
    tables = shape.table * (1 if shape.tied else 2)  # which are not pruned
    slots += demand.pruned * max(0.0, 1.0 - tables / shape.parameters)
    trained = shape.trained_share
    shards = zero_shards(shape, layout, layout.sharded)
    optimizer = slots * trained / (shards if layout.zero >= 1 else 1)
    gradients = 4.0 * trained / (shards if layout.zero >= 2 and layout.pp == 1 else 1)
    weights = _weight_bytes(shape, layout)
    if layout.zero >= 3 and layout.pp > 1:
        gathers_16_bits = demand.precision in ("bf16", "fp8") and layout.schedule not in SPLIT
        # Gathered weights in bf16 take 2 bytes; schedules that split the backward pass gather fp32, since W adds up in
        # the weight's dtype.
        weights += (2.0 if gathers_16_bits else 4.0) * (1.0 - shape.quantised_share)
    if layout.offload == "none":
        return weights + gradients + optimizer
    # DeepSpeed moves each bucket of gradients to the host as soon as it is reduced.
    gradients *= 0.0 if deepspeed and layout.zero >= 2 else 1.0
    return gradients + (weights if layout.offload == "optimizer" else 0.0)
