"""Gradients of embeddings, row by row: the bits of torch's dense gradients."""

from __future__ import annotations

import torch
from torch import nn

from orchestrator.parallel.row_gradients import RowGradients


def test_rows_are_added_to_the_same_bits() -> None:
    torch.manual_seed(0)
    found = []
    for active in (False, True):
        torch.manual_seed(1)
        table = nn.Embedding(50, 8)
        table.weight.grad = torch.zeros_like(table.weight)
        rows = RowGradients(nn.Sequential(table))
        for micro in range(3):
            rows.active = active and micro < 2
            ids = torch.randint(0, 50, (4, 6))
            (table(ids) * torch.randn(4, 6, 8)).sin().sum().backward()
        found.append(table.weight.grad)
    assert torch.equal(*found)


def test_the_sum_of_a_tied_table_has_both_parts() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(20, 8)
    ids = torch.randint(0, 20, (2, 5))
    gradients = []
    for active in (False, True):
        table.weight.grad = torch.zeros_like(table.weight)
        RowGradients(nn.Sequential(table)).active = active
        nn.functional.cross_entropy((table(ids) @ table.weight.T).flatten(0, 1), ids.flatten()).backward()
        gradients.append(table.weight.grad.clone())
    torch.testing.assert_close(*gradients)
