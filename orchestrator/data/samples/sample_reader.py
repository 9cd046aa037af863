"""The samples of prepared data by number, as an objective reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from orchestrator.data.samples.windows import Streams, Windows
from workloads.workload import Batch, Objective


class SampleReader:
    """The samples of all sources; implements `workloads.workload.Text`.

    Ids number the samples of all sources, one source after the other; ids beyond the last wrap around. If more
    samples may be added later (`growing`), an id is index x sources + source.
    """

    def __init__(
        self, streams: Streams, windows: Sequence[Windows], objective: Objective, growing: bool = False
    ) -> None:
        """`windows` are the samples of each source of `streams`."""
        self.streams = streams
        self.objective = objective
        self._windows = windows
        self._growing = growing
        self._ends = np.cumsum([len(window) for window in windows])
        self._samples: dict[int, np.ndarray] = {}
        self._more_entries: dict[str, np.ndarray] = {}
        self._entries: Callable[[np.ndarray], Mapping[str, np.ndarray]] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._windows)) if self._growing else int(self._ends[-1])

    def __contains__(self, sample: int) -> bool:
        """Return whether this is the id of a known sample."""
        if not self._growing:
            return 0 <= sample < len(self)
        source, index = self._locate(sample)
        return 0 <= index < len(self._windows[source])

    def __call__(self, sample: int) -> np.ndarray:
        """Return the tokens of a sample, int64 [window or fewer]."""
        if sample in self._samples:
            return self._samples[sample]
        source, index = self._locate(sample)
        pieces = [
            self.streams.window(source, start, length)
            for start, length in self._windows[source].pieces(index)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def length(self, sample: int) -> int:
        """Return the number of tokens of a sample, without reading it."""
        source, index = self._locate(sample)
        return sum(length for _, length in self._windows[source].pieces(index))

    def origin(self, sample: int) -> tuple[int, Sequence[tuple[int, int]]]:
        """Return the source of a sample, and its pieces, see `Windows.pieces`."""
        source, index = self._locate(sample)
        return source, self._windows[source].pieces(index)

    def longer_than(self, length: int) -> Iterator[int]:
        """Yield the ids of the samples with more than `length` tokens."""
        for source, windows in enumerate(self._windows):
            numbers = self._ids(source, range(len(windows)))
            yield from (sample for sample in numbers if self.length(sample) > length)

    def siblings(self, sample: int) -> range:
        """Return the ids of the samples of the same document."""
        source, index = self._locate(sample)
        return self._ids(source, self._windows[source].siblings(index))

    def companions(self, sample: int) -> range:
        """Return the ids of the samples that may be read together with this one: all of them, or, if samples may
        still be added, those of its section and source.
        """
        if not self._growing:
            return range(len(self))
        source, index = self._locate(sample)
        return self._ids(source, self._windows[source].companions(index))

    def preloaded(self, ids: Sequence[int] | np.ndarray) -> SampleReader:
        """Return a reader that holds the samples `ids` in memory, so that each is read once."""
        reader = copy.copy(self)
        numbers = [int(number) for number in ids]
        if self.streams.at_once > 1:
            with ThreadPoolExecutor(self.streams.at_once) as pool:
                reader._samples = dict(zip(numbers, pool.map(self, numbers), strict=True))
        else:
            reader._samples = {number: self(number) for number in numbers}
        return reader

    def with_values(self, name: str, values: np.ndarray) -> SampleReader:
        """Return a reader whose batches also contain `values` of their samples, [samples, ...], under this name."""
        reader = copy.copy(self)
        reader._more_entries = {**self._more_entries, name: values}
        return reader

    def with_entries(self, entries: Callable[[np.ndarray], Mapping[str, np.ndarray]]) -> SampleReader:
        """Return a reader whose batches also contain what `entries` returns for the numbers of their samples,
        [rows, ...] by name.
        """
        reader = copy.copy(self)
        reader._entries = entries
        return reader

    def collate(self, ids: Sequence[int] | np.ndarray, pass_number: int) -> Batch:
        """Return the samples `ids` as a batch of the objective. `pass_number` is `turn` of `Objective.collate`."""
        batch = self.objective.collate(self, [int(number) for number in ids], pass_number)
        if not self._more_entries and self._entries is None:
            return batch
        rows = np.asarray(ids, dtype=np.int64) % len(self)
        result = {name: values[rows] for name, values in self._more_entries.items()}
        if self._entries is not None:
            result |= self._entries(rows)
        return batch | {name: torch.from_numpy(values) for name, values in result.items()}

    def _ids(self, source: int, numbers: range) -> range:
        """Return the ids of the samples [start, stop) of a source."""
        if self._growing:
            step = len(self._windows)
            return range(numbers.start * step + source, numbers.stop * step + source, step)
        first = int(self._ends[source]) - len(self._windows[source])
        return range(first + numbers.start, first + numbers.stop)

    def _locate(self, sample: int) -> tuple[int, int]:
        """Return the source of a sample, and its index there."""
        if self._growing:
            return sample % len(self._windows), sample // len(self._windows)
        sample %= len(self)
        source = int(np.searchsorted(self._ends, sample, side="right"))
        return source, sample - int(self._ends[source]) + len(self._windows[source])
