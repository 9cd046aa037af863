"""The documents of prepared data that are held out from training, chosen by a digest of their text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data.prepare.contents import digests
from orchestrator.data.samples.windows import Streams, StreamsOf
from orchestrator.data.store.derived_arrays import CHUNK, Keep, arrays_on_disk
from orchestrator.data.store.tokens import Tokens


class Runs(NamedTuple):
    """Runs of consecutive documents in a stream: tokens [start, stop), and their cumulative number; int64 [runs].

    They are in memory or, for much text, in files on this node's disk: `<side>.starts` has the first token of each run,
    and `.stops` and `.ends` correspond (see `derived_arrays`).
    """

    starts: np.ndarray
    stops: np.ndarray
    ends: np.ndarray


def edges(bounds: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first token of each run of `chosen` documents and the one after its last, int64 [runs].

    Document i is tokens [bounds[i], bounds[i + 1]).
    """
    change = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    return bounds[np.flatnonzero(change == 1)], bounds[np.flatnonzero(change == -1)]


class RunsMaker:
    """Joins runs that are added in order, and passes them to `keep` as arrays of starts, stops and ends."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._total = 0
        self._last = np.zeros((2, 0), dtype=np.int64)  # the run that the next one may continue

    def add(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Add the next runs, int64 [runs]."""
        if not len(starts):
            return
        if self._last.size and self._last[1, 0] == starts[0]:
            starts = np.concatenate((self._last[0], starts[1:]))
        else:
            starts = np.concatenate((self._last[0], starts))
            stops = np.concatenate((self._last[1], stops))
        self._emit(starts[:-1], stops[:-1])
        self._last = np.array([[starts[-1]], [stops[-1]]])

    def finish(self) -> None:
        """Pass on the last run."""
        starts, stops = self._last
        self._emit(starts, stops)

    def _emit(self, starts: np.ndarray, stops: np.ndarray) -> None:
        ends = self._total + np.cumsum(stops - starts)
        self._total = int(ends[-1]) if len(ends) else self._total
        for name, values in (("starts", starts), ("stops", stops), ("ends", ends)):
            self._keep(name, values)


Fill = Callable[[dict[str, RunsMaker]], dict[str, Any]]
"""Adds runs to the makers of all sides, and returns facts about them that JSON can hold."""


def in_memory(sides: tuple[str, ...], fill: Fill) -> tuple[dict[str, Runs], dict[str, Any]]:
    """Return the runs of each side that `fill` adds, and the facts that it returns."""
    arrays: dict[str, dict[str, list[np.ndarray]]] = {
        side: {name: [np.zeros(0, np.int64)] for name in Runs._fields} for side in sides
    }
    makers = {
        side: RunsMaker(lambda name, values, side=side: arrays[side][name].append(values))  # type: ignore[misc]
        for side in sides
    }
    facts = fill(makers)
    for maker in makers.values():
        maker.finish()
    runs = {side: Runs(*(np.concatenate(arrays[side][name]) for name in Runs._fields)) for side in sides}
    return runs, facts


def on_disk(
    folder: Path, source: int, sides: tuple[str, ...], fill: Fill
) -> tuple[dict[str, Runs], dict[str, Any]]:
    """Like `in_memory`, but memory-mapped from files in `folder`, see `arrays_on_disk`."""

    def write(keep: Keep) -> dict[str, Any]:
        makers = {
            side: RunsMaker(lambda name, values, side=side: keep(f"{side}.{name}", values))  # type: ignore[misc]
            for side in sides
        }
        facts = fill(makers)
        for maker in makers.values():
            maker.finish()
        return facts

    names = [f"{side}.{name}" for side in sides for name in Runs._fields]
    arrays, facts = arrays_on_disk(folder, source, names, write)
    return {side: Runs(*(arrays[f"{side}.{name}"] for name in Runs._fields)) for side in sides}, facts


