"""A trained reward model that scores generated answers on the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from orchestrator.config.errors import InputError
from orchestrator.data.store.tokens import Tokens
from orchestrator.models.named_commit import split_tag
from orchestrator.parallel.device import Device
from orchestrator.resolve.commit_model import model_of_run
from workloads.inference import with_weights
from workloads.model.generate import padded
from workloads.model.heads import ANSWER_ENDS

TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
"""Maximum tokens of a forward pass on a kind of device, padding included, unless a single row has more. On a CPU larger
batches leave its caches, and are slower (docs/benchmarks.md)."""


class RewardModel:
    """Gives each answer the number of the reward model at its last token (InstructGPT; Ouyang et al. 2022, section
    3.5).
    """

    def __init__(self, name: str, where: str, tokens: Tokens, device: Device) -> None:
        """Read a reward model.

        Args:
            name: a run directory, and the step after an @.
            where: the key of the job file, for errors.
            tokens: the prepared data of the run that is trained.
            device: this rank's device.

        Raises InputError if the model reads other tokens.
        """
        run, step = split_tag(name)
        reward_model = model_of_run(run, int(step))
        if reward_model.tokens.tokenizer().get_vocab() != tokens.tokenizer().get_vocab():
            problem = f"{run} has another tokenizer than the trained model"
            raise InputError(problem, where, "train a reward model with the same tokenizer")
        self._config = reward_model.workload.config
        self._model = with_weights(
            reward_model.workload, reward_model.read, device.device, reward_model.scheme
        )
        self._device = device
        self._run = run
        self._where = where

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the reward of each row, the tokens of a prompt and its answer.

        Rows of like length are read in one batch. Which ones depends on `rows` alone.

        Raises InputError if a row has more tokens than the model has positions.
        """
        longest = max(map(len, rows))
        limit = self._config.max_positions
        if self._config.positions == "learned" and longest > limit:
            problem = f"{self._run} reads {limit} tokens, and an answer with its prompt has {longest}"
            raise InputError(problem, self._where, "lower data.sequence_length")
        scores = [0.0] * len(rows)
        # The capacity of experts depends on the length of a batch.
        has_capacity = self._config.moe is not None and self._config.moe.at_length(longest) is not None
        with self._device.casting_once(), self._device.autocast():
            max_tokens = TOKENS_AT_ONCE[self._device.device.type]
            for batch in batches(list(map(len, rows)), max_tokens, has_one_length=has_capacity):
                tokens, real = padded([rows[number] for number in batch], self._device.device)
                last_tokens = real.sum(1, keepdim=True) - 1
                output = self._model({"tokens": tokens, "padding": real, ANSWER_ENDS: last_tokens})
                for number, value in zip(batch, output.sentence.float().flatten().tolist(), strict=True):
                    scores[number] = value
        return scores


def batches(lengths: Sequence[int], max_tokens: int, *, has_one_length: bool = False) -> Iterator[list[int]]:
    """Yield the indices of the rows of each batch, shortest rows first.

    Args:
        lengths: the number of tokens of each row.
        max_tokens: the maximum number of tokens of a batch, padding included, unless a single row has more.
        has_one_length: whether all rows of a batch must be equally long.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        is_full = (len(batch) + 1) * lengths[number] > max_tokens
        if batch and (is_full or (has_one_length and lengths[number] != lengths[batch[0]])):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
