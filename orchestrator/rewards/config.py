"""The rewards of a job: which rules, own functions and models score an answer, and how much each counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from orchestrator.config.object_reference import users_code
from orchestrator.config.strict import Count, Positive, StrictModel
from workloads.own.object_reference import PATTERN

WAYS = ("kind", "own", "model")
"""A reward has exactly one of these keys."""
LIMITS = ("timeout", "memory")
"""Keys that bound the process of a reward. They change no reward that is computed in time."""
OPTIONS: dict[str, tuple[str, ...]] = {
    "column": ("exact_match", "math", "unit_tests"),
    "pattern": ("exact_match", "math", "regex"),
    "ignore_case": ("exact_match", "regex"),
    "strip": ("exact_match",),
    "length": ("length",),
}
"""The options that belong to some kinds only."""
TAKEN = frozenset({"deviation", "seconds"})
"""Names whose means, as `reward_NAME`, would be fields of a row that have another meaning."""
NAME = r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,62})?$"


class LengthSpec(StrictModel):
    """The wanted length of an answer in tokens: 1.0 within it, and less outside."""

    least: Count = Field(default=0, description="fewest tokens that get 1.0")
    most: Positive | None = Field(default=None, description="most tokens that get 1.0")
    margin: Count = Field(
        default=0,
        description="tokens beyond the bounds over which the reward falls linearly to 0.0; with 0 it drops to 0.0 at "
        "the bounds",
    )

    @model_validator(mode="after")
    def it_bounds_something(self) -> LengthSpec:
        if self.most is None and not self.least:
            raise ValueError("bounds nothing; give it most or least")
        if self.most is not None and self.least > self.most:
            raise ValueError(f"least {self.least} is above most {self.most}; swap them")
        return self


class RewardSpec(StrictModel):
    """One reward: a rule (kind), your function (own), or a trained reward model (model)."""

    NO_IDENTITY: ClassVar[tuple[str, ...]] = LIMITS

    kind: Literal["exact_match", "regex", "math", "unit_tests", "length"] | None = Field(
        default=None,
        description="exact_match: equal to the column; regex: the pattern is found; math: equal in value to the "
        "column (math-verify); unit_tests: share of the column's tests that pass; length: see length",
    )
    own: str | None = Field(
        default=None,
        pattern=PATTERN,
        description="your module:function, called with prompt, answer and the columns by name",
    )
    model: str | None = Field(
        default=None, min_length=1, description="run or export of a reward model, which scores the answers"
    )
    name: str = Field(
        default="",
        pattern=NAME,
        description="its name in the metrics; unset: the kind, the function's name, or model",
    )
    weight: float = Field(default=1.0, description="factor in the sum of all rewards; negative for a penalty")
    timeout: float = Field(default=5.0, gt=0.0, le=600.0, description="seconds for one answer")
    memory: float = Field(
        default=1.0, gt=0.0, le=2.0**20, description="GiB of address space that its process may use"
    )
    on_error: Literal["stop", "zero", "skip"] = Field(
        default="stop",
        description="what a failure does: stop ends the run, zero counts 0.0, skip leaves the answer out",
    )
    column: str = Field(
        default="",
        description="exact_match, math, unit_tests: column of the prompt's row; unset: answer, or tests for "
        "unit_tests",
    )
    pattern: str | None = Field(
        default=None,
        description="regex: the pattern that must be found; exact_match, math: pattern with one group, whose last "
        "match is compared",
    )
    ignore_case: bool = Field(default=False, description="exact_match, regex: ignore upper and lower case")
    strip: bool = Field(default=True, description="exact_match: ignore white space at both ends")
    length: LengthSpec | None = Field(default=None, description="length: the wanted length")

    @property
    def title(self) -> str:
        """Its name in metrics and messages."""
        own = self.own.rpartition(":")[2] if self.own else None
        return self.name or self.kind or own or "model"

    @property
    def read_column(self) -> str:
        """The column of a prompt's row that it compares with; empty if it reads none."""
        if self.column or self.kind not in OPTIONS["column"]:
            return self.column
        return "tests" if self.kind == "unit_tests" else "answer"

    @property
    def rule(self) -> dict[str, Any]:
        """The reward as plain data, with derived values, for the process that computes it."""
        return {**self.model_dump(), "column": self.read_column}

    @model_validator(mode="after")
    def it_is_one_of_three(self) -> RewardSpec:
        ways = [key for key in WAYS if getattr(self, key) is not None]
        if len(ways) != 1:
            given = f"has {' and '.join(ways)}" if ways else "has none of kind, own and model"
            raise ValueError(f"{given}; give it exactly one of them")
        if not self.weight:
            raise ValueError("weight 0 changes nothing; remove the reward, or give it another weight")
        return self

    @model_validator(mode="after")
    def options_are_of_its_kind(self) -> RewardSpec:
        what = f"kind: {self.kind}" if self.kind else "own" if self.own else "model"
        for key, kinds in OPTIONS.items():
            if self.kind not in kinds and key not in self.at_default(key):
                places = " and ".join(f"kind: {kind}" for kind in kinds)
                raise ValueError(f"{key} is only for {places}, but this is {what}; remove it")
        if self.model is not None and (given := set(LIMITS) - self.at_default(*LIMITS)):
            raise ValueError(f"{min(given)} is for kind and own, but this is model; remove it")
        return self

    @model_validator(mode="after")
    def its_kind_has_what_it_needs(self) -> RewardSpec:
        if self.kind == "length" and self.length is None:
            raise ValueError("kind: length has no length; give it one, such as length: {most: 200}")
        if self.kind == "regex" and not self.pattern:
            raise ValueError("kind: regex has no pattern; give it one")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"pattern is not a regular expression ({error}); fix it") from None
            if self.kind != "regex" and groups != 1:
                raise ValueError(
                    f"pattern has {groups} groups, and kind: {self.kind} compares one; mark it by ( ), others by (?: )"
                )
        return self


def _names_are_clear(rewards: list[RewardSpec]) -> list[RewardSpec]:
    names = [reward.title for reward in rewards]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"two rewards are called {twice[0]}; give one of them another name")
    if len(names) > 1 and (taken := TAKEN.intersection(names)):
        name = min(taken)
        raise ValueError(
            f"a reward is called {name}, and reward_{name} of each row is something else; rename it"
        )
    return rewards


Rewards = Annotated[list[RewardSpec], AfterValidator(_names_are_clear)]
"""The rewards of a job."""


def own_rewards(rewards: Sequence[RewardSpec]) -> dict[str, str]:
    """Return the user's reward functions, each with its key."""
    return users_code(*((f"rewards.{number}.own", reward.own) for number, reward in enumerate(rewards)))
