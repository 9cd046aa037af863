"""Advantages by hand and as TRL computes them."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.train.rollouts.advantages import MIN_DEVIATION, advantages

NAN = float("nan")


def test_the_group_s_mean_is_the_baseline_and_its_deviation_the_scale() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    found = advantages(rewards, "group", "group")
    spread = np.sqrt(4 * 0.25 / 3)
    assert found.values[0] == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / (spread + MIN_DEVIATION))
    assert found.values[1] == pytest.approx(0.0)
    assert found.without_signal == 0.5
    assert found.deviation == pytest.approx(spread / 2)
    assert advantages(rewards, "group", "none").values[0] == pytest.approx([0.5, -0.5, -0.5, 0.5])
    whole = advantages(rewards, "group", "batch").values[0]
    assert whole == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / (rewards.std(ddof=1) + MIN_DEVIATION))


def test_scaled_advantages_are_those_of_trl() -> None:
    torch = pytest.importorskip("torch")
    rewards = np.random.default_rng(0).normal(size=(5, 6))
    theirs = torch.from_numpy(rewards)
    theirs = (theirs - theirs.mean(1, keepdim=True)) / (theirs.std(1, keepdim=True) + 1e-4)
    assert advantages(rewards, "group", "group").values == pytest.approx(theirs.numpy(), abs=1e-12)


def test_an_answer_is_compared_with_the_others_of_its_group() -> None:
    rewards = np.random.default_rng(1).normal(size=(3, 5))
    found = advantages(rewards, "leave_one_out").values
    for row in range(3):
        for place in range(5):
            others = np.delete(rewards[row], place)
            assert found[row, place] == pytest.approx(rewards[row, place] - others.mean())


def test_an_answer_without_a_reward_is_as_if_it_was_not_there() -> None:
    found = advantages(np.array([[1.0, NAN, 0.0], [NAN, NAN, NAN]]), "group", "none")
    assert found.values.tolist() == [[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]]
    assert found.is_counted.tolist() == [[True, False, True], [False, False, False]]
    alone = advantages(np.array([[3.0, NAN]]), "leave_one_out")
    assert alone.values.tolist() == [[0.0, 0.0]]
    assert np.isfinite(alone.deviation)
