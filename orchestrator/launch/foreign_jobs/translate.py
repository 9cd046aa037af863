"""A job file from another trainer's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.errors import InputError
from orchestrator.launch.first_job import check_objective
from orchestrator.launch.foreign_jobs.axolotl import axolotl
from orchestrator.launch.foreign_jobs.hf_trainer import hf_trainer
from orchestrator.launch.foreign_jobs.job import ForeignJob
from orchestrator.launch.foreign_jobs.read import Arguments, read_foreign
from orchestrator.launch.foreign_jobs.torchtitan import torchtitan
from orchestrator.launch.foreign_jobs.verl import verl


def whose(arguments: Arguments, path: Path) -> Any:
    """Return the function that fills in a job from the keys of a file. Raises InputError if no trainer has them."""
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
    raise InputError(problem, str(path), "write a job with `orchestrator init --data FILES --from-hf FOLDER`")


class _Plain(yaml.SafeDumper):
    """Writes a value that occurs twice twice, and not as an anchor and its alias."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return that no value becomes an alias."""
        return True


@dataclass(frozen=True)
class Translated:
    """The job of another trainer's configuration.

    Attributes:
        trainer: whose configuration it was.
        document: the job file as an object.
        lines: what was assumed, and what is to do before the run.
        left: each key without a place, and what is nearest to it.
    """

    trainer: str
    document: dict[str, Any]
    lines: tuple[str, ...]
    left: tuple[tuple[str, str], ...]

    def text(self, file: str) -> str:
        """Return the job file. Comments say what was assumed and which keys have no place."""
        notes = [*self.lines, *(f"{key}: {hint}" for key, hint in self.left)]
        head = f"# From {file}, a configuration of {self.trainer}. `orchestrator schema job` describes every key.\n"
        body = yaml.dump(self.document, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=110)
        return head + "".join(f"# {' '.join(line.split())}\n" for line in notes) + body


def translate(path: Path, name: str | None = None, asked: str | None = None) -> Translated:
    """Return the job of a configuration file or of a script that starts a trainer.

    Args:
        path: the file.
        name: the name of the run; None for that of the configuration.
        asked: the objective; None for that of the configuration.

    Raises:
        InputError: the file is for no trainer, or its rows do not fit the objective.
    """
    arguments = read_foreign(path)
    fill = whose(arguments, path)
    if asked is not None:
        check_objective(asked)
        if fill is not hf_trainer:
            problem = f"a configuration of {fill.__name__} says its objective itself"
            raise InputError(problem, "--objective", "leave it out, or change the job that is written")
    job = ForeignJob(arguments, asked)
    fill(job)
    job.workers()
    if name is not None:
        job.document["name"] = name
    trainer = {"hf_trainer": "Hugging Face's Trainer or TRL"}.get(fill.__name__, fill.__name__)
    return Translated(trainer, job.document, tuple(dict.fromkeys(job.lines)), tuple(arguments.unused()))
