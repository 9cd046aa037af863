"""The commit that a run goes on from. One whose commits are all damaged or gone does not begin anew in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.reverify import passed_over
from orchestrator.checkpoint.snapshots import newest_commit
from orchestrator.checkpoint.store import Store
from orchestrator.config.errors import InputError
from orchestrator.storage.row_line import METRICS
from orchestrator.storage.run_directory import ORIGIN, RunDir

HINT = "put a copy of one back, or begin anew in another run directory"


@dataclass(frozen=True)
class LastCommit:
    """The newest `commit` that is sound and that the run may go on from, a line of `notes` for each that was passed
    over; `unsound` says of each why it cannot be read. `left_out`: a sound one was not to be used."""

    commit: CommitManifest | None
    notes: list[str]
    unsound: dict[int, str]
    left_out: bool


def last_commit(
    stores: Sequence[Store], bad: Set[int], is_usable: Callable[[CommitManifest], bool]
) -> LastCommit:
    """The newest commit of the stores, the durable one last, but those of the steps `bad`, which are damaged, and those
    that are not usable."""
    notes, unsound = list[str](), dict.fromkeys(bad, "a rank found it damaged")
    at_most, left_out = None, False
    while True:
        found = newest_commit(stores, at_most, deep=False)
        unsound |= stores[-1].skipped
        skipped = found[2] if found else [f"step {step}: {why}" for step, why in stores[-1].skipped]
        notes += [note for note in map(passed_over, skipped) if note not in notes]
        if found is None:
            return LastCommit(None, notes, unsound, left_out)
        commit = found[1]
        if commit.step not in bad:
            if is_usable(commit):
                return LastCommit(commit, notes, unsound, left_out)
            left_out = True
        at_most = commit.step - 1


def refuse_anew(run: RunDir, newest: CommitManifest | None) -> None:
    """Raise InputError as `refuse_lost` if a run that is to go on would begin anew; `newest` is its commit, as far as
    one was known. A run that is done needs none."""
    store = Store(run.commits)
    if newest is None and store.latest(deep=False) is None:
        refuse_lost(run, dict(store.skipped))


def refuse_lost(run: RunDir, unsound: Mapping[int, str]) -> None:
    """Raise InputError if a run that has no sound commit has ever made one, before what begins anew removes what is
    left of it; `unsound` says of each step why it cannot be read. That of another run which it began with can be had
    from there again."""
    begun = int(run.read_json_or_empty(ORIGIN).get("step", 0))
    where = run.at("checkpoints")
    if ours := sorted((step, why) for step, why in unsound.items() if step > begun):
        told = "; ".join(f"step {step}: {why}" for step, why in ours)
        raise InputError(f"no commit of the run is sound ({told})", where, HINT)
    # The store is asked once more after the rows: a run at work may have made its first commit in between.
    if (step := _newest_published(run)) > begun and not Store(run.commits).steps():
        raise InputError(f"the commits of the run are gone, of which one was at step {step}", where, HINT)


def _newest_published(run: RunDir) -> int:
    """The newest commit in storage that a row tells of, 0 if none does; rows of what never was are gone. The steps at
    which the run has started do not count: it may have started from the memory of other nodes."""
    published = (
        save["step"]
        for row in run.log(METRICS).newest()
        for save in row.get("saves", ())
        if save["state"] == "published"
    )
    return next(published, 0)
