from __future__ import annotations

import random

import torch

from orchestrator.checkpoint.manifest import tiling_problem


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
        outcomes.add(bool((count == 1).all()))
    assert outcomes == {True, False}
