"""In which order a step adds numbers, which decides the last bits of its losses and weights.

Later versions of this software add in an order that takes less time. A run keeps the order that it began with, so that
it goes on to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

ARITHMETIC = "arithmetic"
"""The key of a commit's meta with the number of its run's order. Earlier versions stored the two keys below."""
CHUNKS_HEAD, CUTS_ROWS = "chunks_head", "cuts_rows"
HEAD_TOKENS = {"cpu": 256, "cuda": 2048}
"""Number of tokens whose logits a head computes at once. Fewer tokens make matrix products slower. On a CPU 256 are as
fast as all (docs/benchmarks.md); on a GPU the value is a guess from its ratio of FLOPs to bandwidth. The bits of a run
depend on it.
"""


class Arithmetic(IntEnum):
    """The orders so far, each with all that the preceding ones have."""

    WHOLE = 0
    """Logits of a whole micro-batch, and rows of full length."""
    CHUNKED_HEAD = 1
    """Heads compute the loss in chunks of tokens, see `workloads.model.chunked_loss`."""
    CUT_ROWS = 2
    """Rows are cut, and samples dealt by length, see `orchestrator.resolve.row_lengths`."""
    LABELLED_TOKENS = 3
    """Heads leave out tokens without a label, and samples are dealt so that ranks have equal work."""
    READ_ANSWERS = 4
    """Under `determinism: bitwise`, answers have the bits that training computes, see
    `workloads.model.exact_answers`."""

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Arithmetic:
        """Return the order of the run that wrote a commit with this meta."""
        if ARITHMETIC in meta:
            return cls(meta[ARITHMETIC])
        if meta.get(CUTS_ROWS):
            return cls.CUT_ROWS
        return cls.CHUNKED_HEAD if meta.get(CHUNKS_HEAD) else cls.WHOLE


NEWEST = max(Arithmetic)
"""The order of a run that begins now."""
