"""Decide which commits are kept, and remove the others, manifest first. The newest sound commit is always kept."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.evaluations import awaits, evaluated
from orchestrator.checkpoint.manifest import (
    FILE_NAME,
    FOLDER,
    INDEX_NAME,
    VERIFIED,
    CommitManifest,
    CorruptCommit,
    commit_folder,
    published_steps,
)
from orchestrator.checkpoint.pins import HOLD, pinned_steps, without_dead_readers
from orchestrator.config.commit_steps import regular_before
from orchestrator.config.metric_names import larger_is_better
from orchestrator.storage.file_names import EVALUATION, MANIFEST

if TYPE_CHECKING:  # the process that writes commits imports this module and no job files
    from orchestrator.checkpoint.config import CheckpointSpec


DOCUMENT = re.compile(r"(manifest|evaluation|records-[0-9]{5,}-[0-9a-z]+)\.json(\.[0-9a-f]{32}\.tmp)?")
"""The names of manifests, evaluations and writers' notes, and of their drafts that a crash left behind."""
LATEST_DRAFT = re.compile(r"LATEST\.[0-9a-f]{32}\.tmp")


@dataclass(frozen=True)
class Retention:
    """Which commits `prune` keeps.

    Attributes:
        keep: how many of the newest sound commits, at least one; None keeps all commits.
        every: also commits whose step is a multiple of this.
        best: also the best sound commit by this metric, see `rate`.
        before: also the newest sound commit up to this step.
        unevaluated: also commits that wait to be evaluated.
        averaged: also this many regular commits before the newest, the best and the waiting ones, for means of weights.
        regular: a commit is regular if its step is a multiple of this.

    The newest sound commit up to the last verified step is kept too: a run with a wrong machine goes back to it.
    """

    keep: int | None = None
    every: int | None = None
    best: str | None = None
    before: int | None = None
    unevaluated: bool = False
    averaged: int = 0
    regular: int = 1


def rate(store: Store, commit: CommitManifest, metric: str) -> tuple[float | None, Any]:
    """Rate a commit by a metric.

    Args:
        store: the store that has the commit.
        commit: the commit.
        metric: a metric of the evaluation after the commit's step, such as validation.loss; empty for the training
            loss.

    Returns:
        A number that is smallest for the best commit, None for a commit without the metric; and how it was measured,
        None if that is unknown.
    """
    if not metric:
        return commit.meta.get("loss"), None
    metrics, measured = evaluated(store, commit)
    value = metrics.get(metric)
    return -value if value is not None and larger_is_better(metric) else value, measured


def retention_of(checkpoint: CheckpointSpec, decay_from: int | None, evaluates_beside: bool) -> Retention:
    """Return the retention that the job asks for. It includes the commit before a decay, to extend the run from.

    Args:
        checkpoint: the key `checkpoint` of the job.
        decay_from: the step at which the learning rate begins to decay; None without such a phase.
        evaluates_beside: whether other workers evaluate commits, which then must stay until they are evaluated.
    """
    metric = checkpoint.best_metric or ("" if checkpoint.keep_best else None)
    return Retention(
        keep=checkpoint.keep,
        every=checkpoint.keep_every,
        best=metric,
        before=decay_from,
        unevaluated=evaluates_beside,
        averaged=checkpoint.averaged,
        regular=checkpoint.every,
    )


def best_commit(store: Store, metric: str) -> int | None:
    """Return the step of the best sound commit by a metric, the earliest of equals; None if no commit has the metric.

    Only commits that were measured like the newest of them count, for example with the same `evaluate.batches`.

    Args:
        store: the store of the run's commits.
        metric: the metric by its name, such as validation.loss.
    """
    return _best(store, _sound(store, store.retry(store.backend.list), limit=None), metric)


def _best(store: Store, sound: Mapping[int, CommitManifest], metric: str) -> int | None:
    rates = [(*rate(store, sound[step], metric), step) for step in sorted(sound, reverse=True)]
    newest = next((measured for value, measured, _ in rates if value is not None and measured), None)
    comparable = [(value, step) for value, measured, step in rates if measured in (None, newest)]
    rated = [(value, step) for value, step in comparable if value is not None and not math.isnan(value)]
    return min(rated)[1] if rated else None


