"""The progress of a run between two steps: the state of a commit besides weights and optimizer state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from orchestrator.checkpoint.evaluations import MEASURED
from orchestrator.checkpoint.identity import CONTINUED
from orchestrator.checkpoint.manifest import VERIFIED
from orchestrator.config.metric_names import by_name, larger_is_better
from orchestrator.data.samples.receipt import START, roll
from orchestrator.data.samples.skips import Skip, lr_factor, merged, start_before, start_of
from orchestrator.evaluate.config import StopWhen
from orchestrator.optim.learning_rate import learning_rate
from orchestrator.parallel.arithmetic import NEWEST, Arithmetic
from orchestrator.train.config import Reading, StabilitySpec, TrainSpec
from orchestrator.train.instability import check_stable, watched_answers


class BestValue(NamedTuple):
    """The best value of a metric so far.

    Attributes:
        value: the value; None before the first evaluation that has one.
        stale: number of evaluations since.
    """

    value: float | None = None
    stale: int = 0

    def after(self, stop_when: StopWhen, value: float) -> BestValue:
        """Return the best value after one more evaluation.

        A value must be better than the best one by more than `min_delta`. Small gains add up, because each is compared
        with the best value and not with the one before.

        Args:
            stop_when: the metric, and the smallest change that counts as an improvement.
            value: the metric's new value; NaN if the evaluation predicted nothing.
        """
        sign = -1.0 if larger_is_better(stop_when.metric) else 1.0
        improves = self.value is None or sign * (self.value - value) > stop_when.min_delta
        if improves and not math.isnan(value):
            return BestValue(value)
        return BestValue(self.value, self.stale + 1)

    def is_on_plateau(self, stop_when: StopWhen) -> bool:
        """Whether the metric has not improved for `patience` evaluations."""
        return self.stale >= stop_when.patience


@dataclasses.dataclass(frozen=True)
class TrainingProgress:
    """The progress of a run, equal on every rank.

    Attributes:
        step: optimizer steps done.
        position: samples consumed or skipped.
        tokens: tokens consumed.
        receipt: see `orchestrator.data.samples.receipt`.
        losses: the last losses, if the job detects loss spikes.
        skips: windows of samples that are skipped.
        last_evaluation_step: step of the last evaluation; -1 before the first one.
        evaluation: metrics of the last evaluation by name, for example validation.loss.
        best: best value so far of the metric of `stop_when`; None before the first evaluation.
        stale: evaluations since the best value.
        best_of: name of that metric; empty before the first evaluation and in commits of earlier versions. A resumed
            job may name another metric, whose values must not be compared with it.
        arithmetic: in which order steps add numbers.
        continued_from: the commit of another run that this run continues, see `checkpoint.identity.CONTINUED`.
        verified: the last step that another rank has computed too, with equal results; 0 before the first.
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
    arithmetic: Arithmetic = NEWEST
    continued_from: Mapping[str, Any] | None = None
    verified: int = 0

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
        """Return the progress that a commit stores. Commits of earlier versions have no evaluation.

        Args:
            step: step of the commit.
            position: its samples consumed or skipped.
            receipt: its receipt.
            meta: its other fields.
            skips: additional windows of samples to skip.
            measured: how this job evaluates. Values that were measured otherwise are not compared with new ones.
        """
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
            arithmetic=Arithmetic.from_meta(meta),
            continued_from=meta.get(CONTINUED),
            verified=meta.get(VERIFIED, 0),
        )

    @classmethod
    def for_new_run(cls, skips: Sequence[Any]) -> TrainingProgress:
        """Return the progress before the first step, with windows of samples to skip."""
        return cls(skips=merged(skips))

    def sound_until(self, every: int) -> int:
        """Return the step up to which a run is taken as sound that is from here on verified each `every` steps.

        It is the last verified step; this step if the run was not verified so far, or not for long: then no earlier
        checkpoint is better, and one wrong result must not cost all of them.
        """
        return self.step if self.step - self.verified >= every else self.verified

    def position_of_step(self, reading: Reading) -> int:
        """Return the position of the first sample of the next step."""
        if back := reading.batches_before(self.step) - reading.batch_of(self.step):
            return start_before(self.position, back, reading.samples, self.skips)
        return start_of(self.position, 0, reading.samples, self.skips)

    def generating(self, reading: Reading) -> AbstractContextManager[None]:
        """Watch the answers that the next step generates, see `watched_answers`."""
        return watched_answers(self.step + 1, self.position_of_step(reading))

    def evaluating(self, reading: Reading) -> AbstractContextManager[None]:
        """Watch the answers of an evaluation after the last step. It counts as that step, the first one before it."""
        last_step = max(self.step, 1)
        back = reading.batches_before(last_step) - reading.batch_of(last_step - 1)
        return watched_answers(last_step, start_before(self.position, back, reading.samples, self.skips))

    def check_stable(
        self, loss: float | None, grad_norm: float, stability: StabilitySpec, reading: Reading
    ) -> None:
        """Raise NonFinite or LossSpike if the next step's numbers show that training is unstable.

        Args:
            loss: of the step; None if it predicted nothing.
            grad_norm: of the step.
            stability: what counts as unstable.
            reading: which samples the step read.
        """
        check_stable(
            loss=loss,
            grad_norm=grad_norm,
            earlier_losses=self.losses,
            stability=stability,
            step=self.step + 1,
            position=self.position_of_step(reading),
        )

    def after_step(
        self, loss: float | None, digest: int, reading: Reading, tokens: int, stability: StabilitySpec
    ) -> TrainingProgress:
        """Return the progress after one more step.

        Args:
            loss: of the step; None if it predicted nothing.
            digest: the sum of its samples' digests over all ranks.
            reading: which samples it read.
            tokens: how many tokens it trained on.
            stability: how many losses are kept.
        """
        losses = self.losses if loss is None else (*self.losses, loss)
        return dataclasses.replace(
            self,
            step=self.step + 1,
            position=max(self.position_of_step(reading) + reading.samples, self.position),
            tokens=self.tokens + tokens,
            receipt=roll(self.receipt, digest),
            losses=() if stability.spike is None else losses[-stability.window :],
        )

    def learning_rate(self, train: TrainSpec) -> float:
        """Return the learning rate of the next step."""
        rate = learning_rate(train.optimizer, self.step, train.steps, self.schedule_from(train))
        return rate * lr_factor(self.step + 1, self.skips)

    def schedule_from(self, train: TrainSpec) -> int:
        """Return the step from which the learning-rate schedule counts."""
        if not (self.continued_from and train.continue_from):
            return 0
        if train.continue_from.schedule != "restart":
            return 0
        step: int = self.continued_from["step"]
        return step

    def with_evaluation(
        self, sets: Mapping[str, Mapping[str, float]], stop_when: StopWhen | None
    ) -> TrainingProgress:
        """Return the progress after an evaluation with the given metrics by set.

        Args:
            sets: metrics of each held-out set by name.
            stop_when: the rule of early stopping, if this evaluation counts for it; else None.
        """
        values = by_name(sets)
        progress = dataclasses.replace(self, last_evaluation_step=self.step, evaluation=values)
        if stop_when is None:
            return progress
        value = values.get(stop_when.metric, math.nan)  # missing where nothing is predicted
        best = self._best_value(stop_when).after(stop_when, value)
        return dataclasses.replace(progress, best=best.value, stale=best.stale, best_of=stop_when.metric)

    def is_on_plateau(self, stop_when: StopWhen | None) -> bool:
        """Whether the metric of `stop_when` has not improved for `patience` evaluations."""
        return stop_when is not None and self._best_value(stop_when).is_on_plateau(stop_when)

    def _best_value(self, stop_when: StopWhen) -> BestValue:
        """Return the best value so far, if it is of the metric of `stop_when`; else the value before the first one."""
        return BestValue(self.best, self.stale) if self.best_of in ("", stop_when.metric) else BestValue()
