"""All checks of a chain before its first stage begins, including stages whose inputs do not exist yet.

A stage that has begun keeps its inputs: its job, the commit of its base, and its text. If one of them has changed, the
chain is refused. This avoids presenting old results as results of the new inputs, and removing a user's commits. To run
the stage again, rename it or move its folder away.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.chain.exports import check_compress
from orchestrator.chain.stage_run import StageRun
from orchestrator.checkpoint.identity import BASE, CONTINUED, check_same_run, teacher_of
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.chain import CONTINUE, ChainSpec
from orchestrator.config.document import STAGES
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.controller.events import EventHistory
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.config import TrainedTokenizer
from orchestrator.data.prepare.record_kind import kind_of
from orchestrator.launch.finished import PastRun
from orchestrator.launch.init_checks import check_base, check_continues, check_rows
from orchestrator.launch.job_checks import check_job
from orchestrator.launch.machine_checks import check_machine
from orchestrator.launch.path_checks import check_all_places
from orchestrator.launch.worker import worker_at
from orchestrator.models.base import INIT, base_of, check_base_to_come, check_own_base_to_come
from orchestrator.models.base_text import text_notes, text_of_workload
from orchestrator.models.continued import check_length, continuation_of
from orchestrator.models.named_commit import commit_at, place_and_tag
from orchestrator.models.named_teacher import WHERE
from orchestrator.models.teacher_weights import teacher_model
from orchestrator.resolve.precision import as_its_run
from orchestrator.resolve.prepared_data import EXCERPT
from orchestrator.resolve.resolved_job import ResolvedJob, is_framed, special_tokens_of, wrong_input
from orchestrator.resolve.training_inputs import load_workload, vocabulary_before_data
from orchestrator.storage.row_line import EVENTS, TRIALS
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import is_local

AGAIN = "set it back, give the stage another name, or move its folder away: it is then run again"


def check_chain(
    chain: ChainSpec, stages: Mapping[str, StageRun], root: RunDir, address: str | None
) -> set[str]:
    """Check a chain completely without starting anything. Return the stages that are done.

    Raises InputError with the problems of all stages.
    """
    for name, what in ((TRIALS, "the folder of a search"), (EVENTS, "the directory of a run")):
        if root.rows(name):
            raise InputError(f"is {what}, not a chain", root.uri, "give another name or --run-dir")
    done: set[str] = set()
    resolved: dict[str, ResolvedJob] = {}
    problems = Problems()
    _check_exports_are_here(chain, root)
    check_compress(chain, stages)
    with stand_ins(chain, stages) as jobs:
        for name, stage in stages.items():
            with problems.noted(), of_stage(name):
                if check_inputs(stage, done):
                    done.add(name)
                    continue
                check_all_places(stage.job, stage.run)
                check_machine(stage.job.resources, stage.job.evaluates_beside, address)
                asked = jobs[name].with_parts(train=as_its_run(jobs[name].train, stage.run))
                teacher = stage.stage.learns_from
                if teacher is not None and teacher.stage not in done:
                    asked = asked.with_parts(distill=None)  # it is checked once it is there
                resolved[name] = check_job(asked, machine_of=worker_at(address))
                base = stage.stage.begins_with
                before = stage.stage.continues
                if before and before.stage in resolved and before.stage not in done:
                    where = stages[before.stage].run.uri
                    theirs = stages[before.stage].job
                    continuation_of(stage.job).check_keys(theirs.identity(), where)
                    step = int(before.tag) if before.tag.isdecimal() else theirs.train.steps
                    check_length(stage.job.train, step, where)
                    with wrong_input(CONTINUE):
                        _check_to_come(resolved[before.stage], resolved[name], where)
                elif before and before.stage not in done:
                    pass  # that stage's own problem is reported
                elif base is None or base.stage in done:
                    commit = check_same_run(stage.job.run_identity, stage.run)
                    check_base(resolved[name], commit or check_continues(resolved[name], stage.run))
                elif base.stage in resolved:
                    with wrong_input(INIT):
                        _check_to_come(resolved[base.stage], resolved[name], stages[base.stage].run.uri)
    problems.raise_noted()
    return done


def _check_exports_are_here(chain: ChainSpec, root: RunDir) -> None:
    """Check that exports are on the local file system, because a run can begin only with such an export."""
    for stage in chain.stages:
        base = stage.begins_with and chain[stage.begins_with.stage]
        if not base or not base.job.workload.adapter:
            continue
        if not is_local(base.job.checkpoint.export_to or root.uri):
            what = (
                f"{base.name} trains an adapter, and its export will be in a store, with which no run begins"
            )
            hint = f"set checkpoint.export_to of {base.name} to a folder"
            raise InputError(what, f"{STAGES}.{stage.name}.{INIT}", hint)


def check_inputs(stage: StageRun, done: set[str]) -> bool:
    """Return whether a stage is done, given the stages before it that are `done`.

    Raises InputError if the stage would now begin with other inputs.
    """
    job, run = stage.job, stage.run
    try:
        commit, is_done = check_same_run(job.run_identity, run), PastRun(job, run).done() is not None
    except InputError as error:
        raise InputError(error.what, error.where, AGAIN) from None
    history = EventHistory(run.rows(EVENTS))
    begun = (commit.meta.get(BASE) if commit else None) or history.base
    if begun:
        _check_same_base(stage, begun, commit, is_done, done)
    if begun := commit.meta.get(CONTINUED) if commit else None:
        _check_same_source(stage, begun, done)
    if known := teacher_of(commit.meta) if commit else {}:
        _check_same_teacher(stage, known, done)
    if data := (commit.meta.get("data") if commit else "") or history.data:
        _check_same_text(job.data, job.workload, str(data))
    return is_done


def _check_same_base(
    stage: StageRun, begun: Mapping[str, Any], commit: CommitManifest | None, is_done: bool, done: set[str]
) -> None:
    """Check that the stage would still begin with the same weights.

    Missing weights are allowed if the stage no longer needs them.
    """
    base = stage.stage.begins_with
    if base is None:
        base_of(stage.job.workload, stage.job.needs_base, begun, is_done or commit is not None)
        return
    where = f"{INIT} {begun['uri']}"
    if base.stage not in done:
        what = f"it began with {_of(base.stage, begun['step'])}, and {base.stage} trains on"
        raise InputError(what, where, AGAIN)
    try:
        now = base_of(stage.job.workload, stage.job.needs_base, {}, False)
    except InputError:
        if is_done or commit is not None:
            return
        raise
    if now is None or now.digest != begun["digest"]:
        at = f" at step {now.step}" if now and now.step is not None else ""
        what = f"it began with {_of(base.stage, begun['step'])}, and now that is another one{at}"
        raise InputError(what, where, AGAIN)


def _check_same_source(stage: StageRun, begun: Mapping[str, Any], done: set[str]) -> None:
    """Check that the stage would still continue from the same commit. A missing commit is allowed
    if it is not needed.
    """
    source, asked = stage.stage.continues, stage.job.train.continue_from
    if source is None or asked is None:
        return
    what = f"it continued from {_of(source.stage, begun['step'])}"
    if source.stage not in done:
        raise InputError(f"{what}, and {source.stage} trains on", CONTINUE, AGAIN)
    try:
        now = commit_at(*place_and_tag(asked.run), CONTINUE)
    except InputError:
        return
    if (now.step, now.receipt) != (begun["step"], begun["receipt"]):
        raise InputError(f"{what}, and now that is another one at step {now.step}", CONTINUE, AGAIN)


def _check_same_teacher(stage: StageRun, known: Mapping[str, Any], done: set[str]) -> None:
    """Check that the stage would still learn from the same teacher, `known` by its step and checksum.

    A missing teacher is allowed here; the stage reports it when it continues.
    """
    teacher, distill = stage.stage.learns_from, stage.job.distill
    if teacher is None or distill is None:
        return
    if teacher.stage not in done:
        raise InputError(f"it has learnt from {teacher.stage}, which trains on", WHERE, AGAIN)
    try:
        now = teacher_model(distill.teacher, stage.job.workload, step=known.get("step")).base
    except InputError:
        return
    if now.digest != known["digest"]:
        raise InputError(f"it has learnt from {teacher.stage}, and now that is another one", WHERE, AGAIN)


def _of(stage: str, step: int | None) -> str:
    return f"the export of {stage}" if step is None else f"the commit of {stage} at step {step}"


def _check_same_text(data: DataSpec, workload: WorkloadSpec, place: str) -> None:
    from orchestrator.data.prepare.fingerprint import TextChanged, check_same_text

    before = place.rstrip("/").rsplit("/", 1)[-1]
    try:
        check_same_text(
            data,
            special_tokens_of(data, workload),
            before,
            partial(kind_of, data, workload.objective),
            is_framed(data, workload),
        )
    except TextChanged as error:
        raise InputError("the text has changed since the stage began", error.where, AGAIN) from None
    except InputError:
        return  # it is gone; if a stage still needs it, another check reports that


def _check_to_come(base: ResolvedJob, job: ResolvedJob, where: str) -> None:
    """Check that the future initial weights of a stage will fit it."""
    from orchestrator.data.store.manifest import FORMAT
    from workloads.errors import WorkloadError

    loaded: list[Any] = [
        load_workload(
            asked=each.spec.workload,
            data=each.spec.data,
            train=each.spec.train,
            seed=each.spec.seed,
            vocabulary=vocabulary_before_data(each),
            data_format=FORMAT,
            model=each.model,
        )
        for each in (base, job)
    ]
    theirs, ours = loaded
    if theirs.config.divided_by == ours.config.divided_by == "declaration":
        check_own_base_to_come(replace(theirs, adapter=None), replace(ours, adapter=None), where)
        return
    for each, workload in ((base, theirs), (job, ours)):
        if workload.config.as_transformer is None:
            raise WorkloadError(
                f"{each.spec.workload.model} is no model of this project: a class of transformers begins with its "
                "folder alone, and an own model with an own one"
            )
    check_rows(job.spec.workload, ours, theirs.shapes, where)
    plain = replace(theirs, adapter=None), replace(ours, adapter=None)  # a base's adapter is merged
    # An adapter is exported merged into its base.
    merged = base.spec.model_copy(
        update={"workload": base.spec.workload.model_copy(update={"adapter": None})}
    )
    check_base_to_come(
        merged.workload,
        merged.data.labels,
        plain[0],
        workload=job.spec.workload,
        labels=job.spec.data.labels,
        ours=plain[1],
        where=where,
    )
    text_notes(ours, job.spec.workload, text_of_workload(theirs, base.spec.workload.objective, where))


@contextlib.contextmanager
def of_stage(name: str) -> Iterator[None]:
    """Add the stage's name to the errors of this context."""
    try:
        yield
    except InputError as error:
        first, *others = (
            InputError(each.what, ": ".join(filter(None, (f"{STAGES}.{name}", each.where))), each.hint)
            for each in error.each()
        )
        raise InputError(first.what, first.where, first.hint, others) from None


