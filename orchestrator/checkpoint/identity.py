"""Whether a run directory belongs to the run that a job file describes. Every commit records that; so does job.yaml."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from orchestrator.checkpoint.last_commit import refuse_anew
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.store import Store
from orchestrator.config.document import parse_yaml
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.own_code import check_same_cleaning, check_same_code
from orchestrator.config.redact import bare_places, redact, without_credentials
from orchestrator.config.spec import STAGES, JobSpec, parse
from orchestrator.storage.run_directory import ORIGIN, RunDir

IDENTITY, SHARDS, BASE, CODE, CONTINUED = "identity", "shards", "base", "code", "continued_from"
CLEANED_BY, KEPT = "cleaned_by", "folder_config"
"""Keys of a commit's meta: the parts of the job that make the run the same run, the digest of its token shards, the
weights that it began with, the hashes of the user's own code, and the commit of another run that it goes on from: its
run, step, position and receipt; the hashes of own code that cleaned its text; the configuration files of the pretrained
folder that its model is of, see `orchestrator.resolve.kept_config`. Commits of earlier versions lack them and
are not compared."""
TILES = "tiles"
"""Key of a commit's meta: that weights were drawn in tiles, see `workloads.model.initialise.Drawn`."""
JOB = "job.yaml"
LENGTH = "train.steps"
"""The one key of the identity that may change, see `extension_of`."""
PRECISION, CHAT_DATE = "train.precision", "data.chat_date"
OF_LENGTH = ("train.optimizer.warmup", "train.optimizer.decay")
"""Keys that a job file may give as a share of it."""


class Absent(Enum):
    """What stands for the value of a key that a job does not have, which is another thing than null."""

    ABSENT = "not set"


ABSENT = Absent.ABSENT
DAMAGED = "put it back; or remove it and run the job again, whose commits know which run it is"


def read_job(run: RunDir) -> JobSpec | None:
    """The job of a run directory, from its job.yaml; None if there is none. Raises InputError if it is damaged, or the
    directory is that of a chain."""
    text = run.read_text(JOB)
    if text is None:
        return None
    where = run.at(JOB)
    try:
        document = parse_yaml(text, where)
        if STAGES not in document:
            return parse(document, where)
    except InputError as error:
        raise InputError(error.what, error.where, DAMAGED) from None
    places = [run.at(str(stage["name"])) for stage in document[STAGES]]
    hint = f"name one of its stages: {', '.join(places)}"
    raise InputError("is the directory of a chain, and no run", run.uri, hint)


@dataclass(frozen=True)
class Extension:
    """A run whose train.steps are raised from `before` to `after`; it goes on from the commit at `step`, the newest of
    the first `settled` steps, which are the same in both."""

    before: int
    after: int
    settled: int
    step: int

    def __str__(self) -> str:
        return f"extended from {self.before} to {self.after} steps, from step {self.step} on"


def check_same_run(spec: JobSpec, run: RunDir) -> CommitManifest | None:
    """Refuse to continue in another run's directory, by its newest sound commit or else its job.yaml.

    Returns that commit, if there is one. Raises InputError that names the keys that differ.
    """
    commit = Store(run.commits).latest(deep=False)
    extension_of(spec, run, commit)
    if commit is not None:
        _check_sets_of(spec, run)
        check_same_code(spec, commit.meta.get(CODE) or {}, run.uri)
        check_same_cleaning(spec, commit.meta.get(CLEANED_BY) or {}, run.uri)
    return commit


def _check_sets_of(spec: JobSpec, run: RunDir) -> None:
    """As `check_same_sets`. Only job.yaml tells; a run whose job.yaml is gone or damaged goes on."""
    try:
        before = read_job(run)
    except InputError:
        return
    if before is not None:
        check_same_sets(spec, before)


def check_same_sets(spec: JobSpec, before: JobSpec) -> None:
    """Raise InputError if a set is read otherwise than by the job `before`: its values are compared."""
    known = before.set_sources
    for name, (where, sources) in spec.set_sources.items():
        _, was = known.get(name, (where, []))
        if [bare_places(each.uri) for each in was] != [bare_places(each.uri) for each in sources]:
            continue  # another text is noticed where it is prepared
        for number, (old, new) in enumerate(zip(was, sources, strict=True)):
            if (old.field, old.format) != (new.field, new.format):
                what = f"the run has read this set as field {old.field}, format {old.format} so far"
                hint = "put that back, or add a set of another name"
                raise InputError(what, f"{where}.{number}", hint)


