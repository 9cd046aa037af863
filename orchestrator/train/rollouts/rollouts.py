"""The rollouts of a step: answers to its prompts, their rewards, and the rows that the step trains on.

The prompts of a step are divided into units of `rollout.together`, and units among all ranks, whatever the layout. The
answers of a unit are a pure function of the weights and of the numbers of its prompts. So a rank that is lost costs
nothing but time: the next attempt restores the commit and generates the same answers again.

With staleness 1, rollout n + 1 is asked for before the gang trains on rollout n, and collected after it. Its answers
come from the weights before rollout n, however long they take, and the commit after rollout n has them. Only a rollout
without such answers comes from its own weights: the first one of a run, and one before or within which samples are
skipped after an instability, see `StepReader`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.workers.worker_context import WorkerContext
from orchestrator.data.samples.batches import Batches, slices
from orchestrator.data.samples.sample_reader import SampleReader
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.train.engines.engine import Engine
from orchestrator.train.rollouts.advantages import Advantages, advantages
from orchestrator.train.rollouts.ahead import Ahead, NextRollout, Pending
from orchestrator.train.rollouts.config import RolloutSpec
from orchestrator.train.rollouts.judge import Judge
from orchestrator.train.rollouts.passes import PassSpec
from orchestrator.train.rollouts.prompts import Prompt, prompts_at, prompts_of_set
from orchestrator.train.rollouts.rollout_data import Rollout, Scored, Seconds, rate
from orchestrator.train.rollouts.rows import Rows
from orchestrator.train.rollouts.sampler import AnswerSampler, Unit
from orchestrator.train.rollouts.shares import Division, Share, covered
from orchestrator.train.rollouts.stored_rollouts import KeptRollouts
from orchestrator.train.task import Task
from workloads.objectives.rewarded import DRAWN, SAMPLED, Rewarded
from workloads.workload import Workload


@dataclass
class Rollouts:
    """Makes the rollouts of steps on one rank. All ranks call each method together.

    Attributes:
        spec: how answers are generated.
        sequence_length: tokens of a row, prompt and answer together.
        dropout_seed: seeds the dropout of rows; None if the model draws nothing.
        passes: how often one of several answers to a held-out prompt is right; None if that is not measured.
        sampler: generates answers.
        judge: rewards answers.
        prompts_ahead: the number of prompts whose answers are generated ahead.
        is_bitwise: whether the job asks for `determinism: bitwise`.
        trains_as_it_reads: whether answers that are read as training reads them have its log-probabilities to the bit.
        seconds: of the last rollout, see `Seconds`.
        next: the answers of the next rollout, which a commit has.
    """

    spec: RolloutSpec
    sequence_length: int
    dropout_seed: int | None
    workload: Workload
    layout: Layout
    context: WorkerContext
    sampler: AnswerSampler
    judge: Judge
    prompts_ahead: int
    is_bitwise: bool = False
    trains_as_it_reads: bool = False
    passes: PassSpec | None = None
    seconds: Seconds = field(default_factory=Seconds)

    def __post_init__(self) -> None:
        assert isinstance(self.workload.objective, Rewarded)
        self._objective = self.workload.objective
        self._rows = Rows(
            self._objective,
            self.spec,
            length=self.sequence_length,
            has_experts=bool(self.workload.config.moe),
            dropout_seed=self.dropout_seed,
        )
        self._text_writer: KeptRollouts | None = None
        self._waiting: list[Rollout] = []
        info = self.context.rank_info
        self._division = Division(self.spec.together, self.spec.group, info.rank, self.layout.world)
        self._pending: Pending | None = None
        self._asking = 0.0
        """Seconds of asking for the next rollout. Without rollout workers this rank then generates its answers."""
        self.next = NextRollout(
            self.prompts_ahead, self.spec.group, self.spec.max_tokens, is_writer=info.rank == 0
        )

    def begin(self, *, has_read_answers: bool) -> None:
        """Begin a task. A run of an earlier version goes on without answers that are read as training reads them."""
        self._division = replace(self._division, has_training_bits=self.is_bitwise and has_read_answers)

    def close(self) -> None:
        """End the processes that compute rewards."""
        self.judge.close()
        if self._text_writer is not None:
            self._text_writer.close()

    def prompts(self, batches: Batches, position: int, count: int) -> list[Prompt]:
        """Return the prompts at positions [position, position + count).

        Args:
            batches: the run's samples and their order.
            position: the first position.
            count: number of prompts.
        """
        return prompts_at(batches, position, count, self._room)

    @property
    def _room(self) -> int:
        """Maximum tokens of a prompt: an answer of any length fits after it."""
        return self.sequence_length - self.spec.max_tokens

    def keep(self, step: int, rollout: Rollout, task: Task) -> None:
        """Keep the rollouts of a step as text, if the job asks for it.

        Args:
            step: number of the step.
            rollout: what it trains on.
            task: the run directory, and whether this process writes to it.
        """
        is_due = step == 1 or step % self.spec.keep_every == 0
        if not (is_due and task.commit and self.context.rank_info.rank == 0):
            return
        if self._text_writer is None:
            self._text_writer = KeptRollouts(task.run)
        self._text_writer.add(
            step, [self.judge.prompt_text(prompt.tokens) for prompt in rollout.prompts], rollout
        )

    def take(self, engine: Engine) -> None:
        """Take the weights of an engine, from which answers are generated from now on."""
        self.sampler.take(engine)

    def evaluate(
        self,
        step: int,
        name: str,
        read: SampleReader,
        max_prompts: int | None,
        goes_on: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Return the metrics of the answers to the prompts of a held-out set, by the weights taken last.

        These are the most likely answers, and for `passes` some that are drawn.

        Args:
            step: steps done.
            name: the name of the set.
            read: the prompts of the set.
            max_prompts: maximum number of prompts; None for all.
            goes_on: asked between global batches; False ends the evaluation, which then returns None.
        """
        count = len(read) if max_prompts is None else min(len(read), max_prompts)
        at_once = self.spec.together * self.layout.world
        self.context.begin_work(f"answers to {name} after step {step}", "batches", -(-count // at_once))
        answers: list[Scored] = []
        right: list[int] = []
        for first in range(0, count, at_once):
            if not goes_on():
                return None
            self.context.set_waiting(False)
            numbers = range(first, min(first + at_once, count))
            prompts = prompts_of_set(read, numbers, self._room)
            batch_answers = self.answers(step, prompts, [[number] for number in numbers], is_greedy=True)
            answers += [answer for prompt_answers in batch_answers for answer in prompt_answers]
            if self.passes is not None:
                right += self._count_right(self.passes, step, prompts)
            self.context.set_waiting(True)
        metrics = self.judge.metrics(answers)
        return metrics | (self.passes.metrics(right) if self.passes is not None else {})

    def _count_right(self, passes: PassSpec, step: int, prompts: list[Prompt]) -> list[int]:
        """Draw answers to held-out prompts, and return how many of each prompt's are right."""
        right = [0] * len(prompts)
        # No more at once than in a rollout, whose memory is planned.
        for first in range(0, passes.answers, self.spec.group):
            ks = range(first, min(first + self.spec.group, passes.answers))
            numbers = [[prompt.number * passes.answers + k for k in ks] for prompt in prompts]
            answers = self.answers(step, prompts, numbers)
            right = [
                count + sum(map(passes.is_right, prompt_answers))
                for count, prompt_answers in zip(right, answers, strict=True)
            ]
        return right

    def rows(self, engine: Engine, step: int, prompts: Sequence[list[Prompt]]) -> Rollout:
        """Return what the step after `step` steps trains on.

        Args:
            engine: has the weights.
            step: steps done.
            prompts: if a rollout begins with this step, the prompts of each of its batches, and of each of the next
                rollout's if that is generated meanwhile; else they are not read.
        """
        self.seconds = Seconds()
        if step % self.spec.updates == 0:
            self._waiting = self._make(engine, step, prompts)
        return self._waiting.pop(0)

    def collect(self, step: int) -> dict[str, float]:
        """Wait for the answers of the next rollout, if it begins after `step` steps. Return fields of the step's row.

        It is called after the step's training, before a commit.
        """
        if self._pending is None or step % self.spec.updates:
            return {}
        pending = self._pending
        self._pending = None
        started = time.perf_counter()
        generated = self.sampler.collect()
        own_share = self._division.share(pending.steps, generated.answers)
        all_shares = gather_json([generated.overlapped, own_share])
        self.context.progressed()
        waited = time.perf_counter() - started
        self.seconds.generate += waited
        self.next.ready = Ahead.of(pending, [share for _, share in all_shares])
        overlapped = covered((begin, end) for spans, _ in all_shares for begin, end in spans)
        return {
            "generate_seconds": round(self.seconds.generate, 6),
            "overlapped_seconds": round(overlapped, 6),
            **rate(self.next.ready.answers, self._asking + waited + overlapped),
        }

    def _make(self, engine: Engine, step: int, prompts: Sequence[list[Prompt]]) -> list[Rollout]:
        """Return what all steps of a rollout train on, and ask for the answers of the next one."""
        current = prompts[: self.spec.steps]
        next_prompts = prompts[self.spec.steps :]
        # Stale answers count only if they belong to these very prompts: after an instability samples are skipped, and
        # the rollout's prompts are others.
        ready = self.next.take(current)
        # Weights travel only if someone generates with them: now, or ahead for the next rollout.
        if ready is None or next_prompts:
            started = time.perf_counter()
            self.take(engine)
            self.seconds.transfer = time.perf_counter() - started
        steps = range(step, step + len(current))
        answers = []
        if ready is None:
            drawn_shares = (
                self._drawn(len(step_prompts), self._division.training_units(step_prompts))
                for step_prompts in current
            )
            answers = list(map(self._scored, steps, current, drawn_shares))
        drawn = (
            [answer.drawn for answer in prompt_answers]
            for step_answers in answers
            for prompt_answers in step_answers
        )
        speed = rate(drawn, self.seconds.generate)
        if next_prompts:
            self._ask(step, next_prompts)
        if ready is not None:  # scored while rollout workers generate
            shares = self._division.shares(list(map(len, current)), ready.answers)
            answers = list(map(self._scored, steps, current, shares))
        for step_answers in answers:
            self.judge.check_scored(step_answers)
        version = step if ready is None else ready.version
        rollouts = [
            self._step_rollout(step_prompts, step_answers, version, is_stale=ready is not None)
            for step_prompts, step_answers in zip(current, answers, strict=True)
        ]
        updates = self._updates(engine, rollouts, is_stale=ready is not None)
        seconds = {
            "transfer_seconds": round(self.seconds.transfer, 6),
            "generate_seconds": round(self.seconds.generate, 6),
            "reward_seconds": round(self.seconds.reward, 6),
        }
        updates[0].metrics.update(seconds | speed)
        return updates

    def _updates(self, engine: Engine, rollouts: Sequence[Rollout], *, is_stale: bool) -> list[Rollout]:
        """Return what each step of a rollout trains on: in every epoch the same answers, in the same order.

        All updates but the first compare with the probabilities under the weights that generated the answers, computed
        as these updates compute them. Stale answers brought theirs along.
        """
        epochs = range(1, self.spec.epochs + 1)
        # With SAMPLED missing the loss takes the forward pass's own values, whose ratio is exactly 1. That is right for
        # the first update of fresh answers and saves it a pass; every later update needs the stored ones.
        compared = [
            self._compared(engine, rollout) if not is_stale and (number or self.spec.epochs > 1) else rollout
            for number, rollout in enumerate(rollouts)
        ]
        updates = [self._in_epoch(epoch, rollout) for epoch in epochs for rollout in compared]
        return updates if is_stale else [self._in_epoch(1, rollouts[0]), *updates[1:]]

    def _compared(self, engine: Engine, rollout: Rollout) -> Rollout:
        """Return a rollout with the log-probabilities of its answers under the weights that generated them."""
        if self._division.has_training_bits and self.trains_as_it_reads:
            batches = [{**batch, SAMPLED: batch[DRAWN]} for batch in rollout.batches]
            return replace(rollout, batches=batches)
        log_probabilities = engine.token_log_probabilities(rollout.batches)
        batches = [
            {**batch, SAMPLED: values.float().cpu()}
            for batch, values in zip(rollout.batches, log_probabilities, strict=True)
        ]
        return replace(rollout, batches=batches)

    def _in_epoch(self, epoch: int, rollout: Rollout) -> Rollout:
        """Return what an update trains on in an epoch, counted from 1."""
        fields = {"rollout_epoch": epoch} if self.spec.epochs > 1 else {}
        return replace(rollout, metrics=rollout.metrics | fields, epoch=epoch)

    def _ask(self, step: int, prompts: Sequence[list[Prompt]]) -> None:
        """Ask for the answers to the prompts of each step of the next rollout, by the weights taken last."""
        started = time.perf_counter()
        self.sampler.ask(self._division.ahead(prompts))
        self.context.progressed()
        self._asking = time.perf_counter() - started
        self.seconds.generate += self._asking
        self._pending = Pending.of(step, prompts)

    def _step_rollout(
        self, prompts: list[Prompt], answers: list[list[Scored]], version: int, *, is_stale: bool
    ) -> Rollout:
        """Return what a step trains on.

        Args:
            prompts: its prompts.
            answers: the answers to each of them.
            version: steps done by the weights that generated them.
            is_stale: whether these are not the weights before the rollout.
        """
        group = self.spec.group
        # fp64 [prompts, group], NaN for an answer that is left out.
        rewards = np.array([[answer.reward for answer in prompt_answers] for prompt_answers in answers])
        step_advantages = advantages(rewards, self._objective.baseline, self._objective.scale_rewards)
        own_rows = self._my_rows(len(prompts) * group)
        return Rollout(
            batches=[
                self._rows.batch(prompts, answers, step_advantages, rows=rows, is_stale=is_stale)
                for rows in own_rows
            ],
            digest=self._digest(prompts, answers, own_rows, version),
            metrics=self._metrics(answers, step_advantages)
            | ({"rollout_version": version} if self.spec.staleness else {}),
            prompts=prompts,
            answers=answers,
            version=version,
        )

    def answers(
        self, step: int, prompts: list[Prompt], numbers: list[list[int]], is_greedy: bool = False
    ) -> list[list[Scored]]:
        """Return the answers to all prompts, with their rewards. Each rank generates its share.

        Args:
            step: steps done.
            prompts: the prompts.
            numbers: the number of each answer, see `Unit`.
            is_greedy: take the most likely tokens.
        """
        units = self._division.units(prompts, numbers, is_greedy)
        return self._scored(step, prompts, self._drawn(len(prompts), units))

    def _drawn(self, prompts: int, units: list[Unit]) -> Share:
        """Generate this rank's share of the answers to that many prompts."""
        started = time.perf_counter()
        generated = self.sampler.answers(units)
        self.context.progressed()
        self.seconds.generate += time.perf_counter() - started
        return self._division.share([prompts], generated)

    def _scored(self, step: int, prompts: list[Prompt], own_share: Share) -> list[list[Scored]]:
        """Return the answers to all prompts with their rewards. Each rank scores its share."""
        started = time.perf_counter()
        own_answers = [(prompts[number], drawn) for number, drawn in own_share]
        # Each reward has its own time limit, which may be longer than a step's.
        self.context.set_waiting(True)
        scored = self.judge.score(step, own_answers, self.context.lives)
        self.seconds.reward += time.perf_counter() - started
        all_answers = gather_json(
            [
                [number, [answer.to_json() for answer in prompt_answers]]
                for (number, _), prompt_answers in zip(own_share, scored, strict=True)
            ]
        )
        self.context.set_waiting(False)
        by_number = {
            number: prompt_answers for rank_answers in all_answers for number, prompt_answers in rank_answers
        }
        return [list(map(Scored.from_json, by_number[number])) for number in range(len(prompts))]

    def _my_rows(self, rows: int) -> list[range]:
        """Return the rows of this rank's micro-batches, of all `rows` of the step."""
        coordinate = self.layout.coordinate(self.context.rank_info.rank)
        ranges = slices(0, rows, coordinate["dp"], self.layout.dp, self.layout.micro_batch)
        return [range(first, first + count) for first, count in ranges]

    def _digest(
        self, prompts: list[Prompt], answers: list[list[Scored]], own_rows: list[range], version: int
    ) -> int:
        """Return the sum of the receipt digests of this rank's rows; 0 if another rank counts them."""
        coordinate = self.layout.coordinate(self.context.rank_info.rank)
        if coordinate["pp"] or coordinate["cp"] or coordinate["tp"]:
            return 0
        return self._rows.digest(prompts, answers, [row for rows in own_rows for row in rows], version)

    def _metrics(self, answers: list[list[Scored]], step_advantages: Advantages) -> dict[str, float]:
        return {
            **self.judge.metrics([answer for prompt_answers in answers for answer in prompt_answers]),
            "reward_deviation": step_advantages.deviation,
            "without_signal": step_advantages.without_signal,
        }
