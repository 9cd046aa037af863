"""What a job may say of rewards."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from orchestrator.config.validation_messages import input_error
from orchestrator.rewards.config import Rewards, RewardSpec


class Part(BaseModel):
    """The part of a job file that has rewards."""

    rewards: Rewards


def read(*rewards: dict[str, Any]) -> list[RewardSpec]:
    return Part(rewards=list(rewards)).rewards  # type: ignore[arg-type]


def refusal(*rewards: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        read(*rewards)
    return str(input_error(caught.value, "job.yaml", Part))


EXACT = {"kind": "exact_match"}


def test_what_is_left_out_follows_from_the_rest() -> None:
    rewards = read(
        EXACT,
        {"own": "style:politeness"},
        {"model": "runs/reward"},
        {"kind": "unit_tests"},
        {"kind": "math", "column": "solution", "name": "value"},
        {"kind": "length", "length": {"most": 100}},
        {"kind": "regex", "pattern": "a"},
    )
    names = ["exact_match", "politeness", "model", "unit_tests", "value", "length", "regex"]
    assert [reward.title for reward in rewards] == names
    assert [reward.read_column for reward in rewards] == ["answer", "", "", "tests", "solution", "", ""]
    first = rewards[0]
    assert (first.weight, first.timeout, first.memory, first.on_error) == (1.0, 5.0, 1.0, "stop")
    assert read(*(reward.model_dump() for reward in rewards)) == rewards


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ({}, "has none of kind, own and model; give it exactly one of them"),
        ({"weight": 2}, "has none of kind, own and model"),
        (EXACT | {"own": "a:b"}, "has kind and own; give it exactly one of them"),
        ({"own": "a:b", "model": "runs/a"}, "has own and model; give it exactly one of them"),
        (
            {"kind": "exact"},
            "rewards.0.kind: should be 'exact_match', 'regex', 'math', 'unit_tests' or 'length'",
        ),
        ({"own": "politeness"}, "rewards.0.own"),
        ({"model": ""}, "rewards.0.model"),
        (EXACT | {"weight": 0}, "weight 0 changes nothing; remove the reward"),
        (EXACT | {"weight": float("inf")}, "rewards.0.weight: should be a finite number"),
        (EXACT | {"weight": float("nan")}, "rewards.0.weight: should be a finite number"),
        (EXACT | {"weight": True}, "rewards.0.weight: should not be true or false"),
        (EXACT | {"timeout": 0}, "rewards.0.timeout: should be greater than 0"),
        (EXACT | {"memory": 0}, "rewards.0.memory: should be greater than 0"),
        (EXACT | {"memory": "1GB"}, "rewards.0.memory: should be a number"),
        (EXACT | {"on_error": "ignore"}, "rewards.0.on_error: should be 'stop', 'zero' or 'skip'"),
        (EXACT | {"name": "a b"}, "rewards.0.name: is not a name"),
        (EXACT | {"patern": "a"}, "rewards.0.patern: unknown key; did you mean 'pattern'?"),
        (EXACT | {"most": 10}, "did you mean rewards.0.length.most?"),
        (
            {"own": "a:b", "column": "answer"},
            "column is only for kind: exact_match and kind: math and kind: unit_tests, but this is own; remove it",
        ),
        (
            {"kind": "regex", "pattern": "a", "column": "answer"},
            "column is only for kind: exact_match and kind: math and kind: unit_tests, but this is kind: regex",
        ),
        (
            {"model": "runs/a", "pattern": "(a)"},
            "pattern is only for kind: exact_match and kind: math and kind: regex",
        ),
        ({"kind": "math", "ignore_case": True}, "ignore_case is only for kind: exact_match and kind: regex"),
        (
            {"kind": "math", "strip": False},
            "strip is only for kind: exact_match, but this is kind: math; remove it",
        ),
        (
            EXACT | {"length": {"most": 1}},
            "length is only for kind: length, but this is kind: exact_match; remove it",
        ),
        ({"model": "runs/a", "timeout": 1}, "timeout is for kind and own, but this is model; remove it"),
        ({"model": "runs/a", "memory": 2}, "memory is for kind and own, but this is model; remove it"),
        ({"kind": "length"}, "kind: length has no length; give it one, such as length: {most: 200}"),
        ({"kind": "length", "length": {}}, "bounds nothing; give it most or least"),
        ({"kind": "length", "length": {"least": 3, "most": 2}}, "least 3 is above most 2; swap them"),
        ({"kind": "regex"}, "kind: regex has no pattern; give it one"),
        ({"kind": "regex", "pattern": "("}, "pattern is not a regular expression (missing ), unterminated"),
        (EXACT | {"pattern": "a"}, "pattern has 0 groups, and kind: exact_match compares one"),
        ({"kind": "math", "pattern": "(a)(b)"}, "pattern has 2 groups, and kind: math compares one"),
    ],
)
def test_what_is_refused(reward: dict[str, Any], told: str) -> None:
    line = refusal(reward)
    assert told in line
    assert "\n" not in line


def test_names_are_unique() -> None:
    told = "two rewards are called exact_match; give one of them another name"
    assert told in refusal(EXACT, EXACT | {"column": "other"})
    assert "two rewards are called f" in refusal({"own": "a:f"}, {"own": "b:f"})
    assert len(read(EXACT, EXACT | {"name": "other"})) == 2


@pytest.mark.parametrize("name", ["deviation", "seconds"])
def test_no_mean_of_a_reward_takes_the_place_of_another_field(name: str) -> None:
    told = f"a reward is called {name}, and reward_{name} of each row is something else; rename it"
    assert told in refusal(EXACT, EXACT | {"name": name})
    assert told in refusal(EXACT, {"own": f"mine:{name}"})
    assert len(read(EXACT | {"name": name})) == 1  # a single reward has no mean of its own
