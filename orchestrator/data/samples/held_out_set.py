"""Sets of held-out text, as an objective reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.config.errors import InputError
from orchestrator.data.samples.held_out_split import SHARE, Split
from orchestrator.data.samples.sample_reader import SampleReader
from orchestrator.data.samples.windows import Streams, windows_of
from orchestrator.data.store.tokens import Tokens
from workloads.workload import Batch, Objective


@dataclass(frozen=True)
class HeldOut:
    """A set of held-out text as an objective reads it, with its number of tokens, documents and bytes of text.

    Special tokens before a text do not count as its tokens, because they are not predicted.
    """

    read: SampleReader
    tokens: int
    documents: int
    bytes: int

    @property
    def samples(self) -> int:
        """Number of samples, at least 1."""
        return len(self.read)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return the samples of these numbers, in this order, as in the first pass."""
        return self.read.collate(numbers, pass_number=0)


def split_set(parts: Split, objective: Objective) -> HeldOut:
    """Return the held-out documents of a split for an objective. Raises InputError if they have no sample, or are too
    few.
    """
    return _held_out(parts.held_out, objective, SHARE, parts.held_out.documents, parts.bytes)


def set_of(tokens: Tokens, objective: Objective, where: str) -> HeldOut:
    """Return a separate text as a set for an objective. `where` is its key in the job file.

    Raises InputError if it has no sample, or too few documents.
    """
    return _held_out(tokens, objective, where, tokens.manifest.documents, tokens.manifest.bytes)


def _held_out(streams: Streams, objective: Objective, where: str, documents: int, text_bytes: int) -> HeldOut:
    windowing = objective.windowing
    windows = [
        windows_of(streams, source, windowing, include_partial=True) for source in range(streams.sources)
    ]
    tokens = sum(map(streams.length, range(streams.sources)))
    if not any(map(len, windows)):
        problem = (
            f"{tokens} tokens are less than one sample of {objective.name}, which has {windowing.window}"
        )
        raise InputError(problem, where, "hold out more text, or lower data.sequence_length")
    if windowing.unit != "stream" and sum(source.documents or 0 for source in windows) < windowing.documents:
        problem = (
            f"the set has {documents} document(s), but {objective.name} needs at least {windowing.documents}"
        )
        raise InputError(problem, where, "hold out more documents")
    frames = 0 if streams.manifest.records else documents * len(streams.manifest.frame[0])
    return HeldOut(SampleReader(streams, windows, objective), tokens - frames, documents, text_bytes)
