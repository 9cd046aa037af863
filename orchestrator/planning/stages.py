"""Which layers a pipeline stage has."""

from __future__ import annotations


def layers_of(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """(first layer, number of layers) of a stage. Of layers that cannot be dealt out evenly the last stage has fewer
    rather than more, since it has the head too, which counts as one layer here. It has one at least: of fewer layers
    than stages the first stages have none."""
    counted = layers + 1 if layers >= stages else layers
    start, end = (min(counted * number // stages, layers) for number in (stage, stage + 1))
    return start, end - start
