"""Seconds of the operators of one micro-batch on one rank: matrix products, attention, element-wise operations, and the
collectives between them.

The products of a layer are those of Narayanan et al., 2021 (appendix), split as in Megatron's tensor parallelism;
sequence parallelism divides the norms and residuals (Korthikanti et al., 2022, section 4.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from orchestrator.parallel.engine_rules import HEAD_TOKENS
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.device import Machine
from orchestrator.planner.simulation.collectives import Group

RESIDUAL_PASSES = 10.0
"""Numbers of the residual stream that a layer reads and writes forward: two norms (4) and two additions (6)."""
DISPATCH_PASSES = 4.0
"""Numbers that are read and written for each hidden number of a token that an expert gets: it is put in the experts'
order, and back."""
UNFUSED_SCORE_BYTES = 12.2
"""Bytes that pass for each score where a device's kernel would keep them inside, but none does what is asked for: those
of the A100 before there were fused kernels."""
DRAWN_SCORE_BYTES = 48.0
"""Bytes that pass for each random number of a score: twelve operations on 64 bits, which serve four."""
LOGIT_BYTES = 24.0
"""Bytes that pass for each logit in fp32: maximum, exponential and sum forward, the softmax's gradient backward."""
LOSS_SUMS = 3.0
"""Messages of a loss whose logits are cut over ranks, for the tokens that a head computes at once: the largest logit,
the sum of the exponentials, and the logit of the label, each a number for each token."""
OPERATIONS = 20.0
"""Operations that a layer of fused kernels launches forward; backward it is twice as many."""
EAGER_OPERATIONS, EAGER_GATED = 26.0, 45.0
"""The same of this engine's layers where nothing is compiled, as its trace counts them in 16 bits: of GPT 76 in both
directions, of Llama, whose norms and rotations are in parts, 134."""
QUANTISE_OPERATIONS, FUSED_QUANTISE_OPERATIONS = 18.0, 4.0
"""What a linear layer launches more in each direction where its product is in 8 bits: nine operations make a factor,
two where they are compiled."""
CHECKPOINT = 4e-4
"""Seconds in which a process keeps a layer's inputs, by torch's checkpoint, and begins it again, besides launches:
0.4 to 0.5 ms on a Zen 5."""
EXPERT_OPERATIONS = 30.0
"""What experts add to that: of Mixtral 224 are counted."""
MESSAGE_OPERATIONS = 8.0
"""Operations in whose time a process begins a tensor-parallel sum or an exchange of experts: 50 to 100 us, measured on
a CPU with messages that are not sent."""


