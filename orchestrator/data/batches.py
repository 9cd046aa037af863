"""Batches by index arithmetic: any rank computes its micro-batches of any step from one integer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np
import torch

from orchestrator.data import receipt
from orchestrator.data.order import Order
from orchestrator.data.tokens import Tokens
from orchestrator.errors import InputError
from workloads.workload import Batch, Objective

T = TypeVar("T")


def order_of(
    tokens: Tokens, objective: Objective, sequence_length: int, seed: int, weights: Sequence[float]
) -> Order:
    """The order of the samples of prepared data; one weight a source.

    Raises InputError if the data holds not one sample.
    """
    window = objective.window(sequence_length)
    samples = [tokens.samples(source, sequence_length, window) for source in range(tokens.sources)]
    if not any(samples):
        raise InputError(
            f"the corpus has {tokens.manifest.tokens} tokens, fewer than one sequence of {sequence_length} "
            f"(a sample of {objective.name} reads {window})",
            "data.sources",
            "give more text or lower data.sequence_length",
        )
    return Order(seed, samples, weights)


def slices(
    position: int, global_batch: int, dp_rank: int, dp_size: int, micro_batch: int
) -> list[tuple[int, int]]:
    """(first position, count) of the micro-batches that a rank computes in the step at `position`.

    Rank r takes the r-th of dp_size contiguous blocks. Raises ValueError if the batch does not divide.
    """
    share, rest = divmod(global_batch, dp_size)
    if rest or share % micro_batch:
        raise ValueError(
            f"global batch {global_batch} is no multiple of {dp_size} ranks x {micro_batch} sequences"
        )
    first = position + dp_rank * share
    return [(start, micro_batch) for start in range(first, first + share, micro_batch)]


class Batches:
    """Micro-batches of an objective over prepared data in a fixed order.

    A sample id counts the samples of all sources in their order; the window of a source's sample i starts at
    its token i x sequence_length.
    """

    def __init__(self, tokens: Tokens, order: Order, objective: Objective, sequence_length: int) -> None:
        self.tokens = tokens
        self.order = order
        self.objective = objective
        self.sequence_length = sequence_length
        self.window = objective.window(sequence_length)
        self._ends = np.cumsum(order.samples)

    def read(self, sample_id: int) -> np.ndarray:
        """The raw window of a sample, int64 [window]. Ids beyond the last begin again at the first."""
        sample_id %= int(self._ends[-1])
        source = int(np.searchsorted(self._ends, sample_id, side="right"))
        index = sample_id - int(self._ends[source]) + self.order.samples[source]
        return self.tokens.window(source, index * self.sequence_length, self.window)

    def batch(self, position: int, count: int) -> tuple[Batch, int]:
        """The samples at positions [position, position + count), collated, and the sum of their digests.

        Samples on both sides of an epoch's end are collated with their own epoch.
        """
        positions = np.arange(position, position + count)
        epochs, ids = self.order.at(positions)
        windows = {int(i): self.read(int(i)) for i in ids}
        digests = [
            receipt.digest(int(p), int(i), windows[int(i)]) for p, i in zip(positions, ids, strict=True)
        ]

        def read(sample_id: int) -> np.ndarray:
            return windows[sample_id] if sample_id in windows else self.read(sample_id)

        collated = [
            self.objective.collate(read, ids[epochs == e].tolist(), int(e)) for e in np.unique(epochs)
        ]
        batch = {name: torch.cat([part[name] for part in collated]) for name in collated[0]}
        return batch, receipt.add(digests)


class Prefetch(Generic[T]):
    """Makes item n + 1 in a thread while item n is used: `make(first)`, `make(first + 1)`, ... in turn.

    An exception of `make` is raised by the `next` that would have returned its item.
    """

    def __init__(self, make: Callable[[int], T], first: int, depth: int = 1) -> None:
        self._make = make
        self._number = first
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[T]] = deque()
        for _ in range(depth):
            self._submit()

    def next(self) -> T:
        """The next item."""
        self._submit()
        return self._ahead.popleft().result()

    def close(self) -> None:
        """Stop the thread, after the item it is making."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self) -> None:
        self._ahead.append(self._pool.submit(self._make, self._number))
        self._number += 1
