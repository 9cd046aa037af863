"""The rows that a step trains on: prompts with their answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from orchestrator.data.samples import receipt
from orchestrator.train.rollouts.advantages import Advantages
from orchestrator.train.rollouts.config import RolloutSpec
from orchestrator.train.rollouts.prompts import Prompt
from orchestrator.train.rollouts.rollout_data import Scored
from workloads.model.dropout import KEYS, ROW_TOKENS, row_keys
from workloads.model.exact_answers import Text
from workloads.model.masks import REAL
from workloads.objectives.rewarded import (
    ADVANTAGE,
    COUNTED,
    DRAWN,
    SAMPLED,
    TEMPERATURE,
    WEIGHT,
    Rewarded,
)
from workloads.objectives.sampled import IGNORE
from workloads.workload import Batch


@dataclass(frozen=True)
class Rows:
    """Lays out the rows of a step.

    Attributes:
        objective: the objective.
        spec: how answers are generated.
        length: tokens of a row.
        has_experts: whether the model routes tokens, which then needs to know the padding.
        dropout_seed: the seed of the rows' dropout; None if the model draws nothing.
    """

    objective: Rewarded
    spec: RolloutSpec
    length: int
    has_experts: bool
    dropout_seed: int | None

    def batch(
        self,
        prompts: list[Prompt],
        answers: list[list[Scored]],
        step_advantages: Advantages,
        *,
        rows: range,
        is_stale: bool,
    ) -> Batch:
        """Return a micro-batch of rows; see `workloads.objectives.rewarded`.

        If the answers are stale, earlier weights than those of the rollout generated them, and the loss compares with
        the log-probabilities that they had then.

        Args:
            prompts: of the step.
            answers: to each of them.
            step_advantages: of all answers, [prompts, group].
            rows: numbers of the rows among those of the step: row r is answer r % group to prompt r // group.
            is_stale: whether earlier weights generated the answers.
        """
        group = self.spec.group
        size = len(rows)
        places = [divmod(row, group) for row in rows]
        texts = [Text(prompts[number].tokens, answers[number][k].drawn.tokens) for number, k in places]
        batch = self.of_texts(texts, size)
        # [B, L] each, fp32: zero where nothing is predicted, so that sums over a row need no mask.
        floats = {
            name: np.zeros((size, self.length), dtype=np.float32)
            for name in (ADVANTAGE, WEIGHT, COUNTED, DRAWN)
        }
        for index, (number, k) in enumerate(places):
            label_positions = positions_of_labels(texts[index])
            floats[DRAWN][index, label_positions] = answers[number][k].drawn.log_probabilities
            if step_advantages.is_counted[number, k]:
                floats[ADVANTAGE][index, label_positions] = step_advantages.values[number, k]
                self._weigh(floats[WEIGHT][index, label_positions], floats[COUNTED][index, label_positions])
        batch |= {name: torch.from_numpy(values) for name, values in floats.items()}
        if is_stale:
            batch[SAMPLED] = batch[DRAWN]
        if self.dropout_seed is not None:
            first = prompts[0].number * group + rows.start
            batch[KEYS] = row_keys(self.dropout_seed, first, size)
            batch[ROW_TOKENS] = torch.tensor([len(text.prompt) + len(text.answer) for text in texts])
        return batch

    def of_texts(self, texts: Iterable[Text | None], size: int) -> Batch:
        """Return what a forward pass reads of `size` rows, from their texts; None is a row of padding.

        Args:
            texts: of the rows; None is a row of padding.
            size: number of rows.
        """
        tokens = np.full((size, self.length), self.objective.vocabulary.padding, dtype=np.int64)
        labels = np.full((size, self.length), IGNORE, dtype=np.int64)
        real = np.zeros((size, self.length), dtype=bool)
        for index, text in enumerate(texts):
            if text is None:
                continue
            row_tokens = [*text.prompt, *text.answer]
            tokens[index, : len(row_tokens)] = row_tokens
            real[index, : len(row_tokens)] = True
            labels[index, positions_of_labels(text)] = text.answer
        batch: Batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if self.spec.temperature != 1.0:
            batch[TEMPERATURE] = torch.full((size,), self.spec.temperature)
        if self.has_experts:
            batch[REAL] = torch.from_numpy(real)
        return batch

    def digest(
        self, prompts: list[Prompt], answers: list[list[Scored]], rows: Iterable[int], version: int
    ) -> int:
        """Return the sum of the receipt digests of rows: of each prompt once, and of each answer and its reward.

        With staleness, an answer counts with the version that generated it.

        Args:
            prompts: of the step.
            answers: to each of them.
            rows: numbers of the rows.
            version: steps done by the weights that generated the answers.
        """
        group = self.spec.group
        digests = []
        versions = [version] if self.spec.staleness else []
        for row in rows:
            number, k = divmod(row, group)
            prompt = prompts[number]
            answer = answers[number][k]
            ids = np.array([*answer.drawn.tokens, *versions], dtype=np.int64)
            # The bits of the reward, so that a receipt notices any difference.
            reward = int(np.float64(answer.reward).view(np.int64))
            digests.append(receipt.digest(prompt.number * group + k, reward, ids))
            digests += [prompt.digest] if k == 0 else []
        return receipt.add(digests)

    def _weigh(self, weight: np.ndarray, counted: np.ndarray) -> None:
        """Fill the weights of an answer's tokens, and what they add to the number that the loss is divided by."""
        loss_type = self.objective.loss_type
        if loss_type == "dapo":
            weight[:] = 1.0
            counted[:] = 1.0
            return
        # The division by the number of answers follows over the global batch: `counted` adds one for each answer.
        weight[:] = 1.0 / (len(weight) if loss_type == "grpo" else self.spec.max_tokens)
        counted[0] = 1.0


def positions_of_labels(text: Text) -> slice:
    """Return the positions of a row that predict the tokens of the answer, each one before its token."""
    return slice(len(text.prompt) - 1, len(text.prompt) + len(text.answer) - 1)
