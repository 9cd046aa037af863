"""Check that a run directory belongs to the run that a job file describes.

Every commit stores the identity of its run, the parts of the job that must not change; so does job.yaml. The number of
steps is the one part that may be raised later (`extension_of`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import RunIdentity
from orchestrator.checkpoint.last_commit import refuse_anew
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.document import STAGES, parse_yaml
from orchestrator.config.errors import InputError, Problems
from orchestrator.config.own_code import check_same_cleaning, check_same_code
from orchestrator.config.redact import bare_places, redact, without_credentials
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.config import Source
from orchestrator.storage.run_directory import ORIGIN, RunDir

# Keys of a commit's meta. Commits of earlier versions lack some of them, and those are not compared.
IDENTITY = "identity"
"""The parts of the job that must not change during a run."""
SHARDS = "shards"
"""The digest of the token shards."""
BASE = "base"
"""The pretrained weights that the run began with."""
CODE = "code"
"""The hashes of the user's own code."""
CONTINUED = "continued_from"
"""The commit of another run that this run began with: its run, step, position and receipt."""
CLEANED_BY = "cleaned_by"
"""The hashes of the user's own code that cleaned the text."""
KEPT = "folder_config"
"""The configuration files of the model's pretrained folder, see `orchestrator.models.kept_config`."""
CLASS_WEIGHTS = "class_weights"
"""The class weights that `balanced` has counted in the records of training, by number of the label. Only in commits of
jobs with balanced weights."""
TILES = "tiles"
"""Whether weights were drawn in tiles, see `workloads.model.initialise.Drawn`."""
TEACHER = "teacher"
"""The weights of the teacher that the run learns from. Commits of earlier versions have only their checksum."""
JOB = "job.yaml"
LENGTH = "train.steps"
"""The one key of the identity that may change, see `extension_of`."""
PRECISION = "train.precision"
CHAT_DATE = "data.chat_date"
OF_LENGTH = ("train.optimizer.warmup", "train.optimizer.decay")
"""Keys that a job file may give as a share of `train.steps`."""


class Absent(Enum):
    """The value of a key that a job does not have. It differs from null."""

    ABSENT = "not set"


ABSENT = Absent.ABSENT
DAMAGED = "put it back; or remove it and run the job again, whose commits know which run it is"


def read_job(run: RunDir) -> JobSpec | None:
    """Read the job of a run directory from its job.yaml; None without one.

    Raises:
        InputError: the file is damaged, or the directory belongs to a chain.
    """
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
    stage_uris = [run.at(str(stage["name"])) for stage in document[STAGES]]
    hint = f"name one of its stages: {', '.join(stage_uris)}"
    raise InputError("is the directory of a chain, not of a run", run.uri, hint)


@dataclass(frozen=True)
class Extension:
    """A run whose `train.steps` is raised."""

    before: int
    """The steps of the run before."""
    after: int
    """The steps of the run from now on."""
    settled: int
    """How many of the first steps are the same in the shorter and in the longer run."""
    step: int
    """The newest commit within those steps, which the run continues from."""

    def __str__(self) -> str:
        return f"extended from {self.before} to {self.after} steps, from step {self.step} on"


def check_same_run(identity: RunIdentity, run: RunDir) -> CommitManifest | None:
    """Check that a directory belongs to this job's run, by its newest sound commit or else by its job.yaml.

    Args:
        identity: the identity of the job.
        run: the run directory.

    Returns:
        The newest sound commit; None without one.

    Raises:
        InputError: it belongs to another run. The message names the keys that differ.
    """
    commit = Store(run.commits).latest(deep=False)
    extension_of(identity.keys, run, commit)
    if commit is not None:
        _check_sets_of(identity.set_sources, run)
        check_same_code(identity.own_code, identity.accepted, commit.meta.get(CODE) or {}, run.uri)
        check_same_cleaning(identity.clean, identity.accepted, commit.meta.get(CLEANED_BY) or {}, run.uri)
    return commit


