"""Checking that chunks tile a tensor: no holes, no overlaps."""

from __future__ import annotations

import math


def tiling_problem(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Why boxes (start, extent) do not tile `shape` exactly; empty if they do.

    Boxes inside the shape that do not overlap and whose volumes add up to it leave no hole. A sweep over the first
    dimension avoids comparing all pairs.
    """
    for start, extent in boxes:
        if not len(start) == len(extent) == len(shape):
            return f"a chunk of {list(extent)} at {list(start)} in a tensor of {list(shape)}"
        if any(at + size > whole for at, size, whole in zip(start, extent, shape, strict=True)):
            return f"a chunk of {list(extent)} at {list(start)} reaches outside {list(shape)}"
    volume = sum(math.prod(extent) for _, extent in boxes)
    open_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for start, extent in sorted(box for box in boxes if math.prod(box[1])):
        open_boxes = [box for box in open_boxes if not shape or box[0][0] + box[1][0] > start[0]]
        for other, size in open_boxes:
            spans = zip(start, extent, other, size, strict=True)
            if all(a < b + lb and b < a + la for a, la, b, lb in spans):
                return f"chunks at {list(other)} and {list(start)} overlap"
        open_boxes.append((start, extent))
    if volume != math.prod(shape) or not boxes:
        return f"chunks hold {volume} of {math.prod(shape)} elements"
    return ""
