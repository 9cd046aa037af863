"""Isolated documents under context parallelism: each rank's part is that of attention to the whole sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor
from varlen import varlen_attn

from orchestrator.train.parallel import context
from orchestrator.train.parallel.context import ContextCore, positions_of
from orchestrator.train.parallel.mesh import ProcessGroup
from workloads.model import kernels
from workloads.model.attention import AttentionCore
from workloads.model.masks import SEGMENTS, Documents, Mask, _bounds, with_starts

HEADS, GROUPS, LENGTH, SIZE = 4, 2, 16, 8
ENDS = ([3, 9, 15], [1, 2, 7], [LENGTH], [4, 8, 12])
"""Where the documents of four rows end: within a chunk, at its end, and after more than one."""


def documents(window: int) -> Documents:
    rows = [torch.bucketize(torch.arange(LENGTH), torch.tensor(ends), right=True) for ends in ENDS]
    numbers = torch.stack(rows)
    return Documents(numbers, window, bounds=_bounds(with_starts({SEGMENTS: numbers})["starts"], LENGTH))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are whole, as they are once gathered."""
    monkeypatch.setattr(context, "gather", lambda tensor, *_: tensor)
    monkeypatch.setattr(context, "in_order", lambda tensor, *_: tensor)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["flash", "mask"])
def test_a_part_of_a_row_is_that_of_the_whole(
    how: str, ranks: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, of grouped queries; by the kernel's stand-in, or by one mask for all layers."""
    monkeypatch.setattr(kernels, "_has_flash", lambda _: how == "flash")
    dtype = torch.bfloat16 if how == "flash" else torch.float64
    random = torch.Generator().manual_seed(1)
    shapes = [(len(ENDS), heads, LENGTH, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    given = [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]
    wide = [one.detach().double().requires_grad_() for one in given]
    core = AttentionCore(0.3)
    wanted = kernels.attend(*wide, documents(window).dense(LENGTH, torch.device("cpu")), False, 0.3)
    found = torch.empty_like(wanted)
    for index in range(ranks):
        part = ProcessGroup(tuple(range(ranks)), index, None)
        mine, told = positions_of(LENGTH, part, torch.device("cpu")), documents(window)
        with kernels.noting() as used:
            for _ in range(2):  # layers
                mixed: Tensor = ContextCore(core, part)(
                    given[0][:, :, mine], *given[1:], Mask(causal=True, documents=told), None
                )
        assert ("variable-length flash" in used) == (how == "flash")
        assert len(told.made) == (how == "mask")
        found[:, :, mine] = mixed.double()
    off = 2e-2 if how == "flash" else 1e-12
    torch.testing.assert_close(found, wanted, atol=off, rtol=off)
    pulls = torch.randn(found.shape, generator=random).to(dtype).double()
    ours = torch.autograd.grad((found * pulls).sum(), given)
    theirs = torch.autograd.grad((wanted * pulls).sum(), wide)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, atol=6 * off, rtol=4 * off)