def _check_sets_of(sets: Mapping[str, tuple[str, list[Source]]], run: RunDir) -> None:
    """As `check_same_sets`, against job.yaml. Without a readable job.yaml nothing is checked."""
    try:
        before = read_job(run)
    except InputError:
        return
    if before is not None:
        check_same_sets(sets, before.set_sources)


def check_same_sets(
    sets: Mapping[str, tuple[str, list[Source]]], known: Mapping[str, tuple[str, list[Source]]]
) -> None:
    """Raise InputError if the job reads a held-out set differently than before.

    Args:
        sets: its sets with their own text, see `JobSpec.set_sources`.
        known: those of the run so far.
    """
    for name, (where, sources) in sets.items():
        _, was = known.get(name, (where, []))
        if [bare_places(each.uri) for each in was] != [bare_places(each.uri) for each in sources]:
            continue  # another text is noticed when it is prepared
        for number, (old, new) in enumerate(zip(was, sources, strict=True)):
            if (old.field, old.format) != (new.field, new.format):
                problem = f"the run has read this set as field {old.field}, format {old.format} so far"
                hint = "put that back, or add a set of another name"
                raise InputError(problem, f"{where}.{number}", hint)


def extension_of(identity: Mapping[str, Any], run: RunDir, commit: CommitManifest | None) -> Extension | None:
    """Return how the job extends the run; None if it does not.

    An extended run equals a run that had the larger number of steps from the start. So it continues from the newest
    commit that both runs share, which is before the decay of the learning rate.

    Args:
        identity: what makes the job's run the same run, see `JobSpec.identity`.
        run: the run directory.
        commit: the newest sound commit of the run, None without one.

    Raises:
        InputError: the directory belongs to another run, or the run cannot be extended.
    """
    before = (job_of_commit(commit) if commit else None) or read_job(run)
    if before is None:
        return None
    length_before, length = before.train.steps, identity["train"]["steps"]
    if length_before == length:
        _compare(identity, before.identity(), run.uri)
        return None
    _compare(identity, before.identity(), run.uri, but=(LENGTH, *OF_LENGTH))
    change = f"train.steps is {length_before} in this run and {length} in the job file"
    if length < length_before:
        raise InputError(
            f"{change}: it cannot be lowered",
            run.uri,
            "set it back; --until (or until=) ends a run earlier",
        )
    settled = before.train.optimizer.settled(length_before)
    if settled is None:
        schedule = before.train.optimizer.schedule
        hint = "set it back; a run under schedule wsd can be extended"
        if commit is not None:
            hint += (
                f". Or continue in another directory with the schedule restarted: orchestrator run JOB --run-dir "
                f"{run.uri}-longer --set 'train.continue_from={{run: \"{run.uri}\", schedule: restart}}' "
                f"--set {LENGTH}={length}"
            )
        raise InputError(f"{change}: every learning rate of schedule {schedule} depends on it", run.uri, hint)
    for key, theirs, ours in differences(identity, before.identity()):
        if key != LENGTH:
            hint = f"a share of train.steps is another number now: --set {key}={theirs}"
            raise InputError(_difference(key, theirs, ours), run.uri, hint)
    if commit is not None and commit.step > settled:
        commit = Store(run.commits).latest(settled, deep=False)
    if commit is None:
        hint = "put it back; or set train.steps back, or begin a run of that length under another name"
        raise InputError(
            f"{change}: no checkpoint up to step {settled} is left to continue from", run.uri, hint
        )
    return Extension(length_before, length, settled, commit.step)


