"""Which parameters of a module are embeddings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from workloads.plain_module import embeddings_of


class Network(nn.Module):
    def __init__(self, *, has_table: bool, has_blocks: bool) -> None:
        super().__init__()
        if has_table:
            self.tokens = nn.Embedding(10, 4)
            self.first = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.places = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 10, bias=False)
        if has_table:
            self.head.weight = self.tokens.weight
        self.has_blocks = has_blocks


@pytest.mark.parametrize(
    ("has_table", "has_blocks", "wanted"),
    [
        # A tied head is the table. A table is an embedding wherever it stands.
        (True, True, {"tokens.weight", "first.weight", "places.weight"}),
        # Nothing stands before the first layer, so no layer may be taken for it.
        (False, True, {"places.weight"}),
        # Without layers nothing stands before them.
        (True, False, {"tokens.weight", "places.weight"}),
    ],
)
def test_embeddings_are_tables_and_what_stands_before_the_layers(
    has_table: bool, has_blocks: bool, wanted: set[str]
) -> None:
    workload: Any = SimpleNamespace(
        build=lambda: Network(has_table=has_table, has_blocks=has_blocks),
        blocks=lambda model: list(model.layers) if model.has_blocks else [],
    )
    assert embeddings_of(workload) == wanted
