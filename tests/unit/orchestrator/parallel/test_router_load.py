"""What is made of the sums over routers; that they are the same under every layout is tested with parity."""

import torch
from torch import Tensor

from orchestrator.parallel.router_load import ratios


def of(sums: Tensor) -> dict[str, Tensor]:
    """A row a router."""
    return {str(number): row for number, row in enumerate(sums)}


def test_an_even_load_is_one_and_nothing_is_dropped() -> None:
    sums = torch.tensor([[0.0, 5.0, 5.0, 5.0, 5.0, 20.0, 10.0]] * 3, dtype=torch.float64)
    assert ratios(of(sums)) == {"router_load": 1.0, "router_dropped": 0.0, "router_entropy": 2.0}


def test_loads_are_of_layers_and_shares_of_all_choices() -> None:
    sums = torch.tensor([[0.0, 8.0, 0.0, 1.0, 8.0], [4.0, 2.0, 2.0, 3.0, 8.0]], dtype=torch.float64)
    assert ratios(of(sums)) == {"router_load": 1.5, "router_dropped": 0.25, "router_entropy": 0.25}


def test_recomputation_changes_no_ratio() -> None:
    sums = torch.tensor([[1.0, 8.0, 3.0, 1.0, 8.0], [3.0, 4.0, 5.0, 5.0, 8.0]], dtype=torch.float64)
    assert ratios(of(sums)) == ratios(of(2 * sums))
    recomputed = sums.clone()
    recomputed[0] *= 2  # in one of the layers alone
    assert ratios(of(recomputed)) == ratios(of(sums))


def test_routers_that_saw_nothing_divide_by_nothing() -> None:
    assert set(ratios(of(torch.zeros(2, 7, dtype=torch.float64))).values()) == {0.0}


def test_a_model_without_experts_has_none() -> None:
    assert ratios({}) == {}
