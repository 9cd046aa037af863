"""Seconds of one micro-batch on one rank: matrix products, attention, element-wise operations, and collectives between.

The matrix products of a layer are those of Narayanan et al., 2021 (appendix), split as in Megatron's tensor
parallelism. Sequence parallelism divides norms and residuals (Korthikanti et al., 2022, section 4.2).

A product [rows, inner] x [inner, columns] costs 2 x rows x columns x inner FLOPs, and its backward pass twice that:
[rows, columns] x [columns, inner] for the input and [inner, rows] x [rows, columns] for the weight. `Machine` turns
FLOPs and bytes into seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from orchestrator.parallel.arithmetic import HEAD_TOKENS
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.device import Machine
from orchestrator.planner.simulation.collectives import Group

RESIDUAL_PASSES = 10.0
"""How often a layer reads or writes the residual stream forward: two norms (2 each) and two additions (3 each)."""
DISPATCH_PASSES = 4.0
"""How often each hidden number of a token is read or written per expert it goes to: sorted by expert (2), and back
(2)."""
UNFUSED_SCORE_BYTES = 12.2
"""Bytes read and written for each attention score when no fused kernel supports the layer's options: those of the A100
before fused kernels existed."""
DRAWN_SCORE_BYTES = 48.0
"""Bytes read and written for each score's random number: twelve operations on 64-bit numbers yield four of them."""
LOGIT_BYTES = 24.0
"""Bytes read and written for each fp32 logit: maximum, exponential and sum forward, the softmax's gradient backward."""
LOSS_SUMS = 3.0
"""All-reduces of a loss whose logits are split over tensor-parallel ranks, for each chunk of tokens: the largest logit,
the sum of exponentials, and the label's logit, each one number per token."""
OPERATIONS = 20.0
"""Operations that a compiled layer launches forward; backward it launches twice as many."""
EAGER_OPERATIONS, EAGER_GATED = 26.0, 45.0
"""The same for layers that are not compiled. A trace of this engine in 16 bits counts 76 operations in both directions
for GPT, and 134 for Llama, whose norms and rotations consist of several operations."""
QUANTISE_OPERATIONS, FUSED_QUANTISE_OPERATIONS = 18.0, 4.0
"""Additional operations of a linear layer in 8 bits, in each direction: nine operations compute a scale, two if
compiled."""
ROUND_BYTES, ROUND_OPERATIONS = 36.0, 8.0
"""Fake quantisation of a number in fp32, in one direction: five operations that read it, of which four write it, and
the launches of those and of the scales."""
CHECKPOINT = 4e-4
"""Seconds of the process that torch's checkpoint takes to save a layer's inputs and restart it, besides launches: 0.4
to 0.5 ms on a Zen 5."""
EXPERT_OPERATIONS = 30.0
"""Operations that experts add to a layer forward; a trace of Mixtral counts 224."""
MESSAGE_OPERATIONS = 8.0
"""Time of a process to start a tensor-parallel sum or an exchange of experts, in launches of operations: 50 to 100 us,
measured on a CPU with messages that are not sent."""


@dataclass(frozen=True)
class Program:
    """Properties of a step's computation besides its layout.

    Attributes:
        width: bytes of a number in matrix products.
        in_8_bits: number of a linear layer's three products that run in 8 bits. 2: output and gradient of the input;
            3: also the gradient of the weight.
        quantised: 16-bit numbers read or written for each number that is rounded to 8 bits: read for the row's
            maximum, read for itself, and half a number written.
        hidden_sums: share of the tensor-parallel traffic of a layer that its own products hide; 0 in this engine.
        dropout: whether activations are dropped.
        attention_dropout: whether attention weights are dropped, which no fused kernel supports.
        gather_width: bytes of a weight that ZeRO gathers.
        gradient_width: bytes of a gradient that is summed over ranks.
        carried_width: bytes of a hidden state between pipeline stages.
        compiled: whether element-wise operations of a layer are fused.
        products_again: share of the matrix products that selective recomputation does not keep.
        commit_every: steps between commits, 0 for none.
        optimizer: name of the optimizer.
        reference: whether a reference model on the same ranks adds a forward pass.
        rounds_weights: whether linear layers are fake-quantised, in both directions.
        rounds_inputs: whether their inputs are too, in the forward pass.
    """

    width: float = 2.0
    in_8_bits: int = 0
    quantised: float = 2.5
    hidden_sums: float = 0.0
    dropout: bool = False
    attention_dropout: bool = False
    gather_width: float = 4.0
    gradient_width: float = 4.0
    carried_width: float = 4.0
    compiled: bool = False
    products_again: float = 0.0
    commit_every: int = 0
    optimizer: str = "adamw"
    reference: bool = False
    rounds_weights: bool = False
    rounds_inputs: bool = False


