"""Answers that were generated ahead: those of the next rollout, while the gang trains on the present one.

A commit has them, so that the next attempt trains on the same answers under any layout, without the earlier weights
that generated them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.reader import Reader
from orchestrator.train.rollouts.prompts import Prompt
from orchestrator.train.rollouts.shares import Share
from workloads.model.answers import Drawn

AHEAD = "rollout."
"""Prefix of the names of their tensors in a commit."""
NO_TOKEN = -1
"""Stands after the last token of an answer."""


class Pending(NamedTuple):
    """Answers that rollout workers still generate.

    Attributes:
        version: steps done by the weights that generate them.
        digests: the receipt digest of each prompt.
        steps: the number of prompts of each step of the rollout.
    """

    version: int
    digests: list[int]
    steps: list[int]

    @classmethod
    def of(cls, version: int, prompts: Sequence[Sequence[Prompt]]) -> Pending:
        """Return the pending answers to the prompts of each step.

        Args:
            version: steps done by the weights that generate.
            prompts: of each step of the rollout.
        """
        return cls(version, digests_of(prompts), list(map(len, prompts)))


@dataclass(frozen=True)
class Ahead:
    """The answers to the prompts of a rollout that has not begun yet.

    Attributes:
        version: steps done by the weights that generated them.
        digests: the receipt digest of each prompt.
        answers: the answers to each prompt.
    """

    version: int
    digests: list[int]
    answers: list[list[Drawn]]

    @classmethod
    def of(cls, pending: Pending, shares: Iterable[Share]) -> Ahead:
        """Return the answers of all ranks, whose shares came as JSON.

        Args:
            pending: what was asked for.
            shares: of each rank.
        """
        by_number = {number: answers for share in shares for number, answers in share}
        answers = [[Drawn(*drawn) for drawn in by_number[number]] for number in range(len(pending.digests))]
        return cls(pending.version, pending.digests, answers)

    def pieces(self, max_tokens: int) -> list[TensorPiece]:
        """Return the tensors of a commit, whose shapes are the same in each. `max_tokens` is the longest answer's."""
        shape = (len(self.answers), len(self.answers[0]))
        # [prompts, group, max_tokens]: of one shape in all commits, so that the room for a snapshot is known
        # beforehand.
        tokens = torch.full((*shape, max_tokens), NO_TOKEN, dtype=torch.int32)
        log_probabilities = torch.zeros(*shape, max_tokens)
        for number, prompt_answers in enumerate(self.answers):
            for k, answer in enumerate(prompt_answers):
                tokens[number, k, : len(answer.tokens)] = torch.tensor(answer.tokens, dtype=torch.int32)
                # They were fp32 numbers before they were Python's, so that no bit is lost.
                log_probabilities[number, k, : len(answer.tokens)] = torch.tensor(answer.log_probabilities)
        entropy = [[answer.entropy for answer in prompt_answers] for prompt_answers in self.answers]
        ended = [[answer.ended for answer in prompt_answers] for prompt_answers in self.answers]
        tensors = {
            "version": torch.tensor([self.version]),
            "digests": torch.tensor(self.digests),
            "tokens": tokens,
            "log_probabilities": log_probabilities,
            "entropy": torch.tensor(entropy, dtype=torch.float64),
            "ended": torch.tensor(ended),
        }
        return [full_piece(AHEAD + name, values) for name, values in tensors.items()]

    @classmethod
    def read(cls, reader: Reader) -> Ahead | None:
        """Return the answers in a commit; None if it has none. Raises CorruptCommit."""
        if f"{AHEAD}version" not in reader.manifest.tensors:
            return None
        tokens = reader.read(f"{AHEAD}tokens")
        log_probabilities = reader.read(f"{AHEAD}log_probabilities")
        # The length is not stored: no token has the number -1.
        lengths = (tokens != NO_TOKEN).sum(-1).tolist()
        entropy = reader.read(f"{AHEAD}entropy").tolist()
        ended = reader.read(f"{AHEAD}ended").tolist()
        answers = [
            [
                Drawn(
                    tokens[number, k, :length].tolist(),
                    log_probabilities[number, k, :length].tolist(),
                    entropy[number][k],
                    ended[number][k],
                )
                for k, length in enumerate(prompt_lengths)
            ]
            for number, prompt_lengths in enumerate(lengths)
        ]
        version = int(reader.read(f"{AHEAD}version"))
        return cls(version, reader.read(f"{AHEAD}digests").tolist(), answers)


class NextRollout:
    """The answers of the next rollout, between two rollouts.

    Attributes:
        ready: the answers; None during a rollout, and if none were asked for.
    """

    def __init__(self, prompts: int, group: int, max_tokens: int, *, is_writer: bool) -> None:
        """
        Args:
            prompts: the number of prompts of a rollout; 0 if nothing is generated ahead.
            group: the number of answers to each.
            max_tokens: the longest answer's.
            is_writer: whether this rank writes them into commits. One rank does.
        """
        self.ready: Ahead | None = None
        self._prompts = prompts
        self._group = group
        self._max_tokens = max_tokens
        self._is_writer = is_writer

    def take(self, prompts: Sequence[Sequence[Prompt]]) -> Ahead | None:
        """Return the answers if they are those to the prompts of each step, and forget them."""
        ready, self.ready = self.ready, None
        return ready if ready is not None and ready.digests == digests_of(prompts) else None

    def state(self) -> list[TensorPiece]:
        """Return what a commit stores."""
        return self.ready.pieces(self._max_tokens) if self.ready is not None and self._is_writer else []

    def room(self) -> list[TensorPiece]:
        """Return tensors of the sizes that a commit stores once there are answers."""
        if not self._prompts or not self._is_writer:
            return []
        empty = [[Drawn([], [], 0.0, False)] * self._group] * self._prompts
        return Ahead(0, [0] * self._prompts, empty).pieces(self._max_tokens)

    def load(self, reader: Reader) -> None:
        """Load what a commit of this run stores. Raises CorruptCommit."""
        self.ready = Ahead.read(reader)


def digests_of(prompts: Sequence[Sequence[Prompt]]) -> list[int]:
    """Return the receipt digests of the prompts of several steps."""
    return [prompt.digest for step_prompts in prompts for prompt in step_prompts]
