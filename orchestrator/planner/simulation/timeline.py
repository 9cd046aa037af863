"""A pipeline's step played event by event: each action begins when its rank is free and its input is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

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


@dataclass(frozen=True)
class Played:
    """When a step's actions ran: seconds in all, seconds that each rank was busy, and (action, begin, end) by rank."""

    seconds: float
    busy: tuple[float, ...]
    events: tuple[tuple[tuple[Action, float, float], ...], ...]

    def actions(self) -> list[tuple[int, str, int, int, float, float]]:
        """Rank of the pipeline, kind, stage, micro-batch, begin and end in seconds of each event that was kept."""
        return [
            (rank, *action, begin, end)
            for rank, events in enumerate(self.events)
            for action, begin, end in events
        ]


@dataclass(frozen=True)
class InTurn:
    """The actions of all ranks in one row, each behind those that it waits for.

    Attributes:
        actions: in that row; of a rank they are in its order.
        turns: of each its rank; the place of its kind among `kinds`; the place in the row, counted from 1, of the
            action that makes its input, 0 if none does; the place of its input's way among `ways`.
        kinds: rank, kind and stage of the actions, each with how many there are.
        ways: (from stage, to stage) of what goes from one rank to another; the first is None, of all else.
    """

    actions: tuple[Action, ...]
    turns: tuple[tuple[int, int, int, int], ...]
    kinds: tuple[tuple[tuple[int, str, int], int], ...]
    ways: tuple[tuple[int, int] | None, ...]


def in_turn(of: Order) -> InTurn:
    """The actions of every rank in a row. Raises ValueError if the order waits for itself."""
    rank_of = {stage: rank for rank, actions in enumerate(of) for _, stage, _ in actions}
    kinds: dict[tuple[int, str, int], int] = {}
    ways: dict[tuple[int, int] | None, int] = {None: 0}
    made: dict[tuple[bool, int, int], int] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    row: list[Action] = []
    turns: list[tuple[int, int, int, int]] = []
    at, ready = [0] * len(of), list(range(len(of)))
    while ready:
        rank = ready.pop()
        actions = of[rank]
        while at[rank] < len(actions):
            kind, stage, part = action = actions[at[rank]]
            forward = kind == "F"
            before = stage - 1 if forward else stage + 1
            needed, way = 0, None
            if kind != "W" and before in rank_of:
                if (forward, before, part) not in made:
                    waiting[forward, before, part] = rank
                    break
                needed = made[forward, before, part]
                way = (before, stage) if rank_of[before] != rank else None
            number = kinds.setdefault((rank, kind, stage), len(kinds))
            row.append(action)
            turns.append((rank, number, needed, ways.setdefault(way, len(ways))))
            at[rank] += 1
            if kind != "W":
                made[forward, stage, part] = len(row)
                if (forward, stage, part) in waiting:
                    ready.append(waiting.pop((forward, stage, part)))
    if len(row) < sum(map(len, of)):
        raise ValueError("the schedule's order waits for itself")
    counts = Counter(number for _, number, _, _ in turns)
    return InTurn(
        tuple(row), tuple(turns), tuple((kind, counts[number]) for kind, number in kinds.items()), tuple(ways)
    )


@lru_cache(maxsize=64)
def scheduled(schedule: str, ranks: int, parts: int, chunks: int) -> InTurn:
    """The actions of a schedule, see `order`, in a row."""
    return in_turn(order(schedule, ranks, parts, chunks))


def play(
    row: InTurn,
    seconds: Callable[[str, int], float],
    sent: Callable[[int, int], float],
    keep: bool = False,
) -> Played:
    """Play the actions of every rank.

    seconds: of an action of that kind on that stage. sent: seconds for hidden states, or their gradient, from a stage
    to one of another rank; the sender goes on meanwhile. With `keep` the events are kept.
    """
    costs = [seconds(kind, stage) for (_, kind, stage), _ in row.kinds]
    delays = [sent(*way) if way else 0.0 for way in row.ways]
    ranks = 1 + max(rank for (rank, _, _), _ in row.kinds)
    ended, clock = [0.0], [0.0] * ranks
    events: list[list[tuple[Action, float, float]]] = [[] for _ in range(ranks)]
    for rank, kind, needed, way in row.turns:
        begin = ended[needed] + delays[way]
        if clock[rank] > begin:
            begin = clock[rank]
        clock[rank] = end = begin + costs[kind]
        ended.append(end)
        if keep:
            events[rank].append((row.actions[len(ended) - 2], begin, end))
    busy = [0.0] * ranks
    for ((rank, _, _), count), cost in zip(row.kinds, costs, strict=True):
        busy[rank] += count * cost
    return Played(max(clock), tuple(busy), tuple(tuple(each) for each in events))