@dataclass(frozen=True)
class Program:
    """How a step is computed, besides its layout.

    Attributes:
        width: bytes of a number in matrix products.
        in_8_bits: how many of the three products of a linear layer are in 8 bits: 2 are its output and the gradient of
            its input, 3 the gradient of its weight too.
        quantised: numbers of 16 bits that are read and written for each that is made one of 8: here for the row's
            largest, for itself, and half a one written; a weight is also transposed backward.
        hidden_sums: share of the tensor-parallel traffic within a layer that its own products hide; here none.
        dropout: whether activations are dropped.
        attention_dropout: whether the shares of attention are dropped, which no fused kernel does.
        gather_width: bytes of a weight that ZeRO gathers.
        gradient_width: bytes of a gradient that is summed over ranks.
        carried_width: bytes of a hidden state between pipeline stages.
        compiled: whether element-wise operations of a layer are fused.
        products_again: share of the matrix products that selective recomputation does not keep.
        commit_every: steps between commits, 0 for none.
        optimizer: its name.
        reference: whether a model that is held for comparison has a forward pass too.
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


@dataclass(frozen=True)
class Times:
    """Seconds of part of a model for one micro-batch: compute forward, backward for the inputs and for the weights, and
    again where it is recomputed; communication forward and backward."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    again: float = 0.0
    sent_forward: float = 0.0
    sent_backward: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of compute in both directions."""
        return self.forward + self.inputs + self.weights + self.again

    @property
    def sent(self) -> float:
        """Seconds of communication in both directions."""
        return self.sent_forward + self.sent_backward

    def twice_forward(self) -> Times:
        """This with a second forward pass, without one back."""
        return replace(self, forward=2.0 * self.forward, sent_forward=2.0 * self.sent_forward)

    def all_forward(self) -> Times:
        """This where the forward pass makes the gradients too, as a head does that computes its loss by parts."""
        return Times(self.compute, sent_forward=self.sent_forward, sent_backward=self.sent_backward)

    def mixed(self, other: Times, share: float) -> Times:
        """A mean of this, of which there is a `share`, and the other."""
        mine, others = vars(self), vars(other)
        return Times(**{part: share * mine[part] + (1.0 - share) * others[part] for part in mine})


@lru_cache(maxsize=4096)
def layer(
    shape: ModelShape, machine: Machine, program: Program, part: tuple[int, ...], recompute: str
) -> Times:
    """A mean layer. `part` is (sequences, tp, cp, ep, sequence) of the layout. Frozen weights have no gradient."""
    sequences, tp, cp, ep, sliced = part
    length = shape.sequence_length
    tokens = sequences * length / cp
    dense = [_Products(tokens, *sizes, dense=True) for sizes in _matrices(shape, tp)]
    products = dense + _expert_products(shape, tokens, tp, ep)
    scale = _unlisted(shape)
    forward = scale * sum(
        p.count * machine.matrix(p.rows, p.columns, p.inner, p.width(program, 1)) for p in products
    )
    inputs = scale * sum(
        p.count * machine.matrix(p.rows, p.inner, p.columns, p.width(program, 2)) for p in products
    )
    if program.in_8_bits:
        weighed = sum(p.count * p.inner * p.columns for p in dense)
        passes = 2.0 * scale * program.quantised
        forward += passes * machine.elements(weighed + sum(p.count * p.rows * p.inner for p in dense))
        inputs += passes * machine.elements(2.0 * weighed + sum(p.count * p.rows * p.columns for p in dense))
    weights = (
        scale
        * shape.trained_share
        * sum(p.count * machine.matrix(p.inner, p.columns, p.rows, p.width(program, 3)) for p in products)
    )
    heads = shape.heads / (tp if shape.heads_split else 1)
    unfused = shape.capped or shape.biased in ("disentangled", "relative_keys") or program.attention_dropout
    if unfused and not machine.score_bytes:
        drawn = DRAWN_SCORE_BYTES if program.attention_dropout else 0.0
        machine = replace(machine, score_bytes=UNFUSED_SCORE_BYTES + drawn)
    seen = 0.5 if shape.causal and not machine.score_bytes else 1.0
    ahead, back = machine.scores(seen * tokens * length * heads, shape.head_size, program.width)
    element = machine.elements(_moved(shape, tokens, tp, bool(sliced), program))
    element *= 1.0 if program.compiled else machine.eager
    sent, experts = _sent(shape, machine, program, tokens, part)
    ring = _ring(shape, machine, program, tokens, tp, cp)
    launches = operations(shape, machine, program, tp, ep)
    # the process launches messages and operations in one order, and runs ahead of both
    shown = sent if machine.launches_ahead else 0.0
    passed = forward + ahead + element + shown
    whole = machine.launched(passed, launches) - shown
    # without fused attention the scores are what is dear to keep, with it everything but products is
    selective = (ahead if machine.score_bytes else element) + program.products_again * forward
    for_inputs = machine.launched(inputs + back + 1.5 * element + shown, launches) - shown
    for_weights = machine.launched(weights, launches)
    sent_again = sent + experts if recompute == "full" else 0.0
    again = {
        "none": 0.0,
        "selective": machine.launched(selective, launches, CHECKPOINT),
        "full": machine.launched(passed, launches, CHECKPOINT) - shown,
    }[recompute]
    halves = 2.0 if tp > 1 else 0.0  # of a layer, each with a sum behind it
    woken = halves * machine.behind(whole / 2.0)
    woken_back = halves * machine.behind((for_inputs + for_weights) / 2.0) + (woken if sent_again else 0.0)
    found = Times(
        whole,
        for_inputs,
        for_weights,
        again,
        sent + experts + max(0.0, ring - ahead) + woken,
        sent + experts + max(0.0, 2.0 * ring - back) + sent_again + woken_back,
    )
    return found.twice_forward() if program.reference else found


def operations(shape: ModelShape, machine: Machine, program: Program, tp: int, ep: int) -> float:
    """Operations that a layer launches forward, on a GPU with what its messages take of the process that launches
    them."""
    eager = EAGER_GATED if shape.gated else EAGER_OPERATIONS
    share = shape.expert_layers / shape.layers if shape.layers else 0.0
    found = (OPERATIONS if program.compiled else eager) + share * EXPERT_OPERATIONS
    if program.in_8_bits:
        linear = 4.0 + (1.0 - share) * (3.0 if shape.gated else 2.0)
        found += linear * (FUSED_QUANTISE_OPERATIONS if program.compiled else QUANTISE_OPERATIONS)
    if not machine.launches_ahead:
        return found
    return found + 2.0 * MESSAGE_OPERATIONS * ((tp > 1) + share * (ep > 1))


@lru_cache(maxsize=4096)
def ends(shape: ModelShape, machine: Machine, program: Program, part: tuple[int, ...]) -> tuple[Times, Times]:
    """What comes before the first layer and after the last: embedding and head. `part` is as in `layer`."""
    sequences, tp, cp, _, _ = part
    tokens = sequences * shape.sequence_length / cp
    moved = machine.elements(tokens * shape.hidden * 2.0 * program.width)
    columns = shape.vocabulary / tp
    width = program.width
    group = Group(tp, 1, machine)
    embedding = Times(moved, 0.0, 2.0 * moved, sent_forward=group.all_reduce(tokens * shape.hidden * width))
    rows, inner = shape.head_share * tokens, shape.embedding or shape.hidden
    head = Times()
    if rows:
        logits = machine.elements(rows * columns * LOGIT_BYTES)
        at_once = HEAD_TOKENS["cuda" if machine.launches_ahead else "cpu"]
        sums = LOSS_SUMS * math.ceil(rows / at_once) * group.all_reduce(4.0 * min(rows, at_once))
        forward = machine.launched(machine.matrix(rows, columns, inner, width) + logits / 2, OPERATIONS)
        inputs = machine.launched(machine.matrix(rows, inner, columns, width) + logits / 2, OPERATIONS)
        weights = shape.trained_share * machine.matrix(inner, columns, rows, width)
        summed = group.all_reduce(rows * shape.hidden * width)
        if tp > 1:
            sums += machine.behind(forward)
            summed += machine.behind(inputs + weights)
        head = Times(forward, inputs, weights, sent_forward=sums, sent_backward=summed)
    if program.reference:
        embedding, head = embedding.twice_forward(), head.twice_forward()
    return embedding, head.all_forward() if shape.chunked_head else head


@dataclass(frozen=True)
class _Products:
    rows: float
    columns: float
    inner: float
    count: float
    dense: bool = False

    def width(self, program: Program, number: int) -> float:
        """Bytes of a number in the first, second or third product of a linear layer; see `Program.in_8_bits`."""
        return 1.0 if self.dense and number <= program.in_8_bits else program.width


@lru_cache(maxsize=256)
def _matrices(shape: ModelShape, tp: int) -> tuple[tuple[float, float, float], ...]:
    """(columns, inner, how many a layer) of the dense products of a layer on a rank."""
    heads = tp if shape.heads_split else 1
    query = shape.heads * shape.head_size
    keys = shape.kv_heads * shape.head_size
    dense = 1.0 - (shape.expert_layers / shape.layers if shape.layers else 0.0)
    up = (2.0 if shape.gated else 1.0) * shape.feedforward / tp
    found = [
        ((query + 2 * keys) / heads, float(shape.hidden), 1.0),
        (float(shape.hidden), query / heads, 1.0),
    ]
    if dense:
        found += [(up, float(shape.hidden), dense), (float(shape.hidden), shape.feedforward / tp, dense)]
    return tuple(found)


def _expert_products(shape: ModelShape, tokens: float, tp: int, ep: int) -> list[_Products]:
    """The products of the experts of a rank. Routing at random, the fullest of n ranks holds sqrt(2 ln n / mean) more
    than the mean (Raab and Steger, 1998)."""
    if not shape.experts or not shape.expert_layers:
        return []
    share = shape.expert_layers / shape.layers
    arriving = tokens * shape.experts_per_token
    arriving *= 1.0 + math.sqrt(2.0 * math.log(ep) / max(arriving, 1.0))
    local = shape.experts / ep
    rows = max(arriving / local, 1.0)
    up = (2.0 if shape.gated else 1.0) * shape.expert_feedforward / tp
    down = shape.expert_feedforward / tp
    found = [
        _Products(rows, up, shape.hidden, share * local),
        _Products(rows, shape.hidden, down, share * local),
    ]
    if shape.shared_experts:
        both = share * shape.shared_experts
        found += [_Products(tokens, up, shape.hidden, both), _Products(tokens, shape.hidden, down, both)]
    return found


def needed_flops(shape: ModelShape) -> float:
    """FLOPs of a token that a step computes: of a weight's a third are its gradient, and what is frozen has none."""
    of_weights = max(shape.flops_per_token - _score_flops(shape), 0.0)
    return shape.flops_per_token - (1.0 - shape.trained_share) * of_weights / 3.0


