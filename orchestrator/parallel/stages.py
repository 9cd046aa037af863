"""Which layers a pipeline stage has. Standard library only, as `layout`."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise


def layers_of(
    layers: int, stage: int, stages: int, first_less: int = 0, last_less: int = 1
) -> tuple[int, int]:
    """(first layer, number of layers) of a stage. Layers are dealt out evenly, where the embedding counts as
    `first_less` layers of the first stage and the head as `last_less` of the last one. With fewer layers than stages
    neither counts, and the first stages have no layers."""
    counts = layers_by_stage(layers, stages, first_less, last_less)
    return sum(counts[:stage]), counts[stage]


@lru_cache(maxsize=8192)
def layers_by_stage(layers: int, stages: int, first_less: int = 0, last_less: int = 1) -> tuple[int, ...]:
    """How many layers each stage has."""
    if layers < stages:
        first_less = last_less = 0
    counted = layers + first_less + last_less
    ends = [min(max(counted * number // stages - first_less, 0), layers) for number in range(stages + 1)]
    return tuple(end - start for start, end in pairwise(ends))