@dataclass(frozen=True)
class Times:
    """Seconds of a part of a model for one micro-batch.

    Attributes:
        forward: compute of the forward pass.
        inputs: compute of the gradients of the inputs (I).
        weights: compute of the gradients of the weights (W).
        recompute: recomputation in the backward pass.
        sent_forward: communication of the forward pass.
        sent_backward: communication of the backward pass.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    recompute: float = 0.0
    sent_forward: float = 0.0
    sent_backward: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of compute in both directions."""
        return self.forward + self.inputs + self.weights + self.recompute

    @property
    def sent(self) -> float:
        """Seconds of communication in both directions."""
        return self.sent_forward + self.sent_backward

    def with_reference(self) -> Times:
        """Return these times with a second forward pass, that of a reference model."""
        return replace(self, forward=2.0 * self.forward, sent_forward=2.0 * self.sent_forward)

    def with_forward(self, other: Times, times: float = 1.0) -> Times:
        """Return these times with the forward passes of another model, a teacher, `times` as often.

        Args:
            other: the other model's times.
            times: how often its forward pass runs.
        """
        return replace(
            self,
            forward=self.forward + times * other.forward,
            sent_forward=self.sent_forward + times * other.sent_forward,
        )

    def all_forward(self) -> Times:
        """Return these times with all compute in the forward pass, as in a head that computes its loss in chunks."""
        return Times(self.compute, sent_forward=self.sent_forward, sent_backward=self.sent_backward)

    def mixed(self, other: Times, share: float) -> Times:
        """Return share x self + (1 - share) x other.

        Args:
            other: the times of the other kind of layer.
            share: of these times.
        """
        own_times = vars(self)
        other_times = vars(other)
        return Times(
            **{part: share * own_times[part] + (1.0 - share) * other_times[part] for part in own_times}
        )


