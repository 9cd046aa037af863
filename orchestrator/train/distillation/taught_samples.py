"""The samples of a run whose teacher's logits are stored, and what is stored of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from orchestrator.data.samples.teacher_table import TeacherTable, TopRecords
from orchestrator.models.base import Base
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.train.distillation.config import LogitsSpec
from orchestrator.train.distillation.teacher import PlacedTop
from workloads.objectives.distillation import STORED
from workloads.workload import IGNORED, Batch, Workload


class TaughtSamples:
    """The training samples of a run, with what its teacher's logits need of them.

    Attributes:
        k: logits that are stored of a token; all of a classifier's.
        length: tokens of a sample; 1 for classes of whole samples.
        number: the number of samples.
    """

    def __init__(self, inputs: TrainingInputs, teacher: Workload, logits: LogitsSpec) -> None:
        """
        Args:
            inputs: the training samples.
            teacher: the teacher for the student's objective.
            logits: what of its logits is stored.
        """
        self._read = inputs.text[0].read
        example = self._read.collate([0], 0)
        self._labels = "sequence_labels" if "sequence_labels" in example else "labels"
        classes = int(getattr(teacher.config, "classes", 0)) if self._labels == "sequence_labels" else 0
        self._temperature = logits.temperature
        self.k = classes or min(logits.k, int(teacher.config.vocab_size))
        self.length = 1 if classes else example["labels"].shape[1]
        self.number = len(self._read)

    def batch(self, samples: Sequence[int] | np.ndarray, first: int, count: int) -> Batch:
        """Return `count` of these samples from the index `first` on. Rows beyond the last sample repeat it."""
        return self._read.collate([samples[min(first + n, len(samples) - 1)] for n in range(count)], 0)

    def store(
        self, table: TeacherTable, name: str, samples: Sequence[int] | np.ndarray, logits: PartLogits
    ) -> None:
        """Write a part of a table.

        Args:
            table: the table.
            name: the part's name.
            samples: the part's samples.
            logits: the logits of all of them.
        """
        records = logits.records()
        mass, tokens = self._mass_of(samples, records)
        table.write(name, records, mass, tokens)

    def _mass_of(self, samples: Sequence[int] | np.ndarray, records: TopRecords) -> tuple[float, int]:
        """Return the sum of the probabilities that are kept of the samples' predicted tokens, and their number."""
        labels = self._read.collate(samples, 0)[self._labels].numpy().reshape(len(samples), -1)
        # [samples, L, k], in fp64: a sum over millions of tokens. exp(z / T - log_sum) is the softmax at temperature T,
        # though only k logits are stored.
        scaled = records.logits.astype(np.float64) / self._temperature
        kept_mass = np.exp(scaled - records.log_sum[..., None]).sum(-1)
        is_predicted = labels != IGNORED
        return float(kept_mass[is_predicted].sum()), int(is_predicted.sum())

    def finish(self, table: TeacherTable, base: Base) -> None:
        """Write the manifest of a table that is complete, and say how much of the probability it has."""
        source = {"teacher": base.uri, "step": base.step, "digest": base.digest}
        mass = table.finish({**source, "temperature": self._temperature})
        print(
            f"teacher: the {self.k} stored logits of a token cover {mass:.4f} of its probability", flush=True
        )


class PartLogits:
    """The logits of a part's samples, which passes fill in; zeros elsewhere.

    Attributes:
        values: tokens int32 [samples, L, k], logits fp32 [samples, L, k], and log-sums fp32 [samples, L].
    """

    def __init__(self, samples: int, taught: TaughtSamples) -> None:
        shape = (samples, taught.length, taught.k)
        self.values = (
            torch.zeros(shape, dtype=torch.int32),
            torch.zeros(shape),
            torch.zeros(shape[:2]),
        )

    def put(self, first: int, placed: PlacedTop) -> None:
        """Fill in a micro-batch that begins with sample `first`; rows beyond the last sample are left out."""
        tokens = self.values[0]
        count = max(min(len(tokens) - first, len(placed.top.tokens)), 0)
        positions = placed.places.cpu()
        rows = slice(first, first + count)
        for stored_values, values in zip(self.values, placed.top, strict=True):
            stored_values[rows, positions] = values[:count].cpu()

    def records(self) -> TopRecords:
        """Return the values."""
        return TopRecords(*(values.numpy() for values in self.values))


def with_logits(inputs: TrainingInputs, read: Callable[[np.ndarray], TopRecords]) -> TrainingInputs:
    """Return the inputs with the logits that `read` returns for the numbers of samples added to every sample."""
    batches, _ = inputs.text

    def entries(samples: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(STORED, read(samples), strict=True))

    return dataclasses.replace(inputs, batches=batches.with_reader(batches.read.with_entries(entries)))
