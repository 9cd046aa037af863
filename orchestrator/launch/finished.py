"""Whether a run has done all that a job asks for, so that nothing is started for it."""

from __future__ import annotations

from typing import Any

from orchestrator.checkpoint.evaluations import measure_of
from orchestrator.checkpoint.identity import (
    JOB,
    base_name,
    check_same_run,
    extension_of,
    read_job,
    restore_origin,
)
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.store import Store
from orchestrator.config.checkpoint import NO_EXPORT
from orchestrator.config.redact import holds_secret
from orchestrator.config.spec import JobSpec, dump
from orchestrator.resolve.precision import as_its_run
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.progress import TrainingProgress

OF_THE_EXPORT = NO_EXPORT.keys() - {"export_at"}
"""Keys of `checkpoint` that say what is exported, and where to."""
OF_THE_COURSE = (
    "evaluate", "stop_when", "checkpoint", "tracking", "sinks", "notify", "limits",
    "train.stability", "data.validation",
)  # fmt: skip
"""Parts of a job that say what a run does beside its steps, while it goes on."""


def finished_summary(run_dir: RunDir) -> dict[str, Any] | None:
    """The summary of a run that has ended, None if it has not."""
    return run_dir.read_json_or_empty("summary.json") or None


def done_already(spec: JobSpec, run_dir: RunDir) -> dict[str, Any] | None:
    """The summary of a run that is done and has its last commit, None if there is something to do.

    One whose last commit is damaged or gone goes on from the one before; where none is left, as where they were removed
    to save space, it stays done. One of which the job asks for more is not done: for more steps, since it ended before
    them on a plateau that is none by the job, or for an export that there is not. Raises InputError if the run is
    another one, or its job.yaml is damaged.
    """
    found = finished_summary(run_dir)
    if not found or found.get("state") != "done":
        return None
    if run_dir.read_json_or_empty("status.json").get("phase", "done") != "done":
        return None  # it was taken up again since
    commit, last, steps = check_same_run(spec, run_dir), found.get("commit"), found.get("steps")
    if isinstance(steps, int) and steps < spec.train.steps:
        return None
    if commit is None:
        return found
    is_older = isinstance(last, int) and commit.step < last
    return None if is_older or _has_steps_left(spec, commit) or _lacks_export(spec, run_dir, found) else found


def finished_line(spec: JobSpec, run_dir: RunDir) -> str:
    """A line that says that the run is done, and which keys the job file says otherwise since, to no effect."""
    line, before = f"{run_dir.uri} is finished: nothing to do", read_job(run_dir)
    changed = _changed(spec, before) if before else []
    if not changed:
        return line
    hint = "`orchestrator evaluate` and `generate` take its commits as they are"
    return f"{line}; what the job file says since of {', '.join(changed)} is not used; {hint}"


def _changed(spec: JobSpec, before: JobSpec) -> list[str]:
    """The keys beside those of the run's identity in which two jobs differ, wherever files are."""
    ours, theirs = (job.model_dump(mode="json") for job in (spec, before))
    found = []
    for section in OF_THE_COURSE:
        new, old = (_names(_part(document, section)) for document in (ours, theirs))
        if isinstance(new, dict) and isinstance(old, dict):
            found += [f"{section}.{key}" for key in new if new[key] != old.get(key)]
        elif new != old:
            found.append(section)
    return found


def _part(document: Any, section: str) -> Any:
    for key in section.split("."):
        document = document[key]
    return document


def _names(value: Any) -> Any:
    """A dumped value with the base names of its paths."""
    if isinstance(value, dict):
        return {key: _names(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_names(each) for each in value]
    return base_name(value) if isinstance(value, str) else value


def beyond(spec: JobSpec, run_dir: RunDir, until: int) -> str:
    """A line that says that the run has a commit after the step `until` from which it would go on; empty if it has
    none. Raises InputError if the run is another one."""
    commit = check_same_run(spec, run_dir)
    extension = extension_of(spec, run_dir, commit)
    step = extension.step if extension else commit.step if commit else 0
    return f"step {step} is committed, beyond --until {until}: nothing was started" if step > until else ""


def put_back(spec: JobSpec, run_dir: RunDir) -> None:
    """Write again what a run that is done has lost and its commits tell: job.yaml, and where it began."""
    commit = Store(run_dir.commits).latest(deep=False)
    restore_origin(run_dir, commit)
    if commit is not None and not run_dir.exists(JOB):
        text = dump(as_its_run(spec, run_dir))
        run_dir.write_text(JOB, text, private=holds_secret(text))


def _has_steps_left(spec: JobSpec, commit: CommitManifest) -> bool:
    told = commit.step, commit.position, commit.receipt, commit.meta, ()
    progress = TrainingProgress.of_commit(*told, measure_of(spec))
    return commit.step < spec.train.steps and not progress.is_on_plateau(spec.stop_when)


def _lacks_export(spec: JobSpec, run_dir: RunDir, found: dict[str, Any]) -> bool:
    """Whether the job asks for an export that the run, whose summary is `found`, has not made."""
    before = read_job(run_dir)
    if spec.checkpoint.export is None:
        return False
    if not found.get("export"):
        return True
    return before is not None and any(
        getattr(spec.checkpoint, key) != getattr(before.checkpoint, key) for key in OF_THE_EXPORT
    )
