"""How samples that are not trained on are divided over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cluster.workers.worker_context import WorkerContext
from orchestrator.parallel.rank_messages import agree


def shares(samples: int, micro_batch: int, global_batch: int, ranks: int, rank: int) -> list[range]:
    """The numbers of the micro-batches that one of `ranks` computes in each pass over at most a global batch.

    All ranks have equally many in a pass; numbers from samples / micro_batch on are beyond the last sample.

    Args:
        samples: number of samples.
        micro_batch: samples of a micro-batch.
        global_batch: samples of a pass over all ranks, at most.
        ranks: that divide the samples: the data axis.
        rank: index on it.
    """
    micro_batches = -(-samples // micro_batch)
    max_per_pass = global_batch // (micro_batch * ranks)
    result = []
    for first in range(0, micro_batches, max_per_pass * ranks):
        # Rounded up, and equal on all ranks: each micro-batch is a round of collectives, in which every rank takes
        # part.
        count = min(max_per_pass, -(-(micro_batches - first) // ranks))
        result.append(range(first + rank * count, first + (rank + 1) * count))
    return result


def compute_passes(
    passes: Iterable[range], context: WorkerContext, heeds_stop: bool, compute: Callable[[range], None]
) -> bool:
    """Compute passes over samples, one after another, until a stop is requested. All ranks call it together.

    Args:
        passes: the numbers of this rank's micro-batches in each pass, see `shares`.
        context: this rank's connection to the controller, which hears of each pass.
        heeds_stop: whether a stop ends the computation early.
        compute: computes the micro-batches of one pass.

    Returns:
        False if a stop ended it early. All ranks get the same answer.
    """
    for numbers in passes:
        context.set_waiting(True)
        if agree(0, heeds_stop and context.stop_requested()).stop:
            context.set_waiting(False)
            return False
        compute(numbers)
        context.set_waiting(False)
        context.progressed()
    return True
