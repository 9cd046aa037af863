"""Run ranks in processes of this machine to their end, for commands that do nothing else meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cluster.workers.gang import FINISHED, Bundle, RankStatus
from cluster.workers.process_gang import ProcessGang


def run_to_the_end(
    world: int,
    bundle: Bundle,
    entry: str,
    config: dict[str, Any],
    patience: float,
    work: str,
    show: Callable[[RankStatus], object] = lambda rank: None,
) -> tuple[list[dict[str, Any]], Any]:
    """Run a gang to its end. Return the rows that rank 0 reported, and the result of its entry point.

    Args:
        world: number of ranks.
        bundle: the resources of each rank.
        entry: "module:function" of the program.
        config: its configuration.
        patience: seconds without a row or an evaluated batch after which the gang is stopped.
        work: name of the work, for messages.
        show: called with the status of rank 0 at every look.

    Raises:
        RuntimeError: if a rank fails, or if no rank makes progress for `patience` seconds. No process is left behind.
    """
    gang = ProcessGang()
    rows: list[dict[str, Any]] = []
    last_progress = (0, 0)
    moved = time.monotonic()
    try:
        gang.start(world, bundle, entry, config)
        while True:
            status = gang.poll(len(rows))
            rows.extend(status.rows)
            show(status.ranks[0])
            progress = len(rows), max((rank.evaluated_batches for rank in status.ranks), default=0)
            if progress != last_progress:
                last_progress, moved = progress, time.monotonic()
            if all(rank.state == "done" for rank in status.ranks):
                return rows, status.ranks[0].result
            _refuse(status.ranks, time.monotonic() - moved, patience, work)
            time.sleep(0.05)
    finally:
        gang.close()


def _refuse(ranks: tuple[RankStatus, ...], still: float, patience: float, work: str) -> None:
    broken = [rank for rank in ranks if rank.state in FINISHED and rank.state != "done"]
    if broken:
        raise RuntimeError(f"the {work} failed on rank {broken[0].rank}: {broken[0].error}")
    if still > patience:
        raise RuntimeError(f"the {work} made no progress for {patience:.0f} s")
