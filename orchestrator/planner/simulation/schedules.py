"""The order in which each rank of a pipeline runs its forward and backward passes, as torch's schedules have it.

A test compares each with `torch.distributed.pipelining`. F is a forward pass, B a full backward pass, I and W its two
halves: the gradient of the input, and of the weights (Qi et al., 2024).
"""

from __future__ import annotations

Action = tuple[str, int, int]
"""(kind, stage, micro-batch)."""
Order = tuple[tuple[Action, ...], ...]
"""The actions of each rank."""


def order(schedule: str, ranks: int, parts: int, chunks: int = 2) -> Order:
    """The actions of every rank for `parts` micro-batches; interleaved schedules run `chunks` stages a rank."""
    if schedule == "gpipe":
        return tuple(_gpipe(rank, parts) for rank in range(ranks))
    if schedule == "1f1b":
        return tuple(_one_by_one(rank, ranks, parts) for rank in range(ranks))
    if schedule == "zbv":
        return tuple(_zbv(rank, ranks, parts) for rank in range(ranks))
    return tuple(_interleaved(rank, ranks, parts, chunks, schedule == "zero_bubble") for rank in range(ranks))


def _gpipe(rank: int, parts: int) -> tuple[Action, ...]:
    forward = [("F", rank, part) for part in range(parts)]
    return tuple(forward + [("B", rank, part) for part in range(parts)])


def _one_by_one(rank: int, ranks: int, parts: int) -> tuple[Action, ...]:
    ahead = min(parts, ranks - rank)
    found: list[Action] = [("F", rank, part) for part in range(ahead)]
    for part in range(parts):
        found.append(("B", rank, part))
        if part + ahead < parts:
            found.append(("F", rank, part + ahead))
    return tuple(found)


def _interleaved(rank: int, ranks: int, parts: int, chunks: int, split: bool) -> tuple[Action, ...]:
    """Narayanan et al., 2021, section 2.2; with `split` the weights' gradients fill the bubble (ZB-1P)."""
    each = parts // max(1, parts // ranks)
    total = chunks * parts
    ahead = min((chunks - 1) * each + (1 if split else 2) * (ranks - 1 - rank), total)

    def forward_stage(step: int) -> int:
        return step // each % chunks * ranks + rank

    def backward_stage(step: int) -> int:
        return (chunks - 1 - (step - ahead) // each % chunks) * ranks + rank

    found: list[Action] = []
    counts: dict[tuple[str, int], int] = {}

    def add(kind: str, stage: int) -> None:
        part = counts.get((kind, stage), 0)
        counts[kind, stage] = part + 1
        found.append((kind, stage, part))

    weights = 0
    for step in range(total + ahead):
        if step < total:
            add("F", forward_stage(step))
        if step < ahead:
            continue
        add("I" if split else "B", backward_stage(step))
        if split and step - ahead >= rank:
            add("W", backward_stage(ahead + weights))
            weights += 1
    for step in range(weights, total if split else 0):
        add("W", backward_stage(ahead + step))
    return tuple(found)


def _zbv(rank: int, ranks: int, parts: int) -> tuple[Action, ...]:
    """Qi et al., 2024, section 6: the first stage of a rank going down, the second coming back up."""
    full = max(2 * ranks - 1, parts)
    stages = (rank, 2 * ranks - 1 - rank)
    found: list[Action] = []
    count = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}

    def add(kind: str, chunk: int) -> None:
        if count[kind, chunk] < parts:
            found.append((kind, stages[chunk], count[kind, chunk]))
        count[kind, chunk] += 1

    def back(chunk: int) -> None:
        add("I", chunk)
        add("W", chunk)

    for _ in range(2 * (ranks - rank) - 1):
        add("F", 0)
    for _ in range(rank):
        add("F", 1)
        add("F", 0)
    for _ in range(ranks - rank):
        add("F", 1)
        back(1)
    while count["F", 1] < count["F", 0] or count["F", 0] < full:
        if count["F", 0] < full:
            add("F", 0)
        back(0)
        add("F", 1)
        back(1)
    for _ in range(rank):
        add("I", 0)
        add("I", 1)
    # the weights' gradients that are still open come in their own order
    for _ in range(ranks - rank):
        back(0)
    for chunk in (1, 0):
        while count["W", chunk] < count["I", chunk]:
            add("W", chunk)
    return tuple(found)
