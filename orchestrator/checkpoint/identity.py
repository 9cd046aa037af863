"""Whether a directory is of the run that a job means. Every commit says which run it is of; job.yaml says it again."""

from __future__ import annotations

from typing import Any

from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.store import Store
from orchestrator.job.errors import InputError
from orchestrator.job.spec import JobSpec, document_of, parse
from orchestrator.storage.run_directory import RunDir

IDENTITY, SHARDS = "identity", "shards"
"""Keys of a commit's meta: what makes the run the same run, and the digest of the token shards that it reads. Commits
of earlier versions lack them, and are not compared."""
JOB = "job.yaml"
DAMAGED = "put it back; or remove it and run the job again, whose commits know which run it is"


def job_in(run: RunDir) -> JobSpec | None:
    """The job in a run directory, None if there is none. Raises InputError if it is damaged."""
    text = run.read_text(JOB)
    if text is None:
        return None
    where = run.at(JOB)
    try:
        return parse(document_of(text, where), where)
    except InputError as error:
        raise InputError(error.what, error.where, error.hint or DAMAGED) from None


def check_same_run(spec: JobSpec, run: RunDir) -> CommitManifest | None:
    """Refuse to go on with another run's directory: by what its newest sound commit says, else by its job.yaml.

    Returns that commit. Raises InputError that names the first key that differs.
    """
    commit = Store(run.at("checkpoints")).latest(deep=False)
    if commit is not None and IDENTITY in commit.meta:
        _compare(spec.identity(), _identity_of(commit), run.uri)
    elif (before := job_in(run)) is not None:
        _compare(spec.identity(), before.identity(), run.uri)
    return commit


def check_commit(commit: CommitManifest, spec: JobSpec, where: str) -> None:
    """Refuse a commit that a run of this job did not make. Raises InputError."""
    if IDENTITY in commit.meta:
        _compare(spec.identity(), _identity_of(commit), where)


def check_shards(commit: CommitManifest | None, digest: str, data: str) -> None:
    """Refuse token shards that are not those that a commit's run reads. Raises InputError."""
    if commit is not None and (commit.meta.get(SHARDS) or digest) != digest:
        raise other_shards(data)


def other_shards(data: str) -> InputError:
    """What to tell of token shards that are not the run's."""
    hint = "remove the folder, so that they are made again from the same text; or start another run"
    return InputError("these token shards are not those that the run began with", data, hint)


def _identity_of(commit: CommitManifest) -> dict[str, Any]:
    """With keys that are new since the commit was made at their defaults."""
    return parse({"name": "commit", **commit.meta[IDENTITY]}, f"the commit at step {commit.step}").identity()


def _compare(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    ours, theirs = _flat(_placeless(ours)), _flat(_placeless(theirs))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise InputError(
                f"{key} is {theirs.get(key)!r} in this run and {ours.get(key)!r} in the job file",
                where,
                "a run stays the same run: set it back, or give another name or --run-dir",
            )


def _placeless(identity: dict[str, Any]) -> dict[str, Any]:
    """Without the folders of text, tokenizer and model, which may have been moved along with the run: that the tokens
    are the same is told by their shards."""
    workload, data = identity["workload"], identity["data"]
    model, tokenizer = workload["model"], data["tokenizer"]
    if model.startswith("hf:"):
        model = f"hf:{_last(model[3:])}"
    if isinstance(tokenizer, str):
        tokenizer = _last(tokenizer)
    sources = [{**source, "uri": _last(source["uri"])} for source in data["sources"]]
    data = {**data, "tokenizer": tokenizer, "sources": sources}
    return {**identity, "workload": {**workload, "model": model}, "data": data}


def _last(place: str) -> str:
    return place.rstrip("/").rsplit("/", 1)[-1]


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {key: value}
    return {
        k: v
        for name, inner in value.items()
        for k, v in _flat(inner, f"{key}.{name}" if key else name).items()
    }
