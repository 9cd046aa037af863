"""The data of a rollout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from orchestrator.train.rollouts.prompts import Prompt
from workloads.model.answers import Drawn
from workloads.workload import Batch


@dataclass(frozen=True)
class Scored:
    """An answer with its rewards.

    Attributes:
        drawn: the answer.
        text: its text, without special tokens.
        rewards: the value of each reward, by name; NaN if it is left out.
        reward: their weighted sum.
    """

    drawn: Drawn
    text: str
    rewards: dict[str, float]
    reward: float

    def to_json(self) -> list[Any]:
        """Return plain data."""
        return [list(self.drawn), self.text, self.rewards, self.reward]

    @classmethod
    def from_json(cls, data: list[Any]) -> Scored:
        """Restore an answer from parsed JSON. The inverse of `to_json`."""
        drawn, text, rewards, reward = data
        return cls(Drawn(*drawn), text, rewards, reward)


@dataclass
class Seconds:
    """How long the parts of a rollout took on this rank, besides waiting for other ranks."""

    transfer: float = 0.0
    generate: float = 0.0
    reward: float = 0.0


@dataclass(frozen=True)
class Rollout:
    """The rollouts of a step.

    Attributes:
        batches: this rank's micro-batches.
        digest: the sum of the receipt digests of this rank's rows; 0 on ranks whose rows another rank counts.
        metrics: what the step's row says of the answers, the same on every rank.
        prompts: the prompts of the step.
        answers: the answers to each of them.
        version: steps done by the weights that generated them.
        epoch: how often the step and those before it have learned from these answers.
    """

    batches: list[Batch]
    digest: int
    metrics: dict[str, float]
    prompts: list[Prompt]
    answers: list[list[Scored]]
    version: int
    epoch: int = 1


def rate(answers: Iterable[list[Drawn]], seconds: float) -> dict[str, float]:
    """Return the field of a row that says how fast all ranks' answers were generated; empty without answers.

    Args:
        answers: of all ranks.
        seconds: of generating them.
    """
    tokens = sum(len(answer.tokens) for each in answers for answer in each)
    return {"generated_tokens_per_second": round(tokens / seconds, 3)} if tokens and seconds else {}
