"""Own samples in the place of prepared text: which of them a step reads, what is held out, and that they stay the same.

    <cache>/<fingerprint>/manifest.json    how many samples there are, and a checksum of what they hold

The order is that of text: a pure function of (seed, epoch, position).
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
    """The dataset of a job, over what it has prepared in `folder`, if it prepares anything. Raises InputError."""
    try:
        return OwnSamples(named.use, named.options, seed, folder)
    except WorkloadError as error:
        raise InputError(str(error), WHERE) from None


def check_cache(named: ObjectReference, seed: int, store: str) -> None:
    """Raise InputError if the samples are prepared, and the cache is a store."""
    if open_samples(named, seed).is_prepared:
        raise _not_on_a_store(store)


def _not_on_a_store(uri: str) -> InputError:
    hint = "set data.cache to a folder that all nodes see"
    return InputError("what is prepared of samples is read from a disk", f"data.cache {uri}", hint)


def prepare_samples(named: ObjectReference, seed: int, cache: str, before: str = "") -> str:
    """The URI of the manifest of own samples, written unless it is there; `before` is that which the run has.

    Raises InputError if a sample cannot be read, TextChanged if they are not those of `before`.
    """
    made = open_samples(named, seed)
    there = DataFolder(f"{DataFolder(cache).uri}/{before}") if before and made.is_prepared else None
    if there and manifest.read(there):
        return there.uri  # the files that it was made of are not read again
    try:
        content = made.fingerprint()
    except WorkloadError as error:
        raise InputError(str(error), WHERE) from None
    drawn = None if made.is_prepared else seed
    told = json.dumps([named.model_dump(), drawn, content], sort_keys=True)
    own = xxhash.xxh3_128_hexdigest(told.encode())
    if before and own != before:
        hint = "put the files back as they were, or start another run"
        raise TextChanged("the samples have changed since the run began", WHERE, hint)
    folder = DataFolder(f"{DataFolder(cache).uri}/{own}")
    if manifest.read(folder) is None:
        if made.is_prepared and not folder.local:
            raise _not_on_a_store(folder.uri)
        about: dict[str, Any] = made.prepare(folder.uri) if made.is_prepared else {"count": len(made)}
        count = about["count"]
        found = DataManifest(own, "uint16", "", 1, {}, (), (), count, count, 0, 0.0, 1.0, own=own)
        manifest.write(folder, replace(found, rejected=about.get("rejected", {})))
    return folder.uri


@dataclass(frozen=True)
class OwnBatches:
    """Micro-batches of the samples `numbers` of a dataset in a fixed order; see `batches.Batches`."""

    samples: OwnSamples
    numbers: np.ndarray
    order: Order
    packed: bool = False
    ahead: int = 1

    def batch(self, position: int, count: int) -> tuple[Batch, int]:
        """The samples at positions [position, position + count), and the sum of their receipt digests."""
        positions = np.arange(position, position + count)
        turns, ids = self.order.at(positions)
        chosen = self.numbers[ids]
        batch, hashes = self.samples.batch(chosen.tolist(), turns.tolist())
        digests = [
            receipt.digest(int(p), int(n), np.frombuffer(found, "<i8"))
            for p, n, found in zip(positions, chosen, hashes, strict=True)
        ]
        return batch, receipt.add(digests)

    def padding(self, position: int, count: int) -> float:
        """0: nothing is filled up."""
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
        """A sample counts as one."""
        return self.samples

    @property
    def documents(self) -> int:
        """A sample counts as one."""
        return self.samples

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The samples of these numbers, in this order, as they are in the first turn, with what is of the set."""
        chosen = self.numbers[np.asarray(numbers)]
        batch = self.read.batch(chosen.tolist(), [0] * len(chosen), held_out=True)[0]
        return {**batch, **_of_set(self.read, len(chosen))}


def batches_of_samples(
    named: ObjectReference, seed: int, share: float | None, data: DataManifest, folder: str
) -> tuple[OwnBatches, OwnHeldOut | None]:
    """The batches of a job's samples, and about the `share` of them that is held out, by their numbers alone. `folder`
    is where they were prepared.

    Raises InputError if there are not as many as `data` says, or a side has none.
    """
    made = open_samples(named, seed, folder)
    if len(made) != data.documents:
        raise InputError(
            f"there are {len(made)} samples, and the run has {data.documents}", WHERE, "put the files back"
        )
    numbers = np.arange(len(made))
    held_out = None
    if share:
        chosen = mix(numbers.astype(np.uint64)) < np.uint64(min(math.ceil(share * DIGESTS), DIGESTS - 1))
        if not 0 < chosen.sum() < len(numbers):
            side = "none" if not chosen.any() else "all"
            raise InputError(f"{share:g} holds out {side} of {len(numbers)} samples", SHARE, "change it")
        held_out = OwnHeldOut(made, numbers[chosen])
        numbers = numbers[~chosen]
    return OwnBatches(made, numbers, Order(seed, [len(numbers)], [1.0])), held_out


def _of_set(samples: OwnSamples, count: int) -> Batch:
    whole = {name: torch.from_numpy(value) for name, value in samples.of_set().items()}
    return {name: value.expand(count, *value.shape) for name, value in whole.items()}


def first_samples(
    named: ObjectReference, seed: int, count: int = 2, of_set: bool = False, prepared: str = ""
) -> Batch:
    """A batch of the first samples, or of the only one several times; with what is `of_set`. They are read from where
    they were `prepared`, if that is given. Raises InputError."""
    made = open_samples(named, seed, prepared or None)
    with tempfile.TemporaryDirectory() as folder:
        if made.is_prepared and not prepared:
            made.prepare(folder, count)
            made = open_samples(named, seed, folder)
        try:
            batch, _ = made.batch([number % len(made) for number in range(count)], [0] * count)
            batch |= _of_set(made, count) if of_set else {}
        except WorkloadError as error:
            raise InputError(str(error), WHERE) from None
    return {name: torch.clone(value) for name, value in batch.items()}
