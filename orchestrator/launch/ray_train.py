"""Run a job inside a Ray Train (V2) `TorchTrainer`, by Ray Train's public API.

    config = loop_config(load("job.yaml"))
    TorchTrainer(train_func, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2)).fit()

Ray Train starts the workers, detects failures and restarts all workers. The workers continue from the last commit in
the run directory. The command `orchestrator run` can continue the same directory.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import ray
import ray.train
import torch.distributed as dist
from ray.train import Checkpoint
from ray.train.collective import broadcast_from_rank_zero

from cluster.workers.clock import wall
from cluster.workers.error_kind import cause_of
from cluster.workers.gang import RankStatus
from cluster.workers.machine import smallest_offer
from cluster.workers.rank_process import describe, serve_store
from cluster.workers.worker_context import RankInfo, WorkerContext
from orchestrator.checkpoint.identity import check_same_run, check_shards
from orchestrator.checkpoint.manifest import commit_folder
from orchestrator.config.errors import InputError
from orchestrator.config.own_code import code_of, find_code, roots_of
from orchestrator.config.paths import absolute, resolve_paths
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.controller.background_trace import verdicts_before
from orchestrator.controller.decide import decide
from orchestrator.controller.events import EventHistory, fault_event, start_event
from orchestrator.controller.health import GRACE
from orchestrator.controller.run_history import RunHistory
from orchestrator.controller.state import Observation, State, policy_of
from orchestrator.data.progress import StageLine
from orchestrator.data.samples.skips import on_record
from orchestrator.launch.job_checks import check_job
from orchestrator.launch.worker import worker_at
from orchestrator.models.base import base_json
from orchestrator.models.continued import continuation_of
from orchestrator.models.kept_config import check_same_config, config_json, kept_config
from orchestrator.models.pinned_base import bases_of, pinned_teacher, release_base, release_teacher
from orchestrator.planner.demand import demand_of
from orchestrator.planner.machines import machine_for
from orchestrator.planner.planner import Planner, on_workers
from orchestrator.resolve.commit_model import as_begun
from orchestrator.resolve.precision import as_its_run
from orchestrator.resolve.prepared_data import PreparedData, prepared
from orchestrator.resolve.training_inputs import resolve_over
from orchestrator.storage.row_types import EventFields
from orchestrator.storage.run_directory import Row, RunDir
from orchestrator.train.loop import main
from orchestrator.train.task import Task


def loop_config(
    spec: JobSpec,
    run_dir: str | None = None,
    report_every: int | None = None,
    faults: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Check a job, prepare its data with Ray Data, and return its `train_loop_config`. Ray must be initialised.

    Args:
        spec: the job.
        run_dir: the run directory, which all nodes must see; runs/<name> by default.
        report_every: steps between two reports to Ray Train; checkpoint.every by default.
        faults: faults to inject, for tests.

    Raises:
        InputError: the job is wrong.
    """
    spec = resolve_paths(spec, Path.cwd())
    if spec.evaluates_beside:
        hint = "set it to gang, or use `orchestrator run`"
        raise InputError("Ray Train reserves no worker besides its own", "evaluate.where", hint)
    run = RunDir(absolute(run_dir or f"runs/{spec.name}", Path.cwd()))
    spec = spec.with_parts(train=as_its_run(spec.train, run))
    begun = continuation_of(spec).begun_from(run, check_same_run(spec.run_identity, run))[1]
    check_same_config(spec.workload, begun, run.uri)
    spec = spec.with_parts(workload=as_begun(spec.workload, begun))
    spec = check_job(spec, machine_of=worker_at("auto"), kept=kept_config(begun)).spec
    run.create()
    past = EventHistory(run.rows("events.jsonl"))
    data = prepared(spec, run, PreparedData(past.data, past.sets), StageLine(lambda _: None))
    return {
        "job": spec.model_dump(mode="json"),
        "run": run.uri,
        "data": data.uri,
        "sets": data.sets,
        "report_every": report_every or spec.checkpoint.every,
        "code": code_of(spec.own_code),
        "code_roots": roots_of(spec.own_code),
        "faults": list(faults),
    }


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
    with _history_of(config, run) if rank == 0 else contextlib.nullcontext() as history:
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


