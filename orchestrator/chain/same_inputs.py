"""Whether a stage that has begun would begin with the same inputs again.

A stage that has begun keeps its inputs: its job, the commit of its base, its teacher, and its text. If one of them has
changed, the chain is refused. This avoids presenting old results as results of the new inputs, and removing a user's
commits. To run the stage again, rename it or move its folder away.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from orchestrator.chain.stage_run import StageRun
from orchestrator.checkpoint.identity import BASE, CONTINUED, check_same_run, teacher_of
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.chain import CONTINUE, MODEL, VOCABULARY
from orchestrator.config.errors import InputError
from orchestrator.config.workload import WorkloadSpec
from orchestrator.controller.events import EventHistory
from orchestrator.data.config import DataSpec
from orchestrator.data.prepare.record_kind import kind_of
from orchestrator.launch.finished import PastRun
from orchestrator.models.base import INIT, base_of
from orchestrator.models.named_commit import commit_at, split_tag
from orchestrator.models.named_teacher import WHERE
from orchestrator.models.teacher_weights import teacher_model
from orchestrator.resolve.resolved_job import is_framed, special_tokens_of
from orchestrator.storage.row_line import EVENTS

AGAIN = "set it back, give the stage another name, or move its folder away: it is then run again"


def check_inputs(stage: StageRun, done: set[str]) -> bool:
    """Return whether a stage is done, given the stages before it that are `done`.

    Raises InputError if the stage would now begin with other inputs.
    """
    if stage.stage.vocabulary:
        return _check_folder(stage, done)
    job, run = stage.job, stage.run
    try:
        commit, is_done = check_same_run(job.run_identity, run), PastRun(job, run).done() is not None
    except InputError as error:
        raise InputError(error.what, error.where, AGAIN) from None
    history = EventHistory(run.rows(EVENTS))
    begun = (commit.meta.get(BASE) if commit else None) or history.base
    if begun:
        _check_same_base(stage, begun, commit, is_done, done)
        if (made_of := stage.stage.made_of) and made_of.stage not in done:
            problem = f"it began with the model of {made_of.stage}, which is not made"
            raise InputError(problem, MODEL, AGAIN)
    if begun := commit.meta.get(CONTINUED) if commit else None:
        _check_same_source(stage, begun, done)
    if known := teacher_of(commit.meta) if commit else {}:
        _check_same_teacher(stage, known, done)
    if data := (commit.meta.get("data") if commit else "") or history.data:
        _check_same_text(job.data, job.workload, str(data))
    return is_done


def _check_folder(stage: StageRun, done: set[str]) -> bool:
    """As `check_inputs`, for a stage that removes tokens."""
    from orchestrator.chain.vocabulary import STAGE, changed_since, facts_of

    facts = facts_of(stage)
    if not facts:
        return False
    where = f"{VOCABULARY} of {stage.job.data.tokenizer}"
    made_of = stage.stage.made_of
    if made_of and made_of.stage not in done:
        problem = f"it was made of {made_of.stage}, but {_unfinished(made_of.stage)}"
        raise InputError(problem, where, AGAIN)
    if problem := changed_since(stage, facts):
        raise InputError(problem, where, AGAIN)
    _check_same_text(stage.job.data, stage.job.workload, facts[STAGE]["prepared"])
    return True


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
        problem = f"it began with {_of(base.stage, begun['step'])}, but {_unfinished(base.stage)}"
        raise InputError(problem, where, AGAIN)
    try:
        now = base_of(stage.job.workload, stage.job.needs_base, {}, False)
    except InputError:
        if is_done or commit is not None:
            return
        raise
    if now is None or now.digest != begun["digest"]:
        at = f" (now at step {now.step})" if now and now.step is not None else ""
        problem = f"it began with {_of(base.stage, begun['step'])}, but that checkpoint has changed{at}"
        raise InputError(problem, where, AGAIN)


def _check_same_source(stage: StageRun, begun: Mapping[str, Any], done: set[str]) -> None:
    """Check that the stage would still continue from the same commit. A missing commit is allowed
    if it is not needed.
    """
    source, continue_from = stage.stage.continues, stage.job.train.continue_from
    if source is None or continue_from is None:
        return
    what = f"it continued from {_of(source.stage, begun['step'])}"
    if source.stage not in done:
        raise InputError(f"{what}, but {_unfinished(source.stage)}", CONTINUE, AGAIN)
    try:
        now = commit_at(*split_tag(continue_from.run), CONTINUE)
    except InputError:
        return
    if (now.step, now.receipt) != (begun["step"], begun["receipt"]):
        raise InputError(f"{what}, but that checkpoint has changed (now at step {now.step})", CONTINUE, AGAIN)


def _check_same_teacher(stage: StageRun, known: Mapping[str, Any], done: set[str]) -> None:
    """Check that the stage would still learn from the same teacher, `known` by its step and checksum.

    A missing teacher is allowed here; the stage reports it when it continues.
    """
    teacher, distill = stage.stage.learns_from, stage.job.distill
    if teacher is None or distill is None:
        return
    what = f"it was distilled from {teacher.stage}"
    if teacher.stage not in done:
        raise InputError(f"{what}, but {_unfinished(teacher.stage)}", WHERE, AGAIN)
    try:
        now = teacher_model(distill.teacher, stage.job.workload, step=known.get("step")).base
    except InputError:
        return
    if now.digest != known["digest"]:
        raise InputError(f"{what}, but that checkpoint has changed", WHERE, AGAIN)


def _unfinished(stage: str) -> str:
    return f"{stage} has not finished its current training"


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
