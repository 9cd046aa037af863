"""Rewards for generated answers: those that processes compute, and those of reward models on the rank."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.config.errors import InputError
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.rewards.config import RewardSpec
from orchestrator.rewards.scorer import Answer, Scorer, weighted
from orchestrator.train.rollouts.prompts import Prompt
from orchestrator.train.rollouts.reward_model import RewardModel
from orchestrator.train.rollouts.rollout_data import Scored
from workloads.model.answers import Drawn

UNSCORED_STEPS = 3
"""After so many steps in a row without any reward, nothing will come of the run."""


@dataclass
class Judge:
    """Rewards answers.

    Attributes:
        rewards: the rewards of the job.
        decode: returns the text of token ids, without special tokens.
        prompt_text: the same for a prompt, with special tokens.
        together: prompts whose answers a reward model gets together. The ranks divide prompts into units of as many, so
            what a score is computed with does not depend on the number of ranks.
        models: reward models, by the names of their rewards.
        roots: folders with the user's own code.
    """

    rewards: Sequence[RewardSpec]
    decode: Callable[[Sequence[int]], str]
    prompt_text: Callable[[Sequence[int]], str]
    together: int
    models: Mapping[str, RewardModel] = field(default_factory=dict)
    roots: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._scorer = Scorer(self.rewards, self.roots)
        self._unscored_steps = 0

    def close(self) -> None:
        """End the processes that compute rewards."""
        self._scorer.close()

    def score(
        self,
        step: int,
        prompts_with_answers: Sequence[tuple[Prompt, list[Drawn]]],
        progressed: Callable[[], object] = lambda: None,
    ) -> list[list[Scored]]:
        """Return the answers to each prompt with their rewards.

        Args:
            step: steps done.
            prompts_with_answers: prompts with the answers to each, in units of `together` prompts. The last unit may
                have fewer.
            progressed: called after each reward of an answer, and after each unit of a reward model.

        Raises:
            InputError: if a reward fails whose `on_error` is stop, or a sum of rewards is too large.
        """
        answers: list[Answer] = []
        for prompt, drawn in prompts_with_answers:
            text = self.prompt_text(prompt.tokens)
            answers += [
                Answer(
                    step=step,
                    prompt_number=prompt.number,
                    k=k,
                    prompt=text,
                    text=self.decode(answer_drawn.tokens),
                    tokens=len(answer_drawn.tokens),
                    columns=prompt.columns,
                )
                for k, answer_drawn in enumerate(drawn)
            ]
        rewards = self._scorer.score(answers, progressed)
        for number, name in enumerate(reward.title for reward in self.rewards):
            if name not in self.models:
                continue
            values: list[float] = []
            for first in range(0, len(prompts_with_answers), self.together):
                unit = prompts_with_answers[first : first + self.together]
                values += self.models[name].score(
                    [
                        [*prompt.tokens, *answer_drawn.tokens]
                        for prompt, drawn in unit
                        for answer_drawn in drawn
                    ]
                )
                progressed()
            for answer, answer_rewards, value in zip(answers, rewards, values, strict=True):
                answer_rewards[name] = self._scorer.of_model(number, answer, value)
        for line in [*map(str, self._scorer.failures), *self._scorer.notes]:
            print(f"reward: {line}", file=sys.stderr)  # goes to the rank's log
        self._scorer.notes.clear()
        totals = weighted(self.rewards, rewards)
        scored = (
            Scored(answer_drawn, answer.text, answer_rewards, total)
            for answer_drawn, answer, answer_rewards, total in zip(
                itertools.chain.from_iterable(drawn for _, drawn in prompts_with_answers),
                answers,
                rewards,
                totals,
                strict=True,
            )
        )
        return [list(itertools.islice(scored, len(drawn))) for _, drawn in prompts_with_answers]

    def check_scored(self, answers: Sequence[Sequence[Scored]]) -> None:
        """Take note of the answers that a step trains on. All ranks call it together, with the same answers.

        Raises InputError on all ranks if `on_error: skip` has left out all answers of several steps in a row.
        """
        has_reward = any(not np.isnan(answer.reward) for each in answers for answer in each)
        self._unscored_steps = 0 if has_reward else self._unscored_steps + 1
        if self._unscored_steps < UNSCORED_STEPS:
            return
        failures = self._scorer.failures[-1:]
        failures_of_ranks = [
            problem for rank_problems in gather_json(list(map(str, failures))) for problem in rank_problems
        ]
        skipped = [reward.title for reward in self.rewards if reward.on_error == "skip"]
        raise InputError(
            f"{' or '.join(skipped)} left out all answers of {UNSCORED_STEPS} steps in a row, so that they trained "
            f"on nothing; the last one: {' '.join(failures_of_ranks[-1:]) or 'unknown'}",
            "rewards",
            "fix it, or set on_error to zero",
        )

    def metrics(self, answers: Sequence[Scored]) -> dict[str, float]:
        """Return the means over answers. Means of rewards leave out answers without a reward."""
        lengths = [len(answer.drawn.tokens) for answer in answers]
        rewards = np.array([answer.reward for answer in answers])
        means = {
            "reward": _mean(rewards),
            "answer_tokens": float(np.mean(lengths)),
            "unfinished": float(np.mean([not answer.drawn.ended for answer in answers])),
            "entropy": sum(answer.drawn.entropy for answer in answers) / sum(lengths),
        }
        if any(reward.on_error == "skip" for reward in self.rewards):
            means["unscored"] = float(np.isnan(rewards).mean())
        if len(self.rewards) > 1:
            for spec in self.rewards:
                means[f"reward_{spec.title}"] = _mean(
                    np.array([scored_answer.rewards[spec.title] for scored_answer in answers])
                )
        return {name: value for name, value in means.items() if not np.isnan(value)}


def _mean(values: np.ndarray) -> float:
    """Return the mean without NaN; NaN if there is nothing else."""
    present = values[~np.isnan(values)]
    return float(present.mean()) if present.size else float("nan")
