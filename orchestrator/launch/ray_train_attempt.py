"""The beginning of an attempt within Ray Train: the commit to continue from, and a layout for its workers."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from cluster.workers.gang import workers_text
from cluster.workers.machine import smallest_offer
from orchestrator.checkpoint.identity import check_shards
from orchestrator.config.errors import InputError
from orchestrator.config.spec import dump, parse
from orchestrator.controller.background_trace import verdicts_before
from orchestrator.controller.events import start_event
from orchestrator.controller.run_history import RunHistory
from orchestrator.models.base import base_json
from orchestrator.models.continued import continuation_of
from orchestrator.models.kept_config import config_json, kept_config
from orchestrator.models.pinned_base import bases_of, pinned_teacher
from orchestrator.planner.demand import demand_of
from orchestrator.planner.machines import machine_for
from orchestrator.planner.planner import Planner, with_worker_range
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.resolve.training_inputs import resolve_over
from orchestrator.storage.row_types import EventFields
from orchestrator.storage.run_directory import RunDir


def begin_attempt(config: dict[str, Any], run: RunDir, history: RunHistory, world: int) -> dict[str, Any]:
    """Roll back to the last sound commit, choose a layout, and record the start of the attempt.

    Args:
        config: see `loop_config`.
        run: the run directory.
        history: the history of the run.
        world: number of workers.

    Returns:
        The fields of a `Task` that follow from the commit and the layout.

    Raises:
        InputError: no legal layout uses so many workers, or the run's inputs have changed.
    """
    spec = parse(config["job"])
    data = PreparedData(config["data"], config["sets"])
    bundle = spec.resources.per_worker.bundle
    source, first_commit = continuation_of(spec).begun_from(run, history.commits.newest)
    base, needed = bases_of(
        workload=spec.workload,
        reads_base=spec.reads_base,
        needs_base=spec.needs_base,
        recorded=history.base,
        commit=first_commit,
        run=run,
    )
    teacher = base_json(pinned_teacher(spec.distill, spec.workload, history.teacher, run))
    job, shards, _ = resolve_over(spec, data, needed, source, kept_config(first_commit))
    check_shards(history.commits.newest, shards, data.uri)
    machine = machine_for(smallest_offer(bundle, world), bundle, spec.train.dtype)
    confirm = partial(
        verdicts_before, dump(spec), machine, lambda: False, None, row_tokens=job.shape.row_tokens
    )
    planner = Planner(
        demand_of(spec.with_parts(resources=with_worker_range(spec.resources, world, world))),
        job.shape,
        machine,
        confirm=confirm,
    )
    layout = planner.choose(world)
    if layout is None or layout.world != world:
        hint = "change num_workers of ScalingConfig, or train.global_batch"
        raise InputError(f"no legal layout uses {workers_text(world)}", "parallel", hint)
    attempt = history.attempts + 1
    commit, _ = history.roll_back(frozenset(), attempt)
    commit = commit or continuation_of(spec).take_over(
        run, shards=shards, data=data, base=base, kept=job.folder_config
    )
    data_fields: EventFields = {
        "data": data.uri,
        "sets": data.sets,
        "base": base_json(base),
        "teacher": teacher,
    }
    reason, fields = start_event(spec.train, layout, None, commit)
    history.event(attempt, history.step, "start", reason, **data_fields | fields)
    return {
        "layout": layout.to_json(),
        "attempt": attempt,
        "restore": commit.step if commit else None,
        "token": secrets.token_hex(6),
        "shards": shards,
        "base": base_json(base),
        "teacher": teacher,
        "folder_config": config_json(job.folder_config),
        **planner.flops,
    }
