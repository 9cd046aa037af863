"""Values that another model computes for every sample of a run. The ranks compute them before the first step, and store
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cluster.workers.worker_context import WorkerContext
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.train.engines.engine import Engine


class ComputedValues(Protocol):
    """Values of every sample, such as log-probabilities under a reference model or the logits of a teacher."""

    @property
    def are_complete(self) -> bool:
        """Whether the ranks need not compute any values; equal on every rank."""
        ...

    def compute(
        self,
        engine: Engine,
        layout: Layout,
        context: WorkerContext,
        heeds_stop: bool,
        between: Callable[[], object],
    ) -> None:
        """Compute the missing values, part by part, and store each part. A stop may end it early.

        Args:
            engine: computes them; it has other weights afterwards.
            layout: its layout.
            context: this rank's number and its connection to the controller.
            heeds_stop: whether a stop ends the computation early.
            between: called after each part; tests inject faults there.
        """
        ...

    def joined(self, inputs: TrainingInputs) -> TrainingInputs:
        """Return the inputs with the values added to every sample."""
        ...