@lru_cache(maxsize=4096)
def layer(
    shape: ModelShape, machine: Machine, program: Program, part: tuple[int, ...], recompute: str
) -> Times:
    """Return the times of a mean layer for one micro-batch on one rank.

    Args:
        shape: the sizes of the model.
        machine: the worker.
        program: dtypes, dropout, compilation.
        part: (sequences, tp, cp, ep, sequence parallelism as 0 or 1) of the layout, see `parts_of`.
        recompute: "none", "selective" or "full".
    """
    sequences, tp, cp, ep, sliced = part
    length = shape.sequence_length
    tokens = sequences * length / cp  # of this rank
    dense = [_Products(tokens, *sizes, dense=True) for sizes in _matrices(shape, tp)]
    products = dense + _expert_products(shape, tokens, tp, ep)
    # Cross-attention and other layers have more products than the listed ones; their share of FLOPs scales the sum.
    scale = _unlisted_products_factor(shape)  # for products that are not listed
    forward = scale * sum(
        p.count * machine.matrix(p.rows, p.columns, p.inner, p.width(program, 1)) for p in products
    )
    inputs = scale * sum(
        p.count * machine.matrix(p.rows, p.inner, p.columns, p.width(program, 2)) for p in products
    )
    if program.in_8_bits:
        # Rounding to 8 bits reads and writes inputs and weights forward; backward gradients and weights, which
        # are also transposed.
        weight_numbers = sum(p.count * p.inner * p.columns for p in dense)
        passes = 2.0 * scale * program.quantised
        forward += passes * machine.elements(weight_numbers + sum(p.count * p.rows * p.inner for p in dense))
        inputs += passes * machine.elements(
            2.0 * weight_numbers + sum(p.count * p.rows * p.columns for p in dense)
        )
    if program.rounds_weights:
        rounded = scale * ROUND_BYTES * machine.elements(sum(p.count * p.inner * p.columns for p in dense))
        forward += rounded
        inputs += rounded
    if program.rounds_inputs:
        forward += scale * ROUND_BYTES * machine.elements(sum(p.count * p.rows * p.inner for p in dense))
    weights = (
        scale
        * shape.trained_share
        * sum(p.count * machine.matrix(p.inner, p.columns, p.rows, p.width(program, 3)) for p in products)
    )
    heads = shape.heads / (tp if shape.heads_split else 1)
    # These options have no fused kernel (`workloads.model.kernels`), so scores travel through memory.
    unfused = shape.capped or shape.biased in ("disentangled", "relative_keys") or program.attention_dropout
    if unfused and not machine.score_bytes:
        drawn = DRAWN_SCORE_BYTES if program.attention_dropout else 0.0
        machine = replace(machine, score_bytes=UNFUSED_SCORE_BYTES + drawn)
    # A fused kernel skips the masked half of a causal mask.
    # An unfused kernel computes all L^2 scores and masks them afterwards.
    score_share = 0.5 if shape.causal and not machine.score_bytes else 1.0
    attention_forward, attention_backward = machine.scores(
        score_share * tokens * length * heads, shape.head_size, program.width
    )
    element = machine.elements(_elementwise_bytes(shape, tokens, tp, bool(sliced), program))
    element *= 1.0 if program.compiled else machine.eager
    messages, experts = _message_seconds(shape, machine, program, tokens, part)
    ring_seconds = _ring_seconds(shape, machine, program=program, tokens=tokens, tp=tp, cp=cp)
    launches = operations(shape, machine, program, tp, ep)
    # A GPU's process launches messages and operations in one order and runs ahead of both, so time of messages also
    # covers launches.
    visible_messages = messages if machine.launches_ahead else 0.0
    forward_seconds = forward + attention_forward + element + visible_messages
    forward_launched = machine.launched(forward_seconds, launches) - visible_messages
    # Selective recomputation repeats the scores if attention is not fused, else all element-wise operations.
    selective = (attention_forward if machine.score_bytes else element) + program.products_again * forward
    for_inputs = (
        machine.launched(inputs + attention_backward + 1.5 * element + visible_messages, launches)
        - visible_messages
    )
    for_weights = machine.launched(weights, launches)
    repeated_messages = messages + experts if recompute == "full" else 0.0
    if sliced and recompute == "none" and not program.compiled:
        # A rank keeps its slices of the inputs of attention and of the feed-forward block, and gathers them again.
        gathered = 2.0 * Group(tp, 1, machine).gather(tokens * shape.hidden * program.width)
        repeated_messages += gathered * (1.0 - program.hidden_sums)
    again = {
        "none": 0.0,
        "selective": machine.launched(selective, launches, CHECKPOINT),
        "full": machine.launched(forward_seconds, launches, CHECKPOINT) - visible_messages,
    }[recompute]
    sums = 2.0 if tp > 1 else 0.0  # attention and feed-forward, each followed by a tensor-parallel sum
    delay = sums * machine.collective_delay(forward_launched / 2.0)
    backward_delay = sums * machine.collective_delay((for_inputs + for_weights) / 2.0) + (
        delay if repeated_messages else 0.0
    )
    # Attention hides the exchange of keys and values (backward also of their gradients) as long as it takes itself.
    times = Times(
        forward=forward_launched,
        inputs=for_inputs,
        weights=for_weights,
        recompute=again,
        sent_forward=messages + experts + max(0.0, ring_seconds - attention_forward) + delay,
        sent_backward=messages
        + experts
        + max(0.0, 2.0 * ring_seconds - attention_backward)
        + repeated_messages
        + backward_delay,
    )
    if program.reference:
        times = times.with_reference()
    teacher = shape.running_teacher
    if teacher is None:
        return times
    # A teacher only runs forward, so nothing is recomputed, whatever the student does.
    teacher_times = layer(teacher, machine, _teacher_program(program), part, "none")
    return times.with_forward(teacher_times, teacher.layers / max(shape.layers, 1))


def _teacher_program(program: Program) -> Program:
    """Return how a teacher computes: as its student, without dropout, compilation and 8 bits."""
    return replace(
        program, in_8_bits=0, dropout=False, attention_dropout=False, compiled=False, reference=False
    )


def operations(shape: ModelShape, machine: Machine, program: Program, tp: int, ep: int) -> float:
    """Return the operations that a layer launches forward; on a GPU including the time to start its messages.

    Args:
        shape: the sizes of the model.
        machine: the worker.
        program: dtypes and compilation.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks.
    """
    eager = EAGER_GATED if shape.gated else EAGER_OPERATIONS
    share = shape.expert_layers / shape.layers if shape.layers else 0.0
    launches = (OPERATIONS if program.compiled else eager) + share * EXPERT_OPERATIONS
    if program.in_8_bits:
        linear = 4.0 + (1.0 - share) * (3.0 if shape.gated else 2.0)
        launches += linear * (FUSED_QUANTISE_OPERATIONS if program.compiled else QUANTISE_OPERATIONS)
    if program.rounds_weights:
        linear = 4.0 + (1.0 - share) * (3.0 if shape.gated else 2.0)
        launches += linear * ROUND_OPERATIONS * (2.0 if program.rounds_inputs else 1.0)
    if not machine.launches_ahead:
        return launches
    return launches + 2.0 * MESSAGE_OPERATIONS * ((tp > 1) + share * (ep > 1))


