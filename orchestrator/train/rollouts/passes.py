"""How often at least one of several answers to a prompt is right (pass@k)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.config.metric_names import pass_at
from orchestrator.train.rollouts.rollout_data import Scored

RIGHT = 1.0
"""The smallest reward of an answer that is right."""


@dataclass(frozen=True)
class PassSpec:
    """What is measured.

    Attributes:
        answers: answers that are drawn to each prompt.
        sizes: the values of k, none larger than `answers`.
        reward: the name of the reward that says whether an answer is right.
    """

    answers: int
    sizes: Sequence[int]
    reward: str

    def is_right(self, answer: Scored) -> bool:
        """Return whether an answer is right. One without a reward is not."""
        return answer.rewards[self.reward] >= RIGHT

    def metrics(self, right: Sequence[int]) -> dict[str, float]:
        """Return the mean of pass@k over prompts, by name. `right` has the number of right answers to each prompt."""
        return {
            pass_at(k): sum(pass_probability(self.answers, count, k) for count in right) / max(len(right), 1)
            for k in self.sizes
        }


def pass_probability(answers: int, right: int, k: int) -> float:
    """Return the probability that k of some answers, drawn without replacement, contain a right one.

    This is the unbiased estimate of pass@k (Chen et al. 2021, "Evaluating large language models trained on code",
    equation 1).

    Args:
        answers: the number of answers.
        right: how many of them are right.
        k: how many are drawn.
    """
    # Whole numbers: comb(answers - right, k) is 0 if fewer than k answers are wrong, so the result is exactly 1.
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)