def take_up(identity: RunIdentity, run: RunDir) -> tuple[CommitManifest | None, Extension | None]:
    """Check a run that is about to continue. Writes ORIGIN again if it is lost.

    Args:
        identity: the identity of the job.
        run: the run directory.

    Returns:
        The run's newest sound commit, and its extension.

    Raises:
        InputError: as `check_same_run`, `extension_of` and `refuse_anew` do.
    """
    commit = check_same_run(identity, run)
    refuse_anew(run, commit)
    extension = extension_of(identity.keys, run, commit)
    restore_origin(run, commit)
    return commit, extension


def restore_origin(run: RunDir, commit: CommitManifest | None) -> None:
    """Write a lost or damaged ORIGIN again, from the run's newest `commit`.

    Args:
        run: the run directory.
        commit: the newest sound commit; None without one.
    """
    origin = commit.meta.get(CONTINUED) if commit else None
    if origin and not run.read_json_or_empty(ORIGIN):
        run.write_json(ORIGIN, origin)


def job_begun(run: RunDir) -> JobSpec | None:
    """Return the job of the run in the directory, from its newest sound commit or else from its job.yaml.

    Returns None if the run has not begun. Raises InputError as `read_job` does.
    """
    commit = Store(run.commits).latest(deep=False)
    return (job_of_commit(commit) if commit else None) or read_job(run)


def is_shared(commit: CommitManifest, steps: int) -> bool:
    """Whether a run with the job's number of steps would make the same commit. True for commits of earlier versions.

    Args:
        commit: the manifest of the commit.
        steps: `train.steps` of the job.
    """
    if IDENTITY not in commit.meta:
        return True
    train = _job_of(commit).train
    settled = train.optimizer.settled(train.steps)
    # Up to the decay of the learning rate, a step does not depend on the length of the run.
    return train.steps == steps or (settled is not None and commit.step <= settled)


def check_commit(
    commit: CommitManifest,
    identity: Mapping[str, Any],
    own_code: Mapping[str, str],
    accepted: Sequence[str],
    where: str,
) -> None:
    """Raise InputError if a commit does not belong to a run of this job.

    Args:
        commit: the commit.
        identity: what makes the job's run the same run, see `JobSpec.identity`.
        own_code: the user's own code, see `JobSpec.own_code`.
        accepted: hashes of changed code that the job accepts.
        where: names the commit in messages.
    """
    check_same_code(own_code, accepted, commit.meta.get(CODE) or {}, where)
    if IDENTITY in commit.meta:
        before = _job_of(commit)
        _compare(identity, before.identity(), where)
        if not is_shared(commit, identity["train"]["steps"]):
            raise _differs(LENGTH, before.train.steps, identity["train"]["steps"], where)


def check_shards(commit: CommitManifest | None, digest: str, data: str) -> None:
    """Check that the token shards are those that the run trains on.

    Args:
        commit: a commit of the run; None before the first one.
        digest: the digest of the shards.
        data: where the shards are, for the message.

    Raises:
        InputError: they differ from those of the commit.
    """
    if commit is not None and (commit.meta.get(SHARDS) or digest) != digest:
        raise wrong_shards(data)


def wrong_shards(data: str) -> InputError:
    """Return the error for token shards that differ from the run's."""
    hint = "remove the folder, so that they are made again from the same text; or start another run"
    return InputError("the token shards differ from those that the run began with", data, hint)


def job_of_commit(commit: CommitManifest) -> JobSpec | None:
    """Return the job of a commit as far as its identity says; None for commits of earlier versions without one."""
    return _job_of(commit) if IDENTITY in commit.meta else None


def _job_of(commit: CommitManifest) -> JobSpec:
    """A job with the identity of a commit. Keys that are newer than the commit have their defaults."""
    identity = commit.meta[IDENTITY]
    # An identity does not say how often a run saves, but only whole rollouts fit a job.
    checkpoint = {"every": identity["train"]["steps"], **identity.get("checkpoint", {})}
    saves = {"checkpoint": checkpoint} if "rollout" in identity else {}
    return parse({"name": "commit", **identity, **saves}, f"the commit at step {commit.step}")


