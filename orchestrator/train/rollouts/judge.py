"""Rewards for generated answers: those that processes compute, and those of reward models on the rank."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.rewards.config import RewardSpec
from orchestrator.rewards.scorer import Answer, Scorer, weighted
from orchestrator.train.rollouts.made import Scored
from orchestrator.train.rollouts.prompts import Prompt
from orchestrator.train.rollouts.reward_model import RewardModel
from workloads.model.answers import Drawn


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

    def close(self) -> None:
        """End the processes that compute rewards."""
        self._scorer.close()

    def score(
        self,
        step: int,
        asked: Sequence[tuple[Prompt, list[Drawn]]],
        progressed: Callable[[], object] = lambda: None,
    ) -> list[list[Scored]]:
        """Return the answers to each prompt with their rewards.

        Args:
            step: steps done.
            asked: prompts with the answers to each: units of `together` prompts, and perhaps a last one with fewer.
            progressed: called after each reward of an answer, and after each unit of a reward model.

        Raises:
            InputError: if a reward fails whose `on_error` is stop, or a sum of rewards is too large.
        """
        answers: list[Answer] = []
        for prompt, drawn in asked:
            text = self.prompt_text(prompt.tokens)
            answers += [
                Answer(
                    step=step,
                    prompt_number=prompt.number,
                    k=k,
                    prompt=text,
                    text=self.decode(each.tokens),
                    tokens=len(each.tokens),
                    columns=prompt.columns,
                )
                for k, each in enumerate(drawn)
            ]
        rewards = self._scorer.score(answers, progressed)
        for number, name in enumerate(reward.title for reward in self.rewards):
            if name not in self.models:
                continue
            values: list[float] = []
            for first in range(0, len(asked), self.together):
                of_unit = asked[first : first + self.together]
                values += self.models[name].score(
                    [[*prompt.tokens, *each.tokens] for prompt, drawn in of_unit for each in drawn]
                )
                progressed()
            for answer, of_answer, value in zip(answers, rewards, values, strict=True):
                of_answer[name] = self._scorer.of_model(number, answer, value)
        for line in [*map(str, self._scorer.failures), *self._scorer.notes]:
            print(f"reward: {line}", file=sys.stderr)  # goes to the rank's log
        self._scorer.notes.clear()
        totals = weighted(self.rewards, rewards)
        scored = (
            Scored(each, answer.text, of_answer, total)
            for each, answer, of_answer, total in zip(
                itertools.chain.from_iterable(drawn for _, drawn in asked),
                answers,
                rewards,
                totals,
                strict=True,
            )
        )
        return [list(itertools.islice(scored, len(drawn))) for _, drawn in asked]

    def metrics(self, answers: Sequence[Scored]) -> dict[str, float]:
        """Return the means over answers. Means of rewards leave out answers without a reward."""
        lengths = [len(answer.drawn.tokens) for answer in answers]
        rewards = np.array([answer.reward for answer in answers])
        found = {
            "reward": _mean(rewards),
            "answer_tokens": float(np.mean(lengths)),
            "unfinished": float(np.mean([not answer.drawn.ended for answer in answers])),
            "entropy": sum(answer.drawn.entropy for answer in answers) / sum(lengths),
        }
        if any(reward.on_error == "skip" for reward in self.rewards):
            found["unscored"] = float(np.isnan(rewards).mean())
        if len(self.rewards) > 1:
            for spec in self.rewards:
                found[f"reward_{spec.title}"] = _mean(
                    np.array([each.rewards[spec.title] for each in answers])
                )
        return {name: value for name, value in found.items() if not np.isnan(value)}


def _mean(values: np.ndarray) -> float:
    """Return the mean without NaN; NaN if there is nothing else."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if there.size else float("nan")
