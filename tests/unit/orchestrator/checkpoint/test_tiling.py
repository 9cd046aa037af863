from __future__ import annotations

import itertools
import random

import numpy as np
import torch

from orchestrator.checkpoint.chunks import tiles_as_grid, tiling_problem


def arrays(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[np.ndarray]:
    return [
        np.array([box[side] for box in boxes], np.int64).reshape(len(boxes), len(shape)).T for side in (0, 1)
    ]


def test_untiled_agrees_with_counting_every_cell() -> None:
    chance = random.Random(0)
    outcomes = set()
    for _ in range(3000):
        shape = tuple(chance.randint(1, 3) for _ in range(chance.randint(0, 3)))
        boxes = []
        for _ in range(chance.randint(1, 4)):
            start = tuple(chance.randint(0, n - 1) for n in shape)
            boxes.append(
                (start, tuple(chance.randint(1, n - at) for n, at in zip(shape, start, strict=True)))
            )
        count = torch.zeros(shape)
        for start, extent in boxes:
            count[tuple(slice(at, at + n) for at, n in zip(start, extent, strict=True))] += 1
        assert (tiling_problem(shape, boxes) == "") == bool((count == 1).all())
        assert tiles_as_grid(shape, *arrays(shape, boxes)) == bool((count == 1).all())
        outcomes.add(bool((count == 1).all()))
    assert outcomes == {True, False}


def test_what_ranks_of_many_layouts_write_is_seen_to_tile() -> None:
    """In a large tensor, with a box left out, one twice, and one moved, too."""
    for rows, columns, panels in itertools.product((1, 7, 128), (1, 8), (1, 3)):
        shape = (1000, 960, 5)
        edges = [
            [side * part // parts for part in range(parts + 1)]
            for side, parts in ((1000, rows), (960, columns * panels))
        ]
        boxes = [
            ((top, left, 0), (bottom - top, right - left, 5))
            for top, bottom in itertools.pairwise(edges[0])
            for left, right in itertools.pairwise(edges[1])
        ]
        assert tiles_as_grid(shape, *arrays(shape, boxes))
        (start, extent), *others = boxes
        assert not tiles_as_grid(shape, *arrays(shape, others or [(start, (1, 1, 1))]))
        assert not tiles_as_grid(shape, *arrays(shape, [*boxes, boxes[0]]))
        if others:
            assert not tiles_as_grid(shape, *arrays(shape, [*others, (others[-1][0], extent)]))


def test_boxes_without_a_grid_are_compared() -> None:
    """A staircase of a thousand steps has a million cells."""
    left = [((row, 0), (1, row + 1)) for row in range(1000)]
    right = [((row, row + 1), (1, 1000 - row)) for row in range(1000)]
    boxes = left + right
    assert not tiles_as_grid((1000, 1001), *arrays((1000, 1001), boxes))
    assert tiling_problem((1000, 1001), boxes) == ""
