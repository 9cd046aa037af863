"""The cuts of a pipeline into stages.

Embedding and head count as a number of layers each; with these the layers are divided evenly.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

from orchestrator.parallel.layout import Layout
from orchestrator.parallel.stages import have_layers, layers_by_stage

MOST = 3
"""Number of cuts tried for a layout, besides the one that gives the first rank, which holds most micro-batches, the
fewest layers."""
EMBEDDING = 2
"""Maximum number of layers that the embedding counts as."""


@lru_cache(maxsize=4096)
def cuts(
    layers: int, pp: int, schedule: str, virtual: int, first: float, head: float, bare_ends: bool
) -> tuple[tuple[int, int], ...]:
    """Return (first_less, last_less) of the cuts of a pipeline to try, those first whose busiest rank has least to
    compute.

    Among equal cuts the usual one comes first.

    Args:
        layers: number of layers of the model.
        pp: number of pipeline ranks.
        schedule: the name of the schedule.
        virtual: number of stages per rank.
        first: time of the embedding, in units of the time of a layer.
        head: time of the head, in the same unit.
        bare_ends: whether the first and the last stage may have no layer.
    """
    by_rank: dict[tuple[int, ...], tuple[int, int]] = {}
    usual = Layout(pp, schedule=schedule, virtual=virtual)
    for less in [(0, 1), *itertools.product(range(EMBEDDING + 1), range(math.ceil(head) + 2))]:
        if have_layers(layers_by_stage(layers, usual.stages, *less), bare_ends):
            by_rank.setdefault(_by_rank(layers, pp, schedule, virtual, *less), less)
    last = usual.pipeline_rank_of(usual.stages - 1)

    def busiest(counts: tuple[int, ...]) -> float:
        # A pipeline runs at the pace of its busiest rank. Under ZB-V the last stage is on the first rank, which then
        # has both ends.
        more = [first * (rank == 0) + head * (rank == last) for rank in range(pp)]
        return max(count + extra for count, extra in zip(counts, more, strict=True))

    ordered = sorted(by_rank, key=lambda counts: (busiest(counts), by_rank[counts] != (0, 1)))
    result = ordered[:MOST] + ([min(ordered, key=lambda counts: counts[0])] if ordered else [])
    return tuple(by_rank[counts] for counts in dict.fromkeys(result)) or ((0, 1),)


def layers_by_rank(layers: int, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers of each rank of the pipeline.

    Args:
        layers: number of layers of the model.
        layout: its pipeline axis decides the stages of a rank.
    """
    return _by_rank(
        layers,
        layout.pp,
        schedule=layout.schedule,
        virtual=layout.virtual,
        first_less=layout.first_less,
        last_less=layout.last_less,
    )


@lru_cache(maxsize=8192)
def _by_rank(
    layers: int, pp: int, schedule: str, virtual: int, first_less: int, last_less: int
) -> tuple[int, ...]:
    layout = Layout(pp, schedule=schedule, virtual=virtual)
    by_stage = layers_by_stage(layers, layout.stages, first_less, last_less)
    return tuple(sum(by_stage[stage] for stage in layout.stages_of(rank)) for rank in range(pp))
