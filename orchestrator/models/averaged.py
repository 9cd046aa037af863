"""Read the weights of a commit for evaluation and export: averaged, if the job asks for an average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.checkpoint.manifest import CommitManifest, CorruptCommit, commit_folder
from orchestrator.checkpoint.reader import Reader
from orchestrator.config.commit_steps import regular_before

AVERAGE = "average."
"""Prefix of the names of moving averages in a commit, one for each parameter."""


class AveragedReader(Reader):
    """Reads averages instead of the tensors `model.<name>` of a checkpoint; other tensors as they are.

    An average is the moving average in the commit, or the mean over several commits, summed in fp64. Buffers, such as
    the biases of routers, have no moving average, so their trained values are read.

    Attributes:
        steps: the steps of the commits in the mean; empty for moving averages.
    """

    def __init__(self, store: Store, commit: CommitManifest, commits: Sequence[CommitManifest] = ()) -> None:
        """Read the mean over `commits`, or the moving averages of `commit` if `commits` is empty."""
        super().__init__(store.backend, store.retry, commit_folder(commit.step), commit)
        self._readers = [store.reader(averaged) for averaged in commits]
        self.steps = sorted(averaged.step for averaged in commits)

    def read(
        self, name: str, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """See `Reader.read`."""
        average = AVERAGE + name.removeprefix("model.")
        if not name.startswith("model."):
            return super().read(name, start, shape)
        if not self._readers:
            return super().read(average if average in self.manifest.tensors else name, start, shape)
        newest = super().read(name, start, shape)
        if not newest.is_floating_point():
            return newest
        total = torch.zeros(newest.shape, dtype=torch.float64)
        for reader in self._readers:
            total += reader.read(name, start, shape)
        return (total / len(self._readers)).to(newest.dtype)


def weights_of(store: Store, commit: CommitManifest, checkpoint: CheckpointSpec, raw: bool = False) -> Reader:
    """Return a reader of the weights that the job evaluates and exports.

    With `checkpoint.average.last` the mean is over those of the wanted commits that still exist, see `average_fields`.

    Args:
        store: the commits of the run.
        commit: the commit to read.
        checkpoint: the job's settings, which ask for an average or not.
        raw: read the weights of training in any case.
    """
    average = checkpoint.average
    if raw or average is None:
        return store.reader(commit)
    if checkpoint.averaged:
        return AveragedReader(store, commit, [commit, *_earlier(store, commit.step, checkpoint)])
    has_averages = any(name.startswith(AVERAGE) for name in commit.tensors)
    return AveragedReader(store, commit) if has_averages else store.reader(commit)


def average_fields(reader: Reader) -> dict[str, Any]:
    """Return the fields of rows and exports that describe averaged weights; empty for the weights of training."""
    if not isinstance(reader, AveragedReader):
        return {}
    return {"weights": "averaged"} | ({"averaged_steps": reader.steps} if reader.steps else {})


def _earlier(store: Store, step: int, checkpoint: CheckpointSpec) -> list[CommitManifest]:
    """The sound commits before `step` that belong to its mean."""
    steps_of_mean = regular_before(step, checkpoint.every, checkpoint.averaged)
    commits = []
    for earlier_step in sorted(set(steps_of_mean) & set(store.steps())):
        try:
            commits.append(store.manifest(earlier_step))
        except CorruptCommit:
            continue
    return commits