def _score_flops(shape: ModelShape) -> float:
    """Those of a token that are of attention's scores, which have no weights."""
    return 12.0 * shape.layers * shape.heads * shape.head_size * shape.sequence_length


@lru_cache(maxsize=256)
def _unlisted(shape: ModelShape) -> float:
    """FLOPs of a token in the layers' products over those of the products that are listed here: what other
    architectures have besides (cross-attention, a generator, latent vectors)."""
    total = shape.flops_per_token - _score_flops(shape) - 6.0 * shape.head_share * shape.table
    listed = sum(6.0 * columns * inner * count for columns, inner, count in _matrices(shape, 1))
    listed += sum(
        6.0 * p.rows * p.columns * p.inner * p.count / 1e6 for p in _expert_products(shape, 1e6, 1, 1)
    )
    listed *= shape.layers
    return total / listed if listed and total > 0.1 * listed else 1.0


def _moved(shape: ModelShape, tokens: float, tp: int, sliced: bool, program: Program) -> float:
    """Bytes that element-wise operations of a layer read and write forward."""
    residual = tokens * shape.hidden / (tp if sliced else 1)
    dense = 1.0 - (shape.expert_layers / shape.layers if shape.layers else 0.0)
    inner = dense * shape.feedforward
    inner += (1.0 - dense) * shape.expert_feedforward * (shape.experts_per_token + shape.shared_experts)
    numbers = RESIDUAL_PASSES * residual + (3.0 if shape.gated else 2.0) * tokens * inner / tp
    numbers += (1.0 - dense) * DISPATCH_PASSES * tokens * shape.experts_per_token * shape.hidden
    # two masks of a byte each
    return numbers * program.width + (2.0 * residual if program.dropout else 0.0)


