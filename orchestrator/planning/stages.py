"""Which layers a pipeline stage has. Standard library only, as `layout`."""

from __future__ import annotations


def layers_of(
    layers: int, stage: int, stages: int, first_less: int = 0, last_less: int = 1
) -> tuple[int, int]:
    """(first layer, number of layers) of a stage. Layers are dealt out evenly, where the embedding counts as
    `first_less` layers of the first stage and the head as `last_less` of the last one. Of fewer layers than stages
    neither counts, and the first stages have none."""
    if layers < stages:
        first_less = last_less = 0
    counted = layers + first_less + last_less
    start, end = (
        min(max(counted * number // stages - first_less, 0), layers) for number in (stage, stage + 1)
    )
    return start, end - start
