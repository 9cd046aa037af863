"""Advantages: how much better an answer is than others to its prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_DEVIATION = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does, so that equal rewards give no advantage."""


@dataclass(frozen=True)
class Advantages:
    """The advantages of a step's answers.

    Attributes:
        values: fp64 [prompts, group]; 0 where there is no reward.
        is_counted: whether an answer has a reward, bool [prompts, group].
        deviation: mean over prompts of the standard deviation within the group.
        without_signal: share of prompts all of whose answers have the same reward, so that nothing is learnt.
    """

    values: np.ndarray
    is_counted: np.ndarray
    deviation: float
    without_signal: float


def advantages(rewards: np.ndarray, baseline: str, scale: str = "none") -> Advantages:
    """Return the advantages of answers.

    Args:
        rewards: fp64 [prompts, group]; NaN for an answer that is left out.
        baseline: "group" subtracts the mean of the group (GRPO), "leave_one_out" the mean of the other answers (RLOO).
        scale: what advantages are divided by: the standard deviation of the "group" or of the "batch", or "none".
    """
    is_counted = ~np.isnan(rewards)
    # Answers without a reward (a reward that failed) leave the group, or a 0 for them would shift the others'
    # baseline.
    count = is_counted.sum(1, keepdims=True)
    # [prompts, 1]; fp64 throughout: rewards of a group may differ by less than fp32 keeps of their size.
    total = np.where(is_counted, rewards, 0.0).sum(1, keepdims=True)
    mean = total / np.maximum(count, 1)
    centred = np.where(is_counted, rewards - mean, 0.0)
    # Of n values with mean m, the mean of the others is (n m - r) / (n - 1), so r minus it is (r - m) n / (n - 1).
    if baseline == "leave_one_out":
        centred = centred * count / np.maximum(count - 1, 1)
    group_deviation = _deviation(np.where(is_counted, rewards - mean, 0.0), count)
    if scale == "group":
        # Dividing weighs prompts whose answers are almost all right or all wrong more than others (Liu et al., 2025,
        # "Dr. GRPO").
        centred = centred / (group_deviation + MIN_DEVIATION)
    elif scale == "batch":
        # The whole global batch gives the scale, so that it does not depend on which rank has which prompt.
        # Raw rewards and not centred ones, as TRL's "batch": the deviation then includes that between prompts.
        all_rewards = rewards[is_counted]
        batch_deviation = float(all_rewards.std(ddof=1)) if len(all_rewards) > 1 else 0.0
        centred = centred / (batch_deviation + MIN_DEVIATION)
    return Advantages(
        values=centred,
        is_counted=is_counted,
        deviation=float(group_deviation.mean()),
        without_signal=float((np.abs(group_deviation) < 1e-8).mean()),
    )


def _deviation(centred: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the standard deviation of each group, with n - 1 in the denominator, [prompts, 1]."""
    result: np.ndarray = np.sqrt((centred**2).sum(1, keepdims=True) / np.maximum(count - 1, 1))
    return result
