"""Decisions about similar documents: all parts are compared, and one document of each cluster stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import xxhash

from orchestrator.data.clean import decisions, signatures, similar_documents
from orchestrator.data.clean.decisions import Decision
from orchestrator.data.clean.documents import texts
from orchestrator.data.clean.passes import kept_of
from orchestrator.data.clean.plan import VERSION, PlannedStep
from orchestrator.data.clean.signatures import EXACT, Compared, Comparison
from orchestrator.data.clean.similar_documents import PAIR, Clusters, Slice
from orchestrator.data.samples.order import mix
from orchestrator.data.sources import Part
from orchestrator.data.store.data_folder import DataFolder

SAMPLES = 8
"""Samples of removed duplicates. Each takes another read of two parts."""


SUM = 8


@dataclass(frozen=True)
class Corpus:
    """All parts, by the files of their comparison data. Training parts, which have `keys`, come first.

    `before` is the key of the previous step; empty for the first one.
    """

    uri: str
    keys: Sequence[str]
    files: Sequence[str]
    before: str

    @property
    def count(self) -> int:
        """Number of parts."""
        return len(self.files)

    @property
    def folder(self) -> DataFolder:
        """The folder of the files."""
        return DataFolder(self.uri)

    def documents(self) -> int:
        """Return the number of documents in all parts."""
        return sum(self.compared(number).rows for number in range(self.count))

    def compared(self, number: int) -> Compared:
        """See `similar_documents.Parts`. Raises InputError if it is damaged."""
        return signatures.opened(self.folder, self.files[number])

    def alive(self, number: int) -> np.ndarray | None:
        """See `similar_documents.Parts`."""
        if number >= len(self.keys) or not self.before:
            return None
        return kept_of(self.folder, self.before, self.keys[number])


def comparison_of(step: PlannedStep) -> Comparison:
    """Return how a step compares documents."""
    if step.name == "exact_duplicates":
        return EXACT
    return signatures.comparison(step.options["threshold"], step.options["hashes"])


def other_key(step: PlannedStep, before: Sequence[PlannedStep]) -> str:
    """Return the key of the comparison data of text that is not trained on, after the steps `before` changed it."""
    how = [step.options.get(name) for name in ("threshold", "words", "hashes", "seed")]
    algorithm = signatures.algorithm() if step.name == "near_duplicates" else ""
    changes = [[earlier.name, earlier.options] for earlier in before]
    return xxhash.xxh3_128_hexdigest(f"others {VERSION} {step.name} {how} {algorithm} {changes}".encode())


def pairs_name(piece: Slice) -> str:
    """Return the file name of a slice's pairs, below the step's key."""
    return f"{piece.band}-{piece.first}-{piece.last}.pairs"


def write_pairs(corpus: Corpus, step: PlannedStep, piece: Slice) -> None:
    """Find the pairs of a slice and store them."""
    data = similar_documents.pairs(corpus, piece, comparison_of(step)).tobytes()
    corpus.folder.write(f"{step.key}/{pairs_name(piece)}", data + xxhash.xxh3_64_digest(data))


def _read_pairs(folder: DataFolder, name: str) -> np.ndarray:
    data = folder.read(name) or b""
    if len(data) < SUM or xxhash.xxh3_64_digest(data[:-SUM]) != data[-SUM:]:
        raise signatures.damaged(folder, name)
    return np.frombuffer(data[:-SUM], PAIR)


def decide_alike(corpus: Corpus, step: PlannedStep, pieces: Sequence[Slice], parts: Sequence[Part]) -> None:
    """Decide which documents are kept, and store the decision for each part. Raises InputError."""
    folder = corpus.folder
    pairs = [_read_pairs(folder, f"{step.key}/{pairs_name(piece)}") for piece in pieces]
    longest = step.options.get("keep") == "longest"
    chosen = similar_documents.clusters(pairs, corpus, len(parts), longest)
    samples = _samples(chosen, parts)
    for number, key in enumerate(corpus.keys):
        decisions.write(folder, step.key, key, _decision(corpus, chosen, number, samples.get(number, [])))


def _decision(corpus: Corpus, chosen: Clusters, number: int, samples: list[list[str]]) -> Decision:
    """Return the decision on part `number`: which documents stay after removing all but one of each cluster."""
    documents, sizes = corpus.compared(number).sizes()
    alive = corpus.alive(number)
    bytes_of_document = np.zeros(len(documents) if alive is None else len(alive), np.int64)
    bytes_of_document[documents] = sizes
    kept = np.ones(len(bytes_of_document), bool) if alive is None else alive.copy()
    total = int(bytes_of_document[kept].sum())
    removed, instead = chosen.removed_of_part(number)
    held_out = int(np.count_nonzero((instead >> np.uint64(32)) >= len(corpus.keys)))
    removed_bytes = int(bytes_of_document[removed].sum())
    result = Decision(
        kept,
        int(kept.sum()),
        bytes=total,
        removed=len(removed),
        removed_bytes=removed_bytes,
        changed=0,
        bytes_after=total - removed_bytes,
        samples=samples,
    )
    kept[removed] = False
    if held_out:
        result.reasons["held-out text"] = held_out
    if len(removed) > held_out:
        result.reasons["another document"] = len(removed) - held_out
    return result


def _samples(chosen: Clusters, parts: Sequence[Part]) -> dict[int, list[list[str]]]:
    """Return samples of removed documents by the number of their part, each with the document that is kept instead."""
    mask = chosen.document != chosen.kept
    removed = chosen.document[mask]
    kept = chosen.kept[mask]
    # Drawn by a hash of the number, so that every run shows the same samples.
    drawn = np.argsort(mix(removed), kind="stable")[:SAMPLES]
    wanted = {int(n) for n in (*removed[drawn], *kept[drawn]) if int(n) >> 32 < len(parts)}
    text = {number: _text(parts[number >> 32], number & 0xFFFFFFFF) for number in sorted(wanted)}
    result: dict[int, list[list[str]]] = {}
    for removed_document, kept_document in zip(removed[drawn].tolist(), kept[drawn].tolist(), strict=True):
        counterpart = (
            f"kept: {text[kept_document][: decisions.SHOWN]}" if kept_document in text else "held-out text"
        )
        result.setdefault(removed_document >> 32, []).append(
            decisions.sample_of(text[removed_document], counterpart)
        )
    return result


def _text(part: Part, number: int) -> str:
    return next(islice((text for text, _ in texts(part)), number, None), "")
