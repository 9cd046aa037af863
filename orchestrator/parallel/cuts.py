"""Where a pipeline is cut, and where it may be: the layers that embedding and head count as, by which stages are dealt
out evenly."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

from orchestrator.parallel.layout import Layout
from orchestrator.parallel.stages import layers_by_stage

MOST = 3
"""Cuts that are tried of a layout, besides that which leaves the first rank fewest layers: it holds most
micro-batches."""
EMBEDDING = 2
"""Layers that the embedding counts as at most."""


@lru_cache(maxsize=4096)
def cuts(
    layers: int, pp: int, schedule: str, virtual: int, first: float, head: float
) -> tuple[tuple[int, int], ...]:
    """(first_less, last_less) of the cuts to try, those first whose busiest rank has least to compute; `first` and
    `head` tell how many times as long as a layer embedding and head take. Of equal ones that which is usual."""
    by_rank: dict[tuple[int, ...], tuple[int, int]] = {}
    usual = Layout(pp, schedule=schedule, virtual=virtual)
    for less in [(0, 1), *itertools.product(range(EMBEDDING + 1), range(math.ceil(head) + 2))]:
        if min(layers_by_stage(layers, usual.stages, *less)) > 0:
            by_rank.setdefault(_by_rank(layers, pp, schedule, virtual, *less), less)
    last = usual.pipeline_rank_of(usual.stages - 1)

    def busiest(counts: tuple[int, ...]) -> float:
        more = [first * (rank == 0) + head * (rank == last) for rank in range(pp)]
        return max(count + each for count, each in zip(counts, more, strict=True))

    ordered = sorted(by_rank, key=lambda counts: (busiest(counts), by_rank[counts] != (0, 1)))
    found = ordered[:MOST] + ([min(ordered, key=lambda counts: counts[0])] if ordered else [])
    return tuple(by_rank[counts] for counts in dict.fromkeys(found)) or ((0, 1),)


def layers_by_rank(layers: int, layout: Layout) -> tuple[int, ...]:
    """Layers of each rank of the pipeline."""
    return _by_rank(layers, layout.pp, layout.schedule, layout.virtual, layout.first_less, layout.last_less)


@lru_cache(maxsize=8192)
def _by_rank(
    layers: int, pp: int, schedule: str, virtual: int, first_less: int, last_less: int
) -> tuple[int, ...]:
    layout = Layout(pp, schedule=schedule, virtual=virtual)
    by_stage = layers_by_stage(layers, layout.stages, first_less, last_less)
    return tuple(sum(by_stage[stage] for stage in layout.stages_of(rank)) for rank in range(pp))