def _sent(
    shape: ModelShape, machine: Machine, program: Program, tokens: float, part: tuple[int, ...]
) -> tuple[float, float]:
    """Seconds of a forward pass's tensor-parallel sums, two a layer, and of its experts' exchange, two a layer of
    experts. Under sequence parallelism a sum is a reduce-scatter and an all-gather."""
    _, tp, cp, ep, sliced = part
    group, summed = Group(tp, 1, machine), tokens * shape.hidden * program.width
    sums = 2.0 * (group.scatter(summed) + group.gather(summed) if sliced else group.all_reduce(summed))
    sums *= 1.0 - program.hidden_sums
    if ep == 1 or not shape.layers:
        return sums, 0.0
    size = tokens * shape.experts_per_token * shape.hidden * program.width
    share = shape.expert_layers / shape.layers
    return sums, 2.0 * share * Group(ep, tp * cp, machine).all_to_all(size)


def _ring(shape: ModelShape, machine: Machine, program: Program, tokens: float, tp: int, cp: int) -> float:
    """Seconds in which keys and values go round the ranks of a context-parallel group."""
    heads = shape.kv_heads / (tp if shape.heads_split else 1)
    size = 2.0 * tokens * heads * shape.head_size * program.width
    return (cp - 1) * Group(cp, tp, machine).to_next(size)