@contextlib.contextmanager
def stand_ins(chain: ChainSpec, stages: Mapping[str, StageRun]) -> Iterator[dict[str, JobSpec]]:
    """Yield the jobs of the stages, by name, as far as they are known before the first stage runs.

    A tokenizer that an earlier stage will train is replaced by an untrained one of the same kind, in a folder that
    exists during this context.
    """
    from orchestrator.data.encoding import tokenizer

    with tempfile.TemporaryDirectory(prefix="chain-") as folder:
        jobs = {}
        for name, stage in stages.items():
            origin, jobs[name] = chain.tokenizer_origin(stage.stage), stage.job
            wanted = origin.job.data.tokenizer
            kept = stages[origin.name].run.exists(f"{EXCERPT}/tokenizer.json")
            if origin.name == name or not isinstance(wanted, TrainedTokenizer) or kept:
                continue
            place = Path(folder, origin.name)
            place.mkdir(exist_ok=True)
            text = tokenizer.train(
                (), wanted.recipe.vocabulary, special_tokens_of(origin.job.data, origin.job.workload)
            )
            (place / "tokenizer.json").write_text(text)
            data = stage.job.data.model_copy(update={"tokenizer": str(place)})
            jobs[name] = stage.job.model_copy(update={"data": data})
        yield jobs
