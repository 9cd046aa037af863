"""The user's own evaluation metrics, see `workloads.own.protocols.Metric`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from workloads.errors import WorkloadError
from workloads.model.electra import ElectraOutput
from workloads.own.network import Losses
from workloads.own.object_reference import load
from workloads.own.rows import sample_rows
from workloads.workload import Batch, Loss


def _given(output: Any) -> Any:
    if isinstance(output, Losses):
        return output.values
    if isinstance(output, ElectraOutput):
        raise WorkloadError(
            "ELECTRA has two networks' logits, and an own metric is given those of one; leave it out"
        )
    return output.sentence if output.logits is None else output.logits


def _shown(outputs: Any) -> str:
    """Return what a metric gets as its output, for messages."""
    if isinstance(outputs, Mapping):
        return f"what loss(batch) returns besides the loss, by name: {', '.join(outputs) or 'nothing'}"
    return f"a tensor of shape {tuple(outputs.shape)}"


class OwnMetrics:
    """The metric functions of these names. Raises WorkloadError if one cannot be imported."""

    def __init__(self, names: Sequence[str]) -> None:
        self._functions = {name: load(name) for name in names}

    def __bool__(self) -> bool:
        return bool(self._functions)

    def beside(self, loss: Loss, output: Any, batch: Batch) -> Loss:
        """Add the sums of the metrics of these samples to the loss. Rows that only fill up a batch do not count.

        Args:
            loss: the loss of the samples.
            output: the model's output for them.
            batch: their arrays by name, [B, ...] each.

        Raises:
            WorkloadError: a metric fails, or does not return one number per sample.
        """
        outputs = _given(output)
        sums = dict(loss.sums)
        for name, function in self._functions.items():
            try:
                value = torch.as_tensor(function(outputs, batch)).float()
            except Exception as error:  # whatever the user's code raises
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                raise WorkloadError(f"{name} failed ({reason}); its output is {_shown(outputs)}") from None
            rows = sample_rows(batch)
            if value.shape != rows.shape:
                raise WorkloadError(
                    f"{name} gives shape {tuple(value.shape)} for {len(rows)} samples; give a number for each"
                )
            sums[name] = (value.masked_fill(~rows, 0.0).sum(), rows.sum().float())
        return replace(loss, sums=sums)
