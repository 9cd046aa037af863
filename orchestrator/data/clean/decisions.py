"""What a step decided of the documents of one part: a small file, which is written once and checked when it is read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import xxhash

from orchestrator.data.store.data_folder import DataFolder

SAMPLES = 4
"""Samples of removed documents of a part and a step."""
SHOWN = 400
"""Most characters of a sample's text."""


@dataclass
class Decision:
    """What a step decided of one part.

    Attributes:
        kept: which of the part's documents are left after this step, bool [documents].
        documents, bytes: how many the step was given, and the bytes of their text.
        removed, removed_bytes: how many of them it removed.
        changed, bytes_after: how many of the others it changed, and the bytes of all others.
        reasons: how many documents were removed for each reason.
        samples: some that were removed: a hash of the text, by which samples are drawn, the reason and the beginning.
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
        """Count a document of `size` bytes that is removed."""
        self.removed += 1
        self.removed_bytes += size
        self.reasons[reason] += 1
        self.samples = sample([*self.samples, sample_of(text, reason)], SAMPLES)


def sample_of(text: str, reason: str) -> list[str]:
    """A removed document as a sample."""
    return [xxhash.xxh3_64_hexdigest(text.encode()), reason, text[:SHOWN]]


def sample(found: list[list[str]], limit: int) -> list[list[str]]:
    """Some of the samples, the same in whatever order they are found."""
    return sorted(map(list, {tuple(entry) for entry in found}))[:limit]


def name(key: str, part: str) -> str:
    """The file of a step's decision on a part, by the key of each."""
    return f"{key}/{part}.json"


def write(folder: DataFolder, key: str, part: str, decision: Decision) -> None:
    """Store a decision."""
    bits = np.packbits(decision.kept).tobytes().hex()
    found = {
        **asdict(decision),
        "kept": [len(decision.kept), bits],
        "reasons": dict(sorted(decision.reasons.items())),
    }
    folder.write_json(name(key, part), {**found, "checksum": _checksum(found)})


def read(folder: DataFolder, key: str, part: str) -> Decision | None:
    """A stored decision, None if there is none or it is damaged."""
    try:
        found = folder.read_json(name(key, part))
        if found is None or found.pop("checksum") != _checksum(found):
            return None
        documents, bits = found.pop("kept")
        kept = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8), count=documents).astype(bool)
        return Decision(**{**found, "kept": kept, "reasons": Counter(found["reasons"])})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _checksum(found: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(found, sort_keys=True).encode())
