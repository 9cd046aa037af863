"""Which layers a pipeline stage has. Standard library only, as `layout`."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise


def layers_of(
    layers: int, stage: int, stages: int, first_less: int = 0, last_less: int = 1
) -> tuple[int, int]:
    """Return (first layer, number of layers) of a stage.

    Args:
        layers: number of layers of the model.
        stage: number of the stage, from 0.
        stages: number of stages.
        first_less: see `layers_by_stage`.
        last_less: see `layers_by_stage`.
    """
    counts = layers_by_stage(layers, stages, first_less, last_less)
    return sum(counts[:stage]), counts[stage]


@lru_cache(maxsize=8192)
def layers_by_stage(layers: int, stages: int, first_less: int = 0, last_less: int = 1) -> tuple[int, ...]:
    """Return the number of layers of each stage. Layers are dealt out evenly.

    The embedding counts as `first_less` layers of the first stage, and the head as `last_less` layers of the last one:
    a stage whose end counts as much as an even share has no layers of its own. If layers, embedding and head are
    together fewer than stages, neither end counts.

    Args:
        layers: number of layers of the model.
        stages: number of stages.
        first_less: number of layers that the embedding counts as.
        last_less: number of layers that the head counts as.
    """
    if layers + first_less + last_less < stages:
        first_less = last_less = 0
    counted = layers + first_less + last_less
    ends = [min(max(counted * number // stages - first_less, 0), layers) for number in range(stages + 1)]
    return tuple(end - start for start, end in pairwise(ends))


def have_layers(counts: tuple[int, ...], bare_ends: bool) -> bool:
    """Return whether each stage has a layer; with `bare_ends` the first and the last one need none.

    Args:
        counts: number of layers of each stage.
        bare_ends: whether the first and the last stage may have none.
    """
    return all(counts[1:-1] if bare_ends else counts)
