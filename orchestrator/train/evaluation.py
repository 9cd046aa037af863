"""Evaluation between two steps of training: sums over all tokens of each held-out set, the same under any layout.

A set is cut into micro-batches of the layout's size. A rank that has none left computes one of which nothing is
predicted, since its peers need it.
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
from orchestrator.config.evaluate import EvaluateSpec, OfPredictions, StopWhen
from orchestrator.config.spec import JobSpec
from orchestrator.data.samples.batches import Prefetch
from orchestrator.data.samples.held_out_set import HeldOut
from orchestrator.data.samples.own_samples import OwnHeldOut
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import EvaluationSums
from orchestrator.parallel.rank_messages import agree
from orchestrator.parallel.router_load import ratios
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.train.engines.engine import Engine
from orchestrator.train.eval_sharding import shares
from orchestrator.train.sampler import Sampler
from workloads.model.masks import DECODER_REAL, REAL
from workloads.model.transformer import IGNORED
from workloads.objectives.preferences import DIVERGENCE, means
from workloads.own.model import OwnModel
from workloads.own.rows import COUNTED
from workloads.workload import Batch

ROUTED = ((REAL, "tokens", "padding"), (DECODER_REAL, "decoder_tokens", "decoder_padding"))
"""A batch's entry with the tokens that are routed, what these are, and the padding among them."""
LABELS = ("labels", "sequence_labels")
"""What a batch has of what is to be predicted."""


class Evaluator:
    """Evaluates an engine's model on all sets; every rank makes one and calls it at the same steps."""

    def __init__(
        self,
        spec: JobSpec,
        layout: Layout,
        context: WorkerContext,
        engine: Engine,
        inputs: TrainingInputs,
        between: Callable[[int], object] = lambda step: None,
    ) -> None:
        """`between` is called with the step after each pass over a global batch; faults are injected there."""
        self._spec, self._layout, self._context, self._engine = spec.evaluate, layout, context, engine
        self._measured, self._stop_when = measure_of(spec), spec.stop_when
        self._batch_size, self._steps, self._sets = spec.train.global_batch, spec.train.steps, inputs.sets
        self._has_average = spec.checkpoint.ema is not None
        self._between = between
        workload, asked = inputs.workload, spec.evaluate and spec.evaluate.samples
        self._has_routers = bool(workload.config.moe)
        self._metrics = spec.evaluate.metrics_for(workload.objective.name) if spec.evaluate else ()
        self._is_own, self._classes = isinstance(workload.config, OwnModel), len(spec.data.labels)
        length = spec.data.sequence_length
        self._sampler = (
            Sampler(inputs.prompts, asked, layout, context, engine, workload, self._batch_size, length)
            if inputs.prompts is not None and asked
            else None
        )

    def is_due(self, step: int) -> bool:
        """Whether the job asks the ranks for an evaluation after that step."""
        spec, has_any = self._spec, bool(self._sets) or self._sampler is not None
        return has_any and spec is not None and spec.where == "gang" and spec.is_due(step, self._steps)

    def stop_when(self, step: int) -> StopWhen | None:
        """What ends the run by the evaluation after that step, if that counts."""
        counts = self._spec is not None and self._spec.is_regular(step, self._steps)
        return self._stop_when if counts else None

    def evaluate(self, step: int, attempt: int, heeds_stop: bool = True) -> EvaluationRow | None:
        """The row of an evaluation after that step; None if it `heeds_stop`, and the gang was asked to stop.

        It is of the weights' moving average, if the job has one. An error leaves that in their place: the rank ends.
        """
        began = time.perf_counter()
        if self._has_average:
            self._engine.swap_average()
        found, said = self._metrics_of_sets(step, heeds_stop), None
        if found is not None and self._sampler is not None:
            self._context.set_waiting(not found)
            said = self._sampler.say(heeds_stop, lambda: self._between(step))
        if self._has_average:
            self._engine.swap_average()
        if found is None or (said is None and self._sampler is not None):
            return None
        seconds = time.perf_counter() - began
        row: EvaluationRow = {
            "step": step,
            "attempt": attempt,
            "time": wall(),
            "seconds": seconds,
            "sets": found,
            "measured": self._measured,
        }
        if self._has_average:
            row["weights"] = "averaged"
        if said is not None:
            row["samples"] = said
        return row

    def _metrics_of_sets(self, step: int, heeds_stop: bool) -> dict[str, dict[str, float]] | None:
        found = dict[str, dict[str, float]]()
        for name, held_out in self._sets.items():
            self._context.set_waiting(not found)  # the first forward pass may compile
            sums = self._sums(held_out, step, heeds_stop)
            if sums is not None and DIVERGENCE in sums.sums:  # known only after all samples
                self._engine.take_baseline(sums)
                sums = self._sums(held_out, step, heeds_stop)
            self._context.set_waiting(False)
            if sums is None:
                return None
            if self._is_own:
                found[name] = {**_ratios_of(sums), "tokens": sums.tokens}
            else:
                tokens_per_byte = held_out.tokens / max(held_out.bytes, 1)
                found[name] = measures(sums, tokens_per_byte, self._metrics, self._classes)
        return found

    def _sums(self, held_out: HeldOut | OwnHeldOut, step: int, heeds_stop: bool) -> EvaluationSums | None:
        samples, sums = _samples(held_out, self._spec, self._batch_size), EvaluationSums()
        rank = self._layout.coordinate(self._context.rank_info.rank)["dp"]
        passes = shares(samples, self._layout.micro_batch, self._batch_size, self._layout.dp, rank)

        def make(number: int) -> list[Batch]:
            return [self._micro_batch(held_out, part, samples) for part in passes[number]]

        with Prefetch(make, 0, stop=len(passes)) as prefetched:
            for _ in passes:
                batches = prefetched.next()
                if agree(0, heeds_stop and self._context.stop_requested()).stop:
                    return None
                sums += self._engine.eval_step(batches)
                self._context.set_waiting(False)
                self._context.progressed()
                self._between(step)
        return sums

    def _micro_batch(self, held_out: HeldOut | OwnHeldOut, part: int, samples: int) -> Batch:
        """Micro-batch number `part`; of what is beyond the last sample nothing is predicted."""
        size = self._layout.micro_batch
        numbers = torch.arange(part * size, (part + 1) * size)
        there = numbers < samples
        batch = held_out.batch(numbers.where(there, 0).tolist())
        if bool(there.all()):
            return batch
        for name in () if COUNTED in batch else LABELS:
            if name in batch:
                none = math.nan if batch[name].is_floating_point() else IGNORED
                batch[name] = batch[name].masked_fill(_wide(~there, batch[name]), none)
        for name in ("compared", COUNTED):
            if name in batch:
                batch[name] = batch[name] & there
        for name, read, padding in ROUTED if self._has_routers else ():  # nor is it routed, which would count
            if read in batch:
                real = batch.get(padding, torch.ones_like(batch[read], dtype=torch.bool))
                batch[name] = real & _wide(there, real)
        return batch


