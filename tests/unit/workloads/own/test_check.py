"""Which logits of an own model can continue texts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.own.check import check_logits
from workloads.own.generate import reads_length
from workloads.own.network import OwnNetwork

TOKENS = torch.arange(3, 15)[None]
LEAKS = "the logits of a token depend on later tokens"


class Means(nn.Module):
    """Each token sees the mean of those up to it, or of `all` of them. Tokens from 16 on are unused, and masked."""

    def __init__(self, all: bool = False, mask: float = 0.0, multiple: int = 1, offset: float = 0.0) -> None:
        super().__init__()
        self.all, self.mask, self.multiple, self.offset = all, mask, multiple, offset
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def logits(self, batch: Any) -> Tensor:
        x = self.table(batch["tokens"])
        length = x.shape[1]
        if length % self.multiple:
            raise ValueError(f"needs a multiple of {self.multiple}")
        count = torch.arange(1, length + 1, device=x.device)[:, None]
        seen = x.mean(1, keepdim=True) if self.all else x.cumsum(1) / count
        found = self.head(x + seen) + self.offset
        return torch.cat((found[..., :16], torch.full_like(found[..., 16:], self.mask)), -1)


def check(any_length: bool = True, **changes: Any) -> None:
    torch.manual_seed(0)
    check_logits("m", OwnNetwork(Means(**changes), {}), {"tokens": TOKENS}, any_length)


MASKS = [0.0, -1e4, torch.finfo(torch.float32).min, -torch.inf]


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_of_unused_tokens_hides_no_later_token(mask: float) -> None:
    check(mask=mask)
    with pytest.raises(WorkloadError, match=LEAKS):
        check(mask=mask, all=True)


def test_rounding_of_large_logits_is_no_difference() -> None:
    check(offset=1e4)


@pytest.mark.parametrize("mask", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_refused(mask: float) -> None:
    with pytest.raises(WorkloadError, match=re.escape("m: its logits are NaN, or none of a token is finite")):
        check(mask=mask)


def test_a_model_may_read_a_multiple_of_a_length() -> None:
    """As its batches have, and samples too; texts of tasks have any length."""
    check(any_length=False, multiple=4)
    with pytest.raises(WorkloadError, match=r"failed on a text of 6 tokens .*needs a multiple of 4"):
        check(multiple=4)
    with pytest.raises(WorkloadError, match=LEAKS):
        check(any_length=False, multiple=4, all=True)
    with torch.device("meta"):
        bare = Means(multiple=4)
    assert [reads_length("m", bare, length) for length in (12, 8, 6)] == [True, True, False]
