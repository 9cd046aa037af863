"""Which layers a pipeline stage has. Standard library only, as `layout`."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise


def layers_of(
    layers: int, stage: int, stages: int, first_less: int = 0, last_less: int = 1
) -> tuple[int, int]:
    """(first layer, number of layers) of a stage. Layers are dealt out evenly, where the embedding counts as
    `first_less` layers of the first stage and the head as `last_less` of the last one. A stage with as many has no
    layers of its own. If layers, embedding and head are together fewer than stages, neither counts."""
    counts = layers_by_stage(layers, stages, first_less, last_less)
    return sum(counts[:stage]), counts[stage]


@lru_cache(maxsize=8192)
def layers_by_stage(layers: int, stages: int, first_less: int = 0, last_less: int = 1) -> tuple[int, ...]:
    """How many layers each stage has."""
    if layers + first_less + last_less < stages:
        first_less = last_less = 0
    counted = layers + first_less + last_less
    ends = [min(max(counted * number // stages - first_less, 0), layers) for number in range(stages + 1)]
    return tuple(end - start for start, end in pairwise(ends))


def have_layers(counts: tuple[int, ...], bare_ends: bool) -> bool:
    """Return whether each stage has a layer; with `bare_ends` the first and the last one need none."""
    return all(counts[1:-1] if bare_ends else counts)
