"""Decontamination: find documents that share word n-grams with evaluation text (Brown et al., 2020, appendix C).

The rules are those of datatrove 0.10 with one addition: an evaluation text that is shorter than an n-gram is matched as
a whole, unless it is very short. datatrove never matches it.
"""

from __future__ import annotations

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.config.redact import without_credentials
from orchestrator.data import sources
from orchestrator.data.clean.config import Decontaminate
from orchestrator.data.clean.document_rules import Decide, Row
from orchestrator.data.clean.documents import aligned, texts
from orchestrator.data.clean.plan import PlannedStep, comparison_sources
from orchestrator.data.clean.removed import Removed
from orchestrator.data.clean.signatures import WordHashes
from orchestrator.data.clean.words import plain_words
from orchestrator.data.store.data_folder import DataFolder

ENTRY = np.dtype([("gram", "<u8"), ("source", "<u2"), ("words", "<u2")])
"""One n-gram of the index: its hash, the number of its evaluation source, and its length in words."""
SUM = 8
"""Bytes of the checksum at the end of a stored index."""
PART_BYTES = 2**25
LEAST = 8
"""Minimum words of an evaluation text that is matched as a whole. A one-word answer occurs in most documents."""


def index_name(step: PlannedStep) -> str:
    """Return the file name of a step's index."""
    return f"{step.key}/grams.bin"


def write_index(folder: DataFolder, step: PlannedStep) -> None:
    """Store the sorted hashes of all n-grams of the evaluation text, unless a sound index exists. Raises InputError."""
    if read_index(folder, step) is not None:
        return
    rule: Decontaminate = step.rule
    hashes = WordHashes()
    entries_of_texts = [np.zeros(0, ENTRY)]
    files = sources.resolve(comparison_sources(rule, ()), "data.clean.decontaminate.sources")
    for part in aligned(sources.cut(files, PART_BYTES)):
        for text, _ in texts(part):
            words = plain_words(text)
            if len(words) < min(rule.words, LEAST):
                continue
            entries = np.zeros(max(1, len(words) - rule.words + 1), ENTRY)
            entries["gram"] = hashes.of_ngrams(words, rule.words)
            entries["source"], entries["words"] = part[0].file.source, min(rule.words, len(words))
            entries_of_texts.append(entries)
    # Sorted by hash, one entry for each hash, because lookups use binary search.
    index = np.unique(np.concatenate(entries_of_texts))
    index = index[np.concatenate([[True], index["gram"][1:] != index["gram"][:-1]])] if len(index) else index
    if not len(index):
        raise InputError(
            f"none of its texts has {min(rule.words, LEAST)} words",
            "data.clean.decontaminate.sources",
            "give evaluation text, or lower words",
        )
    data = index.tobytes()
    folder.write(index_name(step), data + xxhash.xxh3_64_digest(data))


def read_index(folder: DataFolder, step: PlannedStep) -> np.ndarray | None:
    """Return the stored index, ENTRY [n], sorted by hash; None if it is missing or damaged."""
    data = folder.read(index_name(step)) or b""
    if len(data) < SUM or xxhash.xxh3_64_digest(data[:-SUM]) != data[-SUM:]:
        return None
    return np.frombuffer(data[:-SUM], ENTRY)


def decontaminate(folder: DataFolder, step: PlannedStep) -> Decide:
    """Return a step that removes documents with an n-gram of the stored index.

    Raises InputError if the index is gone.
    """
    index = read_index(folder, step)
    if index is None:
        raise InputError("is damaged", folder.at(index_name(step)), "run the same command again")
    rule: Decontaminate = step.rule
    hashes = WordHashes()
    by_length = [(int(n), index[index["words"] == n]) for n in np.unique(index["words"])]

    def decide(text: str, row: Row) -> str | Removed:
        words = plain_words(text)
        for length, entries in by_length:
            if (
                len(words) >= length
                and (source := _first(entries, hashes.of_ngrams(words, length))) is not None
            ):
                return Removed(f"has text of {without_credentials(rule.sources[source].uri)}")
        return text

    return decide


def _first(entries: np.ndarray, grams: np.ndarray) -> int | None:
    """Return the source of the first of the hashes `grams` that is in the index; None without one."""
    at = np.minimum(np.searchsorted(entries["gram"], grams), len(entries) - 1)
    hits = np.flatnonzero(entries["gram"][at] == grams)
    return int(entries["source"][at[hits[0]]]) if len(hits) else None
