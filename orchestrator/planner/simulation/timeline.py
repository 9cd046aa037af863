"""The step of a pipeline, simulated event by event.

An action begins when its rank is free and its input has arrived. No bubble is computed by a formula. With p ranks, m
micro-batches, equal stages and free messages, the simulated bubble is (p - 1)/m of the ideal time under GPipe and 1F1B,
and (p - 1)/(v m) under interleaved 1F1B with v stages per rank (Narayanan et al., 2021, section 2.2).

Kinds of actions: F forward, B whole backward, I gradient of the inputs, W gradient of the weights (B = I + W).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.parallel.layout import round_length

Action = tuple[str, int, int]
"""(kind, stage, micro-batch); kind is F, B, I or W."""
Order = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in the order in which it runs them."""


def order(schedule: str, ranks: int, parts: int, chunks: int = 2) -> Order:
    """Return the actions of every rank for `parts` micro-batches. Interleaved: `chunks` stages per rank.

    Args:
        schedule: its name.
        ranks: ranks of the pipeline.
        parts: micro-batches.
        chunks: stages per rank of interleaved schedules.
    """
    if schedule == "gpipe":
        return tuple(_gpipe(rank, parts) for rank in range(ranks))
    if schedule == "1f1b":
        return tuple(_one_by_one(rank, ranks, parts) for rank in range(ranks))
    if schedule == "zbv":
        return tuple(_zbv(rank, ranks, parts) for rank in range(ranks))
    return tuple(_interleaved(rank, ranks, parts, chunks, schedule == "zero_bubble") for rank in range(ranks))


def _gpipe(rank: int, parts: int) -> tuple[Action, ...]:
    """All forward passes, then all backward passes; activations of all micro-batches are kept in between."""
    forward = [("F", rank, part) for part in range(parts)]
    return tuple(forward + [("B", rank, part) for part in range(parts)])


def _one_by_one(rank: int, ranks: int, parts: int) -> tuple[Action, ...]:
    """1F1B: p - rank forward passes to warm up, then backward and forward passes alternate.

    At most p - rank micro-batches are between their forward and backward pass, whatever their number.
    """
    # The last rank has no warm-up: its backward pass follows its first forward pass at once.
    warm_up = min(parts, ranks - rank)
    actions: list[Action] = [("F", rank, part) for part in range(warm_up)]
    for part in range(parts):
        actions.append(("B", rank, part))
        if part + warm_up < parts:
            actions.append(("F", rank, part + warm_up))
    return tuple(actions)