class RankZeroHistory:
    """Writes the history of the run at rank 0, as the controller of `orchestrator run` does."""

    def __init__(self, config: dict[str, Any], run: RunDir) -> None:
        self._spec = parse(config["job"])
        self._data = PreparedData(config["data"], config["sets"])
        self._run = run
        self._history = RunHistory(self._spec, run)
        self._attempt = 0

    @property
    def saved(self) -> int:
        """How many rows of this attempt are stored."""
        return self._history.saved

    def begin(self, world: int) -> dict[str, Any]:
        """Roll back to the last sound commit, choose a layout, and return the fields of a `Task` for both."""
        bundle = self._spec.resources.per_worker.bundle
        source, begun = continuation_of(self._spec).begun_from(self._run, self._history.newest)
        base, needed = bases_of(
            workload=self._spec.workload,
            reads_base=self._spec.reads_base,
            needs_base=self._spec.needs_base,
            begun=self._history.base,
            commit=begun,
            run=self._run,
        )
        teacher = base_json(
            pinned_teacher(self._spec.distill, self._spec.workload, self._history.teacher, self._run)
        )
        job, shards, _ = resolve_over(self._spec, self._data, needed, source, kept_config(begun))
        check_shards(self._history.newest, shards, self._data.uri)
        machine = machine_for(smallest_offer(bundle, world), bundle, self._spec.train.dtype)
        confirm = partial(verdicts_before, dump(self._spec), machine, lambda: False)
        planner = Planner(
            demand_of(self._spec.with_parts(resources=on_workers(self._spec.resources, world, world))),
            job.shape,
            machine,
            confirm=confirm,
        )
        layout = planner.choose(world)
        if layout is None or layout.world != world:
            hint = "change num_workers of ScalingConfig, or train.global_batch"
            raise InputError(f"no legal layout uses {world} workers", "parallel", hint)
        self._attempt = self._history.attempts + 1
        commit, _ = self._history.roll_back(frozenset(), self._attempt)
        commit = commit or continuation_of(self._spec).take_over(
            self._run, shards=shards, data=self._data, base=base, kept=job.kept
        )
        data_fields: EventFields = {
            "data": self._data.uri,
            "sets": self._data.sets,
            "base": base_json(base),
            "teacher": teacher,
        }
        reason, fields = start_event(self._spec.train, layout, None, commit)
        self._event("start", reason, **data_fields | fields)
        return {
            "layout": layout.to_json(),
            "attempt": self._attempt,
            "restore": commit.step if commit else None,
            "token": secrets.token_hex(6),
            "shards": shards,
            "base": base_json(base),
            "teacher": teacher,
            "folder_config": config_json(job.kept),
            **planner.flops,
        }

    def take(self, row: Row) -> None:
        """Add the row of a step to metrics.jsonl."""
        first = not self._history.saved
        self._history.take([row])
        if first:
            began = self._history.training_began(self._attempt)
            self._event("train", f"the first step of attempt {self._attempt} is done", time=began)

    @property
    def last_row(self) -> Row:
        """The row of the last step."""
        return self._history.recent[-1]

    def last_commit(self) -> dict[str, Any]:
        """Return the location of the last checkpoint. Ray Train gets this instead of a checkpoint, which it would
        copy."""
        commit, _ = self._history.last_commit()
        assert commit is not None
        return {"step": commit.step, "uri": f"{self._history.store.uri}/{commit_folder(commit.step)}"}

    def end(self) -> None:
        """Record that all steps are done."""
        self._event("done", f"{self._history.step} steps are done")
        release_base(self._spec.needs_base, self._run, self._history.base)
        release_teacher(self._run, self._history.teacher)

    def fail(self, error: Exception) -> None:
        """Record the error that ended the attempt and what `decide` makes of it."""
        history = self._history
        now = time.monotonic()
        past = history.event_history
        failures = past.failures(self._spec.limits.restart_window, wall(), now)
        before = State(
            phase="train",
            step=history.step,
            moved=now,
            suspected=now - GRACE,  # Ray Train has already waited for a death that explains the error
            failures=failures,
            skips=past.skips,
        )
        node = ray.util.get_node_ip_address()
        failed = RankStatus(
            rank=0,
            node=node,
            pid=0,
            state="failed",
            step=history.step,
            error=describe(error),
            failed_at=now,
            last_heartbeat=now,
            cause=cause_of(error),
        )
        policy = policy_of(self._spec, lambda workers: None)
        after, action = decide(policy, before, Observation(now=now, ranks=(failed,)))
        commit, _ = history.last_commit()
        lost = history.beyond(commit.step if commit else 0)
        assert action.fault is not None
        reason, fields = fault_event(before, after, action.fault, lost, ())
        self._event("stop", reason, **fields)

    def close(self) -> None:
        """Write nothing more."""
        self._history.close()

    def _event(self, phase: str, reason: str, **more: Unpack[EventFields]) -> None:
        self._history.event(self._attempt, self._history.step, phase, reason, **more)


@contextlib.contextmanager
def _history_of(config: dict[str, Any], run: RunDir) -> Iterator[RankZeroHistory]:
    """Open the history of a run, locked against other commands, and record how the block ends."""
    with run.lock():
        history = RankZeroHistory(config, run)
        try:
            yield history
            history.end()
        except Exception as error:
            history.fail(error)
            raise
        finally:
            history.close()
