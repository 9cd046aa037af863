"""Losses of the micro-batches of a step: the scalar to differentiate, and the sums to report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.arithmetic import HEAD_TOKENS, NEWEST, Arithmetic
from orchestrator.parallel.collectives import copy, reduce
from orchestrator.parallel.context import slice_batch
from orchestrator.parallel.deterministic_reduction import tree_sum
from orchestrator.parallel.device import Device
from orchestrator.parallel.distilling import EXTRA, Distilling, is_of_predicted
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.rank_messages import gather_json, sum_over_ranks
from orchestrator.parallel.tensor import VocabularyLoss
from orchestrator.train.distillation.config import DistillSpec
from workloads.model.chunked_loss import ChunkedLoss
from workloads.model.dropout import PLACES
from workloads.model.transformer import LABEL_WEIGHTS
from workloads.objectives.preferences import BASELINE, DIVERGENCE, log_probabilities, means
from workloads.objectives.rewarded import COUNTED, Rewarded, rewarded_loss, token_log_probabilities
from workloads.own.metrics import OwnMetrics
from workloads.workload import IGNORED, Batch, Loss, Workload

SUM = "sum"
"""Prefix of the name of a further metric's sum."""
COUNT = "count"
"""Prefix of the name of how many values that sum has."""
EXACT = 2.0**-20
"""In an evaluation each micro-batch's loss is rounded to a multiple of this many nats."""


@dataclass(frozen=True)
class EvaluationSums:
    """Sums over the predicted tokens, with the same bits on every rank and under any layout.

    Attributes:
        loss: sum of the cross-entropy, in nats.
        tokens: number of predicted tokens.
        correct: number of tokens predicted correctly.
        routed: load of each router, as `Workload.routing` counts it.
        sums: other metrics of the workload by name, each as (sum, number of values).
        predictions: prediction and label of each sample, float64 [n, 2]; empty unless the job asks for metrics of
            predictions.
    """

    loss: float = 0.0
    tokens: float = 0.0
    correct: float = 0.0
    routed: Mapping[str, Tensor] = field(default_factory=dict)
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    predictions: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.float64))

    def __add__(self, other: EvaluationSums) -> EvaluationSums:
        routed = {name: load + self.routed.get(name, 0.0) for name, load in other.routed.items()}
        none = (0.0, 0.0)
        sums = {
            name: (total + self.sums.get(name, none)[0], count + self.sums.get(name, none)[1])
            for name, (total, count) in other.sums.items()
        }
        return EvaluationSums(
            loss=self.loss + other.loss,
            tokens=self.tokens + other.tokens,
            correct=self.correct + other.correct,
            routed=routed,
            sums=sums,
            predictions=torch.cat([self.predictions, other.predictions]),
        )


