"""Which documents of prepared data are held out from training: those whose text says so."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data.prepare.contents import digests
from orchestrator.data.samples.runs import Runs, RunsMaker, edges, in_memory, on_disk
from orchestrator.data.samples.windows import Streams, StreamsOf
from orchestrator.data.store.derived_arrays import CHUNK
from orchestrator.data.store.tokens import Tokens


class Subset(StreamsOf):
    """The streams of the chosen documents of each source, one after the other; implements `Streams`."""

    def __init__(self, streams: Streams, runs: Sequence[Runs], documents: int) -> None:
        """`runs` has for each source those of the chosen documents, of which there are `documents`."""
        super().__init__(streams)
        self.documents = documents
        self._runs = [(found.starts, found.stops) for found in runs]
        self._ends = [found.ends for found in runs]
        self.tokens = sum(map(self.length, range(self.sources)))

    @property
    def digest(self) -> str:
        """See `Tokens.digest`."""
        found = xxhash.xxh3_128(self._streams.digest.encode())
        for starts, stops in self._runs:
            found.update(np.array([len(starts)], "<i8").tobytes())
            for values in (starts, stops):
                for at in range(0, len(values), CHUNK):
                    found.update(values[at : at + CHUNK].astype("<i8").tobytes())
        return found.hexdigest()

    def length(self, source: int) -> int:
        """Number of tokens of the chosen documents of a source."""
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
"""Number of digests that there may be."""
MANY = 2**20
"""Documents of data whose split is kept on a node's disk."""
SIDES = ("trained", "held_out")
RUNS_FORMAT = 1


@dataclass(frozen=True)
class Split:
    """The documents of prepared data in two: those that are trained on, and those that are held out, with the bytes of
    the latter's text."""

    training: Subset
    held_out: Subset
    bytes: int


class Documents(Streams, Protocol):
    """Streams of which the documents are told apart."""

    def contents_by_part(self, source: int) -> Iterator[np.ndarray]:
        """See `Tokens.contents_by_part`."""


def split(tokens: Documents, share: float, both: bool = True, of: str = "") -> Split:
    """Hold out about the `share` of documents whose digest is small: equal documents are on one side, and a document is
    on the same side whatever others there are.

    Of more than MANY documents each node keeps the result on its disk: neither memory nor the time of a start grows
    with them. `of` says which documents these are, if not all. Raises InputError if a side would be empty and `both`
    are wanted, or the data do not tell documents apart.
    """
    limit = math.ceil(share * DIGESTS)  # exact: the product of a float and a power of two is one
    key = xxhash.xxh3_128_hexdigest(json.dumps([RUNS_FORMAT, tokens.digest, limit]).encode())
    runs = []
    told = []
    for source in range(tokens.sources):

        def fill(makers: dict[str, RunsMaker], source: int = source) -> dict[str, Any]:
            return _scan(tokens, source, limit, makers)

        if tokens.manifest.documents > MANY:
            found, facts = on_disk(tokens.derived / "split" / key, source, SIDES, fill)
        else:
            found, facts = in_memory(SIDES, fill)
        runs.append(found)
        told.append(facts)
    held_out, every = (sum(facts[name] for facts in told) for name in ("held_out", "documents"))
    least = min(facts["least"] for facts in told)
    most = max(facts["most"] for facts in told)
    if both:
        _check_sides(least, most, every, held_out, share, of)
    sides = {side: [found[side] for found in runs] for side in SIDES}
    return Split(
        Subset(tokens, sides["trained"], every - held_out),
        Subset(tokens, sides["held_out"], held_out),
        sum(facts["bytes"] for facts in told),
    )


def _scan(tokens: Documents, source: int, limit: int, makers: dict[str, RunsMaker]) -> dict[str, Any]:
    """Give the runs of a source's documents on both sides to the makers; numbers of documents, bytes of those that are
    held out, the least and greatest digest."""
    told = {"documents": 0, "held_out": 0, "bytes": 0, "least": DIGESTS, "most": 0}
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
        told["documents"] += len(ends)
        told["held_out"] += int(chosen.sum())
        told["bytes"] += int(entries["bytes"][chosen].sum())
        told["least"], told["most"] = (
            min(told["least"], int(values.min())),
            max(told["most"], int(values.max())),
        )
    return told


def trained_documents(tokens: Tokens, held_out: Tokens, share: float) -> int:
    """How many documents of the set `held_out` are also among those of `tokens` that are trained on, where `share` of
    them is held out.

    Raises InputError if either does not tell documents apart.
    """
    ours = np.concatenate([digests(held_out.contents(source)) for source in range(held_out.sources)])
    ours = ours[ours >= math.ceil(share * DIGESTS)]
    there = np.zeros(len(ours), dtype=bool)
    for source in range(tokens.sources):
        for entries in tokens.contents_by_part(source):
            there |= np.isin(ours, digests(entries))
    return int(there.sum())


def _check_sides(
    least_digest: int, most_digest: int, documents: int, held_out: int, share: float, of: str
) -> None:
    """Raise InputError if `held_out` of the documents with digests in these bounds are none or all of them."""
    if 0 < held_out < documents:
        return
    least = least_digest / DIGESTS
    most = most_digest / DIGESTS
    if not held_out:
        what = "holds out none"
        hint = f"make it at least {_rounded(least, up=True)}"
    else:
        what = "leaves none"
        hint = f"make it at most {_rounded(most, up=False)}"
    if least == most:
        hint = (
            "separate documents by lines of <|endoftext|>, or name held-out text in data.validation.sources"
        )
    raise InputError(f"{share:g} {what} of {documents} documents{of}", SHARE, hint)


def _rounded(share: float, up: bool) -> str:
    """A share to three significant digits."""
    unit = 10.0 ** (math.floor(math.log10(share)) - 2)
    return f"{(math.floor(share / unit) + 1 if up else math.floor(share / unit)) * unit:.3g}"
