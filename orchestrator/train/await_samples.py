"""Waiting for samples that are still prepared, as all ranks do together."""

from __future__ import annotations

import time
from typing import Any

from cluster.workers.worker_context import WorkerContext
from orchestrator.data.samples.batches import Prefetch
from orchestrator.parallel.rank_messages import agree

LONGEST = 0.5
"""Seconds between two looks, at most."""


def await_samples(prefetched: Prefetch[Any], context: WorkerContext) -> bool:
    """Wait until all ranks have the samples of the next step. Returns False if any is to stop before; all ranks get the
    same. The controller ends a gang that waits while no part is prepared."""
    context.set_waiting(True)
    pause = LONGEST / 128
    while not (agreed := agree(0, context.stop_requested(), ready=prefetched.is_ready)).ready:
        if agreed.stop:
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
    context.set_waiting(False)
    return agreed.ready


def is_growing(streaming: bool, all_there: bool) -> bool:
    """Whether data that is streamed is not all there for some rank; all ranks get the same."""
    return streaming and not agree(0, False, ready=all_there).ready
