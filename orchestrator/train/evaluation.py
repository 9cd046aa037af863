"""Evaluation between two training steps: sums over all tokens of each held-out set, equal under any layout.

A set is cut into micro-batches of the layout's size. A rank without one left computes a micro-batch without labels,
because the collectives of its peers need it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import get_args

import torch
from torch import Tensor

from cluster.workers.clock import wall
from cluster.workers.worker_context import WorkerContext
from orchestrator.checkpoint.evaluations import measure_of
from orchestrator.config.spec import JobSpec
from orchestrator.data.samples.batches import Prefetch
from orchestrator.data.samples.held_out_set import HeldOut
from orchestrator.data.samples.own_samples import OwnHeldOut
from orchestrator.evaluate.config import EvaluateSpec, OfPredictions, StopWhen
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import EvaluationSums
from orchestrator.parallel.rank_messages import agree
from orchestrator.parallel.router_load import ratios
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.train.engines.engine import Engine
from orchestrator.train.eval_sharding import shares
from orchestrator.train.rollouts.rollouts import Rollouts
from orchestrator.train.sampler import Sampler
from workloads.model.masks import DECODER_REAL, REAL
from workloads.model.transformer import IGNORED
from workloads.objectives.distillation import LOGIT_LOSS
from workloads.objectives.metrics import load_libraries, measure
from workloads.objectives.preferences import DIVERGENCE, means
from workloads.own.rows import COUNTED
from workloads.workload import Batch

ROUTED = ((REAL, "tokens", "padding"), (DECODER_REAL, "decoder_tokens", "decoder_padding"))
"""Names of a batch's entries: the mask of routed tokens, the tokens, and the mask of padding."""
LABELS = ("labels", "sequence_labels")
"""Names of a batch's entries with labels."""


class Evaluator:
    """Evaluates an engine's model on all held-out sets. Every rank has one and calls it at the same steps."""

    def __init__(
        self,
        spec: JobSpec,
        layout: Layout,
        context: WorkerContext,
        engine: Engine,
        inputs: TrainingInputs,
        rollouts: Rollouts | None = None,
        between: Callable[[int], object] = lambda step: None,
    ) -> None:
        """`between` is called with the step after each pass over a global batch; tests inject faults there."""
        self._spec = spec.evaluate
        self._layout = layout
        self._context = context
        self._engine = engine
        self._measured = measure_of(spec.evaluate, spec.checkpoint.averaged)
        self._stop_when = spec.stop_when
        self._batch_size = spec.train.global_batch
        self._steps = spec.train.steps
        self._sets = inputs.sets
        self._rollouts = rollouts
        self._has_average = spec.checkpoint.ema is not None
        self._between = between
        workload = inputs.workload
        samples = spec.evaluate and spec.evaluate.samples
        self._has_routers = bool(workload.config.moe)
        self._metrics = spec.evaluate.metrics_for(workload.objective.name) if spec.evaluate else ()
        self._has_own_values = workload.has_own_values
        self._classes = len(spec.data.labels)
        self._sampler: Sampler | None = None
        if inputs.prompts is not None and samples:
            self._sampler = Sampler(
                prompts=inputs.prompts,
                asked=samples,
                layout=layout,
                context=context,
                engine=engine,
                workload=workload,
                global_batch=self._batch_size,
                sequence_length=spec.data.sequence_length,
            )
            self._sampler.prepare()
        if spec.evaluate and spec.evaluate.where == "gang":
            load_libraries(spec.evaluate.of_predictions)

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
            samples = self._sampler.say(step, heeds_stop, lambda: self._between(step))
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
                found = self._rewards_of(name, held_out, step, heeds_stop)
                if found is None:
                    return None
                metrics[name] = found
                continue
            sums = self._sums(name, held_out, step, heeds_stop)
            if sums is not None and DIVERGENCE in sums.sums:
                # KTO's baseline is a mean over all samples, so the losses take a second pass.
                self._engine.take_baseline(sums)
                sums = self._sums(name, held_out, step, heeds_stop)
            if sums is None:
                return None
            if self._has_own_values:
                metrics[name] = {**_means_of_own(sums), "tokens": sums.tokens}
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
        most = None if batches is None else batches * self._batch_size
        return self._rollouts.evaluate(step, name=name, read=held_out.read, most=most, goes_on=goes_on)

    def _sums(
        self, name: str, held_out: HeldOut | OwnHeldOut, step: int, heeds_stop: bool
    ) -> EvaluationSums | None:
        samples = _samples(held_out, self._spec, self._batch_size)
        sums = EvaluationSums()
        rank = self._layout.coordinate(self._context.rank_info.rank)["dp"]
        passes = shares(samples, self._layout.micro_batch, self._batch_size, self._layout.dp, rank)

        def make(number: int) -> list[Batch]:
            return [self._micro_batch(held_out, part, samples) for part in passes[number]]

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

    def _micro_batch(self, held_out: HeldOut | OwnHeldOut, part: int, samples: int) -> Batch:
        """Return micro-batch number `part`. Rows beyond the last sample repeat sample 0, without labels."""
        size = self._layout.micro_batch
        numbers = torch.arange(part * size, (part + 1) * size)
        is_sample = numbers < samples
        batch = held_out.batch(numbers.where(is_sample, 0).tolist())
        if bool(is_sample.all()):
            return batch
        for name in () if COUNTED in batch else LABELS:
            if name in batch:
                none = math.nan if batch[name].is_floating_point() else IGNORED
                batch[name] = batch[name].masked_fill(_wide(~is_sample, batch[name]), none)
        for name in ("compared", COUNTED):
            if name in batch:
                batch[name] = batch[name] & is_sample
        # Nor are these rows routed, since routers count their tokens.
        for name, read, padding in ROUTED if self._has_routers else ():
            if read in batch:
                real = batch.get(padding, torch.ones_like(batch[read], dtype=torch.bool))
                batch[name] = real & _wide(is_sample, real)
        return batch