class Subset(StreamsOf):
    """The streams of the chosen documents of each source, one after the other; implements `Streams`."""

    def __init__(self, streams: Streams, runs: Sequence[Runs], documents: int) -> None:
        """`runs` has the runs of chosen documents of each source; `documents` is the number of chosen documents."""
        super().__init__(streams)
        self.documents = documents
        self._runs = [(runs_of_source.starts, runs_of_source.stops) for runs_of_source in runs]
        self._ends = [runs_of_source.ends for runs_of_source in runs]
        self.tokens = sum(map(self.length, range(self.sources)))

    @property
    def digest(self) -> str:
        """See `Tokens.digest`."""
        hasher = xxhash.xxh3_128(self._streams.digest.encode())
        for starts, stops in self._runs:
            hasher.update(np.array([len(starts)], "<i8").tobytes())
            for values in (starts, stops):
                for at in range(0, len(values), CHUNK):
                    hasher.update(values[at : at + CHUNK].astype("<i8").tobytes())
        return hasher.hexdigest()

    def length(self, source: int) -> int:
        """Return the number of tokens of the chosen documents of a source."""
        return int(self._ends[source][-1]) if len(self._ends[source]) else 0

    def window(self, source: int, start: int, length: int) -> np.ndarray:
        """See `Tokens.window`."""
        ends, (_, stops) = self._ends[source], self._runs[source]
        stop = start + length
        if start < 0 or length < 0 or stop > self.length(source):
            raise IndexError(f"tokens {start} to {stop} of {self.length(source)} in source {source}")
        run = int(np.searchsorted(ends, start, side="right"))
        pieces = []
        while start < stop:
            end = int(ends[run])
            count = min(end, stop) - start
            pieces.append(self._streams.window(source, int(stops[run]) - end + start, count))
            start += count
            run += 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def document_ends_by_part(self, source: int) -> Iterator[np.ndarray]:
        """See `Tokens.document_ends_by_part`."""
        starts, stops = self._runs[source]
        for ends in self._streams.document_ends_by_part(source) if len(stops) else ():
            run = np.minimum(np.searchsorted(stops, ends), len(stops) - 1)
            inside = (starts[run] < ends) & (ends <= stops[run])
            run = run[inside]
            ends = ends[inside]
            yield np.asarray(ends - stops[run] + self._ends[source][run])


SHARE = "data.validation.share"
DIGESTS = 2**64
"""Number of possible digests."""
MANY = 2**20
"""From this number of documents on, the split is kept on a node's disk."""
SIDES = ("trained", "held_out")
RUNS_FORMAT = 1


@dataclass(frozen=True)
class Split:
    """The documents of prepared data in two sets: for training, and held out. `bytes` is the size of the held-out
    text.
    """

    training: Subset
    held_out: Subset
    bytes: int


class Documents(Streams, Protocol):
    """Streams whose documents can be distinguished by their content."""

    def contents_by_part(self, source: int) -> Iterator[np.ndarray]:
        """See `Tokens.contents_by_part`."""


