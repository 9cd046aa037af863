"""The progress of a run between two steps: all that goes on from a commit besides weights and optimiser state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.checkpoint.evaluations import MEASURED
from orchestrator.checkpoint.identity import CONTINUED
from orchestrator.config.evaluate import StopWhen
from orchestrator.config.metric_names import by_name, larger_is_better
from orchestrator.config.train import TrainSpec
from orchestrator.data.samples.receipt import START
from orchestrator.data.samples.skips import Skip, merged

CHUNKS_HEAD = "chunks_head"
"""Key of a commit's meta; see `TrainingProgress`."""


@dataclasses.dataclass(frozen=True)
class TrainingProgress:
    """Where a run is, the same on every rank.

    Attributes:
        step: optimiser steps done.
        position: samples consumed or skipped.
        tokens: tokens consumed.
        receipt: see `orchestrator.data.samples.receipt`.
        losses: the last losses, if the job asks for loss spikes to be detected.
        skips: the windows of samples that are skipped.
        last_evaluation_step: the step after which the last evaluation was, -1 before the first.
        evaluation: its metrics by name, as in validation.loss.
        best: the best value so far of the metric of `stop_when`, None before the first evaluation.
        stale: evaluations since then.
        best_of: that metric, empty before the first evaluation and in commits of earlier versions; a job that goes on
            may name another, whose values are not to be compared with it.
        chunks_head: whether heads compute the loss in chunks of tokens, as they did not before; their sums have other
            bits.
        continued_from: the commit of another run that this one goes on from, see `checkpoint.identity.CONTINUED`.
    """

    step: int = 0
    position: int = 0
    tokens: int = 0
    receipt: str = START
    losses: tuple[float, ...] = ()
    skips: tuple[Skip, ...] = ()
    last_evaluation_step: int = -1
    evaluation: Mapping[str, float] = dataclasses.field(default_factory=dict)
    best: float | None = None
    stale: int = 0
    best_of: str = ""
    chunks_head: bool = True
    continued_from: Mapping[str, Any] | None = None

    @classmethod
    def of_commit(
        cls,
        step: int,
        position: int,
        receipt: str,
        meta: Mapping[str, Any],
        skips: Sequence[Any],
        measured: Mapping[str, Any] | None = None,
    ) -> TrainingProgress:
        """What a commit says, which leaves out `skips` too. Commits of earlier versions have no evaluation. `measured`
        is how the job that goes on measures: its values are not compared with those that were measured otherwise."""
        comparable = meta.get(MEASURED) in (None, measured)
        return cls(
            step=step,
            position=position,
            tokens=meta["tokens"],
            receipt=receipt,
            losses=tuple(meta.get("losses", ())),
            skips=merged(skips, meta.get("skips", ())),
            last_evaluation_step=meta.get("last_evaluation_step", -1),
            evaluation=meta.get("evaluation", {}),
            best=meta.get("best") if comparable else None,
            stale=meta.get("stale", 0) if comparable else 0,
            best_of=meta.get("best_of", ""),
            chunks_head=meta.get(CHUNKS_HEAD, False),
            continued_from=meta.get(CONTINUED),
        )

    def schedule_from(self, train: TrainSpec) -> int:
        """The step from which the learning-rate schedule counts."""
        asked, begun = train.continue_from, self.continued_from
        return begun["step"] if begun and asked and asked.schedule == "restart" else 0

    def with_evaluation(
        self, sets: Mapping[str, Mapping[str, float]], stop_when: StopWhen | None
    ) -> TrainingProgress:
        """After an evaluation whose metrics are these, by set."""
        values = by_name(sets)
        best, stale, best_of = self.best, self.stale, self.best_of
        if stop_when is not None:
            best, stale, best_of = *self._gained(stop_when), stop_when.metric
            value = values.get(stop_when.metric, math.nan)  # none where nothing is predicted
            sign = -1.0 if larger_is_better(stop_when.metric) else 1.0
            gains = best is None or sign * (best - value) > stop_when.min_delta
            better = gains and not math.isnan(value)
            best, stale = (value, 0) if better else (best, stale + 1)
        return dataclasses.replace(
            self,
            last_evaluation_step=self.step,
            evaluation=values,
            best=best,
            stale=stale,
            best_of=best_of,
        )

    def is_on_plateau(self, stop_when: StopWhen | None) -> bool:
        """Whether the run has gained nothing for as long as `stop_when` allows."""
        return stop_when is not None and self._gained(stop_when)[1] >= stop_when.patience

    def _gained(self, stop_when: StopWhen) -> tuple[float | None, int]:
        """`best` and `stale` by the metric of `stop_when`."""
        return (self.best, self.stale) if self.best_of in ("", stop_when.metric) else (None, 0)