class StepLosses:
    """Computes the losses of a step's micro-batches and sums them over micro-batches and ranks.

    The number of labels in the global batch is known only after the forward pass. The backward pass therefore divides
    the sum of losses by `expected`, the number of labels in a full batch, which keeps gradients in their usual range
    in any dtype. The engine then multiplies the gradients by expected / count.

    The instance is in one of five modes, set by the last `begin*` call: training, evaluation, prediction (logits at
    labels), reference (log-probabilities of answers) or tokens (log-probabilities of labels).

    Attributes:
        scale: loss scale of fp16. It multiplies what is differentiated; reported losses exclude it.
        expected: number of labels (of answers, if the objective compares them) that the loss is divided by.
        arithmetic: in which order the run adds numbers.
        has_baseline: whether rewards are measured from a baseline (KTO).
        baseline: mean divergence of the policy from the reference over the global batch, at least 0. KTO subtracts it
            from the log-ratio of every answer.
    """

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: Device,
        *,
        global_batch: int,
        sequence_length: int,
        z_loss: float,
        label_smoothing: float,
        distill: DistillSpec | None,
        own_metrics: Sequence[str],
        keeps_predictions: bool,
    ) -> None:
        """Start in no mode.

        Args:
            workload: the model and its objective.
            layout: how the ranks divide the work.
            mesh: its process groups.
            device: this rank's device.
            global_batch: samples of a step.
            sequence_length: tokens of a row.
            z_loss, label_smoothing: the weights of what is added to the loss of tokens.
            distill: what is learned from a teacher; None without one.
            own_metrics: the user's own metrics of evaluations.
            keeps_predictions: whether evaluations have metrics that need all predictions.
        """
        config = workload.config
        self._workload = workload
        self._layout = layout
        self._mesh = mesh
        self._device = device
        # Whether the objective compares answers (DPO and its kin): its loss counts answers, not tokens.
        self._compares = getattr(workload.objective, "compares", False)
        objective = workload.objective
        # An objective over generated answers; the batch says what its loss is divided by.
        self._rewarded = objective if isinstance(objective, Rewarded) else None
        self.has_baseline = objective.name == "kto"
        self.baseline = 0.0
        self.scale = 1.0
        self.arithmetic = NEWEST
        # A comparison has one loss per row, and GRPO's other weightings count answers. DAPO divides by tokens.
        has_row_loss = self._compares or (self._rewarded is not None and self._rewarded.loss_type != "dapo")
        labels_per_sample = 1 if has_row_loss else sequence_length
        # Any constant would do unless the loss has means, since the engine replaces it by the count. This one gives
        # gradients about their usual size, which fp16 needs.
        self.expected = float(global_batch * labels_per_sample)
        # Whether the loss has a term that is a mean over tokens or samples (router balance, sentence head, generator,
        # hidden states of a teacher), or one that is added to the gradients of the mean loss (gates of heads).
        self._has_means = bool(
            config.moe
            or getattr(config, "balanced", False)
            or getattr(config, "sentence_head", False)
            or getattr(config, "generator", 0)
            or getattr(config, "head_gates", False)
            or (distill and distill.looks_inside)
        )
        table = workload.shapes.get("tokens.weight")
        # Size of the vocabulary if tensor parallelism splits the logits over it, else 0.
        vocabulary = table[0] if mesh.tp.size > 1 and table else 0
        self._token_loss = VocabularyLoss(vocabulary, mesh.tp, z_loss, label_smoothing)
        # Context parallelism splits an answer's tokens over ranks; a comparison needs their sum on each of them.
        # log sigmoid of a sum is no sum of log sigmoids, so each rank needs the whole answer's log-probability.
        is_answer_split = self._compares and mesh.cp.size > 1
        self._loss_of_logits = self._answer_loss if is_answer_split else self._token_loss
        # Ranks with the same values must enter a sum once. Tensor-parallel ranks have equal losses; context-parallel
        # ranks have equal losses only if the objective compares answers.
        self._is_first_of_tp = mesh.tp.index == 0
        self._is_counted = self._is_first_of_tp and (mesh.cp.index == 0 or not self._compares)
        # Adds to the loss what a teacher says of a micro-batch, if the job distils one.
        self._distilling = Distilling(distill, workload, mesh.tp, vocabulary) if distill is not None else None
        # Finding the labelled tokens makes a GPU's host wait once, so it is left out where each token has a label. What
        # a teacher says of a micro-batch has a row for each token.
        predicts_every_token = getattr(objective, "predicts_every_token", True)
        # Encoders choose predicted tokens themselves.
        self._leaves_out = not (distill or predicts_every_token or is_of_predicted(workload))
        self._own_metrics = OwnMetrics(own_metrics)
        self._tokens_at_once = HEAD_TOKENS[device.device.type]
        # Values of each metric, one scalar fp64 tensor per micro-batch.
        self._parts: dict[str, list[Tensor]] = {}
        # Names of the metrics that all ranks agreed on, in training (False) and in evaluation (True).
        self._names: dict[bool, list[str]] = {}
        self._is_evaluation = False
        # Mode "prediction": each label with the logits [vocabulary] at its position.
        self._label_logits: list[tuple[int, Tensor]] | None = None
        # Mode "reference": log-probabilities [B, 2] of each micro-batch.
        self._answers: list[Tensor] | None = None
        # Mode "tokens": log-probabilities of the labels, [B, L] of each micro-batch's whole rows.
        self._by_token: list[Tensor] | None = None
        # Mode "evaluation": predictions and labels [n, 2] of each micro-batch, if the job asks for metrics of them.
        self._predictions: list[Tensor] | None = [] if keeps_predictions else None

    def begin(self, micro_batches: Sequence[Batch]) -> None:
        """Start a training step.

        Counts the labels of the global batch first if the loss has a term besides the sum over tokens.
        """
        self._reset()
        self._is_evaluation = self._token_loss.counts_correct = False
        if self._has_means:
            self.expected = max(float(self._count(micro_batches)), 1.0)

    def begin_evaluation(self) -> None:
        """Start an evaluation: losses are not differentiated, and correct predictions are counted."""
        self._reset()
        self._is_evaluation = self._token_loss.counts_correct = True

    def begin_prediction(self) -> None:
        """Start a prediction: keep the logits at the labels."""
        self._reset()
        self._label_logits = []

    def begin_reference(self) -> None:
        """Start a pass of the reference model: keep the log-probabilities of answers."""
        self._reset()
        self._answers = []

    def begin_tokens(self) -> None:
        """Start a pass that keeps the log-probabilities of the labels."""
        self._reset()
        self._by_token = []

    def token_log_probabilities(self) -> list[Tensor]:
        """Return the log-probabilities since `begin_tokens`, fp32 [B, L] of each micro-batch's whole rows."""
        assert self._by_token is not None
        return self._by_token

    def answer_log_probabilities(self, on_every_rank: bool = False) -> list[Tensor]:
        """Return the log-probabilities since `begin_reference`, fp32 [B, 2] of each micro-batch.

        Several ranks compute the same values. One of them returns the list and the others an empty one, unless
        `on_every_rank` is set.
        """
        assert self._answers is not None
        return self._answers if self._is_counted or on_every_rank else []

    def predicted(self) -> list[tuple[int, Tensor]]:
        """Return each label since `begin_prediction` with its logits, fp32 [vocabulary], each on one rank only."""
        assert self._label_logits is not None
        return self._label_logits if self._is_first_of_tp else []

    def _reset(self) -> None:
        self._parts = {}
        self._label_logits = None
        self._answers = None
        self._by_token = None
        if self._predictions is not None:
            self._predictions = []

    def _count(self, micro_batches: Sequence[Batch]) -> float:
        """Return the number of labels in the global batch, or the sum of their weights.

        The engine rescales all gradients by expected / count. With `expected` equal to the count, that factor is 1 and
        a mean beside the sum (router balance, sentence head) keeps its weight, whatever share of tokens is predicted.
        """
        coordinate = self._mesh.coordinate
        # Ranks of a tensor, context or pipeline group read the same batch, so one of them counts it.
        is_first = coordinate["pp"] == coordinate["cp"] == coordinate["tp"] == 0
        if self._compares:
            labels: float = sum(int(batch["compared"].sum()) for batch in micro_batches)
        elif self._rewarded:
            labels = sum(int(batch[COUNTED].sum().round()) for batch in micro_batches)
        else:
            predicts_spans = getattr(self._workload.config, "head", "") == "span"
            labels = sum(_labels_in(batch, predicts_spans) for batch in micro_batches)
        # fp64: a count must be exact, and fp32 ends at 2^24.
        total = torch.tensor([labels if is_first else 0], dtype=torch.float64)
        # On the CPU with gloo: a GPU would have to be synchronised for one number, before its work has begun.
        return float(sum_over_ranks(total))

    def take_baseline(self, sums: EvaluationSums) -> None:
        """Set `baseline` from an evaluation of the same samples."""
        total, count = sums.sums[DIVERGENCE]
        # Clamped at 0 as in KTO: a divergence is never negative, but its estimate from a few pairs can be (Ethayarajh
        # et al., 2024, section 4.1).
        self.baseline = max(total / max(count, 1.0), 0.0)

    def prepare(self, batch: Batch) -> Batch:
        """Move a micro-batch to the device and cut it to this context-parallel rank's positions."""
        batch = {name: tensor.to(self._device.device, non_blocking=True) for name, tensor in batch.items()}
        if self.has_baseline:
            batch[BASELINE] = torch.full((), self.baseline, device=self._device.device)
        if self._mesh.cp.size > 1:
            return slice_batch(batch, self._workload.config, self._mesh.cp)
        return batch

    def in_chunks(self, batch: Batch) -> ChunkedLoss | None:
        """Return how the head computes the loss of a micro-batch in chunks; None if it must return logits.

        Every forward pass asks for it first.

        Logits are needed when they are the result (prediction), when the job's own metrics read them, and when answers
        are compared or rewarded, because that loss is not a sum over the cross-entropies of tokens.
        """
        if self._compares or self._rewarded or self._label_logits is not None:
            return None
        token_loss: Callable[[Tensor, Tensor], Loss] = self._token_loss
        if self._distilling is not None:
            token_loss = self._distilling.tokens(batch, token_loss, not self._is_evaluation)
        if self.arithmetic < Arithmetic.CHUNKED_HEAD or (self._is_evaluation and self._own_metrics):
            return None
        leaves_out = self._leaves_out and self.arithmetic >= Arithmetic.LABELLED_TOKENS
        return ChunkedLoss(token_loss, self._tokens_at_once, self._weighted, leaves_out)

    def _weighted(self, total: Tensor) -> Tensor:
        """Return what is differentiated for a sum of losses: total / expected x scale."""
        total = total / self.expected
        return total * self.scale if self.scale != 1.0 else total

    def of(self, output: Any, batch: Batch, parts: int) -> Tensor:
        """Return the scalar loss to differentiate for one micro-batch, and add up its metrics.

        loss = (total / expected + extra / (parts x dp x cp)) x scale, where `total` is a sum over tokens and `extra` a
        mean, which is averaged over micro-batches and data-parallel ranks. Gradients of all ranks are summed later.

        Args:
            output: what the model returned for the micro-batch.
            batch: its arrays by name, [B, ...] each.
            parts: number of micro-batches of a rank in a step.
        """
        if self._label_logits is not None:
            return self._workload.criterion(output, batch, self._keep_label_logits).total
        if self._answers is not None:
            self._answers.append(log_probabilities(output.logits, batch["labels"], self._loss_of_logits))
            return self._answers[-1].sum()
        if self._by_token is not None:
            return self._keep_by_token(output, batch)
        loss = self._loss_of(output, batch)
        if self._is_evaluation:
            return self._add_exactly(
                self._own_metrics.beside(loss, output, batch) if self._own_metrics else loss
            )
        # `extra` is a mean: its average over micro-batches and ranks is the mean over the global batch.
        # Context-parallel ranks have equal values, so each adds its 1 / cp.
        share = 1.0 / (parts * self._layout.dp * self._layout.cp)
        self._add(
            {"loss": loss.total.detach(), "count": loss.count, **_flat(loss)}, weight=float(self._is_counted)
        )
        # Tensor-parallel ranks have equal values too, so only one of them adds.
        self._add(loss.metrics, weight=share if self._is_first_of_tp else 0.0)
        total = loss.total / self.expected
        total = total if loss.extra is None else total + loss.extra * share
        return total * self.scale if self.scale != 1.0 else total

    def _loss_of(self, output: Any, batch: Batch) -> Loss:
        if self._rewarded:
            loss = rewarded_loss(self._rewarded, output, batch, self._token_loss, self._sum_of_row)
            assert loss is not None
            return loss
        if self._distilling is not None:
            return self._distilling.loss(output, batch, self._loss_of_logits, trains=not self._is_evaluation)
        return self._workload.criterion(output, batch, self._loss_of_logits)

    def _sum_of_row(self, values: Tensor) -> Tensor:
        """Sum [B, L] over the tokens of whole rows, of which the context-parallel ranks hold parts."""
        total = values.sum(-1)
        # copy then reduce: forward the sum over ranks, backward also a sum, since each rank's loss depends on every
        # rank's tokens.
        return reduce(copy(total, self._mesh.cp), self._mesh.cp) if self._mesh.cp.size > 1 else total

    def _keep_by_token(self, output: Any, batch: Batch) -> Tensor:
        """Keep the log-probabilities of a micro-batch's labels, of whole rows also under context parallelism."""
        assert self._by_token is not None
        log_p = token_log_probabilities(output, batch, self._token_loss)
        # [B, L / cp]; labels that are ignored count as 0, so that sums over a row need no mask.
        log_p = log_p.where(batch["labels"] != IGNORED, 0.0)
        if self._mesh.cp.size > 1:
            full_rows = log_p.new_zeros(len(log_p), log_p.shape[1] * self._mesh.cp.size)
            # Each rank writes its positions into zeros [B, L] and the sum fills the gaps: all ranks get whole rows
            # with one all-reduce.
            log_p = reduce(full_rows.scatter(1, batch[PLACES], log_p), self._mesh.cp)
        self._by_token.append(log_p)
        return log_p.sum()

    def _keep_label_logits(self, logits: Tensor, labels: Tensor) -> Loss:
        """Stand in for the token loss: keep the logits [.., vocabulary] at the labels [..] that are not ignored."""
        assert self._label_logits is not None
        is_label = labels != IGNORED
        full_logits = self._token_loss.full_logits(logits[is_label])
        self._label_logits += zip(labels[is_label].tolist(), full_logits, strict=True)
        nothing = torch.zeros((), device=logits.device)
        return Loss(nothing, nothing)

    def _answer_loss(self, logits: Tensor, labels: Tensor) -> Loss:
        """Return the token loss summed over the context-parallel ranks, which hold parts of each answer."""
        loss = self._token_loss(logits, labels)
        group = self._mesh.cp
        return Loss(reduce(loss.total, group), reduce(loss.count, group))

    def _add_exactly(self, loss: Loss) -> Tensor:
        """Add a micro-batch of an evaluation, rounded so that its sums are exact.

        fp64 adds multiples of 2^-20 without rounding as long as the sum is below 2^33. The sum is then independent of
        how samples are cut into micro-batches and of the order in which they are added.
        """
        correct = torch.zeros_like(loss.count) if loss.correct is None else loss.correct
        if self._predictions is not None and loss.each is not None and self._is_counted:
            self._predictions.append(loss.each.double())
        summed = {"loss": loss.total, **_flat(loss)}
        # Division by a power of two is exact, so only `round` rounds, by at most 2^-21 nats per micro-batch.
        exact = {name: (value.double() / EXACT).round() * EXACT for name, value in summed.items()}
        self._add({**exact, "count": loss.count, "correct": correct}, weight=float(self._is_counted))
        return loss.total

    def _add(self, values: Mapping[str, Tensor], weight: float) -> None:
        for name, value in values.items():
            # Kept apart until the end of the step: `tree_sum` adds them in one fixed order, and no value is read from
            # the device in between.
            self._parts.setdefault(name, []).append(value.detach().double() * weight)

    def over_ranks(
        self, square: Tensor, load: Tensor
    ) -> tuple[float | None, dict[str, float], float, float, Tensor]:
        """Sum the metrics of a training step over all ranks, together with a squared gradient norm.

        Args:
            square: this rank's part of the squared norm, a scalar.
            load: this rank's load of the routers, see `RouterLoad.take`.

        Returns:
            (mean loss in nats, means of the other metrics, predicted tokens or 1, sum of `square`, sum of `load` on the
            CPU), with the same bits on every rank. The mean loss is None if nothing is predicted.
        """
        total, metrics, load = self._sums(square, load)
        loss = metrics.pop("loss")
        count = metrics.pop("count")
        mean = loss / count if count else None
        if mean is not None:
            # The reported loss of a distilled student includes its means, as the differentiated one does.
            mean += metrics.pop(EXTRA, 0.0)
        # Weighted labels may count for less than 1 in all.
        return mean, {**means(_summed(metrics)), **metrics}, count or 1.0, total, load

    def evaluated(self, load: Tensor, named: Callable[[Tensor], Mapping[str, Tensor]]) -> EvaluationSums:
        """Return the sums of an evaluation over all ranks.

        Args:
            load: this rank's load of the routers, see `RouterLoad.take`.
            named: gives a load the names of the routers.
        """
        _, sums, load = self._sums(torch.zeros(()), load)
        return EvaluationSums(
            loss=sums.pop("loss"),
            tokens=sums.pop("count"),
            correct=sums.pop("correct"),
            routed=named(load),
            sums=_summed(sums),
            predictions=self._gather_predictions(),
        )

    def _gather_predictions(self) -> Tensor:
        """Return predictions and labels of all ranks' samples, float64 [n, 2], without padding samples."""
        none = torch.empty(0, 2, dtype=torch.float64)
        if self._predictions is None:
            return none
        mine = torch.cat([none, *(part.cpu() for part in self._predictions)])
        # An all-gather needs equal parts: pad each rank's rows with NaN to the longest rank's.
        longest = torch.tensor(len(mine))
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        everyone = mine.new_full((dist.get_world_size() * int(longest), 2), torch.nan)
        mine = torch.cat([mine, mine.new_full((int(longest) - len(mine), 2), torch.nan)])
        dist.all_gather_single(everyone, mine)
        return everyone[~everyone[:, 1].isnan() & (everyone[:, 1] != IGNORED)]

    def _sums(self, square: Tensor, load: Tensor) -> tuple[float, dict[str, float], Tensor]:
        names = self._agreed_names()
        zero = torch.zeros((), dtype=torch.float64, device=self._device.device)
        # A tree: adding two micro-batches of one rank or one micro-batch of two ranks gives the same bits, so a metric
        # does not depend on dp.
        sums = {name: tree_sum(torch.stack(parts)) for name, parts in self._parts.items()}
        mine = torch.stack([square.to(zero), *(sums.get(name, zero) for name in names)])
        # One copy to the CPU, which needs the numbers anyway, and one message. In a tree too: an all-reduce may add in
        # another order, and this way every rank and every data-parallel width has the same bits.
        everything = torch.cat([mine, load.flatten()]).cpu()
        if self._layout.world > 1:
            everything = sum_over_ranks(everything)
        total, *values = everything[: len(mine)].tolist()
        return total, dict(zip(names, values, strict=True)), everything[len(mine) :].view_as(load)

    def _agreed_names(self) -> list[str]:
        """Return the names of the metrics, equal on all ranks.

        Only the last stage of a pipeline computes the loss, so it sends the names to the others, once for each mode.
        """
        if self._is_evaluation not in self._names:
            mine = list(self._parts)
            everyone = gather_json(mine) if self._layout.pp > 1 else [mine]
            self._names[self._is_evaluation] = list(
                dict.fromkeys(name for names in everyone for name in names)
            )
        return self._names[self._is_evaluation]


