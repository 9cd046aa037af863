"""Megatron-LM's tensor parallelism, from the styles that a workload declares.

Attention and the feed-forward block are each a column-parallel layer followed by a row-parallel one, with one sum
forward and one backward (Shoeybi et al., 2019, section 3). With `sequence`, norms and residuals work on slices of the
sequence (Korthikanti et al., 2022, section 4.2.2). Weights are plain local tensors; `cut_of` gives their position in
the whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.parallel.collectives import copy, gather, gathered, join, reduce, scatter, split
from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.partition import is_sliced, span, style_of
from workloads.adapters.lora import LoraLinear
from workloads.adapters.nf4 import QuantisedWeight
from workloads.model.attention import AttentionCore, Context
from workloads.model.fake_quantise import FakeQuantiser
from workloads.model.feedforward import FeedForward
from workloads.model.head_gates import HeadGates
from workloads.model.layers import CutRMSNorm
from workloads.model.moe import Experts
from workloads.model.transformer import Layer
from workloads.workload import IGNORED, Loss

LENGTH = 1
"""The dimension of [B, L, hidden] that sequence parallelism cuts."""


def apply_tensor(model: nn.Module, styles: Mapping[str, str], tp: ProcessGroup, sequence: bool) -> None:
    """Insert the collectives into a model.

    Args:
        model: a stage whose parameters are already cut to this rank.
        styles: sharding styles by pattern of module names.
        tp: the tensor-parallel group.
        sequence: whether norms and residuals work on slices of the sequence.
    """
    entered: set[str] = set()
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        style = style_of(styles, name)
        sliced = sequence and is_sliced(name)
        if style == "row" and isinstance(module, LoraLinear):
            sum_rows(module, tp, sliced)
        elif style == "row" and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), leaf, RowLinear(module, tp, sliced))
        elif style == "vocab" and isinstance(module, nn.Embedding):
            setattr(model.get_submodule(parent), leaf, VocabularyEmbedding(module, tp))
        elif style == "vocab":
            # Every rank multiplies the same hidden states by its rows of the vocabulary, so their gradient is a sum
            # over ranks.
            module.register_forward_pre_hook(copy_first(tp))
            if name.startswith(
                "generator"
            ):  # ELECTRA samples from the generator's logits, and needs all of them
                module.register_forward_hook(lambda _, __, out: join(out, -1, tp))
        elif style == "column" and isinstance(module, nn.Linear | LoraLinear) and parent not in entered:
            # Query, key and value (or gate and up) share one input, so its gradient is summed once for the block and
            # not once for each layer.
            entered.add(parent)
            block = model.get_submodule(parent)
            _number_heads(block, tp)
            if sliced:
                _enter_sliced(block, tp)
            else:
                block.register_forward_pre_hook(_enter(tp))
        elif style == "column" and isinstance(module, CutRMSNorm):
            # Each rank's part adds to the sum of squares, and so gets the gradients of all ranks' uses of that sum.
            module.total = lambda squares: copy(reduce(squares, tp), tp)
        elif style == "expert":
            _inside_experts(module, tp)
    if sequence:
        _slice_sequence(model, entered, tp)


class RowLinear(nn.Module):
    """A row-parallel linear layer: partial products are summed over the group, then the bias is added."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup, sequence: bool) -> None:
        super().__init__()
        self.weight: Tensor | QuantisedWeight = linear.weight
        self.bias = linear.bias
        self._group, self._sequence = group, sequence
        self.product: Callable[..., Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, L, out], or this rank's slice of L, for x [B, L, in / ranks]."""
        partial = self.product(x, self.weight)
        # With sequence parallelism the sum is a reduce-scatter: an all-reduce is one followed by an all-gather, which
        # the next block makes anyway (Korthikanti et al., 2022, figure 6).
        y = scatter(partial, LENGTH, self._group) if self._sequence else reduce(partial, self._group)
        # After the sum, or each rank would add the bias.
        return y if self.bias is None else y + self.bias.to(y.dtype)


def sum_rows(module: LoraLinear, tp: ProcessGroup, sequence: bool) -> None:
    """Make a layer with a low-rank adapter row-parallel, like `RowLinear`; one sum serves the weight and A.

    Args:
        module: the layer, whose weight and A are cut over their inputs.
        tp: the tensor-parallel group.
        sequence: whether the outputs are slices of the sequence.
    """

    def total(squares: Tensor) -> Tensor:
        tp.sent(squares)
        torch.distributed.all_reduce(squares, group=tp.handle)
        tp.received(squares)
        return squares

    module.total = total
    module.gather = lambda y: scatter(y, LENGTH, tp) if sequence else reduce(y, tp)