def _means_of_own(sums: EvaluationSums) -> dict[str, float]:
    """Return the metrics of a user's model: its mean loss, and the means of its other sums."""
    loss = {"loss": sums.loss / sums.tokens} if sums.tokens else {}
    return {**loss, **means(sums.sums)}


def measures(
    sums: EvaluationSums, tokens_per_byte: float, metrics: Iterable[str], classes: int = 0
) -> dict[str, float]:
    """Return the metrics of an evaluation, and the number of predicted tokens. Means of no values are left out.

    perplexity = exp(loss); bits_per_byte = loss / ln 2 x tokens per byte (The Pile, Gao et al., 2020, section 3.1).
    Models with experts also have the balance of their routers, and students the divergence from their teacher.

    Args:
        sums: sums over the held-out set.
        tokens_per_byte: tokens of the set per byte of its text.
        metrics: names of the metrics that the job wants.
        classes: number of classes of a classifier.
    """
    values = means(sums.sums)
    if sums.tokens:
        loss = sums.loss / sums.tokens
        values = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": loss / math.log(2) * tokens_per_byte,
            "accuracy": sums.correct / sums.tokens,
            **values,
        }
    values |= {
        name: _of_predictions(name, sums.predictions, classes)
        for name in metrics
        if name in get_args(OfPredictions) and len(sums.predictions)
    }
    wanted = {name: value for name, value in values.items() if name in (*metrics, LOGIT_LOSS)}
    return {**wanted, **ratios(sums.routed), "tokens": sums.tokens}


def _of_predictions(metric: str, predictions: Tensor, classes: int) -> float:
    rows = sorted(predictions.tolist())  # so that the order of samples changes no bit
    kind = float if metric == "spearman" else int
    values = [kind(row[0]) for row in rows]
    labels = [kind(row[1]) for row in rows]
    return measure(metric, values, labels, classes)


def _samples(held_out: HeldOut | OwnHeldOut, spec: EvaluateSpec | None, batch_size: int) -> int:
    most = spec.batches if spec else None
    return held_out.samples if most is None else min(held_out.samples, most * batch_size)


def _wide(rows: Tensor, like: Tensor) -> Tensor:
    """Return bool [B] as [B, 1, ..], to broadcast over `like`."""
    return rows.view(-1, *[1] * (like.dim() - 1))
