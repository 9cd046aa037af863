"""How samples that are not trained on are divided over the ranks."""

from __future__ import annotations


def shares(samples: int, micro_batch: int, global_batch: int, ranks: int, rank: int) -> list[range]:
    """The numbers of the micro-batches that one of `ranks` computes in each pass over at most a global batch.

    All ranks have equally many in a pass; numbers from samples / micro_batch on are beyond the last sample.
    """
    parts, most = -(-samples // micro_batch), global_batch // (micro_batch * ranks)
    found = []
    for first in range(0, parts, most * ranks):
        count = min(most, -(-(parts - first) // ranks))
        found.append(range(first + rank * count, first + (rank + 1) * count))
    return found