class VocabularyEmbedding(nn.Module):
    """A vocabulary-parallel embedding: each rank looks up its own rows, and the results are summed over the group."""

    def __init__(self, table: nn.Embedding, group: ProcessGroup) -> None:
        super().__init__()
        self.weight, self._group = table.weight, group
        self._start, self._row_count = span(table.num_embeddings, group.index, group.size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [B, L, hidden] for tokens int64 [B, L]; rows of other ranks contribute zeros to the sum."""
        local = tokens - self._start
        outside = (local < 0) | (local >= self._row_count)
        # Row 0 stands in for other ranks' tokens and is masked out again, so that its gradient gets zeros.
        vectors = F.embedding(local.masked_fill(outside, 0), self.weight)
        return reduce(vectors.masked_fill(outside.unsqueeze(-1), 0.0), self._group)


class VocabularyLoss:
    """Cross-entropy of logits that may be cut over the vocabulary, with optional z-loss and label smoothing.

    The z-loss z x (log Z)^2 pulls the softmax's normaliser Z towards one (PaLM: Chowdhery et al., 2022, section 5).
    Smoothing spreads a share of each label evenly over the vocabulary (Szegedy et al., 2016, section 7). Both are
    differentiated but leave the value of `total`, which stays the cross-entropy. With `counts_correct` the loss also
    has the number of tokens predicted correctly; of equally likely tokens the first one counts.
    """

    def __init__(self, vocabulary: int, tp: ProcessGroup, z: float, smoothing: float = 0.0) -> None:
        self._vocabulary = vocabulary
        self._tp = tp
        self._z = z
        self._smoothing = smoothing
        self._start, _ = span(vocabulary, tp.index, tp.size)
        self.counts_correct = False

    def __call__(self, logits: Tensor, labels: Tensor) -> Loss:
        """Return the sums of `losses.token_loss`, for logits [B, L, V] or [predicted, V] and labels int64 [B, L]."""
        # A head that computes masked positions alone returns logits [predicted, V]; labels are [B, L] in either case.
        labels = labels[labels != IGNORED] if logits.dim() == 2 else labels.flatten()
        # In fp32 also under autocast: bf16 has 8 bits, and log Z of 50,000 terms needs more.
        logits = logits.flatten(0, -2).float()
        cut = self._tp.size > 1 and logits.shape[-1] < self._vocabulary
        if cut:
            value, log_z = self._over_ranks(logits, labels)
        else:
            value = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
            log_z = logits.logsumexp(-1) if self._z else value
        predicted = labels != IGNORED
        total = (value * predicted).sum()
        if self._z:
            pull = self._z * (log_z.square() * predicted).sum()
            # pull - pull.detach() is 0 with the gradient of pull: reported losses stay comparable between jobs with
            # and without z-loss.
            total = total + (pull - pull.detach())
        if self._smoothing:
            chosen = log_z - value if cut else _at(logits, labels.where(predicted, 0))
            pull = self._smoothing * ((chosen - self._mean(logits, cut)) * predicted).sum()
            total = total + (pull - pull.detach())
        correct = None
        if self.counts_correct:
            likeliest = self._likeliest_over_ranks(logits) if cut else logits.argmax(-1)
            correct = ((likeliest == labels) & predicted).sum().float()
        return Loss(total, predicted.sum().float(), correct=correct, each_token=value)

    def _mean(self, logits: Tensor, cut: bool) -> Tensor:
        return reduce(logits.sum(-1), self._tp) / self._vocabulary if cut else logits.mean(-1)

    def full_logits(self, logits: Tensor) -> Tensor:
        """Return logits [n, V of this rank] completed over all ranks, fp32 [n, V]."""
        logits = logits.float()
        if self._tp.size == 1 or logits.shape[-1] >= self._vocabulary:
            return logits
        result = logits.new_full((len(logits), self._vocabulary), -math.inf)
        result[:, self._start : self._start + logits.shape[-1]] = logits
        # Each rank has -inf outside its part, so the maximum joins the parts, also if they differ in size.
        self._tp.sent(result)
        torch.distributed.all_reduce(result, torch.distributed.ReduceOp.MAX, group=self._tp.handle)
        self._tp.received(result)
        return result

    def _likeliest_over_ranks(self, logits: Tensor) -> Tensor:
        highest, local = logits.max(-1)
        everywhere = highest.clone()
        if self._tp.handle is not None:
            torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MAX, group=self._tp.handle)
        # Ranks without the maximum answer with a number beyond the vocabulary; the minimum is then the first of equal
        # tokens, as argmax has it on one rank.
        result = torch.where(highest == everywhere, local + self._start, self._vocabulary)
        if self._tp.handle is not None:
            torch.distributed.all_reduce(result, torch.distributed.ReduceOp.MIN, group=self._tp.handle)
        return result

    def _over_ranks(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # Subtracted before exp, or exp overflows in fp32 above 88. The result does not depend on it, hence detached.
        highest = logits.detach().amax(-1)
        if self._tp.handle is not None:
            self._tp.sent(highest)
            torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=self._tp.handle)
            self._tp.received(highest)
        # log Z = m + log sum_v exp(l_v - m); the ranks exchange [tokens] numbers instead of logits [tokens, V]
        # (Shoeybi et al., 2019, section 3).
        log_z = reduce((logits - highest.unsqueeze(-1)).exp().sum(-1), self._tp).log() + highest
        local = labels - self._start
        # Exactly one rank has the label's logit; the others add 0 to the sum.
        outside = (local < 0) | (local >= logits.shape[-1])
        result = _at(logits, local.masked_fill(outside, 0))
        return log_z - reduce(result.masked_fill(outside, 0.0), self._tp), log_z


def _at(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _number_heads(block: nn.Module, tp: ProcessGroup) -> None:
    """Number a rank's heads globally, so that dropout and gates of a part of the heads draw the numbers that one
    process draws for them."""
    for module in block.children():
        if isinstance(module, AttentionCore | HeadGates):
            module.part = tp.index


def copy_first(tp: ProcessGroup) -> Any:
    """Return a hook before a layer that is cut over its outputs; it sums the gradients of the layer's input."""
    return lambda _, args: (copy(args[0], tp), *args[1:])


def _enter(tp: ProcessGroup) -> Any:
    """Return a hook that sums the gradients of a block's inputs, which all its column-cut layers read."""
    return lambda _, args: _with_inputs(args, lambda x: copy(x, tp))


def _with_inputs(args: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """Return a block's arguments with its inputs changed: the hidden states, and the memory of cross-attention.

    Keys and values of cross-attention are column-cut layers of the encoder's output.
    """
    hidden, *others = args
    if others and isinstance(others[0], Context) and others[0].memory is not None:
        others[0] = dataclasses.replace(others[0], memory=change(others[0].memory))
    return (change(hidden), *others)


def _enter_sliced(block: nn.Module, tp: ProcessGroup) -> None:
    """Let a block of column-cut layers gather its inputs, of which it gets this rank's slice of the sequence.

    Autograd keeps the slices in place of the whole inputs. The backward pass gathers them again, once for all layers of
    the block (Korthikanti et al., 2022, section 4.2.2). Of a gated feed-forward block it keeps what gate and up return,
    and computes their joined product again.
    """
    forward = block.forward
    gated = block if isinstance(block, FeedForward) and block.gate is not None else None
    joined = gated.joined if gated is not None else None

    def run(*args: Any) -> Any:
        # Before the gathering, in which 16 bits are half of the bytes. Each layer would make a cast of its own, and
        # keep it.
        parts: list[Tensor] = []
        whole: list[Tensor] = []

        def gather_input(x: Tensor) -> Tensor:
            parts.append(_in_compute_dtype(x, block))
            whole.append(gather(parts[-1], LENGTH, tp))
            return whole[-1]

        args = _with_inputs(args, gather_input)
        if not block.gathers_again or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*args)
        kept = _MadeAgain()
        for part, of in zip(parts, whole, strict=True):
            kept.add(of, partial(gathered, part.detach(), LENGTH, tp))
        if gated is not None and joined is not None:
            gated.joined = partial(_joined_again, joined, kept)
        try:
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
                return forward(*args)
        finally:
            kept.end()
            if gated is not None and joined is not None:
                gated.joined = joined

    # Recomputation sets it to False: it keeps nothing of a block, and computes all of it again.
    block.gathers_again = True  # type: ignore[assignment]
    block.forward = run


def _in_compute_dtype(x: Tensor, block: nn.Module) -> Tensor:
    """Return an input of a block in the dtype of its products, unless it is rounded to fewer bits in fp32."""
    kind = x.device.type
    rounds = any(isinstance(getattr(module, "product", None), FakeQuantiser) for module in block.children())
    if rounds or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _joined_again(joined: Callable[..., Tensor], kept: _MadeAgain, gate: Tensor, up: Tensor) -> Tensor:
    """Return joined(gate, up), whose backward pass needs gate and up alone."""
    product: Tensor = _Joined.apply(gate, up, joined)
    kept.add(product, partial(_without_gradient, joined, gate.detach(), up.detach()))
    return product


@torch.no_grad()
def _without_gradient(joined: Callable[..., Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return joined(gate, up)


class _Joined(torch.autograd.Function):
    """joined(gate, up), which the backward pass computes again instead of keeping what lies between."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, joined: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.joined = joined
        return joined(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            product = ctx.joined(gate, up)
        of_gate, of_up = torch.autograd.grad(product, (gate, up), grads[0])
        return of_gate, of_up, None


@dataclasses.dataclass
class _Again:
    """A tensor that the backward pass makes again."""

    make: Callable[[], Tensor]
    uses: int = 0
    """How often autograd keeps it."""
    made: Tensor | None = None
    left: int = 0
    """Uses of `made` that are still to come."""


class _MadeAgain:
    """What autograd keeps of the tensors in one forward pass of a block: of some of them, only how to make them."""

    def __init__(self) -> None:
        self._again: dict[int, _Again] = {}
        """By the identity of the tensor's storage."""
        self._alive: list[Tensor] = []
        """These tensors until the forward pass ends, so that no other tensor gets the storage of one."""

    def add(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        """Let the backward pass make a tensor again.

        Args:
            tensor: the whole of its storage.
            make: returns it, without a gradient.
        """
        self._again[_storage(tensor)] = _Again(make)
        self._alive.append(tensor)

    def end(self) -> None:
        """End the forward pass."""
        self._again, self._alive = {}, []

    def pack(self, saved: Tensor) -> Any:
        """Return what autograd keeps: how to make the tensor and its view of the whole, or the tensor itself."""
        again = self._again.get(_storage(saved))
        if again is None:
            return (
                saved.detach()
            )  # as it is, a result would keep the operator that made it, and this the result
        again.uses += 1
        return again, saved.size(), saved.stride(), saved.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that was packed."""
        if isinstance(packed, Tensor):
            return packed
        again, size, stride, offset = packed
        if again.made is None:
            again.made, again.left = again.make(), again.uses
        made: Tensor = again.made
        again.left -= 1
        if not again.left:
            again.made = None
        return made.as_strided(size, stride, offset)


def _storage(tensor: Tensor) -> int:
    # Its address would not do: fake tensors of a trace have none.
    return tensor.untyped_storage()._cdata


def _inside_experts(experts: nn.Module, tp: ProcessGroup) -> None:
    """Add the sums inside experts, which are cut like a feed-forward block: gate and up by column, down by row."""
    assert isinstance(experts, Experts)
    forward = experts.forward
    experts.total = lambda rows: reduce(rows, tp)
    experts.forward = lambda rows, counts: forward(copy(rows, tp), counts)  # type: ignore[method-assign]


def _slice_sequence(model: nn.Module, entered: set[str], tp: ProcessGroup) -> None:
    """Slice the residuals from the embeddings to the head. Blocks that are not cut work on the whole sequence."""
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in ("embeddings", "projection") and (leaf == "projection" or not _projected(model, name)):
            module.register_forward_hook(lambda _, __, out: split(out, LENGTH, tp))
        elif leaf in ("attention", "feedforward") and name not in entered:
            module.register_forward_pre_hook(_join_first(tp))
            module.register_forward_hook(_split_first(tp))
        elif isinstance(module, Layer):
            module.register_forward_pre_hook(_split_keys(tp))
    last = getattr(model, "norm", None)
    if last is None and (getattr(model, "head", None) or getattr(model, "sentence_head", None)):
        # A model without a final norm has its heads directly behind the last layer, so that layer's output is joined.
        last = list(model.layers.values())[-1]  # type: ignore[operator]
    if last is not None:
        last.register_forward_hook(_join_out(tp))


def _projected(model: nn.Module, name: str) -> bool:
    parent = model.get_submodule(name.rpartition(".")[0])
    return getattr(parent, "projection", None) is not None


def _join_first(tp: ProcessGroup) -> Any:
    return lambda _, args: (join(args[0], LENGTH, tp), *args[1:])


def _split_keys(tp: ProcessGroup) -> Any:
    """Return a hook that gives a slice the dropout keys of its tokens."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, context = args
        if context.keys is None:
            return args
        return hidden, dataclasses.replace(context, keys=context.keys.chunk(tp.size, LENGTH)[tp.index])

    return hook


def _split_first(tp: ProcessGroup) -> Any:
    return lambda _, __, out: _first(out, lambda x: split(x, LENGTH, tp))


def _join_out(tp: ProcessGroup) -> Any:
    return lambda _, __, out: _first(out, lambda x: join(x, LENGTH, tp))


def _first(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's output with its hidden states changed; a router's loss may follow them in the tuple."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)
