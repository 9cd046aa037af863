"""Whether a run directory belongs to the run that a job file describes. Every commit records that; so does job.yaml."""

from __future__ import annotations

from typing import Any

from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.store import Store
from orchestrator.job.errors import InputError
from orchestrator.job.spec import JobSpec, parse, parse_yaml
from orchestrator.storage.run_directory import RunDir

IDENTITY, SHARDS = "identity", "shards"
"""Keys of a commit's meta: the parts of the job that make the run the same run, and the digest of its token shards.
Commits of earlier versions lack them and are not compared."""
JOB = "job.yaml"
DAMAGED = "put it back; or remove it and run the job again, whose commits know which run it is"


def read_job(run: RunDir) -> JobSpec | None:
    """The job of a run directory, from its job.yaml; None if there is none. Raises InputError if it is damaged."""
    text = run.read_text(JOB)
    if text is None:
        return None
    where = run.at(JOB)
    try:
        return parse(parse_yaml(text, where), where)
    except InputError as error:
        raise InputError(error.what, error.where, error.hint or DAMAGED) from None


def check_same_run(spec: JobSpec, run: RunDir) -> CommitManifest | None:
    """Refuse to continue in another run's directory, by its newest sound commit or else its job.yaml.

    Returns that commit, if there is one. Raises InputError that names the first key that differs.
    """
    commit = Store(run.at("checkpoints")).latest(deep=False)
    if commit is not None and IDENTITY in commit.meta:
        _compare(spec.identity(), _identity_of(commit), run.uri)
    elif (before := read_job(run)) is not None:
        _compare(spec.identity(), before.identity(), run.uri)
    return commit


def check_commit(commit: CommitManifest, spec: JobSpec, where: str) -> None:
    """Raise InputError if a commit is not of a run of this job."""
    if IDENTITY in commit.meta:
        _compare(spec.identity(), _identity_of(commit), where)


def check_shards(commit: CommitManifest | None, digest: str, data: str) -> None:
    """Raise InputError if the token shards in `data`, with that digest, are not those of the commit's run."""
    if commit is not None and (commit.meta.get(SHARDS) or digest) != digest:
        raise wrong_shards(data)


def wrong_shards(data: str) -> InputError:
    """The error for token shards that are not the run's."""
    hint = "remove the folder, so that they are made again from the same text; or start another run"
    return InputError("these token shards are not those that the run began with", data, hint)


def _identity_of(commit: CommitManifest) -> dict[str, Any]:
    """The identity in a commit; keys that are newer than the commit have their defaults."""
    return parse({"name": "commit", **commit.meta[IDENTITY]}, f"the commit at step {commit.step}").identity()


def _compare(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    ours, theirs = _flat(_without_locations(ours)), _flat(_without_locations(theirs))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise InputError(
                f"{key} is {theirs.get(key)!r} in this run and {ours.get(key)!r} in the job file",
                where,
                "a run stays the same run: set it back, or give another name or --run-dir",
            )


def _without_locations(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity with only the base names of text, tokenizer and model, which may have been moved along with the run;
    that the tokens are the same is checked by their shards."""
    workload, data = identity["workload"], identity["data"]
    model, tokenizer = workload["model"], data["tokenizer"]
    if model.startswith("hf:"):
        model = f"hf:{_base_name(model[3:])}"
    if isinstance(tokenizer, str):
        tokenizer = _base_name(tokenizer)
    sources = [{**source, "uri": _base_name(source["uri"])} for source in data["sources"]]
    data = {**data, "tokenizer": tokenizer, "sources": sources}
    return {**identity, "workload": {**workload, "model": model}, "data": data}


def _base_name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {key: value}
    return {
        k: v
        for name, inner in value.items()
        for k, v in _flat(inner, f"{key}.{name}" if key else name).items()
    }
