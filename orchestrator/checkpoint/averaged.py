"""The weights of a commit as they are evaluated and exported: averaged, if the job has an average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from orchestrator.checkpoint.manifest import CommitManifest, CorruptCommit, commit_folder
from orchestrator.checkpoint.reader import Reader
from orchestrator.checkpoint.store import Store
from orchestrator.config.checkpoint import CheckpointSpec
from orchestrator.config.commit_steps import regular_before

AVERAGE = "average."
"""Beginning of the names of a commit's averages, one for each parameter."""


class AveragedReader(Reader):
    """Reads a commit whose `model.<name>` are averages; other tensors as they are.

    They are the moving averages of the commit, or the mean of the tensors of several commits (`steps`), summed in fp64.
    Buffers, such as the biases of routers, have no moving average: they are those of training.
    """

    def __init__(self, store: Store, commit: CommitManifest, commits: Sequence[CommitManifest] = ()) -> None:
        """`commits` are those to take the mean of; none for the moving averages."""
        super().__init__(store.backend, store.retry, commit_folder(commit.step), commit)
        self._readers = [store.reader(one) for one in commits]
        self.steps = sorted(one.step for one in commits)

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
    """Reads a commit with the weights that the job evaluates and exports; with `raw` those of training.

    Of the commits that `checkpoint.average.last` means those that are there are averaged, see `facts_of`.
    """
    average = checkpoint.average
    if raw or average is None:
        return store.reader(commit)
    if checkpoint.averaged:
        return AveragedReader(store, commit, [commit, *_earlier(store, commit.step, checkpoint)])
    has_averages = any(name.startswith(AVERAGE) for name in commit.tensors)
    return AveragedReader(store, commit) if has_averages else store.reader(commit)


def facts_of(reader: Reader) -> dict[str, Any]:
    """What rows and exports say of the weights that were read: nothing if they are those of training."""
    if not isinstance(reader, AveragedReader):
        return {}
    return {"weights": "averaged"} | ({"averaged_steps": reader.steps} if reader.steps else {})


def _earlier(store: Store, step: int, checkpoint: CheckpointSpec) -> list[CommitManifest]:
    wanted, found = regular_before(step, checkpoint.every, checkpoint.averaged), []
    for there in sorted(set(wanted) & set(store.steps())):
        try:
            found.append(store.manifest(there))
        except CorruptCommit:
            continue
    return found