def _labels_in(batch: Batch, predicts_spans: bool = False) -> float:
    """Count the labels of a micro-batch as its loss does: the first and last token of a span count as one label, and so
    do all labels of a text that may have several.
    """
    labels = batch.get("labels", batch.get("sequence_labels"))
    if labels is None:
        return 0
    # A regression's labels are numbers, and NaN marks a missing one.
    is_label = ~labels.isnan() if labels.is_floating_point() else labels != IGNORED
    if predicts_spans or (labels.is_floating_point() and labels.dim() == 2):
        is_label = is_label.all(-1)
    if LABEL_WEIGHTS in batch and not labels.is_floating_point():
        return float((batch[LABEL_WEIGHTS] * is_label).double().sum())
    return int(is_label.sum())


def _flat(loss: Loss) -> dict[str, Tensor]:
    """Return the further sums of a loss as `sum:<name>` and `count:<name>`."""
    flat: dict[str, Tensor] = {}
    for name, (total, count) in loss.sums.items():
        flat[f"{SUM}:{name}"] = total
        flat[f"{COUNT}:{name}"] = count
    return flat


def _summed(values: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Undo `_flat`: return (sum, count) by name, and remove these entries from `values`."""
    names = [name.removeprefix(f"{SUM}:") for name in values if name.startswith(f"{SUM}:")]
    return {name: (values.pop(f"{SUM}:{name}"), values.pop(f"{COUNT}:{name}")) for name in names}
