"""Own samples as batches: the dataset's items are stacked, and each gets its own random generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from workloads.errors import WorkloadError
from workloads.objectives.sampled import generator
from workloads.own.object_reference import call, load
from workloads.own.rows import COUNTED
from workloads.workload import Batch, Text, Windowing

SAMPLES = "samples"
"""The name of the objective for the user's own samples. The model computes the loss."""


@dataclass
class OfSamples:
    """The objective of a model with own samples, see `Objective`. It reads no text."""

    name: str = SAMPLES
    begins: str = ""
    ends: str = ""
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def window(self, sequence_length: int) -> int:
        """Return the length unchanged: own samples are not windows of text."""
        return sequence_length

    @property
    def windowing(self) -> Windowing:
        """See Objective.windowing."""
        return Windowing("stream", 1, 1)

    def collate(self, read: Text, ids: Sequence[int], turn: int) -> Batch:
        """Raise WorkloadError: there is no text to read."""
        raise WorkloadError("own samples are no text; this needs a job that reads text")

    def is_cut(self, record: np.ndarray, /) -> bool:
        """Return False: own samples are never cut."""
        return False

    def is_lost(self, record: np.ndarray, /) -> bool:
        """Return False: own samples are never cut."""
        return False


class OwnSamples:
    """The dataset that `reference` names, made with `options`. Random numbers of a sample depend on `seed`.

    A dataset with a `prepare` step can be read only with the `folder` of its prepared data. Raises WorkloadError if the
    dataset cannot be made or is empty.
    """

    def __init__(
        self, reference: str, options: Mapping[str, Any], seed: int, folder: str | None = None
    ) -> None:
        self.reference, self._seed = reference, seed
        self._made = call(reference, load(reference), dict(options))
        if folder is not None and self.is_prepared:
            self._made.open(folder)
        for name in ("__len__", "sample"):
            if not callable(getattr(self._made, name, None)):
                raise WorkloadError(f"{reference} has no {name}; see workloads.own.protocols.Samples")
        if not (self.is_prepared and folder is None) and not len(self):
            raise WorkloadError(f"{reference} has no samples; look at its options")

    def __len__(self) -> int:
        return len(self._made)

    @property
    def is_prepared(self) -> bool:
        """Return whether the dataset prepares its data before training, such as decoded images."""
        return callable(getattr(self._made, "prepare", None))

    def prepare(self, folder: str, most: int | None = None) -> dict[str, Any]:
        """Write the data of the samples into a local folder.

        Args:
            folder: a local folder.
            most: maximum number of samples to write; None for all.

        Returns:
            The number of samples, and what was left out, as in
            `orchestrator.data.store.manifest.DataManifest.rejected`.
        """
        result: dict[str, Any] = self._made.prepare(folder, most)
        return result

    def limits(self) -> dict[str, int]:
        """Return the exclusive upper bound of each array's integers, for the arrays that the dataset declares."""
        method = getattr(self._made, "limits", None)
        return {str(name): int(value) for name, value in method().items()} if callable(method) else {}

    def export(self, prepared: str, folder: str) -> None:
        """Write the tools that make such samples from raw data, if the dataset exports any.

        Args:
            prepared: the folder of the prepared data, or the run's copy of it.
            folder: the local folder of the export.
        """
        if callable(export := getattr(self._made, "export", None)):
            export(prepared, folder)

    def of_set(self) -> dict[str, np.ndarray]:
        """Return the arrays that evaluations read with every sample."""
        method = getattr(self._made, "of_set", None)
        return {str(name): _array(value) for name, value in method().items()} if callable(method) else {}

    def arrays(self, number: int, turn: int, held_out: bool = False) -> dict[str, np.ndarray]:
        """Return the arrays of a sample: float32, int64 or bool.

        Args:
            number: the number of the sample, from 0.
            turn: how many times the sample has been read before.
            held_out: whether to read it as evaluations do.

        Raises:
            WorkloadError: the dataset fails, or returns arrays of other types.
        """
        rng = generator(self._seed, number, turn, SAMPLES)
        read = getattr(self._made, "held_out", self._made.sample) if held_out else self._made.sample
        try:
            arrays = {str(name): _array(value) for name, value in read(number, rng).items()}
        except Exception as error:  # whatever the user's code raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise WorkloadError(f"{self.reference} failed on sample {number} ({reason}); fix it") from None
        if not arrays or COUNTED in arrays:
            raise WorkloadError(
                f"{self.reference}: sample {number} has {sorted(arrays)}; give it names other than counted"
            )
        return arrays

    def batch(
        self, numbers: Sequence[int], turns: Sequence[int], held_out: bool = False
    ) -> tuple[Batch, list[bytes]]:
        """Return samples stacked in this order, [B, ...] each, and a hash of each sample.

        Args:
            numbers: the numbers of the samples, from 0.
            turns: for each sample, how many times it has been read before.
            held_out: whether to read them as evaluations do.

        Raises:
            WorkloadError: their shapes differ.
        """
        samples = [self.arrays(int(n), int(t), held_out) for n, t in zip(numbers, turns, strict=True)]
        first = samples[0]
        for number, sample in zip(numbers, samples, strict=True):
            if {k: v.shape for k, v in sample.items()} != {k: v.shape for k, v in first.items()}:
                raise WorkloadError(
                    f"{self.reference}: samples {numbers[0]} and {number} differ in names or shapes; give all the same"
                )
        batch = {name: torch.from_numpy(np.stack([s[name] for s in samples])) for name in first}
        batch[COUNTED] = torch.ones(len(samples), dtype=torch.bool)
        return batch, [_hash(sample) for sample in samples]

    def fingerprint(self) -> str:
        """Return the dataset's own fingerprint if it has one, else a hash of its first samples."""
        count = 0 if self.is_prepared else len(self)
        digest = blake2b(f"{self.reference} {count}".encode(), digest_size=16)
        if callable(method := getattr(self._made, "fingerprint", None)):
            digest.update(str(method()).encode())
        else:
            for number in range(min(count, 16)):
                digest.update(_hash(self.arrays(number, 0)))
        return digest.hexdigest()


def _array(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return np.asarray(array, dtype=np.float32, order="C")
    if array.dtype.kind in "iu":
        return np.asarray(array, dtype=np.int64, order="C")
    if array.dtype.kind == "b":
        return np.asarray(array, order="C")
    raise TypeError(f"{array.dtype} is not a number")


def _hash(sample: Mapping[str, np.ndarray]) -> bytes:
    digest = blake2b(digest_size=16)
    for name in sorted(sample):
        digest.update(
            f"{name} {sample[name].dtype.str} {sample[name].shape}\n".encode() + sample[name].tobytes()
        )
    return digest.digest()