def _compare(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str, but: Collection[str] = (LENGTH,)
) -> None:
    """Raise InputError, which names every differing key, if two identities differ in other keys than those in `but`."""
    problems = Problems()
    for key, was, now in differences(ours, theirs):
        if key not in but:
            with problems.noted():
                raise _differs(key, was, now, where)
    problems.raise_noted()


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the keys in which two jobs are not the same run, by their identities, see `JobSpec.identity`.

    Each key has the value in `theirs`, the job before, and the value in `ours`. The value of a missing key is ABSENT.
    Locations of files are not compared. Neither is the precision if one of the jobs leaves it open.

    Args:
        ours: identity of the job.
        theirs: identity of the run so far.
    """
    ignored = {PRECISION} if "auto" in (ours["train"]["precision"], theirs["train"]["precision"]) else set()
    if theirs["data"].get("chat_date") is None:  # in runs of earlier versions the template asked the clock
        ignored.add(CHAT_DATE)
    unlike = _unlike("", _without_locations(theirs), _without_locations(ours))
    result = sorted(unlike, key=lambda difference: difference[0])
    return [difference for difference in result if difference[0] not in ignored]


def shown(value: Any) -> str:
    """Return a value of `differences` as messages show it."""
    if value is ABSENT:
        return str(value.value)
    return "null" if value is None else repr(redact(value))


def _differs(key: str, theirs: Any, ours: Any, where: str) -> InputError:
    hint = "a run stays the same run: set it back, or give another name or --run-dir"
    return InputError(_difference(key, theirs, ours), where, hint)


def _difference(key: str, theirs: Any, ours: Any) -> str:
    return f"{key} is {shown(theirs)} in this run and {shown(ours)} in the job file"


def _without_locations(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity with only the base names of text, tokenizer and model, which may have been moved.

    The digest of the token shards still proves that the tokens are the same.
    """
    workload = identity["workload"]
    data = identity["data"]
    begins = workload["init_from"] and base_name(workload["init_from"])
    model = workload["model"]
    tokenizer = data["tokenizer"]
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
    result = {**identity, "workload": workload, "data": data, "train": train}
    if distill := identity.get("distill"):
        result["distill"] = {**distill, "teacher": base_name(distill["teacher"].removeprefix("hf:"))}
    return result


def teacher_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of the teacher in a commit's meta: uri, step and digest; empty without one.

    Commits of earlier versions have only the digest.
    """
    teacher = meta.get(TEACHER) or {}
    return {"digest": teacher} if isinstance(teacher, str) else dict(teacher)


def base_name(path: str) -> str:
    """Return the last part of a path or URI, without credentials."""
    return without_credentials(path).rstrip("/").rsplit("/", 1)[-1]


def _base_names(named: str | list[str]) -> str | list[str]:
    return base_name(named) if isinstance(named, str) else [base_name(path) for path in named]


def _unlike(key: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys, at and below `key`, in which two values differ, with both values. See `is_other`."""
    mappings = [value for value in (was, now) if isinstance(value, dict)]
    present = sum(value is not None and value is not ABSENT for value in (was, now))
    if any(mappings) and len(mappings) == present:  # otherwise one of the two is a plain value
        for name in dict.fromkeys(name for value in mappings for name in value):
            theirs = was.get(name, ABSENT) if isinstance(was, dict) else ABSENT
            ours = now.get(name, ABSENT) if isinstance(now, dict) else ABSENT
            yield from _unlike(f"{key}.{name}" if key else str(name), theirs, ours)
    elif is_other(was, now):
        yield key, was, now


def is_other(was: Any, now: Any) -> bool:
    """Whether two values differ in a job file. 1, 1.0 and true are three values; null and a missing key differ.

    Args:
        was: the value in the run so far.
        now: the value in the job.
    """
    if ABSENT in (was, now):
        return was is not now
    return json.dumps(was, sort_keys=True) != json.dumps(now, sort_keys=True)
