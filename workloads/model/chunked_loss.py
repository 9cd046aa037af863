"""The loss of the tokens through a projection to the vocabulary, some tokens at a time.

Logits of a large vocabulary take much memory three times: they, their softmax and their gradient. Here they exist
for a chunk of tokens only: the forward pass computes the loss of a chunk and at once its gradients, by the operations
that autograd would use for all tokens (Hsu et al., 2024, "Liger Kernel", section 3.2). What is kept for the backward
pass is the gradient of the hidden states and that of the weight.

The bits of loss and gradients are those of all tokens at once if there is one chunk. If there are several, the gradient
of the weight, a sum over tokens, is added in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.workload import Loss


def unweighed(total: Tensor) -> Tensor:
    """The sum itself."""
    return total


@dataclass(frozen=True)
class ChunkedLoss:
    """How a head computes the loss of its tokens, `tokens` at a time.

    of_tokens is a function of logits [1, n, vocabulary] and labels [1, n] like `losses.token_loss`. weighed is what is
    differentiated of the sum that it gives: gradients are computed with it, so that they have their usual size in any
    type.
    """

    of_tokens: Callable[[Tensor, Tensor], Loss]
    tokens: int
    weighed: Callable[[Tensor], Tensor] = unweighed

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, ...]:
        """Sum of the loss, number of predicted tokens and, where `of_tokens` counts them, of the correct ones.

        hidden [.., size], weight [vocabulary, size], bias [vocabulary], labels int64 [..]; fp32 scalars.
        """
        found: tuple[Tensor, ...] = _Chunked.apply(
            hidden.flatten(0, -2), weight, bias, labels.flatten(), self, torch.is_grad_enabled()
        )
        return found


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        how: ChunkedLoss,
        training: bool,
    ) -> tuple[Tensor, ...]:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.wanted = [training and wanted for wanted in ctx.needs_input_grad[:3]]
        gradients = _Gradients(hidden, weight.to(dtype), bias, ctx.wanted)
        sums: list[Tensor] = []
        with torch.autocast(kind, enabled=False):
            for start in range(0, max(len(labels), 1), how.tokens):
                at = slice(start, start + how.tokens)
                found, ctx.slope = gradients.of_chunk(hidden[at].to(dtype), at, labels[at], how)
                sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
        ctx.found = gradients.hidden, gradients.of_weight, gradients.of_bias
        ctx.mark_non_differentiable(*sums[1:])
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.found = ctx.found, None  # scaled in place, so that they serve once
        ratio = above[0] / ctx.slope  # 1, unless the sum was weighed otherwise
        return *(None if gradient is None else gradient.mul_(ratio) for gradient in found), None, None, None


class _Gradients:
    """Those of the hidden states, chunk by chunk, and the sums of those of weight and bias."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> None:
        self._weight, self._wanted = weight, wanted
        self._bias = None if bias is None else bias.to(weight.dtype)
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None

    def of_chunk(
        self, x: Tensor, at: slice, labels: Tensor, how: ChunkedLoss
    ) -> tuple[list[Tensor], Tensor | None]:
        """Add those of the chunk with hidden states x. Returns its sums, and the derivative of what is differentiated
        by the first; nothing else of the chunk is left."""
        logits = F.linear(x, self._weight, self._bias)
        if not any(self._wanted):
            return _sums(how.of_tokens(logits.unsqueeze(0), labels.unsqueeze(0))), None
        with torch.enable_grad():
            logits.requires_grad_()
            loss = how.of_tokens(logits.unsqueeze(0), labels.unsqueeze(0))
            gradient, slope = torch.autograd.grad(how.weighed(loss.total), (logits, loss.total))
        del logits
        self._add(gradient, at, x)
        return _sums(loss), slope

    def _add(self, logits: Tensor, at: slice, x: Tensor) -> None:
        """What follows from the gradient `logits` [n, vocabulary]."""
        if self.hidden is not None:
            self.hidden[at] = logits @ self._weight
        if self._wanted[1] and self.of_weight is None:
            self.of_weight = (logits.t() @ x).float()
        elif self.of_weight is not None and logits.dtype is torch.float32:
            self.of_weight.addmm_(logits.t(), x)
        elif self.of_weight is not None:
            self.of_weight.add_(logits.t() @ x)
        if self._wanted[2]:
            part = logits.sum(0).float()
            self.of_bias = part if self.of_bias is None else self.of_bias.add_(part)


def _sums(loss: Loss) -> list[Tensor]:
    return [t for t in (loss.total.detach(), loss.count, loss.correct) if t is not None]