def _interleaved(rank: int, ranks: int, parts: int, chunks: int, split: bool) -> tuple[Action, ...]:
    """Interleaved 1F1B (Narayanan et al., 2021, section 2.2); with `split` W fills the bubble (ZB-1P, Qi et al., 2024).

    Rank r has the stages r, r + p, r + 2p, ... It runs `run_length` micro-batches, n for short, through one of
    them before it moves to the next. Warm-up: (v - 1) n + 2 (p - 1 - r) forward passes, with `split`
    (v - 1) n + (p - 1 - r).
    """
    run_length = round_length(ranks, parts)
    total = chunks * parts  # forward passes of this rank
    warm_up = min((chunks - 1) * run_length + (1 if split else 2) * (ranks - 1 - rank), total)

    def forward_stage(step: int) -> int:
        return step // run_length % chunks * ranks + rank

    def backward_stage(step: int) -> int:
        # Backward passes visit the chunks in the opposite order.
        return (chunks - 1 - (step - warm_up) // run_length % chunks) * ranks + rank

    actions: list[Action] = []
    counts: dict[tuple[str, int], int] = {}

    def add(kind: str, stage: int) -> None:
        # Every kind of action of a stage takes the micro-batches in order.
        part = counts.get((kind, stage), 0)
        counts[kind, stage] = part + 1
        actions.append((kind, stage, part))

    weights = 0  # number of W so far
    for step in range(total + warm_up):
        if step < total:
            add("F", forward_stage(step))
        if step < warm_up:
            continue
        add("I" if split else "B", backward_stage(step))
        # Rank r lets r of its W wait, which is what fills the bubble at the end (Qi et al., 2024, ZB-1P).
        if split and step - warm_up >= rank:
            add("W", backward_stage(warm_up + weights))
            weights += 1
    for step in range(weights, total if split else 0):
        add("W", backward_stage(warm_up + step))
    return tuple(actions)


def _zbv(rank: int, ranks: int, parts: int) -> tuple[Action, ...]:
    """ZB-V (Qi et al., 2024, section 6): rank r has the stages r and 2p - 1 - r, down the V and up again.

    The order is built for at least 2p - 1 micro-batches; actions of micro-batches beyond `parts` are left out.
    """
    full = max(2 * ranks - 1, parts)
    stages = (rank, 2 * ranks - 1 - rank)
    actions: list[Action] = []
    count = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}

    def add(kind: str, chunk: int) -> None:
        if count[kind, chunk] < parts:
            actions.append((kind, stages[chunk], count[kind, chunk]))
        count[kind, chunk] += 1

    def back(chunk: int) -> None:
        add("I", chunk)
        add("W", chunk)

    # Warm-up: forward passes down the V, then in both directions.
    for chunk in [0] * (2 * (ranks - rank) - 1) + [1, 0] * rank:
        add("F", chunk)
    for _ in range(ranks - rank):
        add("F", 1)
        back(1)
    # Steady phase: a forward and a whole backward pass of each stage in turn.
    while count["F", 1] < count["F", 0] or count["F", 0] < full:
        if count["F", 0] < full:
            add("F", 0)
        back(0)
        add("F", 1)
        back(1)
    # End: I alone as long as other ranks wait for it.
    for _ in range(rank):
        add("I", 0)
        add("I", 1)
    for _ in range(ranks - rank):
        back(0)
    # Then the W that were postponed.
    for chunk in (1, 0):
        while count["W", chunk] < count["I", chunk]:
            add("W", chunk)
    return tuple(actions)


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step.

    Attributes:
        seconds: from the first action to the end of the last one.
        busy: seconds that each rank ran actions.
        events: (action, begin, end) by rank; empty unless they were kept.
    """

    seconds: float
    busy: tuple[float, ...]
    events: tuple[tuple[tuple[Action, float, float], ...], ...]

    def actions(self) -> list[tuple[int, str, int, int, float, float]]:
        """Return (rank of the pipeline, kind, stage, micro-batch, begin, end) of each kept event, times in seconds."""
        return [
            (rank, *action, begin, end)
            for rank, events in enumerate(self.events)
            for action, begin, end in events
        ]


@dataclass(frozen=True)
class ActionSequence:
    """The actions of all ranks in one sequence, in which each comes after the action that produces its input.

    The sequence depends on the schedule only, so that `simulate_actions` can run it for many layouts in one loop.

    Attributes:
        actions: the sequence; the actions of a rank keep its order.
        entries: for each action (rank, index in `kinds`, position of the action that produces its input, index in
            `transfers` of the way that its input takes). Positions count from 1; 0 stands for no input.
        kinds: the distinct (rank, kind, stage), each with the number of its actions.
        transfers: the distinct (from stage, to stage) between different ranks; the first is None, for everything else.
    """

    actions: tuple[Action, ...]
    entries: tuple[tuple[int, int, int, int], ...]
    kinds: tuple[tuple[tuple[int, str, int], int], ...]
    transfers: tuple[tuple[int, int] | None, ...]


def in_one_sequence(order_of_ranks: Order) -> ActionSequence:
    """Sort the actions of all ranks into one sequence.

    Raises:
        ValueError: if the order has a deadlock.
    """
    rank_of = {stage: rank for rank, actions in enumerate(order_of_ranks) for _, stage, _ in actions}
    kinds: dict[tuple[int, str, int], int] = {}
    transfers: dict[tuple[int, int] | None, int] = {None: 0}
    # Positions of finished passes, and ranks that wait for a pass, by (is forward, stage, micro-batch).
    finished: dict[tuple[bool, int, int], int] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    sequence: list[Action] = []
    entries: list[tuple[int, int, int, int]] = []
    positions = [0] * len(order_of_ranks)  # index of each rank's next action
    ready = list(range(len(order_of_ranks)))
    while ready:
        rank = ready.pop()
        actions = order_of_ranks[rank]
        while positions[rank] < len(actions):
            kind, stage, part = action = actions[positions[rank]]
            forward = kind == "F"
            # Hidden states come from the stage before, gradients from the stage after.
            source = stage - 1 if forward else stage + 1
            input_position = 0
            transfer = None
            # W needs only what its own I left behind, so it never waits for a message.
            if kind != "W" and source in rank_of:
                if (forward, source, part) not in finished:
                    waiting[forward, source, part] = rank
                    break
                input_position = finished[forward, source, part]
                transfer = (source, stage) if rank_of[source] != rank else None
            number = kinds.setdefault((rank, kind, stage), len(kinds))
            sequence.append(action)
            entries.append((rank, number, input_position, transfers.setdefault(transfer, len(transfers))))
            positions[rank] += 1
            if kind != "W":
                finished[forward, stage, part] = len(sequence)
                if (forward, stage, part) in waiting:
                    ready.append(waiting.pop((forward, stage, part)))
    if len(sequence) < sum(map(len, order_of_ranks)):
        raise ValueError("the schedule's order has a deadlock")
    counts = Counter(number for _, number, _, _ in entries)
    return ActionSequence(
        actions=tuple(sequence),
        entries=tuple(entries),
        kinds=tuple((kind, counts[number]) for kind, number in kinds.items()),
        transfers=tuple(transfers),
    )


@lru_cache(maxsize=64)
def action_sequence(schedule: str, ranks: int, parts: int, chunks: int) -> ActionSequence:
    """Return the actions of a schedule in one sequence; arguments as for `order`.

    Args:
        schedule: its name.
        ranks: ranks of the pipeline.
        parts: micro-batches.
        chunks: stages per rank of interleaved schedules.
    """
    return in_one_sequence(order(schedule, ranks, parts, chunks))


def simulate_actions(
    sequence: ActionSequence,
    seconds: Callable[[str, int], float],
    transfer_seconds: Callable[[int, int], float],
    keep: bool = False,
) -> SimulatedStep:
    """Simulate a step: begin = max(end of the rank's last action, end of the input's action + its delay).

    Args:
        sequence: the actions of all ranks.
        seconds: duration of an action, by kind and stage.
        transfer_seconds: seconds in which hidden states, or their gradient, go from one stage to another on a
            different rank. The sender computes meanwhile.
        keep: whether to keep the events.
    """
    costs = [seconds(kind, stage) for (_, kind, stage), _ in sequence.kinds]
    delays = [transfer_seconds(*transfer) if transfer else 0.0 for transfer in sequence.transfers]
    ranks = 1 + max(rank for (rank, _, _), _ in sequence.kinds)
    ends = [0.0]  # by position; position 0 stands for "no input"
    clock = [0.0] * ranks
    events: list[list[tuple[Action, float, float]]] = [[] for _ in range(ranks)]
    for rank, kind, input_position, transfer in sequence.entries:
        begin = ends[input_position] + delays[transfer]
        if clock[rank] > begin:
            begin = clock[rank]
        clock[rank] = end = begin + costs[kind]
        ends.append(end)
        if keep:
            events[rank].append((sequence.actions[len(ends) - 2], begin, end))
    busy = [0.0] * ranks
    for ((rank, _, _), count), cost in zip(sequence.kinds, costs, strict=True):
        busy[rank] += count * cost
    return SimulatedStep(
        seconds=max(clock),
        busy=tuple(busy),
        events=tuple(tuple(rank_events) for rank_events in events),
    )
