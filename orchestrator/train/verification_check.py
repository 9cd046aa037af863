"""Check `resources.verify`: whether another rank can compute a step again."""

from __future__ import annotations

from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.records import REWARDED
from orchestrator.config.resources import ResourceSpec
from orchestrator.parallel.config import ParallelChoice

WHERE = "resources.verify.by"


def check_verification(resources: ResourceSpec, parallel: ParallelChoice, workload: Any) -> None:
    """Check that replicas exist, and that the samples of one can move to another.

    Args:
        resources: the workers, and how steps are verified.
        parallel: the layout that the job asks for.
        workload: the model and its objective.

    Raises:
        InputError: no other rank can compute a step again.
    """
    verify = resources.verify
    if verify is None or verify.by == "same":
        return
    objective = workload.objective.name
    if workload.compares or objective in (*REWARDED, "kto"):
        reason = {
            **dict.fromkeys(REWARDED, "each rank generates its own rows"),
            "kto": "its baseline is a mean over all ranks",
        }.get(objective, "it compares each sample with those of other ranks, in their order")
        raise InputError(
            f"no other rank can compute a step of {objective} again: {reason}", WHERE, "set it to same"
        )
    max_workers = resources.workers.max
    if parallel == "auto":
        ranks = 1
        degrees = ""
    else:
        axes = {"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp, "ep": parallel.ep}
        ranks = (axes["tp"] or 1) * (axes["pp"] or 1) * (axes["cp"] or 1) * (axes["ep"] or 1)
        degree_list = ", ".join(f"{axis} {degree}" for axis, degree in axes.items() if (degree or 1) > 1)
        degrees = f" with {degree_list}" if degree_list else ""
    if max_workers // ranks < 2:
        workers = "1 worker has" if max_workers == 1 else f"{max_workers} workers{degrees} have"
        problem = f"{workers} one replica; a step needs a second replica to be recomputed"
        raise InputError(
            problem, WHERE, "raise resources.workers.max, or set it to same (finds transient errors only)"
        )
