"""Forward passes in evaluation mode, where dropout is off, and what they return of their micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from orchestrator.parallel.losses import EvaluationSums, StepLosses
from orchestrator.parallel.router_load import RouterLoad
from workloads.workload import Batch


class ForwardPasses:
    """The passes of an engine that change no state. All ranks call each method together."""

    def __init__(
        self,
        losses: StepLosses,
        routing: RouterLoad,
        stages: Sequence[nn.Module],
        run: Callable[[Sequence[Batch]], None],
    ) -> None:
        """Prepare the passes.

        Args:
            losses: collects what a pass returns.
            routing: counts the tokens of each expert.
            stages: this rank's part of the model.
            run: runs the forward passes of micro-batches in evaluation mode.
        """
        self._losses = losses
        self._routing = routing
        self._stages = stages
        self._run = run

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> EvaluationSums:
        """See `Engine.eval_step`."""
        self._losses.begin_evaluation()
        self._run(micro_batches)
        return self._losses.evaluated(self._routing.take(self._stages), self._routing.named)

    @torch.no_grad()
    def next_logits(self, micro_batches: Sequence[Batch]) -> list[tuple[int, Tensor]]:
        """See `Engine.next_logits`."""
        self._losses.begin_prediction()
        self._run_uncounted(micro_batches)
        return self._losses.predicted()

    @torch.no_grad()
    def answer_log_probabilities(
        self, micro_batches: Sequence[Batch], on_every_rank: bool = False
    ) -> list[Tensor]:
        """See `Engine.log_probabilities`; with `on_every_rank` all ranks of a pipeline's last stage return them.

        Args:
            micro_batches: pairs of answers.
            on_every_rank: whether all ranks with the same micro-batches return the values.
        """
        self._losses.begin_reference()
        self._run_uncounted(micro_batches)
        return self._losses.answer_log_probabilities(on_every_rank)

    @torch.no_grad()
    def token_log_probabilities(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """See `Engine.token_log_probabilities`, for the present weights."""
        self._losses.begin_tokens()
        self._run_uncounted(micro_batches)
        values = self._losses.token_log_probabilities()
        # Only a pipeline's last stage computes and reads them.
        return values or [torch.zeros(batch["labels"].shape) for batch in micro_batches]

    def _run_uncounted(self, micro_batches: Sequence[Batch]) -> None:
        """Run passes whose routing no metric counts, so it must not reach the next step's."""
        self._run(micro_batches)
        self._routing.take(self._stages)
