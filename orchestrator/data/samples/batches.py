"""Batches by index arithmetic: any rank computes its micro-batches of any step from the step's global position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from orchestrator.config.errors import InputError
from orchestrator.data.samples import receipt
from orchestrator.data.samples.mixture.mixed_order import MixedOrder
from orchestrator.data.samples.mixture.passes import AnyOrder
from orchestrator.data.samples.mixture.sectioned_mixture import SectionedMixture
from orchestrator.data.samples.mixture.shares import Mixture
from orchestrator.data.samples.order import Order
from orchestrator.data.samples.sample_reader import SampleReader
from orchestrator.data.samples.sections.order import SectionedOrder
from orchestrator.data.samples.sections.plan import SectionPlan
from orchestrator.data.samples.sections.published import StoppedWaiting
from orchestrator.data.samples.sections.windows import sections_of
from orchestrator.data.samples.windows import Streams, Windows, packed_windows, windows_of
from orchestrator.data.store.tokens import Tokens
from workloads.model.masks import REAL
from workloads.workload import Batch, Objective, Windowing

T = TypeVar("T")
AHEAD = 4


def batches_of(
    tokens: Streams,
    objective: Objective,
    seed: int,
    weights: Sequence[float],
    mixture: Mixture | None = None,
    packed: bool = False,
    routed: bool = False,
    plan: SectionPlan | None = None,
    share: float | None = None,
) -> Batches:
    """Return the batches of prepared data for an objective.

    Args:
        tokens: the prepared data, or the part of it that is trained on.
        objective: reads the samples.
        seed: the seed of the run, which determines the order.
        weights: passes over each source in one epoch. Ignored with a mixture.
        mixture: the proportions of the sources.
        packed: pack whole documents by best fit.
        routed: whether the model routes tokens to experts, which then need to know the padding.
        plan: the sections that an epoch goes through; None for an epoch that is shuffled as a whole.
        share: with sections, the share of their documents that is held out. Without sections, `tokens` is the rest
            already.

    Raises InputError if a source has no sample in an epoch, or if there are too few documents. An empty source is
    allowed for data of format 1, because the version that made it allowed it.
    """
    windowing = objective.windowing
    if plan is not None:
        assert isinstance(tokens, Tokens), "sections hold out documents by the share"
        sections = sections_of(tokens, plan, windowing, packed, share)
        order = None
        if mixture is not None:
            tokens_of, samples_of = sections.sizes(mixture.by_size)
            phases = mixture.weights(tokens_of, samples_of)
            order = SectionedMixture(seed, plan.sections, sections, phases, mixture.most)
        sectioned = order or SectionedOrder(seed, plan.sections, sections, weights)
        read = SampleReader(sections.streams, sections.windows, objective, growing=True)
        return Batches(read, sectioned, packed, routed)
    make: Callable[[Streams, int, Windowing], Windows] = packed_windows if packed else windows_of
    windows = [make(tokens, source, windowing) for source in range(tokens.sources)]
    samples = [len(source) for source in windows]
    strict = tokens.manifest.format > 1
    for number, count in enumerate(samples):
        if not count and (strict or not any(samples)):
            length = tokens.length(number)
            raise InputError(
                f"{length} tokens are less than one sample of {objective.name}, which has {windowing.window}",
                f"data.sources.{number}",
                "give more text, leave the source out, or lower data.sequence_length",
            )
    documents = sum(source.documents or 0 for source in windows)
    if windowing.unit != "stream" and documents < windowing.documents:
        raise InputError(
            f"the text has {documents} document(s), but {objective.name} needs at least {windowing.documents}",
            "data.sources",
            "separate documents by lines of <|endoftext|>, or give one per line in .jsonl",
        )
    read = SampleReader(tokens, windows, objective)
    if mixture is None:
        return Batches(read, Order(seed, samples, weights, by_pass=strict), packed, routed)
    phases = mixture.weights([source.tokens for source in windows], samples)
    return Batches(read, MixedOrder(seed, samples, phases, mixture.most), packed, routed)


def slices(
    position: int, global_batch: int, dp_rank: int, dp_size: int, micro_batch: int
) -> list[tuple[int, int]]:
    """Return (first position, count) of a data-parallel rank's micro-batches in the step that starts at `position`.

    Rank r takes the r-th of `dp_size` contiguous blocks. The blocks have equally many micro-batches, or differ by one.
    Raises ValueError if the batch is not divisible into micro-batches.
    """
    count, remainder = divmod(global_batch, micro_batch)
    if remainder or count < dp_size:
        raise ValueError(
            f"global batch {global_batch} is not a multiple of {dp_size} ranks x {micro_batch} sequences"
        )
    mine = range(dp_rank * count // dp_size, (dp_rank + 1) * count // dp_size)
    return [(position + number * micro_batch, micro_batch) for number in mine]


class StepSamples(NamedTuple):
    """A rank's micro-batches of a step.

    Attributes:
        batches: the micro-batches.
        digest: the sum of the receipt digests of their samples.
        padding: on rank 0, if whole documents are packed, the share of padding in the global batch.
        share: mean length of the rows as a share of the full length.
        prompts: instead of micro-batches, if the model generates the answers: the prompts of each step of a rollout
            that begins with this step; else empty.
        others: the micro-batches of other replicas that this rank computes again, if the step is verified.
    """

    batches: list[Batch]
    digest: int
    padding: float | None
    share: float = 1.0
    prompts: Sequence[Any] = ()
    others: Sequence[list[Batch]] = ()


class Batches:
    """Micro-batches over prepared data, in a fixed order. `read` reads one sample."""

    def __init__(
        self, read: SampleReader, order: AnyOrder, packed: bool = False, routed: bool = False
    ) -> None:
        """`packed` and `routed` are as in `batches_of`."""
        self.read = read
        self.order = order
        self.packed = packed
        self._routed = routed

    def with_reader(self, read: SampleReader) -> Batches:
        """Return these batches with another sample reader."""
        return Batches(read, self.order, self.packed, self._routed)

    def batch(self, position: int, count: int) -> tuple[Batch, int]:
        """Return `at` of the positions [position, position + count)."""
        return self.at(np.arange(position, position + count))

    def at(self, positions: np.ndarray) -> tuple[Batch, int]:
        """Return the samples at `positions`, collated, and the sum of their receipt digests.

        Samples of different passes (see `Order`) are collated separately and put back in order.
        """
        pass_numbers, ids = self.order.at(positions)
        text = self.read.preloaded(ids)
        digests = [receipt.digest(int(p), int(i), text(int(i))) for p, i in zip(positions, ids, strict=True)]
        by_pass = [np.flatnonzero(pass_numbers == pass_number) for pass_number in np.unique(pass_numbers)]
        collated = [text.collate(ids[members], int(pass_numbers[members[0]])) for members in by_pass]
        back = torch.from_numpy(np.argsort(np.concatenate(by_pass)))
        batch = {name: torch.cat([part[name] for part in collated])[back] for name in collated[0]}
        if self.packed and self._routed:
            batch[REAL] = torch.arange(self._stride) < torch.from_numpy(
                self._unpadded_lengths(ids)
            ).unsqueeze(1)
        return batch, receipt.add(digests)

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each of the samples at `positions`, int64, without reading them."""
        _, ids = self.order.at(positions)
        return np.array([self.read.length(int(i)) for i in ids], dtype=np.int64)

    @property
    def ahead(self) -> int:
        """How many steps ahead to make batches: on an object store, some blocks take longer than others."""
        return AHEAD if self.read.streams.at_once > 1 else 1

    def padding(self, position: int, count: int) -> float:
        """Return the share of padding in the model's input for the samples at [position, position + count)."""
        _, ids = self.order.at(np.arange(position, position + count))
        return 1.0 - float(self._unpadded_lengths(ids).sum()) / (count * self._stride)

    def _unpadded_lengths(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of input tokens of each sample that are not padding."""
        windowing = self.read.objective.windowing
        return np.array([self.read.length(int(i)) for i in ids]) - (windowing.window - windowing.stride)

    @property
    def _stride(self) -> int:
        """Number of input tokens of a sample of a stream."""
        return self.read.objective.windowing.stride


class Prefetch(Generic[T]):
    """Computes `make(first)`, `make(first + 1)`, ... in a thread, `depth` items ahead of their use, up to `stop`
    (exclusive).

    An exception in `make` is raised by the `next` that would have returned its item.
    """

    def __init__(self, make: Callable[[int], T], first: int, depth: int = 1, stop: int | None = None) -> None:
        self._make = make
        self._number = first
        self._stop = stop
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[T]] = deque()
        for _ in range(depth):
            self._submit()

    def next(self) -> T:
        """Return the next item."""
        self._submit()
        return self._ahead.popleft().result()

    @property
    def is_ready(self) -> bool:
        """Whether `next` returns without waiting. False if making the item was stopped."""
        made = self._ahead[0]
        return made.done() and not isinstance(made.exception(), StoppedWaiting)

    def close(self, wait: bool = True) -> None:
        """Stop the thread after the item that it is making."""
        self._pool.shutdown(wait, cancel_futures=True)

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)  # an error is raised without waiting

    def _submit(self) -> None:
        if self._stop is not None and self._number >= self._stop:
            return
        self._ahead.append(self._pool.submit(self._make, self._number))
        self._number += 1
