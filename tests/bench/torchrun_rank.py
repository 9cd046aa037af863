"""The rank program under bare torchrun: the peer that the orchestrated step is measured against."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from cluster.workers.worker_context import RankInfo, WorkerContext
from orchestrator.train.loop import main


def run(task: Path, rows: Path) -> None:
    """Train `task` as the rank that torchrun says, and write rank 0's rows."""
    rank_info = RankInfo(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        host=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
    )
    context = WorkerContext(rank_info)
    main(json.loads(task.read_text()), context)
    if rank_info.rank == 0:
        rows.write_text("".join(json.dumps(row) + "\n" for row in context.unsaved_rows()))


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a clean exit
