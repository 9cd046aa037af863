"""The program of one rank: open a device, build what a rank needs from the job, train, and free the device.

`main` is the entry point of every gang: Ray actors, local processes and torchrun.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from cluster.workers.worker_context import WorkerContext
from orchestrator.checkpoint.evaluations import measure_of
from orchestrator.config.own_code import find_code
from orchestrator.config.spec import parse
from orchestrator.data.store.tokens import Tokens
from orchestrator.models.base import base_of
from orchestrator.parallel.device import close_device, make_ready, open_device, peak_memory  # noqa: F401  (standbys call make_ready)
from orchestrator.prune.structure import with_chosen_parts
from orchestrator.resolve.training_inputs import check_digest, training_inputs
from orchestrator.storage.retry import patient
from orchestrator.train.commits import Commits
from orchestrator.train.distillation.compose import distilled_of, make_logits
from orchestrator.train.engines.make import EngineMaker
from orchestrator.train.evaluation import Evaluator
from orchestrator.train.flight_record import report_hang
from orchestrator.train.rank import Rank, is_growing
from orchestrator.train.reference_model import references_of
from orchestrator.train.restore import Restorer, peers_of, placement_of
from orchestrator.train.rollouts.compose import make_rollouts, rollouts_of
from orchestrator.train.step_samples import StepPlan, StepReader
from orchestrator.train.task import Task


def main(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Train as one rank, up to a commit.

    After an error the process group and the device's memory stay as they are: the caller must end the process.

    Args:
        config: the fields of a `Task`.
        context: this rank's number, its store, and its connection to the controller.

    Returns:
        {"step", "ended"}. `ended` is "steps" (the job is complete), "until" (the task's last step), "plateau" or
        "stop". A task that only evaluates returns {"step", "ended", "evaluation"}, a rollout or teacher worker
        {"units"}.

    Raises:
        InputError: if the job cannot run here.
    """
    task = Task(**config)
    context.on_hang = partial(
        report_hang, task.run, task.attempt, context.rank_info.rank, context.rank_info.world_size
    )
    spec = parse(task.job)
    layout = task.parsed_layout
    memory_before = peak_memory()
    find_code(spec.own_code, task.code, task.code_roots)
    context.begin_stage("joining the process group")
    device = open_device(spec.train, spec.resources.per_worker, context)
    context.begin_stage("opening the data")
    patience = patient(spec.limits.unsaved, context.stop_requested)
    tokens = Tokens.open(task.data, patience, spec.data.node_cache_bytes)
    check_digest(spec.data, tokens, task.shards, task.data)
    task = dataclasses.replace(task, cleaned_by=tokens.manifest.code)
    base = task.parsed_base
    # A restored run has its weights in the commit, and reads the base only if the job uses it beyond the start.
    needed_base = base if task.restore is None or spec.needs_base else None
    folder_config = task.parsed_folder_config
    inputs = training_inputs(spec, tokens, task.sets, needed_base, folder_config)
    task = dataclasses.replace(task, class_weights=inputs.class_weights)
    references = references_of(
        task,
        inputs,
        base,
        patience,
        workload=spec.workload,
        data=spec.data,
        train=spec.train,
        seed=spec.seed,
    )
    if references and needed_base is None and base and not references.are_complete:
        # The base is the reference model, and some of its log-probabilities are still to be computed.
        reopened_base = base_of(spec.workload, spec.needs_base, dataclasses.asdict(base), False)
        inputs = training_inputs(spec, tokens, task.sets, reopened_base, folder_config)
    teacher = task.parsed_teacher
    if task.makes_rollouts and spec.distill:
        result = make_logits(
            spec.distill, teacher, inputs, tokens, task=task, device=device, context=context, retry=patience
        )
        close_device()
        return result
    inputs = with_chosen_parts(inputs, task.run, device.device, context, patience, writes=task.commit)

    if task.makes_rollouts:
        result = make_rollouts(inputs, tokens, task, device, context)
        close_device()
        return result
    # Without its teacher's entries a batch trains on labels alone, and nothing would say so.
    assert teacher is not None or spec.distill is None or task.evaluate_only, "the task names no teacher"
    distilled = distilled_of(
        spec.distill, teacher, inputs, tokens, task=task, device=device, context=context, retry=patience
    )
    if distilled is not None:
        inputs = distilled.inputs
    rollouts = rollouts_of(inputs, tokens, task, device, context)

    running_teacher = distilled.teacher if distilled is not None else None
    make = EngineMaker(
        spec.engine,
        inputs.workload,
        layout,
        device,
        base=base.digest if base and spec.reads_base else "",
        teacher=(running_teacher, distilled.base.digest) if distilled and running_teacher else None,
    )
    measured = measure_of(spec.evaluate, spec.checkpoint.averaged)
    plan = StepPlan(
        seed=spec.seed,
        train=spec.train,
        reading=spec.reading,
        sequence_length=spec.data.sequence_length,
        draws=spec.workload.draws,
        noise=bool(spec.workload.embedding_noise),
        staleness=spec.rollout.staleness if spec.rollout else 0,
    )
    lengths = plan.lengths(
        inputs.workload,
        layout,
        on_gpu=device.device.type == "cuda",
        packed=inputs.batches.packed,
        has_means=spec.distill is not None and spec.distill.looks_inside,
    )
    context.begin_stage("building the model and its process groups")
    rank = Rank(
        task=task,
        plan=plan,
        layout=layout,
        context=context,
        inputs=inputs,
        make_engine=make,
        make_evaluator=partial(
            Evaluator,
            layout,
            context,
            rollouts=rollouts,
            evaluate=spec.evaluate,
            stop_when=spec.stop_when,
            train=spec.train,
            sequence_length=spec.data.sequence_length,
            classes=len(spec.data.labels),
            cut=lengths.cut,
            measured=measured,
            has_average=spec.checkpoint.ema is not None,
        ),
        make_commits=partial(
            Commits,
            task,
            layout,
            context,
            placement=placement_of(task, context),
            identity=spec.identity(),
            checkpoint=spec.checkpoint,
            train=spec.train,
            evaluate=spec.evaluate,
            measured=measured,
            unsaved=spec.limits.unsaved,
            gpus=spec.resources.per_worker.gpu,
            extra_pieces=rollouts.next.state if rollouts is not None else None,
            reserved_pieces=rollouts.next.room if rollouts is not None else None,
        ),
        make_reader=partial(
            StepReader,
            plan,
            layout,
            context.rank_info.rank,
            pinned=device.pinned,
            rollouts=rollouts,
            lengths=lengths,
        ),
        restorer=Restorer(
            task,
            peers_of(task, context),
            spec.checkpoint,
            retry=patience,
            measured=measured,
            own_code=spec.own_code,
            accepted=spec.accept_code,
            load_extra=rollouts.next.load if rollouts is not None else None,
        ),
        stop_when=spec.stop_when,
        # A task that writes nothing is a replay, which compares its steps with the record instead.
        verify=spec.resources.verify if task.commit else None,
        device=device,
        memory_before=memory_before,
        values=[
            value for value in (references, distilled.stored if distilled else None) if value is not None
        ],
        growing=is_growing(spec.data.streaming, tokens.sections is None)
        or (distilled is not None and distilled.are_growing),
    )
    result = rank.evaluate() if task.evaluate_only else rank.train()
    # Skipped after an error: leaving the process group may wait forever for collectives that peers have not joined,
    # and the error would never be reported. The parent ends this process.
    context.begin_stage("leaving the process group")
    rank.close()
    if rollouts is not None:
        rollouts.close()
    close_device()
    return result
