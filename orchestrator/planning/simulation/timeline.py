"""A pipeline's step played event by event: each action begins when its rank is free and its input is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.planning.simulation.schedules import Action, Order


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


def play(
    order: Order,
    seconds: Callable[[str, int], float],
    sent: Callable[[int, int], float],
    stages: int,
    rank_of: Mapping[int, int],
    keep: bool = False,
) -> Played:
    """Play the actions of every rank.

    seconds: of an action of that kind on that stage. sent: seconds for hidden states, or their gradient, from one stage
    to another; the sender goes on meanwhile. rank_of: the rank that runs each stage. With `keep` the events are
    kept. Raises ValueError if the order waits for itself.
    """
    costs = {(kind, stage): seconds(kind, stage) for kind in "FBIW" for stage in range(stages)}
    links = {
        (a, b): 0.0 if rank_of[a] == rank_of[b] else sent(a, b)
        for a in range(stages)
        for b in (a - 1, a + 1)
        if 0 <= b < stages
    }
    forward_done: dict[tuple[int, int], float] = {}
    backward_done: dict[tuple[int, int], float] = {}
    clock, at, busy = [0.0] * len(order), [0] * len(order), [0.0] * len(order)
    events: list[list[tuple[Action, float, float]]] = [[] for _ in order]
    waiting: dict[tuple[bool, int, int], int] = {}
    ready = list(range(len(order)))
    last = stages - 1
    while ready:
        rank = ready.pop()
        actions, now, index, spent = order[rank], clock[rank], at[rank], busy[rank]
        while index < len(actions):
            kind, stage, part = actions[index]
            if kind == "F":
                if stage:
                    there = forward_done.get((stage - 1, part))
                    if there is None:
                        waiting[True, stage - 1, part] = rank
                        break
                    now = max(now, there + links[stage - 1, stage])
            elif kind != "W" and stage < last:
                there = backward_done.get((stage + 1, part))
                if there is None:
                    waiting[False, stage + 1, part] = rank
                    break
                now = max(now, there + links[stage + 1, stage])
            took = costs[kind, stage]
            if keep:
                events[rank].append((actions[index], now, now + took))
            now += took
            spent += took
            index += 1
            if kind != "W":
                forward = kind == "F"
                (forward_done if forward else backward_done)[stage, part] = now
                waiter = waiting.pop((forward, stage, part), None)
                if waiter is not None:
                    ready.append(waiter)
        clock[rank], at[rank], busy[rank] = now, index, spent
    if any(index < len(actions) for index, actions in zip(at, order, strict=True)):
        raise ValueError("the schedule's order waits for itself")
    return Played(max(clock), tuple(busy), tuple(tuple(e) for e in events))
