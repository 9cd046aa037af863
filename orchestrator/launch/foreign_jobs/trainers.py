"""Recognise the trainer that a configuration file belongs to."""

from __future__ import annotations

from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.launch.foreign_jobs.axolotl import axolotl
from orchestrator.launch.foreign_jobs.hf_trainer import hf_trainer
from orchestrator.launch.foreign_jobs.read import Arguments
from orchestrator.launch.foreign_jobs.torchtitan import torchtitan
from orchestrator.launch.foreign_jobs.verl import verl


def whose(arguments: Arguments) -> Any:
    """Return the function that fills in a job from such keys. Raises InputError if no trainer has them."""
    if (
        "actor_rollout_ref" in arguments
        or "model.partial_pretrain" in arguments
        or ("data.train_files" in arguments and "trainer" in arguments)
    ):
        return verl
    if "base_model" in arguments:
        return axolotl
    if (
        "model.flavor" in arguments
        or ("training.steps" in arguments and "parallelism" in arguments)
        or "training.seq_len" in arguments
    ):
        return torchtitan
    if (
        "model_name_or_path" in arguments
        or "model_name" in arguments
        or "per_device_train_batch_size" in arguments
    ):
        return hf_trainer
    problem = "is not for a supported trainer: axolotl, torchtitan, TRL, Hugging Face's Trainer, verl"
    raise InputError(problem, "--from", "write a job with `orchestrator init --data FILES --from-hf FOLDER`")
