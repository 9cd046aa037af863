"""The rollouts of a step: answers to its prompts, their rewards, and the rows that the step trains on.

The prompts of a step are divided into units of `rollout.together`, and units among all ranks, whatever the layout. The
answers of a unit are a pure function of the weights and of the numbers of its prompts. So a rank that is lost costs
nothing but time: the next attempt restores the commit and generates the same answers again.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from cluster.workers.worker_context import WorkerContext
from orchestrator.config.spec import JobSpec
from orchestrator.data.samples import receipt
from orchestrator.data.samples.batches import Batches, slices
from orchestrator.data.samples.sample_reader import SampleReader
from orchestrator.data.store.tokens import Tokens
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.resolve.chat import chat_of
from orchestrator.resolve.prompts import speaking, spoken
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.rewards.config import RewardSpec
from orchestrator.rewards.scorer import Answer, Scorer, weighted
from orchestrator.train.engines.engine import Engine
from orchestrator.train.rollouts.advantages import Advantages, advantages
from orchestrator.train.rollouts.kept import KeptRollouts
from orchestrator.train.rollouts.made import Rollout, Scored, Seconds
from orchestrator.train.rollouts.prompts import Prompt, prompts_at, prompts_of_set
from orchestrator.train.rollouts.reward_model import RewardModel
from orchestrator.train.rollouts.sampler import AnswerSampler, OwnSampler
from orchestrator.train.task import Task
from workloads.model.answers import Drawn
from workloads.model.dropout import KEYS, row_keys
from workloads.model.masks import REAL
from workloads.objectives.rewarded import ADVANTAGE, COUNTED, DRAWN, SAMPLED, TEMPERATURE, WEIGHT, Rewarded
from workloads.objectives.sampled import IGNORE
from workloads.workload import Batch, Ended, Workload


@dataclass
class Rollouts:
    """Makes the rollouts of steps on one rank. All ranks call each method together.

    Attributes:
        sampler: generates answers.
        decode: returns the text of token ids, without special tokens.
        prompt_text: the same for a prompt, with special tokens.
        models: reward models, by the names of their rewards.
        seconds: of the last rollout, see `Seconds`.
    """

    spec: JobSpec
    workload: Workload
    layout: Layout
    context: WorkerContext
    sampler: AnswerSampler
    decode: Callable[[Sequence[int]], str]
    prompt_text: Callable[[Sequence[int]], str]
    models: Mapping[str, RewardModel] = field(default_factory=dict)
    roots: Sequence[str] = ()
    seconds: Seconds = field(default_factory=Seconds)

    def __post_init__(self) -> None:
        assert self.spec.rollout is not None
        assert isinstance(self.workload.objective, Rewarded)
        self._asked = self.spec.rollout
        self._objective = self.workload.objective
        self._rewards: list[RewardSpec] = self.spec.rewards
        self._scorer = Scorer(self._rewards, self.roots)
        self._kept: KeptRollouts | None = None
        self._waiting: list[Rollout] = []

    def close(self) -> None:
        """End the processes that compute rewards."""
        self._scorer.close()
        if self._kept is not None:
            self._kept.close()

    def prompts(self, batches: Batches, position: int, count: int) -> list[Prompt]:
        """Return the prompts at positions [position, position + count)."""
        return prompts_at(batches, position, count, self._room)

    @property
    def _room(self) -> int:
        """Maximum tokens of a prompt: an answer of any length fits after it."""
        return self.spec.data.sequence_length - self._asked.max_tokens

    def keep(self, step: int, rollout: Rollout, task: Task) -> None:
        """Keep the rollouts of a step as text, if the job asks for it."""
        is_due = step == 1 or step % self._asked.keep_every == 0
        if not (is_due and task.commit and self.context.rank_info.rank == 0):
            return
        if self._kept is None:
            self._kept = KeptRollouts(task.run)
        self._kept.add(step, [self.prompt_text(prompt.tokens) for prompt in rollout.prompts], rollout)

    def evaluate(
        self,
        engine: Engine,
        step: int,
        name: str,
        read: SampleReader,
        most: int | None,
        goes_on: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Return the metrics of the most likely answer to each prompt of a held-out set.

        Args:
            engine: has the weights.
            step: steps done.
            name: the name of the set.
            read: the prompts of the set.
            most: maximum number of prompts; None for all.
            goes_on: asked between global batches; False ends the evaluation, which then returns None.
        """
        self.sampler.take(engine)
        count = len(read) if most is None else min(len(read), most)
        at_once = self._asked.together * self.layout.world
        self.context.begin_work(f"answers to {name} after step {step}", "batches", -(-count // at_once))
        answers: list[Scored] = []
        for first in range(0, count, at_once):
            if not goes_on():
                return None
            self.context.set_waiting(False)
            numbers = range(first, min(first + at_once, count))
            prompts = prompts_of_set(read, numbers, self._room)
            found = self.answers(step, prompts, [[number] for number in numbers], is_greedy=True)
            answers += [answer for each in found for answer in each]
            self.context.set_waiting(True)
        return self._metrics_of(answers)

    def rows(self, engine: Engine, step: int, prompts: Sequence[list[Prompt]]) -> Rollout:
        """Return what the step after `step` steps trains on.

        Args:
            engine: has the weights.
            step: steps done.
            prompts: if a rollout begins with this step, the prompts of each of its steps; else they are not read.
        """
        if step % self._asked.steps == 0:
            self._waiting = self._make(engine, step, prompts)
        return self._waiting.pop(0)

    def _make(self, engine: Engine, step: int, prompts: Sequence[list[Prompt]]) -> list[Rollout]:
        """Return the rollouts of all steps that learn from the present weights' answers."""
        self.seconds = Seconds()
        started = time.perf_counter()
        self.sampler.take(engine)
        self.seconds.transfer = time.perf_counter() - started
        made = [self._of_step(step + number, each) for number, each in enumerate(prompts)]
        for rollout in made[1:]:
            # What later steps compare with: the probabilities under the weights that generated the answers, computed
            # as those steps compute them.
            then = engine.token_log_probabilities(rollout.batches)
            for batch, values in zip(rollout.batches, then, strict=True):
                batch[SAMPLED] = values.float().cpu()
        seconds = {
            "transfer_seconds": round(self.seconds.transfer, 6),
            "generate_seconds": round(self.seconds.generate, 6),
            "reward_seconds": round(self.seconds.reward, 6),
        }
        made[0].metrics.update(seconds)
        return made

    def _of_step(self, step: int, prompts: list[Prompt]) -> Rollout:
        group = self._asked.group
        numbers = [[prompt.number * group + k for k in range(group)] for prompt in prompts]
        answers = self.answers(step, prompts, numbers)
        rewards = np.array([[answer.reward for answer in each] for each in answers])
        found = advantages(rewards, self._objective.baseline, self._objective.scale_rewards)
        mine = self._my_rows(len(prompts) * group)
        return Rollout(
            batches=[self._batch(prompts, answers, found, rows) for rows in mine],
            digest=self._digest(prompts, answers, mine),
            metrics=self._metrics(answers, found),
            prompts=prompts,
            answers=answers,
        )

    def answers(
        self, step: int, prompts: list[Prompt], numbers: list[list[int]], is_greedy: bool = False
    ) -> list[list[Scored]]:
        """Return the answers to all prompts, with their rewards. Each rank generates its share.

        Args:
            step: steps done.
            prompts: the prompts.
            numbers: the number of each answer, see `AnswerSampler.answers`.
            is_greedy: take the most likely tokens.
        """
        together = self._asked.together
        units = [slice(first, first + together) for first in range(0, len(prompts), together)]
        rank, world = self.context.rank_info.rank, self.layout.world
        mine: list[tuple[int, list[list[Drawn]]]] = []
        started = time.perf_counter()
        for number in range(rank, len(units), world):
            unit = units[number]
            tokens = [prompt.tokens for prompt in prompts[unit]]
            mine.append((number, self.sampler.answers(tokens, numbers[unit], is_greedy)))
        self.context.progressed()
        self.seconds.generate += time.perf_counter() - started
        started = time.perf_counter()
        asked = [(prompts[units[number]], drawn) for number, drawn in mine]
        scored = self._scored(step, asked)
        self.seconds.reward += time.perf_counter() - started
        self.context.set_waiting(True)  # for ranks with longer answers or slower rewards
        everyone = gather_json([[number, found] for (number, _), found in zip(mine, scored, strict=True)])
        self.context.set_waiting(False)
        by_unit = {number: found for each in everyone for number, found in each}
        return [
            [_scored_of(answer) for answer in each]
            for number in range(len(units))
            for each in by_unit[number]
        ]

    def _scored(
        self, step: int, asked: list[tuple[list[Prompt], list[list[Drawn]]]]
    ) -> list[list[list[Any]]]:
        """Return the answers of this rank's units with their rewards, as JSON."""
        texts = [
            [[self.decode(answer.tokens) for answer in answers] for answers in drawn] for _, drawn in asked
        ]
        answers = [
            Answer(
                step=step,
                prompt_number=prompt.number,
                k=k,
                prompt=self.prompt_text(prompt.tokens),
                text=text,
                tokens=len(drawn.tokens),
                columns=prompt.columns,
            )
            for (prompts, all_drawn), of_unit in zip(asked, texts, strict=True)
            for prompt, of_prompt, each in zip(prompts, all_drawn, of_unit, strict=True)
            for k, (drawn, text) in enumerate(zip(of_prompt, each, strict=True))
        ]
        found = self._scorer.score(answers)
        for line in [*map(str, self._scorer.failures), *self._scorer.notes]:
            print(f"reward: {line}", file=sys.stderr)  # goes to the rank's log
        self._scorer.notes.clear()
        for name, model in self.models.items():
            values = [
                model.score([[*prompt.tokens, *answer.tokens] for answer in of_prompt])
                for prompts, all_drawn in asked
                for prompt, of_prompt in zip(prompts, all_drawn, strict=True)
            ]
            for scores_of_answer, value in zip(found, itertools.chain(*values), strict=True):
                scores_of_answer[name] = value
        totals = weighted(self._rewards, found)
        scores = iter(zip((answer.text for answer in answers), found, totals, strict=True))
        return [
            [[[*answer, *next(scores)] for answer in of_prompt] for of_prompt in all_drawn]
            for _, all_drawn in asked
        ]

    def _my_rows(self, rows: int) -> list[range]:
        """Return the rows of this rank's micro-batches, of all `rows` of the step."""
        coordinate = self.layout.coordinate(self.context.rank_info.rank)
        mine = slices(0, rows, coordinate["dp"], self.layout.dp, self.layout.micro_batch)
        return [range(first, first + count) for first, count in mine]

    def _batch(
        self, prompts: list[Prompt], answers: list[list[Scored]], found: Advantages, rows: range
    ) -> Batch:
        """Return a micro-batch of rows; see `workloads.objectives.rewarded`."""
        length = self.spec.data.sequence_length
        group = self._asked.group
        size = len(rows)
        padding = self.workload.vocabulary.padding
        tokens = np.full((size, length), padding, dtype=np.int64)
        labels = np.full((size, length), IGNORE, dtype=np.int64)
        real = np.zeros((size, length), dtype=bool)
        floats = {
            name: np.zeros((size, length), dtype=np.float32) for name in (ADVANTAGE, WEIGHT, COUNTED, DRAWN)
        }
        for at, row in enumerate(rows):
            number, k = divmod(row, group)
            prompt = prompts[number].tokens
            drawn = answers[number][k].drawn
            whole = [*prompt, *drawn.tokens]
            tokens[at, : len(whole)] = whole
            real[at, : len(whole)] = True
            # A label stands where the model predicts it: one place before its token.
            places = slice(len(prompt) - 1, len(whole) - 1)
            labels[at, places] = drawn.tokens
            floats[DRAWN][at, places] = drawn.log_probabilities
            if found.is_counted[number, k]:
                floats[ADVANTAGE][at, places] = found.values[number, k]
                self._weigh(floats[WEIGHT][at, places], floats[COUNTED][at, places])
        batch: Batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        batch |= {name: torch.from_numpy(values) for name, values in floats.items()}
        if self._asked.temperature != 1.0:
            batch[TEMPERATURE] = torch.full((size,), self._asked.temperature)
        if self.workload.config.moe:
            batch[REAL] = torch.from_numpy(real)
        if self.spec.workload.draws:
            first = prompts[0].number * group + rows.start
            batch[KEYS] = row_keys(self.spec.seed, first, size)
        return batch

    def _weigh(self, weight: np.ndarray, counted: np.ndarray) -> None:
        """Fill the weights of an answer's tokens, and what they add to the number that the loss is divided by."""
        loss_type = self._objective.loss_type
        if loss_type == "dapo":
            weight[:] = 1.0
            counted[:] = 1.0
            return
        weight[:] = 1.0 / (len(weight) if loss_type == "grpo" else self._asked.max_tokens)
        counted[0] = 1.0

    def _digest(self, prompts: list[Prompt], answers: list[list[Scored]], mine: list[range]) -> int:
        """Return the sum of the digests of this rank's rows: of each prompt once, and of each answer and its reward."""
        coordinate = self.layout.coordinate(self.context.rank_info.rank)
        if coordinate["pp"] or coordinate["cp"] or coordinate["tp"]:
            return 0
        group = self._asked.group
        digests = []
        for row in (row for rows in mine for row in rows):
            number, k = divmod(row, group)
            prompt, answer = prompts[number], answers[number][k]
            ids = np.array(answer.drawn.tokens, dtype=np.int64)
            reward = int(np.float64(answer.reward).view(np.int64))
            digests.append(receipt.digest(prompt.number * group + k, reward, ids))
            digests += [prompt.digest] if k == 0 else []
        return receipt.add(digests)

    def _metrics(self, answers: list[list[Scored]], found: Advantages) -> dict[str, float]:
        return {
            **self._metrics_of([answer for each in answers for answer in each]),
            "reward_deviation": found.deviation,
            "without_signal": found.without_signal,
        }

    def _metrics_of(self, answers: Sequence[Scored]) -> dict[str, float]:
        """Return the means over answers. Those of rewards leave out answers without one."""
        lengths = [len(answer.drawn.tokens) for answer in answers]
        rewards = np.array([answer.reward for answer in answers])
        found = {
            "reward": _mean(rewards),
            "answer_tokens": float(np.mean(lengths)),
            "unfinished": float(np.mean([not answer.drawn.ended for answer in answers])),
            "entropy": sum(answer.drawn.entropy for answer in answers) / sum(lengths),
        }
        if any(reward.on_error == "skip" for reward in self._rewards):
            found["unscored"] = float(np.isnan(rewards).mean())
        if len(self._rewards) > 1:
            for spec in self._rewards:
                found[f"reward_{spec.title}"] = _mean(
                    np.array([each.rewards[spec.title] for each in answers])
                )
        return {name: value for name, value in found.items() if not np.isnan(value)}


def _mean(values: np.ndarray) -> float:
    """Return the mean without NaN; NaN if there is nothing else."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if there.size else float("nan")


def _scored_of(data: list[Any]) -> Scored:
    """Restore an answer from parsed JSON, see `Rollouts._scored`."""
    tokens, log_p, entropy, ended, text, rewards, reward = data
    return Scored(Drawn(tokens, log_p, entropy, ended), text, rewards, reward)


def rollouts_of(
    inputs: TrainingInputs,
    tokens: Tokens,
    layout: Layout,
    device: Device,
    context: WorkerContext,
    roots: Sequence[str] = (),
) -> Rollouts | None:
    """Return what makes the rollouts of a job; None if its objective does not learn from rewards.

    Args:
        inputs: the job's workload and samples.
        tokens: the prepared data, with the tokenizer.
        layout: how the ranks divide the work.
        device: this rank's device.
        context: this rank's number, and its connection to the controller.
        roots: folders with the user's own code.

    Raises:
        InputError: if a reward cannot be computed here.
    """
    spec = inputs.job.spec
    asked = spec.rollout
    if asked is None:
        return None
    tokenizer = tokens.tokenizer()
    chat = chat_of(spec.data, spec.workload.objective, tokens)
    workload = inputs.workload
    generation = speaking(workload, chat).generation.ending(workload.vocabulary.eos)
    sampler = OwnSampler(
        workload,
        device,
        seed=spec.seed,
        asked=asked,
        ends=generation.ends,
        ended=_stops(tokenizer, asked.stop),
    )
    return Rollouts(
        spec=spec,
        workload=workload,
        layout=layout,
        context=context,
        sampler=sampler,
        decode=lambda ids: spoken(tokenizer, ids, chat),
        prompt_text=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        models={
            reward.title: RewardModel(reward.model, f"rewards.{number}.model", tokens, device)
            for number, reward in enumerate(spec.rewards)
            if reward.model
        },
        roots=roots,
    )


def _stops(tokenizer: Tokenizer, stop: Sequence[str]) -> Ended | None:
    """Return whether an answer's tokens contain a text that ends it; None without such texts."""
    if not stop:
        return None
    # A token has at least a byte, so that the last tokens hold a text that has just become complete.
    last = max(len(text.encode()) for text in stop) + 4

    def ended(tokens: Sequence[int]) -> bool:
        text = tokenizer.decode(list(tokens[-last:]), skip_special_tokens=True)
        return any(each in text for each in stop)

    return ended