def extension_of(spec: JobSpec, run: RunDir, commit: CommitManifest | None) -> Extension | None:
    """By how much the job extends the run whose newest sound commit is `commit`; None if it does not.

    What is extended is the same run as one that was that long from the start: it goes on from the newest commit that
    the longer run has too. Raises InputError if this is another run, or cannot be extended.
    """
    before = (job_of_commit(commit) if commit else None) or read_job(run)
    if before is None:
        return None
    was, wanted = before.train.steps, spec.train.steps
    if was == wanted:
        _compare(spec, before, run.uri)
        return None
    _compare(spec, before, run.uri, but=(LENGTH, *OF_LENGTH))
    what = f"train.steps is {was} in this run and {wanted} in the job file"
    if wanted < was:
        raise InputError(f"{what}: it cannot be lowered", run.uri, "set it back; --until ends a run earlier")
    settled = before.train.optimizer.settled(was)
    if settled is None:
        schedule = before.train.optimizer.schedule
        hint = "set it back; a run under schedule wsd can be extended"
        if commit is not None:
            hint += (
                f". Or go on in a directory of its own, under the schedule begun anew: orchestrator run JOB --run-dir "
                f"{run.uri}-longer --set 'train.continue_from={{run: \"{run.uri}\", schedule: restart}}' "
                f"--set {LENGTH}={wanted}"
            )
        raise InputError(f"{what}: every learning rate of schedule {schedule} depends on it", run.uri, hint)
    for key, theirs, ours in differences(spec, before):
        if key != LENGTH:
            hint = f"a share of train.steps is another number now: --set {key}={theirs}"
            raise InputError(_difference(key, theirs, ours), run.uri, hint)
    if commit is not None and commit.step > settled:
        commit = Store(run.commits).latest(settled, deep=False)
    if commit is None:
        hint = "put it back; or set train.steps back, or begin a run of that length under another name"
        raise InputError(f"{what}: no commit up to step {settled} is left to go on from", run.uri, hint)
    return Extension(was, wanted, settled, commit.step)


def take_up(spec: JobSpec, run: RunDir) -> tuple[CommitManifest | None, Extension | None]:
    """As `check_same_run`, of a run that is to go on, and by how much the job extends it. A lost ORIGIN is written
    again. Raises InputError as `refuse_anew`, too."""
    commit = check_same_run(spec, run)
    refuse_anew(run, commit)
    extension = extension_of(spec, run, commit)
    restore_origin(run, commit)
    return commit, extension


def restore_origin(run: RunDir, commit: CommitManifest | None) -> None:
    """Write ORIGIN of the run again as its newest `commit` tells it, where that is lost or damaged."""
    told = commit.meta.get(CONTINUED) if commit else None
    if told and not run.read_json_or_empty(ORIGIN):
        run.write_json(ORIGIN, told)


def job_begun(run: RunDir) -> JobSpec | None:
    """The job that the run in the directory has begun with, by its newest sound commit or else its job.yaml; None if it
    has not begun. Raises InputError as `read_job`."""
    commit = Store(run.commits).latest(deep=False)
    return (job_of_commit(commit) if commit else None) or read_job(run)


def is_shared(commit: CommitManifest, spec: JobSpec) -> bool:
    """Whether a commit of this run is one of a run of the job's length too. Those of earlier versions do not tell."""
    if IDENTITY not in commit.meta:
        return True
    train = _job_of(commit).train
    settled = train.optimizer.settled(train.steps)
    return train.steps == spec.train.steps or (settled is not None and commit.step <= settled)


def check_commit(commit: CommitManifest, spec: JobSpec, where: str) -> None:
    """Raise InputError if a commit is not of a run of this job."""
    check_same_code(spec, commit.meta.get(CODE) or {}, where)
    if IDENTITY in commit.meta:
        before = _job_of(commit)
        _compare(spec, before, where)
        if not is_shared(commit, spec):
            raise _differs(LENGTH, before.train.steps, spec.train.steps, where)


def check_shards(commit: CommitManifest | None, digest: str, data: str) -> None:
    """Raise InputError if the token shards in `data`, with that digest, are not those of the commit's run."""
    if commit is not None and (commit.meta.get(SHARDS) or digest) != digest:
        raise wrong_shards(data)


def wrong_shards(data: str) -> InputError:
    """The error for token shards that are not the run's."""
    hint = "remove the folder, so that they are made again from the same text; or start another run"
    return InputError("these token shards are not those that the run began with", data, hint)


