"""Isolated documents and windows under context parallelism: each rank's part is that of attention to the whole
sequence."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor
from varlen import varlen_attn

from orchestrator.parallel import context
from orchestrator.parallel.context import ContextCore, positions_of, slice_batch
from orchestrator.parallel.mesh import ProcessGroup
from workloads.model import kernels
from workloads.model.attention import AttentionCore
from workloads.model.masks import SEGMENTS, Documents, Mask, _bounds, self_mask, with_starts
from workloads.model.presets import preset

HEADS, GROUPS, LENGTH, SIZE = 4, 2, 16, 8
ENDS = ([3, 9, 15], [1, 2, 7], [LENGTH], [4, 8, 12])
"""Where the documents of four rows end: within a chunk, at its end, and after more than one."""


def documents(window: int, several: bool = True) -> Documents:
    """Of four rows, of `several` documents or of one each."""
    if not several:
        return Documents(None, window, bounds=_bounds(torch.zeros(len(ENDS), 1, dtype=torch.int32), LENGTH))
    rows = [torch.bucketize(torch.arange(LENGTH), torch.tensor(ends), right=True) for ends in ENDS]
    numbers = torch.stack(rows)
    return Documents(numbers, window, bounds=_bounds(with_starts({SEGMENTS: numbers})["starts"], LENGTH))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are whole, as they are once gathered."""
    monkeypatch.setattr(context, "gather", lambda tensor, *_, **__: tensor)
    monkeypatch.setattr(context, "in_order", lambda tensor, *_, **__: tensor)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)


@pytest.mark.parametrize(("window", "several"), [(0, True), (3, True), (3, False), (6, False)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["flash", "mask"])
def test_a_part_of_a_row_is_that_of_the_whole(
    how: str, ranks: int, window: int, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, of grouped queries; by the kernel's stand-in, or by one mask for all layers."""
    monkeypatch.setattr(kernels, "_has_flash", lambda _: how == "flash")
    dtype = torch.bfloat16 if how == "flash" else torch.float64
    random = torch.Generator().manual_seed(1)
    shapes = [(len(ENDS), heads, LENGTH, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    given = [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]
    wide = [one.detach().double().requires_grad_() for one in given]
    core = AttentionCore(0.3)
    wanted = kernels.attend(*wide, documents(window, several).dense(LENGTH, torch.device("cpu")), False, 0.3)
    found = torch.empty_like(wanted)
    for index in range(ranks):
        part = ProcessGroup(tuple(range(ranks)), index, None)
        mine, told = positions_of(LENGTH, part, torch.device("cpu")), documents(window, several)
        with kernels.noting() as used:
            for _ in range(2):  # layers
                mixed: Tensor = ContextCore(core, part)(
                    given[0][:, :, mine], *given[1:], Mask(causal=True, documents=told), None
                )
        assert ("variable-length flash" in used) == (how == "flash")
        assert len(told.dense_mask) == (how == "mask")
        found[:, :, mine] = mixed.double()
    off = 2e-2 if how == "flash" else 1e-12
    torch.testing.assert_close(found, wanted, atol=off, rtol=off)
    pulls = torch.randn(found.shape, generator=random).to(dtype).double()
    ours = torch.autograd.grad((found * pulls).sum(), given)
    theirs = torch.autograd.grad((wanted * pulls).sum(), wide)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, atol=6 * off, rtol=4 * off)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("window", [6, LENGTH])
def test_windows_of_rows_without_padding_are_no_mask_in_the_batch(window: int, index: int) -> None:
    """They are told to the layers that have one, if rows are longer; the others know of none."""
    config = dataclasses.replace(preset("llama-tiny"), window=window, full_every=2)
    batch = {"tokens": torch.arange(4 * LENGTH).view(4, LENGTH)}
    mine = slice_batch(batch, config, ProcessGroup((0, 1), index, None))
    assert not [name for name, tensor in mine.items() if tensor.dtype is torch.bool]
    mask = self_mask(config, mine, LENGTH // 2)
    assert mask == Mask(causal=True, documents=Documents(None, window) if window < LENGTH else None)
    assert self_mask(config, mine, LENGTH // 2, windowed=False) == Mask(causal=True)
    padded = slice_batch({**batch, "padding": batch["tokens"] > 3}, config, ProcessGroup((0, 1), index, None))
    assert padded["visible"].shape == (4, LENGTH // 2, LENGTH)
