"""The user's own samples instead of prepared text: the samples of each step, the held-out ones, and a check that they
stay the same.

    <cache>/<fingerprint>/manifest.json    the number of samples, and a checksum of their content

The order is the same as for text: a pure function of (seed, epoch, position).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.config.object_reference import ObjectReference
from orchestrator.data.prepare.fingerprint import TextChanged
from orchestrator.data.samples import receipt
from orchestrator.data.samples.held_out_split import DIGESTS, SHARE
from orchestrator.data.samples.order import Order, mix
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest
from workloads.errors import WorkloadError
from workloads.own.samples import OwnSamples
from workloads.workload import Batch

WHERE = "data.samples"


def open_samples(named: ObjectReference, seed: int, folder: str | None = None) -> OwnSamples:
    """Return the dataset of a job. `folder` is where it prepared its data, if it does. Raises InputError."""
    try:
        return OwnSamples(named.use, named.options, seed, folder)
    except WorkloadError as error:
        raise InputError(str(error), WHERE) from None


def check_cache(named: ObjectReference, seed: int, store: str) -> None:
    """Raise InputError if the samples need preparation and the cache is an object store."""
    if open_samples(named, seed).is_prepared:
        raise _not_on_a_store(store)


def _not_on_a_store(uri: str) -> InputError:
    hint = "set data.cache to a folder that all nodes see"
    return InputError("prepared samples must be on a disk", f"data.cache {uri}", hint)


def prepare_samples(named: ObjectReference, seed: int, cache: str, before: str = "") -> str:
    """Return the URI of the manifest of own samples, and write it unless it exists.

    `before` is the fingerprint that the run began with. Raises InputError if a sample cannot be read, TextChanged if
    the samples no longer have the fingerprint `before`.
    """
    samples = open_samples(named, seed)
    existing = DataFolder(f"{DataFolder(cache).uri}/{before}") if before and samples.is_prepared else None
    if existing and manifest.read(existing):
        return existing.uri  # the samples' source files are not read again
    try:
        content = samples.fingerprint()
    except WorkloadError as error:
        raise InputError(str(error), WHERE) from None
    drawn = None if samples.is_prepared else seed
    identity = json.dumps([named.model_dump(), drawn, content], sort_keys=True)
    fingerprint = xxhash.xxh3_128_hexdigest(identity.encode())
    if before and fingerprint != before:
        hint = "restore the files or start a new run"
        raise TextChanged("the samples changed after the run began", WHERE, hint)
    folder = DataFolder(f"{DataFolder(cache).uri}/{fingerprint}")
    if manifest.read(folder) is None:
        if samples.is_prepared and not folder.local:
            raise _not_on_a_store(folder.uri)
        about: dict[str, Any] = (
            samples.prepare(folder.uri) if samples.is_prepared else {"count": len(samples)}
        )
        count = about["count"]
        data = DataManifest(
            fingerprint,
            "uint16",
            tokenizer="",
            vocabulary=1,
            roles={},
            sentinels=(),
            sources=(),
            tokens=count,
            documents=count,
            bytes=0,
            entropy=0.0,
            bytes_per_token=1.0,
            own=fingerprint,
        )
        manifest.write(folder, replace(data, rejected=about.get("rejected", {})))
    return folder.uri


@dataclass(frozen=True)
class OwnBatches:
    """Micro-batches of the samples `numbers` of a dataset, in a fixed order; see `batches.Batches`."""

    samples: OwnSamples
    numbers: np.ndarray
    order: Order
    packed: bool = False
    ahead: int = 1

    def batch(self, position: int, count: int) -> tuple[Batch, int]:
        """Return `at` of the positions [position, position + count)."""
        return self.at(np.arange(position, position + count))

    def at(self, positions: np.ndarray) -> tuple[Batch, int]:
        """Return the samples at `positions`, and the sum of their receipt digests."""
        turns, ids = self.order.at(positions)
        chosen = self.numbers[ids]
        batch, hashes = self.samples.batch(chosen.tolist(), turns.tolist())
        digests = [
            receipt.digest(int(p), int(n), np.frombuffer(sample_hash, "<i8"))
            for p, n, sample_hash in zip(positions, chosen, hashes, strict=True)
        ]
        return batch, receipt.add(digests)

    def padding(self, position: int, count: int) -> float:
        """Return 0: own samples are never padded."""
        return 0.0


@dataclass(frozen=True)
class OwnHeldOut:
    """Samples that are held out; see `orchestrator.data.samples.held_out_set.HeldOut`."""

    read: OwnSamples
    numbers: np.ndarray
    bytes: int = 0

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.numbers)

    @property
    def tokens(self) -> int:
        """Number of samples: a sample counts as one token."""
        return self.samples

    @property
    def documents(self) -> int:
        """Number of samples: a sample counts as one document."""
        return self.samples

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return the samples of these numbers, in order, as in the first pass, with the values of the whole set."""
        chosen = self.numbers[np.asarray(numbers)]
        batch = self.read.batch(chosen.tolist(), [0] * len(chosen), held_out=True)[0]
        return {**batch, **_set_entries(self.read, len(chosen))}


