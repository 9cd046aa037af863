"""Find out whether a run has done everything that a job asks for, so that nothing need be started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import NO_EXPORT, CheckpointSpec
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
from orchestrator.config.redact import holds_secret
from orchestrator.config.spec import JobSpec, dump
from orchestrator.evaluate.config import EvaluateSpec, StopWhen
from orchestrator.resolve.precision import as_its_run
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.training_progress import TrainingProgress

OF_THE_EXPORT = NO_EXPORT.keys() - {"export_at"}
"""Keys of `checkpoint` that say what is exported, and where."""
OF_THE_COURSE = (
    "evaluate", "stop_when", "checkpoint", "tracking", "sinks", "notify", "limits",
    "train.stability", "train.layer_statistics", "data.validation",
)  # fmt: skip
"""Parts of a job that do not change its steps. A job file may change them while the run continues."""


def finished_summary(run_dir: RunDir) -> dict[str, Any] | None:
    """Return the summary of a run that has ended, None if it has not."""
    return run_dir.read_json_or_empty("summary.json") or None


class PastRun:
    """The part of a job that the run in a directory has done already."""

    def __init__(self, job: JobSpec, run_dir: RunDir) -> None:
        self._job = job
        self._run = run_dir

    def done(self) -> dict[str, Any] | None:
        """Return the summary of a run that has nothing left to do for the job, None if it has.

        - A run whose last commit is damaged or gone has steps to repeat from the commit before.
        - A run without any commits stays done, because users remove commits to save space.
        - A run is not done if the job asks for more steps, for an export that does not exist, or for steps after a
          plateau that is no plateau by the present job.

        Raises:
            InputError: the directory belongs to another run, or its job.yaml is damaged.
        """
        job = self._job
        summary = finished_summary(self._run)
        if not summary or summary.get("state") != "done":
            return None
        if self._run.read_json_or_empty("status.json").get("phase", "done") != "done":
            return None  # another command has resumed the run since
        commit = check_same_run(job.run_identity, self._run)
        steps = summary.get("steps")
        if isinstance(steps, int) and steps < job.train.steps:
            return None
        if commit is None:
            return summary
        last = summary.get("commit")
        is_older = isinstance(last, int) and commit.step < last
        if (
            is_older
            or _has_steps_left(job.train.steps, job.checkpoint, job.evaluate, job.stop_when, commit)
            or _lacks_export(job.checkpoint, self._run, summary)
        ):
            return None
        return summary

    def line(self) -> str:
        """Return the line for a finished run. It names the keys that have changed in the job file without effect."""
        line = f"{self._run.uri} is finished: nothing to do"
        before = read_job(self._run)
        changed = (
            _changed(self._job.model_dump(mode="json"), before.model_dump(mode="json")) if before else []
        )
        if not changed:
            return line
        hint = "`orchestrator evaluate` and `generate` work with its commits"
        return f"{line}; changes of {', '.join(changed)} in the job file have no effect; {hint}"

    def beyond(self, until: int) -> str:
        """Return a line for a run that would continue from a commit after the step `until`; empty for other runs.

        Raises InputError if the directory belongs to another run.
        """
        commit = check_same_run(self._job.run_identity, self._run)
        extension = extension_of(self._job.identity(), self._run, commit)
        step = extension.step if extension else commit.step if commit else 0
        return (
            f"step {step} is committed, beyond --until {until}: nothing was started" if step > until else ""
        )

    def put_back(self) -> None:
        """Restore lost files of a finished run from its commits: job.yaml, and ORIGIN of a run that continued another
        one.
        """
        commit = Store(self._run.commits).latest(deep=False)
        restore_origin(self._run, commit)
        if commit is not None and not self._run.exists(JOB):
            text = dump(self._job.with_parts(train=as_its_run(self._job.train, self._run)))
            self._run.write_text(JOB, text, private=holds_secret(text))


def _changed(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The keys outside the run's identity in which two jobs, as plain data, differ. Locations are not compared."""
    keys = []
    for path in OF_THE_COURSE:
        new = _names(_part(ours, path))
        old = _names(_part(theirs, path))
        if isinstance(new, dict) and isinstance(old, dict):
            keys += [f"{path}.{key}" for key in new if new[key] != old.get(key)]
        elif new != old:
            keys.append(path)
    return keys


def _part(document: Any, path: str) -> Any:
    for key in path.split("."):
        document = document[key]
    return document


def _names(value: Any) -> Any:
    """A dumped value with paths reduced to their base names."""
    if isinstance(value, dict):
        return {key: _names(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_names(item) for item in value]
    return base_name(value) if isinstance(value, str) else value


def _has_steps_left(
    steps: int,
    checkpoint: CheckpointSpec,
    evaluate: EvaluateSpec | None,
    stop_when: StopWhen | None,
    commit: CommitManifest,
) -> bool:
    progress = TrainingProgress.of_commit(
        commit.step,
        commit.position,
        commit.receipt,
        commit.meta,
        (),
        measured=measure_of(evaluate, checkpoint.averaged),
    )
    return commit.step < steps and not progress.is_on_plateau(stop_when)


def _lacks_export(checkpoint: CheckpointSpec, run_dir: RunDir, summary: dict[str, Any]) -> bool:
    """Whether the job asks for an export that the run has not made or not pushed, by its summary."""
    before = read_job(run_dir)
    if checkpoint.export is None:
        return False
    made = summary.get("export")
    if not made or (checkpoint.push is not None and "not_pushed" in made):
        return True
    return before is not None and any(
        getattr(checkpoint, key) != getattr(before.checkpoint, key) for key in OF_THE_EXPORT
    )