def prune(store: Store, retention: Retention, spared: Collection[int] = ()) -> list[int]:
    """Remove the commits that `retention` does not keep, and files that interrupted attempts left behind.

    Only commits before the newest sound one are removed, and nothing if no commit is sound. Held commits stay (see
    `pins`). Damaged commits do not count towards `keep`.

    Args:
        store: the store.
        retention: what to keep.
        spared: steps of further commits to keep.

    Returns:
        The steps whose commits were removed.
    """
    if retention.keep is None:
        return []
    keep = max(retention.keep, 1)
    every = retention.every
    best = retention.best
    sizes = store.retry(store.backend.list)
    sound = _sound(store, sizes, limit=keep if best is None and not retention.unevaluated else None)
    if not sound:
        return []
    newest = max(sound)
    kept = set(sorted(sound)[-keep:]) | {
        step for step in published_steps(sizes) if every and step % every == 0
    }
    averaged = {newest, *spared, *pinned_steps(without_dead_readers(store, sizes))}
    if retention.unevaluated:  # before the search for the best, because an evaluation may end just now
        candidates = sound.keys() - (set() if retention.averaged else kept)
        averaged |= {step for step in candidates if awaits(store, sound[step])}
    if best is not None and (chosen := _best(store, sound, best)) is not None:
        averaged.add(chosen)
    # A mean of weights needs the regular commits before each of these.
    for step in averaged:
        kept |= {step, *regular_before(step, retention.regular, retention.averaged)}
    limits = [retention.before, sound[newest].meta.get(VERIFIED) or None]
    for limit in (each for each in limits if each is not None and newest > each):
        last = store.latest(limit, deep=False)
        if last:
            kept.add(last.step)
    removed = [step for step in _present(sizes) if step < newest and step not in kept]
    for step in removed:
        remove(store, step, sizes)
    for step in kept & sound.keys():
        _sweep(store, step, sizes, sound[step])
    for path in sizes:
        if LATEST_DRAFT.fullmatch(path):
            store.retry(store.backend.remove, path)
    return [step for step in removed if f"{commit_folder(step)}/{MANIFEST}" in sizes]


def rewind(store: Store, step: int) -> list[int]:
    """Remove everything after a step, newest first, so that those steps can be committed again.

    Args:
        store: the store of the run's commits.
        step: the last step that stays.

    Returns:
        The steps whose commits were removed.
    """
    sizes = store.retry(store.backend.list)
    removed = [newer for newer in _present(sizes) if newer > step]
    for newer in reversed(removed):
        remove(store, newer, sizes)
    return [newer for newer in removed if f"{commit_folder(newer)}/{MANIFEST}" in sizes]


def discard(store: Store, step: int) -> None:
    """Remove what this attempt wrote for a step that is not published. Files of other attempts stay.

    Args:
        store: the store of the run's commits, of this attempt.
        step: the step.
    """
    sizes = store.retry(store.backend.list, commit_folder(step))
    if f"{commit_folder(step)}/{MANIFEST}" not in sizes:
        remove(store, step, [path for path in sizes if f"-{store.attempt}" in path])


def remove(store: Store, step: int, paths: Iterable[str]) -> None:
    """Remove files of a commit, and its folder if it is empty then. Files that no store wrote stay.

    The manifest is removed first, so no manifest is ever without its shards.

    Args:
        store: the store of the run's commits.
        step: the step of the commit.
        paths: paths of stored files; those of other commits are ignored.
    """
    ours = [path for path in paths if path.startswith(commit_folder(step) + "/") and _is_ours(path)]
    manifest = f"{commit_folder(step)}/{MANIFEST}"
    if manifest in ours:
        store.retry(store.backend.remove, manifest, durable=True)
    _remove_all(store, [path for path in ours if path != manifest])
    store.retry(store.backend.remove_folder, commit_folder(step))


def _remove_all(store: Store, paths: Collection[str]) -> None:
    """Remove files. Those of a commit of many writers are removed many at a time."""
    store.many(lambda path: store.retry(store.backend.remove, path), paths)


def _is_ours(path: str) -> bool:
    """Whether a file in a commit's folder has a name that only a store gives."""
    name = path.partition("/")[2]
    return any(pattern.fullmatch(name) for pattern in (FILE_NAME, INDEX_NAME, DOCUMENT, HOLD))


def _sound(store: Store, sizes: dict[str, int], limit: int | None) -> dict[int, CommitManifest]:
    """The newest `limit` commits (all if None) without the problems of `Store.problems`, by step."""
    result: dict[int, CommitManifest] = {}
    for step in sorted(published_steps(sizes), reverse=True):
        if len(result) == limit:
            break
        try:
            commit = store.manifest(step)
        except CorruptCommit:
            continue
        if not store.problems(commit, sizes):
            result[step] = commit
    return result


def _present(sizes: dict[str, int]) -> list[int]:
    """Steps that have a folder, published or not, ascending."""
    names = {path.split("/")[0] for path in sizes if "/" in path}
    return sorted(int(match[1]) for name in names if (match := FOLDER.fullmatch(name)))


def _sweep(store: Store, step: int, sizes: dict[str, int], commit: CommitManifest) -> None:
    """Remove what interrupted attempts left in the folder of a published commit."""
    named = {f"{commit_folder(step)}/{name}" for name in (*commit.file_sizes, MANIFEST, EVALUATION)}
    left = [path for path in sizes if path.startswith(commit_folder(step) + "/") and path not in named]
    left = [path for path in left if _is_ours(path) and not HOLD.fullmatch(path.partition("/")[2])]
    _remove_all(store, left)
