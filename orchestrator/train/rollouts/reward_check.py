"""The check of the reward models that a job names."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config.errors import InputError
from orchestrator.models.named_commit import commit_at, split_tag
from orchestrator.rewards.config import RewardSpec

OBJECTIVE = "reward"
"""The objective of a run that trains a reward model."""


def check_reward_models(rewards: Sequence[RewardSpec]) -> None:
    """Check that each reward model is a step of a run, so that every attempt uses the same weights. Raises
    InputError.
    """
    for number, reward in enumerate(rewards):
        if reward.model is None:
            continue
        run, tag = split_tag(reward.model)
        where = f"rewards.{number}.model"
        if not tag.isdecimal():
            hint = f"name its step, such as {run}@500; `orchestrator checkpoint list {run}` lists them"
            raise InputError(f"{reward.model} may mean another checkpoint later", where, hint)
        commit = commit_at(run, int(tag), where)
        objective = commit.meta.get("identity", {}).get("workload", {}).get("objective")
        if objective != OBJECTIVE:
            problem = f"{run} was trained by {objective}, and returns no reward"
            raise InputError(problem, where, "name a run whose objective is reward")
