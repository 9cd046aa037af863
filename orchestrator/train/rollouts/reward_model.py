"""A trained reward model that scores generated answers on the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orchestrator.config.errors import InputError
from orchestrator.data.store.tokens import Tokens
from orchestrator.models.named_commit import split_tag
from orchestrator.parallel.device import Device
from orchestrator.resolve.commit_model import model_of_run
from workloads.inference import with_weights
from workloads.model.generate import padded
from workloads.model.heads import ANSWER_ENDS


class RewardModel:
    """Gives each answer the number of the reward model at its last token (InstructGPT; Ouyang et al. 2022, section
    3.5).
    """

    def __init__(self, place: str, where: str, tokens: Tokens, device: Device) -> None:
        """Read a reward model.

        Args:
            place: a run directory, and the step after an @.
            where: the key of the job file, for errors.
            tokens: the prepared data of the run that is trained.
            device: this rank's device.

        Raises InputError if the model reads other tokens.
        """
        run, step = split_tag(place)
        found = model_of_run(run, int(step))
        if found.tokens.tokenizer().get_vocab() != tokens.tokenizer().get_vocab():
            problem = f"{run} has another tokenizer than the trained model"
            raise InputError(problem, where, "train a reward model with the same tokenizer")
        self._config = found.workload.config
        self._model = with_weights(found.workload, found.read, device.device, found.scheme)
        self._device = device
        self._run = run
        self._where = where

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the reward of each row, the tokens of a prompt and its answer. Rows are read in one batch.

        Raises InputError if a row has more tokens than the model has positions.
        """
        longest = max(map(len, rows))
        limit = self._config.max_positions
        if self._config.positions == "learned" and longest > limit:
            problem = f"{self._run} reads {limit} tokens, and an answer with its prompt has {longest}"
            raise InputError(problem, self._where, "lower data.sequence_length")
        tokens, real = padded(rows, self._device.device)
        places = real.sum(1, keepdim=True) - 1
        with self._device.autocast():
            output = self._model({"tokens": tokens, "padding": real, ANSWER_ENDS: places})
        return [float(value) for value in output.sentence.float().flatten()]
