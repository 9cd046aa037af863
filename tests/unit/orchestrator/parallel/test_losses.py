"""What a micro-batch predicts, as it is counted before its loss."""

from __future__ import annotations

import pytest
import torch

from orchestrator.parallel.losses import _labels_in
from workloads.model.losses import _span
from workloads.workload import IGNORED


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"labels": torch.tensor([[5, IGNORED, 7]])}, 2),
        ({"sequence_labels": torch.tensor([1, IGNORED, 0])}, 2),
        ({"sequence_labels": torch.tensor([1.5, torch.nan, 0.0])}, 2),
        ({"tokens": torch.tensor([[1, 2]])}, 0),
    ],
)
def test_labels_are_counted(batch: dict[str, torch.Tensor], count: int) -> None:
    assert _labels_in(batch) == count


def test_a_span_is_one_prediction_as_in_its_loss() -> None:
    """Else the loss of a router, a mean beside the sum, would weigh twice as much."""
    labels = torch.tensor([[1, 2], [IGNORED, IGNORED], [0, 3]])
    assert (
        _labels_in({"labels": labels}, predicts_spans=True)
        == int(_span(torch.zeros(3, 4, 2), labels).count)
        == 2
    )
