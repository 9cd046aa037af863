"""Own metrics of an evaluation, see `workloads.own.protocols.Metric`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from workloads.errors import WorkloadError
from workloads.own.model import COUNTED, IGNORED, LABELS, Losses
from workloads.own.reference import load
from workloads.workload import Batch, Loss


class OwnMetrics:
    """The functions of these names. Raises WorkloadError if one cannot be imported."""

    def __init__(self, names: Sequence[str]) -> None:
        self._functions = {name: load(name) for name in names}

    def __bool__(self) -> bool:
        return bool(self._functions)

    def beside(self, loss: Loss, output: Any, batch: Batch) -> Loss:
        """The loss with the sums of the metrics of these samples. Raises WorkloadError for what is no number of each.

        What is no sample, but fills up a batch, does not count.
        """
        given = output.values if isinstance(output, Losses) else output.logits
        found = dict(loss.sums)
        for name, function in self._functions.items():
            value = torch.as_tensor(function(given, batch)).float()
            there = _there(batch)
            if value.shape != there.shape:
                raise WorkloadError(
                    f"{name} gives shape {tuple(value.shape)} for {len(there)} samples; give a number for each"
                )
            found[name] = (value.masked_fill(~there, 0.0).sum(), there.sum().float())
        return replace(loss, sums=found)


def _there(batch: Batch) -> torch.Tensor:
    """Which rows are samples, bool [B]: what fills up a batch has nothing that is predicted."""
    if COUNTED in batch:
        return batch[COUNTED]
    labels = batch.get(LABELS, batch.get("sequence_labels"))
    if labels is None:
        return torch.ones(len(next(iter(batch.values()))), dtype=torch.bool)
    none = labels.isnan() if labels.is_floating_point() else labels == IGNORED
    return ~none.flatten(1).all(1) if labels.dim() > 1 else ~none
