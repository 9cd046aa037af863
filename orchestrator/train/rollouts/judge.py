"""Rewards for generated answers: those that processes compute, and those of reward models on the rank."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        models: reward models, by the names of their rewards.
        roots: folders with the user's own code.
    """

    rewards: Sequence[RewardSpec]
    decode: Callable[[Sequence[int]], str]
    prompt_text: Callable[[Sequence[int]], str]
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
        asked: list[tuple[list[Prompt], list[list[Drawn]]]],
        progressed: Callable[[], object] = lambda: None,
    ) -> list[list[list[Any]]]:
        """Return the answers to the prompts of some units with their rewards, as JSON for `scored_of`."""
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
        found = self._scorer.score(answers, progressed)
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
        totals = weighted(self.rewards, found)
        scores = iter(zip((answer.text for answer in answers), found, totals, strict=True))
        return [
            [[[*answer, *next(scores)] for answer in of_prompt] for of_prompt in all_drawn]
            for _, all_drawn in asked
        ]

    def metrics(self, answers: Sequence[Scored]) -> dict[str, float]:
        """Return the means over answers. Those of rewards leave out answers without one."""
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


def scored_of(data: list[Any]) -> Scored:
    """Restore an answer from parsed JSON, see `Judge.score`."""
    tokens, log_p, entropy, ended, text, rewards, reward = data
    return Scored(Drawn(tokens, log_p, entropy, ended), text, rewards, reward)
