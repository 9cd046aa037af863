"""Check that a model can be quantised as a job asks for."""

from __future__ import annotations

from typing import Any

from orchestrator.quantize.config import QuantizeSpec
from orchestrator.resolve.resolved_job import wrong_input


def check_quantize(quantize: QuantizeSpec | None, workload: Any) -> None:
    """Check that the patterns match linear layers, whose rows divide into groups.

    Args:
        quantize: the key `quantize` of the job; None without.
        workload: the model.

    Raises:
        InputError: they do not.
    """
    if quantize is None:
        return
    import torch

    from workloads.model.fake_quantise import check_scheme

    # Shapes and names are all that is asked for, so no memory is taken.
    with torch.device("meta"):
        model = workload.build()
    with wrong_input("quantize"):
        check_scheme(model, workload.blocks(model), quantize.scheme)
