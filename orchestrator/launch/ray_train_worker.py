"""One worker of Ray Train: a rank of the run, from the last commit to the end of the job."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch.distributed as dist
from ray.train import Checkpoint
from ray.train.collective import broadcast_from_rank_zero

from cluster.workers.rank_process import serve_store
from cluster.workers.worker_context import RankInfo, WorkerContext
from orchestrator.config.own_code import find_code
from orchestrator.config.spec import parse
from orchestrator.data.samples.skips import on_record
from orchestrator.launch.ray_train_history import RankZeroHistory, history_of
from orchestrator.storage.run_directory import Row, RunDir
from orchestrator.train.loop import main
from orchestrator.train.task import Task


def train_func(config: dict[str, Any]) -> None:
    """Run one rank from the last commit to the end of the job: the `train_loop_per_worker`. See `loop_config`."""
    run = RunDir(config["run"])
    code = config["code"]
    roots = tuple(config["code_roots"])
    find_code(parse(config["job"]).own_code, code, roots)
    context = ray.train.get_context()
    node = ray.util.get_node_ip_address()
    rank = context.get_world_rank()
    world = context.get_world_size()
    if dist.is_initialized():
        dist.destroy_process_group()  # the rank program makes its own, over its own store
    with history_of(config, run) if rank == 0 else contextlib.nullcontext() as history:
        store = serve_store(node) if history else None
        attempt = {"host": node, "port": store.port, **history.begin(world)} if history and store else None
        attempt = broadcast_from_rank_zero(attempt)
        rank_info = RankInfo(
            rank=rank,
            world_size=world,
            local_rank=context.get_local_rank(),
            host=attempt.pop("host"),
            port=attempt.pop("port"),
            node=node,
        )
        task = Task(
            job=config["job"],
            run=run.uri,
            data=config["data"],
            sets=config["sets"],
            until=config["job"]["train"]["steps"],
            faults=tuple(config["faults"]),
            code=code,
            code_roots=roots,
            skips=tuple(skip.to_json() for skip in on_record(run.rows("events.jsonl"))),
            **attempt,
        )
        main(task.to_json(), RayTrainContext(rank_info, store, history, config["report_every"]))
        if history is None:
            ray.train.report({"step": task.until})
            return
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "commit.json").write_text(json.dumps(history.last_commit()))
            ray.train.report(history.last_row, Checkpoint.from_directory(name))


class RayTrainContext(WorkerContext):
    """A context that writes rows to the run directory and reports to Ray Train every `every` steps.

    Ray Train needs a report of every rank, and blocks each until its controller polls. With a report in every step, a
    step would take at least the polling interval.
    """

    def __init__(self, rank_info: RankInfo, store: Any, history: RankZeroHistory | None, every: int) -> None:
        super().__init__(rank_info, store)
        self._history = history
        self._every = every

    def report(self, step: int, row: Row | None = None, hold: int = 0) -> None:
        """See `WorkerContext.report`."""
        super().report(step, row, hold)
        if self._history is not None and row is not None:
            self._history.take(row)
            self.take_rows(0, self._history.saved)
        if step % self._every == 0:
            ray.train.report(row or {"step": step})