@lru_cache(maxsize=4096)
def ends(shape: ModelShape, machine: Machine, program: Program, part: tuple[int, ...]) -> tuple[Times, Times]:
    """Return the times of embedding and head for one micro-batch on one rank; `part` as in `layer`.

    The head is a product [tokens, hidden] x [hidden, vocabulary / tp] and the loss of its logits.

    Args:
        shape: the sizes of the model.
        machine: the worker.
        program: dtypes and compilation.
        part: as in `layer`.
    """
    sequences, tp, cp, _, _ = part
    tokens = sequences * shape.sequence_length / cp
    embedding_seconds = machine.elements(tokens * shape.hidden * 2.0 * program.width)
    columns = shape.vocabulary / tp
    width = program.width
    group = Group(tp, 1, machine)
    # Each rank looks up its part of the vocabulary; the sum over ranks completes the hidden states.
    # No gradient of the input: tokens have none. The weight's gradient is a scatter-add, read and written.
    embedding = Times(
        embedding_seconds,
        0.0,
        2.0 * embedding_seconds,
        sent_forward=group.all_reduce(tokens * shape.hidden * width),
    )
    rows = shape.head_share * tokens
    inner = shape.embedding or shape.hidden
    head = Times()
    if rows:
        logits = machine.elements(rows * columns * LOGIT_BYTES)
        chunk_tokens = HEAD_TOKENS["cuda" if machine.launches_ahead else "cpu"]
        sums = LOSS_SUMS * math.ceil(rows / chunk_tokens) * group.all_reduce(4.0 * min(rows, chunk_tokens))
        forward = machine.launched(machine.matrix(rows, columns, inner, width) + logits / 2, OPERATIONS)
        inputs = machine.launched(machine.matrix(rows, inner, columns, width) + logits / 2, OPERATIONS)
        weights = shape.trained_share * machine.matrix(inner, columns, rows, width)
        backward_sum = group.all_reduce(rows * shape.hidden * width)
        if tp > 1:
            sums += machine.collective_delay(forward)
            backward_sum += machine.collective_delay(inputs + weights)
        head = Times(forward, inputs, weights, sent_forward=sums, sent_backward=backward_sum)
    if program.reference:
        embedding = embedding.with_reference()
        head = head.with_reference()
    head = head.all_forward() if shape.chunked_head else head
    teacher = shape.running_teacher
    if teacher is None:
        return embedding, head
    first, last = ends(replace(teacher, chunked_head=False), machine, _teacher_program(program), part)
    return embedding.with_forward(first), head.with_forward(last)


@dataclass(frozen=True)
class _Products:
    """`count` products [rows, inner] x [inner, columns]; `dense` ones may run in 8 bits."""

    rows: float
    columns: float
    inner: float
    count: float
    dense: bool = False

    def width(self, program: Program, number: int) -> float:
        """Return the bytes of a number in product 1 (output), 2 (input's gradient) or 3 (weight's gradient)."""
        return 1.0 if self.dense and number <= program.in_8_bits else program.width


@lru_cache(maxsize=256)
def _matrices(shape: ModelShape, tp: int) -> tuple[tuple[float, float, float], ...]:
    """Return (columns, inner, number in a mean layer) of the dense products of a rank."""
    heads = tp if shape.heads_split else 1
    query = shape.heads * shape.head_size
    keys = shape.kv_heads * shape.head_size
    dense = 1.0 - (shape.expert_layers / shape.layers if shape.layers else 0.0)
    up = (2.0 if shape.gated else 1.0) * shape.feedforward / tp
    products = [
        ((query + 2 * keys) / heads, float(shape.hidden), 1.0),  # query, key and value
        (float(shape.hidden), query / heads, 1.0),  # output of attention
    ]
    if dense:
        products.append((up, float(shape.hidden), dense))
        products.append((float(shape.hidden), shape.feedforward / tp, dense))
    return tuple(products)


def _expert_products(shape: ModelShape, tokens: float, tp: int, ep: int) -> list[_Products]:
    """Return the products of a rank's experts.

    With random routing the fullest of n ranks has mean x (1 + sqrt(2 ln n / mean)) rows (Raab and Steger, 1998). The
    step waits for that rank.
    """
    if not shape.experts or not shape.expert_layers:
        return []
    share = shape.expert_layers / shape.layers
    arriving = tokens * shape.experts_per_token
    arriving *= 1.0 + math.sqrt(2.0 * math.log(ep) / max(arriving, 1.0))
    local = shape.experts / ep
    rows = max(arriving / local, 1.0)
    up = (2.0 if shape.gated else 1.0) * shape.expert_feedforward / tp
    down = shape.expert_feedforward / tp
    products = [
        _Products(rows, up, shape.hidden, share * local),
        _Products(rows, shape.hidden, down, share * local),
    ]
    if shape.shared_experts:
        shared_count = share * shape.shared_experts
        products.append(_Products(tokens, up, shape.hidden, shared_count))
        products.append(_Products(tokens, shape.hidden, down, shared_count))
    return products


