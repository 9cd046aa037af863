"""The commit that a job file names: a run directory with a step, `last` or `best`."""

from __future__ import annotations

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import read_job
from orchestrator.checkpoint.manifest import CommitManifest, CorruptCommit, commit_folder
from orchestrator.checkpoint.retention import best_commit
from orchestrator.config.errors import InputError
from orchestrator.storage.run_directory import RunDir

BEST = "best"
LAST = "last"


def split_tag(name: str) -> tuple[str, str]:
    """Split a name into the run directory and the part after its @, empty if there is none."""
    if "@" not in name.rsplit("/", 1)[-1]:
        return name, ""
    uri, _, tag = name.rpartition("@")
    return uri, tag


def commit_at(
    uri: str,
    tag: int | str,
    where: str,
    problem_without_commits: str = "has no commit",
    hint: str = "name a run directory",
) -> CommitManifest:
    """Return the commit of the run at `uri` that a step or a word names; for an empty word, the newest undamaged one.

    Args:
        uri: the run directory.
        tag: a step, last or best, or empty.
        where: the key of the job file, for errors.
        problem_without_commits, hint: the error if the run has no checkpoints.

    Raises InputError.
    """
    store = Store(RunDir(uri).commits)
    if not (steps := store.steps()):
        raise InputError(f"{uri} {problem_without_commits}", where, hint)
    if tag == BEST:
        job = read_job(RunDir(uri))  # a commit does not record which commits the run keeps
        metric = job.checkpoint.best_metric if job else None
        best = best_commit(store, metric) if metric is not None else None
        if best is None:
            raise InputError(f"{uri} keeps no best commit", where, "name a step, or @last")
        tag = best
    if tag in ("", LAST):
        newest = store.latest(deep=False)
        if newest is None:
            raise InputError(f"{uri} has no sound commit", where, "name another run")
        return newest
    if not str(tag).isdecimal() or int(tag) not in steps:
        raise InputError(f"{uri} has no commit at {tag}", where, f"name a step of {steps}, @last or @best")
    try:
        commit = store.manifest(int(tag))
        problems = store.problems(commit, store.retry(store.backend.list, commit_folder(commit.step)))
    except CorruptCommit as error:
        problems = [str(error)]
    if problems:
        raise InputError(f"the commit is damaged: {problems[0]}", where, f"name another step of {steps}")
    return commit
