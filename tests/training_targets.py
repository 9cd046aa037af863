"""What training tests run in other processes: entry points of a gang."""

from __future__ import annotations

from typing import Any

from cluster.workers.rank_process import serve_store
from cluster.workers.worker_context import RankInfo, WorkerContext


def train_each(config: dict[str, Any], link: WorkerContext) -> dict[str, Any]:
    """Train the tasks in `config` one after another, each alone in the world; name -> losses, or the error."""
    from cluster.workers.rank_process import describe
    from orchestrator.parallel.device import close_device
    from orchestrator.train.loop import main

    found: dict[str, Any] = {}
    for name, task in config.items():
        store = serve_store("127.0.0.1")
        alone = WorkerContext(RankInfo(0, 1, 0, "127.0.0.1", store.port), store)
        try:
            main(task, alone)
            found[name] = [row["loss"] for row in alone.unsaved_rows()]
        except Exception as error:
            close_device()  # the next task is in this process too
            found[name] = describe(error)
        link.report(len(found))
    return found