def needed_flops(shape: ModelShape) -> float:
    """Return the FLOPs per token of a step. A third of a weight's FLOPs are its gradient, which frozen weights lack."""
    weight_flops = max(shape.flops_per_token - _score_flops(shape), 0.0)
    return shape.flops_per_token - (1.0 - shape.trained_share) * weight_flops / 3.0


def _score_flops(shape: ModelShape) -> float:
    """Return the FLOPs per token of attention scores in both directions: 12 x layers x heads x head size x length."""
    return 12.0 * shape.layers * shape.heads * shape.head_size * shape.sequence_length


def with_length(shape: ModelShape, length: int) -> ModelShape:
    """Return the shape with other lengths of sequences.

    Args:
        shape: the sizes of the model.
        length: tokens of a sequence.
    """
    resized = replace(shape, sequence_length=length)
    flops = shape.flops_per_token - _score_flops(shape) + _score_flops(resized)
    return replace(resized, flops_per_token=flops)


@lru_cache(maxsize=256)
def _unlisted_products_factor(shape: ModelShape) -> float:
    """Return (FLOPs of all layers' products) / (FLOPs of the products listed here), per token.

    The ratio stands for products of other architectures, such as cross-attention, a generator or latent vectors.
    """
    total = shape.flops_per_token - _score_flops(shape) - 6.0 * shape.head_share * shape.table
    listed = sum(6.0 * columns * inner * count for columns, inner, count in _matrices(shape, 1))
    listed += sum(
        6.0 * p.rows * p.columns * p.inner * p.count / 1e6 for p in _expert_products(shape, 1e6, 1, 1)
    )
    listed *= shape.layers
    return total / listed if listed and total > 0.1 * listed else 1.0


def _elementwise_bytes(shape: ModelShape, tokens: float, tp: int, sliced: bool, program: Program) -> float:
    """Return the bytes that a layer's element-wise operations read and write forward."""
    residual = tokens * shape.hidden / (tp if sliced else 1)
    dense = 1.0 - (shape.expert_layers / shape.layers if shape.layers else 0.0)
    inner = dense * shape.feedforward
    inner += (1.0 - dense) * shape.expert_feedforward * (shape.experts_per_token + shape.shared_experts)
    numbers = RESIDUAL_PASSES * residual + (3.0 if shape.gated else 2.0) * tokens * inner / tp
    numbers += (1.0 - dense) * DISPATCH_PASSES * tokens * shape.experts_per_token * shape.hidden
    # Dropout has two masks of one byte per number.
    return numbers * program.width + (2.0 * residual if program.dropout else 0.0)


def _message_seconds(
    shape: ModelShape, machine: Machine, program: Program, tokens: float, part: tuple[int, ...]
) -> tuple[float, float]:
    """Return the seconds of a layer's tensor-parallel sums and of its exchanges of experts, in a forward pass.

    A layer has two sums of tokens x hidden x width bytes; under sequence parallelism each is a reduce-scatter and an
    all-gather. A layer with experts has two all-to-alls of tokens x experts per token x hidden x width bytes.
    """
    _, tp, cp, ep, sliced = part
    group = Group(tp, 1, machine)
    summed = tokens * shape.hidden * program.width
    sums = 2.0 * (group.scatter(summed) + group.gather(summed) if sliced else group.all_reduce(summed))
    sums *= 1.0 - program.hidden_sums
    if ep == 1 or not shape.layers:
        return sums, 0.0
    size = tokens * shape.experts_per_token * shape.hidden * program.width
    share = shape.expert_layers / shape.layers
    return sums, 2.0 * share * Group(ep, tp * cp, machine).all_to_all(size)


def _ring_seconds(
    shape: ModelShape, machine: Machine, program: Program, tokens: float, tp: int, cp: int
) -> float:
    """Return the seconds in which all context-parallel ranks get each other's keys and values: cp - 1 messages.

    A message has 2 x tokens x kv heads x head size x width bytes: the keys and values of one rank.
    """
    heads = shape.kv_heads / (tp if shape.heads_split else 1)
    size = 2.0 * tokens * heads * shape.head_size * program.width
    return (cp - 1) * Group(cp, tp, machine).to_next(size)
