"""The loss of a distilled model on the ranks: labels, and what a teacher says of the same micro-batch.

A vocabulary that is cut over tensor-parallel ranks stays cut: a divergence is a sum over the parts, and only numbers of
tokens cross between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.collectives import reduce, summed
from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.partition import span
from orchestrator.train.distillation.config import DistillSpec, LogitsSpec
from workloads.model.inside import Shows
from workloads.model.losses import TokenLoss
from workloads.objectives.distillation import (
    HIDDEN_LOSS,
    LABEL_LOSS,
    LOG_SUM,
    LOGIT_LOSS,
    RELATION_LOSS,
    TEACHER_LOGITS,
    TEACHER_SHOWN,
    TOP_LOGITS,
    TOP_TOKENS,
    WHOLE,
    Shards,
    TaughtTokens,
    Top,
    first_of,
    of_hidden,
    of_logits,
    of_relations,
    of_top,
    real_of,
)
from workloads.workload import IGNORED, Batch, Loss, Workload

EXTRA = "distilled_extra"
"""Name of the parts of the loss that are means over samples. They are added to the reported loss."""


def shards_of(vocabulary: int, tp: ProcessGroup) -> Shards:
    """Return how logits are cut over tensor-parallel ranks; `vocabulary` is 0 if they are whole on each rank.

    Args:
        vocabulary: size of the vocabulary if tensor parallelism splits the logits over it, else 0.
        tp: the tensor-parallel group.
    """
    if tp.size == 1 or not vocabulary:
        return WHOLE

    def highest(values: Tensor) -> Tensor:
        # An all-reduce works in place, and the values are needed afterwards.
        values = values.clone()
        if tp.handle is not None:
            tp.sent(values)
            with tp.communicating():
                dist.all_reduce(values, dist.ReduceOp.MAX, group=tp.handle)
            tp.received(values)
        return values

    start, _ = span(vocabulary, tp.index, tp.size)
    return Shards(start, partial(summed, group=tp), highest)


def is_of_predicted(workload: Workload) -> bool:
    """Return whether a model's vocabulary logits are those of the predicted tokens alone, [predicted, V]."""
    config = workload.config
    return bool(config.divided_by == "rules" and config.architecture == "encoder")


