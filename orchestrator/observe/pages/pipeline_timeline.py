"""The timeline of a pipeline step, as planned and as measured, one below the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.observe.formatting import duration
from orchestrator.observe.pages import charts
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.flight_record import TIMELINE

LANE = 20.0
LEFT = 64.0
WIDTH = 1040.0
NAMES = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
LANES = 16
"""Maximum number of pipeline ranks that are drawn, evenly from the first to the last."""
Action = tuple[int, str, int, int, float, float]
"""Rank of the pipeline, kind, stage, micro-batch, begin and end in seconds."""


def measured(run: RunDir, ranks: Sequence[int], attempt: int) -> list[Action]:
    """Return what these ranks, one for each pipeline rank, recorded in that attempt; empty unless all did."""
    actions: list[Action] = []
    for pipeline_rank, rank in enumerate(ranks):
        recorded = run.read_json_or_empty(f"{TIMELINE}/rank-{rank}.json")
        if recorded.get("attempt") != attempt:
            return []
        actions += [(pipeline_rank, *action) for action in recorded.get("actions") or ()]
    first = min((action[4] for action in actions), default=0.0)
    return [(*action[:4], action[4] - first, action[5] - first) for action in actions]


def lanes(
    actions: Sequence[Action], longest: float, lane: float = LANE, min_width: float = 0.3
) -> list[dict[str, Any]]:
    """Return the bars of each rank in SVG units. The total width represents `longest` seconds; `lane` is a lane's
    height, `min_width` the minimum width of a bar.
    """
    ranks = sorted({action[0] for action in actions})
    every = max(1, -(-len(ranks) // LANES))
    scale = charts.Scale(0.0, longest or 1.0, LEFT, WIDTH)
    return [
        {
            "rank": rank,
            "y": lane * row,
            "bars": [
                {
                    "kind": kind,
                    "x": scale(begin),
                    "width": max(round(scale(end) - scale(begin), 2), min_width),
                    "title": f"{NAMES.get(kind, kind)} pass of micro-batch {part}, stage {stage}: "
                    f"{duration(end - begin)}",
                }
                for of, kind, stage, part, begin, end in actions
                if of == rank
            ],
        }
        for row, rank in enumerate(ranks[::every])
    ]


def timelines(run: RunDir, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the drawing of the layout in plan.json; empty without a pipeline."""
    planned: list[Action] = [tuple(action) for action in plan.get("timeline") or ()]
    chosen = plan.get("chosen") or {}
    pp = chosen.get("pp", 1)
    if pp == 1 or not planned:
        return []
    each = chosen.get("dp", 1) * chosen.get("cp", 1) * chosen.get("tp", 1)
    real = measured(run, [pipeline_rank * each for pipeline_rank in range(pp)], plan.get("attempt", 0))
    sides = {"planned": planned, "measured": real}
    longest = max(action[5] for actions in sides.values() for action in actions)
    return [
        {
            "side": side,
            "seconds": max(action[5] for action in actions),
            "busy": sum(action[5] - action[4] for action in actions) / pp,
            "lanes": lanes(actions, longest),
        }
        for side, actions in sides.items()
        if actions
    ]
