"""Gradients of embeddings that touch only the rows of a micro-batch's tokens.

The gradient of an embedding is dense: torch fills a tensor of the table's size with zeros for every micro-batch, and
adds all of it to the sum. For a vocabulary of 30,000 and short micro-batches that takes as long as a layer. Between two
micro-batches nobody reads the sum, so only the rows of tokens that occur are added to it, which gives the same bits.

On CPUs alone: how many rows there are would have to be read back from a GPU, which would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


class RowGradients:
    """Adds the gradients of tables of embeddings row by row while `active`.

    Inactive in the last micro-batch of a step, whose backward pass starts reductions as soon as torch itself has added
    a gradient.
    """

    def __init__(self, tables: Iterable[nn.Embedding]) -> None:
        """`tables`: a forward pass reads each of them once, and nothing else reads them: sums in another order would
        have other bits.
        """
        self.active = False
        for table in tables:
            table.forward = partial(self._embed, table)  # type: ignore[method-assign]

    def _embed(self, module: nn.Embedding, ids: Tensor) -> Tensor:
        weight = module.weight
        # A trace has no values, so the number of rows is unknown there.
        is_traced = isinstance(ids, FakeTensor)
        if (
            self.active
            and not is_traced
            and torch.is_grad_enabled()
            and weight.is_leaf
            and weight.grad is not None
        ):
            result: Tensor = _RowGradient.apply(weight, ids)
            return result
        return F.embedding(ids, weight)


class _RowGradient(torch.autograd.Function):
    """`F.embedding` whose backward pass adds to `weight.grad` itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        (ids,) = ctx.saved_tensors
        unique_ids, inverse = ids.unique(return_inverse=True)
        # The sums of each row first, as the dense gradient has them, so that the bits are the same.
        sums = torch.ops.aten.embedding_dense_backward(
            gradient.contiguous(), inverse, len(unique_ids), -1, False
        )
        ctx.weight.grad.index_add_(0, unique_ids, sums)
        return None, None
