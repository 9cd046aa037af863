"""A step's decisions on the documents of one part: a small file, written once and verified when read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import xxhash

from orchestrator.data.store.data_folder import DataFolder

SAMPLES = 4
"""Samples of removed documents for each part and step."""
SHOWN = 400
"""Maximum characters of a sample's text."""


@dataclass
class Decision:
    """A step's decision on one part.

    Attributes:
        kept: whether each document of the part is left after this step, bool [documents].
        documents, bytes: number of documents that the step received, and the bytes of their text.
        removed, removed_bytes: of these, what it removed.
        changed, bytes_after: number of remaining documents that it changed, and the bytes of all remaining ones.
        reasons: number of removed documents for each reason.
        samples: some removed documents: a hash of the text, the reason, and the beginning of the text.
    """

    kept: np.ndarray
    documents: int = 0
    bytes: int = 0
    removed: int = 0
    removed_bytes: int = 0
    changed: int = 0
    bytes_after: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    samples: list[list[str]] = field(default_factory=list)

    def remove(self, text: str, size: int, reason: str) -> None:
        """Count a removed document of `size` bytes."""
        self.removed += 1
        self.removed_bytes += size
        self.reasons[reason] += 1
        self.samples = sample([*self.samples, sample_of(text, reason)], SAMPLES)


def sample_of(text: str, reason: str) -> list[str]:
    """Return a removed document as a sample."""
    return [xxhash.xxh3_64_hexdigest(text.encode()), reason, text[:SHOWN]]


def sample(samples: list[list[str]], limit: int) -> list[list[str]]:
    """Return up to `limit` samples, independent of the order in which they were collected."""
    return sorted(map(list, {tuple(entry) for entry in samples}))[:limit]


def name(key: str, part: str) -> str:
    """Return the file name of a decision, given the keys of the step and the part."""
    return f"{key}/{part}.json"


def write(folder: DataFolder, key: str, part: str, decision: Decision) -> None:
    """Store a decision."""
    bits = np.packbits(decision.kept).tobytes().hex()
    record = {
        **asdict(decision),
        "kept": [len(decision.kept), bits],
        "reasons": dict(sorted(decision.reasons.items())),
    }
    folder.write_json(name(key, part), {**record, "checksum": _checksum(record)})


def read(folder: DataFolder, key: str, part: str) -> Decision | None:
    """Return a stored decision; None if it is missing or damaged."""
    try:
        stored = folder.read_json(name(key, part))
        if stored is None or stored.pop("checksum") != _checksum(stored):
            return None
        documents, bits = stored.pop("kept")
        kept = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8), count=documents).astype(bool)
        return Decision(**{**stored, "kept": kept, "reasons": Counter(stored["reasons"])})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _checksum(record: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())
