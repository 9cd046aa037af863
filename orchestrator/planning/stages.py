"""Which layers a pipeline stage has."""

from __future__ import annotations


def layers_of(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """(first layer, number of layers) of a stage. Of layers that cannot be dealt out evenly the last stage has fewer
    rather than more, since it has the head too, which counts as one layer here."""
    start, end = (min((layers + 1) * number // stages, layers) for number in (stage, stage + 1))
    return start, end - start
