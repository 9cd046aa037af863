"""The rank program under torchrun: it goes on from our last commit, and rank 0 writes rows as they come.

    torchrun ... recovery_rank.py task.json

The task's layout is for the world that it is started with; the attempt is what torchrun counts.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from cluster.workers.worker_context import RankInfo, WorkerContext
from orchestrator.checkpoint.commit_store import Store
from orchestrator.storage.run_directory import Row, RunDir
from orchestrator.train.loop import main


class FileLink(WorkerContext):
    """Rows go to metrics.jsonl at once."""

    def __init__(self, rank_info: RankInfo, store: Any, run: RunDir) -> None:
        super().__init__(rank_info, store)
        self._run, self._saved = run, 0

    def report(self, step: int, row: Row | None = None, hold: int = 0) -> None:
        """See `WorkerContext.report`."""
        super().report(step, row, hold)
        if row is not None:
            self._run.append("metrics.jsonl", [row])
            self._saved += 1
            self.take_rows(0, self._saved)


def run(path: Path) -> None:
    """Train as the rank that torchrun says, from the newest commit there is."""
    env = os.environ
    rank_info = RankInfo(
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        local_rank=int(env["LOCAL_RANK"]),
        host=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
    )
    attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
    task = json.loads(path.read_text())
    commit = Store(f"{task['run']}/checkpoints").latest(deep=False)
    task |= {"attempt": attempt, "restore": commit.step if commit else None, "token": f"attempt{attempt}"}
    # The agent serves one store for all attempts.
    store = TCPStore(rank_info.host, rank_info.port, is_master=False, timeout=timedelta(seconds=60))
    main(task, FileLink(rank_info, PrefixStore(f"attempt-{attempt}", store), RunDir(task["run"])))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a clean exit