class Distilling:
    """Adds what a teacher says to the loss of micro-batches; without its entries, the loss is that of labels."""

    def __init__(self, distill: DistillSpec, workload: Workload, tp: ProcessGroup, vocabulary: int) -> None:
        """`vocabulary` as in `shards_of`."""
        self._distill = distill
        self._workload = workload
        self._tp = tp
        self._head = getattr(workload.config, "head", "")
        self._is_classifier = self._head in ("sequence", "token")
        self._shards = WHOLE if self._is_classifier else shards_of(vocabulary, tp)
        self._selects = is_of_predicted(workload)
        self._tokens: TaughtTokens | None = None
        self._shows: Shows | None = getattr(workload, "shows", None)

    def tokens(self, batch: Batch, label_loss: TokenLoss, trains: bool) -> TokenLoss:
        """Return the loss of the tokens of the micro-batch whose forward pass comes next.

        Args:
            batch: the micro-batch on this rank's device.
            label_loss: the loss of labels.
            trains: whether the parts are weighted; an evaluation's loss is that of labels.
        """
        logits = self._distill.logits
        self._tokens = None
        if logits is None or self._is_classifier or not _is_taught(batch):
            return label_loss
        weights = (self._distill.labels, logits.weight) if trains else (1.0, 0.0)
        self._tokens = TaughtTokens(label_loss, self._row_divergences(batch, logits), weights, IGNORED)
        return self._tokens

    def _row_divergences(self, batch: Batch, spec: LogitsSpec) -> Callable[[Tensor, int], Tensor]:
        """Return the divergences of rows of student logits from those of the teacher, by the first row."""
        labels = batch["labels"]
        temperature = spec.temperature
        kind = spec.divergence
        shards = self._shards
        if TOP_TOKENS in batch:
            top = _top(batch)

            def stored_divergences(rows: Tensor, first: int) -> Tensor:
                # Student logits may come chunk by chunk, see `ChunkedLoss`: `first` says which rows of the micro-batch
                # these are.
                at = slice(first, first + len(rows))
                part = Top(top.tokens[at], top.logits[at], top.log_sum[at])
                return of_top(part, rows, temperature, kind, shards)

            return stored_divergences
        teacher = _aligned(batch[TEACHER_LOGITS], labels, self._selects)

        def online_divergences(rows: Tensor, first: int) -> Tensor:
            return of_logits(teacher[first : first + len(rows)], rows, temperature, kind, shards)

        return online_divergences

    def loss(self, output: Any, batch: Batch, label_loss: TokenLoss, trains: bool) -> Loss:
        """Return the loss of a forward pass's output, with its parts by name.

        Args:
            output: what the model returned.
            batch: the micro-batch that `tokens` was called with.
            label_loss: the loss of labels.
            trains: as in `tokens`.
        """
        tokens, self._tokens = self._tokens, None
        workload_loss = self._workload.criterion(output, batch, tokens or label_loss)
        if tokens is not None:
            total, parts = workload_loss.total, tokens.parts
        else:
            total, parts = self._classifier_loss(workload_loss, output, batch, trains)
        sums = {name: (value.detach(), workload_loss.count) for name, value in parts.items()}
        if not trains:
            # An evaluation reports it as `loss` already.
            sums.pop(LABEL_LOSS)
        result = replace(workload_loss, total=total, sums={**workload_loss.sums, **sums})
        return self._with_hidden_losses(result, output, batch) if trains and output.shown else result

    def _classifier_loss(
        self, loss: Loss, output: Any, batch: Batch, trains: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted loss of a classifier, or of labels alone, and its parts."""
        parts = {LABEL_LOSS: loss.total}
        total = self._distill.labels * loss.total if trains else loss.total
        spec = self._distill.logits
        if spec is None or not (self._is_classifier and _is_taught(batch)):
            return total, parts
        is_sequence = self._head == "sequence"
        student = (output.sentence if is_sequence else output.logits).flatten(0, -2)
        labels = batch["sequence_labels" if is_sequence else "labels"].flatten()
        if TOP_TOKENS in batch:
            divergences = of_top(_top(batch), student, spec.temperature, spec.divergence)
        else:
            teacher = batch[TEACHER_LOGITS].flatten(0, -2)
            divergences = of_logits(teacher, student, spec.temperature, spec.divergence)
        parts[LOGIT_LOSS] = (divergences * (labels != IGNORED)).sum()
        return (total + spec.weight * parts[LOGIT_LOSS] if trains else total), parts

    def _with_hidden_losses(self, loss: Loss, output: Any, batch: Batch) -> Loss:
        """Return the loss with the differences of hidden states and relations, which are means over samples."""
        assert self._shows is not None
        real = real_of(batch)
        taught = [batch[name] for name in sorted(n for n in batch if n.startswith(TEACHER_SHOWN))]
        pairs = list(zip(taught, output.shown, strict=True))
        # `output.shown` has the hidden states first and then the relations, in the order of `Shows`.
        first = len(self._shows.hidden)
        metrics = dict(loss.metrics)
        added = torch.zeros((), device=real.device)
        if hidden := self._distill.hidden:
            counted = first_of(real) if hidden.tokens == "first" else real
            is_cosine = hidden.loss == "cosine"
            differences = [
                of_hidden(teacher, student, counted, is_cosine) for teacher, student in pairs[:first]
            ]
            metrics[HIDDEN_LOSS] = torch.stack(differences).sum()
            added = added + hidden.weight * metrics[HIDDEN_LOSS]
        if relations := self._distill.relations:
            kinds = [kind for kind, _ in self._shows.relations]
            differences = [
                self._relation_difference(*pair, real, kind == "scores")
                for pair, kind in zip(pairs[first:], kinds, strict=True)
            ]
            metrics[RELATION_LOSS] = torch.stack(differences).sum()
            added = added + relations.weight * metrics[RELATION_LOSS]
        metrics[EXTRA] = added
        extra = added if loss.extra is None else loss.extra + added
        return replace(loss, extra=extra, metrics={name: value.detach() for name, value in metrics.items()})

    def _relation_difference(self, teacher: Tensor, student: Tensor, real: Tensor, squared: bool) -> Tensor:
        """Return the difference of relations, averaged over the heads of all tensor-parallel ranks."""
        # Heads are divided over tensor-parallel ranks, and the loss is a mean over all of them.
        result = reduce(of_relations(teacher, student, real, squared), self._tp)
        return result / (student.shape[1] * self._tp.size)


def _is_taught(batch: Batch) -> bool:
    return TEACHER_LOGITS in batch or TOP_TOKENS in batch


def _top(batch: Batch) -> Top:
    """Return the stored logits of a micro-batch, in one row per token."""
    return Top(batch[TOP_TOKENS].flatten(0, 1), batch[TOP_LOGITS].flatten(0, 1), batch[LOG_SUM].flatten())


def _aligned(teacher: Tensor, labels: Tensor, selects: bool) -> Tensor:
    """Return a teacher's logits in one row for each row of the student's, [n, V].

    Args:
        teacher: logits [predicted, V] or [B, L, V].
        labels: labels [B, L].
        selects: whether the student's rows are those of predicted tokens.
    """
    predicted = labels != IGNORED
    if (teacher.dim() == 2) == selects:
        return teacher if selects else teacher.flatten(0, -2)
    if selects:
        return teacher[predicted]
    # A student that returns all rows: those without a label get zeros, and the labels mask them out of the sum.
    aligned = teacher.new_zeros(predicted.numel(), teacher.shape[-1])
    aligned[predicted.flatten()] = teacher
    return aligned
