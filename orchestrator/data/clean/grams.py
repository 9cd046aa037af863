"""Words in a row of evaluation text, by which documents that hold some of it are found (Brown et al., 2020, app. C).

As datatrove 0.10 has it, with all of the evaluation text as what is looked for. A text of fewer words, though not of
very few, is looked for whole, where datatrove does not find it.
"""

from __future__ import annotations

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.config.redact import without_credentials
from orchestrator.data import sources
from orchestrator.data.clean.config import Decontaminate
from orchestrator.data.clean.documents import aligned, texts
from orchestrator.data.clean.plan import PlannedStep, others
from orchestrator.data.clean.removed import Removed
from orchestrator.data.clean.signatures import WordHashes
from orchestrator.data.clean.text_steps import Decide, Row
from orchestrator.data.clean.words import plain_words
from orchestrator.data.store.data_folder import DataFolder

ENTRY = np.dtype([("gram", "<u8"), ("source", "<u2"), ("words", "<u2")])
SUM = 8
"""Bytes of the checksum at the end of a stored index."""
PART_BYTES = 2**25
LEAST = 8
"""Words of a text that is looked for though it has fewer than are asked for, as in Brown et al.: an answer of one word
stands in most documents."""


def index_name(step: PlannedStep) -> str:
    """The file of a step's index."""
    return f"{step.key}/grams.bin"


def write_index(folder: DataFolder, step: PlannedStep) -> None:
    """Store the hashes of all words in a row of the evaluation text, sorted, unless that is done. Raises InputError."""
    if read_index(folder, step) is not None:
        return
    rule: Decontaminate = step.rule
    hashes = WordHashes()
    found = [np.zeros(0, ENTRY)]
    files = sources.resolve(others(rule, ()), "data.clean.decontaminate.sources")
    for part in aligned(sources.cut(files, PART_BYTES)):
        for text, _ in texts(part):
            words = plain_words(text)
            if len(words) < min(rule.words, LEAST):
                continue
            entries = np.zeros(max(1, len(words) - rule.words + 1), ENTRY)
            entries["gram"] = hashes.of_rows(words, rule.words)
            entries["source"], entries["words"] = part[0].file.source, min(rule.words, len(words))
            found.append(entries)
    index = np.unique(np.concatenate(found))
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
    """The stored index, ENTRY [n], sorted; None if there is none or it is damaged."""
    data = folder.read(index_name(step)) or b""
    if len(data) < SUM or xxhash.xxh3_64_digest(data[:-SUM]) != data[-SUM:]:
        return None
    return np.frombuffer(data[:-SUM], ENTRY)


def decontaminate(folder: DataFolder, step: PlannedStep) -> Decide:
    """Remove documents with words in a row of the stored index. Raises InputError if that is gone."""
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
                and (source := _first(entries, hashes.of_rows(words, length))) is not None
            ):
                return Removed(f"has text of {without_credentials(rule.sources[source].uri)}")
        return text

    return decide


def _first(entries: np.ndarray, grams: np.ndarray) -> int | None:
    """The source of the first of these hashes that is among the entries."""
    at = np.minimum(np.searchsorted(entries["gram"], grams), len(entries) - 1)
    hits = np.flatnonzero(entries["gram"][at] == grams)
    return int(entries["source"][at[hits[0]]]) if len(hits) else None
