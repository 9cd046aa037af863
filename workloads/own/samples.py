"""Own samples as batches: what a dataset gives by number, stacked, with random numbers of its own for each."""

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
from workloads.workload import Batch, Reading, Text

SAMPLES = "samples"
"""The name of the objective where samples are the user's own: the model has the loss."""


@dataclass
class OfSamples:
    """The objective of a model of own samples, see `Objective`: it reads no text."""

    name: str = SAMPLES
    begins: str = ""
    ends: str = ""
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def window(self, sequence_length: int) -> int:
        """A sample is a sample."""
        return sequence_length

    @property
    def reading(self) -> Reading:
        """See Objective.reading."""
        return Reading("stream", 1, 1)

    def collate(self, read: Text, ids: Sequence[int], turn: int) -> Batch:
        """Raise WorkloadError: there is no text."""
        raise WorkloadError("own samples are no text; this needs a job that reads text")

    def is_cut(self, record: np.ndarray, /) -> bool:
        """False: nothing is cut."""
        return False

    def is_lost(self, record: np.ndarray, /) -> bool:
        """False: nothing is cut."""
        return False


class OwnSamples:
    """The dataset that `reference` names, made with `options`; what a sample draws depends on `seed`. One that is
    prepared can be read only with the `folder` that has what was prepared.

    Raises WorkloadError if it cannot be made, or has no samples.
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
        """Whether it is read from what it has prepared before training, see `orchestrator.data.images.Images`."""
        return callable(getattr(self._made, "prepare", None))

    def prepare(self, folder: str, most: int | None = None) -> dict[str, Any]:
        """Write into a local folder what is read from then on, of at most so many samples: how many there are, and what
        was left out, as `orchestrator.data.store.manifest.DataManifest.rejected` has it."""
        found: dict[str, Any] = self._made.prepare(folder, most)
        return found

    def limits(self) -> dict[str, int]:
        """What all integers of an array stay below, by its name, as far as the dataset says so."""
        given = getattr(self._made, "limits", None)
        return {str(name): int(value) for name, value in given().items()} if callable(given) else {}

    def export(self, prepared: str, folder: str) -> None:
        """Write to `folder` what makes such samples for others, as far as the dataset does that; `prepared` is where it
        was prepared, or what a run keeps of that."""
        if callable(export := getattr(self._made, "export", None)):
            export(prepared, folder)

    def of_set(self) -> dict[str, np.ndarray]:
        """What evaluations read with every sample, the same for all."""
        given = getattr(self._made, "of_set", None)
        return {str(name): _array(value) for name, value in given().items()} if callable(given) else {}

    def arrays(self, number: int, turn: int, held_out: bool = False) -> dict[str, np.ndarray]:
        """The arrays of a sample: float32, int64 or bool. Raises WorkloadError if it fails or gives something else."""
        rng = generator(self._seed, number, turn, SAMPLES)
        read = getattr(self._made, "held_out", self._made.sample) if held_out else self._made.sample
        try:
            found = {str(name): _array(value) for name, value in read(number, rng).items()}
        except Exception as error:  # whatever the user's code raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise WorkloadError(f"{self.reference} failed on sample {number} ({reason}); mend it") from None
        if not found or COUNTED in found:
            raise WorkloadError(
                f"{self.reference}: sample {number} has {sorted(found)}; give it names other than counted"
            )
        return found

    def batch(
        self, numbers: Sequence[int], turns: Sequence[int], held_out: bool = False
    ) -> tuple[Batch, list[bytes]]:
        """Samples in this order, stacked, and a hash of each. Raises WorkloadError if their shapes differ."""
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
        """What the files hold that it reads, as far as it says so, else what its first samples hold."""
        count = 0 if self.is_prepared else len(self)
        digest = blake2b(f"{self.reference} {count}".encode(), digest_size=16)
        if callable(own := getattr(self._made, "fingerprint", None)):
            digest.update(str(own()).encode())
        else:
            for number in range(min(count, 16)):
                digest.update(_hash(self.arrays(number, 0)))
        return digest.hexdigest()


def _array(value: Any) -> np.ndarray:
    found = np.asarray(value)
    if found.dtype.kind == "f":
        return np.asarray(found, dtype=np.float32, order="C")
    if found.dtype.kind in "iu":
        return np.asarray(found, dtype=np.int64, order="C")
    if found.dtype.kind == "b":
        return np.asarray(found, order="C")
    raise TypeError(f"{found.dtype} is no number")


def _hash(sample: Mapping[str, np.ndarray]) -> bytes:
    digest = blake2b(digest_size=16)
    for name in sorted(sample):
        digest.update(
            f"{name} {sample[name].dtype.str} {sample[name].shape}\n".encode() + sample[name].tobytes()
        )
    return digest.digest()
