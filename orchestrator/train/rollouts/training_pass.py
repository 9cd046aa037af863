"""The forward pass of training over answers that are still being generated, for `determinism: bitwise`.

The bits of a row's numbers depend on the shape of its micro-batch, and on nothing in the other rows unless the model
has experts. So a pass of the same shape, with the row at the same place, computes the bits that training will compute,
whichever of the other rows are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from orchestrator.parallel.device import Device
from orchestrator.train.config import TrainSpec
from orchestrator.train.rollouts.config import RolloutSpec
from orchestrator.train.rollouts.rows import Rows, positions_of_labels
from workloads.model.exact_answers import Read, Text
from workloads.objectives.rewarded import Rewarded, log_probabilities, tempered
from workloads.workload import Workload


@dataclass(frozen=True)
class TrainingPass:
    """Reads the answers of a unit as training will read them.

    Attributes:
        rows: lays out rows.
        size: rows of a micro-batch.
        device: the device of the model.
    """

    rows: Rows
    size: int
    device: torch.device

    def passes(self, first_row: int, count: int) -> list[range]:
        """Return which of a unit's `count` rows share a micro-batch. `first_row` is the place of the first of them in
        its step.

        Args:
            first_row: number of the unit's first row in its step.
            count: rows of the unit.
        """
        starts = range(-(first_row % self.size), count, self.size)
        return [range(max(start, 0), min(start + self.size, count)) for start in starts]

    @torch.inference_mode()
    def read(self, model: nn.Module, first_row: int, rows: range, texts: Sequence[Text]) -> list[Read]:
        """Return what a pass computes of the answers of some of `passes`.

        Args:
            model: the whole model, in evaluation mode.
            first_row: as in `passes`.
            rows: one of `passes`.
            texts: of these rows.
        """
        # Rows of other units stand before these in the micro-batch; padding takes their place, so that the shape is the
        # same.
        first_place = (first_row + rows.start) % self.size
        batch = self.rows.of_texts([*[None] * first_place, *texts], self.size)
        batch = {name: values.to(self.device) for name, values in batch.items()}
        logits = tempered(model(batch).logits, batch)
        log_p = log_probabilities(logits, batch["labels"])
        where = [(row, positions_of_labels(text)) for row, text in enumerate(texts, start=first_place)]
        return [Read(logits[row, span].float(), log_p[row, span]) for row, span in where]


def training_pass(
    workload: Workload, train: TrainSpec, rollout: RolloutSpec, sequence_length: int, device: Device
) -> TrainingPass | None:
    """Return what reads answers as the micro-batches of a job do, each of which is a virtual shard.

    Returns None for a job that is not bitwise, whose micro-batches depend on the layout.

    Args:
        workload: the model and its objective.
        train: says whether the job is bitwise, and in how many shards.
        rollout: how answers are generated.
        sequence_length: tokens of a row.
        device: the device of the model.
    """
    if not train.bitwise_shards:
        return None
    assert isinstance(workload.objective, Rewarded)
    has_experts = bool(workload.config.moe)
    rows = Rows(workload.objective, rollout, sequence_length, has_experts=has_experts, dropout_seed=None)
    return TrainingPass(rows, train.global_batch // train.bitwise_shards, device.device)
