"""A checkpoint as a Python object: its weights, for the user's own training loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.api.place import place_of
from orchestrator.api.run import Run, load_run
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.resolve_checkpoint import chosen, run_and_step
from orchestrator.storage.file_names import COMMITS

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run.

    Attributes:
        run: the run.
        step: the step after which it was saved.
        raw: whether it stands for the weights of training where the job has an average of them.
    """

    run: Run
    step: int
    raw: bool = False

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's parameters and buffers by name, on the CPU.

        The names are those of `model()`: of transformers' class, of your own module, or of this project's model where
        transformers has no class for it. Raises InputError if the checkpoint was removed.
        """
        return dict(self.model().state_dict())

    def model(self) -> nn.Module:
        """Return the model, as `Run.model` does. Raises InputError if the checkpoint was removed."""
        return self.run.model(self.step, self.raw)


def load_checkpoint(place: str | Path, step: int | None = None, raw: bool = False) -> Checkpoint:
    """Return a checkpoint of a run: of a `step`, by default the newest sound one.

    Args:
        place: a run directory, a run's name in the folder `runs`, or the folder of a checkpoint in a run directory.
        step: the step of the checkpoint.
        raw: the weights of training where the job has an average of them.

    Raises InputError if there is no such run or checkpoint.
    """
    place, step = run_and_step(place_of(place), step, f"step {step}")
    run = load_run(place)
    return Checkpoint(run, chosen(Store(f"{run.uri}/{COMMITS}"), step), raw)
