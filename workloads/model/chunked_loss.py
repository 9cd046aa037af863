"""The token loss through a projection to the vocabulary, computed in chunks of tokens.

With a large vocabulary, logits take much memory three times: as logits, as their softmax and as their gradient. Here
they exist for one chunk at a time. The forward pass computes the loss of a chunk and immediately its gradients, with
the operations that autograd would use for all tokens (Hsu et al., 2024, "Liger Kernel", section 3.2). Only the
gradients of the hidden states and of the weight are kept for the backward pass.

With one chunk, loss and gradients equal the unchunked ones bit for bit. With several, the weight gradient, a sum over
tokens, is summed in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.workload import IGNORED, Loss


def unweighed(total: Tensor) -> Tensor:
    """Return the sum unchanged."""
    return total


@dataclass(frozen=True)
class ChunkedLoss:
    """Computes the loss of a head for `tokens` tokens at a time.

    `of_tokens` maps logits [1, n, vocabulary] and labels [1, n] to sums, like `losses.token_loss`. `weighed` maps the
    summed loss to the value that is differentiated, which keeps the gradients in the usual range of a low-precision
    dtype. With `leaves_out`, tokens without a label take no part, which is quicker where prompts or padding have none.
    """

    of_tokens: Callable[[Tensor, Tensor], Loss]
    tokens: int
    weighed: Callable[[Tensor], Tensor] = unweighed
    leaves_out: bool = False

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the summed loss, the number of predicted tokens and, if `of_tokens` counts them, the number of correct
        ones.

        hidden [.., size], weight [vocabulary, size], bias [vocabulary], labels int64 [..]. All results are fp32
        scalars.
        """
        hidden = hidden.flatten(0, -2)
        labels = labels.flatten()
        if self.leaves_out:
            has_label = labels != IGNORED
            hidden = hidden[has_label]
            labels = labels[has_label]
        results: tuple[Tensor, ...] = _Chunked.apply(
            hidden, weight, bias, labels, _Pass(self, torch.is_grad_enabled())
        )
        return results


class _Pass(NamedTuple):
    """How a forward pass computes its loss, and whether a backward pass may follow. Within an autograd function, torch
    does not say that.
    """

    loss: ChunkedLoss
    is_differentiated: bool


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        forward_pass: _Pass,
    ) -> tuple[Tensor, ...]:
        how = forward_pass.loss
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.needs_gradient = [
            forward_pass.is_differentiated and needed for needed in ctx.needs_input_grad[:3]
        ]
        gradients = _Gradients(hidden, weight.to(dtype), bias, ctx.needs_gradient)
        sums: list[Tensor] = []
        with torch.autocast(kind, enabled=False):
            # At least one chunk: a batch without a label still needs sums, and gradients of zeros.
            for start in range(0, max(len(labels), 1), how.tokens):
                at = slice(start, start + how.tokens)
                chunk_sums, ctx.slope = gradients.of_chunk(hidden[at].to(dtype), at, labels[at], how)
                sums = [a + b for a, b in zip(sums, chunk_sums, strict=True)] if sums else chunk_sums
        # Not through save_for_backward, which forbids that the backward pass scales them in place.
        ctx.gradients = gradients.hidden, gradients.of_weight, gradients.of_bias
        ctx.mark_non_differentiable(*sums[1:])
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = (
            ctx.gradients,
            None,
        )  # scaled in place, so a second backward pass cannot use them
        ratio = above[0] / ctx.slope  # 1 unless the caller weighted the sum differently
        return *(None if gradient is None else gradient.mul_(ratio) for gradient in gradients), None, None


class _Gradients:
    """The gradients of the hidden states, chunk by chunk, and the summed gradients of weight and bias."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs_gradient: list[bool]
    ) -> None:
        self._weight, self._needs_gradient = weight, needs_gradient
        self._bias = None if bias is None else bias.to(weight.dtype)
        self.hidden = torch.empty_like(hidden) if needs_gradient[0] else None
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None

    def of_chunk(
        self, x: Tensor, at: slice, labels: Tensor, how: ChunkedLoss
    ) -> tuple[list[Tensor], Tensor | None]:
        """Add the gradients of the chunk with hidden states `x`.

        Returns the chunk's sums, and the derivative of the differentiated value by the first sum. All other tensors of
        the chunk are freed.
        """
        logits = F.linear(x, self._weight, self._bias)
        if not any(self._needs_gradient):
            return _sums(how.of_tokens(logits.unsqueeze(0), labels.unsqueeze(0))), None
        with torch.enable_grad():
            # A fresh graph for this chunk alone, which autograd.grad frees, so that one chunk's logits exist at a
            # time.
            logits.requires_grad_()
            loss = how.of_tokens(logits.unsqueeze(0), labels.unsqueeze(0))
            gradient, slope = torch.autograd.grad(how.weighed(loss.total), (logits, loss.total))
        del logits
        self._add(gradient, at, x)
        return _sums(loss), slope

    def _add(self, logits: Tensor, at: slice, x: Tensor) -> None:
        """Add what follows from the gradient of the logits, [n, vocabulary]."""
        # logits [n, V] is dL/dlogits of this chunk, x is [n, H] and the weight W is [V, H]: dL/dx = logits W, and dL/dW
        # = logits^T x sums over chunks in fp32.
        if self.hidden is not None:
            self.hidden[at] = logits @ self._weight
        if self._needs_gradient[1] and self.of_weight is None:
            self.of_weight = (logits.t() @ x).float()
        elif self.of_weight is not None and logits.dtype is torch.float32:
            self.of_weight.addmm_(logits.t(), x)
        elif self.of_weight is not None:
            self.of_weight.add_(logits.t() @ x)
        if self._needs_gradient[2]:
            part = logits.sum(0).float()
            self.of_bias = part if self.of_bias is None else self.of_bias.add_(part)


def _sums(loss: Loss) -> list[Tensor]:
    return [t for t in (loss.total.detach(), loss.count, loss.correct) if t is not None]
