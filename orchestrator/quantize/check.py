"""Check that a model can be quantised as a job asks for."""

from __future__ import annotations

from typing import Any

from orchestrator.quantize.config import QuantizeSpec
from orchestrator.resolve.resolved_job import wrong_input


def check_quantize(quantize: QuantizeSpec | None, workload: Any) -> None:
    """Check that the patterns match linear layers, whose rows divide into groups. Raises InputError."""
    if quantize is None:
        return
    import torch

    from workloads.model.fake_quantise import check_scheme

    with torch.device("meta"):
        model = workload.build()
    with wrong_input("quantize"):
        check_scheme(model, workload.blocks(model), quantize.scheme)
