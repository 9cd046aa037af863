"""Find the commit that a run continues from. A run whose commits are all damaged or gone is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.peer_memory import PeerMemory, newest_commit
from orchestrator.checkpoint.reverify import passed_over
from orchestrator.config.errors import InputError
from orchestrator.storage.file_names import MANIFEST
from orchestrator.storage.row_line import METRICS
from orchestrator.storage.run_directory import ORIGIN, RunDir

HINT = "put a copy of one back, or start again in another run directory"


@dataclass(frozen=True)
class LastCommit:
    """The result of `last_commit`."""

    commit: CommitManifest | None
    """The newest sound commit that the run may continue from, None without one."""
    notes: list[str]
    """A line for each commit that was passed over."""
    unsound: dict[int, str]
    """Why a commit cannot be read, by step."""
    left_out: bool
    """Whether a sound commit was passed over because the run may not use it."""
    in_memory: bool = False
    """Whether the commit is a snapshot in the memory of peers."""


def last_commit(
    peers: PeerMemory | None,
    durable: Store,
    bad: Mapping[int, str],
    is_usable: Callable[[CommitManifest], bool],
) -> LastCommit:
    """Find the newest commit that is sound and usable.

    Args:
        peers: the memory of peers, None without.
        durable: the durable store.
        bad: why commits that are known to be damaged cannot be used, by step.
        is_usable: returns whether the run may continue from a commit.
    """
    notes: list[str] = []
    unsound = dict(bad)
    at_most = None
    left_out = False
    while True:
        newest = newest_commit(peers, durable, at_most)
        unsound |= durable.skipped
        skipped = newest[2] if newest else [f"step {step}: {why}" for step, why in durable.skipped]
        notes += [note for note in map(passed_over, skipped) if note not in notes]
        if newest is None:
            return LastCommit(None, notes, unsound, left_out)
        commit, in_memory, _ = newest
        if commit.step not in bad:
            if is_usable(commit):
                return LastCommit(commit, notes, unsound, left_out, in_memory)
            left_out = True
        at_most = commit.step - 1


def refuse_anew(run: RunDir, newest: CommitManifest | None) -> None:
    """Check that a run that had commits does not start from the beginning. Call it only for a run that will train.

    Args:
        run: the run directory.
        newest: the run's newest sound commit; None if the run has no sound commit.

    Raises:
        InputError: as `refuse_lost` does.
    """
    store = Store(run.commits)
    if newest is None and store.latest(deep=False) is None:
        refuse_lost(run, dict(store.skipped))


def refuse_lost(run: RunDir, unsound: Mapping[int, str]) -> None:
    """Raise InputError if a run without a sound commit ever made one. Starting again would remove what is left of it.

    A commit that was copied from another run does not count, because it can be copied again.

    Args:
        run: the run directory.
        unsound: why a commit cannot be read, by step.
    """
    first_step = int(run.read_json_or_empty(ORIGIN).get("step", 0))
    where = run.at("checkpoints")
    if ours := sorted((step, why) for step, why in unsound.items() if step > first_step):
        reasons = "; ".join(f"step {step}: {why}" for step, why in ours)
        raise InputError(f"no commit of the run is sound ({reasons})", where, HINT)
    # The store is listed after the rows are read, because a running job may make its first commit in between.
    if (step := _newest_published(run)) > first_step and not Store(run.commits).steps():
        problem = f"the checkpoints of the run are gone; one was at step {step} (no {MANIFEST} is left)"
        raise InputError(problem, where, HINT)


def _newest_published(run: RunDir) -> int:
    """The step of the newest commit that a row reports as published, 0 without one.

    The steps at which attempts started do not count, because an attempt may start from the memory of other nodes.
    """
    published = (
        save["step"]
        for row in run.log(METRICS).newest()
        for save in row.get("saves", ())
        if save["state"] == "published"
    )
    return next(published, 0)
