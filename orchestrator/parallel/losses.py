"""Losses of the micro-batches of a step: what to differentiate, and the sums to report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.config.spec import JobSpec
from orchestrator.parallel.collectives import reduce
from orchestrator.parallel.context import slice_batch
from orchestrator.parallel.deterministic_reduction import tree_sum
from orchestrator.parallel.device import Device
from orchestrator.parallel.engine_rules import HEAD_TOKENS
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.parallel.tensor import VocabularyLoss
from workloads.model.chunked_loss import ChunkedLoss
from workloads.model.transformer import IGNORED
from workloads.objectives.preferences import BASELINE, DIVERGENCE, log_probabilities, means
from workloads.own.metrics import OwnMetrics
from workloads.workload import Batch, Loss, Workload

SUM, COUNT = "sum", "count"
"""What the names of further sums begin with."""
EXACT = 2.0**-20
"""To a multiple of this many nats the loss of a micro-batch is rounded in an evaluation."""


@dataclass(frozen=True)
class EvaluationSums:
    """Sums over the tokens that were predicted, the same bits on every rank, under any layout.

    Attributes:
        loss: of the cross-entropy, in nats.
        tokens: how many were predicted.
        correct: how many of them were predicted right.
        routed: what each router did, as `Workload.routing` counts it.
        sums: other metrics of the workload, each a sum and of how many it is.
        predictions: prediction and label of each sample, float64 [n, 2], where the job asks for metrics of them.
    """

    loss: float = 0.0
    tokens: float = 0.0
    correct: float = 0.0
    routed: Mapping[str, Tensor] = field(default_factory=dict)
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    predictions: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.float64))

    def __add__(self, other: EvaluationSums) -> EvaluationSums:
        routed = {name: seen + self.routed.get(name, 0.0) for name, seen in other.routed.items()}
        none = (0.0, 0.0)
        sums = {
            name: (a + self.sums.get(name, none)[0], b + self.sums.get(name, none)[1])
            for name, (a, b) in other.sums.items()
        }
        return EvaluationSums(
            self.loss + other.loss,
            self.tokens + other.tokens,
            self.correct + other.correct,
            routed,
            sums,
            torch.cat([self.predictions, other.predictions]),
        )


class StepLosses:
    """Prepares micro-batches, takes their losses, and sums over micro-batches and ranks.

    The sum of losses is divided by the tokens that a full batch predicts before the backward pass, so that
    gradients have their usual size in any type, and corrected to the true count after it. `scale` multiplies what
    is differentiated, not what is reported. `chunks_head` says whether a head computes the loss in chunks of tokens.
    """

    def __init__(self, spec: JobSpec, workload: Workload, layout: Layout, mesh: Mesh, device: Device) -> None:
        self._workload, self._layout, self._mesh, self._device = workload, layout, mesh, device
        self._compares = getattr(workload.objective, "compares", False)
        self.has_baseline, self.baseline = workload.objective.name == "kto", 0.0
        self.expected = float(spec.train.global_batch * (1 if self._compares else spec.data.sequence_length))
        config = workload.config
        self._has_means = bool(
            config.moe
            or getattr(config, "balanced", False)
            or getattr(config, "sentence_head", False)
            or getattr(config, "generator", 0)
        )
        table = workload.shapes.get("tokens.weight")
        vocabulary = table[0] if mesh.tp.size > 1 and table else 0
        self._token_loss = VocabularyLoss(vocabulary, mesh.tp, spec.train.z_loss, spec.train.label_smoothing)
        # What compares answers has the sum over all of an answer's tokens on each rank that has some of them.
        self._of_tokens = self._of_answer if self._compares and mesh.cp.size > 1 else self._token_loss
        self._measures = mesh.tp.index == 0  # tensor-parallel ranks measure the same
        self._counts = self._measures and (mesh.cp.index == 0 or not self._compares)
        self.scale = 1.0
        self.chunks_head = True
        self._own = OwnMetrics(spec.evaluate.own_metrics if spec.evaluate else ())
        self._tokens_at_once = HEAD_TOKENS[device.device.type]
        self._parts: dict[str, list[Tensor]] = {}
        self._names: dict[bool, list[str]] = {}
        self._evaluating = False
        self._marked: list[tuple[int, Tensor]] | None = None  # in a prediction
        # in an evaluation, where all predictions are asked for
        self._each: list[Tensor] | None = [] if spec.evaluate and spec.evaluate.of_predictions else None
        self._said: list[Tensor] | None = None  # while log-probabilities are computed

    def begin(self, micro_batches: Sequence[Batch]) -> None:
        """Forget the last step, and count what the next one predicts where the loss is more than a sum over tokens."""
        self._forget()
        self._evaluating = self._token_loss.counts_correct = False
        if self._has_means:
            self.expected = max(float(self._count(micro_batches)), 1.0)

    def begin_evaluation(self) -> None:
        """Forget the last step; what follows is not differentiated, and right predictions are counted."""
        self._forget()
        self._evaluating = self._token_loss.counts_correct = True

    def begin_prediction(self) -> None:
        """Forget the last step; of what follows, the logits at labels are taken."""
        self._forget()
        self._marked = []

    def begin_reference(self) -> None:
        """Forget the last step; of what follows, the log-probabilities of answers are taken."""
        self._forget()
        self._said = []

    def said(self, here: bool = False) -> list[Tensor]:
        """The log-probabilities since then, fp32 [B, 2] of each micro-batch; on one of the ranks that computed it, or
        with `here` on each of them."""
        assert self._said is not None
        return self._said if self._counts or here else []

    def _forget(self) -> None:
        self._parts, self._marked, self._said = {}, None, None
        self._each = None if self._each is None else []

    def predicted(self) -> list[tuple[int, Tensor]]:
        """Each label since then, and the logits there: fp32 [vocabulary]; every one on one rank."""
        assert self._marked is not None
        return self._marked if self._mesh.tp.index == 0 else []

    def _count(self, micro_batches: Sequence[Batch]) -> int:
        """Labels in the global batch: with them known, a mean beside the sum (of a router, of a sentence head) keeps
        its weight whatever share of the tokens is predicted."""
        place = self._mesh.coordinate
        mine = place["pp"] == place["cp"] == place["tp"] == 0
        if self._compares:
            labels = sum(int(batch["compared"].sum()) for batch in micro_batches)
        else:
            of_spans = getattr(self._workload.config, "head", "") == "span"
            labels = sum(_predicted(batch, of_spans) for batch in micro_batches)
        total = torch.tensor([labels if mine else 0])
        if self._layout.world > 1:
            dist.all_reduce(total)
        return int(total)

    def take_baseline(self, sums: EvaluationSums) -> None:
        """Count rewards from now on from what an evaluation of the same samples has found."""
        total, count = sums.sums[DIVERGENCE]
        self.baseline = max(total / max(count, 1.0), 0.0)

    def prepare(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch, on its device."""
        batch = {k: v.to(self._device.device, non_blocking=True) for k, v in batch.items()}
        if self.has_baseline:
            batch[BASELINE] = torch.full((), self.baseline, device=self._device.device)
        return slice_batch(batch, self._workload.config, self._mesh.cp) if self._mesh.cp.size > 1 else batch

    @property
    def in_chunks(self) -> ChunkedLoss | None:
        """How the head computes the loss of the next micro-batch; None if logits are wanted: where they are read
        themselves, and where answers are compared, whose loss is no sum over tokens."""
        if not self.chunks_head or self._compares or self._marked is not None:
            return None
        if self._evaluating and self._own:
            return None
        return ChunkedLoss(self._token_loss, self._tokens_at_once, self._weighed)

    def _weighed(self, total: Tensor) -> Tensor:
        """What is differentiated of a sum of losses."""
        total = total / self.expected
        return total * self.scale if self.scale != 1.0 else total

    def of(self, output: Any, batch: Batch, parts: int) -> Tensor:
        """The loss of a forward pass as the backward pass wants it, of one of `parts` micro-batches."""
        if self._marked is not None:
            return self._workload.criterion(output, batch, self._mark).total
        if self._said is not None:
            self._said.append(log_probabilities(output.logits, batch["labels"], self._of_tokens))
            return self._said[-1].sum()
        loss: Loss = self._workload.criterion(output, batch, self._of_tokens)
        if self._evaluating:
            return self._add_exactly(self._own.beside(loss, output, batch) if self._own else loss)
        share = 1.0 / (parts * self._layout.dp * self._layout.cp)
        self._add({"loss": loss.total.detach(), "count": loss.count, **_flat(loss)}, float(self._counts))
        self._add(loss.metrics, share if self._measures else 0.0)
        total = loss.total / self.expected
        total = total if loss.extra is None else total + loss.extra * share
        return total * self.scale if self.scale != 1.0 else total

    def _mark(self, logits: Tensor, labels: Tensor) -> Loss:
        assert self._marked is not None
        at = labels != IGNORED
        self._marked += zip(labels[at].tolist(), self._token_loss.whole(logits[at]), strict=True)
        nothing = torch.zeros((), device=logits.device)
        return Loss(nothing, nothing)

    def _of_answer(self, logits: Tensor, labels: Tensor) -> Loss:
        found, cp = self._token_loss(logits, labels), self._mesh.cp
        return Loss(reduce(found.total, cp), reduce(found.count, cp))

    def _add_exactly(self, loss: Loss) -> Tensor:
        """Sums of multiples of one small number have no rounding: how batches are cut and added changes no bit."""
        correct = torch.zeros_like(loss.count) if loss.correct is None else loss.correct
        if self._each is not None and loss.each is not None and self._counts:
            self._each.append(loss.each.double())
        summed = {"loss": loss.total, **_flat(loss)}
        exact = {name: (value.double() / EXACT).round() * EXACT for name, value in summed.items()}
        self._add({**exact, "count": loss.count, "correct": correct}, float(self._counts))
        return loss.total

    def _add(self, values: Mapping[str, Tensor], share: float) -> None:
        for name, value in values.items():
            self._parts.setdefault(name, []).append(value.detach().double() * share)

    def over_ranks(self, square: Tensor) -> tuple[float | None, dict[str, float], float, float]:
        """(mean loss, means of other metrics, tokens predicted or 1, sum of `square`), the same bits on every rank;
        where nothing is predicted there is no mean."""
        total, named = self._sums(square)
        loss, count = named.pop("loss"), named.pop("count")
        mean = loss / count if count else None
        return mean, {**means(_summed(named)), **named}, max(count, 1.0), total

    def evaluated(self, routed: Mapping[str, Tensor]) -> EvaluationSums:
        """The sums over all ranks of an evaluation, in which routers did what `routed` says."""
        sums = self._sums(torch.zeros(()))[1]
        loss, count, correct = (sums.pop(name) for name in ("loss", "count", "correct"))
        return EvaluationSums(loss, count, correct, routed, _summed(sums), self._predictions())

    def _predictions(self) -> Tensor:
        """Predictions and labels of all samples, float64 [n, 2]; of those that are no sample, none."""
        none = torch.empty(0, 2, dtype=torch.float64)
        if self._each is None:
            return none
        mine = torch.cat([none, *(each.cpu() for each in self._each)])
        longest = torch.tensor(len(mine))
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        everyone = mine.new_full((dist.get_world_size() * int(longest), 2), math.nan)
        mine = torch.cat([mine, mine.new_full((int(longest) - len(mine), 2), math.nan)])
        dist.all_gather_single(everyone, mine)
        return everyone[~everyone[:, 1].isnan() & (everyone[:, 1] != IGNORED)]

    def _sums(self, square: Tensor) -> tuple[float, dict[str, float]]:
        names = self._agreed_names()
        zero = torch.zeros((), dtype=torch.float64, device=self._device.device)
        sums = {name: tree_sum(torch.stack(parts)) for name, parts in self._parts.items()}
        mine = torch.stack([square.to(zero), *(sums.get(name, zero) for name in names)])
        everyone = mine
        if self._layout.world > 1:
            everyone = mine.new_empty(self._layout.world * len(mine))
            dist.all_gather_single(everyone, mine)
        # Added here in rank order, and in a tree: every rank and every data-parallel width has the same bits.
        total, *values = tree_sum(everyone.view(-1, len(mine))).tolist()
        return total, dict(zip(names, values, strict=True))

    def _agreed_names(self) -> list[str]:
        """What is measured; only the last stage of a pipeline sees it, and tells the others once."""
        if self._evaluating not in self._names:
            mine = list(self._parts)
            everyone = gather_json(mine) if self._layout.pp > 1 else [mine]
            self._names[self._evaluating] = list(dict.fromkeys(name for names in everyone for name in names))
        return self._names[self._evaluating]


def _predicted(batch: Batch, of_spans: bool = False) -> int:
    """Labels in a micro-batch as its loss counts them: the first token and the last of a span are one."""
    labels = batch.get("labels", batch.get("sequence_labels"))
    if labels is None:
        return 0
    known = ~labels.isnan() if labels.is_floating_point() else labels != IGNORED
    return int((known.all(-1) if of_spans else known).sum())


def _flat(loss: Loss) -> dict[str, Tensor]:
    """The further sums of a loss by name, and how many each is of."""
    return {
        f"{kind}:{name}": pair[i] for name, pair in loss.sums.items() for i, kind in enumerate((SUM, COUNT))
    }


def _summed(values: dict[str, float]) -> dict[str, tuple[float, float]]:
    """The inverse of `_flat`; what it finds is taken from `values`."""
    names = [name.removeprefix(f"{SUM}:") for name in values if name.startswith(f"{SUM}:")]
    return {name: (values.pop(f"{SUM}:{name}"), values.pop(f"{COUNT}:{name}")) for name in names}
