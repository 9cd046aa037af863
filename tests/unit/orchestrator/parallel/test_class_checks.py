"""What is checked of a class of transformers that a job divides."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.parallel.own_check import check_divided
from workloads.errors import WorkloadError


@pytest.mark.parametrize(("heads", "cut"), [((3, 3), 8), ((4, 1), 8), ((4, 2), 3)])
def test_a_division_that_cannot_be_tried_is_refused(heads: tuple[int, int], cut: int) -> None:
    config = SimpleNamespace(head_counts=heads, cut=cut, divided_by="plan")
    trial = SimpleNamespace(name="m", config=config, sharding=lambda: {"layers.*": "row"}, stages=list)
    parallel: Any = SimpleNamespace(tp=3, pp=1)
    with pytest.raises(WorkloadError, match="no small copy of it can be divided over 2 ranks"):
        check_divided(parallel, trial, lambda: torch.nn.Identity(), {})
