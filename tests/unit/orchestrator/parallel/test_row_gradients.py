"""Gradients of embeddings, row by row: the bits of torch's dense gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestrator.parallel.runner import add_rows
from workloads.load import load
from workloads.workload import Vocabulary

VOCABULARY = Vocabulary(160, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, 160)))


def test_rows_are_added_to_the_same_bits() -> None:
    """Also in the micro-batch after which the sum is reduced: who waits for the gradient hears of it once."""
    found, heard = [], list[Tensor]()
    for by_rows in (False, True):
        torch.manual_seed(1)
        table = nn.Embedding(50, 8)
        total = table.weight.grad = torch.zeros_like(table.weight)
        if by_rows:
            add_rows([table])
            table.weight.register_post_accumulate_grad_hook(heard.append)
        for _ in range(3):
            ids = torch.randint(0, 50, (4, 6))
            (table(ids) * torch.randn(4, 6, 8)).sin().sum().backward()
        assert table.weight.grad is total, "the bucket that is reduced"
        found.append(total)
    assert torch.equal(*found)
    assert [id(weight) for weight in heard] == [id(table.weight)] * 3


def test_the_sum_of_a_tied_table_has_both_parts() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(20, 8)
    ids = torch.randint(0, 20, (2, 5))
    gradients = []
    for by_rows in (False, True):
        table.weight.grad = torch.zeros_like(table.weight)
        add_rows([table] if by_rows else [])
        nn.functional.cross_entropy((table(ids) @ table.weight.T).flatten(0, 1), ids.flatten()).backward()
        gradients.append(table.weight.grad.clone())
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("model", "objective", "count"),
    [
        ("bert-tiny", "sequence_classification", 1),
        ("bert-tiny", "masked_lm", 0),
        ("gpt-tiny", "causal_lm", 0),
        ("t5-tiny", "seq2seq", 0),
    ],
)
def test_tables_that_are_read_twice_are_left_to_torch(model: str, objective: str, count: int) -> None:
    """Sums in another order have other bits, and earlier runs go on to theirs."""
    labels = {"labels": ["a", "b"]} if objective == "sequence_classification" else {}
    workload = load(model, objective=objective, vocabulary=VOCABULARY, sequence_length=16, **labels)
    assert len(getattr(workload.build(), "tables_read_once", list)()) == count