def _ratios_of(sums: EvaluationSums) -> dict[str, float]:
    """The metrics of an own model: its loss, and the means of what else it gives."""
    return {**({"loss": sums.loss / sums.tokens} if sums.tokens else {}), **means(sums.sums)}


def measures(
    sums: EvaluationSums, tokens_per_byte: float, metrics: Iterable[str], classes: int = 0
) -> dict[str, float]:
    """The metrics that these sums give, with the number of predicted tokens; none that is a mean of nothing.

    bits_per_byte: the loss of a token, in bits, times the tokens that a byte of text takes (The Pile, Gao et al., 2020,
    section 3.1). Routers add how evenly they spread the tokens.
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
    wanted = {name: value for name, value in values.items() if name in metrics}
    return {**wanted, **ratios(sums.routed), "tokens": sums.tokens}


def _of_predictions(metric: str, predictions: Tensor, classes: int) -> float:
    from workloads.objectives.metrics import measure  # whose libraries no other run needs

    found = sorted(predictions.tolist())  # so that the order of samples changes no bit
    kind = float if metric == "spearman" else int
    values, labels = ([kind(row[side]) for row in found] for side in (0, 1))
    return measure(metric, values, labels, classes)


def _samples(held_out: HeldOut | OwnHeldOut, spec: EvaluateSpec | None, batch_size: int) -> int:
    most = spec.batches if spec else None
    return held_out.samples if most is None else min(held_out.samples, most * batch_size)


def _wide(rows: Tensor, like: Tensor) -> Tensor:
    """bool [B] as [B, 1, ..], to be broadcast over `like`."""
    return rows.view(-1, *[1] * (like.dim() - 1))