def split(tokens: Documents, share: float, needs_both_sides: bool = True, of: str = "") -> Split:
    """Hold out about the `share` of documents, those with the smallest digests.

    Equal documents are on the same side, and the side of a document does not depend on the others. For more than MANY
    documents, each node keeps the result on its disk, so that neither memory nor startup time grows with them.

    Args:
        tokens: the documents.
        share: the share to hold out.
        needs_both_sides: require that neither side is empty.
        of: which documents these are, for error messages; empty for all.

    Raises InputError if a side is empty although `needs_both_sides` is set, or if the data cannot distinguish
    documents.
    """
    limit = math.ceil(share * DIGESTS)  # exact: multiplying a float by a power of two does not round
    key = xxhash.xxh3_128_hexdigest(json.dumps([RUNS_FORMAT, tokens.digest, limit]).encode())
    runs = []
    facts_of = []
    for source in range(tokens.sources):

        def fill(makers: dict[str, RunsMaker], source: int = source) -> dict[str, Any]:
            return _scan(tokens, source, limit, makers)

        if tokens.manifest.documents > MANY:
            sides_of_source, facts = on_disk(tokens.derived / "split" / key, source, SIDES, fill)
        else:
            sides_of_source, facts = in_memory(SIDES, fill)
        runs.append(sides_of_source)
        facts_of.append(facts)
    held_out, every = (sum(facts[name] for facts in facts_of) for name in ("held_out", "documents"))
    lowest = min(facts["least"] for facts in facts_of)
    highest = max(facts["most"] for facts in facts_of)
    if needs_both_sides:
        _check_sides(lowest, highest, documents=every, held_out=held_out, share=share, of=of)
    sides = {side: [source_runs[side] for source_runs in runs] for side in SIDES}
    return Split(
        Subset(tokens, sides["trained"], every - held_out),
        Subset(tokens, sides["held_out"], held_out),
        sum(facts["bytes"] for facts in facts_of),
    )


def _scan(tokens: Documents, source: int, limit: int, makers: dict[str, RunsMaker]) -> dict[str, Any]:
    """Pass the runs of a source's documents on both sides to the makers.

    Returns the numbers of documents and held-out documents, the bytes of held-out text, and the least and greatest
    digest.
    """
    totals = {"documents": 0, "held_out": 0, "bytes": 0, "least": DIGESTS, "most": 0}
    begin = 0
    parts = zip(tokens.document_ends_by_part(source), tokens.contents_by_part(source), strict=True)
    for ends, entries in parts:
        if not len(ends):
            continue
        values = digests(entries)
        chosen = values < limit
        bounds = np.concatenate(([begin], ends))
        makers["trained"].add(*edges(bounds, ~chosen))
        makers["held_out"].add(*edges(bounds, chosen))
        begin = int(ends[-1])
        totals["documents"] += len(ends)
        totals["held_out"] += int(chosen.sum())
        totals["bytes"] += int(entries["bytes"][chosen].sum())
        totals["least"] = min(totals["least"], int(values.min()))
        totals["most"] = max(totals["most"], int(values.max()))
    return totals


def trained_documents(tokens: Tokens, held_out: Tokens, share: float) -> int:
    """Count the documents of the set `held_out` that are also in the training part of `tokens`, where `share` is held
    out.

    Raises InputError if either data set cannot distinguish documents.
    """
    ours = np.concatenate([digests(held_out.contents(source)) for source in range(held_out.sources)])
    ours = ours[ours >= math.ceil(share * DIGESTS)]
    is_trained = np.zeros(len(ours), dtype=bool)
    for source in range(tokens.sources):
        for entries in tokens.contents_by_part(source):
            is_trained |= np.isin(ours, digests(entries))
    return int(is_trained.sum())


def _check_sides(
    least_digest: int, most_digest: int, documents: int, held_out: int, share: float, of: str
) -> None:
    """Raise InputError if `held_out` has no document or every document; their digests are within the given bounds."""
    if 0 < held_out < documents:
        return
    lowest = least_digest / DIGESTS
    highest = most_digest / DIGESTS
    if not held_out:
        effect = "holds out none"
        hint = f"make it at least {_rounded(lowest, up=True)}"
    else:
        effect = "leaves none"
        hint = f"make it at most {_rounded(highest, up=False)}"
    if lowest == highest:
        hint = (
            "separate documents by lines of <|endoftext|>, or name held-out text in data.validation.sources"
        )
    raise InputError(f"{share:g} {effect} of {documents} documents{of}", SHARE, hint)


def _rounded(share: float, up: bool) -> str:
    """Round a share to three significant digits."""
    unit = 10.0 ** (math.floor(math.log10(share)) - 2)
    return f"{(math.floor(share / unit) + 1 if up else math.floor(share / unit)) * unit:.3g}"
