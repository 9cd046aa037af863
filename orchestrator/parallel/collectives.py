"""Collectives with a backward pass, on plain local tensors.

`copy` and `reduce` are f and g of Shoeybi et al., 2019, Megatron-LM (figure 3). `gather` and `scatter` are those of
sequence parallelism (Korthikanti et al., 2022, section 4.2.2). With n ranks:

    function   forward          backward         shape along dim
    copy       identity         all-reduce       L -> L
    reduce     all-reduce       identity         L -> L
    gather     all-gather       reduce-scatter   L -> n L
    scatter    reduce-scatter   all-gather       L -> L / n
    split      this rank's part all-gather       L -> L / n
    join       all-gather       this rank's part L -> n L
    exchange   all-to-all       all-to-all       rows sent -> rows received

A group of one rank does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.mesh import ProcessGroup


def copy(x: Tensor, group: ProcessGroup) -> Tensor:
    """Forward: identity; backward: sum over the group. For the input of column-parallel layers.

    Args:
        x: a tensor of any shape, the same shape on all ranks.
        group: the ranks.
    """
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Forward: sum over the group; backward: identity. For the output of row-parallel layers.

    Args:
        x: a tensor of any shape, the same shape on all ranks.
        group: the ranks.
    """
    return x if group.size == 1 else _Reduce.apply(x, group)


def gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Forward: all-gather along `dim`; backward: reduce-scatter.

    Args:
        x: this rank's part.
        dim: the dimension that is divided over the ranks.
        group: the ranks.
    """
    return x if group.size == 1 else _Gather.apply(x, dim, group)


def scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Forward: reduce-scatter along `dim`; backward: all-gather. The inverse of `gather`.

    Args:
        x: a full tensor, of which each rank has its own summand.
        dim: the dimension that is divided over the ranks.
        group: the ranks.
    """
    return x if group.size == 1 else _Scatter.apply(x, dim, group)


def split(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Forward: this rank's part of a tensor that is the same on all ranks; backward: all-gather.

    Args:
        x: the full tensor.
        dim: the dimension that is divided over the ranks.
        group: the ranks.
    """
    return x if group.size == 1 else _Split.apply(x, dim, group)


def join(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Forward: all-gather; backward: this rank's part. The inverse of `split`.

    For a result that all ranks then use in the same computation: each has the full gradient, so a sum would count it
    once per rank.

    Args:
        x: this rank's part.
        dim: the dimension that is divided over the ranks.
        group: the ranks.
    """
    return x if group.size == 1 else _Join.apply(x, dim, group)


def exchange(x: Tensor, received: Sequence[int], sent: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send rows to each rank and return the rows from each, in rank order (all-to-all).

    Args:
        x: the rows, sorted by the rank that they go to.
        received: number of rows that come from each rank.
        sent: number of rows that go to each rank.
        group: the ranks.
    """
    return x if group.size == 1 else _Exchange.apply(x, list(received), list(sent), group)


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the group, without a gradient.

    Args:
        x: a tensor of any shape, the same shape on all ranks. It stays as it is.
        group: the ranks.
    """
    if group.size == 1:
        return x
    # An all-reduce works in place, and `x` is an activation that autograd may still need.
    total = x.clone(memory_format=torch.contiguous_format)
    group.sent(total)
    with group.communicating():
        dist.all_reduce(total, group=group.handle)
    group.received(total)
    return total


def gathered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the equal parts of all ranks along `dim`, in rank order, without a gradient.

    Args:
        x: this rank's part.
        dim: the dimension that is divided over the ranks.
        group: the ranks.
    """
    if group.size == 1:
        return x
    # The collective concatenates along the first dimension, so `dim` moves there and back.
    part = x.movedim(dim, 0).contiguous()
    full = part.new_empty(group.size * part.shape[0], *part.shape[1:])
    group.sent(part)
    with group.communicating():
        dist.all_gather_single(full, part, group=group.handle)
    group.received(full)
    return full.movedim(0, dim).contiguous()


def _scattered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    full = x.movedim(dim, 0).contiguous()
    part = full.new_empty(full.shape[0] // group.size, *full.shape[1:])
    group.sent(full)
    with group.communicating():
        dist.reduce_scatter_single(part, full, group=group.handle)
    group.received(part)
    return part.movedim(0, dim).contiguous()


def _part(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size, dim)[group.index].contiguous()


def _exchanged(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    group.sent(x)
    with group.communicating():
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group.handle)
    group.received(out)
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        # A new tensor: autograd must not see an input returned as it is.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Every rank used x in another part of the layer, so x has the sum of their gradients.
        return summed(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Each summand has the gradient of the sum, which is the same on all ranks already.
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # All ranks used this rank's part: their gradients of it are summed, and only that part comes back.
        return _scattered(grads[0], ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return gathered(grads[0], ctx.dim, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return gathered(grads[0], ctx.dim, ctx.group), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _part(grads[0], ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
        ctx.received = received
        ctx.sent = sent
        ctx.group = group
        return _exchanged(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        # The gradients of rows go back the way the rows came: counts received and sent change places.
        return _exchanged(grads[0], ctx.sent, ctx.received, ctx.group), None, None, None
