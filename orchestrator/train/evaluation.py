"""Evaluation between two training steps: sums over all tokens of each held-out set, equal under any layout.

A set is cut into micro-batches of the layout's size, see `held_out_batches`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from cluster.workers.clock import wall
from cluster.workers.worker_context import WorkerContext
from orchestrator.data.samples.batches import Prefetch
from orchestrator.data.samples.held_out_set import HeldOut
from orchestrator.data.samples.own_samples import OwnHeldOut
from orchestrator.evaluate.config import EvaluateSpec, StopWhen
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import EvaluationSums
from orchestrator.parallel.rank_messages import agree
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.train.config import TrainSpec
from orchestrator.train.engines.engine import Engine
from orchestrator.train.eval_sharding import shares
from orchestrator.train.evaluation_metrics import means_of_own_model, measures
from orchestrator.train.generated_text import Sampler
from orchestrator.train.held_out_batches import micro_batch
from orchestrator.train.rollouts.rollouts import Rollouts
from workloads.objectives.metrics import load_libraries
from workloads.objectives.preferences import DIVERGENCE
from workloads.workload import Batch


class MakeEvaluator(Protocol):
    """Returns what evaluates an engine; `between` is called with the step after each pass over a global batch."""

    def __call__(
        self, *, engine: Engine, inputs: TrainingInputs, between: Callable[[int], object]
    ) -> Evaluator: ...


class Evaluator:
    """Evaluates an engine's model on all held-out sets. Every rank has one and calls it at the same steps."""

    def __init__(
        self,
        layout: Layout,
        context: WorkerContext,
        engine: Engine,
        inputs: TrainingInputs,
        rollouts: Rollouts | None = None,
        between: Callable[[int], object] = lambda step: None,
        *,
        evaluate: EvaluateSpec | None,
        stop_when: StopWhen | None,
        train: TrainSpec,
        sequence_length: int,
        classes: int,
        cut: Callable[[Batch], Batch],
        measured: dict[str, int | None],
        has_average: bool,
    ) -> None:
        """Make ready to evaluate.

        Args:
            layout: how the ranks divide the work.
            context: this rank's number and its connection to the controller.
            engine: has the weights.
            inputs: the workload, the held-out sets and the prompts.
            rollouts: generates answers, if the objective learns from rewards.
            between: called with the step after each pass over a global batch; tests inject faults there.
            evaluate: when to evaluate, and by which metrics; None without evaluations.
            stop_when: when a run ends early; None for never.
            train: its global batch and its steps.
            sequence_length: tokens of a row.
            classes: how many labels the data has.
            cut: cuts the rows of a micro-batch to its longest sample.
            measured: the settings that change values, see `checkpoint.evaluations.measure_of`.
            has_average: whether the moving average of the weights is evaluated in their place.
        """
        self._spec = evaluate
        self._layout = layout
        self._context = context
        self._engine = engine
        self._measured = measured
        self._stop_when = stop_when
        self._batch_size = train.global_batch
        self._steps = train.steps
        self._sets = inputs.sets
        self._rollouts = rollouts
        self._has_average = has_average
        self._between = between
        workload = inputs.workload
        samples = evaluate and evaluate.samples
        self._has_routers = bool(workload.config.moe)
        self._metrics = evaluate.metrics_for(workload.objective.name) if evaluate else ()
        self._has_own_values = workload.has_own_values
        self._classes = classes
        self._cut = cut
        self._sampler: Sampler | None = None
        if inputs.prompts is not None and samples:
            self._sampler = Sampler(
                prompts=inputs.prompts,
                spec=samples,
                layout=layout,
                context=context,
                engine=engine,
                workload=workload,
                global_batch=self._batch_size,
                sequence_length=sequence_length,
            )
            self._sampler.prepare()
        if evaluate and not evaluate.is_beside:
            load_libraries(evaluate.of_predictions)

    def is_due(self, step: int) -> bool:
        """Whether the job asks the ranks for an evaluation after `step`."""
        spec = self._spec
        has_any = bool(self._sets) or self._sampler is not None
        return has_any and spec is not None and spec.where == "gang" and spec.is_due(step, self._steps)

    def stop_when(self, step: int) -> StopWhen | None:
        """Return the rule of early stopping if the evaluation after `step` counts for it, else None."""
        is_regular = self._spec is not None and self._spec.is_regular(step, self._steps)
        return self._stop_when if is_regular else None

    def evaluate(self, step: int, attempt: int, heeds_stop: bool = True) -> EvaluationRow | None:
        """Evaluate after `step`, and return the row of the evaluation.

        The moving average of the weights is evaluated if the job has one. After an error it stays in the place of the
        weights, because the rank ends.

        Args:
            step: steps done.
            attempt: number of the run's attempt.
            heeds_stop: whether a stop cuts the evaluation short.

        Returns:
            The row; None if a stop cut the evaluation short.
        """
        started = time.perf_counter()
        # Only a batch has the time limit of a step. What comes before and after batches may take longer: the first
        # forward pass may compile, and a metric of all predictions is computed at once.
        self._context.set_waiting(True)
        row = self._row(step, attempt, heeds_stop, started)
        self._context.end_work()
        self._context.set_waiting(False)
        return row

    def _row(self, step: int, attempt: int, heeds_stop: bool, started: float) -> EvaluationRow | None:
        if self._has_average:
            self._engine.swap_average()
        metrics = self._metrics_of_sets(step, heeds_stop)
        samples = None
        if metrics is not None and self._sampler is not None:
            samples = self._sampler.continue_prompts(step, heeds_stop, lambda: self._between(step))
        if self._has_average:
            self._engine.swap_average()
        if metrics is None or (samples is None and self._sampler is not None):
            return None
        seconds = time.perf_counter() - started
        row: EvaluationRow = {
            "step": step,
            "attempt": attempt,
            "time": wall(),
            "seconds": seconds,
            "sets": metrics,
            "measured": self._measured,
        }
        if self._has_average:
            row["weights"] = "averaged"
        if samples is not None:
            row["samples"] = samples
        return row

    def _metrics_of_sets(self, step: int, heeds_stop: bool) -> dict[str, dict[str, float]] | None:
        metrics = dict[str, dict[str, float]]()
        if self._rollouts is not None:
            self._rollouts.take(self._engine)
        for name, held_out in self._sets.items():
            if self._rollouts is not None:
                rewards = self._rewards_of(name, held_out, step, heeds_stop)
                if rewards is None:
                    return None
                metrics[name] = rewards
                continue
            sums = self._sums(name, held_out, step, heeds_stop)
            if sums is not None and DIVERGENCE in sums.sums:
                # KTO's baseline is a mean over all samples, so the losses take a second pass.
                self._engine.take_baseline(sums)
                sums = self._sums(name, held_out, step, heeds_stop)
            if sums is None:
                return None
            if self._has_own_values:
                metrics[name] = {**means_of_own_model(sums), "tokens": sums.tokens}
            else:
                tokens_per_byte = held_out.tokens / max(held_out.bytes, 1)
                metrics[name] = measures(sums, tokens_per_byte, self._metrics, self._classes)
        return metrics

    def _rewards_of(
        self, name: str, held_out: HeldOut | OwnHeldOut, step: int, heeds_stop: bool
    ) -> dict[str, float] | None:
        """Return what the most likely answers to held-out prompts are worth; None if a stop cuts it short."""
        assert self._rollouts is not None
        assert isinstance(held_out, HeldOut)

        def goes_on() -> bool:
            self._between(step)
            return not agree(0, heeds_stop and self._context.stop_requested()).stop

        batches = self._spec.batches if self._spec else None
        max_samples = None if batches is None else batches * self._batch_size
        return self._rollouts.evaluate(
            step, name=name, read=held_out.read, max_prompts=max_samples, goes_on=goes_on
        )

    def _sums(
        self, name: str, held_out: HeldOut | OwnHeldOut, step: int, heeds_stop: bool
    ) -> EvaluationSums | None:
        samples = _samples(held_out, self._spec, self._batch_size)
        sums = EvaluationSums()
        rank = self._layout.coordinate(self._context.rank_info.rank)["dp"]
        passes = shares(samples, self._layout.micro_batch, self._batch_size, self._layout.dp, rank)

        def make(number: int) -> list[Batch]:
            result = [
                micro_batch(
                    held_out,
                    part,
                    samples=samples,
                    size=self._layout.micro_batch,
                    is_routed=self._has_routers,
                )
                for part in passes[number]
            ]
            return [self._cut(batch) for batch in result]

        self._context.begin_work(f"evaluation of {name} after step {step}", "batches", len(passes))
        with Prefetch(make, 0, stop=len(passes)) as prefetched:
            for _ in passes:
                batches = prefetched.next()
                if agree(0, heeds_stop and self._context.stop_requested()).stop:
                    return None
                sums += self._engine.eval_step(batches)
                self._context.set_waiting(False)
                self._context.progressed()
                self._between(step)
        self._context.set_waiting(True)
        return sums


def _samples(held_out: HeldOut | OwnHeldOut, spec: EvaluateSpec | None, batch_size: int) -> int:
    max_batches = spec.batches if spec else None
    return held_out.samples if max_batches is None else min(held_out.samples, max_batches * batch_size)