def job_of_commit(commit: CommitManifest) -> JobSpec | None:
    """The job of a commit as far as its identity tells; None for one of an earlier version, which does not."""
    return _job_of(commit) if IDENTITY in commit.meta else None


def _job_of(commit: CommitManifest) -> JobSpec:
    """A job with the identity in a commit; keys that are newer than the commit have their defaults."""
    return parse({"name": "commit", **commit.meta[IDENTITY]}, f"the commit at step {commit.step}")


def _compare(spec: JobSpec, before: JobSpec, where: str, but: Collection[str] = (LENGTH,)) -> None:
    """Raise InputError, which names every key, if two jobs are not the same `but` for these keys, their length if none
    are named."""
    problems = Problems()
    for key, theirs, ours in differences(spec, before):
        if key not in but:
            with problems.noted():
                raise _differs(key, theirs, ours, where)
    problems.raise_noted()


def differences(spec: JobSpec, before: JobSpec) -> list[tuple[str, Any, Any]]:
    """The keys in which two jobs are not the same run, wherever their files are: each with the value `before` and that
    of `spec`, ABSENT for one that is not there. A job that leaves its precision open has that of its run."""
    ours, theirs = (_without_locations(job.identity()) for job in (spec, before))
    free = {PRECISION} if "auto" in (spec.train.precision, before.train.precision) else set()
    if before.data.chat_date is None:  # a run of an earlier version, whose template asked the clock
        free.add(CHAT_DATE)
    return [
        found for found in sorted(_unlike("", theirs, ours), key=lambda each: each[0]) if found[0] not in free
    ]


def shown(value: Any) -> str:
    """A value of `differences` as a message has it."""
    if value is ABSENT:
        return str(value.value)
    return "null" if value is None else repr(redact(value))


def _differs(key: str, theirs: Any, ours: Any, where: str) -> InputError:
    hint = "a run stays the same run: set it back, or give another name or --run-dir"
    return InputError(_difference(key, theirs, ours), where, hint)


def _difference(key: str, theirs: Any, ours: Any) -> str:
    return f"{key} is {shown(theirs)} in this run and {shown(ours)} in the job file"


def _without_locations(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity with only the base names of text, tokenizer and model, which may have been moved along with the run;
    that the tokens are the same is checked by their shards."""
    workload, data = identity["workload"], identity["data"]
    begins = workload["init_from"] and base_name(workload["init_from"])
    model, tokenizer = workload["model"], data["tokenizer"]
    if model.startswith("hf:"):
        model = f"hf:{base_name(model[3:])}"
    if isinstance(tokenizer, str):
        tokenizer = base_name(tokenizer)
    sources = [{**source, "uri": _base_names(source["uri"])} for source in data["sources"]]
    template = data["chat_template"] and base_name(data["chat_template"])
    data = {**data, "tokenizer": tokenizer, "sources": sources, "chat_template": template}
    train = identity["train"]
    if before := train.get("continue_from"):
        train = {**train, "continue_from": {**before, "run": base_name(before["run"])}}
    workload = {**workload, "model": model, "init_from": begins}
    return {**identity, "workload": workload, "data": data, "train": train}


def base_name(path: str) -> str:
    """The last part of a path or URI, without its credentials."""
    return without_credentials(path).rstrip("/").rsplit("/", 1)[-1]


def _base_names(named: str | list[str]) -> str | list[str]:
    return base_name(named) if isinstance(named, str) else [base_name(path) for path in named]


def _unlike(key: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """The keys, at and below `key`, in which two values differ. 1, 1.0 and true are three values, as in a file."""
    inner = [value for value in (was, now) if isinstance(value, dict)]
    there = sum(value is not None and value is not ABSENT for value in (was, now))
    if any(inner) and len(inner) == there:  # else one of the two is no mapping
        for name in dict.fromkeys(name for value in inner for name in value):
            theirs, ours = (
                value.get(name, ABSENT) if isinstance(value, dict) else ABSENT for value in (was, now)
            )
            yield from _unlike(f"{key}.{name}" if key else str(name), theirs, ours)
    elif is_other(was, now):
        yield key, was, now


def is_other(was: Any, now: Any) -> bool:
    """Whether a file writes two values differently: 1, 1.0 and true are three, and null is not the same as no key."""
    if ABSENT in (was, now):
        return was is not now
    return json.dumps(was, sort_keys=True) != json.dumps(now, sort_keys=True)