def batches_of_samples(
    named: ObjectReference, seed: int, share: float | None, data: DataManifest, folder: str
) -> tuple[OwnBatches, OwnHeldOut | None]:
    """Return the batches of a job's samples, and the held-out samples: about the `share` of them, chosen by number.

    Args:
        named: the dataset of the job.
        seed: the seed of the run, which determines the order.
        share: share to hold out; None for no held-out samples.
        data: the manifest of the samples.
        folder: where they were prepared.

    Raises InputError if the number of samples differs from `data`, or if either side is empty.
    """
    samples = open_samples(named, seed, folder)
    if len(samples) != data.documents:
        raise InputError(
            f"the dataset has {len(samples)} samples, but had {data.documents} when it was prepared",
            WHERE,
            "restore it",
        )
    numbers = np.arange(len(samples))
    held_out = None
    if share:
        chosen = mix(numbers.astype(np.uint64)) < np.uint64(min(math.ceil(share * DIGESTS), DIGESTS - 1))
        if not 0 < chosen.sum() < len(numbers):
            side = "none" if not chosen.any() else "all"
            raise InputError(f"{share:g} holds out {side} of {len(numbers)} samples", SHARE, "change it")
        held_out = OwnHeldOut(samples, numbers[chosen])
        numbers = numbers[~chosen]
    return OwnBatches(samples, numbers, Order(seed, [len(numbers)], [1.0])), held_out


def _set_entries(samples: OwnSamples, count: int) -> Batch:
    set_values = {name: torch.from_numpy(value) for name, value in samples.of_set().items()}
    return {name: value.expand(count, *value.shape) for name, value in set_values.items()}


def first_samples(
    named: ObjectReference, seed: int, count: int = 2, with_set_values: bool = False, prepared: str = ""
) -> Batch:
    """Return a batch of the first samples, repeated if there are fewer than `count`. Raises InputError.

    Args:
        named: the dataset of the job.
        seed: determines the samples.
        count: size of the batch.
        with_set_values: include the values of the whole set.
        prepared: the folder where the samples were prepared; empty to prepare them temporarily.
    """
    samples = open_samples(named, seed, prepared or None)
    with tempfile.TemporaryDirectory() as folder:
        if samples.is_prepared and not prepared:
            samples.prepare(folder, count)
            samples = open_samples(named, seed, folder)
        try:
            batch, _ = samples.batch([number % len(samples) for number in range(count)], [0] * count)
            if with_set_values:
                batch |= _set_entries(samples, count)
        except WorkloadError as error:
            raise InputError(str(error), WHERE) from None
    return {name: torch.clone(value) for name, value in batch.items()}
