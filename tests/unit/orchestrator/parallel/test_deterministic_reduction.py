"""Sums that do not depend on how they are cut."""

import pytest
import torch

from orchestrator.parallel.deterministic_reduction import tree_sum


@pytest.mark.parametrize("ways", [1, 2, 4, 8, 16])
def test_a_tree_has_the_same_bits_however_it_is_cut(ways: int) -> None:
    parts = torch.randn(16, 1000, generator=torch.Generator().manual_seed(0))
    cut = torch.stack([tree_sum(part) for part in parts.chunk(ways)])
    assert torch.equal(tree_sum(cut), tree_sum(parts))


def test_a_plain_sum_in_order_has_not() -> None:
    parts = torch.randn(16, 1000, generator=torch.Generator().manual_seed(0))
    one = sum(parts.unbind())
    two = sum(parts[:8].unbind()) + sum(parts[8:].unbind())
    assert not torch.equal(one, two)


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_any_number_of_parts_is_summed(count: int) -> None:
    parts = torch.randn(count, 10, dtype=torch.float64)
    torch.testing.assert_close(tree_sum(parts), parts.sum(0))
