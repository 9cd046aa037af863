"""Weights from a commit of another run: those that a run begins with, and those of its teacher. The other run may be
active and remove the commit, so the commit is pinned there until it is no longer needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import BASE
from orchestrator.checkpoint.pins import hold_if_allowed, holders, release
from orchestrator.checkpoint.resolve_checkpoint import read_chosen
from orchestrator.config.errors import InputError
from orchestrator.config.workload import WorkloadSpec
from orchestrator.models.base import Base, base_of, check_drawn, named_base
from orchestrator.models.named_teacher import WHERE, named_teacher
from orchestrator.models.teacher_weights import teacher_model
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.distillation.config import DistillSpec

if TYPE_CHECKING:
    from orchestrator.checkpoint.manifest import CommitManifest

T = TypeVar("T")


def bases_of(
    workload: WorkloadSpec,
    reads_base: bool,
    needs_base: bool,
    recorded: Mapping[str, Any],
    commit: CommitManifest | None,
    run: RunDir,
) -> tuple[Base | None, Base | None]:
    """Return the base of the run at `run` (see `base_of`), and the weights to read at the next start, None if it
    resumes from a `commit` that has them all.

    Weights from a commit are pinned. Raises as `base_of_commit`.
    """
    check_drawn(reads_base, commit)
    recorded = recorded or (commit.meta.get(BASE) if commit else None) or {}
    if commit is not None and not needs_base:
        return base_of(workload, needs_base, recorded, True), None

    def pin(base: Base | None) -> Base | None:
        if base is not None and base.step is not None:
            hold_if_allowed(_store(base), base.step, _holder(run))
        return base

    base = read_base(workload, needs_base, recorded, commit is not None, pin)
    return base, base


def read_base(
    workload: WorkloadSpec,
    needs_base: bool,
    recorded: Mapping[str, Any],
    settled: bool,
    read: Callable[[Base | None], T],
) -> T:
    """Return `read(base)` for the base that `base_of` returns.

    If the base is a run's newest checkpoint and the active run has just removed it, the next newest is used. Raises
    as `base_of` and `read_chosen`.
    """
    base = base_of(workload, needs_base, recorded, settled)
    if base is None or base.step is None:
        return read(base)

    def choose(*_: object) -> int:
        newest = base_of(workload, needs_base, recorded, settled)
        assert newest is not None
        assert newest.step is not None
        return newest.step

    return read_chosen(_store(base), None, lambda step: read(named_base(workload, step)), choose)


def pinned_teacher(
    distill: DistillSpec | None, workload: WorkloadSpec, recorded: Mapping[str, Any], run: RunDir
) -> Base | None:
    """Return the weights of a job's teacher, pinned if they are a run's commit; None without a teacher.

    Args:
        distill: names the teacher.
        workload: the student.
        recorded: the weights that the run has learnt from so far, see `orchestrator.checkpoint.identity.teacher_of`.
        run: the student's run directory.

    Raises:
        InputError: if the weights are missing, or are not those that the run has learnt from.
    """
    if distill is None:
        return None
    # Only the first start chooses the newest commit: the teacher's run may go on training.
    named = named_teacher(distill.teacher, workload, recorded.get("step"))
    if named.step is None:
        return same_teacher(distill, workload, recorded)

    def pin(step: int) -> Base:
        base = same_teacher(distill, workload, {**recorded, "step": step})
        hold_if_allowed(_store(base), step, _teacher_holder(run))
        return base

    def choose(*_: object) -> int:
        newest = named_teacher(distill.teacher, workload, recorded.get("step")).step
        assert newest is not None
        return newest

    return read_chosen(Store(RunDir(named.uri).commits), None, pin, choose)


def same_teacher(distill: DistillSpec, workload: WorkloadSpec, recorded: Mapping[str, Any]) -> Base:
    """Return the weights of a teacher, which must have the checksum in `recorded` if the run has recorded one.

    Raises:
        InputError: if they are missing, or others.
    """
    base = teacher_model(distill.teacher, workload, step=recorded.get("step")).base
    if recorded.get("digest", base.digest) != base.digest:
        problem = f"the weights of {distill.teacher} are not those that the run has learnt from so far"
        raise InputError(problem, WHERE, "restore them, or start a new run")
    return base


def unpinned_notes(base: Base | None, teacher: Base | None, run: RunDir) -> list[str]:
    """Return one line for each commit that the run at `run` needs and that cannot be pinned."""
    return _unpinned_note(base, _holder(run)) + _unpinned_note(teacher, _teacher_holder(run))


def _unpinned_note(base: Base | None, holder: str) -> list[str]:
    if base is None or base.step is None or holder in holders(_store(base), base.step):
        return []
    where = f"{base.uri}@{base.step}"
    return [
        f"{where} is needed but cannot be pinned, because its run directory is not writable: make sure "
        "that it is kept"
    ]


def release_teacher(run: RunDir, recorded: Mapping[str, Any]) -> None:
    """Unpin the commit that a finished run has learnt from."""
    _release(recorded, _teacher_holder(run))


def release_base(needs_base: bool, run: RunDir, recorded: Mapping[str, Any]) -> None:
    """Unpin the checkpoint `recorded` that a finished run started from, unless it is needed permanently."""
    if not needs_base:
        _release(recorded, _holder(run))


def _release(recorded: Mapping[str, Any], holder: str) -> None:
    if recorded.get("step") is not None:
        base = Base(**recorded)
        assert base.step is not None
        with contextlib.suppress(OSError):
            release(_store(base), base.step, holder)


def _store(base: Base) -> Store:
    return Store(RunDir(base.uri).commits)


def _holder(run: RunDir) -> str:
    return f"the run {run.uri}"


def _teacher_holder(run: RunDir) -> str:
    # A holder holds one commit of a run at a time. The student may begin with another commit of its teacher.
    return f"the run {run.uri}, which learns from it"
